"""What every dispatcher promises, over the pretended kernels and over the Owner with real ones.

The code that is run is Python that both understand: see orchestrator/testing_script.py.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import anyio
import pytest

from orchestrator.artifacts import Artifacts
from orchestrator.dispatch import Dispatcher
from orchestrator.embedded_redis import redis_server
from orchestrator.errors import (
    BadRequest,
    ExecutionNotFound,
    FileNotFound,
    KeyReused,
    NotWaiting,
    QueueFull,
    SessionExpired,
    SessionNotFound,
)
from orchestrator.executions import (
    EventType,
    Execution,
    ExecutionEvent,
    ExecutionOrder,
    ExecutionStatus,
)
from orchestrator.host import running_host
from orchestrator.sessions import EndReason, SessionOrder, SessionStatus
from orchestrator.settings import load
from orchestrator.store import PageQuery, Store, open_store
from orchestrator.testing import ScriptedDispatcher

QUEUE_LIMIT = 3

FOREVER = "import time\nprint('begun')\ntime.sleep(600)"
"""Code that says when it runs and goes on until it is stopped."""


async def begun(events: AsyncIterator[ExecutionEvent]) -> str:
    """Read events until the code printed something or waits; the execution's id."""
    execution_id = ""
    async for event in events:
        if event.type is EventType.CREATED:
            execution_id = event.data["execution"]["id"]
        if event.type in {EventType.OUTPUT, EventType.INPUT_REQUIRED}:
            break
    return execution_id


@dataclass(frozen=True)
class Bench:
    """A dispatcher under test and the store that it writes to."""

    dispatcher: Dispatcher
    store: Store

    async def session(self) -> str:
        order = SessionOrder(tenant="acme", name="test", idle_minutes=20)
        return (await self.dispatcher.open(order)).id

    async def events(self, session_id: str, code: str, **fields: Any) -> list[ExecutionEvent]:
        order = ExecutionOrder(code=code, **{"timeout": 30.0, **fields})
        async with self.dispatcher.execute(session_id, order) as events:
            return [event async for event in events]

    async def run(self, session_id: str, code: str, **fields: Any) -> Execution:
        events = await self.events(session_id, code, **fields)
        return Execution.from_wire(events[-1].data["execution"])

    async def begin(self, session_id: str, code: str, **fields: Any) -> str:
        """Start code in the background; returns when it has printed something or waits."""
        order = ExecutionOrder(code=code, timeout=60.0, background=True, **fields)
        async with self.dispatcher.execute(session_id, order) as events:
            return await begun(events)

    async def queue(self, session_id: str, code: str) -> str:
        """Put code behind what runs; returns its id."""
        order = ExecutionOrder(code=code, timeout=60.0, background=True)
        async with self.dispatcher.execute(session_id, order) as events:
            created = await anext(events)
        return str(created.data["execution"]["id"])

    async def ended(self, session_id: str, execution_id: str) -> Execution:
        """Wait for an execution's end and return its record."""
        async for _ in self.store.event_log.follow(execution_id, session_id=session_id):
            pass
        return await self.store.get_execution(session_id, execution_id)

    async def read(self, session_id: str, file_id: str) -> bytes:
        async with self.dispatcher.read_file(session_id, file_id) as content:
            got = b"".join([chunk async for chunk in content.chunks])
        assert len(got) == content.size
        return got


@pytest.fixture(scope="module")
def state_directory() -> Iterator[Path]:
    """A short path: sockets go there."""
    with tempfile.TemporaryDirectory(prefix="kp-") as directory:
        yield Path(directory)


@pytest.fixture(
    scope="module",
    params=["scripted", pytest.param("owner", marks=pytest.mark.docker)],
)
async def bench(request: pytest.FixtureRequest, state_directory: Path) -> AsyncIterator[Bench]:
    """Each implementation in turn."""
    if request.param == "scripted":
        artifacts = Artifacts.open(str(state_directory / "artifacts"))
        async with (
            redis_server(state_directory) as url,
            open_store(url, artifacts) as store,
            ScriptedDispatcher(
                store,
                artifacts,
                state_directory / "workspaces",
                queue_limit=QUEUE_LIMIT,
            ) as dispatcher,
        ):
            yield Bench(dispatcher, store)
        return
    settings = replace(
        load(os.environ),
        state_dir=state_directory / "owner",
        runtime="docker",
        pool_size=1,
        queue_limit=QUEUE_LIMIT,
    )
    async with running_host(settings) as host:
        yield Bench(host.owner, host.store)


@pytest.fixture
async def session(bench: Bench) -> AsyncIterator[str]:
    """A session of the test's own, deleted afterwards."""
    session_id = await bench.session()
    with anyio.fail_after(60):
        yield session_id
        try:
            await bench.dispatcher.close(session_id, reason=EndReason.DELETED)
        except SessionNotFound:
            pass


async def chunks(*parts: bytes, broken: Exception | None = None) -> AsyncIterator[bytes]:
    for part in parts:
        yield part
    if broken is not None:
        raise broken


async def test_a_session_is_made_as_it_was_ordered(bench: Bench) -> None:
    made = await bench.dispatcher.open(
        SessionOrder(tenant="acme", name="mine", idle_minutes=7, memory_limit="1g")
    )
    assert made.id.startswith("cntr_")
    assert (made.name, made.idle_minutes, made.memory_limit) == ("mine", 7, "1g")
    assert made.status is SessionStatus.RUNNING
    assert await bench.store.get_session(made.id, "acme") == made
    await bench.dispatcher.close(made.id, reason=EndReason.DELETED)


async def test_events_are_numbered_from_created_to_completed(bench: Bench, session: str) -> None:
    events = await bench.events(session, "print('hello')\n6 * 7")
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type for event in events]
    assert kinds[0] is EventType.CREATED
    assert kinds[1] is EventType.STARTED
    assert kinds[-1] is EventType.COMPLETED
    assert EventType.COMPLETED not in kinds[:-1]
    final = Execution.from_wire(events[-1].data["execution"])
    assert (final.status, final.stdout, final.result) == (
        ExecutionStatus.COMPLETED,
        "hello\n",
        "42",
    )


async def test_the_record_and_the_log_tell_the_same(bench: Bench, session: str) -> None:
    events = await bench.events(session, "print('a')\nopen('a.txt', 'w').write('x')\n1")
    final = Execution.from_wire(events[-1].data["execution"])
    assert await bench.ended(session, final.id) == final
    logged = [event async for event in bench.store.event_log.follow(final.id, session_id=session)]
    assert [event.type for event in logged] == [event.type for event in events]
    assert logged[-1].to_wire() == events[-1].to_wire()


async def test_state_stays_even_after_an_exception(bench: Bench, session: str) -> None:
    failed = await bench.run(session, "x = 41\nraise RuntimeError('boom')")
    assert failed.status is ExecutionStatus.COMPLETED
    assert failed.error is not None
    assert (failed.error["name"], failed.error["value"]) == ("RuntimeError", "boom")
    assert (await bench.run(session, "print(x + 1)")).stdout == "42\n"


async def test_a_reset_forgets_what_was_there_before(bench: Bench, session: str) -> None:
    await bench.run(session, "old = 1")
    await bench.run(session, "raise ValueError('x')", reset=True)
    after = await bench.run(session, "old")
    assert after.error is not None
    assert after.error["name"] == "NameError"


async def test_leaving_early_interrupts_and_keeps_state(bench: Bench, session: str) -> None:
    await bench.run(session, "x = 5")
    async with bench.dispatcher.execute(session, ExecutionOrder(FOREVER, 60.0)) as events:
        execution_id = await begun(events)
    left = await bench.ended(session, execution_id)
    assert (left.status, left.stdout) == (ExecutionStatus.CANCELLED, "begun\n")
    assert (await bench.run(session, "x")).result == "5"


async def test_a_caller_that_is_cancelled_interrupts_too(bench: Bench, session: str) -> None:
    seen: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def call() -> None:
        async with bench.dispatcher.execute(session, ExecutionOrder(FOREVER, 60.0)) as events:
            seen.set_result(await begun(events))
            async for _ in events:
                pass

    task = asyncio.create_task(call())
    execution_id = await seen
    task.cancel()
    await asyncio.wait([task])
    assert task.cancelled()
    assert (await bench.ended(session, execution_id)).status is ExecutionStatus.CANCELLED


async def test_leaving_a_background_run_lets_it_finish(bench: Bench, session: str) -> None:
    execution_id = await bench.begin(session, "import time\nprint(1)\ntime.sleep(0.3)\n'done'")
    finished = await bench.ended(session, execution_id)
    assert (finished.status, finished.result) == (ExecutionStatus.COMPLETED, "'done'")


async def test_executions_run_first_in_first_out(bench: Bench, session: str) -> None:
    blocker = await bench.begin(session, FOREVER)
    queued = [await bench.queue(session, f"print({number})") for number in range(QUEUE_LIMIT)]
    with pytest.raises(QueueFull):
        await bench.run(session, "1")
    assert (await bench.dispatcher.cancel(session, blocker)).finished
    ended = [await bench.ended(session, execution_id) for execution_id in queued]
    assert [execution.stdout for execution in ended] == ["0\n", "1\n", "2\n"]
    counts = [execution.execution_count or 0 for execution in ended]
    assert counts == sorted(counts)


async def test_a_queued_execution_can_be_dropped(bench: Bench, session: str) -> None:
    blocker = await bench.begin(session, FOREVER)
    queued = await bench.queue(session, "x = 1")
    dropped = await bench.dispatcher.cancel(session, queued)
    assert dropped.status is ExecutionStatus.CANCELLED
    assert dropped.started_at is None
    await bench.dispatcher.cancel(session, blocker)
    after = await bench.run(session, "x")
    assert after.error is not None


async def test_cancelling_keeps_state_and_a_finished_one_is_as_it_was(
    bench: Bench, session: str
) -> None:
    await bench.run(session, "x = 5")
    running = await bench.begin(session, FOREVER)
    cancelled = await bench.dispatcher.cancel(session, running)
    assert (cancelled.status, cancelled.stdout) == (ExecutionStatus.CANCELLED, "begun\n")
    assert await bench.dispatcher.cancel(session, running) == cancelled
    assert (await bench.run(session, "x")).result == "5"
    with pytest.raises(ExecutionNotFound):
        await bench.dispatcher.cancel(session, "exec_unknown")


async def test_a_key_runs_code_once(bench: Bench, session: str) -> None:
    await bench.run(session, "x = 0")
    once = {"idempotency_key": "k", "request_digest": "d"}
    first = await bench.events(session, "x = x + 1\nx", **once)
    second = await bench.events(session, "x = x + 1\nx", **once)
    assert [event.type for event in second] == [event.type for event in first]
    assert second[-1].data == first[-1].data
    assert (await bench.run(session, "x")).result == "1"
    with pytest.raises(KeyReused):
        await bench.events(session, "2", idempotency_key="k", request_digest="other")


async def test_a_repeat_waits_for_the_run_and_leaving_it_does_not_end_it(
    bench: Bench, session: str
) -> None:
    once = {"idempotency_key": "k2", "request_digest": "d"}
    code = "import time\nprint(1)\ntime.sleep(0.5)\n'done'"
    running = await bench.begin(session, code, **once)
    order = ExecutionOrder(code, 60.0, idempotency_key="k2", request_digest="d")
    async with bench.dispatcher.execute(session, order) as events:
        created = await anext(events)
    assert created.data["execution"]["id"] == running
    repeat = await bench.run(session, code, **once)
    assert (repeat.id, repeat.result) == (running, "'done'")


async def test_input_is_answered(bench: Bench, session: str) -> None:
    waiting = await bench.begin(session, "print('hi ' + input('name? '))", stdin="ask")
    record = await bench.store.get_execution(session, waiting)
    assert record.status is ExecutionStatus.INPUT_REQUIRED
    answered = await bench.dispatcher.answer_input(session, waiting, "Ada")
    assert answered.status in {ExecutionStatus.IN_PROGRESS, ExecutionStatus.COMPLETED}
    assert (await bench.ended(session, waiting)).stdout.endswith("hi Ada\n")
    with pytest.raises(NotWaiting):
        await bench.dispatcher.answer_input(session, waiting, "Bob")
    with pytest.raises(ExecutionNotFound):
        await bench.dispatcher.answer_input(session, "exec_unknown", "Bob")


async def test_input_that_nobody_answers_is_an_error(bench: Bench, session: str) -> None:
    execution = await bench.run(session, "input('name? ')")
    assert execution.error is not None
    assert execution.error["name"] == "StdinNotImplementedError"


async def test_the_time_limit_keeps_output(bench: Bench, session: str) -> None:
    execution = await bench.run(session, FOREVER, timeout=0.5)
    assert (execution.status, execution.stdout) == (ExecutionStatus.TIMED_OUT, "begun\n")
    assert execution.failure is not None
    assert execution.failure["code"] == "timeout"


async def test_a_kernel_that_dies_is_named_and_replaced(bench: Bench, session: str) -> None:
    died = await bench.run(session, "import os\nx = 1\nos._exit(3)")
    assert died.status is ExecutionStatus.FAILED
    assert died.failure is not None
    assert died.failure["code"] == "kernel_died"
    after = await bench.run(session, "x")
    assert after.error is not None
    assert after.state_reset
    assert not (await bench.run(session, "1")).state_reset


async def test_a_restart_ends_what_runs_and_keeps_files(bench: Bench, session: str) -> None:
    await bench.run(session, "x = 1\nopen('a.txt', 'w').write('kept')")
    running = await bench.begin(session, FOREVER)
    queued = await bench.queue(session, "1")
    restarted = await bench.dispatcher.restart(session)
    assert restarted.status is SessionStatus.RUNNING
    for execution_id in (running, queued):
        ended = await bench.ended(session, execution_id)
        assert ended.status is ExecutionStatus.CANCELLED
    after = await bench.run(session, "print(open('a.txt').read())\nx")
    assert (after.stdout, after.state_reset) == ("kept\n", True)
    assert after.error is not None


async def test_a_file_goes_in_and_out(bench: Bench, session: str) -> None:
    put = await bench.dispatcher.put_file(session, "数据 (1).csv", chunks(b"a,b\n", b"1,2\n"))
    assert (put.path, put.bytes, put.source) == ("数据 (1).csv", 8, "user")
    assert await bench.read(session, put.id) == b"a,b\n1,2\n"
    seen = await bench.run(session, "print(open('数据 (1).csv').read())")
    assert seen.stdout == "a,b\n1,2\n\n"
    assert seen.files == ()
    again = await bench.dispatcher.put_file(session, "数据 (1).csv", chunks(b"new"))
    assert (again.id, again.bytes, again.created_at) == (put.id, 3, put.created_at)
    assert await bench.read(session, put.id) == b"new"
    await bench.dispatcher.delete_file(session, put.id)
    with pytest.raises(FileNotFound):
        await bench.read(session, put.id)
    with pytest.raises(FileNotFound):
        await bench.dispatcher.delete_file(session, put.id)
    gone = await bench.run(session, "open('数据 (1).csv').read()")
    assert gone.error is not None
    assert gone.error["name"] == "FileNotFoundError"


async def test_an_upload_that_breaks_off_changes_nothing(bench: Bench, session: str) -> None:
    put = await bench.dispatcher.put_file(session, "a.txt", chunks(b"before"))
    for name in ("a.txt", "b.txt"):
        with pytest.raises(Exception, match="form is broken"):
            await bench.dispatcher.put_file(
                session, name, chunks(b"after", broken=BadRequest("The form is broken."))
            )
    assert await bench.read(session, put.id) == b"before"
    seen = await bench.run(session, "open('b.txt').read()")
    assert seen.error is not None


@pytest.mark.parametrize(
    ("given", "path"), [("../../x", "x"), ("..\\y", "y"), ("e\u0301\0.txt", "é.txt")]
)
async def test_a_hostile_name_stays_in_the_workspace(
    bench: Bench, session: str, given: str, path: str
) -> None:
    put = await bench.dispatcher.put_file(session, given, chunks(b"x"))
    assert put.path == path
    assert (await bench.run(session, f"open('{path}').read()")).result == "'x'"


@pytest.mark.parametrize("name", ["", ".", ".."])
async def test_a_name_without_a_usable_part_is_refused(
    bench: Bench, session: str, name: str
) -> None:
    with pytest.raises(BadRequest) as refused:
        await bench.dispatcher.put_file(session, name, chunks(b"x"))
    assert refused.value.param == "file"


async def test_what_code_changed_is_told_with_the_execution(bench: Bench, session: str) -> None:
    created = await bench.run(session, "open('out.txt', 'w').write('one')")
    (file,) = created.files
    assert (file["path"], file["change"], file["bytes"]) == ("/mnt/data/out.txt", "created", 3)
    assert file["source"] == "assistant"
    modified = await bench.run(session, "open('out.txt', 'w').write('three')")
    assert [(item["id"], item["change"]) for item in modified.files] == [(file["id"], "modified")]
    assert await bench.read(session, file["id"]) == b"three"
    deleted = await bench.run(session, "import os\nos.remove('out.txt')")
    assert [(item["id"], item["change"]) for item in deleted.files] == [(file["id"], "deleted")]
    with pytest.raises(FileNotFound):
        await bench.read(session, file["id"])


async def test_an_upload_that_code_changes_is_the_codes_then(bench: Bench, session: str) -> None:
    put = await bench.dispatcher.put_file(session, "d.csv", chunks(b"1"))
    changed = await bench.run(session, "open('d.csv', 'w').write('22')")
    assert [(item["id"], item["change"]) for item in changed.files] == [(put.id, "modified")]
    assert (await bench.store.get_file(session, put.id)).source == "assistant"


async def test_a_deleted_session_is_unknown(bench: Bench) -> None:
    session = await bench.session()
    put = await bench.dispatcher.put_file(session, "a.txt", chunks(b"x"))
    running = await bench.begin(session, FOREVER)
    await bench.dispatcher.close(session, reason=EndReason.DELETED)
    for call in (
        bench.dispatcher.close(session, reason=EndReason.DELETED),
        bench.run(session, "1"),
        bench.dispatcher.restart(session),
        bench.dispatcher.put_file(session, "a.txt", chunks(b"x")),
        bench.dispatcher.delete_file(session, put.id),
        bench.dispatcher.answer_input(session, running, "x"),
        bench.read(session, put.id),
    ):
        with pytest.raises((SessionNotFound, FileNotFound)):
            await call


async def test_an_ended_session_runs_nothing_and_gives_out_what_code_made(bench: Bench) -> None:
    session = await bench.session()
    put = await bench.dispatcher.put_file(session, "in.txt", chunks(b"x"))
    made = (await bench.run(session, "open('out.txt', 'w').write('y')")).files[0]["id"]
    await bench.dispatcher.close(session, reason=EndReason.IDLE)
    assert (await bench.store.get_session(session, "acme")).end_reason is EndReason.IDLE
    for call in (
        bench.run(session, "1"),
        bench.dispatcher.restart(session),
        bench.dispatcher.put_file(session, "a.txt", chunks(b"x")),
        bench.dispatcher.delete_file(session, made),
        bench.read(session, put.id),
    ):
        with pytest.raises(SessionExpired, match=r"Container is expired\."):
            await call
    with anyio.fail_after(30):
        # When a file has been archived is told by its record only.
        while (await bench.store.get_file(session, made)).artifact is None:  # noqa: ASYNC110
            await anyio.sleep(0.05)
    assert await bench.read(session, made) == b"y"
    await bench.dispatcher.close(session, reason=EndReason.DELETED)
    with pytest.raises(SessionNotFound):
        await bench.store.get_session(session, "acme")


async def test_ending_a_session_ends_what_runs_in_it(bench: Bench) -> None:
    session = await bench.session()
    running = await bench.begin(session, FOREVER)
    await bench.dispatcher.close(session, reason=EndReason.IDLE)
    with anyio.fail_after(30):
        ended = await bench.ended(session, running)
    assert ended.finished
    assert ended.stdout == "begun\n"
    await bench.dispatcher.close(session, reason=EndReason.DELETED)


async def test_a_session_in_place_of_an_ended_one_has_its_files_and_says_what_is_lost(
    bench: Bench, session: str
) -> None:
    await bench.dispatcher.put_file(session, "upload.txt", chunks(b"up"))
    await bench.run(session, "x = 1\nopen('made.txt', 'w').write('m')")
    assert (await bench.dispatcher.recreate(session)).id == session
    await bench.dispatcher.close(session, reason=EndReason.IDLE)
    made = await bench.dispatcher.recreate(session)
    try:
        assert made.id != session
        assert (await bench.store.get_session(session, None)).status is SessionStatus.EXPIRED
        page = await bench.store.list_files(made.id, PageQuery())
        assert {(file.path, file.source) for file in page.items} == {
            ("upload.txt", "user"),
            ("made.txt", "assistant"),
        }
        first = await bench.run(made.id, "open('upload.txt').read() + open('made.txt').read()")
        assert (first.result, first.state_reset, first.files) == ("'upm'", True, ())
        assert not (await bench.run(made.id, "1")).state_reset
        assert (await bench.dispatcher.recreate(session)).id == made.id
    finally:
        await bench.dispatcher.close(made.id, reason=EndReason.DELETED)
