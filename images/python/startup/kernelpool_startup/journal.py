"""The journal: what was published, in a file, so that nothing is lost while no worker listens.

Above: `iopub.py` and `kernel.py` append each message before they send it. Below: one file that the
host reads when it takes a kernel over and may truncate to nothing between cells.

A record is a 4-byte big-endian length of what follows, then one byte for the channel and, for each
frame of the signed message (signature, header, parent header, metadata, content, buffers), a 4-byte
big-endian length and the frame:

    00 00 01 23 | i | 00 00 00 40 signature | 00 00 00 9a header | ...

Channels: `i` iopub, `s` shell (execute replies), `t` a record without frames: messages are missing
from here on, because the cell reached its bound or the disk was full.
"""

import errno
import json
import os
import stat
import struct
import threading
from collections.abc import Callable, Sequence
from typing import Any

IOPUB = b"i"
SHELL = b"s"
MISSING = b"t"

SMALL_MESSAGE_BYTES = 64 * 1024
"""Past a cell's bound a message that says how it ended is kept up to this size, longer ones cut."""

OUTCOMES = frozenset({"status", "error", "execute_reply"})

DELIMITER = b"<IDS|MSG>"

_LENGTH = struct.Struct(">I")

Sign = Callable[[list[bytes]], bytes]


class Journal:
    """An append-only file of messages. Never raises: a lost journal must not cost a cell.

    Args:
        path: The file, created if missing; a link is not followed.
        cell_bytes: Bound for one cell; past it only outcomes are written.
        sign: Signs the four JSON frames of a message that was shortened.
    """

    def __init__(self, path: str, *, cell_bytes: int, sign: Sign) -> None:
        self._cell_bytes = cell_bytes
        self._sign = sign
        self._lock = threading.Lock()
        self._written = 0
        self._bounded = False
        self._gap = False
        self._descriptor: int | None = _open(path)
        os.register_at_fork(after_in_child=self._forget)

    def begin_cell(self) -> None:
        """Start counting anew."""
        self._written = 0
        self._bounded = False

    def append(self, channel: bytes, message: Sequence[Any]) -> None:
        """Write one message, given as it is sent: identities, delimiter, signature, frames."""
        if self._descriptor is None:
            return
        frames = [_as_bytes(frame) for frame in message]
        frames = frames[frames.index(DELIMITER) + 1 :]
        with self._lock:
            record = _encode(channel, frames)
            if self._bounded or self._written + len(record) > self._cell_bytes:
                shortened = self._outcome(frames)
                if not self._bounded:
                    self._bounded = True
                    self._write(_encode(MISSING, ()))
                if shortened is None:
                    return
                record = _encode(channel, shortened)
            self._written += len(record)
            self._write(record)

    def _outcome(self, frames: list[bytes]) -> list[bytes] | None:
        """Return the frames of a message that says how a cell ended, small; of others None."""
        try:
            header = json.loads(frames[1])
            if header["msg_type"] not in OUTCOMES:
                return None
            if sum(map(len, frames)) <= SMALL_MESSAGE_BYTES:
                return frames
            content = json.loads(frames[4])
            signed = [*frames[1:4], json.dumps(_shortened(content)).encode()]
            return [self._sign(signed), *signed]
        except (ValueError, KeyError, IndexError, TypeError):
            return None

    def _write(self, record: bytes) -> None:
        if self._descriptor is None:
            return
        if self._gap:
            record = _encode(MISSING, ()) + record
        try:
            written = os.write(self._descriptor, record)
            if written < len(record):
                # Half a record would make all later ones unreadable.
                size = os.fstat(self._descriptor).st_size
                os.ftruncate(self._descriptor, max(0, size - written))
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            self._gap = False
        except OSError:
            self._gap = True

    def _forget(self) -> None:
        """A child process keeps no way to write: what it did is not what its parent published."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def _open(path: str) -> int | None:
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
    try:
        descriptor = os.open(path, flags, 0o600)
    except OSError:
        return None
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        return None
    return descriptor


def _as_bytes(frame: Any) -> bytes:
    return frame if isinstance(frame, bytes) else bytes(memoryview(frame))


def _encode(channel: bytes, frames: Sequence[bytes]) -> bytes:
    parts = [channel]
    for frame in frames:
        parts += (_LENGTH.pack(len(frame)), frame)
    body = b"".join(parts)
    return _LENGTH.pack(len(body)) + body


def _shortened(content: dict[str, Any]) -> dict[str, Any]:
    """Cut an error or a reply: its last lines say most, what else it carries says least."""
    kept = {key: content[key] for key in ("status", "execution_count", "ename") if key in content}
    if "ename" in content:
        kept["ename"] = str(content["ename"])[:1024]
        kept["evalue"] = str(content.get("evalue", ""))[:8192]
        traceback = "\n".join(map(str, content.get("traceback", ())))
        kept["traceback"] = traceback[-4096:].splitlines()
    if "status" in kept:
        kept |= {"user_expressions": {}, "payload": []}
    return kept
