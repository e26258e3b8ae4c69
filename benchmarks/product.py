"""The service under measurement: a real `kernelpool up`, on a port and state of its own.

Above: every measurement. Below: the `kernelpool` command as a child process, http_client.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Mapping, Set
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from anyio import CancelScope, to_thread

from benchmarks.engine_tap import EngineTap, engine_tap
from benchmarks.http_client import Connection
from benchmarks.waiting import until
from kernelpool import Profile

START_SECONDS = 60.0
STOP_SECONDS = 60.0
WARM_SECONDS = 60.0
POLL = 0.005
GONE_SECONDS = 20.0

SETTLE_SECONDS = 0.3
"""Between a kernel's last reply while it was warmed and the pool's taking note of it."""

WARM_REPLIES = len(Profile().warm_imports) + 1
"""Requests that a warm slot's kernel has answered: one per library, and a first display."""


@dataclass(frozen=True, slots=True)
class Product:
    """A running service."""

    url: str
    pid: int
    state: Path
    tap: EngineTap | None

    def connect(self) -> Connection:
        """A connection to it, to be entered."""
        return Connection(self.url)

    @property
    def slots(self) -> Path:
        """Where its slots are."""
        return self.state / "slots"

    def resident_bytes(self) -> int:
        """Memory of the server's process now."""
        return _status(self.pid, "VmRSS")

    def peak_bytes(self) -> int:
        """The most it was since `forget_peak`."""
        return _status(self.pid, "VmHWM")

    def processor_seconds(self) -> float:
        """Processor time that the server and its Redis have used."""
        return sum(map(_processor_seconds, (self.pid, *_children(self.pid))))

    def forget_peak(self) -> None:
        """Let the peak count from now."""
        Path(f"/proc/{self.pid}/clear_refs").write_text("5", encoding="ascii")

    def mounts(self) -> int:
        """How many file systems are mounted below its state directory."""
        below = f" {self.state}/"
        return Path("/proc/self/mountinfo").read_text(encoding="utf-8").count(below)

    async def until_warm(self, *, besides: Set[str] = frozenset()) -> set[str]:
        """Wait for a slot whose kernel has its libraries imported; the ids of all such slots.

        The journal of a kernel tells which requests it has answered.

        Args:
            besides: Slots that do not count: sessions have them, or had.
        """
        await until(lambda: bool(self._warm() - besides), poll=POLL, timeout=WARM_SECONDS)
        await asyncio.sleep(SETTLE_SECONDS)
        return self._warm()

    async def until_slots(self, count: int) -> None:
        """Wait until there are no more slots than that: those that were deleted are gone."""
        await until(
            lambda: len(list(self.slots.glob("*.json"))) <= count, poll=POLL, timeout=GONE_SECONDS
        )

    def _warm(self) -> set[str]:
        warm = set()
        for journal in self.slots.glob("*/run/journal"):
            with contextlib.suppress(OSError):
                if journal.read_bytes().count(b'"execute_reply"') >= WARM_REPLIES:
                    warm.add(journal.parents[1].name)
        return warm


class Session:
    """A container of the service and a connection to use it over."""

    def __init__(self, connection: Connection, container_id: str) -> None:
        self.connection = connection
        self.path = f"/containers/{container_id}"

    @classmethod
    async def create(cls, connection: Connection) -> Session:
        """Make a container."""
        created = await connection.json("POST", "/containers", {"name": "benchmark"})
        return cls(connection, created["id"])

    async def run(self, code: str) -> Any:
        """Run code; the execution."""
        execution = await self.connection.json("POST", f"{self.path}/executions", {"code": code})
        _check(execution)
        return execution

    async def stream(self, code: str) -> tuple[Any, str]:
        """Run code with the answer streamed; the execution and what the stream's events printed."""
        printed: list[str] = []
        execution: Any = None
        body = {"code": code, "stream": True}
        async for event in self.connection.events(f"{self.path}/executions", body):
            if event["type"] == "execution.completed":
                execution = event["execution"]
            elif event["type"] == "execution.output" and event["output"]["type"] == "stream":
                printed.append(event["output"]["text"])
        _check(execution)
        return execution, "".join(printed)

    async def delete(self) -> None:
        """Delete the container."""
        await self.connection.json("DELETE", self.path)


@asynccontextmanager
async def product(
    runtime: str,
    image: str,
    environments: Path,
    *,
    pool_size: int,
    settings: Mapping[str, str] | None = None,
    tapped: bool = False,
) -> AsyncIterator[Product]:
    """The service for as long as the block lasts; nothing of it is left afterwards."""
    async with AsyncExitStack() as stack:
        state = Path(await to_thread.run_sync(tempfile.mkdtemp, None, "kp-bench-"))
        stack.callback(shutil.rmtree, state, ignore_errors=True)
        await to_thread.run_sync(_prepare, state, environments)
        tap = await stack.enter_async_context(engine_tap(state)) if tapped else None
        environ = {
            **{k: v for k, v in os.environ.items() if not k.startswith("KERNELPOOL_")},
            "KERNELPOOL_STATE_DIR": str(state),
            "KERNELPOOL_RUNTIME": runtime,
            "KERNELPOOL_IMAGE": image,
            "KERNELPOOL_POOL_SIZE": str(pool_size),
            **(settings or {}),
        }
        if tap is not None:
            environ["DOCKER_HOST"] = tap.address
        process = await _start(environ)
        # A service that had to be killed is started once more: its start sweeps what it left.
        stack.push_async_callback(_stop, process, environ)
        url = await _serving(process)
        yield Product(url, process.pid, state, tap)


def _prepare(state: Path, environments: Path) -> None:
    state.chmod(0o711)
    (state / "environments").symlink_to(environments)


async def _start(environ: Mapping[str, str]) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        sys.executable, "-m", "orchestrator", "up", "--port", "0",
        env=environ, stderr=asyncio.subprocess.PIPE, start_new_session=True, limit=1024 * 1024,
    )  # fmt: skip


async def _serving(process: asyncio.subprocess.Process) -> str:
    """The URL that the service logs once it serves; from then on its log is read and dropped."""
    assert process.stderr is not None
    said: list[str] = []
    async with asyncio.timeout(START_SECONDS):
        async for line in process.stderr:
            said.append(line.decode())
            with contextlib.suppress(ValueError):
                entry = json.loads(line)
                if entry.get("event") == "serving":
                    _drain(process.stderr)
                    return str(entry["url"])
    raise RuntimeError("kernelpool did not start:\n" + "".join(said))


_DRAINS: set[asyncio.Task[None]] = set()


def _drain(stream: asyncio.StreamReader) -> None:
    async def drain() -> None:
        while line := await stream.readline():
            if b'"level":"error"' in line or b'"level": "error"' in line:
                print(line.decode(), file=sys.stderr)

    task = asyncio.ensure_future(drain())
    _DRAINS.add(task)
    task.add_done_callback(_DRAINS.discard)


async def _stop(process: asyncio.subprocess.Process, environ: Mapping[str, str]) -> None:
    with CancelScope(shield=True):
        if await _ended(process):
            return
        os.killpg(process.pid, signal.SIGKILL)
        await process.wait()
        again = await _start(environ)
        with contextlib.suppress(TimeoutError, RuntimeError):
            await _serving(again)
        await _ended(again)


async def _ended(process: asyncio.subprocess.Process) -> bool:
    with contextlib.suppress(ProcessLookupError):
        process.terminate()
    try:
        async with asyncio.timeout(STOP_SECONDS):
            await process.wait()
    except TimeoutError:
        return False
    return True


def _status(pid: int, name: str) -> int:
    text = Path(f"/proc/{pid}/status").read_text(encoding="ascii")
    return int(text.partition(f"{name}:")[2].split()[0]) * 1024


def _processor_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _children(pid: int) -> list[int]:
    text = Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii")
    return [int(child) for child in text.split()]


def _check(execution: Any) -> None:
    if execution is None or execution["status"] != "completed" or execution["error"] is not None:
        raise RuntimeError(f"an execution did not do what it should: {execution}")


async def seconds(work: Any) -> float:
    """How long something takes."""
    begun = time.perf_counter()
    await work
    return time.perf_counter() - begun
