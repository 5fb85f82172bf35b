"""The report page: complete and well formed for any result, self-contained, and with all text from results escaped."""

from __future__ import annotations

import dataclasses
import re
from html.parser import HTMLParser
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree as XML

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from counterd.bench.page import POINTS_MAX, page, percentile_points, thinned, write_page
from counterd.bench.result import Moment
from unit.bench.samples import STARTED, empty_run, full_run, report, run, scan, times

if TYPE_CHECKING:
    from pathlib import Path

    from counterd.bench.result import Report

VOID = {"meta", "rect", "path", "circle", "br"}
HOSTILE = """<script>alert(1)</script>"><img src=x onerror=alert(1)>'&\x00\x1b\ud800"""
ONE_MOMENT = run(
    requests=1, seconds=0.4, series=[Moment(0.4, 0.4, 1, 0, {"50": 1, "99": 1, "max": 1})], latency=times(1)
)

REPORTS: dict[str, list[tuple[str, Report]]] = {
    "closed": [("a", report(run()))],
    "open": [("a", report(full_run()))],
    "scan": [("a", scan())],
    "silent scan": [("a", report(*(dataclasses.replace(empty_run(), rate_wanted=rate) for rate in (1.0, 2.0))))],
    "scans": [("a", scan()), ("b", scan())],
    "two": [("a", report(run())), ("b", report(run(rate=2000.0, middle=90_000, violations=[])))],
    "same name": [("a", report(run())), ("a", report(run()))],
    "one failed": [("a", report(run())), ("b", report(run(errors={"timeout": 3})))],
    "many": [("a", report(*(run(f"kind {n}", middle=1000 * n) for n in range(1, 10))))],
    "mixed": [("a", report(run("get"), run("stats"))), ("b", report(run("get"))), ("c", report())],
    "empty run": [("a", report(empty_run()))],
    "empty runs": [("a", report(empty_run())), ("b", report(empty_run(), empty_run()))],
    "one moment": [("a", report(ONE_MOMENT))],
    "silent second": [("a", report(run(series=[Moment(1.0, 1.0, 0, 5, {}), Moment(2.0, 1.0, 0, 0, {})])))],
    "all zero": [
        ("a", report(run(latency=times(0, 0), series=[Moment(0.0, 0.0, 0, 0, {"50": 0, "99": 0, "max": 0})])))
    ],
    "no runs": [("a", report())],
    "no reports": [],
    "hostile": [
        (
            HOSTILE,
            report(
                run(HOSTILE, options={HOSTILE: HOSTILE}, errors={HOSTILE: 1}, violations=[HOSTILE], evidence=[HOSTILE])
            ),
        )
    ],
}


class Page(HTMLParser):
    """Parses a page: its elements, which must be closed in order, and its text."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        assert len(dict(attrs)) == len(attrs)
        self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag in VOID
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "style" not in self.open:
            self.words.append(data)

    def tags(self) -> set[str]:
        return {tag for tag, _ in self.elements}

    def text(self) -> str:
        return " ".join(self.words)

    def with_class(self, name: str) -> list[str]:
        return [tag for tag, attributes in self.elements if name in (attributes.get("class") or "").split()]


@pytest.fixture(params=REPORTS, scope="module")  # written once, and looked at by several
def found(request: pytest.FixtureRequest) -> str:
    return page(REPORTS[request.param])


# ---- whatever was measured ------------------------------------------------------------------------------------------


def test_the_page_is_well_formed(found: str) -> None:
    shown = Page(found)
    assert {"html", "head", "body", "main", "h1", "style"} <= shown.tags()
    for svg in re.findall(r"<svg.*?</svg>", found, re.DOTALL):
        XML.fromstring(svg)
    XML.fromstring(found.removeprefix("<!doctype html>\n"))


def test_the_page_is_self_contained(found: str) -> None:
    shown = Page(found)
    assert not shown.tags() & {"script", "link", "img", "iframe", "object", "embed", "base", "form", "audio", "video"}
    for tag, attributes in shown.elements:
        assert not attributes.keys() & {"src", "href", "xlink:href", "srcset", "action", "style"}, tag
        assert not [name for name in attributes if name.startswith("on")]
    assert set(re.findall(r"\w+://[^\"'<>\s]*", found)) <= {"http://www.w3.org/2000/svg"}
    assert "url(" not in found
    assert "@import" not in found
    policy = [attributes["content"] for _, attributes in shown.elements if "http-equiv" in attributes]
    assert policy == ["default-src 'none'; style-src 'unsafe-inline'"]


def test_the_page_has_no_nan_or_none(found: str) -> None:
    assert re.findall(r"\b(?:nan|inf|NaN|Infinity|None)\b", found) == []


def test_the_page_has_styles_for_dark_mode_phones_and_paper(found: str) -> None:
    for rule in ("prefers-color-scheme:dark", "max-width:560px", "@media print"):
        assert rule in found
    assert 'name="viewport"' in found


def test_each_chart_is_there_in_every_size(found: str) -> None:
    shown = Page(found)
    assert (
        len(shown.with_class("medium"))
        == len(shown.with_class("small"))
        == sum(t == "figure" for t, _ in shown.elements)
    )
    assert len(shown.with_class("large")) == len(shown.with_class("wide"))


# ---- what is in it --------------------------------------------------------------------------------------------------


def titles(text: str) -> list[str]:
    """The titles of the charts, in the order of the page."""
    return list(dict.fromkeys(re.findall(r"<svg[^>]*><title>(.*?)</title>", text)))


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("closed", ["Latency by percentile", "Throughput over time", "Latency over time"]),
        (
            "open",
            ["Latency by percentile", "Give-back by percentile", "Throughput over time", "Latency over time"],
        ),
        (
            "scan",
            [
                *("Latency by percentile", "Response time against rate", "Throughput over time"),
                *(f"Latency over time, {name}" for name in ("p50", "p99", "max")),
            ],
        ),
        ("two", ["Latency by percentile", "Throughput", "Throughput over time", "Latency over time"]),
        ("empty run", ["Latency by percentile"]),
    ],
)
def test_the_charts_of_each_report(name: str, expected: list[str]) -> None:
    assert titles(page(REPORTS[name])) == expected


def test_figures_tables_and_their_origin() -> None:
    text = Page(page(REPORTS["two"])).text()
    for words in (
        "a and b",
        STARTED,
        "1,000",
        "2,000",
        "143 µs",
        "90.0 µs",
        "granted",
        "refused",
        "connections",
        "cores",
    ):
        assert words in text
    for words in ("Against a", "2.00x better", "0.63x better", "from the sending to the answer", "verified"):
        assert words in text


def test_errors_come_first_and_look_bad() -> None:
    shown = Page(page(REPORTS["one failed"]))
    text = shown.text()
    assert text.index("Not everything went right") < text.index("requests/s")
    assert "b (failed): errors: timeout 3" in text
    assert "better" not in text
    assert shown.with_class("alert") == ["div"]
    assert Page(page(REPORTS["two"])).with_class("alert") == []


def test_details_of_errors_are_shown() -> None:
    text = Page(page(REPORTS["open"])).text()
    for words in ("a (failed): connection lost: reset by peer", "a (failed): counter x: 11 granted of 10"):
        assert words in text


def test_the_answer_of_a_search_is_a_headline() -> None:
    text = Page(page(REPORTS["scan"])).text()
    assert "p99<1ms holds up to 2,000/s" in text
    assert "one of 3 runs" in text


def test_which_runs_met_the_objective() -> None:
    text = page([("a", scan())])
    assert '<tr><th scope="row">2,000/s</th><td>283 µs</td><td>met</td></tr>' in text
    assert '<th scope="row">3,000/s</th><td>283 µs</td><td>missed</td></tr>' in text
    assert "goal" not in page([("a", report(run()))])


def test_the_headline_has_the_wanted_late_and_granted_requests() -> None:
    card = page([("a", report(full_run()))]).partition('class="cards"')[2].partition("</section>")[0]
    assert "1,000 <small>requests/s of 1,200 wanted</small>" in card
    assert "3 sent over 1 ms late" in card
    assert "900/s were granted, the others were refusals or releases" in card


def test_the_options_are_shown_as_on_the_command_line() -> None:
    text = page([("a", report(run(options={"ops": "get", "hold": "fixed:10ms"}), command="counterbench -t 'a b'"))])
    assert '<th scope="row">command</th><td>counterbench -t &#x27;a b&#x27;</td>' in text
    assert '<th scope="row">hold</th><td>fixed:10ms</td>' in text
    assert ">command<" not in page([("a", report(run(), command=""))])


def test_a_wide_table_has_a_scroll_hint_on_narrow_screens() -> None:
    text = page([("a", report(run()))])
    requests, _, words = text.partition("<h3>Times</h3>")[0], "", text.partition("<h3>Options</h3>")[2]
    assert '<h3>Requests</h3><p class="hint many soft">This table scrolls sideways.</p>' in requests
    assert '<h3>Times</h3><p class="hint soft">This table scrolls sideways.</p>' in text
    assert "hint" not in words
    assert "@media(max-width:960px){.many{display:block}}" in text
    assert "@media(max-width:560px){.hint{display:block}" in text


def test_runs_of_the_same_load_are_one_headline() -> None:
    again = report(*(run(rate=each, rate_wanted=5e3) for each in (900.0, 1000.0, 1100.0)), search={"repeat": 3})
    text = page([("a", again)])
    assert '<div class="big">1,000 ' in text
    assert "median of 3 runs: 1,000/s (900/s to 1,100/s)" in text
    assert "Response time against rate" not in text, "it is no scan"


def test_a_comparison_of_different_loads_warns() -> None:
    closed, opened = run(options={"connections": 50}), run(rate=500.0, options={"connections": 50, "rate": 500.0})
    text = page([("a", report(closed)), ("b", report(opened))])
    assert '<p class="bad">b: not the load of a: rate 500.0, not none</p>' in text
    assert "0.50x</td>" in text


def test_a_failed_run_is_no_headline_while_there_is_another() -> None:
    runs = [run("good"), run("bad", rate=9000.0, errors={"timeout": 1})]
    assert "good, one of 2 runs" in page([("a", report(*runs))])


def test_the_first_of_an_odd_number_of_charts_is_wide() -> None:
    assert Page(page(REPORTS["closed"])).with_class("wide") == ["figure"]
    assert Page(page(REPORTS["two"])).with_class("wide") == []


def test_the_first_last_and_best_of_many_runs_are_drawn() -> None:
    runs = [run(f"kind {n}", rate=5000.0 if n == 4 else 1000.0) for n in range(1, 10)]
    charts = page([("a", report(*runs))]).partition("<h2>Figures</h2>")[0].partition("<h2>Latency and")[2]
    percentiles = charts.partition("<title>Throughput</title>")[0]
    assert [n for n in range(1, 10) if f"kind {n}" in percentiles] == [1, 4, 9]


def test_different_options_stand_side_by_side() -> None:
    runs = [run(options={"rate": rate, "names": ["a"], "verify": None}) for rate in (10, 20, 10)]
    text = page([("a", report(*runs))])
    assert re.search(r"rate</th><td>10, 20</td>.*names</th><td>\[&quot;a&quot;\]</td>.*verify</th><td>-</td>", text)


def test_foreign_text_cannot_inject_markup() -> None:
    text = page(REPORTS["hostile"])
    shown = Page(text)
    assert "<script>alert(1)</script>\"><img src=x onerror=alert(1)>'&\ufffd\ufffd\ufffd" in shown.text()
    assert not shown.tags() & {"script", "img"}
    assert "<script" not in text
    assert not {"\x00", "\x1b", "\ud800"} & set(text)


@given(st.text(), st.text(), st.dictionaries(st.text(), st.integers(0, 2**62), max_size=3))
@settings(max_examples=20, deadline=None)
def test_the_page_is_well_formed_with_any_text(name: str, label: str, kinds: dict[str, int]) -> None:
    text = page([(name, report(run(label, errors=kinds, outcomes=kinds, options=dict(kinds), series=[])))])
    text.encode()
    XML.fromstring(text.removeprefix("<!doctype html>\n"))
    assert "<script" not in text.lower()


def test_the_page_is_written_as_utf_8(tmp_path: Path) -> None:
    write_page(REPORTS["closed"], tmp_path / "r.html")
    assert (tmp_path / "r.html").read_text("utf-8") == page(REPORTS["closed"])


# ---- points ---------------------------------------------------------------------------------------------------------


@given(st.lists(st.integers(0, 10**9), min_size=1, max_size=200))
@settings(max_examples=30, deadline=None)
def test_percentile_points_rise_to_the_largest(values: list[int]) -> None:
    histogram = times(*values)
    points = percentile_points("a", histogram)
    assert [point.x for point in points] == sorted({point.x for point in points})
    assert [point.y for point in points] == sorted(point.y for point in points)
    assert (points[0].x, points[-1].x) == (1.0, 2.0 * len(values))
    assert points[-1].y == histogram.get_max_value()
    assert points[-1].note.startswith("a: max ")


def test_percentile_points_of_an_empty_histogram() -> None:
    assert percentile_points("a", times()) == []


def moments(count: int) -> list[Moment]:
    return [Moment(n + 1.0, 1.0, 10 + n, 1, {"50": 5, "max": n} if n % 2 else {}) for n in range(count)]


@pytest.mark.parametrize("count", [0, 1, POINTS_MAX, POINTS_MAX + 1, 3600])
def test_long_series_are_thinned(count: int) -> None:
    many = moments(count)
    few = thinned(many)
    assert len(few) <= POINTS_MAX
    assert (few == many) is (count <= POINTS_MAX)
    for name in ("seconds", "requests", "errors"):
        assert sum(getattr(one, name) for one in few) == sum(getattr(one, name) for one in many)
    assert [one.end for one in few[-1:]] == [one.end for one in many[-1:]]


def test_thinning_keeps_the_worst_values() -> None:
    def worst(some: list[Moment]) -> Any:
        return max(one.percentiles.get("max", 0) for one in some)

    many = moments(1000)
    assert worst(thinned(many)) == worst(many) == 999
