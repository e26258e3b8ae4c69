"""States of a kernel and the table of moves between them. Above: kernel.py. Below: nothing.

The diagram in `docs/explanation/lifecycles.md` is drawn from `NEXT`.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Final


class State(StrEnum):
    """What a kernel is doing."""

    STARTING = "starting"
    IDLE = "idle"
    BUSY = "busy"
    DEAD = "dead"
    CLOSED = "closed"


class Cause(StrEnum):
    """What moves a kernel from one state to the next."""

    READY = "ready"
    EXECUTE = "execute"
    COMPLETE = "complete"
    EXITED = "exited"
    RESTART = "restart"
    CLOSE = "close"


NEXT: Final[dict[tuple[State, Cause], State]] = {
    (State.STARTING, Cause.READY): State.IDLE,
    (State.STARTING, Cause.EXITED): State.DEAD,
    (State.STARTING, Cause.CLOSE): State.CLOSED,
    (State.IDLE, Cause.EXECUTE): State.BUSY,
    (State.IDLE, Cause.EXITED): State.DEAD,
    (State.IDLE, Cause.RESTART): State.STARTING,
    (State.IDLE, Cause.CLOSE): State.CLOSED,
    (State.BUSY, Cause.COMPLETE): State.IDLE,
    (State.BUSY, Cause.EXITED): State.DEAD,
    (State.BUSY, Cause.RESTART): State.STARTING,
    (State.BUSY, Cause.CLOSE): State.CLOSED,
    (State.DEAD, Cause.EXITED): State.DEAD,
    (State.DEAD, Cause.COMPLETE): State.DEAD,
    (State.DEAD, Cause.RESTART): State.STARTING,
    (State.DEAD, Cause.CLOSE): State.CLOSED,
    (State.CLOSED, Cause.EXITED): State.CLOSED,
    (State.CLOSED, Cause.COMPLETE): State.CLOSED,
    (State.CLOSED, Cause.CLOSE): State.CLOSED,
}


class ImpossibleMove(Exception):
    """A cause that the table does not know in that state: a bug of ours."""


def step(state: State, cause: Cause) -> State:
    """The state that follows.

    Raises:
        ImpossibleMove: the table has no such move.
    """
    try:
        return NEXT[state, cause]
    except KeyError:
        raise ImpossibleMove(f"a kernel that is {state} cannot {cause}") from None
