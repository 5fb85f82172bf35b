"""The client's side of the counter protocol: encodes requests and decodes responses.

Floor 2, pure Python: needs the standard library and counterd.errors only, uses no sockets, and works without compiled
modules. Section names are those of the protocol document, "Counter support". All integers on the wire are unsigned and
big-endian. Encoders raise ValueError for invalid arguments; decoders raise ProtocolError.
"""

from __future__ import annotations

import struct
from enum import IntEnum, IntFlag
from typing import NamedTuple

from counterd.errors import (
    InvalidArguments,
    NotAcquired,
    NotAvailable,
    NotFound,
    OutOfMemory,
    ProtocolError,
    ServerError,
    UnknownCommand,
)

PORT = 11215  # TCP, by default
REQUEST_MAGIC = 0x90
RESPONSE_MAGIC = 0x91
HEADER_SIZE = 12  # bytes, of requests and responses
U32_MAX = 0xFFFFFFFF
NAME_MAX = 65535  # bytes
BODY_MAX = 10 + NAME_MAX  # bytes of a request's body: an Acquire with the longest name
# Bytes of a response's body. Dump entries and the reference's Stats stay below 64 KiB + 14; more is allowed for longer
# statistics. The limit bounds the memory that a faulty server can make a client use.
RESPONSE_BODY_MAX = 1 << 20

_HEADER = struct.Struct(">BBBBII")
_U32 = struct.Struct(">I")
# Layouts of requests up to the name: magic, opcode, flags and a reserved byte; body length, opaque; the fixed part of
# the body. Each with the size of that part.
_GET, _GET_FIXED = struct.Struct(">4sIIH"), 2
_ACQUIRE, _ACQUIRE_FIXED = struct.Struct(">4sIIIIH"), 10
_RELEASE, _RELEASE_FIXED = struct.Struct(">4sIIIH"), 6
_STAT = struct.Struct(">HH")
_DUMP_ENTRY = struct.Struct(">IIH")


class Opcode(IntEnum):
    """Section "Opcodes"."""

    NOOP = 0x00
    GET = 0x01
    ACQUIRE = 0x02
    RELEASE = 0x03
    STATS = 0x10
    DUMP = 0x11


_GET_HEAD, _ACQUIRE_HEAD, _RELEASE_HEAD = (
    bytes((REQUEST_MAGIC, opcode, 0, 0)) for opcode in (Opcode.GET, Opcode.ACQUIRE, Opcode.RELEASE)
)


class Flag(IntFlag):
    """The third byte of a request's header. The flags are counterd's own: the document has none, others ignore them."""

    LIMITS = 0x01  # of a Dump: each entry includes the limit


class Status(IntEnum):
    """Section "Response status"."""

    NO_ERROR = 0x00
    NOT_FOUND = 0x01
    INVALID_ARGUMENTS = 0x04
    RESOURCE_NOT_AVAILABLE = 0x21
    NOT_ACQUIRED = 0x22
    UNKNOWN_COMMAND = 0x81
    OUT_OF_MEMORY = 0x82


# The bodies of error responses, as in the reference implementation.
ERROR_TEXTS: dict[Status, str] = {
    Status.NOT_FOUND: "Not found",
    Status.INVALID_ARGUMENTS: "Invalid arguments",
    Status.RESOURCE_NOT_AVAILABLE: "Resource not available",
    Status.NOT_ACQUIRED: "Not acquired",
    Status.UNKNOWN_COMMAND: "Unknown command",
    Status.OUT_OF_MEMORY: "OutOfMemory",
}

ERRORS: dict[int, type[ServerError]] = {
    Status.NOT_FOUND: NotFound,
    Status.INVALID_ARGUMENTS: InvalidArguments,
    Status.RESOURCE_NOT_AVAILABLE: NotAvailable,
    Status.NOT_ACQUIRED: NotAcquired,
    Status.UNKNOWN_COMMAND: UnknownCommand,
    Status.OUT_OF_MEMORY: OutOfMemory,
}


def server_error(status: int, text: str) -> ServerError:
    """Makes the error for a status byte: of its own class, or ServerError itself for an unknown status."""
    return ERRORS.get(status, ServerError)(status, text)


class Response(NamedTuple):
    """One response (section "Response header"). opcode and status are plain numbers, as a server may send any byte."""

    opcode: int
    status: int
    opaque: int
    body: bytes


class DumpEntry(NamedTuple):
    """One counter of a Dump.

    consumption: permits that are held now.
    peak: the most that were held at once in the current stats window.
    limit: the maximum of the last Acquire; None if it was not requested, or the server does not support it.
    """

    name: bytes
    consumption: int
    peak: int
    limit: int | None = None

    @property
    def maximum(self) -> int:
        """The peak, under its former name."""
        return self.peak


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

    flags: the third byte, which is the Status in a response. body_length: of the header; by default that of the body.
    """
    length = len(body) if body_length is None else body_length
    return _HEADER.pack(magic, opcode, flags, reserved, length, opaque) + body


def noop(opaque: int) -> bytes:
    """A request that has no effect and gets a reply (section "Noop"). opaque: 0 to 2^32-1, as in all encoders."""
    return _request(Opcode.NOOP, opaque)


def get(opaque: int, name: bytes) -> bytes:
    """Asks for the consumption of a counter (section "Get"). name: 1 to 65,535 bytes, as in all encoders."""
    size = _name_length(name)
    try:
        return _GET.pack(_GET_HEAD, _GET_FIXED + size, opaque, size) + name
    except struct.error:
        _check_u32(opaque=opaque)
        raise


def acquire(opaque: int, name: bytes, resources: int, maximum: int) -> bytes:
    """Asks for resources, 0 to 2^32-1, of a counter with this maximum (section "Acquire").

    The server, not this encoder, refuses resources that are 0 or above the maximum.
    """
    size = _name_length(name)
    try:
        return _ACQUIRE.pack(_ACQUIRE_HEAD, _ACQUIRE_FIXED + size, opaque, resources, maximum, size) + name
    except struct.error:
        _check_u32(resources=resources, maximum=maximum, opaque=opaque)
        raise


def release(opaque: int, name: bytes, resources: int) -> bytes:
    """Gives resources, 0 to 2^32-1, back (section "Release")."""
    size = _name_length(name)
    try:
        return _RELEASE.pack(_RELEASE_HEAD, _RELEASE_FIXED + size, opaque, resources, size) + name
    except struct.error:
        _check_u32(resources=resources, opaque=opaque)
        raise


def stats(opaque: int) -> bytes:
    """Asks for the server's statistics (section "Stats")."""
    return _request(Opcode.STATS, opaque)


def dump(opaque: int, limits: bool = False) -> bytes:
    """Asks for all counters: one response for each, then one with an empty body (section "Dump").

    limits: asks for each counter's limit as well, which only counterd supports.
    """
    return _request(Opcode.DUMP, opaque, flags=Flag.LIMITS if limits else 0)


def _request(opcode: Opcode, opaque: int, *, flags: int = 0) -> bytes:
    _check_u32(opaque=opaque)
    return frame(opcode, opaque, flags=flags)


def _check_u32(**numbers: int) -> None:
    """Raises an error that names the number that does not fit, because struct's error does not."""
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
    """Splits a stream into responses. The stream may arrive in any pieces; the time is linear even byte by byte."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[Response]:
        """Takes the next bytes from the server. Returns the responses that are complete now.

        Raises ProtocolError for a wrong magic or a body above RESPONSE_BODY_MAX, at the first byte that shows it. The
        stream cannot be parsed after that, so the connection must be closed and the parser discarded.
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
            raise ProtocolError(f"not the start of a response: {_shown(buffer[start:])}")
        if kept:
            del kept[:start]
        else:
            kept += data[start:]
        return responses


def decode_consumption(body: bytes) -> int:
    """Decodes the number in a successful response to Get (the consumption) or Acquire (the granted resources)."""
    if len(body) != _U32.size:
        raise ProtocolError(f"expected 4 bytes with a number, not {_shown(body)}")
    number: int = _U32.unpack(body)[0]
    return number


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
    """Decodes a counter from a response to Dump, except the empty last one (section "Dump").

    The length of the body shows if the entry includes the limit.
    """
    if len(body) < _DUMP_ENTRY.size:
        raise ProtocolError(f"a dump entry of less than 10 bytes: {_shown(body)}")
    consumption, peak, name_length = _DUMP_ENTRY.unpack_from(body)
    rest = body[_DUMP_ENTRY.size :]
    if len(rest) == name_length:
        return DumpEntry(rest, consumption, peak)
    if len(rest) == name_length + _U32.size:
        return DumpEntry(rest[:name_length], consumption, peak, _U32.unpack_from(rest, name_length)[0])
    raise ProtocolError(f"a dump entry whose name has {len(rest)} bytes, not {name_length}: {_shown(body)}")


def _shown(data: bytes | bytearray) -> str:
    shown = data[:HEADER_SIZE].hex(" ") or "nothing"
    return shown if len(data) <= HEADER_SIZE else f"{shown} ... ({len(data)} bytes)"
