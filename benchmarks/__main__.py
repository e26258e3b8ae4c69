"""`python -m benchmarks`: measure, print a table, write JSON. Above: people, `make bench`.

Below: the measurements.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
import traceback
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from types import ModuleType

import click
from rich.console import Console

from benchmarks import cold, create, destroy, files, lines, many, memory, report, warm
from benchmarks.bench import Bench
from benchmarks.figures import Row
from benchmarks.machine import facts
from benchmarks.plain import starter
from kernelpool.runtimes import docker_usable
from orchestrator.image_build import build_for_bubblewrap
from orchestrator.settings import load

MEASUREMENTS: dict[str, ModuleType] = {
    "warm": warm,
    "create": create,
    "lines": lines,
    "files": files,
    "memory": memory,
    "destroy": destroy,
    "cold": cold,
    "many": many,
}
"""In the order they run: those that use the most memory last."""

BUDGET = 350.0
"""Seconds for all of them together; a slow machine gets fewer repetitions, then fewer figures."""

RESULTS = Path(__file__).parent / "results"


@dataclass(frozen=True, slots=True)
class Measurement:
    """One module's measurement."""

    name: str
    limit: float
    measure: Callable[[Bench], Awaitable[list[Row]]]


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--only", multiple=True, type=click.Choice(list(MEASUREMENTS)),
              help="Measure only this; repeatable.")  # fmt: skip
@click.option("--runtime", default=None, type=click.Choice(["docker", "bubblewrap"]),
              help="Default: Docker where an engine answers and has the image.")  # fmt: skip
@click.option("--repeat", default=5, show_default=True, type=click.IntRange(1, 100),
              help="Repetitions of each measurement.")  # fmt: skip
@click.option("--output", default=None, type=click.Path(path_type=Path, dir_okay=False),
              help="JSON file; default: one named by time in benchmarks/results.")  # fmt: skip
def main(only: tuple[str, ...], runtime: str | None, repeat: int, output: Path | None) -> None:
    """Measure kernelpool against plain jupyter_client on this machine."""
    chosen = [
        Measurement(name, module.LIMIT, module.measure)
        for name, module in MEASUREMENTS.items()
        if not only or name in only
    ]
    missed = asyncio.run(run(chosen, runtime, repeat, output))
    sys.exit(1 if missed else 0)


async def run(
    chosen: list[Measurement], runtime: str | None, repeat: int, output: Path | None
) -> bool:
    """Measure, report; whether anything failed or missed its target."""
    console = Console(stderr=True)
    settings = load(os.environ)
    if runtime is None:
        runtime = "docker" if await docker_usable(settings.image) else "bubblewrap"
    environments = settings.state_dir / "environments"
    if runtime == "bubblewrap":
        await build_for_bubblewrap(environments, console=console)
    machine = facts(runtime, settings.image)
    rows: list[Row] = []
    failures: dict[str, str] = {}
    async with starter(runtime, settings.image, environments) as starts:
        bench = Bench(runtime, settings.image, environments, repeat, starts)
        deadline = time.monotonic() + BUDGET
        for measurement in chosen:
            begun = time.monotonic()
            limit = max(0.0, min(measurement.limit, deadline - begun))
            try:
                async with asyncio.timeout(limit):
                    rows += await measurement.measure(bench)
            except TimeoutError:
                failures[measurement.name] = f"it did not end within {limit:.0f} s"
            except Exception as error:
                traceback.print_exc()
                failures[measurement.name] = f"{type(error).__name__}: {error}"
            took = time.monotonic() - begun
            console.print(f"{measurement.name}: {took:.0f} s", style="dim", highlight=False)
    report.print_result(rows, failures, machine)
    path = output or RESULTS / f"{datetime.now(UTC):%Y%m%d-%H%M%S}-{runtime}.local.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    result = report.as_json(rows, failures, machine)
    path.write_text(json.dumps(result, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    console.print(f"written to {path}", style="dim", highlight=False)
    return bool(failures) or any(row.met is False for row in rows)


if __name__ == "__main__":
    main()
