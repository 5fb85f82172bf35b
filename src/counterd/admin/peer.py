"""One HTTP connection: aiohttp's, with the bounds that it lacks; and who is let in.

A side. Nobody can keep a connection for longer than they use it: PATIENCE_S is for the head of a request, from the
moment the connection is there or the last answer is known, and for taking an answer. What a request is answered within
is up to the site. There are CONNECTIONS_MAX connections. One more waits for a place, in the order of arrival: it takes
that of the connection that has been idle for longest, and none is idle before it had its chance, CHANCE_S, to be heard.
While somebody waits, a connection ends with its answer. So neither who only connects nor who asks without end keeps
anybody out. The three bounds are those of the admin endpoint; who serves something else gives Peers its own.
"""

from __future__ import annotations

import asyncio
import errno
import json
from typing import TYPE_CHECKING, cast

from aiohttp import web

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable

    from counterd.admin.guard import Guard

CONNECTIONS_MAX = 64
PATIENCE_S = 10.0
# A client sends within a round trip of connecting, and what it sent is read before this time is looked at. The longest
# line there can be, the kernel's backlog of 4,096, has its turn within 64 of these, if none of it says anything.
CHANCE_S = 0.1
EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
EXHAUSTED_S = 1.0  # until it is tried again

HEAD_LINE_MAX = 3 * 65_535 + 1024  # bytes of the request line: the longest name, percent-encoded, and the rest
HEAD_FIELD_MAX = 8190
HEAD_FIELDS_MAX = 64
HEAD_MAX = HEAD_LINE_MAX + 65_536

PLAIN = {"Server": "counterd", "Cache-Control": "no-store", "X-Content-Type-Options": "nosniff"}


def _refusal(status: str, text: str) -> bytes:
    """An answer before anything was asked. It does not say who answers: whoever it is for may not be here."""
    body = json.dumps({"error": text})
    head = f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\nConnection: close\r\n"
    return f"HTTP/1.1 {status}\r\n{head}\r\n{body}".encode()


FOREIGN = _refusal("403 Forbidden", "this address is not allowed")


class Peers:
    """The connections that are there.

    fresh: without a request, and not for long. idle: without one for longer, by when they became so. busy: the others.
    is_awaited: whether somebody waits for a place.
    """

    def __init__(
        self,
        guard: Guard,
        connections: int | None = None,
        patience: float | None = None,
        *,
        head: int = HEAD_MAX,
        field: int = HEAD_FIELD_MAX,
        fields: int = HEAD_FIELDS_MAX,
    ) -> None:
        """head: bytes that the head of a request can have. field: bytes of one field in it; fields: how many."""
        self.guard = guard
        self.connections = CONNECTIONS_MAX if connections is None else connections
        self.patience = PATIENCE_S if patience is None else patience
        self.head = head
        self.field = field
        self.fields = fields
        self.fresh: set[Peer] = set()
        self.idle: dict[Peer, None] = {}
        self.busy: set[Peer] = set()
        self.is_awaited = False
        self._changed = asyncio.Event()

    async def place(self) -> None:
        """Waits until one more may come, for whom the one that has been idle for longest goes."""
        while len(self.fresh) + len(self.idle) + len(self.busy) >= self.connections:
            oldest = next(iter(self.idle), None)
            if oldest is not None:
                oldest.cut()
                continue
            self.is_awaited = True
            self._changed.clear()
            await self._changed.wait()
        self.is_awaited = False

    def heard(self, peer: Peer) -> None:
        """It has a request."""
        if peer in self.fresh or peer in self.idle:
            self._take_out(peer)
            self.busy.add(peer)

    def waits(self, peer: Peer) -> None:
        """It is new, or its answer is known."""
        self._take_out(peer)
        self.fresh.add(peer)

    def had_chance(self, peer: Peer) -> None:
        """It has been fresh for long enough."""
        self._take_out(peer)
        self.idle[peer] = None
        self._changed.set()

    def gone(self, peer: Peer) -> None:
        self._take_out(peer)
        self._changed.set()

    def _take_out(self, peer: Peer) -> None:
        self.fresh.discard(peer)
        self.idle.pop(peer, None)
        self.busy.discard(peer)


async def let_in(listening: socket.socket, peers: Peers, make_peer: Callable[[], Peer]) -> None:
    """Accepts connections for ever, one after the other, each when there is a place for it."""
    loop = asyncio.get_running_loop()
    while True:
        try:
            connected, address = await loop.sock_accept(listening)
        except OSError as error:  # a connection that has gone already, or nothing left for another one
            await asyncio.sleep(EXHAUSTED_S if error.errno in EXHAUSTED else 0)
            continue
        if peers.guard.allows_peer(host_of(address)):
            await peers.place()
        await loop.connect_accepted_socket(make_peer, connected)


def host_of(address: object) -> str:
    """The IP address in the address of a socket; "" for a Unix socket."""
    return str(address[0]) if isinstance(address, tuple) else ""


class Peer(web.RequestHandler):
    """A connection. It has a request from the moment that its head is read until the site calls end()."""

    def __init__(self, peers: Peers, manager: web.Server, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(
            manager,
            loop=loop,
            access_log=None,  # type: ignore[arg-type] # what aiohttp documents to switch it off
            lingering_time=0,
            max_line_size=HEAD_LINE_MAX,
            max_field_size=peers.field,
            max_headers=peers.fields,
            auto_decompress=False,  # no body is read, so nobody is refused for how his is encoded
        )
        self.host = ""  # its IP address, "" on a Unix socket
        self._peers = peers
        self._pipe: asyncio.Transport | None = None
        self._unheard = 0  # bytes of a request that has not come in whole
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
        self._peers.heard(self)

    def end(self) -> None:
        """Its answer is known; what is left of it goes out within the patience for the next request."""
        if self in self._peers.busy:
            self._wait()

    # ---- called by the transport ----

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport = cast("asyncio.Transport", transport)  # uvloop's are not of its class
        self.host = host_of(transport.get_extra_info("peername"))
        if not self._peers.guard.allows_peer(self.host):
            transport.write(FOREIGN)
            transport.close()
            return
        self._pipe = transport
        super().connection_made(transport)
        self._wait()

    def data_received(self, data: bytes) -> None:
        if self._pipe is None:
            return
        super().data_received(data)
        if self._messages:  # which aiohttp's task comes to in one of the next turns of the loop
            self._unheard = 0
            self.begin()
        elif self not in self._peers.busy:
            self._unheard += len(data)
            if self._unheard > self._peers.head:
                self.cut()

    def connection_lost(self, exc: BaseException | None) -> None:
        if self._pipe is not None:
            self._forget()
            self._pipe = None
            super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._stuck_timer = self._loop.call_later(self._peers.patience, self.cut)

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
            self._peers.waits(self)
            self._idle_timer = self._loop.call_later(CHANCE_S, self._age)

    def _age(self) -> None:
        self._peers.had_chance(self)
        self._idle_timer = self._loop.call_later(max(0.0, self._peers.patience - CHANCE_S), self.cut)

    def _forget(self) -> None:
        self._peers.gone(self)
        for timer in (self._idle_timer, self._stuck_timer):
            if timer is not None:
                timer.cancel()
