"""The drivers of step machines, for threads and for asyncio: each kind of step, and the end."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from counterd.client._steps import PAUSE, WAIT, drive, drive_async
from counterd.errors import ConnectionLost

if TYPE_CHECKING:
    from collections.abc import Callable, Generator


def blocking(steps: Any, act: Callable[..., Any]) -> Any:
    return drive(steps, {WAIT: act})


def awaiting(steps: Any, act: Callable[..., Any]) -> Any:
    async def awaited(*arguments: Any) -> Any:
        return act(*arguments)

    return asyncio.run(drive_async(steps, {WAIT: awaited}))


both = pytest.mark.parametrize("driven", [blocking, awaiting])


@both
def test_each_step_is_done_with_its_arguments_and_gets_its_result(driven: Any) -> None:
    done: list[tuple[Any, ...]] = []

    def steps() -> Generator[Any, Any, int]:
        first = yield WAIT, "waiter", 5
        second = yield WAIT, "waiter", first
        return first + second  # type: ignore[no-any-return]

    def wait(*arguments: Any) -> int:
        done.append(arguments)
        return len(done)

    assert driven(steps(), wait) == 3
    assert done == [("waiter", 5), ("waiter", 1)]


@both
def test_a_failed_step_raises_inside_the_machine(driven: Any) -> None:
    def steps() -> Generator[Any, Any, str]:
        try:
            yield (WAIT,)
        except ConnectionLost as error:
            return str(error)
        raise AssertionError

    def wait() -> None:
        raise ConnectionLost("it went away")

    assert driven(steps(), wait) == "it went away"


@both
@pytest.mark.parametrize("error", [KeyboardInterrupt, ZeroDivisionError, KeyError])
def test_an_interrupt_closes_the_machine(driven: Any, error: type[BaseException]) -> None:
    """KeyError: an unknown step does too."""
    ended: list[type[BaseException]] = []

    def steps() -> Generator[Any, Any, None]:
        try:
            yield (PAUSE if error is KeyError else WAIT,)
        except BaseException as closing:
            ended.append(type(closing))
            raise

    def wait() -> None:
        raise error

    with pytest.raises(error):
        driven(steps(), wait)
    assert ended == [GeneratorExit]
