"""Daemons that share limits while servers, daemons and the network fail, for a few seconds; and which histories are
violations."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from counterd.protocols.counter.wire import Permit, Rate
from drills.shared import verdict
from drills.shared.verdict import Facts, Failover, Lapse, Split
from history import Closed, Operation
from history.counter import Acquire, Release
from history.takes import Take

DRILL = Path(__file__).parent / "shared"
SECOND = 1_000_000_000
NAME = b"n"
RATE = Rate(b"r", 0, 10, 1_000_000, 5)
ONE, OTHER = 0, 1  # connections, one of each daemon


def facts(**events: Any) -> Facts:
    return Facts(2, lambda name: 0 if name in (NAME, RATE.name) else 1, **events)


def acquire(client: int, started: int, ended: int | None, amount: int = 2, name: bytes = NAME) -> Operation:
    return Operation(client, Acquire(name, amount, 3), started, ended, None if ended is None else (0, amount))


def release(client: int, started: int, ended: int | None, amount: int = 2) -> Operation:
    return Operation(client, Release(NAME, amount), started, ended, None if ended is None else (0, None))


def found(*operations: Operation, **events: Any) -> int:
    """Returns how many counters have no explanation."""
    known = facts(**events)
    violations, undecided = verdict.unexplained(verdict.permits(sorted(operations, key=started_of), known), known)
    assert not undecided
    return len(violations)


def started_of(operation: Operation) -> int:
    return operation.started


def test_permits_granted_twice_are_found() -> None:
    one = acquire(ONE, 0, 10), release(ONE, 30, 40)
    assert found(*one, acquire(OTHER, 15, 20)) == 1
    assert found(*one, acquire(OTHER, 15, 20, 1)) == 0
    assert found(*one, acquire(OTHER, 15, 31)) == 0, "the release may have been first"
    assert found(*one, Operation(OTHER, Acquire(NAME, 1, 3), 15, 20, (0x21, None))) == 0, "any request may be refused"
    assert found(*one, acquire(OTHER, 15, 20), acquire(ONE + 2, 16, 21, name=b"m")) == 1


def test_permits_of_takes_count_too() -> None:
    items = tuple(Permit(NAME, 2, 3)), tuple(RATE._replace(amount=1))
    one = Operation(ONE, Take(1, items, 500), 0, 10, (0, (7, (1, 4)))), release(ONE, 30, 40)
    assert found(*one, acquire(OTHER, 15, 20)) == 1
    assert found(*one, acquire(OTHER, 15, 20, 1)) == 0
    assert [amount for _, amount in verdict.grants_of(RATE, one, facts())] == [1]
    assert found(one[0]._replace(answer=(0x21, (1, 0, None))), acquire(OTHER, 15, 20)) == 0
    assert found(one[0]._replace(ended=None, answer=None), acquire(OTHER, 15, 20)) == 0


def test_a_release_of_unheld_permits_is_found() -> None:
    assert found(acquire(ONE, 0, 10, 1), release(ONE, 30, 40, 2)) == 1


def test_a_connection_may_have_ended_before_its_last_answer_came() -> None:
    dropped = acquire(ONE, 0, 10), Operation(ONE, Closed(), 50, 51)
    assert found(*dropped, acquire(OTHER, 15, 20)) == 0
    renewed = *dropped[:1], Operation(ONE, Release(NAME, 3), 30, 40, (0x22, None)), dropped[1]
    assert found(*renewed, acquire(OTHER, 15, 20)) == 1, "it was there until its last request, at least"


def test_permits_of_a_stuck_daemon_may_be_granted_to_others() -> None:
    operations = acquire(ONE, 0, 10), release(ONE, 30, 40), acquire(OTHER, 15, 20)
    assert found(*operations, lapses=[Lapse(0, None, 12, 14)]) == 0
    assert found(*operations, lapses=[Lapse(None, 0, 12, 14)]) == 0
    assert found(*operations, lapses=[Lapse(1, None, 12, 14)]) == 1, "of the other daemon"
    assert found(*operations, lapses=[Lapse(0, 1, 12, 14)]) == 1, "of another server"
    assert found(*operations, lapses=[Lapse(0, None, 21, 25)]) == 1, "later"
    later = acquire(ONE, 13, 14), release(ONE, 30, 40), acquire(OTHER, 15, 20)
    assert found(*later, lapses=[Lapse(0, None, 11, 13)]) == 1, "what it granted when it went on"


def test_two_masters_may_grant_twice_the_maximum() -> None:
    operations = acquire(ONE, 0, 10), acquire(OTHER, 15, 20)
    assert found(*operations, splits=[Split(0, 5, 16)]) == 0
    assert found(*operations, splits=[Split(0, 5, 14)]) == 1, "it was over"
    assert found(*operations, splits=[Split(1, 5, 16)]) == 1, "of another server"
    assert found(*operations, acquire(ONE + 2, 15, 20, 3), splits=[Split(0, 5, 16)]) == 1, "but not three times"


def test_the_largest_sum_that_was_held() -> None:
    one = acquire(ONE, 0, 10), release(ONE, 30, 40), acquire(ONE, 50, 60), release(ONE, 70, 80)
    other = acquire(OTHER, 20, 29, 1), Operation(OTHER, Closed(), 31, 31)
    assert verdict.most_held(one, facts()) == ({NAME: 2}, {})
    assert verdict.most_held([*one, *other], facts()) == ({NAME: 3}, {})
    assert verdict.most_held([*one, *other], facts(splits=[Split(0, 25, 35)])) == ({NAME: 2}, {NAME: 3})


def units(amount: int, started_s: float, ended_s: float) -> Operation:
    take = Take(1, (tuple(RATE._replace(amount=amount)),))
    return Operation(ONE, take, int(started_s * SECOND), int(ended_s * SECOND), (0, (1, (0,))))


def beyond(*takes: Operation, **events: Any) -> float:
    return verdict.excess(RATE, takes, facts(**events))


def test_units_beyond_a_rate_are_counted() -> None:
    assert beyond(units(2, 1, 1)) == pytest.approx(-3)
    assert beyond(units(5, 1, 1), units(2, 1.1, 1.1)) == pytest.approx(1)
    assert beyond(units(5, 1, 1), units(2, 1.1, 1.2)) == pytest.approx(0), "it may have been on time at its end"
    steady = [units(1, second / 10, second / 10) for second in range(100)]
    assert beyond(*steady) == pytest.approx(-4)
    assert beyond(*steady, *steady[50:53]) == pytest.approx(-1), "what is left is less from then on"


def test_units_lost_in_a_failover_may_be_taken_again() -> None:
    takes = units(5, 1, 1), units(5, 1.2, 1.2), units(2, 1.4, 1.4)
    assert beyond(*takes) == pytest.approx(3)
    assert beyond(*takes, failovers=[Failover(0, int(1.1 * SECOND), True)]) == pytest.approx(0)
    assert beyond(*takes, failovers=[Failover(1, int(1.1 * SECOND), True)]) == pytest.approx(3), "of another server"
    assert beyond(*takes, failovers=[Failover(0, SECOND // 2, True)]) == pytest.approx(3), "nothing had been taken"


def test_units_that_two_masters_may_have_granted_do_not_count() -> None:
    takes = units(5, 1, 1), units(5, 1.2, 1.2), units(2, 1.4, 1.4)
    assert beyond(*takes, splits=[Split(0, int(1.1 * SECOND), int(1.3 * SECOND))]) == pytest.approx(0)
    assert beyond(*takes, splits=[Split(1, int(1.1 * SECOND), int(1.3 * SECOND))]) == pytest.approx(3)


def drill(*options: str) -> str:
    """Runs the drill. Returns its output."""
    result = subprocess.run(
        [sys.executable, DRILL, *options],
        stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert (result.returncode, result.stderr) == (0, ""), result.stdout
    assert "violation" not in result.stdout
    assert "faults" in result.stdout
    return result.stdout


@pytest.mark.needs("redis-server")
def test_no_limit_is_exceeded_and_everything_comes_back() -> None:
    said = drill("--seconds", "6", "--lease", "3", "--faults", "kill_master", "stop_daemon", "kill_daemon")
    assert "grants so far" in said


@pytest.mark.needs("redis-server", "ip", "networks")
def test_limits_are_kept_between_hosts_that_are_cut_off() -> None:
    said = drill("--seconds", "6", "--lease", "3", "--on-loss", "keep", "--faults", "cut_daemon", "split", "part")
    assert "nothing was cut off" not in said
