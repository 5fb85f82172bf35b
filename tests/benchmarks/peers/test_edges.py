"""Benchmarks of a server at its limits end if the server fails. No test measures time."""

from __future__ import annotations

import os

import pytest

from counterd.protocols.counter import wire
from kit.scripted import Hangup
from kit.scripted.counter import Request, Server
from peers import edges, servers


def described(server: Server) -> servers.Server:
    return servers.Server("it", "counter", os.getpid(), server.address.port)


class Leaving(Server):
    """A server that answers two requests of a connection, and closes it."""

    def answer(self, request: Request) -> bytes:
        if self.peer_of(request).requests > 2:
            raise Hangup
        return wire.frame(request.opcode, request.opaque, b"Not found", magic=wire.RESPONSE_MAGIC, flags=1)


def test_an_unanswered_bystander_is_an_error(capfd: pytest.CaptureFixture[str]) -> None:
    with Leaving() as server, pytest.raises(RuntimeError, match="it did not answer another client"):
        edges.alone(described(server), 100)
    assert "the server closed a connection" in capfd.readouterr().err


def test_the_first_failure_is_reported() -> None:
    with Leaving() as server, pytest.raises(ZeroDivisionError), edges.Bystander(described(server)):
        raise ZeroDivisionError


def test_a_flood_that_fails_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(edges, "_pour", lambda _: os._exit(3))
    monkeypatch.setattr(edges.Bystander, "__enter__", lambda self: self)
    monkeypatch.setattr(edges.Bystander, "__exit__", lambda *_: None)
    with Server() as server, pytest.raises(RuntimeError, match="there was no flood"):
        edges.flood(described(server), 10)
