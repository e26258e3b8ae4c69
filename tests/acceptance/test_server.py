"""The server itself: sockets, time limits, TLS, a stop in good order."""

from __future__ import annotations

import asyncio
import shutil
import socket
import ssl
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import httpx2
import pytest
from starlette.responses import PlainTextResponse
from starlette.types import Receive, Scope, Send

from orchestrator import server
from orchestrator.server import ServerError, Tls, listen, serving
from tests.acceptance.conftest import TLS

Handler = Callable[[Scope, Receive, Send], Awaitable[None]]


async def hello(scope: Scope, receive: Receive, send: Send) -> None:
    await PlainTextResponse("hello")(scope, receive, send)


@asynccontextmanager
async def client_of(app: Handler, **options: float) -> AsyncIterator[httpx2.AsyncClient]:
    async with (
        serving(app, listen("127.0.0.1", 0), grace=options.get("grace", 2)) as address,
        httpx2.AsyncClient(base_url=address.url, verify=TLS, timeout=10) as client,
    ):
        yield client


async def test_a_port_that_is_taken_is_one_clear_line() -> None:
    with listen("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ServerError, match=f"127.0.0.1:{port}: Address already in use. Use"):
            listen("127.0.0.1", port)


async def test_an_address_of_nobody_is_one_clear_line() -> None:
    with pytest.raises(ServerError, match="--host"):
        listen("256.1.1.1", 0)
    with pytest.raises(ServerError, match=r"Cannot listen on 192\.0\.2\.1"):
        listen("192.0.2.1", 0)


async def test_an_error_of_the_caller_comes_out_as_it_is() -> None:
    with pytest.raises(LookupError, match="mine"):
        async with serving(hello, listen("127.0.0.1", 0)):
            raise LookupError("mine")


async def test_short_answers_are_not_held_back(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[int] = []
    connection_made = server.Protocol.connection_made

    def look(self: server.Protocol, transport: asyncio.Transport) -> None:
        accepted = transport.get_extra_info("socket")
        found.append(accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
        connection_made(self, transport)

    monkeypatch.setattr(server.Protocol, "connection_made", look)
    async with client_of(hello) as client:
        assert (await client.get("/")).text == "hello"
    assert found
    assert all(found)


async def test_a_stop_lets_requests_finish_and_takes_no_new_ones() -> None:
    asked, go = asyncio.Event(), asyncio.Event()

    async def slow(scope: Scope, receive: Receive, send: Send) -> None:
        asked.set()
        await go.wait()
        await hello(scope, receive, send)

    async def call(url: str) -> str:
        async with httpx2.AsyncClient(verify=TLS) as client:
            return (await client.get(url)).text

    with anyio.fail_after(10):
        async with serving(slow, listen("127.0.0.1", 0), grace=5) as address:
            running = asyncio.create_task(call(address.url))
            await asked.wait()
            asyncio.get_running_loop().call_later(0.5, go.set)
        assert await running == "hello"
    with pytest.raises(httpx2.ConnectError):
        await call(address.url)


async def test_a_request_that_outlasts_the_grace_period_is_cancelled_and_cleans_up() -> None:
    asked, cleaned = asyncio.Event(), asyncio.Event()

    async def stuck(scope: Scope, receive: Receive, send: Send) -> None:
        try:
            asked.set()
            await asyncio.Event().wait()
        finally:
            with anyio.CancelScope(shield=True):
                await anyio.sleep(0.05)
            cleaned.set()

    async def call(url: str) -> int:
        async with httpx2.AsyncClient(verify=TLS) as client:
            return (await client.get(url)).status_code

    with anyio.fail_after(10):
        async with serving(stuck, listen("127.0.0.1", 0), grace=1) as address:
            running = asyncio.create_task(call(address.url))
            await asked.wait()
        assert cleaned.is_set()
        assert await running == 500


@pytest.mark.parametrize("sent", [b"", b"GET / HTTP/1.1\r\nHost: x\r\nX-Slow"])
async def test_a_head_that_does_not_come_is_given_up(
    monkeypatch: pytest.MonkeyPatch, sent: bytes
) -> None:
    monkeypatch.setattr(server, "HEAD_SECONDS", 0.1)
    async with client_of(hello) as client:
        with anyio.fail_after(5):
            async with await anyio.connect_tcp("127.0.0.1", client.base_url.port or 0) as raw:
                if sent:
                    await raw.send(sent)
                answer = await raw.receive()
                with pytest.raises(anyio.EndOfStream):
                    await raw.receive()
        assert answer.startswith(b"HTTP/1.1 408 ")
        assert (await client.get("/")).text == "hello"
        await anyio.sleep(0.3)
        assert (await client.get("/")).text == "hello"


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Tls:
    """A certificate for this machine, made for these tests."""
    if shutil.which("openssl") is None:
        pytest.skip("no openssl to make a certificate with")
    directory = tmp_path_factory.mktemp("tls")
    tls = Tls(directory / "certificate.pem", directory / "key.pem")
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"),
            *("-nodes", "-days", "2", "-subj", "/CN=localhost"),
            *("-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"),
            *("-keyout", str(tls.key), "-out", str(tls.certificate)),
        ],
        check=True,
        capture_output=True,
    )
    return tls


@pytest.fixture
def trusting(certificate: Tls) -> ssl.SSLContext:
    """A client's context that trusts the certificate."""
    return ssl.create_default_context(cafile=str(certificate.certificate))


async def test_https_is_served(certificate: Tls, trusting: ssl.SSLContext) -> None:
    async with serving(hello, listen("127.0.0.1", 0), tls=certificate) as address:
        assert address.url.startswith("https://127.0.0.1:")
        async with httpx2.AsyncClient(verify=trusting) as client:
            assert (await client.get(address.url)).text == "hello"


async def test_a_certificate_that_cannot_be_used_is_one_clear_line(tmp_path: Path) -> None:
    missing = Tls(tmp_path / "no.pem", tmp_path / "no.key")
    with pytest.raises(ServerError, match="TLS certificate or key cannot be used"):
        async with serving(hello, listen("127.0.0.1", 0), tls=missing):
            pass
