"""A connection for tokens that threads share: a pair of sockets, of which the test has the server's end.

The background thread is tested with servers, in tests/functional/test_client_sentinel.py."""

from __future__ import annotations

import socket
import struct
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest

from counterd.client.sentinel import Client, _token_link
from counterd.client.sentinel._token_link import TokenLink
from counterd.client.sentinel._tokens import Tally, Token, TokenCalls, release
from counterd.errors import Timeout
from counterd.protocols.sentinel import wire
from kit.daemon import wait_until
from kit.machine import PATIENCE
from kit.scripted.sentinel import Tokens

if TYPE_CHECKING:
    from collections.abc import Iterator

SHORT = 0.02
TOKEN, OTHER = Token(-7, 101, 1), Token(8, 102, 1)


class Pair:
    """A link, and the server's end of its connection. late: how often it was said that grants are owed."""

    def __init__(self) -> None:
        near, self.server = socket.socketpair()
        near.setblocking(False)
        self.server.settimeout(PATIENCE)
        self.late = 0
        self.tally = Tally()
        self.link = TokenLink(near, "there", SHORT, print, print, calls=TokenCalls(self.tally), on_late=self._on_late)

    def _on_late(self) -> None:
        self.late += 1

    def grant(self, xid: int, token: Token) -> None:
        self.server.sendall(struct.pack(">Hibbq", 14, xid, 3, 0, token.id))

    def asked(self, *frames: bytes) -> None:
        """Checks that exactly these requests arrived."""
        assert self.server.recv(65536) == b"".join(frames)


@pytest.fixture
def pair() -> Iterator[Pair]:
    made = Pair()
    yield made
    made.link.close()
    made.server.close()


def given_up(pair: Pair) -> None:
    with pytest.raises(Timeout):
        pair.link.call(wire.acquire, 101, 1)


def test_only_an_unanswered_acquire_can_owe_a_grant(pair: Pair) -> None:
    with pytest.raises(Timeout):
        pair.link.call(wire.keep, -7)
    assert not pair.link.owes_grants()
    assert pair.late == 0
    given_up(pair)
    assert pair.link.owes_grants()
    assert pair.late == 1
    assert not pair.link.closed


def test_collect_reads_late_grants(pair: Pair) -> None:
    for xid in (1, 2):
        given_up(pair)
        pair.asked(wire.acquire(xid, 101, 1))
    start = time.monotonic()
    pair.link.collect(0.05)
    assert time.monotonic() - start >= 0.05
    assert pair.link.owes_grants()
    pair.grant(2, OTHER)
    pair.grant(1, TOKEN)
    pair.link.collect(PATIENCE)
    assert not pair.link.owes_grants()
    assert pair.tally.late == 2
    given_back = b""
    while len(given_back) < 30:
        given_back += pair.server.recv(65536)
    both = {wire.release(3, 8) + wire.release(4, -7), wire.release(3, -7) + wire.release(4, 8)}
    assert given_back in both


def test_calls_go_on_during_a_collect(pair: Pair) -> None:
    given_up(pair)
    collecting = threading.Thread(target=pair.link.collect, args=(PATIENCE,))
    collecting.start()
    wait_until(lambda: pair.link._reading, "it reads")
    pair.link._timeout = PATIENCE
    pair.asked(wire.acquire(1, 101, 1))
    with ThreadPoolExecutor(1) as pool:
        called = pool.submit(pair.link.call, wire.release, -7)
        pair.asked(wire.release(2, -7))
        pair.server.sendall(struct.pack(">Hibb", 6, 2, 4, 6))
        assert called.result(PATIENCE).status == 6
    pair.grant(1, TOKEN)
    collecting.join(PATIENCE)
    assert not collecting.is_alive()
    pair.asked(wire.release(3, -7))


def test_a_server_that_owes_a_grant_for_too_long_is_given_up(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    given_up(pair)
    assert pair.link.owes_grants()
    monkeypatch.setattr(_token_link, "LATE_MAX_S", 0.0)
    assert not pair.link.owes_grants()
    assert pair.link.closed == "an acquire was not answered within 0 s"


def test_late_grants_are_given_back_at_once(pair: Pair) -> None:
    pair.link.give_back(release(TOKEN))
    pair.asked(wire.release(1, -7))


def test_releases_during_a_call_are_sent_with_that_call(pair: Pair) -> None:
    with pair.link._lock:
        pair.link.give_back(release(TOKEN))
        pair.link.give_back(release(OTHER))
        assert pair.link.calls.give_back
    with pytest.raises(Timeout):
        pair.link.call(wire.keep, 5)
    pair.asked(wire.keep(1, 5), wire.release(2, 8), wire.release(3, -7))


def test_nothing_is_sent_after_the_end_of_the_connection(pair: Pair) -> None:
    pair.link.give_back(release(TOKEN), release(OTHER))
    pair.link.close()
    pair.asked(wire.release(1, 8), wire.release(2, -7))
    assert pair.server.recv(1) == b""
    pair.link.give_back(release(TOKEN))
    pair.link.tell(wire.keep, 5)


def test_closing_in_a_signal_handler_leaves_tokens_to_their_leases(pair: Pair) -> None:
    with pair.link._lock:
        pair.link.give_back(release(TOKEN))
        pair.link.close()
    assert pair.server.recv(1) == b""


def test_the_background_thread_ends_a_connection_that_owes_grants_for_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_token_link, "LATE_MAX_S", 2 * SHORT)
    with (
        Tokens() as server,
        Client(*server.address, timeout=SHORT, connect_timeout=PATIENCE, fallback="closed") as client,
    ):
        server.waits = {wire.MessageType.ACQUIRE}
        with pytest.raises(Timeout):
            client.acquire(101)
        server.wait_for_ends(1)
