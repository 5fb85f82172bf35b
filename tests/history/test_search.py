"""The search decides like a trial of every order, and reports which calls have no explanation."""

from __future__ import annotations

from itertools import combinations, permutations
from math import inf
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from history import Closed, Model, Operation, Undecided, check
from history.counter import Acquire, CounterModel, Get, Release

if TYPE_CHECKING:
    from collections.abc import Sequence

NOTHING = (0, None)
ANSWERS = {
    Acquire: ((0, 1), (0x21, None)),
    Release: (NOTHING, (0x22, None), (0x01, None)),
    Get: ((0, 0), (0, 1), (0, 2), (0x01, None)),
}
calls = st.sampled_from([Acquire("a", 1, 1), Acquire("a", 1, 2), Release("a", 1), Release("a", 0), Get("a")])


@st.composite
def histories(draw: Any) -> list[Operation]:
    """Up to six operations of up to three clients, which may have several under way; some end, seen or not."""
    operations = []
    for _ in range(draw(st.integers(0, 6))):
        call = draw(calls)
        started = draw(st.integers(0, 12))
        ended = draw(st.none() | st.integers(started, 14))
        answer = None if ended is None else draw(st.sampled_from(ANSWERS[type(call)]))
        operations.append(Operation(draw(st.integers(1, 3)), call, started, ended, answer))
    for client in draw(st.sets(st.integers(1, 3), max_size=6 - len(operations))):
        last = max((operation.started for operation in operations if operation.client == client), default=0)
        ended = draw(st.none() | st.integers(last, 14))
        operations.append(Operation(client, Closed(), draw(st.integers(0, 14 if ended is None else ended)), ended))
    return operations


def explained(operations: Sequence[Operation], model: Model) -> bool:
    """Whether any order explains the history: tries every order of every choice of the calls that need not have
    happened.
    """
    optional = [operation for operation in operations if operation.ended is None]
    needed = [operation for operation in operations if operation.ended is not None]
    return any(
        follows(order, model)
        for count in range(len(optional) + 1)
        for chosen in combinations(optional, count)
        for order in permutations([*needed, *chosen])
    )


def follows(order: Sequence[Operation], model: Model) -> bool:
    gone: set[int] = set()
    states = {model.initial()}
    latest = -inf
    for operation in order:
        latest = max(latest, operation.started)
        if operation.client in gone or (operation.ended is not None and operation.ended < latest):
            return False
        if isinstance(operation.call, Closed):
            gone.add(operation.client)
        states = {after for state in states for after in model.step(state, operation)}
    return bool(states)


@settings(max_examples=250, deadline=None, derandomize=True)
@given(histories())
def test_verdict_is_that_of_trying_every_order(operations: list[Operation]) -> None:
    assert (check(operations, CounterModel()) is None) == explained(operations, CounterModel())


class Write(NamedTuple):
    value: int


class Read(NamedTuple):
    pass


class Register(Model):
    """A model as a user would write it, with the three required methods."""

    def key(self, call: Any) -> str:
        del call
        return "the register"

    def initial(self) -> int:
        return 0

    def step(self, state: int, operation: Operation) -> list[int]:
        if isinstance(operation.call, Write):
            return [operation.call.value]
        return [state] if isinstance(operation.call, Closed) or operation.answer in (None, state) else []


registers = st.lists(
    st.builds(
        lambda client, call, started, took, answer: Operation(
            client, call, started, None if took is None else started + took, None if took is None else answer
        ),
        st.integers(1, 3),
        st.sampled_from([Write(1), Write(2), Read()]),
        st.integers(0, 9),
        st.none() | st.integers(0, 6),
        st.integers(0, 2),
    ),
    max_size=6,
)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(registers, st.none() | st.integers(9, 12))
def test_verdict_on_a_custom_model(operations: list[Operation], gone: int | None) -> None:
    """Its state outlives a connection, so it matters that a call came before the connection's end."""
    operations = [*operations[:5], Operation(1, Closed(), 9, gone)]
    assert (check(operations, Register()) is None) == explained(operations, Register())


def test_each_object_is_explained_by_itself() -> None:
    operations = [Operation(1, Acquire(name, 1, 1), 0, 9, (0, 1)) for name in "abc"]
    assert check(operations, CounterModel()) is None
    violation = check([*operations, Operation(2, Acquire("b", 1, 1), 0, 9, (0, 1))], CounterModel())
    assert violation is not None
    assert violation.key == "b"


def test_report_names_the_unexplained_calls_and_the_states() -> None:
    violation = check(
        [
            Operation(1, Acquire("a", 2, 5), 1_000, 2_000, (0, 2)),
            Operation(2, Acquire("a", 3, 5), 3_000, 9_000, (0, 3)),
            Operation(3, Get("a"), 4_000, 8_000, (0, 4)),
            Operation(4, Release("a", 1), 5_000),
            Operation(1, Get("a"), 20_000, 21_000, (0, 1)),
        ],
        CounterModel(),
    )
    assert str(violation).splitlines() == [
        "'a': no order of its 5 operations explains all answers.",
        "Stuck at the end of",
        "    #3        3.000 - 7.000        client 3: Get(name='a') -> (0, 4)",
        "Before that, with what had ended explained, the state was",
        "  consumption 2 (client 1 holds 2)",
        "Under way, in µs:",
        "    #2        2.000 - 8.000        client 2: Acquire(name='a', resources=3, maximum=5) -> (0, 3)",
        "    #3        3.000 - 7.000        client 3: Get(name='a') -> (0, 4)",
        "    #4        4.000 -       ...    client 4: Release(name='a', resources=1)",
        "The last that had ended before:",
        "    #1        0.000 - 1.000        client 1: Acquire(name='a', resources=2, maximum=5) -> (0, 2)",
    ]


def test_search_that_is_too_long_is_not_a_pass() -> None:
    """Sums that no choice of these gives, and too many choices."""
    operations = [Operation(n, Acquire("a", 2**n, 2**20), 0, 20, (0, 2**n)) for n in range(11)]
    operations.append(Operation(99, Get("a"), 0, 10, (0, 2**13)))
    with pytest.raises(Undecided, match="'a': given up at moment 0 of 12"):
        check(operations, CounterModel(), configurations_max=1000)
    assert check(operations, CounterModel()) is not None


def test_an_unanswered_call_may_have_an_end() -> None:
    """By that time it has taken effect, or it never does."""
    lost = Operation(1, Acquire("a", 1, 1), 0, 5)
    before, after = (Operation(2, Get("a"), start, start + 1, (0, 0)) for start in (3, 8))
    seen = Operation(2, Get("a"), 10, 11, (0, 1))
    assert check([lost, before, seen], CounterModel()) is None
    assert check([lost, after], CounterModel()) is None
    assert check([lost, after, seen], CounterModel()) is not None


@pytest.mark.parametrize(
    "operations",
    [
        [Operation(1, Get("a"), 5, 4, (0, 1))],
        [Operation(1, Get("a"), 5, None, (0, 1))],
        [Operation(1, Closed(), 1, 2), Operation(1, Closed(), 3, 4)],
        [Operation(1, Closed(), 1, 2), Operation(1, Get("a"), 3, 4, (0, 0))],
    ],
    ids=["ends before it starts", "answer without end", "closed twice", "calls after its end"],
)
def test_invalid_histories_are_refused(operations: list[Operation]) -> None:
    with pytest.raises(ValueError, match="Operation"):
        check(operations, CounterModel())
