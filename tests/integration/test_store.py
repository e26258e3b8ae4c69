"""The store against a real server: every promise of its docstrings, and Redis' own faults."""

from __future__ import annotations

import math
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from typing import Any

import anyio
import pytest

from orchestrator import redis_keys
from orchestrator.artifacts import Artifacts, ArtifactStoreError
from orchestrator.errors import (
    BadRequest,
    ExecutionNotFound,
    FileNotFound,
    KeyReused,
    QueueFull,
    SessionExpired,
    SessionNotFound,
    TenantQuota,
    Unavailable,
)
from orchestrator.executions import EventType, Execution, ExecutionEvent, ExecutionStatus
from orchestrator.redis_link import RedisLink
from orchestrator.sessions import EndReason, Session, SessionOrder, SessionStatus
from orchestrator.store import FileWritten, Order, PageQuery, Store

NewSession = Callable[..., Awaitable[Session]]


@pytest.fixture(autouse=True)
async def _bounded() -> AsyncIterator[None]:
    with anyio.fail_after(60):
        yield


def execution_of(session: Session, **fields: Any) -> Execution:
    return Execution(
        **{
            "id": f"exec_{secrets.token_urlsafe(24)}",
            "session_id": session.id,
            "code": "1 + 1",
            "status": ExecutionStatus.QUEUED,
            "created_at": session.created_at,
            **fields,
        }
    )


async def reserve(
    store: Store,
    session: Session,
    *,
    key: str | None = None,
    digest: str = "d1",
    hold: float = 120,
    limit: int = 8,
    **fields: Any,
) -> Execution:
    reservation = await store.reserve_execution(
        execution_of(session, **fields),
        tenant=session.tenant,
        idempotency_key=key,
        request_digest=digest,
        hold_seconds=hold,
        queue_limit=limit,
    )
    assert reservation.created
    return reservation.execution


def started(execution: Execution) -> Execution:
    return replace(execution, status=ExecutionStatus.IN_PROGRESS, started_at=1.5)


def completed(execution: Execution, **fields: Any) -> Execution:
    return replace(execution, status=ExecutionStatus.COMPLETED, completed_at=2.5, **fields)


async def set_field(redis: RedisLink, session: Session, **fields: float) -> None:
    for name, value in fields.items():
        key = redis_keys.SESSION(session.id)
        await redis.call("HSET", key, name, f"{value:.6f}", repeatable=True)


async def score(redis: RedisLink, key: str, member: str) -> float:
    return float(await redis.call("ZSCORE", key, member, repeatable=True))


async def all_keys(redis: RedisLink) -> set[str]:
    return {key.decode() for key in await redis.call("KEYS", "*", repeatable=True)}


# Sessions


async def test_a_new_session_is_what_get_returns(store: Store, new_session: NewSession) -> None:
    session = await new_session("acme", "naïve 名前 {x}")
    assert await store.get_session(session.id, "acme") == session
    assert await store.get_session(session.id, None) == session
    assert session.status is SessionStatus.RUNNING
    assert session.name == "naïve 名前 {x}"
    assert session.idle_expires_at == pytest.approx(session.created_at + 1200, abs=1e-5)
    assert session.expires_at == pytest.approx(session.created_at + 3600, abs=1e-5)
    assert session.created_at == pytest.approx(await store.now(), abs=5)


async def test_the_idle_deadline_is_never_after_the_maximum_lifetime(
    new_session: NewSession,
) -> None:
    session = await new_session(idle_minutes=120, max_lifetime=60)
    assert session.idle_expires_at == session.expires_at


async def test_a_session_may_have_no_maximum_lifetime(new_session: NewSession) -> None:
    assert (await new_session(max_lifetime=None)).expires_at is None


async def test_creating_the_same_session_twice_makes_one(store: Store) -> None:
    order = SessionOrder("acme", "demo", 20)
    first, second = [
        await store.create_session(
            "cntr_same", order, worker_id="w", max_lifetime=None, tenant_limit=1
        )
        for _ in range(2)
    ]
    assert first == second


async def test_the_text_for_a_foreign_session_is_that_for_an_unknown_one(
    store: Store, new_session: NewSession
) -> None:
    session = await new_session("acme")
    for ask in (store.get_session, store.touch_session):
        with pytest.raises(SessionNotFound) as foreign:
            await ask(session.id, "other")
        with pytest.raises(SessionNotFound) as unknown:
            await ask("cntr_unknown", "other")
        assert foreign.value.message.replace(session.id, "") == unknown.value.message.replace(
            "cntr_unknown", ""
        )


async def test_a_tenant_may_have_no_more_running_sessions_than_its_limit(
    store: Store, new_session: NewSession
) -> None:
    first = await new_session("acme", tenant_limit=1)
    with pytest.raises(TenantQuota) as refused:
        await new_session("acme", tenant_limit=1)
    assert refused.value.retry_after
    await new_session("other", tenant_limit=1)
    await store.end_session(first.id, EndReason.IDLE, epoch=1)
    await new_session("acme", tenant_limit=1)


async def test_sessions_made_at_once_do_not_exceed_the_limit(new_session: NewSession) -> None:
    outcomes: list[bool] = []

    async def attempt() -> None:
        try:
            await new_session(tenant_limit=5)
        except TenantQuota:
            outcomes.append(False)
        else:
            outcomes.append(True)

    async with anyio.create_task_group() as tasks:
        for _ in range(20):
            tasks.start_soon(attempt)
    assert outcomes.count(True) == 5


async def test_touch_moves_the_idle_deadline_and_get_does_not(
    store: Store, new_session: NewSession, redis: RedisLink
) -> None:
    session = await new_session()
    await set_field(redis, session, idle_expires_at=session.created_at + 1)
    looked = await store.get_session(session.id, "acme")
    assert looked.idle_expires_at == pytest.approx(session.created_at + 1, abs=1e-5)
    touched = await store.touch_session(session.id, "acme")
    assert touched.last_active_at > session.last_active_at
    assert touched.idle_expires_at == pytest.approx(touched.last_active_at + 1200, abs=1e-5)
    assert await store.get_session(session.id, "acme") == touched
    deadline = await score(redis, redis_keys.DEADLINES(), session.id)
    assert deadline == pytest.approx(touched.idle_expires_at, abs=1e-5)


async def test_touching_an_expired_session_changes_nothing(
    store: Store, new_session: NewSession
) -> None:
    session = await new_session()
    ended = await store.end_session(session.id, EndReason.IDLE, epoch=1)
    assert await store.touch_session(session.id, "acme") == ended
    assert await store.next_deadline() is None


async def test_only_one_of_many_ends_a_session(store: Store, new_session: NewSession) -> None:
    session = await new_session()
    ended: list[Session | None] = []

    async def end(reason: EndReason) -> None:
        ended.append(await store.end_session(session.id, reason, epoch=1))

    async with anyio.create_task_group() as tasks:
        for reason in EndReason:
            tasks.start_soon(end, reason)
    (winner,) = [session for session in ended if session is not None]
    assert winner.status is SessionStatus.EXPIRED
    assert winner.ended_at is not None
    assert await store.get_session(session.id, "acme") == winner


async def test_a_worker_with_an_old_epoch_ends_nothing(
    store: Store, new_session: NewSession
) -> None:
    session = await new_session(epoch=2)
    assert await store.end_session(session.id, EndReason.IDLE, epoch=1) is None
    assert (await store.get_session(session.id, None)).status is SessionStatus.RUNNING
    assert await store.end_session("cntr_unknown", EndReason.IDLE, epoch=1) is None


async def test_a_worker_knows_its_running_sessions(store: Store, new_session: NewSession) -> None:
    mine = [await new_session(worker_id="w1") for _ in range(3)]
    await new_session(worker_id="w2")
    await store.end_session(mine[0].id, EndReason.DRAINED, epoch=1)
    found = await store.sessions_of("w1")
    assert {session.id for session in found} == {session.id for session in mine[1:]}
    assert await store.sessions_of("w3") == []


# Deadlines and holds


async def wait_for_instant(store: Store, instant: float) -> None:
    await anyio.sleep(instant - await store.now() + 0.001)


async def wait_until_due(store: Store) -> list[tuple[Session, EndReason]]:
    seconds = await store.next_deadline()
    assert seconds is not None
    await anyio.sleep(max(0, seconds) + 0.001)
    return await store.due_sessions()


async def make_due(redis: RedisLink, session: Session, *, lifetime: bool = False) -> None:
    past = session.created_at - 1
    await set_field(redis, session, idle_expires_at=past)
    if lifetime:
        await set_field(redis, session, expires_at=past)
    key = redis_keys.DEADLINES()
    await redis.call("ZADD", key, f"{past:.6f}", session.id, repeatable=True)


async def test_an_idle_session_is_due_until_it_is_ended(
    store: Store, new_session: NewSession, redis: RedisLink
) -> None:
    session, other = await new_session(), await new_session()
    assert await store.due_sessions() == []
    await make_due(redis, session)
    for _ in range(2):
        (due,) = await store.due_sessions()
        assert (due[0].id, due[1]) == (session.id, EndReason.IDLE)
    seconds = await store.next_deadline()
    assert seconds is not None
    assert seconds < 0
    await store.end_session(session.id, EndReason.IDLE, epoch=1)
    assert await store.due_sessions() == []
    seconds = await store.next_deadline()
    assert seconds == pytest.approx(1200, abs=10)
    assert (await store.get_session(other.id, None)).status is SessionStatus.RUNNING


async def test_a_session_at_its_maximum_lifetime_is_due_for_that_reason(
    store: Store, new_session: NewSession
) -> None:
    session = await new_session(idle_minutes=20, max_lifetime=0.01)
    due = await wait_until_due(store)
    assert [(found.id, reason) for found, reason in due] == [(session.id, EndReason.MAX_LIFETIME)]


async def test_no_more_sessions_are_due_than_asked_for(
    store: Store, new_session: NewSession, redis: RedisLink
) -> None:
    for _ in range(5):
        await make_due(redis, await new_session())
    assert len(await store.due_sessions(3)) == 3


@pytest.mark.parametrize("start", [False, True], ids=["queued", "running"])
async def test_an_execution_holds_its_session_until_its_own_timeout(
    store: Store, new_session: NewSession, redis: RedisLink, start: bool
) -> None:
    session = await new_session()
    execution = await reserve(store, session, hold=5000)
    if start:
        await store.start_execution(started(execution), hold_seconds=5000)
    deadline = await score(redis, redis_keys.DEADLINES(), session.id)
    assert deadline == pytest.approx(await store.now() + 5000, abs=10)

    await store.finish_execution(completed(execution))
    deadline = await score(redis, redis_keys.DEADLINES(), session.id)
    assert deadline == pytest.approx(await store.now() + 1200, abs=10)


async def test_the_longest_of_several_holds_counts(
    store: Store, new_session: NewSession, redis: RedisLink
) -> None:
    session = await new_session()
    long, short = [await reserve(store, session, hold=hold) for hold in (9000, 5000)]

    async def held() -> float:
        return await score(redis, redis_keys.DEADLINES(), session.id) - await store.now()

    assert await held() == pytest.approx(9000, abs=10)
    await store.finish_execution(completed(long))
    assert await held() == pytest.approx(5000, abs=10)
    await store.finish_execution(completed(short))
    assert await held() == pytest.approx(1200, abs=10)


async def test_starting_renews_the_hold(
    store: Store, new_session: NewSession, redis: RedisLink
) -> None:
    session = await new_session()
    execution = await reserve(store, session, hold=2000)
    await store.start_execution(started(execution), hold_seconds=7000)
    deadline = await score(redis, redis_keys.DEADLINES(), session.id)
    assert deadline == pytest.approx(await store.now() + 7000, abs=10)


async def test_a_hold_delays_the_maximum_lifetime_but_lets_nothing_new_in(
    store: Store, new_session: NewSession
) -> None:
    session = await new_session(max_lifetime=0.05)
    execution = await reserve(store, session, hold=60)
    await wait_for_instant(store, session.expires_at or math.inf)
    assert await store.due_sessions() == []
    with pytest.raises(SessionExpired):
        await reserve(store, session)
    await store.finish_execution(completed(execution))
    ((due, reason),) = await store.due_sessions()
    assert (due.id, reason) == (session.id, EndReason.MAX_LIFETIME)


async def test_a_hold_that_ran_out_holds_no_longer(
    store: Store, new_session: NewSession, redis: RedisLink
) -> None:
    session = await new_session(max_lifetime=0.01)
    await reserve(store, session, hold=0.02)
    assert await wait_until_due(store)


async def test_ending_a_session_drops_its_hold(store: Store, new_session: NewSession) -> None:
    session = await new_session()
    execution = await reserve(store, session, hold=5000)
    await store.end_session(session.id, EndReason.WORKER_LOST, epoch=1)
    assert await store.next_deadline() is None
    assert await store.unfinished_executions(session.id) == [execution]
    with pytest.raises(SessionExpired):
        await store.start_execution(started(execution), hold_seconds=5)
    lost = replace(execution, status=ExecutionStatus.FAILED, failure={"code": "worker_lost"})
    assert await store.finish_execution(lost) == lost
    assert await store.next_deadline() is None
    assert await store.unfinished_executions(session.id) == []


# Executions


async def test_an_execution_is_read_back_in_each_of_its_states(
    store: Store, new_session: NewSession
) -> None:
    session = await new_session()
    execution = await reserve(store, session, code="print('ü😱\ud800')")
    assert await store.get_execution(session.id, execution.id) == execution
    running = started(execution)
    assert await store.start_execution(running, hold_seconds=10) == running
    waiting = replace(running, status=ExecutionStatus.INPUT_REQUIRED)
    assert await store.update_execution(waiting) == waiting
    assert await store.get_execution(session.id, execution.id) == waiting
    done = completed(running, stdout="\udcff", outputs=({"type": "stream", "text": "a"},))
    assert await store.finish_execution(done) == done
    assert await store.get_execution(session.id, execution.id) == done
    assert await store.unfinished_executions(session.id) == []


async def test_a_terminal_record_never_changes(store: Store, new_session: NewSession) -> None:
    session = await new_session()
    execution = await reserve(store, session)
    done = await store.finish_execution(completed(execution, stdout="first"))
    other = replace(done, status=ExecutionStatus.FAILED, stdout="second")
    assert await store.finish_execution(other) == done
    assert await store.start_execution(started(execution), hold_seconds=5) == done
    assert await store.update_execution(started(execution)) == done
    assert await store.get_execution(session.id, execution.id) == done
    assert await store.unfinished_executions(session.id) == []


async def test_what_was_never_reserved_cannot_be_written(
    store: Store, new_session: NewSession, redis: RedisLink
) -> None:
    session = await new_session()
    execution = execution_of(session)
    before = await all_keys(redis)
    with pytest.raises(ExecutionNotFound):
        await store.start_execution(started(execution), hold_seconds=5)
    with pytest.raises(ExecutionNotFound):
        await store.update_execution(started(execution))
    with pytest.raises(ExecutionNotFound):
        await store.finish_execution(completed(execution))
    with pytest.raises(ExecutionNotFound):
        await store.get_execution(session.id, execution.id)
    assert await all_keys(redis) == before


async def test_an_expired_unknown_or_foreign_session_takes_no_execution(
    store: Store, new_session: NewSession
) -> None:
    session = await new_session()
    with pytest.raises(SessionNotFound):
        await reserve(store, replace(session, tenant="other"))
    with pytest.raises(SessionNotFound):
        await reserve(store, replace(session, id="cntr_unknown"))
    await store.end_session(session.id, EndReason.IDLE, epoch=1)
    with pytest.raises(SessionExpired):
        await reserve(store, session)


async def test_the_queue_is_full_when_as_many_wait_as_may(
    store: Store, new_session: NewSession
) -> None:
    session = await new_session()
    running = await reserve(store, session, limit=2)
    await store.start_execution(started(running), hold_seconds=10)
    for _ in range(2):
        await reserve(store, session, limit=2)
    with pytest.raises(QueueFull) as full:
        await reserve(store, session, limit=2)
    assert full.value.retry_after
    await store.finish_execution(completed(running))
    await reserve(store, session, limit=2)


async def test_unfinished_executions_come_in_the_order_of_their_arrival(
    store: Store, new_session: NewSession
) -> None:
    session = await new_session()
    executions = [await reserve(store, session, hold=hold) for hold in (90, 10, 50, 30)]
    await store.finish_execution(completed(executions.pop(1)))
    assert await store.unfinished_executions(session.id) == executions


async def test_an_idempotency_key_returns_the_execution_it_made(
    store: Store, new_session: NewSession
) -> None:
    session = await new_session()
    execution = await reserve(store, session, key="k 1 ü", digest="d1")

    async def again(digest: str, of: Session = session) -> tuple[Execution, bool]:
        reservation = await store.reserve_execution(
            execution_of(of),
            tenant=of.tenant,
            idempotency_key="k 1 ü",
            request_digest=digest,
            hold_seconds=10,
            queue_limit=8,
        )
        return reservation.execution, reservation.created

    assert await again("d1") == (execution, False)
    with pytest.raises(KeyReused):
        await again("d2")
    done = await store.finish_execution(completed(execution, stdout="x" * 50_000))
    assert await again("d1") == (done, False)
    assert (await again("d1", await new_session()))[1] is True
    await store.end_session(session.id, EndReason.IDLE, epoch=1)
    assert await again("d1") == (done, False)
    assert len((await store.list_executions(session.id, PageQuery())).items) == 1


async def test_an_idempotency_key_is_forgotten_after_a_day(
    store: Store, new_session: NewSession, redis: RedisLink
) -> None:
    session = await new_session()
    first = await reserve(store, session, key="k")
    long_ago = await store.now() - redis_keys.IDEMPOTENCY_LIFETIME - 1
    entry = f"{long_ago:.6f} d1 {first.id}"
    await redis.call("HSET", redis_keys.IDEMPOTENCY(session.id), "k", entry, repeatable=True)
    second = await reserve(store, session, key="k", digest="d2")
    assert second.id != first.id


async def test_the_same_key_used_at_once_makes_one_execution(
    store: Store, new_session: NewSession
) -> None:
    session = await new_session()
    made: list[tuple[str, bool]] = []

    async def attempt() -> None:
        reservation = await store.reserve_execution(
            execution_of(session),
            tenant="acme",
            idempotency_key="k",
            request_digest="d",
            hold_seconds=10,
            queue_limit=8,
        )
        made.append((reservation.execution.id, reservation.created))

    async with anyio.create_task_group() as tasks:
        for _ in range(20):
            tasks.start_soon(attempt)
    assert len({execution_id for execution_id, _ in made}) == 1
    assert [created for _, created in made].count(True) == 1


async def test_reserving_the_same_execution_again_is_the_same_as_once(
    store: Store, new_session: NewSession, redis: RedisLink
) -> None:
    session = await new_session()
    execution = execution_of(session)
    for key in (None, "k", "k"):
        reservation = await store.reserve_execution(
            execution,
            tenant="acme",
            idempotency_key=key,
            request_digest="d",
            hold_seconds=10,
            queue_limit=1,
        )
        assert reservation.created
    assert await store.unfinished_executions(session.id) == [execution]


# Large records


async def redis_holds(redis: RedisLink, session: Session, execution: Execution) -> bytes:
    key = redis_keys.EXECUTIONS(session.id)
    value: bytes = await redis.call("HGET", key, execution.id, repeatable=True)
    return value


async def test_the_bulk_of_a_large_record_is_in_the_artifact_store(
    store: Store, new_session: NewSession, redis: RedisLink, artifacts: Artifacts
) -> None:
    session = await new_session()
    small, large = await reserve(store, session), await reserve(store, session, code="#" * 40_000)
    done = [
        await store.finish_execution(completed(small)),
        await store.finish_execution(completed(large, stdout="é" * 30_000)),
    ]
    assert len(await redis_holds(redis, session, large)) < 8000
    assert await store.get_execution(session.id, large.id) == done[1]
    page = await store.list_executions(session.id, PageQuery(order="asc"))
    assert list(page.items) == done
    named = await store.forget_session(session.id)
    assert named
    assert all(key.startswith(f"records/{session.id}/{large.id}") for key in named)
    await artifacts.delete(named)
    assert await artifacts.delete_prefix("records") == 0


async def test_a_large_record_stays_in_redis_when_the_artifact_store_fails(
    store: Store,
    new_session: NewSession,
    artifacts: Artifacts,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    session = await new_session()
    execution = await reserve(store, session)

    async def refuse(*_: object) -> int:
        raise ArtifactStoreError("no space left")

    monkeypatch.setattr(artifacts, "put", refuse)
    done = await store.finish_execution(completed(execution, stdout="x" * 100_000))
    assert await store.get_execution(session.id, execution.id) == done
    assert await store.forget_session(session.id) == []


async def test_a_large_record_of_an_unreachable_artifact_store_is_unavailable_not_cut(
    store: Store,
    new_session: NewSession,
    artifacts: Artifacts,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    session = await new_session()
    execution = await reserve(store, session)
    await store.finish_execution(completed(execution, stdout="x" * 100_000))

    async def refuse(*_: object) -> bytes:
        raise ArtifactStoreError("connection refused")

    monkeypatch.setattr(artifacts, "get", refuse)
    with pytest.raises(Unavailable):
        await store.get_execution(session.id, execution.id)
    with pytest.raises(Unavailable):
        await store.list_executions(session.id, PageQuery())


async def test_a_large_record_whose_bulk_was_removed_is_told_in_short(
    store: Store, new_session: NewSession, artifacts: Artifacts
) -> None:
    session = await new_session()
    execution = await reserve(store, session)
    error = {"name": "ValueError", "value": "v", "traceback": "t" * 5000}
    await store.finish_execution(completed(execution, stdout="x" * 100_000, error=error))
    await artifacts.delete_prefix("records")
    short = await store.get_execution(session.id, execution.id)
    assert short.status is ExecutionStatus.COMPLETED
    assert short.truncated
    assert 0 < len(short.stdout) < 5000
    assert short.error is not None
    assert short.error["name"] == "ValueError"


async def test_a_refused_record_leaves_nothing_in_the_artifact_store(
    store: Store, new_session: NewSession, artifacts: Artifacts
) -> None:
    session = await new_session()
    await store.end_session(session.id, EndReason.IDLE, epoch=1)
    with pytest.raises(SessionExpired):
        await reserve(store, session, code="#" * 100_000)
    assert await artifacts.delete_prefix("records") == 0


# Archives


async def an_ended_session(store: Store, session: Session) -> list[Execution]:
    executions = []
    for n in range(23):
        execution = await reserve(store, session, key=f"k{n}", limit=100)
        stdout = "ü" * 40_000 if n % 5 == 0 else f"line {n}"
        executions.append(await store.finish_execution(completed(execution, stdout=stdout)))
    await store.end_session(session.id, EndReason.IDLE, epoch=1)
    return executions


async def test_archived_records_are_read_as_before(
    store: Store, new_session: NewSession, redis: RedisLink, artifacts: Artifacts
) -> None:
    session = await new_session()
    executions = await an_ended_session(store, session)
    assert await store.archive_executions(session.id)
    left = await all_keys(redis)
    assert redis_keys.EXECUTIONS(session.id) not in left
    assert redis_keys.EXECUTION_ORDER(session.id) not in left

    for execution in executions:
        assert await store.get_execution(session.id, execution.id) == execution
    with pytest.raises(ExecutionNotFound):
        await store.get_execution(session.id, "exec_unknown")
    orders: list[tuple[Order, list[Execution]]] = [
        ("asc", executions),
        ("desc", executions[::-1]),
    ]
    for order, expected in orders:
        seen: list[Execution] = []
        more = True
        while more:
            after = seen[-1].id if seen else None
            page = await store.list_executions(session.id, PageQuery(after, 5, order))
            seen += page.items
            more = page.has_more
        assert seen == expected
    with pytest.raises(BadRequest):
        await store.list_executions(session.id, PageQuery("exec_unknown"))

    changed = replace(executions[3], status=ExecutionStatus.FAILED)
    assert await store.finish_execution(changed) == executions[3]
    again = await store.reserve_execution(
        execution_of(session),
        tenant="acme",
        idempotency_key="k7",
        request_digest="d1",
        hold_seconds=1,
        queue_limit=1,
    )
    assert again.execution == executions[7]
    assert not again.created
    events = [
        event async for event in store.event_log.follow(executions[4].id, session_id=session.id)
    ]
    assert events[-1].data["execution"] == executions[4].to_wire()

    named = await store.forget_session(session.id)
    await artifacts.delete(named)
    assert await artifacts.delete_prefix("records") == 0


async def test_archiving_removes_the_bulks_that_the_archive_holds(
    store: Store, new_session: NewSession, artifacts: Artifacts
) -> None:
    session = await new_session()
    await an_ended_session(store, session)
    assert await store.archive_executions(session.id)
    assert not await store.archive_executions(session.id)
    assert await artifacts.delete_prefix(f"records/{session.id}") == 1


async def test_a_session_that_is_not_done_is_not_archived(
    store: Store, new_session: NewSession, artifacts: Artifacts
) -> None:
    session = await new_session()
    execution = await reserve(store, session)
    assert not await store.archive_executions(session.id)
    await store.end_session(session.id, EndReason.WORKER_LOST, epoch=1)
    assert not await store.archive_executions(session.id)
    assert await artifacts.delete_prefix("records") == 0
    await store.finish_execution(completed(execution))
    assert await store.archive_executions(session.id)
    assert not await store.archive_executions((await new_session()).id)
    assert not await store.archive_executions("cntr_unknown")


async def test_an_archive_that_cannot_be_stored_changes_nothing(
    store: Store, new_session: NewSession, artifacts: Artifacts, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = await new_session()
    executions = await an_ended_session(store, session)

    async def refuse(*_: object) -> int:
        raise ArtifactStoreError("no space left")

    with monkeypatch.context() as patch:
        patch.setattr(artifacts, "put", refuse)
        with pytest.raises(ArtifactStoreError):
            await store.archive_executions(session.id)
    for execution in executions:
        assert await store.get_execution(session.id, execution.id) == execution
    assert await store.archive_executions(session.id)


async def test_only_the_newest_logs_of_a_session_are_kept(
    store: Store, new_session: NewSession, redis: RedisLink
) -> None:
    session = await new_session()
    first = await reserve(store, session, limit=10_000)
    for _ in range(redis_keys.LOGS_KEPT + 5):
        execution = await reserve(store, session, limit=10_000)
        await store.finish_execution(completed(execution))
    logs = [key for key in await all_keys(redis) if key.startswith(redis_keys.LOG("")[:-2])]
    assert len(logs) == redis_keys.LOGS_KEPT + 1
    assert redis_keys.LOG(first.id) in logs


# Files


def upload(path: str, size: int = 1, artifact: str | None = None) -> FileWritten:
    return FileWritten(path, size, "user", artifact)


async def test_an_overwritten_file_keeps_its_id_and_time(
    store: Store, new_session: NewSession
) -> None:
    session = await new_session()
    (first,) = await store.apply_file_changes(
        session.id, written=[upload("a b/ü 数据.csv", 3, "files/1")], removed=[]
    )
    assert first.path == "a b/ü 数据.csv"
    assert first.artifact == "files/1"
    (second,) = await store.apply_file_changes(
        session.id, written=[FileWritten(first.path, 9, "assistant")], removed=["missing"]
    )
    assert second == replace(first, bytes=9, source="assistant", artifact=None)
    await store.set_artifact(session.id, first.id, "files/2")
    stored = replace(second, artifact="files/2")
    assert await store.get_file(session.id, first.id) == stored
    assert await store.find_file(session.id, first.path) == stored
    assert await store.list_files(session.id, PageQuery()) is not None
    assert await store.forget_session(session.id) == ["files/1", "files/2"]


async def test_removed_files_are_gone_and_their_paths_free(
    store: Store, new_session: NewSession
) -> None:
    session = await new_session()
    a, b = await store.apply_file_changes(
        session.id, written=[upload("a"), upload("b")], removed=[]
    )
    assert await store.remove_file(session.id, a.id) == a
    await store.apply_file_changes(session.id, written=[], removed=["b"])
    for file in (a, b):
        with pytest.raises(FileNotFound):
            await store.get_file(session.id, file.id)
        with pytest.raises(FileNotFound):
            await store.remove_file(session.id, file.id)
        with pytest.raises(FileNotFound):
            await store.set_artifact(session.id, file.id, "x")
        assert await store.find_file(session.id, file.path) is None
    assert (await store.list_files(session.id, PageQuery())).items == ()
    (again,) = await store.apply_file_changes(session.id, written=[upload("a")], removed=[])
    assert again.id != a.id


async def test_thousands_of_file_changes_are_applied(store: Store, new_session: NewSession) -> None:
    session = await new_session()
    written = [upload(f"d/{n}.txt", n) for n in range(2500)]
    files = await store.apply_file_changes(session.id, written=written, removed=[])
    assert [(file.path, file.bytes) for file in files] == [(w.path, w.bytes) for w in written]
    removed = [file.path for file in files[100:]]
    await store.apply_file_changes(session.id, written=[], removed=removed)
    page = await store.list_files(session.id, PageQuery(limit=100, order="asc"))
    assert list(page.items) == files[:100]
    assert not page.has_more


async def test_files_of_another_session_are_not_found(
    store: Store, new_session: NewSession
) -> None:
    mine, other = await new_session(), await new_session()
    (file,) = await store.apply_file_changes(mine.id, written=[upload("a")], removed=[])
    with pytest.raises(FileNotFound):
        await store.get_file(other.id, file.id)
    assert await store.find_file(other.id, "a") is None
    with pytest.raises(SessionNotFound):
        await store.apply_file_changes("cntr_unknown", written=[upload("a")], removed=[])


# Lists


async def test_pages_follow_each_other_in_both_orders(
    store: Store, new_session: NewSession
) -> None:
    ids = [(await new_session()).id for _ in range(7)]
    await new_session("other")

    async def walk(order: Any) -> list[list[str]]:
        pages, after = [], None
        while True:
            page = await store.list_sessions("acme", PageQuery(after, 3, order))
            pages.append([session.id for session in page.items])
            if not page.has_more:
                return pages
            after = pages[-1][-1]

    assert await walk("asc") == [ids[0:3], ids[3:6], ids[6:]]
    assert await walk("desc") == [ids[:3:-1], ids[3:0:-1], [ids[0]]]


async def test_a_full_last_page_has_no_more(store: Store, new_session: NewSession) -> None:
    for _ in range(3):
        await new_session()
    assert not (await store.list_sessions("acme", PageQuery(limit=3))).has_more
    assert await store.list_sessions("nobody", PageQuery()) is not None


async def test_an_unknown_cursor_is_a_bad_request(store: Store, new_session: NewSession) -> None:
    session = await new_session()
    foreign = await new_session("other")
    query = PageQuery(after="nothing")
    for ask in (
        store.list_sessions("acme", query),
        store.list_sessions("acme", PageQuery(after=foreign.id)),
        store.list_executions(session.id, query),
        store.list_files(session.id, query),
    ):
        with pytest.raises(BadRequest) as refused:
            await ask
        assert refused.value.param == "after"


async def test_sessions_are_found_by_their_exact_name(
    store: Store, new_session: NewSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = []
    for n in range(1200):
        session = await new_session(name="wanted" if n % 100 == 7 else f"wanted {n}")
        if session.name == "wanted":
            wanted.append(session.id)
    page = await store.list_sessions("acme", PageQuery(limit=100), name="wanted")
    assert [session.id for session in page.items] == wanted[::-1]
    assert not page.has_more
    page = await store.list_sessions("acme", PageQuery(limit=5, order="asc"), name="wanted")
    assert [session.id for session in page.items] == wanted[:5]
    assert page.has_more
    assert (await store.list_sessions("acme", PageQuery(), name="")).items == ()


async def test_a_client_may_delete_what_it_lists(store: Store, new_session: NewSession) -> None:
    sessions = [await new_session() for _ in range(7)]
    session = sessions[0]
    await store.apply_file_changes(
        session.id, written=[upload(f"f{n}") for n in range(7)], removed=[]
    )
    seen, after = [], None
    while True:
        files = await store.list_files(session.id, PageQuery(after, 2))
        for file in files.items:
            await store.remove_file(session.id, file.id)
            seen.append(file.path)
        if not files.has_more:
            break
        after = files.items[-1].id
    assert seen == [f"f{n}" for n in range(6, -1, -1)]

    gone, after = [], None
    while True:
        page = await store.list_sessions("acme", PageQuery(after, 3))
        for session in page.items:
            await store.forget_session(session.id)
            gone.append(session.id)
        if not page.has_more:
            break
        after = page.items[-1].id
    assert gone == [session.id for session in reversed(sessions)]


# Lifetimes


async def a_full_life(store: Store, session: Session) -> Execution:
    """Use everything that leaves keys."""
    for n in range(3):
        execution = await reserve(store, session, key=f"k{n}")
        created = {"execution": execution.to_wire()}
        store.event_log.append(execution.id, [ExecutionEvent(0, EventType.CREATED, created)])
        await store.start_execution(started(execution), hold_seconds=10)
        if n:
            await store.finish_execution(completed(execution, stdout="x" * 30_000))
        await store.event_log.flush(execution.id)
    files = await store.apply_file_changes(
        session.id, written=[upload("a", artifact="f/a"), upload("b")], removed=[]
    )
    await store.remove_file(session.id, files[1].id)
    return execution


@pytest.mark.parametrize("ended", [False, True], ids=["running", "ended"])
async def test_no_key_stays_behind_after_a_session_is_forgotten(
    store: Store, new_session: NewSession, redis: RedisLink, ended: bool
) -> None:
    session = await new_session()
    await a_full_life(store, session)
    if ended:
        await store.end_session(session.id, EndReason.IDLE, epoch=1)
    named = await store.forget_session(session.id)
    assert "f/a" in named
    # The place in the list is remembered for an hour, for clients that delete while they page.
    assert await all_keys(redis) == {redis_keys.TENANT_CURSORS("acme")}
    lifetime = await redis.call("TTL", redis_keys.TENANT_CURSORS("acme"), repeatable=True)
    assert 0 < lifetime <= redis_keys.CURSOR_LIFETIME
    with pytest.raises(SessionNotFound):
        await store.get_session(session.id, None)
    assert await store.forget_session(session.id) == []


async def test_what_comes_late_for_a_forgotten_session_leaves_no_key(
    store: Store, new_session: NewSession, redis: RedisLink
) -> None:
    session = await new_session()
    execution = await a_full_life(store, session)
    await store.forget_session(session.id)
    before = await all_keys(redis)
    completion = {"execution": execution.to_wire()}
    store.event_log.append(execution.id, [ExecutionEvent(1, EventType.COMPLETED, completion)])
    await store.event_log.flush(execution.id)
    with pytest.raises(ExecutionNotFound):
        await store.finish_execution(completed(execution))
    with pytest.raises(SessionNotFound):
        await store.apply_file_changes(session.id, written=[upload("late")], removed=[])
    with pytest.raises(FileNotFound):
        await store.set_artifact(session.id, "cfile_x", "late")
    with pytest.raises(SessionNotFound):
        await store.touch_session(session.id, None)
    assert await all_keys(redis) == before


async def test_every_key_of_an_ended_session_has_its_time(
    store: Store, new_session: NewSession, redis: RedisLink
) -> None:
    session = await new_session()
    execution = await a_full_life(store, session)
    await store.end_session(session.id, EndReason.IDLE, epoch=1)
    await store.apply_file_changes(
        session.id, written=[upload("archived", artifact="late")], removed=["a"]
    )
    assert (await store.get_execution(session.id, execution.id)).finished
    kept = store.retention + redis_keys.RETENTION_GRACE
    shared = {redis_keys.TENANT_SESSIONS("acme"), redis_keys.RETAINED()}
    for key in await all_keys(redis) - shared:
        left = await redis.call("TTL", key, repeatable=True)
        if "-cursors:" in key:
            assert 0 < left <= redis_keys.CURSOR_LIFETIME, key
        elif key.startswith(redis_keys.LOG("")[:-2]):
            assert 0 < left <= redis_keys.LOG_LIFETIME, key
        else:
            assert kept - 60 < left <= kept, key


async def test_keys_made_after_the_end_have_its_time_too(
    store: Store, new_session: NewSession, redis: RedisLink
) -> None:
    session = await new_session()
    execution = await reserve(store, session)
    await store.end_session(session.id, EndReason.IDLE, epoch=1)
    await store.finish_execution(completed(execution, stdout="x" * 50_000))
    await store.apply_file_changes(session.id, written=[upload("a", artifact="x")], removed=[])
    shared = {redis_keys.TENANT_SESSIONS("acme"), redis_keys.RETAINED()}
    for key in await all_keys(redis) - shared:
        assert await redis.call("TTL", key, repeatable=True) > 0, key


async def test_sessions_become_forgettable_when_their_retention_is_over(
    store: Store, new_session: NewSession
) -> None:
    session, other = await new_session(), await new_session()
    await store.end_session(session.id, EndReason.IDLE, epoch=1)
    assert await store.forgettable_sessions() == []
    store.retention = 0.0
    await store.end_session(other.id, EndReason.IDLE, epoch=1)
    assert await store.forgettable_sessions() == [other.id]
    await store.forget_session(other.id)
    assert await store.forgettable_sessions() == []


async def test_a_list_drops_sessions_whose_time_ran_out(
    store: Store, new_session: NewSession, redis: RedisLink
) -> None:
    session, other = await new_session(), await new_session()
    await redis.call("DEL", redis_keys.SESSION(session.id), repeatable=True)
    page = await store.list_sessions("acme", PageQuery())
    assert [found.id for found in page.items] == [other.id]
    members = await redis.call("ZRANGE", redis_keys.TENANT_SESSIONS("acme"), 0, -1, repeatable=True)
    assert members == [other.id.encode()]


async def test_the_clock_is_reckoned_from_redis(store: Store, new_session: NewSession) -> None:
    await store.touch_session((await new_session()).id, None)
    assert store.clock() == pytest.approx(await store.now(), abs=0.5)
