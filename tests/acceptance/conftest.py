"""A real server on loopback with a real Redis behind it; only the kernels are pretended."""

from __future__ import annotations

import io
import secrets
import ssl
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import httpcore2  # noqa: F401 - imported here, since httpx2 would do it in the event loop
import httpx2
import pytest
from fastapi import FastAPI

from orchestrator.app import create_app
from orchestrator.artifacts import Artifacts
from orchestrator.embedded_redis import redis_server
from orchestrator.server import Tls, listen, serving
from orchestrator.settings import Settings, load
from orchestrator.store import Store, open_store
from orchestrator.telemetry import Metrics, configure_logging
from orchestrator.testing import ScriptedDispatcher
from orchestrator.testing_script import Gates

TLS = ssl.create_default_context()
"""Made here, since reading certificates blocks."""


@dataclass(frozen=True)
class Running:
    """A running service, and what a test may look at behind it."""

    url: str
    app: FastAPI
    store: Store
    dispatcher: ScriptedDispatcher
    metrics: Metrics
    settings: Settings

    @asynccontextmanager
    async def seen_with(self, keys: list[str]) -> AsyncIterator[Service]:
        """The service as it is for the holder of the first of two keys."""
        key, other_key = keys or ("", "")
        headers = {"authorization": f"Bearer {key}"} if key else {}
        async with httpx2.AsyncClient(
            base_url=self.url, headers=headers, timeout=20, verify=TLS
        ) as http:
            yield Service(**vars(self), http=http, key=key, other_key=other_key)


@dataclass(frozen=True)
class Service(Running):
    """A running service with a client for it."""

    http: httpx2.AsyncClient
    """Sends the key of the test's own tenant."""
    key: str
    other_key: str
    """Key of another tenant."""

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
async def redis_url() -> AsyncIterator[str]:
    """A Redis of our own, as `kernelpool up` has it."""
    with tempfile.TemporaryDirectory(prefix="kp-") as directory:
        async with redis_server(Path(directory)) as url:
            yield url


ServiceWith = Callable[..., AbstractAsyncContextManager[Service]]

TENANTS = 200
"""Pairs of keys of a shared service; each test takes one, so that its lists are its own."""


@pytest.fixture(scope="module")
def service_with(redis_url: str, tmp_path_factory: pytest.TempPathFactory) -> ServiceWith:
    """A factory of services, for tests that need other settings."""
    directory = tmp_path_factory.mktemp("service")
    artifacts = Artifacts.open(str(directory / "artifacts"))

    @asynccontextmanager
    async def start(
        *,
        with_keys: bool = True,
        slots: int = 1000,
        redis: str = redis_url,
        tls: Tls | None = None,
        **changed: Any,
    ) -> AsyncIterator[Service]:
        run = secrets.token_hex(6)
        keys = {f"key-{run}-{number}": f"tenant-{run}-{number}" for number in range(2 * TENANTS)}
        settings = replace(load({}), api_keys=keys if with_keys else {}, **changed)
        metrics = Metrics()
        async with (
            open_store(redis, artifacts) as store,
            ScriptedDispatcher(
                store,
                artifacts,
                directory / run,
                slots=slots,
                queue_limit=4,
                disk_bytes=64 * 1024 * 1024,
            ) as dispatcher,
        ):
            app = create_app(settings=settings, store=store, dispatcher=dispatcher, metrics=metrics)
            async with serving(app, listen("127.0.0.1", 0), tls=tls, grace=2) as address:
                running = Running(address.url, app, store, dispatcher, metrics, settings)
                async with running.seen_with(list(settings.api_keys)[:2]) as service:
                    yield service

    return start


@pytest.fixture(scope="module")
async def shared_service(service_with: ServiceWith) -> AsyncIterator[Service]:
    """One service for all tests of a module."""
    async with service_with() as running:
        yield running


@pytest.fixture
async def service(
    shared_service: Service, request: pytest.FixtureRequest
) -> AsyncIterator[Service]:
    """A service where this test has two tenants of its own."""
    number = request.session.stash.get(TAKEN, 0) + 1
    request.session.stash[TAKEN] = number
    keys = list(shared_service.settings.api_keys)[2 * number : 2 * number + 2]
    shared_service.dispatcher.gates = Gates()
    running = {field.name: getattr(shared_service, field.name) for field in fields(Running)}
    async with Running(**running).seen_with(keys) as seen:
        yield seen


TAKEN = pytest.StashKey[int]()
