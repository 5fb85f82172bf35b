"""Benchmarks of tokens end with an error if a server does not let tokens expire. No test measures time."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from counterd.protocols.sentinel.wire import MessageType
from kit.scripted.sentinel import Tokens
from peers import servers, tokens

if TYPE_CHECKING:
    from kit.scripted import Peer


def described(server: Tokens) -> servers.Server:
    return servers.Server("it", "sentinel", os.getpid(), server.address.port)


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LEAD_S", "WATCHED_S", "OFFLINE_MS"):
        monkeypatch.setattr(tokens, name, 0.01)


def test_each_flow_has_the_same_number_of_tokens() -> None:
    with Tokens() as server:
        assert tokens.memory(described(server), 2500).keys() == {"bytes each"}
        asked = [each.id for each in server.of(MessageType.ACQUIRE)]
        assert asked == [*range(1, 1001), *range(1, 1001), *range(1, 501)]


def test_tokens_that_do_not_expire_are_an_error() -> None:
    with Tokens() as server, pytest.raises(RuntimeError, match="tokens of flow 1 that have not ended"):
        tokens.expire(described(server), 10)


def test_tokens_that_expire_are_no_error() -> None:
    class Ending(Tokens):
        def give_back(self, peer: Peer) -> None:
            self.used.clear()

    with Ending() as server:
        assert tokens.expire(described(server), 10).keys() == {"others max ms", "others p99 ms", "idle max ms"}
