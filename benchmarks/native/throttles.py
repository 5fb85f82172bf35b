"""The smockron workloads, beside those of engine.py: accounting messages, and what subscribers are told of them."""

from __future__ import annotations

import functools
import json
from typing import TYPE_CHECKING

from counterd.protocols.smockron import wire
from counterd.protocols.smockron._session import open_store
from counterd.protocols.smockron.rules import parse_rules
from counterd.protocols.smockron.wire import SocketType, Status
from native import engine, frames

if TYPE_CHECKING:
    from collections.abc import Callable

    from counterd.protocols.smockron._session import SmockronSession
    from counterd.protocols.smockron._store import SmockronStore

ACCOUNTING, CONTROL = 0, 1  # ports
FREE, SCARCE = b"free", b"scarce"
RULES = parse_rules(
    json.dumps(
        {
            FREE.decode(): {"rate": "1000000/sec", "burst": "1 hour"},  # nobody has to wait
            SCARCE.decode(): {"interval": "1 sec", "burst": 0},  # everybody has to
        }
    )
)
PAST_MS = (
    1_000_000_000_000 - 1
)  # thirteen digits, as it has today; before any time of engine.CLOCK when that is Unix time
LARGE = (f"smockron accepted, {engine.NAME_COUNTS[-1]:,} identifiers",)


class Player(engine.Player):
    """An engine.Player. outcome: all messages are counted as this. told: the subscribers that each message reaches."""

    def __init__(
        self, store: SmockronStore, sessions: list[SmockronSession], batches: list[bytes], count: int,
        outcome: tuple[str, str], *, told: int = 0,
    ) -> None:  # fmt: skip
        coming: list[tuple[bytes, int]] = []
        gatekeeper, *subscribers = sessions
        self._outcome = outcome
        self._told = told
        self._before = _counted(store).get(outcome, 0)

        def draw() -> None:
            coming[:] = [(batch, next(engine.CLOCK)) for batch in batches]
            b"".join(batch for batch, _ in coming)  # puts the input into the cache, as a receive does

        def call() -> None:
            for batch, now in coming:
                gatekeeper.receive(batch, now)
                for _ in store.take_dirty():
                    for subscriber in subscribers:
                        subscriber.take_output(now)

        super().__init__(store, sessions, call, count, prepare=draw)

    def check(self) -> None:
        """Raises ValueError unless all messages have the expected outcome and reached all subscribers."""
        super().check()
        counted = _counted(self._store)
        expected = self._calls * self.frames
        if (
            counted.get(self._outcome, 0) != self._before + expected
            or self._store.snapshot()["delivered"] != self._told * expected
        ):
            raise ValueError(f"{expected} messages should be {self._outcome}: {counted}, {self._store.snapshot()}")


def _counted(store: SmockronStore) -> dict[tuple[str, str], int]:
    return {(name, outcome): times for name, outcome, times in store.outcomes()}


def make_store(identifiers: int = 2 * engine.KNOWN) -> SmockronStore:
    store = open_store(
        identifiers=identifiers, message_max=1 << 16, posted_max=1 << 20, hash_key=engine.HASH_KEY, now_ns=0
    )
    store.set_wall((PAST_MS + 1) * 1_000_000, 0)
    store.load_rules(RULES)
    return store


def session_of(store: SmockronStore, port: int) -> SmockronSession:
    """Returns the session of a gatekeeper, or of a subscriber to everything, depending on the port."""
    kind = SocketType.PUB if port == ACCOUNTING else SocketType.SUB
    session = store.session(0, port)
    begin = wire.greeting() + wire.ready(kind) + (wire.subscribe(b"") if port == CONTROL else b"")
    session.take_output(0)  # the greeting
    session.receive(begin, 0)
    return session


def accounting_player(
    domain: bytes = FREE,
    status: Status = Status.ACCEPTED,
    outcome: str = "ok",
    *,
    depth: int = engine.DEPTH,
    names: int = engine.KNOWN,
    identifiers: int = 0,
    subscribers: int = 0,
) -> Player:
    """Plays messages about `names` identifiers in turn, or about random ones if there are more than engine.KNOWN."""
    store = make_store(identifiers or 2 * names)
    sessions = [session_of(store, ACCOUNTING), *(session_of(store, CONTROL) for _ in range(subscribers))]
    known = frames.make_names(names)
    if names > engine.KNOWN:
        for batch in frames.batches_of([wire.accounting(domain, status, name, PAST_MS) for name in known], depth):
            sessions[0].receive(batch, next(engine.CLOCK))
    chosen = frames.choose_names(known, engine.REQUESTS) if names > engine.KNOWN else known * (engine.REQUESTS // names)
    batches = frames.batches_of([wire.accounting(domain, status, name, PAST_MS) for name in chosen], depth)
    batches = batches[: engine.BATCHES_MAX]
    return Player(store, sessions, batches, len(batches) * depth, (status.value.lower(), outcome), told=subscribers)


def large_players() -> dict[str, Player]:
    """Returns the players of LARGE, like engine.large_players()."""
    return {LARGE[0]: accounting_player(names=engine.NAME_COUNTS[-1])}


OPERATIONS: dict[str, Callable[[], Player]] = {
    "smockron accepted": accounting_player,
    "smockron accepted, new identifier, full table": functools.partial(
        accounting_player, identifiers=engine.KNOWN // 2
    ),
    "smockron throttled": functools.partial(accounting_player, SCARCE, outcome="throttled", subscribers=1),
    "smockron rejected": functools.partial(accounting_player, status=Status.REJECTED),
    **{
        f"smockron accepted, batches of {depth}": functools.partial(accounting_player, depth=depth) for depth in (1, 16)
    },
}
