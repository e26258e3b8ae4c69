"""File names as callers send them, made safe to put into a workspace. Above: multipart.py, owner.

Below: nothing. Names keep their script, spaces and signs: code inside opens them by the very name
the caller gave. Only what could leave the workspace or break a terminal is dropped.
"""

from __future__ import annotations

import re
import unicodedata
from typing import Final

NAME_BYTES: Final = 255
"""Longest file name in bytes. Source: NAME_MAX of every Linux file system in use."""

EXTENSION_BYTES: Final = 32
"""Longest ending, dot included, that is kept when a name must be cut. Source: own choice; the
longest in common use (`.geojson.bz2`, `.code-workspace`) stay well below."""

_DIRECTORY = re.compile(r"^.*[/\\]", re.DOTALL)


def safe_name(given: str) -> str | None:
    """The last part of a given name, fit for a workspace; None when nothing usable is left.

    Directory parts go (both kinds of slash), control characters go, the rest is brought to NFC and
    cut to `NAME_BYTES` at a character boundary, keeping the extension. Applying it twice changes
    nothing.
    """
    name = _DIRECTORY.sub("", given)
    name = "".join(char for char in name if unicodedata.category(char) not in {"Cc", "Cs"})
    name = _cut(unicodedata.normalize("NFC", name))
    return None if name in {"", ".", ".."} or name.isspace() else name


def _cut(name: str) -> str:
    if len(name.encode()) <= NAME_BYTES:
        return name
    stem, dot, extension = name.rpartition(".")
    ending = dot + extension
    if not stem or len(ending.encode()) > EXTENSION_BYTES:
        return _first_bytes(name, NAME_BYTES)
    return _first_bytes(stem, NAME_BYTES - len(ending.encode())) + ending


def _first_bytes(text: str, count: int) -> str:
    return text.encode()[:count].decode(errors="ignore")
