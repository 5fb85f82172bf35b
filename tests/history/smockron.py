"""What gatekeepers of the smockron protocol sent and were told: docs/protocols/smockron.md held against both.

No search for an order: bounds of `next` tell as much, in the time of sorting. The server takes an accounting message
at some moment between its start and its end, which is the PONG of a PING behind it; one without an end it may have
taken until then, or never. Before and after which others it did is known but for those under way at the same time, so

- `next` behind a message is at least what those that had ended before it began have used up, and itself; and at most
  what all have that had begun before it ended. What overlaps widens that, and once it has ended it does no more.
- What has to come after now at least has to be told; what may, can be. Each moment that was told needs a message of its
  own whose bounds it lies within, and each message that has to be told needs a moment of its own, with each subscriber
  that was there all the while. Both are asked as points and intervals, which pair up greedily.

Beside the bounds, exactly: moments of an identifier grow with each message, at every subscriber, by an interval as long
as they are ahead of now; and if one of them was told one moment right behind another, nobody was told anything between
the two. So what is lost, told twice, counted twice or reckoned from the same `next` twice is found however many were
under way.

What resets an identifier (FORGET, a daemon that is killed) ends what was before it where it is certain that it came
between, and leaves nothing certain of what overlaps it. Not for daemons that evict identifiers, nor for rules whose
bursts change, or with intervals of less than a millisecond: then moments need not grow.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, bisect_right, insort
from collections import defaultdict
from itertools import accumulate, chain, pairwise, product
from typing import TYPE_CHECKING, Any, NamedTuple

from counterd.errors import ProtocolError
from counterd.protocols.smockron import wire
from history.operations import Closed, Operation

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Sequence

NS_PER_MS = 1_000_000
NEVER = -(1 << 62)
SHOWN = 4  # of what is told of an identifier

Key = tuple[bytes, bytes]  # domain, identifier


class Account(NamedTuple):
    """An accounting message. moment_ms: the time that counts, in Unix time."""

    domain: bytes
    identifier: bytes
    status: str
    moment_ms: int


class Subscribe(NamedTuple):
    prefix: bytes


class Ping(NamedTuple):
    """A subscriber's ping. Everything that was published before it was sent has arrived when it is answered."""


class Told(NamedTuple):
    """The messages that arrived at one time: (domain, word, identifier, moment_ms), in order."""

    messages: tuple[tuple[bytes, str, bytes, int], ...]


class Load(NamedTuple):
    """A change of the rules: (domain, interval_ns, burst_ns) of all of them. A history begins with one."""

    rates: tuple[tuple[bytes, int, int], ...]


class Restarted(NamedTuple):
    """A kill of the daemon, and the start of another one."""


class Request(NamedTuple):
    """An accounting message, in ns of the monotonic clock. least, most: what it can use up. is_sure: it was certainly
    taken.
    """

    started: int
    ended: int
    moment: int
    burst: int
    least: int
    most: int
    is_sure: bool

    @property
    def earliest(self) -> int:
        """`next`, if nothing was heard of its identifier before. The server has whole milliseconds."""
        return max(self.moment, self.started - NS_PER_MS) - self.burst


class Reset(NamedTuple):
    started: int
    ended: int
    is_sure: bool


class Heard(NamedTuple):
    word: str
    moment: int
    at: int


class Subscriber(NamedTuple):
    """begun: when it subscribed. until: what was told before that, it has read; None if it may have lost some.

    life: of which daemon, None if that is not certain.
    """

    client: int
    prefix: bytes
    begun: Operation
    until: int | None
    life: int | None
    heard: dict[Key, list[Heard]]

    def hears(self, key: Key) -> bool:
        return (key[0] + b"\0").startswith(self.prefix)

    def has_to_hear(self, one: Request | Reset) -> bool:
        began = self.begun.ended
        return began is not None and self.until is not None and began < one.started and one.ended < self.until


Span = tuple[int, int]


def unexplained(
    history: Sequence[Operation], wall_ns: int, *, slack_ns: int = 0, deaf: Collection[int] = ()
) -> list[str]:
    """What is wrong with it, for people. Not more than a few lines for an identifier.

    wall_ns: Unix time without the monotonic clock's. slack_ns: by which the server's may differ from it. deaf: clients
    that may have lost messages, for they did not read all the while.
    """
    return list(Checker(history, wall_ns, slack_ns, deaf).found())


class Checker:
    def __init__(self, history: Sequence[Operation], wall_ns: int, slack_ns: int, deaf: Collection[int]) -> None:
        self.wall_ns = wall_ns
        self.slack_ns = slack_ns
        self.deaf = deaf
        self.last_ns = max((one.ended or one.started for one in history), default=0)
        self.closings = {one.client: one for one in history if isinstance(one.call, Closed)}
        self.loads = sorted((one for one in history if isinstance(one.call, Load)), key=lambda one: one.started)
        self.restarts = [one for one in history if isinstance(one.call, Restarted)]
        self.requests: dict[Key, list[Request]] = defaultdict(list)
        self.forgets: dict[Key, list[Reset]] = defaultdict(list)
        by_client: dict[int, list[Operation]] = defaultdict(list)
        for one in history:
            by_client[one.client].append(one)
            if isinstance(one.call, Account):
                self._account(one)
        listens = (of for of in by_client.values() if any(isinstance(one.call, Subscribe) for one in of))
        self.subscribers = [self._subscriber(of) for of in listens]

    def found(self) -> Iterator[str]:
        keys = set(self.requests) | set(self.forgets)
        for subscriber in self.subscribers:
            keys |= set(subscriber.heard)
        for key in sorted(keys):
            for text in [*self._out_of_order(key), *self._between(key), *self._uneven(key), *self._wrong(key)][:SHOWN]:
                yield f"{key[1]!r} of {key[0]!r}: {text}"
        for subscriber in self.subscribers:
            strange = [key for key in subscriber.heard if not subscriber.hears(key)]
            if strange:
                yield f"client {subscriber.client} has not subscribed to {strange}, and was told"

    # ---- what there was ----

    def _account(self, one: Operation) -> None:
        call = one.call
        key = call.domain, call.identifier
        rates = self._rates(call.domain, one.started, ended := self._end(one))
        known = [rate for rate in rates if rate is not None]
        is_sure = one.ended is not None and len(known) == len(rates)
        if not known or call.status == "REJECTED":
            return
        if call.status == "FORGET":
            self.forgets[key].append(Reset(one.started, ended, is_sure))
            return
        (burst,) = {burst for _, burst in known}
        intervals = [interval for interval, _ in known]
        least = min(intervals) if is_sure else 0
        moment = call.moment_ms * NS_PER_MS - self.wall_ns
        self.requests[key].append(Request(one.started, ended, moment, burst, least, max(intervals), is_sure))

    def _end(self, one: Operation) -> int:
        """The time until which a message may have been taken."""
        if one.ended is not None:
            return one.ended
        closed = self.closings.get(one.client)
        ends = [restart.ended for restart in self.restarts if restart.started > one.started]
        ends += [closed.ended] if closed is not None else []
        return min((end for end in ends if end is not None), default=self.last_ns)

    def _rates(self, domain: bytes, started: int, ended: int) -> list[tuple[int, int] | None]:
        """The rates that may have been in effect in that time."""
        before = [load for load in self.loads if load.ended is not None and load.ended < started]
        meanwhile = [load for load in self.loads if load.started <= ended and load not in before]
        found = [
            {name: (interval, burst) for name, interval, burst in load.call.rates}.get(domain)
            for load in (*before[-1:], *meanwhile)
        ]
        return list(dict.fromkeys(found))

    def _subscriber(self, operations: Sequence[Operation]) -> Subscriber:
        client = operations[0].client
        begun = next(one for one in operations if isinstance(one.call, Subscribe))
        heard: dict[Key, list[Heard]] = defaultdict(list)
        closing = self.closings.get(client)
        limit = self.last_ns if closing is None else closing.started
        for one in operations:
            if isinstance(one.call, Told):
                for domain, word, identifier, moment_ms in one.call.messages:
                    moment = moment_ms * NS_PER_MS - self.wall_ns
                    heard[domain, identifier].append(Heard(word, moment, one.started))
        pings = [one.started for one in operations if isinstance(one.call, Ping) and (one.ended or limit + 1) <= limit]
        at = begun.ended or begun.started
        around = any(one.started <= at <= (one.ended or at) for one in self.restarts)
        life = None if around else sum(one.started < at for one in self.restarts)
        until = None if client in self.deaf or not pings else max(pings)
        return Subscriber(client, begun.call.prefix, begun, until, life, heard)

    # ---- exactly ----

    def _out_of_order(self, key: Key) -> Iterator[str]:
        for subscriber in self.subscribers:
            for one, other in pairwise(subscriber.heard.get(key, ())):
                if one.word == other.word == "DELAY_UNTIL" and other.moment <= one.moment:
                    told = f"{self._shown(one.moment)}, then {self._shown(other.moment)}"
                    yield f"client {subscriber.client} was told {told}"

    def _steps(self, key: Key) -> Iterator[tuple[Subscriber, Heard, Heard]]:
        """Each two successive moments that a subscriber was told that read all the while."""
        for subscriber in self.subscribers:
            if subscriber.until is not None:
                there = [one for one in subscriber.heard.get(key, ()) if one.at <= self._limit(subscriber.client)]
                for one, other in pairwise(there):
                    if one.word == other.word == "DELAY_UNTIL":
                        yield subscriber, one, other

    def _between(self, key: Key) -> Iterator[str]:
        """Complaints about two subscribers that were told different moments after the same one. None if it may be
        repeated.
        """
        if self.forgets.get(key):
            return
        behind: dict[tuple[int, int], tuple[int, int]] = {}
        for subscriber, one, other in self._steps(key):
            if subscriber.life is None:
                continue
            moment, client = behind.setdefault((subscriber.life, one.moment), (other.moment, subscriber.client))
            if moment != other.moment:
                told = f"{self._shown(other.moment)} and {self._shown(moment)}"
                yield f"behind {self._shown(one.moment)} clients {subscriber.client} and {client} were told {told}"

    def _uneven(self, key: Key) -> Iterator[str]:
        """Complaints about successive moments that are not an interval apart.

        They may be once the first of them is over, or for a request that is further ahead than what was used up.
        """
        intervals = {interval for load in self.loads for name, interval, _ in load.call.rates if name == key[0]}
        for subscriber, one, other in self._steps(key):
            if one.moment - NS_PER_MS <= other.at + self.slack_ns:
                continue
            ahead = (request.moment - request.burst for request in self.requests.get(key, ()))
            if all(
                abs(other.moment - start - used) > NS_PER_MS
                for start, used in product(chain([one.moment], ahead), intervals)
            ):
                told = f"{self._shown(one.moment)}, then {self._shown(other.moment)}"
                yield f"client {subscriber.client} was told {told}, which are not an interval apart"

    def _limit(self, client: int) -> int:
        closing = self.closings.get(client)
        return self.last_ns if closing is None else closing.started

    # ---- by bounds ----

    def _wrong(self, key: Key) -> Iterator[str]:
        requests = sorted(self.requests.get(key, ()))
        forgets = self.forgets.get(key, [])
        resets = [*forgets, *(Reset(one.started, one.ended or self.last_ns, True) for one in self.restarts)]
        first: dict[int, tuple[int, int]] = {}  # since when, and until when, a moment must have been told
        for subscriber in self.subscribers:
            for word, moment, at in subscriber.heard.get(key, ()):
                if word == "DELAY_UNTIL":
                    first[moment] = min(first.get(moment, (at, 0)), (at, subscriber.begun.started))
        asked = [(one.started, one.ended) for one in requests]
        highest = most(requests, resets, [*asked, *((begun, at) for at, begun in first.values())])
        for moment, reach in zip(first, highest[len(requests) :], strict=True):
            if moment - NS_PER_MS > reach + self.slack_ns:
                yield f"{self._shown(moment)} was told, and not more than {self._shown(reach)} was used up by then"
        spans = [
            (low - self.slack_ns, high + self.slack_ns + NS_PER_MS)
            for low, high in zip(least(requests, resets), highest, strict=False)
        ]
        can = [span for one, span in zip(requests, spans, strict=True) if span[1] + NS_PER_MS > one.started]
        for moment in pair(first, can)[0]:
            yield f"{self._shown(moment)} was told, and no request explains it"
        must = [(one, span) for one, span in zip(requests, spans, strict=True) if one.is_sure and span[0] > one.ended]
        taken = [(one, (one.started - NS_PER_MS - self.slack_ns, one.ended + self.slack_ns)) for one in forgets]
        for subscriber in self.subscribers:
            heard = subscriber.heard.get(key, ())
            said = {word: [one.moment for one in heard if one.word == word] for word in ("DELAY_UNTIL", "FORGET")}
            for moment in pair(said["FORGET"], [span for _, span in taken])[0]:
                yield f"client {subscriber.client} was told to forget it at {self._shown(moment)}, which nobody asked"
            if not subscriber.hears(key):
                continue
            sure = [(one, span) for one, span in taken if one.is_sure]
            for due, word in ((must, "DELAY_UNTIL"), (sure, "FORGET")):
                spans = [span for one, span in due if subscriber.has_to_hear(one)]
                for low, high in pair(said[word], spans)[1]:
                    between = f"between {self._shown(low)} and {self._shown(high)}"
                    yield f"client {subscriber.client} was not told {word}, {between}"

    def _shown(self, moment: int) -> str:
        return f"{(moment + self.wall_ns) / NS_PER_MS:.3f}"


class Certain:
    """The least that requests have used up, in whatever order they were taken.

    They are kept in the order of their earliest moments: of those from one on, the first that is taken is not before
    it.
    """

    def __init__(self) -> None:
        self.steps: list[Span] = []  # earliest, least; sorted
        self.nexts = [NEVER]  # behind each

    def add(self, one: Request) -> None:
        step = one.earliest, one.least
        place = bisect_right(self.steps, step)
        insort(self.steps, step)
        del self.nexts[place + 1 :]
        for earliest, used in self.steps[place:]:
            self.nexts.append(max(self.nexts[-1], earliest) + used)


def least(requests: Sequence[Request], resets: Sequence[Reset]) -> list[int]:
    """For each request, a lower bound of `next` after it."""
    events = [(one.started, 0, place) for place, one in enumerate(requests)]
    events += [(one.ended, 1, place) for place, one in enumerate(requests) if one.is_sure]
    events += [(one.ended, 2, 0) for one in resets]
    found = [0] * len(requests)
    certain, since = Certain(), NEVER
    for at, kind, place in sorted(events):
        if kind == 2:
            certain, since = Certain(), at
            continue
        one = requests[place]
        if kind == 1:
            if one.started > since:
                certain.add(one)
            continue
        overlaps = any(reset.started <= one.ended and reset.ended >= one.started for reset in resets)
        found[place] = max(one.earliest, NEVER if overlaps else certain.nexts[-1]) + one.least
    return found


def most(requests: Sequence[Request], resets: Sequence[Reset], asked: Sequence[Span]) -> list[int]:
    """An upper bound of `next` after a request that was taken between two moments: for each such pair."""
    found = [NEVER] * len(asked)
    by_reset: dict[int, list[int]] = defaultdict(list)
    for place, (started, _) in enumerate(asked):
        since = max((one.started for one in resets if one.is_sure and one.ended < started), default=NEVER)
        by_reset[since].append(place)
    for since, places in by_reset.items():
        there = [one for one in requests if one.ended >= since]
        wanted = sorted((asked[place][1], place) for place in places)
        for (_, place), reach in zip(wanted, reaches(there, [at for at, _ in wanted]), strict=True):
            found[place] = reach
    return found


def reaches(requests: Sequence[Request], moments: Iterable[int]) -> Iterator[int]:
    """What the requests can have used up by each of these moments, which are in order. requests: by start."""
    ends = sorted((one.ended, one.most) for one in requests)
    sums = [0, *accumulate(used for _, used in ends)]
    begun = used = 0
    over = NEVER  # of those that have ended
    going: list[tuple[int, int, Request]] = []  # end, what was used up for certain before it began
    for at in moments:
        while begun < len(requests) and requests[begun].started <= at:
            one = requests[begun]
            before = sums[bisect_left(ends, (one.started, 0))]
            heapq.heappush(going, (one.ended, before, one))
            used += one.most
            begun += 1
        while going and going[0][0] <= at:
            ended, before, one = heapq.heappop(going)
            over = max(over, max(one.moment, ended) - one.burst - before)
        reach = max((max(one.moment, at) - one.burst - before for _, before, one in going), default=NEVER)
        yield used + max(reach, over)


def pair(points: Iterable[int], spans: Iterable[Span]) -> tuple[list[int], list[Span]]:
    """Matches as many points as possible with a span of their own that contains them; returns the points and spans left
    over.
    """
    coming = sorted(spans, reverse=True)
    open_: list[Span] = []  # end, start
    alone: list[int] = []
    left: list[Span] = []
    for point in sorted(points):
        while coming and coming[-1][0] <= point:
            start, end = coming.pop()
            heapq.heappush(open_, (end, start))
        while open_ and open_[0][0] < point:
            end, start = heapq.heappop(open_)
            left.append((start, end))
        if open_:
            heapq.heappop(open_)
        else:
            alone.append(point)
    return alone, [*left, *((start, end) for end, start in open_), *coming]


def request(call: Account) -> bytes:
    """The bytes of the message."""
    is_delayed = call.status == "DELAYED"
    moments = (0, call.moment_ms) if is_delayed else (call.moment_ms, None)
    return wire.accounting(call.domain, wire.Status(call.status), call.identifier, *moments)


def told(messages: Iterable[tuple[bytes, ...]]) -> Told:
    """The messages that a subscriber received. Raises ProtocolError if any is no control message."""
    found = []
    for message in messages:
        if (control := wire.control(message)) is None:
            raise ProtocolError(f"this is no control message: {message}")
        found.append((control.domain, control.word, control.identifier, control.time_ms))
    return Told(tuple(found))


def rates_of(rules: Any) -> tuple[tuple[bytes, int, int], ...]:
    """The rules of a Load, from those that parse_rules() returns; the interval rounded up to a nanosecond."""
    return tuple((name, rule.interval.ns + (rule.interval.part > 0), rule.burst.ns) for name, rule in rules.items())
