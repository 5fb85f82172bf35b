"""The fields of the daemon that its parts may read. Parts of the daemon get no methods that change the daemon.

Floor 4 (ARCHITECTURE.md). Only the daemon changes them.
"""

from __future__ import annotations

import os
import resource
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from counterd.version import __version__

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from counterd.control.config.loading import Config
    from counterd.control.loop_lag import LoopLagMonitor
    from counterd.control.service import Service
    from counterd.settings import Setting


@dataclass
class DaemonStatus:
    """config: the configuration in force. settings: all settings by key. lines_lost: returns how many log lines were
    lost.

    started_ns: when the daemon was created, on the monotonic clock. memory_errors: how many unhandled exceptions had a
    lack of memory as their cause. internal_errors: how many unhandled exceptions had another cause. loop_lag: set when
    the event loop runs.
    """

    config: Config
    settings: Mapping[str, Setting]
    lines_lost: Callable[[], int]
    started_ns: int = field(default_factory=time.monotonic_ns)
    state: Literal["starting", "ready", "draining"] = "starting"
    internal_errors: int = 0
    memory_errors: int = 0
    loop_lag: LoopLagMonitor = field(init=False)

    def figures(self, service: Service) -> dict[str, object]:
        """Returns figures of the daemon, such as its CPU time, for protocols that send statistics to clients."""
        used = resource.getrusage(resource.RUSAGE_SELF)
        return {
            "version": __version__,
            "pid": os.getpid(),
            "uptime": (time.monotonic_ns() - self.started_ns) // 1_000_000_000,
            "rusage_utime": f"{used.ru_utime:.6f}",
            "rusage_stime": f"{used.ru_stime:.6f}",
            **service.server.figures(),
            "log_lines_lost": self.lines_lost(),
            "internal_errors": self.internal_errors,
            "memory_errors": self.memory_errors,
        }
