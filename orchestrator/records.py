"""Records: executions as Redis keeps them. Above: store.py. Below: artifacts.py.

A record is `status encoding payload`. Encodings: `json` is the wire object; `zlib` the same,
compressed; `stored` is the key of the compressed object in the artifact store, then what is small
of it as JSON, for when the bulk is gone. The records of an ended session become one archive of
compressed JSON lines.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import zlib
from collections import deque
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from typing import Any, Final

import anyio
import structlog
from anyio import to_thread

from orchestrator.artifacts import ArtifactMissing, Artifacts, ArtifactStoreError
from orchestrator.errors import Unavailable
from orchestrator.executions import Execution

RECORD_LIMIT: Final = 16_000
"""Bytes of JSON that Redis keeps of one record: what many sessions have must stay small there."""

EXCERPT: Final = 1000
"""Characters of each text that stay in Redis beside the key of a stored record."""

GZIP: Final = 31
"""zlib's `wbits` for gzip files, so that people can read archives with `zcat`."""

DECOMPRESS_STEP: Final = 1024 * 1024
"""Bytes that reading an archive decompresses at once."""

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
            await self.drop([record.artifact])

    async def _encode(self, execution: Execution) -> EncodedRecord:
        status = execution.status.value.encode()
        texts = len(execution.code) + len(execution.stdout) + len(execution.stderr)
        if texts <= RECORD_LIMIT:
            text = _json(execution.to_wire())
        else:
            text = await to_thread.run_sync(_json, execution.to_wire())
        if len(text) <= RECORD_LIMIT:
            return EncodedRecord(status + b" json " + text, "")
        packed = await to_thread.run_sync(zlib.compress, text, 1)
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
        excerpt = _json(_excerpt(execution).to_wire())
        return EncodedRecord(b"%s stored %s %s" % (status, key.encode(), excerpt), key)

    async def decode(self, value: bytes) -> Execution:
        """The execution of a record.

        Raises:
            Unavailable: its bulk is in the artifact store, which does not answer.
        """
        text = await self._text(value)
        if len(text) <= RECORD_LIMIT:
            return _from_json(text)
        return await to_thread.run_sync(_from_json, text)

    async def _text(self, value: bytes) -> bytes:
        """The JSON of a record."""
        _, encoding, payload = value.split(b" ", 2)
        if encoding == b"json":
            return payload
        if encoding == b"stored":
            key, excerpt = payload.split(b" ", 1)
            try:
                with _readable():
                    payload = await self._overflow.get(key.decode())
            except Unavailable as unavailable:
                if isinstance(unavailable.__cause__, ArtifactMissing):
                    return excerpt
                raise
        return await to_thread.run_sync(zlib.decompress, payload)

    async def decode_all(self, values: Sequence[bytes]) -> list[Execution]:
        """The executions of several records, in order."""
        limit = anyio.Semaphore(READS_AT_ONCE)

        async def decode(value: bytes) -> Execution:
            async with limit:
                return await self.decode(value)

        return await asyncio.gather(*map(decode, values))

    async def archive(
        self, session_id: str, values: AsyncIterator[bytes], superseded: list[str]
    ) -> str | None:
        """Store records, oldest first, as compressed JSON lines, and return the key; None: none.

        `superseded` gets the keys of stored bulks that the archive now holds too.

        Raises:
            ArtifactStoreError: nothing is stored.
        """
        key = f"records/{session_id}/executions-{secrets.token_hex(4)}.jsonl.gz"
        count = 0

        async def packed() -> AsyncIterator[bytes]:
            nonlocal count
            compressor = zlib.compressobj(1, wbits=GZIP)
            async for value in values:
                count += 1
                _, encoding, payload = value.split(b" ", 2)
                if encoding == b"stored":
                    superseded.append(payload.split(b" ", 1)[0].decode())
                line = await self._text(value) + b"\n"
                yield await to_thread.run_sync(compressor.compress, line)
            yield compressor.flush()

        await self._overflow.put(key, packed())
        if count:
            return key
        await self.drop([key])
        return None

    async def find_archived(self, key: str, execution_id: str) -> Execution | None:
        """The execution with this id in an archive; None: it is not there."""
        async for line in self._archived_lines(key):
            if _id_of(line) == execution_id:
                return _from_json(line)
        return None

    async def archived_page(
        self, key: str, after: str | None, limit: int, *, newest_first: bool
    ) -> list[Execution] | None:
        """Up to `limit` executions beyond `after` in an archive; None: `after` is not there."""
        window: deque[bytes] = deque(maxlen=limit)
        met = after is None
        async for line in self._archived_lines(key):
            if after is not None and _id_of(line) == after:
                met = True
                if newest_first:
                    break
            elif newest_first or met:
                window.append(line)
                if not newest_first and len(window) == limit:
                    break
        if not met:
            return None
        executions = [_from_json(line) for line in window]
        return executions[::-1] if newest_first else executions

    async def _archived_lines(self, key: str) -> AsyncIterator[bytes]:
        decompressor = zlib.decompressobj(wbits=GZIP)
        rest = b""
        with _readable():
            try:
                async for chunk in self._overflow.stream(key):
                    while chunk:
                        text = await to_thread.run_sync(
                            decompressor.decompress, chunk, DECOMPRESS_STEP
                        )
                        chunk = decompressor.unconsumed_tail
                        *lines, rest = (rest + text).split(b"\n")
                        for line in lines:
                            yield line
            except ArtifactMissing:
                log.error("archived records are gone", key=key)
                return
        for line in (rest + decompressor.flush()).splitlines():
            yield line

    async def drop(self, keys: Sequence[str]) -> None:
        """Remove bulks that no record names any more; a failure only leaves them lying."""
        try:
            await self._overflow.delete(keys)
        except ArtifactStoreError as error:
            log.warning("records not removed", keys=list(keys), error=str(error))


@contextmanager
def _readable() -> Iterator[None]:
    """Turn what the artifact store says into what a caller is told."""
    try:
        yield
    except ArtifactStoreError as error:
        raise Unavailable(
            "The artifact store does not answer; try again shortly.",
            code="artifact_store",
            retry_after=1.0,
        ) from error


def _json(wire: Mapping[str, Any]) -> bytes:
    return json.dumps(wire, separators=(",", ":")).encode()


def _from_json(text: bytes) -> Execution:
    return Execution.from_wire(json.loads(text))


def _id_of(line: bytes) -> str:
    """The id of a record's JSON, which starts with it."""
    return line[len(b'{"id":"') : line.index(b'"', len(b'{"id":"'))].decode()


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
