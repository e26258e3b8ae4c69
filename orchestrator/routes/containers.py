"""Containers, which are our sessions: create, list, retrieve, delete, restart.

Above: app.py. Below: store.py for what only reads, the dispatcher for what acts.
"""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from orchestrator.auth import tenant_of
from orchestrator.dispatch import Dispatcher
from orchestrator.errors import NotFound
from orchestrator.openapi import answers, json_body
from orchestrator.request_body import read_json, refuse_other_media
from orchestrator.routes.paging import PageOf
from orchestrator.schema import (
    ContainerList,
    ContainerObject,
    CreateContainer,
    DeletedContainer,
    container_object,
    deleted_object,
    list_object,
)
from orchestrator.sessions import EndReason, SessionOrder
from orchestrator.store import Store
from orchestrator.wire import JsonReply


class Containers:
    """Handlers of the container routes."""

    def __init__(self, store: Store, dispatcher: Dispatcher, *, idle_minutes: int) -> None:
        self._store = store
        self._dispatcher = dispatcher
        self._idle_minutes = idle_minutes

    def router(self) -> APIRouter:
        """The routes, to be mounted under the base path."""
        router = APIRouter(prefix="/containers", tags=["containers"], redirect_slashes=False)
        router.add_api_route(
            "",
            self.create,
            methods=["POST"],
            operation_id="create_container",
            responses=answers(ContainerObject, 400, 404, 413, 415, 429),
            openapi_extra=json_body(CreateContainer),
        )
        router.add_api_route(
            "",
            self.list,
            methods=["GET"],
            operation_id="list_containers",
            responses=answers(ContainerList, 400),
        )
        router.add_api_route(
            "/{container_id}",
            self.retrieve,
            methods=["GET"],
            operation_id="retrieve_container",
            responses=answers(ContainerObject, 404),
        )
        router.add_api_route(
            "/{container_id}",
            self.delete,
            methods=["DELETE"],
            operation_id="delete_container",
            responses=answers(DeletedContainer, 404),
        )
        router.add_api_route(
            "/{container_id}/restart",
            self.restart,
            methods=["POST"],
            operation_id="restart_container",
            responses=answers(ContainerObject, 404, 415),
        )
        return router

    async def create(self, request: Request) -> Response:
        """Make a container. Its kernel is warm already, or started now."""
        asked = await read_json(request, CreateContainer)
        for file_id in asked.file_ids or ():
            raise NotFound(f"File with id '{file_id}' not found.", param="file_ids")
        session = await self._dispatcher.open(
            SessionOrder(
                tenant=tenant_of(request),
                name=asked.name,
                idle_minutes=(
                    asked.expires_after.minutes if asked.expires_after else self._idle_minutes
                ),
                memory_limit=asked.memory_limit or "1g",
            )
        )
        return JsonReply(container_object(session))

    async def list(self, request: Request, page: PageOf, name: str | None = None) -> Response:
        """List containers; `name` is an exact filter."""
        found = await self._store.list_sessions(tenant_of(request), page, name=name)
        return JsonReply(list_object(map(container_object, found.items), has_more=found.has_more))

    async def retrieve(self, request: Request, container_id: str) -> Response:
        """Look at a container. While it runs, that counts as using it."""
        session = await self._store.touch_session(container_id, tenant_of(request))
        return JsonReply(container_object(session))

    async def delete(self, request: Request, container_id: str) -> Response:
        """Delete a container, running or expired, and everything in it."""
        await self._store.get_session(container_id, tenant_of(request))
        await self._dispatcher.close(container_id, reason=EndReason.DELETED)
        return JsonReply(deleted_object(container_id, "container"))

    async def restart(self, request: Request, container_id: str) -> Response:
        """Give a container a new kernel; its files stay, its variables do not."""
        refuse_other_media(request, "application/json")
        session = await self._store.touch_session(container_id, tenant_of(request))
        session.check_running()
        return JsonReply(container_object(await self._dispatcher.restart(container_id)))
