"""Ranges and types of downloads."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.routes.files import (
    RangeNotSatisfiable,
    Span,
    cut_to,
    download_type,
    requested_span,
)


@pytest.mark.parametrize(
    ("header", "expected"),
    [
        (None, Span(0, 10, partial=False)),
        ("bytes=0-3", Span(0, 4, partial=True)),
        ("bytes=4-", Span(4, 10, partial=True)),
        ("bytes=-3", Span(7, 10, partial=True)),
        ("bytes=-99", Span(0, 10, partial=True)),
        ("bytes=8-99", Span(8, 10, partial=True)),
        ("BYTES=0-0", Span(0, 1, partial=True)),
        ("bytes=5-3", Span(0, 10, partial=False)),
        ("bytes=0-1,4-5", Span(0, 10, partial=False)),
        ("bytes=-", Span(0, 10, partial=False)),
        ("lines=0-1", Span(0, 10, partial=False)),
        ("bytes=a-b", Span(0, 10, partial=False)),
    ],
)
def test_a_range_is_read_as_the_standard_says(header: str | None, expected: Span) -> None:
    assert requested_span(header, 10) == expected


@pytest.mark.parametrize(("header", "size"), [("bytes=10-", 10), ("bytes=-0", 10), ("bytes=0-", 0)])
def test_a_range_outside_the_file_is_refused_with_its_size(header: str, size: int) -> None:
    with pytest.raises(RangeNotSatisfiable) as refused:
        requested_span(header, size)
    assert refused.value.headers["content-range"] == f"bytes */{size}"


@given(st.lists(st.binary(max_size=9), max_size=9), st.integers(0, 81), st.integers(0, 81))
async def test_a_span_is_what_slicing_gives(chunks: list[bytes], start: int, end: int) -> None:
    whole = b"".join(chunks)
    start, end = sorted((min(start, len(whole)), min(end, len(whole))))

    async def given_chunks() -> AsyncIterator[bytes]:
        for chunk in chunks:
            yield chunk

    span = Span(start, end, partial=True)
    assert b"".join([part async for part in cut_to(span, given_chunks())]) == whole[start:end]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("plot.png", "image/png"),
        ("data.csv", "text/csv"),
        ("page.html", "application/octet-stream"),
        ("drawing.svg", "application/octet-stream"),
        ("archive.tar.gz", "application/octet-stream"),
        ("noextension", "application/octet-stream"),
    ],
)
def test_nothing_is_sent_as_what_a_browser_would_run(name: str, expected: str) -> None:
    assert download_type(name) == expected
