"""Leases written down, so that a worker that was killed finds its kernels again.

Above: pool.py. Below: nothing. One file per session, readable by the worker alone: it holds the key
of the kernel's connection. Files are replaced whole, so a reader never sees half of one.
"""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path
from typing import Any, Final

import anyio
import structlog
from anyio import to_thread

log = structlog.get_logger(__name__)

SUFFIX: Final = ".json"


class LeaseRecords:
    """The records in one directory, which is made when the first is written."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._calls = anyio.CapacityLimiter(1)

    async def write(self, session_id: str, record: dict[str, Any]) -> None:
        """Write or replace the record of a session."""
        await to_thread.run_sync(self._write, session_id, record, limiter=self._calls)

    async def remove(self, session_id: str) -> None:
        """Remove the record of a session, if there is one."""
        path = self._path(session_id)
        await to_thread.run_sync(lambda: path.unlink(missing_ok=True), limiter=self._calls)

    async def read(self) -> list[tuple[str, dict[str, Any]]]:
        """Every record; one that cannot be read is removed."""
        return await to_thread.run_sync(self._read, limiter=self._calls)

    def _path(self, session_id: str) -> Path:
        return self._directory / f"{session_id}{SUFFIX}"

    def _write(self, session_id: str, record: dict[str, Any]) -> None:
        self._directory.mkdir(mode=0o700, exist_ok=True)
        path = self._path(session_id)
        temporary = path.with_suffix(".new")
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            json.dump(record, file)
        temporary.replace(path)

    def _read(self) -> list[tuple[str, dict[str, Any]]]:
        found = []
        with contextlib.suppress(FileNotFoundError):
            for path in sorted(self._directory.iterdir()):
                try:
                    found.append((path.stem, json.loads(path.read_text(encoding="utf-8"))))
                except ValueError:
                    log.warning("lease record unreadable", name=path.name)
                    path.unlink()
        return found
