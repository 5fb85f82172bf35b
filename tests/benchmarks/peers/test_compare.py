"""A comparison whose servers fail, or that is interrupted, keeps its measurements. No test measures time."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
from typing import TYPE_CHECKING, Any

import pytest

from counterd.bench.connection import LoadError
from peers import clients, compare, servers

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

NAMES = ("counterd", "raw loop", "redis")
SCENARIO = {"name": "1 in flight", "kind": "load", "plan": {"depth": 1, "names": 10}}
FIGURES = {"requests/s": 100.0, "server CPU us": 1.0, "load CPU us": 1.0, "p99 ms": 1.0}

Load = "Callable[[servers.Server, Any], compare.Figures]"


@pytest.fixture
def comparison(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Callable[..., int]]:
    """Runs the command with fake servers and this load, and returns its exit status."""

    @contextlib.contextmanager
    def started(name: str) -> Iterator[servers.Server]:
        yield servers.Server(name, "counter", os.getpid(), 1)

    def run(load: Load, *words: str, **starts: Any) -> int:
        monkeypatch.setattr(compare, "load", load)
        monkeypatch.setattr(servers, "STARTS", {name: lambda _, name=name: started(name) for name in NAMES} | starts)
        monkeypatch.setattr("sys.argv", ["compare.py", "--rounds", "4", "--out", str(tmp_path / "results"), *words])
        with pytest.raises(SystemExit) as ended:
            compare.main()
        return ended.value.code  # type: ignore[return-value]

    (tmp_path / "scenarios.json").write_text(json.dumps([SCENARIO, {**SCENARIO, "name": "64 in flight"}]))
    monkeypatch.setattr(compare, "HERE", tmp_path)
    monkeypatch.setattr(servers, "missing", lambda _: [])
    monkeypatch.setattr(servers, "allow_connections", lambda: None)
    monkeypatch.setattr("os.sched_setaffinity", lambda *_: None)
    monkeypatch.setattr(compare, "INTERRUPTS", [])
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield run
    signal.set_wakeup_fd(-1)
    for number, handler in handlers.items():
        signal.signal(number, handler)


def found(tmp_path: Path) -> list[dict[str, Any]]:
    """The scenarios in the results."""
    (path,) = (tmp_path / "results").glob("*.json")
    return json.loads(path.read_text())["scenarios"]


def test_all_servers_are_measured_and_results_written(comparison: Callable[..., int], tmp_path: Path) -> None:
    comparison(lambda *_: FIGURES)
    for scenario in found(tmp_path):
        assert scenario["rounds"] == {name: [FIGURES] * 4 for name in NAMES}
        assert scenario["failures"] == {}
    assert "## 64 in flight" in (tmp_path / "RESULTS.md").read_text()


@pytest.mark.parametrize("error", [RuntimeError("fell over"), LoadError("fell over"), ConnectionError("fell over")])
@pytest.mark.parametrize("when", [0, 1, 3])  # making the names, the first round, a later one
def test_a_failing_server_loses_only_its_scenario(
    when: int, error: Exception, comparison: Callable[..., int], tmp_path: Path
) -> None:
    calls = itertools.count()

    def load(server: servers.Server, _: Any) -> compare.Figures:
        if server.name == "redis" and next(calls) == when:  # of the first scenario
            raise error
        return FIGURES

    assert comparison(load) == 1
    first, second = found(tmp_path)
    assert (list(first["rounds"]), first["failures"]) == (["counterd", "raw loop"], {"redis": "fell over"})
    assert [len(rounds) for rounds in first["rounds"].values()] == [4, 4]
    assert (list(second["rounds"]), second["failures"]) == (list(NAMES), {})


def test_a_server_that_does_not_start_is_left_out(comparison: Callable[..., int], tmp_path: Path) -> None:
    def broken(_: int) -> Any:
        raise RuntimeError("did not come up")

    assert comparison(lambda *_: FIGURES, "--smoke", redis=broken) == 1
    for scenario in found(tmp_path):
        assert (len(scenario["rounds"]), scenario["failures"]) == (2, {"redis": "did not come up"})


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_keeps_whole_rounds_and_leaves_the_page(
    number: signal.Signals, comparison: Callable[..., int], tmp_path: Path
) -> None:
    (tmp_path / "RESULTS.md").write_text("of a whole comparison")
    calls = itertools.count()

    def load(*_: Any) -> compare.Figures:
        if next(calls) == 3 + 2 * 3 + 1:  # in the third round, after the names were made
            os.kill(os.getpid(), number)
        return FIGURES

    assert comparison(load) == compare.EXIT_INTERRUPTED
    (scenario,) = found(tmp_path)
    assert scenario["rounds"] == {name: [FIGURES] * 2 for name in NAMES}
    assert (tmp_path / "RESULTS.md").read_text() == "of a whole comparison"
    (page,) = (tmp_path / "results").glob("*.md")
    assert "2 rounds, medians" in page.read_text()


def test_an_interrupt_handled_elsewhere_counts(comparison: Callable[..., int], tmp_path: Path) -> None:
    """As in run(), which ends its load and returns its figures."""

    def load(*_: Any) -> compare.Figures:
        previous = signal.signal(signal.SIGINT, lambda *_: None)
        os.kill(os.getpid(), signal.SIGINT)
        signal.signal(signal.SIGINT, previous)
        raise RuntimeError("a load that was cut short")

    assert comparison(load) == compare.EXIT_INTERRUPTED
    assert found(tmp_path) == []


def test_a_partial_comparison_does_not_replace_the_page(comparison: Callable[..., int], tmp_path: Path) -> None:
    comparison(lambda *_: FIGURES, "--only", "64")
    assert [scenario["name"] for scenario in found(tmp_path)] == ["64 in flight"]
    assert not (tmp_path / "RESULTS.md").exists()


def test_a_smoke_run_leaves_out_long_scenarios(comparison: Callable[..., int], tmp_path: Path) -> None:
    scenarios = [{**SCENARIO, "smoke": False}, {**SCENARIO, "name": "64 in flight"}]
    (tmp_path / "scenarios.json").write_text(json.dumps(scenarios))
    comparison(lambda *_: FIGURES, "--smoke")
    assert [scenario["name"] for scenario in found(tmp_path)] == ["64 in flight"]


def test_the_python_clients_can_be_compared_alone() -> None:
    """With the peers' clients only: all rows of that kind, which are named after it."""
    assert {each["kind"] for each in compare.chosen("Python", smoke=False)} == clients.KINDS.keys()
    every = compare.chosen("", smoke=False)
    assert [each for each in every if each["kind"] in clients.KINDS] == compare.chosen("Python", smoke=False)


@pytest.mark.parametrize(
    ("only", "packages"),
    [
        ("Python", ["redis-server"]),
        ("smockron", ["redis-server"]),
        ("sentinel", ["redis-server"]),
        ("beanstalk", ["beanstalkd"]),
        ("64 in flight, 1 thousand names", ["yrmcds", "redis-server", "memcached"]),
        ("", ["yrmcds", "redis-server", "memcached", "beanstalkd"]),
    ],
)
def test_a_part_needs_only_the_packages_of_its_servers(
    only: str, packages: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(servers, "_find", lambda _: None)
    assert servers.missing(compare.chosen(only, smoke=False)) == packages
    monkeypatch.setattr(servers, "_find", lambda program: program)
    assert servers.missing(compare.chosen(only, smoke=False)) == []


def test_an_unknown_scenario_is_an_error(comparison: Callable[..., int]) -> None:
    assert "no scenario has 'nothing'" in str(comparison(lambda *_: FIGURES, "--only", "nothing"))


def test_the_machine_has_all_its_cores_in_the_document(comparison: Callable[..., int], tmp_path: Path) -> None:
    cores = len(os.sched_getaffinity(0))
    comparison(lambda *_: FIGURES, "--smoke")
    (path,) = (tmp_path / "results").glob("*.json")
    assert json.loads(path.read_text())["machine"]["cores"] == str(cores)


def test_without_git_the_commit_is_unknown(comparison: Callable[..., int], tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    comparison(lambda *_: FIGURES, "--smoke")
    (path,) = (tmp_path / "results").glob("*.json")
    assert json.loads(path.read_text())["commit"] == "unknown"
