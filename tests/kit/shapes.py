"""Runs one scenario, a coroutine, with both shapes of a client. `await got(client.call())` is the result of either."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import threading
from typing import TYPE_CHECKING, Any

import pytest

from counterd.errors import Timeout
from kit import loops
from kit.connections import is_asleep
from kit.machine import PATIENCE

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

BLOCKING = "blocking"
ALL = (BLOCKING, *loops.NEW_LOOP)
SHAPES = pytest.mark.parametrize("shape", ALL)


def run(shape: str, scenario: Coroutine[Any, Any, Any], seconds: float = PATIENCE) -> None:
    """Runs the scenario. A blocking client blocks the loop during its calls."""
    loops.run(scenario, "asyncio" if shape == BLOCKING else shape, seconds)


def run_at_once(scenario: Coroutine[Any, Any, Any]) -> Any:
    """Runs a scenario of a blocking client, which itself waits for nothing. It needs no loop, and raises anything."""
    try:
        waited = scenario.send(None)
    except StopIteration as end:
        return end.value
    raise AssertionError(f"it waits for {waited!r}")


async def got(value: Any) -> Any:
    """Returns the result of a call of either shape."""
    return await value if inspect.isawaitable(value) else value


def begun(shape: str, call: Callable[[], Any]) -> asyncio.Task[Any]:
    """Starts a call that waits while the scenario continues: in a thread, or as a task."""
    return asyncio.create_task(asyncio.to_thread(call) if shape == BLOCKING else call())


async def queued(shape: str, call: Callable[[], Any], ask: Callable[[], Any]) -> asyncio.Task[Any]:
    """Starts a call that waits without a timeout behind others in its client, and waits until it does.

    ask: a call of the client that the server answers.
    """
    if shape != BLOCKING:
        task = begun(shape, call)
        await ask()  # meanwhile the task runs until it waits
        return task
    ids: list[int] = []

    def called() -> Any:
        ids.append(threading.get_native_id())
        return call()

    task = begun(shape, called)
    await loops.until(lambda: ids and is_asleep(ids[0]), "it waits")
    return task


async def answered(call: Callable[[], Any]) -> Any:
    """Calls until the server answers in time, for a client with a timeout that a busy machine exceeds."""

    async def tried() -> tuple[Any] | None:
        with contextlib.suppress(Timeout):
            return (await got(call()),)
        return None

    (result,) = await loops.until(tried, "it is answered in time")
    return result


def begins(manager: Any) -> Callable[[], Any]:
    """Returns the call that begins the block of a `with` or of an `async with`."""
    begins: Callable[[], Any] = manager.__aenter__ if hasattr(manager, "__aenter__") else manager.__enter__
    return begins


async def entered(manager: Any) -> Any:
    """Begins the block of a `with` or of an `async with`. Returns what is after `as`."""
    return await got(begins(manager)())


async def left(manager: Any, *error: Any) -> Any:
    """Ends that block. error: as of __exit__()."""
    error = error or (None, None, None)
    return await got(manager.__aexit__(*error) if hasattr(manager, "__aexit__") else manager.__exit__(*error))


class opened:
    """Does `with` or `async with`."""

    def __init__(self, manager: Any) -> None:
        self._manager = manager

    async def __aenter__(self) -> Any:
        return await entered(self._manager)

    async def __aexit__(self, *error: Any) -> Any:
        return await left(self._manager, *error)
