"""Everything one machine needs to run sessions, put together. Above: up.py, embedded.py.

Below: every part of a worker: Redis, store, artifact store, runtime, slots, pool, owner, reaper.
Lifetimes are nested blocks; leaving them drains, removes every slot and stops what was started.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import secrets
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final, cast

import structlog
from anyio import to_thread

from kernelpool import ConfigurationError, Limits, Pool, Profile, SlotStore
from kernelpool.runtimes import Chosen, RuntimeName, RuntimeSettings, open_runtime
from orchestrator.artifacts import Artifacts
from orchestrator.embedded_redis import redis_server
from orchestrator.owner import Owner, OwnerLimits
from orchestrator.reaper import reap
from orchestrator.settings import Settings
from orchestrator.store import Store, open_store

log = structlog.get_logger(__name__)

LOCK_FILE: Final = "lock"

IDENTITY_FILE: Final = "worker-id"


@dataclass(frozen=True, slots=True)
class Host:
    """The parts of a running worker."""

    store: Store
    owner: Owner
    pool: Pool
    chosen: Chosen


@asynccontextmanager
async def running_host(
    settings: Settings, *, environments: Path | None = None
) -> AsyncIterator[Host]:
    """A worker on this machine, for the block.

    Args:
        settings: Of the service.
        environments: Where bubblewrap's environments are; None is a directory of the state's.

    Raises:
        ConfigurationError, EngineUnreachable, ImageMissing: the message names the cure.
        StoreUnavailable: Redis does not answer.
    """
    async with AsyncExitStack() as stack:
        worker_id = await to_thread.run_sync(_prepare, settings.state_dir, stack)
        artifacts = await to_thread.run_sync(Artifacts.open, settings.artifacts_place)
        url = settings.redis_url
        if url is None:
            url = await stack.enter_async_context(
                redis_server(settings.state_dir, max_memory_bytes=settings.redis_memory_bytes)
            )
        store = await stack.enter_async_context(
            open_store(url, artifacts, retention=settings.retention)
        )
        await store.ping()
        chosen = await stack.enter_async_context(
            open_runtime(_runtime_settings(settings, worker_id, environments))
        )
        log.info("runtime chosen", runtime=chosen.runtime.name, reason=chosen.reason)
        slots = await SlotStore.open(settings.state_dir, uid_base=settings.uid_base)
        pool = await stack.enter_async_context(
            Pool(
                chosen.runtime,
                slots,
                chosen.profile,
                owner=worker_id,
                warm=settings.pool_size,
                capacity=settings.max_slots,
                records=settings.state_dir / "leases",
            )
        )
        owner = await stack.enter_async_context(
            Owner(
                worker_id=worker_id,
                pool=pool,
                store=store,
                artifacts=artifacts,
                limits=_owner_limits(settings),
            )
        )
        reaper = asyncio.create_task(reap(store, owner, artifacts))
        try:
            yield Host(store, owner, pool, chosen)
        finally:
            reaper.cancel()
            await asyncio.wait([reaper])


def _runtime_settings(
    settings: Settings, worker_id: str, environments: Path | None
) -> RuntimeSettings:
    limits = Limits(disk_bytes=settings.disk_bytes, file_bytes=settings.disk_bytes)
    return RuntimeSettings(
        runtime=cast("RuntimeName", settings.runtime),
        state_directory=settings.state_dir,
        environments=environments or settings.state_dir / "environments",
        owner=worker_id,
        profile=Profile(image=settings.image, oci_runtime=settings.oci_runtime, limits=limits),
    )


def _owner_limits(settings: Settings) -> OwnerLimits:
    return OwnerLimits(
        max_lifetime=settings.max_lifetime,
        tenant_sessions=settings.tenant_limit,
        queue=settings.queue_limit,
        upload_bytes=settings.max_upload_bytes,
        host_memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
    )


def _prepare(state_dir: Path, stack: AsyncExitStack) -> str:
    try:
        state_dir.mkdir(mode=0o711, parents=True, exist_ok=True)
        stack.enter_context(_exclusive(state_dir))
        return _identity(state_dir / IDENTITY_FILE)
    except OSError as error:
        raise ConfigurationError(
            f"KERNELPOOL_STATE_DIR {state_dir} cannot be used: {error.strerror}. Choose another"
        ) from error


@contextlib.contextmanager
def _exclusive(state_dir: Path) -> Iterator[None]:
    with (state_dir / LOCK_FILE).open("w", encoding="utf-8") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigurationError(
                f"another kernelpool runs on {state_dir}: stop it, or set KERNELPOOL_STATE_DIR to "
                "another directory"
            ) from None
        yield


def _identity(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8").strip()
    except FileNotFoundError:
        identity = f"worker-{secrets.token_hex(8)}"
        path.write_text(identity + "\n", encoding="utf-8")
        return identity
