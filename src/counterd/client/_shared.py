"""The base of the blocking clients: one connection for all threads, which is replaced when it is lost, and the queues
of waiting holds.

Floor: side (ARCHITECTURE.md).
"""

from __future__ import annotations

import socket
import threading
import time
from typing import TYPE_CHECKING, Any, TypeVar

from counterd.client._backoff import Attempts
from counterd.client._command import Blocking, Request
from counterd.client._connection import (
    CLOSED,
    NOT_YET,
    cannot_connect,
    check_timeouts,
    connected_socket,
    forked,
    lost,
    no_connection,
    not_accepted,
)
from counterd.client._entering import ForWith
from counterd.client._link import Link, interrupted
from counterd.client._portable import is_mine
from counterd.client._steps import (
    ACQUIRE,
    CALL,
    CALL_ALL,
    CONNECT,
    PAUSE,
    QUEUE,
    RELEASE,
    RUN,
    WAIT,
    drive,
)
from counterd.client._turns import PAUSES, Turns
from counterd.errors import ConnectionLost, CounterdError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import TracebackType

    from counterd.client._addresses import Address
    from counterd.client._calls import Pending
    from counterd.client._steps import Steps
    from counterd.client._tls import SecureSocket

Self = TypeVar("Self", bound="Shared")
T = TypeVar("T")


class Shared(ForWith):
    """A connection to a server. If it is lost, the client makes a new one."""

    def __init__(self, addresses: list[Address], timeout: float, connect_timeout: float | None) -> None:
        """A subclass calls this last, because this calls the subclass's _make_link()."""
        self._addresses = addresses
        self._timeout, self._connect_timeout = check_timeouts(timeout, connect_timeout)
        self._closed = False
        self._attempts = Attempts()
        self._acts: dict[Any, Callable[..., Any]] = {
            CONNECT: lambda hears=True: self._connected(hears=hears),
            CALL: Link.call,
            CALL_ALL: Link.call_all,
            QUEUE: Link.queue,
            ACQUIRE: Link.acquire,
            RELEASE: Link.release,
            RUN: self._run_command,
            WAIT: lambda turn, seconds: turn.wait(None if seconds is None else min(seconds, threading.TIMEOUT_MAX)),
            PAUSE: self._pause,
        }
        self._make_locks()
        self._link = self._before = self._no_link()  # the connection, which may have ended, and the one before it
        forked.add(self)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.where}>"

    def __enter__(self: Self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Ends the connection: the server takes back everything that was held through it.

        Later calls raise ConnectionLost.
        """
        self._closed = True
        self._link.close()
        self._turns.wake_all()

    @property
    def where(self) -> str:
        """The address of the current connection, of the last one if it was lost, or the first address that will be
        tried."""
        return self._link.where

    # ---- what a client overrides ----

    def _make_calls(self) -> Pending:
        """Returns the object in which a new connection keeps its calls."""
        raise NotImplementedError

    def _make_link(self, connected: socket.socket | SecureSocket, where: str) -> Link:
        return Link(connected, where, self._timeout, self._on_end, calls=self._make_calls())

    def _on_end(self, link: Link) -> None:
        """Called when the connection has ended. The caller has the lock of the connection."""

    def _greet(self, link: Link) -> None:
        """Sends the first requests of a new connection, before calls use it. Raises CounterdError."""

    def _on_connected(self) -> None:
        """Called when there is a new connection."""

    def _run_command(self, made: Any) -> Any:
        raise NotImplementedError

    # ---- connecting ----

    def _connected(self, *, hears: bool = True) -> Link:
        """Returns the connection. If the connection was lost, returns a new one. Raises ConnectionLost or Timeout.

        hears: if something was lost with the last connection, and no call has raised that yet, first raises
        ConnectionLost.
        """
        link = self._link
        if not link.closed and not (hears and self._before.unheard):
            return link
        if is_mine(self._connecting):
            raise interrupted()
        with self._connecting:
            link = self._link
            if self._closed:
                raise no_connection(link.where, CLOSED)
            if link.may_resume():
                link = self._reconnected(link)
            if hears:
                for ended in (self._before, link):
                    if ended.unheard:
                        ended.unheard = False
                        raise lost(
                            ended.where,
                            f"{ended.closed}; everything that was acquired through this connection has been given back",
                        )
            return self._reconnected(link) if link.closed else link

    def _reconnected(self, ended: Link) -> Link:
        attempts = self._attempts
        ended.close()
        attempts.begin(time.monotonic(), ended, ended.calls.answered, lost(ended.where, ended.closed))
        link = self._connect()
        if ended.unheard:
            self._before = ended
        self._link = link
        attempts.succeeded(time.monotonic(), ended)
        if self._closed:  # close() was called meanwhile
            link.close()
            raise no_connection(link.where, CLOSED)
        self._on_connected()
        return link

    def _connect(self) -> Link:
        failure: CounterdError | None = None
        for address in self._addresses:
            where = str(address)
            try:
                connected = connected_socket(address, self._connect_timeout)
            except TimeoutError:
                failure = not_accepted(where, self._connect_timeout)
            except OSError as error:
                failure = cannot_connect(where, error)
            else:
                link: Link | None = None
                try:
                    link = self._make_link(connected, where)
                    self._greet(link)
                except BaseException as error:
                    if link is None:
                        connected.close()
                    else:
                        link.close(str(error) or type(error).__name__)
                    if not isinstance(error, CounterdError):
                        raise
                    failure = error
                else:
                    return link
        assert failure is not None
        self._attempts.failed(time.monotonic(), failure)
        raise failure

    def _no_link(self) -> Link:
        """Returns a closed link, for a client that has not connected yet.

        The link counts as `answered`, so the client may connect immediately.
        """
        link = self._make_link(socket.socket(), str(self._addresses[0]))
        link.close(NOT_YET)
        link.calls.answered = True
        return link

    def _make_locks(self) -> None:
        """Makes the locks. The locks are reentrant, because a signal handler may interrupt a thread that has them."""
        self._turns = Turns()
        self._connecting: Any = threading.RLock()

    def _after_fork(self) -> None:
        """Called in the child of a fork.

        Makes new locks and queues. The old locks and queues may belong to threads that do not run in the child.
        """
        self._link.after_fork()
        self._before = self._link
        self._make_locks()

    # ---- step machines ----

    _new_turn = threading.Event
    _now = staticmethod(time.monotonic)

    def _drive(self, steps: Steps[T]) -> T:
        return drive(steps, self._acts)

    def _pause(self, seconds: float) -> None:
        """Waits, but only until close() at the longest."""
        turn = threading.Event()
        until = time.monotonic() + seconds
        self._turns.join(PAUSES, turn)
        try:
            while not self._closed and (left := until - time.monotonic()) > 0:
                turn.clear()  # set also when the one before in this queue leaves it
                turn.wait(left)
        finally:
            self._turns.leave(PAUSES, turn)

    def _next_attempt(self) -> float | None:
        return None if self._closed else self._attempts.retry_at


class Commanded(Shared, Blocking):
    """A client whose methods are the commands of _command."""

    def _run_command(self, request: Request[Any]) -> Any:
        link = self._connected(hears=False)
        was_good = link.calls.answered
        try:
            return link.call(request, patience=request.patience)
        except ConnectionLost:
            if self._closed or not was_good or not request.is_repeatable:
                raise
        return self._connected(hears=False).call(request, patience=request.patience)

    def _greeting(self) -> Sequence[Request[Any]]:
        """Returns the first requests of a new connection. If the server refuses one of them, the connection ends."""
        return ()

    def _greet(self, link: Link) -> None:
        for call in link.run([(request,) for request in self._greeting()]):
            if call.error is not None:
                raise call.error
