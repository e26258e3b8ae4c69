"""Query parameters that every list takes. Above: the routes. Below: store.py.

As in the hosted API, the cursor is the id of the last item seen.
"""

from __future__ import annotations

from typing import Annotated, Literal

from fastapi import Depends, Query

from orchestrator.store import PageQuery


def _page_query(
    after: Annotated[str | None, Query(description="Id of the last item seen.")] = None,
    limit: Annotated[int, Query(ge=1, le=100)] = 20,
    order: Annotated[Literal["asc", "desc"], Query(description="By `created_at`.")] = "desc",
) -> PageQuery:
    return PageQuery(after=after, limit=limit, order=order)


PageOf = Annotated[PageQuery, Depends(_page_query)]
