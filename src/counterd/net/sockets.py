"""Listening sockets, opened with everything that the accepted ones inherit from them.

Floor 3. Errors are OSError with a text for the operator; where the address comes from is the caller's to say.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket
import stat
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

BACKLOG = 4096  # a burst of connections beyond it would wait a second for its SYN to be sent again
TIMEOUT_S = 1.0  # for asking whether somebody serves an existing socket file


@dataclass(frozen=True)
class Keepalive:
    """When a silent TCP peer is given up: seconds, except count."""

    idle: int
    interval: int
    count: int
    user_timeout: int


def set_keepalive(listening: socket.socket, keepalive: Keepalive) -> None:
    """Sets it on a listening TCP socket: Linux copies it to each socket accepted from then on."""
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, keepalive.idle)
    listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, keepalive.interval)
    listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, keepalive.count)
    listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, keepalive.user_timeout * 1000)


def open_tcp(address: str, port: int, keepalive: Keepalive) -> socket.socket:
    """Binds and listens on one IPv4 or IPv6 address. Raises OSError, EADDRINUSE when the port is taken."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listening = socket.socket(family, socket.SOCK_STREAM)
    try:
        # After a restart the port is not refused for the sake of old connections. Two daemons on one port would be
        # two limits: SO_REUSEPORT stays off.
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            listening.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        set_keepalive(listening, keepalive)
        listening.setblocking(False)
        listening.bind((address, port))
        listening.listen(BACKLOG)
    except OSError:
        listening.close()
        raise
    return listening


class UnixSocket:
    """A listening Unix socket and its file, which is removed at the end if it is still ours."""

    def __init__(self, path: str, mode: int) -> None:
        """Takes over a stale file, never that of a running daemon, never anything that is not a socket."""
        self.path = Path(path)
        with locked(self.path.parent):
            self._remove_stale()
            self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                self.socket.setblocking(False)
                before = os.umask(0o777 & ~mode)  # it never has wider permissions, not even at first
                try:
                    self.socket.bind(path)
                finally:
                    os.umask(before)
                self._identity = self._identify()
                self.socket.listen(BACKLOG)
            except OSError:
                self.socket.close()
                raise

    def chown(self, uid: int, gid: int) -> None:
        """Gives the file to the user the daemon is going to be."""
        os.chown(self.path, uid, gid, follow_symlinks=False)

    def unlink(self) -> None:
        """Removes the file, unless another daemon has put its own in that place, or we no longer may."""
        with contextlib.suppress(OSError):
            if self._identify() == self._identity:
                self.path.unlink()

    def _identify(self) -> tuple[int, int]:
        status = self.path.lstat()
        return status.st_dev, status.st_ino

    def _remove_stale(self) -> None:
        try:
            status = self.path.lstat()
        except FileNotFoundError:
            return
        if not stat.S_ISSOCK(status.st_mode):
            raise FileExistsError(errno.EEXIST, "exists and is not a socket", str(self.path))
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            probe.settimeout(TIMEOUT_S)
            try:
                probe.connect(str(self.path))
            except ConnectionRefusedError:
                self.path.unlink()
                return
            except OSError as error:
                if error.errno not in (errno.EAGAIN, errno.ETIMEDOUT) and not isinstance(error, TimeoutError):
                    raise
                # Its backlog is full: somebody listens.
        raise OSError(errno.EADDRINUSE, "another process is already running on it", str(self.path))


@contextlib.contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Lets one daemon at a time look at a socket's file and put its own there: a bound file does not answer yet."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    deadline = time.monotonic() + 2 * TIMEOUT_S  # another daemon needs TIMEOUT_S at most
    try:
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise OSError(errno.EAGAIN, "its directory is locked by another process", str(directory)) from None
                time.sleep(0.01)
        yield
    finally:
        os.close(descriptor)
