"""The counter protocol's world: semaphores that clients of all sorts hold, beside the model of the property test.

The model is told each call of the engine, and says what each has to answer, and what the store has to tell of itself.
What it knows nothing of is kept here: what the clients know by the answers that have arrived. Nobody's maximum is
exceeded by what all of them together know that they hold, and when nothing is under way, they know what they hold.
"""

from __future__ import annotations

import struct
from collections import Counter as Tally
from typing import TYPE_CHECKING

from counterd.protocols.counter._session import open_store
from kit.counters import ACQUIRE, BLOCK_SIZE, DUMP, GET, NO_MEMORY, NOOP, OK, RELEASE, STATS
from kit.promises import SECOND, Violation
from property.counter_model import Model
from simulation.world import World

if TYPE_CHECKING:
    from counterd.protocols.counter._store import CounterStore
    from property.counter_model import ModelSession, Parsed
    from simulation.world import Link

UNKNOWN_OPCODE = 0x42
U32_MAX = 0xFFFFFFFF
ALL_EVERY = 250  # steps, after which all that the store tells of itself is compared

_GET = struct.Struct(">BBHIIH").pack
_ACQUIRE = struct.Struct(">BBHIIIIH").pack
_RELEASE = struct.Struct(">BBHIIIH").pack
_BARE = struct.Struct(">BBHII").pack


class Books:
    """Of one connection. mirror: what it is to the model. known: what it holds by the answers that have arrived."""

    __slots__ = ("asked", "known", "mirror")

    def __init__(self, mirror: ModelSession) -> None:
        self.mirror = mirror
        self.known: dict[bytes, int] = {}
        self.asked = 0


class CounterWorld(World):
    """Requests in Link.todo are (name, is sure: else what it grants is given back at once)."""

    name = "counter"

    def make_store(self) -> CounterStore:
        draw = self.random
        self.buckets = draw.choice((1, 2, 3, 8, 8, 64, 64, 1000)) if self.crowd < 60 else draw.choice((16, 64, 500))
        self.holdings = max(1, int(self.buckets * draw.choice((1, 2, 4)) * draw.choice((1, 1, self.crowd / 4 + 1))))
        sizes = {
            "buckets": self.buckets,
            "holdings": self.holdings,
            "holdings_per_connection": draw.choice((0, 0, 1, 3, 10)),
            "name_memory": draw.choice((0, 3, self.buckets // 2, 8 * self.buckets)) * BLOCK_SIZE,
        }
        wide = draw.random() < 0.3  # numbers near 2^32
        count = max(1, int(self.buckets * draw.choice((0.5, 1, 1.5, 3))))
        lengths = draw.choice(((8,), (8, 36, 37, 97), (5, 30, 60, 88, 89, 300)))
        self.names = [b"%d" % number + b"n" * draw.choice(lengths) for number in range(min(count, 1500))]
        top = draw.choice((1, 3, 10, 100))
        self.maxima = {
            name: draw.choice((U32_MAX, U32_MAX - 1, 1 << 31)) if wide else 1 + draw.randrange(top)
            for name in self.names
        }
        self.firm = draw.random() < 0.7  # everybody has the same maximum in mind
        self.model = Model(**sizes)
        self.seen = self.model.outcomes
        self.answers: list[tuple[int, Parsed]] = []  # of the last call
        self.known: Tally[bytes] = Tally()  # by the clients
        self.top: dict[bytes, int] = {}  # largest maximum granted
        return open_store(hash_key=draw.getrandbits(128).to_bytes(16, "little"), figures=dict, **sizes)

    def arrived(self) -> Books:
        return Books(self.model.session())

    # ---- what clients ask ----

    def compose(self, link: Link) -> bytes:
        draw = self.random.random
        data = b""
        for _ in range(self.batch()):
            data += self.request(link, draw())
        return data

    def request(self, link: Link, kind: float) -> bytes:
        draw = self.random.random
        books: Books = link.books
        books.asked = opaque = books.asked + 1
        name = self.names[int(draw() * len(self.names))]
        resources = 0
        sure = True
        if kind < 0.45:
            opcode = ACQUIRE
            maximum = self.maxima[name]
            if not self.firm and draw() < 0.2:
                maximum = 1 + int(draw() * maximum)
            resources = 1 + int(draw() * draw() * maximum)
            sure = kind > 0.05 or self.is_open(link, name)  # else it is given back at once, unheard
            data = _ACQUIRE(0x90, ACQUIRE, 0, 10 + len(name), opaque, resources, maximum, len(name)) + name
        elif kind < 0.85:
            opcode = RELEASE
            if books.known and kind < 0.8:
                name = next(iter(books.known))
                resources = books.known[name] if draw() < 0.7 else 1 + int(draw() * books.known[name])
                if draw() < 0.05 and books.known[name] < U32_MAX and not self.is_asked(link, name):
                    resources, sure = books.known[name] + 1, False  # more than it has
                else:
                    self.forget(books, name, resources)
            else:
                sure = False
                resources = 0 if self.is_open(link, name) else int(draw() * 3)
            data = _RELEASE(0x90, RELEASE, 0, 6 + len(name), opaque, resources, len(name)) + name
        elif kind < 0.97:
            opcode = GET
            data = _GET(0x90, GET, 0, 2 + len(name), opaque, len(name)) + name
        elif kind < 0.975:
            opcode = self.random.choice((DUMP, DUMP, STATS, UNKNOWN_OPCODE))
            data = _BARE(0x90, opcode, 0, 0, opaque)
        elif kind < 0.98:
            opcode, sure = ACQUIRE, False  # of nothing
            data = _ACQUIRE(0x90, ACQUIRE, 0, 10 + len(name), opaque, 0, 1, len(name)) + name
        else:
            opcode = NOOP
            data = _BARE(0x90, NOOP, 0, 0, opaque)
        link.todo.append((name, sure))
        if opcode == ACQUIRE and resources and not sure:
            books.asked = opaque = opaque + 1
            more = _RELEASE(0x90, RELEASE, 0, 6 + len(name), opaque, resources, len(name)) + name
            data += more
            link.todo.append((name, False))
        return data

    def is_open(self, link: Link, name: bytes) -> bool:
        """Whether the client holds anything of it, or may do so soon: then it could not tell what it gives back."""
        return name in link.books.known or self.is_asked(link, name)

    def is_asked(self, link: Link, name: bytes) -> bool:
        """Whether an answer about it is yet to come."""
        return any(asked == name for asked, _ in link.todo) or any(
            request.name == name for _, (request, _) in link.marks
        )

    def nonsense(self, link: Link) -> bytes:
        link.books.asked += 1
        data = self.random.choice((b"\x91" * 12, _BARE(0x90, ACQUIRE, 0, 1 << 24, link.books.asked)))
        link.todo.append((b"", False))
        return data

    # ---- what the engine answers ----

    def took(self, what: str, link: Link, output: bytes, *data: bytes) -> None:
        self.answers = self.model.follow(link.books.mirror, link.session, what, output, *data)
        super().took(what, link, output)

    def answered(self, link: Link, output: bytes) -> None:
        for end, request in self.answers:
            _, sure = link.todo.popleft()
            if request.opcode == ACQUIRE and request.status == OK:
                self.top[request.name] = max(self.top.get(request.name, 0), request.maximum)
            elif request.opcode == STATS:
                self.tells_figures = True
            link.marks.append((link.bytes_out + end, (request, sure)))

    def left(self, link: Link) -> None:
        if link.dead:
            self.model.closed(link.books.mirror)

    # ---- what the clients know ----

    def delivered(self, link: Link, answer: tuple[Parsed, bool]) -> None:
        request, sure = answer
        if request.opcode != ACQUIRE or request.status != OK or not sure:
            return
        name, known = request.name, link.books.known
        known[name] = known.get(name, 0) + request.resources
        self.known[name] += request.resources
        if self.known[name] > self.top[name]:
            raise Violation(
                "limit", f"clients know of {self.known[name]} of {name!r}, of which {self.top[name]} may be"
            )

    def forget(self, books: Books, name: bytes, resources: int) -> None:
        books.known[name] -= resources
        self.known[name] -= resources
        if not books.known[name]:
            del books.known[name]

    def went(self, link: Link) -> None:
        for name in list(link.books.known):
            self.forget(link.books, name, link.books.known[name])

    # ---- what has to hold ----

    def check(self) -> int:
        held, due = self.store.held(), int(self.store.next_deadline())
        if (held, due) != (self.model.holdings_used, self.model.next_deadline()):
            raise Violation("books", f"{held} holdings, due at {due}, and not {self.model.holdings_used}")
        if self.steps % ALL_EVERY == 0:
            self.model.agrees(self.store)
        return due

    def tick(self) -> None:
        self.store.tick(self.now)
        self.model.tick()
        self.step("tick", None)

    def begin_window(self, number: int) -> None:
        self.store.begin_window(number)
        self.model.begin_window(number)

    def limit_holdings(self, holdings: int) -> None:
        self.store.limit_holdings(holdings)
        self.model.limit_holdings(holdings)

    def meddle(self) -> None:
        draw = self.random.random()
        if draw < 0.55:  # their numbers only rise
            self.begin_window(self.model.window + (1 if draw < 0.45 else 3 if draw < 0.5 else 0))
            self.step("window", None, self.model.window)
        elif draw < 0.75:
            self.limit_holdings(self.random.choice((0, 0, 1, 2, 5)))
            self.step("limit", None, self.model.per_connection)

    def settled(self) -> None:
        self.model.agrees(self.store)
        if self.store.next_deadline() != -1:
            raise Violation("deadline", "nothing is under way, and something is due")
        for link in self.links.values():
            books: Books = link.books
            if books.mirror.holdings != books.known:
                raise Violation("books", f"connection {link.number} knows {books.known}, holds {books.mirror.holdings}")

    def claim_empty(self, *names: str) -> None:
        self.model.agrees(self.store)
        figures = self.store.snapshot()
        left = {name: figures[name] for name in names if figures[name]}
        if left or self.store.next_deadline() != -1 or +self.known:
            raise Violation("empty", f"nobody uses anything, and there is {left}, {+self.known}")

    def emptied(self) -> None:
        self.claim_empty("holdings", "busy", "holdings_leaving", "curr_connections")
        self.now += SECOND
        self.begin_window(self.model.window + 1)
        while self.store.next_deadline() >= 0:
            self.tick()
        self.claim_empty("records", "idle", "objects", "name_memory")
        self.fill()

    def fill(self) -> None:
        """All that was ever free is free: as many counters can be had as there were at first, and one more cannot."""
        if self.model.draining:
            return
        self.limit_holdings(0)
        session, mirror = self.store.session(self.now), self.model.session()
        count = min(self.buckets, self.holdings)
        for number in range(count + 1):
            data = _ACQUIRE(0x90, ACQUIRE, 0, 14, number, 1, 1, 4) + b"%04d" % number
            said = session.receive(data, self.now)
            self.model.follow(mirror, session, "receive", said, data)
            if said[2] != (OK if number < count else NO_MEMORY):
                raise Violation("room", f"counter {number} of {count} was answered {said[2]:#x}")
            self.step("receive", None, number)
        session.closed(self.now)
        self.model.closed(mirror)
        self.step("closed", None)
        while self.store.next_deadline() >= 0:
            self.tick()
        if self.random.random() < 0.05:  # there is no way back: from here on, nothing is granted
            self.store.begin_drain()
            self.model.begin_drain()
            self.step("drain", None)
