"""Reader of the journal that a kernel's start-up code keeps. Above: kernel.py. Below: beneath.py.

The kernel appends every iopub message and every shell reply to `run/journal` before it sends it,
so that a worker that was away can read what it missed. Everything in the file is untrusted.

    record  = length (4 bytes, big-endian, of what follows), channel (1 byte), frame*
    frame   = length (4 bytes, big-endian), bytes
    channel = `i` iopub | `s` shell | `t` earlier records were dropped to save space

The frames are those of the Jupyter wire protocol after the delimiter: signature, header, parent
header, metadata, content, buffers.
"""

from __future__ import annotations

import os
import stat
import struct
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

import anyio
from anyio import to_thread

from kernelpool.beneath import OPEN_DIRECTORY, OPEN_FILE, opened

Channel = Literal["iopub", "shell", "truncated"]

JOURNAL_NAME: Final = "journal"
"""File name inside a slot's run directory."""

MAX_RECORD_BYTES: Final = 64 * 1024 * 1024
"""Longest record that is believed. Above the largest message a worker takes from a kernel."""

BATCH_BYTES: Final = 1024 * 1024
"""What one trip into a thread reads at least, if there is that much."""

_CHANNELS: Final[dict[int, Channel]] = {ord("i"): "iopub", ord("s"): "shell", ord("t"): "truncated"}
_LENGTH: Final = struct.Struct(">I")

Read = Callable[[int, int], bytes]
"""`read(size, offset)`: at most `size` bytes at that offset, b"" only at the end of the file."""


@dataclass(frozen=True, slots=True)
class JournalRecord:
    """One message as the kernel wrote it."""

    channel: Channel
    frames: tuple[bytes, ...]
    end: int
    """Offset of the next record; reading may go on from here."""


class JournalReader(Iterator[JournalRecord]):
    """Iterates over the records from an offset on. Does no I/O but through `read`.

    Iteration ends at the end of the file, before a record that is not complete yet (another
    iteration goes on there), or at bytes that cannot be a record: then `garbage` is set, and stays.
    """

    def __init__(self, read: Read, offset: int = 0) -> None:
        self._read = read
        self.offset = offset
        self.garbage = False

    def __next__(self) -> JournalRecord:
        if self.garbage:
            raise StopIteration
        head = self._exactly(_LENGTH.size, self.offset)
        if head is None:
            raise StopIteration
        (length,) = _LENGTH.unpack(head)
        if not 1 <= length <= MAX_RECORD_BYTES:
            self.garbage = True
            raise StopIteration
        start = self.offset + _LENGTH.size
        body = self._exactly(length, start)
        if body is None:
            raise StopIteration
        channel = _CHANNELS.get(body[0])
        frames = _frames(body)
        if channel is None or frames is None:
            self.garbage = True
            raise StopIteration
        self.offset = start + length
        return JournalRecord(channel, frames, self.offset)

    def _exactly(self, size: int, offset: int) -> bytes | None:
        """That many bytes, or None when the file ends before."""
        pieces: list[bytes] = []
        while size:
            piece = self._read(size, offset)
            if not piece:
                return None
            pieces.append(piece)
            size -= len(piece)
            offset += len(piece)
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)


def _frames(body: bytes) -> tuple[bytes, ...] | None:
    """The frames after the channel byte; None when the lengths do not add up."""
    frames: list[bytes] = []
    at = 1
    while at < len(body):
        if at + _LENGTH.size > len(body):
            return None
        (length,) = _LENGTH.unpack_from(body, at)
        at += _LENGTH.size
        if at + length > len(body):
            return None
        frames.append(body[at : at + length])
        at += length
    return tuple(frames)


def encode(channel: Channel, frames: tuple[bytes, ...] = ()) -> bytes:
    """One record as it stands in the file."""
    mark = next(byte for byte, name in _CHANNELS.items() if name == channel)
    body = bytes([mark]) + b"".join(_LENGTH.pack(len(frame)) + frame for frame in frames)
    return _LENGTH.pack(len(body)) + body


class Journal:
    """The journal in one run directory, opened afresh for each call and never through a link."""

    def __init__(self, run: Path) -> None:
        self._run = run
        self._calls = anyio.CapacityLimiter(1)
        self.garbage = False
        """Reading met bytes that are no record; what follows them is lost."""

    async def records(self) -> AsyncIterator[JournalRecord]:
        """Every record, up to the end as it is when it is reached."""
        offset = 0
        while batch := await to_thread.run_sync(self._batch, offset, limiter=self._calls):
            for record in batch:
                yield record
            offset = batch[-1].end

    async def truncate_if_over(self, limit_bytes: int) -> None:
        """Empty the journal when it is larger; a `truncated` record is left at the start.

        Only while no execution runs.
        """
        await to_thread.run_sync(self._truncate_if_over, limit_bytes, limiter=self._calls)

    def _open(self, flags: int = 0) -> int | None:
        """The journal as a descriptor, None when there is no regular file of that name."""
        try:
            directory = os.open(self._run, OPEN_DIRECTORY)
        except (FileNotFoundError, NotADirectoryError):
            return None
        with opened(directory):
            try:
                fd = os.open(JOURNAL_NAME, OPEN_FILE | flags, dir_fd=directory)
            except OSError:
                # Missing, a link, a socket, a FIFO without reader, or held by a lease: no journal.
                return None
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            os.close(fd)
            return None
        return fd

    def _batch(self, offset: int) -> list[JournalRecord]:
        fd = self._open()
        if fd is None:
            return []
        with opened(fd):
            reader = JournalReader(lambda size, at: os.pread(fd, size, at), offset)
            batch: list[JournalRecord] = []
            for record in reader:
                batch.append(record)
                if record.end - offset >= BATCH_BYTES:
                    break
            self.garbage = self.garbage or reader.garbage
            return batch

    def _truncate_if_over(self, limit_bytes: int) -> None:
        fd = self._open(os.O_WRONLY | os.O_APPEND)
        if fd is None:
            return
        with opened(fd):
            size = os.fstat(fd).st_size
            if size > limit_bytes:
                os.ftruncate(fd, 0)
                os.write(fd, encode("truncated", (str(size).encode(),)))
