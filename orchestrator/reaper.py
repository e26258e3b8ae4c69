"""The loop that ends what expired. Above: host.py. Below: the store, the dispatcher.

Deadlines lie in Redis, on its clock, so any worker's reaper finds every session that is due.
"""

from __future__ import annotations

import asyncio
from typing import Final

import structlog

from orchestrator.artifacts import Artifacts, ArtifactStoreError
from orchestrator.dispatch import Dispatcher
from orchestrator.errors import ServiceError, SessionNotFound
from orchestrator.store import Store

log = structlog.get_logger(__name__)

LONGEST_WAIT: Final = 1.0
"""Seconds between looks at the latest: a call may bring a deadline nearer than was known."""

SHORTEST_WAIT: Final = 0.05

RETENTION_INTERVAL: Final = 60.0
"""Seconds between looks for sessions whose retention time is over."""


async def reap(store: Store, dispatcher: Dispatcher, artifacts: Artifacts) -> None:
    """End sessions as they fall due, forget them when their retention is over; never returns."""
    loop = asyncio.get_running_loop()
    forget_at = loop.time()
    while True:
        wait: float | None = LONGEST_WAIT
        try:
            await end_due(store, dispatcher)
            wait = await store.next_deadline()
            if loop.time() >= forget_at:
                forget_at = loop.time() + RETENTION_INTERVAL
                await forget_old(store, artifacts)
        except (ServiceError, ArtifactStoreError) as error:
            log.warning("reaper could not finish its round", error=str(error))
        await asyncio.sleep(min(LONGEST_WAIT, max(SHORTEST_WAIT, wait or LONGEST_WAIT)))


async def end_due(store: Store, dispatcher: Dispatcher) -> int:
    """End every session that is due now; how many that were."""
    due = await store.due_sessions()
    for session, reason in due:
        try:
            await dispatcher.close(session.id, reason=reason)
        except SessionNotFound:
            continue
        log.info("session ended", session_id=session.id, reason=reason.value)
    return len(due)


async def forget_old(store: Store, artifacts: Artifacts) -> int:
    """Forget the sessions whose retention time is over, bytes included; how many that were."""
    forgettable = await store.forgettable_sessions()
    for session_id in forgettable:
        await artifacts.delete(await store.forget_session(session_id))
        await artifacts.delete_prefix(f"sessions/{session_id}/")
    return len(forgettable)
