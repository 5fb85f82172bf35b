"""The engine: the region, the table's slow paths, and the Session and Store that every room builds on.

Floor 1. Sans-I/O: bytes and the time come in, bytes come out. A peer can cause replies and closes, never an exception;
an exception out of here is a bug of ours. Structures and everything inlined are in _core.pxd, with their invariants.
"""

cimport cython
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from cpython.mem cimport PyMem_RawFree, PyMem_RawMalloc, PyMem_RawRealloc
from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t
from libc.string cimport memcpy, memmove
from posix.mman cimport MAP_ANONYMOUS, MAP_FAILED, MAP_NORESERVE, MAP_PRIVATE, PROT_READ, PROT_WRITE, mmap, munmap

from counterd._audit cimport audit_region
from counterd._table cimport (
    BLOCK_SIZE, Block, IndexEntry, index_map, name_blocks, name_bytes, name_tag, pool_left, pool_put, pool_take,
    table_find, table_insert, table_remove,
)
from counterd.byteorder cimport load_le64
from counterd.debug cimport COUNTERD_DEBUG_BUILD, debug_check
from counterd.siphash cimport siphash13

DEBUG = bool(COUNTERD_DEBUG_BUILD)

LIMIT_CONNECTIONS = CONNECTIONS_MAX

cdef enum:
    PAGE = 4096
    PARTS = 9                   # of a region
    INDEX_BITS_MAX = 31         # a slot number is the top bits of a 32-bit tag; one bit is left to tell names apart
    KEPT_MIN = 64               # the first piece of input that is kept, and the smallest tried again
    NS_PER_TENTH = 100000000


# ---- region --------------------------------------------------------------------------------------------------------

cdef int index_bits(uint64_t entries) noexcept:
    """Two slots for each entry at least, and never fewer than two."""
    cdef int bits = 1
    while (<uint64_t>1 << bits) < 2 * entries:
        bits += 1
    return bits


cdef size_t page_round(size_t size) noexcept:
    return (size + PAGE - 1) // PAGE * PAGE


cdef int region_create(
    Region* region, bytes key, uint32_t records, uint32_t holdings, uint32_t blocks, size_t extra
) except -1:
    """Maps the one region of a store. Its pages cost memory from their first use on."""
    cdef int name_bits = index_bits(records)
    cdef int ledger_bits = index_bits(holdings)
    if name_bits > INDEX_BITS_MAX or ledger_bits > INDEX_BITS_MAX:
        raise ValueError(f"at most {1 << (INDEX_BITS_MAX - 1)} records and holdings, not {records} and {holdings}")
    cdef size_t[PARTS] sizes = [
        sizeof(Header),
        sizeof(IndexEntry) << name_bits,
        sizeof(IndexEntry) << ledger_bits,
        (<size_t>records + 1) * sizeof(Counter),
        (<size_t>holdings + 1) * sizeof(Holding),
        (<size_t>blocks + 1) * sizeof(Block),
        <size_t>records * sizeof(uint32_t),
        <size_t>(CONNECTIONS_MAX + 1) * sizeof(Connection),
        extra,
    ]
    cdef size_t[PARTS] starts
    cdef size_t total = 0
    cdef int part
    for part in range(PARTS):
        starts[part] = total
        total += page_round(sizes[part])
    cdef void* memory = mmap(NULL, total, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0)
    if memory == MAP_FAILED:
        raise MemoryError(f"cannot map {total} bytes for {records} records and {holdings} holdings")
    cdef uint8_t* base = <uint8_t*>memory
    cdef Header* header = <Header*>base
    region.size = total
    region.header = header
    header.key[0] = load_le64(<const uint8_t*>PyBytes_AS_STRING(key))
    header.key[1] = load_le64(<const uint8_t*>PyBytes_AS_STRING(key) + 8)
    header.records.capacity = records
    header.holdings.capacity = holdings
    header.blocks.capacity = blocks
    header.connections.capacity = CONNECTIONS_MAX
    index_map(&region.names.index, &header.names, base + starts[1], name_bits)
    index_map(&region.ledger, &header.ledger, base + starts[2], ledger_bits)
    region.names.key = header.key
    region.names.records = base + starts[3]
    region.names.pool = &header.records
    region.names.blocks = <Block*>(base + starts[5])
    region.names.block_pool = &header.blocks
    region.names.record_size = sizeof(Counter)
    region.names.name_inline = NAME_INLINE
    region.holdings = <Holding*>(base + starts[4])
    region.ring = <uint32_t*>(base + starts[6])
    region.connections = <Connection*>(base + starts[7])
    region.extra = base + starts[8]
    return 0


# ---- records -------------------------------------------------------------------------------------------------------

cdef bint make_room(Region* region, uint32_t blocks) noexcept nogil:
    """Sees to a free record and so many free blocks, if need be in the place of idle counters, the oldest first.

    Where blocks are wanting, counters that have none are spared. When RECLAIM_STEPS have not brought enough, the sweep
    is left to clear the ring of its stale entries.
    """
    cdef Header* header = region.header
    cdef bint records_short, blocks_short
    cdef uint32_t number
    cdef Counter* counter
    cdef int step = 0
    if blocks > header.blocks.capacity:
        return False
    while True:
        records_short = pool_left(&header.records) == 0
        blocks_short = pool_left(&header.blocks) < blocks
        if not records_short and not blocks_short:
            return True
        if step == RECLAIM_STEPS or header.ring_size == 0:
            break
        step += 1
        region.budget -= 1
        number = ring_pop(region)
        counter = counter_at(region, number)
        if counter.consumption != 0:
            continue
        if blocks_short and counter.record.name_size <= NAME_INLINE:
            counter.record.flags |= FLAG_IN_RING
            ring_push(region, number)
            continue
        if counter_exists(region, counter):
            header.idle -= 1
            header.reclaimed += 1
        else:
            header.expired += 1
        counter_free(region, number)
    if header.sweep_left == 0 and (records_short or header.ring_size > header.idle):
        sweep_begin(header)  # where only blocks are wanting, no sooner than it can drop something
    return False


cdef uint32_t counter_create(Region* region, uint32_t tag, const uint8_t* name, uint32_t size) noexcept nogil:
    """A record for a new name; 0 if there is no room for it."""
    cdef Header* header = region.header
    cdef uint32_t number
    cdef Counter* counter
    if not make_room(region, name_blocks(&region.names, size)):
        return 0
    number = table_insert(&region.names, tag, name, size)
    counter = counter_at(region, number)
    counter.consumption = 0
    counter.peak = 0
    counter.window = header.window - 1  # it exists once something is consumed
    counter.holders = 0
    header.created += 1
    return number


cdef void counter_free(Region* region, uint32_t number) noexcept nogil:
    """Gives the record of an idle counter, already out of the ring, to the next name."""
    debug_check(counter_at(region, number).consumption == 0 and counter_at(region, number).holders == 0)
    debug_check(not counter_at(region, number).record.flags & FLAG_IN_RING)
    table_remove(&region.names, number)


cdef uint32_t ring_pop(Region* region) noexcept nogil:
    cdef Header* header = region.header
    cdef uint32_t number = region.ring[header.ring_head]
    debug_check(header.ring_size > 0)
    header.ring_head += 1
    if header.ring_head == header.records.capacity:
        header.ring_head = 0
    header.ring_size -= 1
    header.sweep_left = min(header.sweep_left, header.ring_size)
    counter_at(region, number).record.flags &= <uint8_t>~FLAG_IN_RING
    return number


cdef void sweep_begin(Header* header) noexcept nogil:
    header.sweep_left = header.ring_size
    header.sweep_started_ns = 0


cdef int sweep(Region* region, int steps) noexcept nogil:
    """Frees expired counters and drops the ring's stale entries, one round of the ring in all; returns steps left."""
    cdef Header* header = region.header
    cdef uint32_t number
    cdef Counter* counter
    while steps > 0 and header.sweep_left > 0:
        steps -= 1
        header.sweep_left -= 1
        number = ring_pop(region)
        counter = counter_at(region, number)
        if counter.consumption != 0:
            continue
        if counter_exists(region, counter):
            counter.record.flags |= FLAG_IN_RING
            ring_push(region, number)
        else:
            header.expired += 1
            counter_free(region, number)
    return steps


# ---- connections ---------------------------------------------------------------------------------------------------

cdef uint32_t connection_create(Region* region) noexcept nogil:
    """0 if CONNECTIONS_MAX are open or still leaving."""
    cdef uint32_t number = pool_take(&region.header.connections, &region.connections.next, sizeof(Connection))
    region.connections[number].first = 0
    region.connections[number].holdings = 0
    return number


cdef void connection_free(Region* region, uint32_t number) noexcept nogil:
    pool_put(&region.header.connections, &region.connections.next, sizeof(Connection), number)


cdef void connection_leave(Region* region, uint32_t number) noexcept nogil:
    """Queues what the connection holds to be given back; from here on it can do nothing more."""
    cdef Header* header = region.header
    if region.connections[number].holdings == 0:
        connection_free(region, number)
        return
    region.connections[number].next = 0
    if header.leaving_last:
        region.connections[header.leaving_last].next = number
    else:
        header.leaving_first = number
    header.leaving_last = number
    header.leaving_holdings += region.connections[number].holdings


cdef int give_back(Region* region, int steps) noexcept nogil:
    """Gives back the holdings of connections that left, oldest leaving first; returns steps left."""
    cdef Header* header = region.header
    cdef uint32_t number, entry, record, amount
    while steps > 0 and header.leaving_first:
        number = header.leaving_first
        entry = region.connections[number].first
        if entry == 0:
            header.leaving_first = region.connections[number].next
            if header.leaving_first == 0:
                header.leaving_last = 0
            connection_free(region, number)
            continue
        steps -= 1
        record = region.holdings[entry].record
        amount = region.holdings[entry].amount
        ledger_remove(region, entry)
        counter_restore(region, record, amount)
        header.leaving_holdings -= 1
        header.given_back += 1
    return steps


# ---- store ---------------------------------------------------------------------------------------------------------

cdef class Store:
    """Everything the sessions of one room share. Subclasses make their own sessions.

    buckets: records, and so counters; holdings: entries of the ledger; name_memory: bytes for names longer than fit
    their record; hash_key: 16 random bytes; extra: bytes of the region for the room's own structures; reply_max: the
    longest reply; posted_max: bytes that others may leave for a session that does not take them. Raises ValueError or
    OverflowError for impossible sizes, MemoryError if they cannot be mapped.
    """

    def __cinit__(self, *, uint32_t buckets, uint32_t holdings, uint32_t holdings_per_connection=0,
                  uint64_t name_memory, bytes hash_key, size_t extra=0, size_t reply_max=REPLY_MAX,
                  size_t posted_max=0, **_):
        cdef uint64_t blocks = name_memory // BLOCK_SIZE
        if buckets == 0:
            raise ValueError("buckets must be at least 1")
        if len(hash_key) != 16:
            raise ValueError(f"hash_key must have 16 bytes, not {len(hash_key)}")
        if blocks > <uint64_t>0xfffffffe:
            raise ValueError(f"name_memory must be below {0xffffffff * BLOCK_SIZE} bytes, not {name_memory}")
        region_create(&self.region, hash_key, buckets, holdings, <uint32_t>blocks, extra)
        self.limit_holdings(holdings_per_connection)
        self.posted_max = posted_max
        self.out = <uint8_t*>PyMem_RawMalloc(OUTPUT_MAX + reply_max)
        if self.out == NULL:
            raise MemoryError("no room for the replies of one call")
        self.dirty = []
        self.region.budget = TURN_STEPS

    def __dealloc__(self):
        PyMem_RawFree(self.out)
        if self.region.header != NULL:
            munmap(self.region.header, self.region.size)

    def limit_holdings(self, uint32_t holdings_per_connection):
        """Bounds how many holdings one connection may have from now on; 0 is no bound but the ledger's."""
        cdef Header* header = self.region.header
        header.holdings_per_connection = holdings_per_connection or header.holdings.capacity

    def limit_posted(self, size_t posted_max):
        """Bounds what others may leave for a session from now on, in bytes."""
        self.posted_max = posted_max

    cpdef Session session(self, int64_t now_ns=0):
        """A session for a new connection, at now_ns. Raises MemoryError if there is no room for another."""
        raise NotImplementedError

    cpdef int64_t next_deadline(self):
        """When tick() is due, in ns on the caller's monotonic clock: 0 = now, -1 = nothing is waiting."""
        cdef Header* header = self.region.header
        return 0 if header.leaving_first or header.sweep_left or self.dirty else -1

    cpdef tick(self, int64_t now_ns):
        """Does due work, half a millisecond of it at most: gives back what leavers held, then sweeps idle counters."""
        cdef Header* header = self.region.header
        cdef int steps = give_back(&self.region, SLICE_STEPS)
        if header.sweep_left == 0 or steps == 0:
            return
        if header.sweep_started_ns == 0:
            header.sweep_started_ns = now_ns
        sweep(&self.region, steps)
        if header.sweep_left == 0:
            header.sweeps += 1
            header.last_sweep_us = <uint64_t>(now_ns - header.sweep_started_ns) // 1000
            header.total_sweep_us += header.last_sweep_us
            header.sweep_started_ns = 0

    cpdef begin_window(self, uint32_t number):
        """Starts the stats window of that number; numbers only rise, others are ignored.

        Touches no counter: what was idle before is gone from this instant, and the sweep frees its records.
        """
        cdef Header* header = self.region.header
        if number <= header.window:
            return
        header.window = number
        header.idle = 0
        sweep_begin(header)
        self.stirred = True

    cpdef set_wall(self, int64_t unix_ns, int64_t now_ns):
        """Tells the Unix time that it is at now_ns, the caller's monotonic clock. For rooms that show it."""

    cdef void fill_budget(self, int64_t now_ns) noexcept:
        self.region.budget = TURN_STEPS
        self.budgeted_ns = now_ns

    cpdef list take_dirty(self):
        """The sessions that another's request, or tick(), gave output to, or dropped, since the last call."""
        cdef list dirty = self.dirty
        cdef Session session
        if dirty:
            self.dirty = []
            for session in dirty:
                session.is_dirty = False
        return dirty

    cpdef dict snapshot(self):
        """The store's figures by name, each a number as of now."""
        cdef Header* header = self.region.header
        return {
            "objects": header.busy + header.idle,
            "total_objects": header.created,
            "used_memory": (
                header.records.used * sizeof(Counter)
                + header.holdings.used * sizeof(Holding)
                + <uint64_t>header.blocks.used * BLOCK_SIZE
            ),
            "conflicts": header.names.displaced,
            "gc_count": header.sweeps,
            "last_gc_elapsed": header.last_sweep_us,
            "total_gc_elapsed": header.total_sweep_us,
            "curr_connections": self.sessions_open,
            "total_connections": self.sessions_total,
            "bytes_in": self.bytes_in,
            "bytes_out": self.bytes_out,
            "buckets": header.records.capacity,
            "records": header.records.used,
            "busy": header.busy,
            "idle": header.idle,
            "reclaimed": header.reclaimed,
            "expired": header.expired,
            "longest_probe": header.names.longest,
            "holdings": header.holdings.used,
            "holdings_max": header.holdings.capacity,
            "holdings_leaving": header.leaving_holdings,
            "given_back": header.given_back,
            "name_memory": <uint64_t>header.blocks.used * BLOCK_SIZE,
            "name_memory_max": <uint64_t>header.blocks.capacity * BLOCK_SIZE,
            "region": self.region.size,
            "window": header.window,
        }

    def outcomes(self):
        """What came of requests: (operation, status, count) for each combination that there has been."""
        return []

    def begin_drain(self):
        """From now on nothing is handed out any more; everything else goes on. There is no way back."""

    def held(self):
        """Holdings, of connections that are there and of those whose are being given back: a drain waits for these."""
        return self.region.header.holdings.used

    def holdings_of(self, uint32_t connection):
        """How many holdings a connection has, by Session.number; 0 for a number that no connection ever had."""
        if connection > self.region.header.connections.fresh:
            return 0
        return self.region.connections[connection].holdings

    def leases(self, size_t limit):
        """The first so many holdings, by connection: (connection, name, amount, since), as holders() tells them.

        A connection that net does not know any more is giving back. It takes a look, of about a nanosecond, at each of
        as many connections as there ever were at once.
        """
        cdef Region* region = &self.region
        cdef Holding* holding
        cdef uint32_t entry, connection
        cdef list found = []
        for connection in range(1, region.header.connections.fresh + 1):
            entry = region.connections[connection].first
            while entry:
                if <size_t>len(found) >= limit:
                    return found
                holding = region.holdings + entry
                name = name_bytes(&region.names, &counter_at(region, holding.record).record)
                found.append((connection, name, holding.amount, holding.since))
                entry = holding.next_of_connection
        return found

    def holders(self, bytes name not None):
        """Who holds how much of a counter, in O(holders): a list of (connection, amount, since), since in tenths of a
        second on the caller's clock."""
        cdef const uint8_t* data = <const uint8_t*>PyBytes_AS_STRING(name)
        cdef uint32_t size = <uint32_t>len(name)
        cdef uint32_t number = table_find(&self.region.names, name_tag(&self.region.names, data, size), data, size)
        cdef uint32_t entry = counter_at(&self.region, number).holders if number else 0
        cdef Holding* holding
        found = []
        while entry:
            holding = self.region.holdings + entry
            found.append((holding.connection, holding.amount, holding.since))
            entry = holding.next_of_record
        return found

    def audit(self):
        """Walks the whole region and raises AssertionError at the first broken invariant. For tests: O(everything)."""
        audit_region(&self.region, 0)


def siphash(bytes key not None, bytes data not None):
    """SipHash-1-3 of data under 16 bytes of key, as the table uses it."""
    cdef uint64_t[2] words
    if len(key) != 16:
        raise ValueError(f"the key must have 16 bytes, not {len(key)}")
    words[0] = load_le64(<const uint8_t*>PyBytes_AS_STRING(key))
    words[1] = load_le64(<const uint8_t*>PyBytes_AS_STRING(key) + 8)
    return siphash13(words, <const uint8_t*>PyBytes_AS_STRING(data), len(data))


# ---- session -------------------------------------------------------------------------------------------------------

@cython.no_gc_clear  # a collected session still gives back, and needs its store for that
cdef class Session:
    """One connection's machine: bytes in, bytes out.

    Subclasses say what a frame is (`parse_frame`), what it does (`execute_frame`) and how a long reply goes on
    (`produce`). States, in the order a connection passes them:

    reading    receive() runs whatever is complete; the start of an unfinished frame is kept
    more       a long reply is under way, others have posted something, or requests wait behind a full output or for a
               turn: the caller calls take_output() whenever what it was given has gone out, and reads no further
    ended      the peer has sent its last byte: what it asked is still answered, then everything it held is given back
    closing    write what you were given, then close; nothing is read any more
    dropped    closing, and at once: the peer took too little of what others posted, and that is thrown away
    """

    def __cinit__(self, Store store not None):
        self.store = store
        self.connection = connection_create(&store.region)
        if self.connection == 0:
            raise MemoryError(f"{CONNECTIONS_MAX} connections are open or leaving")
        self.open = True
        store.sessions_open += 1
        store.sessions_total += 1

    def __dealloc__(self):
        self.detach()

    @property
    def number(self):
        """Of its connection in the region, which the ledger knows; 0 once what it held was queued to be given back."""
        return self.connection

    cpdef bytes receive(self, bytes data, int64_t now_ns):
        """Takes what arrived at now_ns (monotonic) and returns the replies, at most OUTPUT_MAX + one reply of them."""
        cdef const uint8_t* start
        cdef size_t size, used = 0
        if data is None:
            raise TypeError("data must be bytes, not None")
        start = <const uint8_t*>PyBytes_AS_STRING(data)
        size = PyBytes_GET_SIZE(data)
        self.store.bytes_in += size
        if self.closing or self.ended:
            return b""
        if self.more:
            self.keep(start, size)
            return b""
        self.begin_call(now_ns)
        if self.kept_size:
            used = self.complete_kept(start, size)
        if self.kept_size == 0:
            used += self.run(start + used, size - used)
        if used < size and not self.closing:
            self.keep(start + used, size - used)
        return self.end_call()

    cpdef bytes take_output(self, int64_t now_ns):
        """The next piece: the rest of a long reply, what others posted, then the replies to requests that were kept.

        It may be empty while `more` stays set: the work of one call is bounded too. The caller lets others have their
        turn between two calls; each gives all sessions TURN_STEPS again.
        """
        if self.closing or not self.more:
            return b""
        self.blocked = False
        self.store.fill_budget(now_ns)
        if self.posted_size and not self.position:
            return self.take_posted()
        self.begin_call(now_ns)
        if self.position:
            self.produce()
        self.more = self.position != 0 or self.posted_size != 0
        if not self.more and self.kept_size:
            self.run_kept()
        return self.end_call()

    cpdef bytes eof(self, int64_t now_ns):
        """The peer sent its last byte. What it asked is answered; then all it holds is given back, then `closing`."""
        if self.closing or self.ended:
            return b""
        self.begin_call(now_ns)
        self.ended = True
        return self.end_call()

    cdef bint can_post(self, size_t size) noexcept:
        """Whether post() of so many bytes is due: not while the caller has yet to fetch about posted_max of them.

        One message is always taken, however long it is. Whoever does not read, or reads a long reply meanwhile, is to
        be dropped, not waited for.
        """
        cdef bint fits = self.posted_size == 0 or self.posted_size + size <= self.store.posted_max
        return fits or self.blocked or self.position

    cdef int post(self, bytes message) except -1:
        """Leaves a message that goes out after what this session is sending."""
        if self.closing:
            return 0
        if self.posted is None:
            self.posted = []
        self.posted.append(message)
        self.posted_size += PyBytes_GET_SIZE(message)
        self.more = True
        if self.blocked or self.position:
            self.drop_overdue()
        else:
            self.tell_dirty()
        return 0

    cpdef wait(self):
        """The caller cannot take output, as the last has not gone out. From here on posted_max is what may wait.

        If there is none to take, nothing has to wait, and the next that is posted is told of.
        """
        self.blocked = self.more
        self.drop_overdue()

    cdef int drop_overdue(self) except -1:
        if self.posted_size > self.store.posted_max and len(self.posted) > 1:
            self.dropped = True
            self.detach()
            self.store.sessions_dropped += 1
            self.tell_dirty()
        return 0

    cdef int tell_dirty(self) except -1:
        if not self.is_dirty:
            self.is_dirty = True
            self.store.dirty.append(self)
            self.store.stirred = True
        return 0

    cdef bytes take_posted(self):
        """What was posted, OUTPUT_MAX and one message at most; a single message as it is, not copied."""
        cdef list posted = self.posted
        cdef Py_ssize_t count = 0, size = 0
        while count < len(posted) and size < OUTPUT_MAX:
            size += PyBytes_GET_SIZE(<bytes>posted[count])
            count += 1
        cdef bytes output = posted[0] if count == 1 else b"".join(posted[:count])
        del posted[:count]
        self.posted_size -= size
        self.store.bytes_out += size
        self.more = self.posted_size != 0 or self.kept_size != 0 or self.ended
        return output

    cpdef closed(self, int64_t now_ns):
        """The connection is gone. Idempotent; what it held is queued for tick() to give back."""
        if self.store.calling_out:
            raise RuntimeError("a session is under way")
        self.detach()

    cdef void detach(self) noexcept:
        self.closing = True
        self.more = False
        self.leave()
        self.drop_kept()
        self.posted = None
        self.posted_size = 0
        if self.open:
            self.open = False
            self.store.sessions_open -= 1

    cdef Py_ssize_t parse_frame(self, const uint8_t* data, size_t size, Frame* frame) noexcept:
        """Bytes the frame takes; 0 = more are needed; -1 = the peer broke the framing, and frame.verdict says how."""
        return -1

    cdef void prefetch_frames(self, const Frame* frames, int count) noexcept:
        """Asks for the cache lines that the frames will need, once their indexes' lines have had time to arrive."""

    cdef int execute_frame(self, const Frame* frame) except -1:
        """Does what the frame asks and appends the reply to the store's output: DONE. Or does nothing yet: LATER."""
        return DONE

    cdef int produce(self) except -1:
        """Appends the next piece of the long reply at self.position, and clears that when it is done."""
        return 0

    cdef int begin_call(self, int64_t now_ns) except -1:
        cdef Store store = self.store
        if store.calling_out:
            raise RuntimeError("a session is under way")
        store.out_size = 0
        if now_ns - store.budgeted_ns >= TURN_NS:
            store.fill_budget(now_ns)
        self.budget_floor = min(0, store.region.budget - GRACE_STEPS)
        self.since = <uint32_t>(now_ns // NS_PER_TENTH)
        return 0

    cdef bytes end_call(self):
        """Settles the state that the call leaves behind, and copies the output out."""
        cdef Store store = self.store
        if store.region.header.sweep_left:
            store.stirred = True
        if self.ended and not self.awaited and not (self.kept_size and self.has_request()):
            self.leave()
            self.closing = not self.more
        if self.closing:
            self.more = False
            self.leave()
        if self.kept != NULL and (self.kept_size == 0 or self.closing):
            self.drop_kept()
        store.bytes_out += store.out_size
        return PyBytes_FromStringAndSize(<const char*>store.out, store.out_size)

    cdef bint is_stopped(self) noexcept:
        """Whether the rest of the input has to wait for the next call."""
        if self.position or self.store.out_size >= OUTPUT_MAX or self.store.region.budget <= self.budget_floor:
            self.more = True
        return self.more or self.closing

    cdef size_t run(self, const uint8_t* data, size_t size) except? 0:
        """Executes the complete frames, FRAMES_AHEAD at a time: parse all and ask for their lines, then execute all."""
        cdef Frame[FRAMES_AHEAD] frames
        cdef size_t position = 0, ahead
        cdef Py_ssize_t taken = 1
        cdef int count, i
        while taken > 0 and position < size and not self.is_stopped():
            count = 0
            ahead = position
            while count < FRAMES_AHEAD and ahead < size:
                taken = self.parse_frame(data + ahead, size - ahead, &frames[count])
                if taken == 0:
                    break
                count += 1
                if taken < 0:
                    break
                ahead += taken
            if count > 1:
                self.prefetch_frames(frames, count)
            for i in range(count):
                self.store.region.budget -= 1 + (frames[i].size >> FRAME_STEP_SHIFT)
                if self.execute_frame(&frames[i]) == LATER:
                    self.more = True
                    self.requests += i
                    return position
                position += frames[i].size
                if taken < 0 and i == count - 1:
                    self.closing = True
                if self.is_stopped():
                    break
            if count:
                self.requests += i + 1
        if position == size and not self.position and not self.posted_size:
            self.more = False
        return position

    cdef size_t complete_kept(self, const uint8_t* data, size_t size) except? 0:
        """Completes the unfinished frame from the new input, copying no more than about twice what it lacks.

        Returns how much of the input that took. If the frame is still unfinished, all of it. kept_size is 0 if it was
        executed.
        """
        cdef Frame frame
        cdef Py_ssize_t taken = 0
        cdef size_t used = 0, step
        while taken == 0 and used < size:
            step = min(size - used, max(KEPT_MIN, self.kept_size))
            self.keep(data + used, step)
            used += step
            taken = self.parse_frame(self.kept + self.kept_start, self.kept_size, &frame)
        if taken > 0:
            used -= self.kept_size - taken
            self.kept_size = taken
        if taken != 0:
            self.run_kept()
        return used

    cdef int run_kept(self) except -1:
        cdef size_t used = self.run(self.kept + self.kept_start, self.kept_size)
        self.kept_start += used
        self.kept_size -= used
        return 0

    cdef int keep(self, const uint8_t* data, size_t size) except -1:
        cdef size_t needed = self.kept_size + size
        cdef uint8_t* kept
        if size == 0:
            return 0
        if self.kept_start:
            memmove(self.kept, self.kept + self.kept_start, self.kept_size)
            self.kept_start = 0
        if needed > self.kept_capacity:
            needed = max(needed, 2 * self.kept_capacity, KEPT_MIN)
            kept = <uint8_t*>PyMem_RawRealloc(self.kept, needed)
            if kept == NULL:
                raise MemoryError(f"no room for {needed} bytes of unfinished input")
            self.kept = kept
            self.kept_capacity = needed
        memcpy(self.kept + self.kept_size, data, size)
        self.kept_size += size
        return 0

    cdef bint has_request(self) noexcept:
        cdef Frame frame
        return self.parse_frame(self.kept + self.kept_start, self.kept_size, &frame) != 0

    cdef void leave(self) noexcept:
        if self.connection:
            connection_leave(&self.store.region, self.connection)
            self.connection = 0
            self.store.stirred = True

    cdef void drop_kept(self) noexcept:
        PyMem_RawFree(self.kept)
        self.kept = NULL
        self.kept_start = 0
        self.kept_size = 0
        self.kept_capacity = 0
