"""Artifacts: bytes by key, in a local directory or an object store. Above: records, owner.

The only file that knows obstore; its errors, and the operating system's, become
`ArtifactStoreError` here. Keys are relative paths of plain segments: `records/<session>/<id>`.
"""

from __future__ import annotations

from collections.abc import AsyncIterable, AsyncIterator, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

import obstore
from obstore.exceptions import BaseError
from obstore.store import LocalStore, ObjectStore, from_url

PART_BYTES: Final = 5 * 1024 * 1024
"""Bytes per part of a streamed upload. Source: S3 takes no smaller parts."""

PARTS_AT_ONCE: Final = 2
"""Parts in flight per upload: bounds its memory to about 3 parts."""

CHUNK_BYTES: Final = 256 * 1024
"""Least bytes per chunk that `stream` yields, the last excepted."""

DELETE_BATCH: Final = 1000
"""Keys per request. Source: S3's limit for a multi-object delete."""


class ArtifactStoreError(Exception):
    """The artifact store refused or did not answer; the message names the cause."""


class ArtifactMissing(ArtifactStoreError):
    """There is nothing under that key."""


class Artifacts:
    """Bytes by key. A reader sees the whole of a version or nothing of it."""

    def __init__(self, store: ObjectStore, place: str) -> None:
        self._store = store
        self.place = place
        """Where the bytes are, for people: a directory or a URL without its credentials."""

    def __repr__(self) -> str:
        return f"<Artifacts in {self.place}>"

    @classmethod
    def open(cls, url_or_path: str) -> Artifacts:
        """The store at a directory, which is made, or at a URL (`s3://bucket/prefix`, ...).

        Touches the disk, so call it before the event loop runs, or in a thread.

        Raises:
            ArtifactStoreError: the directory cannot be made, or the URL is none that is understood.
        """
        url = urlsplit(url_or_path)
        with _translated(f"open {url.scheme or 'directory'}"):
            if url.scheme in {"", "file"}:
                directory = Path(url.path if url.scheme else url_or_path).absolute()
                directory.mkdir(parents=True, exist_ok=True, mode=0o700)
                return cls(LocalStore(prefix=directory, automatic_cleanup=True), str(directory))
            place = f"{url.scheme}://{url.hostname or ''}{url.path}"
            return cls(from_url(url_or_path), place)

    async def put(self, key: str, source: bytes | AsyncIterator[bytes]) -> int:
        """Store bytes under a key and return how many; an earlier version is replaced whole.

        An iterator is stored part by part, so memory stays flat; when it raises, nothing is
        stored and what it raised passes through.
        """
        if isinstance(source, bytes):
            with _translated(f"store {key}"):
                await obstore.put_async(self._store, key, source, use_multipart=False)
            return len(source)
        counted = _Counted(source)
        try:
            with _translated(f"store {key}"):
                await obstore.put_async(
                    self._store,
                    key,
                    counted,
                    use_multipart=True,
                    chunk_size=PART_BYTES,
                    max_concurrency=PARTS_AT_ONCE,
                )
        except BaseException:
            if counted.raised is not None:
                raise counted.raised from None
            raise
        return counted.size

    async def get(self, key: str) -> bytes:
        """All bytes under a key.

        Raises:
            ArtifactMissing: there is nothing under that key.
        """
        with _translated(f"read {key}"):
            result = await obstore.get_async(self._store, key)
            return bytes(await result.bytes_async())

    async def stream(
        self, key: str, *, start: int = 0, end: int | None = None
    ) -> AsyncIterator[bytes]:
        """The bytes from `start` up to but not including `end`, in chunks.

        Raises:
            ArtifactMissing: there is nothing under that key.
        """
        with _translated(f"read {key}"):
            if end is not None and end <= start:
                return
            if start == 0 and end is None:
                result = await obstore.get_async(self._store, key)
            else:
                size = (await obstore.head_async(self._store, key))["size"]
                last = size if end is None else min(end, size)
                if last <= start:
                    return
                result = await obstore.get_async(self._store, key, options={"range": (start, last)})
            chunks = result.stream(min_chunk_size=CHUNK_BYTES)
        while True:
            with _translated(f"read {key}"):
                try:
                    chunk = bytes(await anext(chunks))
                except StopAsyncIteration:
                    return
            yield chunk

    async def size(self, key: str) -> int | None:
        """Bytes under a key; None when there is nothing."""
        try:
            with _translated(f"look up {key}"):
                return int((await obstore.head_async(self._store, key))["size"])
        except ArtifactMissing:
            return None

    async def delete(self, keys: Iterable[str]) -> None:
        """Remove what is under these keys; missing ones are fine."""
        for batch in _batches(keys):
            try:
                with _translated("delete"):
                    await obstore.delete_async(self._store, batch)
            except ArtifactMissing:
                for key in batch:
                    await self._delete_one(key)

    async def _delete_one(self, key: str) -> None:
        try:
            with _translated(f"delete {key}"):
                await obstore.delete_async(self._store, key)
        except ArtifactMissing:
            return

    async def delete_prefix(self, prefix: str) -> int:
        """Remove everything below a prefix of whole segments and return how many there were."""
        with _translated(f"list {prefix}"):
            keys = [
                entry["path"]
                async for batch in obstore.list(self._store, prefix=prefix)
                for entry in batch
            ]
        await self.delete(keys)
        return len(keys)


class _Counted:
    """Passes chunks through, counts their bytes and remembers what the source raised."""

    def __init__(self, source: AsyncIterable[bytes]) -> None:
        self._source = source.__aiter__()
        self.size = 0
        self.raised: BaseException | None = None

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self

    async def __anext__(self) -> bytes:
        try:
            chunk = await self._source.__anext__()
        except StopAsyncIteration:
            raise
        except BaseException as error:
            self.raised = error
            raise
        self.size += len(chunk)
        return chunk


@contextmanager
def _translated(what: str) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError as error:
        raise ArtifactMissing(f"could not {what}: nothing is stored there") from error
    except (BaseError, OSError, ValueError) as error:
        raise ArtifactStoreError(f"could not {what}: {error}") from error


def _batches(keys: Iterable[str]) -> Iterator[list[str]]:
    batch: list[str] = []
    for key in keys:
        batch.append(key)
        if len(batch) == DELETE_BATCH:
            yield batch
            batch = []
    if batch:
        yield batch
