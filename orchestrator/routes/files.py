"""Container files: upload, list, retrieve, download, delete.

Above: app.py. Below: the dispatcher for bytes, store.py for records. Bytes pass through as they
come: an upload goes from the socket to the workspace, a download the other way.
"""

from __future__ import annotations

import mimetypes
import re
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Final
from urllib.parse import quote

from fastapi import APIRouter, Request, Response
from starlette.types import Receive, Scope, Send

from orchestrator.auth import tenant_of
from orchestrator.dispatch import Dispatcher, FileContent
from orchestrator.errors import BadRequest, NotFound, ServiceError
from orchestrator.event_stream import while_connected
from orchestrator.multipart import FORM_OVERHEAD_BYTES, UploadForm
from orchestrator.openapi import Responses, answers, json_body, refusals
from orchestrator.request_body import (
    body_chunks,
    media_type,
    read_json,
    refuse_longer,
    refuse_other_media,
    too_large,
)
from orchestrator.routes.paging import PageOf
from orchestrator.schema import (
    ContainerFileList,
    ContainerFileObject,
    CreateContainerFile,
    DeletedContainerFile,
    deleted_object,
    file_object,
    list_object,
)
from orchestrator.sessions import Session, SessionFile
from orchestrator.store import Store
from orchestrator.telemetry import Metrics
from orchestrator.wire import JsonReply

TOUCH_SECONDS: Final = 20.0
"""While an upload goes on, its container is marked as used this often: a third of the shortest
idle timeout that can be asked for."""

_TYPES: Final = mimetypes.MimeTypes(filenames=())
"""Python's own table; the host's files would make the answer depend on the host."""

_SCRIPTED: Final = frozenset(
    {"text/html", "image/svg+xml", "text/xml", "application/xml", "application/xhtml+xml"}
)
"""Types that a browser may run script from; sent as plain bytes."""

_BYTES: Final = "application/octet-stream"

_CONTENT_ANSWERS: Final[Responses] = {
    200: {
        "description": "The file's bytes.",
        "content": {_BYTES: {"schema": {"type": "string", "format": "binary"}}},
    },
    206: {"description": "The bytes of the range that was asked for."},
    **refusals(404, 416),
}

_UPLOAD_FORM: Final = {
    "multipart/form-data": {
        "schema": {
            "type": "object",
            "required": ["file"],
            "properties": {"file": {"type": "string", "format": "binary"}},
        }
    }
}


class RangeNotSatisfiable(ServiceError):
    """The range lies outside the file."""

    status = 416
    type = "invalid_request_error"
    code = "range_not_satisfiable"

    def __init__(self, size: int) -> None:
        super().__init__(f"The file has {size} bytes; the range lies outside of them.")
        self.headers |= {"content-range": f"bytes */{size}", "accept-ranges": "bytes"}


class Files:
    """Handlers of the container file routes."""

    def __init__(
        self, store: Store, dispatcher: Dispatcher, metrics: Metrics, *, max_bytes: int
    ) -> None:
        self._store = store
        self._dispatcher = dispatcher
        self._metrics = metrics
        self._max_bytes = max_bytes

    def router(self) -> APIRouter:
        """The routes, to be mounted under the base path."""
        router = APIRouter(
            prefix="/containers/{container_id}/files",
            tags=["container files"],
            redirect_slashes=False,
        )
        router.add_api_route(
            "",
            self.create,
            methods=["POST"],
            operation_id="create_container_file",
            responses=answers(ContainerFileObject, 400, 404, 413, 415),
            openapi_extra=json_body(CreateContainerFile, **_UPLOAD_FORM),
        )
        router.add_api_route(
            "",
            self.list,
            methods=["GET"],
            operation_id="list_container_files",
            responses=answers(ContainerFileList, 400, 404),
        )
        router.add_api_route(
            "/{file_id}",
            self.retrieve,
            methods=["GET"],
            operation_id="retrieve_container_file",
            responses=answers(ContainerFileObject, 404),
        )
        router.add_api_route(
            "/{file_id}/content",
            self.content,
            methods=["GET"],
            operation_id="download_container_file",
            response_class=Response,
            responses=_CONTENT_ANSWERS,
        )
        router.add_api_route(
            "/{file_id}/content", self.content, methods=["HEAD"], include_in_schema=False
        )
        router.add_api_route(
            "/{file_id}",
            self.delete,
            methods=["DELETE"],
            operation_id="delete_container_file",
            responses=answers(DeletedContainerFile, 404),
        )
        return router

    async def create(self, request: Request, container_id: str) -> Response:
        """Upload a file under its own name; a file of that name is replaced and keeps its id."""
        refuse_other_media(request, "multipart/form-data", "application/json")
        if media_type(request) != "multipart/form-data":
            asked = await read_json(request, CreateContainerFile)
            await self._running(request, container_id)
            raise _no_file(asked.file_id)
        limit = self._max_bytes + FORM_OVERHEAD_BYTES
        refuse_longer(request, limit, too_large(self._max_bytes, "file"))
        session = await self._running(request, container_id)
        body = body_chunks(request.receive, limit)
        content_type = request.headers["content-type"]
        form = UploadForm(content_type, body, max_bytes=self._max_bytes)
        if not await form.find_file():
            if form.file_id is not None:
                raise _no_file(form.file_id)
            raise BadRequest("Send a file in the part `file`.", param="file")
        form.refuse_both()
        return JsonReply(file_object(await self._put(session, form)))

    async def list(self, request: Request, container_id: str, page: PageOf) -> Response:
        """List a container's files."""
        session = await self._store.get_session(container_id, tenant_of(request))
        session.check_running()
        found = await self._store.list_files(container_id, page)
        return JsonReply(list_object(map(file_object, found.items), has_more=found.has_more))

    async def retrieve(self, request: Request, container_id: str, file_id: str) -> Response:
        """Look at a file's record."""
        session = await self._store.get_session(container_id, tenant_of(request))
        file = await self._store.get_file(container_id, file_id)
        if not file.outlives_session:
            session.check_running()
        return JsonReply(file_object(file))

    async def content(self, request: Request, container_id: str, file_id: str) -> Response:
        """Download a file. Of an expired container, what code produced can still be fetched."""
        await self._store.touch_session(container_id, tenant_of(request))
        return ContentReply(self._dispatcher, container_id, file_id)

    async def delete(self, request: Request, container_id: str, file_id: str) -> Response:
        """Remove a file from the workspace."""
        await self._running(request, container_id)
        await self._dispatcher.delete_file(container_id, file_id)
        return JsonReply(deleted_object(file_id, "container.file"))

    async def _running(self, request: Request, container_id: str) -> Session:
        session = await self._store.touch_session(container_id, tenant_of(request))
        session.check_running()
        return session

    async def _put(self, session: Session, form: UploadForm) -> SessionFile:
        async with aclosing(self._keeping_alive(session, form)) as chunks:
            try:
                file = await self._dispatcher.put_file(session.id, form.name, chunks)
            except Exception:
                if form.failure is not None:
                    raise form.failure from None
                raise
        self._metrics.uploaded.add(amount=file.bytes)
        return file

    async def _keeping_alive(
        self, session: Session, form: UploadForm
    ) -> AsyncGenerator[bytes, None]:
        touched = time.monotonic()
        async for chunk in form.chunks():
            yield chunk
            if time.monotonic() - touched > TOUCH_SECONDS:
                touched = time.monotonic()
                await self._store.touch_session(session.id, session.tenant)


def _no_file(file_id: str) -> NotFound:
    return NotFound(f"File with id '{file_id}' not found.", param="file_id")


@dataclass(frozen=True, slots=True)
class Span:
    """The part of a file that is sent: from `start` up to and without `end`."""

    start: int
    end: int
    partial: bool


_ONE_RANGE = re.compile(r"^bytes=\s*(\d{0,18})\s*-\s*(\d{0,18})\s*$", re.IGNORECASE)


def requested_span(header: str | None, size: int) -> Span:
    """What a `Range` header asks for. Several ranges, or what is no range, mean the whole file.

    Source: RFC 9110 section 14.

    Raises:
        RangeNotSatisfiable: it lies outside the file.
    """
    whole = Span(0, size, partial=False)
    match = _ONE_RANGE.match(header) if header else None
    if match is None or not (match[1] or match[2]):
        return whole
    if not match[1]:
        start, end = max(0, size - int(match[2])), size
    else:
        start = int(match[1])
        end = min(int(match[2]) + 1, size) if match[2] else size
        if match[2] and int(match[2]) < start:
            return whole
    if start >= end:
        raise RangeNotSatisfiable(size)
    return Span(start, end, partial=True)


def download_type(path: str) -> str:
    """The content type that a file is sent with; nothing that a browser would run."""
    guessed, encoding = _TYPES.guess_type(path, strict=True)
    return _BYTES if guessed is None or encoding or guessed in _SCRIPTED else guessed


class ContentReply(Response):
    """Answers with a file's bytes, read while they are sent."""

    def __init__(self, dispatcher: Dispatcher, session_id: str, file_id: str) -> None:
        super().__init__()
        self._dispatcher = dispatcher
        self._session_id = session_id
        self._file_id = file_id

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the file."""
        request = Request(scope)
        # A range that depends on a validator is void here, since no validator is handed out.
        header = None if "if-range" in request.headers else request.headers.get("range")
        async with (
            while_connected(receive),
            self._dispatcher.read_file(self._session_id, self._file_id) as content,
        ):
            span = requested_span(header, content.size)
            await send(
                {
                    "type": "http.response.start",
                    "status": 206 if span.partial else 200,
                    "headers": _headers(content, span),
                }
            )
            if request.method != "HEAD":
                async for chunk in cut_to(span, content.chunks):
                    await send({"type": "http.response.body", "body": chunk, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})


def _headers(content: FileContent, span: Span) -> list[tuple[bytes, bytes]]:
    name = PurePosixPath(content.file.path).name
    headers = {
        "content-type": download_type(name),
        "content-length": str(span.end - span.start),
        "content-disposition": f"attachment; filename*=UTF-8''{quote(name, safe='')}",
        "accept-ranges": "bytes",
        "cache-control": "private, no-store",
        "content-security-policy": "default-src 'none'; sandbox",
        "x-content-type-options": "nosniff",
    }
    if span.partial:
        headers["content-range"] = f"bytes {span.start}-{span.end - 1}/{content.size}"
    return [(key.encode(), value.encode()) for key, value in headers.items()]


async def cut_to(span: Span, chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """The bytes of the span; a file that has become shorter ends with an error.

    The connection is then cut, so that nobody takes a part for the whole.
    """
    position = 0
    async for chunk in chunks:
        part = chunk[max(0, span.start - position) : max(0, span.end - position)]
        position += len(chunk)
        if part:
            yield part
        if position >= span.end:
            return
    if position < span.end:
        raise ServiceError("The file became shorter while it was read.")
