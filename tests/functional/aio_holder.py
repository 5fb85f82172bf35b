"""A program that holds permits with the client for asyncio, for tests that kill it, or let it end.

    python aio_holder.py HOST PORT NAME asyncio|uvloop MODE

It prints when it holds. MODE: "hold" holds 2 until it is ended; "leave" ends inside the hold; "raise" does with
an exception; "task" while another task holds."""

from __future__ import annotations

import asyncio
import os
import sys
from typing import TYPE_CHECKING, Any

from counterd.client import aio
from kit.loops import NEW_LOOP

if TYPE_CHECKING:
    from collections.abc import Coroutine

host, port, name, loop_name, mode = sys.argv[1:]
client = aio.Client(host, int(port))


def run(main: Coroutine[Any, Any, None]) -> None:
    """As asyncio.run(), which takes a kind of loop in Python 3.12 only."""
    loop = NEW_LOOP[loop_name]()
    asyncio.set_event_loop(loop)
    try:
        loop.run_until_complete(main)
    finally:
        for task in asyncio.all_tasks(loop):
            task.cancel()
            loop.run_until_complete(asyncio.wait([task]))
        loop.close()


async def hold() -> None:
    async with client.hold(name, 2, maximum=9):
        print("holding", os.getpid(), flush=True)
        while mode == "hold":
            await client.noop()
            await asyncio.sleep(0.01)
        if mode == "raise":
            raise KeyError("inside")
        if mode == "leave":
            sys.exit(0)


async def hold_in_a_task() -> None:
    task = asyncio.ensure_future(client.hold(name, 2, maximum=9).__aenter__())
    await task
    inside = asyncio.ensure_future(hold())
    await asyncio.wait([inside], timeout=0.05)


run(hold_in_a_task() if mode == "task" else hold())
