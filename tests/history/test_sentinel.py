"""The checker on histories of the sentinel protocol: it accepts those of a correct server, and finds every defect of
a wrong one."""

from __future__ import annotations

from itertools import combinations
from random import Random
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from counterd.protocols.sentinel.rules import GLOBAL, IGNORE, KEEP, RELEASE, FlowRule, ParamRule, Rules
from history import Closed, Operation, check, leases
from history.crowd import SWEPT_NS, VALUES, SentinelEngine, crowd, sentinel_calls
from history.sentinel import (
    Acquire,
    Flow,
    Keep,
    Load,
    Param,
    Ping,
    RateRule,
    Release,
    SentinelModel,
    TokenRule,
    objects,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

MS = 1_000_000
ONE, TWO, THREE = VALUES


def calls_rule(
    flow_id: int, count: float, strategy: int = IGNORE, resource_ms: int = 1, offline_ms: int = 1
) -> FlowRule:
    return FlowRule("shop", flow_id, "pay", 0, count, GLOBAL, 10, 1000, resource_ms, offline_ms, strategy)


def rate_rule(flow_id: int, count: float, samples: int = 2, window_ms: int = 2) -> FlowRule:
    return FlowRule("shop", flow_id, "pay", 1, count, GLOBAL, samples, window_ms, 1, 1, IGNORE)


def said(*rows: tuple[Any, ...]) -> list[Operation]:
    return [Operation(*row) for row in rows]


def crowded(engine: SentinelEngine, kinds: str, seed: int = 1, flows: int = 2, **options: Any) -> list[Operation]:
    """The history of a crowd of clients, all of which are gone at its end."""
    choose = sentinel_calls(engine, kinds, flows)
    seen = crowd(Random(seed), engine, choose, taken=engine.taken, dying=0.05, **options)
    last = max(operation.ended or operation.started for operation in seen)
    gone = {operation.client for operation in seen if isinstance(operation.call, Closed)}
    left = {operation.client for operation in seen if operation.ended is None} - gone
    ended = [one._replace(ended=last) if isinstance(one.call, Closed) and one.ended is None else one for one in seen]
    return [*ended, *(Operation(client, Closed(), last, last) for client in left)]


# ---- right ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", [IGNORE, RELEASE, KEEP])
@pytest.mark.parametrize("clients", [1, 6])
def test_engine_has_an_order_for_calls_with_tokens(strategy: int, clients: int) -> None:
    rules = Rules((calls_rule(1, 3, strategy), calls_rule(2, 6, strategy, 2, 3)), ())
    engine = SentinelEngine(rules)
    operations = crowded(engine, "tokens", clients, clients=clients, calls=400)
    statuses = {operation.answer[0] for operation in operations if operation.answer is not None}
    assert statuses == {0, 1, 6, 7}
    assert check(operations, SentinelModel(objects(rules), sweep_ns=SWEPT_NS)) is None


def test_engine_has_an_order_for_all_calls_together() -> None:
    values = ParamRule("shop", 1, "pay", 1000, GLOBAL, 2, 2, {ONE: 3000})
    rules = Rules((calls_rule(1, 3), rate_rule(2, 2000), rate_rule(3, 3000, 4, 4)), (values,))
    engine = SentinelEngine(rules)
    operations = crowded(engine, "tokens window values namespace", flows=3, clients=7, calls=1000)
    statuses = {(type(one.call), one.answer[0]) for one in operations if one.answer is not None}
    assert statuses >= {(kind, status) for kind in (Flow, Param, Acquire) for status in (0, 1, 3)} | {
        (Flow, 2),
        (Ping, 0),
    }
    assert check(operations, SentinelModel(objects(rules), sweep_ns=SWEPT_NS)) is None


# Flow 1 has room for one, flow 2 for two and a lease of its owner's life, flow 3 a lease that ends. In ns, or in ms.
LONG = 10_000
RULES = {
    ("tokens", 1): TokenRule(1, IGNORE, 50, 30),
    ("tokens", 2): TokenRule(2, KEEP, 50, 30),
    ("tokens", 3): TokenRule(1, RELEASE, 100, 30),
    ("tokens", 4): TokenRule(1, IGNORE, LONG * MS, LONG * MS),
    ("tokens", 5): TokenRule(1, RELEASE, LONG * MS, LONG * MS),
    ("window", 1): RateRule(4, 2, 1000),
    ("values", 1): RateRule(2, 2, 1000, ((ONE, 3),)),
}
ANOTHER = ("tokens", 1), RULES["tokens", 1]._replace(count=2)  # type: ignore[call-arg]
HELD = (1, Acquire(1, 1), 0, 1, (0, 7))
HELD_2 = (1, Acquire(2, 1), 0, 1, (0, 7))
HELD_3 = (1, Acquire(3, 1), 0, 1, (0, 7))
HELD_4 = (1, Acquire(4, 1), 0, 1, (0, 7))
HELD_5 = (1, Acquire(5, 1), 0, 1, (0, 7))
FULL = (1, Flow(1, 4), 0, 1, (0, 0, 0))

RIGHT = {
    "refused when there is no room": said(HELD, (2, Acquire(1, 1), 2, 3, (1, 0))),
    "granted when it is given back": said(HELD, (1, Release(1, 7), 2, 3, (6, 0)), (2, Acquire(1, 1), 4, 5, (0, 8))),
    "released once": said(HELD, (1, Release(1, 7), 2, 9, (7, 0)), (2, Release(1, 7), 3, 8, (6, 0))),
    "lease over, not swept yet": said(HELD, (2, Acquire(1, 1), 105, 110, (1, 0))),
    "lease over, and swept": said(HELD, (2, Acquire(1, 1), 105, 110, (0, 8))),
    "lease over, released late": said(HELD, (2, Release(1, 7), 105, 110, (7, 0)), (2, Acquire(1, 1), 111, 112, (0, 8))),
    "kept by another, who is there": said(
        HELD, (2, Keep(1, 7), 2, 3, (0, 0)), (1, Closed(), 4, 9), (2, Acquire(1, 1), 80, 81, (1, 0))
    ),
    "its owner has gone": said(HELD, (1, Closed(), 4, 9), (2, Acquire(1, 1), 34, 35, (0, 8))),
    "its owner has gone, and it is kept": said(
        HELD, (1, Closed(), 4, 9), (2, Keep(1, 7), 20, 21, (0, 0)), (3, Acquire(1, 1), 115, 116, (1, 0))
    ),
    "renewed as long as its owner is there": said(HELD_2, (2, Release(2, 7), 5000, 5001, (6, 0))),
    "renewed, until its owner has gone": said(
        HELD_2, (1, Closed(), 5000, 5001), (2, Release(2, 7), 5031, 5032, (7, 0))
    ),
    "renewed shortly before its owner has gone": said(
        HELD_2, (1, Closed(), 5001, 5002), (2, Release(2, 7), 5031, 5032, (6, 0))
    ),
    "last lease ends before the patience with its owner": said(
        HELD_2, (1, Closed(), 5090, 5091), (2, Release(2, 7), 5101, 5102, (7, 0))
    ),
    "lease told": said(HELD_4, (1, Keep(4, 7), 2, 3, (0, 2 * LONG))),
    "lease that runs out told": said(HELD_5, (1, Keep(5, 7), 100, 101, (0, LONG - 1))),
    "rule gone": said(
        HELD, (9, Load(("tokens", 1), None), 2, 9, True), (1, Keep(1, 7), 3, 4, (0, 0)),
        (2, Acquire(1, 1), 5, 6, (3, 0)), (1, Keep(1, 7), 10, 11, (3, 0)), (1, Release(1, 7), 12, 13, (3, 0)),
        (1, Release(1, 7), 14, 15, (7, 0)),
    ),
    "rule gone and come again": said(
        HELD, (9, Load(("tokens", 1), None), 2, 3, True), (9, Load(("tokens", 1), RULES["tokens", 1]), 4, 5, True),
        (2, Acquire(1, 1), 6, 7, (1, 0)), (1, Release(1, 7), 8, 9, (6, 0)),
    ),
    "another threshold": said(HELD, (9, Load(*ANOTHER), 2, 9, True), (2, Acquire(1, 1), 3, 4, (0, 8))),
    "bad requests": said((1, Acquire(1, 0), 0, 1, (-4, 0)), (1, Flow(-1, 1), 2, 3, (-4, 0, 0))),
    "the next window": said(FULL, (1, Flow(1, 1), 999 * MS, 1000 * MS, (0, 3, 0))),
    "counted in the window before, by whom it ends later": said(
        (1, Flow(1, 1), 0, 1, (0, 3, 0)), (2, Flow(1, 1), 900 * MS, 1200 * MS, (0, 2, 0)),
        (3, Flow(1, 1), 1010 * MS, 1100 * MS, (0, 2, 0)),
    ),
    "another window": said(
        FULL, (9, Load(("window", 1), RateRule(4, 1, 2000)), 2, 3, True), (1, Flow(1, 4), 4, 5, (0, 0, 0))
    ),
    "the same window, another count": said(
        FULL, (9, Load(("window", 1), RateRule(5, 2, 1000)), 2, 3, True), (1, Flow(1, 1), 4, 5, (0, 0, 0))
    ),
    "another window, whose samples have lower numbers": said(
        (1, Flow(1, 4), 5000 * MS, 5001 * MS, (0, 0, 0)),
        (9, Load(("window", 1), RateRule(4, 1, 2000)), 5002 * MS, 5003 * MS, True),
        (1, Flow(1, 4), 5004 * MS, 5005 * MS, (0, 0, 0)),
    ),
    "borrowed": said(
        FULL, (1, Flow(1, 3, True), 600 * MS, 601 * MS, (2, 0, 500)), (1, Flow(1, 1), 1001 * MS, 1002 * MS, (0, 0, 0))
    ),
    "values by themselves": said(
        (1, Param(1, 2, (TWO,)), 0, 1, (0, 0, 0)), (1, Param(1, 1, (TWO,)), 2, 3, (1, 0, 0)),
        (1, Param(1, 1, (ONE, THREE, ONE)), 4, 5, (0, -1, 0)), (1, Param(1, 1, (THREE, ONE, ONE)), 6, 7, (1, 0, 0)),
        (1, Param(1, 1, (ONE,)), 8, 9, (0, 0, 0)),
    ),
    "connected": said((1, Ping(b"a"), 0, 1, (0, 1)), (2, Ping(b"a"), 2, 3, (0, 2)), (2, Ping(b"a"), 4, 5, (0, 2))),
    "connected no more": said((1, Ping(b"a"), 0, 1, (0, 1)), (1, Closed(), 2, 9), (2, Ping(b"a"), 3, 4, (0, 1))),
}  # fmt: skip

WRONG = {
    "granted twice": said((1, Acquire(1, 1), 0, 5, (0, 7)), (2, Acquire(1, 1), 1, 6, (0, 8))),
    "granted more than there is": said((1, Acquire(1, 2), 0, 5, (0, 7))),
    "no token granted": said((1, Acquire(1, 1), 0, 5, (0, 0))),
    "the same token granted twice": said(HELD_2, (2, Acquire(2, 1), 2, 3, (0, 7))),
    "refused, with a token": said(HELD, (2, Acquire(1, 1), 2, 3, (1, 8))),
    "refused, with room left": said((1, Acquire(1, 1), 0, 5, (1, 0))),
    "refused, with room left beside others": said(HELD_2, (2, Acquire(2, 1), 2, 3, (1, 0))),
    "refused, though given back": said(HELD, (1, Release(1, 7), 2, 3, (6, 0)), (2, Acquire(1, 1), 4, 5, (1, 0))),
    "refused, though there is memory": said((1, Acquire(1, 1), 0, 5, (5, 0))),
    "released twice": said(HELD, (1, Release(1, 7), 2, 9, (6, 0)), (2, Release(1, 7), 3, 8, (6, 0))),
    "released twice, counted twice": said(
        HELD_2, (1, Acquire(2, 1), 2, 3, (0, 8)), (1, Release(2, 7), 4, 5, (6, 0)), (1, Release(2, 7), 6, 7, (7, 0)),
        (1, Acquire(2, 2), 8, 9, (0, 9)),
    ),
    "released, never granted": said((1, Release(1, 7), 2, 9, (6, 0))),
    "not released": said(HELD, (1, Release(1, 7), 2, 3, (7, 0))),
    "released, unanswered, and granted twice": said(
        HELD, (1, Release(1, 7), 2), (1, Closed(), 3, 4), (2, Acquire(1, 1), 5, 6, (0, 8)),
        (3, Acquire(1, 1), 7, 8, (0, 9)),
    ),
    "lease over early": said(HELD, (2, Release(1, 7), 98, 99, (7, 0))),
    "lease over early, granted": said(HELD, (2, Acquire(1, 1), 98, 99, (0, 8))),
    "lease over late": said(HELD, (2, Release(1, 7), 101, 102, (6, 0))),
    "lease over, kept": said(HELD, (2, Keep(1, 7), 101, 102, (0, 0))),
    "lease over, never swept": said(HELD, (2, Acquire(1, 1), 112, 113, (1, 0))),
    "swept, and blamed": said(
        HELD, (2, Acquire(1, 1), 103, 104, (0, 8)), (2, Release(1, 8), 105, 106, (6, 0)),
        (2, Acquire(1, 1), 107, 108, (1, 0)),
    ),
    "lease renewed that is not to be": said(
        HELD_3, (1, Keep(3, 7), 50, 51, (0, 0)), (1, Release(3, 7), 102, 103, (6, 0))
    ),
    "lease not renewed": said(HELD, (1, Keep(1, 7), 50, 51, (0, 0)), (1, Release(1, 7), 120, 121, (7, 0))),
    "lease not renewed for who is there": said(HELD_2, (2, Release(2, 7), 5000, 5001, (7, 0))),
    "lease told wrong": said(HELD_4, (1, Keep(4, 7), 2, 3, (0, 2 * LONG - 1))),
    "lease that runs out told wrong": said(HELD_5, (1, Keep(5, 7), 100, 101, (0, LONG))),
    "taken from who has gone too early": said(HELD, (1, Closed(), 4, 9), (2, Acquire(1, 1), 20, 33, (0, 8))),
    "not taken from who has gone": said(HELD, (1, Closed(), 4, 9), (2, Acquire(1, 1), 50, 51, (1, 0))),
    "renewed though its owner has gone": said(HELD_2, (1, Closed(), 4, 9), (2, Release(2, 7), 40, 41, (6, 0))),
    "taken from who keeps it": said(
        HELD, (2, Keep(1, 7), 2, 3, (0, 0)), (1, Closed(), 4, 9), (2, Release(1, 7), 80, 81, (7, 0))
    ),
    "left to who had it before": said(
        HELD, (2, Keep(1, 7), 2, 3, (0, 0)), (2, Closed(), 4, 9), (1, Release(1, 7), 80, 81, (6, 0))
    ),
    "rule gone, but granted": said((9, Load(("tokens", 1), None), 0, 1, True), (2, Acquire(1, 1), 2, 3, (0, 8))),
    "rule gone, and its tokens": said(
        HELD, (9, Load(("tokens", 1), None), 2, 3, True), (9, Load(("tokens", 1), RULES["tokens", 1]), 4, 5, True),
        (2, Acquire(1, 1), 6, 7, (0, 8)),
    ),
    "rule there, but not found": said((2, Acquire(1, 1), 2, 3, (3, 0))),
    "rule gone, released as if it were there": said(
        HELD, (9, Load(("tokens", 1), None), 2, 3, True), (1, Release(1, 7), 4, 5, (6, 0))
    ),
    "the threshold of before": said(HELD, (9, Load(*ANOTHER), 2, 3, True), (2, Acquire(1, 1), 4, 5, (1, 0))),
    "the threshold of later": said(HELD, (2, Acquire(1, 1), 2, 3, (0, 8)), (9, Load(*ANOTHER), 4, 5, True)),
    "of another flow": said(HELD, (2, Release(2, 7), 2, 3, (6, 0))),
    "passed more than the limit": said(FULL, (2, Flow(1, 1), 2, 3, (0, 0, 0))),
    "passed more, at once": said(
        *((client, Flow(1, 1), 0, 9, (0, 4 - min(client, 4), 0)) for client in range(1, 6))
    ),
    "blocked, with room left": said((1, Flow(1, 3), 0, 1, (0, 1, 0)), (1, Flow(1, 1), 2, 3, (1, 0, 0))),
    "remaining too much": said((1, Flow(1, 3), 0, 1, (0, 2, 0))),
    "of the last window": said(FULL, (1, Flow(1, 1), 1000 * MS, 1001 * MS, (1, 0, 0))),
    "forgotten early": said(FULL, (1, Flow(1, 1), 998 * MS, 999 * MS, (0, 3, 0))),
    "borrowed without asking": said(FULL, (1, Flow(1, 1), 600 * MS, 601 * MS, (2, 0, 500))),
    "borrowed from nothing": said(FULL, (1, Flow(1, 1, True), 1, 2, (2, 0, 500))),
    "borrowed, and not paid": said(
        FULL, (1, Flow(1, 3, True), 600 * MS, 601 * MS, (2, 0, 500)), (1, Flow(1, 1), 1001 * MS, 1002 * MS, (0, 3, 0))
    ),
    "told to wait as long as it likes": said(FULL, (1, Flow(1, 1, True), 600 * MS, 601 * MS, (2, 0, 100))),
    "limited, but by nothing": said((1, Flow(1, 1), 0, 1, (-2, 0, 0))),
    "another's value": said((1, Param(1, 2, (TWO,)), 0, 1, (0, 0, 0)), (1, Param(1, 1, (THREE,)), 2, 3, (1, 0, 0))),
    "a value passed too often": said(
        (1, Param(1, 2, (TWO,)), 0, 1, (0, 0, 0)), (1, Param(1, 1, (TWO,)), 2, 3, (0, 0, 0))
    ),
    "a value with the count of others": said((1, Param(1, 3, (ONE,)), 0, 1, (1, 0, 0))),
    "equal values do not add up": said((1, Param(1, 1, (TWO, TWO, TWO)), 0, 1, (0, -1, 0))),
    "some of the values": said(
        (1, Param(1, 2, (TWO,)), 0, 1, (0, 0, 0)), (1, Param(1, 2, (THREE, TWO)), 2, 3, (1, 0, 0)),
        (1, Param(1, 1, (THREE,)), 4, 5, (0, 0, 0)),
    ),
    "connected, not counted": said((1, Ping(b"a"), 0, 1, (0, 1)), (2, Ping(b"a"), 2, 3, (0, 1))),
    "connected, counted twice": said((1, Ping(b"a"), 0, 1, (0, 1)), (1, Ping(b"a"), 2, 3, (0, 2))),
    "connected for ever": said((1, Ping(b"a"), 0, 1, (0, 1)), (1, Closed(), 2, 9), (2, Ping(b"a"), 10, 11, (0, 2))),
}  # fmt: skip


def model(**options: Any) -> SentinelModel:
    return SentinelModel(RULES, sweep_ns=10, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("operations", RIGHT.values(), ids=RIGHT.keys())
def test_right_history_passes(operations: list[Operation]) -> None:
    violation = check(operations, model())
    assert violation is None, violation


@pytest.mark.parametrize("operations", WRONG.values(), ids=WRONG.keys())
def test_wrong_history_is_caught(operations: list[Operation]) -> None:
    assert check(operations, model()) is not None


def test_an_unanswered_call_may_have_taken_effect_or_not() -> None:
    start = said((1, Acquire(1, 1), 0), (1, Closed(), 5, 9))
    for answer in ((0, 8), (1, 0)):
        assert check([*start, *said((2, Acquire(1, 1), 10, 11, answer))], model()) is None
    assert check([*start, *said((2, Acquire(1, 1), 50, 51, (1, 0)))], model()) is not None
    passed = said((1, Flow(1, 4), 0), (1, Closed(), 5, 9))
    for answer in ((0, 3, 0), (1, 0, 0)):
        assert check([*passed, *said((2, Flow(1, 1), 10, 11, answer))], model()) is None
    with pytest.raises(ValueError, match="neither an answer"):
        check([*passed[:1], *said((2, Flow(1, 1), 10, 11, (1, 0, 0)))], model())


def test_shortages_allow_only_their_refusals() -> None:
    for call, answer in ((Acquire(1, 1), (5, 0)), (Param(1, 1, (ONE,)), (5, 0, 0)), (Ping(b"a"), (-1, 0))):
        assert check(said((1, call, 0, 1, answer)), model(memory=True)) is None
        assert check(said((1, call, 0, 1, answer)), model(limited=True)) is not None
    for call in (Flow(1, 1), Param(1, 1, (ONE,))):
        assert check(said((1, call, 0, 1, (-2, 0, 0))), model(limited=True)) is None
        assert check(said((1, call, 0, 1, (-2, 0, 0))), model(memory=True)) is not None
    assert check(said(HELD, (2, Release(1, 7), 101, 102, (6, 0))), model(slack_ns=1)) is None


def test_unmodelled_rules_are_refused() -> None:
    with pytest.raises(ValueError, match="thresholdType 0"):
        objects(Rules((FlowRule("shop", 1, "pay", 0, 5, 0, 10, 1000, 1, 1, IGNORE),), ()))
    with pytest.raises(ValueError, match="terms"):
        check(said(HELD, (9, Load(("tokens", 1), RULES["tokens", 2]), 2, 3, True)), model())


# ---- trying everything ----------------------------------------------------------------------------------------------

ROOM = {("tokens", 1): TokenRule(2, IGNORE, 3, 4), ("window", 1): RateRule(2, 2, 1)}
ANSWERS: dict[type, tuple[Any, ...]] = {
    Acquire: ((0, 7), (0, 7), (1, 0)),
    Release: ((6, 0), (7, 0)),
    Keep: ((0, 0), (7, 0)),
    Flow: ((0, 1, 0), (0, 0, 0), (1, 0, 0), (2, 0, 0)),
}
OF_TOKENS = (Acquire(1, 1), Acquire(1, 2), Release(1, 7), Release(1, 8), Keep(1, 7))
OF_WINDOWS = (Flow(1, 1), Flow(1, 2), Flow(1, 1, True))


@st.composite
def histories(draw: Any, calls: tuple[Any, ...], unit: int) -> list[Operation]:
    """Up to four operations of up to three clients; some have no answer, and end with their connection."""
    operations = []
    for _ in range(draw(st.integers(1, 4))):
        call, client = draw(st.sampled_from(calls)), draw(st.integers(1, 3))
        started = draw(st.integers(0, 12))
        answer = draw(st.sampled_from((None, *3 * ANSWERS[type(call)])))
        if isinstance(call, Acquire) and answer == (0, 7):
            answer = (0, 7 + len(operations))  # no token is granted twice
        ended = None if answer is None else (started + draw(st.integers(0, 4))) * unit
        operations.append(Operation(client, call, started * unit, ended, answer))
    for client in {operation.client for operation in operations if operation.ended is None}:
        last = max(operation.started for operation in operations if operation.client == client)
        operations.append(Operation(client, Closed(), last, last + draw(st.integers(0, 3)) * unit))
    return operations


def any_room(rule: TokenRule, counting: Any, room: float, clock: leases.Clock) -> Iterator[list[Any]]:
    """As leases.with_room, but every expired lease may be left out, also in vain."""
    loose = [place for place, token in enumerate(counting) if clock.may_be_over(leases.lease(rule, token))]
    for number in range(len(loose) + 1):
        for going in combinations(loose, number):
            kept = [token for place, token in enumerate(counting) if place not in going]
            if sum(token.count for token in kept) <= room:
                yield kept


def exactly(operations: list[Operation], unit: int) -> bool:
    """Whether some moments explain the answers. Tries every tick of the clock for each operation, in each order."""
    rules = SentinelModel(ROOM, sweep_ns=2)  # type: ignore[arg-type]
    ends = {one.client: one.ended for one in operations if isinstance(one.call, Closed)}

    def explains(state: Any, now: int, left: tuple[Operation, ...], gone: frozenset[int]) -> bool:
        needed = [one for one in left if isinstance(one.call, Closed) or one.answer is not None]
        if any(now > (one.ended or 0) for one in needed) or gone & {one.client for one in needed}:
            return False
        return not needed or any(
            explains(after, at, left[:place] + left[place + 1 :], gone | ({one.client} if one in closings else set()))
            for place, one in enumerate(left)
            if one.client not in gone
            for at in range(max(now, one.started), (one.ended or ends.get(one.client) or 0) + 1, unit)
            for after in rules.step(state, one._replace(started=at, ended=at))
        )

    closings = [one for one in operations if isinstance(one.call, Closed)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(leases, "with_room", any_room)
        return explains(None, 0, tuple(operations), frozenset())


@settings(max_examples=100, deadline=None, derandomize=True)
@given(histories(OF_TOKENS, 1))
def test_token_model_accepts_all_that_some_choice_of_moments_allows(operations: list[Operation]) -> None:
    """The model does not use what the moments of one call say about those of others, so it accepts more than is
    possible."""
    passes = check(operations, SentinelModel(ROOM, sweep_ns=2)) is None  # type: ignore[arg-type]
    assert passes or not exactly(operations, 1)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(histories(OF_WINDOWS, MS // 4))
def test_window_model_accepts_exactly_what_some_choice_of_moments_allows(operations: list[Operation]) -> None:
    passes = check(operations, SentinelModel(ROOM, sweep_ns=2)) is None  # type: ignore[arg-type]
    assert passes == exactly(operations, MS // 4)


# ---- wrong servers --------------------------------------------------------------------------------------------------


class Wrong(SentinelEngine):
    """A server that now and then does something else than it was asked, or gives a wrong answer."""

    def __init__(self, kind: type, other: Any) -> None:
        super().__init__(SOME)
        self.kind, self.other, self.rng = kind, other, Random(3)

    def do(self, client: int, call: Any, now_ns: int) -> Any:
        if isinstance(call, self.kind) and self.rng.random() < 0.2:
            return self.other(super().do, client, call, now_ns)
        return super().do(client, call, now_ns)


SOME = Rules((calls_rule(1, 3), rate_rule(2, 2000)), (ParamRule("shop", 1, "pay", 1000, GLOBAL, 2, 2, {ONE: 2000}),))
FAULTS = {
    "loses releases": (
        Release,
        lambda do, client, call, now: (7 if do(client, Keep(*call), now)[0] else 6, 0),
    ),
    "releases twice": (Release, lambda do, client, call, now: (do(client, call, now), do(client, call, now))[1]),
    "says no": (Acquire, lambda do, client, call, now: (1, 0)),
    "grants less": (Acquire, lambda do, client, call, now: do(client, call._replace(count=1), now)),
    "keeps nothing": (Keep, lambda do, client, call, now: (0, 2)),
    "forgets what passed": (Flow, lambda do, client, call, now: (0, 1, 0)),
    "mixes values": (Param, lambda do, client, call, now: do(client, call._replace(values=call.values[::-1][:1]), now)),
}


@pytest.mark.parametrize(("kind", "other"), FAULTS.values(), ids=FAULTS.keys())
def test_wrong_server_is_caught(kind: type, other: Any) -> None:
    engine = Wrong(kind, other)
    operations = crowded(engine, "tokens window values", clients=4, calls=400)
    assert check(operations, SentinelModel(objects(SOME), sweep_ns=SWEPT_NS)) is not None


class Short(SentinelEngine):
    """Ends leases early, or not when their owner leaves."""

    def __init__(self, rules: Rules, *, forgets: bool) -> None:
        super().__init__(rules)
        self.forgets = forgets

    def close(self, client: int, now_ns: int) -> None:
        if not self.forgets:
            super().close(client, now_ns)


@pytest.mark.parametrize(("resource_ms", "forgets"), [(3, False), (4, True)])
def test_wrong_lease_is_caught(resource_ms: int, forgets: bool) -> None:
    engine = Short(Rules((calls_rule(1, 3, IGNORE, resource_ms),), ()), forgets=forgets)
    operations = crowded(engine, "tokens", flows=1, clients=4, calls=400)
    right = objects(Rules((calls_rule(1, 3, IGNORE, 4),), ()))
    assert check(operations, SentinelModel(right, sweep_ns=SWEPT_NS)) is not None
