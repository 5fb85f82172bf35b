#!/usr/bin/env python3
"""Proves what counterd promises, before a release: `make prove`.

    python tools/prove.py [--only NAME[,NAME]] [--seed N] [--write]

Runs the proofs below one after the other, each for at most its time. What they print is in build/prove/NAME.log. Every
half a minute a line tells how far it is, and one table at the end what came of each: it is also in
build/prove/summary.md. --write puts it into docs/reliability.md. Random proofs begin with --seed, by default the day's
number, and the table names it. Exit status: 0 if all proofs passed.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import sys
import time
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

ROOT = Path(__file__).parents[1]
LOGS = ROOT / "build" / "prove"
PAGE = ROOT / "docs" / "reliability.md"
PLACE = re.compile(r"(?<=<!-- what make prove wrote -->\n).*?(?=<!-- end -->)", re.DOTALL)
PROGRESS_S = 30.0
LOOK_S = 0.2
GRACE_S = 30.0  # for what a proof does when it is interrupted, before it is killed


class Proof(NamedTuple):
    """name, minutes: it is ended after that. command: for the shell; {seed} is replaced. figures: lines to quote."""

    name: str
    minutes: float
    command: str
    figures: str


PROOFS = (
    Proof("tests", 20, "make test-part PART=proofs", r"\d+ (?:passed|failed).*"),
    Proof(
        "interrupted", 10, "COUNTERD_EXAMPLES=8 make test ARGS=tests/scenarios/test_interrupted.py",
        r"\d+ (?:passed|failed).*",
    ),
    Proof(
        "examples", 20,
        "COUNTERD_EXAMPLES=5 make test COUNTERD_BUILD=debug TOOLS=test "
        "ARGS='--part engine tests/property tests/simulation'",
        r"\d+ (?:passed|failed).*",
    ),
    Proof("simulate", 10, "make simulate SIMULATE_SEED={seed}", r"^\w+: [\d,]+ steps.*"),
    Proof("chaos", 10, "make chaos CHAOS_SECONDS=300 CHAOS_SEED={seed}", r"^.*\d+ rounds.*"),
    Proof("chaos-shared", 8, "make chaos-shared CHAOS_SECONDS=200 CHAOS_SEED={seed}", r"^.*\d+ (?:faults|grants).*"),
    Proof("drain", 3, "{python} benchmarks/load/stops.py", r".*(?:close|wait).*"),
    Proof("soak", 5, "make soak SOAK_SECONDS=180", r"^soak: .*"),
    Proof("fuzz", 25, "make fuzz FUZZ_SECONDS=60", r"^\w+ .*(?:inputs|executed).*"),
    Proof("asan", 40, "make asan", r"^asan: .*"),
    Proof("model", 20, "make model", r"^.*(?:states|as expected).*"),
    Proof("mutants", 20, "make mutants MUTANTS=40 MUTANTS_SEED={seed}", r"^.*(?:score|noticed).*"),
    Proof("bench-smoke", 5, "make bench-smoke", r"\d+ (?:passed|failed).*"),
    Proof("bench-regress", 5, "make bench-regress", r"^.*(?:worse|regress).*"),
)  # fmt: skip


class Result(NamedTuple):
    proof: Proof
    outcome: str  # "passed", or what else happened
    seconds: float
    figure: str  # the last line that `figures` matches


def end(process: subprocess.Popen[bytes]) -> None:
    """Interrupts all processes of a proof, and kills them if that does not help."""
    os.killpg(process.pid, signal.SIGINT)
    try:
        process.wait(GRACE_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def run(proof: Proof, seed: int, before: str) -> Result:
    """Runs a proof. before: what progress lines begin with."""
    log = LOGS / f"{proof.name}.log"
    command = proof.command.format(seed=seed, python=sys.executable)
    begun = told = time.monotonic()
    with log.open("wb") as output:
        process = subprocess.Popen(
            ["sh", "-c", command],
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
        outcome = ""
        try:
            while process.poll() is None and not outcome:
                time.sleep(LOOK_S)
                now = time.monotonic()
                if now - begun > proof.minutes * 60:
                    outcome = f"not over after {proof.minutes:g} minutes"
                elif now - told > PROGRESS_S:
                    told = now
                    print(f"{before} {proof.name}: {now - begun:.0f} s of at most {proof.minutes * 60:.0f}", flush=True)
        finally:
            if process.poll() is None:
                end(process)
    lines = log.read_text("utf-8", "replace").splitlines()
    figures = [line for line in lines if re.search(proof.figures, line)]
    outcome = outcome or ("passed" if process.returncode == 0 else f"FAILED, status {process.returncode}")
    return Result(proof, outcome, time.monotonic() - begun, figures[-1].strip(" =|") if figures else "")


def git(*arguments: str) -> str:
    """Returns what git says of this tree; "" without git."""
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()


def summary(results: Sequence[Result], seed: int) -> str:
    """Returns the table, with the commit that was proved."""
    state = f"commit {git('rev-parse', '--short=12', 'HEAD') or 'unknown'}"
    state += ", with changes" if git("status", "--porcelain") else ""
    rows = [
        f"| `{result.proof.command.format(seed=seed, python='python')}` | {result.outcome} | {result.seconds:.0f} |"
        f" {result.figure.replace('|', '/')} |"
        for result in results
    ]
    head = f"{datetime.now(timezone.utc):%d %B %Y}, {state}, seed {seed}:\n"
    return "\n".join([head, "| proof | result | seconds | its last figure |", "|---|---|---:|---|", *rows, ""])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="names of proofs, divided by commas")
    parser.add_argument("--seed", type=int, default=datetime.now(timezone.utc).toordinal())
    parser.add_argument("--write", action="store_true", help="put the table into docs/reliability.md")
    options = parser.parse_args()
    names = [proof.name for proof in PROOFS]
    wanted = options.only.split(",") if options.only else names
    if unknown := set(wanted) - set(names):
        parser.error(f"--only: no proof {', '.join(sorted(unknown))}; there are {', '.join(names)}")
    proofs = [proof for proof in PROOFS if proof.name in wanted]
    LOGS.mkdir(parents=True, exist_ok=True)
    print(f"prove: at most {sum(proof.minutes for proof in proofs):g} minutes; seed {options.seed}", flush=True)
    results = []
    for number, proof in enumerate(proofs, 1):
        before = f"prove: {number} of {len(proofs)},"
        print(f"{before} {proof.name}: {proof.command.format(seed=options.seed, python='python')}", flush=True)
        result = run(proof, options.seed, before)
        results.append(result)
        print(f"{before} {proof.name}: {result.outcome}, {result.seconds:.0f} s", flush=True)
    table = summary(results, options.seed)
    (LOGS / "summary.md").write_text(table)
    print(table)
    if options.write:
        PAGE.write_text(PLACE.sub(lambda _: f"\n{table}\n", PAGE.read_text("utf-8")), "utf-8")
    return 0 if all(result.outcome == "passed" for result in results) else 1


if __name__ == "__main__":
    sys.exit(main())
