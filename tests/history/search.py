"""The search for an order that explains a history: Wing & Gong's, lazily and with memory as in Lowe's.

G. Lowe, "Testing for linearizability", 2017: just-in-time linearization, as a depth-first search. The history of an
object is walked from one end of a call to the next. At such a moment the call that ends must have taken effect; if it
has not yet, it does so now, or after others that are under way. Nothing takes effect before it has to: whatever can
wait will find the same possibilities at the next end. What is known at a moment is a *configuration*: the calls under
way that have taken effect (`done`), and the state. None is visited twice.

Six things keep this small. Each is sound, as it keeps at least one explanation of a history that has any:

- An operation that only observes takes effect as soon as it can. If a later moment explains it, so does this one, and
  nobody else notices.
- Of operations under way that are alike, the one that started first and has to end first goes first. If an explanation
  has b before a, and a neither started nor ends after b, then exchange the two, with their moments: both moments are in
  both intervals. Nobody but the two clients can tell (Model.alike), and these do nothing between the two: this is
  only done with operations that overlap no other one of their client, its end included. If a started after b, the
  moment of b may be before a: a clock that the model reads can tell the two apart.
- Fewest extras first: at an end, explanations that need one more operation to have taken effect are tried before those
  that need two. Most often none is needed.
- What has no answer is tried last of all; where its connection's end is over it takes effect, or never does. If it
  would only observe, it is left out from the start.
- The end of a connection that changes nothing takes effect as soon as all that the connection has left under way has:
  it would change nothing later either, as what a connection has comes by its own calls alone. Likewise what does no
  more than such an end (Model.clears), if its connection calls nothing else before it is over.
- If an object has parts (Model.parts), only what is under way and shares parts with the call that ends, directly or by
  way of others under way, takes effect before that. What shares none can change places with all of these, and wait.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections import defaultdict, deque
from math import inf
from typing import TYPE_CHECKING, Any, NamedTuple

from history.operations import Closed, Operation
from history.report import Violation, Way

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable, Iterator, Sequence

    from history.model import Model

CONFIGURATIONS_MAX = 300_000  # of an object, beyond one for each operation
WAYS_MAX = 4  # that a report tells


class Undecided(Exception):
    """The search was given up: it found no explanation, and did not show that there is none."""


def check(
    operations: Iterable[Operation], model: Model, *, configurations_max: int = CONFIGURATIONS_MAX
) -> Violation | None:
    """Returns a Violation for the first object of which no order of the operations explains the answers; None if there
    is none.

    Raises Undecided after so many configurations; ValueError if the operations are no history.
    """
    for key, history in by_key(operations, model):
        search = Search(key, history, model, configurations_max)
        if not search.explains():
            return search.violation()
    return None


def by_key(operations: Iterable[Operation], model: Model) -> Iterator[tuple[Hashable, list[Operation]]]:
    """The history of each object, by start. A connection's end occurs in it for each part where it matters."""
    closings: dict[int, Operation] = {}
    histories: dict[Hashable, list[Operation]] = defaultdict(list)
    called: dict[Hashable, dict[int, set[Hashable]]] = defaultdict(lambda: defaultdict(set))
    for operation in operations:
        if operation.ended is not None and operation.ended < operation.started:
            raise ValueError(f"it ended before it started: {operation}")
        if isinstance(operation.call, Closed):
            if operation.client in closings:
                raise ValueError(f"a connection has ended twice: {operation}")
            closings[operation.client] = operation
        elif operation.answer is not None and operation.ended is None:
            raise ValueError(f"an answer has an end: {operation}")
        else:
            key = model.key(operation.call)
            histories[key].append(operation)
            called[key][operation.client] |= model.leaves(operation)
    for key, history in histories.items():
        for operation in history:
            closing = closings.get(operation.client)
            if closing is not None and closing.ended is not None and operation.started > closing.ended:
                raise ValueError(f"it started after its connection had ended: {operation}")
        history.extend(
            closings[client]._replace(call=Closed(part))
            for client, parts in sorted(called[key].items())
            if client in closings
            for part in sorted(parts, key=repr)
        )
        yield key, sorted(history, key=lambda operation: operation.started)


class Entry(NamedTuple):
    """An operation as the search sees it. ends: when it ends, or its connection; closing: the numbers of its
    connection's Closed.

    clears: it is a connection's end, or does no more than one.
    """

    number: int
    operation: Operation
    ends: float
    closes: bool
    clears: bool
    observes: bool
    alike: Hashable | None
    parts: frozenset[Hashable]
    closing: frozenset[int]


class Moment(NamedTuple):
    """The end of a call. The other fields list the calls under way then, this one included, by their ends.

    movers: only those that share parts with it, directly or by way of each other. closers: those that clear what their
    client has, if that client calls nothing more before its end; with the numbers of what it has under way.
    """

    ending: Entry
    observers: tuple[Entry, ...]
    closers: tuple[tuple[Entry, frozenset[int]], ...]
    movers: tuple[Entry, ...]
    under_way: frozenset[int]


class Configuration(NamedTuple):
    """The calls under way that have taken effect before a moment, and the state that they left."""

    moment: int
    done: frozenset[int]
    state: Any


class Search:
    """The search for an explanation of one object's history. stuck: some configurations at the latest moment that it
    reached.
    """

    def __init__(self, key: Hashable, history: Sequence[Operation], model: Model, configurations_max: int) -> None:
        self.key = key
        self.history = history
        self.model = model
        self.moments = list(moments(entries(history, model)))
        self.seen: set[Configuration] = set()
        self.seen_max = len(history) + configurations_max
        self.stuck: list[Configuration] = []

    def explains(self) -> bool:
        """Searches depth first. The path holds configurations, each with its successors that were not tried yet."""
        path = [iter([Configuration(0, frozenset(), self.model.initial())])]
        reached = -1
        while path:
            configuration = next(path[-1], None)
            if configuration is None:
                path.pop()
                continue
            if configuration.moment == len(self.moments):
                return True
            if configuration.moment > reached:
                reached, self.stuck = configuration.moment, []
            if configuration.moment == reached and len(self.stuck) < WAYS_MAX:
                self.stuck.append(configuration)
            path.append(self.following(configuration))
        return False

    def violation(self) -> Violation:
        """The report of a search that found no explanation."""
        moment = self.moments[self.stuck[0].moment]
        ways = [
            Way(self.model.describe(state), tuple(self.history[number] for number in sorted(done)))
            for _, done, state in self.stuck
        ]
        under_way = tuple(self.history[number] for number in sorted(moment.under_way))
        return Violation(self.key, tuple(self.history), self.history[moment.ending.number], under_way, tuple(ways))

    def following(self, configuration: Configuration) -> Iterator[Configuration]:
        """The configurations before the next moment, in which this one's call has taken effect."""
        number = configuration.moment
        moment = self.moments[number]
        if moment.ending.operation.answer is None and not moment.ending.closes:
            yield self.advance(configuration)
        queue = deque([configuration])
        while queue:
            configuration = self.observe(moment, queue.popleft())
            if moment.ending.number in configuration.done:
                yield self.advance(configuration)
                continue
            if configuration in self.seen:
                continue
            if len(self.seen) >= self.seen_max:
                moments = f"moment {number} of {len(self.moments)}"
                raise Undecided(f"{self.key!r}: given up at {moments}, after {len(self.seen)} configurations")
            self.seen.add(configuration)
            for entry in candidates(moment, configuration.done):
                for state in self.model.step(configuration.state, entry.operation):
                    after = Configuration(number, configuration.done | {entry.number}, state)
                    if entry is moment.ending:
                        yield self.advance(after)
                    else:
                        queue.append(after)

    def observe(self, moment: Moment, configuration: Configuration) -> Configuration:
        """Applies calls that only observe and whose answers the state explains, and ends that change nothing."""
        number, done, state = configuration
        seeing = [
            entry.number
            for entry in moment.observers
            if entry.number not in done and entry.closing.isdisjoint(done) and self.model.step(state, entry.operation)
        ]
        seeing += [
            entry.number
            for entry, left in moment.closers
            if entry.number not in done and left <= done and list(self.model.step(state, entry.operation)) == [state]
        ]
        return Configuration(number, done.union(seeing), state) if seeing else configuration

    def advance(self, configuration: Configuration) -> Configuration:
        """Goes to the next moment whose call has not taken effect yet, and forgets the calls that are no longer under
        way.
        """
        number, done, state = configuration
        number += 1
        while number < len(self.moments) and self.moments[number].ending.number in done:
            number += 1
        if number < len(self.moments):
            done &= self.moments[number].under_way
        return Configuration(number, done, state)


def candidates(moment: Moment, done: frozenset[int]) -> Iterator[Entry]:
    """The calls that may take effect next: those that have not, whose connection has not ended, and only one of two
    that are alike.
    """
    alike: dict[Hashable, int] = {}  # when the first of those that end earlier started
    for entry in moment.movers:
        if entry.number in done or not entry.closing.isdisjoint(done):
            continue
        if entry.alike is not None:
            started = entry.operation.started
            if alike.get(entry.alike, inf) <= started:
                continue
            alike[entry.alike] = started
        yield entry


def entries(history: Sequence[Operation], model: Model) -> list[Entry]:
    """The entries that can matter, by start. An unanswered call ends with its connection."""
    closings: dict[tuple[int, Hashable], int] = {}
    for number, given in enumerate(history):
        if isinstance(given.call, Closed):
            closings[given.client, given.call.part] = number
    crowded = overlapping(history)
    found = []
    for number, given in enumerate(history):
        closes = isinstance(given.call, Closed)
        observes = not closes and model.observes(given)
        if observes and given.ended is None:
            continue
        parts = frozenset((given.call.part,)) if closes else model.parts(given)
        closing = frozenset(
            closings[given.client, part] for part in parts if not closes and (given.client, part) in closings
        )
        ends = min([end(given), *(end(history[other]) for other in closing)])
        operation = given if ends == end(given) else given._replace(ended=int(ends))
        alike = None if closes or number in crowded else model.alike(operation)
        clears = closes or model.clears(given)
        found.append(Entry(number, operation, ends, closes, clears, observes, alike, parts, closing))
    return found


def end(operation: Operation) -> float:
    return inf if operation.ended is None else operation.ended


def overlapping(history: Sequence[Operation]) -> set[int]:
    """The operations during which their client had another one under way."""
    found = set()
    latest: dict[int, tuple[float, int]] = {}  # by client: the end of what ends last, and which that is
    for number, operation in enumerate(history):
        ends = end(operation)
        before, other = latest.get(operation.client, (-inf, -1))
        if before >= operation.started:
            found |= {number, other}
        latest[operation.client] = max((before, other), (ends, number))
    return found


def moments(found: Sequence[Entry]) -> Iterator[Moment]:
    """The moment of each end, in order. A call that starts at that very time is under way."""
    starts = deque(found)
    under_way: list[Entry] = []
    latest = last_starts(found)
    for ending in sorted((entry for entry in found if entry.ends < inf), key=in_turn):
        while starts and starts[0].operation.started <= ending.ends:
            insort(under_way, starts.popleft(), key=in_turn)
        numbers = frozenset(entry.number for entry in under_way)
        yield Moment(
            ending,
            tuple(entry for entry in under_way if entry.observes),
            tuple(
                (entry, frozenset(other.number for other in under_way if comes_before(other, entry)))
                for entry in under_way
                if entry.clears and latest[entry.number] <= ending.ends
            ),
            tuple(near(ending, [entry for entry in under_way if not entry.observes])),
            numbers,
        )
        under_way.remove(ending)


def last_starts(found: Sequence[Entry]) -> dict[int, int]:
    """By the number of each call that clears: when the last call starts that may bring its client something before
    that.
    """
    latest: dict[int, int] = defaultdict(int)
    starts: dict[tuple[int, Hashable], list[int]] = defaultdict(list)
    for entry in found:
        for number in entry.closing:
            latest[number] = max(latest[number], entry.operation.started)
        for part in () if entry.clears else entry.parts:
            starts[entry.operation.client, part].append(entry.operation.started)
    for entry in found:
        if entry.clears and not entry.closes:
            for part in entry.parts:
                before = starts[entry.operation.client, part]
                place = bisect_right(before, entry.ends)
                latest[entry.number] = max([latest[entry.number], *before[place - 1 : place]])
    return latest


def comes_before(entry: Entry, clearing: Entry) -> bool:
    """Whether the call may bring its client something that the other one clears."""
    if clearing.closes:
        return clearing.number in entry.closing
    is_own = entry.operation.client == clearing.operation.client
    return is_own and not entry.clears and not entry.parts.isdisjoint(clearing.parts)


def near(ending: Entry, entries: Sequence[Entry]) -> Iterator[Entry]:
    """The calls that share parts with this one, directly or by way of each other."""
    reached = set(ending.parts)
    before = 0
    while len(reached) > before:
        before = len(reached)
        for entry in entries:
            if not reached.isdisjoint(entry.parts):
                reached |= entry.parts
    return (entry for entry in entries if not reached.isdisjoint(entry.parts))


def in_turn(entry: Entry) -> tuple[float, bool, int]:
    """Sort key: by end; the end of a connection after the calls that it left unanswered, which must take effect before
    it.
    """
    return entry.ends, entry.closes, entry.number
