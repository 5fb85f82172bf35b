"""The interface to systemd: sd_notify(3), the watchdog, and sockets that systemd has opened.

Floor 4 (ARCHITECTURE.md). counterd implements this interface itself: it needs only a datagram and a few environment
variables. The existing libraries need a C library or are unmaintained.
"""

from __future__ import annotations

import os
import re
import socket
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import asyncio
    from collections.abc import MutableMapping

# While the manager's queue is full: the seconds until the next try, and how many states wait at most.
AGAIN_S = 0.05
UNTOLD_MAX = 16
FIRST_PASSED = 3  # SD_LISTEN_FDS_START
NUMBER = re.compile("[0-9]{1,15}")  # in an environment variable; a longer number is invalid


def notify(*states: str) -> bool:
    """Sends states such as READY=1 to the service manager, if there is one. Ignores errors of the system.

    Returns False if the manager's queue is full. The caller then has to send the states again.
    """
    address = os.environ.get("NOTIFY_SOCKET")
    if not address:
        return True
    if address.startswith("@"):  # the abstract namespace
        address = "\0" + address[1:]
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sender:
            sender.setblocking(False)  # so that a manager that does not read cannot block the daemon
            sender.sendto("\n".join(states).encode(), address)
    except BlockingIOError:
        return False
    except OSError:
        pass
    return True


class Teller:
    """Sends states to the service manager, in order.

    Tries again while the manager's queue is full. The service manager's queue has room for a few datagrams of all
    services together.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._untold: deque[tuple[str, ...]] = deque(maxlen=UNTOLD_MAX)
        self._timer: asyncio.TimerHandle | None = None

    def tell(self, *states: str) -> None:
        """Does the same as notify(), but tries again if the queue is full.

        Keeps at most UNTOLD_MAX states that are not sent yet.
        """
        self._untold.append(states)
        if self._timer is None:
            self._go_on()

    def stop(self) -> None:
        """Stops sending. States that were not sent are lost."""
        if self._timer is not None:
            self._timer.cancel()

    def _go_on(self) -> None:
        self._timer = None
        while self._untold and notify(*self._untold[0]):
            self._untold.popleft()
        if self._untold:
            self._timer = self._loop.call_later(AGAIN_S, self._go_on)


def watchdog_seconds() -> float:
    """Returns the time within which the watchdog expects WATCHDOG=1.

    Returns 0 if the watchdog is off, or watches another process.
    """
    microseconds = os.environ.get("WATCHDOG_USEC", "")
    if os.environ.get("WATCHDOG_PID", str(os.getpid())) != str(os.getpid()) or not NUMBER.fullmatch(microseconds):
        return 0.0
    return int(microseconds) / 1e6


@dataclass
class Passed:
    """A listening socket that was passed to this process. name: the name from its systemd unit, or ""."""

    socket: socket.socket
    name: str

    @property
    def address(self) -> tuple[str, int]:
        """address: IP address and port, or path and -1. An abstract path begins with @."""
        name = self.socket.getsockname()
        if self.socket.family != socket.AF_UNIX:
            return name[0], name[1]
        return (name if isinstance(name, str) else "@" + os.fsdecode(name[1:])), -1


def passed_sockets(environ: MutableMapping[str, str] = os.environ, first: int = FIRST_PASSED) -> list[Passed]:
    """Takes the listening sockets that the variable LISTEN_FDS describes.

    Child processes do not inherit these sockets. Raises OSError if a socket does not listen.
    """
    mine = environ.get("LISTEN_PID") == str(os.getpid())
    count, names = (environ.pop(name, "") for name in ("LISTEN_FDS", "LISTEN_FDNAMES"))
    environ.pop("LISTEN_PID", None)
    if not mine or not NUMBER.fullmatch(count):
        return []
    named = dict(enumerate(names.split(":")))
    found = []
    for index in range(int(count)):
        os.set_inheritable(first + index, False)
        passed = socket.socket(fileno=first + index)
        stream = passed.type == socket.SOCK_STREAM and passed.family in (
            socket.AF_INET,
            socket.AF_INET6,
            socket.AF_UNIX,
        )
        if not stream or not passed.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            passed.close()
            raise OSError(f"descriptor {first + index} is not a listening stream socket")
        passed.setblocking(False)
        found.append(Passed(passed, named.get(index, "")))
    return found
