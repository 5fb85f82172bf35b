"""The base of daemons that chaos kills, and starts again at the same addresses."""

from __future__ import annotations

import contextlib
import re
import time
from typing import TYPE_CHECKING, Any, ClassVar

from history import Operation
from kit import daemon
from kit.machine import LONG_S

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

KILLER = -2  # the client of the restarts in a history


class KillableDaemon:
    """The daemon of one protocol. ports: for the key of each port, the name under which the log has it.

    restarts: those of this round. begun_ns: since when it has been running. log: the lines of all killed processes.
    """

    dialect: ClassVar[str]
    ports: ClassVar[dict[str, str]]
    restarted: ClassVar[tuple[Any, Any]]  # the call for a restart in the history, and its answer

    def __init__(self, directory: Path, settings: Mapping[str, object], program: Sequence[str]) -> None:
        self.directory = directory
        self.settings = {"counter.enable": "false", "counter.port": "", "counter.bind": "", **settings}
        self.program = program
        self.restarts: list[Operation] = []
        self.begun_ns = 0
        self.log: list[str] = []
        self.counterd: daemon.Daemon
        self._running = contextlib.ExitStack()

    def __exit__(self, *error: object) -> None:
        self._running.close()

    def _begin(self) -> None:
        """Starts it, with the ports that it had before, if any."""
        self.counterd = self._running.enter_context(
            daemon.running(self.directory / f"{self.dialect} daemon", self.settings, program=self.program)
        )
        self.begun_ns = time.monotonic_ns()
        for key, who in self.ports.items():
            self.settings[key] = self.counterd.address_of(who).port

    def _die(self, started_ns: int) -> None:
        """Kills it, and starts another one."""
        self.counterd.kill()
        self._running.close()
        self.log += self.counterd.log
        self._begin()
        call, answer = self.restarted
        self.restarts.append(Operation(KILLER, call, started_ns, self.begun_ns, answer))

    def figure(self, name: str) -> int:
        """Returns a figure of the protocol, which the daemon logs."""
        (value,) = re.findall(rf" {name}=(\d+)", self.counterd.logged_stats([self.dialect], LONG_S)[self.dialect])
        return int(value)

    def take_restarts(self) -> list[Operation]:
        """Returns the restarts so far; later ones belong to the next round."""
        taken, self.restarts = self.restarts, []
        return taken

    def complaints(self, expected: str) -> list[str]:
        """Returns the errors in its log, except the expected ones."""
        bad = [line for line in (*self.log, *self.counterd.log) if re.search(r" ERROR |Traceback", line)]
        return [line for line in bad if not re.search(expected, line)]
