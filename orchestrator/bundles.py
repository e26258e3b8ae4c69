"""Which parts of a MIME bundle become files. Above: session_files.py. Below: nothing.

Pure. Redis and streams carry small things only, so pictures, documents and long text leave the
bundle and a reference `{"file_id", "bytes"}` takes their place.
"""

from __future__ import annotations

import base64
import binascii
import json
import mimetypes
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

INLINE_BYTES: Final = 4_000
"""Text and JSON up to this size stay inline. Source: a quarter of the 16 kB an event may take."""

ALWAYS_INLINE: Final = "text/plain"
"""What a model reads; its length is capped with the rest of the text."""

EXTENSIONS: Final[dict[str, str]] = {
    "image/png": ".png",
    "image/jpeg": ".jpg",
    "image/gif": ".gif",
    "image/webp": ".webp",
    "image/svg+xml": ".svg",
    "application/pdf": ".pdf",
    "text/html": ".html",
    "text/latex": ".tex",
    "text/markdown": ".md",
    "application/json": ".json",
    "application/javascript": ".js",
    "application/vnd.plotly.v1+json": ".plotly.json",
    "application/geo+json": ".geojson",
}
"""File name endings by MIME type; other types go by the standard library's table."""

BINARY: Final = ("image/", "audio/", "video/", "application/pdf", "application/octet-stream")
"""Types whose value is base64 text, but for SVG, which is XML."""


@dataclass(frozen=True, slots=True)
class Heavy:
    """A part of a bundle that is to become a file."""

    mime: str
    content: bytes
    extension: str


def heavy_parts(bundle: Mapping[str, Any]) -> list[Heavy]:
    """The parts of a bundle that are too large or too binary to stay in it."""
    parts = []
    for mime, value in bundle.items():
        content = _heavy_content(mime, value)
        if content is not None:
            parts.append(Heavy(mime, content, extension(mime)))
    return parts


def extension(mime: str) -> str:
    """The ending of a file of that type, dot included."""
    known = EXTENSIONS.get(mime)
    if known is not None:
        return known
    if mime.endswith("+json"):
        return ".json"
    return mimetypes.guess_extension(mime) or (".txt" if mime.startswith("text/") else ".bin")


def _heavy_content(mime: str, value: object) -> bytes | None:
    if mime == ALWAYS_INLINE:
        return None
    if mime.startswith(BINARY) and mime != "image/svg+xml" and isinstance(value, str):
        try:
            return base64.b64decode("".join(value.split()), validate=True)
        except (binascii.Error, ValueError):
            return value.encode(errors="replace")
    text = value if isinstance(value, str) else json.dumps(value)
    content = text.encode(errors="replace")
    return content if len(content) > INLINE_BYTES else None
