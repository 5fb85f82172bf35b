"""Do the tests notice when the engine is wrong? Mutants of its sources, the tests that kill them, and a score.

`make mutants` takes MUTANTS of them, chosen by MUTANTS_SEED, of each file its share. All are in one build without
optimisation and without debug_check, each behind a switch (schemata.py), below build/mutants/. pytest collects the
tests once; for each mutant a copy of that process sets the switch and runs them, the quick ones and those of the
mutated part first, up to the first that fails. A crash, a hang (by the processor's time that the test takes otherwise)
or too much memory is noticed as well. With no switch set they have to pass, in either order: what a mutant fails is its
own doing.

mutants.equivalent lists those that nobody can notice, and why: they do not count. The score is of the others.
"""

from __future__ import annotations

import argparse
import collections
import ctypes
import hashlib
import json
import mmap
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
import schemata

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[1]
BUILD = ROOT / "build" / "mutants"
EQUIVALENT = Path(__file__).with_suffix(".equivalent")
PACKAGE = "src/counterd/"
# Not protocols/counter/_rates.pxd: behind a switch, Cython cuts its products of 128 bits to 64.
SOURCES = (
    "_core.pxd", "_core.pyx", "engine/chains.pxd", "engine/chains.pyx", "engine/table.pxd", "engine/wheel.pxd",
    "engine/permits.pxd", "engine/heap.pxd", "engine/heap.pyx", "engine/held.pyx", "engine/idle_ring.pxd",
    "engine/later.pyx", "engine/gcra.pxd", "engine/list.pxd", "engine/fair.pxd",
    "protocols/counter/_counters.pxd", "protocols/counter/_takes.pxd", "protocols/counter/_charges.pxd",
    "protocols/counter/_take_fast.pxd",
    "protocols/counter/_messages.pxd", "protocols/counter/_store.pyx", "protocols/counter/_session.pyx",
    "protocols/throttr/_keys.pxd", "protocols/throttr/_channels.pxd", "protocols/throttr/_members.pxd",
    "protocols/throttr/_store.pyx", "protocols/throttr/_session.pyx",
    "protocols/sentinel/_window.pxd", "protocols/sentinel/_rules.pxd", "protocols/sentinel/_rates.pxd",
    "protocols/sentinel/_tokens.pxd", "protocols/sentinel/_sweep.pxd", "protocols/sentinel/_messages.pxd",
    "protocols/sentinel/_loading.pyx", "protocols/sentinel/_store.pyx", "protocols/sentinel/_session.pyx",
    *(f"protocols/beanstalk/{name}" for name in (
        "_wire.pxd", "_jobs.pxd", "_tubes.pxd", "_keys.pxd", "_workers.pxd", "_queues.pxd", "_replies.pxd",
        "_store.pyx", "_listing.pyx", "_session.pyx", "_journal.pyx", "_tables.pyx",
    )),
    *(f"protocols/smockron/{name}" for name in (
        "_wire.pxd", "_throttles.pxd", "_store.pyx", "_session.pyx", "_tables.pyx",
    )),
)  # fmt: skip
# The tests of each stage. Paths that do not exist are left out.
STAGES = {
    "unit": (
        "unit/test_core.py", "unit/engine",
        "unit/protocols", "unit/net/test_connection.py",
    ),
    "conformance": tuple(
        f"conformance/{name}/test_engine.py" for name in ("counter", "throttr", "sentinel", "beanstalk", "smockron")
    ),
    "property": tuple(
        f"property/test_{name}.py" for name in (
            "counter_model", "takes_model", "fairness", "cuts", "tables", "throttr_model", "sentinel_model",
            "beanstalk_model", "beanstalk_journal", "smockron_model",
        )
    ),
    "simulation": ("simulation",),
    "fuzzing": ("fuzz",),
}  # fmt: skip
COUNTER_PROTOCOL = (
    "unit/test_core", "unit/test_table", "unit/test_walk", "/counter/", "counter_model", "property/test_cuts",
    "property/test_tables",
)  # fmt: skip
# Part of a source's path: (tests run first, tests not run because they never reach it), each by parts of their names.
NO_COUNTERS = (*COUNTER_PROTOCOL[:-2], "property/test_tables", "test_wheel")
THROTTLES = (("smockron",), (*COUNTER_PROTOCOL[:-2], "test_wheel", "throttr", "sentinel", "beanstalk"))
TAKES = (("test_takes", "takes_model", "test_fair"), ("throttr", "sentinel", "beanstalk", "smockron", "test_wheel"))
NEAR = {
    "engine/wheel": (("test_wheel", "throttr"), COUNTER_PROTOCOL),
    "throttr/": (("throttr",), (*COUNTER_PROTOCOL, "test_wheel", "beanstalk", "smockron")),
    "sentinel/": (("sentinel",), (*NO_COUNTERS, "throttr", "beanstalk", "smockron")),
    "beanstalk/": (("beanstalk",), (*NO_COUNTERS, "throttr", "sentinel", "smockron")),
    "smockron/": THROTTLES, "engine/gcra": THROTTLES,
    "counter/_takes": TAKES, "engine/fair": TAKES,
    "counter/": (("counter/", "counter_model"), ("throttr", "test_wheel", "beanstalk", "smockron")),
    "_core": (("test_core", "counter"), ("test_wheel",)), "engine/table": (("test_table", "counter"), ("test_wheel",)),
    "engine/later": (("test_later", "sentinel"), ("test_wheel", "throttr", *COUNTER_PROTOCOL)),
    "engine/": (("counter", "test_table"), ("test_wheel",)),
}  # fmt: skip
SCORE_MIN = 95.0
QUICK_S = 0.3  # tests that take no longer are run before all others
MEMORY_MAX = 2 << 30
WALL_MAX_S = 3600  # limit for all tests of a mutant: ends a test that waits forever; RLIMIT_CPU ends a busy one

SWITCH = '''# The number of the mutant that is switched on, or 0: where the environment says, or there itself.

cdef extern from *:
    """
    #include <stdlib.h>
    static int counterd_own_mutant = 0;
    static const volatile int *counterd_mutant = &counterd_own_mutant;
    __attribute__((constructor)) static void counterd_find_mutant(void) {
        const char *place = getenv("COUNTERD_MUTANT_AT"), *number = getenv("COUNTERD_MUTANT");
        if (place) counterd_mutant = (const volatile int *)strtoull(place, 0, 10);
        else if (number) counterd_own_mutant = atoi(number);
    }
    #define mutant(number) (*counterd_mutant == (number))
    """
    bint mutant(int number) noexcept nogil
'''


class Verdict(NamedTuple):
    how: str  # a stage; crash, hang, memory; or survived
    test: str


# ---- build -----------------------------------------------------------------------------------------------------------


def read_sources() -> dict[str, str]:
    return {PACKAGE + name: (ROOT / PACKAGE / name).read_text("ascii") for name in SOURCES}


def build() -> set[int]:
    """Builds all mutants in build/mutants/src unless they are built already. Returns those that do not compile."""
    digest = hashlib.sha256(SWITCH.encode())
    for path in (Path(schemata.__file__), ROOT / "setup.py", *sorted((ROOT / "src").rglob("*.p*[dxy]"))):
        digest.update(path.read_bytes())
    built = BUILD / "built.json"
    if built.exists() and (known := json.loads(built.read_text()))["digest"] == digest.hexdigest():
        return set(known["dropped"])
    shutil.rmtree(BUILD, ignore_errors=True)
    shutil.copytree(ROOT / "src", BUILD / "src", ignore=shutil.ignore_patterns("*.so", "*.c", "*.egg-info"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, BUILD)
    setup = (ROOT / "setup.py").read_text().replace('"-O3", "-g1"', '"-O0", "-g0"')
    # Cython turns `a == 1 and a == 2` into a `switch`, as if it were `or`. Only mutants contain such code.
    setup = setup.replace('"language_level": 3,', '"language_level": 3, "optimize.use_switch": False,')
    assert '"-O0"' in setup, "setup.py has other flags than are known here"
    assert "use_switch" in setup, "setup.py has other directives than are known here"
    (BUILD / "setup.py").write_text(setup)
    (BUILD / PACKAGE / "_mutant.pxd").write_text(SWITCH)
    dropped: set[int] = set()
    while True:
        for path, text in schemata.rewritten(read_sources(), dropped)[1].items():
            target = BUILD / path
            if target.read_text() != text:
                target.write_text(text)
        print(f"building, without the {len(dropped)} that do not compile", flush=True)
        run = subprocess.run(
            (sys.executable, "setup.py", "--quiet", "build_ext", "--inplace"),
            cwd=BUILD, env={**os.environ, "COUNTERD_BUILD": "release"}, capture_output=True, text=True, check=False,
        )  # fmt: skip
        if run.returncode == 0:
            break
        wrong = misfits(run.stdout + run.stderr) - dropped
        if not wrong:
            raise SystemExit(run.stdout + run.stderr)
        dropped |= wrong
    built.write_text(json.dumps({"digest": digest.hexdigest(), "dropped": sorted(dropped)}))
    return dropped


def misfits(output: str) -> set[int]:
    """Returns the mutants that errors of Cython refer to: for each, the first one at or after the error's line."""
    found = set()
    for path, line in set(re.findall(r"^(?:.*: )?(src/\S+?\.p(?:yx|xd)):(\d+):\d+:", output, re.MULTILINE)):
        rest = (BUILD / path).read_text().split("\n", int(line) - 1)[-1]
        if match := re.search(r"mutant\((\d+)\)", rest):
            found.add(int(match[1]))
    return found


# ---- which -----------------------------------------------------------------------------------------------------------


def equivalents(mutants: list[schemata.Mutant]) -> dict[int, str]:
    """Returns the reason of each equivalent mutant. The file has a reason, then its mutants as `--list` prints them."""
    by_text = collections.defaultdict(list)
    for mutant in mutants:
        by_text[str(mutant)].append(mutant)
    found, reason = {}, ""
    for line in EQUIVALENT.read_text().splitlines():
        if line.startswith("# "):
            reason = line[2:]
        elif line and line not in by_text:
            raise SystemExit(f"{EQUIVALENT.name} has an entry that is no mutant (any more): {line}")
        elif line:
            found.update((mutant.number, reason) for mutant in by_text[line])
    return found


def chosen(mutants: list[schemata.Mutant], count: int, seed: int) -> list[schemata.Mutant]:
    """Returns about `count` random mutants, from each file in proportion to its mutants, and at least one."""
    generator = random.Random(seed)
    by_file = collections.defaultdict(list)
    for mutant in mutants:
        by_file[mutant.path].append(mutant)
    found = []
    for own in by_file.values():
        found += generator.sample(own, min(len(own), max(1, round(count * len(own) / len(mutants)))))
    return sorted(found, key=lambda mutant: mutant.number)


# ---- run -------------------------------------------------------------------------------------------------------------


class Child:
    """A fork of this process that switches on a mutant, or none, and runs tests. It writes its output to a file."""

    def __init__(self, runner: Runner, mutant: schemata.Mutant | None):
        self.mutant = mutant
        self.items = runner.ordered(mutant.path if mutant else "")
        self.place = mmap.mmap(-1, mmap.PAGESIZE)  # the index of the running test, shared with the parent
        self.log = BUILD / "logs" / f"{mutant.number if mutant else 0}.txt"
        self.ends_s = time.monotonic() + WALL_MAX_S
        self.why = ""
        sys.stdout.flush()
        self.pid = os.fork()
        if self.pid == 0:
            try:
                with self.log.open("wb") as log:
                    os.dup2(log.fileno(), 1)
                    os.dup2(log.fileno(), 2)
                runner.run_tests(self)
            except BaseException:  # noqa: BLE001  (it must not go on as the parent does)
                traceback.print_exc()
                os._exit(2)
            os._exit(0)

    def poll(self) -> Verdict | None:
        pid, status = os.waitpid(self.pid, os.WNOHANG)
        if pid:
            return self.verdict(status)
        if not self.why:
            pages = int(Path(f"/proc/{self.pid}/statm").read_text().split()[1])
            if pages * mmap.PAGESIZE > MEMORY_MAX:
                self.why = "memory"
            elif time.monotonic() > self.ends_s:
                self.why = "hang"
            if self.why:
                os.kill(self.pid, signal.SIGKILL)
        return None

    def verdict(self, status: int) -> Verdict:
        if status == 0:
            return Verdict("survived", "")
        if os.WIFEXITED(status) and os.WEXITSTATUS(status) == 2:
            raise RuntimeError(f"not a test has failed, but what runs them: see {self.log}")
        test = self.items[int.from_bytes(self.place[:4], "little")].nodeid
        if os.WIFSIGNALED(status):
            return Verdict(self.why or ("hang" if os.WTERMSIG(status) == signal.SIGXCPU else "crash"), test)
        return Verdict(stage_of(test), test)


def stage_of(test: str) -> str:
    return next(stage for stage, paths in STAGES.items() if test.startswith(tuple(f"tests/{path}" for path in paths)))


class Runner:
    """A plugin for pytest that runs the mutants instead of the tests."""

    def __init__(self, mutants: list[schemata.Mutant], workers: int, one: bool):
        self.mutants = mutants
        self.workers = workers
        self.one = one
        self.switch = ctypes.c_int(0)
        self.costs: dict[str, float] = {}  # CPU seconds of each test
        self.session: Any = None
        self.verdicts: dict[int, Verdict] = {}
        os.environ["COUNTERD_MUTANT_AT"] = str(ctypes.addressof(self.switch))
        sys.path.insert(0, str(BUILD / "src"))
        for path in sorted((BUILD / "src").rglob("*.so")):
            __import__(path.relative_to(BUILD / "src").as_posix().partition(".")[0].replace("/", "."))
        # The extensions of the benchmarks that tests use are built against the mutants, in a directory of their own.
        sys.path.insert(0, str(ROOT / "benchmarks"))
        import native  # noqa: PLC0415

        native.BUILD = BUILD / "benchmarks"
        native.COMPILE_ARGS = ["-O0"]

    def ordered(self, path: str) -> list[Any]:
        """Returns the tests as collected, or in the order for mutants of `path` once the costs are known."""
        near, strange = next((names for part, names in NEAR.items() if part in path), ((), ()))

        def key(item: Any) -> tuple[bool, bool, float]:
            cost = self.costs[item.nodeid]
            return cost > QUICK_S, not any(name in item.nodeid for name in near), cost

        if not self.costs:
            return self.session.items
        return sorted(
            (item for item in self.session.items if not any(name in item.nodeid for name in strange)), key=key
        )

    def set_mutant(self, number: int) -> None:
        self.switch.value = number
        os.environ["COUNTERD_MUTANT"] = str(number)  # for processes that tests start

    def run_tests(self, child: Child) -> None:
        """Runs the tests up to the first failure. Called in the child."""
        self.set_mutant(child.mutant.number if child.mutant else 0)
        costs = {}
        for place, item in enumerate(child.items):
            child.place[:4] = place.to_bytes(4, "little")
            before = time.process_time()
            if self.costs:
                limit = int(before + 5 + 4 * self.costs[item.nodeid])
                resource.setrlimit(resource.RLIMIT_CPU, (limit, resource.RLIM_INFINITY))
            later = child.items[place + 1] if place + 1 < len(child.items) else None
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=later)
            costs[item.nodeid] = time.process_time() - before
            if self.session.testsfailed:
                sys.stdout.flush()
                os._exit(1)
        if not self.costs:
            (BUILD / "costs.json").write_text(json.dumps(costs))

    def pytest_configure(self) -> None:
        import hypothesis  # noqa: PLC0415  (pytest wants to be there first)

        # Any failure kills the mutant: no shrinking, and no database, because the next mutant fails differently.
        hypothesis.settings.register_profile(
            "mutants", database=None, deadline=None, derandomize=True, report_multiple_bugs=False,
            phases=(hypothesis.Phase.explicit, hypothesis.Phase.generate),
            suppress_health_check=list(hypothesis.HealthCheck),
        )  # fmt: skip
        hypothesis.settings.load_profile("mutants")

    def pytest_runtestloop(self, session: pytest.Session) -> bool | None:
        self.session = session
        del os.environ["COUNTERD_MUTANT_AT"]  # the address is not valid in processes that tests start
        os.environ["PYTHONPATH"] = str(BUILD / "src")
        if self.one:
            self.set_mutant(self.mutants[0].number)
            return None
        (BUILD / "logs").mkdir(exist_ok=True)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        for _order in range(2):
            child = Child(self, None)
            while (verdict := child.poll()) is None:
                time.sleep(0.1)
            if verdict.how != "survived":
                raise RuntimeError(f"with no mutant, {verdict.test} fails: see {child.log}")
            self.costs = json.loads((BUILD / "costs.json").read_text())
        print(f"with no mutant, all {len(session.items)} tests pass, in {sum(self.costs.values()):.0f} s", flush=True)
        for mutant, verdict, seconds in self.all_verdicts():
            self.verdicts[mutant.number] = verdict
            done = f"{len(self.verdicts)}/{len(self.mutants)}"
            print(f"{done:>9} {mutant.number:5} {verdict.how:12} {seconds:5.1f} s", end="  ")
            print(f"{mutant.path}:{mutant.line}  {verdict.test}", flush=True)
        return True

    def all_verdicts(self) -> Iterator[tuple[schemata.Mutant, Verdict, float]]:
        waiting = self.mutants[::-1]
        running: list[tuple[Child, float]] = []
        while waiting or running:
            while waiting and len(running) < self.workers:
                running.append((Child(self, waiting.pop()), time.monotonic()))
            time.sleep(0.05)
            for child, start_s in running[:]:
                if (verdict := child.poll()) is not None and child.mutant:
                    running.remove((child, start_s))
                    yield child.mutant, verdict, time.monotonic() - start_s


def run(mutants: list[schemata.Mutant], workers: int, one: bool) -> dict[int, Verdict]:
    tests = [f"tests/{path}" for paths in STAGES.values() for path in paths if (ROOT / "tests" / path).exists()]
    runner = Runner(mutants, workers, one)
    os.chdir(ROOT)
    options = ["-q", "-s", "-p", "no:cacheprovider", "-p", "no:faulthandler", *(["-x"] if one else [])]
    status = pytest.main([*options, *tests], plugins=[runner])
    if not one and len(runner.verdicts) != len(mutants):
        raise SystemExit(f"pytest ended with {status}")
    return runner.verdicts


# ---- report ----------------------------------------------------------------------------------------------------------


def report(mutants: list[schemata.Mutant], verdicts: dict[int, Verdict], whys: dict[int, str]) -> float:
    columns = ["mutants", "equivalent", *STAGES, "crash", "hang", "memory", "survived", "score"]
    print("\n" + "".join((f"{'file':32}", *(f"{column:>12}" for column in columns))))
    total: collections.Counter[str] = collections.Counter()
    for path in (*dict.fromkeys(mutant.path for mutant in mutants), ""):
        counted: collections.Counter[str] = collections.Counter()
        for mutant in mutants:
            if mutant.path == path:
                counted["mutants"] += 1
                counted["equivalent" if mutant.number in whys else verdicts[mutant.number].how] += 1
        total += counted
        row = counted if path else total
        left = row["mutants"] - row["equivalent"]
        score = 100 * (left - row["survived"]) / left if left else 100.0
        figures = (f"{row[column]:12}" for column in columns[:-1])
        print("".join((f"{path.removeprefix(PACKAGE) or 'all':32}", *figures, f"{score:10.1f} %")))
    counting = [mutant for mutant in mutants if mutant.number not in whys]
    survivors = [mutant for mutant in counting if verdicts[mutant.number].how == "survived"]
    for mutant in survivors:
        print(f"\nsurvived: {mutant.number}, line {mutant.line}\n{mutant}")
    print()
    print(f"mutation score: {score:.1f} % of {left} mutants that are not equivalent ({len(survivors)} survived)")
    return score


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sample", type=int, default=200, help="how many (default: %(default)s); 0 for all")
    parser.add_argument("--seed", type=int, default=1, help="which (default: %(default)s)")
    parser.add_argument("--file", default="", help="only of files with this in their name")
    parser.add_argument("--workers", type=int, default=2, help="how many at a time (default: %(default)s)")
    parser.add_argument("--list", action="store_true", help="tell which, and run nothing")
    parser.add_argument("--only", type=int, nargs="+", default=[], help="these; of one, the tests' output is shown")
    options = parser.parse_args()
    mutants, _ = schemata.rewritten(read_sources())
    whys = equivalents(mutants)
    if options.list:
        for mutant in mutants:
            why = f"\n      equivalent: {whys[mutant.number]}" if mutant.number in whys else ""
            print(f"{mutant.number:5} {mutant}{why}")
        return 0
    dropped = build()
    mutants = [mutant for mutant in mutants if mutant.number not in dropped and options.file in mutant.path]
    if options.only:
        mutants = [mutant for mutant in mutants if mutant.number in options.only]
        whys = {}
    elif options.sample:
        mutants = chosen(mutants, options.sample, options.seed)
    one = len(options.only) == 1
    verdicts = run([mutant for mutant in mutants if mutant.number not in whys], options.workers, one)
    return 0 if one or report(mutants, verdicts, whys) >= SCORE_MIN else 1


if __name__ == "__main__":
    sys.exit(main())
