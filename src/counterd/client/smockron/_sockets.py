"""The sockets of a Gatekeeper, and its thread, which sends and receives.

Floor: side (ARCHITECTURE.md). Looking up a host, connecting and the TLS handshake wait. So each attempt to connect
has another thread, if one can be started.
"""

from __future__ import annotations

import math
import select
import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING

from counterd.client._background import Background
from counterd.client._backoff import CONNECT_FIRST_S
from counterd.client._connection import POLL_MAX, RECEIVE_SIZE, connected_socket
from counterd.client.smockron._connections import LINGER_S, SEND_PAUSE_S, Connections, reason
from counterd.client.smockron._gatekeeping import log

if TYPE_CHECKING:
    import socket

    from counterd.client._tls import SecureSocket
    from counterd.client.smockron._gatekeeping import Core
    from counterd.client.smockron._zmtp import ZmtpSession

LOOKS = 16


class Channel:
    """The socket of a connection, and the bytes that the kernel has not accepted yet."""

    def __init__(self, connected: socket.socket | SecureSocket) -> None:
        self.socket = connected
        self._unsent = b""

    @property
    def is_busy(self) -> bool:
        return bool(self._unsent)

    def send(self, data: bytes) -> None:
        self._unsent += data
        if self._unsent:
            with suppress(BlockingIOError):
                self._unsent = self._unsent[self.socket.send(self._unsent) :]

    def close(self) -> None:
        self.socket.close()


class Sockets:
    """changed: notified when a master can be reached, or cannot be reached any more. Its lock protects the core."""

    def __init__(self, core: Core, changed: threading.Condition, timeout: float) -> None:
        self._lock = changed
        self._timeout = timeout
        self._ends_at = math.inf
        self._readable: list[ZmtpSession] = []
        self._background = Background("counterd-gatekeeper", self._work)
        self._connections = Connections(
            core,
            changed,
            changed=changed.notify_all,
            wake=self._background.wake,
            connect=self._connect,
            looks=LOOKS,
        )
        self.start = self._background.start
        self.lose = self._connections.lose

    def close(self) -> None:
        """Lets the thread end when it has sent everything that it can send, or when LINGER_S have passed."""
        self._ends_at = time.monotonic() + LINGER_S
        self._connections.leave()
        self._background.join(self._lock, timeout=2 * LINGER_S)

    def after_fork(self) -> None:
        """Called in the child of a fork, where the thread does not run.

        Closes the child's copies of the sockets, and nothing else.
        """
        self._close_all()
        self._background.after_fork()

    def _close_all(self) -> None:
        for channel in self._connections.channels.values():
            channel.close()

    def _connect(self, session: ZmtpSession) -> None:
        try:
            threading.Thread(target=self._attempt, args=(session,), name="counterd-connect", daemon=True).start()
        except RuntimeError:  # no more threads can be started
            self._attempt(session)

    def _attempt(self, session: ZmtpSession) -> None:
        try:
            connected = connected_socket(session.address, self._timeout)
        except Exception as error:  # noqa: BLE001 - also a bug: requests would pass without a limit from now on
            self.lose(session, reason(error, session, self._timeout))
        else:
            self._connections.opened(session, Channel(connected))

    # ---- in the thread ----

    def _work(self) -> tuple[Sockets, float]:
        try:
            due = self._turn()
        except Exception as error:  # noqa: BLE001 - as above
            log.exception("the thread of a gatekeeper failed")
            for session in list(self._connections.channels):
                self.lose(session, f"the thread failed: {error!r}")
            due = time.monotonic() + CONNECT_FIRST_S
        if self._ends_at < math.inf and (time.monotonic() >= self._ends_at or not self._connections.has_unsent()):
            self._background.stop()
            self._connections.end()
            self._close_all()
        return self, min(due, self._ends_at)

    def _turn(self) -> float:
        """Reads before it looks at the connections, because the answer to a PING may have come."""
        for session in self._readable:
            try:
                if data := self._connections.channels[session].socket.recv(RECEIVE_SIZE):
                    self._connections.received(session, data)
                else:
                    self.lose(session, f"{session.address} closed the connection")
            except BlockingIOError:  # with TLS, if less than a record has come
                pass
            except OSError as error:
                self.lose(session, str(error))
        return self._connections.turn()

    def watch(self, wake: int, seconds: float) -> bool:
        """Waits until bytes have come or can be sent, the thread is woken, or this many seconds have passed.

        A short wait ends only when it is over, so that more messages are sent together.
        """
        if 0 < seconds <= SEND_PAUSE_S:
            time.sleep(seconds)
            seconds = 0.0
        poller = select.poll()
        poller.register(wake, select.POLLIN)
        sessions = {}
        for session, channel in list(self._connections.channels.items()):
            sessions[channel.socket.fileno()] = session
            poller.register(channel.socket, select.POLLIN | (select.POLLOUT if channel.is_busy else 0))
        ready = dict(poller.poll(math.ceil(min(seconds * 1000, POLL_MAX))))
        self._readable = [session for number, session in sessions.items() if ready.get(number, 0) & ~select.POLLOUT]
        return wake in ready
