"""Waiting for what tells nobody that it happened. Above: plain.py, product.py, destroy.py."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from anyio import to_thread


async def until(happened: Callable[[], bool], *, poll: float, timeout: float) -> None:
    """Look every `poll` seconds, in a thread.

    Raises:
        TimeoutError: `timeout` seconds were not enough.
    """
    async with asyncio.timeout(timeout):
        while not await to_thread.run_sync(happened):  # noqa: ASYNC110 (no event is to be had)
            await asyncio.sleep(poll)
