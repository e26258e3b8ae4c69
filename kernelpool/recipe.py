"""The recipe of a kernel's Python: the files in `images/python`, their hash, and running commands.

Above: image.py and environment.py, which carry it out in a container and on the host.
Below: the file system and child processes.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import platform
import re
import shutil
import signal
import subprocess
import sysconfig
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Final

import anyio
import anyio.abc
from anyio import to_thread
from anyio.streams.text import TextReceiveStream

from kernelpool import package_index
from kernelpool.errors import ImageBuildError

IMAGES: Final = next(
    path
    for path in (Path(__file__).with_name("_images"), Path(__file__).parent.parent / "images")
    if path.is_dir()
)
"""The directory `images/`: inside the installed package, or beside it in a checkout."""

STARTUP_PACKAGE: Final = "kernelpool_startup"

TAIL_LINES: Final = 20
"""Lines of a failed command's output that its error carries."""

LOCK_POLL: Final = 0.2
"""Seconds between two tries for a lock that another process holds for minutes at worst."""

ESCAPES: Final = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


@dataclass(frozen=True, slots=True)
class Step:
    """Where a build is: reported again with each new `detail`."""

    number: int
    total: int
    title: str
    detail: str = ""


Progress = Callable[[Step], None]


def silent(step: Step) -> None:
    """Report to nobody."""


class Steps:
    """Counts through the titles of a plan and reports details under the current one."""

    def __init__(self, titles: Sequence[str], progress: Progress) -> None:
        self._titles = tuple(titles)
        self._progress = progress
        self._number = 0

    def next(self, title: str) -> None:
        """Begin the step of that title, which must be the plan's next."""
        assert self._titles[self._number] == title, (title, self._titles)
        self._number += 1
        self.detail("")

    def detail(self, text: str) -> None:
        """Say what the current step is at."""
        self._progress(Step(self._number, len(self._titles), self._titles[self._number - 1], text))


def package_files() -> Iterator[tuple[str, Path]]:
    """Name and path of each file that decides which packages are installed and how."""
    root = IMAGES / "python"
    for name in ("Dockerfile", "requirements.txt", "fonts.py", "inventory.py"):
        yield name, root / name


def startup_files() -> Iterator[tuple[str, Path]]:
    """Name and path of each file of the start-up package, in a fixed order."""
    root = IMAGES / "python"
    for path in sorted((root / "startup").rglob("*")):
        relative = path.relative_to(root)
        if path.suffix in {".py", ".toml", ".md"} and not _ignored(relative.parts):
            yield relative.as_posix(), path


def _ignored(parts: tuple[str, ...]) -> bool:
    return any(
        part in {"tests", "build", "dist"} or part.startswith(".") or part.endswith(".egg-info")
        for part in parts
    )


def fingerprint(files: Iterable[tuple[str, Path]], *facts: str) -> str:
    """Hash files together with `facts`, such as the base that the recipe is applied to."""
    digest = hashlib.sha256()
    for fact in facts:
        digest.update(f"{len(fact)}:{fact}".encode())
    for name, path in files:
        content = path.read_bytes()
        digest.update(f"{name}:{len(content)}:".encode())
        digest.update(content)
    return digest.hexdigest()


def copy_startup(destination: Path) -> None:
    """Copy the start-up package's sources: a build backend may write beside them."""
    for name, path in startup_files():
        target = destination / name.removeprefix("startup/")
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, target)


def cache_directory() -> Path:
    """Where downloads are kept between builds."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "kernelpool"


def find_uv() -> str:
    """The program `uv`: the one installed with us, one on PATH, or a checkout's own.

    Raises:
        ImageBuildError: there is none.
    """
    beside = Path(sysconfig.get_path("scripts")) / "uv"
    checkout = IMAGES.parent / ".tools" / "bin" / "uv"
    for candidate in (beside, shutil.which("uv"), checkout):
        if candidate is not None and os.access(candidate, os.X_OK):
            return str(candidate)
    raise ImageBuildError("uv was not found; `pip install uv` where kernelpool is installed")


async def installer_environment() -> dict[str, str]:
    """The environment for pip and uv: ours, with pip's settings repeated for uv.

    A constraints file is meant for the user's own installs; here every version is locked by hash.
    """
    added = await to_thread.run_sync(package_index.uv_environment)
    return {
        **os.environ,
        **added,
        "PIP_CONSTRAINT": os.devnull,
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        "PIP_NO_INPUT": "1",
        "UV_NO_PROGRESS": "1",
    }


async def run(
    command: Sequence[str | os.PathLike[str]],
    *,
    purpose: str,
    environment: Mapping[str, str] | None = None,
    detail: Callable[[str], None] = lambda line: None,
) -> str:
    """Run a command to its end and return its last lines.

    Its files are readable by everybody, whatever our umask: kernels run under foreign uids. When we
    are cancelled, it and its children are killed.

    Args:
        command: program and arguments; a program that is not there is an error like any other.
        purpose: completes "could not ..." in the error.
        environment: the whole environment; None is ours.
        detail: called with each line it prints.

    Raises:
        ImageBuildError: it could not be started or failed; the message carries its last lines.
    """
    tail: deque[str] = deque(maxlen=TAIL_LINES)
    try:
        process = await anyio.open_process(
            command,
            stdin=subprocess.DEVNULL,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
            umask=0o022,
        )
    except OSError as error:
        raise ImageBuildError(f"could not {purpose}: {command[0]}: {error.strerror}") from error
    try:
        async for line in _lines(process):
            tail.append(line)
            detail(line)
        status = await process.wait()
    finally:
        with anyio.CancelScope(shield=True):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.aclose()
    output = "\n".join(tail)
    if status != 0:
        raise ImageBuildError(f"could not {purpose} (exit status {status}):\n{output}")
    return output


async def _lines(process: anyio.abc.Process) -> AsyncIterator[str]:
    assert process.stdout is not None
    rest = ""
    async for text in TextReceiveStream(process.stdout, errors="replace"):
        *complete, rest = (rest + text).replace("\r\n", "\n").replace("\r", "\n").split("\n")
        for line in complete:
            if clean := ESCAPES.sub("", line).strip():
                yield clean
    if clean := ESCAPES.sub("", rest).strip():
        yield clean


@asynccontextmanager
async def exclusive(path: Path) -> AsyncIterator[None]:
    """Hold a lock file while the block runs; other processes wait for it.

    Raises:
        ImageBuildError: the directory cannot be written to.
    """

    def opened() -> IO[bytes]:
        path.parent.mkdir(parents=True, exist_ok=True)
        return path.open("ab")

    try:
        handle = await to_thread.run_sync(opened)
    except OSError as error:
        raise ImageBuildError(f"cannot write to {path.parent}: {error.strerror}") from error
    with handle:
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                await anyio.sleep(LOCK_POLL)
        yield


def machine() -> str:
    """What compiled packages depend on besides Python: processor and C library."""
    return f"{platform.machine()} {' '.join(platform.libc_ver())}"
