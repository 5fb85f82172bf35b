"""Fuzzes each target with libFuzzer, in the build that clang instrumented: `make fuzz` runs this in .venv-fuzz.

What a target's one_input() raises, an abort of the debug build, a report of AddressSanitizer or UBSan, a hang or too
much memory is a find, and ends that target; its input is left in build/fuzz/TARGET/. Inputs that reached something new
stay in build/fuzz/TARGET/corpus for the next run; --minimise puts the fewest that reach all of it into
tests/fuzz/corpus/.
"""

from __future__ import annotations

import argparse
import importlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[2]
CORPUS = Path(__file__).parent / "corpus"
BUILD = ROOT / "build" / "fuzz"
# Bytes of an input: what is long costs time, and finds little that is short does not.
TARGETS = {
    "counter": 512, "takes": 512, "shares": 512, "throttr": 512, "sentinel": 512, "beanstalk": 512, "smockron": 512,
    "journal": 512,
    "config": 2048, "rules": 2048, "limits": 2048, "replies": 512,
}  # fmt: skip
HANG_S = 30  # on a busy machine too; inputs take milliseconds
MEMORY_MB = 2048
PROGRESS_S = 30
STATUS = re.compile(r"^#(\d+)\s+\w+\s+cov: (\d+) ft: (\d+) corp: (\d+)/", re.MULTILINE)
EXECUTED = re.compile(r"^stat::number_of_executed_units: +(\d+)", re.MULTILINE)
SANITIZERS = {
    # Freed and leaked are CPython's own at its end. What asks for too much gets a MemoryError, as without a sanitizer.
    "ASAN_OPTIONS": "detect_leaks=0:allocator_may_return_null=1:handle_abort=1:quarantine_size_mb=32",
    "UBSAN_OPTIONS": "print_stacktrace=1",
    "PYTHONMALLOC": "malloc",  # each of Python's objects is a piece of memory that the sanitizer knows
}


def inputs(target: str) -> list[bytes]:
    """The corpus in the repository: one input a line, in hex."""
    return [bytes.fromhex(line) for line in (CORPUS / f"{target}.txt").read_text("ascii").splitlines()]


# ---- the process that fuzzes ----------------------------------------------------------------------------------------


def fuzz(target: str, arguments: list[str]) -> None:
    """Runs libFuzzer, which ends the process. Called in a process with the sanitizers."""
    import atheris

    sys.path.insert(0, str(ROOT / "tests"))
    with atheris.instrument_imports(include=["counterd"]):
        harness = importlib.import_module(f"fuzz.{target}")
    words = BUILD / target / "words"
    escaped = ("".join(f"\\x{byte:02x}" for byte in token) for token in harness.TOKENS)
    words.write_text("".join(f'"{token}"\n' for token in escaped))
    itself = f"{sys.executable} {__file__}"  # a merge runs it again
    atheris.Setup([itself, *arguments, f"-dict={words}"], harness.one_input)
    atheris.Fuzz()


def command(target: str, *arguments: object) -> tuple[list[str], dict[str, str]]:
    """The command of that process, and its environment."""
    runtime = next(Path(sys.prefix).glob("lib/python*/site-packages/asan_with_fuzzer.so"))
    environment = {**os.environ, **SANITIZERS, "LD_PRELOAD": str(runtime), "FUZZ_TARGET": target}
    return [sys.executable, __file__, *map(str, arguments)], environment


# ---- the one that looks after them ----------------------------------------------------------------------------------


def cpu_seconds(pid: int) -> float:
    """The CPU time that a process has used so far."""
    used = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]
    return sum(map(int, used)) / os.sysconf("SC_CLK_TCK")


@dataclass
class Run:
    """A target that is being fuzzed."""

    target: str
    process: subprocess.Popen[bytes]
    log: Path
    seconds: int
    stopping: bool = False
    shown: float = field(default_factory=time.monotonic)
    cpu_s: float = 0.0
    status: int | None = None

    def ended(self) -> bool:
        """Checks the process; ends it when it has used its time."""
        if self.status is None:
            pid, status, used = os.wait4(self.process.pid, os.WNOHANG)
            if pid:
                self.cpu_s = used.ru_utime + used.ru_stime
                self.status = self.process.returncode = os.waitstatus_to_exitcode(status)
            elif not self.stopping and cpu_seconds(self.process.pid) >= self.seconds:
                self.stopping = True
                os.kill(self.process.pid, signal.SIGUSR1)  # Popen would take its status from wait4()
        return self.status is not None

    def figures(self) -> str:
        log = self.log.read_text(errors="replace")
        lines = STATUS.findall(log)
        executions, edges, features, corpus = map(int, lines[-1] if lines else "0000")
        if total := EXECUTED.search(log):
            executions = int(total[1])
        told = f"{executions:,} executions, {edges:,} edges, {features:,} features, corpus {corpus:,}"
        return f"{self.target}: {told}"


def start(target: str, seconds: int) -> Run:
    folder = BUILD / target
    seeds = folder / "seeds"
    shutil.rmtree(seeds, ignore_errors=True)
    for path in (folder / "corpus", seeds):
        path.mkdir(parents=True, exist_ok=True)
    for number, data in enumerate(inputs(target)):
        (seeds / f"{number:04}").write_bytes(data)
    options = [f"-max_len={TARGETS[target]}", f"-timeout={HANG_S}", f"-rss_limit_mb={MEMORY_MB}"]
    options += ["-print_final_stats=1", f"-artifact_prefix={folder}/"]
    arguments, environment = command(target, *options, folder / "corpus", seeds)
    log = folder / "log"
    with log.open("wb") as output:
        process = subprocess.Popen(arguments, env=environment, stdout=output, stderr=output)
    return Run(target, process, log, seconds)


def finds(target: str) -> list[Path]:
    """The inputs that caused a failure, except those that were only slow."""
    return sorted(path for kind in ("crash", "timeout", "oom") for path in (BUILD / target).glob(f"{kind}-*"))


def fuzz_all(targets: list[str], seconds: int, jobs: int) -> bool:
    """Fuzzes each target for so many seconds of CPU time, several at once. Returns whether nothing was found."""
    waiting, running, sound = list(targets), list[Run](), True
    for target in targets:
        for path in finds(target):
            path.unlink()
    ended: list[str] = []
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                running.append(start(waiting.pop(0), seconds))
            time.sleep(0.5)
            for run in running:
                if not run.ended() and time.monotonic() - run.shown > PROGRESS_S:
                    run.shown = time.monotonic()
                    print(run.figures(), flush=True)
            for run in [run for run in running if run.status is not None]:
                running.remove(run)
                found = finds(run.target)
                sound = sound and not found and run.status == 0
                ended.append(f"{run.figures()}, {run.cpu_s:,.0f} s of CPU, finds: {len(found)}")
                if found or run.status:
                    print(run.log.read_text(errors="replace")[-6000:])
                    ended += [f"    {path}: {sys.executable} {__file__} --input {path} {run.target}" for path in found]
    finally:
        for run in running:
            run.process.kill()
    print("\n".join(ended))
    return sound


def minimise(target: str) -> None:
    """Replaces the corpus in the repository by the fewest inputs that reach everything that both corpora reach
    together.
    """
    folder = BUILD / target
    merged, found = folder / "merged", folder / "found"
    for path in (merged, found):
        shutil.rmtree(path, ignore_errors=True)
    merged.mkdir()
    shutil.copytree(folder / "corpus", found)  # where a fuzzer that still runs takes nothing away
    options = ["-merge=1", "-set_cover_merge=1", f"-max_len={TARGETS[target]}"]
    arguments, environment = command(target, *options, merged, found, folder / "seeds")
    subprocess.run(arguments, env=environment, check=True)
    lines = sorted(path.read_bytes().hex() for path in merged.iterdir())
    (CORPUS / f"{target}.txt").write_text("".join(f"{line}\n" for line in lines), "ascii")
    print(f"{target}: {len(lines)} inputs, {sum(map(len, lines)) // 2:,} bytes")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=int, default=60, help="of CPU time, for each target")
    parser.add_argument("--jobs", type=int, default=1, help="targets at once")
    parser.add_argument("--minimise", action="store_true", help="only put what was found out into tests/fuzz/corpus/")
    parser.add_argument("--input", type=Path, help="only run this one input")
    parser.add_argument("targets", nargs="*", choices=[[], *TARGETS], metavar="TARGET", help=", ".join(TARGETS))
    options = parser.parse_args()
    targets = options.targets or list(TARGETS)
    if options.input:
        arguments, environment = command(targets[0], options.input)
        return subprocess.run(arguments, env=environment, check=False).returncode
    if options.minimise:
        for target in targets:
            minimise(target)
        return 0
    return 0 if fuzz_all(targets, options.seconds, options.jobs) else 1


if __name__ == "__main__":
    if "FUZZ_TARGET" in os.environ:
        fuzz(os.environ["FUZZ_TARGET"], sys.argv[1:])
    sys.exit(main())
