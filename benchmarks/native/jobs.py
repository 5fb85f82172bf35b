"""The beanstalk protocol's workloads, beside those of engine.py: jobs that come and go, and jobs that come back."""

from __future__ import annotations

import functools
import itertools
from typing import TYPE_CHECKING

from counterd.protocols.beanstalk import wire
from counterd.protocols.beanstalk._session import open_store
from native import engine, frames

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from counterd.protocols.beanstalk._session import BeanstalkSession
    from counterd.protocols.beanstalk._store import BeanstalkStore

BODY = bytes(100)
AT_ONCE = 16  # jobs of a batch
TTR = 1_000_000_000  # seconds: no time to run ends
TUBE_JOBS_MAX = 1 << 21
LARGE = (f"beanstalk put, reserve, delete, {engine.NAME_COUNTS[-1]:,} jobs",)
DONE = {wire.Status.INSERTED, wire.Status.RESERVED, wire.Status.DELETED, wire.Status.RELEASED}


class Player(engine.Player):
    """An engine.Player whose check() reads all answers of a call."""

    def check(self) -> None:
        self.prepare()
        answers = [answer for reply in self._call() for answer in wire.Parser().feed(reply)]
        wrong = [each for each in answers if each.status not in DONE]
        if wrong or len(answers) != self.frames:
            raise ValueError(f"{len(answers)} answers to {self.frames} requests, wrong: {wrong[:5]}")


def make_store() -> BeanstalkStore:
    return open_store(
        job_size_max=1 << 16, memory_limit=1 << 30, tubes=10, tube_jobs_max=TUBE_JOBS_MAX, figures=dict, host={},
        journal_period_ns=-1, journal_lag_ns=0, hash_key=engine.HASH_KEY, now_ns=0,
    )  # fmt: skip


def player_of(store: BeanstalkStore, session: BeanstalkSession, drawn: Callable[[], list[bytes]], count: int) -> Player:
    """Each call plays the batches that drawn() returns before it. They contain `count` requests."""
    coming: list[tuple[bytes, int]] = []

    def draw() -> None:
        coming[:] = [(batch, next(engine.CLOCK)) for batch in drawn()]
        b"".join(batch for batch, _ in coming)  # reads the input once, so that it is in the cache as after a receive

    def call() -> list[bytes]:
        receive = session.receive
        return [receive(batch, now) for batch, now in coming]

    return Player(store, (session,), call, count, prepare=draw)


def filled(jobs: int) -> tuple[BeanstalkStore, BeanstalkSession]:
    """Returns a store with `jobs` ready jobs, whose ids begin with 1."""
    store = make_store()
    session = store.session(0)
    for batch in frames.batches_of([wire.put(BODY, priority=2, ttr=TTR)] * jobs, engine.DEPTH):
        session.receive(batch, next(engine.CLOCK))
    return store, session


def cycle_player(at_once: int = AT_ONCE, jobs: int = 0) -> Player:
    """Each batch puts, reserves and deletes `at_once` jobs. jobs: the number of less urgent jobs that stay ready."""
    store, session = filled(jobs)
    ids = itertools.count(jobs + 1)
    count = min(engine.REQUESTS // (3 * at_once), engine.BATCHES_MAX)
    begin = (wire.put(BODY, priority=1, ttr=TTR) + wire.reserve(0)) * at_once

    def drawn() -> list[bytes]:
        return [begin + b"".join(map(wire.delete, itertools.islice(ids, at_once))) for _ in range(count)]

    return player_of(store, session, drawn, count * 3 * at_once)


def release_player(delay: int = 0) -> Player:
    """Reserves jobs by id and releases them behind all others. With a delay, they wait and are delayed again."""
    store, session = filled(engine.KNOWN)
    priorities = itertools.count(3)

    def requests() -> Iterable[bytes]:
        for number in range(1, engine.KNOWN + 1):
            yield wire.reserve_job(number)
            yield wire.release(number, next(priorities), delay)

    return player_of(store, session, lambda: frames.batches_of(list(requests()), engine.DEPTH), 2 * engine.KNOWN)


def large_players() -> dict[str, Player]:
    """Returns the players of LARGE, like engine.large_players()."""
    return {LARGE[0]: cycle_player(jobs=engine.NAME_COUNTS[-1])}


OPERATIONS: dict[str, Callable[[], Player]] = {
    "beanstalk put, reserve, delete": cycle_player,
    **{f"beanstalk put, reserve, delete, {jobs} at once": functools.partial(cycle_player, jobs) for jobs in (1, 64)},
    "beanstalk reserve, release": release_player,
    "beanstalk reserve, release with a delay": functools.partial(release_player, TTR),
}
