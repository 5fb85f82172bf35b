"""The throttr wire module: requests byte for byte, and replies and events from a stream in any pieces."""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from counterd.errors import ProtocolError
from counterd.protocols.throttr import wire
from counterd.protocols.throttr._store import COMMAND_NAMES
from counterd.protocols.throttr.wire import (
    Attribute,
    Change,
    ChannelEntry,
    ConnectionInfo,
    ConnectionKind,
    ConnectionType,
    Encoder,
    Event,
    Executed,
    Get,
    Info,
    KeyType,
    ListEntry,
    Opcode,
    Parser,
    Query,
    Reply,
    Stat,
    StatsEntry,
    Subscriber,
    TTLType,
    ValueSize,
)
from kit.machine import own_time

U16 = ValueSize.UINT16
ENCODER = Encoder(U16)
ID = bytes(range(16))
sizes = st.sampled_from(ValueSize)
keys = st.binary(max_size=wire.KEY_MAX)


def u64(*numbers: int) -> bytes:
    return b"".join(number.to_bytes(8, "little") for number in numbers)


def record(first: int = 0) -> bytes:
    """A connection's record, with 24 numbers that count up from the first."""
    return ID + b"\0\1\x04" + b"127.0.0.1".ljust(16, b"\0") + b"\x39\x30" + u64(7) + u64(*range(first, first + 24))


def connection(first: int = 0) -> ConnectionInfo:
    numbers = range(first, first + 24)
    return ConnectionInfo(ID, ConnectionType.CLIENT, ConnectionKind.UNIX, 4, "127.0.0.1", 12345, 7, *numbers)


KEY_LIST = (
    b"\1" + u64(2)
    + u64(1, 2) + b"\1\0\4" + u64(5) + b"\2\0" + b"\2\1\3" + u64(6) + b"\7\1" + b"abc"
    + u64(2, 1) + b"\0\0\xfe" + u64(7) + b"\2\0"
)  # fmt: skip

# A request, the bytes that may answer it, and what they tell.
ANSWERS: list[tuple[bytes, bytes, Any]] = [
    (ENCODER.insert(b"k", 1, 2), b"\1", True),
    (ENCODER.insert(b"k", 1, 2), b"\0", False),
    (ENCODER.query(b"k"), b"\0", None),
    (ENCODER.query(b"k"), b"\1\x39\x30\3\1\2", Query(12345, TTLType.MILLISECONDS, 513)),
    (ENCODER.query(b"k"), b"\1\x39\x30\0\1\2", Query(12345, 0, 513)),
    (ENCODER.update(b"k", 0, 1, 2), b"\1", True),
    (ENCODER.purge(b"k"), b"\0", False),
    (ENCODER.set(b"k", b"v", 1), b"\1", True),
    (ENCODER.get(b"k"), b"\0", None),
    (ENCODER.get(b"k"), b"\1\4\7\0\3\0\x19\0\1", Get(TTLType.SECONDS, 7, b"\x19\0\1")),
    (ENCODER.get(b"k"), b"\1\4\7\0\0\0", Get(TTLType.SECONDS, 7, b"")),
    (ENCODER.list(), b"\1" + u64(0), []),
    (ENCODER.list(), KEY_LIST, [
        ListEntry(b"a", KeyType.COUNTER, TTLType.SECONDS, 5, 2),
        ListEntry(b"bc", KeyType.BUFFER, TTLType.MILLISECONDS, 6, 263),
        ListEntry(b"", KeyType.COUNTER, 254, 7, 2),
    ]),
    (ENCODER.info(), b"\1" + u64(*range(52)) + b"5.0.11".ljust(16, b"\0"), Info(*range(52), "5.0.11")),
    (ENCODER.stat(b"k"), b"\0", None),
    (ENCODER.stat(b"k"), b"\1" + u64(1, 2, 3, 4), Stat(1, 2, 3, 4)),
    (ENCODER.stats(), b"\1" + u64(2, 1, 1) + b"\2" + u64(1, 2, 3, 4) + b"ab" + u64(2, 0), [
        StatsEntry(b"ab", 1, 2, 3, 4),
    ]),
    (ENCODER.subscribe(b"c"), b"\1", True),
    (ENCODER.unsubscribe(b"c"), b"\0", False),
    (ENCODER.publish(b"c", b"p"), b"\1", True),
    (ENCODER.connections(), b"\1" + u64(2, 1, 2) + record() + record(9) + u64(2, 1) + record(50), [
        connection(), connection(9), connection(50),
    ]),
    (ENCODER.connection(ID), b"\0", None),
    (ENCODER.connection(ID), b"\1" + record(3), connection(3)),
    (ENCODER.channels(), b"\1" + u64(1, 1, 2) + b"\1" + u64(1, 2, 3) + b"\3" + u64(4, 5, 6) + b"*new", [
        ChannelEntry(b"*", 1, 2, 3), ChannelEntry(b"new", 4, 5, 6),
    ]),
    (ENCODER.channel(b"c"), b"\0", None),
    (ENCODER.channel(b"c"), b"\1" + u64(0), []),
    (ENCODER.channel(b"c"), b"\1" + u64(2) + ID + u64(1, 2, 3) + ID[::-1] + u64(4, 5, 6), [
        Subscriber(ID, 1, 2, 3), Subscriber(ID[::-1], 4, 5, 6),
    ]),
    (ENCODER.whoami(), b"\1" + ID, ID),
    (ENCODER.event(b"c", ENCODER.purge(b"k")), b"\0", None),
    (ENCODER.event(b"c", ENCODER.purge(b"k")), b"\1\0", Executed(False)),
    (ENCODER.event(b"c", ENCODER.query(b"k")), b"\1\0", Executed(None)),
    (ENCODER.event(b"c", ENCODER.whoami()), b"\1\1" + ID, Executed(ID)),
    (ENCODER.event(b"c", ENCODER.event(b"", ENCODER.purge(b""))), b"\1\1\1", Executed(Executed(True))),
    (ENCODER.event(b"c", ENCODER.event(b"", ENCODER.purge(b""))), b"\1\0", Executed(None)),
    (ENCODER.event(b"c", ENCODER.event(b"", ENCODER.purge(b""))), b"\0", None),
]  # fmt: skip

EVENTS = [(b"\x19\1\2\0c\1\0", Event(b"c", b"\1\0")), (b"\x19\0\0\0", Event(b"", b""))]


def test_metrics_and_clients_use_the_same_names_of_requests() -> None:
    assert {opcode.value: opcode.name.lower() for opcode in Opcode} == COMMAND_NAMES


def fed(request: bytes, data: bytes, size: ValueSize = U16) -> Any:
    """What a parser returns for the only reply in the data."""
    parser = Parser(size)
    parser.expect(request)
    (reply,) = parser.feed(data)
    assert isinstance(reply, Reply)
    assert reply.opcode == request[0]
    return reply.result


# ---- requests


@pytest.mark.parametrize(
    ("request_bytes", "expected"),
    [
        (ENCODER.insert(b"ab", 0x0102, 0x0304), "01 0201 04 0403 02 6162"),
        (ENCODER.insert(b"", 1, 2, TTLType.HOURS), "01 0100 06 0200 00"),
        (ENCODER.query(b"ab"), "02 02 6162"),
        (ENCODER.update(b"ab", Attribute.TTL, Change.DECREASE, 0x0102), "03 01 02 0201 02 6162"),
        (ENCODER.purge(b"ab"), "04 02 6162"),
        (ENCODER.set(b"ab", b"\0\1\2", 0x0102, TTLType.NANOSECONDS), "05 01 0201 02 0300 6162 000102"),
        (ENCODER.get(b""), "06 00"),
        (ENCODER.list(), "07"),
        (ENCODER.info(), "08"),
        (ENCODER.stat(b"ab"), "09 02 6162"),
        (ENCODER.stats(), "10"),
        (ENCODER.subscribe(b"ch"), "11 02 6368"),
        (ENCODER.unsubscribe(b"ch"), "12 02 6368"),
        (ENCODER.publish(b"ch", b"xyz"), "13 02 0300 6368 78797a"),
        (ENCODER.connections(), "14"),
        (ENCODER.connection(ID), "15 000102030405060708090a0b0c0d0e0f"),
        (ENCODER.channels(), "16"),
        (ENCODER.channel(b"ch"), "17 02 6368"),
        (ENCODER.whoami(), "18"),
        (ENCODER.event(b"ch", ENCODER.query(b"k")), "19 02 0300 6368 02016b"),
        (ENCODER.message(0x19, b"ch", b"junk"), "19 02 0400 6368 6a756e6b"),
        (Encoder(ValueSize.UINT8).insert(b"a", 255, 254), "01 ff 04 fe 01 61"),
        (Encoder(ValueSize.UINT32).set(b"a", b"b", 1), "05 04 01000000 01 01000000 61 62"),
        (Encoder(ValueSize.UINT64).update(b"a", 0, 1, 2**64 - 1), "03 00 01 ffffffffffffffff 01 61"),
        (Encoder(ValueSize.UINT64).publish(b"", b""), "13 00 0000000000000000"),
    ],
)
def test_requests_byte_for_byte(request_bytes: bytes, expected: str) -> None:
    assert request_bytes == bytes.fromhex(expected)


@pytest.mark.parametrize("size", ValueSize)
def test_numbers_at_the_limit_and_outside(size: ValueSize) -> None:
    encoder, most = Encoder(size), size.maximum
    assert most == 256**size - 1
    assert encoder.insert(b"", most, 0)[1 : 1 + size] == b"\xff" * size
    for value in (-1, most + 1):
        for what, encode in [
            ("quota", partial(encoder.insert, b"k", value, 0)),
            ("ttl", partial(encoder.insert, b"k", 0, value)),
            ("ttl", partial(encoder.set, b"k", b"", value)),
            ("value", partial(encoder.update, b"k", 0, 0, value)),
        ]:
            width = f"value_size is {size.name.lower()}"
            with pytest.raises(ValueError, match=f"^{what} must be 0 to {most}, not {value}: {width}$"):
                encode()


def test_values_at_the_limit_and_above() -> None:
    assert len(ENCODER.set(b"", bytes(65535), 0)) == 7 + 65535
    with pytest.raises(ValueError, match=r"^the size of the value must be 0 to 65535, .*: value_size is uint16$"):
        ENCODER.set(b"", bytes(65536), 0)
    for encode in (ENCODER.publish, lambda channel, payload: ENCODER.message(Opcode.EVENT, channel, payload)):
        assert len(encode(b"", bytes(65535))) == 4 + 65535
        with pytest.raises(ValueError, match=r"^the size of the payload must be 0 to 65535, .*: value_size is uint16$"):
            encode(b"", bytes(65536))


@pytest.mark.parametrize(
    ("what", "encode"),
    [
        ("key", lambda key: ENCODER.insert(key, 0, 0)),
        ("key", ENCODER.query),
        ("key", lambda key: ENCODER.update(key, 0, 0, 0)),
        ("key", ENCODER.purge),
        ("key", lambda key: ENCODER.set(key, b"", 0)),
        ("key", ENCODER.get),
        ("key", ENCODER.stat),
        ("channel", ENCODER.subscribe),
        ("channel", ENCODER.unsubscribe),
        ("channel", lambda channel: ENCODER.publish(channel, b"")),
        ("channel", ENCODER.channel),
        ("channel", lambda channel: ENCODER.event(channel, ENCODER.whoami())),
    ],
)
def test_names_at_the_limit_and_above(what: str, encode) -> None:
    assert encode(b"n" * 255).endswith(b"n" * 255 + b"\x18" * encode(b"").endswith(b"\x18"))
    with pytest.raises(ValueError, match=f"^{what} must have 0 to 255 bytes, not 256$"):
        encode(b"n" * 256)


@pytest.mark.parametrize("value", [-1, 256])
def test_numbers_that_do_not_fit_a_byte_are_refused(value: int) -> None:
    for what, encode in [
        ("ttl_type", lambda: ENCODER.insert(b"", 0, 0, value)),
        ("ttl_type", lambda: ENCODER.set(b"", b"", 0, value)),
        ("attribute", lambda: ENCODER.update(b"", value, 0, 0)),
        ("change", lambda: ENCODER.update(b"", 0, value, 0)),
    ]:
        with pytest.raises(ValueError, match=f"^{what} must be 0 to 255, not {value}$"):
            encode()


@pytest.mark.parametrize("value", [1.5, 2.0, "3", None])
def test_numbers_must_be_whole(value: object) -> None:
    for what, encode in [
        ("quota", partial(ENCODER.insert, b"", value, 0)),
        ("ttl", partial(ENCODER.set, b"", b"", value)),
        ("value", partial(ENCODER.update, b"", 0, 0, value)),
        ("ttl_type", partial(ENCODER.insert, b"", 0, 0, value)),
    ]:
        with pytest.raises(TypeError, match=f"^{what} must be a whole number, not {value!r}$"):
            encode()


@pytest.mark.parametrize("size", [0, 15, 17])
def test_an_id_of_the_wrong_size_is_refused(size: int) -> None:
    with pytest.raises(ValueError, match=f"^id must have 16 bytes, not {size}$"):
        ENCODER.connection(bytes(size))


def test_value_sizes_by_name() -> None:
    assert [ValueSize.named(f"uint{8 * size}") for size in (1, 2, 4, 8)] == list(ValueSize)
    assert ValueSize.named(ValueSize.UINT32) is ValueSize.UINT32
    for wrong in ("UINT8", "16", ""):
        with pytest.raises(ValueError, match=f"^value_size must be uint8, .* or uint64, not '{wrong}'$"):
            ValueSize.named(wrong)


@pytest.mark.parametrize(
    ("payload", "shown"),
    [
        (b"", "nothing"),
        (b"\0abc", "00 61 62 63"),
        (b"\x0a", "0a"),
        (b"\x20", "20"),
        (b"\x19", "19"),
        (b"\x19\0", "noth"),
    ],
)
def test_an_event_without_a_valid_request_is_refused(payload: bytes, shown: str) -> None:
    with pytest.raises(ValueError, match=f"^this is not a request: {shown}"):
        ENCODER.event(b"c", wire.Request(payload))
    for request in (payload, ENCODER.message(Opcode.EVENT, b"ch", payload)):
        with pytest.raises(ValueError, match=f"^this is not a request: {shown}"):
            Parser(U16).expect(request)


# ---- the parser


@pytest.mark.parametrize(("request_bytes", "data", "result"), ANSWERS)
def test_a_reply_in_every_cut(request_bytes: bytes, data: bytes, result: Any) -> None:
    assert fed(request_bytes, data) == result
    for cut in range(len(data)):
        parser = Parser(U16)
        parser.expect(request_bytes)
        assert parser.feed(data[:cut]) == []
        assert parser.feed(data[cut:]) == [Reply(Opcode(request_bytes[0]), result)]


def test_the_replies_of_this_test_cover_every_request() -> None:
    assert {request[0] for request, _, _ in ANSWERS} == set(Opcode)


@given(st.lists(st.sampled_from([*ANSWERS, *EVENTS]), max_size=8), st.data())
def test_any_replies_and_events_in_any_pieces(picked: list[tuple[Any, ...]], data: st.DataObject) -> None:
    parser = Parser(U16)
    expected: list[Reply | Event] = []
    for each in picked:
        if len(each) == 3:
            parser.expect(each[0])
            expected.append(Reply(Opcode(each[0][0]), each[2]))
        else:
            expected.append(each[1])
    stream = b"".join(each[-2] for each in picked)
    cuts = data.draw(st.lists(st.integers(0, len(stream)), max_size=10).map(sorted))
    received = [item for start, end in pairwise([0, *cuts, len(stream)]) for item in parser.feed(stream[start:end])]
    assert received == expected
    assert [type(item) for item in received] == [type(item) for item in expected]


@given(sizes, keys, st.data())
def test_every_value_size_round_trip(size: ValueSize, key: bytes, data: st.DataObject) -> None:
    """The fields of one message can be decoded from another that has the same fields."""
    number = st.integers(0, size.maximum)
    quota, ttl, value = data.draw(number), data.draw(number), data.draw(st.binary(max_size=255))
    encoder = Encoder(size)
    insert = encoder.insert(key, quota, ttl, TTLType.MINUTES)
    assert fed(encoder.query(key), b"\1" + insert[1 : 2 + 2 * size], size) == Query(quota, TTLType.MINUTES, ttl)
    buffer = encoder.set(b"", value, ttl, TTLType.HOURS)
    reply = b"\1" + buffer[1 : 2 + size] + buffer[3 + size :]
    assert fed(encoder.get(key), reply, size) == Get(TTLType.HOURS, ttl, value)
    assert Parser(size).feed(encoder.message(Opcode.EVENT, key, value)) == [Event(key, value)]
    listing = b"\1" + u64(1, 1, 1) + bytes((len(key), 1, 5)) + u64(9) + quota.to_bytes(size, "little") + key
    assert fed(encoder.list(), listing, size) == [ListEntry(key, KeyType.BUFFER, TTLType.MINUTES, 9, quota)]


def test_known_types_are_enum_members() -> None:
    (first, second, third) = fed(ENCODER.list(), KEY_LIST)
    assert isinstance(first.ttl_type, TTLType)
    assert isinstance(second.key_type, KeyType)
    assert type(third.ttl_type) is int
    told = fed(ENCODER.connection(ID), b"\1" + ID + b"\7\3" + record()[18:])
    assert (told.type, told.kind) == (7, 3)
    assert isinstance(fed(ENCODER.connection(ID), b"\1" + record()).kind, ConnectionKind)


def test_fixed_size_texts_may_be_cut_or_invalid() -> None:
    told = fed(ENCODER.connection(ID), b"\1" + record()[:19] + b"fe80:1234:5678:9" + record()[35:])
    assert told.ip == "fe80:1234:5678:9"
    told = fed(ENCODER.info(), b"\1" + bytes(416) + b"\xff1".ljust(16, b"\0"))
    assert told.version == "\\xff1"


def test_events_without_a_request() -> None:
    parser = Parser(U16)
    assert parser.feed(EVENTS[0][0] * 2) == [EVENTS[0][1]] * 2


def test_an_event_within_the_reply_to_an_event() -> None:
    """Between two statuses, where it is unambiguous."""
    parser = Parser(U16)
    parser.expect(ENCODER.event(b"c", ENCODER.publish(b"c", b"p")))
    assert parser.feed(b"\1" + EVENTS[0][0] + b"\1") == [EVENTS[0][1], Reply(Opcode.EVENT, Executed(True))]


@pytest.mark.parametrize(
    ("request_bytes", "data", "message"),
    [
        (b"", b"\1", "a reply without a request: 01"),
        (b"", b"\0\7", r"a reply without a request: 00 07"),
        (ENCODER.purge(b""), b"\1\1", "a reply without a request: 01"),
        (ENCODER.purge(b""), b"\2", "this is not the start of a reply or an event: 02"),
        (ENCODER.purge(b""), b"HTTP/1.1 400 B", r"this is not the start .*: 48 54 .* 34 30 30 \.\.\. \(14 bytes\)"),
        (ENCODER.event(b"", ENCODER.purge(b"")), b"\1\2", "this is not the start of the reply inside a reply to EVENT"),
        (ENCODER.event(b"", ENCODER.list()), b"\1\0", "a refused LIST: 00"),
        *((request, b"\0", f"a refused {Opcode(request[0]).name}: 00") for request in (
            ENCODER.list(), ENCODER.info(), ENCODER.stats(), ENCODER.connections(), ENCODER.channels(), ENCODER.whoami()
        )),
        (ENCODER.list(), b"\1" + u64(2**32 + 1), "4294967297 fragments, more than 4294967296: 01 00 00 00 01"),
        (ENCODER.stats(), b"\1" + u64(1, 2, 1), "fragment 2 instead of fragment 1: 02 00"),
        (ENCODER.channels(), b"\1" + u64(2, 1, 0, 1, 0), "fragment 1 instead of fragment 2: 01 00"),
        (ENCODER.list(), b"\1" + u64(1, 1, 65537), "65537 entries in a fragment are more than 65536: 01 00"),
        (ENCODER.connections(), b"\1" + u64(1, 1, 65537), "65537 entries in a fragment"),
        (ENCODER.channel(b""), b"\1" + u64(2**32 + 1), "4294967297 subscribers, more than"),
    ],
)  # fmt: skip
def test_invalid_replies_are_protocol_errors(request_bytes: bytes, data: bytes, message: str) -> None:
    parser = Parser(U16)
    if request_bytes:
        parser.expect(request_bytes)
    with pytest.raises(ProtocolError, match=f"^{message}"):
        parser.feed(data)
    with pytest.raises(ProtocolError, match=f"^{message}"):  # and there is no way back
        parser.feed(EVENTS[0][0])


def test_counts_at_their_limits() -> None:
    entries = wire.FRAGMENT_ENTRIES_MAX
    reply = b"\1" + u64(1, 1, entries) + (b"\1" + u64(1, 2, 3)) * entries + b"c" * entries
    assert fed(ENCODER.channels(), reply) == [ChannelEntry(b"c", 1, 2, 3)] * entries
    parser = Parser(U16)
    parser.expect(ENCODER.channel(b""))
    assert parser.feed(b"\1" + u64(wire.COUNT_MAX)) == []
    many = b"\1" + u64(3000) + (ID + u64(1, 2, 3)) * 3000
    assert fed(ENCODER.channel(b""), many) == [Subscriber(ID, 1, 2, 3)] * 3000


@pytest.mark.parametrize("head", [b"\1\4" + bytes(8), b"\x19\0"])
def test_a_value_at_the_limit_and_above(head: bytes) -> None:
    def parser() -> Parser:
        made = Parser(ValueSize.UINT64, value_max=5)
        made.expect(Encoder(ValueSize.UINT64).get(b""))
        return made

    assert len(parser().feed(head + u64(5) + b"12345")) == 1
    with pytest.raises(ProtocolError, match=r"^a value of 6 bytes is longer than 5: "):
        parser().feed(head + u64(6))


def seconds(request: bytes, stream: bytes, piece: int) -> float:
    parser = Parser(U16)
    parser.expect(request)
    items: list[Reply | Event] = []
    with own_time() as taken:
        for at in range(0, len(stream), piece):
            items += parser.feed(stream[at : at + piece])
    assert isinstance(items[-1], Reply)
    return taken()


def key_list(fragments: int) -> bytes:
    pieces = [b"\1", u64(fragments)]
    for number in range(1, fragments + 1):
        pieces += [u64(number, 100), (b"\7\0\4" + u64(9) + b"\2\0") * 100, b"keykey." * 100]
    return b"".join(pieces)


@pytest.mark.parametrize("piece", [1, 1000])
def test_a_listing_in_pieces_takes_linear_time(piece: int) -> None:
    """Ten times as much takes some ten times as long; it would be a hundred times if bytes were scanned again."""
    short, long = key_list(15 * min(piece, 10)), key_list(150 * min(piece, 10))
    best = [min(seconds(ENCODER.list(), stream, piece) for _ in range(3)) for stream in (short, long)]
    assert best[1] < 40 * best[0]


def test_a_long_value_in_pieces_takes_linear_time() -> None:
    def reply(size: int) -> bytes:
        return b"\1\4" + bytes(4) + size.to_bytes(4, "little") + bytes(size)

    def taken(size: int) -> float:
        parser = Parser(ValueSize.UINT32)
        parser.expect(ENCODER.get(b""))
        stream = reply(size)
        with own_time() as taken:
            for at in range(len(stream)):
                parser.feed(stream[at : at + 1])
        return taken()

    assert min(taken(300_000) for _ in range(3)) < 40 * min(taken(30_000) for _ in range(3))


def test_the_value_size_is_in_doubt_until_a_request_with_numbers_succeeds() -> None:
    """A request without numbers causes no doubt and ends none, nor does a refused one."""
    encoder = Encoder(ValueSize.UINT32)
    parser = wire.Parser(ValueSize.UINT32)
    for _ in range(2):
        assert parser.doubt == ""
        parser.expect(encoder.purge(b"k"))
        assert parser.doubt == ""
        parser.feed(b"\1")
    query = encoder.query(b"k")
    for request in (query, encoder.event(b"c", encoder.purge(b"k"))):
        doubting = wire.Parser(ValueSize.UINT32)
        doubting.expect(request)
        doubting.feed(b"\1")
        assert doubting.doubt == ": is its value_size uint32, as this client's?"
    for reply, doubt in ((b"\0", doubting.doubt), (b"\1", "")):
        parser.expect(encoder.insert(b"k", 1, 1))
        parser.feed(reply)
        parser.expect(query)
        assert parser.doubt == doubt
        parser.feed(b"\0")
