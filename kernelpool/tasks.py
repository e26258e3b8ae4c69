"""Tasks: work in the background that somebody keeps, logs and waits for.

Above: kernel.py, pool.py, and the owner's side of the orchestrator. Below: asyncio.

A task group would cancel its siblings when one fails; these have nothing to do with each other.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import structlog

log = structlog.get_logger(__name__)


class Tasks:
    """The background tasks of one object.

    Args:
        whose: Says in the log whose task failed.
        fields: Go into that log line.
    """

    def __init__(self, whose: str, **fields: str) -> None:
        self._whose = whose
        self._fields = fields
        self._tasks: set[asyncio.Task[None]] = set()

    def __repr__(self) -> str:
        """Whose, and how many."""
        return f"<Tasks {self._whose}: {len(self._tasks)}>"

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Start work; when it fails, that is logged."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    async def wait_for_one(self) -> None:
        """Wait until one of them has ended; there must be one."""
        await asyncio.wait(set(self._tasks), return_when=asyncio.FIRST_COMPLETED)

    async def wait(self) -> None:
        """Wait until all have ended, those too that start meanwhile."""
        while self._tasks:
            await asyncio.wait(set(self._tasks))

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("task failed", whose=self._whose, error=repr(error), **self._fields)
