"""What the throttr protocol costs at its edges, and redis with the same: memory of a key, a million that expire at
once, an event for ten thousand, and subscribers that do not read.

Each function takes a server that runs and gives {figure: number}, its unit last in the name. Numbers of the throttr
protocol have four bytes here: the scenarios say so to the server.
"""

from __future__ import annotations

import contextlib
import os
import re
import select
import socket
import statistics
import time
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from counterd.protocols.throttr.wire import Encoder, TTLType, ValueSize
from native import frames
from peers.edges import Bystander, connected, receive, report_of

if TYPE_CHECKING:
    from collections.abc import Iterable

    from peers.servers import Server

BATCH = 1000
LASTING_MS = 100 * 3_600_000
ENCODER = Encoder(ValueSize.UINT32)  # as the scenarios set it for the server
NAME = bytes(16)  # placeholder for a name of this length
LEAD_S = 0.5  # time from the first insert until all keys expire
LEAD_EACH_S = 10e-6  # added for each key: more than its insert takes
WATCHED_S = 0.2  # time that another client is measured after the expiry
WATCHED_EACH_S = 2e-6
CHANNEL = b"channel"
PAYLOAD = 4096
EVENTS = 20
LARGE_PAYLOAD = 32_768
LARGE_EVENTS = 320  # 10 MiB for each subscriber: more than a socket and max_queued hold
AHEAD = 4  # events published before the readers have received them
SILENT_SHARE = 10  # one in SILENT_SHARE subscribers never reads
QUEUED_MAX = 262_144  # as the scenario sets it for counterd
OPENED_AT_ONCE = 100  # less than any queue of connections to accept
DELIVERED_S = 60.0  # timeout of an event
DROPPED_S = 10.0  # time at the end until a silent subscriber must be disconnected


class Speech(NamedTuple):
    """Requests, and the sizes of their answers in bytes."""

    kept: bytes  # makes a key that lasts; the name follows, and `end`
    end: bytes
    done: int  # bytes of that answer
    subscribe: bytes
    subscribed: int


def speech_of(server: Server) -> Speech:
    if server.protocol == "redis":
        subscribed = len(b"*3\r\n$9\r\nsubscribe\r\n$7\r\nchannel\r\n:1\r\n")
        kept, end = b"*5\r\n$3\r\nSET\r\n$16\r\n", b"\r\n$1\r\n0\r\n$2\r\nPX\r\n$9\r\n%d\r\n" % LASTING_MS
        return Speech(kept, end, 5, b"*2\r\n$9\r\nSUBSCRIBE\r\n$7\r\nchannel\r\n", subscribed)
    kept = ENCODER.insert(NAME, 0, LASTING_MS, TTLType.MILLISECONDS).removesuffix(NAME)
    return Speech(kept, b"", 1, ENCODER.subscribe(CHANNEL), 1)


def publication(server: Server, size: int) -> tuple[bytes, int]:
    """Returns (request, bytes that each subscriber receives)."""
    payload = bytes(size)
    if server.protocol == "redis":
        request = b"*3\r\n$7\r\nPUBLISH\r\n$7\r\nchannel\r\n$%d\r\n%b\r\n" % (size, payload)
        return request, len(b"*3\r\n$7\r\nmessage\r\n$7\r\nchannel\r\n$%d\r\n\r\n" % size) + size
    request = ENCODER.publish(CHANNEL, payload)
    return request, len(request)


# ---- keys ----


def memory(server: Server, count: int) -> dict[str, float]:
    """Measures the memory of a key with a TTL and a name of 16 bytes."""
    before = server.resident()
    said = speech_of(server)
    with connected(server) as connection:
        for batch in _batches(frames.make_names(count)):
            connection.sendall(b"".join([said.kept + name + said.end for name in batch]))
            receive(connection, said.done * len(batch))
    return {"bytes each": (server.resident() - before) / count}


def expire(server: Server, count: int) -> dict[str, float]:
    """Others' latency from shortly before until some time after all keys expire, in the same millisecond; and for as
    long when nothing goes on, since a busy machine makes others wait, too.
    """
    watched_s = WATCHED_S + WATCHED_EACH_S * count
    with Bystander(server) as bystander:
        time.sleep(watched_s)
    idle = bystander.figures("max ms")
    names = frames.make_names(count)
    left_s = LEAD_S + LEAD_EACH_S * count
    end, end_ms = time.monotonic() + left_s, round((time.time() + left_s) * 1e3)
    done = speech_of(server).done
    with connected(server) as connection:
        for batch in _batches(names):
            if server.protocol == "redis":
                parts = b"*5\r\n$3\r\nSET\r\n$16\r\n", b"\r\n$1\r\n0\r\n$4\r\nPXAT\r\n$13\r\n%d\r\n" % end_ms
            else:
                ttl = max(1, round((end - time.monotonic()) * 1e6))
                parts = ENCODER.insert(NAME, 0, ttl, TTLType.MICROSECONDS).removesuffix(NAME), b""
            connection.sendall(b"".join([parts[0] + name + parts[1] for name in batch]))
            receive(connection, done * len(batch))
        spare_s = end - 0.1 - time.monotonic()
        if spare_s < 0:
            raise RuntimeError(f"{server.name}: {count} keys took longer to make than {left_s:g} s")
        time.sleep(spare_s)
        with Bystander(server) as bystander:
            time.sleep(max(0.0, end + watched_s - time.monotonic()))
        for name in (names[0], names[count // 2], names[-1]):
            if not _is_gone(server, connection, name):
                raise RuntimeError(f"{server.name}: {name!r} has not expired")
    return bystander.figures("max ms", "p99 ms") | {"idle max ms": idle["others max ms"]}


def _is_gone(server: Server, connection: socket.socket, name: bytes) -> bool:
    if server.protocol == "redis":
        connection.sendall(b"*2\r\n$3\r\nGET\r\n$16\r\n%b\r\n" % name)
        return connection.recv(100) == b"$-1\r\n"
    connection.sendall(b"\x02\x10" + name)
    return connection.recv(100) == b"\0"


def _batches(names: list[bytes]) -> Iterable[list[bytes]]:
    return (names[start : start + BATCH] for start in range(0, len(names), BATCH))


# ---- events ----


def publish(server: Server, count: int) -> dict[str, float]:
    """Measures the time until `count` subscribers have an event, the server's memory and another client's latency.

    The latency excludes the time when subscribers connect and close, because they then keep the client's core busy.
    """
    with Bystander(server) as bystander:
        took, cpu, grown, since, until = report_of(lambda: _publish(server, count))
    figures = {"ms until all have it": took, "server CPU ms": cpu, "peak growth MB": grown / 1e6}
    return figures | bystander.figures("max ms", since=since, until=until)


def _publish(server: Server, count: int) -> list[float]:
    """Runs in its own process, with a low priority so that the bystander gets the core."""
    os.nice(19)
    request, size = publication(server, PAYLOAD)
    with contextlib.ExitStack() as stack:
        readers = Readers(_subscribe(server, count, stack))
        publisher = stack.enter_context(connected(server))
        took, cpu = [], []
        peak, since = _peak(server), time.perf_counter()
        for _ in range(EVENTS):
            start, used = time.perf_counter(), server.cpu_ns()
            publisher.sendall(request)
            readers.until(size)
            took.append((time.perf_counter() - start) * 1e3)
            cpu.append((server.cpu_ns() - used) / 1e6)
        return [statistics.median(took), statistics.median(cpu), _peak(server) - peak, since, time.perf_counter()]


def drop(server: Server, count: int) -> dict[str, float]:
    """Measures how long events take while some subscribers never read. Those must be dropped, the others get all."""
    with Bystander(server) as bystander:
        took = report_of(lambda: _drop(server, count))
    return {"seconds": took[0], "dropped": took[1]} | bystander.figures("max ms")


def _drop(server: Server, count: int) -> list[float]:
    os.nice(19)
    request, size = publication(server, LARGE_PAYLOAD)
    with contextlib.ExitStack() as stack:
        publisher = stack.enter_context(connected(server))
        if server.protocol == "redis":
            limit = f"pubsub {QUEUED_MAX} 0 0".encode()
            words = (b"CONFIG", b"SET", b"client-output-buffer-limit", limit)
            publisher.sendall(b"*4\r\n" + b"".join(b"$%d\r\n%b\r\n" % (len(word), word) for word in words))
            receive(publisher, 5)
        readers = Readers(_subscribe(server, count, stack))
        silent = _subscribe(server, max(1, count // SILENT_SHARE), stack, buffer=4096)
        start = time.perf_counter()
        for _ in range(LARGE_EVENTS // AHEAD):
            publisher.sendall(request * AHEAD)
            readers.until(size * AHEAD)
        elapsed = time.perf_counter() - start
        dropped = sum(_is_dropped(each, size * LARGE_EVENTS) for each in silent)
    if dropped < len(silent):
        raise RuntimeError(f"{server.name} dropped {dropped} of {len(silent)} subscribers that never read")
    return [elapsed, dropped]


def _is_dropped(connection: socket.socket, size: int) -> bool:
    """Returns True if the connection ends before it has received `size` bytes."""
    connection.settimeout(DROPPED_S)
    with contextlib.suppress(ConnectionResetError, TimeoutError):
        while size > 0:
            taken = len(connection.recv(1 << 20))
            if not taken:
                return True
            size -= taken
        return False
    return size > 0


def _subscribe(
    server: Server, count: int, stack: contextlib.ExitStack, buffer: int | None = None
) -> list[socket.socket]:
    said = speech_of(server)
    found = []
    for start in range(0, count, OPENED_AT_ONCE):
        some = [stack.enter_context(_opened(server, buffer)) for _ in range(min(OPENED_AT_ONCE, count - start))]
        for each in some:
            each.sendall(said.subscribe)
        for each in some:
            receive(each, said.subscribed)
        found += some
    return found


def _opened(server: Server, buffer: int | None) -> socket.socket:
    if buffer is None:
        return connected(server)
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
    connection.settimeout(DELIVERED_S)
    connection.connect(("127.0.0.1", server.port))
    return connection


class Readers:
    """Connections of one process that read and discard events."""

    def __init__(self, connections: list[socket.socket]) -> None:
        self._connections = {each.fileno(): each for each in connections}
        self._poll = select.epoll()
        self._buffer = bytearray(1 << 18)
        for number, each in self._connections.items():
            each.setblocking(False)
            self._poll.register(number, select.EPOLLIN)

    def until(self, size: int) -> None:
        """Reads `size` bytes from each. Raises RuntimeError if one ends or gets more, or after DELIVERED_S."""
        left = dict.fromkeys(self._connections, size)
        waiting = len(left)
        end = time.monotonic() + DELIVERED_S
        while waiting:
            if time.monotonic() > end:
                raise RuntimeError(f"{waiting} of {len(left)} subscribers have not got what was published")
            for number, _ in self._poll.poll(1.0, 4096):
                taken = self._connections[number].recv_into(self._buffer)
                left[number] -= taken
                if not taken or left[number] < 0:
                    raise RuntimeError("a subscriber that reads was dropped, or got what nobody published")
                waiting -= left[number] == 0


def _peak(server: Server) -> int:
    """Returns the peak of physical memory in bytes since the server's start."""
    text = Path(f"/proc/{server.pid}/status").read_text()
    return int(re.findall(r"^VmHWM:\s+(\d+) kB", text, re.MULTILINE)[0]) * 1024
