"""SessionFiles: the files of one session that has a slot here. Above: live_session.py, owner.py.

Below: kernelpool's workspace, the store, the artifact store. Uploads and what code writes lie in
the workspace; each is recorded in the store, and code's files are copied to the artifact store in
the background, where they outlive the session. Heavy parts of outputs go there first.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any, Final

import structlog

from kernelpool import (
    DisplayData,
    ExecuteResult,
    FileMissing,
    OpenFile,
    Snapshot,
    UpdateDisplay,
    Workspace,
    WorkspaceError,
    diff,
    display_paths,
)
from orchestrator.artifacts import Artifacts, ArtifactStoreError
from orchestrator.bundles import heavy_parts
from orchestrator.dispatch import FileContent
from orchestrator.errors import FileNotFound, ServiceError
from orchestrator.schema import file_object
from orchestrator.sessions import SessionFile
from orchestrator.store import FileWritten, Store

log = structlog.get_logger(__name__)

OUTPUTS: Final = "outputs"
"""Folder of the workspace that gets a copy of each heavy output; not watched for changes."""

FILES_TOLD: Final = 1_000
"""Changed files that an execution names; a record of more would be larger than what it tells of."""

ARTIFACT_BYTES: Final = 512 * 1024 * 1024
"""Largest file that is kept beyond its session. Source: the hosted API's limit for a file."""

OUTPUT_BYTES: Final = 1024 * 1024 * 1024
"""Heavy parts of outputs kept for one session: code that shows pictures for ever must not fill the
artifact store. As much as a workspace holds."""

OUTPUT_FILES: Final = 10_000
"""The same as a number of files: each takes a record in Redis."""

Shown = DisplayData | ExecuteResult | UpdateDisplay


class SessionFiles:
    """The files of one session, in its workspace and in the records."""

    def __init__(
        self, session_id: str, workspace: Workspace, store: Store, artifacts: Artifacts
    ) -> None:
        self._session_id = session_id
        self._workspace = workspace
        self._store = store
        self._artifacts = artifacts
        self._snapshot: Snapshot | None = None
        self._uploaded: set[str] = set()
        self._to_store: dict[str, SessionFile] = {}
        self._stored: dict[str, str] = {}
        """Artifact keys of files of the workspace by path, to be deleted with them."""
        self._to_drop: list[str] = []
        self._storing: asyncio.Task[None] | None = None
        self._output_bytes = 0
        self._output_files = 0
        self._full_told = False
        """Whether the execution under way was told that no more outputs are kept."""

    async def put(self, name: str, chunks: AsyncIterator[bytes], *, max_bytes: int) -> SessionFile:
        """Write an upload to the workspace and record it.

        Raises:
            NameRefused, WorkspaceFull: nothing was changed.
        """
        size = await self._workspace.write(name, chunks, max_bytes=max_bytes)
        self._uploaded.add(name)
        (file,) = await self._store.apply_file_changes(
            self._session_id, written=[FileWritten(name, size, "user")], removed=[]
        )
        return file

    async def restore(self, file: SessionFile) -> None:
        """Put back a file of the session that this one replaces, at its path; a new id.

        Raises:
            WorkspaceError: it does not fit.
            ArtifactStoreError: its bytes cannot be had.
        """
        if file.artifact is None or await self._artifacts.size(file.artifact) is None:
            log.info("file not restored", session_id=self._session_id, path=file.path)
            return
        size = await self._workspace.write(
            file.path, self._artifacts.stream(file.artifact), max_bytes=ARTIFACT_BYTES
        )
        await self._store.apply_file_changes(
            self._session_id, written=[FileWritten(file.path, size, file.source)], removed=[]
        )

    @asynccontextmanager
    async def read(self, file_id: str) -> AsyncIterator[FileContent]:
        """Open a file: as it is in the workspace, else as it was stored.

        An output is what the code showed then, whatever became of its copy in the workspace.

        Raises:
            FileNotFound: unknown, or gone.
        """
        file = await self._store.get_file(self._session_id, file_id)
        if file.artifact is not None and file.path.startswith(f"{OUTPUTS}/"):
            async with stored_content(file, self._artifacts) as content:
                yield content
            return
        try:
            opened = await self._workspace.open(file.path)
        except FileMissing:
            async with stored_content(file, self._artifacts) as content:
                yield content
            return
        async with opened:
            yield FileContent(replace(file, bytes=opened.size), opened.size, opened.chunks())

    async def delete(self, file_id: str) -> None:
        """Remove a file from the workspace and the records.

        Raises:
            FileNotFound: unknown.
        """
        file = await self._store.remove_file(self._session_id, file_id)
        if file.artifact is not None:
            self._stored[file.path] = file.artifact
        self._drop_later(file.path)
        try:
            await self._workspace.remove(file.path)
        except FileMissing:
            log.debug("file was gone already", session_id=self._session_id)
        self._uploaded.add(file.path)

    async def look(self) -> None:
        """Take the workspace as it is now for what code has not changed."""
        self._full_told = False
        if self._snapshot is None or self._uploaded:
            self._uploaded.clear()
            self._snapshot = await self._workspace.scan(exclude=(OUTPUTS,))

    async def collect(self) -> tuple[list[dict[str, Any]], str | None]:
        """Record what changed since the last look.

        Returns:
            Container file objects with `change`, and a sentence when some changes are not told.
        """
        before = self._snapshot
        self._snapshot = after = await self._workspace.scan(exclude=(OUTPUTS,))
        changes = diff(before, after) if before is not None else None
        if not changes:
            return [], None
        trouble = None
        if after.truncated:
            trouble = (
                f"The container has more than {len(after.files):,} files; others are not seen."
            )
        names = display_paths([*after.files, *changes.deleted])
        change_of = {names[path]: "created" for path in changes.created}
        change_of |= {names[path]: "modified" for path in changes.modified}
        written = [
            FileWritten(names[path], after.size(path), "assistant")
            for path in (*changes.created, *changes.modified)
            if names[path] not in self._uploaded
        ]
        removed = [names[path] for path in changes.deleted]
        told = removed[:FILES_TOLD]
        gone = [await self._store.find_file(self._session_id, path) for path in told]
        files = await self._store.apply_file_changes(
            self._session_id, written=written, removed=removed
        )
        for file in files:
            self._store_later(file)
        for path in removed:
            self._drop_later(path)
        if (count := len(files) + len(removed)) > FILES_TOLD:
            trouble = trouble or (
                f"{count:,} files changed; {FILES_TOLD:,} are told here, the list of the "
                "container's files has all."
            )
        objects = [
            *(file_object(file) | {"change": change_of[file.path]} for file in files[:FILES_TOLD]),
            *(file_object(file) | {"change": "deleted"} for file in gone if file is not None),
        ]
        return objects[:FILES_TOLD], trouble

    async def keep(self, event: Shown, number: str) -> tuple[Shown, str | None]:
        """Store the heavy parts of an output and put references in their place.

        Args:
            event: The output.
            number: Begins the files' names, such as `3-1`; never the same twice.

        Returns:
            The output to go on with, and a sentence when something could not be kept.
        """
        parts = heavy_parts(event.data)
        if not parts:
            return event, None
        data = dict(event.data)
        trouble = None
        for place, part in enumerate(parts):
            if not self._has_room(len(part.content)):
                del data[part.mime]
                if not self._full_told:
                    self._full_told = True
                    trouble = (
                        f"Pictures and other large outputs are left out: a container keeps "
                        f"{OUTPUT_FILES:,} of them and {OUTPUT_BYTES:,} bytes."
                    )
                continue
            suffix = f"-{place}" if place else ""
            path = f"{OUTPUTS}/{number}{suffix}{part.extension}"
            key = f"sessions/{self._session_id}/outputs/{number}{suffix}{part.extension}"
            try:
                await self._artifacts.put(key, part.content)
                stored: str | None = key
            except ArtifactStoreError as error:
                log.warning("output not stored", session_id=self._session_id, error=str(error))
                stored, trouble = None, f"The artifact store did not take {path}."
            try:
                await self._workspace.copy_in(path, part.content)
            except WorkspaceError as error:
                trouble = trouble or f"No copy of {path} in the workspace: {error}"
            (file,) = await self._store.apply_file_changes(
                self._session_id,
                written=[FileWritten(path, len(part.content), "assistant", stored)],
                removed=[],
            )
            data[part.mime] = {"file_id": file.id, "bytes": file.bytes}
        return replace(event, data=data), trouble

    def _has_room(self, size: int) -> bool:
        if self._output_files >= OUTPUT_FILES or self._output_bytes + size > OUTPUT_BYTES:
            return False
        self._output_files += 1
        self._output_bytes += size
        return True

    async def settle(self) -> None:
        """Wait until everything that is to outlive the session is stored."""
        while self._storing is not None and not self._storing.done():
            await asyncio.wait([self._storing])

    async def archive(self) -> None:
        """Store every file of the workspace that is not stored yet, within the size limit."""
        await self.settle()

        async def store(path: str, opened: OpenFile) -> None:
            shown = display_paths([path])[path]
            file = await self._store.find_file(self._session_id, shown)
            if file is not None and file.artifact is None:
                await self._store_file(file, opened)

        try:
            archived = await self._workspace.archive(
                store, max_bytes=ARTIFACT_BYTES, exclude=(OUTPUTS,)
            )
        except (ArtifactStoreError, ServiceError, OSError) as error:
            log.warning("workspace not archived", session_id=self._session_id, error=str(error))
            return
        if archived.skipped:
            log.info("files skipped", session_id=self._session_id, count=len(archived.skipped))

    def _store_later(self, file: SessionFile) -> None:
        self._to_store[file.path] = file
        self._go_on_storing()

    def _drop_later(self, path: str) -> None:
        """The file is gone: nobody can ask for its bytes any more."""
        self._to_store.pop(path, None)
        if (key := self._stored.pop(path, None)) is not None:
            self._to_drop.append(key)
            self._go_on_storing()

    def _go_on_storing(self) -> None:
        if self._storing is None or self._storing.done():
            self._storing = asyncio.create_task(self._store_all())

    async def _store_all(self) -> None:
        while self._to_store or self._to_drop:
            await self._drop_all()
            if not self._to_store:
                continue
            path, file = self._to_store.popitem()
            try:
                async with await self._workspace.open(path) as opened:
                    if opened.size <= ARTIFACT_BYTES:
                        await self._store_file(file, opened)
            except FileMissing:
                continue
            except (ArtifactStoreError, ServiceError, OSError) as error:
                log.warning("file not stored", session_id=self._session_id, error=str(error))

    async def _drop_all(self) -> None:
        dropped, self._to_drop = self._to_drop, []
        try:
            await self._artifacts.delete(dropped)
        except ArtifactStoreError as error:
            log.warning("bytes not deleted", session_id=self._session_id, error=str(error))

    async def _store_file(self, file: SessionFile, opened: OpenFile) -> None:
        key = f"sessions/{self._session_id}/files/{file.id}"
        await self._artifacts.put(key, opened.chunks())
        try:
            await self._store.set_artifact(self._session_id, file.id, key)
        except FileNotFound:
            self._to_drop.append(key)
        else:
            self._stored[file.path] = key


@asynccontextmanager
async def stored_content(file: SessionFile, artifacts: Artifacts) -> AsyncIterator[FileContent]:
    """A file as the artifact store has it.

    Raises:
        FileNotFound: it was never stored, or its retention time is over.
    """
    size = await artifacts.size(file.artifact) if file.artifact is not None else None
    if file.artifact is None or size is None:
        raise FileNotFound(file.id)
    yield FileContent(replace(file, bytes=size), size, artifacts.stream(file.artifact))
