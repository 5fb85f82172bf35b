"""Stopping: what was received is answered, and every connection ends; drain.mode = wait waits for what is held before.

Floor 4. All of it ends within drain.timeout. Its steps are logged, because somebody is waiting at a terminal and wants
to know for whom.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

import structlog

from counterd.control.process.systemd import notify

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from counterd.control.config.keys import Drain
    from counterd.control.service import Service

log = structlog.get_logger()

# What is kept of drain.timeout for the last answers while holdings are waited for; half of it, if it is less than two
# of these.
PARTING_S = 1.0
# What systemd is to allow beyond drain.timeout, for everything that is closed after it.
STOPPING_EXTRA_S = 5
FINISH_S = 4.0  # of that, without anything new in a journal that has not all yet
CHECK_S = 0.05  # how soon it is noticed that all has come back
SAY_S = 5.0
SHOWN = 5  # holdings that a line tells
NAME_MAX = 80  # bytes of a name that are shown


async def drain(services: Sequence[Service], settings: Drain, tell: Callable[..., object] = notify) -> None:
    """Accepts no more; waits for what is held, if the mode is "wait"; answers what was received, and closes.

    tell: the service manager, as notify() does.
    """
    loop = asyncio.get_running_loop()
    timeout = settings.timeout
    deadline = loop.time() + timeout
    tell("STOPPING=1", "STATUS=draining", f"EXTEND_TIMEOUT_USEC={(timeout + STOPPING_EXTRA_S) * 1_000_000}")
    if settings.mode == "wait":
        patience = timeout - min(PARTING_S, timeout / 2)
        for service in services:
            service.unlisten()
        log.info(f"draining: nothing new is given out, and what is held has {patience:g} s to come back")
        await wait_for_holdings(services, patience)
    for service in services:
        service.part()
    gone = asyncio.gather(*(service.server.emptied() for service in services))
    try:
        await asyncio.wait_for(gone, deadline - loop.time())
    except asyncio.TimeoutError:
        if remaining := [connection for service in services for connection in service.server.connections.values()]:
            log.warning(f"drain.timeout is over: connections that were cut off: {len(remaining)}")
        for connection in remaining:
            connection.abort()
    finishing = asyncio.gather(*(service.finish(FINISH_S) for service in services))
    while not (await asyncio.wait({finishing}, timeout=SAY_S))[0]:
        tell("STATUS=writing journals", f"EXTEND_TIMEOUT_USEC={STOPPING_EXTRA_S * 2 * 1_000_000}")
    finishing.result()
    log.info("stopped")


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
        log.warning(f"draining: holdings that have not come back within {timeout:g} s: {held}", holdings=held)
    else:
        log.info("draining: nothing is held any more")
    return held


def _held(services: Sequence[Service]) -> int:
    return sum(service.store.held() for service in services)


def _say(services: Sequence[Service], held: int) -> None:
    notify(f"STATUS=draining: holdings that are left: {held}")
    for service in services:
        if left := service.store.held():
            log.info(
                f"draining: holdings of {service.room.name} that are waited for: {left}",
                held=", ".join(_leases(service)),
            )


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
