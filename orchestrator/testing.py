"""A Dispatcher without kernels, for tests of everything above the seam. Above: tests only.

Below: the real store, artifacts and transcript. Sessions, records, files and event logs are as real
as the Owner's, and both pass `tests/contract/test_dispatcher.py`; only the code is run by a
pretended kernel that knows a small part of Python (testing_script.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import shutil
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final, Literal

import anyio
import anyio.abc
from anyio import to_thread

from kernelpool.errors import NameRefused
from kernelpool.events import Done, Event, Failure, FailureCode, InputRequest, Started, Usage
from kernelpool.file_names import clean_name
from kernelpool.profile import MEMORY_TIERS
from orchestrator.artifacts import Artifacts
from orchestrator.dispatch import FileContent
from orchestrator.errors import (
    BadRequest,
    FileNotFound,
    NoSlot,
    NotWaiting,
    SessionExpired,
    TierTooLarge,
    WorkspaceFull,
)
from orchestrator.executions import (
    EventType,
    Execution,
    ExecutionEvent,
    ExecutionOrder,
    ExecutionStatus,
)
from orchestrator.schema import file_object
from orchestrator.sessions import EndReason, Session, SessionFile, SessionOrder, SessionStatus
from orchestrator.store import FileWritten, PageQuery, Store
from orchestrator.testing_script import Gates, Interpreter, KernelGone
from orchestrator.transcript import Transcript

CHUNK_BYTES: Final = 64 * 1024

HOLD_SECONDS: Final = 30.0
"""Beyond its timeout that an execution holds its session."""


class _Run:
    """One execution on its way."""

    def __init__(self, execution: Execution, order: ExecutionOrder) -> None:
        self.id = execution.id
        self.order = order
        self.transcript = Transcript(execution)
        self.scope = anyio.CancelScope()
        self.input: asyncio.Future[str] | None = None
        self.broken: Exception | None = None
        self.ended = asyncio.Event()
        self._events: list[ExecutionEvent] = [self.transcript.created]
        self._more = asyncio.Event()

    def publish(self, events: list[ExecutionEvent]) -> None:
        """Hand events to whoever follows."""
        self._events += events
        self._more.set()

    def fail(self, broken: Exception) -> None:
        """Let whoever follows fail with this."""
        self.broken = broken
        self._more.set()

    async def follow(self) -> AsyncGenerator[ExecutionEvent, None]:
        """Every event from the first to the last."""
        place = 0
        while True:
            for event in self._events[place:]:
                place += 1
                yield event
                if event.type is EventType.COMPLETED:
                    return
            if self.broken is not None:
                raise self.broken
            if place == len(self._events):
                self._more.clear()
                await self._more.wait()


class _Bench:
    """A running session: its files, its pretended kernel, its queue."""

    def __init__(self, session: Session, workspace: Path, gates: Gates) -> None:
        self.session = session
        self.workspace = workspace
        self.kernel = Interpreter(workspace, gates)
        self.state_lost = False
        self.turn = asyncio.Lock()
        self.runs: dict[str, _Run] = {}

    async def cancel_all(self) -> None:
        """End everything that runs or waits."""
        runs = list(self.runs.values())
        for run in runs:
            run.scope.cancel()
        for run in runs:
            await run.ended.wait()


class ScriptedDispatcher:
    """A Dispatcher whose kernels are pretended. An async context manager.

    Args:
        store: Where records go.
        artifacts: Where files go that outlive their session.
        directory: Where workspaces are made.
        slots: Sessions that may run at once.
        queue_limit: Executions that may wait in a session.
        disk_bytes: Size of a workspace.
        max_lifetime: Seconds; None for no limit.
        largest_tier: The largest memory tier this "host" carries.
    """

    WORKER: Final = "worker_scripted"

    def __init__(
        self,
        store: Store,
        artifacts: Artifacts,
        directory: Path,
        *,
        slots: int = 64,
        queue_limit: int = 16,
        disk_bytes: int = 1024**3,
        max_lifetime: float | None = 3600,
        largest_tier: str = "16g",
    ) -> None:
        self.gates = Gates()
        """Where code that calls `wait` waits."""
        self._store = store
        self._artifacts = artifacts
        self._directory = directory
        self._slots = slots
        self._queue_limit = queue_limit
        self._disk_bytes = disk_bytes
        self._max_lifetime = max_lifetime
        self._largest_tier = largest_tier
        self._benches: dict[str, _Bench] = {}
        self._tasks: anyio.abc.TaskGroup = anyio.create_task_group()

    async def __aenter__(self) -> ScriptedDispatcher:
        await self._tasks.__aenter__()
        return self

    async def __aexit__(self, *exc_info: Any) -> bool | None:
        self._tasks.cancel_scope.cancel()
        return await self._tasks.__aexit__(*exc_info)

    async def settled(self, session_id: str) -> None:
        """Wait until none of the session's executions runs or waits."""
        bench = self._benches.get(session_id)
        for run in list(bench.runs.values()) if bench else []:
            await run.ended.wait()

    async def open(self, order: SessionOrder) -> Session:
        """Make a session."""
        if MEMORY_TIERS[order.memory_limit] > MEMORY_TIERS[self._largest_tier]:
            raise TierTooLarge(
                f"This host carries at most {self._largest_tier}.", param="memory_limit"
            )
        if len(self._benches) >= self._slots:
            raise NoSlot("Every slot is taken.", retry_after=1.0)
        session = await self._store.create_session(
            f"cntr_{secrets.token_urlsafe(24)}",
            order,
            worker_id=self.WORKER,
            max_lifetime=self._max_lifetime,
            tenant_limit=None,
        )
        workspace = self._directory / session.id
        await anyio.Path(workspace).mkdir(parents=True)
        self._benches[session.id] = _Bench(session, workspace, self.gates)
        return session

    async def recreate(self, session_id: str) -> Session:
        """A session in place of an ended one, with its files."""
        old = await self._store.get_session(session_id, None)
        if old.status is SessionStatus.RUNNING:
            return old
        successor_id = await self._store.successor(session_id)
        if successor_id is not None:
            return await self.recreate(successor_id)
        order = SessionOrder(old.tenant, old.name, old.idle_minutes, old.memory_limit)
        session = await self.open(order)
        bench = self._benches[session.id]
        bench.state_lost = True
        for file in (await self._store.list_files(session_id, PageQuery(limit=100))).items:
            if file.artifact is not None:
                path = anyio.Path(bench.workspace / file.path)
                await path.parent.mkdir(parents=True, exist_ok=True)
                size = await path.write_bytes(await self._artifacts.get(file.artifact))
                written = [FileWritten(file.path, size, file.source)]
                await self._store.apply_file_changes(session.id, written=written, removed=[])
        await self._store.set_successor(session_id, session.id)
        return session

    async def close(self, session_id: str, *, reason: EndReason) -> None:
        """End a session."""
        session = await self._store.get_session(session_id, None)
        bench = self._benches.pop(session_id, None)
        await self._store.end_session(session_id, reason, epoch=session.epoch)
        if bench is not None:
            await bench.cancel_all()
            if reason is not EndReason.DELETED:
                await self._archive(bench)
            await to_thread.run_sync(shutil.rmtree, bench.workspace)
        if reason is EndReason.DELETED:
            await self._artifacts.delete(await self._store.forget_session(session_id))

    @asynccontextmanager
    async def execute(
        self, session_id: str, order: ExecutionOrder
    ) -> AsyncIterator[AsyncIterator[ExecutionEvent]]:
        """Run code once and yield its events."""
        bench = await self._bench(session_id)
        execution = Execution(
            id=f"exec_{secrets.token_urlsafe(24)}",
            session_id=session_id,
            code=order.code,
            status=ExecutionStatus.QUEUED,
            created_at=time.time(),
        )
        run = _Run(execution, order)
        reservation = await self._store.reserve_execution(
            execution,
            tenant=bench.session.tenant,
            idempotency_key=order.idempotency_key,
            request_digest=order.request_digest,
            hold_seconds=order.timeout + HOLD_SECONDS,
            queue_limit=self._queue_limit,
        )
        if not reservation.created:
            earlier = reservation.execution.id
            async with contextlib.aclosing(self._events_of(bench, earlier)) as events:
                yield events
            return
        bench.runs[run.id] = run
        self._store.event_log.append(run.id, [run.transcript.created])
        self._tasks.start_soon(self._serve, bench, run)
        try:
            async with contextlib.aclosing(run.follow()) as events:
                yield events
        finally:
            if not order.background:
                run.scope.cancel()
                with anyio.move_on_after(5, shield=True):
                    await run.ended.wait()

    async def _events_of(
        self, bench: _Bench, execution_id: str
    ) -> AsyncGenerator[ExecutionEvent, None]:
        run = bench.runs.get(execution_id)
        source = run.follow() if run else self._store.event_log.follow(execution_id)
        async for event in source:
            yield event

    async def cancel(self, session_id: str, execution_id: str) -> Execution:
        """Interrupt an execution."""
        bench = self._benches.get(session_id)
        run = bench.runs.get(execution_id) if bench else None
        if run is not None:
            run.scope.cancel()
            await run.ended.wait()
        return await self._store.get_execution(session_id, execution_id)

    async def answer_input(self, session_id: str, execution_id: str, text: str) -> Execution:
        """Answer an execution that waits for input."""
        bench = await self._bench(session_id)
        run = bench.runs.get(execution_id)
        if run is None:
            await self._store.get_execution(session_id, execution_id)
        if run is None or run.input is None:
            raise NotWaiting("The execution does not wait for input.")
        run.input.set_result(text)
        run.input = None
        run.transcript.answered()
        return await self._store.update_execution(run.transcript.execution)

    async def restart(self, session_id: str) -> Session:
        """Forget the session's variables."""
        bench = await self._bench(session_id)
        await bench.cancel_all()
        bench.kernel.reset()
        bench.state_lost = True
        return await self._store.get_session(session_id, None)

    async def put_file(
        self, session_id: str, name: str, chunks: AsyncIterator[bytes]
    ) -> SessionFile:
        """Write an upload to the workspace."""
        bench = await self._bench(session_id)
        try:
            name = clean_name(name)
        except NameRefused as error:
            raise BadRequest(f"Unusable file name: {error}.", param="file") from error
        partial = anyio.Path(self._directory, f"{session_id}.{secrets.token_hex(8)}")
        size = 0
        try:
            async with await partial.open("wb") as file:
                async for chunk in chunks:
                    size += len(chunk)
                    if size > self._disk_bytes:
                        raise WorkspaceFull(f"The workspace holds {self._disk_bytes} bytes.")
                    await file.write(chunk)
            if session_id not in self._benches:
                raise SessionExpired
            await partial.rename(bench.workspace / name)
        finally:
            with anyio.CancelScope(shield=True):
                await partial.unlink(missing_ok=True)
        return (await self._record(session_id, [FileWritten(name, size, "user")]))[0]

    @asynccontextmanager
    async def read_file(self, session_id: str, file_id: str) -> AsyncIterator[FileContent]:
        """Open a file's bytes."""
        session = await self._store.get_session(session_id, None)
        record = await self._store.get_file(session_id, file_id)
        bench = self._benches.get(session_id)
        if bench is not None:
            try:
                file = await anyio.open_file(bench.workspace / record.path, "rb")
            except FileNotFoundError:
                raise FileNotFound(file_id) from None
            async with file:
                size = (await anyio.Path(bench.workspace, record.path).stat()).st_size
                async with contextlib.aclosing(_chunks(file)) as chunks:
                    yield FileContent(record, size, chunks)
            return
        if session.status is SessionStatus.EXPIRED and not record.outlives_session:
            raise SessionExpired
        assert record.artifact is not None
        yield FileContent(record, record.bytes, self._artifacts.stream(record.artifact))

    async def delete_file(self, session_id: str, file_id: str) -> None:
        """Remove a file."""
        bench = await self._bench(session_id)
        record = await self._store.remove_file(session_id, file_id)
        await anyio.Path(bench.workspace, record.path).unlink(missing_ok=True)

    async def _bench(self, session_id: str) -> _Bench:
        bench = self._benches.get(session_id)
        if bench is None:
            await self._store.get_session(session_id, None)
            raise SessionExpired
        return bench

    async def _serve(self, bench: _Bench, run: _Run) -> None:
        try:
            done = Done("cancelled", Usage(0.0))
            with run.scope:
                async with bench.turn:
                    done = await self._run(bench, run)
            with anyio.CancelScope(shield=True):
                await self._finish(bench, run, done)
        except Exception as broken:
            run.fail(broken)
        finally:
            bench.runs.pop(run.id, None)
            run.ended.set()

    async def _run(self, bench: _Bench, run: _Run) -> Done:
        kernel, order = bench.kernel, run.order
        if order.reset:
            kernel.reset()
        kernel.count += 1
        begun = time.perf_counter()

        def emit(event: Event) -> None:
            self._publish(run, run.transcript.feed(event, at=time.time()))

        async def ask(request: InputRequest) -> str:
            answer: asyncio.Future[str] = asyncio.get_running_loop().create_future()
            run.input = answer
            emit(request)
            await self._store.update_execution(run.transcript.execution)
            return await answer

        def done(
            status: Literal["ok", "error", "timed_out", "cancelled", "failed"],
            failure: Failure | None = None,
        ) -> Done:
            return Done(status, Usage(time.perf_counter() - begun), kernel.count, failure)

        emit(Started(kernel.count))
        await self._store.start_execution(
            run.transcript.execution, hold_seconds=order.timeout + HOLD_SECONDS
        )
        with anyio.move_on_after(order.timeout) as limit:
            try:
                ok = await kernel.run(order.code, emit, ask if order.stdin == "ask" else None)
                return done("ok" if ok else "error")
            except KernelGone as gone:
                kernel.reset()
                bench.state_lost = True
                details = {"exit_code": gone.exit_code}
                failure = Failure(FailureCode.KERNEL_DIED, "The kernel ended.", details)
                return done("failed", failure)
            except asyncio.CancelledError:
                if run.scope.cancel_called:
                    return done("cancelled")
                raise
        assert limit.cancelled_caught
        message = f"The code ran longer than {order.timeout:g} seconds."
        return done("timed_out", Failure(FailureCode.TIMEOUT, message))

    async def _finish(self, bench: _Bench, run: _Run, done: Done) -> None:
        kernel = bench.kernel
        session_id = bench.session.id
        files: list[dict[str, Any]] = []
        if done.execution_count is not None:
            known = {path: await self._store.find_file(session_id, path) for path in kernel.written}
            gone = [await self._store.find_file(session_id, path) for path in kernel.removed]
            written = [
                FileWritten(path, (await self._stat(bench, path)), "assistant")
                for path in sorted(kernel.written - kernel.removed)
            ]
            for file in await self._record(session_id, written, sorted(kernel.removed)):
                change = "modified" if known[file.path] else "created"
                files.append(file_object(file) | {"change": change})
            files += [file_object(file) | {"change": "deleted"} for file in gone if file]
        state_reset = bench.state_lost and done.execution_count is not None
        if state_reset and done.failure is None:
            bench.state_lost = False
        completed = run.transcript.finish(
            done, at=time.time(), files=files, state_reset=state_reset
        )
        await self._store.finish_execution(run.transcript.execution)
        self._publish(run, [completed])
        await self._store.event_log.flush(run.id)

    def _publish(self, run: _Run, events: list[ExecutionEvent]) -> None:
        self._store.event_log.append(run.id, events)
        run.publish(events)

    async def _record(
        self, session_id: str, written: list[FileWritten], removed: list[str] | None = None
    ) -> list[SessionFile]:
        return await self._store.apply_file_changes(
            session_id, written=written, removed=removed or []
        )

    async def _stat(self, bench: _Bench, path: str) -> int:
        return (await anyio.Path(bench.workspace, path).stat()).st_size

    async def _archive(self, bench: _Bench) -> None:
        async for path in anyio.Path(bench.workspace).rglob("*"):
            name = path.relative_to(bench.workspace).as_posix()
            file = await self._store.find_file(bench.session.id, name)
            if file is not None:
                key = f"sessions/{bench.session.id}/{file.id}"
                await self._artifacts.put(key, await path.read_bytes())
                await self._store.set_artifact(bench.session.id, file.id, key)


async def _chunks(file: anyio.AsyncFile[bytes]) -> AsyncGenerator[bytes, None]:
    while chunk := await file.read(CHUNK_BYTES):
        yield chunk
