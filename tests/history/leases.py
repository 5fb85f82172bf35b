"""The tokens of the sentinel protocol, ACQUIRE, RELEASE and KEEP: docs/protocols/sentinel.md as a model, flow by flow.

When a lease is over is exact for the server, but known here only within an interval, as the moments of the calls are.
Before it a token must be there. Within it, either will do. After it, the token answers 7 to whatever is asked of it,
but may still count, until the sweep has to have come by. That it has gone is no step by itself: it is in the next grant
that needs its room. Of ways to make that room, only those are tried that free nothing in vain: whatever still counts
can be freed later.
"""

from __future__ import annotations

from collections import defaultdict
from itertools import product
from typing import TYPE_CHECKING, NamedTuple

from counterd.protocols.sentinel.rules import KEEP, RELEASE
from counterd.protocols.sentinel.wire import LEASE_MAX, Status

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from history.operations import Operation

NEVER = 1 << 63  # ns
NS_PER_MS = 1_000_000
UNKNOWN = 0  # the id of a token whose grant was never answered
GONE = 0  # the owner of a token whose connection has ended

Answer = tuple[int, int]  # status, and what it tells
Span = tuple[int, int]  # of time: some moment of it, both ends included


class Acquire(NamedTuple):
    flow: int
    count: int


class Release(NamedTuple):
    """A RELEASE. flow: of the token; the server is not told it."""

    flow: int
    token: int


class Keep(NamedTuple):
    """A KEEP. flow: of the token; the server is not told it."""

    flow: int
    token: int


class TokenRule(NamedTuple):
    """A rule for tokens. strategy: resourceTimeoutStrategy. resource_ns: the length of a lease. offline_ns: how long it
    outlives its owner's connection.
    """

    count: float
    strategy: int
    resource_ns: int
    offline_ns: int


class Token(NamedTuple):
    """A granted token. owner: the client that has it, or GONE. since: when it was granted. ends: when its lease ends.

    With the KEEP strategy a lease does not end while its owner is connected: then `ends` is the time from which it is
    renewed.
    """

    id: int
    count: int
    owner: int
    since: Span
    ends: Span


class Tokens(NamedTuple):
    """The tokens of a flow. is_ruled: False once the rule was removed; its terms go on for the tokens that exist."""

    rule: TokenRule | None
    is_ruled: bool
    tokens: tuple[Token, ...] = ()

    def loaded(self, rule: TokenRule | None) -> Tokens:
        """With the threshold of another rule, or without a rule. A change of other terms is not modelled."""
        if rule is None or self.rule is None:
            return self._replace(rule=rule or self.rule, is_ruled=rule is not None)
        if rule[1:] != self.rule[1:]:
            raise ValueError(f"a rule may not change its terms in a history: {self.rule}, {rule}")
        return self._replace(rule=rule, is_ruled=True)

    def without(self, token: Token) -> Tokens:
        tokens = list(self.tokens)
        tokens.remove(token)
        return self._replace(tokens=tuple(tokens))

    def find(self, id: int) -> Token | None:
        return next((token for token in self.tokens if token.id == id and id != UNKNOWN), None)


class Clock(NamedTuple):
    """The span in which an operation takes effect, slack included; and how long after the end of a lease it is swept at
    the latest.
    """

    first: int
    last: int
    sweep_ns: int

    @property
    def span(self) -> Span:
        return self.first, self.last

    def later(self, by: int) -> Span:
        return self.first + by, self.last + by

    def may_be_over(self, ends: Span) -> bool:
        return ends[0] <= self.last

    def may_go_on(self, ends: Span) -> bool:
        return self.first < ends[1]

    def has_been_swept(self, ends: Span) -> bool:
        return ends[1] + self.sweep_ns < self.first


def clock_of(operation: Operation, slack_ns: int, sweep_ns: int) -> Clock:
    last = NEVER if operation.ended is None else operation.ended + slack_ns
    return Clock(operation.started - slack_ns, last, sweep_ns)


def lease(rule: TokenRule, token: Token) -> Span:
    """The end of a token's lease; NEVER if the rule keeps it while its owner is connected."""
    return (NEVER, NEVER) if rule.strategy == KEEP and token.owner != GONE else token.ends


# ---- what comes of a call ------------------------------------------------------------------------------------------


def acquired(state: Tokens, operation: Operation, clock: Clock) -> Iterator[tuple[Answer, Tokens]]:
    """The possible outcomes of an ACQUIRE. The new token has the id that the answer tells."""
    call, rule = operation.call, state.rule
    if call.flow <= 0 or call.count <= 0:
        yield (int(Status.BAD_REQUEST), 0), state
        return
    if rule is None or not state.is_ruled:
        yield (int(Status.NO_RULE), 0), state
        return
    counting = [token for token in state.tokens if not clock.has_been_swept(lease(rule, token))]
    room = rule.count - call.count
    if sum(token.count for token in counting) > room:
        yield (int(Status.BLOCKED), 0), state
    id = UNKNOWN if operation.answer is None else operation.answer[1]
    if operation.answer is not None and (id == UNKNOWN or state.find(id)):
        return
    span = rule.resource_ns * (1 if rule.strategy == RELEASE else 2)
    token = Token(id, call.count, operation.client, clock.span, clock.later(span))
    for kept in with_room(rule, counting, room, clock):
        yield (int(Status.OK), id), state._replace(tokens=tuple(sorted((*kept, token))))


def with_room(rule: TokenRule, counting: Sequence[Token], room: float, clock: Clock) -> Iterator[list[Token]]:
    """The ways to leave out expired leases until the tokens that still count leave enough room; each leaves out as few
    as it can.

    Of tokens with equal counts whose leases have certainly ended, the one that is swept first is left out first.
    """
    needed = sum(token.count for token in counting) - room
    if needed <= 0:
        yield list(counting)
        return
    classes: dict[tuple[int, int], list[Token]] = defaultdict(list)
    for place, token in enumerate(counting):
        ends = lease(rule, token)
        if clock.may_be_over(ends):
            classes[token.count, place if clock.may_go_on(ends) else -1].append(token)
    for tokens in classes.values():
        tokens.sort(key=lambda token: token.ends[1])
    for numbers in product(*(range(len(tokens) + 1) for tokens in classes.values())):
        freed = sum(count * number for (count, _), number in zip(classes, numbers, strict=True))
        least = min((count for (count, _), number in zip(classes, numbers, strict=True) if number), default=0)
        if needed <= freed < needed + least:
            going = [token for of, number in zip(classes.values(), numbers, strict=True) for token in of[:number]]
            kept = list(counting)
            for token in going:
                kept.remove(token)
            yield kept


def released(state: Tokens, operation: Operation, clock: Clock) -> Iterator[tuple[Answer, Tokens]]:
    """The possible outcomes of a RELEASE. Of an unknown token: that it was released already."""
    token = state.find(operation.call.token)
    late = int(Status.ALREADY_RELEASED), 0
    if token is None or state.rule is None:
        yield late, state
        return
    ends = lease(state.rule, token)
    if clock.may_go_on(ends):
        yield (int(Status.RELEASE_OK if state.is_ruled else Status.NO_RULE), 0), state.without(token)
    if clock.may_be_over(ends):
        yield late, state.without(token)


def kept(state: Tokens, operation: Operation, clock: Clock) -> Iterator[tuple[Answer, Tokens]]:
    """The possible outcomes of a KEEP. The client that renews a lease becomes its owner."""
    token, rule = state.find(operation.call.token), state.rule
    late = int(Status.ALREADY_RELEASED), 0
    if token is None or rule is None:
        yield late, state
        return
    ends = lease(rule, token)
    if clock.may_be_over(ends):
        yield late, state.without(token)
    if not clock.may_go_on(ends):
        return
    if not state.is_ruled:
        yield (int(Status.NO_RULE), 0), state
        return
    if rule.strategy == RELEASE:
        ends = token.since[0] + rule.resource_ns, token.since[1] + rule.resource_ns
        most = (ends[1] - clock.first) // NS_PER_MS
        least = max(0, (ends[0] - clock.last) // NS_PER_MS)
    else:
        ends = clock.later(2 * rule.resource_ns)
        most = least = 2 * rule.resource_ns // NS_PER_MS
    told = least if operation.answer is None else operation.answer[1]
    if min(least, LEASE_MAX) <= told <= min(most, LEASE_MAX):
        mine = token._replace(owner=operation.client, ends=ends)
        yield (int(Status.OK), told), state._replace(tokens=tuple(sorted((*state.without(token).tokens, mine))))


def left(state: Tokens, client: int, clock: Clock) -> Tokens:
    """The tokens of a flow after a client's connection has ended."""
    rule = state.rule
    if rule is None or all(token.owner != client for token in state.tokens):
        return state
    tokens = [
        token._replace(owner=GONE, ends=ends_of_leaver(rule, token, clock)) if token.owner == client else token
        for token in state.tokens
    ]
    return state._replace(tokens=tuple(sorted(tokens)))


def ends_of_leaver(rule: TokenRule, token: Token, clock: Clock) -> Span:
    first, last = token.ends
    if rule.strategy == KEEP:
        first, last = renewed(first, last, 2 * rule.resource_ns, clock)
    first_off, last_off = clock.later(rule.offline_ns)
    return min(first, first_off), min(last, last_off)


def renewed(first: int, last: int, span_ns: int, clock: Clock) -> Span:
    """The end of the lease that is current at that time, if each one begins at the end of the one before."""
    times = [max(0, (gone - ends) // span_ns + 1) for gone in clock.span for ends in (first, last)]
    if len(set(times)) == 1:
        return first + times[0] * span_ns, last + times[0] * span_ns
    return clock.first, clock.last + span_ns
