"""The types of the clients are right for programs that use them; and the server's classes satisfy its contract."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize("name", ["typed_user", "typed_contract"])
def test_mypy_accepts_the_typed_programs(name: str, tmp_path: Path) -> None:
    """--strict reports an ignored error that does not occur, so the wrong uses have to be errors."""
    source = Path(__file__).with_name(f"{name}.py")
    checked = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", "--config-file=", "--cache-dir", tmp_path / "cache", source],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        timeout=120,
        check=False,
    )
    assert (checked.stdout, checked.returncode) == ("Success: no issues found in 1 source file\n", 0), checked.stderr
