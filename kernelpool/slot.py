"""Slots: signatures first, see the commits that follow."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from kernelpool.profile import Limits

Quota = Literal["image", "watch"]


@dataclass(frozen=True, slots=True)
class DiskUse:
    """What a slot's file system holds."""

    bytes: int
    inodes: int
    limit_bytes: int
    limit_inodes: int

    @property
    def over(self) -> bool:
        """More than the slot may hold (only `watch` lets it come to that)."""
        return self.bytes > self.limit_bytes or self.inodes > self.limit_inodes


@dataclass(frozen=True, slots=True)
class Slot:
    """A uid and one bounded file system with `data/` and `run/`."""

    id: str
    uid: int
    root: Path
    quota: Quota
    limits: Limits

    @property
    def data(self) -> Path:
        """The workspace, mounted at WORKSPACE inside."""
        return self.root / "data"

    @property
    def run(self) -> Path:
        """Sockets, connection file and journal, mounted at RUN_DIRECTORY inside."""
        return self.root / "run"

    async def fresh_run(self) -> None:
        """Empty `run/` and give it to the slot's uid, for a new kernel. No process may live."""
        raise NotImplementedError

    async def take_run_back(self) -> None:
        """Make `run/` root's (0711): the kernel goes on and can plant nothing more in it."""
        raise NotImplementedError

    async def disk_use(self) -> DiskUse:
        """What is used now. `image`: one statvfs. `watch`: a bounded scan (about 4 µs per file)."""
        raise NotImplementedError


async def quota_available(directory: Path) -> tuple[Quota, str | None]:
    """Which quota slots below this directory get, and why not `image` when it is `watch`."""
    raise NotImplementedError


class SlotStore:
    """The slots of one worker, below `STATE_DIR/slots`."""

    def __init__(
        self, state_directory: Path, *, uid_base: int = 2_000_000, uid_count: int = 1_000_000
    ) -> None:
        self.directory = state_directory / "slots"

    quota: Quota
    """Known after `open`."""

    async def open(self) -> None:
        """Make the directory, find the quota kind. ConfigurationError when paths are too long."""
        raise NotImplementedError

    async def create(self, limits: Limits) -> Slot:
        """A new slot with an empty workspace. SlotError: nothing is left of it."""
        raise NotImplementedError

    async def destroy(self, slot: Slot) -> None:
        """Unmount and delete it. Idempotent."""
        raise NotImplementedError

    async def adopt(self, slot_id: str) -> Slot | None:
        """The slot of an earlier run, None when it is not there or not whole."""
        raise NotImplementedError

    async def sweep(self, keep: Set[str]) -> list[str]:
        """Destroy every slot of earlier runs that is not in `keep`; returns their ids."""
        raise NotImplementedError
