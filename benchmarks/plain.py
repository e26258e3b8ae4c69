"""The reference: a plain ipykernel in the same image, and stock jupyter_client code to talk to it.

Above: every measurement. Below: jupyter_client; the Docker SDK, or the sandbox runtime for its bare
launch. The kernel is `python -m ipykernel_launcher` as it comes, history database and all, over the
same ipc transport and with the same memory and CPU limits as ours, and without anything else of
ours: no start-up code, no journal, no seccomp filter, no quota.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import shutil
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, cast

import docker
from anyio import CancelScope, to_thread
from docker.utils import kwargs_from_env
from jupyter_client.asynchronous.client import AsyncKernelClient
from jupyter_client.connect import KernelConnectionInfo

from benchmarks.waiting import until
from kernelpool import Limits, Profile, environment
from kernelpool.runtime import RUN_DIRECTORY, Launch
from kernelpool.sandbox import BubblewrapRuntime

ARGUMENTS = ["python", "-m", "ipykernel_launcher", "-f", f"{RUN_DIRECTORY}/connection.json"]

LIMITS = Limits()

SOCKET_POLL = 0.01
"""Seconds between looks for the heartbeat's socket file, as often as kernelpool looks."""

START_SECONDS = 60.0


class Starter(Protocol):
    """Starts the plain kernel's process by hand."""

    async def launch(self, run: Path, data: Path) -> Any:
        """Start it on these directories; what comes back is for `remove`."""
        ...

    async def remove(self, process: Any) -> None:
        """Kill and remove it."""
        ...


class DockerStarter:
    """docker create and docker start, through the SDK."""

    def __init__(self, image: str) -> None:
        self._image = image
        self._api = docker.APIClient(**kwargs_from_env(), version="auto", num_pools=16)

    async def launch(self, run: Path, data: Path) -> Any:
        """Create and start a container."""
        return await to_thread.run_sync(self._launch, run, data)

    def _launch(self, run: Path, data: Path) -> str:
        owner = f"{os.geteuid()}:{os.getegid()}"
        created = self._api.create_container(
            image=self._image,
            entrypoint=ARGUMENTS,
            command=[],
            user=owner,
            environment={"HOME": "/tmp"},
            working_dir="/mnt/data",
            host_config=self._api.create_host_config(
                binds={str(run): {"bind": RUN_DIRECTORY}, str(data): {"bind": "/mnt/data"}},
                network_mode="none",
                mem_limit=LIMITS.memory_bytes,
                memswap_limit=LIMITS.memory_bytes,
                nano_cpus=round(LIMITS.cpus * 1e9),
                init=True,
            ),
        )
        self._api.start(created["Id"])
        return str(created["Id"])

    async def remove(self, process: Any) -> None:
        """Remove the container."""
        await to_thread.run_sync(lambda: self._api.remove_container(process, force=True, v=True))


class SandboxStarter:
    """bubblewrap, by a bare launch of the sandbox runtime: no slot, no quota, no kernel code."""

    def __init__(self, runtime: BubblewrapRuntime, directory: Path) -> None:
        self._runtime = runtime
        self._profile = Profile(runtime="bubblewrap", image=str(directory), limits=LIMITS)

    async def launch(self, run: Path, data: Path) -> Any:
        """Start a sandbox."""
        name = secrets.token_hex(4)
        return await self._runtime.launch(
            Launch(
                name=f"plain-{name}",
                owner="benchmarks",
                slot_id=name,
                profile=self._profile,
                argv=tuple(ARGUMENTS),
                environment={"HOME": "/tmp"},
                uid=os.geteuid(),
                data_directory=data,
                run_directory=run,
            )
        )

    async def remove(self, process: Any) -> None:
        """Remove the sandbox."""
        await process.remove()


@asynccontextmanager
async def starter(runtime: str, image: str, environments: Path) -> AsyncIterator[Starter]:
    """What starts plain kernels in this runtime."""
    if runtime == "docker":
        yield await to_thread.run_sync(DockerStarter, image)
        return
    found = await to_thread.run_sync(environment.find, environments)
    if found is None:
        raise RuntimeError("no environment: run `kernelpool image build --runtime bubblewrap`")
    state = Path(await to_thread.run_sync(tempfile.mkdtemp, None, "kp-plain-"))
    async with BubblewrapRuntime(state_directory=state) as sandboxes:
        yield SandboxStarter(sandboxes, found)
    await to_thread.run_sync(shutil.rmtree, state, True)


@dataclass(frozen=True, slots=True)
class PlainKernel:
    """A plain kernel, connected. `ready_seconds`: from the start by hand to its first reply."""

    client: AsyncKernelClient
    ready_seconds: float

    async def run(self, code: str) -> str:
        """Run code as clients commonly do; what it printed."""
        request = self.client.execute(code)
        printed: list[str] = []
        while True:
            message = await self.client.get_iopub_msg()
            if message["parent_header"].get("msg_id") != request:
                continue
            if message["msg_type"] == "stream":
                printed.append(message["content"]["text"])
            elif message["msg_type"] == "error":
                raise RuntimeError("\n".join(message["content"]["traceback"]))
            elif message["content"].get("execution_state") == "idle":
                break
        await self.client.get_shell_msg()
        return "".join(printed)


@asynccontextmanager
async def plain_kernel(starts: Starter) -> AsyncIterator[PlainKernel]:
    """A plain kernel for as long as the block lasts."""
    async with AsyncExitStack() as stack:
        directory = Path(await to_thread.run_sync(tempfile.mkdtemp, None, "kp-plain-"))
        stack.callback(shutil.rmtree, directory, ignore_errors=True)
        run, data = directory / "run", directory / "data"
        info: dict[str, Any] = {
            "transport": "ipc",
            "ip": f"{RUN_DIRECTORY}/k",
            "key": secrets.token_hex(32),
            "signature_scheme": "hmac-sha256",
            "kernel_name": "",
            **{f"{name}_port": port for port, name in enumerate(_CHANNELS, 1)},
        }
        await to_thread.run_sync(_prepare, run, data, json.dumps(info))
        begun = time.perf_counter()
        process = await starts.launch(run, data)
        stack.push_async_callback(_shielded_remove, starts, process)
        client = AsyncKernelClient()
        client.load_connection_info(cast("KernelConnectionInfo", info | {"ip": str(run / "k")}))
        async with asyncio.timeout(START_SECONDS):
            heartbeat = run / f"k-{info['hb_port']}"
            await until(heartbeat.exists, poll=SOCKET_POLL, timeout=START_SECONDS)
            client.start_channels()
            stack.callback(client.stop_channels)
            client.kernel_info()
            await client.get_shell_msg()
        ready = time.perf_counter() - begun
        kernel = PlainKernel(client, ready)
        await client.wait_for_ready(timeout=START_SECONDS)
        yield kernel


_CHANNELS = ("shell", "iopub", "stdin", "control", "hb")


def _prepare(run: Path, data: Path, connection: str) -> None:
    run.mkdir()
    data.mkdir()
    (run / "connection.json").write_text(connection, encoding="utf-8")


async def _shielded_remove(starts: Starter, process: Any) -> None:
    with CancelScope(shield=True):
        await starts.remove(process)
