"""Histories of a real daemon whose clients take several items at once, and wait: they have an order, and no Take
waits in vain.

Each client disconnects with pending Takes; its holdings and grants come back, and its refundable units are
refunded."""

from __future__ import annotations

import contextlib
from random import Random
from threading import Thread
from typing import TYPE_CHECKING, Any

import pytest

from counterd.protocols.counter import wire
from history import Closed, Operation, Recorder, check, load
from history.takers import TAKES, Client, request, take_calls, told
from history.takes import Take, TakeModel, prepared
from history.waiting import mistakes
from kit.daemon import Daemon, running

if TYPE_CHECKING:
    from pathlib import Path

CLIENTS = 6
CALLS = 60
LATE_NS = 5_000_000_000  # by which a busy machine may be late


class Caller:
    """A connection that sends calls, and reads the replies."""

    def __init__(self, daemon: Daemon, path: Path, number: int) -> None:
        self.client = Client(number)
        self.recorder = Recorder(path, number)
        self.socket = daemon.connect()
        self.parser = wire.ResponseParser()
        self.tokens: dict[int, int] = {}

    def send(self, opaque: int, call: Any) -> None:
        self.client.under_way[opaque] = Operation(self.client.number, call, 0)
        self.tokens[opaque] = self.recorder.start(call)
        self.socket.sendall(request(opaque, call))

    def read_until(self, opaque: int) -> None:
        while opaque in self.client.under_way:
            for response in self.parser.feed(self.socket.recv(1 << 16)):
                answer = told(response)
                self.recorder.end(self.tokens.pop(response.opaque), answer)
                self.client.told(self.client.under_way.pop(response.opaque).call, answer)

    def close(self) -> None:
        self.recorder.closing()
        self.socket.close()
        self.recorder.close()


def call(daemon: Daemon, path: Path, number: int, shape: dict[str, Any]) -> None:
    """Makes calls, and cuts the connection with some under way."""
    rng, choose = Random(number), take_calls(**shape)
    with contextlib.closing(Caller(daemon, path, number)) as caller:
        for opaque in range(1, CALLS + 1):
            chosen = choose(rng, caller.client, opaque)
            caller.send(opaque, chosen)
            waits = isinstance(chosen, Take) and chosen.wait_ms
            if opaque < CALLS and not (waits and len(caller.client.waiting()) < TAKES and rng.random() < 0.6):
                caller.read_until(opaque)


@pytest.mark.parametrize("shape", [{"groups": 1}, {"keys": (b"", b"k", b"l")}], ids=["one key", "several keys"])
def test_daemon_has_an_order_for_takes(tmp_path: Path, shape: dict[str, Any]) -> None:
    paths = [tmp_path / str(number) for number in range(2 * CLIENTS)]
    with running(tmp_path / "daemon") as daemon:
        for numbers in (range(CLIENTS), range(CLIENTS, 2 * CLIENTS)):  # the second half finds what the first left
            threads = [Thread(target=call, args=(daemon, paths[number], number, shape)) for number in numbers]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            daemon.wait_for_stats(curr_connections=1, holdings=0, waiters=0, charges=0)
            for number in numbers:
                with Recorder(paths[number], number) as recorder:
                    recorder.closed()
    operations = load(paths)
    history = prepared(operations)
    assert sum(one.call == Closed() and one.ended is not None for one in operations) == 2 * CLIENTS
    assert mistakes(operations, late_ns=LATE_NS) == []
    assert check(history, TakeModel(history)) is None
