"""Every row of the fault table that one machine can show: named, and nothing lost of the files."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import anyio
import httpx2
import pytest

from tests.service.conftest import Service, events, running


async def retrieved(service: Service, container: str) -> dict[str, Any]:
    """The container object."""
    return dict((await service.http.get(container)).json())


async def test_the_time_limit_is_named_keeps_variables_and_what_was_printed(
    service: Service, container: str
) -> None:
    await service.run(container, "x = 1")
    code = "print('before', flush=True)\nwhile True: pass"
    execution = await service.run(container, code, timeout_seconds=1)
    assert (execution["status"], execution["failure"]["code"]) == ("timed_out", "timeout")
    assert execution["stdout"] == "before\n"
    after = await service.run(container, "x")
    assert (after["result"], after["state_reset"]) == ("1", False)


async def test_out_of_memory_is_named_with_its_numbers_and_files_are_kept(
    service: Service, container: str
) -> None:
    await service.run(container, "open('kept', 'w').write('k')")
    execution = await service.run(container, "l = []\nwhile True: l.append(b'x' * 10**7)")
    assert execution["status"] == "failed", execution
    failure = execution["failure"]
    assert (failure["code"], failure["limit_bytes"]) == ("out_of_memory", 2**30)
    assert failure["peak_bytes"] >= 0.9 * 2**30
    after = await service.run(container, "open('kept').read()")
    assert (after["result"], after["state_reset"]) == ("'k'", True)


@pytest.mark.parametrize(
    ("code", "number"),
    [("import os; os._exit(7)", {"exit_code": 7}),
     ("import os; os.kill(os.getpid(), 6)", {"signal": 6})],
    ids=["exit", "signal"],
)  # fmt: skip
async def test_a_dead_kernel_is_named_and_the_next_call_works(
    service: Service, container: str, code: str, number: dict[str, int]
) -> None:
    execution = await service.run(container, code)
    assert (execution["status"], execution["failure"]["code"]) == ("failed", "kernel_died")
    assert execution["failure"].items() >= number.items()
    after = await service.run(container, "1 + 1")
    assert (after["result"], after["state_reset"]) == ("2", False) or after["state_reset"]


async def test_a_kernel_that_dies_between_calls_is_told_at_the_next(
    service: Service, container: str
) -> None:
    code = "import os, threading; threading.Timer(0.1, lambda: os._exit(1)).start()"
    await service.run(container, code)
    await asyncio.sleep(0.5)
    after = await service.run(container, "1 + 1")
    assert (after["result"], after["state_reset"]) == ("2", True)


async def test_a_full_disk_is_an_error_inside_and_a_notice(
    service: Service, container: str
) -> None:
    code = "f = open('big', 'wb')\nwhile True: f.write(bytes(2**24))"
    execution = await service.run(container, code, timeout_seconds=60)
    if execution["status"] == "completed":
        assert execution["error"]["name"] == "OSError"
        assert "quota_exceeded" in str(execution["outputs"])
    else:
        assert execution["failure"]["code"] == "quota_exceeded"
    after = await service.run(container, "f.close(); import os; os.remove('big'); 'free'")
    assert after["result"] == "'free'"


async def test_a_fork_bomb_hurts_itself_only(service: Service, container: str) -> None:
    neighbour = await service.container()
    bomb = asyncio.create_task(
        service.run(
            container,
            "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass",
            timeout_seconds=3,
        )
    )
    await asyncio.sleep(1)
    assert (await service.run(neighbour, "1 + 1"))["result"] == "2"
    assert (await bomb)["status"] == "timed_out"
    assert (await service.run(container, "1 + 1"))["result"] == "2"


async def test_endless_printing_is_capped_with_a_notice_and_flat_memory(
    service: Service, container: str
) -> None:
    before = service.resident_bytes()
    execution = await service.run(container, "while True: print('y' * 1000)", timeout_seconds=5)
    assert execution["status"] == "timed_out"
    assert execution["truncated"]
    assert len(execution["stdout"]) < 11_000_000
    assert service.resident_bytes() - before < 100_000_000


async def test_a_hundred_thousand_lines_come_whole(service: Service, container: str) -> None:
    execution = await service.run(container, "for i in range(100_000): print(i)")
    assert execution["stdout"] == "".join(f"{i}\n" for i in range(100_000))


async def test_a_client_that_goes_away_interrupts_its_run_and_the_record_tells(
    service: Service, container: str
) -> None:
    async with service.stream(container, "print(1, flush=True)\nwhile True: pass") as stream:
        async for event in stream:
            if event["type"] == "execution.created":
                execution_id = event["execution"]["id"]
            if event["type"] == "execution.output":
                break
    with anyio.fail_after(15):
        assert (await service.run(container, "1 + 1"))["result"] == "2"
    record = (await service.http.get(f"{container}/executions/{execution_id}")).json()
    assert (record["status"], record["stdout"]) == ("cancelled", "1\n")


async def test_a_sync_caller_that_goes_away_interrupts_its_run(
    service: Service, container: str
) -> None:
    with pytest.raises(httpx2.TimeoutException):
        await service.http.post(
            f"{container}/executions", json={"code": "while True: pass"}, timeout=1
        )
    with anyio.fail_after(15):
        assert (await service.run(container, "1 + 1"))["result"] == "2"


async def test_a_background_run_outlives_its_caller_and_its_stream_resumes(
    service: Service, container: str
) -> None:
    code = "import time\nfor i in range(20): print(i, flush=True); time.sleep(0.05)"
    queued = await service.run(container, code, background=True)
    path = f"{container}/executions/{queued['id']}"
    seen: list[dict[str, Any]] = []
    async with service.http.stream("GET", path, params={"stream": "true"}) as reply:
        async for event in events(reply):
            seen.append(event)
            if len(seen) == 6:
                break
    params: dict[str, Any] = {"stream": "true", "starting_after": seen[-1]["sequence_number"]}
    async with service.http.stream("GET", path, params=params) as reply:
        seen += [event async for event in events(reply)]
    assert [event["sequence_number"] for event in seen] == list(range(len(seen)))
    text = "".join(e["output"]["text"] for e in seen if e["type"] == "execution.output")
    assert text == "".join(f"{i}\n" for i in range(20))


async def test_cancel_ends_a_running_and_a_queued_execution(
    service: Service, container: str
) -> None:
    running_one = await service.run(container, "while True: pass", background=True)
    queued_one = await service.run(container, "print('never')", background=True)
    for execution in (queued_one, running_one):
        reply = await service.http.post(f"{container}/executions/{execution['id']}/cancel")
        assert (reply.status_code, reply.json()["status"]) == (200, "cancelled")
        again = await service.http.post(f"{container}/executions/{execution['id']}/cancel")
        assert again.json() == reply.json()
    assert (await service.run(container, "1 + 1"))["result"] == "2"


async def test_a_tier_above_the_host_is_a_400(service: Service) -> None:
    if os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") > 64 * 2**30:
        pytest.skip("this host has more than 64 GiB")
    reply = await service.http.post("/v1/containers", json={"name": "x", "memory_limit": "64g"})
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "memory_limit")


async def test_a_container_ends_at_its_maximum_lifetime_and_what_code_wrote_stays(
    state: Path, settings: dict[str, str]
) -> None:
    async with running(state, max_lifetime_minutes="0.1", **settings) as service:
        container = await service.container()
        upload = await service.http.post(f"{container}/files", files={"file": ("u", b"up")})
        written = (await service.run(container, "open('f', 'w').write('f')"))["files"][0]
        with anyio.fail_after(30):
            while (seen := await retrieved(service, container))["status"] == "running":  # noqa: ASYNC110
                await asyncio.sleep(0.2)
        assert (seen["status"], seen["end_reason"]) == ("expired", "max_lifetime")
        refused = await service.http.post(f"{container}/executions", json={"code": "1"})
        assert (refused.status_code, refused.json()["error"]["message"]) == (
            404, "Container is expired.",
        )  # fmt: skip
        kept = await service.http.get(f"{container}/files/{written['id']}/content")
        assert kept.content == b"f"
        gone = await service.http.get(f"{container}/files/{upload.json()['id']}/content")
        assert gone.status_code == 404
        assert (await service.http.delete(container)).status_code == 200
        assert (await service.http.get(container)).status_code == 404


async def test_a_killed_server_finds_its_kernels_and_their_running_code_again(
    state: Path, settings: dict[str, str]
) -> None:
    code = (
        "import os, time\nprint('before', flush=True)\n"
        "while not os.path.exists('go'): time.sleep(0.05)\nprint('after', x)\n1 / 0"
    )
    async with running(state, **settings) as service:
        container = await service.container()
        upload = await service.http.post(f"{container}/files", files={"file": ("u", b"up")})
        await service.run(container, "x = 1\nopen('f', 'w').write('f')")
        execution = await service.run(container, code, background=True)
        waiting = await service.run(container, "print('never')", background=True)
        path = f"{container}/executions/{execution['id']}"
        async with service.http.stream("GET", path, params={"stream": "true"}) as reply:
            async for event in events(reply):
                if event["type"] == "execution.output":
                    break
        await service.kill()
    (slot,) = (path.parent for path in (state / "slots").glob("*/data/u"))
    await asyncio.to_thread((slot / "go").touch)
    await asyncio.sleep(1)
    async with running(state, **settings) as service:
        record = await service.finished(container, execution["id"])
        assert record["failure"] is None, (record["failure"], service.log)
        assert (record["status"], record["stdout"]) == ("completed", "before\nafter 1\n")
        assert record["error"]["name"] == "ZeroDivisionError"
        never = (await service.http.get(f"{container}/executions/{waiting['id']}")).json()
        assert (never["status"], never["failure"]["code"]) == ("failed", "worker_lost")
        after = await service.run(container, "x, open('u').read()")
        assert (after["result"], after["state_reset"]) == ("(1, 'up')", False)
        content = await service.http.get(f"{container}/files/{upload.json()['id']}/content")
        assert content.content == b"up"


async def test_a_killed_server_whose_kernels_died_too_tells_so_and_leaves_nothing(
    state: Path, settings: dict[str, str]
) -> None:
    code = "import os, time\nwhile not os.path.exists('go'): time.sleep(0.05)\nos._exit(0)"
    async with running(state, **settings) as service:
        container = await service.container()
        await service.run(container, "open('f', 'w').write('f')")
        execution = await service.run(container, code, background=True)
        path = f"{container}/executions/{execution['id']}"
        async with service.http.stream("GET", path, params={"stream": "true"}) as reply:
            async for event in events(reply):
                if event["type"] == "execution.started":
                    break
        await service.kill()
    (slot,) = (path.parent for path in (state / "slots").glob("*/data/f"))
    await asyncio.to_thread((slot / "go").touch)
    await asyncio.sleep(1)
    async with running(state, **settings) as service:
        seen = await retrieved(service, container)
        assert (seen["status"], seen["end_reason"]) == ("expired", "worker_lost")
        record = (await service.http.get(path)).json()
        assert (record["status"], record["failure"]["code"]) == ("failed", "worker_lost")
        fresh = await service.container()
        assert (await service.run(fresh, "1 + 1"))["result"] == "2"


async def test_a_call_that_finds_its_container_ended_goes_on_in_a_new_one_when_asked(
    state: Path, settings: dict[str, str]
) -> None:
    async with running(state, max_lifetime_minutes="0.1", **settings) as service:
        container = await service.container()
        await service.http.post(f"{container}/files", files={"file": ("u", b"up")})
        await service.run(container, "x = 1; open('f', 'w').write('f')")
        with anyio.fail_after(30):
            while (await retrieved(service, container))["status"] == "running":  # noqa: ASYNC110
                await asyncio.sleep(0.2)
        code = "open('u').read(), open('f').read(), 'x' in dir()"
        execution = await service.run(container, code, on_expired="recreate")
        assert (execution["result"], execution["state_reset"]) == ("('up', 'f', False)", True)
        assert execution["container_id"] != container.rpartition("/")[2]
        assert (await retrieved(service, container))["status"] == "expired"


async def test_the_process_limit_is_told(service: Service, container: str) -> None:
    code = (
        "import threading\nstop = threading.Event()\n"
        "try:\n    for _ in range(2000): threading.Thread(target=stop.wait).start()\n"
        "except RuntimeError as error: print(error)\nstop.set()"
    )
    execution = await service.run(container, code)
    assert execution["status"] == "completed"
    assert "can't start new thread" in execution["stdout"]
    assert "process_limit" in str(execution["outputs"])


async def test_a_time_limit_shows_the_users_code_and_none_of_ours(
    service: Service, container: str
) -> None:
    execution = await service.run(container, "while True: pass", timeout_seconds=1)
    assert execution["error"]["name"] == "KeyboardInterrupt"
    assert "while True: pass" in execution["error"]["traceback"]
    assert "kernelpool" not in execution["error"]["traceback"]
