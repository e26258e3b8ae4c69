"""Messages in, events out: in any order, and with any content."""

from __future__ import annotations

from typing import Any, Final

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kernelpool.events import (
    ClearOutput,
    DisplayData,
    ErrorOutput,
    Event,
    ExecuteResult,
    InputRequest,
    Started,
    Stream,
    UpdateDisplay,
)
from kernelpool.execution import Channel, Execution, Message, output_event, parent_id

JSON: Final = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=6,
)
KINDS: Final = (
    "status", "execute_input", "stream", "display_data", "update_display_data", "execute_result",
    "error", "clear_output", "execute_reply", "input_request", "comm_open",
)  # fmt: skip
FIELDS: Final = (
    "execution_state", "execution_count", "name", "text", "data", "metadata", "transient",
    "ename", "evalue", "traceback", "wait", "status", "prompt", "password",
)  # fmt: skip
CHANNELS: Final[st.SearchStrategy[Channel]] = st.sampled_from(
    ["shell", "iopub", "stdin", "control"]
)
HOSTILE: Final = st.fixed_dictionaries(
    {},
    optional={
        "header": JSON | st.fixed_dictionaries({"msg_type": st.sampled_from(KINDS)}),
        "parent_header": JSON,
        "content": JSON | st.dictionaries(st.sampled_from(FIELDS), JSON),
    },
)

Part = tuple[Channel, str, dict[str, Any]]

IDLE: Final[Part] = ("iopub", "status", {"execution_state": "idle"})
REPLY: Final[Part] = ("shell", "execute_reply", {"status": "ok", "execution_count": 3})


def message(kind: str, content: object) -> Message:
    return {"header": {"msg_type": kind}, "parent_header": {}, "content": content}


def fed(execution: Execution, *parts: Part) -> list[Event]:
    events: list[Event] = []
    for channel, kind, content in parts:
        events += execution.feed(channel, message(kind, content))
    return events


IOPUB: Final[list[Part]] = [
    ("iopub", "status", {"execution_state": "busy"}),
    ("iopub", "execute_input", {"execution_count": 3}),
    ("iopub", "stream", {"name": "stdout", "text": "a"}),
    ("iopub", "error", {"ename": "E", "evalue": "v", "traceback": ["t"]}),
    IDLE,
]


@pytest.mark.parametrize("place", range(len(IOPUB) + 1))
def test_wherever_the_reply_comes_it_starts_once_raises_once_and_ends_with_the_last(
    place: int,
) -> None:
    reply: Part = ("shell", "execute_reply", {"status": "error", "execution_count": 3})
    execution = Execution()
    events: list[Event] = []
    parts = [*IOPUB[:place], reply, *IOPUB[place:]]
    for part in parts:
        assert not execution.complete
        events += fed(execution, part)
    assert execution.complete
    assert events == [Started(3), Stream("stdout", "a"), ErrorOutput("E", "v", ("t",))]
    assert execution.execution_count == 3


def test_an_error_that_iopub_lost_is_told_from_the_reply() -> None:
    reply = {"status": "error", "ename": "KeyError", "evalue": "'k'", "traceback": ["line"]}
    execution = Execution()
    events = fed(execution, ("shell", "execute_reply", reply), IDLE)
    assert events[1:] == [ErrorOutput("KeyError", "'k'", ("line",))]
    assert execution.reply == "error"


@pytest.mark.parametrize("first", [IDLE, REPLY])
def test_one_of_idle_and_reply_is_half_of_the_end(first: Part) -> None:
    execution = Execution()
    assert not execution.half_complete
    fed(execution, first)
    assert execution.half_complete
    fed(execution, IDLE, REPLY)
    assert execution.complete
    assert not execution.half_complete


def test_an_aborted_execution_never_starts() -> None:
    execution = Execution()
    assert fed(execution, IDLE, ("shell", "execute_reply", {"status": "aborted"})) == []
    assert execution.complete
    assert execution.reply == "aborted"


@pytest.mark.parametrize(
    ("kind", "content", "event"),
    [
        ("stream", {"name": "stderr", "text": "e"}, Stream("stderr", "e")),
        ("stream", {"name": "stdout", "text": ""}, None),
        (
            "display_data",
            {"data": {"text/plain": "d"}, "metadata": {}, "transient": {"display_id": "i"}},
            DisplayData({"text/plain": "d"}, {}, "i"),
        ),
        ("update_display_data", {"data": {}, "metadata": {}}, None),
        (
            "update_display_data",
            {"data": {}, "metadata": {"a": 1}, "transient": {"display_id": "i"}},
            UpdateDisplay({}, {"a": 1}, "i"),
        ),
        (
            "execute_result",
            {"data": {"text/plain": "2"}, "metadata": {}, "execution_count": 7},
            ExecuteResult({"text/plain": "2"}, {}, 7),
        ),
        ("clear_output", {"wait": True}, ClearOutput(wait=True)),
        ("comm_open", {"data": {}}, None),
    ],
)
def test_an_output_is_what_its_message_says(
    kind: str, content: dict[str, Any], event: Event | None
) -> None:
    assert output_event(kind, content) == event


def test_a_request_for_input_names_its_prompt_and_whether_it_hides_what_is_typed() -> None:
    events = fed(Execution(), ("stdin", "input_request", {"prompt": "pin: ", "password": True}))
    assert events == [InputRequest("pin: ", password=True)]


@given(st.lists(st.tuples(CHANNELS, HOSTILE), max_size=20))
def test_no_message_raises_whatever_its_fields_hold(
    messages: list[tuple[Channel, Message]],
) -> None:
    execution = Execution()
    events: list[Event] = []
    for channel, hostile in messages:
        events += execution.feed(channel, hostile)
        assert isinstance(parent_id(hostile), str)
    assert sum(isinstance(event, Started) for event in events) <= 1


@given(st.sampled_from(KINDS), JSON)
def test_no_late_output_raises_whatever_its_content_is(kind: str, content: object) -> None:
    output_event(kind, content)
