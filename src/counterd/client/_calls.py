"""Requests that were sent and are not answered yet: no I/O, no clock.

Pending is for any protocol, Ordered for those whose replies come in the order of the requests. What was granted to a
caller that has gone meanwhile is noted in give_back, and the owner of the connection releases it.

Stands beside the floors, shared by the blocking client and that for asyncio.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

from counterd.errors import CounterdError, ServerError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

# What is asked: an encoder of a wire module, and its arguments but the opaque; or one request of _command.
Request = tuple[Any, ...]
# Calls that were not answered, and given up, before the connection is: what a server that never answers can make a
# program keep.
UNANSWERED_MAX = 1 << 17
FRAME_KEPT = 1024  # bytes of a request that is kept with a call, where only its reply is still awaited


class Call:
    """A request that is under way. How its caller waits is up to the client, which overrides settle()."""

    frame = b""  # what was sent; of a protocol whose replies come in order, its first byte
    request: Any = None  # it was made from this one, of a protocol whose replies come in order
    permits = 0  # that it was granted, and that are not given back; of sentinel, the token that stands for them
    jobs: Sequence[int] = ()  # that it was given, of beanstalk
    batch: Any = None  # of those that it was sent with, of the counter protocol,
    entries: list[Any] | None = None  # and of a Dump, so far

    def settle(self, result: Any, error: CounterdError | None) -> bool:
        """Tells the caller how it ended. False if nobody waits for it any more."""
        raise NotImplementedError


class Pending:
    """The calls of one connection: what the protocols have in common."""

    MASK: int  # of opaques
    IS_ORDERED = False  # replies come in the order of the requests

    def __init__(self) -> None:
        self.pending: dict[int, Call] = {}  # by opaque, the oldest first
        self.listeners: list[Call] = []  # that wait for what the server sends unasked
        self.refused = 0  # acquires for which no permits were available; counted of the counter protocol only
        self.answered = False  # the server has said something that makes sense
        self.held = 0  # what would be lost with the connection, but what has been sent back
        self.give_back: list[Request] = []  # what gives back what was granted to nobody
        self._opaque = 0

    def add(self, call: Call, encode: Callable[..., bytes], *arguments: Any) -> bytes:
        """Gives the call an opaque; returns what to send. Raises ValueError for what does not fit the protocol."""
        opaque = self._opaque = (self._opaque + 1) & self.MASK
        while opaque in self.pending:  # one that is as old as all other opaques together
            opaque = self._opaque = (opaque + 1) & self.MASK
        call.frame = frame = encode(opaque, *arguments)
        self.pending[opaque] = call
        return frame

    def add_all(self, calls: Sequence[Call], requests: Sequence[Request]) -> bytes:
        """As add(), of each call its request, or of none."""
        try:
            return b"".join([self.add(call, *request) for call, request in zip(calls, requests, strict=True)])
        except BaseException:
            for call in calls:
                if call.frame:
                    self._take_back(call)
            raise

    def feed(self, data: bytes) -> None:
        """Settles the calls that are answered with these bytes. Raises ProtocolError for what no server may send."""
        raise NotImplementedError

    def fail(self, error: Callable[[], CounterdError]) -> None:
        """The connection has gone: settles all calls, each with an error of its own."""
        pending, self.pending = self.pending, {}
        for call in pending.values():
            call.settle(None, error())
        self.wake_listeners()

    def has_unasked(self) -> bool:
        """Whether something is here that came unasked, and was not taken yet."""
        return False

    def wake_listeners(self) -> None:
        """Something has come unasked, or the connection has gone."""
        listeners, self.listeners = self.listeners, []
        for call in listeners:
            call.settle(None, None)

    @property
    def doubt(self) -> str:
        """Ends a message that there is no reply: why that may be, if anything hints at it."""
        return ""

    def forget(self, call: Call) -> None:
        """Nobody is there to take what this was granted."""
        raise NotImplementedError

    def release(self, name: bytes, permits: int) -> Request:
        """What gives these back."""
        raise NotImplementedError

    def may_grant(self, call: Call) -> bool:
        """Whether its answer can be something that has to be given back."""
        raise NotImplementedError

    def _take_back(self, call: Call) -> None:
        """It is not sent after all."""
        raise NotImplementedError


class Ordered(Pending):
    """The calls of one connection whose replies come in the order of the requests, which are those of _command."""

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
        """Its reply is still awaited, in its turn."""

    def may_grant(self, call: Call) -> bool:
        return False

    def _read(self, replies: list[Any]) -> tuple[Call, Any, ServerError | None]:
        """The oldest call, which these replies answer; and its result, or its refusal."""
        opaque, call = next(iter(self.pending.items()))
        result, error = None, None
        try:
            result = call.request.read(replies)
        except ServerError as refusal:
            error = refusal
        self.pending.pop(opaque, None)  # all of it may have ended meanwhile: a signal handler may close()
        return call, result, error

    def _take_back(self, call: Call) -> None:
        self.pending = {opaque: pending for opaque, pending in self.pending.items() if pending is not call}
        call.frame = b""
