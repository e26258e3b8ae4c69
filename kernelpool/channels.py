"""Channels: the four connections to one kernel, on the event loop.

Above: kernel.py. Below: zmtp.py, wire.py. Knows frames and messages, never heard of executions.

There is one connection per channel, for the life of the kernel's process: a second one would follow
whatever link the code has planted at the socket's path meanwhile. What a kernel sends is bounded
per message; what it sends faster than it is read waits in its own buffers, then holds it up.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, cast

import structlog

from kernelpool import zmtp
from kernelpool.errors import KernelClosed
from kernelpool.execution import Channel, Message
from kernelpool.wire import Wire, WireError

log = structlog.get_logger(__name__)

PORTS: Final = {"shell": 1, "iopub": 2, "stdin": 3, "control": 4, "hb": 5}
"""The `ports` of ipc transport: the endings of the socket files' names."""

MAX_MESSAGE_BYTES: Final = 64 * 1024 * 1024
"""One message at most, all frames together; a longer one ends the connection, and the kernel."""

MAX_FRAMES: Final = 1024
"""Frames of one message at most. Six are the message, the others are buffers of widgets."""

BATCH: Final = 100
"""Messages taken from one socket before the loop gets to others. At 20 µs each, 2 ms."""


@dataclass(frozen=True, slots=True)
class ConnectionInfo:
    """How to reach a kernel: Jupyter's connection info, for ipc transport.

    Attributes:
        ip: Path that the socket files' names begin with, `<ip>-<port>`.
        key: Signing key of the messages.
    """

    ip: str
    key: str

    def socket_path(self, channel: str) -> Path:
        """The socket file of a channel."""
        return Path(f"{self.ip}-{PORTS[channel]}")

    def as_jupyter(self) -> dict[str, Any]:
        """The connection info as jupyter_client and ipykernel know it, key as str."""
        return {
            "transport": "ipc",
            "ip": self.ip,
            "key": self.key,
            "signature_scheme": "hmac-sha256",
            **{f"{channel}_port": port for channel, port in PORTS.items()},
        }


class _Socket(asyncio.Protocol):
    """One connected socket: hands each message to `take`, and may be held."""

    def __init__(
        self,
        take: Callable[[Sequence[bytes]], None],
        closed: Callable[[str], None],
        hello: bytes,
    ) -> None:
        self._take = take
        self._closed = closed
        self._hello = hello
        self._reader = zmtp.Reader(max_bytes=MAX_MESSAGE_BYTES, max_frames=MAX_FRAMES)
        self._transport: asyncio.Transport | None = None
        self._held = False
        self._going_on: asyncio.Handle | None = None
        self.handshake: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Done when both halves are; libzmq takes nothing else for a message before."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Send our half of the handshake."""
        self._transport = cast("asyncio.Transport", transport)
        self._transport.write(self._hello)

    def data_received(self, data: bytes) -> None:
        """Take what arrived."""
        self._reader.feed(data)
        self._go_on()

    def connection_lost(self, exc: Exception | None) -> None:
        """Tell that the other side has gone, unless we closed."""
        if not self.handshake.done():
            self.handshake.set_exception(KernelClosed("the kernel closed the connection"))
        if self._transport is not None:
            self._transport = None
            self._closed("the kernel closed the connection")

    def send(self, frames: Sequence[bytes]) -> None:
        if self._transport is None or self._transport.is_closing():
            raise KernelClosed("the kernel has closed its connection")
        self._transport.write(zmtp.message(frames))

    def hold(self, held: bool) -> None:
        """Stop or go on reading; meanwhile messages wait in the socket, then in the kernel."""
        self._held = held
        if self._transport is None:
            return
        if held:
            self._transport.pause_reading()
        else:
            self._transport.resume_reading()
            self._go_on()

    def close(self) -> None:
        transport, self._transport = self._transport, None
        if transport is not None:
            transport.abort()
        if self._going_on is not None:
            self._going_on.cancel()

    def _go_on(self) -> None:
        self._going_on = None
        try:
            for count, frames in enumerate(self._reader.messages(), start=1):
                self._take(frames)
                if self._held or self._transport is None:
                    return
                if count == BATCH:
                    self._transport.pause_reading()
                    self._going_on = asyncio.get_running_loop().call_soon(self._after_batch)
                    return
            if self._reader.ready and not self.handshake.done():
                self.handshake.set_result(None)
        except zmtp.ProtocolError as error:
            log.warning("connection refused", reason=str(error))
            self.close()
            self._closed(f"the kernel sent {error}")

    def _after_batch(self) -> None:
        self._going_on = None
        if self._transport is not None and not self._held:
            self._transport.resume_reading()
            self._go_on()


class Channels:
    """The shell, iopub, stdin and control channels of one kernel, connected.

    Args:
        info: The host's side of the connection.
        identity: Routing id of our sockets; the same for every connection to one kernel, so that a
            reply finds us after a restart of the worker.
        jupyter_session: Session id in the headers of our requests.
        take: Called on the loop with each valid message.
        broken: Called once with the reason when the connection ends from the other side.
    """

    def __init__(
        self,
        info: ConnectionInfo,
        *,
        identity: bytes,
        jupyter_session: str,
        take: Callable[[Channel, Message], None],
        broken: Callable[[str], None],
    ) -> None:
        self.wire = Wire(info.key.encode(), jupyter_session)
        self._info = info
        self._identity = identity
        self._take = take
        self._broken = broken
        self._refused = 0
        self.received_bytes = 0
        """Bytes of all messages so far, which is about what the kernel's journal has grown by."""
        self._sockets: dict[Channel, _Socket] = {}

    async def connect(self) -> None:
        """Connect every channel, iopub first, so that nothing is missed.

        Raises:
            KernelClosed: nobody listens.
        """
        await self._connect("iopub", zmtp.ready("SUB"))
        self._sockets["iopub"].send([zmtp.SUBSCRIBE_ALL])
        dealer = zmtp.ready("DEALER", self._identity)
        await asyncio.gather(
            *(self._connect(channel, dealer) for channel in ("shell", "stdin", "control"))
        )

    async def _connect(self, channel: Channel, ready: bytes) -> None:
        def receive(frames: Sequence[bytes]) -> None:
            self._receive(channel, frames)

        loop = asyncio.get_running_loop()
        path = str(self._info.socket_path(channel))
        try:
            _, self._sockets[channel] = await loop.create_unix_connection(
                lambda: _Socket(receive, self._disconnected, zmtp.GREETING + ready), path
            )
            await self._sockets[channel].handshake
        except OSError as error:
            self.close()
            raise KernelClosed(f"the kernel's {channel} cannot be reached: {error}") from error

    def send(
        self,
        channel: Channel,
        message_type: str,
        content: Mapping[str, Any],
        *,
        message_id: str | None = None,
        metadata: Mapping[str, Any] | None = None,
        parent_header: Mapping[str, Any] | None = None,
    ) -> str:
        """Send a message and return its id.

        Raises:
            KernelClosed: the kernel has closed the connection; nothing was sent.
        """
        message_id, frames = self.wire.encode(
            message_type,
            content,
            message_id=message_id,
            metadata=metadata,
            parent_header=parent_header,
        )
        self._sockets[channel].send(frames)
        return message_id

    def hold_output(self, held: bool) -> None:
        """Stop or go on reading iopub."""
        self._sockets["iopub"].hold(held)

    def close(self) -> None:
        """Close the sockets."""
        for socket in self._sockets.values():
            socket.close()
        self._sockets = {}

    def _receive(self, channel: Channel, frames: Sequence[bytes]) -> None:
        self.received_bytes += sum(map(len, frames))
        try:
            message = self.wire.decode(frames)
        except WireError as error:
            self._refused += 1
            if self._refused == 1:
                log.warning("message refused", channel=channel, reason=str(error))
            return
        self._take(channel, message)

    def _disconnected(self, reason: str) -> None:
        log.debug("connection ended", reason=reason)
        broken, self._broken = self._broken, _nothing
        broken(reason)


def _nothing(_: str) -> None:
    """Take the place of a callback that has been called."""
