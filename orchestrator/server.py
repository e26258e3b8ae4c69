"""The HTTP server: uvicorn with our options, for as long as a block lasts.

Above: up.py, demo.py. Below: uvicorn. Knows sockets and time limits; the application it
serves is anybody's. Signals are the caller's: leaving the block stops the server in good order.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import socket
import ssl
from collections.abc import AsyncIterator, Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import anyio
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from orchestrator.auth import is_loopback
from orchestrator.errors import BadRequest
from orchestrator.wire import error_object, to_json

KEEP_ALIVE_SECONDS: Final = 75
"""How long an unused connection stays open: longer than the 60 s of common reverse proxies, which
would otherwise send a request into a connection that is just being closed."""

HEAD_SECONDS: Final = 30.0
"""How long a client may take to send a request's head, from the opening of its connection or its
last answer's first new byte. Source: half of Apache's default limit."""

HEAD_BYTES: Final = 64 * 1024
"""Longest request head that may arrive in pieces. Source: twice what common proxies accept."""

STOP_SECONDS: Final = 5.0
"""How long cancelled requests may take to clean up after the grace period."""


class ServerError(Exception):
    """The server cannot be started as asked; the message names the cure."""


@dataclass(frozen=True, slots=True)
class Tls:
    """Certificate and key for https."""

    certificate: Path
    key: Path


@dataclass(frozen=True, slots=True)
class Address:
    """Where a server listens."""

    host: str
    port: int
    tls: bool

    @property
    def url(self) -> str:
        """The address as a client needs it."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'https' if self.tls else 'http'}://{host}:{self.port}"


def refuse_public_bind(host: str, *, keys: bool) -> None:
    """See that a server which asks for no key can be reached from this machine only.

    Raises:
        ServerError: it could be reached from elsewhere.
    """
    if not keys and not is_loopback(host):
        raise ServerError(
            f"--host {host} can be reached from other machines, and no API keys are set: anybody "
            "could run code here. Set KERNELPOOL_API_KEYS, or use --host 127.0.0.1."
        )


def listen(host: str, port: int) -> socket.socket:
    """A listening socket; port 0 takes any free one.

    Raises:
        ServerError: the address is unknown, taken or not allowed.
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except OSError as error:
        raise ServerError(f"--host {host} is no address of this machine: {error}.") from error
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # Inherited by accepted sockets: a short answer leaves at once instead of waiting for the
        # acknowledgement of the one before, which costs 40 ms.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        listener.bind(address)
        listener.listen(2048)
    except OSError as error:
        listener.close()
        cure = "Use another --port, or stop what listens there."
        if isinstance(error, PermissionError):
            cure = "Ports below 1024 need root; use another --port."
        raise ServerError(f"Cannot listen on {host}:{port}: {error.strerror}. {cure}") from error
    listener.setblocking(False)
    return listener


@contextlib.asynccontextmanager
async def serving(
    app: ASGIApp,
    listener: socket.socket,
    *,
    tls: Tls | None = None,
    grace: float = 30.0,
) -> AsyncIterator[Address]:
    """Serve an application while the block lasts.

    On leaving, no new connection is taken, requests being answered get `grace` seconds to end, and
    those that do not are cancelled.

    Raises:
        ServerError: the certificate or key cannot be used.
    """
    config = uvicorn.Config(
        app,
        http=Protocol,
        loop="none",
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        # The address of the peer decides whether it may go without a key; nobody may claim another.
        proxy_headers=False,
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=max(1, round(grace)),
        ssl_context_factory=(lambda *_: _tls_context(tls)) if tls else None,
    )
    try:
        config.load()
    except (OSError, ssl.SSLError) as error:
        listener.close()
        raise ServerError(f"The TLS certificate or key cannot be used: {error}.") from error
    server = _Server(config)
    host, port = listener.getsockname()[:2]
    # A bare task, since a task group would wrap the caller's errors into exception groups.
    task = asyncio.create_task(server.serve([listener]))
    try:
        await server.listening
        yield Address(host, port, tls=tls is not None)
    finally:
        server.should_exit = True
        with anyio.CancelScope(shield=True):
            await asyncio.wait([task])


def _tls_context(tls: Tls) -> ssl.SSLContext:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.load_cert_chain(tls.certificate, tls.key)
    return context


class _Server(uvicorn.Server):
    """uvicorn's server, told when to stop by its caller instead of by signals."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.listening: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        """Serve until `should_exit`; afterwards no request is being handled any more."""
        await super().serve(sockets)
        if self.server_state.tasks:
            await asyncio.wait(self.server_state.tasks, timeout=STOP_SECONDS)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to listen."""
        try:
            await super().startup(sockets)
        except BaseException as error:
            self.listening.set_exception(error)
            raise
        self.listening.set_result(None)

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Leave signals alone."""
        yield


class Protocol(HttpToolsProtocol):
    """One connection: uvicorn's, with bounds on the head and our envelope for what is no HTTP.

    uvicorn waits for ever for a head that never ends and keeps all of it, before any key has been
    seen.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._in_head = True
        self._head_bytes = 0
        self._head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the clock on the first request."""
        super().connection_made(transport)
        self._arm()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the clock."""
        self._disarm()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Feed the parser, unless the head has become too long."""
        super().data_received(data)
        if self._in_head and self.transport is not None and not self.transport.is_closing():
            self._head_bytes += len(data)
            if self._head_bytes > HEAD_BYTES:
                self._refuse(
                    b"431 Request Header Fields Too Large",
                    f"The request's head is larger than the limit of {HEAD_BYTES} bytes.",
                )

    def on_message_begin(self) -> None:
        """A head begins."""
        super().on_message_begin()
        self._in_head = True
        self._head_bytes = 0
        if self._head_timer is None:
            self._arm()

    def on_headers_complete(self) -> None:
        """The head is complete."""
        self._in_head = False
        self._disarm()
        super().on_headers_complete()

    def send_400_response(self, msg: str) -> None:
        """Answer what is no HTTP in the envelope that everything else is answered in."""
        self._refuse(b"400 Bad Request", msg)

    def _arm(self) -> None:
        self._head_timer = self.loop.call_later(HEAD_SECONDS, self._give_up)

    def _disarm(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _give_up(self) -> None:
        self._head_timer = None
        if self._in_head and not self.transport.is_closing():
            self._refuse(
                b"408 Request Timeout", f"No complete request head came in {HEAD_SECONDS:g} s."
            )

    def _refuse(self, status: bytes, message: str) -> None:
        body = to_json(error_object(BadRequest(message)))
        self.transport.write(
            b"HTTP/1.1 %b\r\ncontent-type: application/json\r\ncontent-length: %d\r\n"
            b"x-request-id: req_%b\r\nconnection: close\r\n\r\n%b"
            % (status, len(body), secrets.token_hex(16).encode(), body)
        )
        self.transport.close()
