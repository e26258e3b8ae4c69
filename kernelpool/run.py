"""Run: one execution under way in a kernel. Above: kernel.py. Below: execution.py, outcome.py.

Holds what the execution's messages brought and nobody has taken yet, and what is known of its end.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from typing import Final

from kernelpool import outcome
from kernelpool.events import (
    DisplayData,
    Done,
    Event,
    ExecuteResult,
    Failure,
    KernelEnd,
    Notice,
    Stream,
    UpdateDisplay,
    Usage,
)
from kernelpool.execution import Channel, Execution, Message
from kernelpool.outcome import Ending
from kernelpool.profile import Limits
from kernelpool.runtime import Exit, Sample

MERGED_CHARACTERS: Final = 8_000
"""Text of one stream that waits is joined up to about this length: fewer events, same text."""


class Run:
    """One execution under way.

    Args:
        message_id: Of its request.
        before: Resource use when it began.
    """

    def __init__(self, message_id: str, before: Sample) -> None:
        self.message_id = message_id
        self.execution = Execution()
        self.wake = asyncio.Event()
        self.ending: Ending | None = None
        self.failure: Failure | None = None
        self.started_at = time.monotonic()
        self.last_message_at = self.started_at
        self.before = before
        self.heard = False
        """Whether a message of it has come from the kernel."""
        self.held: list[tuple[Channel, Message]] | None = None
        """Messages that wait while the journal is read; None otherwise."""
        self.out_of_memory = False
        self.exit: Exit | None = None
        self.backlog = 0
        self._events: deque[Event] = deque()

    def push(self, events: list[Event]) -> None:
        """Add what a message brought, and wake whoever follows."""
        for event in events:
            self.backlog += _weight(event)
            self._events.append(self._merged(event))
        self.wake.set()

    def _merged(self, event: Event) -> Event:
        """The event, joined to the one before it when both are short text of one stream."""
        last = self._events[-1] if self._events else None
        if (
            isinstance(event, Stream)
            and isinstance(last, Stream)
            and event.name == last.name
            and len(last.text) < MERGED_CHARACTERS
        ):
            self._events.pop()
            return Stream(event.name, last.text + event.text)
        return event

    def notices(self, limits: Limits, after: Sample) -> list[Notice]:
        """What the limits did to the code while its kernel lived on."""
        if self.exit is not None:
            return []
        told = [outcome.memory_notice(limits.memory_bytes)] if self.out_of_memory else []
        if (after.process_limit_hits or 0) > (self.before.process_limit_hits or 0):
            told.append(outcome.process_notice(limits.processes))
        return told

    def done(self, limits: Limits, after: Sample) -> Done:
        """The last event.

        Args:
            limits: Of the kernel.
            after: Resource use now, where the process still lives.
        """
        usage = self._usage(after)
        count = self.execution.execution_count
        if self.exit is None and self.ending is None:
            return Done(self.execution.reply or "ok", usage, count)
        if self.ending is not None:
            seconds, killed = round(usage.wall_seconds, 3), self.exit is not None
            failure = self.failure or outcome.ending_failure(
                self.ending, seconds=seconds, killed=killed
            )
            timed_out = self.ending == "timed_out"
            end = KernelEnd.TIME_LIMIT if timed_out else KernelEnd.RESTARTED
            return Done(self.ending, usage, count, failure, end if killed else None)
        assert self.exit is not None
        failure = self.failure or outcome.death(self.exit)
        if self.exit.out_of_memory:
            failure = outcome.memory_failure(limits.memory_bytes, usage.memory_peak_bytes)
        return Done("failed", usage, count, failure, outcome.kernel_end(self.exit))

    def _usage(self, after: Sample) -> Usage:
        cpu_seconds = None
        if after.cpu_seconds is not None and self.before.cpu_seconds is not None:
            cpu_seconds = round(after.cpu_seconds - self.before.cpu_seconds, 6)
        wall_seconds = round(time.monotonic() - self.started_at, 6)
        return Usage(wall_seconds, cpu_seconds, after.memory_peak_bytes)

    def take(self) -> Event | None:
        """The next event, None when none waits."""
        if not self._events:
            return None
        event = self._events.popleft()
        self.backlog -= _weight(event)
        return event


def _weight(event: Event) -> int:
    if isinstance(event, Stream):
        return len(event.text)
    if isinstance(event, DisplayData | UpdateDisplay | ExecuteResult):
        return sum(len(value) for value in event.data.values() if isinstance(value, str))
    return 0
