"""The thread of a blocking client for the sentinel protocol: keeps leases alive, connects again, takes late grants.

Stands beside the floors. There is one where there is something to do, and it ends when there was nothing for a while.
"""

from __future__ import annotations

import math
import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any, cast

from counterd.client._connection import CLOSED, FORKED, DeadlinePassed
from counterd.client._link import Link, ThreadCall
from counterd.client._portable import Waker, is_mine
from counterd.client._tokens import FAILURES, TokenCalls, release
from counterd.protocols.sentinel import wire

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable

    from counterd.client._tls import SecureSocket
    from counterd.client._tokens import Lease, Tally, Token
    from counterd.client.sentinel import Client, Hold

IDLE_S = 5.0  # after which the thread ends
SLICE_S = 0.05  # how long it reads for late grants before it looks what else is to do
LATE_MAX_S = 10.0  # after which a server that owes an answer is given up


class TokenLink(Link):
    """One connection of the sentinel protocol, registered in its namespace."""

    def __init__(
        self,
        connected: socket.socket | SecureSocket,
        where: str,
        timeout: float,
        on_end: Callable[[Link], object],
        *,
        on_late: Callable[[], object],
        tally: Tally,
    ) -> None:
        """on_late: is called with the lock when a grant may come that nobody reads for."""
        super().__init__(connected, where, timeout, on_end, calls=TokenCalls(tally))
        self._on_late = on_late
        self._late_since = 0.0

    def give_back(self, token: Token) -> None:
        """Releases a token, and waits for nothing.

        The garbage collector does so where it ends a generator, maybe in the midst of this thread's own call.
        """
        self.calls.give_back.append(release(token))
        if not is_mine(self._lock):
            with self._lock:
                self._give_back()

    def leave(self, tokens: list[Token]) -> None:
        """Ends the connection, after these were given back. Who interrupts a call here leaves them to their leases."""
        if not is_mine(self._lock):
            self.calls.give_back += [release(token) for token in tokens]
            with self._lock:
                self._give_back()
        self.close()

    def owes_grants(self) -> bool:
        """Whether a grant may come that nobody waits for. Gives up a server that owes it for too long."""
        if not self._late():
            self._late_since = 0.0
            return False
        now = time.monotonic()
        self._late_since = self._late_since or now
        if now - self._late_since >= LATE_MAX_S:
            self.close(f"an acquire was not answered within {LATE_MAX_S:g} s")
            return False
        return True

    def collect(self, seconds: float) -> None:
        """Reads for that long, so that those grants are given back, or until there are none."""
        late = self._late()
        deadline = time.monotonic() + seconds
        try:
            with suppress(DeadlinePassed):
                for call in late:
                    self._wait(call, deadline)
        finally:
            with self._lock:
                for call in late:
                    call.wake = None
                self._pass_on()

    def _late(self) -> list[ThreadCall]:
        with self._lock:
            pending = cast("list[ThreadCall]", list(self.calls.pending.values()))
            return [call for call in pending if call.abandoned and self.calls.may_grant(call)]

    def _expect_late_grants(self) -> None:
        self._on_late()


class Keeper:
    """The thread. Whatever it is told is told with the client's lock for that, so that it does not end meanwhile."""

    def __init__(self, client: Client) -> None:
        self.leases: dict[Lease, Hold] = {}
        self._client = client
        self._waker = Waker()
        self._wakes_at = math.inf
        self._connects = self._collects = False  # it is to do that now
        self._stopped = False
        self._thread = threading.Thread(target=self._run, name="counterd-keep", daemon=True)
        self._thread.start()

    def add(self, lease: Lease, hold: Hold) -> None:
        self.leases[lease] = hold
        if lease.due < self._wakes_at:
            self.wake()

    def connect(self) -> None:
        """Now, so that nobody else waits for it."""
        self._connects = True
        self.wake()

    def collect(self) -> None:
        """What is granted to nobody."""
        self._collects = True
        self.wake()

    def has_work(self) -> bool:
        return bool(self.leases) or self._connects or self._collects

    def wake(self) -> None:
        """There is something new to look at."""
        self._waker.wake()

    def hurry(self) -> set[Token]:
        """All leases are due now, as there is a new connection. Their tokens."""
        leases = list(self.leases)
        for lease in leases:
            lease.due = 0.0
        self.wake()
        return {lease.token for lease in leases}

    def stop(self) -> None:
        """As the client is closed: nothing is held any more."""
        self._stopped = True
        self._forget(CLOSED)
        self.wake()

    def join(self) -> None:
        if self._thread is not threading.current_thread():
            self._thread.join()

    def after_fork(self) -> None:
        """In the child, where the thread is not, and which holds nothing."""
        self._forget(FORKED)
        self._waker.close()

    def _taken_out(self, lease: Lease) -> Hold | None:
        """The hold, unless it was left meanwhile."""
        with suppress(KeyError):
            return self.leases.pop(lease)
        return None

    def _forget(self, why: str) -> None:
        for lease in list(self.leases):
            lease.lost = lease.lost or why
        self.leases.clear()

    # ---- in the thread ----

    def _run(self) -> None:
        try:
            while not self._stopped:
                self._turn()
        finally:
            with self._client._keeping:
                if self._client._keeper is self:
                    self._client._keeper = None
                self._waker.close()

    def _turn(self) -> None:
        self._wakes_at = math.inf  # whatever is added from now on wakes it
        pause = self._work()
        self._collects = False  # before it looks
        link = cast("TokenLink", self._client._link)
        if link.owes_grants():
            link.collect(SLICE_S if pause is None else min(pause, SLICE_S))
            return
        self._wakes_at = time.monotonic() + (IDLE_S if pause is None else pause)
        link.watch(self._waker.fileno(), IDLE_S if pause is None else pause)
        if not self._waker.take() and pause is None and time.monotonic() >= self._wakes_at:
            self._stopped = self._client._dismiss(self)

    def _work(self) -> float | None:
        """Does what is due. Seconds until more is; None if nothing is known of."""
        client = self._client
        link = client._link
        if link.closed and (self.leases or self._connects) and not client._closed:
            self._connects = False
            try:
                link = client._connected()
            except FAILURES as error:
                client._outage = client._outage or str(error)
        if not link.closed:
            self._keep(link, [lease for lease in list(self.leases) if lease.due <= time.monotonic()])
        now = time.monotonic()
        for lease, hold in list(self.leases.items()):
            lease.look(now)
            if lease.lost and self._taken_out(lease) is not None:  # else it was left meanwhile
                client._fallback.lost(lease)
                hold._tell()
        leases = list(self.leases)
        if client._link.closed:
            times = [lease.ends for lease in leases] + ([client._attempts.retry_at] if leases or self._connects else [])
        else:
            times = [lease.next for lease in leases]
        return max(min(times) - now, 0.0) if times else None

    def _keep(self, link: Link, due: list[Lease]) -> None:
        if not due:
            return
        asked = time.monotonic()
        calls: list[Any] = []
        with suppress(*FAILURES):
            calls = [call.result for call in link.run([(wire.keep, lease.token.id) for lease in due])]
        now = time.monotonic()
        for lease, response in zip(due, calls or [None] * len(due), strict=True):
            lease.answered(asked, now, response)
            self._client._kept(lease, now)
