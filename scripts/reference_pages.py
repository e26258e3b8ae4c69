"""Write the reference pages that are made from tables in the code, or check that they are current.

python scripts/reference_pages.py           writes docs/reference/{settings,redis-keys}.md
python scripts/reference_pages.py --check   fails when a page is not what would be written
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path

from orchestrator.redis_keys import KEYS, Key
from orchestrator.settings import describe, load

PAGES = Path(__file__).resolve().parent.parent / "docs" / "reference"

MADE = "<!-- Made by scripts/reference_pages.py from {source}; change it there. -->\n\n"

SETTINGS_HEAD = """# Settings

Read from the environment once, at start. A value that is not allowed is named and nothing starts;
an empty one counts as not set. Sizes take `KiB`, `MiB` and `GiB`. `kernelpool config` prints every
setting as it is now, secrets masked, and where its value is from.

"""

KEYS_HEAD = """# Redis keys

Everything kernelpool keeps in Redis. Redis has to be one primary, which may have
replicas, not a cluster: some steps touch keys of a session and of the whole fleet at once. Set
`maxmemory-policy noeviction`: records must not vanish on their own.

Instants are Unix seconds on Redis' clock. Nothing is written outside these keys.

"""


def settings_page() -> str:
    """The page of settings."""
    rows = (
        (f"`{row.variable}`", f"`{row.default}`" if row.default else "", row.unit, row.help)
        for row in describe(load({}))
    )
    return (
        SETTINGS_HEAD
        + MADE.format(source="orchestrator/settings.py")
        + table(("variable", "default", "unit", "what"), rows)
    )


def redis_keys_page() -> str:
    """The page of Redis keys."""
    rows = ((f"`{shown(key)}`", key.kind, key.holds, key.lifetime) for key in KEYS)
    return (
        KEYS_HEAD
        + MADE.format(source="orchestrator/redis_keys.py")
        + table(("key", "type", "holds", "lives"), rows)
    )


def shown(key: Key) -> str:
    """The key with a name for what varies."""
    return key(f"<{key.varies}>") if key.varies else key()


def table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    """A Markdown table."""
    lines = [head, tuple("---" for _ in head), *rows]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def pages() -> dict[Path, str]:
    """Every page and what it should hold."""
    return {
        PAGES / "settings.md": settings_page(),
        PAGES / "redis-keys.md": redis_keys_page(),
    }


def main(arguments: list[str]) -> int:
    """Write or check; the number of pages that are not current."""
    stale = [
        path
        for path, text in pages().items()
        if not path.exists() or path.read_text(encoding="utf-8") != text
    ]
    for path in stale:
        if "--check" in arguments:
            print(f"{path.name} is not current: run scripts/reference_pages.py")
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(pages()[path], encoding="utf-8")
    return len(stale) if "--check" in arguments else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
