"""The checker on histories of jobs: it accepts those of a correct server, and finds every defect of a wrong one."""

from __future__ import annotations

from functools import partial
from random import Random
from typing import Any

import pytest

from history import Closed, Operation, check
from history.beanstalk import (
    Bury,
    Delete,
    JobModel,
    KickJob,
    Peek,
    Put,
    Release,
    Reserve,
    Restarted,
    Touch,
    disorder,
    jobs,
)  # fmt: skip
from history.crowd import BeanstalkEngine, Jobs, crowd

S = 1_000_000_000
LATE = 2_000_000  # ns
PUT = Put(b"t", 5, 0, 10, b"a")
SLOW = PUT._replace(delay=5)
GIVEN = Reserve(b"t", 0)
HAS = ("RESERVED", 1, b"a")
CLIENT = -1  # who kills the daemon


def is_in(body: bytes = b"a", job: int = 1) -> tuple[str, int, bytes]:
    return "RESERVED", job, body


def no(status: str = "NOT_FOUND") -> tuple[str, None, bytes]:
    return status, None, b""


def said(*rows: tuple[Any, ...]) -> list[Operation]:
    """An operation, from a row: client, call, seconds of start and end, and the answer, or its first word."""
    found = []
    for client, call, *times_and_answer in rows:
        times = [int(moment * S) for moment in times_and_answer[:2]]
        answer = times_and_answer[2] if len(times_and_answer) > 2 else None
        if isinstance(answer, str):
            answer = no(answer)
        found.append(Operation(client, call, *times, *([] if answer is None else [answer])))
    return found


IN = (1, PUT, 0, 0.1, ("INSERTED", 1, b""))
TAKEN = (2, GIVEN, 1, 1.1, HAS)


def wrong_in(operations: list[Operation], **known: Any) -> list[str]:
    """All complaints about a history."""
    violation = check(jobs(operations), JobModel(late_ns=LATE, **known))
    return ([] if violation is None else [str(violation)]) + disorder(operations)


# ---- right ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tubes", [1, 3])
@pytest.mark.parametrize("pause_ns", [100_000, 300_000_000])
def test_engine_has_an_order_for_everything(tubes: int, pause_ns: int) -> None:
    known = Jobs()
    choose = partial(known.choose, tubes=tubes)
    operations = crowd(
        Random(tubes),
        BeanstalkEngine(),
        choose,
        clients=6,
        calls=1500,
        dying=0.03,
        pause_ns=pause_ns,
        taken=known.taken,
    )
    assert wrong_in(operations) == []
    assert sum(one.answer is not None and one.answer[0] == "DELETED" for one in operations) > 20


RIGHT = {
    "a life": said(IN, TAKEN, (2, Delete(1), 2, 2.1, "DELETED"), (3, Peek(1), 3, 3.1, "NOT_FOUND")),
    "released": said(IN, TAKEN, (2, Release(1, 5, 0), 2, 2.1, "RELEASED"), (3, GIVEN, 3, 3.1, HAS)),
    "buried and kicked": said(
        IN, TAKEN, (2, Bury(1, 5), 2, 2.1, "BURIED"), (3, KickJob(1), 3, 3.1, "KICKED"), (3, GIVEN, 4, 4.1, HAS)
    ),
    "the time to run is over": said(IN, TAKEN, (3, GIVEN, 9, 11.2, HAS), (2, Touch(1), 12, 12.1, "NOT_FOUND")),
    "the worker is dead": said(IN, TAKEN, (2, Closed(), 2, 2.1), (3, GIVEN, 2, 2.2, HAS)),
    "touched": said(IN, TAKEN, (2, Touch(1), 9, 9.1, "TOUCHED"), (2, Delete(1), 18, 18.1, "DELETED")),
    "a delay is over": said((1, SLOW, 0, 0.1, ("INSERTED", 1, b"")), (2, GIVEN, 4, 5.1, HAS)),
    "a delay is kicked": said(
        (1, SLOW, 0, 0.1, ("INSERTED", 1, b"")), (2, KickJob(1), 1, 1.1, "KICKED"), (2, GIVEN, 2, 2.1, HAS)
    ),
    "taken before its put is answered": said((1, PUT, 0, 3, ("INSERTED", 1, b"")), (2, GIVEN, 1, 2, HAS)),
    "a put that was not answered": said((1, PUT, 0), (1, Closed(), 1, 1.1), (2, GIVEN, 2, 2.1, HAS)),
    "a put that was refused once somebody had it": said((1, PUT, 0, 3, "INTERNAL_ERROR"), TAKEN),
    "a put that was refused": said((1, PUT, 0, 3, "INTERNAL_ERROR"), (2, GIVEN, 4, 4.1, "TIMED_OUT")),
    "taken by one who was never told": said(
        IN, (2, GIVEN, 1), (3, Delete(1), 2, 2.1, "NOT_FOUND"), (2, Closed(), 3, 3.1), (3, Delete(1), 4, 4.1, "DELETED")
    ),
    "the best first": said(
        IN, (1, Put(b"t", 4, 0, 10, b"b"), 0.2, 0.3, ("INSERTED", 2, b"")), (2, GIVEN, 1, 1.1, is_in(b"b", 2)), TAKEN
    ),
    "a better one that came meanwhile": said(
        IN, (1, Put(b"t", 4, 0, 10, b"b"), 1, 1.05, ("INSERTED", 2, b"")), TAKEN
    ),
    "a better one that somebody may have who was never told": said(
        IN, (1, Put(b"t", 4, 0, 10, b"b"), 0.2, 0.3, ("INSERTED", 2, b"")),
        (3, GIVEN, 0.5), TAKEN, (3, Closed(), 2, 2.1),
    ),
    "another tube": said(
        IN, (1, Put(b"u", 4, 0, 10, b"b"), 0.2, 0.3, ("INSERTED", 2, b"")), (2, GIVEN, 1, 1.1, HAS)
    ),
}  # fmt: skip

WRONG = {
    "with two at a time": said(IN, TAKEN, (3, GIVEN, 2, 2.1, HAS)),
    "with two at once": said(IN, (2, GIVEN, 1, 3, HAS), (3, GIVEN, 1, 3, HAS)),
    "lost": said(IN, (3, Peek(1), 3, 3.1, "NOT_FOUND")),
    "lost with its worker": said(IN, TAKEN, (2, Closed(), 2, 2.1), (3, Peek(1), 3, 3.1, "NOT_FOUND")),
    "delivered after it was deleted": said(IN, TAKEN, (2, Delete(1), 2, 2.1, "DELETED"), (3, GIVEN, 3, 3.1, HAS)),
    "deleted twice": said(IN, TAKEN, (2, Delete(1), 2, 2.1, "DELETED"), (2, Delete(1), 3, 3.1, "DELETED")),
    "deleted by another": said(IN, TAKEN, (3, Delete(1), 2, 2.1, "DELETED")),
    "released by another": said(IN, TAKEN, (3, Release(1, 5, 0), 2, 2.1, "RELEASED")),
    "buried by another": said(IN, TAKEN, (3, Bury(1, 5), 2, 2.1, "BURIED")),
    "touched by another": said(IN, TAKEN, (3, Touch(1), 2, 2.1, "TOUCHED")),
    "touched by nobody": said(IN, (3, Touch(1), 2, 2.1, "TOUCHED")),
    "the worker has it, and may not": said(IN, TAKEN, (2, Touch(1), 2, 2.1, "NOT_FOUND")),
    "the time to run ends early": said(IN, TAKEN, (3, GIVEN, 2, 10.9, HAS)),
    "the time to run ends early, by what it says": said(IN, TAKEN, (2, Delete(1), 10, 10.9, "NOT_FOUND")),
    "the time to run does not end": said(IN, TAKEN, (2, Touch(1), 12, 12.1, "TOUCHED")),
    "a touch is forgotten": said(IN, TAKEN, (2, Touch(1), 9, 9.1, "TOUCHED"), (3, GIVEN, 12, 12.1, HAS)),
    "a delay ends early": said((1, SLOW, 0, 0.1, ("INSERTED", 1, b"")), (2, GIVEN, 4, 4.9, HAS)),
    "a release's delay ends early": said(IN, TAKEN, (2, Release(1, 5, 5), 2, 2.1, "RELEASED"), (3, GIVEN, 3, 6.9, HAS)),
    "buried, and delivered": said(IN, TAKEN, (2, Bury(1, 5), 2, 2.1, "BURIED"), (3, GIVEN, 3, 3.1, HAS)),
    "kicked, and not buried": said(IN, (3, KickJob(1), 3, 3.1, "KICKED")),
    "buried, and not kicked": said(IN, TAKEN, (2, Bury(1, 5), 2, 2.1, "BURIED"), (3, KickJob(1), 3, 3.1, "NOT_FOUND")),
    "another body": said(IN, (2, GIVEN, 1, 1.1, is_in(b"b"))),
    "never put": said(TAKEN),
    "put as two": said((1, PUT, 0), (2, GIVEN, 1, 1.1, HAS), (3, GIVEN, 1, 1.1, is_in(job=2))),
    "an id twice": said(IN, (1, PUT._replace(body=b"b"), 0.2, 0.3, ("INSERTED", 1, b""))),
    "refused, and delivered": said((1, PUT, 0, 0.1, "OUT_OF_MEMORY"), TAKEN),
    "refused, and gone from its worker": said(
        (1, PUT, 0, 3, "INTERNAL_ERROR"), TAKEN, (2, Touch(1), 4, 4.1, "NOT_FOUND")
    ),
    "refused, and gone from who released it": said(
        (1, PUT, 0, 3, "INTERNAL_ERROR"), TAKEN, (2, Release(1, 5, 0), 2, 3, "RELEASED"),
        (3, Peek(1), 4, 4.1, "NOT_FOUND"),
    ),
    "refused, and gone with its worker": said(
        (1, PUT, 0, 3, "INTERNAL_ERROR"), TAKEN, (2, Closed(), 2, 2.1), (3, Peek(1), 4, 4.1, "NOT_FOUND")
    ),
    "the worse first": said(IN, (1, Put(b"t", 4, 0, 10, b"b"), 0.2, 0.3, ("INSERTED", 2, b"")), TAKEN),
    "the younger first": said(
        IN, (1, PUT._replace(body=b"b"), 0.2, 0.3, ("INSERTED", 2, b"")), (2, GIVEN, 1, 1.1, is_in(b"b", 2))
    ),
    "ready, and not given": said(IN, (2, GIVEN, 1, 1.1, "TIMED_OUT")),
    "worse since it was released": said(
        IN, TAKEN, (1, Put(b"t", 7, 0, 10, b"b"), 1, 1.1, ("INSERTED", 2, b"")),
        (2, Release(1, 9, 0), 2, 2.1, "RELEASED"), (3, GIVEN, 3, 3.1, HAS),
    ),
}  # fmt: skip


@pytest.mark.parametrize("operations", RIGHT.values(), ids=RIGHT.keys())
def test_right_history_passes(operations: list[Operation]) -> None:
    assert wrong_in(operations) == []


@pytest.mark.parametrize("operations", WRONG.values(), ids=WRONG.keys())
def test_wrong_history_is_caught(operations: list[Operation]) -> None:
    assert len(wrong_in(operations)) >= 1


def test_a_body_may_be_put_once() -> None:
    with pytest.raises(ValueError, match="each body may be put once"):
        jobs(said(IN, (2, PUT, 1, 2, ("INSERTED", 2, b""))))


# ---- restarts -------------------------------------------------------------------------------------------------------

CRASH = (CLIENT, Restarted(), 4, 6, "OK")
GONE = [(1, Closed(), 4, 6), (2, Closed(), 4, 6)]
AFTER_RIGHT = {
    "it is there": said(IN, *GONE, CRASH, (3, GIVEN, 7, 7.1, HAS)),
    "its worker's, still": said(
        IN, TAKEN, *GONE, CRASH, (3, GIVEN, 7, 7.1, "TIMED_OUT"), (3, Delete(1), 8, 9, "DELETED")
    ),
    "ready: that it was reserved was not written": said(IN, TAKEN, *GONE, CRASH, (3, GIVEN, 7, 7.1, HAS)),
    "its worker's, until its time is over": said(IN, TAKEN, *GONE, CRASH, (3, GIVEN, 7, 11.2, HAS)),
    "touched by another": said(IN, TAKEN, *GONE, CRASH, (3, Touch(1), 7, 7.1, "TOUCHED"), (4, GIVEN, 8, 17.2, HAS)),
    "deleted, which was not answered": said(IN, TAKEN, (2, Delete(1), 3), *GONE, CRASH, (3, GIVEN, 7, 7.1, HAS)),
    "deleted, which was written": said(IN, TAKEN, (2, Delete(1), 3), *GONE, CRASH, (3, Peek(1), 7, 7.1, "NOT_FOUND")),
    "deleted, seen, and not written": said(
        IN, TAKEN, (2, Delete(1), 2), (5, Peek(1), 3, 3.1, "NOT_FOUND"), *GONE, CRASH, (3, GIVEN, 7, 7.1, HAS)
    ),
    "never written": said((1, PUT, 0), (2, GIVEN, 1, 1.1, HAS), *GONE, CRASH, (3, Peek(1), 7, 7.1, "NOT_FOUND")),
}  # fmt: skip
AFTER_WRONG = {
    "an acknowledged put is lost": said(IN, *GONE, CRASH, (3, Peek(1), 7, 7.1, "NOT_FOUND")),
    "what was deleted comes back": said(
        IN, TAKEN, (2, Delete(1), 3, 3.1, "DELETED"), *GONE, CRASH, (3, GIVEN, 7, 7.1, HAS)
    ),
    "what was buried is ready": said(
        IN, TAKEN, (2, Bury(1, 5), 3, 3.1, "BURIED"), *GONE, CRASH, (3, GIVEN, 7, 7.1, HAS)
    ),
    "released, and a worker's again": said(
        IN, TAKEN, (2, Release(1, 5, 0), 3, 3.1, "RELEASED"), *GONE, CRASH, (3, Touch(1), 7, 7.1, "TOUCHED")
    ),
    "delayed, and ready": said(
        IN, TAKEN, (2, Release(1, 5, 9), 3, 3.1, "RELEASED"), *GONE, CRASH, (3, GIVEN, 7, 7.1, HAS)
    ),
    "delivered, and deleted by its old worker": said(
        IN, TAKEN, *GONE, CRASH, (3, GIVEN, 7, 7.1, HAS), (4, Delete(1), 8, 8.1, "DELETED")
    ),
}  # fmt: skip


@pytest.mark.parametrize("operations", AFTER_RIGHT.values(), ids=AFTER_RIGHT.keys())
def test_right_restart_passes(operations: list[Operation]) -> None:
    assert wrong_in(operations, journal=True) == []


@pytest.mark.parametrize("operations", AFTER_WRONG.values(), ids=AFTER_WRONG.keys())
def test_wrong_restart_is_caught(operations: list[Operation]) -> None:
    assert len(wrong_in(operations, journal=True)) == 1


# ---- wrong servers --------------------------------------------------------------------------------------------------


class Wrong(BeanstalkEngine):
    """A server that now and then does something else than it was asked, or gives a wrong answer."""

    def __init__(self, kind: type, other: Any) -> None:
        super().__init__()
        self.kind, self.other, self.rng = kind, other, Random(3)

    def do(self, client: int, call: Any, now_ns: int) -> Any:
        if isinstance(call, self.kind) and self.rng.random() < 0.3:
            return self.other(super().do, client, call, now_ns)
        return super().do(client, call, now_ns)


def deleted_after(do: Any, client: int, call: Any, now_ns: int) -> Any:
    answer = do(client, call, now_ns)
    if answer[1] is not None:
        do(client, Delete(answer[1]), now_ns)
    return answer


FAULTS = {
    "loses what it was given": (Put, deleted_after),
    "keeps what is deleted": (
        Delete,
        lambda do, client, call, now: (do(client, Peek(call.job), now), no("DELETED"))[1],
    ),
    "hands out what it has": (Reserve, lambda do, client, call, now: do(-client - 1, call, now)),
    "takes any for the worker": (Touch, lambda do, client, call, now: (do(client, call, now), no("TOUCHED"))[1]),
    "forgets a delay": (Put, lambda do, client, call, now: do(client, call._replace(delay=0), now)),
    "forgets a priority": (Put, lambda do, client, call, now: do(client, call._replace(priority=9), now)),
    "ends a time to run early": (Put, lambda do, client, call, now: do(client, call._replace(ttr=1), now)),
}


@pytest.mark.parametrize(("kind", "other"), FAULTS.values(), ids=FAULTS.keys())
def test_wrong_server_is_caught(kind: type, other: Any) -> None:
    known = Jobs()
    operations = crowd(
        Random(1), Wrong(kind, other), known.choose, clients=4, calls=1500, pause_ns=100_000_000, taken=known.taken
    )
    assert len(wrong_in(operations)) >= 1
