"""What `make test` shows: the trace of a hanging test, findings of hypothesis, and the progress."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from kit.progress import line

ROOT = Path(__file__).parents[2]
HANGING = """
import asyncio, ctypes, threading, time
import pytest, uvloop
from kit import overdue

overdue.AGAIN_S, overdue.END_S = 0.5, 3
pytestmark = pytest.mark.limit(0.3)

def test_python():
    while True:  # hangs in Python
        True  # hangs in Python

@pytest.fixture
def unending():
    yield
    time.sleep(1000)  # hangs in a fixture

def test_fixture(unending):
    pass

def test_thread():
    thread = threading.Thread(target=time.sleep, args=(1000,), daemon=True)
    thread.start()
    thread.join()  # hangs in a join

def test_asyncio():
    asyncio.run(asyncio.sleep(1000))  # hangs in asyncio

def test_uvloop():
    uvloop.run(asyncio.sleep(1000))  # hangs in uvloop

def test_caught():
    while True:
        try:
            time.sleep(1000)
        except BaseException:
            pass

def test_lock():
    mutex = ctypes.create_string_buffer(64)
    lock = ctypes.PyDLL(None).pthread_mutex_lock  # which keeps the lock of the interpreter
    lock(mutex)
    lock(mutex)

def test_good():
    pass
"""
FINDING = """
import os, time
import pytest
from hypothesis import given, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule
from kit import overdue

overdue.END_S = 1

class Machine(RuleBasedStateMachine):
    @rule(number=st.integers())
    def step(self, number):
        assert number < 1000

TestMachine = Machine.TestCase

@pytest.mark.limit(2)
@given(st.integers(), st.integers())
def test_that_takes_long_to_shrink(one, other):
    if one + other > 3000:
        time.sleep(0.5)
        raise ValueError("too large")

@given(st.integers())
def test_that_ends_the_process(one):
    if one > 1000:
        try:
            raise ValueError("before the end")
        finally:
            os._exit(1) if ENDING.append(one) or len(ENDING) > 1 else None

ENDING = []
"""


def play(folder: Path, text: str, *arguments: str) -> str:
    """Runs a file of tests as `make test` does. Returns pytest's output."""
    (folder / "test_it.py").write_text(text)
    (folder / "pytest.ini").write_text(f"[pytest]\npythonpath = {ROOT / 'tests'}\naddopts = --strict-markers\n")
    command = [sys.executable, "-m", "pytest", "-c", folder / "pytest.ini", "--rootdir", folder, "-p", "conftest"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "tests")}
    done = subprocess.run(
        [*command, *arguments, "test_it.py"], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1, done.stdout + done.stderr
    return done.stdout


def failure_of(said: str, test: str) -> str:
    """Returns what a report has about a test."""
    title = rf"(ERROR at \w+ of )?{test} |(.*\n)+?.* crashed while running 'test_it.py::{test}'"
    return next(part for part in re.split(r"\n_{3,} ", said)[1:] if re.match(title, part))


def test_a_hanging_test_is_shown_with_its_trace_and_others_go_on(tmp_path: Path) -> None:
    said = play(tmp_path, HANGING, "-n", "4")
    places = {"python": "Python", "fixture": "a fixture", "thread": "a join", "asyncio": "asyncio", "uvloop": "uvloop"}
    for test, place in places.items():
        found = failure_of(said, f"test_{test}")
        assert re.search(r"^> .*\n(.*\n)*.*Overdue: not over after 0.3 s", found, re.MULTILINE)
        assert f"# hangs in {place}" in found
    assert "time.sleep" not in failure_of(said, "test_python")
    assert "thread Thread-1 (sleep):" in failure_of(said, "test_thread")
    for test in ("test_caught", "test_lock"):
        found = failure_of(said, test)
        assert "crashed while running" in found
        assert re.search(rf"Timeout .*\n(.*\n)*.* in {test}$", found, re.MULTILINE)
    assert re.search(r"6 failed, 2 passed, .*1 error in", said)


def test_a_hanging_test_is_shown_without_xdist(tmp_path: Path) -> None:
    said = play(tmp_path, HANGING, "-n", "0", "-k", "python or fixture or thread or good")
    assert said.count("Overdue: not over after 0.3 s") >= 3
    assert re.search(r"2 failed, 2 passed, .*1 error in", said)
    assert "FAILED test_it.py::test_python: kit.overdue.Overdue: not over after 0.3 s\n" in said


@pytest.mark.parametrize("processes", ["0", "2"])
def test_a_finding_of_hypothesis_is_shown_before_it_is_shrunk(processes: str, tmp_path: Path) -> None:
    tests = [] if processes != "0" else ["--deselect", "test_it.py::test_that_ends_the_process"]
    said = play(tmp_path, FINDING, "-n", processes, *tests)
    seed = re.search(r"--hypothesis-seed=(\d+)", said)
    assert seed
    found = "hypothesis has found, and now looks for a smaller example of:\n"
    for test, error in (
        ("test_it.py::TestMachine::runTest", "AssertionError: assert "),
        ("test_it.py::test_that_takes_long_to_shrink", "ValueError: too large"),
    ):
        assert re.search(rf"{test}: {found}(.*\n)+?{error}.*\n    to repeat it: @reproduce_failure\(", said)
    assert "state.step(number=1000)" in failure_of(said, "TestMachine.runTest"), "it was made smaller"
    assert "Overdue" in failure_of(said, "test_that_takes_long_to_shrink")
    if processes != "0":
        assert "ValueError: before the end" in failure_of(said, "test_that_ends_the_process")
    again = play(
        tmp_path, FINDING, "-n", "0", "-k", "Machine", "-p", "no:cacheprovider", f"--hypothesis-seed={seed[1]}"
    )
    first = re.search(r"assert (-?\d+) < 1000\n    to repeat", said)
    assert first
    assert f"assert {first[1]} < 1000\n    to repeat" in again, "the seed repeats it"


def test_seeds_differ_and_ci_does_not_fix_them() -> None:
    code = "import conftest, hypothesis; print(hypothesis.settings.default.derandomize)"
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "tests"), "CI": "true"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


def test_the_line_of_progress() -> None:
    running = {"tests/a.py::a": 3.0, "tests/b.py::b": 40.0, "tests/c.py::c": 0.5}
    said = line(18_000, 4_500, 1, 100.0, running)
    assert said == (
        "[ 25 %] 4,500 of 18,000 ended, 1 failed, 100 s, about 300 s left, running: tests/b.py::b (40 s), tests/a.py::a"
    )
    assert line(10, 0, 0, 1.0, {}) == "[  0 %] 0 of 10 ended, 0 failed, 1 s, running: none"
    assert line(0, 0, 0, 3.0, {}) == "collecting the tests, 3 s"
