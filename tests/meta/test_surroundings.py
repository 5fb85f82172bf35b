"""No environment variable of the caller reaches the tests, or the processes that they start."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kit import surroundings

ROOT = Path(__file__).parents[2]
SUITE = """
import json, locale, os, pathlib, subprocess, sys, tempfile, time

def test_it(tmp_path, short_path):
    code = "import json, os; print(json.dumps(dict(os.environ)))"
    found = json.loads(subprocess.check_output([sys.executable, "-c", code], cwd="/"))
    mask = os.umask(0)
    os.umask(mask)
    found["found"] = [mask, time.tzname, tempfile.gettempdir(), str(tmp_path), str(short_path)]
    pathlib.Path(FOUND).write_text(json.dumps(found))
"""
JUNK = {
    "COUNTERD_URL": "counterd://192.0.2.1", "COUNTERD_ADMIN": "http://192.0.2.1", "COUNTERD_ADMIN_TOKEN": "x",
    "BEANSTALK_URL": "192.0.2.1", "http_proxy": "http://192.0.2.1:1", "NO_COLOR": "1", "COLUMNS": "20", "LINES": "3",
    "LANG": "C", "LC_ALL": "C", "TZ": "Asia/Tokyo", "TERM": "dumb", "PYTHONUNBUFFERED": "1", "PYTHONHASHSEED": "0",
    "NOTIFY_SOCKET": "/nowhere", "LISTEN_FDS": "1", "PYTEST_ADDOPTS": "-q", "PYTEST_XDIST_WORKER": "gw0", "JUNK": "1",
}  # fmt: skip


@pytest.mark.parametrize("processes", ["0", "1"])
def test_the_callers_environment_does_not_reach_the_tests(processes: str, tmp_path: Path) -> None:
    folder = tmp_path / f"a folder with a space, whose name is so long that no socket has room for it {'x' * 100}"
    folder.mkdir()
    (tmp_path / "test_it.py").write_text(SUITE.replace("FOUND", repr(str(tmp_path / "found"))))
    (tmp_path / "pytest.ini").write_text(f"[pytest]\npythonpath = {ROOT / 'tests'}\n")
    command = [sys.executable, "-m", "pytest", "-c", tmp_path / "pytest.ini", "-p", "conftest", "-n", processes]
    environment = {"PATH": os.environ["PATH"], "HOME": str(folder), "TMPDIR": str(folder), **JUNK}
    environment["PYTHONPATH"] = str(ROOT / "tests")
    done = subprocess.run(
        [*command, tmp_path / "test_it.py"], env=environment, umask=0o077, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "found").read_text())
    mask, zone, place, path, short = found.pop("found")
    assert (mask, zone) == (0o022, ["UTC", "UTC"])
    assert surroundings.FOLDER.fullmatch(Path(place).name)
    assert not Path(place).exists(), "it is gone after the tests"
    assert path.startswith(f"{place}/t/")
    assert Path(short).parent == Path(place)
    assert found.pop("HOME") == f"{place}/home"
    assert found.pop("TMPDIR") == place
    assert {name: found.pop(name) for name in surroundings.FIXED} == surroundings.FIXED
    assert {name for name in found if not name.startswith("PYTEST_")} <= surroundings.KEPT | {"LINES", "COLUMNS"}
    assert found.get("COLUMNS", "80") == "80"
    assert list(folder.iterdir()) == []
