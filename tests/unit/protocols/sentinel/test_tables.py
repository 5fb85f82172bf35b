"""The sentinel protocol's tables of tokens and flows."""

from __future__ import annotations

from typing import Any

import pytest

from counterd.protocols.sentinel import wire
from counterd.protocols.sentinel._session import open_store
from counterd.protocols.sentinel._tables import TABLES
from counterd.protocols.sentinel.rules import read_rules

TOKENS, FLOWS = TABLES
SECOND = 1_000_000_000
START = 1000 * SECOND


def rule(flow_id: int, resource: str, grade: int, count: float) -> dict[str, Any]:
    config = {"flowId": flow_id, "thresholdType": 1}
    return {"resource": resource, "grade": grade, "count": count, "clusterMode": True, "clusterConfig": config}


RULES = {"shop": {"flowRules": [rule(101, "pay", 0, 3), rule(102, "ship", 0, 9), rule(7, "se\u00e4rch", 1, 2)]}}


@pytest.fixture
def store() -> Any:
    store = open_store(
        max_tokens=100,
        max_param_values=10,
        max_allowed_qps=30000,
        sweep_interval_ns=SECOND,
        sweep_max_tokens=0,
        sweep_max_duration_ns=SECOND,
        hash_key=bytes(16),
        token_key=bytes(16),
        now_ns=0,
    )
    store.load_rules(read_rules(RULES))
    return store


def listed(store: Any, table: Any, **parameters: str) -> tuple[list[Any], int]:
    walk = table.open(store, parameters)
    while not walk.step():
        pass
    return walk.rows(), walk.total


def acquire(session: Any, flow_id: int, count: int, now: int) -> int:
    (reply,) = wire.ResponseParser().feed(session.receive(wire.acquire(1, flow_id, count), now))
    return int(reply.token_id)


def test_tokens_are_sorted_by_age_and_count(store: Any) -> None:
    session = store.session(START)
    first = acquire(session, 102, 1, START)
    second = acquire(session, 102, 5, START + SECOND)
    third = acquire(session, 101, 2, START + 2 * SECOND)
    session.receive(wire.keep(4, first), START + 2 * SECOND)
    rows, total = listed(store, TOKENS)
    assert (rows, total) == (
        [
            (str(first), "102", 1, session.number, 2.0, 4.0, 1),
            (str(second), "102", 5, session.number, 1.0, 3.0, 0),
            (str(third), "101", 2, session.number, 0.0, 4.0, 0),
        ],
        3,
    )
    assert [row[0] for row in listed(store, TOKENS, sort="count")[0]] == [str(second), str(third), str(first)]
    assert [row[0] for row in listed(store, TOKENS, flow="101")[0]] == [str(third)]
    assert listed(store, TOKENS, limit="1") == (rows[:1], 3)
    other = store.session(START + 2 * SECOND)
    fourth = acquire(other, 102, 1, START + 2 * SECOND)
    assert listed(store, TOKENS, connection=str(session.number)) == (rows, 3)
    assert [row[0] for row in listed(store, TOKENS, connection=str(session.number), flow="101")[0]] == [str(third)]
    assert [row[0] for row in listed(store, TOKENS, connection=str(other.number))[0]] == [str(fourth)]
    other.receive(wire.release(5, fourth), START + 2 * SECOND)
    assert listed(store, TOKENS, connection=str(other.number)) == ([], 0)
    session.closed(START + 3 * SECOND)
    store.tick(START + 3 * SECOND)
    assert [row[3:6] for row in listed(store, TOKENS)[0]] == [(0, 3.0, 2.0), (0, 2.0, 2.0), (0, 1.0, 2.0)]


def test_flows_with_and_without_rules(store: Any) -> None:
    session = store.session(START)
    acquire(session, 101, 2, START)
    acquire(session, 101, 2, START)
    session.receive(wire.flow(1, 7, 2) + wire.flow(2, 7, 1), START)
    rows, total = listed(store, FLOWS)
    assert (rows, total) == (
        [
            ("101", b"pay", "concurrency", 3, 2, 2, 2, 0, 0),
            ("102", b"ship", "concurrency", 9, 0, 0, 0, 0, 0),
            ("7", "se\u00e4rch".encode(), "qps", 2, 0, 2, 1, 0, 0),
        ],
        3,
    )
    assert [row[0] for row in listed(store, FLOWS, sort="blocked")[0]] == ["101", "7", "102"]
    store.load_rules(read_rules({}))
    assert listed(store, FLOWS) == ([("101", b"pay", "no rule", 0, 2, 2, 2, 0, 0)], 1)
    store.tick(START + 5 * SECOND)
    assert listed(store, FLOWS) == ([], 0)


def test_invalid_parameters_are_refused(store: Any) -> None:
    for table, name, text in ((TOKENS, "flow", "0"), (TOKENS, "match", "x"), (FLOWS, "sort", "held")):
        with pytest.raises(ValueError, match=name):
            table.open(store, {name: text})
