"""Fixtures for tests of the kernel's start-up code."""

from collections.abc import AsyncIterator, Callable, Coroutine

import anyio
import pytest

from .started_kernel import PYTHON, StartedKernel, StartKernel, started_kernel


@pytest.fixture
def start_kernel() -> StartKernel:
    """Start a kernel with settings of the test's own."""
    return started_kernel


@pytest.fixture
async def kernel() -> AsyncIterator[StartedKernel]:
    """A kernel with a journal."""
    async with started_kernel(KERNELPOOL_JOURNAL="{directory}/journal") as kernel:
        yield kernel


@pytest.fixture
def needs() -> Callable[[str], Coroutine[None, None, None]]:
    """Skip the test where the kernel's interpreter lacks a library."""

    async def skip_without(module: str) -> None:
        program = f"import importlib.util as u, sys; sys.exit(not u.find_spec({module!r}))"
        if (await anyio.run_process([PYTHON, "-c", program], check=False)).returncode:
            pytest.skip(f"{module} is not installed beside the kernel")

    return skip_without
