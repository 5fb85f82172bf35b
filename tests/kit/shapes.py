"""Runs one scenario, a coroutine, with both shapes of a client. `await got(client.call())` is the result of either."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
from typing import TYPE_CHECKING, Any

import pytest

from kit import loops

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Coroutine

BLOCKING = "blocking"
SHAPES = pytest.mark.parametrize("shape", [BLOCKING, *loops.NEW_LOOP])


def run(shape: str, scenario: Coroutine[Any, Any, Any]) -> None:
    """Runs the scenario. A blocking client blocks the loop during its calls."""
    loops.run(scenario, "asyncio" if shape == BLOCKING else shape)


async def got(value: Any) -> Any:
    """Returns the result of a call of either shape."""
    return await value if inspect.isawaitable(value) else value


def begun(shape: str, call: Callable[[], Any]) -> asyncio.Task[Any]:
    """Starts a call that waits while the scenario continues: in a thread, or as a task."""
    return asyncio.create_task(asyncio.to_thread(call) if shape == BLOCKING else call())


@contextlib.asynccontextmanager
async def opened(client: Any) -> AsyncIterator[Any]:
    """Does `with` or `async with`."""
    if hasattr(client, "__aenter__"):
        async with client:
            yield client
    else:
        with client:
            yield client
