"""What is in deploy/ is right as far as that can be seen without the systems it is for."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SYSTEMD = ROOT / "deploy" / "systemd"
PROGRAM = "/opt/counterd/bin/counterd"
EXPOSURE_MAX = 2.0


@pytest.fixture
def analyze() -> str:
    program = shutil.which("systemd-analyze")
    if program is None:
        reason = "no systemd-analyze; on Debian or Ubuntu: apt-get install systemd"
        if os.environ.get("CI"):
            pytest.fail(reason)
        pytest.skip(reason)
    return program


# ---- systemd ----


def test_systemd_understands_the_units(analyze: str, tmp_path: Path) -> None:
    units = []
    for unit in (SYSTEMD / "counterd.service", SYSTEMD / "counterd.socket"):
        units.append(tmp_path / unit.name)
        units[-1].write_text(unit.read_text("utf-8").replace(PROGRAM, "/bin/true"))  # it has to be there
    done = subprocess.run([analyze, "verify", "--man=no", *units], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_the_service_may_do_little(analyze: str) -> None:
    command = [analyze, "security", "--offline=true", "--no-pager", SYSTEMD / "counterd.service"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    exposure = re.search(r"Overall exposure level for counterd\.service: ([0-9.]+)", done.stdout)
    assert exposure, done.stdout + done.stderr
    assert float(exposure[1]) < EXPOSURE_MAX
