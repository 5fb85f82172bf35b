"""The command `counterbench` as a process: options, exit status, output and files."""

from __future__ import annotations

import contextlib
import csv
import json
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from counterd.protocols.sentinel.rules import parse_rules
from kit.certificates import server_context
from kit.daemon import running, wait_until
from kit.scripted.counter import Server

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kit.certificates import Files


def counterbench(*words: object, code: str | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "counterd.cli.bench"] if code is None else [sys.executable, "-c", code]
    return subprocess.run(
        [*command, *map(str, words)], capture_output=True, text=True, timeout=60, check=False, stdin=subprocess.DEVNULL
    )


@pytest.fixture(scope="module")
def port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    with running(tmp_path_factory.mktemp("daemon")) as daemon:
        yield daemon.address.port


def test_a_run_prints_its_results(port: int) -> None:
    found = counterbench("-p", port, "-n", "2k", "-r", 100, "-c", 5)
    assert (found.returncode, found.stderr) == (0, "")
    for word in ("throughput", "2,000 answered", "granted", "released", "p99.9", "latency", "errors"):
        assert word in found.stdout


def test_quiet_prints_one_line(port: int) -> None:
    found = counterbench("-p", port, "-n", 500, "-q", "-P", 5, "--name-size", "1K", "--verify")
    assert found.returncode == 0
    assert found.stdout.startswith("counter acquire-release")
    assert "requests per second" in found.stdout
    assert found.stdout.endswith(", verified\n")
    assert found.stdout.count("\n") == 1


def test_grants_and_their_fairness_are_printed(port: int) -> None:
    """For a name that is nearly always in use."""
    found = counterbench("-p", port, "-n", "2k", "-c", 4, "--maximum", 1, "--hold", "fixed:1ms", "--threads", 2)
    assert found.returncode == 0
    assert re.search(r"/s were granted, the others were refusals or releases", found.stdout)
    assert re.search(r"fairness +a connection was granted [0-9]+ to [0-9]+, median [0-9]+: ", found.stdout)


def test_a_run_can_be_repeated(port: int, tmp_path: Path) -> None:
    found = counterbench("-p", port, "-n", 500, "-q", "--repeat", 3, "--json", tmp_path / "r.json")
    assert found.returncode == 0
    assert found.stdout.count("requests per second") == 3
    assert found.stdout.splitlines()[-1].startswith("median of 3 runs: ")
    assert json.loads((tmp_path / "r.json").read_text())["search"] == {"repeat": 3}


def test_rules_are_printed_for_a_load() -> None:
    found = counterbench("rules", "-r", 5, "--maximum", "2k")
    assert (found.returncode, found.stderr) == (0, "")
    rules = parse_rules(found.stdout)
    assert ([rule.count for rule in rules.flows], len(rules.params)) == ([2000] * 10, 1)
    found = counterbench("rules", "--protocol", "smockron", "--maximum", "2k")
    assert json.loads(found.stdout)["counterbench"] == {"rate": "2000/sec", "burst": 2000}
    assert counterbench("rules", "-r", "10k").stderr.endswith("there can be at most 8192 flows of a kind, not 10000\n")


def test_a_load_of_jobs(tmp_path: Path) -> None:
    settings = {"beanstalk.enable": "true", "beanstalk.port": "0", "beanstalk.bind": "127.0.0.1"}
    with running(tmp_path, settings) as daemon:
        there = ("--protocol", "beanstalk", "-p", daemon.address_of("beanstalk").port)
        found = counterbench(*there, "-n", "3k", "-P", 5, "--verify", "--json", tmp_path / "r.json")
        assert (found.returncode, found.stderr) == (0, "")
        for word in ("beanstalk cycle, 50 connections", "bodies of 100 B", "no job was lost", "inserted", "deleted"):
            assert word in found.stdout
        words = ("-t", "fan", "--producers", 2, "--delay", "1s", "--value-size", 30)
        found = counterbench(*there, *words, "-n", 100, "-P", 50, "-q")
        assert found.stdout.startswith(
            "beanstalk fan, 502 connections, 50 in flight, bodies of 30 B, 2 producers, delayed 1.00 s: "
        )
        assert counterbench(*there, "--delay", "1500ms").stderr.endswith("a delay must be whole seconds, not 1.5\n")


def test_all_files_are_written(port: int, tmp_path: Path) -> None:
    files = {kind: tmp_path / f"run.{kind}" for kind in ("json", "csv", "hdr", "html")}
    words = [word for kind, path in files.items() for word in (f"--{kind}", path)]
    found = counterbench("-p", port, "--duration", "1.2s", "--rate", "2k", *words)
    assert (found.returncode, found.stderr) == (0, "")
    document = json.loads(files["json"].read_text())
    (run,) = document["runs"]
    assert 2399 <= run["requests"] <= 2400
    assert sum(moment["requests"] for moment in run["series"]) == run["requests"]
    assert run["options"]["rate"] == 2000
    assert document["machine"]["kernel"]
    assert document["command"].startswith(f"counterbench -p {port} --duration 1.2s --rate 2k --json ")
    assert run["server"]["memory"] > 1 << 20
    assert run["grants"]["least"] <= run["outcomes"]["granted"] / 50 <= run["grants"]["most"]
    (row,) = csv.DictReader(files["csv"].read_text("utf-8").splitlines())
    assert int(row["requests"]) == run["requests"]
    assert "Percentile" in files["hdr"].read_text()
    assert "<svg" in files["html"].read_text()


def test_two_runs_are_compared(port: int, tmp_path: Path) -> None:
    for name in ("before", "after"):
        assert counterbench("-p", port, "-n", 300, "-q", "--json", tmp_path / f"{name}.json").returncode == 0
    page = tmp_path / "page.html"
    found = counterbench("compare", tmp_path / "before.json", tmp_path / "after.json", "--html", page)
    assert found.returncode == 0
    assert "before" in found.stdout
    assert "after" in found.stdout
    assert "x" in found.stdout
    assert "<svg" in page.read_text()


def test_a_search_and_a_scan(port: int, tmp_path: Path) -> None:
    path = tmp_path / "found.json"
    found = counterbench("-p", port, "--find-max", "p99<5s", "--duration", "100ms", "-c", 2, "--json", path)
    assert found.returncode == 0
    assert "p99<5s holds up to" in found.stdout
    labels = {run["label"] for run in json.loads(path.read_text())["runs"]}
    assert len(labels) == 1, "what is loaded, and not the rates"
    assert found.stdout.startswith(f"{labels.pop()}\n")
    assert "no limit" in found.stdout
    found = counterbench("-p", port, "--scan", "1k:2k:500", "--duration", "100ms", "-q")
    assert found.returncode == 0
    assert found.stdout.count("requests per second") == 3
    found = counterbench("-p", port, "--find-max", "p99<5s", "--duration", "100ms", "-q")
    assert found.stdout.splitlines()[-1].startswith("p99<5s holds up to ")


@contextlib.contextmanager
def begun(*words: object) -> Iterator[subprocess.Popen[str]]:
    """Runs a command during the block, and kills it at its end."""
    command = [sys.executable, "-m", "counterd.cli.bench", *map(str, words)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def children(process: subprocess.Popen[str]) -> str:
    return Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text()


def test_an_interrupt_ends_a_run_with_figures(port: int) -> None:
    with begun("-p", port, "--duration", "60s", "-c", 2) as process:
        wait_until(lambda: children(process), "a load")
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=30)
    assert process.returncode == 0
    assert "throughput" in out
    assert err == "counterbench: interrupted; the report shows what was measured until then\n"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--scan", "1k:9k:1k", "--duration", "20s"], "scan: 1,000/s to 9,000/s; not finished: interrupted"),
        (["--find-max", "p99<5s", "--duration", "20s"], "p99<5s: no such rate was found; not finished: interrupted"),
    ],
)
def test_an_interrupt_ends_a_whole_search_with_figures(port: int, words: list[str], said: str, tmp_path: Path) -> None:
    path = tmp_path / "found.json"
    with begun("-p", port, "-c", 2, "--json", path, *words) as process:
        wait_until(lambda: children(process), "a load")
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=30)
    assert process.returncode == 1
    assert out.splitlines()[-1] == said
    assert err == ""
    document = json.loads(path.read_text())
    assert len(document["runs"]) == 1
    assert document["search"]["ended"] == "interrupted"


def test_a_server_that_ends_during_a_search_loses_no_figures(tmp_path: Path) -> None:
    path = tmp_path / "found.json"
    with running(tmp_path) as daemon:
        port = daemon.address.port
        with begun("-p", port, "--scan", "1k:9k:1k", "--duration", "300ms", "--json", path) as process:
            first = wait_until(lambda: children(process), "a first load")
            wait_until(lambda: children(process) not in ("", first), "a second load")
            daemon.stop()
            out, _ = process.communicate(timeout=30)
    assert process.returncode == 1
    assert "not finished: " in out
    runs = json.loads(path.read_text())["runs"]
    assert 1 <= len(runs) < 9
    assert runs[0]["rate_wanted"] == 1000
    assert runs[0]["requests"] > 0


def test_holding_churn_and_verification(port: int) -> None:
    words = ("--hold", "exp:2ms", "--churn", 50, "--verify", "--maximum", 3, "-r", 20, "--duration", "600ms")
    found = counterbench("-p", port, *words)
    assert found.returncode == 0, found.stdout
    assert "verified" in found.stdout
    assert "give-back" in found.stdout
    label = "counter acquire-release, 50 connections, 1 in flight, 20 names, held exp:2.00 ms, 50.0/s killed"
    assert found.stdout.splitlines()[0] == label
    assert "refused" in found.stdout


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--hold", "10ms"], "fixed:TIME or exp:MEAN"),
        (["--keys", "zipf"], "zipf:EXPONENT"),
        (["-t", "mix:acquire"], "mix:OP=SHARE"),
        (["-t", "mix:take=1"], "each of noop, get, acquire, release"),
        (["-n", "0"], "1 or more"),
        (["-n", "1.0001k"], "whole number"),
        (["--duration", "1h"], "a time such as"),
        (["--duration", "0s"], "0.001 or more"),
        (["--json", "/proc/missing/run.json"], "no directory '/proc/missing'"),
        (["--json", "-"], "expected a file name"),
        (["--html", "/proc"], "is a directory"),
        (["--rate", "fast"], "a number such as"),
        (["--find-max", "p99>1ms"], "a bound on a percentile"),
        (["--scan", "10k:1k:1k"], "expected a scan with rising rates"),
        (["--scan", "1k:2k:1k", "--find-max", "p99<1ms"], "use either --find-max or --scan"),
        (["--scan", "1k:2k:1k", "--repeat", "2"], "--find-max and --scan cannot be used with --repeat"),
        (["--scan", "1k:2k:1k", "--rate", "1k"], "they choose the rates"),
        (["-r", "300", "--name-size", "2"], "names of 2 bytes"),
        (["--resources", "5", "--maximum", "4"], "none would be granted"),
        (["--protocol", "redis", "--verify"], "which redis does not have"),
        (["-k", "0", "-P", "2"], "--pipeline cannot be used with it"),
        (["--threads", "4", "-c", "3"], "need at least as many connections"),
        (["--protocol", "throttr", "-t", "acquire"], "the throttr protocol has noop, get, query"),
        (["--protocol", "throttr", "-t", "set", "--value-size", "64k"], "0 to 65535 bytes"),
        (["--value-size", "1M"], "1M is out of range, expected 0 to 524288"),
        (["--value-size", "1.5k"], "a size such as"),
        (["--name-size", "0"], "1 to 524288"),
        (["--number-type", "uint24"], "'uint24' is not one of"),
        (["--protocol", "http"], "'http' is not one of"),
        (["--nonsense"], "No such option"),
    ],
)
def test_a_wrong_option_is_named(words: list[str], said: str) -> None:
    found = counterbench(*words)
    assert found.returncode == 2
    assert said in " ".join(found.stderr.split())
    assert found.stdout == ""


def test_the_error_if_no_server_listens() -> None:
    found = counterbench("-p", 1, "-n", 10)
    assert found.returncode == 2
    assert found.stderr == "counterbench: cannot connect to 127.0.0.1:1: Connection refused\n"


def test_a_file_for_tls_enables_tls(pem: Files) -> None:
    with Server(context=server_context()) as server:
        found = counterbench("-p", server.address[1], "-n", 10, "--cacert", pem.cacert, "-q")
    assert (found.returncode, found.stderr) == (0, "")
    assert "TLS" in found.stdout


def test_an_unknown_host_is_named() -> None:
    found = counterbench("-h", "no such host", "-n", 10)
    assert found.returncode == 2
    assert found.stderr.startswith("counterbench: cannot connect to no such host: ")


def test_a_file_that_cannot_be_written_loses_no_figures(port: int) -> None:
    found = counterbench("-p", port, "-n", 100, "--json", "/dev/full")
    assert found.returncode == 2
    assert "throughput" in found.stdout
    assert "No space left" in found.stderr


def test_a_file_that_is_no_result_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "other.json"
    path.write_text("{}")
    found = counterbench("compare", path)
    assert found.returncode == 2
    assert found.stderr.startswith(f"counterbench: {path}: not a result of counterbench")


def test_a_missing_dependency_is_named() -> None:
    found = counterbench(code="import sys; sys.modules['rich'] = None; import counterd.cli.bench")
    assert found.returncode == 1
    expected = "counterbench needs rich: in the source tree, run `make setup` or pip install '.[bench]'"
    assert found.stderr.strip() == expected


def test_older_versions_of_click_work() -> None:
    """Their types have no parameters: 8.1 and 8.2, which the extra allows."""
    code = "import click; click.ParamType.__class_getitem__ = None; from counterd.cli.bench import main; main()"
    found = counterbench("--version", code=code)
    assert (found.returncode, found.stderr) == (0, "")
