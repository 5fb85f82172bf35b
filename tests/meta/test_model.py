"""The formal models, in their short form: they hold, and a defect makes each fail."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.needs("spin", "gcc")
def test_the_models_hold_and_a_defect_of_each_is_found() -> None:
    found = subprocess.run(
        [sys.executable, ROOT / "tools" / "model.py", "--short"],
        stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=280, check=False,
    )  # fmt: skip
    assert (found.returncode, found.stderr) == (0, ""), found.stdout
    assert re.search(r"^model: 6 that hold, 6 that fail, 0 otherwise", found.stdout, re.MULTILINE), found.stdout


def test_functions_named_by_the_models_exist() -> None:
    """Those in the README that the models follow."""
    readme = (ROOT / "docs" / "model" / "README.md").read_text("utf-8")
    names = (
        "_core.pyx", "engine/connections.pxd", "engine/fair.pxd", "engine/idle_ring.pxd", "engine/permits.pxd",
        "engine/table.pxd", "cluster/lease_policy.py", "protocols/counter/_charges.pxd",
        "protocols/counter/_counters.pxd", "protocols/counter/_session.pyx", "protocols/counter/_shares.pxd",
        "protocols/counter/_resumptions.pxd", "protocols/counter/_store.pyx", "protocols/counter/_takes.pxd",
    )  # fmt: skip
    sources = [(ROOT / "src" / "counterd" / name).read_text("utf-8") for name in names]
    script = (ROOT / "src" / "counterd" / "cluster" / "authority.lua").read_text("utf-8")
    model = "".join(path.read_text("utf-8") for path in (ROOT / "docs" / "model").glob("*.pml"))
    rows = re.findall(r"^\| `(\w+)` \| `(?:\w+\.)?(\w+)`", readme, re.MULTILINE)
    assert len(rows) >= 20
    for modelled, function in rows:
        assert re.search(rf"^(inline|proctype) {modelled}\(", model, re.MULTILINE), modelled
        found = [re.search(rf"^ *(?:cp?)?def .*\b{function}\(", source, re.MULTILINE) for source in sources]
        assert any(found) or f"\nlocal function {function}(" in script, function
