"""A stream: what its handler is told and when, and the life of its descriptor."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import struct
import time
from typing import TYPE_CHECKING

import pytest

from unit.net.polled import Polled, Probe, polling

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

RESET = struct.pack("ii", 1, 0)


@pytest.fixture(params=[socket.AF_INET, socket.AF_UNIX], ids=["tcp", "unix"])
def polled(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Polled]:
    with polling(request.param, tmp_path) as polled:
        yield polled


def is_open(descriptor: int) -> bool:
    try:
        os.fstat(descriptor)
    except OSError:
        return False
    return True


def clog(probe: Probe) -> bytes:
    """Fills the kernel's buffers and leaves something queued; returns all that was written."""
    stream = probe.stream
    with socket.fromfd(stream.fd, socket.AF_UNIX, socket.SOCK_STREAM) as same:
        same.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    written = bytes(range(256)) * 4096
    sent = os.write(stream.fd, written)
    while sent < len(written):
        with contextlib.suppress(BlockingIOError):
            sent += os.write(stream.fd, written[sent : sent + 65536])
            continue
        break
    assert sent < len(written)
    stream.send(written[sent : sent + 10])
    stream.send(written[sent + 10 :])
    assert stream.queued == len(written) - sent
    return written


def read_all(client: socket.socket, size: int, polled: Polled) -> bytes:
    """Reads as data arrives; the kernel may hold back some until something was read."""
    received = b""
    client.setblocking(False)
    end = time.monotonic() + 10
    while len(received) < size and time.monotonic() < end:
        polled.batch()
        with contextlib.suppress(BlockingIOError):
            received += client.recv(1 << 20)
    return received


def test_input_and_its_end_reach_the_handler(polled: Polled) -> None:
    client, probe = polled.connect()
    client.sendall(b"one")
    polled.batch()
    client.sendall(b"two")
    client.shutdown(socket.SHUT_WR)
    polled.batch()
    polled.batch()
    polled.batch()
    assert probe.told == [b"one", b"two", "eof"]
    assert os.write(probe.stream.fd, b"still") == 5
    assert client.recv(10) == b"still"


def test_nothing_is_read_while_paused(polled: Polled) -> None:
    client, probe = polled.connect()
    probe.stream.pause()
    client.sendall(b"later")
    polled.batch()
    assert probe.told == []
    probe.stream.read_on()
    polled.batch()
    assert probe.told == [b"later"]


def test_a_paused_stream_reports_a_half_close_if_asked(polled: Polled) -> None:
    client, probe = polled.connect()
    probe.stream.pause()
    client.sendall(b"x")
    client.shutdown(socket.SHUT_WR)
    polled.batch()
    assert probe.told == []
    for _ in range(2):
        probe.stream.heed_end(True)
        polled.batch()
        polled.batch()  # told once
    assert probe.told == ["end sent"] * 2
    probe.stream.heed_end(True)
    probe.stream.read_on()
    polled.batch()
    polled.batch()
    assert probe.told[2:] == [b"x", "eof"]


def test_unread_input_is_counted(polled: Polled) -> None:
    client, probe = polled.connect()
    client.sendall(b"before")
    polled.poller.limit_reads(4)
    probe.stream.mark_input()
    assert probe.stream.unread == 6
    client.sendall(b"after")
    polled.batch()
    assert probe.stream.unread == 2
    polled.batch()
    assert probe.stream.unread <= 0


def test_a_reset_is_noticed_while_paused(polled: Polled) -> None:
    client, probe = polled.connect()
    probe.stream.pause()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
    client.close()
    polled.batch()
    (error,) = probe.closed()
    expected = ConnectionResetError if polled.listening.family == socket.AF_INET else type(None)
    assert isinstance(error, expected)


def test_input_before_a_reset_is_read_or_an_error(polled: Polled) -> None:
    client, probe = polled.connect()
    client.sendall(b"x")
    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
    client.close()
    for _ in range(3):
        polled.batch()
    if polled.listening.family == socket.AF_INET:
        assert isinstance(probe.closed()[0], ConnectionResetError)
    else:
        assert probe.told == [b"x", "eof", ("closed", None)]


def test_queued_output_is_sent_later_and_in_order(polled: Polled) -> None:
    client, probe = polled.connect()
    written = clog(probe)
    assert probe.told == ["stuck"]
    assert read_all(client, len(written), polled) == written
    polled.batch()
    assert probe.told == ["stuck", "moved"]
    assert probe.stream.queued == 0


def test_closing_waits_for_queued_output(polled: Polled) -> None:
    client, probe = polled.connect()
    written = clog(probe)
    probe.stream.close()
    assert probe.stream.closing
    probe.stream.send(b"too late")
    probe.stream.read_on()
    assert read_all(client, len(written), polled) == written
    polled.batch()
    assert probe.told == ["stuck", ("closed", None)]


def test_closing_outside_a_batch_is_reported_in_the_loops_next_turn(polled: Polled) -> None:
    client, probe = polled.connect()
    descriptor = probe.stream.fd
    probe.stream.close()
    assert probe.stream.closing
    assert probe.told == []
    assert is_open(descriptor)
    assert polled.loop.pending() == 1
    polled.loop.run()
    assert probe.told == [("closed", None)]
    assert not is_open(descriptor)
    assert client.recv(1) == b""


def test_an_abort_drops_queued_output_and_is_reported_once(polled: Polled) -> None:
    client, probe = polled.connect()
    written = clog(probe)
    probe.stream.abort()
    probe.stream.abort()
    probe.stream.close()
    assert probe.stream.queued == 0
    client.sendall(b"nobody reads this")
    polled.batch()
    polled.loop.run()
    assert probe.told == ["stuck", ("closed", None)]
    received = b""
    with contextlib.suppress(ConnectionResetError):
        while data := client.recv(1 << 20):
            received += data
    assert len(received) < len(written)


def test_a_peer_that_closes_while_output_is_queued(polled: Polled) -> None:
    client, probe = polled.connect()
    clog(probe)
    client.close()
    for _ in range(3):
        polled.batch()
    assert probe.told[0] == "stuck"
    (error,) = probe.closed()
    assert error is None or isinstance(error, ConnectionError)


def test_a_stream_reads_after_it_ended_its_output(polled: Polled) -> None:
    client, probe = polled.connect()
    probe.stream.end_output()
    assert client.recv(1) == b""
    client.sendall(b"more")
    polled.batch()
    assert probe.told == [b"more"]
    client.close()
    polled.batch()
    assert probe.told[:2] == [b"more", "eof"]


def test_a_half_close_is_reported_once(polled: Polled) -> None:
    """Else the loop would find the socket ready again and again, for as long as the replies take."""
    client, probe = polled.connect()
    client.shutdown(socket.SHUT_WR)
    polled.batch()
    assert probe.told == ["eof"]
    (descriptor,) = polled.loop.readers
    assert select.select([descriptor], [], [], 0)[0] == []
