"""The smockron protocol's world: gatekeepers, as they are in the clients, around one master, and a network that loses.

The gatekeepers are the real ones without their sockets (client/smockron/_gatekeeping.py), and so is the master. Beside
them are strangers, who speak ZMTP and say odd things. Connections break at any moment, with what is under way;
gatekeepers connect again; some do not read; rules change, the clock is set, and the master begins anew.

What the master takes is reckoned again, in the order in which it takes it, by the model in fractions that the property
tests have. What each subscriber was to be told is noted with it, and held against what it is sent (`told`). What has
reached a gatekeeper is noted again too, in a dict, and each of its decisions is held against that (`obeys`). Last, what
users care for, of which neither knows anything (`rate`): a gatekeeper that has heard all there is to hear of an
identifier lets pass what the rule allows, and not one request more. Beyond that are only requests that were decided
while others, or the answer to them, were under way: no protocol that asks nobody can know of those.
"""

from __future__ import annotations

from collections import Counter as Tally
from collections import deque
from typing import TYPE_CHECKING, Any

from conformance.smockron.engine import make_store
from counterd.client.smockron._gatekeeping import Core, Options, Verdict
from counterd.errors import CounterdError, Timeout
from counterd.protocols.smockron import wire
from counterd.protocols.smockron.wire import Command, Parser, SocketType, Status
from kit.promises import MS, SECOND, Violation
from property.smockron_model import ACCOUNTING, CONTROL, Model, ModelSession
from property.test_smockron_model import VARIANTS
from simulation.world import KEEPALIVE_NS, World

if TYPE_CHECKING:
    from counterd.client.smockron._zmtp import ZmtpSession
    from simulation.world import Link

UNIX_NS = 1_800_000_000 * SECOND
CROWD_MAX = 60  # connections: each of what is told goes to all of them
MESSAGE_MAX = 1 << 13
REMEMBERED = 40  # requests of an identifier whose rate is looked at
ROUNDING_NS = 2 * MS  # times are told and decided in milliseconds
QUIET_NS = 10 * SECOND  # less than any connection's patience, which is three heartbeats
KINDS = {ACCOUNTING: SocketType.PUB, CONTROL: SocketType.SUB}
GREETING = Command(b"", b"")  # stands for one among what was sent
OLD = wire.greeting()[:11] + b"\0" + wire.greeting()[12:]  # of ZMTP 3.0
Key = tuple[bytes, bytes]  # domain, identifier


class Books(Model):
    """The model, which notes for each subscriber what it is to be told. The world keeps the connections."""

    def __init__(self, world: SmockronWorld, identifiers: int) -> None:
        super().__init__(identifiers=identifiers, message_max=MESSAGE_MAX)
        self.world = world

    def publish(self, domain: bytes, word: bytes, name: bytes, moment_ms: int) -> None:
        topic = domain + b"\0"
        message = (topic, word, name, b"%d" % moment_ms)
        self.world.latest[domain, name] = moment_ms * MS - self.world.wall
        if word == b"FORGET":
            self.world.latest[domain, name] = 0
            self.world.history.pop((domain, name), None)
        for link in self.world.links.values():
            if any(topic.startswith(prefix) for prefix in link.books.mirror.prefixes):
                link.books.expected.append(message)

    def remove(self, key: Key) -> None:
        super().remove(key)
        self.world.history.pop(key, None)


class End:
    """Of one connection. mirror: what it means to the model. keeper, line: whose it is, unless it is a stranger's.

    told: parses what it is sent; said: what it sends. expected: control messages that are due to it.
    """

    __slots__ = ("expected", "has_greeted", "keeper", "line", "mirror", "port", "said", "told")

    def __init__(self, model: Model, port: int, keeper: Keeper | None) -> None:
        self.mirror = ModelSession(model, port)
        self.port, self.keeper = port, keeper
        self.line: ZmtpSession | None = keeper.lines[port] if keeper is not None else None
        self.told, self.said = Parser(), Parser()
        self.expected: deque[tuple[bytes, ...]] = deque()
        self.has_greeted = False


class Keeper:
    """A gatekeeper, its connections by port, and until when identifiers have to wait by what has reached it."""

    def __init__(self, options: Options) -> None:
        self.core = Core("127.0.0.1", b"a", tls=False, options=options)
        self.master = self.core.masters[0]
        self.lines = {ACCOUNTING: self.master.accounting, CONTROL: self.master.control}
        self.links: dict[int, Link] = {}
        self.heard: dict[Key, int] = {}
        self.waiting: list[int] = []  # until when those wait that were delayed
        self.options = options


class SmockronWorld(World):
    """What was sent and not yet taken is in Link.todo: commands, and messages as tuples."""

    name = "smockron"

    def make_store(self) -> Any:
        draw = self.random
        self.crowd = min(self.crowd, CROWD_MAX)
        self.stay = draw.choice((6, 60, 400))
        self.rough = draw.choice((0.0, 0.3, 1.0))
        self.identifiers = draw.choice((3, 30, 1000))
        self.room = draw.choice((200, 2000, 1 << 16))
        self.strange = draw.choice((0.0, 0.1, 0.4))  # of the connections
        self.wall = UNIX_NS
        self.variant = VARIANTS[0]
        sizes = draw.choice(((1,), (1, 24, 25, 300)))
        self.names = [b"%d" % number + b"n" * draw.choice(sizes) for number in range(draw.choice((1, 3, 40)))]
        self.domains = draw.choice(([b"a"], [b"a", b"ab", b""], [b"a", b"ab", b"", b"d" * 255, b"unknown"]))
        self.seen: Tally[tuple[str, str]] = Tally()
        self.make_keepers()
        self.links = {}
        return self.begin()

    def make_keepers(self) -> None:
        draw = self.random
        self.keepers = []
        for _ in range(max(1, self.crowd // 2)):
            options = Options(
                max_delay_s=draw.choice((0.0, 0.5, 5.0, 3600.0)),
                max_delayed=draw.choice((0, 3, 1000)),
                rejected=draw.choice(("all", "none")),
                max_remembered=draw.choice((2, 1000, 1000)),
                max_held=draw.choice((3, 10_000)),
                heartbeat=draw.choice((5.0, 60.0)),
            )
            keeper = Keeper(options)
            keeper.core.wake = lambda keeper=keeper: self.push(1, self.flush, keeper)  # type: ignore[misc]
            self.keepers.append(keeper)

    def begin(self) -> Any:
        """A master that knows nothing but its rules."""
        store = make_store(
            self.variant, identifiers=self.identifiers, message_max=MESSAGE_MAX, posted_max=self.room, now_ns=self.now
        )
        self.model = Books(self, self.identifiers)
        self.model.now_ns = self.now
        self.model.load_rules(self.variant)
        for each in (store, self.model):
            each.set_wall(self.now + self.wall, self.now)
        self.skipped = 0
        self.latest: dict[Key, int] = {}  # what was told of an identifier last
        self.under_way: Tally[Key] = Tally()  # requests that the master has not taken yet
        self.history: dict[Key, deque[int]] = {}  # when requests passed that had nothing else under way
        return store

    @property
    def now_ms(self) -> int:
        return (self.now + self.wall) // MS

    @property
    def now_s(self) -> float:
        return self.now / SECOND

    # ---- connections ----

    def connect(self, _: None) -> None:
        if not self.open:
            return
        places = [(keeper, port) for keeper in self.keepers for port in KINDS if port not in keeper.links]
        if not places or self.random.random() < self.strange:
            self.begin_stranger(self.random.choice((ACCOUNTING, CONTROL)))
            return
        keeper, port = self.random.choice(places)
        link = self.greet(port, keeper)
        line = keeper.lines[port]
        keeper.links[port] = link
        line.opened(self.now_s)
        self.flush(keeper)
        self.watch((link, line))
        self.live(link)

    def greet(self, port: int, keeper: Keeper | None) -> Link:
        self.coming = End(self.model, port, keeper)
        return self.admit(self.store.session(self.now, port))

    def arrived(self) -> End:
        return self.coming

    def watch(self, argument: tuple[Link, ZmtpSession]) -> None:
        """As its owner looks after a connection: sends PINGs, and gives up a master that is silent."""
        link, line = argument
        if link.gone or link.dead or (not self.open and self.now > self.quiet_at):
            return
        if link.reading:
            keeper = link.books.keeper
            try:
                keeper.core.look(keeper.master, line, self.now_s)
            except Timeout:
                self.depart(link)
                return
            self.flush(keeper)
        self.push(max(int(line.due * SECOND) - self.now, MS), self.watch, argument)

    def drain(self, bound: int) -> None:
        """PINGs go on, but for its last seconds: then nothing is to be under way."""
        self.quiet_at = self.now + 3 * KEEPALIVE_NS - QUIET_NS
        super().drain(bound)

    def went(self, link: Link) -> None:
        books: End = link.books
        if books.keeper is not None and books.keeper.links.get(books.port) is link:
            del books.keeper.links[books.port]
            books.keeper.core.lost(books.keeper.master, books.line, "gone", self.now_s)

    def left(self, link: Link) -> None:
        """What it said is lost, as far as it was not taken."""
        books: End = link.books
        books.mirror.prefixes.clear()
        for item in link.todo:
            self.forget(item)
        link.todo.clear()

    def forget(self, item: Command | tuple[bytes, ...]) -> None:
        """A request that the master will not hear of: nothing follows from it."""
        if not isinstance(item, Command) and len(item) > 3:
            key = item[0].removesuffix(b"\0"), item[2]
            self.under_way[key] -= 1
            self.history.pop(key, None)

    def think(self, link: Link) -> None:
        """Nobody waits for an answer, nor asks because there was one: see live()."""

    def live(self, link: Link) -> None:
        super().think(link)
        if not (link.gone or link.dead) and self.open:
            self.push(self.delay() * self.random.choice((1, 4, 100)), self.live, link)

    # ---- what is sent ----

    def emit(self, link: Link, data: bytes) -> None:
        if not data:
            return
        if not link.gone:
            books: End = link.books
            found: list[Any] = books.said.feed(data)
            if not books.has_greeted:
                books.has_greeted = True
                found.insert(0, GREETING)
            link.todo += found
        super().emit(link, data)

    def flush(self, keeper: Keeper) -> None:
        """Sends all that there is to send."""
        keeper.core.is_awake = False
        for port, link in list(keeper.links.items()):
            while data := keeper.core.take(keeper.master, keeper.lines[port], self.now):
                self.emit(link, data)

    def compose(self, link: Link) -> bytes:
        keeper = link.books.keeper
        if keeper is None:
            return self.oddity(link)
        for _ in range(self.batch()):
            self.decide(keeper)
        self.flush(keeper)
        return b""

    def nonsense(self, link: Link) -> bytes:
        return self.random.choice((b"\xff\xff", b"\x08", b"\x05\0", wire.frame(bytes(MESSAGE_MAX))))

    # ---- strangers ----

    def begin_stranger(self, port: int) -> None:
        link = self.greet(port, None)
        greeting = self.random.choice((wire.greeting(), OLD))
        self.emit(link, greeting + wire.ready(KINDS[port]))
        self.live(link)

    def oddity(self, link: Link) -> bytes:
        draw = self.random
        if link.books.port == CONTROL:
            prefix = draw.choice((b"", b"a", b"a\0", b"d" * 200, b"x" * 1025))
            say = draw.choice((wire.subscribe, wire.cancel, lambda topic: wire.message(b"\1" + topic)))
            return say(prefix)
        domain, name = draw.choice(self.domains), draw.choice(self.names)
        self.under_way[domain, name] += 1
        status = draw.choice((Status.ACCEPTED, Status.DELAYED, Status.REJECTED, Status.FORGET))
        moment = self.now_ms + draw.randrange(-5000, 5000)
        if status is Status.DELAYED:
            return wire.accounting(domain, status, name, 0, delayed_until_ms=moment)
        if draw.random() < 0.2:
            return wire.message(domain + b"\0", draw.choice((b"ACCEPTED", b"odd")), name, b"x", b"")
        return wire.accounting(domain, status, name, moment, log_info=b"odd")

    # ---- decisions ----

    def decide(self, keeper: Keeper) -> None:
        """A request comes to a gatekeeper."""
        draw = self.random.random
        domain, name = self.random.choice(self.domains), self.random.choice(self.names)
        key, until = (domain, name), keeper.heard.get((domain, name), 0)
        before = keeper.core.stats(self.now)
        decision = keeper.core.decide(name, domain, b"log" if draw() < 0.1 else b"", self.now, self.now + self.wall)
        after = keeper.core.stats(self.now)
        keeper.waiting = [each for each in keeper.waiting if each > self.now]
        expected, until_ms = Verdict.PASS, 0
        if until > self.now:
            delay_s = (until - self.now) / SECOND
            until_ms = round((until + self.wall) / MS)
            fits = delay_s <= keeper.options.max_delay_s and len(keeper.waiting) < keeper.options.max_delayed
            expected = Verdict.DELAY if fits else Verdict.REJECT
        as_told = (decision.verdict, decision.until_ms) == (expected, until_ms)
        is_forgotten = keeper.core.delays.evicted and decision.until_ms < until_ms  # there was no room for it
        if not as_told and not is_forgotten:
            raise Violation("obeys", f"{decision} of {key} at {self.now_ms}, which was told to wait until {until_ms}")
        if decision.verdict is Verdict.DELAY:
            keeper.waiting.append(until)
        if decision.verdict is Verdict.PASS:
            self.has_passed(key, max(until, self.unheard(keeper, key)))
        if after.held > before.held or after.dropped > before.dropped:
            self.under_way[key] += 1
        self.seen["decision", decision.verdict.value] += 1

    def unheard(self, keeper: Keeper, key: Key) -> int:
        """Until when the identifier has to wait, if the gatekeeper has not heard of it: it could not know."""
        latest = self.latest.get(key, 0)
        return latest if latest > self.now and keeper.heard.get(key, 0) != latest else 0

    def has_passed(self, key: Key, until: int) -> None:
        """A request was let through. until: until when its identifier would have had to wait, were that known."""
        domain = self.model.domains.get(key[0])
        if self.under_way[key] or until > self.now:
            self.seen["passed", "unheard"] += 1
            return
        if domain is None or not domain.ruled:
            return
        self.seen["passed", "known"] += 1
        passed = self.history.setdefault(key, deque(maxlen=REMEMBERED))
        passed.append(self.now)
        self.seen["rate", "looked at"] += len(passed) > 1
        interval, burst = (
            span.ns + span.part / domain.rule.parts for span in (domain.rule.interval, domain.rule.burst)
        )
        for count, moment in enumerate(reversed(passed)):
            if count * interval > self.now - moment + burst + ROUNDING_NS:
                raise Violation("rate", f"{count + 1} requests of {key} passed in {self.now - moment} ns")

    # ---- what the master takes, and says ----

    def answered(self, link: Link, output: bytes) -> None:
        executed = link.session.requests - link.executed
        link.executed = link.session.requests
        self.model.now_ns = self.now
        for _ in range(executed):
            if link.todo:  # else it is what a client sent last: nonsense
                self.execute(link.books, link.todo.popleft())
        self.judge(link, output)
        if output:
            link.marks.append((link.bytes_out + len(output), output))

    def execute(self, books: End, item: Command | tuple[bytes, ...]) -> None:
        """The master has taken this."""
        if isinstance(item, Command):
            if item.name in (b"SUBSCRIBE", b"CANCEL"):
                books.mirror.take_subscription(item.data, begins=item.name == b"SUBSCRIBE")
        elif books.port == CONTROL:
            books.mirror.take_subscription(item[0][1:], begins=item[0][:1] == b"\1")
        else:
            books.mirror.take_accounting(list(item))
            self.under_way[item[0].removesuffix(b"\0"), item[2]] -= 1
            self.seen["taken", item[1].decode()] += 1

    def judge(self, link: Link, output: bytes) -> None:
        """Control messages are those that are due to it, in their order; some may be lost where it does not read."""
        books: End = link.books
        for item in books.told.feed(output):
            if isinstance(item, Command) or books.port == ACCOUNTING:
                continue
            while books.expected and books.expected[0] != item:
                books.expected.popleft()
                self.skipped += 1
            if not books.expected:
                raise Violation("told", f"connection {link.number} was sent {item}, which is not due to it")
            books.expected.popleft()
            self.seen["told", item[1].decode()] += 1

    def delivered(self, link: Link, answer: bytes) -> None:
        books: End = link.books
        keeper = books.keeper
        if keeper is None or keeper.links.get(books.port) is not link:
            return
        told = keeper.core.stats(self.now).told
        try:
            for start in range(0, len(answer), 50):
                keeper.core.feed(keeper.master, books.line, answer[start : start + 50], self.now, self.now + self.wall)
        except CounterdError as error:
            raise Violation("protocol", f"a gatekeeper does not understand its master: {error}") from None
        if books.port == CONTROL:
            self.hear(keeper, answer, keeper.core.stats(self.now).told - told)
        self.flush(keeper)

    def hear(self, keeper: Keeper, answer: bytes, count: int) -> None:
        """What these bytes tell a gatekeeper, read here once more: they are whole frames."""
        parser = Parser(minor=1)
        greeting = answer.startswith(wire.greeting())
        for item in parser.feed(answer[wire.GREETING_SIZE :] if greeting else answer):
            if isinstance(item, Command):
                continue
            count -= 1
            key, until = (item[0].removesuffix(b"\0"), item[2]), int(item[3]) * MS - self.wall
            if item[1] == b"FORGET":
                keeper.heard.pop(key, None)
            elif until > max(self.now, keeper.heard.get(key, 0)):
                keeper.heard[key] = until
        if count:
            raise Violation("told", f"a gatekeeper took {-count} control messages less than came")

    # ---- what is done to it ----

    def tick(self) -> None:
        self.store.tick(self.now)
        self.model.tick(self.now)
        self.step("tick", None)

    def check(self) -> int:
        figures = self.store.snapshot()
        if figures["lost"] < self.skipped:
            raise Violation("told", f"{self.skipped} control messages are missing, and {figures['lost']} were lost")
        known = len(self.model.identifiers), self.model.tally["evicted"], self.model.tally["expired"]
        if known != (figures["identifiers"], figures["evicted"], figures["expired"]):
            raise Violation("identifiers", f"there are {known}, and it says {figures}")
        return int(self.store.next_deadline())

    def meddle(self) -> None:
        """Rules change, or the clock is set."""
        self.history.clear()
        if self.random.random() < 0.5:
            self.variant = self.random.choice(VARIANTS)
            self.store.load_rules(self.variant)
            self.model.load_rules(self.variant)
        else:
            self.wall += self.random.choice((-1, 1)) * self.random.randrange(20 * MS, 20 * SECOND)
            for each in (self.store, self.model):
                each.set_wall(self.now + self.wall, self.now)
        self.step("meddle", None)

    def settled(self) -> None:
        """All that was said has been heard, and nobody is deaf whose connections are whole."""
        missing = self.skipped + sum(len(link.books.expected) for link in self.links.values())
        if missing > self.store.snapshot()["lost"]:
            raise Violation("told", f"{missing} control messages never came")
        for keeper in self.keepers:
            self.settle_keeper(keeper)
        self.seen["lost", "control"] += self.skipped
        self.history.clear()  # of what was dropped nobody hears any more
        self.under_way.clear()

    def settle_keeper(self, keeper: Keeper) -> None:
        stats = keeper.core.stats(self.now)
        if len(keeper.links) == len(KINDS):
            if not keeper.master.is_ready:
                raise Violation("recovers", "a gatekeeper has both its connections, and is not ready")
            if stats.held:
                raise Violation("recovers", f"a gatekeeper is ready, and holds {stats.held} messages back")
            heard = keeper.links[CONTROL].books.mirror.prefixes
            deaf = [gate.name for gate in keeper.master.gates if not heard[gate.topic]]
            if deaf:
                raise Violation("recovers", f"a gatekeeper is ready, and deaf to {deaf}")
            self.seen["keeper", "ready"] += 1
        told = stats.passed + stats.delayed + (stats.rejected if keeper.options.rejected == "all" else 0)
        if told != stats.sent + stats.held + stats.dropped + stats.unwanted:
            raise Violation("counts", f"{told} messages were to be sent, and {stats} says otherwise")
        self.seen["keeper", "dropped"] += stats.dropped

    def emptied(self) -> None:
        figures = self.store.snapshot()
        if figures["subscriptions"] or figures["curr_connections"]:
            raise Violation("gone", f"{figures} after everybody has gone")
        for name in ("evicted", "expired", "silent"):
            self.seen["figure", name] += figures[name]
        if self.random.random() < 0.3:
            self.seen["master", "anew"] += 1
            self.store = self.begin()
        self.now += self.random.choice((0, KEEPALIVE_NS))
