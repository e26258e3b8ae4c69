"""Request bodies: their limit, their content type, their JSON. Above: routes/. Below: errors.py.

A body that says it is too long is refused before a byte of it is read; one that does not say is cut
at the limit. Nothing else in this package reads a body.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Final, TypeVar

from pydantic import BaseModel, ValidationError
from starlette.requests import Request
from starlette.types import Receive

from orchestrator.errors import BadRequest, TooLarge, UnsupportedMedia

MIB: Final = 1024 * 1024

JSON_BODY_BYTES: Final = 16 * MIB
"""Longest JSON body. Source: 10 MiB of code, half as much again for its escapes."""

Shape = TypeVar("Shape", bound=BaseModel)


class ClientGone(Exception):
    """The client closed the connection before its answer was ready. Nobody is there to tell."""


def media_type(request: Request) -> str:
    """The content type without parameters, lower case; empty when absent."""
    return request.headers.get("content-type", "").partition(";")[0].strip().lower()


def refuse_other_media(request: Request, *accepted: str) -> None:
    """Refuse a content type that the route does not take; a body must name its type.

    A page of another origin may send forms and plain text anywhere without being asked; JSON it may
    not. That is why nothing but JSON is read as JSON.

    Raises:
        UnsupportedMedia: the type is another one, or absent though there is a body.
    """
    found = media_type(request)
    if found in accepted or (not found and not has_body(request)):
        return
    named = f"'{found}'" if found else "no content type"
    raise UnsupportedMedia(f"Send {' or '.join(accepted)}, not {named}.")


def has_body(request: Request) -> bool:
    """Whether the headers announce a body."""
    return "transfer-encoding" in request.headers or request.headers.get(
        "content-length", "0"
    ) not in {"0", ""}


def refuse_longer(request: Request, limit: int, refusal: TooLarge | None = None) -> None:
    """Refuse a body whose announced length is over the limit, unread.

    Raises:
        TooLarge: it is; `refusal`, where the limit that matters is another one.
    """
    announced = request.headers.get("content-length", "")
    if announced.isascii() and announced.isdigit() and int(announced) > limit:
        raise refusal or too_large(limit)


def too_large(limit: int, what: str = "request body") -> TooLarge:
    """The refusal of something over a limit, which it names."""
    size = f"{limit // MIB} MB ({limit} bytes)" if limit % MIB == 0 else f"{limit} bytes"
    return TooLarge(f"The {what} is larger than the limit of {size}.")


async def body_chunks(receive: Receive, limit: int) -> AsyncIterator[bytes]:
    """The body as it arrives, cut off at the limit.

    Raises:
        TooLarge: more than `limit` bytes came.
        ClientGone: the connection was closed before the body was complete.
    """
    received = 0
    more = True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        chunk: bytes = message.get("body", b"")
        more = message.get("more_body", False)
        received += len(chunk)
        if received > limit:
            raise too_large(limit)
        if chunk:
            yield chunk


async def read_json(request: Request, shape: type[Shape], limit: int = JSON_BODY_BYTES) -> Shape:
    """The body as a checked value.

    Raises:
        UnsupportedMedia: the content type is not JSON.
        TooLarge: the body is over the limit.
        BadRequest: it is not JSON, or a field is wrong; `param` names the field.
    """
    refuse_other_media(request, "application/json")
    refuse_longer(request, limit)
    parts = [chunk async for chunk in body_chunks(request.receive, limit)]
    try:
        return shape.model_validate_json(parts[0] if len(parts) == 1 else b"".join(parts))
    except ValidationError as invalid:
        raise _first_fault(invalid) from None


def _first_fault(invalid: ValidationError) -> BadRequest:
    fault = invalid.errors(include_url=False, include_input=False, include_context=False)[0]
    if fault["type"] == "json_invalid":
        return BadRequest(f"The body is not valid JSON: {fault['msg']}.", code="invalid_json")
    where = ".".join(str(part) for part in fault["loc"])
    if not where:
        return BadRequest("The body must be a JSON object.")
    message = fault["msg"].removeprefix("Value error, ")
    return BadRequest(f"{where}: {message}", param=where, code=_CODES.get(fault["type"]))


_CODES: Final = {"missing": "missing_required_parameter"}
