"""Daemons that share limits while servers and daemons fail, for a few seconds."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

DRILL = Path(__file__).parent / "shared.py"


@pytest.mark.needs("redis-server")
def test_no_limit_is_exceeded_and_everything_comes_back() -> None:
    found = subprocess.run(
        [sys.executable, DRILL, "--seconds", "8", "--seed", "5"],
        stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert (found.returncode, found.stderr) == (0, ""), found.stdout
    assert "violation" not in found.stdout
    assert "faults" in found.stdout
