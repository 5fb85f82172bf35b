"""The sockets and connections of one room: who is let in, who is cut off, and the books about it.

Floor 3. Asks nobody anything: its limits and the function it reports to are handed down when it is made.
"""

from __future__ import annotations

import asyncio
import fcntl
import socket
import struct
import termios
import time
from collections import Counter, deque
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from counterd.net._connection import Connection, Roster
from counterd.net._poller import Poller

if TYPE_CHECKING:
    from collections.abc import Callable

    from counterd._core import Store

    # Told a cause that repeats, by which log lines are bounded, and a sentence.
    Report = Callable[[str, str], None]

STUCK_CHECK_S = 1.0
STUCK_CHECKS = 128  # connections looked at in one go: some 2 us each


@dataclass
class Limits:
    """What may change while the server runs. Timeouts are in seconds."""

    max_connections: int
    user_timeout: int
    write_timeout: int


class Server(Roster):
    """Serves one store on any number of listening sockets."""

    def __init__(self, loop: asyncio.AbstractEventLoop, store: Store, limits: Limits, report: Report) -> None:
        self.rejected: Counter[str] = Counter()
        self.slow_readers = 0
        self.vanished = 0
        self._report = report
        self._poller: Poller | None = None
        self._listening: list[socket.socket] = []
        self._stuck: dict[Connection, tuple[int, int]] = {}  # since when (ns), and bytes owed when last looked
        self._unchecked: deque[Connection] = deque()
        self._stuck_timer: asyncio.Handle | None = None
        self._departure = asyncio.Event()

    def listen(self, listening: socket.socket) -> None:
        """Begins to accept connections on a socket that is bound and listens; part() closes it."""
        if self._poller is None:
            self._poller = Poller(self.loop, self.reject)
        patience = "write_timeout" if listening.family == socket.AF_UNIX else "user_timeout"
        self._poller.listen(listening.fileno(), partial(Connection, self, patience))
        self._listening.append(listening)

    def part(self) -> None:
        """Accepts no more, and ends each connection once what it has asked so far is answered."""
        if self._poller is not None:
            self._poller.unlisten()
        self.parting = True
        for listening in self._listening:
            listening.close()
        for connection in list(self.connections):
            connection.part()

    async def emptied(self) -> None:
        """Returns when the last connection is gone; to be awaited after part()."""
        while self.connections:
            self._departure.clear()
            await self._departure.wait()

    def figures(self) -> dict[str, int]:
        """What only this floor counts."""
        return {
            "connections_max": self.limits.max_connections,
            "rejected:max_connections": self.rejected["max_connections"],
            "rejected:memory": self.rejected["memory"],
            "rejected:descriptors": self.rejected["descriptors"],
            "slow_readers": self.slow_readers,
            "vanished_peers": self.vanished,
            "stuck_outputs": len(self._stuck),
        }

    # ---- called by the roster and the connections ----

    def reject(self, cause: str, text: str) -> None:
        self.rejected[cause] += 1
        self._report(f"rejected:{cause}", f"connection refused: {text}")

    def lost(self, connection: Connection, error: BaseException | None, owed: bool) -> None:
        """A connection is gone; told only while parting, of an error, or if output was still queued: owed."""
        self._stuck.pop(connection, None)
        if not self.connections:
            self._departure.set()
        if isinstance(error, TimeoutError):  # the kernel gave up: keepalive, or TCP_USER_TIMEOUT
            if owed:
                self._count_slow_reader("the kernel closed a connection whose peer took no output for too long")
            else:
                self.vanished += 1
                self._report("vanished", "a peer vanished; what it held is given back")

    def drop(self, connection: Connection) -> None:
        """Its session gave it up: the peer takes less than others send it."""
        self._count_slow_reader("dropped a peer that has not taken what others sent it")
        connection.abort()

    def output_stuck(self, connection: Connection) -> None:
        """Its peer reads slower than it asks: the clock of its patience starts."""
        self._stuck[connection] = (time.monotonic_ns(), self._owed(connection))
        if self._stuck_timer is None:
            self._stuck_timer = self.loop.call_later(STUCK_CHECK_S, self._check_stuck)

    def output_moved(self, connection: Connection) -> None:
        self._stuck.pop(connection, None)

    # ---- inside ----

    def _count_slow_reader(self, text: str) -> None:
        self.slow_readers += 1
        self._report("slow_reader", text)

    @staticmethod
    def _owed(connection: Connection) -> int:
        """Bytes its peer has not acknowledged: in our queue and in the kernel's."""
        unsent: bytes = fcntl.ioctl(connection.fd, termios.TIOCOUTQ, struct.pack("i", 0)) if connection.fd >= 0 else b""
        return connection.queue_size() + (struct.unpack("i", unsent)[0] if unsent else 0)

    def _check_stuck(self) -> None:
        """Cuts off those whose output has not moved at all for as long as their limit allows."""
        now = time.monotonic_ns()
        if not self._unchecked:
            self._unchecked.extend(self._stuck)
        for _ in range(min(STUCK_CHECKS, len(self._unchecked))):
            connection = self._unchecked.popleft()
            if connection in self._stuck:
                self._check_one(connection, now)
        if self._unchecked:
            self._stuck_timer = self.loop.call_soon(self._check_stuck)
        elif self._stuck:
            self._stuck_timer = self.loop.call_later(STUCK_CHECK_S, self._check_stuck)
        else:
            self._stuck_timer = None

    def _check_one(self, connection: Connection, now: int) -> None:
        since, owed = self._stuck[connection]
        left = self._owed(connection)
        if left < owed:
            since = now
        elif now - since > getattr(self.limits, connection.patience) * 1_000_000_000:
            del self._stuck[connection]
            self._count_slow_reader(f"cut off a peer that has taken none of {left} bytes owed to it for too long")
            connection.abort()
            return
        self._stuck[connection] = (since, left)
