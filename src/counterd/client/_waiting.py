"""How a client waits for what a hold wants, in turn: a step machine, which a thin driver for each shape moves.

Stands beside the floors. No I/O, no clock of its own.
"""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING, Any, Protocol

from counterd.errors import ConnectionLost, CounterdError, NotAvailable

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Mapping

    from counterd.client._holding import Wanted
    from counterd.client._tenure import Tenure
    from counterd.client._turns import Turns

    Steps = Generator[tuple[Any, ...], Any, Any]
    Acts = Mapping[Any, Callable[..., Any]]


class Act(Enum):
    """What a step is, before its arguments.

    WAIT: until the turn is set, or for so many seconds; None: however long that takes. Whether it is set.
    LOOK: whether others want it: Seen. ASK: for it, once: what that did. NotAvailable and ConnectionLost are known.
    GIVE_UP: the error for who has waited long enough in that queue.
    """

    WAIT = 0
    LOOK = 1
    ASK = 2
    GIVE_UP = 3


WAIT, LOOK, ASK, GIVE_UP = Act


class Turn(Protocol):
    """An event of either kind."""

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
    """The steps until it is there; returns what asking for it did. Close it in any case: it leaves the queue then.

    tenure: what this client has had of it. Without one, others never go first.
    retry_at: when a client without a connection may make another; None: never, it is closed.
    """
    begun = now()
    deadline = None if asked.timeout is None else begun + asked.timeout

    def left() -> float | None:
        return None if deadline is None else deadline - now()

    try:
        queue = turns.join(asked.name, turn)
        # Who does not wait has no turn either: what the first was refused may be there for this one.
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
    """Does each step; returns what the machine does. An error that is not a CounterdError closes the machine."""
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
    """As drive(), where doing a step is awaited."""
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
