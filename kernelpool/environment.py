"""The embedded environment: a kernel's Python on this host, for the bubblewrap runtime.

Above: runtimes.py, which looks for it; `kernelpool image build`. Below: recipe.py and uv.

It holds the same locked packages as the image, on the Python that runs us. The directory is
relocatable and never written to again, so it can be mounted read-only anywhere:

    bin/python        the kernel's interpreter; `python -m kernelpool_startup -f FILE` starts one
    matplotlib/       the font cache, for KERNELPOOL_FONT_CACHE
    packages.json     what is installed: name, version, bytes
    startup/          the start-up package

The packages are made once, as `packages-HASH`; `python-HASH` is that tree in hard links with the
start-up code added, so a change of the latter costs a second.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

import anyio
from anyio import to_thread

from kernelpool import recipe
from kernelpool.errors import ImageBuildError
from kernelpool.recipe import Progress, Steps

PACKAGE_STEPS: Final = ("packages", "fonts", "bytecode")

OLDEST, NEWEST = (3, 11), (3, 13)
"""The Pythons that the locked requirements were resolved for."""


def inputs_hash() -> str:
    """The hash of everything that decides what the environment is."""
    return recipe.fingerprint(recipe.startup_files(), _packages_hash())


def _packages_hash() -> str:
    facts = (sys.version, sys.base_prefix, recipe.machine())
    return recipe.fingerprint(recipe.package_files(), "environment", *facts)


def location(directory: Path) -> Path:
    """Where the environment of the current inputs is, or would be, below `directory`."""
    return directory / f"python-{inputs_hash()[:12]}"


def find(directory: Path) -> Path | None:
    """The finished environment of the current inputs, if there is one."""
    path = location(directory)
    return path if path.is_dir() else None


async def build_environment(directory: Path, *, progress: Progress = recipe.silent) -> Path:
    """The environment for the current inputs below `directory`, made if it is not there.

    Two processes may ask at once: one builds, the other waits and finds it. A build that fails or
    is cancelled leaves nothing behind, one that was killed is swept by the next.

    Raises:
        ImageBuildError: this Python does not fit, or packages could not be installed.
    """
    if not OLDEST <= sys.version_info[:2] <= NEWEST:
        raise ImageBuildError(
            f"kernels need Python 3.11 to 3.13, and this is {sys.version.split()[0]}"
        )
    path = await to_thread.run_sync(location, directory)
    if await anyio.Path(path).is_dir():
        return path
    packages = directory / f"packages-{(await to_thread.run_sync(_packages_hash))[:12]}"
    async with recipe.exclusive(directory / ".lock"):
        have_packages = await anyio.Path(packages).is_dir()
        steps = Steps(plan(have_packages=have_packages), progress)
        if not have_packages:
            async with _building(packages) as building:
                await _install_packages(building, steps)
        if not await anyio.Path(path).is_dir():
            async with _building(path) as building:
                await _add_startup(packages, building, steps)
    return path


def plan(*, have_packages: bool) -> tuple[str, ...]:
    """The titles of the steps that a build takes."""
    return ("start-up code",) if have_packages else (*PACKAGE_STEPS, "start-up code")


@asynccontextmanager
async def _building(path: Path) -> AsyncIterator[Path]:
    """A directory that takes the name `path` once it is finished, and is gone if it never is."""
    building = path.with_name(f".building-{path.name}")
    await to_thread.run_sync(shutil.rmtree, building, True)
    try:
        yield building
        await anyio.Path(building).rename(path)
    finally:
        with anyio.CancelScope(shield=True):
            await to_thread.run_sync(shutil.rmtree, building, True)


async def _install_packages(building: Path, steps: Steps) -> None:
    uv = await to_thread.run_sync(recipe.find_uv)
    environment = await recipe.installer_environment()
    sources = recipe.IMAGES / "python"
    python = building / "bin" / "python"

    steps.next("packages")
    await recipe.run(
        # uv takes the interpreter behind ours: a virtual environment may go while kernels live.
        [uv, "venv", "--quiet", "--relocatable", "--python", sys.executable, building],
        purpose="make a virtual environment for kernels",
        environment=environment,
        detail=steps.detail,
    )
    await recipe.run(
        [uv, "pip", "install", "--python", python, "--no-deps",
         "--only-binary=:all:", "--require-hashes",
         "-r", sources / "requirements.txt"],
        purpose="install the packages of kernels",
        environment=environment,
        detail=steps.detail,
    )  # fmt: skip
    async for site in anyio.Path(building, "lib").glob("python3*/site-packages"):
        await (site / "kernelpool.pth").write_text("../../../startup\n", encoding="utf-8")

    steps.next("fonts")
    await recipe.run(
        [python, sources / "fonts.py", building / "matplotlib"],
        purpose="build the font cache of kernels",
        detail=steps.detail,
    )

    # The directory is read-only for kernels: bytecode that is not there now never will be, and each
    # kernel would compile what it imports.
    steps.next("bytecode")
    await _compile(python, building / "lib")
    await recipe.run(
        [python, sources / "inventory.py", building / "packages.json"],
        purpose="list the packages of kernels",
    )
    await recipe.run(
        ["chmod", "-R", "a+rX,go-w", building], purpose="make the packages of kernels readable"
    )


async def _add_startup(packages: Path, building: Path, steps: Steps) -> None:
    steps.next("start-up code")
    await recipe.run(["cp", "-al", packages, building], purpose="link the packages of kernels")
    sources = building / "startup.sources"
    await to_thread.run_sync(recipe.copy_startup, sources)
    python = building / "bin" / "python"
    uv = await to_thread.run_sync(recipe.find_uv)
    await recipe.run(
        [uv, "pip", "install", "--python", python, "--no-deps",
         "--target", building / "startup", sources],
        purpose="install the start-up code of kernels",
        environment=await recipe.installer_environment(),
        detail=steps.detail,
    )  # fmt: skip
    await to_thread.run_sync(shutil.rmtree, sources)
    await _compile(python, building / "startup")
    await recipe.run(
        ["chmod", "-R", "a+rX,go-w", building / "startup"],
        purpose="make the start-up code readable",
    )


async def _compile(python: Path, directory: Path) -> None:
    await recipe.run(
        [python, "-m", "compileall", "-q", "-j", "0", "--invalidation-mode", "unchecked-hash",
         "-x", "/tests?/", directory],
        purpose="compile the packages of kernels",
    )  # fmt: skip
