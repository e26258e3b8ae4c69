"""Slots: what a kernel gets from the host before it starts. Above: pool.py. Below: quota.py.

A slot is a uid of its own and a bounded file system with two directories, `data/` and `run/`. It
outlives the kernels that run in it one after the other, and no slot is used twice.

    STATE_DIR/slots/            0711
        next-uid                where to look for the next free uid; locked while it is read
        <id>.json               what a later worker needs to adopt or sweep the slot; removed last
        <id>.img                the file system, when the quota is `image`
        <id>/                   where it is mounted; a plain directory when the quota is `watch`
            data/               the workspace, the slot's uid, 0700
            run/                sockets, connection file, journal; the slot's uid or root's
            spare/              space and inodes kept back so that a full slot can start a kernel

Everything about a slot can be told from these names, so whatever instant a worker is killed at,
`sweep` finds what it left.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pwd
import re
import secrets
from base64 import b32encode
from collections.abc import Set
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Final

import anyio
from anyio import to_thread

from kernelpool.beneath import OPEN_DIRECTORY, empty, opened
from kernelpool.errors import ConfigurationError, SlotError
from kernelpool.profile import MIB, Limits
from kernelpool.quota import (
    DiskUse,
    Quota,
    image_use,
    is_mounted_image,
    loops_below,
    make_image,
    mount_image,
    mounts_below,
    release_loop,
    scanned_use,
    unmount,
    wait_released,
    why_no_image,
)

__all__ = ["DiskUse", "Quota", "Slot", "SlotStore", "quota_available"]

UID_BASE: Final = 2_000_000
"""First uid given to slots: above people's and the usual subordinate ranges."""

UID_COUNT: Final = 1_000_000
"""How many there are; one is used again only after all the others."""

SOCKET_PATH_LIMIT: Final = 107
"""Bytes of a unix socket's path, its closing NUL not counted. Source: linux/un.h."""

LONGEST_SOCKET: Final = "k-5"
"""jupyter_client names the sockets of a kernel `k-1` to `k-5`."""

SPARE_INODES: Final = 32
"""Enough for connection file, five sockets, journal and what a start-up writes."""

SPARE_BYTES: Final = MIB
"""Room for the same."""

CALLS: Final = 4
"""Slots made or destroyed at once; each call is milliseconds of work in the kernel."""

_OWNED_NAME: Final = re.compile(r"([a-z2-7]{8})(?:|\.img|\.json|\.json\.new)")
_ID_BYTES: Final = 5


@dataclass(frozen=True, slots=True)
class Slot:
    """A uid and one bounded file system with `data/` and `run/`."""

    id: str
    """Eight characters of base32."""
    uid: int
    root: Path
    quota: Quota
    limits: Limits = field(repr=False)
    """As they were when the slot was made; those on disk and inodes stay for its life."""
    _calls: anyio.CapacityLimiter = field(repr=False, compare=False)

    @property
    def data(self) -> Path:
        """The workspace, mounted at WORKSPACE inside."""
        return self.root / "data"

    @property
    def run(self) -> Path:
        """Sockets, connection file and journal, mounted at RUN_DIRECTORY inside."""
        return self.root / "run"

    async def fresh_run(self) -> None:
        """Empty `run/` and give it to the slot's uid, for a new kernel. None may live in it.

        Raises:
            SlotError: a process in the slot is alive and keeps adding files.
        """
        await to_thread.run_sync(self._fresh_run, limiter=self._calls)

    async def take_run_back(self) -> None:
        """Make `run/` root's (0711): the kernel goes on and can plant nothing more in it.

        Where the worker is not root there is no one to give it to, and nothing changes.
        """
        await to_thread.run_sync(self._take_run_back, limiter=self._calls)

    async def disk_use(self) -> DiskUse:
        """What is used now. `image`: one statvfs. `watch`: a scan bounded by the limits."""
        return await to_thread.run_sync(self._disk_use, limiter=self._calls)

    def _fresh_run(self) -> None:
        with opened(os.open(self.run, OPEN_DIRECTORY)) as run:
            _own(run, os.geteuid(), 0o700)
            try:
                empty(run)
            except OSError as error:
                raise SlotError(f"cannot empty the run directory of slot {self.id}") from error
            self._drop_spare()
            _own(run, self.uid, 0o700)

    def _take_run_back(self) -> None:
        if os.geteuid() != 0:
            return
        with opened(os.open(self.run, OPEN_DIRECTORY)) as run:
            _own(run, 0, 0o711)
        self._keep_spare()

    def _keep_spare(self) -> None:
        """Keep some space and inodes back, as far as the code left any."""
        if self.quota == "watch":
            return
        spare = self.root / "spare"
        with contextlib.suppress(OSError):
            spare.mkdir(mode=0o700, exist_ok=True)
            with opened(os.open(spare / "space", os.O_WRONLY | os.O_CREAT, 0o600)) as fd:
                os.posix_fallocate(fd, 0, SPARE_BYTES)
            for number in range(SPARE_INODES):
                (spare / str(number)).touch(mode=0o600)

    def _drop_spare(self) -> None:
        with contextlib.suppress(FileNotFoundError):
            with opened(os.open(self.root / "spare", OPEN_DIRECTORY)) as spare:
                empty(spare)

    def _disk_use(self) -> DiskUse:
        try:
            if self.quota == "image":
                return image_use(self.root)
            return scanned_use(self.root, self.limits)
        except OSError as error:
            raise SlotError(f"cannot look into slot {self.id}: {error.strerror}") from error


async def quota_available(directory: Path) -> tuple[Quota, str | None]:
    """Which quota slots below an existing directory get, and why not `image` when it is `watch`."""
    reason = await to_thread.run_sync(_why_no_image, directory)
    return ("image", None) if reason is None else ("watch", reason)


def _why_no_image(directory: Path) -> str | None:
    # Named like a slot, so that a sweep finds what a killed probe leaves.
    name = _new_id()
    return why_no_image(directory / f"{name}.img", directory / name)


def _new_id() -> str:
    return b32encode(secrets.token_bytes(_ID_BYTES)).decode().lower()


class SlotStore:
    """The slots of one worker. Made by `open`; nobody else may use the same state directory."""

    def __init__(self, directory: Path, quota: Quota, uids: range) -> None:
        self.directory = directory
        self.quota: Quota = quota
        self._uids = uids
        self._live: dict[str, int] = {}
        self._calls = anyio.CapacityLimiter(CALLS)

    @classmethod
    async def open(
        cls,
        state_directory: Path,
        *,
        quota: Quota | None = None,
        uid_base: int = UID_BASE,
        uid_count: int = UID_COUNT,
    ) -> SlotStore:
        """The store below `STATE_DIR/slots`, made if need be; `quota` None takes what works here.

        Raises:
            ConfigurationError: the directory cannot be made, its path is too long for sockets, or
                the quota asked for is not to be had here.
        """

        def make() -> tuple[Path, str | None]:
            directory = state_directory.absolute() / "slots"
            path = os.fsencode(directory / ("x" * 8) / "run" / LONGEST_SOCKET)
            if (excess := len(path) - SOCKET_PATH_LIMIT + 1) > 0:
                raise ConfigurationError(
                    f"STATE_DIR {state_directory} is {excess} bytes too long for the kernels'"
                    " sockets: choose a shorter path"
                )
            try:
                directory.mkdir(mode=0o711, parents=True, exist_ok=True)
                directory.chmod(0o711)
            except OSError as error:
                raise ConfigurationError(
                    f"STATE_DIR {state_directory} cannot be used: {error.strerror}"
                ) from error
            return directory, None if quota == "watch" else _why_no_image(directory)

        directory, reason = await to_thread.run_sync(make)
        if quota == "image" and reason is not None:
            raise ConfigurationError(f"no disk images for slots: {reason}")
        chosen: Quota = quota or ("watch" if reason else "image")
        return cls(directory, chosen, range(uid_base, uid_base + uid_count))

    def __repr__(self) -> str:
        return f"<SlotStore {self.quota}: {len(self._live)} live>"

    async def create(self, limits: Limits) -> Slot:
        """Make a slot with an empty workspace.

        Raises:
            SlotError: it could not be made; nothing is left of it.
        """
        return await to_thread.run_sync(self._create, limits, limiter=self._calls)

    async def destroy(self, slot: Slot) -> bool:
        """Unmount and delete a slot. Its processes have been killed. Idempotent.

        Returns:
            False when something still held its file system: the space comes back when that ends.

        Raises:
            SlotError: something is left of it; `sweep` or another call will try again.
        """
        return await to_thread.run_sync(self._destroy, slot.id, limiter=self._calls)

    async def adopt(self, slot_id: str) -> Slot | None:
        """Take over a slot that an earlier worker made; None when it is not there or not whole."""
        return await to_thread.run_sync(self._adopt, slot_id, limiter=self._calls)

    async def sweep(self, keep: Set[str]) -> list[str]:
        """Destroy every slot that neither this store made or adopted, nor `keep` names.

        Returns:
            The ids of the slots of which something was found and all of it is gone now.
        """
        return await to_thread.run_sync(self._sweep, keep, limiter=self._calls)

    def _create(self, limits: Limits) -> Slot:
        slot_id = _new_id()
        self._live[slot_id] = -1
        try:
            uid = self._next_uid()
            self._live[slot_id] = uid
            slot = Slot(
                slot_id, uid, self.directory / slot_id, self.quota, limits, _calls=self._calls
            )
            self._write_record(slot)
            self._make_directories(slot)
        except BaseException as error:
            with contextlib.suppress(OSError, SlotError):
                self._destroy(slot_id)
            if isinstance(error, OSError):
                raise SlotError(f"cannot make a slot: {error}") from error
            raise
        return slot

    def _make_directories(self, slot: Slot) -> None:
        slot.root.mkdir(mode=0o711)
        if slot.quota == "image":
            image = self.directory / f"{slot.id}.img"
            make_image(image, slot.limits)
            mount_image(image, slot.root)
            (slot.root / "lost+found").rmdir()
        with opened(os.open(slot.root, OPEN_DIRECTORY)) as root:
            _own(root, os.geteuid(), 0o711)
            # `data` comes last: a slot that has it is whole.
            for name in ("run", "data"):
                os.mkdir(f".{name}", mode=0o700, dir_fd=root)
                with opened(os.open(f".{name}", OPEN_DIRECTORY, dir_fd=root)) as fd:
                    _own(fd, slot.uid, 0o700)
                os.rename(f".{name}", name, src_dir_fd=root, dst_dir_fd=root)

    def _write_record(self, slot: Slot) -> None:
        record = {"uid": slot.uid, "quota": slot.quota, "limits": asdict(slot.limits)}
        new = self.directory / f"{slot.id}.json.new"
        new.write_text(json.dumps(record), encoding="utf-8")
        new.rename(self.directory / f"{slot.id}.json")

    def _adopt(self, slot_id: str) -> Slot | None:
        root = self.directory / slot_id
        if not _OWNED_NAME.fullmatch(slot_id) or "." in slot_id:
            return None
        try:
            record: dict[str, Any] = json.loads(
                (self.directory / f"{slot_id}.json").read_text(encoding="utf-8")
            )
            known = {each.name for each in fields(Limits)}
            limits = Limits(**{k: v for k, v in record["limits"].items() if k in known})
            uid, quota = int(record["uid"]), record["quota"]
            for name in ("run", "data"):
                os.close(os.open(root / name, OPEN_DIRECTORY))
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return None
        if quota not in {"image", "watch"} or (quota == "image") != is_mounted_image(root):
            return None
        self._live[slot_id] = uid
        return Slot(slot_id, uid, root, quota, limits, _calls=self._calls)

    def _destroy(self, slot_id: str) -> bool:
        root = self.directory / slot_id
        self._live.pop(slot_id, None)
        try:
            freed = True
            if os.geteuid() == 0:
                freed = unmount(root) and wait_released(self.directory / f"{slot_id}.img")
            with contextlib.suppress(FileNotFoundError):
                with opened(os.open(root, OPEN_DIRECTORY)) as fd:
                    empty(fd)
                root.rmdir()
            for suffix in (".img", ".json.new", ".json"):
                (self.directory / f"{slot_id}{suffix}").unlink(missing_ok=True)
        except OSError as error:
            raise SlotError(f"cannot remove slot {slot_id}: {error}") from error
        return freed

    def _sweep(self, keep: Set[str]) -> list[str]:
        kept = keep | self._live.keys()
        swept: list[str] = []
        for slot_id in self._traces() - kept:
            with contextlib.suppress(SlotError):
                self._destroy(slot_id)
                swept.append(slot_id)
        for device, image in loops_below(self.directory):
            if image.stem not in kept:
                release_loop(device)
        return swept

    def _traces(self) -> set[str]:
        """Ids of slots of which a name or a mount is left."""
        paths = [*self.directory.iterdir(), *mounts_below(self.directory)]
        return {match[1] for path in paths if (match := _OWNED_NAME.fullmatch(path.name))}

    def _next_uid(self) -> int:
        """A uid that no slot has had for as long as the range allows; ours when we are not root."""
        if os.geteuid() != 0:
            return os.geteuid()
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        with opened(os.open(self.directory / "next-uid", flags, 0o600)) as fd:
            fcntl.flock(fd, fcntl.LOCK_EX)
            text = os.pread(fd, 32, 0).strip()
            # Two workers on one host start at different places, so their slots do not meet.
            at = int(text) if text.isdigit() else secrets.randbelow(len(self._uids))
            taken = set(self._live.values())
            for step in range(len(self._uids)):
                offset = (at + step) % len(self._uids)
                uid = self._uids[offset]
                if uid not in taken and not _has_account(uid):
                    os.pwrite(fd, f"{(offset + 1) % len(self._uids):<31}\n".encode(), 0)
                    return uid
        raise SlotError(f"no uid is free between {self._uids.start} and {self._uids.stop - 1}")


def _has_account(uid: int) -> bool:
    try:
        pwd.getpwuid(uid)
    except KeyError:
        return False
    return True


def _own(fd: int, uid: int, mode: int) -> None:
    """Give an open directory to a uid, with this mode."""
    if os.geteuid() == 0:
        os.fchown(fd, uid, uid)
    os.fchmod(fd, mode)
