"""Searches for the highest rate, against a server that is a formula."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import pytest

from counterd.bench.plan import Plan
from counterd.bench.result import Run, histogram
from counterd.bench.search import PRECISION, TRIALS_MAX, Ended, Objective, find_max, read_scan, repeat, scan

if TYPE_CHECKING:
    from collections.abc import Callable

PEAK = 100_000.0
P99 = Objective.read("p99<1ms")


def run_of(plan: Plan, latency_ns: float, **options: Any) -> Run:
    latency = histogram()
    rate = min(plan.rate or PEAK, PEAK)
    requests = int(rate * 10)
    latency.record_value(latency_ns, requests)
    fields = {"unsent": 0, "errors": {}, "requests": requests, **options}
    return Run(label="", options={}, started="", seconds=10.0, outcomes={}, latency=latency, rate_wanted=plan.rate,
               **fields)  # fmt: skip


class Server:
    """A server whose latency is `slow` ns above a rate, and 1 us below. Records the plans."""

    def __init__(self, limit: float, slow: float = 5e6, noise: Callable[[float], float] = lambda rate: rate) -> None:
        self.limit, self.slow, self.noise = limit, slow, noise
        self.plans: list[Plan] = []

    def __call__(self, plan: Plan) -> Run:
        self.plans.append(plan)
        return run_of(plan, self.slow if self.noise(plan.rate or PEAK) > self.limit else 1e3)


@pytest.mark.parametrize("limit", [1_000, 20_000, 50_000, 79_999, 80_000, 80_001, 97_000])
def test_the_highest_rate_is_found(limit: float) -> None:
    server = Server(limit)
    found = find_max(Plan(), P99, server)
    runs, best = found.runs, found.best
    assert best is not None
    assert limit * (1 - 2 * PRECISION) <= best <= limit
    assert len(runs) == len(server.plans) <= TRIALS_MAX + 1
    assert server.plans[0].rate is None
    assert all(plan.rate is not None for plan in server.plans[1:])
    assert [run.rate_wanted for run in runs] == [plan.rate for plan in server.plans]


def test_every_rate_meets_the_objective() -> None:
    best = find_max(Plan(), P99, Server(1e9)).best
    assert best is not None
    assert PEAK * (1 - 2 * PRECISION) <= best <= PEAK


def test_a_miss_counts_only_if_it_is_repeated() -> None:
    """Each rate is slow the first time that it is tried."""
    seen: set[float] = set()

    def noise(rate: float) -> float:
        first = rate not in seen
        seen.add(rate)
        return 1e9 if first else rate

    best = find_max(Plan(), P99, Server(50_000, noise=noise)).best
    assert best is not None
    assert 50_000 * (1 - 2 * PRECISION) <= best <= 50_000


@pytest.mark.parametrize("busy", [range(1, 3), range(1, 5), range(1, 7), range(3, 7)])
def test_slow_runs_during_a_busy_period_do_not_decide(busy: range) -> None:
    """All runs of a period are slow, at whatever rate."""
    server = Server(60_000)

    def noisy(plan: Plan) -> Run:
        done = server(plan)
        return run_of(plan, 5e6) if len(server.plans) - 1 in busy else done

    found = find_max(Plan(), P99, noisy)
    assert found.best is not None
    assert 60_000 * (1 - 2 * PRECISION) <= found.best <= 60_000
    assert len(found.runs) <= TRIALS_MAX + 1
    missed = sum((run.rate_wanted or PEAK) <= found.best for run in found.runs if not P99.is_met(run))
    assert found.contrary(P99) == missed


def test_no_rate_meets_the_objective() -> None:
    found = find_max(Plan(), P99, Server(0))
    assert found.best is None
    assert found.ended is None
    assert len(found.runs) == TRIALS_MAX + 1


def test_a_search_ends_if_the_server_answers_nothing() -> None:
    found = find_max(Plan(), P99, lambda plan: run_of(plan, 1e3, requests=0))
    assert (len(found.runs), found.best) == (1, None)


@pytest.mark.parametrize("seed", range(20))
def test_with_noise_the_found_rate_met_the_objective_in_a_run(seed: int) -> None:
    draw = random.Random(seed)
    server = Server(50_000, noise=lambda rate: rate * draw.uniform(0.9, 1.1))
    found = find_max(Plan(), P99, server)
    runs, best = found.runs, found.best
    assert best is not None
    assert best < 56_000
    assert any(run.rate_wanted == best and P99.is_met(run) for run in runs)
    assert len(runs) <= TRIALS_MAX + 1


class Ending(Server):
    """A search that is interrupted after the first few runs; the next run is cut short where `cut` says so."""

    def __init__(self, runs: int, *, cut: bool) -> None:
        super().__init__(50_000)
        self.left, self.cut = runs, cut

    def __call__(self, plan: Plan) -> Run:
        done = super().__call__(plan)
        if not self.left:
            raise Ended("no more", done if self.cut else None)
        self.left -= 1
        return done


@pytest.mark.parametrize("cut", [True, False])
@pytest.mark.parametrize("runs", [0, 1, 4])
def test_results_are_kept_if_a_run_cannot_be_made(runs: int, cut: bool) -> None:
    found = find_max(Plan(), P99, Ending(runs, cut=cut))
    assert found.ended == "no more"
    assert len(found.runs) == runs + cut
    assert found.best == (40_000 if runs == 4 else None), "100,000 at most, 80,000 twice too much, 40,000 met it"
    found = scan(Plan(), [1.0, 2.0, 3.0, 4.0, 5.0], Ending(runs, cut=cut))
    assert [run.rate_wanted for run in found.runs] == [1.0, 2.0, 3.0, 4.0, 5.0][: runs + cut]
    assert found.ended == "no more"


def test_a_plan_can_be_repeated() -> None:
    server = Server(50_000)
    found = repeat(Plan(connections=7), 3, server)
    assert (len(found.runs), found.ended, {plan.connections for plan in server.plans}) == (3, None, {7})
    early = repeat(Plan(), 3, Ending(1, cut=True))
    assert (len(early.runs), early.ended) == (2, "no more")


def test_an_interrupted_run_does_not_meet_the_objective() -> None:
    assert find_max(Plan(), P99, Ending(3, cut=True)).best is None, "it would have, at 40,000"


def test_a_number_of_requests_is_for_the_first_run_only() -> None:
    server = Server(50_000)
    find_max(Plan(requests=1000, duration=None), P99, server)
    assert [plan.requests for plan in server.plans[:3]] == [1000, None, None]
    assert [plan.duration for plan in server.plans[:3]] == [None, 10.0, 10.0]


def test_objectives_are_read() -> None:
    assert (P99.percentile, P99.bound_ns) == (99.0, 1e6)
    assert (Objective.read("max < 20ms").percentile, Objective.read("p99.9<7us").bound_ns) == (100.0, 7e3)
    assert [Objective.read(text).of for text in ("max<1s", "p99.9<1s", "p100<1s")] == ["max", "p99.9", "max"]
    for text in ("", "p99", "p99<", "p0<1ms", "p101<1ms", "p99>1ms", "p99<1", "p99<1m", "avg<1ms", "p99<1..5ms"):
        with pytest.raises(ValueError, match="expected"):
            Objective.read(text)


def test_when_an_objective_is_met() -> None:
    plan = Plan(rate=1000.0)
    assert P99.is_met(run_of(plan, 0.9e6))
    assert not P99.is_met(run_of(plan, 1.1e6))
    for fault in (
        {"errors": {"unanswered": 1}},
        {"unsent": 1},
        {"violations": ["x"]},
        {"requests": 9_800},
        {"requests": 0},
    ):
        assert not P99.is_met(run_of(plan, 0.9e6, **fault)), fault
    assert P99.is_met(run_of(plan, 0.9e6, requests=9_950)), "close enough to the rate wanted"


def test_scans_are_read() -> None:
    assert read_scan("10k:50k:20k") == [10_000, 30_000, 50_000]
    assert read_scan("1:2:5") == [1]
    assert len(read_scan("0.1:1:0.1")) == 10
    for text in ("", "1:2", "2:1:1", "0:5:1", "1:5:0", "1:1m:1", "a:b:c"):
        with pytest.raises(ValueError, match=r"expected|goes up"):
            read_scan(text)
    server = Server(0)
    assert [run.rate_wanted for run in scan(Plan(), [1.0, 5.0], server).runs] == [1.0, 5.0]
