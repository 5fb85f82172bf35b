"""The engine's workloads, for the pytest suite, for the table of ratios and for the comparison with the baseline."""

from __future__ import annotations

import functools
import itertools
from typing import TYPE_CHECKING

from counterd.protocols.counter._session import CounterSession, open_store
from native import frames, load_native

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable

    from counterd._core import Session
    from counterd.protocols.counter._store import CounterStore

BUCKETS = 1_000_000
SESSIONS = 50
DEPTH = 64
NAME_COUNTS = (1_000, 100_000, 900_000)
PATTERNS = ("pairs", "later")
VARIANTS = ("ledger", "no ledger", "ledger, no prefetch")
PAIR_BATCHES = 4_000
LATER_ROUNDS = 40

# For single operations: few enough names that they stay in the cache, with their records and holdings.
KNOWN = 1_024
REQUESTS = 4_096
BATCHES_MAX = 512  # limit for small batches: each is one or two objects, which have to stay in the cache as well
LONG = 200  # bytes of a long name
DEPTHS = (1, 4, 16, 64, 256)
LARGE = tuple(f"{name}, {NAME_COUNTS[-1]:,} names" for name in ("get", "acquire, release"))

HASH_KEY = bytes(range(16))  # constant, because collisions of names change the figures
# The time passed to each call, a millisecond after the last, so that a turn's budget of work never stops a call.
CLOCK = itertools.count(1_000_000, 1_000_000)


class Player:
    """Something to measure: any number of times prepare(), which is not measured, then a call, which is.

    sessions: kept alive for the store. frames: the number of operations in a call. refused: the error that answers all
    of them instead of a grant.
    """

    def __init__(
        self,
        store: CounterStore,
        sessions: Collection[CounterSession],
        call: Callable[[], object],
        count: int,
        *,
        prepare: Callable[[], object] = lambda: None,
        refused: str = "",
    ) -> None:
        self._store = store
        self._sessions = sessions
        self._call = call
        self._calls = 0
        self._refused = refused
        self.prepare = prepare
        self.frames = count

    def __call__(self) -> None:
        self._calls += 1
        self._call()

    def check(self) -> None:
        """Raises ValueError if a request had an unexpected answer, because the figures are then wrong."""
        refused = {k: v for k, v in self._store.snapshot().items() if k.startswith("refused:") and v}
        if refused != ({f"refused:{self._refused}": self._calls * self.frames} if self._refused else {}):
            raise ValueError(f"of {self._calls * self.frames} requests were refused: {refused}")
        if any(session.more or session.closing for session in self._sessions):
            raise ValueError("a session has stopped: its requests wait")


def make_store(buckets: int = BUCKETS, **others: Callable[[CounterStore], Session]) -> CounterStore:
    store = open_store(
        buckets=buckets, holdings=2 * buckets, name_memory=1 << 22, hash_key=HASH_KEY, figures=dict, **others
    )
    store.begin_window(1)
    return store


def player_of(
    store: CounterStore,
    sequence: Iterable[tuple[CounterSession, bytes]],
    *,
    depth: int = DEPTH,
    batches: int = 0,
    holders: Collection[CounterSession] = (),
    prepare: Callable[[], object] = lambda: None,
    refused: str = "",
) -> Player:
    """Each call plays the next `batches` pairs of (session, batch) in `sequence`, or all of them if 0."""
    receives = [(session.receive, batch) for session, batch in sequence]
    sessions = {*holders, *(session for session, _ in sequence)}
    batches = batches or len(receives)
    turns = itertools.cycle(receives)
    coming: list = []

    def draw() -> None:
        prepare()
        coming[:] = [(receive, batch, next(CLOCK)) for receive, batch in itertools.islice(turns, batches)]
        b"".join(batch for _, batch, _ in coming)  # reads the input once, so that it is in the cache as after a receive

    def call() -> None:
        for receive, batch, now in coming:
            receive(batch, now)

    return Player(store, sessions, call, batches * depth, prepare=draw, refused=refused)


def play(session, requests: Iterable[bytes]) -> None:
    for batch in frames.batches_of(list(requests), DEPTH):
        session.receive(batch, next(CLOCK))
        while session.more:  # requests that make records are more work than one call does
            session.take_output(next(CLOCK))


def pairs(names: Iterable[bytes]) -> list[bytes]:
    return [make(name) for name in names for make in (frames.acquire, frames.release)]


# ---- with the ledger and without, in tables of all sizes -------------------------------------------------------------


@functools.cache
def workload(pattern: str, count: int) -> tuple[list[bytes], list[tuple[int, bytes]]]:
    """Returns (names, [(number of the session, batch)])."""
    names = frames.make_names(count)
    if pattern == "pairs":
        batches = frames.pair_batches(names, PAIR_BATCHES, DEPTH, seed=1)
        return names, [(i % SESSIONS, batch) for i, batch in enumerate(batches)]
    return names, frames.later_rounds(names, SESSIONS, LATER_ROUNDS, DEPTH, seed=1)


def variant_player(variant: str, pattern: str, count: int) -> Player:
    """Plays a workload on its own store, which already contains every name."""
    native = load_native()
    kinds = {"ledger": CounterSession, "no ledger": native.NoLedgerSession}
    store = make_store(make_session=kinds.get(variant, native.NoPrefetchSession))
    names, sequence = workload(pattern, count)
    sessions = [store.session() for _ in range(SESSIONS)]
    play(sessions[0], pairs(names))
    return player_of(store, [(sessions[number], batch) for number, batch in sequence])


def large_players() -> dict[str, Player]:
    """Returns the players of LARGE: each call plays the next part of a workload in a table larger than any cache."""
    store = make_store()
    session = store.session()
    names, pairs_sequence = workload("pairs", NAME_COUNTS[-1])
    play(session, pairs(names))
    gets = frames.batches_of(list(map(frames.get, frames.choose_names(names, PAIR_BATCHES * DEPTH, seed=2))), DEPTH)
    workloads = dict(zip(LARGE, (gets, [batch for _, batch in pairs_sequence]), strict=True))
    return {
        name: player_of(store, [(session, batch) for batch in batches], batches=REQUESTS // DEPTH)
        for name, batches in workloads.items()
    }


# ---- one operation at a time -----------------------------------------------------------------------------------------


def requests_player(make: Callable[[bytes], bytes], *, others: bool = False, refused: str = "") -> Player:
    """Plays one kind of request. The session, or another one if `others`, holds one permit of each name."""
    store = make_store()
    names = frames.make_names(KNOWN)
    session, other = store.session(), store.session()
    play(other if others else session, map(frames.acquire, names))
    if not refused:
        play(session, map(make, names))  # for the names of further items
    batches = frames.batches_of([make(name) for name in names * (REQUESTS // KNOWN)], DEPTH)
    return player_of(store, [(session, batch) for batch in batches], holders=(other,), refused=refused)


def pairs_player(depth: int = DEPTH, name_size: int = 16) -> Player:
    """Acquires and releases names that no other session holds, `depth` requests in each receive."""
    store = make_store()
    names = frames.make_names(KNOWN, name_size)
    session = store.session()
    play(session, pairs(names))
    batches = frames.pair_batches(names, min(REQUESTS // depth, BATCHES_MAX), depth, seed=1)
    return player_of(store, [(session, batch) for batch in batches], depth=depth)


def new_names_player() -> Player:
    """Acquires names that the store does not know. prepare() releases them and ends their window."""
    store = make_store()
    names = frames.make_names(KNOWN)
    session = store.session()
    windows = itertools.count(2)

    def forget() -> None:
        play(session, map(frames.release, names))
        store.begin_window(next(windows))
        while store.next_deadline() == 0:
            store.tick(0)
        if store.snapshot()["records"]:
            raise ValueError("the store still knows names")

    play(session, map(frames.acquire, names))
    batches = frames.batches_of(list(map(frames.acquire, names)), DEPTH)
    return player_of(store, [(session, batch) for batch in batches], prepare=forget)


def replacing_player() -> Player:
    """Acquires and releases names that the store does not know. They replace idle names in a full table."""
    store = make_store(buckets=KNOWN // 2)
    session = store.session()
    batches = frames.batches_of(pairs(frames.make_names(KNOWN)), DEPTH)
    return player_of(store, [(session, batch) for batch in batches])


def direct_player(measured: str) -> Player:
    """Calls counter_acquire or counter_release directly."""
    store = make_store()
    names = frames.make_names(KNOWN)
    session = store.session()
    calls = load_native().Direct(session, names)
    calls.acquire()
    if measured == "release":
        calls.release()
        return Player(store, (session,), calls.release, KNOWN, prepare=calls.acquire)
    return Player(store, (session,), calls.acquire, KNOWN, prepare=calls.release)


OPERATIONS: dict[str, Callable[[], Player]] = {
    "noop": lambda: requests_player(lambda _: frames.noop()),
    "get": lambda: requests_player(frames.get),
    "acquire more": lambda: requests_player(frames.acquire),
    "take more": lambda: requests_player(frames.take),
    "take more, four items": lambda: requests_player(lambda name: frames.take(name, 4)),
    "acquire, release": pairs_player,
    "acquire, release, long name": lambda: pairs_player(name_size=LONG),
    "acquire, refused": lambda: requests_player(lambda name: frames.acquire(name, 1), refused="not_available"),
    "release, not acquired": lambda: requests_player(frames.release, others=True, refused="not_acquired"),
    "acquire, new name": new_names_player,
    "acquire, release, full table": replacing_player,
    "counter_acquire alone": lambda: direct_player("acquire"),
    "counter_release alone": lambda: direct_player("release"),
}
