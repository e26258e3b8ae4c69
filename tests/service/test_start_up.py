"""Starting and stopping: every fault is one line with its cure."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from pathlib import Path

import anyio
import pytest

from tests.service.conftest import running


async def _fails(*arguments: str, **settings: str) -> str:
    """What a command says that must fail."""
    environ = {
        **{name: value for name, value in os.environ.items() if "KERNELPOOL" not in name},
        **{name: value for name, value in settings.items() if value},
    }
    for name in [name for name, value in settings.items() if not value]:
        environ.pop(name, None)
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "orchestrator", *arguments,
        env=environ, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    with anyio.fail_after(60):
        _, err = await process.communicate()
    assert process.returncode == 1, err
    said = err.decode()
    assert "Traceback" not in said
    return "\n".join(line for line in said.splitlines() if line.startswith("kernelpool: "))


async def test_a_wrong_setting_is_named_with_what_is_allowed() -> None:
    said = await _fails("up", KERNELPOOL_POOL_SIZE="many", KERNELPOOL_RUNTIME="podman")
    assert "KERNELPOOL_POOL_SIZE" in said and "KERNELPOOL_RUNTIME" in said


async def test_a_public_address_without_keys_is_refused(tmp_path: Path) -> None:
    said = await _fails("up", "--host", "0.0.0.0", KERNELPOOL_STATE_DIR=str(tmp_path))
    assert "KERNELPOOL_API_KEYS" in said


async def test_a_taken_port_is_named(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        said = await _fails("up", "--port", port, KERNELPOOL_STATE_DIR=str(tmp_path))
    assert port in said and "--port" in said


async def test_no_engine_is_one_line_with_the_cure(tmp_path: Path) -> None:
    said = await _fails(
        "up", "--port", "0", KERNELPOOL_STATE_DIR=str(tmp_path), KERNELPOOL_RUNTIME="docker",
        DOCKER_HOST=f"unix://{tmp_path}/none.sock",
    )  # fmt: skip
    assert "no Docker Engine answers" in said and "DOCKER_HOST" in said


@pytest.mark.docker
async def test_a_missing_image_is_one_line_with_the_command(tmp_path: Path) -> None:
    said = await _fails(
        "up", "--port", "0", KERNELPOOL_STATE_DIR=str(tmp_path), KERNELPOOL_RUNTIME="docker",
        KERNELPOOL_IMAGE="kernelpool/none:never",
    )  # fmt: skip
    assert "kernelpool image build" in said


async def test_a_missing_environment_is_one_line_with_the_command(tmp_path: Path) -> None:
    said = await _fails(
        "up", "--port", "0", KERNELPOOL_STATE_DIR=str(tmp_path), KERNELPOOL_RUNTIME="bubblewrap"
    )
    assert "kernelpool image build --runtime bubblewrap" in said


async def test_a_redis_that_does_not_answer_is_one_line(tmp_path: Path) -> None:
    said = await _fails(
        "up", "--port", "0", KERNELPOOL_STATE_DIR=str(tmp_path),
        KERNELPOOL_REDIS_URL="redis://127.0.0.1:1/0",
    )  # fmt: skip
    assert said.count("\n") == 0 and said


async def test_a_state_directory_in_use_is_named(state: Path, settings: dict[str, str]) -> None:
    async with running(state, **settings):
        said = await _fails("up", "--port", "0", KERNELPOOL_STATE_DIR=str(state))
        assert str(state) in said and "KERNELPOOL_STATE_DIR" in said


async def test_a_stop_in_good_order_ends_containers_as_drained(
    state: Path, settings: dict[str, str]
) -> None:
    async with running(state, **settings) as service:
        container = await service.container()
        (file,) = (await service.run(container, "open('f', 'w').write('f')"))["files"]
        assert await service.stop() == 0
    async with running(state, **settings) as service:
        seen = (await service.http.get(container)).json()
        assert (seen["status"], seen["end_reason"]) == ("expired", "drained")
        content = await service.http.get(f"{container}/files/{file['id']}/content")
        assert content.content == b"f"
