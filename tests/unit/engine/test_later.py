"""Later, the questions that are answered later: each is settled or given up once, in order, and their number is
bounded."""

from __future__ import annotations

import random
from typing import Any

import pytest

from counterd.engine.later import Later

CAPACITY = 4


class Asker:
    """Stands for a protocol, and records its calls. matters: whether a late answer matters."""

    def __init__(self, capacity: int = CAPACITY, *, matters: bool = True) -> None:
        self.told: list[tuple[Any, ...]] = []
        self.matters = matters
        self.later = Later(capacity, settle=self.settle, give_up=self.give_up, recall=self.recall)

    def settle(self, context: object, outcome: object) -> None:
        self.told.append(("settled", context, outcome))

    def give_up(self, context: object) -> bool:
        self.told.append(("given up", context))
        return self.matters

    def recall(self, context: object, outcome: object) -> None:
        self.told.append(("recalled", context, outcome))


@pytest.fixture
def asker() -> Asker:
    return Asker()


def test_an_answer_in_time_settles_once(asker: Asker) -> None:
    ticket = asker.later.ask("context", 10)
    assert ticket == 1
    assert (len(asker.later), asker.later.next_deadline()) == (1, 10)
    asker.later.expire(9)
    assert asker.later.answer(ticket, "outcome")
    assert not asker.later.answer(ticket, "again")
    asker.later.expire(10)
    assert asker.told == [("settled", "context", "outcome")]
    assert (len(asker.later), asker.later.next_deadline(), asker.later.overdue) == (0, -1, 0)


def test_an_unanswered_question_is_given_up_at_its_deadline(asker: Asker) -> None:
    ticket = asker.later.ask("context", 10)
    asker.later.expire(10)
    assert asker.told == [("given up", "context")]
    assert (len(asker.later), asker.later.next_deadline(), asker.later.overdue) == (0, -1, 1)
    assert asker.later.answer(ticket, "late")
    assert not asker.later.answer(ticket, "again")
    assert asker.told[1:] == [("recalled", "context", "late")]


def test_a_late_answer_to_a_question_without_interest_is_ignored() -> None:
    later = Later(CAPACITY, settle=print, give_up=lambda _context: False)
    ticket = later.ask("context", 10)
    later.expire(10)
    assert not later.answer(ticket, "late")


@pytest.mark.parametrize("ticket", [0, 2, (1 << 64) - 1])
def test_unknown_tickets_are_ignored(asker: Asker, ticket: int) -> None:
    asker.later.ask("context", 10)
    assert not asker.later.answer(ticket, "outcome")
    assert asker.told == []


def test_the_number_of_questions_is_bounded_and_owed_ones_have_their_own_protocol(asker: Asker) -> None:
    tickets = [asker.later.ask(number, 10) for number in range(CAPACITY)]
    assert all(tickets)
    assert asker.later.is_full()
    assert asker.later.ask("one more", 10) == 0
    assert all(asker.later.ask("owed", 10, is_owed=True) for _ in range(CAPACITY))
    assert asker.later.ask("owed", 10, is_owed=True) == 0
    assert len(asker.later) == 2 * CAPACITY
    for ticket in tickets:
        asker.later.answer(ticket, "outcome")
    assert asker.later.is_full(), "what is owed counts"
    asker.later.expire(10)
    assert not asker.later.is_full()
    assert asker.later.ask("again", 20) == 2 * CAPACITY + 1, "a ticket is never given twice"


def test_of_overdue_questions_the_oldest_are_forgotten_first(asker: Asker) -> None:
    tickets = []
    for moment in range(CAPACITY + 2):
        tickets.append(asker.later.ask(moment, moment))
        asker.later.expire(moment)
    asker.told.clear()
    assert [asker.later.answer(ticket, "late") for ticket in tickets] == [False] * 2 + [True] * CAPACITY
    assert [context for _, context, _ in asker.told] == list(range(2, CAPACITY + 2))


def test_the_earliest_deadline_is_next_and_of_equal_ones_the_oldest() -> None:
    """Compared with a dict that is searched."""
    draw = random.Random(5)
    asker = Asker(1000)
    waiting: dict[int, int] = {}
    now = 0
    for _ in range(5000):
        chance = draw.random()
        if chance < 0.6 and len(waiting) < 1000:
            deadline = now + draw.randrange(1, 60)
            waiting[asker.later.ask(deadline, deadline)] = deadline
        elif chance < 0.9 and waiting:
            ticket = draw.choice(list(waiting))
            assert asker.later.answer(ticket, ticket)
            assert asker.told.pop() == ("settled", waiting.pop(ticket), ticket)
        else:
            now += draw.randrange(0, 5)
            due = sorted((deadline, ticket) for ticket, deadline in waiting.items() if deadline <= now)
            asker.later.expire(now)
            assert asker.told == [("given up", deadline) for deadline, _ in due]
            asker.told.clear()
            for _, ticket in due:
                del waiting[ticket]
        assert len(asker.later) == len(waiting)
        assert asker.later.next_deadline() == min(waiting.values(), default=-1)


def test_equal_deadlines_are_given_up_in_the_order_in_which_they_were_asked() -> None:
    asker = Asker(100)
    tickets = [asker.later.ask(number, 10) for number in range(100)]
    for ticket in tickets[::3]:
        asker.later.answer(ticket, None)
    asker.told.clear()
    asker.later.expire(10)
    assert [context for _, context in asker.told] == [number for number in range(100) if number % 3]


def test_callbacks_may_ask_and_answer_other_questions(asker: Asker) -> None:
    """The question is removed by then, so a full Later has room."""

    def settle(context: int, outcome: object) -> None:
        asker.told.append(("settled", context, outcome))
        if context < 3:
            assert later.answer(later.ask(context + 1, 10), outcome)

    later = Later(1, settle=settle, give_up=lambda context: bool(later.ask(context, 20)))
    later.answer(later.ask(1, 10), "outcome")
    assert [context for _, context, _ in asker.told] == [1, 2, 3]
    later.ask("again", 10)
    later.expire(10)
    assert later.next_deadline() == 20


def test_an_exception_in_a_callback_loses_only_its_question(asker: Asker) -> None:
    def give_up(context: str) -> bool:
        if context == "first":
            raise ValueError(context)
        return asker.give_up(context)

    later = Later(CAPACITY, settle=asker.settle, give_up=give_up)
    later.ask("first", 10)
    later.ask("second", 10)
    with pytest.raises(ValueError, match="first"):
        later.expire(10)
    assert later.next_deadline() == 10
    later.expire(10)
    assert asker.told == [("given up", "second")]
