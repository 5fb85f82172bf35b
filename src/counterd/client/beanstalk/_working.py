"""What happens to a job while a function works on it, and after that. No I/O and no clock.

Floor: side (ARCHITECTURE.md); shared by the workers for threads and for asyncio.
"""

from __future__ import annotations

import functools
import logging
import math
import random
from typing import TYPE_CHECKING, Any, NamedTuple

from counterd.client._backoff import CONNECT_FIRST_S, CONNECT_LONGEST_S, Backoff
from counterd.client._steps import RUN
from counterd.errors import CounterdError
from counterd.protocols.beanstalk import wire

if TYPE_CHECKING:
    from collections.abc import Callable

    from counterd.client._steps import Steps
    from counterd.client.beanstalk._queue import Figures

# The first touch of a job. No time to run is shorter than a second, and the touch shows how long it is. Most jobs have
# ended by then, and cost no request.
FIRST_TOUCH_S = 0.3
SHARES = 3  # the next touch comes after 1/SHARES of the time to run, so two touches may fail
RESERVE_S = 60  # how long one reserve waits; then it is repeated
FAR = math.inf

log = logging.getLogger("counterd.client.beanstalk")


class Bury(Exception):
    """An exception that a worker's function raises to bury the job."""


class Retry(Exception):
    """An exception that a worker's function raises to release the job with a delay in whole seconds."""

    def __init__(self, delay: int = 0) -> None:
        wire.release(0, delay=delay)  # raises for a bad delay here, where the traceback shows the mistake
        super().__init__(delay)
        self.delay = delay


class Tended:
    """A job that a function works on. due: when the job has to be touched."""

    def __init__(self, now: float) -> None:
        self.due = now + FIRST_TOUCH_S
        self.lost = False  # its time to run or its connection ended: another worker may have it

    def touched(self, asked_at: float, touched: bool, figures: Figures | None) -> None:
        """Takes the replies to a touch and to the request for the job's statistics."""
        if touched and figures is not None:
            self.due = asked_at + int(figures["ttr"]) / SHARES
        else:
            self.lost, self.due = True, FAR

    def failed(self, now: float) -> None:
        """Called when the server did not answer a touch."""
        self.due = now + FIRST_TOUCH_S


class End(NamedTuple):
    """What to do with a job whose function raised an exception: release it with this delay, or bury it if the delay is
    None."""

    priority: int
    delay: int | None


class Policy:
    """When a job is tried again after its function has raised an exception.

    attempts: after this many attempts the job is buried. backoff: the seconds before the second attempt, and the
    longest delay. Each delay is twice the previous one, then shortened at random by up to half, and rounded up to whole
    seconds.
    """

    def __init__(self, attempts: int, backoff: tuple[float, float]) -> None:
        if attempts < 1:
            raise ValueError(f"attempts must be at least 1, not {attempts}")
        try:
            first, longest = backoff
            is_allowed = 0 <= first <= longest <= wire.NUMBER_MAX
        except (TypeError, ValueError):
            raise TypeError(f"backoff must be a pair of seconds, such as (1, 600), not {backoff!r}") from None
        if not is_allowed:
            raise ValueError(
                f"backoff must be 0 to {wire.NUMBER_MAX} seconds, with the longest delay last, not {backoff}"
            )
        self._attempts = attempts
        self._first, self._longest = first, longest

    def end(self, error: BaseException, figures: Figures) -> End:
        """Returns what to do with the job. figures: the server's statistics of the job."""
        priority, attempt = int(figures["pri"]), int(figures["reserves"])
        if isinstance(error, Retry):
            return End(priority, error.delay)
        if not isinstance(error, Exception):  # the program ends, or the task was cancelled
            return End(priority, 0)
        if isinstance(error, Bury) or attempt >= self._attempts:
            return End(priority, None)
        delay = min(self._first * 2.0 ** min(attempt - 1, 64), self._longest)
        return End(priority, math.ceil(delay * random.uniform(0.5, 1)))


# ---- what a worker does, as step machines ----


def ending(job: Any, failure: BaseException | None, policy: Policy) -> Steps[None]:
    """Deletes a job whose function has returned. Releases or buries a job whose function has failed."""
    try:
        if not (yield from _ended(job, failure, policy)):
            log.warning(
                "%r was gone when its function ended: its time to run was over, or its connection was lost", job
            )
    except CounterdError as error:
        unknown = "it is not known whether %r was deleted or released, so a worker may get this job again: %s"
        log.warning(unknown, job, error)


def _ended(job: Any, failure: BaseException | None, policy: Policy) -> Steps[Any]:
    """Returns whether the job still existed, and was reserved by this client."""
    if failure is None:
        return (yield RUN, job.delete)
    figures = yield RUN, job.stats
    if figures is None:
        return False
    end = policy.end(failure, figures)
    if isinstance(failure, Exception) and not isinstance(failure, (Bury, Retry)):
        what = "the job is buried" if end.delay is None else f"the job is tried again in {end.delay} s"
        log.error("%r failed; %s", job, what, exc_info=failure)
    if end.delay is None:
        return (yield RUN, functools.partial(job.bury, priority=end.priority))
    return (yield RUN, functools.partial(job.release, priority=end.priority, delay=end.delay))


def touching(job: Any, tended: Tended, now: Callable[[], float]) -> Steps[None]:
    """Touches a job that a function works on."""
    asked_at = now()
    try:
        tended.touched(asked_at, (yield RUN, job.touch), (yield RUN, job.stats))
    except CounterdError:  # if the connection is lost, that is noticed when the job ends
        tended.failed(now())


# The methods of a job of a client for asyncio return coroutines, which drive_async() awaits.
ACTS = {RUN: lambda call: call()}


class Reserving:
    """What a thread or task of a worker logs about its server, and how long it pauses while that is away."""

    def __init__(self) -> None:
        self._backoff = Backoff(CONNECT_FIRST_S, CONNECT_LONGEST_S)
        self._is_away = False

    def failed(self, error: CounterdError, *, logs: bool = True) -> float:
        """Called when no job could be reserved. Returns for how many seconds to pause."""
        if logs and not self._is_away:
            log.warning("no jobs can be reserved: %s", error)
        self._is_away = True
        return self._backoff.delay()

    def succeeded(self) -> None:
        if self._is_away:
            log.info("jobs can be reserved again")
            self._is_away = False
            self._backoff.reset()
