"""The queues in which the holds of one client wait for their turn, one queue for each name."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from counterd.client._wait_queues import WaitQueues


class Waiter:
    """An Event that counts how often it was set."""

    def __init__(self) -> None:
        self.sets = 0

    def set(self) -> None:
        self.sets += 1


def line(queues: WaitQueues, count: int, name: bytes = b"n") -> list[Waiter]:
    waiters = [Waiter() for _ in range(count)]
    for waiter in waiters:
        queues.join(name, waiter)
    return waiters


def sets(waiters: list[Waiter]) -> list[int]:
    return [waiter.sets for waiter in waiters]


def test_waiters_get_their_turns_in_order() -> None:
    queues = WaitQueues()
    waiters = line(queues, 3)
    for number, waiter in enumerate(waiters):
        assert [queues.is_first(b"n", each) for each in waiters[number:]] == [True] + [False] * (2 - number)
        queues.leave(b"n", waiter)
    assert sets(waiters) == [0, 1, 1]
    assert queues._queues == {}


def test_a_waiter_that_leaves_from_the_middle_wakes_no_other() -> None:
    queues = WaitQueues()
    waiters = line(queues, 3)
    queues.leave(b"n", waiters[1])
    queues.leave(b"n", waiters[2])
    assert sets(waiters) == [0, 0, 0]
    assert queues.is_first(b"n", waiters[0])


def test_a_release_wakes_the_first_waiter_of_that_name() -> None:
    queues = WaitQueues()
    waiters, others = line(queues, 2), line(queues, 2, b"m")
    queues.wake(b"n")
    queues.wake(b"nobody waits for it")
    assert (sets(waiters), sets(others)) == ([1, 0], [0, 0])


def test_a_queue_exists_as_long_as_it_has_waiters() -> None:
    queues = WaitQueues()
    first = Waiter()
    queue = queues.join(b"n", first)
    second = Waiter()
    assert queues.join(b"n", second) is queue
    assert queues.join(b"m", Waiter()) is not queue
    queues.leave(b"n", first)
    queues.leave(b"n", second)
    assert queues.join(b"n", first) is not queue


def test_leaving_without_having_joined_does_nothing() -> None:
    queues = WaitQueues()
    queues.leave(b"n", Waiter())
    waiters = line(queues, 2)
    queues.leave(b"n", Waiter())
    assert queues.is_first(b"n", waiters[0])


class Interrupted:
    """A lock whose first user is interrupted: before it acquires the lock or, if late, after it has released it."""

    def __init__(self, late: bool) -> None:
        self._lock = threading.Lock()
        self._late = late
        self._times = 0

    def __enter__(self) -> None:
        self._times += 1
        if self._times == 1 and not self._late:
            raise KeyboardInterrupt
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()
        if self._times == 1:
            raise KeyboardInterrupt


@pytest.mark.parametrize("late", [False, True])
def test_an_interrupted_leave_removes_the_waiter(late: bool) -> None:
    queues = WaitQueues()
    waiters = line(queues, 2)
    lock: Any = Interrupted(late)
    queues._lock = lock
    with pytest.raises(KeyboardInterrupt):
        queues.leave(b"n", waiters[0])
    assert queues.is_first(b"n", waiters[1])
    assert waiters[1].sets >= 1
