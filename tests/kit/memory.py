"""A counter server in memory, and an event loop whose clock jumps, to test asyncio's client without sockets and sleeps.

Time passes only when there is nothing else to do, and then at once. If nothing is scheduled either, a coroutine waits
for ever, and the test fails.
"""

from __future__ import annotations

import asyncio
import selectors
from collections import Counter, deque
from typing import TYPE_CHECKING, Any

from kit.scripted.counter import Counters, Request, cut

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine


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
            self._server.counters.give_back(self.held)
            self._server.loop.call_soon(self.protocol.connection_lost, None)

    def cut(self, error: Exception | None = None) -> None:
        """Ends the connection from the server's side. The client notices at once."""
        if not self.closed:
            self.closed = True
            self._server.counters.give_back(self.held)
            self.protocol.connection_lost(error)

    def is_closing(self) -> bool:
        return self.closed

    def _arrived(self) -> None:
        loop, server = self._server.loop, self._server
        data = self._requests.popleft()
        if self.closed:
            server.in_flight -= 1
            return
        requests, _ = cut(0, data)
        self.sent += [(request.opcode, request.body) for request in requests]
        self.pieces.append(len(requests))
        self._answers = max(self._answers, loop.now + server.delay())
        self._replies.append(b"".join(server.reply(self, request) for request in requests))
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
        self.counters = Counters()
        self.used = self.counters.used
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

    def reply(self, pipe: Pipe, request: Request) -> bytes:
        answer = self.counters.execute(pipe.held, request, request.maximum)
        return answer if self.answers(request.opcode) else b""
