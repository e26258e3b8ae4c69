"""sys.stdout and sys.stderr, and the file descriptors beneath them.

Above: user code, C libraries and child processes that print. Below: `iopub.py`. As ipykernel's
streams, but: what was written is published in the order it was written, whichever stream or
descriptor it went to; no message is larger than a chunk; a writer waits for a stalled reader; a
forked child writes to its descriptor, where its parent picks it up.
"""

import array
import codecs
import fcntl
import io
import os
import select
import sys
import termios
import threading
from collections.abc import Iterator
from typing import Any, ClassVar

import ipykernel.iostream

from kernelpool_startup.interrupts import critical
from kernelpool_startup.session import encode_text

CHUNK_CHARACTERS = 128 * 1024
"""Text of one message: small beside a host's message limit, large beside the cost of sending."""

READ_BYTES = 64 * 1024


class OutStream(ipykernel.iostream.OutStream):
    """One of the two output streams."""

    flush_interval = 0.1
    errors = "replace"

    _written_last: ClassVar["OutStream | None"] = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._segments: list[tuple[dict[str, Any], io.StringIO]] = []
        self._buffered = 0
        self._child_line = ""
        self._descriptor_lock = threading.RLock()
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._count = array.array("i", [0])
        self._original_stdstream_fd: int | None = None
        super().__init__(*args, **kwargs)
        os.register_at_fork(after_in_child=self._forked)
        self._is_child = False

    def write(self, string: str) -> int:
        """Take text; it is published soon, or at once when there is much."""
        if not isinstance(string, str):
            msg = f"write() argument must be str, not {type(string).__name__}"
            raise TypeError(msg)
        if self._is_child:
            return self._write_in_child(string)
        if OutStream._written_last is not self:
            previous, OutStream._written_last = OutStream._written_last, self
            if previous is not None:
                previous.hand_over()
        self._read_descriptor()
        self._take(string)
        if self._buffered >= CHUNK_CHARACTERS:
            self.hand_over()
            self.pub_thread.wait_for_room()
        else:
            self._schedule_flush()
        return len(string)

    def flush(self) -> None:
        """Publish what was written, and wait until it is out of this process's hands."""
        if self._is_child:
            self._flush_in_child()
            return
        self._read_descriptor()
        if self.hand_over():
            self.pub_thread.wait_until_sent()

    def close(self) -> None:
        """Flush only: there is no other place for later output to go."""
        if self.pub_thread is not None:
            self.flush()

    def fileno(self) -> int:
        """Return the descriptor whose content is published, for child processes to write to."""
        if self._original_stdstream_fd is None:
            raise io.UnsupportedOperation("fileno")
        return self._original_stdstream_fd

    @property
    def buffer(self) -> "ByteStream":
        """The same stream for bytes, as `sys.stdout.buffer` is in a script."""
        return ByteStream(self)

    def reconfigure(self, **kwargs: Any) -> None:
        """Accept what a script asks of its streams; text is always published as Unicode."""

    def hand_over(self) -> bool:
        """Queue what was written, without waiting. Return whether there was anything."""
        with critical, self._buffer_lock:
            if not self._segments:
                return False
            while self._segments:
                # Removed only once queued: an error between must not lose it.
                parent, segment = self._segments[0]
                for chunk in _chunks(segment.getvalue()):
                    self.session.send(
                        self.pub_thread.unhurried,
                        "stream",
                        {"name": self.name, "text": chunk},
                        parent=parent,
                        ident=self.topic,
                    )
                del self._segments[0]
            self._buffered = 0
            return True

    def _schedule_flush(self) -> None:
        if not self._flush_pending:
            self.pub_thread.schedule(self._flush_later)
            self._flush_pending = True

    def _flush_later(self) -> None:
        self._io_loop.call_later(self.flush_interval, self._flush)

    def _flush(self) -> None:
        """Called by the iopub thread when the interval is over."""
        self._flush_pending = False
        self.hand_over()

    def _take(self, text: str) -> None:
        parent = self.parent_header
        with self._buffer_lock:
            if not self._segments or self._segments[-1][0] is not parent:
                self._segments.append((parent, io.StringIO()))
            self._segments[-1][1].write(text)
            self._buffered += len(text)

    def _setup_stream_redirects(self, name: str) -> None:
        reader, writer = os.pipe()
        self._original_stdstream_fd = getattr(sys, name).fileno()
        self._original_stdstream_copy = os.dup(self._original_stdstream_fd)
        os.dup2(writer, self._original_stdstream_fd)
        self._fid = reader  # the writer stays open too, else closing descriptor 1 would end it all
        self.watch_fd_thread = threading.Thread(
            target=self._watch_pipe_fd, name=f"{name} descriptor", daemon=True
        )
        self.watch_fd_thread.start()

    def _watch_pipe_fd(self) -> None:
        poll = select.poll()
        poll.register(self._fid, select.POLLIN)
        while self._fid is not None and poll.poll()[0][1] & select.POLLIN:
            if self._read_descriptor():
                self.pub_thread.wait_for_room()
            self._schedule_flush()

    def _read_descriptor(self) -> bool:
        """Take over what went to the descriptor by now. Return whether a message was queued."""
        if self._fid is None or not self._waiting_bytes(self._fid):
            return False
        with critical, self._descriptor_lock:
            if self._waiting_bytes(self._fid):
                self._take(self._decoder.decode(os.read(self._fid, READ_BYTES)))
        return self._buffered >= CHUNK_CHARACTERS and self.hand_over()

    def _waiting_bytes(self, descriptor: int) -> int:
        try:
            fcntl.ioctl(descriptor, termios.FIONREAD, self._count)
        except OSError:
            self._fid = None  # user code closed it
            return 0
        return self._count[0]

    def _forked(self) -> None:
        self._is_child = True
        self._child_line = ""

    def _write_in_child(self, string: str) -> int:
        self._child_line += string
        if "\n" in string or len(self._child_line) >= CHUNK_CHARACTERS:
            self._flush_in_child()
        return len(string)

    def _flush_in_child(self) -> None:
        data, self._child_line = encode_text(self._child_line), ""
        while data and self._original_stdstream_fd is not None:
            data = data[os.write(self._original_stdstream_fd, data) :]


class ByteStream(io.BufferedIOBase):
    """Bytes written to an output stream, decoded as UTF-8."""

    def __init__(self, stream: OutStream) -> None:
        self._stream = stream

    def write(self, data: Any) -> int:
        """Write bytes; what is not UTF-8 is replaced."""
        view = bytes(data)
        self._stream.write(view.decode("utf-8", "replace"))
        return len(view)

    def flush(self) -> None:
        """Flush the text stream."""
        self._stream.flush()

    def writable(self) -> bool:
        """Say yes."""
        return True

    def fileno(self) -> int:
        """Return the descriptor of the text stream."""
        return self._stream.fileno()


def _chunks(text: str) -> Iterator[str]:
    for start in range(0, len(text), CHUNK_CHARACTERS):
        yield text[start : start + CHUNK_CHARACTERS]
