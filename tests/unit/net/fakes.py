"""A stand-in for uvloop's loop and clock, so that a test decides when what happens. The sockets are real."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections import deque
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from counterd.net.admission import Limits
from counterd.net.poller import Poller
from counterd.net.server import Server
from counterd.net.table import TableAcceptor
from counterd.protocols.counter import wire
from kit.counters import OK, TURNS_MAX, Client, make_store

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from counterd._core import Store


class FakeClock:
    """A clock that advances by step_ns at each call. It begins with the current time, as connections use the real
    clock.
    """

    def __init__(self, step_ns: int = 0) -> None:
        self.now_ns = time.monotonic_ns()
        self.step_ns = step_ns

    def monotonic_ns(self) -> int:
        self.now_ns += self.step_ns
        return self.now_ns


class FakeHandle:
    """A scheduled call. delay_s: None for the next turn of the loop."""

    def __init__(self, callback: Callable[..., Any], arguments: tuple[Any, ...], delay_s: float | None) -> None:
        self.callback = callback
        self.arguments = arguments
        self.delay_s = delay_s
        self.cancelled = False

    def cancel(self) -> None:
        self.cancelled = True


class FakeLoop:
    """An event loop that runs nothing by itself.

    ready: calls of call_soon; timers: calls of call_later; errors: the exceptions that were reported; readers: the
    callbacks of readable descriptors.
    """

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
        """Runs the calls that are ready now; returns how many there were."""
        self.turns += 1
        assert self.turns < TURNS_MAX
        turn, self.ready = self.ready, deque()
        return sum(self._run(handle) for handle in turn)

    def run(self) -> None:
        while self.turn():
            pass

    def run_now(self, callback: Callable[[], Any]) -> None:
        """Runs the scheduled calls of this function before all others."""
        for handle in [handle for handle in self.ready if handle.callback == callback]:
            self.ready.remove(handle)
            self._run(handle)

    def fire(self) -> None:
        """Runs all timers."""
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


class Net:
    """A server on a fake loop, and an epoll set whose batches a test runs. reports: the causes that it reported."""

    def __init__(
        self,
        store: Store | None = None,
        max_connections: int = 10,
        clock: Callable[[], int] = time.monotonic_ns,
        **limits: Any,
    ) -> None:
        self.loop = FakeLoop()
        self.store = store if store is not None else make_store(8000, 9000, name_memory=1 << 17)
        self.reports: list[str] = []
        made = Limits(max_connections, user_timeout=25, write_timeout=5, **limits)
        self.server = Server(self.loop, self.store, made, lambda cause, _: self.reports.append(cause), clock)
        self.poller = Poller(self.loop, lambda *_: None)  # beside that of the server, which serves those who connect
        self.peers: list[Peer] = []

    def connect(self, patience: str = "user_timeout", kind: int = socket.SOCK_SEQPACKET) -> Peer:
        self.peers.append(Peer(self, patience, kind))
        return self.peers[-1]

    def protocol_port(self, patience: str = "user_timeout", *, secure: bool = False) -> TableAcceptor:
        """Makes an TableAcceptor, as each listening socket has one."""
        return TableAcceptor(self.server._table, self.server._common, self.poller, secure, patience)

    def limit(self, **limits: Any) -> None:
        """Changes some of the limits."""
        self.server.limits = replace(self.server.limits, **limits)

    def fill(self, count: int) -> None:
        """Adds counters whose entries in a Dump have 36 bytes each."""
        self.holder = Client(self.store)
        self.holder.raw(b"".join(wire.acquire(0, b"name-%09d" % number, 1, 1) for number in range(count)))

    def clog(self, patience: str = "user_timeout") -> tuple[Peer, bytes]:
        """Returns a peer that reads nothing, so that the kernel takes only a part of the answer; and that answer."""
        self.holder = Client(self.store)
        assert self.holder.acquire(b"x" * 65535) == OK
        answer = self.holder.raw(wire.dump(1))
        peer = self.connect(patience, socket.SOCK_STREAM)
        peer.shorten()
        peer.send(wire.dump(1))
        self.loop.run()
        assert 0 < peer.queued < len(answer)
        return peer, answer

    def close(self) -> None:
        for peer in self.peers:
            peer.socket.close()
            if peer.connection is not None:
                peer.lose()


@contextlib.contextmanager
def nets() -> Iterator[Callable[..., Net]]:
    """Makes servers, and closes what they have open after the test."""
    with contextlib.ExitStack() as stack:

        def make(*arguments: Any, **keywords: Any) -> Net:
            net = Net(*arguments, **keywords)
            stack.callback(net.close)
            return net

        yield make


class Peer:
    """The other end of a connection.

    With SOCK_SEQPACKET each of its recv() returns what one send() of the connection sent, and each of its send() is one
    read. connection: the server's end; None if the server refused it.
    """

    def __init__(self, net: Net, patience: str, kind: int) -> None:
        self.net, self.loop = net, net.loop
        self.socket, own_end = socket.socketpair(socket.AF_UNIX, kind)
        self.socket.setblocking(False)
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
        own_end.setblocking(False)
        before = set(net.server.connections.values())
        net.protocol_port(patience).accepted(own_end.detach(), None, 0)
        came = set(net.server.connections.values()) - before
        self.connection: Any = came.pop() if came else None

    # ---- its connection ----

    @property
    def reading(self) -> bool:
        return self.connection.stream.reading

    @property
    def queued(self) -> int:
        return self.connection.stream.queued

    @property
    def output_ended(self) -> bool:
        return self.connection.stream.ending

    @property
    def closed(self) -> bool:
        """Whether the server has closed the connection, or refused it."""
        return self.connection is None or self.connection.stream.closed

    def shorten(self) -> None:
        """Makes the kernel accept little of the connection's output."""
        with socket.socket(fileno=os.dup(self.connection.fd)) as own_end:
            own_end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)

    def stuff(self) -> None:
        """Makes the kernel accept none of the connection's output."""
        with socket.socket(fileno=os.dup(self.connection.fd)) as own_end, contextlib.suppress(BlockingIOError):
            while True:
                own_end.send(bytes(1000))

    def lose(self, error: BaseException | None = None) -> None:
        """Ends the connection with an error."""
        self.connection.stream.end(error)
        self.loop.run_now(self.net.poller.release)

    # ---- what it says and hears ----

    def send(self, data: bytes) -> None:
        """Sends data, which the connection reads."""
        assert self.reading
        assert self.socket.send(data) == len(data)
        self.net.poller.run()

    def end(self) -> None:
        """Ends the sending direction."""
        assert self.reading
        self.socket.shutdown(socket.SHUT_WR)
        self.net.poller.run()

    def recv(self, size: int = 1 << 20) -> bytes:
        """Receives one piece; empty if there is none, or at the end."""
        try:
            return self.socket.recv(size)
        except (BlockingIOError, ConnectionResetError):
            return b""

    def recv_all(self) -> bytes:
        return b"".join(iter(self.recv, b""))

    def take(self, size: int) -> None:
        """Reads a little, so that the kernel accepts as much again."""
        self.recv(size)
        self.net.poller.run()

    def drain(self) -> bytes:
        """Reads until no output is queued any more."""
        received = b""
        for _ in range(TURNS_MAX):
            if not self.queued:
                return received + self.recv_all()
            received += self.recv_all()
            self.net.poller.run()
        raise AssertionError("it never comes to its end")

    def finish(self) -> bytes:
        """Reads while the loop runs, and returns everything that arrives."""
        received = b""
        for _ in range(TURNS_MAX):
            if not self.loop.pending() and not self.queued:
                return received + self.recv_all()
            self.loop.turn()
            received += self.recv_all() + self.drain()
        raise AssertionError("it never comes to its end")

    def at_end(self) -> bool:
        try:
            return self.socket.recv(1) == b""
        except BlockingIOError:
            return False
