"""Cancellation at every await and KeyboardInterrupt at every point: nothing leaks, and no call waits for ever.

Each use runs with an interruption at one place, then at a later one, until it ends before it is interrupted.
After each interruption the server has granted exactly what the program knows about, and the client works. Of the
hundreds of points of a blocking use, a run tries every STRIDE-th, from a random one on; failures name the point."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
from typing import TYPE_CHECKING, Any

import pytest

from kit import loops
from kit.cuts import Relay
from kit.interrupting import THROWN_AWAY, WAYS, Interrupted, Points
from kit.machine import EXAMPLES, PATIENCE
from kit.shapes import BLOCKING, opened, run, run_at_once
from scenarios.resource import CANCELLED, INTERRUPTED, Visit
from scenarios.server import RESOURCES

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from scenarios.resource import Resource
    from scenarios.server import Server

    Use = Callable[[Visit], Awaitable[None]]

pytestmark = pytest.mark.usefixtures("unhurried")
# A wait in a loop of its own waits as often as it takes; after so many interruptions all its awaits were met.
AWAITS_MAX = 12
POINTS_MAX = 1000
STRIDE = max(1, round(8 / EXAMPLES))  # so COUNTERD_EXAMPLES=8 takes every point
MANY_S = 10 * PATIENCE  # for all interruptions of a use; each step of one has PATIENCE

# What is thrown away while it waits, but cannot end then: until Python 3.13, an asynchronous generator is never closed;
# asyncio.wait_for() and gather(), in which a gatekeeper connects and closes, leave their tasks to the loop.
UNCLOSED = (("decorated", THROWN_AWAY), ("connects", THROWN_AWAY))


def uses(scenario: str) -> list[tuple[type[Resource], Use, bool]]:
    """Returns each Resource with each of its uses, the first also with True: the connection has something else."""
    return [
        (resource, use, keeps)
        for resource in RESOURCES
        if scenario not in resource.LACKS
        for use in (*resource.USES, *(resource.ASYNC_USES if scenario == CANCELLED else ()))
        for keeps in ((False, True) if use is resource.USES[0] and not resource.IS_ALONE else (False,))
    ]


def name(resource: type[Resource], use: Use, keeps: bool, *way: str) -> str:
    return ", ".join((f"{resource.NAME}: {use.__name__}{' with another' if keeps else ''}".replace("_", " "), *way))


async def cancelled(visit: Visit, use: Use, at: int, way: str) -> bool:
    """Returns whether there was an interruption."""
    interruption = Interrupted(use(visit), at, way)  # type: ignore[arg-type]

    async def awaited() -> None:
        await interruption

    with contextlib.suppress(asyncio.CancelledError):
        await asyncio.create_task(awaited())
    return interruption.fired


def interrupted(visit: Visit, use: Use, at: int) -> bool:
    """Returns whether there was an interruption."""
    with Points(at) as points, contextlib.suppress(KeyboardInterrupt):
        run_at_once(use(visit))  # type: ignore[arg-type]
    return points.fired


async def goes_on(resource: Resource, visit: Visit, kept: Any, at: int) -> None:
    """Checks that server and client agree, and that the client works."""
    client = visit.client
    await loops.until(lambda: resource.agrees(visit), f"{visit.has} in use after interruption {at}")
    if kept is not None:
        has = await resource.has_kept(visit, kept)  # if not, the server may still have to see that the connection ended
        await loops.until(lambda: resource.in_use(resource.OTHER) == has, f"the other agrees after interruption {at}")
    if not visit.has and not resource.IS_ALONE:
        await loops.until(lambda: resource.works(client), f"it works after interruption {at}")


async def everywhere(resource: Resource, shape: str, use: Use, keeps: bool, way: str = "") -> None:
    """Interrupts the use at each place. keeps: the connection has something else, which is not lost by that."""
    places_max, stride = (POINTS_MAX, STRIDE) if shape == BLOCKING else (AWAITS_MAX, 1)
    first = random.randint(1, stride)
    for at in itertools.count(first, stride):
        with Relay(resource.server.where(resource.PROTOCOL)) as resource.relay:
            async with opened(resource.visitor(shape)) as client:
                kept = await resource.take(client, resource.OTHER) if keeps else None
                async with opened(resource.another(shape)) as another:
                    visit = Visit(resource, shape, client, another)
                    await resource.begin(visit)
                    fired = interrupted(visit, use, at) if shape == BLOCKING else await cancelled(visit, use, at, way)
                await goes_on(resource, visit, kept, at)
            await asyncio.to_thread(resource.relay.drain)
        await loops.until(lambda: resource.in_use(resource.ONE) == 0, f"nothing is in use after interruption {at}")
        resource.end()
        if not fired or at >= places_max:
            break
    assert at > 1 or keeps


CASES = [
    pytest.param(*case, way, id=name(*case, way))
    for case in uses(CANCELLED)
    for way in WAYS
    if (case[1].__name__, way) not in UNCLOSED
]


def check(resource: Resource, shape: str, use: Use, keeps: bool, way: str = "") -> None:
    try:
        run(shape, everywhere(resource, shape, use, keeps, way), MANY_S)
    finally:
        resource.close()


@pytest.mark.parametrize("shape", loops.NEW_LOOP)
@pytest.mark.parametrize(("resource", "use", "keeps", "way"), CASES)
def test_cancelled_at_every_await(
    server: Server, resource: type[Resource], use: Use, shape: str, way: str, *, keeps: bool
) -> None:
    check(resource(server), shape, use, keeps, way)


@pytest.mark.parametrize(
    ("resource", "use", "keeps"), [pytest.param(*case, id=name(*case)) for case in uses(INTERRUPTED)]
)
def test_interrupted_at_every_point(server: Server, resource: type[Resource], use: Use, *, keeps: bool) -> None:
    check(resource(server), BLOCKING, use, keeps)
