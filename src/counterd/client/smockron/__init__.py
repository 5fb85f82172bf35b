"""Gatekeepers of the smockron protocol, for threads and for asyncio. A gatekeeper lets each request pass, makes it
wait, or rejects it.

A gatekeeper reports each request to a master. The master announces to all its gatekeepers which identifiers must wait.
So a gatekeeper decides without waiting for a reply: a decision takes microseconds, and is based on what the master
announced a few milliseconds ago. counterd.client.smockron_asgi and counterd.client.smockron_wsgi put a gatekeeper in
front of a web application.

Floor: side (ARCHITECTURE.md). The package needs only the wire module and counterd.errors, and works without any
compiled module.
"""

from __future__ import annotations

import threading
import time
from time import monotonic_ns, time_ns
from typing import TYPE_CHECKING

from counterd.client._entering import ForWith
from counterd.client.smockron._aio import AsyncAdmission, AsyncGatekeeper
from counterd.client.smockron._base import AdmissionBase, GatekeeperBase
from counterd.client.smockron._gatekeeping import Decision, Stats, Verdict, closed
from counterd.client.smockron._sockets import Sockets
from counterd.protocols.smockron.errors import Rejected

if TYPE_CHECKING:
    from types import TracebackType

__all__ = [
    "Admission",
    "AsyncAdmission",
    "AsyncGatekeeper",
    "Decision",
    "Gatekeeper",
    "Rejected",
    "Stats",
    "Verdict",
]


class Gatekeeper(GatekeeperBase, ForWith):
    """Decides which requests pass, wait or are rejected. Use the gatekeeper in a `with`, or close() it. Threads may
    share a gatekeeper.

    The gatekeeper connects with its first decision, or with connect(). A gatekeeper has a thread, which sends and
    receives, and another thread during each attempt to connect. After a fork the connections belong to the parent; the
    child connects with its first decision.

    masters: one master for all domains, or a mapping from domains to masters. A master is HOST, HOST:PORT,
    smockron://HOST[:PORT], smockrons://HOST[:PORT] (with TLS), or a pair of such addresses: one for accounting and one
    for control. With a single address, the port for control is the next port. For Unix sockets, a master is always a
    pair of smockron+unix:///PATH.
    domain: the domain of requests that name no domain.
    tls: True or an ssl.SSLContext, as for counterd.client.Client, which also describes URLs.
    max_delay_s: the longest delay of a request in seconds. A request that would have to wait longer is rejected.
    max_delayed: how many requests may wait at the same time. Additional requests are rejected, and not delayed.
    rejected: which rejected requests are reported to the master: "all", "none", or a share of them, from 0 to 1.
    max_remembered: how many identifiers that have to wait are remembered. If there are more, the identifier whose wait
    ends first is forgotten.
    max_held: how many accounting messages of a domain are kept while its master is not connected. If there are more,
    the oldest message is dropped. A message that is older than 2 s is never sent.
    heartbeat: the seconds between two PINGs to a master. A master that has not answered for twice this time is given
    up.
    timeout: how many seconds connecting, the TLS handshake and the ZMTP handshake may each take.

    Identifiers have up to 4,096 bytes and domains up to 255; both are bytes, or text that is sent as UTF-8. Other
    arguments raise ValueError or TypeError, and so does a domain without a master. A master can have 4,096 domains.

    While a master cannot be reached, requests pass, except for identifiers that already have to wait. The logger
    counterd.client.smockron logs a warning when a master cannot be reached, and a message at level INFO when it can be
    reached again; stats() has the figures.
    """

    def __enter__(self) -> Gatekeeper:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def connect(self, timeout: float = 5.0) -> bool:
        """Connects now, and waits until all masters are connected and subscribed. Returns False if this takes too long.

        You need not call connect(). A gatekeeper does not know what a master announced before the connection. Raises
        ConnectionLost if the gatekeeper is closed before or during this call.
        """
        self._start()
        with self._changed:
            is_ready = self._changed.wait_for(lambda: self._closed or self._core.is_ready, timeout)
            if self._closed:
                raise closed()
            return is_ready

    def close(self) -> None:
        """Sends unsent messages, for up to a second, and ends the connections. Later decisions raise ConnectionLost."""
        with self._lock:
            self._closed, self._is_started = True, False
            self._changed.notify_all()
        self._sockets.close()

    def decide(
        self, identifier: str | bytes, domain: str | bytes | None = None, log_info: str | bytes = b""
    ) -> Decision:
        """Decides whether a request that arrives now passes, waits or is rejected. decide() does not wait, unlike
        admit().

        log_info: a text for the master's log, cut to 1,024 bytes; counterd ignores it.
        """
        if not self._is_started:
            self._start()
        with self._lock:
            return self._core.decide(identifier, domain, log_info, monotonic_ns(), time_ns())

    def admit(
        self, identifier: str | bytes, domain: str | bytes | None = None, log_info: str | bytes = b""
    ) -> Admission:
        """Admits a request: `with gatekeeper.admit("10.0.0.1"):` waits if the request has to wait, or raises
        Rejected."""
        return Admission(self, identifier, domain, log_info)

    # ---- inside ----

    def _start(self) -> None:
        """Starts the thread.

        If the thread cannot be started, requests pass, and the gatekeeper tries again when it would connect again.
        """
        with self._lock:
            if self._closed:
                raise closed()
            if time.monotonic() < self._core.masters[0].control.retry_at:
                return
            try:
                self._sockets.start()
            except (RuntimeError, OSError) as error:
                why = f"cannot start a thread: {error}"
            else:
                self._is_started = True
                return
        for master in self._core.masters:
            self._sockets.lose(master.control, why)

    def _make_locks(self) -> None:
        super()._make_locks()
        self._changed = threading.Condition(self._lock)
        self._sockets = Sockets(self._core, self._changed, self._timeout)
        self._is_started = False

    def _after_fork(self) -> None:
        self._sockets.after_fork()
        super()._after_fork()


class Admission(AdmissionBase, ForWith):
    """One request at a gatekeeper. Gatekeeper.admit() returns it, for one `with`, which gives the Decision."""

    def __enter__(self) -> Decision:
        decision = self._decide()
        if decision.verdict is Verdict.DELAY:
            try:
                time.sleep(decision.delay_s)
            finally:
                self._gatekeeper.gave_up(decision)
        return decision

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Does nothing, because a gatekeeper does not count running requests."""
