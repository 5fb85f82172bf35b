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

from counterd.client._connection import cannot_connect, not_accepted
from counterd.client.smockron._gatekeeping import log, report
from counterd.errors import CounterdError

if TYPE_CHECKING:
    from collections.abc import Callable

    from counterd.client.smockron._gatekeeping import Core, News
    from counterd.client.smockron._line import Line

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
        connect: Callable[[Line], object],
        looks: int,
    ) -> None:
        self.channels: dict[Line, Any] = {}
        self.is_ended = False  # then nothing more is connected, sent or lost
        self._core = core
        self._lock = lock
        self._changed = changed
        self._wake = wake
        self._connect = connect
        self._masters = {line: master for master in core.masters for line in master.lines}
        self._looks_max = looks
        self._looks = 0  # how many turns still follow if they find nothing
        core.wake = wake

    def turn(self) -> float:
        """Sends bytes and connects, if that is due. Returns when the next turn is due, on the monotonic clock."""
        self._look_again(self._looks - 1)
        for line, channel in list(self.channels.items()):
            try:
                with self._lock:
                    news = self._core.look(self._masters[line], line, monotonic())
                    data = b"" if channel.is_busy else self._core.take(self._masters[line], line, monotonic_ns())
                    self._changed()
                report(news)
                channel.send(data)
            except (OSError, CounterdError) as error:
                self.lose(line, str(error))
            else:
                if data or channel.is_busy:
                    self._look_again(self._looks_max if data else max(self._looks, 1))
        with self._lock:
            wanted = [line for line, master in self._masters.items() if master.wants(line, monotonic())]
            for line in wanted:
                line.is_connecting = True
        for line in wanted:
            self._connect(line)
        if self._core.is_awake:
            return monotonic() + SEND_PAUSE_S
        return min(master.due for master in self._core.masters)

    def opened(self, line: Line, channel: Any) -> None:
        """Called when there is a connection."""
        with self._lock:
            if self.is_ended:
                channel.close()
                return
            self.channels[line] = channel
            line.opened(monotonic())
        self._wake()

    def received(self, line: Line, data: bytes) -> None:
        try:
            self._update(self._core.feed, line, data, monotonic_ns(), time_ns())
        except CounterdError as error:
            self.lose(line, str(error))

    def lose(self, line: Line, why: str) -> None:
        """Called when a connection has ended, has to end, or could not be made."""
        if self.is_ended:
            return
        channel = self.channels.pop(line, None)
        if channel is not None:
            channel.close()
        self._update(self._core.lost, line, why, monotonic())
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

    def _update(self, update: Callable[..., News], line: Line, *arguments: Any) -> None:
        with self._lock:
            news = update(self._masters[line], line, *arguments)
            self._changed()
        report(news)


def reason(error: Exception, line: Line, timeout: float) -> str:
    """Returns why an attempt to connect has failed, for lose(). Logs errors that only a bug can cause."""
    if isinstance(error, TimeoutError):
        return str(not_accepted(str(line.address), timeout))
    if isinstance(error, OSError):
        return str(cannot_connect(str(line.address), error))
    log.error("a bug ended an attempt to connect to the master at %s", line.address, exc_info=error)
    return f"internal error: {error!r}"
