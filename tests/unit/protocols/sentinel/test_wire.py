"""The sentinel wire module: requests byte for byte, values as Java encodes them, responses cut into any pieces."""

from __future__ import annotations

import math
import re
import struct
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from counterd.errors import ProtocolError
from counterd.protocols.sentinel import wire
from counterd.protocols.sentinel.wire import MessageType, Response, ResponseParser, Status, Tag, Typed, encode_value
from kit.machine import own_time

if TYPE_CHECKING:
    from collections.abc import Callable

PAGE = Path(__file__).parents[4] / "docs" / "protocols" / "sentinel.md"
I32, I64 = (-(1 << 31), (1 << 31) - 1), (-(1 << 63), (1 << 63) - 1)
i32, i64, i8 = st.integers(*I32), st.integers(*I64), st.integers(-128, 127)


def response(xid: int, type: int, status: int, data: bytes = b"") -> bytes:
    return struct.pack(">Hibb", 6 + len(data), xid, type, status) + data


# What a server may send, and what it tells.
ANSWERS = [
    ("000a 00000000 00 00 00000001", Response(0, MessageType.PING, Status.OK, connected=1)),
    ("0006 00000000 00 ff", Response(0, MessageType.PING, Status.FAIL)),
    ("000e 00000001 01 00 00000009 00000000", Response(1, MessageType.FLOW, Status.OK, remaining=9)),
    ("000e 7fffffff 01 02 00000000 00000064", Response(I32[1], MessageType.FLOW, Status.SHOULD_WAIT, wait_ms=100)),
    ("000e 80000000 01 01 00000000 00000000", Response(I32[0], MessageType.FLOW, Status.BLOCKED)),
    ("0006 00000001 01 fc", Response(1, MessageType.FLOW, Status.BAD_REQUEST)),
    ("000e ffffffff 02 00 ffffffff 00000000", Response(-1, MessageType.PARAM, Status.OK, remaining=-1)),
    ("000e 00000003 03 00 fffffffffffffffe", Response(3, MessageType.ACQUIRE, Status.OK, token_id=-2)),
    ("000e 00000003 03 05 0000000000000000", Response(3, MessageType.ACQUIRE, Status.NOT_AVAILABLE)),
    ("0006 00000004 04 06", Response(4, MessageType.RELEASE, Status.RELEASE_OK)),
    ("0006 00000004 04 07", Response(4, MessageType.RELEASE, Status.ALREADY_RELEASED)),
    ("000a 00000005 05 00 00000fa0", Response(5, MessageType.KEEP, Status.OK, left_ms=4000)),
    ("000a 00000005 05 03 00000000", Response(5, MessageType.KEEP, Status.NO_RULE)),
    ("0006 00000006 7f fc", Response(6, 127, Status.BAD_REQUEST)),
    ("0009 00000006 80 63 010203", Response(6, -128, 99)),
]
STREAM = b"".join(bytes.fromhex(data) for data, _ in ANSWERS)
TOLD = [told for _, told in ANSWERS]


# ---- requests


@pytest.mark.parametrize(
    ("request_bytes", "expected"),
    [
        (wire.ping(0, b"default"), "0010 00000000 00 00000007 64656661756c74"),
        (wire.ping(-1, b""), "0009 ffffffff 00 00000000"),
        (wire.flow(1, 101, 1), "0012 00000001 01 0000000000000065 00000001 00"),
        (wire.flow(I32[1], I64[1], I32[1], True), "0012 7fffffff 01 7fffffffffffffff 7fffffff 01"),
        (wire.flow(I32[0], I64[0], I32[0], priority=False), "0012 80000000 01 8000000000000000 80000000 00"),
        (wire.param_flow(2, 7, 1, [-2]), "001a 00000002 02 0000000000000007 00000001 00000001 00 fffffffe"),
        (
            wire.param_flow(2, 7, 3, (value for value in ("ab", True))),
            "001e 00000002 02 0000000000000007 00000003 00000002 07 00000002 6162 06 01",
        ),
        (wire.param_flow(2, 7, 1, []), "0015 00000002 02 0000000000000007 00000001 00000000"),
        (wire.acquire(3, 101, 5), "0012 00000003 03 0000000000000065 00000005 00"),
        (wire.acquire(3, 101, 5, prioritized=True), "0012 00000003 03 0000000000000065 00000005 01"),
        (wire.release(4, -2), "000d 00000004 04 fffffffffffffffe"),
        (wire.keep(5, 0x0102030405060708), "000d 00000005 05 0102030405060708"),
        (wire.frame(6, -1), "0005 00000006 ff"),
        (wire.frame(6, 9, b"xy", length=65535), "ffff 00000006 09 7879"),
    ],
)
def test_requests_byte_for_byte(request_bytes: bytes, expected: str) -> None:
    assert request_bytes == bytes.fromhex(expected)


@given(i32, i64, i32, st.booleans())
def test_decoding_an_encoded_request_gives_its_fields(xid: int, number: int, count: int, urgent: bool) -> None:
    for type, encode in ((MessageType.FLOW, wire.flow), (MessageType.ACQUIRE, wire.acquire)):
        assert struct.unpack(">Hibqi?", encode(xid, number, count, urgent)) == (18, xid, type, number, count, urgent)
    for type, name in ((MessageType.RELEASE, wire.release), (MessageType.KEEP, wire.keep)):
        assert struct.unpack(">Hibq", name(xid, number)) == (13, xid, type, number)


ENCODERS: list[tuple[str, tuple[int, int], Callable[[object], bytes]]] = [
    ("xid", I32, lambda value: wire.ping(value, b"n")),
    ("xid", I32, lambda value: wire.flow(value, 1, 1)),
    ("xid", I32, lambda value: wire.param_flow(value, 1, 1, [1])),
    ("xid", I32, lambda value: wire.acquire(value, 1, 1)),
    ("xid", I32, lambda value: wire.release(value, 1)),
    ("xid", I32, lambda value: wire.keep(value, 1)),
    ("flow_id", I64, lambda value: wire.flow(1, value, 1)),
    ("flow_id", I64, lambda value: wire.param_flow(1, value, 1, [1])),
    ("flow_id", I64, lambda value: wire.acquire(1, value, 1)),
    ("count", I32, lambda value: wire.flow(1, 1, value)),
    ("count", I32, lambda value: wire.param_flow(1, 1, value, [1])),
    ("count", I32, lambda value: wire.acquire(1, 1, value)),
    ("token_id", I64, lambda value: wire.release(1, value)),
    ("token_id", I64, lambda value: wire.keep(1, value)),
]


@pytest.mark.parametrize(("what", "ends", "encode"), ENCODERS)
def test_numbers_at_the_limit_and_outside(what: str, ends: tuple[int, int], encode: Callable[[object], bytes]) -> None:
    low, high = ends
    assert encode(low) != encode(high)
    for value in (low - 1, high + 1, 10**30):
        with pytest.raises(ValueError, match=f"^{what} must be {low} to {high}, not {value}$"):
            encode(value)
    for value in ("1", 1.0, None, b"1"):
        with pytest.raises(TypeError, match=f"^{what} must be a whole number, not {value!r}$"):
            encode(value)


def test_the_longest_requests() -> None:
    assert len(wire.ping(1, b"n" * wire.NAMESPACE_MAX)) == wire.FRAME_MAX == 1024
    with pytest.raises(ValueError, match=r"^namespace must have 0 to 1013 bytes, not 1014$"):
        wire.ping(1, b"n" * 1014)
    assert len(wire.param_flow(1, 1, 1, ["v" * 491, b"v" * 500])) == wire.FRAME_MAX
    with pytest.raises(ValueError, match=r"^values must have 0 to 1001 bytes, not 1002$"):
        wire.param_flow(1, 1, 1, ["v" * 492, b"v" * 500])
    assert len(wire.param_flow(1, 1, 1, ["v" * 996])) == wire.FRAME_MAX
    with pytest.raises(ValueError, match=r"^a STRING must have 0 to 996 bytes, not 998$"):
        wire.param_flow(1, 1, 1, ["\N{EURO SIGN}" * 332 + "vv"])


# ---- values


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (0, "00 00000000"),
        (I32[0], "00 80000000"),
        (I32[1], "00 7fffffff"),
        (I32[0] - 1, "01 ffffffff7fffffff"),
        (I32[1] + 1, "01 0000000080000000"),
        (I64[0], "01 8000000000000000"),
        (True, "06 01"),
        (False, "06 00"),
        (1.5, "03 3ff8000000000000"),
        (-0.0, "03 8000000000000000"),
        (-math.inf, "03 fff0000000000000"),
        (-math.nan, "03 7ff8000000000000"),
        (struct.unpack(">d", bytes.fromhex("7ff4000000000001"))[0], "03 7ff8000000000000"),
        ("", "07 00000000"),
        ("gr\N{LATIN SMALL LETTER U WITH DIAERESIS}n", "07 00000005 6772c3bc6e"),
        (b"\0\xff", "07 00000002 00ff"),
        (Typed(Tag.INTEGER, 5), "00 00000005"),
        (Typed(Tag.LONG, 5), "01 0000000000000005"),
        (Typed(Tag.BYTE, -128), "02 80"),
        (Typed(Tag.DOUBLE, 1), "03 3ff0000000000000"),
        (Typed(Tag.FLOAT, 1.1), "04 3f8ccccd"),
        (Typed(Tag.FLOAT, -math.nan), "04 7fc00000"),
        (Typed(Tag.FLOAT, math.inf), "04 7f800000"),
        (Typed(Tag.SHORT, -2), "05 fffe"),
        (Typed(Tag.BOOLEAN, True), "06 01"),
        (Typed(Tag.STRING, "a"), "07 00000001 61"),
        (Typed(Tag.STRING, b"a"), "07 00000001 61"),
        (Typed(5, 7), "05 0007"),  # a tag may be its number
    ],
)
def test_values_byte_for_byte(value: wire.Value, expected: str) -> None:
    assert encode_value(value) == bytes.fromhex(expected)


@pytest.mark.parametrize(
    ("value", "tag"),
    [
        (I64[1] + 1, "LONG"),
        (I64[0] - 1, "LONG"),
        (Typed(Tag.INTEGER, I32[1] + 1), "INTEGER"),
        (Typed(Tag.BYTE, 128), "BYTE"),
        (Typed(Tag.SHORT, -32769), "SHORT"),
        (Typed(Tag.DOUBLE, 10**400), "DOUBLE"),
        (Typed(Tag.FLOAT, 1e39), "FLOAT"),
    ],
)
def test_values_out_of_range(value: wire.Value, tag: str) -> None:
    with pytest.raises(ValueError, match=rf"^-?[0-9e+]+ is out of range for {tag}$"):
        encode_value(value)


@pytest.mark.parametrize(
    ("value", "tag"),
    [
        (None, "STRING"),
        (["a"], "STRING"),
        (Typed(Tag.INTEGER, 1.0), "INTEGER"),
        (Typed(Tag.LONG, True), "LONG"),
        (Typed(Tag.DOUBLE, "1"), "DOUBLE"),
        (Typed(Tag.FLOAT, False), "FLOAT"),
        (Typed(Tag.BOOLEAN, 1), "BOOLEAN"),
        (Typed(Tag.STRING, 1), "STRING"),
    ],
)
def test_values_of_another_type(value: object, tag: str) -> None:
    with pytest.raises(TypeError, match=rf"^not a value for {tag}: "):
        encode_value(value)


def test_values_that_cannot_be_encoded_are_refused() -> None:
    with pytest.raises(ValueError, match=r"^8 is not a valid Tag$"):
        encode_value(Typed(8, 1))
    with pytest.raises(ValueError, match="surrogates not allowed"):
        encode_value("\ud800")


# ---- the parser


@pytest.mark.parametrize(("data", "told"), ANSWERS)
def test_a_response_in_every_cut(data: str, told: Response) -> None:
    stream = bytes.fromhex(data)
    for cut in range(len(stream)):
        parser = ResponseParser()
        assert parser.feed(stream[:cut]) == []
        assert parser.feed(stream[cut:]) == [told]


@settings(max_examples=50, deadline=None)
@given(st.lists(st.sampled_from(range(len(ANSWERS))), max_size=8), st.data())
def test_any_responses_in_any_pieces(picked: list[int], data: st.DataObject) -> None:
    stream = b"".join(bytes.fromhex(ANSWERS[index][0]) for index in picked)
    cuts = data.draw(st.lists(st.integers(0, len(stream)), max_size=10).map(sorted))
    parser = ResponseParser()
    received = [told for start, end in pairwise([0, *cuts, len(stream)]) for told in parser.feed(stream[start:end])]
    assert received == [TOLD[index] for index in picked]


@settings(max_examples=50, deadline=None)
@given(i32, i8, i8, st.binary(max_size=12), st.integers(1, 17))
def test_any_bytes_are_parsed_or_refused(xid: int, type: int, status: int, data: bytes, cut: int) -> None:
    """However they are cut, with the same result."""
    stream = response(xid, type, status, data)

    def outcome(*pieces: bytes) -> list[Response] | str:
        parser = ResponseParser()
        try:
            return [told for piece in pieces for told in parser.feed(piece)]
        except ProtocolError as error:
            return str(error)

    whole = outcome(stream)
    assert whole == outcome(stream[:cut], stream[cut:])
    if isinstance(whole, str):
        assert whole.startswith(f"a response of type {type} with {len(data)} bytes of data: ")
    else:
        assert [told[:3] for told in whole] == [(xid, type, status)]


def test_responses_byte_by_byte() -> None:
    parser = ResponseParser()
    assert [told for byte in STREAM for told in parser.feed(bytes((byte,)))] == TOLD


def test_the_longest_response() -> None:
    assert ResponseParser().feed(response(1, 9, 0, bytes(1016))) == [Response(1, 9, 0)]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ("0000", r"a response of 0 bytes: 00 00$"),
        ("0005 00", r"a response of 5 bytes: 00 05 00$"),
        ("03ff", r"a response of 1023 bytes: 03 ff$"),
        (b"HTTP/1.1 400 B".hex(), r"a response of 18516 bytes: 48 54 .* 34 30 30 \.\.\. \(14 bytes\)$"),
        ("0006 00000001 03 00", r"a response of type 3 with 0 bytes of data: 00 00 00 01 03 00$"),
        ("0006 00000001 01 02", r"a response of type 1 with 0 bytes of data: "),
        ("0007 00000001 00 ff 01", r"a response of type 0 with 1 bytes of data: "),
        ("0008 00000001 04 06 0102", r"a response of type 4 with 2 bytes of data: "),
        ("000f 00000001 02 00 00000000 00000000 00", r"a response of type 2 with 9 bytes of data: "),
    ],
)
def test_invalid_responses_are_protocol_errors(data: str, message: str) -> None:
    for before in (b"", STREAM):
        with pytest.raises(ProtocolError, match=f"^{message}"):
            ResponseParser().feed(before + bytes.fromhex(data))
    pieces = [bytes((byte,)) for byte in bytes.fromhex(data)]
    parser = ResponseParser()
    with pytest.raises(ProtocolError, match=r"^a response of "):
        list(map(parser.feed, pieces))


def test_parsing_byte_by_byte_takes_linear_time() -> None:
    """Ten times as much takes some ten times as long; it would be a hundred times if bytes were scanned again."""

    def seconds(stream: bytes) -> float:
        parser = ResponseParser()
        with own_time() as taken:
            for at in range(len(stream)):
                parser.feed(stream[at : at + 1])
        return taken()

    long = response(1, 9, 0, bytes(1016))
    assert min(seconds(long * 20) for _ in range(3)) < 40 * min(seconds(long * 2) for _ in range(3))


# ---- the page


def examples() -> list[tuple[str, bytes]]:
    """The direction and the bytes of each example in docs/protocols/sentinel.md."""
    lines = re.findall(r"^    ([<>]) ([0-9a-f ]+?)  +\S", PAGE.read_text("utf-8"), re.MULTILINE)
    return [(direction, bytes.fromhex(data)) for direction, data in lines]


def test_the_examples_in_the_documentation_are_right() -> None:
    token = -0x4C3E5A0FF2EA15A2
    assert [data for direction, data in examples() if direction == ">"] == [
        wire.ping(0, b"default"),
        wire.ping(1, b""),
        wire.flow(2, 101, 1),
        wire.flow(3, 101, 1, True),
        wire.param_flow(4, 102, 1, [5, "abc"]),
        wire.acquire(5, 103, 2),
        wire.keep(6, token),
        wire.release(7, token),
        wire.release(8, token),
        wire.frame(9, 9),
    ]
    assert ResponseParser().feed(b"".join(data for direction, data in examples() if direction == "<")) == [
        Response(0, MessageType.PING, Status.OK, connected=1),
        Response(1, MessageType.PING, Status.FAIL),
        Response(2, MessageType.FLOW, Status.OK, remaining=9),
        Response(3, MessageType.FLOW, Status.SHOULD_WAIT, wait_ms=100),
        Response(4, MessageType.PARAM, Status.OK, remaining=-1),
        Response(5, MessageType.ACQUIRE, Status.OK, token_id=token),
        Response(6, MessageType.KEEP, Status.OK, left_ms=4000),
        Response(7, MessageType.RELEASE, Status.RELEASE_OK),
        Response(8, MessageType.RELEASE, Status.ALREADY_RELEASED),
        Response(9, 9, Status.BAD_REQUEST),
    ]
