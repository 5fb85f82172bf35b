"""Runs a coroutine on either event loop, and fails if the loop reports an error."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
from typing import TYPE_CHECKING, Any, TypeVar

import pytest
import uvloop

from kit.machine import PATIENCE

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine

NEW_LOOP: dict[str, Callable[[], asyncio.AbstractEventLoop]] = {
    "asyncio": asyncio.new_event_loop,
    "uvloop": uvloop.new_event_loop,
}

T = TypeVar("T")


def run(main: Coroutine[Any, Any, T], loop_name: str = "asyncio", seconds: float = PATIENCE) -> T:
    """As asyncio.run(), with this loop. Fails if it takes longer, or leaves a task or an error behind."""
    complaints: list[Any] = []
    loop = NEW_LOOP[loop_name]()
    loop.set_exception_handler(lambda _, context: complaints.append(context))
    try:
        result = loop.run_until_complete(asyncio.wait_for(main, seconds))
        left = asyncio.all_tasks(loop)
        gc.collect()  # futures with an exception that was never retrieved report it now
        loop.run_until_complete(loop.shutdown_asyncgens())
    finally:
        for task in asyncio.all_tasks(loop):
            task.cancel()
            with contextlib.suppress(BaseException):
                loop.run_until_complete(task)
        loop.close()
    assert left == set()
    assert complaints == []
    return result


def leaves_connections_open(test: Callable[..., None]) -> Callable[..., None]:
    """For a test that closes a loop before its connections: frees them within the test, because Python warns of each.

    Otherwise the warning comes in the next test that collects garbage.
    """

    @pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning")
    @functools.wraps(test)
    def run(*arguments: Any, **named: Any) -> None:
        test(*arguments, **named)
        gc.collect()

    return run


async def until(condition: Callable[[], Awaitable[Any] | Any], what: str) -> Any:
    """Polls a condition, which may be awaitable, until it is true. Returns its value."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + PATIENCE
    while True:
        result = condition()
        if hasattr(result, "__await__"):
            result = await result
        if result:
            return result
        assert loop.time() < deadline, f"not within {PATIENCE:g} s: {what}"
        await asyncio.sleep(0.002)
