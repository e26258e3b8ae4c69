"""Rules that hold on every route: keys, hosts, origins, ids, the error envelope."""

from __future__ import annotations

import io
import json
from typing import Any

import anyio
import httpx2
import pytest

from orchestrator.errors import StoreUnavailable
from tests.acceptance.conftest import Service, ServiceWith

BASES = ["/v1", "/openai/v1", "/openai", "/api/projects/my-project/openai/v1"]


def envelope(reply: httpx2.Response) -> dict[str, Any]:
    """The error of a reply, after seeing that it is one as every client expects it."""
    assert reply.headers["content-type"] == "application/json"
    assert reply.headers["x-request-id"].startswith("req_")
    body = reply.json()
    assert set(body) == {"error"}
    error: dict[str, Any] = body["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


async def raw_exchange(service: Service, request: bytes) -> bytes:
    answer = b""
    with anyio.fail_after(10):
        async with await anyio.connect_tcp("127.0.0.1", httpx2.URL(service.url).port or 0) as raw:
            await raw.send(request)
            try:
                while True:
                    answer += await raw.receive()
            except anyio.EndOfStream:
                return answer


@pytest.mark.parametrize("base", BASES)
async def test_every_base_path_leads_to_the_same_objects(service: Service, base: str) -> None:
    made = await service.http.post(
        f"{base}/containers?api-version=2025-04-01-preview", json={"name": "x"}
    )
    container = made.json()["id"]
    ran = await service.http.post(f"{base}/containers/{container}/executions", json={"code": "1"})
    assert ran.json()["result"] == "1"
    assert (await service.http.get(f"/v1/containers/{container}")).status_code == 200


@pytest.mark.parametrize("base", BASES)
async def test_both_kinds_of_key_are_accepted_everywhere(service: Service, base: str) -> None:
    async with httpx2.AsyncClient(base_url=service.url, verify=False) as http:
        for headers in (
            {"authorization": f"Bearer {service.key}"},
            {"authorization": f"bearer  {service.key}"},
            {"api-key": service.key},
        ):
            reply = await http.get(f"{base}/containers", headers=headers)
            assert reply.status_code == 200


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"authorization": "Bearer wrong"},
        {"authorization": "Bearer"},
        {"authorization": "Basic abc"},
        {"api-key": "wrong"},
        {"api-key": ""},
    ],
)
async def test_no_key_or_a_wrong_one_is_a_401(service: Service, headers: dict[str, str]) -> None:
    async with httpx2.AsyncClient(base_url=service.url, verify=False) as http:
        for method, path in (
            ("GET", "/v1/containers"),
            ("POST", "/v1/containers"),
            ("GET", "/v1/no/such/route"),
            ("GET", "/metrics"),
        ):
            refused = await http.request(method, path, headers=headers)
            assert refused.status_code == 401
            error = envelope(refused)
            assert error["code"] == "invalid_api_key"
            assert error["type"] == "invalid_request_error"
            assert refused.headers["www-authenticate"] == "Bearer"


async def test_without_keys_this_machine_is_answered(service_with: ServiceWith) -> None:
    async with service_with(with_keys=False) as service:
        container = await service.container()
        assert (await service.run(container, "1"))["result"] == "1"
        ignored = await service.http.get(
            "/v1/containers", headers={"authorization": "Bearer whatever"}
        )
        assert ignored.status_code == 200


@pytest.mark.parametrize("path", ["/v1/containers", "/healthz", "/openapi.json", "/nowhere"])
async def test_a_foreign_host_or_origin_is_a_403_on_every_route(
    service: Service, path: str
) -> None:
    for headers in (
        {"host": "evil.example"},
        {"origin": "https://evil.example"},
        {"origin": "null"},
        {"origin": "http://localhost:1"},
    ):
        refused = await service.http.get(path, headers=headers)
        assert refused.status_code == 403
        envelope(refused)
    preflight = await service.http.options(path, headers={"origin": "https://evil.example"})
    assert preflight.status_code == 403
    assert not [name for name in preflight.headers if name.startswith("access-control")]


async def test_a_configured_host_and_its_own_pages_are_served(service_with: ServiceWith) -> None:
    async with service_with(allowed_hosts=("code.example.com",)) as service:
        for headers in (
            {"host": "code.example.com"},
            {"host": "code.example.com:8443", "origin": "https://code.example.com:8443"},
            {"origin": service.url},
        ):
            reply = await service.http.get("/v1/containers", headers=headers)
            assert reply.status_code == 200


async def test_two_host_headers_are_refused(service: Service) -> None:
    answer = await raw_exchange(
        service,
        b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nHost: evil.example\r\n"
        b"Connection: close\r\n\r\n",
    )
    assert answer.startswith(b"HTTP/1.1 403 ")


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/", 404, "unknown_route"),
        ("GET", "/v1", 404, "unknown_route"),
        ("GET", "/v1/", 404, "unknown_route"),
        ("GET", "/v1/containers/", 404, "unknown_route"),
        ("GET", "/v1/models", 404, "unknown_route"),
        ("GET", "/docs", 404, "unknown_route"),
        ("GET", "/v1/containers/x/variables", 404, "unknown_route"),
        ("PUT", "/v1/containers", 405, None),
        ("PATCH", "/v1/containers/x", 405, None),
        ("OPTIONS", "/v1/containers", 405, None),
        ("TRACE", "/v1/containers", 405, None),
        ("GET", "/v1/containers/x/restart", 405, None),
    ],
)
async def test_an_unknown_route_or_method_is_answered_in_the_envelope(
    service: Service, method: str, path: str, status: int, code: str | None
) -> None:
    refused = await service.http.request(method, path)
    assert refused.status_code == status
    assert envelope(refused)["code"] == code
    assert "<" not in refused.text


async def test_a_405_names_every_method_of_the_path(service: Service) -> None:
    for path, methods in (
        ("/v1/containers", "GET, POST"),
        ("/v1/containers/x", "DELETE, GET"),
        ("/v1/containers/x/files/y/content", "GET, HEAD"),
    ):
        refused = await service.http.put(path)
        assert (refused.status_code, refused.headers["allow"]) == (405, methods)


@pytest.mark.parametrize(
    "content_type",
    ["text/plain", "application/x-www-form-urlencoded", "application/jsonx", "", None],
)
async def test_json_routes_refuse_other_content_types(
    service: Service, content_type: str | None
) -> None:
    container = await service.container()
    run = await service.run(container, "1")
    path = f"/v1/containers/{container}"
    headers = {} if content_type is None else {"content-type": content_type}
    for below, body in (
        ("/executions", b'{"code": "1"}'),
        (f"/executions/{run['id']}/input", b'{"text": "x"}'),
        (f"/executions/{run['id']}/cancel", b"{}"),
        ("/restart", b"{}"),
    ):
        refused = await service.http.post(path + below, content=body, headers=headers)
        assert refused.status_code == 415
        envelope(refused)
    refused = await service.http.post("/v1/containers", content=b"{}", headers=headers)
    assert refused.status_code == 415


async def test_json_may_name_its_charset_and_bodiless_calls_need_no_type(service: Service) -> None:
    made = await service.http.post(
        "/v1/containers",
        content='{"name": "ü"}'.encode(),
        headers={"content-type": "Application/JSON; charset=utf-8"},
    )
    assert made.json()["name"] == "ü"
    path = f"/v1/containers/{made.json()['id']}"
    assert (await service.http.post(f"{path}/restart")).status_code == 200
    deleted = await service.http.request(
        "DELETE", path, content=b"{not json", headers={"content-type": "text/plain"}
    )
    assert deleted.status_code == 200


async def test_every_reply_has_a_request_id_of_its_own_and_no_server_name(
    service: Service,
) -> None:
    seen = set()
    for path in ("/v1/containers", "/healthz", "/nowhere", "/metrics", "/openapi.json"):
        reply = await service.http.get(path, headers={"x-request-id": "mine"})
        seen.add(reply.headers["x-request-id"])
        assert "server" not in reply.headers
    assert len(seen) == 5


async def test_what_is_no_http_is_answered_in_the_envelope(service: Service) -> None:
    answer = await raw_exchange(service, b"NO HTTP AT ALL\r\n\r\n")
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400 ")
    assert b"x-request-id: req_" in head
    assert json.loads(body)["error"]["type"] == "invalid_request_error"


async def test_a_head_that_never_ends_is_cut_off(service: Service) -> None:
    endless = b"GET / HTTP/1.1\r\nHost: localhost\r\n" + b"X-Filler: y\r\n" * 200_000
    answer = b""
    with anyio.fail_after(10):
        async with await anyio.connect_tcp("127.0.0.1", httpx2.URL(service.url).port or 0) as raw:
            try:
                await raw.send(endless)
            except anyio.BrokenResourceError:
                pass
            try:
                answer = await raw.receive()
            except (anyio.EndOfStream, anyio.BrokenResourceError):
                return
    assert answer.startswith(b"HTTP/1.1 431 ")


async def test_a_fault_of_ours_shows_nothing_of_itself(
    service: Service, monkeypatch: pytest.MonkeyPatch, logged: io.StringIO
) -> None:
    async def broken(*_: Any, **__: Any) -> None:
        raise RuntimeError("secret detail")

    monkeypatch.setattr(service.store, "touch_session", broken)
    failed = await service.http.get("/v1/containers/cntr_x")
    assert failed.status_code == 500
    assert envelope(failed)["type"] == "server_error"
    assert "secret" not in failed.text
    assert "Traceback" not in failed.text
    assert failed.headers["x-request-id"] in logged.getvalue()
    assert "secret detail" in logged.getvalue()


async def test_the_store_being_away_is_a_503_that_may_be_tried_again(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def away(*_: Any, **__: Any) -> None:
        raise StoreUnavailable("Redis does not answer.", retry_after=1)

    container = await service.container()
    for name in ("ping", "get_session", "touch_session", "list_sessions", "create_session"):
        monkeypatch.setattr(service.store, name, away)
    path = f"/v1/containers/{container}"
    for method, below, body in (
        ("GET", "/v1/containers", None),
        ("POST", "/v1/containers", {"name": "x"}),
        ("GET", path, None),
        ("POST", f"{path}/executions", {"code": "1"}),
        ("POST", f"{path}/executions", {"code": "1", "stream": True}),
        ("GET", "/readyz", None),
    ):
        refused = await service.http.request(method, below, json=body)
        assert refused.status_code == 503
        assert envelope(refused)["code"] == "store_unavailable"
        assert refused.headers["retry-after"] == "1"
        assert refused.headers["x-should-retry"] == "true"
    assert (await service.http.get("/healthz")).status_code == 200


async def test_no_redis_at_all_is_not_ready(service_with: ServiceWith) -> None:
    async with service_with(redis="unix:///nowhere/redis.sock") as service:
        assert (await service.http.get("/healthz")).json() == {"status": "ok"}
        refused = await service.http.get("/readyz")
        assert (refused.status_code, envelope(refused)["code"]) == (503, "store_unavailable")
        assert (await service.http.get("/v1/containers")).status_code == 503


async def test_health_needs_no_key(service: Service) -> None:
    async with httpx2.AsyncClient(base_url=service.url, verify=False) as http:
        assert (await http.get("/healthz")).json() == {"status": "ok"}
        assert (await http.get("/readyz")).json() == {"status": "ready"}


async def test_metrics_count_what_happened(service_with: ServiceWith) -> None:
    async with service_with() as service:
        container = await service.container()
        await service.run(container, "1")
        await service.run(container, "os._exit(1)")
        await service.upload(container, "a.txt", b"12345")
        await service.http.get("/no/such/route")
        reply = await service.http.get("/metrics")
        assert reply.headers["content-type"].startswith("text/plain; version=0.0.4")
        samples = dict(
            line.rsplit(" ", 1) for line in reply.text.splitlines() if not line.startswith("#")
        )
    assert samples['kernelpool_executions_total{status="completed",failure=""}'] == "1"
    assert samples['kernelpool_executions_total{status="failed",failure="kernel_died"}'] == "1"
    assert samples["kernelpool_uploaded_bytes_total"] == "5"
    assert samples["kernelpool_http_requests_in_flight"] == "1"
    unmatched = 'kernelpool_http_requests_total{method="GET",route="unmatched",status="404"}'
    assert samples[unmatched] == "1"
    assert not [name for name in samples if container in name]


async def test_logs_hold_no_code_no_file_and_no_key(service: Service, logged: io.StringIO) -> None:
    container = await service.container()
    await service.run(container, "secret_code = 1\nraise ValueError('secret_value')")
    await service.upload(container, "secret_name.txt", b"secret_content")
    await service.http.get("/v1/containers?limit=0&after=secret_query")
    lines = logged.getvalue()
    assert "request answered" in lines
    assert service.key not in lines
    for secret in ("secret_code", "secret_value", "secret_name", "secret_content", "secret_query"):
        assert secret not in lines
