"""Work that takes its time, done beside the loop: a function in a thread, while the loop serves.

Floor 4. The thread shares the interpreter with the loop. SWITCH_INTERVAL_S says how long it may keep it while the loop
has something to do; it is for whatever computes in Python, here or in an extension.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")

# Python's own is 5 ms, which every read and write of the loop would wait for. What it costs the thread is a few per
# cent: docs/decisions/0014-extensions.md has the figures. Without such a thread it means nothing.
SWITCH_INTERVAL_S = 0.0001


class NoThread(Exception):
    """The system gives this process no further thread: a limit of processes, or no memory."""


def start_thread(name: str, run: Callable[[], None]) -> threading.Thread:
    """A thread that keeps the process from nothing. Raises NoThread."""
    thread = threading.Thread(target=run, name=name, daemon=True)
    try:
        thread.start()
    except RuntimeError as error:
        raise NoThread(f"no thread can be started: {error}; is there a limit of processes or of memory?") from None
    return thread


async def aside(function: Callable[[], T]) -> T:
    """What the function returns or raises, in a thread that keeps neither the loop nor the process from ending.

    Raises NoThread too.
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()

    def tell(result: Any, error: Exception | None) -> None:
        if done.done():
            return
        if error is not None:
            done.set_exception(error)
        else:
            done.set_result(result)

    def run() -> None:
        result, error = None, None
        try:
            result = function()
        except Exception as raised:  # noqa: BLE001 - it goes to whoever waits
            error = raised
        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(tell, result, error)

    start_thread("aside", run)
    return await done
