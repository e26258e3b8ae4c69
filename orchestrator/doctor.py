"""What this machine has and lacks for running kernels. Above: __main__.py. Below: kernelpool."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import cast

from kernelpool import ConfigurationError, KernelPoolError, Profile, SlotStore
from kernelpool.runtimes import RuntimeName, RuntimeSettings, open_runtime
from kernelpool.slot import quota_available
from orchestrator.artifacts import Artifacts, ArtifactStoreError
from orchestrator.embedded_redis import find_binary
from orchestrator.errors import ServiceError
from orchestrator.settings import Settings
from orchestrator.store import open_store


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at."""

    what: str
    fine: bool
    found: str
    cure: str = ""
    needed: bool = True
    """Whether the service cannot run without it."""


async def examine(settings: Settings) -> list[Finding]:
    """Look at everything the service needs; nothing is changed but a directory that is removed."""
    findings = [_platform(), _memory()]
    docker = await _runtime(settings, "docker")
    bubblewrap = await _runtime(settings, "bubblewrap")
    findings += [docker, bubblewrap, await _choice(settings)]
    findings += [await _quota(settings), await _redis(settings), await _artifacts(settings)]
    return findings


def _platform() -> Finding:
    version = platform.python_version()
    fine = sys.platform == "linux"
    cure = "" if fine else "Kernels need Linux (WSL2 will do)."
    return Finding(
        "platform", fine, f"{platform.system()} {platform.machine()}, Python {version}", cure
    )


def _memory() -> Finding:
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    enough = total > 2 * 1024**3
    cure = "" if enough else "Each kernel may use 1 GiB; give the machine more than 2 GiB."
    return Finding(
        "memory", enough, f"{total / 1024**3:.1f} GiB, {os.cpu_count()} processors", cure
    )


async def _runtime(settings: Settings, name: RuntimeName) -> Finding:
    needed = settings.runtime == name
    try:
        async with open_runtime(_runtime_settings(settings, name)) as opened:
            capabilities = asdict(opened.runtime.capabilities)
            weak = [capability for capability, there in capabilities.items() if not there]
            found = f"works with {opened.profile.image}"
            if weak:
                found += f" (without {', '.join(weak)})"
            return Finding(name, True, found, needed=needed)
    except KernelPoolError as error:
        return Finding(name, False, "cannot be used", str(error), needed=needed)


async def _choice(settings: Settings) -> Finding:
    """What `up` would take, found the same way."""
    asked = f"KERNELPOOL_RUNTIME is {settings.runtime}"
    try:
        runtime = cast("RuntimeName", settings.runtime)
        async with open_runtime(_runtime_settings(settings, runtime)) as opened:
            taken = opened.runtime.name
    except KernelPoolError as error:
        return Finding("runtime", False, f"none ({asked})", str(error))
    warning = "" if taken == "docker" else " - for your own machine; use Docker for strangers' code"
    return Finding("runtime", True, f"{taken} ({asked}){warning}")


def _runtime_settings(settings: Settings, name: RuntimeName) -> RuntimeSettings:
    return RuntimeSettings(
        runtime=name,
        state_directory=settings.state_dir,
        environments=settings.state_dir / "environments",
        owner="doctor",
        profile=Profile(image=settings.image, oci_runtime=settings.oci_runtime),
    )


async def _quota(settings: Settings) -> Finding:
    async with _state_directory(settings) as directory:
        try:
            await SlotStore.open(directory)
            quota, reason = await quota_available(directory)
        except ConfigurationError as error:
            return Finding("slots", False, "cannot be made", str(error))
    if quota == "image":
        return Finding("disk quota", True, "image: a file system of its own for each container")
    return Finding(
        "disk quota", False, "watch: disk use is looked at each second",
        f"{reason}.", needed=False,
    )  # fmt: skip


@asynccontextmanager
async def _state_directory(settings: Settings) -> AsyncIterator[Path]:
    """The state directory, or a temporary one when it does not exist yet."""
    if settings.state_dir.is_dir():
        yield settings.state_dir
        return
    with TemporaryDirectory(prefix="kernelpool-doctor-") as directory:
        yield Path(directory)


async def _redis(settings: Settings) -> Finding:
    if settings.redis_url is None:
        try:
            binary = await find_binary()
        except ConfigurationError as error:
            return Finding("redis", False, "no server", str(error))
        return Finding("redis", True, f"our own, {binary}")
    try:
        async with open_store(
            settings.redis_url, Artifacts.open(settings.artifacts_place)
        ) as store:
            await store.ping()
    except ServiceError as error:
        return Finding(
            "redis", False, error.message, "Start it, or correct KERNELPOOL_REDIS_URL; without "
            "that setting a server of our own is used.",
        )  # fmt: skip
    return Finding("redis", True, "KERNELPOOL_REDIS_URL answers")


async def _artifacts(settings: Settings) -> Finding:
    try:
        store = Artifacts.open(settings.artifacts_place)
        await store.put("doctor", b"")
        await store.delete(["doctor"])
    except ArtifactStoreError as error:
        return Finding("artifact store", False, str(error), "Correct KERNELPOOL_ARTIFACTS_URL.")
    return Finding("artifact store", True, "takes and gives back")
