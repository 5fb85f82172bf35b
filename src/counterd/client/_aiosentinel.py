"""The client of counterd.client.sentinel for asyncio, with any event loop.

Stands beside the floors. The loop sees at once when the connection ends, and a timer when a lease is to be kept.
"""

from __future__ import annotations

import asyncio
import math
from asyncio import get_running_loop
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Literal, TypeVar, cast

from counterd.client._addresses import read_addresses
from counterd.client._aioshared import Shared
from counterd.client._connection import CLOSED, FORKED
from counterd.client._fallback import LOCAL, Fallback, Stats, log
from counterd.client._holding import NO_LOSS, RAISE, decorated_async
from counterd.client._tokens import (
    FAILURES,
    PORT,
    RELEASED,
    UNKNOWN,
    Answer,
    AskedToken,
    Lease,
    Token,
    TokenCalls,
    answer_of,
    check,
    flow_key,
    lost,
    not_kept,
    read_namespace,
    values_of,
)
from counterd.errors import ConnectionLost, Timeout
from counterd.protocols.sentinel import wire
from counterd.protocols.sentinel.errors import TokenRefused, token_error
from counterd.protocols.sentinel.wire import Status

if TYPE_CHECKING:
    import os
    import ssl
    from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
    from types import TracebackType

    from counterd.client._aiolink import FutureCall, Link
    from counterd.client._calls import Request
    from counterd.client._turns import Queue
    from counterd.errors import CounterdError
    from counterd.protocols.sentinel.errors import Blocked
    from counterd.protocols.sentinel.wire import Response, Value

F = TypeVar("F", bound="Callable[..., Any]")


class AsyncClient(Shared):
    """What Client is, for tasks of one event loop: `async with AsyncClient(...) as client`, or await close().

    The arguments, the results and the errors are those of Client. A call that is cancelled leaves nothing behind: a
    token that is granted after its caller has gone is given back. Nothing needs a thread. Not thread-safe, and for one
    event loop: in another it raises RuntimeError, unless the first was closed; what was held then is lost.
    """

    def __init__(
        self,
        host: str | Sequence[str] = "127.0.0.1",
        port: int = PORT,
        *,
        path: str | os.PathLike[str] | None = None,
        tls: bool | ssl.SSLContext = False,
        namespace: str | bytes = "default",
        timeout: float = 0.2,
        connect_timeout: float | None = 1.0,
        fallback: Literal["local", "open", "closed"] = LOCAL,
        limits: Mapping[int, int] | None = None,
    ) -> None:
        super().__init__(read_addresses(host, port, path, "sentinel", tls), timeout, connect_timeout)
        self._namespace = read_namespace(namespace)
        self._fallback = Fallback(fallback, limits or {})
        self._usual: dict[int, float] = {}  # by flow: the lease that a token had
        self._outage = ""  # why nobody waits for a connection
        self._leases: dict[Lease, AsyncHold] = {}
        self._timer: asyncio.TimerHandle | None = None  # something is to be done about them
        self._timer_at = 0.0
        self._keeping: asyncio.Task[None] | None = None

    async def close(self) -> None:
        """Gives back all tokens, and ends the connection. Later calls raise ConnectionLost."""
        await super().close()

    # These pass a coroutine on instead of being one more around it.

    def flow(self, flow_id: int, count: int = 1, *, prioritized: bool = False) -> Coroutine[Any, Any, Answer]:
        """Asks whether so many calls of a flow may pass now, by its rate.

        prioritized: where they may not, they may be told to pass after a while, at the expense of later ones.
        """
        check(flow_id, count)
        return self._decided(flow_id, count, (), (wire.flow, flow_id, count, prioritized))

    def param(self, flow_id: int, values: Iterable[Value], count: int = 1) -> Coroutine[Any, Any, Answer]:
        """Asks whether so many calls of a flow with each of these values may pass now: all of them, or none.

        values: bool, int, float, text or bytes, as Java's Boolean, Integer or Long, Double and String; Typed(Tag.SHORT,
        5) for another of its types. Encoded they may have 1,001 bytes.
        """
        check(flow_id, count)
        values = values_of(values)
        return self._decided(flow_id, count, values, (wire.param_flow, flow_id, count, values))

    def acquire(self, flow_id: int, count: int = 1, *, prioritized: bool = False) -> Coroutine[Any, Any, Token]:
        """A token for so many calls of a flow that run at the same time. Blocked if that would be too many.

        Asks once, and does not look after the lease, as hold() does: release() it, and until then keep() it.
        prioritized: for servers to which that means something.
        """
        return self._ask(None, AskedToken(flow_id, count, prioritized, 0, RAISE))

    async def release(self, token: Token) -> bool:
        """Gives a token back. False if it was gone before: given back, or its lease was over."""
        if token.fallback:
            released = self._fallback.release(token)
        else:
            try:
                status = (await self._call((wire.release, token.id))).status
            except FAILURES:
                raise
            except BaseException:
                self._give_back(token)  # maybe once more
                raise
            released = status != Status.ALREADY_RELEASED
            if status not in RELEASED:
                raise not_kept(status, token)
            self._fallback.gone(token)
        self._turns.wake(flow_key(token.flow_id))
        return released

    async def keep(self, token: Token) -> int:
        """Goes on with a token's lease. Milliseconds that are left of it now; TokenLost if it is gone.

        NoSuchRule if its rule is: the lease does not go on then. One of the fallback has none, and always the most.
        """
        if token.fallback:
            return wire.LEASE_MAX
        response = await self._call((wire.keep, token.id))
        if response.status != Status.OK:
            if response.status == Status.ALREADY_RELEASED:
                self._fallback.gone(token)
            raise not_kept(response.status, token)
        return response.left_ms

    async def ping(self) -> int:
        """How many connections are registered in the namespace, this one among them."""
        response = await self._call((wire.ping, self._namespace))
        if response.status != Status.OK:
            raise token_error(response.status)
        return response.connected

    def hold(
        self,
        flow_id: int,
        count: int = 1,
        *,
        prioritized: bool = False,
        timeout: float | None = None,
        on_lost: Callable[[AsyncHold], object] | Literal["raise"] = RAISE,
    ) -> AsyncHold:
        """A token while a block runs: `async with client.hold(101, timeout=5):`, or as a decorator.

        As Client.hold(). A function as on_lost is called by the loop.
        """
        return AsyncHold(self, AskedToken(flow_id, count, prioritized, timeout, on_lost))

    def stats(self) -> Stats:
        """What the client did without the server, and what was lost. Asks nobody."""
        return self._fallback.stats()

    # ---- calling ----

    async def _call(self, request: tuple[Any, ...]) -> Response:
        link = self._link
        if link is None or link.closed or self._loop is not get_running_loop():
            link = await self._reached()
        call = link.start(*request)
        assert call.future is not None
        try:
            first: Response = await call.future
            return first
        except BaseException as error:
            link.forget(call)
            # What was granted unseen ends soon, without a connection: it is safe to ask again.
            if not isinstance(error, ConnectionLost) or not link.calls.answered or self._closed:
                raise
        again: Response = await (await self._reached()).result(*request)
        return again

    async def _reached(self) -> Link:
        """The connection, a new one if it was lost. ConnectionLost, at once where an attempt has failed."""
        loop = self._own_loop()
        link = self._link
        if link is not None and not link.closed:
            return link
        if self._outage and not self._closed:
            with suppress(ConnectionLost):
                self._connecting_now(loop)
            raise ConnectionLost(self._outage)
        return await self._connected_again()

    async def _connected_again(self) -> Link:
        try:
            return await self._connected()
        except (ConnectionLost, Timeout) as error:
            if not self._closed:
                self._outage = self._outage or str(error)
            raise ConnectionLost(str(error)) from error

    async def _decided(self, flow_id: int, count: int, values: Sequence[Value], request: tuple[Any, ...]) -> Answer:
        failure: CounterdError | None
        try:
            response = await self._call(request)
            failure = self._fallback.heard(flow_id, count, response)
        except FAILURES as error:
            if self._closed:
                raise
            failure = error
        if failure is None:
            return answer_of(response)
        return self._fallback.answer(flow_id, count, values, failure)

    async def _ask(self, _hold: object, asked: AskedToken) -> Token:
        """A token of the server or of the fallback. Blocked, or what went wrong."""
        failure: CounterdError | None
        try:
            response = await self._call(asked.request)
            failure = self._fallback.heard(asked.flow_id, asked.count, response)
        except FAILURES as error:
            if self._closed:
                raise
            failure = error
        if failure is not None:
            return self._fallback.acquire(asked.flow_id, asked.count, failure)
        if response.status != Status.OK:
            raise asked.blocked(None)
        token = asked.token(response)
        self._fallback.granted(token)
        return token

    async def _gives_up(self, queue: Queue, asked: AskedToken) -> Blocked:
        return asked.blocked(asked.timeout)

    # ---- the connection ----

    def _make_calls(self) -> TokenCalls:
        return TokenCalls(self._fallback.tally)

    def _on_release(self, request: Request) -> None:
        self._turns.wake(request[1])  # who waits for that flow may ask again

    def _on_connected(self, link: Link) -> None:
        """Registers it, and goes on with all tokens, so that they are this connection's from now on."""
        self._outage = ""
        link.start_unawaited(wire.ping, self._namespace)
        kept = {lease.token for lease in self._leases}
        for token in self._fallback.tokens():
            if token not in kept:
                link.start_unawaited(wire.keep, token.id)
        self._hurry()

    def _on_end(self, link: Link) -> None:
        if link.closed not in NO_LOSS and link is self._link:
            self._hurry()

    def _end(self) -> None:
        self._forget(CLOSED)
        tokens = self._fallback.close()
        link = self._link
        if link is not None and not link.closed:
            for token in tokens:
                link.start_unawaited(wire.release, token.id)
            link.flush()
        super()._end()

    def _start_anew(self) -> None:
        super()._start_anew()
        self._forget("its event loop was closed")
        self._keeping = None
        self._outage = ""

    def _after_fork(self) -> None:
        self._forget(FORKED)
        super()._after_fork()
        self._fallback.after_fork()

    # ---- tokens ----

    def _keep(self, hold: AsyncHold, token: Token) -> Lease:
        """A lease, kept alive from now on."""
        lease = Lease(token, self._own_loop().time(), self._usual.get(token.flow_id))
        self._leases[lease] = hold
        self._schedule()
        return lease

    def _kept(self, lease: Lease, now: float) -> None:
        """The server has said what is left of it."""
        if lease.ends < math.inf:
            self._usual[lease.token.flow_id] = lease.ends - now

    def _forget(self, why: str) -> None:
        """Nothing is held any more."""
        for lease in self._leases:
            lease.lost = lease.lost or why
        self._leases.clear()
        self._stop_timer()

    def _hurry(self) -> None:
        """All leases are due now, as the connection has ended, or there is a new one."""
        for lease in self._leases:
            lease.due = 0.0
        self._schedule()

    def _schedule(self) -> None:
        """Sees to it that something is done when it is due."""
        if not self._leases or self._closed or (self._keeping is not None and not self._keeping.done()):
            return
        if self._outage:
            at = min(self._attempts.retry_at, *(lease.ends for lease in self._leases))
        else:
            at = min(lease.next for lease in self._leases)
        if self._timer is None or self._timer_at > at:
            self._stop_timer()
            loop = self._own_loop()
            self._timer, self._timer_at = loop.call_at(max(at, loop.time()), self._look), at

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _look(self) -> None:
        """Something is due."""
        self._timer = None
        self._keeping = self._started(self._keep_due())
        self._keeping.add_done_callback(lambda _: self._schedule())

    async def _keep_due(self) -> None:
        loop = self._own_loop()
        with suppress(*FAILURES):
            link = await self._connected_again()
            due = [lease for lease in self._leases if lease.due <= loop.time()]
            if due:
                await self._keep_all(link, due, loop)
        for lease, hold in list(self._leases.items()):
            lease.look(loop.time())
            if lease.lost and self._leases.pop(lease, None) is not None:
                self._fallback.lost(lease)
                hold._tell()

    async def _keep_all(self, link: Link, due: list[Lease], loop: asyncio.AbstractEventLoop) -> None:
        asked = loop.time()
        calls = link.start_all([(wire.keep, lease.token.id) for lease in due])
        try:
            await asyncio.wait([cast("asyncio.Future[Response]", call.future) for call in calls])
        finally:
            responses = [_response(call) for call in calls]
            for call in calls:
                link.forget(call)
        now = loop.time()
        for lease, response in zip(due, responses, strict=True):
            lease.answered(asked, now, response)
            self._kept(lease, now)

    def _give_back(self, token: Token | None) -> None:
        """Waits for nothing: nobody is there to do that."""
        if token is None or self._closed:
            return
        if token.fallback:
            self._fallback.release(token)
        else:
            self._fallback.gone(token)
            if self._link is not None and not self._link.closed:
                self._link.start_unawaited(wire.release, token.id)
        self._turns.wake(flow_key(token.flow_id))

    async def _was_known(self, token: Token) -> bool:
        """Gives it back. False if the server says that it was gone before; if it cannot be asked it ends by itself."""
        try:
            return await self.release(token)
        except (*FAILURES, TokenRefused):
            return True


def _response(call: FutureCall) -> Response | None:
    """What a call was answered, if it was."""
    future = call.future
    assert future is not None
    return future.result() if future.done() and not future.cancelled() and future.exception() is None else None


class AsyncHold:
    """A token that is held while a block runs: what AsyncClient.hold() returns, for `async with` or as a decorator.

    As Hold.
    """

    def __init__(self, client: AsyncClient, asked: AskedToken) -> None:
        self._client = client
        self._asked = asked
        self._entered = False
        self._token: Token | None = None
        self._lease: Lease | None = None  # of a token of the server

    def __repr__(self) -> str:
        return f"<AsyncHold {self._asked}>"

    async def __aenter__(self) -> AsyncHold:
        if self._entered:
            raise RuntimeError("this hold has been entered already: make another")
        self._entered = True
        try:
            token: Token = await self._client._take(self, self._asked)
        except BaseException:
            self._entered = False
            raise
        self._token = token
        if not token.fallback:
            self._lease = self._client._keep(self, token)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        client, token, lease = self._client, self._token, self._lease
        assert token is not None
        self._token = self._lease = None
        if lease is not None:
            client._leases.pop(lease, None)
        try:
            if lease is None or kind is GeneratorExit:  # a coroutine that is thrown away cannot wait
                client._give_back(token)
                return
            if lease.lost in NO_LOSS:
                return
            lease.look(client._own_loop().time())
            if not await client._was_known(token) and not lease.lost:
                lease.lost = UNKNOWN
            client._fallback.lost(lease)
            if lease.lost and kind is None and self._asked.on_lost == RAISE:
                raise lost(token, lease.lost)
        finally:
            self._entered = False

    def __call__(self, function: F) -> F:
        """A coroutine function or asynchronous generator that holds a token while it runs; each call its own."""
        return decorated_async(function, lambda: AsyncHold(self._client, self._asked))

    @property
    def token(self) -> Token | None:
        """What is held, with the server's number for it; None outside of the block."""
        return self._token

    @property
    def lost(self) -> bool:
        """Whether the token was lost while the block runs, as far as is known. Asks nobody."""
        lease, loop = self._lease, self._client._loop
        if lease is not None and loop is not None:
            lease.look(loop.time())
        return lease is not None and bool(lease.lost)

    @property
    def fallback(self) -> bool:
        """Whether the server knows nothing of it, because the fallback let it through."""
        return self._token is not None and self._token.fallback

    def raise_if_lost(self) -> None:
        """TokenLost if hold.lost, to be asked before what must not be done without the token."""
        lease = self._lease
        if self.lost and lease is not None:
            raise lost(lease.token, lease.lost)

    def _tell(self) -> None:
        """It was lost."""
        on_lost = self._asked.on_lost
        if callable(on_lost):
            try:
                on_lost(self)
            except Exception:  # noqa: BLE001 - the caller's, and the loop has others to serve
                log.exception("on_lost of %s", self._asked)
