"""The files of one slot's workspace, safe against whatever its code put there.

Above: pool.py and, through it, whoever serves files. Below: snapshot.py, beneath.py. Every path is
taken one name after the other below a descriptor of the workspace and never through a link, and
everything blocking runs in threads of which each workspace has a few of its own: a workspace that
is slow to read slows no other.

A file is written nameless and gets its name when it is complete, so readers never see half of it
and a worker that is killed leaves nothing behind.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Final, TypeVar

import anyio
from anyio import from_thread, to_thread

from kernelpool.beneath import OPEN_DIRECTORY, OPEN_FILE, open_beneath, opened
from kernelpool.errors import FileMissing, NameRefused, WorkspaceError, WorkspaceFull
from kernelpool.file_names import clean_name, composed, display_paths, split_path
from kernelpool.snapshot import (
    EMPTY,
    MAX_ENTRIES,
    Changes,
    Snapshot,
    diff,
    stamps_are_unique,
    take,
)

__all__ = [
    "EMPTY",
    "Archived",
    "Changes",
    "OpenFile",
    "Skipped",
    "Snapshot",
    "Workspace",
    "clean_name",
    "diff",
    "display_paths",
]

PIECE_BYTES: Final = 256 * 1024
"""What one trip into a thread reads or writes: 200 MB take 800 trips of 0.1 ms."""

CALLS: Final = 4
"""Threads that one workspace may keep busy."""

MAX_TWINS: Final = 16
"""Names on disk that are tried for one composed path."""

T = TypeVar("T")


class OpenFile:
    """A regular file held open for reading; an async context manager."""

    def __init__(self, path: str, fd: int, size: int, calls: anyio.CapacityLimiter) -> None:
        self.path = path
        """As it is on disk."""
        self.size = size
        """Bytes when it was opened; what it grows by later is not read."""
        self._fd = fd
        self._calls = calls

    def __repr__(self) -> str:
        return f"<OpenFile {self.path!r}: {self.size} bytes>"

    async def __aenter__(self) -> OpenFile:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close it. Idempotent."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            with anyio.CancelScope(shield=True):
                # Closing the last descriptor of a deleted file frees its blocks: that may take.
                await to_thread.run_sync(os.close, fd, limiter=self._calls)

    async def chunks(self, start: int = 0, end: int | None = None) -> AsyncIterator[bytes]:
        """Bytes from `start` to before `end`, at most up to `size`, in pieces of 256 KiB.

        Raises:
            WorkspaceError: the file became shorter, or its disk failed.
        """
        end = self.size if end is None else min(end, self.size)
        while start < end:
            read = partial(os.pread, self._fd, min(PIECE_BYTES, end - start), start)
            try:
                piece = await to_thread.run_sync(read, limiter=self._calls)
            except OSError as error:
                raise WorkspaceError(f"cannot read {self.path!r}: {error.strerror}") from error
            if not piece:
                raise WorkspaceError(f"{self.path!r} became shorter while it was read")
            start += len(piece)
            yield piece


@dataclass(frozen=True, slots=True)
class Skipped:
    """A file that was not archived, and why."""

    path: str
    size: int
    reason: str


@dataclass(frozen=True, slots=True)
class Archived:
    """What `Workspace.archive` did; paths as they are on disk."""

    stored: tuple[str, ...]
    skipped: tuple[Skipped, ...]
    unlisted: int
    """Files and directories without a usable name; they cannot be told by path."""
    truncated: bool
    """There were more entries than a scan looks at."""


class Workspace:
    """File access below one slot's data directory."""

    def __init__(self, root: Path, uid: int) -> None:
        self.root = root
        self.uid = uid
        self._calls = anyio.CapacityLimiter(CALLS)
        self._unique_stamps: bool | None = None

    def __repr__(self) -> str:
        return f"<Workspace {self.root}>"

    async def write(self, name: str, chunks: AsyncIterator[bytes], *, max_bytes: int) -> int:
        """Make or replace a file; directories in `name` are made. Returns its size.

        Raises:
            WorkspaceFull: the quota is used up, or there are more than `max_bytes`; the old
                content is intact and nothing of the new one is left.
            NameRefused: the name leaves the workspace, or a directory or link is in its way.
        """
        incoming = await self._run(_Incoming, self.root, name, self.uid)
        try:
            pieces: list[bytes] = []
            waiting = total = 0
            async for chunk in chunks:
                total += len(chunk)
                if total > max_bytes:
                    raise WorkspaceFull(f"{name!r} has more than {max_bytes} bytes")
                pieces.append(chunk)
                waiting += len(chunk)
                if waiting >= PIECE_BYTES:
                    await self._run(incoming.append, b"".join(pieces))
                    pieces.clear()
                    waiting = 0
            await self._run(incoming.append, b"".join(pieces))
            await self._run(incoming.commit)
        finally:
            with anyio.CancelScope(shield=True):
                await self._run(incoming.close)
        return total

    async def copy_in(self, path: str, data: bytes) -> None:
        """Make or replace a file that is in memory already. Raises what `write` raises."""

        def copy() -> None:
            incoming = _Incoming(self.root, path, self.uid)
            try:
                incoming.append(data)
                incoming.commit()
            finally:
                incoming.close()

        await self._run(copy)

    async def open(self, path: str) -> OpenFile:
        """Open a regular file, by its path on disk or as it is shown.

        Raises:
            FileMissing: there is none at that path, or a link is in the way.
        """
        real, fd, size = await self._run(self._open, path)
        return OpenFile(real, fd, size, self._calls)

    async def remove(self, path: str) -> None:
        """Remove a regular file, by its path on disk or as it is shown.

        Raises:
            FileMissing: there is none at that path, or a link is in the way.
        """
        await self._run(self._remove, path)

    async def scan(
        self, *, exclude: Collection[str] = (), max_entries: int = MAX_ENTRIES
    ) -> Snapshot:
        """Look at every file; 2 µs for each. Cancellable between directories.

        Args:
            exclude: relative paths of directories to leave out.
            max_entries: where to stop; the snapshot is `truncated` then.
        """
        return await self._run(self._scan, frozenset(exclude), max_entries)

    async def archive(
        self,
        store: Callable[[str, OpenFile], Awaitable[None]],
        *,
        max_bytes: int,
        exclude: Collection[str] = (),
    ) -> Archived:
        """Hand every file to `store`, one after the other, with its path on disk.

        Args:
            store: reads the file and keeps it; what it raises ends the archiving.
            max_bytes: of all files together, by apparent size: sparse files claim any.
            exclude: as for `scan`.
        """
        snapshot = await self.scan(exclude=exclude)
        stored: list[str] = []
        skipped: list[Skipped] = []
        room = max_bytes
        for path in sorted(snapshot.files):
            try:
                file = await self.open(path)
            except WorkspaceError as error:
                skipped.append(Skipped(path, snapshot.size(path), str(error)))
                continue
            async with file:
                if file.size > room:
                    reason = "too large" if file.size > max_bytes else "no room left in the archive"
                    skipped.append(Skipped(path, file.size, reason))
                    continue
                room -= file.size
                await store(path, file)
                stored.append(path)
        return Archived(
            tuple(stored),
            tuple(skipped),
            snapshot.unnameable + snapshot.too_deep,
            snapshot.truncated,
        )

    async def _run(self, call: Callable[..., T], *args: object) -> T:
        return await to_thread.run_sync(partial(call, *args), limiter=self._calls)

    def _open(self, path: str) -> tuple[str, int, int]:
        with _translated(path), _root(self.root) as root:
            try:
                real, fd = _open_shown(root, path, OPEN_FILE)
            except PermissionError:
                # What a device on a nodev mount answers, and a file that is not ours to read.
                _regular(root, path)
                raise
            facts = os.fstat(fd)
            if not stat.S_ISREG(facts.st_mode):
                os.close(fd)
                raise FileMissing(f"{path!r} is not a regular file")
            return real, fd, facts.st_size

    def _remove(self, path: str) -> None:
        with _translated(path), _root(self.root) as root:
            real = _regular(root, path)
            parent, _, name = real.rpartition("/")
            with opened(open_beneath(root, parent or ".", OPEN_DIRECTORY)) as directory:
                os.unlink(name, dir_fd=directory)

    def _scan(self, exclude: frozenset[str], max_entries: int) -> Snapshot:
        with _translated("."), _root(self.root) as root:
            if self._unique_stamps is None:
                self._unique_stamps = stamps_are_unique(root)
            return take(
                root,
                exclude=exclude,
                max_entries=max_entries,
                unique_stamps=self._unique_stamps,
                check_cancelled=from_thread.check_cancelled,
            )


class _Incoming:
    """A file that is being written: nameless until `commit`. All calls block."""

    def __init__(self, root: Path, path: str, uid: int) -> None:
        self._path = path
        self._uid = uid
        *parents, self._name = split_path(path)
        with _translated(path, missing=NameRefused), _root(root) as top:
            self._directory = self._make_directories(top, parents)
        self._temporary: str | None = None
        self._fd = -1
        try:
            with _translated(path, missing=NameRefused):
                self._fd = self._create()
        except BaseException:
            self.close()
            raise

    def _make_directories(self, top: int, names: list[str]) -> int:
        at = os.dup(top)
        try:
            for name in names:
                made = False
                with contextlib.suppress(FileExistsError):
                    os.mkdir(name, mode=0o755, dir_fd=at)
                    made = True
                child = os.open(name, OPEN_DIRECTORY, dir_fd=at)
                os.close(at)
                at = child
                if made:
                    self._give(at, 0o755)
        except BaseException:
            os.close(at)
            raise
        return at

    def _create(self) -> int:
        flags = os.O_WRONLY | os.O_CLOEXEC
        try:
            return os.open(".", flags | os.O_TMPFILE, 0o600, dir_fd=self._directory)
        except OSError as error:
            if error.errno not in {errno.EOPNOTSUPP, errno.EISDIR, errno.ENOENT}:
                raise
        # A file system without nameless files, such as an older overlay.
        self._temporary = self._hidden_name()
        flags |= os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
        return os.open(self._temporary, flags, 0o600, dir_fd=self._directory)

    def append(self, data: bytes) -> None:
        """Write it all."""
        view = memoryview(data)
        with _translated(self._path):
            while view:
                view = view[os.write(self._fd, view) :]

    def commit(self) -> None:
        """Give the file to the slot's uid and let it take its name."""
        with _translated(self._path, missing=NameRefused):
            self._give(self._fd, 0o644)
            if self._temporary is None:
                try:
                    self._link(self._name)
                except FileExistsError:
                    self._temporary = self._hidden_name()
                    self._link(self._temporary)
                else:
                    return
            os.rename(
                self._temporary,
                self._name,
                src_dir_fd=self._directory,
                dst_dir_fd=self._directory,
            )
            self._temporary = None
            there = os.stat(self._name, dir_fd=self._directory, follow_symlinks=False)
            if there.st_ino != os.fstat(self._fd).st_ino:
                raise WorkspaceError(f"{self._path!r} was replaced while it was written")

    def close(self) -> None:
        """Drop what was not committed. Idempotent."""
        if self._temporary is not None:
            with contextlib.suppress(OSError):
                os.unlink(self._temporary, dir_fd=self._directory)
            self._temporary = None
        for fd in (self._fd, self._directory):
            if fd >= 0:
                os.close(fd)
        self._fd = self._directory = -1

    def _link(self, name: str) -> None:
        os.link(f"/proc/self/fd/{self._fd}", name, dst_dir_fd=self._directory, follow_symlinks=True)

    def _give(self, fd: int, mode: int) -> None:
        os.fchmod(fd, mode)
        if os.geteuid() == 0:
            os.fchown(fd, self._uid, self._uid)

    @staticmethod
    def _hidden_name() -> str:
        return f".incoming-{secrets.token_hex(8)}"


@contextlib.contextmanager
def _root(path: Path) -> Iterator[int]:
    with opened(os.open(path, OPEN_DIRECTORY)) as fd:
        yield fd


@contextlib.contextmanager
def _translated(path: str, *, missing: type[WorkspaceError] = FileMissing) -> Iterator[None]:
    """Turn the operating system's refusals into ours; `missing` is for what is not there."""
    try:
        yield
    except OSError as error:
        shown = path if len(path) <= 200 else f"{path[:200]}..."
        match error.errno:
            case errno.ENOSPC | errno.EDQUOT | errno.EFBIG:
                raise WorkspaceFull("the disk quota of the workspace is used up") from error
            case errno.ENOENT | errno.ENOTDIR | errno.ELOOP | errno.EXDEV | errno.ENXIO:
                raise missing(f"there is no file {shown!r}, or a link is in its way") from error
            case errno.EISDIR | errno.EEXIST | errno.ENOTEMPTY | errno.ENAMETOOLONG | errno.EINVAL:
                raise NameRefused(f"{shown!r} cannot be written: {error.strerror}") from error
            case errno.EAGAIN:
                raise WorkspaceError(f"{shown!r} is held by a lease of the code") from error
            case _:
                raise WorkspaceError(f"{shown!r}: {error.strerror}") from error


def _open_shown(root: int, path: str, flags: int) -> tuple[str, int]:
    """Open a path as it is on disk, or else the only one that is shown like this."""
    try:
        split_path(path)
    except NameRefused as error:
        raise FileMissing(f"there is no file {path[:200]!r}") from error
    try:
        return path, open_beneath(root, path, flags)
    except OSError as error:
        if path.isascii() or error.errno not in {errno.ENOENT, errno.ENOTDIR, errno.ELOOP}:
            raise
    twins = _twins(root, path)
    if len(twins) != 1:
        raise FileMissing(f"there is no file {path!r}")
    return twins[0], open_beneath(root, twins[0], flags)


def _regular(root: int, path: str) -> str:
    """The path on disk of a regular file, which is not opened."""
    real, fd = _open_shown(root, path, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
    with opened(fd):
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise FileMissing(f"{path!r} is not a regular file")
    return real


def _twins(root: int, path: str) -> list[str]:
    """Paths on disk that look the same as this one."""
    found = [""]
    for part in path.split("/"):
        below: list[str] = []
        for prefix in found:
            with contextlib.suppress(OSError):
                with opened(open_beneath(root, prefix or ".", OPEN_DIRECTORY)) as directory:
                    below += [f"{prefix}{name}/" for name in _alike(directory, composed(part))]
        found = below[:MAX_TWINS]
    return [twin.rstrip("/") for twin in found]


def _alike(directory: int, form: str) -> list[str]:
    with os.scandir(directory) as entries:
        return [e.name for e in islice(entries, MAX_ENTRIES) if composed(e.name) == form]
