"""A store of the beanstalk protocol and the dict model, side by side: given the same commands, and the same time."""

from __future__ import annotations

import ast
import os
import re
from collections import defaultdict
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from counterd.protocols.beanstalk._session import open_store
from property.beanstalk_model import BODY_MAX, FOREVER, SECOND, STATES, WITH_BODY, Model

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

T = TypeVar("T")

TICK = 1 << 20  # of the wheel: what is due is done when the next one begins
START = 5000 * TICK
PAUSE = 4 * TICK  # between most commands, so that few things are due in the same tick
PEERS = range(4)
NAMES = ("default", "a", "a-tube-with-a-name-that-is-longer-than-what-its-record-has-room-for")
PRIORITIES = (0, 1, 1023, 1024, 2**32 - 1)
KEYS = ("k", "a-key", "a-key-with-a-name-that-is-longer-than-what-its-record-has-room-for")
KEEPS = (0, 0, 1, 5)
DELAYS = (0, 0, 0, 0, 1, 2)
SIZES = (0, 1, 60, 61, BODY_MAX, BODY_MAX + 1)
WITHOUT_ARGUMENTS = (
    "peek-ready", "peek-delayed", "peek-buried", "list-tubes", "list-tube-used", "list-tubes-watched",
)  # fmt: skip


class Tied(Exception):
    """Two things of tubes, or two of workers, are due in the same tick: which comes first is nobody's business."""


class Generator(Protocol):
    """What a history is made of: a random.Random, or an input of a fuzzer."""

    def random(self) -> float: ...
    def randrange(self, end: int, /) -> int: ...
    def randbytes(self, size: int, /) -> bytes: ...
    def choice(self, options: Sequence[T], /) -> T: ...


class Both:
    """A store and a model, side by side."""

    def __init__(self) -> None:
        self.now = START
        self.puts = 0
        self.store: Any = open_store(
            memory_limit=1 << 20, job_size_max=BODY_MAX, tubes=20, tube_jobs_max=8, figures=dict, host={},
            journal_period_ns=0, journal_lag_ns=-1, hash_key=os.urandom(16), now_ns=START,
        )  # fmt: skip
        self.model = Model(tube_jobs_max=8)
        self.model.now = START
        self.sessions: dict[int, Any] = {}
        self.output: dict[int, bytes] = defaultdict(bytes)

    # ---- what happens ----

    def connect(self, number: int) -> None:
        self.sessions[number] = self.store.session(self.now)
        self.model.connect(number)

    def ask(self, number: int, command: str, body: bytes) -> None:
        line = command.encode() + b"\r\n"
        end = b"\r\n" * (command.partition(" ")[0] in WITH_BODY)
        for piece in self.pieces(line + body + end):
            self.output[number] += self.sessions[number].receive(piece, self.now)
        self.collect([self.sessions[number]])
        self.model.ask(number, command, body)
        self.compare()
        if not command.startswith("reserve-with-timeout"):  # a job can become ready at the moment at which it ends
            self.let_pass(PAUSE)

    def pieces(self, data: bytes) -> Iterable[bytes]:
        """What a command comes in."""
        return (data,)

    def half_close(self, number: int) -> None:
        """Of one that waits, and has asked nothing more."""
        self.output[number] += self.sessions[number].eof(self.now)
        self.model.half_close(number)
        self.model.close(number)  # nothing is asked any more: what it held comes back
        self.compare()
        session = self.sessions.pop(number)
        assert session.closing
        session.closed(self.now)

    def drop(self, number: int) -> None:
        self.sessions.pop(number).closed(self.now)
        self.model.close(number)
        self.compare()

    def refuse_puts(self, refused: bool) -> None:
        self.store.refuse_puts(refused)
        self.model.refuses_puts = refused

    def let_pass(self, ns: int) -> None:
        """Lets time go by, from one thing that is due to the next."""
        end = self.now + ns
        while self.now < end:
            due = self.model.next_due()
            self.now = min(end, max(-(-due // TICK) * TICK, self.now + TICK)) if due < FOREVER else end
            for dues in (self.model.dues_of_tubes(), self.model.dues_of_workers()):
                if sum(self.now - TICK < each <= self.now for each in dues) > 1:
                    raise Tied
            self.model.advance(self.now)
            self.compare()

    def audit(self) -> None:
        self.store.audit()

    # ---- inside ----

    def work(self) -> None:
        """All that is due by now. Connections that were woken go on in that order, as in the model."""
        while (woken := self.store.take_dirty()) or 0 <= self.store.next_deadline() <= self.now:
            if woken:
                self.collect(woken)
            else:
                self.store.tick(self.now)

    def collect(self, sessions: Iterable[Any]) -> None:
        numbers = {session: number for number, session in self.sessions.items()}
        for session in sessions:
            while session.more:
                self.output[numbers.get(session, -1)] += session.take_output(self.now)

    def compare(self) -> None:
        self.work()
        expected: dict[int, list[bytes]] = defaultdict(list)
        for number, reply in self.model.replies:
            expected[number].append(reply)
        self.model.replies.clear()
        for number in self.sessions:
            output = self.output.pop(number, b"")
            for reply in expected.pop(number, []):
                head = re.match(rb"(?:OK|RESERVED \d+|FOUND \d+) (\d+)\r\n", output)
                size = head.end() + int(head[1]) + 2 if head else output.find(b"\r\n") + 2
                assert told(output[:size], reply) == reply
                output = output[size:]
            assert output == b""
        assert not expected
        self.audit()
        figures = self.store.snapshot()
        for state in ("ready", "reserved", "delayed", "buried"):
            assert figures[f"jobs:{state}"] == sum(job.state == state for job in self.model.jobs.values())
        assert figures["tubes"] == len(self.model.tubes)
        assert figures["keys"] == len(self.model.keys)
        assert figures["retired"] == self.model.retired


def told(reply: bytes, expected: bytes) -> bytes:
    """A reply; of statistics and of lists of jobs, those figures that the model has, as it writes them."""
    if not reply.startswith(b"OK ") or expected.startswith(b"OK "):
        return reply
    wanted = ast.literal_eval(expected.decode())
    if isinstance(wanted, dict):
        return repr(figures_told(reply.decode().split("\n")[2:-1], wanted)).encode()
    jobs = reply.decode().split("\n- ")[1:]
    assert len(jobs) == len(wanted), reply
    return repr([figures_told(job.split("\n"), each) for job, each in zip(jobs, wanted, strict=True)]).encode()


def figures_told(lines: list[str], wanted: dict[str, Any]) -> dict[str, Any]:
    figures = dict(line.strip().split(": ") for line in lines if line.strip())
    assert figures.keys() >= wanted.keys()
    assert ("key" in figures) == ("key" in wanted)
    return {name: type(value)(figures[name]) for name, value in wanted.items()}


def command(generator: Generator, both: Both, number: int) -> tuple[str, bytes]:
    """Something to ask, mostly about jobs that there are."""
    jobs = both.model.jobs.values()
    ids = [job.number for job in jobs] or [1]
    own = [job.number for job in jobs if job.holder == number]
    job = generator.choice(own if own and generator.random() < 0.7 else [*ids, 10**19])
    priority, name = generator.choice(PRIORITIES), generator.choice(NAMES)
    delay, few = generator.choice(DELAYS), generator.randrange(4)
    kind = generator.randrange(29)
    if kind < 6:
        # Jobs that were reserved at the same moment neither time out nor come into their last second together.
        both.puts += 1
        body = generator.randbytes(generator.choice(SIZES))
        arguments = f"{priority} {delay} {2 * (both.puts % 30 + 1)} {len(body)}"
        if generator.random() < 0.6:
            return f"put {arguments}", body
        return f"put-unique {arguments} {generator.choice(KEYS)} {generator.choice(KEEPS)}", body
    state, first = generator.choice((*STATES, "all", "all")), generator.choice((0, job))
    if kind == 6:
        needle = generator.randbytes(generator.choice((0, 1, 1, 2)))
        return f"search-jobs {name} {state} {first} {few * 3} {len(needle)}", needle
    asked = (
        "reserve", "reserve", "reserve", f"reserve-with-timeout {few}", f"reserve-with-timeout {few}",
        f"release {job} {priority} {delay}", f"bury {job} {priority}", f"delete {job}", f"touch {job}", f"kick {few}",
        f"{generator.choice(('kick-job', 'reserve-job', 'peek', 'stats-job'))} {job}", f"watch {name}",
        f"ignore {name}", f"use {name}",
        f"pause-tube {name} {few}", f"{generator.choice(('stats-tube', 'inspect-tube'))} {name}",
        generator.choice(WITHOUT_ARGUMENTS), generator.choice(WITHOUT_ARGUMENTS), f"batch-reserve {few} {few}",
        f"limit-reserves {name} {few} {generator.choice(NAMES)}", f"list-jobs {name} {state} {first} {few * 3}",
        f"clear-tube {name} {state}" if generator.random() < 0.2 else f"stats-job {job}",
    )  # fmt: skip
    return asked[kind - 7], b""


def step(generator: Generator, both: Both) -> None:
    """Something happens. Raises Tied where the history cannot be told further."""
    number = generator.choice(PEERS)
    if number not in both.sessions:
        both.connect(number)
    peer = both.model.peers[number]
    chance = generator.random()
    if chance < 0.83:
        if not peer.waits or generator.random() < 0.2:
            both.ask(number, *command(generator, both, number))
    elif chance < 0.95:
        both.let_pass(int(generator.choice((0.1, 0.5, 1, 2)) * SECOND) // TICK * TICK)
    elif chance < 0.97:
        both.drop(number)
    elif chance < 0.99:
        if peer.waits and not peer.asked:
            both.half_close(number)
    else:
        both.refuse_puts(generator.random() < 0.3)
