"""The asyncio gatekeeper of counterd.client.smockron, for any event loop.

Floor: side (ARCHITECTURE.md). An AioTender serves the connections to one master, as a Tender does. The event loop runs
an AioTender when bytes have arrived, when there is something to send, and when it is time to connect or to send a PING.
"""

from __future__ import annotations

import asyncio
import math
from asyncio import get_running_loop
from contextlib import suppress
from time import monotonic, monotonic_ns, time_ns
from typing import TYPE_CHECKING, Literal, cast

from counterd.client._aiolink import hang_up, put_away
from counterd.client._connection import forked, open_transport, set_options
from counterd.client._entering import ForAsyncWith
from counterd.client.smockron._gatekeeping import ALL, Core, Decision, Options, Stats, Verdict, closed, log, report
from counterd.client.smockron._tender import LINGER_S, SEND_PAUSE_S
from counterd.errors import CounterdError

if TYPE_CHECKING:
    import socket
    import ssl
    from types import TracebackType

    from counterd.client.smockron._gatekeeping import Master
    from counterd.client.smockron._line import Line
    from counterd.client.smockron._masters import Masters


PIECE = 8192  # bytes that are handled in one turn of the loop: control messages for a millisecond


class Wire(asyncio.Protocol):
    """A connection, also before it is made and after its end. is_paused: whether the transport's buffer is full."""

    def __init__(self, tender: AioTender, line: Line) -> None:
        self.is_paused = False
        self.transport: asyncio.Transport | None = None
        self.gone = tender.loop.create_future()
        self._tender = tender
        self._line = line

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)  # uvloop's are not of its class
        if isinstance(transport.get_extra_info("peername"), tuple):  # of TCP
            set_options(cast("socket.socket", transport.get_extra_info("socket")))
        self._tender.made(self._line, self)

    def data_received(self, data: bytes) -> None:
        """Handles the data in pieces, so that other tasks run in between: the data can contain thousands of control
        messages."""
        self._tender.received(self._line, self, data[:PIECE])
        if len(data) > PIECE:
            assert self.transport is not None
            self.transport.pause_reading()
            self._tender.loop.call_soon(self._go_on, data[PIECE:])

    def _go_on(self, data: bytes) -> None:
        assert self.transport is not None
        if not self.transport.is_closing():
            self.transport.resume_reading()
            self.data_received(data)

    def eof_received(self) -> None:
        self._tender.lose(self._line, self, f"{self._line.address} closed the connection")

    def connection_lost(self, error: Exception | None) -> None:
        self._tender.lose(self._line, self, str(error or f"{self._line.address} closed the connection"))
        self.gone.set_result(None)

    def pause_writing(self) -> None:
        self.is_paused = True

    def resume_writing(self) -> None:
        self.is_paused = False
        self._tender.turn()


class AioTender:
    """Serves the connections to one master. news: set in each turn, and when a connection was lost."""

    def __init__(self, core: Core, master: Master, loop: asyncio.AbstractEventLoop, timeout: float) -> None:
        self.loop = loop
        self.news = asyncio.Event()
        self._core = core
        self._master = master
        self._timeout = timeout
        self._wires: dict[Line, Wire] = {}  # of the connections that are open
        self._made: set[Wire] = set()  # also of connections that are being closed
        self._connecting: set[asyncio.Task[None]] = set()
        self._is_ended = False
        self._timer: asyncio.Handle | None = None
        master.stir = self._stirred
        self._stirred()

    def _stirred(self) -> None:
        """Called when there is work for the next turn of the event loop."""
        self._schedule(self.loop.call_soon(self.turn))

    def _schedule(self, timer: asyncio.Handle | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = timer

    def turn(self) -> None:
        """Sends the waiting bytes, connects if it is time to, and schedules the next turn."""
        if self._is_ended:
            return
        for line, wire in list(self._wires.items()):
            try:
                report(self._core.look(self._master, line, monotonic()))
            except CounterdError as error:
                self.lose(line, wire, str(error))
                continue
            if not wire.is_paused:
                self._send(line, wire)
        self.news.set()
        now = monotonic()
        for line in self._master.lines:
            if self._master.wants(line, now):
                line.is_connecting = True
                task = self.loop.create_task(self._connect(line))
                self._connecting.add(task)
                task.add_done_callback(self._connecting.discard)
        accounting = self._wires.get(self._master.accounting)
        if self._master.is_stirred and accounting is not None and not accounting.is_paused:
            pause = SEND_PAUSE_S
        else:
            pause = self._master.due(now)
        self._schedule(None if pause == math.inf else self.loop.call_later(pause, self.turn))

    def _send(self, line: Line, wire: Wire) -> None:
        data = self._core.take(self._master, line, monotonic_ns())
        if line is self._master.accounting:
            self._master.is_stirred = bool(data)
        if data:
            assert wire.transport is not None
            wire.transport.write(data)

    async def _connect(self, line: Line) -> None:
        wire = Wire(self, line)
        try:
            await asyncio.wait_for(open_transport(self.loop, wire, line.address), self._timeout)
        except (TimeoutError, asyncio.TimeoutError):
            self._fail(line, wire, f"{line.address} did not accept a connection within {self._timeout:g} s")
        except OSError as error:
            self._fail(line, wire, f"cannot connect to {line.address}: {error}")
        except Exception as error:  # noqa: BLE001 - a bug: requests would pass without a limit from now on
            log.exception("a bug ended the connection to the master at %s", self._master.accounting.address)
            self._fail(line, wire, f"internal error: {error!r}")

    def _fail(self, line: Line, wire: Wire, why: str) -> None:
        if line in self._wires:
            self.lose(line, wire, why)
        elif not self._is_ended:
            report(self._core.lost(self._master, line, why, monotonic()))
            self.news.set()
            self._stirred()

    def made(self, line: Line, wire: Wire) -> None:
        assert wire.transport is not None
        self._made.add(wire)
        wire.gone.add_done_callback(lambda _: self._made.discard(wire))
        if self._is_ended:
            wire.transport.abort()
            return
        self._wires[line] = wire
        line.opened(monotonic())
        self._stirred()

    def received(self, line: Line, wire: Wire, data: bytes) -> None:
        if self._wires.get(line) is not wire:
            return
        try:
            report(self._core.feed(self._master, line, data, monotonic_ns(), time_ns()))
        except CounterdError as error:
            self.lose(line, wire, str(error))
        else:
            self.turn()

    def lose(self, line: Line, wire: Wire, why: str) -> None:
        """Ends a connection, or notes that it has ended. A second call does nothing."""
        if self._wires.get(line) is not wire:
            return
        assert wire.transport is not None
        del self._wires[line]
        wire.transport.abort()
        report(self._core.lost(self._master, line, why, monotonic()))
        self.news.set()
        self._stirred()

    async def drain(self) -> None:
        """Returns when everything has been passed to the transports, or when LINGER_S have passed."""
        self._core.leave(self._master)
        with suppress(TimeoutError, asyncio.TimeoutError):
            await asyncio.wait_for(self._drained(), LINGER_S)

    async def _drained(self) -> None:
        while self._core.has_left(self._master) and not self._is_ended:
            self.news.clear()
            await self.news.wait()

    def end(self) -> None:
        """Ends the connections and the tasks. end() may be called after the event loop was closed, too."""
        self._is_ended = True
        self.news.set()
        if self.loop.is_closed():
            for wire in self._made:
                assert wire.transport is not None
                hang_up(wire.transport)
            return
        self._schedule(None)
        for task in self._connecting:
            task.cancel()
        for wire in self._wires.values():
            assert wire.transport is not None
            wire.transport.close()
        self._wires.clear()

    async def ended(self) -> None:
        """Returns when all tasks and connections have ended. The transports have LINGER_S to send their bytes."""
        if self._connecting:
            await asyncio.wait(self._connecting)
        if self._made:
            await asyncio.wait([wire.gone for wire in self._made], timeout=LINGER_S)
        for wire in self._made:
            assert wire.transport is not None
            wire.transport.abort()
        if self._made:
            await asyncio.wait([wire.gone for wire in self._made])

    def after_fork(self) -> None:
        """Called in the child of a fork. Closes the child's copies of the sockets, and nothing else."""
        for wire in self._made:
            assert wire.transport is not None
            put_away(wire.transport)


class AsyncGatekeeper(ForAsyncWith):
    """The Gatekeeper for the tasks of one event loop. Use the gatekeeper in an `async with`, or await close().

    AsyncGatekeeper has the same arguments, results and errors as Gatekeeper. The gatekeeper needs no thread, and is not
    thread-safe. In another event loop the gatekeeper raises RuntimeError, unless the first event loop was closed. Then
    it connects again.
    """

    def __init__(
        self,
        masters: Masters = "127.0.0.1",
        domain: str | bytes = "default",
        *,
        tls: bool | ssl.SSLContext = False,
        max_delay_s: float = 5.0,
        max_delayed: int = 1000,
        rejected: Literal["all", "none"] | float = ALL,
        max_remembered: int = 100_000,
        max_held: int = 10_000,
        heartbeat: float = 5.0,
        timeout: float = 5.0,
    ) -> None:
        options = Options(max_delay_s, max_delayed, rejected, max_remembered, max_held, heartbeat, timeout)
        self._core = Core(masters, domain, tls, options)
        self._timeout = timeout
        self._tenders: list[AioTender] = []
        self._loop: asyncio.AbstractEventLoop | None = None  # in which it is used
        self._closed = False
        forked.add(self)

    def __repr__(self) -> str:
        return f"<AsyncGatekeeper {self._core.where}>"

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
        self._own_loop()
        try:
            await asyncio.wait_for(self._connected(), timeout)
        except (TimeoutError, asyncio.TimeoutError):
            return False
        return True

    async def close(self) -> None:
        """Sends unsent messages, for up to a second, and ends the connections. Later decisions raise ConnectionLost.

        Raises RuntimeError in another event loop, unless the first event loop was closed: then nothing more is sent.
        """
        self._check_loop()
        tenders = self._tenders if self._loop is get_running_loop() else []
        self._closed = True
        try:
            await asyncio.gather(*(tender.drain() for tender in tenders))
        finally:
            self._leave_loop()
        await asyncio.gather(*(tender.ended() for tender in tenders))

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

    def gave_up(self, decision: Decision) -> None:
        """Call this when a delayed request stops waiting, because its client has disconnected or its delay is over."""
        self._core.gave_up(decision)

    def admit(
        self, identifier: str | bytes, domain: str | bytes | None = None, log_info: str | bytes = b""
    ) -> AsyncAdmission:
        """Admits a request: `async with gatekeeper.admit("10.0.0.1"):` waits if the request has to wait.

        Raises Rejected if the request is rejected.
        """
        return AsyncAdmission(self, identifier, domain, log_info)

    def stats(self) -> Stats:
        """Returns how requests were decided, and what happened to the messages. stats() asks no master."""
        return self._core.stats(monotonic_ns())

    # ---- inside ----

    async def _connected(self) -> None:
        for tender, master in zip(self._tenders, self._core.masters, strict=True):
            while not master.is_ready:
                if self._closed:
                    raise closed()
                tender.news.clear()
                await tender.news.wait()

    def _own_loop(self) -> None:
        """Binds the gatekeeper to the running event loop.

        Raises RuntimeError if it belongs to another event loop that is not closed.
        """
        if self._closed:
            raise closed()
        loop = get_running_loop()
        if self._loop is loop:
            return
        self._check_loop()
        if self._loop is not None:
            self._leave_loop()
            self._core.reset()
        self._loop = loop
        self._tenders = [AioTender(self._core, master, loop, self._timeout) for master in self._core.masters]

    def _check_loop(self) -> None:
        if self._loop not in (None, get_running_loop()) and not self._loop.is_closed():
            raise RuntimeError(f"{self} belongs to another event loop: make one for each event loop")

    def _leave_loop(self) -> None:
        for tender in self._tenders:
            tender.end()
        self._tenders = []
        self._loop = None

    def _after_fork(self) -> None:
        """Called in the child of a fork, which has no event loop yet, and where no task of the parent runs."""
        for tender in self._tenders:
            tender.after_fork()
        self._tenders = []
        self._loop = None
        self._core.reset()


class AsyncAdmission(ForAsyncWith):
    """One request at a gatekeeper.

    AsyncGatekeeper.admit() returns it, for one `async with`, which gives the Decision.
    """

    def __init__(
        self, gatekeeper: AsyncGatekeeper, identifier: str | bytes, domain: str | bytes | None, log_info: str | bytes
    ) -> None:
        self._gatekeeper = gatekeeper
        self._asked = identifier, domain, log_info

    async def __aenter__(self) -> Decision:
        decision = self._gatekeeper.decide(*self._asked)
        if decision.verdict is Verdict.REJECT:
            raise self._gatekeeper._core.rejection(*self._asked[:2], decision)
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
