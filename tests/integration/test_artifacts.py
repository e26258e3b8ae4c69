"""The artifact store, in a directory and in memory: the same promises."""

from __future__ import annotations

import resource
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import anyio
import anyio.to_thread
import pytest

from orchestrator.artifacts import ArtifactMissing, Artifacts, ArtifactStoreError

MIB = 1024 * 1024


@pytest.fixture(autouse=True)
async def _bounded() -> AsyncIterator[None]:
    with anyio.fail_after(60):
        yield


@pytest.fixture(params=["directory", "memory"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Artifacts:
    """An empty store of either kind."""
    return Artifacts.open("memory://" if request.param == "memory" else str(tmp_path / "a"))


@pytest.fixture
def local(tmp_path: Path) -> Artifacts:
    """An empty store in a directory."""
    return Artifacts.open(f"file://{tmp_path}/a")


async def chunks(*parts: bytes) -> AsyncIterator[bytes]:
    for part in parts:
        yield part


async def read(stream: AsyncIterator[bytes]) -> bytes:
    return b"".join([chunk async for chunk in stream])


@pytest.mark.parametrize("content", [b"", b"x", bytes(range(256)) * 5000])
async def test_bytes_come_back_as_they_were(store: Artifacts, content: bytes) -> None:
    assert await store.put("a/b-c_1", content) == len(content)
    assert await store.get("a/b-c_1") == content
    assert await read(store.stream("a/b-c_1")) == content
    assert await store.size("a/b-c_1") == len(content)


async def test_a_stream_is_stored_in_parts(store: Artifacts) -> None:
    parts = [bytes([n]) * MIB for n in range(13)]
    assert await store.put("big", chunks(*parts)) == 13 * MIB
    assert await store.size("big") == 13 * MIB
    assert await read(store.stream("big")) == b"".join(parts)


async def test_an_empty_stream_is_an_empty_artifact(store: Artifacts) -> None:
    assert await store.put("none", chunks()) == 0
    assert await store.get("none") == b""


async def test_a_later_version_replaces_an_earlier_one(store: Artifacts) -> None:
    await store.put("k", b"a long first version")
    await store.put("k", chunks(b"second"))
    assert await store.get("k") == b"second"


@pytest.mark.parametrize(
    ("start", "end"), [(0, 1), (0, None), (3, None), (3, 7), (5, 5), (7, 3), (9, 100), (10, 20)]
)
async def test_a_part_is_read_by_its_place(store: Artifacts, start: int, end: int | None) -> None:
    await store.put("k", b"0123456789")
    assert await read(store.stream("k", start=start, end=end)) == b"0123456789"[start:end]


async def test_a_missing_key_is_told_apart(store: Artifacts) -> None:
    assert await store.size("nothing") is None
    with pytest.raises(ArtifactMissing):
        await store.get("nothing")
    with pytest.raises(ArtifactMissing):
        await read(store.stream("nothing"))
    with pytest.raises(ArtifactMissing):
        await read(store.stream("nothing", start=2))


async def test_missing_keys_may_be_deleted(store: Artifacts) -> None:
    await store.put("a", b"1")
    await store.put("b", b"2")
    await store.delete(["x", "a", "y", "b", "z"])
    await store.delete(["a"])
    await store.delete([])
    assert await store.size("a") is None
    assert await store.size("b") is None


async def test_a_prefix_is_whole_segments(store: Artifacts) -> None:
    for key in ("s/1/a", "s/1/b/c", "s/10/a", "s/2"):
        await store.put(key, b"x")
    assert await store.delete_prefix("s/1") == 2
    assert await store.size("s/10/a") == 1
    assert await store.delete_prefix("s/1") == 0
    assert await store.delete_prefix("s") == 2


async def test_many_keys_are_deleted(store: Artifacts) -> None:
    for n in range(1100):
        await store.put(f"many/{n}", b"")
    assert await store.delete_prefix("many") == 1100
    assert await store.delete_prefix("many") == 0


async def test_what_a_source_raises_passes_through_and_nothing_is_stored(
    store: Artifacts,
) -> None:
    class Gone(Exception):
        pass

    async def breaking() -> AsyncIterator[bytes]:
        yield b"x" * (6 * MIB)
        raise Gone

    await store.put("k", b"before")
    with pytest.raises(Gone):
        await store.put("k", breaking())
    assert await store.get("k") == b"before"
    with pytest.raises(Gone):
        await store.put("new", breaking())
    assert await store.size("new") is None


async def test_a_cancelled_put_stores_nothing(local: Artifacts, tmp_path: Path) -> None:
    reached = anyio.Event()

    async def endless() -> AsyncIterator[bytes]:
        while True:
            yield b"x" * MIB
            reached.set()
            await anyio.sleep(0.001)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(local.put, "k", endless())
        await reached.wait()
        tasks.cancel_scope.cancel()
    assert await local.size("k") is None
    assert [path async for path in anyio.Path(tmp_path / "a").iterdir()] == []


async def test_a_reader_never_sees_half_a_version(store: Artifacts) -> None:
    versions = [bytes([n]) * (6 * MIB) for n in range(3)]
    await store.put("k", versions[0])
    done = anyio.Event()

    async def write() -> None:
        for version in versions[1:]:
            await store.put("k", chunks(version[: 3 * MIB], version[3 * MIB :]))
        done.set()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(write)
        while not done.is_set():
            assert await store.get("k") in versions
    assert await store.get("k") == versions[2]


async def test_memory_stays_flat_while_a_large_file_goes_in_and_out(local: Artifacts) -> None:
    block = b"x" * MIB

    async def source() -> AsyncIterator[bytes]:
        for _ in range(200):
            yield block

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert await local.put("big", source()) == 200 * MIB
    size = 0
    async for chunk in local.stream("big"):
        size += len(chunk)
    assert size == 200 * MIB
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown < 50 * 1024, f"{grown} KiB"


async def test_the_directory_is_private(tmp_path: Path) -> None:
    await anyio.to_thread.run_sync(Artifacts.open, str(tmp_path / "new" / "deep"))
    status = await anyio.Path(tmp_path / "new" / "deep").stat()
    assert status.st_mode & 0o077 == 0


@pytest.mark.parametrize("key", ["../outside", "a/../../outside", "a/./b", "/etc/x"])
async def test_no_key_leaves_the_directory(local: Artifacts, tmp_path: Path, key: str) -> None:
    try:
        await local.put(key, b"x")
    except ArtifactStoreError:
        pass

    def outside() -> list[str]:
        return [
            str(path)
            for path in tmp_path.rglob("*")
            if path.is_file() and not path.is_relative_to(tmp_path / "a")
        ]

    assert await anyio.to_thread.run_sync(outside) == []


Attempt = Callable[[Artifacts], Awaitable[object]]


@pytest.mark.parametrize(
    "attempt",
    [
        lambda store: store.put("k", b"x"),
        lambda store: store.put("k", chunks(b"x" * 6 * MIB)),
        lambda store: store.get("k"),
        lambda store: store.size("k"),
        lambda store: store.delete(["k"]),
    ],
    ids=["put", "put stream", "get", "size", "delete"],
)
async def test_a_store_that_cannot_work_is_our_error(
    local: Artifacts, tmp_path: Path, attempt: Attempt
) -> None:
    def break_it() -> None:
        (tmp_path / "a").rmdir()
        (tmp_path / "a").write_bytes(b"a file where the directory was")

    await anyio.to_thread.run_sync(break_it)
    with pytest.raises(ArtifactStoreError):
        await attempt(local)


async def test_a_full_disk_is_our_error(local: Artifacts) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (MIB, hard))
    try:
        with pytest.raises(ArtifactStoreError):
            await local.put("k", b"x" * (3 * MIB))
        with pytest.raises(ArtifactStoreError):
            await local.put("k", chunks(b"x" * (7 * MIB), b"x" * (7 * MIB)))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert await local.size("k") is None
    await local.put("k", b"small")


async def test_an_address_that_is_not_understood_is_named(tmp_path: Path) -> None:
    with pytest.raises(ArtifactStoreError, match="nonsense"):
        await anyio.to_thread.run_sync(Artifacts.open, "nonsense://bucket/prefix")
    await anyio.Path(tmp_path / "file").touch()
    with pytest.raises(ArtifactStoreError):
        await anyio.to_thread.run_sync(Artifacts.open, str(tmp_path / "file" / "below"))


async def test_credentials_in_a_url_are_not_shown() -> None:
    shown = repr(Artifacts.open("https://user:very-secret@example.test/artifacts"))
    assert "very-secret" not in shown
    assert "example.test" in shown
