"""Clients for the sentinel protocol, blocking and for asyncio. The clients limit calls by rate, by parameter value, or
by how many run at the same time.

Client.flow() and Client.param() ask whether calls may pass. Client.hold() holds a token of a flow while a block runs.
While the server does not decide, the client uses its own limits, and logs that.

Floor: side (ARCHITECTURE.md). The package needs only the wire module and counterd.errors, and works without any
compiled module.
"""

from __future__ import annotations

import math
import time
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from counterd.client._background import Background
from counterd.client._entering import Entering, ForAsyncWith, ForWith
from counterd.client._holding import decorated, decorated_async
from counterd.client._tasklink import LOOP_CLOSED
from counterd.client._tasks import Tasks
from counterd.client._threads import Threads
from counterd.client.sentinel._fallback import Stats
from counterd.client.sentinel._flows import Commands, HoldSteps
from counterd.client.sentinel._token_link import TokenLink
from counterd.client.sentinel._tokens import Answer, Token
from counterd.errors import ConnectionLost, CounterdError
from counterd.protocols.sentinel.errors import Blocked, NoSuchRule, TokenLost, TokenRefused
from counterd.protocols.sentinel.wire import Status, Tag, Typed

if TYPE_CHECKING:
    import asyncio
    import socket
    from collections.abc import Callable, Coroutine

    from counterd.client._steps import Steps
    from counterd.client._tls import SecureSocket

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
IDLE_S = 5.0  # the background thread of a client ends if it had nothing to do for this time


class Hold(HoldSteps, Entering, ForWith):
    """A token that is held while a block runs. Client.hold() returns it, for `with` or as a decorator.

    Use a hold in one thread and for one block at a time: make another hold for each. As a decorator, a hold acquires
    another token for each call. Holds are not reentrant: a hold inside another hold of the same flow asks for another
    token.
    """

    _CAUGHT = BaseException

    def __enter__(self) -> Hold:
        self._is_used = True
        self._client._run_command(self._entering())
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        token = self._token
        try:
            self._client._run_command(self._leaving(kind))
        except CounterdError:
            raise
        except BaseException:  # a signal, maybe before it was given back
            self._left()
            self._client._give_back(token)
            raise

    def __call__(self, function: F) -> F:
        """Returns a function, or a generator, that holds a token while it runs. Each call has its own token."""
        return decorated(function, partial(Hold, self._client, self._asked))


class Client(Commands[Hold], Threads):
    """A connection to a server. If it is lost, the client makes a new one. Use the client in a `with`, or close() it.

    The client connects with its first call. Threads may share a client: their calls use one connection at the same
    time. After a fork the connection belongs to the parent; the child connects with its first call.

    host: a host, sentinel://HOST[:PORT], sentinels://HOST[:PORT] (with TLS) or sentinel+unix:///PATH, or several of
    these, which are tried in order. All of them must lead to the same server. port: the port for hosts without a port.
    path: the path of a Unix socket, in place of host and port. tls: True or an ssl.SSLContext, as for
    counterd.client.Client, which also describes URLs. namespace: the namespace in which each connection is registered.
    The connection then counts if a threshold applies to each connection. timeout: how many seconds each call may take
    in all. A token that is granted after the timeout is given back immediately. If extensions of the server decide,
    they need a part of this time. connect_timeout: how many seconds connecting to one address may take, and the TLS
    handshake. After a failed attempt only the client's own thread connects, and no call waits for it. fallback: what
    decides while the server does not. "local": limits of this client alone. "open": everything passes. "closed":
    nothing passes. limits: the limits for "local", by flow: how many calls flow() lets pass in a second, how many
    param() lets pass for each value, and how many acquire() and hold() allow at the same time. For a flow without a
    limit, calls raise the error of the server.

    The server does not decide while it cannot be reached or does not answer. The server also does not decide about a
    flow if it answers bad request, too many requests, failed, no such rule or not available. The logger
    counterd.client.sentinel logs a warning when a time without decisions begins and when it ends; stats() has the
    figures.

    Flows have ids of 1 to 2^63-1, and counts are 1 to 2^31-1. Other arguments raise ValueError or TypeError.
    """

    def close(self) -> None:
        """Gives back all tokens, and ends the connection. Later calls raise ConnectionLost."""
        self._closed = True
        self._background.stop()
        self._give_all_back()
        self._end()
        self._background.join(self._connecting, self._link._lock)

    # ---- inside ----

    _make_hold = Hold
    _connects = False  # the background thread is to connect, even if there is no lease

    def _run_command(self, made: Steps[Any]) -> Any:
        return self._drive(made)

    def _connect_soon(self) -> None:
        if time.monotonic() >= self._attempts.retry_at:
            self._connects = True
            self._due(0.0)

    def _due(self, at: float) -> None:
        with suppress(RuntimeError):  # when the program ends, no thread can be started
            self._background.start(at)

    def _work(self) -> tuple[TokenLink, float]:
        """Runs in the background thread: renews leases, and connects again."""
        connects, self._connects = self._connects, False
        self._run_command(self._keeping(connects))
        return self._link, self._due_at()

    def _make_link(self, connected: socket.socket | SecureSocket, where: str) -> TokenLink:
        return TokenLink(
            connected,
            where,
            self._timeout,
            self._on_end,
            self._on_release,
            calls=self._make_calls(),
            on_late=partial(self._due, 0.0),
        )

    def _start_anew(self) -> None:
        super()._start_anew()
        self._background = Background("counterd-keep", self._work, IDLE_S)

    def _after_fork(self) -> None:
        self._background.after_fork()
        super()._after_fork()


class AsyncHold(HoldSteps, Entering, ForAsyncWith):
    """A token that is held while a block runs. AsyncClient.hold() returns it, for `async with` or as a decorator.

    The hold has the methods of Hold.
    """

    async def __aenter__(self) -> AsyncHold:
        self._is_used = True
        await self._client._run_command(self._entering())
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        await self._client._run_command(self._leaving(kind))

    def __call__(self, function: F) -> F:
        """Returns a coroutine function, or an asynchronous generator, that holds a token while it runs.

        Each call has its own token.
        """
        return decorated_async(function, partial(AsyncHold, self._client, self._asked))


class AsyncClient(Commands[AsyncHold], Tasks):
    """The Client for the tasks of one event loop. Use the client in an `async with`, or await close().

    AsyncClient has the same arguments, results and errors as Client. A cancelled call leaves nothing behind: a token
    that is granted later is given back. The client needs no thread, and is not thread-safe. In another event loop the
    client raises RuntimeError, unless the first event loop was closed. Tokens that were held are then lost.
    """

    _make_hold = AsyncHold
    _keeping_task: asyncio.Task[None] | None = None
    _timer: asyncio.TimerHandle | None = None
    _timer_at = 0.0

    async def close(self) -> None:
        """Gives back all tokens, and ends the connection. Later calls raise ConnectionLost."""
        await super().close()

    # ---- inside ----

    def _run_command(self, made: Steps[Any]) -> Coroutine[Any, Any, Any]:
        return self._drive(made)

    def _now(self) -> float:
        loop = self._loop
        return 0.0 if loop is None else loop.time()

    def _usable_link(self) -> Any:
        self._own_loop()
        return super()._usable_link()

    def _connect_soon(self) -> None:
        with suppress(ConnectionLost):
            self._connecting_now()

    def _due(self, at: float) -> None:
        """Sets the timer, unless a task is at work; that task sets the timer when it ends."""
        is_busy = self._keeping_task is not None and not self._keeping_task.done()
        if at == math.inf or self._closed or is_busy or (self._timer is not None and self._timer_at <= at):
            return
        self._stop_timer()
        loop = self._own_loop()
        self._timer, self._timer_at = loop.call_at(max(at, loop.time()), self._look), at

    def _look(self) -> None:
        self._timer = None
        self._keeping_task = self._started(self._run_command(self._keeping()))
        self._keeping_task.add_done_callback(lambda _: self._due(self._due_at()))

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _on_end(self, link: Any) -> None:
        if link is self._link and not self._closed:
            self._due(self._due_at())

    def _end(self) -> None:
        self._stop_timer()
        self._give_all_back()
        if not self._link.closed:
            self._link.flush()
        super()._end()

    def _start_anew(self) -> None:
        super()._start_anew()
        self._leases.forget(LOOP_CLOSED)
        self._keeping_task = self._timer = None
        self._outage = ""
