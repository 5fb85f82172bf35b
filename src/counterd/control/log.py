"""Logs: records are written by one thread, so that whoever logs never waits for whoever reads.

Floor 4. A record is formatted where it is logged and queued as one line of bytes. The queue is bounded in lines and
each line in bytes; what does not fit, or cannot be written, is dropped and counted, and a line says so as soon as one
can be written again. One record is one line in both formats, and nothing in a message can begin another:
    text  2026-11-20T05:08:30.123Z INFO  message key=value other="with blanks" exc="Traceback ...\\n..."
    json  {"ts": "2026-11-20T05:08:30.123Z", "level": "info", "msg": "message", "key": "value", "exc": "Traceback ..."}
Fields are given as `extra={"fields": {...}}`; an exception is the field `exc`, the end of a traceback if that is long.
A line that is still too long is cut: text ends in [cut], json keeps the beginning of the message and has `"cut": true`.
"""

from __future__ import annotations

import json
import logging
import os
import queue
import re
import select
import threading
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

LINE_MAX = 8192  # bytes, with the newline; 1,024 lines of it are 8 MiB, the most that logs can hold
CAPACITY = 1024  # lines
CUT = b" [cut]\n"
CUT_MESSAGE = 500  # characters, of at most 12 bytes each in JSON
TRACEBACK_MAX = 4096  # characters
CLOSE_TIMEOUT = 1.0  # seconds

_tracebacks = logging.Formatter()


def one_line(text: str) -> str:
    """The text with whatever is not printable escaped: it can neither begin another line nor hide part of this one."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def text_line(record: logging.LogRecord) -> bytes:
    """A record for people: time in UTC, level, message, fields."""
    fields = "".join(f" {one_line(key)}={_text_value(value)}" for key, value in _fields(record).items())
    line = f"{_timestamp(record)} {record.levelname:<5} {one_line(record.getMessage())}{fields}\n".encode()
    if len(line) > LINE_MAX:
        line = line[: LINE_MAX - len(CUT)].decode(errors="ignore").encode() + CUT
    return line


def json_line(record: logging.LogRecord) -> bytes:
    """A record for programs: an object with ts, level, msg and the fields, which cannot take the place of these."""
    head = {"ts": _timestamp(record), "level": record.levelname.lower(), "msg": record.getMessage()}
    line = _json({**head, **_fields(record), **head})
    if len(line) > LINE_MAX:
        line = _json({**head, "msg": head["msg"][:CUT_MESSAGE], "cut": True})
    return line


FORMATS: Mapping[str, Callable[[logging.LogRecord], bytes]] = {"text": text_line, "json": json_line}


def _timestamp(record: logging.LogRecord) -> str:
    moment = datetime.fromtimestamp(record.created, timezone.utc)
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _fields(record: logging.LogRecord) -> dict[str, Any]:
    fields = dict(getattr(record, "fields", {}))
    if record.exc_info:
        fields["exc"] = _tracebacks.formatException(record.exc_info)[-TRACEBACK_MAX:]
    return fields


def _text_value(value: object) -> str:
    text = str(value)
    plain = text.isprintable() and re.fullmatch(r'[^ "=\\]+', text)
    return text if plain else one_line(json.dumps(text, ensure_ascii=False))


def _json(fields: Mapping[str, Any]) -> bytes:
    return json.dumps(fields, allow_nan=False, default=str).encode() + b"\n"


def _record(level: str, message: str, **fields: object) -> logging.LogRecord:
    """A record of the log's own."""
    return logging.makeLogRecord({"levelname": level, "msg": message, "fields": fields})


class LogWriter(logging.Handler):
    """Writes records to a file descriptor from a thread of its own; it is no logger's handler until it is added to one.

    level: the least severe level that is written: error, warning, info or debug.
    format: text or json.
    fd: where lines are written, blocking or not; it is not closed here.
    capacity: how many lines can wait.

    Records are accepted from the beginning and are written once start() was called. A loop's thread can log while the
    reader of fd is stuck, slow or gone: emit never waits and never raises.
    """

    def __init__(self, level: str, format: str, fd: int = 2, capacity: int = CAPACITY) -> None:
        super().__init__()
        self._fd = fd
        self._capacity = capacity
        # Not queue.Queue: a finalizer that logs while its lock is held would wait for itself.
        self._queue: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        # Each is counted by one side only, emit under the handler's lock and the writer, and needs no other lock.
        self._refused = 0
        self._failed = 0
        self._reported = 0
        self.configure(level, format)

    @property
    def dropped(self) -> int:
        """How many lines were dropped in total, because the queue was full or they could not be written."""
        return self._refused + self._failed

    def configure(self, level: str, format: str) -> None:
        """Changes level and format for the records from now on, at any time. Raises ValueError or KeyError."""
        self.setLevel(level.upper())
        self._line = FORMATS[format]

    def start(self) -> None:
        """Starts the thread, once."""
        self._thread = threading.Thread(target=self._run, name="log", daemon=True)
        self._thread.start()

    def emit(self, record: logging.LogRecord) -> None:
        """Queues a record's line, or drops it."""
        if self._queue.qsize() >= self._capacity:
            self._refused += 1
            return
        try:
            line = self._line(record)
        except Exception as error:  # noqa: BLE001 - a mistake in a log call costs its line and nothing else
            place = f"{record.pathname}:{record.lineno}"
            line = self._line(
                _record("ERROR", "a log record cannot be formatted", place=place, error=type(error).__name__)
            )
        self._queue.put(line)

    def close(self, timeout: float = CLOSE_TIMEOUT) -> None:
        """Writes what is queued, waiting at most timeout seconds for it, and stops. Later calls do nothing."""
        thread, self._thread = self._thread, None
        if thread:
            self._queue.put(None)
            thread.join(timeout)
        super().close()

    def _run(self) -> None:
        for line in iter(self._queue.get, None):
            if self._write(line):
                self._report()
            else:
                self._failed += 1
        self._report()

    def _report(self) -> None:
        """Says how many lines were lost since this was last said."""
        dropped = self.dropped
        lost = dropped - self._reported
        if lost and self._write(self._line(_record("WARNING", "log lines were lost", lines=lost))):
            self._reported = dropped

    def _write(self, line: bytes) -> bool:
        """Writes a whole line however long it takes; False if it cannot be written."""
        rest = memoryview(line)
        while rest:
            try:
                rest = rest[os.write(self._fd, rest) :]
            except BlockingIOError:
                poll = select.poll()
                poll.register(self._fd, select.POLLOUT)
                poll.poll()
            except OSError:
                return False
        return True


@dataclass
class _Window:
    start: float
    suppressed: int
    passed: int = 0


class Bounded:
    """Lets at most a number of lines through per cause and period, so that a flood of one line stays a few.

    lines: how many of a cause are let through in a period.
    period: seconds; a cause's period begins with the first line that is let through.
    causes: how many are told apart. While that many have had lines in the last period, all others count as one;
        a cause that has been quiet for a period makes place for another, and its count of suppressed lines is lost.

    Not for several threads.
    """

    OTHERS = ""

    def __init__(self, lines: int, period: float, causes: int = 64) -> None:
        self._lines = lines
        self._period = period
        self._causes = causes
        self._windows: dict[str, _Window] = {}  # by start, the oldest first

    def allow(self, cause: str, now: float) -> int | None:
        """None to keep quiet, else how many lines of the cause were suppressed since one was let through.

        now: seconds of a clock that never goes back.
        """
        windows = self._windows
        if cause not in windows and len(windows) >= self._causes:
            oldest = next(iter(windows))
            if now - windows[oldest].start < self._period:
                cause = self.OTHERS
            else:
                del windows[oldest]
        window = windows.get(cause)
        if window is None or now - window.start >= self._period:
            suppressed = windows.pop(cause).suppressed if window else 0
            window = windows[cause] = _Window(now, suppressed)
        if window.passed >= self._lines:
            window.suppressed += 1
            return None
        window.passed += 1
        suppressed, window.suppressed = window.suppressed, 0
        return suppressed
