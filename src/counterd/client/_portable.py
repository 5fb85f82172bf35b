"""Replacements for functions that only Linux has, so that the clients also work on other systems.

Floor: side (ARCHITECTURE.md). A pipe replaces an eventfd. If poll() does not report that the peer has sent its last
byte, the client checks this from time to time.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import sys
from typing import Any, Protocol

# poll() reports this as soon as the peer has ended its side, even if bytes are unread. 0: this system cannot do that.
PEER_ENDED: int = getattr(select, "POLLRDHUP", 0)
LOOK_S = 0.5  # between two checks on such a system


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
        """The descriptor; -1 after it was closed."""
        return self._ends[0] if self._ends else -1

    def wake(self) -> None:
        if self._ends:
            with contextlib.suppress(BlockingIOError):  # it is readable already
                os.write(self._ends[-1], (1).to_bytes(8, sys.byteorder))

    def take(self) -> bool:
        """Returns whether wake() was called since the previous take()."""
        try:
            return bool(os.read(self._ends[0], 4096))
        except BlockingIOError:
            return False

    def close(self) -> None:
        ends, self._ends = self._ends, ()
        for end in ends:
            os.close(end)


def set_tcp_option(connected: socket.socket, name: str, value: int) -> None:
    """Sets an option such as TCP_KEEPIDLE, if this system has the option."""
    option = getattr(socket, name, None)
    if option is not None:
        connected.setsockopt(socket.IPPROTO_TCP, option, value)


def has_ended(connected: HasDescriptor) -> bool:
    """Returns whether the peer has sent its last byte, or the connection is broken.

    The function reads no bytes, and never waits.
    """
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
    """Returns whether this thread holds an RLock. A signal handler or the garbage collector may run while a thread
    holds the lock.

    Only a private method of CPython's RLock reports this. No other code calls this private method.
    """
    return bool(lock._is_owned())
