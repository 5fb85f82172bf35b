"""The limit of each test: one that hangs fails with its trace, and others go on.

An alarm raises an exception where the test is. If that has no effect, because C code keeps the interpreter's lock or
because the exception is caught, faulthandler ends the process soon after the limit. The trace of a process of xdist is
then in a file, and the process that started it puts it into the report.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import threading
import traceback
from typing import TYPE_CHECKING, Any

import pytest

from kit.machine import EXAMPLES

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

LIMIT_S = 150.0  # of a test with its fixtures: more than a wait for PATIENCE, or LONG_S
LONG_LIMIT_S = 600.0  # of the longest tests, which are named in conftest.py, and of those of hypothesis
AGAIN_S = (
    15.0  # until the next alarm: the first may have been caught, or have been in the test and now its fixture hangs
)
END_S = 40.0  # after the limit faulthandler ends the process
MARKER = "limit(seconds): how long it may take with its fixtures, in place of LIMIT_S in tests/kit/overdue.py"


class Interrupt(KeyboardInterrupt):
    """Raised when a test takes too long. Event loops end for it; tests and hypothesis do not catch it. pytest must not
    see it.
    """


class Overdue(Exception):
    """The same, as the report shows it; also raised by fixtures when they end, so that pytest ends the others too."""


def limit_of(item: pytest.Item) -> float:
    mark = item.get_closest_marker("limit")
    return float(mark.args[0]) if mark else LIMIT_S * max(1.0, EXAMPLES)


def trace_of(folder: Path, process: str) -> Path:
    """Returns the file for the trace of a process of xdist."""
    return folder / f"{process}.trace"


class Alarm:
    """A plugin of the process that runs tests. file: to which faulthandler writes."""

    def __init__(self, file: Any) -> None:
        self.file = file
        self.limit_s = 0.0
        self.error: type[BaseException] | None = None  # what the alarm raises: None while pytest itself is at work

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[Any]:
        if item.config.option.usepdb:
            return (yield)
        self.limit_s = limit_of(item)
        faulthandler.dump_traceback_later(self.limit_s + END_S, exit=True, file=self.file)
        before = signal.signal(signal.SIGALRM, self.ring)
        signal.setitimer(signal.ITIMER_REAL, self.limit_s, AGAIN_S)
        try:
            return (yield)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
            faulthandler.cancel_dump_traceback_later()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_setup(self) -> Iterator[None]:
        yield from self.raising(Interrupt)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self) -> Iterator[None]:
        yield from self.raising(Interrupt)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_teardown(self) -> Iterator[None]:
        yield from self.raising(Overdue)

    def raising(self, error: type[BaseException]) -> Iterator[None]:
        self.error = error
        try:
            yield
        except Interrupt as raised:
            raise Overdue(str(raised)).with_traceback(raised.__traceback__) from None
        finally:
            self.error = None

    def ring(self, _number: int, _frame: Any) -> None:
        __tracebackhide__ = True
        if self.error is None:
            return
        frames = sys._current_frames()
        for thread in threading.enumerate():  # those of Python, not the one of xdist
            if thread is not threading.current_thread() and thread.ident in frames:
                print(f"thread {thread.name}:", *traceback.format_stack(frames[thread.ident]), file=sys.stderr)
        raise self.error(f"not over after {self.limit_s:g} s")


def install(config: pytest.Config, folder: Path) -> None:
    """Called when the session starts, after pytest's own faulthandler plugin."""
    process = getattr(config, "workerinput", {}).get("workerid")
    if process:
        file: Any = trace_of(folder, process).open("w")
        faulthandler.enable(file)  # for signals that end the process too
    else:
        file = os.fdopen(os.dup(2), "w")
    config.add_cleanup(file.close)
    config.add_cleanup(faulthandler.cancel_dump_traceback_later)
    config.add_cleanup(faulthandler.disable)
    config.pluginmanager.register(Alarm(file))
