"""What sentinel's vectors have beyond the common form (conformance/vectors.py).

The server has the rules of rules.json beside this file, and at most MAX_ALLOWED_QPS requests a second in a namespace.
What may happen to it: "changed": it gets the rules of changed.json; "first": those of rules.json again; "drain".

PART: {"frame": BYTES}                with its size in two bytes before, as every request and reply has it
      {"i16": n}, {"i32": n}, {"i64": n}        big endian, as all numbers
      {"text": "abc"}                 ASCII
      {"string": "abc"}               likewise, and its size in four bytes before
      {"granted": name}               only expected: the id of a token, kept under that name. Never 0, and never one
                                      that was granted before in the case
      {"token": name}                 that id
      {"left": ms}                    only expected: what is left of a lease, in 4 bytes: where time goes by itself a
                                      little less will do
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from conformance.vectors import Pattern

if TYPE_CHECKING:
    from collections.abc import Callable

    from conformance.vectors import Bytes, Hole, Peer, Run

MAX_ALLOWED_QPS = 40
TOKEN_SIZE = 8
WIDTHS = {"i16": 2, "i32": 4, "i64": 8}
# By how much real time may differ from what a vector takes it for: longer than any case takes.
SLACK_MS = 20_000


def dialect() -> Sentinel:
    return Sentinel()


@dataclass(frozen=True)
class Granted:
    """{"granted": name}: the id of a new token, which gets this name."""

    name: str
    size: int = TOKEN_SIZE

    def usual(self) -> None:
        return None

    def fill(self, run: Run) -> bytes:
        raise ValueError(f"{self} can only be expected")

    def accepts(self, run: Run, data: bytes) -> bool:
        fresh = data != bytes(TOKEN_SIZE) and data not in run.captured.values()
        run.captured[self.name] = data
        return fresh


@dataclass(frozen=True)
class Token:
    """{"token": name}: the id of an earlier token."""

    name: str
    size: int = TOKEN_SIZE

    def usual(self) -> None:
        return None

    def fill(self, run: Run) -> bytes:
        return run.captured[self.name]

    def accepts(self, run: Run, data: bytes) -> bool:
        return data == self.fill(run)


@dataclass(frozen=True)
class Left:
    """{"left": ms}: the remaining time."""

    value: int
    size: int = 4

    def usual(self) -> bytes:
        return self.value.to_bytes(self.size, "big")

    def fill(self, run: Run) -> bytes:
        raise ValueError(f"{self} can only be expected")

    def accepts(self, run: Run, data: bytes) -> bool:
        slack = 0 if run.driven else SLACK_MS
        return self.value - slack <= int.from_bytes(data, "big", signed=True) <= self.value


class Sentinel:
    """A vectors.Dialect."""

    case_keys: set[str] = set()  # noqa: RUF012

    def takes(self, case: dict[str, Any]) -> bool:
        return True

    def number(self, raw: Any) -> int:
        return int(raw)

    def part(self, raw: dict[str, Any], content: Callable[[Any], Bytes]) -> Bytes | Hole:
        (kind,) = raw
        value = raw[kind]
        if kind in WIDTHS:
            return int(value).to_bytes(WIDTHS[kind], "big", signed=True)
        if kind == "text":
            return str(value).encode("ascii")
        if kind == "string":
            return len(value).to_bytes(4, "big") + str(value).encode("ascii")
        if kind == "frame":
            inner = content(value)
            if isinstance(inner, bytes):
                return len(inner).to_bytes(2, "big") + inner
            size = sum(len(part) if isinstance(part, bytes) else part.size for part in inner.parts)
            return Pattern((size.to_bytes(2, "big"), *inner.parts))
        holes: dict[str, Callable[[Any], Hole]] = {"granted": Granted, "token": Token, "left": Left}
        if kind not in holes:
            raise ValueError(f"unknown part {raw}")
        return holes[kind](value)

    def check(self, raw: dict[str, Any], content: Callable[[Any], Bytes]) -> Callable[[Run, Peer, bytes], None]:
        raise ValueError(f"unknown expectation {raw}")

    def recv_reply(self, peer: Peer, expected: bytes) -> bytes:
        header = peer.recv_exactly(2)
        return header + peer.recv_exactly(int.from_bytes(header, "big"))
