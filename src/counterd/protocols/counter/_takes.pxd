# Takes: all of several permits and rates at once, or nothing; and those that wait until they can be granted.
#
# Floor 2, header only. A Take that waits holds nothing. It is in one queue, that of the first item of which there was
# too little, and refers to the counters and rates of its other items by pins on their queues. When it is first in its
# queue all its items are checked again. If another item is short then, it moves to that item's queue.
#
# A charge is what a Take took of a rate, as long as it may still be settled. It belongs to the connection.
#
# Invariants (CounterStore.audit checks each):
# - the record of each item of a waiting Take is pinned (FLAG_PINNED), and so is no other record;
# - exactly the records whose queue has a waiter have FLAG_AWAITED;
# - a charge is in the list of its connection, and in the list of all charges in the order of their grants.

from libc.stdint cimport INT64_MAX, int64_t, uint8_t, uint16_t, uint32_t, uint64_t

from counterd.engine.connections cimport CONNECTIONS_MAX
from counterd.engine.debug cimport debug_check
from counterd.engine.fair cimport (
    Fair, Queue, Waiter, fair_enter, fair_is_behind, fair_move, fair_remove, queue_find, queue_pin, queue_unpin,
    queue_wake, waiter_at,
)
from counterd.engine.gcra cimport Span, span_is_before
from counterd.engine.idle_ring cimport ring_push
from counterd.engine.list cimport Ends, Links, List, ends_append, ends_push, ends_remove
from counterd.engine.permits cimport (
    ABSENT, FULL, GRANTED, REFUSED, Outcome, Permit, Permits, ledger_find, permit_at,
)
from counterd.engine.pool cimport Pool, pool_left, pool_put, pool_take
from counterd.engine.region cimport Region, region_reserve
from counterd.engine.table cimport RECORD_USED, name_blocks, table_find, table_insert, table_remove
from counterd.engine.wheel cimport (
    Timer, Timers, timer_is_armed, timers_arm, timers_begin, timers_disarm, timers_reserve,
)
from counterd.protocols.counter._counters cimport (
    CREATE_STEPS, NS_PER_TENTH, Counters, counter_at, counter_create, counter_grant, counter_has, counter_left,
    make_room,
)
from counterd.protocols.counter._items cimport ITEMS_MAX, Decision, Item, items_limit
from counterd.protocols.counter._limits cimport limits_forget
from counterd.protocols.counter._peers cimport WAITS, Peers, peer_give_back, peer_take
from counterd.protocols.counter._rates cimport (
    FLAG_AWAITED, FLAG_PINNED, FLAG_RATE, Pace, Rate, RateRecord, pace_first, rate_after,
    rate_full_ns, rate_is_full, rate_left, rate_set, span_ceil, span_left,
)
from counterd.protocols.counter._shares cimport (
    FLAG_KEPT, FLAG_SHARED, share_begin, share_call_soon, share_can_go, share_end, share_has_units, share_take,
    share_units,
)

cdef enum:
    KEPT_NS = 1000000000    # after which it is seen whether a full rate's units have been given back
    CHARGES_MAX = 1024      # of a connection: older ones cannot be settled any more. A Settle looks at each of them

cdef enum OnDeath:          # what becomes of a rate's charge if its holder dies before it is settled
    FINAL = 0               # there is no charge: what was taken stays taken, and cannot be settled
    CHARGED = 1
    REFUNDED = 2


cdef struct QueuedItem:     # 32 bytes, of a Take that waits
    uint64_t period_us      # 0: permits
    uint32_t queue          # of its counter or rate
    uint32_t amount
    uint32_t most           # the maximum, or the limit
    uint32_t burst
    uint32_t next           # item of the same Take; also links the free list
    uint8_t on_death
    uint8_t is_named
    uint8_t spare[2]


cdef struct Take:           # 64 bytes, beside its Waiter
    QueuedItem first
    Timer timer             # armed for its deadline
    int64_t since_ns
    uint32_t opaque         # as it came
    uint8_t items
    uint8_t spare[3]


cdef struct Charge:         # 64 bytes
    uint64_t grant
    uint64_t period_us
    uint32_t since_tenths   # when it was granted; of the caller's monotonic clock
    uint32_t record
    uint32_t tag            # of the record, which may be freed meanwhile
    uint32_t amount
    uint32_t limit
    uint32_t burst
    uint32_t connection     # 0: free
    Links of_connection
    Links of_all            # its `next` also links the free list
    uint8_t refunds         # if the connection ends before it is settled
    uint8_t is_alone        # the units were not taken from those of the authority, which could not be reached
    uint8_t spare[2]


cdef struct Taker:          # of each connection
    Ends charged            # its charges, the newest one first
    uint32_t charges
    uint32_t next_leaving


cdef struct TakesState:     # in the region
    Pool items
    Pool charges
    uint64_t grant          # number of the last grant: rises across restarts too, see takes_epoch()
    Ends charged            # all charges, the oldest one first
    uint32_t leaving_first  # ended connections whose waiting Takes and charges are to be removed
    uint32_t leaving_last
    uint32_t rates          # records that are rates
    uint64_t charges_dropped    # that were ended early, to make room for others
    uint32_t waiters_per_connection
    int64_t settle_ns       # for how long after a grant it may be settled


cdef struct Takes:          # this process's view
    TakesState* state
    Counters* counters
    Peers* peers
    Take* waiting           # by waiter
    QueuedItem* items
    Charge* charges
    Taker* takers           # by connection
    Timers deadlines        # of Takes that wait
    uint32_t charges_max


# ---- region --------------------------------------------------------------------------------------------------------

cdef inline int takes_reserve(
    Takes* takes, Region* region, Counters* counters, Peers* peers, uint32_t charges
) except -1:
    """Reserves memory for as many waiting Takes as there can be waiters, and for `charges` charges."""
    cdef size_t waiters = counters.fair.capacity
    takes.counters = counters
    takes.peers = peers
    takes.charges_max = charges
    region_reserve(region, b"takes", sizeof(TakesState), <void**>&takes.state)
    region_reserve(region, b"takes", (waiters + 1) * sizeof(Take), <void**>&takes.waiting)
    region_reserve(region, b"items", (waiters + 1) * sizeof(QueuedItem), <void**>&takes.items)
    region_reserve(region, b"charges", (<size_t>charges + 1) * sizeof(Charge), <void**>&takes.charges)
    region_reserve(region, b"takers", (CONNECTIONS_MAX + 1) * sizeof(Taker), <void**>&takes.takers)
    timers_reserve(&takes.deadlines, region, b"takes")
    return 0


cdef inline void takes_begin(Takes* takes, int64_t now_ns) noexcept nogil:
    """Call this once, after the region was mapped."""
    debug_check(sizeof(Take) == 64 and sizeof(QueuedItem) == 32 and sizeof(Charge) == 64)
    takes.state.items.capacity = takes.counters.fair.capacity
    takes.state.charges.capacity = takes.charges_max
    timers_begin(&takes.deadlines, &takes.waiting.timer, sizeof(Take), now_ns)


cdef inline void takes_epoch(Takes* takes, int64_t unix_ns) noexcept nogil:
    """Keeps the numbers of grants from falling behind the wall clock. Called at the start, and then every second.

    In a second the clock advances by 3.9 million numbers, which is more than there are grants. So the numbers of the
    next process begin above the numbers of this process, unless the clock is set back in between.
    """
    takes.state.grant = max(takes.state.grant, <uint64_t>unix_ns >> 8)


# ---- records of items ----------------------------------------------------------------------------------------------

cdef inline Rate rate_at(const Counters* counters, uint32_t number) noexcept nogil:
    return Rate(<RateRecord*>permit_at(&counters.permits, number), counters.rates + number)


cdef inline void rate_expect(Counters* counters, uint32_t number, const Pace* pace) noexcept nogil:
    """Notes when the rate will be full again. Uses the numbers of the request that leads to the latest time."""
    cdef Rate rate = rate_at(counters, number)
    cdef int64_t due_ns = rate_full_ns(&rate, pace)
    if not timer_is_armed(&rate.state.timer) or due_ns > rate.state.timer.due_ns:
        timers_arm(&counters.fulls, number, due_ns)


cdef inline uint32_t rates_max(const Takes* takes) noexcept nogil:
    return max(<uint32_t>1, takes.counters.permits.table.capacity // 2)


cdef inline uint32_t rate_create(Takes* takes, const Item* item, int64_t now_ns, int64_t* budget) noexcept nogil:
    """Makes a full rate. Returns 0 if there is no room: rates can have at most half of the records.

    A rate cannot be removed to make room for another name, as an idle counter can, because it would be full again too
    early.
    """
    cdef Counters* counters = takes.counters
    cdef Rate rate
    cdef uint32_t number
    if takes.state.rates >= rates_max(takes):
        return 0
    if not make_room(counters, name_blocks(&counters.permits.table, item.name_size), budget):
        return 0
    budget[0] -= CREATE_STEPS
    number = table_insert(&counters.permits.table, item.tag, item.name, item.name_size)
    limits_forget(&counters.limits, number)
    rate = rate_at(counters, number)
    rate.record.permit.record.flags |= FLAG_RATE | share_begin(&counters.shares, number, item.name, item.name_size)
    rate.record.permit.consumption = rate.record.permit.holders = 0
    rate_set(&rate, &item.pace, pace_first(&item.pace, now_ns))
    rate.state.full_since = takes.state.grant
    rate_expect(counters, number, &item.pace)
    takes.state.rates += 1
    return number


cdef inline void rate_end(Takes* takes, uint32_t number, int64_t now_ns) noexcept nogil:
    """Frees a rate that is full.

    If somebody waits for the rate, it is freed later, see record_unpin(). Likewise if its units have to be given back.
    """
    cdef Counters* counters = takes.counters
    cdef uint8_t* flags = &permit_at(&counters.permits, number).record.flags
    debug_check(flags[0] & FLAG_RATE)
    if flags[0] & FLAG_PINNED:
        return
    if flags[0] & FLAG_KEPT:
        if not share_can_go(&counters.shares, number):
            timers_arm(&counters.fulls, number, now_ns + KEPT_NS)
            return
        share_end(&counters.shares, number, flags)
    table_remove(&counters.permits.table, number)
    takes.state.rates -= 1


cdef inline void record_unpin(Counters* counters, uint32_t number) noexcept nogil:
    """Called when nobody waits for a record any more. The record may then be freed when it is full or idle."""
    cdef Permit* permit = permit_at(&counters.permits, number)
    cdef Rate rate
    cdef Pace pace
    permit.record.flags &= <uint8_t>~(FLAG_PINNED | FLAG_AWAITED)
    if permit.record.flags & FLAG_RATE:
        rate = rate_at(counters, number)
        pace = Pace(rate.state.period_us, rate.state.limit, rate.state.burst)
        rate_expect(counters, number, &pace)
    elif permit.consumption == 0:
        ring_push(&counters.ring, number, &permit.record)


cdef inline uint32_t item_find(Takes* takes, Item* item) noexcept nogil:
    item.record = table_find(&takes.counters.permits.table, item.tag, item.name, item.name_size)
    return item.record


cdef inline uint32_t item_create(Takes* takes, Item* item, int64_t now_ns, int64_t* budget) noexcept nogil:
    """Makes the record of an item that has none. A counter is idle until it is granted."""
    cdef Counters* counters = takes.counters
    if item.pace.period_us:
        item.record = rate_create(takes, item, now_ns, budget)
    else:
        item.record = counter_create(counters, item.tag, item.name, item.name_size, budget)
        if item.record:
            ring_push(&counters.ring, item.record, &counter_at(counters, item.record).permit.record)
    return item.record


cdef inline bint items_create(Takes* takes, Item* items, int count, int64_t now_ns, int64_t* budget) noexcept nogil:
    """Makes the records of items that have none. Returns False if there is no room.

    Meanwhile the other records are pinned, so that they are not freed to make room.
    """
    cdef Permits* permits = &takes.counters.permits
    cdef bint was_pinned[ITEMS_MAX]
    cdef bint made = True
    cdef int i
    for i in range(count):
        was_pinned[i] = items[i].record != 0 and permit_at(permits, items[i].record).record.flags & FLAG_PINNED
        if items[i].record:
            permit_at(permits, items[i].record).record.flags |= FLAG_PINNED
    for i in range(count):
        if items[i].record == 0:
            if item_create(takes, &items[i], now_ns, budget) == 0:
                made = False
                break
            permit_at(permits, items[i].record).record.flags |= FLAG_PINNED
    for i in range(count):
        if items[i].record and not was_pinned[i]:
            record_unpin(takes.counters, items[i].record)
    return made


cdef inline bint items_find(Takes* takes, Item* items, int count) noexcept nogil:
    """Finds the record of each item. Returns False if an item has no record."""
    cdef bint found = True
    cdef int i
    for i in range(count):
        if item_find(takes, &items[i]) == 0:
            found = False
    return found


cdef inline bint items_resolve(Takes* takes, Item* items, int count, int64_t now_ns, int64_t* budget) noexcept nogil:
    """Finds or makes the record of each item. Returns False if there is no room."""
    return items_find(takes, items, count) or items_create(takes, items, count, now_ns, budget)


# ---- deciding ------------------------------------------------------------------------------------------------------

cdef inline bint item_is_there(Takes* takes, Item* item, int64_t now_ns, int64_t* due_ns) noexcept nogil:
    """Returns whether enough of an item is available, no matter who waits for it.

    If too little is available, also tells when enough will be.
    """
    cdef Rate rate
    cdef uint32_t units = item.amount
    due_ns[0] = INT64_MAX
    if item.pace.period_us == 0:
        return counter_has(takes.counters, item.record, item.amount, item.maximum)
    rate = rate_at(takes.counters, item.record)
    if rate.record.permit.record.flags & FLAG_SHARED:
        units = share_units(&takes.counters.shares, item.record, units)
    item.is_full = rate_is_full(&rate, &item.pace, now_ns)
    item.after = rate_after(&rate, &item.pace, units, now_ns)
    if span_is_before(Span(now_ns, 0), item.after):
        due_ns[0] = span_ceil(item.after)
        return False
    return not rate.record.permit.record.flags & FLAG_SHARED or share_has_units(
        &takes.counters.shares, item.record, &rate.record.permit.record.flags, item.amount, due_ns
    )


cdef inline List charges_by_connection(const Takes* takes) noexcept nogil:
    return List(takes.charges, sizeof(Charge), &takes.charges.of_connection)


cdef inline List charges_by_grant(const Takes* takes) noexcept nogil:
    return List(takes.charges, sizeof(Charge), &takes.charges.of_all)


cdef inline void charge_end(Takes* takes, uint32_t number) noexcept nogil:
    cdef TakesState* state = takes.state
    cdef Charge* charge = takes.charges + number
    cdef Taker* taker = takes.takers + charge.connection
    ends_remove(charges_by_connection(takes), &taker.charged, number)
    ends_remove(charges_by_grant(takes), &state.charged, number)
    taker.charges -= 1
    charge.connection = 0
    pool_put(&state.charges, &takes.charges.of_all, sizeof(Charge), number)


cdef inline void charge_drop(Takes* takes, uint32_t number) noexcept nogil:
    takes.state.charges_dropped += 1
    charge_end(takes, number)


cdef inline bint charges_fit(Takes* takes, uint32_t connection, uint32_t count) noexcept nogil:
    """Makes room for more charges of a connection. To do so, ends old charges whose units stay taken anyway."""
    cdef Taker* taker = takes.takers + connection
    while taker.charges + count > CHARGES_MAX:
        if takes.charges[taker.charged.last].refunds:
            return False
        charge_drop(takes, taker.charged.last)
    while pool_left(&takes.state.charges) < count:
        if takes.state.charged.first == 0 or takes.charges[takes.state.charged.first].refunds:
            return False
        charge_drop(takes, takes.state.charged.first)
    return True


cdef inline void item_needs(
    const Permits* permits, uint32_t connection, Item* item, uint32_t* holdings, uint32_t* charges
) noexcept nogil:
    """Finds the holding of an item. Adds to the numbers of new holdings and charges if a grant needs one."""
    if item.pace.period_us:
        charges[0] += item.on_death != FINAL
        return
    item.holding = ledger_find(permits, connection, item.record, item.tag)
    holdings[0] += item.holding == 0


cdef inline bint takes_fit(Takes* takes, uint32_t connection, uint32_t holdings, uint32_t charges) noexcept nogil:
    """Returns False if there is no room for so many new holdings and charges."""
    cdef Permits* permits = &takes.counters.permits
    if holdings and (
        pool_left(&permits.state.holdings) < holdings
        or permits.holders[connection].holdings + holdings > permits.state.holdings_per_connection
        and not permits.holders[connection].is_exempt
    ):
        return False
    return charges == 0 or charges_fit(takes, connection, charges)


cdef inline bint takes_have_room(Takes* takes, uint32_t connection, Item* items, int count) noexcept nogil:
    """Finds the holding of each item. Returns False if there is no room for the holdings and charges of a grant."""
    cdef uint32_t holdings = 0, charges = 0
    cdef int i
    for i in range(count):
        item_needs(&takes.counters.permits, connection, &items[i], &holdings, &charges)
    return takes_fit(takes, connection, holdings, charges)


cdef inline void take_charge(
    Takes* takes, uint32_t connection, const Item* item, bint is_alone, int64_t now_ns
) noexcept nogil:
    """Notes a charge of the last grant."""
    cdef TakesState* state = takes.state
    cdef Taker* taker = takes.takers + connection
    cdef uint32_t number = pool_take(&state.charges, &takes.charges.of_all, sizeof(Charge))
    cdef Charge* charge = takes.charges + number
    debug_check(number != 0)
    charge.grant = state.grant
    charge.period_us = item.pace.period_us
    charge.since_tenths = <uint32_t>(now_ns // NS_PER_TENTH)
    charge.record = item.record
    charge.tag = item.tag
    charge.amount = item.amount
    charge.limit = item.pace.limit
    charge.burst = item.pace.burst
    charge.connection = connection
    charge.refunds = item.on_death == REFUNDED
    charge.is_alone = is_alone
    ends_push(charges_by_connection(takes), &taker.charged, number)
    ends_append(charges_by_grant(takes), &state.charged, number)
    taker.charges += 1


cdef inline void rate_grant(Takes* takes, uint32_t connection, Item* item, int64_t now_ns) noexcept nogil:
    cdef Rate rate = rate_at(takes.counters, item.record)
    cdef bint is_alone = False
    if item.is_full:
        rate.state.full_since = takes.state.grant - 1
    rate_set(&rate, &item.pace, item.after)
    rate_expect(takes.counters, item.record, &item.pace)
    if rate.record.permit.record.flags & FLAG_SHARED:
        is_alone = not share_take(
            &takes.counters.shares, item.record, &rate.record.permit.record.flags, item.amount, True
        )
    if item.on_death != FINAL:
        take_charge(takes, connection, item, is_alone, now_ns)
    item.left = span_left(item.after, &item.pace, now_ns)


cdef inline void takes_grant(Takes* takes, uint32_t connection, Item* items, int count, int64_t now_ns) noexcept nogil:
    """Grants all items, and notes how much is left of each.

    The caller must have checked that enough of each is available, and that there is room for the grant.
    """
    cdef Item* item
    cdef int i
    takes.state.grant += 1
    for i in range(count):
        item = items + i
        if item.pace.period_us:
            rate_grant(takes, connection, item, now_ns)
        else:
            item.left = counter_grant(
                takes.counters, connection, item.record, item.holding, item.amount, item.maximum, now_ns
            )


cdef inline uint32_t item_left(Takes* takes, const Item* item, int64_t now_ns) noexcept nogil:
    """Returns how much of an item is left."""
    cdef Rate rate
    if item.pace.period_us:
        rate = rate_at(takes.counters, item.record)
        return rate_left(&rate, &item.pace, now_ns)
    return counter_left(takes.counters, item.record, item.maximum)


cdef inline Decision takes_decide(
    Takes* takes, uint32_t connection, Item* items, int count, bint is_limited, int64_t now_ns, int64_t* budget
) noexcept nogil:
    """Grants a new Take, or says what it lacks. If somebody waits for a thing, it is not available to a new Take.

    is_limited: whether limits of the server may apply.
    """
    cdef const Permits* permits = &takes.counters.permits
    cdef Decision decision = Decision(FULL, 0, False, 0, INT64_MAX)
    cdef bint found = items_find(takes, items, count)
    cdef uint32_t holdings = 0, charges = 0
    cdef int i
    if is_limited and not items_limit(takes.counters, items, count, &decision):
        return decision
    if not found and not items_create(takes, items, count, now_ns, budget):
        return decision
    for i in range(count):
        if (
            not item_is_there(takes, &items[i], now_ns, &decision.due_ns)
            or permit_at(permits, items[i].record).record.flags & FLAG_AWAITED
        ):
            decision.outcome = REFUSED
            decision.item = <uint8_t>i
            return decision
        item_needs(permits, connection, &items[i], &holdings, &charges)
    if takes_fit(takes, connection, holdings, charges):
        takes_grant(takes, connection, items, count, now_ns)
        decision.outcome = GRANTED
    return decision


# ---- waiting -------------------------------------------------------------------------------------------------------

cdef inline void awaited_set(Takes* takes, uint32_t queue) noexcept nogil:
    """Notes in the record of a queue whether somebody waits in the queue."""
    cdef const Queue* found = takes.counters.fair.queues + queue
    cdef uint8_t* flags
    if found.pins == 0:
        return  # its record may be another's by now
    flags = &permit_at(&takes.counters.permits, found.record).record.flags
    if found.waiters:
        flags[0] |= FLAG_AWAITED
        if flags[0] & FLAG_SHARED:
            share_call_soon(&takes.counters.shares, found.record, flags, False)
    else:
        flags[0] &= <uint8_t>~FLAG_AWAITED


cdef inline void item_unpin(Takes* takes, const QueuedItem* queued) noexcept nogil:
    cdef const Queue* queue = takes.counters.fair.queues + queued.queue
    if queue.pins == 1:
        record_unpin(takes.counters, queue.record)
    queue_unpin(&takes.counters.fair, queued.queue)


cdef inline bint item_pin(Takes* takes, QueuedItem* queued, const Item* item) noexcept nogil:
    """Notes an item of a Take that will wait. Returns False if there is no room."""
    queued.queue = queue_pin(&takes.counters.fair, item.record, item.tag)
    if queued.queue == 0:
        return False
    permit_at(&takes.counters.permits, item.record).record.flags |= FLAG_PINNED
    queued.period_us = item.pace.period_us
    queued.amount = item.amount
    queued.most = item.pace.limit if item.pace.period_us else item.maximum
    queued.burst = item.pace.burst if item.pace.period_us else 0
    queued.on_death = item.on_death
    queued.is_named = item.is_named
    queued.next = 0
    return True


cdef inline void items_free(Takes* takes, QueuedItem* first) noexcept nogil:
    """Unpins and frees the items of a Take. The first item is not a cell of the pool."""
    cdef uint32_t number = first.next, following
    item_unpin(takes, first)
    while number:
        following = takes.items[number].next
        item_unpin(takes, takes.items + number)
        pool_put(&takes.state.items, &takes.items.next, sizeof(QueuedItem), number)
        number = following


cdef inline uint32_t take_wait(
    Takes* takes, uint32_t connection, const Item* items, int count, const Decision* decision, uint32_t opaque,
    uint64_t key, uint16_t weight, uint8_t priority, int64_t now_ns, int64_t until_ns
) noexcept nogil:
    """Lets a refused Take wait until until_ns; INT64_MAX means for ever.

    Returns the number of the wait, or 0 if there is no room.
    """
    cdef Fair* fair = &takes.counters.fair
    cdef QueuedItem* queued
    cdef QueuedItem[ITEMS_MAX] made
    cdef uint32_t number, cell, queue
    cdef Take* take
    cdef int i
    cdef uint32_t most = takes.state.waiters_per_connection
    if takes.counters.permits.holders[connection].is_exempt:
        most = max(<uint32_t>1, fair.capacity // 2)     # so that others can wait too
    if (
        pool_left(&fair.state.waiters) == 0
        or fair.askers[connection].waiters >= most
        or pool_left(&takes.state.items) < <uint32_t>count - 1
        or not peer_take(takes.peers, connection, WAITS, <uint32_t>count - 1)
    ):
        return 0
    for i in range(count):
        if not item_pin(takes, &made[i], &items[i]):
            while i > 0:
                i -= 1
                item_unpin(takes, &made[i])
            peer_give_back(takes.peers, connection, WAITS, <uint32_t>count - 1)
            return 0
    queue = made[decision.item].queue
    number = fair_enter(fair, connection, queue, key, weight, priority, items[decision.item].amount)
    awaited_set(takes, queue)
    take = takes.waiting + number
    take.opaque = opaque
    take.items = <uint8_t>count
    take.since_ns = now_ns
    take.first = made[0]
    queued = &take.first
    for i in range(1, count):
        cell = pool_take(&takes.state.items, &takes.items.next, sizeof(QueuedItem))
        takes.items[cell] = made[i]
        queued.next = cell
        queued = takes.items + cell
    if until_ns != INT64_MAX:
        timers_arm(&takes.deadlines, number, until_ns)
    if fair.queues[queue].first == number:
        queue_wake(fair, queue)     # of a rate: to note when it is there
    return number


cdef inline void take_end(Takes* takes, uint32_t number) noexcept nogil:
    """Removes a waiting Take, whether it was granted or not."""
    cdef const Waiter* waiter = waiter_at(&takes.counters.fair, number)
    cdef uint32_t queue = waiter.queue
    peer_give_back(takes.peers, waiter.connection, WAITS, <uint32_t>takes.waiting[number].items - 1)
    timers_disarm(&takes.deadlines, number)
    fair_remove(&takes.counters.fair, number)
    awaited_set(takes, queue)
    items_free(takes, &takes.waiting[number].first)


cdef inline void take_items(const Takes* takes, uint32_t number, Item* items) noexcept nogil:
    """Fills in the items of a waiting Take, without their names."""
    cdef const QueuedItem* queued = &takes.waiting[number].first
    cdef const Queue* queue
    cdef int i
    for i in range(takes.waiting[number].items):
        queue = takes.counters.fair.queues + queued.queue
        items[i].record = queue.record
        items[i].tag = queue.tag
        items[i].amount = queued.amount
        items[i].maximum = items[i].pace.limit = queued.most
        items[i].pace.period_us = queued.period_us
        items[i].pace.burst = queued.burst
        items[i].on_death = queued.on_death
        items[i].is_named = queued.is_named
        queued = takes.items + queued.next


cdef inline Decision take_try(Takes* takes, uint32_t number, Item* items, int64_t now_ns) noexcept nogil:
    """Grants the first Take of its queue, if everything is available. items: gets the items of the Take."""
    cdef const Fair* fair = &takes.counters.fair
    cdef const Waiter* waiter = waiter_at(fair, number)
    cdef const QueuedItem* queued = &takes.waiting[number].first
    cdef int count = takes.waiting[number].items
    cdef Decision decision = Decision(FULL, 0, False, 0, INT64_MAX)
    cdef int i
    take_items(takes, number, items)
    if takes.counters.limits.generation and not items_limit(takes.counters, items, count, &decision):
        return decision
    for i in range(count):
        if not item_is_there(takes, &items[i], now_ns, &decision.due_ns) or fair_is_behind(fair, number, queued.queue):
            decision.outcome = REFUSED
            decision.item = <uint8_t>i
            decision.queue = queued.queue
            return decision
        queued = takes.items + queued.next
    if takes_have_room(takes, waiter.connection, items, count):
        takes_grant(takes, waiter.connection, items, count, now_ns)
        decision.outcome = GRANTED
    return decision


cdef inline void take_look(
    Takes* takes, uint32_t number, Item* items, int64_t now_ns, Decision* decision
) noexcept nogil:
    """Finds the item for which a Take waits, and when the item will be available."""
    cdef const QueuedItem* queued = &takes.waiting[number].first
    cdef int i, count = takes.waiting[number].items
    take_items(takes, number, items)
    if takes.counters.limits.generation and not items_limit(takes.counters, items, count, decision):
        return
    for i in range(count):
        if queued.queue == takes.counters.fair.waiters[number].queue:
            decision.item = <uint8_t>i
            item_is_there(takes, &items[i], now_ns, &decision.due_ns)
            return
        queued = takes.items + queued.next
    debug_check(False)


cdef inline void take_move(Takes* takes, uint32_t number, const Decision* decision, const Item* items) noexcept nogil:
    """Moves a waiting Take into the queue of the item of which too little is available."""
    cdef uint32_t left = takes.counters.fair.waiters[number].queue
    fair_move(&takes.counters.fair, number, decision.queue, items[decision.item].amount)
    awaited_set(takes, left)
    awaited_set(takes, decision.queue)
    queue_wake(&takes.counters.fair, decision.queue)


cdef inline uint32_t take_find(
    const Takes* takes, uint32_t connection, uint32_t opaque, int64_t* budget
) noexcept nogil:
    """Returns the waiting Take of a connection with this opaque, or 0 if there is none.

    Charges a step to the budget for each Take that it checks.
    """
    cdef uint32_t number = takes.counters.fair.askers[connection].first
    while number and takes.waiting[number].opaque != opaque:
        budget[0] -= 1
        number = takes.counters.fair.waiters[number].of_connection.next
    return number
