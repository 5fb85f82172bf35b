"""The rights of a store to counters, and its units of rates, whose limit holds for several daemons.

Floor 2 (ARCHITECTURE.md). The policy (counterd.cluster.lease_policy) asks LeasedLimits what has changed, and tells it
what the store may use. _shares.pxd has the rights, and grants from them.
"""

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_GET_SIZE
from libc.stdint cimport UINT32_MAX, int64_t, uint8_t, uint32_t, uint64_t
from libc.string cimport memcpy

from counterd.contract import CHANGES_BYTES_MAX, Changes, CounterChange, RateChange, Scope
from counterd.engine.fair cimport queue_find
from counterd.engine.gcra cimport SPAN_MAX_NS
from counterd.engine.idle_ring cimport ring_push
from counterd.engine.list cimport Links
from counterd.engine.permits cimport permit_at
from counterd.engine.table cimport Record, name_bytes, name_tag, table_find
from counterd.protocols.counter._counters cimport Counter, Counters, counter_at
from counterd.protocols.counter._leases cimport lease_lose, session_unblock, share_wake
from counterd.protocols.counter._limits cimport Rule, limits_rule
from counterd.protocols.counter._rates cimport FLAG_AWAITED, FLAG_RATE, NS_PER_US, RateState
from counterd.protocols.counter._shares cimport (
    FLAG_KEPT, KINDS, PARTITIONS, PREFIX_MAX, Blocked, Partition, Share, Shares, background_remove, share_call_later,
    share_call_soon, share_can_go, share_end, share_partition, share_rights, share_unlist,
)
from counterd.protocols.counter._store cimport CounterStore
from counterd.protocols.counter._takes cimport QueuedItem

cdef enum:
    COUNTERS = 0            # kinds of shares
    RATES = 1

cdef int64_t BYTES_MAX = CHANGES_BYTES_MAX
cdef int BLOCKING = Scope.BLOCKING, REPORT = Scope.REPORT
UNREACHABLE = ("closed", "share", "open")   # by Unreachable


cdef inline bint has_blocking(const Partition* partition) noexcept:
    return partition.blocking[<int>COUNTERS].first != 0 or partition.blocking[<int>RATES].first != 0


cdef class LeasedLimits:
    """Implements contract.LeasedLimits. LeasedLimits.of() makes it, before the store has any counters."""

    cdef CounterStore store
    cdef Shares* shares

    @staticmethod
    def of(CounterStore store not None, bytes prefix not None):
        """Lets the limits of names that begin with `prefix` hold for several daemons. Raises ValueError."""
        cdef LeasedLimits limits = LeasedLimits.__new__(LeasedLimits)
        limits.store = store
        limits.shares = &store.counters.shares
        if len(prefix) > PREFIX_MAX:
            raise ValueError(f"the prefix of shared names has {len(prefix)} bytes, which is more than {PREFIX_MAX}")
        with store:
            limits.shares.prefix_size = <uint32_t>len(prefix)
            memcpy(limits.shares.prefix, PyBytes_AS_STRING(prefix), len(prefix))
            limits.shares.state.daemons = UINT32_MAX    # until the first answer
            limits.shares.is_on = True
        return limits

    def set_policy(self, str unreachable not None, bint drops):
        """Implements contract.LeasedLimits.set_policy."""
        with self.store:
            self.shares.state.unreachable = <int>UNREACHABLE.index(unreachable)
            self.shares.state.drops = drops

    def has_urgent(self):
        """Implements contract.LeasedLimits.has_urgent."""
        cdef int i, blocking = 0, urgent = 0
        self.store.begin_call(self.store.now_ns)    # quicker than `with`, as each turn of the driver comes here
        for i in range(PARTITIONS):
            blocking |= has_blocking(self.shares.state.partitions + i) << i
            urgent |= (self.shares.state.partitions[i].is_urgent != 0) << i
        self.store.end_call()
        return blocking, urgent

    def figures(self):
        """Implements contract.LeasedLimits.figures."""
        with self.store:
            return {"dropped": self.shares.state.dropped}

    # ---- changes ----

    def changes(self, int partition, int most, int scope):
        """Implements contract.LeasedLimits.changes."""
        cdef Partition* part
        cdef int background_max = 0 if scope == BLOCKING else most
        with self.store:
            part = self.partition(partition)
            if scope == REPORT:
                part.report_last = part.background[<int>COUNTERS].last
            part.is_urgent = False
            blocking = self.take(part, COUNTERS, most, 0, False)
            background = self.take(part, COUNTERS, 0, background_max, scope >= REPORT)
            rates = self.take(part, RATES, most, background_max, False)
            return Changes(blocking, background, rates, part.report_last == 0)

    cdef list take(self, Partition* part, int kind, int blocking_max, int background_max, bint every):
        """Returns changes of one kind. every: of the background, all that a full report has yet to tell."""
        cdef list found = []
        cdef int64_t size = 0
        cdef uint32_t number, last
        while part.blocking[kind].first and len(found) < blocking_max and size < BYTES_MAX:
            number = part.blocking[kind].first
            size += self.record(number).name_size
            found.append(self.change(part, number, kind))
        part.is_urgent |= part.blocking[kind].first != 0
        last = part.report_last if every else part.background[kind].last
        while last and background_max > 0 and size < BYTES_MAX:
            background_max -= 1
            number = part.background[kind].first
            if number == last:
                last = 0
            if every or self.has_changed(number, kind):
                size += self.record(number).name_size
                found.append(self.change(part, number, kind))
            else:
                background_remove(self.shares, part, number, kind)
                self.put_away(number)
        return found

    cdef bint has_changed(self, uint32_t number, int kind) noexcept:
        """Returns whether the authority should know something new about a share."""
        cdef Share* share = self.shares.records + number
        cdef uint32_t used = counter_at(&self.store.counters, number).permit.consumption
        if kind == RATES:
            return share.units != 0
        return share.is_uncertain or used != share.reported or share_rights(self.shares, share) != used

    cdef object change(self, Partition* part, uint32_t number, int kind):
        """Returns the change of a share, and notes that it is asked for."""
        cdef Counters* counters = &self.store.counters
        cdef Share* share = self.shares.records + number
        cdef Counter* counter = counter_at(counters, number)
        cdef uint32_t used = counter.permit.consumption, peak = share.peak
        cdef bint stays = counter.permit.record.flags & FLAG_AWAITED != 0
        cdef uint64_t waiting = self.waiting(number)
        cdef Blocked first = self.first_request(number, kind)
        share.is_asked = True
        share.calls += 1
        share_unlist(self.shares, part, number, kind)
        name = name_bytes(&counters.permits.table, &counter.permit.record)
        if kind == RATES:
            share.peak = 0
            return RateChange(
                number, name, first.most, first.period_us, first.burst, first.amount, waiting, share.units, peak
            )
        share.reported = share.peak = used
        return CounterChange(
            number, name, first.most, first.amount, waiting, used, max(peak, used), share_rights(self.shares, share),
            stays,
        )

    cdef Blocked first_request(self, uint32_t number, int kind) noexcept:
        """Returns the first request that waits, or else one for nothing with the numbers of the last one.

        The limits of the server apply to it, as they will in its decision.
        """
        cdef Counters* counters = &self.store.counters
        cdef const Share* share = self.shares.records + number
        cdef const Record* record = self.record(number)
        cdef const RateState* state = counters.rates + number
        cdef Blocked first
        cdef const QueuedItem* item
        cdef const Rule* rule = NULL
        if counters.limits.generation:
            rule = limits_rule(&counters.limits, &counters.permits, number, kind == RATES)
        if record.flags & FLAG_AWAITED:
            item = self.first_item(queue_find(&counters.fair, number, record.tag))
            first = Blocked(item.period_us, 0, item.amount, item.most, item.burst, Links(0, 0), 0)
        elif share.line.first:
            first = self.shares.blocked[share.line.first]
        elif kind == RATES:
            first = Blocked(state.period_us, 0, 0, state.limit, state.burst, Links(0, 0), 0)
        else:
            first = Blocked(0, 0, 0, share.maximum or counter_at(counters, number).limit, 0, Links(0, 0), 0)
        if rule != NULL and kind == RATES:
            first.period_us, first.most, first.burst = rule.period_us, rule.most, rule.burst
        elif rule != NULL:
            first.most = min(first.most, rule.most)
        return first

    cdef uint64_t waiting(self, uint32_t number) noexcept:
        """Returns for how many permits or units requests wait, roughly."""
        cdef Counters* counters = &self.store.counters
        cdef const Record* record = self.record(number)
        cdef uint32_t queue
        if not record.flags & FLAG_AWAITED:
            return self.shares.records[number].blocked
        queue = queue_find(&counters.fair, number, record.tag)
        return self.shares.records[number].blocked + (
            <uint64_t>self.first_item(queue).amount * counters.fair.queues[queue].waiters
        )

    cdef const QueuedItem* first_item(self, uint32_t queue) noexcept:
        """Returns the item of the first Take in a queue that is for this name."""
        cdef const QueuedItem* item = &self.store.takes.waiting[self.store.counters.fair.queues[queue].first].first
        while item.queue != queue:
            item = self.store.takes.items + item.next
        return item

    # ---- updates ----

    def apply(self, int partition, update not None, int64_t now_ns):
        """Implements contract.LeasedLimits.apply."""
        cdef Partition* part
        kept, unchanged, forgotten, lease_ns, is_reachable, daemons, counters, rates, wanted = update
        with self.store.at(now_ns):
            self.keep(kept)
            self.put_back(unchanged, False)
            self.put_back(forgotten, True)
            part = self.partition(partition)
            if lease_ns > 0:
                part.until_ns = lease_ns
            elif lease_ns == 0 and part.until_ns:
                lease_lose(&self.store.counters, partition, now_ns)
            if is_reachable is not None:
                self.set_reachable(part, is_reachable)
            if daemons:
                self.shares.state.daemons = daemons
            self.apply_counters(counters)
            self.apply_rates(rates, now_ns)
            self.give_to_others(wanted)
            self.store.has_work = True

    cdef int keep(self, kept) except -1:
        """Reduces rights and units to what may be used until the answer."""
        cdef Share* share
        cdef uint32_t number
        for number, amount, yields in kept:
            share = self.asked(number)
            if self.record(number).flags & FLAG_RATE:
                share.units = min(share.units, <int64_t>amount)
            else:
                share.rights = min(share_rights(self.shares, share), <uint32_t>amount)
                share.yields |= <bint>yields
        return 0

    cdef int put_back(self, numbers, bint is_forgotten) except -1:
        """Lists shares again about which no call is made, or one that had no answer, on which the authority may have
        acted."""
        cdef Share* share
        cdef uint32_t number
        for number in numbers:
            share = self.asked(number)
            share.is_asked = False
            share.due_ns = 0    # of a rate: units that were refused may be there again
            if is_forgotten:
                share_call_soon(self.shares, number, &self.record(number).flags, True)
            if is_forgotten and not self.record(number).flags & FLAG_RATE:
                share.rights = share_rights(self.shares, share)
                share.epoch = share_partition(self.shares, share).epoch
                share.is_uncertain = True
            self.put_away(number)
        return 0

    cdef void set_reachable(self, Partition* part, bint is_reachable) noexcept:
        """Notes whether the authority answers. If it stops, all requests that wait for it are decided without it."""
        cdef int kind
        if part.is_away != is_reachable:
            return
        part.is_away = not is_reachable
        for kind in range(KINDS):
            part.cursor[kind] = 0 if is_reachable else part.blocking[kind].first
        part.is_urgent = has_blocking(part)

    cdef int apply_counters(self, counters) except -1:
        cdef Share* share
        cdef uint32_t number
        for number, rights, maximum, all_used, yields, is_refused in counters:
            share = self.asked(number)
            share.is_asked = share.is_uncertain = False
            share.epoch = share_partition(self.shares, share).epoch
            share.rights, share.maximum = rights, maximum
            share.others = max(<int64_t>0, <int64_t>all_used - share.reported)
            share.yields, share.is_refused = yields, is_refused
            if yields:
                self.yield_rights(number, self.waiting(number))
            self.wake(number)
            self.put_away(number)
        return 0

    cdef int apply_rates(self, rates, int64_t now_ns) except -1:
        cdef Share* share
        cdef uint32_t number
        for number, units, first, wait_us in rates:
            share = self.asked(number)
            share.is_asked = False
            share.units += units
            share.maximum = first
            share.due_ns = now_ns + min(wait_us * NS_PER_US, SPAN_MAX_NS)
            self.wake(number)
            self.put_away(number)
        return 0

    cdef int give_to_others(self, wanted) except -1:
        """Gives up the rights to these names that are not in use, as other daemons wait for them."""
        cdef Counters* counters = &self.store.counters
        cdef uint32_t number
        cdef bytes name
        for name in wanted:
            number = table_find(
                &counters.permits.table,
                name_tag(&counters.permits.table, <const uint8_t*>PyBytes_AS_STRING(name), len(name)),
                <const uint8_t*>PyBytes_AS_STRING(name), <uint32_t>PyBytes_GET_SIZE(name)
            )
            if number == 0 or not self.record(number).flags & FLAG_KEPT:
                continue
            if share_rights(self.shares, self.shares.records + number):
                self.shares.records[number].yields = True
                self.yield_rights(number, 0)
        return 0

    cdef void yield_rights(self, uint32_t number, uint64_t waiting) noexcept:
        """Gives up rights beyond what is in use, and beyond what requests here wait for already."""
        cdef Share* share = self.shares.records + number
        cdef uint64_t wanted = counter_at(&self.store.counters, number).permit.consumption + waiting
        if share.rights > wanted:
            share.rights = <uint32_t>wanted
            share_call_soon(self.shares, number, &self.record(number).flags, True)

    cdef int wake(self, uint32_t number) except -1:
        """Lets the requests that waited before the call was made be decided once more."""
        cdef Share* share = self.shares.records + number
        cdef uint32_t connection = share.line.first, following
        while connection and self.shares.blocked[connection].calls != share.calls:
            following = self.shares.blocked[connection].links.next
            session_unblock(self.shares, self.store.sessions, connection)
            connection = following
        return share_wake(&self.store.counters, self.store.sessions, number) if share.line.first == 0 else 0

    # ---- shares ----

    cdef Partition* partition(self, int number) except NULL:
        if not 0 <= number < PARTITIONS:
            raise ValueError(f"there is no partition {number}")
        return self.shares.state.partitions + number

    cdef Share* asked(self, uint32_t number) except NULL:
        """Returns the share of a counter about which a call is under way."""
        if not 0 < number <= self.store.counters.permits.table.pool.fresh or not self.shares.records[number].is_asked:
            raise ValueError(f"no call is under way about counter {number}")
        return self.shares.records + number

    cdef Record* record(self, uint32_t number) noexcept:
        return &permit_at(&self.store.counters.permits, number).record

    cdef void put_away(self, uint32_t number) noexcept:
        """Lists a share about which no call is under way, or lets its record be freed if it is of no use."""
        cdef Counters* counters = &self.store.counters
        cdef Counter* counter = counter_at(counters, number)
        if counter.permit.consumption or not share_can_go(self.shares, number):
            share_call_later(self.shares, number, &counter.permit.record.flags)
        elif not self.shares.blocking[number].is_listed:
            share_end(self.shares, number, &counter.permit.record.flags)
        if counter.permit.consumption == 0 and not counter.permit.record.flags & FLAG_RATE:
            ring_push(&counters.ring, number, &counter.permit.record)
