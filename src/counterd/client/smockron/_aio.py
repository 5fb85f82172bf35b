"""The asyncio gatekeeper of counterd.client.smockron, for any event loop.

Floor: side (ARCHITECTURE.md).
"""

from __future__ import annotations

import asyncio
import math
from asyncio import get_running_loop
from time import monotonic, monotonic_ns, time_ns
from typing import TYPE_CHECKING, Any

from counterd.client._connection import open_transport
from counterd.client._entering import ForAsyncWith
from counterd.client._tasklink import Wire
from counterd.client.smockron._base import AdmissionBase, GatekeeperBase
from counterd.client.smockron._connections import LINGER_S, Connections, reason
from counterd.client.smockron._gatekeeping import Decision, Verdict, closed

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

    from counterd.client.smockron._gatekeeping import Core
    from counterd.client.smockron._zmtp import ZmtpSession

PIECE = 8192  # bytes that are handled in one turn of the loop: control messages for a millisecond


class AioChannel(Wire):
    """A connection with one port of a master."""

    def __init__(self, owner: Transports, session: ZmtpSession) -> None:
        super().__init__(owner.loop)
        self._owner = owner
        self._session = session

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._owner.made.add(self)
        self._owner.connections.opened(self._session, self)

    def data_received(self, data: bytes) -> None:
        """Handles the data in pieces, so that other tasks run in between: the data can contain thousands of control
        messages."""
        if self._is_open():
            self._owner.connections.received(self._session, data[:PIECE])
            self._owner.turn()
        if len(data) > PIECE:
            self.transport.pause_reading()
            self._owner.loop.call_soon(self._go_on, data[PIECE:])

    def _go_on(self, data: bytes) -> None:
        if not self.transport.is_closing():
            self.transport.resume_reading()
            self.data_received(data)

    def eof_received(self) -> None:
        self.lose(f"{self._session.address} closed the connection")

    def connection_lost(self, error: Exception | None) -> None:
        self.lose(str(error or f"{self._session.address} closed the connection"))
        self._owner.made.discard(self)
        super().connection_lost(error)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._owner.turn()

    def send(self, data: bytes) -> None:
        if data:
            self.transport.write(data)

    def close(self) -> None:
        self.abort()

    def lose(self, why: str) -> None:
        """Notes that the connection has ended, or could not be made. A second call does nothing."""
        if self.transport is None or self._is_open():
            self._owner.connections.lose(self._session, why)

    def _is_open(self) -> bool:
        return self._owner.connections.channels.get(self._session) is self


class Transports:
    """Makes the connections of a gatekeeper in an event loop, and calls the turns.

    A turn follows when bytes have arrived, when there is something to send, and when it is due. made: the connections,
    until they have ended. changed: set when the state of a master may have changed.
    """

    def __init__(self, core: Core, lock: Any, loop: asyncio.AbstractEventLoop, timeout: float) -> None:
        self.loop = loop
        self.changed = asyncio.Event()
        self.connections = Connections(
            core, lock, changed=self.changed.set, wake=self._wake, connect=self._start_to_connect, looks=1
        )
        self.made: set[AioChannel] = set()
        self._timeout = timeout
        self._connecting: set[asyncio.Task[None]] = set()
        self._timer: asyncio.Handle | None = None
        self._wake()

    def _wake(self) -> None:
        self._schedule(self.loop.call_soon(self.turn))

    def _schedule(self, timer: asyncio.Handle | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = timer

    def turn(self) -> None:
        if not self.connections.is_ended:
            due = self.connections.turn()
            self._schedule(None if due == math.inf else self.loop.call_later(due - monotonic(), self.turn))

    def _start_to_connect(self, session: ZmtpSession) -> None:
        task = self.loop.create_task(self._connect(session))
        self._connecting.add(task)
        task.add_done_callback(self._connecting.discard)

    async def _connect(self, session: ZmtpSession) -> None:
        channel = AioChannel(self, session)
        try:
            await asyncio.wait_for(open_transport(self.loop, channel, session.address), self._timeout)
        except asyncio.TimeoutError:  # another class than TimeoutError, until Python 3.10
            channel.lose(reason(TimeoutError(), session, self._timeout))
        except Exception as error:  # noqa: BLE001 - also a bug: requests would pass without a limit from now on
            channel.lose(reason(error, session, self._timeout))

    async def until(self, condition: Callable[[], bool], seconds: float) -> bool:
        """Waits until the condition holds, or until end(). Returns False if it does not hold after so many seconds."""

        async def wait() -> None:
            while not (self.connections.is_ended or condition()):
                self.changed.clear()
                await self.changed.wait()

        try:
            await asyncio.wait_for(wait(), seconds)
        except (TimeoutError, asyncio.TimeoutError):
            return False
        return True

    def end(self) -> None:
        """Ends the connections and the tasks. end() may be called after the event loop was closed, too."""
        self.connections.end()
        self.changed.set()
        if self.loop.is_closed():
            for channel in self.made:
                channel.hang_up()
            return
        self._schedule(None)
        for task in self._connecting:
            task.cancel()
        for channel in self.made:
            channel.transport.close()

    async def ended(self) -> None:
        """Returns when all tasks and connections have ended. The transports have LINGER_S to send their bytes."""
        await asyncio.gather(*self._connecting, return_exceptions=True)
        if over := [channel.over for channel in self.made]:
            await asyncio.wait(over, timeout=LINGER_S)
            for channel in list(self.made):
                channel.abort()
            await asyncio.wait(over)

    def after_fork(self) -> None:
        """Called in the child of a fork. Closes the child's copies of the sockets, and nothing else."""
        for channel in self.made:
            channel.put_away()


class AsyncGatekeeper(GatekeeperBase, ForAsyncWith):
    """The Gatekeeper for the tasks of one event loop. Use the gatekeeper in an `async with`, or await close().

    AsyncGatekeeper has the same arguments, results and errors as Gatekeeper. The gatekeeper needs no thread, and is not
    thread-safe. In another event loop the gatekeeper raises RuntimeError, unless the first event loop was closed. Then
    it connects again.
    """

    _loop: asyncio.AbstractEventLoop | None = None  # in which it is used
    _transports: Transports | None = None

    async def __aenter__(self) -> AsyncGatekeeper:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is GeneratorExit:  # a coroutine that is destroyed cannot wait
            self._closed = True
            self._leave_loop()
        else:
            await self.close()

    async def connect(self, timeout: float = 5.0) -> bool:
        """Connects now, and waits until all masters are connected and subscribed. Returns False if this takes too long.

        You need not call connect(). A gatekeeper does not know what a master announced before the connection. Raises
        ConnectionLost if the gatekeeper is closed before or during this call.
        """
        is_ready = await self._own_loop().until(lambda: self._core.is_ready, timeout)
        if self._closed:
            raise closed()
        return is_ready

    async def close(self) -> None:
        """Sends unsent messages, for up to a second, and ends the connections. Later decisions raise ConnectionLost.

        Raises RuntimeError in another event loop, unless the first event loop was closed: then nothing more is sent.
        """
        self._check_loop()
        transports = self._transports if self._loop is get_running_loop() else None
        self._closed = True
        try:
            if transports is not None:
                transports.connections.leave()
                await transports.until(lambda: not transports.connections.has_unsent(), LINGER_S)
        finally:
            self._leave_loop()
        if transports is not None:
            await transports.ended()

    def decide(
        self, identifier: str | bytes, domain: str | bytes | None = None, log_info: str | bytes = b""
    ) -> Decision:
        """Decides whether a request that arrives now passes, waits or is rejected. decide() does not wait, unlike
        admit().

        log_info: a text for the master's log, cut to 1,024 bytes; counterd ignores it.
        """
        if self._closed or self._loop is not get_running_loop():
            self._own_loop()
        return self._core.decide(identifier, domain, log_info, monotonic_ns(), time_ns())

    def admit(
        self, identifier: str | bytes, domain: str | bytes | None = None, log_info: str | bytes = b""
    ) -> AsyncAdmission:
        """Admits a request: `async with gatekeeper.admit("10.0.0.1"):` waits if the request has to wait.

        Raises Rejected if the request is rejected.
        """
        return AsyncAdmission(self, identifier, domain, log_info)

    # ---- inside ----

    def _own_loop(self) -> Transports:
        """Returns the transports in the running event loop.

        Raises RuntimeError if the gatekeeper belongs to another event loop that is not closed.
        """
        if self._closed:
            raise closed()
        loop = get_running_loop()
        if self._transports is None or self._loop is not loop:
            self._check_loop()
            if self._transports is not None:
                self._leave_loop()
                self._core.reset()
            self._loop, self._transports = loop, Transports(self._core, self._lock, loop, self._timeout)
        return self._transports

    def _check_loop(self) -> None:
        if self._loop not in (None, get_running_loop()) and not self._loop.is_closed():
            raise RuntimeError(f"{self} belongs to another event loop: make one for each event loop")

    def _leave_loop(self) -> None:
        if self._transports is not None:
            self._transports.end()
        self._transports = self._loop = None

    def _after_fork(self) -> None:
        if self._transports is not None:
            self._transports.after_fork()
        self._transports = self._loop = None
        super()._after_fork()


class AsyncAdmission(AdmissionBase, ForAsyncWith):
    """One request at a gatekeeper.

    AsyncGatekeeper.admit() returns it, for one `async with`, which gives the Decision.
    """

    async def __aenter__(self) -> Decision:
        decision = self._decide()
        if decision.verdict is Verdict.DELAY:
            try:
                await asyncio.sleep(decision.delay_s)
            finally:
                self._gatekeeper.gave_up(decision)
        return decision

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Does nothing, because a gatekeeper does not count running requests."""
