"""The rules of the smockron protocol: rules of the real master are read exactly; mistakes are reported with their
domain."""

from __future__ import annotations

import json
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from counterd.json_documents import DocumentError
from counterd.protocols.smockron import _store, rules
from counterd.protocols.smockron.rules import Rule, Span, parse_rules

MS = 1_000_000
SECOND = 1000 * MS
DAY = 86_400 * SECOND
NO_DURATION = 'has no duration such as "20 msec", "5s", "min" or "2 hours" in'
TOO_FINE = "a nanosecond has at most 2147483647 parts"


def rule(**fields: Any) -> Rule:
    (found,) = parse_rules(json.dumps({"api": fields})).values()
    return found


def exactly(span: Span, parts: int) -> Fraction:
    return span.ns + Fraction(span.part, parts)


def problems(document: Any) -> tuple[str, ...]:
    with pytest.raises(DocumentError) as caught:
        parse_rules(document if isinstance(document, str) else json.dumps(document))
    return caught.value.problems


def test_the_bounds_equal_those_of_the_engine() -> None:
    assert (rules.PARTS_MAX, rules.SPAN_MAX_NS, rules.DOMAINS_MAX) == (
        _store.LIMIT_PARTS, _store.LIMIT_SPAN_NS, _store.LIMIT_DOMAINS,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("rate", "interval_ns", "interval_ms"),
    [
        ("100/sec", 10 * MS, 10),
        ("1/sec", SECOND, 1000),
        ("10 per 2 sec", 200 * MS, 200),
        ("10per2sec", 200 * MS, 200),
        (" 10 / 2  min ", 12 * SECOND, 12_000),
        ("7/sec", Fraction(SECOND, 7), 143),
        ("3/sec", Fraction(SECOND, 3), 333),
        ("2000/s", SECOND // 2000, 1),
        ("2001/s", Fraction(SECOND, 2001), 0),
        ("1/50 min", 3000 * SECOND, 3_000_000),
        ("5/", Fraction(MS, 5), 0),
        ("5/ 10", 2 * MS, 2),
        ("1/day", DAY, 86_400_000),
        ("1000000/sec", 1000, 0),
    ],
)
def test_rates_are_exact_and_rounded_for_the_real_master(
    rate: str, interval_ns: int | Fraction, interval_ms: int
) -> None:
    found = rule(rate=rate, burst=3)
    assert exactly(found.interval, found.parts) == interval_ns
    assert exactly(found.burst, found.parts) == 3 * interval_ns
    assert found.rounded_ms == (interval_ms, 3 * interval_ms)


@pytest.mark.parametrize("unit", ["", "ms", "msec"])
@pytest.mark.parametrize("text", ["20{}", "20 {}", "  20  {}  "])
def test_intervals_in_milliseconds(unit: str, text: str) -> None:
    assert rule(interval=text.format(unit), burst=0).interval == Span(20 * MS, 0)


@pytest.mark.parametrize(
    ("units", "factor"),
    [
        (("s", "sec", "second", "seconds"), 1),
        (("m", "min", "minute", "minutes"), 60),
        (("h", "hr", "hour", "hours"), 3600),
        (("d", "day", "days"), 86_400),
    ],
)
def test_units_of_time(units: tuple[str, ...], factor: int) -> None:
    for unit in units:
        assert rule(interval=unit, burst=0).interval == Span(factor * SECOND, 0), "no digits are 1"
        assert rule(interval=f"3 {unit}", burst=0).interval == Span(3 * factor * SECOND, 0)


@pytest.mark.parametrize(
    ("burst", "burst_ns", "burst_ms"),
    [
        (0, 0, 0),
        (10, 500 * MS, 500),
        ("10", 500 * MS, 500),
        (1.5, 75 * MS, 75),
        (0.25, 25 * MS // 2, 12),
        (" 10", 10 * MS, 10),
        ("10 ", 10 * MS, 10),
        ("", MS, 1),
        ("1 s", SECOND, 1000),
        ("2 min", 120 * SECOND, 120_000),
    ],
)
def test_a_burst_is_a_number_of_intervals_or_a_time(burst: Any, burst_ns: int, burst_ms: int) -> None:
    found = rule(interval=50, burst=burst)
    assert (found.burst, found.rounded_ms) == (Span(burst_ns, 0), (50, burst_ms))


def test_a_rate_wins_over_an_interval_unless_it_is_empty() -> None:
    assert rule(rate="1/sec", interval="nonsense", burst=1).interval == Span(SECOND, 0)
    assert rule(rate="", interval=5, burst=1).interval == Span(5 * MS, 0)


def test_an_interval_can_have_a_fraction_as_a_number() -> None:
    assert rule(interval=0.1, burst=1).interval == Span(100_000, 0)


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"burst": 1}, "'api': interval or rate is missing"),
        ({"rate": "1/sec"}, "'api': burst is missing"),
        ({"rate": "1/sec", "burst": None}, "'api': burst is missing"),
        ({"rate": 100, "burst": 1}, """'api': rate must have a form such as "100/sec" or "10 per 2 min", not 100"""),
        ({"rate": "ab", "burst": 1}, """'api': rate must have a form such as "100/sec" or "10 per 2 min", not 'ab'"""),
        ({"rate": "0/sec", "burst": 1}, "'api': rate is 0: no request would pass"),
        ({"rate": "1/secs", "burst": 1}, f"'api': rate {NO_DURATION} 'secs'"),
        ({"rate": "1/Sec", "burst": 1}, f"'api': rate {NO_DURATION} 'Sec'"),
        ({"rate": "1/0 sec", "burst": 1}, "'api': the interval is 0: every request would pass"),
        ({"interval": 0, "burst": 1}, "'api': the interval is 0: every request would pass"),
        ({"interval": -1, "burst": 1}, "'api': interval must be a finite number of at least 0, not -1"),
        ({"interval": True, "burst": 1}, "'api': interval must be a string or a number, not True"),
        ({"interval": "1.5 s", "burst": 1}, f"'api': interval {NO_DURATION} '1.5 s'"),
        ({"interval": "3661 days", "burst": 0}, "'api': the interval is longer than ten years"),
        ({"interval": "1 day", "burst": 3661}, "'api': the burst lasts longer than ten years"),
        ({"rate": "1/sec", "burst": []}, "'api': burst must be a string or a number, not []"),
        ({"rate": "1/sec", "burst": 1, "brust": 2}, "'api': unknown field 'brust'; expected rate, interval or burst"),
        ({"rate": "2147483648001/sec", "burst": 0}, f"'api': the rate is too precise: {TOO_FINE}"),
    ],
)  # fmt: skip
def test_a_mistake_is_reported_with_its_domain(fields: dict[str, Any], problem: str) -> None:
    assert problems({"api": fields}) == (problem,)


def test_all_mistakes_of_a_rule_are_reported() -> None:
    assert problems({"api": {"interval": 0, "burst": "9999 days"}}) == (
        "'api': the interval is 0: every request would pass",
        "'api': the burst lasts longer than ten years",
    )


def test_the_mistakes_of_all_rules_are_reported() -> None:
    assert problems({"a": {"rate": "x", "burst": "x"}, "b": 1, "c": {"rate": "1/s", "burst": 1}, "d\0": {}}) == (
        """'a': rate must have a form such as "100/sec" or "10 per 2 min", not 'x'""",
        """'a': burst has no duration such as "20 msec", "5s", "min" or "2 hours" in 'x'""",
        "'b': must be an object with a rate or an interval, and a burst",
        "'d\\x00': is not a name: it ends with a NUL",
    )


def test_names_of_domains() -> None:
    usual = {"rate": "1/s", "burst": 1}
    assert list(parse_rules(json.dumps({"é": usual, "": usual, "a\0b": usual}))) == ["é".encode(), b"", b"a\0b"]
    assert parse_rules(json.dumps({"n" * 255: usual})).keys() == {b"n" * 255}
    assert problems({"n" * 256: usual}) == (f"'{'n' * 60}...': is too long: a name can have at most 255 bytes",)
    assert problems('{"\\ud800": {}}') == ("'\\ud800': is not a name: it is not valid Unicode",)
    assert problems('{"a": {}, "a": {"rate": "1/s", "rate": "1/s", "burst": 1}}') == (
        "'a': is given twice", "'a': rate is given twice",
    )  # fmt: skip


def test_documents_that_are_no_object_are_refused() -> None:
    for text in ("[]", "null", "1"):
        (problem,) = problems(text)
        assert problem.startswith("the document: must be an object, ")
    assert parse_rules("{}") == {}


def test_the_number_of_rules_and_mistakes_is_bounded() -> None:
    many = {str(number): {"rate": "1/s", "burst": 1} for number in range(rules.DOMAINS_MAX)}
    assert len(parse_rules(json.dumps(many))) == rules.DOMAINS_MAX
    many["more"] = {"rate": "1/s", "burst": 1}
    assert problems(many) == (
        f"the document: {rules.DOMAINS_MAX + 1} domains, but at most {rules.DOMAINS_MAX} are possible",
    )


@given(st.recursive(st.none() | st.booleans() | st.floats() | st.integers() | st.text(), st.lists))
def test_any_value_is_read_or_refused(value: Any) -> None:
    for name in ("rate", "interval", "burst"):
        try:
            found = rule(**({"rate": "1/s", "burst": 1} if name != "interval" else {"burst": 1}) | {name: value})
        except DocumentError:
            continue
        assert 0 < exactly(found.interval, found.parts) <= rules.SPAN_MAX_NS
        assert 0 <= exactly(found.burst, found.parts) <= rules.SPAN_MAX_NS


@given(st.integers(1, 10**6), st.integers(1, 10**6))
def test_a_rate_uses_up_its_time_exactly(count: int, seconds: int) -> None:
    found = rule(rate=f"{count}/{seconds} s", burst=0)
    assert count * exactly(found.interval, found.parts) == seconds * SECOND
