"""The beanstalk protocol's world: producers and workers of all sorts, books of every job, and a disk that may fail.

After each call of the engine the books (queues.py) execute the requests that it says to have executed. So every reply
is known before it comes, and has to come, byte by byte and in order. Where the engine may choose, as to what comes
first in a tick, it is asked what it chose, by a connection of the world's own and by its tables, and that has to be
allowed.

With a journal, each change of a job is a version. Where replies wait for the journal, what is answered has to be on the
disk by then, in that version or a later one; after a crash each job has to be in the last version that was answered or
a later one, and the books go on with what is on the disk.
"""

from __future__ import annotations

from collections import Counter as Tally
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from counterd.protocols.beanstalk import timing, wire
from counterd.protocols.beanstalk._session import open_store
from counterd.protocols.beanstalk._tables import TABLES
from kit.promises import MS, SECOND, US, Violation
from property.beanstalk_model import FOREVER
from simulation.disk import MOODS, UNIX_NS, Disk
from simulation.queues import ORPHANED, Books, Client, Task
from simulation.world import World

if TYPE_CHECKING:
    from collections.abc import Callable

    from counterd.protocols.beanstalk._store import BeanstalkStore
    from simulation.world import Link

TICK = 1 << 20  # ns, of the engine's wheels: what is due by the beginning of one is done in it
TUBES = ("default", "a", "b-tube", "c" * 40, "d", "e")
KEYS = ("k", "key-2", "K" * 40)
PRIORITIES = (0, 1, 1, 2, 1023, 1024, 2**32 - 1)
PROMISED = {
    "put", "put-unique", "delete", "release", "bury", "touch", "kick", "kick-job", "clear-tube", "limit-reserves",
}  # fmt: skip
JOBS_ENOUGH = 150
_, RESERVED = TABLES
COMPARED_EVERY = 64
GARBAGE = {"what": b"UNKNOWN_COMMAND\r\n", "delete": b"BAD_FORMAT\r\n", "put 1 2 x 4": b"BAD_FORMAT\r\n"}
# What clients ask, and how often.
ASKED = (
    ("put", 24), ("put-unique", 5), ("reserve", 4), ("reserve-with-timeout", 18), ("batch-reserve", 3),
    ("reserve-job", 3), ("delete", 16), ("release", 8), ("bury", 5), ("touch", 4), ("kick", 3), ("kick-job", 2),
    ("peek", 2), ("peek-next", 2), ("use", 4), ("watch", 4), ("ignore", 3), ("pause-tube", 2), ("clear-tube", 0.3),
    ("list-jobs", 1), ("limit-reserves", 2), ("list-tube-used", 0.5), ("list-tubes", 0.5), ("list-tubes-watched", 0.5),
    ("garbage", 0.5),
)  # fmt: skip


@dataclass
class Request:
    """replies: any of which is right; () as long as it is not executed, or waits. judge: of a reply that is none of
    these. id: of the job that it has put. acks: (name, version) of what has to be on disk with the reply."""

    command: str
    body: bytes = b""
    replies: tuple[bytes, ...] = ()
    judge: Callable[[bytes], int] | None = None
    id: int = 0
    acks: list[tuple[Any, int]] = field(default_factory=list)

    @property
    def word(self) -> str:
        return self.command.split(" ")[0]


class BeanstalkWorld(World):
    """Requests in Link.todo are those that were not answered."""

    name = "beanstalk"

    def make_store(self) -> BeanstalkStore:
        draw = self.random
        self.crowd = min(self.crowd, 60)
        self.latency = draw.choice((200 * US, 5 * MS, 50 * MS, 300 * MS))
        self.sizes = {
            "memory_limit": draw.choice((4_000, 16_000, 1 << 20, 1 << 20)),
            "job_size_max": draw.choice((100, 2_000, 2_000)),
            "tubes": draw.choice((3, 10)),
            "tube_jobs_max": draw.choice((3, 30, 1 << 29)),
        }
        self.hash_key = draw.getrandbits(128).to_bytes(16, "little")
        self.seen: Tally[tuple[str, str]] = Tally()
        # Which of the jobs that retire in one tick is buried first is the engine's choice: there a kick takes all.
        self.retires = draw.random() < 0.4
        self.bounds = (0, 1000) if self.retires else (0, 1, 2, 1000)
        self.puts = self.newest = self.crashes = 0
        self.ticked = 0
        self.sync = draw.choice(("", "always", "always", "always", "never", "20"))  # "": there is no journal
        self.disk = Disk(self) if self.sync else None
        self.begin()
        return self.store

    def begin(self) -> None:
        """A new daemon."""
        period_ns, lag_ns = timing(self.sync or "always")
        self.store: Any = open_store(
            **self.sizes, figures=dict, host={}, journal_period_ns=period_ns, journal_lag_ns=lag_ns,
            hash_key=self.hash_key, now_ns=self.now,
        )  # fmt: skip
        self.store.set_wall(UNIX_NS + self.now, self.now)
        sizes = self.sizes
        self.books = Books(
            sizes["tube_jobs_max"], sizes["memory_limit"], sizes["tubes"], sizes["job_size_max"], self.now
        )
        self.books.engine = self
        self.history: dict[Any, list[Any]] = {}
        self.floor: dict[Any, int] = {}
        if self.disk is not None:
            self.disk.begin()
            last_id = self.disk.restore(self.store)
            self.restore_books(self.disk)
            if last_id < self.newest:
                raise Violation("ids", f"job {self.newest} was there, and the next is {last_id + 1}")
            self.books.last_id = last_id
            self.books.is_journaled = True
        self.observer = self.store.session(self.now)
        self.books.open = 1
        self.listed = False  # since the last tick, which ends the tubes that stayed for lists

    def restore_books(self, disk: Disk) -> None:
        books = self.books
        for name, (most, target) in disk.limits().items():
            limited = books.tube(name)
            limited.reserves_max, limited.retire_to = most, target
            books.tube(target or name)
        for number, version in disk.jobs().items():
            tube, state, priority, delay, ttr, due, *counts, key, keep, body = version
            job = Task(number, tube, priority, delay, ttr, body, state, due=due, key=key, keep=keep)
            job.counts = dict(zip(job.counts, counts, strict=True))
            books.jobs[number] = job
            if state == "reserved":
                job.holder = ORPHANED
            books.tube(tube)
            if state == "buried":
                books.tubes[tube].buried.append(job)
            if key:
                books.keys[key] = (number, FOREVER)
        for key, (number, until) in disk.keys().items():
            if until > self.now:
                books.keys[key] = (number, until)
        self.history = {name: [version] for name, version in [*disk.jobs().items(), *disk.limits().items()]}

    def arrived(self) -> Client:
        client = Client(self.sessions)
        self.books.peers[client.number] = client
        return client

    # ---- what clients ask ----

    def compose(self, link: Link) -> bytes:
        data = b""
        for _ in range(self.batch()):
            request = self.request(link.books)
            link.todo.append(request)
            link.books.sent.append(request)
            data += request.command.encode() + b"\r\n" + request.body
        return data

    def request(self, client: Client) -> Request:
        words, weights = zip(*ASKED, strict=True)
        word = self.random.choices(words, weights)[0]
        if word in ("put", "put-unique") and len(self.books.jobs) > JOBS_ENOUGH:
            word = "delete"
        if word == "limit-reserves" and not self.retires:
            word = "list-jobs"
        if word == "garbage":
            return Request(self.random.choice(list(GARBAGE)))
        if word in ("put", "put-unique"):
            return self.put(word)
        return Request(self.line(word, client))

    def put(self, word: str) -> Request:
        draw = self.random
        self.puts += 1
        size = draw.choice((0, 0, 1, 8, 8, 60, 61, 99, 99, 1_100, 2_500))
        body = (b"%d." % self.puts * size)[:size]
        end = b"\r\n" if draw.random() < 0.98 else b"xx"
        delay, ttr = draw.choice((0, 0, 0, 0, 1, 2)), draw.choice((0, 1, 1, 2, 3, 60))
        line = f"{word} {draw.choice(PRIORITIES)} {delay} {ttr} {size}"
        if word == "put-unique":
            line += f" {draw.choice(KEYS)} {draw.choice((0, 0, 1, 5))}"
        return Request(line, body + end)

    def line(self, word: str, client: Client) -> str:
        draw = self.random
        tube, few = draw.choice(TUBES), draw.randrange(4)
        if word in ("delete", "release", "bury", "touch", "reserve-job", "kick-job", "peek"):
            word = f"{word} {self.pick_job(client)}"
        priority, delay = draw.choice(PRIORITIES), draw.choice((0, 0, 1, 2))
        kind = word.split(" ")[0]
        if kind == "release":
            return f"{word} {priority} {delay}"
        if kind == "bury":
            return f"{word} {priority}"
        rest = {
            "reserve-with-timeout": f" {few}",
            "batch-reserve": f" {draw.choice((0, 1, 3, 1000))} {few}",
            "kick": f" {draw.choice(self.bounds)}",
            "use": f" {tube}", "watch": f" {tube}", "ignore": f" {tube}",
            "pause-tube": f" {tube} {draw.choice((0, 1, 1, 2))}",
            "clear-tube": f" {tube} {draw.choice(('ready', 'delayed', 'buried', 'all'))}",
            "list-jobs": f" {tube} {draw.choice(('ready', 'reserved', 'delayed', 'buried', 'all'))} {few} 1000",
            "limit-reserves": f" {tube} {draw.choice((0, 1, 2, 3))} {draw.choice(TUBES)}",
        }  # fmt: skip
        if word == "peek-next":
            return "peek-" + draw.choice(("ready", "delayed", "buried"))
        return word + rest.get(word, "")

    def pick_job(self, client: Client) -> int:
        draw = self.random
        if client.mine and draw.random() < 0.8:
            return client.mine.pop(draw.randrange(len(client.mine)))
        jobs = list(self.books.jobs)
        return draw.choice(jobs) if jobs and draw.random() < 0.9 else self.newest + 1

    def nonsense(self, link: Link) -> bytes:
        """It quits, or goes in the midst of a put."""
        if self.random.random() < 0.5:
            return b"put 1 0 1 50\r\nno more"
        link.books.sent.append(Request("quit"))
        return b"quit\r\n"

    # ---- what the engine has executed ----

    def replay(self, link: Link) -> None:
        """Has the books execute what the engine has."""
        session, client, books = link.session, link.books, self.books
        books.now, books.open = self.now, self.store.sessions_open
        if link.ended and not client.hung:
            client.hung = True
            if client.waits:
                books.end_wait(client, b"TIMED_OUT\r\n")
        if client.sweep is not None or client.lists is not None:
            self.go_on(link, client.asking, link.executed == session.requests and session.awaited != 0)
        while link.executed < session.requests:
            link.executed += 1
            self.execute(link, client.sent.popleft(), link.executed == session.requests and session.awaited != 0)
        self.hand_out()

    def execute(self, link: Link, request: Request, unfinished: bool) -> None:
        client, books = link.books, self.books
        if request.command == "quit":
            return
        client.asking = request
        if request.command in GARBAGE:
            reply: Any = GARBAGE[request.command]
        elif request.word in ("list-jobs", "list-tubes", "list-tubes-watched"):
            self.list(client, request, unfinished)
            return
        else:
            reply = books.execute(client, request.command, request.body)
        if client.sweep is not None:
            self.go_on(link, request, unfinished)
        else:
            self.answer(request, reply)

    def answer(self, request: Request, reply: Any) -> None:
        if reply is not None:
            request.replies = reply if isinstance(reply, tuple) else (reply,)
            if request.replies[0].startswith(b"INSERTED "):
                request.id = int(reply.split()[1])
                self.newest = max(self.newest, request.id)
        names = self.settle_versions()
        if self.sync == "always" and request.word in PROMISED and not self.books.is_failing:
            request.acks += [(name, len(self.history[name]) - 1) for name in names]

    def settle_versions(self) -> list[Any]:
        """Notes what has changed."""
        names = list(self.books.touched)
        for name in names:
            versions = self.history.setdefault(name, [None])
            version = self.books.version(name)
            if versions[-1] != version:
                versions.append(version)
        self.books.touched.clear()
        return names

    def go_on(self, link: Link, request: Request, unfinished: bool) -> None:
        """With what takes long. If it is not done, the engine's figures say how far it is."""
        client, books = link.books, self.books
        if client.sweep is None:
            if not unfinished:
                client.lists = None
                books.settle_tubes()
            return
        done = -1
        if unfinished:
            states = [client.sweep.state] if client.sweep.state else ["ready", "delayed", "buried"]
            figures = self.store.snapshot()
            done = sum(books.count_state(state) - figures[f"jobs:{state}"] for state in states)
        self.answer(request, books.sweep(client, done))

    def list(self, client: Client, request: Request, unfinished: bool) -> None:
        """What a list has to say, if it was not interrupted."""
        _, *rest = request.command.split(" ")
        if request.word != "list-jobs":
            reply = self.books.execute(client, request.command, b"")
            request.replies = (reply,)  # true for this moment, however long the peer takes to read it
            client.lists = "default" if unfinished else None
            return
        tube, state, first, most = rest
        if tube not in self.books.tubes:
            request.replies = (b"NOT_FOUND\r\n",)
            return
        if unfinished:
            request.judge = claim_list
            client.lists = tube
            return
        numbers = sorted(
            job.number for job in self.books.jobs.values()
            if job.tube == tube and state in ("all", job.state) and job.number >= int(first)
        )[: int(most)]  # fmt: skip
        jobs = [self.figures_of(number) for number in numbers]

        def judge(output: bytes) -> int:
            size = claim_list(output)
            for told, job in zip(wire.read_jobs(body_of(output)), jobs, strict=True):
                claim_job(told, job)
            return size

        request.judge = judge

    def figures_of(self, number: int) -> dict[str, str]:
        job = self.books.jobs[number]
        return {
            "id": str(number), "tube": job.tube, "state": job.state, "pri": str(job.priority), "delay": str(job.delay),
            "ttr": str(job.ttr), **{name: str(count) for name, count in job.counts.items()},
        }  # fmt: skip

    def hand_out(self) -> None:
        """What ended the waits of others, or of this one, and connections that were dropped for the room they took."""
        for link in self.links.values():
            if link.session.dropped:
                self.left(link)
        self.settle_versions()
        for number, reply in self.books.replies:
            self.books.peers[number].asking.replies = (reply,)
        self.books.replies.clear()

    # ---- what is answered ----

    def answered(self, link: Link, output: bytes) -> None:
        self.replay(link)
        position = 0
        while position < len(output):
            if not link.todo:
                raise Violation("replies", f"{output[position:]!r} answers nothing")
            request = link.todo.popleft()
            size = self.judge(link, request, output[position:])
            reply = output[position : position + size]
            position += size
            self.seen[request.word, reply.split()[0].decode()] += 1
            self.claim_written(request, reply)
            link.marks.append((link.bytes_out + position, (request, reply)))

    def judge(self, link: Link, request: Request, output: bytes) -> int:
        """Bytes of the reply, which has to be right."""
        for reply in request.replies:
            if output.startswith(reply):
                return len(reply)
        if request.judge is not None:
            self.tells_figures = True
            return request.judge(output)
        words = output.split()
        what = f"connection {link.number}, {request.command}: {output[:80]!r}, and not {request.replies}"
        if words[0] == b"JOBS":
            words = words[2:]
        if words[0] == b"RESERVED":
            raise self.blame(link, request, int(words[1]), what)
        if words[0] == b"INSERTED" and int(words[1]) <= self.newest:
            raise Violation("ids", what)
        if b"DEADLINE_SOON\r\n" in (*request.replies, output[:15]):
            raise Violation("deadline soon", what)
        raise Violation("replies", what)

    def blame(self, link: Link, request: Request, number: int, what: str) -> Violation:
        """Which promise is broken if that job is given out instead."""
        job = self.books.jobs.get(number)
        holder = self.links.get(job.holder) if job is not None else None
        if holder is link and any(b"RESERVED " in reply for reply in request.replies):
            return Violation("priority", what)
        if holder is not None and holder.books.asking in holder.todo and link.books.waits:
            return Violation("turn", f"{what}, as connection {holder.number} waited longer")
        return Violation(*self.books.blame(number, what))

    def claim_written(self, request: Request, reply: bytes) -> None:
        """What was promised is on the disk."""
        if self.disk is None or reply == b"INTERNAL_ERROR\r\n":
            return
        for name, version in request.acks:
            if self.disk.version(name) not in self.history[name][version:]:
                raise Violation("durable", f"{request.command} was answered {reply!r}, and {name} is not on disk")
            self.floor[name] = max(self.floor.get(name, 0), version)

    def delivered(self, link: Link, answer: tuple[Request, bytes]) -> None:
        _, reply = answer
        for line in reply.split(b"\r\n"):
            if line.startswith(b"RESERVED ") and len(line.split()) == 3:
                link.books.mine.append(int(line.split()[1]))

    def left(self, link: Link) -> None:
        self.books.now = self.now
        self.books.left(link.number)

    # ---- time ----

    def tick(self) -> None:
        """At a moment at which everything that is due has to be done, and nothing else."""
        began = self.now // TICK * TICK
        if any(began < due <= self.now for due in self.books.dues()):
            self.now = began + TICK
        self.store.tick(self.now)
        self.listed = False
        self.ticked = self.now
        self.books.now, self.books.open = self.now, self.store.sessions_open
        self.books.tick()
        self.hand_out()
        self.step("tick", None)

    def ask(self, line: str) -> bytes:
        """By the world's own connection, which changes nothing."""
        output: bytes = self.observer.receive(line.encode() + b"\r\n", self.now)
        while self.observer.more:
            output += self.observer.take_output(self.now)
        return output

    def ask_job(self, number: int) -> dict[str, str] | None:
        reply = self.ask(f"stats-job {number}")
        return wire.read_dictionary(body_of(reply)) if reply.startswith(b"OK") else None

    def reserved_by(self, number: int) -> set[int]:
        walk = RESERVED.open(self.store, {"connection": str(self.links[number].session.number)})
        while not walk.step():
            pass
        return {int(row[0]) for row in walk.rows()}

    # ---- the journal, and its end ----

    def on_take(self, size: int) -> None:
        """Records of jobs that have ended are free, those that were told of."""
        freed, rest = divmod(self.books.memory() - self.store.snapshot()["used_memory"], 136)
        if rest or not 0 <= freed <= self.books.ended:
            raise Violation("memory", f"{freed} records of {self.books.ended} were freed, and {rest} bytes")
        self.books.ended -= freed
        self.step("take", None, size)

    def on_reach(self) -> None:
        self.books.is_failing = False
        self.step("reach", None)

    def on_fill(self) -> None:
        """Puts whose replies wait are refused, and their jobs gone, unless somebody was given them."""
        self.books.is_full = True
        self.refuse_puts()
        self.step("fill", None)

    def on_room(self) -> None:
        self.books.is_full = False
        self.step("room", None)

    def on_refuse(self) -> None:
        """The same, and of nothing else it may be said that it was done, unless it is on disk."""
        self.books.is_failing = True
        for link in self.links.values():
            for request in link.todo:
                if request.word == "touch":
                    request.acks.clear()
                elif request.word in PROMISED and request.replies:
                    request.replies += (b"INTERNAL_ERROR\r\n",)
        self.refuse_puts()
        self.step("refuse", None)

    def refuse_puts(self) -> None:
        books = self.books
        books.now = self.now
        for link in self.links.values():
            for request in link.todo:
                job: Any = books.jobs.get(request.id)
                exists = bool(request.replies) and request.replies[0].startswith(b"EXISTS")
                if exists or (job is not None and job.counts["reserves"]):
                    request.replies += (b"INTERNAL_ERROR\r\n",)
                elif job is not None and self.ask_job(request.id) is None:
                    request.replies = (b"INTERNAL_ERROR\r\n",)
                    if job.key:
                        del books.keys[job.key]
                        job.key, job.keep = "", 0
                    books.end(job)
        books.settle_tubes()
        self.settle_versions()

    def crash(self, _: None = None) -> None:
        """The daemon is killed, and another one is started."""
        self.crashes += 1
        self.life += 1
        for link in list(self.links.values()):
            link.dead = link.gone = True
            link.session.owner = None
            link.session = None
        self.links.clear()
        self.waiting.clear()
        self.turn_at = -1
        if self.disk is not None:
            self.claim_kept(self.disk)
        self.now += self.random.randrange(3 * SECOND)
        self.begin()
        self.step("crash", None)
        for _ in range(self.crowd if self.open else 0):
            self.push(self.delay(), self.connect, None)

    def claim_kept(self, disk: Disk) -> None:
        """What is on the disk is what was answered, or what was done later."""
        kept = {**disk.jobs(), **disk.limits()}
        for name in [*self.history, *(name for name in kept if name not in self.history)]:
            versions = self.history.get(name, [None])
            version = kept.get(name)
            if version not in versions[self.floor.get(name, 0) :]:
                lost = "durable" if version in versions else "torn"
                raise Violation(lost, f"of {name}, {version} is on disk, and answered was one of {versions}")
        keys = disk.keys()
        for name, (number, until) in self.books.keys.items():
            ended = self.history.get(number, [None])[self.floor.get(number, 0) :] == [None]
            is_kept = self.now < until < FOREVER
            if self.sync == "always" and ended and is_kept and keys.get(name) != (number, until):
                raise Violation("durable", f"key {name} is taken by job {number}, and {keys.get(name)} is on disk")

    # ---- what has to hold ----

    def check(self) -> int:
        store, books = self.store, self.books
        books.now, books.open = self.now, store.sessions_open
        due: int = store.next_deadline()
        figures = store.snapshot()
        told = {
            name: figures[name]
            for name in ("jobs", "waiting", "tubes", "keys", "used_memory", "journal_failing", "journal_full")
        }
        for state in ("ready", "reserved", "delayed", "buried"):
            told[state] = figures[f"jobs:{state}"]
        known = {
            "jobs": len(books.jobs), "waiting": len(books.waiting()), "tubes": len(books.tubes),
            "keys": len(books.keys), "used_memory": books.memory(), "journal_failing": books.is_failing,
            "journal_full": books.is_full,
            **{state: books.count_state(state) for state in ("ready", "reserved", "delayed", "buried")},
        }  # fmt: skip
        self.listed = self.listed or any(peer.lists is not None for peer in books.peers.values())
        if told != known and not self.listed:
            self.compare()
            name = "waits" if told["waiting"] != known["waiting"] else "books"
            raise Violation(name, f"the engine's figures are {told}, and the books' {known}")
        if self.steps % COMPARED_EVERY == 0:
            self.compare()
        self.check_due(due)
        return due

    def check_due(self, due: int) -> None:
        """The engine wants its turn in time."""
        books = self.books
        next_due = min((moment for moment in books.dues() if moment > self.ticked), default=None)
        if books.leaving or (books.is_draining and books.waiting()):
            next_due = self.now
        if next_due is not None and (due == -1 or due > max(next_due + TICK, self.now)):
            raise Violation("late", f"something is due at {next_due}, and the engine waits until {due}")

    def compare(self) -> None:
        """Job by job."""
        for name in list(self.books.tubes):
            reply = self.ask(f"list-jobs {name} all 0 1000")
            told = {int(job["id"]): job for job in wire.read_jobs(body_of(reply))}
            for job in self.books.jobs.values():
                if job.tube == name and job.number not in told:
                    raise Violation("lost", f"job {job.number} of {name} is not there")
            for number, figures in told.items():
                known = self.books.jobs.get(number)
                if known is None:
                    raise Violation("gone", f"job {number} is there, and has ended")
                if known.state in ("delayed", "reserved") and known.state != figures["state"]:
                    raise Violation("early", f"job {number} is {figures['state']}, {known.due - self.now} ns early")
                if self.retires and known.state != figures["state"] and "buried" in (known.state, figures["state"]):
                    raise Violation("retired", f"job {number} is {figures['state']}, and should be {known.state}")
                if known.since == self.ticked and known.state != figures["state"]:
                    raise Violation("late", f"job {number} is {figures['state']}, and should be {known.state}")
                claim_job(figures, self.figures_of(number))

    def claim_answered(self) -> None:
        for link in self.links.values():
            waits = link.books.waits and link.todo and link.todo[0] is link.books.asking
            if (link.todo and not waits) or link.marks:
                raise Violation("progress", f"connection {link.number} waits for {len(link.todo)} answers, for ever")
        if self.waiting:
            raise Violation("progress", f"{len(self.waiting)} connections wait for a turn, for ever")

    # ---- from outside ----

    def meddle(self) -> None:
        draw = self.random.random()
        if self.disk is not None and draw < 0.5:
            self.disk.mood = self.random.choice(MOODS)
        elif draw < 0.7:
            self.books.refuses_puts = self.random.random() < 0.3
            self.store.refuse_puts(self.books.refuses_puts)
            self.step("refuse puts", None)
        elif draw < 0.9:
            self.crash()
        elif draw < 0.95:
            self.books.is_draining = True
            self.store.begin_drain()
            self.push(self.random.randrange(5 * SECOND), self.if_alive, (self.life, self.crash))
            self.step("drain", None)

    def emptied(self) -> None:
        """Whatever is left can be deleted, and then nothing is."""
        if self.store.sessions_dropped:
            raise Violation("replies", f"{self.store.sessions_dropped} connections were dropped")
        if self.disk is not None:
            self.disk.mood = "fine"
        self.books.refuses_puts = False
        self.store.refuse_puts(False)
        self.drain(self.steps + 10_000)
        if self.disk is not None and (self.disk.is_failing or self.store.snapshot()["journal_behind"]):
            raise Violation("progress", "the disk is fine, and the journal is not")
        while self.books.jobs:  # a crash may come in between
            self.clean(self.admit(self.store.session(self.now)))

    def clean(self, link: Link) -> None:
        """Deletes all jobs."""
        for number in list(self.books.jobs):
            request = Request(f"delete {number}")
            link.todo.append(request)
            link.books.sent.append(request)
            self.took("receive", link, link.session.receive(f"delete {number}\r\n".encode(), self.now))
        self.drain(self.steps + 10_000)
        if not link.dead and (self.books.jobs or link.todo):
            raise Violation("empty", f"{len(self.books.jobs)} jobs are left, and {len(link.todo)} answers")
        self.lost(link)
        self.drain(self.steps + 10_000)


def body_of(reply: bytes) -> bytes:
    head, _, rest = reply.partition(b"\r\n")
    return rest[: int(head.split()[1])]


def claim_list(output: bytes) -> int:
    """Bytes of a list."""
    head, _, _ = output.partition(b"\r\n")
    if not head.startswith(b"OK "):
        raise Violation("replies", f"{head!r} is no list")
    return len(head) + 2 + int(head.split()[1]) + 2


def claim_job(told: dict[str, str], known: dict[str, str]) -> None:
    for name, value in known.items():
        if told[name] != value:
            raise Violation("job", f"{name} of job {known['id']} is {told[name]}, and not {value}")
