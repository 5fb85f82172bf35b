#!/usr/bin/env python3
"""Do processes that wait for the same permits all get their turn?

    python benchmarks/load/turns.py [--processes N] [--maximum N] [--hold S] [--seconds S] [--asyncio]

Starts a daemon, and processes that take and give back one permit of the same name as fast as they can, each through a
client of its own. Prints the grants and the longest wait of each process, and the smallest number of grants as a part
of the largest. How clients let each other go first: src/counterd/client/_tenure.py.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

from counterd import client
from counterd.client import aio

NAME = "turns"
START_S = 30.0  # a process is given so long to start


class Job(NamedTuple):
    """What each process does. seconds: for how long; hold: how long it keeps each permit."""

    path: str
    maximum: int
    hold: float
    seconds: float


class Result(NamedTuple):
    grants: int
    longest_wait: float  # seconds


def take_turns(job: Job) -> Result:
    grants, longest = 0, 0.0
    with client.Client(path=job.path) as asking:
        end = time.monotonic() + job.seconds
        while (asked := time.monotonic()) < end:
            with asking.hold(NAME, maximum=job.maximum):
                longest = max(longest, time.monotonic() - asked)
                time.sleep(job.hold)
            grants += 1
    return Result(grants, longest)


async def take_turns_async(job: Job) -> Result:
    grants, longest = 0, 0.0
    async with aio.Client(path=job.path) as asking:
        end = time.monotonic() + job.seconds
        while (asked := time.monotonic()) < end:
            async with asking.hold(NAME, maximum=job.maximum):
                longest = max(longest, time.monotonic() - asked)
                await asyncio.sleep(job.hold)
            grants += 1
    return Result(grants, longest)


def work(job: Job, is_async: bool, begin: Any, results: Any) -> None:
    begin.wait(START_S)
    results.put(asyncio.run(take_turns_async(job)) if is_async else take_turns(job))


def measure(job: Job, processes: int, is_async: bool) -> list[Result]:
    """The result of each process; all begin together."""
    spawning = multiprocessing.get_context("spawn")
    begin, results = spawning.Barrier(processes), spawning.SimpleQueue()
    crowd = [spawning.Process(target=work, args=(job, is_async, begin, results)) for _ in range(processes)]
    for process in crowd:
        process.start()
    found = [results.get() for _ in crowd]
    for process in crowd:
        process.join()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--processes", type=int, default=6)
    parser.add_argument("--maximum", type=int, default=2, help="permits")
    parser.add_argument("--hold", type=float, default=0.05, help="seconds that a permit is kept")
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--asyncio", action="store_true", help="use the asyncio client")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/socket"
        settings = ("counter.bind=127.0.0.1", "counter.port=0", f"counter.socket={path}")
        command = [sys.executable, "-m", "counterd", *(word for setting in settings for word in ("--set", setting))]
        with subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as daemon:
            try:
                while not Path(path).exists() and daemon.poll() is None:
                    time.sleep(0.01)
                job = Job(path, options.maximum, options.hold, options.seconds)
                found = measure(job, options.processes, options.asyncio)
            finally:
                daemon.terminate()
    print("grants       ", *(f"{each.grants:>6}" for each in found))
    print("longest wait ", *(f"{each.longest_wait:>5.2f}s" for each in found))
    grants = [each.grants for each in found]
    ideal = options.seconds / options.hold * min(options.maximum, options.processes)
    print(f"smallest / largest: {min(grants) / max(grants):.2f}; all together: {sum(grants) / ideal:.0%} of the ideal")


if __name__ == "__main__":
    main()
