#!/usr/bin/env python3
"""Checks the formal models, docs/model/, with spin: all their states, and that defects are found.

    python tools/model.py [--short]

Each configuration of the model must hold, with every line reached; each defect must be found. --short: only the
smallest of these. Needs spin and gcc. Exit status: 0 if all results are as expected, 1 if not.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import os
import re
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

MODELS = Path(__file__).parents[1] / "docs" / "model"
ENGINE, TAKES, RATES, RESUMPTIONS = "engine.pml", "takes.pml", "rates.pml", "resumptions.pml"
LEASES, LINES = "leases.pml", "lines.pml"
DEPTHS = {True: 100_000, False: 2_500_000}  # more than the search reaches: with a defect, and without one
TABLES = {True: 16, False: 22}  # bits of the hash table, at first
SECONDS = 600
NOT_ALL = "Search not completed"  # because a claim has failed, else because of a lack of memory


@dataclass(frozen=True)
class Run:
    """A run. what: its description. defined: macros for the model. claim: spin's words for what must fail, or "".

    is_eventual: checks liveness under weak fairness in place of the assertions. model: its file.
    """

    what: str
    defined: str
    claim: str = ""
    is_eventual: bool = False
    model: str = ENGINE


@dataclass(frozen=True)
class Found:
    """The result of a run. failed: spin's words for what failed, or "". unreached: lines that no state reached."""

    failed: str
    states: int
    transitions: int
    depth: int
    memory_mb: float
    seconds: float
    unreached: frozenset[str]


TINY = "CONNECTIONS=2"
MANY_NAMES = "CONNECTIONS=2 NAMES=3 RECORDS=2 LIMIT=2 RESOURCES=1"
EVENTUALLY = "CONNECTIONS=2 RECORDS=2 LIMIT=1"
ASSERTED, CYCLE = "assertion violated", "acceptance cycle"
ONE_PERMIT = "FIRST=1 MOST=1"
TWO_PERMITS = "CONNECTIONS=2 MOST=2"
NO_PERMIT = "PERMITS=0"
FEW_TOKENS = "SECRETS=3"
LATE_CALLS = "LEASE=1 MAXIMUM=1 FAILOVERS=0"
NEW_SERVERS = "LEASE=1 MAXIMUM=1 LATE=0"
ONE_DIES = "LEASE=3 MAXIMUM=1 LATE=0 FAILOVERS=1 DEATH=1"
ANSWERED_CALLS = "LOSSES=0"
TWO_MAXIMA = "MAXIMUM=3 LEAST_MAXIMUM=2"
ONE_MAXIMUM = "LOSSES=0 LEAST_MAXIMUM=2"
TWO_SINGLE = "CONNECTIONS=2 FIRST=1 MOST=5"

RUNS = [
    Run("3 clients, 2 counters, a table of 1", "CONNECTIONS=3"),
    Run("2 clients, 3 counters, a table of 2, a ledger of 2", MANY_NAMES),
    Run("3 clients, 2 channels, no ring (throttr)", "CONNECTIONS=3 DROPS_IDLE"),
    Run("2 clients: what they had comes back", EVENTUALLY, is_eventual=True),
    Run("3 clients: what they had comes back", "CONNECTIONS=3 LIMIT=1", is_eventual=True),
    Run("released things stay in the ledger", f"{TINY} DOUBLE_GIVE_BACK", ASSERTED),
    Run("a counter that is held is reclaimed", f"{TINY} RECLAIM_HELD", ASSERTED),
    Run("the limit is compared with a sum, which wraps", f"{TINY} WRAP", ASSERTED),
    Run("a counter enters the ring twice", f"{TINY} PUSH_TWICE", ASSERTED),
    Run("the ledger's end is not looked at", f"{MANY_NAMES} OVERRUN", ASSERTED),
    Run("a number is free before what it held is", f"{TINY} FREE_EARLY", ASSERTED),
    Run("the sweep comes before the leavers", f"{EVENTUALLY} SWEEP_FIRST", CYCLE, is_eventual=True),
    Run("clients that were cut off still count (not promised)", f"{TINY} UNFENCED", ASSERTED),
    Run("2 clients take of 2 counters, and wait", TINY, model=TAKES),
    Run("3 clients wait for one permit", f"CONNECTIONS=3 {ONE_PERMIT}", model=TAKES),
    Run("2 clients wait: what they had comes back", f"{TINY} {ONE_PERMIT}", is_eventual=True, model=TAKES),
    Run("a Take that was granted goes on waiting", f"{TWO_PERMITS} STAYS", ASSERTED, model=TAKES),
    Run("a grant is told, and not booked", f"{TWO_PERMITS} LOSES", ASSERTED, model=TAKES),
    Run("only the item that was short is looked at again", f"{TWO_SINGLE} HALF", ASSERTED, model=TAKES),
    Run("a Cancel that crosses a grant replaces its reply", f"{TWO_PERMITS} CROSSES", ASSERTED, model=TAKES),
    Run("a Take that is cancelled has no reply", f"{TWO_PERMITS} SWALLOWS", ASSERTED, model=TAKES),
    Run("a number is free while it waits", f"{TWO_PERMITS} FORGETS_DEAD", ASSERTED, model=TAKES),
    Run("a release wakes nobody", f"{TWO_PERMITS} SLEEPS_AFTER_RELEASE", ASSERTED, model=TAKES),
    Run("the end of a wait wakes nobody behind it", f"{TWO_PERMITS} SLEEPS_AFTER_CANCEL", ASSERTED, model=TAKES),
    Run("the death of who waits wakes nobody behind it", f"{TWO_PERMITS} SLEEPS_AFTER_DEATH", ASSERTED, model=TAKES),
    Run("2 clients take of a rate and a permit, and settle", TINY, model=RATES),
    Run("3 clients take of a rate of one, and settle", f"CONNECTIONS=3 BURST=1 {NO_PERMIT}", model=RATES),
    Run("2 clients take of a rate: nobody waits for ever", f"{NO_PERMIT} PATIENT", is_eventual=True, model=RATES),
    Run("units are refunded that time has brought back", f"{NO_PERMIT} REFUNDS_VOID", ASSERTED, model=RATES),
    Run("a Settle does not notice that the rate is full", f"{NO_PERMIT} FORGETS_FULL", ASSERTED, model=RATES),
    Run("a grant does not notice that the rate is full", f"{NO_PERMIT} FORGETS_EMPTY", ASSERTED, model=RATES),
    Run("use beyond the charge of a full rate is free", f"{NO_PERMIT} FORGIVES", ASSERTED, model=RATES),
    Run("a charge can be settled twice", f"{NO_PERMIT} TWICE", ASSERTED, model=RATES),
    Run("a death refunds nothing", f"{NO_PERMIT} NO_REFUND", ASSERTED, model=RATES),
    Run("only the item that was short is looked at again", "BURST=1 HALF", ASSERTED, model=RATES),
    Run("a rate is freed although somebody waits", f"{NO_PERMIT} FREES_PINNED", ASSERTED, model=RATES),
    Run("no timer for who waits", f"{NO_PERMIT} UNTIMED", ASSERTED, model=RATES),
    Run("the first that waits is not looked at", f"{NO_PERMIT} SLEEPS_AT_FIRST", ASSERTED, model=RATES),
    Run("a refund wakes nobody", f"{NO_PERMIT} SLEEPS_AFTER_SETTLE", ASSERTED, model=RATES),
    Run("the end of a wait wakes nobody behind it", f"{NO_PERMIT} SLEEPS_AFTER_CANCEL", ASSERTED, model=RATES),
    Run("new Takes pass those that wait", f"{NO_PERMIT} PATIENT PASSES", CYCLE, is_eventual=True, model=RATES),
    Run("a connection that is resumed, up to 5 tokens", "SECRETS=5", model=RESUMPTIONS),
    Run("likewise, 3 connections at once, up to 3 tokens", f"SOCKETS=3 {FEW_TOKENS}", model=RESUMPTIONS),
    Run("likewise: what a dead client had comes back", FEW_TOKENS, is_eventual=True, model=RESUMPTIONS),
    Run("a request that was overtaken takes everything over", f"{FEW_TOKENS} STEALS", ASSERTED, model=RESUMPTIONS),
    Run("a token is valid once, although its reply was lost", f"{FEW_TOKENS} FORGETS", ASSERTED, model=RESUMPTIONS),
    Run("the old connection keeps its number", f"{FEW_TOKENS} SHARES", ASSERTED, model=RESUMPTIONS),
    Run("what is handed over counts for both", f"{FEW_TOKENS} COPIES", ASSERTED, model=RESUMPTIONS),
    Run("nothing stays after the end of a connection", f"{FEW_TOKENS} DROPS", ASSERTED, model=RESUMPTIONS),
    Run("grace times never end", f"{FEW_TOKENS} NEVER_OVER", CYCLE, is_eventual=True, model=RESUMPTIONS),
    Run("2 daemons with leases, calls that come late", LATE_CALLS, model=LEASES),
    Run("2 daemons with leases, servers that fail", "LEASE=2 MAXIMUM=1 LATE=0", model=LEASES),
    Run("2 daemons with leases, 2 permits, servers that fail", "LEASE=1 LATE=0", model=LEASES),
    Run("likewise: what a dead daemon had comes back", ONE_DIES, is_eventual=True, model=LEASES),
    Run("a lease counts from its answer", f"{LATE_CALLS} COUNTS_FROM_ANSWER", ASSERTED, model=LEASES),
    Run("a lease has no margin for a slow clock", f"{LATE_CALLS} NO_MARGIN", ASSERTED, model=LEASES),
    Run("rights are used on after they were given back", f"{LATE_CALLS} GRANTS_ON", ASSERTED, model=LEASES),
    Run("the same name after a lost lease", f"{LATE_CALLS} SAME_NAME", ASSERTED, model=LEASES),
    Run("a call that was overtaken is executed", f"{LATE_CALLS} APPLIES_STALE", ASSERTED, model=LEASES),
    Run("a new server does not recover", f"{NEW_SERVERS} NEVER_RECOVERS", ASSERTED, model=LEASES),
    Run("a server gives rights while it recovers", f"{NEW_SERVERS} GIVES_WHILE_RECOVERING", ASSERTED, model=LEASES),
    Run("a server that recovers believes what it remembers", f"{NEW_SERVERS} BELIEVES_MEMORY", ASSERTED, model=LEASES),
    Run("a server ends leases while it recovers", f"{NEW_SERVERS} ENDS_WHILE_RECOVERING", ASSERTED, model=LEASES),
    Run("a dead daemon is never reaped", f"{ONE_DIES} NEVER_REAPS", CYCLE, is_eventual=True, model=LEASES),
    Run("daemons that are stopped still count (not promised)", f"{LATE_CALLS} UNFENCED", ASSERTED, model=LEASES),
    Run("2 daemons, requests for at most 1 or 2", "LOSSES=1", model=LINES),
    Run("2 daemons, requests for at most 2 or 3", TWO_MAXIMA, model=LINES),
    Run("2 daemons, one maximum: nobody waits for ever", ONE_MAXIMUM, is_eventual=True, model=LINES),
    Run("likewise, 1 or 2: nobody waits for ever", ANSWERED_CALLS, is_eventual=True, model=LINES),
    Run("likewise, 2 or 3: nobody waits for ever", f"{TWO_MAXIMA} LOSSES=0", is_eventual=True, model=LINES),
    Run("another maximum takes no notice of plenty", f"{ANSWERED_CALLS} IGNORES_PLENTY", ASSERTED, model=LINES),
    Run("rights for one request are used for another", f"{ANSWERED_CALLS} KEEPS_EXACT", ASSERTED, model=LINES),
    Run("rights are used while they are given back", f"{ANSWERED_CALLS} GRANTS_ON", ASSERTED, model=LINES),
    Run("rights above a maximum are plenty for it", f"{TWO_MAXIMA} LOSSES=0 EXCEEDS", ASSERTED, model=LINES),
    Run("grants beside a request with another maximum", "UNAWARE", ASSERTED, model=LINES),
    Run("there is no line", f"{ONE_MAXIMUM} NO_LINE", CYCLE, is_eventual=True, model=LINES),
    Run("idle rights are kept while others wait", f"{ONE_MAXIMUM} HOARDS", CYCLE, is_eventual=True, model=LINES),
    Run("a daemon goes on while others wait", f"{ONE_MAXIMUM} GOES_ON", CYCLE, is_eventual=True, model=LINES),
    Run("a smaller maximum goes first", f"{ANSWERED_CALLS} TURNS_PLENTY", CYCLE, is_eventual=True, model=LINES),
]
SHORT = [
    Run("2 clients, 2 counters, a table of 1", TINY),
    *(run for run in RUNS if run.defined.endswith("_HELD")),
    Run("2 clients wait for one permit", f"{TINY} {ONE_PERMIT}", model=TAKES),
    *(run for run in RUNS if run.defined.endswith("AFTER_RELEASE")),
    Run("2 clients take of a rate, and settle", NO_PERMIT, model=RATES),
    *(run for run in RUNS if run.defined.endswith("REFUNDS_VOID")),
    Run("a connection that is resumed, up to 3 tokens", FEW_TOKENS, model=RESUMPTIONS),
    *(run for run in RUNS if run.defined.endswith("STEALS")),
    Run("2 daemons with leases, no late calls", "LEASE=1 MAXIMUM=1 LATE=0 FAILOVERS=1", model=LEASES),
    *(run for run in RUNS if run.defined.endswith("NEVER_RECOVERS")),
    Run("2 daemons, requests for at most 1 or 2, no losses", ANSWERED_CALLS, model=LINES),
    *(run for run in RUNS if run.defined.endswith("KEEPS_EXACT")),
]


def checked(run: Run, directory: Path) -> Found:
    """Generates the verifier with spin, compiles it with gcc, and runs it."""
    directory.mkdir()
    search = ["-DNFAIR=4"] if run.is_eventual else ["-DSAFETY", "-DNOCLAIM"]
    fast = ["-O1"] if run.claim else ["-O2"]  # a defect is found soon, so compiling fast matters more
    for command in (
        ["spin", "-a", *(f"-D{name}" for name in run.defined.split()), MODELS / run.model],
        ["gcc", "-w", *fast, *search, "-o", "pan", "pan.c"],
    ):
        subprocess.run(command, cwd=directory, check=True, stdout=subprocess.DEVNULL, timeout=SECONDS)
    begun = time.monotonic()
    eventual = ["-a", "-f"] if run.is_eventual else []
    told = subprocess.run(
        ["./pan", *eventual, f"-m{DEPTHS[bool(run.claim)]}", f"-w{TABLES[bool(run.claim)]}"],
        cwd=directory, check=True, stdout=subprocess.PIPE, text=True, timeout=SECONDS,
    ).stdout  # fmt: skip
    if "errors: " not in told or "max search depth too small" in told or (not run.claim and NOT_ALL in told):
        raise RuntimeError(f"{run.what}: not searched to the end: {told}")

    def number(pattern: str) -> float:
        return float(re.search(pattern, told)[1])  # type: ignore[index]

    failed = re.search(r"^pan:\d+: (.*)$", told, re.MULTILINE)
    return Found(
        failed[1] if failed else "",
        int(number(r"(\d+) states, stored")),
        int(number(r"(\d+) transitions")),
        int(number(r"depth reached (\d+)")),
        number(r"([\d.]+)\s+total actual memory"),
        time.monotonic() - begun,
        frozenset(re.findall(r"\w+\.pml:\d+, state \d+, \"(?!-end-)[^\n]*", told)),
    )


def say(run: Run, found: Found) -> bool:
    """Prints the result of a run. Returns True if it is as expected."""
    is_right = run.claim in found.failed if run.claim else not found.failed and (run.is_eventual or not found.unreached)
    print(
        f"{run.what:54} {found.states:>9,} states  depth {found.depth:>9,}  {found.seconds:5.1f} s  "
        f"{found.memory_mb:5.0f} MB  {'' if is_right else 'WRONG: '}{found.failed or 'holds'}",
        flush=True,
    )
    for line in sorted(found.unreached) if not run.claim and not run.is_eventual else ():
        print(f"  never reached: {line}")
    return is_right


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--short", action="store_true", help="the smallest only, for each change")
    runs = SHORT if parser.parse_args().short else RUNS
    begun = time.monotonic()
    with (
        tempfile.TemporaryDirectory() as directory,
        concurrent.futures.ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool,
    ):
        places = [Path(directory) / str(number) for number in range(len(runs))]
        right = [say(run, found) for run, found in zip(runs, pool.map(checked, runs, places), strict=True)]
    defects = sum(bool(run.claim) for run in runs)
    took = time.monotonic() - begun
    wrong = right.count(False)
    print(f"model: {len(runs) - defects} that hold, {defects} that fail, {wrong} otherwise, in {took:.1f} s")
    sys.exit(0 if all(right) else 1)


if __name__ == "__main__":
    main()
