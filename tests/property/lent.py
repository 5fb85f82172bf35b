"""Jobs of the beanstalk protocol and clients of the counter protocol that share the same counters, in memory.

The books are the replies: who has which job, and who holds what. Each name has one maximum. After each step, when
nothing is due in either store:

- the consumption of each counter is what its clients hold, and a permit for each reserved job with its name;
- it is not above the maximum;
- nobody waits for a permit, and no worker for a job, that is there.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

from conformance.beanstalk.engine import make_store
from counterd.protocols import counter
from counterd.protocols.beanstalk import wire
from counterd.protocols.counter import wire as permits
from kit.pump import TURNS_MAX, Pump
from kit.takes import Desk

if TYPE_CHECKING:
    from kit.pump import Peer
    from kit.takes import Taker

SECOND = 1_000_000_000
MAXIMUMS = {b"one": 1, b"two": 2, b"n" * 60: 3}
TUBES = (b"default", b"a")
WORKERS, CLIENTS = 5, 3


class Shared(Pump):
    """A pump of one of the two stores: neither is due when it has settled."""

    def __init__(self, store: Any, lent: Lent) -> None:
        self.lent = lent
        super().__init__(store)

    def settle(self) -> None:
        self.lent.run()


class Worker:
    """A connection of the beanstalk protocol. jobs: that it has reserved. waits: for a job."""

    def __init__(self, peer: Peer, watched: tuple[bytes, ...]) -> None:
        self.peer = peer
        self.watched = watched
        self.jobs: set[int] = set()
        self.waits = False
        self._parser = wire.Parser()

    def hear(self) -> list[wire.Reply]:
        replies = self._parser.feed(bytes(self.peer.output))
        self.peer.output.clear()
        for reply in replies:
            if reply.status in (wire.Status.RESERVED, wire.Status.TIMED_OUT, wire.Status.DEADLINE_SOON):
                self.waits = False
            if reply.status is wire.Status.RESERVED:
                assert reply.number is not None
                self.jobs.add(reply.number)
        return replies

    def ask(self, command: bytes) -> wire.Reply:
        self.peer.send(command)
        *_, reply = self.hear()
        return reply


class Lent:
    """Both stores. random: what happens."""

    def __init__(self, random: Any) -> None:
        self.random = random
        self.bench = Shared(make_store(), self)
        self.desk = Desk(name_memory=4096)
        self.desk.pump = Shared(self.desk.store, self)
        self.bench.store.borrow(counter.lend(self.desk.store, self.bench.store.settled, lambda: None))
        self.observer = Worker(self.bench.connect(), (b"default",))
        self.looker = self.desk.taker()
        self.workers = [self.worker() for _ in range(WORKERS)]
        self.clients = [self.client() for _ in range(CLIENTS)]
        self.puts = self.granted = 0

    def worker(self) -> Worker:
        watched = self.random.choice(((b"default",), (b"a",), TUBES))
        made = Worker(self.bench.connect(), watched)
        for tube in watched:
            made.ask(wire.watch(tube))
        if b"default" not in watched:
            made.ask(wire.ignore(b"default"))
        return made

    def client(self) -> tuple[Taker, Counter[bytes], dict[int, bytes]]:
        """A client of the counters, what it holds, and what it waits for."""
        return self.desk.taker(), Counter(), {}

    # ---- time ----

    def run(self) -> None:
        """Turns of both stores until neither is due."""
        for _ in range(TURNS_MAX):
            if not any([*self.desk.pump.turn(), *self.bench.turn()]):
                return
        raise AssertionError("it is always due")

    def advance(self, ns: int) -> None:
        self.bench.now_ns += ns
        self.desk.pump.now_ns = self.bench.now_ns
        self.run()

    # ---- what happens ----

    def step(self) -> None:
        draw = self.random
        happens = draw.choices(
            (self.put, self.reserve, self.end, self.leave, self.pause, self.take, self.give, self.part, self.wait),
            (30, 40, 40, 3, 2, 20, 20, 2, 10),
        )[0]
        happens()
        self.run()
        self.check()

    def put(self) -> None:
        draw = self.random
        name = draw.choice(list(MAXIMUMS))
        self.observer.ask(wire.use(draw.choice(TUBES)))
        pri, delay, ttr = draw.choice((0, 1, 1, 9)), draw.choice((0, 0, 0, 1)), draw.choice((1, 2, 60))
        if draw.random() < 0.2:
            self.observer.ask(wire.put(b"", pri, delay, ttr))
        else:
            self.observer.ask(wire.put_limited(b"", name, MAXIMUMS[name], priority=pri, delay=delay, ttr=ttr))
        self.puts += 1

    def reserve(self) -> None:
        worker = self.random.choice(self.workers)
        if not worker.waits:
            worker.waits = True
            worker.peer.send(self.random.choice((wire.reserve(), wire.reserve(1), wire.reserve(0))))

    def end(self) -> None:
        draw = self.random
        busy = [worker for worker in self.workers if worker.jobs and not worker.waits]
        if not busy:
            return
        worker = draw.choice(busy)
        job = draw.choice(sorted(worker.jobs))
        worker.ask(draw.choice((
            wire.delete(job), wire.delete(job), wire.release(job, draw.choice((0, 1, 9)), draw.choice((0, 1))),
            wire.bury(job), wire.touch(job), wire.reserve_job(job),
        )))  # fmt: skip
        if draw.random() < 0.2:
            self.observer.ask(wire.kick(2))

    def leave(self) -> None:
        worker = self.random.choice(self.workers)
        worker.peer.close()
        self.workers.remove(worker)
        self.workers.append(self.worker())

    def pause(self) -> None:
        draw = self.random
        self.observer.ask(draw.choice((
            wire.pause_tube(draw.choice(TUBES), draw.choice((0, 1))),
            wire.clear_tube(draw.choice(TUBES), "ready"),
            wire.limit_reserves(b"a", draw.choice((0, 2)), b"default"),
        )))  # fmt: skip

    def take(self) -> None:
        taker, _, waits = self.random.choice(self.clients)
        name = self.random.choice(list(MAXIMUMS))
        wait = self.random.choice((0, 500, 5000))
        waits[taker.take(permits.Permit(name, 1, MAXIMUMS[name]), wait_ms=wait)] = name

    def give(self) -> None:
        taker, holds, _ = self.random.choice(self.clients)
        if held := sorted(name for name in holds if holds[name]):
            name = self.random.choice(held)
            holds[name] -= 1
            assert taker.release(name) == permits.Status.NO_ERROR

    def part(self) -> None:
        client = self.random.choice(self.clients)
        client[0].close()
        self.clients.remove(client)
        self.clients.append(self.client())

    def wait(self) -> None:
        self.advance(self.random.choice((1_000_000, 300_000_000, SECOND, 2 * SECOND)) // (1 << 20) * (1 << 20))

    # ---- what has to hold ----

    def jobs(self) -> list[dict[str, str]]:
        return [
            job
            for tube in TUBES
            for reply in [self.observer.ask(wire.list_jobs(tube, count=1000))]
            if reply.status is wire.Status.OK
            for job in wire.read_jobs(reply.body)
        ]

    def consumption(self, name: bytes) -> int:
        if self.looker.status(permits.get(0, name)) != permits.Status.NO_ERROR:
            return 0
        return permits.decode_consumption(self.looker.answers.others[-1].body)

    def check(self) -> None:
        for worker in self.workers:
            worker.hear()
        for taker, holds, waits in self.clients:
            for opaque in [opaque for opaque in waits if taker.of(opaque) is not None]:
                name = waits.pop(opaque)
                holds[name] += taker.has(opaque)
        jobs = self.jobs()
        reserved = Counter(job["counter"].encode() for job in jobs if job["state"] == "reserved" and "counter" in job)
        self.granted += reserved.total()
        for name, maximum in MAXIMUMS.items():
            held = sum(holds[name] for _, holds, _ in self.clients)
            assert self.consumption(name) == held + reserved[name] <= maximum, (name, held, reserved)
            if held + reserved[name] < maximum:
                assert not [waits for _, _, waits in self.clients if name in waits.values()], "there is a permit"
        self.check_workers(jobs, reserved)
        assert self.bench.store.snapshot()["permits"] == reserved.total()
        self.bench.store.audit()
        self.desk.store.audit()

    def check_workers(self, jobs: list[dict[str, str]], reserved: Counter[bytes]) -> None:
        """None waits for a job that is ready and has a permit."""
        for tube in TUBES:
            told = wire.read_dictionary(self.observer.ask(wire.inspect_tube(tube)).body or b"---\n")
            if told.get("pause", "0") != "0" or told.get("current-waiting", "0") == "0":
                continue
            for job in jobs:
                if job["tube"] != tube.decode() or job["state"] != "ready":
                    continue
                name = job.get("counter", "").encode()
                assert name, f"a worker waits, and {job} is ready"
                held = sum(holds[name] for _, holds, _ in self.clients)
                assert held + reserved[name] == MAXIMUMS[name], f"a worker waits, and there is a permit for {job}"

    def end_all(self) -> None:
        """All goes: nothing is held."""
        for taker, _, _ in self.clients:
            taker.close()
        self.clients.clear()
        for worker in self.workers:
            worker.peer.close()
        self.workers.clear()
        for tube in TUBES:
            self.observer.ask(wire.pause_tube(tube, 0))
        self.run()
        for job in self.jobs():
            assert self.observer.ask(wire.delete(int(job["id"]))).status is wire.Status.DELETED
        self.run()
        assert self.desk.store.snapshot()["busy"] == 0
        assert self.desk.store.snapshot()["waiters"] == 0
        assert self.bench.store.snapshot()["gates"] == 0
