"""What a run leaves behind, and the file that it is kept in.

A side, pure Python. Times are in nanoseconds where the name does not say otherwise. A histogram is an HdrHistogram of
nanoseconds, 3 significant digits up to an hour, and is kept in files in that library's own compressed form.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hdrh.histogram import HdrHistogram

FORMAT = "counterbench 1"
HIGHEST_NS = 3_600_000_000_000
DIGITS = 3
PERCENTILES = (50.0, 90.0, 99.0, 99.9, 99.99)


class ResultError(Exception):
    """A file that is no result; the text names the file and what is wrong with it."""


def histogram() -> HdrHistogram:
    """An empty one."""
    return HdrHistogram(1, HIGHEST_NS, DIGITS)


@dataclass
class Moment:
    """One second (the last may be shorter) of the measured time."""

    end: float  # seconds since the measured time began
    seconds: float
    requests: int  # answered
    errors: int
    percentiles: dict[str, int]  # "50", "99", "max" of the latency, of what was answered; empty if nothing was


@dataclass
class Run:
    """One run. `latency` is what a user sees: from the intended start in an open loop, from the sending in a closed one.
    """

    label: str
    options: dict[str, Any]
    started: str  # ISO 8601, UTC
    seconds: float  # measured, up to the last answer
    requests: int  # answered in that time
    outcomes: dict[str, int]  # of those: granted, refused, not held, ...
    errors: dict[str, int]  # by kind; empty = none
    latency: HdrHistogram
    evidence: list[str] = field(default_factory=list)  # of wrong answers and errors: the first
    service: HdrHistogram | None = None  # open loop: from the sending
    give_back: HdrHistogram | None = None  # churn: from the killing until the permits were back
    rate_wanted: float | None = None  # open loop
    late: int = 0  # open loop: requests sent over a millisecond after their intended start
    unsent: int = 0  # open loop: requests that were due and never sent
    cpu_seconds: float = 0.0  # of the load processes, in the measured time
    series: list[Moment] = field(default_factory=list)
    violations: list[str] | None = None  # None = nobody looked (no --verify)

    @property
    def rate(self) -> float:
        """Requests answered a second."""
        return self.requests / self.seconds if self.seconds else 0.0

    def failed(self) -> bool:
        """Whether anything happened that makes its figures mean less than they say."""
        return bool(self.errors or self.unsent or self.violations)


@dataclass
class Report:
    """What one call of the command found: one run, or those of a search."""

    runs: list[Run]
    machine: dict[str, str]  # cpu, cores, memory, kernel
    versions: dict[str, str]  # counterd, python, server
    search: dict[str, Any] | None = None  # {"objective": "p99<1ms", "rate": 120000.0 or None} or {"scan": "..."}


def save(report: Report, path: Path) -> None:
    """Writes the whole of it as JSON."""
    document = {"format": FORMAT, **dataclasses.asdict(dataclasses.replace(report, runs=[]))}
    document["runs"] = [_encode(run) for run in report.runs]
    path.write_text(json.dumps(document, indent=1) + "\n", "utf-8")


def load(path: Path) -> Report:
    """Reads what save() wrote. Raises ResultError."""
    try:
        document = json.loads(path.read_text("utf-8"))
    except OSError as error:
        raise ResultError(f"{path}: {error.strerror}") from None
    except ValueError as error:
        raise ResultError(f"{path}: not JSON: {error}") from None
    found = document.pop("format", None) if isinstance(document, dict) else None
    if found != FORMAT:
        raise ResultError(f"{path}: not a result of counterbench (its format is {found!r}, not {FORMAT!r})")
    try:
        return Report(runs=[_decode(run) for run in document.pop("runs")], **document)
    except (KeyError, TypeError, ValueError) as error:
        raise ResultError(f"{path}: not a whole result: {error!r}") from None


def _encode(run: Run) -> dict[str, Any]:
    fields = {name: getattr(run, name) for name in (each.name for each in dataclasses.fields(run))}
    for name, value in fields.items():
        if isinstance(value, HdrHistogram):
            fields[name] = value.encode().decode("ascii")
    fields["series"] = [dataclasses.asdict(moment) for moment in run.series]
    return {**fields, "rate": run.rate, "percentiles": percentiles(run.latency)}


def _decode(fields: dict[str, Any]) -> Run:
    del fields["rate"], fields["percentiles"]  # for people and other tools; they follow from the rest
    for name in ("latency", "service", "give_back"):
        if fields[name] is not None:
            fields[name] = HdrHistogram.decode(fields[name])
    fields["series"] = [Moment(**moment) for moment in fields["series"]]
    return Run(**fields)


def percentiles(values: HdrHistogram) -> dict[str, int]:
    """PERCENTILES and max, as the tables show them; empty if nothing was recorded."""
    if not values.get_total_count():
        return {}
    shown = {f"{percent:g}": int(values.get_value_at_percentile(percent)) for percent in PERCENTILES}
    return {**shown, "max": int(values.get_max_value())}
