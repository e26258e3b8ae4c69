"""What happens below the service: its Redis dies, a kernel's container is removed by hand."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import anyio
import docker
import httpx2
import pytest

from kernelpool.container import SLOT_LABEL
from tests.service.conftest import Service, events, running


async def test_a_redis_that_is_killed_costs_nothing_acknowledged_and_comes_back(
    state: Path, settings: dict[str, str]
) -> None:
    async with running(state, **settings) as service:
        container = await service.container()
        before = await service.run(container, "x = 1; x")
        pid = int((state / "redis" / "redis.pid").read_text(encoding="ascii"))
        os.kill(pid, signal.SIGKILL)
        with anyio.fail_after(30):
            while (reply := await _ask(service, container)).status_code != 200:
                assert reply.status_code == 503, reply.text
                assert reply.headers["retry-after"]
                await asyncio.sleep(0.1)
        assert reply.json()["result"] == "2"
        path = f"{container}/executions/{before['id']}"
        assert (await service.http.get(path)).json() == before


async def test_a_run_that_ends_while_redis_is_away_is_recorded_once_it_is_back(
    state: Path, settings: dict[str, str]
) -> None:
    async with running(state, **settings) as service:
        container = await service.container()
        pid_file = state / "redis" / "redis.pid"
        code = "import time; print('on', flush=True); time.sleep(1); 42"
        queued = await service.run(container, code, background=True)
        path = f"{container}/executions/{queued['id']}"
        async with service.http.stream("GET", path, params={"stream": "true"}) as reply:
            async for event in events(reply):
                if event["type"] == "execution.output":
                    break
        os.kill(int(pid_file.read_text(encoding="ascii")), signal.SIGKILL)
        with anyio.fail_after(30):
            while True:
                reply = await service.http.get(path)
                if reply.status_code == 200 and reply.json()["status"] != "in_progress":
                    break
                assert reply.status_code in (200, 503), reply.text
                await asyncio.sleep(0.1)
        record = reply.json()
        assert (record["status"], record["result"], record["stdout"]) == ("completed", "42", "on\n")


async def _ask(service: Service, container: str) -> httpx2.Response:
    return await service.http.post(f"{container}/executions", json={"code": "x + 1"})


@pytest.mark.docker
async def test_a_container_that_is_removed_by_hand_is_a_dead_kernel_with_its_files(
    state: Path, runtime: str, settings: dict[str, str]
) -> None:
    if runtime != "docker":
        pytest.skip("bubblewrap has no containers")
    async with running(state, **settings, pool_size="0") as service:
        container = await service.container()
        await service.run(container, "x = 1; open('f', 'w').write('f')")
        running_one = await service.run(container, "while True: pass", background=True)
        (slot,) = (path.parent.parent.name for path in (state / "slots").glob("*/data/f"))
        await asyncio.to_thread(_remove_by_hand, slot)
        with anyio.fail_after(30):
            ended = await service.finished(container, running_one["id"])
        assert (ended["status"], ended["failure"]["code"]) == ("failed", "kernel_died")
        after = await service.run(container, "open('f').read(), 'x' in dir()")
        assert (after["result"], after["state_reset"]) == ("('f', False)", True)


def _remove_by_hand(slot: str) -> None:
    client = docker.from_env()
    for found in client.containers.list(filters={"label": f"{SLOT_LABEL}={slot}"}):
        found.remove(force=True)
    client.close()
