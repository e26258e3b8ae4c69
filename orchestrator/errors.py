"""The error tree of this package; each class carries its HTTP status and its place in the envelope.

Above: app.py turns any of these into the wire error; everything may raise them. Below: nothing.

    ServiceError
    ├── BadRequest            400   ├── KeyReused, NotWaiting, TierTooLarge
    ├── NotAuthenticated      401
    ├── Forbidden             403
    ├── NotFound              404   ├── SessionNotFound, SessionExpired, ExecutionNotFound, ...
    ├── MethodNotAllowed      405
    ├── TooLarge              413   ├── WorkspaceFull
    ├── UnsupportedMedia      415
    ├── TooMany               429   ├── NoSlot, QueueFull, TenantQuota
    ├── Unavailable           503   ├── StoreUnavailable, WorkerUnavailable
    └── OutcomeUnknown        502

Two more belong to one place each: `RangeNotSatisfiable` (416, routes/files.py) and
`UnknownExecution` (an `OutcomeUnknown`, event_stream.py).

Only statuses below 500, and 503, may be answered before code ran; once code may have run the answer
is 200 with `failure`, or `OutcomeUnknown` where a hop broke after sending.
"""

from __future__ import annotations

from typing import ClassVar


class ServiceError(Exception):
    """A fault with a status, a message for the caller, and a place in the error envelope."""

    status: ClassVar[int] = 500
    type: ClassVar[str] = "server_error"
    code: str | None = None

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after: float | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code or type(self).code
        self.retry_after = retry_after
        """Seconds after which the caller may try again; None: not by waiting."""
        self.headers: dict[str, str] = {}
        """Of the answer, beside those that go with the class."""


class BadRequest(ServiceError):
    """A bad parameter; `param` names it."""

    status = 400
    type = "invalid_request_error"


class KeyReused(BadRequest):
    """The idempotency key belongs to a request with another body."""

    code = "idempotency_key_reused"


class NotWaiting(BadRequest):
    """The execution does not wait for input."""

    code = "not_waiting_for_input"


class TierTooLarge(BadRequest):
    """The memory tier is above what the host has."""

    code = "memory_limit_too_large"


class NotAuthenticated(ServiceError):
    """No key, or a wrong one."""

    status = 401
    type = "invalid_request_error"
    code = "invalid_api_key"


class Forbidden(ServiceError):
    """A foreign origin or host."""

    status = 403
    type = "invalid_request_error"


class NotFound(ServiceError):
    """Unknown id, or one of another tenant: the text is the same."""

    status = 404
    type = "invalid_request_error"


class SessionNotFound(NotFound):
    """No such session for this tenant."""

    def __init__(self, session_id: str) -> None:
        super().__init__(f"Container with id '{session_id}' not found.")


class SessionExpired(NotFound):
    """The session has ended; clients match on this text."""

    code = "container_expired"

    def __init__(self, message: str = "Container is expired.") -> None:
        super().__init__(message)


class ExecutionNotFound(NotFound):
    """No such execution in this session."""

    def __init__(self, execution_id: str) -> None:
        super().__init__(f"Execution with id '{execution_id}' not found.")


class FileNotFound(NotFound):
    """No such file in this session."""

    def __init__(self, file_id: str) -> None:
        super().__init__(f"Container file with id '{file_id}' not found.")


class MethodNotAllowed(ServiceError):
    """The route exists, the method does not."""

    status = 405
    type = "invalid_request_error"


class TooLarge(ServiceError):
    """The body is over the limit, which the message names."""

    status = 413
    type = "invalid_request_error"
    code = "request_too_large"


class WorkspaceFull(TooLarge):
    """The upload does not fit into the workspace's disk quota."""

    code = "quota_exceeded"


class UnsupportedMedia(ServiceError):
    """A JSON route got another content type."""

    status = 415
    type = "invalid_request_error"


class TooMany(ServiceError):
    """Something is used up that frees itself again; may be retried."""

    status = 429
    type = "rate_limit_error"


class NoSlot(TooMany):
    """No slot is free for a new session."""

    code = "no_slot"


class QueueFull(TooMany):
    """Too many executions wait in this session."""

    code = "queue_full"


class TenantQuota(TooMany):
    """The tenant has as many sessions as it may."""

    code = "tenant_quota"


class Unavailable(ServiceError):
    """A part is away; no code ran; may be retried."""

    status = 503


class StoreUnavailable(Unavailable):
    """Redis does not answer."""

    code = "store_unavailable"


class WorkerUnavailable(Unavailable):
    """The worker that owns the session does not answer."""

    code = "worker_unavailable"


class OutcomeUnknown(ServiceError):
    """The hop broke after the code was sent: it may or may not have run. Never retried."""

    status = 502
    code = "outcome_unknown"
