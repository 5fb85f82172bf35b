"""Clients that request more than they read: they wait, or are cut off; memory stays bounded and others are served."""

from __future__ import annotations

import contextlib
import threading
import time
from typing import TYPE_CHECKING

import pytest

from counterd.protocols.counter import wire
from kit import peers

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from kit import daemon

KINDS = pytest.mark.parametrize("unix", [False, True], ids=["tcp", "unix"])
COUNTERS = 20_000
DUMP_SIZE = COUNTERS * (12 + 10 + 13) + 12
MIB = 1 << 20


@pytest.fixture(params=[600])
def holder(
    request: pytest.FixtureRequest, start: Callable[..., daemon.Daemon], short_path: Path
) -> Iterator[tuple[daemon.Daemon, socket.socket]]:
    """A daemon with that timeout, in seconds, and a connection that holds COUNTERS counters."""
    patience = request.param
    settings = {"counter.user_timeout": patience, "counter.write_timeout": patience}
    counterd = start({**settings, "counter.socket": str(short_path / "s")})
    with counterd.connect() as connection:
        peers.acquire_many(connection, [b"counter %05d" % number for number in range(COUNTERS)])
        yield counterd, connection


def read_slowly(connection: socket.socket, stop: threading.Event, taken: list[int]) -> None:
    """Reads about 400 KB/s, in pieces, until told to stop: never everything that is there."""
    while not stop.wait(0.05):
        data = connection.recv(20_000)
        if not data:
            return
        taken.append(len(data))


@KINDS
@pytest.mark.parametrize("holder", [2], indirect=True)
def test_a_client_that_reads_nothing_is_cut_off_and_a_slow_one_is_not(
    unix: bool, holder: tuple[daemon.Daemon, socket.socket]
) -> None:
    counterd, _ = holder
    stop, taken = threading.Event(), []
    with (
        counterd.client() as other,
        counterd.connect(unix=unix, receive_buffer=65536) as slow,
        counterd.connect(unix=unix, receive_buffer=65536) as stuck,
    ):
        slow.sendall(wire.dump(1) * 200)
        reader = threading.Thread(target=read_slowly, args=(slow, stop, taken))
        reader.start()
        try:
            stuck.sendall(wire.acquire(0, b"counter 00000", 3, 4) + wire.dump(1) * 200)
            began = time.monotonic()
            counterd.wait_for_stats(slow_readers=1, curr_connections=4)
            assert time.monotonic() - began > 1.9
            assert other.get("counter 00000") == 1
            counterd.wait_for_log("WARNING .*(disconnected a peer|closed a connection)")
            # The slow one has been slow for longer than anybody's patience, and still is.
            time.sleep(max(0.0, began + 5 - time.monotonic()))
            assert reader.is_alive()
            counterd.wait_for_stats(slow_readers=1, stuck_outputs=1)  # for a moment, all that was in memory is sent
        finally:
            stop.set()
            reader.join()
        assert int(other.stats()["internal_errors"]) == 0
        # It gets all the rest when it hurries up.
        rest = 200 * DUMP_SIZE - sum(taken)
        assert len(peers.receive(slow, rest)) == rest
        assert peers.ask(slow, wire.noop(5)).opaque == 5


@KINDS
def test_memory_is_bounded_and_others_are_served(unix: bool, holder: tuple[daemon.Daemon, socket.socket]) -> None:
    """20 clients, each with 70 MB of replies to come, and more requests behind that. Only a piece for each may be in
    memory."""
    counterd, _ = holder
    before = counterd.rss()
    with contextlib.ExitStack() as stack, counterd.client() as other:
        for _ in range(20):
            connection = stack.enter_context(counterd.connect(unix=unix, receive_buffer=8192))
            connection.sendall(wire.dump(1) * 100 + wire.stats(2) * 1000)
        counterd.wait_for_stats(stuck_outputs=20)
        slowest = 0.0
        for _ in range(200):
            began = counterd.cpu()
            other.acquire("jobs", maximum=1)
            other.release("jobs")
            slowest = max(slowest, counterd.cpu() - began)
        assert slowest < 1.0
        assert counterd.rss() - before < 20 * MIB


@KINDS
def test_memory_is_bounded_when_the_replies_are_much_longer(
    unix: bool, holder: tuple[daemon.Daemon, socket.socket]
) -> None:
    """12 bytes request about 1,500 of statistics."""
    counterd, _ = holder
    before = counterd.rss()
    with (
        counterd.connect(unix=unix, receive_buffer=8192) as connection,
        counterd.client() as other,
        peers.sending(connection, wire.stats(1) * 100_000),
    ):
        counterd.wait_for_stats(stuck_outputs=1)
        other.noop()
        assert counterd.rss() - before < 5 * MIB
    counterd.wait_for_stats(curr_connections=2)


@KINDS
def test_memory_is_bounded_when_requests_come_faster_than_they_can_be_answered(
    unix: bool, holder: tuple[daemon.Daemon, socket.socket]
) -> None:
    """Although the peer reads as fast as it can: statistics take longer to make than to read."""
    counterd, _ = holder
    before = counterd.rss()
    with counterd.connect(unix=unix) as connection, peers.sending(connection, wire.stats(1) * 2_000_000) as sender:
        taken, most = 0, 0
        while taken < 12 * MIB:
            taken += len(connection.recv(peers.RECEIVE_SIZE))
            most = max(most, counterd.rss())
        assert sender.is_alive()
        assert most - before < 5 * MIB
    counterd.wait_for_stats(curr_connections=2)


@KINDS
def test_fifty_megabytes_of_requests_wait_for_their_reader(
    unix: bool, start: Callable[..., daemon.Daemon], short_path: Path
) -> None:
    counterd = start({"counter.socket": str(short_path / "s")})
    count = 50 * MIB // peers.GET_SIZE
    requests, expected = peers.gets(count), peers.get_responses(count, 7)
    with counterd.connect(unix=unix, receive_buffer=8192) as connection, counterd.client() as other:
        assert peers.ask(connection, wire.acquire(0, peers.NAME, 7, 7)).status == 0
        before = counterd.rss()
        with peers.sending(connection, requests) as sender:
            counterd.wait_for_stats(stuck_outputs=1)
            done = answered = -1
            while answered != done:  # until nothing moves any more
                done = int(other.stats()["command:get"])
                time.sleep(0.2)
                answered = int(other.stats()["command:get"])
            assert sender.is_alive()
            assert answered < count
            assert counterd.rss() - before < 5 * MIB
            received = peers.receive(connection, len(expected))
            assert len(received) == len(expected)
            assert received == expected
            assert counterd.rss() - before < 5 * MIB
            assert peers.ask(connection, wire.noop(9)).opaque == 9


def test_a_dump_is_complete_and_does_not_delay_others(
    holder: tuple[daemon.Daemon, socket.socket],
) -> None:
    counterd, _ = holder
    served: list[float] = []
    stop = threading.Event()

    def go_on() -> None:
        with counterd.client() as other:
            while not stop.is_set():
                began = counterd.cpu()
                other.acquire("passing", maximum=1)
                other.release("passing")
                served.append(counterd.cpu() - began)

    worker = threading.Thread(target=go_on)
    worker.start()
    try:
        with counterd.connect() as connection:
            connection.sendall(wire.dump(1) * 5 + wire.noop(2) + wire.get(3, b"counter 00007") + wire.dump(4))
            found = []
            ends = 0
            parser = wire.ResponseParser()
            while ends < 6:
                new = parser.feed(connection.recv(peers.RECEIVE_SIZE))
                ends += sum(response.opcode == 0x11 and not response.body for response in new)
                found += new
    finally:
        stop.set()
        worker.join()
    replies = iter(found)
    wanted = {b"counter %05d" % number for number in range(COUNTERS)}
    for opaque in (1, 1, 1, 1, 1, 4):
        if opaque == 4:
            assert next(replies) == (0, 0, 2, b"")
            assert next(replies) == (1, 0, 3, b"\0\0\0\1")
        entries = []
        while (response := next(replies)).body:
            assert (response.opcode, response.status, response.opaque) == (0x11, 0, opaque)
            entries.append(wire.decode_dump_entry(response.body))
        names = [entry.name for entry in entries if entry.name != b"passing"]
        assert len(names) == len(set(names)) == COUNTERS
        assert set(names) == wanted
        assert {(entry.consumption, entry.peak) for entry in entries if entry.name != b"passing"} == {(1, 1)}
    assert next(replies, None) is None
    assert served, "others were served meanwhile"
    assert max(served) < 1.0
