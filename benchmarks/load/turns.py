#!/usr/bin/env python3
"""Do processes that wait for the same permits all get their turn, and do the permits rest?

    python benchmarks/load/turns.py [--processes N] [--maximum N] [--hold S] [--seconds S] [--as thread|task|mixed]

Starts a daemon, and processes that take and give back one permit of the same name as fast as they can, each through a
client of its own. `mixed`: half of them do it in two threads, the others in two tasks. Prints the grants and the
longest wait of each process, the smallest number of grants as a part of the largest, and what is ideal: no permit ever
rests, and everybody waits for as long as the others hold. With --hold 0 the ideal is what as many processes as there
are permits do without waiting.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from counterd import client
from counterd.client import aio

NAME = "turns"
START_S = 30.0  # a process is given so long to start
WAYS = {"thread": ("thread", 1), "task": ("task", 1), "threads": ("thread", 2), "tasks": ("task", 2)}  # and how many


class Job(NamedTuple):
    """What each process does. seconds: for how long; hold: how long it keeps each permit."""

    path: str
    maximum: int
    hold: float
    seconds: float


class Result(NamedTuple):
    grants: int
    longest_wait: float  # seconds


def take_turns(job: Job, asking: client.Client) -> Result:
    grants, longest = 0, 0.0
    end = time.monotonic() + job.seconds
    while (asked := time.monotonic()) < end:
        with asking.hold(NAME, maximum=job.maximum):
            longest = max(longest, time.monotonic() - asked)
            if job.hold:
                time.sleep(job.hold)
        grants += 1
    return Result(grants, longest)


async def take_turns_async(job: Job, asking: aio.Client) -> Result:
    grants, longest = 0, 0.0
    end = time.monotonic() + job.seconds
    while (asked := time.monotonic()) < end:
        async with asking.hold(NAME, maximum=job.maximum):
            longest = max(longest, time.monotonic() - asked)
            if job.hold:
                await asyncio.sleep(job.hold)
        grants += 1
    return Result(grants, longest)


def in_threads(job: Job, count: int) -> list[Result]:
    with client.Client(path=job.path) as asking, ThreadPoolExecutor(count) as pool:
        return [each.result() for each in [pool.submit(take_turns, job, asking) for _ in range(count)]]


async def in_tasks(job: Job, count: int) -> list[Result]:
    async with aio.Client(path=job.path) as asking:
        return await asyncio.gather(*(take_turns_async(job, asking) for _ in range(count)))


def work(job: Job, way: str, begin: Any, results: Any) -> None:
    begin.wait(START_S)
    kind, count = WAYS[way]
    found = asyncio.run(in_tasks(job, count)) if kind == "task" else in_threads(job, count)
    results.put(Result(sum(each.grants for each in found), max(each.longest_wait for each in found)))


def measure(job: Job, ways: list[str]) -> list[Result]:
    """The result of each process; all begin together."""
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
    print("longest wait ", *(f"{each.longest_wait * 1000:>5.0f}ms" for each in found))
    grants, waiters = [each.grants for each in found], sum(WAYS[way][1] for way in ways)
    if job.hold:
        total = job.seconds / job.hold * min(job.maximum, waiters)
        wait = max(waiters / job.maximum - 1, 0) * job.hold
        slowest = max(each.longest_wait for each in found)
        print(f"longest wait: {slowest / wait:.2f} times the ideal" if wait else "nobody waits")
    else:
        alone = [WAYS[way][0] for way in ways[: job.maximum]]  # one at a time in each
        total = sum(each.grants for each in measure(job, alone))
    print(f"smallest / largest: {min(grants) / max(grants):.2f}; all together: {sum(grants) / total:.0%} of the ideal")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--processes", type=int, default=6)
    parser.add_argument("--maximum", type=int, default=2, help="permits")
    parser.add_argument("--hold", type=float, default=0.05, help="seconds that a permit is kept")
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--as", dest="way", choices=["thread", "task", "mixed"], default="thread")
    options = parser.parse_args()
    mixed = ["threads", "tasks"] * options.processes
    ways = mixed[: options.processes] if options.way == "mixed" else [options.way] * options.processes
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/socket"
        settings = ("counter.bind=127.0.0.1", "counter.port=0", f"counter.socket={path}")
        command = [sys.executable, "-m", "counterd", *(word for setting in settings for word in ("--set", setting))]
        with subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as daemon:
            try:
                while not Path(path).exists() and daemon.poll() is None:
                    time.sleep(0.01)
                job = Job(path, options.maximum, options.hold, options.seconds)
                report(job, ways, measure(job, ways))
            finally:
                daemon.terminate()


if __name__ == "__main__":
    main()
