"""Names of files: what an upload may be called, and how names on disk are shown.

Above: workspace.py, snapshot.py, and whoever takes uploads. Below: nothing; no I/O here.

Linux keeps names as bytes, so `é` written as one code point and as two are two files. A path is
kept as it is on disk wherever a file is opened. It is shown in the composed form (NFC), which is
what people type and models write, unless two files of a workspace would then look the same: of
such twins the one that is composed on disk is shown as it is, and so is every other.
"""

from __future__ import annotations

import unicodedata
from collections import Counter
from collections.abc import Collection
from typing import Final

from kernelpool.errors import NameRefused

NAME_BYTES: Final = 255
"""Longest name of one file. Source: NAME_MAX of Linux, and the hosted API's limit."""

PATH_BYTES: Final = 4095
"""Longest relative path that one system call takes. Source: PATH_MAX of Linux."""

EXTENSION_BYTES: Final = 32
"""Longest ending that is worth keeping when a name is shortened."""

_DROPPED_CATEGORIES: Final = {"Cc", "Cs", "Zl", "Zp"}
"""Control characters, lone surrogates, line and paragraph separators."""

_DROPPED: Final = set("\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")
"""Direction overrides: they make `fdp.exe` look like `exe.pdf`."""


def clean_name(raw: str) -> str:
    """The name under which an upload is kept: its own, as far as that is safe.

    Directory parts (of Windows as well) go, and so do control characters. What is too long is cut
    between two code points, and keeps its extension.

    Raises:
        NameRefused: nothing that could name a file is left.
    """
    kept = "".join(
        char
        for char in raw
        if unicodedata.category(char) not in _DROPPED_CATEGORIES and char not in _DROPPED
    )
    name = unicodedata.normalize("NFC", kept).replace("\\", "/").rstrip("/").rpartition("/")[2]
    if name in {".", ".."} or not name.strip():
        raise NameRefused(f"{raw[:100]!r} does not name a file")
    return _shortened(name)


def _shortened(name: str) -> str:
    if len(name.encode()) <= NAME_BYTES:
        return name
    stem, dot, ending = name.rpartition(".")
    extension = dot + ending
    if not stem or len(extension.encode()) > EXTENSION_BYTES:
        stem, extension = name, ""
    room = NAME_BYTES - len(extension.encode())
    return stem.encode()[:room].decode(errors="ignore") + extension


def split_path(path: str) -> list[str]:
    """The parts of a relative path.

    Raises:
        NameRefused: it is empty, absolute, too long, leaves the workspace, or cannot be a path.
    """
    parts = path.split("/")
    try:
        sizes = [len(part.encode()) for part in parts]
    except UnicodeEncodeError:
        raise NameRefused(f"{path[:100]!r} is not valid Unicode") from None
    if "\0" in path or not {"", ".", ".."}.isdisjoint(parts):
        raise NameRefused(f"{path[:100]!r} is not a path below the workspace")
    if max(sizes) > NAME_BYTES or sum(sizes) + len(sizes) > PATH_BYTES:
        raise NameRefused(f"the name {path[:100]!r}... is too long")
    return parts


def composed(name: str) -> str:
    """The NFC form."""
    return name if name.isascii() else unicodedata.normalize("NFC", name)


def display_paths(paths: Collection[str]) -> dict[str, str]:
    """The path to show for each path on disk; no two are the same."""
    shown = {path: composed(path) for path in paths}
    uses = Counter(shown.values())
    return {
        path: form if uses[form] == 1 else path  # twins keep what tells them apart
        for path, form in shown.items()
    }
