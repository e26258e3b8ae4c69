"""The memory of one warm session, beside a plain kernel with the same imports.

Above: __main__.py. Told from inside, as the proportional set size of every process there: a page
that several kernels share counts in parts. `alone` is the unshared part, which each more costs.
"""

from __future__ import annotations

import json
from typing import Any

from benchmarks.bench import Bench
from benchmarks.figures import Row, Spread, compared
from benchmarks.product import Session
from kernelpool import Profile

LIMIT = 45.0

PROBE = """
def _probe():
    import glob, json
    sums = {"Pss": 0, "Private": 0}
    for path in glob.glob("/proc/[0-9]*/smaps_rollup"):
        try:
            lines = open(path).read().splitlines()[1:]
        except OSError:
            continue
        for line in lines:
            name, _, rest = line.partition(":")
            kind = "Private" if name.startswith("Private_") else name
            if kind in sums:
                sums[kind] += int(rest.split()[0]) / 1024
    print(json.dumps(sums))
_probe()
"""


async def measure(bench: Bench) -> list[Row]:
    """Megabytes."""
    async with (
        bench.product(pool_size=1) as server,
        server.connect() as connection,
        bench.plain() as plain,
    ):
        await server.until_warm()
        session = await Session.create(connection)
        await session.run("1+1")
        for module in Profile().warm_imports:
            await plain.run(f"__import__({module!r})")
        own: dict[str, Any] = json.loads((await session.run(PROBE))["stdout"])
        other: dict[str, Any] = json.loads(await plain.run(PROBE))
        used = (await session.run("1+1"))["usage"]["memory_peak_bytes"]
        server_memory = server.resident_bytes() / 1024 / 1024
    rows = [
        compared(
            "memory of a warm session (PSS)",
            "MB",
            ours=[own["Pss"]],
            reference=[other["Pss"]],
            note="numpy, pandas and matplotlib imported",
        ),
        compared("of that unshared", "MB", ours=[own["Private"]], reference=[other["Private"]]),
    ]
    if used is not None:
        rows.append(Row("its cgroup's peak", "MB", ours=Spread.of([used / 1024 / 1024])))
    return [*rows, Row("memory of the server with one session", "MB",
                       ours=Spread.of([server_memory]))]  # fmt: skip
