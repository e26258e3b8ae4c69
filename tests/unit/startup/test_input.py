"""Reading input asks the client where that is allowed, and else says at once what to do."""

import anyio
import pytest

from .started_kernel import PATIENCE, StartedKernel

READS = {
    "input": "input('name? ')",
    "getpass": "import getpass; getpass.getpass()",
    "imported getpass": "from getpass import getpass; getpass('secret')",
    "read": "import sys; sys.stdin.read()",
    "readline": "import sys; sys.stdin.readline()",
    "readlines": "import sys; sys.stdin.readlines()",
    "iteration": "import sys\nfor line in sys.stdin: pass",
    "bytes": "import sys; sys.stdin.buffer.read()",
    "breakpoint": "breakpoint()",
    "pdb": "import pdb; pdb.set_trace()\nx = 1",
    "ipython": "from IPython.core.debugger import set_trace; set_trace()\nx = 1",
    "thread": (
        "import concurrent.futures as f\nwith f.ThreadPoolExecutor() as e: e.submit(input).result()"
    ),
}


@pytest.mark.parametrize("code", READS.values(), ids=READS.keys())
async def test_without_permission_reading_fails_at_once_and_says_what_to_do(
    kernel: StartedKernel, code: str
) -> None:
    with anyio.fail_after(10):
        outcome = await kernel.run(code)
    assert outcome.error == "StdinNotImplementedError"
    assert "does not accept any" in outcome.message
    assert 'stdin "ask"' in outcome.message
    assert (await kernel.run("6 * 7")).result == "42"


@pytest.mark.parametrize(
    ("code", "answers", "result"),
    [
        ("input('name? ')", ["Ada"], "'Ada'"),
        ("import getpass; getpass.getpass()", ["secret"], "'secret'"),
        ("import sys; sys.stdin.readline()", ["a line"], "'a line\\n'"),
        ("import sys; sys.stdin.read()", ["one", "two", "\x04"], "'one\\ntwo\\n'"),
        ("import sys; [line.strip() for line in sys.stdin]", ["1", "2", "\x04"], "['1', '2']"),
        ("import sys; (sys.stdin.read(2), sys.stdin.readline())", ["abc"], "('ab', 'c\\n')"),
        ("import sys; sys.stdin.buffer.readline()", ["ü"], "b'\\xc3\\xbc\\n'"),
    ],
)
async def test_with_permission_reading_asks_the_client(
    kernel: StartedKernel, code: str, answers: list[str], result: str
) -> None:
    id = await kernel.execute(code, allow_stdin=True)
    for number, answer in enumerate(answers, start=1):
        with anyio.fail_after(PATIENCE):
            await kernel.asked(number)
        await kernel.answer(answer)
    outcome = await kernel.outcome(id)
    assert outcome.result == result
    assert all(question.parent == id for question in kernel.questions)


async def test_an_interrupt_ends_a_wait_for_input(kernel: StartedKernel) -> None:
    id = await kernel.execute("input()", allow_stdin=True)
    with anyio.fail_after(PATIENCE):
        await kernel.wait_for(lambda: kernel.questions)
    kernel.interrupt()
    assert (await kernel.outcome(id)).error == "KeyboardInterrupt"
    assert (await kernel.run("6 * 7")).result == "42"


async def test_a_debugger_can_be_talked_to_where_input_is_allowed(kernel: StartedKernel) -> None:
    id = await kernel.execute("secret = 6 * 7\nbreakpoint()\nprint('after')", allow_stdin=True)
    for number, command in enumerate(["p secret", "c"], start=1):
        with anyio.fail_after(PATIENCE):
            await kernel.asked(number)
        await kernel.answer(command)
    outcome = await kernel.outcome(id)
    assert outcome.status == "ok"
    assert "42" in outcome.stdout
    assert "after" in outcome.stdout


async def test_descriptor_zero_and_children_read_end_of_file(kernel: StartedKernel) -> None:
    outcome = await kernel.run(
        "import os, subprocess, sys\n"
        "[os.read(0, 10), subprocess.run(['cat'], capture_output=True).stdout,\n"
        " subprocess.run(['cat'], stdin=sys.stdin, capture_output=True).stdout]"
    )
    assert outcome.result == "[b'', b'', b'']"


async def test_closing_the_standard_streams_harms_no_later_cell(kernel: StartedKernel) -> None:
    await kernel.run("import sys; sys.stdin.close(); sys.stdout.close(); sys.stderr.close()")
    await kernel.run("import io, sys; sys.stdout = io.StringIO(); sys.stdout.close()")
    outcome = await kernel.run("print('still here')")
    assert outcome.stdout == "still here\n"
    await kernel.run("del sys.stdout, sys.stderr, sys.stdin")
    assert (await kernel.run("print('still here')")).stdout == "still here\n"
