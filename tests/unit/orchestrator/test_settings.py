"""Settings: what is read, what is refused and how, what is shown."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.settings import Settings, SettingsError, describe, load, unknown

SECRETS = {
    "KERNELPOOL_API_KEYS": "sk-very-secret:acme,sk-other-secret",
    "KERNELPOOL_MODEL_API_KEY": "very-secret-model-key",
    "KERNELPOOL_WORKER_TOKEN": "very-secret-worker-token",
    "KERNELPOOL_REDIS_URL": "rediss://user:very-secret@redis.test:6380/1?ssl_keyfile=very-secret",
    "KERNELPOOL_ARTIFACTS_URL": "s3://access:very-secret@bucket/prefix",
    "KERNELPOOL_MODEL_BASE_URL": "https://user:very-secret@models.test/v1",
}


def test_an_empty_environment_gives_the_documented_defaults(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 0)
    settings = load({})
    assert settings.redis_url is None
    assert settings.state_dir == Path("/var/lib/kernelpool")
    assert settings.artifacts_place == "/var/lib/kernelpool/artifacts"
    assert settings.runtime == "auto"
    assert settings.idle_minutes == 20
    assert settings.max_lifetime == 3600
    assert settings.execution_timeout == 120
    assert settings.retention == 7 * 24 * 3600
    assert settings.worker_lost_seconds == 60
    assert settings.api_keys == {}
    assert settings.tenant_limit is None


def test_the_state_directory_of_an_ordinary_user_follows_xdg(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    home = {"HOME": "/home/ada"}
    assert load(home).state_dir == Path("/home/ada/.local/state/kernelpool")
    assert load({**home, "XDG_STATE_HOME": "/x"}).state_dir == Path("/x/kernelpool")
    relative = {**home, "XDG_STATE_HOME": "relative"}
    assert load(relative).state_dir == Path("/home/ada/.local/state/kernelpool")
    assert load({**home, "KERNELPOOL_STATE_DIR": "/s"}).state_dir == Path("/s")


@pytest.mark.parametrize(
    ("name", "text", "field", "value"),
    [
        ("REDIS_URL", "unix:///run/redis.sock", "redis_url", "unix:///run/redis.sock"),
        ("REDIS_URL", "redis://h:6379/0", "redis_url", "redis://h:6379/0"),
        ("MAX_UPLOAD_BYTES", "1000", "max_upload_bytes", 1000),
        ("MAX_UPLOAD_BYTES", "2GiB", "max_upload_bytes", 2 * 1024**3),
        ("MAX_UPLOAD_BYTES", "512 mb", "max_upload_bytes", 512 * 1024**2),
        ("MAX_UPLOAD_BYTES", "64K", "max_upload_bytes", 64 * 1024),
        ("RUNTIME", "Docker", "runtime", "docker"),
        ("POOL_SIZE", "0", "pool_size", 0),
        ("MAX_LIFETIME_MINUTES", "0", "max_lifetime", None),
        ("RETENTION_DAYS", "0.5", "retention", 43200.0),
        ("TENANT_SESSIONS", "3", "tenant_limit", 3),
        ("ALLOWED_HOSTS", "A.test, b.test,", "allowed_hosts", ("a.test", "b.test")),
        ("MODEL_ALIASES", "a=openai:x, b = y", "model_aliases", {"a": "openai:x", "b": "y"}),
        ("API_KEYS", "k1,k2:acme", "api_keys", {"k1": "default", "k2": "acme"}),
        ("ARTIFACTS_URL", "s3://bucket/p", "artifacts_place", "s3://bucket/p"),
    ],
)
def test_a_value_is_read(name: str, text: str, field: str, value: object) -> None:
    assert getattr(load({f"KERNELPOOL_{name}": text}), field) == value


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("REDIS_URL", "http://h"),
        ("REDIS_URL", "redis://h:port"),
        ("REDIS_URL", "redis://"),
        ("REDIS_MEMORY_BYTES", "1"),
        ("RUNTIME", "podman"),
        ("IMAGE", "-v /:/host"),
        ("POOL_SIZE", "-1"),
        ("POOL_SIZE", "1.5"),
        ("POOL_SIZE", "٣"),
        ("POOL_SIZE", "9" * 30),
        ("MAX_SLOTS", "0"),
        ("UID_BASE", "0"),
        ("IDLE_MINUTES", "0"),
        ("IDLE_MINUTES", "10081"),
        ("EXECUTION_TIMEOUT", "nan"),
        ("EXECUTION_TIMEOUT", "inf"),
        ("EXECUTION_TIMEOUT", "soon"),
        ("EXECUTION_TIMEOUT", "601"),
        ("RETENTION_DAYS", "-1"),
        ("MAX_UPLOAD_BYTES", "1TB"),
        ("ALLOWED_HOSTS", "http://a"),
        ("ALLOWED_HOSTS", "a:8000"),
        ("API_KEYS", "a b"),
        ("API_KEYS", "a:"),
        ("API_KEYS", "a:b/c"),
        ("API_KEYS", "a,a"),
        ("WORKER_TOKEN", "short"),
        ("MODEL_ALIASES", "fast"),
        ("MODEL_BASE_URL", "models.test/v1"),
        ("LOG_LEVEL", "loud"),
    ],
)
def test_a_wrong_value_is_named_with_what_is_allowed(name: str, text: str) -> None:
    with pytest.raises(SettingsError) as wrong:
        load({f"KERNELPOOL_{name}": text})
    (line,) = str(wrong.value).splitlines()
    assert line.startswith(f"KERNELPOOL_{name} is ")
    assert "allowed is" in line
    if name not in {"API_KEYS", "WORKER_TOKEN"}:
        assert text in line


def test_all_wrong_values_are_named_at_once() -> None:
    with pytest.raises(SettingsError) as wrong:
        load({"KERNELPOOL_POOL_SIZE": "x", "KERNELPOOL_RUNTIME": "y"})
    assert len(str(wrong.value).splitlines()) == 2


def test_settings_that_contradict_each_other_are_named_together() -> None:
    with pytest.raises(SettingsError, match=r"POOL_SIZE.*MAX_SLOTS"):
        load({"KERNELPOOL_POOL_SIZE": "5", "KERNELPOOL_MAX_SLOTS": "4"})


def test_an_empty_value_is_as_if_it_were_not_set() -> None:
    settings = load({"KERNELPOOL_POOL_SIZE": " ", "KERNELPOOL_REDIS_URL": ""})
    assert settings.redis_url is None
    assert settings.sources["pool_size"] == "default"


def test_no_secret_is_shown() -> None:
    settings = load(SECRETS)
    shown = repr(settings) + repr(describe(settings))
    assert "secret" not in shown.replace("--secret", "")
    rows = {row.variable: row for row in describe(settings)}
    assert rows["KERNELPOOL_API_KEYS"].value == "********:acme,********:default"
    assert rows["KERNELPOOL_REDIS_URL"].value.startswith("rediss://user:********@redis.test:6380")
    assert all(rows[name].source == "environment" for name in SECRETS)


@given(st.text(st.characters(codec="ascii", exclude_categories=["C"]), min_size=1, max_size=40))
def test_no_wrong_secret_is_shown(secret: str) -> None:
    for name in ("API_KEYS", "WORKER_TOKEN"):
        try:
            load({f"KERNELPOOL_{name}": f"{secret}-hunter2 {secret}"})
        except SettingsError as wrong:
            assert "hunter2" not in str(wrong)


def test_every_row_has_help_and_the_variable_of_its_field() -> None:
    for row in describe(load({})):
        assert re.fullmatch(r"KERNELPOOL_[A-Z_]+", row.variable)
        assert row.help.endswith(".")
        assert row.source == "default"


def test_every_setting_of_the_architecture_is_there() -> None:
    named = (
        "REDIS_URL STATE_DIR RUNTIME IMAGE API_KEYS MODEL_BASE_URL MODEL_API_KEY MODEL_ALIASES "
        "POOL_SIZE IDLE_MINUTES MAX_LIFETIME_MINUTES EXECUTION_TIMEOUT ARTIFACTS_URL "
        "RETENTION_DAYS WORKER_TOKEN WORKER_LOST_SECONDS"
    )
    variables = {row.variable for row in describe(load({}))}
    assert {f"KERNELPOOL_{name}" for name in named.split()} <= variables


def test_a_mistyped_variable_is_told_with_what_may_be_meant() -> None:
    assert unknown({"KERNELPOOL_POOLSIZE": "1", "PATH": "x", "KERNELPOOL_IMAGE": "y"}) == [
        "KERNELPOOL_POOLSIZE is no setting; KERNELPOOL_POOL_SIZE may be meant."
    ]
    assert unknown({"KERNELPOOL_ZZZ": "1"}) == ["KERNELPOOL_ZZZ is no setting."]


def test_settings_do_not_change() -> None:
    settings = load({})
    with pytest.raises(AttributeError):
        settings.pool_size = 3  # type: ignore[misc]
    assert isinstance(settings, Settings)
