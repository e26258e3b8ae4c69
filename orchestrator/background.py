"""Tasks that live as long as a block. Above: whoever needs some. Below: anyio.

A task group alone turns every exception of its block into an exception group, so nobody above could
catch it by its class.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio
import anyio.abc


@asynccontextmanager
async def background_tasks() -> AsyncIterator[anyio.abc.TaskGroup]:
    """A task group whose tasks are cancelled at the block's end.

    What the block raises passes through as it is; what a task raises ends the block, in a group.
    """
    raised: Exception | None = None
    async with anyio.create_task_group() as tasks:
        try:
            yield tasks
        except Exception as error:
            raised = error
        finally:
            tasks.cancel_scope.cancel()
    if raised is not None:
        raise raised
