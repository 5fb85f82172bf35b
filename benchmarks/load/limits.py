"""What counterd costs at its edges, beside the bounds it promises: start, memory, floods, Dump, a dying holder.

    python benchmarks/load/limits.py [--counters 1000000] [--connections 10000]

Latency is that of another client, which sends one Get after the other all the while.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import socket
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from counterd.client import Client
from counterd.protocols.counter import wire
from load.server import counterd
from native import frames, load_native

FLOOD_CONNECTIONS = 8
FLOOD_DEPTH = 5000
DUMPS = 20


def resident(pid: int) -> int:
    """Bytes of physical memory of a process."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096


def receive(connection: socket.socket, size: int) -> None:
    while size:
        size -= len(connection.recv(min(size, 1 << 20)))


def hold(connection: socket.socket, names: list[bytes]) -> None:
    """Acquires each name once on that connection."""
    for start in range(0, len(names), 1000):
        connection.sendall(b"".join(map(frames.acquire, names[start : start + 1000])))
        receive(connection, 16 * len(names[start : start + 1000]))


class Bystander:
    """Another client, a process of its own: sends a Get at a time and remembers how long each took."""

    def __init__(self, port: int) -> None:
        self._stop = multiprocessing.Event()
        self._results, theirs = multiprocessing.Pipe(duplex=False)
        self._process = multiprocessing.Process(target=self._run, args=(port, self._stop, theirs))
        self.took: list[float] = []

    @staticmethod
    def _run(port: int, stop, results) -> None:
        request = wire.get(1, b"nobody")
        reply = wire.HEADER_SIZE + len("Not found")
        took = []
        with socket.create_connection(("127.0.0.1", port)) as connection:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            while not stop.is_set():
                start = time.perf_counter()
                connection.sendall(request)
                receive(connection, reply)
                took.append(time.perf_counter() - start)
                if len(took) == 1:
                    results.send(None)
        results.send(took)

    def __enter__(self) -> Bystander:
        self._process.start()
        self._results.recv()  # it is under way
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self.took = sorted(self._results.recv())
        self._process.join()

    def __str__(self) -> str:
        median, p99 = (self.took[len(self.took) * percent // 100] * 1e6 for percent in (50, 99))
        return (
            f"{len(self.took)} requests of another client: median {median:.0f} µs, p99 {p99:.0f} µs, "
            f"slowest {self.took[-1] * 1e3:.2f} ms"
        )


def flood(port: int, names: list[bytes], seconds: float) -> None:
    """Several clients that pipeline thousands of requests at a time, as fast as they are answered."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_connection(("127.0.0.1", port))) for _ in range(FLOOD_CONNECTIONS)]
        batches = [frames.pair_batches(names, 2, FLOOD_DEPTH, seed) for seed in range(FLOOD_CONNECTIONS)]
        load_native().load([each.fileno() for each in sockets], batches, [FLOOD_DEPTH // 2 * 28], seconds)


def show(what: str, value: str, bound: str = "") -> None:
    print(f"{what:<58} {value}{f'   (bound: {bound})' if bound else ''}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--counters", type=int, default=1_000_000)
    parser.add_argument("--connections", type=int, default=10_000)
    options = parser.parse_args()

    starts = []
    for _ in range(5):
        start = time.perf_counter()
        with counterd() as (pid, port), Client(port=port) as client:
            client.noop()
            starts.append(time.perf_counter() - start)
            empty = resident(pid)
    show("start to first answer, median of 5", f"{sorted(starts)[2]:.3f} s", "0.25 s")
    show("resident after start with a million buckets", f"{empty / 1e6:.1f} MB", "45 MB")

    with counterd() as (pid, port), contextlib.ExitStack() as stack:
        before = resident(pid)
        for _ in range(options.connections):
            stack.enter_context(socket.create_connection(("127.0.0.1", port)))
        with Client(port=port) as client:
            client.noop()
        show(
            f"an idle connection, of {options.connections}",
            f"{(resident(pid) - before) / options.connections:.0f} bytes",
            "2,500",
        )

    names = frames.make_names(options.counters)
    with counterd() as (pid, port), Client(port=port) as client:
        before = resident(pid)
        holder = socket.create_connection(("127.0.0.1", port))
        hold(holder, names)
        each = (resident(pid) - before) / options.counters
        show(f"a counter and its holding, of {options.counters}", f"{each:.1f} bytes", "150")
        with Bystander(port) as bystander:
            time.sleep(1)
        show("nothing else going on", str(bystander))
        process = multiprocessing.Process(target=flood, args=(port, names[:1000], 3.0))
        process.start()
        with Bystander(port) as bystander:
            process.join()
        show(f"{FLOOD_CONNECTIONS} clients that pipeline {FLOOD_DEPTH} at a time", str(bystander))
        with Bystander(port) as bystander:
            start = time.perf_counter()
            for _ in range(DUMPS):
                entries = dump(port)
            elapsed = time.perf_counter() - start
        show(f"Dump of {entries}, {DUMPS} times: {elapsed / DUMPS:.3f} s each", str(bystander), "5 ms")
        with Bystander(port) as bystander:
            start = time.perf_counter()
            holder.shutdown(socket.SHUT_RDWR)  # the other client has a copy of this descriptor
            while int(client.stats()["holdings"]):
                time.sleep(0.001)
            elapsed = time.perf_counter() - start
        show(f"giving back {options.counters} holdings: {elapsed:.3f} s (bound: 1 s)", str(bystander), "5 ms")


def dump(port: int, name_size: int = 16) -> int:
    """Reads a whole Dump as fast as it comes, and returns how many entries that was; all names have that size."""
    end = wire.frame(wire.Opcode.DUMP, 7, magic=wire.RESPONSE_MAGIC)
    buffer = bytearray(1 << 20)
    size, tail = 0, b""
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.sendall(wire.dump(7))
        while tail != end:
            taken = connection.recv_into(buffer)
            size += taken
            tail = (tail + buffer[max(0, taken - len(end)) : taken])[-len(end) :]
    return (size - len(end)) // (wire.HEADER_SIZE + 10 + name_size)


if __name__ == "__main__":
    main()
