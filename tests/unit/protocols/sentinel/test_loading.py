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
from unit.protocols.sentinel.rig import MS, SECOND, calls, rate, values

if TYPE_CHECKING:
    from collections.abc import Callable

    from unit.protocols.sentinel.rig import Connection, Rig

    MakeRig = Callable[..., Rig]

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
def test_too_many_rules_change_nothing(make_rig: MakeRig, rules: Rules, message: str) -> None:
    rig = make_rig(calls(1, 3), rate(2, 3), values(3, 3, {"hot": 9}))
    client = rig.connection()
    assert client.ask(wire.flow(1, 2, 1)).remaining == 2
    assert client.ask(wire.param_flow(1, 3, 1, ["hot"])).remaining == 8
    client.acquire(1)
    before = rig.figures("rules_flow", "rules_param", "hot_items")
    with pytest.raises(ValueError, match=message):
        rig.store.load_rules(rules)
    assert rig.figures("rules_flow", "rules_param", "hot_items") == before
    assert client.ask(wire.flow(1, 2, 1)).remaining == 1
    assert client.ask(wire.param_flow(1, 3, 1, ["hot"])).remaining == 7
    assert client.ask(wire.acquire(1, 1, 3)).status == Status.BLOCKED


def test_the_largest_number_of_rules(make_rig: MakeRig) -> None:
    """And then others, while all flows of the first still have a token."""
    rig = make_rig(*(calls(number) for number in range(1, 16385)), max_tokens=16385)
    for number in range(1, 16385):
        assert rig.request(number)[0] == Status.OK
    rig.load(*(calls(number) for number in range(20_001, 20_001 + 16384)))
    assert rig.request(20_001)[0] == Status.OK
    with pytest.raises(ValueError, match="and 16385 flows that have tokens"):
        rig.load(*(calls(number) for number in range(40_001, 40_001 + 16384)))
    assert rig.request(1) == (Status.NO_RULE, 0)


def test_a_rule_that_comes_back_starts_with_empty_counts(make_rig: MakeRig) -> None:
    rig = make_rig(values(1), rate(2, 3))
    client = rig.connection()
    assert ask(client, "v", count=3) == (Status.OK, 0)
    assert client.ask(wire.flow(1, 2, 3)).status == Status.OK
    rig.load()
    assert ask(client, "v") == (Status.NO_RULE, 0)
    rig.load(values(1), rate(2, 3))
    assert ask(client, "v", count=3) == (Status.OK, 0)
    assert client.ask(wire.flow(1, 2, 3)).status == Status.OK


def test_a_new_flow_in_a_reused_record_counts_from_zero(make_rig: MakeRig) -> None:
    rig = make_rig(calls(1, 1))
    _, id = rig.request(1)
    assert rig.request(1)[0] == Status.BLOCKED
    assert rig.release(id) == Status.RELEASE_OK
    rig.load()
    rig.load(calls(2))
    assert {rig.store.flow(2)[name] for name in ("now_calls", "tokens", "passed", "blocked", "expired")} == {0}


@pytest.mark.parametrize("window_ms", [100, 10_000])
def test_a_changed_window_starts_with_empty_counts(make_rig: MakeRig, window_ms: int) -> None:
    """Including what was borrowed; its samples have other numbers, lower ones if they are longer."""
    rig = make_rig(rate(1, 10))
    client = rig.connection()
    assert client.ask(wire.flow(1, 1, 8)).status == Status.OK
    rig.advance(900 * MS)
    assert client.ask(wire.flow(1, 1, 9, priority=True)).status == Status.SHOULD_WAIT
    other = replace(rate(1, 10), window_ms=window_ms)
    rig.load(other)
    rig.store.audit()
    for _ in range(3):
        assert client.ask(wire.flow(1, 1, 10)).status == Status.OK
        assert client.ask(wire.flow(1, 1, 10)).status == Status.BLOCKED
        rig.advance(window_ms * MS)
    rig.store.audit()


def test_loading_the_same_rules_changes_nothing(make_rig: MakeRig) -> None:
    rules = (values(1, 3, {"x": 5}), rate(2, 3))
    rig = make_rig(*rules)
    client = rig.connection()
    for left in (2, 1, 0):
        assert ask(client, "v") == (Status.OK, left)
        assert ask(client, "x") == (Status.OK, left + 2)
        assert client.ask(wire.flow(1, 2, 1)).remaining == left
        rig.load(*rules)
    rig.store.audit()


def test_a_flow_and_a_parameter_rule_may_have_the_same_id(make_rig: MakeRig) -> None:
    rig = make_rig(values(1), rate(1, 5))
    client = rig.connection()
    assert ask(client, "v") == (Status.OK, 2)
    assert client.ask(wire.flow(1, 1, 1)).remaining == 4
    rig.load(rate(1, 5))
    assert ask(client, "v") == (Status.NO_RULE, 0)
    assert client.ask(wire.flow(1, 1, 1)).remaining == 3


def test_a_namespace_that_comes_back_counts_its_requests_from_zero(make_rig: MakeRig) -> None:
    """And a namespace that got its record starts empty."""
    rig = make_rig(rate(1, namespace="a"), rate(2, namespace="b"))
    rig.store.set_limits(max_allowed_qps=2, sweep_interval_ns=SECOND, sweep_max_tokens=0, sweep_max_duration_ns=SECOND)
    client = rig.connection()
    assert [client.ask(wire.flow(1, 1, 1)).status for _ in range(3)] == [0, 0, Status.TOO_MANY_REQUESTS]
    rig.load(rate(3, namespace="c"), rate(2, namespace="b"))
    assert [client.ask(wire.flow(1, 3, 1)).status for _ in range(3)] == [0, 0, Status.TOO_MANY_REQUESTS]
    rig.load(rate(1, namespace="a"), rate(3, namespace="c"))
    assert client.ask(wire.flow(1, 1, 1)).status == Status.OK
    assert client.ask(wire.flow(1, 3, 1)).status == Status.TOO_MANY_REQUESTS


def test_clients_registered_before_a_rule_count(make_rig: MakeRig) -> None:
    rig = make_rig()
    clients = [rig.connection() for _ in range(3)]
    for client in clients:
        assert client.ask(wire.ping(1, b"n")).status == Status.OK
    rig.load(rate(1, 2, kind=0))
    assert clients[0].ask(wire.flow(1, 1, 6)).status == Status.OK
    clients[1].close()
    rig.settle()
    rig.now_ns += OVER
    assert clients[0].ask(wire.flow(1, 1, 5)).status == Status.BLOCKED
    assert clients[0].ask(wire.flow(1, 1, 4)).status == Status.OK


@pytest.mark.parametrize("name", ["n", "n" * 36, "n" * 37, "\u00e4" * 500, "n" * 1013])
def test_namespaces_of_any_length(make_rig: MakeRig, name: str) -> None:
    rig = make_rig(rate(1, 2, kind=0, namespace=name))
    client = rig.connection()
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
def test_rules_without_memory_are_refused_and_change_nothing(make_rig: MakeRig, rules: Rules, message: str) -> None:
    """rules.py has refused most of it by then; where it had not, memory behind a record would be written to."""
    before = (rate(2, 3), values(3, 3, {"hot": 9}))
    rig = make_rig(*before)
    client = rig.connection()
    assert client.ask(wire.flow(1, 2, 1)).remaining == 2
    with pytest.raises(ValueError, match=message):
        rig.store.load_rules(Rules((*rules.flows, before[0]), (*rules.params, before[1])))
    rig.store.audit()
    assert rig.figures("rules_flow", "rules_param", "hot_items") == [1, 1, 1]
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


def resources(rig: Rig) -> dict[str, bytes]:
    """The resources of flows, by their ids."""
    _, flows = TABLES
    walk = flows.open(rig.store, {})
    while not walk.step():
        pass
    return {row[0]: row[1] for row in walk.rows()}


def test_names_of_flows_come_and_go_with_their_rules(make_rig: MakeRig) -> None:
    """Names of any length; a flow keeps its name as long as it has tokens."""
    names = ["", "r", "r" * 60, "s" * 61, "\u00e4" * 3000]
    rig = make_rig(*(replace(calls(number), resource=name) for number, name in enumerate(names, 1)))
    expected = {str(number): name.encode() for number, name in enumerate(names, 1)}
    assert resources(rig) == expected
    rig.store.audit()
    _, token = rig.request(5)
    rig.load(replace(calls(1), resource="other"), replace(calls(2), resource="t" * 500))
    assert resources(rig) == {"1": b"other", "2": b"t" * 500, "5": expected["5"]}
    rig.store.audit()
    rig.release(token)
    assert resources(rig) == {"1": b"other", "2": b"t" * 500}
    rig.store.audit()


def test_names_that_fit_only_after_others_are_freed(make_rig: MakeRig) -> None:
    """The largest number of bytes, which exchange places; the old name is still there when the first new one comes."""
    long = "r" * 60 * (4 * 2 * 16384 - 1)
    rig = make_rig(replace(calls(1), resource="s"), replace(calls(2), resource=long))
    rig.load(replace(calls(1), resource=long), replace(calls(2), resource="s"))
    assert resources(rig) == {"1": long.encode(), "2": b"s"}


def test_hot_items_that_move_between_rules_are_never_too_many(make_rig: MakeRig) -> None:
    """All possible ones move from one rule to another one that is loaded first."""
    items = {number: 2 for number in range(65_536)}  # noqa: C420
    rig = make_rig(values(1), values(2, 1, items), max_param_values=65_536)
    rig.load(values(1, 1, items), values(2))
    assert rig.figures("hot_items", "param_values") == [65_536, 65_536]
    client = rig.connection()
    assert ask(client, 65_535, count=2) == (Status.OK, 0)
