"""Clients of daemons that share limits. Each records every request and its answer, in the format of tests/history."""

from __future__ import annotations

import random
import select
import socket
import threading
from typing import TYPE_CHECKING

from counterd.protocols.counter import wire
from counterd.protocols.counter.wire import Permit, Rate, Status
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
    """A client of one daemon, which reconnects whenever its connection has ended.

    path: returns the daemon's socket. history: the file for its history. numbers: those of its connections. asked,
    granted: numbers of requests.
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
                    dice = self._draw.random()
                    if dice < 0.3:
                        self._take(connection, self._units())
                    elif dice < 0.6:
                        self._acquire(connection)
                    else:
                        self._take(connection, self._permit(), *([self._units()] if dice < 0.7 else []))
            finally:
                # It may have ended before, and other daemons may notice it later: see verdict.py.
                self._recorder.closing()
                self._recorder.closed()

    def _units(self) -> Rate:
        return self._draw.choice(list(RATES.values()))._replace(amount=self._draw.randint(1, UNITS_MAX))

    def _permit(self) -> Permit:
        name = self._draw.choice(list(MAXIMA))
        maximum = MAXIMA[name]
        return Permit(name, self._draw.randint(1, max(1, maximum // SHARE)), maximum)

    def _acquire(self, connection: socket.socket) -> None:
        permit = self._permit()
        if self._is_granted(connection, Acquire(*permit), wire.acquire(1, *permit)):
            self._hold(connection, permit)

    def _take(self, connection: socket.socket, *items: Permit | Rate) -> None:
        """Takes all items or none."""
        wait_ms = self._draw.choice([0, WAIT_MS])
        if self._is_granted(connection, Take(1, tuple(map(tuple, items)), wait_ms), wire.take(1, items, wait_ms)):
            for item in items:
                if isinstance(item, Permit):
                    self._hold(connection, item)

    def _hold(self, connection: socket.socket, permit: Permit) -> None:
        """Holds permits for a moment, and releases them."""
        longest_s = LONG_HOLD_S if self._draw.random() < LONG else HOLD_S
        readable, _, _ = select.select([connection], [], [], self._draw.random() * longest_s)
        if readable and not connection.recv(RECEIVE_SIZE):
            raise Gone
        self._call(connection, Release(permit.name, permit.amount), wire.release(2, permit.name, permit.amount))

    def _is_granted(self, connection: socket.socket, call: Any, request: bytes) -> bool:
        self.asked += 1
        is_granted = self._call(connection, call, request) == Status.NO_ERROR
        self.granted += is_granted
        if not is_granted:
            self._is_over.wait(self._draw.random() * HOLD_S)
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
    """Returns the answer in a response, as the models have it."""
    if response.status != Status.NO_ERROR or isinstance(call, Release):
        return None
    return wire.decode_consumption(response.body) if isinstance(call, Acquire) else wire.decode_grant(response.body)
