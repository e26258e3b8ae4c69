"""The kernel: takes requests, runs cells, answers.

Above: `app.py`. Below: `shell.py` runs the code. ipykernel's kernel, with these differences: an
interrupt is raised in user code or not at all, so that every request gets its reply; a request may
ask for a clean namespace; replies are journalled; a forked child ends with its cell; the debugger
is imported when it is first used.

A clean namespace is asked for in the metadata of an execute request:

    {"kernelpool": {"reset": true}}
"""

import asyncio
import importlib.util
import os
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from types import FrameType, ModuleType
from typing import Any

from ipykernel.ipkernel import IPythonKernel
from traitlets import Type

from kernelpool_startup import libraries, standard_input
from kernelpool_startup.interrupts import critical
from kernelpool_startup.journal import SHELL, Journal
from kernelpool_startup.shell import CellCompiler, Shell, describe

_in_cell: ContextVar[bool] = ContextVar("in_cell", default=False)
"""Whether the code that reads it is a cell's, or a task or callback that a cell started."""


class Kernel(IPythonKernel):
    """One kernel. `journal` is set by the app before it starts."""

    shell_class = Type(Shell)
    compiler_class = Type(CellCompiler)
    debugger_class = None  # as a trait it would be imported now
    journal: Journal | None = None

    def __init__(self, **kwargs: Any) -> None:
        self.debugger: Any = None
        self._interruptible = False
        self._interrupt_pending = False
        self._pid = os.getpid()
        with _debugger_left_out():
            super().__init__(**kwargs)
        self._streams = {"stdout": sys.stdout, "stderr": sys.stderr}
        self._streams["stdin"] = standard_input.install(self._ask, lambda: self._allow_stdin)
        self.iopub_thread.may_interrupt = lambda: self._interruptible

    # Requests

    async def execute_request(self, stream: Any, ident: Any, parent: dict[str, Any]) -> None:
        """Run a cell and reply."""
        if self.journal is not None:
            self.journal.begin_cell()
            stream = JournalledReplies(stream, self.journal)
        await super().execute_request(stream, ident, parent)

    def _send_abort_reply(self, stream: Any, msg: dict[str, Any], idents: Any) -> None:
        if self.journal is not None and msg["header"]["msg_type"] == "execute_request":
            stream = JournalledReplies(stream, self.journal)
        super()._send_abort_reply(stream, msg, idents)

    async def do_execute(
        self,
        code: str,
        silent: bool,
        store_history: bool = True,
        user_expressions: dict[str, str] | None = None,
        allow_stdin: bool = False,
        *,
        cell_meta: Any = None,
        cell_id: Any = None,
    ) -> dict[str, Any]:
        """Run code; whatever it does, return the content of a reply."""
        self.shell._last_traceback = None
        token = _in_cell.set(True)
        try:
            with self._interrupts():
                if _wants_reset(cell_meta):
                    self._reset_namespace()
                reply: dict[str, Any] = await super().do_execute(
                    code,
                    silent,
                    store_history,
                    user_expressions,
                    allow_stdin,
                    cell_meta=cell_meta,
                    cell_id=cell_id,
                )
        except BaseException as error:
            reply = self._reply_for(error)
        finally:
            _in_cell.reset(token)
            self._mend_streams()
        if os.getpid() != self._pid:
            _end_child(reply)
        if reply["status"] == "error" and self.shell._last_traceback is None:
            self._publish_error(reply)
        return reply

    def do_complete(self, code: str, cursor_pos: int) -> Any:
        """Complete, interruptibly: completion evaluates user code."""
        with self._interrupts():
            return super().do_complete(code, cursor_pos)

    def do_inspect(self, *args: Any, **kwargs: Any) -> Any:
        """Inspect, interruptibly."""
        with self._interrupts():
            return super().do_inspect(*args, **kwargs)

    def _reply_for(self, error: BaseException) -> dict[str, Any]:
        """Turn what escaped IPython into an error reply."""
        name, value = type(error).__name__, describe(error)
        return {
            "status": "error",
            "ename": name,
            "evalue": value,
            "traceback": self.shell._last_traceback or [f"{name}: {value}"],
            "execution_count": self.shell.execution_count - 1,
            "user_expressions": {},
            "payload": [],
        }

    def _publish_error(self, reply: dict[str, Any]) -> None:
        """Publish an error that IPython could not show, so that none is known from a reply only."""
        content = {name: reply[name] for name in ("ename", "evalue", "traceback")}
        self.send_response(self.iopub_socket, "error", content, ident=self._topic("error"))

    def _reset_namespace(self) -> None:
        """Forget all names, keep the execution count."""
        libraries.close_figures()
        try:
            self.shell.reset(new_session=False)
        except Exception:
            self.shell.user_ns.clear()
            self.shell.init_user_ns()

    def _mend_streams(self) -> None:
        """Put back standard streams that a cell left closed, else later output would be lost."""
        for name, own in self._streams.items():
            stream = getattr(sys, name, None)
            try:
                usable = stream is own or not stream.closed
            except Exception:
                usable = False
            if not usable:
                setattr(sys, name, own)

    # Interrupts

    def pre_handler_hook(self) -> None:
        """Take SIGINT over before each request, whatever the last cell did to it."""
        self._interrupt_pending = False
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        signal.signal(signal.SIGINT, self._on_interrupt)

    def post_handler_hook(self) -> None:
        """Ignore SIGINT between requests."""
        signal.signal(signal.SIGINT, signal.SIG_IGN)

    def _on_interrupt(self, signum: int, frame: FrameType | None) -> None:
        if critical.postpone(partial(self._on_interrupt, signum, frame)):
            return
        if self._interruptible:
            raise KeyboardInterrupt
        self._interrupt_pending = True

    @contextmanager
    def _interrupts(self) -> Iterator[None]:
        """Raise KeyboardInterrupt within, at once if the signal came a moment too early."""
        self._interruptible = True
        try:
            if self._interrupt_pending:
                self._interrupt_pending = False
                raise KeyboardInterrupt
            yield
        finally:
            self._interruptible = False

    @contextmanager
    def _cancel_on_sigint(self, future: asyncio.Future[Any]) -> Iterator[None]:
        """Interrupt an asynchronous cell, whether it awaits or computes."""
        loop = asyncio.get_running_loop()

        def on_interrupt(signum: int, frame: FrameType | None) -> None:
            if critical.postpone(partial(on_interrupt, signum, frame)):
                return
            running = _in_cell.get()
            if not running or asyncio.current_task(loop) is not future:
                loop.call_soon_threadsafe(future.cancel)
            if running:
                raise KeyboardInterrupt

        previous = signal.signal(signal.SIGINT, on_interrupt)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, previous)

    # Input

    def raw_input(self, prompt: Any = "") -> str:
        """Ask the client for a line: `input()`."""
        self._refuse_input("input()")
        return self._question(str(prompt))

    def getpass(self, prompt: Any = "", stream: Any = None, *, echo_char: Any = None) -> str:
        """Ask the client for a secret: `getpass.getpass()`."""
        self._refuse_input("getpass()")
        return self._question(str(prompt), password=True)

    def _ask(self, what: str) -> str:
        self._refuse_input(what)
        return self._question("")

    def _refuse_input(self, what: str) -> None:
        if not self._allow_stdin or os.getpid() != self._pid:
            raise standard_input.refusal(what)

    def _question(self, prompt: str, *, password: bool = False) -> str:
        ident = self._get_shell_context_var(self._shell_parent_ident)
        answer: str = self._input_request(prompt, ident, self.get_parent("shell"), password)
        return answer

    # The debugger

    @property
    def kernel_info(self) -> dict[str, Any]:
        """Describe the kernel without importing the debugger to do so."""
        with _debugger_left_out():
            info: dict[str, Any] = super().kernel_info
        if importlib.util.find_spec("debugpy") is not None:
            info["supported_features"].append("debugger")
        return info

    async def poll_stopped_queue(self) -> None:
        """Follow the debugger, once there is one."""
        if self.debugger is not None:
            await super().poll_stopped_queue()

    async def do_debug_request(self, msg: dict[str, Any]) -> Any:
        """Answer a debugger's client."""
        if self.debugger is None:
            from ipykernel.debugger import Debugger

            self.debugger = Debugger(
                self.log,
                self.debugpy_stream,
                self._publish_debug_event,
                self.debug_shell_socket,
                self.session,
                self._kernel_modules,
                self.debug_just_my_code,
                self.filter_internal_frames,
            )
            self.shell.compile.debugging = True
            self._stopped_queue_task = asyncio.create_task(self.poll_stopped_queue())
        return await super().do_debug_request(msg)

    @property
    def _supports_kernel_subshells(self) -> bool:
        return False


class JournalledReplies:
    """A stream that writes each reply to the journal before it sends it."""

    def __init__(self, stream: Any, journal: Journal) -> None:
        self._stream = stream
        self._journal = journal

    def send_multipart(self, message: Sequence[Any], *args: Any, **kwargs: Any) -> None:
        """Append, then send."""
        self._journal.append(SHELL, message)
        self._stream.send_multipart(message, *args, **kwargs)


@contextmanager
def _debugger_left_out() -> Iterator[None]:
    """Keep ipykernel's debugger, and debugpy with it, from being imported within."""
    name = "ipykernel.debugger"
    if name in sys.modules:
        yield
        return
    stand_in = ModuleType(name)
    stand_in._is_debugpy_available = False  # type: ignore[attr-defined]
    sys.modules[name] = stand_in
    try:
        yield
    finally:
        del sys.modules[name]


def _wants_reset(cell_meta: Any) -> bool:
    wishes = cell_meta.get("kernelpool") if isinstance(cell_meta, Mapping) else None
    return isinstance(wishes, Mapping) and wishes.get("reset") is True


def _end_child(reply: dict[str, Any]) -> None:
    """End a forked child where its cell ends, as a script's child ends with the script.

    It must not go on as a second kernel on its parent's sockets.
    """
    status = 0
    try:
        if reply["status"] == "error":
            status = 1
            sys.stderr.write("\n".join(reply["traceback"]) + "\n")
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(status)
