"""Draws line and bar charts as SVG text.

This file draws charts only, and knows nothing of runs. The lines of a chart can be distinguished without colour: by
dashes, by the shapes of the markers and by the tooltips of the points. `STYLE` has the colours for light and dark. A
page with many charts contains it only once (standalone=False). This module escapes all text that it gets.
"""

from __future__ import annotations

import html
import math
import unicodedata
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from counterd.units import count_tick, printable

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

# The contrast to the background is at least 4.5 to 1 for text, and at least 3 to 1 for lines.
LIGHT = (
    "--paper:#ffffff;--ink:#1b1f24;--soft:#57606a;--grid:#dfe3e8;--bad:#c01c28;"
    "--c0:#0a5fc2;--c1:#b8480b;--c2:#0b7a4b;--c3:#8a37bd;--c4:#8a6100;--c5:#b3226e"
)
DARK = (
    "--paper:#14171c;--ink:#e6e9ed;--soft:#a0a9b4;--grid:#323841;--bad:#ff7b72;"
    "--c0:#69aefb;--c1:#ff9d5c;--c2:#57cc99;--c3:#c99bf5;--c4:#e3c04f;--c5:#ff8fc0"
)
COLOURS = 6
DASHES = ("", "7 4", "2 3", "10 3 2 3", "14 5")
# Circle, square, triangle, diamond, inverted triangle, plus: paths around the origin.
MARKERS = (
    "M-3.5 0a3.5 3.5 0 1 0 7 0a3.5 3.5 0 1 0-7 0z",
    "M-3.2-3.2h6.4v6.4h-6.4z",
    "M0-4.2L4 3.2H-4z",
    "M0-4.6L4 0L0 4.6L-4 0z",
    "M-4-3.2H4L0 4.2z",
    "M-4-1.4h2.6V-4h2.8v2.6H4v2.8H1.4V4h-2.8V1.4H-4z",
)
CROSS = '<path class="halo" d="M-5-5L5 5M-5 5L5-5"/><path class="bad" d="M-5-5L5 5M-5 5L5-5"/>'
MARKERS_MAX = 14  # markers of one line: more would hide the line

STYLE = (
    f".chart{{{LIGHT}}}@media(prefers-color-scheme:dark){{.chart{{{DARK}}}}}@media print{{.chart{{{LIGHT}}}}}"
    ".chart{font-family:system-ui,-apple-system,'Segoe UI',Roboto,'Helvetica Neue',Arial,sans-serif;font-size:12px}"
    ".chart .paper{fill:var(--paper)}.chart text{fill:var(--ink)}.chart .soft{fill:var(--soft)}"
    ".chart .heading{font-size:14px;font-weight:600}.chart .grid{stroke:var(--grid);fill:none}"
    ".chart .axis{stroke:var(--soft);fill:none}.chart .line{fill:none;stroke-width:2;stroke-linejoin:round}"
    ".chart .mark{stroke:var(--paper);stroke-width:1}.chart .hit{fill:transparent;stroke:none}"
    ".chart .bad{stroke:var(--bad);stroke-width:2.5;fill:none}"
    ".chart .halo{stroke:var(--paper);stroke-width:6;fill:none}"
    ".chart .bar{stroke:var(--paper);stroke-width:1}.chart .stripe{stroke:var(--paper);stroke-width:2}"
    + "".join(f".chart .l{n}{{stroke:var(--c{n})}}.chart .f{n}{{fill:var(--c{n})}}" for n in range(COLOURS))
)

# Smaller values count as 0: no unit is so small, and steps between such values could not be represented.
SMALLEST = 1e-9

FONT = 12
LINE = 18
HEADING = 14
GAP = 8


class Point(NamedTuple):
    """A point of a chart.

    note: the text of its tooltip, or "" for the default. bad: whether the point is crossed out.
    """

    x: float
    y: float
    note: str = ""
    bad: bool = False


@dataclass(frozen=True)
class Series:
    """A line, or the bars of one colour. By default its colour and dash differ from those of its neighbours."""

    name: str
    points: Sequence[Point]
    colour: int | None = None
    dash: int | None = None


@dataclass(frozen=True)
class Axis:
    """An axis. kind: linear (from 0), log, or percentile, whose values are 1 / (1 - p), such as 2 for the median."""

    title: str
    kind: str = "linear"
    text: Callable[[float], str] = count_tick


@dataclass(frozen=True)
class Scale:
    """A scale at its place in the drawing. ticks: the values with a label. start, end: the first and the last pixel."""

    axis: Axis
    ticks: list[float]
    low: float
    high: float
    start: float
    end: float

    def place(self, value: float) -> float:
        if self.axis.kind == "linear":
            part = (value - self.low) / (self.high - self.low)
        else:
            part = math.log(max(value, self.low) / self.low) / math.log(self.high / self.low)
        return self.start + (self.end - self.start) * min(max(part, 0.0), 1.0)


# ---- numbers --------------------------------------------------------------------------------------------------------


def linear_ticks(high: float, wanted: int = 6) -> list[float]:
    """Returns ticks from 0 to at least `high`, in steps of 1, 2 or 5."""
    high = high if high >= SMALLEST else 1.0
    rough = high / wanted
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * (1 - 1e-9))
    return [float(f"{number * step:.12g}") for number in range(math.ceil(high / step - 1e-9) + 1)]


def log_ticks(low: float, high: float) -> list[float]:
    """Returns ticks from at most `low` to at least `high`: 1, 2 and 5 times each power of ten.

    If these are too many, returns fewer ticks.
    """
    factors = (1, 2, 5) if high / low <= 1000 else (1,)
    powers = range(math.floor(math.log10(low)) - 1, math.ceil(math.log10(high)) + 2)
    steps = [float(f"{factor}e{power}") for power in powers for factor in factors]
    first = max(index for index, step in enumerate(steps) if step <= low * (1 + 1e-9))
    last = min(index for index, step in enumerate(steps) if step >= high * (1 - 1e-9))
    return steps[first : max(last, first + 1) + 1]


def percentile_ticks(high: float) -> list[float]:
    """Returns ticks of 1 / (1 - p) for p = 0, 50, 90, 99, ... per cent, to at least `high`."""
    return [1.0, 2.0, *(10.0**power for power in range(1, max(math.ceil(math.log10(high) - 1e-9), 1) + 1))]


def percentile_text(value: float) -> str:
    """Formats a tick of a percentile axis, such as 0 %, 50 % or 99.9 %."""
    nines = round(math.log10(value))
    return f"{100 - 100 / value:.{max(nines - 2, 0)}f} %"


def make_scale(axis: Axis, values: Sequence[float], start: float, end: float) -> Scale:
    """Makes a scale that contains all values. The list of values can be empty."""
    usable = [value for value in values if math.isfinite(value)]
    if axis.kind == "linear":
        ticks = linear_ticks(max(usable, default=1.0), max(2, round(abs(end - start) / 60)))
    else:
        positive = [value for value in usable if value >= SMALLEST] or [1.0]
        ticks = (
            percentile_ticks(max(positive)) if axis.kind == "percentile" else log_ticks(min(positive), max(positive))
        )
    return Scale(axis, ticks, ticks[0], ticks[-1], start, end)


# ---- text -----------------------------------------------------------------------------------------------------------


def escape(text: object) -> str:
    """Escapes text for elements and attributes of HTML and XML."""
    return html.escape(printable(text))


def text_width(text: str, size: float = FONT) -> float:
    """Estimates the width of text. The estimate is rather too large, because the font is not known."""
    return sum(1.0 if unicodedata.east_asian_width(letter) in "WF" else 0.62 for letter in text) * size


def shortened(text: str, width: float) -> str:
    """Shortens text to a width, with an ellipsis in the middle, because names often differ only at their ends."""
    text = printable(text)
    if text_width(text) <= width:
        return text
    head, tail = text[: len(text) // 2], text[len(text) // 2 :]
    while (head or tail) and text_width(f"{head}…{tail}") > width:
        head, tail = (head[:-1], tail) if len(head) > len(tail) else (head, tail[1:])
    return f"{head}…{tail}"


def wrapped(text: str, width: float, size: float) -> list[str]:
    lines = [""]
    for word in printable(text).split():
        if lines[-1] and text_width(f"{lines[-1]} {word}", size) > width:
            lines.append("")
        lines[-1] = f"{lines[-1]} {word}".strip()
    return lines


def text_at(x: float, y: float, text: str, *, anchor: str = "start", style: str = "") -> str:
    attributes = f' class="{style}"' if style else ""
    attributes += f' text-anchor="{anchor}"' if anchor != "start" else ""
    return f'<text x="{x:.1f}" y="{y:.1f}"{attributes}>{escape(text)}</text>'


# ---- parts ----------------------------------------------------------------------------------------------------------


@dataclass
class Frame:
    """The parts around the drawing that every chart has. The parts are placed from top to bottom."""

    width: float
    parts: list[str]
    top: float

    @classmethod
    def begin(cls, title: str, width: float) -> Frame:
        frame = cls(width, [], 0)
        for line in wrapped(title, width - 2 * GAP, HEADING):
            frame.top += LINE + 2
            frame.parts.append(text_at(GAP, frame.top, line, style="heading"))
        return frame

    def legend(self, names: Sequence[str], samples: Sequence[str]) -> None:
        x, rest = float(GAP), self.width - 2 * GAP
        self.top += LINE + 4
        for name, sample in zip(names, samples, strict=True):
            label = shortened(name, rest - 32)
            width = 32 + text_width(label)
            if x > GAP and x + width > self.width - GAP:
                x, self.top = float(GAP), self.top + LINE
            tip = f"<title>{escape(name)}</title>" if label != name else ""
            self.parts.append(f'<g transform="translate({x:.1f} {self.top - 4:.1f})">{tip}{sample}</g>')
            self.parts.append(text_at(x + 30, self.top, label))
            x += width + 12

    def finish(self, title: str, description: str, height: float, standalone: bool) -> str:
        style = f"<style>{STYLE}</style>" if standalone else ""
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" class="chart" role="img" viewBox="0 0 {self.width:g} {height:g}"'
            f' width="{self.width:g}" height="{height:g}"><title>{escape(title)}</title>'
            f'<desc>{escape(description)}</desc>{style}<rect class="paper" width="100%" height="100%" rx="6"/>'
            f"{''.join(self.parts)}</svg>\n"
        )


def y_axis(frame: Frame, axis: Axis, values: Sequence[float], height: float) -> tuple[Scale, float]:
    """Draws the y axis below its title. Returns the scale, and the left edge of the drawing."""
    frame.top += LINE + 2
    frame.parts.append(text_at(GAP, frame.top, axis.title, style="soft"))
    frame.top += GAP + 4
    scale = make_scale(axis, values, frame.top + height, frame.top)
    texts = [axis.text(tick) for tick in scale.ticks]
    left = GAP + max(text_width(text) for text in texts) + 6
    lowest = math.inf
    for tick, text in zip(scale.ticks, texts, strict=True):
        y = scale.place(tick)
        style = "axis" if tick == scale.low else "grid"
        frame.parts.append(f'<path class="{style}" d="M{left:.1f} {y:.1f}H{frame.width - GAP:.1f}"/>')
        if lowest - y >= FONT + 2:
            frame.parts.append(text_at(left - 6, y + 4, text, anchor="end", style="soft"))
            lowest = y
    return scale, left


def x_axis(frame: Frame, axis: Axis, values: Sequence[float], left: float, height: float) -> Scale:
    """Draws the x axis, with labels from right to left: the last percentile is more important than the first."""
    bottom = frame.top + height
    scale = make_scale(axis, values, left, frame.width - GAP - text_width("99.999 %") / 2)
    edge = frame.width
    for tick in reversed(scale.ticks):
        x, text = scale.place(tick), axis.text(tick)
        frame.parts.append(f'<path class="grid" d="M{x:.1f} {frame.top:.1f}V{bottom + 4:.1f}"/>')
        half = text_width(text) / 2
        if x + half <= edge:
            frame.parts.append(text_at(x, bottom + LINE, text, anchor="middle", style="soft"))
            edge = x - half - 6
    frame.parts.append(text_at((left + scale.end) / 2, bottom + 2 * LINE, axis.title, anchor="middle", style="soft"))
    return scale


def look(series: Series, index: int) -> tuple[int, int]:
    """Returns the numbers of the colour and the dash of a series."""
    colour = index if series.colour is None else series.colour
    dash = index if series.dash is None else series.dash
    return colour % COLOURS, dash % len(DASHES)


def dash_attribute(dash: int) -> str:
    return f' stroke-dasharray="{DASHES[dash]}"' if DASHES[dash] else ""


def draw_line(series: Series, index: int, x: Scale, y: Scale) -> str:
    """Draws a line, and its points over the line. Some of the points have a marker, and all of them have a tooltip."""
    points = [point for point in series.points if math.isfinite(point.x) and math.isfinite(point.y)]
    colour, dash = look(series, index)
    places = [(f"{x.place(point.x):.1f}", f"{y.place(point.y):.1f}") for point in points]
    parts = []
    if len(points) > 1:
        path = "M" + "L".join(" ".join(place) for place in places)
        parts.append(f'<path class="line l{colour}"{dash_attribute(dash)} d="{path}"/>')
    every = max(1, math.ceil(len(points) / MARKERS_MAX))
    for number, (point, place) in enumerate(zip(points, places, strict=True)):
        text = f"{series.name}: {y.axis.text(point.y)} at {x.axis.text(point.x)}" if not point.note else point.note
        shown = number % every == 0 or number == len(points) - 1
        shape = f'<path class="mark f{colour}" d="{MARKERS[colour]}"/>' if shown else ""
        if point.bad:
            shape += CROSS
        parts.append(
            f'<g transform="translate({" ".join(place)})"><title>{escape(text)}</title>{shape}'
            '<circle class="hit" r="7"/></g>'
        )
    return "".join(parts)


def line_sample(series: Series, index: int) -> str:
    colour, dash = look(series, index)
    return (
        f'<path class="line l{colour}"{dash_attribute(dash)} d="M0 0H24"/>'
        f'<path class="mark f{colour}" transform="translate(12 0)" d="{MARKERS[colour]}"/>'
    )


class Bar(NamedTuple):
    x: float
    top: float
    width: float
    height: float

    def draw(self, colour: int) -> str:
        """Draws a bar with stripes. Each further colour has closer stripes, so that bars differ without colour too."""
        x, top, width, height = (f"{value:.1f}" for value in self)
        rect = f'<rect class="bar f{colour}" x="{x}" y="{top}" width="{width}" height="{height}"/>'
        step = 24 / (colour + 1)
        lines = range(1, math.ceil(self.height / step)) if colour else ()
        path = "".join(f"M{x} {self.top + self.height - step * number:.1f}h{width}" for number in lines)
        return f'{rect}<path class="stripe" d="{path}"/>' if path else rect


# ---- charts ---------------------------------------------------------------------------------------------------------


def line_chart(
    series: Sequence[Series],
    x: Axis,
    y: Axis,
    *,
    title: str,
    description: str,
    width: float = 720,
    height: float = 260,
    standalone: bool = True,
) -> str:
    """Draws an SVG of this width.

    The drawing area has this height. A series without points appears only in the legend.
    """
    frame = Frame.begin(title, width)
    frame.legend([one.name for one in series], [line_sample(one, index) for index, one in enumerate(series)])
    points = [point for one in series for point in one.points]
    if not points:
        frame.parts.append(text_at(GAP, frame.top + 2 * LINE, "nothing was measured", style="soft"))
        return frame.finish(title, description, frame.top + 3 * LINE, standalone)
    vertical, left = y_axis(frame, y, [point.y for point in points], height)
    horizontal = x_axis(frame, x, [point.x for point in points], left, height)
    frame.parts += [draw_line(one, index, horizontal, vertical) for index, one in enumerate(series)]
    return frame.finish(title, description, frame.top + height + 2 * LINE + GAP, standalone)


def bar_chart(
    groups: Sequence[str],
    series: Sequence[Series],
    y: Axis,
    *,
    title: str,
    description: str,
    width: float = 720,
    height: float = 220,
    standalone: bool = True,
) -> str:
    """Draws groups of bars. point.x: the number of the group. The axis begins at 0, so lengths are proportional."""
    frame = Frame.begin(title, width)
    colours = [look(one, index)[0] for index, one in enumerate(series)]
    if [one.name for one in series] != list(groups):  # otherwise each bar has its name below it
        frame.legend([one.name for one in series], [Bar(4, -7, 14, 14).draw(colour) for colour in colours])
    scale, left = y_axis(frame, y, [point.y for one in series for point in one.points], height)
    step = (width - GAP - left) / max(len(groups), 1)
    members = [sum(point.x == number for one in series for point in one.points) for number in range(len(groups))]
    bar = min(step * 0.76 / max([1, *members]), 72.0)
    places = [left + step * (number + 0.5) - bar * count / 2 for number, count in enumerate(members)]
    for one, colour in zip(series, colours, strict=True):
        for point in one.points:
            group = int(point.x)
            note = point.note or f"{one.name}, {groups[group]}: {y.text(point.y)}"
            top = scale.place(point.y)
            drawn = Bar(places[group], top, bar, scale.start - top).draw(colour)
            if point.bad:
                drawn += f'<g transform="translate({places[group] + bar / 2:.1f} {top:.1f})">{CROSS}</g>'
            frame.parts.append(f"<g><title>{escape(note)}</title>{drawn}</g>")
            places[group] += bar
    for number, name in enumerate(groups):
        x = left + step * (number + 0.5)
        frame.parts.append(text_at(x, frame.top + height + LINE, shortened(name, step - 4), anchor="middle"))
    return frame.finish(title, description, frame.top + height + LINE + GAP, standalone)
