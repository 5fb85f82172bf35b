"""The sweep with an expire strategy: batches, which tokens it decides about, and which are kept or renewed
meanwhile."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from counterd.protocols.sentinel import wire
from counterd.protocols.sentinel.wire import Status
from unit.protocols.sentinel.rig import KEEP, MS, RELEASE, SECOND, SWEEP_NS, TICK, calls

if TYPE_CHECKING:
    from collections.abc import Callable

    from unit.protocols.sentinel.rig import Rig

    MakeRig = Callable[..., Rig]


class Judge:
    """An expire strategy that records its arguments."""

    def __init__(self) -> None:
        self.batches: list[tuple[int, list[Any]]] = []

    def __call__(self, ticket: int, leases: list[Any]) -> None:
        self.batches.append((ticket, leases))

    @property
    def leases(self) -> list[Any]:
        return [lease for _, leases in self.batches for lease in leases]


@pytest.fixture
def judge() -> Judge:
    return Judge()


@pytest.fixture
def judged(make_rig: MakeRig, judge: Judge) -> Rig:
    """A rig with an expire strategy, which has half a second to answer."""
    rig = make_rig(calls(1, 9999), calls(2, 2), max_tokens=10_000)
    rig.store.delegate_expiry(judge, 500 * MS)
    return rig


def test_an_expire_strategy_frees_some_tokens_and_renews_others(judged: Rig, judge: Judge) -> None:
    client, other = judged.connection(), judged.connection()
    ids = [client.acquire(1, 2), other.acquire(1, 3), client.acquire(2)]
    other.close()
    judged.advance(300 * MS + SWEEP_NS)
    (lease,) = judge.leases
    assert lease.token_id == ids[1]
    assert (lease.flow_id, lease.count, lease.online) == (1, 3, False)
    assert 300 <= lease.held_ms <= 400
    assert judged.now_calls(1) == 5
    judged.store.expire(judge.batches[0][0], [ids[1]], judged.now_ns)
    assert judged.now_calls(1) == 2
    judged.advance(2 * SECOND - 300 * MS)
    (_, leases) = judge.batches[1]
    told = {(lease.token_id, lease.flow_id, lease.online) for lease in leases}
    assert told == {(ids[0], 1, True), (ids[2], 2, True)}
    judged.store.expire(judge.batches[1][0], iter([ids[2], 12345]), judged.now_ns)
    assert [judged.now_calls(1), judged.now_calls(2)] == [2, 0]
    judged.advance(2 * SECOND - 1)
    assert len(judge.batches) == 2
    judged.advance(SWEEP_NS + TICK)
    assert [lease.token_id for lease in judge.batches[2][1]] == [ids[0]]


def test_an_expire_strategy_that_does_not_answer_in_time(judged: Rig, judge: Judge) -> None:
    client = judged.connection()
    id = client.acquire(1)
    judged.advance(2 * SECOND + SWEEP_NS)
    assert [lease.token_id for lease in judge.leases] == [id]
    assert judged.now_calls(1) == 1
    judged.advance(500 * MS + SWEEP_NS)
    assert judged.now_calls(1) == 0
    assert judged.figures("expired_lease") == [1]
    judged.store.expire(judge.batches[0][0], [], judged.now_ns)
    assert judged.now_calls(1) == 0
    assert len(judge.batches) == 1


def test_tokens_kept_or_released_meanwhile_are_not_affected(judged: Rig, judge: Judge) -> None:
    client = judged.connection()
    ids = [client.acquire(1) for _ in range(3)]
    judged.advance(2 * SECOND + SWEEP_NS)
    assert {lease.token_id for lease in judge.leases} == set(ids)
    assert client.ask(wire.keep(1, ids[0])).status == Status.OK
    assert client.ask(wire.release(1, ids[1])).status == Status.RELEASE_OK
    judged.store.expire(judge.batches[0][0], ids, judged.now_ns)
    assert judged.now_calls(1) == 1
    assert client.ask(wire.release(1, ids[0])).status == Status.RELEASE_OK
    assert client.ask(wire.release(1, ids[2])).status == Status.ALREADY_RELEASED


def test_unknown_batches_are_ignored(judged: Rig, judge: Judge) -> None:
    client = judged.connection()
    id = client.acquire(1)
    judged.store.expire(1, [id], judged.now_ns)
    judged.store.expire((1 << 64) - 1, [id], judged.now_ns)
    assert judged.now_calls(1) == 1
    judged.advance(2 * SECOND + SWEEP_NS)
    ticket = judge.batches[0][0]
    judged.store.expire(ticket, [], judged.now_ns)
    judged.store.expire(ticket, [id], judged.now_ns)  # twice
    assert judged.now_calls(1) == 1


def test_many_tokens_are_decided_about_in_batches(judged: Rig, judge: Judge) -> None:
    """Of some 256 each, 16 at a time; the rest when these are done."""
    client = judged.connection()
    client.acquire_many(1, 5000)
    judged.advance(2 * SECOND + 2 * SWEEP_NS)
    assert len(judge.batches) == 16
    assert all(len(leases) <= 256 for _, leases in judge.batches)
    for _ in range(100):
        if not judged.now_calls(1):
            break
        for ticket, leases in judge.batches:
            judged.store.expire(ticket, [lease.token_id for lease in leases], judged.now_ns)
        judged.advance(SWEEP_NS)
    assert len({lease.token_id for lease in judge.leases}) == len(judge.leases) == 5000
    assert judged.now_calls(1) == 0


def test_an_expire_strategy_that_answers_during_the_call(make_rig: MakeRig) -> None:
    rig = make_rig(calls(1))
    rig.store.delegate_expiry(
        lambda ticket, leases: rig.store.expire(ticket, [lease.token_id for lease in leases], rig.now_ns), SECOND
    )
    rig.connection().acquire_many(1, 1000)
    rig.advance(2 * SECOND + 5 * SWEEP_NS)
    assert rig.figures("tokens", "expired_lease") == [0, 1000]


def test_tokens_that_cannot_be_renewed_stay_until_the_decision(make_rig: MakeRig, judge: Judge) -> None:
    """Strategy 1: KEEP reports that no time is left. Repeating it delays neither the decision nor its time limit."""
    rig = make_rig(calls(1, strategy=RELEASE))
    rig.store.delegate_expiry(judge, SECOND)
    client = rig.connection()
    ids = [client.acquire(1), client.acquire(1)]
    rig.advance(SECOND + SWEEP_NS)
    for _ in range(9):
        for id in ids:
            response = client.ask(wire.keep(1, id))
            assert (response.status, response.left_ms) == (Status.OK, 0)
        rig.advance(SWEEP_NS)
    assert len(judge.batches) == 1
    rig.store.expire(judge.batches[0][0], ids[:1], rig.now_ns)
    assert rig.now_calls(1) == 1
    rig.advance(2 * SECOND + SWEEP_NS)
    for _ in range(11):
        client.ask(wire.keep(1, ids[1]))
        rig.advance(SWEEP_NS)
    assert len(judge.batches) == 2
    assert rig.now_calls(1) == 0


def test_tokens_renewed_by_a_new_rule_meanwhile_are_decided_about_again(judged: Rig, judge: Judge) -> None:
    """Where the end of its owner decides about its lease from now on, that counts, and the strategy is asked again."""
    client = judged.connection()
    id = client.acquire(1)
    judged.advance(2 * SECOND + SWEEP_NS)
    assert len(judge.batches) == 1
    judged.load(calls(1, strategy=KEEP))
    judged.advance(500 * MS + SWEEP_NS)
    assert judged.now_calls(1) == 1
    client.close()
    judged.settle()
    judged.advance(300 * MS + SWEEP_NS)
    assert [lease.token_id for lease in judge.batches[1][1]] == [id]


def test_a_removed_expire_strategy(judged: Rig, judge: Judge) -> None:
    client = judged.connection()
    client.acquire(1)
    judged.advance(2 * SECOND + SWEEP_NS)
    judged.store.delegate_expiry(None)
    client.acquire(1)
    judged.advance(500 * MS + SWEEP_NS)
    assert judged.now_calls(1) == 1
    judged.advance(2 * SECOND)
    assert judged.now_calls(1) == 0
    assert len(judge.batches) == 1
