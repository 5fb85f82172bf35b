"""How a hold waits for its turn, and then for what it wants: step machines (_steps.py).

Floor: side (ARCHITECTURE.md). No I/O, and no clock of its own.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, Protocol

from counterd.client._backoff import CONNECT_FIRST_S, CONNECT_LONGEST_S, Backoff
from counterd.client._steps import PAUSE, WAIT
from counterd.errors import ConnectionLost, CounterdError, NotAvailable, OutOfMemory, UnknownCommand

if TYPE_CHECKING:
    from collections.abc import Callable

    from counterd.client._holding import Wanted
    from counterd.client._steps import Steps
    from counterd.client._wait_queues import Queue, Waiter, WaitQueues


class Ways(Protocol):
    """How a hold asks for what it wants. Each method returns the steps.

    ask: asks once. Raises NotAvailable or ConnectionLost if the hold has to wait.
    give_up: returns the error for a hold whose timeout is over.
    """

    def ask(self) -> Steps[Any]: ...
    def give_up(self, queue: Queue, waiter: Waiter) -> Steps[CounterdError]: ...


class ServerWays(Ways, Protocol):
    """The same, for a hold that can wait in the server.

    queue: as ask(), but waits in the queue of the server for at most so many seconds. `sent`, if it is not None, is
    called when the request was sent.
    """

    def queue(self, seconds: float | None, sent: Callable[[], object] | None) -> Steps[Any]: ...


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


def queued(
    patience: Patience, queue: Callable[[float | None], Steps[Any]], *, retry_at: Callable[[], float | None]
) -> Steps[Any]:
    """The steps of a caller that waits only in the server's queue. Returns the result of `queue`.

    If the server drains or is lost, the caller waits for the next one.

    queue: returns the steps that wait in the server for at most so many seconds.
    retry_at: returns when a client without a connection may connect again. The function returns None if the client is
    closed and never may connect again.
    """
    backoff = Backoff(CONNECT_FIRST_S, CONNECT_LONGEST_S)
    while True:
        try:
            return (yield from queue(patience.left()))
        except (NotAvailable, ConnectionLost) as error:
            if isinstance(error, NotAvailable) and not error.draining:
                raise
            again_at = retry_at()
            if again_at is None or patience.is_over():
                raise
            yield PAUSE, patience.at_most(max(backoff.delay(), again_at - patience.now()))


def holding(
    queues: WaitQueues,
    waiter: Waiter,
    asked: Wanted,
    patience: Patience,
    ways: ServerWays,
    *,
    retry_at: Callable[[], float | None],
) -> Steps[Any]:
    """Does the same as waiting(), for a hold that waits in the server's queue if there is one, it has room, and the
    server can be reached.

    While the hold waits in the server, it has no place in the client's queue. A hold that does not wait asks once, in
    the same way.
    """
    may_queue, is_full = asked.timeout != 0, False
    if not (may_queue and queues.has(asked.name)):
        try:
            return (yield from ways.queue(patience.left(), None))
        except UnknownCommand:
            pass
        except OutOfMemory:
            is_full = True
        except (NotAvailable, ConnectionLost) as error:
            if isinstance(error, NotAvailable):
                error.waited = asked.timeout
            if patience.is_over() or retry_at() is None or is_futile(error):
                raise  # else the server drains, or was lost
    queue = ways.queue if may_queue else None
    steps = waiting(queues, waiter, asked, patience, ways, retry_at=retry_at, queue_in_server=queue, is_full=is_full)
    return (yield from steps)


def waiting(
    queues: WaitQueues,
    waiter: Waiter,
    asked: Wanted,
    patience: Patience,
    ways: Ways,
    *,
    retry_at: Callable[[], float | None],
    queue_in_server: Callable[[float | None, Callable[[], object] | None], Steps[Any]] | None = None,
    is_full: bool = False,
) -> Steps[Any]:
    """The steps until something succeeds. Returns its result. Close this generator in any case, so that the hold leaves
    the queue.

    retry_at: returns when a client without a connection may connect again. The function returns None if the client is
    closed and never may connect again.
    queue_in_server: ServerWays.queue, if the server may have a queue. If it has one, the first hold of the client's
    queue waits there. The hold leaves the client's queue as soon as it has asked, so that the next hold can ask, unless
    the server's queue is_full.
    """
    try:
        queue = queues.join(asked.name, waiter)
        queue.is_full |= is_full
        tries_server = queue_in_server
        while True:
            waiter.clear()
            # A hold that does not wait needs no turn: what it wants may be available although the first was refused.
            if asked.timeout != 0 and not queues.is_first(asked.name, waiter):
                if not (yield WAIT, waiter, patience.left()):
                    raise (yield from ways.give_up(queue, waiter))
                continue
            in_server, tries_server = tries_server, queue_in_server
            try:
                if in_server is not None:
                    leave = functools.partial(queues.leave, asked.name, waiter)
                    steps = in_server(patience.left(), None if queue.is_full else leave)
                    taken = yield from _queueing(steps, queues, asked.name, waiter)
                else:
                    taken = yield from ways.ask()
                    queue.backoff.reset()
            except (NotAvailable, ConnectionLost) as error:
                before, queue = queue, queues.join(asked.name, waiter)  # it may have left it
                if len(queue.waiters) == 1:
                    queue.backoff = before.backoff  # in a queue made anew too, the pauses go on growing
                refusal, pause = _refused(error, asked, patience, queue, retry_at)
                if patience.is_over():
                    raise (refusal or (yield from ways.give_up(queue, waiter))) from None
                yield WAIT, waiter, patience.at_most(pause)
            else:
                if taken is not _NO_ROOM:
                    return taken
                queue = queues.join(asked.name, waiter)
                tries_server = None
    finally:
        try:
            queues.leave(asked.name, waiter)
        except BaseException:  # a signal came before it had done anything
            queues.leave(asked.name, waiter)
            raise


_NO_ROOM = object()  # instead of the result: the server has no queue, or it is full, so the hold has to ask


def _queueing(steps: Steps[Any], queues: WaitQueues, name: bytes, waiter: Waiter) -> Steps[Any]:
    """The steps of the first hold of a queue, which waits in the server's queue if there is one and it has room."""
    try:
        return (yield from steps)
    except UnknownCommand:
        return _NO_ROOM
    except OutOfMemory:  # of what: the reply to an acquire says it
        queues.join(name, waiter).is_full = True
        return _NO_ROOM


def _refused(
    error: NotAvailable | ConnectionLost,
    asked: Wanted,
    patience: Patience,
    queue: Queue,
    retry_at: Callable[[], float | None],
) -> tuple[CounterdError | None, float]:
    """Returns the error for a hold whose time is over, or None for that of ways.give_up(); and how long another hold
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
