"""Code that the holds of all protocols share: what a hold waits for, what happens when it is lost, and decorators.

Floor: side (ARCHITECTURE.md); shared by the blocking client and the client for asyncio.
"""

from __future__ import annotations

import functools
import inspect
from typing import TYPE_CHECKING, Any, Literal, TypeVar, cast

from counterd.client._connection import CLOSED, FORKED

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractAsyncContextManager, AbstractContextManager

F = TypeVar("F", bound="Callable[..., Any]")

REACQUIRE: Literal["reacquire"] = "reacquire"
RAISE: Literal["raise"] = "raise"
# Reasons for the end of a connection that are no loss: the program closed it, or it belongs to the parent process.
NO_LOSS = (CLOSED, FORKED)


class Held:
    """Permits that a connection has for a hold, or will have when they are granted."""

    __slots__ = ("amount", "hold", "name")

    def __init__(self, hold: Any, name: bytes, amount: int) -> None:
        self.hold = hold
        self.name = name
        self.amount = amount


class Wanted:
    """The thing that a hold waits for.

    name: equal for all holds that want the same thing. timeout: seconds, or None.
    """

    def __init__(self, name: bytes, timeout: float | None, on_lost: Any) -> None:
        if on_lost not in (RAISE, REACQUIRE) and not callable(on_lost):
            raise ValueError(f'on_lost must be "raise", "reacquire" or callable, not {on_lost!r}')
        if timeout is not None and not isinstance(timeout, (int, float)):
            raise TypeError(f"timeout must be None, or a number of seconds, not {timeout!r}")
        if timeout is not None and not timeout >= 0:
            raise ValueError(f"timeout must be None, or 0 or more seconds, not {timeout!r}")
        self.name = name
        self.timeout = timeout
        self.on_lost: Callable[[Any], object] | str = on_lost


def printed(name: bytes) -> str:
    return name.decode("utf-8", "backslashreplace")


def decorated(function: F, hold: Callable[[], AbstractContextManager[object]]) -> F:
    """Returns a function, or a generator, that runs inside a hold. Each call makes a new hold."""
    if inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function):
        raise TypeError(
            f"{function!r} is asynchronous: it needs a hold of a client for asyncio, such as counterd.client.aio.Client"
        )

    def generate(*arguments: Any, **named: Any) -> Any:
        with hold():
            return (yield from function(*arguments, **named))

    def call(*arguments: Any, **named: Any) -> Any:
        with hold():
            return function(*arguments, **named)

    wrapped = functools.wraps(function)(generate if inspect.isgeneratorfunction(function) else call)
    return cast("F", wrapped)


def decorated_async(function: F, hold: Callable[[], AbstractAsyncContextManager[object]]) -> F:
    """Does the same as decorated(), for a coroutine function or an asynchronous generator."""

    async def generate(*arguments: Any, **named: Any) -> Any:
        async with hold():
            generator = function(*arguments, **named)
            try:
                item = await generator.asend(None)
                while True:
                    try:
                        sent = yield item
                    except GeneratorExit:
                        raise
                    except BaseException as error:  # noqa: BLE001 - the generator handles it
                        item = await generator.athrow(error)
                    else:
                        item = await generator.asend(sent)
            except StopAsyncIteration:
                return
            finally:
                await generator.aclose()

    async def call(*arguments: Any, **named: Any) -> Any:
        async with hold():
            return await function(*arguments, **named)

    if inspect.isasyncgenfunction(function):
        return cast("F", functools.wraps(function)(generate))
    if not inspect.iscoroutinefunction(function):
        raise TypeError(f"{function!r} is not asynchronous: it needs a hold of a blocking client of counterd.client")
    return cast("F", functools.wraps(function)(call))
