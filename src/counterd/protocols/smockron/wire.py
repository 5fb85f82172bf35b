"""The gatekeeper's side of the smockron protocol: encodes accounting messages and parses control messages, over ZMTP.

Floor 2 (ARCHITECTURE.md), pure Python: this file needs only the standard library and counterd.errors. The file uses no
sockets, and works without compiled modules. docs/protocols/smockron.md has every layout. The version of ZMTP is 3.1,
with the mechanism NULL. Encoders raise ValueError for invalid arguments; the parser raises ProtocolError.
"""

from __future__ import annotations

import struct
from collections import deque
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from counterd.errors import ProtocolError

PORT = 10004  # TCP, by default: for accounting; the next port is for control
GREETING_SIZE = 64
MESSAGE_MAX = 1 << 16  # the default limit for bytes of a message
FRAMES_MAX = 64  # of a message
DOMAIN_MAX = 255  # bytes of a domain's name
IDENTIFIER_MAX = 4096
CONTEXT_MAX = 16  # bytes of a PING
TTL_MAX = 65535  # tenths of a second
MORE, LONG, COMMAND, RESERVED = 1, 2, 4, 0xF8  # flags of a frame
_LENGTH = struct.Struct(">Q")
_VALUE_SIZE = struct.Struct(">I")
_SIGNATURE = b"\xff" + bytes(8) + b"\x7f"
_MECHANISM_AT = 12
_SHOWN = 12  # bytes of the stream that an error shows
_TIME_MAX = 16  # digits


class SocketType(str, Enum):
    """The two socket types of a gatekeeper (section "Handshake")."""

    PUB = "PUB"
    SUB = "SUB"


# The socket types that the peer of each type may have.
PEERS = {SocketType.PUB: (b"SUB", b"XSUB"), SocketType.SUB: (b"PUB", b"XPUB")}


class Status(str, Enum):
    """The outcome of a request (section "Accounting"). Only counterd has FORGET."""

    ACCEPTED = "ACCEPTED"
    DELAYED = "DELAYED"
    REJECTED = "REJECTED"
    FORGET = "FORGET"


class Word(str, Enum):
    """The words of a master (section "Control"). Only counterd has FORGET."""

    DELAY_UNTIL = "DELAY_UNTIL"
    FORGET = "FORGET"


class Control(NamedTuple):
    """A control message. time_ms: Unix time in milliseconds."""

    domain: bytes
    word: str
    identifier: bytes
    time_ms: int


class Command(NamedTuple):
    """A command of ZMTP."""

    name: bytes
    data: bytes


# ---- encoding --------------------------------------------------------------------------------------------------------


def greeting() -> bytes:
    """Encodes the greeting of a gatekeeper (section "Greeting")."""
    return (_SIGNATURE + b"\x03\x01" + b"NULL").ljust(GREETING_SIZE, b"\0")


def frame(body: bytes, flags: int = 0) -> bytes:
    """Encodes one frame, in the long form if necessary (section "Frames")."""
    if len(body) > 255:
        return bytes((flags | LONG,)) + _LENGTH.pack(len(body)) + body
    return bytes((flags, len(body))) + body


def message(*parts: bytes) -> bytes:
    """Encodes a message of these frames."""
    if not 1 <= len(parts) <= FRAMES_MAX:
        raise ValueError(f"a message has 1 to {FRAMES_MAX} frames, not {len(parts)}")
    return b"".join(frame(part, MORE) for part in parts[:-1]) + frame(parts[-1])


def command(name: bytes, data: bytes = b"") -> bytes:
    """Encodes a command."""
    return frame(bytes((len(name),)) + name + data, COMMAND)


def ready(kind: SocketType) -> bytes:
    """Encodes the command READY (section "Handshake")."""
    value = kind.value.encode()
    return command(b"READY", b"\x0bSocket-Type" + _VALUE_SIZE.pack(len(value)) + value)


def subscribe(prefix: bytes) -> bytes:
    """Encodes a subscription to all messages whose topic begins with the prefix (section "Subscriptions")."""
    return command(b"SUBSCRIBE", prefix)


def cancel(prefix: bytes) -> bytes:
    """Encodes the end of a subscription (section "Subscriptions")."""
    return command(b"CANCEL", prefix)


def ping(ttl_s: float, context: bytes = b"") -> bytes:
    """Encodes a PING, which asks for a PONG (section "Heartbeats").

    ttl_s: after how many seconds of silence the peer may close; 0 means never.
    """
    tenths = round(ttl_s * 10)
    if not 0 <= tenths <= TTL_MAX:
        raise ValueError(f"ttl_s must be from 0 to {TTL_MAX / 10}, not {ttl_s}")
    if len(context) > CONTEXT_MAX:
        raise ValueError(f"a context can have at most {CONTEXT_MAX} bytes, not {len(context)}")
    return command(b"PING", tenths.to_bytes(2, "big") + context)


def topic(domain: bytes) -> bytes:
    """Returns the topic of messages about a domain."""
    if len(domain) > DOMAIN_MAX or domain.endswith(b"\0"):
        raise ValueError(
            f"the name of a domain can have at most {DOMAIN_MAX} bytes and no NUL at its end, not {domain!r}"
        )
    return domain + b"\0"


def accounting(
    domain: bytes,
    status: Status,
    identifier: bytes,
    received_ms: int,
    delayed_until_ms: int | None = None,
    *,
    log_info: bytes = b"",
) -> bytes:
    """Encodes an accounting message (section "Accounting").

    Times are Unix time in milliseconds. DELAYED needs delayed_until_ms.
    """
    if len(identifier) > IDENTIFIER_MAX:
        raise ValueError(f"an identifier can have at most {IDENTIFIER_MAX} bytes, not {len(identifier)}")
    if (delayed_until_ms is None) == (status is Status.DELAYED):
        raise ValueError(f"delayed_until_ms is needed for DELAYED and only for DELAYED, not {delayed_until_ms}")
    times = [b"" if moment is None else _time(moment) for moment in (received_ms, delayed_until_ms)]
    return message(topic(domain), status.value.encode(), identifier, *times, log_info)


def _time(moment: int) -> bytes:
    if moment < 0:
        raise ValueError(f"times are milliseconds of Unix time, not {moment}")
    return b"%d" % moment


# ---- decoding --------------------------------------------------------------------------------------------------------


@dataclass
class Parser:
    """Parses the stream from a master. message_max: bytes of a message or command.

    minor: the minor version of ZMTP 3 that both sides speak, as soon as the peer's greeting is complete.
    """

    message_max: int = MESSAGE_MAX
    minor: int | None = None

    def __post_init__(self) -> None:
        self._rest = bytearray()
        self._parts: list[bytes] = []
        self._size = 0
        self._found: deque[Command | tuple[bytes, ...]] = deque()

    def feed(self, data: bytes | memoryview) -> list[Command | tuple[bytes, ...]]:
        """Returns the complete commands and messages, in order.

        A message is a tuple of frames. Raises ProtocolError.
        """
        self._rest += data
        if self.minor is None and not self._take_greeting():
            return []
        position = 0
        while (end := self._take_frame(position)) > position:
            position = end
        del self._rest[:position]
        found, self._found = list(self._found), deque()
        return found

    def _take_greeting(self) -> bool:
        start = bytes(self._rest[:GREETING_SIZE])
        if start[:1] != b"\xff"[: len(start)] or (len(start) >= 10 and not start[9] & 1):
            raise ProtocolError(f"these bytes are not ZMTP: {_shown(start)}")
        if len(start) > 10 and start[10] < 3:
            raise ProtocolError(f"the peer speaks version {start[10]} of ZMTP, not version 3")
        mechanism = start[_MECHANISM_AT : _MECHANISM_AT + 20]
        if len(mechanism) == 20 and mechanism.rstrip(b"\0") != b"NULL":
            raise ProtocolError(f"the peer wants the mechanism {mechanism.rstrip(bytes(1))!r}, not NULL")
        if len(start) < GREETING_SIZE:
            return False
        self.minor = self._rest[_MECHANISM_AT - 1] if self._rest[_MECHANISM_AT - 2] == 3 else 1
        del self._rest[:GREETING_SIZE]
        return True

    def _take_frame(self, position: int) -> int:
        """Takes a frame. Returns where the next frame begins, or the same position if more bytes are needed."""
        rest = self._rest
        if position == len(rest):
            return position
        flags = rest[position]
        if flags & RESERVED or flags & (COMMAND | MORE) == COMMAND | MORE:
            raise ProtocolError(f"this is not the beginning of a frame: {_shown(rest[position:])}")
        head = 9 if flags & LONG else 2
        if len(rest) < position + head:
            return position
        size = _LENGTH.unpack_from(rest, position + 1)[0] if flags & LONG else rest[position + 1]
        self._check(size)
        end = position + head + size
        if len(rest) < end:
            return position
        body = bytes(rest[position + head : end])
        if flags & COMMAND:
            self._found.append(_command(body))
            return end
        self._parts.append(body)
        self._size += size
        if not flags & MORE:
            self._found.append(tuple(self._parts))
            self._parts, self._size = [], 0
        return end

    def _check(self, size: int) -> None:
        if self._size + size > self.message_max:
            raise ProtocolError(f"a message of {self._size + size} bytes or more; the limit is {self.message_max}")
        if len(self._parts) >= FRAMES_MAX:
            raise ProtocolError(f"a message with more than {FRAMES_MAX} frames")


def _command(body: bytes) -> Command:
    if not body or len(body) < 1 + body[0] or not body[0]:
        raise ProtocolError(f"a command without a name: {_shown(body)}")
    return Command(body[1 : 1 + body[0]], body[1 + body[0] :])


def metadata(data: bytes) -> dict[str, bytes]:
    """Parses the properties of a READY command, by lower-case name. Raises ProtocolError."""
    found = {}
    position = 0
    while position < len(data):
        start = position + 1 + data[position]
        value = start + _VALUE_SIZE.size
        if not data[position] or len(data) < value:
            raise ProtocolError(f"the properties end too early: {_shown(data)}")
        position, name = value + _VALUE_SIZE.unpack_from(data, start)[0], data[position + 1 : start]
        if len(data) < position:
            raise ProtocolError(f"the properties end too early: {_shown(data)}")
        found[name.decode("latin-1").lower()] = data[value:position]
    return found


def error_reason(data: bytes) -> str:
    """Returns the text of an ERROR command."""
    return data[1 : 1 + data[0]].decode("latin-1") if data else ""


def pong(data: bytes) -> bytes:
    """Makes the reply to the data of a PING. Raises ProtocolError."""
    if not 2 <= len(data) <= 2 + CONTEXT_MAX:
        raise ProtocolError(f"a PING cannot have {len(data)} bytes: {_shown(data)}")
    return command(b"PONG", data[2:])


def control(parts: tuple[bytes, ...]) -> Control | None:
    """Parses a control message. Returns None if the message is unknown or malformed. See section "Control"."""
    if len(parts) < 4 or parts[1] not in (b"DELAY_UNTIL", b"FORGET"):
        return None
    whole = parts[3].partition(b".")[0]
    if not whole.isdigit() or len(whole) > _TIME_MAX or len(parts[2]) > IDENTIFIER_MAX:
        return None
    return Control(parts[0].removesuffix(b"\0"), parts[1].decode(), parts[2], int(whole))


def _shown(data: bytes | bytearray) -> str:
    shown = bytes(data[:_SHOWN]).hex(" ")
    return shown + (" ..." if len(data) > _SHOWN else "")
