"""ZMTP 3.0 as a client speaks it: bytes in, messages out. Above: channels.py. Below: nothing.

Pure. See rfc.zeromq.org/spec/23: a greeting of 64 bytes, READY (NULL mechanism), then frames.

libzmq would do, but for one thing: it gathers the frames of a message in memory until the last one
comes, however many there are, and the other side here is code that we do not trust.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from typing import Final, Literal

SocketType = Literal["SUB", "DEALER"]

GREETING: Final = b"\xff" + bytes(8) + b"\x7f" + b"\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)

MORE: Final = 1
LONG: Final = 2
COMMAND: Final = 4

SUBSCRIBE_ALL: Final = b"\x01"
"""Body of a message that subscribes to every topic."""

_LONG_SIZE: Final = struct.Struct(">Q")
_VALUE_SIZE: Final = struct.Struct(">I")


class ProtocolError(Exception):
    """The other side does not speak the protocol, or goes beyond the limits."""


def ready(socket_type: SocketType, identity: bytes = b"") -> bytes:
    """The READY command that ends our half of the handshake."""
    body = b"\x05READY" + _property(b"Socket-Type", socket_type.encode())
    if identity:
        body += _property(b"Identity", identity)
    return _frame(body, COMMAND)


def message(frames: Sequence[bytes]) -> bytes:
    """A message of some frames, ready to be sent."""
    last = len(frames) - 1
    return b"".join(
        _frame(frame, MORE if place < last else 0) for place, frame in enumerate(frames)
    )


def _property(name: bytes, value: bytes) -> bytes:
    return bytes([len(name)]) + name + _VALUE_SIZE.pack(len(value)) + value


def _frame(body: bytes, flags: int) -> bytes:
    if len(body) < 256:
        return bytes([flags, len(body)]) + body
    return bytes([flags | LONG]) + _LONG_SIZE.pack(len(body)) + body


class Reader:
    """Turns what arrives into messages.

    Args:
        max_bytes: Of one message, all frames together.
        max_frames: Of one message.
    """

    def __init__(self, *, max_bytes: int, max_frames: int) -> None:
        self._max_bytes = max_bytes
        self._max_frames = max_frames
        self._buffer = bytearray()
        self._start = 0
        self._greeted = False
        self._ready = False
        self._frames: list[bytes] = []
        self._size = 0

    @property
    def ready(self) -> bool:
        """Whether the other side has ended its half of the handshake."""
        return self._ready

    def feed(self, data: bytes) -> None:
        """Take bytes as they arrived; `messages` gives out what they complete."""
        if self._start:
            del self._buffer[: self._start]
            self._start = 0
        self._buffer += data

    def messages(self) -> Iterator[list[bytes]]:
        """The messages that are complete, each once. May be left and gone on with later.

        Raises:
            ProtocolError: what arrived is no ZMTP, or beyond the limits.
        """
        if not self._greeted:
            self._greet()
        while (frame := self._next_frame()) is not None:
            flags, body = frame
            if flags & COMMAND:
                self._ready = self._ready or body.startswith(b"\x05READY")
                continue
            self._frames.append(body)
            if not flags & MORE:
                frames, self._frames, self._size = self._frames, [], 0
                yield frames

    def _greet(self) -> None:
        if len(self._buffer) < len(GREETING):
            return
        if self._buffer[0] != 0xFF or self._buffer[9] != 0x7F or self._buffer[10] < 3:
            raise ProtocolError("no ZMTP 3 greeting")
        if not self._buffer[12:32].startswith(b"NULL\0"):
            raise ProtocolError("another mechanism than NULL")
        self._start = len(GREETING)
        self._greeted = True

    def _next_frame(self) -> tuple[int, bytes] | None:
        buffer, start = self._buffer, self._start
        left = len(buffer) - start
        if not self._greeted or left < 2:
            return None
        flags = buffer[start]
        if flags & LONG:
            if left < 9:
                return None
            (size,) = _LONG_SIZE.unpack_from(buffer, start + 1)
            begin = start + 9
        else:
            size = buffer[start + 1]
            begin = start + 2
        self._check(flags, size)
        end = begin + size
        if len(buffer) < end:
            return None
        self._start = end
        if not flags & COMMAND:
            self._size += size
        return flags, bytes(memoryview(buffer)[begin:end])

    def _check(self, flags: int, size: int) -> None:
        if flags & ~(MORE | LONG | COMMAND):
            raise ProtocolError(f"unknown flags {flags:#x}")
        if self._size + size > self._max_bytes:
            raise ProtocolError(f"a message of more than {self._max_bytes:,} bytes")
        if len(self._frames) >= self._max_frames:
            raise ProtocolError(f"a message of more than {self._max_frames} frames")
