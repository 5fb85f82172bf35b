"""The result of a run, and the file in which it is kept.

Floor 5 (ARCHITECTURE.md), pure Python. Times are in nanoseconds unless the name has another unit. A histogram is an
HdrHistogram of nanoseconds, with 3 significant digits, up to an hour. Files contain histograms in the compressed form
of the HdrHistogram library.
"""

from __future__ import annotations

import base64
import dataclasses
import json
import struct
import types
import typing
import zlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from hdrh.histogram import HdrHistogram

if TYPE_CHECKING:
    from pathlib import Path

FORMAT = "counterbench 3"
HIGHEST_NS = 3_600_000_000_000
DIGITS = 3
PERCENTILES = (50.0, 90.0, 99.0, 99.9, 99.99)

# The largest number in a file: any sum or quotient of such numbers is finite.
NUMBER_MAX = 2**63
FRACTION_MIN = 1e-9
# The header of a compressed histogram: cookie, length of the counts, offset, digits, lowest, highest, ratio.
HISTOGRAM_HEADER = struct.Struct(">IIIIQQd")
HISTOGRAM_COOKIE = 0x1C849313
# More bytes than a histogram can have: 33,792 counts of at most 9 bytes.
HISTOGRAM_BYTES_MAX = 2**19


class ResultError(Exception):
    """A file is not a valid result. The text names the file and the mistake."""


def histogram() -> HdrHistogram:
    """Makes an empty histogram."""
    return HdrHistogram(1, HIGHEST_NS, DIGITS)


@dataclass
class Moment:
    """One second of the measured time; the last one may be shorter."""

    end: float  # seconds since the measured time began
    seconds: float
    requests: int  # answered
    errors: int
    percentiles: dict[str, int]  # "50", "99", "max" of the latency of answered requests; empty if there are none


@dataclass
class ServerUse:
    """How much CPU and memory the server's processes used in the measured time, if they are on this machine."""

    cores: float = 0.0
    memory: int = 0  # bytes, at the end
    unknown: str = ""  # why the use is not known, or ""


@dataclass
class Grants:
    """How many permits the connections were granted in the measured time: the least, the median and the most."""

    least: int
    median: int
    most: int


@dataclass
class Shares:
    """How fairly permits and units were granted.

    of: "keys" (fairness keys) or "connections". grants: of each key; empty for connections. jain: Jain's index of the
    grants, those of a key divided by its weight: 1 if all have equal shares, 1/n if one of n has got everything.
    """

    of: str
    grants: list[int]
    jain: float


@dataclass
class Run:
    """One run. latency: as a user sees it, from the intended start in an open loop, otherwise from the sending."""

    label: str
    options: dict[str, Any]
    started: str  # ISO 8601, UTC
    seconds: float  # the measured time, up to the last answer
    requests: int  # how many were answered in that time
    outcomes: dict[str, int]  # how many answers were granted, refused, not held, ...
    errors: dict[str, int]  # by kind; empty = none
    latency: HdrHistogram
    evidence: list[str] = field(default_factory=list)  # descriptions of the first wrong answers and errors
    service: HdrHistogram | None = None  # open loop: from the sending; where Takes wait: of the requests that do not
    queue: HdrHistogram | None = None  # of Takes that may wait: from the sending
    give_back: HdrHistogram | None = None  # churn: from the killing until the permits were back
    rate_wanted: float | None = None  # open loop
    late: int = 0  # open loop: requests sent over a millisecond after their intended start
    unsent: int = 0  # open loop: requests that were due and never sent
    cpu_seconds: float = 0.0  # of the load processes, in the measured time
    series: list[Moment] = field(default_factory=list)
    violations: list[str] | None = None  # None: not checked, because --verify was not given
    server: ServerUse = field(default_factory=ServerUse)
    grants: Grants | None = None  # None: there is only one connection, or nothing was granted
    shares: Shares | None = None  # likewise

    @property
    def rate(self) -> float:
        """How many requests were answered in a second."""
        return self.requests / self.seconds if self.seconds else 0.0

    def failed(self) -> bool:
        """Whether something happened that makes the figures unreliable."""
        return bool(self.errors or self.unsent or self.violations)


@dataclass
class Report:
    """The result of one call of the command: one run, or the runs of a search."""

    runs: list[Run]
    machine: dict[str, str]  # cpu, cores, memory, kernel
    versions: dict[str, str]  # counterd, python
    # {"objective": "p99<1ms", "rate": 120000.0 or None, "contrary": runs}, {"scan": "..."} or {"repeat": times};
    # and "ended": why it ended early, if it did
    search: dict[str, Any] | None = None
    command: str = ""  # the command line, quoted for a shell

    def repeats(self) -> bool:
        """Returns whether all runs put the same load on the server."""
        return self.search is not None and "repeat" in self.search


def save(report: Report, path: Path) -> None:
    """Writes a report as JSON."""
    document = {"format": FORMAT, **dataclasses.asdict(dataclasses.replace(report, runs=[]))}
    document["runs"] = [_encode(run) for run in report.runs]
    path.write_text(json.dumps(document, indent=1) + "\n", "utf-8")


def load(path: Path) -> Report:
    """Reads a file that save() has written. Raises ResultError."""
    try:
        document = json.loads(path.read_text("utf-8"))
    except OSError as error:
        raise ResultError(f"{path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise ResultError(f"{path}: not JSON: {error}") from None
    found = document.pop("format", None) if isinstance(document, dict) else None
    if found != FORMAT:
        raise ResultError(f"{path}: not a result of counterbench (its format is {found!r}, not {FORMAT!r})")
    try:
        report = _made(Report, document, "")
    except ValueError as error:
        raise ResultError(f"{path}: not a complete result: {error}") from None
    assert isinstance(report, Report)
    return report


def _encode(run: Run) -> dict[str, Any]:
    fields = {name: getattr(run, name) for name in (each.name for each in dataclasses.fields(run))}
    for name, value in fields.items():
        if isinstance(value, HdrHistogram):
            fields[name] = value.encode().decode("ascii")
        elif dataclasses.is_dataclass(value):
            fields[name] = dataclasses.asdict(value)  # type: ignore[arg-type]
    fields["series"] = [dataclasses.asdict(moment) for moment in run.series]
    return {**fields, "rate": run.rate, "percentiles": percentiles(run.latency)}


def _made(kind: Any, value: Any, where: str) -> Any:
    """Converts a value of a file to the type `kind`. where: the place of the value in the file. Raises ValueError."""
    inner = typing.get_args(kind)
    if kind is Any:
        return value
    if isinstance(kind, types.UnionType):  # with None
        return None if value is None else _made(inner[0], value, where)
    if kind is HdrHistogram:
        return _decoded(value, where)
    if dataclasses.is_dataclass(kind):
        return _made_dataclass(kind, value, where)
    expected = typing.get_origin(kind) or kind
    if expected is float and type(value) is int:
        value = float(min(value, NUMBER_MAX))
    if type(value) is not expected:
        raise ValueError(f"{where} is not of type {expected.__name__}")
    if expected is list:
        value = [_made(inner[0], item, f"{where}[{index}]") for index, item in enumerate(value)]
    elif expected is dict:
        value = {key: _made(inner[1], item, f"{where}.{key}") for key, item in value.items()}
    elif expected in (int, float) and value != 0 and not FRACTION_MIN <= value < NUMBER_MAX:
        raise ValueError(f"{where} is out of range")
    return value


def _made_dataclass(kind: Any, value: Any, where: str) -> Any:
    if not isinstance(value, dict):
        raise ValueError(f"{where} is not an object")
    if kind is Run:  # these members are for people and other tools; they can be computed from the others
        value = {key: item for key, item in value.items() if key not in ("rate", "percentiles")}
    kinds = typing.get_type_hints(kind)
    prefix = f"{where}." if where else ""
    for name in [*kinds, *value]:
        if name not in value or name not in kinds:
            raise ValueError(f"{prefix}{name} is {'unknown' if name in value else 'missing'}")
    return kind(**{name: _made(kinds[name], item, f"{prefix}{name}") for name, item in value.items()})


def _decoded(text: Any, where: str) -> HdrHistogram:
    """Checks and decodes a histogram. The library does not check the size that a histogram claims to have."""
    try:
        packed = base64.b64decode(text, validate=True)[8:]
        unpacker = zlib.decompressobj()
        plain = unpacker.decompress(packed, HISTOGRAM_BYTES_MAX)
        size = len(plain) - HISTOGRAM_HEADER.size
        header = HISTOGRAM_HEADER.pack(HISTOGRAM_COOKIE, max(size, 0), 0, DIGITS, 1, HIGHEST_NS, 1.0)
        if not unpacker.eof or not plain.startswith(header):
            raise ValueError("counterbench has not written it")
        values = HdrHistogram.decode(text)
        if sum(values.counts) != values.total_count:
            raise ValueError("its counts are too large")
    except Exception as error:  # noqa: BLE001 - six kinds of exceptions, of three modules
        raise ValueError(f"{where} is not a valid histogram: {error}") from None
    return values


def percentiles(values: HdrHistogram) -> dict[str, int]:
    """Returns PERCENTILES and max, as the tables show them. Returns an empty dict if nothing was recorded."""
    if not values.get_total_count():
        return {}
    found = values.get_percentile_to_value_dict(PERCENTILES)  # one walk, not one for each
    return {**{f"{percent:g}": int(found[percent]) for percent in PERCENTILES}, "max": int(values.get_max_value())}
