"""Makes a self-contained HTML page from one or several reports: figures, curves, tables, and the origin of the data.

Floor 5 (ARCHITECTURE.md), pure Python. The page has no scripts and loads nothing; its content security policy makes
browsers enforce that. All text from a report goes through escape(). Each chart is drawn twice, for a desktop and for a
phone, because the text of a scaled chart would be illegible on one of them.
"""

from __future__ import annotations

import dataclasses
import json
import math
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from counterd.bench.chart import (
    DARK,
    LIGHT,
    STYLE,
    Axis,
    Point,
    Series,
    bar_chart,
    escape,
    line_chart,
    percentile_text,
)
from counterd.bench.compare import RATE, SAME, compared_rows, ratios, warning
from counterd.bench.report import (
    NAMES,
    ROW_NAMES,
    all_times,
    answer,
    cpu,
    details,
    fairness,
    faults,
    full_name,
    granted,
    judged,
    objective_of,
    percentile_name,
    representative,
    run_name,
    server_use,
    spread,
    verified,
)
from counterd.bench.result import percentiles
from counterd.units import count, digits, duration, duration_tick, plain_tick, rate
from counterd.version import __version__

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from pathlib import Path

    from hdrh.histogram import HdrHistogram

    from counterd.bench.compare import Ratio
    from counterd.bench.result import Moment, Report, Run

Reports = list[tuple[str, "Report"]]

BAD, WORDS, WIDE = ' class="bad"', ' class="words"', ' class="wide"'
# Nobody could distinguish more curves.
CURVES_MAX = 6
# The points of a line over time; longer runs are thinned to so many.
POINTS_MAX = 240
# If the ratio of the values is larger, a linear axis would only show the largest ones.
LINEAR_MAX = 25
# The columns that fit on a phone; a table with more columns scrolls.
COLUMNS_MAX = 3
MANY_COLUMNS = 7  # a table with more may scroll on a tablet too
# How many points a curve has each time that the distance to 100 % halves.
TICKS_PER_HALF = 5

STYLE_PAGE = (
    f":root{{color-scheme:light dark;{LIGHT}}}@media(prefers-color-scheme:dark){{:root{{{DARK}}}}}"
    """
*{box-sizing:border-box}
body{margin:0 auto;max-width:1180px;padding:24px 20px 48px;background:var(--paper);color:var(--ink);
 font:15px/1.5 system-ui,-apple-system,'Segoe UI',Roboto,'Helvetica Neue',Arial,sans-serif}
h1{font-size:26px;line-height:1.25;margin:0;overflow-wrap:anywhere}
h2{font-size:19px;margin:36px 0 12px;padding-top:16px;border-top:1px solid var(--grid)}
h3{font-size:15px;margin:22px 0 6px;overflow-wrap:anywhere}
p{margin:4px 0;overflow-wrap:anywhere}
.soft{color:var(--soft)}.bad{color:var(--bad)}
.alert{border:1px solid var(--bad);border-left-width:5px;border-radius:6px;padding:10px 14px;margin:16px 0}
.alert ul{margin:4px 0 0;padding-left:20px}.alert li{overflow-wrap:anywhere}
.cards{display:grid;gap:14px;grid-template-columns:repeat(auto-fit,minmax(min(100%,440px),1fr));margin:20px 0 0}
.card{border:1px solid var(--grid);border-radius:8px;padding:14px 16px;min-width:0}
.card h2{font-size:15px;margin:0;padding:0;border:0;overflow-wrap:anywhere}
.card .big{font-size:30px;font-weight:650;line-height:1.3;font-variant-numeric:tabular-nums}
.card .big small{font-size:15px;font-weight:400;color:var(--soft)}
.card dl{display:grid;grid-template-columns:repeat(auto-fit,minmax(56px,1fr));gap:6px;margin:6px 0 0;max-width:560px}
.card dt{font-size:12px;color:var(--soft)}
.card dd{margin:0;font-size:14px;font-variant-numeric:tabular-nums;white-space:nowrap}
.charts{display:grid;gap:14px;grid-template-columns:1fr 1fr}.wide{grid-column:1/-1}
figure{margin:0;border:1px solid var(--grid);border-radius:8px;padding:8px;min-width:0;break-inside:avoid}
figure svg{display:block;width:100%;height:auto}.small,.wide .medium{display:none}
.scroll{overflow-x:auto}.hint{display:none;font-size:13px}
table{border-collapse:collapse;font-variant-numeric:tabular-nums;font-size:14px;width:100%}
th,td{padding:5px 12px;text-align:right;border-bottom:1px solid var(--grid);vertical-align:top}
th{white-space:nowrap;font-weight:600;color:var(--soft)}thead th{vertical-align:bottom}
th:first-child,td:first-child,.words th,.words td{text-align:left}
tbody th{color:var(--ink);font-weight:500;white-space:normal;min-width:130px;overflow-wrap:anywhere}
.words td{overflow-wrap:anywhere;min-width:140px}
tr.bad th,tr.bad td{color:var(--bad)}
footer{margin-top:36px;font-size:13px;color:var(--soft)}
@media(max-width:900px){.charts{grid-template-columns:minmax(0,1fr)}.large{display:none}.wide .medium{display:block}}
@media(max-width:960px){.many{display:block}}
@media(max-width:560px){.hint{display:block}body{padding:16px 12px 32px}h1{font-size:22px}th,td{padding:5px 8px}
 .medium,.wide .medium{display:none}.small{display:block}}
"""
    f"@media print{{:root{{color-scheme:light;{LIGHT}}}body{{max-width:none;padding:0;font-size:11pt}}"
    ".card,tr,.alert{break-inside:avoid}h2,h3{break-after:avoid}.scroll{overflow:visible}table{font-size:8.5pt}"
    "th,td{padding:3px 6px}.charts{grid-template-columns:1fr 1fr}.large,.medium{display:block}"
    ".small,.wide .medium{display:none}}\n"
)


class Curve(NamedTuple):
    """A run that is drawn, with its name for all legends."""

    name: str
    run: Run


def write_page(reports: Reports, path: Path) -> None:
    """Writes the page of reports to a file. Each report has a name."""
    path.write_text(page(reports), "utf-8")


def page(reports: Reports) -> str:
    """Returns the HTML of the page."""
    title = " and ".join(name for name, _ in reports) or "nothing"
    sections = [_failures(reports), _cards(reports), _charts(reports), _tables(reports), _origin(reports)]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8"/>\n'
        '<meta name="viewport" content="width=device-width,initial-scale=1"/>\n'
        """<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'"/>\n"""
        f"<title>{escape(title)} - counterbench</title>\n<style>{STYLE_PAGE}{STYLE}</style></head>\n"
        f'<body><header><h1>{escape(title)}</h1><p class="soft">{escape(_when(reports))}</p></header>\n<main>'
        f"{''.join(sections)}</main>\n<footer>counterbench {escape(__version__)}</footer></body></html>\n"
    )


def _when(reports: Reports) -> str:
    starts = sorted(run.started for _, report in reports for run in report.runs)
    return f"counterbench, {starts[0]}" if starts else "counterbench"


# ---- parts ----------------------------------------------------------------------------------------------------------


def _curves(reports: Reports) -> list[Curve]:
    return [Curve(_short_name(reports, name, report, run), run) for name, report in reports for run in report.runs]


def _short_name(reports: Reports, name: str, report: Report, run: Run) -> str:
    alone = len(reports) == 1 and len(report.runs) > 1
    found = run_name(report, run) if alone else full_name(name, report, run)
    return f"{found} (failed)" if run.failed() else found


def _picked(reports: Reports) -> list[Curve]:
    """Returns all runs, if they are few.

    If there are too many runs, returns only three runs of each report.
    """
    curves = _curves(reports)
    if len(curves) <= CURVES_MAX:
        return curves
    shown = [(report.runs[0], _best(report), report.runs[-1]) if report.runs else () for _, report in reports]
    chosen = {id(run) for runs in shown for run in runs}
    return [curve for curve in curves if id(curve.run) in chosen]


def _failures(reports: Reports) -> str:
    lines = []
    for curve in _curves(reports):
        if curve.run.failed():
            lines.append(f"{curve.name}: {faults(curve.run)}")
        lines += [f"{curve.name}: {text}" for text in details(curve.run)]
    if not lines:
        return ""
    items = "".join(f"<li>{escape(line)}</li>" for line in lines)
    return (
        '<div class="alert" role="note"><strong class="bad">Not everything went right: these figures may be misleading'
        f"</strong><ul>{items}</ul></div>\n"
    )


def _cards(reports: Reports) -> str:
    cards = [_card(name, report) for name, report in reports]
    return f'<div class="cards">{"".join(cards)}</div>\n'


def _card(name: str, report: Report) -> str:
    """Makes the card of a report, with its best run."""
    if not report.runs:
        return f'<section class="card"><h2>{escape(name)}</h2><p>no runs</p></section>'
    run = _best(report)
    found = percentiles(run.latency)
    figures = "".join(
        f"<div><dt>{percentile_name(key)}</dt><dd>{duration(found[key])}</dd></div>"
        for key in ("50", "90", "99", "99.9", "max")
        if found
    )
    lines = [f"{count(run.requests)} answered in {run.seconds:,.1f} s"]
    if run.late:
        lines[0] += f", {count(run.late)} sent over 1 ms late"
    if len(report.runs) > 1:
        lines[0] = f"{run_name(report, run)}, one of {len(report.runs)} runs: {lines[0]}"
    lines += [text for text in (granted(run), *fairness(run)) if text]
    if run.violations == []:
        lines.append(f"verified: {verified(run)}")
    if report.repeats():
        lines.insert(0, spread(report))
    elif report.search is not None:
        lines.insert(0, answer(report.search)[0])
    words = "".join(f'<p class="soft">{escape(line)}</p>' for line in lines)
    wrong = f'<p class="bad">{escape(faults(run))}</p>' if run.failed() else ""
    wanted = "" if run.rate_wanted is None else f" of {digits(run.rate_wanted)} wanted"
    kind = all_times(run)[0]
    return (
        f'<section class="card"><h2>{escape(name)}</h2>'
        f'<div class="big{" bad" if run.failed() else ""}">{digits(run.rate)} <small>requests/s{wanted}</small></div>'
        f"{wrong}{words}<p>{kind.name}{'' if found else ': no answers'}</p><dl>{figures}</dl></section>"
    )


def _best(report: Report) -> Run:
    if report.repeats():
        return representative(report)
    rate_found = (report.search or {}).get("rate")
    if isinstance(rate_found, (int, float)):
        return min(report.runs, key=lambda run: abs((run.rate_wanted or run.rate) - rate_found))
    return max(report.runs, key=lambda run: (not run.failed(), run.rate))


# ---- charts ---------------------------------------------------------------------------------------------------------


class Figure(NamedTuple):
    """A chart that is not drawn yet, because it is needed in several sizes."""

    draw: Callable[..., str]

    def html(self, *, wide: bool) -> str:
        sizes = [("large", 1140, 300)] if wide else []
        sizes += [("medium", 560, 260), ("small", 340, 220)]
        drawn = (
            f'<div class="{name}">{self.draw(width=width, height=height, standalone=False)}</div>'
            for name, width, height in sizes
        )
        return f"<figure{WIDE if wide else ''}>{''.join(drawn)}</figure>\n"


def _grid(heading: str, figures: Sequence[Figure]) -> str:
    """Arranges charts in rows of two. If their number is odd, the first one has its own row."""
    if not figures:
        return ""
    drawn = "".join(figure.html(wide=not index and len(figures) % 2 == 1) for index, figure in enumerate(figures))
    return f'<h2>{heading}</h2>\n<div class="charts">{drawn}</div>\n'


def _charts(reports: Reports) -> str:
    curves = _picked(reports)
    keys = (
        ("latency", "queue", "service") if len(curves) <= 2 else ("latency",)
    )  # otherwise there would be too many curves
    figures = [_percentile_figure(curves, "Latency by percentile", keys, "latency")]
    if churned := [curve for curve in curves if curve.run.give_back is not None]:
        figures.append(_percentile_figure(churned, "Give-back by percentile", ("give_back",), "time until it was back"))
    scans = [(name, report) for name, report in reports if _is_scan(report)]
    if scans:
        figures.append(_rate_figure(scans))
    elif len(curves) > 1:
        figures.append(_throughput_bars(reports))
    timed = [curve for curve in curves if curve.run.series]
    return _grid("Latency and throughput", figures) + _grid("Over time", _over_time(timed) if timed else [])


def _is_scan(report: Report) -> bool:
    return len(report.runs) > 1 and not report.repeats() and all(run.rate_wanted is not None for run in report.runs)


def _time_axis(title: str, values: Iterable[float]) -> Axis:
    """Makes an axis for times. The axis is logarithmic if a linear axis would make small values indistinguishable."""
    positive = [value for value in values if value > 0]
    wide = bool(positive) and max(positive) / min(positive) > LINEAR_MAX
    return Axis(title, "log" if wide else "linear", duration_tick)


def _percentile_figure(curves: Sequence[Curve], title: str, keys: Sequence[str], axis: str) -> Figure:
    series = []
    for number, (name, run) in enumerate(curves):
        drawn = [times for times in all_times(run) if times.key in keys]
        for dash, times in enumerate(drawn):
            own = name if len(drawn) == 1 else times.name if len(curves) == 1 else f"{name}, {times.name}"
            colour = dash if len(curves) == 1 else number
            series.append(Series(own, percentile_points(own, times.values), colour, dash))
    x = Axis("percentile", "percentile", percentile_text)
    y = _time_axis(axis, (point.y for one in series for point in one.points))
    about = "The time of the slowest requests: each step to the right shows a part of them that is ten times smaller."
    return Figure(partial(line_chart, series, x, y, title=title, description=about))


def percentile_points(name: str, values: HdrHistogram) -> list[Point]:
    """Returns points at x = 1 / (1 - p). There is no point for p = 1, so the largest of n values is at rank n - 1/2."""
    total = values.get_total_count()
    points: list[Point] = []
    for step in values.get_percentile_iterator(TICKS_PER_HALF) if total else ():
        percent = step.percentile_level_iterated_to
        place = 100 / (100 - percent) if percent < 100 else 2.0 * total
        level = "max" if percent >= 100 else f"{percent:.8g} %"
        points.append(Point(place, step.value_iterated_to, f"{name}: {level} {duration(step.value_iterated_to)}"))
    return points


def _rate_figure(reports: Reports) -> Figure:
    """Draws four lines for one scan, or three for each of several scans. Runs with errors are crossed out."""
    keys = ("50", "99", "99.9", "max") if len(reports) == 1 else ("50", "99", "max")
    series = []
    for number, (name, report) in enumerate(reports):
        for dash, key in enumerate(keys):
            points = [_rate_point(run, key) for run in report.runs if run.latency.get_total_count()]
            own = percentile_name(key) if len(reports) == 1 else f"{name}, {percentile_name(key)}"
            colour = dash if len(reports) == 1 else number
            series.append(Series(own, sorted(points), colour, dash))
    y = _time_axis("response time", (point.y for one in series for point in one.points))
    return Figure(
        partial(
            line_chart,
            series,
            Axis("requests/s wanted"),
            y,
            title="Response time against rate",
            description=(
                "The server can handle rates up to the rate at which the curve rises. Runs with errors are crossed out."
            ),
        )
    )


def _rate_point(run: Run, key: str) -> Point:
    value, wanted = percentiles(run.latency)[key], run.rate_wanted or 0.0
    note = f"{percentile_name(key)} {duration(value)} at {digits(wanted)}/s wanted, {digits(run.rate)}/s reached"
    return Point(wanted, value, f"{note}; {faults(run)}" if run.failed() else note, run.failed())


def _throughput_bars(reports: Reports) -> Figure:
    """Draws a group of bars for each load, with a bar for each report."""
    several = any(len(report.runs) > 1 for _, report in reports)
    groups: list[str] = []
    series = []
    for name, report in reports:
        names = [_short_name(reports, name, report, run) for run in report.runs]
        points = []
        for own, run in zip(names, report.runs, strict=True):
            group = run_name(report, run) if several else own
            groups += [] if several and group in groups else [group]
            number = groups.index(group) if several else len(groups) - 1
            points.append(Point(number, run.rate, f"{own}: {rate(run.rate)} {faults(run)}".rstrip(), run.failed()))
        series.append(Series(names[0] if names and not several else name, points))
    return Figure(
        partial(
            bar_chart,
            groups,
            series,
            Axis("requests/s"),
            title="Throughput",
            description="Requests answered a second. Runs with errors are crossed out.",
        )
    )


def _over_time(curves: Sequence[Curve]) -> list[Figure]:
    """Makes charts of throughput and latency: one chart for up to two runs, otherwise one for each percentile."""
    thin = [(name, thinned(run.series)) for name, run in curves]
    rates = [Series(name, [_moment_rate(name, moment) for moment in moments]) for name, moments in thin]
    figures = [_over_time_figure(rates, Axis("requests/s"), "Throughput over time")]
    keys = ("50", "99", "max")
    if len(thin) > 2:
        return figures + [
            _latency_figure(
                [_moment_series(name, key, moments) for name, moments in thin],
                f"Latency over time, {percentile_name(key)}",
            )
            for key in keys
        ]
    together = []
    for number, (name, moments) in enumerate(thin):
        for dash, key in enumerate(keys):
            own = percentile_name(key) if len(thin) == 1 else f"{name}, {percentile_name(key)}"
            colour = dash if len(thin) == 1 else number
            together.append(dataclasses.replace(_moment_series(own, key, moments), colour=colour, dash=dash))
    return [*figures, _latency_figure(together, "Latency over time")]


def _latency_figure(series: Sequence[Series], title: str) -> Figure:
    y = _time_axis("latency", (point.y for one in series for point in one.points))
    return _over_time_figure(series, y, title)


def _over_time_figure(series: Sequence[Series], y: Axis, title: str) -> Figure:
    x = Axis("seconds", text=plain_tick)
    about = (
        "Each point is a second. Longer runs are thinned to the average throughput and the worst latencies of "
        "each piece."
    )
    return Figure(partial(line_chart, series, x, y, title=title, description=about))


def _moment_rate(name: str, moment: Moment) -> Point:
    value = moment.requests / moment.seconds if moment.seconds else 0.0
    note = f"{name}: {rate(value)} up to {moment.end:.1f} s"
    return Point(
        moment.end, value, f"{note}; {count(moment.errors)} errors" if moment.errors else note, moment.errors > 0
    )


def _moment_series(name: str, key: str, moments: Sequence[Moment]) -> Series:
    """Makes a line over time. A second without replies has no latency, so it has no point."""
    points = []
    for moment in moments:
        if key in moment.percentiles:
            value = moment.percentiles[key]
            points.append(Point(moment.end, value, f"{name}: {duration(value)} up to {moment.end:.1f} s"))
    return Series(name, points)


def thinned(moments: Sequence[Moment]) -> list[Moment]:
    """Reduces moments to at most POINTS_MAX: neighbours are joined, and the worst of their percentiles is kept."""
    size = max(1, math.ceil(len(moments) / POINTS_MAX))
    return [_joined(moments[start : start + size]) for start in range(0, len(moments), size)]


def _joined(moments: Sequence[Moment]) -> Moment:
    keys = {key for moment in moments for key in moment.percentiles}
    return dataclasses.replace(
        moments[-1],
        seconds=sum(moment.seconds for moment in moments),
        requests=sum(moment.requests for moment in moments),
        errors=sum(moment.errors for moment in moments),
        percentiles={key: max(moment.percentiles.get(key, 0) for moment in moments) for key in keys},
    )


# ---- tables ---------------------------------------------------------------------------------------------------------


class Row(NamedTuple):
    """A row of a table. The first cell is its heading."""

    cells: Sequence[str]
    bad: bool = False


def _table(title: str, columns: Sequence[str], rows: Sequence[Row], *, words: bool = False) -> str:
    """Makes a table that scrolls sideways if it is too wide.

    The table can get the focus, so that a keyboard can scroll it.
    """
    if not rows:
        return ""
    head = "".join(f'<th scope="col">{escape(column)}</th>' for column in columns)
    body = "".join(
        f'<tr{BAD if row.bad else ""}><th scope="row">{escape(row.cells[0])}</th>'
        f"{''.join(f'<td>{escape(cell)}</td>' for cell in row.cells[1:])}</tr>"
        for row in rows
    )
    many = " many" if len(columns) > MANY_COLUMNS else ""
    hint = f'<p class="hint{many} soft">This table scrolls sideways.</p>' if len(columns) > COLUMNS_MAX else ""
    return (
        f"<h3>{escape(title)}</h3>{hint}"
        f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(title)}">'
        f"<table{WORDS if words else ''}><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>\n"
    )


def _tables(reports: Reports) -> str:
    curves = _curves(reports)
    names = [percentile_name(name) for name in NAMES]
    parts = [
        _comparison(reports),
        _table("Requests", REQUEST_COLUMNS, [_request_row(curve) for curve in curves]),
        _table("Times", ["run", *names], [row for curve in curves for row in _time_rows(curve)]),
        _meanings(curves),
        *(_objective_table(name, report) for name, report in reports),
        *_kinds_tables(curves),
    ]
    return f"<h2>Figures</h2>\n{''.join(parts)}"


def _comparison(reports: Reports) -> str:
    """Makes the table with the ratios to the first report."""
    pairs = [(row, base) for row, base in compared_rows(reports) if base is not None]
    rows = [
        Row(
            [row.title, *("-" if each is None else _ratio(each) for each in ratios(row, base))],
            row.failed() or base.failed(),
        )
        for row, base in pairs
    ]
    warnings = "".join(f'<p class="bad">{escape(text)}</p>' for pair in pairs for text in (warning(*pair),) if text)
    title = f"Against {reports[0][0]}" if reports else ""
    return _table(title, ["run", RATE, *map(percentile_name, ROW_NAMES)], rows) + warnings


def _ratio(found: Ratio) -> str:
    """Formats a ratio in words, because the page has no legend for symbols."""
    around = f" ±{found.band:.0%}" if found.band > SAME else ""
    return f"{digits(found.ratio)}x{around} {found.verdict}".rstrip()


REQUEST_COLUMNS = ("run", "wanted", "reached", "requests", "seconds", "late", "unsent", "errors", "load CPU", "server")


def _request_row(curve: Curve) -> Row:
    run = curve.run
    cells = (
        curve.name,
        "-" if run.rate_wanted is None else rate(run.rate_wanted),
        rate(run.rate),
        count(run.requests),
        f"{run.seconds:,.2f}",
        count(run.late),
        count(run.unsent),
        count(sum(run.errors.values())),
        cpu(run),
        server_use(run),
    )
    return Row(cells, run.failed())


def _time_rows(curve: Curve) -> list[Row]:
    rows = []
    for times in all_times(curve.run):
        found = percentiles(times.values)
        cells = [duration(found[name]) if found else "-" for name in NAMES]
        rows.append(Row([f"{curve.name}, {times.name}", *cells], curve.run.failed()))
    return rows


def _objective_table(name: str, report: Report) -> str:
    """Makes the table of a search's runs, which says which runs met the objective."""
    objective = objective_of(report)
    if objective is None:
        return ""
    rows = [Row([run_name(report, run), *judged(objective, run)]) for run in report.runs]
    return _table(f"{name}: {objective.text}", ["run", objective.of, "goal"], rows)


def _meanings(curves: Sequence[Curve]) -> str:
    meanings = {times.name: times.meaning for curve in curves for times in all_times(curve.run)}
    lines = (f'<p class="soft">{escape(name)}: {escape(meaning)}</p>' for name, meaning in meanings.items())
    return "".join(lines) + "\n"


def _kinds_tables(curves: Sequence[Curve]) -> list[str]:
    """Makes the tables of the replies by outcome, and of the errors."""
    tables = []
    for title, kinds in (
        ("Outcomes", [curve.run.outcomes for curve in curves]),
        ("Errors", [curve.run.errors for curve in curves]),
    ):
        columns = list(dict.fromkeys(kind for one in kinds for kind in one))
        rows = [
            Row([curve.name, *(count(one.get(column, 0)) for column in columns)], title == "Errors" and bool(one))
            for curve, one in zip(curves, kinds, strict=True)
        ]
        tables.append(_table(title, ["run", *columns], rows if columns else []))
    return tables


def _origin(reports: Reports) -> str:
    """Makes the section with commands, options, machines and versions."""
    names = [name for name, _ in reports]
    commands = [{"command": report.command} if report.command else {} for _, report in reports]
    options = [_options(report) for _, report in reports]
    machines = [{**report.machine, **report.versions} for _, report in reports]
    return "<h2>Origin of these figures</h2>\n" + "".join(
        _table(title, ["", *names], _dict_rows(dicts), words=True)
        for title, dicts in (("Command", commands), ("Options", options), ("Machine and versions", machines))
    )


def _dict_rows(dicts: Sequence[dict[str, str]]) -> list[Row]:
    keys = dict.fromkeys(key for one in dicts for key in one)
    return [Row([key, *(one.get(key, "-") for one in dicts)]) for key in keys]


def _options(report: Report) -> dict[str, str]:
    """Returns the options of all runs. If the runs differ in an option, the result has all values of the option."""
    keys = dict.fromkeys(key for run in report.runs for key in run.options)
    values = {key: dict.fromkeys(_option(run.options.get(key)) for run in report.runs) for key in keys}
    return {key: ", ".join(found) for key, found in values.items()}


def _option(value: Any) -> str:
    return value if isinstance(value, str) else "-" if value is None else json.dumps(value, ensure_ascii=False)
