"""Take, Cancel and Settle: several permits and rates at once, waiting in turn, and settled afterwards."""

from __future__ import annotations

import pytest

from counterd.protocols.counter import wire
from counterd.protocols.counter.wire import Grant, OnDeath, Permit, Rate, Shortage, Status
from kit.counters import holders_of
from kit.takes import MS, Desk, Taker

SECOND = 1_000_000  # us
MOVES = 5  # one more than there are before a Take goes to the front


def permit(name: bytes = b"p", amount: int = 1, maximum: int = 1) -> Permit:
    return Permit(name, amount, maximum)


def rate(
    name: bytes = b"r", amount: int = 1, limit: int = 10, burst: int = 5, on_death: OnDeath = OnDeath.FINAL
) -> Rate:
    return Rate(name, amount, limit, SECOND, burst, on_death)


@pytest.fixture
def desk() -> Desk:
    return Desk()


# ---- all or nothing -------------------------------------------------------------------------------------------------


def test_takes_all_or_nothing(desk: Desk) -> None:
    one, other = desk.some(2)
    first = one.take(permit(b"a", 2, 3), permit(b"b", 1, 1), rate())
    assert isinstance(grant := one.of(first), Grant)
    assert grant.left == (1, 0, 4)
    assert other.of(other.take(permit(b"a", 1, 3), permit(b"b"))) == Shortage(1, 0, 1, None, "Resource not available")
    assert other.status(wire.get(0, b"a")) == Status.NO_ERROR
    assert wire.decode_consumption(other.answers.others[-1].body) == 2, "nothing was taken of the first item"
    assert one.release(b"b") == Status.NO_ERROR
    second = other.take(permit(b"a", 1, 3), permit(b"b"))
    assert isinstance(after := other.of(second), Grant)
    assert after.number > grant.number


def test_take_and_acquire_share_the_permits(desk: Desk) -> None:
    one, other = desk.some(2)
    assert one.has(one.take(permit(b"a", 2, 3)))
    assert other.acquire(b"a", 2, 3) == Status.RESOURCE_NOT_AVAILABLE
    assert other.acquire(b"a", 1, 3) == Status.NO_ERROR
    assert one.release(b"a", 2) == Status.NO_ERROR
    assert other.release(b"a", 2) == Status.NOT_ACQUIRED
    one.close()
    other.close()
    assert desk.store.snapshot()["busy"] == 0


def test_the_time_since_which_a_permit_is_held(desk: Desk) -> None:
    one, other = desk.some(2)
    assert one.has(one.take(permit(b"a", 1, 2)))
    assert other.acquire(b"a", 1, 2) == Status.NO_ERROR
    assert {since for _, _, since in holders_of(desk.store, b"a")} == {desk.pump.now_ns // (100 * MS)}


@pytest.mark.parametrize(
    "items",
    [(permit(), permit()), (rate(), permit(), rate()), (permit(b"a" * 50, 1, 2), permit(b"a" * 50, 1, 3))],
)
def test_an_item_twice_is_invalid(items: tuple[Permit | Rate, ...]) -> None:
    (one,) = Desk(name_memory=4096).some(1)
    assert one.of(one.take(*items)) == Status.INVALID_ARGUMENTS


def test_a_counter_and_a_rate_may_have_the_same_name(desk: Desk) -> None:
    (one,) = desk.some(1)
    assert one.has(one.take(permit(b"x"), rate(b"x")))
    assert one.acquire(b"x", 1, 2) == Status.NO_ERROR
    one.send(wire.dump(0))
    entries = [wire.decode_dump_entry(response.body) for response in one.answers.others[-2:-1]]
    assert entries == [wire.DumpEntry(b"x", 2, 2)], "a Dump has no rates"


def invalid() -> list[bytes]:
    good = wire.take(1, [permit(b"name", 2, 3), rate(b"rate", 2)], 5, key=b"key")[12:]
    return [
        *(good[:size] for size in range(len(good))),
        good + b"\0",
        b"\0" + good[1:],
        b"\3" + good[1:],
        good[:2] + (1001).to_bytes(2, "big") + good[4:],
        good.replace(b"\0\0\0\2\0\0\0\3", b"\0\0\0\4\0\0\0\3"),
        good.replace(b"\0\0\0\2\0\0\0\3", b"\0\0\0\0\0\0\0\3"),
        good.replace(b"\0\0\0\2\0\0\0\n\0\0\0\5", b"\0\0\0\2\0\0\0\n\0\0\0\1"),
        good.replace(b"\0\0\0\2\0\0\0\n\0\0\0\5", b"\0\0\0\2\0\0\0\0\0\0\0\5"),
        good.replace(b"\0\0\0\2\0\0\0\n\0\0\0\5", b"\0\0\0\2\x80\0\0\0\0\0\0\5"),
        good.replace(SECOND.to_bytes(8, "big"), bytes(8)),
        good.replace(SECOND.to_bytes(8, "big"), b"\xff" * 8),
        good.replace(b"\2\0\0\4", b"\2\3\0\4"),
        good.replace(b"\1\0\0\4", b"\1\1\0\4"),
        good.replace(b"\1\0\0\4", b"\3\0\0\4"),
    ]


@pytest.mark.parametrize("body", invalid())
def test_invalid_takes_are_refused(desk: Desk, body: bytes) -> None:
    (one,) = desk.some(1)
    one.send(wire.frame(wire.Opcode.TAKE, 7, body))
    assert one.of(7) == Status.INVALID_ARGUMENTS
    assert desk.store.snapshot()["records"] == 0


def test_takes_without_room_for_names_or_holdings() -> None:
    desk = Desk(buckets=2, holdings=1)
    one, other = desk.some(2)
    assert one.of(one.take(permit(b"a"), permit(b"b"))) == Status.OUT_OF_MEMORY, "one holding"
    assert one.of(one.take(permit(b"a"), rate(b"b"), rate(b"c"))) == Status.OUT_OF_MEMORY, "two records"
    assert one.has(one.take(permit(b"a"), rate(b"b")))
    assert other.of(other.take(permit(b"d"))) == Status.OUT_OF_MEMORY
    desk.wait(10_000)
    assert other.of(other.take(permit(b"d"))) == Status.OUT_OF_MEMORY, "the rate has gone, not the holding"
    one.close()
    assert other.has(other.take(permit(b"d")))


# ---- rates ----------------------------------------------------------------------------------------------------------


def test_a_rate_is_exact_to_the_microsecond(desk: Desk) -> None:
    """7 in a second: the n-th unit after the burst is there n/7 s later, and not a microsecond before."""
    (one,) = desk.some(1)
    seven = rate(b"r", 1, 7, 3)
    assert [one.has(one.take(seven)) for _ in range(4)] == [True, True, True, False]
    begun = desk.pump.now_ns
    for number in range(1, 20):
        due = begun - (-number * 1_000_000_000 // 7)
        desk.pump.now_ns = due - 1
        assert not one.has(one.take(seven))
        desk.pump.now_ns = due
        assert one.has(one.take(seven)), number


def test_a_refusal_says_how_many_units_are_left_and_when_enough(desk: Desk) -> None:
    (one,) = desk.some(1)
    grant = one.of(one.take(rate(b"r", 3, 10, 5)))
    assert isinstance(grant, Grant)
    assert grant.left == (2,)
    assert one.of(one.take(rate(b"r", 4, 10, 5))) == Shortage(0, 2, 5, 200, "Resource not available")
    desk.wait(200)
    grant = one.of(one.take(rate(b"r", 4, 10, 5)))
    assert isinstance(grant, Grant)
    assert grant.left == (0,)


def test_many_units_of_a_long_period(desk: Desk) -> None:
    """Their time, in parts of a nanosecond, needs more than 64 bits."""
    (one,) = desk.some(1)
    yearly = Rate(b"r", 1 << 30, 1 << 30, 365 * 86_400 * SECOND, 1 << 30)
    assert one.has(one.take(yearly))
    assert one.of(one.take(yearly._replace(amount=1 << 10))) == Shortage(
        0, 0, 1 << 30, 30_076, "Resource not available"
    )


def test_the_record_of_a_full_rate_is_freed(desk: Desk) -> None:
    (one,) = desk.some(1)
    assert one.has(one.take(rate(b"r", 3, 10, 5)))
    assert desk.store.snapshot()["rates"] == 1
    desk.wait(295)
    assert desk.store.snapshot()["rates"] == 1
    desk.wait(10)
    assert (desk.store.snapshot()["rates"], desk.store.snapshot()["records"]) == (0, 0)


def test_a_rate_whose_limit_changes(desk: Desk) -> None:
    """Used units stay used in time: half a second's worth of 10 a second is half a second's worth of 4 a second too."""
    (one,) = desk.some(1)
    assert one.has(one.take(rate(b"r", 5, 10, 5)))
    assert one.of(one.take(rate(b"r", 1, 4, 5))) == Shortage(0, 0, 5, 250, "Resource not available")
    desk.wait(250)
    assert one.has(one.take(rate(b"r", 1, 4, 5)))


def test_a_smaller_burst_keeps_what_was_used(desk: Desk) -> None:
    (one,) = desk.some(1)
    assert one.has(one.take(rate(b"r", 100, 100, 100)))
    desk.wait(10)
    assert one.has(one.take(rate(b"r", 1, 100, 1)))
    desk.wait(20)
    assert one.of(one.take(rate(b"r", 100, 100, 100))) == Shortage(0, 2, 100, 980, "Resource not available")


def test_rates_use_at_most_half_of_the_records() -> None:
    desk = Desk(buckets=4)
    (one,) = desk.some(1)
    assert one.has(one.take(rate(b"a"), rate(b"b")))
    assert one.of(one.take(rate(b"c"))) == Status.OUT_OF_MEMORY
    assert one.has(one.take(permit(b"d"), permit(b"e")))
    desk.wait(1_000)
    assert one.has(one.take(rate(b"c")))


# ---- waiting --------------------------------------------------------------------------------------------------------


def test_a_take_waits_until_its_permits_are_free(desk: Desk) -> None:
    one, other = desk.some(2)
    assert one.acquire(b"p") == Status.NO_ERROR
    waiting = other.take(permit(), wait_ms=1000)
    assert other.of(waiting) is None
    assert other.status(wire.noop(0)) == Status.NO_ERROR, "later requests are answered meanwhile"
    desk.wait(500)
    assert one.release(b"p") == Status.NO_ERROR
    assert other.has(waiting)
    assert desk.store.snapshot()["waiters"] == 0


def test_a_waiting_take_is_refused_at_its_deadline(desk: Desk) -> None:
    one, other = desk.some(2)
    one.acquire(b"p")
    waiting = other.take(permit(b"q"), permit(), wait_ms=100)
    desk.wait(99)
    assert other.of(waiting) is None
    desk.wait(3)
    assert other.of(waiting) == Shortage(1, 0, 1, None, "Resource not available")
    one.release(b"p")
    assert desk.store.snapshot()["busy"] == 0


def test_cancel_ends_a_waiting_take(desk: Desk) -> None:
    one, other = desk.some(2)
    one.acquire(b"p")
    first, second = other.take(permit(), wait_ms=1000), other.take(permit(), wait_ms=1000)
    assert one.cancel(first) == Status.NOT_FOUND, "it is another connection's"
    assert other.cancel(first) == Status.NO_ERROR
    assert other.of(first) == Status.CANCELLED
    assert other.cancel(first) == Status.NOT_FOUND
    one.release(b"p")
    assert other.has(second)
    assert other.cancel(second) == Status.NOT_FOUND, "it has been granted"


def test_takes_wait_for_units_of_a_rate(desk: Desk) -> None:
    (one,) = desk.some(1)
    assert one.has(one.take(rate(b"r", 5, 10, 5)))
    waiting = [one.take(rate(b"r", 2, 10, 5), wait_ms=10_000) for _ in range(3)]
    seen = []
    for _ in range(70):
        desk.wait(10)
        seen.append(sum(map(one.has, waiting)))
    # Two units take 200 ms. A timer is up to 1.05 ms late.
    assert [seen.count(number) for number in range(4)] == [20, 20, 20, 10]


def test_a_new_request_does_not_pass_waiting_ones(desk: Desk) -> None:
    """Permits that a Take waits for are granted neither to an Acquire nor to a Take that does not wait."""
    one, large, small = desk.some(3)
    one.acquire(b"p", 2, 3)
    waiting = large.take(permit(b"p", 3, 3), wait_ms=1000)
    assert small.acquire(b"p", 1, 3) == Status.RESOURCE_NOT_AVAILABLE
    assert isinstance(small.of(small.take(permit(b"p", 1, 3))), Shortage)
    behind = small.take(permit(b"p", 1, 3), wait_ms=1000)
    one.release(b"p", 2)
    assert large.has(waiting)
    assert not small.has(behind)
    large.release(b"p", 1)
    assert small.has(behind)
    assert small.acquire(b"p", 1, 4) == Status.NO_ERROR, "nobody waits any more"


def test_keys_take_turns(desk: Desk) -> None:
    """A key with many Takes gets no more than others."""
    holder, greedy, modest = desk.some(3)
    holder.acquire(b"p")
    many = [greedy.take(permit(), wait_ms=10_000, key=b"greedy") for _ in range(6)]
    few = [modest.take(permit(), wait_ms=10_000, key=b"modest") for _ in range(2)]
    order = served(desk, holder, [(greedy, each) for each in many] + [(modest, each) for each in few])
    assert [taker is modest for taker, _ in order] == [False, True, False, True, False, False, False, False]


def served(desk: Desk, holder: Taker, waiting: list[tuple[Taker, int]]) -> list[tuple[Taker, int]]:
    """The order in which these clients get the one permit, if each gives it back at once."""
    order: list[tuple[Taker, int]] = []
    holder.release(b"p")
    for _ in range(len(waiting)):
        ((taker, take),) = [each for each in waiting if each not in order and each[0].has(each[1])]
        order.append((taker, take))
        taker.release(b"p")
    return order


def test_weights_of_keys(desk: Desk) -> None:
    holder, one, three = desk.some(3)
    holder.acquire(b"p")
    waiting = [(one, one.take(permit(), wait_ms=10_000, key=b"1", weight=1)) for _ in range(8)]
    waiting += [(three, three.take(permit(), wait_ms=10_000, key=b"3", weight=3)) for _ in range(8)]
    order = served(desk, holder, waiting)
    assert sum(taker is three for taker, _ in order[:8]) == 6


def test_weights_of_keys_that_have_one_take_each(desk: Desk) -> None:
    """Each key sends its next Take when it is granted one, before it gives its permit back."""
    weights = {b"a": 1, b"b": 3}
    holder, *others = desk.some(3)
    takers = dict(zip(weights, others, strict=True))
    holder.acquire(b"p")

    def asks(key: bytes) -> int:
        return takers[key].take(permit(), wait_ms=60_000, key=key, weight=weights[key])

    waiting = {key: asks(key) for key in weights}
    holder.release(b"p")
    served = []
    for _ in range(40):
        (key,) = (key for key in weights if takers[key].has(waiting[key]))
        served.append(key)
        waiting[key] = asks(key)
        assert takers[key].release(b"p") == Status.NO_ERROR
    assert [served.count(key) for key in weights] == [10, 30]


def test_priorities_go_first(desk: Desk) -> None:
    holder, low, high = desk.some(3)
    holder.acquire(b"p")
    waiting = [(low, low.take(permit(), wait_ms=10_000, weight=1000)) for _ in range(3)]
    waiting += [(high, high.take(permit(), wait_ms=10_000, priority=1)) for _ in range(3)]
    assert [taker is high for taker, _ in served(desk, holder, waiting)] == [True] * 3 + [False] * 3


def test_a_take_keeps_its_place_behind_one_that_ends_without_a_grant(desk: Desk) -> None:
    holder, large, small, urgent = desk.some(4)
    holder.acquire(b"p", 10, 10)
    wanted = large.take(permit(amount=10, maximum=10), wait_ms=10_000, key=b"large")
    others = small.take(permit(maximum=10), wait_ms=10_000, key=b"small")
    takes = [urgent.take(permit(amount=10, maximum=10), wait_ms=10_000, key=b"urgent", priority=1) for _ in range(2)]
    holder.release(b"p", 10)
    urgent.release(b"p", 10)
    assert urgent.has(takes[1])
    assert large.cancel(large.take(permit(amount=10, maximum=10), wait_ms=10_000, key=b"large", priority=1)) == 0
    urgent.release(b"p", 10)
    assert (large.has(wanted), small.of(others)) == (True, None)


def test_a_key_that_was_away_gets_no_compensation(desk: Desk) -> None:
    """And a key that was served just before does not come back as if it were new."""
    holder, one, other = desk.some(3)
    holder.acquire(b"p")
    ones = [one.take(permit(), wait_ms=10_000, key=b"one") for _ in range(6)]
    holder.release(b"p")
    for take in ones[:3]:
        assert one.has(take)
        one.release(b"p")
    assert one.has(ones[3])
    waiting = [(one, take) for take in ones[4:]]
    waiting += [(other, other.take(permit(), wait_ms=10_000, key=b"other")) for _ in range(3)]
    order = served(desk, one, waiting)
    assert [taker is one for taker, _ in order] == [False, True, False, True, False]


def test_a_key_is_not_charged_for_takes_without_a_grant(desk: Desk) -> None:
    """Takes that timed out, or were cancelled, are not counted against their key."""
    holder, one, other = desk.some(3)
    holder.acquire(b"p")
    others = [(other, other.take(permit(), wait_ms=10_000, key=b"other")) for _ in range(3)]
    for _ in range(10):
        one.take(permit(), wait_ms=5, key=b"one")
        desk.wait(10)
        one.cancel(one.take(permit(), wait_ms=1_000, key=b"one"))
    ones = [(one, one.take(permit(), wait_ms=10_000, key=b"one")) for _ in range(3)]
    order = [taker is one for taker, _ in served(desk, holder, others + ones)]
    assert order == [False, True, False, True, False, True]


def test_more_keys_than_can_be_remembered() -> None:
    """A key that cannot be remembered starts behind all others, and is served."""
    desk = Desk(waiters=2, buckets=8)
    holder, one, other = desk.some(3)
    holder.acquire(b"p")
    kept = one.take(permit(), wait_ms=10_000, key=b"kept")
    for number in range(300):
        other.cancel(other.take(permit(b"p", 1, 1), wait_ms=10_000, key=b"%d" % number, weight=1))
    late = other.take(permit(), wait_ms=10_000, key=b"late")
    assert [taker is one for taker, _ in served(desk, holder, [(one, kept), (other, late)])] == [True, False]


def test_a_take_moves_to_the_queue_of_the_missing_item(desk: Desk) -> None:
    a, b, both, late = desk.some(4)
    a.acquire(b"a")
    b.acquire(b"b")
    waiting = both.take(permit(b"a"), permit(b"b"), wait_ms=10_000)
    a.release(b"a")
    assert not both.has(waiting)
    assert late.has(late.take(permit(b"a"))), "it holds nothing while it waits for b"
    b.release(b"b")
    assert not both.has(waiting)
    late.release(b"a")
    assert both.has(waiting)


def test_after_some_moves_a_take_goes_before_others_of_its_key(desk: Desk) -> None:
    one, other, holder = desk.some(3)
    here, there = b"p", b"q"
    assert holder.acquire(here) == Status.NO_ERROR
    take = one.take(permit(here), permit(there), wait_ms=60_000, key=b"k")
    behind = 0
    for number in range(MOVES):
        assert holder.acquire(there) == Status.NO_ERROR
        if number == MOVES - 1:
            behind = other.take(permit(there), wait_ms=60_000, key=b"k")
        assert holder.release(here) == Status.NO_ERROR
        here, there = there, here
    assert (one.of(take), other.of(behind)) == (None, None)
    assert holder.release(here) == Status.NO_ERROR
    assert one.has(take)
    assert other.of(behind) is None


def test_a_take_keeps_its_age_in_another_queue(desk: Desk) -> None:
    a, b, both, only = desk.some(4)
    a.acquire(b"a")
    b.acquire(b"b")
    waiting = both.take(permit(b"a"), permit(b"b"), wait_ms=10_000)
    later = only.take(permit(b"b"), wait_ms=10_000)
    a.release(b"a")
    b.release(b"b")
    assert both.has(waiting)
    assert not only.has(later)
    both.release(b"b")
    assert only.has(later)


# ---- connections that end -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["closed", "eof"])
def test_an_ended_connection_does_not_wait(desk: Desk, how: str) -> None:
    one, gone, other = desk.some(3)
    one.acquire(b"p")
    gone.acquire(b"held")
    lost = gone.take(permit(), wait_ms=10_000)
    waiting = other.take(permit(), wait_ms=10_000)
    if how == "eof":
        gone.session.eof(desk.pump.now_ns)
        assert gone.session.closing
        desk.pump.settle()
    else:
        gone.close()
    assert desk.store.snapshot()["waiters"] == 1
    assert other.acquire(b"held") == Status.NO_ERROR
    one.release(b"p")
    assert gone.of(lost) is None
    assert other.has(waiting)


def test_waiting_connections_that_end_together_give_everything_back(desk: Desk) -> None:
    one, *others = desk.some(7)
    one.acquire(b"p")
    for number, other in enumerate(others):
        other.acquire(b"of %d" % number)
        other.take(permit(), wait_ms=10_000)
    for left in (3, 0):
        for other in others[left : left + 3]:
            other.session.closed(desk.pump.now_ns)
        desk.wait(0)
        figures = desk.store.snapshot()
        assert [figures["holdings"], figures["waiters"]] == [1 + left, left]


def test_takes_that_time_out_together_are_refused_with_their_own_items(desk: Desk) -> None:
    """The time when the rate has enough units is known; that of the permit is not."""
    one, other = desk.some(2)
    one.acquire(b"p")
    slow = Rate(b"r", 1, 1, 60 * SECOND, 1)
    assert one.has(one.take(slow))
    first, second = other.take(slow, wait_ms=50), other.take(permit(), wait_ms=50)
    desk.pump.now_ns += 60 * MS
    desk.wait(0)
    assert other.of(first) == Shortage(0, 0, 1, 59_940, "Resource not available")
    assert other.of(second) == Shortage(0, 0, 1, None, "Resource not available")


@pytest.mark.parametrize("ending", ["time is over", "drain", "stop", "disconnect"])
def test_each_slice_ends_a_bounded_number_of_waits(ending: str) -> None:
    """However many end at once. Requests of others are served between two slices."""
    count, slice_steps = 20_000, 2048
    steps_each = 1 if ending == "disconnect" else 8
    desk = Desk(waiters=count, posted_max=1 << 22)
    holder, *takers = desk.some(5)
    holder.acquire(b"p")
    for taker in takers:
        for opaque in range(count // len(takers)):
            taker.session.receive(wire.take(opaque, [permit()], 10_000), desk.pump.now_ns)
    if ending == "drain":
        desk.store.begin_drain()
    elif ending == "stop":
        desk.store.part()
    elif ending == "disconnect":
        for taker in takers:
            taker.session.closed(desk.pump.now_ns)
    else:
        desk.pump.now_ns += 10_001 * MS
    left = count
    while left:
        desk.store.tick(desk.pump.now_ns)
        before, left = left, desk.store.snapshot()["waiters"]
        assert before - left <= slice_steps // steps_each + 1
        assert holder.session.receive(wire.get(0, b"p"), desk.pump.now_ns)
        assert desk.store.next_deadline() >= 0 or not left
    desk.store.audit()


def test_a_drain_refuses_waiting_takes(desk: Desk) -> None:
    """The refusal has the free amount, which in a drain is not its cause."""
    one, other = desk.some(2)
    one.acquire(b"p", 2, 3)
    assert one.has(one.take(rate(b"r", 4)))
    waiting = [other.take(permit(b"q"), permit(amount=2, maximum=3), wait_ms=10_000) for _ in range(3)]
    timed = other.take(rate(b"r", 3), wait_ms=10_000)
    desk.store.begin_drain()
    desk.pump.settle()
    assert [other.of(each) for each in waiting] == [Shortage(1, 1, 3, None, "Draining")] * 3
    assert other.of(timed) == Shortage(0, 1, 5, None, "Draining")
    assert other.of(other.take(permit(amount=1, maximum=3), wait_ms=10)) == Shortage(0, 1, 3, None, "Draining")
    assert other.of(other.take(permit(b"q", 1, 7), rate(), wait_ms=10)) == Shortage(0, 7, 7, None, "Draining")
    assert other.of(other.take(rate(b"r"))) == Shortage(0, 1, 5, None, "Draining")


def test_a_stop_refuses_waiting_takes_and_grants_free_permits(desk: Desk) -> None:
    """All connections are about to end: received requests are still executed, but nothing waits."""
    one, other = desk.some(2)
    one.acquire(b"p", 2, 3)
    waiting = [other.take(permit(amount=2, maximum=3), wait_ms=10_000) for _ in range(3)]
    desk.store.part()
    desk.pump.settle()
    assert [other.of(each) for each in waiting] == [Shortage(0, 1, 3, None, "Draining")] * 3
    assert other.session.awaited == 0
    assert other.of(other.take(permit(amount=2, maximum=3), wait_ms=10)) == Shortage(0, 1, 3, None, "Draining")
    assert other.has(other.take(permit(amount=1, maximum=3), wait_ms=10))
    assert other.acquire(b"p", 1, 3) == Status.RESOURCE_NOT_AVAILABLE
    assert other.answers.others[-1].body == b"Draining"
    assert other.acquire(b"q") == Status.NO_ERROR
    assert desk.store.snapshot()["waiters"] == 0


def test_the_number_of_waiting_takes_is_bounded() -> None:
    desk = Desk(waiters=4)
    desk.store.limit_takes(2, 60)
    holder, one, other, third = desk.some(4)
    holder.acquire(b"p")
    for taker in (one, other):
        assert [taker.of(taker.take(permit(), wait_ms=1000)) for _ in range(3)] == [None, None, Status.OUT_OF_MEMORY]
    assert third.of(third.take(permit(), wait_ms=1000)) == Status.OUT_OF_MEMORY
    one.close()
    assert third.of(third.take(permit(), permit(b"a"), permit(b"b"), wait_ms=1000)) is None


def test_each_waiting_take_may_have_names_of_its_own() -> None:
    waiters = 100
    desk = Desk(waiters=waiters, buckets=2 * waiters, holdings=2 * waiters)
    desk.store.limit_takes(waiters, 60)
    holder, one = desk.some(2)
    for number in range(waiters):
        name, another = b"%d" % number, b"another %d" % number
        assert holder.acquire(name) == Status.NO_ERROR
        assert one.of(one.take(permit(name), permit(another), wait_ms=1000)) is None
    assert desk.store.snapshot()["waiters"] == waiters


def test_a_take_without_room_for_its_queue_leaves_no_trace() -> None:
    """These queues are empty, but their turns have not come. The Take has joined one of them already."""
    waiters = 1
    queues = 2 * waiters + 64
    desk = Desk(waiters=waiters, buckets=4 * queues, holdings=2 * queues)
    holder, one = desk.some(2)
    for number in range(queues + 1):
        assert holder.acquire(b"%d" % number) == Status.NO_ERROR
    for number in range(queues):
        requests = wire.take(number, [permit(b"%d" % number)], 1000) + wire.cancel(0, number)
        one.peer.take(one.session.receive(requests, desk.pump.now_ns))
    last = wire.take(queues, [permit(b"0"), permit(b"%d" % queues)], 1000)
    one.peer.take(one.session.receive(last, desk.pump.now_ns))
    assert [one.of(number) for number in range(queues)] == [Status.CANCELLED] * queues
    assert one.of(queues) == Status.OUT_OF_MEMORY
    desk.wait(1)  # the audit would find the one that it has joined


def test_a_cancel_costs_a_step_for_each_wait_that_it_examines() -> None:
    waiters, turn_steps = 1000, 4096
    desk = Desk(waiters=waiters, buckets=64)
    desk.store.limit_takes(waiters, 60)
    holder, one = desk.some(2)
    assert holder.acquire(b"a") == Status.NO_ERROR
    one.send(b"".join(wire.take(number, [permit(b"a")], 60_000) for number in range(waiters)))
    desk.wait(1)
    answered = one.session.receive(wire.cancel(0, waiters) * waiters, desk.pump.now_ns + MS)
    assert one.session.more
    assert len(wire.ResponseParser().feed(answered)) == -(-turn_steps // (waiters + 1))


def test_an_older_take_is_not_passed_from_another_queue(desk: Desk) -> None:
    """So it need not move there, and a Take behind it in its own queue does not pass it either."""
    holder, one, other, third = desk.some(4)
    assert holder.acquire(b"a") == holder.acquire(b"b", 1, 2) == Status.NO_ERROR
    older = one.take(permit(b"a"), permit(b"b", 1, 2), wait_ms=1000)
    larger = other.take(permit(b"b", 2, 2), wait_ms=1000)
    behind = third.take(permit(b"a"), wait_ms=1000)
    assert holder.release(b"a") == Status.NO_ERROR
    assert (one.has(older), other.has(larger), third.has(behind)) == (True, False, False)


# ---- settling -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("used", "left"), [(1, 4), (3, 2), (0, 5), (5, 0)])
def test_settle_refunds_unused_units(desk: Desk, used: int, left: int) -> None:
    (one,) = desk.some(1)
    take = one.take(rate(b"r", 3, 10, 5, OnDeath.CHARGED))
    assert one.settle(take, b"r", used) == Status.NO_ERROR
    assert one.settle(take, b"r", used) == Status.NOT_FOUND, "once"
    shortage = one.of(one.take(rate(b"r", 5, 10, 5)))
    if isinstance(shortage, Shortage):
        assert shortage.left == left
    else:
        assert isinstance(shortage, Grant)
        assert left == 5


def test_settling_more_than_is_left_delays_later_takes(desk: Desk) -> None:
    (one,) = desk.some(1)
    take = one.take(rate(b"r", 1, 10, 5, OnDeath.CHARGED))
    assert one.settle(take, b"r", 25) == Status.NO_ERROR
    assert one.of(one.take(rate(b"r", 1, 10, 5))) == Shortage(0, 0, 5, 2100, "Resource not available")


def test_settling_serves_waiting_takes(desk: Desk) -> None:
    one, other = desk.some(2)
    take = one.take(rate(b"r", 5, 10, 5, OnDeath.CHARGED))
    waiting = other.take(rate(b"r", 4, 10, 5), wait_ms=10_000)
    one.settle(take, b"r", 1)
    assert other.has(waiting)


def test_invalid_settles_are_refused(desk: Desk) -> None:
    one, other = desk.some(2)
    final = one.take(rate(b"r"))
    assert one.settle(final, b"r", 0) == Status.NOT_FOUND
    take = one.take(rate(b"r", on_death=OnDeath.CHARGED), rate(b"s", on_death=OnDeath.REFUNDED))
    grant = one.of(take)
    assert isinstance(grant, Grant)
    assert other.status(wire.settle(0, grant.number, b"r", 0)) == Status.NOT_FOUND, "it is another connection's"
    assert one.settle(take, b"t", 0) == Status.NOT_FOUND
    assert one.settle(take, b"s", 0) == Status.NO_ERROR


@pytest.mark.parametrize("on_death", [OnDeath.CHARGED, OnDeath.REFUNDED])
def test_on_death_decides_about_units_of_an_ended_connection(desk: Desk, on_death: OnDeath) -> None:
    one, other = desk.some(2)
    assert one.has(one.take(rate(b"r", 5, 10, 5, on_death)))
    one.close()
    assert other.has(other.take(rate(b"r", 5, 10, 5))) == (on_death == OnDeath.REFUNDED)


def test_a_charge_may_be_settled_for_a_limited_time(desk: Desk) -> None:
    desk.store.limit_takes(0, 60)
    (one,) = desk.some(1)
    take = one.take(rate(b"r", 1, 10, 5, OnDeath.CHARGED))
    desk.wait(59_000)
    assert desk.store.snapshot()["charges"] == 1
    desk.wait(2_000)
    assert desk.store.snapshot()["charges"] == 0
    assert one.settle(take, b"r", 0) == Status.NOT_FOUND


def test_the_oldest_charges_of_a_connection_end_first() -> None:
    desk = Desk(holdings=4096)
    (one,) = desk.some(1)
    takes = [one.take(Rate(b"r", 1, 1_000_000, SECOND, 5000, OnDeath.CHARGED)) for _ in range(1026)]
    assert desk.store.snapshot()["charges"] == 1024
    assert one.settle(takes[1], b"r", 0) == Status.NOT_FOUND
    assert one.settle(takes[2], b"r", 0) == Status.NO_ERROR
    for _ in range(1024):
        one.take(Rate(b"r", 1, 1_000_000, SECOND, 5000, OnDeath.REFUNDED))
    full = one.take(Rate(b"r", 1, 1_000_000, SECOND, 5000, OnDeath.REFUNDED))
    assert one.of(full) == Status.OUT_OF_MEMORY, "those that are to be refunded are not forgotten"


def test_charges_to_be_refunded_are_not_dropped_for_another_connection() -> None:
    desk = Desk(holdings=4)
    one, other = desk.some(2)
    takes = [one.take(rate(b"r", 1, 10, 5, OnDeath.REFUNDED)) for _ in range(4)]
    assert other.of(other.take(rate(b"r", 1, 10, 5, OnDeath.CHARGED))) == Status.OUT_OF_MEMORY
    assert one.settle(takes[0], b"r", 1) == Status.NO_ERROR
    assert other.has(other.take(rate(b"r", 1, 10, 5, OnDeath.CHARGED)))


@pytest.mark.parametrize("ends", [False, True])
def test_settling_beyond_a_charge_without_room_for_the_rate(ends: bool) -> None:
    desk = Desk(buckets=2)
    (one,) = desk.some(1)
    take = one.take(rate(b"r", 1, 10, 5, OnDeath.REFUNDED))
    desk.wait(1_000)
    assert one.has(one.take(permit(b"a"), permit(b"b")))
    assert one.settle(take, b"r", 9) == Status.OUT_OF_MEMORY
    if ends:
        one.close()
        desk.pump.settle()
        assert desk.store.snapshot()["charges"] == 0, "its rate exists no more: there is nothing to refund"
    else:
        one.release(b"a")
        assert one.settle(take, b"r", 9) == Status.NO_ERROR


def test_units_that_came_back_by_time_are_not_refunded_again(desk: Desk) -> None:
    """The rate has been full since, although it is not full any more and still has its record, as another settled
    more."""
    one, other = desk.some(2)
    item = Rate(b"r", 1, 1, SECOND, 5, OnDeath.CHARGED)
    first, second = one.take(item), other.take(item)
    desk.pump.now_ns += 2 * SECOND * 1000
    assert one.settle(first, b"r", 4) == Status.NO_ERROR
    assert desk.store.snapshot()["rates"] == 1
    assert other.settle(second, b"r", 0) == Status.NO_ERROR
    grant = other.of(other.take(item))
    assert isinstance(grant, Grant)
    assert grant.left == (1,)


def test_settling_a_rate_that_is_full_again(desk: Desk) -> None:
    (one,) = desk.some(1)
    less, more = (one.take(rate(b"r", 2, 10, 5, OnDeath.CHARGED)) for _ in range(2))
    same = one.take(rate(b"r", 1, 10, 5, OnDeath.CHARGED))
    desk.wait(5_000)
    assert desk.store.snapshot()["rates"] == 0
    assert one.settle(less, b"r", 1) == Status.NO_ERROR
    assert one.settle(same, b"r", 1) == Status.NO_ERROR
    assert desk.store.snapshot()["rates"] == 0
    assert one.settle(more, b"r", 5) == Status.NO_ERROR
    assert one.of(one.take(rate(b"r", 5, 10, 5))) == Shortage(0, 2, 5, 300, "Resource not available")


def test_numbers_of_grants_rise_across_restarts() -> None:
    numbers = []
    for restart in range(3):
        desk = Desk()
        desk.store.set_wall(1_700_000_000_000_000_000 + restart * 1_000_000, desk.pump.now_ns)
        (one,) = desk.some(1)
        for _ in range(100):
            take = one.take(permit(b"p", 1, 1000))
            grant = one.of(take)
            assert isinstance(grant, Grant)
            numbers.append(grant.number)
    assert numbers == sorted(set(numbers))


def test_a_shorter_time_to_settle_applies_to_earlier_grants(desk: Desk) -> None:
    one, other = desk.some(2)
    item = Rate(b"r", 1, 1, SECOND, 5, OnDeath.CHARGED)
    first = one.take(item)
    desk.wait(10_000)
    second = other.take(item)
    desk.store.limit_takes(0, 5)
    desk.wait(0)
    assert desk.store.snapshot()["charges"] == 1
    assert one.settle(first, b"r", 0) == Status.NOT_FOUND
    assert other.settle(second, b"r", 0) == Status.NO_ERROR


# ---- records that somebody waits for ----


def test_idle_counters_with_waiters_leave_the_ring() -> None:
    """When they are met there; they enter it again when no Take waits for them."""
    desk = Desk(buckets=80, holdings=200, waiters=200)
    holder, waiter, other = desk.some(3)
    assert holder.acquire(b"p") == Status.NO_ERROR
    for number in range(70):
        waiter.take(Permit(b"p", 1, 1), Permit(b"%d" % number, 1, 1), wait_ms=60_000)
    for number in range(100, 109):
        assert other.acquire(b"%d" % number) == Status.NO_ERROR
        assert other.release(b"%d" % number) == Status.NO_ERROR
    assert other.acquire(b"new") == Status.OUT_OF_MEMORY  # after 64 of them
    assert [other.acquire(b"new %d" % number) for number in range(9)] == [Status.NO_ERROR] * 9
    assert other.acquire(b"one too many") == Status.OUT_OF_MEMORY
    waiter.close()
    assert other.acquire(b"one too many") == Status.NO_ERROR
    desk.store.audit()


def test_a_full_rate_with_waiters_is_freed_after_them() -> None:
    desk = Desk()
    holder, waiter = desk.some(2)
    assert holder.acquire(b"p") == Status.NO_ERROR
    opaque = waiter.take(Permit(b"p", 1, 1), Rate(b"r", 1, 1, SECOND, 1), wait_ms=3_600_000)
    desk.wait(10_000)
    assert desk.store.snapshot()["rates"] == 1
    assert desk.store.next_deadline() > desk.pump.now_ns + 3_000 * SECOND * 1000
    assert waiter.cancel(opaque) == Status.NO_ERROR
    desk.wait(2)
    assert desk.store.snapshot()["rates"] == 0
