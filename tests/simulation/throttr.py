"""The throttr room's world: keys that expire at their moment, quotas that are counted, and events in one order.

The books (`Key`) are executed beside the engine, request by request in the order in which it answers: so a key is seen
until its moment and never at or after it, and each quota is what was counted. What runs out (memory, places) may refuse
a request, but only where it has. Of each channel there is one log of what was published, and every subscriber gets it
from where it came in, each event in its turn, none left out: for as long as it is subscribed, and not dropped.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from conformance.throttr.dialect import UNIT_NS
from conformance.throttr.replies import INFO, LIST, STATS, read_listing
from counterd.protocols.throttr._session import ThrottrSession
from counterd.protocols.throttr._store import KEY_BYTES, ThrottrStore
from property.throttr_model import (
    DECREASE,
    END_NS,
    EVENT,
    GET,
    INCREASE,
    INSERT,
    PATCH,
    PUBLISH,
    PURGE,
    QUERY,
    QUOTA,
    SET,
    STAT,
    SUBSCRIBE,
    SUBSCRIBED_MAX,
    TTL,
    UNSUBSCRIBE,
    UPDATE,
    WHEEL_NS,
    WHOAMI,
)
from simulation.world import SECOND, Violation, World

if TYPE_CHECKING:
    from simulation.world import Link

INLINE, PREFIX, BLOCK, PAYLOAD = 24, 16, 64, 60  # bytes of a key: in its record, of longer ones, and in a block
CHANNEL_INLINE, CHANNEL_PREFIX = 36, 28
LEAD = 4  # bytes of a value's first block
SUBSCRIPTION_BLOCKS = 3
INFO_SIZE, STAT_SIZE, ID_SIZE = 433, 33, 17
FAILED, DONE = 0, 1
EVERYBODY = b"*"


class Incomplete(Exception):
    """The rest of a reply is yet to come."""


class Key:
    __slots__ = ("due", "ends", "quota", "type", "value")

    def __init__(self, quota: int, value: bytes | None, ttl_type: int, ends: int, grace: int) -> None:
        self.quota = quota
        self.value = value  # of a buffer
        self.type = ttl_type
        self.ends = ends
        self.due = ends + grace

    def blocks(self, name: bytes) -> int:
        return name_blocks(name) + (0 if self.value is None else value_blocks(self.value))


def chain(size: int) -> int:
    return -(-size // PAYLOAD)


def name_blocks(name: bytes) -> int:
    return chain(len(name) - PREFIX) if len(name) > INLINE else 0


def value_blocks(value: bytes) -> int:
    return chain(LEAD + len(value))


class Books:
    """Of one connection: of each channel how often it is subscribed, and where in the log it is."""

    __slots__ = ("begun", "subscribed")

    def __init__(self) -> None:
        self.subscribed: dict[bytes, list[int]] = {}  # times, next in the log, how often the last has come
        self.begun = False  # its first request in todo was executed, and its reply is yet to come, or to go on


class ThrottrWorld(World):
    """Requests in Link.todo are (where it ends in the input, opcode, name, first number, ttl type, ttl, value)."""

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
        self.keys: dict[bytes, Key] = {}
        self.logs: dict[bytes, list[bytes]] = {name: [] for name in self.channels}
        self.subscribers = dict.fromkeys(self.channels, 0)  # connections
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

    def arrived(self) -> Books:
        books = Books()
        self.enter(books, EVERYBODY)
        return books

    def refused(self, why: str) -> None:
        """Half of all places are for the two channels that each connection has: they are enough for twice the crowd."""
        if len(self.links) < self.crowd and self.store.next_deadline() != 0:
            raise Violation("admission", f"{why}, with {len(self.links)} connections")

    # ---- what clients ask ----

    def compose(self, link: Link) -> bytes:
        data = b""
        for _ in range(self.batch()):
            data += self.request(link, len(data))
        return data

    def request(self, link: Link, before: int) -> bytes:
        draw = self.random.random
        n = self.width
        number = kind = ttl = 0
        value = b""
        name = self.names[int(draw() * len(self.names))]
        chance = draw()
        if draw() < self.chatty:
            name = self.channels[int(draw() * len(self.channels))]
            opcode = SUBSCRIBE if chance < 0.2 else UNSUBSCRIBE if chance < 0.4 else PUBLISH if chance < 0.9 else WHOAMI
            if opcode == PUBLISH and draw() * self.subscribers[name] > 8:
                opcode = WHOAMI  # what many hear is rare, or there was nothing else
            data = bytes((opcode, len(name))) + name
            if opcode == PUBLISH:
                self.published += 1
                value = b"%d" % self.published
                data = bytes((PUBLISH, len(name))) + len(value).to_bytes(n, "little") + name + value
            elif opcode == WHOAMI:
                data = bytes((WHOAMI,))
        elif chance < 0.2:
            opcode = INSERT
            number = int(draw() * min(self.most, 1000))
            kind, ttl = self.ttl()
            data = bytes((INSERT,)) + number.to_bytes(n, "little") + bytes((kind,)) + ttl.to_bytes(n, "little")
            data += bytes((len(name),)) + name
        elif chance < 0.6:
            opcode = UPDATE
            kind, ttl = self.random.choice((QUOTA, QUOTA, QUOTA, QUOTA, TTL, 7)), int(draw() * 3.1)
            number = int(draw() * 30) if draw() < 0.9 else int(draw() * self.most)
            data = bytes((UPDATE, kind, ttl)) + number.to_bytes(n, "little") + bytes((len(name),)) + name
        elif chance < 0.7:
            opcode = SET
            kind, ttl = self.ttl()
            value = b"v" * int(draw() * draw() * min(self.most, 500))
            data = bytes((SET, kind)) + ttl.to_bytes(n, "little") + bytes((len(name),))
            data += len(value).to_bytes(n, "little") + name + value
        elif chance < 0.99:
            opcode = QUERY if chance < 0.85 else GET if chance < 0.93 else STAT if chance < 0.95 else PURGE
            data = bytes((opcode, len(name))) + name
        else:
            opcode = self.random.choice((LIST, STATS, INFO))
            data = bytes((opcode,))
        link.todo.append((link.bytes_sent + before + len(data), opcode, name, number, kind, ttl, value))
        return data

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
        link.todo.append((link.bytes_sent + 1, data[0], b"", 0, 0, 0, b""))
        return data

    # ---- what the engine answers ----

    def answered(self, link: Link, output: bytes) -> None:
        data = link.partial + output if link.partial else output
        books: Books = link.books
        todo = link.todo
        position, size = 0, len(data)
        base = link.bytes_out - len(link.partial)
        session = link.session
        left = session.requests - link.executed  # requests that this call executed
        link.executed = session.requests
        try:
            while position < size:
                if data[position] == EVENT:
                    position = self.told(link, data, position)
                    continue
                if not todo:
                    raise Violation("replies", f"connection {link.number} was sent {data[position : position + 40]!r}")
                end = self.judge(link, todo[0], data, position)
                left -= not books.begun
                books.begun = False
                todo.popleft()
                position = end
                link.marks.append((base + position, None))
        except Incomplete:
            left -= not books.begun
            books.begun = True
        if left == 1 and todo and todo[0][1] == PUBLISH:  # its event is posted, and its reply behind that
            books.begun = True
            self.publish(todo[0], DONE)
        elif left == 1 and position == size and todo and todo[0][1] in (LIST, STATS):
            books.begun = True
        elif left:
            raise Violation("replies", f"{left} more requests were executed than answered: {list(todo)[:2]}")
        link.partial = data[position:]
        if todo and not session.more and not session.closing and todo[0][0] <= link.bytes_fed:
            raise Violation("progress", f"{todo[0]} was read by connection {link.number}, and not answered")

    def told(self, link: Link, data: bytes, position: int) -> int:
        """An event: the next of its channel."""
        n = self.width
        start = position + 2 + n
        channel_end = start + data[position + 1]
        end = channel_end + int.from_bytes(data[position + 2 : start], "little")
        channel, payload = data[start:channel_end], data[channel_end:end]
        place = link.books.subscribed.get(channel)
        log = self.logs.get(channel, [])
        if end > len(data) or place is None:
            raise Violation("events", f"connection {link.number} was sent {data[position : position + 60]!r}")
        times, following, repeats = place
        if following < len(log) and log[following] == payload:
            place[1:] = following + 1, 1
        elif following and log[following - 1] == payload and repeats < times:
            place[2] = repeats + 1
        else:
            expected = log[following] if following < len(log) else None
            raise Violation("events", f"{payload!r} of {channel!r} came to {link.number}, where {expected!r} is next")
        return end

    def judge(self, link: Link, request: Any, data: bytes, position: int) -> int:
        """Executes the request in the books and compares; returns where the reply ends."""
        opcode, status = request[1], data[position]
        if status not in (FAILED, DONE):
            raise Violation("replies", f"{request} was answered {data[position : position + 20]!r}")
        self.seen[opcode, status] = self.seen.get((opcode, status), 0) + 1
        if opcode in (LIST, STATS):
            return self.judge_listing(link, opcode, data, position)
        if opcode in (INFO, WHOAMI):
            self.tells_figures |= opcode == INFO
            return self.whole(data, position + (INFO_SIZE if opcode == INFO else ID_SIZE))
        if opcode in (SUBSCRIBE, UNSUBSCRIBE, PUBLISH):
            self.judge_channel(link, request, status)
            return position + 1
        return self.judge_key(request, status, data, position)

    def judge_key(self, request: Any, status: int, data: bytes, position: int) -> int:
        opcode, name = request[1:3]
        key = self.keys.get(name)
        if key is not None and key.due <= self.now:
            key = None  # it may be kept until a tick
        lives = key is not None and key.ends > self.now
        end = position + 1
        if opcode in (INSERT, SET):
            self.judge_made(request, key, status)
        elif opcode == UPDATE and key is not None and lives:
            self.judge_update(request, key, status)
        elif status != (opcode in (QUERY, GET, STAT, PURGE) and lives):
            raise Violation("life", f"{request} was answered {status} at {self.now}: {key and key.ends}")
        elif opcode == PURGE and status:
            del self.keys[name]
        elif opcode == STAT and status:
            end = self.whole(data, position + STAT_SIZE)
        elif key is not None and status:
            end = self.judge_told(opcode, name, key, data, end)
        return end

    def whole(self, data: bytes, end: int) -> int:
        if end > len(data):
            raise Violation("replies", f"a reply ends {end - len(data)} bytes early")
        return end

    def judge_told(self, opcode: int, name: bytes, key: Key, data: bytes, position: int) -> int:
        """The reply to QUERY or GET."""
        n = self.width
        left = (key.ends - self.now - 1) // UNIT_NS.get(key.type, SECOND) & self.most
        if opcode == QUERY:
            expected = key.quota.to_bytes(n, "little") + bytes((key.type,)) + left.to_bytes(n, "little")
        else:
            value = key.value or b""
            expected = bytes((key.type,)) + left.to_bytes(n, "little") + len(value).to_bytes(n, "little") + value
        end = position + len(expected)
        if data[position:end] != expected:
            raise Violation("arithmetic", f"of {name!r} {data[position:end]!r} is told, and {expected!r} is true")
        return end

    def judge_made(self, request: Any, key: Key | None, status: int) -> None:
        """INSERT and SET."""
        _, opcode, name, number, kind, ttl, value = request
        ends = min(END_NS, self.now + ttl * UNIT_NS.get(kind, SECOND))
        if key is not None:
            if opcode == INSERT or key.value is None:
                expected = FAILED
            elif key.ends <= self.now:
                expected = DONE  # in its grace: lost
            elif status == FAILED:
                expected = self.without_room(0, value_blocks(value) - value_blocks(key.value))
            else:
                expected = DONE
                key.value, key.type, key.ends, key.due = value, kind, ends, ends + self.grace
        elif status == FAILED:
            expected = self.without_room(1, name_blocks(name) + (value_blocks(value) if opcode == SET else 0))
        else:
            expected = DONE
            self.keys[name] = Key(number, value if opcode == SET else None, kind, ends, self.grace)
        if status != expected:
            raise Violation("existence", f"{request} was answered {status}, with {key and (key.ends, key.value)}")

    def without_room(self, records: int, blocks: int) -> int:
        """FAILED where so much more may indeed not fit, by what there can be at most; else DONE, as it should be."""
        self.full += 1
        if self.full % 8:
            return FAILED
        kept = [key.blocks(name) for name, key in self.keys.items()]
        keys, used = len(kept) + records, sum(kept) + blocks
        subscriptions = self.store.snapshot()["subscriptions"] * SUBSCRIPTION_BLOCKS
        names = 0
        for channel, count in self.subscribers.items():
            if count:
                names += chain(len(channel) - CHANNEL_PREFIX) if len(channel) > CHANNEL_INLINE else 0
        is_full = keys > self.keys_max or used + names > self.memory // BLOCK
        over = keys * KEY_BYTES + (used + names + subscriptions) * BLOCK > self.memory
        return FAILED if is_full or over else DONE

    def judge_update(self, request: Any, key: Key, status: int) -> None:
        _, _, name, number, attribute, change, _ = request
        expected = DONE
        if attribute == QUOTA and key.value is None:
            quota = key.quota
            quota = (number, quota + number, quota - number, quota)[change]
            if 0 <= quota <= self.most:
                key.quota = quota
            else:
                expected = FAILED
        elif attribute == TTL:
            unit = UNIT_NS.get(key.type, SECOND)
            if change == PATCH:
                key.ends = min(END_NS, self.now + number * unit)
            elif change == INCREASE:
                key.ends = min(END_NS, key.ends + number * unit)
            elif change == DECREASE:
                key.ends = max(0, key.ends - number * unit)
            key.due = key.ends + self.grace
        else:
            expected = FAILED
        if status != expected:
            raise Violation("arithmetic", f"{request} was answered {status}, with quota {key.quota} of {name!r}")

    def judge_listing(self, link: Link, opcode: int, data: bytes, position: int) -> int:
        """LIST or STATS: each key once; and where it came in one piece, those that live."""

        def take(size: int) -> bytes:
            nonlocal position
            if position + size > len(data):
                raise Incomplete
            position += size
            return data[position - size : position]

        try:
            rows = [row.name for rows in read_listing(take, opcode, self.width) for row in rows]
        except AssertionError as error:
            raise Violation("listing", str(error)) from None
        if len(set(rows)) < len(rows):
            raise Violation("listing", "a key is told of twice")
        if not link.books.begun:
            living = {name for name, key in self.keys.items() if key.ends > self.now}
            if living != set(rows):
                raise Violation("listing", f"{living ^ set(rows)} differ")
        return position

    # ---- channels ----

    def judge_channel(self, link: Link, request: Any, status: int) -> None:
        _, opcode, channel, *_ = request
        books: Books = link.books
        place = books.subscribed.get(channel)
        if opcode == PUBLISH:
            if not books.begun:
                if status != (self.subscribers[channel] > 0):
                    self.leave_dropped()
                if status != (self.subscribers[channel] > 0):
                    raise Violation("events", f"{request} was answered {status}, of {self.subscribers[channel]}")
                self.publish(request, status)
            elif not status:
                raise Violation("events", f"{request} was answered {status}, by one that is subscribed")
        elif opcode == SUBSCRIBE:
            if status:
                if place is not None and place[0] == SUBSCRIBED_MAX:
                    raise Violation("events", f"{request} was granted to one that is subscribed {place[0]} times")
                self.enter(books, channel)
            elif place is None or place[0] < SUBSCRIBED_MAX:
                self.full += 1
        else:
            if status != (place is not None):
                raise Violation("events", f"{request} was answered {status}")
            if place is not None:
                del books.subscribed[channel]
                self.subscribers[channel] -= 1

    def publish(self, request: Any, status: int) -> None:
        if status:
            self.logs[request[2]].append(request[6])

    def enter(self, books: Books, channel: bytes) -> None:
        place = books.subscribed.get(channel)
        if place is None:
            books.subscribed[channel] = [1, len(self.logs[channel]), SUBSCRIBED_MAX]
            self.subscribers[channel] += 1
        else:
            place[0] += 1

    # ---- what has to hold ----

    def left(self, link: Link) -> None:
        for channel in link.books.subscribed:
            self.subscribers[channel] -= 1
        link.books.subscribed = {}

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
        keys = self.keys
        kept = self.store.snapshot()["keys"]
        if due == -1 or due > self.now:  # the wheel has come past what was due by then
            late = self.now - WHEEL_NS
            for name in [name for name, key in keys.items() if key.due <= late]:
                del keys[name]
        living = [key.due for key in keys.values() if key.due > self.now]
        if living and (due == -1 or due > min(living) + WHEEL_NS):
            raise Violation("deadline", f"a key is due at {min(living)}, and the next moment is {due}")
        if not len(living) <= kept <= len(keys):
            raise Violation("expiry", f"{kept} keys are kept, {len(living)} live, {len(keys) - len(living)} just ended")

    def meddle(self) -> None:
        draw = self.random.random()
        if draw < 0.5:
            self.store.set_wall(1_700_000_000 * SECOND + self.now, self.now)
            self.step("wall", None)
        elif draw < 0.75:
            self.max_queued = self.random.choice((200, 4096, 65536))
            self.store.limit_posted(self.max_queued)
            self.step("limit", None, self.max_queued)

    def settled(self) -> None:
        for link in self.links.values():
            for channel, (_, following, _) in link.books.subscribed.items():
                if following != len(self.logs[channel]):
                    left = len(self.logs[channel]) - following
                    raise Violation("events", f"{left} of {channel!r} never came to connection {link.number}")

    def emptied(self) -> None:
        store = self.store
        figures = store.snapshot()
        left = {key: figures[key] for key in ("subscriptions", "channels", "curr_connections")}
        if any(left.values()):
            raise Violation("empty", f"everybody has gone, and there is {left}")
        self.now += self.random.choice((WHEEL_NS, SECOND, 100 * SECOND)) + self.grace
        bound = len(self.keys) + 512
        while 0 <= store.next_deadline() <= self.now:
            self.tick()
            bound -= 1
            if not bound:
                raise Violation("progress", "ticks do not come to an end")
        self.keys = {name: key for name, key in self.keys.items() if key.due > self.now}
        if store.snapshot()["keys"] != len(self.keys):
            raise Violation("empty", f"{store.snapshot()['keys']} keys are kept after their time")
        session = store.session(self.now)
        for name, key in list(self.keys.items()):
            if key.ends > self.now:
                if session.receive(bytes((PURGE, len(name))) + name, self.now) != b"\1":
                    raise Violation("life", f"{name!r} has not come to its end, and is not there")
                del self.keys[name]
                self.step("receive", None)
        session.closed(self.now)
        self.step("closed", None)
        self.now += self.grace + WHEEL_NS
        self.keys = {}
        while 0 <= store.next_deadline() <= self.now:
            self.tick()
        figures = store.snapshot()
        left = {key: figures[key] for key in ("keys", "buffer_bytes", "used_memory")}
        if any(left.values()) or store.next_deadline() != -1:
            raise Violation("empty", f"nothing is kept, and there is {left}, due {store.next_deadline()}")
        self.fill()

    def fill(self) -> None:
        """All that was ever free is free: there is room for as many keys as at first."""
        session = self.store.session(self.now)
        count = min(self.keys_max, self.memory // KEY_BYTES)
        for number in range(count + 1):
            name = b"%04d" % number
            data = bytes((INSERT,)) + bytes(self.width) + b"\6" + b"\1".ljust(self.width, b"\0") + b"\4" + name
            status = session.receive(data, self.now)[0]
            if status != (number < count):
                raise Violation("room", f"key {number} of {count} was answered {status}")
            if status:
                self.keys[name] = Key(0, None, 6, self.now + 3600 * SECOND, self.grace)
            self.step("receive", None)
        for number in range(count):
            session.receive(bytes((PURGE, 4)) + b"%04d" % number, self.now)
            del self.keys[b"%04d" % number]
            self.step("receive", None)
        session.closed(self.now)
        self.step("closed", None)
        while self.store.next_deadline() >= 0:
            self.tick()
