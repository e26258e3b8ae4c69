"""Creating a container and its first result with a warm pool. Above: __main__.py.

Beside the time: what the service asked of Docker meanwhile, and whether a mount appeared.
"""

from __future__ import annotations

import statistics
import time

from benchmarks.bench import Bench
from benchmarks.figures import Row, Spread, Target, compared
from benchmarks.product import Session, seconds

LIMIT = 60.0
CODE = "1+1"

WARM_CELLS = 15
"""Warm cells per container to compare with."""

CREATES = 2
"""Containers per repetition."""


async def measure(bench: Bench) -> list[Row]:
    """Milliseconds from the request for a container to the first result."""
    firsts: list[float] = []
    warms: list[float] = []
    plains: list[float] = []
    touched: list[float] = []
    asked: list[str] = []
    taken: set[str] = set()
    async with (
        bench.product(pool_size=1, tapped=True) as server,
        server.connect() as connection,
        bench.plain() as plain,
    ):
        for _ in bench.turns(bench.repeat * CREATES, within=LIMIT / 2):
            taken |= await server.until_warm(besides=taken)
            await server.until_slots(1)
            mounts = server.mounts()
            if server.tap is not None:
                server.tap.clear()
            begun = time.perf_counter()
            session = await Session.create(connection)
            await session.run(CODE)
            firsts.append((time.perf_counter() - begun) * 1000)
            calls = list(server.tap.seen) if server.tap is not None else []
            touched.append(len(calls) + abs(server.mounts() - mounts))
            asked += calls
            pairs = [
                (await seconds(session.run(CODE)), await seconds(plain.run(CODE)))
                for _ in range(WARM_CELLS)
            ]
            warms.append(statistics.median(pair[0] for pair in pairs) * 1000)
            plains.append(statistics.median(pair[1] for pair in pairs) * 1000)
            await session.delete()
    over_plain = statistics.median(f / p for f, p in zip(firsts, plains, strict=True))
    return [
        compared(
            "create to first result, warm pool",
            "ms",
            ours=firsts,
            reference=warms,
            target=Target(3.0),
            note=f"beside our own warm 1+1; {over_plain:.2f} x a plain client's",
        ),
        Row(
            "engine calls and mounts on that path",
            "calls",
            ours=Spread.of(touched),
            target=Target(0, of="ours"),
            note=", ".join(sorted(set(asked)))[:200],
        ),
    ]
