"""The comparison with the baseline: which figures count as worse, are measured again, and are reported. No test
measures time."""

from __future__ import annotations

import json

import pytest

import regress
from micro import figures

ENVIRONMENT = {"architecture": "x86_64", "compiler": "gcc 12"}


def measured(ratios: dict[str, float], instructions: dict[str, float], **changed: str) -> dict:
    return {
        "environment": {**ENVIRONMENT, **changed},
        "processor": "one",
        "reference": regress.reference_mark(),
        "ratios": ratios,
        "instructions": instructions,
    }


BASELINE = measured({"get": 2.0, "noop": 1.0}, {"get": 400.0})


def verdicts(now: dict) -> list[tuple[str, str, str]]:
    return [(row.kind, row.figure, row.verdict) for row in regress.compare(BASELINE, now)]


# ---- comparing ----


@pytest.mark.parametrize(
    ("baseline", "now", "verdict"),
    [
        (100.0, 100.0, regress.OK),
        (100.0, 109.9, regress.OK),
        (100.0, 110.1, regress.WORSE),
        (100.0, 91.0, regress.OK),
        (100.0, 90.0, regress.BETTER),
        (None, 1.0, regress.NO_BASELINE),
        (1.0, None, regress.NOT_MEASURED),
    ],
)
def test_differences_of_more_than_a_tenth_count(baseline, now, verdict):
    assert regress.judge(baseline, now) == verdict


def test_each_figure_is_compared_with_its_baseline():
    now = measured({"get": 2.5, "noop": 1.0}, {"get": 300.0})
    assert verdicts(now) == [
        ("ratios", "get", regress.WORSE),
        ("ratios", "noop", regress.OK),
        ("instructions", "get", regress.BETTER),
    ]


def test_figures_missing_on_one_side_are_marked():
    now = measured({"get": 2.0, "new": 1.0}, {"get": 400.0})
    assert verdicts(now) == [
        ("ratios", "get", regress.OK),
        ("ratios", "noop", regress.NOT_MEASURED),
        ("ratios", "new", regress.NO_BASELINE),
        ("instructions", "get", regress.OK),
    ]


def test_with_another_compiler_only_ratios_are_compared():
    now = measured({"get": 2.5, "noop": 1.0}, {"get": 800.0}, compiler="gcc 14")
    assert verdicts(now) == [
        ("ratios", "get", regress.WORSE),
        ("ratios", "noop", regress.OK),
        ("instructions", "get", regress.NOT_COMPARED),
    ]
    assert regress.differences(BASELINE["environment"], now["environment"]) == ["compiler: gcc 12 then, gcc 14 now"]


def test_the_lowest_of_several_attempts_counts():
    assert regress.lowest([{"a": 2.0, "b": 1.0}, {"a": 1.5, "b": 3.0}]) == {"a": 1.5, "b": 1.0}


# ---- measuring again ----


def again(monkeypatch, now: dict, *attempts: dict[str, float]) -> int:
    """Measures again with these results, and returns how many of them were used."""
    left = list(attempts)
    monkeypatch.setattr(regress, "measure_ratios", lambda _: left.pop(0))
    regress.measure_again(BASELINE, now)
    return len(attempts) - len(left)


def test_good_ratios_are_not_measured_again(monkeypatch):
    assert again(monkeypatch, measured({"get": 2.1, "noop": 1.0}, {"get": 400.0}), {}) == 0


def test_a_ratio_is_measured_until_it_is_good(monkeypatch):
    now = measured({"get": 3.0, "noop": 1.0}, {"get": 400.0})
    assert again(monkeypatch, now, {"get": 2.5, "noop": 1.2}, {"get": 2.1, "noop": 1.2}, {}) == 2
    assert now["ratios"] == {"get": 2.1, "noop": 1.0}


def test_a_ratio_that_stays_worse_is_measured_three_times_more(monkeypatch):
    now = measured({"get": 3.0, "noop": 1.0}, {"get": 400.0})
    assert again(monkeypatch, now, *([{"get": 2.9, "noop": 1.0}] * 5)) == 3
    assert verdicts(now)[0] == ("ratios", "get", regress.WORSE)


def test_instructions_are_not_measured_again(monkeypatch):
    now = measured({"get": 2.0, "noop": 1.0}, {"get": 800.0})
    assert again(monkeypatch, now, {}) == 0
    assert verdicts(now)[2] == ("instructions", "get", regress.WORSE)


# ---- what is said ----


def test_unchanged_figures_pass(capsys):
    assert regress.report(BASELINE, BASELINE) == 0
    assert capsys.readouterr().out.endswith("\nNothing got worse by more than 10%.\n")


@pytest.mark.parametrize(
    ("ratios", "instructions", "said"),
    [
        ({"get": 2.5, "noop": 1.0}, {"get": 400.0}, "FAILED: 1 of 3 figures {}\n  ratios: get\n"),
        ({"get": 2.0, "noop": 1.0}, {"get": 480.0}, "FAILED: 1 of 3 figures {}\n  instructions: get\n"),
        ({"get": 2.0}, {"get": 480.0}, "FAILED: 2 of 3 figures {}\n  ratios: noop\n  instructions: get\n"),
    ],
)
def test_worse_and_missing_figures_fail(capsys, ratios, instructions, said):
    assert regress.report(BASELINE, measured(ratios, instructions)) == 1
    assert capsys.readouterr().out.endswith(said.format("are more than 10% worse, or are missing:"))


def test_the_table_has_both_figures_and_their_ratio(capsys):
    regress.report(BASELINE, measured({"get": 2.5, "noop": 1.0}, {"get": 480.0}))
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["ratios", "get", "2.000", "2.500", "1.25", "WORSE"] in rows
    assert ["instructions", "get", "400.0", "480.0", "1.20", "WORSE"] in rows


def test_better_figures_suggest_a_new_baseline(capsys):
    assert regress.report(BASELINE, measured({"get": 1.0, "noop": 1.0}, {"get": 400.0})) == 0
    assert "`make bench-baseline`" in capsys.readouterr().out


def test_uncompared_figures_are_reported_with_the_reason(capsys):
    assert regress.report(BASELINE, measured(BASELINE["ratios"], {"get": 800.0}, compiler="gcc 14")) == 0
    said = capsys.readouterr().out
    assert "Not compared: 1 instruction counts" in said
    assert "  compiler: gcc 12 then, gcc 14 now\n" in said
    rows = [line.split() for line in said.splitlines()]
    assert ["instructions", "get", "400.0", "800.0", "2.00", "not", "compared"] in rows


def test_another_processor_is_reported(capsys):
    assert regress.report(BASELINE, {**BASELINE, "processor": "two"}) == 0
    assert "The baseline's processor was one, this one is two" in capsys.readouterr().out


def test_failing_figures_suggest_no_new_baseline(capsys):
    assert regress.report(BASELINE, measured({"get": 1.0, "noop": 2.0}, {"get": 400.0})) == 1
    assert "bench-baseline" not in capsys.readouterr().out


# ---- what cannot be found out ----


@pytest.fixture
def command(monkeypatch, tmp_path):
    """The command, with everything but a baseline; it measures BASELINE."""
    monkeypatch.setattr("sys.argv", ["regress.py"])
    monkeypatch.setattr("counterd._core.DEBUG", False)
    monkeypatch.setattr("shutil.which", lambda _: "/usr/bin/valgrind")
    monkeypatch.setattr(regress, "BASELINE", tmp_path / "baseline.json")
    monkeypatch.setattr(regress, "measure", lambda *_: json.loads(json.dumps(BASELINE)))
    return regress.main


def test_the_command_writes_a_baseline_and_compares_with_it(command, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["regress.py", "--write"])
    assert command() == 0
    monkeypatch.setattr("sys.argv", ["regress.py"])
    assert command() == 0
    assert "Nothing got worse" in capsys.readouterr().out


def test_selected_figures_are_written_and_others_kept(command, monkeypatch, capsys):
    regress.BASELINE.write_text(json.dumps(BASELINE))
    monkeypatch.setattr("sys.argv", ["regress.py", "--write", "keep"])
    monkeypatch.setattr(regress, "measure", lambda _, text: measured({text: 1.5}, {text: 50.0}))
    assert command() == 0
    assert json.loads(regress.BASELINE.read_text()) == {
        **BASELINE,
        "ratios": {**BASELINE["ratios"], "keep": 1.5},
        "instructions": {**BASELINE["instructions"], "keep": 50.0},
    }
    monkeypatch.setattr(regress, "measure", lambda _, text: measured({text: 3.0}, {text: 70.0}, compiler="gcc 14"))
    assert command() == 2
    assert "compiler: gcc 12 then, gcc 14 now" in capsys.readouterr().err
    assert json.loads(regress.BASELINE.read_text())["ratios"]["keep"] == 1.5


def test_the_error_without_a_baseline(command, capsys):
    assert command() == 2
    assert "`make bench-baseline` writes it" in capsys.readouterr().err


def test_the_error_with_another_reference_kernel(command, capsys):
    regress.BASELINE.write_text(json.dumps({**BASELINE, "reference": "another"}))
    assert command() == 2
    assert "the reference kernel is not the baseline's" in capsys.readouterr().err


def test_the_error_without_valgrind(command, monkeypatch, capsys):
    monkeypatch.setattr("shutil.which", lambda _: None)
    assert command() == 2
    assert "apt-get install valgrind" in capsys.readouterr().err


def test_the_error_with_a_debug_build(command, monkeypatch, capsys):
    monkeypatch.setattr("counterd._core.DEBUG", True)
    assert command() == 2
    assert "debug build" in capsys.readouterr().err


# ---- the baseline that is kept ----


def test_the_baseline_fits_the_current_figures_and_kernel():
    """After a new operation, or a change of the kernel, it has to be measured again."""
    baseline = json.loads(regress.BASELINE.read_text("utf-8"))
    assert baseline["reference"] == regress.reference_mark()
    assert set(baseline["instructions"]) == set(figures.SMALL)
    assert set(baseline["ratios"]) == {*figures.SMALL, *figures.LARGE}
    assert set(baseline["environment"]) == set(regress.environment())
