"""Shared counters: a store grants from its rights, requests missing ones, and reacts to the end of its lease."""

from __future__ import annotations

import pytest

from counterd.cluster.lease_protocol import PARTITIONS, partition_of
from counterd.contract import RateChange, RateUpdate, Scope, Update
from counterd.control.config.keys import PREFIX_MAX
from counterd.protocols.counter import leased_limits, wire
from counterd.protocols.counter._lending import Lending
from counterd.protocols.counter.limits import parse_limits
from counterd.protocols.counter.wire import DumpEntry, OnDeath, Permit, Rate, Status
from kit.takes import LEASE_MS, NAME, PART, Desk, Shop, Taker

OTHER = next(b"shared:%d" % i for i in range(100) if partition_of(b"shared:%d" % i) != PART)
REFUSED = Status.RESOURCE_NOT_AVAILABLE


@pytest.fixture
def shop() -> Shop:
    return Shop()


def ask(taker: Taker, amount: int = 1, maximum: int = 10, name: bytes = NAME) -> None:
    """Sends an Acquire that waits for an answer of the authority."""
    taker.send(wire.acquire(0, name, amount, maximum))


def statuses(taker: Taker) -> list[int]:
    return [each.status for each in taker.answers.others]


# ---- granting -------------------------------------------------------------------------------------------------------


def test_a_request_without_rights_waits_for_the_answer(shop: Shop) -> None:
    (one,) = shop.some(1)
    ask(one, 2)
    assert statuses(one) == []
    assert one.session.state == 2, "parked"
    assert shop.limits.has_urgent() == (1 << PART, 1 << PART)
    (change,) = shop.counters()
    assert change[1:] == (NAME, 10, 2, 2, 0, 0, 0, False)
    assert shop.limits.has_urgent() == (0, 0)
    shop.answer(change, 5)
    assert statuses(one) == [Status.NO_ERROR]
    assert one.acquire(NAME, 3, 10) == Status.NO_ERROR, "from rights that are there"
    ask(one)
    assert len(statuses(one)) == 2, "there are no more rights"
    (change,) = shop.counters()
    assert change[1:-1] == (NAME, 10, 1, 1, 5, 5, 5)


def test_the_names_of_a_call_are_bounded_in_bytes() -> None:
    """Names beyond that stay urgent, or come in their turn."""
    shop = Shop(name_memory=1 << 20)
    pads = (b"-" * 60_000 + b"%d" % number for number in range(100))
    pad = next(pad for pad in pads if partition_of(b"shared:" + pad) == PART)
    # The partition depends on four bits, so these and the pad are in it too.
    heads = (b"shared:%d" % number for number in range(1000))
    names = [each + pad for each in heads if partition_of(each) == partition_of(b"shared:")][:8]
    takers = shop.some(len(names))
    for taker, name in zip(takers, names, strict=True):
        ask(taker, name=name)
    told = shop.counters()
    assert [each.name for each in told] == names[:5], "262,144 bytes, and the rest of a name"
    assert shop.urgency() == "urgent"
    told += shop.counters()
    assert [each.name for each in told] == names
    assert shop.urgency() == ""
    for change in told:
        shop.answer(change, 5)
    assert [statuses(taker) for taker in takers] == [[Status.NO_ERROR]] * len(names)
    background = shop.counters(report=True)
    assert len(background) == 5
    assert {each.name for each in background + shop.counters(report=True)} == {*names}


def test_a_request_is_refused_after_the_answer(shop: Shop) -> None:
    one, other = shop.some(2)
    ask(one)
    shop.give(0, others=10, refused=True)
    assert statuses(one) == [REFUSED]
    ask(other)
    assert shop.urgency() == "urgent", "each request is asked for"
    shop.give(1, others=9)
    assert statuses(other) == [Status.NO_ERROR]


def test_other_names_are_not_shared(shop: Shop) -> None:
    (one,) = shop.some(1)
    assert one.acquire(b"own", 1, 1) == Status.NO_ERROR
    assert shop.counters() == []


def test_more_than_the_maximum_is_refused_without_asking(shop: Shop) -> None:
    one, other = shop.some(2)
    ask(one, 2, 2)
    shop.give(2)
    assert other.acquire(NAME, 1, 2) == REFUSED
    assert shop.urgency() == ""


def test_a_smaller_maximum_is_requested(shop: Shop) -> None:
    """Other daemons may use more than that."""
    (one,) = shop.some(1)
    ask(one, 1, 10)
    shop.give(5)
    ask(one, 1, 7)
    (change,) = shop.counters()
    assert change[1:-1] == (NAME, 7, 1, 1, 1, 1, 5)
    shop.answer(change, 1, others=6, refused=True)
    assert statuses(one) == [Status.NO_ERROR, REFUSED]
    assert one.acquire(NAME, 1, 1) == REFUSED


def test_a_request_during_a_call_waits_for_the_next_call(shop: Shop) -> None:
    one, other = shop.some(2)
    ask(one)
    (change,) = shop.counters()
    ask(other)
    shop.answer(change, 0, others=10, refused=True)
    assert (statuses(one), statuses(other)) == ([REFUSED], [])
    shop.give(1)
    assert statuses(other) == [Status.NO_ERROR]


def test_requests_behind_a_blocked_one_keep_their_order(shop: Shop) -> None:
    (one,) = shop.some(1)
    one.send(wire.acquire(1, NAME, 1, 10) + wire.get(2, b"own") + wire.noop(3))
    assert statuses(one) == []
    shop.give(1)
    assert [each.opaque for each in one.answers.others] == [1, 2, 3]


def test_a_take_without_wait_requests_rights_and_takes_nothing_meanwhile(shop: Shop) -> None:
    one, other = shop.some(2)
    take = one.take(Permit(NAME, 1, 10), Permit(b"own", 1, 1))
    assert one.of(take) is None
    shop.give(1)
    assert one.has(take)
    assert other.acquire(b"own", 1, 1) == REFUSED
    take = one.take(Permit(NAME, 1, 10))
    shop.give(1, others=9, refused=True)
    shortage = one.of(take)
    assert isinstance(shortage, wire.Shortage)
    assert (shortage.item, shortage.left) == (0, 0)


def test_the_rights_for_each_item_of_a_take_are_requested(shop: Shop) -> None:
    shop.lease(partition_of(OTHER))
    (one,) = shop.some(1)
    take = one.take(Permit(NAME, 1, 10), Permit(OTHER, 1, 10))
    shop.give(1)
    assert one.of(take) is None
    (change,) = shop.counters(partition_of(OTHER))
    shop.answer(change, 1)
    assert one.has(take)


def test_a_waiting_take_is_in_the_queue_of_the_authority(shop: Shop) -> None:
    one, other = shop.some(2)
    take = one.take(Permit(NAME, 3, 10), wait_ms=60_000)
    (change,) = shop.counters()
    assert change[1:] == (NAME, 10, 3, 3, 0, 0, 0, True)
    shop.answer(change, 0, others=9, refused=True)
    assert one.of(take) is None
    assert shop.urgency() == "refused before"
    shop.give(3, others=7)
    assert one.has(take)
    assert other.acquire(NAME, 1, 3) == REFUSED
    assert one.release(NAME, 3) == Status.NO_ERROR


def test_while_a_take_waits_acquires_are_refused(shop: Shop) -> None:
    one, other = shop.some(2)
    one.take(Permit(NAME, 3, 10), wait_ms=60_000)
    assert other.acquire(NAME, 1, 10) == REFUSED


def test_get_shows_the_use_here_and_in_the_cluster(shop: Shop) -> None:
    (one,) = shop.some(1)
    ask(one, 2)
    shop.give(5, others=4)
    assert one.acquire(NAME, 1, 10) == Status.NO_ERROR
    assert one.acquire(b"own", 1, 1) == Status.NO_ERROR
    gets = [(NAME, False), (NAME, True), (b"own", True)]
    for number, (name, everywhere) in enumerate(gets):
        one.send(wire.get(number, name, everywhere))
    assert [wire.decode_consumption(each.body) for each in one.answers.others[-3:]] == [3, 7, 1]
    one.send(wire.dump(9, limits=True, everywhere=True))
    dump = {wire.decode_dump_entry(each.body) for each in one.answers.others if each.opaque == 9 and each.body}
    assert dump == {DumpEntry(NAME, 3, 3, 10, 7), DumpEntry(b"own", 1, 1, 1)}
    take = one.take(Permit(NAME, 1, 10))
    grant = one.of(take)
    assert isinstance(grant, wire.Grant)
    assert grant.left == (2,), "of all"


# ---- giving back ----------------------------------------------------------------------------------------------------


def test_unused_rights_are_reported_as_changes(shop: Shop) -> None:
    (one,) = shop.some(1)
    ask(one)
    shop.give(8)
    (change,) = shop.counters()
    assert change[1:-1] == (NAME, 10, 0, 0, 1, 1, 8)
    shop.answer(change, 1)
    assert shop.counters() == [], "nothing is new"
    (change,) = shop.counters(report=True)
    shop.answer(change, 1)
    assert one.release(NAME) == Status.NO_ERROR
    (change,) = shop.counters()
    assert change[1:-1] == (NAME, 10, 0, 0, 0, 1, 1)
    shop.answer(change, 0)
    assert shop.counters(report=True) == [], "it is forgotten"


def test_rights_shrink_to_what_the_answer_allows(shop: Shop) -> None:
    one, other = shop.some(2)
    ask(one)
    shop.give(8)
    (change,) = shop.counters()
    shop.update(kept=[(change.number, 2, False)])
    assert other.acquire(NAME, 1, 10) == Status.NO_ERROR
    ask(other)
    assert len(statuses(other)) == 1
    shop.answer(change, 3)
    assert len(statuses(other)) == 1, "it was asked after the call was made"
    shop.give(3)
    assert statuses(other) == [Status.NO_ERROR, Status.NO_ERROR]


def test_freed_rights_are_given_up_while_other_daemons_wait(shop: Shop) -> None:
    one, other = shop.some(2)
    ask(one, 2)
    shop.give(2, yields=True)
    take = other.take(Permit(NAME, 1, 10), wait_ms=60_000)
    shop.give(2, yields=True, refused=True)
    assert one.release(NAME) == Status.NO_ERROR
    assert other.of(take) is None
    (change,) = shop.counters()
    assert change[1:-1] == (NAME, 10, 1, 1, 1, 2, 1)
    shop.answer(change, 2)
    assert other.has(take)


def test_idle_rights_that_others_wait_for_are_urgent(shop: Shop) -> None:
    (one,) = shop.some(1)
    ask(one)
    shop.give(8)
    assert shop.urgency() == ""
    shop.update(wanted=[NAME, b"shared:unknown", b"own"])
    assert shop.urgency() == "urgent"
    (change,) = shop.counters()
    assert change.rights == 1, "the others cannot be granted here any more"


def test_a_counter_with_rights_is_not_freed() -> None:
    shop = Shop(buckets=2)
    one, other = shop.some(2)
    ask(one)
    shop.give(8)
    assert one.release(NAME) == Status.NO_ERROR
    assert other.acquire(b"own", 1, 1) == Status.NO_ERROR
    assert other.acquire(b"more", 1, 1) == Status.OUT_OF_MEMORY
    shop.give(0)
    assert other.acquire(b"more", 1, 1) == Status.NO_ERROR


# ---- leases ---------------------------------------------------------------------------------------------------------


def test_rights_end_with_the_lease(shop: Shop) -> None:
    (one,) = shop.some(1)
    ask(one)
    shop.give(8)
    shop.pump.ticking = False  # the first thing after a long stop is a request
    shop.wait(LEASE_MS)
    ask(one)
    assert len(statuses(one)) == 1
    shop.pump.ticking = True
    shop.pump.settle()
    shop.lease(PART)
    (change,) = shop.counters()
    assert (change.used, change.rights) == (1, 0)
    shop.answer(change, 2)
    assert statuses(one) == [Status.NO_ERROR, Status.NO_ERROR]


@pytest.mark.parametrize("lose", [False, True])
def test_connections_are_dropped_with_the_lease(lose: bool) -> None:
    shop = Shop(drops=True)
    one, other, idle = shop.some(3)
    ask(one)
    shop.give(8)
    assert other.acquire(b"own") == Status.NO_ERROR
    if lose:
        shop.update(lease_ns=0)
    else:
        shop.wait(LEASE_MS)
    shop.pump.settle()
    assert [each.session.dropped for each in (one, other, idle)] == [True, False, False]
    assert shop.limits.figures()["dropped"] == 1
    shop.lease(PART)
    ask(idle, 10)
    (change,) = shop.counters()
    assert change.used == 0, "the permit was given back"
    shop.answer(change, 10)
    assert statuses(idle) == [Status.NO_ERROR]


def test_a_lease_ends_once() -> None:
    """Permits granted without a lease, as the authority is unreachable, are not lost with the last lease."""
    shop = Shop("open", drops=True)
    shop.wait(LEASE_MS)
    shop.update(is_reachable=False)
    (one,) = shop.some(1)
    assert one.acquire(NAME, 1, 10) == Status.NO_ERROR
    shop.update(lease_ns=0)
    shop.pump.settle()
    assert not one.session.dropped


def test_a_connection_in_its_grace_time_ends_with_the_lease() -> None:
    shop = Shop(drops=True)
    shop.store.limit_resumptions(3600)
    (one,) = shop.some(1)
    one.resume(3_600_000)
    ask(one)
    shop.give(8)
    one.close()
    assert shop.store.snapshot()["busy"] == 1
    shop.update(lease_ns=0)
    shop.wait(100)
    assert shop.store.snapshot()["busy"] == 0


def test_permits_stay_in_use_if_connections_are_not_dropped(shop: Shop) -> None:
    (one,) = shop.some(1)
    ask(one)
    shop.give(8)
    shop.wait(LEASE_MS)
    shop.lease(PART)
    (change,) = shop.counters(report=True)
    assert (change.used, change.rights) == (1, 0)
    shop.answer(change, 0, others=10)
    assert one.release(NAME) == Status.NO_ERROR


def test_all_holders_are_dropped_although_a_new_lease_begins_meanwhile() -> None:
    """Connections that were granted something under the new lease are not dropped."""
    shop = Shop(drops=True, holdings=4096, holdings_per_connection=4096)
    holder, other = shop.some(2)
    ask(holder, 2)
    shop.give(8)
    crowd = shop.some(3)
    for number in range(3000):  # more holdings than a tick looks at
        assert other.acquire(b"own", 1, 1 << 20) == Status.NO_ERROR or number
        crowd[number % 3].acquire(b"own", 1, 1 << 20)
    shop.wait(500)
    shop.pump.ticking = False
    shop.update(lease_ns=0)
    shop.lease(PART)
    shop.wait(500)
    ask(other)
    shop.give(8)
    shop.pump.ticking = True
    shop.pump.settle()
    assert [each.session.dropped for each in (holder, other, *crowd)] == [True, False, False, False, False]
    assert shop.limits.figures()["dropped"] == 1


# ---- the authority cannot be reached --------------------------------------------------------------------------------


@pytest.mark.parametrize(("policy", "granted"), [("closed", 0), ("share", 3), ("open", 10)])
def test_permits_granted_without_the_authority(policy: str, granted: int) -> None:
    shop = Shop(policy)
    shop.update(daemons=3)
    one, other = shop.some(2)
    ask(other)
    shop.wait(LEASE_MS)
    shop.update(is_reachable=False)
    shop.pump.settle()
    assert statuses(other) == [REFUSED if policy == "closed" else Status.NO_ERROR], "it waited for an answer"
    other.close()
    shop.pump.settle()
    assert [one.acquire(NAME, 1, 10) for _ in range(11)] == [Status.NO_ERROR] * granted + [REFUSED] * (11 - granted)
    shop.update(is_reachable=True)
    shop.lease(PART)
    used = sum(change.used for change in shop.counters(report=True))
    assert used == granted, "the authority hears of it"


def test_rights_are_used_while_the_authority_cannot_be_reached(shop: Shop) -> None:
    (one,) = shop.some(1)
    ask(one)
    shop.give(2)
    shop.update(is_reachable=False)
    assert one.acquire(NAME, 1, 10) == Status.NO_ERROR
    assert one.acquire(NAME, 1, 10) == REFUSED


def test_names_refused_without_the_authority_use_no_records() -> None:
    shop = Shop(buckets=2)
    (one,) = shop.some(1)
    for partition in range(PARTITIONS):
        shop.update(partition, is_reachable=False)
    assert {one.acquire(b"shared:%d" % number, 1, 10) for number in range(10)} == {REFUSED}


def test_a_take_that_waited_without_the_authority_is_requested_afterwards(shop: Shop) -> None:
    (one,) = shop.some(1)
    shop.update(is_reachable=False)
    take = one.take(Permit(NAME, 1, 10), wait_ms=60_000)
    assert one.of(take) is None
    shop.update(is_reachable=True)
    assert shop.urgency() == "urgent"
    shop.give(1)
    assert one.has(take)


def test_a_call_without_an_answer_is_made_again(shop: Shop) -> None:
    (one,) = shop.some(1)
    ask(one)
    (change,) = shop.counters()
    shop.update(forgotten=[change.number])
    assert shop.urgency() == "urgent"
    shop.give(1)
    assert statuses(one) == [Status.NO_ERROR]


def test_rights_that_may_have_been_granted_are_reported_after_their_request_is_gone(shop: Shop) -> None:
    (one,) = shop.some(1)
    ask(one)
    (change,) = shop.counters()
    one.close()
    shop.update(forgotten=[change.number])
    assert shop.urgency() == "urgent"
    (change,) = shop.counters()
    assert change[1:] == (NAME, 10, 0, 0, 0, 0, 0, False)
    shop.answer(change, 0)
    assert shop.counters(report=True) == []


def test_limits_of_the_server_apply_to_shared_counters(shop: Shop) -> None:
    text = b'{"permits": [{"name": "shared:*", "maximum": 5}]}'
    shop.store.load_limits(parse_limits(text))
    one, other = shop.some(2)
    ask(one, 1, 10)
    (change,) = shop.counters()
    assert change.maximum == 5
    shop.answer(change, 3)
    assert statuses(one) == [Status.NO_ERROR]
    take = other.take(Permit(NAME, 3, 10), wait_ms=60_000)
    (change,) = shop.counters()
    assert change[2:5] == (5, 3, 3)
    shop.answer(change, 4)
    assert other.has(take)


def test_rates_of_the_server_apply_to_shared_rates(shop: Shop) -> None:
    text = b'{"rates": [{"name": "shared:*", "limit": 10, "period": 1, "burst": 4}]}'
    shop.store.load_limits(parse_limits(text))
    (one,) = shop.some(1)
    take = one.take(Rate(NAME, 1), wait_ms=60_000)
    change = of_rate(shop)
    assert change[2:5] == (10, SECOND, 4)
    pour(shop, change, 1)
    assert one.has(take)


# ---- connections that end meanwhile ---------------------------------------------------------------------------------


@pytest.mark.parametrize("half", [False, True])
def test_a_connection_that_ends_while_it_is_blocked(shop: Shop, half: bool) -> None:
    one, other = shop.some(2)
    ask(one)
    ask(other)
    if half:
        one.peer.half_close()
        assert statuses(one) == [REFUSED], "it cannot wait any more"
    else:
        one.close()
    shop.give(10)
    assert statuses(other) == [Status.NO_ERROR]
    assert other.acquire(NAME, 9, 10) == Status.NO_ERROR


def test_a_drain_refuses_the_requests_of_blocked_connections(shop: Shop) -> None:
    one, other = shop.some(2)
    ask(one)
    take = other.take(wire.Permit(NAME, 1, 10))
    assert [each.session.state for each in (one, other)] == [2, 2], "parked"
    shop.store.begin_drain()
    shop.pump.settle()
    assert statuses(one) == [REFUSED]
    assert other.of(take) == wire.Shortage(0, 10, 10, None, "Draining")
    ask(one)
    assert statuses(one)[1:] == [REFUSED], "nobody is asked any more"


def test_after_a_stop_no_connection_is_blocked(shop: Shop) -> None:
    (one,) = shop.some(1)
    shop.store.part()
    ask(one)
    assert statuses(one) == [REFUSED]
    assert one.answers.others[-1].body == b"Draining"


def test_a_blocked_connection_is_taken_over(shop: Shop) -> None:
    shop.store.limit_resumptions(3600)
    one, other = shop.some(2)
    resumption = one.resume(3_600_000)
    assert isinstance(resumption, wire.Resumption)
    ask(one)
    assert isinstance(other.resume(3_600_000, resumption.token, 1), wire.Resumption)
    assert statuses(one)[1:] == [REFUSED], "nothing was waited for"
    shop.give(0)


def test_changes_that_do_not_fit_into_a_call_follow_at_once(shop: Shop) -> None:
    names = [name for name in (b"shared:%d" % i for i in range(100)) if partition_of(name) == PART]
    one, other = shop.some(2)
    ask(one, name=names[0])
    ask(other, name=names[1])
    (change,) = shop.changes(most=1, scope=Scope.BLOCKING).blocking
    assert shop.urgency() == "urgent"
    shop.answer(change, 1)
    (change,) = shop.changes(most=1, scope=Scope.BLOCKING).blocking
    shop.answer(change, 1)
    assert [statuses(each) for each in (one, other)] == [[Status.NO_ERROR], [Status.NO_ERROR]]


def test_a_full_report_has_each_counter_once() -> None:
    """Also those that are requested meanwhile, or are gone when their turn comes."""
    shop = Shop(buckets=64)
    names = [name for name in (b"shared:%d" % i for i in range(200)) if partition_of(name) == PART][:7]
    one, other = shop.some(2)
    for name in names:
        ask(one, name=name)
        for change in shop.counters():
            shop.answer(change, change.used + change.first)
    told = []
    changes = shop.changes(most=2, scope=Scope.REPORT)
    assert not changes.is_complete
    told += changes.background
    for change in changes.background:
        shop.answer(change, 1)
    ask(other, 2, name=names[-1])  # the last one of the report
    assert one.release(names[3]) == Status.NO_ERROR
    while not changes.is_complete:
        changes = shop.changes(most=2, scope=Scope.REST)
        told += changes.blocking + changes.background
        for change in changes.blocking + changes.background:
            shop.answer(change, change.used + change.first)
    assert sorted(change.name for change in told) == sorted(names)
    assert shop.changes(scope=Scope.REST).background == []
    assert len(shop.counters(report=True)) == 6


# ---- rates ----------------------------------------------------------------------------------------------------------

SECOND = 1_000_000  # us


def rate(amount: int = 1, limit: int = 100, burst: int = 100, on_death: OnDeath = OnDeath.FINAL) -> Rate:
    return Rate(NAME, amount, limit, SECOND, burst, on_death)


def rates(shop: Shop) -> list[RateChange]:
    changes = shop.changes()
    assert not changes.blocking + changes.background
    return changes.rates


def of_rate(shop: Shop) -> RateChange:
    (change,) = rates(shop)
    return change


def pour(shop: Shop, change: RateChange, units: int, wait_us: int = 0) -> None:
    """Answers the only call with these units."""
    shop.update(rates=[RateUpdate(change.number, units, change.first, wait_us)])


def give_back(shop: Shop, change: RateChange) -> None:
    """Makes a call that gives all units back, or says that more were used, and answers it."""
    if change.units > 0:
        shop.update(kept=[(change.number, 0, False)])
    pour(shop, change, -min(change.units, 0))


def test_missing_units_of_a_rate_are_requested(shop: Shop) -> None:
    (one,) = shop.some(1)
    take = one.take(rate(2))
    assert one.of(take) is None
    assert shop.urgency() == "urgent"
    change = of_rate(shop)
    assert change[1:] == (NAME, 100, SECOND, 100, 2, 2, 0, 0)
    pour(shop, change, 5)
    assert one.has(take)
    assert one.has(one.take(rate(3)))
    take = one.take(rate(1))
    assert one.of(take) is None
    change = of_rate(shop)
    assert change[5:] == (1, 1, 0, 5)
    pour(shop, change, 0, 250_000)
    shortage = one.of(take)
    assert isinstance(shortage, wire.Shortage)
    assert shortage.retry_ms == 250
    assert isinstance(one.of(one.take(rate(1))), wire.Shortage), "it is known that there is none"
    shop.wait(250)
    assert one.of(one.take(rate(1))) is None


def test_a_waiting_take_requests_units_when_they_will_be_there(shop: Shop) -> None:
    (one,) = shop.some(1)
    take = one.take(rate(2), wait_ms=60_000)
    change = of_rate(shop)
    assert change[5:] == (2, 2, 0, 0)
    pour(shop, change, 0, 250_000)
    assert shop.urgency() == ""
    shop.wait(260)
    assert shop.urgency() == "urgent"
    pour(shop, of_rate(shop), 2)
    assert one.has(take)


def test_unused_units_are_given_back(shop: Shop) -> None:
    (one,) = shop.some(1)
    one.take(rate(2))
    pour(shop, of_rate(shop), 10)
    change = of_rate(shop)
    assert change[5:] == (0, 0, 8, 2)
    give_back(shop, change)
    assert rates(shop) == []
    shop.wait(5000)
    assert shop.store.snapshot()["rates"] == 0


def test_a_rate_with_units_is_kept(shop: Shop) -> None:
    (one,) = shop.some(1)
    one.take(rate(2))
    pour(shop, of_rate(shop), 10)
    shop.wait(5000)
    assert shop.store.snapshot()["rates"] == 1
    change = of_rate(shop)
    give_back(shop, change)
    shop.wait(5000)
    assert shop.store.snapshot()["rates"] == 0


@pytest.mark.parametrize(("used", "left"), [(0, 10), (2, 8), (12, -2)])
def test_settling_changes_the_units(shop: Shop, used: int, left: int) -> None:
    (one,) = shop.some(1)
    take = one.take(rate(2, on_death=OnDeath.REFUNDED))
    pour(shop, of_rate(shop), 10)
    assert one.settle(take, NAME, used) == Status.NO_ERROR
    change = of_rate(shop)
    assert change.units == left
    give_back(shop, change)
    assert rates(shop) == []


@pytest.mark.parametrize("is_settled", [False, True])
def test_only_units_of_the_authority_go_back_to_it(is_settled: bool) -> None:
    """Units granted while it could not be reached do not; those that it had given before do."""
    shop = Shop("open")
    one, other = shop.some(2)
    first = one.take(rate(2, on_death=OnDeath.REFUNDED))
    pour(shop, of_rate(shop), 2)
    shop.update(is_reachable=False)
    second = other.take(rate(3, on_death=OnDeath.REFUNDED))
    assert one.has(first)
    assert other.has(second)
    shop.update(is_reachable=True)
    for taker, take in ((one, first), (other, second)):
        if is_settled:
            assert taker.settle(take, NAME, 0) == Status.NO_ERROR
        else:
            taker.close()
    shop.pump.settle()
    assert of_rate(shop).units == 2


def test_units_used_beyond_a_charge_are_reported_after_an_outage() -> None:
    shop = Shop("open")
    (one,) = shop.some(1)
    shop.update(is_reachable=False)
    take = one.take(rate(2, on_death=OnDeath.REFUNDED))
    shop.update(is_reachable=True)
    assert one.settle(take, NAME, 7) == Status.NO_ERROR
    assert of_rate(shop).units == -5


def test_units_go_back_although_more_were_used_during_an_outage() -> None:
    shop = Shop("open")
    (one,) = shop.some(1)
    takes = [one.take(rate(2, on_death=OnDeath.REFUNDED)) for _ in range(2)]
    for _ in range(2):
        pour(shop, of_rate(shop), 2)
    assert one.settle(takes[0], NAME, 9) == Status.NO_ERROR
    shop.update(is_reachable=False)
    assert one.settle(takes[1], NAME, 1) == Status.NO_ERROR
    assert of_rate(shop).units == -6


@pytest.mark.parametrize(("policy", "granted"), [("share", 0), ("open", 10)])
def test_a_daemon_that_never_reached_the_authority_has_no_share(policy: str, granted: int) -> None:
    """It was started while the authority could not be reached."""
    shop = Shop(policy)
    (one,) = shop.some(1)
    shop.update(is_reachable=False)
    assert [one.acquire(NAME, 1, 10) for _ in range(10)] == [Status.NO_ERROR if granted else REFUSED] * 10
    assert [one.has(one.take(rate(1, 10, 10))) for _ in range(10)] == [granted > 0] * 10


@pytest.mark.parametrize(("policy", "granted"), [("closed", 0), ("share", 3), ("open", 10)])
def test_units_granted_without_the_authority(policy: str, granted: int) -> None:
    shop = Shop(policy)
    shop.update(daemons=3)
    (one,) = shop.some(1)
    shop.update(is_reachable=False)
    grants = [one.has(one.take(rate(1, 10, 10))) for _ in range(11)]
    assert grants == [True] * granted + [False] * (11 - granted)


# ---- other parts ----------------------------------------------------------------------------------------------------


def test_jobs_with_permits_use_shared_counters(shop: Shop) -> None:
    settled: list[tuple[int, bool]] = []
    lender = Lending.of(shop.store, lambda ticket, granted: settled.append((ticket, granted)), lambda: None)
    now_ns = shop.pump.now_ns
    assert not lender.acquire(NAME, 10, now_ns)
    assert lender.enqueue(NAME, 10, 7, now_ns)
    shop.give(1)
    assert settled == [(7, True)]
    assert lender.retake(NAME, 1, now_ns), "above the maximum"
    (change,) = shop.counters()
    assert (change.used, change.rights) == (2, 1)


def test_invalid_updates_are_refused(shop: Shop) -> None:
    with pytest.raises(ValueError, match="partition 16"):
        shop.changes(PARTITIONS)
    with pytest.raises(ValueError, match="no call is under way"):
        shop.limits.apply(PART, Update(forgotten=[1]), shop.pump.now_ns)
    leased_limits(Desk().store, bytes(PREFIX_MAX))
    with pytest.raises(ValueError, match=f"{PREFIX_MAX + 1} bytes"):
        leased_limits(Desk().store, bytes(PREFIX_MAX + 1))
