"""Limits that the server sets: how a file is read, which rule applies to a name, and how it changes requests."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from counterd.json_documents import DocumentError
from counterd.protocols.counter import wire
from counterd.protocols.counter.limits import NAME_MAX, RULES_MAX, Limits, Rule, parse_limits
from counterd.protocols.counter.wire import OnDeath, Permit, Rate, Shortage, Status
from kit.counters import make_store
from kit.takes import Desk, Taker
from unit.protocols.counter.test_tables import listed

MINUTE_US = 60_000_000
TICK_MS = 2  # a timer may be so late
OVER = "More than the limit of the server"


def limits(permits: dict[str, int] | None = None, rates: dict[str, tuple[int, ...]] | None = None) -> Limits:
    """Makes limits. permits: the maximum by name. rates: limit, period in seconds and burst by name."""
    document = {
        "permits": [{"name": name, "maximum": maximum} for name, maximum in (permits or {}).items()],
        "rates": [
            dict(zip(("name", "limit", "period", "burst"), (name, *numbers), strict=False))
            for name, numbers in (rates or {}).items()
        ],
    }
    return parse_limits(json.dumps(document))


def problems(document: Any) -> tuple[str, ...]:
    with pytest.raises(DocumentError) as caught:
        parse_limits(document if isinstance(document, (str, bytes)) else json.dumps(document))
    return caught.value.problems


# ---- the file ----


def test_rules_are_sorted_and_know_the_next_shorter_prefix() -> None:
    found = limits({"b": 1, "a*": 2, "abc": 3, "ab*": 0, "abc*": 5, "*": 6, "ac": 7})
    assert [*found.permits] == [
        Rule(b"", True, 6),
        Rule(b"a", True, 2, parent=1),
        Rule(b"ab", True, 0, parent=2),
        Rule(b"abc", True, 5, parent=3),
        Rule(b"abc", False, 3, parent=4),
        Rule(b"ac", False, 7, parent=2),
        Rule(b"b", False, 1, parent=1),
    ]
    assert [str(rule) for rule in found.permits[:2]] == ["*", "a*"]
    assert [*found.rates] == []


def test_rates_are_exact() -> None:
    found = limits(rates={"a": (5, 0.1), "b*": (7, 60, 3), "ö": ((1 << 31) - 1, 316_224_000, (1 << 32) - 1)})  # type: ignore[dict-item]
    assert [*found.rates] == [
        Rule(b"a", False, 5, 100_000, 5),
        Rule(b"b", True, 7, MINUTE_US, 3),
        Rule("ö".encode(), False, (1 << 31) - 1, 316_224_000_000_000, (1 << 32) - 1),
    ]


@pytest.mark.parametrize("text", ["{}", '{"permits": []}', '{"rates": []}', '\ufeff{"permits": [], "rates": []}'])
def test_a_file_without_rules(text: str) -> None:
    found = parse_limits(text)
    assert found == Limits()


@pytest.mark.parametrize(
    ("document", "told"),
    [
        ("[]", 'the document: must be an object, {"permits": [...], "rates": [...]}'),
        ("{", "line 1, column 2: Expecting property name enclosed in double quotes"),
        (b"\xff", "line 1, byte 1: not UTF-8"),
        ('{"rates": [], "rates": []}', "'rates': is given twice"),
        ({"rate": []}, "'rate': unknown field; expected permits or rates"),
        ({"rates": {}}, "rates: must be an array, not {}"),
        ({"rates": [5]}, "rates[0]: must be an object, not 5"),
        ({"permits": [{"maximum": 1}]}, "permits[0]: name is missing"),
        ({"permits": [{"name": "a"}]}, "permits[0] ('a'): maximum is missing"),
        ({"permits": [{"name": 5, "maximum": 1}]}, "permits[0]: name must be a string, not 5"),
        ({"permits": [{"name": "", "maximum": 1}]}, "permits[0] (''): name must have 1 to 255 bytes, not 0"),
        (
            {"permits": [{"name": "a*b", "maximum": 1}]},
            "permits[0] ('a*b'): name has a * before its last character: a * stands for the rest of a name",
        ),
        (
            {"permits": [{"name": "a", "maximum": -1}]},
            "permits[0] ('a'): maximum must be a whole number from 0 to 4294967295, not -1",
        ),
        (
            {"permits": [{"name": "a", "maximum": True}]},
            "permits[0] ('a'): maximum must be a whole number from 0 to 4294967295, not True",
        ),
        (
            {"permits": [{"name": "a", "maximum": 1, "limit": 1}]},
            "permits[0] ('a'): unknown field 'limit'; expected name, maximum",
        ),
        (
            '{"permits": [{"name": "a", "maximum": 1, "maximum": 2}]}',
            "permits[0] ('a'): 'maximum' is given twice",
        ),
        (
            {"permits": [{"name": "a", "maximum": 1}, {"name": "a", "maximum": 1}]},
            "permits[1] ('a'): has the name of an earlier entry",
        ),
        (
            {"rates": [{"name": "a", "limit": 0, "period": 1}]},
            "rates[0] ('a'): limit must be a whole number from 1 to 2147483647, not 0",
        ),
        (
            {"rates": [{"name": "a", "limit": 1, "period": 0}]},
            "rates[0] ('a'): period must be a number of seconds above 0, not 0",
        ),
        (
            '{"rates": [{"name": "a", "limit": 1, "period": 1e400}]}',
            "rates[0] ('a'): period must be a number of seconds above 0, not inf",
        ),
        (
            {"rates": [{"name": "a", "limit": 1, "period": 1e-7}]},
            "rates[0] ('a'): period must be whole microseconds, not 1e-07 seconds",
        ),
        (
            {"rates": [{"name": "a", "limit": 1, "period": 316_224_001}]},
            "rates[0] ('a'): period must be at most 316224000 seconds (ten years), not 316224001",
        ),
        (
            {"rates": [{"name": "a", "limit": 1, "period": 1, "burst": 0}]},
            "rates[0] ('a'): burst must be a whole number from 1 to 4294967295, not 0",
        ),
        ('{"permits": [{"name": "\\ud800", "maximum": 1}]}', "permits[0] ('\\ud800'): name is not valid Unicode"),
        (
            {"permits": [{"name": "a" * 256, "maximum": 1}]},
            f"permits[0] ('{'a' * 60}...'): name must have 1 to 255 bytes, not 256",
        ),
        ({"permits": [1] * (RULES_MAX + 1)}, "permits: 10001 entries, but at most 10000 are possible"),
    ],
)
def test_each_mistake_is_reported_with_its_place(document: Any, told: str) -> None:
    assert problems(document) == (told,)


def test_all_mistakes_are_reported() -> None:
    document = {"permits": [{"name": "a*b"}, 7], "rates": [{"limit": 1}], "other": 1}
    assert [problem.partition(":")[0] for problem in problems(document)] == [
        "permits[0] ('a*b')", "permits[0] ('a*b')", "permits[1]", "rates[0]", "rates[0]", "'other'",
    ]  # fmt: skip


# ---- which rule applies ----

texts = st.text("ab", max_size=5)


def rule_of(rules: dict[str, int], name: str) -> str | None:
    """The rule for a name: its own, else that with the longest prefix. Written independently of the store."""
    if name in rules:
        return name
    beginnings = [each for each in rules if each.endswith("*") and name.startswith(each[:-1])]
    return max(beginnings, key=len, default=None)


@given(
    st.lists(st.builds("{}{}".format, texts, st.sampled_from(["", "*"])).filter(bool), unique=True, max_size=12),
    st.lists(texts.filter(bool), min_size=1, max_size=6),
)
def test_the_most_specific_rule_applies(rules: list[str], names: list[str]) -> None:
    store = make_store(waiters=1)
    by_name = {name: at for at, name in enumerate(rules, 1)}
    store.load_limits(limits(by_name, {name: (at, 1) for name, at in by_name.items()}))
    for name in names:
        expected = rule_of(by_name, name)
        rows, _ = listed(store, "limit", name=name)
        found = [(row["kind"], row["rule"].decode(), row["maximum"]) for row in rows]
        assert found == [(kind, expected, by_name[expected]) for kind in ("permits", "rate") if expected]


@pytest.mark.parametrize("size", [1, 36, 37, 254, 255, 256, 300, 65_535])
def test_names_of_any_length(size: int) -> None:
    desk = Desk(name_memory=1 << 20)
    (taker,) = desk.some(1)
    name = b"n" * size
    assert taker.acquire(name, 1, 9) == 0
    rules = {"n" * min(size, NAME_MAX): 2, "n" * min(size - 1, NAME_MAX - 1) + "*": 4}
    desk.store.load_limits(limits(rules))
    most = 2 if size <= NAME_MAX else 4
    assert taker.acquire(name, most, 9) == Status.RESOURCE_NOT_AVAILABLE
    assert taker.acquire(name, most - 1, 9) == 0
    assert [row["maximum"] for row in listed(desk.store, "limit", name=name.decode())[0]] == [most]


# ---- counters ----


def desk_with(found: Limits, **sizes: Any) -> tuple[Desk, Taker, Taker]:
    desk = Desk(**sizes)
    desk.store.load_limits(found)
    return desk, desk.taker(), desk.taker()


def test_the_smaller_maximum_applies() -> None:
    desk, one, other = desk_with(limits({"a": 3, "none": 0}))
    assert one.acquire(b"a", 4, 9) == Status.RESOURCE_NOT_AVAILABLE
    assert desk.store.snapshot()["records"] == 0
    assert one.acquire(b"none", 1, 9) == Status.RESOURCE_NOT_AVAILABLE
    assert one.acquire(b"a", 2, 9) == 0
    assert other.acquire(b"a", 2, 9) == Status.RESOURCE_NOT_AVAILABLE
    assert other.acquire(b"a", 1, 2) == Status.RESOURCE_NOT_AVAILABLE  # the request's own is the smaller one
    grant = other.of(other.take(Permit(b"a", 1, 9)))
    assert isinstance(grant, wire.Grant)
    assert grant.left == (0,)
    assert one.acquire(b"b", 9, 9) == 0
    (row,), _ = listed(desk.store, "limit", name="a")
    assert (row["rule"], row["maximum"], row["used"], row["period"], row["burst"]) == (b"a", 3, 3, None, None)


def test_a_take_of_more_than_the_limit_does_not_wait() -> None:
    _, one, _ = desk_with(limits({"a": 3}))
    opaque = one.take(Permit(b"b", 1, 1), Permit(b"a", 4, 9), wait_ms=1000)
    assert one.of(opaque) == Shortage(1, 3, 3, None, OVER)
    assert one.acquire(b"a", 1, 9) == 0
    assert one.of(one.take(Permit(b"a", 4, 9), wait_ms=1000)) == Shortage(0, 2, 3, None, OVER)


def test_a_refusal_has_the_maximum_that_applies() -> None:
    """That of the server, if it is the smaller one; also of a rate, and in a drain."""
    desk, one, other = desk_with(limits({"a": 3}, rates={"r": (60, 60, 10)}))
    assert one.acquire(b"a", 2, 9) == 0
    assert other.of(other.take(Permit(b"a", 2, 9))) == Shortage(0, 1, 3, None, "Resource not available")
    assert other.of(other.take(Permit(b"a", 2, 2))) == Shortage(0, 0, 2, None, "Resource not available")
    desk.store.begin_drain()
    assert other.of(other.take(Permit(b"a", 1, 9))) == Shortage(0, 1, 3, None, "Draining")
    assert other.of(other.take(Permit(b"b", 1, 9), Rate(b"r", 1))) == Shortage(0, 9, 9, None, "Draining")
    assert other.of(other.take(Rate(b"r", 1))) == Shortage(0, 10, 10, None, "Draining")
    assert other.of(other.take(Permit(b"b", 1, 1), Permit(b"a", 4, 9))) == Shortage(0, 1, 1, None, "Draining")


def test_the_text_of_a_refused_acquire_has_the_limit() -> None:
    _, one, _ = desk_with(limits({"a": 3, "none": 0}))
    assert one.acquire(b"a", 3, 9) == 0
    for name, amount, text in (
        (b"a", 4, f"{OVER}: 3"), (b"none", 1, f"{OVER}: 0"), (b"a", 1, "Resource not available")
    ):  # fmt: skip
        assert one.acquire(name, amount, 9) == Status.RESOURCE_NOT_AVAILABLE
        assert one.answers.others[-1].body.decode() == text


def test_a_reused_record_has_the_rule_of_its_own_name() -> None:
    """And not that of the name that it had before."""
    _, one, _ = desk_with(limits({"a": 1, "b": 2}), buckets=1)
    for name, most in ((b"a", 1), (b"b", 2), (b"c", 5), (b"a", 1)):
        assert one.acquire(name, most, 5) == 0
        assert one.acquire(name, 1, 5) == Status.RESOURCE_NOT_AVAILABLE
        assert one.release(name, most) == 0


# ---- reload ----


def test_new_limits_apply_at_once() -> None:
    desk, one, _ = desk_with(limits({"a": 3}))
    assert one.acquire(b"a", 3, 9) == 0
    desk.store.load_limits(limits({"a": 2}))
    assert one.acquire(b"a", 1, 9) == Status.RESOURCE_NOT_AVAILABLE
    assert one.release(b"a", 2) == 0  # what was granted stays granted
    assert one.acquire(b"a", 1, 9) == 0
    assert one.acquire(b"a", 1, 9) == Status.RESOURCE_NOT_AVAILABLE
    desk.store.load_limits(Limits())
    assert one.acquire(b"a", 7, 9) == 0


def test_a_higher_limit_serves_waiting_takes() -> None:
    """Also those of more than was allowed when they began to wait, but not of more than their own maximum."""
    desk, one, other = desk_with(limits({"a": 2}))
    assert one.acquire(b"a", 2, 9) == 0
    first = other.take(Permit(b"a", 2, 9), wait_ms=60_000)
    second = other.take(Permit(b"a", 1, 4), wait_ms=60_000)
    desk.store.load_limits(limits({"a": 8}))
    desk.pump.settle()
    assert other.has(first)
    assert other.of(second) is None
    assert one.release(b"a") == 0
    assert other.has(second)


def test_a_lower_limit_refuses_waiting_takes_beyond_it() -> None:
    """Also behind others, which go on waiting."""
    desk, one, other = desk_with(limits({"a": 5}))
    assert one.acquire(b"a", 5, 9) == 0
    large, small, last = (other.take(Permit(b"a", amount, 9), wait_ms=60_000) for amount in (3, 1, 4))
    desk.store.load_limits(limits({"a": 2}))
    desk.pump.settle()
    assert (other.of(large), other.of(last)) == (Shortage(0, 0, 2, None, OVER), Shortage(0, 0, 2, None, OVER))
    assert other.of(small) is None
    assert one.release(b"a", 3) == 0
    assert other.of(small) is None
    assert one.release(b"a", 1) == 0
    assert other.has(small)


def test_a_record_unused_for_many_reloads_has_the_rule_of_the_last() -> None:
    desk, one, _ = desk_with(limits({"a": 1}))
    assert one.acquire(b"a", 1, 9) == 0
    for most in (*range(300), 1):
        desk.store.load_limits(limits({"a": most}))
    assert one.acquire(b"a", 1, 9) == Status.RESOURCE_NOT_AVAILABLE


def test_load_limits_of_none_changes_nothing() -> None:
    desk, one, _ = desk_with(limits({"a": 1}))
    with pytest.raises(TypeError):
        desk.store.load_limits(None)  # type: ignore[arg-type]
    assert one.acquire(b"a", 2, 9) == Status.RESOURCE_NOT_AVAILABLE


# ---- rates ----


def test_a_rate_defined_by_the_server() -> None:
    desk, one, other = desk_with(limits(rates={"r:*": (60, 60, 10)}))
    grant = one.of(one.take(Rate(b"r:1", 4)))
    assert isinstance(grant, wire.Grant)
    assert grant.left == (6,)
    assert one.of(one.take(Rate(b"r:1", 7))) == Shortage(0, 6, 10, 1000, "Resource not available")
    waiting = other.take(Rate(b"r:1", 8), wait_ms=60_000)
    desk.wait(1_999)
    assert other.of(waiting) is None
    desk.wait(1 + TICK_MS)
    assert other.has(waiting)
    assert one.of(one.take(Rate(b"r:2", 11), wait_ms=1000)) == Shortage(0, 10, 10, None, OVER)
    (row,), _ = listed(desk.store, "limit", name="r:1")
    assert (row["kind"], row["rule"], row["maximum"], row["period"], row["burst"], row["used"]) == (
        "rate", b"r:*", 60, 60.0, 10, 10,
    )  # fmt: skip


def test_the_numbers_of_the_server_replace_those_of_a_request() -> None:
    _, one, _ = desk_with(limits(rates={"r": (60, 60, 10)}))
    assert one.has(one.take(Rate(b"r", 10, 1000, 1, 1000)))
    assert one.of(one.take(Rate(b"r", 1, 1000, 1, 1000))) == Shortage(0, 0, 10, 1000, "Resource not available")
    assert one.of(one.take(Rate(b"r", 11, 1000, 1, 1000))) == Shortage(0, 0, 10, None, OVER)


@pytest.mark.parametrize("found", [Limits(), limits({"r": 1}), limits(rates={"q": (1, 1)})])
def test_a_take_of_a_rate_without_a_definition_is_refused(found: Limits) -> None:
    desk, one, _ = desk_with(found)
    one.take(Permit(b"r", 1, 1), Rate(b"r", 1), wait_ms=1000)
    assert one.of(1) == Status.NOT_FOUND
    assert one.texts[1] == "No limit for the rate of item 1: send one, or add it to counter.limits"
    assert desk.store.snapshot()["waiters"] == 0
    assert desk.store.snapshot()["refused:not_found"] == 1


def test_the_number_of_an_item_has_two_digits() -> None:
    _, one, _ = desk_with(Limits())
    for at in (9, 10, 15):
        opaque = one.take(*(Permit(b"%d" % number, 1, 1) for number in range(at)), Rate(b"r", 1))
        assert one.of(opaque) == Status.NOT_FOUND
        assert one.texts[opaque].startswith(f"No limit for the rate of item {at}: ")


def test_a_take_that_waits_for_a_removed_rate_is_refused() -> None:
    desk, one, other = desk_with(limits(rates={"r": (1, 60)}))
    assert one.has(one.take(Rate(b"r", 1)))
    named, own = other.take(Rate(b"r", 1), wait_ms=600_000), other.take(Rate(b"r", 1, 1, MINUTE_US, 1), wait_ms=600_000)
    desk.store.load_limits(Limits())
    desk.pump.settle()
    assert other.of(named) == Status.NOT_FOUND
    assert other.of(own) is None
    desk.wait(60_000 + TICK_MS)
    assert other.has(own)


def test_a_faster_rate_serves_waiting_takes_sooner() -> None:
    """Used units stay used in time; missing ones come as fast as the new rate says."""
    desk, one, other = desk_with(limits(rates={"r": (1, 60, 2)}))
    assert one.has(one.take(Rate(b"r", 2)))
    waiting = other.take(Rate(b"r", 1), wait_ms=600_000)
    desk.store.load_limits(limits(rates={"r": (60, 60, 240)}))
    desk.wait(999)
    assert other.of(waiting) is None
    desk.wait(1 + TICK_MS)
    assert other.has(waiting)


def test_a_charge_of_a_rate_of_the_server_is_settled() -> None:
    desk, one, _ = desk_with(limits(rates={"r": (60, 60, 10)}))
    opaque = one.take(Rate(b"r", 8, on_death=OnDeath.REFUNDED))
    assert one.settle(opaque, b"r", 3) == 0
    grant = one.of(one.take(Rate(b"r", 1)))
    assert isinstance(grant, wire.Grant)
    assert grant.left == (6,)
    one.take(Rate(b"r", 6, on_death=OnDeath.REFUNDED))
    one.close()
    assert listed(desk.store, "limit", name="r")[0][0]["used"] == 4


# ---- the table of all ----


def test_the_loaded_limits_can_be_read() -> None:
    desk, _, _ = desk_with(limits({"b": 1, "a*": 2}, {"r": (3, 0.5, 4)}))  # type: ignore[dict-item]
    rows, total = listed(desk.store, "limits")
    assert [tuple(row.values()) for row in rows] == [
        (b"a*", "permits", 2, None, None), (b"b", "permits", 1, None, None), (b"r", "rate", 3, 0.5, 4),
    ]  # fmt: skip
    assert total == 3
    assert listed(desk.store, "limits", match="*", limit="1") == (rows[:1], 1)
    desk.store.load_limits(limits({f"{at:04}": at for at in range(2000)}))
    rows, total = listed(desk.store, "limits", limit="1000")
    assert ([row["maximum"] for row in rows], total) == ([*range(1000)], 2000)
