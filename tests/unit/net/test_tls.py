"""TLS between a server and peers of all kinds: what is answered, what is counted, and how it ends.

The sockets and OpenSSL on both sides are real; batches run when a test says so, and the loop is a fake.
"""

from __future__ import annotations

import contextlib
import gc
import os
import socket
import ssl
import struct
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from certificates import certificate, client_context, server_context
from counterd.net.connection import Connection
from counterd.net.sockets import Keepalive, UnixSocket, open_tcp
from counterd.protocols.counter import wire
from counterd.protocols.counter._room import CounterStore
from counterd.protocols.throttr._session import open_store
from property.model import TURNS_MAX
from unit.net.fakes import Net, nets

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from counterd._core import Session

NOOP = wire.noop(1)
REPLY = wire.frame(0, 1, magic=0x91)
HOLD = wire.acquire(1, b"held", 1, 9)
RESET = struct.pack("ii", 1, 0)
HANDSHAKES = 4  # steps in a batch
READ_BEYOND = 512  # bytes


class Site:
    """A server over TCP with TLS, on a fake loop."""

    def __init__(self, net: Net, listening: socket.socket, **options: Any) -> None:
        self.net = net
        self.loop, self.server = net.loop, net.server
        self.listening = listening
        self.server.context = server_context(**options)
        self.server.listen(listening)
        (self.batch,) = self.loop.readers.values()
        self._stack = contextlib.ExitStack()

    def turn(self) -> None:
        """A batch, and what it left to do."""
        self.batch()
        self.loop.run()

    def peer(self, context: ssl.SSLContext | None = None, **options: Any) -> Peer:
        """One that has connected, and says nothing yet."""
        before = set(self.server.arriving)
        connected = self._stack.enter_context(socket.create_connection(self.listening.getsockname()))
        connected.setblocking(False)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.turn()
        came = self.server.arriving - before
        return Peer(self, connected, context or client_context(**options), came.pop() if came else None)

    def connect(self, **options: Any) -> Peer:
        """One that has had its handshake."""
        peer = self.peer(**options)
        peer.shake()
        return peer

    def there(self) -> int:
        """How many connections there are, whether or not they take part yet."""
        return len(self.server.connections) + len(self.server.arriving)

    def failed(self) -> dict[str, int]:
        """Handshakes that failed, by cause."""
        return {
            key.partition(":")[2]: value
            for key, value in self.server.figures().items()
            if key.startswith("handshakes_failed:") and value
        }

    def close(self) -> None:
        self._stack.close()
        for connection in [*self.server.connections.values(), *self.server.arriving]:
            connection.abort()
        self.loop.run()
        self.server.part()
        assert self.there() == 0
        assert self.server.handshakes == 0
        assert self.loop.errors == []


class Peer:
    """The other side: OpenSSL, and a socket that it does not see. connection: the server's side, if that let it in."""

    def __init__(
        self, site: Site, connected: socket.socket, context: ssl.SSLContext, connection: Connection | None
    ) -> None:
        self.site = site
        self.connection: Any = connection
        self.socket = connected
        self.incoming, self.outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self.ssl = context.wrap_bio(self.incoming, self.outgoing, server_hostname="127.0.0.1")

    def flush(self) -> None:
        """What it has to say goes to the server."""
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self.socket.sendall(self.outgoing.read())

    def fetch(self) -> bool:
        """What the server has sent; returns whether it was anything."""
        try:
            data = self.socket.recv(1 << 20)
        except BlockingIOError:
            return False
        if not data:
            self.incoming.write_eof()
            return False
        self.incoming.write(data)
        return True

    def shake(self) -> None:
        for _ in range(TURNS_MAX):
            try:
                self.ssl.do_handshake()
            except ssl.SSLWantReadError:
                self.flush()
                self.site.turn()
                self.fetch()
                continue
            self.flush()
            self.site.turn()
            return
        raise AssertionError("no end of the handshake")

    def send(self, data: bytes) -> None:
        while data:
            data = data[self.ssl.write(data) :]
        self.flush()

    def read(self) -> bytes:
        """All that has come by now; what follows close_notify is no part of it."""
        self.fetch()
        received = b""
        with contextlib.suppress(ssl.SSLWantReadError):
            while piece := self.ssl.read(1 << 20):
                received += piece
        return received

    def ask(self, data: bytes) -> bytes:
        self.send(data)
        self.site.turn()
        return self.read()

    def at_end(self) -> bool:
        """Whether close_notify has come."""
        try:
            return self.ssl.read(1) == b""
        except ssl.SSLWantReadError:
            return False

    def alert(self) -> str:
        """What the server complained about."""
        while self.fetch():
            pass
        try:
            self.ssl.read(1)
        except ssl.SSLError as error:
            return error.reason or str(error)
        return ""

    def closed(self) -> bool:
        """Whether the server has shut it down."""
        try:
            while self.socket.recv(1 << 20):
                pass
        except BlockingIOError:
            return False
        except ConnectionResetError:
            pass
        return True


@pytest.fixture
def make_site() -> Iterator[Callable[..., Site]]:
    with contextlib.ExitStack() as stack:
        make = stack.enter_context(nets())

        def made(*, clients: ssl.VerifyMode = ssl.CERT_NONE, **limits: Any) -> Site:
            listening = open_tcp("127.0.0.1", 0, Keepalive(60, 30, 3, 25))
            site = Site(make(**limits), listening, clients=clients)
            stack.callback(site.close)
            return site

        yield made


@pytest.fixture
def site(make_site: Callable[..., Site]) -> Site:
    return make_site()


def versions() -> list[ssl.TLSVersion]:
    return [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3]


# ---- what is answered -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", versions())
def test_requests_are_answered(site: Site, version: ssl.TLSVersion) -> None:
    context = client_context()
    context.minimum_version = context.maximum_version = version
    peer = site.peer(context)
    assert site.server.figures()["handshakes"] == 1
    assert peer.connection.tls() == ("", "", "")
    peer.shake()
    assert site.server.figures()["handshakes"] == 0
    assert site.loop.live_timers() == []
    assert peer.ask(NOOP * 3) == REPLY * 3
    assert peer.ask(NOOP) == REPLY
    assert peer.connection.tls() == (peer.ssl.version(), peer.ssl.cipher()[0], "")
    assert peer.connection.requests == 4


def test_requests_that_come_with_the_end_of_the_handshake_are_answered(site: Site) -> None:
    peer = site.peer()
    with pytest.raises(ssl.SSLWantReadError):
        peer.ssl.do_handshake()
    peer.flush()
    site.turn()
    peer.fetch()
    peer.ssl.do_handshake()
    assert peer.ask(NOOP) == REPLY


def test_a_byte_at_a_time(site: Site) -> None:
    peer = site.peer()
    for _ in range(TURNS_MAX):
        with contextlib.suppress(ssl.SSLWantReadError):
            peer.ssl.do_handshake()
            break
        for byte in peer.outgoing.read():
            peer.socket.send(bytes([byte]))
            site.turn()
        peer.fetch()
    peer.ssl.write(NOOP)
    sent = peer.outgoing.read()
    for byte in sent:
        assert peer.read() == b""
        peer.socket.send(bytes([byte]))
        site.turn()
    assert peer.read() == REPLY


def test_one_read_is_one_answer_of_however_many_records(site: Site) -> None:
    peer = site.connect()
    for _ in range(12):
        peer.ssl.write(NOOP)
    before = site.server.histograms()["batch_bytes"]
    assert peer.ask(b"") == REPLY * 12
    after = site.server.histograms()["batch_bytes"]
    assert (sum(after.counts) - sum(before.counts), after.sum - before.sum) == (1, 12 * len(NOOP))


@pytest.mark.parametrize("version", versions())
def test_a_read_takes_what_is_missing_of_a_record_and_few_further_ones(site: Site, version: ssl.TLSVersion) -> None:
    """So one who sends records that are much work, and no data, keeps nobody waiting for long."""
    context = client_context()
    context.minimum_version = context.maximum_version = version
    peer = site.peer(context)
    peer.shake()
    peer.ssl.write(NOOP * 1300)
    for _ in range(100):
        peer.ssl.write(NOOP)
    peer.flush()
    site.turn()
    assert peer.connection.requests == 0  # nothing was known of the record yet
    site.turn()
    assert 1300 < peer.connection.requests <= 1300 + READ_BEYOND // 34
    for _ in range(100 * 41 // READ_BEYOND):
        site.turn()
    assert peer.connection.requests == 1400


def test_much_goes_both_ways(site: Site) -> None:
    """More than a record, and more than the first reads take."""
    peer = site.connect()
    received = peer.ask(NOOP * 5000)
    while len(received) < 5000 * len(REPLY):
        site.turn()
        received += peer.read()
    assert received == REPLY * 5000


def test_output_that_the_peer_does_not_take_stops_reading(site: Site) -> None:
    site.net.fill(8000)
    peer = site.connect()
    with socket.socket(fileno=os.dup(peer.connection.fd)) as ours:
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 32768)
    peer.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65536)
    peer.send(wire.dump(2) + NOOP)
    for _ in range(5):
        site.turn()
    assert 0 < peer.connection.queued < 400_000
    assert site.server.figures()["stuck_outputs"] == 1
    assert peer.connection.requests == 1  # the other waits behind the Dump
    peer.send(NOOP)
    received = bytearray()
    while not received.endswith(REPLY * 2):
        received += peer.read()
        site.turn()
    assert len(received) == 8000 * (12 + 24) + 12 + 2 * len(REPLY)
    assert site.server.figures()["stuck_outputs"] == 0


def test_a_context_is_for_those_that_come_later(site: Site, tmp_path: Path) -> None:
    first = site.connect()
    site.server.context = None
    with socket.create_connection(site.listening.getsockname()) as plain:
        plain.sendall(NOOP)
        site.turn()
        site.turn()
        assert plain.recv(100) == REPLY
        assert list(site.server.connections.values())[-1].tls() is None
        site.server.context = server_context()
        assert site.connect().ask(NOOP) == REPLY
        assert first.ask(NOOP) == REPLY


def test_a_unix_socket_has_no_tls(site: Site, tmp_path: Path) -> None:
    path = os.path.relpath(tmp_path / "s")
    site.server.listen(UnixSocket(path, 0o600).socket)
    with socket.socket(socket.AF_UNIX) as plain:
        plain.connect(path)
        plain.sendall(NOOP)
        site.turn()
        site.turn()
        assert plain.recv(100) == REPLY
        assert next(iter(site.server.connections.values())).tls() is None


# ---- before the handshake is over -----------------------------------------------------------------------------------


def publish(payload: bytes) -> bytes:
    """To the channel that every connection of the throttr room is subscribed to."""
    return b"\x13\x01" + len(payload).to_bytes(4, "little") + b"*" + payload


def test_whoever_is_in_its_handshake_takes_no_part(make_site: Callable[..., Site]) -> None:
    """What goes to every connection goes to none that has yet to show who it is, and does it no harm."""
    store = open_store(
        value_size=4,
        memory_limit=1 << 20,
        max_message=1 << 20,
        max_queued=1 << 16,
        expiry_grace_ns=0,
        hash_key=bytes(16),
    )
    site = make_site(store=store)
    publisher, other = site.connect(), site.connect()
    silent, halfway = site.peer(), site.peer()
    with pytest.raises(ssl.SSLWantReadError):
        halfway.ssl.do_handshake()
    halfway.flush()
    site.turn()
    assert store.snapshot()["curr_connections"] == len(site.server.connections) == 2
    assert site.server.figures()["handshakes"] == 2
    publisher.ask(publish(b"early"))
    site.turn()
    assert other.read().endswith(b"early")
    assert site.failed() == {}
    for peer in (silent, halfway):
        peer.fetch()
        peer.shake()
        assert peer.read() == b""
    assert store.snapshot()["curr_connections"] == len(site.server.connections) == 4
    publisher.ask(publish(b"late"))
    site.turn()
    assert [peer.read()[-4:] for peer in (other, silent, halfway)] == [b"late"] * 3
    assert site.failed() == {}


def test_whoever_is_in_its_handshake_counts(make_site: Callable[..., Site]) -> None:
    site = make_site(max_connections=2)
    silent, second = site.peer(), site.peer()
    refused = site.peer()
    assert refused.closed()
    assert site.net.reports == ["rejected:max_connections"]
    silent.socket.close()
    site.turn()
    assert not site.peer().closed()
    second.shake()
    assert len(site.server.connections) == 1
    assert site.peer().closed()


def test_the_share_of_an_address_is_had_from_the_beginning(make_site: Callable[..., Site]) -> None:
    site = make_site(max_per_address=1)
    silent = site.peer()
    assert site.peer().closed()
    assert site.net.reports == ["rejected:per_address"]
    silent.socket.close()
    site.turn()
    assert site.server.addresses == {}
    site.connect()
    assert site.peer().closed()


def test_where_a_session_finds_no_room_after_the_handshake(make_site: Callable[..., Site]) -> None:
    class Full(CounterStore):
        def session(self, now_ns: int = 0) -> Session:
            raise MemoryError("no room for another connection")

    site = make_site(store=Full(buckets=1, holdings=1, name_memory=0, hash_key=bytes(16), figures=dict))
    peer = site.peer()
    assert not peer.closed()
    peer.shake()
    assert peer.closed()
    assert site.there() == 0
    assert site.server.figures()["rejected:memory"] == 1
    assert site.failed() == {}
    assert site.net.reports == ["rejected:memory"]


def test_it_is_open_from_the_end_of_its_handshake_on(site: Site) -> None:
    told: list[Any] = []
    site.server.watch = lambda event, connection: told.append((event, connection))
    gone, peer = site.peer(), site.peer()
    gone.socket.close()
    site.turn()
    assert told == []
    assert not peer.connection.number
    assert site.server._table.idle_among(0, 100, time.monotonic_ns()) == ([], False)
    accepted_ns = peer.connection.since_ns
    peer.shake()
    assert peer.connection.number
    assert peer.connection.entered_ns > peer.connection.since_ns == accepted_ns
    assert told == [("opened", peer.connection)]
    site.server.kill(peer.connection)
    site.loop.run()
    assert told[1:] == [("closed", peer.connection)]


# ---- certificates ---------------------------------------------------------------------------------------------------


def test_the_name_in_a_clients_certificate_is_known(make_site: Callable[..., Site]) -> None:
    site = make_site(clients=ssl.CERT_REQUIRED)
    peer = site.connect(own=certificate("worker"))
    assert peer.ask(NOOP) == REPLY
    assert "commonName=worker" in peer.connection.tls()[2]


@pytest.mark.parametrize("own", [None, ("stranger", "theirs")])
@pytest.mark.parametrize("version", versions())
def test_a_client_without_the_right_certificate(
    make_site: Callable[..., Site], own: tuple[str, str] | None, version: ssl.TLSVersion
) -> None:
    site = make_site(clients=ssl.CERT_REQUIRED)
    context = client_context(own=certificate(*own) if own else None)
    context.minimum_version = context.maximum_version = version
    peer = site.peer(context)
    with contextlib.suppress(ssl.SSLError):  # in the newer version it hears of it only after its handshake
        peer.shake()
    assert site.failed() == {"certificate": 1}
    assert site.net.reports == ["handshake:certificate"]
    if version == ssl.TLSVersion.TLSv1_3:
        assert "ALERT" in peer.alert()
    assert peer.closed()


def test_a_client_that_does_not_trust_the_server(site: Site) -> None:
    peer = site.peer(trusts="theirs")
    with pytest.raises(ssl.SSLCertVerificationError):
        peer.shake()
    peer.flush()
    site.turn()
    assert site.failed() == {"certificate": 1}


# ---- what is no TLS -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "data", [NOOP * 10, b"GET / HTTP/1.0\r\n\r\n", bytes(3000), b"\x16\x03\x01\xff\xff" + bytes(50)]
)
def test_a_peer_that_speaks_something_else_is_closed(site: Site, data: bytes) -> None:
    peer = site.peer()
    peer.socket.sendall(data)
    site.turn()
    site.turn()
    assert site.failed() == {"protocol": 1}
    assert site.net.reports == ["handshake:protocol"]
    assert site.server.figures()["handshakes"] == 0
    assert peer.connection.tls() == ("", "", "")
    assert peer.closed()
    assert site.loop.live_timers() == [1.0]
    site.loop.fire()
    site.loop.run()
    assert site.there() == 0


def test_garbage_within_tls_ends_it(site: Site) -> None:
    peer = site.connect()
    assert peer.ask(HOLD)
    peer.socket.sendall(b"\x17\x03\x03\x00\x20" + bytes(32))
    site.turn()
    assert site.failed() == {"protocol": 1}
    assert peer.connection.tls() == ("", "", "")
    assert peer.alert()
    assert peer.closed()
    peer.socket.sendall(bytes(1 << 16))
    for _ in range(TURNS_MAX):
        site.turn()
        if not site.loop.live_timers():
            break
        site.loop.fire()
    assert site.net.store.snapshot()["given_back"] == 1


def test_endless_garbage_is_not_read_for_long(site: Site) -> None:
    peer = site.peer()
    for _ in range(TURNS_MAX):
        if not site.there():
            break
        with contextlib.suppress(BlockingIOError, BrokenPipeError, ConnectionResetError):
            peer.socket.send(bytes(1 << 16))
        site.turn()
    assert site.there() == 0
    assert site.failed() == {"protocol": 1}


def test_half_a_handshake_is_given_up(make_site: Callable[..., Site]) -> None:
    site = make_site(handshake_timeout=7)
    peer = site.peer()
    with pytest.raises(ssl.SSLWantReadError):
        peer.ssl.do_handshake()
    peer.flush()
    site.turn()
    assert site.loop.live_timers() == [7]
    site.loop.fire()
    site.loop.run()
    assert site.failed() == {"timeout": 1}
    assert (site.there(), site.server.handshakes) == (0, 0)
    assert peer.closed()


@pytest.mark.parametrize("said", [b"", b"\x16\x03\x01"])
@pytest.mark.parametrize("reset", [False, True])
def test_a_peer_that_goes_before_its_handshake(site: Site, *, said: bytes, reset: bool) -> None:
    """One that never said anything only looked whether somebody listens."""
    peer = site.peer()
    peer.socket.sendall(said)
    site.turn()
    if reset:
        peer.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
    peer.socket.close()
    site.turn()
    assert (site.there(), site.server.handshakes) == (0, 0)
    assert site.failed() == ({"protocol": 1} if said else {})


def test_a_batch_has_few_steps_of_handshakes_and_serves_the_others(site: Site) -> None:
    served = site.connect()
    peers = [site.peer() for _ in range(3 * HANDSHAKES)][:9]
    for peer in peers:
        with pytest.raises(ssl.SSLWantReadError):
            peer.ssl.do_handshake()
        peer.flush()
    assert served.ask(NOOP) == REPLY
    for batches in range(1, 4):
        assert sum(peer.fetch() for peer in peers) == min(HANDSHAKES, len(peers) - (batches - 1) * HANDSHAKES)
        site.turn()


def test_handshakes_wait_in_order_and_out_of_the_way(site: Site) -> None:
    """The epoll set tells nothing of those that wait, as it would of others the later the more these are. One of them
    ends meanwhile."""
    peers = [site.peer() for _ in range(10)]
    ninth = peers[8].connection
    answered = []
    for peer in peers:
        with pytest.raises(ssl.SSLWantReadError):
            peer.ssl.do_handshake()
    for peer in peers[:9]:
        peer.flush()
    for _ in range(3):
        site.batch()
        peers[9].flush()
        site.batch()  # which has nothing for those who wait, nor for who has come meanwhile
        answered.append([number for number, peer in enumerate(peers) if number != 8 and peer.fetch()])
        site.server.kill(ninth)
        site.loop.turn()
    assert answered == [[0, 1, 2, 3], [4, 5, 6, 7], [9]]


# ---- the end --------------------------------------------------------------------------------------------------------


def test_the_peers_close_notify_is_its_last_byte(site: Site) -> None:
    peer = site.connect()
    assert peer.ask(HOLD)
    peer.ssl.write(NOOP)
    with pytest.raises(ssl.SSLWantReadError):
        peer.ssl.unwrap()
    peer.flush()
    site.turn()
    peer.fetch()
    with pytest.raises(ssl.SSLError, match="APPLICATION_DATA_AFTER_CLOSE_NOTIFY"):
        peer.ssl.unwrap()  # the answer to its last request
    assert peer.closed()
    assert site.there() == 0
    assert site.net.store.snapshot()["given_back"] == 1


@pytest.mark.parametrize("cut", [False, True])
def test_an_end_without_close_notify_is_one_too(site: Site, *, cut: bool) -> None:
    peer = site.connect()
    assert peer.ask(HOLD)
    peer.ssl.write(NOOP)
    peer.flush()
    if cut:
        peer.ssl.write(HOLD)
        peer.socket.sendall(peer.outgoing.read()[:-1])
    peer.socket.shutdown(socket.SHUT_WR)
    for _ in range(3):
        site.turn()
    assert peer.read() == REPLY
    assert peer.at_end()
    assert peer.closed()
    assert site.net.store.snapshot()["given_back"] == 1
    assert site.failed() == {}


def test_a_reset_gives_back(site: Site) -> None:
    peer = site.connect()
    assert peer.ask(HOLD)
    peer.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
    peer.socket.close()
    site.turn()
    assert site.there() == 0
    assert site.net.store.snapshot()["given_back"] == 1
    assert site.failed() == {}


def test_a_connection_that_is_killed_or_closed(site: Site) -> None:
    killed = site.connect()
    site.server.kill(killed.connection)
    site.loop.run()
    assert killed.closed()
    closed = site.connect()
    closed.connection.close()
    site.loop.run()
    closed.fetch()
    assert closed.at_end()
    assert closed.closed()


def fill(peer: Peer) -> None:
    """The kernel takes no more from the server, and it is no TLS that it has taken."""
    with socket.socket(fileno=os.dup(peer.connection.fd)) as ours, contextlib.suppress(BlockingIOError):
        while True:
            ours.send(bytes(1 << 16))


def test_a_goodbye_that_the_kernel_does_not_take_is_not_waited_for(site: Site) -> None:
    peer = site.connect()
    fill(peer)
    peer.connection.close()
    site.loop.run()
    assert site.there() == 0


def test_after_a_goodbye_that_had_to_wait_the_end_comes_too(site: Site) -> None:
    peer = site.connect()
    fill(peer)
    peer.connection.part()
    assert peer.connection.queued > 0
    assert site.server.figures()["stuck_outputs"] == 0  # LINGER_S is what ends it otherwise
    for _ in range(TURNS_MAX):
        if peer.closed():
            break
        site.turn()
    assert peer.connection.queued == 0


def test_parting_from_an_idle_connection(site: Site) -> None:
    peer = site.connect()
    peer.connection.part()
    peer.fetch()
    assert peer.at_end()
    assert peer.closed()
    assert site.loop.live_timers() == [1.0]
    peer.send(NOOP)  # which nobody reads any more
    site.turn()
    peer.socket.close()
    site.turn()
    assert site.there() == 0


def test_what_has_arrived_when_parting_begins_is_answered(site: Site) -> None:
    """More than a read, and nothing of it is data as it is in the kernel."""
    peer = site.connect()
    for _ in range(150):
        peer.ssl.write(NOOP)
    peer.flush()
    peer.connection.part()
    received = b""
    for _ in range(14):
        site.turn()
        received += peer.read()
    assert received == REPLY * 150
    assert peer.at_end()


def test_parting_ends_a_handshake(site: Site) -> None:
    silent, halfway = site.peer(), site.peer()
    with pytest.raises(ssl.SSLWantReadError):
        halfway.ssl.do_handshake()
    halfway.flush()
    site.server.part()
    for _ in range(3):
        site.turn()
    assert silent.closed()
    assert halfway.closed()
    assert (site.there(), site.server.handshakes) == (0, 0)


def test_a_broken_frame_is_answered_and_then_close_notify_comes(site: Site) -> None:
    peer = site.connect()
    assert peer.ask(b"\x55" * 12).endswith(b"Invalid arguments")
    assert peer.at_end()
    assert peer.closed()


# ---- before and instead ---------------------------------------------------------------------------------------------


def test_who_is_not_let_in_costs_no_handshake(make_site: Callable[..., Site]) -> None:
    site = make_site(max_connections=1)
    site.connect()
    refused = site.peer()
    assert refused.closed()
    assert site.server.figures()["handshakes"] == 0
    assert site.net.reports == ["rejected:max_connections"]


def test_nothing_is_left_of_a_connection(site: Site) -> None:

    def left() -> tuple[int, int]:
        gc.collect()
        objects = sum(isinstance(each, (ssl.SSLObject, Connection)) for each in gc.get_objects())
        return objects, len(list(Path("/proc/self/fd").iterdir()))

    before = left()
    for said in (HOLD, b"\x55" * 12, b""):
        peer = site.connect()
        peer.ask(said)
        peer.socket.close()
        site.turn()
        broken = site.peer()
        broken.socket.sendall(NOOP)
        broken.socket.close()
        for _ in range(3):
            site.turn()
            site.loop.fire()
        del peer, broken
    assert left() == before


def test_renegotiation_is_off(site: Site) -> None:
    assert site.server.context is not None
    assert site.server.context.options & ssl.OP_NO_RENEGOTIATION
