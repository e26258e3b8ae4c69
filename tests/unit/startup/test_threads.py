"""What a thread prints belongs to the execution that started it, whenever it is printed."""

import anyio
import pytest

from .started_kernel import PATIENCE, StartedKernel, text_of

WAYS = {
    "thread": "threading.Thread(target=late).start()",
    "subclass": (
        "class Late(threading.Thread):\n    def run(self): late()\nthread = Late(); thread.start()"
    ),
    "timer": "threading.Timer(0.01, late).start()",
    "nested": "threading.Thread(target=lambda: threading.Thread(target=late).start()).start()",
    "executor": "executor.submit(late)",
    "map": "mapped = executor.map(lambda _: late(), [1])",
    "pool": "pool.apply_async(late)",
    "pool map": "mapped = pool.map_async(lambda _: late(), [1])",
    "task": "import asyncio; task = asyncio.create_task(asyncio.to_thread(late))",
    "loop executor": "import asyncio; loop = asyncio.get_event_loop().run_in_executor(None, late)",
}

PREPARE = """
import concurrent.futures, multiprocessing.pool, os, sys, threading, time
from IPython.display import display
executor = concurrent.futures.ThreadPoolExecutor(2)
pool = multiprocessing.pool.ThreadPool(2)
executor.submit(print, end='').result(); pool.apply(print, kwds={'end': ''})
def late():
    while not os.path.exists('go'): time.sleep(0.01)
    print('late'); print('late error', file=sys.stderr); display('shown late')
"""


@pytest.mark.parametrize("start", WAYS.values(), ids=WAYS.keys())
async def test_late_output_of_a_thread_carries_the_cell_that_started_it(
    kernel: StartedKernel, start: str
) -> None:
    await kernel.run(PREPARE)
    first = await kernel.run(start)
    assert first.status == "ok"
    second = await kernel.run("print('second')\nopen('go', 'w').close()\nawait asyncio.sleep(0)")
    with anyio.fail_after(PATIENCE):
        await kernel.wait_for(
            lambda: (
                "late\n" in text_of(kernel.of(first.id), "stdout")
                and "late error\n" in text_of(kernel.of(first.id), "stderr")
                and any(m.type == "display_data" for m in kernel.of(first.id))
            )
        )
    third = await kernel.run("print('third')")
    assert second.stdout == "second\n"
    assert third.stdout == "third\n"
    assert text_of(kernel.of(second.id), "stdout") == "second\n"


async def test_many_threads_of_many_cells_keep_their_output_apart(kernel: StartedKernel) -> None:
    code = (
        "import threading, time\n"
        "def work(cell):\n"
        "    for i in range(30): print(f'{{cell}} {{i}}\\n', end=''); time.sleep(0.01)\n"
        "for _ in range(3): threading.Thread(target=work, args=({cell},)).start()"
    )
    outcomes = [await kernel.run(code.format(cell=cell)) for cell in range(5)]
    await kernel.run("for t in threading.enumerate():\n    if '(work)' in t.name: t.join()")
    for cell, outcome in enumerate(outcomes):
        with anyio.fail_after(PATIENCE):
            await kernel.printed_lines(outcome.id, 90)
        text = text_of(kernel.of(outcome.id), "stdout")
        assert sorted(set(text.split("\n")) - {""}) == sorted(f"{cell} {i}" for i in range(30))


async def test_a_thread_sees_the_context_of_its_cell_and_starts_only_once(
    kernel: StartedKernel,
) -> None:
    outcome = await kernel.run(
        "import contextvars, threading\n"
        "variable = contextvars.ContextVar('variable'); variable.set('from the cell')\n"
        "seen = []\n"
        "thread = threading.Thread(target=lambda: seen.append(variable.get()))\n"
        "thread.start(); thread.join()\n"
        "try: thread.start()\n"
        "except RuntimeError as error: seen.append(str(error))\n"
        "seen"
    )
    assert outcome.result == "['from the cell', 'threads can only be started once']"
