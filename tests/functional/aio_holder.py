"""A program that holds permits with the client for asyncio, for the tests that fork it, kill it, or let it end.

    python aio_holder.py HOST PORT NAME asyncio|uvloop MODE

It says what it does, a line each. MODE: "hold" holds 2 until it is ended; "fork" does, and a child that uses the same
client as well; "leave" ends inside the hold; "raise" does with an exception; "task" while another task holds.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from pathlib import Path
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


def say(*words: Any) -> None:
    """In one piece: its child says things to the same pipe."""
    os.write(1, f"{' '.join(map(str, words))}\n".encode())


def has_socket(number: int, inode: int) -> bool:
    """Whether this descriptor, or any other of this process, is that of the connection."""
    found = [os.fstat(number).st_ino]
    for path in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # that of the directory
            found.append(path.stat().st_ino)
    return inode in found


async def use_in_the_child() -> None:
    say("sees", await client.get(name))
    async with client.hold(f"{name} child", maximum=9):
        say("has", await client.get(f"{name} child"))
        sys.stdin.read()  # until the test is over


async def hold() -> None:
    async with client.hold(name, 2, maximum=9):
        number = client._link._transport.get_extra_info("socket").fileno()
        inode = os.fstat(number).st_ino
        assert has_socket(number, inode)
        if mode == "fork" and os.fork() == 0:
            say("child", os.getpid(), has_socket(number, inode))
            run(use_in_the_child())
            os._exit(0)
        say("holding", os.getpid())
        while mode in ("hold", "fork"):
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
