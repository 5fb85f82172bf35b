"""Serves a gate over HTTP until a signal arrives.

Floor 5 (ARCHITECTURE.md). This file uses the HTTP connections of the admin endpoint, with other limits. A waiting
request keeps its connection open. So more connections can be open than requests can wait: a proxy with many waiting
requests can still send others.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
from typing import TYPE_CHECKING

from aiohttp import web

from counterd.admin.guard import Guard
from counterd.admin.peer import PLAIN, Peer, Peers, let_in
from counterd.cli.ctl.common import say
from counterd.control.admin import KEEPALIVE, close_listening
from counterd.control.config.keys import shown
from counterd.control.process.limits import effective_connections, raise_descriptors, share_descriptors
from counterd.net.sockets import UnixSocket, open_tcp

if TYPE_CHECKING:
    import socket
    from collections.abc import Iterator

    from counterd.cli.ctl.smockron.answers import Gate
    from counterd.client.smockron import AsyncGatekeeper

SOCKET_MODE = 0o666  # as open as a TCP port of this host; the folder can restrict access
PLACES = 1024  # connections in addition to those that wait
# Proxies close idle connections earlier (nginx after a minute, Traefik after 90 s, Caddy after two minutes). So this
# side never closes a connection on which a proxy is just sending a request.
PATIENCE_S = 300.0
# A proxy forwards the header fields of its client. A head that the proxy accepts has to be accepted here too; otherwise
# the client would be refused.
HEAD_MAX = 65_536
FIELDS_MAX = 1000
ENDING_S = 1.0  # for sending the last replies


@contextlib.contextmanager
def listening_at(host: str, port: int) -> Iterator[socket.socket]:
    """Listens while the block runs. If port is below 0, host is the path of a Unix socket. Raises OSError."""
    try:
        opened = open_tcp(host, port, KEEPALIVE) if port >= 0 else UnixSocket(host, SOCKET_MODE)
    except OSError as error:
        raise OSError(f"cannot listen on {shown(host, port)}: {error.strerror or error}") from None
    listening = opened.socket if isinstance(opened, UnixSocket) else opened
    try:
        yield listening
    finally:
        close_listening(opened)


def place(listening: socket.socket) -> str:
    """Formats the address of a listening socket for people."""
    name = listening.getsockname()
    return shown(name, -1) if isinstance(name, str) else shown(*name[:2])


class Serving:
    """Serves a gate and its gatekeeper, and closes the gatekeeper at the end.

    max_delay: how many seconds a request may wait.
    """

    def __init__(self, gatekeeper: AsyncGatekeeper, gate: Gate, max_delay: float, max_delayed: int) -> None:
        self._gatekeeper = gatekeeper
        self._gate = gate
        self._max_delay = max_delay
        possible = share_descriptors(raise_descriptors(), 1)
        self._connections = effective_connections(max_delayed + PLACES, possible)

    async def run(self, listening: socket.socket) -> None:
        """Serves requests until SIGINT or SIGTERM.

        After the signal, only the waiting requests are answered, each after its wait.
        """
        loop = asyncio.get_running_loop()
        ended = asyncio.Event()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, ended.set)
        bounds = {"head": HEAD_MAX, "field": HEAD_MAX, "fields": FIELDS_MAX}
        self._peers = Peers(Guard(), self._connections, PATIENCE_S, **bounds)
        manager = web.Server(self._handle, handler_cancellation=True)
        async with self._gatekeeper as gatekeeper:
            connecting = asyncio.ensure_future(gatekeeper.connect())
            accepting = asyncio.ensure_future(let_in(listening, self._peers, lambda: Peer(self._peers, manager, loop)))
            ending = asyncio.ensure_future(ended.wait())
            say(f"listens on {place(listening)}")
            await asyncio.wait([accepting, ending], return_when=asyncio.FIRST_COMPLETED)
            if accepting.done():
                accepting.result()  # raises: this is a bug, and ends the command
            for task in (connecting, accepting):
                task.cancel()
            await asyncio.wait([connecting, accepting])
            listening.close()
            manager.pre_shutdown()
            await manager.shutdown(self._max_delay + ENDING_S)

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        peer = request.protocol
        assert isinstance(peer, Peer)
        peer.begin()
        try:
            response = await self._gate.answer(request)
        finally:
            peer.end()
        response.headers.update(PLAIN)
        if self._peers.is_awaited:
            response.force_close()
        return response
