# The end of leases: what a store does when its rights of shared counters have ended, or when nobody can be asked.
#
# Floor 2, header only; see _shares.pxd. Here requests are woken and connections dropped.

from libc.stdint cimport int64_t, uint32_t

from counterd._core cimport Session
from counterd.engine.fair cimport queue_find, queue_wake
from counterd.engine.permits cimport Permit, Permits, permit_at
from counterd.engine.wheel cimport timers_arm
from counterd.protocols.counter._counters cimport Counters
from counterd.protocols.counter._rates cimport FLAG_AWAITED
from counterd.protocols.counter._shares cimport (
    FLAG_SHARED, KINDS, PARTITIONS, Part, Shares, parked_remove, shares_lose,
)
from counterd.protocols.counter._stays cimport Stays, stay_discard


cdef inline int session_unpark(Shares* shares, void** sessions, uint32_t connection) except -1:
    """Lets the request of a parked connection be executed once more. sessions: those of the store, by connection."""
    parked_remove(shares, connection)
    return (<Session>sessions[connection]).resume(None)


cdef inline int share_wake(Counters* counters, void** sessions, uint32_t number) except -1:
    """Lets all requests that lack rights of a counter, or units of a rate, be decided once more.

    Returns how many steps that took.
    """
    cdef Permit* permit = permit_at(&counters.permits, number)
    cdef uint32_t* first = &counters.shares.records[number].parked_first
    cdef int steps = 1
    while first[0]:
        session_unpark(&counters.shares, sessions, first[0])
        steps += 1
    if permit.record.flags & FLAG_AWAITED:
        queue_wake(&counters.fair, queue_find(&counters.fair, number, permit.record.tag))
    return steps


cdef inline void lease_lose(Counters* counters, int partition) noexcept nogil:
    """Ends all rights of a partition."""
    shares_lose(&counters.shares, partition)
    if counters.shares.state.drops:
        counters.shares.state.to_drop = counters.permits.connections.pool.fresh


cdef inline bint holds_lapsed(const Counters* counters, uint32_t connection, int* steps) noexcept nogil:
    """Returns whether a connection holds permits of a shared counter for which there is no lease any more."""
    cdef const Permits* permits = &counters.permits
    cdef const Shares* shares = &counters.shares
    cdef uint32_t entry = permits.holders[connection].first, number
    while entry:
        steps[0] -= 1
        number = permits.holdings[entry].record
        if permit_at(permits, number).record.flags & FLAG_SHARED:
            if shares.state.parts[shares.records[number].partition].until_ns == 0:
                return True
        entry = permits.holdings[entry].next_of_connection
    return False


cdef inline int holder_drop(Stays* stays, void** sessions, uint32_t connection, int64_t now_ns) except -1:
    """Drops a connection, or ends its grace time, so that its permits are given back."""
    if stays.stays[connection].is_kept:
        timers_arm(&stays.timers, connection, now_ns)
        return 0
    stay_discard(stays, connection)
    if sessions[connection] != NULL:
        return (<Session>sessions[connection]).drop()
    return 0


cdef inline int leases_end(Counters* counters, Stays* stays, void** sessions, int64_t now_ns, int steps) except -1:
    """Ends the leases that are over, wakes requests about which nobody can be asked any more, and drops holders.

    Connections of other stores (_lending.pyx) are not dropped, because nobody is behind them. Returns how many of the
    steps remain.
    """
    cdef Shares* shares = &counters.shares
    cdef Part* part
    cdef uint32_t number
    cdef int partition, kind
    for partition in range(PARTITIONS):
        part = shares.state.parts + partition
        if part.until_ns and part.until_ns <= now_ns:
            lease_lose(counters, partition)
        for kind in range(KINDS):
            while part.cursor[kind] and steps > 0:
                number = part.cursor[kind]
                part.cursor[kind] = shares.urgent[number].next
                steps -= share_wake(counters, sessions, number)
    while shares.state.to_drop and steps > 0:
        steps -= 1
        number = shares.state.to_drop
        shares.state.to_drop -= 1
        if not counters.permits.holders[number].is_exempt and holds_lapsed(counters, number, &steps):
            shares.state.dropped += 1
            holder_drop(stays, sessions, number, now_ns)
    return steps
