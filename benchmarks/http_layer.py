"""What the HTTP layer adds to an execution, beside a bare Starlette route in the same process.

The dispatcher answers at once, so that everything measured is ours: server, gate, parsing, checks,
reply. One keep-alive connection over loopback, client in the same process. Prints JSON.

    python -m benchmarks.http_layer
"""

from __future__ import annotations

import json
import platform
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import uvloop
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from benchmarks.http_client import Connection
from orchestrator.app import create_app
from orchestrator.artifacts import Artifacts
from orchestrator.embedded_redis import redis_server
from orchestrator.executions import (
    EventType,
    Execution,
    ExecutionEvent,
    ExecutionOrder,
    ExecutionStatus,
)
from orchestrator.server import listen, serving
from orchestrator.sessions import SessionOrder
from orchestrator.settings import load
from orchestrator.store import open_store
from orchestrator.telemetry import configure_logging
from orchestrator.testing import ScriptedDispatcher

ROUNDS = 2000

Call = Callable[[], Coroutine[Any, Any, object]]


class InstantDispatcher(ScriptedDispatcher):
    """Answers `1 + 1` without doing anything."""

    @asynccontextmanager
    async def execute(
        self, session_id: str, order: ExecutionOrder
    ) -> AsyncIterator[AsyncIterator[ExecutionEvent]]:
        """Yield the four events of a short cell."""
        execution = Execution(
            "exec_x", session_id, order.code, ExecutionStatus.COMPLETED, 1.0, result="2"
        ).to_wire()
        output = {"type": "result", "data": {"text/plain": "2"}, "metadata": {}}

        async def events() -> AsyncIterator[ExecutionEvent]:
            yield ExecutionEvent(0, EventType.CREATED, {"execution": execution})
            started = {"started_at": 1.0, "execution_count": 1}
            yield ExecutionEvent(1, EventType.STARTED, started)
            yield ExecutionEvent(2, EventType.OUTPUT, {"output_index": 0, "output": output})
            yield ExecutionEvent(3, EventType.COMPLETED, {"execution": execution})

        yield events()


async def bare(_: Request) -> PlainTextResponse:
    """The least that Starlette can do."""
    return PlainTextResponse("1")


async def measured(call: Call) -> dict[str, float]:
    """Microseconds per call on the clock, and of processor time, client included."""
    for _ in range(200):
        await call()
    times = []
    cpu = time.process_time()
    for _ in range(ROUNDS):
        begun = time.perf_counter()
        await call()
        times.append(time.perf_counter() - begun)
    cpu = (time.process_time() - cpu) / ROUNDS
    times.sort()
    return {
        "p50": round(times[ROUNDS // 2] * 1e6),
        "p95": round(times[ROUNDS * 95 // 100] * 1e6),
        "cpu": round(cpu * 1e6),
    }


async def main() -> None:
    """Measure the three and print them."""
    configure_logging("warning")
    with tempfile.TemporaryDirectory(prefix="kp-") as name:
        directory = Path(name)
        artifacts = Artifacts.open(str(directory / "artifacts"))
        async with (
            redis_server(directory) as url,
            open_store(url, artifacts) as store,
            InstantDispatcher(store, artifacts, directory / "workspaces") as dispatcher,
        ):
            settings = replace(load({}), api_keys={})
            app = create_app(settings=settings, store=store, dispatcher=dispatcher)
            plain = Starlette(routes=[Route("/x", bare, methods=["POST"])])
            session = await dispatcher.open(SessionOrder("default", "bench", 20))
            path = f"/v1/containers/{session.id}/executions"
            async with (
                serving(plain, listen("127.0.0.1", 0)) as plain_address,
                serving(app, listen("127.0.0.1", 0)) as address,
                Connection(plain_address.url) as to_plain,
                Connection(address.url) as to_app,
            ):

                async def streamed() -> None:
                    async for _ in to_app.events(path, {"code": "1+1", "stream": True}):
                        pass

                calls: dict[str, Call] = {
                    "bare starlette": lambda: to_plain.json("POST", "/x", {"code": "1+1"}),
                    "execution": lambda: to_app.json("POST", path, {"code": "1+1"}),
                    "execution, streamed": streamed,
                }
                figures = {name: await measured(call) for name, call in calls.items()}
    print(json.dumps({"microseconds": figures, "python": platform.python_version()}, indent=2))


if __name__ == "__main__":
    uvloop.run(main())
