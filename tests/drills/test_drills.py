"""The drills of docs/operations.md and the soak, with tiny durations: they keep all promises that are not about
time."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.needs("faketime")
def test_all_drills_keep_their_promises() -> None:
    found = subprocess.run(
        [sys.executable, ROOT / "tests" / "drills", "--smoke"],
        stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert (found.returncode, found.stderr) == (0, ""), found.stdout
    operations = (ROOT / "docs" / "operations.md").read_text("utf-8")
    described = re.findall("^### .*", operations.partition("## Drills")[2], re.MULTILINE)
    assert len(described) == 8
    assert len(re.findall("all clients gone", found.stdout)) == 8  # two drains end without, as does the server


def test_the_soak_runs_and_nothing_is_held_afterwards() -> None:
    found = subprocess.run(
        [sys.executable, ROOT / "tests" / "drills" / "soak.py", "--smoke"],
        stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert (found.returncode, found.stderr) == (0, ""), found.stdout
    assert re.search(r"^soak: \d+ periods, steady: rss_mb", found.stdout, re.MULTILINE), found.stdout
    assert "all clients gone" in found.stdout


@pytest.mark.needs("redis-server")
def test_the_demonstration_of_a_cluster_keeps_all_limits() -> None:
    found = subprocess.run(
        [sys.executable, ROOT / "tests" / "drills" / "cluster.py", "--seconds", "2"],
        stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert (found.returncode, found.stderr) == (0, ""), found.stdout
    assert "No limit was exceeded." in found.stdout
