"""20 sessions that run 20 cells each at once, beside 20 plain clients. Above: __main__.py."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack

from benchmarks.bench import Bench
from benchmarks.figures import Row, Spread, Target, compared
from benchmarks.plain import PlainKernel
from benchmarks.product import Product, Session

LIMIT = 120.0
SESSIONS = 20
CELLS = 20
CODE = "1+1"

STARTS_AT_ONCE = 4

MEBIBYTE = 1024 * 1024


async def measure(bench: Bench) -> list[Row]:
    """Cells per second; and what a session costs the server in memory."""
    ours: list[float] = []
    reference: list[float] = []
    own_cost: list[float] = []
    plain_cost: list[float] = []
    async with AsyncExitStack() as stack:
        server = await stack.enter_async_context(bench.product(pool_size=0))
        before = server.resident_bytes()
        sessions = await _opened(stack, server)
        per_session = (server.resident_bytes() - before) / SESSIONS / MEBIBYTE
        plains = await _started(stack, bench)
        for _ in bench.turns(bench.repeat, within=LIMIT / 4):
            spent = time.process_time()
            reference.append(await _rate([plain.run for plain in plains]))
            plain_cost.append(_per_cell(time.process_time() - spent))
            spent = time.process_time() + server.processor_seconds()
            ours.append(await _rate([session.run for session in sessions]))
            own_cost.append(_per_cell(time.process_time() + server.processor_seconds() - spent))
    return [
        compared(
            f"{SESSIONS} sessions x {CELLS} cells at once",
            "cells/s",
            ours=ours,
            reference=reference,
            target=Target(0.65, "at least"),
        ),
        compared(
            "processor time of a cell outside its kernel",
            "ms",
            ours=own_cost,
            reference=plain_cost,
            note="client, server and Redis, beside a plain client",
        ),
        Row("server's memory per session", "MB", ours=Spread.of([per_session])),
    ]


def _per_cell(seconds: float) -> float:
    """Milliseconds."""
    return seconds * 1000 / (SESSIONS * CELLS)


async def _rate(runs: Sequence[Callable[[str], Awaitable[object]]]) -> float:
    async def cells(run: Callable[[str], Awaitable[object]]) -> None:
        for _ in range(CELLS):
            await run(CODE)

    begun = time.perf_counter()
    await asyncio.gather(*map(cells, runs))
    return len(runs) * CELLS / (time.perf_counter() - begun)


async def _opened(stack: AsyncExitStack, server: Product) -> list[Session]:
    turns = asyncio.Semaphore(STARTS_AT_ONCE)

    async def opened() -> Session:
        async with turns:
            connection = await stack.enter_async_context(server.connect())
            session = await Session.create(connection)
            await session.run(CODE)
        return session

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(opened()) for _ in range(SESSIONS)]
    return [task.result() for task in tasks]


async def _started(stack: AsyncExitStack, bench: Bench) -> list[PlainKernel]:
    turns = asyncio.Semaphore(STARTS_AT_ONCE)

    async def started() -> PlainKernel:
        async with turns:
            plain = await stack.enter_async_context(bench.plain())
            await plain.run(CODE)
        return plain

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(started()) for _ in range(SESSIONS)]
    return [task.result() for task in tasks]
