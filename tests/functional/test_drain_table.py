"""The table of docs/operations.md about replies when the daemon stops, or the client half-closes: each of its cells,
in a daemon with all protocols, while other clients are silent, or send requests all the time."""

from __future__ import annotations

import contextlib
import signal
import socket
import threading
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, NamedTuple

import pytest

from counterd.protocols.beanstalk import wire as jobs
from counterd.protocols.counter import wire
from counterd.protocols.sentinel import wire as tokens
from counterd.protocols.throttr import wire as keys
from kit import daemon, gates, peers, sentinels
from kit import jobs as kit_jobs
from kit.daemon import PATIENCE, wait_until
from kit.takes import NAME, Shop

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kit.daemon import Daemon

PAGE = Path(__file__).parents[2] / "docs" / "operations.md"
HEADING = "| what a client has |"
MODES = ("close", "wait", "half-close")
LOADS = ("silent", "busy")

THE_END = "the end"
TIME = "time to give {} back"
REST = "the rest, as fast as it reads"
AT_ONCE = "`{}`, at once"
TAKES = 3  # on one connection
DUMPS, DUMPED = 5, 5_000  # more than fits into the buffers of the kernel

SETTINGS = {
    **{key: value for key, value in gates.SETTINGS.items() if key != "counter.enable"},
    **{f"{name}.enable": "true" for name in ("throttr", "sentinel", "beanstalk")},
    **{f"{name}.port": "0" for name in ("throttr", "sentinel", "beanstalk")},
    **{f"{name}.bind": "127.0.0.1" for name in ("throttr", "sentinel", "beanstalk")},
    "counter.resume_max": 3600,
    "beanstalk.sync": "always",
    "sentinel.token_service": "drain_tokens:Tokens",
    "sentinel.extension_timeout": 60_000,
    "drain.timeout": 3600,  # nothing may take so long
}
EXTENSION = """
import pathlib
import time

from counterd.protocols.sentinel.extensions import Status, TokenResult

ENOUGH = pathlib.Path(__file__).with_name("enough")

class Tokens:
    def __init__(self, context):
        self.default = context.default

    def request_token(self, flow_id, count, prioritized, client):
        if count == 1:
            return self.default.request_token(flow_id, count, prioritized, client)
        while not ENOUGH.exists():
            time.sleep(0.01)
        return TokenResult(Status.BLOCKED)

    def release_token(self, token_id):
        return self.default.release_token(token_id)

    def keep_token(self, token_id):
        return self.default.keep_token(token_id)
"""


class Site(NamedTuple):
    """A daemon with all protocols. directory: of its extension. observer: a connection to its counters.

    sockets: closes all connections.
    """

    counterd: Daemon
    directory: Path
    observer: socket.socket
    sockets: contextlib.ExitStack

    def connect(self, protocol: str, receive_buffer: int = 0) -> socket.socket:
        connected = self.sockets.enter_context(socket.socket())
        connected.settimeout(PATIENCE)
        if receive_buffer:
            connected.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        connected.connect(self.counterd.address_of(protocol))
        return connected

    def figure(self, name: str) -> int:
        return int(wire.decode_stats(peers.ask(self.observer, wire.stats(1)).body)[name])


def text(response: wire.Response) -> str:
    """The error message of a response, or "granted"."""
    if response.opcode == wire.Opcode.TAKE and response.status == wire.Status.RESOURCE_NOT_AVAILABLE:
        return wire.decode_shortage(response.body).text
    return response.body.decode("ascii", "replace") if response.status else "granted"


class Row:
    """A row of the table: something that a client has when the daemon is asked to stop.

    close(), wait() and half_close() return what the client then got, and leave() gives it back. wait() is called while
    the daemon waits for what others hold.
    """

    what: ClassVar[str]
    protocol: ClassVar[str] = "counter"
    receive_buffer: ClassVar[int] = 0

    def __init__(self, site: Site) -> None:
        self.site = site
        self.connection = site.connect(self.protocol, self.receive_buffer)
        self.begin()

    def begin(self) -> None:
        """Makes the request."""

    def close(self) -> str:
        return self.got() if self.is_owed else THE_END

    def wait(self) -> str:
        raise NotImplementedError

    def half_close(self) -> str:
        self.connection.shutdown(socket.SHUT_WR)
        return self.close()

    is_owed: ClassVar[bool] = False  # a reply, which got() returns

    def got(self) -> str:
        raise NotImplementedError

    def leave(self) -> None:
        """Closes its connection."""
        self.connection.close()

    def ends(self) -> bool:
        """Returns whether the daemon has ended the connection, without another byte."""
        return self.connection.recv(1) == b""


class Counter(Row):
    """A row about the counter protocol."""

    def ask(self, request: bytes) -> str:
        return text(peers.ask(self.connection, request))


class Idle(Counter):
    what = "an idle connection"

    def begin(self) -> None:
        self.ask(wire.noop(1))

    def wait(self) -> str:
        assert self.ask(wire.noop(1)) == "granted"
        return "service, and the end when nothing is held"

    def leave(self) -> None:
        """Does nothing, as the daemon ends the connection."""


class Permits(Counter):
    what = "permits (counter)"

    def begin(self) -> None:
        assert self.ask(wire.acquire(1, b"held", 1, 1)) == "granted"

    def wait(self) -> str:
        assert self.ask(wire.release(1, b"held", 1)) == "granted"
        return TIME.format("them")


class Grace(Counter):
    what = "permits in their grace time (counter)"

    def begin(self) -> None:
        assert self.ask(wire.resume(1, 3_600_000)) == "granted"
        assert self.ask(wire.acquire(1, b"kept", 1, 1)) == "granted"
        self.connection.close()
        wait_until(lambda: self.site.figure("kept_holdings") == 1, "it has ended")

    def close(self) -> str:
        return "they end with the daemon"

    def wait(self) -> str:
        wait_until(lambda: self.site.figure("kept_holdings") == 0, "they are given back")
        return "they are given back at once"

    def half_close(self) -> str:
        assert self.site.figure("kept_holdings") == 1
        return "they stay until it is over"


class Takes(Counter):
    """Takes on their own connection, and on the one that holds what they wait for."""

    what = "Takes that wait (counter), any number"
    is_owed = True

    def begin(self) -> None:
        self.other = self.site.connect("counter")
        assert self.ask(wire.acquire(0, b"wanted", 1, 1)) == "granted"
        before = self.site.figure("waiters")
        for connection in (self.connection, self.other):
            takes = [wire.take(1 + i, [wire.Permit(b"wanted", 1, 1)], 3_600_000) for i in range(TAKES)]
            connection.sendall(b"".join(takes))
        wait_until(lambda: self.site.figure("waiters") == before + 2 * TAKES, "they wait")

    def got(self) -> str:
        parsers = {connection: wire.ResponseParser() for connection in (self.connection, self.other)}
        said = {text(answer) for connection, parser in parsers.items() for answer in taken(connection, parser, TAKES)}
        assert len(said) == 1
        return f"`{said.pop()}` for each, at once"

    wait = got

    def half_close(self) -> str:
        """The Takes are removed, and what the connection held goes to the first of the others."""
        self.connection.shutdown(socket.SHUT_WR)
        (first,) = taken(self.other, wire.ResponseParser(), 1)
        assert first.status == 0
        return THE_END

    def leave(self) -> None:
        self.other.close()
        self.connection.close()


def taken(connection: socket.socket, parser: wire.ResponseParser, count: int) -> list[wire.Response]:
    """Receives so many responses."""
    found: list[wire.Response] = []
    while len(found) < count:
        data = connection.recv(1 << 16)
        assert data, f"it ended after {found}"
        found += parser.feed(data)
    return found


class Shared(Counter):
    """Shared counters, whose rights Redis servers grant. A store in memory does not need them."""

    what = "a request that waits for rights of other daemons (counter)"
    is_owed = True

    def begin(self) -> None:
        self.shop = Shop()
        (self.taker,) = self.shop.some(1)
        self.taker.send(wire.acquire(0, NAME, 1, 10))
        assert not self.taker.answers.others

    def close(self) -> str:
        self.shop.store.part()
        self.taker.session.hang_up(self.shop.pump.now_ns)
        return self.got()

    def wait(self) -> str:
        self.shop.store.begin_drain()
        return self.got()

    def half_close(self) -> str:
        self.taker.peer.half_close()
        self.connection.shutdown(socket.SHUT_WR)
        return self.got()

    def got(self) -> str:
        self.shop.pump.settle()
        (answer,) = self.taker.answers.others
        return AT_ONCE.format(text(answer))


class Dump(Counter):
    what = "a long reply, such as a Dump"
    receive_buffer = 8192
    is_owed = True

    def begin(self) -> None:
        self.holder = self.site.connect("counter")
        peers.acquire_many(self.holder, [b"counter %0200d" % number for number in range(DUMPED)])
        self.connection.sendall(wire.dump(1) * DUMPS + wire.noop(2))
        wait_until(lambda: self.site.figure("stuck_outputs") == 1, "it does not read")

    def got(self) -> str:
        parser, count = wire.ResponseParser(), 0
        while True:
            (*dumped, last) = taken(self.connection, parser, 1)
            count += len(dumped)
            if last.opaque == 2:
                assert count >= DUMPS * DUMPED
                return REST
            count += 1

    wait = got

    def leave(self) -> None:
        self.holder.close()
        self.connection.close()


class NewAcquire(Counter):
    what = "a new Acquire or Take (counter)"

    def wait(self) -> str:
        said = {
            self.ask(wire.acquire(1, b"new", 1, 9)),
            self.ask(wire.take(1, [wire.Permit(b"new", 1, 9)])),
            self.ask(wire.take(1, [wire.Permit(b"new", 1, 9)], 3_600_000)),
        }
        return f"`{''.join(said)}`"


class Beanstalk(Row):
    """A row about the beanstalk protocol, with a tube of its own."""

    protocol = "beanstalk"

    def __init__(self, site: Site) -> None:
        self.tube = type(self).__name__.encode()
        super().__init__(site)

    def begin(self) -> None:
        self.peer = kit_jobs.Peer(self.connection)
        self.peer.ask_all([jobs.use(self.tube), jobs.watch(self.tube), jobs.ignore(b"default")])

    def said(self, request: bytes = b"") -> str:
        """Sends a request, or nothing, and returns the word of the next reply."""
        if request:
            self.connection.sendall(request)
        (reply,) = self.peer.receive(1)
        return str(reply.status.name)


class Job(Beanstalk):
    what = "a reserved job (beanstalk)"

    def begin(self) -> None:
        super().begin()
        self.peer.ask(jobs.put(b"x"))
        self.job = self.peer.ask(jobs.reserve()).number or 0

    def wait(self) -> str:
        assert self.said(jobs.delete(self.job)) == "DELETED"
        return "time to finish it"


class Reserve(Beanstalk):
    what = "a `reserve` that waits (beanstalk), also for a job with permits"
    is_owed = True

    def begin(self) -> None:
        """Three connections: two wait for a job, and one for a permit of a job."""
        super().begin()
        self.holder = self.site.connect("counter")
        assert text(peers.ask(self.holder, wire.acquire(1, b"lent", 1, 1))) == "granted"
        self.others = [kit_jobs.Peer(self.site.connect("beanstalk")) for _ in range(2)]
        limited, timed = self.others
        self.peer.ask(jobs.put_limited(b"x", b"lent", 1))
        limited.ask_all([jobs.watch(self.tube)])
        waiting = self.waiting()
        limited.socket.sendall(jobs.reserve())
        timed.socket.sendall(jobs.reserve(3600))
        self.peer.ask_all([jobs.watch(b"nothing"), jobs.ignore(self.tube)])
        self.connection.sendall(jobs.reserve())
        wait_until(lambda: self.waiting() == waiting + 3, "they wait")

    def half_close(self) -> str:
        for peer in (self.peer, *self.others):
            peer.socket.shutdown(socket.SHUT_WR)
        return self.got()

    def waiting(self) -> int:
        with self.site.connect("beanstalk") as connection:
            return kit_jobs.Peer(connection).figure("current-waiting")

    def got(self) -> str:
        (said,) = {reply.status.name for peer in (self.peer, *self.others) for reply in peer.receive(1)}
        return AT_ONCE.format(said)

    wait = got

    def leave(self) -> None:
        self.holder.close()
        for peer in (self.peer, *self.others):
            peer.close()


class Put(Beanstalk):
    """A put. Whether it waits cannot be seen from outside; that its job exists, can."""

    what = "a `put` that waits for the journal (beanstalk)"
    is_owed = True

    def begin(self) -> None:
        super().begin()
        with self.site.connect("beanstalk") as connection:
            observer = kit_jobs.Peer(connection)
            before = observer.figure("total-jobs")
            self.connection.sendall(jobs.put(bytes(60_000)))
            wait_until(lambda: observer.figure("total-jobs") == before + 1, "it is executed")

    def got(self) -> str:
        return f"`{self.said()}`, when it is written"

    wait = got


class NewPut(Beanstalk):
    what = "a new `put` (beanstalk)"

    def wait(self) -> str:
        return f"`{self.said(jobs.put(b'x'))}`"


class NewReserve(Beanstalk):
    what = "a new `reserve` (beanstalk)"

    def begin(self) -> None:
        super().begin()
        self.peer.ask(jobs.put(b"x"))

    def wait(self) -> str:
        (said,) = {self.said(request) for request in (jobs.reserve(), jobs.reserve(3600), jobs.reserve(0))}
        return f"`{said}`"


class Sentinel(Row):
    """A row about the sentinel protocol: its connection asks for tokens."""

    protocol = "sentinel"

    def begin(self) -> None:
        self.peer = sentinels.Peer(self.connection)


class Token(Sentinel):
    what = "a token (sentinel)"

    def begin(self) -> None:
        super().begin()
        self.token = self.peer.acquire().token_id
        assert self.token

    def wait(self) -> str:
        self.peer.send(tokens.release(2, self.token))
        return TIME.format("it")

    def leave(self) -> None:
        assert self.peer.response(2).status == tokens.Status.RELEASE_OK
        self.connection.close()


class Extension(Sentinel):
    what = "a request that an extension decides (sentinel)"
    is_owed = True

    def begin(self) -> None:
        super().begin()
        self.peer.send(tokens.acquire(1, sentinels.PAY, 2))
        self.peer.flow()

    def got(self) -> str:
        (self.site.directory / "enough").touch()
        assert self.peer.response(1).status == tokens.Status.BLOCKED
        return "the answer of the extension"

    wait = got


class NewToken(Sentinel):
    what = "a new ACQUIRE (sentinel)"

    def wait(self) -> str:
        return f"`{tokens.Status(self.peer.acquire().status).name}`"


class Channel(Row):
    what = "a subscription (throttr)"
    protocol = "throttr"
    is_owed = True
    encoder = keys.Encoder(keys.ValueSize.UINT16)

    def begin(self) -> None:
        self.publisher = self.site.connect("throttr")
        self.connection.sendall(self.encoder.subscribe(b"news"))
        assert self.connection.recv(1) == b"\x01"
        self.publish(b"before")

    def publish(self, payload: bytes) -> None:
        self.publisher.sendall(self.encoder.publish(b"news", payload))
        assert self.publisher.recv(1) == b"\x01"

    def half_close(self) -> str:
        self.hears(b"before")
        self.connection.shutdown(socket.SHUT_WR)
        return THE_END

    def hears(self, payload: bytes) -> None:
        message = self.encoder.message(keys.Opcode.EVENT, b"news", payload)
        assert peers.receive(self.connection, len(message)) == message

    def got(self) -> str:
        self.hears(b"before")
        return "the messages until now, and the end"

    def wait(self) -> str:
        self.hears(b"before")
        self.publish(b"after")
        self.hears(b"after")
        return "messages, until nothing is held"

    def leave(self) -> None:
        self.publisher.close()


class Gate(Row):
    what = "a subscription (smockron)"
    protocol = "smockron"
    is_owed = True

    def begin(self) -> None:
        self.control = self.site.connect("smockron-control")
        self.gate = gates.Gate(self.connection, self.control)
        self.gate.account(b"login", b"before")

    def got(self) -> str:
        assert self.gate.told().identifier == b"before"
        return "the messages until now, and the end"

    def wait(self) -> str:
        assert self.gate.told().identifier == b"before"
        self.gate.account(b"login", b"after")
        assert self.gate.told().identifier == b"after"
        return "messages, until nothing is held"

    def half_close(self) -> str:
        assert self.gate.told().identifier == b"before"
        self.control.shutdown(socket.SHUT_WR)
        self.leave()
        return THE_END

    def leave(self) -> None:
        if self.connection is not self.control:
            self.connection.close()
            self.connection = self.control


# In the order in which they are asked: first what is told at once, without a request that wakes the daemon. They begin
# in the other order: the service of tokens answers nobody while it decides.
ROWS: tuple[type[Row], ...] = (
    Takes, Reserve, Put, Shared, Dump, Extension, Grace, Channel, Gate, Idle,
    NewAcquire, NewPut, NewReserve, NewToken, Permits, Job, Token,
)  # fmt: skip


def table() -> dict[str, dict[str, str]]:
    """The table on the page, by row and mode."""
    lines = PAGE.read_text().split(HEADING)[1].split("\n\n")[0].splitlines()[2:]
    cells = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]
    return {what: dict(zip(MODES, says, strict=True)) for what, *says in cells}


TABLE = table()


@contextlib.contextmanager
def requests(site: Site) -> Iterator[None]:
    """Sends requests of two protocols during the block, as long as the daemon answers them."""

    def send(connection: socket.socket, request: bytes) -> None:
        with contextlib.suppress(OSError):
            connection.sendall(request)
            while connection.recv(1 << 16):
                connection.sendall(request)

    with site.connect("counter") as counters, site.connect("beanstalk") as queues:
        threads = [
            threading.Thread(target=send, args=(counters, wire.noop(1))),
            threading.Thread(target=send, args=(queues, jobs.list_tube_used())),
        ]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            for connection in (counters, queues):
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)
            for thread in threads:
                thread.join()


@contextlib.contextmanager
def serving(directory: Path, mode: str) -> Iterator[Site]:
    (directory / "drain_tokens.py").write_text(EXTENSION)
    (directory / "gates").mkdir()
    settings = {
        **SETTINGS,
        "beanstalk.journal": directory / "jobs",
        "sentinel.rules": sentinels.write_rules(directory),
        "smockron.rules": gates.write_rules(directory / "gates"),
        "drain.mode": "wait" if mode == "wait" else "close",
    }
    with (
        daemon.running(directory / "d", settings, env={"PYTHONPATH": str(directory)}) as counterd,
        contextlib.ExitStack() as sockets,
    ):
        yield Site(counterd, directory, sockets.enter_context(counterd.connect()), sockets)


@pytest.fixture(scope="module", params=[(mode, load) for mode in MODES for load in LOADS], ids="-".join)
def stopped(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, str]]:
    """How the daemon ended, and what the clients got, by row."""
    mode, load = request.param
    found: dict[str, str] = {}
    with contextlib.ExitStack() as stack:
        site = stack.enter_context(serving(tmp_path_factory.mktemp("drain"), mode))
        rows = [row(site) for row in reversed(ROWS)][::-1]
        if load == "busy":
            stack.enter_context(requests(site))
        if mode != "half-close":
            site.counterd.send_signal(signal.SIGTERM)
        for row in rows:
            found[row.what] = getattr(row, mode.replace("-", "_"))()
        if mode == "wait":
            assert site.counterd.process.poll() is None
            for row in rows:
                row.leave()
        for row in rows:
            assert row.connection.fileno() < 0 or row.ends(), row.what
        site.sockets.close()
        assert (site.counterd.stop() if mode == "half-close" else site.counterd.ended()) == 0
        assert not site.counterd.lines("WARN|ERROR|Traceback")
    return mode, found


def test_the_table_has_the_rows_of_this_test() -> None:
    assert sorted(TABLE) == sorted(row.what for row in ROWS)


@pytest.mark.parametrize("what", [row.what for row in ROWS], ids=[row.__name__ for row in ROWS])
def test_each_cell_is_right(stopped: tuple[str, dict[str, str]], what: str) -> None:
    mode, found = stopped
    assert found[what] == TABLE[what][mode]
