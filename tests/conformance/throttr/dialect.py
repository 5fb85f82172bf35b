"""What throttr's vectors have beyond the common form (conformance/vectors.py). Each is played at all four value sizes.

NUM: a number, or {"max": d}: the largest number of N bytes, and d more; {"message": d, "n": f}: the longest message
     that is taken (max_message), and d and f times N more; {"n": f, "plus": d}: f times N, and d

PART: {"n": NUM}                      in N bytes, little endian, as all numbers
      {"u8": NUM}, {"le64": NUM}      in 1 byte, in 8
      {"text": "abc"}                 ASCII
      {"named": "abc"}                ASCII, and its size in one byte before
      {"name": BYTES}                 likewise
      {"left": NUM, "unit": type}     only expected: what is told to be left of a TTL, in N bytes: where nothing has
                                      gone by one less than all of it; where time goes by itself a little less will do
      {"repeat": [BYTES, NUM]}

CASE: "sizes": [N, ...]               only at these value sizes

EXPECTATION, each a whole reply, whose form is checked as well; other entries may be there:
      {"list": [{"key": BYTES, "type": 0 or 1, "ttl_type": n, "used": NUM, "ttl_ns": n}, ...], "absent": [BYTES, ...]}
      {"stats": [{"key": BYTES, "reads_per_minute": n, "writes_per_minute": n, "reads": n, "writes": n}, ...],
       "absent": [BYTES, ...]}
      {"channels": [{"channel": BYTES, "read": n, "write": n, "subscriptions": n}, ...], "absent": [BYTES, ...]}
      {"connections": [BYTES, ...], "absent": [BYTES, ...]}     ids
          the entries that must be there, each once, and those that must not. A field that is not given is not looked
          at. Of entries with ttl_ns the times of expiry must be as far apart.
      {"channel": [{"id": BYTES, "read": n, "write": n}, ...]}  all subscriptions, in any order
      {"connection": {field: NUM, ...}}                         some fields of a record, as replies.py names them
      {"info": name}                                            kept for later
      {"info_since": name, "rises": {field: NUM, ...}}          by so much, since it was kept
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from conformance.throttr import replies
from conformance.vectors import Pattern

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from conformance.vectors import Bytes, Hole, Peer, Run

    Check = Callable[[Run, Peer, bytes], None]

# Of the stores that the vectors are played to. Above what the longest of them needs, below 65,535.
MAX_MESSAGE = 20_000
UNIT_NS = {1: 1, 2: 1_000, 3: 1_000_000, 4: 1_000_000_000, 5: 60_000_000_000, 6: 3_600_000_000_000}
# By how much real time may differ from what a vector takes it for: longer than any case takes.
SLACK_NS = 20_000_000_000

LISTINGS = {
    "list": (replies.LIST, ("type", "ttl_type", "expires", "used")),
    "stats": (replies.STATS, ("reads_per_minute", "writes_per_minute", "reads", "writes")),
    "channels": (replies.CHANNELS, ("read", "write", "subscriptions")),
    "connections": (replies.CONNECTIONS, tuple(replies.CONNECTION_FIELDS[1:])),
}


def dialect(value_size: int = 2) -> Throttr:
    return Throttr(value_size)


@dataclass(frozen=True)
class Left:
    """{"left": NUM, "unit": type}: the remaining TTL."""

    size: int
    value: int
    unit: int

    def usual(self) -> bytes:
        return self.value.to_bytes(self.size, "little")

    def fill(self, run: Run) -> bytes:
        raise ValueError(f"{self} can only be expected")

    def accepts(self, run: Run, data: bytes) -> bool:
        slack = 0 if run.driven else -(-SLACK_NS // UNIT_NS[self.unit])
        return self.value - slack <= int.from_bytes(data, "little") <= self.value


class Throttr:
    """A vectors.Dialect."""

    case_keys: set[str] = {"sizes"}  # noqa: RUF012

    def __init__(self, value_size: int) -> None:
        self.value_size = value_size

    def takes(self, case: dict[str, Any]) -> bool:
        return self.value_size in case.get("sizes", (1, 2, 4, 8))

    def number(self, raw: Any) -> int:
        if not isinstance(raw, dict):
            return int(raw)
        if not raw.keys() <= {"max", "message", "n", "plus"} or {"max", "message"} <= raw.keys():
            raise ValueError(f"unknown number {raw}")
        value = raw.get("n", 0) * self.value_size + raw.get("plus", 0)
        if "message" in raw:
            value += MAX_MESSAGE + raw["message"]
        if "max" in raw:
            value += 256**self.value_size - 1 + raw["max"]
        return int(value)

    def part(self, raw: dict[str, Any], content: Callable[[Any], Bytes]) -> Bytes | Hole:
        kind = next(iter(raw))
        widths = {"n": self.value_size, "u8": 1, "le64": 8}
        if kind in widths:
            return self.number(raw[kind]).to_bytes(widths[kind], "little")
        if kind == "text":
            return str(raw[kind]).encode("ascii")
        if kind == "named":
            return bytes([len(raw[kind])]) + str(raw[kind]).encode("ascii")
        if kind == "left":
            return Left(self.value_size, self.number(raw[kind]), raw["unit"])
        if kind != "name":
            raise ValueError(f"unknown part {raw}")
        name = content(raw[kind])
        if isinstance(name, bytes):
            return bytes([len(name)]) + name
        size = sum(len(part) if isinstance(part, bytes) else part.size for part in name.parts)
        return Pattern((bytes([size]), *name.parts))

    def recv_reply(self, peer: Peer, expected: bytes) -> bytes:
        """Receives a reply of the expected length, or only the status of a failure."""
        return peer.recv_exactly(len(expected))

    def check(self, raw: dict[str, Any], content: Callable[[Any], Bytes]) -> Check:
        kind = next(iter(raw))
        if kind in LISTINGS:
            return self._listing(kind, raw, content)
        if kind == "channel":
            return self._subscribers(raw[kind], content)
        if kind == "connection":
            return self._record({field: self.number(value) for field, value in raw[kind].items()})
        if kind == "info":
            return self._keep_info(raw[kind])
        if kind == "info_since":
            return self._info_since(raw[kind], {field: self.number(value) for field, value in raw["rises"].items()})
        raise ValueError(f"unknown expectation {raw}")

    def _listing(self, kind: str, raw: dict[str, Any], content: Callable[[Any], Bytes]) -> Check:
        opcode, fields = LISTINGS[kind]
        wanted = [self._entry(entry, content) for entry in raw[kind]]
        absent = [content(name) for name in raw.get("absent", ())]
        unknown = {field for _, values, _ in wanted for field in values} - set(fields)
        if unknown:
            raise ValueError(f"unknown fields {unknown} in {raw}")

        def check(run: Run, peer: Peer, sent: bytes) -> None:
            rows = [row for rows in replies.read_listing(peer.recv_exactly, opcode, self.value_size) for row in rows]
            moments = []
            for pattern, values, ttl_ns in wanted:
                row = _only(rows, filled(pattern, run))
                told = dict(zip(fields, row.fields, strict=True))
                seen = {field: told[field] for field in values}
                assert seen == values, f"of {row.name!r} it says {seen} instead of {values}"
                if ttl_ns is not None:
                    moments.append(int(told["expires"]) - ttl_ns)
            _check_moments(moments, run)
            there = {row.name for row in rows} & {filled(pattern, run) for pattern in absent}
            assert not there, f"it has {there}"

        return check

    def _entry(self, raw: Any, content: Callable[[Any], Bytes]) -> tuple[Bytes, dict[str, int], int | None]:
        """Reads the name, the fields and, if it is to be checked, the TTL."""
        if not isinstance(raw, dict):
            return content(raw), {}, None
        name = content(raw.get("key", raw.get("channel")))
        values = {
            field: self.number(value) for field, value in raw.items() if field not in ("key", "channel", "ttl_ns")
        }
        return name, values, raw.get("ttl_ns")

    def _subscribers(self, raw: list[dict[str, Any]], content: Callable[[Any], Bytes]) -> Check:
        wanted = [(content(entry["id"]), entry["read"], entry["write"]) for entry in raw]

        def check(run: Run, peer: Peer, sent: bytes) -> None:
            rows = replies.read_subscribers(peer.recv_exactly)
            assert rows is not None, "there is no such channel"
            told = sorted((row.name, *row.fields[1:]) for row in rows)
            expected = sorted((filled(name, run), *numbers) for name, *numbers in wanted)
            assert told == expected, f"it has {told} instead of {expected}"
            _check_now([int(row.fields[0]) for row in rows], run)

        return check

    def _record(self, wanted: dict[str, int]) -> Check:
        if not wanted.keys() <= set(replies.CONNECTION_FIELDS):
            raise ValueError(f"unknown fields {wanted.keys() - set(replies.CONNECTION_FIELDS)}")

        def check(run: Run, peer: Peer, sent: bytes) -> None:
            record = replies.read_record(peer.recv_exactly)
            assert record is not None, "there is no such connection"
            assert record["id"] == sent[-16:]
            seen = {field: record[field] for field in wanted}
            assert seen == wanted, f"it says {seen} instead of {wanted}"
            _check_now([int(record["connected_at"])], run)

        return check

    def _keep_info(self, name: str) -> Check:
        def check(run: Run, peer: Peer, sent: bytes) -> None:
            info = replies.read_info(peer.recv_exactly)
            _check_now([info["timestamp"] * 1_000_000_000], run)
            run.captured[name] = b"".join(number.to_bytes(8, "little") for number in info.values())

        return check

    def _info_since(self, name: str, rises: dict[str, int]) -> Check:
        if not rises.keys() <= set(replies.INFO_FIELDS):
            raise ValueError(f"unknown fields {rises.keys() - set(replies.INFO_FIELDS)}")

        def check(run: Run, peer: Peer, sent: bytes) -> None:
            info = replies.read_info(peer.recv_exactly)
            kept = run.captured[name]
            before = {
                field: int.from_bytes(kept[8 * index : 8 * index + 8], "little") for index, field in enumerate(info)
            }
            rose = {field: info[field] - before[field] for field in rises}
            assert rose == rises, f"since {name} it rose by {rose} instead of {rises}"

        return check


def filled(content: Bytes, run: Run) -> bytes:
    return content if isinstance(content, bytes) else content.fill(run)


def _only(rows: Iterable[replies.Row], name: bytes) -> replies.Row:
    found = [row for row in rows if row.name == name]
    assert len(found) == 1, f"{name!r} is there {len(found)} times"
    return found[0]


def _check_moments(moments: list[int], run: Run) -> None:
    """Checks that all moments come from the same time, that of the start of the case: equal where no time passes."""
    if moments:
        apart = max(moments) - min(moments)
        assert apart <= (0 if run.driven else SLACK_NS), f"times of expiry that are {apart} ns off"
        _check_now(moments, run)


def _check_now(moments: list[int], run: Run) -> None:
    """Checks that moments are Unix nanoseconds of about now. Where the test drives the time, only the store knows its
    Unix time.
    """
    if not run.driven:
        now_ns = time.time_ns()
        assert all(abs(now_ns - moment) <= SLACK_NS for moment in moments), f"{moments} instead of about {now_ns}"
