"""`kernelpool up`: the API and a worker in one process.

Above: __main__.py. Below: host.py, app.py, server.py.
"""

from __future__ import annotations

import asyncio
import signal
from dataclasses import replace
from pathlib import Path

import structlog

from orchestrator.app import create_app
from orchestrator.host import running_host
from orchestrator.server import Tls, listen, refuse_public_bind, serving
from orchestrator.settings import Settings

log = structlog.get_logger(__name__)


async def serve(
    settings: Settings, host: str, port: int, *, certificate: Path | None, key: Path | None
) -> None:
    """Serve until SIGINT or SIGTERM, then end what runs and remove every slot.

    Raises:
        ServerError, ConfigurationError, EngineUnreachable, ImageMissing, StoreUnavailable: it
            cannot start; the message names the cure.
    """
    refuse_public_bind(host, keys=bool(settings.api_keys))
    tls = Tls(certificate, key) if certificate is not None and key is not None else None
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for signum in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(signum, stop.set)
    listener = listen(host, port)
    async with running_host(settings) as parts:
        served = replace(settings, allowed_hosts=(*settings.allowed_hosts, host))
        app = create_app(settings=served, store=parts.store, dispatcher=parts.owner)
        async with serving(app, listener, tls=tls) as address:
            log.info("serving", url=f"{address.url}/v1", runtime=parts.chosen.runtime.name)
            await stop.wait()
            log.info("stopping")
