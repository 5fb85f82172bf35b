"""What is measured of tokens ends with an error where a server does not let them end. Nothing is timed."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from counterd.protocols.sentinel.wire import MessageType
from kit.scripted.sentinel import Room
from peers import servers, tokens

if TYPE_CHECKING:
    from kit.scripted import Peer


def described(server: Room) -> servers.Server:
    return servers.Server("it", "sentinel", os.getpid(), server.address.port)


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LEAD_S", "WATCHED_S", "OFFLINE_MS"):
        monkeypatch.setattr(tokens, name, 0.01)


def test_each_flow_has_as_many() -> None:
    with Room() as room:
        assert tokens.memory(described(room), 2500).keys() == {"bytes each"}
        asked = [each.id for each in room.of(MessageType.ACQUIRE)]
        assert asked == [*range(1, 1001), *range(1, 1001), *range(1, 501)]


def test_tokens_that_do_not_end_are_a_failure() -> None:
    with Room() as room, pytest.raises(RuntimeError, match="tokens of flow 1 that have not ended"):
        tokens.expire(described(room), 10)


def test_tokens_that_end_are_none() -> None:
    class Ending(Room):
        def give_back(self, peer: Peer) -> None:
            self.used.clear()

    with Ending() as room:
        assert tokens.expire(described(room), 10).keys() == {"others max ms", "others p99 ms", "idle max ms"}
