import contextlib
import os
import stat
import tempfile
import unicodedata
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import anyio
import pytest
from anyio import to_thread

from kernelpool import beneath, snapshot
from kernelpool.errors import FileMissing, NameRefused, WorkspaceError, WorkspaceFull
from kernelpool.profile import MIB, Limits
from kernelpool.slot import SlotStore, quota_available
from kernelpool.workspace import EMPTY, Changes, OpenFile, Workspace, diff, display_paths


async def do(call: Callable[..., Any], *args: object) -> Any:
    return await to_thread.run_sync(lambda: call(*args))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    directory = tmp_path / "data"
    directory.mkdir()
    return directory


@pytest.fixture
def workspace(root: Path) -> Workspace:
    return Workspace(root, os.geteuid())


@pytest.fixture
def state() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="kp-") as directory:
        yield Path(directory)


@pytest.fixture
async def small(state: Path) -> AsyncIterator[Workspace]:
    """A workspace with a real quota of 16 MiB."""
    kind, why_not = await quota_available(state)
    if kind != "image":
        pytest.skip(f"no disk images here: {why_not}")
    store = await SlotStore.open(state)
    slot = await store.create(Limits(disk_bytes=16 * MIB, inodes=256))
    yield Workspace(slot.data, slot.uid)
    await store.destroy(slot)


async def pieces(*data: bytes) -> AsyncIterator[bytes]:
    for piece in data:
        yield piece


async def content(workspace: Workspace, path: str) -> bytes:
    async with await workspace.open(path) as file:
        return b"".join([piece async for piece in file.chunks()])


def files_below(root: Path) -> list[str]:
    return sorted(str(path.relative_to(root)) for path in root.rglob("*") if not path.is_dir())


def open_descriptors() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


async def test_what_is_written_is_read(workspace: Workspace, root: Path) -> None:
    data = os.urandom(700_000)
    chunks = pieces(*(data[at : at + 50_000] for at in range(0, len(data), 50_000)))
    assert await workspace.write("a b.bin", chunks, max_bytes=len(data)) == len(data)
    assert await content(workspace, "a b.bin") == data
    assert await do(files_below, root) == ["a b.bin"]
    assert stat.S_IMODE((await do((root / "a b.bin").stat)).st_mode) == 0o644


async def test_a_range_is_read_and_no_more_than_there_was_at_opening(
    workspace: Workspace, root: Path
) -> None:
    await workspace.copy_in("a.txt", b"0123456789")
    async with await workspace.open("a.txt") as file:
        assert (file.path, file.size) == ("a.txt", 10)
        with await do((root / "a.txt").open, "ab", 0) as more:
            more.write(b"more")
        assert [p async for p in file.chunks()] == [b"0123456789"]
        assert [p async for p in file.chunks(2, 5)] == [b"234"]
        assert [p async for p in file.chunks(8, 50)] == [b"89"]
        assert [p async for p in file.chunks(50)] == []


async def test_a_file_that_shrinks_while_it_is_read_is_an_error(
    workspace: Workspace, root: Path
) -> None:
    await workspace.copy_in("a.txt", bytes(600_000))
    async with await workspace.open("a.txt") as file:
        chunks = file.chunks()
        await anext(chunks)
        await do(os.truncate, root / "a.txt", 300_000)
        with pytest.raises(WorkspaceError, match="shorter"):
            async for _ in chunks:
                pass
    await file.close()


async def test_writing_replaces_and_a_reader_keeps_what_it_opened(workspace: Workspace) -> None:
    await workspace.copy_in("a.txt", b"old")
    async with await workspace.open("a.txt") as file:
        await workspace.copy_in("a.txt", b"new")
        assert [p async for p in file.chunks()] == [b"old"]
    assert await content(workspace, "a.txt") == b"new"


async def test_directories_are_made_on_the_way(workspace: Workspace, root: Path) -> None:
    await workspace.copy_in("outputs/3-1.png", b"png")
    await workspace.copy_in("outputs/3-2.png", b"png")
    assert await do(files_below, root) == ["outputs/3-1.png", "outputs/3-2.png"]
    assert stat.S_IMODE((await do((root / "outputs").stat)).st_mode) == 0o755


async def test_an_upload_that_breaks_off_or_is_too_long_leaves_the_old_file(
    workspace: Workspace, root: Path
) -> None:
    await workspace.copy_in("a.txt", b"old")

    async def broken() -> AsyncIterator[bytes]:
        yield bytes(300_000)
        raise ConnectionResetError

    with pytest.raises(ConnectionResetError):
        await workspace.write("a.txt", broken(), max_bytes=1_000_000)
    with pytest.raises(WorkspaceFull, match="more than 10 bytes"):
        await workspace.write("a.txt", pieces(bytes(11)), max_bytes=10)
    assert await content(workspace, "a.txt") == b"old"
    assert await do(files_below, root) == ["a.txt"]


async def test_a_cancelled_upload_leaves_the_old_file_and_no_descriptor(
    workspace: Workspace, root: Path
) -> None:
    await workspace.copy_in("a.txt", b"old")
    before = await do(open_descriptors)
    started = anyio.Event()

    async def stalled() -> AsyncIterator[bytes]:
        yield bytes(300_000)
        started.set()
        await anyio.sleep_forever()

    async def upload() -> None:
        await workspace.write("a.txt", stalled(), max_bytes=1_000_000)

    with anyio.fail_after(10):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(upload)
            await started.wait()
            tasks.cancel_scope.cancel()
    assert await content(workspace, "a.txt") == b"old"
    assert await do(files_below, root) == ["a.txt"]
    assert await do(open_descriptors) == before


async def test_a_file_system_without_nameless_files_works_the_same(
    workspace: Workspace, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real_open = os.open

    def no_tmpfile(path: Any, flags: int, *args: Any, **kwargs: Any) -> int:
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(95, os.strerror(95))
        return real_open(path, flags, *args, **kwargs)

    monkeypatch.setattr(os, "open", no_tmpfile)
    await workspace.copy_in("d/a.txt", b"old")
    await workspace.copy_in("d/a.txt", b"new")
    assert await content(workspace, "d/a.txt") == b"new"
    with pytest.raises(WorkspaceFull):
        await workspace.write("d/a.txt", pieces(bytes(11)), max_bytes=10)
    assert await do(files_below, root) == ["d/a.txt"]


async def test_a_full_disk_is_named_and_the_old_content_stays(small: Workspace) -> None:
    await small.copy_in("a.txt", b"old")

    async def endless() -> AsyncIterator[bytes]:
        while True:
            yield bytes(256 * 1024)

    with anyio.fail_after(30):
        with pytest.raises(WorkspaceFull, match="quota"):
            await small.write("a.txt", endless(), max_bytes=1 << 40)
    assert await content(small, "a.txt") == b"old"
    assert await do(files_below, small.root) == ["a.txt"]
    assert (await do((small.root / "a.txt").stat)).st_uid == small.uid
    await small.copy_in("b.bin", bytes(8 * MIB))


async def test_used_up_inodes_are_a_full_workspace_too(small: Workspace) -> None:
    with pytest.raises(WorkspaceFull):
        for number in range(300):
            await small.copy_in(f"{number}", b"")
    await small.remove("0")
    await small.copy_in("0", b"")


@pytest.mark.parametrize("name", ["", "/etc/x", "../x", "a/../../x", "a//b", "\0", "y" * 300, "."])
async def test_a_name_that_leaves_is_refused(workspace: Workspace, name: str) -> None:
    with pytest.raises(NameRefused):
        await workspace.copy_in(name, b"x")
    with pytest.raises(FileMissing):
        await workspace.open(name)
    with pytest.raises(FileMissing):
        await workspace.remove(name)


async def test_a_directory_is_neither_replaced_nor_opened_nor_removed(
    workspace: Workspace, root: Path
) -> None:
    await workspace.copy_in("d/a.txt", b"x")
    with pytest.raises(NameRefused):
        await workspace.copy_in("d", b"x")
    with pytest.raises(NameRefused):
        await workspace.copy_in("d/a.txt/b.txt", b"x")
    with pytest.raises(FileMissing):
        await workspace.open("d")
    with pytest.raises(FileMissing):
        await workspace.remove("d")
    assert await do(files_below, root) == ["d/a.txt"]


async def test_a_removed_file_is_missing(workspace: Workspace) -> None:
    await workspace.copy_in("a.txt", b"x")
    await workspace.remove("a.txt")
    with pytest.raises(FileMissing):
        await workspace.remove("a.txt")
    with pytest.raises(FileMissing):
        await workspace.open("a.txt")


async def test_a_workspace_that_is_gone_is_an_error_of_ours(tmp_path: Path) -> None:
    workspace = Workspace(tmp_path / "gone", os.geteuid())
    with pytest.raises(WorkspaceError):
        await workspace.scan()
    with pytest.raises(WorkspaceError):
        await workspace.copy_in("a", b"")


@pytest.mark.parametrize("unique_stamps", [True, False, None])
async def test_every_kind_of_change_is_seen(
    workspace: Workspace, root: Path, unique_stamps: bool | None
) -> None:
    if unique_stamps and not await do(stamps_are_unique, root):
        pytest.skip("this kernel stamps files by a ticking clock")
    workspace._unique_stamps = unique_stamps
    for name in ("same-size", "touched-back", "replaced", "gone", "still"):
        await workspace.copy_in(name, b"1")
    before = await workspace.scan()
    assert set(before.files) == {"same-size", "touched-back", "replaced", "gone", "still"}

    def change() -> None:
        (root / "same-size").write_bytes(b"2")
        times = (root / "touched-back").stat()
        (root / "touched-back").write_bytes(b"2")
        os.utime(root / "touched-back", ns=(times.st_atime_ns, times.st_mtime_ns))
        (root / "new").write_bytes(b"2")
        (root / "new").rename(root / "replaced")
        (root / "gone").unlink()
        (root / "a/b").mkdir(parents=True)
        (root / "a/b/c.txt").write_bytes(b"1")

    await do(change)
    after = await workspace.scan()
    assert diff(before, after) == Changes(
        created=("a/b/c.txt",),
        modified=("replaced", "same-size", "touched-back"),
        deleted=("gone",),
    )
    assert diff(after, await workspace.scan()) == Changes()
    assert after.size("a/b/c.txt") == 1


def stamps_are_unique(root: Path) -> bool:
    fd = os.open(root, os.O_RDONLY)
    try:
        return snapshot.stamps_are_unique(fd)
    finally:
        os.close(fd)


@pytest.mark.parametrize("unique_stamps", [True, False])
async def test_a_write_right_behind_a_scan_is_never_missed(
    workspace: Workspace, root: Path, unique_stamps: bool
) -> None:
    if unique_stamps and not await do(stamps_are_unique, root):
        pytest.skip("this kernel stamps files by a ticking clock")
    workspace._unique_stamps = unique_stamps
    path = root / "a.txt"
    with anyio.fail_after(30):
        for number in range(40):
            await do(path.write_bytes, b"%06d" % number)
            before = await workspace.scan()
            await do(path.write_bytes, b"%06d" % -number)
            assert diff(before, await workspace.scan()).modified == ("a.txt",)


async def test_a_file_written_in_every_tick_is_unsettled_and_modified_next_time(
    workspace: Workspace, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    workspace._unique_stamps = False
    await workspace.copy_in("log.txt", b"x")
    await workspace.copy_in("still.txt", b"x")
    real_look = snapshot._look

    def written_meanwhile(at: int, path: str) -> snapshot.File | None:
        if path == "log.txt":
            os.utime(root / path)
        return real_look(at, path)

    with monkeypatch.context() as patched:
        patched.setattr(snapshot, "_look", written_meanwhile)
        before = await workspace.scan()
    assert before.unsettled <= {"log.txt"}
    await do(os.utime, root / "log.txt")
    after = await workspace.scan()
    assert diff(before, after) == Changes(modified=("log.txt",))


async def test_hidden_files_caches_and_excluded_directories_are_left_out(
    workspace: Workspace,
) -> None:
    for path in (
        "kept.txt",
        "d/kept.txt",
        "d/outputs/kept.txt",
        ".hidden",
        ".cache/x",
        ".ipynb_checkpoints/x",
        "d/.incoming-0",
        "d/__pycache__/x.pyc",
        "outputs/1-1.png",
        "outputs/d/1.png",
    ):
        await workspace.copy_in(path, b"x")
    taken = await workspace.scan(exclude=["outputs"])
    assert sorted(taken.files) == ["d/kept.txt", "d/outputs/kept.txt", "kept.txt"]
    assert not taken.truncated
    assert diff(EMPTY, taken).created == ("d/kept.txt", "d/outputs/kept.txt", "kept.txt")


async def test_twins_of_one_name_are_two_files_and_each_can_be_opened_as_it_is_shown(
    workspace: Workspace,
) -> None:
    nfc, nfd = "é/naïve.txt", unicodedata.normalize("NFD", "é/naïve.txt")
    lone = unicodedata.normalize("NFD", "d\u00e9j\u00e0/vu.txt")
    for path in (nfc, nfd, lone):
        await workspace.copy_in(path, path.encode())
    shown = display_paths((await workspace.scan()).files)
    assert shown == {nfc: nfc, nfd: nfd, lone: unicodedata.normalize("NFC", lone)}
    for path, form in shown.items():
        async with await workspace.open(form) as file:
            assert file.path == path
        assert await content(workspace, form) == path.encode()
    # Nothing composed is there any more: the decomposed one can be told by either form.
    await workspace.remove(nfc)
    assert await content(workspace, nfc) == nfd.encode()
    await workspace.remove(nfc)
    with pytest.raises(FileMissing):
        await workspace.open(nfc)


async def test_two_decomposed_twins_are_not_guessed_between(workspace: Workspace) -> None:
    twins = ("\u1e69.txt", "s\u0323\u0307.txt", "\u1e63\u0307.txt", "s\u0307\u0323.txt")
    for twin in twins[1:]:
        await workspace.copy_in(twin, twin.encode())
    with pytest.raises(FileMissing):
        await workspace.open(twins[0])
    assert display_paths(twins[1:]) == {twin: twin for twin in twins[1:]}
    assert await content(workspace, twins[2]) == twins[2].encode()


async def test_archiving_hands_over_files_and_lists_what_it_skipped(
    workspace: Workspace, root: Path
) -> None:
    await workspace.copy_in("a.txt", b"aaa")
    await workspace.copy_in("d/b.txt", b"bb")
    await workspace.copy_in("e.txt", b"")
    await workspace.copy_in("f.txt", bytes(8))

    def sparse() -> None:
        os.truncate(root / "e.txt", 1 << 40)
        (root / "link").symlink_to("/etc/passwd")
        (root / os.fsdecode(b"\xff")).touch()

    await do(sparse)
    archive: dict[str, bytes] = {}

    async def store(path: str, file: OpenFile) -> None:
        archive[path] = b"".join([piece async for piece in file.chunks()])

    done = await workspace.archive(store, max_bytes=10)
    assert archive == {"a.txt": b"aaa", "d/b.txt": b"bb"}
    assert done.stored == ("a.txt", "d/b.txt")
    assert [(s.path, s.size, s.reason) for s in done.skipped] == [
        ("e.txt", 1 << 40, "too large"),
        ("f.txt", 8, "no room left in the archive"),
    ]
    assert (done.unlisted, done.truncated) == (1, False)


async def test_a_store_that_fails_ends_archiving_without_an_open_file(
    workspace: Workspace,
) -> None:
    await workspace.copy_in("a.txt", b"aaa")
    before = await do(open_descriptors)

    async def store(path: str, file: OpenFile) -> None:
        raise ConnectionRefusedError

    with pytest.raises(ConnectionRefusedError):
        await workspace.archive(store, max_bytes=10)
    assert await do(open_descriptors) == before


@pytest.fixture(params=["openat2", "walk_open"])
def open_below(request: pytest.FixtureRequest) -> Callable[[int, str, int], int]:
    return getattr(beneath, request.param)  # type: ignore[no-any-return]


@pytest.fixture
def tree(tmp_path: Path) -> Iterator[int]:
    (tmp_path / "data/d").mkdir(parents=True)
    (tmp_path / "data/d/file").write_text("inside", encoding="utf-8")
    (tmp_path / "outside").write_text("outside", encoding="utf-8")
    (tmp_path / "data/up").symlink_to("..")
    (tmp_path / "data/out").symlink_to(tmp_path / "outside")
    (tmp_path / "data/in").symlink_to("d/file")
    (tmp_path / "data/self").symlink_to("/proc/self/cwd")
    fd = os.open(tmp_path / "data", os.O_RDONLY)
    yield fd
    os.close(fd)


@pytest.mark.parametrize(
    "path",
    [
        "up/outside",
        "out",
        "in",
        "self/x",
        "../outside",
        "d/../../outside",
        "/etc/passwd",
        "..",
        "no",
    ],
)
def test_no_path_leads_out_or_through_a_link(
    open_below: Callable[[int, str, int], int], tree: int, path: str
) -> None:
    before = open_descriptors()
    with pytest.raises(OSError):
        open_below(tree, path, beneath.OPEN_FILE)
    assert open_descriptors() == before


def test_what_lies_below_is_opened(open_below: Callable[[int, str, int], int], tree: int) -> None:
    with contextlib.closing(os.fdopen(open_below(tree, "d/file", beneath.OPEN_FILE))) as file:
        assert file.read() == "inside"
    os.close(open_below(tree, ".", beneath.OPEN_DIRECTORY))
    os.close(open_below(tree, "d/", beneath.OPEN_DIRECTORY))
