"""Random Takes keep their promises (takes_history.py), and keys are served as fairly as by an ideal fair queue."""

from __future__ import annotations

import itertools
import random
from fractions import Fraction

import pytest

from counterd.protocols.counter import wire
from counterd.protocols.counter.wire import Permit, Status
from kit.machine import examples
from kit.takes import MS, Desk, Taker
from property.takes_history import History

STEPS = 60


@pytest.mark.parametrize("block", range(8))
def test_promises_of_random_takes(block: int) -> None:
    for seed in range(examples(60)):
        history = History(random.Random(1000 * block + seed))
        for _ in range(STEPS):
            history.step()
        history.end()


# ---- fairness -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("weights", [(1, 1), (1, 3), (5, 2, 1), (1, 1000)])
@pytest.mark.parametrize("seed", range(3))
def test_keys_get_their_shares(weights: tuple[int, ...], seed: int) -> None:
    """While keys compete, what two of them got, each divided by its weight, differs by less than the largest request of
    each, divided likewise: as near to an ideal fair queue as requests that are served one by one can come.
    """
    draw = random.Random(seed)
    maximum = 20
    desk = Desk(waiters=4096)
    desk.store.limit_takes(0, 60)
    holder, *takers = desk.some(1 + len(weights))
    assert holder.acquire(b"p", maximum, maximum) == Status.NO_ERROR
    largest = 6
    waiting: list[dict[int, int]] = []  # of each key: its Takes, with their amounts, in order
    for number, (taker, weight) in enumerate(zip(takers, weights, strict=True)):
        amounts = [draw.randint(1, largest) for _ in range(150)]
        waiting.append(
            {
                taker.take(Permit(b"p", amount, maximum), wait_ms=1 << 30, key=b"%d" % number, weight=weight): amount
                for amount in amounts
            }
        )
    got = [Fraction(0)] * len(weights)
    held: list[tuple[Taker, int]] = [(holder, 1)] * maximum
    while True:
        taker, amount = held.pop(draw.randrange(len(held)))
        taker.release(b"p", amount)
        for number, taker in enumerate(takers):
            for opaque in [each for each in waiting[number] if taker.has(each)]:
                amount = waiting[number].pop(opaque)
                held.append((taker, amount))
                got[number] += Fraction(amount, weights[number])
        if not all(waiting):
            break
        for one, other in itertools.combinations(range(len(weights)), 2):
            bound = Fraction(largest, weights[one]) + Fraction(largest, weights[other])
            assert abs(got[one] - got[other]) <= bound


def test_a_large_request_is_served_and_does_not_hold_up_others_for_long() -> None:
    """Small ones that arrive without end do not starve it. They wait until it has its permits, and no longer."""
    maximum = 10
    desk = Desk(waiters=4096)
    large, *small = desk.some(6)
    held: list[tuple[Taker, int]] = []
    for taker in small:
        assert taker.acquire(b"p", 2, maximum) == Status.NO_ERROR
        held.append((taker, 2))
    asked = large.take(Permit(b"p", maximum, maximum), wait_ms=1 << 30)
    waiting = [(taker, taker.take(Permit(b"p", 1, maximum), wait_ms=1 << 30)) for taker in small for _ in range(20)]
    for taker, amount in held:
        assert not large.has(asked)
        assert not any(taker.has(take) for taker, take in waiting)
        taker.release(b"p", amount)
    assert large.has(asked)
    large.release(b"p", maximum)
    assert sum(taker.has(take) for taker, take in waiting) == maximum


def test_cancelling_and_wire_agree() -> None:
    """A Cancel that names the opaque of a Take of the same number of another connection does nothing."""
    desk = Desk()
    holder, one, other = desk.some(3)
    holder.acquire(b"p")
    first, second = (each.take(Permit(b"p", 1, 1), wait_ms=1000) for each in (one, other))
    assert first == second
    assert one.status(wire.cancel(0, first)) == Status.NO_ERROR
    assert other.of(second) is None


@pytest.mark.parametrize("hold_ms", [50, 5, 0])
def test_processes_that_ask_again_at_once_get_equal_shares(hold_ms: int) -> None:
    """Six share two permits, each holding one for a while and then asking again: nobody waits for longer than its turn.

    Whoever asked again and again instead got 60, 60, 1, 1, 1 and 1 grants.
    """
    desk = Desk()
    six = desk.some(6)
    asked = {taker: taker.take(Permit(b"p", 1, 2), wait_ms=1 << 30) for taker in six}
    grants = dict.fromkeys(six, 0)
    since = dict.fromkeys(six, desk.pump.now_ns)
    longest = 0
    turns = 60
    for _ in range(3 * turns):
        holding = [taker for taker in six if taker.has(asked[taker])]
        assert len(holding) == 2
        longest = max(longest, *(desk.pump.now_ns - since[taker] for taker in holding))
        desk.wait(hold_ms)
        for taker in holding:
            grants[taker] += 1
            taker.release(b"p")
            since[taker] = desk.pump.now_ns
            asked[taker] = taker.take(Permit(b"p", 1, 2), wait_ms=1 << 30)
    assert set(grants.values()) == {turns}
    assert longest <= 2 * hold_ms * MS


def test_a_key_whose_takes_give_up_gets_its_share() -> None:
    """Whoever waits for too short and asks again does not pay for what it did not get, and so is not starved.

    One permit, held for 10 ms. Forty clients of one key wait for 200 ms each, and ask again; four of another key wait
    on. When each Take that timed out was counted, the forty got 11 of the first 400 grants, and no other.
    """
    desk = Desk(waiters=64)
    waits = {b"hasty": 200, b"patient": 1 << 30}
    clients = [(taker, b"hasty") for taker in desk.some(40)] + [(taker, b"patient") for taker in desk.some(4)]

    def ask(taker: Taker, key: bytes) -> int:
        return taker.take(Permit(b"p", 1, 1), wait_ms=waits[key], key=key)

    asked = {taker: ask(taker, key) for taker, key in clients}
    got = dict.fromkeys(waits, 0)
    for _ in range(400):
        holders = []
        for taker, key in clients:
            if taker.has(asked[taker]):
                holders.append((taker, key))
            elif taker.of(asked[taker]) is not None:
                asked[taker] = ask(taker, key)
        desk.wait(10)
        for taker, key in holders:
            got[key] += 1
            taker.release(b"p")
            asked[taker] = ask(taker, key)
    assert sum(got.values()) == 400
    assert abs(got[b"hasty"] - got[b"patient"]) <= 2


@pytest.mark.parametrize("seed", range(4))
def test_a_cancelled_take_is_not_counted(seed: int) -> None:
    """Of two keys that wait, one cancels some in between: the other does not get more than its share for that."""
    draw = random.Random(seed)
    desk = Desk(waiters=256)
    holder, one, other = desk.some(3)
    holder.acquire(b"p")
    waiting = {
        taker: [taker.take(Permit(b"p", 1, 1), wait_ms=1 << 30, key=key) for _ in range(60)]
        for taker, key in ((one, b"one"), (other, b"other"))
    }
    for opaque in draw.sample(waiting[one], 30):
        assert one.cancel(opaque) == Status.NO_ERROR
        waiting[one].remove(opaque)
    turns = []
    for _ in range(60):
        holder.release(b"p")
        holder = one if waiting[one] and one.has(waiting[one][0]) else other
        assert holder.has(waiting[holder].pop(0))
        turns.append(holder)
    assert abs(turns.count(one) - turns.count(other)) <= 1
