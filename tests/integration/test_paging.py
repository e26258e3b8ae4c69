"""Paging by properties: whatever comes and goes between two pages, no item is lost or doubled."""

from __future__ import annotations

import secrets
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Literal

import anyio
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from orchestrator.executions import Execution, ExecutionStatus
from orchestrator.sessions import SessionOrder
from orchestrator.store import FileWritten, Page, PageQuery, Store

MAX_EXAMPLES = 60


@dataclass(frozen=True)
class Listing:
    """A list under test: how to add to it, remove from it and read it."""

    add: Callable[[], Awaitable[str]]
    remove: Callable[[str], Awaitable[Any]] | None
    page: Callable[[PageQuery], Awaitable[Page[Any]]]


async def new_session(store: Store, tenant: str) -> str:
    session = await store.create_session(
        f"cntr_{secrets.token_urlsafe(12)}",
        SessionOrder(tenant, "n", 20),
        worker_id="w",
        max_lifetime=None,
        tenant_limit=None,
    )
    return session.id


async def sessions(store: Store) -> Listing:
    tenant = secrets.token_hex(8)
    return Listing(
        add=lambda: new_session(store, tenant),
        remove=store.forget_session,
        page=lambda query: store.list_sessions(tenant, query),
    )


async def named_sessions(store: Store) -> Listing:
    tenant = secrets.token_hex(8)
    return Listing(
        add=lambda: new_session(store, tenant),
        remove=store.forget_session,
        page=lambda query: store.list_sessions(tenant, query, name="n"),
    )


async def files(store: Store) -> Listing:
    session_id = await new_session(store, secrets.token_hex(8))

    async def add() -> str:
        written = [FileWritten(secrets.token_hex(8), 1, "user")]
        (file,) = await store.apply_file_changes(session_id, written=written, removed=[])
        return file.id

    return Listing(
        add=add,
        remove=lambda file_id: store.remove_file(session_id, file_id),
        page=lambda query: store.list_files(session_id, query),
    )


async def executions(store: Store) -> Listing:
    tenant = secrets.token_hex(8)
    session_id = await new_session(store, tenant)

    async def add() -> str:
        execution = Execution(
            f"exec_{secrets.token_urlsafe(12)}", session_id, "1", ExecutionStatus.QUEUED, 1.0
        )
        await store.reserve_execution(
            execution,
            tenant=tenant,
            idempotency_key=None,
            request_digest="",
            hold_seconds=10,
            queue_limit=10_000,
        )
        return execution.id

    return Listing(
        add=add, remove=None, page=lambda query: store.list_executions(session_id, query)
    )


Step = tuple[Literal["add"], int] | tuple[Literal["remove", "remove_cursor"], int]

steps = st.lists(
    st.lists(
        st.tuples(st.sampled_from(["add", "remove", "remove_cursor"]), st.integers(0, 30)),
        max_size=4,
    ),
    max_size=12,
)


@pytest.mark.parametrize("make", [sessions, named_sessions, files, executions])
@settings(
    max_examples=MAX_EXAMPLES,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(
    before=st.integers(0, 12),
    limit=st.integers(1, 5),
    order=st.sampled_from(["asc", "desc"]),
    between=steps,
)
async def test_nothing_is_lost_or_doubled_whatever_happens_between_pages(
    store: Store,
    make: Callable[[Store], Awaitable[Listing]],
    before: int,
    limit: int,
    order: Literal["asc", "desc"],
    between: list[list[Step]],
) -> None:
    with anyio.fail_after(20):
        listing = await make(store)
        everything = [await listing.add() for _ in range(before)]
        existed, removed = list(everything), set()
        seen: list[str] = []
        after: str | None = None
        todo = list(between)
        while True:
            page = await listing.page(PageQuery(after, limit, order))
            assert len(page.items) <= limit
            seen += [item.id for item in page.items]
            if not page.has_more:
                break
            assert page.items
            after = seen[-1]
            for kind, number in todo.pop(0) if todo else []:
                if kind == "add":
                    everything.append(await listing.add())
                elif listing.remove is not None:
                    left = [item for item in everything if item not in removed]
                    if not left:
                        continue
                    victim = left[number % len(left)]
                    if kind == "remove_cursor" and after in left:
                        victim = after
                    removed.add(victim)
                    await listing.remove(victim)

        assert len(seen) == len(set(seen))
        assert set(existed) - removed <= set(seen)
        places = [everything.index(item) for item in seen]
        assert places == sorted(places, reverse=order == "desc")
