"""What the smockron protocol does, said a second time: with dicts, exact fractions, and nothing clever.

`Model` predicts every byte that each connection is sent, in order, and every figure that can be known. It is a store by
the contract too, so that the vectors can be played to it: then both say the same.
"""

from __future__ import annotations

import math
import re
from collections import Counter as Tally
from collections import OrderedDict
from dataclasses import dataclass, field
from fractions import Fraction
from typing import TYPE_CHECKING, Any, NamedTuple

from counterd.protocols.smockron import wire

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from counterd.protocols.smockron.rules import Rule, Span

ACCOUNTING, CONTROL = 0, 1  # ports
FRAMES_MAX = 64
PREFIX_MAX = 256
PREFIXES_MAX = 4096
DOMAIN_MAX, IDENTIFIER_MAX = 255, 4096
CONTEXT_MAX = 16
MS = 1_000_000
HANDSHAKE_NS = 30_000 * MS
AHEAD_MAX_MS = 366 * 86_400_000
MOMENT_MAX_MS = (1 << 63) // MS
SPAN_MAX_NS = 3660 * 86_400_000 * MS
WALL_STEP_NS = 10 * MS
TICK_NS = 1 << 20  # of the wheel
QUESTIONS_AT_ONCE = 500
CALLS_AHEAD = 2

# Where names are kept: of an identifier what does not fit into a record is in blocks, of which there are so many more.
IDENTIFIER_INLINE = 24
CHAIN_SIZE, BLOCK_PAYLOAD = 8, 60
MORE_BLOCKS = 128

STATUSES = {b"ACCEPTED": "accepted", b"DELAYED": "delayed", b"REJECTED": "rejected", b"FORGET": "forget"}
KINDS = {ACCOUNTING: (b"PUB", b"XPUB"), CONTROL: (b"SUB", b"XSUB")}
CAUSES = ("not_zmtp", "old_version", "mechanism", "flags", "too_long", "too_many_frames")
MOMENT = re.compile(rb"0*([0-9]{1,20})(\.[0-9]*)?")


# ---- what comes -----------------------------------------------------------------------------------------------------


class Taken(NamedTuple):
    """The beginning of a stream: a greeting, a message with the commands in it, or what is neither.

    size: of its bytes; frames: (flags, body) of each; minor: of a greeting's version; cause: why it is neither.
    """

    size: int
    frames: tuple[tuple[int, bytes], ...] = ()
    minor: int = -1
    cause: str = ""


def take_greeting(data: bytes) -> Taken | None:
    """None if more is needed."""
    if (len(data) > 9 and not data[9] & 1) or (len(data) > 10 and data[10] < 3):
        return Taken(0, cause="old_version")
    if len(data) >= 32 and data[12:32] != b"NULL".ljust(20, b"\0"):
        return Taken(0, cause="mechanism")
    return Taken(64, minor=data[11] if data[10] == 3 else 1) if len(data) >= 64 else None


def take_message(data: bytes, message_max: int, broken: str) -> Taken | None:
    """None if more is needed. broken: what wrong flags are called."""
    frames: list[tuple[int, bytes]] = []
    position, inside = 0, False
    while position < len(data):
        flags = data[position]
        if flags & 0xF8 or flags & 5 == 5:
            return Taken(0, cause=broken)
        head = 9 if flags & wire.LONG else 2
        size = int.from_bytes(data[position + 1 : position + head], "big")
        if len(data) < position + head:
            return None
        if position + head + size > message_max or len(frames) == FRAMES_MAX:
            return Taken(0, cause="too_long" if position + head + size > message_max else "too_many_frames")
        body = data[position + head : position + head + size]
        if len(body) < size:
            return None
        position += head + size
        frames.append((flags, body))
        if not flags & wire.COMMAND:
            inside = bool(flags & wire.MORE)
        if not inside:
            return Taken(position, tuple(frames))
    return None


def properties(data: bytes) -> dict[bytes, bytes] | None:
    """Of a READY; None if they end too early."""
    found = {}
    while data:
        size = data[0]
        value_size = int.from_bytes(data[1 + size : 5 + size], "big")
        if not size or len(data) < 5 + size or len(data) < 5 + size + value_size:
            return None
        found[data[1 : 1 + size].lower()] = data[5 + size : 5 + size + value_size]
        data = data[5 + size + value_size :]
    return found


def moment_of(text: bytes) -> int | None:
    """In milliseconds."""
    match = MOMENT.fullmatch(text)
    return int(match[1]) if match and int(match[1]) <= MOMENT_MAX_MS else None


# ---- what there is --------------------------------------------------------------------------------------------------


def blocks_of(size: int, inline: int) -> int:
    """That a name of this size takes."""
    return 0 if size <= inline else -(-(size - inline + CHAIN_SIZE) // BLOCK_PAYLOAD)


def tick_of(due_ns: int) -> int:
    """The first tick that begins at or after it."""
    return max(0, -(-due_ns // TICK_NS))


def exact(span: Span, parts: int) -> Fraction:
    return span.ns + Fraction(span.part, parts)


@dataclass
class Domain:
    """rule: the last it had; ruled: it still has it. asked: requests that somebody else is yet to decide about."""

    rule: Rule
    ruled: bool = True
    identifiers: int = 0
    asked: int = 0
    tally: Tally[str] = field(default_factory=Tally)


@dataclass
class Identifier:
    """ns, part: when the next request is on time, in the parts of the rule of then. due_ns: when it is forgotten."""

    ns: int
    part: int
    due_ns: int


class Question(NamedTuple):
    """What somebody else is to decide."""

    operation: str
    name: bytes
    moment_ms: int
    now_ms: int


Key = tuple[bytes, bytes]  # domain, identifier


class Model:
    """A store and its sessions. What identifiers there are is in the order of their last use."""

    def __init__(self, *, identifiers: int = 1024, message_max: int = 1 << 16, posted_max: int = 1 << 20) -> None:
        self.identifiers_max, self.message_max, self.posted_max = identifiers, message_max, posted_max
        self.now_ns = self.wall_ns = 0
        self.domains: dict[bytes, Domain] = {}
        self.identifiers: OrderedDict[Key, Identifier] = OrderedDict()
        self.sessions: list[ModelSession] = []
        self.sessions_total = 0
        self.outcomes: Tally[tuple[str, str]] = Tally()
        self.tally: Tally[str] = Tally()
        self.is_shared = self.is_alone = False
        self.questions: dict[bytes, list[Question]] = {}
        self.asked: list[tuple[bytes, list[Question]]] = []  # the calls that are not settled, oldest first
        self.answering = False  # requests are executed: for a subscriber without room they wait

    # -- the contract of a store --

    def session(self, now_ns: int = 0, port: int = 0) -> ModelSession:
        self.now_ns = now_ns
        self.sessions_total += 1
        self.sessions.append(ModelSession(self, port))
        return self.sessions[-1]

    @property
    def sessions_open(self) -> int:
        return len(self.sessions)

    def set_wall(self, unix_ns: int, now_ns: int) -> None:
        if abs(unix_ns - now_ns - self.wall_ns) >= WALL_STEP_NS:
            self.wall_ns = unix_ns - now_ns

    def next_deadline(self) -> int:
        silences = [session.due_ns for session in self.sessions if session.due_ns is not None]
        moments = [each.due_ns for each in self.identifiers.values()]
        return min((tick_of(due_ns) * TICK_NS for due_ns in silences + moments), default=-1)

    def tick(self, now_ns: int) -> None:
        """Everything that is due by then."""
        self.now_ns = now_ns
        tick = now_ns // TICK_NS
        for key in [key for key, each in self.identifiers.items() if tick_of(each.due_ns) <= tick]:
            self.remove(key)
            self.tally["expired"] += 1
        for session in list(self.sessions):
            if session.due_ns is not None and tick_of(session.due_ns) <= tick:
                session.cut_off()

    def take_dirty(self) -> list[ModelSession]:
        return [session for session in self.sessions if session.said or session.closing]

    def audit(self) -> None: ...

    def load_rules(self, rules: Mapping[bytes, Rule]) -> None:
        for name in list(self.domains):
            if name not in rules:
                self.domains[name].ruled = False
                self.settle(name)
        for name, rule in rules.items():
            domain = self.domains.setdefault(name, Domain(rule))
            domain.rule, domain.ruled = rule, True

    def snapshot(self) -> dict[str, int]:
        """Of the figures those that can be known."""
        names = ("expired", "evicted", "published", "delivered", "lost", "silent", *(f"broken:{one}" for one in CAUSES))
        return {
            **{name: self.tally[name] for name in names},
            "curr_connections": len(self.sessions),
            "total_connections": self.sessions_total,
            "identifiers": len(self.identifiers),
            "identifiers_max": self.identifiers_max,
            "domains": len(self.domains),
            "subscriptions": sum(len(session.prefixes) for session in self.sessions),
            "asking": sum(domain.asked for domain in self.domains.values()),
            "alone": self.is_alone,
        }

    # -- time --

    @property
    def now_ms(self) -> int:
        return (self.now_ns + self.wall_ns) // MS

    # -- identifiers --

    def settle(self, name: bytes) -> None:
        """A domain without a rule goes with what is there of it."""
        domain = self.domains[name]
        if not (domain.ruled or domain.identifiers or domain.asked):
            del self.domains[name]

    def remove(self, key: Key) -> None:
        del self.identifiers[key]
        self.domains[key[0]].identifiers -= 1
        self.settle(key[0])

    def enter(self, key: Key, identifier: Identifier) -> None:
        """Also of one that is known; whoever was not heard of for longest makes room, for blocks only who has some."""
        if key not in self.identifiers and len(self.identifiers) == self.identifiers_max:
            self.evict(self.identifiers)
        while key not in self.identifiers and (
            self.identifiers_max + MORE_BLOCKS - sum(map(self.blocks, self.identifiers)) < self.blocks(key)
        ):
            self.evict(key for key in self.identifiers if self.blocks(key))
        if key not in self.identifiers:
            self.domains[key[0]].identifiers += 1
        self.identifiers[key] = identifier
        self.identifiers.move_to_end(key)

    def evict(self, keys: Iterable[Key]) -> None:
        """The first of these."""
        self.remove(next(iter(keys)))
        self.tally["evicted"] += 1

    def blocks(self, key: Key) -> int:
        return blocks_of(len(key[1]), IDENTIFIER_INLINE)

    def account(self, domain: bytes, operation: str, name: bytes, moment_ms: int) -> None:
        if operation != "forget":
            self.domains[domain].tally[operation] += 1
        question = Question(operation, name, max(moment_ms, self.now_ms), self.now_ms)
        if self.is_shared:
            self.questions.setdefault(domain, []).append(question)
            self.domains[domain].asked += 1
        else:
            self.decide(domain, question)

    def decide(self, domain: bytes, question: Question) -> None:
        if question.operation == "forget":
            self.forget(domain, question.name)
            return
        rule = self.domains[domain].rule
        interval, burst = exact(rule.interval, rule.parts), exact(rule.burst, rule.parts)
        moment_ns = question.moment_ms * MS - self.wall_ns
        upcoming = moment_ns - burst
        known = self.identifiers.get((domain, question.name))
        if known is not None:
            part = known.part if known.part < rule.parts else 0
            upcoming = max(upcoming, known.ns + Fraction(part, rule.parts))
        upcoming += interval
        if math.floor(upcoming) - moment_ns >= SPAN_MAX_NS:
            upcoming = Fraction(moment_ns + SPAN_MAX_NS)
        part_exactly = (upcoming - math.floor(upcoming)) * rule.parts
        assert part_exactly.denominator == 1, "moments are whole parts"
        due_ns = math.floor(upcoming + burst) + 1
        self.enter((domain, question.name), Identifier(math.floor(upcoming), int(part_exactly), due_ns))
        self.tell(domain, question, math.ceil((math.ceil(upcoming) + self.wall_ns) / Fraction(MS)))

    def tell(self, domain: bytes, question: Question, until_ms: int) -> None:
        if until_ms <= question.now_ms:
            self.outcomes[question.operation, "ok"] += 1
            return
        self.outcomes[question.operation, "throttled"] += 1
        self.domains[domain].tally["told"] += 1
        self.publish(domain, b"DELAY_UNTIL", question.name, until_ms)

    def forget(self, domain: bytes, name: bytes) -> None:
        self.outcomes["forget", "ok"] += 1
        self.publish(domain, b"FORGET", name, self.now_ms)
        if (domain, name) in self.identifiers:
            self.remove((domain, name))

    def publish(self, domain: bytes, word: bytes, name: bytes, moment_ms: int) -> None:
        self.tally["published"] += 1
        topic = domain + b"\0"
        message = wire.message(topic, word, name, b"%d" % moment_ms)
        for session in self.sessions:
            if any(topic.startswith(prefix) for prefix in session.prefixes):
                session.give(message)

    # -- state that is shared --

    def share(self, is_shared: bool, now_ns: int) -> None:
        self.now_ns = now_ns
        self.is_shared, self.is_alone = is_shared, not is_shared
        if is_shared:
            return
        for domain, asked in reversed(self.asked):
            self.questions[domain] = asked + self.questions.get(domain, [])
        self.asked = []
        for domain, questions in self.questions.items():
            for question in questions:
                self.decide(domain, question)
            self.unask(domain, len(questions))
        self.questions = {}

    def take_questions(self, now_ns: int) -> Any:
        self.now_ns = now_ns
        if len(self.asked) == CALLS_AHEAD or not self.questions:
            return None
        domain, questions = next(iter(self.questions.items()))
        del self.questions[domain]
        if len(questions) > QUESTIONS_AT_ONCE:
            self.questions[domain] = questions[QUESTIONS_AT_ONCE:]
        self.asked.append((domain, questions[:QUESTIONS_AT_ONCE]))
        record = self.domains[domain]
        rounded = record.rule.rounded_ms if record.ruled else (1, 0)
        asked = [(each.name, 0 if each.operation == "forget" else each.moment_ms) for each in self.asked[-1][1]]
        return domain, rounded, asked

    def settle_questions(self, found: list[int], now_ns: int) -> None:
        self.now_ns = now_ns
        domain, questions = self.asked.pop(0)
        for question, until_ms in zip(questions, found, strict=True):
            if question.operation == "forget":
                self.forget(domain, question.name)
                continue
            until = max(0, min(until_ms, question.now_ms + AHEAD_MAX_MS))
            next_ns = until * MS - self.wall_ns
            due_ns = next_ns + self.domains[domain].rule.burst.ns + 2
            self.enter((domain, question.name), Identifier(next_ns, 0, due_ns))
            self.tell(domain, question, until)
        self.unask(domain, len(questions))

    def unask(self, domain: bytes, count: int) -> None:
        self.domains[domain].asked -= count
        self.settle(domain)


class ModelSession:
    """A connection. said: what it has been given and nobody has taken yet.

    deaf: its peer takes nothing; blocked: and that has been noticed. waiting: how many messages are in `said` then.
    """

    def __init__(self, store: Model, port: int) -> None:
        self.store, self.port = store, port
        self.owner: Any = None
        self.more = self.closing = self.greeted = self.ready = self.deaf = self.blocked = False
        self.waiting = 0
        self.minor = 0
        self.kept = b""
        self.said = bytearray(wire.greeting())
        self.prefixes: Tally[bytes] = Tally()
        self.patience_ns = HANDSHAKE_NS
        self.due_ns: int | None = store.now_ns + HANDSHAKE_NS

    # -- the contract of a session --

    def receive(self, data: bytes, now_ns: int) -> bytes:
        self.hear(data, now_ns)
        return self.take_output(now_ns)

    def take_output(self, now_ns: int) -> bytes:
        said = bytes(self.said)
        self.said.clear()
        self.waiting = 0
        self.blocked = False
        return said

    def wait(self) -> None:
        """Nobody can take what it was given: with more than it may have it goes."""
        self.blocked = bool(self.said)
        if len(self.said) > self.store.posted_max and self.waiting > 1:
            self.end()
            self.said.clear()

    def eof(self, now_ns: int) -> bytes:
        self.store.now_ns = now_ns
        self.end()
        return self.take_output(now_ns)

    def closed(self, now_ns: int) -> None:
        self.store.now_ns = now_ns
        self.end()
        if self in self.store.sessions:
            self.store.sessions.remove(self)

    # -- what it hears --

    def hear(self, data: bytes, now_ns: int) -> None:
        """Executes what is whole."""
        self.store.now_ns = now_ns
        self.kept += data
        self.store.answering = True
        while not self.closing and (taken := self.next()) is not None:
            self.kept = self.kept[taken.size :]
            self.execute(taken)
        self.store.answering = False

    def next(self) -> Taken | None:
        if self.kept[:1] == b"\xff":
            return take_greeting(self.kept)
        return take_message(self.kept, self.store.message_max, "flags" if self.greeted else "not_zmtp")

    def execute(self, taken: Taken) -> None:
        if taken.cause:
            self.store.tally[f"broken:{taken.cause}"] += 1
            self.store.outcomes["unknown", "framing_lost"] += 1
            self.end()
        elif (taken.minor >= 0) == self.greeted:
            self.refuse()
        elif taken.minor >= 0:
            self.greeted, self.minor = True, taken.minor
            self.said += wire.ready(wire.SocketType.PUB if self.port == CONTROL else wire.SocketType.SUB)
        else:
            if self.ready:
                self.heard()
            self.take_frames(taken.frames)

    def take_frames(self, frames: Iterable[tuple[int, bytes]]) -> None:
        parts = []
        for flags, body in frames:
            if self.closing:
                return
            if flags & wire.COMMAND:
                self.take_command(body)
            elif not self.ready:
                self.refuse()
            else:
                parts.append(body)
        if not parts or self.closing:
            return
        if self.port == ACCOUNTING:
            self.take_accounting(parts)
        elif len(parts) == 1 and parts[0][:1] in (b"\0", b"\1"):
            self.take_subscription(parts[0][1:], begins=parts[0][0] == 1)

    def take_command(self, body: bytes) -> None:
        name = body[1 : 1 + body[0]] if body and len(body) > body[0] else b""
        data = body[1 + len(name) :]
        if not self.ready:
            self.take_ready(properties(data) if name == b"READY" else None)
        elif name == b"PING" and len(data) >= 2:
            self.take_ping(data)
        elif name in (b"SUBSCRIBE", b"CANCEL") and self.port == CONTROL:
            self.take_subscription(data, begins=name == b"SUBSCRIBE")
        elif name == b"ERROR":
            self.end()

    def take_ready(self, found: dict[bytes, bytes] | None) -> None:
        if found is None:
            self.refuse()
        elif found.get(b"socket-type", b"") not in KINDS[self.port]:
            self.said += wire.command(b"ERROR", b"\x13Invalid socket type")
            self.refuse()
        else:
            self.ready = True
            self.store.outcomes["handshake", "ok"] += 1
            self.patience_ns, self.due_ns = 0, None
            if self.port == ACCOUNTING:
                self.said += wire.subscribe(b"") if self.minor else wire.frame(b"\1")

    def take_ping(self, data: bytes) -> None:
        if len(data) > 2 + CONTEXT_MAX:
            self.store.outcomes["ping", "malformed"] += 1
            return
        self.store.outcomes["ping", "ok"] += 1
        self.said += wire.command(b"PONG", data[2:])
        self.patience_ns = int.from_bytes(data[:2], "big") * 100 * MS
        self.heard()

    def take_subscription(self, prefix: bytes, *, begins: bool) -> None:
        outcomes = self.store.outcomes
        if len(prefix) > PREFIX_MAX:
            outcomes["subscribe" if begins else "cancel", "malformed"] += 1
        elif not begins:
            self.prefixes -= Tally([prefix])
            outcomes["cancel", "ok"] += 1
        elif len(self.prefixes) == PREFIXES_MAX and prefix not in self.prefixes:
            outcomes["subscribe", "refused"] += 1
            self.end()
        else:
            self.prefixes[prefix] += 1
            outcomes["subscribe", "ok"] += 1

    def take_accounting(self, parts: list[bytes]) -> None:
        store = self.store
        if len(parts) < 5:
            store.outcomes["accounting", "malformed"] += 1
            return
        domain, name = parts[0].removesuffix(b"\0"), parts[2]
        if domain not in store.domains or not store.domains[domain].ruled:
            store.outcomes["accounting", "unknown_domain"] += 1
            return
        operation = STATUSES.get(parts[1], "accounting")
        moment_ms = moment_of(parts[4 if operation == "delayed" else 3])
        is_moment = moment_ms is not None and moment_ms <= store.now_ms + AHEAD_MAX_MS
        if operation == "accounting" or len(name) > IDENTIFIER_MAX or not (is_moment or operation == "rejected"):
            store.outcomes[operation, "malformed"] += 1
        elif operation == "rejected":
            store.domains[domain].tally[operation] += 1
            store.outcomes[operation, "ok"] += 1
            if (domain, name) in store.identifiers:
                store.identifiers.move_to_end((domain, name))
        else:
            store.account(domain, operation, name, moment_ms or 0)

    # -- what becomes of it --

    def give(self, message: bytes) -> None:
        """A control message, unless it has no room for it."""
        too_much = self.waiting and len(self.said) + len(message) > self.store.posted_max
        if self.deaf and too_much and (self.blocked or self.store.answering):
            self.store.tally["lost"] += 1
            return
        self.store.tally["delivered"] += 1
        self.said += message
        self.waiting += 1

    def heard(self) -> None:
        self.due_ns = self.store.now_ns + self.patience_ns if self.patience_ns else None

    def refuse(self) -> None:
        self.store.outcomes["handshake", "refused"] += 1
        self.end()

    def cut_off(self) -> None:
        if self.ready:
            self.store.tally["silent"] += 1
        else:
            self.store.outcomes["handshake", "timed_out"] += 1
        self.end()
        if self.deaf:
            self.said.clear()

    def end(self) -> None:
        """Nothing more is heard of it."""
        self.closing = True
        self.due_ns = None
        self.prefixes.clear()
