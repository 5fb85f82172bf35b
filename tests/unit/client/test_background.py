"""The background thread of a client: when it runs, waits, wakes and ends."""

from __future__ import annotations

import math
import os
import select
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from counterd.client import _background
from counterd.client._background import Background
from kit.daemon import wait_until
from kit.machine import LONG_S, PATIENCE

if TYPE_CHECKING:
    from collections.abc import Iterator

NAME = "counterd-tested"


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == NAME]


def descriptors() -> int:
    return len([*Path("/dev/fd").iterdir()])


class Worker:
    """An owner of a Background. runs: how often work() was called. due: what it returns. waits: seconds of each
    watch().
    """

    def __init__(self, idle_s: float = math.inf) -> None:
        self.background = Background(NAME, self.work, idle_s)
        self.due = math.inf
        self.runs = 0
        self.waits: list[float] = []
        self.failure: BaseException | None = None

    def work(self) -> tuple[Worker, float]:
        self.runs += 1
        if self.failure is not None:
            raise self.failure
        return self, self.due

    def watch(self, wake: int, seconds: float) -> bool:
        self.waits.append(seconds)
        poller = select.poll()
        poller.register(wake, select.POLLIN)
        return bool(poller.poll(None if seconds == math.inf else seconds * 1000))

    def until_it_waits(self, count: int) -> None:
        wait_until(lambda: len(self.waits) == count, f"it has waited {count} times")


@pytest.fixture
def worker() -> Iterator[Worker]:
    made = Worker()
    yield made
    made.background.stop()
    made.background.join(timeout=PATIENCE)
    assert not threads()


def test_the_thread_starts_when_needed_and_runs_when_woken(worker: Worker) -> None:
    worker.background.wake()
    assert not threads(), "only a thread that runs is woken"
    worker.background.start()
    worker.until_it_waits(1)
    worker.background.wake()
    worker.until_it_waits(2)
    assert (worker.runs, worker.waits) == (2, [math.inf] * 2)
    assert len(threads()) == 1


def test_start_wakes_the_thread_only_for_an_earlier_deadline(worker: Worker) -> None:
    due = worker.due = time.monotonic() + LONG_S
    worker.background.start()
    worker.until_it_waits(1)
    assert LONG_S / 2 < worker.waits[0] <= LONG_S
    worker.background.start(due)
    worker.background.start(due + 1)
    worker.background.start(due - 1)
    worker.until_it_waits(2)
    worker.background.wake()
    worker.until_it_waits(3)
    assert worker.runs == 3


def test_a_deadline_set_during_its_work_is_kept(worker: Worker) -> None:
    begun, go_on = threading.Event(), threading.Event()

    def work() -> tuple[Worker, float]:
        begun.set()
        go_on.wait(PATIENCE)
        return worker.work()

    worker.background = Background(NAME, work)
    worker.due = time.monotonic() + LONG_S
    worker.background.start()
    assert begun.wait(PATIENCE)
    worker.background.start(worker.due)
    go_on.set()
    worker.until_it_waits(2)


def test_an_idle_thread_ends_and_can_be_started_again() -> None:
    worker, before = Worker(idle_s=0.01), descriptors()
    for count in (1, 2):
        worker.background.start()
        wait_until(lambda: not threads(), "it ends")
        assert worker.runs >= count
        assert descriptors() == before
    worker.due = time.monotonic() + LONG_S
    worker.background.start()
    wait_until(lambda: worker.waits[-1] > 1, "it waits for what is due")
    assert len(threads()) == 1
    worker.background.stop()
    worker.background.join(timeout=PATIENCE)
    assert not threads()


def test_after_stop_no_thread_is_started(worker: Worker) -> None:
    worker.background.start()
    worker.background.stop()
    worker.background.stop()
    worker.background.join()
    assert not threads()
    worker.background.start()
    worker.background.wake()
    assert not threads()


def test_the_work_may_stop_the_thread() -> None:
    def work() -> tuple[Worker, float]:
        background.stop()
        background.join()
        return worker.work()

    worker = Worker()
    background = Background(NAME, work)
    background.start()
    background.join(timeout=PATIENCE)
    assert not threads()
    assert worker.runs == 1


def test_join_does_not_wait_while_the_caller_has_a_lock_that_the_thread_needs(worker: Worker) -> None:
    """So a signal handler may close a client."""
    lock = threading.RLock()

    def work() -> tuple[Worker, float]:
        with lock:
            return worker.work()

    worker.background = Background(NAME, work)
    with lock:
        worker.background.start()
        worker.background.stop()
        worker.background.join(threading.RLock(), lock)
        assert len(threads()) == 1


@pytest.mark.parametrize("cause", ["thread", "descriptor"])
def test_start_tries_again_if_no_thread_could_be_started(
    worker: Worker, monkeypatch: pytest.MonkeyPatch, cause: str
) -> None:
    error = RuntimeError("can't start new thread") if cause == "thread" else OSError("too many open files")

    def fails(*_: object) -> None:
        raise error

    before = descriptors()
    with monkeypatch.context() as patch:
        patch.setattr(*((threading.Thread, "start") if cause == "thread" else (_background, "Waker")), fails)
        for _ in range(2):
            with pytest.raises(type(error)):
                worker.background.start()
        worker.background.wake()
        worker.background.join()
    assert descriptors() == before
    worker.background.start()
    worker.until_it_waits(1)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_thread_that_failed_can_be_started_again(worker: Worker) -> None:
    before = descriptors()
    worker.failure = ZeroDivisionError()
    worker.background.start()
    wait_until(lambda: not threads(), "it ends")
    assert descriptors() == before
    worker.failure = None
    worker.background.start()
    worker.until_it_waits(1)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # a fork of a program with threads
def test_a_forked_child_closes_its_copy_of_the_descriptor(worker: Worker) -> None:
    before = descriptors()
    worker.background.start()
    worker.until_it_waits(1)
    child = os.fork()
    if child == 0:
        worker.background.after_fork()
        os._exit(0 if descriptors() == before else 1)
    assert os.waitpid(child, 0)[1] == 0
    worker.background.wake()
    worker.until_it_waits(2)
