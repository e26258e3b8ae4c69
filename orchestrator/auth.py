"""Who is asking, and from where. Above: app.py and routes/. Below: errors.py.

The gate stands before every route: the `Host` must be ours, a foreign `Origin` is refused, and a
key says which tenant asks. Without these any web page that a person opens could run code on their
machine. What belongs to another tenant is then simply not found: stores look things up by tenant.
"""

from __future__ import annotations

import hashlib
import ipaddress
import re
import secrets
from collections.abc import Mapping
from functools import lru_cache
from typing import Final

from starlette.requests import HTTPConnection
from starlette.types import ASGIApp, Receive, Scope, Send

from orchestrator.errors import Forbidden, NotAuthenticated
from orchestrator.settings import DEFAULT_TENANT

OPEN_PATHS: Final = frozenset({"/healthz", "/readyz", "/openapi.json"})
"""Answered without a key: they tell nothing of any tenant."""

_BASE_PATH = re.compile(r"^(?:/openai/v1|/openai|/api/projects/[^/]+/openai/v1)(?=/)")
_DEFAULT_PORTS: Final = {"http": "80", "https": "443"}


@lru_cache(maxsize=1024)
def is_loopback(host: str) -> bool:
    """Whether a host name or address, without port, means this machine only."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def canonical_path(path: str) -> str:
    """The path with any of the base paths that clients use brought to `/v1`.

    They are those of the OpenAI client, of Azure's v1 and dated forms, and of a Foundry project.
    """
    return _BASE_PATH.sub("/v1", path, count=1)


class ApiKeys:
    """Which key belongs to which tenant. Without any key everybody is the default tenant."""

    def __init__(self, tenants: Mapping[str, str]) -> None:
        # Keys are found by a digest under a secret of this process: how long a look-up takes then
        # says nothing about how much of a guess was right.
        self._secret = secrets.token_bytes(32)
        self._tenants = {self._digest(key): tenant for key, tenant in tenants.items()}

    def __bool__(self) -> bool:
        return bool(self._tenants)

    def __repr__(self) -> str:
        return f"<ApiKeys {len(self._tenants)} keys>"

    def tenant(self, key: str | None) -> str:
        """The tenant of a key.

        Raises:
            NotAuthenticated: there are keys, and this is none of them.
        """
        if not self._tenants:
            return DEFAULT_TENANT
        if not key:
            raise NotAuthenticated(
                "No API key given. Send it as 'Authorization: Bearer KEY' or 'api-key: KEY'."
            )
        tenant = self._tenants.get(self._digest(key))
        if tenant is None:
            raise NotAuthenticated("Incorrect API key provided.")
        return tenant

    def _digest(self, key: str) -> bytes:
        return hashlib.blake2b(key.encode("utf-8", "replace"), key=self._secret).digest()


class Hosts:
    """The names under which this server answers, beside loopback ones."""

    def __init__(self, configured: frozenset[str]) -> None:
        self._configured = frozenset(name.lower() for name in configured)

    def check_host(self, host: str) -> None:
        """Refuse a `Host` header that is neither configured nor loopback.

        Raises:
            Forbidden: a page may have pointed a name of its own at this machine.
        """
        name = _without_port(host.lower())
        if not (is_loopback(name) or name in self._configured or host.lower() in self._configured):
            raise Forbidden(
                f"Host '{host}' is not served here. KERNELPOOL_ALLOWED_HOSTS lists the names that "
                "are, beside loopback ones.",
                code="host_not_allowed",
            )

    def check_origin(self, origin: str, host: str) -> None:
        """Refuse an `Origin` that is not this server itself.

        Raises:
            Forbidden: another site's page, or a sandboxed one, sent the request.
        """
        scheme, separator, authority = origin.lower().partition("://")
        authority = _without_default_port(authority, scheme)
        own = {_without_default_port(host.lower(), scheme), *self._configured}
        if not separator or scheme not in _DEFAULT_PORTS or authority not in own:
            raise Forbidden(
                f"Requests from pages of origin '{origin}' are not answered.",
                code="origin_not_allowed",
            )


def _without_port(host: str) -> str:
    name, colon, port = host.rpartition(":")
    return name if colon and port.isdigit() else host


def _without_default_port(authority: str, scheme: str) -> str:
    return authority.removesuffix(f":{_DEFAULT_PORTS.get(scheme, '')}")


class Gate:
    """The layer that lets a request through to the routes, as somebody, or refuses it."""

    def __init__(self, app: ASGIApp, *, keys: ApiKeys, hosts: Hosts) -> None:
        self._app = app
        self._keys = keys
        self._hosts = hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request or websocket."""
        if scope["type"] in {"http", "websocket"}:
            self._admit(scope)
        await self._app(scope, receive, send)

    def _admit(self, scope: Scope) -> None:
        host: str | None = None
        origin = authorization = api_key = None
        for name, value in scope["headers"]:
            if name == b"host":
                if host is not None:
                    raise Forbidden("More than one Host header.", code="host_not_allowed")
                host = value.decode("latin-1")
            elif name == b"origin":
                origin = value.decode("latin-1")
            elif name == b"authorization":
                authorization = value.decode("utf-8", "replace")
            elif name == b"api-key":
                api_key = value.decode("utf-8", "replace")
        self._hosts.check_host(host or "")
        if origin is not None:
            self._hosts.check_origin(origin, host or "")
        scope["path"] = canonical_path(scope["path"])
        if scope["path"] in OPEN_PATHS:
            return
        if not self._keys:
            _refuse_remote(scope)
        scope["kernelpool.tenant"] = self._keys.tenant(_key(authorization, api_key))


def _key(authorization: str | None, api_key: str | None) -> str | None:
    scheme, _, credentials = (authorization or "").partition(" ")
    return credentials.strip() if scheme.lower() == "bearer" else api_key


def _refuse_remote(scope: Scope) -> None:
    """Without keys only this machine may ask, whatever address the server was bound to."""
    client = scope.get("client")
    if client and not is_loopback(client[0].removeprefix("::ffff:")):
        raise Forbidden(
            "Without API keys only this machine is answered. Set KERNELPOOL_API_KEYS.",
            code="loopback_only",
        )


def tenant_of(connection: HTTPConnection) -> str:
    """The tenant whose key the request carried; the gate has checked it."""
    tenant: str = connection.scope["kernelpool.tenant"]
    return tenant
