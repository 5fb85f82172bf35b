"""Fixtures for tests of more than one folder."""

from __future__ import annotations

# isort: off
from kit import surroundings

FOLDER = surroundings.make()  # first, because hypothesis and counterd read variables when they are imported
# isort: on

import contextlib
import gc
import json
import random
import shutil
import signal
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, settings

from kit import daemon, findings, needs, overdue, parts, progress, remains
from kit.machine import EXAMPLES, LONG_S

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from kit.certificates import Files


# No deadlines, because the duration of an example depends on the machine. A seed of its own for each run, in CI too.
settings.register_profile(
    "counterd", deadline=None, derandomize=False, print_blob=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("counterd")
SEED = pytest.StashKey[Any]()
MOUNTED = pytest.StashKey[set[str]]()


def pytest_configure(config: pytest.Config) -> None:
    """Restores SIGINT: a shell starts background jobs with SIGINT ignored, and the tests' processes inherit that."""
    if not config.option.basetemp:
        config.option.basetemp = str(FOLDER / "t")
    if config.option.color == "auto" and (is_colored := surroundings.is_colored()) is not None:
        config.option.color = "yes" if is_colored else "no"
    config.addinivalue_line("markers", needs.MARKER)
    config.addinivalue_line("markers", overdue.MARKER)
    workerinput = getattr(config, "workerinput", {})
    config.stash[SEED] = config.option.hypothesis_seed or workerinput.get("seed") or random.getrandbits(32)
    findings.install(findings.finding_of(FOLDER, workerinput.get("workerid", "main")))
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if config.getoption("numprocesses", None):  # a time limit of the whole run ends it in order, too
        signal.signal(signal.SIGTERM, signal.default_int_handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    parts.add_option(parser)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    return parts.ignores(config, collection_path)


def pytest_sessionstart(session: pytest.Session) -> None:
    session.config.stash[MOUNTED] = remains.mounts(FOLDER)
    overdue.install(session.config, FOLDER)
    is_seen = session.config.option.verbose == 0 and not session.config.option.usepdb
    if is_seen and not hasattr(session.config, "workerinput"):
        session.config.pluginmanager.register(progress.Progress(session.config, FOLDER))


def pytest_report_header(config: pytest.Config) -> str:
    return f"examples of hypothesis: to repeat those of this run, --hypothesis-seed={config.stash[SEED]}"


# ---- each test process begins with some of the longest tests ---------------------------------------------------------

LONGEST = (
    "tests/property/test_counter_model.py::Test",
    "tests/meta/test_model.py::",
    "tests/meta/test_deletion.py::test_the_rest_works_without_the_protocol",
    "tests/unit/engine/test_wheel.py::Test",
    "tests/property/test_cuts.py::test_any_stream",
    "tests/unit/bench/test_page.py::test_the_page_is_well_formed_with_any_text",
    "tests/chaos/test_chaos.py::test_no_promise_is_broken",
    "tests/drills/",
    "tests/property/test_sentinel_model.py::Test",
    "tests/property/test_throttr_model.py::Test",
    "tests/simulation/",
    "tests/functional/test_docs.py::test_what_a_page_says",
    "tests/functional/test_reload.py::test_a_window_turns_at_a_multiple_of_its_interval",
)
AHEAD = 4  # places before the longest tests, because the shares of the processes differ by one


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Selects and orders tests. xdist gives each process an equal share of the list, and later the rest of others."""
    parts.select(config, items)
    processes = getattr(config, "workerinput", {}).get("workercount", 1)
    longest = [item for item in items if item.nodeid.startswith(LONGEST)]
    for item in (item for item in items if item.nodeid.startswith(LONGEST) or findings.function_of(item)):
        item.add_marker(pytest.mark.limit(overdue.LONG_LIMIT_S * max(1.0, EXAMPLES)))
    if processes > 1 and len(items) > 100 * processes:
        others = [item for item in items if not item.nodeid.startswith(LONGEST)]
        items.clear()
        for number in range(processes):
            share = others[number * len(others) // processes : (number + 1) * len(others) // processes]
            items += share[:AHEAD] + longest[number::processes] + share[AHEAD:]


# ---- missing programs, listed once before the tests by the process that starts the others ----------------------------

COUNTS = pytest.StashKey[Path]()  # the file in which a process lists what its tests lack


@pytest.hookimpl(tryfirst=True)  # before xdist reports that this process has collected the tests
def pytest_collection_finish(session: pytest.Session) -> None:
    """Freezes the collected tests, some million objects, so that garbage collections skip them."""
    gc.collect()
    gc.freeze()
    if path := getattr(session.config, "workerinput", {}).get("counts"):
        Path(path).write_text(json.dumps(needs.count(session.items)))


def pytest_report_collectionfinish(items: list[pytest.Item]) -> list[str]:
    return needs.report(needs.count(items))


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Called before xdist starts a process."""
    node.workerinput["seed"] = node.config.stash[SEED]
    if COUNTS not in node.config.stash:
        node.config.stash[COUNTS] = FOLDER / "counts"
        node.workerinput["counts"] = str(FOLDER / "counts")


@pytest.hookimpl(optionalhook=True)
def pytest_handlecrashitem(report: Any) -> None:
    """Shows the trace of a process that ended, and what hypothesis had found there."""
    process = report.node.gateway.id
    for path in (overdue.trace_of(FOLDER, process), findings.finding_of(FOLDER, process)):
        if path.exists() and (text := path.read_text()):
            report.longrepr = f"{report.longrepr}\n{text.rstrip()}"


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_node_collection_finished(node: Any) -> None:
    """Called when a process of xdist has collected the tests. All processes collect the same tests."""
    path = node.config.stash[COUNTS]
    if "counts" in node.workerinput and path.exists():
        reporter = node.config.pluginmanager.get_plugin("terminalreporter")
        for line in needs.report(json.loads(path.read_text())):
            reporter.write_line(line)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_sessionfinish(session: pytest.Session) -> Iterator[None]:
    if hasattr(session.config, "workerinput"):
        return (yield)
    mounted = session.config.stash[MOUNTED]
    yield
    if left := remains.remains(FOLDER, mounted):
        print("the tests have left behind:", *left, sep="\n  ")
        session.exitstatus = session.exitstatus or pytest.ExitCode.TESTS_FAILED
    if session.exitstatus != pytest.ExitCode.TESTS_FAILED:
        shutil.rmtree(FOLDER, ignore_errors=True)


def pytest_terminal_summary(terminalreporter: Any, exitstatus: int) -> None:
    if exitstatus == pytest.ExitCode.TESTS_FAILED:
        terminalreporter.write_line(pytest_report_header(terminalreporter.config))
        terminalreporter.write_line(f"files of the failed tests: {terminalreporter.config.option.basetemp}")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    if not item.config.option.hypothesis_seed:
        findings.sow(item, item.config.stash[SEED])
    if reason := needs.check(item):
        if needs.in_ci():
            pytest.fail(reason, pytrace=False)
        pytest.skip(reason)


# ---- fixtures --------------------------------------------------------------------------------------------------------


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., daemon.Daemon]]:
    """A function that starts a counterd with settings (see daemon.running). The daemon ends with the test."""
    with contextlib.ExitStack() as stack:
        count = 0

        def started(settings: Mapping[str, Any] | None = None, **options: Any) -> daemon.Daemon:
            nonlocal count
            count += 1
            return stack.enter_context(daemon.running(tmp_path / f"daemon{count}", settings, **options))

        yield started


@pytest.fixture
def short_path() -> Iterator[Path]:
    """A directory with a short path, for Unix sockets. pytest's own path contains the test's name and is too long."""
    directory = Path(tempfile.mkdtemp(prefix="counterd-"))
    try:
        yield directory
    finally:
        shutil.rmtree(directory)


@pytest.fixture
def unhurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gatekeepers drop no old messages, and close() waits until all are sent, even on a busy machine."""
    monkeypatch.setattr("counterd.client.smockron._gatekeeping.HELD_NS", int(LONG_S * 1e9))
    for module in ("_sockets", "_aio"):
        monkeypatch.setattr(f"counterd.client.smockron.{module}.LINGER_S", LONG_S)


@pytest.fixture(scope="session")
def pem(tmp_path_factory: pytest.TempPathFactory) -> Files:
    """Certificates and keys of a server and of a client."""
    from kit import certificates

    return certificates.Files(tmp_path_factory.mktemp("pem"))
