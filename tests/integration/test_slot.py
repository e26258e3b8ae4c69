import json
import os
import random
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import anyio
import pytest
from anyio import to_thread

from kernelpool.errors import ConfigurationError, SlotError
from kernelpool.profile import MIB, Limits
from kernelpool.quota import loops_below, mounts_below
from kernelpool.slot import Quota, Slot, SlotStore, quota_available

SMALL = Limits(disk_bytes=16 * MIB, inodes=512, file_bytes=16 * MIB)
ROOT = os.geteuid() == 0
needs_root = pytest.mark.skipif(not ROOT, reason="only root gives slots uids of their own")


@pytest.fixture
def state() -> Iterator[Path]:
    """A state directory with a path as short as sockets need, passable for every uid."""
    directory = Path(tempfile.mkdtemp(prefix="kp-"))
    directory.chmod(0o711)
    yield directory
    for point in mounts_below(directory / "slots"):
        subprocess.run(["umount", "-l", point], check=True)
    shutil.rmtree(directory)


@pytest.fixture(params=["image", "watch"])
async def store(request: pytest.FixtureRequest, state: Path) -> AsyncIterator[SlotStore]:
    quota: Quota = request.param
    if quota == "image":
        kind, why_not = await quota_available(state)
        if kind != "image":
            pytest.skip(f"no disk images here: {why_not}")
    store = await SlotStore.open(state, quota=quota)
    with anyio.fail_after(60):
        yield store
        await store.sweep(set())


async def do(call: Callable[..., Any], *args: object) -> Any:
    return await to_thread.run_sync(lambda: call(*args))


def as_code_of(slot: Slot, code: str) -> list[str]:
    """The command that runs Python code as what runs in the slot."""
    # The interpreter may lie where only root can read: load what is needed, then step down.
    drop = f"os.setgroups([]); os.setgid({slot.uid}); os.setuid({slot.uid})" if ROOT else ""
    prelude = f"import errno, os, socket, sys, time\n{drop}\n"
    return [sys.executable, "-I", "-c", prelude + textwrap.dedent(code)]


def run_as(slot: Slot, code: str, *, cwd: Path | None = None) -> str:
    """Run Python code as what runs in the slot."""
    done = subprocess.run(
        as_code_of(slot, code),
        cwd=cwd or slot.data,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def left_below(directory: Path) -> list[str]:
    """Whatever there is of any slot."""
    names = [path.name for path in directory.iterdir() if path.name != "next-uid"]
    names += [str(path) for path in mounts_below(directory)]
    return names + [f"{device} {image}" for device, image in loops_below(directory)]


async def test_a_slot_has_a_workspace_and_a_run_directory_of_its_uid(store: SlotStore) -> None:
    slot = await store.create(SMALL)
    for directory in (slot.data, slot.run):
        facts = await do(directory.stat)
        assert facts.st_uid == slot.uid
        assert stat.S_IMODE(facts.st_mode) == 0o700
    assert slot.quota == store.quota
    assert repr(store) == f"<SlotStore {store.quota}: 1 live>"
    await do(run_as, slot, "open('a.txt', 'w').write('x')")
    assert await do(os.listdir, slot.data) == ["a.txt"]
    assert await store.destroy(slot)
    assert await do(left_below, store.directory) == []
    assert await store.destroy(slot)


@needs_root
async def test_another_slot_and_other_people_cannot_look_in(store: SlotStore) -> None:
    mine, other = await store.create(SMALL), await store.create(SMALL)
    assert mine.uid != other.uid
    code = f"""
    import os
    for path in ({str(other.data)!r}, {str(other.run)!r}, {str(other.root / "spare")!r},
                 {str(store.directory / f"{other.id}.img")!r}, {str(store.directory)!r}):
        try:
            os.listdir(path) if os.path.isdir(path) else open(path)
        except OSError:
            continue
        print(path)
    """
    assert await do(run_as, mine, code) == ""


@needs_root
async def test_uids_are_not_used_again_soon_not_even_by_a_later_worker(state: Path) -> None:
    uids = []
    for _ in range(3):
        store = await SlotStore.open(state, quota="watch", uid_base=3_000_000, uid_count=5)
        slot = await store.create(SMALL)
        uids.append(slot.uid)
        await store.destroy(slot)
    assert len(set(uids)) == 3
    assert set(uids) <= set(range(3_000_000, 3_000_005))


@needs_root
async def test_a_used_up_uid_range_is_an_error_and_leaves_nothing(state: Path) -> None:
    store = await SlotStore.open(state, quota="watch", uid_base=3_000_000, uid_count=2)
    slots = [await store.create(SMALL) for _ in range(2)]
    with pytest.raises(SlotError, match="no uid is free"):
        await store.create(SMALL)
    assert len(await do(left_below, store.directory)) == 4
    await store.destroy(slots[0])
    assert (await store.create(SMALL)).uid == slots[0].uid


async def test_an_image_slot_that_is_full_says_enospc_and_keeps_what_it_has(
    store: SlotStore,
) -> None:
    if store.quota != "image":
        pytest.skip("only images end in ENOSPC")
    slot = await store.create(SMALL)
    code = """
    import errno, os
    open('kept.txt', 'w').write('kept')
    try:
        with open('big', 'wb') as file:
            while True:
                file.write(bytes(1 << 16)); file.flush()
    except OSError as error:
        print(error.errno == errno.ENOSPC)
    made = 0
    try:
        while True:
            open(f'empty-{made}', 'w').close(); made += 1
    except OSError as error:
        print(error.errno == errno.ENOSPC, made)
    """
    bytes_full, rest = (await do(run_as, slot, code)).splitlines()
    inodes_full, made = rest.split()
    assert (bytes_full, inodes_full) == ("True", "True")
    assert 400 < int(made) < 512
    use = await slot.disk_use()
    assert use.full
    assert not use.over
    assert use.limit_bytes <= SMALL.disk_bytes
    assert await do((slot.data / "kept.txt").read_text) == "kept"


async def test_a_full_slot_can_still_start_another_kernel(store: SlotStore) -> None:
    slot = await store.create(SMALL)
    await slot.fresh_run()
    await slot.take_run_back()
    if store.quota == "image":
        fill = """
        import os
        try:
            for n in range(10_000): open(f'{n}', 'w').close()
        except OSError: pass
        try:
            with open('0', 'wb') as file:
                while True: file.write(bytes(4096)); file.flush()
        except OSError: pass
        """
        await do(run_as, slot, fill)
    await slot.fresh_run()
    start = """
    import socket
    with open('connection.json', 'w') as file: file.write('x' * 500)
    for n in range(1, 6): socket.socket(socket.AF_UNIX).bind(f'k-{n}')
    with open('journal', 'ab') as file: file.write(bytes(100_000))
    """
    await do(lambda: run_as(slot, start, cwd=slot.run))


async def test_a_watched_slot_reports_what_is_over(state: Path) -> None:
    store = await SlotStore.open(state, quota="watch")
    slot = await store.create(SMALL)
    assert not (await slot.disk_use()).over
    await do(run_as, slot, "f = open('sparse', 'wb'); f.truncate(1 << 40)")
    assert not (await slot.disk_use()).over
    await do(run_as, slot, "import os; open('a','wb').write(bytes(9 << 20)); os.link('a', 'b')")
    use = await slot.disk_use()
    assert not use.over
    assert 9 * MIB <= use.bytes < 10 * MIB
    hide = "import os; os.mkdir('h'); open('h/b','wb').write(bytes(8 << 20)); os.chmod('h', 0)"
    await do(run_as, slot, hide)
    use = await slot.disk_use()
    assert use.over
    assert use.full
    await store.destroy(slot)
    slot = await store.create(SMALL)
    await do(run_as, slot, "for n in range(600): open(str(n), 'w').close()")
    assert (await slot.disk_use()).over
    await store.destroy(slot)
    slot = await store.create(Limits(disk_bytes=64 * MIB, inodes=10_000))
    await do(run_as, slot, DEEP_TREE)
    assert (await slot.disk_use()).over
    await store.destroy(slot)
    assert await do(left_below, store.directory) == []


DEEP_TREE = """
import os
for n in range(1200):
    os.mkdir('d' * 200); os.chdir('d' * 200)
    open('file', 'w').close()
"""


async def test_the_run_directory_is_taken_back_and_given_again(store: SlotStore) -> None:
    slot = await store.create(SMALL)
    await do(lambda: run_as(slot, "open('journal', 'w').write('old')", cwd=slot.run))
    await slot.take_run_back()
    if ROOT:
        code = """
        import os, socket
        open('journal', 'a').write('goes on')
        for call in (lambda: open('new', 'w'), lambda: os.unlink('journal'),
                     lambda: os.symlink('/etc', 'k-1'), lambda: os.rename('journal', 'j'),
                     lambda: os.chmod('.', 0o777), lambda: os.listdir('.')):
            try:
                call()
            except PermissionError:
                continue
            print('allowed')
        """
        assert await do(lambda: run_as(slot, code, cwd=slot.run)) == ""
    await slot.fresh_run()
    assert await do(os.listdir, slot.run) == []
    assert (await do(slot.run.stat)).st_uid == slot.uid


async def test_a_fresh_run_directory_removes_links_and_deep_trees_and_follows_none(
    store: SlotStore, tmp_path: Path
) -> None:
    slot = await store.create(Limits(disk_bytes=64 * MIB, inodes=20_000))
    victim = tmp_path / "victim"
    await do(victim.mkdir)
    await do((victim / "precious").touch)
    plant = f"""
    import os, socket
    os.symlink({str(victim)!r}, 'link'); os.symlink('.', 'self')
    os.mkfifo('fifo'); socket.socket(socket.AF_UNIX).bind('k-1')
    open(b'\\xff\\xfe', 'w').close(); open('new\\nline', 'w').close()
    os.mkdir('locked'); os.symlink({str(victim)!r}, 'locked/link'); os.mkdir('locked/below')
    os.chmod('locked/below', 0); os.chmod('locked', 0)
    """
    await do(lambda: run_as(slot, plant + textwrap.indent(DEEP_TREE, "    "), cwd=slot.run))
    with anyio.fail_after(20):
        await slot.fresh_run()
    assert await do(os.listdir, slot.run) == []
    assert await do(os.listdir, victim) == ["precious"]


async def test_a_planted_run_directory_link_is_never_followed(store: SlotStore) -> None:
    slot = await store.create(SMALL)
    if not ROOT:
        pytest.skip("without root the code cannot be kept out of its own slot's directory")
    # The slot's root belongs to root, so the code cannot swap `run` itself.
    code = """
    import os
    try:
        os.rename('../run', '../gone')
    except PermissionError:
        print('refused')
    """
    assert await do(run_as, slot, code) == "refused\n"


async def test_a_slot_is_destroyed_while_a_process_still_holds_its_files(store: SlotStore) -> None:
    slot = await store.create(SMALL)
    code = "f = open('held', 'w'); print('up', flush=True); time.sleep(600)"
    holder = await anyio.open_process(as_code_of(slot, code), cwd=slot.data, stderr=None)
    assert holder.stdout is not None
    assert await holder.stdout.receive() == b"up\n"
    with anyio.fail_after(20):
        freed = await store.destroy(slot)
    assert freed is (store.quota == "watch")
    names = [path.name for path in await do(list, store.directory.iterdir())]
    assert set(names) <= {"next-uid"}
    holder.kill()
    await holder.wait()
    with anyio.fail_after(10):
        while await do(left_below, store.directory):
            await to_thread.run_sync(time.sleep, 0.01)
    await holder.aclose()


async def test_a_slot_mounted_in_another_namespace_is_not_said_to_be_freed_before_it_is(
    store: SlotStore,
) -> None:
    if store.quota != "image":
        pytest.skip("only images are mounted")
    slot = await store.create(SMALL)
    holder = await anyio.open_process(
        ["unshare", "--mount", "--propagation", "private", "sh", "-c", "echo up; exec sleep 600"],
        stderr=None,
    )
    assert holder.stdout is not None
    assert await holder.stdout.receive() == b"up\n"
    async with anyio.create_task_group() as tasks:

        async def end_soon() -> None:
            # The mount is gone from our namespace first; only then does the other one go.
            while await do(mounts_below, store.directory):
                await to_thread.run_sync(time.sleep, 0.01)
            holder.kill()

        tasks.start_soon(end_soon)
        assert await store.destroy(slot)
    assert await do(left_below, store.directory) == []
    await holder.wait()
    await holder.aclose()


async def test_a_later_worker_adopts_what_it_knows_and_sweeps_the_rest(store: SlotStore) -> None:
    kept, lost = await store.create(SMALL), await store.create(SMALL)
    await do((kept.data / "a.txt").write_text, "a")
    later = await SlotStore.open(store.directory.parent, quota=store.quota)
    assert await later.sweep({kept.id}) == [lost.id]
    adopted = await later.adopt(kept.id)
    assert adopted == kept
    assert adopted is not None
    assert await do((adopted.data / "a.txt").read_text) == "a"
    assert await later.sweep(set()) == []
    assert await later.destroy(adopted)
    assert await do(left_below, store.directory) == []
    for unknown in (kept.id, lost.id, "../../etc", "next-uid", ""):
        assert await later.adopt(unknown) is None


@pytest.mark.parametrize("record", ["", "{", "[]", '{"uid": "x"}', '{"uid": 1, "quota": "image"}'])
async def test_a_broken_record_is_swept_not_adopted(store: SlotStore, record: str) -> None:
    slot = await store.create(SMALL)
    await do((store.directory / f"{slot.id}.json").write_text, record)
    later = await SlotStore.open(store.directory.parent, quota=store.quota)
    assert await later.adopt(slot.id) is None
    assert await later.sweep(set()) == [slot.id]
    assert await do(left_below, store.directory) == []


async def test_a_record_with_unknown_limits_of_another_version_is_adopted(
    store: SlotStore,
) -> None:
    slot = await store.create(SMALL)
    path = store.directory / f"{slot.id}.json"
    record = json.loads(await do(path.read_text))
    record["limits"]["novelty"] = 1
    await do(path.write_text, json.dumps(record))
    later = await SlotStore.open(store.directory.parent, quota=store.quota)
    assert await later.adopt(slot.id) == slot


async def test_files_of_others_in_the_directory_are_left_alone(store: SlotStore) -> None:
    foreign = store.directory / "notes.txt"
    await do(foreign.touch)
    assert await store.sweep(set()) == []
    assert await do(foreign.exists)
    await do(foreign.unlink)


async def test_many_slots_are_made_at_once(store: SlotStore) -> None:
    slots: list[Slot] = []

    async def make() -> None:
        slots.append(await store.create(SMALL))

    async with anyio.create_task_group() as tasks:
        for _ in range(16):
            tasks.start_soon(make)
    assert len({slot.id for slot in slots}) == 16
    if ROOT:
        assert len({slot.uid for slot in slots}) == 16
    async with anyio.create_task_group() as tasks:
        for slot in slots:
            tasks.start_soon(store.destroy, slot)
    assert await do(left_below, store.directory) == []


async def test_a_cancelled_create_leaves_nothing_that_a_sweep_would_miss(store: SlotStore) -> None:
    with anyio.move_on_after(0):
        await store.create(SMALL)
    later = await SlotStore.open(store.directory.parent, quota=store.quota)
    await later.sweep(set())
    assert await do(left_below, store.directory) == []


async def test_sizes_that_cannot_be_are_an_error_and_leave_nothing(store: SlotStore) -> None:
    if store.quota != "image":
        pytest.skip("a watched slot takes any size")
    with pytest.raises(SlotError, match=r"mkfs\.ext4 failed"):
        await store.create(Limits(disk_bytes=4096, inodes=1 << 30))
    assert await do(left_below, store.directory) == []


async def test_a_state_directory_with_too_long_a_path_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="bytes too long"):
        await SlotStore.open(tmp_path / ("x" * 90))


async def test_a_state_directory_that_cannot_be_made_is_refused(state: Path) -> None:
    await do((state / "file").touch)
    with pytest.raises(ConfigurationError, match="cannot be used"):
        await SlotStore.open(state / "file")


async def test_the_longest_socket_can_be_bound(store: SlotStore) -> None:
    slot = await store.create(SMALL)
    with socket.socket(socket.AF_UNIX) as each:
        each.bind(os.fspath(slot.run / "k-5"))


KILLED_AT_EVERY_STEP = """
import os, signal, sys
from pathlib import Path
from kernelpool.profile import Limits
from kernelpool.quota import loops_below, mounts_below
from kernelpool.slot import SlotStore

state, quota = Path(sys.argv[1]), sys.argv[2]
limits = Limits(disk_bytes=4 << 20, inodes=128)
directory = state / "slots"
directory.mkdir(mode=0o711)
step = 0
while True:
    step += 1
    child = os.fork()
    if not child:
        left = step
        def hook(event, args):
            global left
            left -= 1
            if not left:
                os.kill(os.getpid(), signal.SIGKILL)
        store = SlotStore(directory, quota, range(3_000_000, 4_000_000))
        sys.addaudithook(hook)
        slot = store._create(limits)
        slot._fresh_run()
        slot._take_run_back()
        slot._fresh_run()
        store._destroy(slot.id)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    store = SlotStore(directory, quota, range(3_000_000, 4_000_000))
    store._sweep(set())
    left = [p.name for p in directory.iterdir() if p.name != "next-uid"]
    left += mounts_below(directory)
    left += loops_below(directory)
    assert not left, (step, left)
    if status == 0:
        break
    assert os.WTERMSIG(status) == signal.SIGKILL
print(step)
"""


async def test_a_worker_killed_at_any_step_leaves_nothing_behind_a_sweep(store: SlotStore) -> None:
    state = store.directory.parent / "s"
    await do(state.mkdir)
    with anyio.fail_after(60):
        done = await anyio.run_process(
            [sys.executable, "-c", KILLED_AT_EVERY_STEP, os.fspath(state), store.quota],
            stderr=None,
        )
    assert int(done.stdout) > 40


CHURN = """
import sys, anyio
from pathlib import Path
from kernelpool.profile import Limits
from kernelpool.slot import SlotStore

async def churn(store):
    while True:
        slot = await store.create(Limits(disk_bytes=4 << 20, inodes=128))
        await slot.fresh_run()
        await slot.take_run_back()
        await store.destroy(slot)

async def main():
    store = await SlotStore.open(Path(sys.argv[1]), quota=sys.argv[2])
    print("up", flush=True)
    async with anyio.create_task_group() as tasks:
        for _ in range(3):
            tasks.start_soon(churn, store)

anyio.run(main)
"""


async def test_a_busy_worker_killed_at_any_moment_leaves_nothing_behind_a_sweep(
    store: SlotStore,
) -> None:
    for _ in range(4):
        command = [sys.executable, "-c", CHURN, os.fspath(store.directory.parent), store.quota]
        worker = await anyio.open_process(command, stderr=None)
        assert worker.stdout is not None
        await worker.stdout.receive()
        await anyio.sleep(random.uniform(0.01, 0.1))
        worker.send_signal(signal.SIGKILL)
        await worker.aclose()
        with anyio.fail_after(10):
            # A mkfs that outlived its worker may hold its deleted image for another moment.
            await store.sweep(set())
            while await do(left_below, store.directory):
                await store.sweep(set())


UNPRIVILEGED = """
import os, sys, anyio
from pathlib import Path
from kernelpool.profile import Limits
from kernelpool.slot import SlotStore, quota_available

async def main():
    kind, why = await quota_available(Path(sys.argv[1]))
    assert kind == "watch" and "root" in why, why
    store = await SlotStore.open(Path(sys.argv[1]))
    limits = Limits(disk_bytes=1 << 20, inodes=512)
    slot = await store.create(limits)
    assert slot.uid == os.getuid() and slot.quota == "watch"
    await slot.fresh_run()
    await slot.take_run_back()
    os.makedirs(slot.run / "a/b/c")
    for path in ("a/b/c", "a/b", "a"):
        os.chmod(slot.run / path, 0)
    await slot.fresh_run()
    assert os.listdir(slot.run) == []
    os.mkdir(slot.data / "hidden")
    (slot.data / "hidden/big").write_bytes(bytes(2 << 20))
    os.chmod(slot.data / "hidden", 0)
    assert (await slot.disk_use()).over
    later = await SlotStore.open(Path(sys.argv[1]))
    assert await later.adopt(slot.id) == slot
    os.chmod(slot.data / "hidden", 0)
    os.chmod(slot.data, 0)
    assert await later.destroy(slot)
    assert os.listdir(store.directory) == []
    print("done")

async def load():
    await anyio.to_thread.run_sync(lambda: None)
    async with anyio.create_task_group():
        pass

anyio.run(load)
if os.geteuid() == 0:
    os.setgroups([]); os.setgid(65534); os.setuid(65534)
anyio.run(main)
"""


async def test_an_ordinary_user_gets_watched_slots(state: Path) -> None:
    if ROOT:
        await do(os.chown, state, 65534, 65534)
    done = await anyio.run_process(
        [sys.executable, "-c", UNPRIVILEGED, os.fspath(state)], stderr=None, check=False
    )
    assert done.stdout == b"done\n"
