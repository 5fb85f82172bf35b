"""Reports side by side: no verdict without enough evidence, and a warning about different loads."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from counterd.bench.compare import Ratio, Row, base_of, compare_table, compared, differences, ratios, rows_of, variation
from counterd.bench.result import Moment
from unit.bench.samples import empty_run, report, run, scan
from unit.bench.test_report import GREEN, RED, row, shown

if TYPE_CHECKING:
    from counterd.bench.result import Report, Run


@pytest.mark.parametrize(
    ("value", "base", "more_is_better", "expected"),
    [
        (150, 100, True, Ratio(1.5, "better")),
        (150, 100, False, Ratio(1.5, "worse")),
        (50, 100, True, Ratio(0.5, "worse")),
        (50, 100, False, Ratio(0.5, "better")),
        (104, 100, True, Ratio(1.04, "same")),
        (96, 100, False, Ratio(0.96, "same")),
        (1, 0, True, None),
    ],
)
def test_the_ratio_and_the_verdict_of_two_values(
    value: float, base: float, more_is_better: bool, expected: Ratio | None
) -> None:
    assert compared(value, base, more_is_better=more_is_better, judged=True) == expected


def test_a_failed_run_is_never_better() -> None:
    good, bad = run(), run(rate=9000.0, middle=10_000, errors={"timeout": 1})
    for pair in ((good, bad), (bad, good)):
        found = ratios(*map(single, pair))
        assert len(found) == 5
        assert {ratio.verdict for ratio in found if ratio is not None} == {""}
    text = shown(compare_table([("a", report(good)), ("b", report(bad))]), colours=True)
    assert f"{RED}b (failed)" in text
    assert f"{RED}b: errors: timeout 1" in text
    assert GREEN not in text


def test_better_values_are_green_and_worse_ones_red() -> None:
    reports = [("a", report(run())), ("b", report(run(rate=2000.0, middle=286_000)))]
    text = shown(compare_table(reports))
    assert row(text, "b ") == "2,000/s 286 µs 567 µs 572 µs 572 µs"
    assert row(text, "2.00x") == "▲ 2.00x ▼ 2.00x ▼ 2.00x ▼ 2.00x ▼"
    coloured = shown(compare_table(reports), colours=True)
    assert f"{GREEN}2.00x ▲" in coloured
    assert "\x1b[31m2.00x ▼" in coloured


def test_values_without_a_counterpart() -> None:
    assert ratios(single(empty_run()), single(empty_run())) == [None] * 5
    assert "x: against" not in shown(compare_table([("a", report(run()))]))
    different = report(run(rate_wanted=7.0), run(rate_wanted=8.0))
    assert "x: against" not in shown(compare_table([("a", scan()), ("b", different)])), "no rate is in both"
    assert "x: against a" in shown(compare_table([("a", scan()), ("b", scan())]))
    shown(compare_table([]))
    shown(compare_table([("a", report()), ("b", report(run()))]))


def test_a_comparison_names_the_loads_and_results_of_searches() -> None:
    lines = shown(compare_table([("a", report(run())), ("b", scan())])).splitlines()
    assert "a: acquire-release" in lines
    assert "b: acquire-release: p99<1ms holds up to 2,000/s" in lines
    mixed = report(run("get"), run("noop"))
    assert not any(line.startswith("c: ") for line in shown(compare_table([("c", mixed)])).splitlines())


def test_a_run_is_compared_with_the_run_of_the_same_load() -> None:
    first = scan()
    assert based(first, run(rate_wanted=2000.0)) is first.runs[1]
    assert based(first, run(rate_wanted=2500.0)) is None
    assert based(report(first.runs[0]), run("get")) is first.runs[0]
    assert based(first, run("get", rate_wanted=2000.0)) is first.runs[1], "searches are compared rate by rate"
    both = report(run("get"), run("noop"))
    assert based(both, run("noop")) is both.runs[1]
    assert based(both, run("acquire")) is None


def single(one: Run) -> Row:
    return Row("", one, [one])


def based(first: Report, one: Run) -> Run | None:
    found = base_of(first, rows_of("a", first), one)
    return found and found.shown


# ---- what a verdict needs -------------------------------------------------------------------------------------------


def test_different_loads_are_reported_without_a_verdict() -> None:
    closed, opened = run(options={"connections": 50}), run(rate=170.0, options={"connections": 10, "rate": 200.0})
    assert differences(opened, closed) == ["rate 200.0, not none", "connections 10, not 50"]
    assert {each.verdict for each in ratios(single(opened), single(closed)) if each} == {""}
    text = " ".join(shown(compare_table([("closed", report(closed)), ("open", report(opened))])).split())
    assert "open: not the load of closed: rate 200.0, not none; connections 10, not 50" in text
    assert "0.17x" in text
    assert "0.17x ▼" not in text


def test_the_server_of_a_load_does_not_matter() -> None:
    ours = {"protocol": "counter", "port": 1, "seed": 1, "duration": "1s", "connections": 5, "maximum": 7}
    theirs = {"protocol": "redis", "port": 2, "seed": 2, "duration": "9s", "connections": 5}
    assert differences(run(options=ours), run(options=theirs)) == []


def varied(*rates: int) -> Run:
    moments = [Moment(float(at), 1.0, each, 0, {"50": each, "99": each, "max": each}) for at, each in enumerate(rates)]
    return run(series=moments)


def test_a_run_that_varies_needs_a_larger_difference_to_be_better() -> None:
    shaky, steady = varied(600, 1400, 600, 1400), varied(1000, 1000, 1000)
    assert variation([steady], "throughput") == 0.0
    band = variation([shaky], "throughput")
    assert band == variation([shaky], "99") == pytest.approx(2 * 461.88 / 2 / 1000, rel=1e-3)
    assert variation([shaky], "max") == variation([shaky], "99.9") == variation([varied(1, 9)], "50") == 0.0
    for found, verdict in ((1.4, "same"), (1.5, "better"), (0.5, "worse")):
        judged = compared(found, 1.0, more_is_better=True, judged=True, band=band)
        assert judged is not None
        assert judged.verdict == verdict
    assert Ratio(1.4, "same", band).text() == "1.40x ±46% ="
    assert Ratio(1.4, "better").text() == "1.40x ▲"


def test_runs_of_the_same_load_are_one_row() -> None:
    again = report(*(run(rate=each) for each in (900.0, 1000.0, 1100.0)), search={"repeat": 3})
    assert [each.title for each in rows_of("a", again)] == ["a, median of 3"]
    assert variation(again.runs, "throughput") == pytest.approx(0.1)
    text = shown(compare_table([("a", again), ("b", report(run(rate=1080.0)))]), width=120)
    assert row(text, "b ").startswith("1,080/s")
    assert row(text, "1.08x").startswith("±10% =")
    assert "a: acquire-release: median of 3 runs: 1,000/s (900/s to 1,100/s)" in text
    failed = report(run(), run(errors={"timeout": 1}), search={"repeat": 2})
    assert "c, median of 2 (failed)" in shown(compare_table([("c", failed)]), width=120)
