"""Stats windows turn at multiples of the interval, whatever happens to the clock or the interval."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from counterd.control import windows
from counterd.control.windows import CHECK_S, Windows

DAY = 86400
NOON = 20_000 * DAY + DAY // 2


class Timer:
    def __init__(self, wait: float) -> None:
        self.wait = wait
        self.cancelled = False

    def cancel(self) -> None:
        self.cancelled = True


class Scene:
    """A server, its loop, store and driver, and the wall clock."""

    def __init__(self) -> None:
        self.now = float(NOON)
        self.begun: list[int] = []
        self.told: list[tuple[int, int]] = []
        self.woken = 0
        self.timers: list[Timer] = []
        self.loop = self.store = self.driver = self

    def time(self) -> float:
        return self.now

    def time_ns(self) -> int:
        return int(self.now * 1e9)

    def monotonic_ns(self) -> int:
        return 42

    def set_wall(self, unix_ns: int, now_ns: int) -> None:
        self.told.append((unix_ns, now_ns))

    def call_later(self, wait: float, callback) -> Timer:
        self.callback = callback
        self.timers.append(Timer(wait))
        self.due = self.now + wait
        return self.timers[-1]

    def begin_window(self, number: int) -> None:
        self.begun.append(number)

    def wake(self) -> None:
        self.woken += 1

    def jump(self, seconds: float) -> None:
        """Sets the wall clock; timers do not follow it."""
        self.now += seconds
        self.due += seconds

    def pass_time(self, seconds: float) -> None:
        """Lets the timer fire as often as it wants to."""
        end = self.now + seconds
        while self.due <= end:
            self.now = self.due
            self.callback()
        self.now = end


def ready(window: int) -> Any:
    return SimpleNamespace(window=window)


@pytest.fixture
def scene(monkeypatch):
    scene = Scene()
    monkeypatch.setattr(windows, "time", scene)
    return scene


def test_the_first_window_begins_at_once_and_the_next_at_midnight(scene):
    Windows(scene, DAY).check()
    assert (scene.begun, scene.woken) == ([1], 1)
    scene.pass_time(DAY / 2 - 0.5)
    assert scene.begun == [1]
    scene.pass_time(0.5)
    assert (scene.begun, scene.woken) == ([1, 2], 2)
    scene.pass_time(2 * DAY)
    assert scene.begun == [1, 2, 3, 4]


def test_the_clock_is_read_often_enough_not_to_miss_a_multiple(scene):
    Windows(scene, 10).check()
    scene.pass_time(9.5)
    assert max(timer.wait for timer in scene.timers) == CHECK_S
    assert scene.timers[-1].wait == pytest.approx(1.0)
    scene.now += 0.25
    scene.callback()
    assert scene.timers[-1].wait == pytest.approx(0.25)


def test_a_clock_that_jumps_begins_one_window(scene):
    Windows(scene, DAY).check()
    scene.jump(400 * DAY)
    scene.pass_time(10)
    assert scene.begun == [1, 2]


def test_a_corrected_clock_begins_a_window_at_the_next_multiple(scene):
    Windows(scene, DAY).check()
    scene.jump(400 * DAY)
    scene.pass_time(10)
    scene.jump(-400 * DAY)
    scene.pass_time(10)
    assert scene.begun == [1, 2]
    scene.pass_time(DAY)
    assert scene.begun == [1, 2, 3]


def test_another_interval_ends_the_window_at_its_own_multiple(scene):
    turning = Windows(scene, DAY)
    turning.check()
    turning.apply(ready(10))
    assert scene.begun == [1]
    assert [timer.cancelled for timer in scene.timers] == [True, False]
    scene.pass_time(10)
    assert scene.begun == [1, 2]
    turning.apply(ready(DAY))
    scene.pass_time(60)
    assert scene.begun == [1, 2]


def test_the_same_interval_again_changes_nothing(scene):
    turning = Windows(scene, 10)
    turning.check()
    scene.now += 10  # the multiple has passed, its timer has not fired yet
    turning.apply(ready(10))
    scene.callback()
    assert scene.begun == [1, 2]


def test_stop_cancels_the_timer(scene):
    turning = Windows(scene, 10)
    turning.stop()
    turning.check()
    turning.stop()
    assert scene.timers[-1].cancelled


def test_without_an_interval_the_store_gets_the_time_and_no_windows(scene):
    Windows(scene, 0).check()
    scene.pass_time(3 * CHECK_S)
    assert scene.told == [(int((NOON + step * CHECK_S) * 1e9), 42) for step in range(4)]
    assert scene.begun == []
