"""What the tests of a sentinel room that is a process have in common: its settings, rules and a connection."""

from __future__ import annotations

import contextlib
import json
import socket
from typing import TYPE_CHECKING, Any

from counterd.protocols.sentinel import wire
from kit import daemon

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

SETTINGS = {
    "counter.enable": "false",
    "sentinel.enable": "true",
    "sentinel.port": "0",
    "sentinel.bind": "127.0.0.1",
}
PAY, ASK = 7, 101  # flows of concurrent tokens and of calls a second


def rule(flow_id: int, grade: int, count: float, **cluster: object) -> dict[str, Any]:
    config = {"flowId": flow_id, "thresholdType": 1, **cluster}
    return {"resource": f"r{flow_id}", "grade": grade, "count": count, "clusterMode": True, "clusterConfig": config}


def document(concurrent: float = 3, **cluster: object) -> dict[str, Any]:
    """Rules of PAY and ASK."""
    return {"shop": {"flowRules": [rule(PAY, 0, concurrent, **cluster), rule(ASK, 1, 1_000_000)]}}


def write_rules(directory: Path, rules: object = None) -> Path:
    """A file of rules, of document() unless told otherwise."""
    path = directory / "rules.json"
    path.write_text(json.dumps(document() if rules is None else rules))
    return path


class Peer:
    """A connection. Each request is sent at once; responses come in any order."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self._parser = wire.ResponseParser()
        self._here: dict[int, wire.Response] = {}

    def send(self, request: bytes) -> None:
        self.connection.sendall(request)

    def response(self, xid: int) -> wire.Response:
        while xid not in self._here:
            data = self.connection.recv(65536)
            assert data, "it ended"
            self._here.update((response.xid, response) for response in self._parser.feed(data))
        return self._here.pop(xid)

    def acquire(self, count: int = 1, flow: int = PAY) -> wire.Response:
        self.send(wire.acquire(1, flow, count))
        return self.response(1)

    def release(self, token_id: int) -> int:
        self.send(wire.release(2, token_id))
        return self.response(2).status

    def keep(self, token_id: int) -> wire.Response:
        self.send(wire.keep(3, token_id))
        return self.response(3)

    def flow(self) -> int:
        self.send(wire.flow(4, ASK, 1))
        return self.response(4).status


@contextlib.contextmanager
def connected(counterd: daemon.Daemon) -> Iterator[Peer]:
    address = counterd.address_of("sentinel")
    with socket.create_connection(address, daemon.PATIENCE) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        yield Peer(connection)
