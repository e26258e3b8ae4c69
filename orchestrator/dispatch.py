"""Dispatcher: the one door to kernels. Above: routes/, reaper.py, run_file.py. Below: owner.py.

The Owner is one; testing.py has another, without kernels. What only reads records goes to the store
instead.

Every call takes a session the caller may touch: `auth.py` has checked that before. Every call may
raise `SessionNotFound`, `SessionExpired` and `Unavailable` (orchestrator/errors.py); after any of
these no code has run.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Protocol

from orchestrator.executions import Execution, ExecutionEvent, ExecutionOrder
from orchestrator.sessions import EndReason, Session, SessionFile, SessionOrder


@dataclass(frozen=True, slots=True)
class FileContent:
    """The bytes of a file, to be read once, in order."""

    file: SessionFile
    size: int
    """Bytes that `chunks` will yield in all."""
    chunks: AsyncIterator[bytes]


class Dispatcher(Protocol):
    """Runs code and moves files in sessions, wherever they live."""

    async def open(self, order: SessionOrder) -> Session:
        """Make a session and give it a slot.

        Raises:
            NoSlot: every slot is taken (429).
            TierTooLarge: the memory tier is above what the host has (400).
        """
        ...

    async def close(self, session_id: str, *, reason: EndReason) -> None:
        """End a session: running code is stopped, its files are archived or dropped."""
        ...

    async def recreate(self, session_id: str) -> Session:
        """A session in place of an ended one, with its files; the same for each call while it runs.

        Its first execution has `state_reset`. A session that still runs is returned as it is.

        Raises:
            NoSlot, TierTooLarge: as for `open`.
        """
        ...

    def execute(
        self, session_id: str, order: ExecutionOrder
    ) -> AbstractAsyncContextManager[AsyncIterator[ExecutionEvent]]:
        """Run code once and yield its events; the last is `execution.completed`.

        Leaving the block before the last event interrupts the run, unless the order is a
        background one or the idempotency key had been used by an earlier call, whose events are
        then yielded from the first.

        Raises (on entering, before anything ran):
            QueueFull: too many executions wait in this session (429).
            KeyReused: the idempotency key belongs to another request (400).
        """
        ...

    async def cancel(self, session_id: str, execution_id: str) -> Execution:
        """Interrupt a running execution or drop a queued one; a finished one is returned as is."""
        ...

    async def answer_input(self, session_id: str, execution_id: str, text: str) -> Execution:
        """Hand a line to an execution that waits for input.

        Raises:
            NotWaiting: it does not wait for input (400).
        """
        ...

    async def restart(self, session_id: str) -> Session:
        """A new kernel on the same files; running and queued executions end `cancelled`."""
        ...

    async def put_file(
        self, session_id: str, name: str, chunks: AsyncIterator[bytes]
    ) -> SessionFile:
        """Write an upload to the workspace; the same path keeps its id.

        Raises:
            BadRequest: the name has no usable part (param `file`).
            WorkspaceFull: the disk quota is used up; what was there is unchanged.
        """
        ...

    def read_file(self, session_id: str, file_id: str) -> AbstractAsyncContextManager[FileContent]:
        """Open a file's bytes.

        Raises:
            FileNotFound: unknown id, or the file is gone.
        """
        ...

    async def delete_file(self, session_id: str, file_id: str) -> None:
        """Remove a file from the workspace and the list."""
        ...
