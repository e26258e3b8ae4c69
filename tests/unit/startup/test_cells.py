"""What a cell can rely on: a clean namespace on request, asyncio, an honest end, plain text."""

import os

import anyio
import pytest

from .started_kernel import PATIENCE, StartedKernel, StartKernel


async def test_a_reset_takes_effect_before_the_code_whatever_the_code_does(
    kernel: StartedKernel,
) -> None:
    await kernel.run("import json\nold = 1\n'result'")
    failed = await kernel.run("print('old' in dir())\nraise ValueError", reset=True)
    assert failed.stdout == "False\n"
    assert failed.error == "ValueError"
    for name in ("old", "json", "_", "_1", "Out[1]"):
        assert (await kernel.run(name)).error in ("NameError", "KeyError")


async def test_a_reset_holds_for_code_that_does_not_compile(kernel: StartedKernel) -> None:
    await kernel.run("old = 1")
    assert (await kernel.run("1 +", reset=True)).error == "SyntaxError"
    assert (await kernel.run("old")).error == "NameError"


async def test_a_reset_keeps_the_execution_count_and_what_a_namespace_needs(
    kernel: StartedKernel,
) -> None:
    await kernel.run("get_ipython().user_ns.clear()")
    outcome = await kernel.run("new = 2\nget_ipython(), display, new, 3", reset=True)
    assert outcome.status == "ok"
    assert outcome.reply.content["execution_count"] == 2
    assert (await kernel.run("new")).result == "2"


async def test_without_the_wish_nothing_is_reset(kernel: StartedKernel) -> None:
    await kernel.run("old = 1")
    for wish in ({}, {"kernelpool": None}, {"kernelpool": {"reset": False}}, {"kernelpool": 1}):
        content = {"code": "old", "silent": False}
        id = await kernel.send("shell", "execute_request", content, metadata=wish)
        assert (await kernel.outcome(id)).result == "1"


ASYNCIO = {
    "run": "asyncio.run(f())",
    "imported run": "from asyncio import run; run(f())",
    "runner": "with asyncio.Runner() as runner: print(runner.run(f()), end='')\n7",
    "await": "await f()",
    "run after await": "await asyncio.sleep(0)\nasyncio.run(f())",
    "run in a thread": "await asyncio.to_thread(asyncio.run, f())",
}


@pytest.mark.parametrize("code", ASYNCIO.values(), ids=ASYNCIO.keys())
async def test_asyncio_in_a_cell_works_as_in_a_script(kernel: StartedKernel, code: str) -> None:
    prelude = "import asyncio\nasync def f(): await asyncio.sleep(0.01); return 7\n"
    for _ in range(2):
        assert (await kernel.run(prelude + code)).result == "7"
    assert (await kernel.run("await asyncio.sleep(0); 8")).result == "8"


async def test_asyncio_run_stays_in_the_thread_and_prints_as_its_cell(
    kernel: StartedKernel,
) -> None:
    outcome = await kernel.run(
        "import asyncio, sqlite3, threading\n"
        "database = sqlite3.connect(':memory:')\n"
        "async def f():\n"
        "    process = await asyncio.create_subprocess_exec('echo', 'child')\n"
        "    await process.wait()\n"
        "    print(database.execute('select 42').fetchone(), end='')\n"
        "    return threading.current_thread() is threading.main_thread()\n"
        "asyncio.run(f())"
    )
    assert outcome.result == "True"
    assert outcome.stdout == "child\n(42,)"


async def test_asyncio_run_within_asyncio_run_is_refused_as_ever(kernel: StartedKernel) -> None:
    outcome = await kernel.run(
        "import asyncio\nasync def g(): pass\nasync def f():\n    c = g()\n"
        "    try: asyncio.run(c)\n    finally: c.close()\nasyncio.run(f())"
    )
    assert outcome.error == "RuntimeError"


async def test_a_task_left_running_goes_on_beside_later_cells(kernel: StartedKernel) -> None:
    first = await kernel.run(
        "import asyncio\nasync def later():\n    await asyncio.sleep(0.2); print('later')\n"
        "task = asyncio.create_task(later())"
    )
    await kernel.run("await asyncio.sleep(0.3)")
    await kernel.printed(first.id, "later\n")


HOSTILE_ERRORS = {
    "str raises": "class E(Exception):\n    def __str__(self): raise ValueError\nraise E",
    "str exits": "class E(Exception):\n    def __str__(self): raise SystemExit\nraise E",
    "str is no text": "class E(Exception):\n    def __str__(self): return 1\nraise E",
    "renders itself": "class E(Exception):\n    def _render_traceback_(self): 1/0\nraise E",
    "base": "class E(BaseException): pass\nraise E",
    "exit": "exit()",
    "quit": "quit()",
    "sys.exit": "import sys; sys.exit(3)",
    "repr exits": "class R:\n    def __repr__(self): raise SystemExit\nR()",
    "generator exit": "raise GeneratorExit",
    "cancelled": "import asyncio; raise asyncio.CancelledError",
    "deep": "def f(): f()\nf()",
    "group": "raise ExceptionGroup('several', [ValueError(1), TypeError(2)])",
}


@pytest.mark.parametrize("code", HOSTILE_ERRORS.values(), ids=HOSTILE_ERRORS.keys())
async def test_whatever_is_raised_there_is_a_reply_and_the_kernel_stays(
    kernel: StartedKernel, code: str
) -> None:
    await kernel.run("kept = 41")
    outcome = await kernel.run(code)
    assert outcome.status == "error"
    assert outcome.error is not None
    assert (await kernel.run("kept + 1")).result == "42"


async def test_tracebacks_are_whole_and_plain(kernel: StartedKernel) -> None:
    outcome = await kernel.run("def divide(a):\n    return a / 0\n\ndivide(6)")
    traceback = "\n".join(outcome.reply.content["traceback"])
    assert "\x1b" not in traceback
    assert "ZeroDivisionError: division by zero" in traceback
    assert "return a / 0" in traceback
    assert "divide(6)" in traceback
    assert "line 2" in traceback


async def test_programs_are_asked_for_plain_text(kernel: StartedKernel) -> None:
    outcome = await kernel.run(
        "import os; [os.environ.get(n) for n in ('TERM', 'NO_COLOR', 'FORCE_COLOR', 'PAGER')]"
    )
    assert outcome.result == "['dumb', '1', None, 'cat']"


async def test_help_is_output_and_not_a_pager(kernel: StartedKernel) -> None:
    outcome = await kernel.run("len?")
    shown = next(m for m in outcome.published if m.type == "display_data")
    assert "Return the number of items" in shown.content["data"]["text/plain"]


async def test_a_large_cell_does_not_wait_to_be_named(kernel: StartedKernel) -> None:
    with anyio.fail_after(10):
        outcome = await kernel.run("text = '" + "x" * 4_000_000 + "'\nlen(text)")
    assert outcome.result == "4000000"


async def test_the_debugger_is_imported_when_it_is_asked_for(kernel: StartedKernel) -> None:
    assert (await kernel.run("import sys; 'debugpy' in sys.modules")).result == "False"
    await kernel.send(
        "control", "debug_request", {"type": "request", "seq": 1, "command": "debugInfo"}
    )
    outcome = await kernel.run("while 'debugpy' not in sys.modules: pass\n'imported'")
    assert outcome.result == "'imported'"


async def test_what_is_printed_is_not_kept_in_memory(kernel: StartedKernel) -> None:
    code = "import resource; print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)"
    before = int((await kernel.run(code)).stdout)
    await kernel.run("for i in range(400): print('x' * 100_000)")
    assert int((await kernel.run(code)).stdout) - before < 25_000


async def test_the_heartbeat_socket_comes_last_and_root_may_use_them_all(
    start_kernel: StartKernel,
) -> None:
    async with start_kernel() as kernel:
        created = [
            (await anyio.Path(kernel.directory, f"k-{port}").stat()).st_ctime_ns
            for port in range(1, 6)
        ]
        assert max(created) == created[4]


async def test_a_kernel_shuts_down_when_asked(kernel: StartedKernel) -> None:
    await kernel.send("control", "shutdown_request", {"restart": False})
    with anyio.fail_after(PATIENCE):
        assert await anyio.to_thread.run_sync(kernel.process.wait) == 0


@pytest.mark.skipif(os.getuid() != 0, reason="only root can start a process as another uid")
async def test_a_uid_without_a_name_has_a_name_and_a_home(start_kernel: StartKernel) -> None:
    async with start_kernel(uid=54321, KERNELPOOL_HOME="") as kernel:
        outcome = await kernel.run(
            "import getpass, os, pathlib, stat\n"
            "home = pathlib.Path.home()\n"
            "(home / 'file').write_text('written')\n"
            "print(getpass.getuser(), os.path.expanduser('~') == str(home), os.getuid(), home)\n"
            "print(oct(stat.S_IMODE(home.stat().st_mode)), os.environ['LOGNAME'])\n"
            "pathlib.Path(os.environ['XDG_CACHE_HOME']).is_relative_to(home)"
        )
        home = f"/tmp/home-{54321}"
        assert outcome.stdout == f"user True 54321 {home}\n0o700 user\n"
        assert outcome.result == "True"
        assert (await kernel.run("import shutil; shutil.rmtree(home)")).status == "ok"


async def test_the_working_directory_is_the_workspace_and_modules_in_it_can_be_imported(
    start_kernel: StartKernel,
) -> None:
    for options in ((), ("-P",)):
        async with start_kernel(options=options) as kernel:
            outcome = await kernel.run(
                "import os\nopen('helper.py', 'w').write('answer = 42')\n"
                "open('json.py', 'w').write('1/0'); import json, helper\n"
                "print(os.getcwd())\nhelper.answer"
            )
            assert outcome.result == "42"
            assert outcome.stdout == f"{kernel.directory}/data\n"
            assert (await kernel.run("!python3 -c 'import os; print(os.getcwd())'")).stdout.strip()
