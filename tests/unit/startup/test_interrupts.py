"""SIGINT stops what runs, always ends in a reply, and harms no later cell."""

import anyio
import pytest

from .started_kernel import StartedKernel

BUSY = {
    "a loop": "while True: pass",
    "a sleep": "import time; time.sleep(99)",
    "a child": "import subprocess; subprocess.run(['sleep', '99'])",
    "an await": "import asyncio; await asyncio.sleep(99)",
    "a loop after an await": "import asyncio; await asyncio.sleep(0)\nwhile True: pass",
    "another task": (
        "import asyncio\nasync def spin():\n    while True: pass\n"
        "await asyncio.gather(asyncio.create_task(spin()))"
    ),
    "asyncio.run": "import asyncio; asyncio.run(asyncio.sleep(99))",
    "a loop in asyncio.run": (
        "import asyncio\nasync def spin():\n    while True: pass\nasyncio.run(spin())"
    ),
    "asyncio.run after an await": (
        "import asyncio; await asyncio.sleep(0)\nasyncio.run(asyncio.sleep(99))"
    ),
    "a lock": "import threading; threading.Lock().acquire() or True; l = threading.Lock(); "
    "l.acquire(); l.acquire()",
    "a join": "import threading, time; t = threading.Thread(target=time.sleep, args=(99,), "
    "daemon=True); t.start(); t.join()",
    "a user expression": "class Slow:\n    def __repr__(self):\n        while True: pass\nSlow()",
}


@pytest.mark.parametrize("code", BUSY.values(), ids=BUSY.keys())
async def test_an_interrupt_stops(kernel: StartedKernel, code: str) -> None:
    await kernel.run("kept = 41")
    id = await kernel.execute(f"print('running', flush=True)\n{code}")
    await kernel.printed(id, "running")
    await anyio.sleep(0.2)
    kernel.interrupt()
    with anyio.fail_after(5):
        outcome = await kernel.outcome(id)
    assert outcome.status == "error"
    assert outcome.error in ("KeyboardInterrupt", "CancelledError")
    assert (await kernel.run("kept + 1")).result == "42"
    assert (await kernel.run("import asyncio; await asyncio.sleep(0); kept + 2")).result == "43"


async def test_an_interrupt_at_any_moment_of_a_cell_leaves_it_with_a_reply(
    kernel: StartedKernel,
) -> None:
    for number in range(100):
        id = await kernel.execute("sum(range(20_000))")
        await anyio.sleep(number / 20_000)
        kernel.interrupt()
        outcome = await kernel.outcome(id)
        assert outcome.status in ("ok", "error")
        assert len([m for m in kernel.replies if m.parent == id]) == 1
    assert (await kernel.run("6 * 7")).result == "42"


async def test_an_interrupt_at_any_moment_doubles_nothing_that_was_printed(
    kernel: StartedKernel,
) -> None:
    code = "n = 0\nwhile True:\n    n += 1\n    print(n, flush=True)"
    for number in range(100):
        id = await kernel.execute(code)
        await kernel.printed(id, "1")
        await anyio.sleep(number / 50_000)
        kernel.interrupt()
        numbers = [int(line) for line in (await kernel.outcome(id)).stdout.split()]
        assert numbers == list(range(1, len(numbers) + 1))


async def test_an_interrupt_between_cells_is_forgotten(kernel: StartedKernel) -> None:
    kernel.interrupt()
    await anyio.sleep(0.1)
    assert (await kernel.run("6 * 7")).result == "42"


@pytest.mark.parametrize(
    "poison",
    [
        "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)",
        "import signal; signal.signal(signal.SIGINT, signal.SIG_DFL)",
        "import signal; signal.signal(signal.SIGINT, lambda *_: None)",
        "import signal; signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})",
    ],
)
async def test_a_replaced_handler_does_not_outlive_its_cell(
    kernel: StartedKernel, poison: str
) -> None:
    await kernel.run(poison)
    id = await kernel.execute("print('running', flush=True)\nwhile True: pass")
    await kernel.printed(id, "running")
    kernel.interrupt()
    assert (await kernel.outcome(id)).error == "KeyboardInterrupt"


async def test_an_interrupt_request_on_the_control_channel_works_too(
    kernel: StartedKernel,
) -> None:
    id = await kernel.execute("print('running', flush=True)\nwhile True: pass")
    await kernel.printed(id, "running")
    await kernel.send("control", "interrupt_request", {})
    assert (await kernel.outcome(id)).error == "KeyboardInterrupt"
