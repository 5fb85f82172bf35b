"""Runs slow functions in a thread, while the event loop serves requests.

Floor 4 (ARCHITECTURE.md). The thread shares the Python interpreter with the event loop. SWITCH_INTERVAL_S limits how
long a thread that computes in Python, here or in an extension, may keep the interpreter while the loop has work.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")

# With Python's default, 5 ms, every read and write of the loop would wait that long. The shorter interval slows the
# thread by a few per cent (docs/decisions/0014-extensions.md). It has no effect without such a thread.
SWITCH_INTERVAL_S = 0.0001


class NoThread(Exception):
    """The system refuses to start another thread, because of a limit on processes or a lack of memory."""


def start_thread(name: str, run: Callable[[], None]) -> threading.Thread:
    """Starts a daemon thread: the process can end while the thread still runs. Raises NoThread."""
    thread = threading.Thread(target=run, name=name, daemon=True)
    try:
        thread.start()
    except RuntimeError as error:
        raise NoThread(f"cannot start a thread: {error}; is there a limit on processes or memory?") from None
    return thread


async def run_in_thread(function: Callable[[], T]) -> T:
    """Runs the function in a thread. Returns the result of the function, or raises its exception. Raises NoThread if no
    thread can be started.

    Neither the end of the loop nor the end of the process waits for this thread.
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
        except Exception as raised:  # noqa: BLE001 - the waiting coroutine raises it
            error = raised
        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(tell, result, error)

    start_thread("run_in_thread", run)
    return await done
