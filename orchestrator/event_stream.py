"""Events to server-sent frames, and what a client that goes away means. Above: routes/.

Below: executions.py and wire.py. A stream is only begun once the execution is: what fails before
that is an ordinary error with its status. What fails later is an `error` event, and the body still
ends with its closing chunk.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, Final

import structlog
from anyio import CancelScope
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from orchestrator.errors import OutcomeUnknown, ServiceError
from orchestrator.executions import EventType, ExecutionEvent
from orchestrator.request_body import ClientGone
from orchestrator.wire import error_object, to_json

PING_SECONDS: Final = 15.0
"""Silence after which a comment line is sent: a quarter of the 60 s at which proxies cut."""

_PING: Final = b": ping\n\n"

_HEADERS: Final = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-store",
    # nginx holds a stream back until its buffer is full unless it is told not to.
    "x-accel-buffering": "no",
}

OpenEvents = Callable[[], AbstractAsyncContextManager[AsyncIterator[ExecutionEvent]]]


def frame(name: str, data: dict[str, Any]) -> bytes:
    """One server-sent event.

    Readers in the field split text at every line end that Unicode knows; those that JSON leaves
    alone are written as escapes.
    """
    body = to_json(data)
    if b"\xe2\x80" in body or b"\xc2\x85" in body:
        body = (
            body.replace(b"\xe2\x80\xa8", b"\\u2028")
            .replace(b"\xe2\x80\xa9", b"\\u2029")
            .replace(b"\xc2\x85", b"\\u0085")
        )
    return b"event: %b\ndata: %b\n\n" % (name.encode(), body)


@asynccontextmanager
async def while_connected(receive: Receive) -> AsyncIterator[None]:
    """Cancel the block when the client closes its connection. The body must have been read.

    Raises:
        ClientGone: it did, and the block was cut short.
    """
    scope = CancelScope()
    # A bare task, since a task group would wrap every error of the block into an exception group.
    watch = asyncio.create_task(_cancel_on_disconnect(receive, scope))
    try:
        with scope:
            yield
    finally:
        watch.cancel()
        with CancelScope(shield=True):
            await asyncio.wait([watch])
    if scope.cancelled_caught:
        raise ClientGone


async def _cancel_on_disconnect(receive: Receive, scope: CancelScope) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    scope.cancel()


@asynccontextmanager
async def outcome_known(seen: list[ExecutionEvent]) -> AsyncIterator[None]:
    """Turn any failure of the block into `OutcomeUnknown` once the execution exists.

    `seen` holds its first event from then on: code may have run, so no answer may invite another
    try. The error carries the id by which the outcome can still be asked for.
    """
    try:
        yield
    except ServiceError as error:
        if not seen:
            raise
        raise _unknown(seen[0], error) from error
    except ClientGone:
        raise
    except Exception as error:
        structlog.get_logger("executions").exception("execution broke off")
        raise _unknown(seen[0] if seen else None, error) from error


class UnknownExecution(OutcomeUnknown):
    """`OutcomeUnknown` that names the execution in a header."""

    def __init__(self, execution_id: str | None) -> None:
        super().__init__(
            "The connection to the running code broke: it may or may not have run. "
            "Do not send it again blindly; ask for the execution instead."
        )
        self.execution_id = execution_id
        if execution_id is not None:
            self.headers["x-execution-id"] = execution_id


def _unknown(first: ExecutionEvent | None, error: Exception) -> UnknownExecution:
    if isinstance(error, UnknownExecution):
        return error
    execution = first.data.get("execution") if first else None
    return UnknownExecution(execution["id"] if execution else None)


class EventStreamReply(Response):
    """Answers with the events of one execution as they happen."""

    def __init__(self, open_events: OpenEvents, *, runs: bool) -> None:
        """Prepare the reply.

        Args:
            open_events: Entered before the status is sent.
            runs: Entering runs code, so that a later failure leaves the outcome unknown.
        """
        super().__init__()
        self._open_events = open_events
        self._runs = runs

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the stream."""
        async with while_connected(receive):
            await _Stream(send, runs=self._runs).carry(self._open_events)


class _Stream:
    """One stream being sent."""

    def __init__(self, send: Send, *, runs: bool) -> None:
        self._send = send
        self._runs = runs
        self._begun = False
        self._last_sent = 0.0
        self._first: list[ExecutionEvent] = []

    async def carry(self, open_events: OpenEvents) -> None:
        try:
            async with self._translated(), open_events() as events:
                await self._begin()
                ping = asyncio.create_task(self._ping())
                try:
                    async for event in events:
                        if not self._first:
                            self._first.append(event)
                        await self._chunk(frame(event.type.value, event.to_wire()))
                finally:
                    ping.cancel()
                    with CancelScope(shield=True):
                        await asyncio.wait([ping])
        except ServiceError as error:
            if not self._begun:
                raise
            await self._chunk(frame("error", self._error_event(error)))
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    def _translated(self) -> AbstractAsyncContextManager[None]:
        return outcome_known(self._first) if self._runs else _reading()

    def _error_event(self, error: ServiceError) -> dict[str, Any]:
        event: dict[str, Any] = {"type": "error", **error_object(error)}
        if isinstance(error, UnknownExecution):
            event["execution_id"] = error.execution_id
        return event

    async def _begin(self) -> None:
        self._begun = True
        headers = [(name.encode(), value.encode()) for name, value in _HEADERS.items()]
        await self._send({"type": "http.response.start", "status": 200, "headers": headers})
        self._last_sent = asyncio.get_running_loop().time()

    async def _chunk(self, body: bytes) -> None:
        self._last_sent = asyncio.get_running_loop().time()
        await self._send({"type": "http.response.body", "body": body, "more_body": True})

    async def _ping(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(max(0.0, self._last_sent + PING_SECONDS - loop.time()))
            if loop.time() >= self._last_sent + PING_SECONDS:
                await self._chunk(_PING)


@asynccontextmanager
async def _reading() -> AsyncIterator[None]:
    """A stream of a stored log: its failures say nothing about whether code ran."""
    try:
        yield
    except (ServiceError, ClientGone):
        raise
    except Exception as error:
        structlog.get_logger("executions").exception("reading the event log failed")
        raise ServiceError("The event stream broke off.") from error


async def last_execution(events: AsyncIterator[ExecutionEvent], first: list[ExecutionEvent]) -> Any:
    """The wire object of the event that ends the stream, after reading it to its end."""
    final = None
    async for event in events:
        if not first:
            first.append(event)
        if event.type is EventType.COMPLETED:
            final = event.data["execution"]
    if final is None:
        raise OutcomeUnknown("The execution's events ended before its outcome.")
    return final
