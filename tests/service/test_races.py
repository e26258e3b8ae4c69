"""Calls that meet: each gets an answer that is true of the container as it is then."""

from __future__ import annotations

import asyncio

import anyio

from tests.service.conftest import Service


async def test_a_restart_that_meets_a_delete_says_that_the_container_is_gone(
    service: Service,
) -> None:
    container = await service.container()
    await service.run(container, "while True: pass", background=True)
    with anyio.fail_after(60):
        restarted, deleted = await asyncio.gather(
            service.http.post(f"{container}/restart"), service.http.delete(container)
        )
    assert deleted.status_code == 200
    assert restarted.status_code in {200, 404}, restarted.text
    assert (await service.http.get(container)).status_code == 404
