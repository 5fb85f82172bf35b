"""Level 3: the vectors against a real yrmcdsd, so that they describe the reference's behaviour and not our idea of
it.

Also properties of the vectors themselves, which need no server."""

from __future__ import annotations

import re
import socket
from typing import TYPE_CHECKING

import pytest

from conformance import vectors
from kit import reference

if TYPE_CHECKING:
    from collections.abc import Iterator

CASES = vectors.load("counter")
HEADER_SIZE = 12
NAME_AT = {0x01: 2, 0x02: 10, 0x03: 6}  # where the name is in a body, by opcode


@pytest.fixture(scope="module")
def yrmcdsd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[reference.Address]:
    with reference.running(tmp_path_factory.mktemp("yrmcdsd")) as address:
        yield address


@pytest.fixture(scope="module")
def another_yrmcdsd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[reference.Address]:
    """Another yrmcdsd, without the counters of the first one, which would make every case fail."""
    with reference.running(tmp_path_factory.mktemp("another_yrmcdsd")) as address:
        yield address


@pytest.mark.needs("yrmcdsd")
@pytest.mark.parametrize("case", [case for case in CASES if not case.skip], ids=str)
def test_the_reference_does_what_the_vector_says(case: vectors.Case, yrmcdsd: reference.Address) -> None:
    vectors.run_case(case, lambda: vectors.SocketPeer(socket.create_connection(yrmcdsd)), reference=True)


@pytest.mark.needs("yrmcdsd")
@pytest.mark.parametrize("case", [case for case in CASES if case.differs and not case.skip], ids=str)
def test_the_reference_really_differs(case: vectors.Case, another_yrmcdsd: reference.Address) -> None:
    """Otherwise the vector's `reference` and `why` are outdated. It also shows that the runner can fail."""
    with pytest.raises(AssertionError, match=f"^{re.escape(case.name)}, step "):
        vectors.run_case(case, lambda: vectors.SocketPeer(socket.create_connection(another_yrmcdsd), timeout=0.2))


def test_cases_use_different_counters() -> None:
    owners: dict[bytes, str] = {}
    for case in CASES:
        for name in {name for step in case.steps if isinstance(step.send, bytes) for name in _names(step.send)}:
            assert owners.setdefault(name, case.name) == case.name


def test_the_cases_cover_every_opcode_status_and_section() -> None:
    expected = [step.expect for case in CASES for step in case.steps if isinstance(step.expect, bytes)]
    frames = [frame for stream in expected for frame in _frames(stream)]
    assert {frame[2] for frame in frames} >= {0x00, 0x01, 0x04, 0x21, 0x22, 0x81}
    assert {frame[1] for frame in frames if frame[2] == 0x00} >= {0x00, 0x01, 0x02, 0x03}
    sections = {case.section for case in CASES}
    assert sections >= {"Noop", "Get", "Acquire", "Release", "Stats", "Dump", "Request header", "Response header"}


def test_streams_contain_the_whole_case() -> None:
    streams = {case.name: vectors.stream(case) for case in CASES}
    assert streams["stats"] is None
    assert streams["close-gives-back"] is None
    assert streams["acquire-by-two-connections"] is None
    noop = streams["noop"]
    assert noop is not None
    assert (len(noop.sent), len(noop.expected), noop.closes) == (12, 12, False)
    http = streams["magic-http"]
    assert http is not None
    assert http.sent.startswith(b"GET / HTTP/1.1\r\n")
    assert http.expected.endswith(b"TP/1Invalid arguments")
    assert http.closes


def _frames(stream: bytes) -> Iterator[bytes]:
    while len(stream) >= HEADER_SIZE:
        end = HEADER_SIZE + int.from_bytes(stream[4:8], "big")
        yield stream[:end]
        stream = stream[end:]


def _names(stream: bytes) -> Iterator[bytes]:
    for frame in _frames(stream):
        start = HEADER_SIZE + NAME_AT.get(frame[1], len(frame))
        length = int.from_bytes(frame[start - 2 : start], "big")
        if frame[0] == 0x90 and length and len(frame) >= start + length:
            yield frame[start : start + length]
