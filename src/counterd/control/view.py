"""The fields of the daemon that its parts may read. The parts get no methods that act on the daemon.

Floor 4. Only the daemon writes to the view.
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
    from counterd.control.pulse import Pulse
    from counterd.control.service import Service
    from counterd.settings import Setting


@dataclass
class View:
    """config: the configuration in force. settings: all settings by key. lines_lost: returns the number of lost lines.

    started_ns: when the daemon was created, on the monotonic clock. memory_errors: how many unhandled exceptions were
    due to a lack of memory. internal_errors: how many others there were. pulse: is set when the loop runs.
    """

    config: Config
    settings: Mapping[str, Setting]
    lines_lost: Callable[[], int]
    started_ns: int = field(default_factory=time.monotonic_ns)
    state: Literal["starting", "ready", "draining"] = "starting"
    internal_errors: int = 0
    memory_errors: int = 0
    pulse: Pulse = field(init=False)

    def figures(self, service: Service) -> dict[str, object]:
        """Returns the figures of the floors above the engine, for protocols that serve statistics to clients."""
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
