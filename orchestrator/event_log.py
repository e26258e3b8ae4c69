"""EventLog: the events of executions, readable from any process while and after they come.

Above: live_session (appends), routes (follow). Below: redis_link.

One Redis stream per execution. Event n has the stream id (n + 1)-0, so an append that is sent twice
is stored once. The store makes the stream together with the execution's record and ends its life
with the session's; an append never makes one, so nothing comes back after a session is forgotten.
"""

from __future__ import annotations

import asyncio
import json
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import anyio
import structlog

from orchestrator.errors import ExecutionNotFound, StoreUnavailable
from orchestrator.executions import EventType, Execution, ExecutionEvent, ExecutionStatus
from orchestrator.redis_keys import LOG
from orchestrator.redis_link import REPLY_TIMEOUT, RedisLink, open_connection, unavailable

ENTRY_LIMIT: Final = 16_000
"""Bytes of JSON per entry; a larger `execution` is referred to instead of repeated."""

QUEUE_LIMIT_BYTES: Final = 32 * 1024 * 1024
"""Bytes that wait for Redis at most, over all executions; then outputs are left out of the log."""

BATCH_BYTES: Final = 256 * 1024
"""Bytes per pipeline, so that other callers' commands get in between."""

LINGER: Final = 0.02
"""Seconds that an append waits for company: a short cell's events then go in one pipeline."""

RETRY_PAUSE: Final = 0.25
"""Seconds between attempts while Redis is away."""

BLOCK: Final = 1.0
"""Seconds that a follower waits in Redis before it looks whether the execution ended elsewhere."""

READ_COUNT: Final = 200
"""Entries per read of a follower: at most about 3 MB."""

ReadRecord = Callable[[str, str], Awaitable[Execution]]
"""`Store.get_execution`: session id and execution id to record."""

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class _Entry:
    number: int
    """Place in the queue's whole history, from 1."""
    execution_id: str
    sequence_number: int
    body: bytes


class EventLog:
    """Appends in the background, in order, in bounded memory; follows from any process."""

    def __init__(self, link: RedisLink, url: str, read_record: ReadRecord) -> None:
        self._link = link
        self._url = url
        self._read_record = read_record
        self._queue: deque[_Entry] = deque()
        self._queued_bytes = 0
        self._appended = 0
        self._sent = 0
        self._last: dict[str, int] = {}
        self._incomplete: set[str] = set()
        self._wake = asyncio.Event()
        self._hurry = asyncio.Event()
        self._progress: asyncio.Future[None] | None = None

    def __repr__(self) -> str:
        return f"<EventLog: {len(self._queue)} entries, {self._queued_bytes} bytes queued>"

    def append(self, execution_id: str, events: Sequence[ExecutionEvent]) -> None:
        """Queue events of a reserved execution; returns at once.

        While Redis is away they wait. When too much waits, outputs are left out; the final event
        carries the whole record all the same.
        """
        for event in events:
            self._append(execution_id, event)
        self._wake.set()

    def _append(self, execution_id: str, event: ExecutionEvent) -> None:
        body = _encode(event)
        full = self._queued_bytes + len(body) > QUEUE_LIMIT_BYTES
        if full and event.type in {EventType.OUTPUT, EventType.OUTPUT_UPDATED}:
            if execution_id not in self._incomplete:
                log.warning("redis is behind: outputs left out of log", execution_id=execution_id)
                self._incomplete.add(execution_id)
            return
        if event.type is EventType.COMPLETED:
            self._incomplete.discard(execution_id)
        self._appended += 1
        self._last[execution_id] = self._appended
        self._queued_bytes += len(body)
        self._queue.append(_Entry(self._appended, execution_id, event.sequence_number, body))

    async def flush(self, execution_id: str) -> None:
        """Return when everything appended so far for this execution is in Redis.

        Raises:
            StoreUnavailable: Redis did not take it; it stays queued.
        """
        target = self._last.get(execution_id, 0)
        while self._sent < target:
            if self._progress is None:
                self._progress = asyncio.get_running_loop().create_future()
            self._hurry.set()
            await asyncio.shield(self._progress)

    async def run(self) -> None:
        """Send what is appended; runs for the store's life."""
        while True:
            await self._wake.wait()
            if not self._hurry.is_set():
                with anyio.move_on_after(LINGER):
                    await self._hurry.wait()
            self._wake.clear()
            self._hurry.clear()
            while self._queue:
                try:
                    await self._send(self._batch())
                except StoreUnavailable as error:
                    self._report(error)
                    await anyio.sleep(RETRY_PAUSE)

    def _batch(self) -> list[_Entry]:
        batch: list[_Entry] = []
        size = 0
        for entry in self._queue:
            if batch and size + len(entry.body) > BATCH_BYTES:
                break
            batch.append(entry)
            size += len(entry.body)
        return batch

    async def _send(self, batch: list[_Entry]) -> None:
        replies = await self._link.pipeline(
            [
                (
                    "XADD",
                    LOG(entry.execution_id),
                    "NOMKSTREAM",
                    f"{entry.sequence_number + 1}-0",
                    "event",
                    entry.body,
                )
                for entry in batch
            ],
            repeatable=True,
        )
        for entry, reply in zip(batch, replies, strict=True):
            if isinstance(reply, Exception) and "equal or smaller" not in str(reply):
                log.error("event not logged", execution_id=entry.execution_id, error=str(reply))
            self._queue.popleft()
            self._queued_bytes -= len(entry.body)
            self._sent = entry.number
            if self._last.get(entry.execution_id) == entry.number:
                del self._last[entry.execution_id]
        self._report(None)

    def _report(self, error: StoreUnavailable | None) -> None:
        """Tell those who flush how the last attempt went."""
        progress, self._progress = self._progress, None
        if progress is None or progress.done():
            return
        if error is None:
            progress.set_result(None)
        else:
            progress.set_exception(error)
            progress.exception()

    async def drain(self, timeout: float) -> None:
        """Give what is queued up to `timeout` seconds to reach Redis."""
        with anyio.move_on_after(timeout, shield=True):
            for execution_id in list(self._last):
                try:
                    await self.flush(execution_id)
                except StoreUnavailable:
                    break
        if self._queue:
            log.warning("events not logged at shutdown", entries=len(self._queue))

    async def last_number(self, execution_id: str) -> int:
        """Sequence number of the last event in the log; -1 when there is none."""
        _, newest = await self._ends(execution_id)
        return -1 if newest is None else _number(newest)

    async def follow(
        self, execution_id: str, *, after: int = -1, session_id: str | None = None
    ) -> AsyncGenerator[ExecutionEvent]:
        """Events with a sequence number above `after`, then live ones up to the final one.

        With `session_id`, an execution whose log is gone, or whose owner died without a final
        event, is told from its record. A connection to Redis is held until the generator is closed.

        Raises:
            ExecutionNotFound: there is no log, nor a record.
            StoreUnavailable: Redis went away; the caller may follow again from the last event.
        """
        known, newest = await self._ends(execution_id)
        session_id = known or session_id
        if session_id is None:
            raise ExecutionNotFound(execution_id)
        if newest is not None and _completes(newest) and _number(newest) <= after:
            return
        last = after
        silent = False
        async with open_connection(self._url) as call:
            while True:
                reply = await call(
                    "XREAD",
                    "COUNT",
                    READ_COUNT,
                    "BLOCK",
                    round(BLOCK * 1000),
                    "STREAMS",
                    LOG(execution_id),
                    f"{last + 1}-1",
                    timeout=BLOCK + REPLY_TIMEOUT,
                )
                if reply:
                    silent = False
                    for entry in reply[0][1]:
                        event = await self._decode(session_id, execution_id, entry)
                        last = event.sequence_number
                        yield event
                        if event.type is EventType.COMPLETED:
                            return
                    continue
                record = await self._read_record(session_id, execution_id)
                if record.finished and silent:
                    for event in _from_record(record, last):
                        yield event
                    return
                silent = record.finished

    async def _ends(self, execution_id: str) -> tuple[str | None, Any]:
        """The session that the log names and its newest entry; None for what is not there."""
        key = LOG(execution_id)
        first, newest = await self._link.pipeline(
            [("XRANGE", key, "-", "+", "COUNT", 1), ("XREVRANGE", key, "+", "-", "COUNT", 1)],
            repeatable=True,
        )
        if not first:
            return None, None
        return first[0][1][1].decode(), newest[0] if newest[0][0] != first[0][0] else None

    async def _decode(self, session_id: str, execution_id: str, entry: Any) -> ExecutionEvent:
        data = json.loads(entry[1][1])
        kind = EventType(data.pop("type"))
        if data.pop("from_record", False):
            record = await self._read_record(session_id, execution_id)
            if kind is EventType.CREATED:
                record = _as_created(record)
            data["execution"] = record.to_wire()
            if kind is EventType.COMPLETED and not record.finished:
                raise unavailable()
        return ExecutionEvent(_number(entry), kind, data)


def _number(entry: Any) -> int:
    return int(entry[0].partition(b"-")[0]) - 1


def _completes(entry: Any) -> bool:
    return bool(json.loads(entry[1][1])["type"] == EventType.COMPLETED)


def _encode(event: ExecutionEvent) -> bytes:
    data = {"type": event.type.value, **event.data}
    body = json.dumps(data, separators=(",", ":")).encode()
    if len(body) > ENTRY_LIMIT and "execution" in data:
        del data["execution"]
        body = json.dumps({**data, "from_record": True}, separators=(",", ":")).encode()
    return body


def _as_created(record: Execution) -> Execution:
    """The execution as it was when it was created."""
    return Execution(
        id=record.id,
        session_id=record.session_id,
        code=record.code,
        status=ExecutionStatus.QUEUED,
        created_at=record.created_at,
    )


def _from_record(record: Execution, last: int) -> list[ExecutionEvent]:
    """What can be told of a finished execution from its record, beyond event `last`."""
    events = []
    if last < 0:
        last += 1
        created = {"execution": _as_created(record).to_wire()}
        events.append(ExecutionEvent(last, EventType.CREATED, created))
    completed = {"execution": record.to_wire()}
    events.append(ExecutionEvent(last + 1, EventType.COMPLETED, completed))
    return events
