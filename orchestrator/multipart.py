"""Uploads in multipart form data, read as they arrive. Above: routes/files.py. Below: request_body.

The file's bytes go from the socket to whoever iterates them: neither kept whole nor written twice.
The iteration ends only after the rest of the form has been read and found right: a broken or
forbidden form ends it with an error instead, and the writer leaves no half file behind.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Final
from urllib.parse import unquote_to_bytes

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser

from orchestrator.errors import BadRequest
from orchestrator.request_body import MIB, too_large

FORM_OVERHEAD_BYTES: Final = MIB
"""What a form may hold beside the file: boundaries, headers, fields that are skipped."""

FIELD_BYTES: Final = 1024
"""Longest value of a text field that is read. Ids stay below 100."""

HEADER_BYTES: Final = 16 * 1024
"""Longest header line of a part: a path of PATH_MAX bytes, every one of them escaped, and more."""

_BOUNDARY = re.compile(r';\s*boundary=(?:"([^"]{1,70})"|([^\s;"]{1,70}))\s*(?:;|$)', re.IGNORECASE)
_QUOTED = r'"((?:(?!"\s*(?:;|$)).)*)"\s*(?=;|$)'
_NAME = re.compile(r";\s*name=(?:" + _QUOTED + r"|([^\s;]*))", re.IGNORECASE | re.DOTALL)
_FILENAME = re.compile(r";\s*filename=(?:" + _QUOTED + r"|([^\s;]*))", re.IGNORECASE | re.DOTALL)
_EXTENDED_FILENAME = re.compile(r";\s*filename\*=utf-8'[^']*'([^\s;]+)", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class _PartBegins:
    disposition: bytes


@dataclass(frozen=True, slots=True)
class _PartData:
    data: bytes


class _PartEnds:
    pass


_FormEvent = _PartBegins | _PartData | _PartEnds


@dataclass(frozen=True, slots=True)
class Disposition:
    """What a part says about itself: the field's name, and the file's where it has one."""

    name: str
    filename: str | None


def parse_disposition(header: bytes) -> Disposition:
    """Read a `Content-Disposition` as browsers and HTTP libraries really write it.

    The header is UTF-8. A quote inside a name arrives as %22 or backslash-quote, a line break as
    %0D %0A; no other escape is undone, since a per cent sign may belong to the name.

    Raises:
        BadRequest: it is not UTF-8.
    """
    try:
        text = header.decode()
    except UnicodeDecodeError:
        raise BadRequest("The file name is not valid UTF-8.", param="file") from None
    name = _NAME.search(text)
    plain = _FILENAME.search(text)
    extended = _EXTENDED_FILENAME.search(text)
    filename = None
    if extended:
        filename = unquote_to_bytes(extended[1]).decode(errors="replace")
    elif plain:
        filename = _undo_escapes(_either(plain))
    return Disposition(_undo_escapes(_either(name)) if name else "", filename)


def _either(match: re.Match[str]) -> str:
    return str(match[1] if match[1] is not None else match[2])


def _undo_escapes(text: str) -> str:
    text = text.replace('\\"', '"')
    for escape, char in (("%22", '"'), ("%0D", "\r"), ("%0A", "\n")):
        text = text.replace(escape, char)
    return text


class UploadForm:
    """One multipart body: `find_file`, then iterate `chunks`."""

    def __init__(self, content_type: str, body: AsyncIterator[bytes], *, max_bytes: int) -> None:
        boundary = _BOUNDARY.search(content_type)
        if boundary is None:
            raise BadRequest("The content type names no usable multipart boundary.")
        self.name = ""
        """The file's name as it was sent, which may be hostile; set by `find_file`."""
        self.file_id: str | None = None
        """A text field `file_id`, where the form has one."""
        self.failure: Exception | None = None
        """Why `chunks` ended early; whoever carried the chunks may have wrapped it."""
        self._body = body
        self._max_bytes = max_bytes
        self._events: deque[_FormEvent] = deque()
        self._header_name = bytearray()
        self._header_value = bytearray()
        self._disposition = b""
        self._complete = False
        self._parser = MultipartParser(
            (boundary[1] or boundary[2]).encode("latin-1", "replace"),
            {
                "on_part_begin": self._on_part_begin,
                "on_header_field": self._on_header_field,
                "on_header_value": self._on_header_value,
                "on_header_end": self._on_header_end,
                "on_headers_finished": self._on_headers_finished,
                "on_part_data": self._on_part_data,
                "on_part_end": self._on_part_end,
                "on_end": self._on_end,
            },
            max_header_size=HEADER_BYTES,
        )

    async def find_file(self) -> bool:
        """Read up to the file's first byte; False when the form ends without a file.

        Raises:
            BadRequest: the form is broken, or the file has no name.
        """
        while (event := await self._next_event()) is not None:
            if not isinstance(event, _PartBegins):
                continue
            part = parse_disposition(event.disposition)
            if part.name == "file":
                if part.filename is None:
                    raise BadRequest("The part `file` has no file name.", param="file")
                self.name = part.filename
                return True
            await self._other_field(part)
        return False

    async def chunks(self) -> AsyncIterator[bytes]:
        """The file's bytes; the end of it is the end of a form that was right to its last byte.

        Raises:
            BadRequest: the form is broken, holds a second file, or a `file_id` as well.
            TooLarge: the file is over the limit.
            ClientGone: the client went away.
        """
        try:
            async for chunk in self._file_chunks():
                yield chunk
            await self._check_rest()
        except Exception as failure:
            self.failure = failure
            raise

    async def _file_chunks(self) -> AsyncIterator[bytes]:
        size = 0
        while isinstance(event := await self._next_event(), _PartData):
            size += len(event.data)
            if size > self._max_bytes:
                raise too_large(self._max_bytes, "file")
            yield event.data

    async def _check_rest(self) -> None:
        while (event := await self._next_event()) is not None:
            if isinstance(event, _PartBegins):
                part = parse_disposition(event.disposition)
                if part.name == "file":
                    raise BadRequest("Send one file per request.", param="file")
                await self._other_field(part)
        self.refuse_both()

    def refuse_both(self) -> None:
        """Refuse a form that holds a file and the id of another one."""
        if self.file_id is not None:
            raise BadRequest("Send either `file` or `file_id`, not both.", param="file_id")

    async def _other_field(self, part: Disposition) -> None:
        """Read a text field `file_id`; skip whatever else a client puts in."""
        value = bytearray()
        while isinstance(event := await self._next_event(), _PartData):
            if part.name == "file_id":
                value += event.data
                if len(value) > FIELD_BYTES:
                    raise BadRequest("file_id is too long.", param="file_id")
        if part.name == "file_id":
            self.file_id = value.decode(errors="replace")

    async def _next_event(self) -> _FormEvent | None:
        while not self._events:
            chunk = await anext(self._body, None)
            if chunk is None:
                if not self._complete:
                    raise BadRequest("The multipart body ends before its last boundary.")
                return None
            try:
                self._parser.write(chunk)
            except FormParserError:
                raise BadRequest("The multipart body is malformed.") from None
        return self._events.popleft()

    def _on_part_begin(self) -> None:
        self._disposition = b""

    def _on_header_field(self, data: bytes, start: int, end: int) -> None:
        self._header_name += data[start:end]

    def _on_header_value(self, data: bytes, start: int, end: int) -> None:
        self._header_value += data[start:end]

    def _on_header_end(self) -> None:
        if self._header_name.lower() == b"content-disposition":
            self._disposition = bytes(self._header_value)
        self._header_name.clear()
        self._header_value.clear()

    def _on_headers_finished(self) -> None:
        self._events.append(_PartBegins(self._disposition))

    def _on_part_data(self, data: bytes, start: int, end: int) -> None:
        self._events.append(_PartData(data[start:end]))

    def _on_part_end(self) -> None:
        self._events.append(_PartEnds())

    def _on_end(self) -> None:
        self._complete = True
