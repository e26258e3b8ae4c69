"""100,000 printed lines, streamed, beside a plain client; none may be lost. Above: __main__.py."""

from __future__ import annotations

import time

from benchmarks.bench import Bench
from benchmarks.figures import Row, Spread, Target, compared
from benchmarks.product import Session

LIMIT = 60.0
LINES = 100_000
CODE = f"for number in range({LINES}): print(number)"
PRINTED = "".join(f"{number}\n" for number in range(LINES))

MEBIBYTE = 1024 * 1024


async def measure(bench: Bench) -> list[Row]:
    """Seconds for all lines; lines lost; how far the server's memory rose above its start."""
    ours: list[float] = []
    reference: list[float] = []
    lost = 0.0
    async with (
        bench.product(pool_size=1) as server,
        server.connect() as connection,
        bench.plain() as plain,
    ):
        await server.until_warm()
        session = await Session.create(connection)
        await session.stream("1+1")
        server.forget_peak()
        before = server.resident_bytes()
        for _ in bench.turns(bench.repeat, within=LIMIT / 2):
            begun = time.perf_counter()
            text = await plain.run(CODE)
            reference.append(time.perf_counter() - begun)
            if text != PRINTED:
                raise RuntimeError("the plain client lost lines: there is nothing to compare with")
            begun = time.perf_counter()
            execution, streamed = await session.stream(CODE)
            ours.append(time.perf_counter() - begun)
            lost += _lost(streamed) + _lost(execution["stdout"])
        growth = (server.peak_bytes() - before) / MEBIBYTE
    return [
        compared(
            f"{LINES:,} printed lines, streamed",
            "s",
            ours=ours,
            reference=reference,
            target=Target(2.0),
        ),
        Row("lines lost of them", "lines", ours=Spread.of([lost]), target=Target(0, of="ours")),
        Row(
            "server's memory growth meanwhile",
            "MB",
            ours=Spread.of([growth]),
            target=Target(50, of="ours"),
            note="peak of the resident set above its start, over all repetitions",
        ),
    ]


def _lost(text: str) -> int:
    """Lines missing from a text; one when it differs in another way."""
    return 0 if text == PRINTED else max(1, LINES - text.count("\n"))
