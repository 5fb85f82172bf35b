"""counterd beside its peers: every scenario against every server in turn, in one run.

    python benchmarks/peers/compare.py [--rounds 15] [--seconds 0.5] [--only TEXT] [--smoke] [--out DIRECTORY]

The servers are pinned to one core and the load to another. Each round loads all servers once, in an order that turns
with the rounds; a figure is the median of the rounds, a ratio the median of the rounds' ratios: what both have in
common, the machine's mood among it, falls out. Scenarios are in scenarios.json, promises in promises.json.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import statistics
import subprocess
import sys
import time
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from rich.console import Console

from counterd.bench.plan import Plan, Work
from counterd.bench.result import percentiles
from counterd.bench.run import run
from counterd.cli.bench import machine, versions
from peers import edges, render, servers

if TYPE_CHECKING:
    from collections.abc import Callable

    from counterd.bench.run import Progress
    from peers.servers import Server

HERE = Path(__file__).parent
RESULTS = HERE.parent / "results"
WARMUP_S = 0.2
PEAK_S = 1.0  # to find the peak whose half an open loop asks for
SMOKE_COUNT = 1000

Figures = dict[str, float]
Rounds = dict[str, list[Figures]]  # by server


class Meter:
    """CPU and requests of a server between the first and the last look at a run that goes on."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._looks: list[tuple[int, int]] = []

    def __call__(self, progress: Progress) -> None:
        if progress.stage == "measuring":
            self._looks.append((progress.requests, self._server.cpu_ns()))

    def cpu_us(self) -> float:
        """Microseconds a request."""
        (first, before), (last, after) = self._looks[0], self._looks[-1]
        return (after - before) / max(1, last - first) / 1000


def load(server: Server, plan: Plan) -> Figures:
    """One run: the rate, the latency, and what both sides paid a request."""
    meter = Meter(server)
    result = run(dataclasses.replace(plan, protocol=server.protocol, port=server.port), watch=meter)
    refused = {name: count for name, count in result.outcomes.items() if name not in ("granted", "released")}
    if result.errors or refused or not result.requests:
        raise RuntimeError(f"{server.name}: {result.errors or refused or 'no answer'} {result.evidence}")
    shown = percentiles(result.latency)
    return {
        "requests/s": result.rate,
        "server CPU us": meter.cpu_us(),
        "load CPU us": result.cpu_seconds / max(1, result.requests) * 1e6,
        "p50 ms": shown["50"] / 1e6,
        "p99 ms": shown["99"] / 1e6,
        "p99.9 ms": shown["99.9"] / 1e6,
        "unsent": result.unsent,
    }


def make_plan(scenario: dict[str, Any], seconds: float) -> Plan:
    options = dict(scenario["plan"])
    options["work"] = Work.read(options.get("work", "acquire-release"))
    return Plan(**options, duration=None if "requests" in options else seconds, warmup=WARMUP_S)


def play(
    scenario: dict[str, Any], running: dict[str, Server], rounds: int, seconds: float, show: Callable[[str], None]
) -> Rounds:
    """All rounds of a scenario; before them, every name is made to exist."""
    measure: Callable[[Server, int], Figures]
    if scenario["kind"] in ("load", "open"):
        plan = make_plan(scenario, seconds)
        for server in running.values():
            load(server, dataclasses.replace(plan, prefill=True, rate=None, duration=WARMUP_S))
        if scenario["kind"] == "open":
            fast = dataclasses.replace(plan, duration=PEAK_S)
            plan = dataclasses.replace(plan, rate=min(load(each, fast)["requests/s"] for each in running.values()) / 2)

        def measure(server: Server, number: int) -> Figures:
            return load(server, dataclasses.replace(plan, seed=number + 1))
    else:

        def measure(server: Server, number: int) -> Figures:
            return getattr(edges, scenario["kind"])(server, scenario["count"])

    results: Rounds = {name: [] for name in running}
    names = list(running)
    for number in range(rounds):
        for name in names[number % len(names) :] + names[: number % len(names)]:
            show(f"{scenario['name']}: round {number + 1} of {rounds}, {name}")
            results[name].append(measure(running[name], number))
    return results


def start(names: list[str], core: int, rounds: int) -> Rounds:
    """From the start of the process until it takes connections, and its memory then."""
    results: Rounds = {name: [] for name in names}
    for _ in range(rounds):
        for name in names:
            before = time.perf_counter()
            with servers.STARTS[name](core) as server:
                elapsed = time.perf_counter() - before
                results[name].append({"seconds": elapsed, "resident MB": server.resident() / 1e6})
    return results


def medians(results: Rounds) -> dict[str, Figures]:
    return {
        name: {figure: statistics.median(each[figure] for each in rounds) for figure in rounds[0]}
        for name, rounds in results.items()
    }


def commit() -> str:
    command = ["git", "-C", HERE, "describe", "--always", "--dirty"]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    return found.stdout.strip() or "unknown"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15, help="short and many: a busy neighbour spoils some, not all")
    parser.add_argument("--seconds", type=float, default=0.5, help="of each round")
    parser.add_argument("--only", default="", help="only scenarios whose names contain this")
    parser.add_argument("--smoke", action="store_true", help="tiny counts, whatever comes out: only that it runs")
    parser.add_argument("--out", type=Path, default=RESULTS, help="where the results go")
    options = parser.parse_args()
    if missing := servers.missing():
        sys.exit(f"bench-peers needs {', '.join(missing)}: on Debian, apt-get install {' '.join(missing)}")
    servers.allow_connections()
    core, load_core = servers.two_cores()
    os.sched_setaffinity(0, {load_core})
    scenarios = [each for each in json.loads((HERE / "scenarios.json").read_text()) if options.only in each["name"]]
    console = Console()
    document: dict[str, Any] = {
        "started": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "commit": commit(),
        "machine": machine(),
        "versions": {**versions(), **servers.versions()},
        "cores": {"server": core, "load": load_core},
        "scenarios": [],
    }
    with console.status("starting") as status:
        for scenario in scenarios:
            results = measure(scenario, core, options, status.update)
            document["scenarios"].append({**scenario, "rounds": results, "medians": medians(results)})
            console.print(f"{scenario['name']}: done")
    options.out.mkdir(parents=True, exist_ok=True)
    name = f"{document['started'][:10]}-{document['commit']}"
    (options.out / f"{name}.json").write_text(json.dumps(document, indent=1) + "\n")
    render.write(document, options.out.parent / "RESULTS.md")
    console.print(f"{options.out / name}.json, {options.out.parent / 'RESULTS.md'}")
    sys.exit(0 if options.smoke or render.promises_hold(document) else 1)


def measure(scenario: dict[str, Any], core: int, options: argparse.Namespace, show: Callable[[str], None]) -> Rounds:
    """Starts the servers of a scenario and plays it."""
    rounds = scenario.get("rounds", options.rounds)
    seconds = scenario.get("seconds", options.seconds)
    if options.smoke:
        rounds = 1
        scenario = {**scenario, "count": SMOKE_COUNT}
        if "plan" in scenario:
            scenario["plan"] = {**scenario["plan"], "names": SMOKE_COUNT, "requests": SMOKE_COUNT}
    names = scenario.get("servers", list(servers.STARTS))
    if scenario["kind"] == "start":
        return start(names, core, rounds)
    with contextlib.ExitStack() as stack:
        running = {name: stack.enter_context(servers.STARTS[name](core)) for name in names}
        return play(scenario, running, rounds, seconds, show)


if __name__ == "__main__":
    main()
