"""Makes histories of counters that beanstalk's workers and counter clients share, with the crowd of takers.py.

`LentEngine` is counterd's two stores in memory, with counterd's own lender between them, which tests break. Each store
has its turns.
"""

from __future__ import annotations

from itertools import count
from typing import TYPE_CHECKING, Any

from conformance.beanstalk.engine import make_store as make_jobs
from counterd.protocols.beanstalk import wire
from counterd.protocols.counter import lend
from history import beanstalk
from history.beanstalk import Bury, Delete, Peek, Put, Release, Reserve, Touch
from history.takers import TakeEngine

if TYPE_CHECKING:
    from collections.abc import Callable
    from random import Random

    from history.operations import Operation
    from history.takers import Client

JOB_CALLS = (Put, Reserve, Delete, Release, Bury, Touch, Peek)
RECENT, LOOKED_AT = 8, 60  # jobs that workers ask about, of so many of the last calls
TUBE = b"default"
TTR_S = 1  # the shortest that there is


class Lender:
    """Passes calls between the two stores, as contract.Lender; tests break it on purpose. cause: what is done to the
    jobs just now.
    """

    def __init__(self, engine: LentEngine) -> None:
        self.engine = engine
        self.inner = lend(engine.store, engine.settled, lambda: None)
        self.number = self.inner.number

    def acquire(self, name: bytes, maximum: int, now_ns: int) -> bool:
        return bool(self.inner.acquire(name, maximum, now_ns))

    def retake(self, name: bytes, maximum: int, now_ns: int) -> bool:
        return bool(self.inner.retake(name, maximum, now_ns))

    def release(self, name: bytes, now_ns: int) -> None:
        self.inner.release(name, now_ns)

    def enqueue(self, name: bytes, maximum: int, ticket: int, now_ns: int) -> int:
        return int(self.inner.enqueue(name, maximum, ticket, now_ns))

    def amend(self, place: int, maximum: int, now_ns: int) -> None:
        self.inner.amend(place, maximum, now_ns)

    def cancel(self, place: int, now_ns: int) -> None:
        self.inner.cancel(place, now_ns)


class LentEngine(TakeEngine):
    """Sessions of both stores. cause: the worker's call that is executed, "end" of a connection, or "time"."""

    def __init__(self, lender: type[Lender] = Lender) -> None:
        super().__init__()
        self.cause: Any = ""
        self.jobs = make_jobs()
        self.jobs.borrow(lender(self))
        self.workers: dict[int, Any] = {}
        self.parsed: dict[int, wire.Parser] = {}
        self.asked: dict[int, int] = {}

    def settled(self, ticket: int, granted: bool) -> None:
        self.cause = "time"
        self.jobs.settled(ticket, granted)

    def ask(self, client: int, token: int, call: Any, now_ns: int) -> None:
        if not isinstance(call, JOB_CALLS):
            super().ask(client, token, call, now_ns)
            return
        if client not in self.workers:
            self.workers[client] = self.jobs.session(now_ns)
            self.parsed[client] = wire.Parser()
        self.asked[client], self.cause = token, call
        self._heard(client, self.workers[client].receive(beanstalk.request(call), now_ns))
        self._go_on(now_ns)

    def close(self, client: int, now_ns: int) -> None:
        super().close(client, now_ns)
        if client in self.workers:
            self.cause = "end"
            self.workers.pop(client).closed(now_ns)
            self._give_back(now_ns)

    def due_ns(self) -> int:
        return min((due for due in (super().due_ns(), self.jobs.next_deadline()) if due >= 0), default=-1)

    def turn(self, now_ns: int) -> None:
        while 0 <= self.due_ns() <= now_ns:
            self.cause = "time"
            self.jobs.tick(now_ns)
            self.jobs.audit()
            self._go_on(now_ns)
            super().turn(now_ns)

    def _give_back(self, now_ns: int) -> None:
        """Ends a worker's connection. The beanstalk store gives its jobs back in ticks, which this runs at once."""
        while self.jobs.next_deadline() == 0:
            self.jobs.tick(now_ns)
            self._go_on(now_ns)

    def _go_on(self, now_ns: int) -> None:
        super()._go_on(now_ns)
        self.jobs.take_dirty()
        while going := [(client, worker) for client, worker in self.workers.items() if worker.more]:
            for client, worker in going:
                self._heard(client, worker.take_output(now_ns))

    def _heard(self, client: int, data: bytes) -> None:
        for reply in self.parsed[client].feed(data):
            self.replies.append((client, self.asked[client], beanstalk.told(reply)))


class LentCalls:
    """Random calls. Workers, with odd numbers, call for jobs with and without a permit; the other clients for counters.
    history: the answers so far.
    """

    def __init__(self, others: Callable[[Random, Client, int], Any], counters: dict[bytes, int]) -> None:
        self.others, self.counters = others, counters
        self.history: list[Operation] = []
        self._bodies = count()

    def __call__(self, rng: Random, client: Client, token: int) -> Any:
        if client.number % 2 == 0:
            return self.others(rng, client, token)
        dice = rng.random()
        if dice < 0.3:
            name = rng.choice(sorted(self.counters))
            maximum = rng.randint(max(1, self.counters[name] - 1), self.counters[name])
            return Put(TUBE, rng.randint(1, 3), 0, TTR_S, b"job %d" % next(self._bodies), 0, name, maximum)
        told = [one for one in self.history[-LOOKED_AT:] if isinstance(one.call, Put | Reserve) and one.answer]
        known = [one.answer[1] for one in told if one.answer[1] is not None][-RECENT:]
        mine = [one.answer[1] for one in told if one.client == client.number and one.answer[0] == "RESERVED"]
        if not known or dice < (0.4 if mine else 0.8):
            return Reserve(TUBE, rng.choice((0, 0, 1)))
        job = mine[-1] if mine and dice < 0.9 else rng.choice(known)
        choices = (Delete(job), Release(job, 1, 0), Bury(job, 1), Touch(job), Peek(job))
        return rng.choices(choices, (6, 3, 1, 2, 1))[0]
