"""`kernelpool image build`, with its progress.

Above: __main__.py, embedded.py. Below: kernelpool.image, kernelpool.environment.
"""

from __future__ import annotations

import time
from pathlib import Path

from anyio import to_thread
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from kernelpool import environment, image
from kernelpool.recipe import Step
from orchestrator.tables import human_bytes

LARGEST_PARTS = 12
"""Rows in the list of what takes the image's space."""


class StepDisplay:
    """Shows a build's steps: a live line on a terminal, one line per step elsewhere."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._shown = 0
        self._progress = Progress(
            SpinnerColumn(),
            TextColumn("[bold]{task.description}"),
            BarColumn(bar_width=20),
            TextColumn("{task.fields[detail]}", table_column=None),
            TimeElapsedColumn(),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._task = self._progress.add_task("starting", total=None, detail="")

    def __enter__(self) -> StepDisplay:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def __call__(self, step: Step) -> None:
        """Show where the build is."""
        if self._console.is_terminal:
            self._progress.update(
                self._task,
                description=step.title,
                completed=step.number - 1,
                total=step.total,
                detail=step.detail[: max(20, self._console.width - 70)],
            )
        elif step.number > self._shown:
            self._shown = step.number
            self._console.print(f"[{step.number}/{step.total}] {step.title}", highlight=False)


async def build_for_docker(base: str, *, refresh: bool) -> None:
    """Build the image, and report its size and what takes it.

    Raises:
        EngineUnreachable, ImageBuildError: the message names the step or the cure.
    """
    console = Console()
    with StepDisplay(console) as display:
        report = await image.build(base=base, refresh=refresh, progress=display)
    how = f"built in {report.seconds:.0f} s" if report.built else "unchanged"
    console.print(f"{report.reference}: {human_bytes(report.size_bytes)}, {how}", highlight=False)
    if report.built:
        for part in report.parts[:LARGEST_PARTS]:
            console.print(f"  {human_bytes(part.size_bytes):>9}  {part.name}", highlight=False)


async def build_for_bubblewrap(directory: Path, *, console: Console | None = None) -> Path:
    """Make the environment, and say where it is.

    Raises:
        ImageBuildError: the message names the step.
    """
    console = console or Console()
    started = time.monotonic()
    there = await to_thread.run_sync(environment.find, directory) is not None
    with StepDisplay(console) as display:
        path = await environment.build_environment(directory, progress=display)
    how = "unchanged" if there else f"built in {time.monotonic() - started:.0f} s"
    console.print(f"kernel environment {path}: {how}", highlight=False)
    return path
