"""Shared helpers: put, send, and read replies of the beanstalk protocol."""

from __future__ import annotations

from typing import TYPE_CHECKING

from counterd.protocols.beanstalk import _journal, journal, wire

if TYPE_CHECKING:
    from kit.journaled import Journaled
    from kit.pump import Peer, Pump

SECOND = 1_000_000_000
TICK = 1 << 20  # of the wheel: what is due is done no later


def ask(peer: Peer, *commands: bytes) -> bytes:
    """Sends requests, and returns the replies."""
    peer.send(b"".join(commands))
    return said(peer)


def said(peer: Peer) -> bytes:
    return peer.recv_exactly(len(peer.output))


def lines(count: int, command: bytes) -> bytes:
    return command * count


def fill(bench: Pump, count: int, tube: bytes = b"default", body: bytes = b"x", **more: int) -> None:
    """Puts so many jobs."""
    peer = bench.connect()
    assert ask(peer, wire.use(tube)) == b"USING %b\r\n" % tube
    for first in range(0, count, 1000):
        number = min(1000, count - first)
        assert ask(peer, wire.put(body, **more) * number).count(b"INSERTED") == number
    peer.close()


def told(kept: Journaled, peer: Peer, *commands: bytes) -> bytes:
    """Returns the replies, once all changes are on disk."""
    before = ask(peer, *commands)
    kept.commit()
    return before + said(peer)


def restore(kept: Journaled, other: Journaled) -> None:
    """Restores another store from the journal."""
    for piece in journal.read(kept.database):
        _journal.restore(other.bench.store, piece, other.bench.now_ns)
