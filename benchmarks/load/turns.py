#!/usr/bin/env python3
"""Do processes that wait for the same permits all get their turn, and do the permits rest?

    python benchmarks/load/turns.py [--processes N] [--maximum N] [--hold S] [--seconds S] [--as thread|task|mixed]
                                    [--with counterd|redis|socket]

Starts a server, and processes that take and give back one permit of the same name as fast as they can, each through a
client of its own. `mixed`: half of them do it in two threads, the others in two tasks. With redis, permits are the
elements of a list, with BLPOP and RPUSH of redis-py. With socket, plain sockets ask counterd for what its client asks:
the server, the kernel and time.sleep() remain. The processes begin before the measured time, and end after it, because
starting and ending take processor time too.

Prints the grants and the longest wait of each process, the smallest number of grants as a part of the largest, and what
is ideal: no permit ever rests, and everybody waits for as long as the others hold. With --hold 0 the processor is the
limit, so two other runs show what is possible: as many processes as there are permits, and all processes with a permit
each. Nobody waits in these.

On a busy machine, others delay each hand-on. `chrt -r 1 python benchmarks/load/turns.py` (as root) shows what remains
if this run goes first.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import multiprocessing
import socket
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import redis
from redis import asyncio as redis_asyncio

from counterd import client
from counterd.client import aio
from counterd.protocols.counter import wire

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

NAME = "turns"
START_S = 30.0  # a process is given so long to start
GRANT_SIZE = wire.HEADER_SIZE + 12
AROUND_S = 0.3  # for which processes take turns before the measured time, and after it
WAYS = {"thread": ("thread", 1), "task": ("task", 1), "threads": ("thread", 2), "tasks": ("task", 2)}  # and how many


class Job(NamedTuple):
    """What each process does. seconds: for how long it is measured; hold: how long it keeps each permit."""

    server: str
    path: str
    maximum: int
    hold: float
    seconds: float


class Result(NamedTuple):
    grants: int
    longest_wait: float  # seconds


class Tally:
    """The grants of one thread or task in the measured time."""

    def __init__(self, job: Job) -> None:
        self._since = time.monotonic() + AROUND_S
        self._until = self._since + job.seconds
        self._grants, self._longest_wait = 0, 0.0

    def goes_on(self) -> bool:
        return time.monotonic() < self._until + AROUND_S

    def granted(self, asked: float) -> None:
        """asked: when, by the monotonic clock."""
        now = time.monotonic()
        if self._since <= now < self._until:
            self._grants += 1
            self._longest_wait = max(self._longest_wait, now - asked)

    def result(self) -> Result:
        return Result(self._grants, self._longest_wait)


# ---- the two servers ----


class Bare:
    """A socket for one thread."""

    def __init__(self, job: Job) -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.connect(job.path)
        self._take = wire.take(1, [wire.Permit(NAME.encode(), 1, job.maximum)], wire.U32_MAX)
        self._release = wire.release(2, NAME.encode(), 1)

    def __enter__(self) -> Bare:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    @contextlib.contextmanager
    def hold(self, *_: Any, **__: Any) -> Iterator[None]:
        self._ask(self._take, GRANT_SIZE)
        try:
            yield
        finally:
            self._ask(self._release, wire.HEADER_SIZE)

    def _ask(self, request: bytes, size: int) -> None:
        self._socket.sendall(request)
        if len(self._socket.recv(1000)) != size:
            raise RuntimeError("the server did not answer as it should")


def connected(job: Job) -> Any:
    if job.server == "redis":
        return redis.Redis(unix_socket_path=job.path)
    return Bare(job) if job.server == "socket" else client.Client(path=job.path)


def connected_async(job: Job) -> Any:
    if job.server == "redis":
        return redis_asyncio.Redis(unix_socket_path=job.path)
    return aio.Client(path=job.path)


@contextlib.contextmanager
def held(job: Job, asking: Any) -> Iterator[None]:
    asking.blpop(NAME)
    try:
        yield
    finally:
        asking.rpush(NAME, "permit")


@contextlib.asynccontextmanager
async def held_async(job: Job, asking: Any) -> AsyncIterator[None]:
    await asking.blpop(NAME)
    try:
        yield
    finally:
        await asking.rpush(NAME, "permit")


def hold_of(job: Job, asking: Any, of_redis: Any) -> Any:
    return of_redis(job, asking) if job.server == "redis" else asking.hold(NAME, maximum=job.maximum)


@contextlib.contextmanager
def serving(server: str) -> Iterator[str]:
    """Runs a server during the block. Yields the path of its socket."""
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/socket"
        if server == "redis":
            command = ["redis-server", "--port", "0", "--unixsocket", path, "--save", ""]
        else:
            settings = ("counter.bind=127.0.0.1", "counter.port=0", f"counter.socket={path}")
            command = [sys.executable, "-m", "counterd", *(word for setting in settings for word in ("--set", setting))]
        quiet = subprocess.DEVNULL
        with subprocess.Popen(command, stdin=quiet, stdout=quiet, stderr=quiet) as process:
            try:
                while not Path(path).exists() and process.poll() is None:
                    time.sleep(0.01)
                yield path
            finally:
                process.terminate()


# ---- taking turns ----


def take_turns(job: Job, asking: Any) -> Result:
    tally = Tally(job)
    while tally.goes_on():
        asked = time.monotonic()
        with hold_of(job, asking, held):
            tally.granted(asked)
            if job.hold:
                time.sleep(job.hold)
    return tally.result()


async def take_turns_async(job: Job, asking: Any) -> Result:
    tally = Tally(job)
    while tally.goes_on():
        asked = time.monotonic()
        async with hold_of(job, asking, held_async):
            tally.granted(asked)
            if job.hold:
                await asyncio.sleep(job.hold)
    return tally.result()


def in_threads(job: Job, count: int) -> list[Result]:
    with connected(job) as asking, ThreadPoolExecutor(count) as pool:
        return [each.result() for each in [pool.submit(take_turns, job, asking) for _ in range(count)]]


async def in_tasks(job: Job, count: int) -> list[Result]:
    async with connected_async(job) as asking:
        return await asyncio.gather(*(take_turns_async(job, asking) for _ in range(count)))


def work(job: Job, way: str, begin: Any, results: Any) -> None:
    begin.wait(START_S)
    kind, count = WAYS[way]
    found = asyncio.run(in_tasks(job, count)) if kind == "task" else in_threads(job, count)
    results.put(Result(sum(each.grants for each in found), max(each.longest_wait for each in found)))


def measure(job: Job, ways: list[str]) -> list[Result]:
    """The result of each process; all begin together."""
    if job.server == "redis":
        with connected(job) as asking:
            asking.delete(NAME)
            asking.rpush(NAME, *["permit"] * job.maximum)
    spawning = multiprocessing.get_context("spawn")
    begin, results = spawning.Barrier(len(ways)), spawning.SimpleQueue()
    crowd = [spawning.Process(target=work, args=(job, way, begin, results)) for way in ways]
    for process in crowd:
        process.start()
    found = [results.get() for _ in crowd]
    for process in crowd:
        process.join()
    return found


def report(job: Job, ways: list[str], found: list[Result]) -> None:
    print("grants       ", *(f"{each.grants:>7}" for each in found))
    print("longest wait ", *(f"{each.longest_wait * 1000:>5.1f}ms" for each in found))
    grants, waiters = [each.grants for each in found], sum(WAYS[way][1] for way in ways)
    print(f"smallest / largest: {min(grants) / max(grants):.2f}")
    if job.hold:
        wait = max(waiters / job.maximum - 1, 0) * job.hold
        slowest = max(each.longest_wait for each in found)
        print(f"longest wait: {slowest / wait:.2f} times the ideal" if wait else "nobody waits")
        total = job.seconds / job.hold * min(job.maximum, waiters)
        print(f"all together: {sum(grants) / total:.1%} of the ideal")
        return
    few = [WAYS[way][0] for way in ways[: job.maximum]]  # one at a time in each
    for who, alone in (
        (f"{len(few)} processes, which have the permits for themselves", measure(job, few)),
        (f"{len(ways)} processes, each with permits of its own", measure(job._replace(maximum=waiters), ways)),
    ):
        total = sum(each.grants for each in alone)
        print(f"all together: {sum(grants) / total:.1%} of the {total:,} of {who}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--processes", type=int, default=6)
    parser.add_argument("--maximum", type=int, default=2, help="permits")
    parser.add_argument("--hold", type=float, default=0.05, help="seconds that a permit is kept")
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--as", dest="way", choices=["thread", "task", "mixed"], default="thread")
    parser.add_argument("--with", dest="server", choices=["counterd", "redis", "socket"], default="counterd")
    options = parser.parse_args()
    if options.server == "socket" and options.way != "thread":
        parser.error("--with socket is for one thread in each process")
    mixed = ["threads", "tasks"] * options.processes
    ways = mixed[: options.processes] if options.way == "mixed" else [options.way] * options.processes
    with serving(options.server) as path:
        job = Job(options.server, path, options.maximum, options.hold, options.seconds)
        report(job, ways, measure(job, ways))


if __name__ == "__main__":
    main()
