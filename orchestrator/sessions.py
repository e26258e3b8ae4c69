"""Session: the user's durable thing. Above: store, owner, routes. Below: errors.py.

A session is what a hosted API calls a container; it is renamed in `routes/`. It outlives kernels.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from orchestrator.errors import SessionExpired


class SessionStatus(StrEnum):
    """The two states of a session; a deleted session has no record."""

    RUNNING = "running"
    EXPIRED = "expired"


class EndReason(StrEnum):
    """Why a session ended."""

    IDLE = "idle"
    MAX_LIFETIME = "max_lifetime"
    DELETED = "deleted"
    WORKER_LOST = "worker_lost"
    DRAINED = "drained"


@dataclass(frozen=True, slots=True)
class Session:
    """One session as Redis holds it. Instants are Unix seconds of Redis' clock, as floats."""

    id: str
    """`cntr_` and 32 or more unguessable URL-safe characters."""
    tenant: str
    name: str
    status: SessionStatus
    created_at: float
    last_active_at: float
    idle_minutes: int
    """`expires_after.minutes` as the caller sees it."""
    expires_at: float | None
    """The end that nobody may move; None when there is no maximum lifetime."""
    idle_expires_at: float
    """When the session ends unless a call that counts comes before; never after `expires_at`."""
    memory_limit: str
    """A key of `kernelpool.profile.MEMORY_TIERS`."""
    worker_id: str
    """The worker that owns it."""
    epoch: int
    """Grows each time the session changes owner; a worker with an older one is refused."""
    ended_at: float | None = None
    end_reason: EndReason | None = None

    def check_running(self) -> None:
        """See that it has not ended.

        Raises:
            SessionExpired: it has.
        """
        if self.status is SessionStatus.EXPIRED:
            raise SessionExpired


@dataclass(frozen=True, slots=True)
class SessionOrder:
    """What a caller may choose when a session is made; checked before it gets here."""

    tenant: str
    name: str
    idle_minutes: int
    memory_limit: str = "1g"


@dataclass(frozen=True, slots=True)
class SessionFile:
    """A file of a session: uploaded, or written by code below the workspace.

    `path` is relative to the workspace (`/mnt/data`), NFC, with forward slashes.
    """

    id: str
    """`cfile_` and 32 or more unguessable URL-safe characters; an overwrite keeps it."""
    session_id: str
    path: str
    bytes: int
    created_at: float
    source: str
    """`user` for uploads, `assistant` for what code wrote."""
    artifact: str | None = None
    """Key in the artifact store of the newest stored version; None until it is stored."""

    @property
    def outlives_session(self) -> bool:
        """Whether callers can fetch it once the session has ended, for the retention time."""
        return self.source == "assistant"
