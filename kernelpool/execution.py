"""Execution: Jupyter messages in, events out. Above: kernel.py. Below: events.py.

Pure: no socket, no await, no clock. Messages come from code we do not trust, so any field may have
any JSON type; what does not fit is passed over, never raised.

Complete means both: idle on iopub and the reply on shell, in either order. See the messaging
specification, "Request-Reply" and "Kernel status".
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, Literal

from kernelpool.events import (
    ClearOutput,
    DisplayData,
    ErrorOutput,
    Event,
    ExecuteResult,
    InputRequest,
    Output,
    Started,
    Stream,
    UpdateDisplay,
)

Message = Mapping[str, Any]
"""A Jupyter message: `header`, `parent_header`, `metadata`, `content`."""

Channel = Literal["shell", "iopub", "stdin", "control"]

ReplyStatus = Literal["ok", "error", "aborted"]

REPLY_STATUSES: Final[tuple[ReplyStatus, ...]] = ("ok", "error", "aborted")


class Execution:
    """The course of one execute request, as its messages tell it.

    Attributes:
        idle: The kernel said on iopub that it is done.
        reply: The status of the reply on shell; None until it came.
        execution_count: IPython's number, once known.
    """

    def __init__(self) -> None:
        self.idle = False
        self.reply: ReplyStatus | None = None
        self.execution_count: int | None = None
        self._started = False
        self._untold_error: ErrorOutput | None = None
        self._error_told = False

    @property
    def complete(self) -> bool:
        """Whether idle and the reply have both been seen."""
        return self.idle and self.reply is not None

    @property
    def half_complete(self) -> bool:
        """Whether just one of idle and the reply has been seen."""
        return self.idle != (self.reply is not None)

    def feed(self, channel: Channel, message: Message) -> list[Event]:
        """The events that a message of this execution brings; mostly none or one."""
        content = message.get("content")
        if not isinstance(content, Mapping):
            return []
        kind = message_type(message)
        events: list[Event] = []
        if channel == "iopub":
            events = self._feed_iopub(kind, content)
        elif channel == "shell" and kind == "execute_reply" and self.reply is None:
            events = self._feed_reply(content)
        elif channel == "stdin" and kind == "input_request":
            prompt = text_of(content.get("prompt"))
            events = [InputRequest(prompt, password=content.get("password") is True)]
        if self.complete and self._untold_error is not None and not self._error_told:
            self._error_told = True
            events.append(self._untold_error)
        return events

    def _feed_iopub(self, kind: str, content: Mapping[str, Any]) -> list[Event]:
        if kind == "status":
            self.idle = self.idle or content.get("execution_state") == "idle"
            return []
        if kind == "execute_input":
            return self._start(content.get("execution_count"))
        event = output_event(kind, content)
        self._error_told = self._error_told or isinstance(event, ErrorOutput)
        return [] if event is None else [event]

    def _feed_reply(self, content: Mapping[str, Any]) -> list[Event]:
        status = content.get("status")
        self.reply = next((known for known in REPLY_STATUSES if known == status), "ok")
        if self.reply == "aborted":
            return []
        if self.reply == "error":
            self._untold_error = _error(content)
        return self._start(content.get("execution_count"))

    def _start(self, count: object) -> list[Event]:
        if self._started:
            return []
        self._started = True
        self.execution_count = _number(count)
        return [Started(self.execution_count)]


def output_event(kind: str, content: object) -> Output | None:
    """The output that an iopub message stands for; None when it is not one."""
    if not isinstance(content, Mapping):
        return None
    match kind:
        case "stream":
            name: Literal["stdout", "stderr"]
            name = "stderr" if content.get("name") == "stderr" else "stdout"
            text = text_of(content.get("text"))
            return Stream(name, text) if text else None
        case "display_data":
            return DisplayData(*_bundle(content), display_id=_display_id(content))
        case "update_display_data":
            display_id = _display_id(content)
            return None if display_id is None else UpdateDisplay(*_bundle(content), display_id)
        case "execute_result":
            count = _number(content.get("execution_count"))
            return ExecuteResult(*_bundle(content), count, display_id=_display_id(content))
        case "error":
            return _error(content)
        case "clear_output":
            return ClearOutput(wait=content.get("wait") is True)
    return None


def message_type(message: Message) -> str:
    """The `msg_type` of a message; an empty string when it has none."""
    header = message.get("header")
    return text_of(header.get("msg_type")) if isinstance(header, Mapping) else ""


def message_id(message: Message) -> str:
    """The `msg_id` of a message; an empty string when it has none."""
    header = message.get("header")
    return text_of(header.get("msg_id")) if isinstance(header, Mapping) else ""


def parent_id(message: Message) -> str:
    """The `msg_id` of the request that a message belongs to; an empty string when it has none."""
    parent = message.get("parent_header")
    return text_of(parent.get("msg_id")) if isinstance(parent, Mapping) else ""


def text_of(value: object) -> str:
    """The value when it is text, else an empty string."""
    return value if isinstance(value, str) else ""


def _number(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _bundle(content: Mapping[str, Any]) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    return _mapping(content.get("data")), _mapping(content.get("metadata"))


def _display_id(content: Mapping[str, Any]) -> str | None:
    return text_of(_mapping(content.get("transient")).get("display_id")) or None


def _error(content: Mapping[str, Any]) -> ErrorOutput:
    lines = content.get("traceback")
    return ErrorOutput(
        ename=text_of(content.get("ename")) or "Error",
        evalue=text_of(content.get("evalue")),
        traceback=tuple(map(text_of, lines)) if isinstance(lines, list) else (),
    )
