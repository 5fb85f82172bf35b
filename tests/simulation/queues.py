"""What the beanstalk protocol's world knows by itself: jobs, tubes and who waits, and what may have become of them.

The model of tests/property is the base. Here it is told which requests the engine has executed; jobs of connections
that have gone come back in a tick; and in which order several things happen in one tick is the engine's choice, which
is looked at, and has to be one that is allowed.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from kit.promises import Violation
from property.beanstalk_model import FOREVER, SECOND, Job, Model, Peer

if TYPE_CHECKING:
    from collections.abc import Iterable

FAILED = b"INTERNAL_ERROR\r\n"
ORPHANED = -2  # holder of what a worker of the process before had
OBSERVER = 0  # number of the connection by which the world looks at the engine
JOB_COST, BLOCK_COST, TUBE_COST, KEY_COST, WATCH_COST, BLOCK = 136, 64, 248, 104, 32, 60
BATCH_ROOM, JOB_HEAD = 64 * 1024, 64


@dataclass
class Task(Job):
    """tied: when it was buried, if others were at the same moment, in whatever order."""

    tied: int = -1


@dataclass
class Sweep:
    """A kick or a clear-tube that goes on. state: of the jobs, "" for all but reserved ones."""

    word: str
    tube: str
    state: str
    left: int
    swept: int = 0


@dataclass
class Client(Peer):
    """sent: requests that were not executed yet. asking: the one that waits for its reply. hung: the peer sends nothing
    more. mine: ids that it knows to have reserved."""

    sent: deque[Any] = field(default_factory=deque)
    asking: Any = None
    hung: bool = False
    sweep: Sweep | None = None
    lists: str | None = None  # tube whose jobs are listed, as long as that goes on
    mine: list[int] = field(default_factory=list)


class Books(Model):
    """touched: ids of jobs, and names of tubes with limits, that have changed since the caller has emptied it."""

    def __init__(self, tube_jobs_max: int, memory_max: int, tubes_max: int, job_size_max: int, now: int) -> None:
        super().__init__(tube_jobs_max)
        self.now = now
        self.memory_max = memory_max
        self.tubes_max = tubes_max
        self.job_size_max = job_size_max
        self.leaving: list[int] = []
        self.touched: dict[Any, None] = {}
        self.ended = 0  # records of jobs that have ended, for the journal
        self.open = 1  # connections
        self.is_journaled = self.is_failing = self.is_full = self.is_draining = False
        self.peers[OBSERVER] = Client(OBSERVER)
        self.engine: Any = None  # says what it has made of jobs

    # ---- what there is ----

    def count_state(self, state: str) -> int:
        return sum(job.state == state for job in self.jobs.values())

    def waiting(self) -> list[Client]:
        """Those that wait, the longest first."""
        return sorted((peer for peer in self.peers.values() if peer.waits), key=lambda peer: peer.serial)

    def is_paused(self, name: str) -> bool:
        return self.now < self.tubes[name].paused_until

    def memory(self) -> int:
        """Bytes that count against the limit."""
        watches = sum(len(peer.watched) for peer in self.peers.values())
        bodies = sum(blocks(len(job.body)) for job in self.jobs.values())
        return (
            (len(self.jobs) + self.ended) * JOB_COST + bodies * BLOCK_COST
            + len(self.tubes) * TUBE_COST + len(self.keys) * KEY_COST + max(0, watches - self.open) * WATCH_COST
        )  # fmt: skip

    def has_room(self, size: int) -> bool:
        return self.memory() + size <= self.memory_max

    def dues(self) -> list[int]:
        """All moments that were, or will be, those of something; those of a job's last second if its worker waits."""
        paused = [tube.paused_until for tube in self.tubes.values()]
        keys = [until for _, until in self.keys.values()]
        return [due for due in (*super().dues(), *paused, *keys) if due < FOREVER]

    # ---- jobs ----

    def leave(self, job: Job) -> None:
        super().leave(job)
        job.tied = -1
        self.touched[job.number] = None

    def give(self, peer: Peer, job: Job) -> None:
        reply = self.reserve(peer, job)
        self.end_wait(peer, b"JOBS 1\r\n" + reply if peer.batch else reply)

    def end(self, job: Job) -> None:
        super().end(job)
        self.ended += self.is_journaled

    def needed(self) -> set[str]:
        names = super().needed()
        for peer in self.peers.values():
            names |= {peer.lists or "default"} | ({peer.sweep.tube} if peer.sweep else set())
        return names

    # ---- connections ----

    def left(self, number: int) -> None:
        """What it held comes back in a tick."""
        if self.peers.pop(number, None) is not None:
            self.leaving.append(number)
            self.settle_tubes()

    # ---- commands ----

    def execute(self, peer: Any, command: str, body: bytes) -> Any:
        """The reply, or several that are right, or None if it comes later."""
        word, *rest = command.split(" ")
        reply = getattr(self, "on_" + word.replace("-", "_"))(peer, *rest, *([body] if word.startswith("put") else []))
        self.settle_tubes()
        self.awake.clear()
        return reply

    def on_quit(self, _peer: Peer) -> None:
        pass

    def on_put(self, peer: Peer, *words: Any) -> bytes:
        return self.on_put_unique(peer, *words[:4], "", "0", words[4])

    def on_put_unique(self, peer: Peer, *words: Any) -> bytes:
        pri, delay, ttr, size, key, keep, body = words
        reply = self.refusal(int(size), body) or self.shortage(peer.used, key, len(body) - 2)
        if reply is None:
            self.last_id += 1
            job = Task(
                self.last_id, peer.used, int(pri), int(delay), max(int(ttr), 1), body[:-2], key=key, keep=int(keep)
            )
            if key:
                self.keys[key] = (job.number, FOREVER)
            self.jobs[job.number] = job
            (self.make_delayed if job.delay else self.make_ready)(job)
            reply = b"INSERTED %d\r\n" % job.number
        return reply

    def refusal(self, size: int, body: bytes) -> bytes | None:
        if size > self.job_size_max:
            return b"JOB_TOO_BIG\r\n"
        if not body.endswith(b"\r\n"):
            return b"EXPECTED_CRLF\r\n"
        if self.refuses_puts or self.is_draining:
            return b"DRAINING\r\n"
        return FAILED if self.is_failing or self.is_full else None

    def shortage(self, tube: str, key: str, size: int) -> bytes | None:
        """Of a key that is free, or of room."""
        number, until = self.keys.get(key, (0, 0))
        if number and self.now < until:
            self.touched[number] = None
            return b"EXISTS %d\r\n" % number
        self.keys.pop(key, None)
        has_room = self.has_room(JOB_COST + KEY_COST * bool(key) + blocks(size) * BLOCK_COST)
        return None if has_room and self.count(tube) < self.tube_jobs_max else b"OUT_OF_MEMORY\r\n"

    def on_reserve_with_timeout(self, peer: Peer, seconds: str) -> Any:
        return self.wait(peer, self.now + int(seconds) * SECOND)

    def on_batch_reserve(self, peer: Peer, count: str, seconds: str) -> Any:
        if count == "0":
            return b"BAD_FORMAT\r\n"
        given, size = [], 0
        while not self.is_draining and len(given) < int(count) and (job := self.first_ready(peer.watched)):
            size += len(job.body) + JOB_HEAD
            if given and size > BATCH_ROOM:
                break
            given.append(self.reserve(peer, job))
        if given:
            return b"JOBS %d\r\n%b" % (len(given), b"".join(given))
        return self.wait(peer, self.now + int(seconds) * SECOND, batch=True)

    def wait(self, peer: Any, until: int, *, batch: bool = False) -> Any:
        if self.is_draining:
            return b"DEADLINE_SOON\r\n" if self.is_pressed(peer) else b"TIMED_OUT\r\n"
        reply = super().wait(peer, until, batch=batch)
        if reply is None and peer.hung:
            peer.waits = False
            return b"TIMED_OUT\r\n"
        return reply

    def own(self, peer: Peer, number: str) -> Job | None:
        job = self.jobs.get(int(number))
        return job if job and job.state == "reserved" and job.holder in (peer.number, ORPHANED) else None

    def on_reserve_job(self, peer: Peer, number: str) -> bytes:
        return b"NOT_FOUND\r\n" if self.is_draining else super().on_reserve_job(peer, number)

    def on_touch(self, peer: Peer, number: str) -> bytes:
        job = self.own(peer, number)
        if not job:
            return b"NOT_FOUND\r\n"
        job.due, job.holder = self.now + job.ttr * SECOND, peer.number
        self.touched[job.number] = None
        return b"TOUCHED\r\n"

    def on_peek_buried(self, peer: Peer) -> Any:
        buried = list(self.tubes[peer.used].buried)
        ties = [job for job in buried if is_tied(job, buried[0])]
        return tuple(self.found(job) for job in ties) or self.found(None)

    def tube_of_room(self, name: str) -> bool:
        """Makes a tube if need be; False: there is no room for another."""
        if name not in self.tubes and (len(self.tubes) >= self.tubes_max or not self.has_room(TUBE_COST)):
            return False
        self.tube(name)
        return True

    def on_delete(self, peer: Peer, *words: Any) -> bytes:
        return FAILED if self.is_failing else super().on_delete(peer, *words)

    def on_release(self, peer: Peer, *words: Any) -> bytes:
        return FAILED if self.is_failing else super().on_release(peer, *words)

    def on_bury(self, peer: Peer, *words: Any) -> bytes:
        return FAILED if self.is_failing else super().on_bury(peer, *words)

    def on_kick_job(self, peer: Peer, *words: Any) -> bytes:
        return FAILED if self.is_failing else super().on_kick_job(peer, *words)

    def on_use(self, peer: Peer, name: str) -> bytes:
        return super().on_use(peer, name) if self.tube_of_room(name) else b"OUT_OF_MEMORY\r\n"

    def on_watch(self, peer: Peer, name: str) -> bytes:
        if not self.tube_of_room(name) or (name not in peer.watched and not self.has_room(WATCH_COST)):
            return b"OUT_OF_MEMORY\r\n"
        return super().on_watch(peer, name)

    def on_limit_reserves(self, peer: Peer, name: str, reserves: str, target: str) -> bytes:
        if self.is_failing or self.is_full:
            return FAILED
        if not self.tube_of_room(name) or not self.tube_of_room(target):
            return b"OUT_OF_MEMORY\r\n"
        self.touched[name] = None
        return super().on_limit_reserves(peer, name, reserves, target)

    # ---- what takes long ----

    def on_kick(self, peer: Any, count: str) -> bytes | None:
        if self.is_failing:
            return FAILED
        buried = len(self.tubes[peer.used].buried)
        state = "buried" if buried else "delayed"
        peer.sweep = Sweep("KICKED", peer.used, state, min(int(count), buried or len(self.delayed(peer.used))))
        return None

    def on_clear_tube(self, peer: Any, name: str, state: str) -> bytes | None:
        if self.is_failing:
            return FAILED
        if name not in self.tubes:
            return b"NOT_FOUND\r\n"
        left = sum(job.state != "reserved" for job in self.chosen(name, state))
        peer.sweep = Sweep("CLEARED", name, "" if state == "all" else state, left)
        return None

    def next_swept(self, sweep: Sweep) -> Job | None:
        tube = self.tubes[sweep.tube]
        ready = [job for job in self.jobs.values() if job.state == "ready" and job.tube == sweep.tube]
        if ready and sweep.state in ("", "ready"):
            return min(ready, key=lambda job: (job.priority, job.number))
        if (delayed := self.delayed(sweep.tube)) and sweep.state in ("", "delayed"):
            return delayed[0]
        if not tube.buried or sweep.state not in ("", "buried"):
            return None
        ties = [job for job in tube.buried if is_tied(job, tube.buried[0])]
        waiting = self.first_waiting(sweep.tube) if sweep.word == "KICKED" and not self.is_paused(sweep.tube) else None
        if len(ties) > 1:  # which of them comes first is the engine's choice
            given = self.engine.reserved_by(waiting.number) if waiting else ()
            ties.sort(key=lambda job: -1 if job.number in given else self.rank(job))
        return ties[0]

    def rank(self, job: Job) -> int:
        """First those that were kicked; then those that are gone, now that all requests of the call were executed."""
        told = self.engine.ask_job(job.number)
        return 1 if told is None else 0 if int(told["kicks"]) > job.counts["kicks"] else 2

    def sweep(self, peer: Any, most: int) -> bytes | None:
        """Kicks or clears so many jobs, none if the journal cannot be written; the reply if that is all."""
        sweep = peer.sweep
        if self.is_failing and most:
            sweep.left = 0
        while sweep.left and most and (job := self.next_swept(sweep)):
            most -= 1
            sweep.left -= 1
            sweep.swept += 1
            if sweep.word == "KICKED":
                job.counts["kicks"] += 1
                self.make_ready(job)
            else:
                self.end(job)
        self.awake.clear()
        if most == 0:
            return None
        peer.sweep = None
        self.settle_tubes()
        return FAILED if self.is_failing else b"%b %d\r\n" % (sweep.word.encode(), sweep.swept)

    # ---- a tick ----

    def tick(self) -> None:
        """All that is due has been done by the engine, in an order that it says: who was given what."""
        waiting = self.waiting()
        back = [job for job in self.jobs.values() if job.state == "reserved" and self.is_over(job)]
        delayed = [job for job in self.jobs.values() if job.state == "delayed" and job.due <= self.now]
        watched = {name for peer in waiting for name in peer.watched if not self.is_paused(name)}
        before = [job for job in self.jobs.values() if job.state == "ready" and job.tube in watched]
        given = self.given(waiting, {job.number for job in back}) if back or delayed or before else {}
        self.claim_allowed(given, back + delayed + before)
        for job in [*back, *delayed, *(job for job in before if job.number in given)]:
            self.place(job, given)
        self.leaving.clear()
        self.claim_turns(waiting, given, before)
        for peer in waiting:
            if peer.waits and (self.is_pressed(peer) or peer.until <= self.now or self.is_draining):
                if (job := self.first_ready(peer.watched)) and job in delayed:
                    raise Violation("idle", f"connection {peer.number} was told to go when job {job.number} was ready")
                self.end_wait(peer, b"DEADLINE_SOON\r\n" if self.is_pressed(peer) else b"TIMED_OUT\r\n")
        for peer in waiting:
            if peer.waits and (job := self.first_ready(peer.watched)):
                raise Violation("idle", f"connection {peer.number} waits, and job {job.number} is ready")
        self.keys = {name: key for name, key in self.keys.items() if key[1] > self.now}
        self.settle_tubes()
        self.awake.clear()

    def is_over(self, job: Job) -> bool:
        return job.due <= self.now or job.holder in self.leaving

    def given(self, waiting: Iterable[Client], back: set[int]) -> dict[int, Client]:
        """The jobs that those that waited were given."""
        given = {}
        for peer in waiting:
            held = {job.number for job in self.jobs.values() if job.holder == peer.number}
            new = self.engine.reserved_by(peer.number) - (held - back)
            if len(new) > 1:
                raise Violation("turn", f"connection {peer.number} waited for one job, and has {sorted(new)}")
            given.update(dict.fromkeys(new, peer))
        return given

    def claim_allowed(self, given: dict[int, Client], free: list[Job]) -> None:
        allowed = {job.number for job in free}
        for number, peer in given.items():
            if number not in allowed:
                raise Violation(*self.blame(number, f"connection {peer.number} was given job {number}"))

    def blame(self, number: int, what: str) -> tuple[str, str]:
        """Which promise is broken if a job is given out that is not to be had."""
        job = self.jobs.get(number)
        if job is None:
            return "gone", f"{what}, which there is no more"
        if job.state == "reserved":
            return "one worker", f"{what}, which connection {job.holder} has for {job.due - self.now} ns more"
        if job.state == "delayed":
            return "early", f"{what}, which is delayed for {job.due - self.now} ns more"
        return "priority", f"{what}, which is {job.state}"

    def place(self, job: Job, given: dict[int, Client]) -> None:
        """Where a job goes whose time is over, or that somebody was given."""
        held = job.state == "reserved"
        if held and job.holder not in self.leaving:
            job.counts["timeouts"] += 1
        retired = self.is_retired(job)
        self.leave(job)
        if retired:
            target = self.tubes[job.tube].retire_to
            if (told := self.engine.ask_job(job.number)) and (told["tube"], told["state"]) == (job.tube, "buried"):
                if target and self.count(target) + len(self.jobs) < self.tube_jobs_max:
                    raise Violation("retired", f"job {job.number} was buried, and there is room in {target}")
                self.bury(job)
                job.tied = self.now
                return
            if not target:
                raise Violation("retired", f"job {job.number} was reserved too often, and is not buried")
            job.tube = target
        job.state, job.since = "ready", self.now
        if job.number in given:
            self.give(given[job.number], job)

    def claim_turns(self, waiting: list[Client], given: dict[int, Client], before: list[Job]) -> None:
        """Nobody was passed over, neither of those that wait nor of the jobs."""
        for number, peer in given.items():
            tube = self.jobs[number].tube
            if tube not in peer.watched or self.is_paused(tube):
                raise Violation("turn", f"connection {peer.number} was given job {number} of {tube}")
            for other in waiting:
                ends = other.until <= self.now or self.is_pressed(other) or self.is_draining
                if other.waits and other.serial < peer.serial and tube in other.watched and not ends:
                    raise Violation("turn", f"connection {other.number} has waited longer for job {number}")
        for job in before:
            for other in before:
                ranks = (other.priority, other.number) < (job.priority, job.number)
                if job.number in given and job.tube == other.tube and other.state == "ready" and ranks:
                    raise Violation("priority", f"job {job.number} was given out, and {other.number} is ready")

    # ---- the journal ----

    def version(self, name: Any) -> Any:
        """What the journal is to have of a job, or of the limit of a tube; None if there is none."""
        if isinstance(name, str):
            tube = self.tubes.get(name)
            return (tube.reserves_max, tube.retire_to) if tube and tube.reserves_max else None
        job: Any = self.jobs.get(name)
        if job is None:
            return None
        due = job.due if job.state in ("reserved", "delayed") else 0
        counts = job.counts.values()
        return job.tube, job.state, job.priority, job.delay, job.ttr, due, *counts, job.key, job.keep, job.body


def blocks(size: int) -> int:
    return -(-size // BLOCK)


def is_tied(job: Any, other: Any) -> bool:
    return job is other or job.tied == other.tied != -1
