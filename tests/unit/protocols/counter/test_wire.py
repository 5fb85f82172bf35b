"""The wire module: requests byte for byte, and responses from a stream that arrives in any pieces."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conformance import vectors
from counterd import errors
from counterd.errors import ProtocolError
from counterd.protocols.counter import wire
from counterd.protocols.counter.wire import DumpEntry, Opcode, Response, ResponseParser, Status
from kit.machine import own_time

u32 = st.integers(0, wire.U32_MAX)
names = st.binary(min_size=1, max_size=300)
responses = st.builds(Response, st.integers(0, 255), st.integers(0, 255), u32, st.binary(max_size=40))


def encoded(response: Response) -> bytes:
    return wire.frame(response.opcode, response.opaque, response.body, magic=wire.RESPONSE_MAGIC, flags=response.status)


# ---- requests


@pytest.mark.parametrize(
    ("request_bytes", "expected"),
    [
        (wire.noop(0xDEADBEEF), "90 00 0000 00000000 deadbeef"),
        (wire.get(1, b"ab"), "90 01 0000 00000004 00000001 0002 6162"),
        (wire.acquire(2, b"ab", 3, 0x04050607), "90 02 0000 0000000c 00000002 00000003 04050607 0002 6162"),
        (wire.release(3, b"\0", 0xFFFFFFFF), "90 03 0000 00000007 00000003 ffffffff 0001 00"),
        (wire.stats(0xFFFFFFFF), "90 10 0000 00000000 ffffffff"),
        (wire.dump(0), "90 11 0000 00000000 00000000"),
        (wire.dump(1, limits=True), "90 11 0100 00000000 00000001"),
        (
            wire.frame(0x7F, 5, b"xy", magic=0x55, flags=1, reserved=2, body_length=9),
            "55 7f 01 02 00000009 00000005 7879",
        ),
    ],
)
def test_requests_byte_for_byte(request_bytes: bytes, expected: str) -> None:
    assert request_bytes == bytes.fromhex(expected)


@given(u32, names, u32, u32)
def test_decoding_an_encoded_request_gives_its_fields(opaque: int, name: bytes, resources: int, maximum: int) -> None:
    request = wire.acquire(opaque, name, resources, maximum)
    fields = [int.from_bytes(request[start:end], "big") for start, end in pairwise((4, 8, 12, 16, 20, 22))]
    assert fields == [len(request) - wire.HEADER_SIZE, opaque, resources, maximum, len(name)]
    assert request[22:] == name


def test_the_longest_name() -> None:
    request = wire.acquire(1, b"n" * wire.NAME_MAX, 1, 1)
    assert len(request) == wire.HEADER_SIZE + wire.BODY_MAX
    assert wire.BODY_MAX == 65545


@pytest.mark.parametrize(
    "encode", [wire.get, lambda o, n: wire.acquire(o, n, 1, 1), lambda o, n: wire.release(o, n, 1)]
)
@pytest.mark.parametrize("length", [0, wire.NAME_MAX + 1])
def test_names_of_invalid_length_are_refused(encode, length: int) -> None:
    with pytest.raises(ValueError, match=f"^name must have 1 to 65535 bytes, not {length}$"):
        encode(1, b"n" * length)


@pytest.mark.parametrize("value", [-1, wire.U32_MAX + 1])
@pytest.mark.parametrize(
    ("what", "encode"),
    [
        ("permits", lambda value: wire.acquire(1, b"n", value, 1)),
        ("maximum", lambda value: wire.acquire(1, b"n", 1, value)),
        ("permits", lambda value: wire.release(1, b"n", value)),
        ("opaque", lambda value: wire.acquire(value, b"n", 1, 1)),
        ("opaque", lambda value: wire.release(value, b"n", 1)),
        ("opaque", lambda value: wire.get(value, b"n")),
        ("opaque", wire.noop),
        ("opaque", wire.stats),
        ("opaque", wire.dump),
    ],
)
def test_numbers_out_of_range_are_refused(what: str, encode, value: int) -> None:
    with pytest.raises(ValueError, match=f"^{what} must be 0 to 4294967295, not {value}$"):
        encode(value)


def test_error_texts_are_those_of_the_vectors() -> None:
    """The vectors' own test compares them with the reference, except OutOfMemory, which that cannot be made to send."""
    texts = {}
    for case in vectors.load("counter"):
        for step in case.steps:
            if isinstance(step.expect, bytes):
                for response in ResponseParser().feed(step.expect):
                    if response.status and response.opcode != Opcode.TAKE:
                        texts[response.status] = response.body.decode()
    others = (Status.OUT_OF_MEMORY, Status.CANCELLED)  # of which the second is a Take's
    assert texts == {status: text for status, text in wire.ERROR_TEXTS.items() if status not in others}
    assert wire.ERROR_TEXTS[Status.OUT_OF_MEMORY] == "OutOfMemory"


# ---- the parser


def test_a_response_is_parsed() -> None:
    data = bytes.fromhex("91 02 21 00 00000003 deadbeef 616263")
    assert ResponseParser().feed(data) == [Response(Opcode.ACQUIRE, 0x21, 0xDEADBEEF, b"abc")]


def test_responses_cut_in_two_and_byte_by_byte() -> None:
    expected = [Response(0, 0, 1, b""), Response(1, 1, 2, b"Not found"), Response(2, 0, 3, b"\0\0\0\1")]
    stream = b"".join(encoded(response) for response in expected)
    for cut in range(len(stream) + 1):
        parser = ResponseParser()
        assert parser.feed(stream[:cut]) + parser.feed(stream[cut:]) == expected
    parser = ResponseParser()
    assert [response for byte in stream for response in parser.feed(bytes([byte]))] == expected


@given(st.lists(responses, max_size=8), st.data())
def test_any_responses_in_any_pieces(expected: list[Response], data: st.DataObject) -> None:
    stream = b"".join(encoded(response) for response in expected)
    cuts = data.draw(st.lists(st.integers(0, len(stream)), max_size=10).map(sorted))
    parser = ResponseParser()
    received = [
        response for start, end in pairwise([0, *cuts, len(stream)]) for response in parser.feed(stream[start:end])
    ]
    assert received == expected


def test_a_response_is_complete_with_its_last_byte() -> None:
    parser = ResponseParser()
    data = encoded(Response(0x10, 0, 1, b"x" * 100))
    assert parser.feed(data[:-1]) == []
    assert len(parser.feed(data[-1:])) == 1


def test_a_wrong_magic_is_seen_at_its_first_byte() -> None:
    with pytest.raises(ProtocolError, match=r"^this is not the start of a response: 90$"):
        ResponseParser().feed(b"\x90")
    parser = ResponseParser()
    parser.feed(encoded(Response(0, 0, 1, b"")))
    with pytest.raises(ProtocolError, match=r"48 54 54 50 2f 31 2e 31 20 34 30 30 \.\.\. \(24 bytes\)$"):
        parser.feed(b"HTTP/1.1 400 Bad Request")


def test_a_body_at_the_limit_and_above() -> None:
    header = encoded(Response(0x10, 0, 1, b""))
    at_limit = header[:4] + wire.RESPONSE_BODY_MAX.to_bytes(4, "big") + header[8:]
    parser = ResponseParser()
    assert parser.feed(at_limit) == []
    assert parser.feed(bytes(wire.RESPONSE_BODY_MAX)) == [Response(0x10, 0, 1, bytes(wire.RESPONSE_BODY_MAX))]
    above = header[:4] + (wire.RESPONSE_BODY_MAX + 1).to_bytes(4, "big") + header[8:]
    with pytest.raises(ProtocolError, match="a body of 1048577 bytes: 91 10"):
        ResponseParser().feed(above)


def test_parsing_byte_by_byte_takes_linear_time() -> None:
    """One long response takes about as long as many short ones; it would take far longer if bytes were moved again."""

    def seconds(stream: bytes) -> float:
        parser = ResponseParser()
        with own_time() as taken:
            for index in range(len(stream)):
                parser.feed(stream[index : index + 1])
        return taken()

    size = 300_000
    long = encoded(Response(0x10, 0, 1, bytes(size)))
    short = encoded(Response(0x10, 0, 1, bytes(88))) * (size // 100)
    assert min(seconds(long) for _ in range(3)) < 5 * min(seconds(short) for _ in range(3))


# ---- bodies


@given(u32)
def test_a_consumption_is_decoded(number: int) -> None:
    assert wire.decode_consumption(number.to_bytes(4, "big")) == number


@pytest.mark.parametrize("body", [b"", b"\0\0\0", b"\0\0\0\0\0"])
def test_a_consumption_of_another_size(body: bytes) -> None:
    with pytest.raises(ProtocolError, match=f"not {body.hex(' ') or 'nothing'}$"):
        wire.decode_consumption(body)


@given(st.dictionaries(st.text("abc:_", max_size=9), st.text("0123.", max_size=9)))
def test_stats_are_decoded(items: dict[str, str]) -> None:
    body = b"".join(
        len(name).to_bytes(2, "big") + len(value).to_bytes(2, "big") + name.encode() + value.encode()
        for name, value in items.items()
    )
    decoded = wire.decode_stats(body)
    assert list(decoded.items()) == list(items.items())


def test_truncated_stats_are_a_protocol_error() -> None:
    body = bytes.fromhex("0002 0003 6162 313233")
    assert wire.decode_stats(body) == {"ab": "123"}
    for end in range(1, len(body)):
        with pytest.raises(ProtocolError, match="statistics end within"):
            wire.decode_stats(body + body[:end])


def test_stats_that_are_not_ascii_are_escaped() -> None:
    assert wire.decode_stats(bytes.fromhex("0001 0002 61 31ff")) == {"a": "1\\xff"}


@given(names, u32, u32)
def test_a_dump_entry_is_decoded(name: bytes, consumption: int, maximum: int) -> None:
    body = consumption.to_bytes(4, "big") + maximum.to_bytes(4, "big") + len(name).to_bytes(2, "big") + name
    assert wire.decode_dump_entry(body) == DumpEntry(name, consumption, maximum)
    assert wire.decode_dump_entry(body) == (name, consumption, maximum, None, None)


@given(names, u32, u32, u32)
def test_a_dump_entry_with_its_limit_is_decoded(name: bytes, consumption: int, maximum: int, limit: int) -> None:
    numbers = [number.to_bytes(4, "big") for number in (consumption, maximum, limit)]
    body = numbers[0] + numbers[1] + len(name).to_bytes(2, "big") + name + numbers[2]
    assert wire.decode_dump_entry(body) == DumpEntry(name, consumption, maximum, limit)
    assert wire.decode_dump_entry(body + numbers[0]) == DumpEntry(name, consumption, maximum, limit, consumption)


def test_a_dump_entry_with_another_length() -> None:
    body = bytes.fromhex("00000001 00000002 0002 6162 00000003")
    assert wire.decode_dump_entry(body) == DumpEntry(b"ab", 1, 2, 3)
    assert wire.decode_dump_entry(body + body[:4]) == DumpEntry(b"ab", 1, 2, 3, 1)
    for size in {*range(len(body) + 9)} - {len(body) - 4, len(body), len(body) + 4}:
        with pytest.raises(ProtocolError, match="a dump entry"):
            wire.decode_dump_entry((body + bytes(8))[:size])


# ---- items of a Take


def test_a_rate_that_the_server_defines_is_encoded() -> None:
    body = wire.take(1, [wire.Rate(b"r", 2, on_death=wire.OnDeath.REFUNDED)])[12:]
    assert body == bytes.fromhex("01 00 0001 00000000 0000  03 02 0001 00000002 00000000 72")
    with pytest.raises(ValueError, match="limit must be"):
        wire.take(1, [wire.Rate(b"r", 2, burst=1)])
    with pytest.raises(ValueError, match="period_us must be"):
        wire.take(1, [wire.Rate(b"r", 2, limit=1)])


# ---- errors


def test_every_error_status_has_its_own_class() -> None:
    assert wire.ERRORS.keys() == set(Status) - {Status.NO_ERROR} == wire.ERROR_TEXTS.keys()
    assert len(set(wire.ERRORS.values())) == len(wire.ERRORS)


@pytest.mark.parametrize(
    ("status", "expected"),
    [
        (0x01, errors.NotFound),
        (0x04, errors.InvalidArguments),
        (0x21, errors.NotAvailable),
        (0x22, errors.NotAcquired),
        (0x81, errors.UnknownCommand),
        (0x82, errors.OutOfMemory),
        (0x7F, errors.ServerError),
    ],
)
def test_server_error_picks_the_class(status: int, expected: type[errors.ServerError]) -> None:
    error = wire.server_error(status, "some text")
    assert type(error) is expected
    assert (error.status, error.text) == (status, "some text")


@pytest.mark.parametrize(
    ("text", "limit"),
    [
        ("More than the limit of the server: 5", 5),
        ("More than the limit of the server: 4294967295", wire.U32_MAX),
        ("More than the limit of the server", None),
        ("More than the limit of the server: %", None),
        ("Resource not available", None),
        ("", None),
    ],
)
def test_the_limit_in_the_text_of_a_refusal(text: str, limit: int | None) -> None:
    assert wire.limit_of(text) == limit


ITEMS = [wire.Permit(b"p", 1, 2), wire.Rate(b"r", 3, 4, 5, 6)]


@pytest.mark.parametrize("opaque", [0, 1, 0x01020304, wire.U32_MAX])
@pytest.mark.parametrize("wait_ms", [0, 1000, wire.U32_MAX])
@pytest.mark.parametrize("where", [{}, {"key": b"k" * 255, "weight": 1000, "priority": 255}])
def test_take_again_encodes_the_take_anew(opaque: int, wait_ms: int, where: dict[str, Any]) -> None:
    first = wire.take(7, ITEMS, 8, **where)
    assert wire.take_again(opaque, first, wait_ms) == wire.take(opaque, ITEMS, wait_ms, **where)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"opaque": -1}, "opaque must be 0 to 4294967295, not -1"),
        ({"wait_ms": 1 << 32}, "wait_ms must be 0 to 4294967295"),
        ({"items": [wire.Permit(b"p", -1, 2)]}, "permits must be 0 to 4294967295"),
        ({"items": [wire.Permit(b"p", 1, 1 << 32)]}, "maximum must be 0 to 4294967295"),
        ({"items": []}, "a Take has 1 to 16 items, not 0"),
        ({"weight": 0}, "weight must be 1 to 1000"),
        ({"priority": 256}, "priority must be 0 to 255"),
    ],
)
def test_an_out_of_range_number_of_a_take_is_named(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        wire.take(**{"opaque": 1, "items": ITEMS, **changes})


def test_a_number_of_a_take_of_the_wrong_type_is_named() -> None:
    with pytest.raises(TypeError, match="permits must be a whole number, not 'x'"):
        wire.take(1, [wire.Permit(b"p", "x", 2)])  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["a\nb", " ", "\u3164", "\u115f" * 21, "\u0301" * 32])
def test_an_invisible_name_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=r"^a connection's name must be printable, with something to be seen, not '"):
        wire.who(1, name)
