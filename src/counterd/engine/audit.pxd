# Checks for Store.audit: each walks through a part of a store and raises AssertionError at the first broken invariant.
#
# Floor 1, inlined into every store. For tests and for debugging: an audit reads the whole region. The simulation calls
# it at every step, so messages are formatted only on failure.

from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t

from counterd.engine.chains cimport Block, Chain, Chains
from counterd.engine.connections cimport Connections
from counterd.engine.heap cimport Heap, Node, heap_after, node_at, node_is_before, node_spine
from counterd.engine.idle_ring cimport FLAG_IN_RING, Ring
from counterd.engine.list cimport Links, List, links_at
from counterd.engine.permits cimport (
    Holding, Permit, Permits, holdings_by_connection, holdings_by_record, ledger_find, permit_at,
)
from counterd.engine.pool cimport Pool
from counterd.engine.table cimport (
    RECORD_USED, Index, Record, Table, index_home, name_blocks, name_chain, record_at,
)
from counterd.engine.wheel cimport (
    CHAIN_FIRST, CHAINS, LEVEL_SHIFT, SLOT_MASK, SLOTS, Timer, Timers, Wheel, slot_is_used, tick_from_ns, timer_at,
    timer_is_armed, wheel_start,
)


cdef inline int audit_index(const Index* index, Pool* pool, str what, uint32_t unlisted=0) except -1:
    """Checks that every entry can be reached from its home slot, and checks the counts of used and displaced entries.

    unlisted: the number of cells of the pool that are in use but not in the index.
    """
    cdef uint64_t slot, step
    cdef uint32_t used = 0, displaced = 0, home
    for slot in range(<uint64_t>index.mask + 1):
        if index.entries[slot].number == 0:
            continue
        if index.entries[slot].number > pool.fresh:
            raise AssertionError(f"{what}: slot {slot} names a cell that was never handed out")
        used += 1
        home = index_home(index, index.entries[slot].tag)
        displaced += home != slot
        step = home
        while step != slot:
            if index.entries[step].number == 0:
                raise AssertionError(f"{what}: slot {slot} cannot be reached from its home {home}")
            step = (step + index.step) & index.mask
    if not (used == index.state.used == pool.used - unlisted):
        raise AssertionError(f"{what}: {used} used, {index.state.used} counted, {pool.used} cells")
    if displaced != index.state.displaced:
        raise AssertionError(f"{what}: {displaced} displaced, {index.state.displaced} counted")
    return 0


cdef inline bint chain_ends(const Chains* chains, const Chain* chain, uint32_t blocks) noexcept:
    """Returns whether the chain has `blocks` blocks and ends at its last block."""
    cdef uint32_t block = chain.first, _step
    for _step in range(blocks - 1):
        block = chains.blocks[block].next
    return block == chain.last and chains.blocks[block].next == 0


cdef inline uint32_t audit_name(const Table* table, Record* record, uint32_t number) except? 0xffffffff:
    """Checks the chain of a long name. Returns how many blocks the chain has."""
    cdef uint32_t blocks = name_blocks(table, record.name_size)
    if blocks and not chain_ends(&table.chains, name_chain(table, record), blocks):
        raise AssertionError(f"the name of record {number} ends in the wrong block")
    return blocks


cdef inline uint32_t audit_list(List list, uint32_t first, const uint32_t* last, uint32_t highest) except? 0xffffffff:
    """Checks that the links of a list agree in both directions, which no circle does. Returns the length of the list.

    last: where the last record is stored; or NULL. highest: the highest number of a record.
    """
    cdef uint32_t number = first, previous = 0, count = 0
    cdef const Links* own
    while number:
        if number > highest:
            raise AssertionError(f"list {first}: {number} is not a record")
        own = links_at(list, number)
        if own.prev != previous:
            raise AssertionError(f"list {first}: {number} follows {previous}, but names {own.prev} as the one before")
        count += 1
        previous = number
        number = own.next
    if last != NULL and last[0] != previous:
        raise AssertionError(f"list {first}: the last record is {previous}, not {last[0]}")
    return count


cdef inline int audit_pool(const Pool* pool, const void* links, size_t cell_size, str what) except -1:
    """Checks that used and free cells add up, and that no cell is free twice. links: as for pool_take()."""
    cdef uint32_t number = pool.free, left = pool.fresh - pool.used
    if pool.used > pool.fresh or pool.fresh > pool.capacity:
        raise AssertionError(f"{what}: {pool.used} used, {pool.fresh} handed out, {pool.capacity} in all")
    while number and left:
        if number > pool.fresh:
            raise AssertionError(f"{what}: cell {number} is free, but was never handed out")
        left -= 1
        number = (<const uint32_t*>(<const uint8_t*>links + number * cell_size))[0]
    if number or left:
        raise AssertionError(f"{what}: the free list ends {left} cells too early, or does not end at {number}")
    return 0


cdef inline uint32_t audit_table(const Table* table, str what, uint32_t unlisted=0) except? 0xffffffff:
    """Checks the index, the pool and the names of a table. Returns how many blocks the names have.

    unlisted: the number of records that are in use but not in the index.
    """
    cdef uint32_t number, used = 0, blocks = 0
    audit_index(&table.index, table.pool, f"{what} index", unlisted)
    audit_pool(table.pool, &name_chain(table, <Record*>table.records).first, table.record_size, what)
    for number in range(1, table.pool.fresh + 1):
        if record_at(table, number).flags & RECORD_USED:
            used += 1
            blocks += audit_name(table, record_at(table, number), number)
    if used != table.pool.used:
        raise AssertionError(f"{what}: {used} records, {table.pool.used} counted")
    return blocks


cdef inline int audit_chains(const Chains* chains, uint32_t blocks) except -1:
    """Checks that `blocks` blocks are in use, and that each other block is free exactly once."""
    if blocks != chains.pool.used:
        raise AssertionError(f"{blocks} blocks of names and values, {chains.pool.used} counted")
    return audit_pool(chains.pool, &chains.blocks.next, sizeof(Block), "blocks")


cdef inline int audit_connections(const Connections* connections) except -1:
    return audit_pool(connections.pool, connections.links, sizeof(uint32_t), "connections")


cdef inline int audit_permit(const Permits* permits, uint32_t number) except -1:
    """Checks that the ledger finds each holding of a permit, and that the holdings add up to the permit's
    consumption."""
    cdef const Permit* permit = permit_at(permits, number)
    cdef uint32_t entry = permit.holders
    cdef uint64_t held = 0
    cdef const Holding* holding
    audit_list(holdings_by_record(permits), entry, NULL, permits.state.holdings.fresh)
    while entry:
        holding = permits.holdings + entry
        if holding.record != number:
            raise AssertionError(f"holding {entry} is listed under record {number}, names {holding.record}")
        if holding.amount == 0:
            raise AssertionError(f"holding {entry} belongs to no record")
        if ledger_find(permits, holding.connection, number, permit.record.tag) != entry:
            raise AssertionError(f"holding {entry} is not found through the ledger's index")
        held += holding.amount
        entry = holding.of_record.next
    if held != permit.consumption:
        raise AssertionError(f"record {number}: consumption {permit.consumption}, held {held}")
    return 0


cdef inline uint32_t audit_holder(const Permits* permits, uint32_t connection) except? 0xffffffff:
    """Checks a connection's list of holdings. Returns its length."""
    cdef uint32_t entry = permits.holders[connection].first
    cdef uint32_t count = audit_list(holdings_by_connection(permits), entry, NULL, permits.state.holdings.fresh)
    while entry:
        if permits.holdings[entry].connection != connection:
            raise AssertionError(f"holding {entry} is listed under connection {connection}")
        entry = permits.holdings[entry].of_connection.next
    if count != permits.holders[connection].holdings:
        raise AssertionError(f"connection {connection} has {count} holdings")
    return count


cdef inline int audit_leavers(const Permits* permits) except -1:
    """Checks the end of the queue of ended connections, and the count of their holdings."""
    cdef uint32_t number = permits.state.leaving_first, last = 0, remaining = permits.connections.pool.used
    cdef uint64_t holdings = 0
    while number and remaining:
        remaining -= 1
        holdings += permits.holders[number].holdings
        last = number
        number = permits.holders[number].next
    if number or last != permits.state.leaving_last or holdings != permits.state.leaving_holdings:
        raise AssertionError(
            f"{holdings} holdings are leaving, {permits.state.leaving_holdings} counted; last is {last}"
        )
    return 0


cdef inline uint32_t audit_permits(const Permits* permits) except? 0xffffffff:
    """Checks the permits, the ledger and the queue of ended connections.

    Returns how many blocks the names of the permits have.
    """
    cdef uint32_t number, listed = 0, blocks = audit_table(&permits.table, "permits")
    audit_index(&permits.ledger, &permits.state.holdings, "ledger index")
    for number in range(1, permits.table.pool.fresh + 1):
        if permit_at(permits, number).record.flags & RECORD_USED:
            audit_permit(permits, number)
    for number in range(1, permits.connections.pool.fresh + 1):
        listed += audit_holder(permits, number)
    if listed != permits.state.holdings.used:
        raise AssertionError(f"{listed} holdings listed, {permits.state.holdings.used} counted")
    audit_leavers(permits)
    audit_pool(&permits.state.holdings, &permits.holdings.of_connection, sizeof(Holding), "holdings")
    audit_connections(permits.connections)
    return blocks


cdef inline int audit_ring(const Ring* ring, const Table* table) except -1:
    """Checks that the ring contains exactly the records with FLAG_IN_RING, and each of them once."""
    cdef uint32_t i, number, count = 0
    cdef uint64_t listed = 0, flagged = 0
    for i in range(ring.state.size):
        number = ring.numbers[(ring.state.head + <uint64_t>i) % ring.state.capacity]
        if not 0 < number <= table.pool.fresh or not record_at(table, number).flags & FLAG_IN_RING:
            raise AssertionError(f"the ring contains record {number}, but the record does not have the flag")
        listed += <uint64_t>number * number
    for number in range(1, table.pool.fresh + 1):
        if record_at(table, number).flags & FLAG_IN_RING:
            count += 1
            flagged += <uint64_t>number * number
    if count != ring.state.size:
        raise AssertionError(f"{count} records have the flag of the ring, but the ring has {ring.state.size}")
    if listed != flagged or ring.state.sweep_left > ring.state.size:
        raise AssertionError(
            f"the ring of {ring.state.size} records has one of them twice, or {ring.state.sweep_left} records are "
            "left to sweep"
        )
    return 0


cdef inline int audit_chain(const Timers* timers, uint32_t chain, uint32_t last) except -1:
    """Checks that no record of a chain would be taken too late. Returns how many records the chain has."""
    cdef const Wheel* wheel = timers.wheel
    cdef uint32_t number = wheel.heads[chain], previous = CHAIN_FIRST | chain, slot = chain // CHAINS
    cdef bint is_next = slot == <uint32_t>(wheel.elapsed & SLOT_MASK) or wheel.cascading and slot == wheel.cascading
    cdef uint64_t start = wheel_start(wheel, slot), tick
    cdef const Timer* timer
    cdef int count = 0
    if number and not is_next and start <= wheel.elapsed:
        raise AssertionError(f"slot {slot} is in use, but the time has passed it")
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
            raise AssertionError(f"timer {number} is in chain {chain}, but belongs to another chain")
        count += 1
        if <uint32_t>count > wheel.armed:
            raise AssertionError(f"chain {chain} has more timers than the {wheel.armed} that are armed")
        previous = number
        number = timer.next
    return count


cdef inline int audit_timers(const Timers* timers, uint32_t last) except -1:
    """Checks the timers of the records 1 to `last`.

    Each armed timer is in exactly one slot, because a timer has one predecessor.
    """
    cdef const Wheel* wheel = timers.wheel
    cdef uint32_t number, armed = 0, listed = 0, count
    cdef int slot, chain
    if wheel.cascading and not SLOT_MASK < wheel.cascading < SLOTS:
        raise AssertionError(f"slot {wheel.cascading} cannot cascade")
    if wheel.cascading and wheel_start(wheel, wheel.cascading) != wheel.elapsed:
        raise AssertionError(f"slot {wheel.cascading} cascades, but does not begin at {wheel.elapsed}")
    for slot in range(SLOTS):
        count = 0
        for chain in range(CHAINS):
            count += audit_chain(timers, <uint32_t>(slot * CHAINS + chain), last)
        if slot_is_used(wheel, <uint32_t>slot) != (count != 0):
            raise AssertionError(f"slot {slot}: its bit is wrong, because it has {count} timers")
        listed += count
    for number in range(1, last + 1):
        armed += timer_is_armed(timer_at(timers, number))
    if not (armed == listed == wheel.armed):
        raise AssertionError(f"{armed} timers are armed, {listed} listed, {wheel.armed} counted")
    return 0


cdef inline int64_t audit_heap(const Heap* heap, uint32_t first, uint32_t last) except -1:
    """Checks the order, links and spines of a heap's nodes, whose numbers are 1 to `last`.

    Returns how many nodes the heap has.
    """
    cdef uint32_t number = first, child
    cdef int64_t count = 0
    cdef const Node* node
    if first and (first > last or node_at(heap, first).parent != 0):
        raise AssertionError(f"heap {first}: the first node is not a record, or has a parent")
    while number:
        count += 1
        if count > last:
            raise AssertionError(f"heap {first}: the links form a circle")
        node = node_at(heap, number)
        for child in (node.left, node.right):
            if child == 0:
                continue
            if child > last or node_at(heap, child).parent != number:
                raise AssertionError(f"heap {first}: {child} is not a child of {number}")
            if node_is_before(node_at(heap, child), node):
                raise AssertionError(f"heap of {first}: the order says {child} before {number}, its parent")
        if node.left == node.right and node.left:
            raise AssertionError(f"heap {first}: {number} has the same child twice")
        if node_spine(heap, node.left) < node_spine(heap, node.right):
            raise AssertionError(f"heap {first}: {number} leans to the right")
        if node.spine != node_spine(heap, node.right) + 1:
            raise AssertionError(f"heap {first}: {number} has a spine of {node.spine}")
        number = heap_after(heap, number)
    return count
