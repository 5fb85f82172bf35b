"""How a hold waits for its turn, and then for what it wants: a step machine, which a small driver for each shape runs.

Floor: side. No I/O, no clock of its own.
"""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING, Any, Protocol

from counterd.client._backoff import CONNECT_FIRST_S, CONNECT_LONGEST_S, Backoff
from counterd.errors import ConnectionLost, CounterdError, NotAvailable

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Mapping

    from counterd.client._holding import Wanted
    from counterd.client._tenure import Tenure
    from counterd.client._turns import Turns

    Steps = Generator[tuple[Any, ...], Any, Any]
    Acts = Mapping[Any, Callable[..., Any]]


class Act(Enum):
    """What a driver does for a step. The arguments follow it.

    WAIT: waits until the turn is set, or for so many seconds (None: without end). Returns whether the turn is set.
    LOOK: returns a Seen. ASK: asks once, and returns the result; after NotAvailable or ConnectionLost the hold waits.
    GIVE_UP: returns the error for a hold whose timeout is over. Its argument is the queue.
    """

    WAIT = 0
    LOOK = 1
    ASK = 2
    GIVE_UP = 3


WAIT, LOOK, ASK, GIVE_UP = Act


class InServer(Enum):
    """What a step of queued() is, before its arguments.

    QUEUE: asks, and waits in the server for at most so many seconds; None: for ever. PAUSE: waits for so many seconds.
    """

    QUEUE = 0
    PAUSE = 1


QUEUE, PAUSE = InServer


def queued(timeout: float | None, *, now: Callable[[], float], retry_at: Callable[[], float | None]) -> Steps:
    """The steps of a caller that waits in the queue of the server; returns what QUEUE does.

    timeout: seconds that it may take; None: for ever. retry_at: when a client without a connection may make another;
    None: never, it is closed.
    """
    deadline = None if timeout is None else now() + timeout
    backoff = Backoff(CONNECT_FIRST_S, CONNECT_LONGEST_S)
    while True:
        try:
            return (yield QUEUE, None if deadline is None else max(deadline - now(), 0.0))
        except ConnectionLost:
            again_at = retry_at()
            left = None if deadline is None else deadline - now()
            if again_at is None or (left is not None and left <= 0):
                raise
            pause = max(backoff.delay(), again_at - now())
            yield PAUSE, pause if left is None else min(pause, left)


class Turn(Protocol):
    """A threading.Event, or the Turn of _aioshared."""

    def set(self) -> object: ...
    def clear(self) -> object: ...


def waiting(
    turns: Turns,
    turn: Turn,
    asked: Wanted,
    tenure: Tenure | None,
    *,
    now: Callable[[], float],
    retry_at: Callable[[], float | None],
) -> Steps:
    """The steps until ASK succeeds; returns its result. Close it in any case, so that it leaves the queue.

    tenure: what this client has had of the name. None: other clients never go first.
    retry_at: returns when a client without a connection may connect again; None if it never may, because it is closed.
    """
    begun = now()
    deadline = None if asked.timeout is None else begun + asked.timeout

    def left() -> float | None:
        return None if deadline is None else deadline - now()

    try:
        queue = turns.join(asked.name, turn)
        # A hold that does not wait needs no turn: what it wants may be available although the first waiter was refused.
        while asked.timeout != 0 and not turns.is_first(asked.name, turn):
            if not (yield WAIT, left()):
                raise (yield GIVE_UP, queue)
        while True:
            turn.clear()
            refusal = away = None
            try:
                still = left()
                if tenure is not None and (still is None or still > 0) and not tenure.may_ask(now()):
                    away = tenure.looked(now(), (yield (LOOK,)))
                if away is None:
                    taken = yield (ASK,)
                    queue.backoff.reset()
                    return taken
                queue.backoff.lengthen()
                pause = away
            except NotAvailable:
                if tenure is not None:
                    tenure.refused()
                pause = queue.delay(now() - begun)
            except ConnectionLost as error:
                again_at = retry_at()
                if again_at is None:
                    raise
                refusal = error
                pause = max(queue.delay(0), again_at - now())
            still = left()
            if still is not None and still <= 0 and away is None:
                raise refusal or (yield GIVE_UP, queue)
            yield WAIT, pause if still is None else min(pause, still)
    finally:
        turns.leave(asked.name, turn)


def drive(steps: Steps, acts: Acts) -> Any:
    """Does each step, and returns the result of the machine. An error other than CounterdError closes the machine."""
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
        return done.value
    finally:
        steps.close()


async def drive_async(steps: Steps, acts: Acts) -> Any:
    """As drive(), but awaits each step."""
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
        return done.value
    finally:
        steps.close()
