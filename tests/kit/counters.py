"""A store of the counter protocol in memory, as the tests make it, and a client of it that says what it was
answered."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from counterd.protocols.counter import wire
from counterd.protocols.counter._session import open_store
from counterd.protocols.counter._tables import TABLES

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from counterd._core import Session, Store
    from counterd.protocols.counter._store import CounterStore

(HOLDERS,) = (table for table in TABLES if table.name == "holders")
KEY = bytes(range(16))

# The engine's bounds that can be seen from outside: _core.pxd says why each is what it is.
NAME_INLINE, NAME_PREFIX, BLOCK_PAYLOAD, BLOCK_SIZE = 36, 28, 60, 64
RECORD_SIZE, HOLDING_SIZE = 64, 32
OUTPUT_MAX, REPLY_MAX = 262144, 65573
RECLAIM_STEPS = 64
SLICE_STEPS = 2048  # holdings that a tick gives back, or records that it sweeps
BODY_MAX = 65545
# More calls than anything here needs.
TURNS_MAX = 10_000

NOOP, GET, ACQUIRE, RELEASE, STATS, DUMP = 0x00, 0x01, 0x02, 0x03, 0x10, 0x11
OK, NOT_FOUND, INVALID, NOT_AVAILABLE, NOT_ACQUIRED, UNKNOWN, NO_MEMORY = 0, 0x01, 0x04, 0x21, 0x22, 0x81, 0x82
TEXTS = {
    NOT_FOUND: b"Not found",
    INVALID: b"Invalid arguments",
    NOT_AVAILABLE: b"Resource not available",
    NOT_ACQUIRED: b"Not acquired",
    UNKNOWN: b"Unknown command",
    NO_MEMORY: b"OutOfMemory",
}
COMMANDS = {NOOP: "noop", GET: "get", ACQUIRE: "acquire", RELEASE: "release", STATS: "stats", DUMP: "dump"}
REFUSALS = {
    NOT_FOUND: "not_found",
    INVALID: "invalid_arguments",
    NOT_AVAILABLE: "not_available",
    NOT_ACQUIRED: "not_acquired",
    UNKNOWN: "unknown_command",
    NO_MEMORY: "out_of_memory",
}


def make_store(
    buckets: int = 8, holdings: int = 64, holdings_per_connection: int = 0, name_memory: int = 0, **others: Any
) -> CounterStore:
    """A small store with a known key."""
    others.setdefault("figures", dict)
    return open_store(
        buckets=buckets,
        holdings=holdings,
        holdings_per_connection=holdings_per_connection,
        name_memory=name_memory,
        hash_key=KEY,
        **others,
    )


def holders_of(store: CounterStore, name: bytes) -> list[tuple[int, int, int]]:
    """(connection, amount, since in tenths of a second) of all that hold of a counter, who came last first."""
    walk = HOLDERS.walk(store, 1 << 30, name=name)
    while not walk.step():
        pass
    return [row[:3] for row in walk.rows()]


def frames_of(stream: bytes) -> Iterator[bytes]:
    """The complete frames at the start of a stream of requests or responses."""
    start = 0
    while len(stream) >= start + 12:
        end = start + 12 + int.from_bytes(stream[start + 4 : start + 8], "big")
        if end > len(stream):
            return
        yield stream[start:end]
        start = end


def outputs(session: Session, now_ns: int = 0) -> Iterator[bytes]:
    """What a session still has to say, in its pieces."""
    for _ in range(TURNS_MAX):
        if not session.more:
            return
        yield session.take_output(now_ns)
    raise AssertionError("it never comes to its end")


class Client:
    """A session of a real store, and requests as calls. opaque: of every request, checked in every response."""

    OPAQUE = 0xDEADBEEF

    def __init__(self, store: CounterStore) -> None:
        self.store = store
        self.session: Session = store.session()
        self.now_ns = 0

    def pieces(self, data: bytes) -> list[bytes]:
        """What one receive() gives, then what each take_output() does."""
        pieces = [self.session.receive(data, self.now_ns), *outputs(self.session, self.now_ns)]
        assert max(map(len, pieces)) <= OUTPUT_MAX + REPLY_MAX
        self.store.audit()
        return pieces

    def raw(self, data: bytes) -> bytes:
        return b"".join(self.pieces(data))

    def responses(self, data: bytes) -> list[wire.Response]:
        return wire.ResponseParser().feed(self.raw(data))

    def one(self, data: bytes) -> wire.Response:
        """The only response to one request."""
        (response,) = self.responses(data)
        assert (response.opcode, response.opaque) == (data[1], self.OPAQUE)
        if response.status != OK:
            assert response.body == TEXTS[response.status]
        return response

    def acquire(self, name: bytes, resources: int = 1, maximum: int = 0xFFFFFFFF) -> int:
        """The status; the body says what was granted."""
        response = self.one(wire.acquire(self.OPAQUE, name, resources, maximum))
        if response.status == OK:
            assert wire.decode_consumption(response.body) == resources
        return response.status

    def release(self, name: bytes, resources: int = 1) -> int:
        response = self.one(wire.release(self.OPAQUE, name, resources))
        assert response.status != OK or response.body == b""
        return response.status

    def get(self, name: bytes) -> int | None:
        """The consumption; None if there is no such counter."""
        response = self.one(wire.get(self.OPAQUE, name))
        assert response.status in (OK, NOT_FOUND)
        return wire.decode_consumption(response.body) if response.status == OK else None

    def dump(self) -> dict[bytes, tuple[int, int]]:
        """Consumption and peak by name."""
        entries = self._dumped(wire.dump(self.OPAQUE))
        assert {entry.limit for entry in entries} <= {None}
        return {entry.name: (entry.consumption, entry.peak) for entry in entries}

    def limits(self) -> dict[bytes, int | None]:
        """The maximum of the last acquire by name."""
        return {entry.name: entry.limit for entry in self._dumped(wire.dump(self.OPAQUE, limits=True))}

    def _dumped(self, request: bytes) -> list[wire.DumpEntry]:
        """The entries; each name is there once, and the end once, as the last."""
        responses = self.responses(request)
        assert {(response.opcode, response.status, response.opaque) for response in responses} == {
            (DUMP, OK, self.OPAQUE)
        }
        assert [response.body == b"" for response in responses] == [False] * (len(responses) - 1) + [True]
        entries = [wire.decode_dump_entry(response.body) for response in responses[:-1]]
        assert len({entry.name for entry in entries}) == len(entries)
        return entries

    def close(self) -> None:
        self.session.closed(self.now_ns)
        self.store.audit()


def settle(store: CounterStore, now_ns: int = 0) -> int:
    """Gives the store its turns until nothing is due; how many that took."""
    for turns in range(TURNS_MAX):
        if store.next_deadline() < 0:
            return turns
        store.tick(now_ns)
        store.audit()
    raise AssertionError("it is always due")


def figures(store: Store, *names: str) -> list[int]:
    snapshot = store.snapshot()
    return [snapshot[name] for name in names]


def acquire_all(client: Client, names: Iterable[bytes]) -> None:
    """Acquires one of each, in one piece."""
    responses = client.responses(b"".join(wire.acquire(0, name, 1, 9) for name in names))
    assert {response.status for response in responses} <= {OK}


def release_all(client: Client, names: Iterable[bytes]) -> None:
    responses = client.responses(b"".join(wire.release(0, name, 1) for name in names))
    assert {response.status for response in responses} <= {OK}
