"""DockerRuntime: sandboxed processes as Docker containers.

The only importer of docker beside image.py.

Above: provisioner.py and pool.py, through the contract in runtime.py. Below: the Docker Engine.
Blocking SDK calls go to threads under a limit of their own. How a container ended is learnt from
the engine's event stream, on a client and a thread of its own: when a container exits its cgroup is
gone and `State.OOMKilled` never goes back to false, so neither can tell which kill was which.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import shlex
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Final, ParamSpec, TypeVar

import docker
import docker.errors
import requests.exceptions
import structlog
from anyio import CancelScope, CapacityLimiter, to_thread
from docker.types import LogConfig, Ulimit
from docker.utils import kwargs_from_env

from kernelpool import cgroup
from kernelpool.errors import (
    ConfigurationError,
    ContainerGone,
    EngineError,
    EngineUnreachable,
    ImageMissing,
)
from kernelpool.profile import Profile
from kernelpool.runtime import (
    OUT_OF_MEMORY_WINDOW,
    RUN_DIRECTORY,
    WORKSPACE,
    Capabilities,
    Exit,
    Launch,
    Owned,
    Process,
    Sample,
    check_memory,
)

P = ParamSpec("P")
T = TypeVar("T")

log = structlog.get_logger(__name__)

OWNER_LABEL: Final = "org.kernelpool.owner"
SLOT_LABEL: Final = "org.kernelpool.slot"

ENGINE_CALLS: Final = 16
"""Engine calls at once. More gain nothing: the engine serialises most of the work of a start."""

ENGINE_TIMEOUT: Final = 60
"""Seconds one engine call may take. A start on a loaded host was seen to take 8."""

EVENT_GRACE: Final = 0.1
"""Seconds to wait for a late `oom` event once a container has died of SIGKILL."""

OUTPUT_FILE: Final = "output"
"""File in the run directory that takes what the kernel writes before its channels exist."""

OUTPUT_BYTES: Final = 8192


@contextlib.contextmanager
def _translated() -> Iterator[None]:
    """Docker's and the HTTP client's exceptions as this package's own."""
    try:
        yield
    except docker.errors.ImageNotFound as error:
        raise ImageMissing(f"{error.explanation}; `kernelpool image build` makes it") from error
    except docker.errors.NotFound as error:
        raise ContainerGone(str(error.explanation)) from error
    except docker.errors.APIError as error:
        raise EngineError(f"the Docker Engine refused: {error.explanation or error}") from error
    except (docker.errors.DockerException, requests.exceptions.RequestException) as error:
        raise unreachable(_root_cause(error)) from error


def unreachable(reason: object) -> EngineUnreachable:
    """What is said when no engine answers, with the cure."""
    return EngineUnreachable(
        f"no Docker Engine answers ({reason}). Start it, or allow this user to use its socket "
        "(group `docker`), or choose another with DOCKER_HOST"
    )


def _root_cause(error: BaseException) -> str:
    """The innermost reason: clients wrap it three times."""
    while error.__context__ is not None:
        error = error.__context__
    return getattr(error, "strerror", None) or str(error)


def _client(address: str | None) -> Any:
    where = kwargs_from_env() if address is None else {"base_url": address}
    return docker.APIClient(**where, version="auto", timeout=ENGINE_TIMEOUT, num_pools=ENGINE_CALLS)


class Container:
    """One container: the `Process` of the Docker runtime."""

    def __init__(self, runtime: DockerRuntime, container_id: str, run_directory: Path) -> None:
        self.id = container_id
        self.exit: Exit | None = None
        self.on_out_of_memory: Callable[[], None] | None = None
        self._runtime = runtime
        self._run_directory = run_directory
        self._ended = asyncio.Event()
        self._out_of_memory_at = float("-inf")
        self._cgroup: cgroup.Cgroup | None = None

    def __repr__(self) -> str:
        """The id as `docker ps` shows it, and whether it runs."""
        state = "running" if self.exit is None else f"exit {self.exit.exit_code}"
        return f"<Container {self.id[:12]}: {state}>"

    async def find_cgroup(self, pid: int | None = None) -> None:
        """Look where the container's resources are accounted, once it runs."""
        self._cgroup = await to_thread.run_sync(partial(cgroup.of_container, self.id, pid=pid))

    async def wait(self) -> Exit:
        """Wait until it has ended."""
        await self._ended.wait()
        assert self.exit is not None
        return self.exit

    async def signal(self, signum: int) -> None:
        """Send a signal to the kernel; the init process passes it on."""
        if self.exit is None:
            with contextlib.suppress(EngineError):
                await self._runtime.call(self._runtime.api.kill, self.id, signum)

    async def kill(self) -> None:
        """SIGKILL the whole container and wait for its end."""
        if self.exit is None:
            try:
                await self._runtime.call(self._runtime.api.kill, self.id, "SIGKILL")
            except ContainerGone:
                self.ended(Exit(None, out_of_memory=False))
            except EngineUnreachable:
                raise
            except EngineError:
                await self._runtime.refresh(self)
        await self.wait()

    async def remove(self) -> None:
        """Remove the container, running or not."""
        await self._runtime.discard(self.id)
        if self.exit is None:
            self.ended(Exit(137, out_of_memory=False))
        self._runtime.forget(self)

    async def resize_memory(self, memory_bytes: int) -> None:
        """Change the memory limit; there is never swap."""
        update = partial(
            self._runtime.api.update_container,
            self.id,
            mem_limit=memory_bytes,
            memswap_limit=memory_bytes,
        )
        await self._runtime.call(update)

    def sample(self) -> Sample:
        """What the container's cgroup says now."""
        return self._cgroup.sample() if self._cgroup else Sample()

    def spent(self) -> Sample:
        """What each execution's begin and end need of `sample`."""
        return self._cgroup.spent() if self._cgroup else Sample()

    def reset_peak(self) -> None:
        """Let the memory peak count from now."""
        if self._cgroup:
            self._cgroup.reset_peak()

    async def output(self) -> str:
        """The end of what the kernel printed before its channels existed."""

        def tail() -> str:
            try:
                with (self._run_directory / OUTPUT_FILE).open("rb") as file:
                    file.seek(0, 2)
                    file.seek(max(0, file.tell() - OUTPUT_BYTES))
                    return file.read(OUTPUT_BYTES).decode(errors="replace")
            except OSError:
                return ""

        return await to_thread.run_sync(tail)

    def memory_ran_out(self) -> None:
        """Take an `oom` event."""
        self._out_of_memory_at = time.monotonic()
        if self.exit is None and self.on_out_of_memory is not None:
            self.on_out_of_memory()

    def died(self, exit_code: int | None) -> None:
        """Take a `die` event; an `oom` that explains a SIGKILL may come just after it."""
        recent = time.monotonic() - self._out_of_memory_at < OUT_OF_MEMORY_WINDOW
        if exit_code == 137 and not recent:
            asyncio.get_running_loop().call_later(EVENT_GRACE, self._died_of_sigkill)
        else:
            self.ended(Exit(exit_code, out_of_memory=exit_code == 137))

    def _died_of_sigkill(self) -> None:
        recent = time.monotonic() - self._out_of_memory_at < OUT_OF_MEMORY_WINDOW
        self.ended(Exit(137, out_of_memory=recent))

    def ended(self, how: Exit) -> None:
        """Record the end; the first record stands."""
        if self.exit is None:
            self.exit = how
            self._ended.set()


class DockerRuntime:
    """The Docker Engine as a `Runtime`.

    Args:
        address: The engine's address; None goes by DOCKER_HOST and its kin, else Docker's socket.
        seccomp: Path of the seccomp profile; None takes the engine's own.
        owner: Id of the worker; only its containers' events are followed.
    """

    name = "docker"
    capabilities = Capabilities(
        image=True,
        own_uid=True,
        memory_limit=True,
        process_limit=True,
        cpu_limit=True,
        resize=True,
        survives_worker=True,
    )

    def __init__(
        self, *, owner: str, address: str | None = None, seccomp: Path | None = None
    ) -> None:
        self._address = address
        self._seccomp_path = seccomp
        self._seccomp = ""
        self._owner = owner
        self._calls = CapacityLimiter(ENGINE_CALLS)
        self._containers: dict[str, Container] = {}
        self._events: EventThread | None = None
        self._refreshes: set[asyncio.Task[None]] = set()
        self.api: Any = None

    async def __aenter__(self) -> DockerRuntime:
        """Connect, and follow the engine's events.

        Raises:
            EngineUnreachable: no engine answers; the message names the cure.
        """

        def connect() -> Any:
            client = _client(self._address)
            client.ping()
            return client

        if self._seccomp_path is not None:
            profile = await to_thread.run_sync(self._seccomp_path.read_text)
            self._seccomp = json.dumps(json.loads(profile), separators=(",", ":"))
        self.api = await self.call(connect)
        self._events = EventThread(self._address, self._owner, self._take_event, self._refresh_all)
        self._events.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        """Close the connections; containers stay as they are."""
        if self._events is not None:
            await to_thread.run_sync(self._events.stop)
        if self.api is not None:
            await to_thread.run_sync(self.api.close)

    async def call(self, func: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """Run one blocking engine call in a thread, its errors translated."""
        with _translated():
            return await to_thread.run_sync(partial(func, *args, **kwargs), limiter=self._calls)

    async def check(self, profile: Profile) -> None:
        """See that the image is there and the memory limit fits the host."""
        await self.call(self.api.inspect_image, profile.image)
        info = await self.call(self.api.info)
        check_memory(profile, host_bytes=int(info["MemTotal"]))
        if profile.oci_runtime is not None and profile.oci_runtime not in info["Runtimes"]:
            raise ConfigurationError(
                f"the Docker Engine has no OCI runtime {profile.oci_runtime!r}, only "
                f"{', '.join(sorted(info['Runtimes']))}: add it to daemon.json"
            )

    async def launch(self, launch: Launch) -> Process:
        """Create and start a container."""
        starting = asyncio.create_task(self._start(launch))
        try:
            return await asyncio.shield(starting)
        except asyncio.CancelledError:
            # The engine goes on with what it was told, so there is something to take back.
            with CancelScope(shield=True):
                await asyncio.wait([starting])
                if not starting.cancelled() and starting.exception() is None:
                    await starting.result().remove()
            raise

    async def _start(self, launch: Launch) -> Container:
        container_id = await self.call(self._create, launch)
        container = Container(self, container_id, launch.run_directory)
        self._containers[container_id] = container
        try:
            await self.call(self.api.start, container_id)
        except BaseException:
            self.forget(container)
            await self.discard(container_id)
            raise
        await container.find_cgroup()
        return container

    async def adopt(self, process_id: str) -> Process | None:
        """Take over a running container by its id."""
        try:
            found = await self.call(self.api.inspect_container, process_id)
        except ContainerGone:
            return None
        if not found["State"]["Running"]:
            return None
        run_directory = next(
            Path(mount["Source"])
            for mount in found["Mounts"]
            if mount["Destination"] == RUN_DIRECTORY
        )
        container = Container(self, found["Id"], run_directory)
        self._containers[container.id] = container
        await container.find_cgroup(found["State"]["Pid"])
        await self.refresh(container)
        return container if container.exit is None else None

    async def owned(self) -> list[Owned]:
        """Every container with our label."""
        found = await self.call(self.api.containers, all=True, filters={"label": [OWNER_LABEL]})
        return [
            Owned(
                id=entry["Id"],
                name=entry["Names"][0].lstrip("/") if entry["Names"] else "",
                owner=entry["Labels"][OWNER_LABEL],
                slot_id=entry["Labels"].get(SLOT_LABEL, ""),
                running=entry["State"] == "running",
            )
            for entry in found
        ]

    async def discard(self, process_id: str) -> None:
        """Remove a container, running or not; one that is gone is fine."""
        remove = partial(self.api.remove_container, process_id, force=True, v=True)
        for last in (False, True):
            try:
                await self.call(remove)
            except ContainerGone:
                return
            except EngineUnreachable:
                raise
            except EngineError as error:
                # Another removal of the same container may be under way; it ends by itself.
                if last and "already in progress" not in str(error):
                    raise
                await asyncio.sleep(EVENT_GRACE)
            else:
                return

    async def refresh(self, container: Container) -> None:
        """Ask the engine for the state of a container whose events may have been missed."""
        try:
            found = await self.call(self.api.inspect_container, container.id)
        except ContainerGone:
            container.ended(Exit(None, out_of_memory=False))
            return
        state = found["State"]
        if not state["Running"] and state["Status"] not in ("created", "restarting"):
            container.ended(Exit(state["ExitCode"], out_of_memory=bool(state["OOMKilled"])))

    def forget(self, container: Container) -> None:
        """Stop following a container."""
        self._containers.pop(container.id, None)

    def _create(self, launch: Launch) -> str:
        limits = launch.profile.limits
        security = ["no-new-privileges"]
        if self._seccomp:
            security.append(f"seccomp={self._seccomp}")
        host_config = self.api.create_host_config(
            binds={
                str(launch.data_directory): {"bind": WORKSPACE, "mode": "rw"},
                str(launch.run_directory): {"bind": RUN_DIRECTORY, "mode": "rw"},
            },
            network_mode="none",
            ipc_mode="private",
            read_only=True,
            cap_drop=["ALL"],
            security_opt=security,
            pids_limit=limits.processes,
            mem_limit=limits.memory_bytes,
            memswap_limit=limits.memory_bytes,
            nano_cpus=round(limits.cpus * 1e9),
            oom_score_adj=500,
            init=True,
            tmpfs={"/tmp": f"size={limits.tmp_bytes},mode=1777,nosuid,nodev,exec"},  # noqa: S108
            log_config=LogConfig(type="none"),
            runtime=launch.profile.oci_runtime,
            ulimits=[
                Ulimit(name="nofile", soft=limits.open_files, hard=limits.open_files),
                Ulimit(name="fsize", soft=limits.file_bytes, hard=limits.file_bytes),
                Ulimit(name="core", soft=0, hard=0),
            ],
        )
        command = f"exec {shlex.join(launch.argv)} >>{RUN_DIRECTORY}/{OUTPUT_FILE} 2>&1 </dev/null"
        created = self.api.create_container(
            image=launch.profile.image,
            name=launch.name,
            entrypoint=["/bin/sh", "-c", command],
            command=[],
            user=f"{launch.uid}:{launch.uid}",
            hostname="kernel",
            working_dir=WORKSPACE,
            environment=dict(launch.environment),
            labels={OWNER_LABEL: launch.owner, SLOT_LABEL: launch.slot_id},
            host_config=host_config,
        )
        return str(created["Id"])

    def _take_event(self, event: dict[str, Any]) -> None:
        container = self._containers.get(event["id"])
        if container is None:
            return
        if event["status"] == "oom":
            container.memory_ran_out()
        elif event["status"] == "die":
            exit_code = event["Actor"]["Attributes"].get("exitCode")
            container.died(int(exit_code) if exit_code is not None else None)

    def _refresh_all(self) -> None:
        for container in list(self._containers.values()):
            if container.exit is None:
                task = asyncio.create_task(self.refresh(container))
                self._refreshes.add(task)
                task.add_done_callback(self._refreshed)

    def _refreshed(self, task: asyncio.Task[None]) -> None:
        self._refreshes.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.warning("container state unknown", error=str(error))


class EventThread(threading.Thread):
    """Reads the engine's events and hands them to the event loop, across engine restarts.

    Args:
        take: Called on the loop with each event of a container of this owner.
        reconnected: Called on the loop when events may have been missed.
    """

    RETRY_SECONDS: Final = 0.2

    def __init__(
        self,
        address: str | None,
        owner: str,
        take: Callable[[dict[str, Any]], None],
        reconnected: Callable[[], None],
    ) -> None:
        super().__init__(name="docker-events", daemon=True)
        self._address = address
        self._owner = owner
        self._take = take
        self._reconnected = reconnected
        self._loop = asyncio.get_running_loop()
        self._stopping = threading.Event()
        self._stream: Any = None

    def run(self) -> None:
        """Read until stopped; connect again whenever the stream breaks."""
        filters = {
            "type": ["container"],
            "event": ["oom", "die"],
            "label": [f"{OWNER_LABEL}={self._owner}"],
        }
        while not self._stopping.is_set():
            try:
                with contextlib.closing(_client(self._address)) as client:
                    self._stream = client.events(decode=True, filters=filters)
                    self._call(self._reconnected)
                    for event in self._stream:
                        self._call(self._take, event)
            except (docker.errors.DockerException, requests.exceptions.RequestException, OSError):
                log.debug("the engine's event stream broke")
            self._stopping.wait(self.RETRY_SECONDS)

    def _call(self, func: Callable[..., None], *args: object) -> None:
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(func, *args)

    def stop(self) -> None:
        """End the thread; blocks until it has ended or a second has passed."""
        self._stopping.set()
        if self._stream is not None:
            with contextlib.suppress(Exception):
                self._stream.close()
        self.join(timeout=1)
