"""The throttr protocol's workloads, beside those of engine.py: one kind of request at a time, and what follows."""

from __future__ import annotations

import functools
import itertools
from typing import TYPE_CHECKING

from counterd.protocols.throttr._session import open_store
from counterd.protocols.throttr.wire import Attribute, Encoder, TTLType, ValueSize
from native import engine, frames

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable

    from counterd.protocols.throttr._session import ThrottrSession
    from counterd.protocols.throttr._store import ThrottrStore

ENCODER = Encoder(ValueSize.UINT16)  # the protocol's default
LASTING = 60_000  # hours
TTL_MS = 100
VALUE = 100  # bytes of a buffer and of what is published
DELIVERIES = 2_048
SUBSCRIBERS = (1, 64, 1_024)
MEMORY = 256 << 20
LARGE = tuple(f"throttr {name}, {engine.NAME_COUNTS[-1]:,} names" for name in ("query", "update"))

# Bytes of a reply that says that all went well.
STATUS = 1
QUERIED = 2 + 2 * ENCODER.size
GOT = QUERIED + VALUE


def insert(name: bytes, ttl: int = LASTING, ttl_type: int = TTLType.HOURS) -> bytes:
    return ENCODER.insert(name, 1000, ttl, ttl_type)


def update(name: bytes, change: int) -> bytes:
    return ENCODER.update(name, Attribute.QUOTA, change, 1)


def set_buffer(name: bytes) -> bytes:
    return ENCODER.set(name, bytes(VALUE), LASTING, TTLType.HOURS)


def publish(channel: bytes) -> bytes:
    return ENCODER.publish(channel, bytes(VALUE))


class Player(engine.Player):
    """An engine.Player that checks replies. sizes: their bytes in each call; none may begin with a refusal."""

    def __init__(
        self,
        store: ThrottrStore,
        call: Callable[[], list[bytes]],
        count: int,
        *,
        sizes: list[int],
        sessions: Collection[ThrottrSession],
        prepare: Callable[[], object] = lambda: None,
    ) -> None:
        super().__init__(store, sessions, call, count, prepare=prepare)
        self._sizes = sizes

    def check(self) -> None:
        self.prepare()
        replies = self._call()
        if [len(reply) for reply in replies] != self._sizes or any(reply[0] != 1 for reply in replies):
            raise ValueError(f"replies that cannot be: {[(len(reply), reply[:20]) for reply in replies][:5]}")


def make_store() -> ThrottrStore:
    return open_store(
        value_size=ENCODER.size,
        memory_limit=MEMORY,
        max_message=1 << 20,
        max_queued=1 << 30,
        expiry_grace_ns=0,
        hash_key=engine.HASH_KEY,
        now_ns=0,
    )


def play(session, requests: Iterable[bytes]) -> None:
    """Sends requests that are answered with a status only. Raises ValueError if one is refused."""
    for batch in frames.batches_of(list(requests), engine.DEPTH):
        if 0 in session.receive(batch, next(engine.CLOCK)):
            raise ValueError("the store is not what the benchmark builds on")


def player_of(store, session, batches: list[bytes], reply: int, *, depth: int, each: int = 0) -> Player:
    """Each call plays the next `each` batches, or all of them if 0."""
    each = each or len(batches)
    turns = itertools.cycle(batches)
    coming: list[tuple[bytes, int]] = []

    def draw() -> None:
        coming[:] = [(batch, next(engine.CLOCK)) for batch in itertools.islice(turns, each)]
        b"".join(batch for batch, _ in coming)  # reads the input once, so that it is in the cache as after a receive

    def call() -> list[bytes]:
        receive = session.receive
        return [receive(batch, now) for batch, now in coming]

    return Player(store, call, each * depth, sizes=[reply * depth] * each, sessions=(session,), prepare=draw)


def requests_player(
    *makes: Callable[[bytes], bytes], reply: int, first: Callable[[bytes], bytes] = insert, depth: int = engine.DEPTH
) -> Player:
    """Plays these kinds of requests in turn, for existing names."""
    store = make_store()
    session = store.session(0)
    names = frames.make_names(engine.KNOWN)
    play(session, map(first, names))
    requests = [make(name) for name in names * (engine.REQUESTS // engine.KNOWN // len(makes)) for make in makes]
    batches = frames.batches_of(requests, depth)[: engine.BATCHES_MAX]
    return player_of(store, session, batches, reply, depth=depth)


raising, falling = functools.partial(update, change=1), functools.partial(update, change=2)
query_player = functools.partial(requests_player, ENCODER.query, reply=QUERIED)
update_player = functools.partial(requests_player, raising, falling, reply=STATUS)


def expiring_player() -> Player:
    """Inserts of names that are new, until all of them have expired and are gone: one operation of both."""
    store = make_store()
    session = store.session(0)
    names = frames.make_names(engine.KNOWN)
    batches = frames.batches_of([insert(name, TTL_MS, TTLType.MILLISECONDS) for name in names], engine.DEPTH)
    moments = itertools.count(1_000_000_000, 1_000_000_000)

    def call() -> list[bytes]:
        now = next(moments)
        receive, tick, deadline = session.receive, store.tick, store.next_deadline
        replies = [receive(batch, now) for batch in batches]
        now += (TTL_MS + 10) * 1_000_000
        while 0 <= deadline() <= now:
            tick(now)
        return replies

    return Player(store, call, len(names), sizes=[engine.DEPTH] * len(batches), sessions=(session,))


def publishing_player(subscribers: int) -> Player:
    """PUBLISH, until the event has been taken for each subscriber: an operation is one that it is given to."""
    store = make_store()
    publisher = store.session(0)
    sessions = [store.session(0) for _ in range(subscribers)]
    for session in sessions:
        play(session, [ENCODER.subscribe(b"channel")])
    request = bytes(publish(b"channel"))  # the engine takes bytes, not what is derived from them
    count = DELIVERIES // subscribers

    def call() -> list[bytes]:
        replies = []
        for _ in range(count):
            now = next(engine.CLOCK)
            replies.append(publisher.receive(request, now))
            while store.next_deadline() == 0:  # as long as somebody has not taken something, too
                store.tick(now)
                replies[-1] += b"".join([session.take_output(now) for session in store.take_dirty()])
        return replies

    sizes = [STATUS + subscribers * len(request)] * count
    return Player(store, call, count * subscribers, sizes=sizes, sessions=[publisher, *sessions])


def large_players() -> dict[str, Player]:
    """Returns the players of LARGE, like engine.large_players()."""
    store = make_store()
    session = store.session(0)
    names = frames.make_names(engine.NAME_COUNTS[-1])
    play(session, map(insert, names))
    chosen = frames.choose_names(names, engine.PAIR_BATCHES * engine.DEPTH, seed=2)
    workloads = {
        LARGE[0]: (QUERIED, list(map(ENCODER.query, chosen))),
        LARGE[1]: (STATUS, [make(name) for name in chosen[::2] for make in (raising, falling)]),
    }
    return {
        name: player_of(
            store, session, frames.batches_of(requests, engine.DEPTH), reply, depth=engine.DEPTH,
            each=engine.REQUESTS // engine.DEPTH,
        )
        for name, (reply, requests) in workloads.items()
    }  # fmt: skip


OPERATIONS: dict[str, Callable[[], Player]] = {
    "throttr query": query_player,
    "throttr update": update_player,
    "throttr insert, expire": expiring_player,
    "throttr set": lambda: requests_player(set_buffer, reply=STATUS, first=set_buffer),
    "throttr get": lambda: requests_player(ENCODER.get, reply=GOT, first=set_buffer),
    **{
        f"throttr publish, {several} subscriber{'s' * (several > 1)}": functools.partial(publishing_player, several)
        for several in SUBSCRIBERS
    },
    **{
        f"throttr {name}, batches of {depth}": functools.partial(player, depth=depth)
        for name, player in (("query", query_player), ("update", update_player))
        for depth in engine.DEPTHS
        if depth != engine.DEPTH
    },
}
