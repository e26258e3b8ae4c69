"""What a pool should do next. Above: pool.py carries it out. Below: nothing.

Pure: a snapshot and the time in, actions out; tested by properties.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

QUIET_SECONDS: Final = 0.5
"""Seconds without an execution after which warming slows nobody down."""

PATIENCE_SECONDS: Final = 3.0
"""Seconds that a pool stays below its target for the sake of running executions."""

FAILURE_BACKOFF: Final = (1.0, 2.0, 4.0, 8.0, 16.0, 30.0)
"""Seconds to wait after the first, second, ... failure in a row to warm a slot."""


class Action(StrEnum):
    """One step for the pool."""

    WARM = "warm"
    """Make one more warm slot."""
    DISCARD_DEAD = "discard_dead"
    """Remove a warm slot whose kernel has died."""
    DISCARD_SURPLUS = "discard_surplus"
    """Remove a warm slot above the target."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What a pool holds at one moment. Instants are monotonic seconds."""

    target: int
    """Warm slots wanted."""
    capacity: int
    """Slots at most, of all kinds."""
    warm: int
    dead: int
    """Warm slots whose kernel has died."""
    warming: int
    leased: int
    retiring: int
    """Slots being removed; their memory and disk are not free yet."""
    last_execution_at: float
    short_since: float | None
    """Since when the pool has been below its target; None when it is not."""
    failures: int = 0
    """Failures in a row to warm a slot."""
    last_failure_at: float = float("-inf")

    @property
    def total(self) -> int:
        """Slots of all kinds."""
        return self.warm + self.dead + self.warming + self.leased + self.retiring

    @property
    def room(self) -> int:
        """Slots that may still be made."""
        return max(0, self.capacity - self.total)


@dataclass(frozen=True, slots=True)
class Plan:
    """What to do now, and when to look again at the latest (None: when something changes)."""

    actions: tuple[Action, ...]
    look_again_at: float | None


def plan(pool: Snapshot, *, now: float) -> Plan:
    """The next steps. One slot is warmed at a time, and not beside running code if it can wait."""
    actions = [Action.DISCARD_DEAD] * pool.dead
    actions += [Action.DISCARD_SURPLUS] * max(0, pool.warm - pool.target)
    if pool.warming or pool.warm >= pool.target or not pool.room:
        return Plan(tuple(actions), None)
    start_at = _warm_at(pool)
    if start_at <= now:
        return Plan((*actions, Action.WARM), None)
    return Plan(tuple(actions), start_at)


def _warm_at(pool: Snapshot) -> float:
    quiet_at = pool.last_execution_at + QUIET_SECONDS
    if pool.short_since is not None:
        quiet_at = min(quiet_at, pool.short_since + PATIENCE_SECONDS)
    if not pool.failures:
        return quiet_at
    wait = FAILURE_BACKOFF[min(pool.failures, len(FAILURE_BACKOFF)) - 1]
    return max(quiet_at, pool.last_failure_at + wait)
