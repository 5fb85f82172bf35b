"""The checker on histories of the smockron protocol: it accepts those of a correct master, and finds every defect of
a wrong one."""

from __future__ import annotations

from itertools import pairwise, permutations, product
from random import Random
from typing import TYPE_CHECKING, Any

import pytest

from history import Closed, Operation
from history.smockron import (
    NS_PER_MS,
    Account,
    Load,
    Ping,
    Request,
    Restarted,
    Subscribe,
    Told,
    least,
    most,
    pair,
    unexplained,
)

if TYPE_CHECKING:
    from collections.abc import Callable

MS = NS_PER_MS
WALL_NS = 1_000_000 * MS
DOMAIN, INTERVAL_MS, BURST_MS = b"api", 50, 100
RULES = Operation(-1, Load(((DOMAIN, INTERVAL_MS * MS, BURST_MS * MS),)), 0, 0, True)
CALLS = 60
SENDERS, LISTENERS = range(1, 5), range(10, 12)
DRIVER = 20


class Master:
    """A minimal master. lie: changes what it does, by number of the message."""

    def __init__(self, lie: Callable[[int, int, int], int] | None = None) -> None:
        self.next: dict[bytes, int] = {}
        self.lie = lie or (lambda _, before, after: after)
        self.taken = 0

    def take(self, call: Account, now_ns: int) -> tuple[bytes, str, bytes, int] | None:
        now_ms = (now_ns + WALL_NS) // MS
        if call.status == "FORGET":
            self.next.pop(call.identifier, None)
            return DOMAIN, "FORGET", call.identifier, now_ms
        self.taken += 1
        earliest = max(call.moment_ms, now_ms) - BURST_MS
        before = max(self.next.get(call.identifier, 0), earliest)
        self.next[call.identifier] = self.lie(self.taken, before, before + INTERVAL_MS)
        if (until_ms := self.next[call.identifier]) <= now_ms:
            return None
        return DOMAIN, "DELAY_UNTIL", call.identifier, until_ms


def played(seed: int, master: Master, *, forgets: bool = False, is_killed: bool = False) -> list[Operation]:
    """The history of senders and subscribers; some messages have no PONG."""
    rng = Random(seed)
    sent: list[tuple[int, int, Operation]] = []
    for client in SENDERS:
        now = rng.randrange(1, 10 * MS)
        for left in reversed(range(CALLS)):
            taken, ended = sorted(now + 1 + rng.randrange(12 * MS) for _ in range(2))
            status = "FORGET" if forgets and rng.random() < 0.04 else "ACCEPTED"
            ahead = rng.choice((0, 0, 0, (taken + WALL_NS) // MS + rng.randrange(80)))
            call = Account(DOMAIN, b"%d" % rng.randrange(2), status, 0 if status == "FORGET" else ahead)
            if not left:
                sent.append((taken, client, Operation(client, call, now)))
                sent.append((ended, -1, Operation(client, Closed(), now, ended)))
            else:
                sent.append((taken, client, Operation(client, call, now, ended + 1, True)))
            now = ended + 1 + rng.randrange(20 * MS)
    sent.sort(key=lambda one: one[:2])
    kill_ns = sent[len(sent) // 2][0] if is_killed else None
    history, listeners, arrived = [RULES], list(LISTENERS), 1
    history += [Operation(client, Subscribe(b""), 0, 1, True) for client in listeners]
    for taken, client, one in sent:
        if kill_ns is not None and taken >= kill_ns:
            history += crash(kill_ns, listeners, arrived)
            listeners = [client + len(LISTENERS) for client in LISTENERS]
            master.next.clear()
            begun_ns, kill_ns = kill_ns, None
        if is_killed and kill_ns is None and one.started < begun_ns:
            history.append(one._replace(ended=None, answer=None) if client > 0 else one)
            continue  # it was under way
        history.append(one)
        if client < 0 or (message := master.take(one.call, taken)) is None:
            continue
        for listener in listeners:
            arrived = max(arrived, taken + rng.randrange(3 * MS)) + 1
            history.append(Operation(listener, Told((message,)), arrived, arrived, True))
    last = max(one.ended or 0 for one in history)
    history += [Operation(client, Ping(), last + 1, last + 2, True) for client in listeners]
    return sorted(history, key=lambda one: one.started)


def crash(at: int, listeners: list[int], arrived: int) -> list[Operation]:
    """Kills the daemon; other subscribers listen to the next one."""
    ended = max(at, arrived)
    gone = [Operation(client, Closed(), ended + 1, ended + 1) for client in listeners]
    come = [Operation(client + len(LISTENERS), Subscribe(b""), at + 1, at + 2, True) for client in listeners]
    return [Operation(DRIVER, Restarted(), at - 1, at, True), *gone, *come]


def without(history: list[Operation], place: int, client: int | None = None) -> list[Operation]:
    """The history without one message that was told, the place-th moment by time, to one or to all."""
    told = [one for one in history if isinstance(one.call, Told)]
    gone = told[place % len(told)].call
    return [one for one in history if not (one.call == gone and client in (None, one.client))]


def changed(history: list[Operation], place: int, by_ms: int) -> list[Operation]:
    """The history with one of the told moments changed, for all."""
    told = [one for one in history if isinstance(one.call, Told)]
    was = told[place % len(told)].call
    domain, word, identifier, moment_ms = was.messages[0]
    return [
        one._replace(call=Told(((domain, word, identifier, moment_ms + by_ms),))) if one.call == was else one
        for one in history
    ]


@pytest.mark.parametrize("seed", range(30))
def test_right_histories_pass(seed: int) -> None:
    assert unexplained(played(seed, Master()), WALL_NS) == []
    assert unexplained(played(seed, Master(), forgets=True), WALL_NS) == []
    assert unexplained(played(seed, Master(), is_killed=True), WALL_NS) == []


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("slack_ms", [0, 20])
def test_wrong_master_is_caught(seed: int, slack_ms: int) -> None:
    lies: dict[str, Callable[[int, int, int], int]] = {
        "a message that changes nothing": lambda n, before, after: before if n == 40 else after,
        "one that counts twice": lambda n, before, after: after + INTERVAL_MS if n % 4 == 0 else after,
        "each too long": lambda _, before, after: after + 1 + (after - before) // 4,
        "each too short": lambda _, before, after: after - 15,
        "another one's": lambda n, before, after: after + 1000 if n == 50 else after,
    }
    for name, lie in lies.items():
        assert unexplained(played(seed, Master(lie)), WALL_NS, slack_ns=slack_ms * MS), name


@pytest.mark.parametrize("seed", range(5))
def test_lost_and_invented_control_messages_are_found(seed: int) -> None:
    right = played(seed, Master())
    count = sum(isinstance(one.call, Told) for one in right)
    # At first it may be that nobody has to wait, and at last that messages were not taken.
    for place in range(count // 4, count * 3 // 4, 7):
        assert unexplained(without(right, place), WALL_NS), f"{place}: nobody was told"
        assert unexplained(without(right, place, LISTENERS[0]), WALL_NS), f"{place}: one was not"
        assert unexplained(changed(right, place, 400), WALL_NS), f"{place}: too long"
        assert unexplained(changed(right, place, -400), WALL_NS), f"{place}: too short"
    told = next(one for one in right if isinstance(one.call, Told))
    again = told._replace(started=told.started + 1, ended=told.started + 1)
    assert any("then" in text for text in unexplained([*right, again], WALL_NS))
    stranger = Told(((DOMAIN, "DELAY_UNTIL", b"nobody", 1_000_500),))
    (text,) = unexplained([*right, told._replace(call=stranger)], WALL_NS)[:1]
    assert "nobody" in text


def test_a_slow_subscriber_may_lose_control_messages() -> None:
    right = played(1, Master())
    client = LISTENERS[0]
    lossy = without(right, 60, client)
    assert unexplained(lossy, WALL_NS)
    assert unexplained(lossy, WALL_NS, deaf={client}) == []
    told = next(one for one in right if isinstance(one.call, Told) and one.client == client)
    left = [one for one in right if one.client != client or one.started <= told.started]
    closed = Operation(client, Closed(), told.started + 1, told.started + 2)
    assert unexplained(sorted([*left, closed], key=lambda one: one.started), WALL_NS) == []


# ---- by hand ----


def accepted(
    started_ms: float, ended_ms: float | None, identifier: bytes = b"x", status: str = "ACCEPTED"
) -> Operation:
    ended = None if ended_ms is None else int(ended_ms * MS)
    return Operation(1, Account(DOMAIN, identifier, status, 0), int(started_ms * MS), ended, ended and True)


def heard(*rows: tuple[float, str, int], until_ms: int = 1000) -> list[Operation]:
    """The messages that a subscriber heard: when, what, which moment, in ms of the same clock."""
    told = [
        Operation(10, Told(((DOMAIN, word, b"x", 1_000_000 + moment),)), int(at * MS), int(at * MS), True)
        for at, word, moment in rows
    ]
    ping = Operation(10, Ping(), until_ms * MS, until_ms * MS + 1, True)
    return [Operation(10, Subscribe(DOMAIN), 0, 1, True), *told, ping]


def judged(*operations: Operation) -> list[str]:
    return unexplained([RULES, *operations], WALL_NS)


def test_requests_beyond_the_burst_need_a_control_message() -> None:
    calls = [accepted(10 + n, 10.5 + n) for n in range(4)]
    assert judged(*calls[:3], *heard((13, "DELAY_UNTIL", 60))) == []
    assert judged(*calls, *heard((12.6, "DELAY_UNTIL", 60), (14, "DELAY_UNTIL", 110))) == []
    assert judged(*calls, *heard((14, "DELAY_UNTIL", 110)))
    assert judged(*calls, *heard((12.6, "DELAY_UNTIL", 60)))
    assert judged(*calls, *heard((12.6, "DELAY_UNTIL", 60), (14, "DELAY_UNTIL", 160)))


def test_a_control_message_needs_enough_earlier_requests() -> None:
    """Although later requests would explain it."""
    calls = [accepted(10 + n, 10.5 + n) for n in range(4)]
    assert judged(*calls, *heard((11, "DELAY_UNTIL", 60), (14, "DELAY_UNTIL", 110)))


def test_a_forgotten_identifier_starts_anew() -> None:
    calls = [*(accepted(10 + n, 10.5 + n) for n in range(3)), accepted(14, 14.5, status="FORGET"), accepted(15, 15.5)]
    told = (12.6, "DELAY_UNTIL", 60), (14.6, "FORGET", 14)
    assert judged(*calls, *heard(*told)) == []
    assert judged(*calls, *heard(*told, (15.6, "DELAY_UNTIL", 110)))
    assert judged(*calls, *heard(*told[:1]))
    assert judged(*calls[:3], *heard(*told))


def test_a_killed_daemon_has_forgotten_all_identifiers() -> None:
    calls = [accepted(10 + n, 10.5 + n) for n in range(3)]
    kill = Operation(DRIVER, Restarted(), 20 * MS, 30 * MS, True)
    later = [one._replace(started=one.started + 30 * MS, ended=(one.ended or 0) + 30 * MS) for one in calls]
    nobody = [Operation(11, Subscribe(DOMAIN), 31 * MS, 32 * MS, True), Operation(11, Ping(), 900 * MS, 901 * MS, True)]
    told = Operation(11, Told(((DOMAIN, "DELAY_UNTIL", b"x", 1_000_090),)), 43 * MS, 43 * MS, True)
    wrong = told._replace(call=Told(((DOMAIN, "DELAY_UNTIL", b"x", 1_000_110),)))
    assert judged(*calls, kill, *later, *nobody, told) == []
    assert judged(*calls, kill, *later, *nobody, wrong)
    assert judged(*calls, kill, *later, *nobody)


def test_a_message_without_an_end_may_have_counted_or_not() -> None:
    calls = [*(accepted(10 + n, 10.5 + n) for n in range(2)), accepted(12, None), accepted(20, 21)]
    for moment in (60, 70):
        assert judged(*calls, *heard((21, "DELAY_UNTIL", moment))) == [], moment
    assert judged(*calls, *heard((13, "DELAY_UNTIL", 60), (21, "DELAY_UNTIL", 110))) == []
    assert judged(*calls, *heard((21, "DELAY_UNTIL", 160)))


def test_a_changed_rule_counts_from_its_earliest_possible_moment() -> None:
    calls = [accepted(10 + n, 10.5 + n) for n in range(4)]
    slower = Load(((DOMAIN, 2 * INTERVAL_MS * MS, BURST_MS * MS),))
    told = (12.6, "DELAY_UNTIL", 60), (14, "DELAY_UNTIL", 160)
    assert judged(*calls, *heard(*told))
    assert judged(*calls, Operation(-1, slower, int(12.7 * MS), int(12.9 * MS), True), *heard(*told)) == []
    assert judged(*calls, Operation(-1, Load(()), 1 * MS, 2 * MS, True), *heard()) == []
    assert judged(*calls, Operation(-1, Load(()), 1 * MS, 2 * MS, True), *heard(told[0]))


def test_only_subscribed_domains_have_control_messages() -> None:
    calls = [accepted(10 + n, 10.5 + n) for n in range(3)]
    others = [Operation(10, Subscribe(b"apis"), 0, 1, True), Operation(10, Ping(), 900 * MS, 901 * MS, True)]
    told = Operation(10, Told(((DOMAIN, "DELAY_UNTIL", b"x", 1_000_060),)), 13 * MS, 13 * MS, True)
    assert judged(*calls, *others) == []
    assert judged(*calls, *others, told)


# ---- the bounds ----


@pytest.mark.parametrize("seed", range(40))
def test_bounds_are_those_of_all_possible_orders(seed: int) -> None:
    """No order gives less or more, for few requests and all moments."""
    rng = Random(seed)
    requests = []
    for _ in range(4):
        started = rng.randrange(0, 8) * MS
        ended = started + rng.randrange(1, 4) * MS
        used = rng.randrange(1, 4) * MS
        requests.append(Request(started, ended, rng.choice((0, 0, 9 * MS)), 2 * MS, used, used, is_sure=True))
    requests.sort()
    low, high = least(requests, []), most(requests, [], [(one.started, one.ended) for one in requests])
    for moments in product(*(range(one.started, one.ended + 1, MS) for one in requests)):
        for order in permutations(range(len(requests))):
            if any(moments[one] > moments[other] for one, other in pairwise(order)):
                continue
            following = -(1 << 60)
            for place in order:
                one = requests[place]
                following = max(following, max(one.moment, moments[place]) - one.burst) + one.most
                assert low[place] <= following <= high[place]


def test_as_many_points_and_spans_as_possible_are_paired() -> None:
    assert pair([1, 2], [(0, 1), (0, 5)]) == ([], [])
    assert pair([1, 2], [(0, 5), (2, 2)]) == ([], [])
    assert pair([1, 2, 3], [(0, 2), (0, 2)]) == ([3], [])
    assert pair([4], [(0, 3), (4, 4), (5, 6)])[1] == [(0, 3), (5, 6)]
    rng: Any = Random(1)
    for _ in range(300):
        points = [rng.randrange(6) for _ in range(rng.randrange(5))]
        spans = [(start, start + rng.randrange(4)) for start in (rng.randrange(6) for _ in range(rng.randrange(5)))]
        alone, left = pair(points, spans)
        best = max(
            sum(low <= point <= high for point, (low, high) in zip(chosen, spans, strict=False))
            for chosen in permutations([*points, *([-1] * len(spans))], len(spans))
        )
        assert len(points) - len(alone) == best == len(spans) - len(left)
