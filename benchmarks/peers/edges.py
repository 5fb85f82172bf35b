"""What a server costs at its edges: its start, an idle connection, a counter that is held, and how long another client
waits during a flood, a Dump of everything, and the end of a client that holds everything.

Each function takes a server that runs and gives {figure: number}, its unit last in the name.
"""

from __future__ import annotations

import contextlib
import math
import multiprocessing
import os
import signal
import socket
import time
from typing import TYPE_CHECKING

from counterd.bench.dialects.sentinel import FIRST_RATE
from counterd.bench.plan import Plan
from counterd.bench.run import run
from counterd.client import Client
from counterd.protocols.counter import wire
from counterd.protocols.sentinel import wire as sentinel
from counterd.protocols.throttr.wire import Encoder, ValueSize
from native import frames

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from peers.servers import Server

FLOOD_CONNECTIONS = 8
FLOOD_DEPTH = 5000
FLOOD_S = 3.0
HOLD_BATCH = 1000
GIVE_BACK_S = 120.0
# (request for a name that does not exist, bytes of the answer)
ABSENT = {
    "counter": (wire.get(1, b"nobody"), wire.HEADER_SIZE + len("Not found")),
    "throttr": (Encoder(ValueSize.UINT16).query(b"nobody"), 1),
    "sentinel": (sentinel.flow(1, FIRST_RATE, 1), 16),  # of an existing flow: others cost less
    "redis": (b"*2\r\n$3\r\nGET\r\n$6\r\nnobody\r\n", len("$-1\r\n")),
}
ANSWER_S = 60.0  # timeout of an answer: a server that hangs must not stop the comparison


def idle(server: Server, count: int) -> dict[str, float]:
    """Measures the memory of an idle connection."""
    plan = Plan(protocol=server.protocol)
    noop = plan.dialect.requests(plan, b"x")["noop"]
    with contextlib.ExitStack() as stack:
        first = stack.enter_context(connected(server))
        first.sendall(noop)
        first.recv(100)
        before = server.resident()
        for _ in range(count):
            last = stack.enter_context(connected(server))
        last.sendall(noop)
        last.recv(100)  # all earlier connections are accepted
        return {"bytes each": (server.resident() - before) / count}


def held(server: Server, count: int) -> dict[str, float]:
    """Measures the memory of a counter with a holding, or of a number where the protocol has no holdings."""
    before = server.resident()
    if server.protocol != "counter":
        run(Plan(protocol=server.protocol, port=server.port, names=count, prefill=True, requests=1, connections=1))
        return {"bytes each": (server.resident() - before) / count}
    with _holder(server, count):
        return {"bytes each": (server.resident() - before) / count}


def alone(server: Server, count: int) -> dict[str, float]:
    """Measures the latency of the only client for `count` milliseconds, to compare the next three with."""
    with Bystander(server) as bystander:
        time.sleep(count / 1000)
    return bystander.figures()


def flood(server: Server, count: int) -> dict[str, float]:
    """Measures another client's latency while clients pipeline thousands of requests as fast as possible."""
    load = Plan(port=server.port, connections=FLOOD_CONNECTIONS, depth=FLOOD_DEPTH, names=count, duration=FLOOD_S)
    process = multiprocessing.Process(target=_pour, args=(load,))
    process.start()
    with Bystander(server) as bystander:
        process.join()
    if process.exitcode:
        raise RuntimeError(f"{server.name}: there was no flood (exit status {process.exitcode})")
    return bystander.figures()


def _pour(load: Plan) -> None:
    os.nice(19)  # the bystander shares the core and must not wait for this process
    result = run(load)
    if result.errors or not result.requests:
        raise RuntimeError(f"{result.errors or 'no answer'} {result.evidence}")


def dump(server: Server, count: int) -> dict[str, float]:
    """Measures the time of a Dump of all counters, and another client's latency meanwhile."""
    with _holder(server, count), Bystander(server) as bystander:
        start = time.perf_counter()
        entries = _dump(server)
        elapsed = time.perf_counter() - start
    if entries != count:
        raise RuntimeError(f"{server.name}: a Dump of {entries} counters, of {count}")
    return {"seconds": elapsed, **bystander.figures()}


def leave(server: Server, count: int) -> dict[str, float]:
    """Measures the time until all permits of a closed connection are back, and another client's latency meanwhile."""
    with (
        _holder(server, count) as (holder, names),
        Client(port=server.port) as client,
        Bystander(server) as bystander,
    ):
        start = time.perf_counter()
        holder.shutdown(socket.SHUT_RDWR)  # the other process has a copy of this descriptor
        for name in (names[0], names[count // 2], names[-1]):
            while client.get(name):
                if time.perf_counter() - start > GIVE_BACK_S:
                    raise RuntimeError(f"{server.name} has not given {name!r} back")
                time.sleep(0.001)
        elapsed = time.perf_counter() - start
    return {"seconds": elapsed, **bystander.figures()}


class Bystander:
    """Another client, in its own process. It sends one request at a time and measures how long each takes."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._stop = multiprocessing.Event()
        self._results, theirs = multiprocessing.Pipe(duplex=False)
        self._process = multiprocessing.Process(target=self._run, args=(server, self._stop, theirs))
        self._took: list[tuple[float, float]] = []  # (start, duration) of each request in seconds

    @staticmethod
    def _run(server: Server, stop, results) -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent says when to stop
        request, reply = ABSENT[server.protocol]
        took = []
        with connected(server) as connection:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            while not stop.is_set():
                start = time.perf_counter()
                connection.sendall(request)
                receive(connection, reply)
                took.append((start, time.perf_counter() - start))
                if len(took) == 1:
                    results.send([])
        results.send(took)

    def __enter__(self) -> Bystander:
        self._process.start()
        self._hear()  # the first answer has arrived
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._stop.set()
        try:
            self._took = self._hear()
        except RuntimeError:
            if kind is None:  # otherwise the earlier exception is the one to show
                raise
        finally:
            self._process.join()

    def _hear(self) -> list[tuple[float, float]]:
        try:
            return self._results.recv()
        except EOFError:
            raise RuntimeError(f"{self._server.name} did not answer another client") from None

    def figures(self, *wanted: str, since: float = 0, until: float = math.inf) -> dict[str, float]:
        """Returns the wanted figures, or both, of requests that began between two times of time.perf_counter()."""
        took = sorted(elapsed for start, elapsed in self._took if since <= start <= until)
        found = {"p99 ms": took[len(took) * 99 // 100] * 1e3, "max ms": took[-1] * 1e3}
        return {f"others {name}": found[name] for name in wanted or found}


def report_of(work: Callable[[], list[float]]) -> list[float]:
    """Runs work() in another process and returns its result. Raises RuntimeError with the text of its exception."""
    results, theirs = multiprocessing.Pipe(duplex=False)
    process = multiprocessing.get_context("fork").Process(target=_report, args=(work, theirs))
    process.start()
    theirs.close()
    try:
        found = results.recv()
    except EOFError:
        found = "a process of the comparison died"
    finally:
        process.join()
    if isinstance(found, str):
        raise RuntimeError(found)
    return found


def _report(work: Callable[[], list[float]], results) -> None:
    try:
        results.send(work())
    except (OSError, RuntimeError) as error:
        results.send(str(error) or type(error).__name__)


@contextlib.contextmanager
def _holder(server: Server, count: int) -> Iterator[tuple[socket.socket, list[bytes]]]:
    """Opens a connection that holds a permit of each of `count` names."""
    names = frames.make_names(count)
    with connected(server) as connection:
        for start in range(0, count, HOLD_BATCH):
            batch = names[start : start + HOLD_BATCH]
            connection.sendall(b"".join(map(frames.acquire, batch)))
            receive(connection, 16 * len(batch))
        yield connection, names


def connected(server: Server, *, control: bool = False) -> socket.socket:
    """Connects to the server. control: to the port where a smockron master publishes."""
    port = server.control_port if control else server.port
    return socket.create_connection(("127.0.0.1", port), timeout=ANSWER_S)


def receive(connection: socket.socket, size: int) -> None:
    while size:
        taken = len(connection.recv(min(size, 1 << 20)))
        if not taken:
            raise ConnectionError("the server closed a connection that asked nothing wrong")
        size -= taken


def _dump(server: Server, name_size: int = 16) -> int:
    """Reads a whole Dump and returns the number of its entries. All names must have the size `name_size`."""
    end = wire.frame(wire.Opcode.DUMP, 7, magic=wire.RESPONSE_MAGIC)
    buffer = bytearray(1 << 20)
    size, tail = 0, b""
    with connected(server) as connection:
        connection.sendall(wire.dump(7))
        while tail != end:
            taken = connection.recv_into(buffer)
            if not taken:
                raise ConnectionError("the server closed a connection in a Dump")
            size += taken
            tail = (tail + buffer[max(0, taken - len(end)) : taken])[-len(end) :]
    return (size - len(end)) // (wire.HEADER_SIZE + 10 + name_size)
