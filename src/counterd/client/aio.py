"""The asyncio client for the counter protocol, for any event loop. The asyncio client has the same names and arguments
as the blocking client, with `await`.

Any number of tasks may share a client: their calls use one connection at the same time.

Floor: side (ARCHITECTURE.md).
"""

from __future__ import annotations

import asyncio
import logging
from asyncio import get_running_loop
from collections import Counter
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, TypeVar, cast

from counterd.client._addresses import read_default
from counterd.client._aioshared import Shared, Turn
from counterd.client._backoff import ASK_FIRST_S, ASK_LONGEST_S, Backoff
from counterd.client._connection import as_bytes, lost
from counterd.client._entering import Entering, ForAsyncWith
from counterd.client._holding import NO_LOSS, RAISE, REACQUIRE, decorated_async, printed
from counterd.client._turns import COUNTED_FOR_S, Queue
from counterd.client._waiting import PAUSE, QUEUE, Patience, drive_async, holding, queued
from counterd.client.counter._asked import Asked
from counterd.client.counter._permits import PermitCalls, check_takes
from counterd.client.counter._pipeline import Requests, Result, released
from counterd.client.counter._resuming import Greeting
from counterd.client.counter._taking import PROBE, AskedItems, Permit, Rate, TakenCore, place
from counterd.errors import (
    ConnectionLost,
    CounterdError,
    NotAvailable,
    NotFound,
    OutOfMemory,
    ProtocolError,
    ServerError,
    Timeout,
    UnknownCommand,
)
from counterd.protocols.counter import wire

if TYPE_CHECKING:
    import os
    import ssl
    from collections.abc import Callable, Coroutine, Sequence
    from types import TracebackType

    from counterd.client._aiolink import Link
    from counterd.client._calls import Request
    from counterd.protocols.counter.wire import DumpEntry, Grant

__all__ = ["Client", "Hold", "Permit", "Pipeline", "Rate", "Semaphore", "Taken"]

F = TypeVar("F", bound="Callable[..., Any]")
T = TypeVar("T")
_PAUSES = b""  # no name: of those who wait until they may connect again
_log = logging.getLogger(__name__)


class Client(Shared):
    """The Client of counterd.client, for the tasks of one event loop. Use it in an `async with`, or await close().

    The asyncio client has the same arguments, results and errors as the blocking Client, except for watch: the event
    loop notices a lost connection immediately. A cancelled call leaves nothing behind: permits that are granted later
    are given back. The client needs no thread, and is not thread-safe. In another event loop the client raises
    RuntimeError, unless the first event loop was closed. Then it connects again, and permits that were held are lost.
    """

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
        self._greeting = Greeting(resume, name)
        super().__init__(read_default(host, port, path, tls, default_port=wire.PORT), timeout, connect_timeout)
        self._recovering: asyncio.Task[None] | None = None
        self._again: list[Hold] = []  # holds whose permits are to be acquired again
        self._reacquiring = asyncio.Lock()  # locked while permits are acquired again for a hold

    async def close(self) -> None:
        """Ends the connection: the server takes back everything that was held through it.

        Later calls raise ConnectionLost.
        """
        self._own_loop()
        link = self._link
        if link is not None and link.token is not None and not link.closed:
            self._closed = True
            try:
                with suppress(CounterdError):
                    await link.result(wire.goodbye)
            finally:
                self._end()
        await super().close()

    # These return the coroutine of _call() instead of awaiting it: with many tasks that saves a tenth of a call.

    def noop(self) -> Coroutine[Any, Any, None]:
        """Sends a request that does nothing, and waits for the reply (section "Noop")."""
        return self._call(wire.noop)

    def get(
        self, name: str | bytes, default: int | None = None, *, everywhere: bool = False
    ) -> Coroutine[Any, Any, int]:
        """Returns how many permits of a counter are in use, as Client.get() of counterd.client does."""
        asked = self._call(wire.get, as_bytes(name), everywhere)
        return asked if default is None else _found(asked, default)

    def acquire(self, name: str | bytes, resources: int = 1, *, maximum: int) -> Coroutine[Any, Any, int]:
        """Acquires permits of a counter, unless more than maximum would then be in use (section "Acquire").

        Asks the server once, and does not wait for permits as hold() does. The permits are held until release(), or
        until the connection ends. Returns how many permits were granted. Raises NotAvailable if too few permits are
        free, InvalidArguments if resources are 0 or above maximum, OutOfMemory if the server has no room for another
        counter or holding.
        """
        return self._call(wire.acquire, as_bytes(name), resources, maximum)

    def release(self, name: str | bytes, resources: int = 1) -> Coroutine[Any, Any, None]:
        """Gives back permits that acquire() has acquired (section "Release"). A hold gives back its own permits.

        Raises NotFound if the counter does not exist, NotAcquired if the connection holds fewer permits. After an error
        nothing is released.
        """
        return self._call(wire.release, as_bytes(name), resources)

    def stats(self) -> Coroutine[Any, Any, dict[str, str]]:
        """Returns the server's statistics by name, in the server's order and as strings (section "Stats")."""
        return self._call(wire.stats)

    def dump(self) -> Coroutine[Any, Any, list[DumpEntry]]:
        """Returns all counters in no particular order, including counters without permits in use (section "Dump").

        The whole list is kept in memory.
        """
        return self._call(wire.dump, True, True)

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

    # ---- calling ----

    async def _call(self, *request: Any) -> Any:
        link = self._link
        if link is None or link.closed or self._lost is not None or self._loop is not get_running_loop():
            link = await self._connected()
        is_release = request[0] is wire.release
        was_open = is_release and link.is_open()
        call = link.start(*request)
        assert call.future is not None
        if is_release:
            self._turns.wake(request[1])  # a request that is made from here on is sent after the release
        try:
            return await call.future
        except BaseException as error:
            link.forget(call)
            if isinstance(error, (ConnectionLost, ProtocolError)):
                if await self._has_resumed(link):
                    # A release that had been sent has been made up for.
                    return None if is_release else await link.last().result(*request)
                self._heard(link)
            # If nothing was held, nothing is lost, and the server has taken back what this call was granted.
            was_good = link.calls.answered
            if not isinstance(error, ConnectionLost) or not was_good or link.calls.held:
                raise
            if is_release:
                if not link.has_read_all(was_open):
                    raise
                return None
        return await (await self._connected()).result(*request)

    async def _run(self, requests: list[Request]) -> list[Any]:
        """Returns the results of all requests, including refusals."""
        if not requests:
            return []
        link = await self._connected()
        calls = link.start_all(requests)
        futures = [cast("asyncio.Future[Any]", call.future) for call in calls]
        for name in released(requests):
            self._turns.wake(name)
        try:
            await asyncio.wait(futures)
            for future in futures:
                if not isinstance(future.exception(), (ServerError, type(None))):
                    future.result()
        except BaseException as error:
            for call in calls:
                link.forget(call)
            if isinstance(error, (ConnectionLost, ProtocolError)):
                await self._has_resumed(link)  # which gives back what the others were granted
                self._heard(link)
            raise
        return [future.exception() or future.result() for future in futures]

    def _make_calls(self) -> PermitCalls:
        calls = PermitCalls()
        calls.names = Counter() if self._greeting.resumes else None
        return calls

    async def _greet(self, link: Link) -> None:
        """Sends the client's name to the server, and resumes the last connection or asks for a token."""
        greeting, ended = self._greeting, self._link
        token = None if ended is None else ended.next_token()
        requests = greeting.states_name()
        if greeting.resumes:
            requests.append(greeting.asks(token))
        if not requests:
            return
        stay = (await self._answers(link, requests))[-1]
        if token is not None and stay is None:
            assert ended is not None
            ended.token = None
            self._lose(ended)
            (stay,) = await self._answers(link, [greeting.asks()])
        if isinstance(stay, wire.Stay):
            link.token = greeting.token(stay)
            if ended is not None and token is not None and ended.token is not None:
                calls, before = link.calls, ended.calls
                assert isinstance(calls, PermitCalls)
                assert isinstance(before, PermitCalls)
                held = [amount or 0 for amount in await self._answers(link, before.asks_held())]
                doubtful = dict(zip(before.doubtful, held, strict=True))
                link.inherit(ended, lambda: calls.inherit(before, doubtful))

    async def _answers(self, link: Link, requests: Sequence[Request]) -> list[Any]:
        """Returns the results of requests, with None for each request that the server refused."""
        answers = await link.results(requests)
        for answer in answers:
            if isinstance(answer, BaseException) and not isinstance(answer, ServerError):
                raise answer
        return [None if isinstance(answer, BaseException) else answer for answer in answers]

    async def _has_resumed(self, link: Link) -> bool:
        """Returns whether another connection has resumed this one. Connects if that is still possible."""
        if link.may_resume():
            with suppress(CounterdError):
                await self._connected(hears=False)
        return link.heir is not None

    async def _asked_again(self, ask: Callable[[Link], Coroutine[Any, Any, T]]) -> T:
        """Asks the server, and asks again if the connection was lost meanwhile and another connection has resumed
        it."""
        link = await self._server()
        try:
            return await ask(link)
        except ConnectionLost:
            if not await self._has_resumed(link):
                raise
        return await ask(await self._server())

    async def _give_back(self, link: Link, returns: list[Request]) -> None:
        """Gives back everything that was held through a connection.

        If the connection was lost and can be resumed, the permits are given back later.
        """
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

    def _on_release(self, request: Request) -> None:
        self._turns.wake(request[1])  # the first hold that waits for that name may ask again

    def _start_anew(self) -> None:
        super()._start_anew()
        self._recovering = None
        self._again = []
        self._reacquiring = asyncio.Lock()

    # ---- holding ----

    async def _ask(self, hold: Hold, asked: Asked) -> Link:
        async def ask(link: Link) -> Link:
            await link.acquire(hold, (wire.acquire, asked.name, asked.resources, asked.maximum))
            if not link.is_alive():  # it was closed in the same turn of the loop as the grant
                raise lost(link.where, link.closed)
            return link

        return await self._asked_again(ask)

    async def _hold(self, hold: Hold, asked: Asked) -> Link:
        """Waits for the permits of a hold. Returns the connection through which the hold has its permits."""
        loop = self._own_loop()
        turn = Turn(loop)
        steps = holding(self._turns, turn, asked, Patience(asked.timeout, loop.time), retry_at=self._next_attempt)
        acts = self._waiting_acts(turn, hold, asked)
        acts[QUEUE] = lambda seconds, sent: self._queue(hold, asked, seconds, sent)
        link: Link = await drive_async(steps, acts)
        return link

    async def _queue(
        self, hold: Hold, asked: Asked, seconds: float | None, sent: Callable[[], object] | None = None
    ) -> Link:
        """Waits in the server's queue. Raises UnknownCommand if the server has no queue."""

        async def queue(link: Link) -> Link:
            check_takes(link.calls)
            await link.queue([(hold, asked.resources)], asked.request(seconds), seconds, PROBE, sent)
            if not link.is_alive():  # it was closed in the same turn of the loop as the grant
                raise lost(link.where, link.closed)
            return link

        return await self._asked_again(queue)

    async def _ask_again(self, hold: Hold, asked: Asked) -> Link:
        """Does the same as _ask(), but clients that wait in the server do not always go first."""
        with suppress(UnknownCommand, OutOfMemory):
            return await self._queue(hold, asked, ASK_LONGEST_S)
        return await self._ask(hold, asked)

    async def _take_items(self, taken: Taken, asked: AskedItems) -> tuple[Link, Grant]:
        held = [((taken, item.name), item.amount) for item in asked.permits]

        async def ask(seconds: float | None, _: None) -> tuple[Link, Grant]:
            async def queue(link: Link) -> tuple[Link, Grant]:
                grant = await link.queue(held, asked.request(seconds), seconds, PROBE)
                if not link.is_alive():  # in the same turn of the loop
                    raise lost(link.where, link.closed)
                return link, grant

            return await self._asked_again(queue)

        steps = queued(Patience(asked.timeout, self._own_loop().time), retry_at=self._next_attempt)
        result: tuple[Link, Grant] = await drive_async(steps, {QUEUE: ask, PAUSE: self._pause})
        return result

    async def _server(self) -> Link:
        """Returns the connection.

        If the server does not accept a connection in time, waits until the server can be reached.
        """
        try:
            return await self._connected(hears=False)
        except Timeout as error:
            raise ConnectionLost(str(error)) from error

    async def _pause(self, seconds: float) -> None:
        """Waits, but only until close() at the longest."""
        loop = get_running_loop()
        turn = Turn(loop)
        until = loop.time() + seconds
        self._turns.join(_PAUSES, turn)
        try:
            while not self._closed and (left := until - loop.time()) > 0:
                turn.clear()  # set also when the one before in this queue leaves it
                await turn.wait(left)
        finally:
            self._turns.leave(_PAUSES, turn)

    async def _gives_up(self, queue: Queue, asked: Asked) -> CounterdError:
        """Says how many permits are in use. If many holds give up together, one asks the server."""
        loop = get_running_loop()
        if queue.counting is None and loop.time() - queue.counted_at > COUNTED_FOR_S:
            queue.counting = self._started(self._count(queue, asked.name))
        if queue.counting is not None:
            await asyncio.wait([queue.counting])
        return asked.gives_up(queue)

    async def _count(self, queue: Queue, name: bytes) -> None:
        queue.consumption, queue.unreachable = None, ""
        try:
            queue.consumption = await (await self._server()).result(wire.get, name)
        except ConnectionLost as error:
            queue.unreachable = str(error)
        except CounterdError:
            pass
        finally:
            queue.counted_at, queue.counting = get_running_loop().time(), None

    def _on_end(self, link: Link) -> None:
        """Called when a connection has ended. Resumes it, or notifies its holds that they are lost."""
        if link.may_resume():
            self._started(self._resume(link))
        elif link.closed not in NO_LOSS:
            self._lose(link)

    async def _resume(self, link: Link) -> None:
        """Tries to connect until a connection has resumed this one, or until the grace time is over."""
        backoff = Backoff(ASK_FIRST_S, ASK_LONGEST_S)
        while link.may_resume():
            if await self._has_resumed(link):
                return
            await asyncio.sleep(max(backoff.delay(), self._attempts.retry_at - get_running_loop().time()))
        if link.token is not None:
            link.token = None
            self._lose(link)

    def _lose(self, link: Link) -> None:
        """Called when everything that was held through a connection is lost. Notifies its holds."""
        super()._on_end(link)
        self._again += [hold for hold in list(link.holds) if isinstance(hold, Hold) and hold._tell()]
        if self._again and (self._recovering is None or self._recovering.done()):
            self._recovering = self._started(self._recover())

    async def _recover(self) -> None:
        """Acquires lost permits again, until each hold has them or no longer wants them."""
        backoff = Backoff(ASK_FIRST_S, ASK_LONGEST_S)
        loop = get_running_loop()
        while self._again:
            waiting, self._again = self._again, []
            for hold in waiting:
                if not await hold._acquire_again():
                    self._again.append(hold)
            if self._again:
                await asyncio.sleep(max(backoff.delay(), self._attempts.retry_at - loop.time()))


async def _found(asked: Coroutine[Any, Any, int], default: int) -> int:
    try:
        return await asked
    except NotFound:
        return default


class Hold(Entering, ForAsyncWith):
    """Permits of a counter that are held while a block runs. Client.hold() returns it, for `async with` or as a
    decorator.

    The hold has the methods of counterd.client.Hold.
    """

    def __init__(self, client: Client, asked: Asked) -> None:
        self._client = client
        self._asked = asked
        self._entered = False
        self._link: Link | None = None  # through which they are held

    def __repr__(self) -> str:
        return f"<Hold {self._asked}>"

    async def __aenter__(self) -> Hold:
        if self._entered:
            raise RuntimeError("this hold is already in use: make another one")
        self._entered = self._is_used = True
        try:
            if self._asked.on_lost == REACQUIRE:
                async with self._client._reacquiring:
                    pass  # no permits are acquired again for the last block any more
            self._link = await self._client._hold(self, self._asked)
        except BaseException:
            self._entered = False
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is GeneratorExit:  # a coroutine that is destroyed cannot wait
            with suppress(ConnectionLost):
                self._release()
            return
        link = self._left()
        try:
            await self._client._give_back(link, [(wire.release, self._asked.name, self._asked.resources)])
        except ConnectionLost:
            if kind is None:
                self._raise_loss(link)
        except CounterdError:
            if kind is None:
                raise
        finally:
            self._entered = False

    def __call__(self, function: F) -> F:
        """Returns a coroutine function, or an asynchronous generator, that holds permits while it runs.

        Each call has its own hold.
        """
        return decorated_async(function, partial(Hold, self._client, self._asked))

    @property
    def lost(self) -> bool:
        """Whether the connection and the permits were lost while the block runs, as far as the event loop knows."""
        return self._link is not None and not self._link.is_alive()

    def raise_if_lost(self) -> None:
        """Raises ConnectionLost if hold.lost is true. Call this before any action that needs the permits."""
        if self._link is not None and not self._link.is_alive():
            raise self._asked.lost(self._link.where, self._link.closed)

    def _release(self) -> None:
        """Gives the permits back without waiting for the reply.

        If the permits were lost, raises the same as _raise_loss().
        """
        link = self._left()
        self._entered = False
        if link.may_resume():
            link.calls.give_back.append((wire.release, self._asked.name, self._asked.resources))
        elif link.closed:
            self._raise_loss(link)
        else:
            link.start_unawaited(wire.release, self._asked.name, self._asked.resources)

    def _left(self) -> Link:
        """Called when the block ends. The first waiting hold asks again after the release, which is sent now."""
        ended, self._link = self._link, None
        assert ended is not None
        link = ended.last()
        link.holds.pop(self, None)
        self._client._turns.wake(self._asked.name)
        return link

    def _raise_loss(self, link: Link) -> None:
        if self._asked.on_lost == RAISE and link.closed not in NO_LOSS:
            raise self._asked.lost(link.where, link.closed) from None

    def _tell(self) -> bool:
        """Called when the permits were lost. Returns whether to acquire the permits again."""
        on_lost = self._asked.on_lost
        if self._link is None:  # the block was left
            return False
        if callable(on_lost):
            try:
                on_lost(self)
            except Exception:  # noqa: BLE001 - the user's function, and other holds need to be notified
                _log.exception("the function on_lost of %s failed", self._asked)
        return on_lost == REACQUIRE

    async def _acquire_again(self) -> bool:
        """Acquires lost permits again. Returns False if the method has to be called again."""
        async with self._client._reacquiring:
            before = self._link
            if before is None or before.is_alive():  # it was left, and maybe entered again
                return True
            try:
                link = await self._client._ask_again(self, self._asked)
            except CounterdError as error:
                if not isinstance(error, (NotAvailable, ConnectionLost)):
                    _log.warning("cannot acquire %s again: %s", self._asked, error)
                return False
            if self._link is before:
                self._link = link
            else:  # the block was left meanwhile
                link.holds.pop(self, None)
                link.start_unawaited(wire.release, self._asked.name, self._asked.resources)
                self._client._turns.wake(self._asked.name)
            return True


class Taken(TakenCore, ForAsyncWith):
    """Permits and units of rates that are taken together. Client.take() returns it, for `async with` or as a decorator.

    The object has the methods of counterd.client.Taken.
    """

    async def acquire(self) -> Taken:
        """Takes all items. Raises the exceptions that Client.take() describes."""
        self._enter()
        try:
            self._link, self._grant = await self._client._take_items(self, self._asked)
        except BaseException:
            self._entered.release()
            raise
        return self

    async def release(self) -> None:
        """Gives the permits back.

        Raises ConnectionLost if the permits were lost with the connection. settle() works after release().
        """
        link = self._left()
        if not (returns := self._returns()):
            return
        try:
            await self._client._give_back(link, returns)
        except ConnectionLost:
            self._raise_loss(link)

    async def settle(self, name: str | bytes, used: int) -> None:
        """Does the same as Taken.settle() of counterd.client."""
        ended, request = self._settlement(name, used)
        link: Link = ended.last()
        try:
            await link.result(*request)
        except ConnectionLost:
            if not await self._client._has_resumed(link):
                raise
            with suppress(NotFound):  # it may have been settled
                await link.last().result(*request)

    @property
    def lost(self) -> bool:
        """Whether the connection and the permits were lost."""
        return self._link is not None and not self._link.is_alive()

    def raise_if_lost(self) -> None:
        """Does the same as Hold.raise_if_lost()."""
        if self._link is not None and not self._link.is_alive():
            raise self._asked.lost(self._link.where, self._link.closed)

    async def __aenter__(self) -> Taken:
        return await self.acquire()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is GeneratorExit:  # a coroutine that is thrown away cannot wait
            link = self._left()
            if link.may_resume():
                link.calls.give_back += self._returns()
            elif not link.closed:
                for request in self._returns():
                    link.start_unawaited(*request)
        elif kind is None:
            await self.release()
        else:
            with suppress(CounterdError):
                await self.release()

    def __call__(self, function: F) -> F:
        """Returns a coroutine function or asynchronous generator that has the items while it runs.

        Each call takes its own items.
        """
        return decorated_async(function, partial(Taken, self._client, self._asked))

    def _returns(self) -> list[Request]:
        return [(wire.release, item.name, item.amount) for item in self._asked.permits]

    def _left(self) -> Link:
        """Called when the block is over and its permits are being given back."""
        ended: Link = self._entered_link()
        self._entered.release()
        link = ended.last()
        for item in self._asked.permits:
            link.holds.pop((self, item.name), None)
            self._client._turns.wake(item.name)
        return link


class Pipeline(Requests, ForAsyncWith):
    """Requests that are sent together. Client.pipeline() returns it.

    In an `async with`, requests that were not sent when the block ends are forgotten.
    """

    def __init__(self, client: Client) -> None:
        super().__init__()
        self._client = client

    async def __aenter__(self) -> Pipeline:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._taken()

    async def execute(self) -> list[Result]:
        """Does the same as Pipeline.execute() of counterd.client.

        If the call is cancelled, everything that it acquired is given back.
        """
        return await self._client._run(self._taken())


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

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._taken().__aexit__(kind, error, trace)

    def _taken(self) -> Hold:
        if not self._holds:
            raise ValueError("semaphore released too many times")
        return self._holds.pop()
