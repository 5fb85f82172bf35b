"""What Linux has and other systems may not: a client that is pure Python works without it.

Stands beside the floors. An eventfd is a pipe elsewhere. Where poll() does not tell that the peer has sent its last
byte, the client looks whether it has.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import sys
from typing import Any, Protocol

# Told by poll() as soon as the peer has ended its side, whatever is unread. 0: this system does not tell.
PEER_ENDED: int = getattr(select, "POLLRDHUP", 0)
LOOK_S = 0.5  # between two looks where it does not


class HasDescriptor(Protocol):
    def fileno(self) -> int: ...


class Waker:
    """A descriptor that becomes readable when another thread, or a signal handler, calls wake()."""

    def __init__(self) -> None:
        self._ends: tuple[int, ...]
        if hasattr(os, "eventfd"):
            self._ends = (os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK),)
        else:
            self._ends = os.pipe()
            for end in self._ends:
                os.set_blocking(end, False)

    def fileno(self) -> int:
        """-1 once it is closed."""
        return self._ends[0] if self._ends else -1

    def wake(self) -> None:
        if self._ends:
            with contextlib.suppress(BlockingIOError):  # then it is readable already
                os.write(self._ends[-1], (1).to_bytes(8, sys.byteorder))

    def take(self) -> bool:
        """Whether it was woken since the last time."""
        try:
            return bool(os.read(self._ends[0], 4096))
        except BlockingIOError:
            return False

    def close(self) -> None:
        ends, self._ends = self._ends, ()
        for end in ends:
            os.close(end)


def set_tcp_option(connected: socket.socket, name: str, value: int) -> None:
    """TCP_KEEPIDLE and the like: nothing, where this system has no option of that name."""
    option = getattr(socket, name, None)
    if option is not None:
        connected.setsockopt(socket.IPPROTO_TCP, option, value)


def has_ended(connected: HasDescriptor) -> bool:
    """Whether the peer has sent its last byte, or the connection is broken. Reads nothing, and never waits."""
    if PEER_ENDED:
        poller = select.poll()
        poller.register(connected.fileno(), PEER_ENDED)
        return bool(poller.poll(0))
    looking = socket.socket(fileno=connected.fileno())  # a SecureSocket cannot peek
    try:
        return not looking.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except BlockingIOError:
        return False
    except OSError:
        return True
    finally:
        looking.detach()


def is_mine(lock: Any) -> bool:
    """Whether this thread has that RLock: a signal handler, or the garbage collector, may run while it has.

    Only CPython's own, private method tells, so it is called here and nowhere else.
    """
    return bool(lock._is_owned())
