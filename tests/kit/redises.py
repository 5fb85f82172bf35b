"""Servers that speak the protocol of Redis and answer as a test decides, on loopback, in the loop of the test."""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import TYPE_CHECKING, Any

import hiredis

from counterd.cluster.lease_protocol import LIBRARY
from counterd.control.link import Place
from counterd.control.servers import SLOTS
from kit.machine import PATIENCE

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

RUN = "0123456789abcdef"
INFO = f"# Server\r\nredis_version:7.0.15\r\nrun_id:{RUN}\r\ntcp_port:1\r\n".encode()
SILENCE, END = object(), object()  # answers: none at all, and the end of the connection


class Refusal(Exception):
    """An answer that is an error."""


NO_CLUSTER = Refusal("ERR This instance has cluster support disabled")


def written(answer: Any) -> bytes:
    """Encodes an answer as Redis does. A bytearray is taken as it is."""
    if answer is None:
        return b"$-1\r\n"
    if isinstance(answer, bytearray):
        return bytes(answer)
    if isinstance(answer, Refusal):
        return f"-{answer}\r\n".encode()
    if isinstance(answer, int):
        return b":%d\r\n" % answer
    if isinstance(answer, list):
        return b"*%d\r\n" % len(answer) + b"".join(map(written, answer))
    return b"$%d\r\n%b\r\n" % (len(answer), answer)


class Redis:
    """A server. answer: called with the words of each command. place: its address. connections: those so far.

    peers: the open ones. idle: there are none.
    """

    def __init__(self, answer: Callable[[list[bytes]], Any]) -> None:
        self.answer = answer
        self.connections = 0
        self.place = Place("", 0)
        self.peers: set[asyncio.Transport] = set()
        self.idle = asyncio.Event()
        self.idle.set()

    def drop(self) -> None:
        """Ends all connections."""
        for each in self.peers:
            each.abort()


class Peer(asyncio.Protocol):
    """A connection to a Redis."""

    def __init__(self, redis: Redis) -> None:
        self._redis = redis
        self._parser = hiredis.Reader()

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        self._redis.connections += 1
        self._redis.peers.add(transport)
        self._redis.idle.clear()

    def data_received(self, data: bytes) -> None:
        self._parser.feed(data)
        while (words := self._parser.gets()) is not False:
            answer = self._redis.answer(words)
            if answer is END:
                self._transport.close()
                return
            if answer is not SILENCE:
                self._transport.write(written(answer))

    def connection_lost(self, _error: Exception | None) -> None:
        self._redis.peers.discard(self._transport)
        if not self._redis.peers:
            self._redis.idle.set()


@contextlib.asynccontextmanager
async def serving(answer: Callable[[list[bytes]], Any]) -> AsyncIterator[Redis]:
    """Runs a server during the block."""
    redis = Redis(answer)
    server = await asyncio.get_running_loop().create_server(lambda: Peer(redis), "127.0.0.1", 0)
    redis.place = Place(*server.sockets[0].getsockname()[:2])
    try:
        yield redis
    finally:
        server.close()
        redis.drop()
        await redis.idle.wait()


class Server:
    """Answers for a Redis: to calls of the authority with their last word. run: of its process. state: of its cluster.

    calls: the keys and arguments of those calls. answers: by the first word of a command. redis: while it is served.
    """

    def __init__(self, run: str) -> None:
        self.run = run
        self.state = b"cluster_state:ok\r\n"
        self.calls: list[list[bytes]] = []
        self.answers: dict[bytes, Any] = {b"FUNCTION": b"", b"INFO": INFO.replace(RUN.encode(), run.encode())}
        self.redis: Redis

    def answer(self, words: list[bytes]) -> Any:
        if words == [b"CLUSTER", b"INFO"]:
            return self.state
        if words[0] in self.answers:
            return self.answers[words[0]]
        assert words[:2] == [b"FCALL", LIBRARY.encode()]
        self.calls.append(words[3:])
        return words[-1]

    def knows(self, *servers: Server) -> None:
        """Puts the server into a Redis Cluster in which these servers have the slots, in equal parts."""
        firsts = [SLOTS * index // len(servers) for index in range(len(servers) + 1)]
        self.answers[b"CLUSTER"] = [
            [firsts[index], firsts[index + 1] - 1, [b"127.0.0.1", each.redis.place.port, b"id"]]
            for index, each in enumerate(servers)
        ]

    def is_master(self, *replicas: Server, offset: int = 5) -> None:
        """Makes the server a master outside of any Redis Cluster."""
        ports = [b"%d" % each.redis.place.port for each in replicas]
        self.answers[b"CLUSTER"] = NO_CLUSTER
        self.answers[b"ROLE"] = [b"master", offset, [[b"127.0.0.1", port, b"5"] for port in ports]]

    def is_replica(self, master: Server) -> None:
        self.answers[b"CLUSTER"] = NO_CLUSTER
        self.answers[b"ROLE"] = [b"slave", b"127.0.0.1", master.redis.place.port, b"connected", 5]


@contextlib.asynccontextmanager
async def fleet(*servers: Server) -> AsyncIterator[None]:
    """Runs servers during the block. They are a Redis Cluster, in which each has a part of the slots."""
    async with contextlib.AsyncExitStack() as stack:
        for each in servers:
            each.redis = await stack.enter_async_context(serving(each.answer))
        for each in servers:
            each.knows(*servers)
        yield


async def until(condition: Callable[[], Any]) -> None:
    """Waits until a condition is true."""
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.001)
