"""The address of a server, and a connection for questions to it."""

from __future__ import annotations

import socket
import struct
from typing import TYPE_CHECKING

import pytest

from counterd.bench.connection import SHOWN, LoadError, Place, asked, bounded, resolve
from counterd.bench.plan import Plan
from counterd.errors import ProtocolError
from counterd.protocols.counter import wire
from kit.certificates import Files, server_context
from kit.scripted.counter import Server

if TYPE_CHECKING:
    from pathlib import Path


def test_addresses_are_resolved_for_the_kernel() -> None:
    four = Place(socket.AF_INET, ("127.0.0.1", 258), "", None)
    assert four.sockaddr() == struct.pack("=H", socket.AF_INET) + b"\1\2\x7f\0\0\1" + bytes(8)
    six = Place(socket.AF_INET6, ("::1", 258, 7, 9), "", None)
    assert six.sockaddr() == (
        struct.pack("=H", socket.AF_INET6) + b"\1\2\0\0\0\7" + bytes(15) + b"\1" + struct.pack("=I", 9)
    )
    assert Place(socket.AF_UNIX, "/s", "", None).sockaddr() == struct.pack("=H", socket.AF_UNIX) + b"/s\0"


def answers(place: Place) -> bool:
    with place.connect() as connection:
        connection.sendall(wire.noop(5))
        return connection.recv(100) == wire.frame(wire.Opcode.NOOP, 5, magic=wire.RESPONSE_MAGIC)


def test_a_connection_is_answered() -> None:
    with Server() as server:
        assert answers(resolve(Plan(port=server.address.port)))


def test_a_connection_with_tls_is_answered(tmp_path: Path) -> None:
    files = Files(tmp_path)
    with Server(context=server_context()) as server:
        assert answers(resolve(Plan(port=server.address.port, tls=True, cacert=str(files.cacert))))


def test_connecting_to_a_closed_port_is_an_error() -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        port = closed.getsockname()[1]
        with pytest.raises(LoadError, match=f"cannot connect to 127.0.0.1:{port}: Connection refused"):
            resolve(Plan(port=port))
        with pytest.raises(OSError, match="refused"):
            Place(socket.AF_INET, ("127.0.0.1", port), "", None).connect()
    with pytest.raises(LoadError, match="at most 107 bytes"):
        resolve(Plan(socket="/" + "s" * 107))


def test_answers_come_in_the_order_of_the_questions() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        for opaque in (1, 2):
            theirs.sendall(wire.frame(wire.Opcode.NOOP, opaque, magic=wire.RESPONSE_MAGIC))
        answers = asked(ours, [wire.noop(1), wire.noop(2)], wire.ResponseParser(), "asked")
        assert [each.opaque for each in answers] == [1, 2]
        theirs.shutdown(socket.SHUT_WR)
        with pytest.raises(ProtocolError, match="the server closed a connection that asked for more"):
            asked(ours, [wire.noop(3)], wire.ResponseParser(), "asked for more")


def test_many_findings_are_shortened() -> None:
    assert bounded(["x"] * SHOWN) == ["x"] * SHOWN
    assert bounded(["x"] * (SHOWN + 3)) == [*["x"] * SHOWN, "and 3 more"]
