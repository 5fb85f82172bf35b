"""Stops the daemon: answers received requests and ends every connection. With drain.mode = wait, it first waits until
clients have given back their holdings.

Floor 4 (ARCHITECTURE.md). A drain takes at most drain.timeout. The log has the steps of a drain, so that an operator
sees which holdings the daemon waits for.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

import structlog

from counterd.control.process.systemd import notify
from counterd.units import several

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from counterd.control.config.keys import Drain
    from counterd.control.service import Service

log = structlog.get_logger()

# The part of drain.timeout that is reserved for the last replies while the drain waits for holdings; half of the
# timeout if that is less.
PARTING_S = 1.0
# Time that systemd has to allow beyond drain.timeout, for closing everything.
STOPPING_EXTRA_S = 5
FINISH_S = 4.0  # part of that time: if a journal makes no progress for so long, the drain gives it up
CHECK_S = 0.05  # how often the drain checks if holdings remain
SAY_S = 5.0  # between two log lines
SHOWN = 5  # how many holdings a log line shows
NAME_MAX = 80  # bytes of a name in a log line


async def drain(services: Sequence[Service], settings: Drain, tell: Callable[..., object] = notify) -> None:
    """Stops accepting connections, waits for holdings if the mode is "wait", answers received requests, and closes all
    connections.

    tell: notifies the service manager, as notify() does.
    """
    loop = asyncio.get_running_loop()
    timeout = settings.timeout
    deadline = loop.time() + timeout
    tell("STOPPING=1", "STATUS=draining", f"EXTEND_TIMEOUT_USEC={(timeout + STOPPING_EXTRA_S) * 1_000_000}")
    if settings.mode == "wait":
        patience = timeout - min(PARTING_S, timeout / 2)
        for service in services:
            service.unlisten()
        log.info(f"draining: counterd grants nothing new; clients have {patience:g} s to give back their holdings")
        await wait_for_holdings(services, patience)
    for service in services:
        service.server.part()
    gone = asyncio.gather(*(service.server.emptied() for service in services))
    try:
        await asyncio.wait_for(gone, deadline - loop.time())
    except asyncio.TimeoutError:
        if remaining := [connection for service in services for connection in service.server.connections.values()]:
            log.warning(f"drain.timeout is over: closed {several(len(remaining), 'connection')} at once")
        for connection in remaining:
            connection.abort()
    finishing = asyncio.gather(*(service.finish(FINISH_S) for service in services))
    while not (await asyncio.wait({finishing}, timeout=SAY_S))[0]:
        tell("STATUS=writing journals", f"EXTEND_TIMEOUT_USEC={STOPPING_EXTRA_S * 2 * 1_000_000}")
    finishing.result()
    log.info("stopped")


async def wait_for_holdings(services: Sequence[Service], timeout: float) -> int:
    """Waits, for at most timeout seconds, until no protocol has holdings. Returns how many holdings remain."""
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
        log.warning(f"draining: {several(held, 'holding')} not given back within {timeout:g} s", holdings=held)
    else:
        log.info("drained: all holdings were given back")
    return held


def _held(services: Sequence[Service]) -> int:
    return sum(service.store.held() for service in services)


def _say(services: Sequence[Service], held: int) -> None:
    notify(f"STATUS=draining: waiting for {several(held, 'holding')}")
    for service in services:
        if left := service.store.held():
            log.info(
                f"draining: waiting for {several(left, 'holding')} of {service.spec.name}",
                held=", ".join(_leases(service)),
            )


def _leases(service: Service) -> list[str]:
    """Describes the first few holdings and their holders, for the log."""
    tenths = time.monotonic_ns() // 100_000_000
    shown = []
    for number, name, amount, since in service.store.leases(SHOWN):
        connection = service.server.connections.get(number)
        holder = connection.origin() if connection else "a connection that has ended"
        holder = " ".join(filter(None, (service.store.about(number)[0], holder)))
        what = name[:NAME_MAX].decode("utf-8", "backslashreplace") + ("..." if len(name) > NAME_MAX else "")
        shown.append(f"{amount} of {what} by {holder} for {(tenths - since) / 10:.1f} s")
    return shown
