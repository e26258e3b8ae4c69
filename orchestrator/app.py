"""The HTTP application: routes behind their layers, and the one place where errors become replies.

Above: up.py and demo.py, which own the parts' lifetimes. Below: everything.

    RequestLog      an id, a count and a log line for each request
    ErrorBoundary   any exception becomes the error envelope
    Gate            Host, Origin, key; base paths become /v1
    routes          parse, call, answer
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping
from typing import Any, Final

import anyio
import structlog
from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.telemetry import TelemetryConfig
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.routing import Route, compile_path
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from orchestrator.auth import ApiKeys, Gate, Hosts
from orchestrator.dispatch import Dispatcher
from orchestrator.errors import (
    BadRequest,
    MethodNotAllowed,
    NotFound,
    OutcomeUnknown,
    ServiceError,
    Unavailable,
)
from orchestrator.openapi import describe
from orchestrator.request_body import ClientGone
from orchestrator.routes.containers import Containers
from orchestrator.routes.executions import Executions
from orchestrator.routes.files import Files
from orchestrator.routes.health import Health
from orchestrator.settings import Settings
from orchestrator.store import Store
from orchestrator.telemetry import Metrics, RequestLog
from orchestrator.wire import JsonReply, error_reply

LINGER_SECONDS: Final = 2.0
"""How long the rest of a refused body is read away after the answer. A connection closed over
unread bytes is reset, and the client may lose the answer to it."""

STOPPED_SECONDS: Final = 5.0
"""When to try again after a stop: a restart takes about that long."""

LINGER_ABOVE_BYTES: Final = 64 * 1024
"""Bodies up to this length are read to their end anyway, and the connection is kept."""


def create_app(
    *, settings: Settings, store: Store, dispatcher: Dispatcher, metrics: Metrics | None = None
) -> FastAPI:
    """Build the application from parts that live longer than it."""
    metrics = metrics or Metrics()
    keys = ApiKeys(dict(settings.api_keys))
    hosts = Hosts(frozenset(settings.allowed_hosts))
    table = RouteTable()
    app = FastAPI(
        title="kernelpool",
        docs_url=None,
        redoc_url=None,
        openapi_url=None,
        redirect_slashes=False,
        # The framework's own spans and metrics would carry query strings; ours are in RequestLog.
        telemetry=TelemetryConfig(tracing=False, metrics=False, logs=False),
        middleware=[
            Middleware(RequestLog, metrics=metrics),
            Middleware(ErrorBoundary),
            Middleware(Gate, keys=keys, hosts=hosts),
        ],
        exception_handlers={
            HTTPException: table.refuse,
            RequestValidationError: _on_bad_parameter,
        },
    )
    routers = (
        (
            "/v1",
            Executions(
                store,
                dispatcher,
                metrics,
                timeout=settings.execution_timeout,
                timeout_cap=settings.execution_timeout_cap,
            ).router(),
        ),
        ("/v1", Files(store, dispatcher, metrics, max_bytes=settings.max_upload_bytes).router()),
        ("/v1", Containers(store, dispatcher, idle_minutes=settings.idle_minutes).router()),
        ("", Health(store, metrics).router()),
    )
    for prefix, router in routers:
        app.include_router(router, prefix=prefix)
        table.add(prefix, router)
    _serve_description(app)
    return app


def _serve_description(app: FastAPI) -> None:
    document: dict[str, Any] = {}

    async def openapi(_: Request) -> Response:
        """The OpenAPI document of what is served under `/v1`."""
        if not document:
            document.update(describe(app))
        return JsonReply(document)

    app.add_route("/openapi.json", openapi, include_in_schema=False)


class ErrorBoundary:
    """The layer that answers every exception; the reply to a request is begun once and ended."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        begun = False
        unread = _announces_long_body(scope)

        async def watched_receive() -> Message:
            nonlocal unread
            message = await receive()
            if not message.get("more_body", False):
                unread = False
            return message

        async def watched_send(message: Message) -> None:
            nonlocal begun
            begun = True
            await send(message)

        try:
            await self._app(scope, watched_receive, watched_send)
            return
        except ClientGone:
            return
        except asyncio.CancelledError:
            # The server stops and the grace period is over. The task ends here either way.
            if begun:
                raise
            refusal = _stopping(scope["method"])
        except ServiceError as error:
            if begun:
                raise
            refusal = error
        except Exception:
            if begun:
                raise
            structlog.get_logger("http").exception("request failed")
            refusal = ServiceError("The server failed to handle the request.")
        reply = error_reply(refusal)
        if unread:
            await _answer_and_linger(reply, receive, send)
        else:
            await reply(scope, receive, send)


def _stopping(method: str) -> ServiceError:
    if method in {"GET", "HEAD"}:
        return Unavailable("The server is stopping.", retry_after=STOPPED_SECONDS)
    return OutcomeUnknown(
        "The server is stopping: the request may or may not have been carried out."
    )


def _announces_long_body(scope: Scope) -> bool:
    for name, value in scope["headers"]:
        if name == b"transfer-encoding":
            return True
        if name == b"content-length":
            return not value.isdigit() or int(value) > LINGER_ABOVE_BYTES
    return False


async def _answer_and_linger(reply: Response, receive: Receive, send: Send) -> None:
    """Answer while the client is still sending, then take what it sends until it notices."""
    headers = [*reply.raw_headers, (b"connection", b"close")]
    await send({"type": "http.response.start", "status": reply.status_code, "headers": headers})
    await send({"type": "http.response.body", "body": reply.body, "more_body": True})
    with anyio.move_on_after(LINGER_SECONDS):
        while (await receive()).get("more_body", False):
            pass
    await send({"type": "http.response.body", "body": b"", "more_body": False})


class RouteTable:
    """Answers what the framework refuses: a path without a route, a method without a handler."""

    def __init__(self) -> None:
        self._methods: list[tuple[re.Pattern[str], set[str]]] = []

    def add(self, prefix: str, router: APIRouter) -> None:
        """Note the paths and methods of a router."""
        for route in router.routes:
            if isinstance(route, Route):
                pattern, _, _ = compile_path(prefix + route.path)
                self._methods.append((pattern, route.methods or set()))

    async def refuse(self, request: Request, raised: Exception) -> Response:
        """The reply in place of the framework's."""
        assert isinstance(raised, HTTPException)
        path = request.scope["path"]
        where = f"{request.method} {path}"
        if raised.status_code == 405:
            reply = error_reply(MethodNotAllowed(f"This method is not offered: {where}."))
            offered = {
                method
                for pattern, methods in self._methods
                if pattern.match(path)
                for method in methods
            }
            reply.headers["allow"] = ", ".join(sorted(offered))
            return reply
        if raised.status_code == 404:
            return error_reply(NotFound(f"Unknown route: {where}.", code="unknown_route"))
        return error_reply(BadRequest(str(raised.detail)))


async def _on_bad_parameter(_: Request, raised: Exception) -> Response:
    assert isinstance(raised, RequestValidationError)
    fault: Mapping[str, Any] = raised.errors()[0]
    param = str(fault["loc"][-1])
    return error_reply(BadRequest(f"{param}: {fault['msg']}", param=param))
