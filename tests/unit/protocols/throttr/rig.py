"""Stores of the throttr protocol and their connections, driven as net would."""

from __future__ import annotations

from typing import Any, TypeVar

from counterd.protocols.throttr._session import open_store
from counterd.protocols.throttr.wire import Encoder, Event, Parser, Reply, Request, TTLType, ValueSize

T = TypeVar("T")

SECOND = 1_000_000_000
MINUTE = 60 * SECOND
START = 1000 * MINUTE
UNIX = 1_700_000_000 * SECOND
TURNS_MAX = 10_000
TICK = 1 << 20  # of the wheel: what has expired is counted no later
KEY_COST, BLOCK = 112, 64
KEY = bytes(range(16))


class Rig:
    """A store that is driven as net would: its ticks run when they are due, and sessions with more output are asked
    again.
    """

    def __init__(self, *, start: int = START, **options: Any) -> None:
        settings = {
            "value_size": 2,
            "memory_limit": 64 << 20,
            "max_message": 1 << 20,
            "max_queued": 1 << 20,
            "expiry_grace_ns": 0,
            "hash_key": KEY,
            "now_ns": start,
        } | options
        self.encoder = Encoder(ValueSize(settings["value_size"]))
        self.store = open_store(**settings)
        self.now = start
        self.store.set_wall(UNIX, start)
        self.connections: dict[Any, Connection] = {}

    def connect(self) -> Connection:
        connection = Connection(self)
        self.connections[connection.session] = connection
        return connection

    def turn(self) -> bool:
        """Runs one turn; returns whether there was anything to do."""
        due = self.store.next_deadline()
        busy = 0 <= due <= self.now
        if busy:
            self.store.tick(self.now)
        for session in self.store.take_dirty():
            busy = True
            if session in self.connections:
                self.connections[session].pull()
        for connection in list(self.connections.values()):
            busy = busy or (connection.session.more and not connection.deaf)
            connection.pull()
        return busy

    def settle(self) -> None:
        for _ in range(TURNS_MAX):
            if not self.turn():
                return
        raise AssertionError("it never comes to its end")


class Connection:
    """A session of the store, and the data that it was sent. deaf: its peer reads nothing."""

    def __init__(self, rig: Rig) -> None:
        self.rig = rig
        self.session = rig.store.session(rig.now)
        self.parser = Parser(rig.encoder.size)
        self.received: list[Reply | Event] = []
        self.deaf = False

    def send(self, *requests: Request[Any]) -> None:
        for request in requests:
            self.parser.expect(request)
        self.take(self.session.receive(b"".join(requests), self.rig.now))

    def take(self, output: bytes) -> None:
        self.received += self.parser.feed(output)

    def pull(self) -> None:
        if self.deaf:
            self.session.wait()
        else:
            self.take(self.session.take_output(self.rig.now))

    def events(self) -> list[bytes]:
        """The payloads of the events since the last call."""
        payloads = [got.payload for got in self.received if isinstance(got, Event)]
        self.received = [got for got in self.received if not isinstance(got, Event)]
        return payloads

    def ask(self, request: Request[T]) -> T:
        """Sends a request, and returns the content of its reply. Earlier replies are forgotten."""
        self.received = [got for got in self.received if isinstance(got, Event)]
        self.send(request)
        self.rig.settle()
        (reply,) = (got for got in self.received if isinstance(got, Reply))
        self.received.remove(reply)
        return reply.result

    def close(self) -> None:
        del self.rig.connections[self.session]
        self.session.closed(self.rig.now)


def key(number: int) -> bytes:
    return b"key-%012d" % number


def fill(client: Connection, count: int, ttl: int = 60000, ttl_type: int = TTLType.SECONDS, start: int = 0) -> None:
    """Inserts so many counters, all of which must be accepted."""
    encoder = client.rig.encoder
    for first in range(start, start + count, 5000):
        numbers = range(first, min(first + 5000, start + count))
        client.send(*(encoder.insert(key(number), 1, ttl, ttl_type) for number in numbers))
        client.rig.settle()
    assert all(got.result for got in client.received if isinstance(got, Reply))
    client.received.clear()


def own_channel(connection: Connection) -> bytes:
    id = connection.ask(connection.rig.encoder.whoami())
    return id.hex().encode()
