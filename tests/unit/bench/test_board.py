"""The memory that load processes share with their parent. A whole load is in tests/functional/test_counterbench.py."""

from __future__ import annotations

import os
import time

import pytest

from counterd.bench._board import Board
from counterd.bench.result import HIGHEST_NS, histogram


def test_a_new_board_is_empty() -> None:
    board = Board(3, 4, 5)
    assert board.processes == 3
    assert board.stages() == ["connecting"] * 3
    assert board.granted() == [0] * 4
    assert set(board.totals().values()) == {0}
    assert (board.last_ns(), board.outcomes(), board.errors(), board.evidence()) == (0, {}, {}, [])
    assert (board.violations(), board.all_held(), board.stopped_ns()) == ((0, []), {}, 0)
    assert [board.take(kind) for kind in ("latency", "service", "give_back", "queue")] == [[], [], [], []]
    assert Board(1, 1, 0).all_held() == {}
    assert Board(2, 2, 5, tokens=True).all_held() == {}


def test_an_unknown_histogram_is_an_error() -> None:
    with pytest.raises(ValueError, match="tuple"):
        Board(1, 1, 0).take("age")


def test_without_puts_there_are_no_jobs() -> None:
    assert Board(1, 1, 5).jobs() == (set(), set())


def test_the_time_of_the_first_stop_is_kept() -> None:
    board = Board(1, 1, 0)
    before = time.monotonic_ns()
    board.stop()
    stopped = board.stopped_ns()
    assert before <= stopped <= time.monotonic_ns()
    board.stop()
    assert board.stopped_ns() == stopped


def test_a_board_is_shared_with_child_processes() -> None:
    board = Board(1, 1, 0)
    pid = os.fork()
    if pid == 0:
        board.stop()
        os._exit(0)
    assert os.waitpid(pid, 0) == (pid, 0)
    assert board.stopped_ns() > 0


AROUND = {2**power + more for power in range(42) for more in (-1, 0, 1)}
VALUES = sorted(
    {*range(5000), 123_456_789, HIGHEST_NS - 1, HIGHEST_NS, *(each for each in AROUND if each < HIGHEST_NS)}
)


def test_the_histogram_layout_is_that_of_the_library() -> None:
    """Each value is counted in the cell that the library would use, and is read as a value of that cell."""
    board, theirs = Board(1, 1, 0), histogram()
    for value in VALUES:
        board.record("latency", value)
        ((taken, times),) = board.take("latency")
        assert times == 1
        assert taken <= value
        assert theirs._counts_index_for(taken) == theirs._counts_index_for(value)
        assert taken == theirs.get_lowest_equivalent_value(value)


@pytest.mark.parametrize(
    ("value", "expected"), [(-1, 0), (-(1 << 63), 0), (HIGHEST_NS + 1, HIGHEST_NS), ((1 << 63) - 1, HIGHEST_NS)]
)
def test_values_out_of_range_are_counted_at_the_ends(value: int, expected: int) -> None:
    board, theirs = Board(1, 1, 0), histogram()
    board.record("service", value)
    ((taken, times),) = board.take("service")
    assert times == 1
    assert taken == theirs.get_lowest_equivalent_value(expected)
    assert theirs.record_value(taken)


def test_taken_counts_are_not_taken_again() -> None:
    board = Board(2, 2, 0)
    for value in (5, 5, 7):
        board.record("give_back", value)
    assert board.take("give_back") == [(5, 2), (7, 1)]
    board.record("give_back", 7)
    assert (board.take("give_back"), board.take("give_back"), board.take("latency")) == ([(7, 1)], [], [])
