"""Bounded file systems for slots: loop images, and scans where there are none.

Above: slot.py. Below: mkfs.ext4, mount(2), loop devices. All calls block: they belong in a thread.

The image is sparse, without a journal and without write barriers: it lives no longer than the
mount, so a host that crashes has nothing to recover, and one slot's fsync stalls no other.
Attaching and mounting by system calls takes 0.7 ms, `mount -o loop` 6 ms; mkfs takes 3.5 ms.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import re
import shutil
import stat
import struct
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from kernelpool.beneath import OPEN_DIRECTORY, make_ours, open_beneath, opened
from kernelpool.errors import SlotError
from kernelpool.profile import MIB, Limits

Quota = Literal["image", "watch"]

MKFS_TIMEOUT: Final = 30.0
"""Seconds. It takes milliseconds; a disk that stalls longer than this fails the slot."""

UNMOUNT_PATIENCE: Final = 2.0
"""Seconds that an unmount waits for processes that were killed just before."""

ATTACH_TRIES: Final = 64
"""Others may take the loop device that we were told is free."""

PROBE_LIMITS: Final = Limits(disk_bytes=4 * MIB, inodes=256)
"""Of the image that is mounted once to see whether it can be."""

_FEATURES: Final = (
    "none,dir_index,dir_nlink,ext_attr,extent,extra_isize,filetype,flex_bg,huge_file,large_file,"
    "sparse_super,uninit_bg"
)
"""ext4 without what costs space or time here: journal, resize inode, metadata checksums.

Named in full so that the host's mke2fs.conf has no say. `uninit_bg` leaves inode tables sparse.
"""

_MOUNT_FLAGS: Final = 0x2 | 0x4 | 0x400
"""MS_NOSUID | MS_NODEV | MS_NOATIME. Source: linux/mount.h."""
_MNT_DETACH: Final = 2
_UMOUNT_NOFOLLOW: Final = 8
_LOOP_CTL_GET_FREE: Final = 0x4C82
_LOOP_CONFIGURE: Final = 0x4C0A
_LOOP_CLR_FD: Final = 0x4C01
_LO_FLAGS_AUTOCLEAR: Final = 4
_LOOP_CONFIG: Final = struct.Struct("=II 5Q4I 64s64s32s2Q 8Q")
"""struct loop_config of linux/loop.h (5.8): fd, block_size, loop_info64, reserved."""
_LOOP_MAJOR: Final = 7

_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True, slots=True)
class DiskUse:
    """What a slot's file system holds: workspace, journal and sockets together."""

    bytes: int
    """Allocated, not apparent: a sparse file counts for what it takes."""
    inodes: int
    limit_bytes: int
    limit_inodes: int
    complete: bool = True
    """False: a scan stopped before the end, because the limit was passed or a tree is too deep."""

    @property
    def over(self) -> bool:
        """More than allowed. An image cannot come to that."""
        return not self.complete or self.bytes > self.limit_bytes or self.inodes > self.limit_inodes

    @property
    def full(self) -> bool:
        """Nothing more can be written: what a program in the slot sees as ENOSPC."""
        return self.over or self.bytes >= self.limit_bytes or self.inodes >= self.limit_inodes


def why_no_image(image: Path, target: Path) -> str | None:
    """None when an image made here can be mounted there, else the reason and its cure.

    Neither exists before or afterwards.
    """
    if os.geteuid() != 0:
        return "not root: run the worker as root for disk quotas that the kernel enforces"
    if _mkfs() is None:
        return "mkfs.ext4 is not installed (Debian: apt install e2fsprogs)"
    if not Path("/dev/loop-control").exists():
        return "no /dev/loop-control: load the loop module, or give the worker's container /dev"
    try:
        target.mkdir()
        make_image(image, PROBE_LIMITS)
        mount_image(image, target)
        unmount(target)
    except (OSError, SlotError) as error:
        return f"{error} (in a container: it needs CAP_SYS_ADMIN and access to loop devices)"
    finally:
        image.unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            target.rmdir()
    return None


def make_image(image: Path, limits: Limits) -> None:
    """Make a sparse file with an empty file system in it.

    Raises:
        SlotError: the host's disk is full, or mkfs refuses the sizes.
    """
    try:
        fd = os.open(image, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with opened(fd):
            os.truncate(fd, limits.disk_bytes)
    except OSError as error:
        raise SlotError(f"cannot make the disk image of a slot: {error.strerror}") from error
    command = [
        _mkfs() or "mkfs.ext4",
        *("-q", "-F", "-t", "ext4", "-O", _FEATURES, "-b", "4096", "-I", "256", "-m", "0"),
        *("-N", str(limits.inodes), "-E", "lazy_itable_init=1,nodiscard,root_owner=0:0"),
        os.fspath(image),
    ]
    try:
        subprocess.run(  # noqa: S603 - a fixed command on a path of ours
            command,
            check=True,
            capture_output=True,
            stdin=subprocess.DEVNULL,
            timeout=MKFS_TIMEOUT,
            env={"PATH": os.defpath, "LC_ALL": "C"},
        )
    except subprocess.CalledProcessError as error:
        text = error.stderr.decode(errors="replace").strip()
        raise SlotError(f"mkfs.ext4 failed: {text[-500:]}") from error
    except (OSError, subprocess.TimeoutExpired) as error:
        raise SlotError(f"mkfs.ext4 failed: {error}") from error


def _mkfs() -> str | None:
    return shutil.which("mkfs.ext4", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")


def mount_image(image: Path, target: Path) -> None:
    """Mount an image nosuid and nodev; its loop device goes when the last user of it goes.

    Raises:
        SlotError: no loop device could be had, or mounting is not permitted.
    """
    try:
        device, fd = _attach(image)
    except OSError as error:
        raise SlotError(f"cannot attach a loop device: {error.strerror}") from error
    with opened(fd):
        mounted = _libc.mount(
            os.fsencode(device),
            os.fsencode(target),
            b"ext4",
            ctypes.c_ulong(_MOUNT_FLAGS),
            b"noinit_itable,nobarrier",
        )
        if mounted != 0:
            reason = os.strerror(ctypes.get_errno())
            raise SlotError(f"cannot mount a slot's image: {reason}")


def _attach(image: Path) -> tuple[str, int]:
    """A loop device for the image and a descriptor that keeps it until it is mounted."""
    with (
        opened(os.open(image, os.O_RDWR | os.O_CLOEXEC)) as backing,
        opened(os.open("/dev/loop-control", os.O_RDWR | os.O_CLOEXEC)) as control,
    ):
        for _ in range(ATTACH_TRIES):
            number = fcntl.ioctl(control, _LOOP_CTL_GET_FREE)
            device = f"/dev/loop{number}"
            if not Path(device).exists():
                # A static /dev, as in a container, does not gain new nodes by itself.
                os.mknod(device, stat.S_IFBLK | 0o600, os.makedev(_LOOP_MAJOR, number))
            fd = os.open(device, os.O_RDWR | os.O_CLOEXEC)
            name = os.fsencode(image.name)[:63]
            config = _LOOP_CONFIG.pack(
                *(backing, 0),
                *(0, 0, 0, 0, 0),
                *(0, 0, 0, _LO_FLAGS_AUTOCLEAR),
                *(name, b"", b""),
                *(0,) * 10,
            )
            try:
                fcntl.ioctl(fd, _LOOP_CONFIGURE, config)
            except OSError as error:
                os.close(fd)
                if error.errno != errno.EBUSY:
                    raise
            else:
                return device, fd
    raise OSError(errno.EBUSY, "every free loop device was taken by someone else")


def is_mounted_image(target: Path) -> bool:
    """A loop device is mounted exactly here."""
    try:
        device = target.lstat().st_dev
        return os.major(device) == _LOOP_MAJOR and device != target.parent.lstat().st_dev
    except OSError:
        return False


def unmount(target: Path) -> bool:
    """Unmount whatever is mounted at `target`, again and again if need be.

    Returns:
        False when something still held the file system after `UNMOUNT_PATIENCE`: it was
        detached and its space comes back when the last process that uses it ends.
    """
    deadline = time.monotonic() + UNMOUNT_PATIENCE
    pause = 0.005
    flags = _UMOUNT_NOFOLLOW
    while True:
        if _libc.umount2(os.fsencode(target), flags) == 0:
            if flags & _MNT_DETACH:
                return False
            continue
        number = ctypes.get_errno()
        if number in {errno.EINVAL, errno.ENOENT}:
            return True
        if number != errno.EBUSY:
            raise SlotError(f"cannot unmount a slot: {os.strerror(number)}")
        if time.monotonic() > deadline:
            flags |= _MNT_DETACH
        else:
            time.sleep(pause)
            pause = min(pause * 2, 0.2)


def mounts_below(directory: Path) -> list[Path]:
    """Mount points directly below a directory."""
    prefix = os.fsencode(directory) + b"/"
    points: list[Path] = []
    for line in Path("/proc/self/mountinfo").read_bytes().splitlines():
        point = re.sub(rb"\\([0-7]{3})", lambda m: bytes([int(m[1], 8)]), line.split(b" ")[4])
        if point.startswith(prefix) and b"/" not in point[len(prefix) :]:
            points.append(Path(os.fsdecode(point)))
    return points


def loops_below(directory: Path) -> Iterator[tuple[str, Path]]:
    """Loop devices whose image lies, or lay, directly below a directory."""
    for backing in Path("/sys/block").glob("loop*/loop/backing_file"):
        try:
            text = backing.read_text(errors="surrogateescape").rstrip("\n")
        except OSError:
            continue
        image = Path(text.removesuffix(" (deleted)"))
        if image.parent == directory:
            yield f"/dev/{backing.parent.parent.name}", image


def wait_released(image: Path) -> bool:
    """Wait until no loop device uses an image, which an unmount alone does not say.

    A container that is being removed has the file system mounted in a namespace of its own.
    """
    deadline = time.monotonic() + UNMOUNT_PATIENCE
    pause = 0.005
    while any(used == image for _, used in loops_below(image.parent)):
        if time.monotonic() > deadline:
            return False
        time.sleep(pause)
        pause = min(pause * 2, 0.2)
    return True


def release_loop(device: str) -> None:
    """Let a loop device go when its last user does. Already gone: nothing happens."""
    try:
        with opened(os.open(device, os.O_RDONLY | os.O_CLOEXEC)) as fd:
            fcntl.ioctl(fd, _LOOP_CLR_FD)
    except OSError as error:
        if error.errno not in {errno.ENXIO, errno.ENOENT, errno.EBUSY}:
            raise


def image_use(root: Path) -> DiskUse:
    """What an image holds."""
    facts = os.statvfs(root)
    kept_back = facts.f_bfree - facts.f_bavail
    return DiskUse(
        bytes=(facts.f_blocks - facts.f_bfree) * facts.f_frsize,
        inodes=facts.f_files - facts.f_ffree,
        limit_bytes=(facts.f_blocks - kept_back) * facts.f_frsize,
        limit_inodes=facts.f_files,
    )


def scanned_use(root: Path, limits: Limits) -> DiskUse:
    """What a plain directory holds. Stops counting where a limit is passed: over is over.

    Files that are deleted but still open are not seen.
    """
    used = inodes = 0
    complete = True
    linked: set[int] = set()
    queue = [""]
    with opened(os.open(root, OPEN_DIRECTORY)) as top:
        while queue and complete:
            prefix = queue.pop()
            try:
                # Code that runs under our own uid can hide files from the count by a mode.
                make_ours(top, prefix or ".")
                directory = open_beneath(top, prefix or ".", OPEN_DIRECTORY)
            except OSError as error:
                # A path longer than PATH_MAX cannot be looked into; nobody needs one.
                complete = error.errno != errno.ENAMETOOLONG
                continue
            with opened(directory), os.scandir(directory) as entries:
                for entry in entries:
                    try:
                        facts = entry.stat(follow_symlinks=False)
                    except OSError:
                        continue
                    if facts.st_nlink > 1 and not stat.S_ISDIR(facts.st_mode):
                        if facts.st_ino in linked:
                            continue
                        linked.add(facts.st_ino)
                    used += facts.st_blocks * 512
                    inodes += 1
                    if used > limits.disk_bytes or inodes > limits.inodes:
                        complete = False
                        break
                    if stat.S_ISDIR(facts.st_mode):
                        queue.append(f"{prefix}{entry.name}/")
    return DiskUse(used, inodes, limits.disk_bytes, limits.inodes, complete)
