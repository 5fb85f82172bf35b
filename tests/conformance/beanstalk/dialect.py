"""What beanstalk's vectors have beyond the common form (conformance/vectors.py).

PART: {"says": TEXT}                  ASCII, in which <1> is the id of the first job of the case, <2> of the second, ...
      {"blank": [byte, times]}        that byte, as a number, so often

EXPECTATION: {"says": TEXT}           likewise. A job has the id with which it is mentioned first
             {"figures": {name: value, ...}}    OK, and a dictionary with these figures among others
             {"tubes": [name, ...]}             OK, and a list with these tubes among others, in this order
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from conformance.vectors import Pattern
from counterd.protocols.beanstalk import wire

if TYPE_CHECKING:
    from collections.abc import Callable

    from conformance.vectors import Bytes, Hole, Peer, Run

_JOB = re.compile(r"<(\d+)>")


def dialect() -> Beanstalk:
    return Beanstalk()


@dataclass(frozen=True)
class JobId:
    """<n>: the id of a job. Its size is known once it has arrived."""

    name: str
    size: int = 0

    def usual(self) -> None:
        return None

    def fill(self, run: Run) -> bytes:
        return run.captured[self.name]

    def accepts(self, run: Run, data: bytes) -> bool:
        return run.captured.setdefault(self.name, data) == data


def parts(text: str) -> list[bytes | Hole]:
    """Splits a text at its ids."""
    return [
        JobId(piece) if number % 2 else piece.encode("ascii") for number, piece in enumerate(_JOB.split(text)) if piece
    ]


class Beanstalk:
    """A vectors.Dialect."""

    case_keys: set[str] = set()  # noqa: RUF012

    def takes(self, _case: dict[str, Any]) -> bool:
        return True

    def number(self, raw: Any) -> int:
        return int(raw)

    def part(self, raw: dict[str, Any], _content: Callable[[Any], Bytes]) -> Bytes | Hole:
        kind = next(iter(raw))
        if kind == "blank":
            byte, times = raw[kind]
            return bytes([byte]) * times
        if kind != "says":
            raise ValueError(f"unknown part {raw}")
        found = parts(raw[kind])
        return Pattern(tuple(found)) if any(not isinstance(part, bytes) for part in found) else b"".join(found)  # type: ignore[arg-type]

    def recv_reply(self, peer: Peer, _expected: bytes) -> bytes:
        return line(peer)

    def check(self, raw: dict[str, Any], content: Callable[[Any], Bytes]) -> Any:
        kind = next(iter(raw))
        if kind == "figures":
            return self._figures(raw[kind])
        if kind == "tubes":
            return self._tubes(raw[kind])
        expected = self.part(raw, content)
        return self._says(raw["says"], expected) if isinstance(expected, Pattern) else expected

    def _says(self, text: str, expected: Pattern) -> Callable[[Run, Peer, bytes], None]:
        def check(run: Run, peer: Peer, _sent: bytes) -> None:
            ahead = b""
            for part in expected.parts:
                if isinstance(part, bytes):
                    received = ahead + peer.recv_exactly(len(part) - len(ahead))
                    ahead = b""
                    assert received == part, f"received {received!r} of {text!r}"
                    continue
                digits = b""
                while (ahead := peer.recv_exactly(1)).isdigit():
                    digits += ahead
                assert part.accepts(run, digits), f"received the id {digits!r} for {part} of {text!r}"

        return check

    def _figures(self, wanted: dict[str, Any]) -> Callable[[Run, Peer, bytes], None]:
        def check(_run: Run, peer: Peer, _sent: bytes) -> None:
            found = wire.read_dictionary(document(peer))
            told = {name: found.get(name) for name in wanted}
            assert told == {name: str(value) for name, value in wanted.items()}

        return check

    def _tubes(self, wanted: list[str]) -> Callable[[Run, Peer, bytes], None]:
        def check(_run: Run, peer: Peer, _sent: bytes) -> None:
            found = [name.decode() for name in wire.read_list(document(peer))]
            assert [name for name in found if name in wanted] == wanted, found

        return check


def line(peer: Peer) -> bytes:
    """Receives up to the end of a line."""
    received = b""
    while not received.endswith(b"\r\n"):
        received += peer.recv_exactly(1)
    return received


def document(peer: Peer) -> bytes:
    """Receives the body of an OK."""
    head = line(peer)
    assert head.startswith(b"OK "), f"received {head!r}"
    body = peer.recv_exactly(int(head[3:]) + 2)
    assert body.endswith(b"\r\n")
    return body[:-2]
