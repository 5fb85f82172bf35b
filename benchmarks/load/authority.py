#!/usr/bin/env python3
"""What do shared limits cost the Redis that is their authority?

    python benchmarks/load/authority.py [--sidecars N] [--counters N] [--seconds S] [--server PROGRAM]

Starts a server, and simulates sidecars that make calls of counterd's library in it, in pipelines, as fast as it
answers:

- calls with more and more counters in each, of counters that each sidecar shares with all others, so that the time of a
  call and the time of a counter in it are known; and the same for rates;
- the calls of a tick: each counter is hot at one sidecar, and each sidecar makes a call in each partition. So many such
  ticks are in a second as the server can do.

Prints the processor time of the server's thread for each, and the memory of a counter. The times do not include the
sidecars. On a busy machine they rise a little, because the caches are shared.
"""

from __future__ import annotations

import argparse
import contextlib
import subprocess
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import redis

from counterd.cluster import lease_protocol
from counterd.cluster.lease_protocol import LeaseRequest, Mode, RateRequest

if TYPE_CHECKING:
    from collections.abc import Iterator

START_S = 30.0  # the server is given so long to start
LEASE_MS = 3_600_000
MAXIMUM = 1_000_000
IN_CALL = (0, 1, 10, 100)  # counters, or rates
PIPELINE = 100  # calls that are on their way together
US = 1e6


class Used(NamedTuple):
    """Calls of the library so far, seconds of the server's thread, and of the clock."""

    calls: int
    thread: float
    clock: float


class Sidecars:
    """Simulated sidecars of one server. Each call differs from the one before, so that the server has to write."""

    def __init__(self, server: redis.Redis, count: int) -> None:
        self.server = server
        self.names = [f"sidecar-{number}" for number in range(count)]
        self._calls = dict.fromkeys(self.names, 0)
        for partition in range(lease_protocol.PARTITIONS):
            self._send([self._call(name, partition, [], []) for name in self.names])
            server.hset(lease_protocol.keys(partition, "")[1], "learns", 0)

    def _call(
        self, name: str, partition: int, requests: list[LeaseRequest], rates: list[RateRequest]
    ) -> list[bytes | str | int]:
        self._calls[name] += 1
        keys = lease_protocol.keys(partition, name)
        arguments = lease_protocol.arguments(name, self._calls[name], LEASE_MS, requests, rates)
        return ["FCALL", lease_protocol.LIBRARY, len(keys), *keys, *arguments]

    def _send(self, calls: list[list[bytes | str | int]]) -> None:
        for first in range(0, len(calls), PIPELINE):
            pipeline = self.server.pipeline(transaction=False)
            for call in calls[first : first + PIPELINE]:
                pipeline.execute_command(*call)
            pipeline.execute()

    def requests(self, names: list[bytes], turn: int) -> list[LeaseRequest]:
        used = 1 + turn % 2
        return [LeaseRequest(name, MAXIMUM, used, used + 5, used, used, Mode.PLENTY) for name in names]

    def shared(self, in_call: int, turn: int, *, rates: bool) -> None:
        """A call of each sidecar in one partition, with the same names."""
        names = [b"shared-%d" % number for number in range(in_call)]
        asked = [RateRequest(name, MAXIMUM, 1_000_000, MAXIMUM, 1, 5) for name in names] if rates else []
        requests = [] if rates else self.requests(names, turn)
        self._send([self._call(name, 0, requests, asked) for name in self.names])

    def tick(self, own: dict[str, list[list[bytes]]], turn: int) -> None:
        """The calls of all sidecars in all partitions. own: the names of each, in each partition."""
        self._send(
            [
                self._call(name, partition, self.requests(names, turn), [])
                for name, parts in own.items()
                for partition, names in enumerate(parts)
            ]
        )

    def own(self, counters: int) -> dict[str, list[list[bytes]]]:
        found = {name: [[] for _ in range(lease_protocol.PARTITIONS)] for name in self.names}
        for number in range(counters):
            name = b"counter-%d" % number
            found[self.names[number % len(self.names)]][lease_protocol.partition_of(name)].append(name)
        return found


@contextlib.contextmanager
def server(program: str) -> Iterator[redis.Redis]:
    with tempfile.TemporaryDirectory() as directory:
        path = str(Path(directory) / "socket")
        process = subprocess.Popen(
            [program, "--port", "0", "--unixsocket", path, "--save", "", "--dir", directory], stdout=subprocess.DEVNULL
        )
        try:
            begun = time.monotonic()
            while not Path(path).exists():
                if time.monotonic() - begun > START_S:
                    raise TimeoutError(f"{program} does not start")
                time.sleep(0.01)
            with redis.Redis(unix_socket_path=path) as connected:
                connected.function_load(lease_protocol.library())
                yield connected
        finally:
            process.terminate()
            process.wait()


def used(connected: redis.Redis) -> Used:
    calls = connected.info("commandstats").get("cmdstat_fcall", {"calls": 0})["calls"]
    cpu = connected.info("cpu")
    return Used(calls, cpu["used_cpu_user_main_thread"] + cpu["used_cpu_sys_main_thread"], time.monotonic())


def in_calls(sidecars: Sidecars, seconds: float, *, rates: bool) -> None:
    print(f"{('rates' if rates else 'counters') + ' in a call':>20}   us a call   us each")
    empty = 0.0
    for in_call in IN_CALL:
        sidecars.shared(in_call, 0, rates=rates)
        before, turn = used(sidecars.server), 0
        while time.monotonic() - before.clock < seconds:
            turn += 1
            sidecars.shared(in_call, turn, rates=rates)
        after = used(sidecars.server)
        took = (after.thread - before.thread) / (after.calls - before.calls) * US
        empty = empty or took
        each = f"{(took - empty) / in_call:8.1f}" if in_call else ""
        print(f"{in_call:20}  {took:10.1f}  {each}", flush=True)


def ticks(sidecars: Sidecars, counters: int, seconds: float) -> None:
    own = sidecars.own(counters)
    memory = sidecars.server.info("memory")["used_memory"]
    sidecars.tick(own, 0)
    memory = sidecars.server.info("memory")["used_memory"] - memory
    before, turn = used(sidecars.server), 0
    while time.monotonic() - before.clock < seconds:
        turn += 1
        sidecars.tick(own, turn)
    after = used(sidecars.server)
    calls, thread = after.calls - before.calls, after.thread - before.thread
    print(f"a tick of {len(own)} sidecars with {counters} counters: {calls // turn} calls,")
    print(f"  {thread / calls * US:.1f} us each,")
    print(f"  {thread / turn * 1e3:.1f} ms in all: at most {turn / thread:.1f} ticks a second of one thread;")
    print(f"  {memory / counters:.0f} bytes for each counter")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sidecars", type=int, default=100)
    parser.add_argument("--counters", type=int, default=10_000)
    parser.add_argument("--seconds", type=float, default=5.0, help="of each measurement")
    parser.add_argument("--server", default="redis-server", help="the program")
    asked = parser.parse_args()
    with server(asked.server) as connected:
        version = connected.info("server")["redis_version"]
        print(f"{asked.server} {version}, {asked.sidecars} sidecars", flush=True)
        sidecars = Sidecars(connected, asked.sidecars)
        in_calls(sidecars, asked.seconds, rates=False)
        in_calls(sidecars, asked.seconds, rates=True)
        ticks(sidecars, asked.counters, asked.seconds)


if __name__ == "__main__":
    main()
