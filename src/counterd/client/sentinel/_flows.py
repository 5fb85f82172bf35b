"""The methods of the clients for the sentinel protocol, written once for the blocking client and the client for
asyncio.

Each method is a step machine. The step machine yields an Act and its arguments, gets the result or the CounterdError of
the act, and returns the result of the method. The step machine is closed if the caller is interrupted. A client
performs the acts, and has the clock.

Floor: side (ARCHITECTURE.md). No I/O, and no clock except for the fallback.
"""

from __future__ import annotations

import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar

from counterd.client._addresses import read_addresses
from counterd.client._command import command
from counterd.client._connecting import Connecting
from counterd.client._connection import CLOSED, FORKED
from counterd.client._holding import NO_LOSS, RAISE
from counterd.client._steps import CALL_ALL, CONNECT, TAKE
from counterd.client._waiting import Patience, waiting
from counterd.client.sentinel._fallback import LOCAL, Fallback, Stats, log
from counterd.client.sentinel._tokens import (
    FAILURES,
    RELEASED,
    UNKNOWN,
    Answer,
    AskedToken,
    Leases,
    TokenCalls,
    check,
    flow_key,
    lost,
    not_kept,
    read_namespace,
    release,
    values_of,
)
from counterd.errors import ConnectionLost, CounterdError, Timeout
from counterd.protocols.sentinel import wire
from counterd.protocols.sentinel.errors import TokenRefused, token_error
from counterd.protocols.sentinel.wire import Status

if TYPE_CHECKING:
    import os
    import ssl
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from counterd.client._calls import Request
    from counterd.client._steps import Steps
    from counterd.client._wait_queues import Queue, Waiter
    from counterd.client.sentinel._tokens import Lease, Token
    from counterd.protocols.sentinel.wire import Response, Value

HoldT = TypeVar("HoldT")


class Commands(Connecting, Generic[HoldT]):
    """The methods of a client, blocking or for asyncio."""

    _connect_soon: Callable[[], None]  # starts to connect, if it is time to, without waiting
    _due: Callable[[float], None]  # has _keeping() run at that time
    _make_hold: Callable[[Any, AskedToken], HoldT]  # of this client

    def __init__(
        self,
        host: str | Sequence[str] = "127.0.0.1",
        port: int = wire.PORT,
        *,
        path: str | os.PathLike[str] | None = None,
        tls: bool | ssl.SSLContext = False,
        namespace: str | bytes = "default",
        timeout: float = 0.2,
        connect_timeout: float | None = 1.0,
        fallback: Literal["local", "open", "closed"] = LOCAL,
        limits: Mapping[int, int] | None = None,
    ) -> None:
        self._namespace = read_namespace(namespace)
        self._fallback = Fallback(fallback, limits or {}, time.monotonic)  # even if an event loop has another clock
        self._leases = Leases()
        self._outage = ""  # why no call connects
        addresses = read_addresses(host, port, path, "sentinel", tls)
        super().__init__(addresses, timeout, connect_timeout)

    @command
    def flow(self, flow_id: int, count: int = 1, *, prioritized: bool = False) -> Steps[Answer]:
        """Asks whether `count` calls of a flow may pass now, according to the flow's rate.

        prioritized: if the calls may not pass now, the server can let them pass after a wait, at the expense of later
        calls.
        """
        check(flow_id, count)
        return self._answered(flow_id, count, (), (wire.flow, flow_id, count, prioritized))

    @command
    def param(self, flow_id: int, values: Iterable[Value], count: int = 1) -> Steps[Answer]:
        """Asks whether `count` calls of a flow may pass now for each of these parameter values: for all values or none.

        values: bool, int, float, text or bytes, which become Java's Boolean, Integer or Long, Double and String.
        Typed(Tag.SHORT, 5) is a value of another Java type. The encoded values can have 1,001 bytes.
        """
        check(flow_id, count)
        values = values_of(values)
        return self._answered(flow_id, count, values, (wire.param_flow, flow_id, count, values))

    @command
    def acquire(self, flow_id: int, count: int = 1, *, prioritized: bool = False) -> Steps[Token]:
        """Returns a token for `count` calls of a flow that run at the same time. Raises Blocked if too many calls run.

        Asks the server once, and does not keep the lease alive as hold() does: call keep() until you release() the
        token.
        prioritized: only some servers use this.
        """
        return self._acquired(AskedToken(flow_id, count, prioritized, 0, RAISE))

    @command
    def release(self, token: Token) -> Steps[bool]:
        """Gives a token back. Returns False if the token was gone: it was given back before, or its lease was over.

        If the connection is lost meanwhile, asks again, and returns True even if the token is gone by then.
        """
        return self._released(token)

    @command
    def keep(self, token: Token) -> Steps[int]:
        """Renews the lease of a token. Returns how many milliseconds of the lease remain. Raises TokenLost if the token
        is gone.

        Raises NoSuchRule if the flow's rule is gone; then the lease is not renewed. A token of the fallback has no
        lease; for this token keep() always returns the longest time.
        """
        if token.fallback:
            return wire.LEASE_MAX
        response = yield from self._called((wire.keep, token.id))
        if response.status != Status.OK:
            if response.status == Status.ALREADY_RELEASED:
                self._fallback.gone(token)
            raise not_kept(response.status, token)
        return response.left_ms

    @command
    def ping(self) -> Steps[int]:
        """Returns how many connections are registered in the namespace, including this one."""
        response = yield from self._called((wire.ping, self._namespace))
        if response.status != Status.OK:
            raise token_error(response.status)
        return response.connected

    def hold(
        self,
        flow_id: int,
        count: int = 1,
        *,
        prioritized: bool = False,
        timeout: float | None = None,
        on_lost: Callable[[HoldT], object] | Literal["raise"] = RAISE,
    ) -> HoldT:
        """Holds a token while a block runs: `with client.hold(101, timeout=5):`, or as a decorator. For asyncio, use
        `async with`.

        Waits while the flow is blocked, for at most timeout seconds (None: for ever, 0: asks once). Then raises
        Blocked. Holds of one client get tokens of a flow in the order in which they began to wait. A hold also waits
        while the server cannot be reached and the fallback lets nothing pass. If the timeout ends during this time, the
        hold raises ConnectionLost. If the server does not answer, the hold immediately raises Timeout. If the answer is
        not a decision, it immediately raises TokenRefused. The client keeps the lease alive, also through a new
        connection. The token is given back at the end of the block. If the server cannot be reached then, the token
        ends with its lease.

        on_lost: what to do when the token is lost while the block runs. A token is lost when the server no longer knows
        it, or when its lease ended before the server could be reached. "raise": the end of the block raises TokenLost,
        unless the block has raised another exception. A function: it is called immediately with the hold, by the thread
        that keeps all leases or by the event loop. So the function must be quick.
        """
        return self._make_hold(self, AskedToken(flow_id, count, prioritized, timeout, on_lost))

    def stats(self) -> Stats:
        """Returns how many calls were decided without the server, and how many tokens were lost.

        Does not ask the server.
        """
        return self._fallback.stats()

    # ---- calls ----

    def _called(
        self,
        request: Request,
        granted: Callable[[Response], object] | None = None,
        on_repeat: Callable[[], object] | None = None,
    ) -> Steps[Response]:
        """Asks the server, and asks once more if the connection is lost. To ask again is safe, because a token whose
        grant the client has not seen soon ends. If the server never answered on that connection, does not ask again.
        """
        link = self._usable_link() or (yield from self._reached())
        try:
            first: Response = yield TAKE, link, request, granted
            return first
        except ConnectionLost:
            if not link.calls.answered or self._closed:
                raise
        if on_repeat is not None:
            on_repeat()
        again: Response = yield TAKE, (yield from self._reached()), request, granted
        return again

    def _reached(self) -> Steps[Any]:
        """Returns the connection. If the connection was lost, returns a new one. If the last attempt to connect has
        failed, immediately raises ConnectionLost: no call waits for the next attempt.
        """
        if link := self._usable_link():
            return link
        if self._outage and not self._closed:
            self._connect_soon()
            raise ConnectionLost(self._outage)
        return (yield from self._linked())

    def _linked(self) -> Steps[Any]:
        try:
            return (yield (CONNECT,))
        except (ConnectionLost, Timeout) as error:
            if not self._closed:
                self._outage = self._outage or str(error)
            raise ConnectionLost(str(error)) from error

    def _decision(
        self, flow_id: int, count: int, request: Request, granted: Callable[[Response], object] | None = None
    ) -> Steps[Response | CounterdError]:
        """Returns the server's decision, or the reason why the server did not decide.

        After close(), raises the reason.
        """
        try:
            response = yield from self._called(request, granted)
        except FAILURES as error:
            if self._closed:
                raise
            return error
        return self._fallback.heard(flow_id, count, response) or response

    def _answered(self, flow_id: int, count: int, values: Sequence[Value], request: Request) -> Steps[Answer]:
        decision = yield from self._decision(flow_id, count, request)
        if isinstance(decision, CounterdError):
            return self._fallback.answer(flow_id, count, values, decision)
        return Answer(decision.status, decision.remaining, decision.wait_ms)

    def _asked(self, hold: HoldSteps, asked: AskedToken) -> Steps[Token]:
        """Returns a token of the server or of the fallback. Raises Blocked, or the reason why there was no decision."""

        def granted(response: Response) -> None:
            if response.status == Status.OK:
                hold._token = asked.token(response)

        decision = yield from self._decision(asked.flow_id, asked.count, asked.request, granted)
        if hold._token is not None:  # maybe granted at the last moment, when the caller had waited long enough
            self._fallback.granted(hold._token)
        elif isinstance(decision, CounterdError):
            hold._token = self._fallback.acquire(asked.flow_id, asked.count, decision)
        else:
            raise asked.blocked(None)
        return hold._token

    def _acquired(self, asked: AskedToken) -> Steps[Token]:
        hold = HoldSteps(self, asked)
        try:
            return (yield from self._asked(hold, asked))
        except BaseException:
            self._give_back(hold._token)
            raise

    def _released(self, token: Token) -> Steps[bool]:
        if token.fallback:
            released = self._fallback.release(token)
        else:
            repeated: list[None] = []
            try:
                status = (
                    yield from self._called((wire.release, token.id), on_repeat=lambda: repeated.append(None))
                ).status
            except FAILURES:
                raise
            except BaseException:
                self._give_back(token)  # maybe once more
                raise
            released = status != Status.ALREADY_RELEASED or bool(repeated)  # maybe by the first request
            if status not in RELEASED:
                raise not_kept(status, token)
            self._fallback.gone(token)
        self._wait_queues.wake(flow_key(token.flow_id))
        return released

    def _give_back(self, token: Token | None) -> None:
        """Releases a token without waiting for the reply."""
        if token is None or self._closed:
            return
        if token.fallback:
            self._fallback.release(token)
        else:
            self._fallback.gone(token)
            self._link.give_back(release(token))
        self._wait_queues.wake(flow_key(token.flow_id))

    # ---- leases and connections ----

    def _began(self, hold: HoldSteps, token: Token) -> Lease:
        """Returns the lease of a hold's token. The lease is kept alive from now on."""
        lease = self._leases.begin(token, hold, self._now())
        if self._closed:  # meanwhile
            self._leases.forget(CLOSED)
        self._due(lease.due)
        return lease

    def _keeping(self, connects: bool = False) -> Steps[None]:
        """Renews the leases that are due, connects if there is no connection, and notifies the holds that are lost.

        connects: whether to connect even if there is no lease.
        """
        if connects or self._leases.holds:
            with suppress(*FAILURES):
                link = yield from self._linked()
                if due := self._leases.due(asked := self._now()):
                    responses: list[Response | None] = [None] * len(due)
                    with suppress(*FAILURES):
                        responses = yield CALL_ALL, link, [(wire.keep, lease.token.id) for lease in due]
                    self._leases.answered(due, asked, self._now(), responses)
        for lease, hold in self._leases.take_lost(self._now()):
            self._fallback.lost(lease)
            hold._notify()

    def _make_calls(self) -> TokenCalls:
        return TokenCalls(self._fallback.tally)

    def _give_all_back(self) -> None:
        """Called before the connection is closed. If this interrupts a call, the tokens end with their leases."""
        self._leases.forget(CLOSED)
        self._link.give_back(*map(release, self._fallback.close()))

    def _after_fork(self) -> None:
        self._leases.forget(FORKED)
        super()._after_fork()
        self._fallback.after_fork()
        self._outage = ""

    def _usable_link(self) -> Any:
        """Returns the connection, or None if there is none now."""
        link = self._link
        return None if link.closed else link

    def _due_at(self) -> float:
        """Returns when _keeping() has work to do next. Returns infinity if there is no work."""
        return self._leases.due_at(None if self._usable_link() else self._attempts.retry_at)

    def _greeted(self, link: Any) -> Steps[None]:
        link.tell(wire.ping, self._namespace)
        yield from ()

    def _on_connected(self) -> None:
        """Renews all leases through a new connection. The tokens then belong to that connection."""
        self._outage = ""
        kept = self._leases.hurry()
        for token in self._fallback.tokens():
            if token not in kept:
                self._link.tell(wire.keep, token.id)
        if kept:
            self._due(0.0)


class HoldSteps:
    """The base of the holds for threads and for asyncio."""

    _CAUGHT: type[BaseException] = Exception  # after these exceptions of on_lost, other holds are still notified

    def __init__(self, client: Commands[Any], asked: AskedToken) -> None:
        self._client = client
        self._asked = asked
        self._entered = threading.Lock()  # locked from entering to leaving
        self._token: Token | None = None
        self._lease: Lease | None = None  # of a token of the server

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._asked}>"

    @property
    def token(self) -> Token | None:
        """The token, with the server's number for it. None outside of the block."""
        return self._token

    @property
    def lost(self) -> bool:
        """Whether the token was lost while the block runs, as far as the client knows. Does not ask the server."""
        return self._lease is not None and self._lease.look(self._client._now())

    @property
    def fallback(self) -> bool:
        """Whether the token is one of the fallback, which the server does not know."""
        return self._token is not None and self._token.fallback

    def raise_if_lost(self) -> None:
        """Raises TokenLost if hold.lost is true. Call this before any action that needs the token."""
        lease = self._lease
        if lease is not None and lease.look(self._client._now()):
            raise lost(lease.token, lease.lost)

    def _entering(self) -> Steps[None]:
        if not self._entered.acquire(blocking=False):
            raise RuntimeError("this hold is already in use: make another one")
        try:
            client, asked = self._client, self._asked
            waiter, patience, waits = client._new_waiter(), Patience(asked.timeout, client._now), Waits(self)
            yield from waiting(client._wait_queues, waiter, asked, patience, waits, retry_at=client._next_attempt)
            assert self._token is not None
            if not self._token.fallback:
                self._lease = self._client._began(self, self._token)
        except BaseException:  # an interrupt may come after the grant
            self._client._give_back(self._left())
            self._entered.release()
            raise

    def _leaving(self, kind: type[BaseException] | None) -> Steps[None]:
        client, lease = self._client, self._lease
        token = self._left()
        assert token is not None
        try:
            if lease is not None and lease.lost in NO_LOSS:
                return
            if lease is None or kind is GeneratorExit:  # destroyed, maybe in the middle of another call: cannot wait
                client._give_back(token)
                return
            lease.look(client._now())
            try:
                was_known = yield from client._released(token)
            except (*FAILURES, TokenRefused):
                was_known = True  # as far as anybody knows; it ends with its lease
            if not was_known and not lease.lost:
                lease.lost = UNKNOWN
            client._fallback.lost(lease)
            if lease.lost and lease.lost not in NO_LOSS and kind is None and self._asked.on_lost == RAISE:
                raise lost(token, lease.lost)
        finally:
            self._entered.release()

    def _left(self) -> Token | None:
        """Takes the token away from the hold, and stops keeping its lease alive."""
        token, self._token = self._token, None
        lease, self._lease = self._lease, None
        if lease is not None:
            self._client._leases.holds.pop(lease, None)
        return token

    def _notify(self) -> None:
        """Called when the token was lost."""
        on_lost = self._asked.on_lost
        if callable(on_lost):
            try:
                on_lost(self)
            except self._CAUGHT:
                log.exception("the function on_lost of %s failed", self._asked)


class Waits:
    """How a hold asks for its token, for waiting()."""

    def __init__(self, hold: HoldSteps) -> None:
        self._hold = hold

    def ask(self) -> Steps[Token]:
        return self._hold._client._asked(self._hold, self._hold._asked)

    def give_up(self, queue: Queue, waiter: Waiter) -> Steps[CounterdError]:
        yield from ()
        return self._hold._asked.blocked(self._hold._asked.timeout)
