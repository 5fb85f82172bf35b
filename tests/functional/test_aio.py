"""The client for asyncio against the real counterd and the real yrmcdsd: concurrent calls, holds, and the order of
waiters.

Nothing is tested that yrmcdsd does not do: it gives back late, or not at all, when a client has reset or
vanished, and has no figure that a test could count holdings by."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import itertools
from typing import TYPE_CHECKING, Any

import pytest

from counterd.client import aio
from counterd.errors import ConnectionLost, InvalidArguments, NotAcquired, NotAvailable, NotFound
from kit import daemon, reference
from kit.loops import NEW_LOOP, run, until
from kit.machine import PATIENCE
from kit.memory import Loop

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

_names = (f"name {number}" for number in itertools.count())


@pytest.fixture(scope="module", params=["counterd", pytest.param("yrmcdsd", marks=pytest.mark.needs("yrmcdsd"))])
def address(request, tmp_path_factory) -> Iterator[tuple[str, int]]:
    directory = tmp_path_factory.mktemp(request.param)
    if request.param == "yrmcdsd":
        with reference.running(directory) as found:
            yield tuple(found)
    else:
        with daemon.running(directory) as counterd:
            yield tuple(counterd.address)


@pytest.fixture
def name() -> str:
    """A name that no other test uses."""
    return next(_names)


async def in_use(client: aio.Client, name: str) -> int:
    try:
        return await client.get(name)
    except NotFound:
        return 0


async def asked(client: aio.Client) -> int:
    """How many Acquires the server has received."""
    return int((await client.stats())["command:acquire"])


async def is_waited_for(client: aio.Client, count: int) -> bool:
    """Whether so many Takes wait in the server, if it has a queue."""
    return int((await client.stats()).get("waiters", count)) == count


# ---- calls ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("loop", NEW_LOOP)
def test_a_hundred_tasks_on_one_connection(loop: str, address, name: str) -> None:
    """Each gets its own answers, whatever the others send."""

    async def work(client: aio.Client, number: int) -> None:
        own = f"{name}/{number}"
        for count in range(1, 6):
            assert await client.acquire(own, number + 1, maximum=1000) == number + 1
            assert await client.get(own) == count * (number + 1)
        with pytest.raises(NotAvailable) as refused:
            await client.acquire(own, 1000, maximum=1000)
        assert (refused.value.name, refused.value.resources) == (own.encode(), 1000)
        with pytest.raises(NotAcquired):
            await client.release(own, 999)
        with pytest.raises(InvalidArguments):
            await client.acquire(own, 2, maximum=1)
        taken = await client.pipeline().get(own).release(own, 4 * (number + 1)).get(own).noop().execute()
        assert taken == [5 * (number + 1), None, number + 1, None]
        entries = {each.name: each.consumption for each in await client.dump()} if number % 25 == 0 else {}
        assert entries.get(own.encode(), number + 1) == number + 1
        await client.release(own, number + 1)
        assert await in_use(client, own) == 0

    async def main() -> None:
        async with aio.Client(*address) as client:
            connections = int((await client.stats())["total_connections"])
            await asyncio.gather(*(work(client, number) for number in range(100)))
            assert int((await client.stats())["total_connections"]) == connections

    run(main(), loop)


def test_a_long_dump_and_concurrent_calls(address, name: str) -> None:
    async def main() -> None:
        async with aio.Client(*address) as client:
            many = client.pipeline()
            for number in range(5000):
                many.acquire(f"{name}/{number}", maximum=1)
            assert await many.execute() == [1] * 5000
            dumping = asyncio.ensure_future(client.dump())
            got = await asyncio.gather(*(client.get(f"{name}/{number}") for number in range(200)))
            assert got == [1] * 200
            prefix = f"{name}/".encode()
            found = [each for each in await dumping if each.name.startswith(prefix)]
            assert {each.consumption for each in found} == {1}
            assert len(found) == 5000

    run(main())


@pytest.mark.parametrize("loop", NEW_LOOP)
def test_many_calls_are_cancelled_at_once(loop: str, address, name: str) -> None:
    """While half of the answers are there, and half are not."""

    async def main() -> None:
        async with aio.Client(*address) as client:
            for rounds in range(10):
                calls = [asyncio.ensure_future(client.acquire(name, maximum=1000)) for _ in range(200)]
                holds = [asyncio.ensure_future(client.hold(name, maximum=1000).__aenter__()) for _ in range(50)]
                for _ in range(rounds):
                    await asyncio.sleep(0)
                for task in calls + holds:
                    task.cancel()
                ended = await asyncio.gather(*calls, *holds, return_exceptions=True)
                kept = [each for each in ended if not isinstance(each, BaseException)]
                await client.noop()
                await client.noop()  # after what the answers to acquires made it give back
                assert await in_use(client, name) == len(kept)
                for each in kept:
                    await (each.__aexit__(None, None, None) if isinstance(each, aio.Hold) else client.release(name))
                assert await in_use(client, name) == 0

    run(main(), loop)


def test_a_client_of_a_unix_socket(short_path, tmp_path) -> None:
    """yrmcdsd has none."""

    async def main(path: str, loop_name: str) -> None:
        async with aio.Client(path=path) as client, aio.Client(f"counter+unix://{path}") as other:
            assert client.where == other.where == path
            async with client.hold(loop_name, maximum=1):
                assert await other.get(loop_name) == 1
            assert await other.get(loop_name) == 0

    path = str(short_path / "counterd")
    with daemon.running(tmp_path / "daemon", {"counter.socket": path}):
        for loop in NEW_LOOP:
            run(main(path, loop), loop)


# ---- holds ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("loop", NEW_LOOP)
def test_waiters_get_permits_in_order(loop: str, address, name: str) -> None:
    got: list[int] = []

    async def wait(client: aio.Client, number: int) -> None:
        async with client.hold(name, maximum=1):
            assert await client.get(name) == 1
            got.append(number)

    async def main() -> None:
        async with aio.Client(*address) as client:
            async with client.hold(name, maximum=1):
                waiting = [asyncio.ensure_future(wait(client, number)) for number in range(50)]
                await asyncio.sleep(0.02)
                assert got == []
            await asyncio.gather(*waiting)

    run(main(), loop)
    assert got == list(range(50))


def test_a_big_request_is_not_overtaken(address, name: str) -> None:
    order: list[str] = []

    async def wait(client: aio.Client, what: str, resources: int) -> None:
        async with client.hold(name, resources, maximum=10):
            order.append(what)

    async def main() -> None:
        async with aio.Client(*address) as client:
            first = client.hold(name, 3, maximum=10)
            second = client.hold(name, 3, maximum=10)
            await first.__aenter__()
            await second.__aenter__()
            big = asyncio.ensure_future(wait(client, "big", 10))
            await asyncio.sleep(0)
            small = asyncio.ensure_future(wait(client, "small", 1))
            await first.__aexit__(None, None, None)
            await asyncio.sleep(0.02)
            assert order == []  # 7 are free
            await second.__aexit__(None, None, None)
            await asyncio.gather(big, small)

    run(main())
    assert order == ["big", "small"]


@pytest.mark.parametrize("how", ["hold", "release", "pipeline", "cancelled", "semaphore"])
def test_every_release_wakes_the_first_waiter(how: str) -> None:
    """At once, although it would ask again later. With a server that has no queue, and a clock that does not run."""
    loop = Loop()
    loop.server.delay = lambda: 0.0

    async def main() -> None:
        async with aio.Client() as client:
            name = "woken"
            held = client.hold(name, maximum=1)
            semaphore = client.semaphore(name, 1)
            if how == "hold":
                await held.__aenter__()
            elif how == "semaphore":
                await semaphore.acquire()
            elif how != "cancelled":
                await client.acquire(name, maximum=1)
            else:
                late = asyncio.ensure_future(client.acquire(name, maximum=1))
                await asyncio.sleep(0)
                late.cancel()  # it has been sent, and will be granted
            began = loop.now
            waiting = asyncio.ensure_future(client.hold(name, maximum=1).__aenter__())
            if how != "cancelled":
                await asyncio.sleep(10)
                began += 10  # its pauses are long
            if how == "hold":
                await held.__aexit__(None, None, None)
            elif how == "release":
                await client.release(name)
            elif how == "pipeline":
                await client.pipeline().release(name).execute()
            elif how == "semaphore":
                semaphore.release()
            hold = await waiting
            assert loop.now == began
            await hold.__aexit__(None, None, None)

    loop.run(main())


def test_two_clients_share_permits(address, name: str) -> None:
    """Neither starves, and no more than the maximum is held at any time."""
    held = most = 0

    async def work(client: aio.Client) -> None:
        nonlocal held, most
        for _ in range(3):
            async with client.hold(name, 2, maximum=5):
                held += 2
                most = max(most, held)
                await asyncio.sleep(0)
                held -= 2

    async def main() -> None:
        async with aio.Client(*address) as one, aio.Client(*address) as two:
            await asyncio.gather(*(work(client) for client in (one, two) for _ in range(10)))
            assert await in_use(one, name) == 0

    run(main())
    assert most in (2, 4)


def test_waiters_time_out(address, name: str) -> None:
    """The first as well as those behind it, each after its own timeout; the remaining one gets the permits."""

    async def give_up(client: aio.Client, timeout: float) -> None:
        with pytest.raises(NotAvailable) as refused:
            await client.hold(name, 2, maximum=3, timeout=timeout).__aenter__()
        error = refused.value
        assert (error.name, error.resources, error.maximum) == (name.encode(), 2, 3)
        assert (error.consumption, error.waited) == (2, timeout)

    async def main() -> None:
        async with aio.Client(*address) as client, aio.Client(*address) as other:
            await other.acquire(name, 2, maximum=3)
            await give_up(client, 0)
            first = asyncio.ensure_future(give_up(client, 0.06))
            await asyncio.sleep(0)
            last = asyncio.ensure_future(client.hold(name, 2, maximum=3).__aenter__())
            await asyncio.gather(*(give_up(client, timeout) for timeout in (0, 0.05, 0.01, 0.03)), first)
            assert not last.done()
            await other.release(name, 2)
            await (await last).__aexit__(None, None, None)

    run(main())


@pytest.mark.limit(300)  # on a busy machine the tasks alone take a minute
@pytest.mark.parametrize("how", ["cancelled", "timed out"])
def test_ten_thousand_wait_for_one_name(how: str, address, name: str) -> None:
    """The loop serves others meanwhile, and the server gets hardly any requests."""

    async def main() -> None:
        loop = asyncio.get_running_loop()
        patient = aio.Client(*address, timeout=PATIENCE)
        async with patient as client, aio.Client(*address, timeout=PATIENCE) as other:
            await other.acquire(name, maximum=1)
            timeout = 1.5 if how == "timed out" else None
            waiting = [
                asyncio.ensure_future(client.hold(name, maximum=1, timeout=timeout).__aenter__()) for _ in range(10_000)
            ]
            for _ in range(2):  # meanwhile all begin to wait: what they have asked is answered
                await client.noop()
            before, began, turns = await asked(other), loop.time(), 0
            while turns < 50 or loop.time() < began + 0.5:
                await client.noop()
                turns += 1
            seconds = loop.time() - began
            assert await asked(other) - before <= 3 * (8 + 8 * seconds)  # 8 until the pause is the longest
            if how == "cancelled":
                for task in waiting:
                    task.cancel()
            gets = int((await other.stats())["command:get"])
            ended = await asyncio.gather(*waiting, return_exceptions=True)
            assert {type(each) for each in ended} == {asyncio.CancelledError if how == "cancelled" else NotAvailable}
            assert int((await other.stats())["command:get"]) - gets < 100
            await until(lambda: is_waited_for(other, 0), "nobody waits in the server")
            await other.release(name)
            async with client.hold(name, maximum=1):  # nor in the client, where this would be behind it
                assert await in_use(other, name) == 1

    run(main(), seconds=4 * PATIENCE)


@pytest.mark.parametrize("once", [False, True])
def test_a_hold_is_entered_once_at_a_time(once: bool, address, name: str) -> None:
    async def main() -> None:
        async with aio.Client(*address) as client:
            hold = client.hold(name, maximum=5)
            if once:
                async with hold:
                    with pytest.raises(RuntimeError, match="already in use"):
                        await hold.__aenter__()
            else:
                both = await asyncio.gather(hold.__aenter__(), hold.__aenter__(), return_exceptions=True)
                assert [type(each) for each in both] == [aio.Hold, RuntimeError]
                await hold.__aexit__(None, None, None)
            assert await in_use(client, name) == 0
            async with hold:  # it is over, so this is another time
                assert await in_use(client, name) == 1
            assert await in_use(client, name) == 0

    run(main())


# ---- decorators -----------------------------------------------------------------------------------------------------


def test_a_decorated_function(address, name: str) -> None:
    async def main() -> None:
        async with aio.Client(*address) as client:

            @client.hold(name, 2, maximum=5)
            async def work(number: int, *, fails: bool = False) -> int:
                """What it does."""
                assert await client.get(name) % 2 == 0
                if fails:
                    raise KeyError(number)
                return number + 1

            assert (work.__name__, work.__doc__) == ("work", "What it does.")
            assert inspect.iscoroutinefunction(work)
            assert await asyncio.gather(*(work(number) for number in range(10))) == list(range(1, 11))
            with pytest.raises(KeyError):
                await work(1, fails=True)
            assert await in_use(client, name) == 0

    run(main())


def test_a_decorated_generator_keeps_its_behaviour(address, name: str) -> None:
    """What is sent or thrown into it arrives there."""
    seen: list[Any] = []

    async def main() -> None:
        async with aio.Client(*address) as client:

            @client.hold(name, maximum=5)
            async def numbers() -> AsyncIterator[Any]:
                try:
                    seen.append((yield await client.get(name)))
                    try:
                        yield "second"
                    except KeyError as error:
                        yield repr(error)
                    raise OSError("at last")
                finally:
                    seen.append(await client.get(name))

            assert inspect.isasyncgenfunction(numbers)
            items = numbers()
            assert await items.asend(None) == 1
            assert await items.asend("sent") == "second"
            assert await items.athrow(KeyError("thrown")) == "KeyError('thrown')"
            with pytest.raises(OSError, match="at last"):
                await items.__anext__()
            assert (seen, await in_use(client, name)) == (["sent", 1], 0)

            items = numbers()
            assert await items.__anext__() == 1
            await items.aclose()
            assert (seen[2:], await in_use(client, name)) == ([1], 0)

            items = numbers()
            assert await items.__anext__() == 1
            with pytest.raises(ValueError, match="thrown"):
                await items.athrow(ValueError("thrown"))
            assert (seen[3:], await in_use(client, name)) == ([1], 0)

            @client.hold(name, maximum=5)
            async def two() -> AsyncIterator[int]:
                yield 1
                yield 2

            assert [each async for each in two()] == [1, 2]
            assert await in_use(client, name) == 0

    run(main())


# ---- semaphores -----------------------------------------------------------------------------------------------------


async def locked(semaphore: Any) -> bool:
    answer = semaphore.locked()
    return bool(await answer if inspect.isawaitable(answer) else answer)


async def played(semaphore: Any) -> list[Any]:
    """The results of every way to use a semaphore of two permits."""
    results: list[Any] = [await locked(semaphore), await semaphore.acquire()]
    async with semaphore as entered:
        results += [entered, await locked(semaphore)]
        waiting = [asyncio.ensure_future(semaphore.acquire()) for _ in range(3)]
        await asyncio.sleep(0.01)
        results += [each.done() for each in waiting]
        waiting[1].cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await waiting[1]
        results.append(semaphore.release())
        results.append(await waiting[0])
        results.append(waiting[2].done())
    results.append(await waiting[2])
    results.append(await locked(semaphore))
    results += [semaphore.release(), semaphore.release()]
    results.append(await locked(semaphore))
    for over in (semaphore.release, None):
        try:
            if over is None:
                async with semaphore:
                    semaphore.release()
            else:
                over()
        except ValueError:
            results.append("released too many times")
    with contextlib.suppress(KeyError):
        async with semaphore:
            raise KeyError
    results.append(await locked(semaphore))
    return results


def test_a_semaphore_behaves_like_that_of_asyncio(address, name: str) -> None:
    async def main() -> None:
        async with aio.Client(*address) as client:
            assert await played(client.semaphore(name, 2)) == await played(asyncio.BoundedSemaphore(2))
            assert await in_use(client, name) == 0

    run(main())


def test_calls_and_holds_after_close(address, name: str) -> None:
    async def main() -> None:
        async with aio.Client(*address) as client:
            hold = await client.hold(name, maximum=2).__aenter__()
            waiting = asyncio.ensure_future(client.hold(name, 2, maximum=2).__aenter__())
            for _ in range(2):  # meanwhile it begins to wait
                await client.noop()
        for over in (waiting, client.noop(), client.hold(name, maximum=2).__aenter__(), client.dump()):
            with pytest.raises(ConnectionLost, match=r"close\(\) was called$"):
                await over
        with pytest.raises(ConnectionLost, match=r"close\(\) was called$"):
            await client.pipeline().noop().execute()
        assert hold.lost
        with pytest.raises(ConnectionLost, match=r"close\(\) was called$"):
            hold.raise_if_lost()
        await hold.__aexit__(None, None, None)  # nothing was lost that its owner did not give up
        await client.close()

    run(main())
