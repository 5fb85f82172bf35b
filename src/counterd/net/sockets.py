"""Opens listening sockets, with the options that accepted sockets inherit.

Floor 3 (ARCHITECTURE.md). An error is an OSError with a message for the operator. The caller adds the setting that
contains the address to the message.
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

BACKLOG = 4096  # a connection that finds the backlog full waits for a second: then its SYN is sent again
LOCK_SUFFIX = ".lock"
TIMEOUT_S = 1.0  # for connecting to an existing socket file, to find out whether a process listens on it


@dataclass(frozen=True)
class Keepalive:
    """When a connection is closed because its TCP peer is silent. All values are in seconds, except count."""

    idle: int
    interval: int
    count: int
    user_timeout: int


def set_keepalive(listening: socket.socket, keepalive: Keepalive) -> None:
    """Sets keepalive on a listening TCP socket.

    Linux copies these options to each socket that is accepted afterwards.
    """
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, keepalive.idle)
    listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, keepalive.interval)
    listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, keepalive.count)
    listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, keepalive.user_timeout * 1000)


def open_tcp(address: str, port: int, keepalive: Keepalive) -> socket.socket:
    """Binds a socket to one IPv4 or IPv6 address and listens on it.

    Raises OSError, with EADDRINUSE if the port is in use.
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listening = socket.socket(family, socket.SOCK_STREAM)
    try:
        # SO_REUSEADDR: after a restart, old connections do not block the port. SO_REUSEPORT stays off: two daemons on
        # one port would each have their own limits.
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
    """A listening Unix socket and its file. unlink() removes the file if it still belongs to this socket."""

    def __init__(self, path: str, mode: int) -> None:
        """Replaces a stale socket file, but never the socket of a running daemon or a file that is not a socket."""
        self.path = Path(path)
        with locked(self.path):
            self._remove_stale()
            self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                self.socket.setblocking(False)
                before = os.umask(0o777 & ~mode)  # the file never has wider permissions, not even briefly
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
        """Gives the socket's file to the user that the daemon will run as."""
        os.chown(self.path, uid, gid, follow_symlinks=False)

    def unlink(self) -> None:
        """Removes the socket's file.

        Does nothing if another daemon has replaced the file, or if this daemon may not remove it.
        """
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
                # The backlog is full, so a process listens.
        raise OSError(errno.EADDRINUSE, "another process listens on it", str(self.path))


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Lets only one daemon at a time check and replace the file of a socket.

    Without this lock, a socket that another daemon has bound but does not listen on yet would look stale. The lock is a
    file in the same folder as the socket. Only the owner of the lock file can open it, so another user cannot lock it.
    The lock file is removed at the end. The lock file of a killed daemon is not locked any more, and is used again.
    Raises OSError.
    """
    lock = path.with_name(path.name + LOCK_SUFFIX)
    deadline = time.monotonic() + 2 * TIMEOUT_S  # another daemon needs TIMEOUT_S at most
    while (descriptor := _take_lock(lock)) is None:
        if time.monotonic() > deadline:
            raise OSError(errno.EAGAIN, f"another process holds the lock {lock}", str(lock))
        time.sleep(0.01)
    try:
        yield
    finally:
        # Removed while locked: a daemon that locks the removed file sees that its name is gone, and makes a new one.
        with contextlib.suppress(OSError):
            lock.unlink()
        os.close(descriptor)


def _take_lock(lock: Path) -> int | None:
    """Returns the descriptor of the locked file, or None if another process has the lock. Raises OSError.

    It is an error if other users could lock the file. If other users can write to the folder, they can put anything at
    this path. So opening the path follows no link, does not wait, and neither writes nor truncates a file.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
    try:
        descriptor = os.open(lock, flags, 0o600)
    except OSError as error:
        if not os.path.lexists(lock):
            raise
        why = "is a symbolic link" if error.errno == errno.ELOOP else f"cannot be opened: {error.strerror}"
        raise OSError(error.errno, f"its lock file {lock} {why}", str(lock)) from None
    try:
        if foreign := _foreign(os.fstat(descriptor)):
            raise OSError(errno.EPERM, f"its lock file {lock} {foreign}", str(lock))
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(descriptor), os.lstat(lock)):
            return descriptor
    except (BlockingIOError, FileNotFoundError):  # another process has the lock, or has removed the file since
        pass
    except BaseException:
        os.close(descriptor)
        raise
    os.close(descriptor)
    return None


def _foreign(status: os.stat_result) -> str:
    """Returns why another user could lock a file, as the rest of a sentence, or "".

    A hard link is accepted if it leads to a file of this user that nobody else can open: only this user can lock such a
    file.
    """
    if not stat.S_ISREG(status.st_mode):
        return "is not a regular file"
    if status.st_uid != os.geteuid():
        return f"belongs to uid {status.st_uid}"
    if status.st_mode & 0o077:
        return f"can be opened by other users: its mode is {stat.S_IMODE(status.st_mode):04o}"
    return ""
