"""The table in docs/internals/replies.md: how much memory a connection takes that asks and never reads.

Each request is asked with the longest reply that it can have here, 256 KiB of requests at a time as net reads them, by
several connections. Their output is kept, as net keeps what the kernel does not take.
"""

from __future__ import annotations

import re
import tracemalloc
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest

from conformance.beanstalk.engine import make_store as make_beanstalk
from conformance.sentinel.engine import make_store as make_sentinel
from conformance.smockron.engine import make_store as make_smockron
from conformance.throttr.engine import make_store as make_throttr
from counterd.net.poller import READ_MAX
from counterd.protocols.beanstalk import wire as beanstalk
from counterd.protocols.counter import wire as counter
from counterd.protocols.sentinel import wire as sentinel
from counterd.protocols.smockron import wire as smockron
from counterd.protocols.throttr import wire as throttr
from kit.counters import make_store as make_counter
from kit.pump import START_NS, UNIX_NS

if TYPE_CHECKING:
    from collections.abc import Callable

PAGE = Path(__file__).parents[2] / "docs" / "internals" / "replies.md"
MS = 1_000_000
SESSIONS = 2
# How often a connection reads another piece: a long reply is not read to its end.
TURNS = {"pieces": 60, "whole": 60}
OVERDRAFT = 4_500  # steps: a call may begin a request with its last step, and a watch looks at 4,095 tubes
MAXIMA = {"throttr.max_message": 1 << 16, "beanstalk.max_job_size": 65535, "smockron.max_queued": 1 << 20}


class Row(NamedTuple):
    protocol: str
    request: str
    made: str
    kept: int


def rows() -> list[Row]:
    found = []
    for line in PAGE.read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 5 and (kept := re.match(r"\d+", cells[4])):
            more = sum(MAXIMA[setting] for setting in re.findall(r"`([a-z._]+)`", cells[4]))
            found += [Row(cells[0], each.strip(), cells[2], int(kept[0]) * 1000 + more) for each in cells[1].split(",")]
    return found


ROWS = rows()


class Asking:
    """A store and its clock, and the setup of a row: what the connections ask before."""

    def __init__(self, store: Any) -> None:
        self.store = store
        self.now = START_NS
        store.set_wall(UNIX_NS, START_NS)
        self.first = b""
        self.fillers: list[Any] = []

    def turn(self) -> None:
        self.now += MS
        if 0 <= self.store.next_deadline() <= self.now:
            self.store.tick(self.now)

    def take(self, session: Any, output: bytes) -> bytes:
        assert self.store.budget > -OVERDRAFT
        self.turn()
        return output

    def filler(self) -> Any:
        """A connection that stays open."""
        self.fillers.append(self.store.session(self.now))
        return self.fillers[-1]

    def session(self) -> Any:
        session = self.store.session(self.now)
        self.all(session, self.first)
        return session

    def all(self, session: Any, requests: bytes) -> bytes:
        output = [self.take(session, session.receive(bytes(requests), self.now))]
        while session.more:
            output.append(self.take(session, session.take_output(self.now)))
        return b"".join(output)


# ---- what is asked ---------------------------------------------------------------------------------------------------

NAME = b"n" * 65535


def of_counter(request: str) -> tuple[Asking, bytes]:
    asking = Asking(make_counter(64, 64, name_memory=1 << 23, now_ns=START_NS))
    item = counter.Permit(b"p" * 200, 1, 1)
    if request == "DUMP":
        filler = asking.filler()
        for number in range(20):
            asking.all(filler, counter.acquire(1, b"%d" % number + NAME[:65533], 1, 1))
    return asking, {
        "NOOP": counter.noop(1), "GET": counter.get(1, b"a"), "ACQUIRE": counter.acquire(1, b"a", 1, 1),
        "RELEASE": counter.release(1, b"a", 1), "STATS": counter.stats(1), "DUMP": counter.dump(1, limits=True),
        "TAKE": counter.take(1, [item] * 16), "CANCEL": counter.cancel(1, 1),
        "SETTLE": counter.settle(1, 1, b"a", 0), "RESUME": counter.resume(1, 1), "GOODBYE": counter.goodbye(1),
        "WHO": counter.who(1, "w" * 64), "HELD": counter.held(1, b"a"),
    }[request]  # fmt: skip


def of_throttr(request: str) -> tuple[Asking, bytes]:
    asking = Asking(make_throttr(memory_limit=1 << 24, max_message=MAXIMA["throttr.max_message"]))
    ask = throttr.Encoder(throttr.ValueSize.UINT16)
    filler = asking.filler()
    if request == "GET":
        asking.all(filler, ask.set(b"k", b"v" * 65000, 60))
    elif request in ("LIST", "STATS"):
        asking.all(filler, b"".join(ask.insert(b"%d-" % number + b"k" * 200, 1, 60) for number in range(3000)))
    elif request in ("CHANNELS", "CHANNEL"):
        names = (b"c" if request == "CHANNEL" else b"%d-" % number + b"c" * 200 for number in range(3000))
        asking.all(filler, b"".join(map(ask.subscribe, names)))
    elif request == "CONNECTIONS":
        asking.fillers += [asking.store.session(asking.now) for _ in range(2000)]
    key, channel = b"k", b"c"
    asked = {
        "INSERT": ask.insert(key, 1, 60), "QUERY": ask.query(key), "UPDATE": ask.update(key, 0, 0, 1),
        "PURGE": ask.purge(key), "SET": ask.set(key, b"v", 60), "GET": ask.get(key), "LIST": ask.list(),
        "INFO": ask.info(), "STAT": ask.stat(key), "STATS": ask.stats(), "SUBSCRIBE": ask.subscribe(channel),
        "UNSUBSCRIBE": ask.unsubscribe(channel), "PUBLISH": ask.publish(channel, b"p"),
        "CONNECTIONS": ask.connections(), "CONNECTION": ask.connection(bytes(16)), "CHANNELS": ask.channels(),
        "CHANNEL": ask.channel(channel), "WHOAMI": ask.whoami(), "EVENT": ask.event(channel, ask.info()),
    }  # fmt: skip
    return asking, bytes(asked[request])


def of_sentinel(request: str) -> tuple[Asking, bytes]:
    asking = Asking(make_sentinel())
    return asking, {
        "PING": sentinel.ping(1, b"default"), "FLOW": sentinel.flow(1, 1, 1),
        "PARAM": sentinel.param_flow(1, 1, 1, ["v"]), "ACQUIRE": sentinel.acquire(1, 1, 1),
        "RELEASE": sentinel.release(1, 1), "KEEP": sentinel.keep(1, 1),
    }[request]  # fmt: skip


def of_beanstalk(request: str) -> tuple[Asking, bytes]:
    asking = Asking(make_beanstalk(memory_limit=1 << 25, tubes=7000))
    long, key, body = b"t" * 200, b"k" * 150, b"b" * 65535
    filler = asking.filler()
    if request == "list-tubes":
        for first in (0, 3000):
            names = (b"%d-" % number + long[:190] for number in range(first, first + 3000))
            asking.all(asking.filler(), b"".join(map(beanstalk.watch, names)))
    elif request == "list-tubes-watched":
        asking.first = b"".join(beanstalk.watch(b"%d-" % number + long[:190]) for number in range(4000))
    elif request in ("list-jobs", "search-jobs"):
        long = long[:197] if request == "search-jobs" else long  # a line has at most 224 bytes
        puts = (beanstalk.put_unique(b"b", b"%d-" % number + key, priority=1 << 31) for number in range(1000))
        asking.all(filler, beanstalk.use(long) + b"".join(puts))
    elif request.startswith("peek") or "reserve" in request:
        asking.all(filler, beanstalk.put(body, ttr=1) * 20)
        asking.all(filler, beanstalk.put(body, delay=1000, ttr=1))
    reserve = beanstalk.reserve(0)
    asked = {
        "put": beanstalk.put(b""), "put-unique": beanstalk.put_unique(b"", key),
        "put-limited": beanstalk.put_limited(b"", key, 1), "use": beanstalk.use(long), "watch": beanstalk.watch(long),
        "ignore": beanstalk.ignore(long), "delete": beanstalk.delete(1), "release": beanstalk.release(1),
        "bury": beanstalk.bury(1), "touch": beanstalk.touch(1), "kick-job": beanstalk.kick_job(1),
        "pause-tube": beanstalk.pause_tube(long, 1), "limit-reserves": beanstalk.limit_reserves(long, 1, long),
        "list-tube-used": beanstalk.list_tube_used(), "quit": beanstalk.quit(), "kick": beanstalk.kick(1000),
        "clear-tube": beanstalk.clear_tube(b"default"), "stats": beanstalk.stats(),
        "stats-job": beanstalk.put(b"") + beanstalk.stats_job(1) * 1000,
        "stats-tube": beanstalk.use(long) + beanstalk.stats_tube(long) * 1000,
        "inspect-tube": beanstalk.use(long) + beanstalk.inspect_tube(long) * 1000, "peek": beanstalk.peek(1),
        "peek-ready": beanstalk.peek_next("ready"), "peek-delayed": beanstalk.peek_next("delayed"),
        "peek-buried": beanstalk.peek_next("ready") + beanstalk.peek_next("buried"), "reserve": reserve * 20,
        "reserve-with-timeout": reserve, "reserve-job": beanstalk.reserve_job(1) + beanstalk.release(1),
        "batch-reserve": beanstalk.batch_reserve(1000, 0), "list-tubes": beanstalk.list_tubes(),
        "list-tubes-watched": beanstalk.list_tubes_watched(), "list-jobs": beanstalk.list_jobs(long, count=1000),
        "search-jobs": beanstalk.list_jobs(long, count=1000, needle=b"b"),
    }  # fmt: skip
    return asking, asked[request]


def of_smockron(request: str) -> tuple[Asking, bytes]:
    asking = Asking(make_smockron(posted_max=MAXIMA["smockron.max_queued"]))
    opening = smockron.greeting() + smockron.ready(smockron.SocketType.PUB)
    asking.first = opening
    return asking, {
        "PING": smockron.ping(1, b"c" * 16), "SUBSCRIBE": smockron.subscribe(b"s" * 9),
        "CANCEL": smockron.cancel(b"s" * 9),
    }[request]  # fmt: skip


ASKED: dict[str, Callable[[str], tuple[Asking, bytes]]] = {
    "counter": of_counter, "throttr": of_throttr, "sentinel": of_sentinel, "beanstalk": of_beanstalk,
    "smockron": of_smockron,
}  # fmt: skip


# ---- the tests -------------------------------------------------------------------------------------------------------


def test_every_request_has_a_row() -> None:
    store = Asking(make_beanstalk())
    commands = re.findall(r"^cmd-(.*):", store.all(store.session(), beanstalk.stats()).decode(), re.MULTILINE)
    requests = {("beanstalk", each) for each in commands}
    requests |= {("counter", each.name) for each in counter.Opcode}
    requests |= {("throttr", each.name) for each in throttr.Opcode}
    requests |= {("sentinel", each.name) for each in sentinel.MessageType}
    requests |= {("smockron", each.name) for each in smockron.Word}
    told = [(row.protocol, row.request) for row in ROWS]
    assert len(told) == len(set(told))
    assert requests <= set(told)


# What others post is bounded in tests/unit/protocols/smockron/test_store.py: a session is dropped at posted_max.
ASKED_ROWS = [row for row in ROWS if row.made != "posted"]


@pytest.mark.parametrize("row", ASKED_ROWS, ids=lambda row: f"{row.protocol}-{row.request}")
def test_a_connection_that_does_not_read_takes_no_more_than_the_page_says(row: Row) -> None:
    asking, request = ASKED[row.protocol](row.request)
    flood = request * max(1, READ_MAX // len(request))
    sessions = [asking.session() for _ in range(SESSIONS)]
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        kept = [asking.take(session, session.receive(flood, asking.now)) for session in sessions]
        most = 0
        for _ in range(TURNS.get(row.made, 4)):  # until each of them has output that its peer does not take
            most = max(most, tracemalloc.get_traced_memory()[0] - before)
            waiting = [number for number, session in enumerate(sessions) if session.more]
            for number in waiting:
                kept[number] = b""  # the kernel has taken it
                kept[number] = asking.take(sessions[number], sessions[number].take_output(asking.now))
            if not waiting:
                break
        assert most <= row.kept * SESSIONS
    finally:
        tracemalloc.stop()
    asking.store.audit()
