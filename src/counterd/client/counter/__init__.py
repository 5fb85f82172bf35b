"""The blocking client for the counter protocol: Client of counterd.client.

Floor: side (ARCHITECTURE.md). The package needs only the wire module and counterd.errors, and no compiled module.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, deque
from contextlib import ExitStack, nullcontext, suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from counterd.client._addresses import read_default
from counterd.client._backoff import ASK_FIRST_S, ASK_LONGEST_S, Backoff
from counterd.client._connection import as_bytes
from counterd.client._entering import Entering, ForWith
from counterd.client._holding import NO_LOSS, RAISE, REACQUIRE, decorated, printed
from counterd.client._link import NotSent
from counterd.client._portable import Waker
from counterd.client._shared import Shared
from counterd.client._turns import COUNTED_FOR_S, Queue
from counterd.client._waiting import PAUSE, QUEUE, Patience, drive, holding, queued
from counterd.client.counter._asked import Asked
from counterd.client.counter._permits import PermitCalls, check_takes
from counterd.client.counter._pipeline import Requests, Result, released
from counterd.client.counter._resuming import Greeting, answer
from counterd.client.counter._taking import NOT_TAKEN, PROBE, AskedItems, Permit, Rate, TakenCore, place
from counterd.errors import (
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

if TYPE_CHECKING:
    import os
    import ssl
    from collections.abc import Callable, Sequence
    from types import TracebackType

    from counterd.client._calls import Request
    from counterd.client._link import Link, ThreadCall
    from counterd.protocols.counter.wire import DumpEntry, Grant

__all__ = ["Client", "Hold", "Permit", "Pipeline", "Rate", "Semaphore", "Taken"]

F = TypeVar("F", bound="Callable[..., Any]")
T = TypeVar("T")
_PAUSES = b""  # no name: of those who wait until they may connect again
_log = logging.getLogger(__name__)


class Client(Shared):
    """A connection to a server, and the permits that were acquired through it. If the connection is lost, the next call
    makes a new one.

    The client connects with its first call, so you can make it before the server runs: then calls raise ConnectionLost,
    and hold() waits for the server. Use the client in a `with`, or close() it. Threads may share a client: their calls
    use one connection at the same time. After a fork the connection belongs to the parent; the child connects with its
    first call. A signal handler may close() the client. If the handler has interrupted a call of the client, other
    calls in the handler raise RuntimeError.

    host: a host, counter://HOST[:PORT], counters://HOST[:PORT] (with TLS) or counter+unix:///PATH, or several of these,
    which are tried in order. All of them must lead to the same server: two servers would be two limits. If host, port
    and path are all missing, the environment variable COUNTERD_URL has the address. Without this variable, the address
    is 127.0.0.1.
    port: the port for hosts without a port. None means the default port of the protocol.
    path: the path of a Unix socket, in place of host and port.
    tls: True for TLS with the certificates that this system trusts, or an ssl.SSLContext. A URL counters://HOST:PORT
    can end with ?cacert=FILE&cert=FILE&key=FILE, or with some of these parameters. These parameters of a URL name PEM
    files: the certificates to trust, the client's own certificate, and its key. The files are read for each connection.
    timeout: how many seconds each call may take in all; then it raises Timeout. Permits that are granted after that are
    given back.
    connect_timeout: how many seconds connecting to one address may take, and the TLS handshake. None means the same as
    timeout.
    watch: starts a thread that notices a lost connection immediately. on_lost="reacquire" and a function as on_lost
    need this thread.
    resume: for how many seconds the server keeps what is held after the connection is lost (section "Resume"). A thread
    then immediately connects again and resumes the connection: holds, Takes and permits of acquire() are not lost. The
    server allows at most counter.resume_max. A server that does not know Resume, such as yrmcdsd, gives everything back
    when the connection ends. close() gives everything back immediately.
    name: the name of this client, which the server shows to people (section "Who"): up to 64 bytes of printable UTF-8.

    Names are bytes, or text that is sent as UTF-8, of 1 to 65,535 bytes. Numbers are 0 to 2^32-1. Other arguments raise
    ValueError or TypeError before anything is sent. Every call may raise ServerError (the server refused), Timeout (the
    server did not answer in time), ProtocolError (the protocol does not allow the server's answer) or ConnectionLost.
    After a failed attempt to connect, calls fail immediately until the next attempt, 0.05 to 2 s later.

    Permits belong to the connection and are lost with it. A Hold notices the loss by itself. If permits of acquire()
    are lost, one call raises ConnectionLost before calls use a new connection. If no permits were held and the
    connection is lost during a call, the call is repeated once on a new connection. So a restart of the server causes
    no error then.
    """

    def __init__(
        self,
        host: str | Sequence[str] | None = None,
        port: int | None = None,
        *,
        path: str | os.PathLike[str] | None = None,
        tls: bool | ssl.SSLContext = False,
        timeout: float = 5.0,
        connect_timeout: float | None = None,
        watch: bool = False,
        resume: float = 0,
        name: str = "",
    ) -> None:
        self._greeting = Greeting(resume, name)
        self._watch = watch = watch or self._greeting.resumes
        self._watcher: _Watcher | None = None
        super().__init__(read_default(host, port, path, tls, default_port=wire.PORT), timeout, connect_timeout)
        if watch:
            self._watcher = _Watcher(self)

    def fileno(self) -> int:
        """Returns the descriptor of the connection's socket, to pass it to another process. Connects if necessary.

        The permits are held as long as any process has this descriptor open. With TLS another process cannot use the
        descriptor, only keep it open.
        """
        return self._connected().fileno()

    def close(self) -> None:
        """Ends the connection. The server then takes everything back. Later calls raise ConnectionLost."""
        link = self._link
        if link.token is not None and not link.closed:
            self._closed = True
            with suppress(CounterdError, RuntimeError):  # in a signal handler: the grace time ends instead
                link.call(wire.goodbye)
        super().close()
        if self._watcher is not None:
            self._watcher.stop()

    def noop(self) -> None:
        """Sends a request that does nothing, and waits for the reply (section "Noop")."""
        self._call(wire.noop)

    def get(self, name: str | bytes, default: int | None = None, *, everywhere: bool = False) -> int:
        """Returns how many permits of a counter are in use (section "Get"), or with everywhere, how many are in use at
        all daemons that share the counter's limit, as far as this daemon knows.

        If the counter does not exist, returns default, or raises NotFound without a default. A program that only reads
        needs default=0: a counter does not exist before its first acquire, nor after a restart of the server.
        """
        try:
            consumption: int = self._call(wire.get, as_bytes(name), everywhere)
        except NotFound:
            if default is None:
                raise
            return default
        return consumption

    def acquire(self, name: str | bytes, resources: int = 1, *, maximum: int) -> int:
        """Acquires permits of a counter, unless more than maximum would then be in use (section "Acquire").

        Asks the server once, and does not wait for permits as hold() does. The permits are held until release(), or
        until the connection ends. Returns how many permits were granted. Raises NotAvailable if too few permits are
        free, InvalidArguments if resources are 0 or above maximum, OutOfMemory if the server has no room for another
        counter or holding.
        """
        granted: int = self._call(wire.acquire, as_bytes(name), resources, maximum)
        return granted

    def release(self, name: str | bytes, resources: int = 1) -> None:
        """Gives back permits that acquire() has acquired (section "Release"). A hold gives back its own permits.

        Raises NotFound if the counter does not exist, NotAcquired if the connection holds fewer permits. After an error
        of the server nothing is released. If the server reads the release and then ends the connection without a reply,
        ConnectionLost is only raised if more was held.
        """
        released = as_bytes(name)
        self._call(wire.release, released, resources)
        self._turns.wake(released)

    def stats(self) -> dict[str, str]:
        """Returns the server's statistics by name, in the server's order and as strings (section "Stats")."""
        figures: dict[str, str] = self._call(wire.stats)
        return figures

    def dump(self) -> list[DumpEntry]:
        """Returns all counters, in use or not, in no particular order (section "Dump"). Keeps the list in memory."""
        entries: list[DumpEntry] = self._call(wire.dump, True, True)
        return entries

    def pipeline(self) -> Pipeline:
        """Collects requests and sends them together: `client.pipeline().get("a").get("b").execute()`."""
        return Pipeline(self)

    def hold(
        self,
        name: str | bytes,
        resources: int = 1,
        *,
        maximum: int,
        timeout: float | None = None,
        key: str | bytes = b"",
        weight: int = 1,
        priority: int = 0,
        on_lost: Callable[[Hold], object] | Literal["raise", "reacquire"] = RAISE,
    ) -> Hold:
        """Holds permits while a block runs: `with client.hold("db:main", 2, maximum=10, timeout=5):`, or a decorator.

        Waits until the permits are available, for at most timeout seconds (None: for ever, 0: asks once). Then raises
        NotAvailable, which has the number of permits in use. The hold waits in the server's queue (section "Take"),
        with one request. The highest priority (0 to 255) is served first. Among equal priorities, keys take turns in
        proportion to their weight (1 to 1,000). Holds with the same key are served in the order in which they began to
        wait. Without a key, the holds of this client share a key that no other client has.

        A hold also waits while the server cannot be reached. If the timeout ends during this time, the hold raises
        ConnectionLost. On a new connection the hold asks again. While the server drains, the hold waits too. If the
        timeout ends during this time, `draining` of the NotAvailable is True. If the server does not answer, the hold
        raises Timeout: a waiting hold notices that within 10 s plus the client's timeout. InvalidArguments is raised
        immediately if resources are 0 or above maximum, and NotAvailable if they are above the server's maximum, which
        is then in `limit` of the error. The permits are given back at the end of the block.

        If the server's queue is full, or the server has no queue (yrmcdsd), holds wait in a queue of this client. The
        first hold in this queue asks some ten times a second; key, weight and priority have no effect. Among clients
        that ask in this way, the permits are not shared fairly.

        on_lost: what to do when the connection and the permits are lost while the block runs.
        "raise": the end of the block raises ConnectionLost, unless the block has raised another exception. If only the
        reply to the release was lost, nothing is raised, because the permits were held until then. A function: it is
        called immediately with the hold, in another thread. "reacquire": the permits are acquired again, even if
        that takes long. Until then hold.lost is true. A function and "reacquire" need a Client(watch=True).
        """
        if on_lost != RAISE and not self._watch:
            raise ValueError('on_lost: a function, or "reacquire", needs a Client(watch=True)')
        return Hold(self, Asked(name, resources, maximum, timeout, on_lost, where=place(key, weight, priority)))

    def take(
        self,
        *items: Permit | Rate,
        timeout: float | None = 0,
        key: str | bytes = b"",
        weight: int = 1,
        priority: int = 0,
    ) -> Taken:
        """Takes 1 to 16 permits and rates, all or none: `with client.take(Permit("db", maximum=10), Rate(...)):`.

        Has the arguments of hold(), but the default of timeout is 0, which does not wait. NotAvailable names the first
        item of which too little was available. For a rate it also has the time until enough is available. A take that
        waits also waits for another server while this one drains or cannot be reached. The permits are given back at
        the end of the block. If the server has no Takes (yrmcdsd), raises UnknownCommand.
        """
        return Taken(self, AskedItems(items, timeout, place(key, weight, priority)))

    def semaphore(self, name: str | bytes, maximum: int) -> Semaphore:
        """Returns a counter of `maximum` permits with the methods of threading.BoundedSemaphore."""
        return Semaphore(self, name, maximum)

    # ---- calling ----

    def _call(self, *request: Any) -> Any:
        link = self._connected()
        was_good, is_release = link.calls.answered, request[0] is wire.release
        was_open = is_release and link.is_open()
        try:
            return link.call(*request)
        except (ConnectionLost, ProtocolError) as error:
            if self._has_resumed(link):
                if is_release and not isinstance(error, NotSent):
                    return None  # it has been made up for
                return self._connected().call(*request)
            link.unheard = False
            # If nothing was held, nothing is lost, and the server has taken back what this call was granted.
            is_unread = is_release and not link.has_read_all(was_open)
            if isinstance(error, ProtocolError) or not was_good or link.calls.held or is_unread:
                raise
        return None if is_release else self._connected().call(*request)

    def _run(self, requests: list[Request]) -> list[Any]:
        """Returns the results of all requests, including refusals."""
        if not requests:
            return []
        link = self._connected()
        names = released(requests)
        calls: list[ThreadCall] = []
        try:
            calls = link.run(requests)
            for call in calls:
                if call.error is not None and not isinstance(call.error, ServerError):
                    raise call.error
            for name in names:
                self._turns.wake(name)
            return [call.result if call.error is None else call.error for call in calls]
        except (ConnectionLost, ProtocolError):
            if self._has_resumed(link):
                link.forget(calls)
            link.unheard = False
            raise
        except BaseException:  # a signal's, after the server has granted something
            link.forget(calls)
            raise

    def _make_calls(self) -> PermitCalls:
        calls = PermitCalls()
        calls.names = Counter() if self._greeting.resumes else None
        return calls

    def _greet(self, link: Link) -> None:
        """Sends the client's name to the server, and resumes the last connection or asks for a token."""
        greeting, ended = self._greeting, self._link
        token = ended.next_token()
        requests = greeting.states_name()
        if greeting.resumes:
            requests.append(greeting.asks(token))
        if not requests:
            return
        stay = answer(link.run(requests)[-1])
        if token is not None and stay is None:
            ended.token = None  # what was held is lost
            stay = answer(link.run([greeting.asks()])[0])
        if isinstance(stay, wire.Stay):
            link.token = greeting.token(stay)
            if token is not None and ended.token is not None:
                calls, before = link.calls, ended.calls
                assert isinstance(calls, PermitCalls)
                assert isinstance(before, PermitCalls)
                held = [answer(call) or 0 for call in link.run(before.asks_held())] if before.doubtful else []
                doubtful = dict(zip(before.doubtful, held, strict=True))
                link.inherit(ended, lambda: calls.inherit(before, doubtful))

    def _has_resumed(self, link: Link) -> bool:
        """Returns whether another connection has resumed this one. Connects if that is still possible."""
        if link.may_resume():
            with suppress(CounterdError):
                self._connected(hears=False)
        return link.heir is not None

    def _on_end(self, link: Link) -> None:
        if self._watcher is not None:
            self._watcher.ended.append(link)
            self._watcher.wake()

    def _on_connected(self) -> None:
        if self._watcher is not None:
            self._watcher.wake()
        elif self._watch:
            self._watcher = _Watcher(self)

    def _make_locks(self) -> None:
        super()._make_locks()
        self._counting = threading.RLock()
        self._reacquiring = threading.RLock()

    def _after_fork(self) -> None:
        super()._after_fork()
        if self._watcher is not None:
            self._watcher.after_fork()
            self._watcher = None

    # ---- holding ----

    def _ask(self, hold: Hold, asked: Asked) -> Link:
        def ask(link: Link) -> Link:
            link.acquire(hold, asked.name, (wire.acquire, asked.name, asked.resources, asked.maximum))
            return link

        return self._asked_again(ask)

    def _hold(self, hold: Hold, asked: Asked) -> Link:
        """Waits for the permits of a hold. Returns the connection through which the hold has its permits."""
        turn = threading.Event()
        patience = Patience(asked.timeout, time.monotonic)
        steps = holding(self._turns, turn, asked, patience, retry_at=self._next_attempt)
        acts = self._waiting_acts(turn, hold, asked)
        acts[QUEUE] = lambda seconds, sent: self._queue(hold, asked, seconds, sent)
        link: Link = drive(steps, acts)
        return link

    def _queue(self, hold: Hold, asked: Asked, seconds: float | None, sent: Callable[[], object] | None = None) -> Link:
        """Waits in the server's queue. Raises UnknownCommand if the server has no queue."""

        def queue(link: Link) -> Link:
            check_takes(link.calls)
            link.queue([(hold, asked.name, asked.resources)], asked.request(seconds), seconds, PROBE, sent)
            return link

        return self._asked_again(queue)

    def _ask_again(self, hold: Hold, asked: Asked) -> Link:
        """Does the same as _ask(), but clients that wait in the server do not always go first."""
        with suppress(UnknownCommand, OutOfMemory):
            return self._queue(hold, asked, ASK_LONGEST_S)
        return self._ask(hold, asked)

    def _take_items(self, taken: Taken, asked: AskedItems) -> tuple[Link, Grant]:
        held = [((taken, item.name), item.name, item.amount) for item in asked.permits]

        def ask(seconds: float | None, _: None) -> tuple[Link, Grant]:
            request = asked.request(seconds)
            return self._asked_again(lambda link: (link, link.queue(held, request, seconds, PROBE)))

        steps = queued(Patience(asked.timeout, time.monotonic), retry_at=self._next_attempt)
        result: tuple[Link, Grant] = drive(steps, {QUEUE: ask, PAUSE: self._pause})
        return result

    def _asked_again(self, ask: Callable[[Link], T]) -> T:
        """Asks the server. Asks again if the connection was lost meanwhile and another connection has resumed it."""
        link = self._server()
        try:
            return ask(link)
        except ConnectionLost:
            if not self._has_resumed(link):
                raise
        return ask(self._server())

    def _server(self) -> Link:
        """Returns the connection. Waits for a server that does not accept a connection in time."""
        try:
            return self._connected(hears=False)
        except Timeout as error:
            raise ConnectionLost(str(error)) from error

    def _pause(self, seconds: float) -> None:
        """Waits, but only until close() at the longest."""
        turn = threading.Event()
        until = time.monotonic() + seconds
        self._turns.join(_PAUSES, turn)
        try:
            while not self._closed and (left := until - time.monotonic()) > 0:
                turn.clear()  # set also when the one before in this queue leaves it
                turn.wait(left)
        finally:
            self._turns.leave(_PAUSES, turn)

    def _gives_up(self, queue: Queue, asked: Asked) -> CounterdError:
        """Says how many permits are in use. If many holds give up together, one asks the server."""
        with self._counting:
            if time.monotonic() - queue.counted_at > COUNTED_FOR_S:
                queue.consumption, queue.unreachable = None, ""
                try:
                    queue.consumption = self._server().call(wire.get, asked.name)
                except ConnectionLost as error:
                    queue.unreachable = str(error)
                except CounterdError:
                    pass
                queue.counted_at = time.monotonic()
            return asked.gives_up(queue)


class Hold(Entering, ForWith):
    """Permits of a counter that are held while a block runs. Client.hold() returns it, for `with` or as a decorator.

    Use a hold in one thread and for one block at a time: make another hold for each, or share a Semaphore. As a
    decorator, a hold acquires other permits for each call. Holds are not reentrant: a hold inside another hold of the
    same name asks for more permits.
    """

    def __init__(self, client: Client, asked: Asked) -> None:
        self._client = client
        self._asked = asked
        self._entered = threading.Lock()  # locked from entering to leaving
        self._inside = False
        self._link: Link | None = None  # through which they are held

    def __repr__(self) -> str:
        return f"<Hold {self._asked}>"

    def __enter__(self) -> Hold:
        if not self._entered.acquire(blocking=False):
            raise RuntimeError("this hold is already in use: make another one")
        try:
            with self._client._reacquiring if self._asked.on_lost == REACQUIRE else nullcontext():
                self._inside = self._is_used = True  # no permits are acquired again for the last block any more
            self._link = self._client._hold(self, self._asked)
        except BaseException:  # an interrupt may come after the grant
            self._inside = False
            self._client._link.disown(self, self._asked.name)
            self._entered.release()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._inside = False  # before _link is read: what is acquired again from now on is given back
        link, self._link = self._link, None
        assert link is not None
        try:
            if kind is not GeneratorExit:  # the garbage collector may raise it in the middle of another call
                link.release((self, self._asked.name))
        except ConnectionLost:
            if kind is None and self._asked.on_lost == RAISE and link.closed not in NO_LOSS:
                raise self._asked.lost(link.where, link.closed) from None
        except CounterdError:
            if kind is None:
                raise
        finally:
            link.disown(self, self._asked.name)  # if release() was not called, or was interrupted
            self._entered.release()
            self._client._turns.wake(self._asked.name)

    def __call__(self, function: F) -> F:
        """Returns a function, or a generator, that holds permits while it runs. Each call has its own permits."""
        return decorated(function, partial(Hold, self._client, self._asked))

    @property
    def lost(self) -> bool:
        """Whether the connection and the permits were lost while the block runs. The property checks the socket."""
        link = self._link
        return link is not None and not link.is_alive()

    def raise_if_lost(self) -> None:
        """Raises ConnectionLost if hold.lost is true. Call this before any action that needs the permits."""
        link = self._link
        if link is not None and not link.is_alive():
            raise self._asked.lost(link.where, link.closed)

    # ---- in the watching thread ----

    def _tell(self) -> bool:
        """Called when the permits were lost. Returns whether to acquire the permits again."""
        on_lost = self._asked.on_lost
        if not self._inside:  # the block was left
            return False
        if callable(on_lost):
            try:
                on_lost(self)
            except BaseException:  # noqa: BLE001 - the user's function, and other holds need this thread
                _log.exception("the function on_lost of %s failed", self._asked)
        return on_lost == REACQUIRE

    def _acquire_again(self) -> bool:
        """Acquires lost permits again, or raises an error. Returns False if this has to be called again."""
        with self._client._reacquiring:
            lost = self._link
            if lost is None:  # it was left, or is being entered or left
                return not self._entered.locked()
            if not lost.closed:
                return True
            link = self._client._ask_again(self, self._asked)
            self._link = link
            if not self._inside:
                self._link = None
                link.disown(self, self._asked.name)
            return True


class Taken(TakenCore, ForWith):
    """Permits and units of rates that are taken together. Client.take() returns it, for `with` or as a decorator.

    Use it in one thread and for one block at a time. As a decorator, it takes other items for each call.
    """

    def __init__(self, client: Client, asked: AskedItems) -> None:
        super().__init__(client, asked)
        self._held = [((self, item.name), item.name) for item in asked.permits]  # the permits: each, and its name
        self._inside = False

    def acquire(self) -> Taken:
        """Takes all items. Raises the exceptions that Client.take() describes."""
        self._enter()
        try:
            self._link, self._grant = self._client._take_items(self, self._asked)
            self._inside = True
        except BaseException:  # that of a signal may come after the grant
            self._inside = False
            for hold, name in self._held:
                self._client._link.disown(hold, name)
            self._entered.release()
            raise
        return self

    def release(self) -> None:
        """Gives the permits back. Raises ConnectionLost if they were lost. settle() works after release()."""
        self.__exit__(None, None, None)

    def settle(self, name: str | bytes, used: int) -> None:
        """Replaces the units that were taken of a rate by the units that were really used, more or fewer. Each rate of
        a Take can be settled once.

        A rate can be settled after the end of the block too, for counter.settle_time. Raises NotFound if the rate was
        settled before, or if the time is over.
        """
        link, request = self._settlement(name, used)
        try:
            link.call(*request)
        except ConnectionLost as error:
            if not self._client._has_resumed(link):
                raise
            with nullcontext() if isinstance(error, NotSent) else suppress(NotFound):  # it may have been settled
                self._client._connected(hears=False).call(*request)

    @property
    def lost(self) -> bool:
        """Whether the connection and the permits were lost. Reading the property checks the socket."""
        return self._link is not None and not self._link.is_alive()

    def raise_if_lost(self) -> None:
        """Does the same as Hold.raise_if_lost()."""
        link = self._link
        if link is not None and not link.is_alive():
            raise self._asked.lost(link.where, link.closed)

    def __enter__(self) -> Taken:
        return self.acquire()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        link, inside, self._inside = self._link, self._inside, False
        if link is None or not inside:
            raise RuntimeError(NOT_TAKEN)
        try:
            if self._held and kind is not GeneratorExit:  # that may come in the middle of another call
                link.release(*self._held)
        except ConnectionLost:
            if kind is None:
                self._raise_loss(link)
        except CounterdError:
            if kind is None:
                raise
        finally:
            for hold, name in self._held:
                link.disown(hold, name)  # what is left of it
            self._entered.release()
            for _, name in self._held:
                self._client._turns.wake(name)

    def __call__(self, function: F) -> F:
        """Returns a function, or a generator, that has the items while it runs. Each call takes its own items."""
        return decorated(function, partial(Taken, self._client, self._asked))


class _Watcher:
    """The thread of a Client(watch=True): notices lost connections, notifies holds, and acquires permits again."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self.ended: deque[Link] = deque()  # connections whose holds are to be notified
        self._waker = Waker()
        self._lock = threading.Lock()  # protects _waker, which is closed once the thread has ended
        self._stopped = False
        self._thread = threading.Thread(target=self._run, name="counterd-watch", daemon=True)
        self._thread.start()

    def wake(self) -> None:
        """Called when there is a new connection, or when a connection has ended."""
        with self._lock:
            self._waker.wake()

    def stop(self) -> None:
        self._stopped = True
        self.wake()
        if self._thread is not threading.current_thread():
            self._thread.join()

    def after_fork(self) -> None:
        """Called in the child of a fork, where the thread does not run."""
        self._waker.close()

    def _run(self) -> None:
        try:
            self._watch()
        finally:
            with self._lock:
                self._waker.close()

    def _watch(self) -> None:
        again: list[Hold] = []
        backoff = Backoff(ASK_FIRST_S, ASK_LONGEST_S)
        while not self._stopped:
            resuming = []
            while self.ended:
                link = self.ended.popleft()
                if link.closed in NO_LOSS or self._client._has_resumed(link):
                    continue
                if link.may_resume():
                    resuming.append(link)
                else:
                    again += [hold for hold in list(link.holds) if isinstance(hold, Hold) and hold._tell()]
            self.ended.extend(resuming)
            pause = None
            if again or resuming:
                again = [hold for hold in again if not self._succeeds(hold)]
                pause = max(backoff.delay(), self._client._attempts.retry_at - time.monotonic())
            if not (again or resuming):
                backoff.reset()
                pause = None
            self._client._link.watch(self._waker.fileno(), pause)
            self._waker.take()

    def _succeeds(self, hold: Hold) -> bool:
        try:
            return hold._acquire_again()
        except CounterdError as error:
            if not isinstance(error, (NotAvailable, ConnectionLost)):
                _log.warning("cannot acquire %s again: %s", hold._asked, error)
            return False


class Pipeline(Requests, ForWith):
    """Requests that are sent together. Client.pipeline() returns it.

    In a `with`, requests that were not sent when the block ends are forgotten.
    """

    def __init__(self, client: Client) -> None:
        super().__init__()
        self._client = client

    def __enter__(self) -> Pipeline:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._taken()

    def execute(self) -> list[Result]:
        """Sends all requests, and returns their results in order. The result of a refused request is its ServerError.

        Raises ValueError if a request does not fit the protocol; then nothing is sent. Raises Timeout, ConnectionLost
        or ProtocolError if a request is not answered. Everything that the other requests acquired is then given back.
        The pipeline is empty afterwards.
        """
        return self._client._run(self._taken())


class Semaphore(ForWith):
    """A counter with the methods of threading.BoundedSemaphore, also for `with`. Client.semaphore() returns it.

    Threads may share a semaphore. Each acquire() takes one permit. At most as many permits can be released as were
    acquired.
    """

    def __init__(self, client: Client, name: str | bytes, maximum: int) -> None:
        self._client = client
        self._name = client.hold(name, maximum=maximum)._asked.name  # raises for arguments that do not fit the protocol
        self._maximum = maximum
        self._holds: list[Hold] = []

    def acquire(self, blocking: bool = True, timeout: float | None = None) -> bool:
        """Takes a permit. With blocking, waits for at most timeout seconds. Returns False if no permit was free."""
        if not blocking and timeout is not None:
            raise ValueError("a timeout needs blocking=True")
        waits = timeout if timeout is None or timeout > 0 else 0
        hold = self._client.hold(self._name, maximum=self._maximum, timeout=waits if blocking else 0)
        try:
            self._holds.append(hold.__enter__())
        except NotAvailable:
            return False
        return True

    def release(self, n: int = 1) -> None:
        """Gives n permits back.

        Raises ValueError if fewer permits were acquired, ConnectionLost if one of them was lost.
        """
        if n < 1:
            raise ValueError("n must be one or more")
        released: list[Hold] = []
        try:
            while len(released) < n:
                released.append(self._holds.pop())
        except IndexError:
            self._holds += released
            raise ValueError("semaphore released too many times") from None
        with ExitStack() as leaving:  # releases all, even if one was lost
            for hold in released:
                leaving.push(hold)

    def __repr__(self) -> str:
        return f"<Semaphore {printed(self._name)}, maximum {self._maximum}, {len(self._holds)} acquired here>"

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._taken().__exit__(kind, error, trace)

    def _taken(self) -> Hold:
        if not self._holds:
            raise ValueError("semaphore released too many times")
        return self._holds.pop()
