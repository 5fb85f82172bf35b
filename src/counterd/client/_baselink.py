"""One connection of a client: what is held through it, what has to be given back, and what its end means.

Floor: side (ARCHITECTURE.md); the links for threads and for asyncio send, read and wait. No I/O. Only the client for
the counter protocol has holds and tokens.
"""

from __future__ import annotations

import time
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

from counterd.client._connection import (
    CLOSED,
    FORKED,
    PEER_CLOSED,
    NotSent,
    closed_by_server,
    lost,
    misunderstood,
)
from counterd.errors import ProtocolError

if TYPE_CHECKING:
    from collections.abc import Callable

    from counterd.client._calls import Call, Pending, Request
    from counterd.client._holding import Held
    from counterd.errors import CounterdError


class Link:
    """A connection, and the calls that wait for replies on it. This class itself is a connection that was never made.

    Whatever sends, or changes what is held, has the lock.
    """

    _lock: Any = nullcontext()  # of a link that only one thread uses

    def __init__(
        self,
        where: str,
        timeout: float,
        on_end: Callable[[Any], object],
        on_release: Callable[[Request], object],
        *,
        calls: Pending,
    ) -> None:
        self.where = where
        self.closed = ""  # why it is not connected any more
        self.calls = calls
        self.holds: set[Held] = set()  # what was granted to holds, and not given back
        self.loss_unreported = False  # it was lost with permits of no hold, and no call has raised that yet
        self.token: Any = None  # with which another connection can resume this one after its end
        self.successor: Any = None  # the connection that has resumed this one
        self._timeout = timeout
        self._on_end = on_end  # called with the link when it has ended, with the lock
        self._on_release = on_release  # called with each request that gives back what nobody waits for
        self._disowned: list[Held] = []  # to be given back: perhaps the garbage collector ended them under the lock
        self._resumable_until = 0.0

    # ---- what it keeps ----

    def disown(self, *held: Held) -> None:
        """Gives back what of these permits is held through this connection, without waiting for the reply.

        The garbage collector calls this when it ends a generator, perhaps in the middle of a call of the same thread.
        """
        self._disowned += held
        self.give_back()

    def give_back(self, *requests: Request) -> None:
        """Sends these requests, which give something back, and all that wait for it; without waiting for the replies.

        If this interrupts a call of the same thread, that call sends them.
        """
        self.calls.give_back += requests
        if not self._has_interrupted():
            with self._lock:
                self._give_back()

    def forget(self, *calls: Call) -> None:
        """Called when the caller no longer waits: everything that the calls were granted, or will be granted, is given
        back."""
        with self._lock:
            for call in calls:
                call.abandoned = True
                if call.frame and (cancel := self.calls.cancel(call)) and not self.closed:
                    self._tell(*cancel)
                elif call.granted is None:  # else the hold has what was granted
                    self.calls.forget(call)
            self._give_back()

    def tell(self, *request: Any) -> None:
        """Sends a request without waiting for the reply. Does nothing if the connection has ended."""
        with self._lock:
            if not self.closed:
                self._tell(*request)

    def inherit(self, ended: Link, take_over: Callable[[], object]) -> None:
        """Takes over the holdings of an ended connection. take_over: takes over the calls of that connection."""
        with ended._lock, self._lock:
            take_over()
            self.holds.update(ended.holds)
            ended.holds.clear()
            ended.successor, ended.token, ended.loss_unreported = self, None, False
            ended._give_back()
            self._give_back()

    def _give_back(self) -> None:
        while self._disowned and not self.may_resume():  # then the next connection gives it back
            held = self._disowned.pop()
            if self.successor is not None:
                self.successor.disown(held)
            elif held in self.holds:
                self.holds.discard(held)
                self.calls.give_back.append(self.calls.release(held.name, held.amount))
        if self.successor is not None and self.calls.give_back:
            requests, self.calls.give_back = self.calls.give_back, []
            self.successor.give_back(*requests)
        while self.calls.give_back and not self.closed:
            request = self.calls.give_back.pop()
            self._tell(*request)
            self._on_release(request)

    # ---- its end ----

    def current(self) -> Any:
        """Returns the connection that has resumed this one, or the one that has resumed that, and so on.

        Returns this connection if no other connection has resumed it.
        """
        link = self
        while link.successor is not None:
            link = link.successor
        return link

    def may_resume(self) -> bool:
        """Returns whether this connection was lost, but another connection can still resume it."""
        return bool(self.closed and self.token is not None and time.monotonic() < self._resumable_until)

    def next_token(self) -> Any:
        """Returns the token, with the number of the next attempt to present it; None if it cannot be resumed."""
        if not self.may_resume():
            return None
        self.token = self.token.again()
        return self.token

    def is_alive(self) -> bool:
        """Returns whether what is held through this connection is not lost. A connection for threads checks its socket;
        one for asyncio says what the event loop knows."""
        return not self.closed or self.may_resume() or (self.successor is not None and self.successor.is_alive())

    def is_open(self) -> bool:
        """Checks the socket. Returns whether neither side has ended the connection, as far as this side can know."""
        return not self.closed and not self._has_ended()

    def has_read_all(self, was_open: bool) -> bool:
        """Returns whether the server has read all requests that were sent, although it did not answer each of them.

        The server has ended the connection then, so it has released what a request releases, or takes it back. Nothing
        was lost before. was_open: whether the connection was open when the request was sent.
        """
        return was_open and self.closed == PEER_CLOSED

    def close(self, why: str = CLOSED, error: Callable[[], CounterdError] | None = None) -> None:
        """Ends the connection. Calls without a reply raise error, or ConnectionLost."""
        with self._lock:
            if not self.closed:
                self._mark_ended(why)
                self._on_end(self)
                self._hang_up()
            self.calls.fail(error or (lambda: lost(self.where, self.closed)))

    def after_fork(self) -> None:
        """Called in the child of a fork: the connection belongs to the parent, and what was lost, the parent has lost.

        A subclass closes the child's copy of the socket, and nothing else.
        """
        self.closed = self.closed or FORKED
        self.loss_unreported, self.token = False, None

    def _mark_ended(self, why: str) -> None:
        self.loss_unreported = self.calls.held > sum(held.amount for held in self.holds)
        if self.token is not None:  # from now on the server keeps the holdings for the grace time
            self._resumable_until = 0.0 if why == CLOSED else time.monotonic() + self.token.grace_s
        self.closed = why  # from now on another thread may read loss_unreported and connect again

    def _not_sent(self) -> NotSent:
        """Returns the error for a request after the end."""
        return NotSent(*lost(self.where, self.closed).args)

    def received(self, data: bytes) -> None:
        """Takes bytes of the server, with the lock."""
        try:
            self.calls.feed(data)
        except ProtocolError as error:
            text = misunderstood(self.where, error, data)
            self.close(str(error), lambda: ProtocolError(text))
        if self.calls.give_back:
            self._give_back()

    def _closed_by_peer(self, *, is_plain: bool) -> None:
        """Called when the server has ended the connection. is_plain: it is TCP without TLS."""
        is_new, doubt = not self.calls.answered, self.calls.doubt
        self.close(PEER_CLOSED, lambda: closed_by_server(self.where, doubt, plain_and_new=is_plain and is_new))

    # ---- what a subclass does ----

    def _tell(self, *request: Any) -> None:
        """Sends a request whose reply nobody waits for, with the lock."""
        raise NotImplementedError

    def _hang_up(self) -> None:
        """Ends the kernel's connection."""

    def _has_ended(self) -> bool:
        """Checks the socket. Returns whether the connection has ended."""
        raise NotImplementedError

    def _has_interrupted(self) -> bool:
        """Returns whether this has interrupted a call of the same thread, which has the lock."""
        return False
