"""ZMTP by itself, by properties, and against libzmq."""

from __future__ import annotations

import socket
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st

from kernelpool import zmtp

MESSAGES = st.lists(st.lists(st.binary(max_size=600), min_size=1, max_size=5), max_size=6)


def reader(max_bytes: int = 10_000, max_frames: int = 100) -> zmtp.Reader:
    return zmtp.Reader(max_bytes=max_bytes, max_frames=max_frames)


@given(messages=MESSAGES, data=st.data())
def test_messages_arrive_whole_however_the_bytes_are_cut(
    messages: list[list[bytes]], data: st.DataObject
) -> None:
    sent = zmtp.GREETING + zmtp.ready("DEALER", b"me") + b"".join(map(zmtp.message, messages))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(sent)), max_size=8)))
    taking = reader()
    got: list[list[bytes]] = []
    for start, end in zip([0, *cuts], [*cuts, len(sent)], strict=True):
        taking.feed(sent[start:end])
        got += taking.messages()
    assert got == messages
    assert taking.ready


@given(st.binary(max_size=500))
def test_garbage_is_refused_or_waited_on_and_never_anything_else(garbage: bytes) -> None:
    taking = reader()
    taking.feed(zmtp.GREETING + garbage)
    try:
        for frames in taking.messages():
            assert all(isinstance(frame, bytes) for frame in frames)
    except zmtp.ProtocolError:
        pass


@pytest.mark.parametrize("greeting", [bytes(64), b"\xff" + bytes(63), b"GET / HTTP/1.1\r\n" * 4])
def test_another_protocol_is_refused(greeting: bytes) -> None:
    taking = reader()
    taking.feed(greeting)
    with pytest.raises(zmtp.ProtocolError):
        list(taking.messages())


def test_a_message_beyond_its_bytes_is_refused_before_it_has_arrived() -> None:
    taking = reader(max_bytes=1000)
    taking.feed(zmtp.GREETING + zmtp.message([bytes(600), bytes(600)])[:700])
    with pytest.raises(zmtp.ProtocolError, match="more than 1,000 bytes"):
        list(taking.messages())


def test_a_message_without_an_end_is_refused() -> None:
    taking = reader(max_frames=10)
    endless = zmtp.message([b"x"] * 11)[: 3 * 10]
    taking.feed(zmtp.GREETING + endless + endless)
    with pytest.raises(zmtp.ProtocolError, match="more than 10 frames"):
        list(taking.messages())


def _talk(kind: int, hello: bytes) -> tuple[zmq.Socket[bytes], socket.socket, zmtp.Reader]:
    directory = TemporaryDirectory(prefix="kp-")
    path = Path(directory.name) / "s"
    theirs: zmq.Socket[bytes] = zmq.Context.instance().socket(kind)
    theirs.linger = 0
    theirs.rcvtimeo = theirs.sndtimeo = 5000
    theirs.bind(f"ipc://{path}")
    ours = socket.socket(socket.AF_UNIX)
    ours.settimeout(5)
    ours.connect(str(path))
    directory.cleanup()
    ours.sendall(zmtp.GREETING + hello)
    taking = reader(max_bytes=10**7)
    while not taking.ready:
        taking.feed(ours.recv(4096))
        assert not list(taking.messages())
    return theirs, ours, taking


def test_libzmq_takes_us_for_a_dealer_and_we_take_its_messages() -> None:
    theirs, ours, taking = _talk(zmq.ROUTER, zmtp.ready("DEALER", b"identity"))
    with theirs, ours:
        ours.sendall(zmtp.message([b"", b"short", b"long" * 1000]))
        assert theirs.recv_multipart() == [b"identity", b"", b"short", b"long" * 1000]
        theirs.send_multipart([b"identity", b"back", b"x" * 300_000])
        got: list[list[bytes]] = []
        while not got:
            taking.feed(ours.recv(65536))
            got += taking.messages()
        assert got == [[b"back", b"x" * 300_000]]


def test_libzmq_takes_our_subscription() -> None:
    theirs, ours, taking = _talk(zmq.XPUB, zmtp.ready("SUB"))
    with theirs, ours:
        ours.sendall(zmtp.message([zmtp.SUBSCRIBE_ALL]))
        assert theirs.recv() == zmtp.SUBSCRIBE_ALL
        theirs.send_multipart([b"topic", b"text"])
        got: list[list[bytes]] = []
        while not got:
            taking.feed(ours.recv(65536))
            got += taking.messages()
        assert got == [[b"topic", b"text"]]
