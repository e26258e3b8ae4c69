"""Uploads, cut into chunks wherever the network likes."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.errors import BadRequest, TooLarge
from orchestrator.multipart import Disposition, UploadForm, parse_disposition

BOUNDARY = "b0undary"
TYPE = f"multipart/form-data; boundary={BOUNDARY}"


def part(disposition: str, content: bytes) -> bytes:
    return (
        f"--{BOUNDARY}\r\nContent-Disposition: {disposition}\r\n\r\n".encode() + content + b"\r\n"
    )


def form(*parts: bytes) -> bytes:
    return b"".join(parts) + f"--{BOUNDARY}--\r\n".encode()


def upload(content: bytes, name: str = "a.txt") -> bytes:
    return part(f'form-data; name="file"; filename="{name}"', content)


async def pieces(body: bytes, size: int = 7) -> AsyncIterator[bytes]:
    for start in range(0, len(body), size):
        yield body[start : start + size]


async def read(body: bytes, size: int = 7, max_bytes: int = 10_000) -> tuple[str, bytes]:
    reader = UploadForm(TYPE, pieces(body, size), max_bytes=max_bytes)
    assert await reader.find_file()
    return reader.name, b"".join([chunk async for chunk in reader.chunks()])


@given(content=st.binary(max_size=300), size=st.integers(1, 80))
async def test_the_bytes_arrive_whole_however_they_are_cut(content: bytes, size: int) -> None:
    assert await read(form(upload(content)), size) == ("a.txt", content)


@given(
    content=st.lists(
        st.sampled_from([b"\r", b"\n", b"-", b"--", b"\r\n--", b"\r\n--b0undar", b"x"]), max_size=30
    ),
    size=st.integers(1, 12),
)
async def test_what_looks_like_a_boundary_is_content(content: list[bytes], size: int) -> None:
    assert await read(form(upload(b"".join(content))), size) == ("a.txt", b"".join(content))


@given(
    name=st.text(
        st.characters(exclude_categories=["Cc", "Cs"], exclude_characters='/\\"'),
        min_size=1,
        max_size=40,
    ).filter(lambda name: "%22" not in name and "%0" not in name)
)
async def test_any_name_arrives_as_it_was_sent(name: str) -> None:
    found, _ = await read(form(upload(b"x", name)))
    assert found == name


@pytest.mark.parametrize(
    ("header", "expected"),
    [
        ('form-data; name="file"; filename="a.txt"', "a.txt"),
        ('form-data; name="file"; filename="数据.csv"', "数据.csv"),
        ('form-data; name="file"; filename="say %22hi%22%0D%0A.txt"', 'say "hi"\r\n.txt'),
        ('form-data; name="file"; filename="100%25 %41.txt"', "100%25 %41.txt"),
        ('form-data; name="file"; filename="a\\"b.txt"', 'a"b.txt'),
        ('form-data; name="file"; filename="a; b=c.txt"', "a; b=c.txt"),
        ("form-data; name=file; filename=bare.txt", "bare.txt"),
        ("form-data; name=\"file\"; filename*=UTF-8''na%C3%AFve%20a.txt", "naïve a.txt"),
        ('form-data; filename="first.txt"; name="file"', "first.txt"),
        ('form-data; name="file"; filename=""', ""),
        ('form-data; name="file"', None),
    ],
)
def test_dispositions_are_read_as_clients_write_them(header: str, expected: str | None) -> None:
    assert parse_disposition(header.encode()) == Disposition("file", expected)


def test_a_name_that_is_no_utf8_is_refused_instead_of_changed() -> None:
    with pytest.raises(BadRequest, match="UTF-8") as refused:
        parse_disposition('form-data; name="file"; filename="é"'.encode("latin-1"))
    assert refused.value.param == "file"


async def test_other_fields_are_skipped() -> None:
    noise = part('form-data; name="purpose"', b"assistants" * 100)
    assert await read(form(noise, upload(b"x"), noise)) == ("a.txt", b"x")


async def test_a_form_without_a_file_is_told_apart() -> None:
    reader = UploadForm(TYPE, pieces(form(part('form-data; name="x"', b"y"))), max_bytes=9)
    assert not await reader.find_file()
    assert reader.file_id is None


async def test_a_file_id_field_is_read() -> None:
    body = form(part('form-data; name="file_id"', b"file-123"))
    reader = UploadForm(TYPE, pieces(body), max_bytes=9)
    assert not await reader.find_file()
    assert reader.file_id == "file-123"


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (form(upload(b"x"))[:-12], "ends before its last boundary"),
        (upload(b"x"), "ends before its last boundary"),
        (form(upload(b"x"), upload(b"y")), "one file"),
        (form(upload(b"x"), part('form-data; name="file_id"', b"file-1")), "not both"),
        (form(upload(b"x"), part('form-data; name="file_id"', b"f" * 2000)), "too long"),
    ],
)
async def test_a_form_that_is_wrong_after_the_file_ends_the_file_with_an_error(
    body: bytes, message: str
) -> None:
    reader = UploadForm(TYPE, pieces(body), max_bytes=10_000)
    assert await reader.find_file()
    with pytest.raises(BadRequest, match=message):
        [chunk async for chunk in reader.chunks()]
    assert isinstance(reader.failure, BadRequest)


async def test_a_file_over_the_limit_ends_with_an_error_that_names_it() -> None:
    with pytest.raises(TooLarge, match="1000 bytes"):
        await read(form(upload(b"x" * 1001)), max_bytes=1000)
    assert await read(form(upload(b"x" * 1000)), max_bytes=1000) == ("a.txt", b"x" * 1000)


@pytest.mark.parametrize("body", [b"", b"no form at all", b"--other\r\n\r\n"])
async def test_what_is_no_form_is_refused(body: bytes) -> None:
    reader = UploadForm(TYPE, pieces(body), max_bytes=9)
    with pytest.raises(BadRequest):
        await reader.find_file()


@pytest.mark.parametrize(
    "content_type",
    ["multipart/form-data", "multipart/form-data; boundary=", f"x; boundary={'b' * 71}"],
)
def test_a_content_type_without_a_usable_boundary_is_refused(content_type: str) -> None:
    with pytest.raises(BadRequest, match="boundary"):
        UploadForm(content_type, pieces(b""), max_bytes=9)


async def test_a_file_without_a_name_is_refused() -> None:
    body = form(part('form-data; name="file"', b"x"))
    reader = UploadForm(TYPE, pieces(body), max_bytes=9)
    with pytest.raises(BadRequest) as refused:
        await reader.find_file()
    assert refused.value.param == "file"


async def test_an_endless_header_is_refused() -> None:
    body = b"--b0undary\r\nContent-Disposition: form-data; name=" + b"x" * 100_000
    reader = UploadForm(TYPE, pieces(body, 1000), max_bytes=9)
    with pytest.raises(BadRequest, match="malformed"):
        await reader.find_file()
