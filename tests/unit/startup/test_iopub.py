"""A slow reader loses nothing, a stalled one holds the cell up, a dead or absent one does not."""

import json
import os
import signal
import subprocess
import sys
from contextlib import suppress

import anyio

from .started_kernel import StartedKernel, StartKernel, text_of

FLUSHED_LINES = "import sys\nfor i in range({count}):\n    print(i)\n    sys.stdout.flush()"

FLOOD = "while True: print('y' * 1000)"

SUBSCRIBER = """
import sys, zmq
socket = zmq.Context().socket(zmq.SUB)
socket.setsockopt(zmq.RCVHWM, 10)
socket.setsockopt(zmq.SUBSCRIBE, b"")
socket.connect(sys.argv[1])
socket.recv_multipart()
print("subscribed", flush=True)
sys.stdin.read()
"""


async def test_a_reader_stalled_for_seconds_gets_every_line_in_order_and_then_the_end(
    kernel: StartedKernel,
) -> None:
    kernel.stall()
    id = await kernel.execute(FLUSHED_LINES.format(count=25_000))
    await anyio.sleep(3)
    assert kernel.reply_to(id) is None
    kernel.resume()
    outcome = await kernel.outcome(id)
    assert outcome.status == "ok"
    assert outcome.stdout == "".join(f"{i}\n" for i in range(25_000))
    assert [m.type for m in outcome.published[-2:]] == ["stream", "status"]


async def test_a_stalled_reader_holds_back_what_is_printed_and_not_the_kernels_memory(
    kernel: StartedKernel,
) -> None:
    async def resident_bytes() -> int:
        statm = await anyio.Path(f"/proc/{kernel.process.pid}/statm").read_text()
        return int(statm.split()[1]) * os.sysconf("SC_PAGESIZE")

    before = await resident_bytes()
    kernel.stall()
    id = await kernel.execute(FLOOD)
    await anyio.sleep(2)
    grown = await resident_bytes() - before
    kernel.interrupt()
    with anyio.fail_after(10):
        reply = await kernel.wait_for(lambda: kernel.reply_to(id))
    assert reply.content["ename"] == "KeyboardInterrupt"
    assert grown < 80 * 2**20
    kernel.resume()
    outcome = await kernel.outcome(id)
    assert outcome.error == "KeyboardInterrupt"
    assert set(outcome.stdout.split("\n")) <= {"y" * 1000, *("y" * n for n in range(1000))}


async def test_an_interrupt_reaches_code_that_flushes_to_a_stalled_reader(
    kernel: StartedKernel,
) -> None:
    kernel.stall()
    id = await kernel.execute(
        "try:\n    while True: print('y' * 1000, flush=True)\n"
        "finally: open('interrupted', 'w').close()"
    )
    await anyio.sleep(1)
    kernel.interrupt()
    with anyio.fail_after(10):
        reply = await kernel.wait_for(lambda: kernel.reply_to(id))
    assert reply.content["ename"] == "KeyboardInterrupt"
    assert await anyio.Path(kernel.path("interrupted")).exists()
    kernel.resume()
    assert (await kernel.outcome(id)).error == "KeyboardInterrupt"
    assert (await kernel.run("6 * 7")).result == "42"


async def test_a_subscriber_killed_in_a_flood_does_not_stop_the_cell(
    kernel: StartedKernel,
) -> None:
    subscriber = await anyio.open_process(
        [sys.executable, "-c", SUBSCRIBER, f"ipc://{kernel.directory}/k-2"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    try:
        assert subscriber.stdout is not None
        with anyio.fail_after(10):
            assert (await subscriber.stdout.receive()).startswith(b"subscribed")
        id = await kernel.execute(FLUSHED_LINES.format(count=10_000))
        await anyio.sleep(2)
        held_back = kernel.reply_to(id) is None
        subscriber.send_signal(signal.SIGKILL)
        outcome = await kernel.outcome(id)
        assert held_back
        assert outcome.stdout == "".join(f"{i}\n" for i in range(10_000))
    finally:
        with suppress(ProcessLookupError):
            subscriber.kill()
        await subscriber.aclose()


async def test_a_flood_with_nobody_connected_does_not_block(kernel: StartedKernel) -> None:
    await kernel.execute(FLUSHED_LINES.format(count=10_000) + "\nopen('done', 'w').close()")
    await kernel.disconnect()
    with anyio.fail_after(30):
        await kernel.connect()
    assert await anyio.Path(kernel.path("done")).exists()
    assert (await kernel.run("6 * 7")).result == "42"


async def test_no_message_is_larger_than_a_chunk(kernel: StartedKernel) -> None:
    outcome = await kernel.run("print('x' * 8_000_000)")
    assert outcome.stdout == "x" * 8_000_000 + "\n"
    assert max(len(m.frames[4]) for m in outcome.published) < 200_000


async def test_output_is_published_in_the_order_it_was_written(kernel: StartedKernel) -> None:
    outcome = await kernel.run(
        "import os, sys, subprocess\n"
        "print('a'); os.system('echo b'); print('c')\n"
        "print('d', file=sys.stderr); print('e')\n"
        "subprocess.run(['sh', '-c', 'echo f; echo g >&2']); os.write(1, b'h\\n')\n"
        "sys.stdout.buffer.write('ï\\n'.encode()); os.system('echo last')"
    )
    streams = [m.content for m in outcome.published if m.type == "stream"]
    assert outcome.stdout == "a\nb\nc\ne\nf\nh\nï\nlast\n"
    assert outcome.stderr == "d\ng\n"
    order = "".join(content["text"] for content in streams).replace("g\n", "")
    assert order == "a\nb\nc\nd\ne\nf\nh\nï\nlast\n"


async def test_what_a_child_prints_belongs_to_the_cell_that_waited_for_it(
    kernel: StartedKernel,
) -> None:
    for number in range(20):
        outcome = await kernel.run(f"import os; os.system('echo {number}'); None")
        assert outcome.stdout == f"{number}\n"


async def test_lone_surrogates_arrive_replaced(kernel: StartedKernel) -> None:
    code = r"""
from IPython.display import display
print('a\ud800b')
print('pair \ud83d\ude00')
display({'text/plain': 'c\udfffd', 'text/html': '<b>\ud800</b>'}, raw=True)
class Odd:
    def __repr__(self): return 'e\ud800f'
Odd()
"""
    outcome = await kernel.run(code)
    assert outcome.stdout == "a\ufffdb\npair \U0001f600\n"
    shown = next(m for m in outcome.published if m.type == "display_data")
    assert shown.content["data"] == {"text/plain": "c\ufffdd", "text/html": "<b>\ufffd</b>"}
    assert outcome.result == "e\ufffdf"

    failed = await kernel.run(r"raise ValueError('g\ud800h')")
    assert failed.message == failed.reply.content["evalue"] == "g\ufffdh"
    named = await kernel.run(r"import os; open(b'\xff', 'w').close(); os.listdir()")
    assert named.status == "ok"
    assert (await kernel.run("6 * 7")).result == "42"


async def test_what_json_cannot_hold_is_shown_all_the_same(kernel: StartedKernel) -> None:
    outcome = await kernel.run(
        "from IPython.display import display\n"
        "display({'application/json': {'a': float('nan'), 'b': (1, 2)}}, raw=True)"
    )
    shown = next(m for m in outcome.published if m.type == "display_data")
    assert json.loads(json.dumps(shown.content["data"]["application/json"]))["b"] == [1, 2]


async def test_a_forked_pool_prints_through_its_parent(kernel: StartedKernel) -> None:
    outcome = await kernel.run(
        "import multiprocessing, sys\n"
        "def work(n): print('worker', n); return n * n\n"
        "with multiprocessing.get_context('fork').Pool(2) as pool: print(pool.map(work, range(6)))"
    )
    assert sorted(outcome.stdout.splitlines()) == [
        "[0, 1, 4, 9, 16, 25]",
        *(f"worker {n}" for n in range(6)),
    ]


async def test_a_child_that_falls_out_of_its_cell_ends_there(kernel: StartedKernel) -> None:
    outcome = await kernel.run(
        "import os\nchild = os.fork()\nif child: os.waitpid(child, 0)\n"
        "print('parent' if child else 'child')"
    )
    assert text_of(kernel.published, "stdout") == "child\nparent\n"
    assert len([m for m in kernel.replies if m.parent == outcome.id]) == 1


async def test_child_processes_inherit_no_descriptor_and_no_setting_of_the_kernel(
    start_kernel: StartKernel,
) -> None:
    async with start_kernel(KERNELPOOL_JOURNAL="{directory}/journal", JPY_PARENT_PID="1") as kernel:
        outcome = await kernel.run(
            "import os, subprocess\n"
            "print(subprocess.run(['sh', '-c', 'ls /proc/self/fd; env'],"
            " close_fds=False, capture_output=True, text=True).stdout)\n"
            "print(os.environ)"
        )
        descriptors = [line for line in outcome.stdout.splitlines() if line.isdigit()]
        assert descriptors == ["0", "1", "2", "3"]
        assert "KERNELPOOL" not in outcome.stdout
        assert "JPY_" not in outcome.stdout
        assert "connection.json" not in outcome.stdout
        assert (await kernel.run("import sys; sys.argv")).result == "['']"
