"""Takes of several permits: the short way (_take_fast.pxd) answers and does what the general way does.

A server with limits has no short way. So one store has a limit of a counter that nobody asks for, and the other has
none; both get the same requests.
"""

from __future__ import annotations

import struct
from random import Random
from typing import Any

import pytest

from counterd.protocols.counter import wire
from counterd.protocols.counter.limits import parse_limits
from counterd.protocols.counter.wire import Opcode, Permit, Rate, Status
from kit.counters import holders_of, make_store
from kit.pump import START_NS

LIMITS = parse_limits(b'{"permits": [{"name": "nobody asks for this", "maximum": 1}]}')
NAMES = [b"a", b"eight by", b"n" * 17, b"longer than a record has room for itself", b"x" * 200]
MAXIMUM = 9


class Both:
    """Two stores with three sessions each, which have the same numbers."""

    def __init__(self, **sizes: Any) -> None:
        options = {"buckets": 200, "name_memory": 1 << 12, "posted_max": 1 << 16, "waiters": 16, **sizes}
        self.stores = [make_store(now_ns=START_NS, **options) for _ in range(2)]
        self.stores[1].load_limits(LIMITS)
        self.sessions = [[store.session(START_NS) for store in self.stores] for _ in range(3)]
        self.now_ns = START_NS

    def ask(self, number: int, request: bytes) -> wire.Response | None:
        """Asks both stores; returns the reply, if there is one. Replies and holdings must be equal."""
        self.now_ns += 1_000_000
        replies, others = (session.receive(request, self.now_ns) for session in self.sessions[number])
        assert replies == others
        for store in self.stores:
            while 0 <= store.next_deadline() <= self.now_ns:
                store.tick(self.now_ns)
                store.take_dirty()
            store.audit()
        for one, other in self.sessions:
            assert one.take_output(self.now_ns) == other.take_output(self.now_ns)
        held, held_too = ([holders_of(store, name) for name in NAMES] for store in self.stores)
        assert held == held_too
        figures, figures_too = (store.snapshot() for store in self.stores)
        assert {name for name, value in figures.items() if value != figures_too[name]} <= {"limits"}
        return next(iter(wire.ResponseParser().feed(replies)), None)


def take(
    *items: bytes, count: int = 0, weight: int = 1, key: bytes = b"", wait_ms: int = 0, more: bytes = b""
) -> bytes:
    """A Take, valid or not. count: the number of items that it states; 0: the true one."""
    head = struct.pack(">BBHIH", count or len(items), 0, weight, wait_ms, len(key))
    return wire.frame(Opcode.TAKE, 7, head + key + b"".join(items) + more)


def item(
    name: bytes, amount: int = 1, maximum: int = MAXIMUM, *, kind: int = 1, on_death: int = 0, size: int = -1
) -> bytes:
    """A permit as an item. size: the size of the name that it states; -1: the true one."""
    return struct.pack(">BBHII", kind, on_death, len(name) if size < 0 else size, amount, maximum) + name


A, B = item(NAMES[0]), item(NAMES[1])
TAKES = {
    "two": (take(A, B), Status.NO_ERROR),
    "all": (take(*map(item, NAMES)), Status.NO_ERROR),
    "several of each": (take(item(NAMES[0], 2), item(NAMES[2], 3)), Status.NO_ERROR),
    "all that there is": (take(item(NAMES[0], MAXIMUM - 1), B), Status.NO_ERROR),
    "with the longest key": (take(A, B, key=b"k" * 255), Status.NO_ERROR),
    "with the highest weight": (take(A, B, weight=1000), Status.NO_ERROR),
    "the most items": (take(*[item(b"item %d" % number) for number in range(16)]), Status.NO_ERROR),
    "a new name": (take(A, item(b"new")), Status.NO_ERROR),
    "with a rate": (wire.take(7, [Permit(NAMES[0], 1, MAXIMUM), Rate(b"r", 1, 5, 1000, 5)]), Status.NO_ERROR),
    "one too many": (take(A, item(NAMES[1], MAXIMUM)), Status.RESOURCE_NOT_AVAILABLE),
    "one too many of the first": (take(item(NAMES[0], MAXIMUM), B), Status.RESOURCE_NOT_AVAILABLE),
    "less than is held": (take(A, item(NAMES[1], 1, 1)), Status.RESOURCE_NOT_AVAILABLE),
    "one name twice": (take(A, A), Status.INVALID_ARGUMENTS),
    "the first again, as the last": (take(A, B, item(NAMES[2]), A), Status.INVALID_ARGUMENTS),
    "more items than there may be": (
        take(*[item(b"item %d" % number) for number in range(17)]), Status.INVALID_ARGUMENTS,
    ),
    "fewer items than it says": (take(A, B, count=3), Status.INVALID_ARGUMENTS),
    "more items than it says": (take(A, B, B, count=2), Status.INVALID_ARGUMENTS),
    "too high a weight": (take(A, B, weight=1001), Status.INVALID_ARGUMENTS),
    "too long a key": (take(A, B, key=b"k" * 256), Status.INVALID_ARGUMENTS),
    "nothing of one": (take(A, item(NAMES[1], 0)), Status.INVALID_ARGUMENTS),
    "nothing of one, of none": (take(A, item(NAMES[1], 0, 0)), Status.INVALID_ARGUMENTS),
    "more than the maximum": (take(A, item(NAMES[1], 2, 1)), Status.INVALID_ARGUMENTS),
    "no name": (take(A, item(b"")), Status.INVALID_ARGUMENTS),
    "a longer name than there is": (take(A, item(NAMES[1], size=9)), Status.INVALID_ARGUMENTS),
    "a shorter name than there is": (take(A, item(NAMES[1], size=7)), Status.INVALID_ARGUMENTS),
    "a byte more": (take(A, B, more=b"\0"), Status.INVALID_ARGUMENTS),
    "part of an item more": (take(A, B, count=3, more=B[:11]), Status.INVALID_ARGUMENTS),
    "another kind": (take(A, item(NAMES[1], kind=9)), Status.INVALID_ARGUMENTS),
    "what is to be done after a death": (take(A, item(NAMES[1], on_death=1)), Status.INVALID_ARGUMENTS),
    "a key that is longer than all": (
        wire.frame(Opcode.TAKE, 7, struct.pack(">BBHIH", 2, 0, 1, 0, 200) + b"k" * 20), Status.INVALID_ARGUMENTS,
    ),
}  # fmt: skip


@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize(("request_", "status"), TAKES.values(), ids=TAKES.keys())
def test_takes_of_held_counters(request_: bytes, status: Status, own: bool) -> None:
    """The same connection holds some permits of them, or another one."""
    both = Both()
    for name in NAMES:
        both.ask(0, wire.acquire(1, name, 1, MAXIMUM))
    reply = both.ask(0 if own else 1, request_)
    assert reply is not None
    assert reply.status == status
    if own and status == Status.NO_ERROR:
        assert wire.decode_grant(reply.body).number == 1


def test_a_take_of_permits_that_others_wait_for() -> None:
    both = Both()
    both.ask(0, take(A, B))
    assert both.ask(1, take(item(NAMES[0], MAXIMUM), B, wait_ms=1000)) is None
    reply = both.ask(2, take(A, B))
    assert reply is not None
    assert reply.status == Status.RESOURCE_NOT_AVAILABLE
    both.ask(0, wire.release(2, NAMES[0], 1))
    assert [holders_of(store, NAMES[0])[0][1] for store in both.stores] == [MAXIMUM] * 2


@pytest.mark.parametrize(("holdings", "status"), [(3, Status.OUT_OF_MEMORY), (4, Status.NO_ERROR)])
def test_takes_without_room_for_holdings(holdings: int, status: Status) -> None:
    both = Both(holdings=holdings)
    both.ask(0, wire.acquire(1, NAMES[0], 1, MAXIMUM))
    both.ask(1, wire.acquire(1, NAMES[1], 1, MAXIMUM))
    reply = both.ask(1, take(A, B, item(NAMES[2]))) if holdings == 4 else both.ask(2, take(A, B))
    assert reply is not None
    assert reply.status == status


def test_takes_during_a_drain() -> None:
    both = Both()
    both.ask(0, take(A, B))
    for store in both.stores:
        store.begin_drain()
    reply = both.ask(0, take(A, B))
    assert reply is not None
    assert reply.status == Status.RESOURCE_NOT_AVAILABLE


def test_takes_of_names_whose_records_have_the_same_bit() -> None:
    """Record n and record n + 64 are not the same."""
    both = Both(holdings=200)
    names = [b"number %d" % number for number in range(130)]
    for name in names:
        both.ask(0, wire.acquire(1, name, 1, MAXIMUM))
    for first in (0, 1, 64):
        reply = both.ask(1, take(item(names[first]), item(names[first + 64]), item(names[first + 1])))
        assert reply is not None
        assert reply.status == Status.NO_ERROR


@pytest.mark.parametrize("seed", range(20))
def test_random_takes(seed: int) -> None:
    rng, both = Random(seed), Both(holdings=24)
    held: list[list[bytes]] = [[], [], []]
    for _ in range(80):
        number = rng.randrange(3)
        if held[number] and rng.random() < 0.3:
            both.ask(number, wire.release(3, held[number].pop(), 1))
            continue
        names = [rng.choice(NAMES) for _ in range(rng.randint(2, 4))]
        reply = both.ask(number, take(*(item(name, 1, rng.randint(1, 6)) for name in names)))
        if reply is not None and reply.status == Status.NO_ERROR:
            held[number] += names
