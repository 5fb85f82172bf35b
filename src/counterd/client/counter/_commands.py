"""The requests of the client for the counter protocol, and how it connects, waits and gives back: written once, for
threads and for asyncio.

Each method is a request, or a step machine (_steps.py).

Floor: side (ARCHITECTURE.md). No I/O, and no clock of its own.
"""

from __future__ import annotations

import logging
from collections import Counter, deque
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeVar

from counterd.client._backoff import ASK_FIRST_S, ASK_LONGEST_S, Backoff
from counterd.client._command import CommandBase, PipelineBase, command
from counterd.client._connecting import Connecting
from counterd.client._connection import CLOSED, NotSent, as_bytes, lost
from counterd.client._holding import NO_LOSS, Held
from counterd.client._steps import CALL, CALL_ALL, CONNECT, QUEUE, RUN, TAKE, WAIT
from counterd.client._waiting import Patience, holding, queued
from counterd.client.counter._permits import PermitCalls, check_takes
from counterd.client.counter._taking import PROBE
from counterd.errors import (
    Cancelled,
    ConnectionLost,
    CounterdError,
    NotAvailable,
    NotFound,
    OutOfMemory,
    ProtocolError,
    ServerError,
    Timeout,
    UnknownCommand,
)
from counterd.protocols.counter import wire
from counterd.protocols.counter.wire import DumpEntry

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from counterd.client._addresses import Address
    from counterd.client._calls import Request
    from counterd.client._command import Encoded
    from counterd.client._steps import Steps
    from counterd.client._wait_queues import Queue, Waiter
    from counterd.client.counter._asked import Asked
    from counterd.client.counter._holds import HoldSteps
    from counterd.client.counter._resuming import Greeting
    from counterd.client.counter._taking import AskedItems
    from counterd.protocols.counter.wire import Grant

# For noop and release None, for get and acquire a number, for stats and dump what the methods return; or a refusal.
Result = int | dict[str, str] | list[DumpEntry] | ServerError | None
COUNTED_FOR_S = 0.1  # for how long a consumption that was asked for serves other holds that give up

T = TypeVar("T")
log = logging.getLogger("counterd.client.counter")


class Requests(CommandBase):
    """The methods that send one request. A pipeline has them too."""

    @command
    def noop(self) -> Encoded[None]:
        """Sends a request that does nothing, and waits for the reply (section "Noop")."""
        return (wire.noop,)

    @command
    def acquire(self, name: str | bytes, resources: int = 1, *, maximum: int) -> Encoded[int]:
        """Acquires permits of a counter, unless more than maximum would then be in use (section "Acquire").

        Asks the server once, and does not wait for permits as hold() does. The permits are held until release(), or
        until the connection ends. Returns how many permits were granted. Raises NotAvailable if too few permits are
        free, InvalidArguments if resources are 0 or above maximum, OutOfMemory if the server has no room for another
        counter or holding.
        """
        return (wire.acquire, as_bytes(name), resources, maximum)

    @command
    def release(self, name: str | bytes, resources: int = 1) -> Encoded[None]:
        """Gives back permits that acquire() has acquired (section "Release"). A hold gives back its own permits.

        Raises NotFound if the counter does not exist, NotAcquired if the connection holds fewer permits. After an error
        of the server nothing is released. If the server reads the release and then ends the connection without a reply,
        ConnectionLost is only raised if more was held.
        """
        return (wire.release, as_bytes(name), resources)

    @command
    def stats(self) -> Encoded[dict[str, str]]:
        """Returns the server's statistics by name, in the server's order and as strings (section "Stats")."""
        return (wire.stats,)

    @command
    def dump(self) -> Encoded[list[DumpEntry]]:
        """Returns all counters, in use or not, in no particular order (section "Dump"). Keeps the list in memory."""
        return (wire.dump, True, True)


class Pipelined(Requests, PipelineBase):
    """The requests that a pipeline collects."""

    @command
    def get(self, name: str | bytes, *, everywhere: bool = False) -> Encoded[int]:
        """Adds a request whose result is the same as that of Client.get()."""
        return (wire.get, as_bytes(name), everywhere)


class Commands(Requests, Connecting):
    """The methods of a client, and the step machines of its holds."""

    _CAUGHT: type[BaseException]  # after these exceptions of on_lost, other holds are still notified
    _swapping: Any  # locked while what a hold has is replaced

    def __init__(
        self, addresses: list[Address], timeout: float, connect_timeout: float | None, greeting: Greeting
    ) -> None:
        self._greeting = greeting
        self._ended: deque[Any] = deque()  # connections that were lost, and may have to be resumed
        self._again: list[HoldSteps] = []  # holds whose permits are to be acquired again
        self._again_backoff = Backoff(ASK_FIRST_S, ASK_LONGEST_S)
        super().__init__(addresses, timeout, connect_timeout)

    @command
    def get(self, name: str | bytes, default: int | None = None, *, everywhere: bool = False) -> Encoded[int]:
        """Returns how many permits of a counter are in use (section "Get"), or with everywhere, how many are in use at
        all daemons that share the counter's limit, as far as this daemon knows.

        If the counter does not exist, returns default, or raises NotFound without a default. A program that only reads
        needs default=0: a counter does not exist before its first acquire, nor after a restart of the server.
        """
        asked = (wire.get, as_bytes(name), everywhere)
        return asked if default is None else self._get(asked, default)  # type: ignore[return-value]

    def _get(self, asked: Request, default: int) -> Steps[int]:
        try:
            consumption: int = yield RUN, asked
        except NotFound:
            return default
        return consumption

    def _disown(self, held: Sequence[Held]) -> None:
        """Gives back what of these permits is held, without waiting for the reply."""
        self._link.disown(*held)

    # ---- calling ----

    def _make_calls(self) -> PermitCalls:
        calls = PermitCalls()
        calls.names = Counter() if self._greeting.resumes else None
        return calls

    def _recovered(self, link: Any, request: Request, error: CounterdError, was_open: bool) -> Steps[Any]:
        """Called when a request was not answered. Returns the connection through which it can be sent again, or None if
        it is a release that has been made up for. Otherwise raises the error.

        was_open: whether the connection was still open when the request was sent.
        """
        is_release = request[0] is wire.release
        if (yield from self._resumed(link)):
            if is_release and not isinstance(error, NotSent):
                return None
            return (yield (CONNECT,))
        self._report_no_loss(link)
        # If nothing was held, nothing is lost, and the server has taken back what this call was granted.
        is_unread = is_release and not link.has_read_all(was_open)
        if isinstance(error, ProtocolError) or not link.calls.answered or link.calls.held or is_unread:
            raise error
        return None if is_release else (yield (CONNECT,))

    def _run_all(self, requests: list[Request]) -> Steps[list[Result]]:
        """Returns the results of all requests, including refusals."""
        if not requests:
            return []
        link = yield (CONNECT,)
        calls: list[Any] = []
        try:
            results: list[Result] = yield CALL_ALL, link, requests, calls
            for request in requests:
                if request[0] is wire.release:
                    self._wait_queues.wake(request[1])
            return results
        except BaseException as error:
            link.forget(*calls)
            if isinstance(error, (ConnectionLost, ProtocolError)):
                yield from self._resumed(link)  # which gives back what the others were granted
                self._report_no_loss(link)
            raise

    def _answers(self, link: Any, requests: Sequence[Request]) -> Steps[list[Any]]:
        """Returns the results of requests, with None for each request that the server refused."""
        answers = (yield CALL_ALL, link, requests) if requests else []
        return [None if isinstance(answer, ServerError) else answer for answer in answers]

    # ---- connecting ----

    def _greeted(self, link: Any) -> Steps[None]:
        """Sends the client's name to the server, and resumes the last connection or asks for a token."""
        greeting, ended = self._greeting, self._link
        token = None if ended is None else ended.next_token()
        requests = greeting.states_name()
        if greeting.resumes:
            requests.append(greeting.asks(token))
        if not requests:
            return
        resumption = (yield from self._answers(link, requests))[-1]
        if token is not None and resumption is None:
            ended.token = None
            (resumption,) = yield from self._answers(link, [greeting.asks()])
        if isinstance(resumption, wire.Resumption):
            link.token = greeting.token(resumption)
            if token is not None and ended.token is not None:
                calls, before = link.calls, ended.calls
                held = [amount or 0 for amount in (yield from self._answers(link, before.asks_held()))]
                doubtful = dict(zip(before.doubtful, held, strict=True))
                link.inherit(ended, lambda: calls.inherit(before, doubtful))

    def _resumed(self, link: Any) -> Steps[bool]:
        """Returns whether another connection has resumed this one. Connects if that is still possible."""
        if link.may_resume():
            with suppress(CounterdError):
                yield CONNECT, False
        return link.successor is not None

    def _server(self) -> Steps[Any]:
        """Returns the connection. A server that does not accept a connection in time is waited for, like one that
        cannot be reached."""
        try:
            return (yield CONNECT, False)
        except Timeout as error:
            raise ConnectionLost(str(error)) from error

    def _asked_again(self, ask: Callable[[Any], Steps[T]]) -> Steps[T]:
        """Asks the server. Asks again if the connection was lost meanwhile and another connection has resumed it."""
        link = yield from self._server()
        try:
            return (yield from ask(link))
        except ConnectionLost:
            if not (yield from self._resumed(link)):
                raise
        return (yield from ask((yield from self._server())))

    # ---- what was lost ----

    def _tend(self) -> Steps[float | None]:
        """Resumes connections that were lost, or notifies their holds, and acquires permits again.

        Returns after how many seconds to call it again. None: when the next connection has ended.
        """
        resuming = []
        while self._ended:
            link = self._ended.popleft()
            if link.closed in NO_LOSS or (yield from self._resumed(link)):
                continue
            if link.may_resume():
                resuming.append(link)
            else:
                self._lose(link)
        self._ended.extend(resuming)
        again, self._again = self._again, []
        for hold in again:
            if not (yield from self._has_again(hold)):
                self._again.append(hold)
        if not (self._ended or self._again):
            self._again_backoff.reset()
            return None
        return max(self._again_backoff.delay(), self._attempts.retry_at - self._now())

    def _lose(self, link: Any) -> None:
        """Called when everything that was held through a connection is lost. Notifies its holds, each once."""
        link.token = None
        for held in list(link.holds):
            has = held.hold._has
            if has is not None and held in has.held:  # else the block was left, or is being entered
                link.holds.discard(held)
                if held.hold._notify_of_loss():
                    self._again.append(held.hold)

    def _has_again(self, hold: HoldSteps) -> Steps[bool]:
        try:
            yield from hold._acquired_again()
        except CounterdError as error:
            if not isinstance(error, (NotAvailable, ConnectionLost)):
                log.warning("cannot acquire %s again: %s", hold, error)
            return False
        return True

    # ---- holding ----

    def _held(self, asked: Asked, held: Held) -> Steps[Any]:
        """Waits for the permits of a hold. Returns the connection through which the hold has its permits."""
        waiter = self._new_waiter()
        waits = Waits(self, asked, held)
        patience = Patience(asked.timeout, self._now)
        return holding(self._wait_queues, waiter, asked, patience, waits, retry_at=self._next_attempt)

    def _held_again(self, asked: Asked, held: Held) -> Steps[Any]:
        """Asks once, or waits in the server for a moment: clients that wait there would always go first."""
        try:
            return (yield from Waits(self, asked, held).queue(ASK_LONGEST_S, None))
        except (UnknownCommand, OutOfMemory):
            return (yield from Waits(self, asked, held).ask())

    def _take_items(self, asked: AskedItems, held: Sequence[Held]) -> Steps[tuple[Any, Grant]]:
        def ask(seconds: float | None) -> Steps[tuple[Any, Grant]]:
            def queue(link: Any) -> Steps[tuple[Any, Grant]]:
                grant = yield from _queueing(link, held, asked.request(seconds), seconds)
                _check_lost(link)
                return link, grant

            return self._asked_again(queue)

        return queued(Patience(asked.timeout, self._now), ask, retry_at=self._next_attempt)


class Waits:
    """How a hold asks for its permits: the step machines that waiting() and holding() use."""

    def __init__(self, client: Commands, asked: Asked, held: Held) -> None:
        self._client = client
        self._asked = asked
        self._held = held

    def ask(self) -> Steps[Any]:
        def ask(link: Any) -> Steps[Any]:
            asked = self._asked
            yield from _acquiring(link, self._held, (wire.acquire, asked.name, asked.resources, asked.maximum))
            _check_lost(link)
            return link

        return self._client._asked_again(ask)

    def queue(self, seconds: float | None, sent: Callable[[], object] | None) -> Steps[Any]:
        def queue(link: Any) -> Steps[Any]:
            check_takes(link.calls)
            yield from _queueing(link, (self._held,), self._asked.request(seconds), seconds, sent)
            _check_lost(link)
            return link

        return self._client._asked_again(queue)

    def give_up(self, queue: Queue, waiter: Waiter) -> Steps[CounterdError]:
        """Says how many permits are in use. If many holds give up together, one asks the server."""
        client = self._client
        if queue.counting:
            waiter.clear()
            queue.told.append(waiter)
            yield WAIT, waiter, client._timeout
        elif client._now() - queue.counted_at > COUNTED_FOR_S:
            queue.counting = True
            queue.consumption, queue.unreachable = None, ""
            try:
                queue.consumption = yield CALL, (yield from client._server()), wire.get, self._asked.name
            except ConnectionLost as error:
                queue.unreachable = str(error)
            except CounterdError:
                pass
            finally:
                queue.counted_at, queue.counting = client._now(), False
                while queue.told:
                    queue.told.pop().set()
        return self._asked.gives_up(queue)


def _acquiring(link: Any, held: Held, request: Request) -> Steps[None]:
    """Sends the request of a hold, which has the permits from the moment of the grant."""
    try:
        yield TAKE, link, request, lambda _: link.holds.add(held)
    except BaseException:  # an interrupt may have come after the grant
        link.disown(held)
        raise


def _queueing(
    link: Any,
    held: Sequence[Held],
    request: Request,
    seconds: float | None,
    sent: Callable[[], object] | None = None,
) -> Steps[Any]:
    """Does the same, for a request that may wait in the server for so many seconds. None means for ever. Returns the
    grant.

    sent: called when the request was sent.
    """
    grants: list[Any] = []

    def granted(grant: Any) -> None:
        link.holds.update(held)
        grants.append(grant)

    try:
        return (yield QUEUE, link, request, granted, seconds, PROBE, sent)
    except BaseException as error:  # it may have come after the grant
        for grant in grants:
            link.give_back(*link.calls.refunds(grant, request))
        link.disown(*held)
        if isinstance(error, Cancelled):  # the server has given up the Takes of this connection
            raise lost(link.where, link.closed or CLOSED) from None
        raise


def _check_lost(link: Any) -> None:
    """Raises ConnectionLost if the connection was lost at the same moment at which it granted something."""
    link = link.current()
    if link.closed and not link.may_resume():
        raise lost(link.where, link.closed)
