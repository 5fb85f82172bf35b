"""One scenario for both shapes of a client: a coroutine, in which `await got(client.call())` is either's result."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
from typing import TYPE_CHECKING, Any

import pytest

import loops

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Coroutine

BLOCKING = "blocking"
SHAPES = pytest.mark.parametrize("shape", [BLOCKING, *loops.NEW_LOOP])


def run(shape: str, scenario: Coroutine[Any, Any, Any]) -> None:
    """A blocking client has this thread while it is called, and the loop waits."""
    loops.run(scenario, "asyncio" if shape == BLOCKING else shape)


async def got(value: Any) -> Any:
    """What a call returns, of whatever shape."""
    return await value if inspect.isawaitable(value) else value


def begun(shape: str, call: Callable[[], Any]) -> asyncio.Task[Any]:
    """A call that waits while the scenario goes on: in a thread, or as a task."""
    return asyncio.create_task(asyncio.to_thread(call) if shape == BLOCKING else call())


@contextlib.asynccontextmanager
async def opened(client: Any) -> AsyncIterator[Any]:
    """As `with` and `async with`."""
    if hasattr(client, "__aenter__"):
        async with client:
            yield client
    else:
        with client:
            yield client
