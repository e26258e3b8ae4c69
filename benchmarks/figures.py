"""Numbers: spreads, ratios, targets. Above: every measurement, report.py. Below: nothing.

A machine's speed drifts, by half on a shared one. So a reference and what is compared with it are
measured in turns, a ratio is made of neighbours, and what is told of ratios is their median and how
far they lay apart.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Spread:
    """The median of several values, and the least and the greatest of them."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """The spread of at least one value."""
        return cls(statistics.median(values), min(values), max(values))


@dataclass(frozen=True, slots=True)
class Target:
    """What a figure is to be: at most a bound, or at least."""

    bound: float
    kind: Literal["at most", "at least"] = "at most"
    of: Literal["ratio", "ours"] = "ratio"

    def met(self, value: float) -> bool:
        """Whether a value keeps to it."""
        return value <= self.bound if self.kind == "at most" else value >= self.bound


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the result."""

    name: str
    unit: str
    ours: Spread
    reference: Spread | None = None
    ratio: Spread | None = None
    target: Target | None = None
    note: str = ""

    @property
    def met(self) -> bool | None:
        """Whether the median keeps to the target; None without one."""
        if self.target is None:
            return None
        spread = self.ours if self.target.of == "ours" else self.ratio
        return spread is not None and self.target.met(spread.median)


def compared(
    name: str,
    unit: str,
    *,
    ours: Sequence[float],
    reference: Sequence[float],
    target: Target | None = None,
    note: str = "",
) -> Row:
    """A row of values measured in pairs: the n-th of ours beside the n-th of the reference."""
    ratios = [mine / theirs for mine, theirs in zip(ours, reference, strict=True)]
    return Row(
        name,
        unit,
        ours=Spread.of(ours),
        reference=Spread.of(reference),
        ratio=Spread.of(ratios),
        target=target,
        note=note,
    )
