# The engine: one region of memory with a table of named counters, and the ledger of who holds what; Session and Store.
#
# Floor 1. No asyncio, no clock, no file, no logger. What other Cython modules must inline has its body here; the rest
# is in _core.pyx. Names, index and pools are in _table.pxd.
#
# The region (docs/ARCHITECTURE.md, "Memory") is one mapping, and nothing inside it is a pointer: records, holdings,
# name blocks and connections are numbered from 1, and 0 means none, so that zeroed pages are an empty store.
#
#   header | name index | ledger index | counters | holdings | name blocks | ring | connections | what the room adds
#
# Invariants (`Store.audit` checks each):
# - a counter's consumption is the sum of the amounts of its holdings;
# - every counter with consumption 0 is in the ring of idle counters, at most once (FLAG_IN_RING), or gone where the
#   region keeps none (drops_idle);
# - limits subtract, they never add: `consumption > maximum - resources`, because sums wrap.

from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t

from counterd._table cimport (
    Index, IndexState, Pool, Record, Table, index_home, index_insert, index_remove, pool_put, pool_take, table_find,
    table_remove,
)
from counterd.debug cimport debug_check

cdef enum:
    NAME_INLINE = 36        # bytes of a name in its counter: 64 - 8 (head) - 20 (counter)
    FRAMES_AHEAD = 64       # frames parsed ahead: their cache lines arrive while the rest is parsed
    OUTPUT_MAX = 262144     # replies gathered in one piece before the rest of the input has to wait, plus one reply
    REPLY_MAX = 65573       # the longest: a Dump entry of a name of 65,535 bytes, 12 + 10 + 65,535 + 4, and its end, 12
    RECLAIM_STEPS = 64      # ring entries that one request may look at
    SLICE_STEPS = 2048      # holdings given back or ring entries swept per tick; at most 250 ns each
    TURN_STEPS = 4096       # work of all sessions together before one has to wait for its turn; a step is some 40 ns
    TURN_NS = 1000000       # after which they have that many again, turn or not
    GRACE_STEPS = 128       # of one call when all are used up, so that only Stats, Dump and much input ever wait
    FRAME_STEP_SHIFT = 6    # a frame is a step, and one more for each 64 bytes that have to be hashed and copied
    DONE = 0                # what execute_frame returns
    LATER = 1               # nothing was done: too much for this call
    CONNECTIONS_MAX = 1048576  # the default of fs.nr_open, Linux's bound for the files of a process
    FLAG_IN_RING = 1

# What acquire, release and get answer. Rooms have their own numbers on the wire.
cdef enum Outcome:
    GRANTED = 0
    ABSENT = 1              # no such counter
    REFUSED = 2             # not enough left
    NOT_HELD = 3            # this connection holds less
    FULL = 4                # no record, name memory or holding left


cdef struct Counter:        # 64 bytes, one cache line
    Record record
    uint8_t name[NAME_INLINE]
    uint32_t consumption
    uint32_t limit          # the maximum that the last acquire gave, granted or not; only shown, never compared with
    uint32_t peak           # the largest consumption in `window`
    uint32_t window         # number of the stats window of the last acquire or release
    uint32_t holders        # first holding


cdef struct Holding:        # 32 bytes
    uint32_t connection     # 0 = free
    uint32_t record
    uint32_t amount
    uint32_t since          # tenths of a second on the caller's monotonic clock
    uint32_t next_of_connection  # also links the free list
    uint32_t prev_of_connection
    uint32_t next_of_record
    uint32_t prev_of_record


cdef struct Connection:     # 16 bytes
    uint32_t first          # holding
    uint32_t holdings
    uint32_t next           # in the queue of those to give back, or on the free list
    uint32_t spare


cdef struct Header:
    uint64_t key[2]         # of SipHash
    IndexState names
    IndexState ledger
    Pool records
    Pool holdings
    Pool blocks
    Pool connections
    uint32_t window         # number of the current stats window
    uint32_t holdings_per_connection
    uint32_t busy           # counters with consumption > 0
    uint32_t idle           # counters with consumption 0, last used in the current window
    uint32_t ring_head
    uint32_t ring_size
    uint32_t sweep_left     # ring entries the sweep has yet to look at
    uint32_t leaving_first  # connections whose holdings are to be given back, in the order they left
    uint32_t leaving_last
    uint32_t leaving_holdings
    int64_t sweep_started_ns
    uint64_t created        # counters, ever
    uint64_t reclaimed      # idle counters that made room for another
    uint64_t expired        # idle counters freed by the sweep after their window had turned
    uint64_t given_back     # holdings of connections that had gone
    uint64_t sweeps
    uint64_t last_sweep_us
    uint64_t total_sweep_us


cdef struct Region:         # this process's view of the mapping
    Header* header
    Table names             # of the counters
    Index ledger
    Holding* holdings
    uint32_t* ring
    Connection* connections
    uint8_t* extra          # what the room asked for besides
    size_t size
    int64_t budget          # steps left until the next turn; may fall below 0
    uint32_t cursor         # the next holding of a walk along a counter's holders that others' turns interrupt, or 0
    bint drops_idle         # a counter is gone as soon as nobody holds any of it


# ---- ledger --------------------------------------------------------------------------------------------------------

cdef inline Counter* counter_at(const Region* region, uint32_t number) noexcept nogil:
    debug_check(0 < number <= region.header.records.fresh)
    return <Counter*>region.names.records + number


cdef inline uint32_t ledger_tag(uint32_t connection, uint32_t tag) noexcept nogil:
    """Of a holding, from the name's tag: known before the record is, so that both lines are fetched at once.

    Multiplication by an odd number permutes the tags, which are keyed; the connection shifts that permutation.
    """
    return <uint32_t>(((<uint64_t>tag << 32 | connection) * <uint64_t>0x9e3779b97f4a7c15) >> 32)


cdef inline uint32_t ledger_find(
    const Region* region, uint32_t connection, uint32_t record, uint32_t tag
) noexcept nogil:
    """The holding of that connection on that record, or 0."""
    cdef const Index* index = &region.ledger
    cdef uint32_t own = ledger_tag(connection, tag)
    cdef uint32_t slot = index_home(index, own)
    cdef uint32_t _step
    cdef Holding* holding
    for _step in range(index.mask + 1):
        if index.entries[slot].number == 0:
            return 0
        if index.entries[slot].tag == own:
            holding = region.holdings + index.entries[slot].number
            if holding.record == record and holding.connection == connection:
                return index.entries[slot].number
        slot = (slot + 1) & index.mask
    return 0


cdef inline bint ledger_is_full(const Region* region, uint32_t connection) noexcept nogil:
    cdef Header* header = region.header
    return (
        header.holdings.used >= header.holdings.capacity
        or region.connections[connection].holdings >= header.holdings_per_connection
    )


cdef inline void ledger_add(
    Region* region, uint32_t connection, uint32_t number, uint32_t amount, uint32_t since
) noexcept nogil:
    """Enters a holding; the caller has asked `ledger_is_full`."""
    cdef Counter* counter = counter_at(region, number)
    cdef Connection* owner = region.connections + connection
    cdef uint32_t entry = pool_take(&region.header.holdings, &region.holdings.next_of_connection, sizeof(Holding))
    cdef Holding* holding = region.holdings + entry
    debug_check(connection != 0 and entry != 0)
    holding.connection = connection
    holding.record = number
    holding.amount = amount
    holding.since = since
    holding.prev_of_connection = 0
    holding.next_of_connection = owner.first
    if owner.first:
        region.holdings[owner.first].prev_of_connection = entry
    owner.first = entry
    owner.holdings += 1
    holding.prev_of_record = 0
    holding.next_of_record = counter.holders
    if counter.holders:
        region.holdings[counter.holders].prev_of_record = entry
    counter.holders = entry
    index_insert(&region.ledger, ledger_tag(connection, counter.record.tag), entry)


cdef inline void ledger_remove(Region* region, uint32_t entry) noexcept nogil:
    cdef Holding* holding = region.holdings + entry
    cdef Counter* counter = counter_at(region, holding.record)
    cdef Connection* owner = region.connections + holding.connection
    index_remove(&region.ledger, ledger_tag(holding.connection, counter.record.tag), entry)
    if holding.prev_of_connection:
        region.holdings[holding.prev_of_connection].next_of_connection = holding.next_of_connection
    else:
        owner.first = holding.next_of_connection
    if holding.next_of_connection:
        region.holdings[holding.next_of_connection].prev_of_connection = holding.prev_of_connection
    owner.holdings -= 1
    if holding.prev_of_record:
        region.holdings[holding.prev_of_record].next_of_record = holding.next_of_record
    else:
        counter.holders = holding.next_of_record
    if holding.next_of_record:
        region.holdings[holding.next_of_record].prev_of_record = holding.prev_of_record
    if region.cursor == entry:
        region.cursor = holding.next_of_record
    holding.connection = 0
    pool_put(&region.header.holdings, &region.holdings.next_of_connection, sizeof(Holding), entry)


# ---- counters ------------------------------------------------------------------------------------------------------

cdef inline bint counter_exists(const Region* region, const Counter* counter) noexcept nogil:
    """A counter at zero whose last use lies in an earlier window is gone, whether or not the sweep has been there."""
    return counter.consumption != 0 or counter.window == region.header.window


cdef inline void counter_consume(Region* region, Counter* counter, uint32_t resources) noexcept nogil:
    """Adds to the consumption, which the caller has found to fit, and keeps the peak of the window."""
    cdef Header* header = region.header
    if counter.consumption == 0:
        header.busy += 1
        if counter.window == header.window:
            header.idle -= 1
    counter.consumption += resources
    if counter.window != header.window:
        counter.window = header.window
        counter.peak = counter.consumption
    elif counter.consumption > counter.peak:
        counter.peak = counter.consumption


cdef inline void counter_restore(Region* region, uint32_t number, uint32_t resources) noexcept nogil:
    """Takes from the consumption; at zero the counter becomes idle and enters the ring, unless it is still there."""
    cdef Header* header = region.header
    cdef Counter* counter = counter_at(region, number)
    debug_check(0 < resources <= counter.consumption)
    if counter.window != header.window:
        counter.window = header.window
        counter.peak = counter.consumption
    counter.consumption -= resources
    if counter.consumption == 0:
        header.busy -= 1
        if region.drops_idle:
            table_remove(&region.names, number)
            return
        header.idle += 1
        if not counter.record.flags & FLAG_IN_RING:
            counter.record.flags |= FLAG_IN_RING
            ring_push(region, number)


cdef inline void ring_push(Region* region, uint32_t number) noexcept nogil:
    cdef Header* header = region.header
    cdef uint32_t slot = header.ring_head + header.ring_size
    debug_check(header.ring_size < header.records.capacity)
    if slot >= header.records.capacity:
        slot -= header.records.capacity
    region.ring[slot] = number
    header.ring_size += 1


cdef uint32_t counter_create(Region* region, uint32_t tag, const uint8_t* name, uint32_t size) noexcept nogil
cdef int give_back(Region* region, int steps) noexcept nogil


cdef inline Outcome counter_acquire(
    Region* region, uint32_t connection, uint32_t tag, const uint8_t* name, uint32_t size,
    uint32_t resources, uint32_t maximum, uint32_t since
) noexcept nogil:
    """Grants `resources` of `maximum` to the connection, all or nothing. 0 < resources <= maximum."""
    cdef uint32_t number = table_find(&region.names, tag, name, size)
    cdef uint32_t entry
    cdef Counter* counter
    if number == 0:
        if ledger_is_full(region, connection):
            return FULL
        number = counter_create(region, tag, name, size)
        if number == 0:
            return FULL
        ledger_add(region, connection, number, resources, since)
        counter = counter_at(region, number)
        counter.limit = maximum
        counter_consume(region, counter, resources)
        return GRANTED
    counter = counter_at(region, number)
    counter.limit = maximum
    if counter.consumption > maximum - resources:
        return REFUSED
    entry = ledger_find(region, connection, number, tag)
    if entry:
        region.holdings[entry].amount += resources
    else:
        if ledger_is_full(region, connection):
            return FULL
        ledger_add(region, connection, number, resources, since)
    if not counter_exists(region, counter):
        region.header.created += 1
    counter_consume(region, counter, resources)
    return GRANTED


cdef inline Outcome counter_release(
    Region* region, uint32_t connection, uint32_t tag, const uint8_t* name, uint32_t size, uint32_t resources
) noexcept nogil:
    """Gives back `resources` of what this connection holds; 0 asks only whether the counter exists."""
    cdef uint32_t number = table_find(&region.names, tag, name, size)
    cdef uint32_t entry
    cdef Holding* holding
    if number == 0 or not counter_exists(region, counter_at(region, number)):
        return ABSENT
    if resources == 0:
        return GRANTED
    entry = ledger_find(region, connection, number, tag)
    if entry == 0:
        return NOT_HELD
    holding = region.holdings + entry
    if holding.amount < resources:
        return NOT_HELD
    holding.amount -= resources
    if holding.amount == 0:
        ledger_remove(region, entry)
    counter_restore(region, number, resources)
    return GRANTED


cdef inline Outcome counter_get(
    const Region* region, uint32_t tag, const uint8_t* name, uint32_t size, uint32_t* consumption
) noexcept nogil:
    cdef uint32_t number = table_find(&region.names, tag, name, size)
    if number == 0 or not counter_exists(region, counter_at(region, number)):
        return ABSENT
    consumption[0] = counter_at(region, number).consumption
    return GRANTED


# ---- sessions and stores -------------------------------------------------------------------------------------------

cdef struct Frame:          # one parsed request
    const uint8_t* data     # its first byte; valid until the call that parsed it returns
    const uint8_t* key
    uint32_t size           # of the whole frame
    uint32_t key_size       # 0 = this request names nothing
    uint32_t tag            # of the key
    uint8_t verdict         # the room's: what parsing already decided


cdef class Store:
    cdef Region region
    cdef uint8_t* out       # replies of the call under way: OUTPUT_MAX + REPLY_MAX bytes, shared by all sessions
    cdef size_t out_size
    cdef bint calling_out   # somebody else's Python code runs: sessions must not be entered
    cdef bint stirred       # tick() or take_dirty() may have become due: look at next_deadline()
    cdef list dirty             # sessions, each once
    cdef int64_t budgeted_ns    # when the region's budget was last filled
    cdef readonly uint64_t sessions_open
    cdef readonly uint64_t sessions_total
    cdef readonly uint64_t bytes_in
    cdef readonly uint64_t bytes_out
    cdef size_t posted_max
    cdef readonly uint64_t sessions_dropped

    cpdef Session session(self, int64_t now_ns=*)
    cpdef int64_t next_deadline(self)
    cpdef tick(self, int64_t now_ns)
    cpdef begin_window(self, uint32_t number)
    cpdef set_wall(self, int64_t unix_ns, int64_t now_ns)
    cdef void fill_budget(self, int64_t now_ns) noexcept
    cpdef list take_dirty(self)
    cpdef dict snapshot(self)


cdef class Session:
    cdef readonly Store store
    cdef public object owner    # whoever made the session may leave a mark here
    cdef uint8_t* kept          # input that could not be used up yet: kept_size bytes at kept_start
    cdef size_t kept_start
    cdef size_t kept_size
    cdef size_t kept_capacity
    cdef uint32_t connection    # in the region; 0 once what it held was queued to be given back
    cdef readonly uint64_t requests     # frames executed so far
    cdef uint32_t position      # of the long reply under way: the next record; 0 = none is
    cdef int64_t budget_floor   # at which this call stops
    cdef uint32_t since         # now, as the ledger counts it
    cdef readonly bint more
    cdef readonly bint closing
    cdef bint ended             # the peer has sent its last byte
    cdef readonly uint32_t awaited      # answers that are to be posted later: until then the session does not end
    cdef bint open              # closed() has not been called
    cdef list posted            # messages that wait for take_output(), posted_size bytes; or None
    cdef size_t posted_size
    cdef readonly bint dropped
    cdef bint is_dirty          # in the store's list
    cdef bint blocked           # the caller waits for the peer to read

    cpdef bytes receive(self, bytes data, int64_t now_ns)
    cpdef bytes take_output(self, int64_t now_ns)
    cpdef bytes eof(self, int64_t now_ns)
    cpdef closed(self, int64_t now_ns)
    cpdef wait(self)

    cdef Py_ssize_t parse_frame(self, const uint8_t* data, size_t size, Frame* frame) noexcept
    cdef void prefetch_frames(self, const Frame* frames, int count) noexcept
    cdef int execute_frame(self, const Frame* frame) except -1
    cdef int produce(self) except -1

    cdef bint can_post(self, size_t size) noexcept
    cdef int post(self, bytes message) except -1
    cdef int drop_overdue(self) except -1
    cdef int tell_dirty(self) except -1
    cdef bytes take_posted(self)
    cdef int begin_call(self, int64_t now_ns) except -1
    cdef bytes end_call(self)
    cdef bint is_stopped(self) noexcept
    cdef size_t run(self, const uint8_t* data, size_t size) except? 0
    cdef size_t complete_kept(self, const uint8_t* data, size_t size) except? 0
    cdef int run_kept(self) except -1
    cdef int keep(self, const uint8_t* data, size_t size) except -1
    cdef bint has_request(self) noexcept
    cdef void leave(self) noexcept
    cdef void drop_kept(self) noexcept
    cdef void detach(self) noexcept
