"""`make prove` runs every proof, ends one that takes too long, and shows all results in one table."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def prove(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The command, with three short proofs, logs in tmp_path and its own page."""
    spec = importlib.util.spec_from_file_location("prove", ROOT / "tools" / "prove.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "prove", module)
    spec.loader.exec_module(module)
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- what make prove wrote -->\nold\n<!-- end -->\nafter\n")
    proofs = (
        module.Proof("good", 1, "echo 3 rounds; echo 12 of {seed}", r"\d+ of \d+"),
        module.Proof("bad", 1, "echo nothing; exit 3", r"rounds"),
        module.Proof("long", 0, "echo 1 of 9; sleep 600", r"\d+ of \d+"),
    )
    for name, value in (("PROOFS", proofs), ("LOGS", tmp_path / "logs"), ("PAGE", page)):
        monkeypatch.setattr(module, name, value)
    return module


def run(prove: Any, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["prove.py", *arguments])
    return prove.main()


def test_all_proofs_run_and_one_table_has_the_results(
    prove: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(prove, monkeypatch, "--seed", "44", "--write") == 1
    table = (prove.LOGS / "summary.md").read_text()
    rows = [re.split(r" *\| *", row)[2:5:2] for row in table.splitlines()[4:]]
    assert rows == [["passed", "12 of 44"], ["FAILED, status 3", ""], ["not over after 0 minutes", "1 of 9"]]
    assert ", seed 44:" in table.splitlines()[0]
    assert table in capsys.readouterr().out
    assert prove.PAGE.read_text() == f"before\n<!-- what make prove wrote -->\n\n{table}\n<!-- end -->\nafter\n"


def test_selected_proofs_run(prove: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    before = prove.PAGE.read_text()
    assert run(prove, monkeypatch, "--only", "good") == 0
    assert [path.name for path in prove.LOGS.glob("*.log")] == ["good.log"]
    assert prove.PAGE.read_text() == before


def test_an_unknown_proof_is_an_error(
    prove: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        run(prove, monkeypatch, "--only", "good,bed")
    assert "no proof bed; there are good, bad, long" in capsys.readouterr().err


def test_scripts_and_targets_of_proofs_exist() -> None:
    text = (ROOT / "tools" / "prove.py").read_text("utf-8")
    makefile = (ROOT / "Makefile").read_text("utf-8")
    scripts, targets = re.findall(r"\{python\} (\S+?)\"", text), re.findall(r"\bmake ([a-z-]+)", text)
    assert scripts
    assert [script for script in scripts if not (ROOT / script).exists()] == []
    assert [target for target in targets if not re.search(rf"^{target}:", makefile, re.MULTILINE)] == []


def test_the_page_has_a_place_for_the_table_and_names_each_target() -> None:
    page = (ROOT / "docs" / "reliability.md").read_text("utf-8")
    assert page.count("<!-- what make prove wrote -->") == 1
    assert page.count("<!-- end -->") == 1
