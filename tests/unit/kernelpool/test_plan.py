"""What a pool does next, by properties."""

from __future__ import annotations

from collections import Counter
from typing import Final

from hypothesis import given
from hypothesis import strategies as st

from kernelpool.plan import (
    FAILURE_BACKOFF,
    PATIENCE_SECONDS,
    QUIET_SECONDS,
    Action,
    Snapshot,
    plan,
)

INSTANTS: Final = st.floats(0, 1000)
COUNTS: Final = st.integers(0, 6)

SNAPSHOTS: Final = st.builds(
    Snapshot,
    target=COUNTS,
    capacity=st.integers(0, 12),
    warm=COUNTS,
    dead=COUNTS,
    warming=st.integers(0, 1),
    leased=COUNTS,
    retiring=COUNTS,
    last_execution_at=INSTANTS | st.just(float("-inf")),
    short_since=INSTANTS | st.none(),
    failures=st.integers(0, 9),
    last_failure_at=INSTANTS | st.just(float("-inf")),
)


def short(**changes: float | None) -> Snapshot:
    """A pool one slot below its target, quiet since long ago."""
    facts: dict[str, float | None] = {
        "target": 2, "capacity": 8, "warm": 1, "dead": 0, "warming": 0, "leased": 0,
        "retiring": 0, "last_execution_at": float("-inf"), "short_since": 100.0,
    }  # fmt: skip
    return Snapshot(**facts | changes)  # type: ignore[arg-type]


@given(SNAPSHOTS, INSTANTS)
def test_dead_and_surplus_slots_go_and_at_most_one_is_warmed(pool: Snapshot, now: float) -> None:
    counts = Counter(plan(pool, now=now).actions)
    assert counts[Action.DISCARD_DEAD] == pool.dead
    assert counts[Action.DISCARD_SURPLUS] == max(0, pool.warm - pool.target)
    assert counts[Action.WARM] <= 1


@given(SNAPSHOTS, INSTANTS)
def test_a_slot_is_warmed_only_where_one_is_missing_and_fits(pool: Snapshot, now: float) -> None:
    if Action.WARM in plan(pool, now=now).actions:
        assert pool.warm < pool.target
        assert pool.total < pool.capacity
        assert not pool.warming


@given(SNAPSHOTS, INSTANTS)
def test_what_must_wait_is_planned_for_an_instant_at_which_it_may_be_done(
    pool: Snapshot, now: float
) -> None:
    steps = plan(pool, now=now)
    if steps.look_again_at is not None:
        assert steps.look_again_at > now
        assert Action.WARM not in steps.actions
        assert Action.WARM in plan(pool, now=steps.look_again_at).actions


@given(SNAPSHOTS, INSTANTS)
def test_a_pool_below_its_target_is_never_forgotten(pool: Snapshot, now: float) -> None:
    steps = plan(pool, now=now)
    if pool.warm < pool.target and pool.room and not pool.warming:
        assert Action.WARM in steps.actions or steps.look_again_at is not None


def test_warming_waits_for_a_quiet_moment_but_not_for_ever() -> None:
    busy = short(last_execution_at=100.0)
    assert plan(busy, now=100.1).look_again_at == 100.0 + QUIET_SECONDS
    still_busy = short(last_execution_at=100.0 + PATIENCE_SECONDS)
    assert Action.WARM in plan(still_busy, now=100.0 + PATIENCE_SECONDS).actions


def test_each_failure_in_a_row_waits_longer_up_to_the_last_pause() -> None:
    waits = []
    for failures in range(1, 9):
        failing = short(failures=failures, last_failure_at=200.0)
        waits.append((plan(failing, now=200.0).look_again_at or 0.0) - 200.0)
    assert waits == [*FAILURE_BACKOFF, FAILURE_BACKOFF[-1], FAILURE_BACKOFF[-1]]
