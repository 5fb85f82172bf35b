"""What the blocking clients have in common whose connection threads share: the next one when it is lost, and turns.

Stands beside the floors.
"""

from __future__ import annotations

import socket
import threading
import time
from typing import TYPE_CHECKING, Any

from counterd.client._backoff import CONNECT_FIRST_S, CONNECT_LONGEST_S, Backoff
from counterd.client._connection import (
    CLOSED,
    NOT_YET,
    cannot_connect,
    check_timeouts,
    connected_socket,
    lost,
    no_connection,
    not_accepted,
)
from counterd.client._link import Link, interrupted
from counterd.client._portable import is_mine
from counterd.client._turns import Turns
from counterd.client._waiting import ASK, GIVE_UP, LOOK, WAIT, drive, waiting
from counterd.errors import ConnectionLost, CounterdError

if TYPE_CHECKING:
    from counterd.client._addresses import Address
    from counterd.client._holding import Wanted
    from counterd.client._tenure import Seen, Tenure
    from counterd.client._tls import SecureSocket
    from counterd.client._turns import Queue
    from counterd.client._waiting import Acts


class Shared:
    """A connection to a server, and the next one. A client sets _link and _before when it is made."""

    _link: Link  # the connection, which may have ended
    _before: Link  # the connection that this one replaced

    def __init__(self, addresses: list[Address], timeout: float, connect_timeout: float | None) -> None:
        self._addresses = addresses
        self._timeout, self._connect_timeout = check_timeouts(timeout, connect_timeout)
        self._closed = False
        self._backoff = Backoff(CONNECT_FIRST_S, CONNECT_LONGEST_S)
        self._retry_at = 0.0
        self._failure = ""  # of the last attempt to connect
        self._make_locks()

    @property
    def where(self) -> str:
        """The address that it is connected to, or was last."""
        return self._link.where

    # ---- what a client says ----

    def _make_link(self, connected: socket.socket | SecureSocket, where: str) -> Link:
        return Link(connected, where, self._timeout, self._on_end)

    def _on_end(self, link: Link) -> None:
        """A connection has ended. Is called with its lock."""

    def _on_connected(self) -> None:
        """There is a new connection."""

    def _ask(self, hold: Any, asked: Any) -> Any:
        """Asks for what a hold wants, once. NotAvailable, ConnectionLost, or what is not waited for."""
        raise NotImplementedError

    def _look_around(self, asked: Any) -> Seen:
        """Whether others want what a hold wants. Is called if there is a tenure."""
        raise NotImplementedError

    def _gives_up(self, queue: Queue, asked: Any) -> CounterdError:
        """The error for who has waited long enough."""
        raise NotImplementedError

    # ---- connecting ----

    def _connected(self, *, hears: bool = True) -> Link:
        """The connection, a new one if it was lost. ConnectionLost or Timeout.

        hears: the caller is to be told if permits were lost with it, and nobody was told yet.
        """
        link = self._link
        if not link.closed and not self._before.unheard:
            return link
        if is_mine(self._connecting):
            raise interrupted()
        with self._connecting:
            link = self._link
            if self._closed:
                raise no_connection(link.where, CLOSED)
            if hears:
                for ended in (self._before, link):
                    if ended.unheard:
                        ended.unheard = False
                        raise lost(ended.where, f"{ended.closed}; what was acquired through it has been given back")
            return self._reconnected(link) if link.closed else link

    def _reconnected(self, ended: Link) -> Link:
        if ended.calls.answered:
            self._backoff.reset()
            self._retry_at = 0.0
        if time.monotonic() < self._retry_at:
            failure = self._failure or lost(ended.where, ended.closed)
            raise ConnectionLost(f"{failure}; another attempt is due within {CONNECT_LONGEST_S:g} s")
        answered, ended.calls.answered = ended.calls.answered, False
        link = self._connect()
        if not answered:  # as with a server that has too many connections: it accepts, and closes
            self._retry_at = time.monotonic() + self._backoff.delay()
        if ended.unheard:
            self._before = ended
        self._link = link
        if self._closed:  # meanwhile
            link.close()
            raise no_connection(link.where, CLOSED)
        self._on_connected()
        return link

    def _connect(self) -> Link:
        failure: CounterdError | None = None
        self._failure = ""
        for address in self._addresses:
            where = str(address)
            try:
                connected = connected_socket(address, self._connect_timeout)
            except TimeoutError:
                failure = not_accepted(where, self._connect_timeout)
            except OSError as error:
                failure = cannot_connect(where, error)
            else:
                return self._make_link(connected, where)
        assert failure is not None
        self._failure = str(failure)
        self._retry_at = time.monotonic() + self._backoff.delay()
        raise failure

    def _no_link(self) -> Link:
        """What a client has before it connects first, which it does without a pause."""
        link = self._make_link(socket.socket(), str(self._addresses[0]))
        link.close(NOT_YET)
        link.calls.answered = True
        return link

    def _make_locks(self) -> None:
        """Reentrant: a signal handler may find them locked by what it interrupted."""
        self._turns = Turns()
        self._connecting: Any = threading.RLock()

    def _after_fork(self) -> None:
        """In the child. Locks may be held there by threads that are not, and queues have waiters that are not."""
        self._link.after_fork()
        self._before = self._link
        self._make_locks()

    # ---- waiting ----

    def _take(self, hold: Any, asked: Wanted, tenure: Tenure | None = None) -> Any:
        """Waits for what a hold wants, in turn; returns what asking for it did. See waiting()."""
        turn = threading.Event()
        steps = waiting(self._turns, turn, asked, tenure, now=time.monotonic, retry_at=self._next_attempt)
        acts: Acts = {
            WAIT: lambda seconds: turn.wait(None if seconds is None else min(seconds, threading.TIMEOUT_MAX)),
            LOOK: lambda: self._look_around(asked),
            ASK: lambda: self._ask(hold, asked),
            GIVE_UP: lambda queue: self._gives_up(queue, asked),
        }
        return drive(steps, acts)

    def _next_attempt(self) -> float | None:
        return None if self._closed else self._retry_at
