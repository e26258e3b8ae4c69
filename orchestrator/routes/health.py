"""Operations: is the process there, can it serve, and what has it done. Above: app.py."""

from __future__ import annotations

from typing import Any, Final

import anyio
from fastapi import APIRouter, Response

from orchestrator.errors import StoreUnavailable
from orchestrator.openapi import Responses, refusals
from orchestrator.store import Store
from orchestrator.telemetry import Metrics
from orchestrator.wire import JsonReply

READY_SECONDS: Final = 2.0
"""How long Redis may take to answer; load balancers ask every few seconds."""

_PROMETHEUS: Final = "text/plain; version=0.0.4; charset=utf-8"


class Health:
    """Handlers of the operations routes."""

    def __init__(self, store: Store, metrics: Metrics) -> None:
        self._store = store
        self._metrics = metrics

    def router(self) -> APIRouter:
        """The routes, to be mounted at the root."""
        router = APIRouter(tags=["operations"], redirect_slashes=False)
        ok: Responses = {200: {"description": "Yes."}}
        keyless: dict[str, Any] = {"security": []}
        router.add_api_route(
            "/healthz",
            self.alive,
            operation_id="alive",
            responses=ok | _only(403),
            openapi_extra=keyless,
        )
        router.add_api_route(
            "/readyz",
            self.ready,
            operation_id="ready",
            responses=ok | _only(403, 503),
            openapi_extra=keyless,
        )
        router.add_api_route(
            "/metrics",
            self.metrics,
            operation_id="metrics",
            response_class=Response,
            responses={
                200: {"description": "Prometheus text.", "content": {"text/plain": {}}},
                **_only(401, 403),
            },
        )
        return router

    async def alive(self) -> Response:
        """Whether the process runs."""
        return JsonReply({"status": "ok"})

    async def ready(self) -> Response:
        """Whether requests can be served: 503 without Redis."""
        try:
            with anyio.fail_after(READY_SECONDS):
                await self._store.ping()
        except TimeoutError:
            raise StoreUnavailable("Redis does not answer.", retry_after=1) from None
        return JsonReply({"status": "ready"})

    async def metrics(self) -> Response:
        """Counters of this process."""
        return Response(self._metrics.render(), headers={"content-type": _PROMETHEUS})


def _only(*statuses: int) -> Responses:
    return {status: reply for status, reply in refusals().items() if status in statuses}
