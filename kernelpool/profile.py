"""Profile and Limits: the recipe of a kernel and its bounds. Above: everything. Below: nothing."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final, Literal

KIB: Final = 1024
MIB: Final = 1024 * KIB
GIB: Final = 1024 * MIB

MEMORY_TIERS: Final[dict[str, int]] = {"1g": GIB, "4g": 4 * GIB, "16g": 16 * GIB, "64g": 64 * GIB}
"""Bytes per memory tier. Source: the hosted API's `memory_limit` values."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What one kernel and everything it starts may use."""

    memory_bytes: int = GIB
    """Memory of the container, swap excluded (there is none)."""
    cpus: float = 1.0
    """Processors' worth of time per second."""
    processes: int = 256
    """Processes and threads. A kernel with numpy holds about 15; a process pool a few per core."""
    open_files: int = 4096
    """File descriptors per process."""
    disk_bytes: int = GIB
    """Size of the slot's file system: workspace, journal and sockets together."""
    inodes: int = 65536
    """Files, directories and links in the slot's file system."""
    file_bytes: int = GIB
    """Largest single file (RLIMIT_FSIZE)."""
    tmp_bytes: int = 256 * MIB
    """Size of the tmpfs at /tmp; counts towards the memory."""

    def with_memory(self, memory_bytes: int) -> Limits:
        """The same limits on another memory tier."""
        return replace(self, memory_bytes=memory_bytes)


@dataclass(frozen=True, slots=True)
class Profile:
    """Image or environment, runtime and limits of the kernels that a pool makes."""

    name: str = "python"
    runtime: Literal["docker", "bubblewrap"] = "docker"
    image: str = "kernelpool/python:latest"
    """Docker: the image reference. bubblewrap: the directory of the environment."""
    limits: Limits = Limits()
    oci_runtime: str | None = None
    """Docker: name of the OCI runtime (`runc`, `crun`, ...); None is the engine's default."""
    warm_imports: tuple[str, ...] = ("numpy", "pandas", "matplotlib.pyplot")
    """Modules imported while a slot is warmed, so that a session need not wait for them."""
