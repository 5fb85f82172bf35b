"""The client's side of the beanstalk protocol: encodes commands and parses replies.

Floor 2 (ARCHITECTURE.md), pure Python: this file needs only the standard library and counterd.errors. The file uses no
sockets, and works without compiled modules. Section names are those in docs/protocols/beanstalk.md. Encoders raise
ValueError for invalid arguments; the parser raises ProtocolError.
"""

from __future__ import annotations

import operator
import re
from enum import Enum
from typing import NamedTuple

from counterd.errors import ProtocolError

PORT = 11300  # TCP, by default
NAME_MAX = 200  # bytes of a tube's name
LINE_MAX = 224  # bytes of a command's line, with its CRLF
REPLY_LINE_MAX = 256  # bytes of a reply's line, with its CRLF: the longest has a name
NUMBER_MAX = (1 << 32) - 1  # of a priority, of seconds, of a count
ID_MAX = (1 << 64) - 1
TIMEOUT_MAX = (1 << 31) - 1  # seconds that a reserve may wait
BATCH_MAX = 1000  # jobs of a batch-reserve, a list-jobs or a search-jobs
NEEDLE_MAX = 1024  # bytes of the text of a search
STATES = ("ready", "reserved", "delayed", "buried")
URGENT = 1024  # priorities below count as urgent, in statistics
# The most bytes of a job's body, for all settings. It is also the default limit of a parser: a faulty server cannot
# make a client keep more bytes.
BODY_MAX = 1 << 30
KEPT_BODY_MAX = 256 << 20  # of a job in a journal

_NAME = re.compile(rb"[A-Za-z0-9+/;.$_()][A-Za-z0-9\-+/;.$_()]{0,199}")
_SHOWN = 60  # bytes of a reply that an error shows


class Status(str, Enum):
    """The first word of a reply."""

    INSERTED = "INSERTED"
    USING = "USING"
    RESERVED = "RESERVED"
    FOUND = "FOUND"
    OK = "OK"
    DELETED = "DELETED"
    RELEASED = "RELEASED"
    BURIED = "BURIED"
    TOUCHED = "TOUCHED"
    WATCHING = "WATCHING"
    KICKED = "KICKED"
    PAUSED = "PAUSED"
    JOBS = "JOBS"
    CLEARED = "CLEARED"
    LIMITED = "LIMITED"
    EXISTS = "EXISTS"
    NOT_FOUND = "NOT_FOUND"
    NOT_IGNORED = "NOT_IGNORED"
    TIMED_OUT = "TIMED_OUT"
    DEADLINE_SOON = "DEADLINE_SOON"
    DRAINING = "DRAINING"
    EXPECTED_CRLF = "EXPECTED_CRLF"
    JOB_TOO_BIG = "JOB_TOO_BIG"
    OUT_OF_MEMORY = "OUT_OF_MEMORY"
    INTERNAL_ERROR = "INTERNAL_ERROR"
    NOT_ENABLED = "NOT_ENABLED"
    BAD_FORMAT = "BAD_FORMAT"
    UNKNOWN_COMMAND = "UNKNOWN_COMMAND"


# How many numbers follow the first word. If there is a body, the last number is its length. After KICKED and BURIED,
# there may or may not be a number.
_NUMBERS = {
    Status.INSERTED: (1,), Status.RESERVED: (2,), Status.FOUND: (2,), Status.OK: (1,), Status.WATCHING: (1,),
    Status.JOBS: (1,), Status.CLEARED: (1,), Status.EXISTS: (1,), Status.KICKED: (0, 1), Status.BURIED: (0, 1),
}  # fmt: skip
_WITH_BODY = {Status.RESERVED, Status.FOUND, Status.OK}
_STATUSES = {status.value.encode(): status for status in Status}


class Reply(NamedTuple):
    """A reply of the server.

    number: the id of a job, or a count; None if there is none. name: the name of the tube, after USING.
    """

    status: Status
    number: int | None = None
    name: bytes = b""
    body: bytes = b""


# ---- commands --------------------------------------------------------------------------------------------------------


def _bounded(what: str, number: int, most: int) -> int:
    if not 0 <= number <= most:
        raise ValueError(f"{what} must be from 0 to {most}, not {number}")
    return operator.index(number)  # TypeError for a fraction, which would be cut off silently


def check_name(name: bytes) -> bytes:
    """Returns the name of a tube if it is valid. Raises ValueError. See section "Names"."""
    if not _NAME.fullmatch(name):
        raise ValueError(f"a tube's name has 1 to {NAME_MAX} of A-Z a-z 0-9 + / ; . $ _ ( ) and -, not first: {name!r}")
    return name


def check_counter(name: bytes) -> bytes:
    """As check_name(), for the counter of jobs, whose name may contain colons. Section "Jobs with permits"."""
    check_name(name.replace(b":", b"."))
    return name


def put(body: bytes, priority: int = 1 << 16, delay: int = 0, ttr: int = 60) -> bytes:
    """Encodes the command "put". delay and ttr: seconds."""
    _bounded("priority", priority, NUMBER_MAX)
    _bounded("delay", delay, NUMBER_MAX)
    _bounded("ttr", ttr, NUMBER_MAX)
    return b"put %d %d %d %d\r\n%b\r\n" % (priority, delay, ttr, len(body), body)


def put_unique(
    body: bytes, key: bytes, keep: int = 0, *, priority: int = 1 << 16, delay: int = 0, ttr: int = 60
) -> bytes:
    """Encodes the command "put-unique".

    key: like a tube's name. keep: seconds for which the key stays taken after the job's end.
    """
    line, rest = put(body, priority, delay, ttr)[4:].split(b"\r\n", 1)
    asked = b"put-unique %b %b %d\r\n" % (line, check_name(key), _bounded("keep", keep, TIMEOUT_MAX))
    if len(asked) > LINE_MAX:
        raise ValueError(f"the key is too long by {len(asked) - LINE_MAX} bytes")
    return asked + rest


def put_limited(
    body: bytes,
    counter: bytes,
    maximum: int,
    key: bytes = b"",
    keep: int = 0,
    *,
    priority: int = 1 << 16,
    delay: int = 0,
    ttr: int = 60,
) -> bytes:
    """Encodes the command "put-limited".

    counter: like a tube's name, but it may contain colons. key: as in put_unique(); b"" means no key.
    """
    line, rest = put(body, priority, delay, ttr)[4:].split(b"\r\n", 1)
    if not 1 <= maximum <= NUMBER_MAX:
        raise ValueError(f"maximum must be from 1 to {NUMBER_MAX}, not {maximum}")
    asked = b"put-limited %b %b %d" % (line, check_counter(counter), operator.index(maximum))
    if key:
        asked += b" %b %d" % (check_name(key), _bounded("keep", keep, TIMEOUT_MAX))
    if len(asked) + 2 > LINE_MAX:
        raise ValueError(f"the names are too long by {len(asked) + 2 - LINE_MAX} bytes")
    return asked + b"\r\n" + rest


def use(name: bytes) -> bytes:
    """Encodes the command "use"."""
    return b"use %b\r\n" % check_name(name)


def reserve(timeout: int | None = None) -> bytes:
    """Encodes the command "reserve" or, with a timeout in seconds, "reserve-with-timeout"."""
    if timeout is None:
        return b"reserve\r\n"
    return b"reserve-with-timeout %d\r\n" % _bounded("timeout", timeout, TIMEOUT_MAX)


def batch_reserve(count: int, timeout: int) -> bytes:
    """Encodes the command "batch-reserve". N replies with a job follow the reply JOBS N. timeout: seconds."""
    if not 1 <= count <= NUMBER_MAX:
        raise ValueError(f"count must be from 1 to {NUMBER_MAX}, not {count}")
    return b"batch-reserve %d %d\r\n" % (count, _bounded("timeout", timeout, TIMEOUT_MAX))


def reserve_job(job: int) -> bytes:
    """Encodes the command "reserve-job"."""
    return b"reserve-job %d\r\n" % _bounded("id", job, ID_MAX)


def delete(job: int) -> bytes:
    """Encodes the command "delete"."""
    return b"delete %d\r\n" % _bounded("id", job, ID_MAX)


def release(job: int, priority: int = 1 << 16, delay: int = 0) -> bytes:
    """Encodes the command "release". delay: seconds."""
    _bounded("priority", priority, NUMBER_MAX)
    _bounded("delay", delay, NUMBER_MAX)
    return b"release %d %d %d\r\n" % (_bounded("id", job, ID_MAX), priority, delay)


def bury(job: int, priority: int = 1 << 16) -> bytes:
    """Encodes the command "bury"."""
    return b"bury %d %d\r\n" % (_bounded("id", job, ID_MAX), _bounded("priority", priority, NUMBER_MAX))


def touch(job: int) -> bytes:
    """Encodes the command "touch"."""
    return b"touch %d\r\n" % _bounded("id", job, ID_MAX)


def watch(name: bytes) -> bytes:
    """Encodes the command "watch"."""
    return b"watch %b\r\n" % check_name(name)


def ignore(name: bytes) -> bytes:
    """Encodes the command "ignore"."""
    return b"ignore %b\r\n" % check_name(name)


def peek(job: int) -> bytes:
    """Encodes the command "peek"."""
    return b"peek %d\r\n" % _bounded("id", job, ID_MAX)


def peek_next(state: str) -> bytes:
    """Encodes one of the commands "peek-ready", "peek-delayed" and "peek-buried"."""
    if state not in ("ready", "delayed", "buried"):
        raise ValueError(f"state must be ready, delayed or buried, not {state!r}")
    return b"peek-%b\r\n" % state.encode()


def kick(count: int) -> bytes:
    """Encodes the command "kick"."""
    return b"kick %d\r\n" % _bounded("count", count, NUMBER_MAX)


def kick_job(job: int) -> bytes:
    """Encodes the command "kick-job"."""
    return b"kick-job %d\r\n" % _bounded("id", job, ID_MAX)


def stats() -> bytes:
    """Encodes the command "stats"."""
    return b"stats\r\n"


def stats_job(job: int) -> bytes:
    """Encodes the command "stats-job"."""
    return b"stats-job %d\r\n" % _bounded("id", job, ID_MAX)


def stats_tube(name: bytes) -> bytes:
    """Encodes the command "stats-tube"."""
    return b"stats-tube %b\r\n" % check_name(name)


def inspect_tube(name: bytes) -> bytes:
    """Encodes the command "inspect-tube"."""
    return b"inspect-tube %b\r\n" % check_name(name)


def list_tubes() -> bytes:
    """Encodes the command "list-tubes"."""
    return b"list-tubes\r\n"


def list_tube_used() -> bytes:
    """Encodes the command "list-tube-used"."""
    return b"list-tube-used\r\n"


def list_tubes_watched() -> bytes:
    """Encodes the command "list-tubes-watched"."""
    return b"list-tubes-watched\r\n"


def pause_tube(name: bytes, delay: int) -> bytes:
    """Encodes the command "pause-tube". delay: seconds; 0 ends a pause."""
    return b"pause-tube %b %d\r\n" % (check_name(name), _bounded("delay", delay, NUMBER_MAX))


def clear_tube(name: bytes, state: str = "all") -> bytes:
    """Encodes the command "clear-tube". state: ready, delayed, buried or all."""
    if state not in ("ready", "delayed", "buried", "all"):
        raise ValueError(f"state must be ready, delayed, buried or all, not {state!r}")
    return b"clear-tube %b %b\r\n" % (check_name(name), state.encode())


def limit_reserves(name: bytes, reserves: int, target: bytes) -> bytes:
    """Encodes the command "limit-reserves".

    reserves: 0 means no limit. target: the tube for retired jobs; `name` buries them.
    """
    checked = check_name(name), _bounded("reserves", reserves, NUMBER_MAX), check_name(target)
    return b"limit-reserves %b %d %b\r\n" % checked


def list_jobs(name: bytes, state: str = "all", first: int = 0, count: int = 100, needle: bytes = b"") -> bytes:
    """Encodes the command "list-jobs" or, with a needle, "search-jobs".

    first: the lowest id. state: one of STATES, or all.
    """
    if state not in (*STATES, "all"):
        raise ValueError(f"state must be {', '.join(STATES)} or all, not {state!r}")
    if len(needle) > NEEDLE_MAX:
        raise ValueError(f"at most {NEEDLE_MAX} bytes can be searched for, not {len(needle)}")
    _bounded("count", count, NUMBER_MAX)
    asked = b"jobs %b %b %d %d" % (check_name(name), state.encode(), _bounded("id", first, ID_MAX), count)
    return b"search-%b %d\r\n%b\r\n" % (asked, len(needle), needle) if needle else b"list-%b\r\n" % asked


def quit() -> bytes:
    """Encodes the command "quit"."""
    return b"quit\r\n"


# ---- replies ---------------------------------------------------------------------------------------------------------


class Parser:
    """Parses replies from a stream, in pieces of any size. body_max: the most bytes of a body."""

    def __init__(self, body_max: int = BODY_MAX) -> None:
        self._body_max = body_max
        self._buffer = bytearray()
        self._head: Reply | None = None  # a reply whose body has not arrived yet
        self._size = 0  # bytes of that body

    def feed(self, data: bytes) -> list[Reply]:
        """Takes data that has arrived.

        Returns the replies that are complete. The parser cannot be used after a ProtocolError.
        """
        self._buffer += data
        replies: list[Reply] = []
        while (reply := self._next()) is not None:
            replies.append(reply)
        return replies

    @property
    def is_within(self) -> bool:
        """Whether only a part of a reply has arrived."""
        return bool(self._buffer) or self._head is not None

    def _next(self) -> Reply | None:
        if self._head is None:
            end = self._buffer.find(b"\r\n", 0, REPLY_LINE_MAX)
            if end < 0:
                if len(self._buffer) >= REPLY_LINE_MAX:
                    raise ProtocolError(f"a reply has no end of line: {bytes(self._buffer[:_SHOWN])!r}")
                return None
            head = self._line(bytes(self._buffer[:end]))
            del self._buffer[: end + 2]
            if head.status not in _WITH_BODY:
                return head
            self._head = head
        if len(self._buffer) < self._size + 2:
            return None
        if self._buffer[self._size : self._size + 2] != b"\r\n":
            raise ProtocolError(f"the body of {self._head.status.value}, {self._size} bytes, does not end with CRLF")
        reply = self._head._replace(body=bytes(self._buffer[: self._size]))
        del self._buffer[: self._size + 2]
        self._head = None
        return reply

    def _line(self, line: bytes) -> Reply:
        """Parses the line of a reply, or the line before a body."""
        word, *arguments = line.split(b" ")
        status = _STATUSES.get(word)
        if status is None:
            raise ProtocolError(f"this is not the beginning of a reply: {line[:_SHOWN]!r}")
        if status is Status.USING:
            if len(arguments) != 1:
                raise ProtocolError(f"expected the name of a tube: {line[:_SHOWN]!r}")
            return Reply(status, name=arguments[0])
        if len(arguments) not in _NUMBERS.get(status, (0,)) or not all(text.isdigit() for text in arguments):
            raise ProtocolError(f"invalid arguments of {word.decode()}: {line[:_SHOWN]!r}")
        numbers = [int(text) for text in arguments]
        if any(number > ID_MAX for number in numbers):
            raise ProtocolError(f"a number has more than 64 bits: {line[:_SHOWN]!r}")
        if status in _WITH_BODY:
            self._size = numbers.pop()
            if self._size > self._body_max:
                raise ProtocolError(f"a body of {self._size} bytes is longer than {self._body_max}: {line[:_SHOWN]!r}")
        return Reply(status, numbers[0] if numbers else None)


def read_list(body: bytes) -> list[bytes]:
    """Parses the names in the body of list-tubes and list-tubes-watched. Raises ProtocolError."""
    head, *lines = body.split(b"\n")
    if head != b"---" or not lines or lines.pop() != b"" or not all(line.startswith(b"- ") for line in lines):
        raise ProtocolError(f"this is not a list: {body[:_SHOWN]!r}")
    return [line[2:] for line in lines]


def read_jobs(body: bytes) -> list[dict[str, str]]:
    """Parses the jobs in the body of list-jobs and search-jobs, as stats-job shows them. Raises ProtocolError."""
    head, *jobs = body.split(b"- id: ")
    if head != b"---\n":
        raise ProtocolError(f"this is not a list: {body[:_SHOWN]!r}")
    return [read_dictionary(b"---\nid: " + job.replace(b"\n  ", b"\n")) for job in jobs]


def read_dictionary(body: bytes) -> dict[str, str]:
    """Parses the statistics in the body of stats and its variants. Strings have no quotes. Raises ProtocolError."""
    head, *lines = body.decode("utf-8", "replace").split("\n")
    entries = [line.partition(": ") for line in lines if line]
    if head != "---" or not all(colon for _, colon, _ in entries):
        raise ProtocolError(f"this is not a dictionary: {body[:_SHOWN]!r}")
    return {name: value[1:-1] if value[:1] == value[-1:] == '"' else value for name, _, value in entries}
