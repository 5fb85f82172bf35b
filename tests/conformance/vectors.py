"""Conformance vectors: what goes over the wire, as data, and a runner that plays it to any implementation.

The vectors of a protocol are in `<protocol>/vectors.json`. They say what counterd does; where the reference server
differs, they say what that does, and why. Hex is written with blanks wherever they help.

    {"end": {"send": HEX, "expect": HEX},    what every connection that is still open must answer after each case:
                                             it is in step, and nothing came that was not expected
     "cases": [CASE, ...]}

CASE: {"name": unique, "section": of the protocol document, "steps": [STEP, ...],
       "why": why the reference differs, if it does,
       "reference": "skip" when the case cannot be played to the reference at all}

STEP: {"on": connection, opened where it is first named, "note": for people, then one of
       "close": true         close it
       "half_close": true    end the sending direction
       "send": BYTES and/or "expect": EXPECTATION, with
           "reference": EXPECTATION    takes the place of expect when the reference is played to
           "eventually": true          send again until the expectation is met, for at most 2 seconds}

BYTES: hex, or a list of hex and {"repeat": [hex, times]}

EXPECTATION: BYTES               exactly these come
             ""                  nothing comes
             "closed"            the server closes the connection
             "open"              it does not: only for reference
             {"stats": [HEX, ...]}
                                 a Stats response whose first items have these names, and decimal values
             {"dump": [{"name": BYTES, "consumption": n, "maximum": n}, ...]}
                                 a whole answer to Dump that contains these, each once
             both with the opaque that was sent

Cases do not share counters, so they are independent on a shared server, but each can be played to it only once: their
counters stay. A connection must not end a case within a request.
"""

from __future__ import annotations

import json
import socket
import struct
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable

EVENTUALLY = 2.0  # seconds
HEADER_SIZE = 12

CASE_KEYS = {"name", "section", "steps", "why", "reference"}
STEP_KEYS = {"on", "note", "close", "half_close", "send", "expect", "reference", "eventually"}


@dataclass(frozen=True)
class Step:
    """One line of a case; bytes are decoded. An expectation is None, bytes, "closed", "open" or a dict."""

    on: str
    note: str
    close: bool
    half_close: bool
    send: bytes
    expect: Any
    reference: Any  # the same as expect where the reference does not differ
    eventually: bool


@dataclass(frozen=True)
class Case:
    """One named case. differs: the reference does something else here. skip: it cannot be played to the reference."""

    name: str
    section: str
    steps: tuple[Step, ...]
    end: Step
    differs: bool
    skip: bool
    why: str

    def __str__(self) -> str:
        return self.name


class Stream(NamedTuple):
    """A case of one connection as a whole: these bytes in, however cut, give those out; closes: and then the end."""

    sent: bytes
    expected: bytes
    closes: bool


class Peer(Protocol):
    """A connection as the client sees it. All of it raises AssertionError when the server does not do as expected."""

    def send(self, data: bytes) -> None: ...

    def recv_exactly(self, size: int) -> bytes: ...

    def expect_nothing_more(self) -> None:
        """Nothing is there to be received; the connection is still open."""

    def expect_eof(self) -> None:
        """The server closed the connection, and sent nothing more before."""

    def half_close(self) -> None:
        """Ends the sending direction."""

    def close(self) -> None:
        """Closes the connection; closing again does nothing."""


# ---- loading ----


def load(protocol: str) -> list[Case]:
    """All cases of a protocol. ValueError if the file is not as described above."""
    document = json.loads((Path(__file__).parent / protocol / "vectors.json").read_text("ascii"))
    end = _step({"on": "", "note": "the end", **document["end"]})
    cases = [_case(raw, end) for raw in document["cases"]]
    names = [case.name for case in cases]
    if len(set(names)) != len(names):
        raise ValueError(f"names are there twice: {sorted(name for name in set(names) if names.count(name) > 1)}")
    return cases


def stream(case: Case) -> Stream | None:
    """The case as one stream, or None if it is more than that: several connections, checks, closing by the client."""
    sent, expected = bytearray(), bytearray()
    closes = False
    for step in case.steps:
        plain = step.expect is None or step.expect == "closed" or isinstance(step.expect, bytes)
        if step.on != case.steps[0].on or step.close or step.half_close or step.eventually or not plain:
            return None
        sent += step.send
        if isinstance(step.expect, bytes):
            expected += step.expect
        closes = closes or step.expect == "closed"
    return Stream(bytes(sent), bytes(expected), closes)


def _case(raw: dict[str, Any], end: Step) -> Case:
    if not raw.keys() <= CASE_KEYS:
        raise ValueError(f"unknown keys {raw.keys() - CASE_KEYS} in {raw['name']}")
    differs = "reference" in raw or any("reference" in step for step in raw["steps"])
    if differs != ("why" in raw):
        raise ValueError(f'{raw["name"]}: a case has "why" if, and only if, the reference differs')
    if raw.get("reference", "skip") != "skip":
        raise ValueError(f'{raw["name"]}: "reference" of a case can only be "skip"')
    steps = tuple(_step(step) for step in raw["steps"])
    return Case(raw["name"], raw["section"], steps, end, differs, "reference" in raw, raw.get("why", ""))


def _step(raw: dict[str, Any]) -> Step:
    if not raw.keys() <= STEP_KEYS:
        raise ValueError(f"unknown keys {raw.keys() - STEP_KEYS} in {raw}")
    expect = _expectation(raw["expect"]) if "expect" in raw else None
    return Step(
        on=raw["on"],
        note=raw.get("note", ""),
        close=raw.get("close", False),
        half_close=raw.get("half_close", False),
        send=_bytes(raw.get("send", "")),
        expect=expect,
        reference=_expectation(raw["reference"]) if "reference" in raw else expect,
        eventually=raw.get("eventually", False),
    )


def _expectation(raw: Any) -> Any:
    if raw in ("closed", "open"):
        return raw
    if not isinstance(raw, dict):
        return _bytes(raw)
    if "stats" in raw:
        return {"stats": [_bytes(name).decode("ascii") for name in raw["stats"]]}
    return {"dump": [(_bytes(entry["name"]), entry["consumption"], entry["maximum"]) for entry in raw["dump"]]}


def _bytes(raw: str | list[Any]) -> bytes:
    if isinstance(raw, str):
        return bytes.fromhex(raw)
    return b"".join(
        bytes.fromhex(part) if isinstance(part, str) else bytes.fromhex(part["repeat"][0]) * part["repeat"][1]
        for part in raw
    )


# ---- running ----


def run_case(case: Case, connect: Callable[[], Peer], *, reference: bool = False) -> None:
    """Plays a case; AssertionError, naming the step, if anything is not as expected.

    connect: opens a connection to the implementation. reference: it is the reference server.
    """
    peers: dict[str, Peer] = {}
    ended = set()
    try:
        for number, step in enumerate(case.steps, 1):
            try:
                if step.on not in peers:
                    peers[step.on] = connect()
                expectation = step.reference if reference else step.expect
                _play(step, peers[step.on], expectation)
            except AssertionError as error:
                raise AssertionError(f"{case.name}, step {number} on {step.on} ({step.note}): {error}") from None
            if step.close or step.half_close or expectation == "closed":
                ended.add(step.on)
        for name in peers.keys() - ended:
            try:
                _play(case.end, peers[name], case.end.expect)
            except AssertionError as error:
                raise AssertionError(f"{case.name}, at the end on {name}: {error}") from None
    finally:
        for peer in peers.values():
            peer.close()


def _play(step: Step, peer: Peer, expectation: Any) -> None:
    if step.close:
        peer.close()
    elif step.half_close:
        peer.half_close()
    elif step.eventually:
        _play_until(step, peer, expectation)
    else:
        if step.send:
            peer.send(step.send)
        _check(peer, step.send, expectation)


def _play_until(step: Step, peer: Peer, expected: bytes) -> None:
    deadline = time.monotonic() + EVENTUALLY
    while True:
        peer.send(step.send)
        received = _recv_frame(peer)
        if received == expected:
            return
        assert time.monotonic() < deadline, f"still {received.hex(' ')} instead of {expected.hex(' ')}"
        time.sleep(0.01)


def _check(peer: Peer, sent: bytes, expectation: Any) -> None:
    if expectation == "closed":
        peer.expect_eof()
    elif expectation == b"":
        peer.expect_nothing_more()
    elif isinstance(expectation, bytes):
        received = peer.recv_exactly(len(expectation))
        assert received == expectation, f"received {_shown(received)} instead of {_shown(expectation)}"
    elif isinstance(expectation, dict) and "stats" in expectation:
        _check_stats(peer, sent, expectation["stats"])
    elif isinstance(expectation, dict):
        _check_dump(peer, sent, expectation["dump"])


def _check_stats(peer: Peer, sent: bytes, names: list[str]) -> None:
    body = _recv_success(peer, sent)
    items = []
    while body:
        name_length, value_length = struct.unpack_from(">HH", body)
        name, value, body = _cut(body[4:], name_length, value_length)
        items.append((name.decode("ascii"), value.decode("ascii")))
    assert [name for name, _ in items[: len(names)]] == names, f"statistics {items}"
    wrong = [item for item in items[: len(names)] if not item[1].isdecimal()]
    assert not wrong, f"statistics that are not numbers: {wrong}"


def _check_dump(peer: Peer, sent: bytes, wanted: list[tuple[bytes, int, int]]) -> None:
    entries = []
    while body := _recv_success(peer, sent):
        consumption, maximum, name_length = struct.unpack_from(">IIH", body)
        name, rest = _cut(body[10:], name_length)
        assert not rest, f"a dump entry with {len(rest)} bytes too many"
        entries.append((name, consumption, maximum))
    for entry in wanted:
        found = [other for other in entries if other[0] == entry[0]]
        assert found == [entry], f"the dump has {found} instead of {entry}"


def _cut(data: bytes, *sizes: int) -> list[bytes]:
    parts = []
    for size in sizes:
        assert len(data) >= size, f"{len(data)} bytes where {size} are announced"
        parts.append(data[:size])
        data = data[size:]
    return [*parts, data]


def _recv_frame(peer: Peer) -> bytes:
    header = peer.recv_exactly(HEADER_SIZE)
    length = int.from_bytes(header[4:8], "big")
    return header + (peer.recv_exactly(length) if length else b"")


def _recv_success(peer: Peer, sent: bytes) -> bytes:
    """The body of a successful response to the one request that was sent."""
    received = _recv_frame(peer)
    header = b"\x91" + sent[1:2] + b"\0\0" + received[4:8] + sent[8:12]
    assert received[:HEADER_SIZE] == header, f"received {_shown(received)} instead of {header.hex(' ')}"
    return received[HEADER_SIZE:]


def _shown(data: bytes) -> str:
    return data.hex(" ") if len(data) <= 256 else f"{data[:256].hex(' ')} ... ({len(data)} bytes)"


class SocketPeer:
    """A Peer over a real socket, which it takes over. quiet: how many seconds without a byte count as nothing."""

    def __init__(self, connected: socket.socket, *, timeout: float = 5.0, quiet: float = 0.05) -> None:
        self._socket = connected
        self._socket.settimeout(timeout)
        self._timeout = timeout
        self._quiet = quiet

    def send(self, data: bytes) -> None:
        try:
            self._socket.sendall(data)
        except OSError as error:
            raise AssertionError(f"cannot send: {error}") from None

    def recv_exactly(self, size: int) -> bytes:
        received = bytearray()
        while len(received) < size:
            try:
                data = self._socket.recv(size - len(received))
            except OSError as error:
                data, end = b"", repr(error)
            else:
                end = "the end"
            assert data, f"expected {size} bytes, received {_shown(bytes(received)) or 'nothing'}, then {end}"
            received += data
        return bytes(received)

    def expect_nothing_more(self) -> None:
        self._socket.settimeout(self._quiet)
        try:
            data = self._socket.recv(4096)
        except TimeoutError:
            return
        finally:
            self._socket.settimeout(self._timeout)
        raise AssertionError(f"expected nothing, received {_shown(data) or 'the end'}")

    def expect_eof(self) -> None:
        try:
            data = self._socket.recv(4096)
        except ConnectionResetError:
            return
        except TimeoutError:
            raise AssertionError(f"not closed after {self._timeout} s") from None
        assert not data, f"expected the end, received {_shown(data)}"

    def half_close(self) -> None:
        self._socket.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        self._socket.close()
