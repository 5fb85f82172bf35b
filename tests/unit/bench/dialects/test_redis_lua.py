"""The redis-lua dialect: requests byte for byte. The scripts are tested in
tests/functional/test_counterbench_sentinel.py."""

from __future__ import annotations

import hashlib
import socket

import pytest

from counterd.bench.connection import LoadError, Place
from counterd.bench.dialects import redis_lua
from counterd.bench.dialects.redis import resp
from counterd.bench.plan import Plan, read_work
from counterd.bench.takes import Items, Take
from kit.scripted import Peer, Server


def place_of(server: Server) -> Place:
    return Place(socket.AF_INET, tuple(server.address), "", None)


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
        redis_lua.install(place_of(server))
    assert loaded == list(redis_lua.SCRIPTS.values())


@pytest.mark.parametrize("said", [b"-ERR no\r\n", b"$40\r\n" + b"0" * 40 + b"\r\n", b"$3\r\nabc\r\n", b""])
def test_a_server_that_refuses_scripts_is_an_error(said: bytes) -> None:
    class Redis(Server):
        def serve(self, peer: Peer) -> None:
            peer.socket.recv(10_000)
            peer.socket.sendall(said)

    with Redis() as server, pytest.raises(LoadError, match="does not accept scripts"):
        redis_lua.install(place_of(server))


def test_requests_byte_for_byte() -> None:
    def evalsha(script: str, name: bytes, *numbers: bytes) -> bytes:
        return resp(b"EVALSHA", redis_lua.digest(script), b"1", name, *numbers)

    assert redis_lua.requests_of(Plan(protocol="redis-lua", maximum=12), b"jobs") == {
        "noop": b"*1\r\n$4\r\nPING\r\n",
        "acquire": evalsha("acquire", b"held:jobs", b"12", b"4000", redis_lua.TOKEN),
        "release": b"*3\r\n$4\r\nZREM\r\n$9\r\nheld:jobs\r\n$16\r\n" + redis_lua.TOKEN + b"\r\n",
        "flow": evalsha("flow", b"flow:jobs", b"12", b"1000"),
        "counts": evalsha("counts", b"counts:jobs", b"12", b"1000"),
    }


def test_requests_of_several_items_byte_for_byte() -> None:
    plan = Plan(protocol="redis-lua", resources=2, maximum=12, take=Take(items=Items(2, 1), limit=4, burst=3))
    keys = (b"used:jobs", b"used:jobs:1", b"rate:jobs:r0")
    requests = redis_lua.requests_of(plan, b"jobs")
    taken = (redis_lua.digest("take"), b"3", *keys, b"2", b"2", b"12", b"4", b"3")
    assert requests["acquire"] == resp(b"EVALSHA", *taken)
    assert requests["release"] == resp(b"EVALSHA", redis_lua.digest("give"), b"2", *keys[:2], b"2")
    rate = Plan(protocol="redis-lua", take=Take(items=Items(0, 1), limit=4), work=read_work("acquire"))
    expected = resp(b"EVALSHA", redis_lua.digest("gcra"), b"1", b"rate:jobs:r0", b"4", b"4")
    assert redis_lua.requests_of(rate, b"jobs")["acquire"] == expected
