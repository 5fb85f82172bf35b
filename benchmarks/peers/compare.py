"""counterd beside its peers: every scenario against every server in turn, in one run.

    python benchmarks/peers/compare.py [--rounds 15] [--seconds 0.5] [--only TEXT] [--smoke] [--out DIRECTORY]

The servers are pinned to one core and the load to another. Each round loads all servers once, in an order that turns
with the rounds; a figure is the median of the rounds, a ratio the median of the rounds' ratios: what both have in
common, the machine's mood among it, falls out. Scenarios are in scenarios.json, promises in promises.json.

A server that fails is left out of the scenario that it fails in, and the page says so. What was measured is written
down after each scenario; Ctrl-C keeps the whole rounds until then. The page is RESULTS.md beside the directory of the
results, or, if only a part was measured, one in it.

Exit status: 0 what was measured keeps its promises, 1 it does not or a server failed, 130 interrupted.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import math
import os
import signal
import statistics
import subprocess
import sys
import time
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from rich.console import Console
from rich.live import Live
from rich.text import Text

from counterd.bench.connection import LoadError
from counterd.bench.plan import Plan, read_work
from counterd.bench.result import percentiles
from counterd.bench.run import run
from counterd.bench.takes import Items, Take
from counterd.cli.bench import machine, versions
from counterd.errors import CounterdError
from peers import clients, edges, keys, queues, render, servers, throttles, tokens, waiting

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from counterd.bench.run import Progress
    from peers.servers import Server

HERE = Path(__file__).parent
RESULTS = HERE.parent / "results"
WARMUP_S = 0.2
PEAK_S = 1.0  # to find the peak whose half an open loop asks for
SMOKE_COUNT = 1000
EXIT_INTERRUPTED = 130
GRANTS = (  # as is asked
    "granted", "released", "read", "updated", "written", "inserted", "reserved", "deleted", "taken", "delayed",
)  # fmt: skip
INTERRUPTS: list[int] = []  # a descriptor that tells of signals, once anybody listens
FAILURES = (RuntimeError, LoadError, CounterdError, OSError)  # of a server; anything else is a mistake of ours

console = Console()

Figures = dict[str, float]
Rounds = dict[str, list[Figures]]  # by server


class Entry:
    """The results of a scenario. show: called with its progress."""

    def __init__(self, scenario: dict[str, Any], show: Callable[[str], object] = lambda _: None) -> None:
        self.scenario = scenario
        self.show = show
        self.rounds: Rounds = {name: [] for name in scenario.get("servers", servers.STARTS)}
        self.failures: dict[str, str] = {}  # by server

    def whole(self) -> Rounds:
        """Returns the rounds that all servers without a failure have completed, because ratios need pairs."""
        kept = {name: rounds for name, rounds in self.rounds.items() if name not in self.failures}
        count = min(map(len, kept.values()), default=0)
        return {name: rounds[:count] for name, rounds in kept.items()} if count else {}

    def document(self) -> dict[str, Any]:
        rounds = self.whole()
        return {**self.scenario, "rounds": rounds, "medians": medians(rounds), "failures": self.failures}


class Meter:
    """Measures a server's CPU time per request between the first and the last progress report of a run."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._looks: list[tuple[int, int]] = []

    def __call__(self, progress: Progress) -> None:
        if progress.stage == "measuring":
            self._looks.append((progress.requests, self._server.cpu_ns()))

    def cpu_us(self) -> float:
        """Returns microseconds per request. NaN, with which no promise holds: the measured time was too short."""
        if not self._looks:
            return math.nan
        (first, before), (last, after) = self._looks[0], self._looks[-1]
        return (after - before) / max(1, last - first) / 1000


def hear_interrupts() -> None:
    """Remembers Ctrl-C and SIGTERM for raise_interrupt(), because run() handles them and returns a partial result."""
    reader, writer = os.pipe()
    for end in (reader, writer):
        os.set_blocking(end, False)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    INTERRUPTS.append(reader)


def raise_interrupt() -> None:
    """Raises KeyboardInterrupt if a signal has arrived."""
    for reader in INTERRUPTS:
        with contextlib.suppress(BlockingIOError):
            os.read(reader, 1)
            raise KeyboardInterrupt


def load(server: Server, plan: Plan) -> Figures:
    """Runs the load once. Returns the rate, the latency and the CPU time per request of both sides."""
    meter = Meter(server)
    work = read_work(server.work) if server.work else plan.work
    where = {"protocol": server.protocol, "port": server.port, "control_port": server.control_port}
    result = run(dataclasses.replace(plan, **where, work=work), watch=meter)
    raise_interrupt()
    refused = {name: count for name, count in result.outcomes.items() if name not in GRANTS}
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
    options["work"] = read_work(options.get("work", "acquire-release"))
    if "take" in options:
        options["take"] = Take(**{**options["take"], "items": Items.read(options["take"]["items"])})
    options.setdefault("duration", None if "requests" in options else seconds)
    return Plan(**options, warmup=WARMUP_S)


@contextlib.contextmanager
def sparing(name: str, failures: dict[str, str]) -> Iterator[None]:
    """Records an exception as the failure of server `name`, so that the other servers continue."""
    try:
        yield
    except FAILURES as error:
        raise_interrupt()  # a signal may have caused the error
        failures[name] = str(error) or type(error).__name__


def play(scenario: dict[str, Any], running: dict[str, Server], rounds: int, seconds: float, entry: Entry) -> None:
    """Plays all rounds of a scenario. Creates all names first if the plan needs them."""
    measure: Callable[[Server, int], Figures]
    if scenario["kind"] in ("load", "open"):
        plan = make_plan(scenario, seconds)
        for name, server in running.items() if plan.fills() else ():
            with sparing(name, entry.failures):
                load(server, dataclasses.replace(plan, prefill=True, rate=None, duration=WARMUP_S))
        if scenario["kind"] == "open":
            plan = dataclasses.replace(plan, rate=lowest_peak(running, plan, entry.failures) / 2)

        def measure(server: Server, number: int) -> Figures:
            return load(server, dataclasses.replace(plan, seed=number + 1))
    else:

        def measure(server: Server, number: int) -> Figures:
            return edge_of(scenario)(server, scenario["count"])

    names = list(running)
    for number in range(rounds):
        for name in names[number % len(names) :] + names[: number % len(names)]:
            if name not in entry.failures:
                entry.show(f"round {number + 1} of {rounds}, {name}")
                with sparing(name, entry.failures):
                    figures = measure(running[name], number)
                    raise_interrupt()
                    entry.rounds[name].append(figures)


def edge_of(scenario: dict[str, Any]) -> Callable[[Server, int], Figures]:
    if scenario["kind"] in clients.KINDS:
        return clients.KINDS[scenario["kind"]]
    protocols = {"counter": waiting, "throttr": keys, "sentinel": tokens, "beanstalk": queues, "smockron": throttles}
    return getattr(protocols.get(scenario.get("protocol", ""), edges), scenario["kind"])


def lowest_peak(running: dict[str, Server], plan: Plan, failures: dict[str, str]) -> float:
    """Returns the requests per second of the slowest server."""
    peaks = []
    for name, server in running.items():
        if name not in failures:
            with sparing(name, failures):
                peaks.append(load(server, dataclasses.replace(plan, duration=PEAK_S))["requests/s"])
    return min(peaks, default=1.0)


def start(names: list[str], core: int, rounds: int, entry: Entry) -> None:
    """From the start of the process until it takes connections, and its memory then."""
    for number in range(rounds):
        for name in names:
            if name not in entry.failures:
                entry.show(f"round {number + 1} of {rounds}, {name}")
                with sparing(name, entry.failures):
                    before = time.perf_counter()
                    with servers.STARTS[name](core) as server:
                        elapsed = time.perf_counter() - before
                        figures = {"seconds": elapsed, "resident MB": server.resident() / 1e6}
                    entry.rounds[name].append(figures)


def medians(results: Rounds) -> dict[str, Figures]:
    return {
        name: {figure: statistics.median(each[figure] for each in rounds) for figure in rounds[0]}
        for name, rounds in results.items()
    }


def commit() -> str:
    command = ["git", "-C", HERE, "describe", "--always", "--dirty"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    except FileNotFoundError:  # no git: it is of no use without a repository either
        found = ""
    return found.strip() or "unknown"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15, help="short and many: a busy neighbour spoils some, not all")
    parser.add_argument("--seconds", type=float, default=0.5, help="of each round")
    parser.add_argument("--only", default="", help="only scenarios whose names contain this, as Python or smockron")
    parser.add_argument("--smoke", action="store_true", help="tiny counts, whatever comes out: only that it runs")
    parser.add_argument("--out", type=Path, default=RESULTS, help="where the results go")
    options = parser.parse_args()
    scenarios = chosen(options.only, smoke=options.smoke)
    if missing := servers.missing(scenarios):
        sys.exit(f"bench-peers needs {', '.join(missing)}: on Debian, apt-get install {' '.join(missing)}")
    servers.allow_connections()
    document = make_document()
    os.sched_setaffinity(0, {document["cores"]["load"]})
    hear_interrupts()
    status = play_all(scenarios, document, options)
    page = write(document, options.out, is_part=bool(status or options.only))
    console.print(f"{json_of(document, options.out)}, {page}")
    if status == 0 and (has_failures(document) or not (options.smoke or render.promises_hold(document))):
        status = 1
    sys.exit(status)


def chosen(only: str, *, smoke: bool) -> list[dict[str, Any]]:
    """Returns the scenarios whose names contain `only`. Exits if there is none."""
    scenarios = [each for each in json.loads((HERE / "scenarios.json").read_text()) if only in each["name"]]
    if smoke:
        scenarios = [each for each in scenarios if each.get("smoke", True)]
    if not scenarios:
        sys.exit(f"bench-peers: no scenario has {only!r} in its name")
    return scenarios


def make_document() -> dict[str, Any]:
    """Returns what is known before anything is measured. Has to run before this process is bound to a core."""
    core, load_core = servers.two_cores()
    return {
        "started": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "commit": commit(),
        "machine": machine(),
        "versions": {**versions(), **servers.versions()},
        "cores": {"server": core, "load": load_core},
        "scenarios": [],
    }


def play_all(scenarios: list[dict[str, Any]], document: dict[str, Any], options: argparse.Namespace) -> int:
    """Puts what comes of each into the document; returns the exit status."""
    # No thread that redraws: it would take the load's core, and processes are forked here.
    with Live(console=console, auto_refresh=False, transient=True) as live:
        for scenario in scenarios:
            entry = Entry(
                scenario,
                lambda text, name=scenario["name"]: live.update(Text(f"{name}: {text}"), refresh=console.is_terminal),
            )
            try:
                measure(scenario, document["cores"]["server"], options, entry)
            except KeyboardInterrupt:
                document["scenarios"] += [entry.document()] if entry.whole() else []
                console.print("interrupted")
                return EXIT_INTERRUPTED
            document["scenarios"].append(entry.document())
            save(document, options.out)
            console.print(f"{scenario['name']}: done")
            for name, text in entry.failures.items():
                console.print(Text(f"  {name} failed: {text}", style="red"))
    return 0


def has_failures(document: dict[str, Any]) -> bool:
    return any(scenario["failures"] for scenario in document["scenarios"])


def json_of(document: dict[str, Any], out: Path) -> Path:
    return out / f"{document['started'][:10]}-{document['commit']}.json"


def save(document: dict[str, Any], out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    json_of(document, out).write_text(json.dumps(document, indent=1) + "\n")


def write(document: dict[str, Any], out: Path, *, is_part: bool) -> Path:
    """Saves the document and its page. The page of a partial comparison does not replace RESULTS.md."""
    save(document, out)
    page = json_of(document, out).with_suffix(".md") if is_part else out.parent / "RESULTS.md"
    render.write(document, page)
    return page


def measure(scenario: dict[str, Any], core: int, options: argparse.Namespace, entry: Entry) -> None:
    """Starts the servers of a scenario and plays it."""
    rounds = scenario.get("rounds", options.rounds)
    seconds = scenario.get("seconds", options.seconds)
    if options.smoke:
        rounds = 1
        scenario = {**scenario, "count": scenario.get("smoke", SMOKE_COUNT)}
        if "plan" in scenario:
            names = {"names": SMOKE_COUNT} if "names" in scenario["plan"] else {}
            scenario["plan"] = {**scenario["plan"], **names, "requests": SMOKE_COUNT}
    names = list(entry.rounds)
    if scenario["kind"] == "start":
        start(names, core, rounds, entry)
        return
    with contextlib.ExitStack() as stack:
        running = {}
        for name in names:
            with sparing(name, entry.failures):
                running[name] = stack.enter_context(servers.starts_of(scenario)[name](core))
        play(scenario, running, rounds, seconds, entry)


if __name__ == "__main__":
    main()
