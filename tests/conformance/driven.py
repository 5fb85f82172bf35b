"""Drives a store in memory as net would, with a clock that stands still until it is told to go on.

A request of one connection may give output to others: that comes out of `take_dirty`, and they are asked for it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from counterd._core import Session

MINUTE_NS = 60_000_000_000
# The beginning of a minute, whatever minutes are counted from: the store's first call or the clock's zero.
START_NS = 10_000 * MINUTE_NS
UNIX_NS = 1_700_000_000_000_000_000  # what START_NS is on the wall
# More calls than anything here needs.
TURNS_MAX = 10_000


class Bench:
    """A store, its clock and its connections.

    ticking: the store gets its turns when they are due; without it requests alone must find that time has gone by.
    """

    def __init__(self, store: Any, *, ticking: bool = True) -> None:
        self.store = store
        self.now_ns = START_NS
        self.ticking = ticking
        self.waiting: set[EnginePeer] = set()  # their sessions have more
        store.set_wall(UNIX_NS, START_NS)

    def connect(self) -> EnginePeer:
        return EnginePeer(self, self.store.session(self.now_ns))

    def advance(self, duration_ns: int) -> None:
        self.now_ns += duration_ns
        self.settle()

    def settle(self) -> None:
        """Turns, as net gives them, until nothing is due."""
        for _ in range(TURNS_MAX):
            if not self.turn():
                return
        raise AssertionError("it is always due")

    def turn(self) -> bool:
        """What is due of the store, then the output that waits; whether there was anything."""
        busy = self.ticking and 0 <= self.store.next_deadline() <= self.now_ns
        if busy:
            self.store.tick(self.now_ns)
        pulled = self.waiting | {session.owner for session in self.store.take_dirty() if session.owner is not None}
        for peer in pulled:
            peer.pull()
        return busy or bool(pulled)


class EnginePeer:
    """A vectors.Peer on a session, which it treats as net would. deaf: its socket takes nothing any more."""

    def __init__(self, bench: Bench, session: Session) -> None:
        self.bench = bench
        self.deaf = False
        self.session = session
        session.owner = self
        self.output = bytearray()
        self._ended = False

    def send(self, data: bytes) -> None:
        self.take(self.session.receive(data, self.bench.now_ns))
        self.bench.settle()

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
        """What a room asks the owner of a session for: here that of a Unix socket."""
        return "", 0

    def origin(self) -> str:
        """Likewise, for people."""
        return "unix"

    def half_close(self) -> None:
        self.take(self.session.eof(self.bench.now_ns))
        self.bench.settle()

    def close(self) -> None:
        self._end()
        self.bench.settle()

    def pull(self) -> None:
        """What it has more, or was given by others."""
        if self.deaf:
            self.session.wait()
            self.take(b"")
        else:
            self.take(self.session.take_output(self.bench.now_ns))

    def take(self, output: bytes) -> None:
        self.output += output
        if self.session.closing:  # all has been written, or is thrown away: net closes
            self._end()
        elif self.session.more and not self.deaf:
            self.bench.waiting.add(self)
        else:
            self.bench.waiting.discard(self)

    def _end(self) -> None:
        self.bench.waiting.discard(self)
        if not self._ended:
            self._ended = True
            self.session.owner = None
        self.session.closed(self.bench.now_ns)
