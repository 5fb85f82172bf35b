"""The policy of a daemon that shares limits: what it asks the authority for, and what its store may grant. No I/O.

Floor 2. The store (contract.LeasedLimits) grants from rights and knows who waits. A LeasePolicy sizes these rights,
keeps leases, and notices what was lost. It has no clock: each call tells it the time. One call of a partition is under
way at a time: call(), then answered() or failed().

Invariants:
- The store never grants from more rights to a name than the authority has recorded for this daemon: it is told to keep
  fewer before a call with less is sent, and to use more only after the answer.
- A lease ends here before it ends at the authority, even if this machine's clock is slower by 10 %.
- In a partition whose server is new, everything is reported before that server has recovered, or the lease is given up.

How long a request waits while others hold permits for at most H: a daemon at the head of the line of those that wait
is served after at most W = HEARTBEAT + LONG_TURN + H and a few round trips, because meanwhile nobody else is given
rights, and each holder hears of it after a HEARTBEAT, and yields after a turn what its clients give back. With S
daemons in the line, each is served after at most S times W. Within a daemon the store's queue has its own order.
A server that is new gives nobody more, so meanwhile nobody yields, and each daemon serves its own waiters. To those
that wait elsewhere this adds the time in which it recovers, at most a lease.
"""

from __future__ import annotations

import enum
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from counterd.cluster import lease_protocol
from counterd.cluster.lease_protocol import UINT32_MAX, LeaseLost, LeaseRequest, Mode, RateRequest, StaleCall
from counterd.contract import CounterUpdate, RateUpdate, Scope, Update

if TYPE_CHECKING:
    from collections.abc import Callable

    from counterd.cluster.lease_protocol import Answer, LeaseGrant
    from counterd.contract import Changes, CounterChange, LeasedLimits, RateChange

MS = 1_000_000
SECOND = 1_000 * MS
TICK_NS = 100 * MS  # from one look at the background to the next, or later if there were many changes:
CHANGE_NS = 4 * MS  # for each, which takes about 13 us; so all partitions together take at most 5 % of a daemon's time
MIN_GAP_NS = 2 * MS  # from one call to the next: what comes meanwhile is said together
HEARTBEAT_NS = SECOND  # a daemon with rights asks so often whether others wait
TURN_NS = 100 * MS  # for so long it serves its own waiters while others wait, with rights above its fair share
LONG_TURN_NS = SECOND  # with no more than its fair share
RETRY_NS = 100 * MS  # after a call without an answer; twice as much after each further one,
RETRY_MOST_NS = SECOND  # up to this
MARGIN = 10  # of a lease, one part is not used: this machine's clock may be slower than the server's by so much
PRESENCE = 0  # the partition in which each daemon has a lease
RENEWALS = 3  # of a lease: two calls may be lost
HEADROOM = 8  # of a maximum, or of a burst, one part may be idle at all daemons together
SPARE = 8  # permits beyond what was needed, so that few requests wait for a call
FEW = 2  # permits per daemon: with a smaller limit, each request is asked for
CHANGES_MAX = 200  # of each kind in a call; as many cannot wait, and as many rates: about 2 ms of the authority's time
NEVER = -1
assert 4 * CHANGES_MAX <= lease_protocol.LIMITS_MAX


class State(enum.IntEnum):
    """What the server of a partition knows about the leases of this daemon: the later the state, the more."""

    UNKNOWN = 0  # maybe nothing: the next call begins a full report
    REPORTING = 1  # a part of the full report
    RECOVERING = 2  # everything; but it gives nobody more, until other daemons have reported too
    SERVING = 3  # everything, and it gives
    RELEASED = 4  # that this daemon has given everything back, for ever


# The states that can follow each state. A state becomes UNKNOWN with another server, when the server has lost data, and
# when a lease with rights is over; REPORTING also when a call was not answered.
TRANSITIONS = {
    State.UNKNOWN: (State.REPORTING, State.RECOVERING, State.SERVING, State.RELEASED),
    State.REPORTING: (State.UNKNOWN, State.RECOVERING, State.SERVING, State.RELEASED),
    State.RECOVERING: (State.UNKNOWN, State.SERVING, State.RELEASED),
    State.SERVING: (State.UNKNOWN, State.RECOVERING, State.RELEASED),
    State.RELEASED: (),
}
REPORTS = {State.UNKNOWN: Scope.REPORT, State.REPORTING: Scope.REST}  # what a call says of the background then

Words = tuple[list[str], list[bytes | str | int]]  # keys and arguments of a call


@dataclass(slots=True)
class NameLease:
    """The rights to one name, as of the last answer."""

    maximum: int  # of all rights
    rights: int = 0
    used: int = 0  # that the last call said
    is_certain: bool = True  # every call since the last answer was answered
    is_refused: bool = False  # a request of this daemon was refused
    yields: bool = False  # the store gives back what becomes free, as others wait
    since_ns: int = 0  # when our turn began while others wait; 0: nobody else waits
    over: int = 0  # permits that all daemons use beyond the maximum

    def is_known(self, change: CounterChange) -> bool:
        """Returns whether the authority knows what has changed, and nobody waits."""
        return self.is_certain and not change.first and (self.rights, self.used) == (change.rights, change.used)


class Sent(NamedTuple):
    """The call under way."""

    counters: list[tuple[CounterChange, LeaseRequest]]
    rates: list[tuple[RateChange, RateRequest]]
    completes_report: bool

    @property
    def numbers(self) -> list[int]:
        """Of the store's records."""
        return [change.number for change, _ in self.counters] + [change.number for change, _ in self.rates]


NOTHING = Sent([], [], completes_report=False)


@dataclass(slots=True)
class Partition:
    """The names of a partition: they have a server in common."""

    number: int
    state: State = State.UNKNOWN
    run: str = ""  # run ID of the server
    recovered_ms: int = NEVER  # as in the server's last answer: another one means that it has lost data
    recovers_ns: int = 0  # so long it gives nobody more, as of its last answer; 0: it gives
    name: str = ""  # of this daemon; a new one for each lease; "": until the first call
    calls: int = 0  # under this name
    sent: Sent = NOTHING
    sent_ns: int = -SECOND  # when the last call was sent
    renewed_ns: int = 0  # when the last call that was answered was sent
    until_ns: int = 0  # when the lease ends here and in the store; 0: there is none
    failures: int = 0  # calls without an answer since the last answer
    retry_ns: int = 0  # no call is made before this
    again_ns: int = MIN_GAP_NS  # what was refused is asked for again after so long
    next_ns: int = 0  # when the next call is due, if no request waits
    background_ns: int = 0  # when the background is looked at again
    daemons: int = 1  # that share the names
    leases: dict[bytes, NameLease] = field(default_factory=dict)
    contested: set[bytes] = field(default_factory=set)  # names for which other daemons wait: those with since_ns

    @property
    def needs_full_report(self) -> bool:
        """The server has not seen all our leases."""
        return self.state <= State.REPORTING

    def become(self, state: State) -> None:
        assert state is self.state or state in TRANSITIONS[self.state], (self.state, state)
        self.state = state

    def is_over(self, now_ns: int) -> bool:
        """Returns whether the lease has ended."""
        return 0 < self.until_ns <= now_ns


class LeasePolicy:
    """Decides what a daemon says to the authority, and when.

    store: what grants from the rights. new_name: returns a name that no daemon has had. lease_ms: of each lease; the
    same for all daemons, or a server that is new listens to some of them for too short a time.
    """

    def __init__(self, store: LeasedLimits, new_name: Callable[[], str], lease_ms: int) -> None:
        self._store = store
        self._new_name = new_name
        self._lease_ms = lease_ms
        self._lease_ns = lease_ms * MS
        self._beat_ns = min(HEARTBEAT_NS, self._lease_ns // RENEWALS)
        self._partitions = [Partition(number) for number in range(lease_protocol.PARTITIONS)]
        self._counts: Counter[str] = Counter()
        self._over_max = 0

    # ---- calls ----

    def call(self, partition: int, run: str, now_ns: int) -> Words | None:
        """Returns the keys and arguments of the next call, or None if there is nothing to say now.

        run: the run ID of the server that will get the call.
        """
        part = self._partitions[partition]
        if part.is_over(now_ns):
            self._store.apply(partition, Update(lease_ns=self._lose(part, now_ns)), now_ns)
        if now_ns < max(part.retry_ns, part.sent_ns + MIN_GAP_NS):
            return None
        if run != part.run:
            part.run, part.recovered_ms = run, NEVER
            part.become(State.UNKNOWN)
        if part.contested and part.state is State.SERVING:
            self._end_turns(part, now_ns)
        if not part.needs_full_report and now_ns < self.next_call_ns(partition):
            return None
        changes = self._changes(part, now_ns)
        sent = self._decide(part, changes, now_ns)
        if not (sent.counters or sent.rates or part.needs_full_report or self._is_renewal_due(part, now_ns)):
            is_idle = not (part.leases or any(changes[:3]))
            part.next_ns = now_ns + HEARTBEAT_NS if is_idle else part.background_ns
            return None
        part.sent = sent
        return self._send(part, self._lease_ms, now_ns)

    def answered(self, partition: int, found: list[Any], now_ns: int) -> None:
        """Takes the answer to the last call. Raises ValueError if it makes no sense."""
        part = self._partitions[partition]
        if part.state is State.RELEASED:
            return
        try:
            answer = lease_protocol.answer(found)
            if part.is_over(now_ns):  # before the answer came, so the store has forgotten its other rights
                raise LeaseLost
            if (len(answer.counters), len(answer.rates)) != (len(part.sent.counters), len(part.sent.rates)):
                raise ValueError("the authority answered other requests")
        except StaleCall:  # a library has repeated the call, and the first answer was lost
            self._store.apply(partition, Update(forgotten=self._forget(part), is_reachable=True), now_ns)
        except LeaseLost:
            update = Update(forgotten=self._forget(part), lease_ns=self._lose(part, now_ns), is_reachable=True)
            self._store.apply(partition, update, now_ns)
        except ValueError:
            self.failed(partition, now_ns)
            raise
        else:
            self._apply(part, answer, now_ns)

    def failed(self, partition: int, now_ns: int) -> None:
        """Notes that the last call had no answer, or could not be made. The authority may have acted on it."""
        part = self._partitions[partition]
        if part.state is State.RELEASED:
            return
        self._counts["failed"] += 1
        forgotten = self._forget(part)
        part.retry_ns = part.next_ns = now_ns + min(RETRY_NS << min(part.failures, 9), RETRY_MOST_NS)
        part.failures += 1
        lease_ns = self._lose(part, now_ns) if part.is_over(now_ns) else -1
        self._store.apply(partition, Update(forgotten=forgotten, lease_ns=lease_ns, is_reachable=False), now_ns)

    def next_call_ns(self, partition: int) -> int:
        """Returns when call() may have something to say."""
        part = self._partitions[partition]
        blocking, urgent = self._store.has_urgent()
        if blocking >> partition & 1:
            due_ns = part.sent_ns + (MIN_GAP_NS if urgent >> partition & 1 else part.again_ns)
        else:
            due_ns = max(part.next_ns, part.sent_ns + MIN_GAP_NS)
        due_ns = max(due_ns, part.retry_ns)
        return min(due_ns, part.until_ns) if part.until_ns else due_ns

    def release_all(self, partition: int) -> Words:
        """Returns the keys and arguments of the call that gives everything back.

        From then on nothing may be granted in this partition, and permits that are in use no longer count.
        """
        part = self._partitions[partition]
        part.sent = NOTHING
        part.become(State.RELEASED)
        return self._send(part, 0, part.sent_ns)

    def figures(self, now_ns: int) -> dict[str, float]:
        """Returns figures for metrics: as of the last answers, or how often something happened so far."""
        leases = [lease for part in self._partitions for lease in part.leases.values()]
        leased = [part for part in self._partitions if part.until_ns > now_ns]
        over = [part for part in self._partitions if part.is_over(now_ns) and part.leases]  # call() will notice
        counts = ("calls", "asked", "refused", "refused_in_vain", "failed")
        return {
            "rights": sum(lease.rights for lease in leases),
            "stranded": sum(max(lease.rights - lease.used, 0) for lease in leases),  # rights that are not in use
            "overshoot": sum(lease.over for lease in leases),
            "overshoot_max": self._over_max,  # so far, of one name
            "sidecars": max(part.daemons for part in self._partitions),
            "leases": len(leased),
            "lease_age": max((now_ns - part.renewed_ns for part in leased), default=0) / SECOND,  # of the oldest
            "learning": sum(part.recovers_ns > now_ns for part in self._partitions),
            **{name: self._counts[name] for name in counts},
            "lost": self._counts["lost"] + len(over),
        }

    # ---- what a call says ----

    def _changes(self, part: Partition, now_ns: int) -> Changes:
        scope = REPORTS.get(part.state, Scope.BACKGROUND if now_ns >= part.background_ns else Scope.BLOCKING)
        changes = self._store.changes(part.number, CHANGES_MAX, scope)
        if scope is not Scope.BLOCKING:
            pause_ns = (len(changes.background) + len(changes.rates)) * CHANGE_NS
            part.background_ns = _background_ns(part.number, now_ns + min(pause_ns, self._beat_ns))
        return changes

    def _decide(self, part: Partition, changes: Changes, now_ns: int) -> Sent:
        """Returns what is said of changes. The store is told what it may use until the answer."""
        counters, rates, kept, unchanged = [], [], [], []
        is_report = part.needs_full_report
        for change in (*changes.blocking, *changes.background):
            lease = part.leases.get(change.name)
            request = self._request(part, lease, change)
            if not is_report and lease is not None and request.want == change.rights and lease.is_known(change):
                unchanged.append(change.number)
                continue
            counters.append((change, request))
            # From an exact request on others may be given more, so what becomes free during the call is not granted.
            yields = request.mode is Mode.EXACT
            if yields or request.keep < change.rights:
                kept.append((change.number, request.keep, yields))
        for rate in changes.rates:
            ask = self._rate_request(part, rate)
            if not (rate.first or ask.want or ask.give):
                unchanged.append(rate.number)
                continue
            rates.append((rate, ask))
            if ask.give > 0:
                kept.append((rate.number, rate.units - ask.give, False))
        if kept or unchanged:
            self._store.apply(part.number, Update(kept, unchanged), now_ns)
        return Sent(counters, rates, is_report and changes.is_complete)

    def _send(self, part: Partition, lease_ms: int, now_ns: int) -> Words:
        part.name = part.name or self._new_name()
        part.calls += 1
        part.sent_ns = now_ns
        self._counts["calls"] += 1
        counters = [request for _, request in part.sent.counters]
        rates = [request for _, request in part.sent.rates]
        return (
            lease_protocol.keys(part.number, part.name),
            lease_protocol.arguments(part.name, part.calls, lease_ms, counters, rates),
        )

    def _is_renewal_due(self, part: Partition, now_ns: int) -> bool:
        """Returns whether a call about nothing is due, for the lease or because others may wait.

        In one partition each daemon always has a lease, so that all of them are counted.
        """
        silent_ns = now_ns - part.renewed_ns
        if any(lease.rights for lease in part.leases.values()):
            return silent_ns >= self._beat_ns
        return (bool(part.leases) or part.number == PRESENCE) and silent_ns >= self._lease_ns // RENEWALS

    @staticmethod
    def _request(part: Partition, lease: NameLease | None, change: CounterChange) -> LeaseRequest:
        used, first = change.used, change.first
        maximum = change.maximum or used
        if lease is not None and (lease.rights or not first):
            maximum = lease.maximum
        least = used + first
        if first and change.maximum != maximum:
            return LeaseRequest(change.name, change.maximum, least, least, used, used, Mode.EXACT, change.stays)
        most = used + max(change.waiting, first)
        if lease is None or not lease.since_ns:
            most += _spare(part, change, maximum, most)
        keep = min(change.rights, least if first else most)
        if part.state is not State.SERVING:  # nobody else would be given what goes back, and it would not come again
            keep = change.rights
        elif lease is not None and lease.yields:
            keep = used
        keep = max(keep, used)
        return LeaseRequest(change.name, maximum, least, max(most, keep), keep, used, Mode.PLENTY, change.stays)

    @staticmethod
    def _rate_request(part: Partition, change: RateChange) -> RateRequest:
        """A store has units in stock for about as long as from call to call, so that few requests wait for a call."""
        stock = min(change.burst // (HEADROOM * part.daemons), change.taken)
        there = max(change.units, 0)
        give = 0 if change.first else max(there - stock, 0)
        least = max(change.first - there, 0)
        want = max(least, max(change.waiting, change.first) + stock - there, 0)
        return RateRequest(
            change.name, change.limit, change.period_us, change.burst, least, want, min(change.units, 0) or give
        )

    # ---- what an answer changes ----

    def _apply(self, part: Partition, answer: Answer, now_ns: int) -> None:
        part.failures = part.retry_ns = 0
        part.daemons = max(answer.daemons, part.daemons if answer.recovering_ms else 1)  # until it knows all again
        self._note_server(part, answer)
        part.renewed_ns, part.until_ns = part.sent_ns, part.sent_ns + _shorter(self._lease_ns)
        if part.needs_full_report and part.recovers_ns:  # the server believes only what it was told in time
            part.until_ns = min(part.until_ns, part.recovers_ns)
        sent, part.sent = part.sent, NOTHING
        update = Update(
            lease_ns=part.until_ns,
            is_reachable=True,
            daemons=max(each.daemons for each in self._partitions),
            counters=[
                self._apply_grant(part, change, request, grant, now_ns)
                for (change, request), grant in zip(sent.counters, answer.counters, strict=True)
            ],
            rates=[  # what was used without having been granted is said, and so is no debt any more
                RateUpdate(change.number, grant.units - min(request.give, 0), change.first, grant.wait_us)
                for (change, request), grant in zip(sent.rates, answer.rates, strict=True)
            ],
            wanted=self._yield({*answer.waited}.difference(change.name for change, _ in sent.counters), part, now_ns),
        )
        self._store.apply(part.number, update, now_ns)
        part.again_ns = answer.again_ms * MS
        part.next_ns = now_ns if part.needs_full_report else part.background_ns

    @staticmethod
    def _note_server(part: Partition, answer: Answer) -> None:
        """Notes what the server knows, and how long it recovers."""
        part.recovers_ns = part.sent_ns + _shorter(answer.recovering_ms * MS) if answer.recovering_ms else 0
        if part.recovered_ms not in (NEVER, answer.recovered_ms):  # the same run may have forgotten something
            part.become(State.UNKNOWN)
        elif part.needs_full_report and not part.sent.completes_report:
            part.become(State.REPORTING)
        else:
            part.become(State.RECOVERING if answer.recovering_ms else State.SERVING)
        part.recovered_ms = answer.recovered_ms

    def _apply_grant(
        self, part: Partition, change: CounterChange, request: LeaseRequest, grant: LeaseGrant, now_ns: int
    ) -> CounterUpdate:
        is_refused = change.first > 0 and grant.rights < request.least
        yields = False
        if change.first:
            self._counts["asked"] += 1
            self._counts["refused"] += is_refused
            self._counts["refused_in_vain"] += is_refused and grant.all_used + change.first <= change.maximum
        if grant.rights or change.used or is_refused:
            lease = self._renew(part, change, request, grant, now_ns)
            yields = lease.yields = self._yields(part, lease, change, grant, now_ns)
            lease.is_refused = is_refused
        else:
            part.leases.pop(change.name, None)
            part.contested.discard(change.name)
        # Rights for single requests are for this one, if it was granted, or else for those that have them already.
        is_alone = grant.mode is Mode.EXACT and (is_refused or not change.first)
        return CounterUpdate(
            change.number,
            grant.rights,
            UINT32_MAX if is_alone else request.maximum,
            grant.all_used if is_refused else grant.all_used - change.first,  # it counts what it grants as used
            yields,
            is_refused,
        )

    def _renew(
        self, part: Partition, change: CounterChange, request: LeaseRequest, grant: LeaseGrant, now_ns: int
    ) -> NameLease:
        lease = part.leases.get(change.name)
        if lease is None:
            lease = part.leases[change.name] = NameLease(request.maximum)
        lease.rights, lease.used, lease.is_certain, lease.over = grant.rights, change.used, True, 0
        if grant.mode is Mode.PLENTY:
            lease.over = max(grant.all_used - request.maximum, 0)
            self._over_max = max(self._over_max, lease.over)
            if request.mode is Mode.PLENTY:
                lease.maximum = request.maximum
        if not grant.waited_for:
            lease.since_ns = 0
            part.contested.discard(change.name)
        elif not lease.since_ns or grant.rights > request.keep:
            lease.since_ns = now_ns
            part.contested.add(change.name)
        return lease

    def _yields(self, part: Partition, lease: NameLease, change: CounterChange, grant: LeaseGrant, now_ns: int) -> bool:
        """Returns whether what becomes free goes back at once."""
        if grant.mode is Mode.EXACT:  # rights for one request are for no other one
            return True
        if part.state is not State.SERVING:
            return False
        if change.stays and change.used + change.waiting > grant.rights:
            return grant.waited_for and self._turn_is_over(part, lease, now_ns)
        return grant.waited_for or lease.maximum < FEW * part.daemons

    def _forget(self, part: Partition) -> list[int]:
        """Forgets the call under way, on which the authority may have acted. Returns the numbers of its changes."""
        for change, request in part.sent.counters:
            if change.name in part.leases:
                part.leases[change.name].rights = request.keep
                part.leases[change.name].is_certain = False
        if part.state is State.REPORTING:
            part.become(State.UNKNOWN)
        part.background_ns = 0
        sent, part.sent = part.sent, NOTHING
        return sent.numbers

    def _lose(self, part: Partition, now_ns: int) -> int:
        """Ends the lease. Returns the lease_ns of the store's update: 0 if it may still have rights."""
        had_rights = bool(part.leases)
        self._counts["lost"] += had_rights
        if had_rights or part.state is State.REPORTING:
            part.become(State.UNKNOWN)
        part.leases.clear()
        part.contested.clear()
        part.name, part.calls, part.until_ns = "", 0, 0
        part.next_ns = min(part.next_ns, now_ns)
        return 0 if had_rights else -1

    # ---- turns ----

    @staticmethod
    def _turn_is_over(part: Partition, lease: NameLease, now_ns: int) -> bool:
        is_fair = lease.rights <= lease.maximum // part.daemons
        return now_ns - lease.since_ns >= (LONG_TURN_NS if is_fair else TURN_NS)

    def _end_turns(self, part: Partition, now_ns: int) -> None:
        names = []
        for name in part.contested:
            lease = part.leases[name]
            if not lease.yields and self._turn_is_over(part, lease, now_ns):
                lease.yields = True
                names.append(name)
        if names:
            self._store.apply(part.number, Update(wanted=names), now_ns)

    def _yield(self, waited: set[bytes], part: Partition, now_ns: int) -> list[bytes]:
        """Returns of which names the store gives back what others wait for. If this daemon waits too, the next answer
        says so exactly."""
        names = []
        for name in waited if part.state is State.SERVING else ():
            lease = part.leases.get(name)
            if lease is not None and lease.rights and not lease.is_refused and not lease.yields:
                lease.since_ns = lease.since_ns or now_ns
                lease.yields = True
                part.contested.add(name)
                names.append(name)
        return names


def _spare(part: Partition, change: CounterChange, maximum: int, most: int) -> int:
    """Returns how many permits beyond `most`, which are needed, the daemon would like to have."""
    if maximum < FEW * part.daemons:
        return 0
    demand = max(most, change.peak)
    idle = max(change.rights - demand, 0)
    more = max(demand + SPARE if demand else 0, idle // 2)
    return min(maximum // (HEADROOM * part.daemons), demand - most + more)


def _shorter(duration_ns: int) -> int:
    """Returns what is certain of a time that the server measures."""
    return duration_ns - duration_ns // MARGIN


def _background_ns(partition: int, least_ns: int) -> int:
    """Returns when the background is looked at again. Partitions take turns, so that their changes do not come all at
    once."""
    phase_ns = partition * TICK_NS // lease_protocol.PARTITIONS
    return least_ns + TICK_NS - (least_ns - phase_ns) % TICK_NS
