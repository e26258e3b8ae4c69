"""How an execution ended, in words and numbers. Above: kernel.py, run.py. Below: events.py.

Pure: what is told to people and programs about ends that are not the code's own.
"""

from __future__ import annotations

from signal import Signals
from typing import Final, Literal

from kernelpool.events import Failure, FailureCode, KernelEnd, Notice
from kernelpool.execution import Execution
from kernelpool.runtime import Exit

Ending = Literal["timed_out", "cancelled", "failed"]
"""How an execution is made to end from outside."""


def missing_notice(execution: Execution, patience: float) -> Notice:
    """One of idle and reply never came, `patience` seconds after the other."""
    missing = "reply" if execution.idle else "idle status"
    return Notice(
        "message_missing",
        f"The kernel's {missing} never came; the execution was ended {patience:g} s after "
        "its last message.",
    )


def memory_notice(limit_bytes: int) -> Notice:
    """The memory limit ended a process of the code, and the kernel lives."""
    return Notice(
        FailureCode.OUT_OF_MEMORY.value,
        f"A process of the code was ended: all {limit_bytes:,} bytes of memory were used. "
        "The kernel lives on.",
        {"limit_bytes": limit_bytes},
    )


def process_notice(limit: int) -> Notice:
    """The code wanted more processes or threads than it may have."""
    return Notice(
        FailureCode.PROCESS_LIMIT.value,
        f"The code tried to start more than {limit:,} processes and threads, which is the limit.",
        {"limit": limit},
    )


def ending_failure(ending: Ending, *, seconds: float, killed: bool) -> Failure:
    """The execution was stopped from outside after that time, maybe with its kernel."""
    kept = "Variables are gone, files are kept." if killed else "Variables are kept."
    numbers = {"wall_seconds": seconds}
    if ending == "timed_out":
        message = f"The code was stopped after {seconds:g} s, at its time limit. {kept}"
        return Failure(FailureCode.TIMEOUT, message, numbers)
    message = f"The execution was cancelled after {seconds:g} s. {kept}"
    return Failure(FailureCode.CANCELLED, message, numbers)


def memory_failure(limit_bytes: int, peak_bytes: int | None) -> Failure:
    """The memory limit ended the kernel."""
    return Failure(
        FailureCode.OUT_OF_MEMORY,
        f"The kernel used all of its {limit_bytes:,} bytes of memory and was ended. "
        "Variables are gone, files are kept.",
        {"limit_bytes": limit_bytes, "peak_bytes": max(peak_bytes or 0, limit_bytes)},
    )


def death(ended: Exit) -> Failure:
    """The kernel ended by itself while code ran."""
    kept = "Variables are gone, files are kept."
    if ended.signal is not None:
        try:
            name = Signals(ended.signal).name
        except ValueError:
            name = f"signal {ended.signal}"
        return Failure(
            FailureCode.KERNEL_DIED,
            f"The kernel was ended by {name} ({ended.signal}). {kept}",
            {"signal": ended.signal, "signal_name": name},
        )
    if ended.exit_code is None:
        return Failure(FailureCode.KERNEL_DIED, f"The kernel's process is gone. {kept}")
    return Failure(
        FailureCode.KERNEL_DIED,
        f"The kernel exited with code {ended.exit_code} while the code was running. {kept}",
        {"exit_code": ended.exit_code},
    )


def cut_off(reason: str) -> Failure:
    """The kernel was ended because its connection had."""
    return Failure(
        FailureCode.KERNEL_DIED,
        f"The kernel was ended, because {reason}. Variables are gone, files are kept.",
    )


NEVER_SENT: Final = Failure(
    FailureCode.WORKER_LOST,
    "The worker ended before it had handed the code to the kernel; the code did not run.",
)

JOURNAL_CUT: Final = Notice(
    "output_missing",
    "Some output that came while no worker was there is missing: the journal is bounded.",
)


def kernel_end(ended: Exit) -> KernelEnd:
    """Why a kernel process that was not told to end has ended."""
    return KernelEnd.OUT_OF_MEMORY if ended.out_of_memory else KernelEnd.KERNEL_DIED
