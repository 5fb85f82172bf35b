"""Charts: well formed for any names and numbers, with round ticks, and readable in both colour schemes."""

from __future__ import annotations

import itertools
import math
import re
from typing import TYPE_CHECKING
from xml.etree import ElementTree as XML

import pytest
from hypothesis import given
from hypothesis import strategies as st

from counterd.bench import chart
from counterd.bench.chart import (
    Axis,
    Point,
    Series,
    bar_chart,
    escape,
    line_chart,
    linear_ticks,
    log_ticks,
    make_scale,
    percentile_text,
    percentile_ticks,
    shortened,
    text_width,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

SVG = "{http://www.w3.org/2000/svg}"
KINDS = ("linear", "log", "percentile")


def line(*points: tuple[float, float], name: str = "one") -> Series:
    return Series(name, [Point(*point) for point in points])


def drawn(*series: Series, x: str = "linear", y: str = "linear", standalone: bool = True) -> XML.Element:
    """The parsed chart, after checks that it contains no NaN and draws nothing outside of its area."""
    text = line_chart(series, Axis("x", x), Axis("y", y), title="T", description="D", standalone=standalone)
    return checked(text)


def checked(text: str) -> XML.Element:
    assert re.findall(r'="[^"]*\b(?:nan|inf)\b', text) == []
    assert re.findall(r"https?://[^\"]*", text) == ["http://www.w3.org/2000/svg"]
    return XML.fromstring(text)


def texts(root: XML.Element) -> list[str]:
    return [element.text or "" for element in root.iter(f"{SVG}text")]


def tooltips(root: XML.Element) -> list[str]:
    return [element.text or "" for group in root.iter(f"{SVG}g") for element in group.findall(f"{SVG}title")]


# ---- ticks ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("high", "ticks"),
    [
        (0, [0, 0.2, 0.4, 0.6, 0.8, 1]),
        (1, [0, 0.2, 0.4, 0.6, 0.8, 1]),
        (30, [0, 5, 10, 15, 20, 25, 30]),
        (123_456, [0, 50_000, 100_000, 150_000]),
        (5e-324, [0, 0.2, 0.4, 0.6, 0.8, 1]),
        (0.3, [0, 0.05, 0.1, 0.15, 0.2, 0.25, 0.3]),
    ],
)
def test_linear_ticks(high: float, ticks: list[float]) -> None:
    assert linear_ticks(high) == ticks


@given(st.floats(1e-9, 1e18), st.integers(2, 12))
def test_linear_ticks_reach_the_highest_in_even_steps(high: float, wanted: int) -> None:
    ticks = linear_ticks(high, wanted)
    steps = [after - before for before, after in itertools.pairwise(ticks)]
    assert ticks[0] == 0
    assert ticks[-1] >= high * (1 - 1e-6)
    assert ticks[-1] - steps[0] < high
    assert max(steps) == pytest.approx(min(steps), rel=1e-6)
    assert 1 <= len(steps) <= wanted + 1


@pytest.mark.parametrize(
    ("low", "high", "ticks"),
    [
        (150, 900, [100, 200, 500, 1000]),
        (100, 100, [100, 200]),
        (3, 40_000, [1, 10, 100, 1000, 10_000, 100_000]),
    ],
)
def test_log_ticks(low: float, high: float, ticks: list[float]) -> None:
    assert log_ticks(low, high) == ticks


@given(st.floats(1e-9, 1e18), st.floats(1, 1e15))
def test_log_ticks_hold_both_ends(low: float, factor: float) -> None:
    ticks = log_ticks(low, low * factor)
    assert ticks[0] <= low * (1 + 1e-6)
    assert ticks[-1] >= low * factor * (1 - 1e-6)
    assert ticks == sorted(set(ticks))
    assert 2 <= len(ticks) <= 20


def test_percentile_ticks() -> None:
    assert percentile_ticks(1) == [1, 2, 10]
    assert percentile_ticks(1000) == [1, 2, 10, 100, 1000]
    texts = [percentile_text(tick) for tick in percentile_ticks(123_456)]
    assert texts == ["0 %", "50 %", "90 %", "99 %", "99.9 %", "99.99 %", "99.999 %", "99.9999 %"]


@given(st.sampled_from(KINDS), st.lists(st.floats(0, 1e15), max_size=20))
def test_every_value_has_its_place_in_order(kind: str, values: list[float]) -> None:
    scale = make_scale(Axis("", kind), values, 50, 500)
    places = [scale.place(value) for value in sorted(values)]
    assert places == sorted(places)
    assert all(50 <= place <= 500 for place in places)
    assert (scale.place(scale.ticks[0]), scale.place(scale.ticks[-1])) == (50, 500)


def test_values_outside_are_placed_at_the_edge() -> None:
    for kind in KINDS:
        scale = make_scale(Axis("", kind), [1, 100], 500, 50)
        assert (scale.place(-5), scale.place(1e30)) == (500, 50)


def test_each_kind_of_axis_has_its_ticks() -> None:
    ticks = [make_scale(Axis("", kind), [1, 150], 0, 120).ticks for kind in KINDS]
    assert ticks == [[0, 100, 200], [1, 2, 5, 10, 20, 50, 100, 200], [1, 2, 10, 100, 1000]]


# ---- text -----------------------------------------------------------------------------------------------------------


def test_text_is_escaped() -> None:
    assert escape("""<a b="c">&'""") == "&lt;a b=&quot;c&quot;&gt;&amp;&#x27;"
    assert escape("\x00\x1b\ud800") == "\ufffd" * 3


@given(st.text(max_size=60), st.floats(20, 400))
def test_a_shortened_text_fits(text: str, width: float) -> None:
    assert text_width(shortened(text, width)) <= max(width, text_width("…"))


def test_both_ends_of_a_shortened_text_are_left() -> None:
    short = shortened("counterd " + "x" * 100 + ", p99", 150)
    assert short.startswith("counterd ")
    assert short.endswith(", p99")
    assert shortened("as it is", 150) == "as it is"


# ---- charts ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("standalone", [True, False])
def test_a_chart_has_a_title_and_a_description(standalone: bool) -> None:
    root = drawn(line((0, 1), (1, 2)), standalone=standalone)
    assert root.attrib["role"] == "img"
    assert [child.tag.removeprefix(SVG) for child in root][:2] == ["title", "desc"]
    assert (root[0].text, root[1].text) == ("T", "D")
    assert (root.find(f"{SVG}style") is not None) is standalone


@pytest.mark.parametrize("y", KINDS)
@pytest.mark.parametrize("x", KINDS)
@pytest.mark.parametrize(
    "series",
    [
        [],
        [line()],
        [line((0, 0))],
        [line((5, 7))],
        [line((1, 1), (1, 1))],
        [line((math.nan, 1), (2, math.inf), (3, 4))],
        [line((math.nan, math.nan))],
        [line((1, 1e18), (1e18, 1)), line()],
    ],
    ids=["none", "no points", "zero", "one point", "twice", "some no numbers", "no numbers", "far apart"],
)
def test_any_points_make_a_chart(x: str, y: str, series: Sequence[Series]) -> None:
    drawn(*series, x=x, y=y)


@given(
    st.lists(st.tuples(st.floats(0, 1e12), st.floats(0, 1e12)), max_size=30),
    st.text(max_size=30),
    st.sampled_from(KINDS),
    st.sampled_from(KINDS),
)
def test_each_point_has_a_tooltip(points: list[tuple[float, float]], name: str, x: str, y: str) -> None:
    assert len(tooltips(drawn(line(*points, name="n"), x=x, y=y))) == len(points)
    drawn(line(*points, name=name), x=x, y=y)


def test_a_chart_without_points_says_so() -> None:
    assert "nothing was measured" in texts(drawn(line()))
    assert "nothing was measured" not in texts(drawn(line((1, 1))))


def test_names_cannot_inject_markup() -> None:
    root = drawn(line((1, 1), name="<script>alert(1)</script>"))
    assert list(root.iter(f"{SVG}script")) == []
    assert "<script>alert(1)</script>" in texts(root)
    assert tooltips(root) == ["<script>alert(1)</script>: 1 at 1"]


def test_a_bad_point_is_crossed_out() -> None:
    series = [Series("one", [Point(1, 1), Point(2, 2, "wrong", bad=True)])]
    text = line_chart(series, Axis("x"), Axis("y"), title="", description="", standalone=False)
    assert text.count('class="bad"') == 1
    text = bar_chart(["a", "b", "c"], series, Axis("y"), title="", description="", standalone=False)
    assert text.count('class="bad"') == 1


def test_lines_differ_without_colour() -> None:
    series = [line((1, n), (2, n), name=str(n)) for n in range(8)]
    root = drawn(*series)
    legend = [group for group in root.findall(f"{SVG}g") if group.find(f"{SVG}title") is None]
    looks = {(group[0].attrib.get("stroke-dasharray"), group[1].attrib["d"]) for group in legend}
    assert len(legend) == len(looks) == 8


def test_bars_differ_without_colour() -> None:
    looks = {re.sub(r"f\d", "", chart.Bar(0, 0, 20, 100).draw(colour)) for colour in range(chart.COLOURS)}
    assert len(looks) == chart.COLOURS


@pytest.mark.parametrize("width", [340, 720])
def test_tick_labels_do_not_overlap(width: int) -> None:
    points = line((1, 1), (1e7, 5))
    text = line_chart(
        [points], Axis("", "percentile", percentile_text), Axis(""), title="", description="", width=width
    )
    labels = [e for e in checked(text).iter(f"{SVG}text") if (e.text or "").endswith(" %")]
    assert len(labels) >= 4
    spans = []
    for label in labels:
        middle, half = float(label.attrib["x"]), text_width(label.text or "") / 2
        spans.append((middle - half, middle + half))
    assert max(end for _, end in spans) <= width
    assert all(before[1] < after[0] for before, after in itertools.pairwise(sorted(spans)))


def test_a_long_legend_stays_inside() -> None:
    series = [line((1, 1), name=f"{'long name ' * 20}{n}") for n in range(4)]
    text = line_chart(series, Axis(""), Axis(""), title="long title " * 30, description="", width=340)
    for element in checked(text).iter(f"{SVG}text"):
        if element.attrib.get("text-anchor") is None:
            size = chart.HEADING if element.attrib.get("class") == "heading" else chart.FONT
            assert float(element.attrib["x"]) + text_width(element.text or "", size) <= 340


# ---- bars -----------------------------------------------------------------------------------------------------------


def rects(root: XML.Element) -> list[tuple[float, float, float]]:
    """Left, width and height of the bars in groups. The legend's have no tooltip, and are left out."""
    groups = [group for group in root.iter(f"{SVG}g") if group.find(f"{SVG}title") is not None]
    bars = [bar for group in groups for bar in group.findall(f"{SVG}rect")]
    return [tuple(float(bar.attrib[name]) for name in ("x", "width", "height")) for bar in bars]  # type: ignore[misc]


def test_bars_are_as_long_as_their_values_and_side_by_side() -> None:
    series = [line((0, 100), (1, 50), name="a"), line((0, 25), (1, 0), name="b")]
    bars = rects(checked(bar_chart(["g", "h"], series, Axis("y"), title="", description="")))
    assert [height for _, _, height in bars] == pytest.approx([220, 110, 55, 0], abs=0.1)
    assert bars[0][0] + bars[0][1] == pytest.approx(bars[2][0], abs=0.2)


def test_a_group_of_its_own_needs_no_legend() -> None:
    series = [line((0, 100), name="a"), line((1, 50), name="b")]
    root = checked(bar_chart(["a", "b"], series, Axis("y"), title="", description=""))
    assert texts(root).count("a") == 1
    assert len(rects(root)) == 2


@pytest.mark.parametrize("groups", [[], ["a"]])
def test_a_bar_chart_without_groups_or_series(groups: list[str]) -> None:
    assert rects(checked(bar_chart(groups, [], Axis("y"), title="", description=""))) == []


# ---- colours --------------------------------------------------------------------------------------------------------


def luminance(colour: str) -> float:
    """The relative luminance of a colour, by WCAG 2."""
    parts = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one: str, other: str) -> float:
    high, low = sorted((luminance(one), luminance(other)), reverse=True)
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("scheme", [chart.LIGHT, chart.DARK], ids=["light", "dark"])
def test_the_colours_can_be_read(scheme: str) -> None:
    colours = dict(re.findall(r"--(\w+):(#\w{6})", scheme))
    assert len(colours) == 5 + chart.COLOURS
    for name in colours.keys() - {"paper", "grid"}:
        assert contrast(colours[name], colours["paper"]) >= 4.5, name


def test_both_schemes_have_the_same_colours() -> None:
    assert contrast("#000000", "#ffffff") == pytest.approx(21)
    assert re.findall(r"--\w+", chart.LIGHT) == re.findall(r"--\w+", chart.DARK)
    assert "@media(prefers-color-scheme:dark)" in chart.STYLE
