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

from counterd.bench.plan import Plan
from counterd.bench.run import run
from counterd.client import Client
from counterd.protocols.counter import wire
from counterd.protocols.sentinel import wire as sentinel
from counterd.protocols.sentinel.load import FIRST_RATE
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
# What asks for a name that is not there, and bytes of the answer.
ABSENT = {
    "counter": (wire.get(1, b"nobody"), wire.HEADER_SIZE + len("Not found")),
    "throttr": (Encoder(ValueSize.UINT16).query(b"nobody"), 1),
    "sentinel": (sentinel.flow(1, FIRST_RATE, 1), 16),  # of a flow that is there: to say that it is not takes less
    "redis": (b"*2\r\n$3\r\nGET\r\n$6\r\nnobody\r\n", len("$-1\r\n")),
}
ANSWER_S = 60.0  # that an answer may take: a server that hangs must not stop the comparison


def idle(server: Server, count: int) -> dict[str, float]:
    """Memory of a connection that does nothing."""
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
        last.recv(100)  # all before it were accepted
        return {"bytes each": (server.resident() - before) / count}


def held(server: Server, count: int) -> dict[str, float]:
    """Memory of a counter and a holding of it; of a number under that name, where there are no holdings."""
    before = server.resident()
    if server.protocol != "counter":
        run(Plan(protocol=server.protocol, port=server.port, names=count, prefill=True, requests=1, connections=1))
        return {"bytes each": (server.resident() - before) / count}
    with _holder(server, count):
        return {"bytes each": (server.resident() - before) / count}


def alone(server: Server, count: int) -> dict[str, float]:
    """The latency that the next three are to be compared with: nothing else goes on, for so many milliseconds."""
    with Bystander(server) as bystander:
        time.sleep(count / 1000)
    return bystander.figures()


def flood(server: Server, count: int) -> dict[str, float]:
    """Others' latency while clients pipeline thousands of requests at a time, as fast as they are answered."""
    load = Plan(port=server.port, connections=FLOOD_CONNECTIONS, depth=FLOOD_DEPTH, names=count, duration=FLOOD_S)
    process = multiprocessing.Process(target=_pour, args=(load,))
    process.start()
    with Bystander(server) as bystander:
        process.join()
    if process.exitcode:
        raise RuntimeError(f"{server.name}: there was no flood (exit status {process.exitcode})")
    return bystander.figures()


def _pour(load: Plan) -> None:
    os.nice(19)  # the bystander has the same core, and is not to wait for that
    result = run(load)
    if result.errors or not result.requests:
        raise RuntimeError(f"{result.errors or 'no answer'} {result.evidence}")


def dump(server: Server, count: int) -> dict[str, float]:
    """A Dump of everything, and others' latency meanwhile."""
    with _holder(server, count), Bystander(server) as bystander:
        start = time.perf_counter()
        entries = _dump(server)
        elapsed = time.perf_counter() - start
    if entries != count:
        raise RuntimeError(f"{server.name}: a Dump of {entries} counters, of {count}")
    return {"seconds": elapsed, **bystander.figures()}


def leave(server: Server, count: int) -> dict[str, float]:
    """Until what a closed connection held is back, all of it, and others' latency meanwhile."""
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
    """Another client, a process of its own: asks for one name at a time, and remembers how long each took."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._stop = multiprocessing.Event()
        self._results, theirs = multiprocessing.Pipe(duplex=False)
        self._process = multiprocessing.Process(target=self._run, args=(server, self._stop, theirs))
        self._took: list[tuple[float, float]] = []  # when each began, and how long it took, in seconds

    @staticmethod
    def _run(server: Server, stop, results) -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # its parent says when to stop
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
        self._hear()  # it is under way
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._stop.set()
        try:
            self._took = self._hear()
        except RuntimeError:
            if kind is None:  # else that is what went wrong first
                raise
        finally:
            self._process.join()

    def _hear(self) -> list[tuple[float, float]]:
        try:
            return self._results.recv()
        except EOFError:
            raise RuntimeError(f"{self._server.name} did not answer another client") from None

    def figures(self, *wanted: str, since: float = 0, until: float = math.inf) -> dict[str, float]:
        """Those, in that order, or both; of what began between two moments of time.perf_counter()."""
        took = sorted(elapsed for start, elapsed in self._took if since <= start <= until)
        found = {"p99 ms": took[len(took) * 99 // 100] * 1e3, "max ms": took[-1] * 1e3}
        return {f"others {name}": found[name] for name in wanted or found}


def report_of(work: Callable[[], list[float]]) -> list[float]:
    """What it returns, in a process of its own. RuntimeError: what it raised there."""
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
    """A connection that holds a permit of each of so many names."""
    names = frames.make_names(count)
    with connected(server) as connection:
        for start in range(0, count, HOLD_BATCH):
            batch = names[start : start + HOLD_BATCH]
            connection.sendall(b"".join(map(frames.acquire, batch)))
            receive(connection, 16 * len(batch))
        yield connection, names


def connected(server: Server, *, control: bool = False) -> socket.socket:
    """control: to where a smockron master publishes."""
    port = server.control_port if control else server.port
    return socket.create_connection(("127.0.0.1", port), timeout=ANSWER_S)


def receive(connection: socket.socket, size: int) -> None:
    while size:
        taken = len(connection.recv(min(size, 1 << 20)))
        if not taken:
            raise ConnectionError("the server closed a connection that asked nothing wrong")
        size -= taken


def _dump(server: Server, name_size: int = 16) -> int:
    """Reads a whole Dump as fast as it comes, and returns how many entries that was; all names have that size."""
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
