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
    RECONNECT(): returns a new connection, which all callers share.
    OPEN(address, opened): returns a connection to this address, and adds it to the list `opened`, so that an
    interrupted caller can close it.
    CALL(link, *request), CALL_ALL, QUEUE, RELEASE: call the method of the link that is their first argument.
    TAKE(link, request, granted): as CALL, and calls `granted` with the result in the same step.
    RUN(request): runs a command of the client.
    WAIT(waiter, seconds): waits until it is set, or so many seconds (None: for ever). Returns whether it is set.
    PAUSE(seconds): waits so many seconds, but only until close() at the longest.
    """

    CONNECT = 0
    RECONNECT = 1
    OPEN = 2
    CALL = 3
    CALL_ALL = 4
    TAKE = 5
    QUEUE = 6
    RELEASE = 7
    RUN = 8
    WAIT = 9
    PAUSE = 10


CONNECT, RECONNECT, OPEN, CALL, CALL_ALL, TAKE, QUEUE, RELEASE, RUN, WAIT, PAUSE = Act


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
