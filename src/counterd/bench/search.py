"""Searches. A search consists of several runs.

Floor 5 (ARCHITECTURE.md), pure Python. A search finds the highest rate that meets an objective, or shows the
latency at several rates, or the variation of equal runs.
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

PRECISION = 0.02  # relative precision of the rate that is found
TRIALS_MAX = 24
TRIES = 2  # runs at a rate: if only one of them misses the objective, another program was busy then
REACHED = 0.99  # the fraction of the wanted rate below which the server, or the load, does not keep up
RATES_MAX = 1000
SECONDS_MIN = 1.0  # the shortest trial, if the length of the first run is given as a number of requests


@dataclass(frozen=True)
class Objective:
    """An upper limit for the latency."""

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
        """Returns the name of the figure that the objective limits: p99 or max."""
        return "max" if self.percentile == 100 else f"p{self.percentile:g}"

    def is_met(self, run: Run) -> bool:
        """Returns whether a run meets the objective. The run must have reached its rate, without errors."""
        reached = run.rate_wanted is None or run.rate >= REACHED * run.rate_wanted
        return not run.failed() and reached and run.requests > 0 and self.value_of(run) < self.bound_ns

    def value_of(self, run: Run) -> int:
        """Returns the figure of a run that the objective limits, in nanoseconds."""
        return int(run.latency.get_value_at_percentile(self.percentile))


class Ended(Exception):
    """Raised by a runner if no more runs are possible. The text says why. run: the run that was cut short, or None."""

    def __init__(self, why: str, run: Run | None = None) -> None:
        super().__init__(why)
        self.run = run


@dataclass
class Found:
    """The result of a search."""

    runs: list[Run] = field(default_factory=list)
    best: float | None = None  # the highest rate that met the objective, or None
    ended: str | None = None  # why the search ended early, or None. Then the last run may have been cut short

    def contrary(self, objective: Objective) -> int:
        """Returns how many runs missed the objective at the best rate or below.

        If there are many, the rate is not reliable.
        """
        best = self.best or 0.0
        return sum((run.rate_wanted or math.inf) <= best and not objective.is_met(run) for run in self.runs)

    def end(self, early: Ended) -> Found:
        self.ended = str(early)
        if early.run is not None:
            self.runs.append(early.run)
        return self


def find_max(plan: Plan, objective: Objective, runner: Runner) -> Found:
    """Finds the highest rate that meets the objective.

    A closed loop first finds the server's maximum rate. Then the interval of possible rates is halved until it is
    narrow enough. At the end, the lowest rate that missed the objective is tried again, some runs after the miss. If
    this rate meets the objective now, another program was busy during the miss. Then all misses are forgotten, and the
    halving continues.
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
    """Makes the same run several times."""
    found = Found()
    try:
        for _ in range(times):
            found.runs.append(runner(plan))
    except Ended as early:
        return found.end(early)
    return found


def read_scan(text: str) -> list[float]:
    """Returns the rates of FROM:TO:STEP, including both ends."""
    try:
        start, stop, step = map(number, text.split(":"))
    except ValueError:
        raise ValueError(f"expected FROM:TO:STEP, such as 10k:200k:10k, not {text!r}") from None
    if not 0 < start <= stop or step <= 0 or (stop - start) / step > RATES_MAX:
        raise ValueError(f"expected a scan with rising rates, in at most {RATES_MAX} steps, not {text!r}")
    return [start + step * i for i in range(int((stop - start) / step + 1e-9) + 1)]


def scan(plan: Plan, rates: list[float], runner: Runner) -> Found:
    """Makes a run at each of these rates."""
    found = Found()
    try:
        for rate in rates:
            found.runs.append(runner(dataclasses.replace(plan, rate=rate)))
    except Ended as early:
        return found.end(early)
    return found
