"""What step machines ask for, and what performs it.

A step machine is a generator: it yields an act with its arguments, gets the result or the CounterdError of the act, and
returns its own result. It knows neither threads nor asyncio. It is closed if its caller is interrupted.

Floor: side (ARCHITECTURE.md). No I/O, no clock.
"""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from counterd.errors import CounterdError

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Mapping

    Acts = Mapping[Any, Callable[..., Any]]

T = TypeVar("T")
Steps: TypeAlias = "Generator[tuple[Any, ...], Any, T]"


class Act(Enum):
    """CONNECT(report_loss=True): returns the connection, a new one if it was lost. Raises ConnectionLost or Timeout.
    CALL, CALL_ALL, QUEUE, ACQUIRE, RELEASE: call the method of the Link that is their first argument.
    RUN(request): runs a command of the client.
    WAIT(turn, seconds): waits until the turn is set, or so many seconds (None: for ever). Returns whether it is set.
    PAUSE(seconds): waits so many seconds, but only until close() at the longest.
    """

    CONNECT = 0
    CALL = 1
    CALL_ALL = 2
    QUEUE = 3
    ACQUIRE = 4
    RELEASE = 5
    RUN = 6
    WAIT = 7
    PAUSE = 8


CONNECT, CALL, CALL_ALL, QUEUE, ACQUIRE, RELEASE, RUN, WAIT, PAUSE = Act


def drive(steps: Steps[T], acts: Acts) -> T:
    """Performs each step, and returns the result of the step machine.

    Any error except a CounterdError closes the step machine.
    """
    try:
        act, *arguments = next(steps)
        while True:
            try:
                result = acts[act](*arguments)
            except CounterdError as error:
                act, *arguments = steps.throw(error)
            else:
                act, *arguments = steps.send(result)
    except StopIteration as done:
        return done.value  # type: ignore[no-any-return]  # a call, such as close(), would give a signal the chance to lose it
    except BaseException:
        steps.close()
        raise


async def drive_async(steps: Steps[T], acts: Acts) -> T:
    """Does the same as drive(), but awaits each step."""
    try:
        act, *arguments = next(steps)
        while True:
            try:
                result = await acts[act](*arguments)
            except CounterdError as error:
                act, *arguments = steps.throw(error)
            else:
                act, *arguments = steps.send(result)
    except StopIteration as done:
        return done.value  # type: ignore[no-any-return]  # a call, such as close(), would give a signal the chance to lose it
    except BaseException:
        steps.close()
        raise
