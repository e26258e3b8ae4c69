"""Sections of the main thread that an interrupt waits for.

Above: `kernel.py`, whose SIGINT handlers ask, and `streams.py`. Below: nothing. Masking the signal
would not do: another thread takes it then, and Python runs the handler in the main thread still.
"""

import threading
from collections.abc import Callable


class Critical:
    """A section that is done once and whole, or not begun."""

    def __init__(self) -> None:
        self._inside = False
        self._late: Callable[[], None] | None = None

    def __enter__(self) -> None:
        if threading.current_thread() is threading.main_thread():
            self._inside = True

    def __exit__(self, *_: object) -> None:
        if threading.current_thread() is threading.main_thread():
            self._inside = False
            late, self._late = self._late, None
            if late is not None:
                late()

    def postpone(self, handle: Callable[[], None]) -> bool:
        """Have an interrupt handled at the section's end; False when none is under way."""
        if self._inside:
            self._late = handle
        return self._inside


critical = Critical()
"""The one of this process."""
