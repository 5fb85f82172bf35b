"""The check before the build lists missing programs and the packages that have them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

PREFLIGHT = Path(__file__).parents[2] / "tools" / "preflight.sh"


def preflight(**environment: str) -> tuple[int, str]:
    done = subprocess.run(
        ["sh", PREFLIGHT], env={**os.environ, **environment}, stderr=subprocess.PIPE, text=True, check=False
    )
    return done.returncode, done.stderr


def fake_python(tmp_path: Path, script: str) -> str:
    """A program that stands for python3."""
    path = tmp_path / "python3"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return str(path)


def test_a_complete_machine_passes_silently():
    assert preflight(PYTHON=sys.executable) == (0, "")


def test_a_missing_python_is_reported():
    assert preflight(PYTHON="python-of-nowhere") == (
        1,
        "counterd: no python-of-nowhere; on Debian or Ubuntu: apt-get install python3 python3-venv python3-dev\n",
    )


def test_a_missing_python_and_compiler_are_reported_together():
    status, text = preflight(PYTHON="python-of-nowhere", CC="cc-of-nowhere")
    assert (status, text.count("apt-get install")) == (1, 2)
    assert text.endswith("no C compiler (cc-of-nowhere); on Debian or Ubuntu: apt-get install build-essential\n")


def test_a_missing_compiler_is_reported():
    assert preflight(PYTHON=sys.executable, CC="cc-of-nowhere") == (
        1,
        "counterd: no C compiler (cc-of-nowhere); on Debian or Ubuntu: apt-get install build-essential\n",
    )


def test_a_missing_c_library_is_reported():
    status, text = preflight(PYTHON=sys.executable, CC="false")
    assert (status, text.split("; ")[1]) == (1, "on Debian or Ubuntu: apt-get install libc6-dev\n")


def test_a_missing_venv_and_headers_are_reported_together(tmp_path):
    python = fake_python(tmp_path, 'case "$2" in *ensurepip*) exit 1;; *sysconfig*) echo /nowhere;; esac; exit 0')
    status, text = preflight(PYTHON=python)
    assert status == 1
    assert "has no venv module; on Debian or Ubuntu: apt-get install python3-venv\n" in text
    assert "no header /nowhere/Python.h; on Debian or Ubuntu: apt-get install python3-dev\n" in text


def test_an_old_python_is_reported(tmp_path):
    python = fake_python(tmp_path, 'case "$1" in --version) echo Python 3.9.1;; *) exit 1;; esac')
    assert preflight(PYTHON=python) == (
        1,
        "counterd: Python 3.9.1 is too old, 3.10 or newer is needed (make PYTHON=python3.11 ...)\n",
    )
