"""The base of the clients for asyncio: connects for all tasks of an event loop, and performs the steps of a client.

Floor: side (ARCHITECTURE.md).
"""

from __future__ import annotations

import asyncio
import copy
from asyncio import get_running_loop
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeVar

from counterd.client._command import AsyncBase, Request
from counterd.client._connecting import Connecting
from counterd.client._connection import CLOSED, lost, no_connection, not_connected, open_transport
from counterd.client._entering import ForAsyncWith
from counterd.client._steps import drive_async
from counterd.client._tasklink import TaskLink
from counterd.errors import ConnectionLost, CounterdError, ServerError

if TYPE_CHECKING:
    from collections.abc import Coroutine
    from types import TracebackType

    from counterd.client._addresses import Address
    from counterd.client._steps import Steps

Self = TypeVar("Self", bound="Tasks")
T = TypeVar("T")


class TaskEvent:
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


class Tasks(Connecting, AsyncBase, ForAsyncWith):
    """A client whose connection the tasks of an event loop share."""

    LINK = TaskLink
    _loop: asyncio.AbstractEventLoop | None = None  # in which it is used

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

    async def close(self) -> None:
        """Ends the connection: the server takes back everything that was held through it.

        Later calls raise ConnectionLost.
        """
        self._own_loop()
        self._end()
        if self._tasks:
            await asyncio.wait(self._tasks)
        if isinstance(self._link, TaskLink):
            await self._link.gone()

    # ---- inside ----

    def _start_anew(self) -> None:
        super()._start_anew()
        self._loop = None
        self._connecting: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()  # tasks of the client

    def _own_loop(self) -> asyncio.AbstractEventLoop:
        """Returns the running event loop.

        Raises RuntimeError if the client belongs to another event loop that is not closed.
        """
        loop = get_running_loop()
        if self._loop is not loop:
            if self._loop is not None and not self._loop.is_closed():
                raise RuntimeError(f"{self} belongs to another event loop: make one for each event loop")
            if isinstance(self._link, TaskLink):
                self._link.after_loop()
            self._start_anew()
            self._loop = loop
        return loop

    async def _connected(self, *, report_loss: bool = True) -> TaskLink:
        """See Connecting._current()."""
        self._own_loop()
        link: TaskLink = self._link
        if self._closed or link.closed or (report_loss and self._before.loss_unreported):
            link = await self._drive(self._current(report_loss))
        return link

    async def _reconnect(self) -> TaskLink:
        connecting = self._connecting_now()
        await asyncio.wait([connecting])  # unlike await, it does not cancel `connecting` if this task is cancelled
        if not connecting.cancelled():
            connecting.result()
        link: TaskLink = self._link
        if self._closed:
            raise no_connection(link.where, CLOSED)
        if self._attempts.failure is not None:
            raise copy.copy(self._attempts.failure)
        if link.closed:  # already: a server without room closes it
            raise lost(link.where, link.closed)
        return link

    def _connecting_now(self) -> asyncio.Task[None]:
        """Returns the task that connects.

        If no task connects, starts a task. Raises ConnectionLost if the next attempt is not due yet.
        """
        if self._connecting is None or self._connecting.done():
            self._begin_attempt()
            self._connecting = self._started(self._connect())
        return self._connecting

    async def _connect(self) -> None:
        """Leaves the new link, or the failure, in the attributes of the client."""
        with suppress(CounterdError):
            await self._drive(self._reconnected())

    async def _open(self, address: Address, opened: list[TaskLink]) -> TaskLink:
        loop = get_running_loop()
        link = TaskLink(loop, str(address), self._timeout, self._on_end, self._on_release, calls=self._make_calls())
        opened.append(link)
        try:
            await asyncio.wait_for(open_transport(loop, link, address), self._connect_timeout)
        except (OSError, asyncio.TimeoutError) as error:
            raise not_connected(link.where, error, self._connect_timeout) from error
        return link

    def _started(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Starts a task that close() cancels."""
        task = get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _end(self) -> None:
        for task in self._tasks:
            task.cancel()
        super()._end()

    def _new_waiter(self) -> TaskEvent:
        return TaskEvent(self._own_loop())

    def _now(self) -> float:
        return self._own_loop().time()

    def _drive(self, steps: Steps[T]) -> Coroutine[Any, Any, T]:
        return drive_async(steps, self._acts)

    _wait = staticmethod(TaskEvent.wait)


class Commanded(Tasks):
    """A client whose methods are the commands of _command."""

    def _run_command(self, request: Request[Any]) -> Coroutine[Any, Any, Any]:
        return self._result(request)

    async def _result(self, request: Request[Any]) -> Any:
        link = await self._connected(report_loss=False)
        was_good = link.calls.answered
        try:
            return await self._answer(link, request)
        except ConnectionLost:
            if self._closed or not was_good or not request.is_repeatable:
                raise
        return await self._answer(await self._connected(report_loss=False), request)

    async def _answer(self, link: TaskLink, request: Request[Any]) -> Any:
        call = link.start((request,), patience=request.patience)
        try:
            await call.waiter
            return call.outcome()
        except BaseException as error:
            link.forget(call)
            calls = link.calls
            # The server would answer later calls only after this one, whose caller has gone.
            if not isinstance(error, ServerError) and calls.may_grant(call) and not calls.held and calls.pending:
                link.close("a call that waited was given up")
            raise
