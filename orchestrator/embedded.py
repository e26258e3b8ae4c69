"""A whole service for as long as a block lasts, on a state directory of its own.

Above: demo.py, run_file.py. Below: host.py, image_build.py. Nothing of it is left afterwards but
the kernel environment, which later calls share.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

from anyio import to_thread
from rich.console import Console

from kernelpool.runtimes import docker_usable
from orchestrator.host import Host, running_host
from orchestrator.image_build import build_for_bubblewrap
from orchestrator.settings import Settings


@asynccontextmanager
async def embedded_host(settings: Settings, console: Console) -> AsyncIterator[Host]:
    """A host without warm slots; the environment for bubblewrap is made first where it is needed.

    Raises:
        ConfigurationError, EngineUnreachable, ImageMissing, ImageBuildError, StoreUnavailable: the
            message names the cure.
    """
    environments = settings.state_dir / "environments"
    if settings.runtime == "bubblewrap" or (
        settings.runtime == "auto" and not await docker_usable(settings.image)
    ):
        await build_for_bubblewrap(environments, console=console)
    directory = Path(await to_thread.run_sync(tempfile.mkdtemp, None, "kernelpool-"))
    try:
        await to_thread.run_sync(directory.chmod, 0o711)
        own = replace(settings, state_dir=directory, pool_size=0, redis_url=None)
        async with running_host(own, environments=environments) as host:
            yield host
    finally:
        await to_thread.run_sync(shutil.rmtree, directory, True)
