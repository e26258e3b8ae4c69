"""Records: executions as Redis keeps them. Above: store.py. Below: artifacts.py.

A record is `status encoding payload`. Encodings: `json` is the wire object; `zlib` the same,
compressed; `stored` is the key of the compressed object in the artifact store, then what is small
of it as JSON, for when the bulk is gone.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import zlib
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Final

import anyio
import anyio.to_thread
import structlog

from orchestrator.artifacts import ArtifactMissing, Artifacts, ArtifactStoreError
from orchestrator.errors import Unavailable
from orchestrator.executions import Execution

RECORD_LIMIT: Final = 16_000
"""Bytes of JSON that Redis keeps of one record. Architecture section 2: nothing over 16 kB."""

EXCERPT: Final = 1000
"""Characters of each text that stay in Redis beside the key of a stored record."""

READS_AT_ONCE: Final = 8
"""Stored records that a list fetches at once."""

log = structlog.get_logger(__name__)


@dataclass(slots=True)
class EncodedRecord:
    """A record on its way to Redis."""

    value: bytes
    artifact: str
    """Key of the stored bulk; empty when there is none."""
    kept: bool = False
    """Set when Redis took the record; a bulk that no record names is removed again."""


class Records:
    """Encodes and decodes executions, large ones by way of the artifact store."""

    def __init__(self, overflow: Artifacts) -> None:
        self._overflow = overflow

    @asynccontextmanager
    async def encoded(self, execution: Execution) -> AsyncIterator[EncodedRecord]:
        """The record of an execution; its bulk is stored before the block."""
        record = await self._encode(execution)
        yield record
        if record.artifact and not record.kept:
            try:
                await self._overflow.delete([record.artifact])
            except ArtifactStoreError as error:
                log.warning("record not removed", key=record.artifact, error=str(error))

    async def _encode(self, execution: Execution) -> EncodedRecord:
        status = execution.status.value.encode()
        text = json.dumps(execution.to_wire(), separators=(",", ":")).encode()
        if len(text) <= RECORD_LIMIT:
            return EncodedRecord(status + b" json " + text, "")
        packed = await anyio.to_thread.run_sync(zlib.compress, text, 1)
        key = f"records/{execution.session_id}/{execution.id}/{secrets.token_hex(4)}"
        try:
            await self._overflow.put(key, packed)
        except ArtifactStoreError as error:
            log.warning(
                "large record kept in redis",
                execution_id=execution.id,
                bytes=len(packed),
                error=str(error),
            )
            return EncodedRecord(status + b" zlib " + packed, "")
        excerpt = json.dumps(_excerpt(execution).to_wire(), separators=(",", ":")).encode()
        return EncodedRecord(b"%s stored %s %s" % (status, key.encode(), excerpt), key)

    async def decode(self, value: bytes) -> Execution:
        """The execution of a record.

        Raises:
            Unavailable: its bulk is in the artifact store, which does not answer.
        """
        _, encoding, payload = value.split(b" ", 2)
        if encoding == b"json":
            return Execution.from_wire(json.loads(payload))
        if encoding == b"stored":
            key, excerpt = payload.split(b" ", 1)
            try:
                payload = await self._overflow.get(key.decode())
            except ArtifactMissing:
                return Execution.from_wire(json.loads(excerpt))
            except ArtifactStoreError as error:
                raise Unavailable(
                    "The artifact store does not answer; try again shortly.",
                    code="artifact_store",
                    retry_after=1.0,
                ) from error
        text = await anyio.to_thread.run_sync(zlib.decompress, payload)
        return Execution.from_wire(json.loads(text))

    async def decode_all(self, values: Sequence[bytes]) -> list[Execution]:
        """The executions of several records, in order."""
        limit = anyio.Semaphore(READS_AT_ONCE)

        async def decode(value: bytes) -> Execution:
            async with limit:
                return await self.decode(value)

        return await asyncio.gather(*map(decode, values))


def _excerpt(execution: Execution) -> Execution:
    """What is small of an execution, marked as truncated."""
    error = execution.error
    if error is not None:
        error = {
            "name": str(error.get("name", ""))[:EXCERPT],
            "value": str(error.get("value", ""))[:EXCERPT],
            "traceback": str(error.get("traceback", ""))[-EXCERPT:],
        }
    return replace(
        execution,
        code=execution.code[:EXCERPT],
        stdout=execution.stdout[:EXCERPT],
        stderr=execution.stderr[:EXCERPT],
        result=execution.result if execution.result is None else execution.result[:EXCERPT],
        error=error,
        outputs=(),
        files=execution.files[:20],
        truncated=True,
    )
