"""No peer gets more than its share of the places for waiting Takes, and of the holdings kept for a grace time."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from counterd.protocols.counter.wire import Grant, Permit, Resumption, Shortage, Status
from kit.machine import examples
from kit.takes import Desk, Taker

FAR = (b"\x0a\0\0\1", False)
OTHER = (b"\x0a\0\0\2", False)
NEAR = (b"user 1000", True)
LONG_MS = 1 << 30


def made(remote: int = 50, local: int = 100, **sizes: int) -> Desk:
    desk = Desk(**{"waiters": 8, "holdings": 16, **sizes})
    desk.store.limit_resumptions(60)
    desk.store.limit_shares(remote, local)
    return desk


def come(desk: Desk, who: tuple[bytes, bool]) -> Taker:
    taker = desk.taker()
    taker.peer.who = who
    return taker


def wait(taker: Taker, *names: bytes) -> int:
    """Asks for permits that are all taken. Returns the opaque."""
    return taker.take(*(Permit(name, 1, 1) for name in names or (b"p",)), wait_ms=LONG_MS)


def refused(desk: Desk) -> tuple[int, int]:
    figures = desk.store.snapshot()
    return figures["waits_over_share"], figures["stays_over_share"]


def empty(desk: Desk, *holders: Taker) -> None:
    for taker in holders:
        taker.close()
    figures = desk.store.snapshot()
    assert (figures["waiters"], figures["kept"], figures["kept_holdings"]) == (0, 0, 0)
    desk.store.audit()


def test_one_peer_gets_half_of_the_places_and_another_one_the_rest() -> None:
    desk = made()
    holder = desk.taker()
    holder.acquire(b"p")
    far = [come(desk, FAR) for _ in range(6)]
    opaques = [wait(taker) for taker in far]
    assert [taker.of(opaque) for taker, opaque in zip(far, opaques, strict=True)] == [None] * 4 + [0x82] * 2
    assert refused(desk) == (2, 0)
    other = come(desk, OTHER)
    assert [other.of(wait(other)) for _ in range(5)] == [None] * 4 + [Status.OUT_OF_MEMORY]
    far[0].cancel(opaques[0])
    assert far[5].of(wait(far[5])) is None, "a place that was given back is there again"
    empty(desk, holder, other, *far)


@pytest.mark.parametrize("local", [50, 100])
def test_a_local_peer_has_a_share_of_its_own(local: int) -> None:
    desk = made(local=local)
    holder, near = desk.taker(), come(desk, NEAR)
    holder.acquire(b"p")
    count = sum(near.of(wait(near)) is None for _ in range(9))
    assert count == 8 * local // 100
    empty(desk, holder, near)


def test_further_items_of_takes_have_a_share() -> None:
    desk = made()
    holder, far, other = desk.taker(), come(desk, FAR), come(desk, OTHER)
    holder.acquire(b"p")
    assert far.of(wait(far, b"p", b"q", b"r", b"s")) is None
    assert far.of(wait(far, b"p", b"q", b"r")) == Status.OUT_OF_MEMORY
    assert far.of(wait(far, b"p", b"q")) is None
    assert far.of(wait(far, b"p", b"q")) == Status.OUT_OF_MEMORY
    assert far.of(wait(far)) is None, "it has no further item"
    assert other.of(wait(other, b"p", b"q", b"r", b"s", b"t")) is None
    empty(desk, holder, far, other)


def test_grace_times_have_a_share() -> None:
    """Half of the holdings, of which one peer elsewhere gets half: 4."""
    desk = made()
    ended = []
    for number in range(3):
        taker = come(desk, FAR)
        assert isinstance(taker.resume(50_000), Resumption)
        for name in (b"a", b"b"):
            assert taker.acquire(name + b"%d" % number) == Status.NO_ERROR
        ended.append(taker)
    for taker in ended:
        taker.close()
    assert (desk.store.snapshot()["kept_holdings"], refused(desk)) == (4, (0, 1))
    assert come(desk, OTHER).acquire(b"a2") == Status.NO_ERROR, "what found no place was given back"
    other = come(desk, OTHER)
    assert isinstance(other.resume(1000), Resumption)
    other.acquire(b"mine")
    other.close()
    assert desk.store.snapshot()["kept_holdings"] == 5
    desk.wait(50_002)
    assert desk.store.snapshot()["kept_holdings"] == 0


def test_a_resumed_connection_has_the_places_of_the_old_one() -> None:
    """The old connection's peer has none any more, and may wait elsewhere."""
    desk = made(remote=25)
    holder, one, successor = desk.taker(), come(desk, FAR), come(desk, OTHER)
    holder.acquire(b"p")
    resumption = one.resume(5000)
    assert isinstance(resumption, Resumption)
    one.acquire(b"mine")
    assert one.of(wait(one)) is None
    one.close()
    assert isinstance(successor.resume(5000, resumption.token), Resumption)
    assert [successor.of(wait(successor)) for _ in range(3)] == [None, None, Status.OUT_OF_MEMORY]
    far = come(desk, FAR)
    assert [far.of(wait(far)) for _ in range(3)] == [None, None, Status.OUT_OF_MEMORY]
    for taker in (far, successor, holder):
        taker.close()
    desk.wait(5002)
    empty(desk)


def test_a_smaller_share_ends_no_wait() -> None:
    desk = made(remote=100)
    holder, far = desk.taker(), come(desk, FAR)
    holder.acquire(b"p")
    opaques = [wait(far) for _ in range(8)]
    desk.store.limit_shares(25, 100)
    assert [far.of(opaque) for opaque in opaques] == [None] * 8
    for opaque in opaques[:6]:
        far.cancel(opaque)
    assert far.of(wait(far)) == Status.OUT_OF_MEMORY
    far.cancel(opaques[6])
    assert far.of(wait(far)) is None
    empty(desk, holder, far)


@pytest.mark.parametrize("ending", ["timeout", "drain", "grant", "limit"])
def test_the_place_of_a_wait_is_given_back_however_it_ends(ending: str) -> None:
    desk = made()
    holder, far = desk.taker(), come(desk, FAR)
    holder.acquire(b"p")
    opaques = [far.take(Permit(b"p", 1, 9 if number else 1), wait_ms=100) for number in range(4)]
    if ending == "timeout":
        desk.wait(102)
    elif ending == "drain":
        desk.store.begin_drain()
        desk.pump.settle()
    elif ending == "grant":
        holder.release(b"p")
        desk.wait(102)
    else:
        holder.close()
    desk.wait(102)
    assert all(isinstance(far.of(opaque), (Grant, Shortage)) for opaque in opaques)
    empty(desk)


@pytest.mark.parametrize("block", range(2))
def test_random_waits_and_ends_leave_no_places_in_use(block: int) -> None:
    """Each turn is audited: the audit counts anew. No peer ever has more than its share."""
    for seed in range(examples(15)):
        draw = random.Random(1000 * block + seed)
        desk = made(remote=25, waiters=16)
        peers = [FAR, OTHER, NEAR]
        takers: list[Taker] = []
        for _ in range(80):
            taker = draw.choice(takers) if takers and draw.random() < 0.8 else come(desk, draw.choice(peers))
            if taker not in takers:
                takers.append(taker)
            what = draw.randrange(6)
            if what < 3:
                wait(taker, *draw.sample([b"a", b"b", b"c"], draw.randint(1, 3)))
            elif what == 3:
                taker.resume(draw.choice((1, 1000)))
            elif what == 4:
                taker.close()
                takers.remove(taker)
            else:
                desk.wait(draw.choice((1, 500)))
            waiting = Counter(
                each.peer.who for each in takers for opaque in range(1, each._opaque + 1) if each.of(opaque) is None
            )
            assert max(waiting[FAR], waiting[OTHER]) <= 4
        for taker in takers:
            taker.close()
        desk.wait(2000)
        empty(desk)
