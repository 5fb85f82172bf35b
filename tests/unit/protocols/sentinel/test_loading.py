"""Rules of the sentinel protocol: how many there may be, and which counts a change of them keeps."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import click
import pytest

from counterd.cli.ctl import sentinel as counterctl
from counterd.protocols.sentinel import rules as documents
from counterd.protocols.sentinel import wire
from counterd.protocols.sentinel._store import LIMITS
from counterd.protocols.sentinel._tables import TABLES
from counterd.protocols.sentinel.rules import Rules
from counterd.protocols.sentinel.wire import Status
from unit.protocols.sentinel.rooms import MS, SECOND, calls, rate, values

if TYPE_CHECKING:
    from collections.abc import Callable

    from unit.protocols.sentinel.rooms import Connection, Room

    MakeRoom = Callable[..., Room]

OVER = SECOND + 2 * MS  # later nothing of a value counts, and a tick sees it


def ask(client: Connection, *asked: wire.Value, flow_id: int = 1, count: int = 1) -> tuple[int, int]:
    response = client.ask(wire.param_flow(1, flow_id, count, asked))
    return response.status, response.remaining


# ---- rules ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        (Rules(tuple(calls(number) for number in range(1, 16386)), ()), "16385 flow rules"),
        (Rules((), tuple(values(number) for number in range(1, 16386))), "16385 parameter rules"),
        (Rules(tuple(rate(n, namespace=f"n{n}") for n in range(1, 1026)), ()), "1024 namespaces"),
        (Rules((), (values(1, 1, dict.fromkeys(range(65537), 1)),)), "65536 paramFlowItemList entries"),
    ],
    ids=["flows", "params", "namespaces", "items"],
)
def test_too_many_rules_change_nothing(make_room: MakeRoom, rules: Rules, message: str) -> None:
    room = make_room(calls(1, 3), rate(2, 3), values(3, 3, {"hot": 9}))
    client = room.connection()
    assert client.ask(wire.flow(1, 2, 1)).remaining == 2
    assert client.ask(wire.param_flow(1, 3, 1, ["hot"])).remaining == 8
    client.acquire(1)
    before = room.figures("rules_flow", "rules_param", "hot_items")
    with pytest.raises(ValueError, match=message):
        room.store.load_rules(rules)
    assert room.figures("rules_flow", "rules_param", "hot_items") == before
    assert client.ask(wire.flow(1, 2, 1)).remaining == 1
    assert client.ask(wire.param_flow(1, 3, 1, ["hot"])).remaining == 7
    assert client.ask(wire.acquire(1, 1, 3)).status == Status.BLOCKED


def test_the_largest_number_of_rules(make_room: MakeRoom) -> None:
    """And then others, while all flows of the first still have a token."""
    room = make_room(*(calls(number) for number in range(1, 16385)), max_tokens=16385)
    for number in range(1, 16385):
        assert room.request(number)[0] == Status.OK
    room.load(*(calls(number) for number in range(20_001, 20_001 + 16384)))
    assert room.request(20_001)[0] == Status.OK
    with pytest.raises(ValueError, match="and 16385 flows that have tokens"):
        room.load(*(calls(number) for number in range(40_001, 40_001 + 16384)))
    assert room.request(1) == (Status.NO_RULE, 0)


def test_a_rule_that_comes_back_starts_with_empty_counts(make_room: MakeRoom) -> None:
    room = make_room(values(1), rate(2, 3))
    client = room.connection()
    assert ask(client, "v", count=3) == (Status.OK, 0)
    assert client.ask(wire.flow(1, 2, 3)).status == Status.OK
    room.load()
    assert ask(client, "v") == (Status.NO_RULE, 0)
    room.load(values(1), rate(2, 3))
    assert ask(client, "v", count=3) == (Status.OK, 0)
    assert client.ask(wire.flow(1, 2, 3)).status == Status.OK


def test_a_new_flow_in_a_reused_record_counts_from_zero(make_room: MakeRoom) -> None:
    room = make_room(calls(1, 1))
    _, id = room.request(1)
    assert room.request(1)[0] == Status.BLOCKED
    assert room.release(id) == Status.RELEASE_OK
    room.load()
    room.load(calls(2))
    assert {room.store.flow(2)[name] for name in ("now_calls", "tokens", "passed", "blocked", "expired")} == {0}


@pytest.mark.parametrize("window_ms", [100, 10_000])
def test_a_changed_window_starts_with_empty_counts(make_room: MakeRoom, window_ms: int) -> None:
    """Including what was borrowed; its samples have other numbers, lower ones if they are longer."""
    room = make_room(rate(1, 10))
    client = room.connection()
    assert client.ask(wire.flow(1, 1, 8)).status == Status.OK
    room.advance(900 * MS)
    assert client.ask(wire.flow(1, 1, 9, priority=True)).status == Status.SHOULD_WAIT
    other = replace(rate(1, 10), window_ms=window_ms)
    room.load(other)
    room.store.audit()
    for _ in range(3):
        assert client.ask(wire.flow(1, 1, 10)).status == Status.OK
        assert client.ask(wire.flow(1, 1, 10)).status == Status.BLOCKED
        room.advance(window_ms * MS)
    room.store.audit()


def test_loading_the_same_rules_changes_nothing(make_room: MakeRoom) -> None:
    rules = (values(1, 3, {"x": 5}), rate(2, 3))
    room = make_room(*rules)
    client = room.connection()
    for left in (2, 1, 0):
        assert ask(client, "v") == (Status.OK, left)
        assert ask(client, "x") == (Status.OK, left + 2)
        assert client.ask(wire.flow(1, 2, 1)).remaining == left
        room.load(*rules)
    room.store.audit()


def test_a_flow_and_a_parameter_rule_may_have_the_same_id(make_room: MakeRoom) -> None:
    room = make_room(values(1), rate(1, 5))
    client = room.connection()
    assert ask(client, "v") == (Status.OK, 2)
    assert client.ask(wire.flow(1, 1, 1)).remaining == 4
    room.load(rate(1, 5))
    assert ask(client, "v") == (Status.NO_RULE, 0)
    assert client.ask(wire.flow(1, 1, 1)).remaining == 3


def test_a_namespace_that_comes_back_counts_its_requests_from_zero(make_room: MakeRoom) -> None:
    """And a namespace that got its record starts empty."""
    room = make_room(rate(1, namespace="a"), rate(2, namespace="b"))
    room.store.set_limits(max_allowed_qps=2, sweep_interval_ns=SECOND, sweep_max_tokens=0, sweep_max_duration_ns=SECOND)
    client = room.connection()
    assert [client.ask(wire.flow(1, 1, 1)).status for _ in range(3)] == [0, 0, Status.TOO_MANY_REQUESTS]
    room.load(rate(3, namespace="c"), rate(2, namespace="b"))
    assert [client.ask(wire.flow(1, 3, 1)).status for _ in range(3)] == [0, 0, Status.TOO_MANY_REQUESTS]
    room.load(rate(1, namespace="a"), rate(3, namespace="c"))
    assert client.ask(wire.flow(1, 1, 1)).status == Status.OK
    assert client.ask(wire.flow(1, 3, 1)).status == Status.TOO_MANY_REQUESTS


def test_clients_registered_before_a_rule_count(make_room: MakeRoom) -> None:
    room = make_room()
    clients = [room.connection() for _ in range(3)]
    for client in clients:
        assert client.ask(wire.ping(1, b"n")).status == Status.OK
    room.load(rate(1, 2, kind=0))
    assert clients[0].ask(wire.flow(1, 1, 6)).status == Status.OK
    clients[1].close()
    room.settle()
    room.now_ns += OVER
    assert clients[0].ask(wire.flow(1, 1, 5)).status == Status.BLOCKED
    assert clients[0].ask(wire.flow(1, 1, 4)).status == Status.OK


@pytest.mark.parametrize("name", ["n", "n" * 36, "n" * 37, "\u00e4" * 500, "n" * 1013])
def test_namespaces_of_any_length(make_room: MakeRoom, name: str) -> None:
    room = make_room(rate(1, 2, kind=0, namespace=name))
    client = room.connection()
    assert client.ask(wire.flow(1, 1, 1)).status == Status.BLOCKED
    assert client.ask(wire.ping(1, name.encode())).connected == 1
    assert client.ask(wire.flow(1, 1, 2)).status == Status.OK


# ---- bounds of C ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        (Rules((replace(rate(1), sample_count=129),), ()), "1 to 128 samples, not 129"),
        (Rules((replace(rate(1), sample_count=0),), ()), "1 to 128 samples, not 0"),
        (Rules((), (replace(values(1), sample_count=129),)), "1 to 128 samples, not 129"),
        (Rules((replace(rate(1), window_ms=0),), ()), "at least 10 ns, not 0"),
        (Rules((rate(1, namespace="n" * 1014),), ()), "1 to 1013 bytes, not 1014"),
        (Rules((rate(1, namespace=""),), ()), "1 to 1013 bytes, not 0"),
        (Rules((), (replace(values(1), items={b"\7\0\0\4\0" + bytes(1024): 1}),)), "a value of 1029 bytes is invalid"),
        (Rules((), (replace(values(1), items={b"": 1}),)), "a value of 0 bytes is invalid"),
        (Rules((), (replace(values(1), items={b"\1\0": 1}),)), "a value of 2 bytes is invalid"),
        (Rules((replace(rate(1), resource="r" * 60 * (4 * 2 * 16384 + 1)),), ()), "131074 blocks of memory"),
    ],
    ids=["samples", "no samples", "samples of values", "no window", "namespace", "no namespace", "item", "no item",
         "half an item", "resource"],
)  # fmt: skip
def test_rules_without_memory_are_refused_and_change_nothing(make_room: MakeRoom, rules: Rules, message: str) -> None:
    """rules.py has refused most of it by then; where it had not, memory behind a record would be written to."""
    before = (rate(2, 3), values(3, 3, {"hot": 9}))
    room = make_room(*before)
    client = room.connection()
    assert client.ask(wire.flow(1, 2, 1)).remaining == 2
    with pytest.raises(ValueError, match=message):
        room.store.load_rules(Rules((*rules.flows, before[0]), (*rules.params, before[1])))
    room.store.audit()
    assert room.figures("rules_flow", "rules_param", "hot_items") == [1, 1, 1]
    assert client.ask(wire.flow(1, 2, 1)).remaining == 1


def test_bounds_in_python_equal_those_in_c() -> None:
    """C has memory for no more; a larger bound elsewhere would refuse late, a smaller one early."""
    assert LIMITS["samples"] == documents.SAMPLES_MAX
    assert LIMITS["rules"] == documents.FLOWS_MAX == documents.PARAMS_MAX
    assert LIMITS["namespaces"] == documents.NAMESPACES_MAX
    assert LIMITS["namespace"] == wire.NAMESPACE_MAX
    longest = "n" * LIMITS["namespace"]
    assert counterctl.NAMESPACE.convert(longest, None, None) == longest.encode()
    with pytest.raises(click.BadParameter):
        counterctl.NAMESPACE.convert(longest + "n", None, None)
    assert LIMITS["items"] == 65_536  # rules.py has no bound of its own for these


# ---- in the region --------------------------------------------------------------------------------------------------


def resources(room: Room) -> dict[str, bytes]:
    """The resources of flows, by their ids."""
    _, flows = TABLES
    walk = flows.open(room.store, {})
    while not walk.step():
        pass
    return {row[0]: row[1] for row in walk.rows()}


def test_names_of_flows_come_and_go_with_their_rules(make_room: MakeRoom) -> None:
    """Names of any length; a flow keeps its name as long as it has tokens."""
    names = ["", "r", "r" * 60, "s" * 61, "\u00e4" * 3000]
    room = make_room(*(replace(calls(number), resource=name) for number, name in enumerate(names, 1)))
    expected = {str(number): name.encode() for number, name in enumerate(names, 1)}
    assert resources(room) == expected
    room.store.audit()
    _, token = room.request(5)
    room.load(replace(calls(1), resource="other"), replace(calls(2), resource="t" * 500))
    assert resources(room) == {"1": b"other", "2": b"t" * 500, "5": expected["5"]}
    room.store.audit()
    room.release(token)
    assert resources(room) == {"1": b"other", "2": b"t" * 500}
    room.store.audit()


def test_names_that_fit_only_after_others_are_freed(make_room: MakeRoom) -> None:
    """The largest number of bytes, which exchange places; the old name is still there when the first new one comes."""
    long = "r" * 60 * (4 * 2 * 16384 - 1)
    room = make_room(replace(calls(1), resource="s"), replace(calls(2), resource=long))
    room.load(replace(calls(1), resource=long), replace(calls(2), resource="s"))
    assert resources(room) == {"1": long.encode(), "2": b"s"}


def test_hot_items_that_move_between_rules_are_never_too_many(make_room: MakeRoom) -> None:
    """All possible ones move from one rule to another one that is loaded first."""
    items = {number: 2 for number in range(65_536)}  # noqa: C420
    room = make_room(values(1), values(2, 1, items), max_param_values=65_536)
    room.load(values(1, 1, items), values(2))
    assert room.figures("hot_items", "param_values") == [65_536, 65_536]
    client = room.connection()
    assert ask(client, 65_535, count=2) == (Status.OK, 0)
