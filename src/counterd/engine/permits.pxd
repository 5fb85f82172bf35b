# Permits: named amounts, a ledger of how much each connection holds of each, and the give-back when a connection ends.
#
# Floor 1, header only. A permit is a record of a table. A holding is an amount that one connection holds of a permit.
# The store defines what a permit means: one store limits the amount, others only count holders.
#
# Invariants (audit_permits checks each):
# - a permit's consumption is the sum of the amounts of its holdings, and no holding has amount 0;
# - every holding is in the list of its connection and in the list of its permit, and the ledger's index finds it;
# - a connection that has ended is in the queue of leavers until all its holdings are given back; only then its number
#   is reused.

from libc.stdint cimport uint8_t, uint32_t, uint64_t

from counterd.engine.connections cimport CONNECTIONS_MAX, Connections, connections_put
from counterd.engine.debug cimport debug_check
from counterd.engine.list cimport Links, List, list_push, list_remove
from counterd.engine.pool cimport Pool, pool_left, pool_put, pool_take
from counterd.engine.region cimport Region, region_reserve
from counterd.engine.table cimport (
    Index, Record, Table, index_home, index_insert, index_remove, index_reserve, name_blocks, table_begin, table_find,
    table_insert, table_remove, table_reserve,
)
from counterd.engine.chains cimport Chains

cdef enum:
    PERMIT_CELL = 64        # bytes, a cache line: a Permit, and 12 bytes for the store
    NAME_INLINE = 36        # bytes of a name in its permit: 64 - 8 (head) - 8 (numbers) - 12 (for the store)

# The outcomes of taking, giving back and reading a permit. Protocols have other numbers on the wire.
cdef enum Outcome:
    GRANTED = 0
    ABSENT = 1              # there is no such permit
    REFUSED = 2             # not enough remains
    NOT_HELD = 3            # this connection holds less
    FULL = 4                # no record, name memory or holding is free


cdef struct Permit:         # the first 52 bytes of a cell
    Record record
    uint8_t name[NAME_INLINE]
    uint32_t consumption
    uint32_t holders        # first holding


cdef struct Holding:        # 32 bytes
    uint32_t connection     # 0 = free
    uint32_t record
    uint32_t amount
    uint32_t since_tenths   # tenths of a second on the caller's monotonic clock
    Links of_connection     # its `next` also links the free list
    Links of_record


cdef struct Holder:         # the holdings of a connection
    uint32_t first          # the first holding
    uint32_t holdings
    uint32_t next           # in the queue of leavers
    uint32_t is_exempt      # from the limit of holdings per connection


cdef struct PermitsState:   # in the region
    Pool holdings
    uint32_t holdings_per_connection
    uint32_t leaving_first  # the queue of ended connections whose holdings are to be given back
    uint32_t leaving_last
    uint32_t leaving_holdings
    uint64_t given_back     # holdings of ended connections that were given back, in total
    uint32_t cursor         # the next holding of an interrupted walk along a permit's holders; or 0
    uint64_t walks          # walks ever begun; the cursor belongs to the last one


cdef struct Permits:        # this process's view
    PermitsState* state
    Table table
    Index ledger
    Holding* holdings
    Holder* holders         # by connection
    uint32_t holdings_max
    Connections* connections


# ---- region --------------------------------------------------------------------------------------------------------

cdef inline int permits_reserve(
    Permits* permits, Region* region, Connections* connections, uint32_t records, uint32_t holdings
) except -1:
    """Reserves memory for `records` permits and `holdings` holdings. Raises ValueError if these are too many."""
    permits.connections = connections
    permits.holdings_max = holdings
    region_reserve(region, b"permits", sizeof(PermitsState), <void**>&permits.state)
    table_reserve(&permits.table, region, b"permits", records, PERMIT_CELL, NAME_INLINE)
    index_reserve(&permits.ledger, region, b"holdings", holdings)
    region_reserve(region, b"holdings", (<size_t>holdings + 1) * sizeof(Holding), <void**>&permits.holdings)
    region_reserve(region, b"holders", (CONNECTIONS_MAX + 1) * sizeof(Holder), <void**>&permits.holders)
    return 0


cdef inline void permits_begin(Permits* permits, const uint64_t* key, const Chains* chains) noexcept nogil:
    """Call this once, after the region was mapped."""
    table_begin(&permits.table, key, chains)
    permits.state.holdings.capacity = permits.holdings_max
    permits.state.holdings_per_connection = permits.holdings_max


cdef inline Permit* permit_at(const Permits* permits, uint32_t number) noexcept nogil:
    debug_check(0 < number <= permits.table.pool.fresh)
    return <Permit*>(permits.table.records + number * <size_t>PERMIT_CELL)


cdef inline List holdings_by_connection(const Permits* permits) noexcept nogil:
    return List(permits.holdings, sizeof(Holding), &permits.holdings.of_connection)


cdef inline List holdings_by_record(const Permits* permits) noexcept nogil:
    return List(permits.holdings, sizeof(Holding), &permits.holdings.of_record)


# ---- ledger --------------------------------------------------------------------------------------------------------

cdef inline uint32_t ledger_tag(uint32_t connection, uint32_t tag) noexcept nogil:
    """Returns the tag of a holding. The tag needs the tag of the name but not the record, so both cache lines are
    prefetched at the same time.

    Multiplication by an odd number permutes the tags, which are keyed hashes; the connection shifts the permutation.
    """
    return <uint32_t>(((<uint64_t>tag << 32 | connection) * <uint64_t>0x9e3779b97f4a7c15) >> 32)


cdef inline uint32_t ledger_find(
    const Permits* permits, uint32_t connection, uint32_t record, uint32_t tag
) noexcept nogil:
    """Returns the connection's holding of a permit, or 0 if there is none."""
    cdef const Index* index = &permits.ledger
    cdef uint32_t first = permit_at(permits, record).holders
    cdef uint32_t own, slot
    cdef Holding* holding
    if first == 0 or permits.holdings[first].connection == connection:
        return first    # as a rule, unless many connections hold some
    own = ledger_tag(connection, tag)
    slot = index_home(index, own)
    while index.entries[slot].number:
        if index.entries[slot].tag == own:
            holding = permits.holdings + index.entries[slot].number
            if holding.record == record and holding.connection == connection:
                return index.entries[slot].number
        slot = (slot + index.step) & index.mask
        if slot == index_home(index, own):
            break
    return 0


cdef inline bint ledger_is_full(const Permits* permits, uint32_t connection) noexcept nogil:
    cdef const PermitsState* state = permits.state
    return (
        state.holdings.used >= state.holdings.capacity
        or permits.holders[connection].holdings >= state.holdings_per_connection
        and not permits.holders[connection].is_exempt
    )


cdef inline void ledger_add(
    Permits* permits, uint32_t connection, uint32_t number, uint32_t amount, uint32_t since_tenths
) noexcept nogil:
    """Adds a holding. The caller must have checked `ledger_is_full`."""
    cdef Permit* permit = permit_at(permits, number)
    cdef Holder* holder = permits.holders + connection
    cdef uint32_t entry = pool_take(&permits.state.holdings, &permits.holdings.of_connection, sizeof(Holding))
    cdef Holding* holding = permits.holdings + entry
    debug_check(connection != 0 and entry != 0)
    holding.connection = connection
    holding.record = number
    holding.amount = amount
    holding.since_tenths = since_tenths
    list_push(holdings_by_connection(permits), &holder.first, entry)
    list_push(holdings_by_record(permits), &permit.holders, entry)
    holder.holdings += 1
    index_insert(&permits.ledger, ledger_tag(connection, permit.record.tag), entry)


cdef inline void ledger_remove(Permits* permits, uint32_t entry) noexcept nogil:
    cdef Holding* holding = permits.holdings + entry
    cdef Permit* permit = permit_at(permits, holding.record)
    cdef Holder* holder = permits.holders + holding.connection
    index_remove(&permits.ledger, ledger_tag(holding.connection, permit.record.tag), entry)
    list_remove(holdings_by_connection(permits), &holder.first, entry)
    list_remove(holdings_by_record(permits), &permit.holders, entry)
    holder.holdings -= 1
    if permits.state.cursor == entry:
        permits.state.cursor = holding.of_record.next
    holding.connection = 0
    pool_put(&permits.state.holdings, &permits.holdings.of_connection, sizeof(Holding), entry)


# ---- permits that exist as long as somebody holds any of them ------------------------------------------------------

cdef inline uint32_t permit_hold(
    Permits* permits, uint32_t connection, uint32_t tag, const uint8_t* name, uint32_t size, uint32_t since_tenths
) noexcept nogil:
    """Makes the connection hold one more of the named permit. Creates the permit if it does not exist.

    Returns the holding, or 0 if there is no room for the permit or the holding.
    """
    cdef uint32_t number = table_find(&permits.table, tag, name, size)
    cdef uint32_t entry = ledger_find(permits, connection, number, tag) if number else 0
    if entry == 0:
        if ledger_is_full(permits, connection):
            return 0
        if number == 0:
            if pool_left(permits.table.pool) == 0:
                return 0
            if pool_left(permits.table.chains.pool) < name_blocks(&permits.table, size):
                return 0
            number = table_insert(&permits.table, tag, name, size)
            permit_at(permits, number).consumption = 0
            permit_at(permits, number).holders = 0
        ledger_add(permits, connection, number, 0, since_tenths)
        entry = permit_at(permits, number).holders
    permits.holdings[entry].amount += 1
    permit_at(permits, number).consumption += 1
    return entry


cdef inline void permit_drop(Permits* permits, uint32_t entry) noexcept nogil:
    """Ends a holding. The permit ends with its last holding."""
    cdef uint32_t number = permits.holdings[entry].record
    cdef Permit* permit = permit_at(permits, number)
    permit.consumption -= permits.holdings[entry].amount
    ledger_remove(permits, entry)
    if permit.consumption == 0:
        table_remove(&permits.table, number)


cdef inline uint32_t permit_consumption(
    const Permits* permits, uint32_t tag, const uint8_t* name, uint32_t size
) noexcept nogil:
    """Returns how many of the named permit are held. Returns 0 if the permit does not exist."""
    cdef uint32_t number = table_find(&permits.table, tag, name, size)
    return permit_at(permits, number).consumption if number else 0


# ---- give-back -----------------------------------------------------------------------------------------------------

cdef inline bint permits_leave(Permits* permits, uint32_t connection) noexcept nogil:
    """Queues the holdings of an ended connection, so that they are given back. The number of the connection is free
    again after its last holding.

    Returns False if the connection has no holdings; its number is then free immediately.
    """
    cdef PermitsState* state = permits.state
    cdef Holder* holder = permits.holders + connection
    if holder.holdings == 0:
        connections_put(permits.connections, connection)
        return False
    holder.next = 0
    if state.leaving_last:
        permits.holders[state.leaving_last].next = connection
    else:
        state.leaving_first = connection
    state.leaving_last = connection
    state.leaving_holdings += holder.holdings
    return True


cdef inline uint32_t permits_next_left(Permits* permits) noexcept nogil:
    """Returns a holding of the first connection in the queue, which the caller must end.

    Returns 0 if no holdings remain.
    """
    cdef PermitsState* state = permits.state
    cdef uint32_t connection = state.leaving_first
    while connection and permits.holders[connection].first == 0:
        state.leaving_first = permits.holders[connection].next
        if state.leaving_first == 0:
            state.leaving_last = 0
        connections_put(permits.connections, connection)
        connection = state.leaving_first
    if connection == 0:
        return 0
    state.leaving_holdings -= 1
    state.given_back += 1
    return permits.holders[connection].first


cdef inline int permits_give_back(Permits* permits, int steps) noexcept nogil:
    """Ends holdings of ended connections, in the order in which the connections ended.

    Returns how many of the steps remain.
    """
    cdef uint32_t entry
    while steps > 0:
        entry = permits_next_left(permits)
        if entry == 0:
            break
        steps -= 1
        permit_drop(permits, entry)
    return steps


# ---- walks along the holders of a permit, between whose steps other requests are served ----------------------------

cdef inline uint64_t walk_begin(Permits* permits, uint32_t number) noexcept nogil:
    """Sets the cursor to the first holder. Returns the ticket of the walk. A later walk takes the cursor over."""
    permits.state.cursor = permit_at(permits, number).holders if number else 0
    permits.state.walks += 1
    return permits.state.walks
