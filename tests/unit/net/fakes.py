"""Stand-ins for uvloop's loop and transport, so that a test decides when what happens. The sockets are real."""

from __future__ import annotations

import contextlib
import socket
from collections import deque
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from counterd.net._connection import Connection
from counterd.net.server import Limits, Server
from counterd.protocols.counter import wire
from property.model import OK, TURNS_MAX, Client, make_store

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from counterd._core import Store


class FakeClock:
    """Stands for the module `time`. It goes on by step_ns each time somebody looks."""

    def __init__(self, step_ns: int = 0) -> None:
        self.now_ns = 1_000_000_000_000
        self.step_ns = step_ns

    def monotonic_ns(self) -> int:
        self.now_ns += self.step_ns
        return self.now_ns


class FakeHandle:
    """Of one call that is scheduled. delay_s: None for the next turn."""

    def __init__(self, callback: Callable[..., Any], arguments: tuple[Any, ...], delay_s: float | None) -> None:
        self.callback = callback
        self.arguments = arguments
        self.delay_s = delay_s
        self.cancelled = False

    def cancel(self) -> None:
        self.cancelled = True


class FakeLoop:
    """Runs nothing by itself. ready: what call_soon was given; timers: what call_later was; errors: what came out;
    readers: what is to be called when a descriptor can be read."""

    def __init__(self) -> None:
        self.errors: list[Exception] = []
        self.turns = 0
        self.ready: deque[FakeHandle] = deque()
        self.timers: list[FakeHandle] = []
        self.readers: dict[int, Callable[[], None]] = {}

    def add_reader(self, descriptor: int, callback: Callable[[], None]) -> None:
        self.readers[descriptor] = callback

    def call_soon(self, callback: Callable[..., Any], *arguments: Any) -> FakeHandle:
        self.ready.append(FakeHandle(callback, arguments, None))
        return self.ready[-1]

    def call_later(self, delay_s: float, callback: Callable[..., Any], *arguments: Any) -> FakeHandle:
        self.timers.append(FakeHandle(callback, arguments, delay_s))
        return self.timers[-1]

    def pending(self) -> int:
        return sum(not handle.cancelled for handle in self.ready)

    def turn(self) -> int:
        """Everything that was ready when it began; returns how much that was."""
        self.turns += 1
        assert self.turns < TURNS_MAX
        turn, self.ready = self.ready, deque()
        return sum(self._run(handle) for handle in turn)

    def run(self) -> None:
        while self.turn():
            pass

    def fire(self) -> None:
        """Lets the time of all timers come."""
        timers, self.timers = self.timers, []
        for handle in timers:
            self._run(handle)

    def live_timers(self) -> list[float | None]:
        return [handle.delay_s for handle in self.timers if not handle.cancelled]

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        self.errors.append(context["exception"])

    def _run(self, handle: FakeHandle) -> bool:
        if handle.cancelled:
            return False
        try:
            handle.callback(*handle.arguments)
        except Exception as error:  # noqa: BLE001 - as a loop does
            self.errors.append(error)
        return True


class FakeTransport:
    """What a Connection may ask of uvloop's transport; calls the protocol back only when a test says so."""

    def __init__(self, protocol: Connection, own_end: socket.socket) -> None:
        self.protocol = protocol
        self.socket = own_end
        self.queue = bytearray()
        self.high: int | None = None
        self.reading = True
        self.heeding = False
        self.eof_written = False
        self.closed = False
        self.aborted = False

    def get_extra_info(self, name: str) -> socket.socket:
        assert name == "socket"
        return self.socket

    def set_write_buffer_limits(self, *, high: int) -> None:
        self.high = high

    def get_write_buffer_size(self) -> int:
        return len(self.queue)

    def write(self, data: bytes) -> None:
        assert not self.eof_written
        was_empty = not self.queue
        self.queue += data
        if was_empty and self.queue:
            self.protocol.pause_writing()

    def take(self, size: int) -> None:
        """The kernel has taken a part of what was queued."""
        assert len(self.queue) > size
        del self.queue[:size]

    def drain(self) -> bytes:
        """The kernel has taken what was queued."""
        queue, self.queue = bytes(self.queue), bytearray()
        self.protocol.resume_writing()
        return queue

    def pause_reading(self) -> None:
        assert not self.closed
        self.reading = False

    def resume_reading(self) -> None:
        assert not self.closed
        self.reading = True

    def heed_end(self, heeding: bool) -> None:
        assert not self.closed
        self.heeding = heeding

    def write_eof(self) -> None:
        self.eof_written = True
        self.socket.shutdown(socket.SHUT_WR)

    def is_closing(self) -> bool:
        return self.closed

    def close(self) -> None:
        self.closed = True

    def abort(self) -> None:
        self.closed = self.aborted = True


class Net:
    """A server on a fake loop. reports: the causes it reported."""

    def __init__(self, store: Store | None = None, max_connections: int = 10, **limits: Any) -> None:
        self.loop = FakeLoop()
        self.store = store if store is not None else make_store(8000, 9000, name_memory=1 << 17)
        self.reports: list[str] = []
        made = Limits(max_connections, user_timeout=25, write_timeout=5, **limits)
        self.server = Server(self.loop, self.store, made, lambda cause, _: self.reports.append(cause))
        self.peers: list[Peer] = []

    def connect(self, patience: str = "user_timeout", kind: int = socket.SOCK_SEQPACKET) -> Peer:
        self.peers.append(Peer(self, patience, kind))
        return self.peers[-1]

    def limit(self, **limits: Any) -> None:
        """Changes some of the limits."""
        self.server.limits = replace(self.server.limits, **limits)

    def fill(self, count: int) -> None:
        """Counters for a Dump of 36 bytes each."""
        self.holder = Client(self.store)
        self.holder.raw(b"".join(wire.acquire(0, b"name-%09d" % number, 1, 1) for number in range(count)))

    def clog(self, patience: str = "user_timeout") -> tuple[Peer, bytes]:
        """A connection whose peer reads nothing, and the answer of which the kernel took only a part."""
        self.holder = Client(self.store)
        assert self.holder.acquire(b"x" * 65535) == OK
        answer = self.holder.raw(wire.dump(1))
        peer = self.connect(patience, socket.SOCK_STREAM)
        peer.transport.socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        peer.send(wire.dump(1))
        self.loop.run()
        assert 0 < len(peer.transport.queue) < len(answer)
        return peer, answer

    def close(self) -> None:
        for peer in self.peers:
            peer.socket.close()
            peer.transport.socket.close()


@contextlib.contextmanager
def nets() -> Iterator[Callable[..., Net]]:
    """Makes servers, and closes what they have open in the end."""
    with contextlib.ExitStack() as stack:

        def make(*arguments: Any, **keywords: Any) -> Net:
            net = Net(*arguments, **keywords)
            stack.callback(net.close)
            return net

        yield make


class Peer:
    """The other end of a connection. With SOCK_SEQPACKET each of its recv() is one send() of the connection."""

    def __init__(self, net: Net, patience: str, kind: int) -> None:
        self.socket, own_end = socket.socketpair(socket.AF_UNIX, kind)
        self.socket.setblocking(False)
        own_end.setblocking(False)
        self.loop = net.loop
        self.connection = Connection(net.server, patience)
        self.transport = FakeTransport(self.connection, own_end)
        self.connection.connection_made(self.transport)

    def send(self, data: bytes) -> None:
        """Data that arrived, as uvloop hands it over."""
        assert self.transport.reading
        self.connection.data_received(data)

    def recv(self) -> bytes:
        """What came in one piece; empty if nothing did, or the end."""
        try:
            return self.socket.recv(1 << 20)
        except BlockingIOError:
            return b""

    def recv_all(self) -> bytes:
        return b"".join(iter(self.recv, b""))

    def finish(self) -> bytes:
        """All that comes while the loop runs and the peer reads."""
        received = b""
        for _ in range(TURNS_MAX):
            if not self.loop.pending() and not self.transport.queue:
                return received + self.recv_all()
            self.loop.turn()
            received += self.recv_all()
            if self.transport.queue:
                received += self.transport.drain()
        raise AssertionError("it never comes to its end")

    def at_end(self) -> bool:
        try:
            return self.socket.recv(1) == b""
        except BlockingIOError:
            return False

    def lose(self, error: BaseException | None = None) -> None:
        """The transport is gone, as uvloop tells it."""
        self.connection.connection_lost(error)
        self.transport.socket.close()
