"""One connection of a client for asyncio, which any number of tasks can use at the same time.

Floor: side (ARCHITECTURE.md). Requests that tasks make in the same turn of the event loop are sent together.
"""

from __future__ import annotations

import asyncio
import math
import os
import socket
from asyncio.trsock import TransportSocket
from contextlib import suppress
from typing import TYPE_CHECKING, Any, cast

from counterd.client._baselink import Link
from counterd.client._calls import PROBE_S, UNANSWERED_MAX, Call, Pending, outcomes
from counterd.client._connection import not_answered, set_options
from counterd.client._portable import has_ended
from counterd.errors import ServerError, Timeout

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from counterd.client._calls import Request
    from counterd.client._holding import Held

LOOP_CLOSED = "its event loop was closed"


class Wire(asyncio.Protocol):
    """A connection in an event loop, also before it is made and after its end.

    is_busy: whether the transport has enough unsent bytes. over: done when the socket is closed.
    """

    transport: Any = None  # an asyncio.Transport
    is_busy = False

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.over: asyncio.Future[None] = loop.create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport
        if isinstance(transport.get_extra_info("peername"), tuple):  # of TCP
            set_options(cast("socket.socket", transport.get_extra_info("socket")))

    def connection_lost(self, error: Exception | None) -> None:
        self.over.set_result(None)

    def pause_writing(self) -> None:
        self.is_busy = True

    def resume_writing(self) -> None:
        self.is_busy = False

    def abort(self) -> None:
        if self.transport is not None:
            self.transport.abort()

    def put_away(self) -> None:
        """Called in the child of a fork.

        Replaces the child's copy of the socket by /dev/null, because the event loop still knows the number of the
        descriptor.
        """
        if self.transport is not None and not self.over.done():
            number = self.transport.get_extra_info("socket").fileno()
            if number >= 0:
                null = os.open(os.devnull, os.O_RDWR)
                os.dup2(null, number, inheritable=False)
                os.close(null)

    def hang_up(self) -> None:
        """Ends a connection whose event loop was closed. Otherwise the server would keep the connection."""
        connected = None if self.transport is None else self.transport.get_extra_info("socket")
        if isinstance(connected, TransportSocket):  # uvloop has closed its own
            with suppress(OSError):
                connected.shutdown(socket.SHUT_RDWR)


class TaskCall(Call):
    """A call for whose reply a task waits."""

    def __init__(self, future: asyncio.Future[None] | None, deadline: float) -> None:
        self.waiter = future
        self.deadline = deadline

    def _wake(self) -> None:
        if not self.waiter.done():  # else its task was cancelled
            self.waiter.set_result(None)


class TaskLink(Wire, Link):
    """A connection, and the calls that wait for replies on it."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        where: str,
        timeout: float,
        on_end: Callable[[Any], object],
        on_release: Callable[[Request], object],
        *,
        calls: Pending,
    ) -> None:
        Wire.__init__(self, loop)
        Link.__init__(self, where, timeout, on_end, on_release, calls=calls)
        self._loop = loop
        self._unsent: list[bytes] = []
        self._timer: asyncio.TimerHandle | None = None  # fires no later than the oldest call's deadline
        self._waiting: dict[TaskCall, None] = {}  # calls that may wait in the server
        self._prober: asyncio.TimerHandle | None = None

    def start(
        self, request: Request, *, granted: Callable[[Any], object] | None = None, patience: float = 0.0
    ) -> TaskCall:
        """Sends a request. Raises ValueError if the request does not fit the protocol. If the wait for the future of
        the call is interrupted, the caller has to forget() the call.

        granted: called with the result at the moment of the grant. From then on the caller has to give the grant back.
        patience: how many seconds the server may take beyond the timeout.
        """
        if self.closed:
            raise self._not_sent()
        loop = self._loop
        call = TaskCall(loop.create_future(), loop.time() + self._timeout + patience)
        if granted is not None:
            call.granted = granted
        self._send(self.calls.add(call, *request), call.deadline)
        return call

    async def call(self, *request: Any, granted: Callable[[Any], object] | None = None, patience: float = 0.0) -> Any:
        """Sends a request and waits for its result.

        If the wait is interrupted, everything that the call is granted is given back.
        """
        call = self.start(request, granted=granted, patience=patience)
        try:
            await call.waiter
            return call.outcome()
        except BaseException:
            self.forget(call)
            raise

    async def call_all(
        self, requests: Sequence[Request], calls: list[TaskCall] | None = None, patience: float = 0.0
    ) -> list[Any]:
        """Sends requests together, and returns their results, including refusals. Raises any other error of a call.
        Then everything that these calls are granted is given back.

        calls: a list for the calls, so that a caller that is interrupted later can forget() them.
        """
        if self.closed:
            raise self._not_sent()
        if not requests:
            return []
        deadline = self._loop.time() + self._timeout + patience
        calls = [] if calls is None else calls
        calls += [TaskCall(None, deadline) for _ in requests]
        try:
            self._send(self.calls.add_all(calls, requests), deadline)
            for call in calls:
                if not call.done:
                    call.waiter = self._loop.create_future()
                    await call.waiter
            return outcomes(calls)
        except BaseException:
            self.forget(*calls)
            raise

    async def queue(
        self,
        request: Request,
        granted: Callable[[Any], object] | None,
        seconds: float | None,
        probe: Request,
        sent: Callable[[], object] | None = None,
    ) -> Any:
        """Does the same as call(), for a request that may wait in the server for so many seconds. None means for ever.

        probe: a request that is sent from time to time, to check that the server still answers. sent: called when the
        request was sent.
        """
        call = self.start(request, granted=granted, patience=math.inf if seconds is None else seconds)
        if sent is not None:
            sent()
        self._waiting[call] = None
        if self._prober is None:
            self._prober = self._loop.call_later(PROBE_S, self._probe, probe)
        try:
            await call.waiter
            return call.outcome()
        except BaseException:
            self.forget(call)
            raise
        finally:
            del self._waiting[call]

    async def release(self, held: Sequence[Held]) -> None:
        """Gives back the permits that the holds have on this connection."""
        if self.closed:
            raise self._not_sent()
        returns = [self.calls.release(each.name, each.amount) for each in held if each in self.holds]
        self.holds.difference_update(held)
        for answer in await self.call_all(returns):
            if isinstance(answer, ServerError):
                raise answer

    async def listen(self, seconds: float | None) -> bool:
        """Returns True as soon as the server has sent something without a request, or the connection has ended.

        Returns False after this many seconds.
        """
        if self.closed or self.calls.has_unasked():
            return True
        future: asyncio.Future[None] = self._loop.create_future()
        call = TaskCall(future, math.inf)
        self.calls.listeners.append(call)
        try:
            await asyncio.wait((future,), timeout=None if seconds is None else max(seconds, 0))
        finally:
            if not future.done():
                self.calls.listeners.remove(call)
        return future.done()

    def flush(self) -> None:
        """Passes all unsent bytes to the transport, which immediately sends what the kernel accepts."""
        if self._unsent and not self.is_busy and not self.closed:
            data = b"".join(self._unsent)
            self._unsent.clear()
            self.transport.write(data)

    async def gone(self) -> None:
        """Returns when the socket is closed."""
        if self.transport is not None:
            await asyncio.shield(self.over)

    def after_fork(self) -> None:
        super().after_fork()
        self.put_away()

    def after_loop(self) -> None:
        """Called when the event loop of the connection was closed: none of its tasks runs any more, but its socket may
        still be open."""
        self.token = None
        if not self.closed:
            self._mark_ended(LOOP_CLOSED)
            self.calls.pending.clear()
            self.hang_up()

    # ---- what the loop calls ----

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        if self.closed:  # while it was connecting
            self.abort()

    data_received = Link.received

    def eof_received(self) -> None:
        info = self.transport.get_extra_info
        self._closed_by_peer(is_plain=isinstance(info("peername"), tuple) and info("ssl_object") is None)

    def connection_lost(self, error: Exception | None) -> None:
        self.close(str(error or "the client closed the connection"))
        super().connection_lost(error)

    def resume_writing(self) -> None:
        super().resume_writing()
        self.flush()

    # ---- inside ----

    def _tell(self, *request: Any) -> None:
        call = TaskCall(None, self._loop.time() + self._timeout)
        call.abandoned = True
        self._send(self.calls.add(call, *request), call.deadline)

    def _hang_up(self) -> None:
        self._unsent.clear()
        for timer in (self._timer, self._prober):
            if timer is not None:
                timer.cancel()
        self.abort()

    def _has_ended(self) -> bool:
        connected = self.transport.get_extra_info("socket")  # a transport need not have one
        return connected is not None and has_ended(connected)

    def _send(self, data: bytes, deadline: float) -> None:
        """Sends the data now, or together with everything else that is sent in this turn of the event loop."""
        if self._timer is None or deadline < self._timer.when():
            self._expire_at(deadline)
        if self._unsent or self.is_busy:
            self._unsent.append(data)
        elif len(self.calls.pending) == 1:  # no other call is under way: nothing to wait for
            self.transport.write(data)
        else:
            self._unsent.append(data)
            self._loop.call_soon(self.flush)

    def _expire_at(self, moment: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None if moment == math.inf else self._loop.call_at(moment, self._expire)

    def _expire(self) -> None:
        """Ends the wait of the calls whose deadline has passed. The replies to these calls may still arrive."""
        now = self._loop.time()
        self._timer = None
        late, following = 0, math.inf
        for call in cast("list[TaskCall]", list(self.calls.pending.values())):
            if call.deadline > now:
                following = min(following, call.deadline)
                continue
            late += 1  # also if nobody waits for it any more
            call.settle(None, not_answered(self.where, self._timeout, self.calls.doubt))
        self._expire_at(following)
        if late and self.is_busy:
            self.close("the server accepts no more requests")
        elif late > UNANSWERED_MAX:
            self.close(f"{UNANSWERED_MAX} calls were not answered")

    def _probe(self, probe: Request) -> None:
        """While calls wait in the server, checks from time to time that the server still answers."""
        self._prober = None
        if self._waiting:
            self._prober = self._loop.call_later(PROBE_S, self._probe, probe)
            probing = self.start(probe)
            probing.waiter.add_done_callback(lambda _: self._probed(probing))

    def _probed(self, probing: TaskCall) -> None:
        if isinstance(probing.error, Timeout):
            for call in list(self._waiting):
                call.settle(None, not_answered(self.where, self._timeout))
