"""Containers over HTTP."""

from __future__ import annotations

from typing import Any

import httpx2
import pytest

from orchestrator.sessions import EndReason
from tests.acceptance.conftest import Service, ServiceWith

FIELDS = {
    "id", "object", "created_at", "name", "status", "expires_after", "last_active_at",
    "memory_limit", "network_policy", "expires_at", "idle_expires_at", "ended_at", "end_reason",
}  # fmt: skip


def other_tenant(service: Service) -> dict[str, str]:
    return {"authorization": f"Bearer {service.other_key}"}


async def test_a_container_is_made_looked_at_and_deleted(service: Service) -> None:
    made = await service.http.post(
        "/v1/containers",
        json={
            "name": "my container",
            "expires_after": {"anchor": "last_active_at", "minutes": 5},
            "memory_limit": "4g",
            "network_policy": {"type": "disabled"},
            "file_ids": [],
            "skills": [],
        },
    )
    container = made.json()
    assert set(container) == FIELDS
    assert container["object"] == "container"
    assert container["status"] == "running"
    assert container["expires_after"] == {"anchor": "last_active_at", "minutes": 5}
    assert container["memory_limit"] == "4g"
    assert all(isinstance(container[at], int) for at in ("created_at", "last_active_at"))
    path = f"/v1/containers/{container['id']}"
    assert (await service.http.get(path)).json()["id"] == container["id"]
    deleted = await service.http.delete(path, headers={"content-type": "application/json"})
    assert deleted.json() == {
        "id": container["id"],
        "object": "container.deleted",
        "deleted": True,
    }
    for gone in (await service.http.get(path), await service.http.delete(path)):
        assert gone.status_code == 404
        assert gone.json()["error"]["message"] == (
            f"Container with id '{container['id']}' not found."
        )


async def test_the_defaults_are_those_of_the_settings(service_with: ServiceWith) -> None:
    async with service_with(idle_minutes=7) as service:
        container = await service.container()
        found = (await service.http.get(f"/v1/containers/{container}")).json()
        assert found["expires_after"]["minutes"] == 7
        assert found["memory_limit"] == "1g"
        assert found["network_policy"] == {"type": "disabled"}


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "name"),
        ({"name": 5}, "name"),
        ({"name": ""}, "name"),
        ({"name": "x" * 513}, "name"),
        ({"name": "x", "expires_after": {"anchor": "created_at", "minutes": 5}},
         "expires_after.anchor"),
        ({"name": "x", "expires_after": {"anchor": "last_active_at", "minutes": 0}},
         "expires_after.minutes"),
        ({"name": "x", "expires_after": {"anchor": "last_active_at", "minutes": 10081}},
         "expires_after.minutes"),
        ({"name": "x", "expires_after": {"anchor": "last_active_at"}}, "expires_after.minutes"),
        ({"name": "x", "expires_after": 5}, "expires_after"),
        ({"name": "x", "memory_limit": "2g"}, "memory_limit"),
        ({"name": "x", "memory_limit": "64g"}, "memory_limit"),
        ({"name": "x", "network_policy": {"type": "allowlist", "allowed_domains": ["a.b"]}},
         "network_policy.type"),
        ({"name": "x", "skills": [{"type": "skill_reference", "skill_id": "s"}]}, "skills"),
        ({"name": "x", "file_ids": [5]}, "file_ids.0"),
        ([], None),
        ("x", None),
    ],
)  # fmt: skip
async def test_a_bad_field_is_a_400_that_names_it(
    service: Service, body: Any, param: str | None
) -> None:
    refused = await service.http.post("/v1/containers", json=body)
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == param


async def test_an_unknown_file_to_copy_in_is_a_404(service: Service) -> None:
    refused = await service.http.post(
        "/v1/containers", json={"name": "x", "file_ids": ["file-unknown"]}
    )
    assert refused.status_code == 404
    assert refused.json()["error"]["param"] == "file_ids"


@pytest.mark.parametrize("body", [b"", b"{", b"\xff", b'{"name": "\\ud800"}', b"[" * 100_000])
async def test_what_is_no_json_is_a_400(service: Service, body: bytes) -> None:
    refused = await service.http.post(
        "/v1/containers", content=body, headers={"content-type": "application/json"}
    )
    assert refused.status_code == 400
    assert refused.json()["error"]["type"] == "invalid_request_error"


async def test_no_free_slot_is_a_429_that_may_be_tried_again(service_with: ServiceWith) -> None:
    async with service_with(slots=1) as service:
        await service.container()
        refused = await service.http.post("/v1/containers", json={"name": "x"})
        assert refused.status_code == 429
        assert refused.json()["error"]["code"] == "no_slot"
        assert refused.headers["retry-after"] == "1"


async def test_containers_are_listed_by_page_order_and_name(service: Service) -> None:
    ids = [await service.container(name=name) for name in ("a", "b", "a", "c", "a")]
    newest_first = (await service.http.get("/v1/containers?limit=2")).json()
    assert [item["id"] for item in newest_first["data"]] == ids[:2:-1]
    assert newest_first["first_id"] == ids[4]
    assert newest_first["last_id"] == ids[3]
    assert newest_first["has_more"] is True
    rest = (await service.http.get(f"/v1/containers?after={ids[3]}&order=desc")).json()
    assert [item["id"] for item in rest["data"]] == ids[2::-1]
    assert rest["has_more"] is False
    oldest_first = (await service.http.get("/v1/containers?order=asc&name=a")).json()
    assert [item["id"] for item in oldest_first["data"]] == [ids[0], ids[2], ids[4]]
    nothing = (await service.http.get("/v1/containers?name=zzz")).json()
    assert nothing == {
        "object": "list",
        "data": [],
        "first_id": None,
        "last_id": None,
        "has_more": False,
    }


@pytest.mark.parametrize(
    ("query", "param"),
    [
        ("limit=0", "limit"),
        ("limit=101", "limit"),
        ("limit=x", "limit"),
        ("order=up", "order"),
        ("after=cntr_unknown", "after"),
    ],
)
async def test_a_bad_list_parameter_is_a_400_that_names_it(
    service: Service, query: str, param: str
) -> None:
    container = await service.container()
    for path in ("", f"/{container}/files", f"/{container}/executions"):
        refused = await service.http.get(f"/v1/containers{path}?{query}")
        assert refused.status_code == 400
        assert refused.json()["error"]["param"] == param


async def test_an_expired_container_can_be_looked_at_and_deleted_but_not_used(
    service: Service,
) -> None:
    container = await service.container()
    made = await service.run(container, "open('out.txt', 'w').write('x')")
    uploaded = await service.upload(container, "in.txt", b"y")
    await service.dispatcher.close(container, reason=EndReason.IDLE)
    path = f"/v1/containers/{container}"
    found = (await service.http.get(path)).json()
    assert (found["status"], found["end_reason"]) == ("expired", "idle")
    assert isinstance(found["ended_at"], int)
    file = {"file": ("a.txt", b"z")}
    kept = made["files"][0]["id"]
    for refused in (
        await service.http.post(f"{path}/executions", json={"code": "1"}),
        await service.http.post(f"{path}/executions", json={"code": "1", "stream": True}),
        await service.http.post(f"{path}/restart"),
        await service.http.post(f"{path}/files", files=file),
        await service.http.post(f"{path}/files", json={"file_id": "file-1"}),
        await service.http.get(f"{path}/files"),
        await service.http.get(f"{path}/files/{uploaded['id']}"),
        await service.http.get(f"{path}/files/{uploaded['id']}/content"),
        await service.http.delete(f"{path}/files/{kept}"),
    ):
        assert refused.status_code == 404, refused.request
        assert refused.json()["error"]["message"] == "Container is expired."
    assert (await service.http.get(f"{path}/files/{kept}/content")).content == b"x"
    assert (await service.http.get(f"{path}/files/{kept}")).json()["path"] == "/mnt/data/out.txt"
    assert (await service.http.get(f"{path}/executions/{made['id']}")).json() == made
    assert (await service.http.delete(path)).status_code == 200
    assert (await service.http.get(path)).status_code == 404


async def test_a_restart_keeps_files_and_forgets_variables(service: Service) -> None:
    container = await service.container()
    await service.run(container, "x = 1\nopen('a.txt', 'w').write('kept')")
    restarted = await service.http.post(f"/v1/containers/{container}/restart")
    assert restarted.json()["id"] == container
    after = await service.run(container, "print(open('a.txt').read())\nx")
    assert (after["stdout"], after["error"]["name"]) == ("kept\n", "NameError")
    assert after["state_reset"] is True


async def test_only_what_counts_as_use_moves_the_idle_deadline(service: Service) -> None:
    container = await service.container()
    path = f"/v1/containers/{container}"
    run = await service.run(container, "1")
    file = await service.upload(container, "a.txt", b"x")

    async def moves(method: str, below: str, **fields: Any) -> bool:
        before = (await service.store.get_session(container, None)).idle_expires_at
        reply = await service.http.request(method, path + below, **fields)
        assert reply.status_code == 200
        return (await service.store.get_session(container, None)).idle_expires_at > before

    used = [
        await moves("GET", ""),
        await moves("POST", "/executions", json={"code": "1"}),
        await moves("POST", "/restart"),
        await moves("POST", "/files", files={"file": ("b.txt", b"y")}),
        await moves("GET", f"/files/{file['id']}/content"),
        await moves("DELETE", f"/files/{file['id']}"),
    ]
    unused = [
        await moves("GET", "/files"),
        await moves("GET", "/executions"),
        await moves("GET", f"/executions/{run['id']}"),
        await moves("GET", f"/executions/{run['id']}?stream=true"),
        await moves("POST", f"/executions/{run['id']}/cancel"),
    ]
    before = (await service.store.get_session(container, None)).idle_expires_at
    await service.http.get("/v1/containers")
    assert (await service.store.get_session(container, None)).idle_expires_at == before
    assert (used, unused) == ([True] * 6, [False] * 5)


async def test_what_belongs_to_another_tenant_is_not_found_in_the_same_words(
    service: Service,
) -> None:
    container = await service.container()
    run = await service.run(container, "1")
    file = await service.upload(container, "a.txt", b"x")

    async def answers(
        container: str, run_id: str, file_id: str, headers: dict[str, str]
    ) -> list[tuple[int, str]]:
        path = f"/v1/containers/{container}"
        replies: list[httpx2.Response] = []
        requests: list[tuple[str, str, dict[str, Any]]] = [
            ("GET", "", {}),
            ("DELETE", "", {}),
            ("POST", "/restart", {}),
            ("GET", "/files", {}),
            ("POST", "/files", {"files": {"file": ("b.txt", b"y")}}),
            ("POST", "/files", {"json": {"file_id": "file-1"}}),
            ("GET", f"/files/{file_id}", {}),
            ("GET", f"/files/{file_id}/content", {}),
            ("DELETE", f"/files/{file_id}", {}),
            ("POST", "/executions", {"json": {"code": "1"}}),
            ("POST", "/executions", {"json": {"code": "1", "stream": True}}),
            ("GET", "/executions", {}),
            ("GET", f"/executions/{run_id}", {}),
            ("POST", f"/executions/{run_id}/cancel", {}),
            ("POST", f"/executions/{run_id}/input", {"json": {"text": "x"}}),
        ]
        for method, below, fields in requests:
            reply = await service.http.request(method, path + below, headers=headers, **fields)
            replies.append(reply)
        return [(reply.status_code, reply.text.replace(container, "ID")) for reply in replies]

    foreign = await answers(container, run["id"], file["id"], other_tenant(service))
    unknown = await answers("cntr_unknown", "exec_unknown", "cfile_unknown", {})
    assert foreign == unknown
    assert {status for status, _ in foreign} == {404}
    listed = await service.http.get("/v1/containers", headers=other_tenant(service))
    assert listed.json()["data"] == []
    assert (await service.http.get(f"/v1/containers/{container}")).status_code == 200


async def test_an_id_of_another_container_is_not_found(service: Service) -> None:
    one, two = await service.container(), await service.container()
    run = await service.run(one, "1")
    file = await service.upload(one, "a.txt", b"x")
    for below in (f"files/{file['id']}", f"files/{file['id']}/content", f"executions/{run['id']}"):
        assert (await service.http.get(f"/v1/containers/{two}/{below}")).status_code == 404
    assert (
        await service.http.delete(f"/v1/containers/{two}/files/{file['id']}")
    ).status_code == 404
