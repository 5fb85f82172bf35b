"""What parts of the daemon may see of it: a few fields, and nothing that they could do with it.

Floor 4. The daemon alone writes to it.
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
    """config: what is in force. settings: all keys. lines_lost: how many lines of the log were, until now.

    started_ns: when the daemon was made, on the monotonic clock. internal_errors: exceptions that nothing was to raise;
    memory_errors: those for want of memory. pulse: how late the loop is, once there is one.
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
        """What is counted above the engine, for a protocol whose clients can ask for statistics."""
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
