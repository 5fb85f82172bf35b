"""What a Python program gets of a client: counterd's own beside redis-py with hiredis, each with its own server.

An acquire and its release are two calls, as an INCR and its DECR are. Each function takes a server that runs and a
count, and gives {figure: number}, its unit last in the name. It works in a process of its own.
"""

from __future__ import annotations

import asyncio
import functools
import resource
import time
from pathlib import Path
from typing import TYPE_CHECKING

import redis
import uvloop
from redis import asyncio as redis_asyncio

from counterd.client import Client, aio
from peers import edges

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine

    from peers.servers import Server

TASKS = 100
MAXIMUM = 1000  # more than there are tasks: nobody waits
WATCHED_S = 3.0
FIGURES = ("calls/s", "client CPU us")


def calls(server: Server, count: int) -> dict[str, float]:
    """One thread, one call after the other."""
    return dict(zip(FIGURES, edges.report_of(functools.partial(_calls, server, count)), strict=True))


def tasks(server: Server, count: int) -> dict[str, float]:
    """A hundred tasks of asyncio's own loop, which share counterd's connection, or redis-py's pool."""
    return dict(zip(FIGURES, edges.report_of(functools.partial(_tasks, server, count, asyncio.run)), strict=True))


def uvloop_tasks(server: Server, count: int) -> dict[str, float]:
    """The same, with uvloop."""
    return dict(zip(FIGURES, edges.report_of(functools.partial(_tasks, server, count, uvloop.run)), strict=True))


def waiters(server: Server, count: int) -> dict[str, float]:
    """So many tasks wait for permits of one name, while nothing is free: what that costs the server and the loop."""
    found = edges.report_of(lambda: asyncio.run(_waiters(server, count)))
    return dict(zip(("asked/s", "loop held up ms", "bytes each"), found, strict=True))


KINDS = {"calls": calls, "tasks": tasks, "uvloop tasks": uvloop_tasks, "waiters": waiters}


def _calls(server: Server, count: int) -> list[float]:
    if server.protocol == "counter":
        with Client(port=server.port) as client:
            acquire = functools.partial(client.acquire, "limited", maximum=MAXIMUM)
            return _timed(acquire, functools.partial(client.release, "limited"), count)
    peer = redis.Redis(port=server.port)
    return _timed(functools.partial(peer.incr, "limited"), functools.partial(peer.decr, "limited"), count)


def _timed(acquire: Callable[[], object], release: Callable[[], object], count: int) -> list[float]:
    acquire()
    release()
    start, cpu = time.perf_counter(), time.process_time()
    for _ in range(count // 2):
        acquire()
        release()
    return _rates(count, start, cpu)


def _tasks(server: Server, count: int, run: Callable[[Coroutine[None, None, list[float]]], list[float]]) -> list[float]:
    return run(_with_counterd(server, count) if server.protocol == "counter" else _with_redis(server, count))


async def _with_counterd(server: Server, count: int) -> list[float]:
    async with aio.Client(port=server.port) as client:
        return await _timed_tasks(
            functools.partial(client.acquire, "limited", maximum=MAXIMUM),
            functools.partial(client.release, "limited"),
            count,
        )


async def _with_redis(server: Server, count: int) -> list[float]:
    peer = redis_asyncio.Redis(port=server.port)
    try:
        return await _timed_tasks(
            functools.partial(peer.incr, "limited"), functools.partial(peer.decr, "limited"), count
        )
    finally:
        await peer.aclose()


async def _timed_tasks(
    acquire: Callable[[], Awaitable[object]], release: Callable[[], Awaitable[object]], count: int
) -> list[float]:
    async def work(pairs: int) -> None:
        for _ in range(pairs):
            await acquire()
            await release()

    async def all_of_them(pairs: int) -> None:
        await asyncio.gather(*(work(pairs) for _ in range(TASKS)))

    await all_of_them(1)  # which opens the connections
    pairs = max(1, count // TASKS // 2)
    start, cpu = time.perf_counter(), time.process_time()
    await all_of_them(pairs)
    return _rates(pairs * 2 * TASKS, start, cpu)


def _rates(count: int, start: float, cpu: float) -> list[float]:
    return [count / (time.perf_counter() - start), (time.process_time() - cpu) / count * 1e6]


async def _waiters(server: Server, count: int) -> list[float]:
    async with aio.Client(port=server.port) as holder, aio.Client(port=server.port) as client:
        await holder.acquire("limited", maximum=1)
        before = _resident()
        waiting = [asyncio.create_task(_wait(client)) for _ in range(count)]
        await asyncio.sleep(1)
        size = _resident() - before
        asked = int((await client.stats())["command:acquire"])
        held_up, end = 0.0, time.perf_counter() + WATCHED_S
        while (start := time.perf_counter()) < end:
            await asyncio.sleep(0.001)
            held_up = max(held_up, time.perf_counter() - start - 0.001)
        asked = int((await client.stats())["command:acquire"]) - asked
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
    return [asked / WATCHED_S, held_up * 1e3, size / count]


async def _wait(client: aio.Client) -> None:
    async with client.hold("limited", maximum=1):
        raise RuntimeError("a permit that another holds was granted")


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
