"""`asyncio.run` inside a cell.

Above: user code. Below: asyncio. A cell is itself run by the kernel's event loop, so `asyncio.run`
refuses. The loop cannot do anything else before the cell's code returns, hence nothing is lost by
taking it off the thread for that time: a second loop then runs in the same thread, as it would in a
script. Loops themselves stay as they are; an interrupt is raised in the coroutine that runs.
"""

import asyncio
import functools
from asyncio import events
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


def install(kernel_loop: asyncio.AbstractEventLoop) -> None:
    """Let `asyncio.run` and `asyncio.Runner` work where only the kernel's loop is in their way."""
    asyncio.run = asyncio.runners.run = _beside(kernel_loop, asyncio.run)
    asyncio.Runner.run = _beside(kernel_loop, asyncio.Runner.run)
    asyncio.Runner.close = _beside(kernel_loop, asyncio.Runner.close)


def _beside(kernel_loop: asyncio.AbstractEventLoop, run: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(run)
    def run_beside(*args: Any, **kwargs: Any) -> Any:
        if events._get_running_loop() is not kernel_loop:
            return run(*args, **kwargs)
        with _set_aside(kernel_loop):
            return run(*args, **kwargs)

    return run_beside


@contextmanager
def _set_aside(loop: asyncio.AbstractEventLoop) -> Iterator[None]:
    events._set_running_loop(None)
    try:
        yield
    finally:
        events._set_running_loop(loop)
        asyncio.set_event_loop(loop)
