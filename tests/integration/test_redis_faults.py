"""What callers of the store see when Redis dies, stalls, cuts them off or is full."""

from __future__ import annotations

import os
import re
import secrets
import signal
import tempfile
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from orchestrator import redis_link
from orchestrator.artifacts import Artifacts
from orchestrator.embedded_redis import redis_server
from orchestrator.errors import StoreUnavailable
from orchestrator.executions import EventType, Execution, ExecutionEvent, ExecutionStatus
from orchestrator.redis_link import RedisLink, open_link
from orchestrator.sessions import EndReason, Session, SessionOrder, SessionStatus
from orchestrator.store import FileWritten, PageQuery, Store, open_store


@pytest.fixture(autouse=True)
async def _bounded() -> AsyncIterator[None]:
    with anyio.fail_after(60):
        yield


@pytest.fixture
def state() -> Iterator[Path]:
    """A short path: sockets go there."""
    with tempfile.TemporaryDirectory(prefix="kp-") as directory:
        yield Path(directory)


@pytest.fixture
async def own_redis(state: Path) -> AsyncIterator[str]:
    """A server that the test may harm; it is restarted when it dies."""
    async with redis_server(state) as url:
        yield url


@pytest.fixture
async def own_store(own_redis: str, artifacts: Artifacts) -> AsyncIterator[Store]:
    """A store on it."""
    async with open_store(own_redis, artifacts) as store:
        yield store


@pytest.fixture
async def link(own_redis: str) -> AsyncIterator[RedisLink]:
    """Another connection to it."""
    async with open_link(own_redis) as link:
        yield link


async def pid_of(link: RedisLink) -> int:
    info = await link.call("INFO", "server", repeatable=True)
    found = re.search(rb"process_id:(\d+)", info)
    assert found is not None
    return int(found[1])


async def until_it_answers(link: RedisLink) -> None:
    while True:
        try:
            await link.call("PING", repeatable=True)
        except StoreUnavailable:
            await anyio.sleep(0.01)
        else:
            return


async def new_session(store: Store, name: str = "demo") -> Session:
    return await store.create_session(
        f"cntr_{secrets.token_urlsafe(24)}",
        SessionOrder("acme", name, 20),
        worker_id="w",
        max_lifetime=None,
        tenant_limit=None,
    )


async def reserve(store: Store, session: Session, **fields: Any) -> Execution:
    reservation = await store.reserve_execution(
        Execution(
            **{
                "id": f"exec_{secrets.token_urlsafe(24)}",
                "session_id": session.id,
                "code": "1",
                "status": ExecutionStatus.QUEUED,
                "created_at": 1.0,
                **fields,
            }
        ),
        tenant="acme",
        idempotency_key=None,
        request_digest="",
        hold_seconds=60,
        queue_limit=100,
    )
    return reservation.execution


def completed(execution: Execution, **fields: Any) -> Execution:
    return replace(execution, status=ExecutionStatus.COMPLETED, **fields)


async def test_calls_fail_fast_while_redis_is_gone(artifacts: Artifacts, state: Path) -> None:
    async with open_store(f"unix://{state}/nothing.sock", artifacts) as store:
        with anyio.fail_after(1):
            with pytest.raises(StoreUnavailable) as gone:
                await store.ping()
            with pytest.raises(StoreUnavailable):
                await store.get_session("cntr_x", None)
    assert gone.value.status == 503
    assert gone.value.retry_after == 1


async def test_a_tcp_address_where_nobody_listens_is_unavailable(artifacts: Artifacts) -> None:
    async with open_store("redis://127.0.0.1:1/0", artifacts) as store:
        with anyio.fail_after(2), pytest.raises(StoreUnavailable):
            await store.ping()


async def test_the_first_call_after_a_restart_of_redis_succeeds(
    own_store: Store, link: RedisLink
) -> None:
    session = await new_session(own_store)
    os.kill(await pid_of(link), signal.SIGKILL)
    await until_it_answers(link)
    assert await own_store.get_session(session.id, None) == session


async def test_a_connection_that_is_cut_is_not_noticed(own_store: Store, link: RedisLink) -> None:
    session = await new_session(own_store)
    for n in range(20):
        await link.call("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes", repeatable=True)
        execution = await reserve(own_store, session, id=f"exec_{n}")
        await link.call("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes", repeatable=True)
        await own_store.finish_execution(completed(execution))
    page = await own_store.list_executions(session.id, PageQuery(limit=100))
    assert len(page.items) == 20


async def test_calls_under_way_when_the_connection_is_cut_are_carried_out_once(
    own_store: Store, link: RedisLink
) -> None:
    session = await new_session(own_store)
    outcomes: list[str] = []

    async def one(n: int) -> None:
        execution = await reserve(own_store, session, id=f"exec_{n}")
        outcomes.append((await own_store.finish_execution(completed(execution))).id)

    async with anyio.create_task_group() as tasks:
        for n in range(100):
            tasks.start_soon(one, n)
        await link.call("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes", repeatable=True)
    page = await own_store.list_executions(session.id, PageQuery(limit=100))
    assert {execution.id for execution in page.items} == set(outcomes)
    assert len(outcomes) == 100
    assert not page.has_more


async def test_an_end_whose_reply_was_lost_is_still_reported_to_its_caller(
    own_store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = await new_session(own_store)
    exchange = own_store._link._exchange
    lost: list[Any] = []

    async def lose_one_reply(commands: Any) -> Any:
        replies = await exchange(commands)
        if not lost and commands[0][0] == "EVALSHA":
            lost.append(replies)
            raise redis_link.ConnectionLost("cut")
        return replies

    await own_store.due_sessions()
    monkeypatch.setattr(own_store._link, "_exchange", lose_one_reply)
    await own_store.end_session("cntr_unknown", EndReason.IDLE, epoch=1)
    lost.clear()
    ended = await own_store.end_session(session.id, EndReason.IDLE, epoch=1)
    assert lost
    assert ended is not None
    assert ended.end_reason is EndReason.IDLE
    assert await own_store.end_session(session.id, EndReason.IDLE, epoch=1) is None


async def test_a_cancelled_call_leaves_the_connection_sound(own_store: Store) -> None:
    session = await new_session(own_store)
    for n in range(50):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(reserve, own_store, session)
            tasks.start_soon(own_store.touch_session, session.id, None)
            await anyio.lowlevel.checkpoint()
            if n % 2:
                await anyio.lowlevel.checkpoint()
            tasks.cancel_scope.cancel()
        assert (await own_store.get_session(session.id, None)).id == session.id


async def test_a_stalled_redis_is_unavailable_within_the_timeout_and_then_continues(
    own_store: Store, link: RedisLink, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(redis_link, "REPLY_TIMEOUT", 0.5)
    session = await new_session(own_store)
    execution = await reserve(own_store, session)
    pid = await pid_of(link)
    refused: list[StoreUnavailable] = []

    async def finish() -> None:
        try:
            await own_store.finish_execution(completed(execution))
        except StoreUnavailable as error:
            refused.append(error)

    os.kill(pid, signal.SIGSTOP)
    try:
        with anyio.fail_after(2.5):
            async with anyio.create_task_group() as tasks:
                for _ in range(30):
                    tasks.start_soon(finish)
            with pytest.raises(StoreUnavailable):
                await own_store.ping()
    finally:
        os.kill(pid, signal.SIGCONT)
    assert len(refused) == 30
    done = await own_store.finish_execution(completed(execution))
    assert await own_store.get_execution(session.id, execution.id) == done


async def test_a_follower_is_told_when_redis_stalls_and_can_go_on(
    own_store: Store, link: RedisLink, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("orchestrator.event_log.REPLY_TIMEOUT", 0.3)
    monkeypatch.setattr("orchestrator.event_log.BLOCK", 0.3)
    session = await new_session(own_store)
    execution = await reserve(own_store, session)
    created = ExecutionEvent(0, EventType.CREATED, {"execution": execution.to_wire()})
    done = completed(execution)
    ended = ExecutionEvent(1, EventType.COMPLETED, {"execution": done.to_wire()})
    own_store.event_log.append(execution.id, [created])
    pid = await pid_of(link)
    seen = []
    with pytest.raises(StoreUnavailable):
        async for event in own_store.event_log.follow(execution.id):
            seen.append(event)
            os.kill(pid, signal.SIGSTOP)
    os.kill(pid, signal.SIGCONT)
    assert seen == [created]
    await own_store.finish_execution(done)
    own_store.event_log.append(execution.id, [ended])
    rest = [event async for event in own_store.event_log.follow(execution.id, after=0)]
    assert rest == [ended]


async def test_events_appended_while_redis_restarts_arrive_once_and_in_order(
    own_store: Store, link: RedisLink
) -> None:
    session = await new_session(own_store)
    execution = await reserve(own_store, session)
    events = [
        ExecutionEvent(n, EventType.OUTPUT, {"output_index": n, "output": {"text": str(n)}})
        for n in range(400)
    ]
    done = completed(execution)
    events.append(ExecutionEvent(400, EventType.COMPLETED, {"execution": done.to_wire()}))
    for n, event in enumerate(events):
        own_store.event_log.append(execution.id, [event])
        if n % 100 == 50:
            os.kill(await pid_of(link), signal.SIGKILL)
            await until_it_answers(link)
        await anyio.lowlevel.checkpoint()
    seen = [event async for event in own_store.event_log.follow(execution.id)]
    assert seen == events


async def test_scripts_survive_a_flush_of_the_script_cache(
    own_store: Store, link: RedisLink
) -> None:
    session = await new_session(own_store)
    await link.call("SCRIPT", "FLUSH", repeatable=True)
    execution = await reserve(own_store, session)
    await link.call("SCRIPT", "FLUSH", repeatable=True)
    assert (await own_store.finish_execution(completed(execution))).finished


async def test_a_full_redis_refuses_new_work_and_records_what_ran(
    own_store: Store, link: RedisLink
) -> None:
    session = await new_session(own_store)
    execution = await reserve(own_store, session)
    await link.call("CONFIG", "SET", "maxmemory", 1, repeatable=True)
    for refused in (
        new_session(own_store),
        reserve(own_store, session),
        own_store.apply_file_changes(session.id, written=[FileWritten("a", 1, "user")], removed=[]),
    ):
        with pytest.raises(StoreUnavailable):
            await refused
    assert (await own_store.get_session(session.id, None)) is not None
    running = replace(execution, status=ExecutionStatus.IN_PROGRESS)
    await own_store.start_execution(running, hold_seconds=10)
    done = await own_store.finish_execution(completed(execution, stdout="x" * 5000))
    assert await own_store.get_execution(session.id, execution.id) == done
    ended = await own_store.end_session(session.id, EndReason.IDLE, epoch=1)
    assert ended is not None
    assert ended.status is SessionStatus.EXPIRED
    await own_store.forget_session(session.id)
    await link.call("CONFIG", "SET", "maxmemory", 0, repeatable=True)
    await new_session(own_store)


async def test_a_replica_that_may_not_write_is_unavailable(
    own_store: Store, link: RedisLink
) -> None:
    await link.call("REPLICAOF", "127.0.0.1", 1, repeatable=True)
    with pytest.raises(StoreUnavailable):
        await new_session(own_store)
    await link.call("REPLICAOF", "NO", "ONE", repeatable=True)
    await new_session(own_store)


async def test_a_busy_redis_is_unavailable(own_store: Store, link: RedisLink) -> None:
    await link.call("CONFIG", "SET", "busy-reply-threshold", 50, repeatable=True)

    async def spin() -> None:
        with pytest.raises(Exception, match="Script killed"):
            await link.call("EVAL", "while true do end", 0, repeatable=False)

    async with open_link(own_store._link._url) as other, anyio.create_task_group() as tasks:
        await other.call("PING", repeatable=True)
        tasks.start_soon(spin)
        await anyio.sleep(0.3)
        with pytest.raises(StoreUnavailable):
            await own_store.ping()
        await other.call("SCRIPT", "KILL", repeatable=True)
    await own_store.ping()


async def test_a_wrong_password_is_unavailable_not_a_crash(
    own_redis: str, link: RedisLink, artifacts: Artifacts
) -> None:
    await link.call("CONFIG", "SET", "requirepass", "secret", repeatable=True)
    async with open_store(own_redis, artifacts) as store:
        with pytest.raises(StoreUnavailable):
            await store.ping()
    async with open_store(own_redis + "?password=secret", artifacts) as store:
        await store.ping()
    await link.call("CONFIG", "SET", "requirepass", "", repeatable=True)


async def test_what_a_block_raises_passes_through_as_it_is(
    state: Path, artifacts: Artifacts
) -> None:
    class Ours(Exception):
        pass

    with pytest.raises(Ours):
        async with redis_server(state) as url, open_store(url, artifacts) as store:
            await store.ping()
            raise Ours
