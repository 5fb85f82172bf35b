"""The client of counterd.client for asyncio, with any event loop: the same names, the same arguments, and `await`.

Any number of tasks share one connection; their calls are under way side by side.

Stands beside the floors.
"""

from __future__ import annotations

import asyncio
import logging
from asyncio import get_running_loop
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Literal, TypeVar, cast

from counterd.client._addresses import read_default
from counterd.client._aioshared import Shared
from counterd.client._backoff import ASK_FIRST_S, ASK_LONGEST_S, Backoff
from counterd.client._connection import as_bytes, lost
from counterd.client._holding import NO_LOSS, RAISE, REACQUIRE, decorated_async, printed
from counterd.client._tenure import Tenure
from counterd.client._turns import COUNTED_FOR_S, Queue
from counterd.client.counter._asked import Asked
from counterd.client.counter._permits import PermitCalls
from counterd.client.counter._pipeline import Requests, Result, released
from counterd.errors import ConnectionLost, CounterdError, NotAvailable, NotFound, ProtocolError, ServerError, Timeout
from counterd.protocols.counter import wire

if TYPE_CHECKING:
    import os
    import ssl
    from collections.abc import Callable, Coroutine, Sequence
    from types import TracebackType

    from counterd.client._aiolink import Link
    from counterd.client._calls import Request
    from counterd.client._tenure import Seen
    from counterd.protocols.counter.wire import DumpEntry

__all__ = ["Client", "Hold", "Pipeline", "Semaphore"]

F = TypeVar("F", bound="Callable[..., Any]")
_log = logging.getLogger(__name__)


class Client(Shared):
    """As counterd.client.Client, for tasks of one event loop. `async with Client(...) as client`, or await close().

    Connects with the first call, which raises if it cannot, or with a hold, which waits for a server.
    A call that is cancelled leaves nothing behind: what an acquire is granted after its caller has gone is given back.
    The loop sees at once when the connection is lost: nothing needs a thread. Not thread-safe, and for one event loop:
    in another it raises RuntimeError, unless the first was closed; then it connects again, and what was held is lost.
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
    ) -> None:
        super().__init__(read_default(host, port, path, tls, default_port=wire.PORT), timeout, connect_timeout)
        self._recovering: asyncio.Task[None] | None = None
        self._again: list[Hold] = []  # those whose permits are to be acquired again
        self._reacquiring = asyncio.Lock()  # while they are, for one of these

    # These pass a coroutine on instead of being one more around it: with many tasks that is a tenth of a call.

    def noop(self) -> Coroutine[Any, Any, None]:
        """Makes the server answer (section "Noop")."""
        return self._call(wire.noop)

    def get(self, name: str | bytes, default: int | None = None) -> Coroutine[Any, Any, int]:
        """How much of a counter is consumed (section "Get"). If there is none: default, or NotFound without one."""
        asked = self._call(wire.get, as_bytes(name))
        return asked if default is None else _found(asked, default)

    def acquire(self, name: str | bytes, resources: int = 1, *, maximum: int) -> Coroutine[Any, Any, int]:
        """Acquires resources, if no more than maximum of the counter are consumed then (section "Acquire").

        Asks once, and never waits: hold() does. They are held until release(), or until the connection ends.
        Returns how many were granted. NotAvailable if the maximum leaves no room, InvalidArguments if resources are
        0 or above maximum, OutOfMemory if the server has no room for another counter or holding.
        """
        return self._call(wire.acquire, as_bytes(name), resources, maximum)

    def release(self, name: str | bytes, resources: int = 1) -> Coroutine[Any, Any, None]:
        """Gives back resources that acquire() got (section "Release"). A hold gives its own back.

        NotFound if there is no such counter, NotAcquired if this connection holds less; nothing is released then.
        """
        return self._call(wire.release, as_bytes(name), resources)

    def stats(self) -> Coroutine[Any, Any, dict[str, str]]:
        """The server's statistics by name, in its order, as the texts it sends (section "Stats")."""
        return self._call(wire.stats)

    def dump(self) -> Coroutine[Any, Any, list[DumpEntry]]:
        """Every counter, used or not, in no particular order (section "Dump"). All of them are in memory at once."""
        return self._call(wire.dump, True)

    def pipeline(self) -> Pipeline:
        """Requests that are sent together: `results = await client.pipeline().get("a").get("b").execute()`."""
        return Pipeline(self)

    def hold(
        self,
        name: str | bytes,
        resources: int = 1,
        *,
        maximum: int,
        timeout: float | None = None,
        on_lost: Callable[[Hold], object] | Literal["raise", "reacquire"] = RAISE,
    ) -> Hold:
        """Permits while a block runs: `async with client.hold("db:main", 2, maximum=10, timeout=5):`, or a decorator.

        As Client.hold() of counterd.client. A function as on_lost is called by the loop; nothing needs watch=True.
        """
        return Hold(self, Asked(name, resources, maximum, timeout, on_lost))

    def semaphore(self, name: str | bytes, maximum: int) -> Semaphore:
        """A counter of so many permits with the methods of asyncio.BoundedSemaphore."""
        return Semaphore(self, name, maximum)

    # ---- calling ----

    async def _call(self, *request: Any) -> Any:
        link = self._link
        if link is None or link.closed or self._lost is not None or self._loop is not get_running_loop():
            link = await self._connected()
        call = link.start(*request)
        assert call.future is not None
        if request[0] is wire.release:
            self._turns.wake(request[1])  # whoever asks from here on is behind the release
        try:
            return await call.future
        except BaseException as error:
            link.forget(call)
            if isinstance(error, (ConnectionLost, ProtocolError)):
                self._heard(link)
            # Where nothing was held nothing is lost, and what was granted unseen is back: it is safe to ask again.
            was_good, is_release = link.calls.answered, request[0] is wire.release
            if not isinstance(error, ConnectionLost) or not was_good or link.calls.held or is_release:
                raise
        return await (await self._connected()).result(*request)

    async def _run(self, requests: list[Request]) -> list[Any]:
        """The results of all; refusals are among them."""
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
            if isinstance(error, (ConnectionLost, ProtocolError)):
                self._heard(link)
            for call in calls:
                link.forget(call)
            raise
        return [future.exception() or future.result() for future in futures]

    def _make_calls(self) -> PermitCalls:
        return PermitCalls()

    def _on_release(self, request: Request) -> None:
        self._turns.wake(request[1])  # who waits for that name may ask again

    def _start_anew(self) -> None:
        super()._start_anew()
        self._recovering = None
        self._again = []
        self._reacquiring = asyncio.Lock()

    # ---- holding ----

    async def _ask(self, hold: Hold, asked: Asked) -> Link:
        try:
            link = await self._connected(hears=False)
        except Timeout as error:  # no answer to connecting is no server, and that is waited for
            raise ConnectionLost(str(error)) from error
        await link.acquire(hold, (wire.acquire, asked.name, asked.resources, asked.maximum))
        if link.closed:  # in the same turn of the loop
            raise lost(link.where, link.closed)
        return link

    async def _look_around(self, asked: Asked) -> Seen:
        try:
            link = await self._connected(hears=False)
        except Timeout as error:
            raise ConnectionLost(str(error)) from error
        looking = link.start_all(((wire.get, asked.name), (wire.stats,)))
        answers = await asyncio.gather(*(call.future for call in looking if call.future), return_exceptions=True)
        for answer in answers:
            if isinstance(answer, BaseException) and not isinstance(answer, ServerError):
                raise answer
        consumption, stats = (None if isinstance(answer, BaseException) else answer for answer in answers)
        return asked.seen(consumption, stats, link.calls.refused)

    async def _gives_up(self, queue: Queue, asked: Asked) -> NotAvailable:
        return asked.not_available(await self._consumption(queue, asked))

    async def _consumption(self, queue: Queue, asked: Asked) -> int | None:
        """For who gives up. When many do at once, one asks."""
        loop = get_running_loop()
        if queue.counting is None and loop.time() - queue.counted_at > COUNTED_FOR_S:
            queue.counting = self._started(self._count(queue, asked.name))
        if queue.counting is not None:
            await asyncio.wait([queue.counting])
        return queue.consumption

    async def _count(self, queue: Queue, name: bytes) -> None:
        queue.consumption = None
        try:
            with suppress(CounterdError):
                queue.consumption = await (await self._connected(hears=False)).result(wire.get, name)
        finally:
            queue.counted_at, queue.counting = get_running_loop().time(), None

    def _on_end(self, link: Link) -> None:
        """A connection has ended: its holds hear of it."""
        if link.closed in NO_LOSS:
            return
        super()._on_end(link)
        self._again += [hold for hold in list(link.holds) if hold._tell()]
        if self._again and (self._recovering is None or self._recovering.done()):
            self._recovering = self._started(self._recover())

    async def _recover(self) -> None:
        """Acquires again what was lost, until all of it is there or nobody wants it any more."""
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


class Hold:
    """Permits of a counter, held while a block runs: what Client.hold() returns, for `async with` or a decorator.

    As counterd.client.Hold.
    """

    def __init__(self, client: Client, asked: Asked) -> None:
        self._client = client
        self._asked = asked
        self._tenure = Tenure()  # while it is entered: that of the name
        self._entered = False
        self._link: Link | None = None  # through which they are held

    def __repr__(self) -> str:
        return f"<Hold {self._asked}>"

    async def __aenter__(self) -> Hold:
        if self._entered:
            raise RuntimeError("this hold has been entered already: make another")
        self._entered = True
        try:
            if self._asked.on_lost == REACQUIRE:
                async with self._client._reacquiring:
                    pass  # from now on it is not the block before that permits are acquired again for
            self._tenure = self._client._turns.tenure(self._asked.name)
            self._link = await self._client._take(self, self._asked, self._tenure)
            self._tenure.granted(self, self._link.now())
        except BaseException:
            self._entered = False
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is GeneratorExit:  # a coroutine that is thrown away cannot wait
            with suppress(ConnectionLost):
                self._release()
            return
        link = self._left()
        try:
            await link.result(wire.release, self._asked.name, self._asked.resources)
        except ConnectionLost:
            if kind is None:
                self._raise_loss(link)
        except CounterdError:
            if kind is None:
                raise
        finally:
            self._entered = False

    def __call__(self, function: F) -> F:
        """A coroutine function or asynchronous generator that holds the permits while it runs; each call its own."""
        return decorated_async(function, lambda: Hold(self._client, self._asked))

    @property
    def lost(self) -> bool:
        """Whether the connection, and the permits with it, were lost while the block runs. Costs nothing."""
        return self._link is not None and bool(self._link.closed)

    def raise_if_lost(self) -> None:
        """ConnectionLost if hold.lost, to be asked before what must not be done without the permits."""
        if self._link is not None and self._link.closed:
            raise self._asked.lost(self._link.where, self._link.closed)

    def _release(self) -> None:
        """Gives the permits back without waiting for the answer. ConnectionLost if they were lost, and it counts."""
        link = self._left()
        self._entered = False
        if link.closed:
            self._raise_loss(link)
        else:
            link.start_unawaited(wire.release, self._asked.name, self._asked.resources)

    def _left(self) -> Link:
        """The block is over. Whoever waits asks again, behind the release that is sent now."""
        link, self._link = self._link, None
        assert link is not None
        link.holds.pop(self, None)
        self._tenure.released(self, link.now())
        self._client._turns.wake(self._asked.name)
        return link

    def _raise_loss(self, link: Link) -> None:
        if self._asked.on_lost == RAISE and link.closed not in NO_LOSS:
            raise self._asked.lost(link.where, link.closed) from None

    def _tell(self) -> bool:
        """They were lost. Returns whether they are wanted again."""
        on_lost = self._asked.on_lost
        if self._link is None:  # the block was left
            return False
        if callable(on_lost):
            try:
                on_lost(self)
            except Exception:  # noqa: BLE001 - the caller's, and the loop has others to serve
                _log.exception("on_lost of %s", self._asked)
        return on_lost == REACQUIRE

    async def _acquire_again(self) -> bool:
        """Whether that is done, or not wanted any more."""
        async with self._client._reacquiring:
            before = self._link
            if before is None or not before.closed:  # it was left, and maybe entered again
                return True
            try:
                link = await self._client._ask(self, self._asked)
            except CounterdError as error:
                if not isinstance(error, (NotAvailable, ConnectionLost)):
                    _log.warning("acquiring %s again: %s", self._asked, error)
                return False
            if self._link is before:
                self._link = link
            else:  # the block was left meanwhile
                link.holds.pop(self, None)
                link.start_unawaited(wire.release, self._asked.name, self._asked.resources)
                self._client._turns.wake(self._asked.name)
            return True


class Pipeline(Requests):
    """Requests that are sent together and answered together: what Client.pipeline() returns.

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
        """As Pipeline.execute() of counterd.client. Cancelled, it gives back what its acquires were granted."""
        return await self._client._run(self._taken())


class Semaphore:
    """A counter with the methods of asyncio.BoundedSemaphore, of which locked() has to be awaited: it asks the server.

    Each acquire is a permit of its own, and only as many can be released.
    """

    def __init__(self, client: Client, name: str | bytes, maximum: int) -> None:
        self._client = client
        self._name = as_bytes(name)
        self._maximum = maximum
        client.hold(name, maximum=maximum)  # what does not fit the protocol is told here already
        self._holds: list[Hold] = []

    async def acquire(self) -> Literal[True]:
        """Takes a permit, and waits for it as long as it takes."""
        self._holds.append(await self._client.hold(self._name, maximum=self._maximum).__aenter__())
        return True

    def release(self) -> None:
        """Gives a permit back. ValueError if none was acquired, ConnectionLost if it was lost with its connection."""
        self._taken()._release()

    def __repr__(self) -> str:
        return f"<Semaphore {printed(self._name)}, maximum {self._maximum}, {len(self._holds)} acquired here>"

    async def locked(self) -> bool:
        """Whether no permit is free now, for anybody."""
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
