"""What it costs to hand a permit on: very many connections wait for one permit, and each holds it for a millisecond.

Redis does the same with a list of one element, BLPOP and RPUSH. Each function takes a server that runs and gives
{figure: number}, its unit last in the name.
"""

from __future__ import annotations

import contextlib
import dataclasses
import multiprocessing
import os
import select
import socket
import time
from typing import TYPE_CHECKING, NamedTuple

from counterd.bench.plan import Plan
from counterd.bench.run import run
from counterd.protocols.counter import wire
from peers.edges import ANSWER_S, connected, receive

if TYPE_CHECKING:
    from multiprocessing.sharedctypes import Synchronized

    from peers.servers import Server

HOLD_S = 0.001
QUIET_S = 1.0  # time to measure the server's CPU time while nothing else goes on
PEAK_S = 1.0  # time to measure the peak rate; the others send half of it
BEGIN_S = 1.0  # time for the others to begin
BUSY_S = 3.0  # time to measure beside the others
END_S = 1.0  # by which the others go on for longer
WARMUP_S = 0.2
NAMES = 100_000
RECEIVE_SIZE = 4096
NAME = b"waiting"
WAIT_MS = 600_000


class Speech(NamedTuple):
    """Requests, and the sizes of their replies in bytes. acquire, release: without waiting, of another name."""

    take: bytes
    taken: int
    give: bytes
    given: int
    first: bytes  # what makes the permit exist, if something has to
    first_reply: int
    acquire: tuple[bytes, int]
    release: tuple[bytes, int]


def speech_of(server: Server) -> Speech:
    if server.protocol == "redis":
        give = b"*3\r\n$5\r\nRPUSH\r\n$7\r\nwaiting\r\n$1\r\n1\r\n"
        counting = [b"*2\r\n$4\r\n%b\r\n$5\r\nplain\r\n" % word for word in (b"INCR", b"DECR")]
        return Speech(
            b"*3\r\n$5\r\nBLPOP\r\n$7\r\nwaiting\r\n$1\r\n0\r\n", len("*2\r\n$7\r\nwaiting\r\n$1\r\n1\r\n"),
            give, 4, give, 4, (counting[0], 4), (counting[1], 4),
        )  # fmt: skip
    grant = wire.HEADER_SIZE + 12
    return Speech(
        wire.take(1, [wire.Permit(NAME, 1, 1)], WAIT_MS), grant, wire.release(2, NAME, 1), wire.HEADER_SIZE, b"", 0,
        (wire.acquire(3, b"plain", 1, 1), wire.HEADER_SIZE + 4), (wire.release(4, b"plain", 1), wire.HEADER_SIZE),
    )  # fmt: skip


def hand_on(server: Server, count: int) -> dict[str, float]:
    """Measures the time from a release until the next of `count` connections has the permit, at half of the peak rate.

    Also measures the server's CPU time for a grant, which is that for all but the release, beside that for an acquire
    that does not wait, at the same pace and while nothing else goes on.
    """
    acquire_us = _plain_us(server)
    load = Plan(port=server.port, protocol=server.protocol, names=NAMES, warmup=WARMUP_S)
    peak = run(dataclasses.replace(load, duration=PEAK_S)).rate
    with Crowd(server, count) as crowd:
        before = server.cpu_ns()
        quiet = sorted(crowd.take_turns(QUIET_S))
        grant_us = (server.cpu_ns() - before) / len(quiet) / 1e3 - acquire_us
        half = dataclasses.replace(load, rate=peak / 2, duration=BEGIN_S + BUSY_S + END_S)
        fork = multiprocessing.get_context("fork")
        reached = fork.Value("d")
        others = fork.Process(target=_pour, args=(half, reached))
        others.start()
        time.sleep(BEGIN_S)
        took = sorted(crowd.take_turns(BUSY_S))
        others.join()
    if others.exitcode:
        raise RuntimeError(f"{server.name}: there was no load (exit status {others.exitcode})")
    return {
        "p50 us": took[len(took) // 2] * 1e6,
        "p99 us": took[len(took) * 99 // 100] * 1e6,
        "max us": took[-1] * 1e6,
        "quiet p99 us": quiet[len(quiet) * 99 // 100] * 1e6,
        "grant CPU us": grant_us,
        "acquire CPU us": acquire_us,
        "load %": reached.value,
    }


class Crowd:
    """Connections that wait for one permit, all in this thread, which never sleeps while the permit is handed on."""

    def __init__(self, server: Server, count: int) -> None:
        self._name = server.name
        self._speech = speech_of(server)
        with contextlib.ExitStack() as stack:
            self._epoll = stack.enter_context(select.epoll())
            self._connections = {each.fileno(): each for each in self._connect(server, count, stack)}
            self._holder = self._granted()
            self._stack = stack.pop_all()

    def _connect(self, server: Server, count: int, stack: contextlib.ExitStack) -> list[socket.socket]:
        """Opens the connections, which all ask for the permit."""
        connections = [stack.enter_context(connected(server)) for _ in range(count)]
        if self._speech.first:
            connections[0].sendall(self._speech.first)
            receive(connections[0], self._speech.first_reply)
        for each in connections:
            each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._epoll.register(each, select.EPOLLIN)
            each.sendall(self._speech.take)
        return connections

    def __enter__(self) -> Crowd:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def take_turns(self, seconds: float) -> list[float]:
        """Hands the permit on for so long. Returns the seconds from each release to the next grant."""
        took = []
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            time.sleep(HOLD_S)
            holder = self._holder
            start = time.perf_counter()
            holder.sendall(self._speech.give)
            self._holder = self._granted(but=holder)
            took.append(time.perf_counter() - start)
            receive(holder, self._speech.given)
            holder.sendall(self._speech.take)
        return took

    def _granted(self, but: socket.socket | None = None) -> socket.socket:
        """Waits until a connection has the permit, and returns it. but: one that waits for another reply."""
        end = time.monotonic() + ANSWER_S
        while time.monotonic() < end:
            for number, _ in self._epoll.poll(0):
                if self._connections[number] is not but:
                    receive(self._connections[number], self._speech.taken)
                    return self._connections[number]
        raise RuntimeError(f"{self._name} has not handed the permit on")


def _plain_us(server: Server) -> float:
    """Returns the server's CPU time for a request, of pairs of acquire and release that do not wait."""
    requests = speech_of(server).acquire, speech_of(server).release
    pairs = 0
    with connected(server) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        before, end = server.cpu_ns(), time.monotonic() + QUIET_S
        while time.monotonic() < end:
            for request, size in requests:
                connection.sendall(request)
                receive(connection, size)
                time.sleep(HOLD_S / 2)
            pairs += 1
        return (server.cpu_ns() - before) / (2 * pairs) / 1e3


def _pour(load: Plan, reached: Synchronized[float]) -> None:
    """Puts the load on the server, and writes down how much of the rate was reached, in percent."""
    os.nice(19)  # the crowd shares the core, and must not wait for this process
    found = run(load)
    if found.errors:
        raise RuntimeError(f"{found.errors} {found.evidence}")
    assert load.rate is not None
    reached.value = 100 * found.rate / load.rate
