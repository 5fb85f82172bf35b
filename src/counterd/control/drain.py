"""The patient half of stopping, drain.mode = wait: nothing new is given out, and what is held is waited for.

Floor 4. Its steps are logged, because somebody is waiting at a terminal and wants to know for whom.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

import structlog

from counterd.control.systemd import notify

if TYPE_CHECKING:
    from collections.abc import Sequence

    from counterd.control.service import Service

log = structlog.get_logger()

CHECK_S = 0.05  # how soon it is noticed that all has come back
SAY_S = 5.0
SHOWN = 5  # holdings that a line tells
NAME_MAX = 80  # bytes of a name that are shown


async def wait_for_holdings(services: Sequence[Service], timeout: float) -> int:
    """Waits, at most timeout seconds, until nothing is held in any room; returns how many holdings are left."""
    loop = asyncio.get_running_loop()
    begun = said = loop.time()
    if held := _held(services):
        _say(services, held)
    while held and loop.time() - begun < timeout:
        await asyncio.sleep(CHECK_S)
        held = _held(services)
        if held and loop.time() - said >= SAY_S:
            said = loop.time()
            _say(services, held)
    if held:
        log.warning(f"drain.timeout is over: {held} holdings have not come back", holdings=held)
    else:
        log.info("draining: nothing is held any more")
    return held


def _held(services: Sequence[Service]) -> int:
    return sum(service.store.held() for service in services)


def _say(services: Sequence[Service], held: int) -> None:
    notify(f"STATUS=draining: {held} holdings are left")
    for service in services:
        if left := service.store.held():
            log.info(f"draining: waiting for {left} holdings of {service.room.name}", held=", ".join(_leases(service)))


def _leases(service: Service) -> list[str]:
    """Who holds what, the first few."""
    tenths = time.monotonic_ns() // 100_000_000
    shown = []
    for number, name, amount, since in service.store.leases(SHOWN):
        connection = service.server.connections.get(number)
        holder = connection.origin() if connection else "a connection that has gone"
        what = name[:NAME_MAX].decode("utf-8", "backslashreplace") + ("..." if len(name) > NAME_MAX else "")
        shown.append(f"{amount} of {what} by {holder} for {(tenths - since) / 10:.1f} s")
    return shown
