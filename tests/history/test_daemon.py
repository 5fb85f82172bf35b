"""What clients of a real daemon see, all at once, has an order; connections that are cut give back what they held."""

from __future__ import annotations

import contextlib
import json
import socket
from random import Random
from threading import Thread
from typing import TYPE_CHECKING, Any

from counterd.protocols.counter import wire
from counterd.protocols.sentinel import wire as sentinel_wire
from counterd.protocols.sentinel.rules import read_rules
from daemon import PATIENCE, Daemon, running, wait_until
from functional.peers import ask
from history import Closed, Recorder, check, load, sentinel
from history.counter import CounterModel, Release
from history.crowd import counter_calls, sentinel_calls

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from history import Operation

CLIENTS = 8
CALLS = 60


LATE_NS = 5_000_000_000  # by which a busy machine may be behind with its sweeps
# Flow 1 is of tokens, flow 2 a rate; parameters have rule 1.
RULES: dict[str, Any] = {
    "shop": {
        "flowRules": [
            {
                "resource": "pay", "clusterMode": True, "count": 3, "grade": 0,
                "clusterConfig": {
                    "flowId": 1, "thresholdType": 1, "resourceTimeout": 60_000, "clientOfflineTime": 50,
                },
            },
            {
                "resource": "pay", "clusterMode": True, "count": 20, "grade": 1,
                "clusterConfig": {"flowId": 2, "thresholdType": 1, "sampleCount": 4, "windowIntervalMs": 200},
            },
        ],
        "paramFlowRules": [
            {
                "resource": "pay", "clusterMode": True, "count": 50, "paramIdx": 0,
                "clusterConfig": {"flowId": 1, "thresholdType": 1, "sampleCount": 2, "windowIntervalMs": 100},
            },
        ],
    }
}  # fmt: skip


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


def halves(paths: list[Path], of: Callable[[Path, int], None], gone: Callable[[], object]) -> list[Operation]:
    """What clients see, half of them at a time: the second half finds what the first has left. gone: waits for that."""
    for first in (0, CLIENTS // 2):
        clients = range(first, first + CLIENTS // 2)
        threads = [Thread(target=of, args=(paths[client], client)) for client in clients]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        gone()
        for client in clients:
            with Recorder(paths[client], client) as recorder:
                recorder.closed()
    return load(paths)


def test_daemon_has_an_order_for_everything(tmp_path: Path) -> None:
    paths = [tmp_path / str(client) for client in range(CLIENTS)]
    with running(tmp_path / "daemon") as daemon:
        operations = halves(
            paths,
            lambda path, client: call(daemon, path, client),
            lambda: daemon.wait_for_stats(curr_connections=1, holdings=0),
        )
    assert sum(operation.answer is not None for operation in operations) == CLIENTS * (CALLS - 1)
    assert sum(operation.call == Closed() and operation.ended is not None for operation in operations) == CLIENTS
    assert check(operations, CounterModel()) is None


# ---- sentinel -------------------------------------------------------------------------------------------------------


class Known:
    """Tokens that somebody was granted, with their flows: anybody may release or keep them."""

    def __init__(self) -> None:
        self.granted: list[tuple[int, int]] = []


def exchange(connected: socket.socket, data: bytes) -> sentinel_wire.Response:
    parser = sentinel_wire.ResponseParser()
    connected.sendall(data)
    while not (responses := parser.feed(connected.recv(1 << 16))):
        pass
    return responses[0]


def connect(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), PATIENCE)


def call_sentinel(port: int, known: Known, path: Path, client: int) -> None:
    """As call(), in the namespace that all are in."""
    rng, choose = Random(client), sentinel_calls(known, "tokens tokens window values")
    with Recorder(path, client) as recorder, contextlib.closing(connect(port)) as connected:
        for left in reversed(range(CALLS)):
            request = sentinel.Ping(b"shop") if left == CALLS - 1 else choose(rng)
            token = recorder.start(request)
            if not left:
                connected.sendall(sentinel.request(request))
                break
            answer = sentinel.told(request, exchange(connected, sentinel.request(request)))
            recorder.end(token, answer)
            if isinstance(request, sentinel.Acquire) and answer[0] == sentinel_wire.Status.OK:
                known.granted.append((request.flow, answer[1]))
        recorder.closing()


def test_daemon_has_an_order_for_tokens_windows_and_values(tmp_path: Path) -> None:
    """And when all have gone, all tokens of a flow can be had at once."""
    paths = [tmp_path / str(client) for client in range(CLIENTS)]
    rules = tmp_path / "rules.json"
    rules.write_text(json.dumps(RULES))
    settings = {"sentinel.enable": "true", "sentinel.port": 0, "sentinel.bind": "127.0.0.1", "sentinel.rules": rules}
    known = Known()
    with running(tmp_path / "daemon", settings) as daemon:
        port = daemon.served("sentinel listens on")[0].port

        def are_gone() -> bool:
            with contextlib.closing(connect(port)) as connected:
                return exchange(connected, sentinel_wire.ping(0, b"shop")).connected == 1

        operations = halves(
            paths,
            lambda path, client: call_sentinel(port, known, path, client),
            lambda: wait_until(are_gone, "nobody else is connected"),
        )
        with contextlib.closing(connect(port)) as connected:
            wait_until(lambda: not exchange(connected, sentinel_wire.acquire(0, 1, 3)).status, "all tokens are free")
    assert sum(operation.answer is not None for operation in operations) == CLIENTS * (CALLS - 1)
    assert check(operations, sentinel.SentinelModel(sentinel.objects(read_rules(RULES)), sweep_ns=LATE_NS)) is None
