"""Store: sessions, executions and files in Redis. Above: owner, reaper, routes. Below: redis_link.

Every call is one round trip. What must be one step is one Lua script in `scripts/`, and every
script can be run twice with the same outcome, so a call whose reply was lost is sent again. Time is
Redis' own. Only the owner of a session writes its executions and files.

Redis keeps no record over `RECORD_LIMIT`: the bulk of a larger one is in the artifact store and is
put together again on reading.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Final, Generic, Literal, TypeVar

from orchestrator import redis_keys
from orchestrator.artifacts import Artifacts
from orchestrator.background import background_tasks
from orchestrator.errors import (
    BadRequest,
    ExecutionNotFound,
    FileNotFound,
    KeyReused,
    QueueFull,
    SessionExpired,
    SessionNotFound,
    TenantQuota,
)
from orchestrator.event_log import EventLog
from orchestrator.executions import Execution
from orchestrator.records import Records
from orchestrator.redis_link import Argument, RedisLink, open_link
from orchestrator.scripts import SCRIPTS, SESSION_FIELDS
from orchestrator.sessions import (
    EndReason,
    Session,
    SessionFile,
    SessionOrder,
    SessionStatus,
)

DAY: Final = 24 * 3600.0

FILES_PER_STEP: Final = 1000
"""File changes per script; more are applied in several steps, so that Redis never stalls."""

ARCHIVE_STEP: Final = 100
"""Records per step when a session's records are moved to the artifact store."""

DRAIN_TIMEOUT: Final = 2.0
"""Seconds at closing for queued events to reach Redis."""

SUCCESSOR_FIELD: Final = "successor"
"""Field of an ended session's hash: the id of the session made in its place."""

T = TypeVar("T")
Order = Literal["asc", "desc"]


@dataclass(frozen=True, slots=True)
class PageQuery:
    """Which part of a list is asked for."""

    after: str | None = None
    """Id of the last item seen."""
    limit: int = 20
    order: Order = "desc"
    """By position: the newest first, or the oldest."""


@dataclass(frozen=True, slots=True)
class Page(Generic[T]):
    """A part of a list."""

    items: tuple[T, ...]
    has_more: bool


@dataclass(frozen=True, slots=True)
class Reservation:
    """The answer to `reserve_execution`."""

    execution: Execution
    created: bool
    """False: the idempotency key had been used; `execution` is what it made then."""


@dataclass(frozen=True, slots=True)
class FileWritten:
    """A file that was uploaded, or that code wrote."""

    path: str
    """Relative to the workspace, NFC, forward slashes."""
    bytes: int
    source: str
    """`user` or `assistant`."""
    artifact: str | None = None
    """Key of this version in the artifact store; None: not stored, or not yet."""


def new_file_id() -> str:
    """An id for a file."""
    return "cfile_" + secrets.token_urlsafe(24)


class Store:
    """What the service remembers. Every method may raise `StoreUnavailable`."""

    def __init__(self, link: RedisLink, url: str, records: Records, *, retention: float) -> None:
        self._link = link
        self._records = records
        self.event_log = EventLog(link, url, self.get_execution)
        self.retention = retention
        """Seconds that the records of an ended session are kept."""
        self._clock_offset: float | None = None

    def __repr__(self) -> str:
        return f"<Store on {self._link!r}>"

    async def now(self) -> float:
        """Redis' time, in Unix seconds."""
        seconds, microseconds = await self._link.call("TIME", repeatable=True)
        now = int(seconds) + int(microseconds) / 1e6
        self._see(now)
        return now

    def clock(self) -> float:
        """Redis' time as reckoned from its last reply, without asking: for records' instants."""
        if self._clock_offset is None:
            return time.time()
        return time.monotonic() + self._clock_offset

    async def ping(self) -> None:
        """Return when Redis answers."""
        await self._link.call("PING", repeatable=True)

    async def create_session(
        self,
        session_id: str,
        order: SessionOrder,
        *,
        worker_id: str,
        epoch: int = 1,
        max_lifetime: float | None,
        tenant_limit: int | None,
    ) -> Session:
        """Record a new session; one that has this id already is returned as it is.

        Raises:
            TenantQuota: the tenant has as many running sessions as it may.
        """
        status, *rest = await self._run(
            "create_session",
            session_id,
            order.tenant,
            order.name,
            order.idle_minutes,
            order.memory_limit,
            worker_id,
            epoch,
            "" if max_lifetime is None else max_lifetime,
            "" if tenant_limit is None else tenant_limit,
        )
        if status == b"tenant_quota":
            raise TenantQuota(
                f"{tenant_limit} containers are running, which is this key's limit; delete one or "
                "wait until one expires.",
                retry_after=5.0,
            )
        return self._session(session_id, rest[0])

    async def get_session(self, session_id: str, tenant: str | None) -> Session:
        """The session, its deadline unmoved; `tenant` None is for our own use.

        Raises:
            SessionNotFound: unknown, or another tenant's.
        """
        values = await self._link.call(
            "HMGET", redis_keys.SESSION(session_id), *SESSION_FIELDS, repeatable=True
        )
        if values[0] is None or (tenant is not None and values[0].decode() != tenant):
            raise SessionNotFound(session_id)
        return self._session(session_id, values)

    async def touch_session(self, session_id: str, tenant: str | None) -> Session:
        """The session, its idle deadline moved if it is running.

        Raises:
            SessionNotFound: unknown, or another tenant's.
        """
        status, *rest = await self._run("touch_session", session_id, tenant or "")
        if status == b"missing":
            raise SessionNotFound(session_id)
        session = self._session(session_id, rest[0])
        if session.status is SessionStatus.RUNNING:
            self._see(session.last_active_at)
        return session

    async def list_sessions(
        self, tenant: str, page: PageQuery, *, name: str | None = None
    ) -> Page[Session]:
        """A page of the tenant's sessions, ended ones included; moves no deadline.

        Raises:
            BadRequest: `after` is unknown.
        """
        found: list[Session] = []
        start = ""
        while True:
            status, *rest = await self._run(
                "list_sessions",
                tenant,
                page.after or "",
                page.limit - len(found),
                page.order,
                "" if name is None else "=" + name,
                start,
            )
            if status == b"unknown_cursor":
                raise _unknown_cursor(page)
            found += [self._session(key.decode(), values) for key, values in rest[0]]
            if len(found) > page.limit or rest[1] is None:
                return _page(found, page)
            start = rest[1].decode()

    async def end_session(
        self, session_id: str, reason: EndReason, *, epoch: int
    ) -> Session | None:
        """Turn a running session into an expired one, in one step.

        None: it is not running, or its epoch has moved on, so its end is somebody else's. From here
        on its records live for the retention time.
        """
        status, *rest = await self._run(
            "end_session", session_id, reason.value, epoch, secrets.token_hex(8), self.retention
        )
        return None if status == b"missing" else self._session(session_id, rest[0])

    async def successor(self, session_id: str) -> str | None:
        """The session that was made in place of an ended one; None when there is none."""
        found = await self._link.call(
            "HGET", redis_keys.SESSION(session_id), SUCCESSOR_FIELD, repeatable=True
        )
        return None if found is None else str(found.decode())

    async def set_successor(self, session_id: str, successor_id: str) -> None:
        """Record which session was made in place of an ended one."""
        await self._link.call(
            "HSET", redis_keys.SESSION(session_id), SUCCESSOR_FIELD, successor_id, repeatable=True
        )

    async def forget_session(self, session_id: str) -> list[str]:
        """Remove every key of a session and return the artifact keys that its records named."""
        named = await self._link.call("SMEMBERS", redis_keys.ARTIFACTS(session_id), repeatable=True)
        named += await self._run("forget_session", session_id)
        return sorted({key.decode() for key in named})

    async def due_sessions(self, limit: int = 100) -> list[tuple[Session, EndReason]]:
        """Running sessions whose end has come and which no execution holds, with the reason."""
        found = await self._run("due_sessions", limit)
        sessions = [self._session(key.decode(), values) for key, values in found]
        return [(session, _why_due(session)) for session in sessions]

    async def next_deadline(self) -> float | None:
        """Seconds until the next session is due, negative when one is; None without sessions."""
        seconds = await self._run("next_deadline")
        return None if seconds is None else float(seconds)

    async def forgettable_sessions(self, limit: int = 100) -> list[str]:
        """Ended sessions whose retention time is over: to be forgotten with their artifacts."""
        return [key.decode() for key in await self._run("forgettable_sessions", limit)]

    async def sessions_of(self, worker_id: str) -> list[Session]:
        """The running sessions that a worker owns."""
        found = await self._run("sessions_of", worker_id)
        return [self._session(key.decode(), values) for key, values in found]

    async def reserve_execution(
        self,
        execution: Execution,
        *,
        tenant: str,
        idempotency_key: str | None,
        request_digest: str,
        hold_seconds: float,
        queue_limit: int,
    ) -> Reservation:
        """Record a queued execution with its idempotency key and let it hold the session.

        A key that was used with the same digest returns the execution of that time, even when the
        session has ended since.

        Raises:
            SessionNotFound: unknown, or another tenant's.
            SessionExpired: the session has ended, or its maximum lifetime is over.
            KeyReused: the key was used for another request.
            QueueFull: `queue_limit` executions wait already.
        """
        async with self._records.encoded(execution) as record:
            status, *rest = await self._run(
                "reserve_execution",
                execution.session_id,
                execution.id,
                tenant,
                record.value,
                record.artifact,
                idempotency_key or "",
                request_digest,
                hold_seconds,
                queue_limit,
            )
            record.kept = status == b"created"
        match status:
            case b"created":
                self._see(float(rest[0]))
                return Reservation(execution, created=True)
            case b"known":
                return Reservation(await self._records.decode(rest[0]), created=False)
            case b"archived":
                existing = await self.get_execution(execution.session_id, rest[0].decode())
                return Reservation(existing, created=False)
            case b"key_reused":
                raise KeyReused(
                    "This Idempotency-Key was used for a request with another body.",
                    param="Idempotency-Key",
                )
            case b"queue_full":
                raise QueueFull(
                    f"{queue_limit} executions wait in this container, which is the limit.",
                    retry_after=1.0,
                )
            case b"session_expired":
                raise SessionExpired
            case _:
                raise SessionNotFound(execution.session_id)

    async def start_execution(self, execution: Execution, *, hold_seconds: float) -> Execution:
        """Record that an execution starts, holding the session anew.

        Returns the record that stands: when it is `finished`, the code must not run.

        Raises:
            SessionExpired: the session has ended meanwhile; the code must not run.
            ExecutionNotFound: it was not reserved, or the session is forgotten.
        """
        return await self._write("write_execution", execution, hold_seconds)

    async def update_execution(self, execution: Execution) -> Execution:
        """Record a state that is not the last; returns the record that stands.

        Raises:
            ExecutionNotFound: it was not reserved, or the session is forgotten.
        """
        return await self._write("write_execution", execution, "")

    async def finish_execution(self, execution: Execution) -> Execution:
        """Record how an execution ended, release its hold, and touch the session.

        A record that is terminal already wins and is returned.

        Raises:
            ExecutionNotFound: it was not reserved, or the session is forgotten.
        """
        return await self._write("finish_execution", execution)

    async def _write(self, script: str, execution: Execution, *rest: Argument) -> Execution:
        async with self._records.encoded(execution) as record:
            status, *reply = await self._run(
                script, execution.session_id, execution.id, record.value, record.artifact, *rest
            )
            record.kept = status == b"ok"
        match status:
            case b"ok":
                self._see(float(reply[0]))
                return execution
            case b"finished":
                return await self._records.decode(reply[0])
            case b"session_expired":
                raise SessionExpired
            case _:
                return await self.get_execution(execution.session_id, execution.id)

    async def get_execution(self, session_id: str, execution_id: str) -> Execution:
        """The record of an execution.

        Raises:
            ExecutionNotFound: unknown in this session.
        """
        value, archive = await self._link.pipeline(
            (
                ("HGET", redis_keys.EXECUTIONS(session_id), execution_id),
                ("HGET", redis_keys.SESSION(session_id), "archive"),
            ),
            repeatable=True,
        )
        if value is not None:
            return await self._records.decode(value)
        if archive is not None:
            archived = await self._records.find_archived(archive.decode(), execution_id)
            if archived is not None:
                return archived
        raise ExecutionNotFound(execution_id)

    async def list_executions(self, session_id: str, page: PageQuery) -> Page[Execution]:
        """A page of a session's executions.

        Raises:
            BadRequest: `after` is unknown.
        """
        found = await self._list(session_id, "execution_order", "executions", "", page)
        if not found:
            archive = await self._link.call(
                "HGET", redis_keys.SESSION(session_id), "archive", repeatable=True
            )
            if archive is not None:
                archived = await self._records.archived_page(
                    archive.decode(), page.after, page.limit + 1, newest_first=page.order == "desc"
                )
                if archived is None:
                    raise _unknown_cursor(page)
                return _page(archived, page)
        if found is None:
            raise _unknown_cursor(page)
        executions = await self._records.decode_all([value for _, value in found[: page.limit]])
        return Page(tuple(executions), len(found) > page.limit)

    async def archive_executions(self, session_id: str) -> bool:
        """Move the execution records of an ended session to the artifact store.

        Redis then keeps only where they are; every read works as before. False: the session runs,
        has unfinished executions, is archived already or forgotten; nothing has changed.

        Raises:
            ArtifactStoreError: it does not take them; nothing has changed.
        """
        superseded: list[str] = []

        async def records() -> AsyncIterator[bytes]:
            after: str | None = None
            while True:
                page = PageQuery(after, ARCHIVE_STEP, "asc")
                found = await self._list(session_id, "execution_order", "executions", "", page)
                for key, value in (found or [])[:ARCHIVE_STEP]:
                    after = key.decode()
                    yield value
                if not found or len(found) <= ARCHIVE_STEP:
                    return

        archive = await self._records.archive(session_id, records(), superseded)
        if archive is None:
            return False
        (status,) = await self._run("archive_executions", session_id, archive)
        await self._records.drop([archive] if status != b"ok" else superseded)
        return bool(status == b"ok")

    async def unfinished_executions(self, session_id: str) -> list[Execution]:
        """Queued and running executions, in the order of their arrival."""
        return await self._records.decode_all(await self._run("unfinished_executions", session_id))

    async def held_until(self, session_id: str, execution_id: str) -> float | None:
        """Until when an unfinished execution holds its session; None when it does not."""
        held = await self._link.call(
            "ZSCORE", redis_keys.UNFINISHED(session_id), execution_id, repeatable=True
        )
        return None if held is None else float(held)

    async def apply_file_changes(
        self, session_id: str, *, written: Sequence[FileWritten], removed: Sequence[str]
    ) -> list[SessionFile]:
        """Record what was written and removed; returns the written files in order.

        A path that is known keeps its id and `created_at`; source, size and artifact become those
        of the new version. Removing an unknown path is fine.

        Raises:
            SessionNotFound: the session is forgotten.
        """
        files: list[SessionFile] = []
        steps = max(len(written), len(removed), 1)
        for start in range(0, steps, FILES_PER_STEP):
            batch = written[start : start + FILES_PER_STEP]
            arguments: list[Argument] = [session_id, len(batch)]
            for file in batch:
                arguments += (
                    file.path, new_file_id(), file.bytes, file.source, file.artifact or ""
                )  # fmt: skip
            arguments += removed[start : start + FILES_PER_STEP]
            status, *rest = await self._run("apply_file_changes", *arguments)
            if status == b"session_missing":
                raise SessionNotFound(session_id)
            files += [_file(session_id, key, value) for key, value in rest[0]]
        return files

    async def set_artifact(self, session_id: str, file_id: str, artifact: str) -> None:
        """Record where the bytes of a file are stored.

        Raises:
            FileNotFound: unknown in this session.
        """
        (status,) = await self._run("set_artifact", session_id, file_id, artifact)
        if status != b"ok":
            raise FileNotFound(file_id)

    async def get_file(self, session_id: str, file_id: str) -> SessionFile:
        """The record of a file.

        Raises:
            FileNotFound: unknown in this session.
        """
        value = await self._link.call(
            "HGET", redis_keys.FILES(session_id), file_id, repeatable=True
        )
        if value is None:
            raise FileNotFound(file_id)
        return _file(session_id, file_id.encode(), value)

    async def find_file(self, session_id: str, path: str) -> SessionFile | None:
        """The record of the file at a path; None when there is none."""
        found = await self._run("find_file", session_id, path)
        return None if found is None else _file(session_id, found[0], found[1])

    async def list_files(self, session_id: str, page: PageQuery) -> Page[SessionFile]:
        """A page of a session's files.

        Raises:
            BadRequest: `after` is unknown.
        """
        found = await self._list(session_id, "file_order", "files", "file_cursors", page)
        if found is None:
            raise _unknown_cursor(page)
        return _page([_file(session_id, key, value) for key, value in found], page)

    async def remove_file(self, session_id: str, file_id: str) -> SessionFile:
        """Remove the record of a file and return it.

        Raises:
            FileNotFound: unknown in this session.
        """
        value = await self._run("remove_file", session_id, file_id)
        if value is None:
            raise FileNotFound(file_id)
        return _file(session_id, file_id.encode(), value)

    async def _list(
        self, session_id: str, order: str, values: str, cursors: str, page: PageQuery
    ) -> list[tuple[bytes, bytes]] | None:
        """Ids and values of a page, one more than its limit if there is; None: unknown cursor."""
        status, *rest = await self._run(
            "list_page",
            session_id,
            order,
            values,
            cursors,
            page.after or "",
            page.limit,
            page.order,
        )
        if status == b"unknown_cursor":
            return None
        return [(key, value) for key, value in rest[0]]

    async def _run(self, script: str, *arguments: Argument) -> Any:
        return await self._link.run(SCRIPTS[script], *arguments)

    def _see(self, now: float) -> None:
        self._clock_offset = now - time.monotonic()

    def _session(self, session_id: str, values: Sequence[bytes]) -> Session:
        (
            tenant,
            name,
            status,
            created_at,
            last_active_at,
            idle_minutes,
            expires_at,
            idle_expires_at,
            memory_limit,
            worker_id,
            epoch,
            ended_at,
            end_reason,
        ) = (value.decode() for value in values)
        return Session(
            id=session_id,
            tenant=tenant,
            name=name,
            status=SessionStatus(status),
            created_at=float(created_at),
            last_active_at=float(last_active_at),
            idle_minutes=int(idle_minutes),
            expires_at=float(expires_at) if expires_at else None,
            idle_expires_at=float(idle_expires_at),
            memory_limit=memory_limit,
            worker_id=worker_id,
            epoch=int(epoch),
            ended_at=float(ended_at) if ended_at else None,
            end_reason=EndReason(end_reason) if end_reason else None,
        )


def _file(session_id: str, file_id: bytes, value: bytes) -> SessionFile:
    created_at, size, source, artifact, path = value.decode().split("\0", 4)
    return SessionFile(
        id=file_id.decode(),
        session_id=session_id,
        path=path,
        bytes=int(size),
        created_at=float(created_at),
        source=source,
        artifact=artifact or None,
    )


def _why_due(session: Session) -> EndReason:
    if session.expires_at is not None and session.idle_expires_at >= session.expires_at:
        return EndReason.MAX_LIFETIME
    return EndReason.IDLE


def _page(found: list[T], page: PageQuery) -> Page[T]:
    return Page(tuple(found[: page.limit]), len(found) > page.limit)


def _unknown_cursor(page: PageQuery) -> BadRequest:
    return BadRequest(f"No item with id '{page.after}' in this list.", param="after")


@asynccontextmanager
async def open_store(
    url: str, overflow: Artifacts, *, retention: float = 7 * DAY
) -> AsyncIterator[Store]:
    """A store on the Redis at `url` (`redis://`, `rediss://`, `unix://`) for the block.

    Redis need not answer yet: `ping` tells.
    """
    async with open_link(url) as link, background_tasks() as tasks:
        store = Store(link, url, Records(overflow), retention=retention)
        tasks.start_soon(store.event_log.run)
        try:
            yield store
        finally:
            await store.event_log.drain(DRAIN_TIMEOUT)
