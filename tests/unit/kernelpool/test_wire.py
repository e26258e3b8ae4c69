"""Jupyter's signed frames: what was written is read, and nothing else is."""

from __future__ import annotations

import json
from typing import Any, Final

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jupyter_client.session import Session

from kernelpool.wire import DELIMITER, Wire, WireError

KEY: Final = b"0123456789abcdef"

CONTENT: Final = st.dictionaries(
    st.text(), st.none() | st.booleans() | st.integers() | st.text() | st.lists(st.text())
)


@pytest.fixture
def wire() -> Wire:
    return Wire(KEY, "a-session")


@given(CONTENT, CONTENT)
def test_what_is_encoded_is_decoded_again(
    content: dict[str, Any], metadata: dict[str, Any]
) -> None:
    wire = Wire(KEY, "a-session")
    message_id, frames = wire.encode("execute_request", content, metadata=metadata)
    message = wire.decode([b"routing", b"ids", *frames, b"a buffer"])
    assert message["header"]["msg_id"] == message_id
    assert message["header"]["msg_type"] == "execute_request"
    assert message["header"]["session"] == "a-session"
    assert message["content"] == content
    assert message["metadata"] == metadata
    assert message["parent_header"] == {}
    assert message["buffers"] == [b"a buffer"]


def test_jupyter_clients_session_reads_what_we_write_and_the_other_way_round(wire: Wire) -> None:
    session = Session(key=KEY)
    parent = {"msg_id": "p", "msg_type": "input_request", "username": "u", "session": "s"}
    _, frames = wire.encode("input_reply", {"value": "é"}, parent_header=parent)
    read = session.deserialize(frames[1:])
    assert read["content"] == {"value": "é"}
    assert read["parent_header"]["msg_id"] == "p"
    theirs = session.serialize(session.msg("status", {"execution_state": "idle"}))
    assert wire.decode(theirs)["content"] == {"execution_state": "idle"}


def test_ids_are_not_to_be_guessed_unless_one_is_given(wire: Wire) -> None:
    made = {wire.encode("x", {})[0] for _ in range(100)}
    assert len(made) == 100
    assert wire.encode("x", {}, message_id="exec_1")[0] == "exec_1"


@given(st.integers(0, 4), st.binary(min_size=1, max_size=8))
def test_a_changed_frame_is_refused(place: int, extra: bytes) -> None:
    wire = Wire(KEY, "a-session")
    _, frames = wire.encode("x", {"a": 1})
    frames[1 + place] += extra
    with pytest.raises(WireError, match="signature"):
        wire.decode(frames)


@given(st.lists(st.binary(max_size=20), max_size=8))
def test_any_frames_are_a_message_or_are_refused(frames: list[bytes]) -> None:
    wire = Wire(KEY, "a-session")
    for candidate in (frames, [DELIMITER, *frames]):
        with pytest.raises(WireError):
            wire.decode(candidate)


@pytest.mark.parametrize("text", ["{", '"\ud800', "[" * 100_000, "1" * 5000])
def test_signed_text_that_is_no_json_is_refused(wire: Wire, text: str) -> None:
    _, frames = wire.encode("x", {})
    parts = [*frames[2:5], text.encode(errors="surrogatepass")]
    with pytest.raises(WireError):
        wire.decode([DELIMITER, wire._sign(parts), *parts])


def test_numbers_that_json_does_not_know_become_null(wire: Wire) -> None:
    _, frames = wire.encode("x", {"a": float("nan"), "b": float("-inf")})
    assert wire.decode(frames)["content"] == json.loads('{"a": null, "b": null}')
