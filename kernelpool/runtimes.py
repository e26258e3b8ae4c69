"""Which runtime serves on this host, and why. Above: host.py, doctor.py. Below: both runtimes.

`auto` takes Docker when an engine answers and has the image, else bubblewrap; either says why.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from anyio import to_thread

from kernelpool import environment, recipe
from kernelpool.container import DockerRuntime
from kernelpool.errors import ConfigurationError, EngineError, KernelPoolError
from kernelpool.profile import Profile
from kernelpool.runtime import Runtime
from kernelpool.sandbox import BubblewrapRuntime

RuntimeName = Literal["auto", "docker", "bubblewrap"]


@dataclass(frozen=True, slots=True)
class RuntimeSettings:
    """What the choice depends on."""

    runtime: RuntimeName
    state_directory: Path
    owner: str
    """Id of the worker."""
    profile: Profile
    environments: Path
    """Where environments for bubblewrap kernels are kept."""


@dataclass(frozen=True, slots=True)
class Chosen:
    """A runtime that passed its check, with the profile made to fit it."""

    runtime: Runtime
    profile: Profile
    reason: str
    """One sentence for the log and for `doctor`."""


@asynccontextmanager
async def open_runtime(settings: RuntimeSettings) -> AsyncIterator[Chosen]:
    """The runtime that serves here, entered and checked.

    Raises:
        EngineUnreachable, ImageMissing, ConfigurationError: none can; the message names the cure.
    """
    async with AsyncExitStack() as stack:
        if settings.runtime == "docker":
            yield await _docker(settings, stack, "asked for")
            return
        if settings.runtime == "bubblewrap":
            yield await _bubblewrap(settings, stack, "asked for")
            return
        try:
            chosen = await _docker(settings, stack, "an engine answers and has the image")
        except EngineError as error:
            why = f"Docker cannot be used: {error}"
            try:
                chosen = await _bubblewrap(settings, stack, why)
            except KernelPoolError as refused:
                raise ConfigurationError(f"{refused}. {why}") from refused
        yield chosen


async def docker_usable(image: str) -> bool:
    """Whether a Docker Engine answers and has the image."""
    try:
        async with DockerRuntime(owner="look") as runtime:
            await runtime.check(Profile(image=image))
    except KernelPoolError:
        return False
    return True


async def _docker(settings: RuntimeSettings, stack: AsyncExitStack, why: str) -> Chosen:
    async with AsyncExitStack() as trial:
        runtime = await trial.enter_async_context(
            DockerRuntime(owner=settings.owner, seccomp=recipe.IMAGES / "seccomp.json")
        )
        profile = replace(settings.profile, runtime="docker")
        await runtime.check(profile)
        stack.push_async_exit(trial.pop_all())
    return Chosen(runtime, profile, f"docker: {why}")


async def _bubblewrap(settings: RuntimeSettings, stack: AsyncExitStack, why: str) -> Chosen:
    found = await to_thread.run_sync(environment.find, settings.environments)
    if found is None:
        raise ConfigurationError(
            "there is no environment for kernels; `kernelpool image build --runtime bubblewrap` "
            "makes it"
        )
    runtime = await stack.enter_async_context(
        BubblewrapRuntime(state_directory=settings.state_directory / "sandboxes")
    )
    profile = replace(settings.profile, runtime="bubblewrap", image=str(found))
    await runtime.check(profile)
    return Chosen(runtime, profile, f"bubblewrap: {why}")
