"""Bytes that leave the server."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.errors import BadRequest, OutcomeUnknown, QueueFull, StoreUnavailable
from orchestrator.event_stream import frame
from orchestrator.wire import error_reply, to_json

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


@given(values)
def test_any_value_becomes_json_that_a_strict_parser_takes(value: Any) -> None:
    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    json.loads(to_json(value), parse_constant=refuse)


def test_what_json_cannot_say_is_null_and_half_a_pair_is_an_escape() -> None:
    assert to_json({"a": [math.nan, math.inf, 1.5]}) == b'{"a":[null,null,1.5]}'
    assert to_json("\ud800") == b'"\\ud800"'
    assert to_json([math.nan, "\ud800"]) == b'[null,"\\ud800"]'


@given(st.text())
def test_a_frame_has_two_lines_for_every_reader(text: str) -> None:
    sent = frame("execution.output", {"text": text})
    name, data, *rest = sent.decode(errors="surrogatepass").splitlines()
    assert rest == [""]
    assert name == "event: execution.output"
    assert json.loads(data.removeprefix("data: ")) == {"text": text}


@pytest.mark.parametrize(
    ("error", "status", "headers"),
    [
        (BadRequest("no", param="x"), 400, {}),
        (
            QueueFull("full", retry_after=0.4),
            429,
            {"retry-after": "1", "retry-after-ms": "400", "x-should-retry": "true"},
        ),
        (StoreUnavailable("away"), 503, {"x-should-retry": "true"}),
        (OutcomeUnknown("broke"), 502, {"x-should-retry": "false"}),
    ],
)
def test_an_error_says_whether_to_try_again(
    error: Any, status: int, headers: dict[str, str]
) -> None:
    reply = error_reply(error)
    assert reply.status_code == status
    retry = {key: value for key, value in reply.headers.items() if "retry" in key}
    assert retry == headers
    assert set(json.loads(bytes(reply.body))["error"]) == {"message", "type", "param", "code"}
