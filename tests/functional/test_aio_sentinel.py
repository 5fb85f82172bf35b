"""The asyncio client for tokens: what only it has. Tests for both kinds of clients are in test_client_sentinel.py."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from typing import TYPE_CHECKING, Any

import pytest

from counterd.client.sentinel import Answer, AsyncClient, AsyncHold, Blocked, TokenLost
from counterd.protocols.sentinel.wire import MessageType
from kit import sentinels
from kit.connections import fill, sockets
from kit.loops import NEW_LOOP, PATIENCE, leaves_connections_open, run, until
from kit.scripted.sentinel import Tokens
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
def test_a_hold_as_a_decorator(counterd: tuple[str, int], loop: str) -> None:
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

        before = asyncio.all_tasks()
        async with made(counterd) as client:
            await asyncio.gather(*(work() for _ in range(20)))
            assert most <= 2
            assert asyncio.all_tasks() == before

    run(main())


# ---- leases and connections -----------------------------------------------------------------------------------------


@LOOPS
@leaves_connections_open
def test_tokens_of_a_closed_loop_end_with_it(loop: str) -> None:
    """As with one asyncio.run() after the other. A call in another loop that runs raises an error for that."""

    async def holds() -> AsyncHold:
        hold = await client.hold(105).__aenter__()
        await until(lambda: server.of(MessageType.KEEP), "it is kept")
        await client.ping()  # its lease is known
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
    with Tokens() as server:
        client = made(server.address)
        held = first.run_until_complete(holds())
        first.close()
        run(goes_on(held), loop)


# ---- a server that does not decide ----------------------------------------------------------------------------------


def test_only_the_first_call_waits_for_a_server_that_does_not_accept() -> None:
    """After that only the client's own task does."""

    async def main(port: int) -> None:
        async with AsyncClient(port=port, connect_timeout=SHORT, fallback="open") as client:
            before = sockets()
            attempts: set[str] = set()  # each has a socket
            assert await client.flow(101) == PASSED

            def asks() -> bool:
                with pytest.raises(StopIteration) as ended:
                    client.flow(101).send(None)
                assert ended.value.value == PASSED
                attempts.update(sockets() - before)
                return len(attempts) >= 3

            await until(asks, "it has tried again")

    with contextlib.ExitStack() as stack:
        listening = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        fill(listening, stack)
        run(main(listening.getsockname()[1]))
