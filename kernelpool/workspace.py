"""Files of a workspace: signatures first, see the commits that follow."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

MAX_ENTRIES = 100_000


def clean_name(raw: str) -> str:
    """The name under which an upload is kept. NameRefused when nothing is left of it."""
    raise NotImplementedError


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Regular files of a workspace at one moment, by their relative path as it is on disk."""

    files: Mapping[str, tuple[int, int, int]]
    """Path to (inode, size in bytes, ctime in ns)."""
    started_ns: int
    unsettled: frozenset[str] = frozenset()
    truncated: bool = False
    unnameable: int = 0
    too_deep: int = 0

    def size(self, path: str) -> int:
        """Bytes of a file in it."""
        return self.files[path][1]


@dataclass(frozen=True, slots=True)
class Changes:
    """What differs between two snapshots; real paths, sorted."""

    created: tuple[str, ...]
    modified: tuple[str, ...]
    deleted: tuple[str, ...]


def diff(before: Snapshot, after: Snapshot) -> Changes:
    """What happened between two snapshots."""
    raise NotImplementedError


def display_paths(paths: Collection[str]) -> dict[str, str]:
    """The path to show (NFC where that is unambiguous) for each path on disk."""
    raise NotImplementedError


class OpenFile:
    """A regular file held open for reading; an async context manager."""

    path: str
    size: int

    async def __aenter__(self) -> OpenFile:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def chunks(self, start: int = 0, end: int | None = None) -> AsyncIterator[bytes]:
        """Bytes from `start` to before `end` (default: the size at opening)."""
        raise NotImplementedError

    async def close(self) -> None:
        """Close it. Idempotent."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class Skipped:
    """A file that was not archived, and why."""

    path: str
    size: int
    reason: str


@dataclass(frozen=True, slots=True)
class Archived:
    """What `archive` did."""

    stored: tuple[str, ...]
    skipped: tuple[Skipped, ...]


class Workspace:
    """File access below one slot's data directory, safe against whatever the code put there."""

    def __init__(self, root: Path, uid: int) -> None:
        self.root = root
        self.uid = uid

    async def write(self, name: str, chunks: AsyncIterator[bytes], *, max_bytes: int) -> int:
        """Replace or make a file. WorkspaceFull, NameRefused: the old content is intact."""
        raise NotImplementedError

    async def copy_in(self, path: str, data: bytes) -> None:
        """Write a small file in one go, directories included."""
        raise NotImplementedError

    async def open(self, path: str) -> OpenFile:
        """Open a regular file for reading. FileMissing when there is none."""
        raise NotImplementedError

    async def remove(self, path: str) -> None:
        """Remove a regular file. FileMissing when there is none."""
        raise NotImplementedError

    async def scan(
        self, *, exclude: Collection[str] = (), max_entries: int = MAX_ENTRIES
    ) -> Snapshot:
        """One recursive look at the regular files. `exclude`: relative paths of directories."""
        raise NotImplementedError

    async def archive(
        self,
        store: Callable[[str, OpenFile], Awaitable[None]],
        *,
        max_bytes: int,
        exclude: Collection[str] = (),
    ) -> Archived:
        """Hand every regular file to `store`, `max_bytes` in all at most."""
        raise NotImplementedError
