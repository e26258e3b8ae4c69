"""Kernel: one running IPython kernel and the code it executes.

Above: pool.py. Below: provisioner.py starts its process, channels.py carries its messages,
execution.py reads them. Knows messages and events; has never heard of sessions, HTTP or Docker.

One reader per channel routes each message by its parent's id: to the execution that runs, to a
request that waits, or to `on_late` when its execution has ended. An execution ends when it is
complete, when the kernel's process ends, or when a watchdog finds that the rest will never come.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from signal import SIGCONT, SIGINT
from typing import Any, Final, Literal

import structlog
from anyio import to_thread

from kernelpool import outcome
from kernelpool.channels import Channels
from kernelpool.errors import KernelClosed, KernelStartError
from kernelpool.events import (
    Done,
    Event,
    Failure,
    KernelEnd,
    Output,
    Usage,
)
from kernelpool.execution import (
    Channel,
    Message,
    message_id,
    message_type,
    output_event,
    parent_id,
)
from kernelpool.journal import Journal
from kernelpool.lifecycle import Cause, State, step
from kernelpool.provisioner import SandboxProvisioner, Seat, make_provisioner
from kernelpool.run import Run
from kernelpool.runtime import Process, Sample
from kernelpool.tasks import Tasks
from kernelpool.wire import WireError

log = structlog.get_logger(__name__)

START_TIMEOUT: Final = 60.0
"""Seconds from the start of the process to the first kernel_info reply. A start takes 0.7 s alone
and was seen to take 9 s with 20 others on two cores."""

FIRST_DISPLAY: Final = "get_ipython().display_formatter.format(0)"
"""Makes IPython build its formatters, 2 of the 5 ms that a kernel's first result would take."""

SOCKET_POLL: Final = 0.01
"""Seconds between looks for the heartbeat's socket file, which ipykernel binds last."""

SUBSCRIBE_PATIENCE: Final = 0.5
"""Seconds to wait for iopub's first message before another request provokes one."""

INTERRUPT_GRACE: Final = 2.0
"""Seconds that interrupted code may take to end before its kernel is killed."""

MISSING_PATIENCE: Final = 5.0
"""Seconds of silence after which one of idle and reply is taken for lost once the other came."""

BROKEN_PATIENCE: Final = 1.0
"""Seconds between the kernel's closing its sockets and its exit, before it is killed for it."""

SETTLE_QUIET: Final = 0.02
"""Seconds without a message after which a dead kernel's last words have been read."""

SETTLE_TIMEOUT: Final = 2.0

BACKLOG_CHARACTERS: Final = 4_000_000
"""Text that may wait for the consumer of an execution before iopub is no longer read."""

JOURNAL_BYTES: Final = 8 * 1024 * 1024
"""Growth of the journal after which it is emptied between executions; it counts to the quota."""


class Kernel:
    """One kernel on one seat, for the life of its session; its process may be replaced.

    Args:
        seat: Where it lives.
        kernel_id: Keeps its value when the process is replaced.
        on_late: Called with the request id and the output when output comes after its execution
            has ended.
    """

    def __init__(
        self,
        seat: Seat,
        kernel_id: str,
        *,
        on_late: Callable[[str, Output], None] | None = None,
    ) -> None:
        self.seat = seat
        self.kernel_id = kernel_id
        self.state = State.STARTING
        self.on_late = on_late
        self.taps: set[Callable[[Channel, Message], None]] = set()
        """Each is called with every message of the kernel, on the event loop."""
        self.end: KernelEnd | None = None
        """Why the last process ended; None while none has."""
        self.on_start: Callable[[], None] | None = None
        """Called when a new process is ready, so that its whereabouts can be written down."""
        self.generation = 0
        """Grows with each new process: variables live as long as this does not change."""
        self._provisioner: SandboxProvisioner | None = None
        self._channels: Channels | None = None
        self._run: Run | None = None
        self._turn = asyncio.Lock()
        self._waiting: dict[str, asyncio.Future[Message]] = {}
        self._heard = asyncio.Event()
        self._tasks = Tasks("kernel", kernel_id=kernel_id)
        self._input_header: dict[str, Any] | None = None
        self._holding = False
        self._journaled_bytes = 0

    def __repr__(self) -> str:
        """State, the id of the execution under way, and whether its output has to wait."""
        busy = f" {self._run.message_id}" if self._run is not None else ""
        held = ", output held" if self._holding else ""
        return f"<Kernel {self.kernel_id[:8]}: {self.state}{busy}{held}>"

    @property
    def process(self) -> Process | None:
        """The process behind it, None when there is none."""
        return self._provisioner.process if self._provisioner is not None else None

    async def start(self) -> None:
        """Start a process and wait until it answers, unless one does already.

        Raises:
            KernelStartError: it ended, or did not answer in time.
            EngineError: the runtime could not start it.
            KernelClosed: the kernel was shut down.
        """
        async with self._turn:
            await self._have_process()

    async def record(self) -> dict[str, Any]:
        """What a later worker needs to adopt the process; secret, because it holds the key.

        Raises:
            KernelClosed: there is no process.
        """
        if self._provisioner is None:
            raise KernelClosed("the kernel has no process")
        return {
            "kernel_id": self.kernel_id,
            "generation": self.generation,
            "provisioner": await self._provisioner.get_provisioner_info(),
        }

    async def adopt(self, record: Mapping[str, Any]) -> None:
        """Take over the process that an earlier worker started.

        Raises:
            KernelStartError: it ended meanwhile.
        """
        async with self._turn:
            provisioner = await to_thread.run_sync(make_provisioner, self.seat, self.kernel_id)
            await provisioner.load_provisioner_info(record["provisioner"])
            await self._attach(provisioner)
            self.generation = record["generation"]
            self._move(Cause.READY)

    async def restart(self) -> None:
        """Replace the process: a new one on the same files. An execution under way ends.

        Raises:
            KernelClosed: the kernel was shut down.
            KernelStartError, EngineError: as for `start`; the next execution tries again.
        """
        await self._kill(KernelEnd.RESTARTED)
        async with self._turn:
            await self._kill(KernelEnd.RESTARTED)
            await self._have_process()

    async def close(self) -> None:
        """Kill the process and remove it. Idempotent."""
        self._move(Cause.CLOSE)
        await self._kill(KernelEnd.RESTARTED)
        async with self._turn:
            await self._kill(KernelEnd.RESTARTED)
        await self._tasks.wait()

    async def execute(
        self,
        code: str,
        *,
        request_id: str | None = None,
        timeout: float,
        stdin: bool = False,
        reset: bool = False,
    ) -> AsyncGenerator[Event]:
        """Run code; the last event is `Done`. One execution at a time, others wait their turn.

        A kernel whose process has ended gets a new one first.

        Args:
            code: What to run.
            request_id: Names the request to `on_late` and in the journal; None makes one.
            timeout: Seconds the code may take; then it is interrupted, and killed if that does
                not end it within the grace period.
            stdin: Whether `input()` asks; otherwise it raises.
            reset: Empty the namespace before the code runs.

        Raises:
            KernelStartError, EngineError: no process could be started; the code did not run.
            KernelClosed: the kernel was shut down; the code did not run.
        """
        async with self._turn:
            await self._have_process()
            await self._shorten_journal()
            try:
                run = self._begin(code, request_id, stdin=stdin, reset=reset)
            except KernelClosed:
                # It died while idle, and the news of its exit has not come yet.
                await self._kill(KernelEnd.KERNEL_DIED)
                await self._have_process()
                run = self._begin(code, request_id, stdin=stdin, reset=reset)
            deadline = run.started_at + timeout
            try:
                async for event in self._follow(run, deadline):
                    yield event
            finally:
                if self._run is run:
                    await asyncio.shield(self._abandon(run))

    async def resume(self, request_id: str, *, timeout: float) -> AsyncGenerator[Event]:
        """Go on with an execution that an earlier worker began; all its events, `Done` last.

        What was published before now is read from the journal, the rest comes as it happens.

        Args:
            request_id: As it was given to `execute`.
            timeout: Seconds the code may still take.

        Raises:
            KernelClosed: the kernel's process has ended.
        """
        async with self._turn:
            if self._channels is None:
                raise KernelClosed("the kernel ended")
            run = Run(request_id, self.sample())
            run.held = []
            self._move(Cause.EXECUTE)
            self._run = run
            try:
                if not await self._replay(run):
                    self._run = None
                    self._move(Cause.COMPLETE)
                    yield Done("failed", Usage(0.0), failure=outcome.NEVER_SENT)
                    return
                async for event in self._follow(run, run.started_at + timeout):
                    yield event
            finally:
                if self._run is run:
                    await asyncio.shield(self._abandon(run))

    def interrupt(self, failure: Failure | None = None) -> None:
        """End the execution under way: SIGINT, then a kill after the grace period.

        Args:
            failure: Why, for an end as `failed`; None ends it as `cancelled`.
        """
        if self._run is not None and self._run.ending is None:
            self._run.ending = "cancelled" if failure is None else "failed"
            self._run.failure = failure
            self._run.wake.set()

    def answer_input(self, text: str) -> bool:
        """Hand a line to code that waits for input; False when none does."""
        if self._channels is None or self._input_header is None:
            return False
        header, self._input_header = self._input_header, None
        self._channels.send("stdin", "input_reply", {"value": text}, parent_header=header)
        return True

    async def request(
        self, channel: Literal["shell", "control"], kind: str, content: dict[str, Any]
    ) -> Message:
        """Send any request and wait for its reply.

        Raises:
            KernelClosed: the kernel ended before it replied.
        """
        if self._channels is None:
            raise KernelClosed("the kernel has no process")
        message_id = self._channels.send(channel, kind, content)
        reply: asyncio.Future[Message] = asyncio.get_running_loop().create_future()
        self._waiting[message_id] = reply
        try:
            return await reply
        finally:
            self._waiting.pop(message_id, None)

    async def warm(self) -> None:
        """Import the profile's common modules and ready the display of results; no name is left.

        Modules that are missing are skipped.
        """
        imports = [f"__import__({module!r})" for module in self.seat.profile.warm_imports]
        for code in (*imports, FIRST_DISPLAY):
            await self.request(
                "shell",
                "execute_request",
                _execute_content(code, silent=True, stdin=False),
            )

    def sample(self) -> Sample:
        """Resource use of the process now."""
        return self.process.sample() if self.process is not None else Sample()

    def _move(self, cause: Cause) -> None:
        self.state = step(self.state, cause)

    async def _have_process(self) -> None:
        if self.state is State.CLOSED:
            raise KernelClosed("the kernel was shut down")
        if self.state is State.DEAD:
            self._move(Cause.RESTART)
        if self.state is State.STARTING:
            await self._start()

    async def _start(self) -> None:
        provisioner = await to_thread.run_sync(make_provisioner, self.seat, self.kernel_id)
        try:
            async with asyncio.timeout(START_TIMEOUT):
                await self._launch(provisioner)
        except (TimeoutError, KernelClosed) as error:
            output = await provisioner.process.output() if provisioner.process else ""
            how = "ended while it started" if isinstance(error, KernelClosed) else "did not answer"
            raise KernelStartError(f"the kernel {how}\n{output}".rstrip()) from None
        finally:
            if self.state is not State.IDLE:
                self._disconnect()
                await asyncio.shield(provisioner.cleanup())
                self._move(Cause.EXITED)

    async def _launch(self, provisioner: SandboxProvisioner) -> None:
        self._heard.clear()
        self._journaled_bytes = 0
        prepared = await provisioner.pre_launch(env={})
        await provisioner.launch_kernel(prepared.pop("cmd"), **prepared)
        process = provisioner.process
        assert process is not None
        heartbeat = provisioner.info.socket_path("hb")
        while not await to_thread.run_sync(heartbeat.exists):
            if process.exit is not None or self.state is State.CLOSED:
                raise KernelClosed("the kernel ended before it was ready")
            await asyncio.sleep(SOCKET_POLL)
        await self._attach(provisioner)
        while not self._heard.is_set():
            await self.request("shell", "kernel_info_request", {})
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(SUBSCRIBE_PATIENCE):
                    await self._heard.wait()
        await self.seat.slot.take_run_back()
        if self.state is State.CLOSED:
            raise KernelClosed("the kernel was shut down")
        self.generation += 1
        self._move(Cause.READY)
        if self.on_start is not None:
            self.on_start()

    async def _attach(self, provisioner: SandboxProvisioner) -> None:
        process = provisioner.process
        assert process is not None
        self._provisioner = provisioner
        process.on_out_of_memory = self._out_of_memory
        self._tasks.spawn(self._watch(provisioner, process))
        self._channels = channels = Channels(
            provisioner.info,
            identity=self.kernel_id.encode(),
            jupyter_session=self.kernel_id,
            take=self._take,
            broken=self._channels_broken,
        )
        await channels.connect()

    async def _replay(self, run: Run) -> bool:
        """Feed an execution what the journal has of it; whether the kernel ever had it."""
        assert self._channels is not None
        wire = self._channels.wire
        seen: set[str] = set()
        journal = Journal(self.seat.slot.run)
        async for entry in journal.records():
            if entry.channel == "truncated":
                # At the start of the journal it speaks of earlier executions.
                run.push([outcome.JOURNAL_CUT] if seen else [])
                continue
            try:
                message = wire.decode_signed(entry.frames)
            except WireError:
                continue
            if parent_id(message) == run.message_id:
                seen.add(message_id(message))
                run.push(run.execution.feed(entry.channel, message))
        if journal.garbage:
            run.push([outcome.JOURNAL_CUT])
        held, run.held = run.held or [], None
        for channel, live in held:
            if message_id(live) not in seen:
                run.push(run.execution.feed(channel, live))
        if seen or run.heard:
            return True
        # Requests are answered in order: once this one is, the other was never there. While none
        # comes, the kernel is busy, and with nothing else: code can empty the journal.
        try:
            async with asyncio.timeout(MISSING_PATIENCE):
                await self.request("shell", "kernel_info_request", {})
        except TimeoutError:
            return True
        return run.heard

    async def _kill(self, reason: KernelEnd) -> None:
        if self._run is not None:
            self._run.ending = self._run.ending or "cancelled"
        if self.process is not None:
            self.end = reason
            await self.process.kill()
        while self.process is not None:
            await self._tasks.wait_for_one()

    def _disconnect(self) -> None:
        self._input_header = None
        self._holding = False
        if self._channels is not None:
            self._channels.close()
            self._channels = None
        for reply in self._waiting.values():
            if not reply.done():
                reply.set_exception(KernelClosed("the kernel ended before it replied"))
        self._waiting.clear()

    async def _shorten_journal(self) -> None:
        if self._channels is not None:
            grown = self._channels.received_bytes - self._journaled_bytes
            if grown > JOURNAL_BYTES:
                self._journaled_bytes = self._channels.received_bytes
                await Journal(self.seat.slot.run).truncate_if_over(JOURNAL_BYTES)

    def _begin(self, code: str, request_id: str | None, *, stdin: bool, reset: bool) -> Run:
        assert self._channels is not None
        process = self.process
        assert process is not None
        before = process.spent()
        process.reset_peak()
        message_id = self._channels.send(
            "shell",
            "execute_request",
            _execute_content(code, silent=False, stdin=stdin),
            message_id=request_id,
            metadata={"kernelpool": {"reset": True}} if reset else None,
        )
        self._move(Cause.EXECUTE)
        self._run = Run(message_id, before)
        return self._run

    async def _follow(self, run: Run, deadline: float) -> AsyncIterator[Event]:
        killing: asyncio.Task[None] | None = None
        while True:
            while (event := run.take()) is not None:
                if self._holding and run.backlog < BACKLOG_CHARACTERS // 2:
                    self._hold_output(False)
                yield event
            now = time.monotonic()
            if run.exit is not None or run.execution.complete:
                break
            if run.execution.half_complete and now - run.last_message_at > MISSING_PATIENCE:
                run.push([outcome.missing_notice(run.execution, MISSING_PATIENCE)])
                break
            if now >= deadline or (run.ending is not None and killing is None):
                run.ending = run.ending or "timed_out"
                deadline = now + INTERRUPT_GRACE
                if killing is None:
                    killing = asyncio.create_task(self._interrupt_then_kill(run))
            limit = deadline if killing is None else now + MISSING_PATIENCE
            if run.execution.half_complete:
                limit = min(limit, run.last_message_at + MISSING_PATIENCE)
            run.wake.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(max(0.0, limit - now)):
                    await run.wake.wait()
        if killing is not None:
            await self._call_off(killing)
        after = self.process.spent() if self.process is not None else Sample()
        for notice in run.notices(self.seat.profile.limits, after):
            run.push([notice])
        while (event := run.take()) is not None:
            yield event
        yield self._finish(run, after)

    async def _interrupt_then_kill(self, run: Run) -> None:
        process = self.process
        if process is None:
            return
        await process.signal(SIGCONT)
        await process.signal(SIGINT)
        await asyncio.sleep(INTERRUPT_GRACE)
        log.info("kernel killed: an interrupt did not end its code", kernel_id=self.kernel_id)
        await process.kill()

    async def _call_off(self, killing: asyncio.Task[None]) -> None:
        # A signal under way must not reach the next execution, so the call that carries it ends
        # first; the kernel, once idle, ignores SIGINT.
        if not killing.done():
            await asyncio.sleep(SETTLE_QUIET)
            killing.cancel()
        await asyncio.wait([killing])

    async def _abandon(self, run: Run) -> None:
        """See to it that nobody's code goes on running when its caller has gone."""
        run.ending = run.ending or "cancelled"
        async for _ in self._follow(run, time.monotonic()):
            pass

    def _finish(self, run: Run, after: Sample) -> Done:
        if self._run is run:
            self._run = None
        self._input_header = None
        if self._holding:
            self._hold_output(False)
        done = run.done(self.seat.profile.limits, after)
        if run.exit is not None:
            self.end = done.kernel_end
        self._move(Cause.COMPLETE if run.exit is None else Cause.EXITED)
        return done

    def _take(self, channel: Channel, message: Message) -> None:
        for tap in tuple(self.taps):
            tap(channel, message)
        if channel == "iopub":
            self._heard.set()
        parent = parent_id(message)
        run = self._run
        if run is not None and run.message_id == parent:
            if channel == "stdin" and message_type(message) == "input_request":
                self._input_header = dict(message["header"])
            run.last_message_at = time.monotonic()
            run.heard = True
            if run.held is not None:
                run.held.append((channel, message))
                return
            run.push(run.execution.feed(channel, message))
            if run.backlog > BACKLOG_CHARACTERS:
                self._hold_output(True)
        elif channel in ("shell", "control") and parent in self._waiting:
            reply = self._waiting[parent]
            if not reply.done():
                reply.set_result(message)
        elif channel == "iopub" and self.on_late is not None:
            output = output_event(message_type(message), message.get("content"))
            if output is not None:
                self.on_late(parent, output)

    def _hold_output(self, held: bool) -> None:
        self._holding = held
        if self._channels is not None:
            self._channels.hold_output(held)

    def _out_of_memory(self) -> None:
        if self._run is not None:
            self._run.out_of_memory = True

    def _channels_broken(self, reason: str) -> None:
        process = self.process
        if process is not None and process.exit is None:
            self._tasks.spawn(self._kill_unless_it_exits(process, reason))

    async def _kill_unless_it_exits(self, process: Process, reason: str) -> None:
        try:
            async with asyncio.timeout(BROKEN_PATIENCE):
                await process.wait()
        except TimeoutError:
            log.info("kernel killed", kernel_id=self.kernel_id, reason=reason)
            if self._run is not None and self._run.ending is None:
                self._run.failure = outcome.cut_off(reason)
            await process.kill()

    async def _watch(self, provisioner: SandboxProvisioner, process: Process) -> None:
        ended = await process.wait()
        await self._settle()
        self._disconnect()
        self._provisioner = None
        if self._run is not None:
            self._run.exit = ended
            self._run.wake.set()
        elif self.state is not State.STARTING:
            if self.state is State.IDLE:
                self.end = outcome.kernel_end(ended)
            self._move(Cause.EXITED)
        await provisioner.cleanup()

    async def _settle(self) -> None:
        """Wait until what the kernel sent before its end has been read."""
        deadline = time.monotonic() + SETTLE_TIMEOUT
        while (run := self._run) is not None and time.monotonic() < deadline:
            seen = run.last_message_at
            await asyncio.sleep(SETTLE_QUIET)
            if run.last_message_at == seen and run.backlog < BACKLOG_CHARACTERS:
                return


def _execute_content(code: str, *, silent: bool, stdin: bool) -> dict[str, Any]:
    return {
        "code": code,
        "silent": silent,
        "store_history": not silent,
        "user_expressions": {},
        "allow_stdin": stdin,
        "stop_on_error": False,
    }
