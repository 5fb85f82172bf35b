# Counters: permits whose maximum each acquire states. An idle counter exists until the end of its stats window.
#
# Floor 2, header only. yrmcds calls them objects, and their reclaim garbage collection. The permits and the ledger are
# in engine/permits.pxd. This file has the windows, the peaks, and the reclaim of counters that nobody holds.
#
# Invariants (CounterStore.audit checks each):
# - a counter with consumption 0 is in the ring of idle counters, unless it is pinned or its share is kept;
# - limits subtract, they never add: `consumption > maximum - resources`, because sums wrap.

from libc.stdint cimport UINT32_MAX, int64_t, uint8_t, uint32_t, uint64_t

from counterd.engine.chains cimport Chains, chains_begin, chains_reserve
from counterd.engine.connections cimport Connections
from counterd.engine.debug cimport debug_check
from counterd.engine.fair cimport Fair, fair_begin, fair_reserve, queue_find, queue_wake
from counterd.engine.idle_ring cimport FLAG_IN_RING, Ring, ring_begin, ring_first, ring_pop, ring_push, ring_reserve
from counterd.engine.permits cimport (
    ABSENT, FULL, GRANTED, NAME_INLINE, NOT_HELD, REFUSED, Holding, Outcome, Permit, Permits, ledger_add, ledger_find,
    ledger_is_full, ledger_remove, permit_at, permits_begin, permits_next_left, permits_reserve,
)
from counterd.engine.pool cimport pool_left
from counterd.engine.region cimport Region, region_reserve
from counterd.engine.table cimport name_blocks, table_find, table_insert, table_remove
from counterd.engine.wheel cimport Timers, timers_begin, timers_reserve
from counterd.protocols.counter._limits cimport Limits, Rule, limits_find, limits_forget, limits_reserve, limits_rule
from counterd.protocols.counter._rates cimport FLAG_AWAITED, FLAG_PINNED, RateRecord, RateState
from counterd.protocols.counter._shares cimport (
    FLAG_KEPT, FLAG_SHARED, Share, Shares, share_allows, share_begin, share_can_go, share_end, share_restored,
    shares_reserve,
)

cdef enum:
    NS_PER_TENTH = 100000000
    RECLAIM_STEPS = 64      # ring entries that one request may check
    CREATE_STEPS = 32       # steps of a new record, some 1.3 us: cache lines, and perhaps pages, that nobody has used


cdef struct Counter:        # 64 bytes, one cache line
    Permit permit
    uint32_t limit          # the maximum of the last acquire, granted or not; shown to people only
    uint32_t peak           # the largest consumption in `window`
    uint32_t window         # number of the stats window of the last acquire or release


cdef struct CountersState:  # in the region
    uint32_t window         # number of the current stats window
    uint32_t busy           # counters with consumption > 0
    uint32_t idle           # counters with consumption 0, last used in the current window
    int64_t sweep_started_ns
    uint64_t created        # counters, in total
    uint64_t reclaimed      # idle counters freed early, to make room for another
    uint64_t expired        # idle counters freed after the end of their window
    uint64_t sweeps
    uint64_t last_sweep_us
    uint64_t total_sweep_us


cdef struct Counters:       # this process's view
    CountersState* state
    Permits permits
    Ring ring
    Chains chains           # of long names
    Fair fair               # who waits for a counter or a rate
    RateState* rates        # by record
    Timers fulls            # of the rates
    Limits limits           # that the server sets
    Shares shares           # of counters whose limit holds for several daemons


cdef inline int counters_reserve(
    Counters* counters, Region* region, Connections* connections, uint32_t buckets, uint32_t holdings, uint64_t blocks,
    uint32_t waiters
) except -1:
    region_reserve(region, b"counters", sizeof(CountersState), <void**>&counters.state)
    chains_reserve(&counters.chains, region, blocks)
    permits_reserve(&counters.permits, region, connections, buckets, holdings)
    ring_reserve(&counters.ring, region, buckets)
    fair_reserve(&counters.fair, region, waiters)
    region_reserve(region, b"rates", (<size_t>buckets + 1) * sizeof(RateState), <void**>&counters.rates)
    timers_reserve(&counters.fulls, region, b"rates")
    limits_reserve(&counters.limits, region, buckets)
    shares_reserve(&counters.shares, region, buckets)
    return 0


cdef inline void counters_begin(Counters* counters, const uint64_t* key, int64_t now_ns) noexcept nogil:
    """Call this once, after the region was mapped."""
    debug_check(sizeof(Counter) == 64 and sizeof(RateRecord) == 64 and sizeof(Share) == 64)
    chains_begin(&counters.chains)
    permits_begin(&counters.permits, key, &counters.chains)
    ring_begin(&counters.ring, counters.permits.table.capacity)
    fair_begin(&counters.fair, now_ns)
    timers_begin(&counters.fulls, &counters.rates.timer, sizeof(RateState), now_ns)


cdef inline Counter* counter_at(const Counters* counters, uint32_t number) noexcept nogil:
    return <Counter*>permit_at(&counters.permits, number)


cdef inline bint counter_exists(const Counters* counters, const Counter* counter) noexcept nogil:
    """Returns whether a counter exists.

    A counter at zero that was last used in an earlier window counts as not existing, even if it is not freed yet.
    """
    return counter.permit.consumption != 0 or counter.window == counters.state.window


# ---- making room ---------------------------------------------------------------------------------------------------

cdef inline uint32_t counter_pop(Counters* counters) noexcept nogil:
    """Removes the first counter of the ring, which must not be empty, and returns it."""
    cdef uint32_t number = ring_first(&counters.ring)
    ring_pop(&counters.ring, &permit_at(&counters.permits, number).record)
    return number


cdef inline void counter_free(Counters* counters, uint32_t number) noexcept nogil:
    """Frees the record of an idle counter, which must not be in the ring."""
    debug_check(counter_at(counters, number).permit.consumption == 0)
    debug_check(counter_at(counters, number).permit.holders == 0)
    debug_check(not counter_at(counters, number).permit.record.flags & FLAG_IN_RING)
    if counter_at(counters, number).permit.record.flags & FLAG_KEPT:
        share_end(&counters.shares, number, &counter_at(counters, number).permit.record.flags)
    table_remove(&counters.permits.table, number)


cdef inline bint counter_can_go(const Counters* counters, uint32_t number) noexcept nogil:
    """Returns whether a counter's record may be freed. If not, the record enters the ring again later."""
    cdef const Counter* counter = counter_at(counters, number)
    if counter.permit.consumption != 0 or counter.permit.record.flags & FLAG_PINNED:
        return False
    return not counter.permit.record.flags & FLAG_KEPT or share_can_go(&counters.shares, number)


cdef inline void sweep_begin(Counters* counters) noexcept nogil:
    counters.ring.state.sweep_left = counters.ring.state.size
    counters.state.sweep_started_ns = 0


cdef inline bint make_room(Counters* counters, uint32_t blocks, int64_t* budget) noexcept nogil:
    """Makes sure that a record and `blocks` blocks are free. If necessary, frees idle counters, beginning with the
    oldest.

    If only blocks are short, counters without blocks are kept. If RECLAIM_STEPS do not free enough, returns False and
    starts a sweep, which drops the ring's stale entries. Each step is charged to the budget.
    """
    cdef CountersState* state = counters.state
    cdef bint records_short, blocks_short
    cdef uint32_t number
    cdef Counter* counter
    cdef int step = 0
    if blocks > counters.chains.pool.capacity:
        return False
    while True:
        records_short = pool_left(counters.permits.table.pool) == 0
        blocks_short = pool_left(counters.chains.pool) < blocks
        if not records_short and not blocks_short:
            return True
        if step == RECLAIM_STEPS or counters.ring.state.size == 0:
            break
        step += 1
        budget[0] -= 1
        number = counter_pop(counters)
        counter = counter_at(counters, number)
        if not counter_can_go(counters, number):
            continue
        if blocks_short and counter.permit.record.name_size <= NAME_INLINE:
            ring_push(&counters.ring, number, &counter.permit.record)
            continue
        if counter_exists(counters, counter):
            state.idle -= 1
            state.reclaimed += 1
        else:
            state.expired += 1
        counter_free(counters, number)
    if counters.ring.state.sweep_left == 0 and (records_short or counters.ring.state.size > state.idle):
        sweep_begin(counters)  # if only blocks are short, only when the ring has stale entries
    return False


cdef inline uint32_t counter_create(
    Counters* counters, uint32_t tag, const uint8_t* name, uint32_t size, int64_t* budget
) noexcept nogil:
    """Makes a counter for a new name. Returns 0 if there is no room for the counter."""
    cdef uint32_t number
    cdef Counter* counter
    if not make_room(counters, name_blocks(&counters.permits.table, size), budget):
        return 0
    budget[0] -= CREATE_STEPS
    number = table_insert(&counters.permits.table, tag, name, size)
    limits_forget(&counters.limits, number)
    counter = counter_at(counters, number)
    counter.permit.consumption = 0
    counter.permit.holders = 0
    counter.peak = 0
    counter.window = counters.state.window - 1  # it exists from its first consumption on
    counter.permit.record.flags |= share_begin(&counters.shares, number, name, size)
    counters.state.created += 1
    return number


cdef inline int sweep(Counters* counters, int steps) noexcept nogil:
    """Continues a sweep: one round through the ring that frees expired counters and drops stale entries.

    Returns how many of the steps remain.
    """
    cdef uint32_t number
    cdef Counter* counter
    while steps > 0 and counters.ring.state.sweep_left > 0:
        steps -= 1
        counters.ring.state.sweep_left -= 1
        number = counter_pop(counters)
        counter = counter_at(counters, number)
        if not counter_can_go(counters, number):
            continue
        if counter_exists(counters, counter):
            ring_push(&counters.ring, number, &counter.permit.record)
        else:
            counters.state.expired += 1
            counter_free(counters, number)
    return steps


# ---- requests ------------------------------------------------------------------------------------------------------

cdef inline void counter_consume(Counters* counters, Counter* counter, uint32_t resources) noexcept nogil:
    """Adds to the consumption and updates the peak of the window. The caller must have checked the maximum."""
    cdef CountersState* state = counters.state
    if counter.permit.consumption == 0:
        state.busy += 1
        if counter.window == state.window:
            state.idle -= 1
    counter.permit.consumption += resources
    if counter.window != state.window:
        counter.window = state.window
        counter.peak = counter.permit.consumption
    elif counter.permit.consumption > counter.peak:
        counter.peak = counter.permit.consumption


cdef inline void counter_restore(Counters* counters, uint32_t number, uint32_t resources) noexcept nogil:
    """Subtracts from the consumption.

    At zero the counter becomes idle and enters the ring, unless it is already in the ring.
    """
    cdef CountersState* state = counters.state
    cdef Counter* counter = counter_at(counters, number)
    debug_check(0 < resources <= counter.permit.consumption)
    if counter.window != state.window:
        counter.window = state.window
        counter.peak = counter.permit.consumption
    counter.permit.consumption -= resources
    if counter.permit.consumption == 0:
        state.busy -= 1
        state.idle += 1
        ring_push(&counters.ring, number, &counter.permit.record)
    if counter.permit.record.flags & FLAG_SHARED:
        share_restored(&counters.shares, number, &counter.permit.record.flags, counter.permit.consumption)
    if counter.permit.record.flags & FLAG_AWAITED:
        queue_wake(&counters.fair, queue_find(&counters.fair, number, counter.permit.record.tag))


cdef inline uint32_t counter_maximum(
    Counters* counters, uint32_t number, const uint8_t* name, uint32_t size, uint32_t maximum
) noexcept nogil:
    """Returns the smaller one of `maximum` and the maximum that the server sets. number: 0 if the counter is new."""
    cdef const Rule* rule
    if number:
        rule = limits_rule(&counters.limits, &counters.permits, number, False)
    else:
        number = limits_find(&counters.limits, False, name, size)
        rule = counters.limits.rules + number if number else NULL
    return maximum if rule == NULL else min(maximum, rule.most)


cdef inline bint counter_has(Counters* counters, uint32_t number, uint32_t amount, uint32_t maximum) noexcept nogil:
    """Returns whether so much of a counter is available, no matter who waits for it. amount: at most `maximum`.

    Of a shared counter, there may be more than this daemon has a right to. Then it is asked for, see _shares.pxd.
    """
    cdef Counter* counter = counter_at(counters, number)
    if counter.permit.consumption > maximum - amount:
        return False
    if not counter.permit.record.flags & FLAG_SHARED:
        return True
    return share_allows(
        &counters.shares, number, &counter.permit.record.flags, counter.permit.consumption + amount, maximum
    )


cdef inline uint32_t counter_everywhere(const Counters* counters, uint32_t number) noexcept nogil:
    """Returns the consumption at all daemons that share a counter's limit. Of others, the last answer is known."""
    cdef const Counter* counter = counter_at(counters, number)
    cdef uint32_t others
    if not counter.permit.record.flags & FLAG_SHARED:
        return counter.permit.consumption
    others = counters.shares.records[number].others
    return counter.permit.consumption + min(others, UINT32_MAX - counter.permit.consumption)


cdef inline uint32_t counter_left(const Counters* counters, uint32_t number, uint32_t maximum) noexcept nogil:
    """Returns how much of a counter is available, at most."""
    return maximum - min(maximum, counter_everywhere(counters, number))


cdef inline Outcome counter_acquire(
    Counters* counters, uint32_t connection, uint32_t tag, const uint8_t* name, uint32_t size,
    uint32_t resources, uint32_t maximum, uint32_t since_tenths, int64_t* budget, uint32_t* left
) noexcept nogil:
    """Grants all of `resources`, or nothing if the consumption would exceed `maximum`. `resources` must be more than 0
    and at most `maximum`.

    If somebody waits for the counter, grants nothing: permits that are given back belong to the waiters first. left: is
    set to the permits that are left after a grant, or to the server's limit if `resources` are more than that.
    """
    cdef Permits* permits = &counters.permits
    cdef uint32_t number = table_find(&permits.table, tag, name, size)
    cdef uint32_t entry
    cdef Counter* counter
    if counters.limits.generation:
        maximum = counter_maximum(counters, number, name, size, maximum)
        if resources > maximum:
            left[0] = maximum
            return REFUSED
    if number == 0:
        if ledger_is_full(permits, connection):
            return FULL
        number = counter_create(counters, tag, name, size, budget)
        if number == 0:
            return FULL
        counter = counter_at(counters, number)
        counter.limit = maximum
        if counter.permit.record.flags & FLAG_SHARED and not counter_has(counters, number, resources, maximum):
            ring_push(&counters.ring, number, &counter.permit.record)
            return REFUSED
        ledger_add(permits, connection, number, resources, since_tenths)
        counter_consume(counters, counter, resources)
        left[0] = maximum - resources
        return GRANTED
    counter = counter_at(counters, number)
    counter.limit = maximum
    if counter.permit.record.flags & FLAG_AWAITED or not counter_has(counters, number, resources, maximum):
        return REFUSED
    entry = ledger_find(permits, connection, number, tag)
    if entry:
        permits.holdings[entry].amount += resources
    else:
        if ledger_is_full(permits, connection):
            return FULL
        ledger_add(permits, connection, number, resources, since_tenths)
    if not counter_exists(counters, counter):
        counters.state.created += 1
    counter_consume(counters, counter, resources)
    left[0] = counter_left(counters, number, maximum)
    return GRANTED


cdef inline uint32_t counter_grant(
    Counters* counters, uint32_t connection, uint32_t number, uint32_t entry, uint32_t amount, uint32_t maximum,
    int64_t now_ns
) noexcept nogil:
    """Grants `amount` of a counter, and returns how much is left. entry: the holding that the connection has, or 0.

    The caller must have checked the maximum, and that there is room for a holding.
    """
    cdef Counter* counter = counter_at(counters, number)
    counter.limit = maximum
    if entry:
        counters.permits.holdings[entry].amount += amount
    else:
        ledger_add(&counters.permits, connection, number, amount, <uint32_t>(now_ns // NS_PER_TENTH))
    if not counter_exists(counters, counter):
        counters.state.created += counter.window != counters.state.window - 1
    counter_consume(counters, counter, amount)
    return counter_left(counters, number, maximum)


cdef inline Outcome counter_release(
    Counters* counters, uint32_t connection, uint32_t tag, const uint8_t* name, uint32_t size, uint32_t resources
) noexcept nogil:
    """Gives back `resources` permits that the connection holds.

    With 0 resources, only checks that the counter exists.
    """
    cdef Permits* permits = &counters.permits
    cdef uint32_t number = table_find(&permits.table, tag, name, size)
    cdef uint32_t entry
    cdef Holding* holding
    if number == 0 or not counter_exists(counters, counter_at(counters, number)):
        return ABSENT
    if resources == 0:
        return GRANTED
    entry = ledger_find(permits, connection, number, tag)
    if entry == 0:
        return NOT_HELD
    holding = permits.holdings + entry
    if holding.amount < resources:
        return NOT_HELD
    holding.amount -= resources
    if holding.amount == 0:
        ledger_remove(permits, entry)
    counter_restore(counters, number, resources)
    return GRANTED


cdef inline Outcome counter_get(
    const Counters* counters, uint32_t tag, const uint8_t* name, uint32_t size, bint everywhere, uint32_t* consumption
) noexcept nogil:
    """Finds the consumption of a counter, here or at all daemons that share its limit."""
    cdef uint32_t number = table_find(&counters.permits.table, tag, name, size)
    if number == 0 or not counter_exists(counters, counter_at(counters, number)):
        return ABSENT
    consumption[0] = counter_at(counters, number).permit.consumption
    if everywhere:
        consumption[0] = counter_everywhere(counters, number)
    return GRANTED


cdef inline void holding_give_back(Counters* counters, uint32_t entry) noexcept nogil:
    cdef uint32_t number = counters.permits.holdings[entry].record
    cdef uint32_t amount = counters.permits.holdings[entry].amount
    ledger_remove(&counters.permits, entry)
    counter_restore(counters, number, amount)


cdef inline int counters_give_back(Counters* counters, int steps) noexcept nogil:
    """Gives back holdings of ended connections, in the order in which the connections ended.

    Returns how many of the steps remain.
    """
    cdef uint32_t entry
    while steps > 0:
        entry = permits_next_left(&counters.permits)
        if entry == 0:
            break
        steps -= 1
        holding_give_back(counters, entry)
    return steps
