"""Programs that use the clients have their types: the installed package says that it has some, and they are right."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

USER = Path(__file__).with_name("typed_user.py")


def test_a_program_that_uses_the_clients(tmp_path: Path) -> None:
    """--strict has no use for an ignored error that is none, so the misuses have to be errors."""
    checked = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", "--config-file=", "--cache-dir", tmp_path / "cache", USER],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        timeout=120,
        check=False,
    )
    assert (checked.stdout, checked.returncode) == ("Success: no issues found in 1 source file\n", 0), checked.stderr
