"""Gatekeepers of the smockron protocol, for threads and for asyncio: each request passes, waits, or is rejected.

A gatekeeper reports each request to a master, which announces to all its gatekeepers which identifiers must wait. So a
decision waits for no reply: it takes microseconds, and is based on what the master announced a few milliseconds ago.
counterd.client.smockron_asgi and counterd.client.smockron_wsgi put a gatekeeper before a web application.

Floor: side. Needs only the wire module and counterd.errors, and works where nothing is compiled.
"""

from __future__ import annotations

import threading
import time
from time import monotonic_ns, time_ns
from typing import TYPE_CHECKING, Any, Literal

from counterd.client._connection import forked
from counterd.client.smockron._aiogatekeeper import AsyncAdmission, AsyncGatekeeper
from counterd.client.smockron._gatekeeping import ALL, Core, Decision, Options, Stats, Verdict, closed, report
from counterd.client.smockron._tender import Tender
from counterd.protocols.smockron.errors import Rejected

if TYPE_CHECKING:
    import ssl
    from types import TracebackType

    from counterd.client.smockron._gatekeeping import Master, News
    from counterd.client.smockron._masters import Masters

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


class Gatekeeper:
    """Decides which requests pass, wait or are rejected. Use it in a `with`, or close() it. Threads may share it.

    It connects with the first decision, or with connect(). Each master has a thread, which sends, receives and connects
    again. After a fork the connections belong to the parent; the child connects with its first decision.

    masters: one master for all domains, or a mapping from domains to masters. A master is HOST, HOST:PORT,
    smockron://HOST[:PORT], smockrons://HOST[:PORT] (with TLS), or a pair of such addresses: one for accounting and one
    for control, which otherwise is the next port. Unix sockets are always a pair of smockron+unix:///PATH.
    domain: the domain of requests whose domain is not given.
    tls: True or an ssl.SSLContext, as in counterd.client.Client, which also says what a URL may have.
    max_delay_s: the longest delay of a request in seconds. A request that would have to wait longer is rejected.
    max_delayed: how many requests may wait at the same time. Additional requests are rejected instead of delayed.
    rejected: which rejected requests are reported to the master: "all", "none", or a share of them, from 0 to 1.
    max_remembered: how many identifiers that have to wait are remembered. If there are more, the one whose wait ends
    first is forgotten.
    max_held: how many accounting messages of a domain are kept while its master is not connected. If there are more,
    the oldest is dropped. A message that is older than 2 s is never sent.
    heartbeat: seconds between two PINGs to a master. A master that does not answer is given up after twice this time.
    timeout: seconds for connecting, for TLS's handshake, and for ZMTP's handshake.

    Identifiers have up to 4,096 bytes and domains up to 255; both are bytes, or text that is sent as UTF-8. Anything
    else raises ValueError or TypeError, and so does a domain without a master. A master can have 1,024 domains.

    While a master cannot be reached, requests pass, except for identifiers that have to wait already. The logger
    counterd.client.smockron warns when that begins, and logs at level INFO when it ends; stats() has the figures.
    """

    def __init__(
        self,
        masters: Masters = "127.0.0.1",
        domain: str | bytes = "default",
        *,
        tls: bool | ssl.SSLContext = False,
        max_delay_s: float = 5.0,
        max_delayed: int = 1000,
        rejected: Literal["all", "none"] | float = ALL,
        max_remembered: int = 100_000,
        max_held: int = 10_000,
        heartbeat: float = 5.0,
        timeout: float = 5.0,
    ) -> None:
        options = Options(max_delay_s, max_delayed, rejected, max_remembered, max_held, heartbeat, timeout)
        self._core = Core(masters, domain, tls, options)
        self._timeout = timeout
        self._tenders: dict[Master, Tender] = {}
        self._is_started = False  # a thread for each master
        self._closed = False
        self._make_locks()
        forked.add(self)

    def __repr__(self) -> str:
        return f"<Gatekeeper {self._core.where}>"

    def __enter__(self) -> Gatekeeper:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def connect(self, timeout: float = 5.0) -> bool:
        """Connects now, and waits until all masters are connected and subscribed. False if that takes too long.

        Calling it is optional. A gatekeeper does not know what a master announced before the connection. Raises
        ConnectionLost if the gatekeeper is closed, also while connect() waits.
        """
        self._start()
        with self._changed:
            is_ready = self._changed.wait_for(lambda: self._closed or self._is_ready, timeout)
            if self._closed:
                raise closed()
            return is_ready

    def close(self) -> None:
        """Sends unsent messages, for up to a second, and ends the connections. Later decisions raise ConnectionLost."""
        with self._lock:
            self._closed, self._is_started = True, False
            tenders, self._tenders = list(self._tenders.values()), {}
            for tender in tenders:
                tender.end()
            self._changed.notify_all()
        for tender in tenders:
            tender.join()

    def decide(
        self, identifier: str | bytes, domain: str | bytes | None = None, log_info: str | bytes = b""
    ) -> Decision:
        """Decides whether a request that comes now passes, waits or is rejected. Does not wait itself, as admit() does.

        log_info: for the log of the master, cut to 1,024 bytes. counterd ignores it.
        """
        if not self._is_started:
            self._start()
        with self._lock:
            return self._core.decide(identifier, domain, log_info, monotonic_ns(), time_ns())

    def gave_up(self, decision: Decision) -> None:
        """Call it when a delayed request stops waiting: its client has disconnected, or its delay is over."""
        with self._lock:
            self._core.gave_up(decision)

    def admit(
        self, identifier: str | bytes, domain: str | bytes | None = None, log_info: str | bytes = b""
    ) -> Admission:
        """Admits a request: `with gatekeeper.admit("10.0.0.1"):` waits if it has to, or raises Rejected."""
        return Admission(self, identifier, domain, log_info)

    def stats(self) -> Stats:
        """Returns how requests were decided, and what became of the messages. Asks no master."""
        with self._lock:
            return self._core.stats(monotonic_ns())

    # ---- inside ----

    @property
    def _is_ready(self) -> bool:
        return all(master.is_ready for master in self._core.masters)

    def _start(self) -> None:
        """Starts a thread for each master. If that fails, requests pass, and it is tried again later."""
        news: list[News] = []
        with self._lock:
            if self._closed:
                raise closed()
            for master in self._core.masters:
                now = time.monotonic()
                if master in self._tenders or now < master.control.retry_at:
                    continue
                try:
                    self._tenders[master] = Tender(self._core, master, self._changed, self._timeout)
                except (RuntimeError, OSError) as error:
                    news.append(self._core.lost(master, master.control, f"cannot start a thread: {error}", now))
            self._is_started = len(self._tenders) == len(self._core.masters)
        for each in news:
            report(each)

    def _make_locks(self) -> None:
        """A reentrant lock, because a signal handler may have interrupted a thread that has it."""
        self._lock: Any = threading.RLock()
        self._changed = threading.Condition(self._lock)

    def _after_fork(self) -> None:
        self._make_locks()
        for tender in self._tenders.values():
            tender.after_fork()
        self._tenders, self._is_started = {}, False
        self._core.reset()


class Admission:
    """One request at a gatekeeper: what Gatekeeper.admit() returns, for one `with`, which gives the Decision."""

    def __init__(
        self, gatekeeper: Gatekeeper, identifier: str | bytes, domain: str | bytes | None, log_info: str | bytes
    ) -> None:
        self._gatekeeper = gatekeeper
        self._asked = identifier, domain, log_info

    def __enter__(self) -> Decision:
        decision = self._gatekeeper.decide(*self._asked)
        if decision.verdict is Verdict.REJECT:
            raise self._gatekeeper._core.rejection(*self._asked[:2], decision)
        if decision.verdict is Verdict.DELAY:
            try:
                time.sleep(decision.delay_s)
            finally:
                self._gatekeeper.gave_up(decision)
        return decision

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Does nothing: a gatekeeper does not count requests that run."""
