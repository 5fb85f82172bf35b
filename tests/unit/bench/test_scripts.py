"""What redis is given; what the scripts do is in tests/functional/test_counterbench_sentinel.py."""

from __future__ import annotations

import hashlib
import socket

import pytest

from counterd.bench import scripts
from counterd.bench.asking import LoadError, Place
from scripted import Peer, Server


def place_of(server: Server) -> Place:
    return Place(socket.AF_INET, tuple(server.address), "", None)


def test_a_request() -> None:
    assert scripts.resp(b"GET", b"jobs") == b"*2\r\n$3\r\nGET\r\n$4\r\njobs\r\n"


def test_all_scripts_are_loaded() -> None:
    class Redis(Server):
        def serve(self, peer: Peer) -> None:
            while data := peer.socket.recv(10_000):
                head, _, text = data.partition(b"LOAD\r\n")
                assert head == b"*3\r\n$6\r\nSCRIPT\r\n$4\r\n"
                text = text.split(b"\r\n", 1)[1].removesuffix(b"\r\n")
                loaded.append(text)
                peer.socket.sendall(b"$40\r\n%b\r\n" % hashlib.sha1(text).hexdigest().encode())

    loaded: list[bytes] = []
    with Redis() as server:
        scripts.install(place_of(server))
    assert loaded == list(scripts.SCRIPTS.values())


@pytest.mark.parametrize("said", [b"-ERR no\r\n", b"$40\r\n" + b"0" * 40 + b"\r\n", b"$3\r\nabc\r\n", b""])
def test_a_server_that_does_not_take_them(said: bytes) -> None:
    class Redis(Server):
        def serve(self, peer: Peer) -> None:
            peer.socket.recv(10_000)
            peer.socket.sendall(said)

    with Redis() as server, pytest.raises(LoadError, match="does not take scripts"):
        scripts.install(place_of(server))
