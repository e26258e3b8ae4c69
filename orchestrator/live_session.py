"""LiveSession: a session that has a slot here: its queue, its kernel, its files.

Above: owner.py. Below: kernelpool, session_files.py, transcript.py, the store and the event log.

Executions are served first in, first out, by one task. What a job yields goes three ways at once:
to whoever follows it here, to the event log in Redis, and into the transcript's record.
"""

from __future__ import annotations

import asyncio
import secrets
from collections import deque
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace
from typing import Any, Final

import structlog

from kernelpool import (
    DisplayData,
    Done,
    Event,
    ExecuteResult,
    Failure,
    FailureCode,
    InputRequest,
    KernelClosed,
    KernelPoolError,
    Lease,
    Notice,
    Pool,
    Started,
    Tasks,
    UpdateDisplay,
    Usage,
)
from orchestrator.artifacts import Artifacts
from orchestrator.errors import (
    ExecutionNotFound,
    NotWaiting,
    ServiceError,
    StoreUnavailable,
)
from orchestrator.event_log import EventLog
from orchestrator.executions import EventType, Execution, ExecutionEvent, ExecutionOrder
from orchestrator.executions import ExecutionStatus as Status
from orchestrator.session_files import SessionFiles
from orchestrator.sessions import Session
from orchestrator.store import Store
from orchestrator.transcript import Transcript

log = structlog.get_logger(__name__)

HOLD_MARGIN: Final = 90.0
"""Seconds beyond its timeout that an execution holds its session: a kernel's start, an interrupt's
grace, the collecting of files."""

SAVE_RETRY: Final = 0.5
"""Seconds between attempts to hand a finished record to a store that was away."""

DISK_WATCH: Final = 1.0
"""Seconds between looks at the disk use of a slot whose file system has no limit of its own."""

LIVE_EVENTS: Final = 50_000
"""Events of one execution; what comes after them is only in the record. Source: ten times what a
progress bar of an hour sends."""

FOLLOWER_EVENTS: Final = 5_000
"""Events that wait in memory for a slow follower before it is sent to the log."""

_EVENTS_CUT: Final = Notice(
    "events_truncated",
    f"More than {LIVE_EVENTS:,} outputs and updates; later ones are only in the final record.",
)

DISK_FULL: Final = 0.99
"""Part of the quota from which an execution is told that the disk is full."""


class Job:
    """One execution on its way through a live session."""

    def __init__(self, execution: Execution, order: ExecutionOrder) -> None:
        self.id = execution.id
        self.order = order
        self.transcript = Transcript(execution)
        self.cancelled = False
        self.ran = False
        """Whether its code reached the kernel, or may have."""
        self.logged: int | None = None
        """Number of the last event that an earlier worker sent; None when this one began it."""
        self.flushing = False
        """Whether a flush of its transcript is due."""
        self.reserved = asyncio.Event()
        """Set once Redis has it, or has refused it."""
        self.sent = 1
        """Events sent so far, which is the next one's number."""
        self._waiting: deque[ExecutionEvent] | None = None
        self._more = asyncio.Event()
        self._ended = asyncio.Event()
        if not order.background:
            self._waiting = deque([self.transcript.created])

    @property
    def finished(self) -> bool:
        """Whether its last event is out."""
        return self._ended.is_set()

    def publish(self, event: ExecutionEvent) -> None:
        """Hand an event to the one who follows."""
        self.sent = event.sequence_number + 1
        if event.type is EventType.COMPLETED:
            self._ended.set()
        if self._waiting is not None:
            self._waiting.append(event)
            if len(self._waiting) > FOLLOWER_EVENTS:
                self._waiting = None
        self._more.set()

    async def follow(self, event_log: EventLog) -> AsyncGenerator[ExecutionEvent]:
        """Every event from the first to the last, for one follower.

        One who falls far behind, or follows a background run, reads on in the log.
        """
        number = 0
        while self._waiting is not None:
            while self._waiting:
                event = self._waiting.popleft()
                number = event.sequence_number + 1
                yield event
                if event.type is EventType.COMPLETED:
                    return
            if self._waiting is not None:
                self._more.clear()
                await self._more.wait()
        rest = event_log.follow(
            self.id, after=number - 1, session_id=self.transcript.execution.session_id
        )
        async with aclosing(rest):
            async for event in rest:
                yield event

    async def end(self) -> Execution:
        """The final record, once there is one."""
        await self._ended.wait()
        return self.transcript.execution


class LiveSession:
    """A session's queue and what serves it.

    Args:
        session: As it was opened.
        lease: Its slot.
        pool: Told when code runs.
        store: Where records go.
        artifacts: Where bytes go that outlive the session.
        queue_limit: Executions that may wait.
        state_lost: Variables of an earlier session are missing, as the first execution will say.
    """

    def __init__(
        self,
        session: Session,
        lease: Lease,
        *,
        pool: Pool,
        store: Store,
        artifacts: Artifacts,
        queue_limit: int,
        state_lost: bool = False,
    ) -> None:
        self.session = session
        self.files = SessionFiles(session.id, lease.workspace, store, artifacts)
        self._kernel = lease.kernel
        self._slot = lease.slot
        self._pool = pool
        self._store = store
        self._queue_limit = queue_limit
        self._jobs: deque[Job] = deque()
        self._changed = asyncio.Event()
        self._generation = -1 if state_lost else None
        """The kernel's at the last execution; None before the first."""
        self._tasks = Tasks("session", session_id=session.id)
        self._worker = asyncio.create_task(self._serve())

    def __repr__(self) -> str:
        """The kernel, and how many executions are not finished."""
        return f"<LiveSession {self.session.id[:13]}: {self._kernel}, {len(self._jobs)} jobs>"

    async def submit(self, order: ExecutionOrder) -> Job | Execution:
        """Put code in the queue; the earlier execution when the idempotency key is known.

        Raises:
            SessionExpired, SessionNotFound, QueueFull, KeyReused, StoreUnavailable: nothing ran.
        """
        now = self._store.clock()
        first = not self._jobs
        execution = Execution(
            id=f"exec_{secrets.token_urlsafe(24)}",
            session_id=self.session.id,
            code=order.code,
            status=Status.IN_PROGRESS if first else Status.QUEUED,
            created_at=now,
        )
        job = Job(execution, order)
        # Its place is taken before Redis is asked, so that the order is that of arrival.
        self._jobs.append(job)
        try:
            reserved = await self._store.reserve_execution(
                replace(execution, started_at=now if first else None),
                tenant=self.session.tenant,
                idempotency_key=order.idempotency_key,
                request_digest=order.request_digest,
                hold_seconds=sum(waiting.order.timeout for waiting in self._jobs) + HOLD_MARGIN,
                queue_limit=self._queue_limit,
            )
        except BaseException:
            self._drop(job)
            raise
        if not reserved.created:
            self._drop(job)
            return reserved.execution
        self._store.event_log.append(job.id, [job.transcript.created])
        job.reserved.set()
        self._changed.set()
        return job

    def take_up(self, execution: Execution, *, timeout: float, logged: int) -> None:
        """Go on with an execution that an earlier worker began.

        Args:
            execution: As it was recorded.
            timeout: Seconds it may still take.
            logged: Number of the last event in its log.
        """
        order = ExecutionOrder(execution.code, timeout, background=True)
        job = Job(replace(execution, started_at=None), order)
        job.logged = max(logged, 0)
        job.reserved.set()
        self._jobs.append(job)
        self._changed.set()

    async def cancel(self, execution_id: str) -> Execution:
        """Interrupt the running execution or drop a queued one; a finished one is as it is.

        Raises:
            ExecutionNotFound: unknown in this session.
        """
        job = next((job for job in self._jobs if job.id == execution_id), None)
        if job is None:
            return await self._store.get_execution(self.session.id, execution_id)
        self.abandon(job)
        return await job.end()

    def abandon(self, job: Job) -> None:
        """End an execution that nobody waits for; its record tells what came of it."""
        if job.finished:
            return
        job.cancelled = True
        if self._jobs and self._jobs[0] is job:
            self._kernel.interrupt()
        elif job in self._jobs and job.reserved.is_set():
            self._jobs.remove(job)
            self._tasks.spawn(
                self._finish(job, _never_ran("The execution was cancelled in the queue."))
            )

    async def answer_input(self, execution_id: str, text: str) -> Execution:
        """Hand a line to the running execution.

        Raises:
            NotWaiting: it does not wait for input.
            ExecutionNotFound: unknown in this session.
        """
        job = self._jobs[0] if self._jobs else None
        if job is None or job.id != execution_id:
            execution = await self._store.get_execution(self.session.id, execution_id)
            raise NotWaiting(f"The execution is {execution.status}; it does not wait for input.")
        if not self._kernel.answer_input(text):
            raise NotWaiting("The execution runs; it does not wait for input.")
        job.transcript.answered()
        return await self._store.update_execution(job.transcript.execution)

    async def restart(self) -> None:
        """Give the session a new kernel; what runs or waits ends cancelled."""
        self._cancel_all()
        await self._kernel.restart()

    async def stop(self) -> None:
        """End everything that runs or waits, then the kernel; files stay."""
        self._cancel_all()
        await self._kernel.close()
        while self._jobs:
            self._changed.clear()
            await self._changed.wait()
        self._worker.cancel()
        await asyncio.wait([self._worker])
        await self._tasks.wait()

    def _cancel_all(self) -> None:
        for job in list(self._jobs)[1:]:
            self.abandon(job)
        if self._jobs:
            self._jobs[0].cancelled = True

    def _drop(self, job: Job) -> None:
        if job in self._jobs:
            self._jobs.remove(job)
        job.reserved.set()
        self._changed.set()

    async def _serve(self) -> None:
        while True:
            while not self._jobs:
                self._changed.clear()
                await self._changed.wait()
            job = self._jobs[0]
            await job.reserved.wait()
            if self._jobs and self._jobs[0] is job:
                done = await self._guarded(job)
                await self._finish(job, done)
                self._jobs.popleft()
                self._changed.set()

    async def _guarded(self, job: Job) -> Done:
        """Run a job; whatever goes wrong is its outcome, never the end of the queue."""
        try:
            if job.cancelled:
                return _never_ran("The execution was cancelled before it started.")
            return await self._run(job)
        except KernelClosed:
            return _never_ran("The container ended before the execution started.")
        except KernelPoolError as error:
            failure = Failure(FailureCode.KERNEL_START, f"No kernel could be started: {error}")
            return Done("failed", Usage(0.0), failure=failure)
        except ServiceError as error:
            failure = Failure(FailureCode.INTERNAL, error.message)
            return Done("failed", Usage(0.0), failure=failure)
        except Exception:
            log.exception("execution failed", execution_id=job.id)
            self._kernel.interrupt()
            failure = Failure(FailureCode.INTERNAL, "The server met a fault of its own.")
            return Done("failed", Usage(0.0), failure=failure)

    async def _run(self, job: Job) -> Done:
        order = job.order
        execution = job.transcript.execution
        if execution.status is Status.QUEUED:
            stands = await self._store.start_execution(
                replace(execution, status=Status.IN_PROGRESS, started_at=self._store.clock()),
                hold_seconds=order.timeout + HOLD_MARGIN,
            )
            if stands.finished:
                return _never_ran("The execution had ended before it started.")
        self._pool.executed()
        if job.logged is None:
            await self.files.look()
        job.ran = True
        done: Done | None = None
        watch = self._tasks.spawn(self._watch_disk()) if self._slot.quota == "watch" else None
        count: int | None = None
        outputs = 0
        running = self._begin(job)
        try:
            async with aclosing(running):
                async for event in running:
                    if isinstance(event, Done):
                        done = event
                        self._feed(job, event)
                    elif isinstance(event, DisplayData | ExecuteResult | UpdateDisplay):
                        outputs += 1
                        kept, trouble = await self.files.keep(
                            event, self._output_number(count, outputs)
                        )
                        self._feed(job, kept)
                        if trouble is not None:
                            self._feed(job, Notice(FailureCode.ARTIFACT_STORE.value, trouble))
                    else:
                        if isinstance(event, Started):
                            count = event.execution_count
                        self._feed(job, event)
                    if job.cancelled:
                        self._kernel.interrupt()
                    if isinstance(event, InputRequest):
                        await self._store.update_execution(job.transcript.execution)
        finally:
            if watch is not None:
                watch.cancel()
        assert done is not None
        self._pool.executed()
        await self._note_full_disk(job)
        return done

    def _output_number(self, count: int | None, place: int) -> str:
        """Begins an output's file name. A new kernel counts from 1 again; its number tells."""
        generation = self._kernel.generation
        return f"{count or 0}-{place}" if generation <= 1 else f"{generation}.{count or 0}-{place}"

    def _begin(self, job: Job) -> AsyncGenerator[Event]:
        order = job.order
        if job.logged is None:
            return self._kernel.execute(
                order.code,
                request_id=job.id,
                timeout=order.timeout,
                stdin=order.stdin == "ask",
                reset=order.reset,
            )
        # All that the code has published is told again, so what is in the log is taken back.
        clear = {"output_index": None, "output": None}
        cleared = ExecutionEvent(job.logged + 1, EventType.OUTPUT_UPDATED, clear)
        self._send(job, [cleared])
        job.transcript.continue_from(job.sent)
        return self._kernel.resume(job.id, timeout=order.timeout)

    def _feed(self, job: Job, event: Event) -> None:
        now = self._store.clock()
        events = job.transcript.feed(event, at=now)
        self._send(job, events)
        flush_at = job.transcript.flush_at
        if flush_at is not None and not job.flushing:
            job.flushing = True
            asyncio.get_running_loop().call_later(max(0.0, flush_at - now), self._flush, job)

    def _flush(self, job: Job) -> None:
        job.flushing = False
        self._send(job, job.transcript.flush(at=self._store.clock()))

    def _send(self, job: Job, events: list[ExecutionEvent]) -> None:
        if not events or job.sent > LIVE_EVENTS:
            return
        for event in events:
            job.publish(event)
        self._store.event_log.append(job.id, events)
        if job.sent > LIVE_EVENTS:
            self._feed(job, _EVENTS_CUT)

    async def _finish(self, job: Job, done: Done) -> None:
        files: list[dict[str, Any]] = []
        if job.ran:
            try:
                files, trouble = await self.files.collect()
                if trouble is not None:
                    self._feed(job, Notice("files_truncated", trouble))
            except (ServiceError, KernelPoolError) as error:
                log.warning("file changes not recorded", execution_id=job.id, error=str(error))
        job.transcript.continue_from(job.sent)
        last = job.transcript.finish(
            done,
            at=self._store.clock(),
            files=files,
            state_reset=job.ran and self._state_reset(job),
        )
        if done.kernel_end is not None:
            self._tasks.spawn(self._revive())
        execution = job.transcript.execution
        try:
            await self._store.finish_execution(execution)
        except StoreUnavailable:
            self._tasks.spawn(self._save_later(execution))
        except ExecutionNotFound:
            log.debug("execution was deleted with its session", execution_id=job.id)
        self._store.event_log.append(job.id, [last])
        job.publish(last)

    def _state_reset(self, job: Job) -> bool:
        before, self._generation = self._generation, self._kernel.generation
        return before is not None and (job.order.reset or before != self._generation)

    async def _save_later(self, execution: Execution) -> None:
        while True:
            await asyncio.sleep(SAVE_RETRY)
            try:
                await self._store.finish_execution(execution)
            except StoreUnavailable:
                continue
            except ExecutionNotFound:
                log.warning("record lost with its session", execution_id=execution.id)
            return

    async def _revive(self) -> None:
        try:
            await self._kernel.start()
        except KernelPoolError as error:
            log.warning("kernel not replaced", session_id=self.session.id, error=str(error))

    async def _watch_disk(self) -> None:
        while True:
            await asyncio.sleep(DISK_WATCH)
            use = await self._slot.disk_use()
            if use.over:
                self._kernel.interrupt(_quota_failure(use.bytes, use.limit_bytes))
                return

    async def _note_full_disk(self, job: Job) -> None:
        use = await self._slot.disk_use()
        if use.bytes >= use.limit_bytes * DISK_FULL or use.inodes >= use.limit_inodes * DISK_FULL:
            self._feed(
                job,
                Notice(
                    FailureCode.QUOTA_EXCEEDED.value,
                    f"The container's disk is full: {use.bytes:,} of {use.limit_bytes:,} bytes and "
                    f"{use.inodes:,} of {use.limit_inodes:,} files are used.",
                    {"used_bytes": use.bytes, "limit_bytes": use.limit_bytes},
                ),
            )


def _never_ran(why: str) -> Done:
    return Done("cancelled", Usage(0.0), failure=Failure(FailureCode.CANCELLED, why))


def _quota_failure(used: int, limit: int) -> Failure:
    return Failure(
        FailureCode.QUOTA_EXCEEDED,
        f"The code was stopped: {used:,} bytes on disk are more than the container's {limit:,}.",
        {"used_bytes": used, "limit_bytes": limit},
    )
