"""Fixtures that every kind of test shares."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from blockbuster import BlockBuster, blockbuster_ctx

REQUIRE_DOCKER = os.environ.get("KERNELPOOL_REQUIRE_DOCKER") == "1"


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    """All async tests run on asyncio."""
    return "asyncio"


@pytest.fixture(autouse=True)
def _no_blocking_calls() -> Iterator[BlockBuster]:
    """Fail any test that blocks the event loop."""
    with blockbuster_ctx() as blockbuster:
        yield blockbuster


def _why_no_docker() -> str | None:
    if not os.environ.get("KERNELPOOL_IMAGE"):
        return "no kernel image: KERNELPOOL_IMAGE is not set (`make test` builds it and sets it)"
    if not os.environ.get("DOCKER_HOST") and not os.path.exists("/var/run/docker.sock"):
        return "no Docker Engine: neither DOCKER_HOST nor /var/run/docker.sock"
    return None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip Docker tests with a reason where no engine is, or fail when they are required."""
    reason = _why_no_docker()
    if reason is None:
        return
    docker_items = [item for item in items if item.get_closest_marker("docker")]
    if docker_items and REQUIRE_DOCKER:
        raise pytest.UsageError(f"{len(docker_items)} Docker tests would be skipped: {reason}")
    for item in docker_items:
        item.add_marker(pytest.mark.skip(reason=reason))
