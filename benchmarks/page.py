"""The reference page, made of results: `python -m benchmarks.page` writes docs/reference.

Above: people. Below: results/*.json, report.py.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.figures import Row, Spread, Target
from benchmarks.report import cells

RESULTS = Path(__file__).parent / "results"

PAGE = Path(__file__).parent.parent / "docs" / "reference" / "benchmarks.md"

RUNTIMES = ("docker", "bubblewrap")

HEAD = """\
<!-- Made by `python -m benchmarks.page` from benchmarks/results; change it there. -->

# Benchmarks

`make bench` measures kernelpool on your machine and prints a table like these; `python -m
benchmarks --help` tells what can be chosen. It takes under six minutes, leaves nothing behind, and
writes JSON to `benchmarks/results/`. It fails when a target is missed.

## What is compared with what

The reference is what you would have without kernelpool: a plain `python -m ipykernel_launcher` in
the same image, with the same memory and CPU limits, over the same ipc transport, and
`jupyter_client.AsyncKernelClient` as it comes. It has no start-up code, journal, quota, seccomp
filter, records or HTTP.

kernelpool is a real `kernelpool up` on loopback with its own Redis and no API keys. The client is
a small one of our own on one keep-alive connection (`benchmarks/http_client.py`, 0.1 to 0.2 ms of
a call): what a general HTTP client adds, 0.5 to 1 ms, is not the server's.

Both are measured in turns within one run, since a machine's speed drifts, and a ratio is made of
neighbours. A cell shows the median of the repetitions, and the least and the greatest in brackets.
Read the ratios; absolute times are those of the machine at that hour.

| figure | from, to |
|---|---|
| warm `1+1`, p50 | request sent, answer parsed; the median of 80 calls is one repetition |
| create to first result, warm pool | container asked for, `1+1` answered; beside our own warm one |
| engine calls and mounts on that path | at the engine's socket (Docker) and in the mount table |
| create to first result, cold | the same without a pool; by hand: create, start, first reply |
| 20 sessions x 20 cells at once | all cells answered; 20 plain clients in one process do the same |
| 100,000 printed lines | `print` in a loop, streamed; stream and record are checked |
| memory growth | peak of the server's resident set above its start |
| memory of a session | proportional set size of every process in it, told from inside |
| delete | until the answer; until container, mount and file system are gone |
"""


def page(results: dict[str, Any]) -> str:
    """The page of results by runtime."""
    parts = [HEAD]
    for runtime, result in results.items():
        parts += [
            f"\n## With {_NAMES[runtime]}\n\n",
            _facts(result["machine"]),
            "\n",
            _table(result),
        ]
    return "".join(parts)


def stored() -> dict[str, Any]:
    """The results that are kept beside the code."""
    found = {}
    for runtime in RUNTIMES:
        path = RESULTS / f"{runtime}.json"
        if path.exists():
            found[runtime] = json.loads(path.read_text(encoding="utf-8"))
    return found


_NAMES = {"docker": "Docker", "bubblewrap": "bubblewrap"}


def _facts(machine: dict[str, Any]) -> str:
    engine = f", Docker {machine['docker']} on {machine['storage']}" if "docker" in machine else ""
    packages = machine["packages"]
    return (
        f"{machine['date'][:10]}; {machine['cpu']}, {machine['cores']} cores, "
        f"{machine['memory_gib']} GiB; Linux {machine['kernel']}, "
        f"cgroup {machine['cgroup']}{engine}; "
        f"Python {machine['python']}, jupyter_client {packages['jupyter-client']}, "
        f"pyzmq {packages['pyzmq']}. Load average at the start: {machine['load_at_start'][0]}.\n"
    )


def _table(result: dict[str, Any]) -> str:
    lines = ["| | kernelpool | plain | ratio | target | |", "|---|---|---|---|---|---|"]
    for kept in result["rows"]:
        row = _row(kept)
        verdict = {True: "met", False: "**missed**", None: ""}[row.met]
        lines.append(f"| {' | '.join(cells(row))} | {verdict} |")
    return "\n".join(lines) + "\n"


def _row(kept: dict[str, Any]) -> Row:
    def spread(name: str) -> Spread | None:
        return Spread(**kept[name]) if kept[name] else None

    return Row(
        kept["name"],
        kept["unit"],
        ours=Spread(**kept["ours"]),
        reference=spread("reference"),
        ratio=spread("ratio"),
        target=Target(**kept["target"]) if kept["target"] else None,
    )


if __name__ == "__main__":
    PAGE.write_text(page(stored()), encoding="utf-8")
