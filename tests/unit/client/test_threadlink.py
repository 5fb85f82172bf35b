"""One connection that threads share: a pair of sockets, of which the test has the server's end and sends every byte."""

from __future__ import annotations

import os
import signal
import socket
import threading
from typing import TYPE_CHECKING, Any

import pytest

from counterd.client import _threadlink
from counterd.client._connection import DeadlinePassed
from counterd.client._holding import Held
from counterd.client._steps import TAKE, drive
from counterd.client._threadlink import ThreadLink
from counterd.client.counter import _permits
from counterd.client.counter._commands import _acquiring
from counterd.client.counter._permits import PermitCalls
from counterd.errors import ConnectionLost, NotAvailable, ProtocolError, Timeout
from counterd.protocols.counter import wire
from counterd.protocols.counter.wire import Opcode
from kit.daemon import wait_until
from kit.machine import PATIENCE
from kit.scripted.counter import responded

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

ONE = b"\0\0\0\1"
HOLD = Held("hold", b"a", 2)


class Pair:
    """A link, and the server's end of its connection."""

    def __init__(self) -> None:
        near, self.server = socket.socketpair()
        near.setblocking(False)
        self.server.settimeout(PATIENCE)
        self.ended: list[ThreadLink] = []
        self.near = near
        self.link = ThreadLink(near, "there", PATIENCE, self.ended.append, lambda _: None, calls=PermitCalls())

    def asked(self, *frames: bytes) -> None:
        """Checks that exactly these requests arrived."""
        assert self.server.recv(65536) == b"".join(frames)

    def says(self, *answers: bytes) -> None:
        self.server.sendall(b"".join(answers))


def acquire(pair: Pair, request: tuple[Any, ...], held: Held = HOLD) -> None:
    """Makes a call as a hold does."""
    drive(_acquiring(pair.link, held, request), {TAKE: lambda link, asked, granted: link.call(*asked, granted=granted)})


@pytest.fixture
def pair() -> Iterator[Pair]:
    made = Pair()
    yield made
    made.link.close()
    made.near.close()
    made.server.close()


class Caller:
    """A thread that makes a call; what it returned or raised."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self.result: Any = None
        self._call = lambda: function(*arguments)
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        try:
            self.result = self._call()
        except Exception as error:  # noqa: BLE001 - to be looked at
            self.result = error

    def ends(self) -> Any:
        self._thread.join(PATIENCE)
        assert not self._thread.is_alive()
        return self.result


def reading_and_waiting(pair: Pair, *requests: tuple[Any, ...]) -> list[Caller]:
    """Threads that make these calls: the first reads, the others wait for it, in order."""
    callers = [Caller(pair.link.call, *requests[0])]
    wait_until(lambda: pair.link._reading, "it reads")
    for count, request in enumerate(requests[1:], 1):
        callers.append(Caller(pair.link.call, *request))
        wait_until(lambda count=count: len(pair.link._waiting) == count, "it waits")
    return callers


def test_a_call_gets_its_answer(pair: Pair) -> None:
    pair.says(responded(1, 1, ONE))
    assert pair.link.call(wire.get, b"a") == 1
    pair.says(responded(2, 2, b"no", 0x21))
    with pytest.raises(NotAvailable, match=r"^no"):
        pair.link.call(wire.acquire, b"a", 1, 2)
    pair.asked(wire.get(1, b"a"), wire.acquire(2, b"a", 1, 2))
    assert pair.link.calls.answered


def test_several_calls_with_one_write(pair: Pair) -> None:
    pair.says(responded(0, 2), responded(1, 1, ONE))
    assert pair.link.call_all([(wire.get, b"a"), (wire.noop,)]) == [1, None]


def test_invalid_requests_are_neither_sent_nor_pending(pair: Pair) -> None:
    with pytest.raises(ValueError, match=r"^name"):
        pair.link.call_all([(wire.acquire, b"a", 1, 1), (wire.get, b"")])
    pair.says(responded(0, pair.link.calls._opaque + 1))
    pair.link.call(wire.noop)
    pair.asked(wire.noop(pair.link.calls._opaque))


# ---- who reads ------------------------------------------------------------------------------------------------------


def test_the_reading_thread_hands_answers_to_waiting_threads(pair: Pair) -> None:
    reader, *others = reading_and_waiting(pair, (wire.get, b"a"), (wire.get, b"b"), (wire.get, b"c"))
    pair.says(responded(1, 3, b"\0\0\0\3"))
    assert others[1].ends() == 3
    pair.says(responded(1, 2, b"\0\0\0\2"))
    assert others[0].ends() == 2
    pair.says(responded(1, 1, ONE))
    assert reader.ends() == 1


def test_a_listener_that_times_out_is_removed(pair: Pair) -> None:
    (reader,) = reading_and_waiting(pair, (wire.noop,))
    for _ in range(3):
        assert Caller(pair.link.listen, 0.01).ends() is False
        assert not pair.link._waiting
        assert pair.link.calls.listeners == []
    pair.says(responded(0, 1))
    assert reader.ends() is None


def test_answered_waiters_are_removed(pair: Pair) -> None:
    """However long one thread reads for the others."""
    (reader,) = reading_and_waiting(pair, (wire.get, b"a"))
    for number in range(2, 6):
        caller = Caller(pair.link.call, wire.get, b"b")
        wait_until(lambda: pair.link._waiting, "it waits")
        assert len(pair.link._waiting) == 1
        pair.says(responded(1, number, ONE))
        assert caller.ends() == 1
    pair.says(responded(1, 1, ONE))
    assert reader.ends() == 1


def test_another_thread_reads_when_the_reader_has_its_answer(pair: Pair) -> None:
    callers = reading_and_waiting(pair, (wire.get, b"a"), (wire.get, b"b"), (wire.get, b"c"))
    for number, caller in enumerate(callers, 1):
        pair.says(responded(1, number, ONE))
        assert caller.ends() == 1
    assert not pair.link._reading


def test_another_thread_reads_when_the_reader_times_out(pair: Pair) -> None:
    pair.link._timeout = 0.1
    reader = Caller(pair.link.call, wire.noop)
    wait_until(lambda: pair.link._reading, "it reads")
    pair.link._timeout = PATIENCE
    other = Caller(pair.link.call, wire.get, b"a")
    assert isinstance(reader.ends(), Timeout)
    pair.says(responded(0, 1), responded(1, 2, ONE))  # the late one is dropped
    assert other.ends() == 1
    assert pair.link.closed == ""


def test_a_waiter_that_timed_out_does_not_become_the_reader(pair: Pair) -> None:
    reader, other = reading_and_waiting(pair, (wire.noop,), (wire.noop,))
    pair.link._timeout = 0.01
    late = Caller(pair.link.call, wire.noop)
    assert isinstance(late.ends(), Timeout)
    pair.says(responded(0, 1))
    reader.ends()
    pair.says(responded(0, 2), responded(0, 3))
    assert other.ends() is None


def test_an_interrupted_waiter_does_not_become_the_reader(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """The time to settle its call is over when the reader has its answer: another thread reads."""
    monkeypatch.setattr(_threadlink, "SETTLE_S", 0.01)
    (reader,) = reading_and_waiting(pair, (wire.noop,))
    call, acquire = _threadlink.ThreadCall(), (wire.acquire, b"a", 1, 1)
    pair.link._begin([acquire], [call], None)
    pair.link._give_up([call], _threadlink.SETTLE_S)
    other = Caller(pair.link.call, wire.noop)
    wait_until(lambda: len(pair.link._waiting) == 1, "it waits")
    pair.says(responded(0, 1))
    reader.ends()
    pair.says(responded(0, 3))
    assert other.ends() is None


def test_waiters_fail_if_the_reader_is_interrupted_while_it_settles_their_calls(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such a call is no longer pending and not settled either, so it would wait for its whole timeout."""

    class Signal(BaseException):
        pass

    def feed(data: bytes) -> None:
        pair.link.calls.pending.clear()
        raise Signal(data)

    monkeypatch.setattr(pair.link.calls, "feed", feed)

    def interrupted() -> bool:
        with pytest.raises(Signal):
            pair.link.call(wire.get, b"a")
        return True

    reader = Caller(interrupted)
    wait_until(lambda: pair.link._reading, "it reads")
    waiter = Caller(pair.link.call, wire.get, b"b")
    wait_until(lambda: len(pair.link._waiting) == 1, "it waits")
    pair.says(responded(1, 2, ONE))
    assert reader.ends() is True
    assert isinstance(waiter.ends(), ConnectionLost)


def test_an_answer_for_a_thread_interrupted_as_it_begins_to_wait(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before that thread has abandoned its call; else the reading thread would fail with an error of the other's
    lock."""
    (reader,) = reading_and_waiting(pair, (wire.noop,))

    class Interrupted(BaseException):
        pass

    class Lock:
        def acquire(self) -> None:
            raise Interrupted

        def release(self) -> None:
            raise RuntimeError("release unlocked lock")

    call = _threadlink.ThreadCall()
    pair.link._begin([(wire.noop,)], [call])
    with monkeypatch.context() as patch:
        patch.setattr(_threadlink.threading, "Lock", Lock)
        with pytest.raises(Interrupted):
            pair.link._wait(call, 0)
    pair.says(responded(0, 2), responded(0, 1))
    assert reader.ends() is None
    assert call.done


def test_the_end_of_the_connection_fails_all_calls(pair: Pair) -> None:
    callers = reading_and_waiting(pair, *[(wire.noop,)] * 3)
    pair.server.shutdown(socket.SHUT_WR)
    errors = [caller.ends() for caller in callers]
    assert [str(error) for error in errors] == [
        "there closed the connection: does this address serve the counter protocol?"
    ] * 3
    assert {type(error) for error in errors} == {ConnectionLost}
    assert len(set(map(id, errors))) == 3
    assert pair.ended == [pair.link]
    assert pair.near.fileno() == -1


def test_a_protocol_error_fails_all_calls(pair: Pair) -> None:
    callers = reading_and_waiting(pair, *[(wire.noop,)] * 2)
    pair.says(b"what")
    assert [type(caller.ends()) for caller in callers] == [ProtocolError] * 2


def test_closing_wakes_the_reader_and_the_waiters(pair: Pair) -> None:
    callers = reading_and_waiting(pair, *[(wire.noop,)] * 3)
    pair.link.close()
    assert ["close() was called" in str(caller.ends()) for caller in callers] == [True] * 3
    assert pair.near.fileno() == -1
    assert pair.server.recv(65536) == b"".join(wire.noop(number) for number in (1, 2, 3))
    assert pair.server.recv(1) == b""


# ---- what does not go out -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("threads", [1, 4])
def test_a_server_that_reads_only_after_its_output_was_read(pair: Pair, threads: int) -> None:
    """It answers each request with a lot, and reads the next one when that has gone out."""
    name = b"x" * 30000
    body = b"\0\0\0\1\0\0\0\2" + len(name).to_bytes(2, "big") + name
    requests = [(wire.get, name), (wire.dump,)] * 20

    def serve() -> None:
        parsed = b""
        answered = 0
        while answered < threads * len(requests):
            parsed += pair.server.recv(1 << 20)
            while len(parsed) >= 12 and len(parsed) >= (size := 12 + int.from_bytes(parsed[4:8], "big")):
                opcode, opaque = parsed[1], int.from_bytes(parsed[8:12], "big")
                bodies = [body] * 10 + [b""] if opcode == 0x11 else [ONE]
                pair.says(*(responded(opcode, opaque, each) for each in bodies))
                parsed = parsed[size:]
                answered += 1

    server = Caller(serve)
    callers = [Caller(pair.link.call_all, requests) for _ in range(threads)]
    for caller in callers:
        results = caller.ends()
        assert results[0::2] == [1] * 20
        assert [len(result) for result in results[1::2]] == [10] * 20
    server.ends()
    assert not pair.link._pushing
    assert not pair.link._reading


def test_a_server_that_reads_nothing_is_disconnected(pair: Pair) -> None:
    pair.link._timeout = 0.1
    with pytest.raises(Timeout):
        pair.link.call_all([(wire.get, b"x" * 60000)] * 100)
    assert pair.link.closed == "the server accepts no more requests"


def test_the_end_while_threads_send(pair: Pair) -> None:
    callers = [Caller(pair.link.call_all, [(wire.get, b"x" * 60000)] * 100) for _ in range(4)]
    wait_until(lambda: len(pair.link._pushing) == 4, "all send")
    pair.server.close()
    assert {type(caller.ends()) for caller in callers} == {ConnectionLost}
    assert pair.near.fileno() == -1


def test_too_many_unanswered_calls_end_the_connection(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_threadlink, "UNANSWERED_MAX", 2)
    pair.link._timeout = 0.001
    for _ in range(3):
        assert pair.link.closed == ""
        with pytest.raises(Timeout):
            pair.link.call(wire.noop)
    assert pair.link.closed == "2 calls were not answered"


def test_calls_that_still_wait_do_not_count_as_unanswered(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_threadlink, "UNANSWERED_MAX", 2)
    callers = reading_and_waiting(pair, *[(wire.noop,)] * 3)
    pair.link._timeout = 0.001
    with pytest.raises(Timeout):
        pair.link.call(wire.noop)
    pair.says(*[responded(0, opaque) for opaque in (1, 2, 3)])
    assert [caller.ends() for caller in callers] == [None] * 3


def test_a_signal_handler_cannot_call_while_its_thread_reads(pair: Pair) -> None:
    """Only that thread could receive the answer."""
    raised: list[Exception] = []

    def handle(*_: object) -> None:
        try:
            pair.link.call(wire.noop)
        except RuntimeError as error:
            raised.append(error)
        pair.says(responded(0, 1))

    before = signal.signal(signal.SIGALRM, handle)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        pair.link.call(wire.noop)
    finally:
        signal.signal(signal.SIGALRM, before)
    assert "signal handler" in str(raised[0])
    pair.asked(wire.noop(1))


@pytest.mark.parametrize("step", ["add_all", "feed"])
def test_a_signal_handler_may_close_during_a_call(pair: Pair, monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    """The call has the lock already, in the same thread; it ends at once, either way."""
    if step == "add_all":
        monkeypatch.setattr(pair.link.calls, step, closing(pair, pair.link.calls.add_all))
        with pytest.raises(ConnectionLost, match=r"close\(\) was called"):
            pair.link.call(wire.noop)
    else:
        monkeypatch.setitem(_permits._DECODERS, Opcode.NOOP, closing(pair, lambda _: None))
        pair.says(responded(0, 1))
        pair.link.call(wire.noop)
    assert pair.ended == [pair.link]


def closing(pair: Pair, function: Callable[..., Any]) -> Callable[..., Any]:
    def closes(*arguments: Any) -> Any:
        pair.link.close()
        return function(*arguments)

    return closes


# ---- who holds what -------------------------------------------------------------------------------------------------


def test_a_hold_has_its_permits_and_gives_them_back(pair: Pair) -> None:
    pair.says(responded(2, 1, b"\0\0\0\2"))
    acquire(pair, (wire.acquire, b"a", 2, 3))
    assert pair.link.holds == {HOLD}
    assert pair.link.calls.held == 2
    pair.says(responded(3, 2))
    pair.link.release([HOLD])
    assert pair.link.holds == set()
    assert pair.link.calls.held == 0
    pair.link.release([HOLD])  # nothing is there, so nothing is asked
    pair.link.disown(HOLD)
    pair.asked(wire.acquire(1, b"a", 2, 3), wire.release(2, b"a", 2))


def test_a_hold_has_its_permits_before_its_thread_continues() -> None:
    """Else the thread could leave the block at once, and would find nothing to give back."""
    had: list[bool] = []
    call = _threadlink.ThreadCall(lambda _: had.append(call.done))
    call.settle(1, None)
    assert had == [False]
    assert call.done


def test_permits_of_a_disowned_hold_are_given_back_without_a_caller(pair: Pair) -> None:
    pair.says(responded(2, 1, b"\0\0\0\2"))
    acquire(pair, (wire.acquire, b"a", 2, 3))
    pair.link.disown(HOLD)
    pair.asked(wire.acquire(1, b"a", 2, 3), wire.release(2, b"a", 2))
    pair.says(responded(3, 2, b"no", 0x22), responded(0, 3))  # and a refusal hurts nobody
    pair.link.call(wire.noop)


@pytest.mark.parametrize(("reason", "raised"), [(DeadlinePassed, Timeout), (KeyboardInterrupt, KeyboardInterrupt)])
@pytest.mark.parametrize("hold", [True, False])
def test_a_grant_read_during_an_interrupt_is_given_back_once(
    pair: Pair, reason: type[BaseException], raised: type[BaseException], hold: bool
) -> None:
    """The answer was read, but the caller does not get it."""
    wait = pair.link._wait

    def too_late(call: Any, deadline: float) -> None:
        wait(call, deadline)
        raise reason

    pair.link._wait = too_late  # type: ignore[method-assign]
    pair.says(responded(2, 1, b"\0\0\0\2"))
    with pytest.raises(raised):
        acquire(pair, (wire.acquire, b"a", 2, 3)) if hold else pair.link.call(wire.acquire, b"a", 2, 3)
    pair.asked(wire.acquire(1, b"a", 2, 3), wire.release(2, b"a", 2))
    assert pair.link.holds == set()
    assert pair.link.calls.held == 0


def test_a_refused_hold_has_nothing(pair: Pair) -> None:
    pair.says(responded(2, 1, b"no", 0x21))
    with pytest.raises(NotAvailable):
        acquire(pair, (wire.acquire, b"a", 2, 3))
    assert pair.link.holds == set()


@pytest.mark.parametrize(("raw", "released", "unreported"), [(0, 0, False), (1, 0, True), (1, 1, False), (2, 1, True)])
def test_which_permits_make_the_end_unheard(pair: Pair, raw: int, released: int, unreported: bool) -> None:
    """Holds report their own loss, and permits whose release is under way are not missed, answered or not."""
    pair.says(responded(2, 1, b"\0\0\0\2"))
    acquire(pair, (wire.acquire, b"a", 2, 9))
    if raw:
        pair.says(responded(2, 2, raw.to_bytes(4, "big")))
        pair.link.call(wire.acquire, b"a", raw, 9)
    if released:
        Caller(pair.link.call, wire.release, b"a", released)
        wait_until(lambda: pair.link._reading, "it is under way")
    pair.server.close()
    wait_until(lambda: not pair.link.is_alive(), "the end is seen")
    assert pair.link.loss_unreported is unreported


def test_a_timeout_keeps_a_connection_that_holds_permits(pair: Pair) -> None:
    """A late grant is given back by whichever thread reads next."""
    one, another = Held("hold", b"a", 1), Held("another", b"b", 3)
    pair.says(responded(2, 1, ONE))
    acquire(pair, (wire.acquire, b"a", 1, 9), one)
    pair.link._timeout = 0.001
    with pytest.raises(Timeout, match=r"^there did not answer within 0.001 s$"):
        acquire(pair, (wire.acquire, b"b", 3, 9), another)
    pair.link._timeout = PATIENCE
    pair.says(responded(2, 2, b"\0\0\0\3"), responded(0, 3))
    pair.link.call(wire.noop)
    assert pair.link.holds == {one}
    pair.asked(*[wire.acquire(1, b"a", 1, 9), wire.acquire(2, b"b", 3, 9), wire.noop(3), wire.release(4, b"b", 3)])


# ---- the end --------------------------------------------------------------------------------------------------------


def test_is_alive_notices_the_end(pair: Pair) -> None:
    assert pair.link.is_alive()
    pair.says(b"unread")
    assert pair.link.is_alive()
    pair.server.shutdown(socket.SHUT_WR)
    assert not pair.link.is_alive()
    assert pair.near.fileno() == -1
    with pytest.raises(ConnectionLost, match="lost the connection to there: the server closed the connection"):
        pair.link.call(wire.noop)
    assert pair.ended == [pair.link]


def test_a_forked_child_closes_its_copy_without_shutting_down(pair: Pair) -> None:
    with pair.near.dup():  # the parent's
        with pair.link._lock:
            pair.link.after_fork()
        with pytest.raises(ConnectionLost, match="the process forked"):
            pair.link.call(wire.noop)
        pair.link.disown(HOLD)
        pair.link.close()
        pair.server.setblocking(False)
        with pytest.raises(BlockingIOError):
            pair.server.recv(1)
    assert pair.server.recv(1) == b""


def test_watch_returns_when_woken_or_lost(pair: Pair) -> None:
    wake = os.eventfd(1)
    try:
        pair.link.watch(wake, PATIENCE)
        assert not pair.ended
        os.eventfd_read(wake)
        pair.link.watch(wake, 0.001)
        assert not pair.ended
        watching = Caller(pair.link.watch, wake, PATIENCE)
        wait_until(lambda: pair.link._watched, "it watches")
        pair.server.shutdown(socket.SHUT_WR)
        watching.ends()
        assert pair.ended == [pair.link]
        assert pair.near.fileno() == -1
        pair.link.watch(wake, 0.001)  # of a connection that has ended there is nothing to see
    finally:
        os.close(wake)


def test_closing_wakes_the_watching_thread(pair: Pair) -> None:
    wake = os.eventfd(0)
    try:
        watching = Caller(pair.link.watch, wake, PATIENCE)
        wait_until(lambda: pair.link._watched, "it watches")
        pair.link.close()
        watching.ends()
        assert pair.near.fileno() == -1
    finally:
        os.close(wake)
