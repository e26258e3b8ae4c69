"""`kernelpool run FILE.py`: one run that streams to the terminal and brings its files back.

Above: __main__.py. Below: embedded.py; it speaks to the owner directly, without HTTP.
"""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, Final

import anyio
from rich.console import Console

from kernelpool.runtime import WORKSPACE
from orchestrator.embedded import embedded_host
from orchestrator.executions import EventType, ExecutionOrder
from orchestrator.host import Host
from orchestrator.sessions import EndReason, SessionOrder
from orchestrator.settings import DEFAULT_TENANT, Settings
from orchestrator.store import PageQuery

CHUNK_BYTES: Final = 256 * 1024


async def run_file(
    settings: Settings, file: Path, *, output: Path, uploads: Sequence[Path], timeout: float
) -> int:
    """Run a file's code; the exit code is 0 when it ended without an exception or failure."""
    code = await anyio.Path(file).read_text(encoding="utf-8")
    notes = Console(stderr=True, highlight=False)
    async with embedded_host(settings, notes) as host:
        order = SessionOrder(DEFAULT_TENANT, file.name, settings.idle_minutes)
        session = await host.owner.open(order)
        for upload in uploads:
            await host.owner.put_file(session.id, upload.name, _chunks(upload))
        async with host.owner.execute(session.id, ExecutionOrder(code, timeout)) as events:
            execution: dict[str, Any] = {}
            async for event in events:
                if event.type is EventType.OUTPUT:
                    _show(event.data["output"])
                elif event.type is EventType.COMPLETED:
                    execution = event.data["execution"]
        await _bring_back(host, session.id, output, notes)
        await host.owner.close(session.id, reason=EndReason.DELETED)
    failure = execution["failure"]
    if failure is not None:
        notes.print(f"{failure['code']}: {failure['message']}", style="red")
    return 1 if failure is not None or execution["error"] is not None else 0


def _show(output: dict[str, Any]) -> None:
    if output["type"] == "stream":
        stream = sys.stderr if output["name"] == "stderr" else sys.stdout
        stream.write(output["text"])
        stream.flush()
    elif output["type"] == "error":
        sys.stderr.write(output["traceback"].rstrip() + "\n")
    elif (text := output["data"].get("text/plain")) is not None:
        sys.stdout.write(text + "\n")


async def _bring_back(host: Host, session_id: str, output: Path, notes: Console) -> None:
    after = None
    while True:
        page = await host.store.list_files(session_id, PageQuery(after, limit=100, order="asc"))
        for file in page.items:
            if file.source != "user":
                target = output.joinpath(*PurePosixPath(file.path).parts)
                await anyio.Path(target.parent).mkdir(parents=True, exist_ok=True)
                async with (
                    host.owner.read_file(session_id, file.id) as content,
                    await anyio.open_file(target, "wb") as saved,
                ):
                    async for chunk in content.chunks:
                        await saved.write(chunk)
                notes.print(f"{WORKSPACE}/{file.path} -> {target}", style="dim")
        if not page.has_more:
            return
        after = page.items[-1].id


async def _chunks(path: Path) -> AsyncIterator[bytes]:
    async with await anyio.open_file(path, "rb") as file:
        while chunk := await file.read(CHUNK_BYTES):
            yield chunk
