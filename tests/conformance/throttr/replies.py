"""The long replies of throttr taken apart, and put together: listings in fragments, records of connections, INFO.

Written from the protocol's document alone, so that it can be held against the server. `recv` gives exactly so many of
the bytes that came, or raises AssertionError.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    Recv = Callable[[int], bytes]

LIST, INFO, STATS, CONNECTIONS, CONNECTION, CHANNELS, CHANNEL = 0x07, 0x08, 0x10, 0x14, 0x15, 0x16, 0x17
NUMBER = {1: "B", 2: "H", 4: "I", 8: "Q"}
FRAGMENT_BYTES_MAX = 2048  # of LIST and STATS with the names, of CHANNELS without them
FRAGMENT_RECORDS_MAX = 8  # of CONNECTIONS

# In the order of INFO.
REQUESTS = [
    *("insert", "query", "update", "purge", "get", "set", "list", "info", "stats", "stat", "subscribe", "unsubscribe"),
    *("publish", "channel", "channels", "whoami", "connection", "connections"),
]
INFO_FIELDS = [
    *("timestamp", "requests", "requests_per_minute"),
    *(f"{name}{suffix}" for name in REQUESTS for suffix in ("", "_per_minute")),
    *("read_bytes", "read_bytes_per_minute", "write_bytes", "write_bytes_per_minute"),
    *("keys", "counters", "buffers", "counter_bytes", "buffer_bytes", "subscriptions", "open_channels"),
    *("running_since", "open_connections"),
]
# In the order of a connection's record, which is another one.
COUNTED = [
    *("insert", "set", "query", "get", "update", "purge", "list", "info", "stat", "stats", "publish", "subscribe"),
    *("unsubscribe", "connections", "connection", "channels", "channel", "whoami"),
]
CONNECTION_FIELDS = [
    *("id", "type", "kind", "ip_version", "ip", "port", "connected_at", "read_bytes", "write_bytes"),
    *("published_bytes", "received_bytes", "allocated_bytes", "consumed_bytes", *COUNTED),
]

RECORD = struct.Struct("<16sBBB16sHQ24Q")
SUBSCRIBER = struct.Struct("<16sQQQ")
INFO_REPLY = struct.Struct("<52Q16s")


class Row(NamedTuple):
    """One entry of a listing: its name (a connection's is its id), and its fields after the size of the name."""

    name: bytes
    fields: tuple[int | bytes, ...]


def entry_format(opcode: int, width: int) -> struct.Struct:
    """The format of an entry of that listing. width: bytes of N."""
    if opcode == LIST:
        return struct.Struct(f"<BBBQ{NUMBER[width]}")
    return {STATS: struct.Struct("<BQQQQ"), CHANNELS: struct.Struct("<BQQQ"), CONNECTIONS: RECORD}[opcode]


def read_number(recv: Recv) -> int:
    return int.from_bytes(recv(8), "little")


def read_listing(recv: Recv, opcode: int, width: int) -> list[list[Row]]:
    """Reads the fragments of LIST, STATS, CHANNELS or CONNECTIONS, and checks that none exceeds the maximum size."""
    entry = entry_format(opcode, width)
    status = recv(1)
    assert status == b"\1", f"a listing that begins with {status.hex()}"
    fragments = []
    count = read_number(recv)
    for number in range(1, count + 1):
        said = read_number(recv)
        assert said == number, f"fragment {number} of {count} says that it is {said}"
        entries = [entry.unpack(recv(entry.size)) for _ in range(read_number(recv))]
        if opcode == CONNECTIONS:
            rows = [Row(fields[0], fields[1:]) for fields in entries]
        else:
            rows = [Row(recv(fields[0]), fields[1:]) for fields in entries]
        size = fragment_size(rows, opcode, entry.size)
        assert size <= fragment_max(opcode), f"fragment {number} of {count} has {size}"
        fragments.append(rows)
    filled = [bool(rows) for rows in fragments]
    assert filled == sorted(filled, reverse=True), f"empty fragments that are not the last: {filled}"
    return fragments


def fragment_size(rows: Sequence[Row], opcode: int, entry_size: int) -> int:
    """The size of a fragment, in the unit of its bound: bytes, or records."""
    if opcode == CONNECTIONS:
        return len(rows)
    names = 0 if opcode == CHANNELS else sum(len(row.name) for row in rows)
    return len(rows) * entry_size + names


def fragment_max(opcode: int) -> int:
    return FRAGMENT_RECORDS_MAX if opcode == CONNECTIONS else FRAGMENT_BYTES_MAX


def in_fragments(rows: Sequence[Row], opcode: int, width: int) -> list[list[Row]]:
    """Packs these rows into as few fragments as their order allows."""
    fragments: list[list[Row]] = []
    entry_size, most = entry_format(opcode, width).size, fragment_max(opcode)
    used = most
    for row in rows:
        size = fragment_size([row], opcode, entry_size)
        if used + size > most:
            fragments.append([])
            used = 0
        fragments[-1].append(row)
        used += size
    return fragments


def write_listing(rows: Sequence[Row], opcode: int, width: int) -> bytes:
    entry = entry_format(opcode, width)
    fragments = in_fragments(rows, opcode, width)
    reply = b"\1" + struct.pack("<Q", len(fragments))
    for number, fragment in enumerate(fragments, 1):
        reply += struct.pack("<QQ", number, len(fragment))
        if opcode == CONNECTIONS:
            reply += b"".join(entry.pack(row.name, *row.fields) for row in fragment)
        else:
            reply += b"".join(entry.pack(len(row.name), *row.fields) for row in fragment)
            reply += b"".join(row.name for row in fragment)
    return reply


def read_subscribers(recv: Recv) -> list[Row] | None:
    """Reads the reply to CHANNEL: {id: (time of subscription, read bytes, written bytes)}; None if there is no such
    channel.
    """
    if recv(1) == b"\0":
        return None
    entries = [SUBSCRIBER.unpack(recv(SUBSCRIBER.size)) for _ in range(read_number(recv))]
    return [Row(fields[0], fields[1:]) for fields in entries]


def read_record(recv: Recv) -> dict[str, int | bytes] | None:
    """Reads the reply to CONNECTION: {field: value}; None if there is no such connection."""
    if recv(1) == b"\0":
        return None
    return dict(zip(CONNECTION_FIELDS, RECORD.unpack(recv(RECORD.size)), strict=True))


def read_info(recv: Recv) -> dict[str, int]:
    """Reads the reply to INFO: {field: value}, without the version, which must be text."""
    assert recv(1) == b"\1"
    *numbers, version = INFO_REPLY.unpack(recv(INFO_REPLY.size))
    text = version.rstrip(b"\0")
    assert text, "no version"
    assert text.isascii(), f"the version is {version!r}"
    return dict(zip(INFO_FIELDS, numbers, strict=True))
