"""A recorded history is loaded unchanged, whenever the recording process was killed."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

import pytest

from history import Closed, Operation, Recorder, counter, load, throttr

if TYPE_CHECKING:
    from pathlib import Path

ENDLESS = """
from history import Recorder, counter
recorder = Recorder({path!r}, 1)
while True:
    print(flush=True)
    for n in range(1000):
        recorder.end(recorder.start(counter.Acquire(b"a", n, 1000)), (0, n))
"""


def record(path: Path, *calls: Any) -> None:
    with Recorder(path, 1) as recorder:
        for call in calls:
            recorder.start(call)


def test_operations_are_loaded_in_the_order_of_their_starts(tmp_path: Path) -> None:
    before = time.monotonic_ns()
    with Recorder(tmp_path / "a", 1) as first, Recorder(tmp_path / "a", 2) as second:
        call = first.start(counter.Acquire(b"\0 \n", 2, 3))
        second.start(counter.Get("é\n"))
        first.end(call, (0, 2))
        first.closing()
    with Recorder(tmp_path / "b", 1) as witness:
        witness.closing()
        witness.closed()
        witness.closed()
    after = time.monotonic_ns()
    acquired, asked, closed = load([tmp_path / "b", tmp_path / "a"])
    assert acquired == Operation(1, counter.Acquire(b"\0 \n", 2, 3), acquired.started, acquired.ended, (0, 2))
    assert asked == Operation(2, counter.Get("é\n"), asked.started)
    assert closed == Operation(1, Closed(), closed.started, closed.ended)
    assert acquired.ended is not None
    assert closed.ended is not None
    assert before <= acquired.started <= asked.started <= acquired.ended <= closed.started <= closed.ended <= after


def test_enums_and_named_tuples_are_loaded_as_plain_values(tmp_path: Path) -> None:
    call = throttr.Update(b"k", throttr.Attribute.TTL, throttr.Change.INCREASE, 7)
    with Recorder(tmp_path / "a", 1) as recorder:
        recorder.end(recorder.start(call), True)
        recorder.end(recorder.start(throttr.Query(b"k")), (1, throttr.TTLType.SECONDS, 9))
    updated, asked = load([tmp_path / "a"])
    assert (updated.call, updated.answer, type(updated.call)) == (call, True, throttr.Update)
    assert asked.answer == (1, 4, 9)


def test_killed_process_leaves_its_recorded_operations(tmp_path: Path) -> None:
    code = f"import sys; sys.path[:0] = {sys.path!r}\n{ENDLESS.format(path=str(tmp_path / 'a'))}"
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    with process:
        assert process.stdout is not None
        process.stdout.readline()
        process.stdout.readline()
        process.kill()
    assert process.returncode == -signal.SIGKILL
    operations = load([tmp_path / "a"])
    assert len(operations) >= 1000
    assert [operation.ended is None for operation in operations[:-1]] == [False] * (len(operations) - 1)


def test_incomplete_last_record_is_ignored(tmp_path: Path) -> None:
    path = tmp_path / "a"
    record(path, counter.Get(b"a"), counter.Get(b"b"))
    data = path.read_bytes()
    for size in range(data.index(b"\n") + 1, len(data)):
        path.write_bytes(data[:size])
        assert [operation.call for operation in load([path])] == [counter.Get(b"a")]


def test_any_other_damage_is_reported(tmp_path: Path) -> None:
    path = tmp_path / "a"
    record(path, counter.Get(b"a"), counter.Get(b"b"))
    data = path.read_bytes()
    for place in range(len(data) - 1):
        path.write_bytes(data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :])
        with pytest.raises(ValueError, match="record"):
            load([path])


def test_inconsistent_records_are_reported(tmp_path: Path) -> None:
    record(tmp_path / "a", counter.Get(b"a"))
    with pytest.raises(ValueError, match="twice"):
        load([tmp_path / "a", tmp_path / "a"])
    with Recorder(tmp_path / "b", 1) as recorder:
        recorder.end(7, (0, 1))
    with pytest.raises(ValueError, match="never started"):
        load([tmp_path / "b"])
    with Recorder(tmp_path / "c", 1) as recorder:
        recorder.closed()
    with pytest.raises(ValueError, match="never started"):
        load([tmp_path / "c"])
