"""The iopub channel: journalled, and never ahead of its reader by more than a bound.

Above: output streams and the display machinery hand messages over from any thread. Below: an XPUB
socket that waits for a slow reader instead of dropping messages (XPUB_NODROP).

So a reader that stands still stops first the iopub thread, in the send, and then, once the queue is
full, the code that prints. A reader that is gone frees its pipe, and one that never came has none:
neither is waited for.
"""

import logging
import os
import threading
from collections.abc import Callable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import zmq
from ipykernel.iostream import IOPubThread
from ipykernel.thread import BaseThread

from kernelpool_startup.journal import IOPUB, Journal

SEND_HIGH_WATER_MARK = 256
"""Messages in ZeroMQ's queue to one reader; with streams in chunks at most 32 MiB of text."""

QUEUE_LIMIT = 64
"""Events before ZeroMQ's queue beyond which a thread that publishes waits."""

WAKE_LIMIT = 500
"""Wake-up messages in flight; far below the 1,000 at which sending one would block."""

log = logging.getLogger(__name__)


def open_socket(context: zmq.Context[zmq.Socket[bytes]]) -> zmq.Socket[bytes]:
    """Return an XPUB socket, not yet bound: its options hold only for later connections."""
    socket = context.socket(zmq.XPUB)
    socket.linger = 1000
    socket.setsockopt(zmq.XPUB_NODROP, 1)
    socket.setsockopt(zmq.XPUB_VERBOSE, 1)  # a welcome to each reader, not only to the first
    socket.setsockopt(zmq.SNDHWM, SEND_HIGH_WATER_MARK)
    return socket


class IOPub(IOPubThread):
    """The thread that owns the socket.

    Attributes:
        may_interrupt: Whether the main thread runs user code now. Only then it waits for room: it
            can be interrupted, and the kernel's own last words never stand behind a stalled reader.
        unhurried: Sends like this object, without waiting for room.
    """

    def __init__(self, socket: zmq.Socket[bytes], *, session: Any, journal: Journal | None) -> None:
        super().__init__(socket, pipe=True, session=session)
        self._journal = journal
        self._limit = QUEUE_LIMIT
        self._room = threading.Condition()
        self._waiting = 0
        self.may_interrupt: Callable[[], bool] = bool
        self.unhurried = SimpleNamespace(send_multipart=self._enqueue)

    def schedule(self, f: Callable[[], Any]) -> None:
        """Run a function in this thread, after all that was scheduled before."""
        if not self.thread.is_alive():
            f()
            return
        self._events.append(f)
        if len(self._events) < WAKE_LIMIT:
            self._event_pipe.send(b"")

    def send_multipart(self, *args: Any, **kwargs: Any) -> None:
        """Queue a message, then wait while the queue is too long."""
        self._enqueue(*args, **kwargs)
        self.wait_for_room()

    def wait_for_room(self) -> None:
        """Wait, interruptibly, until the reader has caught up."""
        if len(self._events) <= self._limit or not self._can_wait():
            return
        try:
            with self._room:
                self._waiting += 1
                try:
                    self._room.wait_for(lambda: len(self._events) <= self._limit)
                finally:
                    self._waiting -= 1
        except KeyboardInterrupt:
            # Room for what the interrupted code and its traceback still say.
            self._limit += QUEUE_LIMIT
            raise

    def wait_until_sent(self) -> None:
        """Wait until all that was queued is with ZeroMQ, where a crash of ours cannot lose it."""
        if self._can_wait():
            sent = threading.Event()
            self.schedule(sent.set)
            sent.wait()

    def _can_wait(self) -> bool:
        thread = threading.current_thread()
        if os.getpid() != self._master_pid or not self.thread.is_alive():
            return False
        if thread is threading.main_thread():
            return self.may_interrupt()
        return thread is not self.thread and not isinstance(thread, BaseThread)

    def _enqueue(self, *args: Any, **kwargs: Any) -> None:
        self.schedule(partial(self._really_send, *args, **kwargs))

    def _handle_event(self, msg: Any) -> None:
        """Run all that is queued. No failure of one event may hold up the next."""
        while self._events:
            event = self._events.popleft()
            try:
                event()
            except Exception:
                log.debug("iopub event failed", exc_info=True)
            if self._waiting and len(self._events) <= self._limit:
                with self._room:
                    self._room.notify_all()
        self._limit = QUEUE_LIMIT
        if not self.closed and self.socket.getsockopt(zmq.EVENTS) & zmq.POLLIN:
            # Sending consumed the edge by which the loop learns of a new subscriber.
            self._xpub_stream.flush(zmq.POLLIN)

    def _really_send(self, msg: Sequence[Any], *args: Any, **kwargs: Any) -> None:
        if self._journal is not None and os.getpid() == self._master_pid:
            self._journal.append(IOPUB, msg)
        super()._really_send(msg, *args, **kwargs)
