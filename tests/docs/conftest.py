"""What pages are run on: a directory like a checkout, and something for kernels to run in."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture(
    scope="session",
    params=[
        pytest.param("docker", marks=pytest.mark.docker),
        pytest.param("bubblewrap", marks=pytest.mark.slow),
    ],
)
def runtime(request: pytest.FixtureRequest) -> Iterator[dict[str, str]]:
    """Settings of a runtime whose kernels have every package that pages use."""
    if request.param == "docker":
        yield {"KERNELPOOL_RUNTIME": "docker", "KERNELPOOL_IMAGE": os.environ["KERNELPOOL_IMAGE"]}
        return
    shared = Path(tempfile.mkdtemp(prefix="kpd-"))
    shared.chmod(0o711)
    command = [sys.executable, "-m", "orchestrator", "image", "build", "--runtime", "bubblewrap"]
    subprocess.run(command, env=os.environ | {"KERNELPOOL_STATE_DIR": str(shared)}, check=True)
    yield {"KERNELPOOL_RUNTIME": "bubblewrap", "environments": str(shared / "environments")}
    shutil.rmtree(shared)


@pytest.fixture
def checkout(runtime: dict[str, str]) -> Iterator[tuple[Path, dict[str, str]]]:
    """A directory in which `.venv/bin/kernelpool` works, and the environment for it."""
    directory = Path(tempfile.mkdtemp(prefix="kpd-"))
    directory.chmod(0o711)
    (directory / ".venv").symlink_to(sys.prefix)
    state = directory / "state"
    state.mkdir(mode=0o711)
    settings = {**runtime, "KERNELPOOL_STATE_DIR": str(state)}
    environments = settings.pop("environments", None)
    if environments is not None:
        (state / "environments").symlink_to(environments)
    yield directory, settings
    shutil.rmtree(directory)


@pytest.fixture(autouse=True)
def _no_blocking_calls() -> None:
    """Pages run in processes of their own; a test here may block."""
