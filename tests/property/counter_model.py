"""What the counter protocol answers, said a second time: with dicts and lists, nothing clever, no needless bound.

`Model` predicts every byte of every answer, and the store's figures, the order in which idle counters are reclaimed
included, so that a test can compare after each step. How much of what was asked is answered in one call is the engine's
business: the model follows as far as the output goes, and insists that nothing is left when the engine says so. Of
Stats only the form is looked at: its figures are those that are compared.

The property test, the fuzzer and the simulation hold the engine against it.
"""

from __future__ import annotations

import struct
from collections import Counter as Tally
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from counterd.protocols.counter import wire
from kit.counters import (
    ACQUIRE,
    BLOCK_PAYLOAD,
    BLOCK_SIZE,
    BODY_MAX,
    COMMANDS,
    DUMP,
    GET,
    HOLDING_SIZE,
    INVALID,
    NAME_INLINE,
    NAME_PREFIX,
    NO_MEMORY,
    NOT_ACQUIRED,
    NOT_AVAILABLE,
    NOT_FOUND,
    OK,
    OUTPUT_MAX,
    RECLAIM_STEPS,
    RECORD_SIZE,
    REFUSALS,
    RELEASE,
    REPLY_MAX,
    SLICE_STEPS,
    STATS,
    TEXTS,
    UNKNOWN,
)  # fmt: skip

if TYPE_CHECKING:
    from counterd._core import Session
    from counterd.protocols.counter._store import CounterStore

LIMITS = 0x01
BODIES = {GET: struct.Struct(">H"), ACQUIRE: struct.Struct(">IIH"), RELEASE: struct.Struct(">IH")}
UNMODELLED = range(0x20, 0x27)  # opcodes
STATS_MIN = 30  # lines

HEADER = struct.Struct(">BBBBI4s").unpack_from
REPLY = struct.Struct(">BBBBI4s").pack


def blocks_needed(name: bytes) -> int:
    """Blocks of name memory that a name takes."""
    return 0 if len(name) <= NAME_INLINE else -(-(len(name) - NAME_PREFIX) // BLOCK_PAYLOAD)


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

    request: Parsed
    since: int
    last: int = 0


@dataclass(eq=False)
class ModelSession:
    """A connection. holdings: amounts by name; a new one goes to the end, and they are given back from there."""

    holdings: dict[bytes, int] = field(default_factory=dict)
    requests: int = 0  # that were executed, or begun
    kept: bytes = b""
    dump: ModelDump | None = None
    head_since: int = 0  # the call since which the first request in kept may have been under way, or 0
    more: bool = False
    closing: bool = False
    ended: bool = False
    left: bool = False
    open: bool = True


class Parsed:
    """One request. status: what parsing already decided, and then the answer's; breaks: framing is lost with it.

    opcode: None if the bytes are no request; then answered_as has what stands in its place.
    """

    breaks = False
    name = b""
    resources = maximum = answered_as = 0

    def __init__(self, size: int, opcode: int | None, flags: int, opaque: bytes, status: int) -> None:
        self.size = size
        self.opcode = opcode
        self.flags = flags
        self.opaque = opaque
        self.status = status


class Unmodelled(Exception):
    """A request that this model does not know: Takes have one of their own, takes_model.py."""


def parse(data: bytes, start: int = 0) -> Parsed | None:
    """The first request of data from there on, or None if more bytes are needed. Raises Unmodelled."""
    left = len(data) - start
    if left < 12:
        return None
    magic, opcode, flags, _, length, opaque = HEADER(data, start)
    if magic != 0x90:
        request = Parsed(12, None, flags, opaque, INVALID)
        request.breaks, request.answered_as = True, opcode
        return request
    if opcode in UNMODELLED:
        raise Unmodelled
    request = Parsed(12 + length, opcode, flags, opaque, INVALID if opcode in COMMANDS else UNKNOWN)
    if length > BODY_MAX:
        request.breaks = True
    elif left < 12 + length:
        return None
    elif opcode in BODIES:
        parse_body(request, data, start + 12, length)
    elif opcode in COMMANDS and length == 0:
        request.status = OK
    return request


def parse_body(request: Parsed, data: bytes, start: int, length: int) -> None:
    """Get, Acquire and Release: its numbers, the length of the name, the name, and nothing else."""
    body = BODIES[request.opcode]
    fixed = body.size
    if length <= fixed:
        return
    request.name = data[start + fixed : start + length]
    numbers = body.unpack_from(data, start)
    if numbers[-1] != length - fixed:
        return
    if request.opcode != GET:
        request.resources, request.maximum = numbers[:2]
    if request.opcode != ACQUIRE or 0 < request.resources <= request.maximum:
        request.status = OK


class Model:
    """A store and its sessions."""

    def __init__(self, buckets: int, holdings: int, holdings_per_connection: int, name_memory: int) -> None:
        self.buckets = buckets
        self.holdings_max = holdings
        self.blocks_max = name_memory // BLOCK_SIZE
        self.limit_holdings(holdings_per_connection)
        self.window = 0
        self.counters: dict[bytes, ModelCounter] = {}
        self.numbered: dict[int, ModelCounter] = {}
        self.free: list[int] = []
        self.fresh = 0
        self.holdings_used = self.blocks_used = 0
        self.ring: deque[ModelCounter] = deque()
        self.sweep_left = 0
        self.leaving: deque[ModelSession] = deque()
        self.sessions: set[ModelSession] = set()
        self.sessions_total = 0
        self.tally: Tally[str] = Tally()
        self.outcomes: Tally[tuple[int | None, int]] = Tally()  # answers by opcode and status
        self.draining = False
        self.parting = False  # also while it drains
        self.calls = 0

    # -- sessions --

    def session(self) -> ModelSession:
        session = ModelSession()
        self.sessions.add(session)
        self.sessions_total += 1
        return session

    def follow(
        self, session: ModelSession, real: Session, method: str, said: bytes, *data: bytes
    ) -> list[tuple[int, Parsed]]:
        """Compares what a real session said to a call, and how it stands.

        Returns the requests that were answered to their end, each with the position in what was said at which that is.
        """
        answers: list[tuple[int, Parsed]] = getattr(self, method)(session, said, real.more, *data)
        assert real.more == session.more
        assert real.closing == session.closing
        begun = real.requests - session.requests
        if begun:  # a Dump may have begun without a word
            head = parse(session.kept) if session.more and session.dump is None else None
            assert head is not None
            assert (begun, head.opcode, head.status) == (1, DUMP, OK)
        return answers

    def receive(self, session: ModelSession, said: bytes, more: bool, data: bytes) -> list[tuple[int, Parsed]]:
        """Compares what a session said to data, and whether it has more to say."""
        self.calls += 1
        self.tally["bytes_in"] += len(data)
        if session.closing or session.ended:
            assert said == b""
            return []
        session.kept += data
        if session.more:
            assert (said, more) == (b"", True)
            return []
        return self._follow(session, said, more)

    def take_output(self, session: ModelSession, said: bytes, more: bool) -> list[tuple[int, Parsed]]:
        self.calls += 1
        if session.closing or not session.more:
            assert said == b""
            return []
        return self._follow(session, said, more)

    def eof(self, session: ModelSession, said: bytes, more: bool) -> list[tuple[int, Parsed]]:
        self.calls += 1
        assert said == b""
        if not session.closing:
            session.ended = True
            self._settle(session, more)
        return []

    def closed(self, session: ModelSession) -> None:
        session.closing = True
        session.more = False
        session.kept = b""
        self._leave(session)
        if session.open:
            session.open = False
            self.sessions.remove(session)

    def _follow(self, session: ModelSession, said: bytes, more: bool) -> list[tuple[int, Parsed]]:
        """Answers as many requests, in order, as the session did, and all there are if it has no more to say."""
        assert len(said) <= OUTPUT_MAX + REPLY_MAX
        self.tally["bytes_out"] += len(said)
        answers = []
        taken = at = 0
        kept, size = session.kept, len(said)
        while not session.closing and not (more and at == size):
            if session.dump is None:
                request = parse(kept, taken) if taken < len(kept) else None
                if request is None:
                    break
                since, session.head_since = session.head_since or self.calls, 0
                taken += request.size
                session.requests += 1
                if request.opcode == DUMP and request.status == OK:
                    self.outcomes[DUMP, OK] += 1
                    session.dump = ModelDump(request, since)
                    continue
                reply = self._stats(request, said, at) if request.opcode == STATS else b""
                reply = reply or self._execute(session, request)
                session.closing = request.breaks
            else:
                request = session.dump.request
                reply = self._next_of_dump(session, session.dump, said, at)
            assert said.startswith(reply, at), (request, said[at : at + len(reply) + 12], reply)
            at += len(reply)
            if session.dump is None:
                answers.append((at, request))
        assert at == size
        session.kept = kept[taken:]
        self._settle(session, more)
        return answers

    def _settle(self, session: ModelSession, more: bool) -> None:
        """What a call leaves behind."""
        if more and session.dump is None and not session.head_since:
            session.head_since = self.calls
        session.more = more
        is_whole = bool(session.kept) and parse(session.kept) is not None
        assert more or not (is_whole or session.dump) or session.closing
        assert not more or session.dump is not None or session.kept
        if session.ended and not is_whole:
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
        opcode, status, body = request.opcode, request.status, b""
        if status == OK:
            if opcode == ACQUIRE:
                status = NOT_AVAILABLE if self.draining else self._acquire(session, request)
                body = request.resources.to_bytes(4, "big")
            elif opcode == RELEASE:
                status = self._release(session, request)
            elif opcode == GET:
                counter = self.find(request.name)
                status = OK if counter else NOT_FOUND
                body = counter.consumption.to_bytes(4, "big") if counter else b""
        if status != OK:
            body = b"Draining" if self.parting and status == NOT_AVAILABLE else TEXTS[status]
            request.status = status
        self.outcomes[opcode, status] += 1
        return self._reply(request.answered_as if opcode is None else opcode, status, request.opaque, body)

    @staticmethod
    def _reply(opcode: int, status: int, opaque: bytes, body: bytes) -> bytes:
        return REPLY(0x91, opcode, status, 0, len(body), opaque) + body

    def _stats(self, request: Parsed, said: bytes, at: int) -> bytes:
        """The response that was given, which has to have the form of one; nothing if the request is to be refused."""
        if request.status != OK:
            return b""
        self.outcomes[STATS, OK] += 1
        body = said[at + 12 : at + 12 + int.from_bytes(said[at + 4 : at + 8], "big")]
        assert len(wire.decode_stats(body)) > STATS_MIN
        return self._reply(STATS, OK, request.opaque, body)

    def _next_of_dump(self, session: ModelSession, dump: ModelDump, said: bytes, at: int) -> bytes:
        """The response that names the same counter as the one that was given, or the end.

        Counters come in the order of their records; none is left out that has existed since the Dump began.
        """
        limits, opaque = dump.request.flags & LIMITS, dump.request.opaque
        size = int.from_bytes(said[at + 4 : at + 8], "big")
        end = at + 12 + size - (4 if limits else 0)
        named = self.counters.get(said[at + 22 : end]) if size else None
        assert named is not None or not size
        for number in range(dump.last + 1, named.number if named else self.fresh + 1):
            counter = self.numbered.get(number)
            assert counter is None or not self.exists(counter) or counter.since > dump.since, f"{counter} is missing"
        if named is None:
            session.dump = None
            return self._reply(DUMP, OK, opaque, b"")
        assert named.number > dump.last
        assert self.exists(named)
        dump.last = named.number
        body = struct.pack(">IIH", named.consumption, self._peak(named), len(named.name)) + named.name
        if limits:
            body += struct.pack(">I", named.limit)
        return self._reply(DUMP, OK, opaque, body)

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
        self.holdings_used += request.name not in session.holdings
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
                self.holdings_used -= 1
            self._restore(self.counters[request.name], request.resources)
        return OK

    # -- counters --

    def exists(self, counter: ModelCounter) -> bool:
        return counter.consumption > 0 or counter.window == self.window

    def find(self, name: bytes) -> ModelCounter | None:
        counter = self.counters.get(name)
        return counter if counter and self.exists(counter) else None

    def _ledger_is_full(self, session: ModelSession) -> bool:
        return self.holdings_used >= self.holdings_max or len(session.holdings) >= self.per_connection

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
            blocks_short = self.blocks_used + blocks > self.blocks_max
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
        self.blocks_used += blocks_needed(name)
        return counter

    def _free(self, counter: ModelCounter) -> None:
        del self.counters[counter.name]
        del self.numbered[counter.number]
        self.blocks_used -= blocks_needed(counter.name)
        self.free.append(counter.number)

    def _ring_push(self, counter: ModelCounter) -> None:
        counter.in_ring = True
        self.ring.append(counter)

    def _ring_pop(self) -> ModelCounter:
        counter = self.ring.popleft()
        counter.in_ring = False
        self.sweep_left = min(self.sweep_left, len(self.ring))
        return counter

    # -- what is done to it --

    def limit_holdings(self, holdings: int) -> None:
        self.per_connection = holdings or self.holdings_max

    def begin_drain(self) -> None:
        self.draining = self.parting = True

    def part(self) -> None:
        self.parting = True

    def next_deadline(self) -> int:
        return 0 if self.leaving or self.sweep_left else -1

    def begin_window(self, number: int) -> None:
        if number > self.window:
            self.window = number
            self.sweep_left = len(self.ring)

    def tick(self) -> None:
        """Gives back and sweeps a slice of what is due, in the engine's order."""
        steps = SLICE_STEPS
        while self.leaving and steps:
            holdings = self.leaving[0].holdings
            if holdings:
                steps -= 1
                name, amount = holdings.popitem()
                self.holdings_used -= 1
                self.tally["given_back"] += 1
                self._restore(self.counters[name], amount)
            else:
                self.leaving.popleft()
        if not self.sweep_left or not steps:
            return
        while self.sweep_left and steps:
            steps -= 1
            self.sweep_left -= 1
            counter = self._ring_pop()
            if counter.consumption == 0:
                if self.exists(counter):
                    self._ring_push(counter)
                else:
                    self.tally["expired"] += 1
                    self._free(counter)
        self.tally["gc_count"] += not self.sweep_left

    # -- figures --

    def figures(self) -> dict[str, int]:
        """Those of the store's that do not depend on where names hash to, or on how the region is laid out."""
        busy = sum(counter.consumption > 0 for counter in self.counters.values())
        objects = sum(map(self.exists, self.counters.values()))
        records, holdings, blocks = len(self.counters), self.holdings_used, self.blocks_used
        counted = ("total_objects", "gc_count", "bytes_in", "bytes_out", "reclaimed", "expired", "given_back")
        requests = {f"command:{name}": 0 for name in COMMANDS.values()}
        refusals = {f"refused:{name}": 0 for name in REFUSALS.values()}
        for (opcode, status), count in self.outcomes.items():
            if status != OK:
                refusals[f"refused:{REFUSALS[status]}"] += count
            if status != INVALID and opcode in COMMANDS:
                requests[f"command:{COMMANDS[opcode]}"] += count
        return {
            **requests,
            **refusals,
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

    def named_outcomes(self) -> Tally[tuple[str, str]]:
        named: Tally[tuple[str, str]] = Tally()
        for (opcode, status), count in self.outcomes.items():
            named[COMMANDS.get(opcode, "unknown"), REFUSALS.get(status, "ok")] += count
        return named

    def agrees(self, store: CounterStore) -> None:
        """Holds all that a store tells of itself against what is here."""
        expected = self.figures()
        if any(session.more and session.dump is None for session in self.sessions):
            del expected["command:dump"]  # one may have begun without a word
        else:
            told = Tally({(operation, how): count for operation, how, count in store.outcomes()})
            assert told == self.named_outcomes()
        snapshot = store.snapshot()
        assert {name: snapshot[name] for name in expected} == expected
        assert store.next_deadline() == self.next_deadline()
        leases = store.leases(self.holdings_max)
        assert len(leases) == store.held()
        assert sorted((name, amount) for _, name, amount, _ in leases) == sorted(
            lease for session in {*self.sessions, *self.leaving} for lease in session.holdings.items()
        )
        assert all(store.holdings_of(number) == n for number, n in Tally(lease[0] for lease in leases).items())
