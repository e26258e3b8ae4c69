"""200 MB up and down again: the server's memory, and how fast. Above: __main__.py."""

from __future__ import annotations

from benchmarks.bench import Bench
from benchmarks.figures import Row, Spread, Target
from benchmarks.product import Session, seconds

LIMIT = 60.0
CHUNK = bytes(range(256)) * 4096
CHUNKS = 200
SIZE = len(CHUNK) * CHUNKS

MEBIBYTE = 1024 * 1024


async def measure(bench: Bench) -> list[Row]:
    """Megabytes per second, and how far the server's memory rose above its start."""
    up: list[float] = []
    down: list[float] = []
    async with bench.product(pool_size=1) as server, server.connect() as connection:
        await server.until_warm()
        session = await Session.create(connection)
        await session.run("1+1")
        server.forget_peak()
        before = server.resident_bytes()
        files = f"{session.path}/files"
        for turn in bench.turns(min(bench.repeat, 3), within=LIMIT / 2):
            uploaded = None

            async def upload(name: str) -> None:
                nonlocal uploaded
                uploaded = await connection.upload(files, name, CHUNK, CHUNKS)

            up.append(CHUNKS / await seconds(upload(f"{turn}.bin")))
            assert uploaded is not None
            path = f"{files}/{uploaded['id']}"

            async def download(path: str) -> None:
                if await connection.download(f"{path}/content") != SIZE:
                    raise RuntimeError("the file came back shorter than it went")

            down.append(CHUNKS / await seconds(download(path)))
            await connection.json("DELETE", path)
        growth = (server.peak_bytes() - before) / MEBIBYTE
    return [
        Row(
            "server's memory growth, 200 MB up and down",
            "MB",
            ours=Spread.of([growth]),
            target=Target(50, of="ours"),
            note="peak of the resident set above its start, over all repetitions",
        ),
        Row("upload", "MB/s", ours=Spread.of(up)),
        Row("download", "MB/s", ours=Spread.of(down)),
    ]
