"""The counter room's world: semaphores that clients of all sorts hold, and the books of who was granted what.

Two sets of books are kept. The ledger follows the answers in the order in which the engine gives them: what each
connection holds, and what those that have gone may still hold until it is given back. So every answer can be judged:
granted within its maximum, refused only if too little is left, a Get exact. The clients' own follow the answers as they
arrive: nobody's maximum is exceeded by what all clients together know that they hold.
"""

from __future__ import annotations

import struct
from collections import Counter as Tally
from typing import TYPE_CHECKING, Any

from counterd.protocols.counter._session import open_store
from simulation.world import SECOND, Violation, World

if TYPE_CHECKING:
    from counterd.protocols.counter._store import CounterStore
    from simulation.world import Link

GET, ACQUIRE, RELEASE, NOOP, STATS, DUMP, UNKNOWN = 0x01, 0x02, 0x03, 0x00, 0x10, 0x11, 0x42
OK, NOT_FOUND, INVALID, NOT_AVAILABLE, NOT_ACQUIRED, UNKNOWN_COMMAND, FULL = 0, 0x01, 0x04, 0x21, 0x22, 0x81, 0x82
DRAINING = b"Draining"
SLICE_STEPS = 2048  # holdings that a tick gives back
RECLAIM_STEPS = 64  # idle counters that an acquire looks at for room
INLINE, PREFIX, BLOCK, PAYLOAD = 36, 28, 64, 60  # bytes of names: in the record, of longer ones, and in a block
U32_MAX = 0xFFFFFFFF

_HEADER = struct.Struct(">BBBBII").unpack_from
_NUMBER = struct.Struct(">I").unpack_from
_ENTRY = struct.Struct(">IIH").unpack_from
_GET = struct.Struct(">BBHIIH").pack
_ACQUIRE = struct.Struct(">BBHIIIIH").pack
_RELEASE = struct.Struct(">BBHIIIH").pack
_BARE = struct.Struct(">BBHII").pack


def blocks(name: bytes) -> int:
    """That a name takes besides its record."""
    return -(-(len(name) - PREFIX) // PAYLOAD) if len(name) > INLINE else 0


class Books:
    """Of one connection. held: by the engine's answers; known: by those that have arrived."""

    __slots__ = ("asked", "held", "known")

    def __init__(self) -> None:
        self.held: dict[bytes, int] = {}
        self.known: dict[bytes, int] = {}
        self.asked = 0


class CounterWorld(World):
    """Requests in Link.todo are (where it ends in the input, opcode, name, resources, maximum, opaque, is sure)."""

    name = "counter"

    def make_store(self) -> CounterStore:
        draw = self.random
        self.buckets = draw.choice((1, 2, 3, 8, 8, 64, 64, 1000)) if self.crowd < 60 else draw.choice((16, 64, 500))
        self.holdings = max(1, int(self.buckets * draw.choice((1, 2, 4)) * draw.choice((1, 1, self.crowd / 4 + 1))))
        self.per_connection = draw.choice((0, 0, 1, 3, 10))
        self.name_blocks = draw.choice((0, 3, self.buckets // 2, 8 * self.buckets))
        self.wide = draw.random() < 0.3  # numbers near 2^32
        count = max(1, int(self.buckets * draw.choice((0.5, 1, 1.5, 3))))
        sizes = draw.choice(((8,), (8, 36, 37, 97), (5, 30, 60, 88, 89, 300)))
        self.names = [b"%d" % number + b"n" * draw.choice(sizes) for number in range(min(count, 1500))]
        top = draw.choice((1, 3, 10, 100))
        self.maxima = {
            name: draw.choice((U32_MAX, U32_MAX - 1, 1 << 31)) if self.wide else 1 + draw.randrange(top)
            for name in self.names
        }
        self.firm = draw.random() < 0.7  # everybody has the same maximum in mind
        self.totals: Tally[bytes] = Tally()  # held by connections that are there
        self.leaving: Tally[bytes] = Tally()  # and by those that have gone, at most
        self.used_in: dict[bytes, int] = {}  # window of the last use
        self.since: dict[bytes, int] = {}  # step at which something was first held of it
        self.known: Tally[bytes] = Tally()  # by the clients
        self.top: dict[bytes, int] = {}  # largest maximum granted
        self.open_holdings = self.leaving_holdings = 0
        self.window = 0
        self.draining = False
        self.dumps: dict[int, Any] = {}  # of a link: its Dump under way
        self.seen: Tally[tuple[int, int]] = Tally()  # answers by opcode and status
        return open_store(
            buckets=self.buckets,
            holdings=self.holdings,
            holdings_per_connection=self.per_connection,
            name_memory=self.name_blocks * BLOCK,
            hash_key=draw.getrandbits(128).to_bytes(16, "little"),
            figures=dict,
        )

    def arrived(self) -> Books:
        return Books()

    # ---- what clients ask ----

    def compose(self, link: Link) -> bytes:
        draw = self.random.random
        data = b""
        for _ in range(self.batch()):
            data += self.request(link, draw(), len(data))
        return data

    def request(self, link: Link, kind: float, before: int) -> bytes:
        draw = self.random.random
        books: Books = link.books
        books.asked = opaque = books.asked + 1
        name = self.names[int(draw() * len(self.names))]
        resources = maximum = 0
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
            opcode = self.random.choice((DUMP, DUMP, STATS, UNKNOWN))
            data = _BARE(0x90, opcode, 0, 0, opaque)
        elif kind < 0.98:
            opcode, sure = ACQUIRE, False  # of nothing
            data = _ACQUIRE(0x90, ACQUIRE, 0, 10 + len(name), opaque, 0, 1, len(name)) + name
        else:
            opcode = NOOP
            data = _BARE(0x90, NOOP, 0, 0, opaque)
        link.todo.append((link.bytes_sent + before + len(data), opcode, name, resources, maximum, opaque, sure))
        if opcode == ACQUIRE and resources and not sure:
            books.asked = opaque = opaque + 1
            more = _RELEASE(0x90, RELEASE, 0, 6 + len(name), opaque, resources, len(name)) + name
            data += more
            link.todo.append((link.bytes_sent + before + len(data), RELEASE, name, resources, 0, opaque, False))
        return data

    def is_open(self, link: Link, name: bytes) -> bool:
        """Whether the client holds anything of it, or may do so soon: then it could not tell what it gives back."""
        return name in link.books.known or self.is_asked(link, name)

    def is_asked(self, link: Link, name: bytes) -> bool:
        """Whether an answer about it is yet to come."""
        return any(request[2] == name for request in link.todo) or any(answer[0] == name for _, answer in link.marks)

    def nonsense(self, link: Link) -> bytes:
        link.books.asked += 1
        data = self.random.choice((b"\x91" * 12, _BARE(0x90, ACQUIRE, 0, 1 << 24, link.books.asked)))
        opaque = _HEADER(data)[5]
        link.todo.append((link.bytes_sent + 12, data[1], b"", -1, 0, opaque, False))
        return data

    # ---- what the engine answers ----

    def answered(self, link: Link, output: bytes) -> None:
        position, size = 0, len(output)
        todo = link.todo
        base = link.bytes_out
        count = 0
        while position < size:
            magic, opcode, status, _, length, opaque = _HEADER(output, position)
            end = position + 12 + length
            if not todo or magic != 0x91 or end > size:
                raise Violation("replies", f"connection {link.number} was sent {output[position : position + 40]!r}")
            request = todo[0]
            if opaque != request[5] or opcode != request[1]:
                raise Violation("replies", f"{request} was answered {output[position : position + 40]!r}")
            answer = self.judge(link, request, status, output[position + 12 : end])
            position = end
            if answer is not None:
                todo.popleft()
                count += 1
                if request[6] or opcode != NOOP:
                    link.marks.append((base + position, answer))
        session = link.session
        # A Dump is executed when it begins, which may be before anything of it is said, and answered when it ends.
        dumps = session.more and bool(todo) and todo[0][1] == DUMP and session.requests - link.executed > count
        if session.requests - link.executed != count + dumps:
            raise Violation("replies", f"{session.requests - link.executed} were executed, {count} answered")
        link.executed = session.requests - dumps
        if todo and not session.more and not session.closing and todo[0][0] <= link.bytes_fed:
            raise Violation("progress", f"{todo[0]} was read by connection {link.number}, and not answered")

    def judge(self, link: Link, request: Any, status: int, body: bytes) -> tuple[bytes, int, bool] | None:
        """What an answer is to the books: what the client learns, or None where the answer goes on."""
        _, opcode, name, resources, _, _, sure = request
        self.seen[opcode, status] += 1
        if resources < 0:
            if status not in (INVALID, UNKNOWN_COMMAND):
                raise Violation("replies", f"nonsense was answered {status:#x}")
        elif opcode == ACQUIRE:
            self.judge_acquire(link, request, status, body)
            if status == OK:
                return name, resources if sure else 0, True
        elif opcode == RELEASE:
            self.judge_release(link, name, resources, status)
        elif opcode == GET:
            self.judge_get(name, _NUMBER(body)[0] if status == OK else 0, status)
        elif opcode == DUMP:
            return self.judge_dump(link, body)
        elif status != (UNKNOWN_COMMAND if opcode == UNKNOWN else OK):
            raise Violation("replies", f"{opcode:#x} was answered {status:#x}")
        elif opcode == STATS:
            self.tells_figures = True
        return name, 0, False

    def judge_acquire(self, link: Link, request: Any, status: int, body: bytes) -> None:
        _, _, name, resources, maximum, _, _ = request
        held = self.totals[name]
        if status == OK:
            if held + resources > maximum:
                raise Violation("limit", f"{resources} of {maximum} were granted of {name!r}, with {held} held")
            if self.draining or resources == 0:
                raise Violation("drain" if resources else "replies", f"{resources} of {name!r} were granted")
            books = link.books.held
            if name not in books:
                books[name] = 0
                self.open_holdings += 1
            books[name] += resources
            self.used(name)
            if not held + self.leaving[name]:
                self.since[name] = self.steps
            self.totals[name] = held + resources
            self.top[name] = max(self.top.get(name, 0), maximum)
        elif resources == 0:
            if status != INVALID:
                raise Violation("replies", f"an acquire of nothing was answered {status:#x}")
        elif status == NOT_AVAILABLE:
            if (body == DRAINING) != self.draining:
                raise Violation("drain", f"{body!r} while {'' if self.draining else 'not '}draining")
            if not self.draining and held + self.leaving[name] + resources <= maximum:
                raise Violation("refused", f"{resources} of {maximum} of {name!r} with {held} held")
        elif status == FULL:
            self.judge_full(link, name)
        else:
            raise Violation("replies", f"an acquire was answered {status:#x}")

    def judge_full(self, link: Link, name: bytes) -> None:
        """Out of memory is said where something has run out, and only there."""
        held = len(link.books.held)
        if self.open_holdings + self.leaving_holdings >= self.holdings or (
            self.per_connection and held >= self.per_connection
        ):
            return
        if self.buckets > RECLAIM_STEPS:
            return  # what is idle may be out of reach
        busy = {name for name, total in self.totals.items() if total} | self.leaving.keys()
        if len(busy) < self.buckets and sum(map(blocks, busy)) + blocks(name) <= self.name_blocks:
            raise Violation("room", f"there is room for {name!r} beside {len(busy)} of {self.buckets}")

    def judge_release(self, link: Link, name: bytes, resources: int, status: int) -> None:
        books = link.books.held
        held = books.get(name, 0)
        if status == OK:
            if resources == 0:
                return
            if resources > held:
                raise Violation("release", f"{resources} of {name!r} were given back by one that holds {held}")
            books[name] = held - resources
            if held == resources:
                del books[name]
                self.open_holdings -= 1
            self.totals[name] -= resources
            self.used(name)
        elif status not in (NOT_ACQUIRED, NOT_FOUND) or (resources <= held and held):
            raise Violation("release", f"{resources} of {name!r}, held {held}, were answered {status:#x}")
        elif status == NOT_FOUND and self.totals[name]:
            raise Violation("existence", f"{name!r} is held, and not found")

    def judge_get(self, name: bytes, consumption: int, status: int) -> None:
        held = self.totals[name]
        if status not in (OK, NOT_FOUND):
            raise Violation("replies", f"a get was answered {status:#x}")
        if not held <= consumption <= held + self.leaving[name]:
            raise Violation("get", f"{name!r} is told to be {consumption}, and is {held}, {self.leaving[name]} leaving")
        if status == OK and not consumption and name not in self.leaving and self.used_in.get(name) != self.window:
            raise Violation("existence", f"{name!r} is told of, which was last used in window {self.used_in.get(name)}")

    def judge_dump(self, link: Link, body: bytes) -> tuple[bytes, int, bool] | None:
        """Every counter once, as it is; what is held throughout is there."""
        if link.number not in self.dumps:
            busy = sorted(name for name, total in self.totals.items() if total)
            self.dumps[link.number] = (self.steps, busy, set())
        begun, busy, seen = self.dumps[link.number]
        if body:
            consumption, _, length = _ENTRY(body)
            name = body[10:]
            # One that was made anew since, in another place, may be told of again.
            if length != len(name) or (name in seen and self.since.get(name, 0) < begun):
                raise Violation("dump", f"{name!r} is told of twice, or wrongly")
            seen.add(name)
            self.judge_get(name, consumption, OK)
            return None
        del self.dumps[link.number]
        missing = [name for name in busy if name not in seen and self.totals[name] and self.since[name] < begun]
        if missing:
            raise Violation("dump", f"{missing} are not told of")
        return b"", 0, False

    def used(self, name: bytes) -> None:
        self.used_in[name] = self.window

    # ---- what the clients know ----

    def delivered(self, link: Link, answer: tuple[bytes, int, bool]) -> None:
        name, resources, granted = answer
        if not granted or not resources:
            return
        known = link.books.known
        known[name] = known.get(name, 0) + resources
        self.known[name] += resources
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

    def left(self, link: Link) -> None:
        for name, resources in link.books.held.items():
            self.totals[name] -= resources
            self.leaving[name] += resources
        self.open_holdings -= len(link.books.held)
        self.leaving_holdings += len(link.books.held)
        link.books.held = {}
        self.dumps.pop(link.number, None)

    # ---- what has to hold ----

    def check(self) -> int:
        held = self.store.held()
        open_holdings = self.open_holdings
        due: int = self.store.next_deadline()
        if held == open_holdings:
            if self.leaving_holdings:
                self.given_back()
        elif not open_holdings < held <= open_holdings + self.leaving_holdings:
            raise Violation(
                "ledger", f"{held} holdings, {open_holdings} of who is there, {self.leaving_holdings} of others"
            )
        elif due != 0:
            raise Violation("deadline", f"nothing is due, with {held - open_holdings} holdings to be given back")
        return due

    def given_back(self) -> None:
        for name in self.leaving:
            self.used(name)  # at the latest
        self.leaving.clear()
        self.leaving_holdings = 0

    def tick(self) -> None:
        left = self.store.held() - self.open_holdings
        World.tick(self)
        if self.store.held() - self.open_holdings > max(0, left - SLICE_STEPS):
            raise Violation("progress", f"a tick gave back {left - self.store.held() + self.open_holdings} of {left}")

    def meddle(self) -> None:
        draw = self.random.random()
        if draw < 0.5:
            self.window += 1 if draw < 0.45 else 3
            self.store.begin_window(self.window)
            self.step("window", None, self.window)
        elif draw < 0.55:
            self.store.begin_window(self.window)  # numbers only rise
            self.step("window", None, self.window)
        elif draw < 0.75:
            self.per_connection = self.random.choice((0, 0, 1, 2, 5))
            self.store.limit_holdings(self.per_connection)
            self.step("limit", None, self.per_connection)

    def settled(self) -> None:
        if self.store.held() != self.open_holdings or self.store.next_deadline() != -1:
            raise Violation("deadline", "nothing is under way, and something is due")
        for link in self.links.values():
            if link.books.held != link.books.known:
                raise Violation("books", f"connection {link.number} knows {link.books.known}, holds {link.books.held}")

    def emptied(self) -> None:
        store = self.store
        figures = store.snapshot()
        left = {key: figures[key] for key in ("holdings", "busy", "holdings_leaving", "curr_connections")}
        if any(left.values()) or store.next_deadline() != -1 or +self.known or +self.totals:
            raise Violation("empty", f"everybody has gone, and there is {left}, {+self.known}")
        self.now += SECOND
        self.window += 1
        store.begin_window(self.window)
        while store.next_deadline() >= 0:
            self.tick()
        figures = store.snapshot()
        left = {key: figures[key] for key in ("records", "idle", "objects", "name_memory")}
        if any(left.values()):
            raise Violation("empty", f"nobody uses anything, and there is {left}")
        self.fill()

    def fill(self) -> None:
        """All that was ever free is free: as many counters can be had as there were at first, and one more cannot."""
        if self.draining:
            return
        self.store.limit_holdings(0)
        self.per_connection = 0
        session = self.store.session(self.now)
        count = min(self.buckets, self.holdings)
        for number in range(count + 1):
            data = _ACQUIRE(0x90, ACQUIRE, 0, 14, number, 1, 1, 4) + b"%04d" % number
            status = session.receive(data, self.now)[2]
            if status != (OK if number < count else FULL):
                raise Violation("room", f"counter {number} of {count} was answered {status:#x}")
            self.open_holdings += number < count
            self.used(b"%04d" % number)
            self.step("receive", None, number)
        session.closed(self.now)
        self.leaving_holdings, self.open_holdings = self.open_holdings, 0
        self.step("closed", None)
        while self.store.next_deadline() >= 0:
            self.tick()
        if self.random.random() < 0.05:
            self.draining = True  # there is no way back: from here on, nothing is granted
            self.store.begin_drain()
            self.step("drain", None)
