"""The openai client, unmodified, against our server."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anyio
import httpx2
import openai
import pytest
from openai import AsyncAzureOpenAI, AsyncOpenAI, OpenAI

from orchestrator.sessions import EndReason
from tests.acceptance.conftest import TLS, Service, ServiceWith


@pytest.fixture
async def client(service: Service) -> AsyncIterator[AsyncOpenAI]:
    """A client as any agent makes it."""
    async with AsyncOpenAI(
        base_url=f"{service.url}/v1",
        api_key=service.key,
        max_retries=0,
        http_client=openai.DefaultAsyncHttpxClient(verify=TLS),
    ) as made:
        yield made


async def test_a_container_lives_its_life(client: AsyncOpenAI) -> None:
    made = await client.containers.create(
        name="analysis",
        expires_after={"anchor": "last_active_at", "minutes": 20},
        memory_limit="1g",
    )
    assert made.id.startswith("cntr_")
    assert (made.object, made.status, made.name) == ("container", "running", "analysis")
    assert made.expires_after is not None
    assert made.expires_after.minutes == 20
    found = await client.containers.retrieve(made.id)
    assert found.memory_limit == "1g"
    assert found.network_policy is not None
    assert found.network_policy.type == "disabled"
    await client.containers.delete(made.id)
    with pytest.raises(openai.NotFoundError) as gone:
        await client.containers.retrieve(made.id)
    assert f"Container with id '{made.id}' not found." in str(gone.value)
    assert gone.value.request_id is not None
    assert gone.value.request_id.startswith("req_")


async def test_pages_follow_each_other_by_themselves(client: AsyncOpenAI) -> None:
    made = [(await client.containers.create(name=f"c{n}")).id for n in range(5)]
    seen = [item.id async for item in await client.containers.list(limit=2, order="asc")]
    assert seen == made
    newest = [item.id async for item in await client.containers.list(limit=2)]
    assert newest == made[::-1]
    named = [item.id async for item in await client.containers.list(name="c3")]
    assert named == [made[3]]


@pytest.fixture
def report(tmp_path: Path) -> Path:
    """A file on disk."""
    path = tmp_path / "rapport é 数据.csv"
    path.write_bytes(b"a,b\n1,2\n")
    return path


async def test_files_go_up_in_every_form_the_client_knows(
    client: AsyncOpenAI, report: Path
) -> None:
    container = (await client.containers.create(name="files")).id
    given: list[tuple[Any, str, bytes]] = [
        (b"plain bytes", "upload", b"plain bytes"),
        (("naïve (1).txt", b"tuple"), "naïve (1).txt", b"tuple"),
        (("😱.json", b"{}", "application/json"), "😱.json", b"{}"),
        (("a#b&c%20.txt", b"odd"), "a#b&c%20.txt", b"odd"),
        (('say "hi".txt', b"quoted"), 'say "hi".txt', b"quoted"),
    ]
    for file, name, expected in given:
        made = await client.containers.files.create(container, file=file)
        assert made.path == f"/mnt/data/{name}"
        assert (made.bytes, made.source) == (len(expected), "user")
        back = await client.containers.files.content.retrieve(made.id, container_id=container)
        assert back.content == expected
    listed = [
        item.path async for item in await client.containers.files.list(container, order="asc")
    ]
    assert listed == [f"/mnt/data/{name}" for _, name, _ in given]


def use_the_synchronous_client(url: str, key: str, report: Path) -> None:
    with OpenAI(base_url=f"{url}/openai/v1/", api_key=key, max_retries=0) as client:
        container = client.containers.create(name="sync").id
        by_path = client.containers.files.create(container, file=report)
        assert by_path.path == f"/mnt/data/{report.name}"
        with report.open("rb") as opened:
            again = client.containers.files.create(container, file=opened)
        assert again.id == by_path.id
        found = client.containers.files.retrieve(by_path.id, container_id=container)
        assert (found.object, found.container_id) == ("container.file", container)
        with client.containers.files.content.with_streaming_response.retrieve(
            by_path.id, container_id=container
        ) as streamed:
            assert b"".join(streamed.iter_bytes()) == b"a,b\n1,2\n"
        client.containers.files.delete(by_path.id, container_id=container)
        assert list(client.containers.files.list(container)) == []
        with pytest.raises(openai.NotFoundError):
            client.containers.files.retrieve(by_path.id, container_id=container)
        client.containers.delete(container)


async def test_the_synchronous_client_uploads_paths_and_open_files(
    service: Service, report: Path
) -> None:
    with anyio.fail_after(20):
        await anyio.to_thread.run_sync(use_the_synchronous_client, service.url, service.key, report)


async def test_the_azure_client_finds_the_same_routes(service: Service) -> None:
    async with AsyncAzureOpenAI(
        azure_endpoint=service.url,
        api_version="2025-04-01-preview",
        api_key=service.key,
        max_retries=0,
        http_client=openai.DefaultAsyncHttpxClient(verify=TLS),
    ) as azure:
        made = await azure.containers.create(name="azure")
        file = await azure.containers.files.create(made.id, file=b"x")
        assert (await azure.containers.files.retrieve(file.id, container_id=made.id)).bytes == 1
    assert (await service.http.get(f"/v1/containers/{made.id}")).status_code == 200


async def test_errors_become_the_classes_of_the_client(
    client: AsyncOpenAI, service: Service
) -> None:
    container = (await client.containers.create(name="x")).id
    with pytest.raises(openai.BadRequestError) as bad:
        await client.containers.list(limit=1000)
    assert bad.value.param == "limit"
    with pytest.raises(openai.BadRequestError) as bad:
        await client.containers.create(name="x", memory_limit="64g")
    assert (bad.value.param, bad.value.code) == ("memory_limit", "memory_limit_too_large")
    with pytest.raises(openai.NotFoundError) as unknown:
        await client.containers.files.create(container, file_id="file-unknown")
    assert unknown.value.param == "file_id"
    with pytest.raises(openai.BadRequestError):
        await client.containers.files.create(container)
    with pytest.raises(openai.AuthenticationError) as wrong:
        await client.with_options(api_key="wrong").containers.list()
    assert wrong.value.code == "invalid_api_key"
    with pytest.raises(openai.PermissionDeniedError):
        await client.containers.list(extra_headers={"origin": "https://evil.example"})
    await service.dispatcher.close(container, reason=EndReason.IDLE)
    with pytest.raises(openai.NotFoundError, match="Container is expired"):
        await client.containers.files.create(container, file=b"x")
    assert (await client.containers.retrieve(container)).status == "expired"


async def test_a_full_house_is_a_rate_limit_that_the_client_retries(
    service_with: ServiceWith,
) -> None:
    async with service_with(slots=1) as service:
        calls = 0

        async def count(request: httpx2.Request) -> None:
            nonlocal calls
            calls += 1

        async with AsyncOpenAI(
            base_url=f"{service.url}/v1",
            api_key=service.key,
            max_retries=1,
            http_client=openai.DefaultAsyncHttpxClient(
                verify=TLS, event_hooks={"request": [count]}
            ),
        ) as client:
            await client.containers.create(name="first")
            with pytest.raises(openai.RateLimitError) as full:
                await client.containers.create(name="second")
            assert (full.value.code, calls) == ("no_slot", 3)


async def test_an_upload_that_is_too_large_is_told_so(service_with: ServiceWith) -> None:
    async with (
        service_with(max_upload_bytes=1024 * 1024) as service,
        AsyncOpenAI(
            base_url=f"{service.url}/v1",
            api_key=service.key,
            max_retries=0,
            http_client=openai.DefaultAsyncHttpxClient(verify=TLS),
        ) as client,
    ):
        container = (await client.containers.create(name="x")).id
        with pytest.raises(openai.APIStatusError) as large:
            await client.containers.files.create(container, file=bytes(32 * 1024 * 1024))
        assert large.value.status_code == 413


async def test_executions_stream_through_the_clients_own_decoder(
    client: AsyncOpenAI,
) -> None:
    container = (await client.containers.create(name="x")).id
    text = "line\u2028separator\u2029end"
    stream = await client.post(
        f"/containers/{container}/executions",
        body={"code": f"print({text!r})\nprint('x' * 3000000)", "stream": True},
        cast_to=object,
        stream=True,
        stream_cls=openai.AsyncStream[object],
    )
    events: list[Any] = [event async for event in stream]
    assert events[0]["type"] == "execution.created"
    assert events[-1]["execution"]["stdout"].startswith(text)
    broken = await client.post(
        f"/containers/{container}/executions",
        body={"code": "break_dispatcher()", "stream": True},
        cast_to=object,
        stream=True,
        stream_cls=openai.AsyncStream[object],
    )
    with pytest.raises(openai.APIError, match="may or may not have run"):
        [event async for event in broken]
