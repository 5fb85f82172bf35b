"""A daemon's world in one process: clients, a network and a clock that are simulated, around a real store.

The world plays what net plays for the engine (net/connection.pyx, net/driver.pyx): it gives a session what arrives,
stops reading while output is stuck or more is due, has output fetched in turns, and tells a session of its end.
Requests and replies are bytes under way, cut anywhere, late, or lost with their connection. Clients come and go as they
do out there: they pipeline, stop reading, half-close, reset, vanish, and send nonsense.

All that happens is an event at a moment of the simulated clock, and all that is random comes from one generator. So a
seed is a history, which comes out the same each time: no time but the events', no thread, no order of a set.

A step is one call that may change the engine: a new session, a piece received, an end of the input, a piece of output
fetched or waited for, a connection's end, a tick, a window, a changed limit, what a journal is told or says. After
each, the store is audited from end to end, and the protocol's books (`check`), kept here from what was answered, are
held against it.
"""

from __future__ import annotations

import heapq
import random
from collections import deque
from typing import TYPE_CHECKING, Any, ClassVar
from zlib import crc32

from kit.promises import MS, SECOND, US, Violation

if TYPE_CHECKING:
    from collections.abc import Callable

KEEPALIVE_NS = 30 * SECOND  # after which a host that has vanished is found to be gone
LINGER_NS = SECOND
TRAIL = 20  # events that are told of a violation
# Turns in a row that may bring nothing to a session which has more: an event is told of before the next, and who has
# the turn publishes all that it has sent, up to 400 requests, before some fifty that wait for theirs.
FRUITLESS_MAX = 20_000


class Link:
    """A connection: the client's end and the daemon's, and what is under way between them."""

    __slots__ = (
        "books", "bytes_fed", "bytes_got", "bytes_out", "bytes_sent", "dead", "ended", "executed", "fin", "fruitless",
        "gone", "kernel", "latest_in", "latest_out", "lingering", "marks", "number", "partial", "pulling", "queued",
        "reading", "requests_left", "session", "todo",
    )  # fmt: skip

    def __init__(self, number: int, session: Any, books: Any, requests_left: int) -> None:
        self.number = number
        self.session = session
        self.books = books  # the protocol's
        self.requests_left = requests_left  # batches until it goes
        # what is under way
        self.kernel: list[bytes] = []  # has arrived, and was not read yet
        self.todo: deque[Any] = deque()  # requests, sent and not answered
        self.marks: deque[Any] = deque()  # (where it ends in the output, what it says) of answers
        self.partial = b""  # output that is no whole reply yet
        self.bytes_sent = self.bytes_fed = self.bytes_out = self.bytes_got = 0
        self.latest_in = self.latest_out = 0  # when the last that is under way arrives
        self.executed = 0
        self.fruitless = 0
        # the client's state
        self.gone = False  # it sends nothing more, and holds nothing as far as it knows
        self.reading = True
        # the daemon's
        self.fin = False  # the end of the input has arrived
        self.ended = False  # the session knows
        self.queued = False
        self.pulling = False
        self.lingering = False
        self.dead = False

    def peer(self) -> tuple[str, int]:
        """As Connection.peer, for protocols that ask where somebody comes from."""
        return "127.0.0.1", self.number & 0xFFFF

    def origin(self) -> str:
        """As Connection.origin."""
        return f"127.0.0.1:{self.number & 0xFFFF}"

    def whom(self) -> tuple[bytes, bool]:
        """As Connection.whom: one of three peers, of which one is on this machine."""
        peer = self.number % 3
        return b"%d" % peer, peer == 0


class World:
    """One store and all that happens to it. A protocol's world says what clients ask, and what has to hold.

    seed: of everything. Its attributes with `made of` are chosen from it by shape().
    """

    name: ClassVar[str]

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.random = random.Random(seed)
        self.now = SECOND
        self.events: list[tuple[int, int, Callable[..., None], Any]] = []
        self.sequence = 0
        self.steps = 0
        self.sessions = 0
        self.digest = 0  # of all output but the statistics, which a release of counterd may add to
        self.tells_figures = False
        self.trail: deque[tuple[Any, ...]] = deque(maxlen=TRAIL)
        self.links: dict[int, Link] = {}  # that are open at the daemon
        self.waiting: deque[Link] = deque()  # for the driver
        self.turn_at = -1
        self.open = False  # for new clients, and for new requests
        self.life = 0  # of the daemon: rises when it is killed and another one is started
        self.disk: Any = None  # the journal's, in protocols that have one
        # made of: how many connect at once, how many there are at most, how long they
        # stay, how slow it all is
        self.crowd = self.random.choice((1, 2, 3, 4, 8, 8, 16, 16, 60, 300, 2000))
        self.stay = self.random.choice((2, 6, 20, 60))
        self.latency = self.random.choice((20 * US, 200 * US, 5 * MS))
        self.burst = self.random.choice((2, 8, 8, 8, 8, 400))  # requests in one go
        self.cuts = self.random.choice((0.0, 0.2, 0.7))
        self.rough = self.random.choice((0.0, 0.05, 0.3))  # who stops reading, or goes without a word
        self.store = self.make_store()

    # ---- what a protocol adds ----

    def make_store(self) -> Any:
        raise NotImplementedError

    def arrived(self) -> Any:
        """The books of a new connection, after its session was made."""
        raise NotImplementedError

    def compose(self, link: Link) -> bytes:
        """The client's next requests, which it notes in link.todo."""
        raise NotImplementedError

    def nonsense(self, link: Link) -> bytes:
        """What breaks the framing."""
        raise NotImplementedError

    def answered(self, link: Link, output: bytes) -> None:
        """What the engine says, at the moment at which it does. Leaves marks for the client's end."""
        raise NotImplementedError

    def delivered(self, link: Link, answer: Any) -> None:
        """What a mark says has reached the client."""

    def went(self, link: Link) -> None:
        """The client has let go of all that it knows to hold."""

    def left(self, link: Link) -> None:
        """The session has let go of all that it held, some of which may have to be given back yet."""

    def check(self) -> int:
        """Holds the books against the store, after each step; returns the store's deadline."""
        raise NotImplementedError

    def meddle(self) -> None:
        """Something that is no client's doing: a window turns, a limit changes."""

    def settled(self) -> None:
        """Nothing is under way, and the clients that are there have nothing to say."""

    def emptied(self) -> None:
        """Everybody has gone, and nothing is left to do."""

    # ---- time ----

    def push(self, delay: int, action: Callable[..., None], argument: Any) -> None:
        self.sequence += 1
        heapq.heappush(self.events, (self.now + delay, self.sequence, action, argument))

    def delay(self) -> int:
        """Mostly about the latency, sometimes a multiple."""
        draw = self.random.random()
        return int(self.latency * (draw if draw < 0.95 else 20 * draw)) + 1

    def run(self, steps: int) -> None:
        """Lives through rounds of coming and going until so many steps were taken, and everybody has gone again."""
        while self.steps < steps:
            self.round(min(steps, self.steps + self.random.randrange(500, 20_000)))

    def round(self, until: int) -> None:
        self.open = True
        for _ in range(self.crowd):
            self.push(self.delay(), self.connect, None)
        self.push(self.random.randrange(10 * SECOND), self.outside, None)
        while self.steps < until and self.events:
            self.advance()
        self.open = False
        self.drain(until + 40 * self.crowd + 400_000)
        self.claim_answered()
        self.settled()
        for link in list(self.links.values()):
            self.depart(link)
        self.drain(self.steps + 40 * self.crowd + 400_000)
        if self.links:
            raise Violation("progress", f"{len(self.links)} connections never ended")
        self.emptied()

    def drain(self, bound: int) -> None:
        horizon = self.now + 3 * KEEPALIVE_NS  # beyond which there are only keys that expire
        while self.events and self.events[0][0] <= horizon:
            self.advance()
            if self.steps > bound:
                raise Violation("progress", "nothing new happens, and it does not come to an end")

    def advance(self) -> None:
        at, _, action, argument = heapq.heappop(self.events)
        self.now = max(self.now, at)
        action(argument)

    def claim_answered(self) -> None:
        """With nothing under way, whoever is connected has had every answer."""
        for link in self.links.values():
            if link.todo or link.marks or link.partial:
                raise Violation("progress", f"connection {link.number} waits for {len(link.todo)} answers, for ever")
        if self.waiting:
            raise Violation("progress", f"{len(self.waiting)} connections wait for a turn, for ever")

    # ---- steps ----

    def step(self, what: str, link: Link | None, size: int = 0) -> None:
        """After each call that may have changed the engine."""
        self.steps += 1
        self.trail.append((self.steps, self.now, what, link.number if link is not None else 0, size))
        try:
            self.store.audit()
        except AssertionError as error:
            raise Violation("audit", str(error)) from None
        due = self.check()
        if self.waiting:
            due = 0
        self.wake(due)

    # ---- the driver's part ----

    def wake(self, due: int) -> None:
        """A turn at that moment, unless there is a sooner one; -1 is none. A busy loop comes to it later."""
        at = max(due, self.now)
        if due >= 0 and (self.turn_at < 0 or at < self.turn_at):
            self.turn_at = at
            self.push(at - self.now + int(self.random.random() * 100 * US), self.turn, at)

    def turn(self, at: int) -> None:
        """As Driver.turn: due work, a few of the connections that have output to be fetched, then the journal."""
        if at != self.turn_at:
            return  # there was a sooner one
        self.turn_at = -1
        store = self.store
        if store.next_deadline() >= 0:
            self.tick()
        for session in store.take_dirty():
            if session.owner is not None:
                self.waiting.append(session.owner)
        count = 1 + int(self.random.random() * 8)
        while self.waiting and count:
            count -= 1
            self.pull(self.waiting.popleft())
        self.tell_journal()
        self.wake(0 if self.waiting else store.next_deadline())

    def tell_journal(self) -> None:
        """Has a journal told of what has changed, where there is one."""
        if self.disk is not None:
            self.disk.turn()

    def if_alive(self, argument: tuple[int, Callable[[], None]]) -> None:
        """Does what an event of that life is for, unless the daemon is another one by now."""
        life, action = argument
        if life == self.life:
            action()

    def tick(self) -> None:
        self.store.tick(self.now)
        self.step("tick", None)

    def pull(self, link: Link) -> None:
        """As Connection.pull."""
        link.pulling = False
        if link.dead:
            return
        session = link.session
        if link.queued:
            session.wait()
            self.step("wait", link)
        if session.dropped:
            self.lost(link)
            return
        if link.queued:
            return
        output = session.take_output(self.now)
        if session.more and not output:
            link.fruitless += 1
            if link.fruitless > FRUITLESS_MAX:
                raise Violation(
                    "progress", f"connection {link.number} has more, and {FRUITLESS_MAX} turns brought none"
                )
        else:
            link.fruitless = 0
        self.took("take_output", link, output)

    # ---- the daemon's end of a connection ----

    def took(self, what: str, link: Link, output: bytes, *_data: bytes) -> None:
        """After a call of the session, which was told the data: as Connection.send and settle."""
        self.answered(link, output)
        if output and not self.tells_figures:
            self.digest = crc32(output, self.digest)
        self.tells_figures = False
        if link.session.number == 0:  # it was answered to its end, or sent nonsense
            self.left(link)
        self.step(what, link, len(output))
        if output:
            self.send(link, len(output))
        self.settle(link)

    def settle(self, link: Link) -> None:
        if link.dead or link.queued or link.lingering:
            return
        session = link.session
        if session.more:
            if not link.pulling:
                link.pulling = True
                self.waiting.append(link)
                self.wake(0)
        elif session.closing:
            if link.ended:
                self.lost(link)
            else:
                link.lingering = True
                self.push(min(self.delay() * 2, LINGER_NS), self.lost, link)
        elif link.kernel or (link.fin and not link.ended):
            self.push(1, self.read, link)

    def read(self, link: Link) -> None:
        """What has arrived, unless reading is paused: then whatever ends the pause comes back to it."""
        if link.dead or link.queued or link.session.more:
            return
        if link.kernel:
            data = link.kernel[0] if len(link.kernel) == 1 else b"".join(link.kernel)
            link.kernel.clear()
            if link.lingering:
                return
            link.bytes_fed += len(data)
            self.took("receive", link, link.session.receive(data, self.now), data)
        elif link.fin and not link.ended:
            link.ended = True
            if not link.lingering:
                self.took("eof", link, link.session.eof(self.now))

    def lost(self, link: Link) -> None:
        """As Connection.connection_lost."""
        if link.dead:
            return
        link.dead = True
        self.leave(link)
        link.session.closed(self.now)
        link.session.owner = None
        del self.links[link.number]
        self.left(link)
        self.step("closed", link)
        link.session = None
        if self.open:
            self.push(self.delay(), self.connect, None)

    # ---- the network ----

    def arrive(self, argument: tuple[Link, bytes]) -> None:
        link, data = argument
        if not link.dead:
            link.kernel.append(data)
            self.read(link)

    def arrive_end(self, link: Link) -> None:
        if not link.dead:
            link.fin = True
            self.read(link)

    def arrive_reset(self, link: Link) -> None:
        link.kernel.clear()
        self.lost(link)

    def batch(self) -> int:
        """How many requests a client sends in one go: mostly few."""
        draw = self.random.random()
        return 1 + int(draw**32 * self.burst if self.burst > 8 else draw * draw * self.burst)

    def emit(self, link: Link, data: bytes) -> None:
        """From the client, in as many pieces as may be, each later than the one before."""
        link.bytes_sent += len(data)
        start = 0
        while self.random.random() < self.cuts and len(data) - start > 1:
            cut = start + 1 + int(self.random.random() * (len(data) - start - 1))
            self.emit_later(link, self.arrive, (link, data[start:cut]))
            start = cut
        self.emit_later(link, self.arrive, (link, data[start:]))

    def emit_later(self, link: Link, action: Callable[..., None], argument: Any) -> None:
        at = max(self.now + self.delay(), link.latest_in)
        link.latest_in = at
        self.push(at - self.now, action, argument)

    def send(self, link: Link, size: int) -> None:
        """From the daemon. Of a client that does not read, it is stuck there: its socket has room for nothing."""
        link.bytes_out += size
        if not link.reading:
            link.queued = True
        elif not link.gone:
            self.send_later(link)

    def send_later(self, link: Link) -> None:
        at = max(self.now + self.delay(), link.latest_out)
        link.latest_out = at
        self.push(at - self.now, self.deliver, (link, link.bytes_out))

    # ---- the client's end ----

    def connect(self, _: None) -> None:
        if not self.open:
            return
        try:
            session = self.store.session(self.now)
        except MemoryError as error:
            self.refused(str(error))
            self.step("refused", None)
            self.push(self.delay() * 10, self.connect, None)
            return
        self.think(self.admit(session))

    def admit(self, session: Any) -> Link:
        """A connection, whose client asks nothing by itself yet."""
        self.sessions += 1
        stay = 1 + int(self.random.random() * self.stay * 2)
        link = Link(self.sessions, session, None, stay)
        session.owner = link
        self.links[link.number] = link
        link.books = self.arrived()
        self.step("session", link)
        return link

    def refused(self, why: str) -> None:
        """A session could not be made."""
        raise Violation("admission", why)

    def think(self, link: Link) -> None:
        """The client does what comes next: asks, stops reading, or goes."""
        if link.gone or link.dead or not self.open:
            return
        if link.requests_left <= 0:
            self.depart(link)
            return
        link.requests_left -= 1
        draw = self.random.random()
        if draw < self.rough * 0.1 and link.reading:
            link.reading = False
            pause = min(self.delay() * self.random.choice((2, 20, 1000)), KEEPALIVE_NS)
            self.push(pause, self.patience if draw < self.rough * 0.02 else self.resume, link)
        self.emit(link, self.compose(link))
        if draw > 0.8 or not link.reading:  # does not wait for what it has asked
            self.push(self.delay(), self.think, link)

    def deliver(self, argument: tuple[Link, int]) -> None:
        """So much of the output has reached the client, which asks again once it has all it asked for."""
        link, size = argument
        marks = link.marks
        if link.gone or size <= link.bytes_got:
            return
        link.bytes_got = size
        if not marks:
            return
        while marks and marks[0][0] <= size:
            self.delivered(link, marks.popleft()[1])
        if not marks and not link.todo:
            self.push(self.delay(), self.think, link)

    def resume(self, link: Link) -> None:
        """A client reads again, and all that was stuck goes out."""
        if link.reading:
            return
        link.reading = True
        if link.gone or link.dead:
            return
        if link.bytes_out > link.bytes_got:
            self.send_later(link)
        if link.queued:
            link.queued = False
            self.settle(link)

    def patience(self, link: Link) -> None:
        """The daemon's is over with a client that does not read, if anything is stuck."""
        if link.queued:
            self.lost(link)
        else:
            self.resume(link)

    def leave(self, link: Link) -> None:
        if not link.gone:
            link.gone = True
            self.went(link)

    def depart(self, link: Link) -> None:
        """In one of the ways in which clients go. Nothing of what they hold do they count on any more."""
        if link.gone:
            return
        self.leave(link)
        draw = self.random.random()
        if draw < 0.35:
            self.emit_later(link, self.arrive_reset, link)
        elif draw < 0.37 + self.rough / 5:
            self.push(KEEPALIVE_NS, self.lost, link)
        else:
            if draw > 0.95:
                self.emit(link, self.nonsense(link))
            self.emit_later(link, self.arrive_end, link)
            # It waits for the daemon's end, or at least does not keep it from sending.
            link.reading = True
            if link.queued:
                link.queued = False
                self.settle(link)
            self.push(KEEPALIVE_NS, self.lost, link)

    # ---- from outside ----

    def outside(self, _: None) -> None:
        if self.open:
            self.meddle()
            self.push(self.random.randrange(10 * SECOND), self.outside, None)
