"""The client for asyncio, interrupted at every single await: nothing leaks, nobody waits for ever, nothing complains.

Each scenario runs with an interruption at its first wait, then at its second, until it ends before it is interrupted.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest

from counterd.client import aio
from counterd.errors import ConnectionLost, NotAvailable, NotFound
from kit import daemon, reference
from kit.interrupting import THROWN_AWAY, WAYS, Interrupted
from kit.loops import NEW_LOOP, run, until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

# What waits in a loop of its own waits as often as it takes; after so many interruptions all its awaits were met.
TIMES_MAX = 12


class World(NamedTuple):
    """What a scenario has: the client that is tested, another, and a name that nobody else uses."""

    client: aio.Client
    other: aio.Client
    name: str
    address: tuple[str, int]

    async def in_use(self) -> int:
        try:
            return await self.other.get(self.name)
        except NotFound:
            return 0


@pytest.fixture(scope="module")
def counterd(tmp_path_factory) -> Iterator[tuple[str, int]]:
    with daemon.running(tmp_path_factory.mktemp("counterd")) as running:
        yield tuple(running.address)


@pytest.fixture(scope="module")
def yrmcdsd(tmp_path_factory) -> Iterator[tuple[str, int]]:
    with reference.running(tmp_path_factory.mktemp("yrmcdsd")) as address:
        yield tuple(address)


# ---- scenarios: each prepares, yields what is interrupted, and cleans up -------------------------------------------


@asynccontextmanager
async def connecting(world: World) -> AsyncIterator[Any]:
    clients = []

    async def body() -> None:
        clients.append(aio.Client(*world.address))
        async with clients[0] as client:
            await client.acquire(world.name, maximum=1)

    yield body
    if clients:
        with pytest.raises(ConnectionLost, match=r"close\(\) was called$"):
            await clients[0].noop()
        await clients[0].close()


@asynccontextmanager
async def first_call(world: World) -> AsyncIterator[Any]:
    await world.client.close()
    client = aio.Client(*world.address)

    async def body() -> None:
        await client.acquire(world.name, maximum=1)
        await client.release(world.name)

    yield body
    await client.noop()
    await client.noop()  # after what the answer to an acquire made it give back
    assert await world.in_use() == 0
    await client.close()


@asynccontextmanager
async def connecting_again(world: World) -> AsyncIterator[Any]:
    await world.client.noop()

    async def body() -> None:
        world.client._link.drop("the test cut it")
        async with world.client.hold(world.name, maximum=9):
            await world.client.get(world.name)

    yield body


@asynccontextmanager
async def calls(world: World) -> AsyncIterator[Any]:
    client = world.client
    await client.acquire(f"{world.name} too", maximum=1)
    known = 0  # that the program has

    async def body() -> None:
        nonlocal known
        known = await client.acquire(world.name, 2, maximum=3)
        assert await client.get(world.name) == 2
        with pytest.raises(NotAvailable):
            await client.acquire(world.name, 2, maximum=3)
        await client.noop()
        await client.dump()
        await client.stats()
        known = 0
        await client.release(world.name, 2)

    yield body
    await client.noop()
    await client.noop()  # after what the answer to an acquire made it give back
    assert await world.in_use() == known
    if known:
        await client.release(world.name, known)
    await client.release(f"{world.name} too")  # exactly what it had


@asynccontextmanager
async def pipeline(world: World) -> AsyncIterator[Any]:
    async def body() -> None:
        asked = world.client.pipeline().acquire(world.name, 2, maximum=3).get(world.name)
        granted, used, refused = await asked.acquire(world.name, 2, maximum=3).execute()
        assert (granted, used, type(refused)) == (2, 2, NotAvailable)
        await world.client.pipeline().noop().release(world.name, 2).stats().execute()

    yield body


@asynccontextmanager
async def held_at_once(world: World) -> AsyncIterator[Any]:
    async def body() -> None:
        async with world.client.hold(world.name, 2, maximum=3):
            assert await world.client.get(world.name) == 2

    yield body


@asynccontextmanager
async def refused_at_once(world: World) -> AsyncIterator[Any]:
    await world.other.acquire(world.name, maximum=1)

    async def body() -> None:
        with pytest.raises(NotAvailable):
            await world.client.hold(world.name, maximum=1, timeout=0).__aenter__()

    yield body
    await world.other.release(world.name)


@asynccontextmanager
async def paused(world: World) -> AsyncIterator[Any]:
    """The first of a queue, which asks again and again."""
    await world.other.acquire(world.name, maximum=1)
    given_back: list[Any] = []

    async def body() -> None:
        giving = asyncio.get_running_loop().call_later(
            0.02, lambda: given_back.append(asyncio.ensure_future(world.other.release(world.name)))
        )
        try:
            async with world.client.hold(world.name, maximum=1):
                pass
        finally:
            giving.cancel()

    yield body
    if given_back:
        await given_back[0]
    else:
        await world.other.release(world.name)


@asynccontextmanager
async def gives_up(world: World) -> AsyncIterator[Any]:
    await world.other.acquire(world.name, maximum=1)

    async def body() -> None:
        with pytest.raises(NotAvailable, match=r"1 in use, waited 0\.01 s"):
            await world.client.hold(world.name, maximum=1, timeout=0.01).__aenter__()

    yield body
    await world.other.release(world.name)


@asynccontextmanager
async def queued(world: World) -> AsyncIterator[Any]:
    """Behind another of the same client: that gets what is given back, and then it itself."""
    first, before = world.client.hold(world.name, maximum=1), world.client.hold(world.name, maximum=1)
    await first.__aenter__()
    entering = asyncio.ensure_future(before.__aenter__())
    await asyncio.sleep(0)
    left: list[asyncio.Task[None]] = []

    async def leave() -> None:
        await first.__aexit__(None, None, None)
        await (await entering).__aexit__(None, None, None)

    async def body() -> None:
        asyncio.get_running_loop().call_later(0.002, lambda: left.append(asyncio.ensure_future(leave())))
        async with world.client.hold(world.name, maximum=1):
            pass

    yield body
    await until(lambda: left, "the first was told to leave")
    await left[0]


@asynccontextmanager
async def semaphore(world: World) -> AsyncIterator[Any]:
    permits = world.client.semaphore(world.name, 2)

    async def body() -> None:
        async with permits:
            assert await permits.locked() is False
            async with permits:
                assert await permits.locked() is True

    yield body
    with pytest.raises(ValueError, match="released too many times"):
        permits.release()


@asynccontextmanager
async def decorated(world: World) -> AsyncIterator[Any]:
    @world.client.hold(world.name, maximum=3)
    async def items() -> AsyncIterator[int]:
        yield await world.client.get(world.name)
        yield await world.client.get(world.name)

    @world.client.hold(world.name, maximum=3)
    async def both() -> list[int]:
        return [each async for each in items()]

    async def body() -> None:
        assert await both() == [2, 2]

    yield body


@asynccontextmanager
async def reacquired(world: World) -> AsyncIterator[Any]:
    async def body() -> None:
        async with world.client.hold(world.name, maximum=9, on_lost="reacquire") as hold:
            world.client._link.drop("the test cut it")
            await until(lambda: not hold.lost, "it is held again")
            assert await world.client.get(world.name) > 0

    yield body
    await until(lambda: not world.client._tasks, "nobody wants it any more")


@asynccontextmanager
async def left_unreachable(world: World) -> AsyncIterator[Any]:
    async def body() -> None:
        with pytest.raises(ConnectionLost):
            async with world.client.hold(world.name, maximum=9):
                world.client._link.drop("the test cut it")

    yield body


@asynccontextmanager
async def closed(world: World) -> AsyncIterator[Any]:
    """While calls are under way, a hold waits, and another is acquired again."""
    client = aio.Client(*world.address)
    hold = await client.hold(world.name, 2, maximum=9, on_lost="reacquire").__aenter__()
    client._link.drop("the test cut it")
    await client.acquire(f"{world.name} too", maximum=1)
    waiting = asyncio.ensure_future(client.hold(f"{world.name} too", maximum=1).__aenter__())
    calling = asyncio.ensure_future(client.get(world.name))
    await asyncio.sleep(0)

    yield client.close
    await client.close()
    for each in (waiting, calling):
        with pytest.raises(ConnectionLost, match=r"close\(\) was called$"):
            await each
    await hold.__aexit__(None, None, None)
    assert client._tasks == set()


SCENARIOS = [
    connecting, first_call, connecting_again, calls, pipeline, held_at_once, refused_at_once, paused, gives_up, queued,
    semaphore, decorated, reacquired, left_unreachable, closed,
]  # fmt: skip
# In these the server has to see that a connection ended: yrmcdsd takes up to 3 s for that, or does not at all.
CUT = (connecting, connecting_again, reacquired, left_unreachable, closed)
# Until Python 3.13, an asynchronous generator that is thrown away while it waits is never closed, whatever waits there.
CASES = [case for case in itertools.product(SCENARIOS, WAYS) if case != (decorated, THROWN_AWAY)]


async def awaited(interruption: Interrupted) -> None:
    await interruption


async def interrupted(scenario: Any, world: World, at: int, way: str) -> bool:
    """Runs a scenario with an interruption. Whether there was one."""
    async with scenario(world) as body:
        interruption = Interrupted(body(), at, way)
        running = asyncio.ensure_future(awaited(interruption))
        with contextlib.suppress(asyncio.CancelledError):
            await running
    assert world.client._turns._queues == {}
    if not world.client._closed:
        await world.client.noop()
        await world.client.noop()  # after what the answer to an acquire made it give back
    if scenario not in CUT:
        assert await world.in_use() == 0
    return interruption.fired


async def none_in_use(world: World) -> bool:
    return await world.in_use() == 0


def check(scenario: Any, way: str, loop: str, address: tuple[str, int]) -> None:
    async def main() -> int:
        worlds = []
        async with aio.Client(*address) as other:
            for at in itertools.count(1):
                name = f"{scenario.__name__} {way} {loop} {at}"
                async with aio.Client(*address) as client:
                    worlds.append(World(client, other, name, address))
                    fired = await interrupted(scenario, worlds[-1], at, way)
                if not fired or at == TIMES_MAX:
                    break
            for world in worlds:
                await until(lambda world=world: none_in_use(world), f"nothing is held of {world.name}")
        return at - 1

    assert run(main(), loop) >= 1


@pytest.mark.parametrize("loop", NEW_LOOP)
@pytest.mark.parametrize(("scenario", "way"), CASES)
def test_interrupted_at_every_await(scenario, way: str, loop: str, counterd: tuple[str, int]) -> None:
    check(scenario, way, loop, counterd)


@pytest.mark.needs("yrmcdsd")
@pytest.mark.parametrize(("scenario", "way"), [case for case in CASES if case[0] not in CUT])
def test_the_same_with_the_reference(scenario, way: str, yrmcdsd: tuple[str, int]) -> None:
    check(scenario, way, "asyncio", yrmcdsd)
