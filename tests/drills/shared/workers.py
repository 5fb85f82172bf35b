"""Clients of daemons that share limits. Each records every request and its answer, in the format of tests/history."""

from __future__ import annotations

import random
import select
import socket
import threading
from typing import TYPE_CHECKING

from counterd.protocols.counter import wire
from counterd.protocols.counter.wire import Opcode, Permit, Rate, Status
from history import Recorder
from history.counter import Acquire, Release
from history.takes import Take

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path
    from typing import Any

    from counterd.protocols.counter.wire import Response

# Names for each of the three masters. Eight workers at each of three daemons ask for more than there is.
MAXIMA = {b"few": 2, b"some": 10, b"many": 100}
SECOND_US = 1_000_000
RATES = {
    name: Rate(name, 0, limit, SECOND_US, burst)
    for name, limit, burst in ((b"steady", 10, 10), (b"slow", 20, 20), (b"fast", 40, 120))
}
SHARE = 4  # of a maximum, one part may be asked for at once
UNITS_MAX = 3  # in a Take
HOLD_S = 0.05  # at most,
LONG_HOLD_S, LONG = 1.5, 0.15  # but for some, which last longer than a failover
WAIT_MS = 500
ANSWER_S = 20.0  # more than the daemon lets a request wait for the authority
AGAIN_S = 0.05
RECEIVE_SIZE = 4096


class Gone(Exception):
    """The connection has ended."""


class Worker(threading.Thread):
    """A client of one daemon, which connects again whenever its connection has ended.

    path: returns where the daemon listens. history: the file to which it writes. numbers: of its connections.
    asked, granted: how often.
    """

    def __init__(self, path: Callable[[], str], history: Path, numbers: Iterator[int], seed: int) -> None:
        super().__init__()
        self._path = path
        self._history = history
        self._numbers = numbers
        self._draw = random.Random(seed)
        self._is_over = threading.Event()
        self._parser: wire.ResponseParser
        self._recorder: Recorder
        self.asked = self.granted = 0

    def end(self) -> None:
        self._is_over.set()

    def run(self) -> None:
        while not self._is_over.is_set():
            try:
                with socket.socket(socket.AF_UNIX) as connection:
                    connection.settimeout(ANSWER_S)
                    connection.connect(self._path())
                    self._ask(connection)
            except (OSError, Gone):
                self._is_over.wait(AGAIN_S)

    def _ask(self, connection: socket.socket) -> None:
        self._parser = wire.ResponseParser()
        with Recorder(self._history, next(self._numbers)) as self._recorder:
            try:
                while not self._is_over.is_set():
                    if self._draw.random() < 0.3:
                        self._take(connection)
                    else:
                        self._hold(connection)
            finally:
                # It may have ended before, and other daemons may notice it later: see verdict.py.
                self._recorder.closing()
                self._recorder.closed()

    def _take(self, connection: socket.socket) -> None:
        """Takes units of a rate."""
        item = self._draw.choice(list(RATES.values()))._replace(amount=self._draw.randint(1, UNITS_MAX))
        wait_ms = self._wait_ms()
        if not self._is_granted(connection, Take(1, (tuple(item),), wait_ms), wire.take(1, [item], wait_ms)):
            self._is_over.wait(self._draw.random() * HOLD_S)

    def _hold(self, connection: socket.socket) -> None:
        """Holds permits for a moment."""
        name = self._draw.choice(list(MAXIMA))
        maximum = MAXIMA[name]
        amount = self._draw.randint(1, max(1, maximum // SHARE))
        if self._draw.random() < 0.5:
            request = wire.take(1, [Permit(name, amount, maximum)], self._wait_ms())
        else:
            request = wire.acquire(1, name, amount, maximum)
        if not self._is_granted(connection, Acquire(name, amount, maximum), request):
            self._is_over.wait(self._draw.random() * HOLD_S)
            return
        longest_s = LONG_HOLD_S if self._draw.random() < LONG else HOLD_S
        readable, _, _ = select.select([connection], [], [], self._draw.random() * longest_s)
        if readable and not connection.recv(RECEIVE_SIZE):
            raise Gone
        self._call(connection, Release(name, amount), wire.release(2, name, amount))

    def _wait_ms(self) -> int:
        return self._draw.choice([0, WAIT_MS])

    def _is_granted(self, connection: socket.socket, call: Any, request: bytes) -> bool:
        self.asked += 1
        is_granted = self._call(connection, call, request) == Status.NO_ERROR
        self.granted += is_granted
        return is_granted

    def _call(self, connection: socket.socket, call: Any, request: bytes) -> int:
        token = self._recorder.start(call)
        connection.sendall(request)
        while True:
            data = connection.recv(RECEIVE_SIZE)
            if not data:
                raise Gone
            for response in self._parser.feed(data):
                self._recorder.end(token, (response.status, told(call, response)))
                return response.status


def told(call: Any, response: Response) -> Any:
    """Returns what a response tells. A Take of one permit is recorded as the Acquire that has the same effect."""
    if response.status != Status.NO_ERROR or isinstance(call, Release):
        return None
    if response.opcode == Opcode.ACQUIRE:
        return wire.decode_consumption(response.body)
    grant = wire.decode_grant(response.body)
    return call.resources if isinstance(call, Acquire) else tuple(grant)
