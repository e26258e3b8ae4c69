"""What pip was told about the package index, in uv's words.

Above: recipe.py, and `scripts/bootstrap.sh`, which runs this file before there is a .venv.
Below: pip's own `config` command. Standard library only.

uv does not read pip's configuration. Someone whose machine reaches packages through a mirror, with
a certificate of its own, has often told pip only.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence

UV_DOWNLOADS = ("UV_PYTHON_DOWNLOADS", "never")
"""An interpreter is never fetched: it must be the one that runs us, or a clear error."""


def parse(lines: Sequence[str]) -> dict[str, str]:
    """Read the lines of `pip config list`; a command's own section wins over `global`.

    Args:
        lines: such as `global.index-url='https://index.example/simple'`.
    """
    settings: dict[str, str] = {}
    for wanted in ("global.", "install.", ":env:."):
        for line in lines:
            key, separator, value = line.strip().partition("=")
            if separator and key.startswith(wanted):
                settings[key.removeprefix(wanted)] = value.strip().strip("'\"")
    return settings


def translate(pip: Mapping[str, str], environment: Mapping[str, str]) -> dict[str, str]:
    """The variables to add for uv; what is already set for uv is left alone."""
    added = dict([UV_DOWNLOADS])
    if "index-url" in pip and not {"UV_INDEX_URL", "UV_DEFAULT_INDEX"} & environment.keys():
        added["UV_DEFAULT_INDEX"] = pip["index-url"]
    if "cert" in pip and "SSL_CERT_FILE" not in environment:
        added["SSL_CERT_FILE"] = pip["cert"]
    if "trusted-host" in pip and "UV_INSECURE_HOST" not in environment:
        added["UV_INSECURE_HOST"] = " ".join(pip["trusted-host"].replace("\\n", " ").split())
    if "proxy" in pip and not {"HTTPS_PROXY", "https_proxy", "ALL_PROXY"} & environment.keys():
        added["HTTP_PROXY"] = added["HTTPS_PROXY"] = pip["proxy"]
    return added


def uv_environment() -> dict[str, str]:
    """Ask this interpreter's pip; without a pip there is nothing to translate."""
    listed = subprocess.run(
        [sys.executable, "-m", "pip", "--disable-pip-version-check", "config", "list"],
        capture_output=True,
        text=True,
        check=False,
        stdin=subprocess.DEVNULL,
        timeout=60,
    )
    lines = listed.stdout.splitlines() if listed.returncode == 0 else []
    return translate(parse(lines), os.environ)


if __name__ == "__main__":
    for name, value in uv_environment().items():
        sys.stdout.write(f"export {name}={shlex.quote(value)}\n")
