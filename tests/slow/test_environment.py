"""The embedded environment: made once, by one of several that ask, whole or not at all."""

from __future__ import annotations

import json
import os
from pathlib import Path

import anyio
import pytest
from anyio import to_thread

from kernelpool import environment
from kernelpool.recipe import Step

pytestmark = pytest.mark.slow

BUILD_SECONDS = 600


async def names_in(directory: Path) -> list[str]:
    return sorted([path.name async for path in anyio.Path(directory).iterdir()])


async def test_two_that_ask_at_once_get_the_same_environment_and_one_builds_it(
    tmp_path: Path,
) -> None:
    seen: list[list[Step]] = [[], []]
    paths: list[Path] = []

    async def ask(steps: list[Step]) -> None:
        paths.append(await environment.build_environment(tmp_path, progress=steps.append))

    with anyio.fail_after(BUILD_SECONDS):
        async with anyio.create_task_group() as group:
            for steps in seen:
                group.start_soon(ask, steps)
    expected = await to_thread.run_sync(environment.location, tmp_path)
    assert paths == [expected, expected]
    assert sorted(bool(steps) for steps in seen) == [False, True]
    assert [name[:6] for name in await names_in(tmp_path)] == [".lock", "packag", "python"]

    with anyio.fail_after(5):
        assert await environment.build_environment(tmp_path) == paths[0]

    moved = tmp_path / "elsewhere"
    await anyio.Path(paths[0]).rename(moved)
    code = (
        "import warnings; warnings.simplefilter('error')\n"
        "import seaborn, matplotlib.pyplot as p, kernelpool_startup, pkg_resources, sys\n"
        "seaborn.set_theme(); p.title('销量'); p.savefig('/dev/null', format='png')\n"
        "print(sys.prefix)"
    )
    done = await anyio.run_process(
        [moved / "bin" / "python", "-B", "-c", code],
        env={
            "MPLCONFIGDIR": str(moved / "matplotlib"),
            "MPLBACKEND": "agg",
            "PATH": "/usr/bin:/bin",
        },
    )
    assert done.stdout.decode() == f"{moved}\n"
    assert done.stderr == b""
    listed = json.loads(await anyio.Path(moved, "packages.json").read_text(encoding="utf-8"))
    assert "pandas" in {entry["name"] for entry in listed}


async def test_a_build_that_is_cancelled_leaves_nothing_behind(tmp_path: Path) -> None:
    with anyio.fail_after(BUILD_SECONDS), anyio.CancelScope() as scope:

        def cancel_in_the_midst(step: Step) -> None:
            if step.title == "bytecode":
                scope.cancel()

        await environment.build_environment(tmp_path, progress=cancel_in_the_midst)
    assert scope.cancelled_caught
    assert await names_in(tmp_path) == [".lock"]
    processes = await anyio.run_process(["ps", "-eo", "args"])
    assert os.fsencode(tmp_path) not in processes.stdout
