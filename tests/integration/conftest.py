"""A real server, a store on it, and what both are asked about."""

from __future__ import annotations

import secrets
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from orchestrator.artifacts import Artifacts
from orchestrator.embedded_redis import redis_server
from orchestrator.redis_link import RedisLink, open_link
from orchestrator.sessions import Session, SessionOrder
from orchestrator.store import Store, open_store


@pytest.fixture(scope="session")
def redis_directory() -> Iterator[Path]:
    """A short path: sockets go there."""
    with tempfile.TemporaryDirectory(prefix="kp-") as directory:
        yield Path(directory)


@pytest.fixture(scope="session")
async def shared_redis(redis_directory: Path) -> AsyncIterator[str]:
    """One server for all tests that leave it alive."""
    async with redis_server(redis_directory) as url:
        yield url


@pytest.fixture
async def redis_url(shared_redis: str, anyio_backend: str) -> str:
    """A server without keys."""
    async with open_link(shared_redis) as link:
        await link.call("FLUSHALL", repeatable=True)
        await link.call("CONFIG", "SET", "maxmemory", 512 * 1024 * 1024, repeatable=True)
    return shared_redis


@pytest.fixture
def artifacts(tmp_path: Path) -> Artifacts:
    """An empty artifact store."""
    return Artifacts.open(str(tmp_path / "artifacts"))


@pytest.fixture
async def store(redis_url: str, artifacts: Artifacts) -> AsyncIterator[Store]:
    """A store on a server without keys."""
    async with open_store(redis_url, artifacts) as store:
        yield store


@pytest.fixture
async def redis(redis_url: str) -> AsyncIterator[RedisLink]:
    """The server, to look behind the store."""
    async with open_link(redis_url) as link:
        yield link


NewSession = Callable[..., Any]


@pytest.fixture
def new_session(store: Store) -> NewSession:
    """Make a session; what a test says nothing of is set."""

    async def make(
        tenant: str = "acme",
        name: str = "demo",
        *,
        worker_id: str = "worker-1",
        epoch: int = 1,
        idle_minutes: int = 20,
        max_lifetime: float | None = 3600,
        tenant_limit: int | None = None,
    ) -> Session:
        return await store.create_session(
            f"cntr_{secrets.token_urlsafe(24)}",
            SessionOrder(tenant, name, idle_minutes),
            worker_id=worker_id,
            epoch=epoch,
            max_lifetime=max_lifetime,
            tenant_limit=tenant_limit,
        )

    return make
