"""What smockron's vectors have beyond the common form (conformance/vectors.py).

The server has the rules of rules.json beside this file. A connection whose name begins with "control" comes by the
control port, any other by the accounting port. The server speaks first: its greeting is expected before anything else.
What may happen to it: "changed": it gets the rules of changed.json; "first": those of rules.json again.

PART: {"text": "abc"}                     ASCII
      {"greeting": true}                  of a peer that speaks 3.1
      {"property": [NAME, VALUE]}         of a READY
      {"open": KIND}                      what a peer of that kind begins with: its greeting, and READY
      {"greeted": KIND}                   only expected: what its greeting is answered, from the greeting on
      {"opened": KIND}                    only expected: what it is answered in all
      {"command": ["PING", BYTES, ...]}   a command with these data
      {"message": [BODY, ...]}            a message of these frames; BODY is text, or a list as BYTES have it
      {"account": [DOMAIN, STATUS, IDENTIFIER, TIME, ...]}   an accounting message of six frames, with a NUL behind its
                                          domain; what is behind the time are the last two, which are empty otherwise
      {"told": [DOMAIN, IDENTIFIER, TIME]}   only expected: DELAY_UNTIL
      {"forgotten": [DOMAIN, IDENTIFIER, TIME]}   only expected: FORGET

TIME: milliseconds after the time at which the case began. Where time goes by itself, what is expected may be any time.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from conformance.vectors import Pattern
from counterd.protocols.smockron import wire
from counterd.protocols.smockron.wire import SocketType
from kit.pump import UNIX_NS

if TYPE_CHECKING:
    from collections.abc import Callable

    from conformance.vectors import Bytes, Hole, Peer, Run

START_MS = UNIX_NS // 1_000_000
DIGITS = 13
OTHER = {"PUB": SocketType.SUB, "XPUB": SocketType.SUB, "SUB": SocketType.PUB, "XSUB": SocketType.PUB}


def dialect() -> Smockron:
    return Smockron()


def port_of(name: str) -> int:
    """The port to which a connection of that name goes."""
    return 1 if name.startswith("control") else 0


@dataclass(frozen=True)
class Moment:
    """TIME: a moment, in digits."""

    offset_ms: int
    size: int = DIGITS

    def usual(self) -> bytes:
        return b"%d" % (START_MS + self.offset_ms)

    def fill(self, run: Run) -> bytes:
        return self.usual() if run.driven else b"%d" % (time.time_ns() // 1_000_000 + self.offset_ms)

    def accepts(self, run: Run, data: bytes) -> bool:
        return data == self.usual() if run.driven else data.isdigit()


class Smockron:
    """A vectors.Dialect."""

    def __init__(self) -> None:
        self.case_keys: set[str] = set()

    def takes(self, _case: dict[str, Any]) -> bool:
        return True

    def number(self, raw: Any) -> int:
        return int(raw)

    def part(self, raw: dict[str, Any], content: Callable[[Any], Bytes]) -> bytes | Hole | Pattern:
        ((kind, value),) = raw.items()
        found: bytes | Pattern
        if kind in ("message", "account", "told", "forgotten"):
            found = _message([_body(each, content) for each in _bodies(kind, value)])
        elif kind == "text":
            found = bytes(value, "latin-1")
        elif kind == "greeting":
            found = wire.greeting()
        elif kind == "open":
            found = wire.greeting() + wire.command(b"READY", _property("Socket-Type", value))
        elif kind == "greeted":
            found = wire.greeting() + wire.ready(OTHER[value])
        elif kind == "opened":
            subscribed = wire.subscribe(b"") if OTHER[value] is SocketType.SUB else b""
            found = wire.greeting() + wire.ready(OTHER[value]) + subscribed
        elif kind == "property":
            found = _property(*value)
        elif kind == "command":
            found = wire.command(value[0].encode(), b"".join(_known(content(each)) for each in value[1:]))
        else:
            raise ValueError(f"unknown part {raw}")
        return found

    def check(self, raw: dict[str, Any], content: Callable[[Any], Bytes]) -> Callable[[Run, Peer, bytes], None]:
        raise ValueError(f"unknown expectation {raw}")

    def recv_reply(self, peer: Peer, expected: bytes) -> bytes:
        return peer.recv_exactly(len(expected))


def _property(name: str, value: str) -> bytes:
    return bytes((len(name),)) + name.encode() + len(value).to_bytes(4, "big") + value.encode()


def _bodies(kind: str, value: list[Any]) -> list[Any]:
    """The frames of a message."""
    if kind == "message":
        return value
    if kind == "account":
        domain, status, identifier, moment, *rest = value
        return [domain + "\0", status, identifier, {"time": moment}, *[*rest, "", ""][:2]]
    domain, identifier, moment = value
    return [domain + "\0", "DELAY_UNTIL" if kind == "told" else "FORGET", identifier, {"time": moment}]


def _known(data: Bytes) -> bytes:
    assert isinstance(data, bytes)
    return data


def _body(raw: Any, content: Callable[[Any], Bytes]) -> bytes | Moment:
    if isinstance(raw, dict) and "time" in raw:
        return Moment(raw["time"])
    return bytes(raw, "latin-1") if isinstance(raw, str) else _known(content(raw))


def _message(bodies: list[bytes | Moment]) -> Pattern:
    parts: list[bytes | Hole] = []
    for number, body in enumerate(bodies, 1):
        more = wire.MORE if number < len(bodies) else 0
        parts += [wire.frame(body, more)] if isinstance(body, bytes) else [bytes((more, DIGITS)), body]
    return Pattern(tuple(parts))
