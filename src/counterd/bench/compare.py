"""Compares reports: ratios to the first report, and warnings about ratios that do not compare like with like.

Floor 5 (ARCHITECTURE.md), pure Python. A ratio counts as better or worse only if it exceeds the variation of the
runs themselves: the variation between several runs of the same load, or between the seconds of a single run. A ratio
has no verdict if the loads differ or a run failed.
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

# Two runs of the same load differ by so much on a machine without other load.
SAME = 0.05
SECONDS_MIN = 3  # the fewest seconds of a run from which its variation is computed
MARKS = {"better": "▲", "worse": "▼", "same": "=", "": ""}
RATE = "throughput"
NAMES = (RATE, *ROW_NAMES)
# The options that define the load. The others define the server, the duration, and the number of processes.
SHAPE = (
    *("rate", "arrivals", "connections", "pipeline", "keep-alive", "ops", "names", "keys", "name-size", "value-size"),
    *("resources", "maximum", "hold", "churn", "producers", "delay"),
    *("wait", "items", "limit", "burst", "weights", "priorities"),
)
# Options that are missing if they are off.
SWITCHES = ("rate", "hold", "churn", "delay", "wait", "items", "weights", "priorities")


class Row(NamedTuple):
    """A row of a comparison: a run, or all runs of the same load. shown: the run whose figures are shown."""

    title: str
    shown: Run
    runs: Sequence[Run]

    def failed(self) -> bool:
        return any(run.failed() for run in self.runs)


class Ratio(NamedTuple):
    """The ratio of a figure to the same figure of the first report. verdict: better, worse, same, or "" if there is
    none.

    band: how far from 1 a ratio may be and still count as the same.
    """

    ratio: float
    verdict: str
    band: float = SAME

    def text(self) -> str:
        around = f" ±{self.band:.0%}" if self.band > SAME else ""
        return f"{digits(self.ratio)}x{around} {MARKS[self.verdict]}".rstrip()


def rows_of(name: str, report: Report) -> list[Row]:
    """Returns the rows of a report."""
    if report.repeats() and report.runs:
        title = f"{printable(name)}, median of {len(report.runs)}"
        return [Row(title, representative(report), report.runs)]
    return [Row(full_name(name, report, run), run, [run]) for run in report.runs]


def compared_rows(reports: list[tuple[str, Report]]) -> Iterator[tuple[Row, Row | None]]:
    """Yields each row with the row that it is compared with, or None."""
    if not reports:
        return
    first = rows_of(*reports[0])
    for index, (name, report) in enumerate(reports):
        for row in rows_of(name, report):
            yield row, base_of(reports[0][1], first, row.shown) if index else None


def base_of(report: Report, first: list[Row], run: Run) -> Row | None:
    """Returns the row of the first report with which a run is compared: its only row, or the row of the same load.

    For a search, the row at the same rate is returned, even if the loads differ, because searches compare rates.
    """
    if len(first) == 1:
        return first[0]
    one = is_one_load(report)
    same = (row for row in first if (one or row.shown.label == run.label) and row.shown.rate_wanted == run.rate_wanted)
    return next(same, None)


# ---- figures --------------------------------------------------------------------------------------------------------


def ratios(row: Row, base: Row) -> list[Ratio | None]:
    """Returns the ratios of the figures in NAMES."""
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
    """Returns the ratio of two figures; None if it cannot be computed."""
    if not base or math.isnan(value + base):
        return None
    ratio = value / base
    if not judged:
        return Ratio(ratio, "", band)
    if abs(ratio - 1) <= band:
        return Ratio(ratio, "same", band)
    return Ratio(ratio, "better" if (ratio > 1) == more_is_better else "worse", band)


def value_of(row: Row, name: str) -> float:
    """Returns the median of a figure over the runs of a row. Returns nan if there is none."""
    values = [value for run in row.runs if (value := _figure(run, name)) is not None]
    return statistics.median(values) if values else math.nan


def _figure(run: Run, name: str) -> float | None:
    return run.rate if name == RATE else percentiles(run.latency).get(name)


def variation(runs: Sequence[Run], name: str) -> float:
    """Returns by what fraction a figure varies. Returns 0 if the variation is not known.

    For several runs, the result is half of the distance between the smallest and the largest figure. For a single run,
    the result is twice the standard error of its seconds.
    """
    if len(runs) > 1:
        values = [value for run in runs if (value := _figure(run, name)) is not None]
        middle = statistics.median(values) if values else 0.0
        return (max(values) - min(values)) / 2 / middle if middle else 0.0
    if name == "max":  # the maximum of a run comes from only one second
        return 0.0
    seconds = [value for moment in runs[0].series if (value := _moment(moment, name)) is not None]
    mean = statistics.fmean(seconds) if len(seconds) >= SECONDS_MIN else 0.0
    return 2 * statistics.stdev(seconds) / math.sqrt(len(seconds)) / mean if mean else 0.0


def _moment(moment: Moment, name: str) -> float | None:
    """Returns the figure of one second, or None if the second is short, as the last one may be."""
    if moment.seconds < 0.5:
        return None
    return moment.requests / moment.seconds if name == RATE else moment.percentiles.get(name)


def differences(run: Run, base: Run) -> list[str]:
    """Returns the options in which two loads differ.

    If there are differences, the ratios do not compare the servers.
    """
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
    """Makes a table with a row for each run, with ratios to the first report."""
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
        same = f"{MARKS['same']} within {SAME:.0%}, or within ± the variation of the runs themselves"
        notes.append(Text(f"x: against {printable(reports[0][0])}; {marks}, {same}", SOFT))
    return Group(table, *notes)


def warning(row: Row, base: Row | None) -> str:
    """Returns a warning if two rows have different loads.

    Returns "" if the loads are the same, or if there is only one row.
    """
    other = [] if base is None else differences(row.shown, base.shown)
    if base is None or not other:
        return ""
    return f"{row.title}: not the load of {base.title}: {'; '.join(other)}"


def _about(name: str, report: Report) -> list[Text]:
    """Returns lines about the load, unless the rows describe it, and about the result of a search."""
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
