"""Keeps one child process running. When the process ends, starts it again, after a delay that grows with each restart.

Floor 4 (ARCHITECTURE.md).
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

from counterd.control.process.child import Child

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Sequence

    from counterd.control.process.child import Conversation, Kind

RESTART_MIN_S = 0.1
RESTART_MAX_S = 10.0
STEADY_S = 10.0  # after a process that ran for so long, the next delay is the minimum again


class Supervisor:
    """Supervises one child process, from start() to stop().

    given: the sockets that each process inherits. converse: makes the conversation with the next process. report:
    called with a cause and a sentence, as in net.server. restarts: how many processes were replaced.
    """

    def __init__(
        self,
        kind: Kind,
        given: Sequence[socket.socket],
        converse: Callable[[], Conversation],
        report: Callable[[str, str], None],
    ) -> None:
        self.restarts = 0
        self._kind = kind
        self._given = given
        self._converse = converse
        self._report = report
        self._child: Child | None = None
        self._keeping: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Starts the process. The process is ready some tenths of a second later."""
        self._keeping = asyncio.get_running_loop().create_task(self._keep())

    def release(self) -> None:
        """Stops supervising: when the process ends, no new process is started."""
        if self._keeping is not None:
            self._keeping.cancel()

    def stop(self) -> None:
        """Ends the process, and starts no new process."""
        self.release()
        self._end()

    async def _keep(self) -> None:
        delay = RESTART_MIN_S
        while True:
            begun = time.monotonic()
            try:
                self._child = Child(self._kind, self._given, self._converse())
                await self._child.open()
                why = await self._child.ended()
                self._child = None
            except OSError as error:
                why = f"cannot be started: {error.strerror or error}"
                self._end()
            self.restarts += 1
            if time.monotonic() - begun > STEADY_S:
                delay = RESTART_MIN_S
            name = self._kind.name
            self._report(name, f"the {name} process {why}; restarting it in {delay:g} s")
            await asyncio.sleep(delay)
            delay = min(2 * delay, RESTART_MAX_S)

    def _end(self) -> None:
        if self._child is not None:
            self._child.end()
            self._child = None
