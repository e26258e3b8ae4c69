"""The application: builds the parts of the kernel and runs it.

Above: `__main__.py`. Below: `kernel.py`, `iopub.py`, `streams.py` and ipykernel. What is a setting
of ipykernel or IPython is set in `configuration`; no configuration file is read.
"""

import logging
import os
import sys
import threading
from typing import Any

import zmq
from ipykernel.kernelapp import IPKernelApp
from tornado import ioloop
from traitlets import Type, default
from traitlets.config import Config

from kernelpool_startup import event_loops, iopub, libraries, threads
from kernelpool_startup.environment import Settings
from kernelpool_startup.journal import Journal
from kernelpool_startup.kernel import Kernel
from kernelpool_startup.session import Session

SOCKET_UMASK = 0o077
"""Sockets are for this uid and for root, which is who serves the sandbox."""


def configuration() -> Config:
    """Return what differs from ipykernel's defaults."""
    config = Config()
    config.IPKernelApp.outstream_class = "kernelpool_startup.streams.OutStream"
    config.IPKernelApp.parent_handle = 0  # the sandbox ends with its init, not with a parent
    config.IPKernelApp.log_level = logging.ERROR
    config.Kernel._execute_sleep = 0.0  # iopub.py keeps the order that this pause hopes for
    config.HistoryManager.enabled = False  # a database write per cell
    config.InteractiveShell.colors = "nocolor"
    config.InteractiveShell.banner1 = ""
    config.InteractiveShell.separate_in = ""
    return config


class NoSubshells:
    """Stands where ipykernel has a thread that reads the shell channel for subshells.

    The main thread reads it directly, one hop less in each direction.
    """

    def __init__(self) -> None:
        self.parent_thread = threading.current_thread()

    def __bool__(self) -> bool:
        return False


class KernelApp(IPKernelApp):
    """Wires the kernel. `settings` is assigned before `initialize`."""

    name = "kernelpool-startup"
    kernel_class = Type(Kernel, klass="ipykernel.kernelbase.Kernel")
    settings: Settings
    journal: Journal | None = None

    @default("session")
    def _session_default(self) -> Session:
        return Session(parent=self)

    def parse_command_line(self, argv: list[str] | None = None) -> None:
        """Take no options but the connection file, which `__main__` has read."""

    def init_config_files(self) -> None:
        """Read no files."""

    def load_config_file(self, suppress_errors: bool | None = None) -> None:
        """Read no files."""

    def init_sockets(self) -> None:
        """Open the journal and bind everything but the heartbeat, which comes last."""
        if self.settings.journal is not None:
            self.journal = Journal(
                self.settings.journal,
                cell_bytes=self.settings.journal_cell_bytes,
                sign=self.session.sign,
            )
        umask = os.umask(SOCKET_UMASK)
        try:
            super().init_sockets()
        finally:
            os.umask(umask)

    def init_control(self, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        """Leave out the thread for subshells."""
        super().init_control(context)
        self.shell_channel_thread = NoSubshells()

    def init_iopub(self, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        """Bind an iopub socket that loses nothing."""
        self.iopub_socket = iopub.open_socket(context)
        self._apply_curve_server_options(self.iopub_socket)
        self.iopub_port = self._bind_socket(self.iopub_socket, self.iopub_port)
        self.configure_tornado_logger()
        self.iopub_thread = iopub.IOPub(
            self.iopub_socket, session=self.session, journal=self.journal
        )
        self.iopub_thread.start()
        self.iopub_socket = self.iopub_thread.background_socket

    def write_connection_file(self, **kwargs: Any) -> None:
        """Leave the file as the host wrote it."""

    def log_connection_info(self) -> None:
        """Record the ports and print nothing."""
        names = ("shell", "iopub", "stdin", "hb", "control")
        self._ports = {name: getattr(self, f"{name}_port") for name in names}

    def init_kernel(self) -> None:
        """Create the kernel and give it the journal."""
        super().init_kernel()
        self.kernel.journal = self.journal

    def init_path(self) -> None:
        """Let modules in the working directory be imported; only now, so that none shadows ours."""
        if "" not in sys.path:
            site = (i for i, path in enumerate(sys.path) if path.endswith("-packages"))
            sys.path.insert(next(site, len(sys.path)), "")

    def initialize(self, argv: list[str] | None = None) -> None:
        """Build everything, then change what user code sees."""
        super().initialize(argv)
        threads.install()
        libraries.install()

    def start(self) -> None:
        """Serve until shut down."""
        self.kernel.start()
        self.io_loop = ioloop.IOLoop.current()
        event_loops.install(self.io_loop.asyncio_loop)
        while True:
            try:
                self.io_loop.start()
            except KeyboardInterrupt:
                continue  # raised in a task that some cell left running
            return


def launch(connection_file: str, settings: Settings) -> None:
    """Run a kernel until it is shut down."""
    app = KernelApp.instance(connection_file=connection_file, config=configuration())
    app.settings = settings
    app.initialize([])
    app.start()
