"""The real counterd with the sentinel protocol: its rules and settings, and a connection to it."""

from __future__ import annotations

import contextlib
import json
import socket
from typing import TYPE_CHECKING, Any

from counterd.protocols.sentinel import wire
from kit import daemon

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from kit.daemon import Address, Daemon

SETTINGS = {
    "counter.enable": "false",
    "sentinel.enable": "true",
    "sentinel.port": "0",
    "sentinel.bind": "127.0.0.1",
}
PAY, ASK = 7, 101  # flows of concurrent tokens and of calls a second


def flow(flow_id: int, count: float, *, grade: int = 0, **more: Any) -> dict[str, Any]:
    """Makes a rule for `count` tokens, or for a rate if grade is 1. more: of its clusterConfig."""
    config = {"flowId": flow_id, "thresholdType": 1, **more}
    return {"resource": f"r{flow_id}", "count": count, "grade": grade, "clusterMode": True, "clusterConfig": config}


def param(flow_id: int, count: float, **more: Any) -> dict[str, Any]:
    """Makes a rule for `count` calls with each value."""
    return {**flow(flow_id, count, grade=1, **more), "paramIdx": 0}


def document(concurrent: float = 3, **cluster: object) -> dict[str, Any]:
    """Makes rules of PAY and ASK."""
    return {"shop": {"flowRules": [flow(PAY, concurrent, **cluster), flow(ASK, 1_000_000, grade=1)]}}


def write_rules(directory: Path, rules: object = None) -> Path:
    """Writes rules to a file, by default those of document(). Returns its path."""
    path = directory / "rules.json"
    path.write_text(json.dumps(document() if rules is None else rules))
    return path


def settings(directory: Path, rules: Mapping[str, Any], **more: str) -> dict[str, str]:
    """Returns the settings of a daemon with these rules and the counter protocol. more: sentinel.NAME = value."""
    directory.mkdir(exist_ok=True)
    own = {**SETTINGS, "counter.enable": "true", "sentinel.rules": str(write_rules(directory, rules))}
    return own | {f"sentinel.{name}": value for name, value in more.items()}


@contextlib.contextmanager
def running(directory: Path, rules: Mapping[str, Any], **more: Any) -> Iterator[tuple[Daemon, Address]]:
    """Runs a counterd during the block. Yields it and the address of the sentinel protocol."""
    with daemon.running(directory, settings(directory, rules, **more)) as started:
        yield started, started.address_of("sentinel")


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
