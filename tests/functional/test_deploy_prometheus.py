"""The files for Prometheus and Grafana: the alerts fire correctly, and every metric in both exists."""

from __future__ import annotations

import json
import re
import subprocess
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from kit import daemon, gates, needs

DEPLOY = Path(__file__).parents[2] / "deploy"
ALERTS = DEPLOY / "prometheus" / "alerts.yml"
BOARD = DEPLOY / "grafana" / "counterd.json"
# All protocols, so that the metrics of each are there.
SETTINGS = {
    "beanstalk.enable": "true",
    "beanstalk.bind": "127.0.0.1",
    "beanstalk.port": "0",
    "throttr.enable": "true",
    "throttr.bind": "127.0.0.1",
    "throttr.port": "0",
    "sentinel.enable": "true",
    "sentinel.bind": "127.0.0.1",
    "sentinel.port": "0",
    "smockron.enable": "true",
    "smockron.bind": "127.0.0.1",
    "smockron.port": "0",
    "smockron.control_port": "0",
    "cluster.url": "redis://127.0.0.1:1",  # where nobody listens
    "cluster.prefix": "shared:",
    "admin.enable": "true",
    "admin.bind": "127.0.0.1:0",
}
MADE_BY_PROMETHEUS = {"up"}
METRIC = re.compile(r"\b(?:counterd|process)_[a-z_]+\b|\bup\b")
LABELS = re.compile(r"\b((?:counterd|process)_[a-z_]+)\{([^}]*)\}")


def promtool(*arguments: str | Path) -> None:
    done = subprocess.run(
        [needs.path("promtool"), *arguments],
        capture_output=True,
        text=True,
        timeout=daemon.PATIENCE,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def panels(board: dict[str, Any]) -> list[dict[str, Any]]:
    return [panel for panel in board["panels"] if panel["type"] != "row"]


def expressions() -> dict[str, list[str]]:
    """The queries, each with its place in the file."""
    board = json.loads(BOARD.read_text("utf-8"))
    found = {panel["title"]: [target["expr"] for target in panel["targets"]] for panel in panels(board)}
    found |= {one["name"]: [one.get("expr", "")] for one in board["annotations"]["list"]}
    found |= {one["name"]: [one.get("definition", "")] for one in board["templating"]["list"]}
    return found | {"alerts": re.findall(r"expr:((?: .*\n|>-\n|\n? {10}.*\n)+)", ALERTS.read_text("utf-8"))}


@pytest.mark.needs("promtool")
def test_the_alerts_pass_their_tests_in_promtool() -> None:
    promtool("check", "rules", ALERTS)
    promtool("test", "rules", ALERTS.with_name("alerts_test.yml"))


def test_every_alert_is_tested_and_described() -> None:
    text = ALERTS.read_text("utf-8")
    names = re.findall(r"- alert: (\w+)", text)
    tested = re.findall(r"- alertname: (\w+)", ALERTS.with_name("alerts_test.yml").read_text("utf-8"))
    assert len(names) == len(set(names)) == text.count("summary: ") == text.count("description: ")
    assert len(re.findall(r"severity: (?:critical|warning)\n", text)) == len(names)
    assert tested == names
    assert len(expressions()["alerts"]) == len(names)
    runbook = (DEPLOY.parent / "docs" / "operations.md").read_text("utf-8")
    assert [name for name in names if f"\n### {name}\n" not in runbook] == []


def test_every_metric_and_every_label_exists(tmp_path: Path) -> None:
    with daemon.running(tmp_path, {**SETTINGS, "smockron.rules": gates.write_rules(tmp_path)}) as running:
        (address,) = running.served("admin listens on")
        running.addresses = running.served("counter listens on")
        with running.client() as client:
            client.acquire("anything", 1, maximum=1)
        with urllib.request.urlopen(f"http://{address.host}:{address.port}/metrics", timeout=daemon.PATIENCE) as answer:
            served = answer.read().decode()
    types = dict(re.findall(r"^# TYPE (\S+) (\S+)$", served, re.MULTILINE))
    names = {name for name, kind in types.items() if kind != "histogram"}
    names |= {
        f"{name}_{part}" for name, kind in types.items() if kind == "histogram" for part in ("bucket", "sum", "count")
    }
    labels: dict[str, set[str]] = {}
    for name, inside in re.findall(r"^([a-z_]+)\{(.*)\} ", served, re.MULTILINE):
        labels.setdefault(name, {"instance", "job"}).update(re.findall(r'(\w+)="', inside))
    for place, queries in expressions().items():
        for query in queries:
            assert set(METRIC.findall(query)) <= names | MADE_BY_PROMETHEUS, place
            for name, inside in LABELS.findall(query):
                assert set(re.findall(r"(\w+)!?[=~]", inside)) <= labels.get(name, {"instance", "job"}), (place, name)


@pytest.mark.needs("promtool")
def test_every_query_of_the_grafana_dashboard_parses(tmp_path: Path) -> None:
    board = json.loads(BOARD.read_text("utf-8"))
    queries = [target["expr"] for panel in panels(board) for target in panel["targets"]]
    queries += [one["expr"] for one in board["annotations"]["list"] if "expr" in one]
    filled = [re.sub(r"\$__\w+", "5m", query).replace("$instance", ".*").replace("$room", ".*") for query in queries]
    rules = [{"record": f"query_{number}", "expr": query} for number, query in enumerate(filled)]
    path = tmp_path / "rules.yml"
    path.write_text(json.dumps({"groups": [{"name": "board", "rules": rules}]}), "utf-8")
    promtool("check", "rules", path)


def test_the_grafana_dashboard_can_be_imported() -> None:
    board = json.loads(BOARD.read_text("utf-8"))
    assert [one["name"] for one in board["templating"]["list"]] == ["datasource", "instance", "protocol"]
    assert board["id"] is None
    numbers = [panel["id"] for panel in board["panels"]]
    assert len(numbers) == len(set(numbers))
    taken = set()
    for panel in board["panels"]:
        box = panel["gridPos"]
        squares = {(box["x"] + x, box["y"] + y) for x in range(box["w"]) for y in range(box["h"])}
        assert not squares & taken, panel["title"]
        assert box["x"] + box["w"] <= 24
        taken |= squares
    for panel in panels(board):
        assert panel["datasource"]["uid"] == "${datasource}"
        assert panel["description"].endswith(".")
        assert panel["targets"]


@pytest.mark.parametrize(
    "prefix", ["counterd_counters", "counterd_throttr_", "counterd_sentinel_", "counterd_beanstalk_"]
)
def test_the_grafana_dashboard_shows_metrics_of_each_protocol(prefix: str) -> None:
    shown = {where: queries for where, queries in expressions().items() if where != "alerts"}
    assert any(prefix in query for queries in shown.values() for query in queries)
