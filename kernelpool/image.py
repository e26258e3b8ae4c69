"""The kernel image: built from the recipe on any base, with or without an image registry.

Above: `kernelpool image build`. Below: recipe.py and the Docker Engine. Beside container.py the
only importer of docker; blocking calls go to threads here.

    base        pull it, or make Debian with debootstrap and import it; kept by its recipe's hash
    wheels      download the locked packages for the base's Python, not for ours
    image       `docker build` without a network, from those wheels

Nothing is done when the engine has an image with the hash of the current inputs.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any, Final, Literal, TypeVar

import anyio
import docker
import docker.errors
import requests.exceptions
from anyio import CapacityLimiter, from_thread, to_thread
from docker.utils import parse_repository_tag
from packaging.markers import Environment
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name, parse_wheel_filename

from kernelpool import recipe
from kernelpool.container import unreachable
from kernelpool.errors import ImageBuildError
from kernelpool.recipe import Progress, Steps

T = TypeVar("T")

Base = Literal["python", "debian"] | str

REPOSITORY: Final = "kernelpool/python"
BASE_REPOSITORY: Final = "kernelpool/base-debian"
INPUTS_LABEL: Final = "org.kernelpool.inputs"
BASE_LABEL: Final = "org.kernelpool.base"
PACKAGES_FILE: Final = "/opt/kernelpool/packages.json"

BASES: Final = {"python": "python:3.12-slim"}
"""Short names of bases that come from a registry. `debian` is made here."""

SUITE: Final = "bookworm"
MIRROR: Final = "http://deb.debian.org/debian"
SECURITY_MIRROR: Final = "http://deb.debian.org/debian-security"
DEBIAN_PACKAGES: Final = ("ca-certificates", "procps", "python3", "python3-venv", "unzip", "zip")
LEFT_OUT: Final = (
    "./dev/*",
    "./proc/*",
    "./sys/*",
    "./tmp/*",
    "./var/cache/apt/*",
    "./var/lib/apt/lists/*",
    "./var/log/*",
    "./usr/share/doc/*/changelog*",
    "./usr/share/locale/*",
    "./usr/share/man/*",
)
"""Parts of the Debian root that no kernel reads; 40 MB of 260. Licences stay."""

DEFAULT_HOST: Final = "unix:///var/run/docker.sock"

ENGINE_TIMEOUT: Final = 600
"""Seconds between two signs of life from the engine during a build."""

IMPORT_CHANGES: Final = (
    "ENV PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    "ENV LANG=C.UTF-8",
    'CMD ["bash"]',
)

PROBE: Final = (
    "import json, platform;"
    "print(json.dumps({'python': platform.python_version(), 'machine': platform.machine(),"
    " 'libc': platform.libc_ver()}))"
)


@dataclass(frozen=True, slots=True)
class Part:
    """Something that takes room in the image: a layer or a package."""

    kind: Literal["layer", "package"]
    name: str
    size_bytes: int


@dataclass(frozen=True, slots=True)
class ImageReport:
    """A kernel image in the engine."""

    reference: str
    image_id: str
    inputs: str
    base: str
    size_bytes: int
    parts: tuple[Part, ...]
    """Layers, then packages, each the largest first."""
    built: bool
    """False when it was already there."""
    seconds: float


@dataclass(frozen=True, slots=True)
class Target:
    """The Python inside a base, for which wheels are chosen."""

    python: str
    """Full version, such as `3.11.2`."""
    machine: str
    libc: tuple[str, str]

    @property
    def tag(self) -> str:
        """Name of the directory that keeps wheels for such targets."""
        return f"cp{self._digits}-{self.machine}-{''.join(self.libc)}"

    @property
    def _digits(self) -> str:
        return "".join(self.python.split(".")[:2])

    @property
    def pip_options(self) -> tuple[str, ...]:
        """Pip's options that choose wheels for this target instead of the running Python."""
        return (
            f"--python-version={'.'.join(self.python.split('.')[:3])}",
            "--implementation=cp",
            f"--abi=cp{self._digits}",
            "--abi=abi3",
            "--abi=none",
            *(f"--platform={platform}" for platform in self._platforms()),
        )

    def _platforms(self) -> Iterator[str]:
        name, version = self.libc
        if name == "glibc":
            major, minor = (int(part) for part in version.split(".")[:2])
            # From the image's own C library down to the oldest that packages are still built for.
            for older in range(minor, 4, -1):
                yield f"manylinux_{major}_{older}_{self.machine}"
            yield f"manylinux2014_{self.machine}"
        yield f"linux_{self.machine}"

    @property
    def marker_environment(self) -> Environment:
        """What markers such as `python_full_version < '3.12'` are evaluated against."""
        return Environment(
            implementation_name="cpython",
            implementation_version=self.python,
            os_name="posix",
            platform_machine=self.machine,
            platform_python_implementation="CPython",
            platform_release="",
            platform_system="Linux",
            platform_version="",
            python_full_version=self.python,
            python_version=".".join(self.python.split(".")[:2]),
            sys_platform="linux",
        )


def inputs_hash(base: Base = "python") -> str:
    """The hash of everything that decides what the image is, as far as it is ours."""
    source = base_hash() if base == "debian" else BASES.get(base, base)
    files = (*recipe.package_files(), *recipe.startup_files())
    return recipe.fingerprint(files, "image", base, source)


def base_hash() -> str:
    """The hash of the recipe of the Debian base."""
    facts = (SUITE, *DEBIAN_PACKAGES, *LEFT_OUT, *IMPORT_CHANGES, "security updates", "no setuid")
    return hashlib.sha256("\n".join(facts).encode()).hexdigest()


def reference(base: Base = "python") -> str:
    """The name under which the image of the current inputs is kept."""
    return f"{REPOSITORY}:{inputs_hash(base)[:12]}"


def plan(base: Base, *, have_base: bool) -> tuple[str, ...]:
    """The titles of the steps that a build takes."""
    source: tuple[str, ...] = ("pull",)
    if have_base:
        source = ()
    elif base == "debian":
        source = ("debootstrap", "security updates", "import")
    return (*source, "wheels", "image")


def requirements_for(target: Target, text: str) -> dict[str, str]:
    """Which lines of locked requirements hold for a target: canonical name to block.

    pip evaluates markers against the Python that runs it, also where it downloads for another.

    Args:
        target: the Python inside the base.
        text: the content of requirements.txt: a requirement per block, its hashes below it.
    """
    chosen: dict[str, str] = {}
    for block in re.split(r"\n(?=\S)", text.replace("\\\n", " ")):
        first = block.split("#", 1)[0].split("--hash", 1)[0].strip()
        if not first:
            continue
        requirement = Requirement(first)
        if requirement.marker is None or requirement.marker.evaluate(
            dict(target.marker_environment)  # type: ignore[arg-type]
        ):
            hashes = " ".join(re.findall(r"--hash=\S+", block))
            pinned = f"{requirement.name}{requirement.specifier}"
            chosen[canonicalize_name(requirement.name)] = f"{pinned} {hashes}"
    return chosen


def locked_wheels(chosen: Mapping[str, str], directory: Path) -> tuple[list[Path], set[str]]:
    """The wheels in `directory` that are locked, and the names that have none."""
    found: dict[str, Path] = {}
    for path in sorted(directory.glob("*.whl")):
        name, version, *_ = parse_wheel_filename(path.name)
        pinned = Requirement(chosen[name].split(" ", 1)[0]) if name in chosen else None
        if pinned is not None and pinned.specifier.contains(version, prereleases=True):
            found[name] = path
    return list(found.values()), set(chosen) - set(found)


@contextlib.contextmanager
def _translated(purpose: str) -> Iterator[None]:
    try:
        yield
    except (docker.errors.BuildError, docker.errors.APIError) as error:
        raise ImageBuildError(f"could not {purpose}: {error}") from error
    except (docker.errors.DockerException, requests.exceptions.RequestException) as error:
        raise unreachable(error) from error


def _knock(host: str) -> None:
    """Open the engine's socket once: the SDK hides why it could not, and leaks what it opened."""
    scheme, _, path = host.partition("://")
    if scheme == "unix":
        with socket.socket(socket.AF_UNIX) as knock:
            try:
                knock.connect(f"/{path.lstrip('/')}")
            except OSError as error:
                raise unreachable(f"{host}: {error.strerror}") from error


class _Engine:
    """The few engine calls that a build takes, each in a thread."""

    def __init__(self) -> None:
        self.client: Any = None
        self._limiter = CapacityLimiter(2)
        self._cancelled = threading.Event()

    @classmethod
    @contextlib.asynccontextmanager
    async def connect(cls, docker_host: str | None) -> AsyncIterator[_Engine]:
        """Reach the engine for as long as the block runs."""
        engine = cls()
        await to_thread.run_sync(
            _knock, docker_host or os.environ.get("DOCKER_HOST") or DEFAULT_HOST
        )
        if docker_host is None:
            make = partial(docker.from_env, timeout=ENGINE_TIMEOUT)
        else:
            make = partial(docker.DockerClient, base_url=docker_host, timeout=ENGINE_TIMEOUT)
        engine.client = await engine.call("reach the engine", make)
        try:
            yield engine
        finally:
            engine.client.close()

    async def call(self, purpose: str, func: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Run a blocking function; when we are cancelled it is told and not waited for."""

        def run() -> T:
            with _translated(purpose):
                return func(*args, **kwargs)

        try:
            return await to_thread.run_sync(run, limiter=self._limiter, abandon_on_cancel=True)
        except anyio.get_cancelled_exc_class():
            self._cancelled.set()
            raise

    async def follow(
        self, purpose: str, detail: Callable[[str], None], start: Callable[..., Any], **kwargs: Any
    ) -> None:
        """Run a call that answers with a stream of progress objects, and report them.

        Raises:
            ImageBuildError: the stream says that it failed; the message carries its last lines.
        """

        def pump() -> None:
            tail: list[str] = []
            for entry in start(**kwargs):
                if self._cancelled.is_set():
                    return  # the generator closes the connection, and the engine stops
                if "error" in entry:
                    lines = "\n".join([*tail, str(entry["error"]).strip()])
                    raise ImageBuildError(f"could not {purpose}:\n{lines}")
                for line in _describe(entry):
                    tail = [*tail, line][-recipe.TAIL_LINES :]
                    from_thread.run_sync(detail, line)

        await self.call(purpose, pump)

    async def inspect(self, name: str) -> dict[str, Any] | None:
        """The engine's facts on an image, or None."""

        def inspect() -> dict[str, Any] | None:
            try:
                return dict(self.client.api.inspect_image(name))
            except docker.errors.ImageNotFound:
                return None

        return await self.call(f"inspect {name}", inspect)


def _describe(entry: Mapping[str, Any]) -> Iterator[str]:
    text = entry.get("stream") or " ".join(
        str(entry[key]) for key in ("id", "status") if entry.get(key)
    )
    for line in str(text).splitlines():
        if clean := recipe.ESCAPES.sub("", line).strip():
            yield clean


async def find(*, docker_host: str | None = None) -> ImageReport | None:
    """The image of the current inputs on any of our bases, or the latest that was built.

    Raises:
        EngineUnreachable: no engine answers.
    """
    names = [await to_thread.run_sync(reference, base) for base in ("debian", *BASES)]
    async with _Engine.connect(docker_host) as engine:
        for name in (*names, f"{REPOSITORY}:latest"):
            facts = await engine.inspect(name)
            if facts is not None:
                return await _report(engine, name, facts, built=False, seconds=0)
    return None


async def build(
    *,
    base: Base = "python",
    docker_host: str | None = None,
    progress: Progress = recipe.silent,
    refresh: bool = False,
) -> ImageReport:
    """The image of the current inputs, built if the engine does not have it.

    Args:
        base: `python` for the official image, `debian` for a base made here without a registry, or
            any image reference whose python3 is 3.11 to 3.13 with venv.
        docker_host: address of the engine; None is DOCKER_HOST or the default socket.
        progress: called in this task with each step and each new detail.
        refresh: build even if it is there, on a base made or pulled anew.

    Raises:
        EngineUnreachable: no engine answers.
        ImageBuildError: a step failed; the message says which and carries its last lines.
    """
    started = time.monotonic()
    inputs = await to_thread.run_sync(inputs_hash, base)
    name = f"{REPOSITORY}:{inputs[:12]}"
    async with (
        _Engine.connect(docker_host) as engine,
        recipe.exclusive(recipe.cache_directory() / "image.lock"),
    ):
        facts = None if refresh else await engine.inspect(name)
        built = facts is None
        if facts is None:
            source = f"{BASE_REPOSITORY}:{base_hash()[:12]}"
            source = source if base == "debian" else BASES.get(base, base)
            have_base = not refresh and await engine.inspect(source) is not None
            steps = Steps(plan(base, have_base=have_base), progress)
            if not have_base and base == "debian":
                await _make_debian(engine, source, steps)
            elif not have_base:
                await _pull(engine, source, steps)
            await _make_image(engine, name, source, base, inputs, steps)
            facts = await engine.inspect(name)
            assert facts is not None
        seconds = time.monotonic() - started
        return await _report(engine, name, facts, built=built, seconds=seconds)


async def _pull(engine: _Engine, source: str, steps: Steps) -> None:
    steps.next("pull")
    repository, tag = parse_repository_tag(source)
    await engine.follow(
        f"pull {source} (`--from debian` needs no image registry)",
        steps.detail,
        engine.client.api.pull,
        repository=repository,
        tag=tag or "latest",
        stream=True,
        decode=True,
    )


async def _make_debian(engine: _Engine, name: str, steps: Steps) -> None:
    if os.geteuid() != 0:
        raise ImageBuildError("making the Debian base takes root, as debootstrap does")
    if await to_thread.run_sync(partial(shutil.which, "debootstrap", path=_system_path())) is None:
        raise ImageBuildError(
            "debootstrap is missing. Install it with: apt-get install debootstrap"
        )
    async with _scratch() as scratch:
        root = scratch / "root"
        environment = {**os.environ, "PATH": _system_path(), "DEBIAN_FRONTEND": "noninteractive"}
        # What it mounts and starts is in namespaces of its own and ends with it, however it ends.
        apart = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]

        steps.next("debootstrap")
        await recipe.run(
            [*apart, "debootstrap", "--variant=minbase", f"--include={','.join(DEBIAN_PACKAGES)}",
             SUITE, root, MIRROR],
            purpose=f"make Debian {SUITE} with debootstrap",
            environment=environment,
            detail=steps.detail,
        )  # fmt: skip

        steps.next("security updates")
        await anyio.Path(root, "etc/apt/sources.list").write_text(
            f"deb {MIRROR} {SUITE} main\ndeb {SECURITY_MIRROR} {SUITE}-security main\n",
            encoding="utf-8",
        )
        script = "apt-get -q update && apt-get -q -y upgrade && apt-get clean"
        await recipe.run(
            [*apart, "chroot", root, "sh", "-c", script],
            purpose="bring Debian up to date",
            environment=environment,
            detail=steps.detail,
        )
        await recipe.run(
            ["find", root, "-xdev", "-perm", "/6000", "!", "-type", "l",
             "-exec", "chmod", "a-s", "{}", "+"],
            purpose="take setuid bits away",
        )  # fmt: skip

        steps.next("import")
        await engine.call("import the Debian base", _import_root, engine.client, root, name)


def _import_root(client: Any, root: Path, name: str) -> None:
    excluded = [f"--exclude={pattern}" for pattern in LEFT_OUT]
    repository, _, tag = name.partition(":")
    with subprocess.Popen(  # noqa: S603 (nothing in it comes from outside)
        ["/bin/tar", "--numeric-owner", *excluded, "-C", str(root), "-c", "."],
        stdout=subprocess.PIPE,
        stdin=subprocess.DEVNULL,
    ) as tar:
        assert tar.stdout is not None
        answer = client.api.import_image_from_stream(
            tar.stdout, repository=repository, tag=tag, changes=list(IMPORT_CHANGES)
        )
    if tar.returncode != 0:
        raise ImageBuildError(f"could not pack the Debian base (tar ended with {tar.returncode})")
    if '"error"' in str(answer):
        raise ImageBuildError(f"the engine could not import the Debian base: {answer}")


async def _probe(engine: _Engine, source: str) -> Target:
    """Ask the base which Python it has."""

    def run() -> bytes:
        return bytes(
            engine.client.containers.run(
                source,
                ["python3", "-c", PROBE],
                entrypoint="",
                network_mode="none",
                remove=True,
                stderr=False,
            )
        )

    facts = json.loads(await engine.call(f"run python3 in {source}", run))
    name, version = facts["libc"]
    return Target(facts["python"], facts["machine"], (name, version))


async def _fetch_wheels(target: Target, steps: Steps) -> tuple[list[Path], Path]:
    """Wheels for the target: the locked ones, and the start-up package's."""
    requirements = anyio.Path(recipe.IMAGES, "python", "requirements.txt")
    chosen = requirements_for(target, await requirements.read_text(encoding="utf-8"))
    directory = recipe.cache_directory() / "wheels" / target.tag
    await anyio.Path(directory).mkdir(parents=True, exist_ok=True)
    wheels, missing = await to_thread.run_sync(locked_wheels, chosen, directory)
    environment = await recipe.installer_environment()
    async with _scratch() as scratch:
        if missing:
            needed = scratch / "requirements.txt"
            lines = "\n".join(chosen[name] for name in sorted(missing))
            await anyio.Path(needed).write_text(lines, encoding="utf-8")
            await recipe.run(
                [*_pip(), "download", "--no-deps", "--only-binary=:all:", "--require-hashes",
                 "--progress-bar=off", *target.pip_options, "-d", directory, "-r", needed],
                purpose="download the packages of the image",
                environment=environment,
                detail=steps.detail,
            )  # fmt: skip
            wheels, missing = await to_thread.run_sync(locked_wheels, chosen, directory)
        if missing:
            raise ImageBuildError(f"no wheel was found for {', '.join(sorted(missing))}")
        await to_thread.run_sync(_keep_only, wheels, directory)
        sources = scratch / "startup"
        await to_thread.run_sync(recipe.copy_startup, sources)
        uv = await to_thread.run_sync(recipe.find_uv)
        await recipe.run(
            [uv, "build", "--quiet", "--wheel", "--out-dir", directory, sources],
            purpose="build the start-up package",
            environment=environment,
            detail=steps.detail,
        )
    (startup,) = await to_thread.run_sync(_startup_wheels, directory)
    return wheels, startup


def _startup_wheels(directory: Path) -> list[Path]:
    return list(directory.glob(f"{recipe.STARTUP_PACKAGE}-*.whl"))


def _keep_only(wheels: list[Path], directory: Path) -> None:
    """Remove wheels of versions that are no longer locked, and of earlier start-up code."""
    for path in set(directory.glob("*.whl")) - set(wheels):
        path.unlink()


async def _make_image(
    engine: _Engine, name: str, source: str, base: str, inputs: str, steps: Steps
) -> None:
    steps.next("wheels")
    target = await _probe(engine, source)
    wheels, startup = await _fetch_wheels(target, steps)

    steps.next("image")
    async with _scratch() as scratch, await anyio.open_file(scratch / "context.tar", "w+b") as file:
        context = file.wrapped
        await to_thread.run_sync(_write_context, context, wheels, startup)
        await engine.follow(
            "build the image",
            steps.detail,
            engine.client.api.build,
            fileobj=context,
            custom_context=True,
            tag=name,
            buildargs={"BASE": source, "INPUTS": inputs, "FROM": base},
            network_mode="none",
            rm=True,
            forcerm=True,
            decode=True,
        )
    await engine.call("tag the image", engine.client.api.tag, name, REPOSITORY, "latest")


def _write_context(context: IO[bytes], wheels: list[Path], startup: Path) -> None:
    """Pack what the Dockerfile copies; the same files make the same bytes."""
    with tarfile.open(fileobj=context, mode="w") as archive:
        entries = [
            *recipe.package_files(),
            *((f"wheels/{path.name}", path) for path in sorted(wheels)),
            *recipe.startup_files(),
            (f"startup/dist/{startup.name}", startup),
        ]
        for name, path in entries:
            entry = tarfile.TarInfo(name)
            entry.size = path.stat().st_size
            entry.mode = 0o644
            with path.open("rb") as content:
                archive.addfile(entry, content)
    context.seek(0)


async def _report(
    engine: _Engine, name: str, facts: Mapping[str, Any], *, built: bool, seconds: float
) -> ImageReport:
    labels = (facts.get("Config") or {}).get("Labels") or {}
    history = await engine.call("read the image's history", engine.client.api.history, name)
    packages = await engine.call("read the image's packages", _read_packages, engine.client, name)
    layers = [Part("layer", _layer_name(layer), layer["Size"]) for layer in history]
    installed = [Part("package", str(p["name"]), int(p["bytes"])) for p in packages]
    return ImageReport(
        reference=name,
        image_id=str(facts["Id"]),
        inputs=str(labels.get(INPUTS_LABEL, "")),
        base=str(labels.get(BASE_LABEL, "")),
        size_bytes=int(facts["Size"]),
        parts=(
            *sorted((part for part in layers if part.size_bytes), key=_descending),
            *sorted(installed, key=_descending),
        ),
        built=built,
        seconds=seconds,
    )


def _descending(part: Part) -> tuple[int, str]:
    return (-part.size_bytes, part.name)


def _layer_name(layer: Mapping[str, Any]) -> str:
    created = " ".join(str(layer.get("CreatedBy", "")).replace("/bin/sh -c", "").split())
    name = re.sub(r"^#\(nop\) |dir:\S+ in ", "", created) or str(layer.get("Comment", ""))
    return name if len(name) <= 60 else f"{name[:57]}..."


def _read_packages(client: Any, name: str) -> list[dict[str, Any]]:
    container = client.containers.create(name, ["true"], network_mode="none")
    try:
        stream, _ = container.get_archive(PACKAGES_FILE)
        with tarfile.open(fileobj=io.BytesIO(b"".join(stream))) as archive:
            content = archive.extractfile(archive.getmembers()[0])
            assert content is not None
            packages: list[dict[str, Any]] = json.load(content)
            return packages
    except docker.errors.NotFound:
        return []
    finally:
        container.remove(force=True)


def _pip() -> list[str]:
    return [sys.executable, "-m", "pip"]


def _system_path() -> str:
    """PATH with the system directories, which an ordinary login shell leaves out."""
    return f"{os.environ.get('PATH', '')}:/usr/local/sbin:/usr/sbin:/sbin"


@contextlib.asynccontextmanager
async def _scratch() -> AsyncIterator[Path]:
    """A directory that is gone afterwards, on the disk of the cache: /tmp may be memory."""
    parent = recipe.cache_directory()
    path = Path(await to_thread.run_sync(partial(tempfile.mkdtemp, prefix="build-", dir=parent)))
    try:
        yield path
    finally:
        with anyio.CancelScope(shield=True):
            await to_thread.run_sync(partial(shutil.rmtree, path, ignore_errors=True))
