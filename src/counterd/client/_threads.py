"""The base of the blocking clients: connects for all threads, and performs the steps of a client.

Floor: side (ARCHITECTURE.md).
"""

from __future__ import annotations

import socket
import threading
import time
from typing import TYPE_CHECKING, Any, TypeVar

from counterd.client._command import Request, SyncBase
from counterd.client._connecting import Connecting
from counterd.client._connection import connected_socket, not_connected
from counterd.client._entering import ForWith
from counterd.client._portable import is_mine
from counterd.client._steps import drive
from counterd.client._threadlink import ThreadLink, interrupted
from counterd.errors import ConnectionLost

if TYPE_CHECKING:
    from types import TracebackType

    from counterd.client._addresses import Address
    from counterd.client._steps import Steps
    from counterd.client._tls import SecureSocket

Self = TypeVar("Self", bound="Threads")
T = TypeVar("T")


class Threads(Connecting, SyncBase, ForWith):
    """A client whose connection threads share."""

    LINK = ThreadLink

    def __enter__(self: Self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Ends the connection: the server takes back everything that was held through it.

        Later calls raise ConnectionLost.
        """
        self._end()

    # ---- inside ----

    def _start_anew(self) -> None:
        super()._start_anew()
        self._connecting: Any = threading.RLock()  # reentrant: a signal handler may interrupt a thread that has it

    def _connected(self, *, report_loss: bool = True) -> ThreadLink:
        """See Connecting._current()."""
        link: ThreadLink = self._link
        if not link.closed and not (report_loss and self._before.loss_unreported):
            return link
        if is_mine(self._connecting):
            raise interrupted()
        with self._connecting:
            return self._drive(self._current(report_loss))  # type: ignore[no-any-return]

    def _reconnect(self) -> ThreadLink:
        self._link.close()
        self._begin_attempt()
        link: ThreadLink = self._drive(self._reconnected())
        return link

    def _open(self, address: Address, opened: list[ThreadLink]) -> ThreadLink:
        try:
            connected = connected_socket(address, self._connect_timeout)
        except OSError as error:
            raise not_connected(str(address), error, self._connect_timeout) from error
        try:
            opened.append(self._make_link(connected, str(address)))
        except BaseException:
            connected.close()
            raise
        return opened[0]

    def _no_link(self, where: str) -> ThreadLink:
        with socket.socket() as unconnected:
            return self._make_link(unconnected, where)

    def _make_link(self, connected: socket.socket | SecureSocket, where: str) -> ThreadLink:
        return ThreadLink(connected, where, self._timeout, self._on_end, self._on_release, calls=self._make_calls())

    _new_waiter = threading.Event
    _now = staticmethod(time.monotonic)

    def _drive(self, steps: Steps[T]) -> T:
        return drive(steps, self._acts)

    def _wait(self, waiter: threading.Event, seconds: float | None) -> bool:
        return waiter.wait(None if seconds is None else min(seconds, threading.TIMEOUT_MAX))


class Commanded(Threads):
    """A client whose methods are the commands of _command."""

    def _run_command(self, request: Request[Any]) -> Any:
        link = self._connected(report_loss=False)
        was_good = link.calls.answered
        try:
            return link.call(request, patience=request.patience)
        except ConnectionLost:
            if self._closed or not was_good or not request.is_repeatable:
                raise
        return self._connected(report_loss=False).call(request, patience=request.patience)
