"""What load processes share with their parent; what they write onto it is in tests/functional/test_counterbench.py."""

from __future__ import annotations

import os
import time

import pytest

from counterd.bench._board import Board


def test_a_new_board_says_nothing() -> None:
    board = Board(3, 5)
    assert board.processes == 3
    assert board.stages() == ["connecting"] * 3
    assert set(board.totals().values()) == {0}
    assert (board.last_ns(), board.outcomes(), board.errors(), board.evidence()) == (0, {}, {}, [])
    assert (board.violations(), board.all_held(), board.stopped_ns()) == ((0, []), {}, 0)
    assert [board.take(kind) for kind in ("latency", "service", "give_back")] == [[], [], []]
    assert Board(1, 0).all_held() == {}


def test_what_is_not_counted_is_an_error() -> None:
    with pytest.raises(ValueError, match="tuple"):
        Board(1, 0).take("age")


def test_an_order_to_stop_has_its_time_and_keeps_it() -> None:
    board = Board(1, 0)
    before = time.monotonic_ns()
    board.stop()
    stopped = board.stopped_ns()
    assert before <= stopped <= time.monotonic_ns()
    board.stop()
    assert board.stopped_ns() == stopped


def test_it_is_shared_with_children() -> None:
    board = Board(1, 0)
    pid = os.fork()
    if pid == 0:
        board.stop()
        os._exit(0)
    assert os.waitpid(pid, 0) == (pid, 0)
    assert board.stopped_ns() > 0
