"""What the counter protocol's vectors have beyond the common form (conformance/vectors.py).

EXPECTATION: {"stats": [HEX, ...]}
                 a Stats response whose first items have these names, and decimal values
             {"dump": [{"name": BYTES, "consumption": n, "maximum": n, "limit": n}, ...]}
                 a whole answer to Dump that contains these, each once, and those without "limit" without any
             both with the opaque that was sent
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any

from conformance.vectors import shown

if TYPE_CHECKING:
    from collections.abc import Callable

    from conformance.vectors import Bytes, Hole, Peer, Run

HEADER_SIZE = 12


def dialect() -> Counter:
    return Counter()


class Counter:
    """A vectors.Dialect."""

    case_keys: set[str] = set()  # noqa: RUF012

    def takes(self, case: dict[str, Any]) -> bool:
        return True

    def part(self, raw: dict[str, Any], content: Callable[[Any], Bytes]) -> bytes | Hole:
        raise ValueError(f"unknown part {raw}")

    def number(self, raw: Any) -> int:
        return int(raw)

    def check(self, raw: dict[str, Any], content: Callable[[Any], Bytes]) -> Callable[[Run, Peer, bytes], None]:
        if "stats" in raw:
            names = [bytes.fromhex(name).decode("ascii") for name in raw["stats"]]
            return lambda run, peer, sent: _check_stats(peer, sent, names)
        wanted = [
            (content(entry["name"]), entry["consumption"], entry["maximum"], entry.get("limit"))
            for entry in raw["dump"]
        ]
        return lambda run, peer, sent: _check_dump(peer, sent, wanted)

    def recv_reply(self, peer: Peer, expected: bytes) -> bytes:
        return _recv_frame(peer)


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


def _check_dump(peer: Peer, sent: bytes, wanted: list[tuple[Bytes, int, int, int | None]]) -> None:
    entries = []
    while body := _recv_success(peer, sent):
        consumption, maximum, name_length = struct.unpack_from(">IIH", body)
        name, rest = _cut(body[10:], name_length)
        assert len(rest) in {0, 4}, f"a dump entry with {len(rest)} bytes too many"
        entries.append((name, consumption, maximum, int.from_bytes(rest, "big") if rest else None))
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
    """Receives the body of a successful response to the one request that was sent."""
    received = _recv_frame(peer)
    header = b"\x91" + sent[1:2] + b"\0\0" + received[4:8] + sent[8:12]
    assert received[:HEADER_SIZE] == header, f"received {shown(received)} instead of {header.hex(' ')}"
    return received[HEADER_SIZE:]
