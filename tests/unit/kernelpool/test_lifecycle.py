"""The table of a kernel's states."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kernelpool.lifecycle import NEXT, Cause, ImpossibleMove, State, step


@pytest.mark.parametrize("state", State)
@pytest.mark.parametrize("cause", Cause)
def test_a_move_is_in_the_table_or_is_refused(state: State, cause: Cause) -> None:
    if (state, cause) in NEXT:
        assert step(state, cause) is NEXT[state, cause]
    else:
        with pytest.raises(ImpossibleMove, match=f"is {state} cannot {cause}"):
            step(state, cause)


@pytest.mark.parametrize("state", State)
def test_a_kernel_can_be_closed_and_can_be_found_ended_in_every_state(state: State) -> None:
    assert step(state, Cause.CLOSE) is State.CLOSED
    assert step(state, Cause.EXITED) is (State.CLOSED if state is State.CLOSED else State.DEAD)


@given(st.lists(st.sampled_from(Cause)))
def test_a_closed_kernel_stays_closed(causes: list[Cause]) -> None:
    state = State.CLOSED
    for cause in causes:
        if (state, cause) in NEXT:
            state = step(state, cause)
    assert state is State.CLOSED


@given(st.lists(st.sampled_from(Cause), max_size=30))
def test_code_runs_only_in_a_kernel_that_is_ready(causes: list[Cause]) -> None:
    state, ready = State.STARTING, False
    for cause in causes:
        if (state, cause) not in NEXT:
            continue
        state = step(state, cause)
        ready = cause is Cause.READY or (ready and state in {State.IDLE, State.BUSY})
        assert ready or state is not State.BUSY
