"""Stands between the service and the Docker Engine and notes every request. Above: create.py.

Below: two unix sockets. What the service asks of the engine on some path can be told exactly.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

_REQUEST = re.compile(rb"^(GET|HEAD|POST|PUT|DELETE) (\S+) HTTP/1\.1\r\n", re.MULTILINE)

READ_BYTES = 64 * 1024


class EngineTap:
    """The requests seen since `clear`, as `METHOD path`."""

    def __init__(self, engine: str, address: str) -> None:
        self.address = address
        """A DOCKER_HOST for the service."""
        self.seen: list[str] = []
        self._engine = engine

    def clear(self) -> None:
        """Forget what was seen."""
        self.seen.clear()

    async def carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Carry one connection both ways."""
        engine_reader, engine_writer = await asyncio.open_unix_connection(self._engine)
        ways = [
            asyncio.ensure_future(self._pump(reader, engine_writer, note=True)),
            asyncio.ensure_future(self._pump(engine_reader, writer, note=False)),
        ]
        try:
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for way in ways:
                way.cancel()
            engine_writer.close()
            writer.close()

    async def _pump(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, note: bool
    ) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(READ_BYTES):
                if note:
                    self.seen += [
                        f"{method.decode()} {path.decode()}"
                        for method, path in _REQUEST.findall(data)
                    ]
                writer.write(data)
                await writer.drain()


@asynccontextmanager
async def engine_tap(directory: Path) -> AsyncIterator[EngineTap | None]:
    """A tap on the engine that DOCKER_HOST names; None where that is no unix socket."""
    engine = os.environ.get("DOCKER_HOST") or "unix:///var/run/docker.sock"
    if not engine.startswith("unix://"):
        yield None
        return
    path = directory / "tap.sock"
    tap = EngineTap(engine.removeprefix("unix://"), f"unix://{path}")
    connections: set[asyncio.Task[None]] = set()

    def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.ensure_future(tap.carry(reader, writer))
        connections.add(task)
        task.add_done_callback(connections.discard)

    server = await asyncio.start_unix_server(connected, path)
    try:
        yield tap
    finally:
        server.close()
        for task in connections:
            task.cancel()
        await asyncio.gather(*connections, return_exceptions=True)
