"""Deleting a container: what the caller waits for, and when everything is gone.

Above: __main__.py. The record of a slot is the last of it to go, after its
container, its mount and its file.
"""

from __future__ import annotations

import time

from benchmarks.bench import Bench
from benchmarks.figures import Row, Spread
from benchmarks.product import Session

LIMIT = 45.0


async def measure(bench: Bench) -> list[Row]:
    """Milliseconds to the answer, seconds until nothing is left."""
    answered: list[float] = []
    gone: list[float] = []
    async with bench.product(pool_size=0) as server, server.connect() as connection:
        for _ in bench.turns(bench.repeat, within=LIMIT / 2):
            session = await Session.create(connection)
            await session.run("1+1")
            begun = time.perf_counter()
            await session.delete()
            answered.append((time.perf_counter() - begun) * 1000)
            await server.until_slots(0)
            gone.append(time.perf_counter() - begun)
    return [
        Row("delete, until answered", "ms", ours=Spread.of(answered)),
        Row("delete, until all of it is gone", "s", ours=Spread.of(gone)),
    ]
