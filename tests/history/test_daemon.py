"""What clients of a real daemon see, all at once, has an order; connections that are cut give back what they held."""

from __future__ import annotations

import contextlib
from random import Random
from threading import Thread
from typing import TYPE_CHECKING

from counterd.protocols.counter import wire
from daemon import Daemon, running
from functional.peers import ask
from history import Closed, Recorder, check, load
from history.counter import CounterModel, Release
from history.crowd import counter_calls

if TYPE_CHECKING:
    from pathlib import Path

CLIENTS = 8
CALLS = 60


def call(daemon: Daemon, path: Path, client: int) -> None:
    """Makes calls, and cuts the connection with one under way."""
    rng, choose = Random(client), counter_calls(names=2)
    with Recorder(path, client) as recorder, contextlib.closing(daemon.connect()) as connected:
        for left in reversed(range(CALLS)):
            request = choose(rng)
            token = recorder.start(request)
            data = getattr(wire, type(request).__name__.lower())(0, *request)
            if not left:
                connected.sendall(data)
                break
            response = ask(connected, data)
            tells = response.status == 0 and not isinstance(request, Release)
            recorder.end(token, (response.status, wire.decode_consumption(response.body) if tells else None))
        recorder.closing()


def test_daemon_has_an_order_for_everything(tmp_path: Path) -> None:
    paths = [tmp_path / str(client) for client in range(CLIENTS)]
    with running(tmp_path / "daemon") as daemon:
        for first in (0, CLIENTS // 2):  # the second half finds what the first has left: nothing
            clients = range(first, first + CLIENTS // 2)
            threads = [Thread(target=call, args=(daemon, paths[client], client)) for client in clients]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            daemon.wait_for_stats(curr_connections=1, holdings=0)
            for client in clients:
                with Recorder(paths[client], client) as recorder:
                    recorder.closed()
    operations = load(paths)
    assert sum(operation.answer is not None for operation in operations) == CLIENTS * (CALLS - 1)
    assert sum(operation.call == Closed() and operation.ended is not None for operation in operations) == CLIENTS
    assert check(operations, CounterModel()) is None
