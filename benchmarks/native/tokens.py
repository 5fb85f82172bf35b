"""The sentinel protocol's workloads, beside those of engine.py: one kind of request at a time, and leases that end."""

from __future__ import annotations

import functools
import itertools
import struct
from typing import TYPE_CHECKING

from counterd.bench.dialects.sentinel import FIRST_RATE, FIRST_SEMAPHORE, NAMESPACE, PARAM_FLOW, rules_of
from counterd.protocols.sentinel import wire
from counterd.protocols.sentinel._session import open_store
from counterd.protocols.sentinel.rules import parse_rules
from native import engine, frames

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator

    from counterd.protocols.sentinel._session import SentinelSession
    from counterd.protocols.sentinel._store import SentinelStore

LASTING_MS = (1 << 31) - 1
MAXIMUM = 1_000_000_000  # so that nothing is refused
TOKENS = 2 * engine.KNOWN  # of a store that stays in the cache, with that of another one
LARGE_TOKENS = 1 << 20
LARGE = (f"sentinel acquire, release, {engine.NAME_COUNTS[-1]:,} tokens",)
RELEASE = struct.Struct(">Hib").pack(wire.REQUEST_HEAD + 8, 0, wire.MessageType.RELEASE)
KEEP = struct.Struct(">Hib").pack(wire.REQUEST_HEAD + 8, 0, wire.MessageType.KEEP)
GRANTED = 2 + wire.RESPONSE_HEAD + 8  # bytes of the reply to an acquire, whose last eight are the token


class Player(engine.Player):
    """An engine.Player whose check() reads all answers of a call."""

    def check(self) -> None:
        self.prepare()
        answers = [answer for reply in self._call() for answer in wire.ResponseParser().feed(reply)]
        wrong = [each for each in answers if each.status not in {wire.Status.OK, wire.Status.RELEASE_OK}]
        if wrong or len(answers) != self.frames:
            raise ValueError(f"{len(answers)} answers to {self.frames} requests, wrong: {wrong[:5]}")


def make_store(tokens: int = TOKENS, flows: int = engine.KNOWN, **lease: int) -> SentinelStore:
    """Returns a store whose tokens are the same in every run, because its key is constant."""
    store = open_store(
        max_tokens=tokens, max_param_values=2 * engine.KNOWN, max_allowed_qps=float(MAXIMUM),
        sweep_interval_ns=100_000_000, sweep_max_tokens=100_000, sweep_max_duration_ns=50_000_000,
        hash_key=engine.HASH_KEY, token_key=engine.HASH_KEY, now_ns=0,
    )  # fmt: skip
    rules = rules_of(flows, MAXIMUM, **(lease or {"resourceTimeout": LASTING_MS, "clientOfflineTime": LASTING_MS}))
    store.load_rules(parse_rules(rules))
    return store


def acquire(number: int) -> bytes:
    return wire.acquire(0, FIRST_SEMAPHORE + number % engine.KNOWN, 1)


def tokens_of(replies: bytes) -> list[bytes]:
    """Returns the tokens in replies to acquires, which must all be granted."""
    return [replies[at - 8 : at] for at in range(GRANTED, len(replies) + 1, GRANTED)]


def acquired(session: SentinelSession, count: int) -> Iterator[bytes]:
    """Acquires `count` permits, of all flows in turn, and yields their tokens."""
    for batch in frames.batches_of([acquire(number) for number in range(count)], engine.DEPTH):
        yield from tokens_of(session.receive(batch, next(engine.CLOCK)))


def player_of(
    store: SentinelStore,
    session: SentinelSession,
    drawn: Callable[[], Iterable[bytes]],
    count: int,
    others: Collection[SentinelSession] = (),
) -> Player:
    """Each call plays the batches that drawn() returns before it."""
    coming: list[tuple[bytes, int]] = []

    def draw() -> None:
        coming[:] = [(batch, next(engine.CLOCK)) for batch in drawn()]
        b"".join(batch for batch, _ in coming)  # reads the input once, so that it is in the cache as after a receive

    def call() -> list[bytes]:
        receive = session.receive
        return [receive(batch, now) for batch, now in coming]

    return Player(store, (session, *others), call, count, prepare=draw)


def requests_player(requests: list[bytes], depth: int = engine.DEPTH, known: int = 0) -> Player:
    """Each call plays all requests. known: the number of permits that the session acquires first."""
    store = make_store()
    session = store.session(0)
    list(acquired(session, known))
    batches = frames.batches_of(requests, depth)[: engine.BATCHES_MAX]
    return player_of(store, session, lambda: batches, len(batches) * depth)


def flow_player(depth: int = engine.DEPTH) -> Player:
    requests = [wire.flow(0, FIRST_RATE + number % engine.KNOWN, 1) for number in range(engine.REQUESTS)]
    return requests_player(requests, depth)


def param_player() -> Player:
    names = frames.make_names(engine.KNOWN)
    requests = [wire.param_flow(0, PARAM_FLOW, 1, [name]) for name in names]
    return requests_player(requests * (engine.REQUESTS // engine.KNOWN))


def keep_player() -> Player:
    """Renews permits. Their tokens are known from another store with the same key, which issues the same tokens."""
    tokens = list(acquired(make_store().session(0), engine.KNOWN))
    requests = [KEEP + token for token in tokens] * (engine.REQUESTS // engine.KNOWN)
    return requests_player(requests, known=engine.KNOWN)


def pairs_player(depth: int = engine.DEPTH, tokens: int = TOKENS, live: int = 0) -> Player:
    """Acquires and releases in turn; each batch gives back what the one before it got. live: permits that stay.

    A store of the same key is asked beforehand, which tells the tokens.
    """
    store, teller = make_store(tokens), make_store()
    session, other = store.session(0), store.session(0)
    for _ in acquired(other, live):
        pass
    telling = teller.session(0)
    for _ in range(live // TOKENS):
        give_back(telling, acquired(telling, TOKENS))
    give_back(telling, acquired(telling, live % TOKENS))
    half = max(1, depth // 2)
    held = list(acquired(telling, half))
    list(acquired(session, half))
    count = min(engine.REQUESTS // (2 * half), engine.BATCHES_MAX)
    flows = itertools.count()

    def drawn() -> list[bytes]:
        batches = []
        for _ in range(count):
            asked = [acquire(next(flows)) for _ in range(half)]
            told = tokens_of(telling.receive(b"".join(asked), next(engine.CLOCK)))
            batch = [frame for ask, token in zip(asked, held, strict=True) for frame in (ask, RELEASE + token)]
            give_back(telling, held)
            held[:] = told
            batches += [b"".join(batch)] if depth > 1 else batch
        return batches

    return player_of(store, session, drawn, count * 2 * half, others=(other, telling))


def give_back(session: SentinelSession, tokens: Iterable[bytes]) -> None:
    for batch in frames.batches_of([RELEASE + token for token in tokens], engine.DEPTH):
        session.receive(batch, next(engine.CLOCK))


def ping_player() -> Player:
    return requests_player([wire.ping(0, NAMESPACE.encode())] * engine.REQUESTS)


def large_players() -> dict[str, Player]:
    """Returns the players of LARGE, like engine.large_players()."""
    return {LARGE[0]: pairs_player(tokens=LARGE_TOKENS, live=engine.NAME_COUNTS[-1])}


OPERATIONS: dict[str, Callable[[], Player]] = {
    "sentinel acquire, release": pairs_player,
    "sentinel keep": keep_player,
    "sentinel flow": flow_player,
    "sentinel param": param_player,
    "sentinel ping": ping_player,
    **{
        f"sentinel {name}, batches of {depth}": functools.partial(player, depth=depth)
        for name, player in (("acquire, release", pairs_player), ("flow", flow_player))
        for depth in (1, 16)
    },
}
