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

from counterd.client._calls import PROBE_S, UNANSWERED_MAX, Call, Pending
from counterd.client._connection import (
    CLOSED,
    FORKED,
    PEER_CLOSED,
    NotSent,
    closed_by_server,
    lost,
    misunderstood,
    not_answered,
    set_options,
)
from counterd.client._portable import has_ended
from counterd.client._resumable import Resumable
from counterd.errors import Cancelled, ConnectionLost, CounterdError, ProtocolError, ServerError, Timeout

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


class FutureCall(Call):
    """A call for whose reply a task waits. future: None if no task waits.

    granted: called with the result, in the same step, if the call succeeds and its task still waits.
    """

    granted: Callable[[Any], object] | None = None

    def __init__(self, future: asyncio.Future[Any] | None, deadline: float) -> None:
        self.future = future
        self.deadline = deadline

    def settle(self, result: Any, error: CounterdError | None) -> bool:
        future = self.future
        if future is None or future.done():
            return False
        if error is None:
            future.set_result(result)
            if self.granted is not None:
                self.granted(result)
        else:
            future.set_exception(error)
        return True


class Link(Wire, Resumable):
    """A connection, and the calls that wait for replies on it."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        where: str,
        timeout: float,
        on_end: Callable[[Link], None],
        on_release: Callable[[Request], object],
        *,
        calls: Pending,
    ) -> None:
        super().__init__(loop)
        self.where = where
        self.closed = ""  # why it is not connected any more
        self.calls = calls
        self.holds: set[Held] = set()
        self.unheard = False  # it was lost with permits of no hold, and no call has raised that yet
        self._loop = loop
        self._timeout = timeout
        self._on_end = on_end
        self._on_release = on_release  # called with each request that gives something back
        self._unsent: list[bytes] = []
        self._timer: asyncio.TimerHandle | None = None  # fires no later than the oldest call's deadline
        self._waiting: dict[FutureCall, None] = {}  # calls that may wait in the server
        self._prober: asyncio.TimerHandle | None = None

    def start(self, *request: Any, patience: float = 0.0) -> FutureCall:
        """Sends a request. The future of the call gets the result or an error. Raises ValueError if the request does
        not fit the protocol.

        patience: how many seconds the server may take beyond the timeout.
        """
        self._check()
        loop = self._loop
        call = FutureCall(loop.create_future(), loop.time() + self._timeout + patience)
        self._send(self.calls.add(call, *request), call.deadline)
        return call

    def start_all(self, requests: Sequence[Request], patience: float = 0.0) -> list[FutureCall]:
        """Sends all requests. If one of them does not fit the protocol, sends none and raises ValueError."""
        self._check()
        deadline = self._loop.time() + self._timeout + patience
        calls = [FutureCall(self._loop.create_future(), deadline) for _ in requests]
        self._send(self.calls.add_all(calls, requests), deadline)
        return calls

    def start_unawaited(self, *request: Any) -> None:
        """Sends a request and does not wait for its reply."""
        self._check()
        call = FutureCall(None, self._loop.time() + self._timeout)
        self._send(self.calls.add(call, *request), call.deadline)

    async def listen(self, seconds: float | None) -> bool:
        """Returns True as soon as the server has sent something without a request, or the connection has ended.

        Returns False after this many seconds.
        """
        if self.closed or self.calls.has_unasked():
            return True
        future: asyncio.Future[Any] = self._loop.create_future()
        call = FutureCall(future, math.inf)
        self.calls.listeners.append(call)
        try:
            await asyncio.wait((future,), timeout=None if seconds is None else max(seconds, 0))
        finally:
            if not future.done():
                self.calls.listeners.remove(call)
        return future.done()

    async def call(self, *request: Any) -> Any:
        """Sends a request and waits for its result.

        If the wait is interrupted, everything that the call is granted is given back.
        """
        return await self._result(self.start(*request))

    async def results(self, requests: Sequence[Request]) -> list[Any]:
        """As call_all(), of requests that are granted nothing. All errors are among the results."""
        return await self._answers(self.start_all(requests), CounterdError)

    async def call_all(
        self, requests: Sequence[Request], calls: list[FutureCall] | None = None, patience: float = 0.0
    ) -> list[Any]:
        """Sends requests together, and returns their results, including refusals. Raises any other error of a call.

        calls: a list for the calls, so that the caller can forget() them.
        """
        calls = [] if calls is None else calls
        calls += self.start_all(requests, patience)
        return await self._answers(calls, ServerError)

    async def acquire(self, held: Held, request: Request) -> None:
        """Does the same as call(), for a hold, which has the permits from the moment of the grant."""
        call = self.start(*request)
        call.granted = lambda _: self.holds.add(held)
        try:
            await self._result(call)
        except BaseException:
            self.holds.discard(held)
            raise

    async def queue(
        self,
        held: Sequence[Held],
        request: Request,
        seconds: float | None,
        probe: Request,
        sent: Callable[[], object] | None = None,
    ) -> Any:
        """Does the same as call(), for a request that may wait in the server for so many seconds. None means for ever.

        held: what holds have from the moment of the grant. probe: a request that is sent from time to time, to check
        that the server still answers. sent: called when the request was sent.
        """
        call = self.start(*request, patience=math.inf if seconds is None else seconds)
        call.granted = lambda _: self.holds.update(held)
        if sent is not None:
            sent()
        self._waiting[call] = None
        if self._prober is None:
            self._prober = self._loop.call_later(PROBE_S, self._probe, probe)
        assert call.future is not None
        try:
            return await call.future
        except BaseException as error:
            self.forget(call)
            self.holds.difference_update(held)
            if isinstance(error, Cancelled):  # the server has given up the Takes of this connection
                raise lost(self.where, self.closed or CLOSED) from None
            raise
        finally:
            del self._waiting[call]

    async def release(self, *held: Held) -> None:
        """Gives permits back. If the connection was lost and can be resumed, they are given back later."""
        link: Link = self.last()
        returns = link._take_from(held)
        if link.may_resume():
            link.calls.give_back += returns
            return
        was_open = link.is_open()
        try:
            for answer in await link.results(returns):
                if isinstance(answer, BaseException):
                    raise answer
        except ConnectionLost:
            if link.heir is None and not link.may_resume() and not link.has_read_all(was_open):
                raise

    def disown(self, *held: Held) -> None:
        """Gives back what of these permits is held through this connection, without waiting for the reply."""
        link: Link = self.last()
        link.calls.give_back += link._take_from(held)
        if not link.may_resume():
            link._give_back()

    def is_alive(self) -> bool:
        """Returns whether the holdings of this connection are not lost, as far as the event loop knows."""
        link = self.last()
        return not link.closed or link.may_resume()

    def is_open(self) -> bool:
        """Checks the socket. Returns whether neither side has ended the connection, as far as this side can know."""
        connected = self.transport.get_extra_info("socket")  # a transport need not have one
        return not self.closed and (connected is None or not has_ended(connected))

    def inherit(self, ended: Link, take_over: Callable[[], object]) -> None:
        """Takes over the holdings of an ended connection. take_over: takes over the calls of that connection."""
        take_over()
        self.holds.update(ended.holds)
        ended.holds.clear()
        ended.heir, ended.token, ended.unheard = self, None, False
        self._give_back()

    def forget(self, *calls: FutureCall) -> None:
        """Called when the task no longer waits: everything that the calls were granted, or will be granted, is given
        back."""
        for call in calls:
            future = call.future
            assert future is not None
            if not future.cancel() and not future.cancelled():
                future.exception()  # else asyncio would log that nobody looked at it
            if (cancel := self.calls.cancel(call)) and not self.closed:
                self.start_unawaited(*cancel)
            self.calls.forget(call)
        self._give_back()

    def flush(self) -> None:
        """Passes all unsent bytes to the transport, which immediately sends what the kernel accepts."""
        self._flush()

    def drop(self, why: str, error: Callable[[], CounterdError] | None = None) -> None:
        """Ends the connection. Calls without a reply raise error, or ConnectionLost."""
        if self.closed:
            return
        self._ended(why)
        self.closed = why
        self.unheard = self.calls.held > sum(held.amount for held in self.holds)
        self._unsent.clear()
        self.calls.fail(error or (lambda: lost(self.where, why)))
        for timer in (self._timer, self._prober):
            if timer is not None:
                timer.cancel()
        self.abort()
        self._on_end(self)

    async def gone(self) -> None:
        """Returns when the socket is closed."""
        if self.transport is not None:
            await asyncio.shield(self.over)

    def after_fork(self) -> None:
        """Called in the child of a fork. Closes the child's copy of the socket, and nothing else."""
        self.put_away()
        self.closed = self.closed or FORKED
        self.token = None

    def after_loop(self) -> None:
        """Called when the event loop of the connection was closed: none of its tasks runs any more, but its socket may
        still be open."""
        self.token = None
        if not self.closed:
            self.closed = LOOP_CLOSED
            self.unheard = self.calls.held > sum(held.amount for held in self.holds)
            self.calls.pending.clear()
            self.hang_up()

    # ---- what the loop calls ----

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        if self.closed:  # while it was connecting
            self.abort()

    def data_received(self, data: bytes) -> None:
        try:
            self.calls.feed(data)
        except ProtocolError as error:
            text = misunderstood(self.where, error, data)
            self.drop(str(error), lambda: ProtocolError(text))
        else:
            if self.calls.give_back:
                self._give_back()

    def eof_received(self) -> None:
        info = self.transport.get_extra_info
        is_plain = isinstance(info("peername"), tuple) and info("ssl_object") is None
        is_new, doubt = not self.calls.answered, self.calls.doubt
        self.drop(
            PEER_CLOSED,
            lambda: closed_by_server(self.where, doubt, plain_and_new=is_plain and is_new),
        )

    def connection_lost(self, error: Exception | None) -> None:
        self.drop(str(error or "the client closed the connection"))
        super().connection_lost(error)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._flush()

    # ---- inside ----

    async def _result(self, call: FutureCall) -> Any:
        assert call.future is not None
        try:
            return await call.future
        except BaseException:
            self.forget(call)
            raise

    async def _answers(self, calls: Sequence[FutureCall], kept: type[CounterdError]) -> list[Any]:
        """Waits for the results of calls. Errors of this kind are among the results."""
        answers: list[Any] = []
        try:
            for call in calls:
                assert call.future is not None
                try:
                    answers.append(await call.future)
                except kept as error:
                    answers.append(error)
        except BaseException:
            self.forget(*calls)
            raise
        return answers

    def _check(self) -> None:
        if self.closed:
            raise NotSent(*lost(self.where, self.closed).args)

    def _take_from(self, held: Sequence[Held]) -> list[Request]:
        """Takes these permits from their holds. Returns the requests that give them back."""
        returns = [self.calls.release(each.name, each.amount) for each in held if each in self.holds]
        self.holds.difference_update(held)
        return returns

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
            self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        if self._unsent and not self.is_busy and not self.closed:
            data = b"".join(self._unsent)
            self._unsent.clear()
            self.transport.write(data)

    def _give_back(self) -> None:
        if self.heir is not None and self.calls.give_back:
            self.heir.calls.give_back += self.calls.give_back
            self.calls.give_back = []
            self.heir._give_back()
        while self.calls.give_back and not self.closed:
            request = self.calls.give_back.pop()
            self.start_unawaited(*request)
            self._on_release(request)

    def _expire_at(self, moment: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None if moment == math.inf else self._loop.call_at(moment, self._expire)

    def _expire(self) -> None:
        """Ends the wait of the calls whose deadline has passed. The replies to these calls may still arrive."""
        now = self._loop.time()
        self._timer = None
        late, following = 0, math.inf
        for call in cast("list[FutureCall]", list(self.calls.pending.values())):
            if call.deadline > now:
                following = min(following, call.deadline)
                continue
            late += 1  # also if nobody waits for it any more
            call.settle(None, not_answered(self.where, self._timeout, self.calls.doubt))
        self._expire_at(following)
        if late and self.is_busy:
            self.drop("the server accepts no more requests")
        elif late > UNANSWERED_MAX:
            self.drop(f"{UNANSWERED_MAX} calls were not answered")

    def _probe(self, probe: Request) -> None:
        """While calls wait in the server, checks from time to time that the server still answers."""
        self._prober = None
        if self._waiting:
            self._prober = self._loop.call_later(PROBE_S, self._probe, probe)
            future = self.start(*probe).future
            assert future is not None
            future.add_done_callback(self._probed)

    def _probed(self, future: asyncio.Future[Any]) -> None:
        if not future.cancelled() and isinstance(future.exception(), Timeout):
            for call in list(self._waiting):
                call.settle(None, not_answered(self.where, self._timeout))
