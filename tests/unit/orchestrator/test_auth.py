"""Hosts, origins, keys and base paths."""

from __future__ import annotations

import pytest

from orchestrator.auth import ApiKeys, Hosts, canonical_path
from orchestrator.errors import Forbidden, NotAuthenticated
from orchestrator.server import ServerError, refuse_public_bind

HOSTS = Hosts(frozenset({"code.example.com", "10.1.2.3:9000"}))


@pytest.mark.parametrize(
    "host",
    [
        "localhost", "LOCALHOST:8000", "127.0.0.1", "127.8.9.1:80", "[::1]", "[::1]:8000",
        "code.example.com", "Code.Example.com:8443", "10.1.2.3:9000",
    ],
)  # fmt: skip
def test_loopback_and_configured_hosts_are_served(host: str) -> None:
    HOSTS.check_host(host)


@pytest.mark.parametrize(
    "host",
    [
        "", "evil.example", "localhost.evil.example", "127.0.0.1.nip.io", "10.1.2.3", "10.1.2.3:1",
        "code.example.com.", "code.example.com@evil", "169.254.169.254", "[::2]", "::1:x", "0",
    ],
)  # fmt: skip
def test_any_other_host_is_refused(host: str) -> None:
    with pytest.raises(Forbidden):
        HOSTS.check_host(host)


@pytest.mark.parametrize(
    ("origin", "host"),
    [
        ("http://localhost:8000", "localhost:8000"),
        ("https://code.example.com", "code.example.com"),
        ("https://code.example.com", "code.example.com:443"),
        ("http://127.0.0.1", "127.0.0.1:80"),
        ("https://code.example.com", "localhost:8000"),
    ],
)
def test_a_page_of_this_server_may_ask(origin: str, host: str) -> None:
    HOSTS.check_origin(origin, host)


@pytest.mark.parametrize(
    "origin",
    [
        "null", "", "http://localhost:3000", "http://evil.example", "file://", "https://localhost:8000x",
        "http://localhost:8000.evil.example", "chrome-extension://localhost:8000",
        "http://code.example.com:8080",
    ],
)  # fmt: skip
def test_a_page_of_anybody_else_may_not(origin: str) -> None:
    with pytest.raises(Forbidden):
        HOSTS.check_origin(origin, "localhost:8000")


def test_a_key_names_its_tenant() -> None:
    keys = ApiKeys({"k1": "one", "schlüssel": "two"})
    assert (keys.tenant("k1"), keys.tenant("schlüssel")) == ("one", "two")
    for wrong in (None, "", "k", "k11", "K1", "one"):
        with pytest.raises(NotAuthenticated):
            keys.tenant(wrong)
    assert "k1" not in repr(keys)


def test_without_keys_everybody_is_the_default_tenant() -> None:
    assert ApiKeys({}).tenant(None) == ApiKeys({}).tenant("whatever") == "default"


@pytest.mark.parametrize(
    ("path", "canonical"),
    [
        ("/v1/containers", "/v1/containers"),
        ("/openai/v1/containers", "/v1/containers"),
        ("/openai/containers/x", "/v1/containers/x"),
        ("/api/projects/my-p/openai/v1/containers", "/v1/containers"),
        ("/openai", "/openai"),
        ("/openaix/containers", "/openaix/containers"),
        ("/v1/openai/v1/containers", "/v1/openai/v1/containers"),
        ("/api/projects/a/b/openai/v1/x", "/api/projects/a/b/openai/v1/x"),
    ],
)
def test_every_base_path_leads_to_the_same_routes(path: str, canonical: str) -> None:
    assert canonical_path(path) == canonical


def test_a_public_address_needs_keys() -> None:
    refuse_public_bind("127.0.0.1", keys=False)
    refuse_public_bind("0.0.0.0", keys=True)
    for host in ("0.0.0.0", "::", "192.168.1.2", "", "example.com"):
        with pytest.raises(ServerError, match="KERNELPOOL_API_KEYS"):
            refuse_public_bind(host, keys=False)
