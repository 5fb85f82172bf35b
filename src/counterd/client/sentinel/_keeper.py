"""The connection of a blocking client for the sentinel protocol, and the client's thread.

The thread keeps leases alive, connects again, and takes grants that arrive too late. Floor: side (ARCHITECTURE.md).
"""

from __future__ import annotations

import math
import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any, cast

from counterd.client._connection import DeadlinePassed
from counterd.client._link import Link, ThreadCall
from counterd.client._portable import Waker, is_mine
from counterd.client.sentinel._tokens import TokenCalls, release

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable

    from counterd.client._tls import SecureSocket
    from counterd.client.sentinel._tokens import Leases, Tally, Token

IDLE_S = 5.0  # after which the thread ends
SLICE_S = 0.05  # how long the thread reads for late grants before it checks what else is due
LATE_MAX_S = 10.0  # how long a server may owe the reply to an acquire


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
        """on_late: called, by a caller that has the lock, when a grant may arrive while no thread reads."""
        super().__init__(connected, where, timeout, on_end, calls=TokenCalls(tally))
        self._on_late = on_late
        self._late_since = 0.0

    def give_back(self, *tokens: Token) -> None:
        """Gives tokens back without waiting for the replies.

        The garbage collector calls this when it ends a generator, perhaps in the middle of a call of the same thread.
        """
        self.calls.give_back += [release(token) for token in tokens]
        if not is_mine(self._lock):
            with self._lock:
                self._give_back()

    def leave(self, tokens: list[Token]) -> None:
        """Gives tokens back and ends the connection. If this interrupts a call, the tokens end with their leases."""
        if not is_mine(self._lock):
            self.give_back(*tokens)
        self.close()

    def owes_grants(self) -> bool:
        """Returns whether a grant may arrive whose caller no longer waits.

        Ends the connection if that takes longer than LATE_MAX_S.
        """
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
        """Reads for this many seconds, or until no more late grants can arrive, and gives late grants back."""
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
    """Runs a thread while there is work to do. The thread ends when there was no work for IDLE_S.

    work: does the work that is due, and connects if its argument is True. Returns the connection, and the time when
    more work is due.
    """

    def __init__(self, leases: Leases, work: Callable[[bool], tuple[TokenLink, float]]) -> None:
        self._leases = leases
        self._work = work
        # Reentrant, because a signal handler may have interrupted its thread. A thread that has it does not take the
        # lock of a connection, because a thread that has that lock may wait for this one.
        self.lock: Any = threading.RLock()
        self._thread: threading.Thread | None = None
        self._waker: Waker | None = None  # of the thread that runs; that thread closes it
        self._wakes_at = math.inf
        self._connects = False  # the thread is to connect
        self._stopped = False

    def stir(self, due: float = 0.0, *, connects: bool = False) -> None:
        """Makes the thread check for work, no later than at `due`, and makes it connect if `connects` is true.

        Does nothing when the program ends, because no new thread can be started then.
        """
        with suppress(RuntimeError), self.lock:
            if self._stopped:
                return
            self._connects = self._connects or connects
            if self._waker is None:
                self._start()
            elif due < self._wakes_at:
                self._waker.wake()

    def stop(self) -> None:
        """Ends the thread, and starts no other thread."""
        with self.lock:
            self._stopped = True
            waker, self._waker = self._waker, None
            if waker is not None:
                waker.wake()

    def join(self) -> None:
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()

    def after_fork(self) -> None:
        """Called in the child of a fork, where the thread does not run."""
        if self._waker is not None:
            self._waker.close()

    def _start(self) -> None:
        waker = self._waker = Waker()
        thread = self._thread = threading.Thread(target=self._run, args=(waker,), name="counterd-keep", daemon=True)
        try:
            thread.start()
        except BaseException:
            if not thread.is_alive():
                self._thread = self._waker = None
                waker.close()
            raise

    # ---- in the thread ----

    def _run(self, waker: Waker) -> None:
        try:
            while self._waker is waker:  # else it was stopped
                self._turn(waker)
        finally:
            with self.lock:
                if self._waker is waker:
                    self._waker = None
                waker.close()

    def _turn(self, waker: Waker) -> None:
        self._wakes_at = math.inf  # whatever is due from now on wakes it
        connects, self._connects = self._connects, False
        link, due = self._work(connects)
        now = time.monotonic()
        if link.owes_grants():
            link.collect(min(max(due - now, 0.0), SLICE_S))
            return
        self._wakes_at = now + IDLE_S if due == math.inf else due
        link.watch(waker.fileno(), max(self._wakes_at - now, 0.0))
        if not waker.take() and due == math.inf and time.monotonic() >= self._wakes_at:
            with self.lock:  # so that stir() does not run meanwhile
                if not waker.take() and not self._leases.holds:
                    self._waker = None
