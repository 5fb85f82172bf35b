"""The rights of a store to counters, and its units of rates, whose limit holds for several daemons.

Floor 2 (ARCHITECTURE.md). The policy (counterd.cluster.sidecar) asks an Escrow what the store needs and uses, and tells
it what the store may use. _shares.pxd has the rights, and grants from them.
"""

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_GET_SIZE
from libc.stdint cimport UINT32_MAX, int64_t, uint32_t, uint64_t
from libc.string cimport memcpy

from counterd.contract import NEWS_BYTES_MAX
from counterd.engine.fair cimport queue_find
from counterd.engine.gcra cimport SPAN_MAX_NS
from counterd.engine.idle_ring cimport ring_push
from counterd.engine.list cimport Links
from counterd.engine.permits cimport permit_at
from counterd.engine.table cimport Record, name_bytes, name_tag, table_find
from counterd.protocols.counter._counters cimport Counter, Counters, counter_at
from counterd.protocols.counter._leases cimport lease_lose, session_unpark, share_wake
from counterd.protocols.counter._limits cimport Rule, limits_rule
from counterd.protocols.counter._rates cimport FLAG_AWAITED, FLAG_RATE, NS_PER_US, RateState
from counterd.protocols.counter._shares cimport (
    FLAG_KEPT, KINDS, PARTITIONS, PREFIX_MAX, Parked, Part, Share, Shares, link_remove, share_calm, share_can_go,
    share_end, share_hurry, share_part, share_rights, share_unlist,
)
from counterd.protocols.counter._store cimport CounterStore
from counterd.protocols.counter._takes cimport Item

cdef enum:
    COUNTERS = 0            # kinds of shares
    RATES = 1

cdef int64_t BYTES_MAX = NEWS_BYTES_MAX
UNREACHABLE = ("closed", "share", "open")   # by Unreachable


cdef bint has_urgent(const Part* part) noexcept:
    return part.urgent[COUNTERS].first != 0 or part.urgent[RATES].first != 0


cdef class Escrow:
    """Implements contract.Escrow. Escrow.of() makes it, before the store has any counters."""

    cdef CounterStore store
    cdef Shares* shares

    @staticmethod
    def of(CounterStore store not None, bytes prefix not None):
        """Lets the limits of names that begin with `prefix` hold for several daemons. Raises ValueError."""
        cdef Escrow escrow = Escrow.__new__(Escrow)
        escrow.store = store
        escrow.shares = &store.counters.shares
        if len(prefix) > PREFIX_MAX:
            raise ValueError(f"the prefix of shared names has {len(prefix)} bytes, which is more than {PREFIX_MAX}")
        with store:
            escrow.shares.prefix_size = <uint32_t>len(prefix)
            memcpy(escrow.shares.prefix, PyBytes_AS_STRING(prefix), len(prefix))
            escrow.shares.state.sidecars = UINT32_MAX   # until the first answer
            escrow.shares.is_on = True
        return escrow

    def set_policy(self, str unreachable not None, bint drops):
        """Implements contract.Escrow.set_policy."""
        with self.store:
            self.shares.state.unreachable = <int>UNREACHABLE.index(unreachable)
            self.shares.state.drops = drops

    def set_sidecars(self, uint32_t count):
        """Implements contract.Escrow.set_sidecars."""
        with self.store:
            self.shares.state.sidecars = max(1, count)

    def set_lease(self, int partition, int64_t until_ns):
        """Implements contract.Escrow.set_lease."""
        with self.store:
            self.part(partition).until_ns = until_ns
            self.store.has_work = True

    def lose(self, int partition, int64_t now_ns):
        """Implements contract.Escrow.lose."""
        with self.store.at(now_ns):
            if self.part(partition).until_ns:
                lease_lose(&self.store.counters, partition, now_ns)
                self.store.has_work = True

    def set_reachable(self, int partition, bint is_reachable, int64_t now_ns):
        """Implements contract.Escrow.set_reachable."""
        cdef Part* part
        cdef int kind
        with self.store.at(now_ns):
            part = self.part(partition)
            if part.is_away != is_reachable:
                return
            part.is_away = not is_reachable
            for kind in range(KINDS):
                part.cursor[kind] = 0 if is_reachable else part.urgent[kind].first
            part.is_fresh = has_urgent(part)
            self.store.has_work = True

    def urgency(self, int partition):
        """Implements contract.Escrow.urgency."""
        with self.store:
            if not has_urgent(self.part(partition)):
                return 0
            return 2 if self.part(partition).is_fresh else 1

    def hurries(self):
        """Implements contract.Escrow.hurries."""
        cdef int partition, found = 0
        with self.store:
            for partition in range(PARTITIONS):
                found |= (self.part(partition).is_fresh != 0) << partition
        return found

    def take_news(self, int partition, int urgent_max, int calm_max, bint every=False):
        """Implements contract.Escrow.take_news."""
        with self.store:
            return self.take(self.part(partition), COUNTERS, urgent_max, calm_max, every)

    def take_rates(self, int partition, int urgent_max, int calm_max):
        """Implements contract.Escrow.take_rates."""
        with self.store:
            return self.take(self.part(partition), RATES, urgent_max, calm_max, False)

    def keep_rights(self, list kept not None):
        """Implements contract.Escrow.keep_rights."""
        cdef Share* share
        with self.store:
            for number, keep in kept:
                share = self.asked(number)
                share.rights = min(share_rights(self.shares, share), <uint32_t>keep)

    def settle_rights(self, list settled not None, int64_t now_ns):
        """Implements contract.Escrow.settle_rights."""
        cdef uint32_t number
        cdef Share* share
        with self.store.at(now_ns):
            for number, rights, maximum, all_used, yields, was_refused in settled:
                share = self.asked(number)
                share.is_asked = share.is_unsure = False
                share.epoch = share_part(self.shares, share).epoch
                share.rights, share.maximum = rights, maximum
                share.others = max(<int64_t>0, <int64_t>all_used - share.told)
                share.yields, share.was_refused = yields, was_refused
                if yields:
                    self.give_up(number)
                self.wake(number)
                self.put_away(number)
            self.store.has_work = True

    def give_units(self, list given not None):
        """Implements contract.Escrow.give_units."""
        with self.store:
            for number, units in given:
                self.asked(number).units -= units

    def settle_rates(self, list settled not None, int64_t now_ns):
        """Implements contract.Escrow.settle_rates."""
        cdef uint32_t number
        cdef Share* share
        with self.store.at(now_ns):
            for number, units, least, wait_us in settled:
                share = self.asked(number)
                share.is_asked = False
                share.units += units
                share.maximum = least
                share.due_ns = now_ns + min(wait_us * NS_PER_US, SPAN_MAX_NS)
                self.wake(number)
                self.put_away(number)
            self.store.has_work = True

    def forget_call(self, list numbers not None):
        """Implements contract.Escrow.forget_call."""
        cdef uint32_t number
        cdef Share* share
        with self.store:
            for number in numbers:
                share = self.asked(number)
                share.is_asked = False
                if not self.record(number).flags & FLAG_RATE:
                    share.rights = share_rights(self.shares, share)
                    share.epoch = share_part(self.shares, share).epoch
                    share.is_unsure = True
                share_hurry(self.shares, number, &self.record(number).flags, True)
                self.put_away(number)

    def wanted_elsewhere(self, int partition, list names not None, int64_t now_ns):
        """Implements contract.Escrow.wanted_elsewhere."""
        cdef Counters* counters = &self.store.counters
        cdef uint32_t number
        cdef bytes name
        cdef Share* share
        with self.store.at(now_ns):
            self.part(partition)
            for name in names:
                number = table_find(
                    &counters.permits.table,
                    name_tag(&counters.permits.table, <const unsigned char*>PyBytes_AS_STRING(name), len(name)),
                    <const unsigned char*>PyBytes_AS_STRING(name), <uint32_t>PyBytes_GET_SIZE(name)
                )
                if number == 0 or not self.record(number).flags & FLAG_KEPT:
                    continue
                share = self.shares.records + number
                if share_rights(self.shares, share):
                    share.yields = True
                    if share.rights > counter_at(counters, number).permit.consumption:
                        share.rights = counter_at(counters, number).permit.consumption
                        share_hurry(self.shares, number, &self.record(number).flags, True)
            self.store.has_work = True

    def figures(self):
        """Implements contract.Escrow.figures."""
        with self.store:
            return {"dropped": self.shares.state.dropped}

    # ---- inside ----

    cdef Part* part(self, int partition) except NULL:
        if not 0 <= partition < PARTITIONS:
            raise ValueError(f"there is no partition {partition}")
        return self.shares.state.parts + partition

    cdef Share* asked(self, uint32_t number) except NULL:
        """Returns the share of a counter about which a call is under way."""
        if not 0 < number <= self.store.counters.permits.table.pool.fresh or not self.shares.records[number].is_asked:
            raise ValueError(f"no call is under way about counter {number}")
        return self.shares.records + number

    cdef Record* record(self, uint32_t number) noexcept:
        return &permit_at(&self.store.counters.permits, number).record

    cdef list take(self, Part* part, int kind, int urgent_max, int calm_max, bint every):
        """Returns the news of counters or of rates."""
        cdef list news = []
        cdef int64_t size = 0
        cdef uint32_t number, last = part.calm[kind].last
        part.is_fresh &= kind != COUNTERS   # those are taken first
        while part.urgent[kind].first and len(news) < urgent_max and size < BYTES_MAX:
            number = part.urgent[kind].first
            size += self.record(number).name_size
            news.append(self.tell(part, number, kind))
        part.is_fresh |= part.urgent[kind].first != 0
        while part.calm[kind].first and calm_max > 0 and size < BYTES_MAX:
            calm_max -= 1
            number = part.calm[kind].first
            link_remove(self.shares.calm, &part.calm[kind], number)
            if every or self.has_news(number, kind):
                size += self.record(number).name_size
                news.append(self.tell(part, number, kind))
            else:
                self.put_away(number)
            if number == last:
                break
        return news

    cdef bint has_news(self, uint32_t number, int kind) noexcept:
        """Returns whether the authority should know something new about a share."""
        cdef Share* share = self.shares.records + number
        cdef uint32_t used = counter_at(&self.store.counters, number).permit.consumption
        if kind == RATES:
            return share.units != 0
        return share.is_unsure or used != share.told or share_rights(self.shares, share) != used

    cdef tuple tell(self, Part* part, uint32_t number, int kind):
        """Returns the news of a share, and notes that it is asked for."""
        cdef Counters* counters = &self.store.counters
        cdef Share* share = self.shares.records + number
        cdef Counter* counter = counter_at(counters, number)
        cdef uint32_t used = counter.permit.consumption, queue = 0
        cdef const RateState* state = counters.rates + number
        cdef Parked first = Parked(state.period_us, 0, 0, share.maximum or counter.limit, state.burst, Links(0, 0), 0)
        cdef uint64_t waiting = self.waiting(number)
        cdef const Item* item
        if kind == RATES:
            first.most = state.limit
        if counter.permit.record.flags & FLAG_AWAITED:
            queue = queue_find(&counters.fair, number, counter.permit.record.tag)
            item = self.first_item(queue)
            first = Parked(item.period_us, 0, item.amount, item.most, item.burst, Links(0, 0), 0)
        elif share.line.first:
            first = self.shares.parked[share.line.first]
        if counters.limits.generation:
            self.limit(number, kind, &first)
        share.is_asked = True
        share.calls += 1
        share_unlist(self.shares, part, number, kind)
        link_remove(self.shares.calm, &part.calm[kind], number)
        name = name_bytes(&counters.permits.table, &counter.permit.record)
        if kind == RATES:
            taken, share.peak = share.peak, 0
            return number, name, first.most, first.period_us, first.burst, first.amount, waiting, share.units, taken
        peak = max(share.peak, used)
        share.told = share.peak = used
        return (
            number, name, first.most, first.amount, waiting, used, peak, share_rights(self.shares, share), queue != 0
        )

    cdef void limit(self, uint32_t number, int kind, Parked* first) noexcept:
        """Applies the limits of the server to a request, as its decision will."""
        cdef Counters* counters = &self.store.counters
        cdef const Rule* rule = limits_rule(&counters.limits, &counters.permits, number, kind == RATES)
        if rule == NULL:
            return
        if kind == RATES:
            first.period_us, first.most, first.burst = rule.period_us, rule.most, rule.burst
        else:
            first.most = min(first.most, rule.most)

    cdef void give_up(self, uint32_t number) noexcept:
        """Gives up what became free during the call, except for those that wait already."""
        cdef Counters* counters = &self.store.counters
        cdef Share* share = self.shares.records + number
        cdef Counter* counter = counter_at(counters, number)
        cdef uint64_t wanted = counter.permit.consumption + self.waiting(number)
        if share.rights > wanted:
            share.rights = <uint32_t>wanted
            share_hurry(self.shares, number, &counter.permit.record.flags, True)

    cdef uint64_t waiting(self, uint32_t number) noexcept:
        """Returns for how many permits or units requests wait, roughly."""
        cdef Counters* counters = &self.store.counters
        cdef const Record* record = self.record(number)
        cdef uint32_t queue
        if not record.flags & FLAG_AWAITED:
            return self.shares.records[number].parked
        queue = queue_find(&counters.fair, number, record.tag)
        return self.shares.records[number].parked + (
            <uint64_t>self.first_item(queue).amount * counters.fair.queues[queue].waiters
        )

    cdef const Item* first_item(self, uint32_t queue) noexcept:
        """Returns the item of the first Take in a queue that is for this name."""
        cdef const Item* item = &self.store.takes.waiting[self.store.counters.fair.queues[queue].first].first
        while item.queue != queue:
            item = self.store.takes.items + item.next
        return item

    cdef int wake(self, uint32_t number) except -1:
        """Lets the requests that waited before the call was made be decided once more."""
        cdef Share* share = self.shares.records + number
        cdef uint32_t connection = share.line.first, following
        while connection and self.shares.parked[connection].calls != share.calls:
            following = self.shares.parked[connection].links.next
            session_unpark(self.shares, self.store.sessions, connection)
            connection = following
        return share_wake(&self.store.counters, self.store.sessions, number) if share.line.first == 0 else 0

    cdef void put_away(self, uint32_t number) noexcept:
        """Lists a share about which no call is under way, or lets its record be freed if it is of no use."""
        cdef Counters* counters = &self.store.counters
        cdef Counter* counter = counter_at(counters, number)
        if counter.permit.consumption or not share_can_go(self.shares, number):
            share_calm(self.shares, number, &counter.permit.record.flags)
        elif not self.shares.urgent[number].is_listed:
            share_end(self.shares, number, &counter.permit.record.flags)
        if counter.permit.consumption == 0 and not counter.permit.record.flags & FLAG_RATE:
            ring_push(&counters.ring, number, &counter.permit.record)
