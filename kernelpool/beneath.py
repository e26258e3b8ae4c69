"""Opening and removing below a directory descriptor, never through a link.

Above: slot.py, quota.py, workspace.py, snapshot.py. Below: the operating system. All calls block:
they belong in a thread. The names met here were chosen by hostile code that may still be running.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Final

OPEN_DIRECTORY: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
"""For a directory that will be listed or worked in."""

OPEN_FILE: Final = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
"""For reading what may turn out to be anything: a FIFO, a device, a leased file never block."""

OPENAT2_TRIES: Final = 8
"""Tries while directories are renamed under us (EAGAIN), before the path is walked instead."""

_SYS_OPENAT2: Final = 437
_BENEATH_WITHOUT_LINKS: Final = 0x08 | 0x04 | 0x02
"""RESOLVE_BENEATH | RESOLVE_NO_SYMLINKS | RESOLVE_NO_MAGICLINKS. Source: linux/openat2.h."""

_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long


class _OpenHow(ctypes.Structure):
    _fields_ = (
        ("flags", ctypes.c_uint64),
        ("mode", ctypes.c_uint64),
        ("resolve", ctypes.c_uint64),
    )


def open_beneath(directory: int, path: str, flags: int) -> int:
    """Open a relative path below a directory; no part of it may be a link or `..`.

    Raises:
        OSError: as open(2); ELOOP or ENOTDIR for a link, EXDEV for a path that leaves.
    """
    try:
        return openat2(directory, path, flags)
    except OSError as error:
        # Kernels before 5.6 lack the call, some seccomp filters refuse it.
        if error.errno not in {errno.ENOSYS, errno.EPERM, errno.EAGAIN}:
            raise
    return walk_open(directory, path, flags)


def openat2(directory: int, path: str, flags: int) -> int:
    """`open_beneath` by the kernel's own rules for it."""
    encoded = os.fsencode(path)
    if b"\0" in encoded:
        raise OSError(errno.EINVAL, "NUL in a path", path)
    how = _OpenHow(flags, 0, _BENEATH_WITHOUT_LINKS)
    number = errno.EAGAIN
    for _ in range(OPENAT2_TRIES):
        fd: int = _libc.syscall(
            ctypes.c_long(_SYS_OPENAT2),
            ctypes.c_long(directory),
            ctypes.c_char_p(encoded),
            ctypes.byref(how),
            ctypes.c_size_t(ctypes.sizeof(how)),
        )
        if fd >= 0:
            return fd
        number = ctypes.get_errno()
        if number not in {errno.EAGAIN, errno.EINTR}:
            break
    raise OSError(number, os.strerror(number), path)


def walk_open(directory: int, path: str, flags: int) -> int:
    """`open_beneath` one name at a time."""
    *parents, last = path.rstrip("/").split("/")
    if ".." in parents or last == ".." or path.startswith("/"):
        raise OSError(errno.EXDEV, os.strerror(errno.EXDEV), path)
    at = directory
    try:
        for name in parents:
            child = os.open(name, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=at)
            if at != directory:
                os.close(at)
            at = child
        return os.open(last, flags | os.O_NOFOLLOW, dir_fd=at)
    finally:
        if at != directory:
            os.close(at)


@contextlib.contextmanager
def opened(fd: int) -> Iterator[int]:
    """Close a descriptor on the way out."""
    try:
        yield fd
    finally:
        os.close(fd)


def empty(directory: int) -> None:
    """Remove everything in a directory, whatever it holds and however deep it goes.

    Every directory that is not empty is first moved up into `directory`, so that two descriptors
    are enough for any depth and no path gets long.

    Raises:
        OSError: ENOTEMPTY when something keeps adding to it.
    """
    token = secrets.token_hex(8)
    for _ in range(3):
        pending = _unlink_files(directory)
        if not pending:
            return
        moved = 0
        while pending:
            name = pending.pop()
            with contextlib.suppress(FileNotFoundError), _open_any(directory, name) as child:
                for below in _unlink_files(child):
                    try:
                        os.rmdir(below, dir_fd=child)
                    except OSError:
                        make_ours(child, below)
                        up = f".{token}-{moved}"
                        os.rename(below, up, src_dir_fd=child, dst_dir_fd=directory)
                        pending.append(up)
                        moved += 1
            with contextlib.suppress(OSError):
                os.rmdir(name, dir_fd=directory)
    if _unlink_files(directory):
        raise OSError(errno.ENOTEMPTY, "something keeps adding files while they are removed")


def _unlink_files(directory: int) -> list[str]:
    """Unlink whatever is no directory; the names of those that are."""
    directories: list[str] = []
    with os.scandir(directory) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                directories.append(entry.name)
                continue
            try:
                os.unlink(entry.name, dir_fd=directory)
            except FileNotFoundError:
                continue
            except IsADirectoryError:
                directories.append(entry.name)
    return directories


@contextlib.contextmanager
def _open_any(directory: int, name: str) -> Iterator[int]:
    """A directory of ours opened for listing and changing, even if its mode forbids both."""
    make_ours(directory, name)
    with opened(os.open(name, OPEN_DIRECTORY, dir_fd=directory)) as fd:
        yield fd


def make_ours(directory: int, name: str) -> None:
    """Give a directory's owner, who is us, every right to it. Root needs none."""
    if os.geteuid() == 0:
        return
    with opened(open_beneath(directory, name, OPEN_DIRECTORY | os.O_PATH)) as fd:
        if stat.S_IMODE(os.fstat(fd).st_mode) & stat.S_IRWXU != stat.S_IRWXU:
            # An O_PATH descriptor takes no fchmod; its /proc entry names this very inode.
            Path(f"/proc/self/fd/{fd}").chmod(stat.S_IRWXU)
