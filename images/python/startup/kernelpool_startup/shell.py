"""The IPython shell, for readers who have no terminal.

Above: `kernel.py`. Below: ipykernel's ZMQInteractiveShell.
"""

import os
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

from ipykernel.compiler import XCachingCompiler
from ipykernel.zmqshell import ZMQInteractiveShell
from IPython.core import page
from IPython.core.compilerop import CachingCompiler

_RUNNER = ZMQInteractiveShell.run_code.__code__.co_filename
"""The module whose frames stand below a cell's in a traceback."""


_OURS = f"{Path(__file__).parent}/"
"""Where the frames come from that a reader of a traceback has no use for."""


class CellCompiler(XCachingCompiler):
    """Names cells by a fast hash while no debugger is attached.

    The names that ipykernel's debugger expects are hashed in Python, 1 µs for each character of a
    cell: a large one would wait for seconds before it runs.
    """

    debugging = False

    def get_code_name(self, raw_code: str, code: str, number: int) -> str:
        """Return the file name under which a cell is compiled."""
        if self.debugging:
            return super().get_code_name(raw_code, code, number)
        return CachingCompiler.get_code_name(self, raw_code, code, number)


class Shell(ZMQInteractiveShell):
    """A shell without colours, pagers, and ways to end the kernel by accident."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        warnings.filterwarnings("ignore", message="To exit: use 'exit'")

    def init_environment(self) -> None:
        """Ask programs for plain text."""
        os.environ.update(TERM="dumb", NO_COLOR="1", PAGER="cat", GIT_PAGER="cat")

    def init_hooks(self) -> None:
        """Show what would go to a pager (`len?`) as ordinary output."""
        super().init_hooks()
        self.set_hook("show_in_pager", page.as_hook(page.display_page), 90)

    def ask_exit(self) -> None:
        """End the cell, as `exit()` ends a script; the kernel and its state stay."""
        raise SystemExit

    def showtraceback(self, exc_tuple: Any = None, *args: Any, **kwargs: Any) -> None:
        """Show an error as an error. IPython prints exception groups, and publishes nothing."""
        etype, value, tb = self._get_exc_info(exc_tuple)
        if not _has_group(value):
            super().showtraceback(exc_tuple, *args, **kwargs)
            return
        while tb is not None and tb.tb_frame.f_code.co_filename == _RUNNER:
            tb = tb.tb_next
        text = "".join(traceback.format_exception(etype, value, tb))
        self._showtraceback(etype, value, text.splitlines())

    def _get_exc_info(self, exc_tuple: Any = None) -> tuple[Any, Any, Any]:
        etype, value, tb = super()._get_exc_info(exc_tuple)
        return etype, value, _without_our_frames(tb)

    @contextmanager
    def _tee(self, channel: str) -> Iterator[None]:
        """Keep no second copy of all output in memory."""
        yield

    def _showtraceback(self, etype: type[BaseException], evalue: Any, stb: list[str]) -> None:
        super()._showtraceback(etype, describe(evalue), stb)

    def _format_exception_for_storage(self, exception: BaseException, *_: Any, **__: Any) -> Any:
        """Keep for the history what was shown, instead of formatting the traceback again."""
        return {
            "ename": type(exception).__name__,
            "evalue": describe(exception),
            "traceback": self._last_traceback or [],
        }


def _has_group(error: BaseException | None) -> bool:
    seen = set()
    while error is not None and id(error) not in seen:
        if isinstance(error, BaseExceptionGroup):
            return True
        seen.add(id(error))
        error = error.__context__
    return False


def describe(error: Any) -> str:
    """Return `str(error)`, also for an exception whose own `__str__` raises."""
    try:
        return str(error)
    except BaseException:
        return f"<{type(error).__name__} without a printable message>"


def _without_our_frames(tb: TracebackType | None) -> TracebackType | None:
    """The traceback without the frames of this package: an interrupt is raised by one of them."""
    kept = []
    while tb is not None:
        kept.append(tb)
        tb = tb.tb_next
    theirs = [each for each in kept if not each.tb_frame.f_code.co_filename.startswith(_OURS)]
    for each, following in zip(theirs, [*theirs[1:], None], strict=True):
        each.tb_next = following
    return (theirs or kept or [None])[0]
