"""The transport of plain sockets: what a connection is told, when, and what becomes of the descriptors.

The sockets are real; batches are run when a test says so, and the loop is a fake.
"""

from __future__ import annotations

import contextlib
import gc
import os
import resource
import select
import socket
import struct
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from counterd.net._connection import Connection
from counterd.net._poller import REST_S, Poller
from unit.net.fakes import FakeLoop, Net, nets

if TYPE_CHECKING:
    from collections.abc import Iterator

RESET = struct.pack("ii", 1, 0)
needs_ipv6 = pytest.mark.needs("ipv6")


class Probe(Connection):
    """Remembers what it is told. fails: the call in which it raises; refuses: to be connected."""

    fails = ""
    refuses = False

    def __init__(self, *_: Any) -> None:
        self.told: list[Any] = []
        self.transport_of: Any = None

    def _tell(self, what: Any) -> None:
        self.told.append(what)
        if self.fails and self.fails in str(what):
            raise ValueError(self.fails)

    def connection_made(self, transport: Any) -> None:
        self.transport_of = transport
        self._tell("made")
        if self.refuses:
            transport.abort()

    def data_received(self, data: bytes) -> None:
        self._tell(data)

    def eof_received(self) -> None:
        self._tell("eof")

    def pause_writing(self) -> None:
        self._tell("pause")

    def resume_writing(self) -> None:
        self._tell("resume")

    def connection_lost(self, exc: BaseException | None) -> None:
        self._tell(("lost", exc))

    def lost(self) -> list[Any]:
        return [what[1] for what in self.told if isinstance(what, tuple)]


class Polled:
    """A poller on a fake loop, with one listening socket, and its probes."""

    def __init__(self, net: Net, listening: socket.socket) -> None:
        self.loop: FakeLoop = net.loop
        self.server = net.server
        self.rejected: list[str] = []
        self.listening = listening
        self.probes: list[Probe] = []
        self.fails, self.refuses = "", False
        self.poller = Poller(self.loop, lambda cause, _: self.rejected.append(cause))  # type: ignore[arg-type]
        self.poller.listen(listening.fileno(), self._make)
        (self.batch,) = self.loop.readers.values()
        self._stack = contextlib.ExitStack()

    def _make(self) -> Probe:
        self.probes.append(Probe(self.server, "user_timeout"))
        self.probes[-1].fails, self.probes[-1].refuses = self.fails, self.refuses
        return self.probes[-1]

    def client(self) -> socket.socket:
        """One that is connected, and not accepted yet."""
        client = self._stack.enter_context(socket.socket(self.listening.family, socket.SOCK_STREAM))
        client.settimeout(5)
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(self.listening.getsockname())
        return client

    def connect(self) -> tuple[socket.socket, Probe]:
        client = self.client()
        self.batch()
        assert self.probes[-1].told == ["made"]
        return client, self.probes[-1]

    def close(self) -> None:
        self._stack.close()
        for probe in self.probes:
            if probe.transport_of is not None:
                probe.transport_of.abort()
        self.loop.run()
        self.poller.unlisten()
        self.listening.close()


@pytest.fixture(params=["tcp", "unix"])
def polled(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Polled]:
    if request.param == "tcp":
        listening = socket.create_server(("127.0.0.1", 0))
    else:
        listening = socket.socket(socket.AF_UNIX)
        listening.bind(os.path.relpath(tmp_path / "s"))
        listening.listen(256)
    listening.setblocking(False)
    with nets() as make:
        polled = Polled(make(), listening)
        yield polled
        polled.close()


def is_open(descriptor: int) -> bool:
    try:
        os.fstat(descriptor)
    except OSError:
        return False
    return True


def open_descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def clog(probe: Probe) -> bytes:
    """Fills the kernel's buffers and leaves something queued; returns all that was written."""
    transport = probe.transport_of
    with socket.fromfd(transport.fileno(), socket.AF_UNIX, socket.SOCK_STREAM) as same:
        same.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    written = bytes(range(256)) * 4096
    sent = os.write(transport.fileno(), written)
    while sent < len(written):
        with contextlib.suppress(BlockingIOError):
            sent += os.write(transport.fileno(), written[sent : sent + 65536])
            continue
        break
    assert sent < len(written)
    transport.write(written[sent : sent + 10])
    transport.write(written[sent + 10 :])
    assert transport.get_write_buffer_size() == len(written) - sent
    return written


def read_all(client: socket.socket, size: int, polled: Polled) -> bytes:
    """Reads as it comes; the kernel may hold back what it has until something has been read."""
    received = b""
    client.setblocking(False)
    end = time.monotonic() + 10
    while len(received) < size and time.monotonic() < end:
        polled.batch()
        with contextlib.suppress(BlockingIOError):
            received += client.recv(1 << 20)
    return received


def test_what_arrives_is_told(polled: Polled) -> None:
    client, probe = polled.connect()
    client.sendall(b"one")
    polled.batch()
    client.sendall(b"two")
    client.shutdown(socket.SHUT_WR)
    polled.batch()
    polled.batch()
    polled.batch()
    assert probe.told == ["made", b"one", b"two", "eof"]
    assert os.write(probe.transport_of.fileno(), b"still") == 5
    assert client.recv(10) == b"still"


def test_more_than_a_batch_is_served_in_the_next(polled: Polled) -> None:
    clients = [polled.client() for _ in range(100)]
    for _ in range(10):
        polled.batch()
    for client in clients:
        client.sendall(b"x")
    polled.batch()
    served = sum(b"x" in probe.told for probe in polled.probes)
    assert 0 < served < 100
    polled.batch()
    assert sum(b"x" in probe.told for probe in polled.probes) == 100


def test_nothing_is_read_while_paused(polled: Polled) -> None:
    client, probe = polled.connect()
    probe.transport_of.pause_reading()
    client.sendall(b"later")
    polled.batch()
    assert probe.told == ["made"]
    probe.transport_of.resume_reading()
    polled.batch()
    assert probe.told == ["made", b"later"]


def test_a_dead_peer_is_noticed_while_paused(polled: Polled) -> None:
    client, probe = polled.connect()
    probe.transport_of.pause_reading()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
    client.close()
    polled.batch()
    (error,) = probe.lost()
    expected = ConnectionResetError if polled.listening.family == socket.AF_INET else type(None)
    assert isinstance(error, expected)


def test_what_was_sent_before_a_reset_is_an_error_or_read(polled: Polled) -> None:
    client, probe = polled.connect()
    client.sendall(b"x")
    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
    client.close()
    for _ in range(3):
        polled.batch()
    if polled.listening.family == socket.AF_INET:
        assert isinstance(probe.lost()[0], ConnectionResetError)
    else:
        assert probe.told == ["made", b"x", "eof", ("lost", None)]


def test_what_the_kernel_does_not_take_goes_out_later_and_in_order(polled: Polled) -> None:
    client, probe = polled.connect()
    written = clog(probe)
    assert probe.told == ["made", "pause"]
    assert read_all(client, len(written), polled) == written
    polled.batch()
    assert probe.told == ["made", "pause", "resume"]
    assert probe.transport_of.get_write_buffer_size() == 0


def test_closing_waits_for_what_is_queued(polled: Polled) -> None:
    client, probe = polled.connect()
    written = clog(probe)
    probe.transport_of.close()
    assert probe.transport_of.is_closing()
    probe.transport_of.write(b"too late")
    probe.transport_of.resume_reading()
    assert read_all(client, len(written), polled) == written
    polled.batch()
    assert probe.told == ["made", "pause", ("lost", None)]


def test_closing_outside_a_batch_is_told_in_the_loops_next_turn(polled: Polled) -> None:
    client, probe = polled.connect()
    descriptor = probe.transport_of.fileno()
    probe.transport_of.close()
    assert probe.transport_of.is_closing()
    assert probe.told == ["made"]
    assert is_open(descriptor)
    assert polled.loop.pending() == 1
    polled.loop.run()
    assert probe.told == ["made", ("lost", None)]
    assert not is_open(descriptor)
    assert client.recv(1) == b""


def test_an_abort_forgets_what_is_queued_and_is_told_once(polled: Polled) -> None:
    client, probe = polled.connect()
    written = clog(probe)
    probe.transport_of.abort()
    probe.transport_of.abort()
    probe.transport_of.close()
    assert probe.transport_of.get_write_buffer_size() == 0
    client.sendall(b"nobody reads this")
    polled.batch()
    polled.loop.run()
    assert probe.told == ["made", "pause", ("lost", None)]
    received = b""
    with contextlib.suppress(ConnectionResetError):
        while data := client.recv(1 << 20):
            received += data
    assert len(received) < len(written)


def test_a_peer_that_goes_while_something_is_queued(polled: Polled) -> None:
    client, probe = polled.connect()
    clog(probe)
    client.close()
    for _ in range(3):
        polled.batch()
    assert probe.told[:2] == ["made", "pause"]
    (error,) = probe.lost()
    assert error is None or isinstance(error, ConnectionError)


def test_no_more_is_written_and_still_read(polled: Polled) -> None:
    client, probe = polled.connect()
    probe.transport_of.write_eof()
    assert client.recv(1) == b""
    client.sendall(b"more")
    polled.batch()
    assert probe.told == ["made", b"more"]
    client.close()
    polled.batch()
    assert probe.told[:3] == ["made", b"more", "eof"]


@pytest.mark.parametrize("call", ["received", "eof", "made", "lost"])
def test_a_bug_costs_one_connection(polled: Polled, call: str) -> None:
    others = [polled.connect() for _ in range(2)]

    victim = polled.client()
    polled.fails = call
    polled.batch()
    probe = polled.probes[-1]
    with contextlib.suppress(OSError):  # it may be closed by now
        victim.sendall(b"received")
    for client, _ in others:
        client.sendall(b"ok")
    polled.batch()
    with contextlib.suppress(OSError):
        victim.shutdown(socket.SHUT_WR)
    polled.batch()
    probe.transport_of.abort()
    polled.loop.run()
    assert [str(error) for error in polled.loop.errors] == [call]
    assert len(probe.lost()) == 1
    assert [other.told for _, other in others] == [["made", b"ok"]] * 2


def test_the_end_of_a_connection_that_stays_is_told_once(polled: Polled) -> None:
    """Else the loop would find it ready again and again, for as long as its answers take."""
    client, probe = polled.connect()
    client.shutdown(socket.SHUT_WR)
    polled.batch()
    assert probe.told == ["made", "eof"]
    (descriptor,) = polled.loop.readers
    assert select.select([descriptor], [], [], 0)[0] == []


def test_what_is_closed_is_forgotten_although_a_copy_of_it_is_open(polled: Polled) -> None:
    """As a child process has one between its fork and its exec."""
    client, probe = polled.connect()
    copy = os.dup(probe.transport_of.fileno())
    try:
        probe.transport_of.abort()
        polled.loop.run()
        client.sendall(b"for nobody")
        (descriptor,) = polled.loop.readers
        assert select.select([descriptor], [], [], 0)[0] == []
    finally:
        os.close(copy)


def test_a_refused_connection_keeps_no_descriptor(polled: Polled) -> None:
    clients = [polled.client() for _ in range(30)]
    gc.collect()  # what earlier tests left behind closes here, and not below
    before = open_descriptors()
    polled.refuses = True
    polled.batch()
    assert len(polled.probes) == 30
    assert all(probe.told == ["made", ("lost", None)] for probe in polled.probes)
    assert open_descriptors() == before
    assert [client.recv(1) for client in clients] == [b""] * 30


def test_no_more_connections_after_unlisten(polled: Polled) -> None:
    polled.connect()
    polled.poller.unlisten()
    polled.client()
    polled.batch()
    polled.poller.unlisten()
    assert len(polled.probes) == 1


def test_without_a_descriptor_a_connection_is_turned_away(polled: Polled) -> None:
    clients = [socket.socket(polled.listening.family) for _ in range(3)]
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    gc.collect()  # none may become free on the way
    highest = max(int(path.name) for path in Path("/proc/self/fd").iterdir())
    taken = [os.dup(0)]
    while taken[-1] <= highest:
        taken.append(os.dup(0))
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (taken[-1] + 1, hard))
        for client in clients:
            client.connect(polled.listening.getsockname())
        polled.batch()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for descriptor in taken:
            os.close(descriptor)
    assert polled.rejected == ["descriptors"] * 3
    assert polled.probes == []
    assert polled.loop.timers == []
    for client in clients:
        with client:
            client.settimeout(5)
            assert client.recv(1) == b""
    polled.connect()


def test_without_any_descriptor_it_rests_and_tries_again(polled: Polled) -> None:
    client = socket.socket(polled.listening.family)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))  # below the descriptor in reserve
        client.connect(polled.listening.getsockname())
        for _ in range(3):
            polled.batch()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert polled.rejected == []
    assert polled.loop.live_timers() == [REST_S]
    polled.batch()
    assert polled.probes == []
    polled.loop.fire()
    polled.batch()
    assert [probe.told for probe in polled.probes] == [["made"]]
    client.close()


def test_those_that_wait_are_accepted_before_the_end(polled: Polled) -> None:
    clients = [polled.client() for _ in range(100)]
    polled.poller.unlisten()
    assert len(polled.probes) == len(clients)


@pytest.mark.parametrize("address", ["127.0.0.1", "127.9.9.9", pytest.param("::1", marks=needs_ipv6)])
def test_whoever_is_on_this_machine_is_not_probed(address: str) -> None:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with nets() as make, socket.create_server((address, 0), family=family) as listening:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)  # which the accepted ones have from it
        listening.setblocking(False)
        polled = Polled(make(), listening)
        _, probe = polled.connect()
        with socket.socket(fileno=os.dup(probe.transport_of.fileno())) as accepted:
            assert accepted.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 0
        polled.close()


def test_what_a_transport_knows(polled: Polled) -> None:
    _, probe = polled.connect()
    transport = probe.transport_of
    assert transport.get_extra_info("socket").fileno() == transport.fileno()
    assert transport.get_extra_info("peername", 1) == 1
    assert not transport.is_closing()
    transport.set_write_buffer_limits(high=0)
    transport.write(b"")
    assert probe.told == ["made"]
