"""What each call of the store on the path of an execution takes, over a unix socket.

Prints JSON: microseconds per call (p50, p95) on the event loop the server runs on, beside a bare
PING on the same connection, with the machine's facts.

    python -m benchmarks.store_calls
"""

from __future__ import annotations

import json
import platform
import secrets
import tempfile
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import anyio

from orchestrator.artifacts import Artifacts
from orchestrator.embedded_redis import redis_server
from orchestrator.executions import EventType, Execution, ExecutionEvent, ExecutionStatus
from orchestrator.sessions import Session, SessionOrder
from orchestrator.store import Store, open_store

ROUNDS = 2000
OUTPUT = {"type": "stream", "name": "stdout", "text": "x" * 400}


def summary(times: list[float]) -> dict[str, float]:
    """Microseconds."""
    times.sort()
    return {
        "p50": round(times[len(times) // 2] * 1e6, 1),
        "p95": round(times[len(times) * 95 // 100] * 1e6, 1),
    }


async def timed(times: list[float], call: Awaitable[object]) -> None:
    """Add how long one call takes."""
    start = time.perf_counter()
    await call
    times.append(time.perf_counter() - start)


async def executions(store: Store, session: Session) -> dict[str, list[float]]:
    """Whole lives of executions, one after the other, as the owner drives them."""
    names = ("reserve", "start", "append four events", "finish", "flush after finish")
    times: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(ROUNDS):
        queued = Execution(
            f"exec_{secrets.token_urlsafe(24)}",
            session.id,
            "1 + 1",
            ExecutionStatus.QUEUED,
            store.clock(),
        )
        await timed(
            times["reserve"],
            store.reserve_execution(
                queued,
                tenant=session.tenant,
                idempotency_key=None,
                request_digest="",
                hold_seconds=120,
                queue_limit=32,
            ),
        )
        running = replace(queued, status=ExecutionStatus.IN_PROGRESS)
        await timed(times["start"], store.start_execution(running, hold_seconds=120))
        done = replace(running, status=ExecutionStatus.COMPLETED, outputs=(OUTPUT,))
        events = [
            ExecutionEvent(0, EventType.CREATED, {"execution": queued.to_wire()}),
            ExecutionEvent(1, EventType.STARTED, {"execution_count": 1, "started_at": 1.0}),
            ExecutionEvent(2, EventType.OUTPUT, {"output_index": 0, "output": OUTPUT}),
            ExecutionEvent(3, EventType.COMPLETED, {"execution": done.to_wire()}),
        ]
        start = time.perf_counter()
        store.event_log.append(queued.id, events)
        times["append four events"].append(time.perf_counter() - start)
        await timed(times["finish"], store.finish_execution(done))
        await timed(times["flush after finish"], store.event_log.flush(queued.id))
    return times


async def measure() -> dict[str, dict[str, float]]:
    """Every call's summary."""
    with tempfile.TemporaryDirectory(prefix="kp-") as directory:
        artifacts = Artifacts.open(f"{directory}/artifacts")
        async with redis_server(Path(directory)) as url, open_store(url, artifacts) as store:
            session = await store.create_session(
                "cntr_" + secrets.token_urlsafe(24),
                SessionOrder("acme", "bench", 20),
                worker_id="w",
                max_lifetime=None,
                tenant_limit=None,
            )
            result = {
                name: summary(times) for name, times in (await executions(store, session)).items()
            }
            calls: dict[str, Callable[[], Awaitable[object]]] = {
                "touch_session": lambda: store.touch_session(session.id, "acme"),
                "get_session": lambda: store.get_session(session.id, "acme"),
                "ping": store.ping,
            }
            for name, call in calls.items():
                times: list[float] = []
                for _ in range(ROUNDS):
                    await timed(times, call())
                result[name] = summary(times)
            return result


def main() -> None:
    """Measure and print."""
    result = anyio.run(measure, backend_options={"use_uvloop": True})
    facts = {"python": platform.python_version(), "machine": platform.machine()}
    print(json.dumps({"microseconds": result, "rounds": ROUNDS, "host": facts}, indent=2))


if __name__ == "__main__":
    main()
