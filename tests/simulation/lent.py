"""The world of jobs with permits: workers and clients of two protocols that share the same counters, and a journal.

Both stores are real, and so is what lends permits of the one to the other; `Loans` stands between the two, and counts
what goes through it. After each step: what the counters say is in use is what their clients hold, and a permit for each
reserved job that needs one; nothing is granted above a maximum or a limit of the server; and if nothing is due, nobody
waits for a permit or a job that is there. What clients and workers know that they have is never more than there is.
The daemon is killed at any time, and its jobs come back from the journal, each with its counter and its permit.

The other promises about jobs are checked in the beanstalk world (beanstalk.py), those about Takes in theirs (takes.py).
"""

from __future__ import annotations

import json
from collections import Counter as Tally
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from counterd.protocols import counter
from counterd.protocols.beanstalk import timing, wire
from counterd.protocols.beanstalk._session import open_store as open_jobs
from counterd.protocols.beanstalk.wire import Status
from counterd.protocols.counter import wire as permits
from counterd.protocols.counter._session import open_store as open_counters
from counterd.protocols.counter._tables import TABLES
from counterd.protocols.counter.limits import parse_limits
from kit.promises import MS, SECOND, US, Violation
from simulation.disk import MOODS, UNIX_NS, Disk
from simulation.world import World

if TYPE_CHECKING:
    from simulation.world import Link

MAXIMUMS = {b"one": 1, b"two": 2, b"n" * 60: 3}
TUBES = (b"default", b"a")
RETRY_NS = 105 * MS  # after which jobs try again: 0.1 s, and a tick of the engine's wheel that is late
JOBS_ENOUGH = 60
(WAITERS,) = (table for table in TABLES if table.name == "waiters")
COMPARED_EVERY = 8
OK = permits.Status.NO_ERROR
ENDS = {b"delete", b"release", b"bury"}


class Loans:
    """A contract.Lender between the two stores. lent: permits that the jobs' store has. waits: tickets, by place."""

    def __init__(self, world: LentWorld) -> None:
        self.world = world
        self.lent: Tally[bytes] = Tally()
        self.waits: dict[int, tuple[bytes, int]] = {}
        self.retries_at = 0  # until then jobs may be blocked that were refused, or found no room to wait
        self.inner = counter.lend(world.counters, self.settled, lambda: None)
        self.number = self.inner.number

    def acquire(self, name: bytes, maximum: int, now_ns: int) -> bool:
        granted = self.inner.acquire(name, maximum, now_ns)
        if granted and any(each == name for each, _ in self.waits.values()):
            raise Violation("turn", f"{name!r} was lent, and jobs wait for it")
        self.lent[name] += granted
        self.world.seen["lent", granted] += 1
        return granted

    def retake(self, name: bytes, maximum: int, now_ns: int) -> bool:
        granted = self.inner.retake(name, maximum, now_ns)
        self.lent[name] += granted
        self.world.seen["lent", "again"] += 1
        return granted

    def release(self, name: bytes, now_ns: int) -> None:
        if self.lent[name] <= 0:
            raise Violation("lent", f"a permit of {name!r} is given back that was not lent")
        self.lent[name] -= 1
        self.inner.release(name, now_ns)

    def enqueue(self, name: bytes, maximum: int, ticket: int, now_ns: int) -> int:
        if any(other == ticket for _, other in self.waits.values()):
            raise Violation("lent", f"the jobs of ticket {ticket} wait twice")
        place = self.inner.enqueue(name, maximum, ticket, now_ns)
        if place:
            self.waits[place] = name, ticket
        if not place:
            self.retries_at = self.world.now + RETRY_NS
        self.world.seen["waits", place != 0] += 1
        return place

    def amend(self, place: int, maximum: int, now_ns: int) -> None:
        self.inner.amend(place, maximum, now_ns)

    def cancel(self, place: int, now_ns: int) -> None:
        if place not in self.waits:
            raise Violation("lent", f"place {place} is given up, where nobody waits")
        del self.waits[place]
        self.inner.cancel(place, now_ns)
        self.world.seen["waits", "given up"] += 1

    def settled(self, ticket: int, granted: bool) -> None:
        places = [place for place, (_, other) in self.waits.items() if other == ticket]
        if len(places) != 1:
            raise Violation("lent", f"ticket {ticket} is settled, and {len(places)} wait with it")
        name, _ = self.waits.pop(places[0])
        self.lent[name] += granted
        if not granted:
            self.retries_at = self.world.now + RETRY_NS
        self.world.seen["settled", granted] += 1
        self.world.jobs.settled(ticket, granted)


class Both:
    """The two stores, as one to the world's driver. is_job: what the next connection is to."""

    def __init__(self, counters: Any, jobs: Any) -> None:
        self.stores = (counters, jobs)
        self.is_job = False

    def session(self, now: int) -> Any:
        return self.stores[self.is_job].session(now)

    def next_deadline(self) -> int:
        dues = [store.next_deadline() for store in self.stores]
        return min((due for due in dues if due >= 0), default=-1)

    def tick(self, now: int) -> None:
        for store in self.stores:
            store.tick(now)

    def take_dirty(self) -> list[Any]:
        return [session for store in self.stores for session in store.take_dirty()]

    def audit(self) -> None:
        for store in self.stores:
            store.audit()


class Drive:
    """What a Disk knows of its world: the store of the jobs, and the world's time."""

    def __init__(self, world: LentWorld) -> None:
        self.world = world
        self.random = world.random
        self.push = world.push
        self.if_alive = world.if_alive

    @property
    def store(self) -> Any:
        return self.world.jobs

    @property
    def now(self) -> int:
        return self.world.now

    @property
    def life(self) -> int:
        return self.world.life

    def on_take(self, size: int) -> None:
        self.world.step("take", None, size)

    def on_reach(self) -> None:
        self.world.step("reach", None)

    def on_refuse(self) -> None:
        self.world.step("refuse", None)

    def on_fill(self) -> None:
        self.world.step("fill", None)

    def on_room(self) -> None:
        self.world.step("room", None)

    def crash(self) -> None:
        self.world.crash(None)


@dataclass(eq=False)
class Asked:
    """command: of a job's protocol, by its first word; or the name of a counter. sent: when."""

    command: bytes
    amount: int = 0
    number: int = 0  # of a job
    requirement: tuple[bytes, int] | None = None
    sent: int = 0


@dataclass(eq=False)
class Client:
    """What a client of either protocol knows to have: permits by name, or jobs by id, with when their time ends."""

    is_job: bool
    parser: Any
    held: Tally[bytes] = field(default_factory=Tally)
    jobs: dict[int, tuple[bytes, int]] = field(default_factory=dict)
    waits: dict[int, Asked] = field(default_factory=dict)  # Takes that were not answered, by opaque
    asked: int = 0
    watched: bytes = b"default"


class LentWorld(World):
    """Requests in Link.todo are those that were not answered, but for Takes that may wait."""

    name = "lent"

    def make_store(self) -> Both:
        draw = self.random
        self.crowd = min(self.crowd, 16)
        self.burst = min(self.burst, 8)
        self.latency = draw.choice((200 * US, 5 * MS, 50 * MS))
        self.seen: Tally[tuple[Any, Any]] = Tally()
        self.sync = draw.choice(("", "always", "always"))  # "": there is no journal
        self.waiters = draw.choice((1, 2, 64, 64, 64))
        self.caps: dict[bytes, int] = {}
        self.newest = 0
        self.requirements: dict[int, tuple[bytes, int] | None] = {}  # by id, of jobs whose puts were acknowledged
        self.drive = Drive(self)
        self.disk = Disk(self.drive) if self.sync else None  # type: ignore[arg-type]
        self.begin()
        return self.store

    def begin(self) -> None:
        """A new daemon."""
        key = self.random.getrandbits(128).to_bytes(16, "little")
        self.counters: Any = open_counters(
            buckets=64, holdings=1000, waiters=self.waiters, name_memory=1 << 14, posted_max=1 << 18, now_ns=self.now,
            hash_key=key, figures=dict,
        )  # fmt: skip
        self.counters.set_wall(UNIX_NS + self.now, self.now)
        period_ns, lag_ns = timing(self.sync or "always")
        self.jobs: Any = open_jobs(
            memory_limit=1 << 20, job_size_max=100, tubes=10, tube_jobs_max=1000, figures=dict, host={},
            journal_period_ns=period_ns, journal_lag_ns=lag_ns, hash_key=key, now_ns=self.now,
        )  # fmt: skip
        self.jobs.set_wall(UNIX_NS + self.now, self.now)
        self.loans = Loans(self)
        self.jobs.borrow(self.loans)
        if self.disk is not None:
            self.disk.begin()
            self.disk.restore(self.jobs)
        else:
            self.requirements.clear()
        self.store: Any = Both(self.counters, self.jobs)
        self.observer, self.looker = self.jobs.session(self.now), self.counters.session(self.now)
        self.draining = False
        self.before: Tally[bytes] = Tally(dict.fromkeys(MAXIMUMS, 1 << 32))  # in use after the last step
        self.load_caps()

    def load_caps(self) -> None:
        entries = [{"name": name.decode(), "maximum": cap} for name, cap in self.caps.items()]
        self.counters.load_limits(parse_limits(json.dumps({"permits": entries})))

    def connect(self, argument: None) -> None:
        self.store.is_job = self.random.random() < 0.6
        super().connect(argument)

    def arrived(self) -> Client:
        is_job = bool(self.store.is_job)
        return Client(is_job, wire.Parser() if is_job else permits.ResponseParser())

    # ---- what is asked ----

    def compose(self, link: Link) -> bytes:
        client: Client = link.books
        data = b""
        for _ in range(self.batch()):
            data += (self.job_request if client.is_job else self.permit_request)(link, client)
        return data

    def note(self, link: Link, asked: Asked) -> None:
        asked.sent = self.now
        link.todo.append(asked)

    def job_request(self, link: Link, client: Client) -> bytes:
        draw = self.random
        kinds = ["put"] * 5 * (len(self.requirements) < JOBS_ENOUGH) + ["reserve"] * 6 + ["end"] * 9 * bool(client.jobs)
        kind = draw.choice([*kinds, "tube", "kick", "reserve-job", "pause"])
        if kind == "put":
            return self.put(link)
        if kind == "reserve":
            self.note(link, Asked(b"reserve"))
            return wire.reserve(draw.choice((0, 1, 1, 3)))
        number = draw.choice([*client.jobs] or [*self.requirements, 1])
        if kind == "end":
            data: bytes = draw.choice((
                wire.delete(number), wire.delete(number), wire.bury(number), wire.touch(number),
                wire.release(number, draw.choice((0, 9)), draw.choice((0, 1))),
            ))  # fmt: skip
            client.jobs.pop(number, None)
        elif kind == "reserve-job":
            data = wire.reserve_job(draw.choice([*self.requirements, 1]))
        elif kind == "tube":
            data = draw.choice((wire.use(draw.choice(TUBES)), wire.watch(draw.choice(TUBES))))
        elif kind == "kick":
            data = wire.kick(2)
        else:
            data = draw.choice((
                wire.pause_tube(draw.choice(TUBES), draw.choice((0, 0, 1))),
                wire.clear_tube(draw.choice(TUBES), "ready"),
                wire.limit_reserves(b"a", draw.choice((0, 2)), b"default"),
            ))  # fmt: skip
        self.note(link, Asked(data.split()[0], number=number))
        return data

    def put(self, link: Link) -> bytes:
        draw = self.random
        times = {
            "priority": draw.choice((0, 1, 1, 9)),
            "delay": draw.choice((0, 0, 0, 1)),
            "ttr": draw.choice((1, 2, 60)),
        }
        if draw.random() < 0.2:
            self.note(link, Asked(b"put"))
            return wire.put(b"", *times.values())
        name = draw.choice([*MAXIMUMS])
        self.note(link, Asked(b"put-limited", requirement=(name, MAXIMUMS[name])))
        return wire.put_limited(b"", name, MAXIMUMS[name], **times)

    def permit_request(self, link: Link, client: Client) -> bytes:
        draw = self.random
        client.asked += 1
        name = draw.choice([*(+client.held)] or [*MAXIMUMS])
        if client.held[name] and draw.random() < 0.8:
            client.held[name] -= 1
            self.note(link, Asked(b"release"))
            return permits.release(client.asked, name, 1)
        if draw.random() < 0.3:
            self.note(link, Asked(name, 1))
            return permits.acquire(client.asked, name, 1, MAXIMUMS[name])
        client.waits[client.asked] = Asked(name, 1, sent=self.now)
        wait_ms = draw.choice((0, 500, 5_000))
        return permits.take(client.asked, [permits.Permit(name, 1, MAXIMUMS[name])], wait_ms, key=b"clients")

    def nonsense(self, link: Link) -> bytes:
        self.note(link, Asked(b"nonsense"))
        return b"quit\r\n" if link.books.is_job else b"\x91" * 12

    # ---- what is answered ----

    def answered(self, link: Link, output: bytes) -> None:
        client: Client = link.books
        end = link.bytes_out + len(output)
        for reply in client.parser.feed(output):
            asked = client.waits.pop(reply.opaque, None) if not client.is_job else None
            if asked is None:
                if not link.todo:
                    raise Violation("replies", f"connection {link.number} was sent {reply}")
                asked = link.todo.popleft()
            word = asked.command if client.is_job else "take" if asked.amount else "release"
            self.seen[word, reply.status] += 1
            if client.is_job and reply.status is Status.INSERTED:
                self.requirements[reply.number] = asked.requirement
                self.newest = max(self.newest, reply.number)
            if asked.command == b"delete" and reply.status is Status.DELETED:
                self.requirements.pop(asked.number, None)
            link.marks.append((end, (asked, reply)))

    def delivered(self, link: Link, answer: tuple[Asked, Any]) -> None:
        """What all know that they have is not more than there is."""
        asked, reply = answer
        client: Client = link.books
        if client.is_job and reply.status is Status.RESERVED:
            requirement = self.requirements.get(reply.number)
            if requirement is not None:  # its time to run began after it was asked for, at least a second of it
                client.jobs[reply.number] = requirement[0], asked.sent + SECOND
            else:
                client.jobs[reply.number] = b"", 0
        elif not client.is_job and asked.amount and reply.status == OK:
            client.held[asked.command] += 1
        else:
            return
        for name, maximum in MAXIMUMS.items():
            known = 0
            for other in self.links.values():
                if not other.gone:
                    known += other.books.held[name]
                    known += sum(of == name and self.now < until for of, until in other.books.jobs.values())
            if known > maximum:
                raise Violation("limit", f"clients and workers know of {known} of {name!r}, of which {maximum} may be")

    # ---- what has to hold ----

    def ask(self, line: bytes) -> Any:
        output: bytes = self.observer.receive(line, self.now)
        while self.observer.more:
            output += self.observer.take_output(self.now)
        (reply,) = wire.Parser().feed(output)
        return reply

    def list_jobs(self) -> list[dict[str, str]]:
        replies = [self.ask(wire.list_jobs(tube, count=1000)) for tube in TUBES]
        return [job for reply in replies if reply.status is Status.OK for job in wire.read_jobs(reply.body)]

    def consumption(self, name: bytes) -> int:
        body = self.looker.receive(permits.get(0, name), self.now)
        return int.from_bytes(body[12:16], "big") if body[2] == OK else 0

    def limit(self, name: bytes) -> int:
        return min(MAXIMUMS[name], self.caps.get(name, MAXIMUMS[name]))

    def check(self) -> int:
        due: int = self.store.next_deadline()
        held: Tally[bytes] = Tally()
        for _, name, amount, _ in self.counters.leases(1 << 20):
            held[name] += amount
        total = Tally({name: held[name] + self.loans.lent[name] for name in MAXIMUMS})
        for name in MAXIMUMS:
            used = self.consumption(name)
            if used != total[name]:
                raise Violation("books", f"{used} of {name!r} are in use, {held[name]} held and {total[name]} in all")
            if used > self.before[name] and used > self.limit(name):
                raise Violation("limit", f"{used} of {name!r} are in use, and {self.limit(name)} may be")
        self.before = total
        figures = self.jobs.snapshot()
        if not 0 <= due <= self.now:
            lent = sum(self.loans.lent.values())
            if lent != figures["permits"]:
                raise Violation("lent", f"{lent} permits are lent, and {figures['permits']} jobs have one")
            if figures["gates"] or self.counters.snapshot()["waiters"]:
                self.claim_awake(total)
        if self.steps % COMPARED_EVERY == 0:
            self.compare(idle=not 0 <= due <= self.now)
        return due

    def claim_awake(self, total: Tally[bytes]) -> None:
        """Nobody waits for a permit that is there: neither jobs nor clients."""
        walk = WAITERS.walk(self.counters, 1000)
        while not walk.step():
            pass
        rows = walk.rows()
        jobs = sum(row[5] == self.loans.number for row in rows)  # the column of the connection
        if jobs != len(self.loans.waits):
            raise Violation("lent", f"{jobs} places are in the queues, and {len(self.loans.waits)} tickets wait")
        for row in rows:
            if total[row[1]] < self.limit(row[1]):
                raise Violation("asleep", f"{row} waits, and {total[row[1]]} are in use")

    def compare(self, *, idle: bool) -> None:
        """Job by job, with what was put; and no worker waits for what is there."""
        jobs = self.list_jobs()
        reserved: Tally[bytes] = Tally()
        for job in jobs:
            name, most = job.get("counter", "").encode(), int(job.get("maximum", "0"))
            reserved[name] += job["state"] == "reserved" and name != b""
            requirement = self.requirements.get(int(job["id"]), (name, most) if name else None)
            if requirement != ((name, most) if name else None):
                raise Violation("requirement", f"job {job['id']} was put with {requirement}, has {name!r} of {most}")
        over = [name for name in MAXIMUMS if reserved[name] > self.loans.lent[name]]
        if over:
            raise Violation("lent", f"more jobs of {over} are reserved than permits lent")
        if idle and not self.draining and self.now > self.loans.retries_at:
            self.claim_workers(jobs)

    def claim_workers(self, jobs: list[dict[str, str]]) -> None:
        for tube in TUBES:
            told = self.ask(wire.inspect_tube(tube))
            figures = wire.read_dictionary(told.body) if told.status is Status.OK else {}
            if figures.get("pause", "0") != "0" or figures.get("current-waiting", "0") == "0":
                continue
            for job in jobs:
                name = job.get("counter", "").encode()
                is_there = not name or self.before[name] < self.limit(name)
                if job["tube"] == tube.decode() and job["state"] == "ready" and is_there:
                    raise Violation("idle", f"a worker waits, and {job} is ready")

    # ---- from outside ----

    def outside(self, _: None) -> None:
        if self.open:
            self.meddle()
            self.push(int(self.latency * (30 + 500 * self.random.random())), self.outside, None)

    def meddle(self) -> None:
        draw = self.random
        chance = draw.random()
        if self.disk is not None and chance < 0.3:
            self.disk.mood = draw.choice(MOODS)
        elif chance < 0.7:
            self.caps = {name: draw.randint(0, most) for name, most in MAXIMUMS.items() if draw.random() < 0.3}
            self.load_caps()
            self.step("reload", None)
        elif chance < 0.85:
            self.crash(None)
        elif chance < 0.9 and not self.draining:
            self.draining = True
            self.counters.begin_drain()
            self.jobs.begin_drain()
            self.push(draw.randrange(3 * SECOND), self.if_alive, (self.life, lambda: self.crash(None)))
            self.step("drain", None)

    def crash(self, _: None) -> None:
        """The daemon is killed, and another one is started."""
        self.life += 1
        self.seen["daemon", "killed"] += 1
        for link in list(self.links.values()):
            link.dead = link.gone = True
            link.session.owner = None
            link.session = None
        self.links.clear()
        self.waiting.clear()
        self.turn_at = -1
        self.now += self.random.randrange(2 * SECOND)
        self.begin()
        self.claim_restored()
        self.step("crash", None)
        for _ in range(self.crowd if self.open else 0):
            self.push(self.delay(), self.connect, None)

    def claim_restored(self) -> None:
        """Each reserved job has its permit at once, whatever the limit is."""
        jobs = self.list_jobs()
        reserved = Tally(job["counter"].encode() for job in jobs if job["state"] == "reserved" and "counter" in job)
        if reserved != +self.loans.lent:
            raise Violation("lent", f"{reserved} are reserved after a restart, and {+self.loans.lent} are lent")
        there = {int(job["id"]) for job in jobs}
        self.requirements = {id: one for id, one in self.requirements.items() if id in there}

    # ---- the end ----

    def claim_answered(self) -> None:
        super().claim_answered()
        waiting = sum(len(link.books.waits) for link in self.links.values())
        if waiting:
            raise Violation("progress", f"{waiting} Takes wait for ever")

    def emptied(self) -> None:
        """All jobs are deleted, and then nothing is lent."""
        if self.disk is not None:
            self.disk.mood = "fine"
        self.caps = {}
        self.load_caps()
        for tube in TUBES:
            self.ask(wire.pause_tube(tube, 0))
        self.drain(self.steps + 10_000)
        while jobs_left := self.list_jobs():  # a crash may come in between
            cleaner = self.jobs.session(self.now)
            for job in jobs_left:
                cleaner.receive(wire.delete(int(job["id"])), self.now)
                self.requirements.pop(int(job["id"]), None)
            self.step("emptied", None)
            self.drain(self.steps + 10_000)
        counters, jobs = self.counters.snapshot(), self.jobs.snapshot()
        left = {name: counters[name] for name in ("busy", "waiters", "holdings") if counters[name]}
        left |= {name: jobs[name] for name in ("jobs", "gates", "permits") if jobs[name]}
        if left or +self.loans.lent or self.loans.waits:
            raise Violation("empty", f"everybody has gone, and there is {left}, {self.loans.lent}")
