"""Executions: run code and answer at once, as a stream, or in the background; then ask about it.

Above: app.py. Below: the dispatcher for what acts, store.py and its event log for what only reads.
"""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from typing import Annotated, Any, Final

from fastapi import APIRouter, Query, Request, Response

from orchestrator.auth import tenant_of
from orchestrator.dispatch import Dispatcher
from orchestrator.errors import BadRequest
from orchestrator.event_stream import (
    EventStreamReply,
    last_execution,
    outcome_known,
    while_connected,
)
from orchestrator.executions import EventType, ExecutionEvent, ExecutionOrder
from orchestrator.openapi import answers, json_body
from orchestrator.ownership import Ownership
from orchestrator.request_body import read_json, refuse_other_media
from orchestrator.routes.paging import PageOf
from orchestrator.schema import (
    AnswerInput,
    CreateExecution,
    ExecutionList,
    ExecutionObject,
    list_object,
)
from orchestrator.sessions import SessionStatus
from orchestrator.store import Store
from orchestrator.telemetry import Metrics
from orchestrator.wire import JsonReply, to_json

PAGE_BYTES: Final = 16 * 1024 * 1024
"""Size from which a page gets no more executions, whatever its limit: one alone may have 40 MB."""

PAGE_STEP: Final = 5
"""Executions that are read at once for a page; so a page may exceed its size by four of them."""

KEY_CHARACTERS: Final = 255
"""Longest idempotency key."""

# Read by hand in the one handler that every cell passes: the framework's own way costs as much as
# the rest of the layer together.
_CREATE_PARAMETERS: Final = {
    "parameters": [
        {"name": "container_id", "in": "path", "required": True, "schema": {"type": "string"}},
        {
            "name": "Idempotency-Key",
            "in": "header",
            "required": False,
            "schema": {"type": "string", "minLength": 1, "maxLength": KEY_CHARACTERS},
        },
    ]
}


def _idempotency_key(request: Request) -> str | None:
    key = request.headers.get("idempotency-key")
    if key is not None and not 1 <= len(key) <= KEY_CHARACTERS:
        raise BadRequest(
            f"Idempotency-Key: 1 to {KEY_CHARACTERS} characters are allowed.",
            param="Idempotency-Key",
        )
    return key


def _ends(ids: list[str]) -> dict[str, str | None]:
    return {"first_id": ids[0] if ids else None, "last_id": ids[-1] if ids else None}


class Executions:
    """Handlers of the execution routes."""

    def __init__(
        self,
        store: Store,
        dispatcher: Dispatcher,
        metrics: Metrics,
        *,
        timeout: float,
        timeout_cap: float,
    ) -> None:
        self._store = store
        self._ownership = Ownership(store)
        self._dispatcher = dispatcher
        self._metrics = metrics
        self._timeout = timeout
        self._timeout_cap = timeout_cap

    def router(self) -> APIRouter:
        """The routes, to be mounted under the base path."""
        router = APIRouter(
            prefix="/containers/{container_id}/executions",
            tags=["executions"],
            redirect_slashes=False,
        )
        router.add_api_route(
            "",
            self.create,
            methods=["POST"],
            operation_id="create_execution",
            responses=answers(ExecutionObject, 400, 404, 413, 415, 429, 502, stream=True),
            openapi_extra=json_body(CreateExecution) | _CREATE_PARAMETERS,
        )
        router.add_api_route(
            "",
            self.list,
            methods=["GET"],
            operation_id="list_executions",
            responses=answers(ExecutionList, 400, 404),
        )
        router.add_api_route(
            "/{execution_id}",
            self.retrieve,
            methods=["GET"],
            operation_id="retrieve_execution",
            responses=answers(ExecutionObject, 400, 404, stream=True),
        )
        router.add_api_route(
            "/{execution_id}/cancel",
            self.cancel,
            methods=["POST"],
            operation_id="cancel_execution",
            responses=answers(ExecutionObject, 404, 415),
        )
        router.add_api_route(
            "/{execution_id}/input",
            self.answer_input,
            methods=["POST"],
            operation_id="answer_execution_input",
            responses=answers(ExecutionObject, 400, 404, 413, 415),
            openapi_extra=json_body(AnswerInput),
        )
        return router

    async def create(self, request: Request) -> Response:
        """Run code.

        The answer comes when the code has ended, whatever its end. With `stream` it is a stream of
        events; with `background` it comes at once and the run goes on by itself.
        """
        asked = await read_json(request, CreateExecution)
        order = self._order(asked, _idempotency_key(request))
        container_id = request.path_params["container_id"]
        await self._ownership.check(container_id, tenant_of(request))
        if asked.on_expired == "recreate":
            container_id = await self._in_place_of(container_id)
        if asked.stream:
            return EventStreamReply(lambda: self._counted(container_id, order), runs=True)
        if order.background:
            return JsonReply(await self._start(container_id, order))
        return JsonReply(await self._run(request, container_id, order))

    async def list(self, request: Request, container_id: str, page: PageOf) -> Response:
        """List a container's executions; a page ends early when it becomes large."""
        await self._store.get_session(container_id, tenant_of(request))
        items: list[bytes] = []
        ids: list[str] = []
        size, has_more, after = 0, True, page.after
        while has_more and len(items) < page.limit and size < PAGE_BYTES:
            step = min(PAGE_STEP, page.limit - len(items))
            found = await self._store.list_executions(
                container_id, replace(page, after=after, limit=step)
            )
            items += [to_json(execution.to_wire()) for execution in found.items]
            ids += [execution.id for execution in found.items]
            size, has_more, after = sum(map(len, items)), found.has_more, ids[-1] if ids else None
        rest = to_json(list_object([], has_more=has_more) | _ends(ids))
        return JsonReply(rest.replace(b'"data":[]', b'"data":[%b]' % b",".join(items), 1))

    async def retrieve(
        self,
        request: Request,
        container_id: str,
        execution_id: str,
        stream: bool = False,
        starting_after: Annotated[int, Query(ge=-1, description="Last event seen.")] = -1,
    ) -> Response:
        """Look at an execution; with `stream`, replay its events and follow it to its end."""
        await self._store.get_session(container_id, tenant_of(request))
        execution = await self._store.get_execution(container_id, execution_id)
        if stream:
            return EventStreamReply(
                lambda: self._replay(container_id, execution_id, starting_after), runs=False
            )
        return JsonReply(execution.to_wire())

    async def cancel(self, request: Request, container_id: str, execution_id: str) -> Response:
        """Interrupt an execution; variables are kept. A finished one is answered as it is."""
        refuse_other_media(request, "application/json")
        await self._store.get_session(container_id, tenant_of(request))
        execution = await self._store.get_execution(container_id, execution_id)
        if not execution.finished:
            execution = await self._dispatcher.cancel(container_id, execution_id)
        return JsonReply(execution.to_wire())

    async def answer_input(
        self, request: Request, container_id: str, execution_id: str
    ) -> Response:
        """Answer an execution that asks for input."""
        answer = await read_json(request, AnswerInput)
        session = await self._store.touch_session(container_id, tenant_of(request))
        await self._store.get_execution(container_id, execution_id)
        session.check_running()
        execution = await self._dispatcher.answer_input(container_id, execution_id, answer.text)
        return JsonReply(execution.to_wire())

    async def _in_place_of(self, container_id: str) -> str:
        """The container itself while it runs, else the one that takes its place."""
        session = await self._store.get_session(container_id, None)
        if session.status is SessionStatus.EXPIRED:
            session = await self._dispatcher.recreate(container_id)
        return session.id

    def _order(self, asked: CreateExecution, idempotency_key: str | None) -> ExecutionOrder:
        timeout = asked.timeout_seconds or self._timeout
        if timeout > self._timeout_cap:
            raise BadRequest(
                f"timeout_seconds: at most {self._timeout_cap:g} seconds are allowed.",
                param="timeout_seconds",
            )
        # `stream` is only how the answer travels: a repeat may ask for it another way.
        meaning = (asked.code, timeout, asked.stdin, bool(asked.reset), bool(asked.background))
        return ExecutionOrder(
            code=asked.code,
            timeout=timeout,
            stdin=asked.stdin or "error",
            reset=bool(asked.reset),
            background=bool(asked.background),
            idempotency_key=idempotency_key,
            request_digest=(
                hashlib.sha256(to_json(meaning)).hexdigest() if idempotency_key else ""
            ),
        )

    async def _run(self, request: Request, container_id: str, order: ExecutionOrder) -> Any:
        first: list[ExecutionEvent] = []
        async with (
            while_connected(request.receive),
            outcome_known(first),
            self._dispatcher.execute(container_id, order) as events,
        ):
            final = await last_execution(events, first)
        self._count(final)
        return final

    async def _start(self, container_id: str, order: ExecutionOrder) -> Any:
        first: list[ExecutionEvent] = []
        async with outcome_known(first):
            async with self._dispatcher.execute(container_id, order) as events:
                first.append(await anext(events))
            created = first[0].data["execution"]
            if order.idempotency_key is None:
                return created
            # A repeat may find its execution further on than it was when it was created.
            return (await self._store.get_execution(container_id, created["id"])).to_wire()

    @asynccontextmanager
    async def _counted(
        self, container_id: str, order: ExecutionOrder
    ) -> AsyncIterator[AsyncIterator[ExecutionEvent]]:
        async with self._dispatcher.execute(container_id, order) as events:
            yield self._counting(events)

    async def _counting(
        self, events: AsyncIterator[ExecutionEvent]
    ) -> AsyncIterator[ExecutionEvent]:
        async for event in events:
            yield event
            if event.type is EventType.COMPLETED:
                self._count(event.data["execution"])

    @asynccontextmanager
    async def _replay(
        self, container_id: str, execution_id: str, after: int
    ) -> AsyncIterator[AsyncIterator[ExecutionEvent]]:
        log = self._store.event_log
        follower = log.follow(execution_id, after=after, session_id=container_id)
        async with aclosing(follower) as events:
            yield events

    def _count(self, execution: Any) -> None:
        failure = execution["failure"]
        self._metrics.executions.add(execution["status"], failure["code"] if failure else "")
