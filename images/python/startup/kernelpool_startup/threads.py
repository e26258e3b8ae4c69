"""Threads run in a copy of the context that started them.

Above: user code. Below: the standard library. ipykernel keeps in context variables which execution
a message belongs to. A thread without a context answers with the newest execution, so what a thread
of one cell prints late appears as the output of the next. Python 3.14 copies contexts the same way.
"""

import concurrent.futures
import functools
import threading
from collections.abc import Callable
from contextvars import copy_context
from types import ModuleType
from typing import Any

from kernelpool_startup.imports import after_import


def install() -> None:
    """Make every thread started from now on, and every task given to a pool, carry its context."""
    threading.Thread.start = _starting_in_context(threading.Thread.start)
    executor = concurrent.futures.ThreadPoolExecutor
    executor.submit = _submitting_in_context(executor.submit)
    after_import("multiprocessing.pool", _extend_thread_pool)


def _starting_in_context(start: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(start)
    def start_in_context(self: threading.Thread) -> None:
        if self.ident is None:
            context = copy_context()

            def run() -> None:
                del self.run  # the class's own, or a subclass's
                context.run(self.run)

            self.run = run
        start(self)

    return start_in_context


def _submitting_in_context(submit: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(submit)
    def submit_in_context(self: Any, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        return submit(self, copy_context().run, fn, *args, **kwargs)

    return submit_in_context


def _extend_thread_pool(module: ModuleType) -> None:
    """Extend `multiprocessing.pool.ThreadPool`, whose workers outlive the cell that made them."""
    for name in ("apply_async", "_map_async", "imap", "imap_unordered"):
        setattr(module.ThreadPool, name, _handing_over_context(getattr(module.ThreadPool, name)))


def _handing_over_context(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def with_context(self: Any, func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        context = copy_context()

        @functools.wraps(func)
        def in_context(*task: Any, **options: Any) -> Any:
            # A context can be entered once at a time, the tasks of one call run in parallel.
            return context.copy().run(func, *task, **options)

        return method(self, in_context, *args, **kwargs)

    return with_context
