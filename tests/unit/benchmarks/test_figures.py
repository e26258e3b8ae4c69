"""Figures of the benchmarks: ratios of pairs, targets, and how they are shown."""

from __future__ import annotations

import asyncio
import contextlib

import anyio
import pytest

from benchmarks import page, report
from benchmarks.figures import Row, Spread, Target, compared
from benchmarks.http_client import Connection, HttpError


def test_a_ratio_is_made_of_neighbours_so_that_a_drifting_machine_cancels() -> None:
    row = compared("x", "ms", ours=[2.0, 20.0, 4.0], reference=[1.0, 10.0, 2.0])
    assert row.ratio == Spread(2.0, 2.0, 2.0)
    assert row.ours == Spread(4.0, 2.0, 20.0)


def test_a_target_judges_the_median_of_what_it_is_about() -> None:
    slow = compared("x", "ms", ours=[3.0], reference=[1.0], target=Target(2.0))
    fast = compared("x", "1/s", ours=[3.0], reference=[1.0], target=Target(2.0, "at least"))
    lost = Row("x", "lines", ours=Spread.of([0.0]), target=Target(0, of="ours"))
    assert (slow.met, fast.met, lost.met) == (False, True, True)
    assert Row("x", "ms", ours=Spread.of([1.0])).met is None


def test_a_row_is_shown_with_its_spread_and_target() -> None:
    row = compared("x", "ms", ours=[3.0, 5.0], reference=[2.0, 2.0], target=Target(1.5))
    assert report.cells(row) == (
        "x",
        "4.00 (3.00 to 5.00) ms",
        "2.00 ms",
        "2.00 (1.50 to 2.50) x",
        "≤ 1.5 x",
    )


def test_the_reference_page_is_what_the_kept_results_make() -> None:
    results = page.stored()
    assert set(results) == {"docker", "bubblewrap"}
    assert page.PAGE.read_text(encoding="utf-8") == page.page(results)


async def answering(reply: bytes) -> tuple[asyncio.Server, str]:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError):
            while await reader.readuntil(b"\r\n\r\n"):
                writer.write(reply)
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1")
    return server, f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


async def test_the_client_reads_bodies_of_known_length_and_in_chunks() -> None:
    sized = b"HTTP/1.1 200 OK\r\ncontent-length: 7\r\n\r\n[1,2,3]"
    chunked = (
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
        b'b\r\ndata: {"a":\r\n5\r\n 1}\n\n\r\n0\r\n\r\n'
    )
    with anyio.fail_after(5):
        server, url = await answering(sized)
        async with server, Connection(url) as connection:
            assert await connection.json("GET", "/") == [1, 2, 3]
            assert await connection.download("/") == 7
        server, url = await answering(chunked)
        async with server, Connection(url) as connection:
            assert [event async for event in connection.events("/", None)] == [{"a": 1}]


async def test_an_error_answer_is_raised_with_what_it_says() -> None:
    with anyio.fail_after(5):
        server, url = await answering(b"HTTP/1.1 404 Not Found\r\nconnection: close\r\n\r\nno such")
        async with server, Connection(url) as connection:
            with pytest.raises(HttpError, match="404"):
                await connection.json("GET", "/")
