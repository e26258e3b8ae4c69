"""Runs the code blocks of a Markdown page as its reader would, and compares what they print.

`sh` blocks run one after the other in one shell, `python` blocks in one interpreter, both in the
reader's directory. A `text` or `json` block says what the block before it prints, with `...` for
what varies. A block that starts `kernelpool up` is left running, on a free port.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Final

FENCE: Final = re.compile(r"^```(\w+)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
PORTS: Final = re.compile(r":(8000|8443)\b")
"""The ports that pages speak of."""
UP: Final = re.compile(r"^(\S*kernelpool up\b.*)$", re.MULTILINE)
END: Final = "-- end of block, status "

INTERPRETER: Final = f"""
import sys, traceback
names = {{"__name__": "__main__"}}
while source := sys.stdin.buffer.readline():
    status = 0
    try:
        exec(compile(eval(source), "<page>", "exec"), names)
    except BaseException:
        traceback.print_exc(file=sys.stdout)
        status = 1
    print("\\n{END}" + str(status), flush=True)
"""


@dataclass(frozen=True, slots=True)
class Block:
    """A fenced block."""

    language: str
    text: str
    line: int


def blocks(page: Path) -> list[Block]:
    """The fenced blocks of a page that name a language."""
    text = page.read_text(encoding="utf-8")
    return [
        Block(match[1], match[2], text.count("\n", 0, match.start()) + 1)
        for match in FENCE.finditer(text)
    ]


class Reader:
    """Somebody who does what a page says, in a directory that looks like a checkout."""

    def __init__(self, directory: Path, environment: Mapping[str, str]) -> None:
        self._directory = directory
        self._port = _free_port()
        self._environment = {**os.environ, **environment, "PYTHONUNBUFFERED": "1"}
        self._cleanup = ExitStack()
        self._shell = self._start("bash", "--norc")
        self._python = self._start(sys.executable, "-c", INTERPRETER)

    def close(self) -> None:
        """Stop what is still running."""
        self._cleanup.close()

    def do(self, block: Block) -> str:
        """Run a block; what it printed."""
        text = PORTS.sub(f":{self._port}", block.text)
        if block.language == "python":
            return self._run(self._python, repr(text))
        if UP.search(text):
            return self._serve(UP.sub(rf"exec \1 --port {self._port}", text))
        return self._run(self._shell, f'{text}printf "\\n{END}%d\\n" "$?"')

    def matches(self, printed: str, promised: str) -> bool:
        """Whether output is what a page says, `...` standing for anything."""
        here = PORTS.sub(f":{self._port}", promised.strip())
        pattern = re.escape(here).replace(re.escape("..."), ".*?")
        return re.fullmatch(pattern, printed.strip(), re.DOTALL) is not None

    def _start(self, *command: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            command,
            cwd=self._directory,
            env=self._environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self._cleanup.enter_context(process)
        self._cleanup.callback(process.kill)
        return process

    def _run(self, process: subprocess.Popen[str], source: str) -> str:
        assert process.stdin is not None
        process.stdin.write(source + "\n")
        process.stdin.flush()
        printed = ""
        for line in _lines(process):
            if line.startswith(END):
                assert line == f"{END}0\n", f"the block failed: {printed}"
                return printed.removesuffix("\n")
            printed += line
        raise AssertionError(f"the block ended its interpreter: {printed}")

    def _serve(self, command: str) -> str:
        server = self._start("bash", "-c", command)
        self._cleanup.callback(_stop, server)
        printed = ""
        for line in _lines(server):
            printed += line
            if '"event": "serving"' in line:
                return printed
        raise AssertionError(f"the server ended: {printed}")


@contextmanager
def reading(directory: Path, environment: Mapping[str, str]) -> Iterator[Reader]:
    """A reader, for the block."""
    reader = Reader(directory, environment)
    try:
        yield reader
    finally:
        reader.close()


def _lines(process: subprocess.Popen[str]) -> IO[str]:
    assert process.stdout is not None
    return process.stdout


def _stop(server: subprocess.Popen[str]) -> None:
    server.send_signal(signal.SIGTERM)
    rest = server.communicate()[0]
    assert server.returncode == 0, rest


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
