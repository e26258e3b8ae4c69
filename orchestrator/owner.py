"""Owner: the sessions of one host. The only writer of execution records and event logs.

Above: routes/, reaper.py. Below: live_session.py,
kernelpool's pool, the store. Implements `Dispatcher`.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Final
from weakref import WeakValueDictionary

import structlog

from kernelpool import (
    MEMORY_TIERS,
    FailureCode,
    KernelPoolError,
    Lease,
    NameRefused,
    Pool,
    PoolExhausted,
    Tasks,
    clean_name,
)
from kernelpool import WorkspaceFull as DiskFull
from orchestrator.artifacts import Artifacts, ArtifactStoreError
from orchestrator.dispatch import FileContent
from orchestrator.errors import (
    BadRequest,
    NoSlot,
    ServiceError,
    SessionExpired,
    SessionNotFound,
    TierTooLarge,
    Unavailable,
    WorkspaceFull,
)
from orchestrator.executions import (
    Execution,
    ExecutionEvent,
    ExecutionOrder,
    ExecutionStatus,
)
from orchestrator.live_session import HOLD_MARGIN, LiveSession
from orchestrator.session_files import stored_content
from orchestrator.sessions import EndReason, Session, SessionFile, SessionOrder, SessionStatus
from orchestrator.store import PageQuery, Store

log = structlog.get_logger(__name__)

SLOT_RETRY: Final = 5.0
"""Seconds after which a caller that found no slot may try again."""

LEAST_TIMEOUT: Final = 1.0
"""Seconds that an adopted execution may still take at least: enough to find that it has ended."""

CLOSE_TIMEOUT: Final = 60.0
"""Seconds that the end of the process waits for sessions to be archived."""


@dataclass(frozen=True, slots=True)
class OwnerLimits:
    """What callers may ask of one host."""

    max_lifetime: float | None
    """Seconds; None is no limit."""
    tenant_sessions: int | None
    """Running sessions per tenant; None is no limit."""
    queue: int
    """Executions that may wait in one session."""
    upload_bytes: int
    host_memory_bytes: int


class Owner:
    """Runs the sessions of this host; an async context manager.

    Args:
        worker_id: Marks the sessions that are ours.
        pool: Entered by the caller.
        store: Opened by the caller.
        artifacts: Where bytes go that outlive their session.
        limits: What callers may ask.
    """

    def __init__(
        self,
        *,
        worker_id: str,
        pool: Pool,
        store: Store,
        artifacts: Artifacts,
        limits: OwnerLimits,
    ) -> None:
        self._worker_id = worker_id
        self._pool = pool
        self._store = store
        self._artifacts = artifacts
        self._limits = limits
        self._live: dict[str, LiveSession] = {}
        self._winding_up: dict[str, asyncio.Task[None]] = {}
        self._recreating: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._tasks = Tasks("owner", worker_id=worker_id)

    def __repr__(self) -> str:
        """How many sessions live here."""
        return f"<Owner {self._worker_id}: {len(self._live)} live>"

    async def __aenter__(self) -> Owner:
        """Go on with the sessions whose kernels the pool adopted; the others end as lost."""
        running = {
            session.id: session for session in await self._store.sessions_of(self._worker_id)
        }
        for session_id in self._pool.sessions():
            if session_id not in running:
                self._pool.release(session_id)
        for session in running.values():
            lease = self._pool.lease_of(session.id)
            if lease is not None:
                await self._take_up(self._make_live(session, lease))
                continue
            for execution in await self._store.unfinished_executions(session.id):
                await self._store.finish_execution(_lost(execution, at=self._store.clock()))
            await self._store.end_session(session.id, EndReason.WORKER_LOST, epoch=session.epoch)
            self._tasks.spawn(self._archive_records(session.id))
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """End every session as drained and wait until all is stored and removed."""
        for session_id in list(self._live):
            try:
                await self.close(session_id, reason=EndReason.DRAINED)
            except ServiceError as error:
                log.warning("session not ended", session_id=session_id, error=error.message)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_TIMEOUT):
                await self._tasks.wait()

    async def open(self, order: SessionOrder) -> Session:
        """Make a session on a slot of this host; see `Dispatcher`."""
        return await self._open(order, state_lost=False)

    async def _open(self, order: SessionOrder, *, state_lost: bool) -> Session:
        memory_bytes = MEMORY_TIERS[order.memory_limit]
        if memory_bytes > self._limits.host_memory_bytes:
            raise TierTooLarge(
                f"memory_limit {order.memory_limit} is more than this host's "
                f"{self._limits.host_memory_bytes:,} bytes.",
                param="memory_limit",
            )
        session_id = f"cntr_{secrets.token_hex(24)}"
        session = await self._store.create_session(
            session_id,
            order,
            worker_id=self._worker_id,
            max_lifetime=self._limits.max_lifetime,
            tenant_limit=self._limits.tenant_sessions,
        )
        # Its first code comes soon, and must not share the processors with the warming of the slot
        # that takes this one's place.
        self._pool.executed()
        try:
            lease = await self._pool.lease(session_id, memory_bytes=memory_bytes)
        except KernelPoolError as error:
            await self._store.end_session(session_id, EndReason.DELETED, epoch=session.epoch)
            await self._store.forget_session(session_id)
            if isinstance(error, PoolExhausted):
                raise NoSlot(f"No free slot: {error}.", retry_after=SLOT_RETRY) from error
            raise Unavailable(f"No slot could be made: {error}", retry_after=SLOT_RETRY) from error
        self._make_live(session, lease, state_lost=state_lost)
        return session

    async def recreate(self, session_id: str) -> Session:
        """A session in place of an ended one; see `Dispatcher`."""
        async with self._recreating.setdefault(session_id, asyncio.Lock()):
            old = await self._store.get_session(session_id, None)
            if old.status is SessionStatus.RUNNING:
                return old
            await self._wound_up(session_id)
            successor_id = await self._store.successor(session_id)
            if successor_id is not None:
                try:
                    return await self.recreate(successor_id)
                except SessionNotFound:
                    log.info("successor was deleted", session_id=session_id)
            order = SessionOrder(old.tenant, old.name, old.idle_minutes, old.memory_limit)
            session = await self._open(order, state_lost=True)
            try:
                await self._restore(session_id, self._live[session.id])
                await self._store.set_successor(session_id, session.id)
            except BaseException:
                await self.close(session.id, reason=EndReason.DELETED)
                raise
            return session

    async def _wound_up(self, session_id: str) -> None:
        """Wait until the files of a session that has just ended are stored."""
        while (task := self._winding_up.get(session_id)) is not None:
            await asyncio.wait([task])

    async def _restore(self, session_id: str, live: LiveSession) -> None:
        after: str | None = None
        while True:
            page = await self._store.list_files(
                session_id, PageQuery(after, limit=100, order="asc")
            )
            for file in page.items:
                try:
                    await live.files.restore(file)
                except KernelPoolError as error:
                    log.warning("file not restored", session_id=session_id, error=str(error))
                except ArtifactStoreError as error:
                    raise Unavailable(f"The artifact store does not answer: {error}") from error
            if not page.has_more:
                return
            after = page.items[-1].id

    async def close(self, session_id: str, *, reason: EndReason) -> None:
        """End a session; its slot is emptied in the background. See `Dispatcher`."""
        session = await self._store.get_session(session_id, None)
        await self._store.end_session(session_id, reason, epoch=session.epoch)
        live = self._live.pop(session_id, None)
        if reason is EndReason.DELETED:
            artifacts = await self._store.forget_session(session_id)
            self._tasks.spawn(self._drop(session_id, live, artifacts))
        elif live is not None:
            self._winding_up[session_id] = self._tasks.spawn(self._wind_up(session_id, live))

    @asynccontextmanager
    async def execute(
        self, session_id: str, order: ExecutionOrder
    ) -> AsyncIterator[AsyncIterator[ExecutionEvent]]:
        """Run code; see `Dispatcher`."""
        live = await self._find(session_id)
        job = await live.submit(order)
        if isinstance(job, Execution):
            earlier = self._store.event_log.follow(job.id, session_id=session_id)
            async with aclosing(earlier) as events:
                yield events
            return
        try:
            async with aclosing(job.follow(self._store.event_log)) as events:
                yield events
        finally:
            if not order.background:
                live.abandon(job)

    async def cancel(self, session_id: str, execution_id: str) -> Execution:
        """Interrupt or drop an execution; see `Dispatcher`."""
        live = self._live.get(session_id)
        if live is None:
            return await self._store.get_execution(session_id, execution_id)
        return await live.cancel(execution_id)

    async def answer_input(self, session_id: str, execution_id: str, text: str) -> Execution:
        """Hand over a line of input; see `Dispatcher`."""
        live = await self._find(session_id)
        return await live.answer_input(execution_id, text)

    async def restart(self, session_id: str) -> Session:
        """A new kernel on the same files; see `Dispatcher`."""
        live = await self._find(session_id)
        try:
            await live.restart()
        except KernelPoolError as error:
            # Where the session has ended meanwhile, that is the answer.
            await self._find(session_id)
            raise Unavailable(f"The kernel did not start: {error}") from error
        return await self._store.get_session(session_id, None)

    async def put_file(
        self, session_id: str, name: str, chunks: AsyncIterator[bytes]
    ) -> SessionFile:
        """Write an upload; see `Dispatcher`."""
        live = await self._find(session_id)
        try:
            return await live.files.put(
                clean_name(name), chunks, max_bytes=self._limits.upload_bytes
            )
        except NameRefused as error:
            raise BadRequest(f"Unusable file name: {error}.", param="file") from error
        except DiskFull as error:
            raise WorkspaceFull(str(error), param="file") from error

    @asynccontextmanager
    async def read_file(self, session_id: str, file_id: str) -> AsyncIterator[FileContent]:
        """Open a file, from the workspace while there is one; see `Dispatcher`."""
        live = self._live.get(session_id)
        try:
            if live is not None:
                async with live.files.read(file_id) as content:
                    yield content
                return
            file = await self._store.get_file(session_id, file_id)
            if not file.outlives_session:
                raise SessionExpired
            async with stored_content(file, self._artifacts) as content:
                yield content
        except ArtifactStoreError as error:
            log.warning("file not read", session_id=session_id, error=str(error))
            raise Unavailable("The artifact store does not answer.") from error

    async def delete_file(self, session_id: str, file_id: str) -> None:
        """Remove a file; see `Dispatcher`."""
        live = await self._find(session_id)
        await live.files.delete(file_id)

    async def _find(self, session_id: str) -> LiveSession:
        live = self._live.get(session_id)
        if live is None:
            session = await self._store.get_session(session_id, None)
            if session.status is SessionStatus.EXPIRED:
                raise SessionExpired
            raise Unavailable("The container's worker is not here.", retry_after=1)
        return live

    def _make_live(
        self, session: Session, lease: Lease, *, state_lost: bool = False
    ) -> LiveSession:
        live = self._live[session.id] = LiveSession(
            session,
            lease,
            pool=self._pool,
            store=self._store,
            artifacts=self._artifacts,
            queue_limit=self._limits.queue,
            state_lost=state_lost,
        )
        return live

    async def _take_up(self, live: LiveSession) -> None:
        """The execution that was running goes on; those that waited are not known well enough."""
        session_id = live.session.id
        for execution in await self._store.unfinished_executions(session_id):
            if execution.status is ExecutionStatus.QUEUED:
                await self._store.finish_execution(_never_ran(execution, at=self._store.clock()))
                continue
            held_until = await self._store.held_until(session_id, execution.id)
            left = (held_until or 0.0) - HOLD_MARGIN - self._store.clock()
            logged = await self._store.event_log.last_number(execution.id)
            live.take_up(execution, timeout=max(left, LEAST_TIMEOUT), logged=logged)
        log.info("session goes on", session_id=session_id)

    async def _drop(self, session_id: str, live: LiveSession | None, artifacts: list[str]) -> None:
        if live is not None:
            await live.stop()
            self._pool.release(session_id)
        try:
            await self._artifacts.delete(artifacts)
            await self._artifacts.delete_prefix(f"sessions/{session_id}/")
        except ArtifactStoreError as error:
            log.warning("bytes not deleted", session_id=session_id, error=str(error))

    async def _wind_up(self, session_id: str, live: LiveSession) -> None:
        try:
            await live.stop()
            await live.files.archive()
        finally:
            self._winding_up.pop(session_id, None)
            self._pool.release(session_id)
        await self._archive_records(session_id)

    async def _archive_records(self, session_id: str) -> None:
        try:
            await self._store.archive_executions(session_id)
        except (ServiceError, ArtifactStoreError) as error:
            log.warning("records not archived", session_id=session_id, error=str(error))


def _never_ran(execution: Execution, *, at: float) -> Execution:
    failure = {
        "code": FailureCode.WORKER_LOST.value,
        "message": "The worker ended while the execution waited in the queue; it did not run.",
    }
    return replace(execution, status=ExecutionStatus.FAILED, completed_at=at, failure=failure)


def _lost(execution: Execution, *, at: float) -> Execution:
    failure = {
        "code": FailureCode.WORKER_LOST.value,
        "message": "The worker that ran the code is gone; how far it came is not known.",
    }
    return replace(execution, status=ExecutionStatus.FAILED, completed_at=at, failure=failure)
