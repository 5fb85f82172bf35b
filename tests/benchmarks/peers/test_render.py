"""The page of a comparison: promises, ratios, tables and the chart."""

from __future__ import annotations

import copy
import json
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest

from peers import compare, render, servers

SCENARIOS = json.loads((Path(compare.__file__).parent / "scenarios.json").read_text("utf-8"))
PROMISES = json.loads(render.PROMISES.read_text("utf-8"))


def figures(rate: float) -> dict[str, float]:
    times = {"server CPU us": 1e6 / rate, "load CPU us": 0.1, "p99 ms": 1.0, "p99.9 ms": 2.0, "others max ms": 3.0}
    waits = {"p99 us": 60.0, "grant CPU us": 20.0, "acquire CPU us": 10.0, "load %": 99.0}
    return {"requests/s": rate, "calls/s": rate, **times, **waits, "bytes each": 90.0, "asked/s": 5.0}


def document(**rates: list[float]) -> dict[str, Any]:
    """Results in which each scenario has these rates a round, by server."""
    rounds = {name.replace("_", " "): [figures(rate) for rate in values] for name, values in rates.items()}
    promised = {promise["scenario"] for promise in PROMISES}
    loads = ("load", "open")
    names = [each["name"] for each in SCENARIOS if each["kind"] in loads or each["name"] in promised]
    return {
        "started": "2026-01-02T03:04:05+00:00",
        "commit": "abc1234",
        "machine": {"cpu": "a | b"},
        "versions": {"redis": "7"},
        "cores": {"server": 0, "load": 1},
        "scenarios": [
            {"name": name, "rounds": rounds, "medians": compare.medians(rounds), "failures": {}} for name in names
        ],
    }


@pytest.fixture
def good() -> dict[str, Any]:
    slow = {
        name: [10.0] * 3
        for name in ("redis", "memcached", "yrmcdsd", *servers.SCRIPTED, *servers.QUEUES, *servers.MASTERS)
    }
    return document(counterd=[1000.0] * 3, raw_loop=[1000.0] * 3, **slow)


def test_a_ratio_is_the_median_of_the_rounds_ratios() -> None:
    """Not the ratio of the medians: here those are equal."""
    found = document(counterd=[100.0, 200.0, 300.0], raw_loop=[300.0, 200.0, 100.0])
    found["scenarios"][0]["rounds"]["counterd"][1] = figures(150.0)
    (first, *_) = render.verdicts(found)
    assert first.promise["against"] == "raw loop"
    assert first.ratio == pytest.approx(0.75)


def test_a_ratio_between_scenarios_is_that_of_the_medians(good: dict[str, Any]) -> None:
    """They may have different numbers of rounds after an interrupt."""
    number = next(i for i, each in enumerate(PROMISES) if each.get("against") in {one["name"] for one in SCENARIOS})
    few = next(each for each in good["scenarios"] if each["name"] == PROMISES[number]["scenario"])
    few["rounds"] = {"counterd": [figures(rate) for rate in (100.0, 900.0)]}
    assert render.verdicts(good)[number].ratio == pytest.approx(0.5)


def test_fulfilled_promises_hold(good: dict[str, Any]) -> None:
    good["scenarios"][2]["rounds"]["counterd"] = [{**figures(1e9), "load CPU us": 1e-4}] * 3
    found = render.verdicts(good)
    assert [verdict.word() for verdict in found if verdict.ratio is None] == []
    assert render.promises_hold(good)


@pytest.mark.parametrize("number", range(len(PROMISES)))
def test_every_promise_can_be_missed(good: dict[str, Any], number: int) -> None:
    promise = PROMISES[number]
    scenario = next(each for each in good["scenarios"] if each["name"] == promise["scenario"])
    wrong = copy.deepcopy(scenario["rounds"]["counterd"])
    for each in wrong:
        each[promise["figure"]] *= 1e-6 if "at least" in promise else 1e6
    scenario["rounds"] = {**scenario["rounds"], "counterd": wrong}
    assert render.verdicts(good)[number].word() == "**missed**"
    assert not render.promises_hold(good)


def test_a_figure_can_be_promised_by_itself(good: dict[str, Any]) -> None:
    number = next(i for i, each in enumerate(PROMISES) if "against" not in each)
    promise = PROMISES[number]
    scenario = next(each for each in good["scenarios"] if each["name"] == promise["scenario"])
    scenario["rounds"] = {"counterd": [{**figures(1.0), promise["figure"]: value} for value in (1.0, 2.0, 90.0)]}
    assert render.verdicts(good)[number].ratio == 2.0


def test_an_aim_is_stricter_than_a_promise(good: dict[str, Any]) -> None:
    good["scenarios"][0]["rounds"] = {**good["scenarios"][0]["rounds"], "counterd": [figures(920.0)] * 3}
    assert render.verdicts(good)[0].word() == "holds, aim missed"


def test_unmeasured_promises_are_marked(good: dict[str, Any]) -> None:
    del good["scenarios"][0]
    assert render.verdicts(good)[0].word() == "not measured"


def test_every_promise_is_about_something_that_is_measured() -> None:
    names = {scenario["name"]: scenario for scenario in SCENARIOS}
    for promise in PROMISES:
        scenario = names[promise["scenario"]]
        peers = {*scenario.get("servers", servers.STARTS), *names, "server CPU us", "acquire CPU us"}
        assert promise.get("against") in {None, *peers}
        assert len({"at least", "at most"} & promise.keys()) == 1
        assert "counterd" in scenario.get("servers", servers.STARTS)


def test_every_scenario_can_be_played() -> None:
    for scenario in SCENARIOS:
        if scenario["kind"] in ("load", "open"):
            assert compare.make_plan(scenario, 1.0).duration == scenario["plan"].get("duration", 1.0)
        elif scenario["kind"] != "start":
            assert callable(compare.edge_of(scenario))
            assert scenario["count"] > 0


def test_the_page_has_a_table_a_scenario_and_the_chart(good: dict[str, Any], tmp_path: Path) -> None:
    render.write(good, tmp_path / "RESULTS.md")
    text = (tmp_path / "RESULTS.md").read_text("utf-8")
    for scenario in good["scenarios"]:
        assert f"## {scenario['name'][0].upper()}{scenario['name'][1:]}\n" in text
    assert "| redis | 10 |" in text
    assert "2026-01-02, commit abc1234" in text
    rows = [line for line in text.splitlines() if line.startswith("|")]
    assert all(line.endswith("|") for line in rows)
    assert "](RESULTS.svg)" in text
    chart = ET.fromstring((tmp_path / "RESULTS.svg").read_text("utf-8"))
    assert chart.tag.endswith("svg")


@pytest.mark.parametrize("failed", ["counterd", "raw loop", "redis"])
def test_a_server_that_failed_is_named_and_the_others_are_shown(
    failed: str, good: dict[str, Any], tmp_path: Path
) -> None:
    for scenario in good["scenarios"]:
        for part in ("rounds", "medians"):
            scenario[part] = {name: found for name, found in scenario[part].items() if name != failed}
        scenario["failures"] = {failed: "it\nfell over"}
    render.write(good, tmp_path / "RESULTS.md")
    text = (tmp_path / "RESULTS.md").read_text("utf-8")
    assert text.count(f"**{failed} failed**: it fell over\n") == len(good["scenarios"])
    assert "| memcached | 10 |" in text
    assert ("](RESULTS.svg)" in text) == (failed != "raw loop"), "all bars are relative to that"


def test_a_scenario_without_figures_has_no_table(good: dict[str, Any], tmp_path: Path) -> None:
    good["scenarios"] = [{**good["scenarios"][-1], "rounds": {}, "medians": {}, "failures": {"counterd": "gone"}}]
    render.write(good, tmp_path / "part.md")
    assert (tmp_path / "part.md").read_text("utf-8").rstrip().endswith("**counterd failed**: gone")
    assert not (tmp_path / "part.svg").exists()
