"""Whether limits that daemons share were kept, as what all clients of all daemons have recorded shows it.

Permits are judged by the checker of histories, with the model of a counter that may refuse any request: daemons share
a limit, but a request may be refused although permits are on their way from another daemon. So the checker proves that
there is one counter, whose permits all clients hold, and that never more than the maximum was granted.

From whose point of view permits are given back is said here (`permits`): the end of a connection is noticed by its
client after others may have got its permits, and a daemon that was stuck for longer than its lease, or keeps permits
without a lease, has lost them to others although its clients still have them. docs/cluster.md says when that may be.

Rates are judged by a sum: in no time may more units be taken than the limit and the burst allow (`excess`), besides
what docs/cluster.md allows after a failover, and what daemons had in stock.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from counterd.protocols.counter.wire import Permit
from history import Closed, Undecided, Violation, check
from history.counter import Acquire, CounterModel, Release
from history.takes import Take, is_granted, items_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from counterd.protocols.counter.wire import Rate
    from history import Operation

NS_PER_US = 1_000
OK = 0


class Lapse(NamedTuple):
    """Other daemons may have got the permits of a daemon at any moment after since_ns, if they were acquired before
    until_ns.

    sidecar, server: None: all of them.
    """

    sidecar: int | None
    server: int | None
    since_ns: int
    until_ns: int


class Split(NamedTuple):
    """Two masters may have answered, each to some of the daemons: twice the maximum may be held."""

    server: int
    since_ns: int
    until_ns: int


class Failover(NamedTuple):
    """The replica may lack the last writes, so units of rates that were taken with them can be taken again.

    at_ns: a moment before it takes over. lags: it certainly lacks some.
    """

    server: int
    at_ns: int
    lags: bool


@dataclass
class Facts:
    """What happened in a run. sidecars: their number. server_of: which server has a name."""

    sidecars: int
    server_of: Callable[[bytes], int]
    lapses: list[Lapse] = field(default_factory=list)
    splits: list[Split] = field(default_factory=list)
    failovers: list[Failover] = field(default_factory=list)

    def sidecar_of(self, client: int) -> int:
        """Returns the daemon of a connection: they are numbered in turn."""
        return client % self.sidecars


# ---- permits --------------------------------------------------------------------------------------------------------


def permits(operations: Iterable[Operation], facts: Facts) -> list[Operation]:
    """Returns the history of the permits, with the times within which the promises let each call take effect."""
    answered: dict[int, Operation] = {}  # the last call of each connection that had an answer
    acquired: dict[int, Operation] = {}  # the last one that was granted permits
    found = []
    for one in as_acquires(operations):
        if isinstance(one.call, Acquire):
            found.append(one)
            if one.answer is not None and one.answer[0] == OK:
                acquired[one.client] = one
        elif isinstance(one.call, Release):
            found.append(one._replace(started=lost_ns(acquired[one.client], one, facts)))
        elif isinstance(one.call, Closed):
            # The daemon may have ended it before its last answer arrived, and the client has not noticed.
            found.append(one._replace(started=answered.get(one.client, one).started))
        if one.answer is not None:
            answered[one.client] = one
    return sorted(found, key=lambda one: one.started)


def as_acquires(operations: Iterable[Operation]) -> Iterator[Operation]:
    """Yields the operations, with an Acquire of the same effect in place of each Take that is for permits."""
    for one in operations:
        items = items_of(one.call) if isinstance(one.call, Take) else []
        wanted = [item for item in items if isinstance(item, Permit)]
        for permit in wanted:
            answer = (OK, permit.amount) if is_granted(one) else one.answer and (one.answer[0], None)
            yield one._replace(call=Acquire(*permit), answer=answer)
        if not wanted:
            yield one


def allowed(one: Operation, facts: Facts) -> int:
    """Returns how much may be held when this Acquire is granted."""
    server = facts.server_of(one.call.name)
    is_doubtful = any(each.server == server and overlaps(one, each) for each in facts.splits)
    return one.call.maximum * (2 if is_doubtful else 1)


def overlaps(one: Operation, split: Split) -> bool:
    return one.started <= split.until_ns and (one.ended is None or one.ended >= split.since_ns)


def lost_ns(acquired: Operation, release: Operation, facts: Facts) -> int:
    """Returns from when on another client may have had the permits although they were not released yet."""
    sidecar, server = facts.sidecar_of(release.client), facts.server_of(release.call.name)
    since_ns = [
        max(acquired.started, each.since_ns)
        for each in facts.lapses
        if each.sidecar in (None, sidecar) and each.server in (None, server) and acquired.started < each.until_ns
    ]
    return min([release.started, *since_ns])


def most_held(history: Iterable[Operation], facts: Facts) -> tuple[dict[bytes, int], dict[bytes, int]]:
    """Returns the most that was certainly held of each name at once, and the most while two masters may have answered.

    history: of permits().
    """
    acquired: dict[int, Operation] = {}
    events = []
    for one in sorted(history, key=lambda one: one.ended or one.started):
        if isinstance(one.call, Acquire):
            if one.answer is not None and one.answer[0] == OK:
                acquired[one.client] = one
        elif (grant := acquired.pop(one.client, None)) and grant.ended is not None and grant.ended < one.started:
            is_doubtful = allowed(grant, facts) > grant.call.maximum
            events += [(grant.ended, 1, grant.call, is_doubtful), (one.started, 0, grant.call, is_doubtful)]
    now: Counter[bytes] = Counter()
    most: tuple[Counter[bytes], Counter[bytes]] = Counter(), Counter()
    for _, is_more, call, is_doubtful in sorted(events):
        now[call.name] += call.resources if is_more else -call.resources
        most[is_doubtful][call.name] = max(most[is_doubtful][call.name], now[call.name])
    return most


def unexplained(history: Iterable[Operation], facts: Facts) -> tuple[list[str], int]:
    """Returns violations of what a shared counter promises, and how many counters were too hard to check.

    history: of permits().
    """
    violations, undecided = [], 0
    history = [
        one._replace(call=one.call._replace(maximum=allowed(one, facts))) if isinstance(one.call, Acquire) else one
        for one in history
    ]
    closed = [one for one in history if isinstance(one.call, Closed)]
    for name in sorted({one.call.name for one in history if not isinstance(one.call, Closed)}):
        concerned = [one for one in history if not isinstance(one.call, Closed) and one.call.name == name]
        clients = {one.client for one in concerned}
        concerned += [one for one in closed if one.client in clients]
        try:
            found = check(concerned, CounterModel(draining=True))
        except Undecided:
            undecided += 1
            continue
        if isinstance(found, Violation):
            violations.append(str(found))
    return violations, undecided


# ---- rates ----------------------------------------------------------------------------------------------------------


def grants_of(rate: Rate, operations: Iterable[Operation], facts: Facts) -> Iterator[tuple[Operation, int]]:
    """Yields the Takes that got units of a rate, and how many. Without those that may be a second master's."""
    splits = [each for each in facts.splits if each.server == facts.server_of(rate.name)]
    for one in operations:
        if isinstance(one.call, Take) and is_granted(one) and not any(overlaps(one, each) for each in splits):
            for item in items_of(one.call):
                if item.name == rate.name:
                    yield one, item.amount


def excess(rate: Rate, operations: Iterable[Operation], facts: Facts) -> float:
    """Returns by how many units more was taken in some period than the limit and the burst allow.

    Negative: so many were always left. A failover within the period allows the burst once more. Each Take counts from
    its start, and has to be in time at its end. So Takes that were pending when a period began count in it too: one for
    each client.
    """
    unit_ns = rate.period_us * NS_PER_US / rate.limit
    following, most = float("-inf"), float("-inf")
    failovers = sorted(
        (each.at_ns for each in facts.failovers if each.server == facts.server_of(rate.name)), reverse=True
    )
    for one, amount in sorted(grants_of(rate, operations, facts), key=lambda grant: grant[0].ended or 0):
        ended = one.ended or 0
        while failovers and failovers[-1] <= ended:
            failovers.pop()
            following -= rate.burst * unit_ns
        following = max(following, one.started - rate.burst * unit_ns) + amount * unit_ns
        most = max(most, (following - ended) / unit_ns)
    return most
