"""What the counter room answers, said a second time: with dicts and lists, nothing clever, no bound it does not need.

`Model` predicts every byte of every answer, and the store's figures, the order in which idle counters are reclaimed
included, so that a test can compare after each step. How much of what was asked is answered in one call is the engine's
business: the model follows as far as the output goes, and insists that nothing is left when the engine says so. Stats
alone is not modelled: its figures are.

`Client` is the other half: it drives a session of the real store in memory, as net would, and audits after each call.
"""

from __future__ import annotations

import struct
from collections import Counter as Tally
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from counterd.protocols.counter import wire
from counterd.protocols.counter._session import open_store
from counterd.protocols.counter._tables import HoldersWalk

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from counterd._core import Session, Store
    from counterd.protocols.counter._store import CounterStore

KEY = bytes(range(16))

# The engine's bounds that can be seen from outside: _core.pxd says why each is what it is.
NAME_INLINE, NAME_PREFIX, BLOCK_PAYLOAD, BLOCK_SIZE = 36, 28, 60, 64
RECORD_SIZE, HOLDING_SIZE = 64, 32
OUTPUT_MAX, REPLY_MAX = 262144, 65573
RECLAIM_STEPS = 64
BODY_MAX = 65545
# No tick gives back or sweeps more than this.
SLICE_STEPS_MAX = 4096
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
LIMITS = 0x01
BEFORE_NAME = {GET: 2, ACQUIRE: 10, RELEASE: 6}


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
    walk = HoldersWalk(store, name, 1 << 30)
    while not walk.step():
        pass
    return [row[:3] for row in walk.rows()]


def blocks_needed(name: bytes) -> int:
    """Blocks of name memory that a name takes."""
    return 0 if len(name) <= NAME_INLINE else -(-(len(name) - NAME_PREFIX) // BLOCK_PAYLOAD)


def frames_of(stream: bytes) -> Iterator[bytes]:
    """The complete frames at the start of a stream of requests or responses."""
    start = 0
    while len(stream) >= start + 12:
        end = start + 12 + int.from_bytes(stream[start + 4 : start + 8], "big")
        if end > len(stream):
            return
        yield stream[start:end]
        start = end


# ---- the model ------------------------------------------------------------------------------------------------------


@dataclass
class ModelCounter:
    """A record in use, and what is in it."""

    name: bytes
    number: int
    consumption: int = 0
    peak: int = 0
    limit: int = 0
    window: int = -1
    in_ring: bool = False
    since: int = 0  # the call from which on it has existed


@dataclass
class ModelDump:
    """A Dump under way. since: the call in which it may have begun; last: the number of the last record it named."""

    opaque: bytes
    limits: bool
    since: int
    last: int = 0


@dataclass(eq=False)
class ModelSession:
    """A connection. holdings: amounts by name; a new one goes to the end, and they are given back from there."""

    holdings: dict[bytes, int] = field(default_factory=dict)
    kept: bytes = b""
    dump: ModelDump | None = None
    head_since: int | None = None  # the call since which the first request in kept may have been under way
    more: bool = False
    closing: bool = False
    ended: bool = False
    left: bool = False
    open: bool = True


UNMODELLED = range(0x20, 0x27)  # opcodes


@dataclass
class Parsed:
    """One request. status: what parsing already decided; breaks: framing is lost with it."""

    size: int
    magic: int
    opcode: int
    flags: int
    opaque: bytes
    status: int
    breaks: bool = False
    name: bytes = b""
    resources: int = 0
    maximum: int = 0


class Unmodelled(Exception):
    """A request that this model does not know: Takes have one of their own, takes_model.py."""


def parse(data: bytes) -> Parsed | None:
    """The first request of data, or None if more bytes are needed. Raises Unmodelled."""
    if len(data) < 12:
        return None
    magic, opcode, flags, _, length = struct.unpack_from(">BBBBI", data)
    if magic == 0x90 and opcode in UNMODELLED:
        raise Unmodelled
    status = INVALID if opcode in COMMANDS or magic != 0x90 else UNKNOWN
    request = Parsed(12, magic, opcode, flags, data[8:12], status)
    request.breaks = magic != 0x90 or length > BODY_MAX
    if request.breaks:
        return request
    if len(data) < 12 + length:
        return None
    request.size += length
    if opcode in BEFORE_NAME:
        parse_body(request, data[12 : 12 + length])
    elif opcode in COMMANDS and length == 0:
        request.status = OK
    return request


def parse_body(request: Parsed, body: bytes) -> None:
    """Get, Acquire and Release: its numbers, the length of the name, the name, and nothing else."""
    fixed = BEFORE_NAME[request.opcode]
    request.name = body[fixed:]
    if not request.name or int.from_bytes(body[fixed - 2 : fixed], "big") != len(request.name):
        return
    if request.opcode != GET:
        request.resources = int.from_bytes(body[:4], "big")
    if request.opcode == ACQUIRE:
        request.maximum = int.from_bytes(body[4:8], "big")
        if not 0 < request.resources <= request.maximum:
            return
    request.status = OK


class Model:
    """A store and its sessions."""

    def __init__(self, buckets: int, holdings: int, holdings_per_connection: int, name_memory: int) -> None:
        self.buckets = buckets
        self.holdings_max = holdings
        self.per_connection = holdings_per_connection or holdings
        self.blocks_max = name_memory // BLOCK_SIZE
        self.window = 0
        self.counters: dict[bytes, ModelCounter] = {}
        self.numbered: dict[int, ModelCounter] = {}
        self.free: list[int] = []
        self.fresh = 0
        self.ring: deque[ModelCounter] = deque()
        self.sweep_left = 0
        self.leaving: deque[ModelSession] = deque()
        self.sessions: list[ModelSession] = []
        self.sessions_total = 0
        self.tally: Tally[str] = Tally()
        self.outcomes: Tally[tuple[str, str]] = Tally()
        self.draining = False
        self.parting = False  # also while it drains
        self.calls = 0

    # -- sessions --

    def session(self) -> ModelSession:
        session = ModelSession()
        self.sessions.append(session)
        self.sessions_total += 1
        return session

    def receive(self, session: ModelSession, said: bytes, more: bool, data: bytes) -> None:
        """Compares what a session said to data, and whether it has more to say."""
        self.calls += 1
        self.tally["bytes_in"] += len(data)
        if session.closing or session.ended:
            assert said == b""
            return
        session.kept += data
        if session.more:
            assert (said, more) == (b"", True)
            return
        self._follow(session, said, more)

    def take_output(self, session: ModelSession, said: bytes, more: bool) -> None:
        self.calls += 1
        if session.closing or not session.more:
            assert said == b""
            return
        self._follow(session, said, more)

    def eof(self, session: ModelSession, said: bytes, more: bool) -> None:
        self.calls += 1
        assert said == b""
        if not session.closing:
            session.ended = True
            self._settle(session, more)

    def closed(self, session: ModelSession) -> None:
        session.closing = True
        session.more = False
        session.kept = b""
        self._leave(session)
        if session.open:
            session.open = False
            self.sessions.remove(session)

    def _follow(self, session: ModelSession, said: bytes, more: bool) -> None:
        """Answers as many requests, in order, as the session did, and all there are if it has no more to say."""
        assert len(said) <= OUTPUT_MAX + REPLY_MAX
        self.tally["bytes_out"] += len(said)
        rest = memoryview(said)
        while not session.closing:
            if session.dump is None:
                request = parse(session.kept)
                if request is None or (more and not rest):
                    break
                since = self.calls if session.head_since is None else session.head_since
                session.head_since = None
                session.kept = session.kept[request.size :]
                if request.opcode == DUMP and request.status == OK:
                    self.tally["command:dump"] += 1
                    self.outcomes["dump", "ok"] += 1
                    session.dump = ModelDump(request.opaque, bool(request.flags & LIMITS), since)
                    continue
                reply = self._execute(session, request)
                session.closing = request.breaks
            elif more and not rest:
                break
            else:
                reply = self._next_of_dump(session, session.dump, rest)
            assert bytes(rest[: len(reply)]) == reply
            rest = rest[len(reply) :]
        assert not rest
        self._settle(session, more)

    def _settle(self, session: ModelSession, more: bool) -> None:
        """What a call leaves behind."""
        if more and session.dump is None and session.head_since is None:
            session.head_since = self.calls
        session.more = more
        waiting = session.dump is not None or parse(session.kept) is not None
        assert more or not waiting or session.closing
        assert not more or session.dump is not None or session.kept
        if session.ended and parse(session.kept) is None:
            self._leave(session)
            session.closing = session.closing or not more
        if session.closing:
            assert not more
            session.kept = b""
            self._leave(session)

    def _leave(self, session: ModelSession) -> None:
        if not session.left:
            session.left = True
            if session.holdings:
                self.leaving.append(session)

    # -- requests --

    def _execute(self, session: ModelSession, request: Parsed) -> bytes:
        """Does what is asked, and answers. Not for Dump."""
        status, body = request.status, b""
        if status == OK:
            self.tally[f"command:{COMMANDS[request.opcode]}"] += 1
            if request.opcode == ACQUIRE:
                status = NOT_AVAILABLE if self.draining else self._acquire(session, request)
                body = struct.pack(">I", request.resources)
            elif request.opcode == RELEASE:
                status = self._release(session, request)
            elif request.opcode == GET:
                counter = self.find(request.name)
                status = OK if counter else NOT_FOUND
                body = struct.pack(">I", counter.consumption) if counter else b""
        if status != OK:
            body = b"Draining" if self.parting and status == NOT_AVAILABLE else TEXTS[status]
            self.tally[f"refused:{REFUSALS[status]}"] += 1
        operation = "unknown" if request.magic != 0x90 else COMMANDS.get(request.opcode, "unknown")
        self.outcomes[operation, REFUSALS.get(status, "ok")] += 1
        return self._reply(request.opcode, status, request.opaque, body)

    @staticmethod
    def _reply(opcode: int, status: int, opaque: bytes, body: bytes) -> bytes:
        return struct.pack(">BBBBI4s", 0x91, opcode, status, 0, len(body), opaque) + body

    def _next_of_dump(self, session: ModelSession, dump: ModelDump, rest: memoryview) -> bytes:
        """The response that names the same counter as the one in rest, or the end.

        Counters come in the order of their records; none is left out that has existed since the Dump began.
        """
        size = int.from_bytes(rest[4:8], "big")
        end = 12 + size - (4 if dump.limits else 0)
        named = self.counters.get(bytes(rest[22:end])) if size else None
        assert named is not None or not size
        for number in sorted(self.numbered):
            counter = self.numbered[number]
            if dump.last < number and (named is None or number < named.number) and self.exists(counter):
                assert counter.since > dump.since, f"{counter} is missing"
        if named is None:
            session.dump = None
            return self._reply(DUMP, OK, dump.opaque, b"")
        assert named.number > dump.last
        assert self.exists(named)
        dump.last = named.number
        body = struct.pack(">IIH", named.consumption, self._peak(named), len(named.name)) + named.name
        if dump.limits:
            body += struct.pack(">I", named.limit)
        return self._reply(DUMP, OK, dump.opaque, body)

    def _acquire(self, session: ModelSession, request: Parsed) -> int:
        counter = self.counters.get(request.name)
        if counter:
            counter.limit = request.maximum
            if counter.consumption + request.resources > request.maximum:
                return NOT_AVAILABLE
        if request.name not in session.holdings and self._ledger_is_full(session):
            return NO_MEMORY
        if counter is None:
            counter = self._create(request.name)
            if counter is None:
                return NO_MEMORY
            counter.limit = request.maximum
            self.tally["total_objects"] += 1
        elif not self.exists(counter):
            self.tally["total_objects"] += 1
            counter.since = self.calls
        session.holdings[request.name] = session.holdings.get(request.name, 0) + request.resources
        counter.peak = max(self._peak(counter), counter.consumption + request.resources)
        counter.consumption += request.resources
        counter.window = self.window
        return OK

    def _release(self, session: ModelSession, request: Parsed) -> int:
        if not self.find(request.name):
            return NOT_FOUND
        if session.holdings.get(request.name, 0) < request.resources:
            return NOT_ACQUIRED
        if request.resources:
            session.holdings[request.name] -= request.resources
            if session.holdings[request.name] == 0:
                del session.holdings[request.name]
            self._restore(self.counters[request.name], request.resources)
        return OK

    # -- counters --

    def exists(self, counter: ModelCounter) -> bool:
        return counter.consumption > 0 or counter.window == self.window

    def find(self, name: bytes) -> ModelCounter | None:
        counter = self.counters.get(name)
        return counter if counter and self.exists(counter) else None

    def holdings_used(self) -> int:
        return sum(len(session.holdings) for session in {*self.sessions, *self.leaving})

    def blocks_used(self) -> int:
        return sum(map(blocks_needed, self.counters))

    def _ledger_is_full(self, session: ModelSession) -> bool:
        return self.holdings_used() >= self.holdings_max or len(session.holdings) >= self.per_connection

    def _peak(self, counter: ModelCounter) -> int:
        return counter.peak if counter.window == self.window else counter.consumption

    def _restore(self, counter: ModelCounter, resources: int) -> None:
        counter.peak = self._peak(counter)
        counter.window = self.window
        counter.consumption -= resources
        if counter.consumption == 0 and not counter.in_ring:
            self._ring_push(counter)

    def _make_room(self, blocks: int) -> bool:
        """Reclaims the oldest idle counters that help, if there is no record or not enough name memory."""
        if blocks > self.blocks_max:
            return False
        for step in range(RECLAIM_STEPS + 1):
            records_short = len(self.counters) >= self.buckets
            blocks_short = self.blocks_used() + blocks > self.blocks_max
            if not records_short and not blocks_short:
                return True
            if step == RECLAIM_STEPS or not self.ring:
                break
            idle = self._ring_pop()
            if idle.consumption:
                continue
            if blocks_short and not blocks_needed(idle.name):
                self._ring_push(idle)
                continue
            self.tally["reclaimed" if self.exists(idle) else "expired"] += 1
            self._free(idle)
        droppable = any(counter.consumption or not self.exists(counter) for counter in self.ring)
        if self.sweep_left == 0 and (records_short or droppable):
            self.sweep_left = len(self.ring)
        return False

    def _create(self, name: bytes) -> ModelCounter | None:
        if not self._make_room(blocks_needed(name)):
            return None
        if self.free:
            number = self.free.pop()
        else:
            self.fresh += 1
            number = self.fresh
        counter = self.counters[name] = self.numbered[number] = ModelCounter(name, number, since=self.calls)
        return counter

    def _free(self, counter: ModelCounter) -> None:
        del self.counters[counter.name]
        del self.numbered[counter.number]
        self.free.append(counter.number)

    def _ring_push(self, counter: ModelCounter) -> None:
        counter.in_ring = True
        self.ring.append(counter)

    def _ring_pop(self) -> ModelCounter:
        counter = self.ring.popleft()
        counter.in_ring = False
        self.sweep_left = min(self.sweep_left, len(self.ring))
        return counter

    # -- time --

    def next_deadline(self) -> int:
        return 0 if self.leaving or self.sweep_left else -1

    def begin_window(self, number: int) -> None:
        if number > self.window:
            self.window = number
            self.sweep_left = len(self.ring)

    def tick(self) -> None:
        """For stores so small that one slice is enough."""
        assert self.holdings_used() + len(self.ring) < 1000
        while self.leaving:
            holdings = self.leaving[0].holdings
            if holdings:
                name, amount = holdings.popitem()
                self.tally["given_back"] += 1
                self._restore(self.counters[name], amount)
            else:
                self.leaving.popleft()
        if self.sweep_left == 0:
            return
        while self.sweep_left:
            self.sweep_left -= 1
            counter = self._ring_pop()
            if counter.consumption == 0:
                if self.exists(counter):
                    self._ring_push(counter)
                else:
                    self.tally["expired"] += 1
                    self._free(counter)
        self.tally["gc_count"] += 1

    # -- figures --

    def figures(self) -> dict[str, int]:
        """Those of the store's that do not depend on where names hash to, or on how the region is laid out."""
        busy = sum(counter.consumption > 0 for counter in self.counters.values())
        objects = sum(map(self.exists, self.counters.values()))
        records, holdings, blocks = len(self.counters), self.holdings_used(), self.blocks_used()
        counted = ["total_objects", "gc_count", "bytes_in", "bytes_out", "reclaimed", "expired", "given_back"]
        counted += [f"command:{name}" for name in COMMANDS.values()]
        counted += [f"refused:{name}" for name in REFUSALS.values()]
        return {
            **{name: self.tally[name] for name in counted},
            "objects": objects,
            "busy": busy,
            "idle": objects - busy,
            "records": records,
            "buckets": self.buckets,
            "holdings": holdings,
            "holdings_max": self.holdings_max,
            "holdings_leaving": sum(len(session.holdings) for session in self.leaving),
            "name_memory": blocks * BLOCK_SIZE,
            "name_memory_max": self.blocks_max * BLOCK_SIZE,
            "used_memory": records * RECORD_SIZE + holdings * HOLDING_SIZE + blocks * BLOCK_SIZE,
            "curr_connections": len(self.sessions),
            "total_connections": self.sessions_total,
            "window": self.window,
        }


# ---- the real one ---------------------------------------------------------------------------------------------------


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
