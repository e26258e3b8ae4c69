"""Settings: the only reader of `KERNELPOOL_*`. Above: the commands. Below: nothing.

Each setting is one field of `Settings`, with its parser, default, unit and help beside it. Loading,
`kernelpool config` and the reference page are made from these fields.
"""

from __future__ import annotations

import difflib
import math
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, Literal, TypeVar
from urllib.parse import urlsplit, urlunsplit

PREFIX: Final = "KERNELPOOL_"
KIB: Final = 1024
MIB: Final = 1024 * KIB
GIB: Final = 1024 * MIB

DEFAULT_TENANT: Final = "default"
"""Tenant of keys that name none, and of everybody when there are no keys."""

Source = Literal["default", "environment"]
T = TypeVar("T")


class SettingsError(Exception):
    """One or more settings are wrong; one line each: variable, value, what is allowed."""


class _Wrong(Exception):
    """What is allowed instead."""


@dataclass(frozen=True, slots=True)
class SettingRow:
    """A setting as `kernelpool config` prints it."""

    variable: str
    value: str
    """Secrets are masked."""
    unit: str
    source: Source
    help: str
    default: str


@dataclass(frozen=True, slots=True)
class _Setting:
    """How a field is read and shown."""

    parse: Callable[[str], Any]
    default: str
    """As it would be written in the environment; empty: not set."""
    unit: str
    help: str
    show: Callable[[Any], str]


def _setting(
    parse: Callable[[str], T],
    default: str,
    unit: str,
    help: str,
    *,
    show: Callable[[T], str] | None = None,
) -> Any:
    return field(metadata={"setting": _Setting(parse, default, unit, help, show or _shown)})


def _shown(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, tuple):
        return ",".join(value)
    if isinstance(value, Mapping):
        return ",".join(f"{name}={target}" for name, target in value.items())
    return str(value)


def _mask(value: Any) -> str:
    return "********" if value else ""


def _mask_keys(keys: Mapping[str, str]) -> str:
    return ",".join(f"********:{tenant}" for tenant in keys.values())


def _mask_password(url: str | None) -> str:
    if not url:
        return ""
    parts = urlsplit(url)
    if parts.password is None and not parts.query:
        return url
    netloc = parts.netloc
    if parts.password is not None:
        netloc = f"{parts.username or ''}:********@{netloc.rpartition('@')[2]}"
    return urlunsplit(parts._replace(netloc=netloc, query="********" if parts.query else ""))


def _whole(least: int, most: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        if not re.fullmatch(r"[0-9]{1,18}", text) or not least <= int(text) <= most:
            raise _Wrong(f"a whole number from {least} to {most}")
        return int(text)

    return parse


def _number(least: float, most: float) -> Callable[[str], float]:
    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not least <= value <= most:
            raise _Wrong(f"a number from {least:g} to {most:g}")
        return value

    return parse


_SIZES: Final = {"": 1, "K": KIB, "M": MIB, "G": GIB}


def _size(least: int, most: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        match = re.fullmatch(r"([0-9]{1,15})\s*([KMG]?)(?:i?B)?", text, re.IGNORECASE)
        value = int(match[1]) * _SIZES[match[2].upper()] if match else -1
        if not least <= value <= most:
            raise _Wrong(
                f"a number of bytes from {least} to {most}, or with a unit such as 512MiB or 2GiB"
            )
        return value

    return parse


def _one_of(*words: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text.lower() not in words:
            raise _Wrong("one of " + ", ".join(words))
        return text.lower()

    return parse


def _url(*schemes: str) -> Callable[[str], str | None]:
    def parse(text: str) -> str | None:
        if not text:
            return None
        parts = urlsplit(text)
        try:
            complete = parts.scheme in schemes and bool(parts.netloc or parts.path)
            _ = parts.port
        except ValueError:
            complete = False
        if not complete:
            raise _Wrong("a URL that starts with " + " or ".join(f"{s}://" for s in schemes))
        return text

    return parse


def _text(text: str) -> str:
    return text


def _optional(text: str) -> str | None:
    return text or None


def _secret(text: str) -> str | None:
    if text and (len(text) < 16 or not text.isascii() or not text.isprintable() or " " in text):
        raise _Wrong("at least 16 printable ASCII characters without blanks")
    return text or None


def _image(text: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._/:@-]*", text):
        raise _Wrong("an image reference such as kernelpool/python:latest")
    return text


def _directory(text: str) -> Path:
    if "\0" in text:
        raise _Wrong("a directory")
    return Path(text).expanduser().absolute()


def _place(text: str) -> str | None:
    if "://" in text and not urlsplit(text).scheme:
        raise _Wrong("a directory or a URL such as s3://bucket/prefix")
    return text or None


def _host_names(text: str) -> tuple[str, ...]:
    names = tuple(name.strip().lower() for name in text.split(",") if name.strip())
    for name in names:
        if not re.fullmatch(r"[a-z0-9.-]+|\[[0-9a-f:]+\]", name):
            raise _Wrong("host names without port, separated by commas")
    return names


def _api_keys(text: str) -> Mapping[str, str]:
    keys: dict[str, str] = {}
    for part in text.split(","):
        if not part.strip():
            continue
        key, colon, tenant = part.strip().partition(":")
        named = re.fullmatch(r"[A-Za-z0-9._-]{1,100}", tenant) if colon else True
        if not named or not re.fullmatch(r"[!-~]+", key):
            raise _Wrong(
                "keys separated by commas, each `key` or `key:tenant`; keys of printable ASCII "
                "without blanks, tenants of letters, digits, dot, dash and underscore"
            )
        if key in keys:
            raise _Wrong("every key once")
        keys[key] = tenant or DEFAULT_TENANT
    return MappingProxyType(keys)


def _aliases(text: str) -> Mapping[str, str]:
    aliases = {}
    for part in text.split(","):
        if not part.strip():
            continue
        name, equals, target = (piece.strip() for piece in part.partition("="))
        if not (name and equals and target):
            raise _Wrong("pairs `name=model` separated by commas")
        aliases[name] = target
    return MappingProxyType(aliases)


@dataclass(frozen=True, repr=False)
class Settings:
    """Every setting, checked. Made by `load`.

    `api_keys` maps each key to its tenant.
    """

    redis_url: str | None = _setting(
        _url("redis", "rediss", "unix"),
        "",
        "URL",
        "Redis 7.0 or later, or Valkey: one primary, no cluster. Not set: a server of our own in "
        "`STATE_DIR`.",
        show=_mask_password,
    )
    redis_memory_bytes: int = _setting(
        _size(16 * MIB, 1024 * GIB),
        "512MiB",
        "bytes",
        "Memory at which our own Redis server refuses new records.",
    )
    state_dir: Path = _setting(  # noqa: RUF009 (it is a field)
        _directory,
        "",
        "directory",
        "Where slots, our own Redis server, artifacts and the worker's identity live. Not set: "
        "`/var/lib/kernelpool` as root, else `$XDG_STATE_HOME/kernelpool` "
        "(`~/.local/state/kernelpool`).",
    )
    artifacts_url: str | None = _setting(
        _place,
        "",
        "directory or URL",
        "Where files that code produced are kept: a directory, or `s3://bucket/prefix` and the "
        "like. Not set: `artifacts` in `STATE_DIR`.",
        show=_mask_password,
    )
    retention_days: float = _setting(
        _number(0.001, 3650),
        "7",
        "days",
        "How long records and files of ended containers are kept.",
    )
    runtime: str = _setting(
        _one_of("auto", "docker", "bubblewrap"),
        "auto",
        "",
        "What kernels run in. `auto`: Docker when the engine answers and the image exists, else "
        "bubblewrap.",
    )
    image: str = _setting(
        _image,
        "kernelpool/python:latest",
        "image",
        "Docker image of the kernels.",
    )
    oci_runtime: str | None = _setting(
        _optional,
        "",
        "name",
        "Docker's OCI runtime (`runc`, `crun`, `runsc`, ...). Not set: the engine's default.",
    )
    pool_size: int = _setting(
        _whole(0, 1000),
        "2",
        "slots",
        "Slots kept warm for new containers.",
    )
    max_slots: int = _setting(
        _whole(1, 10_000),
        "32",
        "slots",
        "Slots of this host in all, warm ones included.",
    )
    disk_bytes: int = _setting(
        _size(16 * MIB, 1024 * GIB),
        "1GiB",
        "bytes",
        "Disk that a container may use.",
    )
    uid_base: int = _setting(
        _whole(1000, 2_000_000_000),
        "2000000",
        "uid",
        "First of the million user ids given to slots in turn; they must be nobody else's.",
    )
    idle_minutes: int = _setting(
        _whole(1, 10_080),
        "20",
        "minutes",
        "Idle timeout of a container that asks for none (`expires_after.minutes`).",
    )
    max_lifetime_minutes: float = _setting(
        _number(0, 525_600),
        "60",
        "minutes",
        "Longest life of a container; 0: no limit.",
    )
    execution_timeout: float = _setting(
        _number(0.1, 86_400),
        "120",
        "seconds",
        "Time limit of an execution that asks for none.",
    )
    execution_timeout_cap: float = _setting(
        _number(0.1, 86_400),
        "600",
        "seconds",
        "Longest time limit that an execution may ask for.",
    )
    queue_limit: int = _setting(
        _whole(1, 10_000),
        "32",
        "executions",
        "Executions that may wait in one container.",
    )
    tenant_sessions: int = _setting(
        _whole(0, 1_000_000),
        "0",
        "containers",
        "Running containers per tenant; 0: no limit but `MAX_SLOTS`.",
    )
    max_upload_bytes: int = _setting(
        _size(1, 1024 * GIB),
        "512MiB",
        "bytes",
        "Largest file that may be uploaded.",
    )
    api_keys: Mapping[str, str] = _setting(
        _api_keys,
        "",
        "list of `key` or `key:tenant`",
        "Keys that callers must present. Not set: no key is needed, and only loopback is served.",
        show=_mask_keys,
    )
    allowed_hosts: tuple[str, ...] = _setting(
        _host_names,
        "",
        "list of names",
        "Names by which callers reach this service, beside loopback; others are refused.",
    )
    worker_token: str | None = _setting(
        _secret,
        "",
        "text",
        "Nothing uses it yet: what replicas and workers will prove themselves to each other with.",
        show=_mask,
    )
    worker_lost_seconds: float = _setting(
        _number(5, 86_400),
        "60",
        "seconds",
        "Nothing uses it yet: silence after which a worker is given up and its containers end.",
    )
    model_base_url: str | None = _setting(
        _url("http", "https"),
        "",
        "URL",
        "Nothing uses it yet: where every model is reached, over chat completions. Not set: "
        "`provider:name` models go to their providers.",
        show=_mask_password,
    )
    model_api_key: str | None = _setting(
        _optional,
        "",
        "text",
        "Nothing uses it yet: key for `MODEL_BASE_URL`.",
        show=_mask,
    )
    model_aliases: Mapping[str, str] = _setting(
        _aliases,
        "",
        "list of `name=model`",
        "Nothing uses it yet: model names that callers use, and what they stand for.",
    )
    log_level: str = _setting(
        _one_of("debug", "info", "warning", "error"),
        "info",
        "",
        "Least severity that is logged.",
    )
    sources: Mapping[str, Source] = field(default_factory=dict)
    """Where each field's value is from."""

    def __repr__(self) -> str:
        shown = (f"{row.variable}={row.value}" for row in describe(self) if row.source != "default")
        return f"<Settings {' '.join(shown)}>"

    @property
    def max_lifetime(self) -> float | None:
        """Longest life of a session in seconds; None: no limit."""
        return self.max_lifetime_minutes * 60 or None

    @property
    def retention(self) -> float:
        """Seconds that records of ended sessions are kept."""
        return self.retention_days * 24 * 3600

    @property
    def tenant_limit(self) -> int | None:
        """Running sessions per tenant; None: no limit."""
        return self.tenant_sessions or None

    @property
    def artifacts_place(self) -> str:
        """What `Artifacts.open` takes."""
        return self.artifacts_url or str(self.state_dir / "artifacts")


def _rows() -> list[tuple[str, _Setting]]:
    return [
        (item.name, item.metadata["setting"])
        for item in fields(Settings)
        if "setting" in item.metadata
    ]


def variable(name: str) -> str:
    """The environment variable of a field."""
    return PREFIX + name.upper()


def load(environ: Mapping[str, str]) -> Settings:
    """The settings in this environment.

    Raises:
        SettingsError: some are wrong; all of them are named.
    """
    values: dict[str, Any] = {}
    sources: dict[str, Source] = {}
    wrong: list[str] = []
    for name, setting in _rows():
        given = environ.get(variable(name), "").strip()
        sources[name] = "environment" if given else "default"
        text = given or setting.default
        if name == "state_dir" and not given:
            text = _default_state_dir(environ)
        try:
            values[name] = setting.parse(text)
        except _Wrong as allowed:
            shown = "(hidden)" if setting.show in {_mask, _mask_keys} else repr(_mask_url(given))
            wrong.append(f"{variable(name)} is {shown}; allowed is {allowed}.")
    if not wrong:
        settings = Settings(**values, sources=MappingProxyType(sources))
        wrong = _contradictions(settings)
        if not wrong:
            return settings
    raise SettingsError("\n".join(wrong))


def _mask_url(text: str) -> str:
    return re.sub(r"//[^/@]*@", "//********@", text)


def _default_state_dir(environ: Mapping[str, str]) -> str:
    if os.geteuid() == 0:
        return "/var/lib/kernelpool"
    base = environ.get("XDG_STATE_HOME", "")
    if not base.startswith("/"):
        base = environ.get("HOME", "~") + "/.local/state"
    return base + "/kernelpool"


def _contradictions(settings: Settings) -> list[str]:
    wrong = []
    if settings.execution_timeout > settings.execution_timeout_cap:
        wrong.append(
            f"{PREFIX}EXECUTION_TIMEOUT is {settings.execution_timeout:g}; allowed is at most "
            f"{PREFIX}EXECUTION_TIMEOUT_CAP, which is {settings.execution_timeout_cap:g}."
        )
    if settings.pool_size > settings.max_slots:
        wrong.append(
            f"{PREFIX}POOL_SIZE is {settings.pool_size}; allowed is at most {PREFIX}MAX_SLOTS, "
            f"which is {settings.max_slots}."
        )
    return wrong


def unknown(environ: Mapping[str, str]) -> list[str]:
    """One line for each variable that looks like a setting and is none, with what may be meant."""
    known = [variable(name) for name, _ in _rows()]
    lines = []
    for name in sorted(environ):
        if name.startswith(PREFIX) and name not in known:
            close = difflib.get_close_matches(name, known, n=1, cutoff=0.75)
            meant = f"; {close[0]} may be meant" if close else ""
            lines.append(f"{name} is no setting{meant}.")
    return lines


def describe(settings: Settings) -> list[SettingRow]:
    """Every setting for people, secrets masked."""
    return [
        SettingRow(
            variable=variable(name),
            value=setting.show(getattr(settings, name)),
            unit=setting.unit,
            source=settings.sources.get(name, "default"),
            help=setting.help,
            default=setting.default,
        )
        for name, setting in _rows()
    ]
