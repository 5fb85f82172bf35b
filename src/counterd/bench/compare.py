"""Reports side by side: ratios against the first, and what is to be known before one believes them.

A side, pure Python. A ratio is better or worse only if it is beyond what the runs vary by themselves: from run to run
where there are several of the same load, else from second to second. Where the loads differ, or a run failed, a ratio
has no verdict.
"""

from __future__ import annotations

import math
import statistics
from typing import TYPE_CHECKING, Any, NamedTuple

from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

from counterd.bench.report import (
    BAD,
    GOOD,
    ROW_NAMES,
    SOFT,
    answer,
    faults,
    full_name,
    is_one_load,
    percentile_name,
    representative,
    spread,
    time_cells,
)
from counterd.bench.result import percentiles
from counterd.units import digits, printable, rate

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from rich.console import RenderableType

    from counterd.bench.result import Moment, Report, Run

# Two runs of the same thing differ by this much on a quiet machine.
SAME = 0.05
SECONDS_MIN = 3  # of a run, to know how much they vary
MARKS = {"better": "▲", "worse": "▼", "same": "=", "": ""}
RATE = "throughput"
NAMES = (RATE, *ROW_NAMES)
# What of the options is the load: the rest says where it went, for how long, and from how many processes.
SHAPE = (
    *("rate", "arrivals", "connections", "pipeline", "keep-alive", "ops", "names", "keys", "name-size", "value-size"),
    *("resources", "maximum", "hold", "churn", "producers", "delay"),
)
SWITCHES = ("rate", "hold", "churn", "delay")  # which are not there where they are off


class Row(NamedTuple):
    """A line of a comparison: a run, or all runs of the same load. shown: whose figures stand there."""

    title: str
    shown: Run
    runs: Sequence[Run]

    def failed(self) -> bool:
        return any(run.failed() for run in self.runs)


class Ratio(NamedTuple):
    """Of a figure to that of the first report. `verdict` is better, worse, same or, where none can be given, empty.

    band: how far from 1 a ratio may be and still be the same.
    """

    ratio: float
    verdict: str
    band: float = SAME

    def text(self) -> str:
        around = f" ±{self.band:.0%}" if self.band > SAME else ""
        return f"{digits(self.ratio)}x{around} {MARKS[self.verdict]}".rstrip()


def rows_of(name: str, report: Report) -> list[Row]:
    """Of a report."""
    if report.repeats() and report.runs:
        title = f"{printable(name)}, median of {len(report.runs)}"
        return [Row(title, representative(report), report.runs)]
    return [Row(full_name(name, report, run), run, [run]) for run in report.runs]


def compared_rows(reports: list[tuple[str, Report]]) -> Iterator[tuple[Row, Row | None]]:
    """Each row with what it is held against, if that is anything."""
    if not reports:
        return
    first = rows_of(*reports[0])
    for index, (name, report) in enumerate(reports):
        for row in rows_of(name, report):
            yield row, base_of(reports[0][1], first, row.shown) if index else None


def base_of(report: Report, first: list[Row], run: Run) -> Row | None:
    """The row of the first report that another's run is held against: its only one, or the one that did the same.

    Of searches that is the one at the same rate, also when their loads differ: that is what is compared.
    """
    if len(first) == 1:
        return first[0]
    one = is_one_load(report)
    same = (row for row in first if (one or row.shown.label == run.label) and row.shown.rate_wanted == run.rate_wanted)
    return next(same, None)


# ---- figures --------------------------------------------------------------------------------------------------------


def ratios(row: Row, base: Row) -> list[Ratio | None]:
    """Of the figures in NAMES."""
    judged = not (row.failed() or base.failed() or differences(row.shown, base.shown))
    return [
        compared(
            value_of(row, name),
            value_of(base, name),
            more_is_better=name == RATE,
            judged=judged,
            band=max(SAME, math.hypot(variation(row.runs, name), variation(base.runs, name))),
        )
        for name in NAMES
    ]


def compared(value: float, base: float, *, more_is_better: bool, judged: bool, band: float = SAME) -> Ratio | None:
    """None where there is nothing to divide by."""
    if not base or math.isnan(value + base):
        return None
    ratio = value / base
    if not judged:
        return Ratio(ratio, "", band)
    if abs(ratio - 1) <= band:
        return Ratio(ratio, "same", band)
    return Ratio(ratio, "better" if (ratio > 1) == more_is_better else "worse", band)


def value_of(row: Row, name: str) -> float:
    """The median of its runs; nan if there is none."""
    values = [value for run in row.runs if (value := _figure(run, name)) is not None]
    return statistics.median(values) if values else math.nan


def _figure(run: Run, name: str) -> float | None:
    return run.rate if name == RATE else percentiles(run.latency).get(name)


def variation(runs: Sequence[Run], name: str) -> float:
    """By what part of itself a figure varies: of several runs half of what lies between them, of one twice the standard
    error of its seconds. 0 where that cannot be known."""
    if len(runs) > 1:
        values = [value for run in runs if (value := _figure(run, name)) is not None]
        middle = statistics.median(values) if values else 0.0
        return (max(values) - min(values)) / 2 / middle if middle else 0.0
    if name == "max":  # of a run it is that of one second
        return 0.0
    seconds = [value for moment in runs[0].series if (value := _moment(moment, name)) is not None]
    mean = statistics.fmean(seconds) if len(seconds) >= SECONDS_MIN else 0.0
    return 2 * statistics.stdev(seconds) / math.sqrt(len(seconds)) / mean if mean else 0.0


def _moment(moment: Moment, name: str) -> float | None:
    """Of a whole second; the last may be a short one."""
    if moment.seconds < 0.5:
        return None
    return moment.requests / moment.seconds if name == RATE else moment.percentiles.get(name)


def differences(run: Run, base: Run) -> list[str]:
    """What of the load is another: then the ratios say more of the loads than of the servers."""
    found = []
    for name in SHAPE:
        ours, theirs = run.options.get(name), base.options.get(name)
        known = name in SWITCHES or (ours is not None and theirs is not None)
        if known and ours != theirs:
            found.append(f"{name} {_option(ours)}, not {_option(theirs)}")
    return found


def _option(value: Any) -> str:
    return "none" if value is None else printable(value)


# ---- terminal -------------------------------------------------------------------------------------------------------


def compare_table(reports: list[tuple[str, Report]]) -> RenderableType:
    """A row a run, with ratios to the first report's."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    table.add_column("run", overflow="fold")
    for column in (RATE, *map(percentile_name, ROW_NAMES)):
        table.add_column(column, justify="right", no_wrap=True)
    notes, is_compared = [], False
    for row, base in compared_rows(reports):
        run = row.shown
        notes += [Text(f"{row.title}: {faults(each)}", BAD) for each in row.runs if each.failed()]
        heading = Text(f"{row.title} (failed)", BAD) if row.failed() else Text(row.title)
        figures = [rate(run.rate), *time_cells(percentiles(run.latency), ROW_NAMES)]
        found = ratios(row, base) if base is not None else [None] * len(figures)
        is_compared |= base is not None
        notes += [Text(text, BAD) for text in (warning(row, base),) if text]
        table.add_row(heading, *(_cell(value, ratio, run) for value, ratio in zip(figures, found, strict=True)))
    for name, report in reports:
        notes += _about(name, report)
    if is_compared:
        marks = f"{MARKS['better']} better, {MARKS['worse']} worse"
        same = f"{MARKS['same']} within {SAME:.0%}, or ± what the runs themselves vary by"
        notes.append(Text(f"x: against {printable(reports[0][0])}; {marks}, {same}", SOFT))
    return Group(table, *notes)


def warning(row: Row, base: Row | None) -> str:
    """That two rows are not of the same load; empty if they are, or there is only one."""
    other = [] if base is None else differences(row.shown, base.shown)
    if base is None or not other:
        return ""
    return f"{row.title}: not the load of {base.title}: {'; '.join(other)}"


def _about(name: str, report: Report) -> list[Text]:
    """What was loaded, where the rows do not say it, and what a search found."""
    words = [printable(report.runs[0].label)] if report.runs and is_one_load(report) else []
    if report.repeats():
        words.append(spread(report))
    elif report.search is not None:
        words.append(answer(report.search)[0])
    return [Text(f"{printable(name)}: {': '.join(words)}", SOFT)] if words else []


def _cell(value: str, ratio: Ratio | None, run: Run) -> Text:
    cell = Text(value, BAD if run.failed() else "")
    if ratio is not None:
        cell.append(f"\n{ratio.text()}", {"better": GOOD, "worse": "red"}.get(ratio.verdict, SOFT))
    return cell
