"""The log. One thread writes all lines, so that code that logs never waits for the reader of the log.

Floor 4 (ARCHITECTURE.md). structlog makes an event from each call. A chain of functions turns the event into one line
of bytes and puts it into a queue. The number of lines in the queue and the length of a line are limited. Lines are
dropped and counted if they do not fit into the queue or cannot be written. When writing works again, a line says how
many lines were dropped. In both formats an event is a single line, whatever its message contains:
    text  2026-11-20T05:08:30.123Z INFO  message key=value other="with blanks" exc="Traceback ...\\n..."
    json  {"ts": "2026-11-20T05:08:30.123Z", "level": "info", "msg": "message", "key": "value", "exc": "Traceback ..."}
The field `exc` contains the exception. If the traceback is long, the field has only its end. A line that is still too
long is cut. A text line then ends with [cut]; a JSON line has `"cut": true` and the beginning of the message.
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

from counterd.control.threads import start_thread

# structlog imports rich if it is installed, for colours that the daemon does not use. This keeps it from doing so:
# the import would take half of the time that the daemon needs to start.
sys.modules.setdefault("rich", None)  # type: ignore[arg-type]
import structlog  # noqa: E402

if sys.modules["rich"] is None:
    del sys.modules["rich"]

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from structlog.typing import EventDict

    Line = Callable[[Mapping[str, Any]], bytes]

LINE_MAX = 8192  # bytes, with the newline; 1,024 lines take at most 8 MiB of memory
CAPACITY = 1024  # lines
CUT = b" [cut]\n"
CUT_MESSAGE = 500  # characters, of at most 12 bytes each in JSON
TRACEBACK_MAX = 4096  # characters
CLOSE_TIMEOUT = 1.0  # seconds
# How many lines of one cause are logged in a period: enough to be noticed, too few to hide other lines.
REPEATED_LINES = 5
REPEATED_PERIOD_S = 10.0
UNFORMATTED = "cannot format a log message"


def one_line(text: str) -> str:
    """Escapes characters that are not printable, so that a string can neither begin a new line nor hide a part of the
    line."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def text_line(event: Mapping[str, Any]) -> bytes:
    """Formats an event for people: the time in UTC, the level, the message and the fields."""
    ts, level, message, fields = _parts(event)
    shown = "".join(f" {one_line(key)}={_text_value(value)}" for key, value in fields.items())
    line = f"{ts} {level.upper():<5} {one_line(message)}{shown}\n".encode()
    if len(line) > LINE_MAX:
        line = line[: LINE_MAX - len(CUT)].decode(errors="ignore").encode() + CUT
    return line


def json_line(event: Mapping[str, Any]) -> bytes:
    """Formats an event for programs: an object with ts, level, msg and the fields of the event.

    No field of the event can replace ts, level or msg.
    """
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
    """Splits an event into time, level, message and fields."""
    fields = dict(event)
    return fields.pop("timestamp"), fields.pop("level"), str(fields.pop("event")), fields


def _stamp(_logger: object, _method: str, event: EventDict) -> EventDict:
    """Adds the time to an event, in milliseconds."""
    moment = datetime.now(timezone.utc)
    event["timestamp"] = moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")
    return event


def _explain(_logger: object, _method: str, event: EventDict) -> EventDict:
    """Adds the field exc if the event has an exception.

    If the value is true but not an exception, the exception that is currently handled is used.
    """
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
    """Makes an event about the log itself."""
    return _stamp(None, level, {"level": level, "event": message, **fields})


def _place() -> str:
    """Returns the file and the line of the code that logs."""
    frame = sys._getframe()
    while frame.f_back and re.match(f"(structlog|logging|{__name__})($|[.])", frame.f_globals["__name__"]):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


class LogWriter:
    """Writes lines to a file descriptor from its own thread.

    level: the least severe level that is written: error, warning, info or debug.
    format: text or json.
    fd: the descriptor to write to, which may be blocking or not. The writer does not close the descriptor.
    capacity: how many lines can wait.

    Lines can be queued before start(); start() then writes them. A call that logs never waits, even if the process that
    reads fd is stuck, slow or has ended. A call that logs never raises an exception because of a value.
    """

    def __init__(self, level: str, format: str, fd: int = 2, capacity: int = CAPACITY) -> None:
        self._fd = fd
        self._capacity = capacity
        # Not queue.Queue: a finalizer that logs while its own thread holds the queue's lock would wait for ever.
        self._queue: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        # put() changes _refused under this lock. Only the writer's thread changes _failed, so _failed needs no lock.
        self._lock = threading.RLock()
        self._refused = 0
        self._failed = 0
        self._reported = 0
        self.configure(level, format)

    @property
    def dropped(self) -> int:
        """The total number of lines that were dropped because the queue was full or writing failed."""
        return self._refused + self._failed

    def configure(self, level: str, format: str) -> None:
        """Changes the level and the format of later events. Raises KeyError."""
        self._severity, self._line = SEVERITIES[level], FORMATS[format]

    def writes(self, level: str) -> bool:
        """Returns whether events of a level are written."""
        return SEVERITIES[level] >= self._severity

    def chain(self) -> dict[str, Any]:
        """Returns arguments for structlog.configure() and structlog.wrap_logger() that send events to this writer."""
        return {
            "processors": [self._sift, _stamp, _explain, self._render],
            "wrapper_class": structlog.make_filtering_bound_logger("debug"),
            "cache_logger_on_first_use": True,
        }

    def start(self) -> None:
        """Starts the thread of the writer. Call this only once. Raises NoThread."""
        self._thread = start_thread("log", self._run)

    def put(self, line: bytes) -> None:
        """Adds a line to the queue, or drops it if the queue is full."""
        with self._lock:
            if self._queue.qsize() >= self._capacity:
                self._refused += 1
            else:
                self._queue.put(line)

    debug = info = warning = error = critical = put  # structlog calls the method named by the level

    def close(self, timeout: float = CLOSE_TIMEOUT) -> None:
        """Writes the queued lines, for at most timeout seconds, and stops the thread.

        Later calls of close() do nothing.
        """
        thread, self._thread = self._thread, None
        if thread:
            self._queue.put(None)
            thread.join(timeout)

    def _sift(self, _logger: object, method: str, event: EventDict) -> EventDict:
        """Drops an event whose level is not written, before anything else is done for the event."""
        if not self.writes(method):
            raise structlog.DropEvent
        event["level"] = method
        return event

    def _render(self, _logger: object, _method: str, event: EventDict) -> bytes:
        try:
            return self._line(event)
        except Exception as error:  # noqa: BLE001 - a mistake in a log call must cost only its line
            return self._line(_own("error", UNFORMATTED, place=_place(), error=type(error).__name__))

    def _run(self) -> None:
        for line in iter(self._queue.get, None):
            if self._write(line):
                self._report()
            else:
                self._failed += 1
        self._report()

    def _report(self) -> None:
        """Writes a line with the number of lines that were lost since the last such line."""
        dropped = self.dropped
        lost = dropped - self._reported
        if lost and self._write(self._line(_own("warning", "log lines were lost", lines=lost))):
            self._reported = dropped

    def _write(self, line: bytes) -> bool:
        """Writes a whole line, and waits as long as that takes. Returns False if the line cannot be written."""
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
    """Passes log lines of libraries, which use the standard library's logging, to structlog.

    The field `logger` names the library.
    """

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
    """Makes this writer write everything that is logged with structlog or with the standard library."""
    structlog.configure(logger_factory=lambda *_: writer, **writer.chain())
    logging.basicConfig(handlers=[Foreign(structlog.get_logger())], level=logging.DEBUG)
    logging.getLogger("asyncio").setLevel(logging.WARNING)


@dataclass
class _Window:
    start: float
    suppressed: int
    passed: int = 0


class Bounded:
    """Limits how many lines are logged for each cause in a period.

    lines: how many lines of a cause are logged in a period.
    period: its length in seconds. The period of a cause begins with the first line that is logged for it.
    causes: how many causes are distinguished. If that many causes have had lines in the last period, all other causes
        count as one cause. A cause without lines for a whole period can be replaced by another cause. Its number of
        suppressed lines is then lost.

    A Bounded may be used by one thread only.
    """

    OTHERS = ""

    def __init__(self, lines: int, period: float, causes: int = 64) -> None:
        self._lines = lines
        self._period = period
        self._causes = causes
        self._windows: dict[str, _Window] = {}  # by start, the oldest first; at most `causes`, and OTHERS

    def allow(self, cause: str, now: float) -> int | None:
        """Returns None if the line must be suppressed. Otherwise returns how many lines of the cause were suppressed
        since its last line.

        now: seconds on a clock that never goes back.
        """
        windows = self._windows
        # OTHERS is never replaced, and does not count as one of the causes.
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
    """Logs lines that peers can cause again and again: a few lines for each cause and period, and the number of
    suppressed lines."""

    def __init__(self) -> None:
        self._bounded = Bounded(REPEATED_LINES, REPEATED_PERIOD_S)
        self._log = structlog.get_logger()

    def __call__(
        self, cause: str, text: str, level: str = "warning", error: BaseException | None = None, **fields: object
    ) -> None:
        """Logs a line for a cause. Causes of different protocols are counted separately."""
        suppressed = self._bounded.allow(f"{fields.get('protocol')}:{cause}", time.monotonic())
        if suppressed is not None:
            if suppressed:
                fields["suppressed"] = suppressed
            getattr(self._log, level)(text, exc_info=error, **fields, cause=cause)
