"""The clients for the counter protocol for asyncio, for any event loop. They have the same names and arguments as the
blocking clients, with `await`.

Any number of tasks may share a client: their calls use one connection at the same time.

Floor: side (ARCHITECTURE.md).
"""

from __future__ import annotations

import asyncio
from asyncio import get_running_loop
from contextlib import nullcontext, suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from counterd.client._addresses import read_default
from counterd.client._entering import ForAsyncWith
from counterd.client._holding import NO_LOSS, RAISE, decorated_async, printed
from counterd.client._steps import drive
from counterd.client._tasks import Tasks
from counterd.client.counter._asked import Asked
from counterd.client.counter._commands import Commands, Pipelined, Result
from counterd.client.counter._holds import Holding, HoldSteps, TakenSteps
from counterd.client.counter._resuming import Greeting
from counterd.client.counter._taking import AskedItems, Permit, Rate, place
from counterd.errors import ConnectionLost, CounterdError, ProtocolError
from counterd.protocols.counter import wire

if TYPE_CHECKING:
    import os
    import ssl
    from collections.abc import Callable, Sequence

    from counterd.client._steps import Steps
    from counterd.client._tasklink import TaskLink

__all__ = ["Client", "Hold", "Permit", "Pipeline", "Rate", "Semaphore", "Taken"]

F = TypeVar("F", bound="Callable[..., Any]")


async def _perform(hold: Holding, steps: Steps[None]) -> None:
    """Performs the steps of entering or leaving a hold. If they fail, at whatever point, it has nothing."""
    try:
        await hold._client._drive(steps)
    except BaseException:
        hold._throw_away()
        raise


class Hold(HoldSteps, ForAsyncWith):
    """Permits of a counter that are held while a block runs. Client.hold() returns it, for `async with` or as a
    decorator.

    The hold has the methods of counterd.client.Hold.
    """

    async def __aenter__(self) -> Hold:
        self._claim()
        await _perform(self, self._entering())
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        await _perform(self, self._leave(kind))

    def __call__(self, function: F) -> F:
        """Returns a coroutine function, or an asynchronous generator, that holds permits while it runs.

        Each call has its own hold.
        """
        return decorated_async(function, partial(Hold, self._client, self._asked))

    def _release(self) -> None:
        """Gives the permits back without waiting for the reply. Raises ConnectionLost if they were lost."""
        has = self._has
        assert has is not None
        link = has.link.current()
        is_lost = not link.is_alive() and link.closed not in NO_LOSS
        drive(self._leave(GeneratorExit), {})
        if is_lost:
            raise self._asked.lost(link.where, link.closed)


class Taken(TakenSteps, ForAsyncWith):
    """Permits and units of rates that are taken together. Client.take() returns it, for `async with` or as a decorator.

    The object has the methods of counterd.client.Taken.
    """

    async def acquire(self) -> Taken:
        """Takes all items. Raises the exceptions that Client.take() describes."""
        self._claim()
        await _perform(self, self._entering())
        return self

    async def release(self) -> None:
        """Gives the permits back.

        Raises ConnectionLost if the permits were lost with the connection. settle() works after release().
        """
        self._check_taken()
        await _perform(self, self._leave(None))

    async def settle(self, name: str | bytes, used: int) -> None:
        """Does the same as Taken.settle() of counterd.client."""
        await self._client._drive(self._settling(name, used))

    async def __aenter__(self) -> Taken:
        return await self.acquire()

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        await _perform(self, self._leave(kind))

    def __call__(self, function: F) -> F:
        """Returns a coroutine function or asynchronous generator that has the items while it runs.

        Each call takes its own items.
        """
        return decorated_async(function, partial(Taken, self._client, self._asked))


class Client(Commands, Tasks):
    """The Client of counterd.client, for the tasks of one event loop. Use it in an `async with`, or await close().

    The asyncio client has the same arguments, results and errors as the blocking Client, except for watch: the event
    loop notices a lost connection immediately. A cancelled call leaves nothing behind: permits that are granted later
    are given back. The client needs no thread, and is not thread-safe. In another event loop the client raises
    RuntimeError, unless the first event loop was closed. Then it connects again, and permits that were held are lost.
    """

    _CAUGHT = Exception  # of a function on_lost
    _swapping = nullcontext()  # what tasks do between two awaits is not interrupted
    _tending: asyncio.Task[None] | None = None

    def __init__(
        self,
        host: str | Sequence[str] | None = None,
        port: int | None = None,
        *,
        path: str | os.PathLike[str] | None = None,
        tls: bool | ssl.SSLContext = False,
        timeout: float = 5.0,
        connect_timeout: float | None = None,
        resume: float = 0,
        name: str = "",
    ) -> None:
        where = read_default(host, port, path, tls, default_port=wire.PORT)
        super().__init__(where, timeout, connect_timeout, Greeting(resume, name))

    async def close(self) -> None:
        """Ends the connection: the server takes back everything that was held through it.

        Later calls raise ConnectionLost.
        """
        self._own_loop()
        link = self._link
        if link.token is not None and not link.closed:
            self._closed = True
            try:
                with suppress(CounterdError):
                    await link.call(wire.goodbye)
            finally:
                self._end()
        await super().close()

    def pipeline(self) -> Pipeline:
        """Collects requests and sends them together: `await client.pipeline().get("a").get("b").execute()`."""
        return Pipeline(self)

    def hold(
        self,
        name: str | bytes,
        resources: int = 1,
        *,
        maximum: int,
        timeout: float | None = None,
        key: str | bytes = b"",
        weight: int = 1,
        priority: int = 0,
        on_lost: Callable[[Hold], object] | Literal["raise", "reacquire"] = RAISE,
    ) -> Hold:
        """Holds permits while a block runs: `async with client.hold("db:main", maximum=10):`, or as a decorator.

        Has the same arguments as Client.hold() of counterd.client. If on_lost is a function, the event loop calls it.
        """
        return Hold(self, Asked(name, resources, maximum, timeout, on_lost, where=place(key, weight, priority)))

    def take(
        self,
        *items: Permit | Rate,
        timeout: float | None = 0,
        key: str | bytes = b"",
        weight: int = 1,
        priority: int = 0,
    ) -> Taken:
        """Takes 1 to 16 permits and rates, all or none: `async with client.take(Permit("db", maximum=10), Rate(...)):`.

        Has the same arguments as Client.take() of counterd.client.
        """
        return Taken(self, AskedItems(items, timeout, place(key, weight, priority)))

    def semaphore(self, name: str | bytes, maximum: int) -> Semaphore:
        """Returns a counter of `maximum` permits with the methods of asyncio.BoundedSemaphore."""
        return Semaphore(self, name, maximum)

    # ---- inside ----

    async def _run_command(self, made: Any) -> Any:
        if not isinstance(made, tuple):
            return await self._drive(made)
        link = self._link
        if link.closed or self._before.loss_unreported or self._loop is not get_running_loop():
            link = await self._connected()
        is_release = made[0] is wire.release
        was_open = is_release and link.is_open()
        call = link.start(made)
        if is_release:
            self._wait_queues.wake(made[1])  # a request that is made from here on is sent after the release
        try:
            await call.waiter
            if call.error is None:
                return call.result
            raise call.error
        except (ConnectionLost, ProtocolError) as error:
            link.forget(call)
            steps = self._recovered(link, made, error, was_open)
        except BaseException:
            link.forget(call)
            raise
        again = await self._drive(steps)
        return None if again is None else await again.call(*made)

    def _on_end(self, link: TaskLink) -> None:
        """Called when a connection has ended. Resumes it, or notifies its holds that they are lost."""
        if link.may_resume():
            self._ended.append(link)
        elif link.closed not in NO_LOSS:
            self._lose(link)
        self._tend_soon()

    def _on_connected(self) -> None:
        self._tend_soon()  # the server may have refused to resume the connection before

    def _tend_soon(self) -> None:
        if not (self._ended or self._again):
            return
        if self._tending is None or self._tending.done():
            self._due = self._new_waiter()
            self._tending = self._started(self._tend_all())
        self._due.set()

    async def _tend_all(self) -> None:
        pause: float | None = 0.0
        while pause is not None:
            await self._due.wait(pause)
            self._due.clear()
            pause = await self._drive(self._tend())

    def _start_anew(self) -> None:
        super()._start_anew()
        self._tending = None
        self._ended.clear()
        self._again.clear()


class Pipeline(Pipelined, ForAsyncWith):
    """Requests that are sent together. Client.pipeline() returns it.

    In an `async with`, requests that were not sent when the block ends are forgotten.
    """

    def __init__(self, client: Client) -> None:
        super().__init__()
        self._client = client

    async def __aenter__(self) -> Pipeline:
        return self

    async def __aexit__(self, *_: object) -> None:
        self._taken()

    async def execute(self) -> list[Result]:
        """Does the same as Pipeline.execute() of counterd.client.

        If the call is cancelled, everything that it acquired is given back.
        """
        results: list[Result] = await self._client._drive(self._client._run_all(self._taken()))
        return results


class Semaphore(ForAsyncWith):
    """A counter with the methods of asyncio.BoundedSemaphore. Only locked() differs: it has to be awaited, because it
    asks the server.

    Each acquire() takes one permit. At most as many permits can be released as were acquired.
    """

    def __init__(self, client: Client, name: str | bytes, maximum: int) -> None:
        self._client = client
        self._name = client.hold(name, maximum=maximum)._asked.name  # raises for arguments that do not fit the protocol
        self._maximum = maximum
        self._holds: list[Hold] = []

    async def acquire(self) -> Literal[True]:
        """Takes a permit. Waits until a permit is free."""
        self._holds.append(await self._client.hold(self._name, maximum=self._maximum).__aenter__())
        return True

    def release(self) -> None:
        """Gives a permit back. Raises ValueError if no permit was acquired, ConnectionLost if the permit was lost."""
        self._taken()._release()

    def __repr__(self) -> str:
        return f"<Semaphore {printed(self._name)}, maximum {self._maximum}, {len(self._holds)} acquired here>"

    async def locked(self) -> bool:
        """Returns whether all permits of the counter are in use."""
        return await self._client.get(self._name, default=0) >= self._maximum

    async def __aenter__(self) -> None:
        await self.acquire()

    async def __aexit__(self, *error: Any) -> None:
        await self._taken().__aexit__(*error)

    def _taken(self) -> Hold:
        if not self._holds:
            raise ValueError("semaphore released too many times")
        return self._holds.pop()
