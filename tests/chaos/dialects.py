"""What chaos's clients ask in each dialect, and what an answer means: calls for the history, bytes for the socket.

All that is random comes from one stream for each process and round, so it is the same for a seed.
"""

from __future__ import annotations

import collections
import time
from typing import TYPE_CHECKING, Any, ClassVar

from chaos import sentinel_rules, smockron_daemon
from chaos.beanstalk_daemon import FILLED
from chaos.counter_dialect import CounterDialect
from chaos.dialect import GARBAGE, JOBS, LENT, PIPELINE, Asked, sign_of_life
from counterd.errors import ProtocolError
from counterd.protocols.beanstalk import wire as beanstalk_wire
from counterd.protocols.sentinel import wire as sentinel_wire
from counterd.protocols.smockron import wire as smockron_wire
from counterd.protocols.throttr import wire as throttr_wire
from history import beanstalk, sentinel, smockron, throttr

if TYPE_CHECKING:
    import random

KEYS = 6  # of throttr, which all want
QUOTA_MAX = 20
NUMBER_MAX = 0xFFFF
TTLS = (
    (200, throttr_wire.TTLType.MILLISECONDS),
    (2000, throttr_wire.TTLType.MILLISECONDS),
    (50_000, throttr_wire.TTLType.MICROSECONDS),
    (30, throttr_wire.TTLType.SECONDS),
)  # at most
VALUES_STEP = 16  # long values in one piece of who takes all
VALUES_STEPS_MAX = 16
NEWS = b"news"  # the channel of those who subscribe and do not read
EVENTS = 60
ANSWERS = 12_000  # of the sentinel protocol, which are short
UNKNOWN_FLOW = 999
TOKENS_STEP = 128  # tokens, and values, in one piece of who takes all
TOKENS_STEPS_MAX = 40
KNOWN = 16  # tokens that the clients of a process know of each other
LONG_KEPT = 3  # tokens of those: the last ones, which all clients renew often and seldom release
LONG_KEPT_EVERY = 12  # one token of so many is one, in flows with room enough for all
LONG_KEPT_FLOWS = {4, *sentinel_rules.COLD}
TUBES = 3  # of the beanstalk protocol
JOBS_STEP = 8  # long ones, in one piece of who takes all
JOBS_STEPS_MAX = 8
LONG_JOB = bytes(60_000)
STATISTICS = 600  # of who reads slowly
DOMAINS = (b"api", b"fast", b"login", b"apis", b"nobody's")  # of the smockron protocol
PREFIXES = (b"", b"", b"api", b"api\0", b"login\0", b"fast")
IDENTIFIERS = {b"hot": 3, b"cold": 40, b"forgotten": 3}  # how many of each kind, in a domain
AHEAD_MS = 500
REQUESTS_STEP = 256  # that are reported, in one piece of who takes all
REQUESTS_STEPS_MAX = 40
PINGS = 3000
SUBSCRIPTIONS = 1000
LENGTHS = {1: 12, 2: 16, 3: 12, 4: 8, 5: 8}  # of a body, at least, by its type; a PING can do without


class ThrottrDialect:
    """Creates, changes and reads keys, publishes; most keys expire meanwhile."""

    forgives = False

    def __init__(self, chance: random.Random, number: int, client: int) -> None:
        self.chance = chance
        self.client = client
        self.keys = [b"round %d, key %d" % (number, key) for key in range(KEYS)]
        self.filling = 0
        self.encoder = throttr_wire.Encoder(throttr_wire.ValueSize.UINT16)
        self.parser = throttr_wire.Parser(throttr_wire.ValueSize.UINT16)

    # ---- requests ----

    def hello(self) -> Asked:
        return self._other("subscribe", self.encoder.subscribe(sign_of_life(self.client)))

    def is_welcome(self, told: Any) -> bool:
        return told is True

    def batch(self) -> list[Asked]:
        if self.filling:
            self.filling -= 1
            names = (b"fill %d %d %d" % (self.client, self.filling, number) for number in range(VALUES_STEP))
            return [self._other("fill", self.encoder.set(name, bytes(60_000), 3)) for name in names]
        return [self._any() for _ in range(self.chance.choice(PIPELINE))]

    def _any(self) -> Asked:
        chance = self.chance
        key, dice = chance.choice(self.keys), chance.random()
        if dice < 0.04:
            return self._other("publish", self.encoder.publish(NEWS, chance.randbytes(chance.randint(0, 5000))))
        if dice < 0.06:
            return self._other("list", self.encoder.list())
        return self._ask(self._call(key, dice))

    def _call(self, key: bytes, dice: float) -> Any:
        chance = self.chance
        ttl_max, ttl_type = chance.choice(TTLS)
        ttl = chance.randint(0, ttl_max)
        if dice < 0.45:
            attribute = throttr.Attribute.QUOTA if dice < 0.36 else throttr.Attribute.TTL
            value = chance.randint(0, 9) if dice < 0.36 else ttl
            return throttr.Update(key, attribute, chance.randint(0, 2), value)
        if dice < 0.77:
            return chance.choice((throttr.Query, throttr.Query, throttr.Query, throttr.Get, throttr.Purge))(key)
        if dice < 0.92:
            return throttr.Insert(key, chance.randint(0, QUOTA_MAX), ttl, ttl_type)
        return throttr.Set(key, chance.randbytes(chance.choice((0, 10, 200))), ttl, ttl_type)

    def give_back(self) -> list[Asked]:
        return []

    def much(self) -> list[Asked]:
        """Publishes its own events, to get many."""
        event = self.encoder.publish(NEWS, bytes(8000))
        return [
            self._other("subscribe", self.encoder.subscribe(NEWS)),
            *(self._other("publish", event) for _ in range(EVENTS)),
        ]

    def all(self) -> list[Asked]:
        self.filling = VALUES_STEPS_MAX
        return self.batch()

    def garbage(self) -> bytes:
        """No request begins like this; the reply is that of a failed one."""
        self.parser.expect(self.encoder.purge(b""))
        return bytes((self.chance.randint(0x20, 0xFF),)) + self.chance.randbytes(self.chance.randint(0, 3000))

    def truncated(self) -> bytes:
        key = self.chance.choice(self.keys)
        whole = self.chance.choice((self.encoder.update(key, 0, 2, 1), self.encoder.set(key, b"never", 30)))
        return whole[: self.chance.randint(1, len(whole) - 1)]

    def _ask(self, call: Any) -> Asked:
        return self._other(call, getattr(self.encoder, type(call).__name__.lower())(*call))

    def _other(self, call: Any, request: bytes) -> Asked:
        self.parser.expect(request)
        return call, request

    # ---- answers ----

    def feed(self, data: bytes) -> list[Any]:
        """Returns replies; drops events."""
        return [answer for answer in self.parser.feed(data) if isinstance(answer, throttr_wire.Reply)]

    def take(self, call: Any, answer: throttr_wire.Reply) -> Any:
        if call is GARBAGE and answer.result is not False:
            raise ProtocolError("garbage was answered with success")
        if call == "fill" and answer.result is False:
            self.filling = 0
        return False if answer.result is None else answer.result


class SentinelDialect:
    """Acquires tokens, uses its own and those of other clients of its process, and asks for rates. asked: xid and type
    of the pending requests.
    """

    forgives = True
    known: ClassVar[collections.deque[tuple[int, int]]] = collections.deque(maxlen=KNOWN)  # flow and token
    long_kept: ClassVar[collections.deque[tuple[int, int]]] = collections.deque(maxlen=LONG_KEPT)

    def __init__(self, chance: random.Random, number: int, client: int) -> None:
        self.chance = chance
        self.client = client
        self.held: dict[int, int] = {}  # flow by token
        self.asked: collections.deque[tuple[int, int]] = collections.deque()
        self.xid = chance.randrange(1 << 31)
        self.filling = 0
        self.parser = sentinel_wire.ResponseParser()
        self.values = [sentinel_wire.encode_value(value) for value in sentinel_rules.VALUES]
        del number

    # ---- requests ----

    def hello(self) -> Asked:
        return "hello", self._sent(sentinel_wire.ping(self._next(), sign_of_life(self.client)))

    def is_welcome(self, told: Any) -> bool:
        return told[0] == sentinel_wire.Status.OK

    def batch(self) -> list[Asked]:
        if self.filling:
            self.filling -= 1
            return [self._fill(number) for number in range(TOKENS_STEP) for _ in range(2)]
        return [self._any() for _ in range(self.chance.choice(PIPELINE))]

    def _any(self) -> Asked:
        chance = self.chance
        dice = chance.random()
        if dice < 0.02:
            return "average", self._sent(
                sentinel_wire.flow(self._next(), chance.choice(list(sentinel_rules.AVERAGE)), 1)
            )
        return self._ask(self._call(dice))

    def _call(self, dice: float) -> Any:
        chance = self.chance
        if dice < 0.06:
            return sentinel.Ping(chance.choice((sentinel_rules.NAMESPACE, b"another")))
        if dice < 0.18:
            return sentinel.Flow(
                chance.choice(list(sentinel_rules.RATES)), chance.choice((1, 1, 2)), chance.random() < 0.3
            )
        if dice < 0.28:
            values = tuple(chance.choice(self.values) for _ in range(chance.choice((1, 1, 1, 2, 3))))
            return sentinel.Param(chance.choice(list(sentinel_rules.VALUE_RATES)), chance.choice((1, 1, 2)), values)
        if dice < 0.30:
            flow, count = chance.choice(((UNKNOWN_FLOW, 1), (1, 0), (-1, 1), (0, 1)))
            return chance.choice((sentinel.Acquire, sentinel.Flow))(flow, count)
        return self._token(dice)

    def _token(self, dice: float) -> Any:
        """A token, mostly its own; sometimes one that others have, or that it or others had."""
        chance = self.chance
        held = [(flow, token) for token, flow in self.held.items()]
        tokens = held if dice < 0.62 else [*self.known, *self.long_kept]
        if dice < 0.68 and tokens:
            flow, token = chance.choice(tokens)
            keeps = chance.random() < (0.95 if (flow, token) in self.long_kept else 0.3)
            return (sentinel.Keep if keeps else sentinel.Release)(flow, token)
        if dice < 0.92:
            return sentinel.Acquire(chance.choice(list(sentinel_rules.HOT)), chance.choice((1, 1, 1, 2, 3)))
        return sentinel.Acquire(chance.choice(list(sentinel_rules.COLD)), chance.choice((1, 2)))

    def _fill(self, number: int) -> Asked:
        """A token, and then a value that no other client has."""
        if self.asked and self.asked[-1][1] == sentinel_wire.MessageType.ACQUIRE:
            value = b"fill %d %d %d" % (self.client, self.filling, number)
            (flow,) = sentinel_rules.FILL_VALUES
            return "value", self._sent(sentinel_wire.param_flow(self._next(), flow, 1, [value]))
        (flow,) = sentinel_rules.FILL
        return "fill", self._sent(sentinel_wire.acquire(self._next(), flow, 1))

    def give_back(self) -> list[Asked]:
        return [self._ask(sentinel.Release(flow, token)) for token, flow in self.held.items()]

    def much(self) -> list[Asked]:
        return [("much", self._sent(sentinel_wire.flow(self._next(), UNKNOWN_FLOW, 1))) for _ in range(ANSWERS)]

    def all(self) -> list[Asked]:
        self.filling = TOKENS_STEPS_MAX
        return self.batch()

    def garbage(self) -> bytes:
        """An invalid frame: of an unknown type, too short for its type or for any, or too long."""
        chance = self.chance
        kind, xid = chance.randrange(4), self._next()
        if kind == 0:
            body = chance.randbytes(chance.randint(0, 900))
            return self._sent(sentinel_wire.frame(xid, chance.choice((-128, -1, 6, 7, 127)), body))
        if kind == 1:
            type = chance.choice(list(LENGTHS))
            return self._sent(sentinel_wire.frame(xid, type, bytes(chance.randrange(LENGTHS[type]))))
        if kind == 2:
            return self._sent(sentinel_wire.frame(xid, chance.choice((0, 1, 3, 9)), bytes(chance.randint(1018, 65530))))
        self.asked.append((0, 0))
        size = chance.randrange(sentinel_wire.REQUEST_HEAD)
        return bytes((0, size)) + chance.randbytes(size)

    def truncated(self) -> bytes:
        flow = self.chance.choice(list(sentinel_rules.HOT))
        tokens = [*self.held, 1]
        whole = self.chance.choice((sentinel_wire.acquire(0, flow, 1), sentinel_wire.release(0, tokens[0])))
        return whole[: self.chance.randint(1, len(whole) - 1)]

    def _ask(self, call: Any) -> Asked:
        return call, self._sent(sentinel.request(call, self._next()))

    def _sent(self, request: bytes) -> bytes:
        self.asked.append((self.xid, int.from_bytes(request[6:7], "big", signed=True)))
        return request

    def _next(self) -> int:
        self.xid = (self.xid + 1) % (1 << 31)
        return self.xid

    # ---- answers ----

    def feed(self, data: bytes) -> list[sentinel_wire.Response]:
        return self.parser.feed(data)

    def take(self, call: Any, answer: sentinel_wire.Response) -> Any:
        if (answer.xid, answer.type) != self.asked[0]:
            raise ProtocolError(f"{answer} in place of the answer to {self.asked[0]}: {call}")
        self.asked.popleft()
        if call == GARBAGE and answer.status != sentinel_wire.Status.BAD_REQUEST:
            raise ProtocolError(f"garbage was answered with {answer}")
        if call == "fill" and answer.status == sentinel_wire.Status.NOT_AVAILABLE:
            self.filling = 0
        if isinstance(call, sentinel.Acquire) and answer.token_id:
            self.held[answer.token_id] = call.flow
            is_long_kept = call.flow in LONG_KEPT_FLOWS and self.chance.randrange(LONG_KEPT_EVERY) == 0
            (self.long_kept if is_long_kept else self.known).append((call.flow, answer.token_id))
        elif isinstance(call, sentinel.Keep) and answer.status == sentinel_wire.Status.OK:
            self.held[call.token] = call.flow
        elif isinstance(call, sentinel.Release | sentinel.Keep):
            self.held.pop(call.token, None)
        return sentinel.told(call, answer)


class BeanstalkDialect:
    """Puts jobs into one of few tubes and reserves them; deletes, releases, buries and kicks them."""

    forgives = True
    tubes = TUBES
    known: ClassVar[collections.deque[int]] = collections.deque(maxlen=KNOWN)

    def __init__(self, chance: random.Random, number: int, client: int) -> None:
        self.chance = chance
        self.client = client
        self.tube = b"tube-%d" % chance.randrange(self.tubes)
        self.held: set[int] = set()
        self.filling = 0
        self.puts = 0
        # Each may be refused for want of memory; none is left out, or its jobs would be of another tube.
        self.to_begin = [
            ("use", beanstalk_wire.use(self.tube)),
            ("watch", beanstalk_wire.watch(self.tube)),
            ("ignore", beanstalk_wire.ignore(b"default")),
        ]
        self.parser = beanstalk_wire.Parser()
        del number

    # ---- requests ----

    def hello(self) -> Asked:
        return "hello", beanstalk_wire.watch(sign_of_life(self.client))

    def is_welcome(self, told: Any) -> bool:
        return told[0] == "WATCHING"

    def batch(self) -> list[Asked]:
        if self.filling:
            self.filling -= 1
            return [("fill", beanstalk_wire.put(LONG_JOB))] * JOBS_STEP
        if self.to_begin:
            return self.to_begin[:1]
        return [self._any() for _ in range(self.chance.choice(PIPELINE))]

    def _any(self) -> Asked:
        if self.chance.random() < 0.01:
            return "clear", beanstalk_wire.clear_tube(FILLED)
        call = self._call()
        return call, beanstalk.request(call)

    def _call(self) -> Any:
        """A call, mostly about its own jobs; sometimes about those that others have, or had."""
        chance, dice = self.chance, self.chance.random()
        priority, delay = chance.randint(1, 4), chance.choice((0, 0, 0, 1))
        if dice < 0.27:
            self.puts += 1
            ttr = chance.choice((1, 2, 4))
            return beanstalk.Put(self.tube, priority, delay, ttr, b"%d of %d" % (self.puts, self.client))
        if dice < 0.55:
            return beanstalk.Reserve(self.tube, chance.choice((0, 0, 1)))
        if dice < 0.90 and self.held:
            job = chance.choice(sorted(self.held))
        elif self.known:
            job = chance.choice(self.known)
        else:
            return beanstalk.Reserve(self.tube, 0)
        release, bury = beanstalk.Release(job, priority, delay), beanstalk.Bury(job, priority)
        calls = (
            beanstalk.Delete(job),
            release,
            bury,
            beanstalk.Touch(job),
            beanstalk.KickJob(job),
            beanstalk.Peek(job),
        )
        return chance.choices(calls, (12, 3, 1, 2, 2, 1))[0]

    def give_back(self) -> list[Asked]:
        calls = [beanstalk.Release(job, 1, 0) for job in sorted(self.held)]
        return [(call, beanstalk.request(call)) for call in calls]

    def much(self) -> list[Asked]:
        return [("much", beanstalk_wire.stats())] * STATISTICS

    def all(self) -> list[Asked]:
        return [("use fill", beanstalk_wire.use(FILLED))]

    def garbage(self) -> bytes:
        """An invalid line, or an invalid put."""
        chance = self.chance
        noise = chance.randbytes(chance.randint(1, 3000)).translate(None, b"\r\n")
        return chance.choice((b"\xff" + noise + b"\r\n", b"delete x\r\n", b"put 0 0 1 3\r\nabcde", b"\r\n"))

    def truncated(self) -> bytes:
        whole = self.chance.choice((beanstalk_wire.put(b"never"), beanstalk_wire.reserve(0)))
        return whole[: self.chance.randint(1, len(whole) - 1)]

    # ---- answers ----

    def feed(self, data: bytes) -> list[beanstalk_wire.Reply]:
        return self.parser.feed(data)

    def take(self, call: Any, answer: beanstalk_wire.Reply) -> Any:
        told = beanstalk.told(answer)
        if told[0] not in ANSWERS_TO[call if isinstance(call, str) else type(call)]:
            raise ProtocolError(f"{call} was answered with {answer}")
        if told[0] == "OUT_OF_MEMORY":
            self.filling = 0
        elif call == "use fill":
            self.filling = JOBS_STEPS_MAX
            self.to_begin.append(("use", beanstalk_wire.use(self.tube)))
        elif call in ("use", "watch", "ignore"):
            del self.to_begin[0]
        elif isinstance(call, beanstalk.Put) and told[1] is not None:
            self.known.append(told[1])
        elif told[0] == "RESERVED":
            self.held.add(told[1])
        elif isinstance(call, beanstalk.Delete | beanstalk.Release | beanstalk.Bury):
            self.held.discard(call.job)
        return told


class JobsDialect(BeanstalkDialect):
    """Like BeanstalkDialect, but nearly each of its jobs takes a permit of a counter that clients of the counter
    protocol use too.

    All are in one tube: more tubes would make the search for an order longer without testing more.
    """

    tubes = 1

    def _call(self) -> Any:
        call, chance = super()._call(), self.chance
        if not isinstance(call, beanstalk.Put) or chance.random() < 0.1:
            return call
        name = chance.choice(list(LENT))
        return call._replace(counter=name, maximum=chance.randint((LENT[name] + 1) // 2, LENT[name]))


ANSWERS_TO: dict[Any, set[str]] = {
    beanstalk.Put: {"INSERTED", "OUT_OF_MEMORY", "INTERNAL_ERROR"},
    beanstalk.Reserve: {"RESERVED", "TIMED_OUT", "DEADLINE_SOON"},
    beanstalk.Delete: {"DELETED", "NOT_FOUND", "INTERNAL_ERROR"},
    beanstalk.Release: {"RELEASED", "NOT_FOUND", "INTERNAL_ERROR"},
    beanstalk.Bury: {"BURIED", "NOT_FOUND", "INTERNAL_ERROR"},
    beanstalk.Touch: {"TOUCHED", "NOT_FOUND"},
    beanstalk.KickJob: {"KICKED", "NOT_FOUND", "INTERNAL_ERROR"},
    beanstalk.Peek: {"FOUND", "NOT_FOUND"},
    "hello": {"WATCHING", "OUT_OF_MEMORY"},
    "watch": {"WATCHING", "OUT_OF_MEMORY"},
    "ignore": {"WATCHING"},
    "use": {"USING", "OUT_OF_MEMORY"},
    "use fill": {"USING", "OUT_OF_MEMORY"},
    "fill": {"INSERTED", "OUT_OF_MEMORY", "INTERNAL_ERROR"},
    "clear": {"CLEARED", "NOT_FOUND", "INTERNAL_ERROR"},
    "much": {"OK"},
    GARBAGE: {"UNKNOWN_COMMAND", "BAD_FORMAT", "EXPECTED_CRLF"},
}


class GateDialect:
    """The accounting connection of a gatekeeper. A PING behind its messages shows that they were taken. asked: for each
    PING, the number of calls that its PONG answers.
    """

    forgives = False

    def __init__(self, chance: random.Random, number: int, client: int) -> None:
        self.chance = chance
        self.client = client
        self.number = number
        self.asked: collections.deque[int] = collections.deque()
        self.filling = 0
        self.parser = smockron_wire.Parser()

    # ---- requests ----

    def hello(self) -> Asked:
        (asked,) = self._asked(
            [("hello", smockron_wire.greeting() + smockron_wire.ready(smockron_wire.SocketType.PUB))]
        )
        return asked

    def is_welcome(self, told: Any) -> bool:
        return told is True

    def batch(self) -> list[Asked]:
        if self.filling:
            self.filling -= 1
            names = (b"%d %d %d" % (self.client, self.filling, number) for number in range(REQUESTS_STEP))
            accepted = smockron_wire.Status.ACCEPTED
            return self._asked(
                [("fill", smockron_wire.accounting(smockron_daemon.FILL.encode(), accepted, name, 0)) for name in names]
            )
        calls = [self._call() for _ in range(self.chance.choice(PIPELINE))]
        return self._asked([(call, smockron.request(call)) for call in calls])

    def _call(self) -> smockron.Account:
        """An accounting message. Identifiers that may be forgotten are separate from the others."""
        chance = self.chance
        domain = chance.choices(DOMAINS, (8, 4, 3, 2, 1))[0]
        kind = chance.choices((b"hot", b"cold", b"forgotten"), (8, 3, 2))[0]
        identifier = gate_identifier(self.number, kind, chance.randrange(IDENTIFIERS[kind]))
        statuses = "ACCEPTED", "DELAYED", "REJECTED", "FORGET"
        status = chance.choices(statuses, (20, 3, 1, 2 if kind == b"forgotten" else 0))[0]
        ahead_ms = time.time_ns() // smockron.NS_PER_MS + chance.randrange(AHEAD_MS) if status == "DELAYED" else 0
        return smockron.Account(domain, identifier, status, ahead_ms)

    def give_back(self) -> list[Asked]:
        return []

    def much(self) -> list[Asked]:
        """Pings whose PONGs wait."""
        return [asked for _ in range(PINGS) for asked in self._asked([("much", b"")])]

    def all(self) -> list[Asked]:
        self.filling = REQUESTS_STEPS_MAX
        return self.batch()

    def garbage(self) -> bytes:
        """An invalid frame: of an unknown beginning, too long, or of a message with too many."""
        frames = smockron_wire.frame(b"", smockron_wire.MORE) * (smockron_wire.FRAMES_MAX + 1)
        long = bytes((smockron_wire.LONG,)) + (1 << 20).to_bytes(8, "big")
        return self.chance.choice(
            (b"\xf8" + self.chance.randbytes(self.chance.randint(0, 3000)), b"\x05", long, frames)
        )

    def truncated(self) -> bytes:
        whole = smockron.request(smockron.Account(b"api", gate_identifier(self.number, b"hot", 0), "ACCEPTED", 0))
        return whole[: self.chance.randint(1, len(whole) - 1)]

    def _asked(self, calls: list[Asked]) -> list[Asked]:
        """The calls, with a PING behind the last."""
        *before, (call, data) = calls
        self.asked.append(len(calls))
        return [*before, (call, data + smockron_wire.ping(0))]

    # ---- answers ----

    def feed(self, data: bytes) -> list[Any]:
        answers: list[Any] = []
        for found in self.parser.feed(data):
            if not isinstance(found, smockron_wire.Command):
                answers.append(self._heard(found))
            elif found.name == b"PONG":
                answers += [True] * (self.asked.popleft() if self.asked else 1)
            elif found.name not in (b"READY", b"SUBSCRIBE"):
                raise ProtocolError(f"the master said {found}")
        return answers

    def _heard(self, message: tuple[bytes, ...]) -> Any:
        raise ProtocolError(f"a message by a port where there are none: {message}")

    def take(self, call: Any, answer: Any) -> Any:
        del call
        return answer


class ListenerDialect(GateDialect):
    """A subscriber of all domains or of some."""

    def __init__(self, chance: random.Random, number: int, client: int) -> None:
        super().__init__(chance, number, client)
        self.prefix = chance.choice(PREFIXES)

    def hello(self) -> Asked:
        ready = smockron_wire.greeting() + smockron_wire.ready(smockron_wire.SocketType.SUB)
        (asked,) = self._asked([(smockron.Subscribe(self.prefix), ready + smockron_wire.subscribe(self.prefix))])
        return asked

    def batch(self) -> list[Asked]:
        return self._asked([(smockron.Ping(), b"")])

    def give_back(self) -> list[Asked]:
        return self._asked([("cancel", smockron_wire.cancel(self.prefix))])

    def all(self) -> list[Asked]:
        """Subscriptions that fill the store, none of them to an existing domain."""
        return self._asked([("fill", smockron_wire.subscribe(b"fill, %d" % each)) for each in range(SUBSCRIPTIONS)])

    def truncated(self) -> bytes:
        whole = smockron_wire.subscribe(b"never")
        return whole[: self.chance.randint(1, len(whole) - 1)]

    def _heard(self, message: tuple[bytes, ...]) -> smockron.Told:
        return smockron.told([message])


def gate_identifier(number: int, kind: bytes, which: int) -> bytes:
    """An identifier of a round; no other round uses it."""
    return b"%d %b %d" % (number, kind, which)


def gate_identifiers(number: int) -> list[tuple[bytes, bytes]]:
    """All identifiers of a round, in all domains with a rule."""
    return [
        (domain.encode(), gate_identifier(number, kind, which))
        for domain in smockron_daemon.RATES
        for kind, count in IDENTIFIERS.items()
        for which in range(count)
    ]


DIALECTS: dict[str, Any] = {
    "counter": CounterDialect,
    "throttr": ThrottrDialect,
    "sentinel": SentinelDialect,
    "beanstalk": BeanstalkDialect,
    JOBS: JobsDialect,
    "smockron": GateDialect,
    "smockron-control": ListenerDialect,
}
