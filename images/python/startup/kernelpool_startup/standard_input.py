"""sys.stdin for code that nobody may be there to answer.

Above: user code that reads. Below: the kernel's `input()` machinery, which asks the client or says
that it may not. Descriptor 0 is the null device, so C code and child processes read end of file.
"""

import io
import os
import pdb
import sys
from collections.abc import Callable
from typing import Any

from IPython.core.error import StdinNotImplementedError


def refusal(what: str) -> StdinNotImplementedError:
    """Return the error for reading where no answer is allowed; its text is the remedy."""
    return StdinNotImplementedError(
        f"{what} needs interactive input, and this execution does not accept any. "
        'Put the value into the code or read it from a file, or run the code with stdin "ask".'
    )


class StandardInput(io.TextIOBase):
    """Text lines asked from the client, each read one question.

    Args:
        ask: Returns one line without its newline, raises EOFError at the end and
            StdinNotImplementedError where asking is not allowed.
    """

    encoding = "utf-8"
    errors = "replace"
    name = "<stdin>"

    def __init__(self, ask: Callable[[str], str]) -> None:
        self._ask = ask
        self._rest = ""

    def readline(self, size: int | None = -1, /) -> str:
        """Return the next line with its newline, or nothing at the end."""
        if not self._rest:
            try:
                self._rest = self._ask("sys.stdin.readline()") + "\n"
            except EOFError:
                return ""
        return self._take(size)

    def read(self, size: int | None = -1, /) -> str:
        """Return everything up to the end of input, or as much as was asked for."""
        if size is not None and size >= 0:
            return self.readline(size)
        lines = [self._rest]
        self._rest = ""
        while True:
            try:
                lines.append(self._ask("sys.stdin.read()") + "\n")
            except EOFError:
                return "".join(lines)

    def _take(self, size: int | None) -> str:
        end = len(self._rest) if size is None or size < 0 else size
        taken, self._rest = self._rest[:end], self._rest[end:]
        return taken

    @property
    def buffer(self) -> "StandardInputBytes":
        """The same input as bytes."""
        return StandardInputBytes(self)

    def reconfigure(self, **kwargs: Any) -> None:
        """Accept what a script asks of its input; it is always Unicode."""

    def readable(self) -> bool:
        """Say yes."""
        return True

    def fileno(self) -> int:
        """Return descriptor 0, the null device."""
        return 0

    def close(self) -> None:
        """Stay open: the next cell reads from here too."""


class StandardInputBytes(io.BufferedIOBase):
    """`sys.stdin.buffer`."""

    def __init__(self, text: StandardInput) -> None:
        self._text = text

    def read(self, size: int | None = -1, /) -> bytes:
        """Read text and encode it."""
        return self._text.read(size).encode()

    def readline(self, size: int | None = -1, /) -> bytes:
        """Read a line and encode it."""
        return self._text.readline(size).encode()

    def readable(self) -> bool:
        """Say yes."""
        return True

    def fileno(self) -> int:
        """Return descriptor 0, the null device."""
        return 0


def explaining_breakpoint(may_ask: Callable[[], bool]) -> Callable[..., Any]:
    """Return a `sys.breakpointhook` that refuses at once where nobody could answer the debugger."""

    def breakpoint_hook(*args: Any, **kwargs: Any) -> Any:
        if os.environ.get("PYTHONBREAKPOINT"):
            return sys.__breakpointhook__(*args, **kwargs)
        if not may_ask():
            raise refusal("breakpoint()")
        return pdb.set_trace(sys._getframe(1))

    return breakpoint_hook


def install(ask: Callable[[str], str], may_ask: Callable[[], bool]) -> StandardInput:
    """Replace sys.stdin and the breakpoint hook. Return the new sys.stdin."""
    standard_input = StandardInput(ask)
    sys.stdin = sys.__stdin__ = standard_input
    sys.breakpointhook = explaining_breakpoint(may_ask)
    return standard_input
