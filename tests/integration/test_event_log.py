"""The event log against a real server: live, resumed, replayed and told from the record."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from typing import Any

import anyio
import pytest

from orchestrator import event_log as module
from orchestrator import redis_keys
from orchestrator.artifacts import Artifacts
from orchestrator.errors import ExecutionNotFound, StoreUnavailable
from orchestrator.executions import EventType, Execution, ExecutionEvent, ExecutionStatus
from orchestrator.redis_link import RedisLink
from orchestrator.sessions import EndReason, Session
from orchestrator.store import Store, open_store

NewSession = Callable[..., Awaitable[Session]]


@pytest.fixture(autouse=True)
async def _bounded() -> AsyncIterator[None]:
    with anyio.fail_after(60):
        yield


@pytest.fixture
async def execution(store: Store, new_session: NewSession) -> Execution:
    """A queued execution."""
    session = await new_session()
    reservation = await store.reserve_execution(
        Execution(
            id=f"exec_{secrets.token_urlsafe(24)}",
            session_id=session.id,
            code="print(1)",
            status=ExecutionStatus.QUEUED,
            created_at=session.created_at,
        ),
        tenant=session.tenant,
        idempotency_key=None,
        request_digest="",
        hold_seconds=60,
        queue_limit=8,
    )
    return reservation.execution


def completed(execution: Execution, **fields: Any) -> Execution:
    return replace(execution, status=ExecutionStatus.COMPLETED, completed_at=3.0, **fields)


def created_event(execution: Execution) -> ExecutionEvent:
    return ExecutionEvent(0, EventType.CREATED, {"execution": execution.to_wire()})


def output_event(number: int, text: str = "x") -> ExecutionEvent:
    output = {"type": "stream", "name": "stdout", "text": text}
    return ExecutionEvent(number, EventType.OUTPUT, {"output_index": number - 1, "output": output})


def completed_event(number: int, execution: Execution) -> ExecutionEvent:
    return ExecutionEvent(number, EventType.COMPLETED, {"execution": execution.to_wire()})


def whole_life(execution: Execution, outputs: int) -> list[ExecutionEvent]:
    return [
        created_event(execution),
        *(output_event(number, f"line {number}") for number in range(1, outputs + 1)),
        completed_event(outputs + 1, completed(execution)),
    ]


async def collect(store: Store, execution: Execution, after: int = -1) -> list[ExecutionEvent]:
    return [event async for event in store.event_log.follow(execution.id, after=after)]


async def test_a_finished_log_is_replayed_from_any_place(
    store: Store, execution: Execution
) -> None:
    events = whole_life(execution, 450)
    store.event_log.append(execution.id, events)
    await store.event_log.flush(execution.id)
    assert await collect(store, execution) == events
    for after in (0, 1, 199, 200, 201, 449, 450):
        assert await collect(store, execution, after) == events[after + 1 :]
    assert await collect(store, execution, 451) == []
    assert await collect(store, execution, 1000) == []


async def test_another_process_follows_live(
    store: Store, execution: Execution, redis_url: str, artifacts: Artifacts
) -> None:
    events = whole_life(execution, 30)
    seen: list[ExecutionEvent] = []
    arrived = anyio.Event()

    async with open_store(redis_url, artifacts) as replica, anyio.create_task_group() as tasks:

        async def follow() -> None:
            async for event in replica.event_log.follow(execution.id):
                seen.append(event)
                arrived.set()

        tasks.start_soon(follow)
        for event in events:
            arrived = anyio.Event()
            store.event_log.append(execution.id, [event])
            await arrived.wait()
            assert seen[-1] == event
    assert seen == events


async def test_followers_that_come_and_go_lose_and_double_nothing(
    store: Store, execution: Execution
) -> None:
    events = whole_life(execution, 300)

    async def write() -> None:
        for start in range(0, len(events), 7):
            store.event_log.append(execution.id, events[start : start + 7])
            await anyio.sleep(0.001)

    async def read(steps: int) -> None:
        seen: list[ExecutionEvent] = []
        while not seen or seen[-1].type is not EventType.COMPLETED:
            last = seen[-1].sequence_number if seen else -1
            follower = store.event_log.follow(execution.id, after=last)
            for _ in range(steps):
                event = await anext(follower, None)
                if event is None:
                    break
                seen.append(event)
            await follower.aclose()
        assert seen == events

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(write)
        for steps in (13, 50, 1000):
            tasks.start_soon(read, steps)


async def test_events_of_many_executions_do_not_mix(store: Store, new_session: NewSession) -> None:
    session = await new_session()
    executions = []
    for n in range(10):
        reservation = await store.reserve_execution(
            Execution(f"exec_{n}", session.id, "1", ExecutionStatus.QUEUED, 1.0),
            tenant=session.tenant,
            idempotency_key=None,
            request_digest="",
            hold_seconds=60,
            queue_limit=100,
        )
        executions.append(reservation.execution)
    lives = [whole_life(execution, 50) for execution in executions]
    for step in range(52):
        for execution, life in zip(executions, lives, strict=True):
            store.event_log.append(execution.id, [life[step]])
    for execution, life in zip(executions, lives, strict=True):
        assert await collect(store, execution) == life


async def test_an_append_that_is_sent_twice_is_stored_once(
    store: Store, execution: Execution
) -> None:
    events = whole_life(execution, 5)
    for _ in range(2):
        store.event_log.append(execution.id, events)
        await store.event_log.flush(execution.id)
    assert await collect(store, execution) == events


async def test_a_large_record_is_referred_to_and_put_together(
    store: Store, new_session: NewSession, redis: RedisLink
) -> None:
    session = await new_session()
    execution = Execution(
        f"exec_{secrets.token_urlsafe(24)}",
        session.id,
        "#" * 50_000,
        ExecutionStatus.QUEUED,
        session.created_at,
    )
    await store.reserve_execution(
        execution,
        tenant=session.tenant,
        idempotency_key=None,
        request_digest="",
        hold_seconds=60,
        queue_limit=8,
    )
    store.event_log.append(execution.id, [created_event(execution)])
    await store.event_log.flush(execution.id)
    done = await store.finish_execution(completed(execution, stdout="y" * 90_000))
    store.event_log.append(execution.id, [completed_event(1, done)])
    await store.event_log.flush(execution.id)
    size = await redis.call("MEMORY", "USAGE", redis_keys.LOG(execution.id), repeatable=True)
    assert size < 10_000
    assert await collect(store, execution) == [
        created_event(execution),
        completed_event(1, done),
    ]


async def test_an_execution_without_a_log_is_told_from_its_record(
    store: Store, execution: Execution, redis: RedisLink
) -> None:
    done = await store.finish_execution(completed(execution, stdout="x"))
    await redis.call("DEL", redis_keys.LOG(execution.id), repeatable=True)
    with pytest.raises(ExecutionNotFound):
        await collect(store, execution)
    events = [
        event
        async for event in store.event_log.follow(execution.id, session_id=execution.session_id)
    ]
    assert events == [created_event(execution), completed_event(1, done)]
    with pytest.raises(ExecutionNotFound):
        await anext(store.event_log.follow("exec_unknown", session_id=execution.session_id))


async def test_a_follower_learns_of_an_end_that_its_owner_could_not_append(
    store: Store, execution: Execution
) -> None:
    store.event_log.append(execution.id, [created_event(execution), output_event(1)])
    seen: list[ExecutionEvent] = []
    lost = replace(execution, status=ExecutionStatus.FAILED, failure={"code": "worker_lost"})
    async for event in store.event_log.follow(execution.id):
        seen.append(event)
        if event.type is EventType.OUTPUT:
            await store.end_session(execution.session_id, EndReason.WORKER_LOST, epoch=1)
            await store.finish_execution(lost)
    assert seen[-1] == completed_event(2, lost)
    assert len(seen) == 3


async def test_following_a_session_that_is_forgotten_meanwhile_ends(
    store: Store, execution: Execution
) -> None:
    store.event_log.append(execution.id, [created_event(execution)])
    with pytest.raises(ExecutionNotFound):
        async for _ in store.event_log.follow(execution.id):
            await store.forget_session(execution.session_id)


async def test_an_append_without_a_reservation_makes_no_key(store: Store, redis: RedisLink) -> None:
    store.event_log.append("exec_unknown", [output_event(1)])
    await store.event_log.flush("exec_unknown")
    assert await redis.call("DBSIZE", repeatable=True) == 0


async def test_the_log_lives_with_its_session_and_an_hour(
    store: Store, execution: Execution, redis: RedisLink
) -> None:
    key = redis_keys.LOG(execution.id)
    store.event_log.append(execution.id, [created_event(execution)])
    await store.event_log.flush(execution.id)
    assert await redis.call("TTL", key, repeatable=True) == -1
    await store.end_session(execution.session_id, EndReason.IDLE, epoch=1)
    store.event_log.append(execution.id, [output_event(1)])
    await store.event_log.flush(execution.id)
    assert 0 < await redis.call("TTL", key, repeatable=True) <= redis_keys.LOG_LIFETIME


async def test_events_wait_in_bounded_memory_while_redis_is_away(
    store: Store,
    execution: Execution,
    redis: RedisLink,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "QUEUE_LIMIT_BYTES", 100_000)
    log = store.event_log
    away = True
    pipeline = store._link.pipeline

    async def interrupted(*arguments: Any, **options: Any) -> Any:
        if away:
            raise StoreUnavailable("away")
        return await pipeline(*arguments, **options)

    monkeypatch.setattr(store._link, "pipeline", interrupted)
    log.append(execution.id, [created_event(execution)])
    with pytest.raises(StoreUnavailable):
        await log.flush(execution.id)
    for number in range(1, 1001):
        log.append(execution.id, [output_event(number, "x" * 1000)])
    assert log._queued_bytes <= 100_000
    log.append(execution.id, [completed_event(1001, completed(execution))])
    away = False
    events = await collect(store, execution)
    assert events[0].type is EventType.CREATED
    assert events[-1] == completed_event(1001, completed(execution))
    numbers = [event.sequence_number for event in events]
    assert numbers == sorted(set(numbers))
    assert 90 < len(numbers) < 110
    await log.flush(execution.id)
    assert log._queued_bytes == 0


async def test_closing_the_store_sends_what_is_queued(
    store: Store, execution: Execution, redis_url: str, artifacts: Artifacts
) -> None:
    events = whole_life(execution, 500)
    async with open_store(redis_url, artifacts) as writer:
        writer.event_log.append(execution.id, events)
    assert await collect(store, execution) == events
