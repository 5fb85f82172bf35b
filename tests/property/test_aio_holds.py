"""Random programs of asyncio's client over a server in memory, with random delays, cuts and cancellations.

Whatever happens: no more is held than there is, nobody waits while something is free and nothing is under way, nobody
waits for ever, nothing is given back twice, and in the end nothing is held.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import Counter
from typing import TYPE_CHECKING, Any

from hypothesis import given, settings
from hypothesis import strategies as st

from counterd.client import aio
from counterd.errors import CounterdError
from kit import memory

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

NAMES = ["a", "b"]
# After a cut, who waits finds out what became free when it asks again: an eighth of a second, and a connection.
ASKS_AGAIN_S = 0.5

programs = st.lists(
    st.fixed_dictionaries(
        {
            "name": st.sampled_from(NAMES),
            "how": st.sampled_from(["hold", "reacquire", "acquire", "pipeline", "semaphore"]),
            "begins": st.floats(0, 0.05),
            "takes": st.floats(0, 0.05),
            "timeout": st.one_of(st.none(), st.floats(0, 0.05)),
            "cancelled": st.one_of(st.none(), st.floats(0, 0.1)),
        }
    ),
    min_size=1,
    max_size=12,
)


class Program:
    """Tasks that use one client, each as it was drawn."""

    def __init__(self, seed: int, maximum: int, cuts: list[float], room: int | None) -> None:
        self.loop = memory.Loop()
        self.client = aio.Client(timeout=0.02)  # less than an answer may take
        self.maximum = maximum
        self.inside: dict[Any, bytes] = {}
        self.waiting: list[bytes] = []  # the names of those that wait for a block to begin
        self.cut_at = -1.0
        server, chance = self.loop.server, random.Random(seed)
        server.has_takes, server.room = room is not None, room or 0
        server.delay = lambda: chance.choice([0, 0.0001, 0.001, 0.015])
        server.split = lambda size: chance.randint(0, size)
        self.loop.on_idle = self.check
        for when in cuts:
            self.loop.call_at(when, self.cut)

    def cut(self) -> None:
        self.cut_at = self.loop.now
        for pipe in self.loop.server.pipes:
            pipe.cut(ConnectionResetError("cut"))

    def check(self) -> None:
        held = Counter(name for hold, name in self.inside.items() if not hold.lost)
        assert all(count <= self.maximum for count in held.values()), held
        server = self.loop.server
        is_quiet = not server.in_flight and any(not pipe.closed for pipe in server.pipes)
        if is_quiet and self.loop.now - self.cut_at > ASKS_AGAIN_S:
            free = [name for name in self.waiting if server.used[name] < self.maximum]
            assert free == [], "somebody waits for what is free"

    @contextlib.asynccontextmanager
    async def waited(self, block: Any, name: str) -> AsyncIterator[Any]:
        """Does as the block does. Its name is in `waiting` until it begins."""
        async with contextlib.AsyncExitStack() as stack:
            self.waiting.append(name.encode())
            try:
                entered = await stack.enter_async_context(block)
            finally:
                self.waiting.remove(name.encode())
            yield entered

    async def task(self, drawn: dict[str, Any]) -> None:
        await asyncio.sleep(drawn["begins"])
        name, how, client = drawn["name"], drawn["how"], self.client
        if how in ("hold", "reacquire"):
            on_lost = "reacquire" if how == "reacquire" else "raise"
            block: Any = client.hold(name, maximum=self.maximum, timeout=drawn["timeout"], on_lost=on_lost)  # type: ignore[arg-type]
            async with self.waited(block, name) as hold:
                self.inside[hold] = name.encode()
                try:
                    await asyncio.sleep(drawn["takes"])
                finally:
                    del self.inside[hold]
        elif how == "semaphore":
            async with self.waited(client.semaphore(name, self.maximum), name):
                await asyncio.sleep(drawn["takes"])
        elif how == "acquire":
            await client.acquire(name, maximum=self.maximum)
            pipe = self.loop.server.pipes[-1]
            try:
                await asyncio.sleep(drawn["takes"])
            finally:
                if not pipe.closed:  # else another connection would give back what a hold has
                    await client.release(name)
        else:
            got = await client.pipeline().acquire(name, maximum=self.maximum).get(name).execute()
            if got[0] == 1:
                await client.release(name)

    async def one(self, drawn: dict[str, Any]) -> None:
        task = asyncio.ensure_future(self.task(drawn))
        if drawn["cancelled"] is not None:
            self.loop.call_later(drawn["cancelled"], task.cancel)
        with contextlib.suppress(CounterdError, asyncio.CancelledError):
            await task

    async def main(self, tasks: list[dict[str, Any]]) -> None:
        await asyncio.gather(*(self.one(drawn) for drawn in tasks))
        for _ in range(3):  # after what late answers made it give back
            with contextlib.suppress(CounterdError):
                await self.client.noop()
            await asyncio.sleep(0.1)
        assert +self.loop.server.used == Counter()
        assert self.loop.server.waiting == []
        assert self.cut_at >= 0 or self.loop.server.not_acquired == 0, "something was given back twice"
        self.loop.server.delay = lambda: 0.001
        await asyncio.sleep(0.1)  # until nothing is under way
        for name in NAMES:  # nobody is left in the queue of the client: then this would wait
            async with self.client.hold(name, maximum=self.maximum, timeout=ASKS_AGAIN_S):
                pass
        await self.client.close()


@settings(max_examples=200, deadline=None)
@given(
    programs,
    st.integers(0, 2**32),
    st.integers(1, 3),
    st.lists(st.floats(0, 0.1), max_size=3),
    st.sampled_from([None, 0, 1, 2, 12]),
)
def test_whatever_happens(
    tasks: list[dict[str, Any]], seed: int, maximum: int, cuts: list[float], room: int | None
) -> None:
    """room: how many Takes may wait in the server; None: it knows none."""
    program = Program(seed, maximum, cuts, room)
    program.loop.run(program.main(tasks))
