"""A real server on loopback with a real Redis behind it; only the kernels are pretended."""

from __future__ import annotations

import io
import secrets
import shutil
import ssl
import subprocess
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpcore2  # noqa: F401 - imported here, since httpx2 would do it in the event loop
import httpx2
import pytest
from fastapi import FastAPI

from orchestrator.app import create_app
from orchestrator.artifacts import Artifacts
from orchestrator.server import listen, serving
from orchestrator.settings import Settings, load
from orchestrator.store import Store, open_store
from orchestrator.telemetry import Metrics, configure_logging
from orchestrator.testing import ScriptedDispatcher

TLS = ssl.create_default_context()
"""Made here, since reading certificates blocks."""


@dataclass(frozen=True)
class Service:
    """What a test talks to, and what it may look behind."""

    url: str
    http: httpx2.AsyncClient
    """Sends the key of the test's own tenant."""
    key: str
    other_key: str
    """Key of another tenant."""
    app: FastAPI
    store: Store
    dispatcher: ScriptedDispatcher
    metrics: Metrics
    settings: Settings

    async def container(self, **fields: Any) -> str:
        """Make a container and return its id."""
        reply = await self.http.post("/v1/containers", json={"name": "test", **fields})
        assert reply.status_code == 200, reply.text
        container_id: str = reply.json()["id"]
        return container_id

    async def run(self, container_id: str, code: str, **fields: Any) -> Any:
        """Run code and return the execution object."""
        reply = await self.http.post(
            f"/v1/containers/{container_id}/executions", json={"code": code, **fields}
        )
        assert reply.status_code == 200, reply.text
        return reply.json()

    async def upload(self, container_id: str, name: str, content: bytes) -> Any:
        """Upload a file and return its object."""
        reply = await self.http.post(
            f"/v1/containers/{container_id}/files", files={"file": (name, content)}
        )
        assert reply.status_code == 200, reply.text
        return reply.json()


@pytest.fixture(scope="session", autouse=True)
def logged() -> io.StringIO:
    """What the services log."""
    lines = io.StringIO()
    configure_logging("info", as_json=True, stream=lines)
    return lines


@pytest.fixture(scope="session")
def redis_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A Redis of our own on a unix socket."""
    binary = shutil.which("redis-server") or shutil.which("valkey-server")
    if binary is None:
        pytest.fail("no redis-server or valkey-server on PATH")
    directory = tmp_path_factory.mktemp("redis")
    socket = directory / "redis.sock"
    server = subprocess.Popen(
        [binary, "--port", "0", "--unixsocket", str(socket), "--save", "", "--dir", str(directory)],
        stdout=subprocess.DEVNULL,
    )
    deadline = time.monotonic() + 10
    while not socket.exists():
        assert time.monotonic() < deadline, "redis-server did not start"
        time.sleep(0.01)
    yield f"unix://{socket}"
    server.terminate()
    server.wait(10)


ServiceWith = Callable[..., AbstractAsyncContextManager[Service]]


@pytest.fixture
def service_with(redis_url: str, tmp_path: Path) -> ServiceWith:
    """A factory of services, for tests that need other settings."""
    artifacts = Artifacts.open(str(tmp_path / "artifacts"))

    @asynccontextmanager
    async def start(
        *, with_keys: bool = True, slots: int = 64, queue_limit: int = 4, **changed: Any
    ) -> AsyncIterator[Service]:
        run = secrets.token_hex(6)
        key, other_key = f"key-{run}", f"other-{run}"
        keys = {key: f"tenant-{run}", other_key: f"rival-{run}"} if with_keys else {}
        settings = replace(load({}), api_keys=keys, **changed)
        metrics = Metrics()
        async with (
            open_store(redis_url, artifacts) as store,
            ScriptedDispatcher(
                store,
                artifacts,
                tmp_path / "workspaces",
                slots=slots,
                queue_limit=queue_limit,
                disk_bytes=64 * 1024 * 1024,
            ) as dispatcher,
        ):
            app = create_app(settings=settings, store=store, dispatcher=dispatcher, metrics=metrics)
            async with (
                serving(app, listen("127.0.0.1", 0), grace=2) as address,
                httpx2.AsyncClient(
                    base_url=address.url,
                    headers={"authorization": f"Bearer {key}"} if with_keys else {},
                    timeout=20,
                    verify=TLS,
                ) as http,
            ):
                yield Service(
                    url=address.url,
                    http=http,
                    key=key,
                    other_key=other_key,
                    app=app,
                    store=store,
                    dispatcher=dispatcher,
                    metrics=metrics,
                    settings=settings,
                )

    return start


@pytest.fixture
async def service(service_with: ServiceWith) -> AsyncIterator[Service]:
    """A service with two tenants."""
    async with service_with() as running:
        yield running
