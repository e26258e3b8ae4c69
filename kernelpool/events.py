"""Frozen values that an execution yields. Above: kernel.py and its readers. Below: nothing.

Every execution yields at most one `Started`, any number of outputs, and exactly one `Done`, last.
MIME bundles are Jupyter's: text as str, binary types as base64 str, JSON types as values.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal

MimeBundle = Mapping[str, Any]


class FailureCode(StrEnum):
    """Why an execution of ours, not of the user's code, went wrong."""

    OUT_OF_MEMORY = "out_of_memory"
    KERNEL_DIED = "kernel_died"
    TIMEOUT = "timeout"
    CANCELLED = "cancelled"
    QUOTA_EXCEEDED = "quota_exceeded"
    PROCESS_LIMIT = "process_limit"
    ARTIFACT_STORE = "artifact_store"
    WORKER_LOST = "worker_lost"
    OUTCOME_UNKNOWN = "outcome_unknown"
    KERNEL_START = "kernel_start"
    INTERNAL = "internal_error"


class KernelEnd(StrEnum):
    """Why a kernel process ended while its session goes on."""

    RESTARTED = "restarted"
    RESET = "reset"
    OUT_OF_MEMORY = "out_of_memory"
    KERNEL_DIED = "kernel_died"
    TIME_LIMIT = "time_limit"


@dataclass(frozen=True, slots=True)
class Failure:
    """What went wrong, with the numbers that explain it."""

    code: FailureCode
    message: str
    details: Mapping[str, int | float | str] = field(default_factory=dict)
    """Numbers such as `limit_bytes`, `peak_bytes`, `exit_code`, `signal`, `timeout_seconds`."""


@dataclass(frozen=True, slots=True)
class Usage:
    """What an execution used. None where the host cannot tell."""

    wall_seconds: float
    cpu_seconds: float | None = None
    memory_peak_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class Started:
    """The kernel took the code up; the number is IPython's `In [n]`."""

    execution_count: int | None


@dataclass(frozen=True, slots=True)
class Stream:
    """Text on stdout or stderr, as it was written: escape codes and carriage returns included."""

    name: Literal["stdout", "stderr"]
    text: str


@dataclass(frozen=True, slots=True)
class DisplayData:
    """Something shown by a display call."""

    data: MimeBundle
    metadata: Mapping[str, Any]
    display_id: str | None = None


@dataclass(frozen=True, slots=True)
class UpdateDisplay:
    """New content for whatever was shown under that display id, in this cell or an earlier one."""

    data: MimeBundle
    metadata: Mapping[str, Any]
    display_id: str


@dataclass(frozen=True, slots=True)
class ExecuteResult:
    """The value of the last expression."""

    data: MimeBundle
    metadata: Mapping[str, Any]
    execution_count: int | None
    display_id: str | None = None


@dataclass(frozen=True, slots=True)
class ErrorOutput:
    """The user's code raised."""

    ename: str
    evalue: str
    traceback: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ClearOutput:
    """The code asked to clear what it showed; with `wait`, only when the next output comes."""

    wait: bool


@dataclass(frozen=True, slots=True)
class InputRequest:
    """The code waits for a line of input."""

    prompt: str
    password: bool


@dataclass(frozen=True, slots=True)
class Notice:
    """Something the reader should know that did not end the execution."""

    code: str
    message: str
    details: Mapping[str, int | float | str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Done:
    """The execution's end. `failure` is None when the kernel answered, even with an error.

    `kernel_end` is set when the kernel process is gone: the next execution starts with a clean
    namespace.
    """

    status: Literal["ok", "error", "aborted", "timed_out", "cancelled", "failed"]
    usage: Usage
    execution_count: int | None = None
    failure: Failure | None = None
    kernel_end: KernelEnd | None = None


Output = Stream | DisplayData | UpdateDisplay | ExecuteResult | ErrorOutput | ClearOutput
Event = Started | Output | InputRequest | Notice | Done
