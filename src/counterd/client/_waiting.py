"""How a hold waits for its turn, and then for what it wants: a step machine, which a small driver for each shape runs.

Floor: side. No I/O, no clock of its own.
"""

from __future__ import annotations

import functools
from enum import Enum
from typing import TYPE_CHECKING, Any, Protocol

from counterd.client._backoff import CONNECT_FIRST_S, CONNECT_LONGEST_S, Backoff
from counterd.errors import ConnectionLost, CounterdError, NotAvailable, OutOfMemory, UnknownCommand

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Mapping

    from counterd.client._holding import Wanted
    from counterd.client._tenure import Tenure
    from counterd.client._turns import Queue, Turns

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
    """What a driver does for a step of a caller that can wait in the server. The arguments follow it.

    QUEUE: asks, and waits in the server for at most so many seconds (None: for ever). Its second argument is called
    when the request was sent, if it is not None. PAUSE: waits for so many seconds.
    """

    QUEUE = 0
    PAUSE = 1


QUEUE, PAUSE = InServer


class Turn(Protocol):
    """A threading.Event, or the Turn of _aioshared."""

    def set(self) -> object: ...
    def clear(self) -> object: ...


class Patience:
    """The seconds that a caller waits, by a monotonic clock. None: for ever."""

    def __init__(self, seconds: float | None, now: Callable[[], float]) -> None:
        self.now = now
        self._begun = now()
        self._until = None if seconds is None else self._begun + seconds

    def waited(self) -> float:
        return self.now() - self._begun

    def left(self) -> float | None:
        """Returns how many seconds are left; None: without end."""
        return None if self._until is None else max(self._until - self.now(), 0.0)

    def at_most(self, seconds: float) -> float:
        """Returns the seconds, or how many are left if that is less."""
        left = self.left()
        return seconds if left is None else min(seconds, left)

    def is_over(self) -> bool:
        return self.left() == 0


def queued(patience: Patience, *, retry_at: Callable[[], float | None]) -> Steps:
    """The steps of a caller that waits in the queue of the server and nowhere else; returns what QUEUE does.

    retry_at: returns when a client without a connection may connect again; None if it never may, because it is closed.
    """
    backoff = Backoff(CONNECT_FIRST_S, CONNECT_LONGEST_S)
    while True:
        try:
            return (yield QUEUE, patience.left(), None)
        except ConnectionLost:
            again_at = retry_at()
            if again_at is None or patience.is_over():
                raise
            yield PAUSE, patience.at_most(max(backoff.delay(), again_at - patience.now()))


def holding(
    turns: Turns,
    turn: Turn,
    asked: Wanted,
    tenure: Tenure,
    patience: Patience,
    *,
    retry_at: Callable[[], float | None],
) -> Steps:
    """As waiting(), for a hold that waits in the queue of the server, if that has one, with room, and can be reached.

    Meanwhile it has no place in the queue of the client. A hold that does not wait asks once.
    """
    queues, is_full = asked.timeout != 0, False
    if queues and not turns.has(asked.name):
        try:
            return (yield QUEUE, patience.left(), None)
        except UnknownCommand:
            pass
        except OutOfMemory:
            is_full = True
        except (NotAvailable, ConnectionLost) as error:
            if isinstance(error, NotAvailable):
                error.waited = asked.timeout
            if patience.is_over() or retry_at() is None:
                raise  # else the server drains, or was lost
    steps = waiting(turns, turn, asked, tenure, patience, retry_at=retry_at, queues=queues, is_full=is_full)
    return (yield from steps)


def waiting(
    turns: Turns,
    turn: Turn,
    asked: Wanted,
    tenure: Tenure | None,
    patience: Patience,
    *,
    retry_at: Callable[[], float | None],
    queues: bool = False,
    is_full: bool = False,
) -> Steps:
    """The steps until something succeeds; returns its result. Close it in any case, so that it leaves the queue.

    tenure: what this client has had of the name. None: other clients never go first.
    retry_at: returns when a client without a connection may connect again; None if it never may, because it is closed.
    queues: the server may have a queue. Then the first of the client's queue waits there, with QUEUE. It leaves the
    client's queue as soon as it has asked, so that the others follow it, unless the server's queue is_full.
    """
    try:
        queue = turns.join(asked.name, turn)
        queue.is_full |= is_full
        tries_server = queues
        while True:
            turn.clear()
            # A hold that does not wait needs no turn: what it wants may be available although the first was refused.
            if asked.timeout != 0 and not turns.is_first(asked.name, turn):
                if not (yield WAIT, patience.left()):
                    raise (yield GIVE_UP, queue)
                continue
            in_server, tries_server = tries_server, queues
            try:
                taken = yield from (
                    _queueing(turns, turn, asked, patience, queue) if in_server else _asking(tenure, patience, queue)
                )
            except (NotAvailable, ConnectionLost) as error:
                before, queue = queue, turns.join(asked.name, turn)  # it may have left it
                if len(queue.waiters) == 1:
                    queue.backoff = before.backoff  # in a queue made anew too, the pauses go on growing
                refusal, pause = _refused(error, asked, patience, queue, retry_at)
                if patience.is_over():
                    raise (refusal or (yield GIVE_UP, queue)) from None
                yield WAIT, patience.at_most(pause)
            else:
                if taken is not _NOT_YET:
                    return taken
                queue = turns.join(asked.name, turn)
                tries_server = queues and not in_server
    finally:
        try:
            turns.leave(asked.name, turn)
        except BaseException:  # a signal came before it had done anything
            turns.leave(asked.name, turn)
            raise


_NOT_YET = object()  # instead of the result: it asks later, or in the other way


def _queueing(turns: Turns, turn: Turn, asked: Wanted, patience: Patience, queue: Queue) -> Steps:
    """The steps of the first of a queue, which waits in the server if that has a queue, with room."""
    try:
        leave = functools.partial(turns.leave, asked.name, turn)
        return (yield QUEUE, patience.left(), None if queue.is_full else leave)
    except UnknownCommand:
        return _NOT_YET
    except OutOfMemory:  # of what: the reply to an acquire says it
        turns.join(asked.name, turn).is_full = True
        return _NOT_YET


def _asking(tenure: Tenure | None, patience: Patience, queue: Queue) -> Steps:
    """The steps of the first of a queue, which asks, or lets others go first."""
    if tenure is not None and not patience.is_over() and not tenure.may_ask(patience.now()):
        away = tenure.looked(patience.now(), (yield (LOOK,)))
        if away is not None:
            queue.backoff.lengthen()
            yield WAIT, patience.at_most(away)
            return _NOT_YET
    try:
        taken = yield (ASK,)
    except NotAvailable:
        if tenure is not None:
            tenure.refused()
        raise
    queue.backoff.reset()
    return taken


def _refused(
    error: NotAvailable | ConnectionLost,
    asked: Wanted,
    patience: Patience,
    queue: Queue,
    retry_at: Callable[[], float | None],
) -> tuple[CounterdError | None, float]:
    """Returns the error for a hold whose time is over, or None for that of GIVE_UP, and for how long another pauses."""
    if isinstance(error, ConnectionLost):
        again_at = retry_at()
        if again_at is None:
            raise error
        return error, max(queue.delay(0), again_at - patience.now())
    pause = queue.delay(patience.waited())
    if error.consumption is None:
        return None, pause
    error.waited = asked.timeout
    return error, pause


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
        return done.value  # a call, such as close(), would give a signal the chance to lose it
    except BaseException:
        steps.close()
        raise


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
        return done.value  # a call, such as close(), would give a signal the chance to lose it
    except BaseException:
        steps.close()
        raise
