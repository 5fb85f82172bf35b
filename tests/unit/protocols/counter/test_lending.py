"""Permits that another protocol's store takes: they are held and waited for like those of a connection."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from counterd.protocols import counter
from counterd.protocols.counter import PROTOCOL, wire
from counterd.protocols.counter.limits import parse_limits
from counterd.protocols.counter.wire import Permit, Status
from kit.takes import Desk

if TYPE_CHECKING:
    from counterd.contract import Lender

FULL = Status.RESOURCE_NOT_AVAILABLE


class Borrowing:
    """The borrowing side. ended: (ticket, whether a permit was granted). woken: how often the store was woken."""

    def __init__(self, desk: Desk) -> None:
        self.desk = desk
        self.ended: list[tuple[int, bool]] = []
        self.woken = 0
        self.lender: Lender = counter.lend(desk.store, lambda *outcome: self.ended.append(outcome), self.wake)

    def wake(self) -> None:
        self.woken += 1
        self.desk.store.next_deadline()  # as the driver does, which must be possible

    def acquire(self, name: bytes = b"p", maximum: int = 1) -> bool:
        return self.lender.acquire(name, maximum, self.desk.pump.now_ns)

    def release(self, name: bytes = b"p") -> None:
        self.lender.release(name, self.desk.pump.now_ns)

    def enqueue(self, ticket: int, name: bytes = b"p", maximum: int = 1) -> int:
        return self.lender.enqueue(name, maximum, ticket, self.desk.pump.now_ns)

    def outcomes(self) -> list[tuple[int, bool]]:
        """The outcomes of the waits that have ended by now."""
        self.desk.pump.settle()
        ended, self.ended = self.ended, []
        return ended


@pytest.fixture
def desk() -> Desk:
    return Desk()


@pytest.fixture
def other(desk: Desk) -> Borrowing:
    return Borrowing(desk)


def test_the_borrower_and_the_clients_share_the_permits(desk: Desk, other: Borrowing) -> None:
    client = desk.taker()
    assert other.acquire(maximum=2)
    assert client.acquire(b"p", 1, 2) == Status.NO_ERROR
    assert not other.acquire(maximum=2)
    assert client.acquire(b"p", 1, 2) == FULL
    assert client.status(wire.get(0, b"p")) == Status.NO_ERROR
    assert wire.decode_consumption(client.answers.others[-1].body) == 2
    client.close()
    assert other.acquire(maximum=2)
    for _ in range(2):
        other.release()
    desk.pump.settle()
    assert desk.store.snapshot()["busy"] == 0


def test_a_release_of_the_borrower_wakes_the_store_for_waiters(desk: Desk, other: Borrowing) -> None:
    client = desk.taker()
    assert other.acquire()
    take = client.take(Permit(b"p", 1, 1), wait_ms=1000)
    woken = other.woken
    other.release()
    assert other.woken == woken + 1
    desk.pump.settle()
    assert client.has(take)
    assert not other.acquire()


def test_the_borrower_waits_in_the_queue_of_the_clients(desk: Desk, other: Borrowing) -> None:
    """As one key among others: it gets a permit in its turn, and not before those that waited earlier."""
    clients = desk.some(3)
    assert clients[0].acquire(b"p") == Status.NO_ERROR
    takes = [client.take(Permit(b"p", 1, 1), wait_ms=1000) for client in clients[1:2]]
    assert other.enqueue(7)
    takes.append(clients[2].take(Permit(b"p", 1, 1), wait_ms=1000))
    assert not other.acquire(), "what is given back belongs to those that wait"
    clients[0].release(b"p")
    assert (clients[1].has(takes[0]), other.outcomes()) == (True, [])
    clients[1].release(b"p")
    assert (other.outcomes(), clients[2].has(takes[1])) == ([(7, True)], False)
    other.release()
    assert (other.outcomes(), clients[2].has(takes[1])) == ([], True)


def test_the_borrower_and_a_client_that_always_waits_get_equal_shares(desk: Desk, other: Borrowing) -> None:
    client = desk.taker()
    got = {"client": 0, "other": 0}
    assert other.acquire()
    take = client.take(Permit(b"p", 1, 1), wait_ms=60_000)
    other.enqueue(1)
    other.release()
    for _ in range(100):
        if other.outcomes():
            got["other"] += 1
            other.enqueue(1)
            other.release()
        elif client.has(take):
            got["client"] += 1
            take = client.take(Permit(b"p", 1, 1), wait_ms=60_000)
            client.release(b"p")
    assert got == {"client": 50, "other": 50}


def test_a_wait_may_change_its_maximum_and_keep_its_place(desk: Desk, other: Borrowing) -> None:
    client, late = desk.some(2)
    client.acquire(b"p", 1, 5)
    place = other.enqueue(3)
    take = late.take(Permit(b"p", 1, 2), wait_ms=1000)
    assert not late.has(take), "the first stays first"
    other.lender.amend(place, 2, desk.pump.now_ns)
    assert other.outcomes() == [(3, True)]
    client.release(b"p")
    assert late.has(take)


def test_a_cancelled_wait_is_over(desk: Desk, other: Borrowing) -> None:
    client = desk.taker()
    client.acquire(b"p")
    other.lender.cancel(other.enqueue(3), desk.pump.now_ns)
    client.release(b"p")
    assert other.outcomes() == []
    assert client.acquire(b"p") == Status.NO_ERROR
    assert desk.store.snapshot()["waiters"] == 0


def test_a_draining_store_lends_nothing(desk: Desk, other: Borrowing) -> None:
    assert other.acquire()
    other.enqueue(9)
    desk.store.begin_drain()
    assert other.outcomes() == [(9, False)]
    assert (other.acquire(b"q"), other.enqueue(1)) == (False, 0)
    assert (desk.store.held(), desk.store.leases(10)) == (0, []), "the borrower's own drain waits for it"
    other.release()
    client = desk.taker()
    assert client.status(wire.get(0, b"p")) == Status.NO_ERROR


def test_at_a_stop_waits_of_the_borrower_are_refused(desk: Desk, other: Borrowing) -> None:
    assert other.acquire()
    other.enqueue(9)
    desk.store.part()
    assert other.outcomes() == [(9, False)]
    assert (other.acquire(b"q"), other.enqueue(1)) == (True, 0)


def test_the_limits_of_one_connection_do_not_apply_to_the_borrower(desk: Desk, other: Borrowing) -> None:
    client = desk.taker()
    desk.store.limit_holdings(1)
    desk.store.limit_takes(1, 60)
    assert (other.acquire(b"a"), other.acquire(b"b")) == (True, True)
    client.acquire(b"c")
    assert client.acquire(b"d") == Status.OUT_OF_MEMORY
    assert all(other.enqueue(ticket, name) for ticket, name in enumerate((b"a", b"b", b"c")))
    client.release(b"c")
    assert other.outcomes() == [(2, True)]
    desk.store.audit()


def test_the_borrower_finds_no_room_to_hold_or_wait() -> None:
    desk = Desk(holdings=1, waiters=1)
    other = Borrowing(desk)
    assert other.acquire(b"a")
    assert not other.acquire(b"b")
    assert not other.lender.retake(b"b", 1, desk.pump.now_ns)
    assert other.enqueue(1, b"b")
    assert other.enqueue(2, b"b") == 0
    assert other.outcomes() == [(1, False)], "there is a permit, and no room to hold it"


def test_the_borrower_waits_while_a_limit_is_0(desk: Desk, other: Borrowing) -> None:
    """It is not refused, so that it need not ask again. It delays no other, as nothing can be granted."""
    client, holder = desk.some(2)
    assert holder.acquire(b"p", 1, 5) == Status.NO_ERROR
    desk.store.load_limits(parse_limits(b'{"permits": [{"name": "*", "maximum": 0}]}'))
    assert not other.acquire(maximum=5)
    for ticket, name in enumerate((b"p", b"q")):
        assert other.enqueue(ticket, name, maximum=5)
    assert other.outcomes() == []
    assert client.of(client.take(Permit(b"p", 1, 5), wait_ms=1000)).most == 0
    desk.store.load_limits(parse_limits(b'{"permits": [{"name": "p", "maximum": 2}]}'))
    assert sorted(other.outcomes()) == [(0, True), (1, True)]
    waiting = client.take(Permit(b"p", 1, 5), wait_ms=1000)
    assert other.enqueue(2, maximum=5)
    desk.store.load_limits(parse_limits(b'{"permits": [{"name": "*", "maximum": 0}]}'))
    assert (other.outcomes(), client.of(waiting).most) == ([], 0), "the client is refused, the other waits on"
    desk.store.load_limits(parse_limits(b'{"permits": [{"name": "*", "maximum": 3}]}'))
    assert other.outcomes() == [(2, True)]
    desk.store.audit()


def test_the_borrower_leaves_half_of_the_queue_to_connections() -> None:
    desk = Desk(waiters=4)
    other = Borrowing(desk)
    client = desk.taker()
    names = [b"a", b"b", b"c"]
    assert [client.acquire(name) for name in names] == [Status.NO_ERROR] * 3
    assert [bool(other.enqueue(ticket, name)) for ticket, name in enumerate(names, 1)] == [True, True, False]
    take = desk.taker().take(Permit(b"a", 1, 1), wait_ms=1000)
    assert desk.store.snapshot()["waiters"] == 3, take
    desk.store.audit()


def test_retake_holds_the_permits_of_before_a_restart(desk: Desk, other: Borrowing) -> None:
    client = desk.taker()
    assert client.acquire(b"p") == Status.NO_ERROR
    assert other.lender.retake(b"p", 1, desk.pump.now_ns)
    client.release(b"p")
    assert client.acquire(b"p") == FULL
    other.release()
    assert client.acquire(b"p") == Status.NO_ERROR


def test_the_borrower_is_a_holder_but_no_connection(desk: Desk, other: Borrowing) -> None:
    figures = desk.store.snapshot()
    assert (figures["curr_connections"], figures["total_connections"]) == (0, 0)
    assert other.acquire()
    (table,) = (table for table in PROTOCOL.tables() if table.name == "holders")
    walk = table.open(desk.store, {"name": "p"})
    while not walk.step():
        pass
    assert [row[:2] for row in walk.rows()] == [(other.lender.number, 1)]
