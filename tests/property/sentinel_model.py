"""What the sentinel protocol does, said a second time: with dicts and lists, nothing clever, and no bound on memory.

`Model` answers requests one by one; the ids of tokens it is given. What a sweep has freed it is told, as when there are
sweeps is the store's affair: it says which tokens can have been freed, and which must be by now. It is a store by
the contract too, whose sweeps come at once, so that the vectors can be played to it: then both say the same.
"""

from __future__ import annotations

import math
import struct
from collections import Counter as Tally
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from counterd.protocols.sentinel.wire import FRAME_MAX, NAMESPACE_MAX, MessageType, Status, Tag

if TYPE_CHECKING:
    from collections.abc import Iterator

    from counterd.protocols.sentinel.rules import FlowRule, ParamRule, Rules

PING, FLOW, PARAM, ACQUIRE, RELEASE, KEEP = MessageType
CONCURRENCY, QPS = 0, 1  # grades
GLOBAL = 1  # threshold type
RELEASE_STRATEGY, KEEP_STRATEGY = 1, 2
NAMESPACES_MAX = 64  # of a connection
LIMITER = (10, 1000)  # samples, ms
MS = 1_000_000
TICK_NS = 1 << 20  # of the wheel: so much later a lease may be seen to be over
INT32_MAX = (1 << 31) - 1
TYPE_NAMES = [type.name.lower() for type in MessageType]

STATUS_NAMES = {
    Status.BAD_REQUEST: "bad_request",
    Status.TOO_MANY_REQUESTS: "too_many_requests",
    Status.FAIL: "fail",
    Status.OK: "ok",
    Status.BLOCKED: "blocked",
    Status.SHOULD_WAIT: "should_wait",
    Status.NO_RULE: "no_rule",
    Status.NOT_AVAILABLE: "not_available",
    Status.RELEASE_OK: "release_ok",
    Status.ALREADY_RELEASED: "already_released",
}

# After the status, for those that tell something whatever it is: that, or zeros.
BODIES: dict[int, str] = {FLOW: ">ii", PARAM: ">ii", ACQUIRE: ">q", KEEP: ">i"}
SIZES = {Tag.INTEGER: 4, Tag.LONG: 8, Tag.BYTE: 1, Tag.DOUBLE: 8, Tag.FLOAT: 4, Tag.SHORT: 2, Tag.BOOLEAN: 1}


# ---- requests -------------------------------------------------------------------------------------------------------


def frames_of(data: bytearray) -> Iterator[bytes]:
    """Takes whole frames from the front, and gives what is behind their lengths."""
    while len(data) >= 2 and len(data) >= (size := 2 + int.from_bytes(data[:2], "big")):
        frame = bytes(data[2:size])
        del data[:size]
        yield frame


def values_of(data: bytes, count: int) -> list[bytes] | None:
    """So many values, each as what all that are equal to it have; None if they are not there."""
    values = []
    position = 0
    for _ in range(count):
        if position >= len(data) or data[position] not in list(Tag):
            return None
        tag = Tag(data[position])
        position += 1
        if tag == Tag.STRING:
            size = int.from_bytes(data[position : position + 4], "big")
            position += 4
        else:
            size = SIZES[tag]
        value = data[position : position + size]
        position += size
        if position > len(data):
            return None
        values.append(bytes([tag]) + canonical(tag, value))
    return values


def canonical(tag: Tag, value: bytes) -> bytes:
    """Java has one true, and one NaN of each size."""
    if tag == Tag.BOOLEAN:
        return bytes([value != b"\0"])
    if tag in (Tag.DOUBLE, Tag.FLOAT) and math.isnan(struct.unpack(">d" if tag == Tag.DOUBLE else ">f", value)[0]):
        return b"NaN"
    return value


def namespace_of(body: bytes) -> bytes | None:
    """Of a PING; None if there is none that fits, which is not the same as one that is blank."""
    if not body:
        return b""
    size = int.from_bytes(body[:4], "big", signed=True)
    return body[4 : 4 + size] if len(body) >= 4 and 0 <= size <= len(body) - 4 else None


def reply(xid: int, type: int, status: int, *told: int) -> bytes:
    """told: what the body says; without it there are zeros, but of a PING nothing."""
    layout = ">i" if type == PING and told else BODIES.get(type, "")
    numbers = told or (0,) * len(layout[1:])
    data = struct.pack(">iBb", xid, type, status) + struct.pack(layout, *numbers)
    return len(data).to_bytes(2, "big") + data


# ---- what there is --------------------------------------------------------------------------------------------------


class Window:
    """What has passed, as (number of the sample, count), and what was told to wait, likewise."""

    def __init__(self, samples: int, interval_ms: int) -> None:
        self.samples, self.interval_ms = samples, interval_ms
        self.passed: list[tuple[int, int]] = []
        self.waiting: list[tuple[int, int]] = []

    @property
    def shape(self) -> tuple[int, int]:
        return self.samples, self.interval_ms

    @property
    def length_ns(self) -> int:
        return self.interval_ms * MS // self.samples

    def number(self, now_ns: int) -> int:
        return now_ns // self.length_ns

    def add(self, number: int, count: int) -> None:
        self.passed.append((number, count))

    def rate(self, entries: list[tuple[int, int]], now_ns: int) -> float:
        """A second."""
        last = self.number(now_ns)
        total = sum(count for number, count in entries if last - self.samples < number <= last)
        return total / (self.interval_ms / 1000)

    def in_sample(self, number: int) -> int:
        return sum(count for other, count in self.passed if other == number)

    def borrow(self, count: int, threshold: float, now_ns: int) -> bool:
        """From the next sample."""
        last = self.number(now_ns)
        oldest, borrowed = self.in_sample(last - self.samples + 1), self.in_sample(last + 1)
        if self.rate(self.waiting, now_ns) > threshold:
            return False
        if self.rate(self.passed, now_ns) + count + borrowed - oldest > threshold:
            return False
        self.passed.append((last + 1, count))
        self.waiting.append((last, count))
        return True


@dataclass(eq=False)
class Token:
    """With the last rule of its flow. due_ns: when its lease is over, if it has an owner who is there."""

    rule: FlowRule
    count: int
    owner: ModelSession | None
    since_ns: int
    due_ns: int

    def ends_ns(self, now_ns: int) -> int:
        """When its lease is over, as it looks now."""
        span_ns = 2 * self.rule.resource_timeout_ms * MS
        gone_ns = None if self.owner is None else self.owner.gone_ns
        ends_ns = self.due_ns
        if self.rule.resource_timeout_strategy == KEEP_STRATEGY:
            renewed_ns = now_ns if gone_ns is None else gone_ns
            ends_ns += max(0, (renewed_ns - ends_ns) // span_ns + 1) * span_ns
        return ends_ns if gone_ns is None else min(ends_ns, gone_ns + self.rule.client_offline_ms * MS)


@dataclass
class ModelSession:
    """A connection."""

    model: Model
    number: int
    gone_ns: int | None = None
    kept: bytearray = field(default_factory=bytearray)
    namespaces: set[bytes] = field(default_factory=set)
    closing = False
    more = False
    owner: object = None

    __hash__ = object.__hash__

    def receive(self, data: bytes, now_ns: int) -> bytes:
        self.model.now_ns = now_ns
        self.kept += data
        return b"".join(self.model.answer(self, frame) for frame in frames_of(self.kept))

    def take_output(self, now_ns: int) -> bytes:
        return b""

    def eof(self, now_ns: int) -> bytes:
        self.closing = True
        return b""

    def closed(self, now_ns: int) -> None:
        if self.gone_ns is None:
            self.model.now_ns = self.gone_ns = now_ns
            self.model.sessions.discard(self)


class Model:
    """A store and its sessions."""

    def __init__(self, max_allowed_qps: int) -> None:
        self.max_allowed_qps = max_allowed_qps
        self.now_ns = 0
        self.draining = False
        self.sessions: set[ModelSession] = set()
        self.sessions_total = 0
        self.flows: dict[int, FlowRule] = {}
        self.params: dict[int, ParamRule] = {}
        self.windows: dict[int, Window] = {}  # of flows
        self.values: dict[int, dict[bytes, Window]] = {}  # of flows with values
        self.limiters: dict[str, Window] = {}
        self.tokens: dict[int, Token] = {}
        self.issued: set[int] = set()
        self.outcomes: Tally[tuple[str, str]] = Tally()

    # -- the contract of a store --

    @property
    def sessions_open(self) -> int:
        return len(self.sessions)

    def session(self, now_ns: int = 0) -> ModelSession:
        self.sessions_total += 1
        session = ModelSession(self, self.sessions_total)
        self.sessions.add(session)
        return session

    def load_rules(self, rules: Rules) -> None:
        """Windows stay where they are as they were; tokens stay."""
        self.flows = {rule.flow_id: rule for rule in rules.flows}
        self.params = {rule.flow_id: rule for rule in rules.params}
        for token in self.tokens.values():
            token.rule = self.flows.get(token.rule.flow_id, token.rule)
        shapes = {flow_id: (rule.sample_count, rule.window_ms) for flow_id, rule in self.flows.items()}
        stay = {flow_id for flow_id, window in self.windows.items() if shapes.get(flow_id) == window.shape}
        self.windows = {
            flow_id: self.windows[flow_id] if flow_id in stay else Window(*shape) for flow_id, shape in shapes.items()
        }
        shapes = {flow_id: (rule.sample_count, rule.window_ms) for flow_id, rule in self.params.items()}
        self.values = {
            flow_id: {value: window for value, window in self.values.get(flow_id, {}).items() if window.shape == shape}
            for flow_id, shape in shapes.items()
        }
        names = {rule.namespace for rule in (*rules.flows, *rules.params)}
        self.limiters = {name: self.limiters.get(name, Window(*LIMITER)) for name in names}

    def begin_drain(self) -> None:
        self.draining = True

    def set_wall(self, unix_ns: int, now_ns: int) -> None: ...

    def next_deadline(self) -> int:
        return min((token.ends_ns(self.now_ns) for token in self.tokens.values()), default=-1)

    def tick(self, now_ns: int) -> None:
        self.now_ns = now_ns
        for id in self.overdue(now_ns):
            del self.tokens[id]

    def audit(self) -> None: ...

    def take_dirty(self) -> list[ModelSession]:
        return []

    # -- requests --

    def answer(self, session: ModelSession, frame: bytes, granted: int = 0) -> bytes:
        """The reply. granted: the id of the token, if it is asked for and there is one; 0: any."""
        if len(frame) < 5:
            return self.told("unknown", 0, PING, Status.BAD_REQUEST)
        xid, type = struct.unpack_from(">iB", frame)
        body = frame[5:]
        if type not in list(MessageType):
            return self.told("unknown", xid, type, Status.BAD_REQUEST)
        result: tuple[int, ...] = (Status.BAD_REQUEST,)
        if len(frame) <= FRAME_MAX - 2:
            if type == PING:
                result = self.ping(session, body)
            elif type in (FLOW, PARAM, ACQUIRE):
                result = self.ask(session, type, body, granted)
            elif len(body) >= 8:
                id = int.from_bytes(body[:8], "big", signed=True)
                result = self.release(id) if type == RELEASE else self.keep(session, id)
        return self.told(TYPE_NAMES[type], xid, type, *result)

    def told(self, name: str, xid: int, type: int, status: int, *numbers: int) -> bytes:
        self.outcomes[name, STATUS_NAMES[Status(status)]] += 1
        return reply(xid, type, status, *numbers)

    def ping(self, session: ModelSession, body: bytes) -> tuple[int, ...]:
        namespace = namespace_of(body)
        if namespace is None or len(namespace) > NAMESPACE_MAX:
            return (Status.BAD_REQUEST,)
        full = len(session.namespaces) == NAMESPACES_MAX and namespace not in session.namespaces
        if not namespace.strip(b" \t\n\v\f\r\x1c\x1d\x1e\x1f") or full:
            return (Status.FAIL,)
        session.namespaces.add(namespace)
        return Status.OK, self.connected(namespace)

    def connected(self, namespace: bytes) -> int:
        return sum(namespace in session.namespaces for session in self.sessions)

    def ask(self, session: ModelSession, type: int, body: bytes, granted: int) -> tuple[int, ...]:
        if len(body) < 12 or (type == PARAM and len(body) < 16):
            return (Status.BAD_REQUEST,)
        flow_id, count = struct.unpack_from(">qi", body)
        if flow_id <= 0 or count <= 0:
            return (Status.BAD_REQUEST,)
        if type == ACQUIRE:
            return self.acquire(session, flow_id, count, granted)
        if type == FLOW:
            return self.flow(flow_id, count, body[12:13] not in (b"", b"\0"))
        number = int.from_bytes(body[12:16], "big", signed=True)
        values = values_of(body[16:], number) if 0 < number <= len(body) else None
        return (Status.BAD_REQUEST,) if values is None else self.param(flow_id, count, values)

    def is_allowed(self, namespace: str) -> bool:
        limiter = self.limiters[namespace]
        if limiter.rate(limiter.passed, self.now_ns) + 1 > self.max_allowed_qps:
            return False
        limiter.add(limiter.number(self.now_ns), 1)
        return True

    def threshold(self, rule: FlowRule | ParamRule, count: float) -> float:
        return count if rule.threshold_type == GLOBAL else count * self.connected(rule.namespace.encode())

    def flow(self, flow_id: int, count: int, prioritized: bool) -> tuple[int, ...]:
        rule = self.flows.get(flow_id)
        if rule is None or rule.grade != QPS:
            return (Status.NO_RULE,)
        if not self.is_allowed(rule.namespace):
            return (Status.TOO_MANY_REQUESTS,)
        window = self.windows[flow_id]
        threshold = self.threshold(rule, rule.count)
        left = threshold - window.rate(window.passed, self.now_ns) - count
        if left >= 0:
            window.add(window.number(self.now_ns), count)
            return Status.OK, min(int(left), INT32_MAX), 0
        if prioritized and window.borrow(count, threshold, self.now_ns):
            return Status.SHOULD_WAIT, 0, window.length_ns // MS
        return (Status.BLOCKED,)

    def param(self, flow_id: int, count: int, values: list[bytes]) -> tuple[int, ...]:
        rule = self.params.get(flow_id)
        if rule is None:
            return (Status.NO_RULE,)
        if not self.is_allowed(rule.namespace):
            return (Status.TOO_MANY_REQUESTS,)
        items = {value: limit for item, limit in rule.items.items() for value in values_of(item, 1) or ()}
        asked: Tally[bytes] = Tally()
        left = 0.0
        for value in values:
            window = self.values[flow_id].get(value, Window(rule.sample_count, rule.window_ms))
            passed = window.rate([*window.passed, (window.number(self.now_ns), asked[value])], self.now_ns)
            left = self.threshold(rule, items.get(value, rule.count)) - passed - count
            if left < 0:
                return (Status.BLOCKED,)
            asked[value] += count
        for value, total in asked.items():
            window = self.values[flow_id].setdefault(value, Window(rule.sample_count, rule.window_ms))
            window.add(window.number(self.now_ns), total)
        return Status.OK, min(int(left), INT32_MAX) if len(values) == 1 else -1, 0

    # -- tokens --

    def acquire(self, session: ModelSession, flow_id: int, count: int, granted: int) -> tuple[int, ...]:
        rule = self.flows.get(flow_id)
        if rule is None or rule.grade != CONCURRENCY:
            return (Status.NO_RULE,)
        if self.now_calls(flow_id) + count > self.threshold(rule, rule.count):
            return (Status.BLOCKED,)
        if self.draining:
            return (Status.NOT_AVAILABLE,)
        id = granted or len(self.issued) + 1
        assert id not in self.issued
        self.issued.add(id)
        token = Token(rule, count, session, self.now_ns, 0)
        token.due_ns = self.lease(token)
        self.tokens[id] = token
        return Status.OK, id

    def lease(self, token: Token) -> int:
        """When it ends, if it is taken or kept now."""
        timeout_ns = token.rule.resource_timeout_ms * MS
        if token.rule.resource_timeout_strategy == RELEASE_STRATEGY:
            return token.since_ns + timeout_ns
        return self.now_ns + 2 * timeout_ns

    def now_calls(self, flow_id: int) -> int:
        return sum(token.count for token in self.tokens.values() if token.rule.flow_id == flow_id)

    def is_ruled(self, token: Token) -> bool:
        rule = self.flows.get(token.rule.flow_id)
        return rule is not None and rule.grade == CONCURRENCY

    def find(self, id: int) -> Token | None:
        """A token whose lease is not over; one whose is goes at once."""
        token = self.tokens.get(id)
        if token is not None and token.ends_ns(self.now_ns) <= self.now_ns:
            del self.tokens[id]
            return None
        return token

    def release(self, id: int) -> tuple[int, ...]:
        token = self.find(id)
        if token is None:
            return (Status.ALREADY_RELEASED,)
        del self.tokens[id]
        return (Status.RELEASE_OK if self.is_ruled(token) else Status.NO_RULE,)

    def keep(self, session: ModelSession, id: int) -> tuple[int, ...]:
        token = self.find(id)
        if token is None:
            return (Status.ALREADY_RELEASED,)
        if not self.is_ruled(token):
            return (Status.NO_RULE,)
        token.owner = session
        token.due_ns = self.lease(token)
        return Status.OK, min((token.due_ns - self.now_ns) // MS, INT32_MAX)

    # -- sweeps --

    def late(self, flow_id: int) -> list[int]:
        """Tokens of a flow that a sweep can have freed, in the order in which it does."""
        found = {id: token.ends_ns(self.now_ns) for id, token in self.tokens.items() if token.rule.flow_id == flow_id}
        return sorted((id for id, ends_ns in found.items() if ends_ns <= self.now_ns), key=lambda id: found[id])

    def sweep(self, flow_id: int, left: int) -> None:
        """So many tokens of the flow are left, as a sweep has come by."""
        there = sum(token.rule.flow_id == flow_id for token in self.tokens.values())
        late = self.late(flow_id)
        assert 0 <= there - left <= len(late), f"{left} tokens of flow {flow_id} are left of {there}, {len(late)} late"
        for id in late[: there - left]:
            del self.tokens[id]

    def overdue(self, before_ns: int) -> list[int]:
        """Tokens whose lease was over by then."""
        return [id for id, token in self.tokens.items() if token.ends_ns(self.now_ns) <= before_ns]
