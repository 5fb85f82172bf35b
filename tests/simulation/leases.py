"""What the sentinel protocol's world knows by itself: rates in their windows, tokens and their leases.

Written from docs/protocols/sentinel.md with sums that are added up anew each time, and no list of anybody's in order.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from property.sentinel_model import CONCURRENCY, GLOBAL, INT32_MAX, KEEP_STRATEGY, MS, RELEASE_STRATEGY

if TYPE_CHECKING:
    from collections.abc import Iterable

    from counterd.protocols.sentinel.rules import FlowRule, ParamRule
    from simulation.world import Link

OK, BLOCKED, SHOULD_WAIT = 0, 1, 2


class Rate:
    """A sliding window, by the numbers of its parts."""

    __slots__ = ("borrowed", "length_ns", "passed", "samples", "seconds", "waiting")

    def __init__(self, samples: int, window_ms: int) -> None:
        self.samples = samples
        self.length_ns = window_ms * MS // samples
        self.seconds = window_ms / 1000
        self.passed: dict[int, int] = {}
        self.waiting: dict[int, int] = {}

    def is_like(self, rule: FlowRule | ParamRule) -> bool:
        return (self.samples, self.seconds) == (rule.sample_count, rule.window_ms / 1000)

    def enter(self, now: int) -> int:
        """The number of the present part, with only those that count or are yet to come."""
        number = now // self.length_ns
        for parts in (self.passed, self.waiting):
            for gone in [other for other in parts if other <= number - self.samples]:
                del parts[gone]
        return number

    def sum(self, number: int) -> int:
        return sum(count for other, count in self.passed.items() if other <= number)

    def left(self, threshold: float, count: int, now: int, besides: int = 0) -> float:
        return threshold - (self.sum(self.enter(now)) + besides) / self.seconds - count

    def add(self, count: int, now: int) -> None:
        number = self.enter(now)
        self.passed[number] = self.passed.get(number, 0) + count

    def ask(self, threshold: float, count: int, prioritized: bool, now: int) -> tuple[int, int, int]:
        """What FLOW is answered. Nothing is changed."""
        number = self.enter(now)
        left = self.left(threshold, count, now)
        if left >= 0:
            return OK, clamped(left), 0
        if prioritized and sum(self.waiting.values()) / self.seconds <= threshold:
            borrowed = self.passed.get(number + 1, 0)
            oldest = self.passed.get(number + 1 - self.samples, 0)
            if self.sum(number) / self.seconds + (count + borrowed) - oldest <= threshold:
                return SHOULD_WAIT, 0, self.length_ns // MS
        return BLOCKED, 0, 0

    def borrow(self, count: int, now: int) -> None:
        number = self.enter(now)
        self.passed[number + 1] = self.passed.get(number + 1, 0) + count
        self.waiting[number] = self.waiting.get(number, 0) + count


def clamped(left: float) -> int:
    return min(int(left), INT32_MAX)


def threshold(rule: FlowRule | ParamRule, count: float, connected: int) -> float:
    return count if rule.threshold_type == GLOBAL else count * connected


class Token:
    """rule: the last of its flow. judged: until when an expire strategy may think about it, in which batch; or 0."""

    __slots__ = ("armed", "batch", "count", "due", "judged", "kept", "owner", "renewed", "rule", "since")

    def __init__(self, rule: FlowRule, count: int, owner: Link | None, now: int) -> None:
        self.rule = rule
        self.count = count
        self.owner = owner  # nobody never goes
        self.since = now
        self.kept = self.judged = self.batch = 0
        self.renewed = False  # by an expire strategy, when its owner had gone
        self.due = self.armed = 0
        self.begin(now)

    def begin(self, now: int) -> None:
        """A lease, or another one. What nothing can be renewed of is judged as before."""
        timeout = self.rule.resource_timeout_ms * MS
        self.due = (
            self.since + timeout if self.rule.resource_timeout_strategy == RELEASE_STRATEGY else now + 2 * timeout
        )
        if self.judged and self.due <= now:
            return
        self.armed = now
        self.judged = 0
        self.renewed = False

    def ends(self, now: int) -> int:
        """When its lease is over, as it looks now."""
        gone = None if self.owner is None else self.owner.books.gone
        due = self.due
        if self.rule.resource_timeout_strategy == KEEP_STRATEGY:
            until = now if gone is None else gone
            span = 2 * self.rule.resource_timeout_ms * MS
            if due <= until:
                due += ((until - due) // span + 1) * span
        return due if gone is None else min(due, gone + self.rule.client_offline_ms * MS)

    def wakes(self, now: int) -> int:
        """From when on a sweep finds it: its lease may have been over before, by a rule, or as its owner had gone."""
        if self.judged or self.renewed:
            return self.judged or self.due
        gone = self.owner is not None and self.owner.books.gone is not None
        return max(self.ends(now), self.armed, self.owner.books.armed if self.owner and gone else 0)


class Tokens:
    """All that are out, by id; and the calls of each flow."""

    def __init__(self) -> None:
        self.by_id: dict[int, Token] = {}
        self.calls: dict[int, int] = {}

    def add(self, id: int, token: Token) -> None:
        self.by_id[id] = token
        flow_id = token.rule.flow_id
        self.calls[flow_id] = self.calls.get(flow_id, 0) + token.count

    def remove(self, id: int) -> Token:
        token = self.by_id.pop(id)
        self.calls[token.rule.flow_id] -= token.count
        return token

    def load(self, rules: Iterable[FlowRule]) -> None:
        by_id = {rule.flow_id: rule for rule in rules}
        for token in self.by_id.values():
            token.rule = by_id.get(token.rule.flow_id, token.rule)


def is_for_calls(rule: FlowRule | None) -> bool:
    return rule is not None and rule.grade == CONCURRENCY
