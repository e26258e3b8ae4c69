"""Container files over HTTP."""

from __future__ import annotations

import asyncio
import hashlib
import resource
from collections.abc import AsyncIterator
from typing import Any
from urllib.parse import unquote

import anyio
import httpx2
import pytest

from tests.acceptance.conftest import Service, ServiceWith

NAMES = [
    "my file (1).csv", "génération.js", "数据.csv", "😱.txt", "a#b&c%20.txt", "-rf", "trailing.",
    'say "hi".txt', "semi;colon=1.txt", "ünïcödé " * 9 + ".md",
]  # fmt: skip


async def test_a_file_is_uploaded_listed_read_and_deleted(service: Service) -> None:
    container = await service.container()
    path = f"/v1/containers/{container}/files"
    file = await service.upload(container, "data.csv", b"a,b\n1,2\n")
    assert file == {
        "id": file["id"],
        "object": "container.file",
        "bytes": 8,
        "container_id": container,
        "created_at": file["created_at"],
        "path": "/mnt/data/data.csv",
        "source": "user",
    }
    assert (await service.http.get(path)).json()["data"] == [file]
    assert (await service.http.get(f"{path}/{file['id']}")).json() == file
    content = await service.http.get(f"{path}/{file['id']}/content")
    assert content.content == b"a,b\n1,2\n"
    assert (await service.run(container, "print(open('data.csv').read())"))[
        "stdout"
    ] == "a,b\n1,2\n\n"
    deleted = await service.http.delete(
        f"{path}/{file['id']}", headers={"content-type": "application/json"}
    )
    assert deleted.json() == {
        "id": file["id"],
        "object": "container.file.deleted",
        "deleted": True,
    }
    for gone in (
        await service.http.get(f"{path}/{file['id']}"),
        await service.http.get(f"{path}/{file['id']}/content"),
        await service.http.delete(f"{path}/{file['id']}"),
    ):
        assert gone.status_code == 404
        assert gone.json()["error"]["message"] == (
            f"Container file with id '{file['id']}' not found."
        )


@pytest.mark.parametrize("name", NAMES)
async def test_a_name_is_kept_and_comes_back_in_the_download(service: Service, name: str) -> None:
    container = await service.container()
    file = await service.upload(container, name, b"x")
    assert file["path"] == f"/mnt/data/{name}"
    reply = await service.http.get(f"/v1/containers/{container}/files/{file['id']}/content")
    disposition = reply.headers["content-disposition"]
    assert disposition.startswith("attachment; filename*=UTF-8''")
    assert unquote(disposition.removeprefix("attachment; filename*=UTF-8''")) == name
    assert reply.headers["x-content-type-options"] == "nosniff"


async def test_the_same_name_again_keeps_its_id(service: Service) -> None:
    container = await service.container()
    first = await service.upload(container, "p.csv", b"a\n1")
    second = await service.upload(container, "p.csv", b"a\n22")
    assert (second["id"], second["bytes"]) == (first["id"], 4)
    twin = await service.upload(container, "e\u0301.txt", b"nfd")
    assert (await service.upload(container, "é.txt", b"nfc"))["id"] == twin["id"]


@pytest.mark.parametrize(
    ("name", "path"),
    [
        ("../../x", "x"),
        ("..\\..\\y", "y"),
        ("/mnt/data/z", "z"),
        ("a/../../b", "b"),
        ("folder/", "folder"),
        ("n" * 300 + ".txt", "n" * 251 + ".txt"),
    ],
)
async def test_a_name_stays_below_the_workspace(service: Service, name: str, path: str) -> None:
    file = await service.upload(await service.container(), name, b"x")
    assert file["path"] == f"/mnt/data/{path}"


@pytest.mark.parametrize("name", ["..", ".", "/", "   "])
async def test_a_name_without_a_usable_part_is_a_400(service: Service, name: str) -> None:
    container = await service.container()
    refused = await service.http.post(
        f"/v1/containers/{container}/files", files={"file": (name, b"x")}
    )
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "file")


async def test_files_that_code_wrote_have_ids_too(service: Service) -> None:
    container = await service.container()
    ran = await service.run(container, "open('a/b/c.txt', 'w').write('deep')")
    (file,) = ran["files"]
    assert (file["path"], file["source"]) == ("/mnt/data/a/b/c.txt", "assistant")
    assert file["change"] == "created"
    reply = await service.http.get(f"/v1/containers/{container}/files/{file['id']}/content")
    assert reply.content == b"deep"
    assert reply.headers["content-disposition"].endswith("''c.txt")


@pytest.mark.parametrize(
    ("fields", "status", "param"),
    [
        ({"json": {"file_id": "file-unknown"}}, 404, "file_id"),
        ({"json": {}}, 400, "file_id"),
        ({"json": {"file_id": 5}}, 400, "file_id"),
        ({"files": {"other": ("a.txt", b"x")}}, 400, "file"),
        ({"files": {"file": ("a.txt", b"x")}, "data": {"file_id": "file-1"}}, 400, "file_id"),
        ({"files": {"x": (None, b"y")}, "data": {"file_id": "file-1"}}, 404, "file_id"),
        ({"files": {"file": (None, b"x")}}, 400, "file"),
        ({"data": {"file_id": "file-1"}}, 415, None),
        ({"content": b"raw"}, 415, None),
        ({"content": b"x", "headers": {"content-type": "multipart/form-data"}}, 400, None),
    ],
)
async def test_what_is_no_upload_is_refused(
    service: Service, fields: dict[str, Any], status: int, param: str | None
) -> None:
    container = await service.container()
    refused = await service.http.post(f"/v1/containers/{container}/files", **fields)
    assert (refused.status_code, refused.json()["error"]["param"]) == (status, param)
    assert (await service.http.get(f"/v1/containers/{container}/files")).json()["data"] == []


async def test_a_form_that_is_wrong_at_its_end_changes_nothing(service: Service) -> None:
    container = await service.container()
    path = f"/v1/containers/{container}/files"
    before = await service.upload(container, "a.txt", b"before")
    body = (
        b'--b\r\nContent-Disposition: form-data; name="file"; filename="a.txt"\r\n\r\nafter\r\n'
        b'--b\r\nContent-Disposition: form-data; name="file"; filename="b.txt"\r\n\r\nx\r\n--b--'
    )
    refused = await service.http.post(
        path, content=body, headers={"content-type": "multipart/form-data; boundary=b"}
    )
    assert refused.status_code == 400
    assert (await service.http.get(path)).json()["data"] == [before]
    assert (await service.http.get(f"{path}/{before['id']}/content")).content == b"before"


async def test_a_client_that_leaves_during_an_upload_changes_nothing(service: Service) -> None:
    container = await service.container()
    path = f"/v1/containers/{container}/files"
    before = await service.upload(container, "a.txt", b"before")
    sent = asyncio.Event()

    async def endless() -> AsyncIterator[bytes]:
        yield b'--b\r\nContent-Disposition: form-data; name="file"; filename="a.txt"\r\n\r\nafter'
        sent.set()
        await asyncio.Event().wait()

    with anyio.fail_after(10):
        call = asyncio.create_task(
            service.http.post(
                path,
                content=endless(),
                headers={"content-type": "multipart/form-data; boundary=b"},
            )
        )
        await sent.wait()
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
    assert (await service.http.get(path)).json()["data"] == [before]
    assert (await service.http.get(f"{path}/{before['id']}/content")).content == b"before"


async def test_an_upload_over_the_limit_is_refused_before_it_is_read(
    service_with: ServiceWith,
) -> None:
    async with service_with(max_upload_bytes=1024 * 1024) as service:
        container = await service.container()
        port = httpx2.URL(service.url).port or 0
        with anyio.fail_after(5):
            async with await anyio.connect_tcp("127.0.0.1", port) as raw:
                await raw.send(
                    f"POST /v1/containers/{container}/files HTTP/1.1\r\nHost: localhost\r\n"
                    f"Authorization: Bearer {service.key}\r\nContent-Length: 999999999\r\n"
                    "Content-Type: multipart/form-data; boundary=b\r\n"
                    "Expect: 100-continue\r\n\r\n".encode()
                )
                answer = await raw.receive()
        assert answer.startswith(b"HTTP/1.1 413 ")
        assert b"connection: close" in answer


@pytest.mark.parametrize("chunked", [False, True])
async def test_a_client_still_sending_can_read_why_its_upload_is_too_large(
    service_with: ServiceWith, chunked: bool
) -> None:
    async with service_with(max_upload_bytes=1024 * 1024) as service:
        container = await service.container()
        path = f"/v1/containers/{container}/files"
        head = b'--b\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n'
        size = 48 * 1024 * 1024

        async def body() -> AsyncIterator[bytes]:
            yield head
            for _ in range(size // 65536):
                yield bytes(65536)

        headers = {"content-type": "multipart/form-data; boundary=b"}
        if not chunked:
            headers["content-length"] = str(len(head) + size)
        with anyio.fail_after(15):
            refused = await service.http.post(path, content=body(), headers=headers)
        assert refused.status_code == 413
        assert "1 MB (1048576 bytes)" in refused.json()["error"]["message"]
        assert (await service.http.get(path)).json()["data"] == []


async def test_an_upload_at_the_limit_is_taken(service_with: ServiceWith) -> None:
    async with service_with(max_upload_bytes=1024 * 1024) as service:
        file = await service.upload(await service.container(), "a", bytes(1024 * 1024))
        assert file["bytes"] == 1024 * 1024


async def test_an_upload_over_the_disk_quota_is_a_413_of_its_own(service: Service) -> None:
    container = await service.container()
    refused = await service.http.post(
        f"/v1/containers/{container}/files", files={"file": ("a", bytes(65 * 1024 * 1024))}
    )
    assert (refused.status_code, refused.json()["error"]["code"]) == (413, "quota_exceeded")


async def test_a_large_file_passes_through_in_flat_memory(service: Service) -> None:
    container = await service.container()
    size = 60 * 1024 * 1024
    digest = hashlib.sha256()
    head = b'--b\r\nContent-Disposition: form-data; name="file"; filename="a.bin"\r\n\r\n'

    async def body() -> AsyncIterator[bytes]:
        yield head
        for number in range(size // 65536):
            block = number.to_bytes(4, "big") * 16384
            digest.update(block)
            yield block
        yield b"\r\n--b--\r\n"

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    uploaded = await service.http.post(
        f"/v1/containers/{container}/files",
        content=body(),
        headers={"content-type": "multipart/form-data; boundary=b"},
    )
    file = uploaded.json()
    assert file["bytes"] == size
    back = hashlib.sha256()
    async with service.http.stream(
        "GET", f"/v1/containers/{container}/files/{file['id']}/content"
    ) as reply:
        assert reply.headers["content-length"] == str(size)
        async for chunk in reply.aiter_bytes():
            back.update(chunk)
    assert back.digest() == digest.digest()
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 30 * 1024


async def test_a_range_is_answered_with_its_part(service: Service) -> None:
    container = await service.container()
    file = await service.upload(container, "a.txt", b"0123456789")
    path = f"/v1/containers/{container}/files/{file['id']}/content"
    part = await service.http.get(path, headers={"range": "bytes=2-4"})
    assert (part.status_code, part.content) == (206, b"234")
    assert part.headers["content-range"] == "bytes 2-4/10"
    assert part.headers["content-length"] == "3"
    rest = await service.http.get(path, headers={"range": "bytes=-3"})
    assert (rest.status_code, rest.content) == (206, b"789")
    outside = await service.http.get(path, headers={"range": "bytes=10-"})
    assert outside.status_code == 416
    assert outside.headers["content-range"] == "bytes */10"
    assert outside.json()["error"]["code"] == "range_not_satisfiable"
    whole = await service.http.get(path, headers={"range": "bytes=0-1", "if-range": '"x"'})
    assert (whole.status_code, whole.content) == (200, b"0123456789")


async def test_a_head_request_has_the_headers_and_no_body(service: Service) -> None:
    container = await service.container()
    file = await service.upload(container, "a.png", b"0123456789")
    reply = await service.http.head(f"/v1/containers/{container}/files/{file['id']}/content")
    assert (reply.status_code, reply.content) == (200, b"")
    assert reply.headers["content-length"] == "10"
    assert reply.headers["content-type"] == "image/png"
    assert reply.headers["accept-ranges"] == "bytes"
    missing = await service.http.head(f"/v1/containers/{container}/files/cfile_no/content")
    assert (missing.status_code, missing.content) == (404, b"")


async def test_an_empty_file_is_a_file(service: Service) -> None:
    container = await service.container()
    file = await service.upload(container, "empty", b"")
    assert file["bytes"] == 0
    reply = await service.http.get(f"/v1/containers/{container}/files/{file['id']}/content")
    assert (reply.status_code, reply.content) == (200, b"")


async def test_files_are_listed_page_by_page(service: Service) -> None:
    container = await service.container()
    path = f"/v1/containers/{container}/files"
    ids = [(await service.upload(container, f"{n}.txt", b"x"))["id"] for n in range(5)]
    first = (await service.http.get(f"{path}?order=asc&limit=3")).json()
    assert ([item["id"] for item in first["data"]], first["has_more"]) == (ids[:3], True)
    rest = (await service.http.get(f"{path}?order=asc&after={first['last_id']}")).json()
    assert ([item["id"] for item in rest["data"]], rest["has_more"]) == (ids[3:], False)
