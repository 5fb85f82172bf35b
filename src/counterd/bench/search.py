"""Several runs to one end: the highest rate that meets an objective, a curve over rates, or how much runs differ.

A side, pure Python.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from counterd.units import number, seconds

if TYPE_CHECKING:
    from counterd.bench.plan import Plan
    from counterd.bench.result import Run

Runner = Callable[["Plan"], "Run"]

PRECISION = 0.02  # of the rate that is found
TRIALS_MAX = 24
TRIES = 2  # at a rate, one after the other: a miss that only one run saw was a busy neighbour's doing
REACHED = 0.99  # of the rate wanted: less means that the server, or the load, does not keep up
RATES_MAX = 1000
SECONDS_MIN = 1.0  # of a trial, where a number of requests says how long the first run is


@dataclass(frozen=True)
class Objective:
    """A bound on the latency."""

    text: str
    percentile: float  # 100 = the maximum
    bound_ns: float

    @classmethod
    def read(cls, text: str) -> Objective:
        match = re.fullmatch(r"\s*(?:p([0-9]+(?:\.[0-9]+)?)|max)\s*<\s*([0-9.]+[nuµm]?s)\s*", text)
        percentile = float(match[1] or 100) if match else 0.0
        if not match or not 0 < percentile <= 100:
            raise ValueError(f"expected a bound on a percentile, such as 'p99<1ms' or 'max<20ms', not {text!r}")
        return cls(text, percentile, seconds(match[2]) * 1e9)

    @property
    def of(self) -> str:
        """What it is about: p99, max."""
        return "max" if self.percentile == 100 else f"p{self.percentile:g}"

    def is_met(self, run: Run) -> bool:
        """Only by a run that did all that was wanted of it, without errors."""
        reached = run.rate_wanted is None or run.rate >= REACHED * run.rate_wanted
        return not run.failed() and reached and run.requests > 0 and self.value_of(run) < self.bound_ns

    def value_of(self, run: Run) -> int:
        """What the bound is on, in nanoseconds."""
        return int(run.latency.get_value_at_percentile(self.percentile))


class Ended(Exception):
    """What a runner raises when there can be no more runs. The text says why; `run` is what was cut short, if any."""

    def __init__(self, why: str, run: Run | None = None) -> None:
        super().__init__(why)
        self.run = run


@dataclass
class Found:
    """What a search came to."""

    runs: list[Run] = field(default_factory=list)
    best: float | None = None  # the highest rate that met the objective, if any did
    ended: str | None = None  # why, where it ended before its time: the last run may be one that was cut short

    def contrary(self, objective: Objective) -> int:
        """How many runs missed the objective at the best rate or a lower one: the more, the less the rate means."""
        best = self.best or 0.0
        return sum((run.rate_wanted or math.inf) <= best and not objective.is_met(run) for run in self.runs)

    def end(self, early: Ended) -> Found:
        self.ended = str(early)
        if early.run is not None:
            self.runs.append(early.run)
        return self


def find_max(plan: Plan, objective: Objective, runner: Runner) -> Found:
    """The highest rate that meets the objective.

    A closed loop first finds what the server can do at most; then the interval is halved until it is narrow enough. At
    last the lowest rate that missed is tried again, some runs after the miss: if it meets the objective now, something
    else was busy then, all misses are forgotten, and the halving goes on.
    """
    found = Found()
    try:
        _narrow(plan, objective, runner, found)
    except Ended as early:
        return found.end(early)
    return found


def _narrow(plan: Plan, objective: Objective, runner: Runner, found: Found) -> None:
    peak = runner(dataclasses.replace(plan, rate=None))
    found.runs.append(peak)
    low, high = 0.0, peak.rate
    duration = plan.duration if plan.duration is not None else max(peak.seconds, SECONDS_MIN)

    def meets(rate: float) -> bool:
        for _ in range(TRIES):
            trial = runner(dataclasses.replace(plan, rate=rate, requests=None, duration=duration))
            found.runs.append(trial)
            if objective.is_met(trial):
                found.best = rate
                return True
        return False

    while high > 0 and len(found.runs) < TRIALS_MAX:
        if high - low > PRECISION * high:
            rate = (low + high) / 2 if low or len(found.runs) > 1 else 0.8 * high
            low, high = (rate, high) if meets(rate) else (low, rate)
        elif high < peak.rate and meets(high):
            low, high = high, peak.rate
        else:
            return


def repeat(plan: Plan, times: int, runner: Runner) -> Found:
    """The same run so many times."""
    found = Found()
    try:
        for _ in range(times):
            found.runs.append(runner(plan))
    except Ended as early:
        return found.end(early)
    return found


def read_scan(text: str) -> list[float]:
    """The rates of FROM:TO:STEP, both ends included."""
    try:
        start, stop, step = map(number, text.split(":"))
    except ValueError:
        raise ValueError(f"expected FROM:TO:STEP, such as 10k:200k:10k, not {text!r}") from None
    if not 0 < start <= stop or step <= 0 or (stop - start) / step > RATES_MAX:
        raise ValueError(f"a scan goes up, in {RATES_MAX} steps at most: not {text!r}")
    return [start + step * i for i in range(int((stop - start) / step + 1e-9) + 1)]


def scan(plan: Plan, rates: list[float], runner: Runner) -> Found:
    """A run at each of these rates."""
    found = Found()
    try:
        for rate in rates:
            found.runs.append(runner(dataclasses.replace(plan, rate=rate)))
    except Ended as early:
        return found.end(early)
    return found
