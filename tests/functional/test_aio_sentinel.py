"""The client of tokens for asyncio: what only it has. What both shapes have is in test_client_sentinel.py.

It is interrupted at every single await: nothing leaks, nobody waits for ever, nothing complains.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import os
import socket
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest

from counterd.client.sentinel import Answer, AsyncClient, AsyncHold, Blocked, TokenLost
from kit import sentinels
from kit.interrupting import WAYS, Interrupted
from kit.loops import NEW_LOOP, PATIENCE, run, until
from kit.sentinels import flow, param

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

OFFLINE_MS = 200
QUICK = {"clientOfflineTime": OFFLINE_MS}
LASTING_S = 4  # of what has to be kept however busy the machine is
LASTING = {"clientOfflineTime": LASTING_S * 1000}
FLOWS = [
    flow(101, 2, **QUICK),
    flow(103, 1, resourceTimeout=75, **QUICK),  # a lease of 150 ms
    flow(104, 1, resourceTimeout=75, resourceTimeoutStrategy=1),  # of 75 ms that cannot be renewed
    flow(105, 10**6, clientOfflineTime=60_000),
    flow(106, 10**6, grade=1),
    flow(107, 1, resourceTimeout=LASTING_S * 500, **LASTING),  # a lease of LASTING_S
]
RULES = {"default": {"flowRules": FLOWS, "paramFlowRules": [param(201, 2)]}}
PASSED = Answer(0, fallback=True)
SHORT = 0.05  # a timeout that passes
TIMES_MAX = 12  # after so many interruptions all awaits were met
LOOPS = pytest.mark.parametrize("loop", NEW_LOOP)


@pytest.fixture(scope="module")
def counterd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, int]]:
    with sentinels.running(tmp_path_factory.mktemp("counterd"), RULES) as (_, address):
        yield address


def made(address: tuple[str, int], **options: Any) -> AsyncClient:
    return AsyncClient(*address, **{"timeout": PATIENCE, "fallback": "closed", **options})


async def is_free(client: AsyncClient, flow_id: int, count: int) -> bool:
    with contextlib.suppress(Blocked):
        return await client.release(await client.acquire(flow_id, count))
    return False


# ---- calls and holds ------------------------------------------------------------------------------------------------


@LOOPS
def test_as_a_decorator(counterd: tuple[str, int], loop: str) -> None:
    async def main() -> None:
        async with made(counterd) as client, made(counterd) as other:

            @client.hold(101)
            async def call() -> bool:
                return await is_free(other, 101, 2)

            @client.hold(101)
            async def generate() -> AsyncIterator[bool]:
                yield await is_free(other, 101, 2)

            assert await call() is False
            assert [each async for each in generate()] == [False]
            assert await is_free(other, 101, 2)

    run(main(), loop)


def test_many_tasks_share_a_client(counterd: tuple[str, int]) -> None:
    async def main() -> None:
        inside = most = 0

        async def work() -> None:
            nonlocal inside, most
            for _ in range(5):
                assert (await client.flow(106)).passed
                async with client.hold(101):
                    inside += 1
                    most = max(most, inside)
                    await asyncio.sleep(0)
                    inside -= 1

        async with made(counterd) as client:
            await asyncio.gather(*(work() for _ in range(20)))
            assert most <= 2
            assert client._tasks == set()

    run(main())


# ---- leases and connections -----------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning")
@LOOPS
def test_a_loop_that_was_closed_takes_what_was_held_along(counterd: tuple[str, int], loop: str) -> None:
    """As with one asyncio.run() after the other. Another that runs is told so."""
    client = made(counterd)

    async def holds() -> AsyncHold:
        hold = await client.hold(105).__aenter__()
        await until(lambda: 105 in client._leases.usual, "its lease is known")
        with pytest.raises(RuntimeError, match="belongs to another event loop"):
            await asyncio.to_thread(asyncio.run, client.ping())
        return hold

    async def goes_on(hold: AsyncHold) -> None:
        async with client.hold(105):
            assert hold.lost
            with pytest.raises(TokenLost, match="its event loop was closed"):
                hold.raise_if_lost()
        await client.close()

    first = NEW_LOOP[loop]()
    held = first.run_until_complete(holds())
    first.close()
    run(goes_on(held), loop)
    gc.collect()  # the sockets that were left open, which is what the warnings are about


def test_a_child_has_nothing_of_its_parent(counterd: tuple[str, int]) -> None:
    async def child(hold: AsyncHold) -> None:
        assert hold.lost
        await hold.__aexit__(None, None, None)
        async with hold._client.hold(101):
            pass
        await hold._client.close()

    async def main() -> int:
        async with made(counterd) as client, client.hold(107) as hold:
            pid = os.fork()
            if pid == 0:
                status = 1
                try:
                    asyncio.events._set_running_loop(None)
                    asyncio.new_event_loop().run_until_complete(child(hold))
                    status = 0
                finally:
                    os._exit(status)
            status = await asyncio.get_running_loop().run_in_executor(None, lambda: os.waitpid(pid, 0)[1])
            await asyncio.sleep(LASTING_S * 1.25)
            assert not hold.lost
            return status

    assert run(main()) == 0


# ---- a server that does not decide ----------------------------------------------------------------------------------


def test_no_call_waits_for_a_server_that_does_not_accept() -> None:
    """But the first: then only a task of the client's own does."""

    async def main(port: int) -> None:
        async with AsyncClient(port=port, connect_timeout=SHORT, fallback="open") as client:
            attempts: set[object] = set()
            assert await client.flow(101) == PASSED

            def asks() -> bool:
                with pytest.raises(StopIteration) as ended:
                    client.flow(101).send(None)
                assert ended.value.value == PASSED
                attempts.add(client._connecting)
                return len(attempts) == 3

            await until(asks, "it has tried again")

    with contextlib.ExitStack() as stack:
        listening = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        listening.listen(0)
        for _ in range(3):  # now its queue is full, and the kernel leaves further connections unanswered
            connection = stack.enter_context(socket.socket())
            connection.setblocking(False)
            connection.connect_ex(listening.getsockname())
        run(main(listening.getsockname()[1]))


# ---- interrupted ----------------------------------------------------------------------------------------------------


class World(NamedTuple):
    """What a scenario has: the client that is tested, and another."""

    client: AsyncClient
    other: AsyncClient
    address: tuple[str, int]


async def first_call(world: World) -> None:
    await world.client.release(await world.client.acquire(101, 2))


async def connecting_again(world: World) -> None:
    link = world.client._link
    if link is not None:
        link.drop("the test cut it")
    async with world.client.hold(101, 2):
        await world.client.flow(106)


async def calls(world: World) -> None:
    await world.client.ping()
    await world.client.flow(106)
    await world.client.param(201, [object.__repr__(world)])
    async with world.client.hold(101, 2):
        with pytest.raises(Blocked):
            await world.client.acquire(101)


async def waiting(world: World) -> None:
    """The first of a queue, which asks again and again."""
    token = await world.other.acquire(101, 2)
    giving: list[Any] = []
    timer = asyncio.get_running_loop().call_later(
        0.02, lambda: giving.append(asyncio.ensure_future(world.other.release(token)))
    )
    try:
        async with world.client.hold(101, 2):
            pass
    finally:
        timer.cancel()
        if not giving:
            world.other._give_back(token)


async def gives_up(world: World) -> None:
    token = await world.other.acquire(101, 2)
    try:
        with pytest.raises(Blocked):
            await world.client.hold(101, timeout=0.01).__aenter__()
    finally:
        world.other._give_back(token)


async def kept(world: World) -> None:
    with contextlib.suppress(TokenLost):  # which it is where the machine is too busy to keep it
        async with world.client.hold(103):
            await asyncio.sleep(0.06)


async def lost(world: World) -> None:
    with contextlib.suppress(TokenLost):
        async with world.client.hold(104) as hold:
            await until(lambda: hold.lost, "it is lost")


async def decorated(world: World) -> None:
    @world.client.hold(101)
    async def call() -> None:
        await world.client.flow(106)

    await call()


async def closed(world: World) -> None:
    client = AsyncClient(*world.address, timeout=PATIENCE, fallback="closed")
    try:
        await client.acquire(101)
        async with client.hold(101):
            await client.close()
    finally:
        client._end()


SCENARIOS = [first_call, connecting_again, calls, waiting, gives_up, kept, lost, decorated, closed]


async def interrupted(scenario: Any, world: World, at: int, way: str) -> bool:
    """Runs a scenario with an interruption. Whether there was one."""
    interruption = Interrupted(scenario(world), at, way)

    async def body() -> None:
        await interruption

    running = asyncio.ensure_future(body())
    with contextlib.suppress(asyncio.CancelledError):
        await running
    assert world.client._turns._queues == {}
    assert world.client._leases.holds == {}
    await world.client.ping()
    await world.client.ping()  # after what the answer to an acquire made it give back
    for flow_id, count in ((101, 2), (103, 1), (104, 1)):
        await until(lambda flow_id=flow_id, count=count: is_free(world.other, flow_id, count), "nothing is held")
    return interruption.fired


@LOOPS
@pytest.mark.parametrize(("scenario", "way"), list(itertools.product(SCENARIOS, WAYS)))
def test_interrupted_at_every_await(scenario: Any, way: str, loop: str, counterd: tuple[str, int]) -> None:
    async def main() -> int:
        async with made(counterd) as other:
            for at in itertools.count(1):
                async with made(counterd) as client:
                    fired = await interrupted(scenario, World(client, other, counterd), at, way)
                if not fired or at == TIMES_MAX:
                    return at - 1
        return 0

    assert run(main(), loop) >= 1
