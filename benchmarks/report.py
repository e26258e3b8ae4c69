"""The result: a table for people, JSON for machines, the reference page. Above: __main__.py.

Below: figures.py.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.figures import Row, Spread, Target

PIPED_WIDTH = 160
"""Columns of the table where it goes to no terminal."""


def as_json(
    rows: Sequence[Row], failures: Mapping[str, str], machine: Mapping[str, Any]
) -> dict[str, Any]:
    """The whole result."""
    return {
        "machine": dict(machine),
        "rows": [asdict(row) | {"met": row.met} for row in rows],
        "failures": dict(failures),
    }


def print_result(
    rows: Sequence[Row], failures: Mapping[str, str], machine: Mapping[str, Any]
) -> None:
    """Print the table."""
    console = Console(width=None if sys.stdout.isatty() else PIPED_WIDTH)
    title = f"{machine['runtime']}, {machine['cpu']}, {machine['cores']} cores, {machine['date']}"
    table = Table(title=title, title_justify="left")
    table.add_column("measurement")
    for name in ("kernelpool", "reference", "ratio", "target"):
        table.add_column(name, justify="right")
    table.add_column("")
    for row in rows:
        table.add_row(*cells(row), _VERDICTS[row.met])
    console.print(table)
    for row in rows:
        if row.note:
            console.print(f"[dim]{row.name}: {row.note}[/]", highlight=False)
    for name, reason in failures.items():
        console.print(f"[red]{name} failed:[/] {reason}", highlight=False, markup=True)


def cells(row: Row) -> tuple[str, str, str, str, str]:
    """Name, ours, reference, ratio and target as text."""
    return (
        row.name,
        f"{_spread(row.ours)} {row.unit}",
        f"{_spread(row.reference)} {row.unit}" if row.reference else "",
        f"{_spread(row.ratio)} x" if row.ratio else "",
        _target(row.target, row.unit) if row.target else "",
    )


_VERDICTS = {True: "[green]met[/]", False: "[red]missed[/]", None: ""}


def _spread(spread: Spread) -> str:
    if spread.low == spread.high:
        return _number(spread.median)
    return f"{_number(spread.median)} ({_number(spread.low)} to {_number(spread.high)})"


def _number(value: float) -> str:
    magnitude = abs(value)
    if magnitude >= 100 or value == 0:
        return f"{value:,.0f}"
    return f"{value:.1f}" if magnitude >= 10 else f"{value:.2f}"


def _target(target: Target, unit: str) -> str:
    sign = "≤" if target.kind == "at most" else "≥"
    return f"{sign} {target.bound:g} {'x' if target.of == 'ratio' else unit}"
