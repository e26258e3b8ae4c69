"""The OpenAPI document. Above: app.py and routes/, which describe themselves with what is here.

Below: schema.py. Bodies are read by our own code (limits, streaming, one error envelope), so what
the framework cannot see of them is added here. The document names every status a route can answer
with; a test calls every route and holds it to that.
"""

from __future__ import annotations

from typing import Any, Final

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from orchestrator.schema import (
    AnswerInput,
    CreateContainer,
    CreateContainerFile,
    CreateExecution,
    ErrorBody,
    ExecutionEventObject,
)

REFERENCE: Final = "#/components/schemas/{model}"

OWN_SHAPES: Final = (
    CreateContainer,
    CreateContainerFile,
    CreateExecution,
    AnswerInput,
    ExecutionEventObject,
)
"""Shapes that the framework does not see."""

_ERRORS: Final = {
    400: "A parameter or field is wrong; `param` names it.",
    401: "No API key, or a wrong one.",
    403: "The Host or Origin is not one that is served.",
    404: "Unknown id, one of another tenant, or an expired container.",
    413: "Larger than the limit, which the message names.",
    415: "Another content type than the route takes.",
    416: "The range lies outside the file.",
    429: "Used up for now; `retry-after` says when to try again.",
    502: "The connection to the running code broke: it may or may not have run.",
    503: "A part of the service is away; no code ran; try again.",
}

_EVENT: Final = {
    "type": "object",
    "required": ["event", "data"],
    "properties": {
        "event": {"type": "string", "description": "The `type` of the data."},
        "data": {
            "type": "string",
            "contentMediaType": "application/json",
            "contentSchema": {"$ref": REFERENCE.format(model="ExecutionEventObject")},
        },
    },
}
"""One server-sent event."""

Responses = dict[int | str, dict[str, Any]]


def answers(shape: type[BaseModel], *errors: int, stream: bool = False) -> Responses:
    """The replies of a route that answers JSON; what the gate and the store add is implied."""
    success: dict[str, Any] = {"model": shape, "description": "Done."}
    if stream:
        success["content"] = {"text/event-stream": {"itemSchema": _EVENT}}
    return {200: success} | refusals(*errors)


def refusals(*errors: int) -> Responses:
    """The error replies of a route."""
    return {
        status: {"model": ErrorBody, "description": _ERRORS[status]}
        for status in sorted({401, 403, 503, *errors})
    }


def json_body(shape: type[BaseModel], **other_types: Any) -> dict[str, Any]:
    """The request body of a route that reads it itself."""
    content = {"application/json": {"schema": {"$ref": REFERENCE.format(model=shape.__name__)}}}
    return {"requestBody": {"required": True, "content": content | other_types}}


def describe(app: FastAPI) -> dict[str, Any]:
    """The whole document."""
    document = get_openapi(
        title="kernelpool",
        version=app.version,
        description="Live IPython kernels in containers. Errors share one envelope; every answer "
        "carries `x-request-id`.",
        routes=app.routes,
    )
    components = document.setdefault("components", {})
    schemas = components.setdefault("schemas", {})
    _, shapes = models_json_schema(
        [(shape, "validation") for shape in OWN_SHAPES], ref_template=REFERENCE
    )
    schemas.update(shapes["$defs"])
    components["securitySchemes"] = {
        "bearer": {"type": "http", "scheme": "bearer"},
        "apiKey": {"type": "apiKey", "in": "header", "name": "api-key"},
    }
    document["security"] = [{"bearer": []}, {"apiKey": []}]
    for operations in document["paths"].values():
        for operation in operations.values():
            # The framework assumes its own answer to a bad parameter; ours is a 400.
            operation["responses"].pop("422", None)
    schemas.pop("HTTPValidationError", None)
    schemas.pop("ValidationError", None)
    return document
