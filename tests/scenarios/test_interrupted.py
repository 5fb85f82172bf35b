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
from scenarios.server import THINGS
from scenarios.thing import CANCELLED, INTERRUPTED, Visit

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from scenarios.server import Server
    from scenarios.thing import Thing

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


def uses(scenario: str) -> list[tuple[type[Thing], Use, bool]]:
    """Returns each Thing with each of its uses, the first also with True: the connection has something else."""
    return [
        (thing, use, keeps)
        for thing in THINGS
        if scenario not in thing.LACKS
        for use in (*thing.USES, *(thing.ASYNC_USES if scenario == CANCELLED else ()))
        for keeps in ((False, True) if use is thing.USES[0] and not thing.IS_ALONE else (False,))
    ]


def name(thing: type[Thing], use: Use, keeps: bool, *way: str) -> str:
    return ", ".join((f"{thing.NAME}: {use.__name__}{' with another' if keeps else ''}".replace("_", " "), *way))


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


async def goes_on(thing: Thing, visit: Visit, kept: Any, at: int) -> None:
    """Checks that server and client agree, and that the client works."""
    client = visit.client
    await loops.until(lambda: thing.agrees(visit), f"{visit.has} in use after interruption {at}")
    if kept is not None:
        has = await thing.has_kept(visit, kept)  # if not, the server may still have to see that the connection ended
        await loops.until(lambda: thing.in_use(thing.OTHER) == has, f"{has:d} of the other after interruption {at}")
    if not visit.has and not thing.IS_ALONE:
        await loops.until(lambda: thing.works(client), f"it works after interruption {at}")


async def everywhere(thing: Thing, shape: str, use: Use, keeps: bool, way: str = "") -> None:
    """Interrupts the use at each place. keeps: the connection has something else, which is not lost by that."""
    places_max, stride = (POINTS_MAX, STRIDE) if shape == BLOCKING else (AWAITS_MAX, 1)
    first = random.randint(1, stride)
    for at in itertools.count(first, stride):
        with Relay(thing.server.where(thing.PROTOCOL)) as thing.relay:
            async with opened(thing.visitor(shape)) as client:
                kept = await thing.take(client, thing.OTHER) if keeps else None
                async with opened(thing.another(shape)) as another:
                    visit = Visit(thing, shape, client, another)
                    await thing.begin(visit)
                    fired = interrupted(visit, use, at) if shape == BLOCKING else await cancelled(visit, use, at, way)
                await goes_on(thing, visit, kept, at)
            await asyncio.to_thread(thing.relay.drain)
        await loops.until(lambda: thing.in_use(thing.ONE) == 0, f"nothing is in use after interruption {at}")
        thing.end()
        if not fired or at >= places_max:
            break
    assert at > 1 or keeps


CASES = [
    pytest.param(*case, way, id=name(*case, way))
    for case in uses(CANCELLED)
    for way in WAYS
    if (case[1].__name__, way) not in UNCLOSED
]


def check(thing: Thing, shape: str, use: Use, keeps: bool, way: str = "") -> None:
    try:
        run(shape, everywhere(thing, shape, use, keeps, way), MANY_S)
    finally:
        thing.close()


@pytest.mark.parametrize("shape", loops.NEW_LOOP)
@pytest.mark.parametrize(("thing", "use", "keeps", "way"), CASES)
def test_cancelled_at_every_await(
    server: Server, thing: type[Thing], use: Use, shape: str, way: str, *, keeps: bool
) -> None:
    check(thing(server), shape, use, keeps, way)


@pytest.mark.parametrize(("thing", "use", "keeps"), [pytest.param(*case, id=name(*case)) for case in uses(INTERRUPTED)])
def test_interrupted_at_every_point(server: Server, thing: type[Thing], use: Use, *, keeps: bool) -> None:
    check(thing(server), BLOCKING, use, keeps)
