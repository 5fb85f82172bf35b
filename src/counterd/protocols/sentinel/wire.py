"""The client's side of the sentinel protocol: encodes requests and parses responses.

Floor 2 (ARCHITECTURE.md), pure Python: this file needs only the standard library and counterd.errors. The file uses no
sockets, and works without compiled modules. docs/protocols/sentinel.md has every layout. All integers on the wire are
signed and big-endian. Encoders raise ValueError or TypeError for invalid arguments; the parser raises ProtocolError.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, NamedTuple, TypeAlias, TypeVar

from counterd.errors import ProtocolError

if TYPE_CHECKING:
    from collections.abc import Iterable

PORT = 18730  # TCP, by default
LENGTH_SIZE = 2  # bytes of the length at the beginning; the length counts the bytes after itself
REQUEST_HEAD = 5  # bytes after the length: xid and type
RESPONSE_HEAD = 6  # bytes after the length: xid, type and status
FRAME_MAX = 1024  # bytes, including the length
REST_MAX = FRAME_MAX - LENGTH_SIZE  # the highest value of the length
NAMESPACE_MAX = REST_MAX - REQUEST_HEAD - 4  # bytes of UTF-8
VALUES_MAX = REST_MAX - REQUEST_HEAD - 16  # bytes of all values of a PARAM, including their tags
LEASE_MAX = (1 << 31) - 1  # the most milliseconds in the response to a KEEP
_SHOWN = 12  # bytes of a response that an error shows

_LENGTH = struct.Struct(">H")
_HEAD = struct.Struct(">Hib")
_PING = struct.Struct(">Hibi")
_FLOW = struct.Struct(">Hibqi?")
_PARAM = struct.Struct(">Hibqii")
_TOKEN = struct.Struct(">Hibq")
_RESPONSE = struct.Struct(">ibb")
_I32 = struct.Struct(">i")
_I32_PAIR = struct.Struct(">ii")
_I64 = struct.Struct(">q")

_T = TypeVar("_T")


class MessageType(IntEnum):
    """The types of requests.

    The first three types are those of Sentinel 1.8; docs/protocols/sentinel.md defines the others.
    """

    PING = 0
    FLOW = 1
    PARAM = 2
    ACQUIRE = 3
    RELEASE = 4
    KEEP = 5


class Status(IntEnum):
    """The status of a response."""

    BAD_REQUEST = -4
    TOO_MANY_REQUESTS = -2
    FAIL = -1
    OK = 0
    BLOCKED = 1
    SHOULD_WAIT = 2
    NO_RULE = 3
    NO_REFERENCE_RULE = 4  # exists in the real protocol; counterd never answers with it
    NOT_AVAILABLE = 5
    RELEASE_OK = 6
    ALREADY_RELEASED = 7


class Tag(IntEnum):
    """The Java type of a value."""

    INTEGER = 0
    LONG = 1
    BYTE = 2
    DOUBLE = 3
    FLOAT = 4
    SHORT = 5
    BOOLEAN = 6
    STRING = 7


# ---- values ----


@dataclass(frozen=True)
class Typed:
    """A value with an explicit Java type: Typed(Tag.LONG, 5)."""

    tag: Tag
    value: bool | int | float | str | bytes


Value: TypeAlias = bool | int | float | str | bytes | Typed

_WHOLE = {Tag.INTEGER: struct.Struct(">bi"), Tag.LONG: struct.Struct(">bq")}
_WHOLE |= {Tag.BYTE: struct.Struct(">bb"), Tag.SHORT: struct.Struct(">bh")}
_FLOATING = {Tag.DOUBLE: struct.Struct(">bd"), Tag.FLOAT: struct.Struct(">bf")}
# In Java all NaNs are equal, so each type has one encoding of NaN.
_NAN = {Tag.DOUBLE: bytes.fromhex("03 7ff8000000000000"), Tag.FLOAT: bytes.fromhex("04 7fc00000")}
_STRING = struct.Struct(">bi")


def encode_value(value: Value) -> bytes:
    """Encodes a value of a PARAM: its tag and its bytes. A server considers values equal if their encodings are equal.

    A value that is not Typed gets the type that a Java client most likely sends: bool is Boolean; int is Integer, or
    Long if it does not fit; float is Double; str (in UTF-8) and bytes are String. All NaNs of a type have one encoding.
    """
    if isinstance(value, Typed):
        return _encode_typed(Tag(value.tag), value.value)
    if isinstance(value, bool):
        return _encode_typed(Tag.BOOLEAN, value)
    if isinstance(value, int):
        return _encode_typed(Tag.INTEGER if -(1 << 31) <= value < 1 << 31 else Tag.LONG, value)
    return _encode_typed(Tag.DOUBLE if isinstance(value, float) else Tag.STRING, value)


def _encode_typed(tag: Tag, value: object) -> bytes:
    if tag == Tag.BOOLEAN:
        return bytes((tag, _of(tag, value, bool)))
    if tag == Tag.STRING:
        text = value.encode() if isinstance(value, str) else _of(tag, value, bytes)
        if len(text) > VALUES_MAX - _STRING.size:
            raise ValueError(f"a STRING must have 0 to {VALUES_MAX - _STRING.size} bytes, not {len(text)}")
        return _STRING.pack(tag, len(text)) + text
    if isinstance(value, bool):
        raise TypeError(f"not a value for {tag.name}: {value!r}")
    try:
        if tag in _WHOLE:
            return _WHOLE[tag].pack(tag, _of(tag, value, int))
        number = float(value) if isinstance(value, int) else _of(tag, value, float)
        return _NAN[tag] if math.isnan(number) else _FLOATING[tag].pack(tag, number)
    except (struct.error, OverflowError):
        raise ValueError(f"{value} is out of range for {tag.name}") from None


def _of(tag: Tag, value: object, kind: type[_T]) -> _T:
    if not isinstance(value, kind):
        raise TypeError(f"not a value for {tag.name}: {value!r}")
    return value


# ---- requests ----


def frame(xid: int, type: int, data: bytes = b"", *, length: int | None = None) -> bytes:
    """Makes any request, valid or not, for tests and tools.

    length: the length in the head; by default the right one.
    """
    return _HEAD.pack(REQUEST_HEAD + len(data) if length is None else length, xid, type) + data


def ping(xid: int, namespace: bytes) -> bytes:
    """Encodes a PING, which registers the connection in a namespace of 0 to 1,013 bytes. xid: -2^31 to 2^31-1, as in
    all encoders.

    The server refuses a blank namespace; this encoder does not check that.
    """
    size = len(namespace)
    if size > NAMESPACE_MAX:
        raise ValueError(f"namespace must have 0 to {NAMESPACE_MAX} bytes, not {size}")
    try:
        return _PING.pack(REQUEST_HEAD + 4 + size, xid, MessageType.PING, size) + namespace
    except struct.error:
        _check(32, xid=xid)
        raise


def flow(xid: int, flow_id: int, count: int, priority: bool = False) -> bytes:
    """Encodes a FLOW, which asks whether count calls may pass now. priority: whether the server may also tell the calls
    to wait for the next window.

    The server refuses a flow_id or a count that is not positive. The encoders do not check the signs.
    """
    return _ask(MessageType.FLOW, xid, flow_id, count, priority)


def param_flow(xid: int, flow_id: int, count: int, values: Iterable[Value]) -> bytes:
    """Encodes a PARAM, which asks whether count calls with each of these values may pass now.

    The encoded values can have at most 1,001 bytes.
    """
    encoded = [encode_value(value) for value in values]
    data = b"".join(encoded)
    if len(data) > VALUES_MAX:
        raise ValueError(f"values must have 0 to {VALUES_MAX} bytes, not {len(data)}")
    try:
        head = _PARAM.pack(REQUEST_HEAD + 16 + len(data), xid, MessageType.PARAM, flow_id, count, len(encoded))
    except struct.error:
        _check(64, flow_id=flow_id)
        _check(32, count=count, xid=xid)
        raise
    return head + data


def acquire(xid: int, flow_id: int, count: int, prioritized: bool = False) -> bytes:
    """Encodes an ACQUIRE, which asks for a token for count concurrent calls. counterd ignores prioritized."""
    return _ask(MessageType.ACQUIRE, xid, flow_id, count, prioritized)


def release(xid: int, token_id: int) -> bytes:
    """Encodes a RELEASE, which gives a token back."""
    return _name(MessageType.RELEASE, xid, token_id)


def keep(xid: int, token_id: int) -> bytes:
    """Encodes a KEEP, which renews the lease of a token. From then on this connection owns the token."""
    return _name(MessageType.KEEP, xid, token_id)


def _ask(type: MessageType, xid: int, flow_id: int, count: int, urgent: bool) -> bytes:
    try:
        return _FLOW.pack(REQUEST_HEAD + 13, xid, type, flow_id, count, urgent)
    except struct.error:
        _check(64, flow_id=flow_id)
        _check(32, count=count, xid=xid)
        raise


def _name(type: MessageType, xid: int, token_id: int) -> bytes:
    try:
        return _TOKEN.pack(REQUEST_HEAD + 8, xid, type, token_id)
    except struct.error:
        _check(64, token_id=token_id)
        _check(32, xid=xid)
        raise


def _check(bits: int, **numbers: int) -> None:
    """Raises an error that shows the number that does not fit, because struct's error does not."""
    limit = 1 << bits - 1
    for what, value in numbers.items():
        if not isinstance(value, int):
            raise TypeError(f"{what} must be a whole number, not {value!r}")
        if not -limit <= value < limit:
            raise ValueError(f"{what} must be {-limit} to {limit - 1}, not {value}")


# ---- responses ----


class Response(NamedTuple):
    """A response of the server. type and status are plain numbers, because a server may send any. Fields that belong to
    other types are 0.

    remaining: for FLOW and PARAM. How many more calls could pass; -1 if the server does not say.
    wait_ms: for FLOW and PARAM. How long the calls have to wait.
    token_id: for ACQUIRE. It is not 0 if the token was granted, and may be negative.
    left_ms: for KEEP. The remaining lease; LEASE_MAX also means any longer time.
    connected: for PING. How many connections are registered in the namespace.
    """

    xid: int
    type: int
    status: int
    remaining: int = 0
    wait_ms: int = 0
    token_id: int = 0
    left_ms: int = 0
    connected: int = 0


_DATA_SIZES = {
    MessageType.PING: _I32.size,
    MessageType.FLOW: _I32_PAIR.size,
    MessageType.PARAM: _I32_PAIR.size,
    MessageType.ACQUIRE: _I64.size,
    MessageType.RELEASE: 0,
    MessageType.KEEP: _I32.size,
}
# Statuses that require the data. With other statuses a server may omit the data, as Sentinel's server does.
_TELLING = (Status.OK, Status.SHOULD_WAIT)


class ResponseParser:
    """Splits a stream into responses.

    The stream can arrive in any pieces; the time is linear even if it arrives byte by byte.
    """

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[Response]:
        """Takes the next bytes from the server. Returns the responses that are complete.

        Raises ProtocolError for an impossible length, at the first byte that shows it, and for data that does not fit
        the type. After that the connection must be closed and the parser discarded.
        """
        kept = self._buffer
        kept += data if kept else b""
        buffer = kept or data  # usually no bytes were kept, so none are copied
        size = len(buffer)
        responses: list[Response] = []
        start = 0
        while (body := start + LENGTH_SIZE) <= size:
            length: int = _LENGTH.unpack_from(buffer, start)[0]
            if not RESPONSE_HEAD <= length <= REST_MAX:
                raise ProtocolError(f"a response of {length} bytes: {_shown(buffer[start:])}")
            if size < body + length:
                break
            responses.append(_decode(buffer, body, length))
            start = body + length
        if kept:
            del kept[:start]
        else:
            kept += data[start:]
        return responses


def _decode(buffer: bytes | bytearray, start: int, length: int) -> Response:
    """Decodes a response of `length` bytes that begins at `start` and has a complete head."""
    xid, type, status = _RESPONSE.unpack_from(buffer, start)
    data = start + RESPONSE_HEAD
    size = length - RESPONSE_HEAD
    if size != _DATA_SIZES.get(type, size) and (size or status in _TELLING):
        shown = _shown(buffer[start : start + length])
        raise ProtocolError(f"a response of type {type} with {size} bytes of data: {shown}")
    if not size:
        return Response(xid, type, status)
    if type in (MessageType.FLOW, MessageType.PARAM):
        return Response(xid, type, status, *_I32_PAIR.unpack_from(buffer, data))
    if type == MessageType.ACQUIRE:
        return Response(xid, type, status, token_id=_I64.unpack_from(buffer, data)[0])
    if type == MessageType.KEEP:
        return Response(xid, type, status, left_ms=_I32.unpack_from(buffer, data)[0])
    if type == MessageType.PING:
        return Response(xid, type, status, connected=_I32.unpack_from(buffer, data)[0])
    return Response(xid, type, status)


def _shown(data: bytes | bytearray) -> str:
    shown = data[:_SHOWN].hex(" ") or "nothing"
    return shown if len(data) <= _SHOWN else f"{shown} ... ({len(data)} bytes)"
