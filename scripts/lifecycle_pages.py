"""Draw the state diagrams of docs/explanation/lifecycles.md, or check that they are current.

python scripts/lifecycle_pages.py           draws them
python scripts/lifecycle_pages.py --check   fails when the page shows something else

The kernel's diagram is its transition table. Sessions and executions have no table in the code: a
script in Redis, or the owner, makes each move. Their moves are listed here and held against the
enums, so that a new state or reason cannot be forgotten.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from kernelpool.lifecycle import NEXT, State
from orchestrator.executions import TERMINAL, ExecutionStatus
from orchestrator.sessions import EndReason, SessionStatus

PAGE: Final = Path(__file__).resolve().parent.parent / "docs" / "explanation" / "lifecycles.md"

OUTSIDE: Final = "[*]"
"""Mermaid's name for what is before the first state and after the last."""

Move = tuple[str, str, str]
"""From, to, and what moves it."""

ENDS: Final = {
    EndReason.IDLE: SessionStatus.EXPIRED,
    EndReason.MAX_LIFETIME: SessionStatus.EXPIRED,
    EndReason.WORKER_LOST: SessionStatus.EXPIRED,
    EndReason.DRAINED: SessionStatus.EXPIRED,
    EndReason.DELETED: OUTSIDE,
}

EXECUTIONS: Final[tuple[Move, ...]] = (
    (OUTSIDE, ExecutionStatus.IN_PROGRESS, "nothing runs in its container"),
    (OUTSIDE, ExecutionStatus.QUEUED, "another one runs"),
    (ExecutionStatus.QUEUED, ExecutionStatus.IN_PROGRESS, "its turn"),
    (ExecutionStatus.QUEUED, ExecutionStatus.CANCELLED, "cancelled, restart, caller gone"),
    (ExecutionStatus.QUEUED, ExecutionStatus.FAILED, "worker lost"),
    (ExecutionStatus.IN_PROGRESS, ExecutionStatus.INPUT_REQUIRED, "the code asks"),
    (ExecutionStatus.INPUT_REQUIRED, ExecutionStatus.IN_PROGRESS, "answered"),
    (ExecutionStatus.IN_PROGRESS, ExecutionStatus.COMPLETED, "the code ended or raised"),
    (ExecutionStatus.IN_PROGRESS, ExecutionStatus.TIMED_OUT, "time limit"),
    (ExecutionStatus.IN_PROGRESS, ExecutionStatus.CANCELLED, "cancelled, restart, caller gone"),
    (ExecutionStatus.IN_PROGRESS, ExecutionStatus.FAILED, "a failure of ours"),
    (ExecutionStatus.INPUT_REQUIRED, ExecutionStatus.TIMED_OUT, "time limit"),
    (ExecutionStatus.INPUT_REQUIRED, ExecutionStatus.CANCELLED, "cancelled, restart, caller gone"),
    (ExecutionStatus.INPUT_REQUIRED, ExecutionStatus.FAILED, "a failure of ours"),
)


def kernel_moves() -> list[Move]:
    """The transition table, moves between the same two states joined."""
    causes: dict[tuple[str, str], list[str]] = {(OUTSIDE, State.STARTING): [""]}
    for (state, cause), following in NEXT.items():
        causes.setdefault((state, following), []).append(cause)
    return [(state, following, ", ".join(names)) for (state, following), names in causes.items()]


def session_moves() -> list[Move]:
    """The two states of a session, and every reason for which it ends."""
    assert set(ENDS) == set(EndReason), "an end reason is missing in ENDS"
    causes: dict[str, list[str]] = {}
    for reason, following in ENDS.items():
        causes.setdefault(following, []).append(reason)
    return [
        (OUTSIDE, SessionStatus.RUNNING, "created"),
        *((SessionStatus.RUNNING, after, ", ".join(names)) for after, names in causes.items()),
        (SessionStatus.EXPIRED, OUTSIDE, "deleted, retention time over"),
    ]


def execution_moves() -> list[Move]:
    """The moves of an execution, checked against its states."""
    assert {following for _, following, _ in EXECUTIONS} == set(ExecutionStatus)
    left = {state for state, _, _ in EXECUTIONS} - {OUTSIDE}
    assert left == set(ExecutionStatus) - TERMINAL, "a terminal status never changes"
    return [
        *EXECUTIONS,
        *((status, OUTSIDE, "") for status in ExecutionStatus if status in TERMINAL),
    ]


def diagram(moves: Iterable[Move]) -> str:
    """A Mermaid state diagram."""
    lines = [
        f"    {state} --> {following}{f': {cause}' if cause else ''}\n"
        for state, following, cause in moves
    ]
    return "```mermaid\nstateDiagram-v2\n" + "".join(lines) + "```\n"


def drawn(page: str) -> str:
    """The page with current diagrams between its marks."""
    for name, moves in (
        ("kernel", kernel_moves()),
        ("session", session_moves()),
        ("execution", execution_moves()),
    ):
        begin = f"<!-- {name}: made by scripts/lifecycle_pages.py -->\n"
        before, mark, rest = page.partition(begin)
        _, end, after = rest.partition(f"<!-- {name} ends -->")
        assert mark and end, f"{PAGE.name} lacks the marks around the diagram of the {name}"
        page = before + mark + diagram(moves) + end + after
    return page


def main(arguments: list[str]) -> int:
    """Draw or check; 1 when the page is not current."""
    page = PAGE.read_text(encoding="utf-8")
    current = drawn(page)
    if page == current:
        return 0
    if "--check" in arguments:
        print(f"{PAGE.name} is not current: run scripts/lifecycle_pages.py")
        return 1
    PAGE.write_text(current, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
