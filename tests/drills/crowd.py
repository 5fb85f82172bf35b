"""Clients that acquire, hold and release all the time and record what they were granted, in a process beside a
drill.

Each is a `counterd.client.aio.Client` with a connection of its own, half of them over TLS, half over the Unix
socket. It keeps some permits throughout, takes and releases others as fast as it is answered, and records each
grant. Additional clients connect for each acquire, and disconnect every other time without a release."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import multiprocessing
import random
import statistics
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import uvloop

from counterd.client import aio
from counterd.errors import ConnectionLost, CounterdError, NotAvailable
from kit.machine import PATIENCE

if TYPE_CHECKING:
    import ssl
    from collections.abc import Callable, Iterator
    from multiprocessing.connection import Connection

WORKERS = 12
COMERS = 2
THINK_S = 0.002  # between two requests of one client: the clients' own core is not full
COME_S = 0.005  # between two of one that comes and goes
KEPT = 3  # permits that each keeps until it is told to let go
NAMES = [b"drill %d" % number for number in range(20)]
MAXIMUM = 10  # of each: less than they would take
HELD_MAX = 20  # of one client, besides what it keeps
DRAINING = "Draining"


@dataclass
class Figures:
    """Figures of a period: seconds; requests answered, and how; p50_ms to longest_ms of these; clients that came and
    went.

    granted, released, refused, draining: numbers of such answers. failed: requests with a wrong answer, or none. cut:
    clients whose connection was lost, lost: permits that they held then. last_release: when, monotonic.
    """

    seconds: float = 0.0
    requests: int = 0
    p50_ms: float = 0.0
    p99_ms: float = 0.0
    longest_ms: float = 0.0
    came: int = 0
    granted: int = 0
    released: int = 0
    refused: int = 0
    draining: int = 0
    cut: int = 0
    lost: int = 0
    last_release: float = 0.0
    failed: tuple[str, ...] = ()

    @property
    def rate(self) -> float:
        return self.requests / self.seconds


@dataclass(frozen=True)
class Held:
    """permits: by name, of all clients. holdings: pairs of a client and a name. clients: those that are connected."""

    permits: dict[bytes, int]
    holdings: int
    clients: int


class Member:
    """One client, and its record of what it holds."""

    def __init__(self, client: aio.Client) -> None:
        self.client = client
        self.held: collections.Counter[bytes] = collections.Counter()
        self.letting_go = False
        self.has_ended = False


class Crowd:
    """The side of the process, in which everything runs in one event loop."""

    def __init__(self, open_client: Callable[[int], aio.Client]) -> None:
        self._open_client = open_client
        self._members: list[Member] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._going = asyncio.Event()
        self._are_coming = True
        self._under_way = 0
        self._counts: collections.Counter[str] = collections.Counter()
        self._latencies: list[float] = []
        self._failed: list[str] = []
        self._last_release = 0.0
        self._since = time.monotonic()

    async def start(self) -> None:
        """Connects all clients, and lets each acquire the permits that it keeps."""
        self._members += [Member(self._open_client(number)) for number in range(WORKERS)]
        await asyncio.gather(*map(self._keep, self._members))
        self._tasks += [asyncio.create_task(self._work(member)) for member in self._members]
        self._tasks += [asyncio.create_task(self._come_and_go(number)) for number in range(COMERS)]
        self._going.set()

    def mark(self) -> Figures:
        """Returns the figures since the last call."""
        now, taken = time.monotonic(), self._latencies
        figures = Figures(
            seconds=now - self._since,
            requests=len(taken),
            p50_ms=1e3 * statistics.median(taken or [0.0]),
            p99_ms=1e3 * statistics.quantiles(taken, n=100)[98] if len(taken) > 1 else 0.0,
            longest_ms=1e3 * max(taken, default=0.0),
            last_release=self._last_release,
            failed=tuple(self._failed),
            **self._counts,
        )
        self._since, self._latencies = now, []
        self._failed.clear()
        self._counts.clear()
        return figures

    async def pause(self) -> Held:
        """Waits until no request is pending, and returns what all clients hold."""
        self._going.clear()
        while self._under_way:  # noqa: ASYNC110 - for a moment, and not often
            await asyncio.sleep(0.001)
        permits: collections.Counter[bytes] = collections.Counter()
        for member in self._members:
            permits.update(member.held)
        holdings = sum(amount > 0 for member in self._members for amount in member.held.values())
        return Held(dict(+permits), holdings, sum(not member.has_ended for member in self._members))

    def resume(self) -> None:
        self._going.set()

    def come(self, are_coming: bool) -> None:
        """Starts or stops the clients that come and go."""
        self._are_coming = are_coming

    def let_go(self) -> None:
        """Makes all clients release everything from now on."""
        for member in self._members:
            member.letting_go = True

    async def hang_up(self) -> None:
        """Ends all clients, with their holdings."""
        await self.pause()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.gather(*(member.client.close() for member in self._members))
        self._members.clear()

    # ---- inside ----

    @contextlib.contextmanager
    def _step(self) -> Iterator[None]:
        self._under_way += 1
        try:
            yield
        finally:
            self._under_way -= 1

    async def _keep(self, member: Member) -> None:
        for number in range(KEPT):
            await self._acquire(member, b"kept %d" % number, WORKERS)

    async def _work(self, member: Member) -> None:
        while not member.has_ended:
            await self._going.wait()
            with self._step():
                await self._ask(member)
            await asyncio.sleep(THINK_S)

    async def _ask(self, member: Member) -> None:
        held = +member.held
        churned = [name for name in held if member.letting_go or name in NAMES]
        begun = time.perf_counter()
        try:
            if churned and (member.letting_go or held.total() >= HELD_MAX + KEPT or random.random() < 0.5):
                await self._release(member, random.choice(churned))
            else:
                await self._acquire(member, random.choice(NAMES), MAXIMUM)
        except NotAvailable as error:
            self._counts["draining" if error.text == DRAINING else "refused"] += 1
        except ConnectionLost as error:
            member.has_ended = True
            self._counts["cut"] += 1
            self._counts["lost"] += held.total()
            self._failed.append(str(error))
            member.held.clear()
            return
        except CounterdError as error:
            self._failed.append(f"{type(error).__name__}: {error}")
        self._latencies.append(time.perf_counter() - begun)

    async def _acquire(self, member: Member, name: bytes, maximum: int) -> None:
        member.held[name] += await member.client.acquire(name, 1, maximum=maximum)
        self._counts["granted"] += 1

    async def _release(self, member: Member, name: bytes) -> None:
        await member.client.release(name, 1)
        member.held[name] -= 1
        self._counts["released"] += 1
        self._last_release = time.monotonic()

    async def _come_and_go(self, number: int) -> None:
        for serial in range(1 << 62):
            await self._going.wait()
            if self._are_coming:
                with self._step():
                    await self._visit(number, leaves_at_once=serial % 2 == 0)
            await asyncio.sleep(COME_S)

    async def _visit(self, number: int, leaves_at_once: bool) -> None:
        name = random.choice(NAMES)
        try:
            async with self._open_client(number) as client:
                try:
                    await client.acquire(name, 1, maximum=MAXIMUM)
                    if not leaves_at_once:
                        await client.release(name, 1)
                except NotAvailable:
                    pass
            self._counts["came"] += 1
        except CounterdError as error:
            self._failed.append(f"coming: {type(error).__name__}: {error}")


class Handle:
    """The drill's side. Each method of Crowd is a call here, and takes as long."""

    def __init__(self, path: str, port: int, context: ssl.SSLContext) -> None:
        """Starts the process; over TLS with that context. It is a fork: the caller has no threads."""
        forking = multiprocessing.get_context("fork")
        self._pipe, theirs = forking.Pipe()
        self._process = forking.Process(target=_run, args=(theirs, path, port, context), daemon=True)
        self._process.start()
        theirs.close()
        self._pipe.recv()

    def call(self, method: str, *arguments: Any) -> Any:
        self._pipe.send((method, arguments))
        if not self._pipe.poll(PATIENCE):
            raise RuntimeError(f"the clients do not answer: {method}")
        return self._pipe.recv()

    def measure(self, seconds: float) -> Figures:
        """Returns the figures of so many seconds from now."""
        self.call("mark")
        time.sleep(seconds)
        return self.call("mark")

    def end(self) -> None:
        self._process.kill()
        self._process.join()
        self._pipe.close()


def _run(pipe: Connection, path: str, port: int, context: ssl.SSLContext) -> None:
    def open_client(number: int) -> aio.Client:
        if number % 2:
            return aio.Client(path=path, timeout=PATIENCE)
        return aio.Client("127.0.0.1", port, tls=context, timeout=PATIENCE)

    async def serve() -> None:
        crowd = Crowd(open_client)
        await crowd.start()
        crowd.mark()
        pipe.send("ready")
        asked = asyncio.Event()
        asyncio.get_running_loop().add_reader(pipe.fileno(), asked.set)
        with contextlib.suppress(EOFError):
            while True:
                await asked.wait()
                asked.clear()
                while pipe.poll():
                    method, arguments = pipe.recv()
                    answer = getattr(crowd, method)(*arguments)
                    pipe.send(await answer if asyncio.iscoroutine(answer) else answer)

    loop = uvloop.new_event_loop()
    asyncio.set_event_loop(loop)
    loop.run_until_complete(serve())
