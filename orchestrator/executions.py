"""Execution: one run of one piece of code, as records and events.

Above: store, owner, routes. Below: nothing.

The wire shape is `Execution.to_wire()`; the same dictionary is stored, streamed in
`execution.completed` and answered by polling, so that these cannot differ.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final, Literal


class ExecutionStatus(StrEnum):
    """States of an execution. The last four are terminal and never change."""

    QUEUED = "queued"
    IN_PROGRESS = "in_progress"
    INPUT_REQUIRED = "input_required"
    COMPLETED = "completed"
    TIMED_OUT = "timed_out"
    CANCELLED = "cancelled"
    FAILED = "failed"


TERMINAL: Final = frozenset(
    {
        ExecutionStatus.COMPLETED,
        ExecutionStatus.TIMED_OUT,
        ExecutionStatus.CANCELLED,
        ExecutionStatus.FAILED,
    }
)


@dataclass(frozen=True, slots=True)
class ExecutionOrder:
    """What a caller asks to run; checked before it gets here."""

    code: str
    timeout: float
    """Seconds the code may take, from the moment it starts."""
    stdin: Literal["error", "ask"] = "error"
    reset: bool = False
    background: bool = False
    idempotency_key: str | None = None
    """1 to 255 characters, unique per tenant and session."""
    request_digest: str = ""
    """SHA-256 of the request body's meaning; tells a repeated request from another with its key."""


@dataclass(frozen=True, slots=True)
class Execution:
    """One execution as it is known now. Instants are Unix seconds."""

    id: str
    """`exec_` and 32 or more unguessable URL-safe characters."""
    session_id: str
    code: str
    status: ExecutionStatus
    created_at: float
    started_at: float | None = None
    completed_at: float | None = None
    execution_count: int | None = None
    stdout: str = ""
    stderr: str = ""
    result: str | None = None
    error: Mapping[str, Any] | None = None
    """The user's exception: `name`, `value`, `traceback` (str, no escape codes)."""
    failure: Mapping[str, Any] | None = None
    """Ours: `code`, `message` and the numbers that explain it."""
    outputs: tuple[Mapping[str, Any], ...] = ()
    files: tuple[Mapping[str, Any], ...] = ()
    """Container file objects plus `change`: `created`, `modified` or `deleted`."""
    state_reset: bool = False
    """The kernel is new since the session's last execution: earlier variables are gone."""
    truncated: bool = False
    usage: Mapping[str, Any] = field(default_factory=dict)

    @property
    def finished(self) -> bool:
        """Whether the status is terminal."""
        return self.status in TERMINAL

    def to_wire(self) -> dict[str, Any]:
        """The execution object, ready for JSON."""
        return {
            "id": self.id,
            "object": "container.execution",
            "container_id": self.session_id,
            "code": self.code,
            "status": self.status.value,
            "created_at": self.created_at,
            "started_at": self.started_at,
            "completed_at": self.completed_at,
            "execution_count": self.execution_count,
            "stdout": self.stdout,
            "stderr": self.stderr,
            "result": self.result,
            "error": self.error,
            "failure": self.failure,
            "outputs": list(self.outputs),
            "files": list(self.files),
            "state_reset": self.state_reset,
            "truncated": self.truncated,
            "usage": dict(self.usage),
        }

    @classmethod
    def from_wire(cls, wire: Mapping[str, Any]) -> Execution:
        """The execution that `to_wire` made this of."""
        return cls(
            id=wire["id"],
            session_id=wire["container_id"],
            code=wire["code"],
            status=ExecutionStatus(wire["status"]),
            created_at=wire["created_at"],
            started_at=wire["started_at"],
            completed_at=wire["completed_at"],
            execution_count=wire["execution_count"],
            stdout=wire["stdout"],
            stderr=wire["stderr"],
            result=wire["result"],
            error=wire["error"],
            failure=wire["failure"],
            outputs=tuple(wire["outputs"]),
            files=tuple(wire["files"]),
            state_reset=wire["state_reset"],
            truncated=wire["truncated"],
            usage=wire["usage"],
        )


class EventType(StrEnum):
    """Types of the events of an execution's stream."""

    CREATED = "execution.created"
    STARTED = "execution.started"
    OUTPUT = "execution.output"
    OUTPUT_UPDATED = "execution.output.updated"
    INPUT_REQUIRED = "execution.input_required"
    COMPLETED = "execution.completed"


@dataclass(frozen=True, slots=True)
class ExecutionEvent:
    """One event of an execution's stream.

    `data` holds the JSON fields beside `type` and `sequence_number`: `execution` (the wire object)
    for created and completed; `started_at`, `execution_count` for started; `output_index` and
    `output` for output and its updates (`output` null: cleared); `prompt`, `password` for
    input_required.
    """

    sequence_number: int
    """From 0, without gaps."""
    type: EventType
    data: Mapping[str, Any]

    def to_wire(self) -> dict[str, Any]:
        """The event as one flat JSON object."""
        return {
            "type": self.type.value,
            "sequence_number": self.sequence_number,
            **self.data,
        }
