"""A warm `1+1` through HTTP, sync and streamed, beside a plain client's. Above: __main__.py."""

from __future__ import annotations

import statistics
from collections.abc import Awaitable, Callable

from benchmarks.bench import Bench
from benchmarks.figures import Row, Target, compared
from benchmarks.product import Session, seconds

LIMIT = 45.0
"""Seconds for the whole measurement."""

ROUNDS = 80
"""Triples per repetition: plain, sync, streamed, each round beginning with another of them."""

WARM_UP = 20
CODE = "1+1"


async def measure(bench: Bench) -> list[Row]:
    """p50 of each repetition, in milliseconds."""
    medians: dict[str, list[float]] = {"plain": [], "sync": [], "stream": []}
    async with (
        bench.product(pool_size=1) as server,
        server.connect() as connection,
        bench.plain() as plain,
    ):
        await server.until_warm()
        session = await Session.create(connection)
        calls: dict[str, Callable[[], Awaitable[object]]] = {
            "plain": lambda: plain.run(CODE),
            "sync": lambda: session.run(CODE),
            "stream": lambda: session.stream(CODE),
        }
        names = list(calls)
        for _ in range(WARM_UP):
            for name in names:
                await calls[name]()
        for _ in bench.turns(bench.repeat, within=LIMIT / 2):
            times: dict[str, list[float]] = {name: [] for name in names}
            for turn in range(ROUNDS):
                for place in range(len(names)):
                    name = names[(turn + place) % len(names)]
                    times[name].append(await seconds(calls[name]()) * 1000)
            for name in names:
                medians[name].append(statistics.median(times[name]))
    return [
        compared(
            "warm 1+1, sync, p50",
            "ms",
            ours=medians["sync"],
            reference=medians["plain"],
            target=Target(1.5),
        ),
        compared(
            "warm 1+1, streamed, p50",
            "ms",
            ours=medians["stream"],
            reference=medians["plain"],
            target=Target(1.7),
        ),
    ]
