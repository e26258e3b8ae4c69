"""How events become one record and one stream of events."""

from __future__ import annotations

import json
import re
import time
import tracemalloc
from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kernelpool.events import (
    ClearOutput,
    DisplayData,
    Done,
    ErrorOutput,
    Event,
    ExecuteResult,
    Failure,
    FailureCode,
    InputRequest,
    KernelEnd,
    Notice,
    Started,
    Stream,
    UpdateDisplay,
    Usage,
)
from kernelpool.terminal import TerminalText, strip_ansi
from orchestrator.executions import EventType, Execution, ExecutionEvent, ExecutionStatus
from orchestrator.transcript import NOTICE_TYPE, SPARE_OUTPUTS, OutputLimits, Transcript

QUEUED = Execution(
    id="exec_1",
    session_id="cntr_1",
    code="print(1)",
    status=ExecutionStatus.QUEUED,
    created_at=100.0,
)
OK = Done("ok", Usage(0.5, 0.25, 1_000_000), execution_count=3)


def out(text: str) -> Stream:
    return Stream("stdout", text)


def err(text: str) -> Stream:
    return Stream("stderr", text)


def display(text: str, display_id: str | None = None) -> DisplayData:
    return DisplayData({"text/plain": text}, {}, display_id)


def update(text: str, display_id: str) -> UpdateDisplay:
    return UpdateDisplay({"text/plain": text}, {}, display_id)


class Run:
    """A transcript fed with events a second apart, and everything it said."""

    def __init__(
        self,
        *events: Event,
        limits: OutputLimits | None = None,
        done: Done = OK,
        interval: float = 1.0,
    ) -> None:
        self.transcript = Transcript(QUEUED, limits)
        self.events = [self.transcript.created]
        at = 101.0
        for event in events:
            self.events += self.transcript.feed(event, at=at)
            at += interval
        self.before_end = self.transcript.execution
        self.events += self.transcript.feed(done, at=at)
        self.events.append(self.transcript.finish(done, at=at))

    @property
    def record(self) -> Execution:
        return self.transcript.execution

    def of(self, kind: EventType) -> list[dict[str, Any]]:
        return [dict(event.data) for event in self.events if event.type is kind]

    def live(self, index: int = 0) -> str:
        return "".join(
            data["output"]["text"]
            for data in self.of(EventType.OUTPUT)
            if data["output_index"] == index
        )


def shown(outputs: Iterable[Any]) -> list[str]:
    """Outputs in short."""
    texts = []
    for output in outputs:
        match output:
            case {"type": "stream", "name": name, "text": text}:
                texts.append(f"{name}: {text}")
            case {"type": "error", "name": name, "value": value}:
                texts.append(f"error: {name}: {value}")
            case {"type": kind, "data": data}:
                texts.append(f"{kind}: {data.get('text/plain')}")
    return texts


def replay(events: Iterable[ExecutionEvent]) -> list[Any]:
    """The outputs as a client puts them together from the events."""
    outputs: list[Any] = []
    for event in events:
        if event.type not in {EventType.OUTPUT, EventType.OUTPUT_UPDATED}:
            continue
        index, output = event.data["output_index"], event.data["output"]
        if output is None:
            outputs.clear()
        elif index < len(outputs) and output["type"] == "stream":
            text = outputs[index]["text"] + output["text"]
            outputs[index] = {**output, "text": text}
        elif index < len(outputs):
            outputs[index] = output
        else:
            outputs += [None] * (index - len(outputs)) + [output]
    return outputs


def test_an_expression_has_its_result_in_record_and_events() -> None:
    run = Run(Started(3), ExecuteResult({"text/plain": "2"}, {}, 3))
    assert [event.type for event in run.events] == [
        EventType.CREATED,
        EventType.STARTED,
        EventType.OUTPUT,
        EventType.COMPLETED,
    ]
    assert run.record == Execution(
        id="exec_1",
        session_id="cntr_1",
        code="print(1)",
        status=ExecutionStatus.COMPLETED,
        created_at=100.0,
        started_at=101.0,
        completed_at=103.0,
        execution_count=3,
        result="2",
        outputs=(
            {"type": "result", "data": {"text/plain": "2"}, "metadata": {}, "execution_count": 3},
        ),
        usage={"wall_seconds": 0.5, "cpu_seconds": 0.25, "memory_peak_bytes": 1_000_000},
    )
    assert run.events[0].to_wire()["execution"]["status"] == "queued"
    assert run.events[1].to_wire() == {
        "type": "execution.started",
        "sequence_number": 1,
        "started_at": 101.0,
        "execution_count": 3,
    }
    assert run.events[2].data == {"output_index": 0, "output": run.record.outputs[0]}
    assert run.events[3].data == {"execution": run.record.to_wire()}


def test_pieces_of_one_stream_are_one_output_until_another_comes() -> None:
    run = Run(out("a"), out("b\n"), err("e"), out("c\n"), display("d"), out("f"), out("g"))
    assert shown(run.record.outputs) == [
        "stdout: ab\n",
        "stderr: e",
        "stdout: c\n",
        "display: d",
        "stdout: fg",
    ]
    assert run.record.stdout == "ab\nc\nfg"
    assert run.record.stderr == "e"
    assert [data["output_index"] for data in run.of(EventType.OUTPUT)] == [0, 0, 1, 2, 3, 4, 4]
    assert replay(run.events) == list(run.record.outputs)


def test_a_sequence_cut_by_the_other_stream_leaves_nothing() -> None:
    run = Run(out("a\x1b["), err("\x1b]0;ti"), out("31mb"), err("tle\x07c"), out("\x1b"))
    assert shown(run.record.outputs) == [
        "stdout: a",
        "stderr: ",
        "stdout: b",
        "stderr: c",
        "stdout: ",
    ]
    assert [text for text in shown(replay(run.events)) if text[-1] != " "] == [
        "stdout: a",
        "stdout: b",
        "stderr: c",
    ]


def test_the_record_before_the_end_shows_what_came_so_far() -> None:
    run = Run(Started(1), out("a"), display("d"), out("b"))
    assert run.before_end.status is ExecutionStatus.IN_PROGRESS
    assert run.before_end.outputs == run.record.outputs
    assert run.before_end.stdout == "ab"
    assert run.before_end.completed_at is None


def test_no_text_has_escape_codes() -> None:
    run = Run(
        out("\x1b[31mred\x1b["),
        out("0m\n"),
        display("\x1b[1mbold\x1b[0m"),
        ExecuteResult({"text/plain": "\x1b[1mr\x1b[0m"}, {}, 1),
        ErrorOutput("E\x1b[0m", "\x1b[31mv", ("\x1b[0;31m----\x1b[0m", "line")),
        Notice("n", "\x1b[31mn"),
        done=Done("error", OK.usage, failure=Failure(FailureCode.TIMEOUT, "\x1b[1mslow")),
    )
    assert "\\u001b" not in json.dumps([event.to_wire() for event in run.events])
    assert run.record.stdout == run.live() == "red\n"
    assert run.record.result == "r"
    assert run.record.error == {"name": "E", "value": "v", "traceback": "----\nline"}


def test_redraws_fold_in_the_record_and_are_few_in_the_events() -> None:
    run = Run(*(err(f"\r{i}") for i in range(5000)), interval=0.001)
    assert run.record.stderr == "4999"
    assert shown(run.record.outputs) == ["stderr: 4999"]
    assert len(run.events) < 70
    assert strip_ansi(run.live()) == "4999"


def test_a_held_redraw_is_sent_when_its_time_has_come() -> None:
    transcript = Transcript(QUEUED)
    assert len(transcript.feed(err("\r1%"), at=10.0)) == 1
    assert transcript.flush_at is None
    assert transcript.feed(err("\r2%"), at=10.01) == []
    assert transcript.feed(err("\r3%"), at=10.02) == []
    assert transcript.flush_at == pytest.approx(10.1)
    (event,) = transcript.flush(at=10.1)
    assert event.data["output"]["text"] == "\r3%"
    assert transcript.flush_at is None
    assert transcript.flush(at=10.2) == []


def test_a_held_redraw_comes_before_whatever_follows() -> None:
    run = Run(err("\r1"), err("\r2"), out("x"), err("\r3"), err("\r4"), display("d"), interval=0.01)
    assert [data["output"].get("text") for data in run.of(EventType.OUTPUT)] == [
        "1",
        "\r2",
        "x",
        "4",
        None,
    ]


def test_an_updated_display_is_replaced_in_its_place() -> None:
    run = Run(display("1", "a"), display("2", "a"), out("x"), update("3", "a"))
    assert shown(run.record.outputs) == ["display: 3", "display: 3", "stdout: x"]
    updated = run.of(EventType.OUTPUT_UPDATED)
    assert [data["output_index"] for data in updated] == [0, 1]
    assert [data["output"] for data in updated] == list(run.record.outputs[:2])
    assert updated[0]["output"]["display_id"] == "a"


def test_an_update_of_an_earlier_executions_display_is_kept_as_an_update() -> None:
    run = Run(update("1", "old"), out("x"), update("2", "old"))
    assert run.record.outputs[0] == {
        "type": "display",
        "data": {"text/plain": "2"},
        "metadata": {},
        "display_id": "old",
        "update": True,
    }
    assert [data["output_index"] for data in run.of(EventType.OUTPUT_UPDATED)] == [0, 0]
    assert replay(run.events) == list(run.record.outputs)


def test_an_updated_result_is_the_result() -> None:
    run = Run(ExecuteResult({"text/plain": "1"}, {}, 1, "a"), update("2", "a"))
    assert run.record.result == "2"
    assert shown(run.record.outputs) == ["result: 2"]


def test_many_updates_take_no_memory() -> None:
    transcript = Transcript(QUEUED)
    transcript.feed(display("x", "a"), at=0)
    tracemalloc.start()
    for i in range(3000):
        transcript.feed(update(f"{i}" + "x" * 5000, "a"), at=0)
        transcript.feed(ClearOutput(wait=True), at=0)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1_000_000


def test_clear_takes_back_all_outputs() -> None:
    run = Run(out("a"), display("b", "i"), ClearOutput(wait=False), out("c"))
    assert shown(run.record.outputs) == ["stdout: c"]
    assert run.record.stdout == "c"
    assert run.of(EventType.OUTPUT_UPDATED) == [{"output_index": None, "output": None}]
    assert replay(run.events) == list(run.record.outputs)


def test_clear_with_wait_happens_when_the_next_output_comes() -> None:
    waiting = Run(out("a"), ClearOutput(wait=True))
    assert shown(waiting.record.outputs) == ["stdout: a"]
    cleared = Run(out("a"), ClearOutput(wait=True), update("x", "y"), err("b"))
    assert shown(cleared.record.outputs) == ["stderr: b"]
    assert cleared.record.stdout == ""
    assert replay(cleared.events) == list(cleared.record.outputs)


def test_a_progress_display_made_of_clears_shows_its_last_state() -> None:
    steps: list[Event] = []
    for i in range(3000):
        steps += [ClearOutput(wait=True), out(f"step {i}\n")]
    run = Run(*steps)
    assert run.record.stdout == "step 2999\n"
    assert not run.record.truncated


def test_clearing_nothing_says_nothing() -> None:
    run = Run(ClearOutput(wait=False), ClearOutput(wait=True), display("a"))
    assert run.of(EventType.OUTPUT_UPDATED) == []
    twice = Run(out("a"), ClearOutput(wait=False), ClearOutput(wait=False))
    assert len(twice.of(EventType.OUTPUT_UPDATED)) == 1


def test_an_update_that_cannot_be_encoded_is_mended() -> None:
    run = Run(display("1", "a"), UpdateDisplay({"text/html": "\ud800"}, {}, "a"))
    assert run.record.outputs[0]["data"] == {"text/html": "\ufffd"}


def test_long_text_comes_in_pieces_that_fit_the_log() -> None:
    run = Run(out("x" * 100_000), display("-"), out("数" * 30_000 + '\n"' * 20_000))
    for event in run.events[:-1]:
        assert len(json.dumps(event.to_wire(), ensure_ascii=False).encode()) < 16_000
        text = event.data.get("output", {}).get("text", "")
        assert len(text) <= 12_000
    assert replay(run.events) == list(run.record.outputs)


def test_a_line_of_eight_megabytes_is_whole() -> None:
    run = Run(out("x" * 8_000_000), out("\n"))
    assert run.record.stdout == "x" * 8_000_000 + "\n"
    assert run.live() == run.record.stdout
    assert not run.record.truncated


def test_over_the_limit_head_and_tail_are_kept_and_events_end_with_a_notice() -> None:
    limits = OutputLimits(head_bytes=1000, tail_bytes=500, live_characters=1200)
    lines = [out(f"line {i}\n") for i in range(10_000)]
    run = Run(*lines, limits=limits)
    whole = "".join(line.text for line in lines)
    left_out = f"\n... {len(whole) - 1500:,} characters left out ...\n"
    assert run.record.truncated
    assert run.record.stdout == whole[:1000] + left_out + whole[-500:]
    assert run.record.outputs == ({"type": "stream", "name": "stdout", "text": run.record.stdout},)
    live = run.live()
    assert live.startswith(whole[:1200] + "\n... over 1,200 characters")
    assert live.count("...") == 2
    assert len(live) < 1300


def test_exactly_the_limit_is_not_over_it() -> None:
    run = Run(out("x" * 100), limits=OutputLimits(live_characters=100))
    assert run.live() == "x" * 100


def test_outputs_over_the_number_are_left_out_and_it_is_said_once() -> None:
    run = Run(*(display(str(i)) for i in range(50)), limits=OutputLimits(outputs=10))
    assert run.record.truncated
    assert len(run.record.outputs) == 11
    notice = run.record.outputs[10]["data"]
    assert notice[NOTICE_TYPE]["code"] == "outputs_truncated"
    assert notice[NOTICE_TYPE]["limit_outputs"] == 10
    assert notice["text/plain"] == notice[NOTICE_TYPE]["message"]
    assert len(run.of(EventType.OUTPUT)) == 11


def test_an_error_is_kept_when_outputs_are_full() -> None:
    run = Run(
        *(display(str(i)) for i in range(50)),
        *(out("x") if i % 2 else err("y") for i in range(50)),
        ErrorOutput("E", "v", ()),
        limits=OutputLimits(outputs=10),
    )
    assert shown(run.record.outputs)[-1] == "error: E: v"
    assert run.record.stdout == "x" * 25
    assert replay(run.events) == list(run.record.outputs)


def test_outputs_over_the_bytes_are_left_out() -> None:
    limits = OutputLimits(outputs_bytes=10_000, head_bytes=100_000, tail_bytes=0)
    big = "x" * 9_000
    events = (display(big, "a"), display(big), display("small"), update(2 * big, "a"))
    run = Run(*events, limits=limits)
    assert [text[:14] for text in shown(run.record.outputs)] == [
        "display: xxxxx",
        "display: Some ",
        "display: small",
    ]
    assert run.record.truncated
    assert run.record.outputs[0]["data"]["text/plain"] == big


def test_streams_that_alternate_are_bounded_together() -> None:
    limits = OutputLimits(outputs_bytes=10_000, head_bytes=20_000, tail_bytes=20_000)
    run = Run(
        *(event for _ in range(400) for event in (out("o" * 99 + "\n"), err("e" * 99 + "\n"))),
        limits=limits,
    )
    assert run.record.stdout == ("o" * 99 + "\n") * 400
    assert run.record.truncated
    assert len(json.dumps(run.record.outputs)) < 13_000


def test_a_huge_error_and_result_keep_their_ends() -> None:
    run = Run(
        ExecuteResult({"text/plain": "r" * 5000}, {}, 1),
        ErrorOutput("E", "v" * 10_000_000, ("t" * 10_000_000,)),
        limits=OutputLimits(head_bytes=100, tail_bytes=100),
    )
    assert run.record.result is not None
    assert len(run.record.result) < 300
    assert run.record.error is not None
    assert len(run.record.error["value"]) < 1_000_100
    assert len(run.record.error["traceback"]) < 1_000_100


def test_lone_surrogates_and_not_a_number_never_break_json() -> None:
    queued = Transcript(
        Execution("exec_1", "cntr_1", "'\ud800'", ExecutionStatus.QUEUED, created_at=0)
    )
    assert queued.created.data["execution"]["code"] == "'\ufffd'"
    failure = Failure(FailureCode.KERNEL_DIED, "\ud800", {"x": "\ud800"})
    odd = {"a\udfff": [float("nan"), float("inf"), "\ud800", (1, b"x"), {1: None}]}
    run = Run(
        out("\ud800"),
        DisplayData({"application/json": odd, "text/plain": "\ud800"}, {"m": odd}, "i\ud800"),
        UpdateDisplay({"application/json": odd}, odd, "i\ud800"),
        ExecuteResult({"text/plain": "\udfff"}, odd, 1),
        ErrorOutput("\ud800", "\ud800", ("\ud800",)),
        InputRequest("\ud800", password=False),
        Notice("n", "\ud800", {"\ud800": float("nan")}),
        done=Done("failed", OK.usage, None, failure),
    )
    for event in run.events:
        json.dumps(event.to_wire(), ensure_ascii=False, allow_nan=False).encode()
    assert run.record.outputs[1]["data"]["application/json"] == {
        "a\ufffd": [None, None, "\ufffd", [1, "bytes"], {"1": None}]
    }
    assert run.record.result == "\ufffd"


def test_nesting_without_end_is_cut() -> None:
    deep: Any = []
    for _ in range(100_000):
        deep = [deep]
    run = Run(DisplayData({"application/json": deep}, {}))
    assert json.dumps(run.record.to_wire()).count("[[") < 200


def test_an_input_request_changes_the_status_until_it_is_answered() -> None:
    transcript = Transcript(QUEUED)
    transcript.feed(Started(1), at=1)
    (event,) = transcript.feed(InputRequest("name? ", password=True), at=2)
    assert event.type is EventType.INPUT_REQUIRED
    assert event.data == {"prompt": "name? ", "password": True}
    transcript.feed(out("from a thread"), at=3)
    assert transcript.execution.status is ExecutionStatus.INPUT_REQUIRED
    transcript.answered()
    resumed = transcript.execution
    assert resumed.status is ExecutionStatus.IN_PROGRESS


def test_a_notice_is_a_display_that_programs_can_read() -> None:
    run = Run(Notice("out_of_memory", "A child was killed.", {"limit_bytes": 5}))
    assert run.record.outputs == (
        {
            "type": "display",
            "data": {
                "text/plain": "A child was killed.",
                NOTICE_TYPE: {
                    "limit_bytes": 5,
                    "code": "out_of_memory",
                    "message": "A child was killed.",
                },
            },
            "metadata": {},
            "display_id": None,
        },
    )


@pytest.mark.parametrize(
    ("status", "expected"),
    [
        ("ok", ExecutionStatus.COMPLETED),
        ("error", ExecutionStatus.COMPLETED),
        ("aborted", ExecutionStatus.COMPLETED),
        ("timed_out", ExecutionStatus.TIMED_OUT),
        ("cancelled", ExecutionStatus.CANCELLED),
        ("failed", ExecutionStatus.FAILED),
    ],
)
def test_every_end_has_its_status(status: Any, expected: ExecutionStatus) -> None:
    assert Run(done=Done(status, OK.usage)).record.status is expected


def test_a_failure_keeps_its_numbers_and_the_outputs_before_it() -> None:
    details: dict[str, int | float | str] = {"limit_bytes": 5, "code": "not this"}
    failure = Failure(FailureCode.OUT_OF_MEMORY, "It used too much.", details)
    done = Done("failed", Usage(1.5), failure=failure, kernel_end=KernelEnd.OUT_OF_MEMORY)
    run = Run(Started(1), out("a\n"), display("plot"), done=done)
    assert run.record.failure == {
        "code": "out_of_memory",
        "message": "It used too much.",
        "limit_bytes": 5,
    }
    assert shown(run.record.outputs) == ["stdout: a\n", "display: plot"]
    assert run.record.usage == {
        "wall_seconds": 1.5,
        "cpu_seconds": None,
        "memory_peak_bytes": None,
    }


def test_files_and_reset_are_told_at_the_end() -> None:
    transcript = Transcript(QUEUED)
    file = {"id": "cfile_1", "change": "created"}
    event = transcript.finish(OK, at=5, files=[file], state_reset=True)
    assert transcript.execution.files == (file,)
    assert transcript.execution.state_reset
    assert event.data["execution"] == transcript.execution.to_wire()


def test_after_the_end_nothing_changes() -> None:
    run = Run(out("a"))
    record = run.record
    assert run.transcript.feed(out("late"), at=999) == []
    assert run.transcript.flush(at=999) == []
    assert run.transcript.flush_at is None
    assert run.transcript.finish(Done("failed", OK.usage), at=999) is run.events[-1]
    assert run.transcript.execution is record


def test_a_redraw_held_at_the_end_is_not_sent_after_the_last_event() -> None:
    transcript = Transcript(QUEUED)
    for percent in (1, 2, 3):
        transcript.feed(err(f"\r{percent}%"), at=1)
    transcript.finish(OK, at=1)
    assert transcript.flush_at is None
    assert transcript.flush(at=2) == []
    assert transcript.execution.stderr == "3%"


def test_numbers_go_on_after_an_earlier_workers_log() -> None:
    transcript = Transcript(QUEUED)
    transcript.continue_from(42)
    (event,) = transcript.feed(Started(1), at=0)
    assert event.sequence_number == 42


SMALL = OutputLimits(
    head_bytes=60,
    tail_bytes=40,
    live_characters=300,
    piece_characters=50,
    piece_bytes=80,
    outputs=6,
    outputs_bytes=900,
)
texts = st.one_of(
    st.text(max_size=30),
    st.text("ab\r\n\b\x1b[0;31mK]\x07\ud800数", max_size=60),
    st.sampled_from(["\x1b[31m", "\x1b[2K\r", "x" * 200, ""]),
)
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=5,
)
bundles = st.dictionaries(st.sampled_from(["text/plain", "text/html"]), texts, max_size=2) | (
    st.dictionaries(st.sampled_from(["application/json", "text/plain"]), values, max_size=2)
)
mappings = st.dictionaries(texts, values, max_size=2)
ids = st.sampled_from(["a", "b", "\ud800"])
streams = st.builds(Stream, st.sampled_from(["stdout", "stderr"]), texts)
events = st.one_of(
    streams,
    streams,
    st.builds(Started, st.none() | st.integers(1, 9)),
    st.builds(DisplayData, bundles, mappings, st.none() | ids),
    st.builds(UpdateDisplay, bundles, mappings, ids),
    st.builds(ExecuteResult, bundles, mappings, st.none() | st.integers(1, 9), st.none() | ids),
    st.builds(ErrorOutput, texts, texts, st.lists(texts, max_size=2).map(tuple)),
    st.builds(ClearOutput, st.booleans()),
    st.builds(InputRequest, texts, st.booleans()),
    st.builds(Notice, texts, texts, st.dictionaries(texts, texts | st.floats(), max_size=1)),
)
failures = st.none() | st.builds(
    Failure, st.sampled_from(FailureCode), texts, st.dictionaries(texts, st.integers(), max_size=1)
)
ends = st.builds(
    Done,
    st.sampled_from(["ok", "error", "aborted", "timed_out", "cancelled", "failed"]),
    st.just(Usage(1.0)),
    failure=failures,
)
SAFE = {"allow_nan": False, "ensure_ascii": False}


@given(
    st.lists(events, max_size=30),
    ends,
    st.sampled_from([SMALL, OutputLimits()]),
    st.sampled_from([0.0, 0.05, 1.0]),
)
@settings(max_examples=250)
def test_any_events_make_a_sound_record(
    fed: list[Event], done: Done, limits: OutputLimits, interval: float
) -> None:
    run = Run(*fed, limits=limits, done=done, interval=interval)
    assert [event.sequence_number for event in run.events] == list(range(len(run.events)))
    assert run.events[-1].type is EventType.COMPLETED
    assert sum(event.type is EventType.STARTED for event in run.events) <= 1
    for event in run.events:
        json.dumps(event.to_wire(), **SAFE).encode()  # type: ignore[arg-type]
    wire = run.record.to_wire()
    assert run.events[-1].data["execution"] == wire
    assert json.loads(json.dumps(wire)) == wire
    assert Execution.from_wire(wire) == run.record
    assert Execution.from_wire(json.loads(json.dumps(wire))) == run.record
    for text in (run.record.stdout, run.record.stderr, run.record.result or ""):
        assert re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]", text) is None


@given(st.lists(events, max_size=30), st.sampled_from([0.0, 1.0]))
@settings(max_examples=150)
def test_the_events_tell_what_the_record_keeps(fed: list[Event], interval: float) -> None:
    run = Run(*fed, interval=interval)
    told = replay(run.events)
    kept = list(run.record.outputs)
    assert len(kept) - len(told) <= sum(output.get("text") == "" for output in kept)
    for output, expected in zip(told, kept, strict=False):
        if expected["type"] != "stream":
            assert output == expected
        elif output is not None:
            assert output["name"] == expected["name"]


plain = st.text("ab\n\t数", min_size=1, max_size=8)
tame_events = st.one_of(
    st.builds(Stream, st.sampled_from(["stdout", "stderr"]), plain),
    st.builds(display, plain, st.none() | ids),
    st.builds(update, plain, ids),
    st.builds(ClearOutput, st.booleans()),
)


@given(st.lists(tame_events, max_size=40))
@settings(max_examples=150)
def test_a_client_of_the_events_ends_up_with_the_record(fed: list[Event]) -> None:
    run = Run(*fed)
    assert replay(run.events) == list(run.record.outputs)


@given(st.lists(streams, max_size=20), st.sampled_from([0.0, 1.0]))
@settings(max_examples=150)
def test_stdout_is_what_a_terminal_shows(fed: list[Stream], interval: float) -> None:
    run = Run(*fed, interval=interval)
    for name, text in (("stdout", run.record.stdout), ("stderr", run.record.stderr)):
        terminal = TerminalText(10**9, 10**9)
        for stream in fed:
            if stream.name == name:
                terminal.feed(stream.text)
        assert text == terminal.text()


@given(st.lists(events, max_size=60), ends)
@settings(max_examples=150)
def test_the_record_never_exceeds_its_limits(fed: list[Event], done: Done) -> None:
    run = Run(*fed, limits=SMALL, done=done)
    record = run.record
    notice = 40
    assert len(record.stdout.encode()) <= 100 + notice
    assert len(record.stderr.encode()) <= 100 + notice
    assert len((record.result or "").encode()) <= 100 + notice
    assert len(record.outputs) <= SMALL.outputs + SPARE_OUTPUTS
    kept = [
        output
        for output in record.outputs
        if output["type"] != "error" and NOTICE_TYPE not in output.get("data", {})
    ]
    size = sum(len(json.dumps(output, ensure_ascii=False).encode()) for output in kept)
    assert size <= SMALL.outputs_bytes + 2 * 350
    live = [
        data["output"]["text"]
        for data in run.of(EventType.OUTPUT)
        if data["output"]["type"] == "stream"
    ]
    assert sum(map(len, live)) <= 2 * (SMALL.live_characters + 100)


def test_a_flood_is_folded_in_flat_memory() -> None:
    limits = OutputLimits(
        head_bytes=100_000, tail_bytes=100_000, live_characters=100_000, outputs_bytes=100_000
    )
    transcript = Transcript(QUEUED, limits)
    tracemalloc.start()
    for _ in range(5000):
        transcript.feed(out("y" * 1000 + "\n"), at=0)
        transcript.feed(err("\ry"), at=0)
        transcript.feed(display("z" * 1000), at=0)
    record = transcript.execution
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 10_000_000
    assert record.truncated
    assert len(json.dumps(record.to_wire())) < 1_000_000


def test_a_hundred_thousand_lines_cost_little_each() -> None:
    lines = [out(f"line {i}\n") for i in range(100_000)]
    transcript = Transcript(QUEUED)
    begun = time.process_time()
    for line in lines:
        transcript.feed(line, at=0)
    event = transcript.finish(OK, at=1)
    assert time.process_time() - begun < 3
    assert event.data["execution"]["stdout"].count("\n") == 100_000
    assert not event.data["execution"]["truncated"]
