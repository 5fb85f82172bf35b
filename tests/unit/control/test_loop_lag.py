"""The monitor of the loop's lag, with a fake clock and loop."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from counterd.control import loop_lag
from counterd.control.loop_lag import BOUNDS, LoopLagMonitor


class Scene:
    """A loop and its clock. now: nanoseconds. fed: the times at which the watchdog was fed, in seconds."""

    def __init__(self, monkeypatch) -> None:
        self.now = 7_000_000_000
        self.fed: list[float] = []
        self.timers: list[tuple[float, object]] = []
        monkeypatch.setattr(loop_lag, "time", SimpleNamespace(monotonic_ns=lambda: self.now))

    def call_later(self, wait: float, call: object) -> SimpleNamespace:
        self.timers.append((wait, call))
        return SimpleNamespace(cancel=self.timers.clear)

    def start(self, feed_s: float = 0.0) -> LoopLagMonitor:
        made = LoopLagMonitor(self, lambda: self.fed.append(self.now / 1e9), feed_s)
        made.start()
        return made

    def beat(self, late: float = 0.0) -> None:
        wait, call = self.timers.pop()
        self.now += round((wait + late) * 1e9)
        call()


@pytest.fixture
def scene(monkeypatch) -> Scene:
    return Scene(monkeypatch)


def test_a_watchdog_with_a_tiny_period_does_not_use_all_of_the_cpu(scene):
    scene.start(feed_s=0.0000005)
    assert [wait for wait, _ in scene.timers] == [0.01]


def test_the_lag_of_each_beat_is_measured(scene):
    beating = scene.start()
    for late in (0.0, 0.001, 0.0015, 3.0, 60.0, 0.004):
        scene.beat(late)
    assert (beating.last, beating.max) == (0.004, 60.0)
    histogram = beating.histogram()
    counts = dict(zip((*BOUNDS, "more"), histogram.counts, strict=True))
    assert {bound: count for bound, count in counts.items() if count} == {
        0.001: 2,
        0.002: 1,
        0.005: 1,
        5.0: 1,
        "more": 1,
    }
    assert histogram.bounds == BOUNDS
    assert histogram.sum == pytest.approx(63.0065)
    assert scene.fed == []


def test_an_early_timer_counts_as_no_lag(scene):
    beating = scene.start()
    scene.beat(-0.001)
    assert (beating.last, beating.histogram().sum) == (0.0, 0.0)


def test_the_watchdog_is_fed_in_its_period(scene):
    scene.start(feed_s=0.25)
    for _ in range(10):
        scene.beat()
    assert scene.fed == pytest.approx([7.0, 7.3, 7.6, 7.9])


def test_a_watchdog_with_a_shorter_period_than_the_beats(scene):
    scene.start(feed_s=0.02)
    scene.beat()
    scene.beat()
    assert scene.fed == pytest.approx([7.0, 7.02, 7.04])


def test_a_stuck_loop_does_not_feed_the_watchdog(scene):
    scene.start(feed_s=0.1)
    scene.beat(late=5.0)
    assert scene.fed == pytest.approx([7.0, 12.1])


def test_no_beats_after_stop(scene):
    scene.start().stop()
    assert scene.timers == []
    LoopLagMonitor(scene, lambda: None).stop()
