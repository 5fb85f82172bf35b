"""Small, constant runs and reports for the tests that display them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from counterd.bench.result import Grants, Moment, Report, Run, ServerUse, Shares, histogram

if TYPE_CHECKING:
    from hdrh.histogram import HdrHistogram

STARTED = "2025-11-20T08:12:31Z"


def times(*values: int) -> HdrHistogram:
    """A histogram of these latencies."""
    found = histogram()
    for value in values:
        found.record_value(value)
    return found


def run(label: str = "acquire-release", rate: float = 1000.0, middle: int = 143_000, **others: Any) -> Run:
    """A closed-loop run of ten seconds, with 100 different latencies around the given one."""
    moments = [
        Moment(float(second), 1.0, int(rate), 0, {"50": middle, "99": middle * 2, "max": middle * 3})
        for second in range(1, 11)
    ]
    fields: dict[str, Any] = {
        "label": label,
        "options": {"connections": 50},
        "started": STARTED,
        "seconds": 10.0,
        "requests": int(rate * 10),
        "outcomes": {"granted": int(rate * 9), "refused": int(rate)},
        "errors": {},
        "latency": times(*(middle * percent // 50 for percent in range(1, 101))),
        "series": moments,
        **others,
    }
    return Run(**fields)


def report(*runs: Run, **others: Any) -> Report:
    fields: dict[str, Any] = {"command": "counterbench -c 50", **others}
    return Report(list(runs), {"cpu": "any", "cores": "2"}, {"counterd": "0.1.0", "python": "3.11"}, **fields)


def full_run() -> Run:
    """A run with a value in every field."""
    return run(
        service=times(1, 2_000, 3_000_000),
        queue=times(5_000_000),
        give_back=times(900_000),
        rate_wanted=1200.0,
        late=3,
        unsent=4,
        cpu_seconds=1.25,
        errors={"timeout": 5, "connection lost": 6},
        evidence=["connection lost: reset by peer"],
        violations=["counter x: 11 granted of 10"],
        server=ServerUse(cores=0.75, memory=50 << 20),
        grants=Grants(12, 200, 516),
        shares=Shares("keys", [4000, 5000], 0.9878),
    )


def scan() -> Report:
    """A scan over three rates, the last of which failed."""
    runs = [run(rate=rate, rate_wanted=rate, service=times(1000)) for rate in (1000.0, 2000.0)]
    runs.append(run(rate=2100.0, rate_wanted=3000.0, service=times(1000), errors={"timeout": 7}))
    return report(*runs, search={"objective": "p99<1ms", "rate": 2000.0})


def empty_run() -> Run:
    """A run without any answer."""
    return run(requests=0, seconds=0.0, outcomes={}, errors={"refused": 50}, latency=times(), series=[], options={})
