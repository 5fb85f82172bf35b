"""The clients for the counter protocol. This module has the blocking ones; counterd.client.aio those for asyncio.

Floor: side (ARCHITECTURE.md). The package needs only the wire module and counterd.errors, and no compiled module.
"""

from __future__ import annotations

import math
import threading
from contextlib import ExitStack, suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from counterd.client._addresses import read_default
from counterd.client._background import Background
from counterd.client._entering import ForWith
from counterd.client._holding import RAISE, decorated, printed
from counterd.client._threads import Threads
from counterd.client.counter._asked import Asked
from counterd.client.counter._commands import Commands, Pipelined, Result
from counterd.client.counter._holds import Holding, HoldSteps, TakenSteps
from counterd.client.counter._resuming import Greeting
from counterd.client.counter._taking import AskedItems, Permit, Rate, place
from counterd.errors import ConnectionLost, CounterdError, NotAvailable, ProtocolError
from counterd.protocols.counter import wire

if TYPE_CHECKING:
    import os
    import ssl
    from collections.abc import Callable, Sequence

    from counterd.client._threadlink import ThreadLink

__all__ = ["Client", "Hold", "Permit", "Pipeline", "Rate", "Semaphore", "Taken"]

BlockT = TypeVar("BlockT", bound="_Block")
F = TypeVar("F", bound="Callable[..., Any]")


class _Block(Holding, ForWith):
    def __enter__(self: BlockT) -> BlockT:
        self._claim()
        try:
            self._client._drive(self._entering())
        except BaseException:  # that of a signal may come before the first step, or after the last
            self._throw_away()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            self._client._drive(self._leave(kind))
        except BaseException:
            self._throw_away()
            raise


class Hold(HoldSteps, _Block):
    """Permits of a counter that are held while a block runs. Client.hold() returns it, for `with` or as a decorator.

    Use a hold in one thread and for one block at a time: make another hold for each, or share a Semaphore. As a
    decorator, a hold acquires separate permits for each call. Holds are not reentrant: a hold inside another hold of
    the same name asks for more permits.
    """

    def __call__(self, function: F) -> F:
        """Returns a function, or a generator, that holds permits while it runs. Each call has its own permits."""
        return decorated(function, partial(Hold, self._client, self._asked))


class Taken(TakenSteps, _Block):
    """Permits and units of rates that are taken together. Client.take() returns it, for `with` or as a decorator.

    Use it in one thread and for one block at a time. As a decorator, it takes separate items for each call.
    """

    def acquire(self) -> Taken:
        """Takes all items. Raises the exceptions that Client.take() describes."""
        return self.__enter__()

    def release(self) -> None:
        """Gives the permits back. Raises ConnectionLost if they were lost. settle() works after release()."""
        self._check_taken()
        self.__exit__(None, None, None)

    def settle(self, name: str | bytes, used: int) -> None:
        """Replaces the units that were taken of a rate by the units that were really used, more or fewer. Each rate of
        a Take can be settled once.

        A rate can be settled after the end of the block too, for counter.settle_time. Raises NotFound if the rate was
        settled before, or if the time is over.
        """
        self._client._drive(self._settling(name, used))

    def __call__(self, function: F) -> F:
        """Returns a function, or a generator, that has the items while it runs. Each call takes its own items."""
        return decorated(function, partial(Taken, self._client, self._asked))


class Client(Commands, Threads):
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

    _CAUGHT = BaseException  # of a function on_lost: other holds need the thread that calls it

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
        greeting = Greeting(resume, name)
        self._watch = watch or greeting.resumes
        where = read_default(host, port, path, tls, default_port=wire.PORT)
        super().__init__(where, timeout, connect_timeout, greeting)
        if self._watch:
            self._background.start()

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
        self._background.stop()
        self._background.join(self._connecting, self._link._lock)

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

    # ---- inside ----

    def _run_command(self, made: Any) -> Any:
        if not isinstance(made, tuple):
            return self._drive(made)
        link = self._connected()
        is_release = made[0] is wire.release
        was_open = is_release and link.is_open()
        try:
            result = link.call(*made)
        except (ConnectionLost, ProtocolError) as error:
            steps = self._recovered(link, made, error, was_open)
        else:
            if is_release:
                self._wait_queues.wake(made[1])
            return result
        again = self._drive(steps)
        return None if again is None else again.call(*made)

    def _on_end(self, link: ThreadLink) -> None:
        if self._watch:
            self._ended.append(link)
            self._background.wake()

    def _on_connected(self) -> None:
        if self._watch:
            self._background.start()

    def _work(self) -> tuple[ThreadLink, float]:
        """Runs in the watching thread: notifies holds of a loss, resumes connections, and acquires permits again."""
        pause = self._drive(self._tend())
        return self._link, math.inf if pause is None else self._now() + pause

    def _start_anew(self) -> None:
        super()._start_anew()
        self._swapping: Any = threading.RLock()
        self._background = Background("counterd-watch", self._work)

    def _after_fork(self) -> None:
        self._background.after_fork()
        super()._after_fork()
        self._ended.clear()
        self._again.clear()


class Pipeline(Pipelined, ForWith):
    """Requests that are sent together. Client.pipeline() returns it.

    In a `with`, requests that were not sent when the block ends are forgotten.
    """

    def __init__(self, client: Client) -> None:
        super().__init__()
        self._client = client

    def __enter__(self) -> Pipeline:
        return self

    def __exit__(self, *_: object) -> None:
        self._taken()

    def execute(self) -> list[Result]:
        """Sends all requests, and returns their results in order. The result of a refused request is its ServerError.

        Raises ValueError if a request does not fit the protocol; then nothing is sent. Raises Timeout, ConnectionLost
        or ProtocolError if a request is not answered. Everything that the other requests acquired is then given back.
        The pipeline is empty afterwards.
        """
        results: list[Result] = self._client._drive(self._client._run_all(self._taken()))
        return results


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

    def __exit__(self, *error: Any) -> None:
        self._taken().__exit__(*error)

    def _taken(self) -> Hold:
        if not self._holds:
            raise ValueError("semaphore released too many times")
        return self._holds.pop()
