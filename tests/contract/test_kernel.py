"""What every kernel and pool promises, over each runtime."""

from __future__ import annotations

import asyncio
import os
import secrets
import shutil
import signal
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import anyio
import pytest
from anyio import to_thread
from blockbuster import BlockBuster
from jupyter_client.kernelspec import KernelSpec, KernelSpecManager
from jupyter_client.manager import AsyncKernelManager

from kernelpool import (
    DisplayData,
    Done,
    ErrorOutput,
    Event,
    ExecuteResult,
    InputRequest,
    KernelClosed,
    KernelEnd,
    Lease,
    Limits,
    Notice,
    Output,
    Pool,
    PoolExhausted,
    Profile,
    SlotStore,
    Stream,
)
from kernelpool.container import DockerRuntime
from kernelpool.profile import MIB
from kernelpool.provisioner import ENTRY_POINT, Seat, kernel_spec
from kernelpool.runtime import Runtime
from kernelpool.sandbox import BubblewrapRuntime

LIMITS: Final = Limits(
    memory_bytes=512 * MIB, disk_bytes=64 * MIB, file_bytes=64 * MIB, inodes=4096, processes=64
)


@dataclass
class Bench:
    """A runtime under test, its slots, and the pools made on them."""

    runtime: Runtime
    slots: SlotStore
    profile: Profile
    owner: str

    @asynccontextmanager
    async def pool(self, *, warm: int = 1, capacity: int = 4) -> AsyncIterator[Pool]:
        pool = Pool(
            self.runtime,
            self.slots,
            self.profile,
            owner=self.owner,
            warm=warm,
            capacity=capacity,
            records=self.slots.directory.parent / "leases",
        )
        async with pool:
            yield pool

    async def processes(self) -> list[str]:
        """Names of what runs here under our mark."""
        found = await self.runtime.owned()
        return [process.name for process in found if process.owner == self.owner]


@pytest.fixture
def state_directory() -> Iterator[Path]:
    directory = Path(tempfile.mkdtemp(prefix="kp-"))
    directory.chmod(0o711)
    yield directory
    shutil.rmtree(directory)


@pytest.fixture(params=["bubblewrap", pytest.param("docker", marks=pytest.mark.docker)])
async def bench(
    request: pytest.FixtureRequest, state_directory: Path, kernel_environment: Path
) -> AsyncIterator[Bench]:
    owner = f"test-{secrets.token_hex(3)}"
    runtime: Any
    if request.param == "docker":
        runtime = DockerRuntime(owner=owner)
        image = os.environ["KERNELPOOL_IMAGE"]
    else:
        runtime = BubblewrapRuntime(state_directory=state_directory / "sandboxes")
        image = str(kernel_environment)
    profile = Profile(image=image, runtime=request.param, limits=LIMITS, warm_imports=("json",))
    async with runtime:
        slots = await SlotStore.open(state_directory)
        made = Bench(runtime, slots, profile, owner)
        yield made
        assert await made.processes() == [], "a process was left"
        assert await slots.sweep(set()) == [], "a slot was left"


@pytest.fixture
async def lease(bench: Bench) -> AsyncIterator[Lease]:
    async with bench.pool(warm=0) as pool:
        lease = await pool.lease("session")
        with anyio.fail_after(60):
            await lease.kernel.start()
        yield lease


async def run(lease: Lease, code: str, *, timeout: float = 30, **kwargs: Any) -> list[Event]:
    with anyio.fail_after(timeout + 60):
        return [event async for event in lease.kernel.execute(code, timeout=timeout, **kwargs)]


async def until(true: Callable[[], bool]) -> None:
    """Let the event loop turn until something is true."""
    while not true():  # noqa: ASYNC110
        await asyncio.sleep(0.001)


def done(events: list[Event]) -> Done:
    assert isinstance(events[-1], Done), events
    return events[-1]


def text(events: list[Event], name: str = "stdout") -> str:
    return "".join(e.text for e in events if isinstance(e, Stream) and e.name == name)


def result(events: list[Event]) -> str | None:
    values = [e.data["text/plain"] for e in events if isinstance(e, ExecuteResult)]
    return values[-1] if values else None


def error(events: list[Event]) -> ErrorOutput:
    (only,) = (e for e in events if isinstance(e, ErrorOutput))
    return only


async def test_variables_persist_between_executions(lease: Lease) -> None:
    assert done(await run(lease, "x = 20")).status == "ok"
    events = await run(lease, "print(x)\nx + 1")
    assert (text(events), result(events)) == ("20\n", "21")
    assert done(events).execution_count == 2


async def test_an_exception_is_an_error_output_and_keeps_what_came_before_it(lease: Lease) -> None:
    events = await run(lease, "y = 41\nraise RuntimeError('no')")
    assert (error(events).ename, error(events).evalue) == ("RuntimeError", "no")
    assert (done(events).status, done(events).failure) == ("error", None)
    assert result(await run(lease, "y + 1")) == "42"


async def test_code_at_its_time_limit_is_interrupted_and_variables_are_kept(lease: Lease) -> None:
    await run(lease, "x = 1")
    ended = done(await run(lease, "print('before', flush=True)\nwhile True: pass", timeout=1))
    assert (ended.status, ended.kernel_end) == ("timed_out", None)
    assert ended.failure is not None and ended.failure.code == "timeout"
    assert result(await run(lease, "x")) == "1"


async def test_output_before_the_time_limit_is_kept(lease: Lease) -> None:
    events = await run(lease, "print('a', flush=True)\nimport time; time.sleep(99)", timeout=1)
    assert text(events) == "a\n"


@pytest.mark.parametrize(
    "code",
    [
        "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)\nwhile True: pass",
        "while True:\n    try:\n        while True: pass\n    except BaseException: pass",
        "import os, signal; os.kill(os.getpid(), signal.SIGSTOP)",
    ],
    ids=["ignores SIGINT", "swallows KeyboardInterrupt", "stops itself"],
)
async def test_code_that_no_interrupt_ends_is_killed_and_the_next_starts_clean(
    lease: Lease, code: str
) -> None:
    await run(lease, "x = 1; open('kept.txt', 'w').write('kept')")
    ended = done(await run(lease, code, timeout=0.5))
    assert ended.status == "timed_out"
    if ended.kernel_end is not None:
        assert ended.kernel_end is KernelEnd.TIME_LIMIT
        assert error(await run(lease, "x")).ename == "NameError"
    assert result(await run(lease, "open('kept.txt').read()")) == "'kept'"


async def test_an_exit_is_named_with_its_code_and_files_are_kept(lease: Lease) -> None:
    ended = done(await run(lease, "open('a.txt', 'w').write('a')\nimport os; os._exit(3)"))
    assert (ended.status, ended.kernel_end) == ("failed", KernelEnd.KERNEL_DIED)
    assert ended.failure is not None
    assert (ended.failure.code, ended.failure.details["exit_code"]) == ("kernel_died", 3)
    assert result(await run(lease, "open('a.txt').read()")) == "'a'"


async def test_a_crash_is_named_with_its_signal(lease: Lease) -> None:
    ended = done(await run(lease, "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)"))
    assert ended.failure is not None
    assert ended.failure.code == "kernel_died"
    assert ended.failure.details["signal"] == signal.SIGSEGV
    assert "SIGSEGV" in ended.failure.message


@pytest.mark.parametrize(
    "code",
    ["b = bytearray(8 * 2**30)\nb[::4096] = b'x' * len(b[::4096])",
     "l = []\nwhile True: l.append(bytearray(b'x' * 10**7))"],
    ids=["one block", "bit by bit"],
)  # fmt: skip
async def test_running_out_of_memory_is_named_and_spares_the_neighbour(
    bench: Bench, code: str
) -> None:
    async with bench.pool(warm=2) as pool:
        with anyio.fail_after(60):
            await pool.until_warm()
        greedy, neighbour = await pool.lease("greedy"), await pool.lease("neighbour")
        await run(neighbour, "x = 7")
        ended = done(await run(greedy, code, timeout=60))
        if ended.status == "error":
            pytest.skip("the allocation was refused inside, which is as good")
        assert ended.failure is not None, ended
        assert ended.failure.code == "out_of_memory"
        assert ended.kernel_end is KernelEnd.OUT_OF_MEMORY
        assert ended.failure.details["limit_bytes"] == LIMITS.memory_bytes
        assert result(await run(neighbour, "x")) == "7"
        assert result(await run(greedy, "1 + 1")) == "2"


async def test_a_child_that_runs_out_of_memory_is_a_notice_and_the_kernel_lives(
    lease: Lease, bench: Bench
) -> None:
    if not bench.runtime.capabilities.memory_limit:
        pytest.skip("this runtime watches the whole tree")
    code = (
        "import subprocess, sys\nx = 5\n"
        "subprocess.run([sys.executable, '-c', 'l = []\\nwhile True: l.append(b\"x\" * 10**7)'])"
        ".returncode"
    )
    events = await run(lease, code, timeout=60)
    assert (done(events).status, result(events)) == ("ok", "-9")
    assert [e.code for e in events if isinstance(e, Notice)] == ["out_of_memory"]
    assert result(await run(lease, "x")) == "5"


async def test_a_flood_of_lines_arrives_whole_and_in_order(lease: Lease) -> None:
    events = await run(lease, "for i in range(100_000): print(i)", timeout=60)
    assert text(events) == "".join(f"{i}\n" for i in range(100_000))


async def test_the_journal_of_a_talkative_kernel_does_not_fill_the_disk(lease: Lease) -> None:
    for _ in range(6):
        await run(lease, "print('x' * 5_000_000)")
    assert (await lease.slot.disk_use()).bytes < 32 * MIB


async def test_a_slow_consumer_holds_the_kernel_back_and_loses_nothing(lease: Lease) -> None:
    code = "for i in range(3000): print(str(i).rjust(9999))"
    seen: list[str] = []
    held = False
    async with aclosing(lease.kernel.execute(code, timeout=60)) as events:
        async for event in events:
            if isinstance(event, Stream):
                seen.append(event.text)
                if not held:
                    held = True
                    with anyio.fail_after(30):
                        await until(lambda: "output held" in repr(lease.kernel))
    assert "".join(seen).split() == [str(i) for i in range(3000)]


async def test_text_of_a_thread_after_its_execution_names_that_execution(lease: Lease) -> None:
    late: list[tuple[str, Output]] = []
    arrived = asyncio.Event()

    def take(request_id: str, output: Output) -> None:
        late.append((request_id, output))
        arrived.set()

    lease.kernel.on_late = take
    code = "import threading; threading.Timer(0.2, lambda: print('late', flush=True)).start()"
    await run(lease, code, request_id="first")
    events = await run(lease, "import time; time.sleep(0.5); print('mine')", request_id="second")
    assert text(events) == "mine\n"
    with anyio.fail_after(10):
        await arrived.wait()
    assert late[0] == ("first", Stream("stdout", "late\n"))


async def test_input_is_refused_at_once_with_an_explanation(lease: Lease) -> None:
    events = await run(lease, "input('name? ')", timeout=10)
    assert error(events).ename == "StdinNotImplementedError"
    assert error(events).evalue


async def test_input_is_asked_for_and_answered(lease: Lease) -> None:
    events: list[Event] = []
    with anyio.fail_after(30):
        async for event in lease.kernel.execute(
            "n = input('name? '); print('hello', n)", timeout=20, stdin=True
        ):
            events.append(event)
            if isinstance(event, InputRequest):
                assert (event.prompt, event.password) == ("name? ", False)
                assert lease.kernel.answer_input("Ada")
    assert "hello Ada\n" in text(events)
    assert not lease.kernel.answer_input("nobody asked")


async def test_an_interrupt_ends_code_as_cancelled_also_while_it_waits_for_input(
    lease: Lease,
) -> None:
    async def interrupted(code: str, stdin: bool) -> Done:
        last: Event | None = None
        async for last in lease.kernel.execute(code, timeout=60, stdin=stdin):
            if isinstance(last, InputRequest | Stream):
                lease.kernel.interrupt()
        assert isinstance(last, Done)
        return last

    with anyio.fail_after(30):
        for code in ("print('on', flush=True)\nwhile True: pass", "input()"):
            ended = await interrupted(code, code == "input()")
            assert (ended.status, ended.kernel_end) == ("cancelled", None)
    assert result(await run(lease, "1 + 1")) == "2"


async def test_a_caller_that_leaves_ends_its_code(lease: Lease) -> None:
    with anyio.fail_after(30):
        async with aclosing(
            lease.kernel.execute("print(1, flush=True)\nwhile True: pass", timeout=60)
        ) as events:
            async for event in events:
                if isinstance(event, Stream):
                    break
    assert result(await run(lease, "1 + 1", timeout=5)) == "2"


async def test_executions_at_once_take_turns_in_the_order_of_arrival(lease: Lease) -> None:
    order: list[int] = []

    async def one(number: int) -> None:
        events = await run(lease, f"import time; time.sleep(0.05); print({number})")
        order.append(int(text(events)))

    async with anyio.create_task_group() as tasks:
        for number in range(8):
            tasks.start_soon(one, number)
    assert order == list(range(8))


async def test_a_restart_keeps_files_and_the_kernel_id_and_nothing_else(lease: Lease) -> None:
    await run(lease, "x = 1; open('f', 'w').write('f')")
    kernel_id, process = lease.kernel.kernel_id, lease.kernel.process
    with anyio.fail_after(60):
        await lease.kernel.restart()
    assert lease.kernel.kernel_id == kernel_id
    assert lease.kernel.process is not process
    assert error(await run(lease, "x")).ename == "NameError"
    assert result(await run(lease, "open('f').read()")) == "'f'"


async def test_a_restart_ends_what_runs_as_cancelled(lease: Lease) -> None:
    running = asyncio.create_task(run(lease, "print('on', flush=True)\nwhile True: pass"))
    with anyio.fail_after(60):
        await until(lambda: "busy" in repr(lease.kernel))
        await lease.kernel.restart()
        assert done(await running).status == "cancelled"
    assert result(await run(lease, "1 + 1")) == "2"


async def test_a_reset_takes_effect_whatever_the_code_does(lease: Lease) -> None:
    await run(lease, "old = 1")
    assert error(await run(lease, "raise ValueError", reset=True)).ename == "ValueError"
    assert error(await run(lease, "old")).ename == "NameError"


async def test_a_kernel_that_closes_its_own_sockets_is_ended_and_named(lease: Lease) -> None:
    ended = done(await run(lease, "import os; os.closerange(3, 4096)", timeout=5))
    assert ended.status in ("failed", "timed_out", "error")
    assert result(await run(lease, "1 + 1")) == "2"


async def test_a_message_without_an_end_ends_its_kernel_and_fills_no_memory(lease: Lease) -> None:
    code = (
        "import zmq\nsocket = get_ipython().kernel.iopub_thread.socket\n"
        "for _ in range(300): socket.send(b'x' * 2**20, zmq.SNDMORE)\n"
    )
    before = await to_thread.run_sync(_resident_bytes)
    ended = done(await run(lease, code, timeout=20))
    assert ended.failure is not None, ended
    assert (ended.status, ended.failure.code) == ("failed", "kernel_died")
    assert await to_thread.run_sync(_resident_bytes) - before < 150 * MIB
    assert result(await run(lease, "1 + 1")) == "2"


def _resident_bytes() -> int:
    fields = Path("/proc/self/statm").read_text(encoding="ascii").split()
    return int(fields[1]) * os.sysconf("SC_PAGE_SIZE")


async def test_a_closed_kernel_runs_nothing(bench: Bench) -> None:
    async with bench.pool() as pool:
        lease = await pool.lease("session")
        removed = pool.release("session")
        assert removed is not None
        with anyio.fail_after(60):
            await removed
        with pytest.raises(KernelClosed):
            await run(lease, "1")


async def test_a_full_disk_is_an_error_inside_and_the_session_goes_on(lease: Lease) -> None:
    code = "open('big', 'wb').write(bytes(100 * 2**20))"
    if lease.slot.quota == "watch":
        pytest.skip("without root the disk is watched by the owner")
    assert error(await run(lease, code)).ename == "OSError"
    assert result(await run(lease, "import os; os.remove('big'); 'ok'")) == "'ok'"


async def test_a_full_disk_does_not_keep_a_kernel_from_starting_again(lease: Lease) -> None:
    if lease.slot.quota == "watch":
        pytest.skip("without root the disk is watched by the owner")
    await run(lease, "open('big', 'wb').write(bytes(100 * 2**20))")
    await run(lease, "import os; os._exit(1)")
    assert result(await run(lease, "1 + 1")) == "2"


async def test_a_fork_bomb_hits_its_limit_and_the_kernel_can_be_used_again(lease: Lease) -> None:
    code = "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass"
    ended = done(await run(lease, code, timeout=2))
    assert ended.status == "timed_out"
    assert result(await run(lease, "1 + 1", timeout=60)) == "2"


async def test_the_processor_time_of_an_execution_is_measured(lease: Lease, bench: Bench) -> None:
    if not bench.runtime.capabilities.memory_limit:
        pytest.skip("no control group to ask")
    code = "import time; t = time.process_time()\nwhile time.process_time() - t < 0.3: pass"
    usage = done(await run(lease, code)).usage
    assert usage.cpu_seconds is not None and usage.cpu_seconds > 0.25
    assert usage.memory_peak_bytes is not None and usage.memory_peak_bytes > 10 * MIB


async def test_a_message_with_half_a_surrogate_pair_arrives(lease: Lease) -> None:
    events = await run(lease, "print('a\\ud800b')\n'\\udfff'")
    assert text(events).startswith("a") and text(events).endswith("b\n")
    assert done(events).status == "ok"


async def test_a_display_arrives_with_its_bundle(lease: Lease) -> None:
    events = await run(
        lease, "from IPython.display import HTML, display; display(HTML('<b>1</b>'))"
    )
    (shown,) = (e for e in events if isinstance(e, DisplayData))
    assert shown.data["text/html"] == "<b>1</b>"


async def test_warming_leaves_no_name_and_the_first_execution_is_number_one(bench: Bench) -> None:
    async with bench.pool(warm=1) as pool:
        with anyio.fail_after(60):
            await pool.until_warm()
        lease = await pool.lease("session")
        events = await run(lease, "[n for n in dir() if 'json' in n or n.startswith('__import')]")
        assert (result(events), done(events).execution_count) == ("[]", 1)
        assert result(await run(lease, "import sys; 'json' in sys.modules")) == "True"


async def test_taking_a_warm_slot_starts_nothing(bench: Bench) -> None:
    async with bench.pool(warm=1, capacity=1) as pool:
        with anyio.fail_after(60):
            await pool.until_warm()
        before = await bench.processes()
        lease = await pool.lease("session")
        assert await bench.processes() == before
        assert result(await run(lease, "1 + 1")) == "2"


async def test_a_pool_at_its_capacity_refuses_and_serves_again_after_a_release(
    bench: Bench,
) -> None:
    async with bench.pool(warm=0, capacity=1) as pool:
        await pool.lease("one")
        with pytest.raises(PoolExhausted):
            await pool.lease("two")
        removed = pool.release("one")
        assert removed is not None
        with anyio.fail_after(60):
            await removed
        assert result(await run(await pool.lease("two"), "1 + 1")) == "2"


async def test_a_cold_lease_comes_at_once_and_its_first_execution_waits_for_the_kernel(
    bench: Bench,
) -> None:
    async with bench.pool(warm=0) as pool:
        lease = await pool.lease("session")
        assert repr(lease.kernel).endswith(": starting>")
        assert result(await run(lease, "1 + 1")) == "2"


async def test_a_warm_slot_gives_another_memory_limit(bench: Bench) -> None:
    async with bench.pool(warm=1) as pool:
        with anyio.fail_after(60):
            await pool.until_warm()
        lease = await pool.lease("session", memory_bytes=1024 * MIB)
        code = "b = b'x' * (700 * 2**20); len(b) >> 20"
        assert result(await run(lease, code)) == "700"


async def test_a_warm_kernel_that_died_is_replaced_before_anyone_gets_it(bench: Bench) -> None:
    async with bench.pool(warm=1) as pool:
        with anyio.fail_after(60):
            await pool.until_warm()
            for process in await bench.runtime.owned():
                if process.owner == bench.owner:
                    await bench.runtime.discard(process.id)
            lease = await pool.lease("session")
            assert result(await run(lease, "1 + 1")) == "2"


async def test_a_pool_sweeps_the_orphans_of_its_worker_and_nobody_elses(
    bench: Bench, tmp_path: Path
) -> None:
    async with bench.pool(warm=1) as pool:
        with anyio.fail_after(60):
            await pool.until_warm()
        (name,) = await bench.processes()
        stranger = replace(bench, owner="stranger", slots=await SlotStore.open(Path("/tmp/kp-s")))
        async with stranger.pool(warm=0):
            assert await bench.processes() == [name]
        async with bench.pool(warm=0) as heir:
            assert await bench.processes() == []
            assert repr(heir) == "<Pool python: 0 warm, 0 warming, 0 leased, 0 retiring>"


async def test_a_stock_kernel_manager_starts_a_kernel_through_the_provisioner(
    bench: Bench, _no_blocking_calls: BlockBuster
) -> None:
    _no_blocking_calls.deactivate()
    slot = await bench.slots.create(LIMITS)
    spec = kernel_spec(Seat(bench.runtime, slot, bench.profile, bench.owner))
    assert spec.metadata["kernel_provisioner"]["provisioner_name"] == ENTRY_POINT

    class OneSpec(KernelSpecManager):
        def get_kernel_spec(self, kernel_name: str) -> KernelSpec:
            return spec

    manager = AsyncKernelManager(
        kernel_spec_manager=OneSpec(), kernel_name="python", transport="ipc"
    )
    manager.connection_file = str(slot.root / "connection.json")
    with anyio.fail_after(60):
        await manager.start_kernel()
        client = manager.client()
        client.start_channels(hb=False)
        await client.wait_for_ready()
        reply = await client.execute("6 * 7", user_expressions={"answer": "6 * 7"}, reply=True)
        assert reply["content"]["user_expressions"]["answer"]["data"]["text/plain"] == "42"
        assert await manager.is_alive()
        client.stop_channels()
        await manager.shutdown_kernel(now=True)
    await bench.slots.destroy(slot)
