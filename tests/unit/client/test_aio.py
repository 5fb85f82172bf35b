"""The client for asyncio with a server in memory and a clock that jumps: waiting, connecting, and events that
coincide."""

from __future__ import annotations

import asyncio
import functools
import itertools
from typing import TYPE_CHECKING, Any

import pytest

from counterd.client import _wait_queues, aio
from counterd.client._connection import FORKED
from counterd.client.counter import _commands
from counterd.errors import ConnectionLost, NotAvailable, NotFound, ProtocolError, Timeout
from counterd.protocols.counter.wire import Opcode
from kit import memory

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Coroutine


def play(main: Callable[[memory.Loop, aio.Client], Coroutine[Any, Any, None]], *, closed: bool = True) -> None:
    """Runs a scene with a client that has the default timeouts, and closes it."""
    loop = memory.Loop()

    async def played() -> None:
        client = aio.Client()
        await main(loop, client)
        if closed:
            await client.close()

    loop.run(played())


async def turns(count: int = 5) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110 - the clock jumps
        await asyncio.sleep(0.0001)


# ---- connecting -----------------------------------------------------------------------------------------------------


def test_a_client_connects_when_it_is_used() -> None:
    async def main(loop: memory.Loop, client: aio.Client) -> None:
        assert client.where == "127.0.0.1:11215"
        assert loop.server.pipes == []
        await asyncio.gather(*(client.noop() for _ in range(5)))
        assert len(loop.server.pipes) == 1

    play(main)


def test_attempts_grow_rarer_while_the_server_is_away() -> None:
    """A hold makes an attempt when it is due; the first that succeeds ends that."""
    attempts: list[float] = []

    async def main(loop: memory.Loop, client: aio.Client) -> None:
        def accepts() -> bool:
            attempts.append(loop.now)
            return len(attempts) > 12

        loop.server.accepts = accepts
        async with client.hold("n", maximum=1):
            pauses = [after - before for before, after in itertools.pairwise(attempts)]
            assert all(0.02 < pause < 2.1 for pause in pauses)
            assert pauses[-1] >= 1
            assert len(attempts) == 13

    play(main)


@pytest.mark.parametrize("at_once", [True, False])
def test_holds_pause_between_connections_that_the_server_closes(at_once: bool, monkeypatch) -> None:
    """Even if it closes them before the client can have seen that it had accepted."""

    async def main(loop: memory.Loop, client: aio.Client) -> None:
        def cut() -> None:
            for pipe in loop.server.pipes:
                loop.call_soon(pipe.cut)

        async def connect(protocol: Any) -> Any:
            pipe = await memory.Server.connect(loop.server, protocol)
            pipe[0].cut()
            return pipe

        if at_once:
            monkeypatch.setattr(loop.server, "connect", connect)
            with pytest.raises(ConnectionLost):
                await client.noop()
            assert len(loop.server.pipes) == 1
        else:
            loop.on_idle = cut
        with pytest.raises(ConnectionLost):
            await client.hold("n", maximum=1, timeout=10).__aenter__()
        assert 5 < len(loop.server.pipes) < 100

    play(main)


def test_calls_pause_between_connections_that_the_server_closes() -> None:
    async def main(loop: memory.Loop, client: aio.Client) -> None:
        loop.on_idle = lambda: [loop.call_soon(pipe.cut) for pipe in loop.server.pipes]
        for _ in range(50):
            with pytest.raises(ConnectionLost):
                await client.noop()
        assert 1 < len(loop.server.pipes) < 10

    play(main)


def test_invalid_arguments_of_a_semaphore() -> None:
    with pytest.raises(ValueError, match=r"^maximum must be 0 to"):
        aio.Client().semaphore("n", -1)


@pytest.mark.parametrize("before_it_begins", [True, False])
def test_closing_ends_calls_that_wait_for_the_connection(before_it_begins: bool) -> None:
    async def main(loop: memory.Loop, client: aio.Client) -> None:
        calls = [asyncio.ensure_future(client.noop()) for _ in range(3)]
        await turns(1 if before_it_begins else 5)
        await client.close()
        assert asyncio.all_tasks() <= {asyncio.current_task(), *calls}
        for call in calls:
            with pytest.raises(ConnectionLost, match=r"close\(\) was called$"):
                await call
        assert all(pipe.closed for pipe in loop.server.pipes)
        assert asyncio.all_tasks() == {asyncio.current_task()}

    play(main)


def test_a_connection_made_after_close_is_closed(monkeypatch) -> None:
    """Until Python 3.12, wait_for() may lose that it was cancelled."""

    async def deaf(awaitable: Any, _: float) -> Any:
        task = asyncio.ensure_future(awaitable)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            return await task

    async def main(loop: memory.Loop, client: aio.Client) -> None:
        call = asyncio.ensure_future(client.noop())
        await turns()
        await client.close()
        with pytest.raises(ConnectionLost, match=r"close\(\) was called$"):
            await call
        assert [pipe.closed for pipe in loop.server.pipes] == [True]

    monkeypatch.setattr(asyncio, "wait_for", deaf)
    play(main)


def test_a_client_can_be_entered_before_its_server_exists() -> None:
    async def main(loop: memory.Loop, client: aio.Client) -> None:
        loop.server.accepts = lambda: loop.now > 3
        async with client:
            with pytest.raises(ConnectionLost, match=r"^cannot connect to "):
                await client.noop()
            async with client.hold("n", maximum=1):
                assert loop.now > 3

    play(main)


def test_get_with_a_default() -> None:
    async def main(loop: memory.Loop, client: aio.Client) -> None:
        assert await client.get("n", default=7) == 7
        with pytest.raises(NotFound):
            await client.get("n")
        await client.acquire("n", 2, maximum=2)
        assert await client.get("n", default=7) == 2

    play(main)


def test_a_pipeline_as_a_context_manager() -> None:
    async def main(loop: memory.Loop, client: aio.Client) -> None:
        async with client.pipeline() as pipeline:
            assert await pipeline.noop().execute() == [None]
            pipeline.noop()
        assert await pipeline.execute() == []

    play(main)


def test_repr_of_a_semaphore() -> None:
    assert repr(aio.Client().semaphore("s", 3)) == "<Semaphore s, maximum 3, 0 acquired here>"


def test_an_attempt_to_connect_times_out() -> None:
    async def main(loop: memory.Loop, client: aio.Client) -> None:
        loop.server.delay = lambda: 60
        with pytest.raises(Timeout, match=r"^127.0.0.1:11215 did not accept a connection within 5 s$"):
            await client.noop()
        assert loop.now == 5
        loop.server.delay = lambda: 0.001
        await asyncio.sleep(0.1)
        await client.noop()

    play(main)


# ---- permits that were lost -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("under_way", [True, False])
def test_one_call_raises_the_loss_of_permits(under_way: bool) -> None:
    async def main(loop: memory.Loop, client: aio.Client) -> None:
        await client.acquire("n", maximum=1)
        calls = [asyncio.ensure_future(client.noop())] if under_way else []
        await turns()
        loop.server.pipes[0].cut()
        async with client.hold("other", maximum=1):  # which does not tell of it, and connects again
            calls += [asyncio.ensure_future(client.noop()) for _ in range(3)]
            ended = await asyncio.gather(*calls, return_exceptions=True)
        assert [type(each) for each in ended] == [ConnectionLost, *[type(None)] * (len(ended) - 1)]

    play(main)


def test_a_hold_raises_only_its_own_loss() -> None:
    async def main(loop: memory.Loop, client: aio.Client) -> None:
        await client.acquire("n", maximum=1)
        hold = await client.hold("other", maximum=1).__aenter__()
        loop.server.pipes[0].cut()
        with pytest.raises(ConnectionLost, match=r"^lost 1 of other "):
            await hold.__aexit__(None, None, None)
        with pytest.raises(
            ConnectionLost, match="everything that was acquired through this connection has been given back"
        ):
            await client.noop()
        await client.noop()

    play(main)


@pytest.mark.parametrize("on_lost", ["raise", "reacquire", "a function"])
@pytest.mark.parametrize("closes", [True, False])
def test_a_loss_while_a_hold_is_left(on_lost: str, closes: bool) -> None:
    """Only "raise" raises, and not if the program closed the connection itself. The loss is not reported in any other
    way."""
    told: list[aio.Hold] = []

    async def main(loop: memory.Loop, client: aio.Client) -> None:
        hold = client.hold("n", maximum=1, on_lost=told.append if on_lost == "a function" else on_lost)  # type: ignore
        await hold.__aenter__()
        leaving = asyncio.ensure_future(hold.__aexit__(None, None, None))
        await turns()
        if closes:
            await client.close()
        else:
            loop.server.pipes[0].cut()
        if on_lost == "raise" and not closes:
            with pytest.raises(ConnectionLost, match=r"^lost 1 of n with the connection to "):
                await leaving
        else:
            await leaving
        if not closes:
            await client.noop()
        assert (told, hold.lost, client._again, client._tasks) == ([], False, [], set())

    play(main)


def test_leaving_a_hold_while_cancelled_and_the_connection_is_lost() -> None:
    """All in one turn, and asyncio reports no exception that was never retrieved."""

    async def main(loop: memory.Loop, client: aio.Client) -> None:
        hold = client.hold("n", maximum=1)
        semaphore = client.semaphore("s", 2)
        await hold.__aenter__()
        await semaphore.acquire()
        semaphore.release()
        leaving = asyncio.ensure_future(hold.__aexit__(None, None, None))
        await turns()
        loop.server.pipes[0].cut()
        leaving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await leaving

    play(main)


def test_leaving_a_hold_while_it_is_acquired_again(monkeypatch) -> None:
    """The grant comes after that, is given back, and wakes the next waiter of this client."""
    monkeypatch.setattr(_wait_queues, "ASK_FIRST_S", 1e6)

    async def main(loop: memory.Loop, client: aio.Client) -> None:
        hold = client.hold("n", maximum=1, on_lost="reacquire")
        await hold.__aenter__()
        loop.server.pipes[0].cut()
        assert hold.lost
        await until(lambda: loop.server.used[b"n"] > 0)
        assert hold.lost  # the answer is under way
        waiting = asyncio.ensure_future(client.hold("n", maximum=1).__aenter__())
        await hold.__aexit__(None, None, None)
        await (await waiting).__aexit__(None, None, None)
        assert loop.now < 0.1
        assert (loop.server.used[b"n"], client._again, client._tasks) == (0, [], set())

    play(main)


def delays(loop: memory.Loop, link: Any) -> None:
    """A server that delays: what it receives within 0.1 s is read together."""
    chunks: list[bytes] = []
    received = link.data_received

    def take() -> None:
        received(b"".join(chunks))
        chunks.clear()

    def gather(data: bytes) -> None:
        if not chunks:
            loop.call_later(0.1, take)
        chunks.append(data)

    link.data_received = gather


@pytest.mark.parametrize("meets", [False, True])
def test_entering_a_hold_before_it_was_acquired_again(monkeypatch, meets: bool) -> None:
    """It has the permits once. meets: the request to acquire them again is under way, and the answer comes late."""
    monkeypatch.setattr(_commands, "ASK_FIRST_S", 1.0)

    async def main(loop: memory.Loop, client: aio.Client) -> None:
        hold = client.hold("n", 2, maximum=9, on_lost="reacquire")
        await hold.__aenter__()
        loop.server.accepts = lambda: False
        loop.server.pipes[0].cut()
        await asyncio.sleep(0.01)
        loop.server.accepts = lambda: True
        if meets:
            await until(lambda: loop.server.used[b"n"] > 0)
            assert hold.lost
            delays(loop, loop.server.pipes[-1].protocol)
        await hold.__aexit__(None, None, None)
        async with hold:
            await asyncio.sleep(5)
            assert (loop.server.used[b"n"], len(client._link.holds)) == (2, 1)  # type: ignore[union-attr]
        assert loop.server.used[b"n"] == 0

    play(main)


def test_lost_permits_are_raised_although_a_hold_is_being_left() -> None:
    async def main(loop: memory.Loop, client: aio.Client) -> None:
        await client.acquire("n", 2, maximum=2)
        hold = await client.hold("other", 2, maximum=2).__aenter__()
        leaving = asyncio.ensure_future(hold.__aexit__(None, None, None))
        await turns()
        loop.server.pipes[0].cut()
        with pytest.raises(ConnectionLost, match=r"^lost 2 of other "):
            await leaving
        with pytest.raises(
            ConnectionLost, match="everything that was acquired through this connection has been given back"
        ):
            await client.noop()

    play(main)


def test_a_hold_that_is_granted_and_lost_in_one_turn_is_acquired_again() -> None:
    """And no call is told that something had been lost."""

    async def main(loop: memory.Loop, client: aio.Client) -> None:
        await client.noop()
        pipe = loop.server.pipes[0]
        received = pipe.protocol.data_received

        def cuts(data: bytes) -> None:
            received(data)
            pipe.cut()

        pipe.protocol.data_received = cuts
        async with client.hold("n", maximum=1) as hold:
            assert not hold.lost
            await client.noop()

    play(main)


@pytest.mark.parametrize("ask", [aio.Client.noop, lambda client: client.pipeline().noop().execute()])
def test_a_protocol_error_is_not_followed_by_an_error_for_the_loss(ask: Callable[[aio.Client], Any]) -> None:
    async def main(loop: memory.Loop, client: aio.Client) -> None:
        await client.acquire("n", maximum=1)
        asked = asyncio.ensure_future(ask(client))
        await turns()
        loop.server.pipes[0].protocol.data_received(b"nonsense")
        with pytest.raises(ProtocolError):
            await asked
        await client.noop()

    play(main)


# ---- waiting --------------------------------------------------------------------------------------------------------


def test_the_first_waiter_asks_more_and_more_rarely() -> None:
    async def main(loop: memory.Loop, client: aio.Client) -> None:
        await client.acquire("n", maximum=1)
        holds = [client.hold("n", maximum=1, timeout=60) for _ in range(100)]
        ended = await asyncio.gather(*(hold.__aenter__() for hold in holds), return_exceptions=True)
        assert {type(each) for each in ended} == {NotAvailable}
        sent = [opcode for opcode, _ in loop.server.pipes[0].sent]
        assert 60 * 8 < sent.count(Opcode.ACQUIRE) < 60 * 16 + 120
        assert sent.count(Opcode.GET) <= 2
        assert 60 <= loop.now < 60.1

    play(main)


def test_a_waiter_behind_another_times_out_by_itself() -> None:
    """When its own timeout is over, not when the first waiter is done; and without asking for permits."""

    async def main(loop: memory.Loop, client: aio.Client) -> None:
        await client.acquire("n", maximum=1)
        first = asyncio.ensure_future(client.hold("n", maximum=1).__aenter__())
        await asyncio.sleep(1)
        began = loop.now
        with pytest.raises(NotAvailable, match=r"1 in use, waited 0\.1 s$"):
            await client.hold("n", maximum=1, timeout=0.1).__aenter__()
        assert 0.1 <= loop.now - began < 0.11
        await client.release("n")
        await (await first).__aexit__(None, None, None)

    play(main)


def test_closing_ends_waiting_holds() -> None:
    """At once, those of each name and those behind the first."""

    async def main(loop: memory.Loop, client: aio.Client) -> None:
        waiting = []
        for name in ("a", "b"):
            await client.acquire(name, maximum=1)
            waiting += [asyncio.ensure_future(client.hold(name, maximum=1).__aenter__()) for _ in range(3)]
        await asyncio.sleep(10)
        before = loop.now
        await client.close()
        ended = await asyncio.gather(*waiting, return_exceptions=True)
        assert {type(each) for each in ended} == {ConnectionLost}
        assert loop.now == before

    play(main)


def test_a_hold_that_was_refused_may_be_entered_again() -> None:
    async def main(loop: memory.Loop, client: aio.Client) -> None:
        await client.acquire("n", maximum=1)
        hold = client.hold("n", maximum=1, timeout=0)
        with pytest.raises(NotAvailable):
            await hold.__aenter__()
        await client.release("n")
        async with hold:
            assert loop.server.used[b"n"] == 1

    play(main)


def test_a_granted_hold_whose_task_is_cancelled_wakes_the_next() -> None:
    async def main(loop: memory.Loop, client: aio.Client) -> None:
        await client.noop()
        tasks = [asyncio.ensure_future(client.hold("n", maximum=1).__aenter__()) for _ in range(2)]
        await turns()
        tasks[0].cancel()
        await (await tasks[1]).__aexit__(None, None, None)
        assert loop.now < 0.02
        assert loop.server.used[b"n"] == 0

    play(main)


@pytest.mark.parametrize("answers", [True, False])
def test_waiting_takes_share_one_probe(answers: bool) -> None:
    """If the server does not answer the probe, all time out and leave its queue."""

    async def main(loop: memory.Loop, client: aio.Client) -> None:
        server = loop.server
        server.has_takes = True
        await client.acquire("n", maximum=1)
        waiting = [asyncio.ensure_future(client.hold("n", maximum=1).__aenter__()) for _ in range(100)]
        server.answers = lambda opcode: answers or opcode not in (Opcode.NOOP, Opcode.CANCEL)
        await asyncio.sleep(35 if answers else 16)
        pipe = server.pipes[0]
        assert [opcode for opcode, _ in pipe.sent].count(Opcode.NOOP) == (3 if answers else 1)
        if not answers:
            ended = await asyncio.gather(*waiting, return_exceptions=True)
            assert {type(each) for each in ended} == {Timeout}
            assert server.waiting == []
            await client.release("n")
        else:
            await client.release("n")
            for each in waiting:
                await (await each).__aexit__(None, None, None)
        assert server.used[b"n"] == 0

    play(main)


# ---- arguments ------------------------------------------------------------------------------------------------------


def test_only_asynchronous_functions_can_be_decorated() -> None:
    hold = aio.Client().hold("n", maximum=1)

    def function() -> None: ...

    def generator() -> Any:
        yield 1

    for wrong in (function, generator, functools.partial(function), print, aio.Client, 5):
        with pytest.raises(TypeError, match=r"is not asynchronous: it needs a hold of .* counterd\.client"):
            hold(wrong)  # type: ignore[type-var]


def test_a_partial_of_an_asynchronous_function_can_be_decorated() -> None:
    async def main(loop: memory.Loop, client: aio.Client) -> None:
        async def work(number: int) -> int:
            return number + loop.server.used[b"n"]

        assert await client.hold("n", maximum=3)(functools.partial(work, 5))() == 6
        assert loop.server.used[b"n"] == 0

    play(main)


def test_a_decorated_generator_that_never_starts_holds_nothing() -> None:
    async def main(loop: memory.Loop, client: aio.Client) -> None:
        @client.hold("n", maximum=1)
        async def items() -> AsyncIterator[int]:
            yield 1

        await items().aclose()
        assert loop.server.pipes == []

    play(main)


@pytest.mark.parametrize("options", [{"timeout": -1}, {"timeout": float("nan")}, {"on_lost": "nothing"}])
def test_invalid_arguments_of_a_hold(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"^(timeout|on_lost) must be "):
        aio.Client().hold("n", maximum=1, **options)


def test_an_empty_pipeline_sends_nothing() -> None:
    async def main(loop: memory.Loop, client: aio.Client) -> None:
        assert await client.pipeline().execute() == []
        assert loop.server.pipes == []

    play(main)


def test_a_pipeline_cancelled_after_some_answers_gives_back_its_grants() -> None:
    """What its acquires were granted, before and after; nothing else."""

    async def main(loop: memory.Loop, client: aio.Client) -> None:
        await client.acquire("kept", 2, maximum=9)
        loop.server.split = lambda size: 16 + 12
        asked = client.pipeline().acquire("n", 2, maximum=9).noop().get("kept").acquire("n", 3, maximum=9)
        running = asyncio.ensure_future(asked.execute())
        await turns()
        pipe = loop.server.pipes[0]
        received = pipe.protocol.data_received

        def cancels(data: bytes) -> None:
            received(data)
            running.cancel()

        pipe.protocol.data_received = cancels
        with pytest.raises(asyncio.CancelledError):
            await running
        await client.noop()
        await client.noop()
        assert dict(loop.server.used) == {b"n": 0, b"kept": 2}
        assert [opcode for opcode, _ in pipe.sent].count(Opcode.RELEASE) == 2

    play(main)


def test_a_forked_child_does_not_use_its_parents_connection() -> None:
    """A fork itself is in tests/functional/test_aio_lost.py; here is the state that the child begins with."""

    async def main(loop: memory.Loop, client: aio.Client) -> None:
        await client.acquire("n", maximum=1)
        link = client._link
        assert link is not None
        link.transport, transport = None, link.transport  # the child would close its copy of the socket
        client._after_fork()
        link.transport = transport
        assert (link.closed, client._tasks) == (FORKED, set())
        await client.noop()  # nothing was lost: it was never the child's
        assert len(loop.server.pipes) == 2
        assert loop.server.used[b"n"] == 1
        loop.server.pipes[0].abort()

    play(main)


def test_locked_of_a_semaphore_that_was_never_acquired() -> None:
    async def main(loop: memory.Loop, client: aio.Client) -> None:
        assert await client.semaphore("n", 1).locked() is False

    play(main)
