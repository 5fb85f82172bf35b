"""Logs: lines are written by one thread, so that whoever logs never waits for whoever reads.

Floor 4. structlog makes an event of a call and hands it down a chain that ends in one line of bytes, which is queued.
The queue is bounded in lines and each line in bytes; what does not fit, or cannot be written, is dropped and counted,
and a line says so as soon as one can be written again. One event is one line in both formats, and nothing in a message
can begin another:
    text  2026-11-20T05:08:30.123Z INFO  message key=value other="with blanks" exc="Traceback ...\\n..."
    json  {"ts": "2026-11-20T05:08:30.123Z", "level": "info", "msg": "message", "key": "value", "exc": "Traceback ..."}
An exception is the field `exc`, the end of a traceback if that is long. A line that is still too long is cut: text ends
in [cut], json keeps the beginning of the message and has `"cut": true`.
"""

from __future__ import annotations

import json
import logging
import os
import queue
import re
import select
import sys
import threading
import time
import traceback
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any

from counterd.control.aside import start_thread

# structlog imports rich if that is installed, for colours that the daemon does not use. That was half of a start.
sys.modules.setdefault("rich", None)  # type: ignore[arg-type]
import structlog  # noqa: E402

if sys.modules["rich"] is None:
    del sys.modules["rich"]

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from structlog.typing import EventDict

    Line = Callable[[Mapping[str, Any]], bytes]

LINE_MAX = 8192  # bytes, with the newline; 1,024 lines of it are 8 MiB, the most that logs can hold
CAPACITY = 1024  # lines
CUT = b" [cut]\n"
CUT_MESSAGE = 500  # characters, of at most 12 bytes each in JSON
TRACEBACK_MAX = 4096  # characters
CLOSE_TIMEOUT = 1.0  # seconds
# Lines of one cause that are logged in a period: enough to see it, too few to drown the rest.
REPEATED_LINES = 5
REPEATED_PERIOD_S = 10.0
UNFORMATTED = "a log record cannot be formatted"


def one_line(text: str) -> str:
    """The text with whatever is not printable escaped: it can neither begin another line nor hide part of this one."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def text_line(event: Mapping[str, Any]) -> bytes:
    """An event for people: time in UTC, level, message, fields."""
    ts, level, message, fields = _parts(event)
    shown = "".join(f" {one_line(key)}={_text_value(value)}" for key, value in fields.items())
    line = f"{ts} {level.upper():<5} {one_line(message)}{shown}\n".encode()
    if len(line) > LINE_MAX:
        line = line[: LINE_MAX - len(CUT)].decode(errors="ignore").encode() + CUT
    return line


def json_line(event: Mapping[str, Any]) -> bytes:
    """An event for programs: an object with ts, level, msg and the fields, which cannot take the place of these."""
    ts, level, message, fields = _parts(event)
    head = {"ts": ts, "level": level, "msg": message}
    line = _json({**head, **fields, **head})
    if len(line) > LINE_MAX:
        line = _json({**head, "msg": message[:CUT_MESSAGE], "cut": True})
    return line


FOREIGN = ((logging.ERROR, "error"), (logging.WARNING, "warning"), (logging.INFO, "info"))
SEVERITIES = {"debug": 0, "info": 1, "warning": 2, "error": 3, "critical": 3}
FORMATS: Mapping[str, Line] = {"text": text_line, "json": json_line}


def _parts(event: Mapping[str, Any]) -> tuple[str, str, str, dict[str, Any]]:
    """Time, level, message and fields of an event."""
    fields = dict(event)
    return fields.pop("timestamp"), fields.pop("level"), str(fields.pop("event")), fields


def _stamp(_logger: object, _method: str, event: EventDict) -> EventDict:
    """Adds when it happened, to the millisecond."""
    moment = datetime.now(timezone.utc)
    event["timestamp"] = moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")
    return event


def _explain(_logger: object, _method: str, event: EventDict) -> EventDict:
    """Makes the field exc of an exception; True, or what is none, is the one being handled."""
    error = event.pop("exc_info", None)
    if error is not None and not isinstance(error, BaseException):
        error = sys.exc_info()[1] if error else None
    if error is not None:
        event["exc"] = "".join(traceback.format_exception(error)).rstrip("\n")[-TRACEBACK_MAX:]
    return event


def _text_value(value: object) -> str:
    text = str(value)
    plain = text.isprintable() and re.fullmatch(r'[^ "=\\]+', text)
    return text if plain else one_line(json.dumps(text, ensure_ascii=False))


def _json(fields: Mapping[str, Any]) -> bytes:
    return json.dumps(fields, allow_nan=False, default=str).encode() + b"\n"


def _own(level: str, message: str, **fields: object) -> EventDict:
    """An event of the log's own."""
    return _stamp(None, level, {"level": level, "event": message, **fields})


def _place() -> str:
    """The line of code that is logging."""
    frame = sys._getframe()
    while frame.f_back and re.match(f"(structlog|logging|{__name__})($|[.])", frame.f_globals["__name__"]):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


class LogWriter:
    """Writes lines to a file descriptor from a thread of its own.

    level: the least severe level that is written: error, warning, info or debug.
    format: text or json.
    fd: where lines are written, blocking or not; it is not closed here.
    capacity: how many lines can wait.

    Lines are accepted from the beginning and are written once start() was called. A loop's thread can log while the
    reader of fd is stuck, slow or gone: whoever logs never waits, and no mistake in a value raises.
    """

    def __init__(self, level: str, format: str, fd: int = 2, capacity: int = CAPACITY) -> None:
        self._fd = fd
        self._capacity = capacity
        # Not queue.Queue: a finalizer that logs while its lock is held would wait for itself.
        self._queue: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        # Each is counted by one side only, put() under its lock and the writer, and needs no other lock.
        self._lock = threading.RLock()
        self._refused = 0
        self._failed = 0
        self._reported = 0
        self.configure(level, format)

    @property
    def dropped(self) -> int:
        """How many lines were dropped in total, because the queue was full or they could not be written."""
        return self._refused + self._failed

    def configure(self, level: str, format: str) -> None:
        """Changes level and format for the events from now on, at any time. Raises KeyError."""
        self._severity, self._line = SEVERITIES[level], FORMATS[format]

    def writes(self, level: str) -> bool:
        """Whether events of a level are written at all."""
        return SEVERITIES[level] >= self._severity

    def chain(self) -> dict[str, Any]:
        """What structlog.configure() and structlog.wrap_logger() need so that events come here."""
        return {
            "processors": [self._sift, _stamp, _explain, self._render],
            "wrapper_class": structlog.make_filtering_bound_logger("debug"),
            "cache_logger_on_first_use": True,
        }

    def start(self) -> None:
        """Starts the thread, once. Raises NoThread."""
        self._thread = start_thread("log", self._run)

    def put(self, line: bytes) -> None:
        """Queues a line, or drops it."""
        with self._lock:
            if self._queue.qsize() >= self._capacity:
                self._refused += 1
            else:
                self._queue.put(line)

    debug = info = warning = error = critical = put  # structlog calls the method that it was called by

    def close(self, timeout: float = CLOSE_TIMEOUT) -> None:
        """Writes what is queued, waiting at most timeout seconds for it, and stops. Later calls do nothing."""
        thread, self._thread = self._thread, None
        if thread:
            self._queue.put(None)
            thread.join(timeout)

    def _sift(self, _logger: object, method: str, event: EventDict) -> EventDict:
        """Ends the way of what is too little to be written, before it costs anything."""
        if not self.writes(method):
            raise structlog.DropEvent
        event["level"] = method
        return event

    def _render(self, _logger: object, _method: str, event: EventDict) -> bytes:
        try:
            return self._line(event)
        except Exception as error:  # noqa: BLE001 - a mistake in a log call costs its line and nothing else
            return self._line(_own("error", UNFORMATTED, place=_place(), error=type(error).__name__))

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
        if lost and self._write(self._line(_own("warning", "log lines were lost", lines=lost))):
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


class Foreign(logging.Handler):
    """Hands what libraries log with the standard library's logging to structlog, with the field `logger`."""

    def __init__(self, log: Any) -> None:
        super().__init__()
        self._log = log

    def emit(self, record: logging.LogRecord) -> None:
        level = next((name for floor, name in FOREIGN if record.levelno >= floor), "debug")
        try:
            message = record.getMessage()
        except Exception as error:  # noqa: BLE001 - as above
            self._log.error(UNFORMATTED, place=f"{record.pathname}:{record.lineno}", error=type(error).__name__)
        else:
            cause = record.exc_info[1] if record.exc_info else None
            getattr(self._log, level)(message, logger=record.name, exc_info=cause)


def install(writer: LogWriter) -> None:
    """Has all that this process logs, by structlog or by the standard library, written by this writer."""
    structlog.configure(logger_factory=lambda *_: writer, **writer.chain())
    logging.basicConfig(handlers=[Foreign(structlog.get_logger())], level=logging.DEBUG)
    logging.getLogger("asyncio").setLevel(logging.WARNING)


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
        self._windows: dict[str, _Window] = {}  # by start, the oldest first; at most `causes`, and OTHERS

    def allow(self, cause: str, now: float) -> int | None:
        """None to keep quiet, else how many lines of the cause were suppressed since one was let through.

        now: seconds of a clock that never goes back.
        """
        windows = self._windows
        # OTHERS keeps its place when it is the oldest: else a named cause would get it, and OTHERS another one later.
        named = len(windows) - (self.OTHERS in windows)
        if cause not in windows and named >= self._causes:
            oldest = next(each for each in windows if each != self.OTHERS)
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


class Reports:
    """Logs what peers can cause without end: a few lines of each cause in a period, and how many were left out."""

    def __init__(self) -> None:
        self._bounded = Bounded(REPEATED_LINES, REPEATED_PERIOD_S)
        self._log = structlog.get_logger()

    def __call__(
        self, cause: str, text: str, level: str = "warning", error: BaseException | None = None, **fields: object
    ) -> None:
        """One more of a cause; causes of two protocols are two."""
        suppressed = self._bounded.allow(f"{fields.get('protocol')}:{cause}", time.monotonic())
        if suppressed is not None:
            if suppressed:
                fields["suppressed"] = suppressed
            getattr(self._log, level)(text, exc_info=error, **fields, cause=cause)
