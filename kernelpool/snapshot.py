"""What is in a workspace at one moment, and what changed between two.

Above: workspace.py. Below: beneath.py. `take` blocks: it belongs in a thread. `diff` is pure.

A file counts as changed when its inode, size or ctime differ. Code can set mtime but not ctime, so
nothing is hashed. One gap remains to be closed: older kernels stamp files by a clock that ticks
every 1 to 10 ms, so a write in the tick in which we looked leaves the stamp as we saw it. Such
files are looked at again once the clock has ticked; one that is written in every tick is
`unsettled`, and counts as modified next time. Since Linux 6.13 a stamp that was looked at is never
given twice, which `stamps_are_unique` finds out by trying.
"""

from __future__ import annotations

import os
import stat
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Final

from kernelpool.beneath import OPEN_DIRECTORY, make_ours, open_beneath, opened
from kernelpool.file_names import NAME_BYTES, PATH_BYTES

MAX_ENTRIES: Final = 100_000
"""Entries of all kinds that a scan looks at; about 0.3 s."""

MAX_PATH_CHARACTERS: Final = 32 * 1024 * 1024
"""Length of all paths in a snapshot together: long names must not fill the worker's memory."""

CACHE_DIRECTORIES: Final = frozenset({"__pycache__"})
"""Never files that someone made on purpose; other caches are hidden by their dot."""

SETTLE_TRIES: Final = 2
"""Ticks of the file system's clock to wait for files that were written in the current one."""

TICK: Final = 0.011
"""Seconds. No kernel's clock ticks more slowly than every 10 ms."""

_CLOCK_REALTIME_COARSE: Final = 5
"""The clock that stamps files. Source: linux/time.h."""

File = tuple[int, int, int]
"""Inode, size in bytes, ctime in nanoseconds. A plain tuple: there may be 100,000."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The regular files of a workspace, by relative path as it is on disk.

    Hidden files, caches, and whatever is no regular file are left out; links are not followed.
    """

    files: Mapping[str, File]
    started_ns: int
    """The file system's clock before the first file was looked at."""
    unsettled: frozenset[str] = frozenset()
    """Files that were being written while we looked; the next diff calls them modified."""
    truncated: bool = False
    """There were more entries than a scan looks at."""
    unnameable: int = 0
    """Files and directories left out because their names are not UTF-8."""
    too_deep: int = 0
    """Directories left out because their paths are longer than Linux takes."""

    def size(self, path: str) -> int:
        """Apparent bytes of a file in it."""
        return self.files[path][1]


EMPTY: Final = Snapshot({}, 0)
"""Of a workspace that nothing has been put into."""


@dataclass(frozen=True, slots=True)
class Changes:
    """What differs between two snapshots: sorted paths as they are on disk.

    A renamed file is one deleted and one created: an inode may be used again at once, so it does
    not tell a renamed file from a new one.
    """

    created: tuple[str, ...] = ()
    modified: tuple[str, ...] = ()
    deleted: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.created or self.modified or self.deleted)


def diff(before: Snapshot, after: Snapshot) -> Changes:
    """What happened between two snapshots.

    Where one of them is truncated, only what can be told for certain: no deletions, and as created
    only what was changed since the first.
    """
    old, new = before.files, after.files
    created = new.keys() - old.keys()
    if before.truncated:
        created = {path for path in created if new[path][2] >= before.started_ns}
    modified = [
        path
        for path, file in new.items()
        if (was := old.get(path)) is not None and (was != file or path in before.unsettled)
    ]
    deleted = set() if after.truncated else old.keys() - new.keys()
    return Changes(tuple(sorted(created)), tuple(sorted(modified)), tuple(sorted(deleted)))


def take(
    root: int,
    *,
    exclude: Collection[str],
    max_entries: int,
    unique_stamps: bool,
    check_cancelled: Callable[[], None],
) -> Snapshot:
    """Look at every file below an open directory, nearest first.

    Args:
        root: descriptor of the directory.
        exclude: relative paths of directories to leave out.
        max_entries: stop after that many entries.
        unique_stamps: what `stamps_are_unique` says of this file system.
        check_cancelled: called between directories; may raise.
    """
    started_ns = time.clock_gettime_ns(_CLOCK_REALTIME_COARSE)
    latest_ns = started_ns + 60_000_000_000  # a stamp further ahead is from before a clock change
    files: dict[str, File] = {}
    recent: list[str] = []
    left_out = CACHE_DIRECTORIES.union(exclude)
    entries_left, characters_left = max_entries, MAX_PATH_CHARACTERS
    unnameable = too_deep = 0
    truncated = False
    queue = deque([""])
    while queue and not truncated:
        check_cancelled()
        prefix = queue.popleft()
        if len(prefix.encode()) + NAME_BYTES > PATH_BYTES:
            too_deep += 1
            continue
        directory = _open_directory(root, prefix)
        if directory is None:
            continue
        with opened(directory), os.scandir(directory) as entries:
            for entry in entries:
                entries_left -= 1
                name = entry.name
                path = prefix + name
                characters_left -= len(path)
                if entries_left < 0 or characters_left < 0:
                    truncated = True
                    break
                if name[0] == ".":
                    continue
                if not name.isascii() and not _is_utf8(name):
                    unnameable += 1
                elif entry.is_file(follow_symlinks=False):
                    try:
                        facts = entry.stat(follow_symlinks=False)
                    except OSError:
                        continue
                    if stat.S_ISREG(facts.st_mode):
                        changed_ns = facts.st_ctime_ns
                        files[path] = (facts.st_ino, facts.st_size, changed_ns)
                        if started_ns <= changed_ns < latest_ns:
                            recent.append(path)
                elif entry.is_dir(follow_symlinks=False):
                    if name not in CACHE_DIRECTORIES and path not in left_out:
                        queue.append(path + "/")
    unsettled = frozenset[str]() if unique_stamps else _settle(root, files, recent)
    return Snapshot(files, started_ns, unsettled, truncated, unnameable, too_deep)


def _open_directory(root: int, prefix: str) -> int | None:
    path = prefix or "."
    try:
        return open_beneath(root, path, OPEN_DIRECTORY)
    except PermissionError:
        # Only where code runs under our own uid: its file modes do not hide its files.
        try:
            make_ours(root, path)
            return open_beneath(root, path, OPEN_DIRECTORY)
        except OSError:
            return None
    except OSError:
        return None


def _is_utf8(name: str) -> bool:
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def _settle(root: int, files: dict[str, File], recent: list[str]) -> frozenset[str]:
    """Look again at files that were written in the current tick, once that is over.

    Returns:
        Those that were written in each tick in which we looked.
    """
    for _ in range(SETTLE_TRIES):
        if not recent:
            break
        now = time.clock_gettime_ns(_CLOCK_REALTIME_COARSE)
        deadline = time.monotonic() + TICK
        while now <= max(files[path][2] for path in recent) and time.monotonic() < deadline:
            time.sleep(0.001)
            now = time.clock_gettime_ns(_CLOCK_REALTIME_COARSE)
        still: list[str] = []
        for path in recent:
            file = _look(root, path)
            if file is None:
                del files[path]
                continue
            files[path] = file
            if file[2] >= now:
                still.append(path)
        recent = still
    return frozenset(recent)


def _look(root: int, path: str) -> File | None:
    try:
        with opened(open_beneath(root, path, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)) as fd:
            facts = os.fstat(fd)
    except OSError:
        return None
    if not stat.S_ISREG(facts.st_mode):
        return None
    return facts.st_ino, facts.st_size, facts.st_ctime_ns


def stamps_are_unique(root: int) -> bool:
    """Whether a ctime that was looked at is never given again on this file system."""
    try:
        fd = os.open(".", os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600, dir_fd=root)
    except OSError:
        return False
    seen: set[int] = set()
    with opened(fd):
        for mode in (0o600, 0o400, 0o600, 0o400):
            os.fchmod(fd, mode)
            seen.add(os.fstat(fd).st_ctime_ns)
    return len(seen) == 4
