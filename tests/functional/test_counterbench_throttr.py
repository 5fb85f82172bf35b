"""counterbench against the throttr protocol of a real daemon, and redis with corresponding requests."""

from __future__ import annotations

import contextlib
import socket
from typing import TYPE_CHECKING

import pytest

from kit import daemon
from kit.loading import Place, load, other_server

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@contextlib.contextmanager
def throttr(directory: Path, **settings: str) -> Iterator[Place]:
    """A daemon with the throttr protocol and these settings of it."""
    place = Place(str(directory / "s"))
    fixed = {"throttr.enable": "true", "throttr.port": "0", "throttr.bind": "127.0.0.1", "throttr.socket": place.path}
    with daemon.running(directory, {**fixed, **{f"throttr.{key}": value for key, value in settings.items()}}):
        yield place


def ask(place: Place, request: bytes, size: int) -> bytes:
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(daemon.PATIENCE)
        connection.connect(place.path)
        connection.sendall(request)
        return connection.recv(size, socket.MSG_WAITALL)


OUTCOMES = {
    "noop": {"answered"},
    "query": {"read"},
    "update": {"updated"},
    "insert": {"written"},
    "set": {"written"},
    "get": {"read"},
    "purge": {"written", "purged"},
    "mix:query=1,update=1,insert=1,set=1,get=1": {"read", "updated", "written"},
}


@pytest.mark.parametrize("protocol", ["throttr", pytest.param("redis", marks=pytest.mark.needs("redis-server"))])
def test_every_kind_of_request(protocol: str, short_path: Path) -> None:
    with throttr(short_path) if protocol == "throttr" else other_server(protocol, short_path) as server:
        for work, outcomes in OUTCOMES.items():
            for depth, processes in ((1, 1), (50, 2)):
                run = load(
                    server, protocol=protocol, requests=2000, connections=4, depth=depth, processes=processes, names=50,
                    work=work, prefill=True, value_size=100, ttl=100.0,
                )  # fmt: skip
                assert (run.requests, run.errors, set(run.outcomes)) == (2000, {}, outcomes)


@pytest.mark.parametrize(("number_type", "size"), [("uint8", 1), ("uint16", 2), ("uint32", 4), ("uint64", 8)])
def test_numbers_of_every_size(number_type: str, size: int, short_path: Path) -> None:
    value_size = min(1 << 8 * size, 1 << 18) - 1
    with throttr(short_path, value_size=number_type) as place:
        for work in ("query", "update", "insert", "mix:set=1,get=1"):
            run = load(
                place, protocol="throttr", requests=500, depth=20, names=10, work=work, prefill=True,
                number_type=number_type, value_size=value_size, ttl=200.0,
            )  # fmt: skip
            assert (run.requests, run.errors) == (500, {})


def test_updates_keep_the_sum_of_a_quota(short_path: Path) -> None:
    with throttr(short_path, value_size="uint8") as place:
        plan = {"protocol": "throttr", "work": "update", "number_type": "uint8", "names": 1}
        run = load(place, requests=10_000, depth=100, connections=20, prefill=True, **plan)
        assert (run.requests, run.errors) == (10_000, {})
        assert ask(place, b"\x02\x10" + b"n" * 8 + b"0" * 8, 2) == b"\1\0"
        run = load(place, requests=100, prefill=True, **plan)
        assert run.errors == {}, "what is there already is made anew"


def test_missing_keys_are_errors(short_path: Path) -> None:
    with throttr(short_path) as place:
        for work in ("query", "update", "get"):
            run = load(place, protocol="throttr", requests=50, work=work)
            assert (run.requests, run.outcomes, run.errors) == (0, {}, {"error reply": 50})


def test_a_full_table_is_an_error(short_path: Path) -> None:
    with throttr(short_path, memory_limit="64K") as place:
        run = load(place, protocol="throttr", requests=2000, work="insert", ttl=100.0)
        assert run.outcomes["written"] < 1000
        assert run.errors == {"error reply": 2000 - run.requests}
