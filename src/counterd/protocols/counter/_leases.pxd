# The end of leases: what a store does when its rights of shared counters have ended, or when nobody can be asked.
#
# Floor 2, header only; see _shares.pxd. Here requests are woken and connections dropped.

from libc.stdint cimport int64_t, uint32_t

from counterd._core cimport Session
from counterd.engine.fair cimport queue_find, queue_wake
from counterd.engine.permits cimport Holding, Permit, permit_at
from counterd.engine.wheel cimport timers_arm
from counterd.protocols.counter._counters cimport NS_PER_TENTH, Counters
from counterd.protocols.counter._rates cimport FLAG_AWAITED
from counterd.protocols.counter._resumptions cimport Resumptions, token_revoke
from counterd.protocols.counter._shares cimport (
    FLAG_SHARED, KINDS, PARTITIONS, Partition, Share, Shares, SharesState, blocked_remove, shares_lose,
)


cdef inline int session_unblock(Shares* shares, void** sessions, uint32_t connection) except -1:
    """Lets the request of a blocked connection be executed once more. sessions: those of the store, by connection."""
    blocked_remove(shares, connection)
    return (<Session>sessions[connection]).resume(None)


cdef inline int share_wake(Counters* counters, void** sessions, uint32_t number) except -1:
    """Lets all requests that wait for rights to a counter, or for units of a rate, be decided once more.

    Returns how many steps that took.
    """
    cdef Permit* permit = permit_at(&counters.permits, number)
    cdef uint32_t* first = &counters.shares.records[number].line.first
    cdef int steps = 1
    while first[0]:
        session_unblock(&counters.shares, sessions, first[0])
        steps += 1
    if permit.record.flags & FLAG_AWAITED:
        queue_wake(&counters.fair, queue_find(&counters.fair, number, permit.record.tag))
    return steps


cdef inline void lease_lose(Counters* counters, int partition, int64_t now_ns) noexcept nogil:
    """Ends all rights of a partition."""
    cdef SharesState* state = counters.shares.state
    shares_lose(&counters.shares, partition, <uint32_t>(now_ns // NS_PER_TENTH))
    if state.drops:
        state.to_drop = counters.permits.state.holdings.fresh
        state.dropping |= <uint32_t>1 << partition


cdef inline bint holding_is_lost(const Counters* counters, uint32_t entry) noexcept nogil:
    """Returns whether the permits of a holding may be others' now, because the lease under which they were granted has
    ended."""
    cdef const Holding* holding = counters.permits.holdings + entry
    cdef const Share* share = counters.shares.records + holding.record
    if holding.connection == 0 or counters.permits.holders[holding.connection].is_exempt:
        return False
    if not permit_at(&counters.permits, holding.record).record.flags & FLAG_SHARED:
        return False
    if not counters.shares.state.dropping >> share.partition & 1:
        return False
    return holding.since_tenths <= counters.shares.state.partitions[share.partition].ended_tenths


cdef inline bint holder_drop(Resumptions* resumptions, void** sessions, uint32_t connection, int64_t now_ns) except -1:
    """Drops a connection, or ends its grace time, so that its permits are given back.

    Returns False if that was done before.
    """
    if resumptions.records[connection].is_in_grace:
        timers_arm(&resumptions.timers, connection, now_ns)
        return True
    if sessions[connection] == NULL:
        return False
    token_revoke(resumptions, connection)
    (<Session>sessions[connection]).drop()
    return True


cdef inline int leases_end(
    Counters* counters, Resumptions* resumptions, void** sessions, int64_t now_ns, int steps
) except -1:
    """Ends the leases that are over, wakes requests about which nobody can be asked any more, and drops holders.

    Connections of other stores (_lending.pyx) are not dropped, because nobody is behind them. Returns how many of the
    steps remain.
    """
    cdef Shares* shares = &counters.shares
    cdef Partition* partition
    cdef uint32_t number
    cdef int i, kind
    for i in range(PARTITIONS):
        partition = shares.state.partitions + i
        if partition.until_ns and partition.until_ns <= now_ns:
            lease_lose(counters, i, now_ns)
        for kind in range(KINDS):
            while partition.cursor[kind] and steps > 0:
                number = partition.cursor[kind]
                partition.cursor[kind] = shares.blocking[number].links.next
                steps -= share_wake(counters, sessions, number)
    while shares.state.to_drop and steps > 0:
        steps -= 1
        number = shares.state.to_drop
        shares.state.to_drop -= 1
        if holding_is_lost(counters, number):
            shares.state.dropped += holder_drop(
                resumptions, sessions, counters.permits.holdings[number].connection, now_ns
            )
    if shares.state.to_drop == 0:
        shares.state.dropping = 0
    return steps
