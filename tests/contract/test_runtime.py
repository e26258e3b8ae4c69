"""What every Runtime promises, run over each of them: Docker, bubblewrap, bubblewrap that watches.

A process in a sandbox talks to its test through a unix socket in its run directory, so that tests
wait for what happens and not for time to pass.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import shutil
import signal
import socket
import sys
import tempfile
import textwrap
import venv
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import Any, Final

import anyio
import pytest
from anyio import to_thread
from blockbuster import BlockBuster

from kernelpool.container import DockerRuntime
from kernelpool.errors import ConfigurationError, EngineError, ImageMissing
from kernelpool.profile import MIB, Limits, Profile
from kernelpool.runtime import Launch, Process, Runtime
from kernelpool.sandbox import BubblewrapRuntime

ROOT: Final = os.geteuid() == 0
LIMITS: Final = Limits(memory_bytes=256 * MIB, tmp_bytes=32 * MIB, processes=48)
SECRET: Final = "the-key-of-the-server"
UIDS: Final = count(2_950_000)

PRELUDE: Final = """
import json, os, signal, socket, sys, time
line = socket.socket(socket.AF_UNIX)
line.connect("/run/kernel/line")
def say(value): line.sendall(json.dumps(value).encode() + b"\\n")
def hear(): return line.recv(1)
"""

STARTER: Final = """
import asyncio, json, os, sys
from pathlib import Path
from kernelpool.container import DockerRuntime
from kernelpool.profile import Limits, Profile
from kernelpool.runtime import Launch
from kernelpool.sandbox import BubblewrapRuntime

async def main(given):
    launch = given["launch"]
    for key in ("data_directory", "run_directory"):
        launch[key] = Path(launch[key])
    launch["argv"] = tuple(launch["argv"])
    launch["profile"]["limits"] = Limits(**launch["profile"]["limits"])
    launch["profile"] = Profile(**launch["profile"])
    if given["kind"] == "docker":
        runtime = DockerRuntime(owner=launch["owner"], address=os.environ.get("DOCKER_HOST"))
    else:
        runtime = BubblewrapRuntime(
            state_directory=Path(given["state"]), control_groups=given["kind"] == "bubblewrap"
        )
    async with runtime:
        process = await runtime.launch(Launch(**launch))
        print(process.id, flush=True)
        await asyncio.sleep(3600)

asyncio.run(main(json.loads(sys.argv[1])))
"""


@dataclass
class Line:
    """The test's end of what a sandboxed process says and hears."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    async def hear(self) -> Any:
        text = await self.reader.readline()
        assert text, "the process ended before it said anything"
        return json.loads(text)

    async def say(self) -> None:
        self.writer.write(b"!")
        await self.writer.drain()

    async def end(self) -> None:
        """Wait until no process holds the other end any more."""
        assert await self.reader.read() == b""

    async def close(self) -> None:
        self.writer.close()
        with contextlib.suppress(ConnectionError):
            await self.writer.wait_closed()


@dataclass
class Slot:
    """Two directories and a uid, as the pool makes them."""

    directory: Path
    uid: int
    lines: asyncio.Queue[Line] = field(default_factory=asyncio.Queue)

    @property
    def data(self) -> Path:
        return self.directory / "data"

    @property
    def run(self) -> Path:
        return self.directory / "run"


class Bench:
    """A runtime under test and what its processes need."""

    def __init__(self, kind: str, directory: Path, profile: Profile) -> None:
        self.kind = kind
        self.directory = directory
        self.profile = profile
        self.owner = f"test-{secrets.token_hex(3)}"
        self.slots: list[Slot] = []
        self.servers: list[asyncio.Server] = []
        self.lines: list[Line] = []
        self.runtime: Runtime = self.make()

    def make(self) -> Any:
        """Another runtime over the same state, as a restarted worker has it."""
        if self.kind == "docker":
            return DockerRuntime(owner=self.owner, address=os.environ.get("DOCKER_HOST"))
        return BubblewrapRuntime(
            state_directory=self.directory / "state", control_groups=self.kind == "bubblewrap"
        )

    async def slot(self) -> Slot:
        uid = next(UIDS) if ROOT else os.getuid()
        slot = Slot(self.directory / f"slot{len(self.slots)}", uid)
        self.slots.append(slot)

        def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            line = Line(reader, writer)
            self.lines.append(line)
            slot.lines.put_nowait(line)

        await to_thread.run_sync(_make_directories, slot)
        path = slot.run / "line"
        self.servers.append(await asyncio.start_unix_server(connected, path, limit=2**24))
        await to_thread.run_sync(path.chmod, 0o777)
        return slot

    def launch_of(self, slot: Slot, code: str, limits: Limits = LIMITS) -> Launch:
        return Launch(
            name=f"kernelpool-{self.owner}-{secrets.token_hex(4)}",
            owner=self.owner,
            slot_id=slot.directory.name,
            profile=replace(self.profile, limits=limits),
            argv=("python", "-c", PRELUDE + textwrap.dedent(code)),
            environment={"COLOUR": "blue"},
            uid=slot.uid,
            data_directory=slot.data,
            run_directory=slot.run,
        )

    async def start(self, code: str, limits: Limits = LIMITS) -> tuple[Process, Line]:
        """Run code and wait for its call."""
        slot = await self.slot()
        process = await self.runtime.launch(self.launch_of(slot, code, limits))
        return process, await _first_line(process, slot)

    async def ask(self, code: str, limits: Limits = LIMITS) -> Any:
        """Run code that says one thing."""
        process, line = await self.start(code, limits)
        answer = await line.hear()
        await process.remove()
        return answer

    async def mine(self) -> list[str]:
        return [found.id for found in await self.runtime.owned() if found.owner == self.owner]


def _make_directories(slot: Slot) -> None:
    for directory in (slot.data, slot.run):
        directory.mkdir(parents=True)
        if ROOT:
            os.chown(directory, slot.uid, slot.uid)


async def _first_line(process: Process, slot: Slot) -> Line:
    line = asyncio.create_task(slot.lines.get())
    end = asyncio.create_task(process.wait())
    try:
        await asyncio.wait((line, end), return_when=asyncio.FIRST_COMPLETED)
        if not line.done():
            pytest.fail(f"ended as {process.exit}: {await process.output()}")
        return line.result()
    finally:
        line.cancel()
        end.cancel()


@pytest.fixture(scope="session")
def environment_directory() -> Iterator[Path]:
    """A small environment of the Python that runs the tests."""
    directory = Path(tempfile.mkdtemp(prefix="kp-environment-"))
    directory.chmod(0o755)
    venv.create(directory / "python", symlinks=True, with_pip=False)
    yield directory / "python"
    shutil.rmtree(directory)


@pytest.fixture
def short_directory() -> Iterator[Path]:
    """A temporary directory whose path leaves room for the name of a socket."""
    directory = Path(tempfile.mkdtemp(prefix="kp-"))
    yield directory
    shutil.rmtree(directory)


@pytest.fixture(
    params=[
        "bubblewrap",
        "bubblewrap-watching",
        pytest.param("docker", marks=pytest.mark.docker),
    ]
)
async def bench(
    request: pytest.FixtureRequest,
    short_directory: Path,
    environment_directory: Path,
    monkeypatch: pytest.MonkeyPatch,
    _no_blocking_calls: BlockBuster,
) -> AsyncIterator[Bench]:
    """A runtime of each kind, and nothing left of it afterwards."""
    monkeypatch.setenv("KERNELPOOL_MODEL_API_KEY", SECRET)
    # Listing /proc never waits for a disk.
    _no_blocking_calls.functions["os.listdir"].can_block_in("kernelpool/keeper.py", "children")
    kind = request.param
    image = os.environ["KERNELPOOL_IMAGE"] if kind == "docker" else str(environment_directory)
    async with _bench(kind, short_directory, Profile(image=image, limits=LIMITS)) as bench:
        yield bench


@asynccontextmanager
async def _bench(kind: str, directory: Path, profile: Profile) -> AsyncIterator[Bench]:
    bench = Bench(kind, directory, profile)
    async with bench.runtime:  # type: ignore[attr-defined]
        try:
            with anyio.fail_after(60):
                yield bench
        finally:
            for process_id in await bench.mine():
                await bench.runtime.discard(process_id)
            for server in bench.servers:
                server.close()
            for line in bench.lines:
                await line.close()
    uids = {slot.uid for slot in bench.slots}
    assert await to_thread.run_sync(_left_over, bench, uids if ROOT else set()) == []


def _left_over(bench: Bench, uids: set[int]) -> list[str]:
    """Processes, control groups, mounts and files that a test left on the host."""
    left: list[str] = []
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if path.stat().st_uid in uids:
                left.append(f"process {path.name}: {(path / 'status').read_text()}")
    groups = (directory for directory, _, _ in os.walk("/sys/fs/cgroup"))
    left += [group for group in groups if group.endswith(f"/kernelpool/{bench.owner}")]
    mounts = Path("/proc/self/mountinfo").read_text(encoding="utf-8")
    left += [line for line in mounts.splitlines() if str(bench.directory) in line]
    state = bench.directory / "state"
    left += [str(path) for path in state.iterdir()] if state.exists() else []
    return left


async def test_a_process_has_the_environment_that_was_asked_for_and_works_in_the_workspace(
    bench: Bench,
) -> None:
    found = await bench.ask("say([dict(os.environ), os.getcwd(), sys.argv])")

    environment, directory, _ = found
    assert environment["COLOUR"] == "blue"
    assert environment["PATH"]
    assert SECRET not in json.dumps(environment)
    assert directory == "/mnt/data"


async def test_a_process_has_the_uid_of_its_slot_and_no_privileges(bench: Bench) -> None:
    process, line = await bench.start(
        """
        open("/mnt/data/made", "w").close()
        status = dict(l.split(":\\t") for l in open("/proc/self/status").read().splitlines())
        say([os.getuid(), os.getgid(), os.getgroups(), status["CapEff"], status["CapBnd"],
             status["NoNewPrivs"], status["Seccomp"]])
        """
    )

    uid, gid, groups, effective, bounding, no_new_privileges, filtered = await line.hear()
    slot = bench.slots[0]
    made = await to_thread.run_sync((slot.data / "made").stat)
    await process.remove()
    assert uid == gid == slot.uid
    assert groups in ([], [gid])
    assert int(effective, 16) == int(bounding, 16) == 0
    assert (no_new_privileges, filtered) == ("1", "2")
    assert made.st_uid == slot.uid


async def test_only_the_two_directories_and_temporary_space_are_writable(bench: Bench) -> None:
    written = await bench.ask(
        """
        written = []
        for top, directories, _ in os.walk("/"):
            if top in ("/proc", "/sys"):
                directories.clear()
                continue
            directories[:] = [d for d in directories if not os.path.islink(os.path.join(top, d))]
            if top.startswith("/usr/") and top.count("/") > 3:
                directories.clear()
            try:
                open(os.path.join(top, "probe"), "w").close()
            except OSError:
                continue
            os.unlink(os.path.join(top, "probe"))
            written.append(top)
        for path in ("/proc/sys/kernel/hostname", "/proc/sysrq-trigger", sys.executable):
            try:
                open(path, "r+").close()
            except OSError:
                continue
            written.append(path)
        say(written)
        """
    )

    places = {"/mnt/data", "/run/kernel", "/tmp"}
    temporary = {"/dev/shm", "/dev/mqueue"}
    assert places <= set(written)
    # The test's environment lies below the host's /tmp, and so do its parents below this one.
    assert {path for path in written if not path.startswith("/tmp/")} - temporary == places


async def test_nothing_outside_can_be_reached_by_network(bench: Bench) -> None:
    name = f"\0kernelpool-{secrets.token_hex(4)}"
    with socket.socket(socket.AF_UNIX) as abstract, socket.create_server(("", 0)) as server:
        abstract.bind(name)
        abstract.listen()
        reached = await bench.ask(
            f"""
            reached = []
            addresses = [("127.0.0.1", {server.getsockname()[1]}), ("192.0.2.1", 80)]
            for family, address in [(socket.AF_UNIX, {name!r})] + [
                (socket.AF_INET, address) for address in addresses
            ]:
                with socket.socket(family) as out:
                    out.settimeout(2)
                    try:
                        out.connect(address)
                    except OSError:
                        continue
                    reached.append(address)
            say([reached, open("/proc/net/route").read().splitlines()[1:]])
            """
        )

    assert reached == [[], []]


async def test_files_of_the_host_are_not_seen(bench: Bench) -> None:
    await to_thread.run_sync((bench.directory / "of-the-host").touch)
    seen = await bench.ask(
        f"""
        paths = [{str(bench.directory / "of-the-host")!r}, {str(bench.directory / "state")!r},
                 "/var/run/docker.sock", "/var/lib/docker", "/home/user", "/etc/shadow.host",
                 {str(Path(__file__))!r}]
        users = [l.split(":")[0] for l in open("/etc/passwd")]
        say([[p for p in paths if os.path.lexists(p)], users, os.listdir("/dev")])
        """
    )

    paths, users, devices = seen
    assert paths == []
    assert not any(name.startswith(("sd", "vd", "nvme", "loop", "mem", "kmsg")) for name in devices)
    if not bench.runtime.capabilities.image:
        assert set(users) == {"root", "user"}


async def test_processes_of_the_host_are_not_seen(bench: Bench) -> None:
    seen = await bench.ask(
        """
        commands = {}
        for pid in filter(str.isdigit, os.listdir("/proc")):
            with open(f"/proc/{pid}/cmdline") as file:
                commands[pid] = file.read()
        say(commands)
        """
    )

    assert len(seen) <= 4
    assert not any("pytest" in command for command in seen.values())


async def test_an_interrupt_reaches_the_kernel_process_and_only_it(bench: Bench) -> None:
    process, line = await bench.start(
        """
        try:
            say("ready")
            time.sleep(60)
        except KeyboardInterrupt:
            say("interrupted")
        hear()
        sys.exit(5)
        """
    )

    assert await line.hear() == "ready"
    await process.signal(signal.SIGINT)
    assert await line.hear() == "interrupted"
    await line.say()
    assert (await process.wait()).exit_code == 5
    await process.signal(signal.SIGINT)


async def test_the_end_is_told_to_everyone_with_its_exit_code(bench: Bench) -> None:
    process, line = await bench.start("hear(); sys.exit(3)")

    assert process.exit is None
    async with anyio.create_task_group() as waiting:
        for _ in range(3):
            waiting.start_soon(process.wait)
        await line.say()
    assert process.exit is not None
    assert (process.exit.exit_code, process.exit.signal) == (3, None)
    assert not process.exit.out_of_memory


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGSEGV, signal.SIGKILL])
async def test_a_signal_that_ended_the_process_is_named(
    bench: Bench, number: signal.Signals
) -> None:
    process, line = await bench.start(
        f"""
        signal.signal({number:d}, signal.SIG_DFL) if {number:d} != 9 else None
        hear()
        os.kill(os.getpid(), {number:d})
        time.sleep(60)
        """
    )

    await line.say()
    ended = await process.wait()
    assert (ended.signal, ended.out_of_memory) == (number, False)


DAEMON: Final = """
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        say("daemon")
        time.sleep(3600)
    os._exit(0)
os.wait()
"""


async def test_kill_ends_everything_that_was_started_inside(bench: Bench) -> None:
    process, line = await bench.start(f"{DAEMON}\ntime.sleep(3600)")

    assert await line.hear() == "daemon"
    await process.kill()
    await line.end()
    assert process.exit is not None
    assert (process.exit.signal, process.exit.out_of_memory) == (signal.SIGKILL, False)
    await process.kill()


async def test_what_the_command_leaves_running_ends_with_it(bench: Bench) -> None:
    process, line = await bench.start(f"{DAEMON}\nhear()\nsys.exit(0)")

    assert await line.hear() == "daemon"
    await line.say()
    assert (await process.wait()).exit_code == 0
    await line.end()


async def test_orphans_leave_no_zombies_inside(bench: Bench) -> None:
    states = await bench.ask(
        """
        for _ in range(5):
            if os.fork() == 0:
                os.setsid()
                if os.fork() == 0:
                    time.sleep(0.05)
                os._exit(0)
            os.wait()
        deadline = time.monotonic() + 10
        def zombies():
            found = 0
            for pid in filter(str.isdigit, os.listdir("/proc")):
                try:
                    found += open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()[0] == "Z"
                except OSError:
                    pass
            return found
        time.sleep(0.2)
        while zombies() and time.monotonic() < deadline:
            time.sleep(0.05)
        say([zombies(), len(list(filter(str.isdigit, os.listdir("/proc"))))])
        """
    )

    assert states[0] == 0
    assert states[1] <= 4


EAT: Final = """
def eat():
    eaten = []
    while True:
        eaten.append(b"x" * 2**22)
"""


async def test_running_out_of_memory_is_flagged_and_spares_the_neighbour(bench: Bench) -> None:
    neighbour, its_line = await bench.start("hear(); say('fine'); hear()")
    process, line = await bench.start(f"{EAT}\nhear()\neat()")
    told = anyio.Event()
    process.on_out_of_memory = told.set

    await line.say()
    ended = await process.wait()

    assert (ended.exit_code, ended.out_of_memory) == (137, True)
    await told.wait()
    await its_line.say()
    assert await its_line.hear() == "fine"
    assert neighbour.exit is None


async def test_a_child_that_runs_out_of_memory_is_told_apart_from_the_kernel(bench: Bench) -> None:
    process, line = await bench.start(
        f"""
        {textwrap.indent(EAT, "        ").strip()}
        child = os.fork()
        if child == 0:
            line.recv(1)
            eat()
        say(os.waitpid(child, 0)[1])
        hear()
        """
    )
    told = anyio.Event()
    process.on_out_of_memory = told.set

    await line.say()
    await told.wait()

    if not bench.runtime.capabilities.memory_limit:
        assert (await process.wait()).out_of_memory
        return
    assert await line.hear() == signal.SIGKILL
    await line.say()
    ended = await process.wait()
    assert (ended.exit_code, ended.out_of_memory) == (0, False)


async def test_memory_in_temporary_files_counts(bench: Bench) -> None:
    limits = replace(LIMITS, memory_bytes=96 * MIB, tmp_bytes=256 * MIB)
    process, line = await bench.start(
        """
        hear()
        with open("/tmp/big", "wb") as file:
            for _ in range(240):
                file.write(b"x" * 2**20)
                file.flush()
        time.sleep(60)
        """,
        limits,
    )

    await line.say()
    ended = await process.wait()
    assert (ended.exit_code, ended.out_of_memory) == (137, True)


async def test_temporary_space_is_bounded(bench: Bench) -> None:
    written = await bench.ask(
        """
        written = 0
        try:
            with open("/tmp/big", "wb", buffering=0) as file:
                while written < 2**26:
                    written += file.write(b"x" * 2**20)
        except OSError as error:
            say([written, error.errno])
        """
    )

    assert written == [LIMITS.tmp_bytes, 28]


async def test_the_memory_limit_can_be_raised_while_it_runs(bench: Bench) -> None:
    assert bench.runtime.capabilities.resize
    process, line = await bench.start(
        "hear(); block = b'x' * (300 * 2**20); say(len(block)); time.sleep(0.6); say('alive')"
    )

    await process.resize_memory(512 * MIB)
    await line.say()
    assert await line.hear() == 300 * MIB
    assert await line.hear() == "alive"


async def test_the_number_of_processes_is_bounded_and_the_kernel_survives_it(bench: Bench) -> None:
    assert bench.runtime.capabilities.process_limit
    process, line = await bench.start(
        """
        started = 0
        try:
            while started < 200:
                if os.fork() == 0:
                    time.sleep(3600)
                started += 1
        except BlockingIOError:
            pass
        say(started)
        hear()
        """
    )

    started = await line.hear()
    sample = process.sample()
    assert LIMITS.processes - 4 <= started <= LIMITS.processes
    assert sample.processes is None or sample.processes >= started
    assert sample.process_limit_hits is None or sample.process_limit_hits > 0
    assert process.exit is None


async def test_open_files_and_file_sizes_are_bounded_and_no_core_is_written(bench: Bench) -> None:
    limits = replace(LIMITS, open_files=64, file_bytes=2**20)
    found = await bench.ask(
        """
        import resource
        say_errors = []
        held = []
        try:
            while True:
                held.append(os.dup(0))
        except OSError as error:
            say_errors.append(error.errno)
        for descriptor in held:
            os.close(descriptor)
        try:
            with open("/mnt/data/big", "wb", buffering=0) as file:
                for _ in range(4):
                    file.write(b"x" * 2**19)
        except OSError as error:
            say_errors.append(error.errno)
        say([len(held) < 64, say_errors, os.path.getsize("/mnt/data/big"),
             resource.getrlimit(resource.RLIMIT_CORE)])
        """,
        limits,
    )

    assert found == [True, [24, 27], 2**20, [0, 0]]


async def test_processor_time_is_sampled_and_bounded(bench: Bench) -> None:
    process, line = await bench.start(
        """
        hear()
        started = time.monotonic()
        while time.process_time() < 0.6:
            pass
        say(time.monotonic() - started)
        hear()
        """,
        replace(LIMITS, cpus=0.5),
    )

    before = process.sample().cpu_seconds
    await line.say()
    wall_seconds = await line.hear()
    after = process.sample().cpu_seconds
    assert before is not None
    assert after is not None
    assert 0.4 < after - before < 2
    if bench.runtime.capabilities.cpu_limit:
        assert wall_seconds > 0.8


async def test_the_memory_peak_is_sampled_and_can_be_reset(bench: Bench) -> None:
    process, line = await bench.start(
        """
        for size in (100, 40):
            hear()
            block = b"x" * (size * 2**20)
            del block
            say(size)
        hear()
        """
    )

    await line.say()
    await line.hear()
    first = process.sample().memory_peak_bytes
    process.reset_peak()
    await line.say()
    await line.hear()
    second = process.sample()
    assert first is not None
    assert first > 100 * MIB
    assert second.memory_peak_bytes is not None
    assert 40 * MIB < second.memory_peak_bytes < 95 * MIB
    assert second.memory_bytes is not None
    assert second.memory_bytes < 60 * MIB


async def test_the_end_of_what_it_printed_can_be_read(bench: Bench) -> None:
    process, _ = await bench.start(
        "print('early ' * 200_000); print('on stderr', file=sys.stderr); print('last words')"
    )

    await process.wait()
    output = await process.output()
    assert output.endswith("last words\n")
    assert "on stderr" in output
    assert 4000 < len(output) <= 8192


@asynccontextmanager
async def _started_by_another(bench: Bench, code: str) -> AsyncIterator[tuple[str, Line, Any]]:
    """A process whose starter is about to be killed; the third value kills it."""
    slot = await bench.slot()
    launch = bench.launch_of(slot, code)
    names = ("name", "owner", "slot_id", "argv", "environment", "uid")
    plain: dict[str, Any] = {name: getattr(launch, name) for name in names}
    plain |= {
        "data_directory": str(slot.data),
        "run_directory": str(slot.run),
        "profile": {
            "runtime": launch.profile.runtime,
            "image": launch.profile.image,
            "limits": {n: getattr(launch.profile.limits, n) for n in Limits.__slots__},
        },
    }
    given = {"kind": bench.kind, "state": str(bench.directory / "state"), "launch": plain}
    starter = await anyio.open_process(
        [sys.executable, "-c", STARTER, json.dumps(given)], stderr=None
    )
    assert starter.stdout is not None
    try:
        process_id = (await starter.stdout.receive()).decode().strip()
        line = await slot.lines.get()

        async def kill() -> None:
            starter.kill()
            await starter.wait()

        yield process_id, line, kill
    finally:
        if starter.returncode is None:
            starter.kill()
        await starter.aclose()


async def test_a_process_outlives_its_killed_starter_and_is_adopted(bench: Bench) -> None:
    assert bench.runtime.capabilities.survives_worker
    code = """
        say("before")
        hear()
        print("x" * 2**20, flush=True)
        say("after")
        hear()
        sys.exit(7)
    """
    async with _started_by_another(bench, code) as (process_id, line, kill):
        assert await line.hear() == "before"
        await kill()
        await line.say()
        assert await line.hear() == "after"

        [owned] = [o for o in await bench.runtime.owned() if o.owner == bench.owner]
        assert (owned.id, owned.slot_id, owned.running) == (process_id, "slot0", True)
        process = await bench.runtime.adopt(process_id)
        assert process is not None
        assert process.sample().cpu_seconds is not None
        await process.signal(signal.SIGCONT)
        await line.say()
        assert (await process.wait()).exit_code == 7
        await process.remove()
    assert await bench.mine() == []


async def test_an_adopted_process_that_runs_out_of_memory_is_flagged(bench: Bench) -> None:
    code = f"{EAT}\nsay('ready')\nhear()\neat()"
    async with _started_by_another(bench, code) as (process_id, line, kill):
        assert await line.hear() == "ready"
        await kill()
        process = await bench.runtime.adopt(process_id)
        assert process is not None
        await line.say()
        ended = await process.wait()
        assert (ended.exit_code, ended.out_of_memory) == (137, True)
        await process.remove()


async def _ended_unwatched(bench: Bench, process_id: str) -> None:
    """Nobody is told of such an end, so look until it is there."""
    for _ in range(500):
        if not any(o.running for o in await bench.runtime.owned() if o.id == process_id):
            return
        await anyio.sleep(0.02)
    pytest.fail("it runs on")


async def test_a_process_that_ended_unwatched_is_found_by_a_sweep_and_discarded(
    bench: Bench,
) -> None:
    async with _started_by_another(bench, "say('ready'); hear()") as (process_id, line, kill):
        assert await line.hear() == "ready"
        await kill()
        await line.say()
        await line.end()
        await _ended_unwatched(bench, process_id)
        assert await bench.runtime.adopt(process_id) is None
        assert await bench.mine() == [process_id]
        await bench.runtime.discard(process_id)
        await bench.runtime.discard(process_id)
        assert await bench.mine() == []


async def test_a_sweep_discards_what_still_runs(bench: Bench) -> None:
    async with _started_by_another(bench, f"{DAEMON}\ntime.sleep(3600)") as (
        process_id,
        line,
        kill,
    ):
        assert await line.hear() == "daemon"
        await kill()
        await bench.runtime.discard(process_id)
        await line.end()
        assert await bench.mine() == []


async def test_leaving_a_runtime_leaves_its_processes_alone(bench: Bench) -> None:
    slot = await bench.slot()
    async with bench.make() as other:
        launched = await other.launch(bench.launch_of(slot, "hear(); sys.exit(9)"))
        line = await _first_line(launched, slot)

    adopted = await bench.runtime.adopt(launched.id)
    assert adopted is not None
    await line.say()
    assert (await adopted.wait()).exit_code == 9


async def test_removing_twice_is_fine_and_leaves_no_descriptor(bench: Bench) -> None:
    async def once() -> None:
        process, line = await bench.start("time.sleep(3600)")
        await process.remove()
        await process.remove()
        await line.end()
        await line.close()
        assert await process.wait() == process.exit
        process.sample()
        assert await bench.mine() == []

    await once()
    before = await to_thread.run_sync(_descriptors)
    await once()
    assert await to_thread.run_sync(_descriptors) == before


def _descriptors() -> list[str]:
    """What this process holds open; sockets apart, for the client of the engine pools its own."""
    held: list[str] = []
    for path in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            held.append(str(path.readlink()).partition(":")[0])
    return sorted(kind for kind in held if kind != "socket" and not kind.endswith("/fd"))


async def test_a_cancelled_start_leaves_nothing(bench: Bench) -> None:
    launch = bench.launch_of(await bench.slot(), "time.sleep(3600)")
    async with anyio.create_task_group() as starting:
        starting.start_soon(bench.runtime.launch, launch)
        await anyio.sleep(0.01)
        starting.cancel_scope.cancel()

    assert await bench.mine() == []


async def test_a_missing_environment_is_named_and_leaves_nothing(bench: Bench) -> None:
    launch = bench.launch_of(await bench.slot(), "pass")
    missing = replace(launch.profile, image="/nowhere/at-all" if bench.kind != "docker" else "no:1")

    with pytest.raises(ImageMissing, match="kernelpool image build"):
        await bench.runtime.check(missing)
    with pytest.raises(EngineError):
        await bench.runtime.launch(replace(launch, profile=missing))
    assert await bench.mine() == []


async def test_a_command_that_is_not_there_is_an_error_or_an_exit_code(bench: Bench) -> None:
    launch = replace(bench.launch_of(await bench.slot(), "pass"), argv=("no-such-command",))

    try:
        process = await bench.runtime.launch(launch)
    except EngineError as error:
        assert "no-such-command" in str(error)
        assert await bench.mine() == []
    else:
        assert (await process.wait()).exit_code in {126, 127}
        assert "no-such-command" in await process.output()


async def test_a_sound_profile_passes_the_check_and_one_above_the_host_does_not(
    bench: Bench,
) -> None:
    await bench.runtime.check(bench.profile)

    too_large = replace(bench.profile, limits=LIMITS.with_memory(2**50))
    with pytest.raises(ConfigurationError, match="lower the limit"):
        await bench.runtime.check(too_large)
    assert await bench.mine() == []


async def test_many_processes_run_at_once(bench: Bench) -> None:
    async with anyio.create_task_group() as asking:
        answers: list[int] = []

        async def ask(number: int) -> None:
            answers.append(await bench.ask(f"say({number})"))

        for number in range(6):
            asking.start_soon(ask, number)

    assert sorted(answers) == list(range(6))
