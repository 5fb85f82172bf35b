"""A net.Server on uvloop in a thread of the test process, for tests that need no configuration."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

import uvloop

from counterd.net.admission import Limits
from counterd.net.server import Server
from counterd.net.sockets import Keepalive, UnixSocket, open_tcp
from kit.counters import make_store
from kit.daemon import PATIENCE, wait_until

if TYPE_CHECKING:
    import ssl
    from collections.abc import Callable, Iterator

    from counterd._core import Store


class Serving:
    """A running server. address: of TCP. reports: its reports, as (cause, sentence)."""

    def __init__(
        self, path: str, context: ssl.SSLContext | None, limits: dict[str, Any], store: Store | None, port: int
    ) -> None:
        self.reports: list[tuple[str, str]] = []
        self.errors: list[Any] = []
        self.loop = uvloop.new_event_loop()
        self.loop.set_exception_handler(lambda _, error: self.errors.append(error))
        self.path = path
        made = Limits(**{"max_connections": 1000, "user_timeout": 25, "write_timeout": 25, **limits})
        self.store = store or make_store(30_000, 30_000, name_memory=1 << 17)
        self.server = Server(self.loop, self.store, made, lambda *report: self.reports.append(report))
        self.server.context = context
        listening = open_tcp("127.0.0.1", 0, Keepalive(60, 30, 3, 25))
        self.address: tuple[str, int] = listening.getsockname()
        self.server.listen(listening, port)
        if path:
            self.server.listen(UnixSocket(path, 0o600).socket, port)
        self.thread = threading.Thread(target=self.loop.run_forever)
        self.thread.start()

    def connect(self, source: str = "127.0.0.1") -> socket.socket:
        """Returns a plain connection. source: an address of this machine."""
        return socket.create_connection(self.address, PATIENCE, source_address=(source, 0))

    def connect_unix(self) -> socket.socket:
        connected = socket.socket(socket.AF_UNIX)
        connected.settimeout(PATIENCE)
        connected.connect(self.path)
        return connected

    def call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Calls a function in the server's thread. Returns its result."""
        result: Future[Any] = Future()

        def called() -> None:
            try:
                result.set_result(function(*arguments))
            except BaseException as error:  # noqa: BLE001 - the test's thread raises it
                result.set_exception(error)

        self.loop.call_soon_threadsafe(called)
        return result.result(PATIENCE)

    def figures(self) -> dict[str, int]:
        return {**self.call(self.server.figures), "connections": self.call(len, self.server.connections)}

    def wait_for(self, **wanted: int) -> None:
        """Waits until the figures have these values. In a keyword, `__` stands for the colon of a name."""
        names = {name.replace("__", ":"): value for name, value in wanted.items()}
        wait_until(lambda: names.items() <= self.figures().items(), f"figures {names}")

    def in_use(self, name: bytes) -> int:
        """Returns the consumption of a counter."""
        from counterd.protocols.counter import wire

        session = self.call(self.store.session)
        answer: bytes = self.call(session.receive, wire.get(1, name), 0)
        self.call(session.closed, 0)
        return int.from_bytes(answer[12:], "big") if answer[2] == 0 else 0

    def stop(self) -> None:
        async def parted() -> None:
            self.server.part()
            await asyncio.wait_for(self.server.emptied(), PATIENCE)

        asyncio.run_coroutine_threadsafe(parted(), self.loop).result(2 * PATIENCE)
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join(PATIENCE)
        self.loop.close()
        assert self.errors == []
        assert self.server.handshakes == 0


@contextlib.contextmanager
def serving(
    path: str = "", context: ssl.SSLContext | None = None, store: Store | None = None, port: int = 0, **limits: Any
) -> Iterator[Serving]:
    """Serves during the block, then ends all connections. store: in place of a store of the counter protocol.
    port: number of the protocol's port."""
    running = Serving(path, context, limits, store, port)
    try:
        yield running
    finally:
        running.stop()
