"""A connection of asyncio's client with a fake transport: when requests are sent, and what becomes of abandoned
calls."""

from __future__ import annotations

import asyncio
import struct
from typing import TYPE_CHECKING, Any

import pytest

from counterd.client import _tasklink
from counterd.client._holding import Held
from counterd.client._tasklink import TaskLink
from counterd.client.counter._permits import PermitCalls
from counterd.errors import ConnectionLost, NotAvailable, ProtocolError, Timeout
from counterd.protocols.counter import wire
from kit import memory

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

TIMEOUT = 5.0
WRONG = b"\x91\x01\x00\x00\x00\x00\x00\x00\x00\x00\x00\x63"


class Transport(asyncio.Transport):
    """Accepts what is written; full after `room` bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.written: list[bytes] = []
        self.aborted = False
        self.link: TaskLink
        self.room = 1 << 30

    def write(self, data: Any) -> None:
        assert not self.aborted
        self.written.append(bytes(data))
        if sum(map(len, self.written)) > self.room:
            self.link.pause_writing()

    def abort(self) -> None:
        self.aborted = True


class Case:
    """A link with its transport, and what it has told its client."""

    def __init__(self, loop: memory.Loop) -> None:
        self.loop = loop
        self.ended: list[TaskLink] = []
        self.returned: list[bytes] = []
        self.link = TaskLink(
            loop,
            "there",
            TIMEOUT,
            self.ended.append,
            lambda request: self.returned.append(request[1]),
            calls=PermitCalls(),
        )
        self.transport = Transport()
        self.transport.link = self.link
        self.link.connection_made(self.transport)

    def sent(self) -> list[tuple[int, bytes]]:
        """The opcodes and bodies of all requests so far."""
        data, found = b"".join(self.transport.written), []
        while data:
            size = 12 + int.from_bytes(data[4:8], "big")
            found.append((data[1], data[12:size]))
            data = data[size:]
        return found

    def answer(self, number: int, opcode: int, body: bytes = b"", status: int = 0) -> None:
        """Answers the number-th request, counted from 1."""
        self.link.data_received(wire.frame(opcode, number, body, magic=wire.RESPONSE_MAGIC, flags=status))


def play(main: Callable[[Case], Coroutine[Any, Any, None]]) -> None:
    loop = memory.Loop()

    async def played() -> None:
        await main(Case(loop))

    loop.run(played())


def one(permits: int) -> bytes:
    return struct.pack(">I", permits)


async def turns(count: int = 3) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


def test_requests_of_one_turn_are_sent_with_one_write() -> None:
    async def main(case: Case) -> None:
        calls = [asyncio.ensure_future(case.link.call(wire.get, b"n%d" % number)) for number in range(4)]
        await turns()
        assert [len(piece) for piece in case.transport.written] == [16, 48]  # the first need not wait for any other
        for number in (1, 2, 3, 4):
            case.answer(number, 1, one(10 * number))
        assert await asyncio.gather(*calls) == [10, 20, 30, 40]

    play(main)


def test_the_shortest_deadline_of_one_turn_is_kept() -> None:
    """Two requests with patience, and then one without, are sent with one write."""

    async def main(case: Case) -> None:
        patient = [case.link.start((wire.noop,), patience=100.0) for _ in range(2)]
        call = case.link.start((wire.noop,))
        assert call.waiter is not None
        await call.waiter
        assert isinstance(call.error, Timeout)
        assert case.loop.time() == call.deadline
        assert not any(each.waiter.done() for each in patient if each.waiter)

    play(main)


@pytest.mark.parametrize(
    ("request_", "body", "given_back"),
    [
        ((wire.noop,), b"", []),
        ((wire.get, b"n"), one(7), []),
        ((wire.get, b"a name longer than the header of an acquire"), one(7), []),
        ((wire.release, b"n", 3), b"", []),
        ((wire.stats,), b"\0\1\0\1a7", []),
        ((wire.acquire, b"n", 3, 9), one(3), [(3, one(3) + b"\0\1n")]),
    ],
)
@pytest.mark.parametrize("when", ["before", "with"])
def test_a_cancelled_call_gives_back_only_what_it_was_granted(
    request_: Any, body: bytes, given_back: list[Any], when: str
) -> None:
    """Whether it is cancelled before the answer, or when the answer is there already."""

    async def main(case: Case) -> None:
        call = asyncio.ensure_future(case.link.call(*request_))
        await turns()
        opcode = case.sent()[0][0]
        if when == "with":
            case.answer(1, opcode, body)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        if when == "before":
            case.answer(1, opcode, body)
        await turns()
        assert case.sent()[1:] == given_back
        assert case.returned == [b"n"] * len(given_back)
        assert not case.link.closed

    play(main)


def test_a_call_cancelled_after_its_refusal_gives_nothing_back() -> None:
    async def main(case: Case) -> None:
        call = asyncio.ensure_future(case.link.call(wire.acquire, b"n", 1, 1))
        await turns()
        case.answer(1, 2, b"no", 0x21)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        assert len(case.sent()) == 1

    play(main)


def test_a_grant_after_the_timeout_is_given_back() -> None:
    async def main(case: Case) -> None:
        with pytest.raises(
            Timeout, match=r"^there did not answer within 5 s: does this address serve the counter protocol\?$"
        ):
            await case.link.call(wire.acquire, b"n", 2, 2)
        assert case.loop.now == TIMEOUT
        assert not case.link.closed
        case.answer(1, 2, one(2))
        await turns()
        assert case.sent()[1:] == [(3, one(2) + b"\0\1n")]
        assert case.returned == [b"n"]
        case.answer(2, 3)
        assert (case.link.calls.held, case.link.calls.pending) == (0, {})

    play(main)


def test_each_call_has_its_own_deadline() -> None:
    async def main(case: Case) -> None:
        async def call(after: float) -> float:
            await asyncio.sleep(after)
            with pytest.raises(Timeout):
                await case.link.call(wire.noop)
            return case.loop.now

        assert await asyncio.gather(call(0), call(1), call(2.5)) == [5, 6, 7.5]

    play(main)


@pytest.mark.parametrize("waits", [True, False])
def test_a_server_that_does_not_read_is_disconnected(waits: bool) -> None:
    """When one call has waited for its whole timeout, also if its caller is gone."""

    async def main(case: Case) -> None:
        case.transport.room = 100
        calls = [asyncio.ensure_future(case.link.call(wire.get, b"n")) for _ in range(100)]
        await turns()
        more = [asyncio.ensure_future(case.link.call(wire.get, b"n")) for _ in range(100)]
        await turns()
        written = len(case.sent())
        assert written == 100
        for call in calls + more if not waits else more:
            call.cancel()
        ended = await asyncio.gather(*calls, *more, return_exceptions=True)
        assert {type(each) for each in ended[:100]} == {Timeout if waits else asyncio.CancelledError}
        await asyncio.sleep(TIMEOUT)
        assert case.link.closed == "the server accepts no more requests"
        assert case.transport.aborted
        assert len(case.sent()) == written

    play(main)


def test_queued_requests_are_sent_when_the_transport_has_room() -> None:
    async def main(case: Case) -> None:
        case.transport.room = 20
        calls = [asyncio.ensure_future(case.link.call(wire.get, b"n%d" % number)) for number in range(4)]
        await turns()
        more = asyncio.ensure_future(case.link.call(wire.noop))
        await turns()
        assert len(case.sent()) == 4
        case.transport.room = 1 << 30
        case.link.resume_writing()
        assert [opcode for opcode, _ in case.sent()] == [1, 1, 1, 1, 0]
        for number in (1, 2, 3, 4):
            case.answer(number, 1, one(number))
        case.answer(5, 0)
        assert await asyncio.gather(*calls, more) == [1, 2, 3, 4, None]

    play(main)


def test_unanswered_calls_are_bounded(monkeypatch) -> None:
    monkeypatch.setattr(_tasklink, "UNANSWERED_MAX", 10)

    async def main(case: Case) -> None:
        for _ in range(10):
            case.link.tell(wire.noop)
        await asyncio.sleep(TIMEOUT)
        assert not case.link.closed
        case.link.tell(wire.noop)
        await asyncio.sleep(TIMEOUT)
        assert case.link.closed == "10 calls were not answered"

    play(main)


@pytest.mark.parametrize("how", ["eof", "lost", "wrong", "dropped"])
def test_the_end_of_a_connection_fails_its_calls(how: str) -> None:
    """Each call without an answer gets an error of its own; later ones are not sent."""

    async def main(case: Case) -> None:
        calls = [asyncio.ensure_future(case.link.call(wire.noop)) for _ in range(3)]
        await turns()
        if how == "eof":
            case.link.eof_received()
        elif how == "lost":
            case.link.connection_lost(OSError("broken"))
        elif how == "wrong":
            case.link.data_received(WRONG)
        else:
            case.link.close("a test")
        ended = await asyncio.gather(*calls, return_exceptions=True)
        assert {type(each) for each in ended} == {ProtocolError if how == "wrong" else ConnectionLost}
        assert len({id(each) for each in ended}) == 3
        assert case.ended == [case.link]
        assert case.transport.aborted
        assert case.link._timer is not None
        assert case.link._timer.cancelled()
        if how != "lost":
            case.link.connection_lost(None)
        await case.link.gone()
        assert case.ended == [case.link]
        sent = len(case.sent())
        with pytest.raises(ConnectionLost):
            await case.link.call(wire.noop)
        assert len(case.sent()) == sent

    play(main)


@pytest.mark.parametrize(("raw", "held", "unreported"), [(0, 0, False), (1, 0, True), (0, 1, False), (1, 1, True)])
def test_which_permits_make_the_end_unheard(raw: int, held: int, unreported: bool) -> None:
    async def main(case: Case) -> None:
        for number, mine in enumerate([False] * raw + [True] * held, 1):
            call = asyncio.ensure_future(case.link.call(wire.acquire, b"n", 2, 9))
            await turns()
            case.answer(number, 2, one(2))
            assert await call == 2
            if mine:
                case.link.holds.add(Held("hold", b"n", 2))
        case.link.close("a test")
        assert case.link.loss_unreported is unreported

    play(main)


def test_a_pipeline_is_sent_whole_or_not_at_all() -> None:
    async def main(case: Case) -> None:
        with pytest.raises(ValueError, match="name must have"):
            await case.link.call_all([(wire.get, b"n"), (wire.get, b"")])
        assert (case.sent(), case.link.calls.pending) == ([], {})
        calling = asyncio.ensure_future(case.link.call_all([(wire.get, b"n"), (wire.acquire, b"n", 1, 1)]))
        await turns()
        assert [opcode for opcode, _ in case.sent()] == [1, 2]
        first, second = case.link.calls.pending
        case.answer(first, 1, one(1))
        case.answer(second, 2, b"no", 0x21)
        results = await calling
        assert (results[0], type(results[1])) == (1, NotAvailable)

    play(main)


def test_a_transport_connected_after_close_is_aborted() -> None:
    """close() came while it was connecting."""

    async def main(case: Case) -> None:
        link = TaskLink(case.loop, "there", TIMEOUT, case.ended.append, case.returned.append, calls=PermitCalls())
        link.close("a test")
        await link.gone()
        transport = Transport()
        link.connection_made(transport)
        assert transport.aborted

    play(main)
