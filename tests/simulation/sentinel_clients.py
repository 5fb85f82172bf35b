"""What the clients of the sentinel protocol's world ask, and by which rules: requests of every type, some wrong."""

from __future__ import annotations

import struct
from collections import deque
from typing import TYPE_CHECKING, Any, NamedTuple

from counterd.protocols.sentinel import wire
from counterd.protocols.sentinel.rules import FlowRule, ParamRule, Rules
from counterd.protocols.sentinel.wire import MessageType, Status
from property.sentinel_model import KEEP_STRATEGY, MS, RELEASE_STRATEGY, reply
from simulation.world import World

if TYPE_CHECKING:
    from simulation.world import Link

PING, FLOW, PARAM, ACQUIRE, RELEASE, KEEP = (int(kind) for kind in MessageType)
NOTHING = -1  # type of a request that is none
UNKNOWN = 9  # type of requests that no message has
RULES_MAX, ITEMS_MAX = 16, 32
NEVER = 1 << 62
NAMESPACES = ["shop", "bank", "n" * 1013]
BLANKS = [b"", b" ", b"\t\r\n\x1c"]
ITEMS: list[wire.Value] = ["", "a", 7, wire.Typed(wire.Tag.LONG, 7), True, False, 1.5, float("nan"), "v" * 60]
# Values on the wire, and what all that are equal to one have.
VALUES = [(item, item) for item in map(wire.encode_value, ITEMS)]
VALUES += [(b"\6\5", wire.encode_value(True)), (b"\3\xff\xf1" + bytes(6), wire.encode_value(float("nan")))]
RATES, CALLS, PARAMS = (1, 2, 3), (101, 102, 103, 104), (201, 202)


class Request(NamedTuple):
    ends: int  # in the input
    xid: int
    kind: int
    flow_id: int = 0
    count: int = 0
    flag: bool = False
    what: Any = None  # namespace, values, token; or of what is none its reply


class Books:
    """Of one connection."""

    __slots__ = ("armed", "gone", "held", "namespaces", "posts", "queue")

    def __init__(self) -> None:
        self.queue: deque[Request] = deque()  # sent, and not executed
        self.posts: deque[tuple[Request, int, int]] = deque()  # answered by others, and not fetched
        self.namespaces: dict[bytes, None] = {}
        self.held: list[int] = []  # tokens that the client knows to have
        self.gone: int | None = None
        self.armed = NEVER  # when a tick had looked at what it left


class SentinelClients(World):
    """The world's clients and its rules; what comes of that is in sentinel.py."""

    ids: deque[int]  # tokens that were given out lately

    # ---- rules and bounds ----

    def draw_bounds(self) -> None:
        """That may change. interval: of the sweep, now and before."""
        draw = self.random
        before = self.interval if hasattr(self, "bounds") else 0
        self.bounds: dict[str, Any] = {
            "max_allowed_qps": draw.choice((1e9, 1e9, 1e9, 2000.0, 7.0)),
            "sweep_interval_ns": draw.choice((1, 10, 100)) * MS,
            "sweep_max_tokens": draw.choice((0, 0, 1, 30)),
            "sweep_max_duration_ns": draw.choice((0, 1, 50)) * MS,
        }
        self.interval = max(before, self.bounds["sweep_interval_ns"])

    def timing(self) -> None:
        """How long leases are, in which not everything changes with the rules, and who answers."""
        draw = self.random
        self.leases = {}
        for flow_id in (*RATES, *CALLS):
            strategy = draw.choice((0, 1, 2))
            resource = draw.choice((300, 2000) if strategy == KEEP_STRATEGY else (2, 20, 300, 2000))
            self.leases[flow_id] = resource, draw.choice((1, 30, 500)), strategy
        self.shapes = [draw.choice(((10, 1000), (4, 1000), (2, 200), (128, 1280), (1, 10), (5, 20))) for _ in range(2)]
        self.serves = draw.random() < 0.3
        self.judges = draw.random() < 0.3
        self.drains = draw.random() < 0.1
        self.patience_ns = draw.choice((2, 50, 1000)) * MS

    def make_rules(self) -> Rules:
        draw = self.random
        flows = [self.make_flow(flow_id) for flow_id in (*RATES, *CALLS) if draw.random() < 0.9]
        params = []
        for flow_id in PARAMS:
            samples, window = draw.choice(self.shapes)
            items = {wire.encode_value(value): draw.choice((0, 2, 50)) for value in ITEMS if draw.random() < 0.2}
            count = draw.choice((0.0, 1.0, 4.0, 50.0))
            if draw.random() < 0.9:
                params.append(
                    ParamRule(
                        draw.choice(NAMESPACES), flow_id, "p", count, draw.choice((0, 1, 1)), samples, window, items
                    )
                )
        return Rules(tuple(flows), tuple(params))

    def make_flow(self, flow_id: int) -> FlowRule:
        draw = self.random
        resource, offline, strategy = self.leases[flow_id]
        if strategy <= RELEASE_STRATEGY and draw.random() < 0.3:
            resource = draw.choice((2, 20, 300))
        grade = int((flow_id in RATES) == (draw.random() < 0.95))
        count = draw.choice((0.0, 1.0, 2.5, 10.0, 100.0, 1e6) if flow_id in RATES else (0.0, 3.0, 20.0, 500.0, 1e6))
        return FlowRule(
            draw.choice(NAMESPACES), flow_id, "f", grade, count, draw.choice((0, 1, 1)), *draw.choice(self.shapes),
            resource, offline, strategy,
        )  # fmt: skip

    # ---- requests ----

    def compose(self, link: Link) -> bytes:
        data = b""
        for _ in range(self.batch()):
            data += self.request(link, len(data))
        return data

    def request(self, link: Link, before: int) -> bytes:
        draw = self.random.random
        self.xid = xid = (self.xid + 1) & 0x7FFFFFFF
        chance = draw()
        count = 1 + int(draw() * draw() * 6)
        flow_id, flag, what = 0, False, None
        kind = PING
        if chance < 0.08:
            what = self.random.choice(BLANKS if draw() < 0.1 else [name.encode() for name in NAMESPACES])
            data = wire.ping(xid, what)
        elif chance < 0.3:
            kind, flow_id, flag = FLOW, self.flow_id(RATES), draw() < 0.4
            data = wire.flow(xid, flow_id, count, flag)
        elif chance < 0.45:
            kind, flow_id = PARAM, self.flow_id(PARAMS)
            what = self.some_values()
            body = b"".join(raw for raw, _ in what)
            data = wire.frame(xid, PARAM, struct.pack(">qii", flow_id, count, len(what)) + body)
        elif chance < 0.7:
            kind, flow_id, flag = ACQUIRE, self.flow_id(CALLS), draw() < 0.1
            data = wire.acquire(xid, flow_id, count, flag)
        elif chance < 0.97:
            kind = RELEASE if chance < 0.86 else KEEP
            what = self.some_token(link, kind)
            data = (wire.release if kind == RELEASE else wire.keep)(xid, what)
        else:
            kind = NOTHING
            data, what = self.mistake(xid)
        self.ask(link, Request(link.bytes_sent + before + len(data), xid, kind, flow_id, count, flag, what))
        return data

    def ask(self, link: Link, request: Request) -> None:
        link.todo.append(request)
        link.books.queue.append(request)

    def flow_id(self, likely: tuple[int, ...]) -> int:
        if self.random.random() < 0.95:
            return self.random.choice(likely)
        return self.random.choice((*RATES, *CALLS, *PARAMS, 7, 2**63 - 1))

    def some_values(self) -> list[tuple[bytes, bytes]]:
        draw = self.random
        found = []
        for _ in range(draw.choice((1, 1, 1, 2, 3, 12))):
            value = wire.encode_value(int(draw.random() * 400))
            found.append(draw.choice(VALUES) if draw.random() < 0.7 else (value, value))
        return found

    def some_token(self, link: Link, kind: int) -> int:
        """One that it has, or one that somebody has or had, or one that there never was."""
        draw = self.random
        held: list[int] = link.books.held
        chance = draw.random()
        if held and chance < 0.8:
            place = int(draw.random() * len(held))
            return held.pop(place) if kind == RELEASE else held[place]
        if self.ids and chance < 0.97:
            return self.ids[int(draw.random() * len(self.ids))]
        return draw.choice((0, -1, 5, 2**63 - 1))

    def mistake(self, xid: int) -> tuple[bytes, bytes]:
        """What cannot be read, and what is said to that."""
        draw = self.random
        kind = draw.choice((FLOW, PARAM, ACQUIRE, RELEASE, KEEP, 6, 127))
        chance = draw.random()
        if chance < 0.2:
            size = draw.choice((1023, 1024, 5000))
            return wire.frame(xid, kind, bytes(size - 5)), reply(xid, kind, Status.BAD_REQUEST)
        if chance < 0.3:
            size = draw.randrange(5)
            return size.to_bytes(2, "big") + bytes(size), reply(0, 0, Status.BAD_REQUEST)
        if chance < 0.5:
            body = draw.choice((b"\0", b"\0\0\0\5shop", b"\xff\xff\xff\xff"))
            return wire.frame(xid, PING, body), reply(xid, PING, Status.BAD_REQUEST)
        if chance < 0.7:
            kind = draw.choice((FLOW, PARAM, ACQUIRE))
            flow_id, count = draw.choice(((0, 1), (-1, 1), (101, 0), (201, -5)))
            return wire.frame(xid, kind, struct.pack(">qii", flow_id, count, 0)), reply(xid, kind, Status.BAD_REQUEST)
        if chance < 0.85:
            body = struct.pack(">qii", 201, 1, draw.choice((0, -1, 3, 2**31 - 1)))
            body += draw.choice((b"", b"\0", b"\x09\0"))
            return wire.frame(xid, PARAM, body), reply(xid, PARAM, Status.BAD_REQUEST)
        return wire.frame(xid, kind, bytes(draw.randrange(8))), reply(xid, kind, Status.BAD_REQUEST)

    def nonsense(self, link: Link) -> bytes:
        """There is none: it is a frame of which the rest never comes."""
        return b"\0\xff\1"
