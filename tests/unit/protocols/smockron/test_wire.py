"""The gatekeeper's side of the smockron protocol: the server reads what it encodes, and it parses what the server
sends."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conformance.smockron.engine import Pump, make_store
from counterd.errors import ProtocolError
from counterd.protocols.smockron import wire
from counterd.protocols.smockron.wire import Command, Control, Parser, SocketType, Status
from kit.pump import START_NS

BODIES = st.binary(max_size=300)


def parsed(*pieces: bytes) -> list[Any]:
    parser = Parser()
    return [found for piece in (wire.greeting(), *pieces) for found in parser.feed(piece)]


def refused(data: bytes, *, greeted: bool = True) -> str:
    with pytest.raises(ProtocolError) as caught:
        Parser().feed((wire.greeting() if greeted else b"") + data)
    return str(caught.value)


@given(st.lists(st.lists(BODIES, min_size=1, max_size=wire.FRAMES_MAX).map(tuple) | BODIES), st.data())
def test_encoded_frames_are_parsed_however_they_are_cut(
    found: list[tuple[bytes, ...] | bytes], data: st.DataObject
) -> None:
    stream = b"".join(wire.command(b"NAME", one) if isinstance(one, bytes) else wire.message(*one) for one in found)
    stream = wire.greeting() + stream
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=8)))
    parser = Parser()
    heard = []
    for start, end in zip([0, *cuts], [*cuts, len(stream)], strict=True):
        heard += parser.feed(stream[start:end])
    assert heard == [Command(b"NAME", one) if isinstance(one, bytes) else one for one in found]


@given(st.binary())
def test_any_bytes_are_parsed_or_refused(data: bytes) -> None:
    for greeted in (False, True):
        with contextlib.suppress(ProtocolError):
            Parser().feed((wire.greeting() if greeted else b"") + data)


@given(st.binary())
def test_any_metadata_are_read_or_refused(data: bytes) -> None:
    try:
        found = wire.metadata(data)
    except ProtocolError:
        return
    assert sum(1 + len(name) + 4 + len(value) for name, value in found.items()) <= len(data)


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"HTTP/1.1", "these bytes are not ZMTP: 48 54 54 50 2f 31 2e 31"),
        (b"\xff" + bytes(9), "these bytes are not ZMTP: ff 00 00 00 00 00 00 00 00 00"),
        (b"\xff" + bytes(8) + b"\x7f\x02", "the peer speaks version 2 of ZMTP, not version 3"),
        (wire.greeting()[:12] + b"CURVE".ljust(20, b"\0"), "the peer wants the mechanism b'CURVE', not NULL"),
    ],
)
def test_a_wrong_greeting_is_refused_at_its_first_wrong_byte(data: bytes, text: str) -> None:
    assert refused(data, greeted=False) == text


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"\x08\0", "this is not the beginning of a frame: 08 00"),
        (b"\x05\0", "this is not the beginning of a frame: 05 00"),
        (b"\x02" + b"\xff" * 8, "a message of 18446744073709551615 bytes or more; the limit is 65536"),
        (b"\x03" + bytes(6) + b"\x80\0" + bytes(1 << 15) + b"\x02" + bytes(6) + b"\x80\x01",
         "a message of 65537 bytes or more; the limit is 65536"),
        (b"\x01\0" * 64 + b"\0\0", "a message with more than 64 frames"),
        (b"\x04\0", "a command without a name: "),
        (b"\x04\x02\x05AB", "a command without a name: 05 41"),
        (b"\x04\x02\x00A", "a command without a name: 00 41"),
    ],
)  # fmt: skip
def test_invalid_frames_are_refused(data: bytes, text: str) -> None:
    assert refused(data).startswith(text)


@pytest.mark.parametrize(("version", "minor"), [(b"\3\0", 0), (b"\3\1", 1), (b"\3\2", 2), (b"\4\0", 1)])
def test_a_peer_of_a_higher_version_is_spoken_to_in_3_1(version: bytes, minor: int) -> None:
    parser = Parser()
    parser.feed(wire.greeting()[:10] + version + wire.greeting()[12:])
    assert parser.minor == minor


def test_commands_come_between_the_frames_of_a_message() -> None:
    ping = wire.ping(1.5, b"now")
    assert parsed(b"\x01\x01a" + ping + b"\x00\x01b") == [Command(b"PING", b"\x00\x0fnow"), (b"a", b"b")]


@pytest.mark.parametrize(
    ("parts", "found"),
    [
        ((b"api\0", b"DELAY_UNTIL", b"me", b"17"), Control(b"api", "DELAY_UNTIL", b"me", 17)),
        ((b"api", b"DELAY_UNTIL", b"me", b"17.9", b"more"), Control(b"api", "DELAY_UNTIL", b"me", 17)),
        ((b"api\0", b"FORGET", b"", b"0"), Control(b"api", "FORGET", b"", 0)),
        ((b"api\0", b"DELAY_UNTIL", b"me"), None),
        ((b"api\0", b"SOMETHING", b"me", b"17"), None),
        ((b"api\0", b"DELAY_UNTIL", b"me", b"nan"), None),
        ((b"api\0", b"DELAY_UNTIL", b"me", b""), None),
        ((b"api\0", b"DELAY_UNTIL", b"me", b"-1"), None),
        ((b"api\0", b"DELAY_UNTIL", b"me", b"1" * 17), None),
    ],
)
def test_control_messages_are_read(parts: tuple[bytes, ...], found: Control | None) -> None:
    assert wire.control(parts) == found


def test_invalid_arguments_are_refused() -> None:
    long = b"x" * (wire.IDENTIFIER_MAX + 1)
    for wrong in (
        lambda: wire.topic(b"n" * 256), lambda: wire.topic(b"n\0"), wire.message,
        lambda: wire.message(*[b""] * 65), lambda: wire.ping(-1), lambda: wire.ping(7000),
        lambda: wire.ping(0, b"c" * 17), lambda: wire.accounting(b"d", Status.ACCEPTED, long, 0),
        lambda: wire.accounting(b"d", Status.ACCEPTED, b"", 0, 1),
        lambda: wire.accounting(b"d", Status.DELAYED, b"", 0),
        lambda: wire.accounting(b"d", Status.ACCEPTED, b"", -1),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=r"."):
            wrong()


def test_a_pong_has_the_context_of_its_ping() -> None:
    (ping,) = parsed(wire.ping(0, b"now"))
    assert parsed(wire.pong(ping.data)) == [Command(b"PONG", b"now")]
    for wrong in (b"", b"1", b"1" * 19):
        with pytest.raises(ProtocolError):
            wire.pong(wrong)


def test_an_error_command_has_its_reason() -> None:
    assert wire.error_reason(b"\x03bad") == "bad"
    assert wire.error_reason(b"") == ""


@given(st.binary(max_size=400), st.integers(0, 10**12), st.binary(max_size=400))
def test_the_server_understands_encoded_messages_and_its_answers_are_parsed(
    identifier: bytes, late_ms: int, log: bytes
) -> None:
    bench = Pump(make_store())
    gate, ear = bench.connect_by_name("gate"), bench.connect_by_name("control")
    gate.send(wire.greeting() + wire.ready(SocketType.PUB))
    ear.send(wire.greeting() + wire.ready(SocketType.SUB) + wire.subscribe(wire.topic(b"day")))
    now_ms = 1_700_000_000_000
    received_ms = max(0, now_ms - late_ms)
    gate.send(wire.accounting(b"day", Status.ACCEPTED, identifier, received_ms, log_info=log))
    gate.send(wire.accounting(b"day", Status.DELAYED, identifier, received_ms, now_ms + 86_400_000))
    parser = Parser()
    answer, *told = parser.feed(bytes(ear.output))
    assert isinstance(answer, Command)
    assert wire.metadata(answer.data) == {"socket-type": b"PUB"}
    assert [wire.control(one) for one in told if isinstance(one, tuple)] == [
        Control(b"day", "DELAY_UNTIL", identifier, now_ms + days * 86_400_000) for days in (1, 2)
    ]
    assert bench.now_ns == START_NS
