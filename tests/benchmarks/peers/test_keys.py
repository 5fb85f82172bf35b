"""Benchmarks of keys and events end with an error if a server does not support them. No test measures time."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from kit.scripted import Peer, Server
from peers import keys, servers

if TYPE_CHECKING:
    from collections.abc import Callable


class Yes(Server):
    """A server that answers 01 to everything."""

    def serve(self, peer: Peer) -> None:
        while data := peer.socket.recv(1 << 16):
            peer.socket.sendall(self.answer(peer, data))

    def answer(self, peer: Peer, data: bytes) -> bytes:
        return b"\1"


def described(server: Server) -> servers.Server:
    return servers.Server("it", "throttr", os.getpid(), server.address.port)


def test_keys_that_do_not_expire_are_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keys, "WATCHED_S", 0.01)
    with Yes() as server, pytest.raises(RuntimeError, match="has not expired"):
        keys.expire(described(server), 1)


@pytest.mark.parametrize("measured", [keys.publish, keys.drop])
def test_subscribers_that_get_nothing_are_a_failure(
    measured: Callable[[servers.Server, int], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keys, "DELIVERED_S", 0.1)
    with Yes() as server, pytest.raises(RuntimeError, match="2 of 2 subscribers have not got"):
        measured(described(server), 2)


def test_a_subscriber_that_is_closed_is_a_failure() -> None:
    class Closing(Yes):
        def answer(self, peer: Peer, data: bytes) -> bytes:
            if data[0] == 0x13:
                self.peers[1].socket.shutdown(2)
            return b"\1"

    with Closing() as server, pytest.raises(RuntimeError, match="a subscriber that reads was dropped"):
        keys.publish(described(server), 2)
