"""Workspaces against code that plants links, special files, floods, and swaps them as we look."""

import contextlib
import errno
import os
import shutil
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import anyio
import pytest
from anyio import to_thread

from kernelpool import beneath
from kernelpool.errors import FileMissing, NameRefused, WorkspaceError
from kernelpool.profile import MIB, Limits
from kernelpool.slot import Slot, SlotStore
from kernelpool.workspace import OpenFile, Workspace

ROOT = os.geteuid() == 0
ATTEMPTS = 300


@pytest.fixture
def state() -> Iterator[Path]:
    directory = Path(tempfile.mkdtemp(prefix="kp-"))
    directory.chmod(0o711)
    yield directory
    shutil.rmtree(directory)


@pytest.fixture
async def slot(state: Path) -> AsyncIterator[Slot]:
    """A slot of the best kind there is here."""
    store = await SlotStore.open(state)
    slot = await store.create(Limits(disk_bytes=256 * MIB, inodes=60_000))
    with anyio.fail_after(100):
        yield slot
        await store.destroy(slot)


@pytest.fixture
def workspace(slot: Slot) -> Workspace:
    return Workspace(slot.data, slot.uid)


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    """A directory that anyone may write to, with a file that nobody should see."""
    directory = tmp_path / "outside"
    directory.mkdir()
    directory.chmod(0o777)
    (directory / "file").write_text("secret", encoding="utf-8")
    (directory / "file").chmod(0o666)
    return directory


@pytest.fixture(params=["openat2", "walk"], autouse=True)
def _way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ways of opening, as a kernel or seccomp filter without openat2 would have it."""

    def refused(directory: int, path: str, flags: int) -> int:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    if request.param == "walk":
        monkeypatch.setattr(beneath, "openat2", refused)


async def do(call: Callable[..., Any], *args: object) -> Any:
    return await to_thread.run_sync(lambda: call(*args))


def command(slot: Slot, code: str) -> list[str]:
    """Python code as what runs in the slot."""
    # The interpreter may lie where only root can read: load what is needed, then step down.
    drop = f"os.setgroups([]); os.setgid({slot.uid}); os.setuid({slot.uid})" if ROOT else ""
    prelude = f"import ctypes, errno, fcntl, itertools, os, signal, socket, sys, time\n{drop}\n"
    return [sys.executable, "-I", "-c", prelude + textwrap.dedent(code)]


async def plant(slot: Slot, code: str) -> None:
    """Run code in the slot to its end."""
    done = await do(
        lambda: subprocess.run(
            command(slot, code), cwd=slot.data, capture_output=True, text=True, check=False
        )
    )
    assert done.returncode == 0, done.stderr


@contextlib.asynccontextmanager
async def running(slot: Slot, code: str) -> AsyncIterator[None]:
    """Code that says `up` and then goes on in the slot while the body runs."""
    process = await anyio.open_process(command(slot, code), cwd=slot.data, stderr=None)
    async with process:
        assert process.stdout is not None
        assert await process.stdout.receive() == b"up\n"
        try:
            yield
            assert process.returncode is None, "the hostile code ended by itself"
        finally:
            if process.returncode is None:
                process.kill()


async def content(workspace: Workspace, path: str) -> bytes:
    async with await workspace.open(path) as file:
        return b"".join([piece async for piece in file.chunks()])


async def test_planted_links_lead_nowhere(slot: Slot, workspace: Workspace, outside: Path) -> None:
    await plant(
        slot,
        f"""
        os.symlink('/etc/passwd', 'leak.txt')
        os.symlink({str(outside)!r}, 'dir')
        os.symlink('/proc/self', 'proc')
        os.symlink('real', 'inner'); open('real', 'w').write('mine')
        """,
    )
    for path in ("leak.txt", "dir/file", "proc/environ", "inner"):
        with pytest.raises(FileMissing):
            await workspace.open(path)
        with pytest.raises(FileMissing):
            await workspace.remove(path)
    for path in ("dir/new", "dir/sub/new"):
        with pytest.raises(NameRefused):
            await workspace.copy_in(path, b"x")
    assert set((await workspace.scan()).files) == {"real"}
    # A link in the place of an upload is replaced; what it pointed at stays as it was.
    await workspace.copy_in("inner", b"upload")
    assert await content(workspace, "inner") == b"upload"
    assert await content(workspace, "real") == b"mine"
    assert await do(os.listdir, outside) == ["file"]


async def test_a_directory_swapped_for_a_link_as_we_look_leads_nowhere(
    slot: Slot, workspace: Workspace, outside: Path
) -> None:
    swapper = f"""
    os.mkdir('d'); open('d/file', 'w').write('mine'); os.symlink({str(outside)!r}, 'link')
    print('up', flush=True)
    exchange = ctypes.CDLL(None).renameat2
    while True:
        exchange(-100, b'd', -100, b'link', 2)
    """
    read = 0
    async with running(slot, swapper):
        for number in range(ATTEMPTS):
            with contextlib.suppress(WorkspaceError):
                assert await content(workspace, "d/file") == b"mine"
                read += 1
            with contextlib.suppress(WorkspaceError):
                await workspace.copy_in(f"d/{number}", b"x")
            with contextlib.suppress(WorkspaceError):
                await workspace.remove(f"d/{number}")
            if not number % 10:
                files = (await workspace.scan()).files
                assert all(size != len("secret") for _, size, _ in files.values())
    assert read
    assert await do(os.listdir, outside) == ["file"]
    assert await do((outside / "file").read_text) == "secret"


async def test_a_file_swapped_for_a_link_or_a_fifo_as_we_look_is_never_followed(
    slot: Slot, workspace: Workspace, outside: Path
) -> None:
    swapper = f"""
    os.symlink({str(outside / "file")!r}, 'link')
    os.mkfifo('fifo'); open('real', 'w').write('mine')
    print('up', flush=True)
    while True:
        for name in ('link', 'fifo', 'real'):
            os.link(name, 'next', follow_symlinks=False); os.rename('next', 'target')
            try: os.unlink('next')
            except FileNotFoundError: pass
    """
    async with running(slot, swapper):
        for number in range(ATTEMPTS):
            with contextlib.suppress(WorkspaceError):
                assert await content(workspace, "target") in {b"mine", b"upload"}
            if not number % 10:
                files = (await workspace.scan()).files
                assert all(
                    size != len("secret") or p == "target" for p, (_, size, _) in files.items()
                )
                with contextlib.suppress(WorkspaceError):
                    await workspace.copy_in("target", b"upload")
    assert await do((outside / "file").read_text) == "secret"


async def test_uploads_meet_code_that_grabs_every_new_name(
    slot: Slot, workspace: Workspace, outside: Path
) -> None:
    grabber = f"""
    print('up', flush=True)
    while True:
        for name in os.listdir('.'):
            try:
                os.rename(name, 'grabbed')
                os.symlink({str(outside / "file")!r}, name)
                os.unlink(name) if name.startswith('.') else None
            except OSError: pass
    """
    async with running(slot, grabber):
        for number in range(ATTEMPTS):
            with contextlib.suppress(WorkspaceError):
                await workspace.copy_in(f"{number % 3}", b"upload")
    assert await do((outside / "file").read_text) == "secret"
    assert await do(os.listdir, outside) == ["file"]


async def test_special_files_are_neither_listed_nor_opened_nor_waited_for(
    slot: Slot, workspace: Workspace
) -> None:
    await plant(
        slot,
        "os.mkfifo('fifo'); socket.socket(socket.AF_UNIX).bind('socket'); open('real', 'w')",
    )
    names = ["fifo", "socket"]
    if ROOT:
        await do(os.mknod, slot.data / "null", 0o20666, os.makedev(1, 3))
        names.append("null")
    with anyio.fail_after(5):
        for name in names:
            with pytest.raises(FileMissing):
                await workspace.open(name)
            with pytest.raises(FileMissing):
                await workspace.remove(name)
        assert set((await workspace.scan()).files) == {"real"}
        for name in names:
            await workspace.copy_in(name, b"replaced")
            assert await content(workspace, name) == b"replaced"


async def test_a_lease_on_a_file_holds_nobody_up(slot: Slot, workspace: Workspace) -> None:
    holder = """
    signal.signal(signal.SIGIO, signal.SIG_IGN)
    fd = os.open('leased', os.O_RDWR | os.O_CREAT)
    fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_WRLCK)
    print('up', flush=True)
    time.sleep(600)
    """
    async with running(slot, holder):
        with anyio.fail_after(5):
            with pytest.raises(WorkspaceError, match="lease"):
                await workspace.open("leased")
            assert set((await workspace.scan()).files) == {"leased"}
            await workspace.copy_in("leased", b"upload")
            assert await content(workspace, "leased") == b"upload"


async def test_names_that_are_no_text_are_counted(slot: Slot, workspace: Workspace) -> None:
    await plant(
        slot,
        r"""
        for name in (b'\xff.txt', b'a\xc3', b'\xed\xa0\x80'): open(name, 'w').close()
        os.mkdir(b'd\xfe'); open(b'd\xfe/inside', 'w').close()
        for name in ('new\nline', 'esc\x1b[2J', '\u202egnp.txt', '-rf', ' ', 'a\\b', '%2e%2e', '~'):
            open(name, 'w').write(name)
        """,
    )
    taken = await workspace.scan()
    assert taken.unnameable == 4
    assert len(taken.files) == 8
    for path in taken.files:
        assert (await content(workspace, path)).decode() == path
    with pytest.raises(FileMissing):
        await workspace.open("\udcff.txt")


async def test_a_tree_deeper_than_any_path_ends(slot: Slot, workspace: Workspace) -> None:
    await plant(
        slot,
        """
        for n in range(1200):
            open('file', 'w').close(); os.mkdir('d' * 200); os.chdir('d' * 200)
        """,
    )
    with anyio.fail_after(10):
        taken = await workspace.scan()
        assert taken.too_deep == 1
        assert 15 < len(taken.files) < 25
        deepest = max(taken.files, key=len)
        assert await content(workspace, deepest) == b""
        await workspace.remove(deepest)
        with pytest.raises(FileMissing):
            await workspace.open("d" * 200 + ("/" + "d" * 200) * 30)


async def test_files_that_their_owner_cannot_read(slot: Slot, workspace: Workspace) -> None:
    await plant(
        slot,
        """
        os.mkdir('locked'); open('locked/file', 'w').write('x'); open('file', 'w').write('x')
        os.chmod('file', 0); os.chmod('locked', 0)
        """,
    )
    assert set((await workspace.scan()).files) == {"file", "locked/file"}
    if ROOT:
        assert await content(workspace, "file") == b"x"
    else:
        with pytest.raises(WorkspaceError):
            await workspace.open("file")
    await workspace.remove("file")


async def test_a_sparse_giant_costs_nothing(slot: Slot, workspace: Workspace) -> None:
    await plant(slot, "f = open('giant', 'wb'); f.truncate(1 << 43)")
    seen: list[str] = []

    async def store(path: str, file: OpenFile) -> None:
        seen.append(path)

    done = await workspace.archive(store, max_bytes=MIB)
    assert (seen, done.skipped[0].size) == ([], 1 << 43)
    async with await workspace.open("giant") as file:
        assert await anext(file.chunks((1 << 43) - 10)) == bytes(10)


async def test_a_flood_of_files_is_cut_and_what_lies_nearest_is_seen(
    slot: Slot, workspace: Workspace
) -> None:
    await plant(
        slot,
        """
        os.mkdir('flood')
        for n in range(20_000): open(f'flood/{n}', 'w').close()
        for n in range(1_000): open(f'.hidden-{n}', 'w').close()
        open('report.csv', 'w').close()
        """,
    )
    with anyio.fail_after(5):
        taken = await workspace.scan(max_entries=5_000)
    assert taken.truncated
    assert "report.csv" in taken.files
    assert 3_500 < len(taken.files) < 4_500


async def test_a_scan_is_cancelled_between_directories(slot: Slot, workspace: Workspace) -> None:
    await plant(
        slot,
        """
        for n in range(200):
            os.mkdir(f'{n}')
            for m in range(100): open(f'{n}/{m}', 'w').close()
        """,
    )
    scanned = False
    with anyio.fail_after(5):
        with anyio.move_on_after(0.005):
            await workspace.scan()
            scanned = True
    assert not scanned
    assert len((await workspace.scan()).files) == 20_000


async def test_files_made_and_removed_as_we_scan_do_no_harm(
    slot: Slot, workspace: Workspace
) -> None:
    churner = """
    print('up', flush=True)
    for n in itertools.count():
        os.makedirs(f'd/{n % 7}/x', exist_ok=True)
        open(f'd/{n % 7}/x/{n % 50}', 'w').close()
        if not n % 50:
            for m in range(50):
                try: os.unlink(f'd/{n % 7}/x/{m}')
                except OSError: pass
            try: os.rename(f'd/{n % 7}', f'd/{n % 5}-moved')
            except OSError: pass
    """
    async with running(slot, churner):
        for _ in range(30):
            for path, (_, size, _) in (await workspace.scan()).files.items():
                assert path.startswith("d/")
                assert size == 0


@pytest.mark.slow
async def test_more_files_than_a_scan_looks_at_neither_hang_nor_fill_the_memory(
    state: Path,
) -> None:
    store = await SlotStore.open(state)
    slot = await store.create(Limits(inodes=400_000))
    workspace = Workspace(slot.data, slot.uid)
    code = "d = 'd' * 200; os.mkdir(d)\nfor n in range(300_000): open(f'{d}/{n}', 'w').close()"
    await plant(slot, code)
    with anyio.fail_after(10):
        taken = await workspace.scan()
    assert taken.truncated
    assert len(taken.files) < 100_000
    await store.destroy(slot)
