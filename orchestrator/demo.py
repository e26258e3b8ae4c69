"""`kernelpool demo`: a conversation on a real data set, over real HTTP.

Above: __main__.py. Below: embedded.py, app.py, server.py, and httpx2 as any client would use it.

The data are weekly means of carbon dioxide in the air at Mauna Loa, 1958 to 2001 (C. D. Keeling and
T. P. Whorf, 2004, Carbon Dioxide Information Analysis Center; public domain).
"""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any, Final

import anyio
import httpx2
from rich.console import Console
from rich.markup import escape
from rich.panel import Panel
from rich.syntax import Syntax

from orchestrator.app import create_app
from orchestrator.embedded import embedded_host
from orchestrator.server import listen, serving
from orchestrator.settings import Settings
from orchestrator.tables import human_bytes

DATA_FILE: Final = "mauna_loa_co2.csv"


@dataclass(frozen=True, slots=True)
class Turn:
    """What a person asks, and the code that an agent would answer with."""

    question: str
    code: str


TURNS: Final = (
    Turn(
        "What is in the file?",
        """\
import pandas as pd

raw = pd.read_csv("/mnt/data/mauna_loa_co2.csv")
print(f"{len(raw):,} weeks, {raw.co2.isna().sum()} without a value")
raw.head()""",
    ),
    Turn(
        "Clean it: real dates, and no gaps.",
        """\
dates = pd.to_datetime(raw.date.astype(str), format="%Y%m%d")
weekly = raw.set_index(dates).co2
gaps = weekly.isna()
longest = gaps.groupby((~gaps).cumsum()).sum().max()
weekly = weekly.interpolate(method="time")
print(f"{gaps.sum()} weeks filled in, the longest gap was {longest} weeks")
print(f"{weekly.index.min():%d %B %Y} to {weekly.index.max():%d %B %Y}")""",
    ),
    Turn(
        "How much did it rise in each decade?",
        """\
yearly = weekly.groupby(weekly.index.year).mean()
decades = (
    pd.DataFrame({"mean ppm": yearly, "rise per year": yearly.diff()})
    .groupby(yearly.index // 10 * 10)
    .mean()
    .round(2)
    .rename_axis("decade")
)
decades""",
    ),
    Turn(
        "Show me the trend and the seasons.",
        """\
import matplotlib.pyplot as plt

trend = weekly.rolling(52, center=True).mean()
by_month = (weekly - trend).groupby(weekly.index.month).mean()
figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4), width_ratios=(2, 1))
left.plot(weekly, lw=0.6, color="tab:blue", label="weekly")
left.plot(trend, color="tab:red", label="one-year mean")
left.set(title="CO₂ at Mauna Loa", ylabel="ppm")
left.legend()
right.bar(by_month.index, by_month, color="tab:green")
right.set(title="Difference from the trend", xlabel="month", xticks=range(1, 13))
plt.show()""",
    ),
    Turn(
        "Give me the table as a file.",
        """\
decades.to_csv("/mnt/data/co2_by_decade.csv")
with pd.ExcelWriter("/mnt/data/co2.xlsx") as book:
    decades.to_excel(book, sheet_name="decades")
    yearly.round(2).to_frame("mean ppm").to_excel(book, sheet_name="years")
print("saved two files")""",
    ),
)


async def run_demo(settings: Settings, output: Path) -> None:
    """Start everything, hold the conversation, save the files under `output`, stop.

    Raises:
        KernelPoolError, ServerError: the message names the cure.
    """
    console = Console()
    started = time.monotonic()
    async with embedded_host(settings, console) as host:
        app = create_app(settings=settings, store=host.store, dispatcher=host.owner)
        async with (
            serving(app, listen("127.0.0.1", 0), grace=1) as address,
            httpx2.AsyncClient(base_url=f"{address.url}/v1", headers=_key(settings)) as client,
        ):
            console.print(
                f"serving at [bold]{address.url}/v1[/] ({escape(host.chosen.reason)}), "
                f"{time.monotonic() - started:.1f} s after the start"
            )
            await _converse(client, console, output)
    console.print(f"stopped; {time.monotonic() - started:.1f} s in all", highlight=False)


def _key(settings: Settings) -> dict[str, str]:
    key = next(iter(settings.api_keys), None)
    return {} if key is None else {"Authorization": f"Bearer {key}"}


async def _converse(client: httpx2.AsyncClient, console: Console, output: Path) -> None:
    container = await _json(client, "POST", "/containers", json={"name": "demo"})
    path = f"/containers/{container['id']}"
    data = (resources.files("orchestrator") / "demo_data" / DATA_FILE).read_bytes()
    upload = await _json(client, "POST", f"{path}/files", files={"file": (DATA_FILE, data)})
    console.print(f"container {container['id']}", highlight=False)
    console.print(f"uploaded  {upload['path']} ({human_bytes(upload['bytes'])}) {upload['id']}",
                  highlight=False)  # fmt: skip
    for turn in TURNS:
        console.print()
        console.print(f"[bold cyan]»[/] [bold]{turn.question}[/]")
        console.print(Panel(Syntax(turn.code, "python", background_color="default")))
        execution = await _execute(client, console, path, turn.code)
        usage = execution["usage"]
        console.print(f"[dim]{execution['status']} in {usage['wall_seconds'] * 1000:.0f} ms[/]")
        for file in execution["files"]:
            console.print(
                f"[green]{file['change']}[/] {file['path']} {file['id']}", highlight=False
            )
    console.print()
    files = await _json(client, "GET", f"{path}/files", params={"order": "asc", "limit": 100})
    made = [file for file in files["data"] if file["source"] == "assistant"]
    await anyio.Path(output).mkdir(parents=True, exist_ok=True)
    for file in made:
        target = output / Path(file["path"]).name
        async with client.stream("GET", f"{path}/files/{file['id']}/content") as reply:
            reply.raise_for_status()
            async with await anyio.open_file(target, "wb") as saved:
                async for chunk in reply.aiter_bytes():
                    await saved.write(chunk)
        console.print(
            f"saved {target} ({human_bytes(file['bytes'])}) {file['id']}", highlight=False
        )
    await client.delete(path)


async def _execute(
    client: httpx2.AsyncClient, console: Console, path: str, code: str
) -> dict[str, Any]:
    async with client.stream(
        "POST", f"{path}/executions", json={"code": code, "stream": True}, timeout=120
    ) as reply:
        reply.raise_for_status()
        async for event in _events(reply.aiter_lines()):
            if event["type"] == "execution.output":
                _show(console, event["output"])
            elif event["type"] == "execution.completed":
                return dict(event["execution"])
    raise RuntimeError("the stream ended without execution.completed")


async def _events(lines: AsyncIterator[str]) -> AsyncIterator[dict[str, Any]]:
    async for line in lines:
        if line.startswith("data: "):
            yield json.loads(line.removeprefix("data: "))


def _show(console: Console, output: dict[str, Any]) -> None:
    if output["type"] == "stream":
        console.print(escape(output["text"]), end="", highlight=False)
    elif output["type"] == "error":
        console.print(escape(output["traceback"]), style="red", highlight=False)
    else:
        console.print(escape(output["data"].get("text/plain", "")), highlight=False)
        for mime, value in output["data"].items():
            if isinstance(value, dict) and "file_id" in value:
                size = human_bytes(value["bytes"])
                console.print(f"[magenta]{mime}[/] {size} {value['file_id']}", highlight=False)


async def _json(client: httpx2.AsyncClient, method: str, path: str, **kwargs: Any) -> Any:
    reply = await client.request(method, path, **kwargs)
    reply.raise_for_status()
    return reply.json()
