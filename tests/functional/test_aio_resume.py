"""aio.Client(resume=): holdings outlast their connection, and the client resumes them; with real daemons."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from counterd.client.aio import Client, Hold, Permit, Rate
from counterd.errors import ConnectionLost
from kit.cuts import CUTS, GRACE_S, HOST
from kit.daemon import wait_until
from kit.loops import run, until

if TYPE_CHECKING:
    from collections.abc import Callable

    from counterd.client import Client as Blocking
    from kit import daemon
    from kit.cuts import Relay


def test_a_client_that_resumes_loses_nothing(counterd: daemon.Daemon, relay: Relay, other: Blocking) -> None:
    async def work() -> None:
        async with Client(HOST, relay.port, resume=GRACE_S, name="billing-3") as client:
            taken = client.take(Permit("b"), Rate("r", 5, 10, 3600))
            async with client.hold("a", 2, maximum=3) as hold, taken:
                assert await client.acquire("c", maximum=1) == 1
                for _ in range(CUTS):
                    await asyncio.to_thread(relay.cut)
                    assert not hold.lost
                    assert not taken.lost
                    assert await client.acquire("d", maximum=1) == 1
                    assert [other.get(name) for name in "abcd"] == [2, 1, 1, 1]
                    await client.release("d")
                await taken.settle("r", 2)
                with other.take(Rate("r", 8, 10, 3600)):
                    pass
            assert [other.get(name) for name in "abcd"] == [0, 0, 1, 0]

    run(work())
    assert other.get("c") == 0
    figures = counterd.stats()
    assert figures["resumed"] == figures["command:resume"] - 1 == CUTS
    assert figures["command:goodbye"] == 1
    assert figures["internal_errors"] == 0


def test_leaving_a_hold_without_a_connection(counterd: daemon.Daemon, relay: Relay, other: Blocking) -> None:
    async def work() -> None:
        async with Client(HOST, relay.port, resume=GRACE_S) as client:
            async with client.hold("a", maximum=1) as hold, client.take(Permit("b"), timeout=None):
                relay.is_open = False
                await asyncio.to_thread(relay.cut)
                await until(lambda: other.stats()["kept"] == "1", "it is kept")
                assert not hold.lost
            assert [other.get(name) for name in "ab"] == [1, 1]
            relay.is_open = True
            await until(lambda: [other.get(name) for name in "ab"] == [0, 0], "they are given back")

    run(work())
    assert counterd.stats()["resumed"] == 1


def test_holdings_are_lost_after_the_grace_time(counterd: daemon.Daemon, relay: Relay, other: Blocking) -> None:
    told: list[Hold] = []

    async def work() -> None:
        async with Client(HOST, relay.port, resume=0.05) as client:
            await client.acquire("b", maximum=1)
            hold = client.hold("a", maximum=1, on_lost=told.append)
            await hold.__aenter__()
            relay.is_open = False
            await asyncio.to_thread(relay.cut)
            await until(lambda: hold.lost and told == [hold], "the client knows, and told the hold")
            await until(lambda: other.stats()["holdings"] == "0", "it is given back")
            relay.is_open = True
            with pytest.raises(ConnectionLost, match="has been given back"):
                await client.get("a", 0)

    run(work())


def test_a_restarted_server_refuses_to_resume(start: Callable[..., daemon.Daemon]) -> None:
    """The loss of the hold is reported once, whichever task connects first."""
    one = start()
    told: list[Hold] = []

    async def work() -> None:
        async with Client(HOST, one.address.port, resume=60) as client:
            hold = client.hold("a", maximum=1, on_lost=told.append)
            await hold.__aenter__()
            await asyncio.to_thread(one.kill)
            await asyncio.to_thread(start, {"counter.port": one.address.port})
            await until(lambda: told, "the hold is told")
            await client.acquire("a", maximum=1)
            await hold.__aexit__(None, None, None)
            assert told == [hold]

    run(work())


def test_requests_with_lost_replies_are_executed_once(counterd: daemon.Daemon, relay: Relay, other: Blocking) -> None:
    """The requests sent before the cut are executed exactly once."""

    async def work() -> None:
        async with Client(HOST, relay.port, resume=GRACE_S) as client:

            async def mute() -> None:
                await client.noop()  # it has resumed
                relay.muted = True

            async def has(a: int, b: int = 0) -> None:
                await until(lambda: (other.get("a"), other.get("b", 0)) == (a, b), f"{a} of a are held, and {b} of b")

            assert await client.acquire("a", maximum=9) == 1
            await mute()
            assert await client.acquire("a", 2, maximum=9) == 2
            await has(3)
            await mute()
            await client.release("a", 2)
            await has(1)
            await mute()
            async with client.take(Permit("a", 4, maximum=9), Permit("b")):
                await has(5, 1)
                await mute()
            await has(1)
            await mute()
            with pytest.raises(ConnectionLost):
                await client.pipeline().acquire("a", 3, maximum=9).acquire("b", 1, maximum=1).release("a", 1).execute()
            await has(0)

    run(work())
    relay.expect_loss(5)
    assert counterd.stats()["resumed"] == 5


def test_cancellations_during_cuts_leave_nothing_behind(counterd: daemon.Daemon, relay: Relay, other: Blocking) -> None:
    """Whatever is cancelled at whatever moment."""

    async def one(client: Client, number: int) -> None:
        async with client.hold("a", maximum=3), client.take(Permit("b", maximum=2), timeout=GRACE_S):
            await asyncio.sleep(0.001 * (number % 5))

    async def work() -> None:
        async with Client(HOST, relay.port, resume=GRACE_S) as client:
            tasks = [asyncio.ensure_future(one(client, number)) for number in range(60)]
            for number, task in enumerate(tasks):
                await asyncio.sleep(0.003)
                if number % 3 == 0:
                    task.cancel()
                if number % 7 == 0:
                    await asyncio.to_thread(relay.cut)
            answers = await asyncio.gather(*tasks, return_exceptions=True)
            assert {type(answer) for answer in answers} <= {type(None), asyncio.CancelledError}
            await until(lambda: [other.get(name, 0) for name in "ab"] == [0, 0], "all is given back")

    run(work())
    assert counterd.stats()["internal_errors"] == 0


@pytest.mark.parametrize("resume", [0, GRACE_S])
def test_a_lost_reply_to_the_last_release_raises_nothing(relay: Relay, other: Blocking, resume: float) -> None:
    async def work() -> None:
        async with Client(HOST, relay.port, resume=resume) as client:

            async def mute() -> None:
                await client.noop()
                relay.muted = True

            async with client.hold("a", maximum=1):
                await mute()
            await until(lambda: other.get("a") == 0, "it is given back")
            async with client.take(Permit("a"), Permit("b")):
                await mute()
            await until(lambda: other.get("a") == other.get("b") == 0, "they are given back")
            await client.acquire("a", maximum=1)
            await mute()
            await client.release("a")
            await until(lambda: other.get("a") == 0, "it is given back")
            async with client.hold("a", maximum=1):
                assert other.get("a") == 1

    run(work())
    relay.expect_loss(3)


def test_a_release_after_the_connection_has_ended(relay: Relay, other: Blocking) -> None:
    """Also if the event loop has not noticed that yet, because the block has not awaited anything since."""

    async def work() -> None:
        async with Client(HOST, relay.port) as client:
            with pytest.raises(ConnectionLost, match="lost 1 of a"):
                async with client.hold("a", maximum=1):
                    relay.cut()
            with pytest.raises(ConnectionLost, match="lost 1 of a"):
                async with client.take(Permit("a")):
                    relay.cut()
            await client.acquire("a", maximum=1)
            relay.cut()
            with pytest.raises(ConnectionLost):
                await client.release("a")

    run(work())
    wait_until(lambda: other.get("a") == 0, "all is given back")
