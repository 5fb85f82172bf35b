"""The counter protocol's session: replies byte by byte, and long replies in pieces."""

from __future__ import annotations

import itertools
import random
import tracemalloc
from typing import TYPE_CHECKING

import pytest

from counterd.protocols.counter import wire
from kit.counters import (
    BODY_MAX,
    INVALID,
    NO_MEMORY,
    NOT_ACQUIRED,
    NOT_AVAILABLE,
    NOT_FOUND,
    OK,
    OUTPUT_MAX,
    RECLAIM_STEPS,
    REPLY_MAX,
    TEXTS,
    UNKNOWN,
    Client,
    frames_of,
    holders_of,
    make_store,
    outputs,
    settle,
)
from property.counter_model import blocks_needed

if TYPE_CHECKING:
    from counterd.protocols.counter._store import CounterStore

U32_MAX = 0xFFFFFFFF
OPAQUE = Client.OPAQUE
NOOP = wire.noop(OPAQUE)
NOOP_REPLY = bytes.fromhex("91 00 00 00 00000000 deadbeef")
REFERENCE_NAMES = (
    "objects total_objects used_memory conflicts gc_count last_gc_elapsed total_gc_elapsed curr_connections"
    " total_connections command:noop command:get command:acquire command:release command:stats command:dump"
)
REFERENCE_STATS = REFERENCE_NAMES.split()


@pytest.fixture
def client() -> Client:
    return Client(make_store())


def error(opcode: int, status: int, opaque: str = "deadbeef") -> bytes:
    text = TEXTS[status]
    return bytes([0x91, opcode, status, 0]) + len(text).to_bytes(4, "big") + bytes.fromhex(opaque) + text


def fill(store: CounterStore, count: int, name: str = "name-%08d") -> Client:
    """A client that holds one of each of so many counters."""
    client = Client(store)
    client.raw(b"".join(wire.acquire(0, (name % number).encode(), 1, 1) for number in range(count)))
    assert store.snapshot()["busy"] >= count
    return client


def entries(output: bytes) -> list[wire.DumpEntry]:
    """The counters in a Dump, without its end."""
    return [wire.decode_dump_entry(frame[12:]) for frame in frames_of(output) if frame[1] == 0x11 and len(frame) > 12]


# ---- one request ----------------------------------------------------------------------------------------------------


def test_every_success_byte_by_byte(client: Client) -> None:
    assert client.raw(NOOP) == NOOP_REPLY
    assert client.raw(wire.acquire(1, b"a", 0x01020304, U32_MAX)) == bytes.fromhex(
        "91 02 00 00 00000004 00000001 01020304"
    )
    assert client.raw(wire.get(0xFFFFFFFF, b"a")) == bytes.fromhex("91 01 00 00 00000004 ffffffff 01020304")
    assert client.raw(wire.release(0x80, b"a", 4)) == bytes.fromhex("91 03 00 00 00000000 00000080")
    assert client.raw(wire.dump(7)) == bytes.fromhex(
        "91 11 00 00 0000000b 00000007 01020300 01020304 0001 61  91 11 00 00 00000000 00000007"
    )
    assert client.raw(wire.dump(8, limits=True)) == bytes.fromhex(
        "91 11 00 00 0000000f 00000008 01020300 01020304 0001 61 ffffffff  91 11 00 00 00000000 00000008"
    )
    stats = client.raw(wire.stats(9))
    assert stats[:4] + stats[8:12] == bytes.fromhex("91 10 00 00 00000009")


def test_every_error_byte_by_byte(client: Client) -> None:
    for name, text in (("00000001", "Not found"), ("deadbeef", "Not found")):
        assert client.raw(wire.get(int(name, 16), b"a")) == error(1, NOT_FOUND, name)
        assert error(1, NOT_FOUND, name).endswith(text.encode())
    assert client.raw(wire.acquire(OPAQUE, b"a", 2, 1)) == error(2, INVALID)
    assert client.acquire(b"a") == OK
    assert client.raw(wire.acquire(OPAQUE, b"a", 1, 1)) == error(2, NOT_AVAILABLE)
    assert client.raw(wire.release(OPAQUE, b"a", 2)) == error(3, NOT_ACQUIRED)
    assert client.raw(wire.frame(0x7F, OPAQUE, b"hello")) == error(0x7F, UNKNOWN)
    assert client.raw(wire.acquire(OPAQUE, b"x" * 37, 1, 1)) == error(2, 0x82)
    refused = {name: value for name, value in client.store.snapshot().items() if name.startswith("refused:")}
    assert refused == {
        "refused:not_found": 2,
        "refused:invalid_arguments": 1,
        "refused:not_available": 1,
        "refused:not_acquired": 1,
        "refused:cancelled": 0,
        "refused:unknown_command": 1,
        "refused:out_of_memory": 1,
    }


@pytest.mark.parametrize(
    ("opcode", "body"),
    [
        *((opcode, body) for opcode in (0x00, 0x10, 0x11) for body in (b"\0", b"abc", bytes(BODY_MAX))),
        *((opcode, bytes(size)) for opcode in (0x01, 0x02, 0x03) for size in range(12)),
        (0x01, b"\0\2a"),
        (0x01, b"\0\1ab"),
        (0x01, b"\xff\xff" + b"x" * 65534),
        (0x01, b"\xff\xfe" + b"x" * 65535),
        (0x02, b"\0\0\0\1\0\0\0\1\0\2a"),
        (0x02, b"\0\0\0\1\0\0\0\1\0\1ab"),
        (0x02, b"\0\0\0\1\0\0\0\1\0\0a"),
        (0x02, b"\0\0\0\0\0\0\0\1\0\1a"),
        (0x02, b"\0\0\0\2\0\0\0\1\0\1a"),
        (0x02, b"\xff\xff\xff\xff\xff\xff\xff\xfe\0\1a"),
        (0x02, b"\0\0\0\0\0\0\0\0\0\1a"),
        (0x02, b"\0\0\0\1\0\0\0\1\xff\xfe" + b"x" * 65535),
        (0x03, b"\0\0\0\0\0\2a"),
        (0x03, b"\0\0\0\0\0\1ab"),
        (0x03, b"\0\0\0\0\0\0a"),
    ],
)
def test_a_request_of_the_wrong_length_is_refused_and_the_connection_stays(
    client: Client, opcode: int, body: bytes
) -> None:
    assert client.raw(wire.frame(opcode, OPAQUE, body) + NOOP) == error(opcode, INVALID) + NOOP_REPLY
    assert not client.session.closing
    assert client.store.snapshot()["records"] == 0
    assert client.store.snapshot()[f"command:{wire.Opcode(opcode).name.lower()}"] == (opcode == 0)


@pytest.mark.parametrize("opcode", sorted(set(range(256)) - set(wire.Opcode)))
def test_an_unknown_opcode_is_copied_and_its_body_skipped(client: Client, opcode: int) -> None:
    for body in (b"", b"hello", wire.acquire(1, b"a", 1, 1), b"\x90" * BODY_MAX):
        assert client.raw(wire.frame(opcode, OPAQUE, body) + NOOP) == error(opcode, UNKNOWN) + NOOP_REPLY
    assert not client.session.closing
    assert client.get(b"a") is None


@pytest.mark.parametrize("flags", [0, 1, 0x80, 0xFF])
@pytest.mark.parametrize("reserved", [0, 1, 0x80, 0xFF])
def test_flags_and_reserved_are_ignored(client: Client, flags: int, reserved: int) -> None:
    for request in (NOOP, wire.acquire(1, b"a", 1, 9), wire.get(2, b"a"), wire.release(3, b"a", 1)):
        marked = request[:2] + bytes([flags, reserved]) + request[4:]
        response = client.raw(marked)
        assert response[:4] == bytes([0x91, request[1], 0, 0])
        assert response[8:12] == request[8:12]


def test_only_the_lowest_flag_of_a_dump_has_a_meaning(client: Client) -> None:
    assert client.acquire(b"a", 1, 9) == OK
    answers = {limits: client.raw(wire.dump(OPAQUE, limits=limits)) for limits in (False, True)}
    assert len(answers[True]) == len(answers[False]) + 4
    for flags in range(256):
        assert client.raw(wire.frame(0x11, OPAQUE, flags=flags)) == answers[flags % 2 == 1]
        assert client.raw(wire.frame(0x11, OPAQUE, flags=flags & 0xFE, reserved=0xFF)) == answers[False]


@pytest.mark.parametrize("start", [b"\x91", b"\x00", b"\x10", b"GET / HTTP/1.1\r\n\r\n", b"\x80\x01", b"\xff" * 100])
def test_a_wrong_magic_is_answered_once_its_header_is_there_and_closes(client: Client, start: bytes) -> None:
    header = (start + bytes(12))[:12]
    for place in range(11):
        assert client.raw(header[place : place + 1]) == b""
    assert not client.session.closing
    expected = error(header[1], INVALID, header[8:].hex())
    assert client.raw(header[11:] + NOOP) == expected
    assert client.session.closing
    assert client.raw(NOOP) == b""
    assert client.session.eof(0) == b""


@pytest.mark.parametrize("length", [BODY_MAX + 1, 1 << 24, U32_MAX])
@pytest.mark.parametrize("opcode", [*wire.Opcode, 0x04, 0x0F, 0x12, 0xFF])
def test_a_body_longer_than_any_request_is_answered_at_once_and_closes(
    client: Client, opcode: int, length: int
) -> None:
    known = opcode in set(wire.Opcode)
    length = max(length, wire.TAKE_MAX + 1) if opcode == wire.Opcode.TAKE else length
    header = wire.frame(opcode, OPAQUE, body_length=length)
    assert client.raw(NOOP + header[:11]) == NOOP_REPLY
    assert client.raw(header[11:]) == error(opcode, INVALID if known else UNKNOWN)
    assert client.session.closing
    tracemalloc.start()
    try:
        for _ in range(16):
            assert client.raw(bytes(65536)) == b""
        assert tracemalloc.get_traced_memory()[0] < 65536
    finally:
        tracemalloc.stop()


def test_requests_before_a_broken_frame_are_executed(client: Client) -> None:
    other = Client(client.store)
    request = wire.acquire(OPAQUE, b"a", 2, 2)
    assert client.raw(request + b"\x55" * 12 + wire.release(1, b"a", 2)) == bytes.fromhex(
        "91 02 00 00 00000004 deadbeef 00000002"
    ) + error(0x55, INVALID, "55555555")
    assert other.get(b"a") == 2
    settle(client.store)
    assert other.get(b"a") == 0
    client.close()
    settle(client.store)
    assert client.store.snapshot()["given_back"] == 1


def test_a_frame_in_pieces_is_kept_until_it_is_complete(client: Client) -> None:
    """The longest frame, one byte at a time: it is answered with its last byte, and its memory is free again."""
    request = wire.acquire(OPAQUE, b"x" * 65535, 1, 1)
    client = Client(make_store(name_memory=1 << 17))
    tracemalloc.start()
    try:
        for place in range(len(request) - 1):
            assert client.session.receive(request[place : place + 1], 0) == b""
        assert tracemalloc.get_traced_memory()[0] >= len(request) - 1
        assert client.raw(request[-1:]) == bytes.fromhex("91 02 00 00 00000004 deadbeef 00000001")
        assert tracemalloc.get_traced_memory()[0] < 16384
    finally:
        tracemalloc.stop()


# ---- limits ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("used", "resources", "maximum", "status"),
    [
        (1, 1, 2, OK),
        (2, 1, 2, NOT_AVAILABLE),
        (5, 1, 3, NOT_AVAILABLE),
        (5, 1, 6, OK),
        (U32_MAX, 1, U32_MAX, NOT_AVAILABLE),
        (U32_MAX, U32_MAX, U32_MAX, NOT_AVAILABLE),
        (1, U32_MAX, U32_MAX, NOT_AVAILABLE),
        (U32_MAX - 1, 1, U32_MAX, OK),
        (U32_MAX - 1, 2, U32_MAX, NOT_AVAILABLE),
        (1 << 31, 1 << 31, U32_MAX, NOT_AVAILABLE),
        ((1 << 31) - 1, 1 << 31, U32_MAX, OK),
        (U32_MAX, 11, 20, NOT_AVAILABLE),
        (U32_MAX - 5, 10, 10, NOT_AVAILABLE),
    ],
)
@pytest.mark.parametrize("same", [True, False], ids=["same connection", "another"])
def test_a_sum_never_wraps(used: int, resources: int, maximum: int, status: int, same: bool) -> None:
    client = Client(make_store())
    other = client if same else Client(client.store)
    assert client.acquire(b"a", used) == OK
    assert other.acquire(b"a", resources, maximum) == status
    assert client.get(b"a") == used + (resources if status == OK else 0)


def test_each_acquire_uses_its_own_maximum(client: Client) -> None:
    assert client.acquire(b"a", 5, 5) == OK
    assert client.acquire(b"a", 1, 5) == NOT_AVAILABLE
    assert client.acquire(b"a", 1, 6) == OK
    assert client.release(b"a", 3) == OK
    assert client.acquire(b"a", 1, 3) == NOT_AVAILABLE
    assert client.acquire(b"a", 1, 4) == OK


def test_the_limit_of_a_counter_is_the_maximum_of_its_last_acquire(client: Client) -> None:
    other = Client(client.store)
    assert client.acquire(b"a", 5, 9) == OK
    assert client.limits() == {b"a": 9}
    assert other.acquire(b"a", 1, 7) == OK
    assert client.limits() == {b"a": 7}
    assert other.acquire(b"a", 3, 8) == NOT_AVAILABLE
    assert client.acquire(b"a", 2, 1) == INVALID
    assert client.release(b"a", 5) == OK
    assert client.get(b"a") == 1
    assert client.limits() == {b"a": 8}
    assert client.acquire(b"b", 1, U32_MAX) == OK
    assert client.limits() == {b"a": 8, b"b": U32_MAX}
    assert client.acquire(b"a", 1, 6) == OK
    assert client.limits() == {b"a": 6, b"b": U32_MAX}
    assert client.dump() == {b"a": (2, 6), b"b": (1, 1)}


def test_the_limit_of_a_counter_ends_with_it() -> None:
    """Neither the next counter in its record has it, nor a later counter of the same name."""
    client = Client(make_store(1, 2))
    for name, limit in ((b"a", 9), (b"b", 5), (b"a", 3)):
        assert client.acquire(name, 1, limit) == OK
        assert client.release(name) == OK
        assert client.limits() == {name: limit}
    client.store.begin_window(1)
    assert client.limits() == {}
    assert client.acquire(b"a", 1, 2) == OK
    assert client.limits() == {b"a": 2}


def test_a_refused_acquire_creates_no_counter_and_no_limit(client: Client) -> None:
    assert client.acquire(b"a", 2, 1) == INVALID
    assert client.acquire(b"x" * 37, 1, 1) == NO_MEMORY
    assert client.limits() == {}
    assert client.store.snapshot()["records"] == 0


def test_a_connection_can_release_only_its_own_permits(client: Client) -> None:
    other = Client(client.store)
    assert client.release(b"a", 0) == NOT_FOUND
    assert client.release(b"a", 1) == NOT_FOUND
    assert client.acquire(b"a", 3) == OK
    assert other.release(b"a", 1) == NOT_ACQUIRED
    assert other.release(b"a", 0) == OK
    assert client.release(b"a", 4) == NOT_ACQUIRED
    assert client.release(b"a", U32_MAX) == NOT_ACQUIRED
    assert client.release(b"a", 0) == OK
    assert client.release(b"a", 3) == OK
    assert client.release(b"a", 1) == NOT_ACQUIRED
    assert client.release(b"a", 0) == OK
    assert client.get(b"a") == 0


# ---- names ----------------------------------------------------------------------------------------------------------

SIZES_OF_NAMES = (1, 2, 27, 28, 29, 35, 36, 37, 87, 88, 89, 147, 148, 149, 207, 208, 209, 65534, 65535)


@pytest.mark.parametrize("size", SIZES_OF_NAMES)
@pytest.mark.parametrize("fill", [b"x", b"\0", bytes(range(256))], ids=["letters", "zeros", "binary"])
def test_a_name_of_any_size_and_bytes(size: int, fill: bytes) -> None:
    name = (fill * size)[:size]
    client = Client(make_store(2, 2, name_memory=70_000))
    assert client.acquire(name, 2, 0x01020304) == OK
    assert client.get(name) == 2
    assert client.dump() == {name: (2, 2)}
    assert client.limits() == {name: 0x01020304}
    assert client.release(name) == OK
    assert client.get(name) == 1
    assert client.store.snapshot()["name_memory"] == 64 * blocks_needed(name)
    assert [amount for _, amount, _ in holders_of(client.store, name)] == [1]


@pytest.mark.parametrize("size", [1, 36, 37, 88, 89, 149, 4000])
def test_names_that_differ_in_one_byte_are_different(size: int) -> None:
    """In the first or last byte, or at a border of a block."""
    base = b"x" * size
    places = {0, 27, 28, 35, 36, 87, 88, 147, 148, size - 1} & set(range(size))
    names = [base, *(base[:place] + b"y" + base[place + 1 :] for place in sorted(places)), base[:-1], base + b"x"]
    names = [name for name in names if name]
    client = Client(make_store(16, 16, name_memory=1 << 20))
    for number, name in enumerate(names, 1):
        assert client.get(name) is None
        assert client.acquire(name, number) == OK
    assert [client.get(name) for name in names] == list(range(1, len(names) + 1))
    assert client.dump() == {name: (number, number) for number, name in enumerate(names, 1)}


# ---- Stats ----------------------------------------------------------------------------------------------------------


def test_stats_begin_with_the_references_fields_followed_by_our_own() -> None:
    store = make_store(figures=lambda: {"connections_max": 7, "version": "1.2.3"})
    client = Client(store)
    assert client.acquire(b"a") == OK
    before = store.snapshot()
    stats = wire.decode_stats(client.one(wire.stats(OPAQUE)).body)
    names = list(stats)
    assert names[:15] == REFERENCE_STATS
    assert names[15:17] == ["connections_max", "version"]
    assert set(names[17:]) == set(before) - set(REFERENCE_STATS)
    changed = {"bytes_in": str(before["bytes_in"] + 12), "command:stats": "1"}
    figures = {"connections_max": "7", "version": "1.2.3"}
    assert stats == {name: str(value) for name, value in before.items()} | changed | figures


def test_stats_count_valid_requests(client: Client) -> None:
    requests = [NOOP, wire.get(1, b"a"), wire.acquire(1, b"a", 1, 1), wire.release(1, b"b", 0), wire.dump(1)]
    for request in requests:
        client.raw(request * 2)
        client.raw(wire.frame(request[1], 1, request[12:] + b"x"))
    stats = wire.decode_stats(client.one(wire.stats(OPAQUE)).body)
    assert [stats[name] for name in REFERENCE_STATS[9:]] == ["2", "2", "2", "2", "1", "2"]


def test_connections_and_bytes_are_counted() -> None:
    store = make_store()
    one, two = Client(store), Client(store)
    one.raw(NOOP)
    two.raw(NOOP[:5])
    two.close()
    two.raw(NOOP)
    snapshot = store.snapshot()
    assert (snapshot["curr_connections"], snapshot["total_connections"]) == (1, 2)
    assert (snapshot["bytes_in"], snapshot["bytes_out"]) == (12 + 5 + 12, 12)


def test_many_stats_are_spread_over_several_calls() -> None:
    """Each takes some microseconds in Python."""
    client = Client(make_store())
    pieces = client.pieces(wire.stats(OPAQUE) * 70 + NOOP)
    assert max(len(list(frames_of(piece))) for piece in pieces) <= 16
    assert [frame[1] for frame in frames_of(b"".join(pieces))] == [0x10] * 70 + [0x00]


# ---- much at once ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 63, 64, 65, 127, 128, 129, 1000, 4095, 4096, 4097, 50_000])
@pytest.mark.parametrize("first", [0, 5, 12])
def test_requests_left_for_later_calls_are_answered_in_order(client: Client, count: int, first: int) -> None:
    """However many there are. first: the bytes that arrive in a read of their own."""
    requests = b"".join(wire.noop(number) for number in range(count))
    output = client.session.receive(requests[:first], 0)
    output += client.session.receive(requests[first:] + NOOP[:7], 0)
    if client.session.more:
        assert client.session.receive(NOOP[7:] + NOOP[:3], 0) == b""
        output += b"".join(outputs(client.session))
    else:
        output += client.session.receive(NOOP[7:] + NOOP[:3], 0)
    assert client.session.take_output(0) == b""
    output += client.session.receive(NOOP[3:], 0)
    opaques = [int.from_bytes(frame[8:12], "big") for frame in frames_of(output)]
    assert opaques == [*range(count), OPAQUE, OPAQUE]


def test_a_flood_of_requests_is_spread_over_calls_and_delays_no_others(client: Client) -> None:
    """Steps belong to a call: a connection with few requests never waits for a turn."""
    floods = [Client(client.store) for _ in range(20)]
    for flood in floods:
        assert len(flood.session.receive(NOOP * 50_000, 0)) == 4096 * len(NOOP_REPLY)
        assert flood.session.more
    assert client.session.receive(NOOP * 4096, 0) == NOOP_REPLY * 4096
    assert not client.session.more
    for flood in floods:
        assert flood.session.take_output(0) == NOOP_REPLY * 4096


PERMITS = [wire.Permit(b"%d" % number, 1, 1 << 20) for number in range(16)]
RATES = [wire.Rate(b"r%d" % number, 1, 1 << 20, 1_000_000, 1 << 20) for number in range(16)]


@pytest.mark.parametrize(
    ("first", "request_", "cost"),
    [
        (b"", wire.acquire(1, b"a", 1, 1), 1 + 32),
        (wire.acquire(1, b"a", 1, 9), wire.acquire(1, b"a", 1, 9), 1),
        (b"", wire.take(1, PERMITS), 4 + 16 * (8 + 32)),
        (wire.take(1, PERMITS), wire.take(1, PERMITS), 4 + 16 * 8),
        (b"", wire.take(1, RATES), 7 + 16 * (8 + 32)),
        (
            wire.take(1, PERMITS) + wire.acquire(1, b"0", (1 << 20) - 1, 1 << 20),
            wire.take(1, PERMITS, wait_ms=1000),
            4 + 16 * (8 + 4),
        ),
    ],
)
def test_the_cost_of_a_request_in_steps(first: bytes, request_: bytes, cost: int) -> None:
    client = Client(make_store(100, 100, waiters=64))
    client.raw(first)
    client.session.receive(request_, 0)
    assert 4096 - client.store.budget == cost


def test_the_items_of_a_take_count_for_the_bound_of_a_call() -> None:
    client = Client(make_store(100, 100))
    client.raw(wire.take(1, PERMITS))
    done = client.session.requests
    client.session.receive(wire.take(1, PERMITS) * 100, 0)
    assert client.session.requests - done == 32  # of 132 steps
    assert client.session.more


def test_requests_are_counted_once_however_often_they_wait(client: Client) -> None:
    assert client.session.receive(NOOP * 4096 + wire.stats(1), 0) == NOOP_REPLY * 4096
    assert client.session.requests == 4096
    assert client.session.take_output(0) != b""
    assert client.session.requests == 4097


def test_costly_requests_are_spread_over_calls() -> None:
    """Names of 65,535 bytes have to be hashed: a thousand of them are more than one call does."""
    client = Client(make_store(name_memory=1 << 17))
    pieces = client.pieces(wire.get(OPAQUE, b"x" * 65535) * 100)
    assert max(len(list(frames_of(piece))) for piece in pieces) <= 8
    assert b"".join(pieces) == error(1, NOT_FOUND) * 100


# ---- Dump -----------------------------------------------------------------------------------------------------------


def test_a_dump_without_counters_is_only_its_end(client: Client) -> None:
    assert client.raw(wire.dump(OPAQUE)) == bytes.fromhex("91 11 00 00 00000000 deadbeef")


def test_a_long_dump_comes_in_pieces_and_later_requests_after_it() -> None:
    store = make_store(20_000, 20_000)
    client = fill(store, 20_000)
    dumper = Client(store)
    pieces = dumper.pieces(wire.noop(1) + wire.dump(2) + wire.get(3, b"name-00000007") + wire.dump(4) + wire.noop(5))
    assert len(pieces) >= 10
    assert max(map(len, pieces)) <= 2 * 65536 + 100
    frames = list(frames_of(b"".join(pieces)))
    assert [int.from_bytes(frame[8:12], "big") for frame in frames] == ([1] + [2] * 20_001 + [3] + [4] * 20_001 + [5])
    names = [b"name-%08d" % number for number in range(20_000)]
    assert [entry.name for entry in entries(b"".join(frames[1:20_002]))] == names
    assert [entry.name for entry in entries(b"".join(frames[20_003:-1]))] == names
    assert client.dump().keys() == set(names)


def test_dumps_of_the_longest_names_stay_within_the_output() -> None:
    store = make_store(8, 8, name_memory=8 * 70_000)
    client = Client(store)
    names = [b"%d" % number * 65535 for number in range(8)]
    for name in names:
        assert client.acquire(name) == OK
    for filler in (0, 1000, 4000):
        pieces = client.pieces(NOOP * filler + wire.dump(2) + wire.dump(2, limits=True) * 2)
        assert max(map(len, pieces)) <= OUTPUT_MAX + REPLY_MAX
        assert [entry.name for entry in entries(b"".join(pieces))] == names * 3


def test_the_longest_entry_and_the_end_behind_an_almost_full_output() -> None:
    """The longest output that there can be. Stats of a chosen length fill it up to one byte less than full.

    Stats that are longer than a reply are our own mistake.
    """
    sizes = [REPLY_MAX, REPLY_MAX, REPLY_MAX, OUTPUT_MAX - 1 - 3 * REPLY_MAX]
    paddings: list[int] = []
    store = make_store(name_memory=1 << 17, figures=lambda: {"padding": "x" * (paddings.pop(0) if paddings else 0)})
    client = Client(store)
    name = b"x" * 65535
    assert client.acquire(name, 1, 2) == OK

    def unpadded(now_ns: int) -> int:
        """The length of the next Stats, in which no figure has more digits than in this one."""
        return [len(client.session.receive(wire.stats(1), now_ns)) for _ in range(3)][2]

    own = unpadded(1_000_000_000)
    paddings += [size - own for size in sizes]
    output = client.session.receive(wire.stats(1) * len(sizes) + wire.dump(2, limits=True), 2_000_000_000)
    assert len(output) == OUTPUT_MAX - 1 + REPLY_MAX
    assert not client.session.more
    frames = list(frames_of(output))
    assert [len(frame) for frame in frames] == [*sizes, REPLY_MAX - 12, 12]
    assert entries(output) == [wire.DumpEntry(name, 1, 1, 2)]
    store.audit()
    own = unpadded(3_000_000_000)
    paddings.append(REPLY_MAX + 1 - own)
    with pytest.raises(ValueError, match=f"^the statistics take {REPLY_MAX - 11} bytes, which is more than a reply"):
        client.session.receive(wire.stats(1), 4_000_000_000)


def test_pieces_of_a_dump_over_freed_records_may_be_empty() -> None:
    """The work of a call is bounded too: it passes some unused records at a time."""
    count = 40_000
    store = make_store(count, count)
    client = fill(store, count)
    client.close()
    settle(store)
    store.begin_window(1)
    settle(store)
    other = Client(store)
    assert other.acquire(b"a") == OK
    pieces = other.pieces(wire.dump(1) + wire.noop(2))
    assert 3 <= len(pieces) <= 12
    assert b"" in pieces
    assert [entry.name for entry in entries(b"".join(pieces))] == [b"a"]
    assert b"".join(pieces).endswith(wire.frame(0, 2, magic=0x91))


def test_a_counter_that_exists_during_the_whole_dump_appears_once() -> None:
    """While the table changes: counters are acquired, released, reclaimed and expired between the pieces."""
    numbers = random.Random(3)
    store = make_store(12_000, 40_000, name_memory=64 * 3000)
    fill(store, 2000, "before-%08d")
    keeper = fill(store, 6000, "stays-%08d")
    changer = fill(store, 3000, "goes-%08d")
    settle(store)
    dumper = Client(store)
    pieces = [dumper.session.receive(wire.dump(OPAQUE), 0)]
    while dumper.session.more:
        for number in range(200):
            new = b"comes-%d-%d" % (len(pieces), number)
            changes = [
                wire.release(0, b"goes-%08d" % numbers.randrange(3000), 1),
                wire.acquire(0, new + b"x" * numbers.choice((0, 50, 100)), 1, 1),
                wire.acquire(0, b"stays-%08d" % numbers.randrange(6000), 1, U32_MAX),
            ]
            assert len(list(frames_of(changer.session.receive(b"".join(changes), 0)))) == 3
        if len(pieces) == 3:
            store.begin_window(1)
        settle(store)
        pieces.append(dumper.session.take_output(0))
    assert len(pieces) >= 5
    dumped = entries(b"".join(pieces))
    stays = sorted(entry.name for entry in dumped if entry.name.startswith(b"stays"))
    assert stays == [b"stays-%08d" % number for number in range(6000)]
    assert all(entry.peak >= entry.consumption >= 1 for entry in dumped if entry.name.startswith(b"stays"))
    assert keeper.get(b"stays-00000000") is not None
    assert store.snapshot()["expired"] > 0


def test_two_connections_dump_at_once() -> None:
    """Each with or without limits, as it requested; requests behind a Dump are not executed yet."""
    store = make_store(5000, 5000)
    names = [b"name-%08d" % number for number in range(5000)]
    filler = Client(store)
    filler.raw(b"".join(wire.acquire(0, name, 1, limit) for limit, name in enumerate(names, 1)))
    one, two = Client(store), Client(store)
    said = {
        one: one.session.receive(wire.dump(1, limits=True) + wire.dump(1), 0),
        two: two.session.receive(wire.dump(2) + wire.dump(2, limits=True), 0),
    }
    assert one.session.more
    assert two.session.more
    for pieces in itertools.zip_longest(outputs(one.session), outputs(two.session), fillvalue=b""):
        for client, piece in zip(said, pieces, strict=True):
            said[client] += piece
    for number, client in enumerate((one, two), 1):
        frames = list(frames_of(said[client]))
        assert len(frames) == 2 * 5001
        assert {frame[8:12] for frame in frames} == {number.to_bytes(4, "big")}
    plain = [wire.DumpEntry(name, 1, 1) for name in names]
    full = [wire.DumpEntry(name, 1, 1, limit) for limit, name in enumerate(names, 1)]
    assert entries(said[one]) == full + plain
    assert entries(said[two]) == plain + full


# ---- the end --------------------------------------------------------------------------------------------------------


def test_the_end_of_an_idle_connection(client: Client) -> None:
    assert client.acquire(b"a", 2) == OK
    assert client.session.eof(0) == b""
    assert client.session.closing
    assert not client.session.more
    settle(client.store)
    assert client.raw(NOOP) == b""
    assert client.session.take_output(0) == b""
    assert Client(client.store).get(b"a") == 0


def test_an_unfinished_request_is_forgotten_at_the_end(client: Client) -> None:
    assert client.raw(wire.acquire(1, b"a", 1, 1) + wire.release(2, b"a", 1)[:-1])
    assert client.session.eof(0) == b""
    assert client.session.closing
    assert client.store.next_deadline() == 0
    settle(client.store)
    assert Client(client.store).get(b"a") == 0


def test_after_a_half_close_requests_behind_a_dump_are_answered_and_holdings_come_back() -> None:
    store = make_store(5000, 6000)
    client = fill(store, 4000)
    output = client.session.receive(wire.dump(1) + wire.acquire(2, b"late", 3, 3) + wire.get(3, b"late") + NOOP[:5], 0)
    output += client.session.eof(0)
    assert client.session.more
    assert not client.session.closing
    assert store.next_deadline() == -1
    assert client.session.receive(NOOP, 0) == b""
    output += b"".join(outputs(client.session))
    assert client.session.closing
    assert output.endswith(
        bytes.fromhex("91 02 00 00 00000004 00000002 00000003  91 01 00 00 00000004 00000003 00000003")
    )
    assert len(list(frames_of(output))) == 4003
    assert store.next_deadline() == 0
    settle(store)
    assert store.snapshot()["given_back"] == 4001
    assert store.snapshot()["busy"] == 0


def test_a_dump_is_finished_after_a_half_close() -> None:
    store = make_store(5000, 6000)
    client = fill(store, 4000)
    output = client.session.receive(wire.dump(1), 0) + client.session.eof(0)
    output += b"".join(outputs(client.session))
    assert client.session.closing
    assert len(entries(output)) == 4000
    assert output.endswith(wire.frame(0x11, 1, magic=0x91))
    settle(store)
    assert store.snapshot()["given_back"] == 4000


def test_a_broken_frame_behind_a_dump_is_answered_after_it_and_closes() -> None:
    store = make_store(5000, 6000)
    client = fill(store, 4000)
    output = client.session.receive(wire.dump(1) + b"\x55" * 12 + NOOP, 0) + client.session.eof(0)
    output += b"".join(outputs(client.session))
    assert output.endswith(wire.frame(0x11, 1, magic=0x91) + error(0x55, INVALID, "55555555"))
    assert client.session.closing
    settle(store)
    client.close()
    settle(store)
    assert store.snapshot()["given_back"] == 4000


def test_a_connection_closed_during_its_dump_sends_no_more() -> None:
    store = make_store(5000, 6000)
    client = fill(store, 4000)
    assert client.session.receive(wire.dump(1) + NOOP, 0)
    client.close()
    assert (client.session.more, client.session.closing) == (False, True)
    assert client.session.take_output(0) == b""
    settle(store)
    assert store.snapshot()["given_back"] == 4000


def test_a_connection_closed_with_a_frame_kept_frees_it() -> None:
    client = Client(make_store())
    tracemalloc.start()
    try:
        client.raw(wire.frame(1, 1, bytes(60_000), body_length=65_000))
        assert tracemalloc.get_traced_memory()[0] > 60_000
        client.close()
        assert tracemalloc.get_traced_memory()[0] < 16384
    finally:
        tracemalloc.stop()


def use(client: Client, names: list[bytes], *, keep: bool) -> None:
    """Acquires one of each, and releases it unless it is to be kept."""
    for name in names:
        assert client.acquire(name) == OK
        if not keep:
            assert client.release(name) == OK


def test_a_refusal_for_lack_of_name_memory_starts_a_sweep() -> None:
    client = Client(make_store(400, 800, name_memory=64))
    names = [b"%03d" % number for number in range(RECLAIM_STEPS + 36)]
    use(client, names, keep=False)
    use(client, names, keep=True)  # their places in the ring are stale now
    use(client, [b"L" * 60], keep=False)
    assert client.acquire(b"M" * 60) == NO_MEMORY
    assert client.store.next_deadline() == 0
    settle(client.store)
    assert client.get(b"L" * 60) == 0
    assert client.acquire(b"M" * 60) == OK
    assert client.get(b"L" * 60) is None


def test_a_refusal_for_lack_of_name_memory_starts_no_useless_sweep() -> None:
    client = Client(make_store(400, 800, name_memory=64))
    names = [b"%03d" % number for number in range(RECLAIM_STEPS + 36)]
    use(client, names, keep=False)
    use(client, [b"L" * 60], keep=True)
    assert client.acquire(b"M" * 60) == NO_MEMORY
    assert client.store.next_deadline() == -1
    assert [client.get(name) for name in names] == [0] * len(names)


# ---- for operators --------------------------------------------------------------------------------------------------


def test_outcomes_are_counted_by_request_and_status(client: Client) -> None:
    assert client.store.outcomes() == []
    client.raw(wire.acquire(1, b"a", 2, 3) * 3 + wire.get(1, b"a") + wire.get(1, b"b") + wire.noop(1) * 4)
    client.raw(wire.release(1, b"a", 1) + wire.release(1, b"a", 2) + wire.acquire(1, b"a", 2, 1) + wire.dump(1))
    client.raw(wire.frame(wire.Opcode.STATS, 1, b"?") + wire.frame(0x04, 1) + wire.frame(0xFF, 1))
    client.raw(wire.frame(wire.Opcode.GET, 1, magic=0x91))
    assert sorted(client.store.outcomes()) == [
        ("acquire", "invalid_arguments", 1),
        ("acquire", "not_available", 2),
        ("acquire", "ok", 1),
        ("dump", "ok", 1),
        ("get", "not_found", 1),
        ("get", "ok", 1),
        ("noop", "ok", 4),
        ("release", "not_acquired", 1),
        ("release", "ok", 1),
        ("stats", "invalid_arguments", 1),
        ("unknown", "invalid_arguments", 1),
        ("unknown", "unknown_command", 2),
    ]


def test_draining_refuses_every_acquire_and_nothing_else(client: Client) -> None:
    other = Client(client.store)
    assert client.acquire(b"a", 2, 5) == OK
    client.store.begin_drain()
    for name, resources, maximum in ((b"a", 1, 9), (b"b", 1, 9), (b"a", 9, 9)):
        refusal = other.raw(wire.acquire(OPAQUE, name, resources, maximum))
        assert refusal == bytes.fromhex("91 02 21 00 00000008 deadbeef") + b"Draining"
    assert other.raw(wire.acquire(OPAQUE, b"a", 2, 1)) == error(2, INVALID)
    assert (client.get(b"a"), client.get(b"b")) == (2, None)
    assert client.limits() == {b"a": 5}
    assert client.one(wire.noop(OPAQUE)).status == OK
    assert client.release(b"a", 3) == NOT_ACQUIRED
    assert client.release(b"a", 1) == OK
    assert client.store.held() == 1
    assert client.release(b"a", 1) == OK
    assert client.store.held() == 0
    assert client.store.snapshot()["refused:not_available"] == 3
    client.store.begin_drain()
    other.close()
