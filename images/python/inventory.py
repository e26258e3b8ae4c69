"""List what is installed, with versions and bytes on disk, as JSON.

Run once by the environment's own Python while the image or the environment is built:

    python inventory.py FILE

It answers "what can this kernel import?" without starting one, and "what makes the image large?".
"""

import importlib.metadata
import importlib.util
import json
import sys
from pathlib import Path


def size_of(path: Path) -> int:
    """Bytes of a file and of its bytecode; 0 for what is not there."""
    files = [path]
    if path.suffix == ".py":
        files.append(Path(importlib.util.cache_from_source(str(path))))
    return sum(file.stat().st_size for file in files if file.is_file())


def inventory() -> list[dict[str, str | int]]:
    """Return one entry per distribution, the largest first."""
    entries: list[dict[str, str | int]] = [
        {
            "name": distribution.metadata["Name"],
            "version": distribution.version,
            "bytes": sum(size_of(Path(str(file.locate()))) for file in distribution.files or ()),
        }
        for distribution in importlib.metadata.distributions()
    ]
    return sorted(entries, key=lambda entry: (-int(entry["bytes"]), str(entry["name"])))


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(json.dumps(inventory(), indent=1) + "\n", encoding="utf-8")
