"""The OpenAPI document says what the server does, and the server does nothing else."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anyio
import pytest

from tests.acceptance.conftest import Service

CHECKS = (
    "not_a_server_error,status_code_conformance,content_type_conformance,"
    "response_schema_conformance,unsupported_method,allow_header_conformance,ignored_auth"
)


async def document_of(service: Service) -> dict[str, Any]:
    reply = await service.http.get("/openapi.json")
    assert reply.status_code == 200
    document: dict[str, Any] = reply.json()
    return document


def references(node: Any) -> Iterator[str]:
    if isinstance(node, dict):
        if isinstance(node.get("$ref"), str):
            yield node["$ref"]
        for value in node.values():
            yield from references(value)
    elif isinstance(node, list):
        for value in node:
            yield from references(value)


async def test_the_document_is_complete_in_itself(service: Service) -> None:
    document = await document_of(service)
    schemas = document["components"]["schemas"]
    for reference in references(document):
        assert reference.removeprefix("#/components/schemas/") in schemas
    operations = [operation for path in document["paths"].values() for operation in path.values()]
    ids = [operation["operationId"] for operation in operations]
    assert len(ids) == len(set(ids))
    for operation in operations:
        assert "422" not in operation["responses"]
        for status, reply in operation["responses"].items():
            if int(status) >= 400:
                assert reply["content"]["application/json"]["schema"] == {
                    "$ref": "#/components/schemas/ErrorBody"
                }
    assert document["security"] == [{"bearer": []}, {"apiKey": []}]


async def test_routes_are_described_once_under_v1(service: Service) -> None:
    paths = set((await document_of(service))["paths"])
    below = "/v1/containers/{container_id}"
    assert paths == {
        "/v1/containers",
        below,
        f"{below}/restart",
        f"{below}/files",
        f"{below}/files/{{file_id}}",
        f"{below}/files/{{file_id}}/content",
        f"{below}/executions",
        f"{below}/executions/{{execution_id}}",
        f"{below}/executions/{{execution_id}}/cancel",
        f"{below}/executions/{{execution_id}}/input",
        "/healthz",
        "/readyz",
        "/metrics",
    }


@pytest.mark.parametrize("ids", ["real", pytest.param("random", marks=pytest.mark.slow)])
async def test_generated_requests_find_no_fault_and_no_undocumented_answer(
    service: Service, tmp_path: Path, ids: str
) -> None:
    config = ""
    if ids == "real":
        container = await service.container()
        execution = await service.run(container, "print(1)\nopen('a', 'w').write('x')\n2")
        config = (
            f'[parameters]\ncontainer_id = "{container}"\nexecution_id = "{execution["id"]}"\n'
            f'file_id = "{execution["files"][0]["id"]}"\n'
        )
    await anyio.Path(tmp_path, "schemathesis.toml").write_text(config, encoding="utf-8")
    with anyio.fail_after(100):
        ran = await anyio.run_process(
            [
                *(sys.executable, "-m", "schemathesis.cli"),
                *("--config-file", str(tmp_path / "schemathesis.toml"), "run"),
                *(f"{service.url}/openapi.json", "-H", f"Authorization: Bearer {service.key}"),
                *("--checks", CHECKS, "--max-examples", "5", "--no-shrink", "--seed", "1"),
                *("--phases", "coverage,fuzzing", "--request-timeout", "20", "--warnings", "off"),
                *("--exclude-operation-id", "delete_container"),
                *("--exclude-operation-id", "delete_container_file"),
            ],
            check=False,
            cwd=tmp_path,
        )
    assert ran.returncode == 0, ran.stdout.decode()
    if ids == "real":
        assert (await service.run(container, "1"))["result"] == "1"
