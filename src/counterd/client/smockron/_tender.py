"""The thread of a Gatekeeper for the connections to one master. No other thread connects, reads or sends.

Floor: side (ARCHITECTURE.md). A decision leaves a message for the thread, and wakes the thread if it waits. To wake the
thread costs several times as much as the decision. So after the thread has sent something, it pauses LOOKS times before
it waits again. The messages that arrive meanwhile are sent together.
"""

from __future__ import annotations

import math
import select
import threading
import time
from typing import TYPE_CHECKING

from counterd.client._connection import POLL_MAX, RECEIVE_SIZE, connected_socket
from counterd.client._portable import Waker
from counterd.client.smockron._gatekeeping import log, report
from counterd.errors import CounterdError

if TYPE_CHECKING:
    import socket

    from counterd.client._tls import SecureSocket
    from counterd.client.smockron._gatekeeping import Core, Master
    from counterd.client.smockron._line import Line

SEND_PAUSE_S = 0.002
LOOKS = 16
LINGER_S = 1.0  # how long close() waits for what is not sent yet


class Channel:
    """The socket of a connection, and the bytes that the kernel has not accepted yet."""

    def __init__(self, connected: socket.socket | SecureSocket) -> None:
        self.socket = connected
        self.unsent = b""


class Tender:
    """Runs the thread for one master. Raises RuntimeError or OSError if the thread cannot be started now.

    changed: a condition that is notified when the master can be reached, or cannot be reached any more.
    """

    def __init__(self, core: Core, master: Master, changed: threading.Condition, timeout: float) -> None:
        self._core = core
        self._master = master
        self._changed = changed
        self._timeout = timeout
        self._channels: dict[Line, Channel] = {}
        self._waker = Waker()
        self._looks = 0  # how often the thread still pauses before it waits
        self._ends_at: float | None = None
        master.stir = self._waker.wake
        self._thread = threading.Thread(target=self._run, name="counterd-gatekeeper", daemon=True)
        try:
            self._thread.start()
        except BaseException:
            self._give_up()
            raise

    def _give_up(self) -> None:
        with self._changed:
            self._master.stir = _nothing
            self._waker.close()

    def end(self) -> None:
        """Lets the thread end when it has sent everything that it can send, or when LINGER_S have passed.

        The caller has the lock.
        """
        self._core.leave(self._master)
        self._ends_at = time.monotonic() + LINGER_S
        self._waker.wake()

    def join(self) -> None:
        if self._thread is not threading.current_thread():
            self._thread.join(2 * LINGER_S)  # after that it is connecting, or waits for the caller

    def after_fork(self) -> None:
        """Called in the child of a fork, where the thread does not run.

        Closes the child's copies of the sockets, and nothing else.
        """
        for channel in self._channels.values():
            channel.socket.close()
        self._waker.close()

    # ---- in the thread ----

    def _run(self) -> None:
        pause = 0.0
        try:
            while not self._is_over():
                try:
                    pause = self._turn(pause)
                except Exception as error:  # noqa: BLE001 - a bug: requests would pass without a limit from now on
                    log.exception("the thread for the master at %s failed", self._master.accounting.address)
                    for line in self._master.lines:
                        self._lose(line, f"the thread failed: {error!r}")
                    pause = self._master.due(time.monotonic())
        finally:
            for channel in self._channels.values():
                channel.socket.close()
            self._give_up()

    def _turn(self, pause: float) -> float:
        """Does one turn. Returns for how many seconds the next turn may wait."""
        self._receive(pause)
        if looks_again := self._send():
            time.sleep(SEND_PAUSE_S)
        has_tried = self._connect()
        return 0.0 if looks_again or has_tried else self._master.due(time.monotonic())

    def _is_over(self) -> bool:
        if self._ends_at is None:
            return False
        if time.monotonic() >= self._ends_at:
            return True
        with self._changed:
            return not self._core.has_left(self._master) and not any(each.unsent for each in self._channels.values())

    def _receive(self, pause: float) -> None:
        """Waits for at most `pause` seconds: until bytes arrive or can be sent, or there is something to send."""
        if self._ends_at is not None:
            pause = max(min(pause, self._ends_at - time.monotonic()), 0.0)
        poller = select.poll()
        poller.register(self._waker, select.POLLIN)
        lines = {}
        for line, channel in self._channels.items():
            lines[channel.socket.fileno()] = line
            poller.register(channel.socket, select.POLLIN | (select.POLLOUT if channel.unsent else 0))
        for number, events in poller.poll(math.ceil(min(pause * 1000, POLL_MAX))):
            if number not in lines:
                self._waker.take()
            elif events & ~select.POLLOUT:
                self._read(lines[number])

    def _read(self, line: Line) -> None:
        try:
            data = self._channels[line].socket.recv(RECEIVE_SIZE)
            if not data:
                self._lose(line, f"{line.address} closed the connection")
                return
            with self._changed:
                news = self._core.feed(self._master, line, data, time.monotonic_ns(), time.time_ns())
                self._changed.notify_all()
            report(news)
        except BlockingIOError:  # with TLS, if less than a record has come
            pass
        except (OSError, CounterdError) as error:
            self._lose(line, str(error))

    def _connect(self) -> bool:
        """Connects if it is time to connect.

        Returns whether it was. Connecting may take some time, so the thread reads before it gives up a line.
        """
        has_tried = False
        for line in self._master.lines:
            if not self._master.wants(line, time.monotonic()):
                continue
            has_tried = True
            try:
                self._channels[line] = Channel(connected_socket(line.address, self._timeout))
            except TimeoutError:
                self._lose(line, f"{line.address} did not accept a connection within {self._timeout:g} s")
            except OSError as error:
                self._lose(line, f"cannot connect to {line.address}: {error}")
            else:
                with self._changed:
                    line.opened(time.monotonic())
        return has_tried

    def _send(self) -> bool:
        """Sends bytes. Returns whether there may soon be more to send."""
        for line, channel in list(self._channels.items()):
            try:
                with self._changed:
                    news = self._core.look(self._master, line, time.monotonic())
                    self._changed.notify_all()
                    if not channel.unsent:
                        self._take(line, channel)
                report(news)
                if channel.unsent:
                    channel.unsent = channel.unsent[channel.socket.send(channel.unsent) :]
            except BlockingIOError:
                pass
            except (OSError, CounterdError) as error:
                self._lose(line, str(error))
        accounting = self._channels.get(self._master.accounting)
        return self._looks > 0 and accounting is not None and not accounting.unsent

    def _take(self, line: Line, channel: Channel) -> None:
        channel.unsent = self._core.take(self._master, line, time.monotonic_ns())
        if line is self._master.accounting:
            self._looks = LOOKS if channel.unsent else max(self._looks - 1, 0)
            self._master.is_stirred = self._looks > 0

    def _lose(self, line: Line, why: str) -> None:
        channel = self._channels.pop(line, None)
        if channel is not None:
            channel.socket.close()
        with self._changed:
            news = self._core.lost(self._master, line, why, time.monotonic())
            self._changed.notify_all()
        report(news)


def _nothing() -> None:
    """Does nothing, because the thread has ended."""
