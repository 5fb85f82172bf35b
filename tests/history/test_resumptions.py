"""The checker on histories of resumed connections: it accepts those of a correct server, and finds every defect of a
wrong one."""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING, Any, ClassVar

import pytest

from counterd.protocols.counter.wire import OnDeath
from history import Closed, Operation, check
from history.resumptions import Goodbye, Held, Lines, Resume
from history.takers import GRACES_MS, LATE_NS, Crowd, TakeEngine, TakeTable, take_calls
from history.takes import NS_PER_MS as MS
from history.takes import Acquire, Get, Release, Settle, Take, TakeModel, prepared
from history.waiting import mistakes

if TYPE_CHECKING:
    from history.takers import Server

CALLS = 800
SEEDS = range(4)


def wrong(operations: list[Operation]) -> list[str]:
    """The complaints that are found without a search, or else those of the search."""
    if found := mistakes(operations, late_ns=LATE_NS):
        return found
    history = prepared(operations, late_ns=LATE_NS)
    violation = check(history, TakeModel(history))
    return [str(violation)] if violation else []


def seen(server: Server, seed: int, calls: int = CALLS, **shape: Any) -> list[Operation]:
    choose = take_calls(graces_ms=GRACES_MS, **shape)
    return Crowd(Random(seed), server, choose, clients=5, dying=0.05).run(calls)


# ---- right ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize("seed", SEEDS)
def test_right_histories_pass(seed: int, groups: int) -> None:
    assert wrong(seen(TakeTable(), seed, groups=groups)) == []


@pytest.mark.parametrize("shape", [{}, {"rates": False, "groups": 1}, {"permits": 4, "keys": (b"", b"k", b"l")}])
@pytest.mark.parametrize("seed", SEEDS)
def test_engine_has_an_order_for_resumed_connections(seed: int, shape: dict[str, Any]) -> None:
    operations = seen(TakeEngine(), seed, 2000, **shape)
    assert wrong(operations) == []
    resumes = [one for one in operations if isinstance(one.call, Resume) and one.call.old]
    answers = [one.answer[0] for one in resumes if one.answer is not None]
    assert min(answers.count(status) for status in (0, 1)) >= 5
    ended = {one.client: one.ended or 0 for one in operations if isinstance(one.call, Closed)}
    assert any((one.ended or 0) < ended.get(one.call.old, 0) for one in resumes)  # while the old connection lived
    assert any(one.started > ended.get(one.call.old, one.started) for one in resumes)
    assert any(one.answer is None for one in resumes)  # whose reply was lost


# ---- by hand --------------------------------------------------------------------------------------------------------

DONE, REFUSED, GONE, NOT_MINE = (0, None), (0x21, None), (1, None), (0x22, None)
GRACE = 50  # ms
REFUNDED = ("r", 1, 1, 1_000, 2, OnDeath.REFUNDED)  # a rate: a unit in each millisecond, two at once
SLOW = ("s", 1, 1, 100_000, 1, OnDeath.REFUNDED)  # one in 100 ms


def said(*rows: tuple[Any, ...]) -> list[Operation]:
    return [Operation(*row) for row in rows]


def begun(*rows: tuple[Any, ...], closed: tuple[int, int] | None = (10, 20)) -> list[Operation]:
    """A history: connection 1 has a token and one of a, and ends at that time; then the others' operations."""
    end = [(1, Closed(), *closed)] if closed else []
    return said((1, Resume(GRACE), 0, 1, (0, GRACE)), (1, Acquire("a", 1, 1), 2, 3, (0, 1)), *end, *rows)


def charged(*rows: tuple[Any, ...]) -> list[Operation]:
    """A history: connection 1 has a token and the only unit of s, and ends."""
    taken = (0, (1, (0,)))
    return said(
        (1, Resume(GRACE), 0, 1, (0, GRACE)), (1, Take(1, (SLOW,)), 2, 3, taken), (1, Closed(), 10, 20), *rows
    )  # fmt: skip


RESUMED = (2, Resume(GRACE, 1), 30, 40, (0, GRACE))
LOST = (2, Resume(GRACE, 1), 30)
CUT = (2, Closed(), 35, 45)
AGAIN = (3, Resume(GRACE, 1), 50, 60, (0, GRACE))
HAS = (2, Held("a"), 41, 42, (0, 1))
OVER = (GRACE + 5) * MS
S_TAKEN = (0x21, (0, 0, 100))

RIGHT = {
    "resumed": begun((3, Acquire("a", 1, 1), 25, 26, REFUSED), RESUMED, HAS, (2, Release("a", 1), 50, 51, DONE),
                     (3, Acquire("a", 1, 1), 60, 61, (0, 1))),
    "resumed while it was open": begun(
        RESUMED, (1, Release("a", 1), 41, 44, NOT_MINE), HAS, (1, Closed(), 50, 60), (2, Held("a"), 70, 71, (0, 1)),
        closed=None,
    ),
    "what waited is cancelled": begun(
        (1, Take(7, (("b", 2, 1),), 90), 5, 41, (0x23, None)), RESUMED, (1, Closed(), 50, 60), closed=None,
    ),
    "not resumed": begun((3, Acquire("a", 1, 1), OVER, OVER + 1, (0, 1)), (2, Resume(GRACE, 1), OVER, OVER + 9, GONE)),
    "holds nothing": said((1, Resume(GRACE), 0, 1, (0, GRACE)), (1, Closed(), 2, 3), (2, Resume(GRACE, 1), 4, 5, GONE)),
    "its reply was lost": begun(LOST, CUT, AGAIN, (3, Held("a"), 61, 62, (0, 1))),
    "its reply was lost, and nobody asked again": begun(
        LOST, CUT, (3, Get("a"), GRACE * MS, GRACE * MS, (0, 1)), (3, Acquire("a", 1, 1), OVER, OVER + 1, (0, 1)),
    ),
    "a late request of the old one": begun(
        (1, Acquire("b", 1, 1), 4), RESUMED, (3, Get("b"), 42, 43, (0, 1)), (1, Closed(), 50, 60),
        (3, Get("b"), 70, 71, (0, 0)), (2, Held("b"), 72, 73, (0, 0)), closed=None,
    ),
    "resumed twice": begun(RESUMED, (2, Closed(), 50, 60), (3, Resume(GRACE, 2), 70, 71, (0, GRACE)),
                           (3, Held("a"), 72, 73, (0, 1))),
    "a Goodbye": begun((1, Goodbye(), 4, 5, DONE), (3, Acquire("a", 1, 1), 6, 7, (0, 1)),
                       (2, Resume(GRACE, 1), 30, 40, GONE)),
    "a Goodbye that was not answered": begun((1, Goodbye(), 4), (3, Acquire("a", 1, 1), 6, 7, (0, 1)),
                                             (2, Resume(GRACE, 1), 30, 40, GONE)),
    "a token after a Goodbye": begun((1, Goodbye(), 4, 5, DONE), (1, Resume(GRACE), 6, 7, (0, GRACE)), RESUMED,
                                     (2, Held("a"), 41, 42, (0, 0))),
    "settled by the successor": charged(RESUMED, (2, Settle(1, "s", 0), 41, 42, DONE),
                                   (3, Take(3, (SLOW,)), 43, 44, (0, (2, (0,))))),
    "refunded when nobody came": charged((3, Take(3, (SLOW,)), OVER, OVER + 9, (0, (2, (0,))))),
}  # fmt: skip

WRONG = {
    "given back at once": begun((3, Acquire("a", 1, 1), 25, 26, (0, 1))),
    "given back before the Resume": begun(RESUMED, (2, Held("a"), 41, 42, (0, 0))),
    "given back when the old one ended": begun(
        RESUMED, (1, Closed(), 50, 60), (2, Held("a"), 70, 71, (0, 0)), closed=None,
    ),
    "kept for too long": begun((3, Get("a"), OVER, OVER + 1, (0, 1))),
    "the old one has it too": begun(RESUMED, (1, Release("a", 1), 43, 44, DONE), HAS, (2, Held("a"), 45, 46, (0, 1)),
                                    closed=None),
    "it counts twice": begun(RESUMED, (3, Get("a"), 43, 44, (0, 2))),
    "refused in time": begun((2, Resume(GRACE, 1), 30, 40, GONE)),
    "refused to an open connection": begun((2, Resume(GRACE, 1), 30, 40, GONE), closed=None),
    "refused after a lost reply": begun(LOST, CUT, (3, Resume(GRACE, 1), 50, 60, GONE)),
    "resumed too late": begun((2, Resume(GRACE, 1), OVER, OVER + 9, (0, GRACE))),
    "a token that is valid twice": begun(RESUMED, AGAIN),
    "lost with the reply": begun(LOST, CUT, AGAIN, (3, Held("a"), 61, 62, (0, 0))),
    "stolen by a late request": begun(LOST, CUT, AGAIN, (3, Held("a"), 61, 62, (0, 1)), (3, Held("a"), 63, 64, (0, 0))),
    "a longer grace time": begun((2, Resume(GRACE, 1), 30, 40, (0, GRACE + 1))),
    "a Goodbye that keeps it": begun((1, Goodbye(), 4, 5, DONE), (3, Get("a"), 6, 7, (0, 1))),
    "a token after its Goodbye": begun((1, Goodbye(), 4, 5, DONE), RESUMED),
    "a Goodbye that leaves a Take": begun((1, Take(7, (("b", 2, 1),), 90), 4, 45 * MS, (0x23, None)),
                                          (1, Goodbye(), 5, 6, DONE), closed=None),
    "a charge is lost": charged(RESUMED, (2, Settle(1, "s", 0), 41, 42, GONE)),
    "refunded, and the successor goes on": charged(RESUMED, (3, Take(3, (SLOW,)), 43, 44, (0, (2, (0,))))),
    "refunded too early": charged((3, Take(3, (SLOW,)), 30, 31, (0, (2, (0,))))),
    "refunded too late": charged((3, Take(3, (SLOW,)), OVER, OVER + 9, (0x21, (0, 0, 45)))),
}  # fmt: skip


@pytest.mark.parametrize("operations", RIGHT.values(), ids=RIGHT.keys())
def test_right_history_passes(operations: list[Operation]) -> None:
    assert wrong(operations) == []


@pytest.mark.parametrize("operations", WRONG.values(), ids=WRONG.keys())
def test_wrong_history_is_caught(operations: list[Operation]) -> None:
    assert wrong(operations)


def test_resumed_connections_form_families() -> None:
    lines = Lines(begun(LOST, CUT, AGAIN))
    assert {lines.root(client) for client in (1, 2, 3)} == {1}
    assert lines.families == {1: [1, 2, 3]}
    assert lines.successors[1] == lines.successors[2] == Operation(*AGAIN)


# ---- wrong servers --------------------------------------------------------------------------------------------------


RATES: dict[str, Any] = {"groups": 3, "permits": 1}
SINGLE: dict[str, Any] = {"groups": 2, "permits": 1, "rates": False, "most": 1}


class Faulty(TakeTable):
    """A server that sometimes makes a mistake. calls, shape: those of the calls that reveal it."""

    calls = CALLS
    shape: ClassVar[dict[str, Any]] = {}

    def __init__(self) -> None:
        super().__init__()
        self.rng = Random(7)

    def slips(self) -> bool:
        return self.rng.random() < 0.3


class KeepsNothing(Faulty):
    def close(self, client: int, now_ns: int) -> None:
        self.graces_ms.pop(client, None)
        super().close(client, now_ns)


class KeepsTooLong(Faulty):
    def close(self, client: int, now_ns: int) -> None:
        super().close(client, now_ns)
        if client in self.kept:
            self.kept[client] += 10 * MS


class KeepsTooShort(Faulty):
    def close(self, client: int, now_ns: int) -> None:
        super().close(client, now_ns)
        if client in self.kept:
            self.kept[client] -= (self.kept[client] - now_ns) // 2


class LosesSome(Faulty):
    """Loses some of the holdings that are handed over."""

    calls, shape = 2500, SINGLE

    def move(self, owner: int, client: int) -> None:
        for holders in self.counters.values():
            if holders[owner] and self.slips():
                del holders[owner]
        super().move(owner, client)


class LeavesSome(Faulty):
    """Counts some of the holdings for both connections."""

    def move(self, owner: int, client: int) -> None:
        had = {name: holders[owner] for name, holders in self.counters.items()}
        super().move(owner, client)
        for name, amount in had.items():
            if amount and self.slips():
                self.counters[name][owner] = amount


class ForgetsCharges(Faulty):
    def move(self, owner: int, client: int) -> None:
        self.charges = {key: charge for key, charge in self.charges.items() if key[0] != owner}
        super().move(owner, client)


class RefundsAtTheEnd(Faulty):
    """Refunds at the end of the connection instead of that of the grace time, and then once more."""

    calls, shape = 2500, RATES

    def close(self, client: int, now_ns: int) -> None:
        super().close(client, now_ns)
        if client in self.kept:
            for (holder, _, _), (item, fulls) in self.charges.items():
                if holder == client and item.on_death == OnDeath.REFUNDED:
                    self.refund(item, fulls, 0)


class GivesBackHalf(Faulty):
    """Gives back only a part at a Goodbye."""

    def goodbye(self, client: int, token: int, call: Goodbye) -> Any:
        kept = {name: holders[client] for name, holders in self.counters.items() if holders[client] and self.slips()}
        answer = super().goodbye(client, token, call)
        for name, amount in kept.items():
            self.counters[name][client] = amount
        return answer


class LetsWaitAfterAGoodbye(Faulty):
    def end_waits(self, client: int) -> None:
        if client in self.kept:
            super().end_waits(client)


class KeepsTokens(Faulty):
    """Keeps tokens valid after a Goodbye."""

    calls, shape = 2500, SINGLE

    def goodbye(self, client: int, token: int, call: Goodbye) -> Any:
        grace_ms = self.graces_ms.get(client)
        answer = super().goodbye(client, token, call)
        if grace_ms:
            self.graces_ms[client] = grace_ms
        return answer


class RefusesSome(Faulty):
    def resume(self, client: int, token: int, call: Resume) -> Any:
        return (1, None) if call.old and self.slips() else super().resume(client, token, call)


class ForgetsWhoPresented(Faulty):
    """Refuses a token that is presented again because the reply was lost."""

    calls = 2500

    def resume(self, client: int, token: int, call: Resume) -> Any:
        answer = super().resume(client, token, call)
        self.former.clear()
        return answer


class EndsWithTheOldOne(Faulty):
    """Gives back what was handed over when the old connection ends."""

    def __init__(self) -> None:
        super().__init__()
        self.successors: dict[int, int] = {}

    def move(self, owner: int, client: int) -> None:
        super().move(owner, client)
        self.successors[owner] = client

    def close(self, client: int, now_ns: int) -> None:
        super().close(client, now_ns)
        if client in self.successors:
            self.give_back(self.successors[client])


FAULTY = Faulty.__subclasses__()


@pytest.mark.parametrize("server", FAULTY)
def test_wrong_server_is_caught(server: type[Faulty]) -> None:
    assert any(wrong(seen(server(), seed, server.calls, **server.shape)) for seed in (1, 2, 3, 0))
