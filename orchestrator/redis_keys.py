"""Every key in Redis: its name, what it holds, how long it lives. Above: store.py, event_log.py.

The names are filled into the Lua scripts from here as well, so this table is the only place that
spells them. `docs/reference/redis-keys.md` is written from it.

Keys of one session carry its id as hash tag. The scripts also touch keys of the tenant and of the
whole fleet in the same step, so Redis is one primary, which may have replicas, not a cluster.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

PREFIX: Final = "kernelpool:"

LOG_LIFETIME: Final = 3600
"""Seconds that event logs outlive their session: time for a client to fetch what it missed."""

LOGS_KEPT: Final = 200
"""Event logs kept per session: each takes 5 kB and more."""

CURSOR_LIFETIME: Final = 3600
"""Seconds that the place of a deleted id is remembered, for clients that delete while they page."""

IDEMPOTENCY_LIFETIME: Final = 24 * 3600
"""Seconds that an idempotency key is honoured: a client that repeats for longer means it anew."""

RETENTION_GRACE: Final = 24 * 3600
"""Seconds that records outlive the retention time, so that the sweep of artifacts, which needs
them, may be late."""


@dataclass(frozen=True, slots=True)
class Key:
    """One kind of key."""

    name: str
    """How the scripts call it."""
    template: str
    """The key, with `%s` for what varies."""
    varies: str
    """What `%s` stands for; empty when there is one such key."""
    kind: str
    """Redis' data type."""
    holds: str
    lifetime: str

    def __call__(self, *part: str) -> str:
        """The key of one session, execution, tenant or worker."""
        return self.template % part


_WITH_SESSION = "the session, then the retention time and a day"
_UNTIL_ARCHIVED = "the session, until its records are in the artifact store"

SESSION: Final = Key(
    "session",
    PREFIX + "session:{%s}",
    "session",
    "hash",
    "the session's fields",
    _WITH_SESSION,
)
EXECUTIONS: Final = Key(
    "executions",
    PREFIX + "executions:{%s}",
    "session",
    "hash",
    "execution id → status, encoding and record",
    _UNTIL_ARCHIVED,
)
EXECUTION_ORDER: Final = Key(
    "execution_order",
    PREFIX + "execution-order:{%s}",
    "session",
    "sorted set",
    "execution ids by position (microseconds of arrival, made unique)",
    _UNTIL_ARCHIVED,
)
UNFINISHED: Final = Key(
    "unfinished",
    PREFIX + "unfinished:{%s}",
    "session",
    "sorted set",
    "ids of queued and running executions by the instant until which they hold the session",
    "until the last of them finishes, at most as the session",
)
IDEMPOTENCY: Final = Key(
    "idempotency",
    PREFIX + "idempotency:{%s}",
    "session",
    "hash",
    "idempotency key → instant, request digest, execution id; honoured for 24 hours",
    _WITH_SESSION,
)
FILES: Final = Key(
    "files",
    PREFIX + "files:{%s}",
    "session",
    "hash",
    "file id → created_at, bytes, source, artifact, path",
    _WITH_SESSION,
)
FILE_ORDER: Final = Key(
    "file_order",
    PREFIX + "file-order:{%s}",
    "session",
    "sorted set",
    "file ids by position",
    _WITH_SESSION,
)
PATHS: Final = Key(
    "paths",
    PREFIX + "paths:{%s}",
    "session",
    "hash",
    "path → file id",
    _WITH_SESSION,
)
FILE_CURSORS: Final = Key(
    "file_cursors",
    PREFIX + "file-cursors:{%s}",
    "session",
    "sorted set",
    "ids of removed files by the position they had, at most 1,000",
    "1 hour after the last removal",
)
ARTIFACTS: Final = Key(
    "artifacts",
    PREFIX + "artifacts:{%s}",
    "session",
    "set",
    "every key in the artifact store that a record of the session ever named",
    _WITH_SESSION,
)
LOG: Final = Key(
    "log",
    PREFIX + "log:{%s}",
    "execution",
    "stream",
    "the execution's events; event n has the id (n + 1)-0",
    "the session and 1 hour; the newest 200 of each session",
)
TENANT_SESSIONS: Final = Key(
    "tenant_sessions",
    PREFIX + "tenant-sessions:%s",
    "tenant",
    "sorted set",
    "session ids by position",
    "while it has members",
)
TENANT_RUNNING: Final = Key(
    "tenant_running",
    PREFIX + "tenant-running:%s",
    "tenant",
    "set",
    "ids of running sessions",
    "while it has members",
)
TENANT_CURSORS: Final = Key(
    "tenant_cursors",
    PREFIX + "tenant-cursors:%s",
    "tenant",
    "sorted set",
    "ids of deleted sessions by the position they had, at most 1,000",
    "1 hour after the last deletion",
)
WORKER_SESSIONS: Final = Key(
    "worker_sessions",
    PREFIX + "worker-sessions:%s",
    "worker",
    "set",
    "ids of the running sessions it owns",
    "while it has members",
)
DEADLINES: Final = Key(
    "deadlines",
    PREFIX + "deadlines",
    "",
    "sorted set",
    "running session ids by the instant at which they are due",
    "while it has members",
)
RETAINED: Final = Key(
    "retained",
    PREFIX + "retained",
    "",
    "sorted set",
    "ended session ids by the instant at which their records and artifacts may go",
    "while it has members",
)

KEYS: Final = (
    SESSION,
    EXECUTIONS,
    EXECUTION_ORDER,
    UNFINISHED,
    IDEMPOTENCY,
    FILES,
    FILE_ORDER,
    PATHS,
    FILE_CURSORS,
    ARTIFACTS,
    LOG,
    TENANT_SESSIONS,
    TENANT_RUNNING,
    TENANT_CURSORS,
    WORKER_SESSIONS,
    DEADLINES,
    RETAINED,
)
