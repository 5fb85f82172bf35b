# Store.audit: a walk through a whole region that raises AssertionError at the first broken invariant; and one through
# a wheel of timers.
#
# Floor 1, inlined into _core.pyx and into whoever has a wheel. For tests and for whoever suspects memory: it takes as
# long as the region is large. The simulation calls it at every step, so what is wrong is worded
# only when it is.

from libc.stdint cimport uint8_t, uint32_t, uint64_t

from counterd._core cimport (
    FLAG_IN_RING, Connection, Counter, Header, Holding, Region, counter_at, counter_exists, ledger_find,
)
from counterd._table cimport (
    RECORD_USED, Block, Chain, Index, Pool, Record, Table, index_home, name_blocks, name_chain,
)
from counterd._wheel cimport (
    CHAIN_FIRST, CHAINS, LEVEL_SHIFT, SLOT_MASK, SLOTS, Timer, Timers, Wheel, slot_is_used, tick_from_ns, timer_at,
    timer_is_armed, wheel_start,
)


cdef inline int audit_index(const Index* index, Pool* pool, str what) except -1:
    """Every entry can be reached from its home, and as many are used and displaced as the state says."""
    cdef uint64_t slot, step
    cdef uint32_t used = 0, displaced = 0, home
    for slot in range(<uint64_t>index.mask + 1):
        if index.entries[slot].number == 0:
            continue
        if index.entries[slot].number > pool.fresh:
            raise AssertionError(f"{what}: slot {slot} names a cell never handed out")
        used += 1
        home = index_home(index, index.entries[slot].tag)
        displaced += home != slot
        step = home
        while step != slot:
            if index.entries[step].number == 0:
                raise AssertionError(f"{what}: slot {slot} cannot be reached from its home {home}")
            step = (step + 1) & index.mask
    if not (used == index.state.used == pool.used):
        raise AssertionError(f"{what}: {used} used, {index.state.used} counted, {pool.used} cells")
    if displaced != index.state.displaced:
        raise AssertionError(f"{what}: {displaced} displaced, {index.state.displaced} counted")
    return 0


cdef inline bint chain_ends(const Table* table, const Chain* chain, uint32_t blocks) noexcept:
    """Whether so many blocks lead to its last."""
    cdef uint32_t block = chain.first, _step
    for _step in range(blocks - 1):
        block = table.blocks[block].next
    return block == chain.last and table.blocks[block].next == 0


cdef inline uint32_t audit_name(const Table* table, Record* record, uint32_t number) except? 0xffffffff:
    """Returns how many blocks the name has."""
    cdef uint32_t blocks = name_blocks(table, record.name_size)
    if blocks and not chain_ends(table, name_chain(table, record), blocks):
        raise AssertionError(f"the name of record {number} ends in the wrong block")
    return blocks


cdef inline int audit_counter(Region* region, uint32_t number, Counter* counter) except -1:
    cdef uint32_t entry = counter.holders, previous = 0
    cdef uint64_t held = 0
    cdef Holding* holding
    while entry:
        holding = region.holdings + entry
        if holding.record != number:
            raise AssertionError(f"holding {entry} is listed under record {number}, names {holding.record}")
        if holding.amount == 0:
            raise AssertionError(f"holding {entry} is of nothing")
        if holding.prev_of_record != previous:
            raise AssertionError(f"holding {entry} has a wrong predecessor on its record")
        if ledger_find(region, holding.connection, number, counter.record.tag) != entry:
            raise AssertionError(f"holding {entry} is not found through the ledger's index")
        held += holding.amount
        previous = entry
        entry = holding.next_of_record
    if held != counter.consumption:
        raise AssertionError(f"record {number}: consumption {counter.consumption}, held {held}")
    if counter.consumption == 0 and not counter.record.flags & FLAG_IN_RING:
        raise AssertionError(f"record {number} is idle, not in the ring")
    return 0


cdef inline int audit_pool(const Pool* pool, const void* links, size_t cell_size, str what) except -1:
    """What is free adds up to what is not in use, and no cell is free twice. links: as for pool_take()."""
    cdef uint32_t number = pool.free, left = pool.fresh - pool.used
    if pool.used > pool.fresh or pool.fresh > pool.capacity:
        raise AssertionError(f"{what}: {pool.used} used, {pool.fresh} handed out, {pool.capacity} in all")
    while number and left:
        if number > pool.fresh:
            raise AssertionError(f"{what}: {number} is free, and was never handed out")
        left -= 1
        number = (<const uint32_t*>(<const uint8_t*>links + number * cell_size))[0]
    if number or left:
        raise AssertionError(f"{what}: the free list ends {left} too early, or at {number} does not end")
    return 0


cdef inline int audit_ring(Region* region) except -1:
    """Each record that says it is in the ring is there, once; audit_region() has seen that they are as many."""
    cdef Header* header = region.header
    cdef uint32_t i, number
    cdef uint64_t listed = 0, flagged = 0
    for i in range(header.ring_size):
        number = region.ring[(header.ring_head + <uint64_t>i) % header.records.capacity]
        if not 0 < number <= header.records.fresh or not counter_at(region, number).record.flags & FLAG_IN_RING:
            raise AssertionError(f"the ring has record {number}, which does not know of it")
        listed += <uint64_t>number * number
    for number in range(1, header.records.fresh + 1):
        if counter_at(region, number).record.flags & FLAG_IN_RING:
            flagged += <uint64_t>number * number
    if listed != flagged or header.sweep_left > header.ring_size:
        raise AssertionError(f"the ring, of {header.ring_size}, has one twice, or {header.sweep_left} are to be swept")
    return 0


cdef inline int audit_leaving(Region* region) except -1:
    """The queue of those to give back ends with its last, and has as many holdings as are counted."""
    cdef Header* header = region.header
    cdef uint32_t number = header.leaving_first, last = 0, left = header.connections.used
    cdef uint64_t holdings = 0
    while number and left:
        left -= 1
        holdings += region.connections[number].holdings
        last = number
        number = region.connections[number].next
    if number or last != header.leaving_last or holdings != header.leaving_holdings:
        raise AssertionError(f"{holdings} holdings are leaving, {header.leaving_holdings} counted; last is {last}")
    return 0


cdef inline int audit_region(Region* region, uint32_t blocks) except -1:
    """blocks: how many the room has in chains of its own."""
    cdef Header* header = region.header
    cdef uint32_t number, entry, previous, count, used = 0, busy = 0, idle = 0, flagged = 0, listed = 0
    cdef Counter* counter
    audit_index(&region.names.index, &header.records, "name index")
    audit_index(&region.ledger, &header.holdings, "ledger index")
    for number in range(1, header.records.fresh + 1):
        counter = counter_at(region, number)
        if not counter.record.flags & RECORD_USED:
            continue
        used += 1
        busy += counter.consumption != 0
        idle += counter.consumption == 0 and counter_exists(region, counter)
        flagged += counter.record.flags & FLAG_IN_RING
        blocks += audit_name(&region.names, &counter.record, number)
        audit_counter(region, number, counter)
    if used != header.records.used:
        raise AssertionError(f"{used} records, {header.records.used} counted")
    if busy != header.busy or idle != header.idle:
        raise AssertionError(f"{busy} busy and {idle} idle, {header.busy} and {header.idle} counted")
    if flagged != header.ring_size:
        raise AssertionError(f"{flagged} records say they are in the ring, which has {header.ring_size}")
    if blocks != header.blocks.used:
        raise AssertionError(f"{blocks} blocks of names, {header.blocks.used} counted")
    for number in range(1, header.connections.fresh + 1):
        entry = region.connections[number].first
        previous = 0
        count = 0
        while entry:
            if region.holdings[entry].connection != number:
                raise AssertionError(f"holding {entry} is listed under connection {number}")
            if region.holdings[entry].prev_of_connection != previous:
                raise AssertionError(f"holding {entry} has a wrong predecessor")
            count += 1
            previous = entry
            entry = region.holdings[entry].next_of_connection
        if count != region.connections[number].holdings:
            raise AssertionError(f"connection {number} has {count} holdings")
        listed += count
    if listed != header.holdings.used:
        raise AssertionError(f"{listed} holdings listed, {header.holdings.used} counted")
    audit_ring(region)
    audit_leaving(region)
    audit_pool(
        &header.records, &name_chain(&region.names, <Record*>region.names.records).first, sizeof(Counter), "records"
    )
    audit_pool(&header.holdings, &region.holdings.next_of_connection, sizeof(Holding), "holdings")
    audit_pool(&header.blocks, &region.names.blocks.next, sizeof(Block), "blocks")
    audit_pool(&header.connections, &region.connections.next, sizeof(Connection), "connections")
    return 0


cdef inline int audit_chain(const Timers* timers, uint32_t chain, uint32_t last) except -1:
    """How many records are in it, none of which will be come across too late."""
    cdef const Wheel* wheel = timers.wheel
    cdef uint32_t number = wheel.heads[chain], previous = CHAIN_FIRST | chain, slot = chain // CHAINS
    cdef bint is_next = slot == <uint32_t>(wheel.elapsed & SLOT_MASK) or wheel.cascading and slot == wheel.cascading
    cdef uint64_t start = wheel_start(wheel, slot), tick
    cdef const Timer* timer
    cdef int count = 0
    if number and not is_next and start <= wheel.elapsed:
        raise AssertionError(f"slot {slot} is in use, and has been passed")
    while number:
        if number > last:
            raise AssertionError(f"chain {chain} has record {number}, of {last}")
        timer = timer_at(timers, number)
        if timer.prev != previous:
            raise AssertionError(f"timer {number} in slot {slot} has a wrong predecessor, {timer.prev:#x}")
        tick = tick_from_ns(timer.due_ns)
        if not is_next and start > tick:
            raise AssertionError(f"timer {number} of tick {tick} is in slot {slot}, which begins at {start}")
        if number % CHAINS != chain % CHAINS:
            raise AssertionError(f"timer {number} is in chain {chain}, which is another's")
        count += 1
        if <uint32_t>count > wheel.armed:
            raise AssertionError(f"chain {chain} has more than the {wheel.armed} that are armed")
        previous = number
        number = timer.next
    return count


cdef inline int audit_timers(const Timers* timers, uint32_t last) except -1:
    """The records are 1 to `last`. What is armed is in a slot, and once: a timer has but one predecessor."""
    cdef const Wheel* wheel = timers.wheel
    cdef uint32_t number, armed = 0, listed = 0, count
    cdef int slot, chain
    if wheel.cascading and not SLOT_MASK < wheel.cascading < SLOTS:
        raise AssertionError(f"slot {wheel.cascading} cannot cascade")
    if wheel.cascading and wheel_start(wheel, wheel.cascading) != wheel.elapsed:
        raise AssertionError(f"slot {wheel.cascading} cascades, and does not begin at {wheel.elapsed}")
    for slot in range(SLOTS):
        count = 0
        for chain in range(CHAINS):
            count += audit_chain(timers, <uint32_t>(slot * CHAINS + chain), last)
        if slot_is_used(wheel, <uint32_t>slot) != (count != 0):
            raise AssertionError(f"slot {slot}: its bit is wrong, it has {count}")
        listed += count
    for number in range(1, last + 1):
        armed += timer_is_armed(timer_at(timers, number))
    if not (armed == listed == wheel.armed):
        raise AssertionError(f"{armed} timers are armed, {listed} listed, {wheel.armed} counted")
    return 0
