"""Control groups, versions 1 and 2: what a process tree uses, and bounds on it.

Above: container.py (reads the group that the engine made) and sandbox.py (makes its own).
Below: the cgroup file systems. Reading never raises: what the host does not tell is None. Every
read is one small kernel file, so that callers may read on the event loop.
"""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal, Self

from kernelpool.errors import ConfigurationError
from kernelpool.keeper import read_file
from kernelpool.profile import Limits
from kernelpool.runtime import Sample

CPU_PERIOD_US: Final = 100_000
"""Microseconds over which processor time is counted. Source: the default of both versions."""

REMOVE_ATTEMPTS: Final = 50
"""Tries, 20 ms apart, to remove a group whose last process has just ended: the kernel of the host
takes a moment to let go of it."""

UNIFIED: Final = ""
"""Stands for the one hierarchy of version 2 where version 1 has a controller's name."""

_CONTROLLERS: Final = ("memory", "pids", "cpu", "cpuacct")
_IN_MODIFY: Final = 0x2


@dataclass(frozen=True, slots=True)
class Mount:
    """A mounted cgroup file system."""

    point: Path
    root: str
    """Which group of the hierarchy is seen at `point`; not `/` inside some containers."""

    def locate(self, group: str) -> Path | None:
        """The directory of a group named as in `/proc/<pid>/cgroup`, if seen from here."""
        if group == self.root or self.root == "/":
            relative = group if self.root == "/" else ""
        elif group.startswith(self.root + "/"):
            relative = group[len(self.root) :]
        else:
            return None
        return self.point / relative.lstrip("/")


@dataclass(frozen=True, slots=True)
class Hierarchies:
    """Where this host mounts which controller."""

    version: Literal[1, 2]
    mounts: Mapping[str, Mount]
    """By controller; with version 2 one entry, `UNIFIED`."""

    @classmethod
    def parse(cls, mountinfo: str) -> Hierarchies | None:
        """Read them from the text of `/proc/<pid>/mountinfo`; None when there are none.

        A hybrid host counts as version 1: its memory controller lives there.
        """
        controllers: dict[str, Mount] = {}
        unified: Mount | None = None
        for line in mountinfo.splitlines():
            before, _, after = line.partition(" - ")
            fields, kind = before.split(), after.split()
            if len(fields) < 5 or len(kind) < 3 or not kind[0].startswith("cgroup"):
                continue
            mount = Mount(point=Path(_unescape(fields[4])), root=_unescape(fields[3]))
            if kind[0] == "cgroup2":
                unified = unified or mount
            for option in kind[2].split(","):
                if kind[0] == "cgroup" and option in _CONTROLLERS:
                    controllers.setdefault(option, mount)
        if "memory" in controllers:
            return cls(version=1, mounts=controllers)
        return cls(version=2, mounts={UNIFIED: unified}) if unified else None

    @classmethod
    def of_host(cls) -> Hierarchies | None:
        """Those that this process sees."""
        return cls.parse(_read(Path("/proc/self/mountinfo")) or "")

    def groups(self, membership: str) -> dict[str, Path]:
        """Directories by controller from the text of `/proc/<pid>/cgroup`."""
        found: dict[str, Path] = {}
        for line in membership.splitlines():
            _, _, rest = line.partition(":")
            names, _, group = rest.partition(":")
            for name in names.split(","):
                mount = self.mounts.get(name)
                if mount and (path := mount.locate(group)):
                    found[name] = path
        return found


class Cgroup:
    """One control group, whose directories may be several with version 1."""

    def __init__(self, version: Literal[1, 2], paths: Mapping[str, Path]) -> None:
        self.version = version
        self.paths = paths
        self._peak_fd: int | None = None

    def __repr__(self) -> str:
        return f"<Cgroup v{self.version} {self._path('memory')}>"

    def sample(self) -> Sample:
        """What the group uses now."""
        used = self._number("memory", "memory.usage_in_bytes", "memory.current")
        reclaimable = self._field("memory", "memory.stat", ("total_inactive_file", "inactive_file"))
        return Sample(
            cpu_seconds=self._cpu_seconds(),
            memory_bytes=None if used is None else max(0, used - (reclaimable or 0)),
            memory_peak_bytes=self._peak(),
            processes=self._number("pids", "pids.current", "pids.current"),
            out_of_memory_kills=self.out_of_memory_kills(),
            process_limit_hits=self._field("pids", "pids.events", ("max",)),
        )

    def spent(self) -> Sample:
        """What an execution's begin and end need of `sample`, at a third of its cost."""
        return Sample(
            cpu_seconds=self._cpu_seconds(),
            memory_peak_bytes=self._peak(),
            process_limit_hits=self._field("pids", "pids.events", ("max",)),
        )

    def out_of_memory_kills(self) -> int | None:
        """How many processes the memory limit has killed."""
        name = "memory.oom_control" if self.version == 1 else "memory.events"
        return self._field("memory", name, ("oom_kill",))

    def reset_peak(self) -> None:
        """Let the memory peak count from now.

        Version 2 can since Linux 6.12, and then only for the reader that asked: the descriptor is
        kept until `close`. Before, the peak stays that of the whole life.
        """
        path = self._path("memory")
        if path is None:
            return
        with suppress(OSError):
            if self.version == 1:
                _write(path / "memory.max_usage_in_bytes", "0")
                return
            if self._peak_fd is None:
                self._peak_fd = os.open(path / "memory.peak", os.O_RDWR | os.O_CLOEXEC)
            os.pwrite(self._peak_fd, b"reset", 0)

    def close(self) -> None:
        """Let go of the descriptor that `reset_peak` may have opened."""
        if self._peak_fd is not None:
            os.close(self._peak_fd)
            self._peak_fd = None

    def limit(self, limits: Limits, *, extra_processes: int = 0) -> None:
        """Bound memory, processes and processor time.

        Args:
            limits: the bounds.
            extra_processes: what the sandbox itself needs beside them.

        Raises:
            OSError: the host refused one of them.
        """
        self.limit_memory(limits.memory_bytes)
        if path := self._path("pids"):
            _write(path / "pids.max", str(limits.processes + extra_processes))
        if path := self._path("cpu"):
            quota = max(1000, int(limits.cpus * CPU_PERIOD_US))
            if self.version == 1:
                _write(path / "cpu.cfs_period_us", str(CPU_PERIOD_US))
                _write(path / "cpu.cfs_quota_us", str(quota))
            else:
                _write(path / "cpu.max", f"{quota} {CPU_PERIOD_US}")

    def limit_memory(self, memory_bytes: int) -> None:
        """Bound memory, swap excluded: the group has none.

        Raises:
            OSError: the host refused, for one because more is in use and cannot be reclaimed.
        """
        path = self._path("memory")
        if path is None:
            return
        if self.version == 2:
            _write(path / "memory.max", str(memory_bytes))
            with suppress(FileNotFoundError):
                _write(path / "memory.swap.max", "0")
            return
        limit, with_swap = path / "memory.limit_in_bytes", path / "memory.memsw.limit_in_bytes"
        if not with_swap.exists():
            _write(limit, str(memory_bytes))
            _write(path / "memory.swappiness", "0")
            return
        # Memory and swap together may never be less than memory: which goes first depends.
        growing = memory_bytes > int(_read(limit) or 0)
        for file in (with_swap, limit) if growing else (limit, with_swap):
            _write(file, str(memory_bytes))

    def doors(self) -> list[Path]:
        """The files into which a process writes `0` to enter the group."""
        return [path / "cgroup.procs" for path in self._directories()]

    def processes(self) -> list[int]:
        """Ids of the processes inside, as this process sees them."""
        path = self._path("memory")
        text = _read(path / "cgroup.procs") if path else None
        return [int(pid) for pid in (text or "").split()]

    def remove(self) -> bool:
        """Remove the group; False when processes still hold it. Blocks for at most a second."""
        self.close()
        for path in self._directories():
            for attempt in range(REMOVE_ATTEMPTS):
                try:
                    path.rmdir()
                except FileNotFoundError:
                    break
                except OSError:
                    if attempt == REMOVE_ATTEMPTS - 1:
                        return False
                    time.sleep(0.02)
                else:
                    break
        return True

    def _directories(self) -> list[Path]:
        return list(dict.fromkeys(self.paths.values()))

    def _path(self, controller: str) -> Path | None:
        return self.paths.get(controller if self.version == 1 else UNIFIED)

    def _number(self, controller: str, v1: str, v2: str) -> int | None:
        path = self._path(controller)
        text = _read(path / (v1 if self.version == 1 else v2)) if path else None
        return int(text) if text and text.strip().isdigit() else None

    def _field(self, controller: str, name: str, keys: Iterable[str]) -> int | None:
        path = self._path(controller)
        text = _read(path / name) if path else None
        fields = dict(line.split(maxsplit=1) for line in (text or "").splitlines() if " " in line)
        return next((int(fields[key]) for key in keys if key in fields), None)

    def _cpu_seconds(self) -> float | None:
        if self.version == 1:
            nanoseconds = self._number("cpuacct", "cpuacct.usage", "")
            return None if nanoseconds is None else nanoseconds / 1e9
        microseconds = self._field("cpu", "cpu.stat", ("usage_usec",))
        return None if microseconds is None else microseconds / 1e6

    def _peak(self) -> int | None:
        if self._peak_fd is not None:
            with suppress(OSError, ValueError):
                return int(os.pread(self._peak_fd, 64, 0))
            return None
        return self._number("memory", "memory.max_usage_in_bytes", "memory.peak")


def of_process(pid: int) -> Cgroup | None:
    """The group a process is in; None when it ended or the host has no groups."""
    hierarchies = Hierarchies.of_host()
    membership = _read(Path(f"/proc/{pid}/cgroup"))
    if hierarchies is None or membership is None:
        return None
    paths = hierarchies.groups(membership)
    return Cgroup(hierarchies.version, paths) if paths else None


def of_container(container_id: str, *, pid: int | None = None) -> Cgroup | None:
    """The group of a Docker container, whichever driver named it.

    Args:
        container_id: the full id.
        pid: the container's first process as the engine tells it (`State.Pid`), which finds the
            group whatever its parent is called; without it the default names are tried.
    """
    if pid:
        group = of_process(pid)
        if group is not None and any(container_id in str(p) for p in group.paths.values()):
            return group
    hierarchies = Hierarchies.of_host()
    if hierarchies is None:
        return None
    names = (f"docker/{container_id}", f"system.slice/docker-{container_id}.scope")
    paths = {
        controller: path
        for controller, mount in hierarchies.mounts.items()
        for name in names
        if _read((path := mount.point / name) / "cgroup.procs") is not None
    }
    return Cgroup(hierarchies.version, paths) if paths else None


class CgroupTree:
    """The place below which this process may make groups: `kernelpool/<owner>/<name>`."""

    def __init__(self, version: Literal[1, 2], bases: Mapping[str, Path]) -> None:
        self.version = version
        self._bases = bases

    @classmethod
    def find(cls) -> Self | None:
        """The tree of this host; None when memory and processes cannot both be bounded in it.

        Root takes the top of each hierarchy. Anyone else needs version 2 and a delegated group
        above its own, as systemd gives every user manager: a group that holds processes of its
        own cannot hand controllers down.
        """
        hierarchies = Hierarchies.of_host()
        if hierarchies is None:
            return None
        if hierarchies.version == 1:
            bases = {name: mount.point / "kernelpool" for name, mount in hierarchies.mounts.items()}
            usable = {"memory", "pids"} <= bases.keys() and all(
                os.access(base.parent, os.W_OK) for base in bases.values()
            )
            tree = cls(1, bases) if usable else None
        else:
            tree = cls._find_unified(hierarchies.mounts[UNIFIED])
        return tree if tree is not None and tree._works() else None

    @classmethod
    def _find_unified(cls, mount: Mount) -> Self | None:
        if os.access(mount.point / "cgroup.subtree_control", os.W_OK):
            return cls(2, {UNIFIED: mount.point / "kernelpool"})
        own = Hierarchies(2, {UNIFIED: mount}).groups(_read(Path("/proc/self/cgroup")) or "")
        base: Path | None = None
        for path in own[UNIFIED].parents if UNIFIED in own else ():
            if not path.is_relative_to(mount.point) or not os.access(path, os.W_OK):
                break
            if os.access(path / "cgroup.procs", os.W_OK):
                base = path / "kernelpool"
        return cls(2, {UNIFIED: base}) if base else None

    @property
    def bounds_cpu(self) -> bool:
        """Whether processor time can be bounded too."""
        if self.version == 1:
            return "cpu" in self._bases
        available = _read(self._bases[UNIFIED].parent / "cgroup.controllers") or ""
        return "cpu" in available.split()

    def create(self, owner: str, name: str) -> Cgroup:
        """Make a group.

        Raises:
            OSError: the host refused.
        """
        for attempt in range(REMOVE_ATTEMPTS):
            group = self.group(owner, name)
            try:
                for controller, path in group.paths.items():
                    self._make(self._bases[controller], path)
            except FileNotFoundError:
                # Another worker removed the empty directories above between two of our steps.
                if attempt == REMOVE_ATTEMPTS - 1:
                    raise
            else:
                return group
        raise AssertionError("unreachable")

    def group(self, owner: str, name: str) -> Cgroup:
        """The group of that name, whether or not it exists."""
        paths = {controller: base / owner / name for controller, base in self._bases.items()}
        return Cgroup(self.version, paths)

    def prune(self, owner: str) -> None:
        """Remove the owner's directories, and ours, if nothing is left in them."""
        for base in self._bases.values():
            with suppress(OSError):
                (base / owner).rmdir()
                base.rmdir()

    def _make(self, base: Path, path: Path) -> None:
        if self.version == 2:
            _hand_down(base.parent)
        for directory in (base, path.parent):
            directory.mkdir(exist_ok=True)
            if self.version == 2:
                _hand_down(directory)
        path.mkdir(exist_ok=True)

    def _works(self) -> bool:
        owner = f"probe-{os.getpid()}"
        group = self.group(owner, "probe")
        try:
            self.create(owner, "probe").limit(Limits())
        except OSError:
            return False
        finally:
            group.remove()
            self.prune(owner)
        return True


class OutOfMemoryWatch:
    """A descriptor that becomes readable when the memory limit was hit in a group.

    Readable means "look at the counter": version 1 announces before it kills, version 2 announces
    other events too, and both announce the group's removal.
    """

    def __init__(self, group: Cgroup) -> None:
        path = group.paths["memory" if group.version == 1 else UNIFIED]
        self._fds: list[int] = []
        try:
            if group.version == 1:
                self._listen_v1(path)
            else:
                self._listen_v2(path)
        except OSError as error:
            self.close()
            raise ConfigurationError(f"cannot watch the memory events of {path}: {error}") from None

    def fileno(self) -> int:
        """The descriptor to wait for."""
        return self._fds[0]

    def acknowledge(self) -> None:
        """Make it wait for the next event."""
        with suppress(BlockingIOError):
            os.read(self._fds[0], 4096)

    def close(self) -> None:
        """Stop watching. Idempotent."""
        while self._fds:
            os.close(self._fds.pop())

    def _listen_v1(self, path: Path) -> None:
        self._fds.append(os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK))
        self._fds.append(os.open(path / "memory.oom_control", os.O_RDONLY | os.O_CLOEXEC))
        _write(path / "cgroup.event_control", f"{self._fds[0]} {self._fds[1]}")

    def _listen_v2(self, path: Path) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        descriptor = libc.inotify_init1(os.O_CLOEXEC | os.O_NONBLOCK)
        if descriptor < 0:
            raise OSError(ctypes.get_errno(), "inotify_init1")
        self._fds.append(descriptor)
        events = os.fsencode(path / "memory.events")
        if libc.inotify_add_watch(descriptor, events, _IN_MODIFY) < 0:
            raise OSError(ctypes.get_errno(), "inotify_add_watch")


def _hand_down(directory: Path) -> None:
    """Let the groups below a directory have the controllers."""
    available = (_read(directory / "cgroup.controllers") or "").split()
    handed_down = (_read(directory / "cgroup.subtree_control") or "").split()
    wanted = [name for name in ("memory", "pids", "cpu") if name in available]
    if {"memory", "pids"} - set(wanted):
        raise OSError(f"{directory} has no memory or no pids controller")
    if missing := [name for name in wanted if name not in handed_down]:
        _write(directory / "cgroup.subtree_control", " ".join(f"+{name}" for name in missing))


def _read(path: Path) -> str | None:
    content = read_file(str(path))
    return None if content is None else content.decode()


def _write(path: Path, text: str) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.pwrite(descriptor, text.encode(), 0)
    finally:
        os.close(descriptor)


def _unescape(field: str) -> str:
    """Undo the octal escapes of mountinfo."""
    for code, character in ((r"\040", " "), (r"\011", "\t"), (r"\012", "\n"), (r"\134", "\\")):
        field = field.replace(code, character)
    return field
