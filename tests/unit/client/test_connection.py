"""The shared base of connections: deadlines, and the errors of a connection that fails. The rest is in the clients'
tests."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import math
import os
import socket
import threading
import time
from typing import TYPE_CHECKING

import pytest

from counterd.client import _connection
from counterd.client._addresses import Address
from counterd.client._connection import (
    Connection,
    as_bytes,
    check_timeouts,
    connected_socket,
    open_transport,
    set_options,
)
from counterd.client._tasklink import Wire
from counterd.errors import ConnectionLost, Timeout
from kit import loops
from kit.machine import PATIENCE, is_open

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


class Keeper(Connection):
    """Records what it receives."""

    received = b""

    def _received(self, data: bytes) -> None:
        self.received += data

    def exchange(self, request: bytes, size: int) -> bytes:
        """Sends the request, and receives that many bytes."""
        with self._exchange() as deadline:
            self._send(request, deadline)
            while len(self.received) < size:
                self._receive(deadline)
        return self.received

    def wait(self, deadline: float) -> None:
        with self._exchange():
            self._receive(deadline)


@pytest.fixture
def pair() -> Iterator[tuple[Keeper, socket.socket]]:
    """A connection, and the server's end of it."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        keeper = Keeper(Address(*listening.getsockname()), 0.2)
        accepted, _ = listening.accept()
    with accepted, keeper:
        yield keeper, accepted


class Vanished:
    """The socket of a connection whose peer the kernel has given up."""

    def __init__(self, real: socket.socket) -> None:
        self._real = real
        self.fileno = real.fileno
        self.close = real.close

    def send(self, data: bytes) -> int:
        raise TimeoutError(errno.ETIMEDOUT, os.strerror(errno.ETIMEDOUT))

    recv = send  # type: ignore[assignment]


def test_a_timeout_of_the_kernel_is_a_lost_connection(pair) -> None:
    keeper, _ = pair
    keeper._socket = Vanished(keeper._socket)
    with pytest.raises(ConnectionLost, match=r"^lost the connection to 127\.0\.0\.1:[0-9]+: .*timed out"):
        keeper.exchange(b"request", 1)
    with pytest.raises(ConnectionLost, match=r"^the connection to .* has ended: .*timed out"):
        keeper.exchange(b"request", 1)


def test_bytes_that_arrive_during_a_send_are_kept_in_order(pair) -> None:
    keeper, accepted = pair
    accepted.sendall(b"early")
    assert keeper.exchange(b"request", 5) == b"early"
    assert accepted.recv(100) == b"request"


def test_a_wait_after_its_deadline_reads_nothing(pair) -> None:
    keeper, accepted = pair
    accepted.sendall(b"there")
    with pytest.raises(Timeout, match=r"did not answer within 0\.2 s$"):
        keeper.wait(time.monotonic())
    assert keeper.received == b""


def test_a_forked_child_closes_its_copy_of_each_socket(pair) -> None:
    """Whichever thread made it: one that waits for the first reply may be the only one with a reference."""
    keeper, _ = pair
    number = keeper._socket.fileno()
    child = os.fork()
    if child == 0:
        os._exit(is_open(number))
    assert os.waitpid(child, 0)[1] == 0
    assert is_open(number)


@pytest.mark.parametrize("deadline", [math.inf, 1e12])
def test_deadlines_too_far_for_poll(pair, deadline: float) -> None:
    keeper, accepted = pair
    accepted.sendall(b"there")
    keeper.wait(deadline)
    assert keeper.received == b"there"


def test_text_is_sent_as_utf_8() -> None:
    assert (as_bytes("é"), as_bytes(b"\xff")) == (b"\xc3\xa9", b"\xff")


def test_names_are_text_or_bytes() -> None:
    with pytest.raises(TypeError, match=r"^expected text or bytes, not 5$"):
        as_bytes(5)  # type: ignore[arg-type]


def test_valid_timeouts() -> None:
    assert check_timeouts(1.5, None) == (1.5, 1.5)
    assert check_timeouts(math.inf, 0.1) == (math.inf, 0.1)


@pytest.mark.parametrize("seconds", [0, -1, math.nan])
def test_timeouts_must_be_positive(seconds: float) -> None:
    with pytest.raises(ValueError, match=f"^timeout must be more than 0 seconds, not {seconds}$"):
        check_timeouts(seconds, 1)
    with pytest.raises(ValueError, match=f"^connect_timeout must be more than 0 seconds, not {seconds}$"):
        check_timeouts(1, seconds)


class Recorder:
    def __init__(self, host: str | None) -> None:
        self.host = host
        self.options: dict[tuple[int, int], int] = {}

    def getpeername(self) -> tuple[str, int]:
        if self.host is None:
            raise OSError("not connected")
        return self.host, 11215

    def setsockopt(self, level: int, name: int, value: int) -> None:
        self.options[level, name] = value


@pytest.mark.parametrize(
    ("host", "probed"),
    [("198.51.100.1", True), ("2001:db8::1", True), ("::12", True), (None, True), ("127.0.0.1", False), ("::1", False)],
)
def test_keepalive_only_for_remote_servers(host: str | None, probed: bool) -> None:
    recorder = Recorder(host)
    set_options(recorder)  # type: ignore[arg-type]
    assert ((socket.SOL_SOCKET, socket.SO_KEEPALIVE) in recorder.options) == probed
    assert recorder.options[socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT] == 10_000
    assert recorder.options[socket.IPPROTO_TCP, socket.TCP_NODELAY] == 1


@pytest.fixture
def full(short_path: Path) -> Iterator[tuple[socket.socket, str]]:
    """A Unix socket whose queue of connections is full, and its path."""
    path = str(short_path / "s")
    with socket.socket(socket.AF_UNIX) as listening, contextlib.ExitStack() as stack:
        listening.bind(path)
        listening.listen(0)
        while True:
            waiting = stack.enter_context(socket.socket(socket.AF_UNIX))
            waiting.setblocking(False)
            try:
                waiting.connect(path)
            except BlockingIOError:
                break
        yield listening, path


def take_one(listening: socket.socket) -> None:
    listening.accept()[0].close()


def test_connecting_waits_for_a_full_queue_of_a_unix_socket(full: tuple[socket.socket, str]) -> None:
    listening, path = full
    with pytest.raises(TimeoutError):
        connected_socket(Address("", 0, path), 0.03)
    later = threading.Timer(0.03, take_one, [listening])
    later.start()
    connected_socket(Address("", 0, path), 5).close()
    later.join()


def test_connecting_waits_for_a_full_queue_of_a_unix_socket_asyncio(full: tuple[socket.socket, str]) -> None:
    listening, path = full

    async def scene() -> None:
        loop = asyncio.get_running_loop()
        made: list[asyncio.BaseTransport] = []

        class Protocol(asyncio.Protocol):
            def connection_made(self, transport: asyncio.BaseTransport) -> None:
                made.append(transport)

        loop.call_later(0.03, take_one, listening)
        await asyncio.wait_for(open_transport(loop, Protocol(), Address("", 0, path)), 5)
        made[0].close()

    asyncio.run(scene())


@pytest.mark.parametrize("closes", [False, True])
@pytest.mark.parametrize("loop_name", loops.NEW_LOOP)
def test_a_connection_reports_its_end_if_connecting_is_cancelled(loop_name: str, closes: bool) -> None:
    async def scene() -> None:
        loop = asyncio.get_running_loop()

        class Cancelling(Wire):
            def connection_made(self, transport: asyncio.BaseTransport) -> None:
                super().connection_made(transport)
                connecting.cancel()
                if closes:
                    self.transport.close()

        wire = Cancelling(loop)
        with socket.create_server(("127.0.0.1", 0)) as listening:
            address = Address(*listening.getsockname())
            connecting = asyncio.ensure_future(open_transport(loop, wire, address))
            await asyncio.wait([connecting])
        assert connecting.cancelled()
        await asyncio.wait_for(wire.over, PATIENCE)

    loops.run(scene(), loop_name)


def test_a_connection_to_itself_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel may choose the very port that is connected to for this side of the connection."""
    with socket.socket() as itself:
        itself.bind(("127.0.0.1", 0))
        itself.connect(itself.getsockname())
        monkeypatch.setattr(_connection, "_connected_tcp", lambda *_: itself)
        with pytest.raises(ConnectionRefusedError):
            connected_socket(Address("127.0.0.1", 1), 1)
        assert itself.fileno() == -1
