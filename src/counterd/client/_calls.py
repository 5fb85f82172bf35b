"""Requests that were sent and have no reply yet. No I/O, no clock.

Pending works for any protocol. Ordered is for protocols whose replies come in the order of the requests. If something
was granted to a caller that no longer waits, it is added to give_back, and the owner of the connection releases it.

Floor: side (ARCHITECTURE.md); shared by the blocking client and the client for asyncio.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

from counterd.errors import CounterdError, ServerError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

# An encoder of a wire module and its arguments except the opaque; or one request of _command.
Request = tuple[Any, ...]
# After so many calls that were given up without an answer, the client closes the connection: it keeps each of them.
UNANSWERED_MAX = 1 << 17
# Seconds that a caller waits for a reply that may take long, before it checks that the server still answers.
PROBE_S = 10.0
FRAME_KEPT = 1024  # bytes: a longer request is not kept after it was sent


class Call:
    """A request that was sent, and its reply. A subclass defines how its caller waits."""

    result: Any = None
    error: CounterdError | None = None
    done = False  # it has its result or error
    abandoned = False  # its caller no longer waits
    granted: Callable[[Any], object] | None = None  # called with the result in the same step, if its caller still waits
    waiter: Any = None  # for what its caller waits: a lock that another thread releases, or a future
    frame = b""  # what was sent; if replies come in order, only its first byte
    request: Any = None  # if replies come in order: the object that the call was made from
    items: Sequence[Any] = ()  # of a Take: what it asked for
    grant: Any = None  # of a Take: the grant, until it is given back
    permits = 0  # granted, and not given back; with sentinel, the id of the token
    jobs: Sequence[int] = ()  # with beanstalk: reserved by this call
    batch: Any = None  # with the counter protocol: of the requests that were sent together
    entries: list[Any] | None = None  # with the counter protocol: the result of a Dump so far

    def settle(self, result: Any, error: CounterdError | None) -> bool:
        """Gives the result or the error to the caller. Returns False if the caller no longer waits."""
        is_wanted = not self.abandoned
        if error is None:
            if is_wanted and self.granted is not None:
                self.granted(result)
        elif self.done:  # it has an error already
            return False
        self.result, self.error, self.done = result, error, True  # from here on its caller may continue
        if self.waiter is not None:
            self._wake()
        return is_wanted

    def outcome(self) -> Any:
        """Returns the result, or raises the error."""
        if self.error is not None:
            raise self.error
        return self.result

    def _wake(self) -> None:
        """Lets the caller continue."""
        raise NotImplementedError


def outcomes(calls: Sequence[Call]) -> list[Any]:
    """Returns the results of calls that are done, including refusals. Raises any other error of a call."""
    found = []
    for call in calls:
        if call.error is None:
            found.append(call.result)
        elif isinstance(call.error, ServerError):
            found.append(call.error)
        else:
            raise call.error
    return found


class Pending:
    """The calls of one connection. This class has the code that all protocols share."""

    MASK: int  # the largest opaque
    IS_ORDERED = False  # replies come in the order of the requests

    def __init__(self) -> None:
        self.pending: dict[int, Call] = {}  # by opaque, the oldest first
        self.listeners: list[Call] = []  # calls that wait for what the server sends unasked
        self.answered = False  # the server has sent a valid reply
        self.held = 0  # how much would be lost with the connection, without what is being released
        self.give_back: list[Request] = []  # requests that give back what was granted to callers that have gone
        self._opaque = 0

    def add(self, call: Call, encode: Callable[..., bytes], *arguments: Any) -> bytes:
        """Gives the call an opaque number.

        Returns the bytes to send. Raises ValueError if the request does not fit the protocol.
        """
        opaque = self._opaque = (self._opaque + 1) & self.MASK
        while opaque in self.pending:  # that call is very old: all other opaques were used since
            opaque = self._opaque = (opaque + 1) & self.MASK
        call.frame = frame = encode(opaque, *arguments)
        self.pending[opaque] = call
        return frame

    def add_all(self, calls: Sequence[Call], requests: Sequence[Request]) -> bytes:
        """Does the same as add() for all calls and their requests. If one of them raises an exception, adds none."""
        try:
            return b"".join([self.add(call, *request) for call, request in zip(calls, requests, strict=True)])
        except BaseException:
            for call in calls:
                if call.frame:
                    self._take_back(call)
            raise

    def feed(self, data: bytes) -> None:
        """Settles the calls that these bytes answer. Raises ProtocolError if the bytes are not valid replies."""
        raise NotImplementedError

    def fail(self, error: Callable[[], CounterdError]) -> None:
        """Called when the connection has ended. Settles all calls, each with its own error."""
        pending, self.pending = self.pending, {}
        for call in pending.values():
            call.settle(None, error())
        self.wake_listeners()

    def has_unasked(self) -> bool:
        """Returns whether the server has sent something without a request, and nobody has taken it yet."""
        return False

    def wake_listeners(self) -> None:
        """Called when the server has sent something without a request, or the connection has ended."""
        listeners, self.listeners = self.listeners, []
        for call in listeners:
            call.settle(None, None)

    @property
    def doubt(self) -> str:
        """Returns the end of the message about a missing reply: a possible reason, or ""."""
        return ""

    def forget(self, call: Call) -> None:
        """Called when the caller no longer waits. Adds to give_back what the call was granted."""
        raise NotImplementedError

    def release(self, name: bytes, permits: int) -> Request:
        """Returns the request that gives these permits back."""
        raise NotImplementedError

    def may_grant(self, call: Call) -> bool:
        """Returns whether the reply may grant something, which then has to be given back."""
        raise NotImplementedError

    def refunds(self, grant: Any, request: Request) -> list[Request]:
        """Returns the requests that give back what this request was granted besides permits."""
        return []

    def cancel(self, call: Call) -> Request | None:
        """Returns the request that ends the wait of a call in the server, or None if the call does not wait there."""
        return None

    def _take_back(self, call: Call) -> None:
        """Removes a call whose request is not sent after all."""
        raise NotImplementedError


class Ordered(Pending):
    """The calls of one connection whose replies come in the order of the requests.

    The requests are instances of Request in _command.
    """

    MASK = (1 << 63) - 1
    IS_ORDERED = True

    def add(self, call: Call, request: Any, *_: Any) -> bytes:
        self._opaque += 1
        frame: bytes = request.frame
        if len(frame) > FRAME_KEPT:
            request = copy.copy(request)
            request.frame = b""
        call.frame, call.request = frame[:1], request
        self.pending[self._opaque] = call
        return frame

    def forget(self, call: Call) -> None:
        """Does nothing: the reply still has to be read, in its order."""

    def may_grant(self, call: Call) -> bool:
        return False

    def _read(self, replies: list[Any]) -> tuple[Call, Any, ServerError | None]:
        """Returns the oldest call, which these replies answer, with its result or the server's refusal."""
        opaque, call = next(iter(self.pending.items()))
        result, error = None, None
        try:
            result = call.request.read(replies)
        except ServerError as refusal:
            error = refusal
        self.pending.pop(opaque, None)  # it may be gone: a signal handler may have closed the connection
        return call, result, error

    def _take_back(self, call: Call) -> None:
        self.pending = {opaque: pending for opaque, pending in self.pending.items() if pending is not call}
        call.frame = b""
