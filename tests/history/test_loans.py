"""The checker on histories of jobs with permits: it accepts those of a correct server, and finds every defect of a
wrong one."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest

from history import Closed, Operation, check
from history.beanstalk import Bury, Delete, JobModel, Put, Release, Reserve, Restarted, Touch, jobs
from history.borrowers import JOB_CALLS, Lender, LentCalls, LentEngine
from history.counter import Acquire, Get
from history.counter import Release as GiveBack
from history.loans import LentModel, as_acquires, excused, gates, lent
from history.takers import LATE_NS, MAXIMUM, Crowd, take_calls
from history.takes import Take, prepared
from history.waiting import mistakes

SEEDS = range(3)
CALLS = 1200
COUNTERS = {b"00": MAXIMUM, b"01": 2}
S = 1_000_000_000
LATE = 2_000_000  # ns
CLIENT = -9  # who kills the daemon


def wrong(operations: list[Operation], *, journal: bool = False, late_ns: int = LATE_NS) -> list[str]:
    """All complaints about a history."""
    of_jobs = [one for one in operations if isinstance(one.call, (*JOB_CALLS, Closed, Restarted))]
    others = [one for one in operations if not isinstance(one.call, (*JOB_CALLS, Closed, Restarted))]
    model = JobModel(late_ns=late_ns, journal=journal)
    found = [] if (violation := check(jobs(of_jobs), model)) is None else [str(violation)]
    loans = lent(of_jobs)
    closed = [one for one in loans if isinstance(one.call, Closed)]
    found += mistakes([*others, *closed, *as_acquires(loans, late_ns)], late_ns=late_ns)
    history = list(excused(prepared([*others, *loans])))
    shared = check(history, LentModel(history, gates(of_jobs), late_ns=late_ns, journal=journal))
    return [*found, *([] if shared is None else [str(shared)])]


def seen(seed: int, lender: type[Lender] = Lender) -> list[Operation]:
    choose = LentCalls(take_calls(1, rates=False, waits_ms=(0, 5, 50)), COUNTERS)
    crowd = Crowd(Random(seed), LentEngine(lender), choose, clients=8, dying=0.03)
    choose.history = crowd.history
    return crowd.run(CALLS)


# ---- right ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", SEEDS)
def test_engine_has_an_order_for_everything(seed: int) -> None:
    operations = seen(seed)
    assert wrong(operations) == []
    reserved = [one for one in operations if isinstance(one.call, Reserve) and one.answer is not None]
    assert sum(one.answer[0] == "RESERVED" for one in reserved) >= 20
    taken = [one for one in operations if isinstance(one.call, Take) and one.answer is not None]
    assert sum(one.answer[0] == 0 for one in taken) >= 20


PUT = Put(b"t", 5, 0, 10, b"a", 0, b"c", 1)
OTHER = PUT._replace(body=b"b")
GIVEN = Reserve(b"t", 0)


def said(*rows: tuple[Any, ...]) -> list[Operation]:
    """An operation, from a row: client, call, seconds of start and end, and the answer, or its first word."""
    found = []
    for client, call, *times_and_answer in rows:
        times = [int(moment * S) for moment in times_and_answer[:2]]
        answers = [(each, None, b"") if isinstance(each, str) else each for each in times_and_answer[2:]]
        found.append(Operation(client, call, *times, *answers))
    return found


def is_in(body: bytes = b"a", job: int = 1) -> tuple[str, int, bytes]:
    return "RESERVED", job, body


IN = (1, PUT, 0, 0.1, ("INSERTED", 1, b""))
IN_TOO = (1, OTHER, 0.2, 0.3, ("INSERTED", 2, b""))
TAKEN = (2, GIVEN, 1, 1.1, is_in())
GONE = [(1, Closed(), 4, 6), (2, Closed(), 4, 6), (3, Closed(), 4, 6)]
CRASH = (CLIENT, Restarted(), 4, 6, "OK")
USED, FREE, REFUSED = (0, 1), (0, 0), (0x21, None)

RIGHT = {
    "deleted": said(
        IN, TAKEN, (3, Get(b"c"), 2, 2.1, USED), (2, Delete(1), 3, 3.1, "DELETED"),
        (3, Acquire(b"c", 1, 1), 4, 4.1, USED),
    ),
    "released": said(IN, TAKEN, (2, Release(1, 5, 0), 3, 3.1, "RELEASED"), (3, Acquire(b"c", 1, 1), 4, 4.1, USED)),
    "buried": said(IN, TAKEN, (2, Bury(1, 5), 3, 3.1, "BURIED"), (3, Get(b"c"), 4, 4.1, FREE)),
    "the worker is dead": said(
        IN, TAKEN, (2, Closed(), 2, 2.1), (3, Get(b"c"), 2, 2.05, USED), (3, Get(b"c"), 3, 3.1, FREE)
    ),
    "its time is over": said(IN, TAKEN, (3, Get(b"c"), 10.9, 11, USED), (3, Get(b"c"), 11.2, 11.3, FREE)),
    "touched": said(IN, TAKEN, (2, Touch(1), 9, 9.1, "TOUCHED"), (3, Get(b"c"), 12, 12.1, USED)),
    "after a client": said(
        IN, (3, Acquire(b"c", 1, 1), 0.5, 0.6, USED), (3, GiveBack(b"c", 1), 0.7, 1.05, (0, None)), TAKEN
    ),
    "nobody was told": said(
        IN, (2, GIVEN, 1), (3, Get(b"c"), 2, 2.1, USED), (2, Closed(), 3, 3.1), (3, Get(b"c"), 4, 4.1, FREE)
    ),
}  # fmt: skip
WRONG = {
    "not given back by a delete": said(IN, TAKEN, (2, Delete(1), 3, 3.1, "DELETED"), (3, Get(b"c"), 4, 4.1, USED)),
    "not given back by a release": said(
        IN, TAKEN, (2, Release(1, 5, 0), 3, 3.1, "RELEASED"), (3, Get(b"c"), 4, 4.1, USED)
    ),
    "not given back by a bury": said(IN, TAKEN, (2, Bury(1, 5), 3, 3.1, "BURIED"), (3, Get(b"c"), 4, 4.1, USED)),
    "not given back by a death": said(IN, TAKEN, (2, Closed(), 2, 2.1), (3, Get(b"c"), 3, 3.1, USED)),
    "not given back in time": said(IN, TAKEN, (3, Get(b"c"), 12, 12.1, USED)),
    "given back early": said(IN, TAKEN, (3, Get(b"c"), 10.8, 10.9, FREE)),
    "given back by a touch": said(IN, TAKEN, (2, Touch(1), 2, 2.1, "TOUCHED"), (3, Get(b"c"), 3, 3.1, FREE)),
    "a touch is forgotten": said(IN, TAKEN, (2, Touch(1), 9, 9.1, "TOUCHED"), (3, Get(b"c"), 12, 12.1, FREE)),
    "above the maximum": said(IN, IN_TOO, TAKEN, (3, GIVEN, 2, 2.1, is_in(b"b", 2))),
    "above the maximum, beside a client": said(IN, (3, Acquire(b"c", 1, 1), 0.5, 0.6, USED), TAKEN),
    "a client beside a job": said(IN, TAKEN, (3, Acquire(b"c", 1, 1), 2, 2.1, USED)),
    "given back twice": said(
        IN, IN_TOO, (3, Acquire(b"c", 1, 2), 0.5, 0.6, USED),
        (1, Put(b"t", 1, 0, 10, b"d", 0, b"c", 2), 0.6, 0.7, ("INSERTED", 3, b"")),
        (2, GIVEN, 1, 1.1, is_in(b"d", 3)), (2, Delete(3), 2, 2.1, "DELETED"), (3, Get(b"c"), 3, 3.1, FREE),
    ),
}  # fmt: skip
AFTER_RIGHT = {
    "its worker's, until its time is over": said(
        IN, TAKEN, *GONE, CRASH, (4, Get(b"c"), 7, 7.1, USED), (4, Get(b"c"), 11.2, 11.3, FREE)
    ),
    "not written": said(IN, TAKEN, *GONE, CRASH, (4, Get(b"c"), 7, 7.1, FREE)),
    "a client has nothing": said(
        IN, (3, Acquire(b"c", 1, 1), 0.5, 0.6, USED), *GONE, CRASH, (4, Get(b"c"), 7, 7.1, FREE)
    ),
    "ended by another": said(
        IN, TAKEN, *GONE, CRASH, (4, Delete(1), 7, 7.1, "DELETED"), (4, Acquire(b"c", 1, 1), 8, 8.1, USED)
    ),
}  # fmt: skip
AFTER_WRONG = {
    "more than there were jobs": said(IN, TAKEN, *GONE, CRASH, (4, Get(b"c"), 7, 7.1, (0, 2))),
    "kept when its time is over": said(IN, TAKEN, *GONE, CRASH, (4, Get(b"c"), 12, 12.1, USED)),
    "a client still has it": said(
        IN, (3, Acquire(b"c", 1, 1), 0.5, 0.6, USED), *GONE, CRASH, (4, Get(b"c"), 7, 7.1, USED)
    ),
    "what was deleted": said(
        IN, TAKEN, (2, Delete(1), 3, 3.1, "DELETED"), *GONE, CRASH, (4, Get(b"c"), 7, 7.1, USED)
    ),
}  # fmt: skip


@pytest.mark.parametrize("operations", RIGHT.values(), ids=RIGHT.keys())
def test_right_history_passes(operations: list[Operation]) -> None:
    assert wrong(operations, late_ns=LATE) == []


@pytest.mark.parametrize("operations", WRONG.values(), ids=WRONG.keys())
def test_wrong_history_is_caught(operations: list[Operation]) -> None:
    assert wrong(operations, late_ns=LATE)


@pytest.mark.parametrize("operations", AFTER_RIGHT.values(), ids=AFTER_RIGHT.keys())
def test_right_restart_passes(operations: list[Operation]) -> None:
    assert wrong(operations, journal=True, late_ns=LATE) == []


@pytest.mark.parametrize("operations", AFTER_WRONG.values(), ids=AFTER_WRONG.keys())
def test_wrong_restart_is_caught(operations: list[Operation]) -> None:
    assert wrong(operations, journal=True, late_ns=LATE)


# ---- wrong servers --------------------------------------------------------------------------------------------------


class KeepsWhatIsDeleted(Lender):
    def release(self, name: bytes, now_ns: int) -> None:
        if not isinstance(self.engine.cause, Delete):
            super().release(name, now_ns)


class KeepsWhatIsReleased(Lender):
    def release(self, name: bytes, now_ns: int) -> None:
        if not isinstance(self.engine.cause, Release):
            super().release(name, now_ns)


class KeepsWhatIsBuried(Lender):
    def release(self, name: bytes, now_ns: int) -> None:
        if not isinstance(self.engine.cause, Bury):
            super().release(name, now_ns)


class KeepsWhatTheDeadHad(Lender):
    def release(self, name: bytes, now_ns: int) -> None:
        if self.engine.cause != "end":
            super().release(name, now_ns)


class KeepsWhenTimeIsOver(Lender):
    def release(self, name: bytes, now_ns: int) -> None:
        if self.engine.cause != "time":
            super().release(name, now_ns)


class GivesBackTwice(Lender):
    """Gives the permit of another job back, too."""

    def __init__(self, engine: LentEngine) -> None:
        super().__init__(engine)
        self.lent = 0

    def acquire(self, name: bytes, maximum: int, now_ns: int) -> bool:
        granted = super().acquire(name, maximum, now_ns)
        self.lent += granted
        return granted

    def release(self, name: bytes, now_ns: int) -> None:
        for _ in range(1 + (self.lent > 1 and isinstance(self.engine.cause, Delete))):
            super().release(name, now_ns)
            self.lent -= 1


class LendsTooMuch(Lender):
    def acquire(self, name: bytes, maximum: int, now_ns: int) -> bool:
        return super().acquire(name, maximum + 1, now_ns)


class LendsTooMuchAfterAWait(Lender):
    def enqueue(self, name: bytes, maximum: int, ticket: int, now_ns: int) -> int:
        return super().enqueue(name, maximum + 1, ticket, now_ns)


FAULTY = [
    KeepsWhatIsDeleted, KeepsWhatIsReleased, KeepsWhatIsBuried, KeepsWhatTheDeadHad, KeepsWhenTimeIsOver,
    GivesBackTwice, LendsTooMuch, LendsTooMuchAfterAWait,
]  # fmt: skip


@pytest.mark.parametrize("lender", FAULTY)
def test_wrong_server_is_caught(lender: type[Lender]) -> None:
    assert any(wrong(seen(seed, lender)) for seed in SEEDS)
