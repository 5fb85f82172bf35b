"""CPU a request of counterd beside a raw epoll loop around the same session, in one run.

    python benchmarks/load/server.py [--seconds 2] [--rounds 5]

50 connections on loopback, 100 thousand 16-byte names, acquire and release in turn, 1, 16 and 64 requests in flight.
The servers are loaded in turn, round by round; CPU is the process's own, user and system, from the scheduler.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import socket
import statistics
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from native import frames, load_native

CONNECTIONS = 50
NAMES = 100_000
# Bytes back for each batch: 16 for an Acquire, 12 for a Release.
REPLIES = {1: [16, 12], 16: [16 // 2 * 28], 64: [64 // 2 * 28]}


def cpu_ns(pid: int) -> int:
    """Time all threads of a process have spent on a CPU."""
    return sum(int((task / "schedstat").read_text().split()[0]) for task in Path(f"/proc/{pid}/task").iterdir())


@contextlib.contextmanager
def counterd():
    command = [sys.executable, "-m", "counterd", "--set", "counter.port=0", "--set", "counter.bind=127.0.0.1"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        port = 0
        for line in process.stderr:
            if "listens on" in line:
                port = int(line.rsplit(":", 1)[1])
            if "ready" in line:
                break
        yield process.pid, port
    finally:
        process.send_signal(signal.SIGTERM)
        process.communicate()


@contextlib.contextmanager
def raw_loop():
    listening = socket.create_server(("127.0.0.1", 0), backlog=1024)
    listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    pid = os.fork()
    if pid == 0:
        from counterd.protocols.counter._room import CounterStore

        store = CounterStore(
            buckets=1_000_000, holdings=2_000_000, name_memory=1 << 28, hash_key=os.urandom(16), figures=dict
        )
        store.begin_window(1)
        load_native().serve_raw(listening.fileno(), store)
    try:
        yield pid, listening.getsockname()[1]
    finally:
        listening.close()
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def measure(native, pid: int, port: int, batches: list[list[bytes]], replies: list[int], seconds: float, depth: int):
    """(microseconds of CPU a request, requests a second)"""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_connection(("127.0.0.1", port))) for _ in range(CONNECTIONS)]
        for connection in sockets:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        before = cpu_ns(pid)
        start = time.perf_counter()
        done = native.load([connection.fileno() for connection in sockets], batches, replies, seconds) * depth
        elapsed = time.perf_counter() - start
        return (cpu_ns(pid) - before) / done / 1000, done / elapsed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    native = load_native()
    names = frames.make_names(NAMES)
    with raw_loop() as raw, counterd() as ours:
        print(f"{'in flight':>9}  {'raw µs':>7}  {'counterd µs':>11}  {'ratio':>6}  {'counterd req/s':>14}", flush=True)
        for depth in (1, 16, 64):
            batches = [frames.pair_batches(names, 2000, depth, seed) for seed in range(CONNECTIONS)]
            rows = []
            for _ in range(options.rounds):
                rows.append(
                    [
                        measure(native, *server, batches, REPLIES[depth], options.seconds, depth)
                        for server in (raw, ours)
                    ]
                )
            raw_us = statistics.median(row[0][0] for row in rows)
            our_us = statistics.median(row[1][0] for row in rows)
            ratio = statistics.median(row[1][0] / row[0][0] for row in rows)
            rate = statistics.median(row[1][1] for row in rows)
            print(f"{depth:>9}  {raw_us:>7.2f}  {our_us:>11.2f}  {ratio:>6.2f}  {rate:>14,.0f}", flush=True)


if __name__ == "__main__":
    main()
