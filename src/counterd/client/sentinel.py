"""Clients for the sentinel protocol, blocking and for asyncio: a flow's calls by rate, by value, or at the same time.

Client.flow() and param() ask whether calls may pass, Client.hold() has a token of a flow while a block runs. While the
server does not decide the client falls back to limits of its own, and says so.

Stands beside the floors: needs the wire module and counterd.errors only, and works where nothing is compiled.
"""

from __future__ import annotations

import math
import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Literal, TypeVar, cast

from counterd.client._addresses import read_addresses
from counterd.client._aiosentinel import AsyncClient, AsyncHold
from counterd.client._connection import CLOSED
from counterd.client._fallback import LOCAL, Fallback, Stats, log
from counterd.client._holding import NO_LOSS, RAISE, decorated
from counterd.client._keeper import Keeper, TokenLink
from counterd.client._portable import is_mine
from counterd.client._shared import Shared
from counterd.client._tokens import (
    FAILURES,
    PORT,
    RELEASED,
    UNKNOWN,
    Answer,
    AskedToken,
    Lease,
    Token,
    answer_of,
    check,
    flow_key,
    lost,
    not_kept,
    read_namespace,
    values_of,
)
from counterd.errors import ConnectionLost, CounterdError, Timeout
from counterd.protocols.sentinel import wire
from counterd.protocols.sentinel.errors import Blocked, NoSuchRule, TokenLost, TokenRefused, token_error
from counterd.protocols.sentinel.wire import Status, Tag, Typed

if TYPE_CHECKING:
    import os
    import socket
    import ssl
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from types import TracebackType

    from counterd.client._link import Link
    from counterd.client._tls import SecureSocket
    from counterd.client._turns import Queue
    from counterd.protocols.sentinel.wire import Response, Value

__all__ = [
    "Answer",
    "AsyncClient",
    "AsyncHold",
    "Blocked",
    "Client",
    "Hold",
    "NoSuchRule",
    "Stats",
    "Status",
    "Tag",
    "Token",
    "TokenLost",
    "TokenRefused",
    "Typed",
]

F = TypeVar("F", bound="Callable[..., Any]")


class Client(Shared):
    """A connection to a server, and the next one when it is lost. `with Client(...) as client`, or close() it.

    Connects with the first call. Threads may share it: their calls are under way side by side on one connection. After
    a fork it belongs to the parent; in the child it connects anew when it is used.

    host: a host, sentinel://HOST[:PORT], sentinels://HOST[:PORT] (with TLS) or sentinel+unix:///PATH, or several of
    these, which are tried in order. They are several ways to *one* server.
    port: for hosts without one.
    path: of a Unix socket, instead of host and port.
    tls: True or an ssl.SSLContext, as with counterd.client.Client, and so is what may follow in a URL.
    namespace: in which each connection is registered, and counts where a threshold is for each of those.
    timeout: seconds that each call may take as a whole. A token that is granted after that is given back at once. Where
    the server has extensions that decide, they need some of it.
    connect_timeout: seconds that connecting to one address may take, and TLS's handshake. Once that failed only a
    thread of the client's own connects: no call waits for it.
    fallback: what decides while the server does not. "local": limits of this client alone; "open": all is let through;
    "closed": nothing is.
    limits: for each flow what "local" lets through: so many a second by flow() and of each value by param(), so many at
    the same time by acquire() and hold(). Without one, what went wrong is raised.

    The server does not decide where it cannot be reached or does not answer, and for a flow where its answer is none:
    bad request, too many requests, failed, no such rule, not available. Each time that begins and ends is a warning of
    the logger counterd.client.sentinel; stats() has the figures.

    Flows have ids of 1 to 2^63-1, counts are 1 to 2^31-1. Anything else is a ValueError or TypeError.
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
        self._namespace = read_namespace(namespace)
        self._fallback = Fallback(fallback, limits or {})
        self._usual: dict[int, float] = {}  # by flow: the lease that a token had
        self._outage = ""  # why only the keeper connects
        self._keeper: Keeper | None = None
        super().__init__(read_addresses(host, port, path, "sentinel", tls), timeout, connect_timeout)

    def close(self) -> None:
        """Gives back all tokens, and ends the connection. Later calls raise ConnectionLost."""
        self._closed = True
        with self._keeping:
            keeper, self._keeper = self._keeper, None
            if keeper is not None:
                keeper.stop()
        self._token_link.leave(self._fallback.close())
        self._turns.wake_all()
        if keeper is not None and not self._is_interrupted():
            keeper.join()

    def flow(self, flow_id: int, count: int = 1, *, prioritized: bool = False) -> Answer:
        """Asks whether so many calls of a flow may pass now, by its rate.

        prioritized: where they may not, they may be told to pass after a while, at the expense of later ones.
        """
        check(flow_id, count)
        return self._decided(flow_id, count, (), (wire.flow, flow_id, count, prioritized))

    def param(self, flow_id: int, values: Iterable[Value], count: int = 1) -> Answer:
        """Asks whether so many calls of a flow with each of these values may pass now: all of them, or none.

        values: bool, int, float, text or bytes, as Java's Boolean, Integer or Long, Double and String; Typed(Tag.SHORT,
        5) for another of its types. Encoded they may have 1,001 bytes.
        """
        check(flow_id, count)
        values = values_of(values)
        return self._decided(flow_id, count, values, (wire.param_flow, flow_id, count, values))

    def acquire(self, flow_id: int, count: int = 1, *, prioritized: bool = False) -> Token:
        """A token for so many calls of a flow that run at the same time. Blocked if that would be too many.

        Asks once, and does not look after the lease, as hold() does: release() it, and until then keep() it.
        prioritized: for servers to which that means something.
        """
        taken = _Taken()
        try:
            self._ask(taken, AskedToken(flow_id, count, prioritized, 0, RAISE))
        except BaseException:
            self._give_back(taken._token)
            raise
        assert taken._token is not None
        return taken._token

    def release(self, token: Token) -> bool:
        """Gives a token back. False if it was gone before: given back, or its lease was over."""
        if token.fallback:
            released = self._fallback.release(token)
        else:
            try:
                status = self._call((wire.release, token.id), None).status
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

    def keep(self, token: Token) -> int:
        """Goes on with a token's lease. Milliseconds that are left of it now; TokenLost if it is gone.

        NoSuchRule if its rule is: the lease does not go on then. One of the fallback has none, and always the most.
        """
        if token.fallback:
            return wire.LEASE_MAX
        response = self._call((wire.keep, token.id), None)
        if response.status != Status.OK:
            if response.status == Status.ALREADY_RELEASED:
                self._fallback.gone(token)
            raise not_kept(response.status, token)
        return response.left_ms

    def ping(self) -> int:
        """How many connections are registered in the namespace, this one among them."""
        response = self._call((wire.ping, self._namespace), None)
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
        on_lost: Callable[[Hold], object] | Literal["raise"] = RAISE,
    ) -> Hold:
        """A token while a block runs: `with client.hold(101, timeout=5):`, or as a decorator.

        Waits while the flow is blocked, for timeout seconds at most (None: for ever, 0: asks once), then raises
        Blocked. Those who wait for one flow in this client get it in order. Where nothing is let through without a
        server it waits for that too, and raises ConnectionLost; a server that does not answer is Timeout, and what is
        no decision TokenRefused, at once. A thread of the client's own keeps the lease alive, also through another
        connection; leaving the block gives the token back, or lets it end with its lease where that cannot be.

        on_lost: what to do when the token is lost while the block runs: the server knows it no more, or its lease was
        over before the server could be reached. "raise": leaving the block raises TokenLost, unless something else was
        raised in it. A function of the hold: is called at once, in the thread that keeps all leases, so it must be
        quick.
        """
        return Hold(self, AskedToken(flow_id, count, prioritized, timeout, on_lost))

    def stats(self) -> Stats:
        """What the client did without the server, and what was lost. Asks nobody."""
        return self._fallback.stats()

    # ---- calling ----

    def _call(self, request: tuple[Any, ...], granted: Callable[[Response], object] | None) -> Response:
        link = self._reached()
        was_good = link.calls.answered
        try:
            first: Response = link.take(request, granted)
            return first
        except ConnectionLost:
            # What was granted unseen ends soon, without a connection: it is safe to ask again.
            if not was_good or self._closed:
                raise
        again: Response = self._reached().take(request, granted)
        return again

    def _reached(self) -> Link:
        """The connection, a new one if it was lost. ConnectionLost, at once where an attempt has failed."""
        link = self._link
        if not link.closed:
            return link
        if self._outage and not self._closed:
            if time.monotonic() >= self._attempts.retry_at:
                with suppress(RuntimeError), self._keeping:  # there are no new threads when the program ends
                    self._the_keeper().connect()
            raise ConnectionLost(self._outage)
        try:
            return self._connected()
        except (ConnectionLost, Timeout) as error:
            if not self._closed:
                self._outage = str(error)
            raise ConnectionLost(str(error)) from error

    def _decided(self, flow_id: int, count: int, values: Sequence[Value], request: tuple[Any, ...]) -> Answer:
        failure: CounterdError | None
        try:
            response = self._call(request, None)
            failure = self._fallback.heard(flow_id, count, response)
        except FAILURES as error:
            if self._closed:
                raise
            failure = error
        if failure is None:
            return answer_of(response)
        return self._fallback.answer(flow_id, count, values, failure)

    def _ask(self, hold: Hold | _Taken, asked: AskedToken) -> None:
        """The hold has a token then, of the server or of the fallback. Blocked, or what went wrong."""

        def granted(response: Response) -> None:
            if response.status == Status.OK:
                hold._token = asked.token(response)

        failure: CounterdError | None
        try:
            response = self._call(asked.request, granted)
            failure = self._fallback.heard(asked.flow_id, asked.count, response)
        except FAILURES as error:
            if self._closed:
                raise
            failure = None if hold._token else error  # else it was granted at the last moment
        if failure is not None:
            hold._token = self._fallback.acquire(asked.flow_id, asked.count, failure)
        elif hold._token is None:
            raise asked.blocked(None)
        else:
            self._fallback.granted(hold._token)

    def _gives_up(self, queue: Queue, asked: AskedToken) -> Blocked:
        return asked.blocked(asked.timeout)

    # ---- the connection ----

    @property
    def _token_link(self) -> TokenLink:
        return cast("TokenLink", self._link)

    def _make_link(self, connected: socket.socket | SecureSocket, where: str) -> TokenLink:
        tally = self._fallback.tally
        return TokenLink(connected, where, self._timeout, self._on_end, on_late=self._on_late, tally=tally)

    def _greet(self, link: Link) -> None:
        link.tell(wire.ping, self._namespace)

    def _on_connected(self) -> None:
        """Goes on with all tokens, so that they are this connection's from now on."""
        self._outage = ""
        kept: set[Token] = set()
        with self._keeping:
            if self._keeper is not None:
                kept = self._keeper.hurry()
        for token in self._fallback.tokens():
            if token not in kept:
                self._link.tell(wire.keep, token.id)

    def _on_late(self) -> None:
        """A grant may come that nobody waits for any more. Is called with the connection's lock."""
        with suppress(RuntimeError), self._keeping:
            self._the_keeper().collect()

    def _make_locks(self) -> None:
        super()._make_locks()
        # Of the keeper. Who has it takes no lock of a connection, as that one may wait for this.
        self._keeping: Any = threading.RLock()

    def _after_fork(self) -> None:
        super()._after_fork()
        self._fallback.after_fork()
        self._outage = ""
        keeper, self._keeper = self._keeper, None
        if keeper is not None:
            keeper.after_fork()

    # ---- tokens ----

    def _the_keeper(self) -> Keeper:
        """With the lock: it ends by itself when it has nothing to do."""
        if self._keeper is None:
            self._keeper = Keeper(self)
        return self._keeper

    def _dismiss(self, keeper: Keeper) -> bool:
        """Whether it may end, as there is nothing to do."""
        with self._keeping:
            if keeper.has_work():
                return False
            self._keeper = None
            return True

    def _keep(self, hold: Hold, token: Token) -> Lease:
        """A lease, kept alive from now on."""
        lease = Lease(token, time.monotonic(), self._usual.get(token.flow_id))
        with suppress(RuntimeError), self._keeping:
            if self._closed:
                lease.lost = CLOSED
            else:
                self._the_keeper().add(lease, hold)
        return lease

    def _leave(self, lease: Lease | None) -> None:
        """It is not kept alive any more."""
        keeper = self._keeper
        if lease is not None and keeper is not None:
            keeper.leases.pop(lease, None)

    def _kept(self, lease: Lease, now: float) -> None:
        """The server has said what is left of it."""
        if lease.ends < math.inf:
            self._usual[lease.token.flow_id] = lease.ends - now

    def _give_back(self, token: Token | None) -> None:
        """Waits for nothing: nobody is there to do that."""
        if token is None or self._closed:
            return
        if token.fallback:
            self._fallback.release(token)
        else:
            self._fallback.gone(token)
            self._token_link.give_back(token)
        self._turns.wake(flow_key(token.flow_id))

    def _was_known(self, token: Token) -> bool:
        """Gives it back. False if the server says that it was gone before; if it cannot be asked it ends by itself."""
        try:
            return self.release(token)
        except (*FAILURES, TokenRefused):
            return True

    def _is_interrupted(self) -> bool:
        """By a signal handler that runs now, in the midst of something that the keeper may wait for."""
        return any(is_mine(lock) for lock in (self._keeping, self._connecting, self._link._lock))


class Hold:
    """A token that is held while a block runs: what Client.hold() returns, for `with` or as a decorator.

    For one thread at a time, and one block at a time: make another for each. As a decorator it holds a token of its own
    for each call. Not reentrant: a hold within another of that flow asks for one more.
    """

    def __init__(self, client: Client, asked: AskedToken) -> None:
        self._client = client
        self._asked = asked
        self._entered = threading.Lock()  # locked from entering to leaving
        self._token: Token | None = None
        self._lease: Lease | None = None  # of a token of the server

    def __repr__(self) -> str:
        return f"<Hold {self._asked}>"

    def __enter__(self) -> Hold:
        if not self._entered.acquire(blocking=False):
            raise RuntimeError("this hold has been entered already: make another")
        try:
            self._client._take(self, self._asked)
            assert self._token is not None
            if not self._token.fallback:
                self._lease = self._client._keep(self, self._token)
        except BaseException:  # a signal's may come after the grant
            self._client._give_back(self._left())
            self._entered.release()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        lease = self._lease
        token = self._left()
        assert token is not None
        try:
            if lease is None:
                self._client._give_back(token)
                return
            if lease.lost not in NO_LOSS:
                if kind is GeneratorExit:  # the garbage collector's may come in the midst of another call
                    self._client._give_back(token)
                    return
                lease.look(time.monotonic())
                if not self._client._was_known(token) and not lease.lost:
                    lease.lost = UNKNOWN
                self._client._fallback.lost(lease)
            if lease.lost and kind is None and self._asked.on_lost == RAISE and lease.lost not in NO_LOSS:
                raise lost(token, lease.lost)
        finally:
            self._entered.release()

    def __call__(self, function: F) -> F:
        """A function, or a generator, that holds a token while it runs; each call has its own."""
        return decorated(function, lambda: Hold(self._client, self._asked))

    @property
    def token(self) -> Token | None:
        """What is held, with the server's number for it; None outside of the block."""
        return self._token

    @property
    def lost(self) -> bool:
        """Whether the token was lost while the block runs, as far as is known. Asks nobody."""
        lease = self._lease
        if lease is not None:
            lease.look(time.monotonic())
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

    def _left(self) -> Token | None:
        """What it had. Nobody keeps that alive any more."""
        token, self._token = self._token, None
        lease, self._lease = self._lease, None
        self._client._leave(lease)
        return token

    def _tell(self) -> None:
        """In the keeper's thread: it was lost."""
        on_lost = self._asked.on_lost
        if callable(on_lost):
            try:
                on_lost(self)
            except BaseException:  # noqa: BLE001 - the caller's, and this thread has others to serve
                log.exception("on_lost of %s", self._asked)


class _Taken:
    """Who asks for a token without a hold."""

    _token: Token | None = None
