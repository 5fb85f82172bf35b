"""The checker on histories of Takes: it accepts those of a correct server, and finds every defect of a wrong one."""

from __future__ import annotations

from itertools import combinations, permutations
from math import inf
from random import Random
from typing import TYPE_CHECKING, Any, ClassVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from counterd.protocols.counter.wire import OnDeath, Permit, Rate
from history import Closed, Operation, check
from history.search import Search, by_key
from history.takers import LATE_NS, Crowd, TakeEngine, TakeTable, take_calls
from history.takes import NS_PER_MS as MS
from history.takes import (
    Acquire,
    Cancel,
    Get,
    Goodbye,
    Release,
    Settle,
    Take,
    TakeModel,
    items_of,
    parts_of,
    prepared,
)  # fmt: skip
from history.waiting import mistakes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from history.takers import Server

CALLS = 500
SEEDS = range(4)


def wrong(operations: list[Operation], late_ns: int = LATE_NS, slow: frozenset[int] = frozenset()) -> list[str]:
    """All complaints of the two checkers."""
    history = prepared(operations)
    violation = check(history, TakeModel(history))
    return [*mistakes(operations, late_ns=late_ns, slow=slow), *([str(violation)] if violation else [])]


def seen(server: Server, seed: int, calls: int = CALLS, **shape: Any) -> list[Operation]:
    return Crowd(Random(seed), server, take_calls(**shape), clients=8, dying=0.03).run(calls)


def said(*rows: tuple[Any, ...]) -> list[Operation]:
    return [Operation(*row) for row in rows]


# ---- right ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize("seed", SEEDS)
def test_right_histories_pass(seed: int, groups: int) -> None:
    assert wrong(seen(TakeTable(), seed, groups=groups)) == []


@pytest.mark.parametrize("shape", [{}, {"rates": False, "groups": 1}, {"permits": 4, "keys": (b"", b"k", b"l")}])
@pytest.mark.parametrize("seed", SEEDS)
def test_engine_has_an_order_for_everything(seed: int, shape: dict[str, Any]) -> None:
    operations = seen(TakeEngine(), seed, 1500, **shape)
    assert wrong(operations) == []
    answers = [one.answer[0] for one in operations if isinstance(one.call, Take) and one.answer is not None]
    assert min(answers.count(status) for status in (0, 0x21, 0x23)) >= 20


# ---- by hand --------------------------------------------------------------------------------------------------------

A, B = ("a", 1, 1), ("b", 1, 1)  # permits
R = ("r", 1, 1, 1_000, 2)  # a rate: a unit in each millisecond, two at once
CHARGED, REFUNDED = (*R, OnDeath.CHARGED), (*R, OnDeath.REFUNDED)
DONE, SHORT = (0, None), (0x21, (0, 0, None))


def granted(number: int, *left: int) -> Any:
    return 0, (number, left)


RIGHT = {
    "granted after a wait": said(
        (1, Take(1, (A,)), 0, 1, granted(1, 0)), (2, Take(2, (A,), 50), 0, 9 * MS, granted(2, 0)),
        (1, Release("a", 1), 8 * MS, 8 * MS + 1, DONE),
    ),
    "refused while somebody waits": said(
        (1, Take(1, (A, B)), 0, 1, granted(1, 0, 0)), (2, Take(2, (A,), 50), 2, 9 * MS, granted(2, 0)),
        (1, Release("a", 1), 5 * MS, 5 * MS + 9, DONE), (3, Acquire("a", 1, 1), 5 * MS + 8, 5 * MS + 10, (0x21, None)),
        (3, Take(3, (A,)), 5 * MS + 8, 5 * MS + 10, SHORT),
    ),
    "cancelled": said(
        (1, Acquire("a", 1, 1), 0, 1, (0, 1)), (2, Take(2, (A,), 50), 2, 9, (0x23, None)), (2, Cancel(2), 7, 9, DONE),
    ),
    "died while it waited, and was granted or not": said(
        (1, Acquire("a", 1, 1), 0, 1, (0, 1)), (2, Take(2, (A,), 50), 2), (2, Closed(), 4, 20),
        (1, Release("a", 1), 5, 6, DONE), (1, Get("a"), 7, 8, (0, 1)), (1, Get("a"), 30, 31, (0, 0)),
    ),
    "two at once, the third when its time has come": said(
        (1, Take(1, (R,)), 0, 10, granted(1, 1)), (1, Take(2, (R,)), 20, 30, granted(2, 0)),
        (1, Take(3, (R,), 9), 40, MS + 200, granted(3, 0)),
    ),
    "when its time has not come": said(
        (1, Take(1, (R,)), 0, 10, granted(1, 1)), (1, Take(2, (R,)), 20, 30, granted(2, 0)),
        (1, Take(3, (R,)), 40, 50, (0x21, (0, 0, 1))),
    ),
    "refunded": said(
        (1, Take(1, (REFUNDED,)), 0, 10, granted(1, 1)), (1, Take(2, (CHARGED,)), 20, 30, granted(2, 0)),
        (1, Closed(), 40, 50), (2, Take(3, (R,)), 60, 70, granted(3, 0)), (2, Take(4, (R,)), 80, 90, (0x21, (0, 0, 1))),
    ),
    "settled": said(
        (1, Take(1, (CHARGED,)), 0, 10, granted(1, 1)), (1, Settle(1, "r", 2), 20, 30, DONE),
        (1, Settle(1, "r", 2), 40, 50, (1, None)), (2, Take(3, (R,)), 60, 70, (0x21, (0, 0, 1))),
    ),
    "full before it is settled": said(
        (1, Take(1, (CHARGED,)), 0, 10, granted(1, 1)), (2, Take(2, (R,)), 3 * MS, 3 * MS + 9, granted(2, 1)),
        (1, Settle(1, "r", 0), 3 * MS + 10, 3 * MS + 19, DONE),
        (2, Take(3, (R,)), 3 * MS + 20, 3 * MS + 29, granted(3, 0)),
    ),
}  # fmt: skip

WRONG = {
    "two grants of one permit": said((1, Take(1, (A,)), 0, 9, granted(1, 0)), (2, Take(2, (A,)), 0, 9, granted(2, 0))),
    "half a grant": said((1, Take(1, (A, B)), 0, 1, granted(1, 0, 0)), (2, Get("b"), 2, 3, (0, 0))),
    "a grant in two steps": said(
        (1, Take(1, (A, B)), 0, 20, granted(1, 0, 0)), (2, Get("a"), 2, 3, (0, 1)), (2, Get("b"), 4, 5, (0, 0)),
    ),
    "two Takes in another order at each of their names": said(
        (9, Take(9, (A, B)), 0, 1, granted(1, 0, 0)), (9, Closed(), 2, 100),
        (1, Take(1, (("a", 1, 1), ("b", 1, 2))), 3, 50, granted(2, 0, 1)),
        (2, Take(2, (("a", 1, 2), ("b", 1, 1))), 4, 51, granted(3, 0, 0)),
    ),
    "numbers that fall": said((1, Take(1, (A,)), 0, 1, granted(2, 0)), (1, Take(2, (B,)), 2, 3, granted(1, 0))),
    "one number for two": said((1, Take(1, (A,)), 0, 9, granted(1, 0)), (1, Take(2, (B,)), 2, 8, granted(1, 0))),
    "refused, and nobody waits": said((1, Take(1, (A,)), 0, 1, SHORT)),
    "refused for the second, and the first is short": said(
        (1, Take(1, (A, B)), 0, 1, granted(1, 0, 0)), (1, Take(2, (A, B)), 2, 3, (0x21, (1, 0, None))),
    ),
    "told of more than there is": said((1, Take(1, (("a", 1, 3),)), 0, 1, granted(1, 3))),
    "refused too early": said((1, Acquire("a", 1, 1), 0, 1, (0, 1)), (2, Take(2, (A,), 50), 2, 49 * MS, SHORT)),
    "refused too late": said((1, Acquire("a", 1, 1), 0, 1, (0, 1)), (2, Take(2, (A,), 50), 2, 90 * MS, SHORT)),
    "cancelled by nobody": said((1, Acquire("a", 1, 1), 0, 1, (0, 1)), (2, Take(2, (A,), 50), 2, 9, (0x23, None))),
    "cancelled and granted": said((2, Take(2, (A,), 50), 2, 9, granted(1, 0)), (2, Cancel(2), 7, 9, DONE)),
    "cancelled before it was": said((2, Take(2, (A,), 50), 2, 19, (0x23, None)), (2, Cancel(2), 7, 9, DONE)),
    "cancelled, and not found": said((2, Take(2, (A,), 50), 2, 9, (0x23, None)), (2, Cancel(2), 7, 9, (1, None))),
    "sleeps while there is room": said((2, Take(2, (A,), 90), 0, 90 * MS, SHORT)),
    "sleeps after a release": said(
        (1, Acquire("a", 1, 1), 0, 1, (0, 1)), (2, Take(2, (A,), 90), 2, 89 * MS, granted(1, 0)),
        (1, Release("a", 1), 9 * MS, 9 * MS + 1, DONE),
    ),
    "sleeps after its rate was there": said(
        (1, Take(1, (R,)), 0, 10, granted(1, 1)), (1, Take(2, (R,)), 20, 30, granted(2, 0)),
        (1, Take(3, (R,), 90), 40, 89 * MS, granted(3, 0)),
    ),
    "passed by an Acquire": said(
        (1, Acquire("a", 2, 2), 0, 1, (0, 2)), (2, Take(2, (("a", 2, 2),), 90), 2, 60 * MS, granted(1, 0)),
        (1, Release("a", 1), 9 * MS, 9 * MS + 1, DONE), (3, Acquire("a", 1, 2), 20 * MS, 21 * MS, (0, 1)),
        (3, Release("a", 1), 58 * MS, 59 * MS, DONE), (1, Release("a", 1), 58 * MS, 59 * MS, DONE),
    ),
    "not in the order of arrival": said(
        (1, Acquire("a", 1, 1), 0, 1, (0, 1)), (2, Take(2, (A,), 90), 2, 9 * MS, granted(2, 0)),
        (2, Take(3, (A,), 90), 3, 8 * MS, granted(1, 0)), (1, Closed(), 4, 9), (2, Release("a", 1), 5, 9 * MS, DONE),
    ),
    "a microsecond too early": said(
        (1, Take(1, (R,)), 9, 10, granted(1, 1)), (1, Take(2, (R,)), 20, 30, granted(2, 0)),
        (1, Take(3, (R,)), 40, MS - 991, granted(3, 0)),
    ),
    "refused a microsecond after its time": said(
        (1, Take(1, (R,)), 9, 10, granted(1, 1)), (1, Take(2, (R,)), 20, 30, granted(2, 0)),
        (1, Take(3, (R,)), MS + 1010, MS + 1020, (0x21, (0, 0, 1))),
    ),
    "charged twice": said((1, Take(1, (R,)), 9, 10, granted(1, 0))),
    "refunded twice": said(
        (1, Take(1, (REFUNDED,)), 0, 10, granted(1, 1)), (1, Take(2, (CHARGED,)), 20, 30, granted(2, 0)),
        (1, Closed(), 40, 50), (2, Take(3, (R,)), 60, 70, granted(3, 1)),
    ),
    "not refunded": said(
        (1, Take(1, (REFUNDED,)), 0, 10, granted(1, 1)), (1, Take(2, (CHARGED,)), 20, 30, granted(2, 0)),
        (1, Closed(), 40, 50), (2, Take(3, (R,)), 60, 70, (0x21, (0, 0, 1))),
    ),
    "settled by another": said(
        (1, Take(1, (CHARGED,)), 0, 10, granted(1, 1)), (2, Settle(1, "r", 2), 20, 30, DONE),
    ),
    "settled twice": said(
        (1, Take(1, (CHARGED,)), 0, 10, granted(1, 1)), (1, Settle(1, "r", 2), 20, 30, DONE),
        (1, Settle(1, "r", 2), 40, 50, DONE),
    ),
    "refunded what came back in time": said(
        (1, Take(1, (CHARGED,)), 0, 10, granted(1, 1)), (2, Take(2, (R,)), 3 * MS, 3 * MS + 9, granted(2, 1)),
        (1, Settle(1, "r", 0), 3 * MS + 10, 3 * MS + 19, DONE),
        (2, Take(3, (R,)), 3 * MS + 20, 3 * MS + 29, granted(3, 1)),
    ),
}  # fmt: skip


@pytest.mark.parametrize("operations", RIGHT.values(), ids=RIGHT.keys())
def test_right_history_passes(operations: list[Operation]) -> None:
    assert wrong(operations) == []


@pytest.mark.parametrize("operations", WRONG.values(), ids=WRONG.keys())
def test_wrong_history_is_caught(operations: list[Operation]) -> None:
    assert wrong(operations)


def test_replies_to_a_slow_client_may_be_late() -> None:
    late = said((1, Acquire("a", 1, 1), 0, 1, (0, 1)), (2, Take(2, (A,), 50), 2, 900 * MS, SHORT))
    assert wrong(late, slow=frozenset((2,))) == []
    assert wrong(late)


def test_all_names_that_takes_connect_are_one_object() -> None:
    model = TakeModel(said((1, Take(1, (A, R)), 0), (1, Take(2, (R, ("c", 1, 1))), 0), (1, Take(3, (B,)), 0)))
    assert model.key(Get("a")) == model.key(Settle(1, "r", 1)) == model.key(Get("c")) != model.key(Get("b"))


# ---- every order ----------------------------------------------------------------------------------------------------


@st.composite
def histories(draw: Any) -> list[Operation]:
    """Up to four calls of up to three clients for two counters, and perhaps a Goodbye."""
    operations = []
    for opaque in range(draw(st.integers(1, 4))):
        started = draw(st.integers(0, 12))
        ended = draw(st.none() | st.integers(started, 14))
        call = draw(st.sampled_from([Take(opaque, (A,)), Take(opaque, (A, B)), Release("a", 1), Get("b")]))
        answer = draw(st.sampled_from(ANSWERS[type(call)]))
        if isinstance(call, Take) and answer[0] == 0:
            answer = granted(draw(st.integers(1, 3)), *[0] * len(call.items))
        operations.append(Operation(draw(st.integers(1, 3)), call, started, ended, None if ended is None else answer))
    if operations and draw(st.booleans()):
        part = draw(st.sampled_from(parts_of(operations[0].call)))
        started = draw(st.integers(0, 12))
        ended = draw(st.none() | st.integers(started, 14))
        call, answer = Goodbye(part), None if ended is None else DONE
        operations.append(Operation(draw(st.integers(1, 3)), call, started, ended, answer))
    for client in draw(st.sets(st.integers(1, 3), max_size=1)):
        operations.append(Operation(client, Closed(), draw(st.integers(0, 14)), 14))
    return operations


ANSWERS: dict[type, list[Any]] = {
    Take: [(0, None), SHORT],
    Release: [DONE, (0x22, None)],
    Get: [(0, 0), (0, 1), (1, None)],
}


def explained(history: Sequence[Operation], model: TakeModel) -> bool:
    """Whether any order explains the history: tries every order of every choice of the calls that need not have
    happened.
    """
    optional = [one for one in history if one.ended is None]
    needed = [one for one in history if one.ended is not None]
    return any(
        follows(order, model)
        for size in range(len(optional) + 1)
        for chosen in combinations(optional, size)
        for order in permutations([*needed, *chosen])
    )


def follows(order: Sequence[Operation], model: TakeModel) -> bool:
    gone: set[tuple[int, Any]] = set()
    states = {model.initial()}
    latest = -inf
    for one in order:
        latest = max(latest, one.started)
        parts = [one.call.part] if isinstance(one.call, Closed) else model.parts(one)
        if any((one.client, part) in gone for part in parts) or (one.ended is not None and one.ended < latest):
            return False
        if isinstance(one.call, Closed):
            gone.add((one.client, one.call.part))
        states = {after for state in states for after in model.step(state, one)}
    return bool(states)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(histories())
def test_verdict_is_that_of_trying_every_order(operations: list[Operation]) -> None:
    model = TakeModel(operations)
    for key, history in by_key(operations, model):
        assert Search(key, history, model, 10_000).explains() == explained(history, model)


def test_clients_without_holdings_that_end_with_goodbye_do_not_slow_the_search() -> None:
    """None was answered, and each may have gone at any time, or not."""
    gone = [
        one for client in range(2, 30) for one in said(
            (client, Take(1, (A, B)), 0, 1, SHORT), (client, Goodbye(("part", client)), 2), (client, Closed(), 3, 100),
        )
    ]  # fmt: skip
    others = said((1, Take(1, (A, B)), -2, -1, granted(1, 0, 0)), (1, Release("a", 1), 50, 51, DONE))
    asked = [Operation(1, Get("b"), moment, moment + 1, (0, 1)) for moment in range(60, 90, 2)]
    history = prepared([*others, *gone, *asked])
    model = TakeModel(history)
    ((key, calls),) = by_key(history, model)
    search = Search(key, calls, model, 10 * len(calls))
    assert search.explains()
    assert len(search.seen) <= len(calls)


# ---- wrong servers --------------------------------------------------------------------------------------------------


RATES: dict[str, Any] = {"groups": 4, "permits": 1, "calls": 1000}
SINGLE: dict[str, Any] = {"groups": 1, "permits": 1, "rates": False, "most": 1, "calls": 1000}


class Faulty(TakeTable):
    """A server that sometimes makes a mistake. shape: that of the calls that reveal it."""

    shape: ClassVar[dict[str, Any]] = {}

    def __init__(self) -> None:
        super().__init__()
        self.rng = Random(7)

    def slips(self) -> bool:
        return self.rng.random() < 0.2


class GrantsTwice(Faulty):
    """Grants the next Take in the queue the same permits."""

    def serve(self) -> None:
        super().serve()
        if self.queue and self.slips():
            one = self.queue.pop(0)
            self.reply(one.client, one.token, self.granted(one.client, one.call))


class LosesGrants(Faulty):
    """Books a grant after a wait, but does not tell the client."""

    def serve(self) -> None:
        before = list(self.queue)
        super().serve()
        for one in before:
            if one not in self.queue and self.slips():
                self.queue.append(one)
                self.replies = [reply for reply in self.replies if reply[:2] != one[:2]]


class GrantsHalf(Faulty):
    """Grants all but the last of several items."""

    def charge(self, client: int, item: Permit | Rate) -> None:
        if client != self.halved or not self.slips():
            super().charge(client, item)

    def granted(self, client: int, call: Take) -> Any:
        self.halved = client if len(call.items) > 1 else 0
        return super().granted(client, call)

    halved = 0


class GrantsInTwoSteps(Faulty):
    """Grants the first item at once, and the others at the next event."""

    def __init__(self) -> None:
        super().__init__()
        self.owed: list[tuple[int, Permit]] = []

    def granted(self, client: int, call: Take) -> Any:
        permits = [item for item in items_of(call) if isinstance(item, Permit)]
        answer = super().granted(client, call)
        for item in permits[1:]:
            self.counters[item.name][client] -= item.amount
            self.owed.append((client, item))
        return answer

    def ask(self, client: int, token: int, call: Any, now_ns: int) -> None:
        owed, self.owed = self.owed, []
        super().ask(client, token, call, now_ns)
        for holder, item in owed:
            self.counters[item.name][holder] += item.amount


class LetsSleep(Faulty):
    """Never examines some waiting Takes again, nor those behind them."""

    shape: ClassVar[dict[str, Any]] = {"groups": 4, "waits_ms": (0, 50)}

    def serve(self) -> None:
        before = list(self.queue)
        self.queue = [one for one in before if one.token % 5]
        super().serve()
        self.queue = [one for one in before if one in self.queue or one.token % 5 == 0]


class ForgetsCharges(Faulty):
    def charge(self, client: int, item: Permit | Rate) -> None:
        if isinstance(item, Permit) or not self.slips():
            super().charge(client, item)


class ChargesLess(Faulty):
    """Charges a twentieth of the time of each unit."""

    shape = RATES

    def charge(self, client: int, item: Permit | Rate) -> None:
        super().charge(client, item)
        if isinstance(item, Rate):
            self.next[item.name] -= item.amount * item.period_us * 1000 // item.limit // 20


class RefundsTwice(Faulty):
    shape = RATES

    def refund(self, item: Rate, fulls: int, used: int) -> None:
        super().refund(item, fulls, used)
        if used == 0:
            super().refund(item, fulls, used)


class RefundsNothing(Faulty):
    shape = RATES

    def refund(self, item: Rate, fulls: int, used: int) -> None:
        super().refund(item, fulls, max(used, item.amount))


class RefundsWhatTimeBrought(Faulty):
    shape = RATES

    def refund(self, item: Rate, fulls: int, used: int) -> None:
        super().refund(item, self.fulls[item.name] if self.level(item) else fulls, used)


class SettlesTwice(Faulty):
    def settle(self, client: int, token: int, call: Settle) -> Any:
        charge = self.charges.get((client, call.grant, call.name))
        answer = super().settle(client, token, call)
        if charge is not None:
            self.charges[client, call.grant, call.name] = charge
        return answer


class RepeatsNumbers(Faulty):
    def granted(self, client: int, call: Take) -> Any:
        self.number -= self.number > 0 and self.slips()
        return super().granted(client, call)


class KeepsNumbersOfNames(Faulty):
    """Numbers the grants of each name by themselves."""

    def granted(self, client: int, call: Take) -> Any:
        answer = super().granted(client, call)
        shift = 1000 if call.items[0][0].startswith(b"0") else 0
        return answer[0], (answer[1][0] + shift, answer[1][1])


class KeepsWhatIsCancelled(Faulty):
    """Does not give back a grant that crosses a Cancel."""

    def cancel(self, client: int, token: int, call: Cancel) -> Any:
        for one in self.queue:
            if (one.client, one.token) == (client, call.take) and self.slips():
                self.charge(client, next((item for item in items_of(one.call) if isinstance(item, Permit)), TOKEN))
        return super().cancel(client, token, call)


class GrantsWhatIsCancelled(Faulty):
    """Answers the Take with its grant, and the Cancel with success."""

    def cancel(self, client: int, token: int, call: Cancel) -> Any:
        for one in list(self.queue):
            if (one.client, one.token) == (client, call.take) and all(map(self.is_there, items_of(one.call))):
                self.queue.remove(one)
                self.reply(client, one.token, self.granted(client, one.call))
                return 0, None
        return super().cancel(client, token, call)

    def due_ns(self) -> int:
        due = super().due_ns()
        return due + 50_000 if self.to_serve else due  # so that something crosses


class ServesTheDead(Faulty):
    """Grants a Take whose connection has ended, for ever."""

    def close(self, client: int, now_ns: int) -> None:
        waiting = [one for one in self.queue if one.client == client]
        super().close(client, now_ns)
        self.queue += waiting


class KeepsHoldings(Faulty):
    def close(self, client: int, now_ns: int) -> None:
        kept = {name: holders[client] for name, holders in self.counters.items()}
        super().close(client, now_ns)
        for name, amount in kept.items():
            self.counters[name][-client] = amount


class EndsWaitsEarly(Faulty):
    def take(self, client: int, token: int, call: Take) -> Any:
        return super().take(client, token, call._replace(wait_ms=call.wait_ms // 2))


class EndsWaitsLate(Faulty):
    def take(self, client: int, token: int, call: Take) -> Any:
        return super().take(client, token, call._replace(wait_ms=4 * call.wait_ms))


class LetsPass(Faulty):
    """Lets Acquires take what others wait for."""

    shape = SINGLE

    def is_awaited(self, item: Permit | Rate) -> bool:
        return not isinstance(item, Permit) and super().is_awaited(item)


class ServesTheLastFirst(Faulty):
    shape = SINGLE

    def take(self, client: int, token: int, call: Take) -> Any:
        answer = super().take(client, token, call)
        self.queue.sort(key=lambda one: (-one.call.priority, -one.ends_ns))
        return answer


class TellsMore(Faulty):
    def left(self, item: Permit | Rate) -> int:
        return super().left(item) + 1


class TellsAnotherTime(Faulty):
    """Tells a time that is a millisecond too long."""

    def shortage(self, call: Take, item: Permit | Rate) -> Any:
        status, (number, left, wait_ms) = super().shortage(call, item)
        return status, (number, left, None if wait_ms is None else wait_ms + 1)


class RefusesWhatIsThere(Faulty):
    shape: ClassVar[dict[str, Any]] = {"waits_ms": (0,)}

    def is_there(self, item: Permit | Rate) -> bool:
        return super().is_there(item) and not self.slips()


TOKEN = Permit(b"00", 1, 4)
FAULTY = Faulty.__subclasses__()


@pytest.mark.parametrize("server", FAULTY)
def test_wrong_server_is_caught(server: type[Faulty]) -> None:
    assert any(wrong(seen(server(), seed, **server.shape)) for seed in SEEDS)
