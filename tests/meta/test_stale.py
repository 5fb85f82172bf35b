"""tools/stale.sh removes exactly those modules from a build whose source is gone."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "tools" / "stale.sh"


def test_modules_without_source_are_removed(tmp_path: Path) -> None:
    built = tmp_path / "build" / "release" / "lib.linux" / "counterd"
    kept = {"_utility.cpython-311-x86_64.so", "engine/_here.cpython-311-x86_64.so", "admin/dashboard.html"}
    for name in (*kept, "engine/_gone.cpython-311-x86_64.so", "_gone.cpython-310-x86_64.so", "engine/gone.py"):
        (built / name).parent.mkdir(parents=True, exist_ok=True)
        (built / name).touch()
    source = tmp_path / "src" / "counterd" / "engine" / "_here.pyx"
    source.parent.mkdir(parents=True)
    source.touch()
    (tmp_path / "tools").mkdir()
    subprocess.run(["sh", shutil.copy(SCRIPT, tmp_path / "tools")], check=True)
    assert {path.relative_to(built).as_posix() for path in built.rglob("*") if path.is_file()} == kept


def test_a_tree_without_a_build_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "tools").mkdir()
    done = subprocess.run(["sh", shutil.copy(SCRIPT, tmp_path / "tools")], check=True, capture_output=True)
    assert (done.stdout, done.stderr) == (b"", b"")
