"""Connections are opened and ended in every way, and leave nothing behind: objects, memory, or records in the
region.

The same for jobs, in a daemon with and without a journal. For connections, a net.Server on uvloop, or the
clients, run in the process of the tests. LEAK_CONNECTIONS=200000 in the environment makes it run for ten minutes;
nothing depends on how long it takes."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import functools
import gc
import itertools
import os
import re
import resource
import socket
import struct
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from conformance.beanstalk.engine import make_store as make_beanstalk_store
from conformance.smockron.engine import make_store as make_smockron_store
from conformance.throttr.engine import make_store as make_throttr_store
from counterd.client import Client, aio, throttr
from counterd.protocols.beanstalk import wire as beanstalk_wire
from counterd.protocols.beanstalk.wire import Status
from counterd.protocols.counter import wire
from counterd.protocols.smockron import wire as smockron_wire
from counterd.protocols.smockron.wire import SocketType
from counterd.protocols.smockron.wire import Status as Accounted
from counterd.protocols.throttr.wire import Encoder, TTLType, ValueSize
from kit import daemon
from kit.certificates import client_context, server_context
from kit.counters import make_store
from kit.daemon import PATIENCE, wait_until
from kit.jobs import Peer
from kit.serving import Serving, serving

if TYPE_CHECKING:
    import ssl
    from collections.abc import Callable

    from counterd._core import Store
    from kit.daemon import Daemon

CONNECTIONS = int(os.environ.get("LEAK_CONNECTIONS", "1400"))
TOGETHER = 32  # that are open at once
WARM = 6  # times each way, before anything is counted
SOURCES = 64  # addresses of the clients: the ports of one are in TIME_WAIT after 28,000 connections
BLOCKS_MAX, OBJECTS_MAX = 40, 8  # more of them than before, of those that come and go anyway: less than of one way
RSS_MAX = 48 << 20  # what the allocator keeps of 32 connections at once; with 200,000, a leak of 250 bytes each
RESET = struct.pack("ii", 1, 0)  # SO_LINGER: nothing is waited for
ENCODER = Encoder(ValueSize.UINT16)


@dataclass(frozen=True)
class Talk:
    """What is said to a protocol. greet: what comes first, where something has to. ask: has an answer. hold: leaves
    holdings. flood: has answers longer than what a socket takes, once `prepare` was said on another connection. part:
    an unfinished frame. garbage: ends the connection. tidy: takes away what outlives connections by right."""

    prepare: bytes
    ask: bytes
    hold: bytes
    flood: bytes
    part: bytes
    garbage: bytes
    tidy: bytes = b""
    greet: bytes = b""


COUNTER = Talk(
    prepare=b"".join(wire.acquire(1, b"%036d" % number, 1, 1) for number in range(3000)),
    ask=wire.noop(1),
    hold=b"".join(wire.acquire(1, b"held %d" % number + b"x" * 60 * (number % 2), 1, 100) for number in range(4)),
    flood=wire.dump(1) * 4,
    part=wire.acquire(1, b"unfinished" * 20, 1, 1)[:-1],
    garbage=b"\x00" * 12,
)
THROTTR = Talk(
    prepare=ENCODER.set(b"long", bytes(50_000), 1, TTLType.HOURS),
    ask=ENCODER.whoami(),
    hold=b"".join([
        *(ENCODER.subscribe(b"channel %d" % number) for number in range(3)),
        ENCODER.insert(b"short", 1, 1, TTLType.MILLISECONDS),
        ENCODER.set(b"short too", b"x" * 300, 1, TTLType.MILLISECONDS),
    ]),
    flood=ENCODER.get(b"long") * 20,
    part=ENCODER.set(b"unfinished", bytes(500), 1)[:-1],
    garbage=b"\xff" * 12,
)  # fmt: skip
BEANSTALK = Talk(
    prepare=beanstalk_wire.use(b"long") + beanstalk_wire.put(bytes(50_000)),
    ask=beanstalk_wire.list_tube_used(),
    hold=b"".join([
        beanstalk_wire.clear_tube(b"held"),
        *(encode(name) for name in (b"held", b"x" * 200) for encode in (beanstalk_wire.watch, beanstalk_wire.use)),
        beanstalk_wire.use(b"held"),
        *(beanstalk_wire.put(b"x" * 300, delay=delay) for delay in (0, 0, 1000)),
        beanstalk_wire.put_unique(b"key", b"key", 0),
        beanstalk_wire.reserve(0),
        beanstalk_wire.reserve(0),
    ]),
    flood=beanstalk_wire.peek(1) * 20,
    part=beanstalk_wire.put(bytes(500))[:-1],
    garbage=b"\xff" * 300 + b"\r\n" + beanstalk_wire.quit(),
    tidy=beanstalk_wire.clear_tube(b"held"),
)  # fmt: skip

PUBLISHER = smockron_wire.greeting() + smockron_wire.ready(SocketType.PUB)
ACCOUNTED = [b"held %d" % number + b"x" * 60 * (number % 2) for number in range(4)]
ACCOUNTING = Talk(
    prepare=PUBLISHER,
    greet=PUBLISHER,
    ask=smockron_wire.ping(0),
    hold=b"".join(smockron_wire.accounting(b"day", Accounted.ACCEPTED, name, 0) for name in ACCOUNTED),
    flood=smockron_wire.ping(600, bytes(16)) * 10_000,
    part=smockron_wire.accounting(b"day", Accounted.ACCEPTED, b"unfinished" * 20, 0)[:-1],
    garbage=b"\xff" * 12,
    tidy=PUBLISHER + b"".join(smockron_wire.accounting(b"day", Accounted.FORGET, name, 0) for name in ACCOUNTED),
)
CONTROL = Talk(
    prepare=PUBLISHER,
    greet=smockron_wire.greeting() + smockron_wire.ready(SocketType.SUB),
    ask=smockron_wire.ping(0),
    hold=b"".join([
        *(smockron_wire.subscribe(prefix) for prefix in (b"", b"day\0", b"x" * 300, b"day\0", b"gone")),
        smockron_wire.cancel(b"gone"),
        smockron_wire.ping(600),
    ]),
    flood=smockron_wire.ping(600, bytes(16)) * 10_000,
    part=smockron_wire.subscribe(b"unfinished" * 20)[:-1],
    garbage=smockron_wire.greeting() * 2,
)  # fmt: skip


class Ways:
    """The ways to make, use and end a connection; each method does one of them with one connection."""

    def __init__(self, server: Serving, talk: Talk, context: ssl.SSLContext) -> None:
        self._server = server
        self._talk = talk
        self._context = context
        self._serial = 0

    def _open(self) -> socket.socket:
        self._serial += 1
        return self._server.connect(f"127.0.0.{1 + self._serial % SOURCES}")

    def plain(self) -> socket.socket:
        sock = self._open()
        sock.sendall(self._talk.greet + self._talk.ask)
        assert sock.recv(1 << 16)
        return sock

    def silent(self) -> socket.socket:
        return self._server.connect_unix()

    def half_closed(self) -> socket.socket:
        sock = self._server.connect_unix()
        sock.sendall(self._talk.greet + self._talk.hold + self._talk.ask)
        sock.shutdown(socket.SHUT_WR)
        while sock.recv(1 << 16):
            pass
        return sock

    def reset(self) -> socket.socket:
        sock = self._open()
        sock.sendall(self._talk.greet + self._talk.hold)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
        return sock

    def holding(self) -> socket.socket:
        sock = self._server.connect_unix()
        sock.sendall(self._talk.greet + self._talk.hold)
        assert sock.recv(1 << 16)
        return sock

    def unfinished(self) -> socket.socket:
        sock = self._server.connect_unix()
        sock.sendall(self._talk.greet + self._talk.ask + self._talk.part)
        assert sock.recv(1 << 16)
        return sock

    def unread(self) -> socket.socket:
        """Closes it while the server has output for it."""
        sock = self._server.connect_unix()
        sock.sendall(self._talk.greet + self._talk.hold + self._talk.flood)
        assert sock.recv(1)
        return sock

    def garbage(self) -> socket.socket:
        sock = self._server.connect_unix()
        sock.sendall(self._talk.garbage)
        return sock

    def encrypted(self) -> socket.socket:
        sock = self._context.wrap_socket(self._open(), server_hostname="localhost")
        sock.sendall(self._talk.greet + self._talk.hold + self._talk.ask)
        assert sock.recv(1 << 16)
        return sock

    def not_encrypted(self) -> socket.socket:
        """Sends what begins like TLS, and does not go on."""
        sock = self._open()
        sock.sendall(b"\x16\x03\x01\x02\x00\x01")
        return sock

    def all(self, protocols_tls: bool) -> list[Callable[[], socket.socket]]:
        if protocols_tls:
            return [self.encrypted, self.not_encrypted, self.holding]
        return [
            self.plain, self.silent, self.half_closed, self.reset, self.holding, self.unfinished, self.unread,
            self.garbage,
        ]  # fmt: skip


@dataclass(frozen=True)
class Seen:
    """The memory and objects of the process and of the region."""

    blocks: int
    objects: collections.Counter[str]
    rss: int
    region: dict[str, int]


def look(region: Callable[[], dict[str, int]] = dict) -> Seen:
    """Measures after a garbage collection."""
    figures = region()
    for _ in range(3):
        gc.collect()
    blocks = sys.getallocatedblocks()
    objects = collections.Counter(type(found).__name__ for found in gc.get_objects())
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return Seen(blocks, objects, pages * resource.getpagesize(), figures)


def assert_nothing_stays(before: Seen, after: Seen, connections: int) -> None:
    grown = {name: more for name, more in (after.objects - before.objects).items() if more > OBJECTS_MAX}
    blocks, rss = after.blocks - before.blocks, after.rss - before.rss
    print(f"{connections:,} connections: {blocks:+} blocks, {rss / 1024:+.0f} KiB, objects {grown or 'as before'}")
    assert after.region == before.region
    assert grown == {}
    assert blocks <= BLOCKS_MAX
    assert rss <= RSS_MAX


def figures_of(server: Serving, talk: Talk) -> dict[str, int]:
    """What is in use in the region once everything is given back; and the largest number of connections at once, which
    would grow if their numbers were not reused.
    """
    store = server.store

    def asked() -> dict[str, int]:
        sessions = [store.session() for _ in range(TOGETHER + 8)]
        largest = max(session.number for session in sessions)
        sessions[0].take_output(time.monotonic_ns())
        sessions[0].receive(talk.tidy, time.monotonic_ns())
        for session in sessions:
            session.closed(0)
        store.take_dirty()  # with what they were to say, which would keep them until the server looks for it
        for _ in range(100):
            if store.next_deadline() == 0:
                store.tick(time.monotonic_ns())
        found = store.snapshot()
        names = (
            "holdings", "holdings_leaving", "busy", "channels", "name_memory", "keys", "used_memory", "jobs", "tubes",
            "waiting", "producers", "workers", "identifiers", "subscriptions",
        )  # fmt: skip
        held = {name: found[name] for name in (*names, "curr_connections") if name in found}
        return {**held, "largest": largest, "held": store.held()}

    return server.call(asked)


def come_and_go(server: Serving, ways: list[Callable[[], socket.socket]], connections: int) -> None:
    """Makes so many connections, some at once; waits until the server has seen the end of all."""
    for first in range(0, connections, TOGETHER):
        count = min(TOGETHER, connections - first)
        for sock in [ways[(first + number) % len(ways)]() for number in range(count)]:
            sock.close()
        wait_until(lambda: not server.server.connections and not server.server.handshakes, "all are gone")
    server.reports.clear()


def settled(server: Serving, talk: Talk, expected: dict[str, int] | None = None) -> dict[str, int]:
    """The figures after holdings were given back and keys have expired; or the last ones if that never happens."""
    found: dict[str, int] = {}

    def same() -> bool:
        found.update(figures_of(server, talk))
        return found == expected if expected else found.get("keys", 0) <= 1

    with contextlib.suppress(AssertionError):
        wait_until(same, "it is as it was")
    return found


def smockron_store_of_now() -> Store:
    """Its handshakes have a time limit, so its clock has to be the server's."""
    return make_smockron_store(now_ns=time.monotonic_ns())


STORES = {
    "counter": (COUNTER, lambda: make_store(20_000, 20_000, name_memory=1 << 17), 0),
    "throttr": (THROTTR, functools.partial(make_throttr_store, max_message=1 << 16), 0),
    "beanstalk": (BEANSTALK, make_beanstalk_store, 0),
    "smockron": (ACCOUNTING, smockron_store_of_now, 0),
    "smockron-control": (CONTROL, smockron_store_of_now, 1),
}


@pytest.mark.parametrize("protocol", STORES)
@pytest.mark.parametrize("is_tls", [False, True], ids=["plain", "tls"])
def test_ended_connections_leave_no_memory(protocol: str, is_tls: bool, short_path: Path) -> None:
    talk, make, port = STORES[protocol]
    store: Store = make()
    keeper = store.session()
    keeper.take_output(time.monotonic_ns())  # what it says first
    assert keeper.receive(bytes(talk.prepare), time.monotonic_ns())
    connections = CONNECTIONS // 10 if is_tls else CONNECTIONS
    context = server_context() if is_tls else None
    with serving(str(short_path / "socket"), context, store, port) as server:
        ways = Ways(server, talk, client_context()).all(is_tls)
        for _ in range(2):  # what is made once is there, and a Seen too
            come_and_go(server, ways, len(ways) * WARM)
            before = look(functools.partial(settled, server, talk))
        come_and_go(server, ways, connections)
        after = look(functools.partial(settled, server, talk, before.region))
        assert_nothing_stays(before, after, connections)
        server.call(store.audit)
    keeper.closed(0)


def test_closed_clients_leave_no_memory(short_path: Path) -> None:
    """The blocking clients, and those for asyncio."""
    path = str(short_path / "socket")

    def counter() -> None:
        with Client(path=path) as client, client.hold("held", maximum=5):
            client.acquire("kept", 1, maximum=5)

    def events() -> None:
        with throttr.Client(path=path + "2") as client:
            client.subscribe("channel")
            client.publish("channel", "event")

    async def tasks(count: int) -> None:
        for _ in range(count):
            async with aio.Client(path=path) as client, client.hold("held", maximum=5):
                await client.acquire("kept", 1, maximum=5)
            async with throttr.AsyncClient(path=path + "2") as subscriber:
                await subscriber.subscribe("channel")
                await subscriber.publish("channel", "event")

    def cycles(count: int) -> None:
        for _ in range(count):
            counter()
            events()
        asyncio.run(tasks(count))

    with serving(path) as first, serving(path + "2", store=make_throttr_store()) as second:

        def gone() -> dict[str, int]:
            wait_until(lambda: not first.server.connections and not second.server.connections, "all are gone")
            return {**settled(first, COUNTER), **settled(second, THROTTR)}

        for _ in range(2):
            cycles(WARM)
            before = look(gone)
        cycles(CONNECTIONS // 16)
        assert_nothing_stays(before, look(gone), CONNECTIONS // 4)


# ---- jobs -----------------------------------------------------------------------------------------------------------

JOBS = 40  # that a connection puts
FIGURES = ("curr_connections", "jobs", "tubes", "keys", "used_memory", "journal_behind")
JOBS_RSS_MAX = 3 << 20  # of a daemon, or of the process that writes its journal


@dataclass(frozen=True)
class Standing:
    """What an idle daemon uses beside memory: its figures, and the descriptors of it and of its child processes."""

    figures: dict[str, int]
    descriptors: list[int]


def connected(path: str) -> Peer:
    sock = socket.socket(socket.AF_UNIX)
    sock.settimeout(PATIENCE)
    sock.connect(path)
    return Peer(sock)


def put_and_leave(peer: Peer, tube: bytes) -> None:
    """Uses its own tube and key. Some jobs end, some are left in each state."""
    puts = [beanstalk_wire.put(b"x" * (30 * number), delay=1000 * (number % 4 == 3)) for number in range(JOBS)]
    peer.ask_all([beanstalk_wire.use(tube), beanstalk_wire.watch(tube), beanstalk_wire.ignore(b"default")])
    peer.ask_all([*puts, beanstalk_wire.put_unique(b"key", tube)])
    ids = [reply.number or 0 for reply in peer.ask_all([beanstalk_wire.reserve(0)] * (JOBS // 2))]
    peer.ask_all([*map(beanstalk_wire.delete, ids[:6]), *map(beanstalk_wire.bury, ids[6:9])])
    peer.ask_all([*map(beanstalk_wire.release, ids[9:12])])


def processes(counterd: Daemon) -> list[int]:
    children = Path(f"/proc/{counterd.pid}/task/{counterd.pid}/children").read_text().split()
    return [counterd.pid, *map(int, children)]


def rss(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * resource.getpagesize()


@pytest.mark.parametrize("journal", [False, True])
def test_deleted_jobs_leave_no_memory(journal: bool, tmp_path: Path) -> None:
    path = str(tmp_path / "socket")
    # With few places: what is mapped for them becomes memory as it is used, which is no leak.
    settings = {
        "counter.enable": "false", "counter.port": "", "counter.bind": "", "beanstalk.enable": "true",
        "beanstalk.port": 0, "beanstalk.bind": "127.0.0.1", "beanstalk.socket": path,
        "beanstalk.journal": tmp_path / "journal" if journal else "", "beanstalk.memory_limit": "2M",
    }  # fmt: skip
    serials = itertools.count()
    with daemon.running(tmp_path / "daemon", settings) as counterd:

        def standing() -> Standing:
            line = counterd.logged_stats(["beanstalk"])["beanstalk"]
            figures = {name: int(re.findall(rf" {name}=(\d+)", line)[0]) for name in FIGURES}
            return Standing(figures, [len(list(Path(f"/proc/{pid}/fd").iterdir())) for pid in processes(counterd)])

        def come_and_go(count: int) -> None:
            for tube in (b"own-%d" % serial for serial in itertools.islice(serials, count)):
                with contextlib.closing(connected(path)) as peer:
                    put_and_leave(peer, tube)
                while reaper.ask(beanstalk_wire.clear_tube(tube)).status == Status.CLEARED:
                    pass  # until the last that the connection had has come back, and is gone with its tube

        reaper = connected(path)
        empty = standing()
        for _ in range(2):
            come_and_go(CONNECTIONS // 14)
            wait_until(lambda: standing().figures == empty.figures, "it is as it was")
        before, memory = standing(), list(map(rss, processes(counterd)))
        come_and_go(CONNECTIONS // 7)
        wait_until(lambda: standing() == before, "it is as it was")
        grown = [now - then for now, then in zip(map(rss, processes(counterd)), memory, strict=True)]
        print(f"{CONNECTIONS // 7 * JOBS:,} jobs: {[more >> 10 for more in grown]} KiB")
        assert max(grown) <= JOBS_RSS_MAX
        reaper.close()
