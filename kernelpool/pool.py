"""Pool: the slots and kernels of one worker, some of them warm. Above: the owner. Below: kernel.py.

A session takes a slot over for life and no slot is handed out twice. A warm slot has its file
system mounted, its kernel started and the common libraries imported, so that taking it calls
neither the container engine nor mount. plan.py says when to warm another.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Final

import structlog

from kernelpool.errors import KernelPoolError, PoolExhausted
from kernelpool.events import Output
from kernelpool.kernel import Kernel
from kernelpool.lease_records import LeaseRecords
from kernelpool.lifecycle import State
from kernelpool.plan import Action, Snapshot, plan
from kernelpool.profile import Limits, Profile
from kernelpool.provisioner import Seat
from kernelpool.runtime import Runtime
from kernelpool.slot import Slot, SlotStore
from kernelpool.tasks import Tasks
from kernelpool.workspace import Workspace

log = structlog.get_logger(__name__)

RETIRE_CONCURRENCY: Final = 2
"""Slots removed at once. Unmounting takes half a second, most of it waiting."""

DRAIN_TIMEOUT: Final = 30.0
"""Seconds that closing a pool waits for its slots to be removed."""


@dataclass(frozen=True, slots=True)
class Lease:
    """A session's slot, kernel and workspace."""

    slot: Slot
    kernel: Kernel
    workspace: Workspace


class Pool:
    """Leases slots with kernels; an async context manager.

    Args:
        runtime: Entered by the caller, who also leaves it.
        slots: Opened by the caller.
        profile: What every kernel of this pool is made from.
        owner: Id of the worker.
        warm: Slots kept warm.
        capacity: Slots at most.
        records: Directory where leases are written down for a later worker to adopt.
    """

    def __init__(
        self,
        runtime: Runtime,
        slots: SlotStore,
        profile: Profile,
        *,
        owner: str,
        warm: int,
        capacity: int,
        records: Path,
    ) -> None:
        self.runtime = runtime
        self.profile = profile
        self._slots = slots
        self._owner = owner
        self._target = warm
        self._capacity = capacity
        self._records = LeaseRecords(records)
        self._warm: list[Lease] = []
        self._leased: dict[str, Lease] = {}
        self._warming = 0
        self._starting: list[Lease] = []
        self._closing = False
        self._retiring = 0
        self._failures = 0
        self._last_failure_at = float("-inf")
        self._last_execution_at = float("-inf")
        self._short_since: float | None = None
        self._changed = asyncio.Event()
        self._retire_turn = asyncio.Semaphore(RETIRE_CONCURRENCY)
        self._tasks = Tasks("pool", owner=owner)
        self._keeper: asyncio.Task[None] | None = None

    def __repr__(self) -> str:
        """How many slots are in which state."""
        counts = (
            f"{len(self._warm)} warm, {self._warming} warming, {len(self._leased)} leased, "
            f"{self._retiring} retiring"
        )
        return f"<Pool {self.profile.name}: {counts}>"

    async def __aenter__(self) -> Pool:
        """Adopt what an earlier run left alive, sweep the rest, and start warming.

        Raises:
            EngineUnreachable, ImageMissing, ConfigurationError: the message names the cure.
        """
        await self.runtime.check(self.profile)
        for session_id, record in await self._records.read():
            await self._adopt(session_id, record)
        await self.sweep()
        self._keeper = asyncio.create_task(self._keep())
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Remove every slot, leased ones too."""
        if self._keeper is not None:
            self._keeper.cancel()
            await asyncio.wait([self._keeper])
        self._closing = True
        for session_id in list(self._leased):
            self.release(session_id)
        while self._warm:
            self._retire(self._warm.pop())
        for lease in self._starting:
            self._tasks.spawn(lease.kernel.close())
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(DRAIN_TIMEOUT):
                await self._tasks.wait()

    async def sweep(self) -> list[str]:
        """Remove the processes and slots of this worker that no lease holds; their names."""
        kept = {lease.slot.id for lease in (*self._leased.values(), *self._warm)}
        removed = []
        for process in await self.runtime.owned():
            if process.owner == self._owner and process.slot_id not in kept:
                await self.runtime.discard(process.id)
                removed.append(process.name)
        removed += await self._slots.sweep(kept)
        if removed:
            log.info("orphans swept", count=len(removed))
        return removed

    async def lease(
        self,
        session_id: str,
        *,
        memory_bytes: int | None = None,
        on_late: Callable[[str, Output], None] | None = None,
    ) -> Lease:
        """Give a session its slot: a warm one, else a new one whose kernel is still starting.

        Args:
            session_id: Holds the slot until `release`.
            memory_bytes: Another memory limit than the profile's.
            on_late: See `Kernel`.

        Raises:
            PoolExhausted: there are as many slots as there may be.
            SlotError: no slot could be made.
        """
        limits = self.profile.limits
        if memory_bytes is not None:
            limits = limits.with_memory(memory_bytes)
        lease = self._take_warm(limits) or await self._cold(limits)
        lease.kernel.on_late = on_late
        self._leased[session_id] = lease
        self._changed.set()
        try:
            await self._resize(lease, limits)
            await self._write_down(session_id, lease)
        except BaseException:
            self.release(session_id)
            raise
        return lease

    def sessions(self) -> list[str]:
        """The sessions that hold a slot."""
        return list(self._leased)

    def lease_of(self, session_id: str) -> Lease | None:
        """The lease of a session, None when it has none here."""
        return self._leased.get(session_id)

    def release(self, session_id: str) -> asyncio.Task[None] | None:
        """Take a session's slot back and remove it, in the background; None when it has none."""
        lease = self._leased.pop(session_id, None)
        if lease is None:
            return None
        lease.kernel.on_start = None
        return self._retire(lease, session_id)

    def executed(self) -> None:
        """Take note that code runs now; warming waits for a quiet moment."""
        self._last_execution_at = time.monotonic()

    async def until_warm(self) -> None:
        """Wait until as many slots are warm as are wanted."""
        while len(self._warm) < self._target:
            self._changed.clear()
            await self._changed.wait()

    def snapshot(self) -> Snapshot:
        """What the pool holds now."""
        warm = sum(lease.kernel.state is State.IDLE for lease in self._warm)
        return Snapshot(
            target=self._target,
            capacity=self._capacity,
            warm=warm,
            dead=len(self._warm) - warm,
            warming=self._warming,
            leased=len(self._leased),
            retiring=self._retiring,
            last_execution_at=self._last_execution_at,
            short_since=self._short_since,
            failures=self._failures,
            last_failure_at=self._last_failure_at,
        )

    async def _keep(self) -> None:
        while True:
            self._changed.clear()
            now = time.monotonic()
            snapshot = self.snapshot()
            short = snapshot.warm < snapshot.target
            self._short_since = (self._short_since or now) if short else None
            steps = plan(replace(snapshot, short_since=self._short_since), now=now)
            for action in steps.actions:
                self._carry_out(action)
            if steps.look_again_at is None:
                await self._changed.wait()
            else:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(max(0.0, steps.look_again_at - now)):
                        await self._changed.wait()

    def _carry_out(self, action: Action) -> None:
        match action:
            case Action.WARM:
                self._warming += 1
                self._tasks.spawn(self._make_warm())
            case Action.DISCARD_DEAD:
                dead = next(x for x in self._warm if x.kernel.state is not State.IDLE)
                self._warm.remove(dead)
                self._retire(dead)
            case Action.DISCARD_SURPLUS:
                self._retire(self._warm.pop())

    async def _make_warm(self) -> None:
        try:
            lease = await self._new(self.profile.limits)
            self._starting.append(lease)
            try:
                if not self._closing:
                    await lease.kernel.start()
                    await lease.kernel.warm()
            except BaseException:
                self._retire(lease)
                raise
            finally:
                self._starting.remove(lease)
            if self._closing:
                self._retire(lease)
            else:
                self._warm.append(lease)
            self._failures = 0
        except Exception as error:
            # Whatever it was, the next attempt has to wait.
            self._failures += 1
            self._last_failure_at = time.monotonic()
            expected = self._closing or isinstance(error, KernelPoolError)
            told = str(error) if expected else repr(error)
            log.log(
                logging.DEBUG if self._closing else logging.WARNING,
                "slot not warmed",
                failures=self._failures,
                error=told,
                exc_info=not expected,
            )
        finally:
            self._warming -= 1
            self._changed.set()

    def _take_warm(self, limits: Limits) -> Lease | None:
        if limits != self.profile.limits and not self.runtime.capabilities.resize:
            return None
        while self._warm:
            lease = self._warm.pop(0)
            if lease.kernel.state is State.IDLE:
                return lease
            self._retire(lease)
        return None

    async def _cold(self, limits: Limits) -> Lease:
        if not self.snapshot().room:
            raise PoolExhausted(f"all {self._capacity} slots of this worker are taken")
        lease = await self._new(limits)
        self._tasks.spawn(self._start_cold(lease))
        return lease

    async def _start_cold(self, lease: Lease) -> None:
        # The execution that finds the kernel dead starts it again and reports what it meets.
        try:
            await lease.kernel.start()
        except KernelPoolError as error:
            log.warning("kernel not started", slot_id=lease.slot.id, error=str(error))

    async def _new(self, limits: Limits) -> Lease:
        slot = await self._slots.create(limits)
        seat = Seat(self.runtime, slot, replace(self.profile, limits=limits), self._owner)
        kernel = Kernel(seat, str(uuid.uuid4()))
        return Lease(slot, kernel, Workspace(slot.data, slot.uid))

    async def _resize(self, lease: Lease, limits: Limits) -> None:
        kernel = lease.kernel
        if kernel.seat.profile.limits == limits:
            return
        if kernel.process is not None:
            await kernel.process.resize_memory(limits.memory_bytes)
        kernel.seat = replace(kernel.seat, profile=replace(kernel.seat.profile, limits=limits))

    async def _adopt(self, session_id: str, record: dict[str, Any]) -> None:
        slot = await self._slots.adopt(record["slot_id"])
        if slot is None:
            await self._records.remove(session_id)
            return
        limits = self.profile.limits.with_memory(record["memory_bytes"])
        seat = Seat(self.runtime, slot, replace(self.profile, limits=limits), self._owner)
        kernel = Kernel(seat, record["kernel"]["kernel_id"])
        lease = Lease(slot, kernel, Workspace(slot.data, slot.uid))
        try:
            await kernel.adopt(record["kernel"])
        except KernelPoolError as error:
            log.info("kernel not adopted", session_id=session_id, reason=str(error))
            self._retire(lease, session_id)
            return
        self._leased[session_id] = lease
        kernel.on_start = partial(self._write_down_later, session_id, lease)
        log.info("kernel adopted", session_id=session_id, slot_id=slot.id)

    async def _write_down(self, session_id: str, lease: Lease) -> None:
        lease.kernel.on_start = partial(self._write_down_later, session_id, lease)
        if lease.kernel.process is not None:
            await self._records.write(
                session_id,
                {
                    "slot_id": lease.slot.id,
                    "memory_bytes": lease.kernel.seat.profile.limits.memory_bytes,
                    "kernel": await lease.kernel.record(),
                },
            )

    def _write_down_later(self, session_id: str, lease: Lease) -> None:
        self._tasks.spawn(self._write_down(session_id, lease))

    def _retire(self, lease: Lease, session_id: str | None = None) -> asyncio.Task[None]:
        self._retiring += 1
        return self._tasks.spawn(self._remove(lease, session_id))

    async def _remove(self, lease: Lease, session_id: str | None) -> None:
        try:
            if session_id is not None:
                await self._records.remove(session_id)
            async with self._retire_turn:
                await lease.kernel.close()
                await self._slots.destroy(lease.slot)
        except KernelPoolError as error:
            log.warning("slot not removed", slot_id=lease.slot.id, error=str(error))
        finally:
            self._retiring -= 1
            self._changed.set()
