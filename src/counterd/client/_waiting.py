"""How a hold waits for its turn, and then for what it wants: a step machine. A small driver for each kind of client
runs it.

Floor: side (ARCHITECTURE.md). No I/O, and no clock of its own.
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
    from counterd.client._turns import Queue, Turns

    Steps = Generator[tuple[Any, ...], Any, Any]
    Acts = Mapping[Any, Callable[..., Any]]


class Act(Enum):
    """The actions that a driver performs for a step. The arguments of the action follow it.

    WAIT: waits until the turn is set, or until this many seconds have passed (None: for ever). Returns whether the turn
    is set.
    ASK: asks the server once, and returns the result. After NotAvailable or ConnectionLost the hold waits.
    GIVE_UP: returns the error for a hold whose timeout is over: ConnectionLost if the server cannot be reached. The
    argument of GIVE_UP is the queue.
    """

    WAIT = 0
    ASK = 1
    GIVE_UP = 2


WAIT, ASK, GIVE_UP = Act


class InServer(Enum):
    """The actions that a driver performs for a caller that can wait in the server. The arguments of the action follow
    it.

    QUEUE: asks, and waits in the server for at most this many seconds (None: for ever). The second argument, if it is
    not None, is called when the request was sent. PAUSE: waits for this many seconds.
    """

    QUEUE = 0
    PAUSE = 1


QUEUE, PAUSE = InServer


class Turn(Protocol):
    """A threading.Event, or the Turn of _aioshared."""

    def set(self) -> object: ...
    def clear(self) -> object: ...


class Patience:
    """How many seconds a caller waits, measured with a monotonic clock. None means for ever."""

    def __init__(self, seconds: float | None, now: Callable[[], float]) -> None:
        self.now = now
        self._until = None if seconds is None else now() + seconds

    def left(self) -> float | None:
        """Returns how many seconds remain, or None for a wait without end."""
        return None if self._until is None else max(self._until - self.now(), 0.0)

    def at_most(self, seconds: float) -> float:
        """Returns these seconds, or the remaining seconds if they are less."""
        left = self.left()
        return seconds if left is None else min(seconds, left)

    def is_over(self) -> bool:
        return self.left() == 0


def queued(patience: Patience, *, retry_at: Callable[[], float | None]) -> Steps:
    """The steps of a caller that waits only in the server's queue. Returns the result of QUEUE.

    If the server drains or is lost, the caller waits for the next one.

    retry_at: returns when a client without a connection may connect again. The function returns None if the client is
    closed and never may connect again.
    """
    backoff = Backoff(CONNECT_FIRST_S, CONNECT_LONGEST_S)
    while True:
        try:
            return (yield QUEUE, patience.left(), None)
        except (NotAvailable, ConnectionLost) as error:
            if isinstance(error, NotAvailable) and not error.draining:
                raise
            again_at = retry_at()
            if again_at is None or patience.is_over():
                raise
            yield PAUSE, patience.at_most(max(backoff.delay(), again_at - patience.now()))


def holding(
    turns: Turns,
    turn: Turn,
    asked: Wanted,
    patience: Patience,
    *,
    retry_at: Callable[[], float | None],
) -> Steps:
    """Does the same as waiting(), for a hold that waits in the server's queue if there is one, it has room, and the
    server can be reached.

    While the hold waits in the server, it has no place in the client's queue. A hold that does not wait asks once, in
    the same way.
    """
    queues, is_full = asked.timeout != 0, False
    if not (queues and turns.has(asked.name)):
        try:
            return (yield QUEUE, patience.left(), None)
        except UnknownCommand:
            pass
        except OutOfMemory:
            is_full = True
        except (NotAvailable, ConnectionLost) as error:
            if isinstance(error, NotAvailable):
                error.waited = asked.timeout
            if patience.is_over() or retry_at() is None or is_futile(error):
                raise  # else the server drains, or was lost
    steps = waiting(turns, turn, asked, patience, retry_at=retry_at, queues=queues, is_full=is_full)
    return (yield from steps)


def waiting(
    turns: Turns,
    turn: Turn,
    asked: Wanted,
    patience: Patience,
    *,
    retry_at: Callable[[], float | None],
    queues: bool = False,
    is_full: bool = False,
) -> Steps:
    """The steps until something succeeds. Returns its result. Close this generator in any case, so that the hold leaves
    the queue.

    retry_at: returns when a client without a connection may connect again. The function returns None if the client is
    closed and never may connect again.
    queues: whether the server may have a queue. If it has one, the first hold of the client's queue waits there, with
    QUEUE. The hold leaves the client's queue as soon as it has asked, so that the next hold can ask, unless the
    server's queue is_full.
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
                if in_server:
                    taken = yield from _queueing(turns, turn, asked, patience, queue)
                else:
                    taken = yield (ASK,)
                    queue.backoff.reset()
            except (NotAvailable, ConnectionLost) as error:
                before, queue = queue, turns.join(asked.name, turn)  # it may have left it
                if len(queue.waiters) == 1:
                    queue.backoff = before.backoff  # in a queue made anew too, the pauses go on growing
                refusal, pause = _refused(error, asked, patience, queue, retry_at)
                if patience.is_over():
                    raise (refusal or (yield GIVE_UP, queue)) from None
                yield WAIT, patience.at_most(pause)
            else:
                if taken is not _NO_ROOM:
                    return taken
                queue = turns.join(asked.name, turn)
                tries_server = False
    finally:
        try:
            turns.leave(asked.name, turn)
        except BaseException:  # a signal came before it had done anything
            turns.leave(asked.name, turn)
            raise


_NO_ROOM = object()  # instead of the result: the server has no queue, or it is full, so the hold has to ask


def _queueing(turns: Turns, turn: Turn, asked: Wanted, patience: Patience, queue: Queue) -> Steps:
    """The steps of the first hold of a queue, which waits in the server's queue if there is one and it has room."""
    try:
        leave = functools.partial(turns.leave, asked.name, turn)
        return (yield QUEUE, patience.left(), None if queue.is_full else leave)
    except UnknownCommand:
        return _NO_ROOM
    except OutOfMemory:  # of what: the reply to an acquire says it
        turns.join(asked.name, turn).is_full = True
        return _NO_ROOM


def _refused(
    error: NotAvailable | ConnectionLost,
    asked: Wanted,
    patience: Patience,
    queue: Queue,
    retry_at: Callable[[], float | None],
) -> tuple[CounterdError | None, float]:
    """Returns the error for a hold whose time is over, or None for the error of GIVE_UP; and how long another hold
    pauses."""
    queue.draining = isinstance(error, NotAvailable) and error.draining
    if isinstance(error, ConnectionLost):
        again_at = retry_at()
        if again_at is None:
            raise error
        return error, max(queue.backoff.delay(), again_at - patience.now())
    if is_futile(error):
        raise error
    pause = queue.backoff.delay()
    if error.consumption is None and not queue.draining:
        return None, pause
    error.waited = asked.timeout
    return error, pause


def is_futile(error: CounterdError) -> bool:
    """Whether it is of no use to wait after this refusal: it was asked for more than the limit of the server."""
    return isinstance(error, NotAvailable) and error.limit is not None


def drive(steps: Steps, acts: Acts) -> Any:
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
        return done.value  # a call, such as close(), would give a signal the chance to lose it
    except BaseException:
        steps.close()
        raise


async def drive_async(steps: Steps, acts: Acts) -> Any:
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
        return done.value  # a call, such as close(), would give a signal the chance to lose it
    except BaseException:
        steps.close()
        raise
