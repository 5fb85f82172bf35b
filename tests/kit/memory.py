"""A counter server in memory, and an event loop whose clock jumps, to test asyncio's client without sockets and sleeps.

Time passes only when there is nothing else to do, and then at once. If nothing is scheduled either, a coroutine waits
for ever, and the test fails.
"""

from __future__ import annotations

import asyncio
import selectors
import struct
from collections import Counter, deque
from typing import TYPE_CHECKING, Any, NamedTuple

from counterd.protocols.counter import wire
from counterd.protocols.counter.wire import Opcode, Status
from kit.scripted.counter import Counters, cut, responded

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from kit.scripted.counter import Request

_TAKE, _PERMIT = struct.Struct(">BBHIH"), struct.Struct(">BBHII")


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
        server = self._server
        requests, rest = cut(0, self._requests.popleft())
        assert not rest
        server.in_flight -= 1
        if self.closed:
            return
        self.sent += [(each.opcode, each.body) for each in requests]
        self.pieces.append(len(requests))
        self.post(b"".join(server.reply(self, each) for each in requests))

    def post(self, replies: bytes) -> None:
        """Sends replies, now or when a Take need not wait any more."""
        self._replies.append(replies)
        self._answer_later()

    def _answer_later(self) -> None:
        loop, server = self._server.loop, self._server
        server.in_flight += 1
        self._answers = max(self._answers, loop.now + server.delay())
        loop.call_at(self._answers, self._answered)

    def _answered(self) -> None:
        replies = self._replies.popleft()
        self._server.in_flight -= 1
        where = self._server.split(len(replies)) or len(replies)
        if rest := replies[where:]:
            self._replies.appendleft(rest)
            self._answer_later()
        if replies and not self.closed:
            self.protocol.data_received(replies[:where])


class Waiting(NamedTuple):
    """A Take of one permit or more of one counter, which waits."""

    pipe: Pipe
    opaque: int
    name: bytes
    amount: int
    maximum: int
    timer: asyncio.TimerHandle


class Server:
    """A correct server. A test may replace delay, split, accepts and answers.

    has_takes: whether it knows Takes, which it serves in the order of their arrival. room: how many may wait.
    """

    def __init__(self, loop: Loop) -> None:
        self.has_takes = False
        self.room = 1 << 20
        self.waiting: list[Waiting] = []
        self.grants = 0
        self.loop = loop
        self.counters = Counters()
        self.used = self.counters.used
        self.not_acquired = 0  # releases of more than was held
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
        for take in [each for each in self.waiting if each.pipe is pipe]:
            self.end(take)
        self.counters.give_back(pipe.held)
        self.serve()

    def reply(self, pipe: Pipe, request: Request) -> bytes:
        reply = self.execute(pipe, request)
        return reply if self.answers(request.opcode) else b""

    def execute(self, pipe: Pipe, request: Request) -> bytes:
        if self.has_takes and request.opcode == Opcode.TAKE:
            return self.take(pipe, request.opaque, request.body)
        if self.has_takes and request.opcode == Opcode.CANCEL:
            return self.cancel(pipe, request.opaque, request.body)
        reply = self.counters.execute(pipe.held, request, 0 if self.is_waited_for(request.name) else request.maximum)
        if request.opcode == Opcode.RELEASE:
            self.not_acquired += reply[2] == Status.NOT_ACQUIRED
            self.serve()
        return reply

    # ---- Takes ----

    def take(self, pipe: Pipe, opaque: int, body: bytes) -> bytes:
        count, _, _, wait_ms, key_size = _TAKE.unpack_from(body)
        kind, _, size, amount, maximum = _PERMIT.unpack_from(body, _TAKE.size + key_size)
        assert (count, kind, size) == (1, 1, len(body) - _TAKE.size - key_size - _PERMIT.size)
        name = body[-size:]
        if self.used[name] + amount <= maximum and not self.is_waited_for(name):
            return self.grant(pipe, opaque, name, amount, maximum)
        if not wait_ms:
            return self.shortage(opaque, name, maximum)
        if len(self.waiting) >= self.room:
            return responded(Opcode.TAKE, opaque, status=Status.OUT_OF_MEMORY)
        timer = self.loop.call_later(wait_ms / 1000, lambda: self.expire(take))
        take = Waiting(pipe, opaque, name, amount, maximum, timer)
        self.waiting.append(take)
        return b""

    def cancel(self, pipe: Pipe, opaque: int, body: bytes) -> bytes:
        for take in self.waiting:
            if take.pipe is pipe and take.opaque == int.from_bytes(body, "big"):
                self.end(take)
                self.serve()
                ended = responded(Opcode.TAKE, take.opaque, status=Status.CANCELLED)
                return ended + responded(Opcode.CANCEL, opaque)
        return responded(Opcode.CANCEL, opaque, status=Status.NOT_FOUND)

    def is_waited_for(self, name: bytes) -> bool:
        return any(take.name == name for take in self.waiting)

    def grant(self, pipe: Pipe, opaque: int, name: bytes, amount: int, maximum: int) -> bytes:
        self.used[name] += amount
        pipe.held[name] += amount
        self.grants += 1
        return responded(Opcode.TAKE, opaque, struct.pack(">QI", self.grants, maximum - self.used[name]))

    def shortage(self, opaque: int, name: bytes, maximum: int) -> bytes:
        left = struct.pack(">BIII", 0, max(maximum - self.used[name], 0), maximum, wire.U32_MAX)
        return responded(Opcode.TAKE, opaque, left, Status.RESOURCE_NOT_AVAILABLE)

    def expire(self, take: Waiting) -> None:
        self.end(take)
        take.pipe.post(self.shortage(take.opaque, take.name, take.maximum))
        self.serve()

    def end(self, take: Waiting) -> None:
        self.waiting.remove(take)
        take.timer.cancel()

    def serve(self) -> None:
        """Grants what there is now to those that wait: of each counter the first, then the next."""
        blocked = set()
        for take in list(self.waiting):
            if take.name in blocked or self.used[take.name] + take.amount > take.maximum:
                blocked.add(take.name)
            else:
                self.end(take)
                take.pipe.post(self.grant(take.pipe, take.opaque, take.name, take.amount, take.maximum))
