"""The journal holds what was published, before and whether or not anybody reads it."""

import json
import struct
from collections.abc import Iterator
from dataclasses import dataclass

import anyio

from .started_kernel import Message, StartedKernel, StartKernel


@dataclass(frozen=True, slots=True)
class Record:
    """One record of a journal file."""

    channel: str
    frames: tuple[bytes, ...]

    @property
    def type(self) -> str:
        return str(json.loads(self.frames[1])["msg_type"]) if self.frames else ""

    @property
    def parent(self) -> str:
        return str(json.loads(self.frames[2]).get("msg_id", "")) if self.frames else ""

    @property
    def content(self) -> dict[str, object]:
        content: dict[str, object] = json.loads(self.frames[4])
        return content


def records(data: bytes) -> Iterator[Record]:
    """Parse a journal. Fails on anything that is not a whole record."""
    offset = 0
    while offset < len(data):
        (length,) = struct.unpack_from(">I", data, offset)
        body = data[offset + 4 : offset + 4 + length]
        assert len(body) == length
        frames = []
        position = 1
        while position < length:
            (size,) = struct.unpack_from(">I", body, position)
            frames.append(body[position + 4 : position + 4 + size])
            assert len(frames[-1]) == size
            position += 4 + size
        yield Record(body[:1].decode(), tuple(frames))
        offset += 4 + length


async def journal_of(kernel: StartedKernel) -> list[Record]:
    return list(records(await anyio.Path(kernel.journal).read_bytes()))


def frames(messages: list[Message], id: str) -> list[tuple[bytes, ...]]:
    return [message.frames for message in messages if message.parent == id]


NOISY = """
import sys
from IPython.display import display
print("out"); print("err", file=sys.stderr)
display({"text/plain": "shown"}, raw=True)
get_ipython().display_pub.session.send(
    get_ipython().display_pub.pub_socket, "comm_msg", {"data": {}},
    buffers=[bytes(range(256)), b""], parent=get_ipython().parent_header,
)
1 / 0
"""


async def test_the_journal_holds_bit_for_bit_what_is_sent(kernel: StartedKernel) -> None:
    for code in ("1 + 1", NOISY, "print('ü' * 300_000)"):
        outcome = await kernel.run(code)
        journal = [r for r in await journal_of(kernel) if r.parent == outcome.id]
        assert [r.frames for r in journal if r.channel == "i"] == frames(
            kernel.published, outcome.id
        )
        assert [r.frames for r in journal if r.channel == "s"] == [outcome.reply.frames]


async def test_what_a_kernel_says_while_nobody_is_connected_is_in_the_journal(
    kernel: StartedKernel,
) -> None:
    id = await kernel.execute(
        "import time, os\nprint('before', flush=True)\n"
        "while not os.path.exists('go'): time.sleep(0.01)\n"
        "for i in range(2000): print('line', i)\n'end'"
    )
    await kernel.printed(id, "before")
    await kernel.disconnect()
    await anyio.Path(kernel.path("go")).touch()
    await kernel.connect()  # answers once the cell has ended
    journal = [r for r in await journal_of(kernel) if r.parent == id]
    text = "".join(str(r.content["text"]) for r in journal if r.type == "stream")
    assert text == "before\n" + "".join(f"line {i}\n" for i in range(2000))
    assert {"execute_result", "execute_reply"} <= {r.type for r in journal}
    assert all(kernel.session.sign(list(r.frames[1:5])) == r.frames[0] for r in journal)
    assert (await kernel.run("6 * 7")).result == "42"


async def test_the_host_may_empty_the_journal_between_cells(kernel: StartedKernel) -> None:
    await kernel.run("print('first')")
    async with await anyio.open_file(kernel.journal, "r+b") as file:
        await file.truncate(0)
    outcome = await kernel.run("print('second')")
    journal = await journal_of(kernel)
    assert {r.parent for r in journal} == {outcome.id}
    assert not any(b"\0\0\0\0\0\0\0\0" in b"".join(r.frames) for r in journal)


async def test_past_a_cells_bound_only_its_outcome_is_kept(start_kernel: StartKernel) -> None:
    variables = {
        "KERNELPOOL_JOURNAL": "{directory}/journal",
        "KERNELPOOL_JOURNAL_CELL_BYTES": "200000",
    }
    async with start_kernel(**variables) as kernel:
        outcome = await kernel.run(
            "for i in range(100):\n    print('x' * 9999, flush=True)\n"
            "raise ValueError('y' * 1_000_000)"
        )
        assert len(outcome.stdout) == 1_000_000
        journal = await journal_of(kernel)
        of_cell = [r for r in journal if r.channel == "t" or r.parent == outcome.id]
        assert [r.channel for r in of_cell].count("t") == 1
        marker = next(i for i, record in enumerate(of_cell) if record.channel == "t")
        assert {r.type for r in of_cell[:marker]} == {"status", "execute_input", "stream"}
        assert sorted(r.type for r in of_cell[marker + 1 :]) == [
            "error",
            "execute_reply",
            "status",
        ]
        for record in of_cell[marker + 1 :]:
            assert sum(map(len, record.frames)) <= 64 * 1024
            assert kernel.session.sign(list(record.frames[1:5])) == record.frames[0]
        error = next(r for r in of_cell if r.type == "error")
        assert error.content["ename"] == "ValueError"
        assert sum(len(b"".join(r.frames)) for r in of_cell) < 400_000

        after = await kernel.run("print('a new cell has a new bound')")
        assert [r.frames for r in await journal_of(kernel) if r.parent == after.id][:1]
        assert "stream" in {r.type for r in await journal_of(kernel) if r.parent == after.id}


async def test_a_full_disk_costs_no_cell_and_leaves_whole_records(
    start_kernel: StartKernel,
) -> None:
    async with start_kernel(KERNELPOOL_JOURNAL="{directory}/journal") as kernel:
        await kernel.run(
            "import resource, signal\nsignal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
            "size = __import__('os').path.getsize\n"
            f"used = size({str(kernel.journal)!r})\n"
            "resource.setrlimit(resource.RLIMIT_FSIZE, (used + 5000, resource.RLIM_INFINITY))"
        )
        for number in range(20):
            outcome = await kernel.run(f"print('x' * 700, {number})")
            assert outcome.status == "ok"
            assert outcome.stdout == "x" * 700 + f" {number}\n"
        missed = await journal_of(kernel)
        await kernel.run("resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)")
        after = await kernel.run("'space again'")
        journal = await journal_of(kernel)
        assert "t" not in {r.channel for r in missed}
        assert [r.channel for r in journal].count("t") == 1
        assert "execute_result" in {r.type for r in journal if r.parent == after.id}


async def test_a_journal_that_cannot_be_opened_is_done_without(start_kernel: StartKernel) -> None:
    for path in ("/proc/nowhere/journal", "{directory}/link", "{directory}/data"):
        async with start_kernel(KERNELPOOL_JOURNAL=path) as kernel:
            assert (await kernel.run("6 * 7")).result == "42"


async def test_without_a_journal_in_the_environment_none_is_written(
    start_kernel: StartKernel,
) -> None:
    async with start_kernel() as kernel:
        assert (await kernel.run("6 * 7")).result == "42"
        assert not await anyio.Path(kernel.journal).exists()


async def test_a_link_is_not_followed(start_kernel: StartKernel) -> None:
    async with start_kernel(KERNELPOOL_JOURNAL="{directory}/journal") as first:
        target = anyio.Path(first.directory, "target")
        await target.write_bytes(b"untouched")
        await anyio.Path(first.directory, "planted").symlink_to(target)
        async with start_kernel(KERNELPOOL_JOURNAL=f"{first.directory}/planted") as kernel:
            await kernel.run("print('x')")
        assert await target.read_bytes() == b"untouched"


async def test_a_forked_child_writes_neither_to_the_journal_nor_on_the_sockets(
    kernel: StartedKernel,
) -> None:
    code = """
import os, time
child = os.fork()
if child == 0:
    print("from the child")
    get_ipython().display_pub.session.send(None, "stream", {})
else:
    os.waitpid(child, 0)
    print("from the parent")
"""
    outcome = await kernel.run(code)
    assert outcome.stdout == "from the child\nfrom the parent\n"
    journal = [r for r in await journal_of(kernel) if r.parent == outcome.id]
    assert [r.frames for r in journal if r.channel == "i"] == frames(kernel.published, outcome.id)
    assert sum(r.channel == "s" for r in journal) == 1
    assert len([m for m in kernel.replies if m.parent == outcome.id]) == 1
    assert (await kernel.run("6 * 7")).result == "42"
