"""The store's Lua scripts, each with what all share. Above: store.py. Below: redis_keys.py.

Each `*.lua` here is one atomic step. `prelude.lua` is put behind the first line of each, after the
names of keys, fields and lifetimes, so that Lua spells none of them itself.
"""

from __future__ import annotations

from importlib import resources
from typing import Final

from orchestrator import redis_keys
from orchestrator.redis_link import Script

SCAN_LIMIT: Final = 1000
"""Sessions that one step of a filtered list looks at: under 2 ms of Redis' time."""

CURSORS_KEPT: Final = 1000
"""Deleted ids whose place a list remembers."""

SESSION_FIELDS: Final = (
    "tenant",
    "name",
    "status",
    "created_at",
    "last_active_at",
    "idle_minutes",
    "expires_at",
    "idle_expires_at",
    "memory_limit",
    "worker_id",
    "epoch",
    "ended_at",
    "end_reason",
)
"""Fields of a session's hash, in the order in which scripts return them."""

NOT_REPEATABLE: Final = frozenset({"remove_file"})
"""Scripts whose second run answers otherwise: the file they removed is gone by then."""


def _tables() -> str:
    """What the scripts know of keys, fields and lifetimes, as Lua."""
    keys = ", ".join(f"{key.name} = '{key.template}'" for key in redis_keys.KEYS)
    fields = ", ".join(f"'{field}'" for field in SESSION_FIELDS)
    places = ", ".join(f"{field} = {place}" for place, field in enumerate(SESSION_FIELDS, 1))
    life = {
        "log": redis_keys.LOG_LIFETIME,
        "logs_kept": redis_keys.LOGS_KEPT,
        "cursor": redis_keys.CURSOR_LIFETIME,
        "cursors_kept": CURSORS_KEPT,
        "idempotency": redis_keys.IDEMPOTENCY_LIFETIME,
        "grace": redis_keys.RETENTION_GRACE,
        "scan": SCAN_LIMIT,
    }
    numbers = ", ".join(f"{name} = {value}" for name, value in life.items())
    return (
        f"local KEY = {{{keys}}}\nlocal FIELDS = {{{fields}}}\n"
        f"local F = {{{places}}}\nlocal LIFE = {{{numbers}}}\n"
    )


def _load() -> dict[str, Script]:
    directory = resources.files(__name__)
    prelude = _tables() + (directory / "prelude.lua").read_text(encoding="utf-8")
    scripts = {}
    for file in directory.iterdir():
        name, _, kind = file.name.partition(".")
        if kind == "lua" and name != "prelude":
            first, rest = file.read_text(encoding="utf-8").split("\n", 1)
            scripts[name] = Script.of(
                f"{first}\n{prelude}\n{rest}", repeatable=name not in NOT_REPEATABLE
            )
    return scripts


SCRIPTS: Final = _load()
