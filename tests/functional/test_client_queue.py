"""Takes, which wait in the server's queue, with blocking and asyncio clients and the real daemon."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from typing import TYPE_CHECKING, Any

import pytest

from counterd.client import Client, Permit, Rate, aio
from counterd.errors import NotAvailable, NotFound, OutOfMemory, UnknownCommand
from kit import daemon, loops, servers
from kit.cuts import Relay
from kit.daemon import PATIENCE, wait_until
from kit.shapes import BLOCKING, SHAPES, begins, begun, entered, got, opened, queued, run

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

NAME = b"queue"


@pytest.fixture(scope="module")
def counterd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[daemon.Running]:
    with daemon.running(tmp_path_factory.mktemp("counterd")) as running:
        yield running


def made(shape: str, counterd: Any, **options: Any) -> Any:
    kind = Client if shape == BLOCKING else aio.Client
    return kind(*counterd.address, **{"timeout": PATIENCE, **options})


def figure(counterd: Any, name: str) -> int:
    with Client(*counterd.address, timeout=PATIENCE) as client:
        return int(client.stats()[name])


async def until_waiting(counterd: Any, count: int) -> None:
    await asyncio.to_thread(wait_until, lambda: figure(counterd, "waiters") == count, f"{count} wait")


def permit(client: Any, **others: Any) -> Any:
    """A Take of the only permit, which waits for it."""
    return client.take(Permit(NAME, maximum=1), **{"timeout": None, **others})


@SHAPES
def test_a_take_waits_with_one_request(counterd, shape: str) -> None:
    async def scenario() -> None:
        async with opened(made(shape, counterd)) as one, opened(made(shape, counterd)) as other:
            await got(one.acquire(NAME, maximum=1))
            before = figure(counterd, "command:take")
            waiting = begun(shape, permit(other).acquire)
            await until_waiting(counterd, 1)
            await got(one.release(NAME))
            taken = await waiting
            assert figure(counterd, "command:take") == before + 1
            assert await got(one.get(NAME)) == 1
            await got(taken.release())
            assert await got(one.get(NAME, default=0)) == 0

    run(shape, scenario())


@SHAPES
def test_a_waiting_take_times_out(counterd, shape: str) -> None:
    async def scenario() -> None:
        async with opened(made(shape, counterd)) as one, opened(made(shape, counterd)) as other:
            await got(one.acquire(NAME, 2, maximum=3))
            with pytest.raises(NotAvailable) as caught:
                await begun(shape, other.take(Permit(NAME, 2, maximum=3), timeout=0.05).acquire)
            error = caught.value
            assert (error.name, error.resources, error.maximum, error.consumption) == (NAME, 2, 3, 2)
            assert figure(counterd, "waiters") == 0

    run(shape, scenario())


@SHAPES
def test_priorities_and_keys(counterd, shape: str) -> None:
    async def scenario() -> None:
        order: list[str] = []
        async with opened(made(shape, counterd)) as one, opened(made(shape, counterd)) as other:
            await got(one.acquire(NAME, maximum=1))
            takes = {
                "first": permit(other, key="a"),
                "same": permit(other, key="a"),
                "another": permit(other, key="b"),
                "urgent": permit(other, priority=1),
            }
            waiting = {}
            for number, (name, take) in enumerate(takes.items()):
                waiting[begun(shape, take.acquire)] = name
                await until_waiting(counterd, number + 1)
            await got(one.release(NAME))
            while waiting:
                (done,), _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                order.append(waiting.pop(done))
                await got(done.result().release())
        assert order == ["urgent", "first", "another", "same"]

    run(shape, scenario())


@pytest.mark.parametrize("loop", loops.NEW_LOOP)
def test_a_cancelled_task_leaves_the_queue(counterd, loop: str) -> None:
    async def scenario() -> None:
        async with made(loop, counterd) as one, made(loop, counterd) as other:
            await one.acquire(NAME, maximum=1)
            waiting = asyncio.create_task(permit(other).acquire())
            await until_waiting(counterd, 1)
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
            await until_waiting(counterd, 0)
            await one.release(NAME)
            assert await other.get(NAME) == 0

    loops.run(scenario(), loop)


def test_an_interrupted_thread_leaves_the_queue(counterd) -> None:
    with made(BLOCKING, counterd) as one, made(BLOCKING, counterd) as other:
        one.acquire(NAME, maximum=1)

        def interrupt() -> None:
            wait_until(lambda: figure(counterd, "waiters") == 1, "it waits")
            os.kill(os.getpid(), signal.SIGINT)

        thread = threading.Thread(target=interrupt)
        thread.start()
        with pytest.raises(KeyboardInterrupt):
            permit(other).acquire()
        thread.join(PATIENCE)
        assert figure(counterd, "waiters") == 0
        one.release(NAME)
        assert other.get(NAME) == 0


def test_threads_use_the_connection_while_another_waits(counterd) -> None:
    with made(BLOCKING, counterd) as one, made(BLOCKING, counterd) as other:
        one.acquire(NAME, maximum=1)
        done: list[int] = []

        def wait() -> None:
            with permit(other):
                done.append(other.get(NAME))

        threads = [threading.Thread(target=wait) for _ in range(4)]
        for thread in threads:
            thread.start()
        wait_until(lambda: figure(counterd, "waiters") == 4, "all wait")
        assert other.get(NAME) == 1
        one.release(NAME)
        for thread in threads:
            thread.join(PATIENCE)
        assert done == [1, 1, 1, 1]


@SHAPES
def test_a_full_queue_refuses_takes(tmp_path: Path, shape: str) -> None:
    async def scenario(counterd: Any) -> None:
        async with opened(made(shape, counterd)) as one, opened(made(shape, counterd)) as other:
            await got(one.acquire(NAME, maximum=1))
            waiting = begun(shape, permit(other).acquire)
            await until_waiting(counterd, 1)
            with pytest.raises(OutOfMemory, match=r"asked for 1 of queue, maximum 1$"):
                await got(permit(other).acquire())
            await got(one.release(NAME))
            await got((await waiting).release())

    with daemon.running(tmp_path, {"counter.waiters": "1"}) as counterd:
        run(shape, scenario(counterd))


# ---- holds ----


def hold(client: Any, **others: Any) -> Any:
    return client.hold(NAME, **{"maximum": 1, **others})


def entering(shape: str, made: Any) -> asyncio.Task[Any]:
    return begun(shape, made.__enter__ if shape == BLOCKING else made.__aenter__)


async def left(made: Any) -> None:
    await got(made.__exit__(None, None, None) if hasattr(made, "__exit__") else made.__aexit__(None, None, None))


@SHAPES
def test_a_hold_waits_with_one_request(counterd, shape: str) -> None:
    async def scenario() -> None:
        async with opened(made(shape, counterd)) as one, opened(made(shape, counterd)) as other:
            await got(one.acquire(NAME, maximum=1))
            before = [figure(counterd, f"command:{name}") for name in ("take", "acquire", "get")]
            waiting = entering(shape, hold(other, timeout=PATIENCE))
            await until_waiting(counterd, 1)
            await got(one.release(NAME))
            held = await waiting
            after = [figure(counterd, f"command:{name}") for name in ("take", "acquire", "get")]
            assert [now - then for now, then in zip(after, before, strict=True)] == [1, 0, 0]
            assert (await got(one.get(NAME)), held.lost) == (1, False)
            await left(held)
            assert await got(one.get(NAME)) == 0

    run(shape, scenario())


@SHAPES
def test_a_hold_with_timeout_0_is_one_request(counterd, shape: str) -> None:
    async def scenario() -> None:
        async with opened(made(shape, counterd)) as client:
            before = [figure(counterd, f"command:{name}") for name in ("take", "acquire", "get")]
            async with opened(hold(client, timeout=0)):
                with pytest.raises(NotAvailable, match="1 in use, waited 0 s"):
                    await entering(shape, hold(client, timeout=0))
            after = [figure(counterd, f"command:{name}") for name in ("take", "acquire", "get")]
            assert [now - then for now, then in zip(after, before, strict=True)] == [2, 0, 0]

    run(shape, scenario())


@SHAPES
def test_priorities_and_keys_of_holds(counterd, shape: str) -> None:
    async def scenario() -> None:
        order: list[str] = []
        async with opened(made(shape, counterd)) as one, opened(made(shape, counterd)) as other:
            await got(one.acquire(NAME, maximum=1))
            holds = {
                "first": hold(other, key="a"),
                "same": hold(other, key="a"),
                "another": hold(other, key="b", weight=2),
                "urgent": hold(other, priority=1),
            }
            waiting = {}
            for number, (name, each) in enumerate(holds.items()):
                waiting[entering(shape, each)] = name
                await until_waiting(counterd, number + 1)
            await got(one.release(NAME))
            while waiting:
                (done,), _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                order.append(waiting.pop(done))
                await left(done.result())
        assert order == ["urgent", "first", "another", "same"]

    run(shape, scenario())


@SHAPES
@pytest.mark.parametrize("room", [0, 2])
def test_holds_wait_although_the_servers_queue_is_full(tmp_path: Path, shape: str, room: int) -> None:
    """In the queue of the client, whose first hold asks now and then."""

    async def scenario(counterd: Any) -> None:
        async with opened(made(shape, counterd)) as one, opened(made(shape, counterd)) as other:
            await got(one.acquire(NAME, maximum=1))
            waiting: list[asyncio.Task[Any]] = []
            for number in range(room):
                waiting.append(entering(shape, hold(other)))
                await until_waiting(counterd, number + 1)
            before = figure(counterd, "command:acquire")
            waiting.append(entering(shape, hold(other)))
            await loops.until(lambda: figure(counterd, "command:acquire") > before, "the first in the client asks")
            while len(waiting) < 4:
                waiting.append(await queued(shape, begins(hold(other)), other.noop))
            assert figure(counterd, "waiters") == room
            await got(one.release(NAME))
            order: list[asyncio.Task[Any]] = []
            while len(order) < 4:
                done, _ = await asyncio.wait(set(waiting) - set(order), return_when=asyncio.FIRST_COMPLETED)
                order += done
                for each in done:
                    await left(each.result())
            assert order == waiting
            async with opened(hold(other)):  # nobody is before it in the queue
                pass

    setting = {"counter.waiters": "0"} if room == 0 else {"counter.waiters_per_connection": str(room)}
    with daemon.running(tmp_path, setting) as counterd:
        run(shape, scenario(counterd))


@SHAPES
def test_lost_permits_are_acquired_again_although_others_always_wait(counterd, shape: str) -> None:
    """An acquire would be refused each time."""

    async def scenario() -> None:
        options = {"watch": True} if shape == BLOCKING else {}
        async with (
            opened(Relay(counterd.address)) as relay,
            opened(made(shape, relay, **options)) as client,
            opened(made(shape, counterd)) as one,
            opened(made(shape, counterd)) as two,
        ):
            ours = hold(client, on_lost="reacquire")
            async with opened(ours):
                waiting = {entering(shape, hold(each)): each for each in (one, two)}
                await until_waiting(counterd, 2)
                await asyncio.to_thread(relay.cut)
                done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                assert ours.lost
                while done:
                    (first,) = done
                    owner, held = waiting.pop(first), first.result()
                    # Two wait at any time, so that nothing is free when it is given back.
                    waiting[entering(shape, hold(owner))] = owner
                    await asyncio.to_thread(wait_until, lambda: figure(counterd, "waiters") >= 2, "two wait")
                    await left(held)
                    done = set()
                    while ours.lost and not done:
                        done, _ = await asyncio.wait(waiting, timeout=0.05, return_when=asyncio.FIRST_COMPLETED)
                await asyncio.to_thread(wait_until, lambda: not ours.lost, "it has them again")
            for each in asyncio.as_completed(waiting):
                await left(await each)

    run(shape, scenario())


# ---- several at once ----

PERMITS = (Permit(b"a", 2, maximum=3), Permit(b"b", maximum=1))
MINUTE = {"limit": 100, "per": 60, "burst": 10}


@SHAPES
def test_a_take_is_granted_completely_or_not_at_all(counterd, shape: str) -> None:
    async def scenario() -> None:
        async with opened(made(shape, counterd)) as one, opened(made(shape, counterd)) as other:
            async with opened(one.take(*PERMITS, Rate(b"r", 3, **MINUTE))) as taken:
                assert await got(other.get(b"a")) == 2
                with pytest.raises(NotAvailable) as caught:
                    await got(other.take(Permit(b"a", maximum=3), Permit(b"b")).acquire())
                assert (caught.value.name, caught.value.consumption, caught.value.maximum) == (b"b", 1, 1)
                assert await got(other.get(b"a")) == 2
                number = taken.number
            assert (await got(other.get(b"a")), await got(other.get(b"b"))) == (0, 0)
            async with opened(other.take(Permit(b"b"))) as later:
                assert later.number > number

    run(shape, scenario())


@SHAPES
def test_a_hold_refused_with_more_in_use_than_its_maximum(counterd, shape: str) -> None:
    """The error says that all of its maximum is in use, although even more is."""

    async def scenario() -> None:
        async with opened(made(shape, counterd)) as client:
            await got(client.acquire("a", 7, maximum=10))
            for timeout in (0, 0.01):
                with pytest.raises(NotAvailable, match="maximum 5, 5 in use") as caught:
                    await entered(client.hold("a", maximum=5, timeout=timeout))
                assert (caught.value.consumption, caught.value.maximum, caught.value.limit) == (5, 5, None)

    run(shape, scenario())


@SHAPES
def test_a_refused_rate_says_when_it_has_enough_units(counterd, shape: str) -> None:
    async def scenario() -> None:
        async with opened(made(shape, counterd)) as client:
            day = Rate(f"day {shape}", 7, limit=10, per=86_400)
            async with opened(client.take(day)):
                pass
            with pytest.raises(NotAvailable) as caught:
                await got(client.take(day).acquire())
            assert caught.value.retry_after is not None
            assert 0 < caught.value.retry_after <= 4 * 8_640
            assert caught.value.consumption == 7

    run(shape, scenario())


@SHAPES
@pytest.mark.parametrize("after", [False, True])
def test_settling_gives_back_unused_units(counterd, shape: str, after: bool) -> None:
    async def scenario() -> None:
        async with opened(made(shape, counterd)) as client:
            name = f"tokens {shape} {after}"
            rate = Rate(name, 7, limit=10, per=86_400)
            taken = client.take(rate, Permit(b"calls", maximum=9))
            async with opened(taken):
                if not after:
                    await got(taken.settle(name, 2))
            if after:
                await got(taken.settle(name.encode(), 2))
            with pytest.raises(NotFound):
                await got(taken.settle(name.encode(), 2))
            async with opened(client.take(Rate(name, 8, limit=10, per=86_400))):
                pass
            with pytest.raises(ValueError, match="calls is not a rate of this Take"):
                await got(taken.settle("calls", 1))

    run(shape, scenario())


@SHAPES
@pytest.mark.parametrize(("after_death", "left"), [("charge", False), ("refund", True)])
def test_after_death_decides_about_units_of_an_ended_client(counterd, shape: str, after_death: Any, left: bool) -> None:
    async def scenario() -> None:
        rate = Rate(f"death {shape} {after_death}", 7, limit=10, per=86_400, after_death=after_death)
        client = made(shape, counterd)
        await got(client.take(rate, Permit(b"calls", maximum=1)).acquire())
        await got(client.close())
        async with opened(made(shape, counterd)) as other:
            await asyncio.to_thread(wait_until, lambda: figure(counterd, "charges") == 0, "it is given back")
            async with opened(other.take(Permit(b"calls", maximum=1))):
                pass
            again = other.take(rate)
            if left:
                await got(again.acquire())
            else:
                with pytest.raises(NotAvailable):
                    await got(again.acquire())

    run(shape, scenario())


@SHAPES
def test_rates_alone_are_not_lost_with_the_connection(tmp_path: Path, shape: str) -> None:
    async def scenario(counterd: daemon.Running) -> None:
        async with opened(made(shape, counterd)) as client, opened(client.take(Rate(b"r", **MINUTE))) as taken:
            counterd.process.kill()
            counterd.process.wait()
            await asyncio.to_thread(wait_until, lambda: taken.lost, "it notices")

    with daemon.running(tmp_path, status=-9) as counterd:
        run(shape, scenario(counterd))


@SHAPES
def test_a_take_waits_for_several_items(counterd, shape: str) -> None:
    async def scenario() -> None:
        async with opened(made(shape, counterd)) as one, opened(made(shape, counterd)) as other:
            await got(one.acquire(b"a", 2, maximum=3))
            await got(one.acquire(b"b", maximum=1))
            waiting = begun(shape, other.take(*PERMITS, timeout=None).acquire)
            await until_waiting(counterd, 1)
            await got(one.release(b"a", 2))
            assert await got(one.get(b"a")) == 0
            await got(one.release(b"b"))
            taken = await waiting
            assert (await got(one.get(b"a")), await got(one.get(b"b"))) == (2, 1)
            await got(taken.release())

    run(shape, scenario())


@SHAPES
def test_a_decorator_takes_for_each_call(counterd, shape: str) -> None:
    async def scenario() -> None:
        async with opened(made(shape, counterd)) as client, opened(made(shape, counterd)) as other:
            if shape == BLOCKING:

                @client.take(Permit(b"deco", maximum=2))
                def used() -> Any:
                    return other.get(b"deco")
            else:

                @client.take(Permit(b"deco", maximum=2))
                async def used() -> Any:
                    return await other.get(b"deco")

            assert [await got(used()), await got(used())] == [1, 1]
            assert await got(other.get(b"deco")) == 0

    run(shape, scenario())


@SHAPES
@pytest.mark.parametrize(
    ("items", "message"),
    [
        ((), "1 to 16 items"),
        ((Permit(b"a"), Permit(b"a")), "twice"),
        ((Rate(b"a", limit=1, per=0),), "period_us must be"),
        ((Rate(b"a", per=1),), "a rate with a period or a burst needs a limit"),
        ((Rate(b"a", burst=1),), "a rate with a period or a burst needs a limit"),
        ((Rate(b"a", limit=0),), "limit must be"),
        ((Rate(b"a", after_death="what"),), "after_death must be one of"),  # type: ignore[arg-type]
    ],
)
def test_invalid_takes_are_refused(shape: str, items: Any, message: str) -> None:
    kind = Client if shape == BLOCKING else aio.Client
    with pytest.raises(ValueError, match=message):
        kind("127.0.0.1").take(*items)


@pytest.mark.needs("yrmcdsd")
@SHAPES
def test_a_server_without_takes(yrmcdsd, shape: str) -> None:
    async def scenario() -> None:
        async with opened(made(shape, yrmcdsd)) as one:
            with pytest.raises(UnknownCommand):
                await got(one.take(*PERMITS).acquire())
            await got(one.acquire(NAME, maximum=1))

    run(shape, scenario())


@pytest.fixture(scope="module")
def yrmcdsd(tmp_path_factory: pytest.TempPathFactory) -> Any:
    with servers.running("yrmcdsd", tmp_path_factory.mktemp("yrmcdsd")) as running:
        yield running
