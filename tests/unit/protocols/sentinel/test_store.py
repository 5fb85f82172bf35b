"""The sentinel protocol's store: tokens and their ids, their owners, sweeps, time, and calls to extensions."""

from __future__ import annotations

import itertools
import struct
from typing import TYPE_CHECKING, Any

import pytest

from conformance.sentinel.engine import TOKEN_KEY, make_store
from counterd._core import siphash
from counterd.protocols.sentinel import wire
from counterd.protocols.sentinel.wire import LEASE_MAX, Status
from unit.protocols.sentinel.rig import KEEP, MS, NOBODY, RELEASE, SECOND, START, SWEEP_NS, TICK, calls, rate, values

if TYPE_CHECKING:
    from collections.abc import Callable

    from unit.protocols.sentinel.rig import Rig

    MakeRig = Callable[..., Rig]

INT64_MAX = (1 << 63) - 1
INT32_MAX = (1 << 31) - 1
SLICE = 2048  # steps of a tick


# ---- tokens ---------------------------------------------------------------------------------------------------------


def test_a_token_id_is_the_keyed_hash_of_a_number(make_rig: MakeRig) -> None:
    rig = make_rig(calls(1), max_tokens=8)
    for number in range(1, 6):
        expected = siphash(TOKEN_KEY, number.to_bytes(8, "little"))
        assert rig.request(1) == (Status.OK, struct.unpack(">q", struct.pack(">Q", expected))[0])


def test_ids_are_unique_half_of_them_negative_and_never_0(make_rig: MakeRig) -> None:
    rig = make_rig(calls(1), max_tokens=20_000)
    ids = [rig.request(1)[1] for _ in range(10_000)]
    for id in ids[:5000]:
        assert rig.release(id) == Status.RELEASE_OK
    ids += [rig.request(1)[1] for _ in range(5000)]
    assert len(set(ids)) == 15_000
    assert 0 not in ids
    assert 7000 < sum(id < 0 for id in ids) < 8000


def test_the_number_of_tokens_is_bounded(make_rig: MakeRig) -> None:
    rig = make_rig(calls(1), calls(2, 1), max_tokens=4)
    ids = [rig.request(flow_id)[1] for flow_id in (1, 1, 1, 2)]
    assert rig.request(1) == (Status.NOT_AVAILABLE, 0)
    assert rig.request(2) == (Status.BLOCKED, 0)  # that comes first
    assert rig.request(3) == (Status.NO_RULE, 0)
    assert rig.figures("tokens", "tokens_max", "granted") == [4, 4, 4]
    assert rig.now_calls(1) == 3
    assert rig.release(ids[1]) == Status.RELEASE_OK
    assert rig.request(1)[0] == Status.OK
    assert rig.request(1) == (Status.NOT_AVAILABLE, 0)


def test_expired_tokens_make_room_when_they_are_swept(make_rig: MakeRig) -> None:
    rig = make_rig(calls(1, timeout_ms=500), max_tokens=4)
    for _ in range(4):
        rig.request(1)
    rig.now_ns += SECOND
    assert rig.request(1) == (Status.NOT_AVAILABLE, 0)
    rig.advance(SWEEP_NS)
    assert rig.request(1)[0] == Status.OK


@pytest.mark.parametrize("count", [0, -1, 1 << 31, INT64_MAX, -INT64_MAX])
def test_an_invalid_count_is_refused(make_rig: MakeRig, count: int) -> None:
    assert make_rig(calls(1)).request(1, count) == (Status.BAD_REQUEST, 0)


@pytest.mark.parametrize("flow_id", [0, -1, -INT64_MAX - 1])
def test_an_invalid_flow_id_is_refused(make_rig: MakeRig, flow_id: int) -> None:
    assert make_rig(calls(1)).request(flow_id) == (Status.BAD_REQUEST, 0)


def test_the_largest_counts(make_rig: MakeRig) -> None:
    """Of a flow, and of calls: the sum has 64 bits."""
    rig = make_rig(calls(INT64_MAX, 1e300), max_tokens=1000)
    ids = [rig.request(INT64_MAX, INT32_MAX)[1] for _ in range(1000)]
    assert rig.now_calls(INT64_MAX) == 1000 * INT32_MAX
    assert [rig.release(id) for id in ids] == [Status.RELEASE_OK] * 1000
    assert rig.now_calls(INT64_MAX) == 0


@pytest.mark.parametrize("token_id", [0, 1, -1, INT64_MAX, -INT64_MAX - 1])
def test_an_unknown_token_is_already_released(make_rig: MakeRig, token_id: int) -> None:
    rig = make_rig(calls(1))
    rig.request(1)
    assert rig.release(token_id) == Status.ALREADY_RELEASED
    assert rig.store.keep_token(token_id, NOBODY, rig.now_ns) == (Status.ALREADY_RELEASED, 0)
    assert rig.figures("tokens", "late") == [1, 0]


def test_a_token_without_an_owner_ends_with_its_lease(make_rig: MakeRig) -> None:
    rig = make_rig(calls(1, offline_ms=1), calls(2, offline_ms=1, strategy=KEEP))
    _, first = rig.request(1)
    _, second = rig.request(2)
    rig.advance(2 * SECOND - 1)
    assert rig.store.keep_token(first, NOBODY, rig.now_ns) == (Status.OK, 2000)
    rig.advance(2 * SECOND - 1)
    assert rig.now_calls(1) == 1
    rig.advance(3600 * SECOND)
    assert [rig.now_calls(1), rig.now_calls(2)] == [0, 1]
    assert rig.release(second) == Status.RELEASE_OK


def test_keeping_a_token_without_an_owner_makes_the_client_its_owner(make_rig: MakeRig) -> None:
    rig = make_rig(calls(1, strategy=KEEP))
    client = rig.connection()
    _, id = rig.request(1)
    assert client.ask(wire.keep(1, id)).status == Status.OK
    assert rig.store.leases(1)[0][0] != 0
    client.close()
    rig.advance(300 * MS + SWEEP_NS + TICK)
    assert rig.now_calls(1) == 0
    assert rig.figures("expired_offline", "expired_lease") == [1, 0]


def test_a_handle_of_an_ended_client_grants_nothing(make_rig: MakeRig) -> None:
    """Extensions have such handles; the client's number may be another's by then."""
    rig = make_rig(calls(1))
    asked: list[Any] = []
    rig.store.delegate(asked.extend, SECOND)
    client = rig.connection()
    client.send(wire.acquire(1, 1, 1))
    rig.settle()
    handle = asked[0].client
    assert rig.request(1, client=handle)[0] == Status.OK
    assert rig.store.leases(9)[0][0] == handle & 0xFFFFFFFF
    client.close()
    other = rig.connection()
    rig.settle()
    assert rig.request(1, client=handle) == (Status.NOT_AVAILABLE, 0)
    assert rig.store.keep_token(5, handle, rig.now_ns) == (Status.NOT_AVAILABLE, 0)
    assert rig.request(1, client=(1 << 64) - 1) == (Status.NOT_AVAILABLE, 0)
    assert rig.now_calls(1) == 1
    other.close()


# ---- sweeps ---------------------------------------------------------------------------------------------------------


def test_a_sweep_frees_a_bounded_number_the_earliest_first(make_rig: MakeRig) -> None:
    rig = make_rig(calls(1), max_tokens=100, sweep_max_tokens=10)
    ids = []
    for _ in range(25):
        ids.append(rig.request(1)[1])
        rig.advance(3 * MS)
    rig.advance(2 * SECOND - rig.now_ns + START)
    assert rig.now_calls(1) == 25
    rig.now_ns += SECOND  # all are over
    rig.settle()
    for left in (15, 5, 0):
        assert rig.now_calls(1) == left
        rig.store.tick(rig.now_ns + SWEEP_NS - 1)
        assert rig.now_calls(1) == left  # the next comes after the interval
        rig.advance(SWEEP_NS)
    assert [rig.release(id) for id in ids] == [Status.ALREADY_RELEASED] * 25
    assert rig.figures("late", "expired_lease") == [0, 25]


def test_sweeps_happen_each_interval_while_tokens_are_expired(make_rig: MakeRig) -> None:
    interval = 50 * MS
    rig = make_rig(calls(1, timeout_ms=500), sweep_interval_ns=interval)
    begun = [START + delay * MS for delay in (0, 10, 20, 90, 300)]
    for moment in begun:
        rig.advance(moment - rig.now_ns)
        rig.request(1)
    sweeps = []
    while rig.now_calls(1):
        rig.advance(max(rig.store.next_deadline(), rig.now_ns + 1) - rig.now_ns)
        over = sum(moment + SECOND <= rig.now_ns for moment in begun)
        late = sum(moment + SECOND + interval + TICK <= rig.now_ns for moment in begun)
        assert late <= len(begun) - rig.now_calls(1) <= over
        sweeps.append((rig.now_ns, rig.now_calls(1)))
    freed = [now for (now, left), (_, before) in zip(sweeps[1:], sweeps, strict=False) if left != before]
    assert all(later - sooner >= interval for sooner, later in itertools.pairwise(freed))
    assert len(sweeps) < 20
    assert rig.store.next_deadline() == -1


def test_a_sweep_takes_no_longer_than_its_limit(make_rig: MakeRig) -> None:
    """In slices, between which others are served; the rest is left for the next sweep."""
    rig = make_rig(calls(1), max_tokens=20_000, sweep_max_duration_ns=10 * MS)
    for _ in range(20_000):
        rig.request(1)
    rig.now_ns += 3 * SECOND
    rig.store.tick(rig.now_ns)
    first = 20_000 - rig.now_calls(1)
    assert 0 < first <= SLICE
    assert rig.store.next_deadline() <= rig.now_ns  # it goes on
    rig.store.tick(rig.now_ns + 10 * MS)
    left = rig.now_calls(1)
    assert 20_000 - left <= 2 * SLICE
    assert rig.store.next_deadline() == rig.now_ns + SWEEP_NS
    rig.store.tick(rig.now_ns + SWEEP_NS - 1)
    assert rig.now_calls(1) == left
    rig.store.tick(rig.now_ns + SWEEP_NS)
    assert rig.now_calls(1) < left


def test_many_expired_tokens_are_freed_in_slices(make_rig: MakeRig) -> None:
    rig = make_rig(calls(1), calls(2, 5), max_tokens=20_000)
    client, other = rig.connection(), rig.connection()
    client.acquire_many(1, 15_000)
    client.close()
    rig.settle()
    rig.now_ns += 300 * MS + TICK
    ticks = 0
    while 0 <= rig.store.next_deadline() <= rig.now_ns:
        before = rig.now_calls(1)
        rig.store.tick(rig.now_ns)
        assert before - rig.now_calls(1) <= SLICE
        assert other.ask(wire.release(1, other.acquire(2))).status == Status.RELEASE_OK
        ticks += 1
        assert ticks < 50
    assert ticks >= 7
    assert rig.figures("tokens", "expired_offline", "released") == [0, 15_000, ticks]


def test_many_tokens_of_an_ended_client_are_handled_in_slices(make_rig: MakeRig) -> None:
    """Their time offline counts from the same moment for all, whenever a tick reaches them."""
    rig = make_rig(calls(1), max_tokens=20_000)
    client, other = rig.connection(), rig.connection()
    ids = client.acquire_many(1, 10_000)
    client.close()
    gone = rig.now_ns
    assert rig.store.next_deadline() == 0
    rig.store.tick(gone)
    assert rig.store.next_deadline() == 0
    assert other.ask(wire.release(1, ids[0])).status == Status.RELEASE_OK
    assert other.ask(wire.keep(1, ids[9999])).status == Status.OK
    assert other.ask(wire.release(1, ids[5000])).status == Status.RELEASE_OK
    for id in ids[7900:8000]:  # the next to be looked at is among them
        assert rig.release(id) == Status.RELEASE_OK
    rig.store.audit()
    rig.now_ns = gone + 300 * MS
    assert other.ask(wire.release(1, ids[1])).status == Status.ALREADY_RELEASED
    assert other.ask(wire.keep(1, ids[9998])).status == Status.ALREADY_RELEASED
    rig.store.audit()
    rig.advance(SWEEP_NS)
    assert rig.now_calls(1) == 1
    assert rig.figures("expired_offline", "late") == [9897, 2]


def test_clients_that_had_the_same_number_are_distinguished(make_rig: MakeRig) -> None:
    """The number of an ended connection is soon another's, whose tokens are its own."""
    rig = make_rig(calls(1, offline_ms=100), max_tokens=200)
    for number in range(20):
        client = rig.connection()
        client.acquire_many(1, number)
        client.close()
        if number % 3:
            rig.settle()
    rig.store.audit()
    rig.advance(100 * MS + SWEEP_NS + TICK)
    assert rig.figures("tokens", "expired_offline") == [0, sum(range(20))]


def test_a_client_whose_tokens_are_released_before_the_tick(make_rig: MakeRig) -> None:
    """Its owner record is in the queue of ended ones, and is handled once."""
    rig = make_rig(calls(1))
    client = rig.connection()
    id = client.acquire(1)
    client.close()
    assert rig.release(id) == Status.RELEASE_OK
    rig.settle()
    rig.store.audit()


# ---- time -----------------------------------------------------------------------------------------------------------


def test_the_longest_lease(make_rig: MakeRig) -> None:
    rig = make_rig(calls(1, timeout_ms=INT32_MAX, offline_ms=INT32_MAX), calls(2, timeout_ms=1))
    client = rig.connection()
    id = client.acquire(1)
    client.acquire(2)
    assert client.ask(wire.keep(1, id)).left_ms == LEASE_MAX
    client.close()
    rig.advance(INT32_MAX * MS - 1)
    assert rig.now_calls(1) == 1
    rig.advance(1 + SWEEP_NS)
    assert rig.now_calls(1) == 0


@pytest.mark.parametrize("strategy", [0, RELEASE, KEEP])
def test_leases_near_the_end_of_the_clock(make_rig: MakeRig, strategy: int) -> None:
    """A lease that would end behind it never ends."""
    rig = make_rig(calls(1, strategy=strategy, timeout_ms=5000), values(3), rate(4, 3), start=INT64_MAX - SECOND)
    client = rig.connection()
    id = client.acquire(1)
    assert client.ask(wire.flow(1, 4, 1)).remaining == 2
    assert client.ask(wire.param_flow(1, 3, 1, ["v"])).remaining == 2
    response = client.ask(wire.keep(1, id))
    assert response.status == Status.OK
    assert 999 <= response.left_ms <= 1000
    rig.now_ns = INT64_MAX - 1
    rig.store.tick(rig.now_ns)
    assert client.ask(wire.flow(1, 4, 3)).status == Status.OK
    assert client.ask(wire.keep(1, id)).status == Status.OK
    client.close()
    rig.store.tick(rig.now_ns)
    assert rig.now_calls(1) == 1
    assert rig.release(id) == Status.RELEASE_OK


def test_leases_at_the_beginning_of_the_clock(make_rig: MakeRig) -> None:
    rig = make_rig(calls(1, timeout_ms=1, offline_ms=1), values(3, 1), rate(4, 2), start=0)
    client = rig.connection()
    id = client.acquire(1)
    assert client.ask(wire.flow(1, 4, 2)).status == Status.OK
    assert client.ask(wire.flow(1, 4, 1, priority=True)).status == Status.BLOCKED
    assert client.ask(wire.param_flow(1, 3, 1, ["v"])).status == Status.OK
    assert client.ask(wire.param_flow(1, 3, 1, ["v"])).status == Status.BLOCKED
    rig.now_ns = 2 * MS - 1
    assert client.ask(wire.keep(1, id)).left_ms == 2
    rig.advance(SECOND)
    assert rig.figures("tokens", "expired_lease") == [0, 1]
    assert client.ask(wire.flow(1, 4, 2)).status == Status.OK
    assert client.ask(wire.param_flow(1, 3, 1, ["v"])).status == Status.OK


@pytest.mark.parametrize("uptime_ns", [0, 12345, 3600 * SECOND, 90 * 86400 * SECOND, 3 * 365 * 86400 * SECOND + 1])
@pytest.mark.parametrize("lasting_ms", [1, 70, 5000, 3_600_000])
def test_no_deadline_of_a_new_store_is_in_the_past(make_rig: MakeRig, uptime_ns: int, lasting_ms: int) -> None:
    """However long the machine is up: of a lease, and of a value's window."""
    for ask in ("lease", "value"):
        rig = make_rig(
            calls(1, timeout_ms=lasting_ms), values(2, samples=1, window_ms=lasting_ms), start=uptime_ns,
            now_ns=uptime_ns,
        )  # fmt: skip
        assert rig.store.next_deadline() == -1
        client = rig.connection()
        request = wire.acquire(1, 1, 1) if ask == "lease" else wire.param_flow(1, 2, 1, ["v"])
        assert client.ask(request).status == Status.OK
        deadlines = []
        while (deadline := rig.store.next_deadline()) != -1:
            assert rig.now_ns <= deadline <= rig.now_ns + 2 * lasting_ms * MS + SWEEP_NS + 2 * TICK
            deadlines.append(deadline)
            rig.now_ns = deadline + 1  # so that another at the same moment is in the past
            rig.store.tick(deadline)
        assert len(deadlines) <= 9
        assert rig.figures("tokens", "param_values") == [0, 0]


def test_an_earlier_lease_moves_the_next_deadline(make_rig: MakeRig) -> None:
    rig = make_rig(calls(1, timeout_ms=50_000), calls(2, timeout_ms=5))
    assert rig.store.next_deadline() == -1
    rig.request(1)
    rig.settle()
    assert START < rig.store.next_deadline() <= START + 100 * SECOND + TICK
    rig.request(2)
    assert START < rig.store.next_deadline() <= START + SWEEP_NS  # as there was one just now


def test_a_lease_ends_exactly_at_its_time(make_rig: MakeRig) -> None:
    end_ns = START // TICK * TICK + 1000 * TICK  # a tick begins there
    rig = make_rig(calls(1, timeout_ms=200, strategy=RELEASE), start=end_ns - 200 * MS)
    assert rig.request(1)[0] == Status.OK
    rig.now_ns = end_ns
    rig.store.tick(end_ns)
    assert rig.now_calls(1) == 0


def test_automatic_renewal_does_not_depend_on_the_time_of_the_tick(make_rig: MakeRig) -> None:
    rig = make_rig(calls(1, timeout_ms=200, offline_ms=60_000, strategy=KEEP))
    client = rig.connection()
    id = client.acquire(1)
    rig.now_ns += 10 * SECOND + 150 * MS  # its 26th lease, which ends at 10.4 s
    client.close()
    rig.now_ns += 250 * MS - 1
    rig.settle()
    assert rig.now_calls(1) == 1
    rig.now_ns += 1
    assert rig.release(id) == Status.ALREADY_RELEASED


# ---- rules ----------------------------------------------------------------------------------------------------------


def test_a_flow_without_rule_and_tokens_is_freed(make_rig: MakeRig) -> None:
    rig = make_rig(calls(1), calls(2), rate(3))
    _, id = rig.request(1)
    assert rig.figures("rules_flow", "rules_param") == [3, 0]
    rig.load(calls(2))
    assert rig.figures("rules_flow") == [1]
    assert rig.store.flow(3) is None
    assert rig.store.flow(1)["now_calls"] == 1
    assert rig.release(id) == Status.NO_RULE
    assert rig.store.flow(1) is None
    assert rig.release(id) == Status.ALREADY_RELEASED


def test_tokens_whose_rule_is_gone_end_with_their_lease(make_rig: MakeRig) -> None:
    rig = make_rig(calls(1), calls(2, strategy=KEEP))
    client = rig.connection()
    ids = [client.acquire(1), client.acquire(2)]
    rig.load()
    rig.advance(2 * SECOND + SWEEP_NS + TICK)
    assert [rig.now_calls(1), rig.now_calls(2)] == [0, 1]
    client.close()
    rig.advance(300 * MS)
    assert [rig.release(id) for id in ids] == [Status.ALREADY_RELEASED] * 2
    assert rig.store.flow(2) is None


def test_keys_of_the_wrong_size_are_refused() -> None:
    with pytest.raises(ValueError, match="token_key must have 16 bytes, not 15"):
        make_store(token_key=bytes(15))


# ---- figures --------------------------------------------------------------------------------------------------------


def test_the_counts_of_tokens(make_rig: MakeRig) -> None:
    rig = make_rig(calls(7), calls(8, 1))
    client, other = rig.connection(), rig.connection()
    ids = [client.acquire(7, 2), client.acquire(7, 3), other.acquire(8)]
    assert other.ask(wire.acquire(1, 8, 4)).status == Status.BLOCKED
    assert other.ask(wire.keep(1, ids[0])).status == Status.OK
    rig.request(7)
    leases = rig.store.leases(10)
    assert [(name, amount, since) for _, name, amount, since in leases] == [
        (b"flow 7", 2, START // (SECOND // 10)),
        (b"flow 7", 3, START // (SECOND // 10)),
        (b"flow 8", 1, START // (SECOND // 10)),
        (b"flow 7", 1, START // (SECOND // 10)),
    ]
    numbers = [connection for connection, *_ in leases]
    assert numbers[0] == numbers[2] != numbers[1]
    assert numbers[3] == 0
    assert [rig.store.holdings_of(number) for number in numbers[:2]] == [2, 1]
    assert rig.store.leases(2) == leases[:2]
    assert rig.store.holdings_of(1 << 31) == 0
    assert rig.store.held() == 4
    flow = rig.store.flow(7)
    assert [flow["now_calls"], flow["tokens"], flow["passed"], flow["blocked"]] == [6, 3, 6, 0]
    assert rig.store.flow(8)["blocked"] == 4
    assert rig.store.flow(9) is None


def test_a_drain_grants_no_tokens_and_waits_for_the_held_ones(make_rig: MakeRig) -> None:
    rig = make_rig(calls(1), rate(2, 3))
    client = rig.connection()
    ids = [client.acquire(1) for _ in range(3)]
    rig.store.begin_drain()
    assert client.ask(wire.acquire(1, 1, 1)).status == Status.NOT_AVAILABLE
    assert rig.request(1) == (Status.NOT_AVAILABLE, 0)
    assert client.ask(wire.flow(1, 2, 1)).status == Status.OK
    assert client.ask(wire.keep(1, ids[0])).status == Status.OK
    assert rig.store.held() == 3
    assert client.ask(wire.release(1, ids[0])).status == Status.RELEASE_OK
    client.close()
    assert rig.store.held() == 2
    rig.advance(300 * MS + SWEEP_NS)
    assert rig.store.held() == 0


def test_changed_limits_apply_at_once(make_rig: MakeRig) -> None:
    rig = make_rig(calls(1, timeout_ms=50), rate(2, 100))
    client = rig.connection()
    settings = {"sweep_interval_ns": 10 * SECOND, "sweep_max_tokens": 1, "sweep_max_duration_ns": SECOND}
    rig.store.set_limits(max_allowed_qps=2, **settings)
    statuses = [client.ask(wire.flow(1, 2, 1)).status for _ in range(3)]
    assert statuses == [Status.OK, Status.OK, Status.TOO_MANY_REQUESTS]
    client.acquire_many(1, 3)
    for left in (2, 1, 0):
        rig.advance(10 * SECOND)
        assert rig.now_calls(1) == left


# ---- extensions: a token service ------------------------------------------------------------------------------------


def test_a_token_service_is_called_by_the_next_tick(served: Rig, asked: list[Any]) -> None:
    client = served.connection()
    client.send(wire.acquire(10, 1, 3, prioritized=True), wire.flow(11, 2, 1), wire.release(12, -5), wire.keep(13, 6))
    assert [response.xid for response in client.told()] == [11]  # at once, and before what came before it
    assert asked == []
    assert served.store.next_deadline() == 0
    served.settle()
    kinds = [tuple(call)[1:6] for call in asked]
    assert kinds == [("request", 1, 3, True, 0), ("release", 0, 0, False, -5), ("keep", 0, 0, False, 6)]
    assert len({call.ticket for call in asked}) == 3
    assert {(call.client, call.address) for call in asked} == {(asked[0].client, "unix")}
    for call, answer in zip(
        reversed(asked), [(Status.OK, 1234), (Status.RELEASE_OK, 9), (Status.OK, -77)], strict=True
    ):
        served.store.answer(call.ticket, *answer, served.now_ns)
    assert client.told() == []
    served.settle()
    told = [(response.xid, response.status, response.left_ms, response.token_id) for response in client.told()]
    assert told == [(13, 0, 1234, 0), (12, 6, 0, 0), (10, 0, 0, -77)]
    assert served.now_calls(1) == 0


def test_the_store_refuses_a_nested_call(served: Rig, asked: list[Any]) -> None:
    """The address of a client is asked for within a call."""
    client = served.connection()
    refused = []

    class Owner:
        @staticmethod
        def origin() -> str:
            for call in (served.store.snapshot, lambda: client.send(wire.keep(1, 1)), lambda: served.request(1)):
                with pytest.raises(RuntimeError, match="in progress") as caught:
                    call()
                refused.append(caught.value)
            return "somewhere"

    client.session.owner = Owner
    client.send(wire.acquire(1, 1, 1))
    assert len(refused) == 3
    served.settle()
    assert asked[0].address == "somewhere"


def test_invalid_requests_do_not_reach_the_token_service(served: Rig, asked: list[Any]) -> None:
    client = served.connection()
    for request in (wire.acquire(1, 0, 1), wire.acquire(1, 1, 0), wire.frame(1, 4, b"short"), wire.frame(1, 5)):
        assert client.ask(request).status == Status.BAD_REQUEST
    served.settle()
    assert asked == []


@pytest.mark.parametrize("status", [Status.BLOCKED, Status.NO_RULE, Status.NOT_AVAILABLE])
def test_a_refusal_of_a_token_service_has_no_token(served: Rig, asked: list[Any], status: Status) -> None:
    client = served.connection()
    client.send(wire.acquire(1, 1, 1))
    served.settle()
    served.store.answer(asked[0].ticket, status, 99, served.now_ns)
    served.settle()
    (response,) = client.told()
    assert (response.status, response.token_id) == (status, 0)
    assert ("acquire", status.name.lower(), 1) in served.store.outcomes()


def test_a_token_service_that_does_not_answer_in_time(served: Rig, asked: list[Any]) -> None:
    """The client gets 5; a token that the service grants after that is given back to it."""
    client = served.connection()
    client.send(wire.acquire(1, 1, 1), wire.release(2, 7), wire.keep(3, 8))
    served.settle()
    served.advance(SECOND - 1)
    assert client.told() == []
    assert served.figures("calls_pending", "calls_overdue") == [3, 0]
    served.advance(1)
    assert [response.status for response in client.told()] == [Status.NOT_AVAILABLE] * 3
    assert served.figures("calls_pending", "calls_overdue") == [0, 3]
    tickets = [call.ticket for call in asked]
    asked.clear()
    for ticket in tickets:
        served.store.answer(ticket, Status.OK, 55, served.now_ns)
    served.settle()
    assert client.told() == []
    assert [(call.kind, call.token_id, call.client) for call in asked] == [("release", 55, NOBODY)]
    served.store.answer(asked[0].ticket, Status.RELEASE_OK, 0, served.now_ns)
    served.settle()
    assert client.told() == []
    assert served.figures("calls_pending") == [0]


def test_answers_without_a_call_are_ignored(served: Rig, asked: list[Any]) -> None:
    client = served.connection()
    client.send(wire.acquire(1, 1, 1))
    served.settle()
    for ticket in (0, asked[0].ticket + 1, (1 << 64) - 1):
        served.store.answer(ticket, Status.OK, 5, served.now_ns)
    served.settle()
    assert client.told() == []
    for token_id in (6, 7):
        served.store.answer(asked[0].ticket, Status.OK, token_id, served.now_ns)
    served.settle()
    assert [response.token_id for response in client.told()] == [6]
    assert len(asked) == 1


@pytest.mark.parametrize("status", [-100, -5, 12, 1 << 20])
def test_an_answer_with_an_invalid_status(served: Rig, asked: list[Any], status: int) -> None:
    client = served.connection()
    client.send(wire.acquire(1, 1, 1))
    served.settle()
    served.store.answer(asked[0].ticket, status, 5, served.now_ns)
    served.settle()
    (response,) = client.told()
    assert (response.status, response.token_id) == (Status.FAIL, 0)


@pytest.mark.parametrize("half", [True, False])
def test_a_token_for_an_ended_client_is_released(served: Rig, asked: list[Any], half: bool) -> None:
    """The token service gets it back."""
    client = served.connection()
    client.send(wire.acquire(1, 1, 1), wire.keep(2, 9), wire.release(3, 9))
    served.settle()
    calls_of_client = list(asked)
    asked.clear()
    if half:
        client.peer.half_close()
    client.close()
    served.settle()
    for call in calls_of_client:
        served.store.answer(call.ticket, Status.OK if call.kind != "release" else Status.RELEASE_OK, 44, served.now_ns)
    served.settle()
    assert [(call.kind, call.token_id) for call in asked] == [("release", 44)]
    assert served.figures("calls_pending") == [1]
    served.advance(SECOND)
    assert served.figures("calls_pending") == [0]
    assert served.store.sessions_open == 0


def test_a_token_service_that_grants_through_the_store(make_rig: MakeRig) -> None:
    """A token for a client that has ended is freed after clientOfflineTime, if the client was there when it was
    granted."""
    rig = make_rig(calls(1, 5))
    waiting: list[Any] = []
    rig.store.delegate(waiting.extend, SECOND)
    client = rig.connection()
    client.send(wire.acquire(1, 1, 5))
    rig.settle()
    status, id = rig.request(1, 5, waiting[0].client)
    assert status == Status.OK
    rig.store.answer(waiting[0].ticket, status, id, rig.now_ns)
    rig.settle()
    assert client.told()[0].token_id == id
    client.close()
    rig.advance(300 * MS + SWEEP_NS)
    assert rig.now_calls(1) == 0
    assert rig.figures("expired_offline") == [1]


def test_a_token_service_that_answers_during_the_call(make_rig: MakeRig) -> None:
    rig = make_rig(calls(1))
    rig.store.delegate(lambda asked: [rig.store.answer(call.ticket, 0, 7, rig.now_ns) for call in asked], SECOND)
    client = rig.connection()
    client.send(wire.acquire(1, 1, 1), wire.keep(2, 7))
    rig.settle()
    assert [(response.xid, response.token_id, response.left_ms) for response in client.told()] == [(1, 7, 0), (2, 0, 7)]


def test_too_many_waiting_calls_are_refused(served: Rig, asked: list[Any]) -> None:
    """Beyond the bound the reply is 5 at once."""
    client = served.connection()
    client.send(wire.acquire(1, 1, 1) * 1500)
    statuses = [response.status for response in client.told()]
    assert statuses == [Status.NOT_AVAILABLE] * (1500 - 1024)
    served.settle()
    assert len(asked) == 1024
    for call in asked:
        served.store.answer(call.ticket, Status.BLOCKED, 0, served.now_ns)
    served.settle()
    assert len(client.told()) == 1024
    client.send(wire.acquire(1, 1, 1))
    assert client.told() == []


def test_a_drain_requests_no_tokens_of_the_token_service(served: Rig, asked: list[Any]) -> None:
    client = served.connection()
    served.store.begin_drain()
    assert client.ask(wire.acquire(1, 1, 1)).status == Status.NOT_AVAILABLE
    client.send(wire.release(1, 5))
    served.settle()
    assert [call.kind for call in asked] == ["release"]


def test_a_removed_token_service(served: Rig, asked: list[Any]) -> None:
    client = served.connection()
    client.send(wire.acquire(1, 1, 1))
    served.store.delegate(None)
    client.acquire(1)
    served.advance(SECOND)
    assert [(response.xid, response.status) for response in client.told()] == [(1, Status.NOT_AVAILABLE)]
    assert asked == []
