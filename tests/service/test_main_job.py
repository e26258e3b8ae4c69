"""The main job, through HTTP only: code, state, files, outputs, in every mode of asking."""

from __future__ import annotations

import asyncio
import base64
from typing import Any

import anyio

from tests.service.conftest import Service


async def test_calls_build_on_each_other(service: Service, container: str) -> None:
    first = await service.run(container, "x = 20\nprint('set')")
    assert (first["status"], first["stdout"], first["execution_count"]) == ("completed", "set\n", 1)
    second = await service.run(container, "x + 1")
    assert (second["result"], second["execution_count"]) == ("21", 2)
    assert second["usage"]["wall_seconds"] > 0
    assert not second["state_reset"]


async def test_an_exception_is_a_completed_execution_with_its_error(
    service: Service, container: str
) -> None:
    execution = await service.run(container, "y = 1\n1 / 0")
    assert execution["status"] == "completed"
    assert execution["error"]["name"] == "ZeroDivisionError"
    assert "1 / 0" in execution["error"]["traceback"]
    assert "\x1b" not in execution["error"]["traceback"]
    assert execution["failure"] is None
    assert (await service.run(container, "y"))["result"] == "1"


async def test_an_upload_is_seen_by_code_and_what_code_writes_comes_back(
    service: Service, container: str
) -> None:
    name = "数据 (1).csv"
    reply = await service.http.post(f"{container}/files", files={"file": (name, b"a,b\n1,2\n")})
    assert (reply.status_code, reply.json()["path"]) == (200, f"/mnt/data/{name}")
    code = f"text = open('/mnt/data/{name}').read()\nopen('out/r.txt', 'w').write(text.upper())"
    execution = await service.run(container, "import os; os.mkdir('out')\n" + code)
    (file,) = execution["files"]
    assert (file["path"], file["change"], file["source"]) == (
        "/mnt/data/out/r.txt", "created", "assistant",
    )  # fmt: skip
    content = await service.http.get(f"{container}/files/{file['id']}/content")
    assert content.content == b"A,B\n1,2\n"


async def test_an_overwrite_keeps_the_id_and_a_removal_is_told(
    service: Service, container: str
) -> None:
    first = (await service.run(container, "open('f', 'w').write('1')"))["files"][0]
    second = (await service.run(container, "open('f', 'w').write('22')"))["files"][0]
    assert (second["id"], second["change"], second["bytes"]) == (first["id"], "modified", 2)
    third = (await service.run(container, "import os; os.remove('f')"))["files"][0]
    assert (third["id"], third["change"]) == (first["id"], "deleted")
    gone = await service.http.get(f"{container}/files/{first['id']}/content")
    assert gone.status_code == 404


async def test_a_picture_becomes_a_file_and_a_reference(service: Service, container: str) -> None:
    png = base64.b64encode(b"\x89PNG\r\n\x1a\n" + bytes(100)).decode()
    code = f"from IPython.display import display\ndisplay({{'image/png': '{png}'}}, raw=True)"
    execution = await service.run(container, code)
    reference = execution["outputs"][0]["data"]["image/png"]
    content = await service.http.get(f"{container}/files/{reference['file_id']}/content")
    assert content.content == base64.b64decode(png)
    listed = (await service.http.get(f"{container}/files")).json()["data"]
    assert [file["path"] for file in listed] == ["/mnt/data/outputs/1-1.png"]
    assert execution["files"] == []
    seen = await service.run(container, "import os; os.path.getsize('outputs/1-1.png')")
    assert seen["result"] == "108"


def _normal(execution: dict[str, Any]) -> dict[str, Any]:
    varies = ("id", "created_at", "started_at", "completed_at", "usage", "container_id")
    return {key: value for key, value in execution.items() if key not in varies}


async def test_sync_stream_background_and_poll_give_the_same_object(service: Service) -> None:
    code = "import sys\nprint('out'); print('err', file=sys.stderr)\nopen('f', 'w').write('x')\n1/0"

    async def fresh() -> str:
        return await service.container()

    sync = await service.run(await fresh(), code)
    container = await fresh()
    async with service.stream(container, code) as events:
        streamed = [event async for event in events]
    assert [event["sequence_number"] for event in streamed] == list(range(len(streamed)))
    container = await fresh()
    queued = await service.run(container, code, background=True)
    assert queued["status"] in ("queued", "in_progress")
    background = await service.finished(container, queued["id"])
    polled = (await service.http.get(f"{container}/executions/{queued['id']}")).json()
    assert background == polled
    wanted = _normal(sync)
    for file in wanted["files"]:
        assert file.pop("id") and file.pop("container_id") and file.pop("created_at")
    for execution in (streamed[-1]["execution"], background):
        found = _normal(execution)
        for file in found["files"]:
            assert file.pop("id") and file.pop("container_id") and file.pop("created_at")
        assert found == wanted


async def test_executions_at_once_are_served_in_the_order_of_arrival(
    service: Service, container: str
) -> None:
    order: list[int] = []

    async def one(number: int) -> None:
        execution = await service.run(container, f"import time; time.sleep(0.05); print({number})")
        order.append(int(execution["stdout"]))

    async with anyio.create_task_group() as tasks:
        for number in range(12):
            tasks.start_soon(one, number)
            await asyncio.sleep(0.02)
    assert order == list(range(12))


async def test_a_full_queue_is_429_and_nothing_of_it_runs(service: Service, container: str) -> None:
    async with service.stream(container, "print(1, flush=True)\nwhile True: pass") as events:
        async for event in events:
            if event["type"] == "execution.output":
                break
        statuses = []
        for _ in range(100):
            reply = await service.http.post(
                f"{container}/executions", json={"code": "n = 1", "background": True}
            )
            statuses.append(reply.status_code)
            if reply.status_code == 429:
                assert reply.headers["retry-after"]
                assert reply.json()["error"]["code"] == "queue_full"
                break
        assert statuses[-1] == 429


async def test_a_key_never_runs_twice(service: Service, container: str) -> None:
    async def ask(code: str) -> Any:
        return await service.http.post(
            f"{container}/executions", json={"code": code}, headers={"Idempotency-Key": "k"}
        )

    await service.run(container, "n = 0")
    first, second = await asyncio.gather(ask("n += 1; n"), ask("n += 1; n"))
    assert first.json() == second.json()
    assert (await ask("n += 1; n")).json() == first.json()
    assert (await service.run(container, "n"))["result"] == "1"
    other = await ask("n += 2")
    assert (other.status_code, other.json()["error"]["param"]) == (400, "Idempotency-Key")


async def test_input_is_asked_and_answered_through_the_api(
    service: Service, container: str
) -> None:
    async with service.stream(container, "n = input('name? '); n.upper()", stdin="ask") as events:
        async for event in events:
            if event["type"] == "execution.created":
                execution_id = event["execution"]["id"]
            if event["type"] == "execution.input_required":
                assert event["prompt"] == "name? "
                reply = await service.http.post(
                    f"{container}/executions/{execution_id}/input", json={"text": "Ada"}
                )
                assert reply.status_code == 200, reply.text
            if event["type"] == "execution.completed":
                assert event["execution"]["result"] == "'ADA'"


async def test_a_reset_and_a_restart_are_told_as_lost_state(
    service: Service, container: str
) -> None:
    await service.run(container, "old = 1")
    reset = await service.run(container, "raise ValueError", reset=True)
    assert reset["state_reset"]
    assert (await service.run(container, "old"))["error"]["name"] == "NameError"
    await service.run(container, "old = 1; open('kept', 'w').write('k')")
    reply = await service.http.post(f"{container}/restart")
    assert reply.status_code == 200, reply.text
    after = await service.run(container, "open('kept').read(), 'old' in dir()")
    assert (after["result"], after["state_reset"]) == ("('k', False)", True)


async def test_a_large_file_goes_up_and_down_without_growing_the_server(
    service: Service, container: str
) -> None:
    size, chunk = 200_000_000, bytes(1_000_000)
    before = service.resident_bytes()

    async def body() -> Any:
        yield b'--b\r\nContent-Disposition: form-data; name="file"; filename="big"\r\n\r\n'
        for _ in range(size // len(chunk)):
            yield chunk
        yield b"\r\n--b--\r\n"

    reply = await service.http.post(
        f"{container}/files",
        content=body(),
        headers={"Content-Type": "multipart/form-data; boundary=b"},
    )
    assert (reply.status_code, reply.json()["bytes"]) == (200, size)
    got = 0
    path = f"{container}/files/{reply.json()['id']}/content"
    async with service.http.stream("GET", path) as content:
        async for piece in content.aiter_bytes():
            got += len(piece)
    assert got == size
    assert service.resident_bytes() - before < 50_000_000


async def test_a_cell_that_writes_very_many_files_says_how_many_it_does_not_name(
    service: Service, container: str
) -> None:
    code = "for i in range(1200): open(f'{i}.txt', 'w').write('x')"
    execution = await service.run(container, code)
    assert len(execution["files"]) == 1000
    (notice,) = execution["outputs"]
    assert notice["data"]["text/plain"] == (
        "1,200 files changed; 1,000 are told here, the list of the container's files has all."
    )
