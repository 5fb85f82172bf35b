"""The connections of a gatekeeper to its masters, without I/O: what to do in a turn, and when a connection begins, has
received bytes, or ends.

Floor: side (ARCHITECTURE.md); shared by the gatekeeper for threads and the gatekeeper for asyncio. They make the
connections, pass on what arrives, and call turn() when it is due and when wake() is called. An open connection is a
channel: is_busy says whether earlier bytes have to be sent first, send(data) sends as much as it can without waiting,
or raises OSError, and close() ends it.

A decision leaves a message for the next turn, and calls wake() if no turn is due soon. To wake a thread costs several
times as much as the decision. So after something was sent, the next turns follow each other every SEND_PAUSE_S, until
`looks` turns have found nothing. The messages that were left meanwhile are sent together.
"""

from __future__ import annotations

from time import monotonic, monotonic_ns, time_ns
from typing import TYPE_CHECKING, Any

from counterd.client._connection import not_connected
from counterd.client.smockron._gatekeeping import log, report
from counterd.errors import CounterdError

if TYPE_CHECKING:
    from collections.abc import Callable

    from counterd.client.smockron._gatekeeping import Core, News
    from counterd.client.smockron._zmtp import ZmtpSession

SEND_PAUSE_S = 0.002
LINGER_S = 1.0  # how long close() waits for what is not sent yet


class Connections:
    """channels: the connections that are open.

    lock: held while the state of the gatekeeper is used. changed: called with the lock, when the state may have
    changed. wake: makes the runtime call turn(). connect: begins to connect; opened() or lose() has to follow.
    """

    def __init__(
        self,
        core: Core,
        lock: Any,
        *,
        changed: Callable[[], object],
        wake: Callable[[], object],
        connect: Callable[[ZmtpSession], object],
        looks: int,
    ) -> None:
        self.channels: dict[ZmtpSession, Any] = {}
        self.is_ended = False  # then nothing more is connected, sent or lost
        self._core = core
        self._lock = lock
        self._changed = changed
        self._wake = wake
        self._connect = connect
        self._masters = {session: master for master in core.masters for session in master.sessions}
        self._looks_max = looks
        self._looks = 0  # how many turns still follow if they find nothing
        core.wake = wake

    def turn(self) -> float:
        """Sends bytes and connects, if that is due. Returns when the next turn is due, on the monotonic clock."""
        self._look_again(self._looks - 1)
        for session, channel in list(self.channels.items()):
            try:
                with self._lock:
                    news = self._core.look(self._masters[session], session, monotonic())
                    data = b"" if channel.is_busy else self._core.take(self._masters[session], session, monotonic_ns())
                    self._changed()
                report(news)
                channel.send(data)
            except (OSError, CounterdError) as error:
                self.lose(session, str(error))
            else:
                if data or channel.is_busy:
                    self._look_again(self._looks_max if data else max(self._looks, 1))
        with self._lock:
            wanted = [session for session, master in self._masters.items() if master.wants(session, monotonic())]
            for session in wanted:
                session.is_connecting = True
        for session in wanted:
            self._connect(session)
        if self._core.is_awake:
            return monotonic() + SEND_PAUSE_S
        return min(master.due for master in self._core.masters)

    def opened(self, session: ZmtpSession, channel: Any) -> None:
        """Called when there is a connection."""
        with self._lock:
            if self.is_ended:
                channel.close()
                return
            self.channels[session] = channel
            session.opened(monotonic())
        self._wake()

    def received(self, session: ZmtpSession, data: bytes) -> None:
        try:
            self._update(self._core.feed, session, data, monotonic_ns(), time_ns())
        except CounterdError as error:
            self.lose(session, str(error))

    def lose(self, session: ZmtpSession, why: str) -> None:
        """Called when a connection has ended, has to end, or could not be made."""
        if self.is_ended:
            return
        channel = self.channels.pop(session, None)
        if channel is not None:
            channel.close()
        self._update(self._core.lost, session, why, monotonic())
        self._wake()

    def leave(self) -> None:
        """Called when the gatekeeper closes: what is kept is sent without waiting for control messages."""
        with self._lock:
            self._core.leave()
        self._wake()

    def end(self) -> None:
        with self._lock:
            self.is_ended = True

    def has_unsent(self) -> bool:
        """Returns whether there is something that can still be sent."""
        with self._lock:
            return self._core.has_unsent() or any(channel.is_busy for channel in self.channels.values())

    def _look_again(self, looks: int) -> None:
        with self._lock:
            self._looks = max(looks, 0)
            self._core.is_awake = self._looks > 0

    def _update(self, update: Callable[..., News], session: ZmtpSession, *arguments: Any) -> None:
        with self._lock:
            news = update(self._masters[session], session, *arguments)
            self._changed()
        report(news)


def reason(error: Exception, session: ZmtpSession, timeout: float) -> str:
    """Returns why an attempt to connect has failed, for lose(). Logs errors that only a bug can cause."""
    if isinstance(error, OSError):
        return str(not_connected(str(session.address), error, timeout))
    log.error("a bug ended an attempt to connect to the master at %s", session.address, exc_info=error)
    return f"internal error: {error!r}"
