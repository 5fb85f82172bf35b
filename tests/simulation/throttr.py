"""The throttr protocol's world: keys that expire at their moment, quotas that are counted, and events in one order.

The model that the property tests have is executed beside the engine, request by request in the order in which it
answers: so every reply is known, but where memory or places run out, which may refuse a request only where they have.
Events come to each subscriber in the order in which they were published, none left out: for as long as it is
subscribed, and not dropped. They may come behind replies to what it has asked since.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from conformance.throttr.replies import INFO, LIST, STATS
from counterd.protocols.throttr._session import ThrottrSession
from counterd.protocols.throttr._store import KEY_BYTES, ThrottrStore
from kit.promises import SECOND, Violation
from property.throttr_model import (
    BUFFER,
    DONE,
    EVENT,
    FAILED,
    GET,
    INSERT,
    LAYOUT,
    PUBLISH,
    PURGE,
    QUERY,
    QUOTA,
    SET,
    STAT,
    SUBSCRIBE,
    TTL,
    UNSUBSCRIBE,
    UPDATE,
    WHEEL_NS,
    WHOAMI,
    Answer,
    Key,
    Listing,
    Model,
    ModelSession,
    Reader,
    check_answers,
    encode,
)
from simulation.world import World

if TYPE_CHECKING:
    from simulation.world import Link

INLINE, PREFIX, BLOCK, PAYLOAD = 24, 16, 64, 60  # bytes of a key: in its record, of longer ones, and in a block
CHANNEL_INLINE, CHANNEL_PREFIX = 36, 28
LEAD = 4  # bytes of a value's first block
SUBSCRIPTION_BLOCKS = 3
ID_SIZE = 16
EVERYBODY = b"*"


class Incomplete(Exception):
    """The rest of a reply is yet to come."""


class Pieces(Reader):
    """Takes from a reply that comes in pieces."""

    def take(self, size: int) -> bytes:
        if self.position + size > len(self.data):
            raise Incomplete
        return super().take(size)


def chain(size: int) -> int:
    return -(-size // PAYLOAD)


def name_blocks(name: bytes) -> int:
    return chain(len(name) - PREFIX) if len(name) > INLINE else 0


def value_blocks(value: bytes | None) -> int:
    return 0 if value is None else chain(LEAD + len(value))


class Books(Model):
    """The model. A request was refused with `status`, or not, which it can only know of where the protocol is
    bounded."""

    def __init__(self, world: ThrottrWorld) -> None:
        super().__init__(world.width, world.max_message, world.grace)
        self.world = world
        self.status = DONE

    @property
    def sessions_open(self) -> int:
        """Those too that have said all, or were dropped, and are yet to be closed."""
        return len(self.world.links)

    def has_place(self) -> bool:
        self.world.full += self.status == FAILED
        return self.status == DONE

    def has_room(self, name: bytes, key: Key | None, value: bytes | None) -> bool:
        if self.status == DONE:
            return True
        if key is None:
            return not self.world.is_full(1, name_blocks(name) + value_blocks(value))
        return not self.world.is_full(0, value_blocks(value) - value_blocks(key.value))

    def late(self, session: ModelSession, name: bytes) -> list[Answer]:
        """Events that have not come yet: of one that is being delivered, as many as it is subscribed times."""
        late: list[Answer] = [event for event in session.answers if event.channel == name]
        if late:
            times = self.channels[name].subscriptions[session].times
            assert late == late[:1] * times, f"of {name!r} {len(late)} events are missing, and it has {times} of each"
        return late

    def subscribe(self, session: ModelSession, name: bytes) -> bool:
        """What has not come to it yet will come once more."""
        late = self.late(session, name)
        done = super().subscribe(session, name)
        if done:
            session.answers += late[:1]
        return done

    def unsubscribe(self, session: ModelSession, name: bytes) -> bool:
        """What has not come to it yet never will."""
        if self.late(session, name):
            session.answers = [event for event in session.answers if event.channel != name]
        return super().unsubscribe(session, name)

    def leave(self, session: ModelSession) -> None:
        session.answers.clear()
        super().leave(session)

    def learn(self, session: ModelSession, identity: bytes) -> None:
        """Of the id of a connection."""
        assert len(identity) == ID_SIZE
        assert identity not in self.sessions, f"the id {identity.hex()} is another's"
        self.sessions[identity] = self.sessions.pop(session.identity)
        session.identity = identity


class End:
    """Of one connection. begun: its first request in todo was executed, and this reply is yet to come, or to go on."""

    __slots__ = ("begun", "is_named", "mirror")

    def __init__(self, mirror: ModelSession) -> None:
        self.mirror = mirror
        self.begun: Answer | None = None
        self.is_named = False


class ThrottrWorld(World):
    """What is in Link.todo: where a request ends in the input, its opcode, and its fields."""

    name = "throttr"

    def make_store(self) -> ThrottrStore:
        draw = self.random
        self.width = draw.choice((1, 2, 2, 4, 8))
        self.most = 256**self.width - 1
        self.grace = draw.choice((0, 0, 0, SECOND))
        bits = draw.choice((2, 4, 6, 8, 10)) if self.crowd < 60 else draw.choice((6, 8))
        self.keys_max = 1 << bits - 1
        places = max(2 * self.crowd, 8)
        self.memory = draw.choice((self.keys_max * KEY_BYTES // 2, self.keys_max * KEY_BYTES * 3))
        self.max_queued = draw.choice((200, 4096, 65536))
        self.max_message = 1024
        count = max(1, int(self.keys_max * draw.choice((0.5, 1, 2))))
        sizes = draw.choice(((4,), (4, 24, 25, 77), (0, 4, 100, 251)))
        self.names = [b"%d" % number + b"k" * draw.choice(sizes) for number in range(min(count, 1000))]
        self.channels = [b"c%d" % number + b"h" * draw.choice((0, 40)) for number in range(draw.choice((1, 3, 20)))]
        self.channels.append(EVERYBODY)
        self.chatty = draw.choice((0.0, 0.05, 0.3))  # requests that are of channels
        self.pace = draw.choice((1, 20, 1000))  # how long keys last
        self.model = Books(self)
        self.published = 0
        self.full = 0
        self.checked = 0
        self.seen: dict[tuple[int, int], int] = {}  # answers by opcode and status
        return ThrottrStore(
            keys=self.keys_max, channels=2 * places, subscriptions=4 * places, memory_limit=self.memory,
            hash_key=draw.getrandbits(128).to_bytes(16, "little"), reply_max=1 << 16, posted_max=self.max_queued,
            value_size=self.width, max_message=self.max_message, expiry_grace_ns=self.grace,
            make_session=ThrottrSession, now_ns=self.now,
        )  # fmt: skip

    def arrived(self) -> End:
        self.model.status = DONE
        return End(self.model.session(self.now))

    def refused(self, why: str) -> None:
        """Half of all places are for the two channels that each connection has: they are enough for twice the crowd."""
        if len(self.links) < self.crowd and self.store.next_deadline() != 0:
            raise Violation("admission", f"{why}, with {len(self.links)} connections")

    def subscribers(self, name: bytes) -> int:
        """Connections."""
        return len(self.model.channels[name].subscriptions) if name in self.model.channels else 0

    # ---- what clients ask ----

    def compose(self, link: Link) -> bytes:
        data = b""
        for _ in range(self.batch()):
            request = self.request()
            data += encode(self.width, *request)
            link.todo.append((link.bytes_sent + len(data), *request))
        return data

    def request(self) -> tuple[Any, ...]:
        draw = self.random.random
        name = self.names[int(draw() * len(self.names))]
        chance = draw()
        if draw() < self.chatty:
            return self.chat(chance)
        if chance < 0.2:
            number = int(draw() * min(self.most, 1000))
            return INSERT, number, *self.ttl(), name
        if chance < 0.6:
            attribute, change = self.random.choice((QUOTA, QUOTA, QUOTA, QUOTA, TTL, 7)), int(draw() * 3.1)
            number = int(draw() * 30) if draw() < 0.9 else int(draw() * self.most)
            return UPDATE, attribute, change, number, name
        if chance < 0.7:
            kind, ttl = self.ttl()
            return SET, kind, ttl, name, b"v" * int(draw() * draw() * min(self.most, 500))
        if chance < 0.99:
            opcode = QUERY if chance < 0.85 else GET if chance < 0.93 else STAT if chance < 0.95 else PURGE
            return opcode, name
        return (self.random.choice((LIST, STATS, INFO)),)

    def chat(self, chance: float) -> tuple[Any, ...]:
        """What many hear is rare: else somebody asks who it is."""
        draw = self.random.random
        name = self.channels[int(draw() * len(self.channels))]
        if chance < 0.4:
            return SUBSCRIBE if chance < 0.2 else UNSUBSCRIBE, name
        if chance >= 0.9 or draw() * self.subscribers(name) > 8:
            return (WHOAMI,)
        self.published += 1
        return PUBLISH, name, b"%d" % self.published

    def ttl(self) -> tuple[int, int]:
        """Of seconds mostly, times the pace; now and then of any type, or none at all."""
        draw = self.random.random()
        if draw < 0.7:
            return 3, min(self.most, 1 + int(self.random.random() * self.pace * 10))
        if draw < 0.75:
            return self.random.choice((0, 1, 2, 3, 4, 5, 6, 9)), int(self.random.random() * self.most)
        return 2, min(self.most, int(self.random.random() * self.pace * 1000))

    def nonsense(self, link: Link) -> bytes:
        data = self.random.choice((b"\x0a", b"\x00", b"\xff"))
        link.todo.append((link.bytes_sent + 1, data[0]))
        return data

    # ---- what the engine answers ----

    def answered(self, link: Link, output: bytes) -> None:
        reader = Reader(link.partial + output if link.partial else output)
        base = link.bytes_out - len(link.partial)
        todo, session, end = link.todo, link.session, link.books
        left = session.requests - link.executed  # requests that this call executed
        link.executed = session.requests
        self.model.now_ns = self.now
        begins = 0  # where the reply does
        try:
            while begins < len(reader.data):
                if reader.data[begins] == EVENT:
                    self.told(end.mirror, reader)
                else:
                    assert todo, "it has asked nothing"
                    left -= end.begun is None
                    self.judge(end, todo[0], reader)
                    end.begun = None
                    todo.popleft()
                    link.marks.append((base + reader.position, None))
                begins = reader.position
        except Incomplete:
            pass
        except AssertionError as error:
            raise Violation("replies", f"connection {link.number}, which has asked {[*todo][:1]}: {error}") from None
        if left == 1 and todo and end.begun is None and todo[0][1] in (PUBLISH, LIST, STATS):
            # Of a PUBLISH the event is posted, and the reply behind that.
            end.begun = self.execute(end, todo[0], DONE, reader)
        elif left:
            raise Violation("replies", f"{left} more requests were executed than answered: {list(todo)[:2]}")
        link.partial = reader.data[begins:]
        if todo and not session.more and not session.closing and todo[0][0] <= link.bytes_fed:
            raise Violation("progress", f"{todo[0]} was read by connection {link.number}, and not answered")

    def told(self, mirror: ModelSession, reader: Reader) -> None:
        """An event: the next."""
        assert mirror.answers, f"nobody expects {reader.data[reader.position :][:60]!r}"
        mirror.answers.pop(0).check(reader)

    def judge(self, end: End, request: tuple[Any, ...], reader: Reader) -> None:
        """A reply. Of a listing that comes in pieces some may have gone meanwhile."""
        opcode, status = request[1], reader.data[reader.position : reader.position + 1]
        begun = end.begun
        answer = begun or self.execute(end, request, status, reader)
        if isinstance(answer, Listing):
            end.begun = answer
            pieces = Pieces(reader.data, reader.position)
            answer.check(pieces, is_whole=begun is None)
            reader.position = pieces.position
        else:
            answer.check(reader)
        self.seen[opcode, status[0]] = self.seen.get((opcode, status[0]), 0) + 1

    def execute(self, end: End, request: tuple[Any, ...], status: bytes, reader: Reader) -> Answer:
        """Tells the model, and it how that has ended; the answer is what it says."""
        opcode, model, mirror = request[1], self.model, end.mirror
        model.status = status
        if opcode not in LAYOUT:
            return mirror.break_off()[0]
        if opcode == WHOAMI and not end.is_named:
            model.learn(mirror, reader.data[reader.position + 1 : reader.position + 1 + ID_SIZE])
            end.is_named = True
        elif opcode == INFO or (opcode == PUBLISH and status == FAILED):
            self.tells_figures |= opcode == INFO
            self.leave_dropped()
        return model.execute(mirror, opcode, request[2:])[0]

    def is_full(self, records: int, blocks: int) -> bool:
        """Whether so much more may indeed not fit, by what there can be at most. Looks at all there is now and then."""
        self.full += 1
        if self.full % 8:
            return True
        kept = [
            name_blocks(name) + value_blocks(key.value if key.kind == BUFFER else None)
            for name, key in self.model.keys.items()
        ]
        keys, used = len(kept) + records, sum(kept) + blocks
        subscriptions = self.store.snapshot()["subscriptions"] * SUBSCRIPTION_BLOCKS
        names = sum(chain(len(name) - CHANNEL_PREFIX) for name in self.model.channels if len(name) > CHANNEL_INLINE)
        is_full = keys > self.keys_max or used + names > self.memory // BLOCK
        return is_full or keys * KEY_BYTES + (used + names + subscriptions) * BLOCK > self.memory

    # ---- what has to hold ----

    def left(self, link: Link) -> None:
        self.model.now_ns = self.now
        self.model.leave(link.books.mirror)

    def leave_dropped(self) -> None:
        """Whoever took too little is dropped while others publish, and the driver only comes to it later."""
        for link in self.links.values():
            if link.session.dropped:
                self.left(link)

    def check(self) -> int:
        due: int = self.store.next_deadline()
        self.checked += 1
        if self.checked % 64 == 0:
            self.check_keys(due)
        return due

    def check_keys(self, due: int) -> None:
        """The wheel's next moment is none too late, and what it has passed is gone."""
        keys, grace = self.model.keys, self.grace
        kept = self.store.snapshot()["keys"]
        if due == -1 or due > self.now:  # the wheel has come past what was due by then
            late = self.now - WHEEL_NS - grace
            for name in [name for name, key in keys.items() if key.ends_ns <= late]:
                del keys[name]
        living = [key.ends_ns + grace for key in keys.values() if key.ends_ns + grace > self.now]
        if living and (due == -1 or due > min(living) + WHEEL_NS):
            raise Violation("deadline", f"a key is due at {min(living)}, and the next moment is {due}")
        if not len(living) <= kept <= len(keys):
            raise Violation("expiry", f"{kept} keys are kept, {len(living)} live, {len(keys) - len(living)} just ended")

    def meddle(self) -> None:
        draw = self.random.random()
        if draw < 0.5:
            for each in (self.store, self.model):
                each.set_wall(1_700_000_000 * SECOND + self.now, self.now)
            self.step("wall", None)
        elif draw < 0.75:
            self.max_queued = self.random.choice((200, 4096, 65536))
            self.store.limit_posted(self.max_queued)
            self.step("limit", None, self.max_queued)

    def settled(self) -> None:
        for link in self.links.values():
            if link.books.mirror.answers:
                raise Violation("events", f"{len(link.books.mirror.answers)} never came to connection {link.number}")

    def emptied(self) -> None:
        store, model = self.store, self.model
        figures = store.snapshot()
        left = {key: figures[key] for key in ("subscriptions", "channels", "curr_connections")}
        if any(left.values()) or model.sessions or model.channels:
            raise Violation("empty", f"everybody has gone, and there is {left}")
        self.now += self.random.choice((WHEEL_NS, SECOND, 100 * SECOND)) + self.grace
        self.tick_all(len(model.keys) + 512)
        model.now_ns = self.now
        model.keys = {name: key for name, key in model.keys.items() if model.is_taken(name)}
        if store.snapshot()["keys"] != len(model.keys):
            raise Violation("empty", f"{store.snapshot()['keys']} keys are kept after their time")
        self.by_one([(PURGE, name) for name in model.living()])
        self.now += self.grace + WHEEL_NS
        model.keys.clear()
        self.tick_all()
        figures = store.snapshot()
        left = {key: figures[key] for key in ("keys", "buffer_bytes", "used_memory")}
        if any(left.values()) or store.next_deadline() != -1:
            raise Violation("empty", f"nothing is kept, and there is {left}, due {store.next_deadline()}")
        self.fill()
        told = sorted((*key, count) for key, count in model.outcomes.items())
        if sorted(store.outcomes()) != told:
            raise Violation("counts", f"{sorted(store.outcomes())} are told, not {told}")

    def tick_all(self, bound: int = 1 << 20) -> None:
        while 0 <= self.store.next_deadline() <= self.now:
            self.tick()
            bound -= 1
            if not bound:
                raise Violation("progress", "ticks do not come to an end")

    def by_one(self, requests: list[tuple[Any, ...]]) -> list[bytes]:
        """What somebody asks who goes again; and what is answered."""
        session, mirror, told = self.store.session(self.now), self.arrived().mirror, []
        for request in requests:
            data = encode(self.width, *request)
            told.append(session.receive(data, self.now))
            self.model.status = told[-1]
            mirror.hear(data, self.now)
            try:
                check_answers(told[-1], mirror.take_answers())
            except AssertionError as error:
                raise Violation("life", f"{request}: {error}") from None
            self.step("receive", None)
        session.closed(self.now)
        mirror.closed(self.now)
        self.step("closed", None)
        return told

    def fill(self) -> None:
        """All that was ever free is free: there is room for as many keys as at first."""
        count = min(self.keys_max, self.memory // KEY_BYTES)
        names = [b"%04d" % number for number in range(count + 1)]
        made = self.by_one([(INSERT, 0, 6, 1, name) for name in names])
        if made != [DONE] * count + [FAILED]:
            raise Violation("room", f"{made.count(DONE)} keys of {count} were made")
        self.by_one([(PURGE, name) for name in names[:count]])
        while self.store.next_deadline() >= 0:
            self.tick()
