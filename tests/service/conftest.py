"""A real `kernelpool up` on loopback: its own state, its own Redis, real kernels."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import signal
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import anyio
import httpx2
import pytest

from kernelpool import environment

START_TIMEOUT: Final = 60


@dataclass
class Service:
    """A running service and its process."""

    process: asyncio.subprocess.Process
    url: str
    http: httpx2.AsyncClient
    state: Path
    log: list[str] = field(default_factory=list)

    async def container(self, **fields: Any) -> str:
        """Make a container and return its path."""
        reply = await self.http.post("/v1/containers", json={"name": "test", **fields})
        assert reply.status_code == 200, reply.text
        return f"/v1/containers/{reply.json()['id']}"

    async def run(self, container: str, code: str, **fields: Any) -> dict[str, Any]:
        """Run code and return the execution object."""
        reply = await self.http.post(f"{container}/executions", json={"code": code, **fields})
        assert reply.status_code == 200, reply.text
        return dict(reply.json())

    @asynccontextmanager
    async def stream(
        self, container: str, code: str, **fields: Any
    ) -> AsyncIterator[AsyncIterator[dict[str, Any]]]:
        """Run code and yield its events."""
        body = {"code": code, "stream": True, **fields}
        async with self.http.stream("POST", f"{container}/executions", json=body) as reply:
            assert reply.status_code == 200
            yield events(reply)

    async def finished(self, container: str, execution_id: str) -> dict[str, Any]:
        """The execution once it is finished, by its event stream."""
        path = f"{container}/executions/{execution_id}"
        async with self.http.stream("GET", path, params={"stream": "true"}) as reply:
            async for event in events(reply):
                if event["type"] == "execution.completed":
                    return dict(event["execution"])
        raise AssertionError("the stream ended early")

    def resident_bytes(self) -> int:
        """Memory of the server's process."""
        status = Path(f"/proc/{self.process.pid}/status").read_text(encoding="utf-8")
        found = re.search(r"VmRSS:\s+(\d+) kB", status)
        assert found is not None
        return int(found[1]) * 1024

    async def kill(self) -> None:
        """End it as a crash would."""
        self.process.kill()
        await self.process.wait()

    async def stop(self) -> int:
        """End it in good order; its exit code."""
        if self.process.returncode is None:
            self.process.send_signal(signal.SIGTERM)
        with anyio.fail_after(60):
            return await self.process.wait()


async def events(reply: httpx2.Response) -> AsyncIterator[dict[str, Any]]:
    """The events of a stream."""
    async for line in reply.aiter_lines():
        if line.startswith("data: "):
            yield json.loads(line.removeprefix("data: "))


@asynccontextmanager
async def running(state: Path, **settings: str) -> AsyncIterator[Service]:
    """Start a service on a state directory, and stop it."""
    environ = {
        **{name: value for name, value in os.environ.items() if "KERNELPOOL" not in name},
        "KERNELPOOL_STATE_DIR": str(state),
        "KERNELPOOL_POOL_SIZE": "1",
        **{f"KERNELPOOL_{name.upper()}": value for name, value in settings.items()},
    }
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "orchestrator", "up", "--port", "0",
        env=environ, stderr=asyncio.subprocess.PIPE, limit=2**24,
    )  # fmt: skip
    assert process.stderr is not None
    log: list[str] = []
    reading = None
    try:
        with anyio.fail_after(START_TIMEOUT):
            while not (found := re.search(r'"(http://[^"]+)/v1"', log[-1] if log else "")):
                line = (await process.stderr.readline()).decode()
                assert line, "".join(log)
                log.append(line)
        reading = asyncio.create_task(_read_on(process.stderr, log))
        async with httpx2.AsyncClient(base_url=found[1], timeout=150, verify=False) as http:
            service = Service(process, found[1], http, state, log)
            yield service
            await service.stop()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
        if reading is not None:
            await reading
        process._transport.close()  # type: ignore[attr-defined]


async def _read_on(stream: asyncio.StreamReader, log: list[str]) -> None:
    while line := await stream.readline():
        log.append(line.decode())


@pytest.fixture(autouse=True)
def _no_blocking_calls() -> None:
    """The product runs in a process of its own; what a test does here may block."""


@pytest.fixture(
    scope="session", params=["bubblewrap", pytest.param("docker", marks=pytest.mark.docker)]
)
def runtime(request: pytest.FixtureRequest) -> str:
    """The runtime of the services of a test."""
    return str(request.param)


@pytest.fixture(scope="session")
def settings(runtime: str) -> dict[str, str]:
    """What a service needs to be told for its runtime."""
    if runtime == "docker":
        return {"runtime": "docker", "image": os.environ["KERNELPOOL_IMAGE"]}
    return {"runtime": "bubblewrap"}


@pytest.fixture
def state(runtime: str, kernel_environment: Path) -> Iterator[Path]:
    """An empty state directory, with what bubblewrap's kernels run in."""
    yield from _state(kernel_environment)


@pytest.fixture(scope="session")
def shared_state(runtime: str, kernel_environment: Path) -> Iterator[Path]:
    """A state directory for the service that tests share."""
    yield from _state(kernel_environment)


def _state(kernel_environment: Path) -> Iterator[Path]:
    directory = Path(tempfile.mkdtemp(prefix="kps-"))
    directory.chmod(0o711)
    environments = directory / "environments"
    environments.mkdir(mode=0o755)
    shutil.copytree(
        kernel_environment, environment.location(environments), symlinks=True, copy_function=os.link
    )
    yield directory
    assert not [path.name for path in (directory / "slots").glob("*.json")], "slots were left"
    shutil.rmtree(directory)


@pytest.fixture(scope="session")
async def shared(shared_state: Path, settings: dict[str, str]) -> AsyncIterator[Service]:
    """The service that tests share; each makes containers of its own."""
    async with running(shared_state, **settings) as service:
        yield service


@pytest.fixture
async def service(shared: Service) -> Service:
    """The shared service, which must be alive."""
    assert shared.process.returncode is None, "".join(shared.log[-20:])
    return shared


@pytest.fixture
async def container(service: Service) -> AsyncIterator[str]:
    """A new container."""
    path = await service.container()
    yield path
    await service.http.delete(path)
