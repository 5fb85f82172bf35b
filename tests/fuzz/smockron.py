"""Sessions of the smockron protocol agree with the plain model, and the store passes its audit.

Several connections on one small store, at both ports: messages well formed or raw bytes, cut anywhere; a clock
that goes on, a wall clock that is set, rules that change.

Input: operations: a byte whose low half selects the operation, whose next two bits select the connection; and the
operation's arguments."""

from __future__ import annotations

import json
import zlib
from typing import Any

from conformance.smockron.engine import Pump, make_store
from counterd.protocols.smockron import wire
from counterd.protocols.smockron.rules import parse_rules
from counterd.protocols.smockron.wire import SocketType, frame
from fuzz.stream import Source, fenced
from kit.pump import START_NS, UNIX_NS
from property.smockron_model import Model

OPERATIONS_MAX = 100
AUDIT_ONE_IN = 16  # inputs, by their checksum: it looks at the whole region
IDENTIFIERS_MAX = 6
MESSAGE_MAX = 1 << 13
MS = 1_000_000

DOMAINS = [b"fast", b"slow", b"exact", b"none", b"fine", b"unknown"]
PARSED = [
    parse_rules(json.dumps(rules))
    for rules in (
        {
            "fast": {"rate": "100/sec", "burst": 10},
            "slow": {"rate": "1/sec", "burst": 3},
            "exact": {"rate": "7/sec", "burst": 0},
            "none": {"interval": "1 s", "burst": 0},
            "fine": {"rate": "3000/sec", "burst": "1 s"},
        },
        {"fast": {"rate": "1/sec", "burst": 2}, "exact": {"rate": "3/sec", "burst": 2}},
        {"slow": {"interval": "3000 days", "burst": 1}, "unknown": {"rate": "1/s", "burst": 1}},
    )
]
IDENTIFIERS = [b"a", b"b", b"c", b"", b"i" * 24, b"i" * 25, b"i" * 300, b"i" * 4096, b"j" * 4096, b"j" * 4097]
STATUSES = [b"ACCEPTED", b"ACCEPTED", b"ACCEPTED", b"DELAYED", b"REJECTED", b"FORGET", b"accepted"]
STEPS_NS = [0, 1, MS - 1, MS, 10 * MS, 143 * MS, 333 * MS, 1000 * MS, 4000 * MS, 30_000 * MS, 86_400_000 * MS]
PREFIXES = [b"", b"f", b"fast", b"fast\0", b"fast\0x", b"slow\0", b"e", b"p" * 1025]
OFFSETS_MS = [0, 1, -1, 142, 1000, 60_000, 31_622_400_000, 31_622_400_001]

TOKENS = [
    wire.greeting(),
    wire.ready(SocketType.PUB),
    wire.ready(SocketType.SUB),
    wire.subscribe(b"fast\0"),
    wire.cancel(b"fast\0"),
    wire.ping(1, b"context"),
    wire.message(b"fast\0", b"ACCEPTED", b"a", b"0", b"", b""),
    frame(b"\x01fast"),
    b"\x03" + bytes(7) + b"\x04fast",
]


class Rig:
    """One store and its model."""

    def __init__(self) -> None:
        self.bench = Pump(make_store(PARSED[0], identifiers=IDENTIFIERS_MAX, message_max=MESSAGE_MAX))
        self.model = Model(identifiers=IDENTIFIERS_MAX, message_max=MESSAGE_MAX)
        self.model.now_ns = START_NS
        self.model.load_rules(PARSED[0])
        self.model.set_wall(UNIX_NS, START_NS)
        self.pairs: dict[int, tuple[Any, Any, bytearray]] = {}

    def pair(self, number: int) -> tuple[Any, Any, bytearray]:
        """The connection in that slot; odd slots use the control port."""
        if number not in self.pairs:
            peer = self.bench.connect_by_name("control" if number & 1 else "gate")
            self.pairs[number] = (peer, self.model.session(self.bench.now_ns, number & 1), bytearray())
        return self.pairs[number]

    def say(self, number: int, source: Source, data: bytes) -> None:
        peer, model, said = self.pair(number)
        for piece in source.pieces(data):
            peer.take(peer.session.receive(fenced(piece), self.bench.now_ns))
        said += model.receive(data, self.bench.now_ns)
        self.bench.settle()
        self.model.tick(self.bench.now_ns)

    def open(self, number: int, source: Source) -> None:
        kind = SocketType.SUB if number & 1 else SocketType.PUB
        self.say(number, source, wire.greeting() + wire.ready(kind))

    def account(self, number: int, source: Source) -> None:
        bodies = [
            source.choice(DOMAINS) + b"\0" * (source.byte() & 1),
            source.choice(STATUSES),
            source.choice(IDENTIFIERS),
            self.time(source),
            self.time(source),
            b"",
        ]
        self.say(number, source, wire.message(*bodies) * (1 + source.byte() % 12))

    def time(self, source: Source) -> bytes:
        kind = source.byte()
        if kind & 1:
            return source.take(kind >> 5)
        return b"%d" % ((self.bench.now_ns + self.model.wall_ns) // MS + OFFSETS_MS[kind >> 1 & 7])

    def subscribe(self, number: int, source: Source) -> None:
        prefix, how = source.choice(PREFIXES), source.byte()
        if how & 2:
            self.say(number, source, frame(bytes((how & 1,)) + prefix))
        else:
            self.say(number, source, wire.subscribe(prefix) if how & 1 else wire.cancel(prefix))

    def raw(self, number: int, source: Source) -> None:
        self.say(number, source, source.take(source.byte()))

    def close(self, number: int, _source: Source | None = None) -> None:
        if number in self.pairs:
            peer, model, _ = self.pairs.pop(number)
            peer.close()
            model.closed(self.bench.now_ns)

    def advance(self, _number: int, source: Source) -> None:
        self.bench.advance(source.choice(STEPS_NS))
        self.model.tick(self.bench.now_ns)

    def set_clock(self, _number: int, source: Source) -> None:
        unix_ns = self.bench.now_ns + self.model.wall_ns + (source.byte() - 128) * MS
        for store in (self.bench.store, self.model):
            store.set_wall(unix_ns, self.bench.now_ns)

    def change_rules(self, _number: int, source: Source) -> None:
        rules = source.choice(PARSED)
        for store in (self.bench.store, self.model):
            store.load_rules(rules)

    def compare(self) -> None:
        for number, (peer, model, said) in list(self.pairs.items()):
            said.extend(model.take_output(self.bench.now_ns))
            assert bytes(peer.output) == bytes(said)
            assert peer.session.closing == model.closing
            peer.output.clear()
            said.clear()
            if model.closing:
                self.close(number)
        figures, expected = self.bench.store.snapshot(), self.model.snapshot()
        assert {name: figures[name] for name in expected} == expected


OPERATIONS = [
    Rig.account, Rig.account, Rig.account, Rig.raw, Rig.raw, Rig.subscribe, Rig.open, Rig.open,
    Rig.advance, Rig.advance, Rig.set_clock, Rig.change_rules, Rig.close,
]  # fmt: skip


def one_input(data: bytes) -> None:
    """Plays the input; raises on any violation."""
    rig, source = Rig(), Source(data)
    for _ in range(OPERATIONS_MAX):
        if not source:
            break
        what = source.byte()
        OPERATIONS[(what & 15) % len(OPERATIONS)](rig, what >> 4 & 3, source)
        rig.compare()
    if zlib.crc32(data) % AUDIT_ONE_IN == 0:
        rig.bench.store.audit()
    for number in list(rig.pairs):
        rig.close(number)
    assert rig.bench.store.sessions_open == 0
