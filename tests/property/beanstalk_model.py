"""The beanstalk protocol's store in plain dicts: what every command answers, to whom, and what becomes of jobs.

Time is told. Whatever is due is done at its very moment, one after the other. At the same moment, what is due in a tube
comes before what is due to a worker; two of the same kind are left to the tests to avoid.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

SECOND = 10**9
FOREVER = 1 << 62
STATES = ("ready", "reserved", "delayed", "buried")
GONE = -1  # holder of what nobody holds
URGENT = 1024
BODY_MAX = 100
WITH_BODY = ("put", "put-unique", "search-jobs")


@dataclass
class Job:
    """state: ready, reserved, delayed or buried. due: when its time is over, in the second and third.

    keep: seconds for which its key is taken after its end.
    """

    number: int
    tube: str
    priority: int
    delay: int
    ttr: int
    body: bytes
    state: str = ""
    since: int = 0
    due: int = 0
    holder: int = GONE
    key: str = ""
    keep: int = 0
    counts: dict[str, int] = field(
        default_factory=lambda: dict.fromkeys(("reserves", "timeouts", "releases", "buries", "kicks"), 0)
    )


@dataclass
class Tube:
    """reserves_max: of a job that comes back; more, and it goes to retire_to, "": it is buried. 0: no limit."""

    name: str
    paused_until: int = 0
    reserves_max: int = 0
    retire_to: str = ""
    buried: deque[Job] = field(default_factory=deque)


@dataclass
class Peer:
    """A connection. asked: what waits behind a reserve. until: when that ends. batch: it is a batch-reserve."""

    number: int
    used: str = "default"
    watched: list[str] = field(default_factory=lambda: ["default"])
    waits: bool = False
    batch: bool = False
    until: int = FOREVER
    serial: int = 0
    asked: deque[tuple[str, bytes]] = field(default_factory=deque)


class Model:
    """replies: (connection, reply) in the order in which they were given, for the caller to take."""

    def __init__(self, tube_jobs_max: int) -> None:
        self.now = 0
        self.jobs: dict[int, Job] = {}
        self.tubes: dict[str, Tube] = {"default": Tube("default")}
        self.keys: dict[str, tuple[int, int]] = {}  # by name: the id of its job, and when it is free
        self.retired = 0
        self.peers: dict[int, Peer] = {}
        self.replies: list[tuple[int, bytes]] = []
        self.last_id = 0
        self.serial = 0
        self.refuses_puts = False
        self.tube_jobs_max = tube_jobs_max
        self.awake: deque[Peer] = deque()  # whose wait has ended: what they asked behind it comes next

    # ---- what happens ----

    def connect(self, number: int) -> None:
        self.peers[number] = Peer(number)

    def close(self, number: int) -> None:
        """Its jobs come back, first that whose time would have been over first."""
        self.peers.pop(number).asked.clear()
        held = [job for job in self.jobs.values() if job.holder == number]
        for job in sorted(held, key=lambda job: (job.due, job.number)):
            self.come_back(job)
        self.go_on()

    def half_close(self, number: int) -> None:
        if self.peers[number].waits:
            self.end_wait(self.peers[number], b"TIMED_OUT\r\n")
        self.go_on()

    def ask(self, number: int, command: str, body: bytes = b"") -> None:
        peer = self.peers[number]
        peer.asked.append((command, body))
        self.awake.append(peer)
        self.go_on()

    def dues_of_tubes(self) -> list[int]:
        """When a delay or a pause ends."""
        dues = [job.due for job in self.jobs.values() if job.state == "delayed"]
        return dues + [tube.paused_until for tube in self.tubes.values() if tube.paused_until > self.now]

    def dues_of_workers(self) -> list[int]:
        """When a time to run or a wait ends."""
        dues = [job.due for job in self.jobs.values() if job.state == "reserved"]
        for peer in self.peers.values():
            if peer.waits:
                dues += [peer.until, *(job.due - SECOND for job in self.jobs.values() if job.holder == peer.number)]
        return dues

    def dues(self) -> list[int]:
        return self.dues_of_tubes() + self.dues_of_workers()

    def next_due(self) -> int:
        return min([*self.dues(), *(until for _, until in self.keys.values())], default=FOREVER)

    def advance(self, now: int) -> None:
        """Nothing was due before that moment, and perhaps something is now."""
        self.now = now
        self.keys = {name: key for name, key in self.keys.items() if key[1] > now}
        self.take_due("delayed", GONE)
        self.give_ready()
        for number in sorted(self.peers):
            self.take_due("reserved", number)
            peer = self.peers[number]
            if peer.waits and self.is_pressed(peer):
                self.end_wait(peer, b"DEADLINE_SOON\r\n")
            elif peer.waits and peer.until <= now:
                self.end_wait(peer, b"TIMED_OUT\r\n")
        self.go_on()

    # ---- inside ----

    def go_on(self) -> None:
        """Does what was asked by those that do not wait, one connection after the other, and what follows from that."""
        self.settle_tubes()
        while self.awake:
            peer = self.awake.popleft()
            while peer.asked and not peer.waits:
                reply = self.execute(peer, *peer.asked.popleft())
                if reply is not None:
                    self.replies.append((peer.number, reply))
                self.settle_tubes()
            if not self.awake:
                self.give_ready()

    def take_due(self, state: str, holder: int) -> None:
        due = [job for job in self.jobs.values() if (job.state, job.holder) == (state, holder) and job.due <= self.now]
        for job in sorted(due, key=lambda job: (job.due, job.number)):
            job.counts["timeouts"] += state == "reserved"
            self.come_back(job)

    def give_ready(self) -> None:
        """Gives ready jobs to those that wait, after pauses."""
        for tube in self.tubes.values():
            while (job := self.first_ready([tube.name])) and (peer := self.first_waiting(tube.name)):
                self.give(peer, job)

    def settle_tubes(self) -> None:
        for name in set(self.tubes) - self.needed():
            del self.tubes[name]

    def needed(self) -> set[str]:
        """Names of tubes."""
        names = {"default"} | {job.tube for job in self.jobs.values()}
        for peer in self.peers.values():
            names |= {peer.used, *peer.watched}
        for tube in self.tubes.values():
            if tube.reserves_max:
                names |= {tube.name, tube.retire_to}
        return names

    def first_ready(self, names: list[str]) -> Job | None:
        ready = [
            job for job in self.jobs.values()
            if job.state == "ready" and job.tube in names and self.tubes[job.tube].paused_until <= self.now
        ]  # fmt: skip
        return min(ready, key=lambda job: (job.priority, job.number), default=None)

    def first_waiting(self, name: str) -> Peer | None:
        waiting = [peer for peer in self.peers.values() if peer.waits and name in peer.watched]
        return min(waiting, key=lambda peer: peer.serial, default=None)

    def is_pressed(self, peer: Peer) -> bool:
        return any(job.holder == peer.number and job.due - SECOND <= self.now for job in self.jobs.values())

    def leave(self, job: Job) -> None:
        if job.state == "buried":
            self.tubes[job.tube].buried.remove(job)
        job.state, job.holder = "", GONE

    def make_ready(self, job: Job) -> None:
        self.leave(job)
        job.state, job.since = "ready", self.now
        peer = self.first_waiting(job.tube)
        if peer and self.tubes[job.tube].paused_until <= self.now:
            self.give(peer, job)

    def come_back(self, job: Job, *, delayed: bool = False) -> None:
        """A job that was reserved or delayed is ready, perhaps after its delay; or it is retired."""
        tube = self.tubes[job.tube]
        if not self.is_retired(job):
            self.make_delayed(job) if delayed else self.make_ready(job)
            return
        self.retired += 1
        if not tube.retire_to or self.count(tube.retire_to) >= self.tube_jobs_max:
            self.bury(job)
            return
        self.leave(job)
        job.tube = tube.retire_to
        self.make_ready(job)

    def is_retired(self, job: Job) -> bool:
        """Whether it comes back once too often."""
        most = self.tubes[job.tube].reserves_max
        return job.state == "reserved" and most != 0 and job.counts["reserves"] >= most

    def bury(self, job: Job) -> None:
        self.leave(job)
        job.state, job.since = "buried", self.now
        job.counts["buries"] += 1
        self.tubes[job.tube].buried.append(job)

    def end(self, job: Job) -> None:
        """Its key is free, or will be."""
        self.leave(job)
        del self.jobs[job.number]
        if job.keep:
            self.keys[job.key] = (job.number, self.now + job.keep * SECOND)
        else:
            self.keys.pop(job.key, None)

    def count(self, name: str) -> int:
        return sum(job.tube == name for job in self.jobs.values())

    def make_delayed(self, job: Job) -> None:
        self.leave(job)
        job.state, job.due = "delayed", self.now + job.delay * SECOND

    def reserve(self, peer: Peer, job: Job) -> bytes:
        self.leave(job)
        job.state, job.holder, job.due = "reserved", peer.number, self.now + job.ttr * SECOND
        job.counts["reserves"] += 1
        return b"RESERVED %d %d\r\n%b\r\n" % (job.number, len(job.body), job.body)

    def give(self, peer: Peer, job: Job) -> None:
        reply = self.reserve(peer, job)
        if peer.batch:
            self.replies.append((peer.number, b"JOBS 1\r\n"))
        self.end_wait(peer, reply)

    def end_wait(self, peer: Peer, reply: bytes) -> None:
        peer.waits = False
        self.replies.append((peer.number, reply))
        self.awake.append(peer)

    def tube(self, name: str) -> Tube:
        return self.tubes.setdefault(name, Tube(name))

    # ---- commands ----

    def execute(self, peer: Peer, command: str, body: bytes) -> bytes | None:
        word, *rest = command.split(" ")
        bodies = [body] if word in WITH_BODY else []
        return getattr(self, "on_" + word.replace("-", "_"))(peer, *rest, *bodies)

    def on_put(self, peer: Peer, *arguments: Any) -> bytes:
        """And put-unique, which has a key too, and for how long that is kept."""
        pri, delay, ttr, _size, *unique, body = arguments
        key, keep = unique or ("", 0)
        if len(body) > BODY_MAX:
            return b"JOB_TOO_BIG\r\n"
        if self.refuses_puts:
            return b"DRAINING\r\n"
        if key in self.keys:
            return b"EXISTS %d\r\n" % self.keys[key][0]
        if self.count(peer.used) >= self.tube_jobs_max:
            return b"OUT_OF_MEMORY\r\n"
        self.last_id += 1
        job = Job(self.last_id, peer.used, int(pri), int(delay), max(int(ttr), 1), body, key=key, keep=int(keep))
        self.jobs[job.number] = job
        if key:
            self.keys[key] = (job.number, FOREVER)
        if job.delay:
            self.make_delayed(job)
        else:
            self.make_ready(job)
        return b"INSERTED %d\r\n" % job.number

    on_put_unique = on_put

    def on_batch_reserve(self, peer: Peer, count: str, seconds: str) -> bytes | None:
        if int(count) == 0:
            return b"BAD_FORMAT\r\n"
        taken: list[bytes] = []
        while len(taken) < int(count) and (job := self.first_ready(peer.watched)):
            taken.append(self.reserve(peer, job))
        if not taken:
            return self.wait(peer, self.now + int(seconds) * SECOND, batch=True)
        self.replies += [(peer.number, reply) for reply in (b"JOBS %d\r\n" % len(taken), *taken[:-1])]
        return taken[-1]

    def on_reserve(self, peer: Peer) -> bytes | None:
        return self.wait(peer, FOREVER)

    def on_reserve_with_timeout(self, peer: Peer, seconds: str) -> bytes | None:
        return self.wait(peer, self.now + int(seconds) * SECOND)

    def wait(self, peer: Peer, until: int, *, batch: bool = False) -> bytes | None:
        if job := self.first_ready(peer.watched):
            return self.reserve(peer, job)
        if self.is_pressed(peer):
            return b"DEADLINE_SOON\r\n"
        if until <= self.now:
            return b"TIMED_OUT\r\n"
        self.serial += 1
        peer.waits, peer.batch, peer.until, peer.serial = True, batch, until, self.serial
        return None

    def own(self, peer: Peer, number: str) -> Job | None:
        job = self.jobs.get(int(number))
        return job if job and job.holder == peer.number else None

    def on_reserve_job(self, peer: Peer, number: str) -> bytes:
        job = self.jobs.get(int(number))
        return self.reserve(peer, job) if job and job.state != "reserved" else b"NOT_FOUND\r\n"

    def on_delete(self, peer: Peer, number: str) -> bytes:
        job = self.jobs.get(int(number))
        if not job or (job.state == "reserved" and not self.own(peer, number)):
            return b"NOT_FOUND\r\n"
        self.end(job)
        return b"DELETED\r\n"

    def on_clear_tube(self, _peer: Peer, name: str, state: str) -> bytes:
        if state == "reserved":
            return b"BAD_FORMAT\r\n"
        if name not in self.tubes:
            return b"NOT_FOUND\r\n"
        cleared = [job for job in self.chosen(name, state) if job.state != "reserved"]
        for job in cleared:
            self.end(job)
        return b"CLEARED %d\r\n" % len(cleared)

    def on_release(self, peer: Peer, number: str, pri: str, delay: str) -> bytes:
        job = self.own(peer, number)
        if not job:
            return b"NOT_FOUND\r\n"
        job.priority, job.delay = int(pri), int(delay)
        job.counts["releases"] += 1
        self.come_back(job, delayed=job.delay > 0)
        return b"RELEASED\r\n"

    def on_bury(self, peer: Peer, number: str, pri: str) -> bytes:
        job = self.own(peer, number)
        if not job:
            return b"NOT_FOUND\r\n"
        job.priority = int(pri)
        self.bury(job)
        return b"BURIED\r\n"

    def on_touch(self, peer: Peer, number: str) -> bytes:
        job = self.own(peer, number)
        if not job:
            return b"NOT_FOUND\r\n"
        job.due = self.now + job.ttr * SECOND
        return b"TOUCHED\r\n"

    def on_kick_job(self, _peer: Peer, number: str) -> bytes:
        job = self.jobs.get(int(number))
        if not job or job.state not in ("buried", "delayed"):
            return b"NOT_FOUND\r\n"
        job.counts["kicks"] += 1
        self.make_ready(job)
        return b"KICKED\r\n"

    def delayed(self, name: str) -> list[Job]:
        found = [job for job in self.jobs.values() if job.state == "delayed" and job.tube == name]
        return sorted(found, key=lambda job: (job.due, job.number))

    def on_kick(self, peer: Peer, count: str) -> bytes:
        jobs = list(self.tubes[peer.used].buried) or self.delayed(peer.used)
        jobs = jobs[: int(count)]
        for job in jobs:
            job.counts["kicks"] += 1
            self.make_ready(job)
        return b"KICKED %d\r\n" % len(jobs)

    def found(self, job: Job | None) -> bytes:
        return b"FOUND %d %d\r\n%b\r\n" % (job.number, len(job.body), job.body) if job else b"NOT_FOUND\r\n"

    def on_peek(self, _peer: Peer, number: str) -> bytes:
        return self.found(self.jobs.get(int(number)))

    def on_peek_ready(self, peer: Peer) -> bytes:
        ready = [job for job in self.jobs.values() if job.state == "ready" and job.tube == peer.used]
        return self.found(min(ready, key=lambda job: (job.priority, job.number), default=None))

    def on_peek_delayed(self, peer: Peer) -> bytes:
        return self.found(next(iter(self.delayed(peer.used)), None))

    def on_peek_buried(self, peer: Peer) -> bytes:
        return self.found(next(iter(self.tubes[peer.used].buried), None))

    def on_use(self, peer: Peer, name: str) -> bytes:
        peer.used = self.tube(name).name
        return b"USING %b\r\n" % name.encode()

    def on_list_tube_used(self, peer: Peer) -> bytes:
        return b"USING %b\r\n" % peer.used.encode()

    def on_watch(self, peer: Peer, name: str) -> bytes:
        if name not in peer.watched:
            peer.watched.append(self.tube(name).name)
        return b"WATCHING %d\r\n" % len(peer.watched)

    def on_ignore(self, peer: Peer, name: str) -> bytes:
        if peer.watched == [name]:
            return b"NOT_IGNORED\r\n"
        if name in peer.watched:
            peer.watched.remove(name)
        return b"WATCHING %d\r\n" % len(peer.watched)

    def listed(self, names: list[str]) -> bytes:
        body = "".join(["---\n", *(f"- {name}\n" for name in names)]).encode()
        return b"OK %d\r\n%b\r\n" % (len(body), body)

    def on_list_tubes(self, _peer: Peer) -> bytes:
        return self.listed(list(self.tubes))

    def on_list_tubes_watched(self, peer: Peer) -> bytes:
        return self.listed(peer.watched)

    def on_pause_tube(self, _peer: Peer, name: str, seconds: str) -> bytes:
        if name not in self.tubes:
            return b"NOT_FOUND\r\n"
        self.tubes[name].paused_until = self.now + int(seconds) * SECOND
        return b"PAUSED\r\n"

    def on_limit_reserves(self, _peer: Peer, name: str, reserves: str, target: str) -> bytes:
        limited, other = self.tube(name), self.tube(target)
        limited.reserves_max = int(reserves)
        limited.retire_to = target if limited.reserves_max and other is not limited else ""
        return b"LIMITED\r\n"

    def chosen(self, name: str, state: str) -> list[Job]:
        """A tube's jobs in a state, or "all", by id."""
        return [job for job in self.jobs.values() if job.tube == name and state in (job.state, "all")]

    def on_list_jobs(self, _peer: Peer, name: str, state: str, first: str, count: str, needle: bytes = b"") -> bytes:
        if name not in self.tubes:
            return b"NOT_FOUND\r\n"
        found = [job for job in self.chosen(name, state) if job.number >= int(first) and needle in job.body]
        return repr([self.job_figures(job) for job in found[: int(count)]]).encode()

    def on_search_jobs(self, peer: Peer, *arguments: Any) -> bytes:
        *which, _size, needle = arguments
        return self.on_list_jobs(peer, *which, needle)

    def on_stats_job(self, _peer: Peer, number: str) -> bytes:
        job = self.jobs.get(int(number))
        return repr(self.job_figures(job)).encode() if job else b"NOT_FOUND\r\n"

    def job_figures(self, job: Job) -> dict[str, int | str]:
        left = (job.due - self.now) // SECOND if job.state in ("reserved", "delayed") else 0
        return {
            "id": job.number, "tube": f'"{job.tube}"', "state": job.state, "pri": job.priority, "delay": job.delay,
            "ttr": job.ttr, "time-left": left, **job.counts, **({"key": f'"{job.key}"'} if job.key else {}),
        }  # fmt: skip

    def on_stats_tube(self, _peer: Peer, name: str) -> bytes:
        return repr(self.tube_figures(name)).encode() if name in self.tubes else b"NOT_FOUND\r\n"

    def on_inspect_tube(self, _peer: Peer, name: str) -> bytes:
        if name not in self.tubes:
            return b"NOT_FOUND\r\n"
        ready = self.chosen(name, "ready")
        figures = {
            **self.tube_figures(name),
            "age-of-oldest-ready": max((self.now - job.since) // SECOND for job in ready) if ready else 0,
            "max-reserves": self.tubes[name].reserves_max,
            "retire-to": f'"{self.tubes[name].retire_to}"',
        }
        return repr(figures).encode()

    def tube_figures(self, name: str) -> dict[str, int | str]:
        jobs = self.chosen(name, "all")
        peers = self.peers.values()
        return {
            "name": f'"{name}"',
            "current-jobs-urgent": sum(job.state == "ready" and job.priority < URGENT for job in jobs),
            **{f"current-jobs-{state}": sum(job.state == state for job in jobs) for state in STATES},
            "current-using": sum(peer.used == name for peer in peers),
            "current-watching": sum(name in peer.watched for peer in peers),
            "current-waiting": sum(peer.waits and name in peer.watched for peer in peers),
        }
