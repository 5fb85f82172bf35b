"""How often `counterctl top` queries the server: in its interval, never without a pause, and not while it is paused."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

from counterd.cli.ctl import monitor
from counterd.cli.ctl.monitor import PollingThread
from counterd.cli.ctl.screen import TopState
from counterd.errors import ConnectionLost
from kit.machine import PATIENCE

if TYPE_CHECKING:
    from collections.abc import Callable

    import pytest


class Asked:
    """Records what an asker did."""

    def __init__(self, state: TopState, answer: Callable[[], object], share: float = 1.0) -> None:
        self.told: list[object] = []
        self.times: list[float] = []
        self._answer = answer
        self._more = threading.Semaphore(0)
        self.thread = PollingThread(state, self._ask, self._tell, share)
        self.thread.start()

    def wait(self, count: int) -> None:
        for _ in range(count):
            assert self._more.acquire(timeout=PATIENCE)

    def _ask(self) -> object:
        self.times.append(time.monotonic())
        return self._answer()

    def _tell(self, result: object) -> None:
        self.told.append(result)
        self._more.release()


def test_one_query_per_interval() -> None:
    state = TopState(interval=0.05)
    asked = Asked(state, lambda: "figures")
    asked.wait(4)
    state.paused = True  # and so for ever
    assert set(asked.told) == {"figures"}
    assert all(later - earlier >= 0.049 for earlier, later in zip(asked.times, asked.times[1:], strict=False))


def test_a_failed_query_is_reported_and_repeated_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(monitor, "RETRY_S", 0.05)
    answers = iter([ConnectionLost("gone"), OSError("no descriptor"), "figures"])
    state = TopState(interval=3600.0)

    def answer() -> object:
        answer = next(answers)
        if isinstance(answer, Exception):
            raise answer
        return answer

    asked = Asked(state, answer)
    asked.wait(3)
    state.paused = True  # and so for ever
    assert [str(told) for told in asked.told] == ["gone", "no descriptor", "figures"]


def test_slow_queries_are_made_less_often() -> None:
    state = TopState(interval=0.001)
    asked = Asked(state, lambda: time.sleep(0.05), share=0.25)
    asked.wait(3)
    state.paused = True  # and so for ever
    assert all(later - earlier >= 0.2 for earlier, later in zip(asked.times, asked.times[1:], strict=False))


def test_a_slow_query_is_made_at_once_if_the_user_waits_for_it() -> None:
    state = TopState(interval=0.001)
    asked = Asked(state, lambda: time.sleep(0.01), share=1e-6)
    asked.wait(1)
    asked.thread.look()
    time.sleep(0.1)
    assert len(asked.times) == 1
    asked.thread.look(hurries=True)
    asked.wait(1)
    time.sleep(0.1)
    assert len(asked.times) == 2, "and once"


def test_the_user_ends_a_pause() -> None:
    state = TopState(interval=0.01, paused=True)
    asked = Asked(state, lambda: "figures")
    asked.wait(1)
    time.sleep(0.1)
    asked.thread.look()
    time.sleep(0.1)
    assert len(asked.told) == 1
    state.paused = False
    asked.thread.look()
    asked.wait(2)
    state.paused = True


def test_a_changed_interval_counts_at_once() -> None:
    state = TopState(interval=3600.0)
    asked = Asked(state, lambda: "figures")
    asked.wait(1)
    state.interval = 0.01
    asked.thread.look()
    asked.wait(2)
    state.paused = True
