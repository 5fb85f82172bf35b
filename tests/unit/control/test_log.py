"""Logs: the two formats, a writer whose reader is slow, stuck or gone, and the limit on repeated lines.

Readers are real pipes. No test sleeps: it waits for another thread by reading, by joining it, or by spinning."""

from __future__ import annotations

import fcntl
import json
import logging
import os
import re
import threading
import time
from contextlib import suppress

import pytest
import structlog
from hypothesis import example, given
from hypothesis import strategies as st

from counterd.control import log as module
from counterd.control.log import (
    LINE_MAX,
    TRACEBACK_MAX,
    Bounded,
    Foreign,
    LogWriter,
    Reports,
    json_line,
    one_line,
    text_line,
)
from kit.machine import PATIENCE

TIME = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z"


def record(message: object, level: str = "info", **fields: object) -> dict[str, object]:
    return {"timestamp": "2026-11-20T05:08:30.123Z", "level": level, "event": message, **fields}


def in_time(function, *args) -> None:
    """Calls a function that must not block."""
    thread = threading.Thread(target=function, args=args, daemon=True)
    thread.start()
    thread.join(PATIENCE)
    assert not thread.is_alive()


def until(condition) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline
        os.sched_yield()


class Pipe:
    """A pipe of one page."""

    def __init__(self) -> None:
        self.reading, self.writing = os.pipe()
        self.size = fcntl.fcntl(self.writing, fcntl.F_SETPIPE_SZ, 4096)

    def fill(self, leave: int = 0) -> None:
        os.write(self.writing, b"." * (self.size - leave))

    def read(self, size: int) -> bytes:
        data = b""
        while len(data) < size:
            data += os.read(self.reading, size - len(data))
        return data

    def read_to_end(self) -> bytes:
        os.close(self.writing)
        self.writing = -1
        data = b""
        while more := os.read(self.reading, 65536):
            data += more
        return data

    def close(self) -> None:
        for fd in (self.reading, self.writing):
            with suppress(OSError):
                os.close(fd)


@pytest.fixture
def pipe():
    made = Pipe()
    yield made
    os.close(made.reading)  # sets free a writer that is still stuck
    made.reading = -1
    for thread in threading.enumerate():
        if thread.name == "log":
            thread.join(PATIENCE)
            assert not thread.is_alive()
    made.close()


def logger_for(writer: LogWriter):
    return structlog.wrap_logger(writer, **writer.chain())


def messages(data: bytes) -> list[str]:
    """The text after the time in each line."""
    lines = data.decode().split("\n")
    assert lines.pop() == ""
    assert all(re.match(TIME + " ", line) for line in lines)
    return [line[25:] for line in lines]


# ---- formats --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("made", "line"),
    [
        (record("listening"), "INFO  listening"),
        (record("x", level="error"), "ERROR x"),
        (record("x", level="warning"), "WARNING x"),
        (record("x", level="debug"), "DEBUG x"),
        (record(5), "INFO  5"),
        (record("x", port=11215, host="::1"), "INFO  x port=11215 host=::1"),
        (record("x", a="", b="b c", c='"', d="e=f", e="\\"), r'INFO  x a="" b="b c" c="\"" d="e=f" e="\\"'),
        (record("x", a="b\nc\x1b\x7f\x85\u2028\u202e"), r'INFO  x a="b\nc\u001b\x7f\x85\u2028\u202e"'),
        (record("a\nb\r\x1b[2J\x85\u2028\udcff ä"), r"INFO  a\nb\r\x1b[2J\x85\u2028\udcff ä"),
        (record("x", **{"a\nb": 1}), r"INFO  x a\nb=1"),
    ],
)
def test_lines_in_text_format(made, line):
    assert text_line(made).decode() == f"2026-11-20T05:08:30.123Z {line}\n"


@pytest.mark.parametrize(
    ("made", "fields"),
    [
        (record("x", level="warning"), {"level": "warning", "msg": "x"}),
        (record("x", port=1, on=True, no=None), {"level": "info", "msg": "x", "port": 1, "on": True, "no": None}),
        (record("x", path=OSError), {"level": "info", "msg": "x", "path": "<class 'OSError'>"}),
        (record("x", msg="y", level_="z"), {"level": "info", "msg": "x", "level_": "z"}),
        (record("a\nb\u2028ä"), {"level": "info", "msg": "a\nb\u2028ä"}),
    ],
)
def test_lines_in_json_format(made, fields):
    line = json_line(made)
    assert json.loads(line) == {"ts": "2026-11-20T05:08:30.123Z", **fields}
    assert list(json.loads(line))[:3] == ["ts", "level", "msg"]
    assert line.isascii()
    assert line.count(b"\n") == 1


def logged(pipe: Pipe, format: str, log) -> str:
    """The line that a call makes."""
    fcntl.fcntl(pipe.writing, fcntl.F_SETPIPE_SZ, LINE_MAX)  # nobody reads before it is written
    writer = LogWriter("debug", format, pipe.writing)
    log(logger_for(writer))
    writer.start()
    writer.close(PATIENCE)
    return pipe.read_to_end().decode()


def raised(message: str) -> ValueError:
    try:
        raise ValueError(message)
    except ValueError as error:
        return error


def test_an_exception_is_a_field_in_text(pipe):
    line = logged(pipe, "text", lambda log: log.info("failed", exc_info=raised("wrong\nhere"), port=1))
    head = re.escape(r'INFO  failed port=1 exc="Traceback (most recent call last):\n')
    assert re.fullmatch(TIME + " " + head + r".*" + re.escape(r'ValueError: wrong\nhere"') + "\n", line)


def test_an_exception_is_a_field_in_json(pipe):
    def log(logger) -> None:
        try:
            raise ValueError("wrong\nhere")
        except ValueError:
            logger.exception("failed")

    fields = json.loads(logged(pipe, "json", log))
    assert (fields["level"], fields["msg"]) == ("error", "failed")
    assert fields["exc"].startswith("Traceback (most recent call last):\n")
    assert fields["exc"].endswith("ValueError: wrong\nhere")


def test_a_long_traceback_keeps_its_end(pipe):
    error = raised("x" * TRACEBACK_MAX + "end")
    line = logged(pipe, "text", lambda log: log.info("failed", exc_info=error))
    assert line.endswith(" exc=" + "x" * (TRACEBACK_MAX - 3) + "end\n")


def test_a_long_text_line_is_cut():
    head = len(text_line(record("")))
    longest = text_line(record("ä" + "x" * (LINE_MAX - head - 2)))
    assert len(longest) == LINE_MAX
    assert longest.endswith(b"xx\n")
    cut = text_line(record("ä" + "x" * (LINE_MAX - head - 1)))
    assert len(cut) == LINE_MAX
    assert cut.endswith(b"xx [cut]\n")
    for message in ("ä" * LINE_MAX, "xä" + "ä" * LINE_MAX):
        cut = text_line(record(message))
        assert LINE_MAX - 1 <= len(cut) <= LINE_MAX
        assert cut.decode().endswith("ä [cut]\n")


def test_a_long_json_line_is_cut_and_stays_valid_json():
    head = len(json_line(record("")))
    assert len(json_line(record("x" * (LINE_MAX - head)))) == LINE_MAX
    for message in ("x" * (LINE_MAX - head + 1), "\N{GRINNING FACE}" * LINE_MAX):
        cut = json_line(record(message, port=1))
        assert len(cut) <= LINE_MAX
        assert json.loads(cut) == {
            "ts": "2026-11-20T05:08:30.123Z",
            "level": "info",
            "msg": message[:500],
            "cut": True,
        }


@given(st.text(st.characters()), st.dictionaries(st.text(st.characters()), st.text(st.characters())))
def test_any_record_is_one_line(message, fields):
    made = {**fields, **record(message)}
    fields = {key: value for key, value in fields.items() if key not in record("")}
    text = text_line(made).decode()
    assert text.endswith("\n")
    assert text[:-1].isprintable()
    assert len(text.encode()) <= LINE_MAX
    line = json_line(made)
    assert line.isascii()
    assert line.index(b"\n") == len(line) - 1 < LINE_MAX
    parsed = json.loads(line)
    if "cut" not in parsed:
        expected = fields | {"ts": "2026-11-20T05:08:30.123Z", "level": "info", "msg": message}
        assert parsed == json.loads(json.dumps(expected))


@given(st.text(st.characters()))
def test_one_line_keeps_printable_text(text):
    assert one_line(text).isprintable()
    assert one_line(text) == text or not text.isprintable()


# ---- the writer -----------------------------------------------------------------------------------------------------


def test_lines_are_written_in_order(pipe):
    writer = LogWriter("info", "text", pipe.writing)
    logger = logger_for(writer)
    logger.info("before start")
    writer.start()
    for number in range(40):
        logger.info("line %d", number, port=number)
    writer.close(PATIENCE)
    expected = [f"INFO  line {number} port={number}" for number in range(40)]
    assert messages(pipe.read_to_end()) == ["INFO  before start", *expected]
    assert writer.dropped == 0


def test_arguments_are_taken_when_the_record_is_logged(pipe):
    writer = LogWriter("info", "text", pipe.writing)
    things = [1]
    logger_for(writer).info("things %s", things, list=things)
    things.append(2)
    writer.start()
    writer.close(PATIENCE)
    assert messages(pipe.read_to_end()) == ["INFO  things [1] list=[1]"]


def test_level_and_format_can_change(pipe):
    writer = LogWriter("warning", "text", pipe.writing)
    logger = logger_for(writer)
    logger.info("too little")
    logger.warning("enough")
    writer.configure("debug", "json")
    logger.debug("now enough")
    writer.start()
    writer.close(PATIENCE)
    first, second = pipe.read_to_end().splitlines()
    assert first.endswith(b"WARNING enough")
    assert json.loads(second)["msg"] == "now enough"


@pytest.mark.parametrize(("level", "format"), [("loud", "text"), ("info", "xml")])
def test_an_unknown_level_or_format_is_refused(level, format):
    with pytest.raises((ValueError, KeyError)):
        LogWriter(level, format)


def test_lines_that_do_not_fit_are_dropped_counted_and_reported(pipe):
    writer = LogWriter("error", "text", pipe.writing, capacity=3)
    logger = logger_for(writer)
    for number in range(10):
        logger.error("line %d", number)
    assert writer.dropped == 7
    writer.start()
    writer.close(PATIENCE)
    assert messages(pipe.read_to_end()) == [
        "ERROR line 0",
        "WARNING log lines were lost lines=7",
        "ERROR line 1",
        "ERROR line 2",
    ]
    assert writer.dropped == 7


def test_losses_are_reported_in_the_format_of_the_rest(pipe):
    writer = LogWriter("info", "json", pipe.writing, capacity=1)
    logger = logger_for(writer)
    logger.info("one")
    logger.info("two")
    writer.start()
    writer.close(PATIENCE)
    _, report = (json.loads(line) for line in pipe.read_to_end().splitlines())
    assert report == {"ts": report["ts"], "level": "warning", "msg": "log lines were lost", "lines": 1}


@pytest.mark.parametrize("blocking", [True, False])
def test_a_reader_that_never_reads_blocks_no_caller(pipe, blocking):
    os.set_blocking(pipe.writing, blocking)
    pipe.fill()
    writer = LogWriter("info", "text", pipe.writing, capacity=5)
    writer.start()
    logger = logger_for(writer)
    for number in range(100):
        in_time(logger.info, "line %d", number)
    assert writer.dropped in (94, 95)  # with one line in the thread's hands or still in the queue
    begin = time.monotonic()
    in_time(writer.close, 0.01)
    assert time.monotonic() - begin >= 0.01


@pytest.mark.parametrize("blocking", [True, False])
def test_a_slow_reader_gets_every_line_whole(pipe, blocking):
    os.set_blocking(pipe.writing, blocking)
    pipe.fill(leave=100)
    writer = LogWriter("info", "text", pipe.writing)
    writer.start()
    logger = logger_for(writer)
    for letter in "abc":
        logger.info(letter * 6000)
    size = pipe.size - 100 + 3 * (25 + 6 + 6000 + 1)
    data = pipe.read(size)[pipe.size - 100 :]
    assert messages(data) == [f"INFO  {letter * 6000}" for letter in "abc"]
    writer.close(PATIENCE)
    assert pipe.read_to_end() == b""


@pytest.mark.parametrize("blocking", [True, False])
def test_a_reader_that_is_gone_loses_only_lines(blocking):
    made = Pipe()
    os.close(made.reading)
    os.set_blocking(made.writing, blocking)
    writer = LogWriter("info", "text", made.writing)
    writer.start()
    logger = logger_for(writer)
    for number in range(10):
        logger.info("line %d", number)
    writer.close(PATIENCE)
    assert writer.dropped == 10
    os.close(made.writing)


def test_a_reader_that_comes_back_sees_how_many_lines_are_missing(tmp_path):
    path = tmp_path / "fifo"
    os.mkfifo(path)
    reading = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    writing = os.open(path, os.O_WRONLY)
    os.close(reading)
    writer = LogWriter("info", "text", writing)
    writer.start()
    logger = logger_for(writer)
    logger.info("missed")
    logger.info("missed too")
    until(lambda: writer.dropped == 2)
    reading = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    logger.info("read")
    logger.info("read too")
    writer.close(PATIENCE)
    data = os.read(reading, 65536)
    assert messages(data) == ["INFO  read", "WARNING log lines were lost lines=2", "INFO  read too"]
    os.close(reading)
    os.close(writing)


def test_a_closed_descriptor_loses_only_lines(pipe):
    writer = LogWriter("info", "text", -1)
    writer.start()
    logger_for(writer).info("x")
    writer.close(PATIENCE)
    assert writer.dropped == 1


class Unprintable:
    def __str__(self) -> str:
        raise RuntimeError("no")


class Hollow(Exception):
    def __len__(self) -> int:
        return 0


@pytest.mark.parametrize(
    ("given", "exc"),
    [((ValueError, ValueError("x"), None), "KeyError: 'y'"), ("text", "KeyError: 'y'"), (Hollow("z"), "Hollow: z")],
    ids=["tuple", "text", "hollow"],
)
def test_any_exc_info_is_logged(pipe, given, exc):
    def log(logger) -> None:
        try:
            raise KeyError("y")
        except KeyError:
            logger.info("x", exc_info=given)

    assert exc in logged(pipe, "text", log)


@pytest.mark.parametrize(
    ("format", "field", "error"),
    [
        ("text", Unprintable(), "RuntimeError"),
        ("json", Unprintable(), "RuntimeError"),
        ("json", float("nan"), "ValueError"),
    ],
)
def test_a_value_that_cannot_be_formatted_is_logged_and_not_raised(pipe, format, field, error):
    line = logged(pipe, format, lambda log: log.info("x", a=field))
    assert line.count("\n") == 1
    assert "ERROR" in line.upper()
    assert "cannot format a log message" in line
    assert error in line
    assert __file__ in line


def test_log_records_of_libraries_are_written(pipe):
    writer = LogWriter("info", "text", pipe.writing)
    logger = logging.Logger("some.library")
    logger.addHandler(Foreign(logger_for(writer)))
    logger.debug("too little")
    logger.info("%s of %d", "one", 2)
    logger.log(logging.CRITICAL, "x", exc_info=raised("y"))
    logger.warning("%d", "x")
    writer.start()
    writer.close(PATIENCE)
    one, two, three = messages(pipe.read_to_end())
    assert one == "INFO  one of 2 logger=some.library"
    assert two.startswith('ERROR x logger=some.library exc="Traceback')
    assert three.startswith(f"ERROR cannot format a log message place={__file__}:")


def test_lines_go_to_standard_error_unless_told_otherwise(capfd):
    writer = LogWriter("info", "text")
    logger_for(writer).info("x")
    writer.start()
    writer.close(PATIENCE)
    assert messages(capfd.readouterr().err.encode()) == ["INFO  x"]


def test_close_can_be_called_at_any_time(pipe):
    LogWriter("info", "text", pipe.writing).close()
    writer = LogWriter("info", "text", pipe.writing)
    pipe.fill()
    writer.start()
    logger_for(writer).info("x")
    in_time(writer.close, 0)
    in_time(writer.close, 2 * PATIENCE)  # a second time does not wait again


def test_the_thread_does_not_keep_the_process_alive(pipe):
    writer = LogWriter("info", "text", pipe.writing)
    writer.start()
    assert [thread.daemon for thread in threading.enumerate() if thread.name == "log"] == [True]
    writer.close(PATIENCE)


# ---- the limit on repeated lines ------------------------------------------------------------------------------------


def test_each_cause_is_limited_in_each_period():
    bounded = Bounded(lines=2, period=10)
    assert [bounded.allow("a", now) for now in (100, 101, 102, 109.9)] == [0, 0, None, None]
    assert [bounded.allow("a", now) for now in (110, 111, 112)] == [2, 0, None]
    assert [bounded.allow("a", now) for now in (500, 501)] == [1, 0]


def test_causes_are_counted_separately():
    bounded = Bounded(lines=1, period=10)
    assert [bounded.allow(cause, 0) for cause in "abab"] == [0, 0, None, None]
    assert [bounded.allow(cause, 10) for cause in "ab"] == [1, 1]


def test_further_causes_count_as_one():
    bounded = Bounded(lines=1, period=10, causes=2)
    assert [bounded.allow(cause, 0) for cause in "abcde"] == [0, 0, 0, None, None]
    assert bounded.allow("a", 5) is None
    assert [bounded.allow(cause, 10) for cause in "ac"] == [1, 0]


def test_a_quiet_cause_makes_room_for_another():
    bounded = Bounded(lines=1, period=10, causes=2)
    assert [bounded.allow(cause, now) for cause, now in (("a", 0), ("b", 5), ("a", 10))] == [0, 0, 0]
    assert bounded.allow("c", 14) == 0  # as one of the others: both places are taken
    assert bounded.allow("d", 14) is None
    assert bounded.allow("c", 15) == 0  # b was quiet for the longest time
    assert bounded.allow("a", 16) is None


def test_further_causes_keep_their_common_count():
    bounded = Bounded(lines=1, period=10, causes=1)
    assert [bounded.allow(cause, 0) for cause in "ab"] == [0, 0]
    assert [bounded.allow(cause, 10) for cause in "cde"] == [0, 0, None]  # d and e are others


THREE_CAUSES_AT_ONCE = [
    (0, 0), (1, 1), (0, 3), (0, 3), (0, 3), (2, 1), (1, 0), (0, 3), (2, 3), (3, 3), (0, 0), (0, 1), (0, 0), (1, 0),
    (1, 0), (2, 0),
]  # fmt: skip


@given(
    st.integers(1, 3),
    st.integers(1, 4),
    st.lists(st.tuples(st.integers(0, 8), st.integers(0, 3)), max_size=200),
)
@example(2, 1, THREE_CAUSES_AT_ONCE)
def test_lines_are_bounded_whatever_the_causes(lines, causes, steps):
    bounded = Bounded(lines, period=10, causes=causes)
    now, passed = 0, []
    for cause, wait in steps:
        now += wait
        if bounded.allow(str(cause), now) is not None:
            passed.append(now)
    # Any stretch of one period touches at most two windows of each cause and of the others.
    for begin in passed:
        assert sum(begin <= moment < begin + 10 for moment in passed) <= 2 * lines * (causes + 1)


def test_repeated_reports_are_limited_and_counted(monkeypatch) -> None:
    now = [0.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    error = ValueError("x")
    with structlog.testing.capture_logs() as entries:
        report = Reports()
        for _ in range(7):
            report("idle", "closed", protocol="a")
        report("idle", "closed", protocol="b")
        report("internal", "a bug", "error", error)
        now[0] = module.REPEATED_PERIOD_S
        report("idle", "closed", protocol="a")
    of_a = {"event": "closed", "log_level": "warning", "protocol": "a", "cause": "idle", "exc_info": None}
    assert entries == [
        *[of_a] * module.REPEATED_LINES,
        {**of_a, "protocol": "b"},
        {"event": "a bug", "log_level": "error", "cause": "internal", "exc_info": error},
        {**of_a, "suppressed": 2},
    ]
