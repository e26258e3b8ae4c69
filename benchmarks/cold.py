"""Creating a container and its first result without a pool, beside a start by hand.

Above: __main__.py. By hand is: docker create, docker start (or a bare sandbox), wait for the plain
kernel's sockets, connect, first reply. It runs no code; ours makes the slot, limits and journal,
and does.
"""

from __future__ import annotations

import time

from benchmarks.bench import Bench
from benchmarks.figures import Row, Target, compared
from benchmarks.product import Session

LIMIT = 75.0
CODE = "1+1"


async def measure(bench: Bench) -> list[Row]:
    """Seconds from the request for a container to the first result."""
    ours: list[float] = []
    by_hand: list[float] = []
    async with bench.product(pool_size=0) as server, server.connect() as connection:
        for _ in bench.turns(bench.repeat + 1, within=LIMIT / 2):
            async with bench.plain() as plain:
                ready = plain.ready_seconds
            begun = time.perf_counter()
            session = await Session.create(connection)
            await session.run(CODE)
            first = time.perf_counter() - begun
            await session.delete()
            by_hand.append(ready)
            ours.append(first)
    if len(ours) > 1:
        # The first of each had the machine's caches to fill.
        del by_hand[0], ours[0]
    return [
        compared(
            "create to first result, cold",
            "s",
            ours=ours,
            reference=by_hand,
            target=Target(1.3),
        )
    ]
