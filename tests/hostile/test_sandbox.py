"""Code that tries to get out of a bubblewrap sandbox, to look behind it, or to use up the host."""

from __future__ import annotations

import json
import os
import secrets
import select
import shutil
import signal
import tempfile
import textwrap
import venv
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import anyio
import pytest
from anyio import to_thread
from blockbuster import BlockBuster

from kernelpool.errors import EngineError
from kernelpool.profile import MIB, Limits, Profile
from kernelpool.runtime import Exit, Launch
from kernelpool.sandbox import BubblewrapRuntime, Sandbox

ROOT: Final = os.geteuid() == 0
LIMITS: Final = Limits(
    memory_bytes=256 * MIB, tmp_bytes=16 * MIB, processes=40, file_bytes=32 * MIB
)
SECRET: Final = "the-key-of-the-server"

PRELUDE: Final = """
import ctypes, errno, json, os, signal, socket, subprocess, sys, time
libc = ctypes.CDLL(None, use_errno=True)
def say(value): print("\\n" + json.dumps(value), flush=True)
def refused(result): return errno.errorcode[ctypes.get_errno()] if result < 0 else None
"""


class Cell:
    """A runtime and one slot to attack from."""

    def __init__(self, directory: Path, image: Path, *, control_groups: bool) -> None:
        self.directory = directory
        self.profile = Profile(runtime="bubblewrap", image=str(image), limits=LIMITS)
        self.runtime = BubblewrapRuntime(
            state_directory=directory / "state", control_groups=control_groups
        )
        self.uid = 2_960_000 if ROOT else os.getuid()

    async def start(self, code: str, limits: Limits = LIMITS) -> Sandbox:
        return await self.runtime.launch(
            Launch(
                name=f"hostile-{secrets.token_hex(4)}",
                owner="hostile",
                slot_id="one",
                profile=replace(self.profile, limits=limits),
                argv=("python", "-c", PRELUDE + textwrap.dedent(code)),
                environment={},
                uid=self.uid,
                data_directory=self.directory / "data",
                run_directory=self.directory / "run",
            )
        )

    async def run(self, code: str, limits: Limits = LIMITS) -> Any:
        """What the code says last."""
        sandbox = await self.start(code, limits)
        ended, output = await sandbox.wait(), await sandbox.output()
        await sandbox.remove()
        assert ended == Exit(0, out_of_memory=False), output
        return json.loads(output.strip().splitlines()[-1])


@pytest.fixture(scope="module")
def image() -> Iterator[Path]:
    """A small environment of the Python that runs the tests."""
    directory = Path(tempfile.mkdtemp(prefix="kp-environment-"))
    directory.chmod(0o755)
    venv.create(directory / "python", symlinks=True, with_pip=False)
    yield directory / "python"
    shutil.rmtree(directory)


@pytest.fixture(params=[True, False], ids=["control-groups", "watching"])
async def cell(
    request: pytest.FixtureRequest,
    image: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    _no_blocking_calls: BlockBuster,
) -> AsyncIterator[Cell]:
    """A fresh slot, under control groups and without them."""
    monkeypatch.setenv("KERNELPOOL_MODEL_API_KEY", SECRET)
    _no_blocking_calls.functions["os.listdir"].can_block_in("kernelpool/keeper.py", "children")
    cell = Cell(tmp_path, image, control_groups=request.param)

    def make_directories() -> None:
        for name in ("data", "run"):
            (tmp_path / name).mkdir()
            if ROOT:
                os.chown(tmp_path / name, cell.uid, cell.uid)

    await to_thread.run_sync(make_directories)
    async with cell.runtime:
        with anyio.fail_after(60):
            yield cell
        for found in await cell.runtime.owned():
            await cell.runtime.discard(found.id)


async def test_no_process_in_reach_carries_the_environment_of_the_server(cell: Cell) -> None:
    found = await cell.run(
        """
        wanted = bytes(SPELLED)
        found = []
        for pid in filter(str.isdigit, os.listdir("/proc")):
            for name in ("environ", "cmdline", "mem"):
                try:
                    with open(f"/proc/{pid}/{name}", "rb") as file:
                        data = file.read() if name != "mem" else b""
                        for area in open(f"/proc/{pid}/maps") if name == "mem" else ():
                            place, rights, *_ = area.split()
                            if rights.startswith("rw") and pid != str(os.getpid()):
                                start, end = (int(x, 16) for x in place.split("-"))
                                file.seek(start)
                                data += file.read(end - start)
                    if wanted in data:
                        found.append([pid, name])
                except OSError:
                    pass
        say([found, open("/proc/1/environ").read()])
        """.replace("SPELLED", str(list(SECRET.encode())))
    )

    assert found == [[], ""]


async def test_only_standard_streams_are_inherited_and_no_terminal(cell: Cell) -> None:
    inherited = await cell.run(
        """
        held = {}
        for name in os.listdir("/proc/self/fd"):
            try:
                held[name] = os.readlink(f"/proc/self/fd/{name}").partition(":")[0]
            except OSError:
                pass
        try:
            os.open("/dev/tty", os.O_RDWR)
        except OSError as error:
            held["tty"] = errno.errorcode[error.errno]
        say(held)
        """
    )

    assert inherited == {"0": "/dev/null", "1": "pipe", "2": "pipe", "tty": "ENXIO"}


async def test_calls_that_reach_around_namespaces_are_refused(cell: Cell) -> None:
    answers = await cell.run(
        """
        answers = {
            "user namespace": refused(libc.unshare(0x10000000)),
            "mount namespace": refused(libc.unshare(0x00020000)),
            "mount": refused(libc.mount(b"none", b"/tmp", b"tmpfs", 0, None)),
            "remount": refused(libc.mount(b"none", b"/usr", None, 32 | 4096, None)),
            "umount": refused(libc.umount2(b"/tmp", 2)),
            "ptrace": refused(libc.ptrace(16, 1, 0, 0)),
            "chroot": refused(libc.chroot(b"/tmp")),
            "keys": refused(libc.syscall(250, 0, -3, 0)) if os.uname().machine == "x86_64"
                else "EPERM",
        }
        for family, name in ((40, "vsock"), (38, "alg"), (17, "packet")):
            try:
                socket.socket(family, socket.SOCK_STREAM if family != 17 else socket.SOCK_RAW)
            except OSError as error:
                answers[name] = errno.errorcode[error.errno]
        child = subprocess.run(["unshare", "-Ur", "true"], stderr=subprocess.DEVNULL)
        answers["tool"] = "EPERM" if child.returncode else None
        say(answers)
        """
    )

    assert set(answers.values()) <= {"EPERM", "EAFNOSUPPORT"}
    assert len(answers) == 12


async def test_set_uid_bits_and_devices_mean_nothing_on_any_mount(cell: Cell) -> None:
    mounts, uid, error = await cell.run(
        """
        mounts = {}
        for line in open("/proc/self/mountinfo"):
            fields = line.split()
            mounts[fields[4]] = fields[5].split(",")
        try:
            os.setuid(0)
        except OSError as refusal:
            error = errno.errorcode[refusal.errno]
        say([mounts, os.geteuid(), error])
        """
    )

    assert [place for place, options in mounts.items() if "nosuid" not in options] == []
    devices = {place for place, options in mounts.items() if "nodev" not in options}
    assert devices == {
        *(f"/dev/{name}" for name in ("null", "zero", "full", "random", "urandom", "tty")),
        "/dev/pts",
    }
    assert (uid, error) == (cell.uid, "EINVAL")


async def test_the_sandbox_cannot_end_or_stop_its_own_init(cell: Cell) -> None:
    alive = await cell.run(
        """
        for number in (signal.SIGKILL, signal.SIGSTOP, signal.SIGTERM, signal.SIGINT):
            os.kill(1, number)
        time.sleep(0.1)
        child = os.fork()
        if child == 0:
            os._exit(4)
        say([os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]),
             open("/proc/1/stat").read().split()[2]])
        """
    )

    assert alive == [4, "S"]


async def test_a_kernel_cannot_forge_how_it_ended(cell: Cell) -> None:
    sandbox = await cell.start(
        """
        for pid in (1, os.getpid()):
            for name in os.listdir(f"/proc/{pid}/fd"):
                try:
                    with open(f"/proc/{pid}/fd/{name}", "wb", buffering=0) as file:
                        file.write(b'\\n{ "exit-code": 0 }\\n{"started": true}\\n')
                except OSError:
                    pass
        os._exit(9)
        """
    )

    assert (await sandbox.wait()).exit_code == 9


async def test_a_flood_of_output_neither_fills_the_host_nor_stops_the_code(cell: Cell) -> None:
    sandbox = await cell.start(
        """
        block = b"x" * 2**20
        for _ in range(100):
            os.write(1, block)
        os.write(2, b"the end")
        """
    )

    ended = await sandbox.wait()
    directory = cell.directory / "state" / sandbox.id
    sizes = await to_thread.run_sync(
        lambda: sum(path.stat().st_size for path in directory.rglob("*"))
    )
    assert ended.exit_code == 0
    assert (await sandbox.output()).endswith("the end")
    assert sizes < 100_000


async def test_a_fork_bomb_ends_with_its_sandbox(cell: Cell) -> None:
    sandbox = await cell.start(
        """
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        while True:
            try:
                os.fork()
                os.setsid()
            except OSError:
                pass
        """
    )

    await anyio.sleep(0.5)
    with anyio.fail_after(10):
        await sandbox.kill()
    assert sandbox.exit is not None
    assert sandbox.exit.signal == signal.SIGKILL


async def test_space_outside_the_two_directories_is_bounded(cell: Cell) -> None:
    written = await cell.run(
        """
        written = {}
        for directory in ("/tmp", "/dev/shm"):
            path, size = f"{directory}/fill", 0
            with open(path, "wb", buffering=0) as file:
                try:
                    while size < 2**26:
                        size += file.write(b"x" * 2**20)
                except OSError as error:
                    written[directory] = [size, errno.errorcode[error.errno]]
            os.unlink(path)
        for directory in ("/", "/dev", "/run", "/mnt", "/etc", "/usr"):
            try:
                os.mkdir(f"{directory}/made")
            except OSError as error:
                written[directory] = errno.errorcode[error.errno]
        say(written)
        """
    )

    temporary = [LIMITS.tmp_bytes, "ENOSPC"]
    assert written.pop("/tmp") == written.pop("/dev/shm") == temporary
    assert set(written.values()) == {"EROFS"}
    assert len(written) == 6


async def test_memory_that_belongs_to_no_process_is_bounded_too(cell: Cell) -> None:
    sandbox = await cell.start(
        """
        held = []
        try:
            while len(held) < 20:
                held.append(os.memfd_create("hidden"))
                for _ in range(30):
                    os.write(held[-1], b"x" * 2**20)
        except PermissionError:
            sys.exit(77)
        """
    )

    ended = await sandbox.wait()
    if cell.runtime.capabilities.memory_limit:
        assert (ended.exit_code, ended.out_of_memory) == (137, True)
    else:
        assert ended.exit_code == 77


async def test_what_the_worker_ignores_is_not_ignored_inside(
    cell: Cell, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        ignored = await cell.run(
            """
            status = dict(l.split(":\\t") for l in open("/proc/1/status").read().splitlines())
            ordinary = int(status["SigIgn"], 16) & 0x7fffffff
            say([ordinary, signal.getsignal(signal.SIGINT).__name__])
            """
        )
    finally:
        signal.signal(signal.SIGINT, before)

    assert ignored == [0, "default_int_handler"]


async def test_a_sandbox_ends_with_its_keeper(cell: Cell) -> None:
    sandbox = await cell.start("time.sleep(3600)")
    state = cell.runtime.state_of(sandbox.id)

    os.kill(state["keeper"][0], signal.SIGKILL)
    ended = await sandbox.wait()

    assert ended == Exit(None, out_of_memory=False)
    await sandbox.remove()
    assert not await to_thread.run_sync(Path(f"/proc/{state['init'][0]}/exe").exists)


async def test_a_sandbox_ends_with_its_keeper_when_no_worker_is_there(cell: Cell) -> None:
    control_groups = cell.runtime.capabilities.memory_limit
    earlier = Cell(cell.directory, Path(cell.profile.image), control_groups=control_groups)
    async with earlier.runtime:
        sandbox = await earlier.start("time.sleep(3600)")
    state = cell.runtime.state_of(sandbox.id)
    init = os.pidfd_open(state["init"][0])

    os.kill(state["keeper"][0], signal.SIGKILL)

    ended, _, _ = await to_thread.run_sync(select.select, [init], [], [], 10)
    os.close(init)
    await to_thread.run_sync(os.waitpid, state["keeper"][0], 0)
    assert ended
    assert [owned.running for owned in await cell.runtime.owned()] == [False]
    with pytest.raises(EngineError, match="adopt"):
        await sandbox.kill()


async def test_a_reused_process_id_is_never_taken_for_a_sandbox(cell: Cell) -> None:
    directory = cell.directory / "state" / "left-behind"

    def leave_behind() -> None:
        directory.mkdir()
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        facts = {"owner": "gone", "slot_id": "s", "boot": boot}
        (directory / "launch").write_text(json.dumps(facts), encoding="utf-8")
        own = [os.getpid(), 1]
        (directory / "state").write_text(json.dumps({"keeper": own, "init": own}), encoding="utf-8")

    await to_thread.run_sync(leave_behind)

    assert await cell.runtime.adopt("left-behind") is None
    assert [owned.running for owned in await cell.runtime.owned()] == [False]
    await cell.runtime.discard("left-behind")
    assert await cell.runtime.owned() == []


@pytest.mark.parametrize("name", ["../data", "", "a/b", ".", "A"])
async def test_a_name_cannot_lead_out_of_the_state_directory(cell: Cell, name: str) -> None:
    with pytest.raises(Exception, match="not the name of a sandbox"):
        await cell.runtime.discard(name)
    assert await to_thread.run_sync((cell.directory / "data").is_dir)
