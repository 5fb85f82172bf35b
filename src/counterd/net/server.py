"""The server of one protocol: listens, closes connections that exceed a limit, and counts and reports events.

Floor 3 (ARCHITECTURE.md). A server has a connection table (table.pyx), a poller and a driver. Connections notify the
server through Events. The server counts and reports these events. The caller passes the limits, the clock and the
report function when it creates the server.
"""

from __future__ import annotations

import asyncio
import fcntl
import socket
import ssl
import struct
import termios
import time
from collections import Counter, deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from counterd.net.admission import REJECTED, Limits
from counterd.net.batches import BYTES_BOUNDS, SECONDS_BOUNDS
from counterd.net.connection import Common, Connection, Events
from counterd.net.driver import Driver
from counterd.net.poller import READ_MAX, Poller
from counterd.net.table import Table, TableAcceptor

if TYPE_CHECKING:
    from collections.abc import Callable

    from counterd.contract import Store

    # Called with a cause (the log limits repeated lines for each cause) and a sentence.
    Report = Callable[[str, str], None]

HANDSHAKES_FAILED = ("timeout", "protocol", "certificate")

STUCK_CHECK_S = 1.0
STUCK_CHECKS = 128  # connections that are checked in one turn of the loop: some 2 us each
IDLE_CHECKS = 1024  # connection numbers that are checked in one turn of the loop: some 0.1 us each

# If there is a limit on requests, one read takes at most as many bytes as the short requests of one second have. So a
# read never causes a long pause. This matters because a dead peer is noticed between two reads, by the replies to it.
REQUEST_SIZE = 12
LIMITED_READ_MIN = 512
SECOND = 1_000_000_000


@dataclass(frozen=True)
class Histogram:
    """A histogram. counts[i] counts the values up to and including bounds[i]; the last count is for values above all
    bounds.

    sum: the sum of all values.
    """

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    sum: float


class Server:
    """Serves one store on any number of listening sockets. clock: returns nanoseconds on the monotonic clock.

    connections: the connections with a session, by the engine's number.
    arriving: the admitted connections whose TLS handshake is in progress.
    addresses: the number of connections by IP address (4 or 16 bytes).
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        store: Store,
        limits: Limits,
        report: Report,
        clock: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self.loop = loop
        self.store = store
        self.driver = Driver(loop, store, clock)
        self.rejected: Counter[str] = Counter()
        self.handshakes_failed: Counter[str] = Counter()
        self.slow_readers = 0
        self._overdue = 0  # of the slow readers, those that the store dropped
        self.idle_closed = 0
        self.killed = 0
        self.vanished = 0
        self._report = report
        self._clock = clock
        self._table = Table(limits)
        self.connections = self._table.connections
        self.arriving = self._table.arriving
        self.addresses = self._table.addresses
        events = Events(
            entered=self._table.enter,
            renumbered=self._table.renumber,
            left=self._table.remove,
            lost=self._on_lost,
            rejected=self._on_rejected,
            tls_failed=self._on_tls_failed,
            slowed=self._on_slowed,
            stuck=self._on_stuck,
            moved=self._on_moved,
            dropped=self._on_dropped,
        )
        self._common = Common(loop, store, self.driver, events)
        self._poller = Poller(loop, self._on_rejected)
        self._listening: list[socket.socket] = []
        self._stuck: dict[Connection, tuple[int, int]] = {}  # since when (ns), and the bytes owed at the last check
        self._unchecked: deque[Connection] = deque()
        self._stuck_timer: asyncio.Handle | None = None
        self._departure = asyncio.Event()
        self._idle_timer: asyncio.Handle | None = None
        self.limits = limits

    # ---- settings that may change while it runs ----

    @property
    def limits(self) -> Limits:
        """The limits of the server. Assigned limits apply immediately."""
        return self._table.limits

    @limits.setter
    def limits(self, limits: Limits) -> None:
        self._table.limits = limits
        self._apply_limits()

    @property
    def context(self) -> ssl.SSLContext | None:
        """The TLS context for new TCP connections.

        None means TCP without TLS. Assigning a context turns TLS renegotiation off.
        """
        return self._table.context

    @context.setter
    def context(self, context: ssl.SSLContext | None) -> None:
        if context is not None:
            context.options |= ssl.OP_NO_RENEGOTIATION
        self._table.context = context

    @property
    def watch(self) -> Callable[[str, Connection], None] | None:
        """A function that is called with "opened" or "closed" and the connection, or None."""
        return self._table.watch

    @watch.setter
    def watch(self, watch: Callable[[str, Connection], None] | None) -> None:
        self._table.watch = watch

    # ---- its connections ----

    @property
    def handshakes(self) -> int:
        """How many TLS handshakes are in progress."""
        return self._common.handshakes

    def find(self, connection_id: str) -> Connection | None:
        """Returns the connection with this ID, or None."""
        return self._table.find(connection_id)

    # ---- its life ----

    def listen(self, listening: socket.socket, port: int = 0) -> None:
        """Starts accepting connections on a listening socket. unlisten() closes the socket.

        port: the number of the protocol's port, from 0.
        """
        local = listening.family == socket.AF_UNIX
        patience = "write_timeout" if local else "user_timeout"
        acceptor = TableAcceptor(self._table, self._common, self._poller, not local, patience, port)
        self._poller.listen(listening.fileno(), acceptor)
        self._listening.append(listening)

    def unlisten(self) -> None:
        """Stops accepting connections. Existing connections are still served."""
        self._poller.unlisten()
        for listening in self._listening:
            listening.close()

    def part(self) -> None:
        """Stops accepting connections. Ends each connection when the requests received from it were answered."""
        self.unlisten()
        self._common.parting = True
        self._apply_limits()
        self.store.part()
        for connection in [*self.arriving, *self.connections.values()]:
            connection.part()
        self.driver.wake()

    async def emptied(self) -> None:
        """Returns when the last connection has ended. Call it after part()."""
        while len(self._table):
            self._departure.clear()
            await self._departure.wait()

    def kill(self, connection: Connection) -> None:
        """Ends a connection immediately. The holdings of the connection are given back."""
        self.killed += 1
        connection.evict()

    def evict(self, number: int) -> None:
        """Ends the grace time of a connection that has ended.

        number: the engine's number of the connection. The holdings of the connection are given back.
        """
        self.killed += 1
        self.store.evict(number, self._clock())
        self.driver.wake()

    def histograms(self) -> dict[str, Histogram]:
        """Returns histograms of the sizes of batches and of the times to answer them.

        A batch is the bytes that one read has returned.
        """
        by_time, all_ns, by_size, all_bytes = self._common.batches.counts()
        return {
            "batch_seconds": Histogram(SECONDS_BOUNDS, by_time, all_ns / SECOND),
            "batch_bytes": Histogram(BYTES_BOUNDS, by_size, float(all_bytes)),
        }

    def figures(self) -> dict[str, int]:
        """Returns the figures that the server itself counts."""
        return {
            "connections_max": self.limits.max_connections,
            **{f"rejected:{cause}": self.rejected[cause] for cause in REJECTED},
            **{f"handshakes_failed:{cause}": self.handshakes_failed[cause] for cause in HANDSHAKES_FAILED},
            "handshakes": self.handshakes,
            "idle_closed": self.idle_closed,
            "slowed": self._common.slowed,
            "killed": self.killed,
            "slow_readers": self.slow_readers,
            "vanished_peers": self.vanished,
            "stuck_outputs": len(self._stuck),
        }

    # ---- what happens to its connections ----

    def _on_rejected(self, cause: str, text: str) -> None:
        self.rejected[cause] += 1
        self._report(f"rejected:{cause}", f"connection refused: {text}")

    def _on_tls_failed(self, connection: Connection, cause: str, reason: str) -> None:
        """Called when a TLS handshake failed, or the peer sent invalid TLS. The connection ends."""
        self.handshakes_failed[cause] += 1
        self._report(f"handshake:{cause}", f"TLS with {connection.origin()} failed: {reason}")

    def _on_slowed(self, connection: Connection) -> None:
        """Called when a connection exceeded the request rate. The connection is paused."""
        rate = self.limits.requests_per_second
        self._report("slowed", f"{connection.origin()} sends more than {rate} requests a second and is slowed down")

    def _on_stuck(self, connection: Connection) -> None:
        """Called when the peer of a connection stops reading its output. Starts the time limit for stuck output."""
        self._stuck[connection] = (self._clock(), self._owed(connection))
        if self._stuck_timer is None:
            self._stuck_timer = self.loop.call_later(STUCK_CHECK_S, self._check_stuck)

    def _on_moved(self, connection: Connection) -> None:
        self._stuck.pop(connection, None)

    def _on_dropped(self, connection: Connection) -> None:
        """Called when the store dropped a connection: its peer did not read the messages of other clients, or the lease
        of what it holds was over."""
        if self._overdue < self.store.sessions_dropped:
            self._overdue += 1
            self._count_slow_reader("disconnected a peer that was too slow to read the messages of other clients")
        else:
            self._report("lease", "disconnected a peer that held shared permits, as others may have them by now")

    def _on_lost(self, connection: Connection, error: BaseException | None) -> None:
        """Called when a connection has left the table after an error, with unsent output, or after part()."""
        self._stuck.pop(connection, None)
        if self._common.parting and not len(self._table):
            self._departure.set()
        if isinstance(error, TimeoutError):  # the kernel gave up: keepalive, or TCP_USER_TIMEOUT
            if connection.owed:
                self._count_slow_reader("the kernel closed a connection whose peer had read no output for too long")
            else:
                self.vanished += 1
                self._report("vanished", "a peer has vanished; its holdings are given back")

    # ---- inside ----

    def _apply_limits(self) -> None:
        """Passes the limits on to the connections and the poller, and restarts the idle timer."""
        rate, timeout = self.limits.requests_per_second, self.limits.idle_timeout
        self._common.request_ns = SECOND // rate if rate else 0
        self._common.handshake_s = self.limits.handshake_timeout
        self._poller.limit_reads(max(LIMITED_READ_MIN, rate * REQUEST_SIZE) if rate else READ_MAX)
        if self._idle_timer is not None:
            self._idle_timer.cancel()
            self._idle_timer = None
        if timeout and not self._common.parting:
            self._idle_timer = self.loop.call_later(self._idle_period(), self._check_idle, 0)

    def _count_slow_reader(self, text: str) -> None:
        self.slow_readers += 1
        self._report("slow_reader", text)

    @staticmethod
    def _owed(connection: Connection) -> int:
        """Returns how many bytes the peer has not acknowledged, in the queue of the connection and in the kernel's
        queue."""
        unsent: bytes = fcntl.ioctl(connection.fd, termios.TIOCOUTQ, struct.pack("i", 0)) if connection.fd >= 0 else b""
        return connection.queued + (struct.unpack("i", unsent)[0] if unsent else 0)

    def _check_stuck(self) -> None:
        """Closes each connection that has waiting output and whose peer has read no output for longer than the time
        limit."""
        now = self._clock()
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
        elif now - since > getattr(self.limits, connection.patience) * SECOND:
            del self._stuck[connection]
            self._count_slow_reader(f"disconnected a peer that had read none of {left} waiting bytes for too long")
            connection.abort()
            return
        self._stuck[connection] = (since, left)

    def _idle_period(self) -> float:
        """Returns the seconds between two rounds of idle checks.

        An idle connection is closed at most this many seconds late.
        """
        return min(max(self.limits.idle_timeout / 8, 0.25), 10.0)

    def _check_idle(self, first: int) -> None:
        """Closes the idle connections among the next IDLE_CHECKS numbers."""
        before = self._clock() - self.limits.idle_timeout * SECOND
        idle, more = self._table.idle_among(first, IDLE_CHECKS, before)
        for connection in idle:
            self.idle_closed += 1
            self._report("idle", f"{connection.origin()} sent nothing for {self.limits.idle_timeout} s and was closed")
            connection.close()
        if more:
            self._idle_timer = self.loop.call_soon(self._check_idle, first + IDLE_CHECKS)
        else:
            self._idle_timer = self.loop.call_later(self._idle_period(), self._check_idle, 0)
