"""The client's side of the counter protocol: encodes requests and decodes responses.

Floor 2 (ARCHITECTURE.md), pure Python: this file needs only the standard library and counterd.errors. The file uses no
sockets, and works without compiled modules. Section names are those of the protocol document, "Counter support". All
integers on the wire are unsigned and big-endian. Encoders raise ValueError for invalid arguments; decoders raise
ProtocolError.
"""

from __future__ import annotations

import re
import struct
from enum import IntEnum, IntFlag
from typing import TYPE_CHECKING, NamedTuple
from unicodedata import category

from counterd.errors import (
    Cancelled,
    InvalidArguments,
    NotAcquired,
    NotAvailable,
    NotFound,
    OutOfMemory,
    ProtocolError,
    ServerError,
    UnknownCommand,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

PORT = 11215  # TCP, by default
REQUEST_MAGIC = 0x90
RESPONSE_MAGIC = 0x91
HEADER_SIZE = 12  # bytes, of requests and responses
U32_MAX = 0xFFFFFFFF
NAME_MAX = 65535  # bytes
ITEMS_MAX = 16  # of a Take
KEY_MAX = 255  # bytes
WEIGHT_MAX = 1000
LIMIT_MAX = (1 << 31) - 1
PERIOD_MAX_US = 316_224_000 * 1_000_000  # ten years
TAKE_MAX = 10 + KEY_MAX + 24 + NAME_MAX  # bytes of a Take's body
TOKEN_SIZE = 12  # bytes
CONNECTION_NAME_MAX = 64  # bytes of the name of a connection
BODY_MAX = 10 + NAME_MAX  # bytes of a request's body: an Acquire with the longest name
# Bytes of a response's body. Dump entries and the reference's Stats stay below 64 KiB + 14; more is allowed for longer
# statistics. The limit bounds the memory that a faulty server can make a client use.
RESPONSE_BODY_MAX = 1 << 20

# Printable characters that look like nothing: the space, four fillers of Hangul, and an empty pattern of Braille.
_BLANK = " \u115f\u1160\u3164\uffa0\u2800"

_HEADER = struct.Struct(">BBBBII")
_U32 = struct.Struct(">I")
# Layouts of requests up to the name: magic, opcode, flags and a reserved byte; body length, opaque; the fixed part of
# the body. Each with the size of that part.
_GET, _GET_FIXED = struct.Struct(">4sIIH"), 2
_ACQUIRE, _ACQUIRE_FIXED = struct.Struct(">4sIIIIH"), 10
_RELEASE, _RELEASE_FIXED = struct.Struct(">4sIIIH"), 6
_STAT = struct.Struct(">HH")
_DUMP_ENTRY = struct.Struct(">IIH")
# Of a Take: its header, the head of its body, that of each item up to the name, and its replies.
_TAKE_HEADER = struct.Struct(">4sII")
_TAKE, _PERMIT, _RATE = struct.Struct(">BBHIH"), struct.Struct(">BBHII"), struct.Struct(">BBHIIIQ")
_TAKE_AGAIN = struct.Struct(">8sI4sI")  # of a whole frame: the opaque and the time to wait, with what is before each
_GRANT, _SHORTAGE, _SETTLE = struct.Struct(">Q"), struct.Struct(">BIII"), struct.Struct(">QIH")
# Of a Resume that presents a token, and of the reply to a Resume.
_PRESENT, _RESUME_REPLY = struct.Struct(f">I{TOKEN_SIZE}sI"), struct.Struct(f">{TOKEN_SIZE}sI")


class Opcode(IntEnum):
    """The opcodes of requests. See section "Opcodes"."""

    NOOP = 0x00
    GET = 0x01
    ACQUIRE = 0x02
    RELEASE = 0x03
    STATS = 0x10
    DUMP = 0x11
    TAKE = 0x20  # this one and those below: extensions of counterd
    CANCEL = 0x21
    SETTLE = 0x22
    RESUME = 0x23
    GOODBYE = 0x24
    WHO = 0x25
    HELD = 0x26


_GET_HEAD, _ACQUIRE_HEAD, _RELEASE_HEAD, _TAKE_HEAD = (
    bytes((REQUEST_MAGIC, opcode, 0, 0)) for opcode in (Opcode.GET, Opcode.ACQUIRE, Opcode.RELEASE, Opcode.TAKE)
)


class Flag(IntFlag):
    """The third byte of a request's header.

    Only counterd knows these flags; the protocol document has none, and other servers ignore them.
    """

    LIMITS = 0x01  # of a Dump: each entry includes the limit
    EVERYWHERE = 0x02  # of a Get or a Dump: what is in use at all daemons that share a counter's limit


class Status(IntEnum):
    """The statuses of responses. See section "Response status"."""

    NO_ERROR = 0x00
    NOT_FOUND = 0x01
    INVALID_ARGUMENTS = 0x04
    RESOURCE_NOT_AVAILABLE = 0x21
    NOT_ACQUIRED = 0x22
    CANCELLED = 0x23
    UNKNOWN_COMMAND = 0x81
    OUT_OF_MEMORY = 0x82


# The bodies of error responses, as in the reference implementation.
ERROR_TEXTS: dict[Status, str] = {
    Status.NOT_FOUND: "Not found",
    Status.INVALID_ARGUMENTS: "Invalid arguments",
    Status.RESOURCE_NOT_AVAILABLE: "Resource not available",
    Status.NOT_ACQUIRED: "Not acquired",
    Status.CANCELLED: "Cancelled",
    Status.UNKNOWN_COMMAND: "Unknown command",
    Status.OUT_OF_MEMORY: "OutOfMemory",
}

ERRORS: dict[int, type[ServerError]] = {
    Status.NOT_FOUND: NotFound,
    Status.INVALID_ARGUMENTS: InvalidArguments,
    Status.RESOURCE_NOT_AVAILABLE: NotAvailable,
    Status.NOT_ACQUIRED: NotAcquired,
    Status.CANCELLED: Cancelled,
    Status.UNKNOWN_COMMAND: UnknownCommand,
    Status.OUT_OF_MEMORY: OutOfMemory,
}


_OVER_LIMIT = re.compile(r"More than the limit of the server: ([0-9]{1,10})")


def limit_of(text: str) -> int | None:
    """Returns the server's limit in the text of a refused Acquire (section "Limits"), or None."""
    found = _OVER_LIMIT.fullmatch(text)
    return int(found[1]) if found else None


def server_error(status: int, text: str) -> ServerError:
    """Makes the error for a status byte: a class of its own, or ServerError for an unknown status."""
    return ERRORS.get(status, ServerError)(status, text)


class Response(NamedTuple):
    """A response (section "Response header"). opcode and status are plain numbers, because a server may send any
    byte."""

    opcode: int
    status: int
    opaque: int
    body: bytes


class DumpEntry(NamedTuple):
    """One counter of a Dump.

    consumption: how many permits are held now.
    peak: the most permits that were held at the same time in the current stats window.
    limit: the maximum of the last Acquire; None if it was not requested, or if the server does not support it.
    everywhere: how many permits are held at all daemons that share the counter's limit, as far as this one knows; None
    if the limit is not shared.
    """

    name: bytes
    consumption: int
    peak: int
    limit: int | None = None
    everywhere: int | None = None

    @property
    def maximum(self) -> int:
        """The peak, under its former name."""
        return self.peak


class OnDeath(IntEnum):
    """What happens to the units taken of a rate when the connection ends before they are settled (section "Settle").

    FINAL: they stay taken, and cannot be settled. CHARGED: they stay taken. REFUNDED: they are given back.
    """

    FINAL = 0
    CHARGED = 1
    REFUNDED = 2


class Permit(NamedTuple):
    """An item of a Take: a number of permits of a counter that has this maximum."""

    name: bytes
    amount: int
    maximum: int


class Rate(NamedTuple):
    """An item of a Take: a number of units of a rate that allows `limit` units in a period, and `burst` units at once
    after a pause.

    limit: 0 means that the server has the numbers of the rate; then period_us and burst are 0 too. period_us:
    microseconds.
    """

    name: bytes
    amount: int
    limit: int = 0
    period_us: int = 0
    burst: int = 0
    on_death: OnDeath = OnDeath.FINAL


class Grant(NamedTuple):
    """The reply to a Take that was granted.

    number: rises with each grant of the server, even after a restart. left: how much is left of each item.
    """

    number: int
    left: tuple[int, ...]


class Shortage(NamedTuple):
    """The reply to a Take that was refused.

    item: the number of the first item of which too little was available. left: how much of it was available.
    most: its maximum, or the burst of the rate, as the server applies it. If this is less than the Take asks for, the
    Take can never be granted. retry_ms: after how many milliseconds the Take may succeed; None if the server does not
    know. text: a text for people.
    """

    item: int
    left: int
    most: int
    retry_ms: int | None
    text: str


class Resumption(NamedTuple):
    """The reply to a Resume: the token of the connection, and how many milliseconds the token is valid after the end of
    the connection."""

    token: bytes
    grace_ms: int


# ---- requests ----


def frame(
    opcode: int,
    opaque: int,
    body: bytes = b"",
    *,
    magic: int = REQUEST_MAGIC,
    flags: int = 0,
    reserved: int = 0,
    body_length: int | None = None,
) -> bytes:
    """Makes any frame, valid or not, for tests and tools (section "Request header").

    flags: the third byte, which is the Status in a response. body_length: the length in the header; by default that of
    the body.
    """
    length = len(body) if body_length is None else body_length
    return _HEADER.pack(magic, opcode, flags, reserved, length, opaque) + body


def noop(opaque: int) -> bytes:
    """Encodes a request that has no effect but gets a reply (section "Noop").

    opaque: 0 to 2^32-1, as in all encoders.
    """
    return _request(Opcode.NOOP, opaque)


def get(opaque: int, name: bytes, everywhere: bool = False) -> bytes:
    """Encodes a request for the consumption of a counter (section "Get").

    name: 1 to 65,535 bytes, as in all encoders. everywhere: whether to ask for the consumption at all daemons that
    share the counter's limit, which only counterd supports.
    """
    size = _name_length(name)
    if everywhere:
        return frame(Opcode.GET, opaque, size.to_bytes(2, "big") + name, flags=Flag.EVERYWHERE)
    try:
        return _GET.pack(_GET_HEAD, _GET_FIXED + size, opaque, size) + name
    except struct.error:
        _check_u32(opaque=opaque)
        raise


def acquire(opaque: int, name: bytes, resources: int, maximum: int) -> bytes:
    """Encodes a request for resources, 0 to 2^32-1, of a counter with this maximum (section "Acquire").

    This encoder accepts resources that are 0 or above the maximum; the server refuses them.
    """
    size = _name_length(name)
    try:
        return _ACQUIRE.pack(_ACQUIRE_HEAD, _ACQUIRE_FIXED + size, opaque, resources, maximum, size) + name
    except struct.error:
        _check_u32(permits=resources, maximum=maximum, opaque=opaque)
        raise


def release(opaque: int, name: bytes, resources: int) -> bytes:
    """Encodes a request that gives resources, 0 to 2^32-1, back (section "Release")."""
    size = _name_length(name)
    try:
        return _RELEASE.pack(_RELEASE_HEAD, _RELEASE_FIXED + size, opaque, resources, size) + name
    except struct.error:
        _check_u32(permits=resources, opaque=opaque)
        raise


def stats(opaque: int) -> bytes:
    """Encodes a request for the server's statistics (section "Stats")."""
    return _request(Opcode.STATS, opaque)


def dump(opaque: int, limits: bool = False, everywhere: bool = False) -> bytes:
    """Encodes a request for all counters. Each counter has a response, and the last response has an empty body (section
    "Dump").

    limits: whether to ask for each counter's limit too. everywhere: whether to ask, with the limits, for what all
    daemons use of a counter whose limit they share. Only counterd supports these.
    """
    return _request(Opcode.DUMP, opaque, flags=Flag.LIMITS * limits | Flag.EVERYWHERE * everywhere)


def take(
    opaque: int,
    items: Sequence[Permit | Rate],
    wait_ms: int = 0,
    *,
    key: bytes = b"",
    weight: int = 1,
    priority: int = 0,
) -> bytes:
    """Encodes a request for several items: all of them or none (section "Take").

    items: 1 to 16 items. wait_ms: how many milliseconds it may wait for them; 0 means that it does not wait. key: the
    fairness key, up to 255 bytes; if it is empty, the connection is the key. weight: 1 to 1,000, the share of the key.
    priority: 0 to 255; a higher priority is served first.
    """
    if not 1 <= len(items) <= ITEMS_MAX:
        raise ValueError(f"a Take has 1 to {ITEMS_MAX} items, not {len(items)}")
    for what, value, least, most in (("weight", weight, 1, WEIGHT_MAX), ("priority", priority, 0, 255)):
        if not least <= value <= most:
            raise ValueError(f"{what} must be {least} to {most}, not {value}")
    if len(key) > KEY_MAX:
        raise ValueError(f"key must have 0 to {KEY_MAX} bytes, not {len(key)}")
    try:
        pieces = [_TAKE.pack(len(items), priority, weight, wait_ms, len(key)), key]
    except struct.error:
        _check_u32(wait_ms=wait_ms)
        raise
    for item in items:
        pieces += (_item(item), item.name)
    body = b"".join(pieces)
    if len(body) > TAKE_MAX:
        raise ValueError(f"a Take can have at most {TAKE_MAX} bytes, not {len(body)}: its names are too long")
    try:
        return _TAKE_HEADER.pack(_TAKE_HEAD, len(body), opaque) + body
    except struct.error:
        _check_u32(opaque=opaque)
        raise


def take_again(opaque: int, taken: bytes, wait_ms: int) -> bytes:
    """Asks for the same as `taken`, which take() has encoded, with another opaque and time to wait."""
    head, _, order, _ = _TAKE_AGAIN.unpack_from(taken)
    return _TAKE_AGAIN.pack(head, opaque, order, wait_ms) + taken[_TAKE_AGAIN.size :]


def _item(item: Permit | Rate) -> bytes:
    """Encodes an item of a Take, without its name."""
    size = _name_length(item.name)
    if isinstance(item, Permit):
        try:
            return _PERMIT.pack(1, 0, size, item.amount, item.maximum)
        except struct.error:
            _check_u32(permits=item.amount, maximum=item.maximum)
            raise
    _check_u32(units=item.amount, burst=item.burst)
    if (item.limit, item.period_us, item.burst) == (0, 0, 0):
        return _PERMIT.pack(3, item.on_death, size, item.amount, 0)
    if not 1 <= item.limit <= LIMIT_MAX:
        raise ValueError(f"limit must be 1 to {LIMIT_MAX}, not {item.limit}")
    if not 1 <= item.period_us <= PERIOD_MAX_US:
        raise ValueError(f"period_us must be 1 to {PERIOD_MAX_US}, not {item.period_us}")
    return _RATE.pack(2, item.on_death, size, item.amount, item.limit, item.burst, item.period_us)


def cancel(opaque: int, take: int) -> bytes:
    """Encodes a request that ends the wait of the Take with this opaque (section "Cancel")."""
    _check_u32(take=take, opaque=opaque)
    return frame(Opcode.CANCEL, opaque, _U32.pack(take))


def settle(opaque: int, grant: int, name: bytes, used: int) -> bytes:
    """Encodes a request that replaces the units that a grant took of a rate by the units that were used (section
    "Settle"). grant: Grant.number."""
    size = _name_length(name)
    _check_u32(used=used, opaque=opaque)
    return frame(Opcode.SETTLE, opaque, _SETTLE.pack(grant, used, size) + name)


def resume(opaque: int, grace_ms: int, token: bytes = b"", attempt: int = 0) -> bytes:
    """Encodes a request for a token, with which another connection can resume this one, or a request that presents a
    token (section "Resume").

    grace_ms: how long the token will be valid after the end of the connection, 1 to 2^32-1. attempt: if the reply to a
    Resume is lost, the same token can be presented again with a higher number that differs in the low 16 bits only.
    """
    _check_u32(grace_ms=grace_ms, attempt=attempt, opaque=opaque)
    if grace_ms == 0:
        raise ValueError("grace_ms must be at least 1")
    if not token:
        return frame(Opcode.RESUME, opaque, _U32.pack(grace_ms))
    if len(token) != TOKEN_SIZE:
        raise ValueError(f"token must have {TOKEN_SIZE} bytes, not {len(token)}")
    return frame(Opcode.RESUME, opaque, _PRESENT.pack(grace_ms, token, attempt))


def goodbye(opaque: int) -> bytes:
    """Encodes a request that gives back everything that the connection holds, and its token (section "Goodbye")."""
    return _request(Opcode.GOODBYE, opaque)


def who(opaque: int, name: str) -> bytes:
    """Encodes a request that states the name of the connection: printable, 1 to 64 bytes of UTF-8 (section "Who")."""
    encoded = name.encode("utf-8")
    if not 1 <= len(encoded) <= CONNECTION_NAME_MAX:
        raise ValueError(f"a connection's name must have 1 to {CONNECTION_NAME_MAX} bytes, not {len(encoded)}")
    if not is_legible(name):
        raise ValueError(f"a connection's name must be printable, with something to be seen, not {name!a}")
    _check_u32(opaque=opaque)
    return frame(Opcode.WHO, opaque, encoded)


def is_legible(name: str) -> bool:
    """Returns whether a name can be printed and seen: not only spaces, combining marks and letters that are blank."""
    return name.isprintable() and any(letter not in _BLANK and category(letter)[0] != "M" for letter in name)


def held(opaque: int, name: bytes) -> bytes:
    """Encodes a question for how much of a counter this connection holds (section "Held")."""
    size = _name_length(name)
    _check_u32(opaque=opaque)
    return frame(Opcode.HELD, opaque, size.to_bytes(2, "big") + name)


def _request(opcode: Opcode, opaque: int, *, flags: int = 0) -> bytes:
    _check_u32(opaque=opaque)
    return frame(opcode, opaque, flags=flags)


def _check_u32(**numbers: int) -> None:
    """Raises an error that shows the number that does not fit, because struct's error does not."""
    for what, value in numbers.items():
        if not isinstance(value, int):
            raise TypeError(f"{what} must be a whole number, not {value!r}")
        if not 0 <= value <= U32_MAX:
            raise ValueError(f"{what} must be 0 to {U32_MAX}, not {value}")


def _name_length(name: bytes) -> int:
    if not 1 <= len(name) <= NAME_MAX:
        raise ValueError(f"name must have 1 to {NAME_MAX} bytes, not {len(name)}")
    return len(name)


# ---- responses ----


class ResponseParser:
    """Splits a stream into responses.

    The stream can arrive in any pieces; the time is linear even if it arrives byte by byte.
    """

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[Response]:
        """Takes the next bytes from the server. Returns the responses that are complete.

        Raises ProtocolError for a wrong magic or a body above RESPONSE_BODY_MAX, at the first byte that shows it. After
        that the stream cannot be parsed, so the connection must be closed and the parser discarded.
        """
        kept = self._buffer
        kept += data if kept else b""
        buffer = kept or data  # usually nothing was kept, and nothing is copied
        size = len(buffer)
        responses: list[Response] = []
        start = 0
        unpack, append, new = _HEADER.unpack_from, responses.append, tuple.__new__  # faster than calling Response()
        while (body := start + HEADER_SIZE) <= size:
            magic, opcode, status, _, length, opaque = unpack(buffer, start)
            if magic != RESPONSE_MAGIC:
                break
            if length > RESPONSE_BODY_MAX:
                raise ProtocolError(f"a response with a body of {length} bytes: {_shown(buffer[start:])}")
            if size < body + length:
                break
            append(new(Response, (opcode, status, opaque, bytes(buffer[body : body + length]))))
            start = body + length
        if start < size and buffer[start] != RESPONSE_MAGIC:
            raise ProtocolError(f"this is not the start of a response: {_shown(buffer[start:])}")
        if kept:
            del kept[:start]
        else:
            kept += data[start:]
        return responses


def decode_consumption(body: bytes) -> int:
    """Decodes the number in a successful response to Get (the consumption), Acquire (the granted resources) or Held."""
    if len(body) != _U32.size:
        raise ProtocolError(f"expected 4 bytes with a number, not {_shown(body)}")
    number: int = _U32.unpack(body)[0]
    return number


def decode_grant(body: bytes) -> Grant:
    """Decodes the reply to a Take that was granted."""
    if len(body) < _GRANT.size or len(body) % 4:
        raise ProtocolError(f"expected a grant, not {_shown(body)}")
    count = (len(body) - _GRANT.size) // 4
    (number,) = _GRANT.unpack_from(body)
    return Grant(number, struct.unpack_from(f">{count}I", body, _GRANT.size))


def decode_shortage(body: bytes) -> Shortage:
    """Decodes the reply to a Take that was refused because too little of an item was available."""
    if len(body) < _SHORTAGE.size:
        raise ProtocolError(f"expected the item that was not available, not {_shown(body)}")
    item, left, most, retry_ms = _SHORTAGE.unpack_from(body)
    text = body[_SHORTAGE.size :].decode("utf-8", "backslashreplace")
    return Shortage(item, left, most, None if retry_ms == U32_MAX else retry_ms, text)


def decode_resumption(body: bytes) -> Resumption:
    """Decodes the reply to a Resume."""
    if len(body) != _RESUME_REPLY.size:
        raise ProtocolError(f"expected a token, not {_shown(body)}")
    return Resumption(*_RESUME_REPLY.unpack(body))


def decode_stats(body: bytes) -> dict[str, str]:
    """Decodes the statistics in a successful response to Stats, in the server's order (section "Stats")."""
    items = {}
    start = 0
    while start < len(body):
        name_start = start + _STAT.size
        if name_start > len(body):
            raise ProtocolError(f"statistics end within a length: {_shown(body[start:])}")
        name_length, value_length = _STAT.unpack_from(body, start)
        value_start = name_start + name_length
        end = value_start + value_length
        if end > len(body):
            raise ProtocolError(f"statistics end within an item: {_shown(body[start:])}")
        # The document promises ASCII only for values; other bytes are shown escaped.
        name = body[name_start:value_start].decode("ascii", "backslashreplace")
        items[name] = body[value_start:end].decode("ascii", "backslashreplace")
        start = end
    return items


def decode_dump_entry(body: bytes) -> DumpEntry:
    """Decodes a counter from a response to Dump. The last response, which is empty, has no counter (section "Dump").

    The length of the body shows whether the entry includes the limit, and what is held everywhere.
    """
    if len(body) < _DUMP_ENTRY.size:
        raise ProtocolError(f"a dump entry of less than 10 bytes: {_shown(body)}")
    consumption, peak, name_length = _DUMP_ENTRY.unpack_from(body)
    rest = body[_DUMP_ENTRY.size :]
    if len(rest) == name_length:
        return DumpEntry(rest, consumption, peak)
    if len(rest) == name_length + _U32.size:
        return DumpEntry(rest[:name_length], consumption, peak, *_U32.unpack_from(rest, name_length))
    if len(rest) == name_length + 2 * _U32.size:
        return DumpEntry(rest[:name_length], consumption, peak, *struct.unpack_from(">II", rest, name_length))
    raise ProtocolError(f"a dump entry whose name has {len(rest)} bytes, not {name_length}: {_shown(body)}")


def _shown(data: bytes | bytearray) -> str:
    shown = data[:HEADER_SIZE].hex(" ") or "nothing"
    return shown if len(data) <= HEADER_SIZE else f"{shown} ... ({len(data)} bytes)"
