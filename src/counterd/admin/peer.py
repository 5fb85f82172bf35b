"""One HTTP connection of the admin endpoint: aiohttp's connection, with limits that aiohttp lacks. Also decides which
connections are accepted.

Floor: side (ARCHITECTURE.md). No client can keep a connection that it does not use. A client has PATIENCE_S to send the
head of a request, and PATIENCE_S to read an answer. The first time begins when the client connects or when the previous
answer was ready. site.py limits how long it takes to answer a request. At most CONNECTIONS_MAX connections are open.
Additional clients wait, in the order of their arrival. A waiting client replaces the connection that has been idle for
the longest time. A connection counts as idle after CHANCE_S without a request, so each connection has a chance to send
its request. While a client waits, each connection is closed after its answer. So neither clients that only connect nor
clients that send requests without end can keep other clients out. These constants are the limits of the admin endpoint.
Other servers pass their own limits to Peers.
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
# A client sends its request within a round trip after connecting, and received data is read before this time is
# checked. Even if 4,096 silent clients wait, the most that the kernel's backlog holds, all get their turn within 64 of
# these periods.
CHANCE_S = 0.1
EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
EXHAUSTED_S = 1.0  # before accept() is tried again

HEAD_LINE_MAX = 3 * 65_535 + 1024  # bytes of the request line: the longest name, percent-encoded, and the rest
HEAD_FIELD_MAX = 8190
HEAD_FIELDS_MAX = 64
HEAD_MAX = HEAD_LINE_MAX + 65_536

PLAIN = {"Server": "counterd", "Cache-Control": "no-store", "X-Content-Type-Options": "nosniff"}


def _refusal(status: str, text: str) -> bytes:
    """Makes an answer for a client that may not connect. Unlike other answers, this answer does not name the server."""
    body = json.dumps({"error": text})
    head = f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\nConnection: close\r\n"
    return f"HTTP/1.1 {status}\r\n{head}\r\n{body}".encode()


FOREIGN = _refusal("403 Forbidden", "this address is not allowed")


class Peers:
    """The open connections of the endpoint.

    fresh: connections that have had no request for less than CHANCE_S. idle: connections that have had no request for
    longer, in the order in which they became idle. busy: all other connections. is_awaited: whether a client waits for
    a place.
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
        """head: the most bytes in the head of a request.

        field: the most bytes in a header field. fields: the most header fields.
        """
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
        """Waits until one more connection can be accepted.

        If all places are taken, closes the connection that has been idle for the longest time.
        """
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
        """Called when a connection has received a request."""
        if peer in self.fresh or peer in self.idle:
            self._take_out(peer)
            self.busy.add(peer)

    def waits(self, peer: Peer) -> None:
        """Called when a connection is new, or when its answer is ready."""
        self._take_out(peer)
        self.fresh.add(peer)

    def had_chance(self, peer: Peer) -> None:
        """Called when a connection has had no request for CHANCE_S."""
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
    """Accepts connections for ever, one after the other. Each connection waits until there is a place for it."""
    loop = asyncio.get_running_loop()
    while True:
        try:
            connected, address = await loop.sock_accept(listening)
        except OSError as error:  # the client has closed already, or the system has no resources left
            await asyncio.sleep(EXHAUSTED_S if error.errno in EXHAUSTED else 0)
            continue
        if peers.guard.allows_peer(host_of(address)):
            await peers.place()
        await loop.connect_accepted_socket(make_peer, connected)


def host_of(address: object) -> str:
    """Returns the IP address in the address of a socket, or "" for a Unix socket."""
    return str(address[0]) if isinstance(address, tuple) else ""


class Peer(web.RequestHandler):
    """One HTTP connection.

    The connection has a request from the time when the request's head was read until site.py calls end().
    """

    def __init__(self, peers: Peers, manager: web.Server, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(
            manager,
            loop=loop,
            access_log=None,  # type: ignore[arg-type] # switches the access log off, as aiohttp documents
            lingering_time=0,
            max_line_size=HEAD_LINE_MAX,
            max_field_size=peers.field,
            max_headers=peers.fields,
            auto_decompress=False,  # no body is read, so no request is refused because of its body's encoding
        )
        self.host = ""  # its IP address, "" on a Unix socket
        self._peers = peers
        self._pipe: asyncio.Transport | None = None
        self._unheard = 0  # received bytes of a head that is not complete
        self._idle_timer: asyncio.TimerHandle | None = None
        self._stuck_timer: asyncio.TimerHandle | None = None

    def cut(self) -> None:
        """Ends the connection immediately. Answers that were not sent yet are lost."""
        self._forget()
        if self._pipe is not None:
            self._pipe.abort()

    def begin(self) -> None:
        """Called when the head of a request is complete."""
        if self._idle_timer is not None:
            self._idle_timer.cancel()
        self._peers.heard(self)

    def end(self) -> None:
        """Called when the answer is ready.

        The time limit for reading the rest of the answer is the same as the time limit for sending the next request.
        """
        if self in self._peers.busy:
            self._wait()

    # ---- called by the transport ----

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport = cast("asyncio.Transport", transport)  # uvloop's transports are not instances of it
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
        if self._messages:  # complete requests, which aiohttp's task takes in one of the next turns of the loop
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
        """If the parser does not accept data as a request, answers only with the status."""
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
