"""Sessions of the beanstalk protocol agree with the dict model; with a journal, written jobs are restored unchanged.

The first byte of the input selects one of the two. For the first, the rest is what the property test draws its
histories from (beanstalk_both.py), with commands cut anywhere. For the second, it is operations: of connections,
which send well-formed commands or raw bytes, and check only the form of replies; of the clock; and of the disk,
which writes pieces, fails, and from which another store is restored. The store is audited after each restart, and
at the end."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from counterd.protocols.beanstalk import wire
from fuzz.stream import Source, fenced
from kit.journaled import Journaled
from kit.pump import START_NS, UNIX_NS
from property.beanstalk_both import TICK, Both, Tied, step

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kit.pump import Peer

PEERS_MAX = 4
OPERATIONS_MAX = 150
JOB_MAX = 300
PERIODS_NS = (-1, 5_000_000)
PAUSE_NS = 6 * TICK  # after which another piece is due
DISK_STEPS = 20  # more than pieces can be
TUBES = (b"default", b"a", b"t" * 60)
KEYS = (b"k", b"l", b"k" * 60)
COUNTERS = (b"c", b"c" * 60)
SIZES = (0, 1, 60, 61, JOB_MAX, JOB_MAX + 1)
NUMBERS = (0, 1, 2, 5, 1023, 1024, (1 << 31) - 1, (1 << 32) - 1)
SECONDS = (0, 0, 0, 1, 2, 100, (1 << 31) - 1, (1 << 32) - 1)
STEPS_NS = (0, 1, TICK, 10**6, 10**9, 2 * 10**9, 60 * 10**9, 10**14, 3 * 10**18)
SKEWS_NS = (-(10**18), -10 * 10**9, 10 * 10**9, 10**18)
END_NS = 4 * 10**18  # of the clock, so that what is 2^32 seconds later is a time yet

TOKENS = [
    wire.put(b"x"), wire.put_unique(b"x", b"k", 1), wire.put_limited(b"x", b"c", 1), wire.reserve(), wire.reserve(1),
    wire.batch_reserve(3, 1),
    wire.limit_reserves(b"a", 1, b"b"), wire.list_jobs(b"default"), wire.list_jobs(b"default", needle=b"x"),
    wire.release(1, 2, 3), wire.bury(1), wire.clear_tube(b"default"), wire.stats(), b"\r\n",
]  # fmt: skip


class Drawn(Source):
    """An input as the source of a random history."""

    def random(self) -> float:
        return self.byte() / 256

    def randrange(self, end: int, /) -> int:
        return self.byte() % end

    def randbytes(self, size: int, /) -> bytes:
        return bytes([self.byte()]) * size


class CutBoth(Both):
    """The store and the model, with commands that are cut, and only one audit at the end, as audits take most of the
    time.
    """

    def __init__(self, source: Drawn) -> None:
        super().__init__()
        self.source = source

    def pieces(self, data: bytes) -> Iterable[bytes]:
        return map(fenced, self.source.pieces(data))

    def audit(self) -> None:
        pass


class Parsed:
    """A connection, and the parser of its replies. waits: the unsent bytes of a put."""

    def __init__(self, peer: Peer) -> None:
        self.peer = peer
        self.parser = wire.Parser(1 << 20)
        self.is_over = False

    def send(self, data: bytes) -> None:
        if not self.is_over:
            self.peer.send(fenced(data))
        self.hear()

    def hear(self) -> None:
        self.parser.feed(bytes(self.peer.output))
        self.peer.output.clear()
        assert not self.parser.is_within
        self.is_over = self.is_over or self.peer.session.closing


class Kept:
    """A store with a journal, which borrows permits, and its connections."""

    def __init__(self, kind: int) -> None:
        self.kept = Journaled(
            lends=True, job_size_max=JOB_MAX, journal_period_ns=PERIODS_NS[kind >> 1 & 1], memory_limit=1 << 17,
            tube_jobs_max=8 if kind & 4 else 100,
        )  # fmt: skip
        self.skewed = False
        self.peers: dict[int, Parsed] = {}

    def peer(self, number: int) -> Parsed:
        if number not in self.peers or self.peers[number].is_over:
            self.drop(number)
            self.peers[number] = Parsed(self.kept.connect())
        return self.peers[number]

    def drop(self, number: int) -> None:
        if number in self.peers:
            self.peers.pop(number).peer.close()

    def raw(self, number: int, source: Source) -> None:
        self.peer(number).send(source.take(source.byte() % 64))

    def command(self, number: int, source: Source) -> None:
        data = command(source)
        for piece in source.pieces(data):
            self.peer(number).send(piece)

    def advance(self, _number: int, source: Source) -> None:
        bench = self.kept.bench
        bench.advance(min(source.choice(STEPS_NS), max(0, END_NS - bench.now_ns)))

    def leave(self, number: int, source: Source) -> None:
        peer = self.peer(number)
        if source.byte() & 1:
            self.drop(number)
        elif not peer.is_over:
            peer.peer.half_close()

    def refuse_puts(self, _number: int, source: Source) -> None:
        self.kept.bench.store.refuse_puts(bool(source.byte() & 1))

    def write(self, number: int, _source: Source) -> None:
        """One step of the disk."""
        if not self.kept.take():
            return
        if number & 1:
            self.kept.write()
        if number & 2:
            self.kept.write()
            self.kept.reach()

    def refuse(self, _number: int, _source: Source) -> None:
        if self.kept.take():
            self.kept.refuse()

    def skew(self, _number: int, source: Source) -> None:
        """Sets the wall clock."""
        now_ns = self.kept.bench.now_ns
        self.kept.bench.store.set_wall(UNIX_NS + now_ns - START_NS + source.choice(SKEWS_NS), now_ns)
        self.skewed = True

    def crash(self, _number: int, _source: Source) -> None:
        """Starts another store from what is on disk."""
        self.peers.clear()
        self.kept.crash()

    def restart(self, _number: int, _source: Source) -> None:
        """Writes everything, and starts another store, which must have the same jobs."""
        bench = self.kept.bench
        self.peers.clear()
        for _ in range(DISK_STEPS):
            bench.advance(PAUSE_NS - bench.now_ns % TICK)
            self.kept.commit()
            if bench.store.snapshot()["journal_behind"] == 0:
                break
        before = self.told()
        self.kept.crash()
        after = self.told()
        assert self.skewed or before == after, (before, after)

    def told(self) -> list[Any]:
        """Everything about all jobs, and the limits."""
        peer = self.kept.connect()
        parser = wire.Parser()

        def ask(command: bytes) -> wire.Reply:
            peer.send(command)
            (reply,) = parser.feed(bytes(peer.output))
            peer.output.clear()
            return reply

        found: list[Any] = [self.kept.bench.store.snapshot()["keys"]]
        for name in sorted(wire.read_list(ask(wire.list_tubes()).body)):
            figures = wire.read_dictionary(ask(wire.inspect_tube(name)).body)
            jobs = wire.read_jobs(ask(wire.list_jobs(name, count=1000)).body)
            for job in jobs:
                job.pop("blocked", None)  # whoever reserves next finds out
            if jobs or figures["max-reserves"] != "0":
                found.append((name, figures["max-reserves"], figures["retire-to"], jobs))
        peer.close()
        return found

    def end(self) -> None:
        for number in list(self.peers):
            self.drop(number)
        self.kept.bench.settle()
        self.kept.bench.store.audit()
        assert self.kept.permits.lent.total() == self.kept.bench.store.snapshot()["permits"]


def command(source: Source) -> bytes:
    """A command that is well formed."""
    number, name = source.byte() % 12, source.choice(TUBES)
    pri, seconds = source.choice(NUMBERS), source.choice(SECONDS)
    body = bytes([number]) * source.choice(SIZES)
    wait, few = min(seconds, wire.TIMEOUT_MAX), pri & 7
    asked = (
        lambda: wire.put(body, pri, seconds, few), lambda: wire.put(body, pri, 0, few),
        lambda: wire.put_unique(body, source.choice(KEYS), wait, priority=pri, ttr=few),
        lambda: wire.put_limited(body, source.choice(COUNTERS), 1 + few % 2, priority=pri, ttr=few),
        wire.reserve, lambda: wire.reserve(wait), lambda: wire.batch_reserve(few + 1, wait),
        lambda: wire.reserve_job(number), lambda: wire.delete(number), lambda: wire.release(number, pri, seconds),
        lambda: wire.bury(number, pri), lambda: wire.touch(number), lambda: wire.kick(few),
        lambda: wire.kick_job(number), lambda: wire.use(name), lambda: wire.watch(name), lambda: wire.ignore(name),
        lambda: wire.pause_tube(name, seconds), lambda: wire.clear_tube(name),
        lambda: wire.limit_reserves(name, few, source.choice(TUBES)), lambda: wire.list_jobs(name, needle=body[:2]),
        lambda: wire.stats_job(number), lambda: wire.stats_tube(name),
        lambda: wire.inspect_tube(name), wire.stats, wire.list_tubes, wire.quit,
    )  # fmt: skip
    return source.choice(asked)()


OPERATIONS = (
    "command", "command", "command", "command", "command", "command", "advance", "raw", "leave", "write", "write",
    "refuse", "skew", "crash", "restart", "refuse_puts",
)  # fmt: skip


def one_input(data: bytes) -> None:
    source = Drawn(data)
    kind = source.byte()
    if kind & 1:
        both = CutBoth(source)
        with contextlib.suppress(Tied):
            for _ in range(OPERATIONS_MAX):
                if not source:
                    break
                step(source, both)
        both.store.audit()
        return
    rig = Kept(kind)
    for _ in range(OPERATIONS_MAX):
        if not source:
            break
        operation = source.byte()
        getattr(rig, OPERATIONS[operation & 15])(operation >> 4 & 3, source)
    rig.end()
