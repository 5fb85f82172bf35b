"""The driver's turns: when they happen, what each does, and for how long."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from counterd._core import Session, Store
from counterd.net.driver import SLICE_NS, Driver
from unit.net.fakes import FakeClock, FakeLoop

if TYPE_CHECKING:
    from collections.abc import Callable

MS = 1_000_000


class ToyStore(Store):
    """A store that is due when a test says so. ticks: the times of its ticks."""

    def __init__(self, **sizes: Any) -> None:
        super().__init__(**sizes)
        self.due_ns = -1
        self.slices_left = 0
        self.dirty: list[Session] = []
        self.ticks: list[int] = []
        self.on_tick: Callable[[], None] = lambda: None

    def next_deadline(self) -> int:
        return 0 if self.dirty or self.slices_left else self.due_ns

    def tick(self, now_ns: int) -> None:
        self.ticks.append(now_ns)
        self.slices_left = max(0, self.slices_left - 1)
        if now_ns >= self.due_ns:
            self.due_ns = -1
        self.on_tick()

    def take_dirty(self) -> list[Session]:
        dirty, self.dirty = self.dirty, []
        return dirty


class ToyConnection:
    """A connection that counts its pulls, each of which takes some time."""

    def __init__(self, name: str, pulled: list[str], clock: FakeClock, takes_ns: int = 0) -> None:
        self.name = name
        self.pulled = pulled
        self.clock = clock
        self.takes_ns = takes_ns

    def pull(self) -> None:
        self.pulled.append(self.name)
        self.clock.now_ns += self.takes_ns


class Scene:
    """A driver and everything around it."""

    def __init__(self, clock: FakeClock) -> None:
        self.clock = clock
        self.loop = FakeLoop()
        self.store = ToyStore(hash_key=bytes(16), make_session=Session)
        self.driver = Driver(self.loop, self.store, clock.monotonic_ns)
        self.pulled: list[str] = []

    def connection(self, name: str, takes_ns: int = 0) -> ToyConnection:
        return ToyConnection(name, self.pulled, self.clock, takes_ns)


@pytest.fixture
def scene() -> Scene:
    return Scene(FakeClock())


def test_a_store_that_is_not_due_gets_no_turn(scene: Scene) -> None:
    for _ in range(3):
        scene.driver.wake()
    assert scene.loop.pending() == 0
    assert scene.loop.live_timers() == []


@pytest.mark.parametrize("due", [False, True])
def test_background_tasks_get_a_turn_when_the_driver_is_woken(scene: Scene, due: bool) -> None:
    """All of them, once for several calls, even if the store has nothing to do, or only later."""
    turns: list[tuple[str, int]] = []
    for name in ("a", "b"):
        scene.driver.tasks.append(SimpleNamespace(turn=lambda now_ns, name=name: turns.append((name, now_ns))))
    scene.store.due_ns = scene.clock.now_ns + MS if due else -1
    for _ in range(3):
        scene.driver.wake()
    assert scene.loop.pending() == 1
    scene.loop.run()
    assert turns == [("a", scene.clock.now_ns), ("b", scene.clock.now_ns)]
    assert len(scene.loop.live_timers()) == due


def test_background_tasks_get_their_turn_after_connections(scene: Scene) -> None:
    """They then find what the connections have asked for."""
    scene.driver.tasks.append(SimpleNamespace(turn=lambda _: scene.pulled.append(f"busy: {scene.driver.is_busy}")))
    for name in ("a", "b"):
        scene.driver.enqueue(scene.connection(name, takes_ns=SLICE_NS))
    scene.loop.run()
    assert scene.pulled == ["a", "busy: True", "b", "busy: False"]


def test_a_store_that_is_due_gets_a_turn_of_its_own(scene: Scene) -> None:
    """However often it is woken: not at once, but with the loop's next turn."""
    scene.store.due_ns = 0
    for _ in range(3):
        scene.driver.wake()
    assert scene.store.ticks == []
    assert scene.loop.pending() == 1
    scene.loop.run()
    assert scene.store.ticks == [scene.clock.now_ns]
    assert scene.loop.pending() == 0


def test_long_work_is_one_slice_a_turn(scene: Scene) -> None:
    scene.store.slices_left = 5
    scene.driver.wake()
    for ticks in range(1, 6):
        assert scene.loop.turn() == 1
        assert len(scene.store.ticks) == ticks
    assert scene.loop.turn() == 0


@pytest.mark.parametrize(("ahead_ns", "wait_s"), [(1, 0.001), (MS - 1, 0.001), (MS, 0.001), (MS + 1, 0.002)])
def test_a_timer_never_fires_early(scene: Scene, ahead_ns: int, wait_s: float) -> None:
    """It would find nothing due, and be set for the same moment again."""
    scene.store.due_ns = scene.clock.now_ns + ahead_ns
    scene.driver.wake()
    assert scene.loop.live_timers() == [wait_s]


def test_a_later_deadline_sets_a_timer(scene: Scene) -> None:
    scene.store.due_ns = scene.clock.now_ns + 1500 * MS
    scene.driver.wake()
    scene.driver.wake()
    assert scene.loop.pending() == 0
    assert scene.loop.live_timers() == [1.5]
    scene.clock.now_ns += 1500 * MS
    scene.loop.fire()
    assert scene.store.ticks == [scene.clock.now_ns]
    assert scene.loop.live_timers() == []


def test_a_deadline_that_has_passed_is_due_now(scene: Scene) -> None:
    scene.store.due_ns = scene.clock.now_ns - 1
    scene.driver.wake()
    assert scene.loop.pending() == 1
    assert scene.loop.live_timers() == []


def test_an_earlier_deadline_takes_the_place_of_a_later_one(scene: Scene) -> None:
    start_ns = scene.clock.now_ns
    for ahead_s in (9, 5, 7):
        scene.store.due_ns = start_ns + ahead_s * 1000 * MS
        scene.driver.wake()
    assert scene.loop.live_timers() == [5.0]
    scene.store.due_ns = 0
    scene.driver.wake()
    assert scene.loop.live_timers() == []
    assert scene.loop.pending() == 1
    scene.loop.run()
    assert len(scene.store.ticks) == 1


def test_a_turn_looks_for_the_next_deadline(scene: Scene) -> None:
    scene.store.due_ns = 0
    scene.store.on_tick = lambda: setattr(scene.store, "due_ns", scene.clock.now_ns + 250 * MS)
    scene.driver.wake()
    scene.loop.run()
    assert scene.loop.live_timers() == [0.25]


def test_connections_in_the_queue_are_pulled_in_their_order_and_once(scene: Scene) -> None:
    for name in "abc":
        scene.driver.enqueue(scene.connection(name))
    assert scene.pulled == []
    assert scene.loop.pending() == 1
    scene.loop.run()
    assert scene.pulled == ["a", "b", "c"]
    assert scene.store.ticks == []


def test_a_turn_ends_with_the_pull_that_exceeds_its_time(scene: Scene) -> None:
    for number in range(7):
        scene.driver.enqueue(scene.connection(str(number), takes_ns=SLICE_NS * 2 // 5))
    counts = []
    while scene.loop.turn():
        counts.append(len(scene.pulled))
    assert counts == [3, 6, 7]
    assert scene.pulled == list("0123456")


def test_a_turn_is_well_below_a_millisecond() -> None:
    assert SLICE_NS <= MS


def test_a_connection_that_asks_again_while_it_is_pulled_goes_behind_the_others(scene: Scene) -> None:
    again = scene.connection("again", takes_ns=SLICE_NS * 3 // 5)
    others = [scene.connection(name, takes_ns=SLICE_NS * 3 // 5) for name in "xy"]
    pull = again.pull
    again.pull = lambda: (pull(), scene.driver.enqueue(again)) if len(scene.pulled) < 4 else pull()
    scene.driver.enqueue(again)
    for other in others:
        scene.driver.enqueue(other)
    assert scene.loop.turn() == 1
    assert scene.pulled == ["again", "x"]
    assert scene.loop.pending() == 1
    scene.loop.run()
    assert scene.pulled == ["again", "x", "y", "again", "again"]


def test_sessions_with_posted_output_are_pulled(scene: Scene) -> None:
    """Those whose connection is gone have no owner."""
    sessions = [scene.store.session() for _ in range(3)]
    for session, owner in zip(sessions, (scene.connection("a"), None, scene.connection("b")), strict=True):
        session.owner = owner
    scene.store.dirty = sessions
    scene.driver.wake()
    scene.loop.run()
    assert scene.pulled == ["a", "b"]


def test_output_posted_by_a_tick_is_sent_in_the_same_turn(scene: Scene) -> None:
    session = scene.store.session()
    session.owner = scene.connection("a")
    scene.store.due_ns = 0
    scene.store.on_tick = lambda: setattr(scene.store, "dirty", [session])
    scene.driver.wake()
    assert scene.loop.turn() == 1
    assert scene.pulled == ["a"]


def test_a_store_that_is_always_due_does_not_keep_connections_waiting(scene: Scene) -> None:
    """Even when each of its slices takes as long as a turn may, as on a slow machine."""
    scene.store.slices_left = 100
    scene.store.on_tick = lambda: setattr(scene.clock, "now_ns", scene.clock.now_ns + 2 * SLICE_NS)
    for number in range(5):
        scene.driver.enqueue(scene.connection(str(number)))
    for _ in range(10):
        scene.loop.turn()
    assert scene.pulled == list("01234")
    assert scene.store.slices_left == 90


def test_a_failed_tick_is_repeated_after_a_second(scene: Scene) -> None:
    """A wake meanwhile, in that turn or later, causes neither an earlier tick nor a second one."""

    def fail() -> None:
        raise ValueError("a mistake of ours")

    scene.store.slices_left = 100
    scene.store.on_tick = fail
    connection = scene.connection("a")
    for failures in range(1, 5):
        scene.driver.enqueue(connection)
        scene.loop.run()
        for _ in range(3):
            scene.driver.wake()
            scene.loop.run()
        assert (len(scene.loop.errors), scene.loop.live_timers()) == (failures, [1.0])
        scene.clock.now_ns += 1000 * MS
        scene.loop.fire()


def test_a_failed_tick_does_not_end_the_turns(scene: Scene) -> None:
    """An exception is a bug of ours; other connections are still served, and due work is tried again in a while."""

    def fail() -> None:
        scene.store.on_tick = lambda: None
        raise ValueError("a mistake of ours")

    scene.store.slices_left = 3
    scene.store.on_tick = fail
    scene.driver.enqueue(scene.connection("a"))
    scene.loop.run()
    assert [str(error) for error in scene.loop.errors] == ["a mistake of ours"]
    assert scene.pulled == ["a"]
    assert (len(scene.store.ticks), scene.loop.live_timers()) == (1, [1.0])
    scene.clock.now_ns += 1000 * MS
    scene.loop.fire()
    scene.loop.run()
    assert len(scene.store.ticks) == 3
