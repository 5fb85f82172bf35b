"""Rates of the sentinel protocol: values of parameters and their memory, and hot items."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from conformance.sentinel.engine import make_store
from counterd.protocols.sentinel import wire
from counterd.protocols.sentinel._session import SentinelSession
from counterd.protocols.sentinel._store import SentinelStore
from counterd.protocols.sentinel.rules import Rules
from counterd.protocols.sentinel.wire import Status
from unit.protocols.sentinel.rig import MS, SECOND, values

if TYPE_CHECKING:
    from collections.abc import Callable

    from unit.protocols.sentinel.rig import Connection, Rig

    MakeRig = Callable[..., Rig]

WINDOW = SECOND  # of a rule, if nothing else is said
OVER = WINDOW + 2 * MS  # later nothing of a value counts, and a tick sees it


def ask(client: Connection, *asked: wire.Value, flow_id: int = 1, count: int = 1) -> tuple[int, int]:
    response = client.ask(wire.param_flow(1, flow_id, count, asked))
    return response.status, response.remaining


# ---- memory of values -----------------------------------------------------------------------------------------------


def test_the_number_of_values_is_bounded(make_rig: MakeRig) -> None:
    """Over all rules; existing values go on, and expired ones make room before any tick."""
    rig = make_rig(values(1), values(2), max_param_values=4)
    client = rig.connection()
    for number in range(3):
        assert ask(client, number) == (Status.OK, 2)
    assert ask(client, 0, flow_id=2) == (Status.OK, 2)
    assert rig.figures("param_values", "param_values_max") == [4, 4]
    assert ask(client, 3) == (Status.NOT_AVAILABLE, 0)
    assert ask(client, 1, flow_id=2) == (Status.NOT_AVAILABLE, 0)
    assert ask(client, 0) == (Status.OK, 1)
    rig.now_ns += OVER
    assert ask(client, 3) == (Status.OK, 2)
    assert rig.figures("param_values") == [1]


def test_a_request_without_room_for_a_value_changes_nothing(make_rig: MakeRig) -> None:
    """No value before the one without room is counted, and new entries for such values stay at zero."""
    rig = make_rig(values(1), max_param_values=3)
    client = rig.connection()
    assert ask(client, "a", "b") == (Status.OK, -1)
    assert ask(client, "a", "c", "a", "d") == (Status.NOT_AVAILABLE, 0)
    assert ask(client, "a") == (Status.OK, 1)
    assert ask(client, "b", "b") == (Status.OK, -1)
    assert ask(client, "c") == (Status.OK, 2)
    assert ask(client, "d") == (Status.NOT_AVAILABLE, 0)


def test_rescheduled_timers_of_values_free_no_value(make_rig: MakeRig) -> None:
    """A timer that only moves on in the wheel, since its value was used again, is no expired value."""
    rig = make_rig(values(1), max_param_values=4)
    client = rig.connection()
    for step in range(40):
        for number in range(4):
            assert ask(client, number)[0] in (Status.OK, Status.BLOCKED)
        assert ask(client, 100 + step) == (Status.NOT_AVAILABLE, 0)
        assert rig.figures("param_values") == [4]
        rig.now_ns += 100 * MS


def test_values_expire_with_their_windows_in_slices(make_rig: MakeRig) -> None:
    rig = make_rig(values(1, 1), max_param_values=20_000)
    client = rig.connection()
    for number in range(0, 12_000, 100):
        assert ask(client, *range(number, number + 100)) == (Status.OK, -1)
        rig.settle()
    assert rig.figures("param_values") == [12_000]
    rig.now_ns += OVER
    ticks = 0
    while 0 <= rig.store.next_deadline() <= rig.now_ns:
        (before,) = rig.figures("param_values")
        rig.store.tick(rig.now_ns)
        assert before - rig.figures("param_values")[0] <= 2048
        assert ask(client, 11_999 - ticks) == (Status.OK, 0)
        ticks += 1
        assert ticks < 50
    assert rig.figures("param_values") == [ticks]


def test_a_used_value_stays(make_rig: MakeRig) -> None:
    rig = make_rig(values(1, 2), max_param_values=2)
    client = rig.connection()
    for _ in range(10):
        assert ask(client, "v") == (Status.OK, 1)
        rig.advance(900 * MS)
        assert ask(client, "v") == (Status.OK, 0)
        rig.advance(1100 * MS)
    assert rig.figures("param_values") == [0]


@pytest.mark.parametrize("samples", [1, 7, 8, 127, 128])
def test_samples_take_as_many_blocks_as_they_need(make_rig: MakeRig, samples: int) -> None:
    rig = make_rig(values(1, samples, samples=samples, window_ms=samples * 10), max_param_values=100)
    client = rig.connection()
    for step in range(samples):
        status, _ = ask(client, "v", "w" * 900)
        assert status == (Status.OK if step * 1000 <= (samples - 1) * samples * 10 else Status.BLOCKED)
        rig.now_ns += 10 * MS
    rig.store.audit()
    rig.advance(samples * 10 * MS + 2 * MS)
    assert rig.figures("param_values") == [0]
    assert ask(client, "v", count=samples) == (Status.OK, 0)


def test_the_region_has_room_for_each_token_and_value() -> None:
    """Whole pages of each, so that at most one page per structure is lost."""
    base, page, count = 1 << 14, 4096, 1 << 14

    def region(**sizes: int) -> int:
        size: int = make_store(**{"max_tokens": base, "max_param_values": base} | sizes).snapshot()["region"]
        return size

    tokens = region(max_tokens=base + count) - region()
    assert tokens == pytest.approx(count * (2 * 8 + 64 + 32), abs=4 * page)
    values = region(max_param_values=base + count) - region()
    assert values == pytest.approx(count * (88 + 4 * 64), abs=4 * page)  # its index has room for hot items, and more


def small_store(**sizes: int) -> SentinelStore:
    """Makes a store as open_store() does, with other sizes."""
    usual = {"namespaces": 1, "holdings": 1, "holdings_per_connection": 1, "tokens": 1, "rules": 2, "items": 4}
    memory = {"name_memory": 1 << 12, "param_values": 1}
    keys = {"hash_key": bytes(16), "token_key": bytes(16)}
    return SentinelStore(**keys, make_session=SentinelSession, **(usual | memory | sizes))


def test_the_sum_of_values_and_hot_items_is_bounded() -> None:
    with pytest.raises(ValueError, match="there can be 65536 hot items, not 4; and 4294967292 values"):
        small_store(param_values=(1 << 32) - 4)


# ---- hot items ------------------------------------------------------------------------------------------------------


def test_hot_items_do_not_count_for_max_param_values(make_rig: MakeRig) -> None:
    rig = make_rig(values(1, 3, {"x": 5, "y": 0, 7: 1}), max_param_values=1)
    client = rig.connection()
    assert rig.figures("hot_items", "param_values") == [3, 0]
    assert ask(client, "v") == (Status.OK, 2)
    assert ask(client, "x") == (Status.OK, 4)
    assert ask(client, "y") == (Status.BLOCKED, 0)
    assert ask(client, 7) == (Status.OK, 0)
    assert ask(client, "w") == (Status.NOT_AVAILABLE, 0)
    rig.advance(3600 * SECOND)
    assert rig.figures("hot_items", "param_values") == [3, 0]
    assert ask(client, "x", count=5) == (Status.OK, 0)


def test_an_item_that_is_no_longer_hot_still_counts(make_rig: MakeRig) -> None:
    rig = make_rig(values(1, 3, {"x": 5}), max_param_values=10)
    client = rig.connection()
    assert ask(client, "x", count=4) == (Status.OK, 1)
    assert ask(client, "v", count=2) == (Status.OK, 1)
    rig.load(values(1, 3, {"v": 9}))
    assert rig.figures("hot_items", "param_values") == [1, 1]
    assert ask(client, "x") == (Status.BLOCKED, 0)
    assert ask(client, "v") == (Status.OK, 6)
    rig.load(values(1, 3, {"x": 7, "v": 9}))
    assert ask(client, "x") == (Status.OK, 2)
    assert ask(client, "v") == (Status.OK, 5)
    rig.load(values(1, 3))
    rig.advance(OVER)
    assert rig.figures("hot_items", "param_values") == [0, 0]
    assert ask(client, "x") == (Status.OK, 2)


@pytest.mark.parametrize(("tag", "infinite", "bits"), [(3, 0x7FF0 << 48, 52), (4, 0x7F80 << 16, 23)])
def test_every_nan_is_the_same_value(make_rig: MakeRig, tag: int, infinite: int, bits: int) -> None:
    rig = make_rig(values(1, 1000), max_param_values=2)
    client = rig.connection()
    sign = 1 << (bits + (11 if tag == 3 else 8))
    size = 8 if tag == 3 else 4
    bodies = [(infinite | 1 << bit | sign * (bit % 2)).to_bytes(size, "big") for bit in range(bits)]
    for number, body in enumerate([*bodies, infinite.to_bytes(size, "big")]):
        data = (1).to_bytes(8, "big") + (1).to_bytes(4, "big") + (1).to_bytes(4, "big") + bytes([tag]) + body
        left = 999 - number if number < bits else 999
        assert client.ask(wire.frame(1, 2, data)).remaining == left


def test_the_largest_number_of_hot_items(make_rig: MakeRig) -> None:
    rig = make_rig(values(1, 1, {number: 2 for number in range(65_536)}), max_param_values=1)  # noqa: C420
    client = rig.connection()
    assert rig.figures("hot_items") == [65_536]
    assert ask(client, 65_535, count=2) == (Status.OK, 0)
    assert ask(client, 65_536) == (Status.OK, 0)


def test_reloaded_hot_items_need_no_more_memory() -> None:
    """Those of either rule, though one more of them would not fit."""
    store = small_store()
    rules = Rules((), (values(1, 3, {"a": 5, "b": 5}), values(2, 3, {"c": 5, "d": 5})))
    for _ in range(2):
        store.load_rules(rules)
        assert store.snapshot()["hot_items"] == 4


def test_hot_items_without_memory_for_their_samples_are_refused() -> None:
    store = small_store(name_memory=64 * 3)
    store.load_rules(Rules((), (values(1, 3, {"a": 5}),)))
    with pytest.raises(ValueError, match=r"no memory for 1 more paramFlowItemList entries"):
        store.load_rules(Rules((), (values(1, 3, {"a": 5, "b": 5}),)))
    assert store.snapshot()["hot_items"] == 1


def test_two_items_that_are_equal_in_java(make_rig: MakeRig) -> None:
    """Two entries of a list may be the same value; the store uses either."""
    nan = bytes.fromhex("03 7ff0000000000001")
    rule = values(1, 3, {float("nan"): 5})
    rig = make_rig(replace(rule, items={nan: 4}))
    client = rig.connection()
    assert ask(client, float("nan"), count=4) == (Status.OK, 0)
    rig.load(values(1, 3, {float("nan"): 5}))
    assert ask(client, float("nan")) == (Status.OK, 0)
    assert rig.figures("hot_items") == [1]


def test_hot_items_come_and_go_with_their_rules(make_rig: MakeRig) -> None:
    rig = make_rig(values(1, 3, {number: 9 for number in range(1000)}), max_param_values=100)  # noqa: C420
    assert rig.figures("hot_items") == [1000]
    for rules in ([], [values(1, 3, {"x": 1}, samples=5)], [values(1, 3, {"x": 1}, window_ms=500)], [values(2)], []):
        rig.load(*rules)
        rig.store.audit()
        assert rig.figures("hot_items") == [sum(len(rule.items) for rule in rules)]
    rig.advance(2 * SECOND)
    assert rig.figures("param_values") == [0]
