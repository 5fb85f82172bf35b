"""Files, mounts and processes that tests leave behind are named at the end, and processes are ended; also after an
interrupt."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from kit.daemon import wait_until
from kit.remains import mounts

ROOT = Path(__file__).parents[2]
SUITE = """
import gc, pathlib, subprocess, tempfile, time
from kit import remains

remains.GRACE_S = 0.1

def test_it():
    subprocess.Popen(["sleep", "1001"], start_new_session=True)
    tempfile.mkdtemp(prefix="forgotten-")

def test_that_waits(short_path):
    process = subprocess.Popen(["sleep", "1002"], start_new_session=True)
    gc.disable()  # Python ignores what is raised in the callbacks of a collection, an interrupt too
    pathlib.Path("begun").touch()
    time.sleep(1000)
"""


@pytest.fixture
def suite(tmp_path: Path) -> list[str | Path]:
    (tmp_path / "test_it.py").write_text(SUITE)
    (tmp_path / "pytest.ini").write_text(f"[pytest]\npythonpath = {ROOT / 'tests'}\n")
    return [sys.executable, "-m", "pytest", "-c", tmp_path / "pytest.ini", "-p", "conftest", tmp_path / "test_it.py"]


@pytest.mark.parametrize("processes", ["0", "1"])
def test_remains_are_named_and_processes_ended(suite: list[str], processes: str) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "tests")}
    done = subprocess.run(
        [*suite, "-n", processes, "-k", "test_it and not waits"],
        env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 1, done.stdout + done.stderr
    assert "1 passed" in done.stdout
    process = re.search(r"left behind:\n  process (\d+): sleep 1001 \n  file .*/forgotten-\w+\n", done.stdout)
    assert process, done.stdout
    wait_until(lambda: not Path("/proc", process[1], "exe").exists(), "it was ended")


@pytest.mark.parametrize(("processes", "number"), [("0", signal.SIGINT), ("1", signal.SIGINT), ("1", signal.SIGTERM)])
def test_remains_are_named_after_an_interrupt(suite: list[str], processes: str, number: int, tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "tests")}
    with subprocess.Popen(
        [*suite, "-n", processes, "-k", "waits"],
        env=environment, cwd=tmp_path, stdout=subprocess.PIPE, text=True, start_new_session=True,
    ) as running:  # fmt: skip
        wait_until((tmp_path / "begun").exists, "the test runs")
        os.killpg(running.pid, number)
        assert running.stdout is not None
        said = running.stdout.read()
    assert running.returncode == pytest.ExitCode.INTERRUPTED
    assert re.search(r"left behind:\n  process \d+: sleep 1002 \n", said), said
    if number == signal.SIGINT:
        assert "file" not in said.partition("left behind:")[2], "fixtures have ended"


def test_mounts_are_found(tmp_path: Path) -> None:
    with Path("/proc/self/mountinfo").open() as table:
        place = table.readline().split()[4]
    assert place in mounts(Path(place))
    assert mounts(tmp_path) == mounts(tmp_path / "other")
