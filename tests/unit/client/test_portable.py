"""A client on systems that lack parts of Linux's interface: the tests take these parts away."""

from __future__ import annotations

import os
import socket
import threading
from typing import TYPE_CHECKING

import pytest

from counterd.client import Client, _portable
from counterd.client._connection import set_options
from counterd.client._portable import Waker, has_ended
from kit.machine import PATIENCE
from kit.scripted.counter import Answers, responded

if TYPE_CHECKING:
    from collections.abc import Iterator

LINUX_ONLY = ("TCP_USER_TIMEOUT", "TCP_KEEPIDLE", "TCP_KEEPINTVL", "TCP_KEEPCNT")


@pytest.fixture(params=["linux", "elsewhere"])
def system(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "elsewhere":
        for name in LINUX_ONLY:
            monkeypatch.delattr(socket, name)
        monkeypatch.delattr(os, "eventfd")
        monkeypatch.setattr(_portable, "PEER_ENDED", 0)
        monkeypatch.setattr(_portable, "LOOK_S", 0.01)
    return str(request.param)


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    near, far = socket.socketpair()
    near.setblocking(False)
    with near, far:
        yield near, far


@pytest.mark.usefixtures("system")
def test_a_waker_is_readable_once_it_was_woken() -> None:
    waker = Waker()
    assert not waker.take()
    waker.wake()
    waker.wake()
    assert waker.take()
    assert not waker.take()
    waker.close()
    waker.close()
    waker.wake()
    assert waker.fileno() == -1


@pytest.mark.usefixtures("system")
def test_waking_an_unread_waker_never_blocks() -> None:
    waker = Waker()
    for _ in range(10_000):  # of 8 bytes: more than a pipe takes
        waker.wake()
    assert waker.take()
    waker.close()


@pytest.mark.usefixtures("system")
def test_has_ended_is_true_after_the_last_byte(pair: tuple[socket.socket, socket.socket]) -> None:
    near, far = pair
    assert not has_ended(near)
    far.shutdown(socket.SHUT_WR)
    assert has_ended(near)
    assert near.fileno() >= 0


def test_has_ended_reads_nothing(pair: tuple[socket.socket, socket.socket], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_portable, "PEER_ENDED", 0)
    near, far = pair
    far.send(b"unread")
    assert not has_ended(near)
    assert near.recv(10) == b"unread"


@pytest.mark.usefixtures("system")
def test_missing_socket_options_are_left_out() -> None:
    listening = socket.create_server(("127.0.0.1", 0))
    with listening, socket.create_connection(listening.getsockname()) as connected:
        set_options(connected)
        assert connected.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


@pytest.mark.usefixtures("system")
def test_a_watched_hold_hears_of_its_loss() -> None:
    told = threading.Event()

    def grant(opcode: int, opaque: int, body: bytes) -> list[bytes]:
        return [responded(opcode, opaque, b"\0\0\0\1")]

    with (
        Answers(grant) as script,
        Client(port=script.port, timeout=PATIENCE, watch=True) as client,
        client.hold("n", maximum=1, on_lost=lambda hold: told.set()) as hold,
    ):
        assert not hold.lost
        script.hang_up()
        assert told.wait(PATIENCE)
        assert hold.lost
