"""The policy of a daemon that shares limits: what it says to the authority, and what its store may grant. No I/O.

Floor 2. The store grants from rights and knows who waits. A Sidecar sizes these rights, keeps leases, and notices what
was lost. It has no clock: each call tells it the time. One call of a partition is under way at a time: call(), then
answered() or failed().

Invariants:
- The store never grants from more rights of a name than the authority has recorded for this sidecar: it is told to
  keep fewer before a call with less is sent, and to use more only after the answer.
- A lease ends here before it ends at the authority, even if this machine's clock is slower by 10 %.
- In a partition whose server is new, everything is told before that server stops learning, or the lease is given up.

How long a request waits while others hold permits for at most H: a sidecar at the head of the line of those that wait
is served after at most W = HEARTBEAT + LONG_TURN + H and a few round trips, because meanwhile nobody else is given
rights, and each holder hears of it after a HEARTBEAT, and yields after a turn what its clients give back. With S
sidecars in the line, each is served after at most S times W. Within a sidecar the store's queue has its own order.
A server that is new gives nobody more, so meanwhile nobody yields, and each sidecar serves its own waiters. To those
that wait elsewhere this adds the time in which it learns, at most a lease.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from counterd.cluster import authority
from counterd.cluster.authority import UINT32_MAX, LeaseLost, Mode, RateWish, StaleCall, Wish
from counterd.contract import NEWS_BYTES_MAX

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from counterd.contract import Escrow

MS = 1_000_000
SECOND = 1_000 * MS
TICK_NS = 100 * MS  # from one look for calm news to the next, or later if there were many:
CALM_NS = 4 * MS  # for each, which takes about 13 us; so all partitions together take at most 5 % of a daemon's time
MIN_GAP_NS = 2 * MS  # from one call to the next: what comes meanwhile is told together
HEARTBEAT_NS = SECOND  # a sidecar with rights asks so often whether others wait
TURN_NS = 100 * MS  # for so long it serves its own waiters while others wait, with rights above its fair share
LONG_TURN_NS = SECOND  # with no more than its fair share
RETRY_NS = 100 * MS  # after a call without an answer; twice as much after each further one,
RETRY_MOST_NS = SECOND  # up to this
MARGIN = 10  # of a lease, one part is not used: this machine's clock may be slower than the server's by so much
PRESENCE = 0  # the partition in which each sidecar has a lease
RENEWALS = 3  # of a lease: two calls may be lost
HEADROOM = 8  # of a maximum, or of a burst, one part may be idle at all sidecars together
SPARE = 8  # permits beyond what was needed, so that few requests wait for a call
FEW = 2  # permits per sidecar: with a smaller limit, each request is asked for
UNKNOWN = -1
URGENT = 2  # urgency(): there is more than requests that were refused before
URGENT_MAX = 200  # news in a call, and as many of rates: about 2 ms of the authority's time
CALM_MAX = 200
assert 2 * (URGENT_MAX + CALM_MAX) <= authority.LIMITS_MAX


class News(NamedTuple):
    """What a store has to say about a name. All numbers are permits.

    number: of its record, until the answer is settled. maximum: of the first request that waits here, or else of the
    rights. first: what the first waiting request asks for; 0: nobody waits. waiting: what all waiting requests ask for.
    used: what is in use. peak: the most that was since the last news. rights: what the store may use now. stays:
    whether the first request goes on waiting if it is refused.
    """

    number: int
    name: bytes
    maximum: int
    first: int
    waiting: int
    used: int
    peak: int
    rights: int
    stays: bool


class RateNews(NamedTuple):
    """What a store has to say about a rate. All numbers but limit and period_us are units.

    limit, period_us, burst: of the first request that waits here, or else of the last one. first, waiting: as in News.
    units: what the store may use; negative: what it used beyond that. taken: what was used since the last news.
    """

    number: int
    name: bytes
    limit: int
    period_us: int
    burst: int
    first: int
    waiting: int
    units: int
    taken: int


@dataclass(slots=True)
class Block:
    """The rights to one name. since_ns: when the turn began while others wait; 0: nobody else waits. waits: a request
    of this sidecar was refused by the last answer. yields: the store was told that others wait. over: permits that all
    sidecars use beyond the maximum. is_sure: no call about it was without an answer since the last answer. all_used,
    least_maximum: what the store was told besides."""

    rights: int
    used: int
    maximum: int
    since_ns: int = 0
    waits: bool = False
    yields: bool = False
    over: int = 0
    is_sure: bool = True
    all_used: int = 0
    least_maximum: int = 0

    def settled(self, number: int) -> tuple[int, int, int, int, bool, bool]:
        """Returns what the store is told of an answer. number: of the news."""
        return number, self.rights, self.least_maximum, self.all_used, self.yields, self.waits


@dataclass(slots=True)
class Part:
    """A partition.

    name: of this sidecar, there; "" before its first call. calls: with this name. sent_ns: of the call under way, or
    the last one. renewed_ns: of the last one that was answered. until_ns: end of the lease here, at which the store
    ends it too; 0: there is none. wishes, rates: of the call under way, with their news. next_ns: of the next call,
    unless something is urgent. calm_ns: when calm news are taken again. retry_ns: before this nothing is sent.
    again_ns: after so long it asks again for what was refused. has_more: the last call had no room for all urgent news.
    tells_all: the server has yet to be told everything; told: names of which it was told meanwhile; all_told: the call
    under way has the rest. What was told goes to the end of the store's list, so calm news begin with it again when all
    is told. learns_ns: until when it listens; 0: it gives rights. learns_ms: the same, on its clock, or of the last
    time; or UNKNOWN. has_left: after the farewell. contested: names for which others wait.
    """

    name: str = ""
    calls: int = 0
    run: str = ""
    sent_ns: int = -SECOND
    renewed_ns: int = 0
    until_ns: int = 0
    wishes: list[tuple[News, Wish]] = field(default_factory=list)
    rates: list[tuple[RateNews, RateWish]] = field(default_factory=list)
    next_ns: int = 0
    calm_ns: int = 0
    retry_ns: int = 0
    again_ns: int = MIN_GAP_NS
    has_more: bool = False
    failures: int = 0
    tells_all: bool = False
    told: set[bytes] = field(default_factory=set)
    all_told: bool = False
    learns_ns: int = 0
    learns_ms: int = UNKNOWN
    has_left: bool = False
    sidecars: int = 1
    blocks: dict[bytes, Block] = field(default_factory=dict)
    contested: set[bytes] = field(default_factory=set)


class Sidecar:
    """Decides what a daemon says to the authority, and when.

    store: what grants from the rights. new_name: returns a name that no sidecar has had. lease_ms: of each lease; the
    same for all sidecars, or a server that is new listens to some of them for too short a time.
    """

    def __init__(self, store: Escrow, new_name: Callable[[], str], lease_ms: int) -> None:
        self._store = store
        self._new_name = new_name
        self._lease_ms = lease_ms
        self._lease_ns = lease_ms * MS
        self._beat_ns = min(HEARTBEAT_NS, self._lease_ns // RENEWALS)
        self._parts = [Part() for _ in range(authority.PARTITIONS)]
        self._counts: Counter[str] = Counter()
        self._over_max = 0

    # ---- calls ----

    def call(self, partition: int, run: str, now_ns: int) -> tuple[list[str], list[bytes | str | int]] | None:
        """Returns the keys and arguments of the next call, or None if there is nothing to say now.

        run: the run ID of the server that will get the call.
        """
        part = self._parts[partition]
        self._watch_lease(partition, part, now_ns)
        if now_ns < max(part.retry_ns, part.sent_ns + MIN_GAP_NS):
            return None
        if run != part.run:
            part.run = run
            part.tells_all = True  # also with nothing to tell, so that a new server begins to learn
            part.told.clear()
            part.learns_ms = UNKNOWN
        self._end_turns(partition, part, now_ns)
        if not part.tells_all and now_ns < self.next_call_ns(partition):
            return None

        is_calm = part.tells_all or now_ns >= part.calm_ns
        calm_max = CALM_MAX if is_calm else 0
        urgent = self._store.take_news(partition, URGENT_MAX, 0)
        calm = self._store.take_news(partition, 0, calm_max, part.tells_all)
        news = [News(*each) for each in (*urgent, *calm)]
        rates = [RateNews(*each) for each in self._store.take_rates(partition, URGENT_MAX, calm_max)]
        if is_calm:
            rest_ns = (len(calm) + len(rates)) * CALM_NS
            part.calm_ns = _calm_ns(partition, now_ns + min(rest_ns, self._beat_ns))
        part.has_more = _is_full(urgent, URGENT_MAX) or _is_full(rates, URGENT_MAX)
        part.all_told = part.tells_all and (
            not _is_full(calm, CALM_MAX) or any(each.name in part.told for each in news[len(urgent) :])
        )
        part.wishes = [(each, self._wish(part, each)) for each in news]
        part.rates = [(each, self._rate_wish(part, each)) for each in rates]
        self._drop_old(part, now_ns)
        if not part.wishes and not part.rates and not part.tells_all and not self._has_to_ask(partition, part, now_ns):
            part.next_ns = part.calm_ns if news or rates or part.blocks else now_ns + HEARTBEAT_NS
            return None
        self._store.keep_rights([(each.number, wish.keep) for each, wish in part.wishes])
        exact = [wish.name for _, wish in part.wishes if wish.mode == Mode.EXACT]
        if exact:  # from then on others may be given more, so what becomes free during the call is not granted again
            self._store.wanted_elsewhere(partition, exact, now_ns)
        self._store.give_units([(each.number, wish.give) for each, wish in part.rates if wish.give])
        return self._send(partition, part, self._lease_ms, now_ns)

    def answered(self, partition: int, found: list[Any], now_ns: int) -> None:
        """Takes the answer to the last call. Raises ValueError if it makes no sense."""
        part = self._parts[partition]
        if part.has_left:
            return
        try:
            answer = authority.answer(found)
            if 0 < part.until_ns <= now_ns:  # the lease was over first, so the store has forgotten its other rights
                raise LeaseLost
            if (len(answer.rights), len(answer.units)) != (len(part.wishes), len(part.rates)):
                raise ValueError("the authority answered other wishes")
        except StaleCall:  # a library has repeated the call, and the first answer was lost
            self._forget(part)
            self._store.set_reachable(partition, True, now_ns)
            return
        except LeaseLost:
            self._forget(part)
            self._lose(partition, part, now_ns)
            self._store.set_reachable(partition, True, now_ns)
            return
        except ValueError:
            self.failed(partition, now_ns)
            raise
        part.failures = part.retry_ns = 0
        part.sidecars = max(answer.sidecars, part.sidecars if answer.learning_ms else 1)  # until it knows all again
        self._listen(part, answer)
        part.renewed_ns, part.until_ns = part.sent_ns, part.sent_ns + self._lease_ns - self._lease_ns // MARGIN
        if part.tells_all and part.learns_ns:  # a new server believes only what it was told in time
            part.until_ns = min(part.until_ns, part.learns_ns)
        self._store.set_lease(partition, part.until_ns)
        self._store.set_reachable(partition, True, now_ns)
        self._store.set_sidecars(max(each.sidecars for each in self._parts))

        wishes, part.wishes = part.wishes, []
        settled = [
            self._settle(part, news, wish, right, now_ns)
            for (news, wish), right in zip(wishes, answer.rights, strict=True)
        ]
        self._store.settle_rights(settled, now_ns)
        rates, part.rates = part.rates, []
        self._store.settle_rates(
            [
                (news.number, units.units, news.first, units.wait_us)
                for (news, _), units in zip(rates, answer.units, strict=True)
            ],
            now_ns,
        )
        self._yield(partition, part, {*answer.waited}.difference(news.name for news, _ in wishes), now_ns)
        part.again_ns = answer.again_ms * MS
        part.next_ns = now_ns if part.tells_all else part.calm_ns

    def failed(self, partition: int, now_ns: int) -> None:
        """Notes that the last call had no answer, or could not be made. The authority may have acted on it."""
        part = self._parts[partition]
        if part.has_left:
            return
        self._counts["failed"] += 1
        self._forget(part)
        part.retry_ns = part.next_ns = now_ns + min(RETRY_NS << min(part.failures, 9), RETRY_MOST_NS)
        part.failures += 1
        self._store.set_reachable(partition, False, now_ns)
        self._watch_lease(partition, part, now_ns)

    def next_call_ns(self, partition: int) -> int:
        """Returns when call() may have something to say."""
        part = self._parts[partition]
        urgency = self._store.urgency(partition)
        if urgency:
            is_new = urgency == URGENT or part.has_more
            due_ns = part.sent_ns + (MIN_GAP_NS if is_new else part.again_ns)
        else:
            due_ns = max(part.next_ns, part.sent_ns + MIN_GAP_NS)
        due_ns = max(due_ns, part.retry_ns)
        return min(due_ns, part.until_ns) if part.until_ns else due_ns

    def farewell(self, partition: int) -> tuple[list[str], list[bytes | str | int]]:
        """Returns the keys and arguments of the call that gives everything back.

        From then on nothing may be granted in this partition, and permits that are in use no longer count.
        """
        part = self._parts[partition]
        part.wishes, part.rates, part.has_left = [], [], True
        return self._send(partition, part, 0, part.sent_ns)

    def figures(self, now_ns: int) -> dict[str, float]:
        """Returns figures for metrics, as of the last answers.

        rights, stranded (rights that are not in use), overshoot (permits that all sidecars use beyond the maximum, of
        names that are in use here), overshoot_max (so far, of one name), sidecars, leases, lease_age (of the oldest, in
        seconds), learning (partitions whose servers learn); and how often so far: calls, asked (for requests that
        waited), refused, refused_in_vain (although permits were free elsewhere), failed, lost (leases).
        """
        blocks = [block for part in self._parts for block in part.blocks.values()]
        leased = [part for part in self._parts if part.until_ns > now_ns]
        over = [part for part in self._parts if 0 < part.until_ns <= now_ns and part.blocks]  # call() will notice
        counts = ("calls", "asked", "refused", "refused_in_vain", "failed")
        return {
            "rights": sum(block.rights for block in blocks),
            "stranded": sum(max(block.rights - block.used, 0) for block in blocks),
            "overshoot": sum(block.over for block in blocks),
            "overshoot_max": self._over_max,
            "sidecars": max(part.sidecars for part in self._parts),
            "leases": len(leased),
            "lease_age": max((now_ns - part.renewed_ns for part in leased), default=0) / SECOND,
            "learning": sum(part.learns_ns > now_ns for part in self._parts),
            **{name: self._counts[name] for name in counts},
            "lost": self._counts["lost"] + len(over),
        }

    # ---- inside: calls ----

    def _send(
        self, partition: int, part: Part, lease_ms: int, now_ns: int
    ) -> tuple[list[str], list[bytes | str | int]]:
        part.name = part.name or self._new_name()
        part.calls += 1
        part.sent_ns = now_ns
        self._counts["calls"] += 1
        wishes = [wish for _, wish in part.wishes]
        return (
            authority.keys(partition, part.name),
            authority.arguments(part.name, part.calls, lease_ms, wishes, [wish for _, wish in part.rates]),
        )

    def _has_to_ask(self, partition: int, part: Part, now_ns: int) -> bool:
        """Whether a call without news is due, for the lease or because others may wait.

        In one partition each sidecar always has a lease, so that all of them are counted.
        """
        silent_ns = now_ns - part.renewed_ns
        if any(block.rights for block in part.blocks.values()):
            return silent_ns >= self._beat_ns
        return (bool(part.blocks) or partition == PRESENCE) and silent_ns >= self._lease_ns // RENEWALS

    def _forget(self, part: Part) -> None:
        """Forgets a call on which the authority may have acted: it is told again of rights, and debts stay here."""
        self._store.give_units([(news.number, -wish.give) for news, wish in part.rates if wish.give < 0])
        self._store.forget_call([news.number for news, _ in part.wishes] + [news.number for news, _ in part.rates])
        for news, wish in part.wishes:
            if news.name in part.blocks:
                part.blocks[news.name].rights = wish.keep
                part.blocks[news.name].is_sure = False
        part.wishes, part.rates = [], []
        part.told.clear()  # what is forgotten comes after these in the store's list
        part.calm_ns = 0

    def _listen(self, part: Part, answer: authority.Answer) -> None:
        """Notes how long the server learns, and whether it knows everything."""
        if part.learns_ms not in (UNKNOWN, answer.learns_ms):  # the same run may have forgotten something
            part.tells_all = True
            part.told.clear()
        elif part.all_told:
            part.tells_all = False
            part.told.clear()
        elif part.tells_all:
            part.told.update(news.name for news, _ in part.wishes)
        part.learns_ms = answer.learns_ms
        learning_ns = answer.learning_ms * MS
        part.learns_ns = part.sent_ns + learning_ns - learning_ns // MARGIN if learning_ns else 0

    def _drop_old(self, part: Part, now_ns: int) -> None:
        """Drops wishes that change nothing. The store is told what it knows, as if they had been answered."""

        def is_old(news: News, wish: Wish) -> bool:
            block = part.blocks.get(news.name)
            known = block is not None and block.is_sure and (block.rights, block.used) == (news.rights, news.used)
            return known and not news.first and wish.want == news.rights and not part.tells_all

        old = {news.number: part.blocks[news.name] for news, wish in part.wishes if is_old(news, wish)}
        if old:
            part.wishes = [each for each in part.wishes if each[0].number not in old]
            self._store.settle_rights([block.settled(number) for number, block in old.items()], now_ns)
        idle = {news.number for news, wish in part.rates if not news.first and not wish.want and not wish.give}
        if idle:
            part.rates = [each for each in part.rates if each[0].number not in idle]
            self._store.settle_rates([(number, 0, 0, 0) for number in idle], now_ns)

    # ---- inside: leases ----

    def _watch_lease(self, partition: int, part: Part, now_ns: int) -> None:
        if 0 < part.until_ns <= now_ns:
            self._lose(partition, part, now_ns)

    def _lose(self, partition: int, part: Part, now_ns: int) -> None:
        if part.blocks:
            self._counts["lost"] += 1
            self._store.lose(partition, now_ns)
        part.tells_all = part.tells_all or bool(part.blocks)
        part.told.clear()
        part.blocks.clear()
        part.contested.clear()
        part.name, part.calls = "", 0
        part.until_ns = 0
        part.next_ns = min(part.next_ns, now_ns)

    # ---- inside: sizes ----

    @staticmethod
    def _wish(part: Part, news: News) -> Wish:
        block = part.blocks.get(news.name)
        maximum = news.maximum or news.used
        if block is not None and (block.rights or not news.first):
            maximum = block.maximum
        least = news.used + news.first
        if news.first and news.maximum != maximum:
            return Wish(news.name, news.maximum, least, least, news.used, news.used, Mode.EXACT, news.stays)
        most = news.used + max(news.waiting, news.first)
        if (block is None or not block.since_ns) and maximum >= FEW * part.sidecars:
            demand = max(most, news.peak)
            idle = max(news.rights - demand, 0)
            more = max(demand + SPARE if demand else 0, idle // 2)
            most += min(maximum // (HEADROOM * part.sidecars), demand - most + more)
        keep = news.used if block is not None and block.yields else min(news.rights, least if news.first else most)
        if part.tells_all or part.learns_ns:  # nobody else would be given what goes back, and it would not come again
            keep = news.rights
        keep = max(keep, news.used)
        return Wish(news.name, maximum, least, max(most, keep), keep, news.used, Mode.PLENTY, news.stays)

    @staticmethod
    def _rate_wish(part: Part, news: RateNews) -> RateWish:
        """A store has units in stock for about as long as between two news, so that few requests wait for a call."""
        stock = min(news.burst // (HEADROOM * part.sidecars), news.taken)
        there = max(news.units, 0)
        give = news.units if news.units < 0 else 0 if news.first else max(news.units - stock, 0)
        least = max(news.first - there, 0)
        want = max(least, max(news.waiting, news.first) + stock - there, 0)
        return RateWish(news.name, news.limit, news.period_us, news.burst, least, want, give)

    def _settle(
        self, part: Part, news: News, wish: Wish, right: authority.Right, now_ns: int
    ) -> tuple[int, int, int, int, bool, bool]:
        """Returns what the store is told of an answer."""
        refused = right.rights < wish.least and news.first > 0
        if news.first:
            self._counts["asked"] += 1
            self._counts["refused"] += refused
            self._counts["refused_in_vain"] += refused and right.all_used + news.first <= news.maximum
        if right.rights or news.used or refused:
            block = part.blocks.setdefault(news.name, Block(0, 0, wish.maximum))
            block.is_sure = True
            block.rights, block.used, block.waits = right.rights, news.used, refused
            if wish.mode == right.mode == Mode.PLENTY:
                block.maximum = wish.maximum
            block.over = max(right.all_used - wish.maximum, 0) if right.mode == Mode.PLENTY else 0
            self._over_max = max(self._over_max, block.over)
            if not right.waited_for:
                block.since_ns = 0
                part.contested.discard(news.name)
            elif not block.since_ns or right.rights > wish.keep:
                block.since_ns = now_ns
                part.contested.add(news.name)
            if news.stays and news.used + news.waiting > right.rights:
                block.yields = right.waited_for and self._turn_is_over(part, block, now_ns)
            else:
                block.yields = right.waited_for or wish.maximum < FEW * part.sidecars
            # Rights for one request are for no other one, when they become free.
            block.yields = (block.yields and not part.learns_ns) or right.mode == Mode.EXACT
        else:
            block = Block(0, 0, wish.maximum)
            part.blocks.pop(news.name, None)
            part.contested.discard(news.name)
        block.all_used = right.all_used if refused else right.all_used - news.first  # it counts what it grants as used
        # Rights for single requests are for this one, if it was granted, or else for those that have them already.
        is_alone = right.mode == Mode.EXACT and (refused or not news.first)
        block.least_maximum = UINT32_MAX if is_alone else wish.maximum
        return block.settled(news.number)

    # ---- inside: turns ----

    @staticmethod
    def _turn_is_over(part: Part, block: Block, now_ns: int) -> bool:
        is_fair = block.rights <= block.maximum // part.sidecars
        return now_ns - block.since_ns >= (LONG_TURN_NS if is_fair else TURN_NS)

    def _end_turns(self, partition: int, part: Part, now_ns: int) -> None:
        if part.learns_ns:
            return
        names = [
            name
            for name in part.contested
            if not part.blocks[name].yields and self._turn_is_over(part, part.blocks[name], now_ns)
        ]
        for name in names:
            part.blocks[name].yields = True
        if names:
            self._store.wanted_elsewhere(partition, names, now_ns)

    def _yield(self, partition: int, part: Part, waited: set[bytes], now_ns: int) -> None:
        """Lets the store give back what others wait for. If this sidecar waits too, the next answer says so exactly."""
        if part.learns_ns:
            return
        names = []
        for name in waited:
            block = part.blocks.get(name)
            if block is not None and block.rights and not block.waits and not block.yields:
                block.since_ns = block.since_ns or now_ns
                block.yields = True
                part.contested.add(name)
                names.append(name)
        if names:
            self._store.wanted_elsewhere(partition, names, now_ns)


def _is_full(news: Sequence[tuple[Any, ...]], most: int) -> bool:
    """Returns whether the store may have more of these than it could return."""
    return len(news) >= most or sum(len(each[1]) for each in news) >= NEWS_BYTES_MAX


def _calm_ns(partition: int, least_ns: int) -> int:
    """Returns when calm news are taken again. Partitions take turns, so that their news do not come all at once."""
    phase_ns = partition * TICK_NS // authority.PARTITIONS
    return least_ns + TICK_NS - (least_ns - phase_ns) % TICK_NS
