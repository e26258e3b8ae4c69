"""The process beside each bubblewrap sandbox: starts it, outlives the worker, writes down its end.

Above: sandbox.py, which runs this file with a bare interpreter and reads what it writes; cgroup.py,
which reads files in the same way. Below: bubblewrap. Standard library only, and nothing of this
package: a keeper costs memory once per kernel.

Why there is one. A sandbox must go on when the worker is killed: somebody has to read its pipe (a
file would grow without bound, a pipe without reader ends whoever writes), to reap it, to end what
its code left running, to watch its memory where no control group does, and to note its exit code.
None of that may run inside the sandbox, in reach of its code.

    worker ─▶ keeper ─▶ bwrap (monitor) ─▶ bwrap (init of the namespace, reaps) ─▶ kernel process

A plan comes as JSON on standard input; one line goes back on standard output, `{"started": true}`
or `{"error": "..."}`. Files in the plan's directory: `state` (JSON: ids and start times, then how
it ended), `output` and `output.old` (the end of what it printed), `memory` (a new limit, if any).
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import select
import signal
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, NoReturn

OUTPUT_BYTES: Final = 8192
"""How much of the end of the output can be read back, at least; on disk it is at most twice that
and one read."""

READ_BYTES: Final = 65536
READ_PAUSE: Final = 0.002
"""Seconds between two full reads. The sandbox waits meanwhile, so that a flood costs it 32 MB/s of
its own and the host next to nothing."""

START_SECONDS: Final = 30.0
EXEC_POLL_SECONDS: Final = 0.002
"""bubblewrap tells when the namespaces exist and when the command has ended, not when it begins."""

WATCH_SECONDS: Final = 0.25
WATCH_CLOSELY_SECONDS: Final = 0.05
"""Seconds between two looks at the memory, and from half of the limit on."""

FOUND_SECONDS: Final = 30.0
"""Seconds between two looks whether the directory is still there: without it no sweep can find the
sandbox, so it ends."""

NICE: Final = 5
OOM_SCORE: Final = 500
"""Where the host itself runs out of memory, kernels go before the worker (-1000..1000)."""

_CLONE_NEWNS: Final = 0x20000
_MS_NOSUID, _MS_NODEV, _MS_BIND, _MS_REC, _MS_SLAVE = 0x2, 0x4, 0x1000, 0x4000, 0x80000
_MNT_DETACH: Final = 2
_PR_SET_CHILD_SUBREAPER: Final = 36
_PIVOT_ROOT: Final = {"x86_64": 155, "ppc64le": 203, "s390x": 217}
_PIVOT_ROOT_ELSEWHERE: Final = 41
"""The number in the generic table, which every younger machine has."""

_PAGE_BYTES: Final = os.sysconf("SC_PAGE_SIZE")

Plan = Mapping[str, Any]


def read_file(path: str) -> bytes | None:
    """A small file of the kernel or of ours; None when it is not there (any more).

    By `pread`, since a file of the kernel never blocks.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        chunks: list[bytes] = []
        while chunk := os.pread(descriptor, READ_BYTES, sum(map(len, chunks))):
            chunks.append(chunk)
        return b"".join(chunks)
    except OSError:
        return None
    finally:
        os.close(descriptor)


def stat_fields(pid: int) -> list[bytes]:
    """The fields of `/proc/<pid>/stat` after the name, state first; empty for no such process."""
    return (read_file(f"/proc/{pid}/stat") or b"").rpartition(b")")[2].split()


def start_time(pid: int) -> int | None:
    """When a process started, in ticks since the host did; with its id this names it for good."""
    fields = stat_fields(pid)
    return int(fields[19]) if len(fields) > 19 and fields[0] not in {b"Z", b"X"} else None


def children(pid: int) -> list[int]:
    """The children of a process, whichever of its threads started them."""
    try:
        threads = [task.name for task in Path(f"/proc/{pid}/task").iterdir()]
    except OSError:
        return []
    found: list[int] = []
    for thread in threads:
        found += map(int, (read_file(f"/proc/{pid}/task/{thread}/children") or b"").split())
    return found


def process_tree(pid: int) -> list[int]:
    """A process and all below it. Of a namespace's init: all processes of the namespace."""
    tree = [pid]
    for member in tree:
        tree += children(member)
    return tree


def namespace_pid(pid: int) -> int | None:
    """The id that a process has in its own, innermost namespace."""
    for line in (read_file(f"/proc/{pid}/status") or b"").splitlines():
        if line.startswith(b"NSpid:"):
            return int(line.split()[-1])
    return None


def counts_by_namespace() -> bool:
    """Whether RLIMIT_NPROC counts the processes of a user namespace: since Linux 5.14."""
    major, minor = os.uname().release.split(".")[:2]
    return (int(major), int("".join(filter(str.isdigit, minor)) or 0)) >= (5, 14)


def status_bytes(pid: int, *keys: str) -> dict[str, int]:
    """Sizes from `/proc/<pid>/status`; 0 where it does not say."""
    sizes = dict.fromkeys(keys, 0)
    for line in (read_file(f"/proc/{pid}/status") or b"").decode(errors="replace").splitlines():
        key, _, value = line.partition(":")
        if key in sizes:
            sizes[key] = int(value.split()[0]) * 1024
    return sizes


def first_child(init: int) -> int | None:
    """The kernel process: what a namespace's init started first, so that its id there is 2."""
    return next((pid for pid in children(init) if namespace_pid(pid) == 2), None)


def memory_of(tree: list[int], *, limit_bytes: int) -> int:
    """Bytes that the processes of a sandbox hold, its tmpfs included.

    Resident sizes count shared pages once per process; only when their sum is over the limit is
    the dearer proportional size read.
    """
    files = _tmpfs_bytes(tree[0])
    resident = sum(
        int(fields[1]) * _PAGE_BYTES
        for pid in tree
        if len(fields := (read_file(f"/proc/{pid}/statm") or b"").split()) > 1
    )
    if resident + files <= limit_bytes:
        return resident + files
    return sum(map(_proportional_bytes, tree)) + files


def _proportional_bytes(pid: int) -> int:
    for line in (read_file(f"/proc/{pid}/smaps_rollup") or b"").splitlines():
        if line.startswith(b"Pss:"):
            return int(line.split()[1]) * 1024
    return 0


def _tmpfs_bytes(init: int) -> int:
    used = 0
    for directory in ("/tmp", "/dev/shm"):  # noqa: S108
        with suppress(OSError):
            stat = os.statvfs(f"/proc/{init}/root{directory}")
            used += (stat.f_blocks - stat.f_bfree) * stat.f_frsize
    return used


class Output:
    """The end of what the sandbox prints: two files, the older of which is replaced in turn."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / "output"
        self._descriptor = self._open()
        self._written = 0

    def append(self, chunk: bytes) -> None:
        """Keep a chunk. A full disk loses it: the sandbox is not to suffer from that."""
        chunk = chunk[-OUTPUT_BYTES:]
        with suppress(OSError):
            if self._written + len(chunk) > OUTPUT_BYTES:
                self._path.rename(f"{self._path}.old")
                os.close(self._descriptor)
                self._descriptor = self._open()
                self._written = 0
            self._written += os.write(self._descriptor, chunk)

    def _open(self) -> int:
        return os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)


class Keeper:
    """Carries one plan out, from start to end."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._directory = Path(plan["directory"])
        self._output = Output(self._directory)
        self._limit_bytes: int | None = plan["watched_memory_bytes"]
        self._out_of_memory = False
        self._state: dict[str, Any] = {"keeper": _identity(os.getpid())}
        self._write_state()
        self._text, self._status, self._release = -1, -1, -1
        self._monitor = self._fork()
        self._monitor_fd = os.pidfd_open(self._monitor)
        self._init: int | None = None
        self._init_fd: int | None = None
        self._news = b""
        self._news_ended = False

    def start(self) -> str | None:
        """Bring the sandbox up to where its command runs; returns what went wrong, if it did."""
        deadline = time.monotonic() + START_SECONDS
        while (init := self._told("child-pid")) is None:
            if self._news_ended or time.monotonic() > deadline:
                return self._why()
            self._listen(deadline - time.monotonic())
        self._init = init
        # Until the monitor reaps it, which it does at its own end only, the id cannot be another's.
        self._init_fd = os.pidfd_open(self._init)
        processes = self._plan["processes"]
        if processes is not None and counts_by_namespace():
            # Set from outside, once the namespace exists: what holds when it is made bounds all
            # processes of the user on this host.
            resource.prlimit(self._init, resource.RLIMIT_NPROC, (processes, processes))
        self._state["init"] = _identity(self._init)
        self._write_state()
        os.write(self._release, b"!")
        while not self._runs() and self._told("exit-code") is None:
            if self._news_ended or time.monotonic() > deadline:
                return self._why()
            self._listen(EXEC_POLL_SECONDS)
        return None

    def keep(self) -> None:
        """Stay until the sandbox has ended, then write down how."""
        poll = select.poll()
        poll.register(self._monitor_fd, select.POLLIN)
        poll.register(self._text, select.POLLIN)
        next_look = time.monotonic()
        while True:
            pause = FOUND_SECONDS
            if self._limit_bytes is not None:
                pause = max(0.0, next_look - time.monotonic())
            ready = dict(poll.poll(pause * 1000))
            if self._text in ready and not self._drain():
                poll.unregister(self._text)
            if self._monitor_fd in ready:
                break
            if not ready and not self._directory.is_dir():
                self._kill_init()
            if self._limit_bytes is not None and time.monotonic() >= next_look:
                next_look = time.monotonic() + self._look(self._limit_bytes)
        self._finish()

    def abandon(self) -> None:
        """End whatever was started."""
        with suppress(ProcessLookupError):
            os.kill(self._monitor, signal.SIGKILL)
        self._kill_init()
        with suppress(ChildProcessError):
            self._reap()

    def note(self, text: str) -> None:
        """Add to what the sandbox printed."""
        self._output.append(text.encode())

    def _fork(self) -> int:
        self._text, text = os.pipe2(os.O_CLOEXEC)
        self._status, status = os.pipe2(os.O_CLOEXEC)
        release, self._release = os.pipe2(os.O_CLOEXEC)
        child = os.fork()
        if child == 0:
            _become_sandbox(self._plan, text=text, status=status, release=release)
        for descriptor in (text, status, release):
            os.close(descriptor)
        os.set_blocking(self._text, False)
        os.set_blocking(self._status, False)
        return child

    def _listen(self, seconds: float) -> None:
        """Take in what bubblewrap says and the sandbox prints within the time."""
        ready, _, _ = select.select([self._status, self._text], [], [], max(0.0, seconds))
        if self._text in ready:
            self._drain()
        if self._status in ready:
            chunk = os.read(self._status, READ_BYTES)
            self._news += chunk
            self._news_ended = not chunk

    def _told(self, key: str) -> int | None:
        """A number that bubblewrap has said so far, in one JSON object a line."""
        for line in self._news.split(b"\n")[:-1]:
            if line.strip() and key in (document := json.loads(line)):
                return int(document[key])
        return None

    def _runs(self) -> bool:
        """Whether the command has taken the place of bubblewrap's own image."""
        assert self._init is not None
        kernel = first_child(self._init)
        if kernel is None:
            return False
        name = read_file(f"/proc/{kernel}/comm")
        return name is not None and name != read_file(f"/proc/{self._init}/comm")

    def _why(self) -> str:
        """The reason for a failed start: what bubblewrap, or we in its place, printed."""
        self.abandon()
        self._drain_rest()
        return tail(self._directory).strip() or f"nothing happened for {START_SECONDS:.0f} seconds"

    def _drain(self) -> bool:
        """Read once from the sandbox' output; False when nobody can write to it any more."""
        try:
            chunk = os.read(self._text, READ_BYTES)
        except BlockingIOError:
            return True
        self._output.append(chunk)
        if len(chunk) == READ_BYTES:
            time.sleep(READ_PAUSE)
        return bool(chunk)

    def _look(self, limit_bytes: int) -> float:
        """Compare memory with its limit, end the sandbox when over; seconds until the next look."""
        if changed := read_file(str(self._directory / "memory")):
            limit_bytes = self._limit_bytes = int(changed)
        assert self._init is not None
        used = memory_of(process_tree(self._init), limit_bytes=limit_bytes)
        if used > limit_bytes:
            self._out_of_memory = True
            self._kill_init()
        return WATCH_CLOSELY_SECONDS if used > limit_bytes / 2 else WATCH_SECONDS

    def _kill_init(self) -> None:
        if self._init_fd is not None:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._init_fd, signal.SIGKILL)

    def _reap(self) -> int:
        """Wait for the monitor and for all of the namespace; returns the monitor's exit code.

        The monitor ends with the command. What the command left behind goes on until the
        namespace's init is killed, which ends every process in it before it ends itself.
        """
        _, status = os.waitpid(self._monitor, 0)
        self._kill_init()
        if self._init_fd is not None:
            with suppress(ChildProcessError):
                os.waitid(os.P_PIDFD, self._init_fd, os.WEXITED)
        code = os.waitstatus_to_exitcode(status)
        return code if code >= 0 else 128 - code

    def _finish(self) -> None:
        code = self._reap()
        self._drain_rest()
        while not self._news_ended:
            self._listen(0)
        told = self._told("exit-code")
        self._state |= {
            "exit_code": code if told is None else told,
            "out_of_memory": self._out_of_memory,
        }
        self._write_state()

    def _drain_rest(self) -> None:
        while self._drain() and select.select([self._text], [], [], 0)[0]:
            pass

    def _write_state(self) -> None:
        path = self._directory / "state"
        new = path.with_suffix(".new")
        with suppress(FileNotFoundError):
            new.write_text(json.dumps(self._state), encoding="utf-8")
            new.replace(path)


def tail(directory: Path) -> str:
    """The last `OUTPUT_BYTES` of what the sandbox of that directory printed."""
    old = read_file(str(directory / "output.old")) or b""
    return (old + (read_file(str(directory / "output")) or b""))[-OUTPUT_BYTES:].decode(
        errors="replace"
    )


def _identity(pid: int) -> list[int | None]:
    return [pid, start_time(pid)]


def _become_sandbox(plan: Plan, *, text: int, status: int, release: int) -> NoReturn:
    """In the forked child: bound it, drop what it may, and turn it into bubblewrap."""
    try:
        os.dup2(text, 1)
        os.dup2(text, 2)
        for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
            # What the worker ignores, SIGINT of a background job for one, is not to be inherited.
            with suppress(OSError):
                signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        for door in plan["doors"]:
            Path(door).write_text("0", encoding="ascii")
        with suppress(OSError):
            Path("/proc/self/oom_score_adj").write_text(str(OOM_SCORE), encoding="ascii")
        if plan["nice"]:
            os.nice(NICE)
        if plan["stage"]:
            _enter_stage(plan["root"], plan["stage"], plan["links"])
        for name, bound in plan["rlimits"].items():
            _bound(getattr(resource, name), bound)
        if plan["uid"] is not None:
            os.setgroups([])
            os.setresgid(plan["uid"], plan["uid"], plan["uid"])
            os.setresuid(plan["uid"], plan["uid"], plan["uid"])
        os.umask(0o022)
        # The parent is the keeper, not the worker: no sandbox is to run without its keeper.
        options = ["--die-with-parent", "--json-status-fd", str(status), "--block-fd", str(release)]
        if plan["seccomp"]:
            options += ["--seccomp", str(_in_memory(bytes.fromhex(plan["seccomp"])))]
        for destination, content in plan["files"].items():
            source = str(_in_memory(content.encode()))
            options += ["--perms", "0444", "--ro-bind-data", source, destination]
        options += ["--remount-ro", "/"]
        # Options on a descriptor: the command line of the namespace's init is seen inside.
        arguments = _in_memory(b"".join(f"{o}\0".encode() for o in [*plan["options"], *options]))
        for descriptor in (status, release):
            os.set_inheritable(descriptor, True)
        command = ["bwrap", "--args", str(arguments), "--", *plan["argv"]]
        os.execve(plan["bwrap"], command, {})  # noqa: S606
    except BaseException as error:
        os.write(2, f"{type(error).__name__}: {error}\n".encode())
    os._exit(126)


def _enter_stage(root: str, stage: list[list[str]], links: Mapping[str, str]) -> None:
    """Make a root of only what the sandbox may see, while still root, and move into it.

    bubblewrap comes after the change of uid, when a directory such as `/root` can no longer be
    entered; what lies below it must be in reach by then. And bubblewrap's monitor stays in this
    mount namespace: were it a copy of the host's, it would hold every other slot's file system.
    """
    libc = ctypes.CDLL(None, use_errno=True)

    def call(name: str, *arguments: object) -> None:
        if getattr(libc, name)(*arguments) != 0:
            code = ctypes.get_errno()
            shown = " ".join(a.decode() for a in arguments if isinstance(a, bytes))
            raise OSError(code, f"{name} {shown}: {os.strerror(code)}")

    none, flags = ctypes.c_char_p(None), ctypes.c_ulong
    call("unshare", _CLONE_NEWNS)
    call("mount", none, b"/", none, flags(_MS_REC | _MS_SLAVE), none)
    safe = flags(_MS_NOSUID | _MS_NODEV)
    call("mount", b"tmpfs", os.fsencode(root), b"tmpfs", safe, b"mode=755,size=1m")
    for source, destination in stage:
        target = Path(root + destination)
        if Path(source).is_dir():
            target.mkdir(parents=True, exist_ok=True)
        else:
            target.parent.mkdir(parents=True, exist_ok=True)
            target.touch()
        bind = flags(_MS_BIND | _MS_REC)
        call("mount", os.fsencode(source), os.fsencode(target), none, bind, none)
    for link, text in links.items():
        Path(root + link).parent.mkdir(parents=True, exist_ok=True)
        Path(root + link).symlink_to(text)
    Path(root, "tmp").mkdir(exist_ok=True)
    Path(root, "tmp").chmod(0o1777)
    os.chdir(root)
    number = _PIVOT_ROOT.get(os.uname().machine, _PIVOT_ROOT_ELSEWHERE)
    call("syscall", ctypes.c_long(number), b".", b".")
    call("umount2", b".", _MNT_DETACH)
    os.chdir("/")


def _bound(kind: int, bound: int) -> None:
    _, hard = resource.getrlimit(kind)
    if hard != resource.RLIM_INFINITY:
        bound = min(bound, hard)
    resource.setrlimit(kind, (bound, bound))


def _in_memory(content: bytes) -> int:
    """A descriptor to read the bytes from, for bubblewrap to inherit."""
    descriptor = os.memfd_create("plan", 0)
    os.write(descriptor, content)
    os.lseek(descriptor, 0, os.SEEK_SET)
    return descriptor


def _adopt_orphans() -> None:
    """Become the parent of processes below whose own parent ends, so that they are reaped."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def main() -> int:
    """Carry out the plan that comes on standard input."""
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))
    os.chdir("/")
    plan = json.loads(sys.stdin.buffer.read())
    nothing = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    os.dup2(nothing, 0)
    _adopt_orphans()
    keeper = Keeper(plan)
    try:
        error = keeper.start()
    except OSError as failure:
        keeper.abandon()
        error = str(failure)
    report = json.dumps({"started": True} if error is None else {"error": error})
    with suppress(OSError):
        os.write(1, f"{report}\n".encode())
    os.dup2(nothing, 1)
    os.dup2(nothing, 2)
    if error is not None:
        return 1
    try:
        keeper.keep()
    except Exception as failure:
        keeper.abandon()
        keeper.note(f"\nthe keeper failed: {failure!r}\n")
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
