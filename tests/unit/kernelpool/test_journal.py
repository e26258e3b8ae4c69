import os
from collections.abc import Callable
from pathlib import Path

import anyio
import pytest
from anyio import to_thread
from hypothesis import given
from hypothesis import strategies as st

from kernelpool.journal import (
    JOURNAL_NAME,
    Channel,
    Journal,
    JournalReader,
    JournalRecord,
    encode,
)

CHANNELS: st.SearchStrategy[Channel] = st.sampled_from(["iopub", "shell", "truncated"])
MESSAGES = st.tuples(CHANNELS, st.lists(st.binary(max_size=40), max_size=8).map(tuple))


def reader(data: bytes, offset: int = 0, *, step: int = 1 << 20) -> JournalReader:
    return JournalReader(lambda size, at: data[at : at + min(size, step)], offset)


@given(st.lists(MESSAGES, max_size=10), st.integers(1, 7))
def test_what_was_written_is_read_however_the_file_is_cut(
    messages: list[tuple[Channel, tuple[bytes, ...]]], step: int
) -> None:
    data = b"".join(encode(channel, frames) for channel, frames in messages)
    records = list(reader(data, step=step))
    assert [(r.channel, r.frames) for r in records] == messages
    assert not records or records[-1].end == len(data)


@given(st.lists(MESSAGES, min_size=1, max_size=5), st.data())
def test_reading_goes_on_behind_any_record(
    messages: list[tuple[Channel, tuple[bytes, ...]]], data: st.DataObject
) -> None:
    journal = b"".join(encode(channel, frames) for channel, frames in messages)
    records = list(reader(journal))
    at = data.draw(st.integers(0, len(records) - 1))
    assert list(reader(journal, records[at].end)) == records[at + 1 :]


@given(st.lists(MESSAGES, min_size=1, max_size=5), st.data())
def test_a_torn_record_is_left_for_later(
    messages: list[tuple[Channel, tuple[bytes, ...]]], data: st.DataObject
) -> None:
    journal = b"".join(encode(channel, frames) for channel, frames in messages)
    ends = [0, *(record.end for record in reader(journal))]
    cut = data.draw(st.integers(0, len(journal) - 1))
    torn = reader(journal[:cut])
    whole = [record.end for record in torn]
    assert whole == [end for end in ends[1:] if end <= cut]
    assert not torn.garbage
    assert torn.offset == max(end for end in ends if end <= cut)


@given(st.binary(max_size=200))
def test_any_bytes_are_read_without_a_fault(data: bytes) -> None:
    journal = reader(data)
    records = list(journal)
    assert sum(len(frame) for record in records for frame in record.frames) <= len(data)
    if journal.garbage:
        assert list(journal) == []


@pytest.mark.parametrize(
    "data",
    [
        b"\0\0\0\0",
        b"\xff\xff\xff\xffi",
        b"\0\0\0\1x",
        b"\0\0\0\3i\0\0",
        b"\0\0\0\6i\0\0\0\2a",
    ],
)
def test_what_cannot_be_a_record_ends_reading_with_a_flag(data: bytes) -> None:
    good = encode("iopub", (b"a",))
    journal = reader(good + data + good)
    assert list(journal) == [JournalRecord("iopub", (b"a",), len(good))]
    assert journal.garbage


async def test_a_missing_journal_is_an_empty_one(tmp_path: Path) -> None:
    for run in (tmp_path, tmp_path / "nowhere"):
        journal = Journal(run)
        assert [record async for record in journal.records()] == []
        await journal.truncate_if_over(0)
        assert not await anyio.Path(run, JOURNAL_NAME).exists()


def plant_link(path: Path) -> None:
    secret = path.with_name("secret")
    secret.write_bytes(encode("iopub", (b"secret",)))
    path.symlink_to(secret)


@pytest.mark.parametrize("plant", [plant_link, os.mkfifo, Path.mkdir])
async def test_what_stands_in_the_journals_place_is_not_opened(
    tmp_path: Path, plant: Callable[[Path], None]
) -> None:
    await to_thread.run_sync(plant, tmp_path / JOURNAL_NAME)
    planted = anyio.Path(tmp_path, JOURNAL_NAME)
    before = (await planted.stat()).st_mtime_ns
    journal = Journal(tmp_path)
    assert [record async for record in journal.records()] == []
    await journal.truncate_if_over(0)
    assert (await planted.stat()).st_mtime_ns == before


async def test_a_long_journal_is_read_in_batches_up_to_its_end(tmp_path: Path) -> None:
    path = tmp_path / JOURNAL_NAME
    data = b"".join(encode("iopub", (b"%d" % n, bytes(100_000))) for n in range(50))
    await to_thread.run_sync(path.write_bytes, data)
    journal = Journal(tmp_path)
    got = [int(record.frames[0]) async for record in journal.records()]
    assert got == list(range(50))
    assert not journal.garbage


async def test_a_cut_journal_says_so_and_the_kernel_appends_behind_the_mark(tmp_path: Path) -> None:
    path = tmp_path / JOURNAL_NAME
    record = encode("iopub", (bytes(1000),))
    long = len(record)
    with path.open("ab", buffering=0) as kernel:
        kernel.write(record)
        journal = Journal(tmp_path)
        await journal.truncate_if_over(long)
        assert (await anyio.Path(path).stat()).st_size == long
        await journal.truncate_if_over(long - 1)
        kernel.write(encode("shell", (b"after",)))
    records = [record async for record in journal.records()]
    assert [(r.channel, r.frames) for r in records] == [
        ("truncated", (str(long).encode(),)),
        ("shell", (b"after",)),
    ]
