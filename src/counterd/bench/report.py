"""Writes the results of runs for a terminal, a spreadsheet and the tools that read HdrHistogram's percentile files.

Floor 5 (ARCHITECTURE.md), pure Python. A run with errors, with unsent requests or with violations is marked
wherever its figures are shown. Otherwise it could look better than a correct run, because it has done less.
"""

from __future__ import annotations

import contextlib
import csv
import statistics
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, NamedTuple

from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

from counterd.bench.dialect import Dialect
from counterd.bench.dialects import DIALECTS
from counterd.bench.result import PERCENTILES, percentiles
from counterd.bench.search import Objective
from counterd.units import count, digits, duration, printable, rate, several

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from hdrh.histogram import HdrHistogram
    from rich.console import RenderableType

    from counterd.bench.result import Grants, Report, Run

BAD, GOOD, SOFT = "bold red", "green", "dim"
KEYS_SHOWN = 10
NAMES = (*(f"{percent:g}" for percent in PERCENTILES), "max")
ROW_NAMES = ("50", "99", "99.9", "max")
AS_FAST_AS_IT_GOES = "as fast as it goes"
REFUSALS = ("refused", "too many requests")
FAN_LATENCY = "from the intended start, or from when a job is due, to its delivery"
# HdrHistogram's percentile files have 5 lines each time that the distance to 100 % has halved.
TICKS_PER_HALF = 5


class Times(NamedTuple):
    """One of a run's histograms. meaning: from when to when its times are measured."""

    name: str
    key: str  # its name in the CSV
    meaning: str
    values: HdrHistogram


def all_times(run: Run) -> list[Times]:
    """Returns the histograms of a run, with the most important one first."""
    if run.rate_wanted is None:
        found = [Times("latency", "latency", "from the sending to the answer", run.latency)]
    elif run.service is None:  # jobs, which are sent for other connections
        found = [Times("latency", "latency", FAN_LATENCY, run.latency)]
    else:
        found = [Times("response time", "latency", "from the intended start to the answer", run.latency)]
    if run.queue is not None:
        meaning = "from the sending of a Take that may wait to its grant or refusal"
        found.append(Times("queue time", "queue", meaning, run.queue))
    if run.service is not None:
        which = "" if run.queue is None else ", of requests that do not wait"
        found.append(Times("service time", "service", f"from the sending to the answer{which}", run.service))
    if run.give_back is not None:
        meaning = "from the killing of a client until its permits were given back"
        found.append(Times("give-back", "give_back", meaning, run.give_back))
    return found


def percentile_name(name: str) -> str:
    return name if name == "max" else f"p{name}"


def run_name(report: Report, run: Run) -> str:
    """Returns a name that no other run of the report has: the label, the rate, or a number if both are the same."""
    if len(report.runs) == 1:
        return printable(run.label)
    twins = [other for other in report.runs if (other.label, other.rate_wanted) == (run.label, run.rate_wanted)]
    number = next(index for index, twin in enumerate(twins, 1) if twin is run)
    name = printable(run.label)
    if run.rate_wanted is not None:
        at = f"{digits(run.rate_wanted)}/s"
        name = at if is_one_load(report) else f"{name} at {at}"
    elif is_one_load(report) and any(other.rate_wanted is not None for other in report.runs):
        name = AS_FAST_AS_IT_GOES
    return name if len(twins) == 1 else f"{name} #{number}"


def is_one_load(report: Report) -> bool:
    """Returns whether the runs are those of a search: the same load at different rates."""
    return len({run.label for run in report.runs}) == 1


def full_name(name: str, report: Report, run: Run) -> str:
    """Returns a name that no other run of all reports has. name: the name of its report."""
    return printable(name) if len(report.runs) == 1 else f"{printable(name)}, {run_name(report, run)}"


def by_kind(kinds: dict[str, int]) -> str:
    """Formats counts, with the most frequent first, such as "granted 1,000, refused 12"."""
    ordered = sorted(kinds.items(), key=lambda kind: -kind[1])
    return ", ".join(f"{printable(name)} {count(number)}" for name, number in ordered)


def faults(run: Run) -> str:
    """Returns everything that makes the figures of a run unreliable. Returns "" if there is nothing."""
    found = [f"errors: {by_kind(run.errors)}"] if run.errors else []
    if run.unsent:
        found.append(f"{count(run.unsent)} never sent")
    if run.violations:
        found.append("violations of --verify")  # without a number, because only the first violations are listed
    return "; ".join(found)


def details(run: Run) -> list[str]:
    """Returns the known details of a run's faults, one per line."""
    return [*run.evidence, *(run.violations or ())]


def objective_of(report: Report) -> Objective | None:
    """Returns the objective of a search."""
    text = (report.search or {}).get("objective")
    with contextlib.suppress(ValueError):
        return Objective.read(text) if isinstance(text, str) else None
    return None


def judged(objective: Objective, run: Run) -> tuple[str, str]:
    """Returns the measured value that the objective limits, and whether the run meets the objective."""
    value = duration(objective.value_of(run)) if run.requests else "-"
    return value, "met" if objective.is_met(run) else "missed"


def granted_rate(run: Run) -> float | None:
    """Returns how many permits were granted a second.

    Returns None if nothing was refused, because then it equals the rate.
    """
    refused = any(run.outcomes.get(outcome) for outcome in REFUSALS)
    return run.outcomes.get("granted", 0) / run.seconds if refused and run.seconds else None


def granted(run: Run) -> str:
    """Returns a text with granted_rate(), or "" if there is none."""
    found = granted_rate(run)
    return "" if found is None else f"{rate(found)} were granted, the others were refusals or releases"


def answer(search: dict[str, Any]) -> tuple[str, bool]:
    """Returns the final sentence about a search, and whether the search was successful."""
    ended = search.get("ended")
    early = f"; not finished: {printable(ended)}" if ended else ""
    if "repeat" in search:
        return f"the same load {printable(search['repeat'])} times{early}", not ended
    if "objective" not in search:
        return f"scan: {printable(search.get('scan', ''))}{early}", not ended
    objective, found = printable(search["objective"]), search.get("rate")
    if isinstance(found, (int, float)):
        contrary = search.get("contrary")
        doubt = (
            f"; {several(contrary, 'run')} at that rate or below missed it"
            if isinstance(contrary, int) and contrary
            else ""
        )
        return f"{objective} holds up to {rate(found)}{doubt}{early}", not ended
    if ended:
        return f"{objective}: no such rate was found{early}", False
    return f"{objective} holds at none of the tried rates", False


def representative(report: Report) -> Run:
    """Returns the run with the median throughput, among runs of the same load."""
    return sorted(report.runs, key=lambda run: run.rate)[(len(report.runs) - 1) // 2]


def spread(report: Report) -> str:
    """Describes how much runs of the same load differ: the median, the least and the most of each figure."""
    times = [percentiles(run.latency) for run in report.runs]
    figures = {"": [run.rate for run in report.runs]}
    figures |= {name: [each[name] for each in times if each] for name in ("50", "99")}
    words = []
    for name, values in figures.items():
        if values:
            show = duration if name else rate
            middle, least, most = show(statistics.median(values)), show(min(values)), show(max(values))
            words.append(f"{f'{percentile_name(name)} ' if name else ''}{middle} ({least} to {most})")
    return f"median of {len(report.runs)} runs: {', '.join(words)}"


# ---- terminal -------------------------------------------------------------------------------------------------------


def summary(report: Report) -> RenderableType:
    """Shows everything about one run, or a row for each of several runs and the result of the search."""
    parts: list[RenderableType]
    if len(report.runs) == 1:
        run = report.runs[0]
        parts = [Text(printable(run.label), "bold"), _facts(run), _times_table(run), *_meanings(run)]
    else:
        parts = [
            *(Text(printable(run.label), "bold") for run in report.runs[:1] if is_one_load(report)),
            _runs_table(report),
            *_faults_of(report),
        ]
    if report.search is not None:
        text, found = answer(report.search)
        parts.append(Text(text, "bold" if found else BAD))
        if report.repeats():
            parts.append(Text(spread(report), "bold"))
    return Group(*parts)


def brief(report: Report) -> str:
    """Returns a line for each run, and a line for the result of a search."""
    objective = objective_of(report)
    lines = [_brief(run, objective, is_one=len(report.runs) == 1) for run in report.runs]
    if report.repeats():
        lines.append(spread(report))
    elif report.search is not None and "objective" in report.search:
        lines.append(answer(report.search)[0])
    return "\n".join(lines)


def _brief(run: Run, objective: Objective | None, *, is_one: bool) -> str:
    found = percentiles(run.latency)
    per_second = granted_rate(run)
    words = [
        f"{run.rate:.2f} requests per second" + ("" if per_second is None else f" ({per_second:.2f} granted)"),
        f"p50={found['50'] / 1e6:.3f} ms" if found else "no answers",
    ]
    if objective is not None:
        words.append(f"{printable(objective.text)}: {' '.join(judged(objective, run))}")
    if run.failed():
        words.append(faults(run))
    if run.violations == []:
        words.append("verified")
    at = "" if is_one or run.rate_wanted is None else f" at {rate(run.rate_wanted)}"
    return f"{printable(run.label)}{at}: {', '.join(words)}"


def _facts(run: Run) -> Table:
    table = Table.grid(padding=(0, 2))
    wanted = "" if run.rate_wanted is None else f" of {rate(run.rate_wanted)} wanted"
    table.add_row("throughput", Text(f"{digits(run.rate)} requests/s{wanted}", "bold"))
    if text := granted(run):
        table.add_row("", text)
    table.add_row("requests", f"{count(run.requests)} answered in {run.seconds:,.2f} s")
    if (run.service is not None and run.rate_wanted is not None) or run.late:
        table.add_row("late", f"{count(run.late)} sent over 1 ms after their intended start")
    if run.unsent:
        table.add_row("unsent", Text(f"{count(run.unsent)} were due but never sent", BAD))
    if run.outcomes:
        table.add_row("outcomes", Text(by_kind(run.outcomes)))
    table.add_row("errors", Text(by_kind(run.errors), BAD) if run.errors else "none")
    for text in run.evidence:
        table.add_row("", Text(printable(text), BAD))
    if run.errors and not run.requests:
        doubt = dialect_of(run).doubt.format(protocol=printable(run.options.get("protocol", "this")))
        table.add_row("", Text(f"nothing was answered: {doubt}", BAD))
    table.add_row("load CPU", cpu(run))
    table.add_row("server", server_use(run))
    for number, text in enumerate(fairness(run)):
        table.add_row("" if number else "fairness", text)
    if run.violations == []:
        table.add_row("verified", Text(verified(run), GOOD))
    for number, violation in enumerate(run.violations or ()):
        table.add_row("" if number else Text("violations", BAD), Text(printable(violation), BAD))
    return table


def dialect_of(run: Run) -> Dialect | type[Dialect]:
    """Returns the dialect of a run's protocol.

    If the protocol is not installed, returns the class with its defaults.
    """
    return DIALECTS.get(run.options.get("protocol", ""), Dialect)


def verified(run: Run) -> str:
    """Returns the promises that --verify has found to be kept."""
    return dialect_of(run).kept


def cpu(run: Run) -> str:
    """Formats the CPU use of the load itself.

    If the load uses nearly one core for each process, the load limits the throughput.
    """
    if not run.requests:
        return f"{digits(run.cpu_seconds)} s"
    cores = run.cpu_seconds / run.seconds if run.seconds else 0.0
    return f"{duration(run.cpu_seconds * 1e9 / run.requests)} a request, {digits(cores)} cores"


def server_use(run: Run) -> str:
    """Formats the CPU and memory of the server, if they are known."""
    if run.server.unknown:
        return f"CPU and memory are not known: {printable(run.server.unknown)}"
    return f"{digits(run.server.cores)} cores, {run.server.memory / 2**20:,.1f} MiB of memory"


def fairness(run: Run) -> list[str]:
    """Describes how differently the connections and the fairness keys were served, as far as this is known."""
    found = []
    if run.grants is not None:
        found.append(_spread_of(run.grants))
    if run.shares is not None:
        of = "keys, each by its weight" if run.shares.of == "keys" else printable(run.shares.of)
        found.append(f"Jain's index {run.shares.jain:.4f} over the {of}")
    if run.shares is not None and run.shares.grants:
        shown = [count(number) for number in run.shares.grants[:KEYS_SHOWN]]
        more = len(run.shares.grants) - len(shown)
        found.append(f"granted to each key: {', '.join(shown)}{f' and {more} more' if more else ''}")
    return found


def _spread_of(grants: Grants) -> str:
    least, median, most = grants.least, grants.median, grants.most
    times = "some got none" if not least else f"{digits(most / least)} times as many"
    return f"a connection was granted {count(least)} to {count(most)}, median {count(median)}: {times}"


def _times_table(run: Run) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column()
    for name in NAMES:
        table.add_column(percentile_name(name), justify="right", no_wrap=True)
    for times in all_times(run):
        table.add_row(times.name, *time_cells(percentiles(times.values), NAMES))
    return table


def time_cells(found: dict[str, int], names: Sequence[str]) -> list[str]:
    return [duration(found[name]) if found else "-" for name in names]


def _meanings(run: Run) -> list[Text]:
    return [Text(f"{times.name}: {times.meaning}", SOFT) for times in all_times(run)]


def _runs_table(report: Report) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    named = len({run.label for run in report.runs}) > 1
    unlimited = "-" if report.search is None or report.repeats() else "no limit"
    if named:
        table.add_column("run", overflow="fold")
    objective = objective_of(report)
    names = ROW_NAMES if objective is None else ("50", "max")
    titles = [percentile_name(name) for name in names]
    if objective is not None:
        titles[1:1] = [objective.of, "goal"]
    for name in ("wanted/s", "reached/s", *titles, "late", "errors"):
        table.add_column(name, justify="right", no_wrap=True)
    for run in report.runs:
        times = time_cells(percentiles(run.latency), names)
        if objective is not None:
            times[1:1] = judged(objective, run)
        table.add_row(
            *([Text(printable(run.label))] if named else []),
            unlimited if run.rate_wanted is None else digits(run.rate_wanted),
            digits(run.rate),
            *times,
            count(run.late),
            count(sum(run.errors.values())),
            style=BAD if run.failed() else None,
        )
    return table


def _faults_of(report: Report) -> list[Text]:
    """Makes a red line, with details, for each run that has faults."""
    lines = []
    for run in report.runs:
        if run.failed():
            lines.append(Text(f"{run_name(report, run)}: {faults(run)}", BAD))
        lines += [Text(f"  {printable(text)}", BAD) for text in details(run)]
    if report.runs and all(run.violations == [] for run in report.runs):
        lines.append(Text(f"verified: {verified(report.runs[0])}", GOOD))
    return lines


# ---- files ----------------------------------------------------------------------------------------------------------


def write_csv(report: Report, path: Path) -> None:
    """Writes a row for each run. If a run does not have a figure, the cell is empty."""
    rows = [_csv_row(run) for run in report.runs]
    with path.open("w", encoding="utf-8", newline="", errors="backslashreplace") as file:
        writer = csv.writer(file)
        writer.writerow(CSV_COLUMNS)
        writer.writerows([[row.get(column, "") for column in CSV_COLUMNS] for row in rows])


def _csv_column(key: str, name: str) -> str:
    """Makes the name of a column, such as latency_p99_9_us.

    The name has no point, which databases would misunderstand.
    """
    return f"{key}_{percentile_name(name).replace('.', '_')}_us"


CSV_COLUMNS = (
    *("label", "started", "rate_wanted_per_second", "requests_per_second", "requests", "seconds", "late", "unsent"),
    *("errors", "errors_by_kind", "outcomes", "violations", "cpu_seconds", "server_cores", "server_memory_bytes"),
    *("grants_least", "grants_median", "grants_most"),
    *(_csv_column(key, name) for key in ("latency", "service", "give_back") for name in NAMES),
    "jain",
    *(_csv_column("queue", name) for name in NAMES),
)


def _csv_row(run: Run) -> dict[str, Any]:
    return {
        "label": run.label,
        "started": run.started,
        "rate_wanted_per_second": "" if run.rate_wanted is None else run.rate_wanted,
        "requests_per_second": f"{run.rate:.3f}",
        "requests": run.requests,
        "seconds": f"{run.seconds:.6f}",
        "late": run.late,
        "unsent": run.unsent,
        "errors": sum(run.errors.values()),
        "errors_by_kind": ";".join(f"{kind}={number}" for kind, number in run.errors.items()),
        "outcomes": ";".join(f"{kind}={number}" for kind, number in run.outcomes.items()),
        "violations": "" if run.violations is None else len(run.violations),
        "cpu_seconds": f"{run.cpu_seconds:.6f}",
        "server_cores": "" if run.server.unknown else f"{run.server.cores:.3f}",
        "server_memory_bytes": "" if run.server.unknown else run.server.memory,
        **({f"grants_{name}": number for name, number in asdict(run.grants).items()} if run.grants else {}),
        "jain": "" if run.shares is None else f"{run.shares.jain:.6f}",
        **{
            _csv_column(times.key, name): f"{value / 1000:.3f}"
            for times in all_times(run)
            for name, value in percentiles(times.values).items()
        },
    }


def write_hgrm(report: Report, path: Path) -> None:
    """Writes percentiles in microseconds. Several runs have one file each: PATH with -1, -2, ... before the suffix."""
    for number, run in enumerate(report.runs, 1):
        own = path if len(report.runs) == 1 else path.with_name(f"{path.stem}-{number}{path.suffix}")
        own.write_text(_hgrm(run.latency), "utf-8")


def _hgrm(values: HdrHistogram) -> str:
    """Formats a percentile file.

    The library's own writer is not used, because it scales the mean but not the deviation.
    """
    lines = [f"{'Value':>12} {'Percentile':>14} {'TotalCount':>10} {'1/(1-Percentile)':>14}", ""]
    for step in values.get_percentile_iterator(TICKS_PER_HALF) if values.get_total_count() else ():
        part = step.percentile_level_iterated_to / 100
        line = f"{step.value_iterated_to / 1000:12.3f} {part:2.12f} {step.total_count_to_this_value:10d}"
        lines.append(f"{line} {1 / (1 - part):14.2f}" if part < 1 else line)
    mean, deviation, highest = (
        figure / 1000 for figure in (values.get_mean_value(), values.get_stddev(), values.get_max_value())
    )
    lines += [
        f"#[Mean    = {mean:12.3f}, StdDeviation   = {deviation:12.3f}]",
        f"#[Max     = {highest:12.3f}, Total count    = {values.get_total_count():12d}]",
        f"#[Buckets = {values.bucket_count:12d}, SubBuckets     = {values.sub_bucket_count:12d}]",
    ]
    return "\n".join(lines) + "\n"
