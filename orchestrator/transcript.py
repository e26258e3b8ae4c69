"""Transcript: what one execution yields, folded into its record and its stream of events.

Above: live_session.py. Below: kernelpool's events and terminal text.

Pure: every instant is passed in. There is one record, made here, and it is what the synchronous
answer, the last event, polling and the store all show. Text in it carries no escape codes and no
lone surrogates, values no NaN: it can always be encoded as JSON in UTF-8. Its size is bounded,
whatever arrives; what is left out is said once, in its place, and by `truncated`.

Output events: the pieces of a stream are to be appended to the output of their `output_index`;
any other output is complete. `execution.output.updated` replaces the output of that index, or, with
index and output null, takes back all outputs so far (numbering starts at 0 again, `stdout` and
`stderr` are empty again, as in a notebook).
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, assert_never

from kernelpool.events import (
    ClearOutput,
    DisplayData,
    Done,
    ErrorOutput,
    Event,
    ExecuteResult,
    Failure,
    InputRequest,
    Notice,
    Started,
    Stream,
    UpdateDisplay,
    Usage,
)
from kernelpool.terminal import LiveText, TerminalText, clean_text, redraws, strip_ansi
from orchestrator.executions import EventType, Execution, ExecutionEvent, ExecutionStatus

NOTICE_TYPE: Final = "application/vnd.kernelpool.notice+json"
"""MIME type of a notice's `code`, `message` and numbers; it is shown as a display."""

Output = Mapping[str, Any]

_STATUS: Final[Mapping[str, ExecutionStatus]] = {
    "ok": ExecutionStatus.COMPLETED,
    "error": ExecutionStatus.COMPLETED,
    "aborted": ExecutionStatus.COMPLETED,
    "timed_out": ExecutionStatus.TIMED_OUT,
    "cancelled": ExecutionStatus.CANCELLED,
    "failed": ExecutionStatus.FAILED,
}


@dataclass(frozen=True, slots=True)
class OutputLimits:
    """How much of what an execution yields is kept and sent."""

    head_bytes: int = 5_000_000
    """Kept from the beginning of stdout, of stderr and of the result, each."""
    tail_bytes: int = 5_000_000
    """Kept from the end of each."""
    live_characters: int = 10_000_000
    """Sent in events per stream and execution; then one notice, and the record has the rest."""
    piece_characters: int = 12_000
    """Longest text in one event."""
    piece_bytes: int = 15_000
    """The same as JSON. Source: nothing over 16 kB goes into the event log."""
    outputs: int = 1_000
    """Entries in `outputs`. Errors and notices may go `SPARE_OUTPUTS` above it."""
    outputs_bytes: int = 32_000_000
    """JSON of all outputs but for the streams that `stdout` and `stderr` repeat."""
    redraw_seconds: float = 0.1
    """Redraws that follow each other faster are sent as one. Source: tqdm's own interval."""


SPARE_OUTPUTS: Final = 50
"""Errors and notices kept beyond the number of outputs."""
DISPLAYS_PER_ID: Final = 10
"""Newest displays of one id that an update reaches: one message makes so many events at most."""
ERROR_TEXT_BYTES: Final = 1_000_000
"""Bytes kept of an error's value and of its traceback, each."""
PROMPT_BYTES: Final = 10_000
"""Bytes kept of the prompt of an input request."""


class Transcript:
    """The record of one execution as it grows."""

    def __init__(self, execution: Execution, limits: OutputLimits | None = None) -> None:
        """Begin with the execution as it was queued."""
        self._limits = limits or OutputLimits()
        code = clean_text(execution.code)
        self._queued = execution if code is execution.code else replace(execution, code=code)
        self.created = ExecutionEvent(0, EventType.CREATED, {"execution": self._queued.to_wire()})
        """The event number 0."""
        self._next_number = 1
        self._status = execution.status
        self._started_at = execution.started_at
        self._execution_count = execution.execution_count
        self._result: str | None = None
        self._error: Mapping[str, Any] | None = None
        self._outputs: list[Output] = []
        self._outputs_bytes = 0
        self._displays: dict[str, list[int]] = {}
        self._streams: dict[str, _StreamRecord] = {}
        self._open: _StreamRecord | None = None
        """The stream whose entry is the last output; its next text belongs there."""
        self._clear_on_next = False
        self._cut = False
        """Something else than the middle of stdout or stderr is left out."""
        self._cut_noticed = False
        self._completed: ExecutionEvent | None = None
        self._final: Execution | None = None

    @property
    def execution(self) -> Execution:
        """The record now. Costs time in proportion to its length unless nothing changed."""
        return self._final or self._record(self._status)

    @property
    def flush_at(self) -> float | None:
        """When `flush` should be called to show a redraw that waits for a later one, or None."""
        stream = self._open
        if stream is None or not stream.held:
            return None
        return stream.redrawn_at + self._limits.redraw_seconds

    def flush(self, *, at: float) -> list[ExecutionEvent]:
        """Send the text that was held back because redraws follow each other fast.

        Nothing is sent after the last event: a timer for it may go off late.
        """
        stream = self._open
        if stream is None or not stream.held:
            return []
        held, stream.held = stream.held, ""
        stream.redrawn_at = at
        return self._send_text(stream, held)

    def continue_from(self, number: int) -> None:
        """Give the next event this number, because a log of an earlier worker ends before it."""
        self._next_number = number

    def answered(self) -> None:
        """The line of input that was waited for has been given."""
        if self._status is ExecutionStatus.INPUT_REQUIRED:
            self._status = ExecutionStatus.IN_PROGRESS

    def feed(self, event: Event, *, at: float) -> list[ExecutionEvent]:
        """Take the next event of the kernel; `Done` only flushes, see `finish`.

        Args:
            event: what the kernel yielded.
            at: the instant, in Unix seconds.
        """
        if self._final is not None:
            return []
        if isinstance(event, Stream):
            return self._feed_stream(event, at)
        match event:
            case DisplayData() | ExecuteResult() | ErrorOutput():
                return [*self._before_output(at), *self._feed_output(event)]
            case UpdateDisplay():
                return [*self.flush(at=at), *self._feed_update(event)]
            case ClearOutput(wait):
                self._clear_on_next = True
                return [] if wait else self._before_output(at)
            case Started(execution_count):
                return self._feed_started(execution_count, at)
            case InputRequest(prompt, password):
                self._status = ExecutionStatus.INPUT_REQUIRED
                data = {"prompt": _plain(prompt, PROMPT_BYTES), "password": password}
                return [*self.flush(at=at), self._event(EventType.INPUT_REQUIRED, data)]
            case Notice(code, message, details):
                return [*self.flush(at=at), *self._notice(code, message, details)]
            case Done():
                return self.flush(at=at)
            case _:
                assert_never(event)

    def finish(
        self,
        done: Done,
        *,
        at: float,
        files: Sequence[Mapping[str, Any]] = (),
        state_reset: bool = False,
    ) -> ExecutionEvent:
        """Complete the record; its event is the last.

        Args:
            done: how the kernel ended the execution.
            at: the instant, in Unix seconds.
            files: container file objects plus `change`.
            state_reset: the kernel was new.
        """
        if self._completed is None:
            if done.execution_count is not None:
                self._execution_count = done.execution_count
            self._final = self._record(_STATUS[done.status], done, at, files, state_reset)
            self._open = None
            data = {"execution": self._final.to_wire()}
            self._completed = self._event(EventType.COMPLETED, data)
        return self._completed

    def _event(self, kind: EventType, data: Mapping[str, Any]) -> ExecutionEvent:
        number = self._next_number
        self._next_number = number + 1
        return ExecutionEvent(number, kind, data)

    def _output_event(
        self, index: int, output: Output, kind: EventType = EventType.OUTPUT
    ) -> ExecutionEvent:
        return self._event(kind, {"output_index": index, "output": output})

    def _record(
        self,
        status: ExecutionStatus,
        done: Done | None = None,
        completed_at: float | None = None,
        files: Sequence[Mapping[str, Any]] = (),
        state_reset: bool = False,
    ) -> Execution:
        queued = self._queued
        outputs = self._outputs.copy()
        truncated = self._cut
        for stream in self._streams.values():
            truncated = truncated or stream.whole.truncated
            if stream.first is not None:
                outputs[stream.first] = _stream_output(stream.name, stream.whole.text())
            elif stream.part is not None and stream.index is not None:
                truncated = truncated or stream.part.truncated
                outputs[stream.index] = _stream_output(stream.name, stream.part.text())
        stdout, stderr = self._streams.get("stdout"), self._streams.get("stderr")
        return Execution(
            id=queued.id,
            session_id=queued.session_id,
            code=queued.code,
            status=status,
            created_at=queued.created_at,
            started_at=self._started_at,
            completed_at=completed_at,
            execution_count=self._execution_count,
            stdout=stdout.whole.text() if stdout is not None else "",
            stderr=stderr.whole.text() if stderr is not None else "",
            result=self._result,
            error=self._error,
            failure=_failure(done.failure) if done and done.failure else None,
            outputs=tuple(outputs),
            files=tuple(files if not files or _json_size(files) is not None else _json_safe(files)),
            state_reset=state_reset,
            truncated=truncated,
            usage=_usage(done.usage) if done else {},
        )

    def _feed_started(self, execution_count: int | None, at: float) -> list[ExecutionEvent]:
        if execution_count is not None:
            self._execution_count = execution_count
        if self._started_at is not None:
            return []
        self._started_at = at
        self._status = ExecutionStatus.IN_PROGRESS
        data = {"started_at": at, "execution_count": self._execution_count}
        return [self._event(EventType.STARTED, data)]

    def _before_output(self, at: float) -> list[ExecutionEvent]:
        """Send what waits, and clear if that was asked for."""
        if not self._clear_on_next:
            return self.flush(at=at)
        self._clear_on_next = False
        if not self._outputs and not any(stream.begun for stream in self._streams.values()):
            return []
        self._outputs = []
        self._outputs_bytes = 0
        self._displays.clear()
        self._open = None
        self._cut = self._cut_noticed = False
        for name, stream in self._streams.items():
            self._streams[name] = self._new_stream(name, stream.live_room)
        return [self._event(EventType.OUTPUT_UPDATED, {"output_index": None, "output": None})]

    def _new_stream(self, name: str, live_room: int) -> _StreamRecord:
        limits = self._limits
        return _StreamRecord(name, TerminalText(limits.head_bytes, limits.tail_bytes), live_room)

    def _feed_stream(self, event: Stream, at: float) -> list[ExecutionEvent]:
        text = event.text
        if not text:
            return []
        events = self._before_output(at) if self._clear_on_next else []
        stream = self._open
        if stream is None or stream.name != event.name:
            events += self.flush(at=at)
            stream, notices = self._open_stream(event.name)
            events += notices
        stream.whole.feed(text)
        if stream.part is not None:
            stream.part.feed(text)
        if stream.index is None or stream.live_room < 0:
            return events
        if stream.held or redraws(text):
            stream.held += text
            soon = at < stream.redrawn_at + self._limits.redraw_seconds
            return events if soon and len(stream.held) < _HELD else events + self.flush(at=at)
        sent = self._send_text(stream, text)
        return events + sent if events else sent

    def _open_stream(self, name: str) -> tuple[_StreamRecord, list[ExecutionEvent]]:
        """Make the last output an entry of that stream."""
        self._close_stream()
        stream = self._streams.get(name)
        if stream is None:
            stream = self._new_stream(name, self._limits.live_characters)
            self._streams[name] = stream
        self._open = stream
        first = not stream.begun
        stream.begun = True
        if stream.first is not None:
            self._outputs[stream.first] = _stream_output(name, stream.whole.text())
            stream.first = None
        room = self._limits.outputs_bytes - self._outputs_bytes
        if len(self._outputs) >= self._limits.outputs or (not first and room <= 0):
            stream.index = None
            return stream, self._say_cut()
        stream.index = len(self._outputs)
        self._outputs.append(_stream_output(name, ""))
        if first:
            stream.first = stream.index
        else:
            head = min(self._limits.head_bytes, room // 2)
            stream.part = TerminalText(head, min(self._limits.tail_bytes, room - head))
            stream.part.feed(stream.whole.unfinished)
            stream.live = LiveText(stream.whole.unfinished)
        return stream, []

    def _close_stream(self) -> None:
        """The last output will not grow any more: something else comes."""
        stream = self._open
        self._open = None
        if stream is None or stream.part is None or stream.index is None:
            return
        output = _stream_output(stream.name, stream.part.text())
        self._outputs[stream.index] = output
        self._outputs_bytes += _json_size(output) or 0
        self._cut = self._cut or stream.part.truncated
        stream.part = None

    def _send_text(self, stream: _StreamRecord, text: str) -> list[ExecutionEvent]:
        index = stream.index
        text = stream.live.feed(text)
        if index is None or not text:
            return []
        stream.live_room -= len(text)
        if stream.live_room < 0:
            text = text[: len(text) + stream.live_room] + (
                f"\n... over {self._limits.live_characters:,} characters: "
                "what follows is in the finished record ...\n"
            )
        limits = self._limits
        small = len(text) <= _SMALL
        pieces = (text,) if small else _pieces(text, limits.piece_characters, limits.piece_bytes)
        return [self._output_event(index, _stream_output(stream.name, piece)) for piece in pieces]

    def _feed_output(
        self, event: DisplayData | ExecuteResult | ErrorOutput
    ) -> list[ExecutionEvent]:
        display_id: str | None = None
        output: Output
        match event:
            case DisplayData(data, metadata, display_id):
                output = {
                    "type": "display",
                    "data": _bundle(data),
                    "metadata": metadata,
                    "display_id": display_id,
                }
            case ExecuteResult(data, metadata, execution_count, display_id):
                if execution_count is not None:
                    self._execution_count = execution_count
                output = {
                    "type": "result",
                    "data": _bundle(data),
                    "metadata": metadata,
                    "execution_count": execution_count,
                }
                self._result = self._result_text(output["data"])
            case ErrorOutput(name, value, traceback):
                error = {
                    "name": _plain(name, ERROR_TEXT_BYTES),
                    "value": _plain(value, ERROR_TEXT_BYTES),
                    "traceback": _plain("\n".join(traceback), ERROR_TEXT_BYTES),
                }
                self._error = error
                output = {"type": "error", **error}
        spare = SPARE_OUTPUTS if isinstance(event, ErrorOutput) else 0
        index, events = self._append(output, spare)
        if index is not None and display_id is not None:
            indexes = self._displays.setdefault(display_id, [])
            indexes.append(index)
            del indexes[:-DISPLAYS_PER_ID]
        return events

    def _feed_update(self, event: UpdateDisplay) -> list[ExecutionEvent]:
        data, metadata, display_id = _bundle(event.data), event.metadata, event.display_id
        indexes = self._displays.get(display_id)
        if indexes is None:
            output: Output = {
                "type": "display",
                "data": data,
                "metadata": metadata,
                "display_id": display_id,
                "update": True,
            }
            index, events = self._append(output, 0, EventType.OUTPUT_UPDATED)
            if index is not None:
                self._displays[display_id] = [index]
            return events
        size = _json_size([data, metadata])
        if size is None:
            data, metadata = _json_safe(data), _json_safe(metadata)
            size = _json_size([data, metadata]) or 0
        replaced = [self._outputs[index] for index in indexes]
        growth = size * len(indexes) - sum(
            _json_size([output["data"], output["metadata"]]) or 0 for output in replaced
        )
        if growth > 0 and self._outputs_bytes + growth > self._limits.outputs_bytes:
            return self._say_cut()
        self._outputs_bytes += growth
        events = []
        for index, output in zip(indexes, replaced, strict=True):
            updated = {**output, "data": data, "metadata": metadata}
            self._outputs[index] = updated
            if updated["type"] == "result":
                self._result = self._result_text(data)
            events.append(self._output_event(index, updated, EventType.OUTPUT_UPDATED))
        return events

    def _append(
        self, output: Output, spare: int, kind: EventType = EventType.OUTPUT
    ) -> tuple[int | None, list[ExecutionEvent]]:
        """Add an output that is complete, if there is room; `spare` widens the room."""
        self._close_stream()
        size = _json_size(output)
        if size is None:
            output = _json_safe(output)
            size = _json_size(output) or 0
        index = len(self._outputs)
        fits = spare > 0 or self._outputs_bytes + size <= self._limits.outputs_bytes
        if index >= self._limits.outputs + spare or not fits:
            return None, self._say_cut()
        self._outputs.append(output)
        self._outputs_bytes += size
        return index, [self._output_event(index, output, kind)]

    def _notice(self, code: str, message: str, details: Mapping[str, Any]) -> list[ExecutionEvent]:
        message = _plain(message, PROMPT_BYTES)
        output = {
            "type": "display",
            "data": {
                "text/plain": message,
                NOTICE_TYPE: {**details, "code": code, "message": message},
            },
            "metadata": {},
            "display_id": None,
        }
        return self._append(output, SPARE_OUTPUTS)[1]

    def _say_cut(self) -> list[ExecutionEvent]:
        """Note that an output is left out; say so once."""
        self._cut = True
        if self._cut_noticed:
            return []
        self._cut_noticed = True
        limits = self._limits
        return self._notice(
            "outputs_truncated",
            f"Some outputs are left out: an execution keeps {limits.outputs:,} outputs "
            f"and {limits.outputs_bytes:,} bytes of them.",
            {"limit_outputs": limits.outputs, "limit_bytes": limits.outputs_bytes},
        )

    def _result_text(self, data: Mapping[str, Any]) -> str | None:
        text = data.get("text/plain")
        if text is None:
            return None
        limits = self._limits
        return _plain(text, limits.head_bytes + limits.tail_bytes)


class _StreamRecord:
    """stdout or stderr of one execution: the whole of it and its newest entry in `outputs`."""

    __slots__ = (
        "begun",
        "first",
        "held",
        "index",
        "live",
        "live_room",
        "name",
        "part",
        "redrawn_at",
        "whole",
    )

    def __init__(self, name: str, whole: TerminalText, live_room: int) -> None:
        self.name = name
        self.whole = whole
        """All its text since the last clear."""
        self.begun = False
        """Whether it had an entry."""
        self.index: int | None = None
        """Position of its newest entry; None when that one is left out."""
        self.first: int | None = None
        """Position of its only entry, which is therefore the same as `whole`."""
        self.part: TerminalText | None = None
        """Text of its newest entry while that is the last output and not the only one."""
        self.live = LiveText()
        self.live_room = live_room
        """Characters that may still be sent; negative once it has been said that no more are."""
        self.held = ""
        """Redraws that wait for a later one."""
        self.redrawn_at = -math.inf


_HELD: Final = 65_536
"""Characters of redraws that are not held back any longer."""

_SMALL: Final = 2_000
"""Characters that are a small event whatever they are: six bytes each at the most as JSON."""


def _stream_output(name: str, text: str) -> Output:
    return {"type": "stream", "name": name, "text": text}


def _pieces(text: str, characters: int, size: int) -> Iterator[str]:
    """The text in pieces of so many characters, and of so many bytes as JSON, at most."""
    for start in range(0, len(text), characters):
        piece = text[start : start + characters]
        if len(piece) > 1 and (_json_size(piece) or 0) > size:
            yield from _pieces(piece, (len(piece) + 1) // 2, size)
        else:
            yield piece


def _plain(text: object, size: int) -> str:
    """The text without escape codes; of a text over `size` bytes its two ends."""
    shown = text if isinstance(text, str) else str(text)
    if 4 * len(shown) <= size:
        return strip_ansi(shown)
    terminal = TerminalText(size // 2, size - size // 2)
    terminal.feed(shown)
    return terminal.text()


def _bundle(data: Mapping[str, Any]) -> Mapping[str, Any]:
    """The MIME bundle with its plain text free of escape codes."""
    text = data.get("text/plain")
    if not isinstance(text, str):
        return data
    plain = strip_ansi(text)
    return data if plain == text else {**data, "text/plain": plain}


def _usage(usage: Usage) -> Mapping[str, Any]:
    return {
        "wall_seconds": usage.wall_seconds,
        "cpu_seconds": usage.cpu_seconds,
        "memory_peak_bytes": usage.memory_peak_bytes,
    }


def _failure(failure: Failure) -> Mapping[str, Any]:
    shown: Mapping[str, Any] = _json_safe(
        {**failure.details, "code": failure.code.value, "message": strip_ansi(failure.message)}
    )
    return shown


_JSON: Final = json.JSONEncoder(ensure_ascii=False, allow_nan=False)


def _json_size(value: object) -> int | None:
    """Bytes of the value as JSON in UTF-8; None when it cannot be written so."""
    try:
        return len(_JSON.encode(value).encode())
    except (ValueError, TypeError, RecursionError):
        return None


_DEPTH: Final = 100
"""Levels of nesting kept of a value that cannot be written as it is."""


def _json_safe(value: Any, depth: int = _DEPTH) -> Any:
    """The value, or the nearest to it that can be written as JSON in UTF-8."""
    match value:
        case None | bool() | int():
            return value
        case str():
            return clean_text(value)
        case float():
            return value if math.isfinite(value) else None
        case Mapping() if depth:
            return {
                clean_text(str(key)): _json_safe(item, depth - 1) for key, item in value.items()
            }
        case Sequence() if depth and not isinstance(value, bytes | bytearray):
            return [_json_safe(item, depth - 1) for item in value]
        case _:
            return clean_text(str(type(value).__name__))
