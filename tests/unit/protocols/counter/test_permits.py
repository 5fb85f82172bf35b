"""Takes of permits alone, which are granted in loops of their own, have the replies that the general way gives."""

from __future__ import annotations

import json
import random

import pytest

from counterd.protocols.counter import wire
from counterd.protocols.counter.limits import parse_limits
from counterd.protocols.counter.wire import Grant, Permit, Status
from kit.machine import examples
from kit.takes import Desk, Taker

NAMES = (b"a", b"b", b"eight by", b"sixteen bytes go", b"n" * 36, b"n" * 37, b"m" * 200)
SIZES = {"buckets": 8, "holdings": 12, "holdings_per_connection": 5, "name_memory": 1 << 12, "waiters": 8}


def desks() -> tuple[Desk, Desk]:
    """Two desks. The second one has a limit that applies to no name here, so it decides every Take the general way."""
    short, general = Desk(**SIZES), Desk(**SIZES)
    general.store.load_limits(parse_limits(json.dumps({"permits": [{"name": "of nobody", "maximum": 1}]})))
    return short, general


def random_take(draw: random.Random) -> tuple[Permit, ...]:
    """Two to four items. In one of eight Takes an item can be there twice."""
    count = draw.choice((2, 2, 3, 4))
    names = draw.choices(NAMES, k=count) if draw.randrange(8) == 0 else draw.sample(NAMES, count)
    maximum = draw.choice((2, 3, 9))
    return tuple(Permit(name, draw.randint(1, min(3, maximum)), maximum) for name in names)


def step(draw: random.Random, pairs: list[tuple[Taker, Taker]]) -> None:
    """Lets both takers of a pair do the same."""
    both = draw.choice(pairs)
    chance = draw.random()
    name, amount = draw.choice(NAMES), draw.randint(1, 3)
    items, wait_ms = random_take(draw), draw.choice((0, 0, 50))
    for taker in both:
        if chance < 0.6:
            taker.take(*items, wait_ms=wait_ms)
        elif chance < 0.75:
            taker.acquire(name, amount, 9)
        else:
            taker.release(name, amount)


@pytest.mark.parametrize("block", range(4))
def test_replies_and_figures_are_those_of_the_general_way(block: int) -> None:
    replies: set[object] = set()
    for seed in range(examples(30)):
        draw = random.Random(1000 * block + seed)
        short, general = desks()
        pairs = [(short.taker(), general.taker()) for _ in range(3)]
        for number in range(80):
            step(draw, pairs)
            if number % 10 == 9:
                short.wait(20)
                general.wait(20)
            for one, other in pairs:
                assert one.answers == other.answers
        found = [reply for one, _ in pairs for reply in one.answers.takes.values()]
        replies |= {reply if isinstance(reply, int) else type(reply) for reply in found}
        figures, expected = short.store.snapshot(), general.store.snapshot()
        assert figures == expected
        for one, other in pairs:
            one.close()
            other.close()
        assert short.store.snapshot()["busy"] == 0
    assert {Grant, Status.INVALID_ARGUMENTS, Status.OUT_OF_MEMORY} <= replies


def invalid() -> list[bytes]:
    good = wire.take(1, [Permit(b"name", 2, 3), Permit(b"other", 1, 3)], 5, key=b"key")[12:]
    return [
        *(good[:size] for size in range(len(good))),
        good + b"\0",
        b"\3" + good[1:],
        b"\x11" + good[1:],
        good[:2] + (1001).to_bytes(2, "big") + good[4:],
        good[:8] + (256).to_bytes(2, "big") + bytes(256) + good[13:],
        good.replace(b"\0\0\0\2\0\0\0\3", b"\0\0\0\4\0\0\0\3"),
        good.replace(b"\0\0\0\1\0\0\0\3", b"\0\0\0\0\0\0\0\3"),
        good.replace(b"\0\0\0\1\0\0\0\3", b"\0\0\0\0\0\0\0\0"),
        good.replace(b"\1\0\0\5", b"\1\1\0\5"),
        good.replace(b"\1\0\0\5", b"\0\0\0\5"),
        good.replace(b"\1\0\0\5", b"\1\0\0\0"),
        good.replace(b"\1\0\0\5", b"\1\0\0\0")[:-5],
    ]


@pytest.mark.parametrize("body", invalid())
def test_what_no_take_of_permits_can_be(body: bytes) -> None:
    desk = Desk()
    (one,) = desk.some(1)
    for name in (b"name", b"other"):  # so that both have records
        assert one.acquire(name, 1, 9) == Status.NO_ERROR
    one.send(wire.frame(wire.Opcode.TAKE, 7, body))
    assert one.of(7) == Status.INVALID_ARGUMENTS
    assert desk.store.snapshot()["holdings"] == 2


def test_an_item_twice_is_refused_whatever_its_place() -> None:
    (one,) = Desk().some(1)
    for name in (b"a", b"b", b"c"):
        assert one.acquire(name, 1, 9) == Status.NO_ERROR
    for names in (b"aab", b"aba", b"baa"):
        items = [Permit(bytes([name]), 1, 9) for name in names]
        assert one.of(one.take(*items)) == Status.INVALID_ARGUMENTS
    assert one.release(b"a", 2) == Status.NOT_ACQUIRED


def test_what_somebody_waits_for_is_not_there_for_a_take_of_several() -> None:
    desk = Desk()
    one, other, third = desk.some(3)
    assert one.acquire(b"a", 2, 3) == Status.NO_ERROR
    assert one.acquire(b"b", 1, 3) == Status.NO_ERROR
    waiting = other.take(Permit(b"a", 2, 3), wait_ms=1000)
    assert not third.has(third.take(Permit(b"a", 1, 3), Permit(b"b", 1, 3)))
    assert one.release(b"a", 2) == Status.NO_ERROR
    desk.wait(1)
    assert other.has(waiting)
    assert third.has(third.take(Permit(b"a", 1, 3), Permit(b"b", 1, 3)))


def test_a_drain_grants_no_permits() -> None:
    desk = Desk()
    (one,) = desk.some(1)
    assert one.has(one.take(Permit(b"a", 1, 9), Permit(b"b", 1, 9)))
    desk.store.begin_drain()
    assert not one.has(one.take(Permit(b"a", 1, 9), Permit(b"b", 1, 9)))
