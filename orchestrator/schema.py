"""Shapes of what comes in and goes out over HTTP. Above: routes/, openapi.py. Below: the values.

Requests are checked against the classes here. Replies are made by the functions here from the
frozen values; their classes describe them in the OpenAPI document, and tests hold the two together.
A hosted API's "container" is our session: this is where the one turns into the other.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, field_validator

from kernelpool.profile import MEMORY_TIERS
from kernelpool.runtime import WORKSPACE
from orchestrator.sessions import Session, SessionFile

CODE_BYTES: Final = 10 * 1024 * 1024
"""Longest code of one execution, as UTF-8."""

IDLE_MINUTES_MAX: Final = 10080
"""A week."""


def _whole_number(value: Any) -> Any:
    return int(value) if isinstance(value, float) and value.is_integer() else value


WholeNumber = Annotated[int, BeforeValidator(_whole_number)]
"""An integer as JSON means it: 20.0 is one, "20" and true are none."""


class RequestShape(BaseModel):
    """A JSON body. Unknown fields are ignored, known ones are not converted from other types."""

    model_config = ConfigDict(strict=True, extra="ignore")


class ExpiresAfter(RequestShape):
    """When an unused container ends."""

    anchor: Literal["last_active_at"]
    minutes: Annotated[WholeNumber, Field(ge=1, le=IDLE_MINUTES_MAX)]


class NetworkPolicy(RequestShape):
    """Kernels reach no network, whoever asks."""

    type: Literal["disabled"]


class CreateContainer(RequestShape):
    """Body of POST /containers."""

    name: Annotated[str, Field(min_length=1, max_length=512)]
    expires_after: ExpiresAfter | None = None
    memory_limit: Literal["1g", "4g", "16g", "64g"] | None = None
    network_policy: NetworkPolicy | None = None
    file_ids: list[str] | None = None
    """Files to copy in."""
    skills: Annotated[list[dict[str, Any]], Field(max_length=0)] | None = None
    """Not offered: only an empty list is accepted."""


class CreateContainerFile(RequestShape):
    """JSON body of POST /containers/{container_id}/files."""

    file_id: str


class CreateExecution(RequestShape):
    """Body of POST /containers/{container_id}/executions."""

    code: str
    timeout_seconds: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    """Seconds the code may take from the moment it starts; the server has a cap."""
    stream: bool | None = None
    """Answer with server-sent events."""
    background: bool | None = None
    """Answer at once; the run goes on when the client goes away."""
    stdin: Literal["error", "ask"] | None = None
    """What `input()` does: raise (the default), or ask the caller."""
    reset: bool | None = None
    """Start from a clean namespace."""
    on_expired: Literal["error", "recreate"] | None = None
    """When the container has ended: refuse (the default), or run in a new one with its files."""

    @field_validator("code")
    @classmethod
    def _bounded(cls, code: str) -> str:
        if len(code) > CODE_BYTES or len(code.encode()) > CODE_BYTES:
            raise ValueError(f"The code is longer than the limit of {CODE_BYTES} bytes.")
        return code


class AnswerInput(RequestShape):
    """Body of POST .../executions/{execution_id}/input."""

    text: Annotated[str, Field(max_length=1024 * 1024)]


assert set(MEMORY_TIERS) == {"1g", "4g", "16g", "64g"}, "CreateContainer.memory_limit lists them"


class ErrorDetail(BaseModel):
    """What went wrong, in words and for programs."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    """Body of every error."""

    error: ErrorDetail


class ExpiresAfterObject(BaseModel):
    """When an unused container ends."""

    anchor: Literal["last_active_at"]
    minutes: int


class NetworkPolicyObject(BaseModel):
    """Always disabled."""

    type: Literal["disabled"]


class ContainerObject(BaseModel):
    """A container."""

    id: str
    object: Literal["container"]
    created_at: int
    name: str
    status: Literal["running", "expired"]
    expires_after: ExpiresAfterObject
    last_active_at: int
    memory_limit: Literal["1g", "4g", "16g", "64g"]
    network_policy: NetworkPolicyObject
    expires_at: int | None
    """Unix seconds of the end that nothing moves; null when there is none."""
    idle_expires_at: int
    """Unix seconds when it ends unless it is used before."""
    ended_at: int | None
    end_reason: Literal["idle", "max_lifetime", "deleted", "worker_lost", "drained"] | None


class ContainerFileObject(BaseModel):
    """A file of a container."""

    id: str
    object: Literal["container.file"]
    bytes: int
    container_id: str
    created_at: int
    path: str
    source: Literal["user", "assistant"]


class FileChangeObject(ContainerFileObject):
    """A file that an execution changed."""

    change: Literal["created", "modified", "deleted"]


class RaisedError(BaseModel):
    """The exception that the user's code raised."""

    name: str
    value: str
    traceback: str


class FailureObject(BaseModel):
    """What kept the code from running to its end; more fields explain it in numbers."""

    model_config = ConfigDict(extra="allow")

    code: str
    message: str


class OutputObject(BaseModel):
    """One output, in the order of appearance; the other fields depend on the type."""

    model_config = ConfigDict(extra="allow")

    type: Literal["stream", "display", "result", "error"]


class UsageObject(BaseModel):
    """What the run used, where the host can tell."""

    model_config = ConfigDict(extra="allow")

    wall_seconds: float | None = None
    cpu_seconds: float | None = None
    memory_peak_bytes: int | None = None


class ExecutionObject(BaseModel):
    """One run of one piece of code."""

    id: str
    object: Literal["container.execution"]
    container_id: str
    code: str
    status: Literal[
        "queued",
        "in_progress",
        "input_required",
        "completed",
        "timed_out",
        "cancelled",
        "failed",
    ]
    created_at: float
    started_at: float | None
    completed_at: float | None
    execution_count: int | None
    stdout: str
    stderr: str
    result: str | None
    error: RaisedError | None
    failure: FailureObject | None
    outputs: list[OutputObject]
    files: list[FileChangeObject]
    state_reset: bool
    truncated: bool
    usage: UsageObject


class ExecutionEventObject(BaseModel):
    """The JSON of one event of a stream; which of the optional fields are there goes by the type.

    A stream ends with `execution.completed`, or with `error`, whose `error` is that of `ErrorBody`.
    """

    model_config = ConfigDict(extra="allow")

    type: Literal[
        "execution.created",
        "execution.started",
        "execution.output",
        "execution.output.updated",
        "execution.input_required",
        "execution.completed",
        "error",
    ]
    sequence_number: int | None = None
    """From 0, without gaps; absent in `error`."""
    execution: ExecutionObject | None = None
    started_at: float | None = None
    execution_count: int | None = None
    output_index: int | None = None
    output: OutputObject | None = None
    prompt: str | None = None
    password: bool | None = None
    error: ErrorDetail | None = None


class DeletedContainer(BaseModel):
    """A container that is gone."""

    id: str
    object: Literal["container.deleted"]
    deleted: Literal[True]


class DeletedContainerFile(BaseModel):
    """A file that is gone."""

    id: str
    object: Literal["container.file.deleted"]
    deleted: Literal[True]


class ListObject(BaseModel):
    """One page; the id of its last item is the cursor of the next."""

    object: Literal["list"]
    first_id: str | None
    last_id: str | None
    has_more: bool


class ContainerList(ListObject):
    """A page of containers."""

    data: list[ContainerObject]


class ContainerFileList(ListObject):
    """A page of container files."""

    data: list[ContainerFileObject]


class ExecutionList(ListObject):
    """A page of executions."""

    data: list[ExecutionObject]


def container_object(session: Session) -> dict[str, Any]:
    """The container object of a session."""
    return {
        "id": session.id,
        "object": "container",
        "created_at": int(session.created_at),
        "name": session.name,
        "status": session.status.value,
        "expires_after": {"anchor": "last_active_at", "minutes": session.idle_minutes},
        "last_active_at": int(session.last_active_at),
        "memory_limit": session.memory_limit,
        "network_policy": {"type": "disabled"},
        "expires_at": _whole(session.expires_at),
        "idle_expires_at": int(session.idle_expires_at),
        "ended_at": _whole(session.ended_at),
        "end_reason": session.end_reason.value if session.end_reason else None,
    }


def file_object(file: SessionFile) -> dict[str, Any]:
    """The container file object of a session's file."""
    return {
        "id": file.id,
        "object": "container.file",
        "bytes": file.bytes,
        "container_id": file.session_id,
        "created_at": int(file.created_at),
        "path": f"{WORKSPACE}/{file.path}",
        "source": file.source,
    }


def deleted_object(object_id: str, kind: str) -> dict[str, Any]:
    """The answer to a successful DELETE."""
    return {"id": object_id, "object": f"{kind}.deleted", "deleted": True}


def list_object(items: Iterable[dict[str, Any]], *, has_more: bool) -> dict[str, Any]:
    """The list envelope around one page."""
    data: Sequence[dict[str, Any]] = list(items)
    return {
        "object": "list",
        "data": data,
        "first_id": data[0]["id"] if data else None,
        "last_id": data[-1]["id"] if data else None,
        "has_more": has_more,
    }


def _whole(instant: float | None) -> int | None:
    return None if instant is None else int(instant)
