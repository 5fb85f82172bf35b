"""The timing wheel: never early, at most a tick late, everything once, in bounded steps, compared with a dict."""

from __future__ import annotations

import random

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kit.machine import examples
from native import load

Wheelwork = load("_timers").Wheelwork

TICK = 1 << 20
SECOND = 10**9
HOUR = 3600 * SECOND
YEAR = 8766 * HOUR
INT64_MAX = (1 << 63) - 1
LEVELS = 8
PLENTY = 1_000_000


def first_tick(due_ns: int) -> int:
    """The time of the first tick at which a timer for this time can fire, in ns."""
    return max(0, -(-due_ns // TICK) * TICK)


def test_zeroed_memory_is_an_empty_wheel():
    wheel = Wheelwork(5)
    wheel.audit()
    assert (wheel.armed, wheel.elapsed, wheel.next_ns()) == (0, 0, -1)
    assert not wheel.is_armed(1)
    assert wheel.take(YEAR, 7) == ([], 7)


def test_the_wheel_has_the_documented_size():
    assert Wheelwork(1).wheel_size == 16 + 8 * LEVELS + 8 + 4 * 8 * 64 * LEVELS


def test_an_empty_wheel_moves_on_without_cascades():
    wheel = Wheelwork(1)
    wheel.take(YEAR, 1)
    assert wheel.elapsed == YEAR // TICK
    wheel.arm(1, YEAR + 10 * TICK)
    assert wheel.take(YEAR + 11 * TICK, 1) == ([1], 0)  # no step for a cascade


DUES = [1, TICK - 1, TICK, TICK + 1, 63 * TICK, 64 * TICK, 64 * TICK + 1, SECOND, HOUR, YEAR, 200 * YEAR]
DUES += [TICK << (6 * level) for level in range(LEVELS - 1)]
DUES += [(TICK << (6 * level)) - TICK for level in range(1, LEVELS)]


@pytest.mark.parametrize("start", [0, TICK, 63 * TICK, 4095 * TICK + 5, 10 * HOUR, 50 * YEAR])
@pytest.mark.parametrize("due", DUES)
def test_never_early_and_at_its_tick(start: int, due: int):
    wheel = Wheelwork(3)
    wheel.take(start, PLENTY)
    wheel.arm(2, start + due)
    wheel.audit()
    moment = first_tick(start + due)
    assert start + due <= moment < start + due + TICK
    assert wheel.take(moment - 1, PLENTY)[0] == []
    wheel.audit()
    assert wheel.is_armed(2)
    assert wheel.next_ns() == moment
    assert wheel.take(moment, PLENTY)[0] == [2]
    wheel.audit()
    assert (wheel.armed, wheel.next_ns(), wheel.is_armed(2)) == (0, -1, False)


@pytest.mark.parametrize("due", [-INT64_MAX - 1, -1, 0, 1, 7 * SECOND, 10 * SECOND])
def test_a_past_deadline_is_taken_next(due: int):
    wheel = Wheelwork(2)
    wheel.take(10 * SECOND, 1)
    wheel.arm(1, due)
    wheel.audit()
    assert 0 <= wheel.next_ns() <= first_tick(10 * SECOND)
    assert wheel.take(10 * SECOND + TICK, 1) == ([1], 0)


def test_the_largest_time_never_comes():
    wheel = Wheelwork(2)
    wheel.arm(1, INT64_MAX)
    wheel.arm(2, INT64_MAX - TICK + 1)
    wheel.audit()
    assert wheel.take(INT64_MAX, PLENTY)[0] == [2]
    wheel.audit()
    assert (wheel.next_ns(), wheel.armed) == (INT64_MAX, 1)


def test_a_clock_that_runs_back_does_no_harm():
    wheel = Wheelwork(2)
    wheel.take(HOUR, 1)
    wheel.arm(1, HOUR - SECOND)
    wheel.arm(2, HOUR + SECOND)
    assert wheel.take(-SECOND, PLENTY)[0] == [1]
    assert wheel.take(0, PLENTY)[0] == []
    assert wheel.elapsed == HOUR // TICK
    wheel.audit()
    assert wheel.take(HOUR + 2 * SECOND, PLENTY)[0] == [2]


def test_arming_again_replaces_the_deadline():
    wheel = Wheelwork(3)
    for due in (HOUR, SECOND, HOUR + 1, 2 * HOUR, 3 * SECOND, 4 * SECOND):
        wheel.arm(2, due)
        wheel.audit()
    assert wheel.armed == 1
    assert wheel.take(first_tick(4 * SECOND) - 1, PLENTY)[0] == []
    assert wheel.take(first_tick(4 * SECOND), PLENTY)[0] == [2]
    assert wheel.take(YEAR, PLENTY)[0] == []


def test_a_record_extended_many_times_moves_only_when_it_is_met():
    wheel = Wheelwork(1)
    wheel.arm(1, SECOND)
    before = wheel.next_ns()
    for due in range(SECOND, HOUR, 10 * SECOND):
        wheel.arm(1, due)
        wheel.audit()
        assert wheel.next_ns() == before
    steps = 0
    while (now := wheel.next_ns()) < first_tick(due):
        taken, left = wheel.take(now, LEVELS)
        steps += LEVELS - left
        assert taken == []
        wheel.audit()
    assert 0 < steps <= 2 * LEVELS
    assert wheel.take(now, 1) == ([1], 0)


def test_a_due_record_can_be_extended_before_it_is_taken():
    wheel = Wheelwork(3)
    for number in (1, 2, 3):
        wheel.arm(number, SECOND)
    now = first_tick(SECOND)
    first, _ = wheel.take(now, 2)
    waiting = {1, 2, 3} - set(first)
    for number in waiting:
        wheel.arm(number, HOUR)
        wheel.audit()
    assert set(first) | set(wheel.take(first_tick(HOUR) - 1, PLENTY)[0]) == {1, 2, 3} - waiting
    wheel.audit()
    assert set(wheel.take(first_tick(HOUR), PLENTY)[0]) == waiting


def test_a_disarmed_record_is_not_taken_and_disarming_twice_is_harmless():
    wheel = Wheelwork(3)
    for number in (1, 2, 3):
        wheel.arm(number, SECOND)
    for number in (2, 2, 1):
        wheel.disarm(number)
        wheel.audit()
    assert wheel.armed == 1
    assert wheel.take(HOUR, PLENTY)[0] == [3]
    wheel.disarm(3)
    assert wheel.armed == 0


@pytest.mark.parametrize("order", ["first", "middle", "last"])
def test_records_can_be_disarmed_at_any_place_of_a_chain(order: str):
    wheel = Wheelwork(40)
    chain = {8, 16, 24, 32, 40}
    for number in sorted(chain):
        wheel.arm(number, SECOND)
    gone = {"first": 40, "middle": 24, "last": 8}[order]
    wheel.disarm(gone)
    wheel.audit()
    assert set(wheel.take(HOUR, PLENTY)[0]) == chain - {gone}


def test_a_step_is_one_record_moved_or_taken():
    wheel = Wheelwork(100)
    for number in range(1, 101):
        wheel.arm(number, 64 * TICK + number % 5 * TICK)  # in one slot of level 1
    assert wheel.take(64 * TICK, 0) == ([], 0)
    # Twenty are due, eighty go down; each is a step.
    first, left = wheel.take(64 * TICK, 30)
    assert left == 0
    wheel.audit()
    second, left = wheel.take(64 * TICK, 80)
    assert left == 10
    assert sorted(first + second) == list(range(5, 101, 5))
    assert wheel.next_ns() == 65 * TICK
    taken, left = wheel.take(65 * TICK, 25)
    assert (sorted(taken), left) == (list(range(1, 101, 5)), 5)
    wheel.audit()


def test_records_can_be_armed_anew_during_a_cascade():
    """A slot of level 2 cascades, and between two steps its records are armed anew, for that time and others."""
    wheel = Wheelwork(60)
    base = 4096 * TICK
    for number in range(1, 41):
        wheel.arm(number, base + (1 + number * 7) * TICK)
    assert wheel.take(base, 10) == ([], 0)
    wheel.audit()
    assert wheel.next_ns() <= base
    expected = {number: base + (1 + number * 7) * TICK for number in range(1, 41)}
    changes = {1: base + TICK, 2: 9 * base, 3: base + 64 * TICK, 20: base + 2 * 141 * TICK, 39: base - SECOND, 40: base}
    changes |= {41: base + TICK, 42: base + 4095 * TICK, 43: 2 * base, 44: 0}
    for number, due in changes.items():
        wheel.arm(number, due)
        wheel.audit()
    for number in (4, 5, 31, 32):
        wheel.disarm(number)
        wheel.audit()
        del expected[number]
    expected |= changes
    taken = {}
    now = base
    while wheel.armed:
        for number in wheel.take(now, 3)[0]:
            taken[number] = now
        wheel.audit()
        now = max(now, wheel.next_ns())
    assert taken == {number: max(base, first_tick(due)) for number, due in expected.items()}


def test_a_slot_that_empties_while_it_cascades():
    wheel = Wheelwork(5)
    for number in range(1, 6):
        wheel.arm(number, 65 * TICK)
    wheel.take(64 * TICK, 1)
    for number in range(1, 6):
        wheel.disarm(number)
        wheel.audit()
    assert wheel.next_ns() == -1
    wheel.arm(1, 66 * TICK)
    wheel.audit()
    assert wheel.next_ns() == 66 * TICK
    assert wheel.take(66 * TICK, 1) == ([1], 0)


def test_many_records_of_one_slot_are_taken_in_bounded_pieces():
    count = 200_000
    wheel = Wheelwork(count)
    for number in range(1, count + 1):
        wheel.arm(number, HOUR)
    seen = bytearray(count + 1)
    steps = 0
    for _ in range(LEVELS * count // 1000):
        taken, left = wheel.take(HOUR + TICK, 1000)
        steps += 1000 - left
        for number in taken:
            seen[number] += 1
        if left:
            break
    assert seen == b"\0" + b"\1" * count
    assert steps == count  # late as they are, none went down first
    wheel.audit()


def test_the_steps_of_a_record_are_bounded_by_the_levels():
    """However far ahead, and although every cascade happens at its own time."""
    numbers = random.Random(5)
    count = 500
    wheel = Wheelwork(count)
    for number in range(1, count + 1):
        wheel.arm(number, numbers.randrange(1 << numbers.randrange(20, 63)))
    steps = 0
    for _ in range(LEVELS * count):
        if wheel.armed:
            steps += PLENTY - wheel.take(wheel.next_ns(), PLENTY)[1]
    assert wheel.armed == 0
    assert count <= steps <= LEVELS * count


@pytest.mark.parametrize(("stride", "offset"), [(16, 0), (24, 8), (64, 48), (96, 80), (128, 0)])
def test_records_of_any_size(stride: int, offset: int):
    wheel = Wheelwork(50, stride=stride, offset=offset)
    for number in range(1, 51):
        wheel.arm(number, number * HOUR)
    wheel.audit()
    taken = []
    while wheel.armed:
        taken += wheel.take(wheel.next_ns(), PLENTY)[0]
    assert taken == list(range(1, 51))


DAMAGE = [
    (16, "next", 16, "wrong predecessor"),
    (16, "next", 99, "record 99"),
    (8, "next", 0, "4 timers are armed, 3 listed, 4 counted"),
    (16, "prev", 0, "wrong predecessor"),
    (16, "prev", 0x80000008, "wrong predecessor"),
    (5, "prev", 1, "5 timers are armed, 4 listed, 4 counted"),
    (4, "due_ns", SECOND // 2, "timer 4 of tick"),
    (8, "armed", 5, "5 counted"),
    (8, "armed", 0, "more timers than the 0"),
    (8, "elapsed", 1000, "is in use, but the time has passed it"),
    (8, "cascading", 3, "slot 3 cannot cascade"),
    (8, "cascading", 512, "slot 512 cannot cascade"),
    (8, "cascading", 65, "slot 65 cascades, but does not begin"),
    (8, "occupied", 0, "slot 0: its bit"),
    (8, "occupied", 7, "slot 448: its bit"),
]


@pytest.mark.parametrize(("number", "what", "value", "said"), DAMAGE)
def test_the_audit_finds_damage(number: int, what: str, value: int, said: str):
    wheel = Wheelwork(24)  # three of one chain
    for armed in (24, 8, 16):
        wheel.arm(armed, SECOND)
    wheel.arm(4, HOUR)
    wheel.audit()
    wheel.damage(number, what, value)
    with pytest.raises(AssertionError, match=said):
        wheel.audit()


# ---- against a dict -------------------------------------------------------------------------------------------------

RECORDS = 20  # so that some share a chain
numbers = st.integers(1, RECORDS)
# Around what a digit of each level is wide, and anything.
spans = st.one_of(
    st.integers(0, 5 * TICK),
    st.builds(
        lambda level, digit, off: max(0, (digit << (20 + 6 * level)) + off),
        st.integers(0, 6),
        st.integers(1, 63),
        st.sampled_from([-TICK - 1, -TICK, -1, 0, 0, 1, TICK]),
    ),
    st.integers(0, 3 * HOUR),
    st.integers(0, 40 * YEAR),
)
few_steps = st.sampled_from([0, 1, 1, 2, 3, 5, 20, PLENTY])


class WheelMachine(RuleBasedStateMachine):
    """Compares one wheel with a dict of the armed timers and their times."""

    @initialize(start=st.sampled_from([0, 0, 64 * TICK - 1, 10 * HOUR, 30 * YEAR]))
    def make(self, start: int) -> None:
        self.wheel = Wheelwork(RECORDS)
        self.due: dict[int, int] = {}
        self.now = start

    @rule(number=numbers, span=spans)
    def arm(self, number: int, span: int) -> None:
        self.due[number] = min(self.now + span, INT64_MAX)
        self.wheel.arm(number, self.due[number])

    @rule(number=numbers, span=spans)
    def arm_in_the_past(self, number: int, span: int) -> None:
        self.due[number] = self.now - span
        self.wheel.arm(number, self.due[number])

    @rule(number=numbers, span=st.integers(-2 * TICK, 64 * TICK))
    def extend(self, number: int, span: int) -> None:
        """Moves a timer by little: within its slot, or into the next."""
        if number in self.due:
            self.due[number] = min(self.due[number] + span, INT64_MAX)
            self.wheel.arm(number, self.due[number])

    @rule(span=spans)
    def arm_all_together(self, span: int) -> None:
        """Arms all timers in one slot far ahead, which will take many steps to cascade."""
        for number in range(1, RECORDS + 1):
            self.due[number] = min(self.now + span + number * 3 * TICK, INT64_MAX)
            self.wheel.arm(number, self.due[number])

    @rule(number=numbers)
    def disarm(self, number: int) -> None:
        self.wheel.disarm(number)
        self.due.pop(number, None)

    @rule(span=spans, steps=few_steps)
    def advance(self, span: int, steps: int) -> None:
        self.now = min(self.now + span, INT64_MAX)
        self.take(steps)

    @rule(steps=few_steps)
    def advance_to_next(self, steps: int) -> None:
        """Advances as the driver does: to the next time that the wheel asks for."""
        if self.due:
            self.now = max(self.now, self.wheel.next_ns())
            self.take(steps)

    @rule(steps=few_steps)
    def take(self, steps: int) -> None:
        taken, left = self.wheel.take(self.now, steps)
        assert len(taken) <= steps - left
        for number in taken:
            assert self.due.pop(number) <= self.now  # once: it would not be there again
        if left:
            moment = self.now // TICK * TICK  # what was due by the beginning of this tick is gone
            assert all(due > moment for due in self.due.values())

    @invariant()
    def agrees(self) -> None:
        if not hasattr(self, "wheel"):
            return
        self.wheel.audit()
        assert self.wheel.armed == len(self.due)
        assert {n for n in range(1, RECORDS + 1) if self.wheel.is_armed(n)} == self.due.keys()
        assert self.wheel.elapsed <= self.now // TICK
        if self.due:
            latest = max(self.wheel.elapsed * TICK, min(map(first_tick, self.due.values())))
            assert 0 <= self.wheel.next_ns() <= min(latest, INT64_MAX)
        else:
            assert self.wheel.next_ns() == -1

    def teardown(self) -> None:
        """Lets all timers fire, in as many steps as there are levels, of a driver that wakes only when it is told."""
        for _ in range(2 * RECORDS * LEVELS):
            if all(first_tick(due) > INT64_MAX for due in getattr(self, "due", {}).values()):
                return
            self.advance_to_next(1)
            self.agrees()
        raise AssertionError("it never comes to its end")


WheelMachine.TestCase.settings = settings(
    max_examples=examples(150),
    stateful_step_count=50,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
)
TestWheel = WheelMachine.TestCase
