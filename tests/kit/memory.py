"""A counter server in memory, and an event loop whose clock jumps, to test asyncio's client without sockets and sleeps.

Time passes only when there is nothing else to do, and then at once. If nothing is scheduled either, a coroutine waits
for ever, and the test fails.
"""

from __future__ import annotations

import asyncio
import selectors
import struct
from collections import Counter, deque
from typing import TYPE_CHECKING, Any

from counterd.protocols.counter import wire
from counterd.protocols.counter.wire import HEADER_SIZE, Opcode, Status

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

_HEADER = struct.Struct(">BBBBII")


class Selector(selectors.SelectSelector):
    """A selector that never waits, and advances the loop's clock instead."""

    loop: Loop

    def select(self, timeout: float | None = None) -> list[Any]:
        ready = super().select(0)
        if not ready and (timeout is None or timeout > 0):
            assert timeout is not None, "nothing will ever happen again"
            self.loop.on_idle()
            self.loop.now += timeout
        return ready


class Loop(asyncio.SelectorEventLoop):
    """The loop. now: its time. on_idle: called before time passes. server: the peer of all its connections."""

    def __init__(self) -> None:
        self.now = 0.0
        self.on_idle: Callable[[], object] = lambda: None
        self.server = Server(self)
        self.complaints: list[Any] = []
        selector = Selector()
        selector.loop = self
        super().__init__(selector)
        self.set_exception_handler(lambda _, context: self.complaints.append(context))

    def time(self) -> float:
        return self.now

    async def create_connection(self, factory: Callable[[], Any], *_: Any, **__: Any) -> Any:
        return await self.server.connect(factory())

    def run(self, main: Coroutine[Any, Any, Any]) -> Any:
        """As asyncio.run(). Fails if a task remains or an error was reported."""
        try:
            result = self.run_until_complete(main)
            assert asyncio.all_tasks(self) == set()
        finally:
            for task in asyncio.all_tasks(self):
                task.cancel()
            self.run_until_complete(asyncio.sleep(0))
            self.close()
        assert self.complaints == []
        return result


class Pipe(asyncio.Transport):
    """One connection. held: its permits by counter. sent: the requests that came, as (opcode, body)."""

    def __init__(self, server: Server, protocol: Any) -> None:
        super().__init__({"sockname": "here", "peername": "there"})
        self.held: Counter[bytes] = Counter()
        self.sent: list[tuple[int, bytes]] = []
        self.pieces: list[int] = []  # how many requests came at once
        self.closed = False
        self.protocol = protocol
        self._server = server
        self._arrives = self._answers = 0.0  # the times of the latest request and reply: later ones are not earlier
        # In order, because the loop runs callbacks that are due at the same time in any order.
        self._requests: deque[bytes] = deque()
        self._replies: deque[bytes] = deque()

    def write(self, data: Any) -> None:
        assert not self.closed
        loop, server = self._server.loop, self._server
        server.in_flight += 1
        self._arrives = max(self._arrives, loop.now + server.delay())
        self._requests.append(bytes(data))
        loop.call_at(self._arrives, self._arrived)

    def abort(self) -> None:
        if not self.closed:
            self.closed = True
            self._server.gone(self)
            self._server.loop.call_soon(self.protocol.connection_lost, None)

    def cut(self, error: Exception | None = None) -> None:
        """Ends the connection from the server's side. The client notices at once."""
        if not self.closed:
            self.closed = True
            self._server.gone(self)
            self.protocol.connection_lost(error)

    def is_closing(self) -> bool:
        return self.closed

    def _arrived(self) -> None:
        loop, server = self._server.loop, self._server
        data = self._requests.popleft()
        if self.closed:
            server.in_flight -= 1
            return
        replies, count = b"", 0
        while data:
            _, opcode, _, _, length, opaque = _HEADER.unpack_from(data)
            body, data = data[HEADER_SIZE : HEADER_SIZE + length], data[HEADER_SIZE + length :]
            self.sent.append((opcode, body))
            count += 1
            replies += server.reply(self, opcode, opaque, body)
        self.pieces.append(count)
        self._answers = max(self._answers, loop.now + server.delay())
        self._replies.append(replies)
        loop.call_at(self._answers, self._answered)

    def _answered(self) -> None:
        replies = self._replies.popleft()
        self._server.in_flight -= 1
        where = self._server.split(len(replies))
        for piece in (replies[:where], replies[where:]):
            if piece and not self.closed:
                self.protocol.data_received(piece)


class Server:
    """A correct server. A test may replace delay, split, accepts and answers."""

    def __init__(self, loop: Loop) -> None:
        self.loop = loop
        self.used: Counter[bytes] = Counter()
        self.refused = 0  # acquires
        self.pipes: list[Pipe] = []
        self.in_flight = 0  # pieces of requests and their replies
        self.delay: Callable[[], float] = lambda: 0.001
        self.split: Callable[[int], int] = lambda size: size
        self.accepts: Callable[[], bool] = lambda: True
        self.answers: Callable[[int], bool] = lambda opcode: True

    async def connect(self, protocol: Any) -> tuple[Pipe, Any]:
        await asyncio.sleep(self.delay())
        if not self.accepts():
            raise ConnectionRefusedError("nobody is there")
        pipe = Pipe(self, protocol)
        self.pipes.append(pipe)
        protocol.connection_made(pipe)
        await asyncio.sleep(0)
        return pipe, protocol

    def gone(self, pipe: Pipe) -> None:
        self.used -= pipe.held
        pipe.held.clear()

    def reply(self, pipe: Pipe, opcode: int, opaque: int, body: bytes) -> bytes:
        answer, status = b"", Status.NO_ERROR
        if opcode == Opcode.GET:
            answer = struct.pack(">I", self.used[body[2:]])
        elif opcode == Opcode.ACQUIRE:
            resources, maximum = struct.unpack_from(">II", body)
            if self.used[body[10:]] + resources > maximum:
                status = Status.RESOURCE_NOT_AVAILABLE
                self.refused += 1
            else:
                self.used[body[10:]] += resources
                pipe.held[body[10:]] += resources
                answer = struct.pack(">I", resources)
        elif opcode == Opcode.RELEASE:
            resources, name = struct.unpack_from(">I", body)[0], body[6:]
            if pipe.held[name] < resources:
                status = Status.NOT_ACQUIRED
            else:
                self.used[name] -= resources
                pipe.held[name] -= resources
        elif opcode == Opcode.STATS:
            name, value = b"refused:not_available", b"%d" % self.refused
            answer = struct.pack(">HH", len(name), len(value)) + name + value
        if not self.answers(opcode):
            return b""
        return wire.frame(opcode, opaque, answer, magic=wire.RESPONSE_MAGIC, flags=status)
