"""The epoll set: batches, accepting, and what happens when no descriptors are left."""

from __future__ import annotations

import contextlib
import gc
import os
import resource
import select
import socket
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from counterd.net.poller import REST_S
from unit.net.polled import ENDLESS_NS, Polled, polling

if TYPE_CHECKING:
    from collections.abc import Iterator

    from unit.net.polled import Probe

needs_ipv6 = pytest.mark.needs("ipv6")


@pytest.fixture(params=[socket.AF_INET, socket.AF_UNIX], ids=["tcp", "unix"])
def polled(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Polled]:
    with polling(request.param, tmp_path) as polled:
        yield polled


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


def crowd(polled: Polled, count: int) -> list[tuple[socket.socket, Probe]]:
    """Connections that have sent a byte, which no batch has reported yet; a batch has at most one socket."""
    connected = [polled.connect() for _ in range(count)]
    for client, _ in connected:
        client.sendall(b"a")
    polled.poller.batch_ns = 0
    return connected


def test_a_batch_ends_by_time_and_every_socket_is_served_before_any_is_served_again(polled: Polled) -> None:
    """Later events, of whichever socket, are behind all that were fetched."""
    connected = crowd(polled, 5)
    told = []
    for turn in range(5):
        polled.batch()
        (now,) = [number for number, (_, probe) in enumerate(connected) if len(probe.told) > 0 and number not in told]
        told.append(now)
        connected[now][0].sendall(b"b")
        assert len(told) == turn + 1
    assert told == [0, 1, 2, 3, 4]
    assert all(probe.told == [b"a"] for _, probe in connected)
    for _ in range(5):
        polled.batch()
    assert all(probe.told == [b"a", b"b"] for _, probe in connected)


def test_the_loop_calls_again_while_fetched_events_are_left(polled: Polled) -> None:
    connected = crowd(polled, 3)
    (descriptor,) = polled.loop.readers
    batches = 0
    while select.select([descriptor], [], [], 0)[0]:
        polled.batch()
        batches += 1
    assert batches == 3
    assert all(probe.told == [b"a"] for _, probe in connected)


def test_a_kept_event_of_an_ended_stream_is_dropped(polled: Polled) -> None:
    """The stream may be freed, and another may have its descriptor."""
    connected = crowd(polled, 3)
    polled.batch()
    gone = connected[1][1]
    gone.stream.abort()
    polled.loop.run()
    assert gone.stream.fd == -1
    polled.poller.batch_ns = ENDLESS_NS
    polled.batch()
    polled.batch()
    assert gone.told == [("closed", None)]
    assert connected[2][1].told == [b"a"]
    assert polled.loop.errors == []


def test_a_kept_event_of_a_freed_stream_is_dropped(tmp_path: Path) -> None:
    """In a process of its own, as one that uses freed and overwritten memory ends by a signal."""
    code = """\
import pathlib, socket
from unit.net.polled import ENDLESS_NS, polling
with polling(socket.AF_INET, pathlib.Path()) as polled:
    for client in [polled.connect()[0] for _ in range(3)]:
        client.sendall(b"a")
    polled.poller.batch_ns = 0
    polled.batch()
    polled.probes[1].stream.abort()
    polled.loop.run()
    del polled.probes[1]
    polled.poller.batch_ns = ENDLESS_NS
    polled.batch()
    assert [probe.told for probe in polled.probes] == [[b"a"], [b"a"]]
    assert polled.loop.errors == []
"""
    environment = {**os.environ, "PYTHONMALLOC": "debug", "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(
        (sys.executable, "-c", code), cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_a_kept_event_of_a_paused_stream_is_dropped(polled: Polled) -> None:
    connected = crowd(polled, 2)
    polled.batch()
    paused = connected[1][1]
    paused.stream.pause()
    polled.batch()
    assert paused.told == []
    paused.stream.read_on()
    polled.batch()
    assert paused.told == [b"a"]


@pytest.mark.parametrize("call", ["received", "eof", "closed"])
def test_an_exception_in_a_handler_closes_one_connection(polled: Polled, call: str) -> None:
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
    probe.stream.abort()
    polled.loop.run()
    assert [str(error) for error in polled.loop.errors] == [call]
    assert len(probe.closed()) == 1
    assert [other.told for _, other in others] == [[b"ok"]] * 2


def test_a_closed_socket_leaves_the_set_although_a_copy_is_open(polled: Polled) -> None:
    """As a child process has one between its fork and its exec."""
    client, probe = polled.connect()
    copy = os.dup(probe.stream.fd)
    try:
        probe.stream.abort()
        polled.loop.run()
        client.sendall(b"for nobody")
        (descriptor,) = polled.loop.readers
        assert select.select([descriptor], [], [], 0)[0] == []
    finally:
        os.close(copy)


def test_no_more_connections_after_unlisten(polled: Polled) -> None:
    polled.connect()
    polled.poller.unlisten()
    polled.client()
    polled.batch()
    polled.poller.unlisten()
    assert len(polled.probes) == 1


def test_without_a_free_descriptor_a_connection_is_refused(polled: Polled) -> None:
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


def test_without_a_reserved_descriptor_the_poller_pauses_accepting(polled: Polled) -> None:
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
    assert [probe.told for probe in polled.probes] == [[]]
    client.close()


def test_unlisten_accepts_waiting_connections_first(polled: Polled) -> None:
    clients = [polled.client() for _ in range(100)]
    polled.poller.unlisten()
    assert len(polled.probes) == len(clients)


@pytest.mark.parametrize("address", ["127.0.0.1", "127.9.9.9", pytest.param("::1", marks=needs_ipv6)])
def test_loopback_connections_have_no_keepalive(address: str) -> None:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.create_server((address, 0), family=family) as listening:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)  # which the accepted ones have from it
        listening.setblocking(False)
        polled = Polled(listening)
        _, probe = polled.connect()
        with socket.socket(fileno=os.dup(probe.stream.fd)) as accepted:
            assert accepted.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 0
        polled.close()
