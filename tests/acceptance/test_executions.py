"""Executions over HTTP: four ways to ask, one outcome."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import anyio
import httpx2
import pytest

from tests.acceptance.conftest import TLS, Service, ServiceWith

TIMES = ("created_at", "started_at", "completed_at", "usage", "id", "execution_count")


def events_of(body: str) -> list[dict[str, Any]]:
    events = []
    for block in body.split("\n\n"):
        lines = [line for line in block.split("\n") if line and not line.startswith(":")]
        if lines:
            name, data = lines
            event = json.loads(data.removeprefix("data: "))
            assert name == f"event: {event['type']}"
            events.append(event)
    return events


def comparable(execution: dict[str, Any]) -> dict[str, Any]:
    outputs = [output | {"execution_count": None} for output in execution["outputs"]]
    kept = {key: value for key, value in execution.items() if key not in TIMES}
    return kept | {"outputs": outputs}


async def test_code_runs_and_state_stays(service: Service) -> None:
    container = await service.container()
    first = await service.run(container, "x = 41\nprint('hello')")
    assert first["object"] == "container.execution"
    assert first["id"].startswith("exec_")
    assert (first["status"], first["stdout"]) == ("completed", "hello\n")
    second = await service.run(container, "x + 1")
    assert second["result"] == "42"
    assert second["execution_count"] == first["execution_count"] + 1


async def test_the_users_exception_is_a_result(service: Service) -> None:
    execution = await service.run(await service.container(), "raise ValueError('boom')")
    assert execution["status"] == "completed"
    assert execution["error"]["name"] == "ValueError"
    assert execution["failure"] is None


async def test_four_ways_to_ask_give_the_same_outcome(service: Service) -> None:
    code = "print('a')\nopen('out.txt', 'w').write('x')\n1 + 1"
    container = await service.container()
    path = f"/v1/containers/{container}/executions"
    await service.run(container, code)
    sync = await service.run(container, code)
    streamed = events_of((await service.http.post(path, json={"code": code, "stream": True})).text)
    begun = await service.run(container, code, background=True)
    replay = events_of((await service.http.get(f"{path}/{begun['id']}?stream=true")).text)
    polled = (await service.http.get(f"{path}/{begun['id']}")).json()
    assert begun["status"] in {"queued", "in_progress"}
    assert [event["type"] for event in streamed] == [event["type"] for event in replay]
    assert [event["sequence_number"] for event in streamed] == list(range(len(streamed)))
    assert streamed[-1]["type"] == "execution.completed"
    outcomes = [sync, streamed[-1]["execution"], replay[-1]["execution"], polled]
    assert [comparable(outcome) for outcome in outcomes] == [comparable(sync)] * 4
    assert replay[-1]["execution"] == polled


async def test_a_stream_shows_output_while_the_code_runs(service: Service) -> None:
    container = await service.container()
    body = {"code": "print('early')\nwait('go')\nprint('late')", "stream": True}
    seen = []
    with anyio.fail_after(10):
        async with service.http.stream(
            "POST", f"/v1/containers/{container}/executions", json=body
        ) as reply:
            assert reply.headers["content-type"].startswith("text/event-stream")
            assert reply.headers["x-request-id"]
            async for line in reply.aiter_lines():
                if line.startswith("data: "):
                    seen.append(json.loads(line.removeprefix("data: ")))
                    if seen[-1]["type"] == "execution.output":
                        service.dispatcher.gates.open("go")
    assert seen[-1]["execution"]["stdout"] == "early\nlate\n"


async def test_a_resumed_stream_loses_and_doubles_nothing(service: Service) -> None:
    container = await service.container()
    path = f"/v1/containers/{container}/executions"
    begun = await service.run(
        container, "for i in range(20):\n    print(i)\nwait('go')\nprint('end')", background=True
    )
    seen: list[dict[str, Any]] = []
    with anyio.fail_after(10):
        while not seen or seen[-1]["type"] != "execution.completed":
            after = seen[-1]["sequence_number"] if seen else -1
            async with service.http.stream(
                "GET", f"{path}/{begun['id']}?stream=true&starting_after={after}"
            ) as reply:
                async for line in reply.aiter_lines():
                    if line.startswith("data: "):
                        seen.append(json.loads(line.removeprefix("data: ")))
                        break
            if len(seen) == 5:
                service.dispatcher.gates.open("go")
    assert [event["sequence_number"] for event in seen] == list(range(len(seen)))
    assert seen[-1]["execution"]["stdout"].endswith("19\nend\n")


async def test_following_a_run_does_not_end_it(service: Service) -> None:
    container = await service.container()
    path = f"/v1/containers/{container}/executions"
    begun = await service.run(container, "wait('go')\n7", background=True)
    async with service.http.stream("GET", f"{path}/{begun['id']}?stream=true") as reply:
        async for line in reply.aiter_lines():
            if line:
                break
    service.dispatcher.gates.open("go")
    done = events_of((await service.http.get(f"{path}/{begun['id']}?stream=true")).text)
    assert done[-1]["execution"]["result"] == "7"


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_interrupts_its_foreground_run(
    service: Service, stream: bool
) -> None:
    container = await service.container()
    path = f"/v1/containers/{container}/executions"
    body = {"code": "print('a')\nwait('never')", "stream": stream}
    with anyio.fail_after(10):
        call = asyncio.create_task(service.http.post(path, json=body))
        await service.dispatcher.gates.reached("never")
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        await service.dispatcher.settled(container)
    (left,) = (await service.http.get(path)).json()["data"]
    assert (left["status"], left["stdout"]) == ("cancelled", "a\n")
    assert (await service.run(container, "2"))["result"] == "2"


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_does_not_end_a_background_run(
    service: Service, stream: bool
) -> None:
    container = await service.container()
    path = f"/v1/containers/{container}/executions"
    body = {"code": "wait('go')\n3", "stream": stream, "background": True}
    async with service.http.stream("POST", path, json=body) as reply:
        async for line in reply.aiter_lines():
            if line:
                break
    service.dispatcher.gates.open("go")
    (execution,) = (await service.http.get(path)).json()["data"]
    followed = events_of((await service.http.get(f"{path}/{execution['id']}?stream=true")).text)
    assert followed[-1]["execution"]["result"] == "3"


async def test_a_running_execution_can_be_cancelled(service: Service) -> None:
    container = await service.container()
    path = f"/v1/containers/{container}/executions"
    begun = await service.run(container, "x = 1\nwait('never')", background=True)
    cancelled = await service.http.post(f"{path}/{begun['id']}/cancel")
    assert cancelled.status_code == 200
    assert cancelled.json()["status"] == "cancelled"
    again = await service.http.post(f"{path}/{begun['id']}/cancel")
    assert again.json() == cancelled.json()
    assert (await service.run(container, "x"))["result"] == "1"


async def test_input_is_asked_for_and_answered(service: Service) -> None:
    container = await service.container()
    path = f"/v1/containers/{container}/executions"
    begun = await service.run(
        container, "print('hi ' + input('name? '))", stdin="ask", background=True
    )
    with anyio.fail_after(10):
        async with service.http.stream("GET", f"{path}/{begun['id']}?stream=true") as reply:
            async for line in reply.aiter_lines():
                if line.startswith("data: ") and "input_required" in line:
                    assert json.loads(line[6:])["prompt"] == "name? "
                    answer = await service.http.post(
                        f"{path}/{begun['id']}/input", json={"text": "Ada"}
                    )
                    assert answer.status_code == 200
                if line.startswith("data: ") and "execution.completed" in line:
                    assert json.loads(line[6:])["execution"]["stdout"].endswith("hi Ada\n")
    late = await service.http.post(f"{path}/{begun['id']}/input", json={"text": "Bob"})
    assert late.status_code == 400
    assert late.json()["error"]["code"] == "not_waiting_for_input"


async def test_input_without_anybody_to_answer_is_an_error(service: Service) -> None:
    execution = await service.run(await service.container(), "input('name? ')")
    assert execution["error"]["name"] == "StdinNotImplementedError"


async def test_the_time_limit_keeps_what_was_printed(service: Service) -> None:
    execution = await service.run(
        await service.container(), "print('a')\nwait('never')", timeout_seconds=0.2
    )
    assert (execution["status"], execution["stdout"]) == ("timed_out", "a\n")
    assert execution["failure"]["code"] == "timeout"


async def test_a_kernel_that_dies_is_named_and_the_next_run_knows(service: Service) -> None:
    container = await service.container()
    died = await service.run(container, "x = 1\nos._exit(3)")
    assert (died["status"], died["failure"]["code"]) == ("failed", "kernel_died")
    after = await service.run(container, "x")
    assert after["error"]["name"] == "NameError"
    assert after["state_reset"] is True
    assert (await service.run(container, "1"))["state_reset"] is False


async def test_executions_run_in_the_order_they_came(service: Service) -> None:
    container = await service.container()
    begun = [
        await service.run(container, f"print({number})", background=True) for number in range(3)
    ]
    last = f"/v1/containers/{container}/executions/{begun[-1]['id']}?stream=true"
    events_of((await service.http.get(last)).text)
    listed = await service.http.get(f"/v1/containers/{container}/executions?order=asc")
    counts = [execution["execution_count"] for execution in listed.json()["data"]]
    assert counts == sorted(counts)


async def test_a_full_queue_is_429_with_retry_after(service: Service) -> None:
    container = await service.container()
    path = f"/v1/containers/{container}/executions"
    for _ in range(5):
        await service.run(container, "wait('go')", background=True)
    for body in ({"code": "1"}, {"code": "1", "stream": True}, {"code": "1", "background": True}):
        refused = await service.http.post(path, json=body)
        assert refused.status_code == 429
        assert refused.json()["error"]["code"] == "queue_full"
        assert refused.headers["retry-after"] == "1"
        assert refused.headers["x-should-retry"] == "true"
    service.dispatcher.gates.open("go")


async def test_the_same_idempotency_key_runs_code_once(service: Service) -> None:
    container = await service.container()
    path = f"/v1/containers/{container}/executions"
    await service.run(container, "x = 0")
    headers = {"idempotency-key": "k" * 255}
    body = {"code": "x = x + 1\nx"}
    first = await service.http.post(path, json=body, headers=headers)
    second = await service.http.post(path, json=body, headers=headers)
    streamed = await service.http.post(path, json=body | {"stream": True}, headers=headers)
    assert first.json() == second.json() == events_of(streamed.text)[-1]["execution"]
    assert (await service.run(container, "x"))["result"] == "1"
    other = await service.http.post(path, json={"code": "2"}, headers=headers)
    assert other.status_code == 400
    assert other.json()["error"]["code"] == "idempotency_key_reused"
    too_long = await service.http.post(path, json=body, headers={"idempotency-key": "k" * 256})
    assert (too_long.status_code, too_long.json()["error"]["param"]) == (400, "Idempotency-Key")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({}, "code"),
        ({"code": 1}, "code"),
        ({"code": None}, "code"),
        ({"code": "1", "timeout_seconds": 0}, "timeout_seconds"),
        ({"code": "1", "timeout_seconds": -1}, "timeout_seconds"),
        ({"code": "1", "timeout_seconds": 601}, "timeout_seconds"),
        ({"code": "1", "timeout_seconds": "5"}, "timeout_seconds"),
        ({"code": "1", "stream": "yes"}, "stream"),
        ({"code": "1", "background": 1}, "background"),
        ({"code": "1", "stdin": "maybe"}, "stdin"),
        ({"code": "1", "reset": "no"}, "reset"),
    ],
)
async def test_a_bad_field_is_a_400_that_names_it(
    service: Service, fields: dict[str, Any], param: str
) -> None:
    container = await service.container()
    refused = await service.http.post(f"/v1/containers/{container}/executions", json=fields)
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == param
    assert refused.json()["error"]["type"] == "invalid_request_error"


async def test_unknown_fields_and_parameters_are_ignored(service: Service) -> None:
    container = await service.container()
    reply = await service.http.post(
        f"/v1/containers/{container}/executions?api-version=2025&include%5B%5D=a&include%5B%5D=b",
        json={"code": "1", "whatever": {"deep": [1]}},
        headers={"accept": "application/binary"},
    )
    assert (reply.status_code, reply.headers["content-type"]) == (200, "application/json")


async def test_a_fault_after_the_start_is_502_and_never_retried(service: Service) -> None:
    container = await service.container()
    path = f"/v1/containers/{container}/executions"
    broken = await service.http.post(path, json={"code": "break_dispatcher()"})
    assert broken.status_code == 502
    assert broken.json()["error"]["code"] == "outcome_unknown"
    assert broken.headers["x-should-retry"] == "false"
    assert broken.headers["x-execution-id"].startswith("exec_")
    assert "DispatcherBroken" not in broken.text
    streamed = await service.http.post(path, json={"code": "break_dispatcher()", "stream": True})
    error = events_of(streamed.text)[-1]
    assert (error["type"], error["error"]["code"]) == ("error", "outcome_unknown")
    assert error["execution_id"].startswith("exec_")


async def test_a_long_code_is_a_400_and_a_longer_body_a_413(service: Service) -> None:
    container = await service.container()
    path = f"/v1/containers/{container}/executions"
    long = await service.http.post(path, json={"code": "#" * (10 * 1024 * 1024 + 1)})
    assert (long.status_code, long.json()["error"]["param"]) == (400, "code")
    allowed = await service.http.post(path, json={"code": "#" * (10 * 1024 * 1024)})
    assert allowed.status_code == 200
    longer = await service.http.post(
        path, content=b" " * (17 * 1024 * 1024), headers={"content-type": "application/json"}
    )
    assert longer.status_code == 413
    assert "16 MB" in longer.json()["error"]["message"]


async def test_executions_are_listed_page_by_page(service: Service) -> None:
    container = await service.container()
    path = f"/v1/containers/{container}/executions"
    made = [(await service.run(container, str(number)))["id"] for number in range(5)]
    seen: list[str] = []
    after = ""
    while True:
        page = (await service.http.get(f"{path}?order=asc&limit=2{after}")).json()
        seen += [item["id"] for item in page["data"]]
        assert (page["object"], page["last_id"]) == ("list", page["data"][-1]["id"])
        if not page["has_more"]:
            break
        after = f"&after={page['last_id']}"
    assert seen == made


async def test_a_page_of_large_executions_ends_early(service: Service) -> None:
    container = await service.container()
    made = [(await service.run(container, "print('x' * 4000000)"))["id"] for _ in range(7)]
    path = f"/v1/containers/{container}/executions?order=asc&limit=100"
    first = (await service.http.get(path)).json()
    assert [item["id"] for item in first["data"]] == made[:5]
    assert (first["has_more"], first["first_id"], first["last_id"]) == (True, made[0], made[4])
    rest = (await service.http.get(f"{path}&after={made[4]}")).json()
    assert [item["id"] for item in rest["data"]] == made[5:]
    assert rest["has_more"] is False


async def test_a_silent_stream_is_kept_alive_by_comments(
    service_with: ServiceWith, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("orchestrator.event_stream.PING_SECONDS", 0.05)
    async with service_with() as service:
        container = await service.container()
        begun = await service.run(container, "wait('go')", background=True)
        path = f"/v1/containers/{container}/executions/{begun['id']}?stream=true"
        pings = 0
        with anyio.fail_after(10):
            async with service.http.stream("GET", path) as reply:
                async for line in reply.aiter_lines():
                    pings += line == ": ping"
                    if pings == 3:
                        service.dispatcher.gates.open("go")
        assert pings >= 3


async def test_the_stream_ends_with_its_closing_chunk(service: Service) -> None:
    container = await service.container()
    body = b'{"code": "print(1)", "stream": true}'
    port = httpx2.URL(service.url).port
    with anyio.fail_after(10):
        async with await anyio.connect_tcp("127.0.0.1", port or 0) as raw:
            await raw.send(
                f"POST /v1/containers/{container}/executions HTTP/1.1\r\nHost: localhost\r\n"
                f"Authorization: Bearer {service.key}\r\nContent-Type: application/json\r\n"
                f"Content-Length: {len(body)}\r\n\r\n".encode()
                + body
            )
            answer = b""
            while not answer.endswith(b"0\r\n\r\n"):
                answer += await raw.receive()
    assert b"event: execution.completed\n" in answer
    assert b"\r\nserver:" not in answer.lower()


async def test_a_stop_of_the_server_interrupts_foreground_runs_and_says_so(
    service_with: ServiceWith,
) -> None:
    async with httpx2.AsyncClient(verify=TLS, timeout=20) as client:
        with anyio.fail_after(20):
            async with service_with() as service:
                container = await service.container()
                call = asyncio.create_task(
                    client.post(
                        f"{service.url}/v1/containers/{container}/executions",
                        json={"code": "wait('never')"},
                        headers={"api-key": service.key},
                    )
                )
                await service.dispatcher.gates.reached("never")
            reply = await call
    assert reply.status_code == 502
    assert reply.json()["error"]["code"] == "outcome_unknown"
    assert reply.headers["x-should-retry"] == "false"
    assert reply.headers["x-request-id"]
