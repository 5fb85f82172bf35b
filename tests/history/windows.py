"""The rates of the sentinel protocol, FLOW and PARAM: docs/protocols/sentinel.md as a model, a rule at a time.

The server numbers its samples by the monotonic clock, which is the recorder's too. So which sample a call was counted
in is known but for calls that were under way when one began, and then each is tried.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, NamedTuple

from counterd.protocols.sentinel.wire import Status

if TYPE_CHECKING:
    from collections.abc import Iterator

    from history.operations import Operation

NS_PER_MS = 1_000_000
I32_MAX = (1 << 31) - 1
REFUSED = (int(Status.BLOCKED), 0, 0)

Answer = tuple[int, int, int]  # status, remaining, ms to wait


class Flow(NamedTuple):
    flow: int
    count: int
    urgent: bool = False


class Param(NamedTuple):
    """A PARAM call. values: as they are on the wire."""

    flow: int
    count: int
    values: tuple[bytes, ...]


class RateRule(NamedTuple):
    """A rule for rates. items: the counts of the values that have their own."""

    count: float
    samples: int
    window_ms: int
    items: tuple[tuple[bytes, int], ...] = ()


class Rates(NamedTuple):
    """What counts of a flow. number: the last sample in which anything was counted.

    passed: (value, sample, count); for FLOW the value is empty. A sample that has not begun holds what was borrowed
    from it. waiting: (sample, count) of the calls that were told to wait.
    """

    rule: RateRule | None
    number: int = 0
    passed: tuple[tuple[bytes, int, int], ...] = ()
    waiting: tuple[tuple[int, int], ...] = ()

    def loaded(self, rule: RateRule | None) -> Rates:
        """With another rule. If its window and samples are the same, the counts go on; else they begin anew."""
        if rule is not None and self.rule is not None and rule[1:3] == self.rule[1:3]:
            return self._replace(rule=rule)
        return Rates(rule)

    def sum(self, value: bytes, number: int) -> int:
        """What counts of a value in the window that ends with that sample."""
        assert self.rule is not None
        first = number - self.rule.samples
        return sum(count for of, sample, count in self.passed if of == value and first < sample <= number)

    def counted(self, number: int, *passed: tuple[bytes, int, int], waiting: int = 0) -> Rates:
        """With this counted too, in that sample, and without the samples that cannot count any more."""
        assert self.rule is not None
        first = number - self.rule.samples
        sums: Counter[tuple[bytes, int]] = Counter()
        for value, sample, count in (*self.passed, *passed):
            if sample > first:
                sums[value, sample] += count
        told = Counter({sample: count for sample, count in self.waiting if sample > first})
        if waiting:
            told[number] += waiting
        return Rates(self.rule, number, tuple(sorted((*at, sums[at]) for at in sums)), tuple(sorted(told.items())))


def asked(state: Rates, operation: Operation, slack_ns: int) -> Iterator[tuple[Answer, Rates]]:
    """The possible outcomes of a FLOW or PARAM: an answer and the state then, for each sample in which it may be
    counted.
    """
    call, rule = operation.call, state.rule
    if call.flow <= 0 or call.count <= 0 or (isinstance(call, Param) and not call.values):
        yield (int(Status.BAD_REQUEST), 0, 0), state
    elif rule is None:
        yield (int(Status.NO_RULE), 0, 0), state
    elif operation.ended is None:
        raise ValueError(f"it has neither an answer nor an end of its connection: {operation}")
    else:
        length_ns = rule.window_ms * NS_PER_MS // rule.samples
        first = max(state.number, (operation.started - slack_ns) // length_ns)
        for number in range(first, (operation.ended + slack_ns) // length_ns + 1):
            yield flow_asked(state, call, number) if isinstance(call, Flow) else param_asked(state, call, number)


def flow_asked(state: Rates, call: Flow, number: int) -> tuple[Answer, Rates]:
    rule = state.rule
    assert rule is not None
    seconds = rule.window_ms / 1000
    rate = state.sum(b"", number) / seconds
    left = rule.count - rate - call.count
    if left >= 0:
        return (int(Status.OK), min(int(left), I32_MAX), 0), state.counted(number, (b"", number, call.count))
    if call.urgent:
        waiting = sum(count for sample, count in state.waiting if number - rule.samples < sample)
        borrowed = sum(count for _, sample, count in state.passed if sample == number + 1)
        oldest = sum(count for _, sample, count in state.passed if sample == number + 1 - rule.samples)
        if waiting / seconds <= rule.count and rate + (call.count + borrowed) - oldest <= rule.count:
            after = state.counted(number, (b"", number + 1, call.count), waiting=call.count)
            return (int(Status.SHOULD_WAIT), 0, rule.window_ms // rule.samples), after
    return REFUSED, state


def param_asked(state: Rates, call: Param, number: int) -> tuple[Answer, Rates]:
    """All values pass, or none; equal values add up."""
    rule = state.rule
    assert rule is not None
    counts = dict(rule.items)
    after, left = state, 0.0
    for value in call.values:
        left = counts.get(value, rule.count) - after.sum(value, number) / (rule.window_ms / 1000) - call.count
        if left < 0:
            return REFUSED, state
        after = after.counted(number, (value, number, call.count))
    return (int(Status.OK), min(int(left), I32_MAX) if len(call.values) == 1 else -1, 0), after
