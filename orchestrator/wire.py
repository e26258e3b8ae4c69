"""JSON as it leaves the server, and the replies that carry it. Above: routes/, event_stream.py.

Below: errors.py. Values are written to bytes here, once, without a second validation: what the
stored records hold is what the caller gets.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any, Final

from starlette.responses import Response

from orchestrator.errors import NotAuthenticated, OutcomeUnknown, ServiceError, TooMany, Unavailable

_encode = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode
_encode_ascii = json.JSONEncoder(allow_nan=False, separators=(",", ":")).encode

JSON_TYPE: Final = "application/json"


def to_json(value: Any) -> bytes:
    """Compact UTF-8 JSON that every parser takes.

    Code may put NaN or half a surrogate pair into a MIME bundle: the one becomes null, the other an
    escape, instead of an answer that cannot be sent.
    """
    try:
        return _encode(value).encode()
    except UnicodeEncodeError:
        return _encode_ascii(value).encode()
    except ValueError:
        return to_json(_finite(value))


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value


class JsonReply(Response):
    """A 200 with a JSON body; bytes are taken for JSON already."""

    media_type = JSON_TYPE

    def render(self, content: Any) -> bytes:
        """The body's bytes."""
        return content if isinstance(content, bytes) else to_json(content)


def error_object(error: ServiceError) -> dict[str, Any]:
    """The envelope of every error: the same in a body and in an event."""
    return {
        "error": {
            "message": error.message,
            "type": error.type,
            "param": error.param,
            "code": error.code,
        }
    }


def error_reply(error: ServiceError) -> JsonReply:
    """An error with the headers that tell a client what to do about it."""
    reply = JsonReply(error_object(error), status_code=error.status)
    reply.headers.update(_headers(error) | error.headers)
    return reply


def _headers(error: ServiceError) -> dict[str, str]:
    if isinstance(error, NotAuthenticated):
        return {"www-authenticate": "Bearer"}
    if isinstance(error, OutcomeUnknown):
        return {"x-should-retry": "false"}
    if not isinstance(error, TooMany | Unavailable):
        return {}
    headers = {"x-should-retry": "true"}
    if error.retry_after is not None:
        headers["retry-after"] = str(max(1, math.ceil(error.retry_after)))
        headers["retry-after-ms"] = str(max(1, math.ceil(error.retry_after * 1000)))
    return headers
