"""Whose a session is, remembered. Above: routes/executions.py. Below: store.py.

A session keeps its tenant for life and no id is used twice, so the answer to "is this theirs" never
changes from yes to no. Asking Redis once per session instead of once per execution keeps a round
trip off the path of every cell; that the session still exists is the dispatcher's to say.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

from orchestrator.store import Store

REMEMBERED: Final = 10_000
"""Sessions, at about 200 bytes each; the one asked for longest ago is forgotten first."""


class Ownership:
    """Answers whether a session belongs to a tenant."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._tenants: OrderedDict[str, str] = OrderedDict()

    async def check(self, session_id: str, tenant: str) -> None:
        """Return when the session is, or was, the tenant's.

        Raises:
            SessionNotFound: unknown, or another tenant's.
        """
        if self._tenants.get(session_id) != tenant:
            await self._store.get_session(session_id, tenant)
            self._tenants[session_id] = tenant
            if len(self._tenants) > REMEMBERED:
                self._tenants.popitem(last=False)
        self._tenants.move_to_end(session_id)
