"""BubblewrapRuntime: sandboxed processes without a daemon, for one's own machine.

Above: provisioner.py and pool.py, through the contract in runtime.py. Below: bubblewrap.py (what a
sandbox sees), keeper.py (the process that starts it and stays with it), cgroup.py (its bounds).

As root each sandbox has the uid of its slot and a control group of its own. As an ordinary user it
runs under that user, and where no control group is delegated the keeper watches its memory: late
by a quarter of a second, and blind to what lies in pipes and socket buffers. No rlimit does that
better: RLIMIT_AS and RLIMIT_DATA count what is reserved, of which numpy and threads reserve much,
and count it per process. `capabilities` says which it is.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import secrets
import select
import shutil
import signal
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self

import anyio
import anyio.lowlevel
from anyio import CancelScope, to_thread

from kernelpool import bubblewrap, keeper
from kernelpool.cgroup import Cgroup, CgroupTree, OutOfMemoryWatch
from kernelpool.errors import ConfigurationError, EngineError
from kernelpool.profile import Profile
from kernelpool.runtime import (
    OUT_OF_MEMORY_WINDOW,
    Capabilities,
    Exit,
    Launch,
    Owned,
    Sample,
    check_memory,
)

START_SECONDS: Final = keeper.START_SECONDS + 5
KILL_SECONDS: Final = 10.0
"""Seconds after which a keeper that does not report the end of a killed sandbox is killed too."""

COUNTER_RETRIES: Final = 50
"""Looks, 20 ms apart, at the counter of a group that has announced a kill."""

CHECK_SECONDS: Final = 30.0

_NAME: Final = re.compile(r"[a-z0-9-]{1,60}")
_NOBODY: Final = 65534
_CLOCK_TICKS: Final = os.sysconf("SC_CLK_TCK")


class Sandbox:
    """One sandbox: the `Process` of the bubblewrap runtime."""

    def __init__(self, runtime: BubblewrapRuntime, name: str, started: _Started) -> None:
        self.id = name
        self.exit: Exit | None = None
        self.on_out_of_memory: Callable[[], None] | None = None
        self._runtime = runtime
        self._keeper_fd = started.keeper_fd
        self._init = started.init
        self._init_fd = started.init_fd
        self._group = group = started.group
        self._ended = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._kills_seen = (group.out_of_memory_kills() or 0) if group else 0
        self._out_of_memory_at = float("-inf")
        self._watch = OutOfMemoryWatch(group) if group else None
        self._loop.add_reader(self._keeper_fd, self._keeper_ended)
        if self._watch is not None:
            self._loop.add_reader(self._watch.fileno(), self._memory_event)

    def __repr__(self) -> str:
        """The name, and whether it runs."""
        state = "running" if self.exit is None else f"exit {self.exit.exit_code}"
        return f"<Sandbox {self.id}: {state}>"

    async def wait(self) -> Exit:
        """Wait until it has ended."""
        await self._ended.wait()
        assert self.exit is not None
        return self.exit

    async def signal(self, signum: int) -> None:
        """Send a signal to the kernel process, which is not the namespace's first."""
        if self.exit is None:
            await to_thread.run_sync(_signal_kernel, self._init, signum)

    async def kill(self) -> None:
        """SIGKILL the namespace's init, and with it everything in the namespace."""
        if self.exit is None:
            if self._keeper_fd < 0:
                raise EngineError(f"the runtime of {self.id} was left: adopt it with another")
            _send(self._init_fd, signal.SIGKILL)
            with anyio.move_on_after(KILL_SECONDS):
                await self._ended.wait()
            if self.exit is None:
                _send(self._keeper_fd, signal.SIGKILL)
        await self.wait()

    async def remove(self) -> None:
        """Kill if needed, then remove the control group and the files."""
        await self.kill()
        await self._runtime.discard(self.id)

    async def resize_memory(self, memory_bytes: int) -> None:
        """Change the memory limit.

        Raises:
            ConfigurationError: more is in use than the new limit.
        """
        path = self._runtime.directory_of(self.id) / "memory"

        def resize() -> None:
            if self._group is not None:
                self._group.limit_memory(memory_bytes)
                return
            new = path.with_suffix(".new")
            new.write_text(str(memory_bytes), encoding="ascii")
            new.replace(path)

        try:
            await to_thread.run_sync(resize)
        except OSError as error:
            raise ConfigurationError(
                f"the memory limit cannot become {memory_bytes:,} bytes now: {error.strerror}"
            ) from error

    def sample(self) -> Sample:
        """What the control group says now, or else /proc about the processes."""
        if self._group is not None:
            return self._group.sample()
        return Sample() if self.exit else _sample_tree(keeper.process_tree(self._init))

    def spent(self) -> Sample:
        """What each execution's begin and end need of `sample`."""
        return self._group.spent() if self._group is not None else self.sample()

    def reset_peak(self) -> None:
        """Let the memory peak count from now."""
        if self._group is not None:
            self._group.reset_peak()
        elif self.exit is None:
            for pid in keeper.process_tree(self._init):
                _reset_peak_of(pid)

    async def output(self) -> str:
        """The end of what it printed."""
        return await to_thread.run_sync(keeper.tail, self._runtime.directory_of(self.id))

    def let_go(self) -> None:
        """Stop following it and leave it alone."""
        self._stop_watching()
        if self._keeper_fd >= 0:
            self._loop.remove_reader(self._keeper_fd)
            os.close(self._keeper_fd)
            os.close(self._init_fd)
            self._keeper_fd = self._init_fd = -1
        if self._group is not None:
            self._group.close()

    def _keeper_ended(self) -> None:
        """The keeper ends last, so all is known now; unless somebody killed it."""
        with contextlib.suppress(ChildProcessError):
            os.waitid(os.P_PIDFD, self._keeper_fd, os.WEXITED | os.WNOHANG)
        state = self._runtime.state_of(self.id)
        if "exit_code" not in state:
            _send(self._init_fd, signal.SIGKILL)
        exit_code = state.get("exit_code")
        self._count_kills()
        recent = time.monotonic() - self._out_of_memory_at < OUT_OF_MEMORY_WINDOW
        watchdog = bool(state.get("out_of_memory"))
        if watchdog:
            self._report_out_of_memory()
        self.let_go()
        self._runtime.forget(self)
        self.exit = Exit(exit_code, out_of_memory=watchdog or (recent and exit_code == 137))
        self._ended.set()

    def _memory_event(self) -> None:
        if self._watch is not None:
            self._watch.acknowledge()
            self._expect_kill(COUNTER_RETRIES)

    def _expect_kill(self, looks: int) -> None:
        """Look at the counter until it says that something was killed: that comes a bit later."""
        if self.exit is None and not self._count_kills() and looks > 0:
            self._loop.call_later(0.02, self._expect_kill, looks - 1)

    def _count_kills(self) -> bool:
        kills = self._group.out_of_memory_kills() if self._group else None
        if kills is None or kills <= self._kills_seen:
            return False
        self._kills_seen = kills
        self._report_out_of_memory()
        return True

    def _report_out_of_memory(self) -> None:
        self._out_of_memory_at = time.monotonic()
        if self.on_out_of_memory is not None:
            self.on_out_of_memory()

    def _stop_watching(self) -> None:
        if self._watch is not None:
            self._loop.remove_reader(self._watch.fileno())
            self._watch.close()
            self._watch = None


class BubblewrapRuntime:
    """bubblewrap as a `Runtime`.

    Args:
        state_directory: Where sandboxes are written down, one directory each; made if missing.
        control_groups: False leaves control groups alone and watches instead, as on a host that
            has none to give. Whether there are any is known once the runtime is entered.
    """

    name = "bubblewrap"

    def __init__(self, *, state_directory: Path, control_groups: bool = True) -> None:
        self._state_directory = state_directory
        self._control_groups = control_groups
        self._root = os.geteuid() == 0
        self._tree: CgroupTree | None = None
        self._sandboxes: dict[str, Sandbox] = {}
        self.capabilities = self._capabilities()

    async def __aenter__(self) -> Self:
        """Make the state directory and find out what this host can do."""
        await to_thread.run_sync(self._prepare)
        return self

    async def __aexit__(self, *_: object) -> None:
        """Stop following the sandboxes; they stay as they are."""
        for sandbox in list(self._sandboxes.values()):
            sandbox.let_go()
        self._sandboxes.clear()

    async def check(self, profile: Profile) -> None:
        """See that the environment is there, and start its Python in a sandbox once."""
        await to_thread.run_sync(bubblewrap.find_python, Path(profile.image))
        host_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        check_memory(profile, host_bytes=host_bytes)
        name = f"check-{secrets.token_hex(6)}"
        directory = self._state_directory / f".{name}"
        launch = await to_thread.run_sync(self._trial, name, directory, profile)
        try:
            await self._try(launch)
        finally:
            with CancelScope(shield=True):
                await self.discard(name)
                await to_thread.run_sync(shutil.rmtree, directory, True)

    async def launch(self, launch: Launch) -> Sandbox:
        """Start a keeper and wait until its sandbox runs."""
        with CancelScope(shield=True):
            sandbox = self._follow(launch.name, await to_thread.run_sync(self._start, launch))
        try:
            await anyio.lowlevel.checkpoint()
        except BaseException:
            with CancelScope(shield=True):
                await sandbox.remove()
            raise
        return sandbox

    async def adopt(self, process_id: str) -> Sandbox | None:
        """Take over a running sandbox by its name."""
        if (known := self._sandboxes.get(process_id)) is not None:
            return known
        started = await to_thread.run_sync(self._find, process_id)
        return self._follow(process_id, started) if started else None

    async def owned(self) -> list[Owned]:
        """Every sandbox written down in the state directory, those that ended as well."""
        return await to_thread.run_sync(self._list)

    async def discard(self, process_id: str) -> None:
        """Remove a sandbox, running or not."""
        if (known := self._sandboxes.get(process_id)) is not None:
            await known.kill()
        await to_thread.run_sync(self._remove, process_id)

    def directory_of(self, name: str) -> Path:
        """Where the sandbox of that name is written down."""
        if not _NAME.fullmatch(name):
            raise EngineError(f"{name!r} is not the name of a sandbox")
        return self._state_directory / name

    def state_of(self, name: str) -> Mapping[str, Any]:
        """What its keeper has written so far."""
        return _read_json(self.directory_of(name) / "state")

    def forget(self, sandbox: Sandbox) -> None:
        """Stop following a sandbox that has ended."""
        self._sandboxes.pop(sandbox.id, None)

    def _follow(self, name: str, started: _Started) -> Sandbox:
        sandbox = Sandbox(self, name, started)
        self._sandboxes[name] = sandbox
        return sandbox

    def _prepare(self) -> None:
        self._state_directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        if self._control_groups:
            self._tree = CgroupTree.find()
        self.capabilities = self._capabilities()

    def _capabilities(self) -> Capabilities:
        return Capabilities(
            image=False,
            own_uid=self._root,
            memory_limit=self._tree is not None,
            process_limit=self._tree is not None or self._root or keeper.counts_by_namespace(),
            cpu_limit=self._tree is not None and self._tree.bounds_cpu,
            resize=True,
            survives_worker=True,
        )

    def _start(self, launch: Launch) -> _Started:
        directory = self.directory_of(launch.name)
        try:
            directory.mkdir(mode=0o700, parents=True)
        except FileExistsError:
            raise EngineError(f"there is a sandbox called {launch.name} already") from None
        try:
            return self._start_in(directory, launch)
        except (OSError, ConfigurationError) as error:
            self._remove(launch.name)
            raise EngineError(f"the sandbox could not be started: {error}") from error
        except BaseException:
            self._remove(launch.name)
            raise

    def _start_in(self, directory: Path, launch: Launch) -> _Started:
        (directory / "root").mkdir()
        facts = {"owner": launch.owner, "slot_id": launch.slot_id, "boot": _boot_id()}
        (directory / "launch").write_text(json.dumps(facts), encoding="utf-8")
        group = self._tree.create(launch.owner, launch.name) if self._tree else None
        if group is not None:
            group.limit(launch.profile.limits, extra_processes=bubblewrap.SANDBOX_PROCESSES)
        plan = bubblewrap.plan(
            launch,
            directory=directory,
            private=(self._state_directory, launch.data_directory, launch.run_directory),
            drop_root=self._root,
            doors=group.doors() if group else [],
            bounded_by_group=group is not None,
        )
        keeper_fd = _spawn_keeper(plan)
        try:
            init, _ = _read_json(directory / "state")["init"]
            return _Started(keeper_fd, init, os.pidfd_open(init), group)
        except BaseException:
            _send(keeper_fd, signal.SIGKILL)
            os.close(keeper_fd)
            raise

    def _find(self, name: str) -> _Started | None:
        directory = self.directory_of(name)
        facts, state = _read_json(directory / "launch"), _read_json(directory / "state")
        if facts.get("boot") != _boot_id() or "exit_code" in state or "init" not in state:
            return None
        keeper_fd = _open_process(state["keeper"])
        if keeper_fd is None:
            return None
        init_fd = _open_process(state["init"])
        if init_fd is None:
            os.close(keeper_fd)
            return None
        group = self._tree.group(facts["owner"], name) if self._tree else None
        return _Started(keeper_fd, state["init"][0], init_fd, group)

    def _list(self) -> list[Owned]:
        if not self._state_directory.is_dir():
            return []
        found = []
        for directory in sorted(self._state_directory.iterdir()):
            facts = _read_json(directory / "launch")
            if not facts:
                continue
            state = _read_json(directory / "state")
            running = facts["boot"] == _boot_id() and any(
                _is_running(state[kind]) for kind in ("keeper", "init") if kind in state
            )
            found.append(
                Owned(
                    id=directory.name,
                    name=directory.name,
                    owner=facts["owner"],
                    slot_id=facts["slot_id"],
                    running=running,
                )
            )
        return found

    def _remove(self, name: str) -> None:
        """End what may still run, and remove the control group and the directory."""
        directory = self.directory_of(name)
        facts, state = _read_json(directory / "launch"), _read_json(directory / "state")
        if facts.get("boot") == _boot_id():
            if "init" in state:
                _end_process(state["init"])
            if "keeper" in state:
                # It ends by itself, having reaped the rest, once its sandbox has.
                _end_process(state["keeper"], patience=KILL_SECONDS if "init" in state else 0)
        if self._tree is not None and facts:
            group = self._tree.group(facts["owner"], name)
            for pid in group.processes():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            group.remove()
            self._tree.prune(facts["owner"])
        shutil.rmtree(directory, ignore_errors=True)

    def _trial(self, name: str, directory: Path, profile: Profile) -> Launch:
        uid = _NOBODY if self._root else os.getuid()
        for part in ("data", "run"):
            path = directory / part
            path.mkdir(parents=True)
            os.chown(path, uid, uid if self._root else -1)
        return Launch(
            name=name,
            owner="check",
            slot_id="",
            profile=profile,
            argv=(f"{profile.image}/bin/python", "-c", "pass"),
            environment={},
            uid=uid,
            data_directory=directory / "data",
            run_directory=directory / "run",
        )

    async def _try(self, launch: Launch) -> None:
        try:
            with anyio.fail_after(CHECK_SECONDS):
                sandbox = await self.launch(launch)
                how, text = await sandbox.wait(), await sandbox.output()
        except EngineError as error:
            cure = None
            if "execvp" not in str(error):
                cure = await to_thread.run_sync(bubblewrap.why_refused)
            raise ConfigurationError(f"{error}. {cure}" if cure else str(error)) from error
        except TimeoutError:
            raise ConfigurationError(
                f"a Python in a sandbox did not end within {CHECK_SECONDS:.0f} seconds"
            ) from None
        if how.exit_code != 0:
            raise ConfigurationError(
                f"the Python of {launch.profile.image} does not run in a sandbox "
                f"(exit code {how.exit_code}): {text.strip()[-500:]}"
            )


@dataclass(frozen=True, slots=True)
class _Started:
    """What it takes to follow a sandbox. Whoever gets it closes the descriptors."""

    keeper_fd: int
    init: int
    init_fd: int
    group: Cgroup | None


def _spawn_keeper(plan: Mapping[str, Any]) -> int:
    """Start a keeper; a descriptor of it once its sandbox runs. Blocks.

    Raises:
        EngineError: it does not run; the keeper has ended.
    """
    given = os.memfd_create("plan", os.MFD_CLOEXEC)
    report, report_end = os.pipe2(os.O_CLOEXEC)
    try:
        with open(given, "wb", closefd=False) as file:
            file.write(json.dumps(plan).encode())
        os.lseek(given, 0, os.SEEK_SET)
        pid = os.posix_spawn(
            sys.executable,
            [sys.executable, "-I", "-S", "-X", "utf8", keeper.__file__],
            # The environment of this process has keys in it, and would be handed on.
            {},
            file_actions=[
                (os.POSIX_SPAWN_DUP2, given, 0),
                (os.POSIX_SPAWN_DUP2, report_end, 1),
                (os.POSIX_SPAWN_DUP2, report_end, 2),
            ],
            setsid=True,
            setsigmask=(),
            setsigdef=(signal.SIGINT, signal.SIGTERM, signal.SIGHUP),
        )
        keeper_fd = os.pidfd_open(pid)
        os.close(report_end)
        report_end = -1
        error = _read_report(report)
        if error is None:
            return keeper_fd
        _send(keeper_fd, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            os.waitid(os.P_PIDFD, keeper_fd, os.WEXITED)
        os.close(keeper_fd)
        raise EngineError(f"the sandbox could not be started: {error}")
    finally:
        for descriptor in (given, report, report_end):
            if descriptor >= 0:
                os.close(descriptor)


def _read_report(report: int) -> str | None:
    """Wait for the keeper's line: what went wrong, or None."""
    text = b""
    deadline = time.monotonic() + START_SECONDS
    while b"\n" not in text or not text.startswith(b"{"):
        readable, _, _ = select.select([report], [], [], max(0.0, deadline - time.monotonic()))
        if not readable:
            return f"its keeper said nothing for {START_SECONDS:.0f} seconds"
        chunk = os.read(report, 65536)
        if not chunk:
            return text.decode(errors="replace").strip() or "its keeper was killed"
        text += chunk
    error = json.loads(text).get("error")
    return None if error is None else str(error)


def _signal_kernel(init: int, signum: int) -> None:
    kernel = keeper.first_child(init)
    if kernel is None:
        return
    try:
        descriptor = os.pidfd_open(kernel)
    except ProcessLookupError:
        return
    try:
        # The id may have gone to another process before the descriptor was there.
        if keeper.first_child(init) == kernel:
            _send(descriptor, signum)
    finally:
        os.close(descriptor)


def _send(process_fd: int, signum: int) -> None:
    if process_fd >= 0:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(process_fd, signum)


def _open_process(identity: list[int]) -> int | None:
    """A descriptor of the process with that id and start time; None when it has ended."""
    pid, started = identity
    if started is None or keeper.start_time(pid) != started:
        return None
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return None
    if keeper.start_time(pid) == started:
        return descriptor
    os.close(descriptor)
    return None


def _is_running(identity: list[int]) -> bool:
    pid, started = identity
    return started is not None and keeper.start_time(pid) == started


def _end_process(identity: list[int], *, patience: float = 0) -> None:
    """SIGKILL a process, once it had that many seconds to end by itself, and wait for its end."""
    descriptor = _open_process(identity)
    if descriptor is None:
        return
    try:
        if not select.select([descriptor], [], [], patience)[0]:
            _send(descriptor, signal.SIGKILL)
            select.select([descriptor], [], [], KILL_SECONDS)
        with contextlib.suppress(ChildProcessError):
            os.waitid(os.P_PIDFD, descriptor, os.WEXITED | os.WNOHANG)
    finally:
        os.close(descriptor)


def _sample_tree(tree: list[int]) -> Sample:
    """Sums over processes. What they share counts for each of them."""
    ticks = resident = peak = threads = 0
    for pid in tree:
        fields = keeper.stat_fields(pid)
        if len(fields) > 17:
            ticks += sum(map(int, fields[11:15]))
            threads += int(fields[17])
        sizes = keeper.status_bytes(pid, "VmRSS", "VmHWM")
        resident, peak = resident + sizes["VmRSS"], peak + sizes["VmHWM"]
    return Sample(
        cpu_seconds=ticks / _CLOCK_TICKS,
        memory_bytes=resident,
        memory_peak_bytes=peak,
        processes=threads,
    )


def _reset_peak_of(pid: int) -> None:
    """Let `VmHWM` start from the present size. Source: proc(5), clear_refs, 5."""
    with contextlib.suppress(OSError):
        descriptor = os.open(f"/proc/{pid}/clear_refs", os.O_WRONLY | os.O_CLOEXEC)
        try:
            os.pwrite(descriptor, b"5", 0)
        finally:
            os.close(descriptor)


def _read_json(path: Path) -> dict[str, Any]:
    """A file that is replaced whole, or {}."""
    text = keeper.read_file(str(path))
    document = json.loads(text) if text else {}
    return document if isinstance(document, dict) else {}


def _boot_id() -> str:
    return (keeper.read_file("/proc/sys/kernel/random/boot_id") or b"").decode().strip()
