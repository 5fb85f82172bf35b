"""A gatekeeper in front of an ASGI application: `app = Middleware(app, gatekeeper)`.

Floor: side (ARCHITECTURE.md); needs no framework.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, MutableMapping
from typing import TYPE_CHECKING, Any

from counterd.client.smockron._gatekeeping import Verdict
from counterd.client.smockron._identify import REJECTED, STATUS, identify_by, retry_after

if TYPE_CHECKING:
    from counterd.client.smockron import AsyncGatekeeper
    from counterd.client.smockron._gatekeeping import Decision
    from counterd.client.smockron._identify import Identifier

__all__ = ["Middleware"]

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[MutableMapping[str, Any], Receive, Send], Awaitable[None]]

# Bytes of a body that are read while its request waits. After that the middleware does not notice if the client leaves.
READ_AHEAD = 65536


class Middleware:
    """An application behind a gatekeeper. Only HTTP requests are limited. Other events (lifespan, websocket) pass
    unchanged.

    A delayed request does not occupy a thread. If the client disconnects during the delay, the application is not
    called. A rejected request gets the status 503 and Retry-After.

    app: the application.
    gatekeeper: the gatekeeper, which the middleware does not close.
    identifier: what identifies the sender of a request; each value has its own limit. The identifier can be "client"
    (the client's address as the server reports it), "path", "header:NAME", a list of several of these, or a function of
    the scope. The function returns None to let a request pass. If "client" or headers are named, and a request has none
    of them, the request passes without a limit; the first such request is logged. On a Unix socket most servers report
    no "client". An identifier of more than 4,096 bytes is sent as its SHA-256.
    domain: the domain, if it is not the gatekeeper's default.
    log_info: a function of the scope that returns a text for the master's log, at most 1,024 bytes; counterd ignores
    it.

    A client can write any value into a header. Behind a proxy, "client" is the proxy's address unless the server is
    configured to trust the proxy's headers.
    """

    def __init__(
        self,
        app: App,
        gatekeeper: AsyncGatekeeper,
        identifier: Identifier = "client",
        *,
        domain: str | bytes | None = None,
        log_info: Callable[[MutableMapping[str, Any]], str | bytes] | None = None,
    ) -> None:
        self._app = app
        self._gatekeeper = gatekeeper
        self._domain = domain
        self._log_info = log_info
        self._identify = identify_by(identifier, _client, _path, _header)

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        """Serves a request, as ASGI defines."""
        identifier = self._identify(scope) if scope["type"] == "http" else None
        if identifier is None:
            await self._app(scope, receive, send)
            return
        decision = self._gatekeeper.decide(identifier, self._domain, self._log_info(scope) if self._log_info else b"")
        if decision.verdict is Verdict.REJECT:
            await _reject(send, decision)
        elif decision.verdict is Verdict.PASS:
            await self._app(scope, receive, send)
        else:
            reader = _Reader(receive)
            try:
                if await self._wait(decision, reader):
                    await self._app(scope, reader.receive, send)
            finally:
                await reader.close()

    async def _wait(self, decision: Decision, reader: _Reader) -> bool:
        """Waits until the delay is over. Returns whether the client is still connected."""
        watching = asyncio.ensure_future(reader.watch())
        try:
            await asyncio.wait([watching], timeout=decision.delay_s)
            return not watching.done() or not watching.result()
        finally:
            self._gatekeeper.gave_up(decision)
            watching.cancel()


class _Reader:
    """Keeps the data that a client sends while its request waits, for the application."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._kept: deque[Message] = deque()
        self._coming: asyncio.Future[Message] | None = None  # is not cancelled with the task that waits for it

    async def watch(self) -> bool:
        """Returns True when the client disconnects.

        Never returns if the body is so long that the end of the connection cannot be read.
        """
        size = 0
        while size <= READ_AHEAD:
            message = await asyncio.shield(self._next())
            self._coming = None
            if message["type"] == "http.disconnect":
                return True
            self._kept.append(message)
            size += len(message.get("body", b""))
        never: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        return await never

    async def receive(self) -> Message:
        """Returns to the application first the kept data, then the data that arrives."""
        if self._kept:
            return self._kept.popleft()
        if self._coming is None:
            return await self._receive()
        message = await asyncio.shield(self._coming)
        self._coming = None
        return message

    async def close(self) -> None:
        """Called when the application has finished."""
        if self._coming is not None:
            self._coming.cancel()
            await asyncio.wait([self._coming])
            if not self._coming.cancelled():
                self._coming.exception()  # else asyncio would log that nobody looked at it

    def _next(self) -> asyncio.Future[Message]:
        self._coming = asyncio.ensure_future(self._receive())
        return self._coming


async def _reject(send: Send, decision: Decision) -> None:
    headers = [
        (b"content-type", b"text/plain; charset=utf-8"),
        (b"content-length", b"%d" % len(REJECTED)),
        (b"retry-after", retry_after(decision.delay_s).encode()),
    ]
    await send({"type": "http.response.start", "status": STATUS, "headers": headers})
    await send({"type": "http.response.body", "body": REJECTED})


def _client(scope: MutableMapping[str, Any]) -> str | None:
    """Returns the client's address, or None if the server does not know it, as on a Unix socket."""
    client = scope.get("client")
    return str(client[0]) if client else None


def _path(scope: MutableMapping[str, Any]) -> str:
    return str(scope["path"])


def _header(scope: MutableMapping[str, Any], name: str) -> bytes:
    wanted = name.lower().encode()
    return b", ".join(value for key, value in scope["headers"] if key.lower() == wanted)
