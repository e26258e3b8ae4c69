"""Fixtures that every kind of test shares."""

from __future__ import annotations

import os
import shutil
import sysconfig
import tempfile
import venv
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import hypothesis
import pytest
from blockbuster import BlockBuster, blockbuster_ctx

PROJECT: Final = Path(__file__).parents[1]

REQUIRE_DOCKER = os.environ.get("KERNELPOOL_REQUIRE_DOCKER") == "1"

# Every test has a limit already; one per example would only fail on a loaded machine.
hypothesis.settings.register_profile("no-deadline", deadline=None)
hypothesis.settings.load_profile("no-deadline")


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    """All async tests run on asyncio."""
    return "asyncio"


@pytest.fixture(autouse=True)
def _no_blocking_calls() -> Iterator[BlockBuster]:
    """Fail any test that blocks the event loop."""
    with blockbuster_ctx() as blockbuster:
        # A listing of /proc, which waits for nothing.
        blockbuster.functions["os.listdir"].can_block_in("kernelpool/keeper.py", "children")
        yield blockbuster


def _why_no_docker() -> str | None:
    if absent := os.environ.get("KERNELPOOL_DOCKER_ABSENT"):
        return absent
    if not os.environ.get("KERNELPOOL_IMAGE"):
        return "no kernel image: KERNELPOOL_IMAGE is not set (`make test` builds it and sets it)"
    if not os.environ.get("DOCKER_HOST") and not Path("/var/run/docker.sock").exists():
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


def _link_or_copy(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


@pytest.fixture(scope="session")
def kernel_environment() -> Iterator[Path]:
    """An environment with ipykernel and our start-up code, made of the packages that run the tests.

    It lacks what the kernel image adds (pandas, matplotlib, ...), and needs no network.
    """
    directory = Path(tempfile.mkdtemp(prefix="kp-kernels-"))
    directory.chmod(0o755)
    environment = directory / "python"
    venv.create(environment, symlinks=True, with_pip=False)
    target = Path(sysconfig.get_path("purelib", vars={"base": str(environment)}))
    shutil.copytree(
        sysconfig.get_path("purelib"),
        target,
        copy_function=_link_or_copy,
        dirs_exist_ok=True,
        ignore=shutil.ignore_patterns("mypy*", "ruff*", "openai*", "*.pth", "__pycache__"),
    )
    startup = PROJECT / "images" / "python" / "startup" / "kernelpool_startup"
    shutil.copytree(startup, target / "kernelpool_startup")
    for path in (environment, *environment.rglob("*")):
        if not path.is_symlink():
            path.chmod(path.stat().st_mode | (0o555 if path.is_dir() else 0o444))
    yield environment
    shutil.rmtree(directory)
