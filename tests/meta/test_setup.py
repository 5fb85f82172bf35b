"""setup.py reports an unsupported system instead of a traceback."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_an_unsupported_system_gets_an_error() -> None:
    """Such as macOS, which has no os.sched_getaffinity."""
    lacking = "import os, runpy, sys; sys.platform = 'darwin'; del os.sched_getaffinity"
    code = f"import setuptools.command.build_ext, Cython.Build; {lacking}; runpy.run_path('setup.py')"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith("counterd is for Linux, and cannot be built on darwin: run it in a container.")
    assert "Traceback" not in done.stderr
