"""A gatekeeper before an ASGI application: `app = Middleware(app, gatekeeper)`.

Stands beside the floors; needs no framework.
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

# Bytes of a body that are read while its request waits. Beyond that it is not seen that the client goes away.
READ_AHEAD = 65536


class Middleware:
    """An application behind a gatekeeper. Other than HTTP requests (lifespan, websocket) go through untouched.

    A request that is delayed holds no thread. If its client goes away meanwhile, the application is not called. One
    that is rejected is answered with 503 and Retry-After.

    app: the application.
    gatekeeper: is not closed with the application.
    identifier: what tells requests apart. "client": the address that the server gives; "path"; "header:NAME"; several
    of these in a list; or a function of the scope, which returns None for a request that is to pass. A request passes
    without a limit if "client" or headers are named and it has none of them; the first is logged. On a Unix socket most
    servers know no "client". What is longer than 4,096 bytes is sent as its SHA-256.
    domain: instead of the gatekeeper's default.
    log_info: a function of the scope that gives what the master is told for its log, 1,024 bytes at most. counterd
    ignores it.

    A client can write into a header what it likes. Behind a proxy, "client" is the proxy's address unless the server is
    told to trust what the proxy says.
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
        """Serves a request, as ASGI has it."""
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
        """Whether the client is still there when the time has come."""
        watching = asyncio.ensure_future(reader.watch())
        try:
            await asyncio.wait([watching], timeout=decision.delay_s)
            return not watching.done() or not watching.result()
        finally:
            self._gatekeeper.gave_up(decision)
            watching.cancel()


class _Reader:
    """What a client sends while its request waits, kept for the application."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._kept: deque[Message] = deque()
        self._coming: asyncio.Future[Message] | None = None  # goes on if the task that waits for it is cancelled

    async def watch(self) -> bool:
        """Returns True when the client goes away. Does not return if too much of a body is unread for that."""
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
        """For the application: what was kept, then what comes."""
        if self._kept:
            return self._kept.popleft()
        if self._coming is None:
            return await self._receive()
        message = await asyncio.shield(self._coming)
        self._coming = None
        return message

    async def close(self) -> None:
        """The application is done."""
        if self._coming is not None:
            self._coming.cancel()
            await asyncio.wait([self._coming])
            if not self._coming.cancelled():
                self._coming.exception()  # was looked at

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
    """None where the server does not know, as on a Unix socket."""
    client = scope.get("client")
    return str(client[0]) if client else None


def _path(scope: MutableMapping[str, Any]) -> str:
    return str(scope["path"])


def _header(scope: MutableMapping[str, Any], name: str) -> bytes:
    wanted = name.lower().encode()
    return b", ".join(value for key, value in scope["headers"] if key.lower() == wanted)
