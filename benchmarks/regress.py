"""Has the engine become slower than it was? Compares with benchmarks/baseline.json; no absolute time is ever compared.

    python benchmarks/regress.py            compare (`make bench-regress`)
    python benchmarks/regress.py --write    measure more often, and make that the baseline (`make bench-baseline`)
    python benchmarks/regress.py --write TEXT    likewise, but only operations whose names contain it: others stay

ratios        time of an operation / time of the reference kernel (benchmarks/native/_reference.pyx) in the same rounds:
              the machine's speed cancels out. What looks worse is measured again before it is called so.
instructions  of a frame, counted by callgrind: as good as the same in every run, so never measured again. They depend
              on the compiler, and are compared only where that and what else they depend on are the baseline's.

Exit status: 0 nothing got worse by more than 10 %, 1 something did, 2 it cannot be found out.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import re
import shlex
import shutil
import statistics
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

HERE = Path(__file__).parent
BASELINE = HERE / "baseline.json"
FIGURES = HERE / "micro" / "figures.py"
REFERENCE = HERE / "native" / "_reference.pyx"

TOLERANCE = 0.10
# The memory layout of a process changes its times by some per cent, so the median of several processes is taken.
PROCESSES = 5
PROCESSES_AGAIN = 3
PROCESSES_BASELINE = 9
AGAIN = 3

# Two spellings of one function, because callgrind uses only the last of the options that have the same pattern.
MARKS = ("__pyx_pw_*count_instructions", "__pyx_pw_7_native_*count_instructions")

OK, WORSE, BETTER = "ok", "WORSE", "better"
NO_BASELINE, NOT_MEASURED, NOT_COMPARED = "no baseline", "NOT MEASURED", "not compared"


class Row(NamedTuple):
    """A figure with its baseline and its verdict."""

    kind: str
    figure: str
    baseline: float | None
    now: float | None
    verdict: str


# ---- comparing -------------------------------------------------------------------------------------------------------


def differences(baseline: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """Describes the parts of the environment that have changed. Instruction counts depend on them."""
    return [f"{key}: {baseline.get(key)} then, {now.get(key)} now" for key in now if baseline.get(key) != now[key]]


def judge(baseline: float | None, now: float | None) -> str:
    if now is None:
        return NOT_MEASURED
    if baseline is None:
        return NO_BASELINE
    if now > baseline * (1 + TOLERANCE):
        return WORSE
    return BETTER if now < baseline / (1 + TOLERANCE) else OK


def compare(baseline: Mapping[str, Any], now: Mapping[str, Any]) -> list[Row]:
    """Returns a row for each figure in `baseline` or `now`."""
    comparable = {"ratios": True, "instructions": not differences(baseline["environment"], now["environment"])}
    return [
        Row(kind, figure, before, after, judge(before, after) if comparable[kind] else NOT_COMPARED)
        for kind in comparable
        for figure in {**baseline[kind], **now[kind]}
        for before, after in [(baseline[kind].get(figure), now[kind].get(figure))]
    ]


def failed(rows: Iterable[Row]) -> list[Row]:
    return [row for row in rows if row.verdict in (WORSE, NOT_MEASURED)]


def lowest(attempts: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Returns the lowest value of each figure, because noise only increases figures."""
    merged: dict[str, float] = {}
    for attempt in attempts:
        for figure, value in attempt.items():
            merged[figure] = min(value, merged.get(figure, value))
    return merged


def table(rows: Iterable[Row]) -> str:
    def number(value: float | None, kind: str) -> str:
        return "-" if value is None else f"{value:.3f}" if kind == "ratios" else f"{value:.1f}"

    lines = [f"{'':<13} {'figure':<38} {'baseline':>9} {'now':>9} {'ratio':>6}  verdict"]
    for row in rows:
        ratio = f"{row.now / row.baseline:.2f}" if row.now and row.baseline else "-"
        before, now = number(row.baseline, row.kind), number(row.now, row.kind)
        lines.append(f"{row.kind:<13} {row.figure:<38} {before:>9} {now:>9} {ratio:>6}  {row.verdict}")
    return "\n".join(lines)


# ---- measuring -------------------------------------------------------------------------------------------------------


def environment() -> dict[str, str]:
    """Returns the programs and the architecture that instruction counts depend on, besides the code."""
    import Cython

    compiler = shlex.split(os.environ.get("CC") or sysconfig.get_config_var("CC"))[0]
    said = subprocess.run([compiler, "--version"], stdout=subprocess.PIPE, text=True, check=True).stdout
    return {
        "architecture": platform.machine(),
        "compiler": said.splitlines()[0],
        "cython": Cython.__version__,
        "python": f"{platform.python_implementation()} {platform.python_version()}",
        "libc": " ".join(platform.libc_ver()),
    }


def processor() -> str:
    names = re.findall(r"^model name\s*:\s*(.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    return names[0] if names else platform.machine()


def reference_mark() -> str:
    """Returns a digest of the reference kernel's source."""
    return hashlib.sha256(REFERENCE.read_bytes()).hexdigest()[:16]


def run_figures(*arguments: str | Path, under: Iterable[str] = ()) -> dict[str, Any]:
    command = [*under, sys.executable, str(FIGURES), *map(str, arguments)]
    done = subprocess.run(
        command, stdout=subprocess.PIPE, env={**os.environ, "PYTHONHASHSEED": "0"}, text=True, check=True
    )
    return json.loads(done.stdout)


def measure_ratios(processes: int, only: str = "") -> dict[str, float]:
    runs = [run_figures(only, "ratios") for _ in range(processes)]
    return {name: round(statistics.median(run[name] for run in runs), 4) for name in runs[0]}


def measure_instructions(extension: Path, only: str = "") -> dict[str, float]:
    """Returns instructions per frame. callgrind writes a file before each marked call and one after: those are read."""
    with tempfile.TemporaryDirectory() as directory:
        out = Path(directory) / "out"
        counts = run_figures(
            only,
            "instructions",
            extension,
            under=[
                "valgrind", "--quiet", "--tool=callgrind", f"--callgrind-out-file={out}",
                f"--dump-before={MARKS[0]}", f"--dump-after={MARKS[1]}",
            ],
        )  # fmt: skip
        instructions = {}
        for number, (name, frames) in enumerate(counts.items(), 1):
            text = out.with_suffix(f".{2 * number}").read_text()
            if "desc: Trigger: --dump-after" not in text:
                raise ValueError(f"callgrind did not see the end of {name!r}")
            instructions[name] = round(int(re.findall(r"^totals: (\d+)$", text, re.MULTILINE)[0]) / frames, 2)
        return instructions


def measure(processes: int, only: str = "") -> dict[str, Any]:
    from native import build, load_reference

    extension = build("_native")
    load_reference()
    return {
        "environment": environment(),
        "processor": processor(),
        "reference": reference_mark(),
        "instructions": measure_instructions(extension, only),
        "ratios": measure_ratios(processes, only),
    }


# ---- the command -----------------------------------------------------------------------------------------------------


def obstacle() -> str:
    """Returns the reason why this machine or build cannot measure, or ""."""
    from counterd import _core

    if _core.DEBUG:
        return "this is a debug build; the figures are of the release build: make bench-regress COUNTERD_BUILD=release"
    if shutil.which("valgrind") is None:
        return "no valgrind, which counts instructions; on Debian or Ubuntu: apt-get install valgrind"
    return ""


def measure_again(baseline: Mapping[str, Any], now: dict[str, Any]) -> None:
    """Measures all ratios again, up to AGAIN times, while one looks worse: other programs may have disturbed it."""
    for attempt in range(1, AGAIN + 1):
        suspects = [row.figure for row in compare(baseline, now) if (row.kind, row.verdict) == ("ratios", WORSE)]
        if not suspects:
            return
        print(f"measuring again ({attempt} of {AGAIN}): {len(suspects)} ratios look worse", flush=True)
        now["ratios"] = lowest([now["ratios"], measure_ratios(PROCESSES_AGAIN)])


def report(baseline: Mapping[str, Any], now: Mapping[str, Any]) -> int:
    """Prints the results and returns the exit status."""
    rows = compare(baseline, now)
    print(table(rows))
    if changed := differences(baseline["environment"], now["environment"]):
        count = sum(row.verdict == NOT_COMPARED for row in rows)
        print(f"\nNot compared: {count} instruction counts, because they depend on what is not the baseline's:")
        print("\n".join(f"  {line}" for line in changed))
    if baseline["processor"] != now["processor"]:
        print(f"\nThe baseline's processor was {baseline['processor']}, this one is {now['processor']}: ratios may")
        print("differ for that alone. `make bench-baseline` on the code before the change shows how much.")
    if worse := failed(rows):
        print(f"\nFAILED: {len(worse)} of {len(rows)} figures are more than {TOLERANCE:.0%} worse, or are missing:")
        print("\n".join(f"  {row.kind}: {row.figure}" for row in worse))
        return 1
    if any(row.verdict in (BETTER, NO_BASELINE) for row in rows):
        print("\nSomething is better, or new: `make bench-baseline` makes such figures the baseline.")
    print(f"\nNothing got worse by more than {TOLERANCE:.0%}.")
    return 0


def write_some(baseline: dict[str, Any], now: Mapping[str, Any]) -> int:
    """Replaces only the figures of `now` in the baseline. Returns the exit status."""
    if changed := differences(baseline["environment"], now["environment"]):
        print("bench-regress: instructions could not be compared with the others:", file=sys.stderr)
        print("\n".join(f"  {line}" for line in changed), file=sys.stderr)
        return 2
    for kind in ("instructions", "ratios"):
        baseline[kind].update(now[kind])
    BASELINE.write_text(json.dumps(baseline, indent=2) + "\n")
    print(f"wrote {len(now['ratios'])} operations to {BASELINE}")
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--write", nargs="?", const="", metavar="TEXT", help="make figures the baseline: those with that in their names"
    )
    options = parser.parse_args()
    if reason := obstacle():
        print(f"bench-regress: {reason}", file=sys.stderr)
        return 2
    if options.write == "":
        BASELINE.write_text(json.dumps(measure(PROCESSES_BASELINE), indent=2) + "\n")
        print(f"wrote {BASELINE}")
        return 0
    if not BASELINE.exists():
        print(f"bench-regress: there is no {BASELINE}; `make bench-baseline` writes it", file=sys.stderr)
        return 2
    baseline = json.loads(BASELINE.read_text())
    if baseline["reference"] != reference_mark():
        print("bench-regress: the reference kernel is not the baseline's: no ratio can be compared.", file=sys.stderr)
        print("Take its change back, or `make bench-baseline` on the code before yours.", file=sys.stderr)
        return 2
    if options.write:
        return write_some(baseline, measure(PROCESSES_BASELINE, options.write))
    now = measure(PROCESSES)
    measure_again(baseline, now)
    return report(baseline, now)


if __name__ == "__main__":
    sys.exit(main())
