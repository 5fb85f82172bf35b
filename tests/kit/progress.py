"""What the process that starts the tests shows of them: how many have ended, how long the rest takes, what runs.

A line every ten seconds, or one that changes if it is a terminal. Failures are named at once. pytest-sugar does not say
what runs, nor anything in a log; pytest's own dots tell no names and no times.
"""

from __future__ import annotations

import os
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

LOG_S, TERMINAL_S = 10.0, 1.0  # between two lines
NAMES_SHOWN = 2  # of the tests that have been running for longest
SECONDS_SHOWN = 10  # of a test that runs for longer


def line(total: int, ended: int, failed: int, took_s: float, running: dict[str, float]) -> str:
    """The line that shows the progress. running: {test: since how many seconds}."""
    if not total:
        return f"collecting the tests, {took_s:,.0f} s"
    left = f"about {took_s / ended * (total - ended):,.0f} s left, " if ended else ""
    oldest = sorted(running.items(), key=lambda each: -each[1])[:NAMES_SHOWN]
    names = [f"{name} ({seconds:.0f} s)" if seconds >= SECONDS_SHOWN else name for name, seconds in oldest]
    share = f"[{100 * ended // total:3} %] {ended:,} of {total:,} ended, {failed:,} failed"
    return f"{share}, {took_s:,.0f} s, {left}running: {', '.join(names) or 'none'}"


class Progress:
    """A plugin. folder: with what the processes have found."""

    def __init__(self, config: pytest.Config, folder: Path) -> None:
        self.reporter: Any = config.pluginmanager.get_plugin("terminalreporter")
        self.folder = folder
        self.screen = os.fdopen(os.dup(1), "w")  # what a test prints goes elsewhere, and so would this
        config.add_cleanup(self.screen.close)
        self.reporter._show_progress_info = self.reporter.showfspath = False
        self.is_terminal = self.reporter.isatty
        self.total = self.ended = self.failed = 0
        self.running: dict[str, float] = {}
        self.shown: dict[Path, int] = {}  # how much of the findings
        self.lock = threading.Lock()
        self.over = threading.Event()
        self.begun = time.monotonic()
        self.thread = threading.Thread(target=self.watch, name="progress", daemon=True)

    # -- what is shown --

    def watch(self) -> None:
        while not self.over.wait(TERMINAL_S if self.is_terminal else LOG_S):
            with self.lock:
                self.show_findings()
                self.show()

    def show(self) -> None:
        now = time.monotonic()
        running = {name: now - since for name, since in list(self.running.items())}
        text = line(self.total, self.ended, self.failed, now - self.begun, running)
        if self.is_terminal:
            text = f"\r{text[: self.reporter._tw.fullwidth - 1]}\x1b[K"
        print(text, file=self.screen, end="" if self.is_terminal else "\n", flush=True)

    def say(self, text: str, **markup: bool) -> None:
        self.reporter.write(f"\r\x1b[K{text}\n" if self.is_terminal else f"{text}\n", flush=True, **markup)

    def show_findings(self) -> None:
        """Shows what hypothesis has found meanwhile."""
        for path in sorted(self.folder.glob("*.found")):
            text = path.read_text()
            print(text[self.shown.get(path, 0) :], file=self.screen, end="", flush=True)
            self.shown[path] = len(text)

    # -- what happens --

    @pytest.hookimpl(wrapper=True)
    def pytest_runtestloop(self) -> Iterator[Any]:
        self.begun = time.monotonic()
        self.reporter.flush()
        self.thread.start()
        try:
            return (yield)
        finally:
            self.over.set()
            self.thread.join()
            self.show_findings()
            self.say("")

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self.total = len(session.items)

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, ids: list[str]) -> None:
        self.total = len(ids)

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.running[nodeid] = time.monotonic()

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        self.running.pop(nodeid, None)
        self.ended += 1
        self.reporter.flush()

    @pytest.hookimpl(tryfirst=True)
    def pytest_report_teststatus(self, report: Any) -> tuple[str, str, str] | None:
        """Without a letter pytest shows nothing when the test ends."""
        if not isinstance(report, pytest.TestReport) or hasattr(report, "wasxfail"):
            return None
        if report.passed:
            return "passed" if report.when == "call" else "", "", ""
        outcome = "error" if report.failed and report.when in ("setup", "teardown") else report.outcome
        return outcome, "", outcome.upper()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.failed += 1
            self.running.pop(report.nodeid, None)  # its process may have ended
            with self.lock:
                crash = getattr(report.longrepr, "reprcrash", None)
                reason = str(crash.message if crash else report.longrepr).partition("\n")[0]
                self.say(f"FAILED {report.nodeid}: {reason}", red=True)
