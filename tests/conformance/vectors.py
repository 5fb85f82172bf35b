"""Conformance vectors: what goes over the wire, as data, and a runner that plays it to any implementation.

The vectors of a protocol are in `<protocol>/vectors.json`; `<protocol>/dialect.py` has what only that protocol needs:
more kinds of parts, expectations and keys. The vectors say what counterd does; where the reference server differs, they
say what that does, and why, if it can be played to. Hex is written with blanks wherever they help.

    {"end": {"send": BYTES, "expect": BYTES},    what every connection that is still open must answer after each case:
                                                 it is in step, and nothing came that was not expected
     "cases": [CASE, ...]}

CASE: {"name": unique, "section": of the protocol document, "steps": [STEP, ...],
       "why": why the reference differs, if it does,
       "reference": "skip" when the case cannot be played to the reference at all,
       "clock": "driven" when it can be played only where time is told to go on}

STEP: {"on": connection, opened where it is first named, "note": for people, then one of
       "close": true         close it
       "half_close": true    end the sending direction
       "send": BYTES and/or "expect": EXPECTATION, with
           "reference": EXPECTATION    takes the place of expect when the reference is played to
           "eventually": true          send again until the expectation is met, for at most 2 seconds}
   or {"advance_ns": n, "note": for people}    so much time goes by; where it cannot be told to, it is left alone
   or {"happens": name, "note": for people}    something happens to the server; whoever plays the case knows what

BYTES: hex, or a list of hex and PARTs, of which each protocol may have more
PART: {"repeat": [BYTES, times]}
      {"var": name}                      what was captured under that name in this case
      {"hex": name}                      the same as lowercase hexadecimal digits
      {"capture": name, "bytes": n}      only expected: whatever comes, to be used later
      {"any": n}                         only expected: whatever comes
In any list, {"each": [from, to], "of": [...]} stands for the items of that list once for each number, to excluded, with
{"digits": n} in them as that number in n decimal digits of ASCII.

EXPECTATION: BYTES               exactly these come
             ""                  nothing comes
             "closed"            the server closes the connection
             "open"              it does not: only for reference
             {...}               a check of the protocol's own

Cases do not share counters, keys or channels, so they are independent on a shared server, but each can be played to it
only once: what they made stays. A connection must not end a case within a request.
"""

from __future__ import annotations

import functools
import importlib
import json
import socket
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from kit.machine import PATIENCE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable


CASE_KEYS = {"name", "section", "steps", "why", "reference", "clock"}
STEP_KEYS = {"on", "note", "close", "half_close", "send", "expect", "reference", "eventually", "advance_ns", "happens"}


@dataclass
class Run:
    """A run of a case. driven: time passes only when the case says so."""

    driven: bool
    captured: dict[str, bytes] = field(default_factory=dict)


class Hole(Protocol):
    """A part of BYTES that differs from run to run."""

    size: int

    def usual(self) -> bytes | None:
        """The bytes in a run where no time passes; None if they are not known beforehand."""

    def fill(self, run: Run) -> bytes:
        """The bytes to send."""

    def accepts(self, run: Run, data: bytes) -> bool:
        """Whether these bytes, of the right size, are as expected."""


@dataclass(frozen=True)
class Pattern:
    """BYTES with holes."""

    parts: tuple[bytes | Hole, ...]

    def usual(self) -> bytes | None:
        parts = [part if isinstance(part, bytes) else part.usual() for part in self.parts]
        known = [part for part in parts if part is not None]
        return b"".join(known) if len(known) == len(parts) else None

    def fill(self, run: Run) -> bytes:
        return b"".join(part if isinstance(part, bytes) else part.fill(run) for part in self.parts)

    def check(self, run: Run, peer: Peer) -> None:
        """Receives as many bytes, and compares them."""
        sizes = [len(part) if isinstance(part, bytes) else part.size for part in self.parts]
        received = peer.recv_exactly(sum(sizes))
        start = 0
        for part, size in zip(self.parts, sizes, strict=True):
            data = received[start : start + size]
            right = data == part if isinstance(part, bytes) else part.accepts(run, data)
            assert right, f"received {shown(received)}: byte {start} on is not {part!r}"
            start += size


# What is sent or expected: bytes if they are all known.
Bytes = bytes | Pattern


class Dialect(Protocol):
    """The vocabulary that a protocol adds to vectors. Its module has `dialect(**settings)`, which makes it."""

    case_keys: set[str]

    def takes(self, case: dict[str, Any]) -> bool:
        """Whether the case applies to these settings."""

    def part(self, raw: dict[str, Any], content: Callable[[Any], Bytes]) -> bytes | Hole:
        """Reads a part of BYTES. content reads the BYTES in it."""

    def number(self, raw: Any) -> int:
        """Reads how many times something is repeated."""

    def check(self, raw: dict[str, Any], content: Callable[[Any], Bytes]) -> Callable[[Run, Peer, bytes], None]:
        """Reads an expectation."""

    def recv_reply(self, peer: Peer, expected: bytes) -> bytes:
        """Receives one reply, which is expected to be this one."""


@dataclass(frozen=True)
class Step:
    """A line of a case. An expectation is None, bytes, a Pattern, "closed", "open" or a check."""

    on: str
    note: str
    close: bool
    half_close: bool
    send: Bytes
    expect: Any
    reference: Any  # the same as expect where the reference does not differ
    eventually: bool
    advance_ns: int
    happens: str


@dataclass(frozen=True)
class Case:
    """A named case.

    differs: the reference server behaves differently. skip: the case cannot be run against the reference. driven: it
    cannot be run where time passes by itself.
    """

    name: str
    section: str
    steps: tuple[Step, ...]
    end: Step
    differs: bool
    skip: bool
    why: str
    driven: bool
    dialect: Dialect

    def __str__(self) -> str:
        return self.name

    @property
    def happenings(self) -> set[str]:
        """The events that are to be applied to the server during the case."""
        return {step.happens for step in self.steps if step.happens}


class Stream(NamedTuple):
    """A case of one connection as a whole: these bytes, however they are split, give those answers; closes: and then
    the end.
    """

    sent: bytes
    expected: bytes
    closes: bool


class Peer(Protocol):
    """A connection as the client sees it. Methods raise AssertionError if the server does not behave as expected."""

    def send(self, data: bytes) -> None: ...

    def recv_exactly(self, size: int) -> bytes: ...

    def expect_nothing_more(self) -> None:
        """Checks that nothing arrives, and that the connection is still open."""

    def expect_eof(self) -> None:
        """Checks that the server closed the connection, and sent nothing more before."""

    def half_close(self) -> None:
        """Ends the sending direction."""

    def close(self) -> None:
        """Closes the connection; closing again does nothing."""


# ---- loading ----


@functools.cache
def load(protocol: str, **settings: Any) -> tuple[Case, ...]:
    """Loads all cases of a protocol, in its dialect with these settings. Raises ValueError if the file breaks the rules
    above.
    """
    dialect = importlib.import_module(f"conformance.{protocol}.dialect").dialect(**settings)
    document = json.loads((Path(__file__).parent / protocol / "vectors.json").read_text("ascii"))
    return tuple(Loader(dialect).cases(document))


def stream(case: Case) -> Stream | None:
    """The case as a stream; None if it has several connections or checks, or the client closes."""
    sent, expected = bytearray(), bytearray()
    closes = False
    for step in case.steps:
        wanted = step.expect.usual() if isinstance(step.expect, Pattern) else step.expect
        plain = step.expect is None or wanted == "closed" or isinstance(wanted, bytes)
        special = step.close or step.half_close or step.eventually or step.advance_ns or step.happens
        if step.on != case.steps[0].on or special or not plain or not isinstance(step.send, bytes):
            return None
        sent += step.send
        if isinstance(wanted, bytes):
            expected += wanted
        closes = closes or wanted == "closed"
    return Stream(bytes(sent), bytes(expected), closes)


class Loader:
    """Reads vectors in one dialect."""

    def __init__(self, dialect: Dialect) -> None:
        self.dialect = dialect

    def cases(self, document: dict[str, Any]) -> list[Case]:
        document = expanded(document)
        end = self._step({"on": "", "note": "the end", **document["end"]})
        names = [raw["name"] for raw in document["cases"]]
        if len(set(names)) != len(names):
            raise ValueError(f"names are there twice: {sorted(name for name in set(names) if names.count(name) > 1)}")
        return [self._case(raw, end) for raw in document["cases"] if self.dialect.takes(raw)]

    def _case(self, raw: dict[str, Any], end: Step) -> Case:
        if not raw.keys() <= CASE_KEYS | self.dialect.case_keys:
            raise ValueError(f"unknown keys {raw.keys() - CASE_KEYS} in {raw['name']}")
        differs = "reference" in raw or any("reference" in step for step in raw["steps"])
        if differs != ("why" in raw):
            raise ValueError(f'{raw["name"]}: a case has "why" if, and only if, the reference differs')
        if raw.get("reference", "skip") != "skip":
            raise ValueError(f'{raw["name"]}: "reference" of a case can only be "skip"')
        if raw.get("clock", "driven") != "driven":
            raise ValueError(f'{raw["name"]}: "clock" can only be "driven"')
        steps = tuple(self._step(step) for step in raw["steps"])
        return Case(
            name=raw["name"],
            section=raw["section"],
            steps=steps,
            end=end,
            differs=differs,
            skip="reference" in raw,
            why=raw.get("why", ""),
            driven="clock" in raw,
            dialect=self.dialect,
        )

    def _step(self, raw: dict[str, Any]) -> Step:
        if not raw.keys() <= STEP_KEYS:
            raise ValueError(f"unknown keys {raw.keys() - STEP_KEYS} in {raw}")
        if len({"advance_ns", "happens", "on"} & raw.keys()) != 1:
            raise ValueError(f"a step is on a connection, or time goes by, or something happens: {raw}")
        expect = self._expectation(raw["expect"]) if "expect" in raw else None
        return Step(
            on=raw.get("on", ""),
            note=raw.get("note", ""),
            close=raw.get("close", False),
            half_close=raw.get("half_close", False),
            send=self._bytes(raw.get("send", "")),
            expect=expect,
            reference=self._expectation(raw["reference"]) if "reference" in raw else expect,
            eventually=raw.get("eventually", False),
            advance_ns=raw.get("advance_ns", 0),
            happens=raw.get("happens", ""),
        )

    def _expectation(self, raw: Any) -> Any:
        if raw in ("closed", "open"):
            return raw
        return self.dialect.check(raw, self._bytes) if isinstance(raw, dict) else self._bytes(raw)

    def _bytes(self, raw: str | list[Any]) -> Bytes:
        if isinstance(raw, str):
            return bytes.fromhex(raw)
        parts: list[bytes | Hole] = []
        for item in raw:
            part = self._part(item)
            if isinstance(part, Pattern):
                parts += part.parts
            else:
                parts.append(part)
        known = [part for part in parts if isinstance(part, bytes)]
        return b"".join(known) if len(known) == len(parts) else Pattern(tuple(parts))

    def _part(self, raw: Any) -> Bytes | Hole:
        if isinstance(raw, str):
            return bytes.fromhex(raw)
        kind = next(iter(raw))
        if kind == "repeat":
            content, times = self._bytes(raw[kind][0]), self.dialect.number(raw[kind][1])
            return content * times if isinstance(content, bytes) else Pattern(content.parts * times)
        if kind in ("var", "hex"):
            return Variable(raw[kind], kind == "hex")
        if kind == "capture":
            return Capture(raw["bytes"], raw[kind])
        if kind == "any":
            return Capture(raw[kind])
        return self.dialect.part(raw, self._bytes)


def expanded(raw: Any) -> Any:
    """Replaces each {"each": [from, to], "of": [...]} in a list with what it stands for."""
    if isinstance(raw, dict):
        return {name: expanded(value) for name, value in raw.items()}
    if not isinstance(raw, list):
        return raw
    items: list[Any] = []
    for item in raw:
        if isinstance(item, dict) and "each" in item:
            items += (part for number in range(*item["each"]) for part in _numbered(item["of"], number))
        else:
            items.append(expanded(item))
    return items


def _numbered(raw: Any, number: int) -> Any:
    if isinstance(raw, list):
        return [_numbered(item, number) for item in raw]
    if not isinstance(raw, dict):
        return raw
    if "digits" in raw:
        return f"{number:0{raw['digits']}}".encode().hex()
    return {name: _numbered(value, number) for name, value in raw.items()}


@dataclass(frozen=True)
class Variable:
    """{"var": name} and {"hex": name}: captured bytes. They are 16, as only ids are captured so far."""

    name: str
    as_hex: bool

    @property
    def size(self) -> int:
        return 32 if self.as_hex else 16

    def usual(self) -> None:
        return None

    def fill(self, run: Run) -> bytes:
        captured = run.captured[self.name]
        return captured.hex().encode() if self.as_hex else captured

    def accepts(self, run: Run, data: bytes) -> bool:
        return data == self.fill(run)


@dataclass(frozen=True)
class Capture:
    """{"capture": name, "bytes": n} and {"any": n}: any bytes, which may be captured."""

    size: int
    name: str = ""

    def usual(self) -> None:
        return None

    def fill(self, run: Run) -> bytes:
        raise ValueError(f"{self} can only be expected")

    def accepts(self, run: Run, data: bytes) -> bool:
        if self.name:
            run.captured[self.name] = data
        return True


# ---- running ----


def run_case(
    case: Case,
    connect: Callable[..., Peer],
    *,
    by_name: bool = False,
    reference: bool = False,
    advance: Callable[[int], None] | None = None,
    happen: Callable[[str], None] | None = None,
) -> None:
    """Plays a case; AssertionError, naming the step, if anything is not as expected.

    connect: opens a connection to the implementation; by_name: it is told which. reference: it is the reference server.
    advance: lets so many nanoseconds go by; without it time is what it is. happen: lets that happen to the server;
    without it no case may need it.
    """
    peers: dict[str, Peer] = {}
    ended = set()
    run = Run(driven=advance is not None)
    try:
        for number, step in enumerate(case.steps, 1):
            if step.advance_ns:
                if advance is not None:
                    advance(step.advance_ns)
                continue
            if step.happens:
                assert happen is not None, f"{case.name}, step {number}: nobody lets {step.happens} happen"
                happen(step.happens)
                continue
            try:
                if step.on not in peers:
                    peers[step.on] = connect(step.on) if by_name else connect()
                expectation = step.reference if reference else step.expect
                _play(run, case.dialect, step, peers[step.on], expectation)
            except AssertionError as error:
                raise AssertionError(f"{case.name}, step {number} on {step.on} ({step.note}): {error}") from None
            if step.close or step.half_close or expectation == "closed":
                ended.add(step.on)
        for name in peers.keys() - ended:
            try:
                _play(run, case.dialect, case.end, peers[name], case.end.expect)
            except AssertionError as error:
                raise AssertionError(f"{case.name}, at the end on {name}: {error}") from None
    finally:
        for peer in peers.values():
            peer.close()


def run_cases(cases: Iterable[Case], play: Callable[[Case], None]) -> None:
    """Runs all cases; raises an AssertionError with every failure."""
    wrong = []
    for case in cases:
        try:
            play(case)
        except AssertionError as error:
            wrong.append(str(error))
    assert not wrong, f"{len(wrong)} cases:\n" + "\n".join(wrong)


def _play(run: Run, dialect: Dialect, step: Step, peer: Peer, expectation: Any) -> None:
    sent = step.send if isinstance(step.send, bytes) else step.send.fill(run)
    if step.close:
        peer.close()
    elif step.half_close:
        peer.half_close()
    elif step.eventually:
        _play_until(dialect, peer, sent, expectation)
    else:
        if sent:
            peer.send(sent)
        _check(run, peer, sent, expectation)


def _play_until(dialect: Dialect, peer: Peer, sent: bytes, expected: bytes) -> None:
    deadline = time.monotonic() + PATIENCE
    while True:
        peer.send(sent)
        received = dialect.recv_reply(peer, expected)
        if received == expected:
            return
        assert time.monotonic() < deadline, f"still {received.hex(' ')} instead of {expected.hex(' ')}"
        time.sleep(0.01)


def _check(run: Run, peer: Peer, sent: bytes, expectation: Any) -> None:
    if expectation == "closed":
        peer.expect_eof()
    elif expectation == b"":
        peer.expect_nothing_more()
    elif isinstance(expectation, bytes):
        received = peer.recv_exactly(len(expectation))
        assert received == expectation, f"received {shown(received)} instead of {shown(expectation)}"
    elif isinstance(expectation, Pattern):
        expectation.check(run, peer)
    elif callable(expectation):
        expectation(run, peer, sent)


def shown(data: bytes) -> str:
    """Bytes as the messages show them."""
    return data.hex(" ") if len(data) <= 256 else f"{data[:256].hex(' ')} ... ({len(data)} bytes)"


class SocketPeer:
    """A Peer over a real socket, which it takes over. quiet: after how many seconds without a byte nothing more is
    expected.
    """

    def __init__(self, connected: socket.socket, *, timeout: float = PATIENCE, quiet: float = 0.05) -> None:
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
            assert data, f"expected {size} bytes, received {shown(bytes(received)) or 'nothing'}, then {end}"
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
        raise AssertionError(f"expected nothing, received {shown(data) or 'the end'}")

    def expect_eof(self) -> None:
        try:
            data = self._socket.recv(4096)
        except ConnectionResetError:
            return
        except TimeoutError:
            raise AssertionError(f"not closed after {self._timeout} s") from None
        assert not data, f"expected the end, received {shown(data)}"

    def half_close(self) -> None:
        self._socket.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        self._socket.close()
