"""The client of tokens for asyncio: what it promises with a real counterd, and with one that does not decide.

It is interrupted at every single await as well: nothing leaks, nobody waits for ever, nothing complains.
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

import sentinels
from counterd.client import _fallback
from counterd.client.sentinel import Answer, AsyncClient, AsyncHold, Blocked, NoSuchRule, TokenLost, TokenRefused
from counterd.errors import ConnectionLost, Timeout
from counterd.protocols.sentinel.wire import MessageType
from interrupting import WAYS, Interrupted
from loops import NEW_LOOP, PATIENCE, run, until
from ports import free_ports
from sentinels import flow, param
from tokens import Late, Server

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator
    from pathlib import Path

    from certificates import Files

OFFLINE_MS = 200
QUICK = {"clientOfflineTime": OFFLINE_MS}
LASTING_S = 4  # of what has to be kept however busy the machine is
LASTING = {"clientOfflineTime": LASTING_S * 1000}
FLOWS = [
    flow(101, 2, **QUICK),
    flow(102, 5, grade=1),
    flow(103, 1, resourceTimeout=75, **QUICK),  # a lease of 150 ms
    flow(104, 1, resourceTimeout=75, resourceTimeoutStrategy=1),  # of 75 ms that cannot be renewed
    flow(105, 10**6, clientOfflineTime=60_000),
    flow(106, 10**6, grade=1),
    flow(107, 1, resourceTimeout=LASTING_S * 500, **LASTING),  # a lease of LASTING_S
    flow(108, 2, resourceTimeout=60_000, **LASTING),
]
RULES = {"default": {"flowRules": FLOWS, "paramFlowRules": [param(201, 2)]}}
PASSED, REFUSED = Answer(0, fallback=True), Answer(1, fallback=True)
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
def test_the_whole_protocol(counterd: tuple[str, int], loop: str) -> None:
    async def main() -> None:
        async with made(counterd) as client, made(counterd, namespace="other") as other:
            assert (await client.ping(), await other.ping()) == (1, 1)
            assert (await client.flow(106)).passed
            assert [(await client.param(201, [loop])).passed for _ in range(3)] == [True, True, False]
            token = await client.acquire(101, 2)
            assert 3000 < await client.keep(token) <= 4000
            with pytest.raises(Blocked, match="asked for 1 of flow 101"):
                await other.acquire(101)
            assert await client.release(token)
            assert not await client.release(token)
            with pytest.raises(TokenLost):
                await client.keep(token)
            with pytest.raises(NoSuchRule):
                await client.acquire(999)
            with pytest.raises(ValueError, match="count must be"):
                await client.flow(101, 0)
            assert repr(client).startswith("<AsyncClient 127.0.0.1:")
        with pytest.raises(ConnectionLost, match=r"close\(\) was called"):
            await client.flow(101)

    run(main(), loop)


@LOOPS
def test_holds(counterd: tuple[str, int], loop: str) -> None:
    async def main() -> None:
        async with made(counterd) as client, made(counterd) as other:
            async with client.hold(101, 2) as hold:
                assert (hold.lost, hold.fallback, repr(hold)) == (False, False, "<AsyncHold 2 of flow 101>")
                hold.raise_if_lost()
                assert str(hold.token) == "2 of flow 101"
                with pytest.raises(Blocked, match=r"waited 0\.02 s$"):
                    await client.hold(101, timeout=0.02).__aenter__()
                with pytest.raises(RuntimeError, match="entered already"):
                    await hold.__aenter__()
            assert await is_free(other, 101, 2)

            @client.hold(101)
            async def call() -> bool:
                return await is_free(other, 101, 2)

            @client.hold(101)
            async def generate() -> AsyncIterator[bool]:
                yield await is_free(other, 101, 2)

            assert await call() is False
            assert [each async for each in generate()] == [False]
            order: list[int] = []

            async def wait(number: int) -> None:
                async with client.hold(101, 2):
                    order.append(number)

            async with client.hold(101):
                waiting = [asyncio.ensure_future(wait(number)) for number in range(5)]
                await asyncio.sleep(0.02)
                assert order == []
            await asyncio.gather(*waiting)
            assert order == [0, 1, 2, 3, 4]

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


@LOOPS
def test_a_hold_outlives_its_lease_and_its_connection(counterd: tuple[str, int], loop: str) -> None:
    async def main() -> None:
        async with made(counterd) as client, made(counterd) as other:
            async with client.hold(107) as hold, client.hold(108):
                mine = await client.acquire(108)
                for _ in range(2):
                    assert client._link is not None
                    client._link.drop("the test cut it")
                    await asyncio.sleep(LASTING_S * 0.75)  # by the second time the first lease is over
                    assert not hold.lost
                    for flow_id in (107, 108):
                        assert not await is_free(other, flow_id, 1)
                assert await client.release(mine)
            assert await is_free(other, 108, 2)
            assert client.stats() == ("", 0, 0, 0, 0, 0)

    run(main(), loop)


@LOOPS
def test_a_lease_that_cannot_be_renewed(counterd: tuple[str, int], loop: str) -> None:
    async def lose(client: AsyncClient, also: type[Exception] | None = None) -> None:
        async with client.hold(104) as hold:
            await until(lambda: hold.lost, "it is lost")
            with pytest.raises(TokenLost):
                hold.raise_if_lost()
            if also is not None:
                raise also

    async def main() -> None:
        told: list[AsyncHold] = []
        async with made(counterd) as client:
            with pytest.raises(TokenLost, match=r"^lost 1 of flow 104: "):
                await lose(client)
            with pytest.raises(ZeroDivisionError):
                await lose(client, ZeroDivisionError)
            async with client.hold(104, on_lost=told.append) as hold:
                await until(lambda: told, "it is told")
            assert told == [hold]
            assert client.stats().lost == 3

    run(main(), loop)


def test_what_a_callback_raises_is_logged(counterd: tuple[str, int], caplog: pytest.LogCaptureFixture) -> None:
    def fail(_: AsyncHold) -> None:
        raise ZeroDivisionError

    async def main() -> None:
        async with made(counterd) as client, client.hold(104, on_lost=fail):
            await until(lambda: "on_lost of 1 of flow 104" in caplog.text, "it is logged")

    run(main())


@LOOPS
def test_closing_gives_everything_back(counterd: tuple[str, int], loop: str) -> None:
    async def main() -> None:
        client = made(counterd)
        kept = [await client.acquire(105, 300_000) for _ in range(2)]
        async with made(counterd) as other:
            async with client.hold(105, 400_000) as hold:
                assert not await is_free(other, 105, 1)
                await client.close()
                await until(lambda: is_free(other, 105, 10**6), "all is back, long before it would be offline")
                assert hold.lost
            with pytest.raises(ConnectionLost, match=r"close\(\) was called"):
                await client.release(kept[0])

    run(main(), loop)


def test_tls_and_unix_sockets(tmp_path: Path, short_path: Path, pem: Files) -> None:
    path = str(short_path / "s")

    async def main(url: str) -> None:
        async with AsyncClient(url, timeout=PATIENCE) as client, client.hold(107) as hold:
            await asyncio.sleep(LASTING_S * 1.25)
            assert not hold.lost

    with sentinels.running(tmp_path, RULES, socket=path, **{"tls.cert": pem.server}) as (_, address):
        for url in (f"sentinels://localhost:{address.port}?cacert={pem.cacert}", f"sentinel+unix://{path}"):
            run(main(url))


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


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as started:
        yield started


def test_answers_in_another_order(server: Server) -> None:
    async def main() -> None:
        async with made(server.address) as client:
            server.waits = {MessageType.FLOW}
            server.limits = dict.fromkeys(range(1, 6), 10)
            asking = [asyncio.ensure_future(client.flow(number, number)) for number in range(1, 6)]
            await until(lambda: len(server.held_back) == 5, "all have asked")
            server.go_on()
            assert await asyncio.gather(*asking) == [Answer(0, 10 - number) for number in range(1, 6)]
        assert server.asked_for[0].type == MessageType.PING

    run(main())


def test_a_token_that_is_unknown_when_it_is_given_back(server: Server) -> None:
    async def main() -> None:
        async with made(server.address) as client:
            client._leases.usual[101] = 60.0  # so that it is not kept before
            hold = await client.hold(101).__aenter__()
            server.tokens.clear()
            assert not hold.lost
            with pytest.raises(TokenLost, match="the server does not know it"):
                await hold.__aexit__(None, None, None)
            assert client.stats().lost == 1

    run(main())


def test_calls_go_on_with_another_connection(server: Server) -> None:
    """Also one that is under way."""

    async def main() -> None:
        async with made(server.address) as client:
            for _ in range(3):
                assert await client.ping() >= 1
                server.hang_up()
                assert await client.flow(101) == Answer(0, 1)
                server.hang_up()
                token = await client.acquire(101)
                server.hang_up()
                assert await client.keep(token) == server.lease_ms
                server.hang_up()
                assert await client.release(token)
            server.says = {MessageType.PING: -1, MessageType.KEEP: 5, MessageType.RELEASE: -1}
            token = await client.acquire(101)
            for call in (client.ping(), client.keep(token), client.release(token)):
                with pytest.raises(TokenRefused):
                    await call

    run(main())


@LOOPS
@pytest.mark.parametrize("holds", [False, True])
def test_a_grant_that_comes_too_late_is_given_back(server: Server, loop: str, holds: bool) -> None:
    async def main() -> None:
        async with made(server.address, timeout=SHORT) as client:
            server.waits = {MessageType.ACQUIRE}
            with pytest.raises(Timeout):
                await (client.hold(101).__aenter__() if holds else client.acquire(101))
            server.go_on()
            await until(lambda: server.seen(MessageType.RELEASE) and not server.in_use(), "it is given back")
            assert client.stats().late == 1

    run(main(), loop)


@LOOPS
def test_local_limits_while_there_is_no_server(loop: str, caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        async with AsyncClient(port=free_ports(1)[0], limits={101: 2, 201: 1}) as client:
            assert [await client.flow(101) for _ in range(3)] == [PASSED, PASSED, REFUSED]
            assert [await client.param(201, [value]) for value in "aba"] == [PASSED, PASSED, REFUSED]
            async with client.hold(101) as hold:
                assert (hold.fallback, hold.lost) == (True, False)
                second = await client.acquire(101)
                assert await client.keep(second) > 10**9
                with pytest.raises(Blocked):
                    await client.hold(101, timeout=SHORT).__aenter__()
                assert await client.release(second)
                assert not await client.release(second)
            with pytest.raises(ConnectionLost, match=r"cannot connect .*; no local limit is given for flow 7$"):
                await client.flow(7)
            assert len(caplog.records) == 1
        assert len(caplog.records) == 2

    run(main(), loop)


def test_it_ends_when_the_server_is_back(
    server: Server, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_fallback, "QUIET_S", 0.0)

    async def main() -> None:
        async with made(server.address, fallback="open", timeout=SHORT) as client:
            server.waits = {MessageType.FLOW}
            assert await asyncio.gather(client.flow(101), client.flow(101)) == [PASSED] * 2
            assert client._link is not None
            client._link._timeout = PATIENCE
            server.go_on()
            assert not (await client.flow(101)).fallback
            assert client.stats() == ("", 1, 2, 0, 0, 0)
        assert caplog.records[1].getMessage().endswith("let 2 through without it, and refused 0")

    run(main())


@pytest.mark.parametrize("status", [-4, -2, -1, 3, 5])
def test_answers_that_are_no_decision(server: Server, status: int) -> None:
    async def main() -> None:
        server.says = dict.fromkeys((MessageType.FLOW, MessageType.PARAM, MessageType.ACQUIRE), status)
        async with made(server.address, fallback="local", limits={101: 1}) as client:
            assert [await client.flow(101), await client.flow(101)] == [PASSED, REFUSED]
            assert (await client.acquire(101)).fallback
            for call in (client.flow(7), client.acquire(7), client.param(7, [1]), client.hold(7).__aenter__()):
                with pytest.raises(TokenRefused, match=rf"\(status {status}\): .* flow 7$"):
                    await call

    run(main())


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


def test_a_hold_is_lost_when_its_lease_is_over_without_a_server() -> None:
    async def main(server: Server) -> None:
        server.lease_ms = 300
        async with made(server.address) as client:
            async with client.hold(101, on_lost=lambda _: lost.append(1)) as hold:
                await until(lambda: 101 in client._leases.usual, "its lease is known")
                leaving.close()
                await until(lambda: lost, "it is lost")
                assert hold.lost
            assert client.stats().lost == 1

    lost: list[int] = []
    with contextlib.ExitStack() as leaving:
        run(main(leaving.enter_context(Server())))


def test_a_hold_that_nothing_is_let_through_for_waits_for_the_server() -> None:
    (port,) = free_ports(1)

    async def main() -> None:
        async with AsyncClient(port=port, fallback="closed", timeout=PATIENCE) as client:
            assert await client.flow(101) == REFUSED
            with pytest.raises(ConnectionLost, match="cannot connect"):
                await client.hold(101, timeout=0.1).__aenter__()
            waiting = asyncio.ensure_future(client.hold(101).__aenter__())
            await asyncio.sleep(0.02)
            with Late(port):
                await (await waiting).__aexit__(None, None, None)
                await client.close()

    run(main())


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
