"""Runtime: what starts, watches and removes the sandboxed process behind a kernel.

Above: provisioner.py, kernel.py, pool.py. Below: container.py (Docker), sandbox.py (bubblewrap).
Knows processes and limits; has never heard of Jupyter. Both implementations pass
`tests/contract/test_runtime.py`; what one of them cannot do is declared in its `Capabilities`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

from kernelpool.errors import ConfigurationError
from kernelpool.profile import Profile

WORKSPACE: Final = "/mnt/data"
"""Where a slot's `data/` is mounted inside. Source: the hosted API's working directory."""

RUN_DIRECTORY: Final = "/run/kernel"
"""Where a slot's `run/` (sockets, connection file, journal) is mounted inside."""

OUT_OF_MEMORY_WINDOW: Final = 2.0
"""Seconds between the memory limit killing something and the exit 137 that it explains."""


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a runtime can do on this host; the rest is refused or weaker, never silently."""

    image: bool
    """Kernels have a root file system of their own."""
    own_uid: bool
    """Each slot's processes run under a uid of their own."""
    memory_limit: bool
    """The kernel of the host enforces the memory limit (a watchdog otherwise)."""
    process_limit: bool
    """The kernel of the host bounds the number of processes of the whole tree."""
    cpu_limit: bool
    """Processor time is bounded."""
    resize: bool
    """The memory limit of a running process can be changed."""
    survives_worker: bool
    """Processes live on when the worker is killed and can be adopted again."""


@dataclass(frozen=True, slots=True)
class Launch:
    """Everything needed to start one sandboxed process."""

    name: str
    """Unique on the host, `[a-z0-9-]`, at most 60 characters."""
    owner: str
    """Id of the worker that owns it; a sweep goes by this."""
    slot_id: str
    profile: Profile
    """Image or environment, limits, OCI runtime."""
    argv: tuple[str, ...]
    environment: Mapping[str, str]
    """The whole environment of the process beside PATH, LANG and what the image sets."""
    uid: int
    data_directory: Path
    """Host path mounted at WORKSPACE, read-write; also the working directory."""
    run_directory: Path
    """Host path mounted at RUN_DIRECTORY, read-write."""


def check_memory(profile: Profile, *, host_bytes: int) -> None:
    """See that the host has as much memory as one kernel may use.

    Raises:
        ConfigurationError: it has less.
    """
    if profile.limits.memory_bytes > host_bytes:
        raise ConfigurationError(
            f"a kernel may use {profile.limits.memory_bytes:,} bytes of memory, but the host has "
            f"{host_bytes:,}: lower the limit"
        )


@dataclass(frozen=True, slots=True)
class Exit:
    """How a sandboxed process ended."""

    exit_code: int | None
    """0..255 as a shell would report it (128 + signal); None when it cannot be known."""
    out_of_memory: bool
    """The memory limit killed it."""

    @property
    def signal(self) -> int | None:
        """The signal that ended it, where the exit code says so."""
        return self.exit_code - 128 if self.exit_code and 128 < self.exit_code < 193 else None


@dataclass(frozen=True, slots=True)
class Sample:
    """Resource use of a sandboxed process and its children. None where the host cannot tell."""

    cpu_seconds: float | None = None
    """Processor time since it started."""
    memory_bytes: int | None = None
    memory_peak_bytes: int | None = None
    """Highest use since it started or since `reset_peak`."""
    processes: int | None = None
    out_of_memory_kills: int | None = None
    process_limit_hits: int | None = None


class Process(Protocol):
    """One sandboxed process: started or adopted by a runtime."""

    id: str
    """The runtime's own id for it; enough to adopt it again."""
    exit: Exit | None
    """Set once it has ended."""
    on_out_of_memory: Callable[[], None] | None
    """Called on the event loop when the memory limit killed something inside, maybe not all."""

    async def wait(self) -> Exit:
        """Wait until it has ended; any number of callers."""
        ...

    async def signal(self, signum: int) -> None:
        """Send a signal to the kernel process itself. A process that ended: nothing happens."""
        ...

    async def kill(self) -> None:
        """SIGKILL it and everything it started; return when it has ended."""
        ...

    async def remove(self) -> None:
        """Kill if needed, then remove every trace (container, cgroup, status files). Idempotent."""
        ...

    async def resize_memory(self, memory_bytes: int) -> None:
        """Change the memory limit of the running process.

        Raises:
            ConfigurationError: the runtime cannot (see `Capabilities.resize`).
        """
        ...

    def sample(self) -> Sample:
        """Resource use now. Cheap (a few small file reads), never raises."""
        ...

    def spent(self) -> Sample:
        """`cpu_seconds`, `memory_peak_bytes` and `process_limit_hits` alone, cheap."""
        ...

    def reset_peak(self) -> None:
        """Let `memory_peak_bytes` count from now, where the host can."""
        ...

    async def output(self) -> str:
        """The last 8 kB of the process' own stdout and stderr, where kept, else ''."""
        ...


@dataclass(frozen=True, slots=True)
class Owned:
    """A sandboxed process found by a sweep."""

    id: str
    name: str
    owner: str
    slot_id: str
    running: bool


class Runtime(Protocol):
    """Starts sandboxed processes. An async context manager; leaving it leaves them alone."""

    name: str
    capabilities: Capabilities

    async def check(self, profile: Profile) -> None:
        """See that the profile can be started here.

        Raises:
            EngineUnreachable: no engine answers; the message names the cure.
            ImageMissing: the image or environment is not there; the message names the command.
            ConfigurationError: the host cannot carry it.
        """
        ...

    async def launch(self, launch: Launch) -> Process:
        """Start a process.

        Raises:
            EngineError: it could not be started; nothing is left of it.
        """
        ...

    async def adopt(self, process_id: str) -> Process | None:
        """Take over a process that an earlier worker started; None when it is not running."""
        ...

    async def owned(self) -> list[Owned]:
        """Every process on this host that carries our mark, whoever owns it."""
        ...

    async def discard(self, process_id: str) -> None:
        """Remove a process found by `owned`, running or not. Idempotent."""
        ...
