# Charges: what becomes of what a Take took of a rate, when it is settled, when its time is over, or when its connection
# ends.
#
# Floor 2, header only; _takes.pxd makes the charges.

from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t

from counterd.engine.fair cimport queue_find, queue_wake
from counterd.engine.permits cimport ABSENT, FULL, GRANTED, Outcome
from counterd.protocols.counter._counters cimport NS_PER_TENTH, Counters
from counterd.protocols.counter._items cimport Item
from counterd.protocols.counter._rates cimport FLAG_AWAITED, FLAG_RATE, Pace, Rate, rate_adjust, rate_is_full
from counterd.protocols.counter._shares cimport FLAG_SHARED, share_take
from counterd.protocols.counter._takes cimport (
    Charge, Taker, Takes, TakesState, charge_end, item_find, rate_at, rate_create, rate_expect, take_end,
)

# ---- charges -------------------------------------------------------------------------------------------------------

cdef inline void charge_apply(Takes* takes, const Charge* charge, uint32_t used, int64_t now_ns) noexcept nogil:
    """Replaces the units that were charged by the units that were used.

    If the rate has been full since the charge, there is nothing to refund, because the units have come back with time.
    Units that were used beyond the charge are taken in any case. The authority gets none back that it has not given.
    """
    cdef Counters* counters = takes.counters
    cdef Pace pace = Pace(charge.period_us, charge.limit, charge.burst)
    cdef Rate rate = rate_at(counters, charge.record)
    cdef uint8_t flags = rate.record.permit.record.flags
    if not flags & FLAG_RATE or rate.record.permit.record.tag != charge.tag:
        return
    if rate_is_full(&rate, &pace, now_ns):
        rate.state.full_since = takes.state.grant
    if used == charge.amount or used < charge.amount and rate.state.full_since >= charge.grant:
        return
    rate_adjust(&rate, &pace, charge.amount, used, now_ns)
    if flags & FLAG_SHARED and (used > charge.amount or not charge.is_alone):
        share_take(
            &counters.shares, charge.record, &rate.record.permit.record.flags,
            <int64_t>used - <int64_t>charge.amount, False
        )
    rate_expect(counters, charge.record, &pace)
    if flags & FLAG_AWAITED:
        queue_wake(&counters.fair, queue_find(&counters.fair, charge.record, charge.tag))


cdef inline uint32_t charge_find(
    const Takes* takes, uint32_t connection, uint64_t grant, uint32_t tag, int64_t* budget
) noexcept nogil:
    """Returns the charge of a connection, or 0 if there is none.

    Charges a step to the budget for each charge that it checks.
    """
    cdef uint32_t number = takes.takers[connection].charged.first
    while number and (takes.charges[number].grant != grant or takes.charges[number].tag != tag):
        budget[0] -= 1
        number = takes.charges[number].of_connection.next
    return number


cdef inline Outcome take_settle(
    Takes* takes, uint32_t connection, uint64_t grant, Item* item, uint32_t used, int64_t now_ns, int64_t* budget
) noexcept nogil:
    """Ends a charge, and replaces it by the units that were used. The result ABSENT means that the charge does not
    exist.

    If the rate has been full since the charge, it is made again for the units that were used beyond the charge. The
    result FULL means that there is no room for the rate.
    """
    cdef uint32_t number = charge_find(takes, connection, grant, item.tag, budget)
    cdef Charge* charge = takes.charges + number
    cdef uint32_t record
    if number == 0:
        return ABSENT
    record = item_find(takes, item)
    if record == 0 and used > charge.amount:
        item.pace = Pace(charge.period_us, charge.limit, charge.burst)
        record = rate_create(takes, item, now_ns, budget)
        if record == 0:
            return FULL
    if record:
        charge.record = record
        charge_apply(takes, charge, used, now_ns)
    charge_end(takes, number)
    return GRANTED


cdef inline void charge_leave(Takes* takes, uint32_t number, int64_t now_ns) noexcept nogil:
    """Ends a charge whose holder is gone."""
    if takes.charges[number].refunds:
        charge_apply(takes, takes.charges + number, 0, now_ns)
    charge_end(takes, number)


cdef inline int charges_expire(Takes* takes, int64_t now_ns, int steps) noexcept nogil:
    """Ends charges that can no longer be settled. Returns how many of the steps remain."""
    cdef uint32_t number = takes.state.charged.first
    cdef uint32_t now_tenths = <uint32_t>(now_ns // NS_PER_TENTH)
    cdef uint32_t tenths = <uint32_t>(takes.state.settle_ns // NS_PER_TENTH)
    while steps > 0 and number and now_tenths - takes.charges[number].since_tenths > tenths:
        steps -= 1
        charge_end(takes, number)
        number = takes.state.charged.first
    return steps


# ---- connections that have ended -----------------------------------------------------------------------------------

cdef inline bint takes_leave(Takes* takes, uint32_t connection) noexcept nogil:
    """Queues an ended connection's waiting Takes and charges, so that they are removed.

    Returns False if the connection has none.
    """
    cdef TakesState* state = takes.state
    cdef Taker* taker = takes.takers + connection
    if taker.charges == 0 and takes.counters.fair.askers[connection].waiters == 0:
        return False
    taker.next_leaving = 0
    if state.leaving_last:
        takes.takers[state.leaving_last].next_leaving = connection
    else:
        state.leaving_first = connection
    state.leaving_last = connection
    return True


cdef inline uint32_t takes_left(Takes* takes, bint charges_stay, int64_t now_ns, int* steps) noexcept nogil:
    """Removes Takes and charges of the first connection in the queue. Returns the connection when none remain, or else
    0.

    charges_stay: whether only the Takes are removed.
    """
    cdef TakesState* state = takes.state
    cdef uint32_t connection = state.leaving_first, number
    if connection == 0:
        return 0
    while steps[0] > 0:
        steps[0] -= 1
        number = takes.counters.fair.askers[connection].first
        if number:
            take_end(takes, number)
            continue
        number = takes.takers[connection].charged.first
        if number == 0 or charges_stay:
            state.leaving_first = takes.takers[connection].next_leaving
            if state.leaving_first == 0:
                state.leaving_last = 0
            return connection
        charge_leave(takes, number, now_ns)
    return 0
