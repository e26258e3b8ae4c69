"""What the command line prints in tables. Above: __main__.py and its commands. Below: doctor.py."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.table import Table

from orchestrator.doctor import Finding
from orchestrator.settings import Settings, describe


def human_bytes(count: float) -> str:
    """A size for people: 1,234,567 bytes are `1.2 MB`."""
    for unit in ("bytes", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "bytes" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


def print_settings(settings: Settings, strangers: Iterable[str]) -> None:
    """Every setting, then the variables that look like settings and are none."""
    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column("setting", no_wrap=True)
    for column in ("value", "unit", "source"):
        table.add_column(column, overflow="fold")
    for row in describe(settings):
        table.add_row(row.variable, row.value, row.unit, row.source)
    console = Console()
    console.print(table)
    for line in strangers:
        console.print(line, style="yellow", highlight=False)


def print_findings(findings: Sequence[Finding]) -> None:
    """What a look at the machine found, with the cure beneath what lacks."""
    console = Console()
    for finding in findings:
        mark = (
            "[green]ok[/]" if finding.fine else "[red]no[/]" if finding.needed else "[yellow]--[/]"
        )
        console.print(f"{mark}  [bold]{finding.what}[/]: {finding.found}", highlight=False)
        if finding.cure:
            console.print(f"    {finding.cure}", highlight=False)
