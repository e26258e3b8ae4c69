"""A small HTTP/1.1 client on one keep-alive connection. Above: product.py. Below: asyncio.

The client is not what is measured. A request and its answer cost this one about 0.1 ms, where a
general client takes 0.5 to 1 ms, as much as the whole server. It reads what our server sends:
a body of known length or in chunks.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator
from typing import Any, Self
from urllib.parse import urlsplit

READ_BYTES = 256 * 1024

READER_LIMIT = 1024 * 1024
"""Bytes that the reader takes ahead of us."""


class HttpError(Exception):
    """The server answered with an error, or with something else than asked for."""


class Connection:
    """One connection; `async with` closes it."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self._host, self._port = parts.hostname or "127.0.0.1", parts.port or 80
        self._base = parts.path.rstrip("/")

    async def __aenter__(self) -> Self:
        """Connect."""
        self._reader, self._writer = await asyncio.open_connection(
            self._host, self._port, limit=READER_LIMIT
        )
        raw = self._writer.get_extra_info("socket")
        raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return self

    async def __aexit__(self, *_: object) -> None:
        """Close."""
        self._writer.close()
        with contextlib.suppress(ConnectionError):
            await self._writer.wait_closed()

    async def json(self, method: str, path: str, body: Any = None) -> Any:
        """Send JSON, or nothing, and return the JSON that comes back."""
        self._send(method, path, b"" if body is None else json.dumps(body).encode())
        return json.loads(b"".join([piece async for piece in self._answer()]))

    async def events(self, path: str, body: Any) -> AsyncIterator[dict[str, Any]]:
        """Post JSON and yield the server-sent events that come back."""
        self._send("POST", path, json.dumps(body).encode())
        rest = b""
        async for piece in self._answer():
            *frames, rest = (rest + piece).split(b"\n\n")
            for frame in frames:
                _, _, data = frame.partition(b"data: ")
                if data:
                    yield json.loads(data)

    async def upload(self, path: str, name: str, chunk: bytes, count: int) -> Any:
        """Post a file of `count` times the same bytes as a form, and return the answer's JSON."""
        boundary = "a-boundary-that-no-chunk-contains"
        head = (
            f'--{boundary}\r\ncontent-disposition: form-data; name="file"; filename="{name}"\r\n'
            "content-type: application/octet-stream\r\n\r\n"
        ).encode()
        tail = f"\r\n--{boundary}--\r\n".encode()
        length = len(head) + len(chunk) * count + len(tail)
        self._head("POST", path, length, f"multipart/form-data; boundary={boundary}")
        self._writer.write(head)
        for _ in range(count):
            self._writer.write(chunk)
            await self._writer.drain()
        self._writer.write(tail)
        return json.loads(b"".join([piece async for piece in self._answer()]))

    async def download(self, path: str) -> int:
        """Get a body, throw it away and return its length."""
        self._send("GET", path, b"")
        return sum([len(piece) async for piece in self._answer()])

    def _send(self, method: str, path: str, body: bytes) -> None:
        self._head(method, path, len(body), "application/json" if body else "")
        if body:
            self._writer.write(body)

    def _head(self, method: str, path: str, length: int, content_type: str) -> None:
        head = f"{method} {self._base}{path} HTTP/1.1\r\nhost: {self._host}:{self._port}\r\n"
        if length:
            head += f"content-length: {length}\r\ncontent-type: {content_type}\r\n"
        self._writer.write((head + "\r\n").encode())

    async def _answer(self) -> AsyncIterator[bytes]:
        head = (await self._reader.readuntil(b"\r\n\r\n")).decode().lower()
        status = head.split(" ", 2)[1]
        if status != "200":
            raise HttpError(f"{head}{(await self._reader.read(READ_BYTES)).decode()}")
        if "transfer-encoding: chunked" in head:
            while size := int(await self._reader.readline(), 16):
                yield (await self._reader.readexactly(size + 2))[:-2]
            await self._reader.readline()
            return
        left = int(head.partition("content-length: ")[2].partition("\r\n")[0])
        while left:
            piece = await self._reader.read(min(left, READ_BYTES))
            if not piece:
                raise HttpError("the connection was closed within an answer")
            left -= len(piece)
            yield piece
