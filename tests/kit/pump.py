"""Moves bytes between a store in memory and its clients as net does, with a clock that a test drives.

A request of one connection may cause output of others: they are in take_dirty(), and the pump fetches that output.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from counterd._core import Session

MINUTE_NS = 60_000_000_000
# The beginning of a minute, whatever minutes are counted from: the store's first call or the clock's zero.
START_NS = 10_000 * MINUTE_NS
INT64_MAX = (1 << 63) - 1
UNIX_NS = 1_700_000_000_000_000_000  # the Unix time at START_NS
TURNS_MAX = 10_000  # more than any test needs


class Pump:
    """A store, its clock and its connections.

    ticking: the store gets its ticks when they are due; without them, only requests find out that time has passed.
    idle_max: how many ticks in a row may bring no output. A store whose journal a test writes later stays due.
    audits: the store is audited before each turn. cut: divides what clients send; nothing is due between two pieces.
    """

    def __init__(
        self,
        store: Any,
        *,
        now_ns: int = START_NS,
        ticking: bool = True,
        idle_max: int = TURNS_MAX,
        audits: bool = False,
    ) -> None:
        self.store = store
        self.now_ns = now_ns
        self.ticking = ticking
        self.idle_max = idle_max
        self.audits = audits
        self.cut: Callable[[bytes], Iterable[bytes]] = lambda data: [data]
        self.waiting: set[Peer] = set()  # their sessions have more
        store.set_wall(min(UNIX_NS + now_ns - START_NS, INT64_MAX), now_ns)

    def connect(self, *place: Any) -> Peer:
        """Opens a connection. place: where it comes to, if the protocol has several ports."""
        return Peer(self, self.store.session(self.now_ns, *place))

    def advance(self, duration_ns: int) -> None:
        """Lets time pass, from one thing that is due to the next."""
        end_ns = self.now_ns + duration_ns
        self.settle()
        while self.ticking and self.now_ns < (due_ns := self.store.next_deadline()) <= end_ns:
            self.now_ns = due_ns
            self.settle()
        self.now_ns = end_ns
        self.settle()

    def settle(self) -> None:
        """Runs turns, as net does, until nothing is due."""
        idle = 0
        for _ in range(TURNS_MAX):
            is_due, has_output = self.turn()
            idle = 0 if has_output else idle + 1
            if not (is_due or has_output) or idle >= self.idle_max:
                return
        raise AssertionError("there is always something due")

    def turn(self) -> tuple[bool, bool]:
        """Does what is due, and then fetches the output that waits. Returns (was something due, was there output)."""
        if self.audits:
            self.store.audit()
        is_due = self.ticking and 0 <= self.store.next_deadline() <= self.now_ns
        if is_due:
            self.store.tick(self.now_ns)
        pulled = self.waiting | {session.owner for session in self.store.take_dirty() if session.owner is not None}
        for peer in pulled:
            peer.pull()
        return is_due, bool(pulled)


class Peer:
    """A client's end of a connection, which treats its session as net does. output: what the session has sent.

    deaf: the client does not read any more. who: as whom() says.
    """

    def __init__(self, pump: Pump, session: Session) -> None:
        self.pump = pump
        self.deaf = False
        self.who = (b"user 0", True)
        self.session = session
        session.owner = self
        self.output = bytearray()
        self._ended = False

    def send(self, data: bytes) -> None:
        for piece in self.pump.cut(data):
            self.take(self.session.receive(piece, self.pump.now_ns))
        self.pump.settle()

    def read(self) -> bytes:
        """Returns all output so far."""
        return self.recv_exactly(len(self.output))

    def recv_exactly(self, size: int) -> bytes:
        assert len(self.output) >= size, f"expected {size} bytes, received {self.output.hex(' ')}"
        received = bytes(self.output[:size])
        del self.output[:size]
        return received

    def expect_nothing_more(self) -> None:
        assert not self.output, f"expected nothing, received {self.output.hex(' ')}"
        assert not self.session.closing

    def expect_eof(self) -> None:
        assert not self.output, f"expected the end, received {self.output.hex(' ')}"
        assert self.session.closing
        self.close()

    def peer(self) -> tuple[str, int]:
        """As Connection.peer: that of a Unix socket."""
        return "", 0

    def origin(self) -> str:
        """As Connection.origin."""
        return "unix"

    def whom(self) -> tuple[bytes, bool]:
        """As Connection.whom."""
        return self.who

    def half_close(self) -> None:
        self.take(self.session.eof(self.pump.now_ns))
        self.pump.settle()

    def close(self) -> None:
        self._end()
        self.pump.settle()

    def pull(self) -> None:
        """Fetches more output, if the client reads it."""
        if self.deaf:
            self.session.wait()
            self.take(b"")
        else:
            self.take(self.session.take_output(self.pump.now_ns))

    def take(self, output: bytes) -> None:
        self.output += output
        if self.session.closing:  # everything has been written, or is thrown away: net closes the connection
            self._end()
        elif self.session.more and not self.deaf:
            self.pump.waiting.add(self)
        else:
            self.pump.waiting.discard(self)

    def _end(self) -> None:
        self.pump.waiting.discard(self)
        if not self._ended:
            self._ended = True
            self.session.owner = None
        self.session.closed(self.pump.now_ns)
