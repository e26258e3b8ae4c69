"""Channels: the ZeroMQ sockets of one kernel, on the event loop. The home of zmq.

Above: kernel.py. Below: wire.py. Knows frames and messages; has never heard of executions.

The sockets are read by their file descriptors rather than through zmq.asyncio, whose future per
receive costs more than the receive. The descriptor is edge-triggered: after each readiness, and
after each send, a socket has to be drained until it has nothing left.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import structlog
import zmq

from kernelpool.errors import KernelClosed
from kernelpool.execution import Channel, Message
from kernelpool.wire import Wire, WireError

log = structlog.get_logger(__name__)

PORTS: Final = {"shell": 1, "iopub": 2, "stdin": 3, "control": 4, "hb": 5}
"""The `ports` of ipc transport: the endings of the socket files' names."""

RECEIVE_HIGH_WATER: Final = 1000
"""Messages that wait in a socket before the kernel's iopub blocks. libzmq's own default."""

MAX_MESSAGE_BYTES: Final = 64 * 1024 * 1024
"""One frame at most; a longer one ends the connection, and with it the kernel."""

DRAIN_BATCH: Final = 100
"""Messages read from one socket before the loop gets to others. At 20 µs each, 2 ms."""

LINGER: Final = 0
"""Milliseconds that unsent messages outlive their socket."""

MAX_SOCKETS: Final = 16_384
"""Sockets in this process; a kernel takes eight with their monitors. libzmq's default is 1023."""


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


class _Socket:
    """One socket: drains itself into `take` whenever it is readable."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        kind: int,
        address: str,
        take: Callable[[Sequence[bytes]], None],
        *,
        identity: bytes = b"",
        disconnected: Callable[[], None] | None = None,
    ) -> None:
        self._take = take
        self._loop = asyncio.get_running_loop()
        self._scheduled: asyncio.Handle | None = None
        self._held = False
        self._socket = context.socket(kind)
        self._socket.linger = LINGER
        self._socket.rcvhwm = RECEIVE_HIGH_WATER
        self._socket.maxmsgsize = MAX_MESSAGE_BYTES
        self._socket.reconnect_ivl = -1
        if identity:
            self._socket.identity = identity
        if kind == zmq.SUB:
            self._socket.subscribe(b"")
        self._monitor: zmq.Socket[bytes] | None = None
        if disconnected is not None:
            self._monitor = self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
            self._loop.add_reader(self._monitor.fileno(), self._monitored, disconnected)
        self._socket.connect(address)
        self._descriptor = self._socket.fileno()
        self._loop.add_reader(self._descriptor, self._drain)
        self._schedule()

    def _monitored(self, disconnected: Callable[[], None]) -> None:
        assert self._monitor is not None
        with contextlib.suppress(zmq.Again):
            while not self._monitor.closed:
                self._monitor.recv_multipart(zmq.NOBLOCK)
                disconnected()

    def send(self, frames: Sequence[bytes]) -> None:
        try:
            self._socket.send_multipart(frames, zmq.NOBLOCK)
        except zmq.Again:
            raise KernelClosed("the kernel has closed its connection") from None
        self._schedule()

    def hold(self, held: bool) -> None:
        """Stop or go on reading; meanwhile messages wait in the socket, then in the kernel."""
        self._held = held
        if not held:
            self._schedule()

    def _schedule(self) -> None:
        if self._scheduled is None:
            self._scheduled = self._loop.call_soon(self._drain)

    def _drain(self) -> None:
        if self._scheduled is not None:
            self._scheduled.cancel()
            self._scheduled = None
        for _ in range(DRAIN_BATCH):
            if self._held or self._socket.closed:
                return
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._take(frames)
        self._schedule()

    def close(self) -> None:
        self._loop.remove_reader(self._descriptor)
        if self._scheduled is not None:
            self._scheduled.cancel()
        if self._monitor is not None:
            self._loop.remove_reader(self._monitor.fileno())
            self._socket.disable_monitor()
            self._monitor.close(LINGER)
        self._socket.close(LINGER)


class Channels:
    """The shell, iopub, stdin and control channels of one kernel, connected.

    Args:
        info: The host's side of the connection.
        identity: Routing id of our sockets; the same for every connection to one kernel, so that a
            reply finds us after a restart of the worker.
        jupyter_session: Session id in the headers of our requests.
        take: Called on the loop with each valid message.
        broken: Called once when the kernel closes the connection.
    """

    def __init__(
        self,
        info: ConnectionInfo,
        *,
        identity: bytes,
        jupyter_session: str,
        take: Callable[[Channel, Message], None],
        broken: Callable[[], None],
    ) -> None:
        self.wire = Wire(info.key.encode(), jupyter_session)
        self._take = take
        self._broken = broken
        self._refused = 0
        self.received_bytes = 0
        """Bytes of all messages so far, which is about what the kernel's journal has grown by."""
        context = _context()

        def connect(channel: Channel, kind: int) -> _Socket:
            def receive(frames: Sequence[bytes]) -> None:
                self._receive(channel, frames)

            address = f"ipc://{info.socket_path(channel)}"
            return _Socket(
                context,
                kind,
                address,
                receive,
                identity=identity if kind == zmq.DEALER else b"",
                disconnected=self._disconnected if channel in ("iopub", "shell") else None,
            )

        self._sockets: dict[str, _Socket] = {
            "iopub": connect("iopub", zmq.SUB),
            "shell": connect("shell", zmq.DEALER),
            "stdin": connect("stdin", zmq.DEALER),
            "control": connect("control", zmq.DEALER),
        }

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

    def _disconnected(self) -> None:
        broken, self._broken = self._broken, _nothing
        broken()


@functools.cache
def _context() -> zmq.Context[zmq.Socket[bytes]]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    context.max_sockets = MAX_SOCKETS
    return context


def _nothing() -> None:
    """Take the place of a callback that has been called."""
