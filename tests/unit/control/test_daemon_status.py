"""DaemonStatus, the figures and the state that parts of the daemon see."""

from __future__ import annotations

import os
import re
import time
from types import SimpleNamespace
from typing import Any

from counterd.control.daemon_status import DaemonStatus
from counterd.version import __version__


def test_figures_above_the_engine() -> None:
    config: Any = SimpleNamespace()
    status = DaemonStatus(config, {}, lambda: 3, time.monotonic_ns() - 5_000_000_000)
    status.internal_errors += 1
    status.memory_errors += 2
    service: Any = SimpleNamespace(server=SimpleNamespace(figures=lambda: {"curr_connections": 7}))
    figures = status.figures(service)
    assert figures.pop("uptime") >= 5
    assert all(re.fullmatch(r"\d+\.\d{6}", str(figures.pop(name))) for name in ("rusage_utime", "rusage_stime"))
    assert figures == {
        "version": __version__,
        "pid": os.getpid(),
        "curr_connections": 7,
        "log_lines_lost": 3,
        "internal_errors": 1,
        "memory_errors": 2,
    }


def test_the_first_state_is_starting() -> None:
    config: Any = SimpleNamespace()
    before = time.monotonic_ns()
    status = DaemonStatus(config, {}, lambda: 0)
    assert status.state == "starting"
    assert before <= status.started_ns <= time.monotonic_ns()
