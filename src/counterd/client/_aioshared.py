"""The base of the clients for asyncio: one connection for all tasks, which is replaced when it is lost, and the queues
of waiting holds.

Floor: side (ARCHITECTURE.md).
"""

from __future__ import annotations

import asyncio
import copy
from asyncio import get_running_loop
from typing import TYPE_CHECKING, Any, TypeVar

from counterd.client._aiolink import Link
from counterd.client._backoff import Attempts
from counterd.client._command import Awaiting, Request
from counterd.client._connection import (
    CLOSED,
    PEER_CLOSED,
    cannot_connect,
    check_timeouts,
    forked,
    lost,
    no_connection,
    not_accepted,
    open_transport,
)
from counterd.client._entering import ForAsyncWith
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
    drive_async,
)
from counterd.client._turns import PAUSES, Turns
from counterd.errors import ConnectionLost, CounterdError, ServerError

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Sequence
    from types import TracebackType

    from counterd.client._addresses import Address
    from counterd.client._calls import Pending
    from counterd.client._steps import Steps

Self = TypeVar("Self", bound="Shared")
T = TypeVar("T")


class Turn:
    """An event with a timeout. A task waits for the event until its turn has come, and between two requests."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._future: asyncio.Future[None] | None = None
        self._is_set = False

    def set(self) -> None:
        self._is_set = True
        self._wake()

    def clear(self) -> None:
        self._is_set = False

    async def wait(self, seconds: float | None) -> bool:
        """Waits until the event is set, or until this many seconds have passed. Returns whether the event is set."""
        if not self._is_set:
            self._future = self._loop.create_future()
            timer = None if seconds is None else self._loop.call_later(seconds, self._wake)
            try:
                await self._future
            finally:
                self._future = None
                if timer is not None:
                    timer.cancel()
        return self._is_set

    def _wake(self) -> None:
        if self._future is not None and not self._future.done():
            self._future.set_result(None)


class Shared(ForAsyncWith):
    """A connection to a server. If it is lost, the client makes a new one."""

    def __init__(self, addresses: list[Address], timeout: float, connect_timeout: float | None) -> None:
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
            WAIT: Turn.wait,
            PAUSE: self._pause,
        }
        self._loop: asyncio.AbstractEventLoop | None = None  # in which it is used
        self._link: Link | None = None
        self._lost: Link | None = None  # the connection with which something was lost, until a call has raised that
        self._tasks: set[asyncio.Task[None]] = set()  # tasks of the client
        self._connecting: asyncio.Task[None] | None = None
        self._turns = Turns()
        forked.add(self)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.where}>"

    async def __aenter__(self: Self) -> Self:
        self._own_loop()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is GeneratorExit:  # a coroutine that is destroyed cannot wait
            self._end()
        else:
            await self.close()

    @property
    def where(self) -> str:
        """The address of the current connection, of the last one if it was lost, or the first address that will be
        tried."""
        return str(self._addresses[0]) if self._link is None else self._link.where

    async def close(self) -> None:
        """Ends the connection: the server takes back everything that was held through it.

        Later calls raise ConnectionLost.
        """
        self._own_loop()
        self._end()
        if self._tasks:
            await asyncio.wait(self._tasks)
        if self._link is not None:
            await self._link.gone()

    # ---- what a client overrides ----

    def _make_calls(self) -> Pending:
        """Returns the object in which a new connection keeps its calls."""
        raise NotImplementedError

    def _make_link(self, loop: asyncio.AbstractEventLoop, where: str) -> Link:
        return Link(loop, where, self._timeout, self._on_end, self._on_release, calls=self._make_calls())

    def _on_end(self, link: Link) -> None:
        """Called when a connection has ended."""
        if link.unheard:
            self._lost = link

    def _on_release(self, request: Any) -> None:
        """Called with a request that gives back what was granted to a caller that no longer waits."""

    async def _greet(self, link: Link) -> None:
        """Sends the first requests of a new connection, before calls use it. Raises CounterdError."""

    def _on_connected(self, link: Link) -> None:
        """Called when there is a new connection."""

    def _run_command(self, made: Any) -> Coroutine[Any, Any, Any]:
        raise NotImplementedError

    # ---- connecting ----

    async def _connected(self, *, hears: bool = True) -> Link:
        """Returns the connection. If the connection was lost, returns a new one. Raises ConnectionLost or Timeout.

        hears: if permits were lost with the last connection, and no call has raised that yet, first raises
        ConnectionLost.
        """
        loop = self._own_loop()
        while True:
            link = self._link
            if self._closed:
                raise no_connection(self.where, CLOSED)
            if hears and self._lost is not None:
                link, self._lost = self._lost, None
                raise lost(
                    link.where,
                    f"{link.closed}; everything that was acquired through this connection has been given back",
                )
            if link is not None and not link.closed:
                return link
            connecting = self._connecting_now(loop)
            await asyncio.wait([connecting])  # unlike await, it does not cancel `connecting` if this task is cancelled
            if not connecting.cancelled():
                connecting.result()
            if self._attempts.failure is not None:
                raise copy.copy(self._attempts.failure)
            link = self._link
            if link is not None and link.closed and not self._closed:  # already: a server without room closes it
                raise lost(link.where, link.closed)

    def _connecting_now(self, loop: asyncio.AbstractEventLoop) -> asyncio.Task[None]:
        """Returns the task that connects.

        If no task connects, starts a task. Raises ConnectionLost if the next attempt is not due yet.
        """
        link = self._link
        if self._connecting is None or self._connecting.done():
            was_good = link is not None and link.calls.answered
            self._attempts.begin(loop.time(), link, was_good, lost(self.where, PEER_CLOSED))
            self._connecting = self._started(self._connect(loop))
        return self._connecting

    async def _connect(self, loop: asyncio.AbstractEventLoop) -> None:
        """Connects to the server. Leaves the new link, or the failure, in the attributes of the client."""
        failure: CounterdError | None = None
        for address in self._addresses:
            link = self._make_link(loop, str(address))
            try:
                await asyncio.wait_for(open_transport(loop, link, address), self._connect_timeout)
                await self._greet(link)
            except (TimeoutError, asyncio.TimeoutError):
                failure = not_accepted(link.where, self._connect_timeout)
            except OSError as error:
                failure = cannot_connect(link.where, error)
            except CounterdError as error:
                failure = error
            except BaseException:
                link.drop(CLOSED)
                raise
            else:
                if self._closed:  # until Python 3.12, wait_for() may lose the cancellation
                    link.drop(CLOSED)
                self._attempts.succeeded(loop.time(), self._link)
                self._link = link
                if not link.closed:
                    self._on_connected(link)
                return
            link.drop("the server did not accept it")
        assert failure is not None
        self._attempts.failed(loop.time(), failure)

    def _heard(self, link: Link) -> None:
        """Called when a call raises that this connection was lost."""
        if self._lost is link:
            self._lost = None

    def _started(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Starts a task that close() cancels."""
        task = get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _end(self) -> None:
        self._closed = True
        for task in self._tasks:
            task.cancel()
        if self._link is not None:
            self._link.drop(CLOSED)
        self._turns.wake_all()

    def _after_fork(self) -> None:
        """Called in the child of a fork, which has no event loop yet, and where no task of the parent runs."""
        if self._link is not None:
            self._link.after_fork()
        self._lost = None
        self._start_anew()

    def _own_loop(self) -> asyncio.AbstractEventLoop:
        """Returns the running event loop.

        Raises RuntimeError if the client belongs to another event loop that is not closed.
        """
        loop = get_running_loop()
        if self._loop is not loop:
            if self._loop is not None and not self._loop.is_closed():
                raise RuntimeError(f"{self} belongs to another event loop: make one for each event loop")
            if self._link is not None:
                self._link.after_loop()
                self._lost = self._link if self._link.unheard else self._lost
            self._start_anew()
            self._loop = loop
        return loop

    def _start_anew(self) -> None:
        """Forgets everything that belonged to the previous event loop."""
        self._loop = None
        self._connecting = None
        self._tasks = set()
        self._turns = Turns()

    # ---- step machines ----

    def _new_turn(self) -> Turn:
        return Turn(self._own_loop())

    def _now(self) -> float:
        return self._own_loop().time()

    def _drive(self, steps: Steps[T]) -> Coroutine[Any, Any, T]:
        return drive_async(steps, self._acts)

    async def _pause(self, seconds: float) -> None:
        """Waits, but only until close() at the longest."""
        loop = get_running_loop()
        turn = Turn(loop)
        until = loop.time() + seconds
        self._turns.join(PAUSES, turn)
        try:
            while not self._closed and (left := until - loop.time()) > 0:
                turn.clear()  # set also when the one before in this queue leaves it
                await turn.wait(left)
        finally:
            self._turns.leave(PAUSES, turn)

    def _next_attempt(self) -> float | None:
        return None if self._closed else self._attempts.retry_at


class Commanded(Shared, Awaiting):
    """A client whose methods are the commands of _command."""

    def _run_command(self, request: Request[Any]) -> Coroutine[Any, Any, Any]:
        return self._result(request)

    async def _result(self, request: Request[Any]) -> Any:
        link = await self._connected(hears=False)
        was_good = link.calls.answered
        try:
            return await self._answer(link, request)
        except ConnectionLost:
            if self._closed or not was_good or not request.is_repeatable:
                raise
        return await self._answer(await self._connected(hears=False), request)

    async def _answer(self, link: Link, request: Request[Any]) -> Any:
        call = link.start(request, patience=request.patience)
        assert call.future is not None
        try:
            return await call.future
        except BaseException as error:
            link.forget(call)
            calls = link.calls
            # The server would answer later calls only after this one, whose caller has gone.
            if not isinstance(error, ServerError) and calls.may_grant(call) and not calls.held and calls.pending:
                link.drop("a call that waited was given up")
            raise

    def _greeting(self) -> Sequence[Request[Any]]:
        """Returns the first requests of a new connection. If the server refuses one of them, the connection ends."""
        return ()

    async def _greet(self, link: Link) -> None:
        for answer in await link.results([(request,) for request in self._greeting()]):
            if isinstance(answer, BaseException):
                raise answer
