"""One HTTP connection: aiohttp's, with the bounds that it lacks.

A side. Nobody can keep a connection for longer than they use it: PATIENCE_S is for the head of a request, from the
moment the connection is there or the last answer is known, and for taking an answer. What a request is answered within
is up to the site. There are CONNECTIONS_MAX connections; one more takes the place of that which has been without a
request for longest, so whoever only opens connections keeps nobody else out.
"""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING

from aiohttp import web

if TYPE_CHECKING:
    from counterd.admin.guard import Guard

CONNECTIONS_MAX = 64
PATIENCE_S = 10.0

HEAD_LINE_MAX = 3 * 65_535 + 1024  # bytes of the request line: the longest name, percent-encoded, and the rest
HEAD_FIELD_MAX = 8190
HEAD_FIELDS_MAX = 64

PLAIN = {"Server": "counterd", "Cache-Control": "no-store", "X-Content-Type-Options": "nosniff"}


def _refusal(status: str, text: str) -> bytes:
    """An answer before anything was asked. It does not say who answers: whoever it is for may not be here."""
    body = json.dumps({"error": text})
    head = f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\nConnection: close\r\n"
    return f"HTTP/1.1 {status}\r\n{head}\r\n{body}".encode()


FULL = _refusal("503 Service Unavailable", "as many connections as there may be are waiting for answers")
FOREIGN = _refusal("403 Forbidden", "this address is not allowed here")


class Peers:
    """The connections that are there, those without a request by the order in which they began to be."""

    def __init__(self, guard: Guard) -> None:
        self.guard = guard
        self.idle: dict[Peer, None] = {}
        self.busy: set[Peer] = set()

    def admit(self, address: str) -> bytes:
        """What a connection from there (an IP address, "" for a Unix socket) is closed with, or b"" if it may stay.

        Another one may go for it.
        """
        if address and not self.guard.allows_peer(address):
            return FOREIGN
        if len(self.idle) + len(self.busy) >= CONNECTIONS_MAX:
            oldest = next(iter(self.idle), None)
            if oldest is None:
                return FULL
            oldest.cut()
        return b""


class Peer(web.RequestHandler):
    """A connection. It is idle until the site calls begin(), and again after end()."""

    def __init__(self, peers: Peers, manager: web.Server, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(
            manager,
            loop=loop,
            access_log=None,  # type: ignore[arg-type] # what aiohttp documents to switch it off
            lingering_time=0,
            max_line_size=HEAD_LINE_MAX,
            max_field_size=HEAD_FIELD_MAX,
            max_headers=HEAD_FIELDS_MAX,
        )
        self._peers = peers
        self._pipe: asyncio.Transport | None = None
        self._idle_timer: asyncio.TimerHandle | None = None
        self._stuck_timer: asyncio.TimerHandle | None = None

    def cut(self) -> None:
        """Ends the connection now, whatever is owed."""
        self._forget()
        if self._pipe is not None:
            self._pipe.abort()

    def begin(self) -> None:
        """A request has come in whole."""
        if self._idle_timer is not None:
            self._idle_timer.cancel()
        if self._peers.idle.pop(self, self) is None:
            self._peers.busy.add(self)

    def end(self) -> None:
        """Its answer is known; what is left of it goes out within the patience for the next request."""
        if self in self._peers.busy:
            self._peers.busy.remove(self)
            self._wait()

    # ---- called by the transport ----

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        peername = transport.get_extra_info("peername")
        if refusal := self._peers.admit(peername[0] if isinstance(peername, tuple) else ""):
            transport.write(refusal)
            transport.close()
            return
        self._pipe = transport
        super().connection_made(transport)
        self._wait()

    def data_received(self, data: bytes) -> None:
        if self._pipe is not None:
            super().data_received(data)

    def connection_lost(self, exc: BaseException | None) -> None:
        if self._pipe is not None:
            self._forget()
            self._pipe = None
            super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._stuck_timer = self._loop.call_later(PATIENCE_S, self.cut)

    def resume_writing(self) -> None:
        if self._stuck_timer is not None:
            self._stuck_timer.cancel()
        super().resume_writing()

    # ---- called by aiohttp ----

    def handle_error(
        self, request: web.BaseRequest, status: int = 500, exc: BaseException | None = None, message: str | None = None
    ) -> web.StreamResponse:
        """What is no request in the eyes of the parser: says so, and no more."""
        response = web.Response(status=status, text=f"{status}\n", headers=PLAIN)
        response.force_close()
        return response

    # ---- inside ----

    def _wait(self) -> None:
        if self._pipe is not None:
            self._peers.idle[self] = None
            self._idle_timer = self._loop.call_later(PATIENCE_S, self.cut)

    def _forget(self) -> None:
        self._peers.idle.pop(self, None)
        self._peers.busy.discard(self)
        for timer in (self._idle_timer, self._stuck_timer):
            if timer is not None:
                timer.cancel()
