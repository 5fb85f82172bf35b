"""The base of all clients: one connection for all callers, which is replaced when it is lost, and the queues of holds
that wait.

What a client does is written as step machines (_steps.py). Threads (_threads.py) and Tasks (_tasks.py) perform the
steps.

Floor: side (ARCHITECTURE.md). No I/O, and no clock of its own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from counterd.client._backoff import Attempts
from counterd.client._baselink import Link
from counterd.client._command import CommandBase
from counterd.client._connection import CLOSED, NOT_YET, check_timeouts, forked, lost, no_connection
from counterd.client._steps import (
    CALL,
    CALL_ALL,
    CONNECT,
    OPEN,
    PAUSE,
    QUEUE,
    RECONNECT,
    RELEASE,
    RUN,
    TAKE,
    WAIT,
)
from counterd.client._wait_queues import PAUSES, WaitQueues
from counterd.client._waiting import Patience
from counterd.errors import CounterdError, ServerError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from counterd.client._addresses import Address
    from counterd.client._calls import Pending, Request
    from counterd.client._steps import Steps


class Connecting(CommandBase):
    """A connection to a server. If it is lost, the client makes a new one."""

    LINK: type[Any]  # of its connections
    _drive: Any  # performs steps; for asyncio, returns a coroutine that does
    _new_waiter: Any  # makes the event of a caller that waits
    _now: Callable[[], float]  # seconds of a monotonic clock
    # What the steps ask for; for asyncio, these return coroutines.
    _connected: Any
    _reconnect: Any
    _open: Any
    _wait: Any

    def __init__(self, addresses: list[Address], timeout: float, connect_timeout: float | None) -> None:
        """A subclass calls this last, because this calls what the subclass overrides."""
        self._addresses = addresses
        self._timeout, self._connect_timeout = check_timeouts(timeout, connect_timeout)
        self._closed = False  # close() was called
        self._attempts = Attempts()
        link = self.LINK
        self._acts: dict[Any, Callable[..., Any]] = {
            CONNECT: lambda report_loss=True: self._connected(report_loss=report_loss),
            RECONNECT: self._reconnect,
            OPEN: self._open,
            CALL: link.call,
            CALL_ALL: link.call_all,
            TAKE: lambda link, request, granted: link.call(*request, granted=granted),
            QUEUE: link.queue,
            RELEASE: link.release,
            RUN: self._run_command,
            WAIT: self._wait,
            PAUSE: lambda seconds: self._drive(self._pausing(seconds)),
        }
        self._link: Any = self._no_link(str(addresses[0]))  # the connection, which may have ended
        self._link.closed, self._link.calls.answered = NOT_YET, True  # as after a good connection, it may connect now
        self._before: Any = self._link  # the connection before it
        self._start_anew()
        forked.add(self)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.where}>"

    @property
    def where(self) -> str:
        """The address of the current connection, of the last one if it was lost, or the first address that will be
        tried."""
        return str(self._link.where)

    # ---- what a client overrides ----

    def _make_calls(self) -> Pending:
        """Returns the object in which a new connection keeps its calls."""
        raise NotImplementedError

    def _first_requests(self) -> Sequence[Request]:
        """Returns the first requests of a new connection. If the server refuses one of them, the connection ends."""
        return ()

    def _greeted(self, link: Any) -> Steps[None]:
        """Sends the first requests of a new connection, before calls use it. Raises CounterdError."""
        for answer in (yield CALL_ALL, link, self._first_requests()):
            if isinstance(answer, ServerError):
                raise answer

    def _on_connected(self) -> None:
        """Called when there is a new connection."""

    def _on_end(self, link: Any) -> None:
        """Called when a connection has ended, with its lock."""

    def _on_release(self, request: Any) -> None:
        """Called with a request that gives back what nobody waits for. Its first argument is the name of a queue."""
        if len(request) > 1:
            self._wait_queues.wake(request[1])

    def _start_anew(self) -> None:
        """Makes what belongs to threads or to an event loop: at first, and when those of before do not run any more."""
        self._wait_queues = WaitQueues()

    # ---- connecting ----

    def _no_link(self, where: str) -> Link:
        """Returns a connection that was never made."""
        return Link(where, self._timeout, self._on_end, self._on_release, calls=self._make_calls())

    def _current(self, report_loss: bool) -> Steps[Any]:
        """Returns the connection. If the connection was lost, returns a new one. Raises ConnectionLost or Timeout.

        report_loss: if something was lost with the last connection, and no call has raised that yet, first raises
        ConnectionLost.
        """
        link = self._link
        if self._closed:
            raise no_connection(link.where, CLOSED)
        if link.may_resume():
            link = yield (RECONNECT,)
        if report_loss:
            for ended in (self._before, link):
                if ended.loss_unreported:
                    ended.loss_unreported = False
                    raise lost(
                        ended.where,
                        f"{ended.closed}; everything that was acquired through this connection has been given back",
                    )
        return (yield (RECONNECT,)) if link.closed else link

    def _begin_attempt(self) -> None:
        """Raises ConnectionLost if the next attempt to connect is not due yet."""
        link = self._link
        self._attempts.begin(self._now(), link, link.calls.answered, lost(link.where, link.closed))

    def _reconnected(self) -> Steps[Any]:
        """Replaces the connection, which has ended, after _begin_attempt()."""
        ended = self._link
        link = yield from self._opened()
        if ended.loss_unreported:
            self._before = ended
        self._link = link
        self._attempts.succeeded(self._now(), ended)
        if self._closed:  # meanwhile
            link.close()
            raise no_connection(link.where, CLOSED)
        if not link.closed:  # else a server without room has closed it already
            self._on_connected()
        return link

    def _opened(self) -> Steps[Any]:
        """Connects to the first of the addresses that accepts a connection and the first requests."""
        failure: CounterdError | None = None
        for address in self._addresses:
            opened: list[Any] = []
            try:
                link = yield OPEN, address, opened
                yield from self._greeted(link)
                return link
            except BaseException as error:
                for link in opened:
                    link.close(str(error) or type(error).__name__)
                if not isinstance(error, CounterdError):
                    raise
                failure = error
        assert failure is not None
        self._attempts.failed(self._now(), failure)
        raise failure

    def _next_attempt(self) -> float | None:
        """Returns when the client may connect again, or None if it is closed."""
        return None if self._closed else self._attempts.retry_at

    def _report_no_loss(self, link: Any) -> None:
        """Called when a call raises that this connection was lost."""
        link.loss_unreported = False

    def _end(self) -> None:
        self._closed = True
        self._link.close()
        self._wait_queues.wake_all()

    def _after_fork(self) -> None:
        """Called in the child of a fork, where no thread and no task of the parent runs."""
        self._link.after_fork()
        self._before = self._link
        self._start_anew()

    # ---- other steps ----

    def _pausing(self, seconds: float) -> Steps[None]:
        waiter = self._new_waiter()
        patience = Patience(seconds, self._now)
        self._wait_queues.join(PAUSES, waiter)
        try:
            while not self._closed and not patience.is_over():
                waiter.clear()  # set also when the one before in this queue leaves it
                yield WAIT, waiter, patience.left()
        finally:
            self._wait_queues.leave(PAUSES, waiter)
