"""The checker on histories of throttr's keys: it accepts those of a correct server, and finds every defect of a
wrong one."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest

from history import Closed, Operation, check
from history.crowd import ThrottrEngine, crowd, throttr_calls
from history.throttr import Attribute, Change, Get, Insert, Purge, Query, Set, ThrottrModel, TTLType, Update

NS, S = int(TTLType.NANOSECONDS), int(TTLType.SECONDS)
NINE = Insert("k", 9, 99)
SHORT = Insert("k", 9, 20, NS)
ASK = Query("k")


def quota(change: int, value: int) -> Update:
    return Update("k", Attribute.QUOTA, Change(change), value)


def ttl(change: int, value: int) -> Update:
    return Update("k", Attribute.TTL, Change(change), value)


def said(*rows: tuple[Any, ...]) -> list[Operation]:
    return [Operation(*row) for row in rows]


# ---- right ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ttl_max", [0, 1, 2, 10, 255])
@pytest.mark.parametrize("keys", [1, 3])
def test_engine_has_an_order_for_everything(ttl_max: int, keys: int) -> None:
    operations = crowd(Random(ttl_max), ThrottrEngine(), throttr_calls(keys, ttl_max), clients=6, calls=600, dying=0.05)
    assert check(operations, ThrottrModel(value_size=1)) is None


RIGHT = {
    "gone when its time may be over": said((1, SHORT, 0, 10, True), (1, ASK, 15, 20, False)),
    "there when its time may not be over": said((1, SHORT, 0, 10, True), (1, ASK, 29, 40, (9, NS, 0))),
    "gone and made again": said((1, SHORT, 0, 10, True), (1, NINE, 30, 40, True), (1, ASK, 50, 60, (9, S, 98))),
    "its time begins anew": said((1, SHORT, 0, 10, True), (1, ttl(0, 90), 11, 12, True), (1, ASK, 60, 61, (9, NS, 41))),
    "its time is longer": said((1, SHORT, 0, 10, True), (1, ttl(1, 90), 11, 12, True), (1, ASK, 60, 61, (9, NS, 50))),
    "its time is shorter": said((1, NINE, 0, 10, True), (1, ttl(2, 255), 11, 12, True), (1, ASK, 13, 14, False)),
    "what does not fit is cut": said(
        (1, Insert("k", 9, 5, S), 0, 1, True), (1, ttl(1, 255), 2, 3, True), (1, ASK, 4, 5, (9, S, 3))
    ),
    "a buffer": said((1, Set("k", b"v", 9), 0, 1, True), (1, Get("k"), 2, 3, (S, 8, b"v")), (1, ASK, 4, 5, (0, S, 8))),
    "a buffer's quota": said((1, Set("k", b"v", 9), 0, 1, True), (1, quota(0, 1), 2, 3, False)),
    "a buffer over a counter": said((1, NINE, 0, 1, True), (1, Set("k", b"v", 9), 2, 3, False)),
    "a counter's value": said((1, NINE, 0, 1, True), (1, Get("k"), 2, 3, (S, 98, b""))),
    "a sum that does not fit": said((1, NINE, 0, 1, True), (1, quota(1, 255), 2, 3, False)),
}

WRONG = {
    "two make it": said((1, NINE, 0, 9, True), (2, NINE, 1, 8, True)),
    "nobody makes it": said((1, NINE, 0, 9, False)),
    "never made, but there": said((1, ASK, 0, 9, (9, S, 98))),
    "lost": said((1, NINE, 0, 1, True), (2, ASK, 2, 3, False)),
    "expired early": said((1, SHORT, 0, 10, True), (1, ASK, 11, 19, False)),
    "expired late": said((1, SHORT, 0, 10, True), (1, ASK, 30, 40, (9, NS, 0))),
    "expired, then not": said((1, SHORT, 0, 10, True), (1, ASK, 15, 20, False), (1, ASK, 21, 22, (9, NS, 0))),
    "expired, and in the way": said((1, SHORT, 0, 10, True), (1, NINE, 31, 32, False)),
    "its time is too long": said((1, SHORT, 0, 10, True), (1, ASK, 11, 12, (9, NS, 19))),
    "its time is too short": said((1, SHORT, 0, 1, True), (1, ASK, 2, 3, (9, NS, 15))),
    "another unit": said((1, NINE, 0, 1, True), (1, ASK, 2, 3, (9, NS, 98))),
    "a longer time that is lost": said((1, SHORT, 0, 1, True), (1, ttl(1, 90), 2, 3, True), (1, ASK, 40, 41, False)),
    "a time that begins anew, lost": said((1, SHORT, 0, 1, True), (1, ttl(0, 90), 2, 3, True), (1, ASK, 40, 41, False)),
    "a shorter time that is lost": said((1, NINE, 0, 1, True), (1, ttl(2, 99), 2, 3, True), (1, ASK, 4, 5, (9, S, 98))),
    "a time for nothing": said((1, ttl(0, 9), 0, 1, True)),
    "lost update": said(
        (1, NINE, 0, 1, True), (2, quota(1, 1), 2, 9, True), (3, quota(1, 1), 3, 8, True), (1, ASK, 10, 11, (10, S, 98))
    ),
    "below zero": said((1, NINE, 0, 1, True), (1, quota(2, 10), 2, 3, True)),
    "taken twice": said((1, NINE, 0, 1, True), (1, quota(2, 5), 2, 9, True), (2, quota(2, 5), 2, 9, True)),
    "enough, but refused": said((1, NINE, 0, 1, True), (1, quota(2, 9), 2, 3, False)),
    "wrapped sum": said((1, NINE, 0, 1, True), (1, quota(1, 250), 2, 3, True)),
    "wrapped below zero": said((1, NINE, 0, 1, True), (1, quota(2, 10), 2, 9, False), (1, ASK, 10, 11, (255, S, 98))),
    "refused, but done": said((1, NINE, 0, 1, True), (1, quota(1, 250), 2, 3, False), (1, ASK, 4, 5, (3, S, 98))),
    "purged, but there": said((1, NINE, 0, 1, True), (1, Purge("k"), 2, 3, True), (1, ASK, 4, 5, (9, S, 98))),
    "purged by two": said((1, NINE, 0, 1, True), (1, Purge("k"), 2, 9, True), (2, Purge("k"), 2, 9, True)),
    "not purged": said((1, NINE, 0, 1, True), (1, Purge("k"), 2, 3, False)),
    "another value": said((1, Set("k", b"v", 9), 0, 1, True), (1, Get("k"), 2, 3, (S, 8, b"w"))),
    "an old value": said(
        (1, Set("k", b"v", 9), 0, 1, True), (1, Set("k", b"w", 9), 2, 3, True), (1, Get("k"), 4, 5, (S, 8, b"v"))
    ),
    "a value of a counter": said((1, NINE, 0, 1, True), (1, Set("k", b"v", 9), 2, 3, True)),
    "unanswered, seen too late": said(
        (1, NINE, 0), (1, Closed(), 1, 9), (2, ASK, 2, 10, False), (2, ASK, 11, 12, False), (2, NINE, 13, 14, False)
    ),
    "of another key": said((1, NINE, 0, 1, True), (1, Query("other"), 2, 3, (9, S, 98))),
}


@pytest.mark.parametrize("operations", RIGHT.values(), ids=RIGHT.keys())
def test_right_history_passes(operations: list[Operation]) -> None:
    assert check(operations, ThrottrModel(value_size=1)) is None


@pytest.mark.parametrize("operations", WRONG.values(), ids=WRONG.keys())
def test_wrong_history_is_caught(operations: list[Operation]) -> None:
    assert check(operations, ThrottrModel(value_size=1)) is not None


def test_effects_of_unanswered_calls_outlive_their_connection() -> None:
    start = said((1, NINE, 0), (1, Closed(), 5, 9))
    for answer in ((9, S, 98), False):
        assert check([*start, *said((2, ASK, 20, 21, answer))], ThrottrModel()) is None
    assert check([*start, *said((2, ASK, 20, 21, False), (2, ASK, 22, 23, (9, S, 98)))], ThrottrModel()) is not None


def test_slack_and_memory_allow_only_their_deviations() -> None:
    late = said((1, SHORT, 0, 10, True), (1, ASK, 30, 40, (9, NS, 0)))
    assert check(late, ThrottrModel(slack_ns=1)) is None
    assert check(said((1, NINE, 0, 9, False)), ThrottrModel(memory=True)) is None
    assert check(said((1, quota(1, 9), 0, 9, True)), ThrottrModel(memory=True)) is not None


# ---- wrong servers --------------------------------------------------------------------------------------------------


class Wrong(ThrottrEngine):
    """A server that now and then confirms what it refused, or does something else than it was asked."""

    def __init__(self, kind: type, other: Any) -> None:
        super().__init__()
        self.kind, self.other, self.rng = kind, other, Random(3)

    def do(self, client: int, call: Any, now_ns: int) -> Any:
        if isinstance(call, self.kind) and self.rng.random() < 0.3:
            return self.other(super().do, client, call, now_ns)
        return super().do(client, call, now_ns)


FAULTS = {
    "loses updates": (Update, lambda do, client, call, now: do(client, call._replace(value=0), now)),
    "keeps what is purged": (Purge, lambda do, client, call, now: do(client, Query(call.key), now) is not False),
    "mixes keys": (Query, lambda do, client, call, now: do(client, Query(b"0" if call.key == b"1" else b"1"), now)),
    "expires late": (Insert, lambda do, client, call, now: do(client, call._replace(ttl=call.ttl + 2), now)),
    "says no": (Insert, lambda do, client, call, now: do(client, call, now) and False),
}


@pytest.mark.parametrize(("kind", "other"), FAULTS.values(), ids=FAULTS.keys())
def test_wrong_server_is_caught(kind: type, other: Any) -> None:
    operations = crowd(Random(1), Wrong(kind, other), throttr_calls(2, 20), clients=4, calls=600, dying=0.05)
    assert check(operations, ThrottrModel(value_size=1)) is not None
