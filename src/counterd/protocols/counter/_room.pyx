"""The yrmcds counter protocol, sans-I/O: what a frame is, what it does, and the replies.

Floor 2. Section names below are those of the protocol's document ("Counter support"); docs/protocols/counter.md says
where and why this differs from the reference implementation.

A frame is a 12-byte header and a body. Its parser answers with the bytes it takes, 0 for "more are needed", or -1 when
framing is lost: a wrong magic, or a body longer than any request can have (BODY_MAX).
"""

from cpython.bytes cimport PyBytes_AS_STRING
from libc.stdint cimport int64_t, uint8_t, uint16_t, uint32_t
from libc.string cimport memcpy, strlen

from counterd._core cimport DONE, LATER, OUTPUT_MAX, REPLY_ROOM, SLICE_STEPS, Frame, Session, Store
from counterd.engine.audit cimport audit_chains, audit_permits, audit_ring
from counterd.engine.pool cimport Pool
from counterd.engine.table cimport (
    RECORD_USED, index_peek, index_prefetch, name_bytes, name_read, name_tag, table_find,
)
from counterd.engine.byteorder cimport load_be16, load_be32, prefetch, store_be16, store_be32
from counterd.engine.chains cimport BLOCK_SIZE
from counterd.engine.debug cimport debug_check
from counterd.engine.idle_ring cimport FLAG_IN_RING
from counterd.engine.permits cimport (
    GRANTED, PERMIT_CELL, Holding, Outcome, Permits, ledger_tag, permit_at, permits_leave,
)
from counterd.protocols.counter._counters cimport (
    Counter, Counters, CountersState, counter_acquire, counter_at, counter_exists, counter_get, counter_release,
    counters_begin, counters_give_back, counters_reserve, sweep, sweep_begin,
)

cdef enum:
    REQUEST_MAGIC = 0x90
    RESPONSE_MAGIC = 0x91
    HEADER_SIZE = 12
    BODY_MAX = 65545        # Acquire with the longest name: 4 + 4 + 2 + 65,535
    NS_PER_TENTH = 100000000
    REPLY_MAX = 65573       # the longest: a Dump entry of a name of 65,535 bytes, 12 + 10 + 65,535 + 4, and its end, 12
    UNKNOWN = 255
    DUMP_PIECE = 65536      # bytes of a Dump produced at a time: about 1,700 counters with 16-byte names
    STATS_STEPS = 500       # a Stats takes some 20 us in Python
    LIMIT_SIZE = 4          # bytes of an entry of a Dump with LIMITS, after its name

# Bytes of each request's body before the name; 0 = the request has no body. Section "Operations".
cdef uint8_t[OPCODES] BODY_FIXED = [
    0, 2, 10, 6, UNKNOWN, UNKNOWN, UNKNOWN, UNKNOWN,
    UNKNOWN, UNKNOWN, UNKNOWN, UNKNOWN, UNKNOWN, UNKNOWN, UNKNOWN, UNKNOWN, 0, 0,
]

# What the engine's outcomes are on the wire, in their order.
cdef uint8_t[5] STATUS_OF_OUTCOME = [OK, NOT_FOUND, NOT_AVAILABLE, NOT_ACQUIRED, OUT_OF_MEMORY]

COMMAND_NAMES = {NOOP: "noop", GET: "get", ACQUIRE: "acquire", RELEASE: "release", STATS: "stats", DUMP: "dump"}
REFUSAL_NAMES = {
    NOT_FOUND: "not_found", INVALID_ARGUMENTS: "invalid_arguments", NOT_AVAILABLE: "not_available",
    NOT_ACQUIRED: "not_acquired", UNKNOWN_COMMAND: "unknown_command", OUT_OF_MEMORY: "out_of_memory",
}
# The reference's names, in its order; counterd's own follow.
REFERENCE_FIGURES = (
    "objects", "total_objects", "used_memory", "conflicts", "gc_count", "last_gc_elapsed", "total_gc_elapsed",
    "curr_connections", "total_connections",
)


assert sizeof(Counter) == PERMIT_CELL
assert REPLY_MAX <= REPLY_ROOM


cdef const char* error_text(uint8_t status) noexcept:
    """As the reference words it. Section "Response status"."""
    if status == NOT_FOUND:
        return b"Not found"
    if status == INVALID_ARGUMENTS:
        return b"Invalid arguments"
    if status == NOT_AVAILABLE:
        return b"Resource not available"
    if status == NOT_ACQUIRED:
        return b"Not acquired"
    if status == UNKNOWN_COMMAND:
        return b"Unknown command"
    debug_check(status == OUT_OF_MEMORY)
    return b"OutOfMemory"


cdef inline uint8_t* reply(Store store, uint8_t opcode, uint8_t status, const uint8_t* opaque, uint32_t body) noexcept:
    """Appends a response header and returns where its body goes. Section "Response header"."""
    cdef uint8_t* target = store.out + store.out_size
    debug_check(store.out_size + HEADER_SIZE + body <= OUTPUT_MAX + REPLY_MAX)
    target[0] = RESPONSE_MAGIC
    target[1] = opcode
    target[2] = status
    target[3] = 0
    store_be32(target + 4, body)
    memcpy(target + 8, opaque, 4)
    store.out_size += HEADER_SIZE + body
    return target + HEADER_SIZE


cdef inline void reply_number(Store store, const uint8_t* request, uint32_t number) noexcept:
    store_be32(reply(store, request[1], OK, request + 8, 4), number)


cdef inline int reply_refusal(
    CounterStore store, const uint8_t* request, uint8_t opcode, uint8_t status, const char* text
) noexcept:
    """The opcode and opaque of the request, and the text as the body. Counted under `opcode`, OPCODES for none."""
    cdef uint32_t size = <uint32_t>strlen(text)
    store.refusals[opcode][status] += 1
    memcpy(reply(store, request[1], status, request + 8, size), text, size)
    return DONE


cdef class CounterStore(Store):
    """The counters, and what Stats says of them.

    buckets: counters; holdings: entries of the ledger; holdings_per_connection: of one connection, 0 is no bound but
    the ledger's; name_memory: bytes for names longer than fit their record; figures: called for each Stats, returns
    what the floors above count, a mapping of names to values. Raises ValueError or OverflowError for impossible sizes,
    MemoryError if they cannot be mapped.
    """

    def __cinit__(self, *, uint32_t buckets, uint32_t holdings, uint32_t holdings_per_connection=0,
                  uint64_t name_memory, bytes hash_key, **_):
        if buckets == 0:
            raise ValueError("buckets must be at least 1")
        counters_reserve(
            &self.counters, &self.region, &self.connections, buckets, holdings, name_memory // BLOCK_SIZE
        )
        self.map_region(hash_key)
        counters_begin(&self.counters, self.header.key)
        self.limit_holdings(holdings_per_connection)

    def __init__(self, *, figures, **_):
        self.figures = figures

    cpdef Session session(self, int64_t now_ns=0):
        return CounterSession(self)

    def limit_holdings(self, uint32_t holdings_per_connection):
        """Bounds how many holdings one connection may have from now on; 0 is no bound but the ledger's."""
        cdef Permits* permits = &self.counters.permits
        permits.state.holdings_per_connection = holdings_per_connection or permits.state.holdings.capacity

    cdef void forget(self, uint32_t connection) noexcept:
        if permits_leave(&self.counters.permits, connection):
            self.stirred = True

    cdef int64_t due_ns(self) except? -2:
        return 0 if self.counters.permits.state.leaving_first or self.counters.ring.state.sweep_left else -1

    cdef int run_due(self) except -1:
        """Gives back what leavers held, then sweeps idle counters."""
        cdef CountersState* state = self.counters.state
        cdef int steps = counters_give_back(&self.counters, SLICE_STEPS)
        if self.counters.ring.state.sweep_left == 0 or steps == 0:
            return 0
        if state.sweep_started_ns == 0:
            state.sweep_started_ns = self.now_ns
        sweep(&self.counters, steps)
        if self.counters.ring.state.sweep_left == 0:
            state.sweeps += 1
            state.last_sweep_us = <uint64_t>(self.now_ns - state.sweep_started_ns) // 1000
            state.total_sweep_us += state.last_sweep_us
            state.sweep_started_ns = 0
        return 0

    cpdef begin_window(self, uint32_t number):
        """Starts the stats window of that number; numbers only rise, others are ignored.

        Touches no counter: what was idle before is gone from this instant, and the sweep frees its records.
        """
        cdef CountersState* state = self.counters.state
        if number <= state.window:
            return
        state.window = number
        state.idle = 0
        sweep_begin(&self.counters)
        self.stirred = True

    def held(self):
        """As Store.held: holdings."""
        return self.counters.permits.state.holdings.used

    def holdings_of(self, uint32_t connection):
        """As Store.holdings_of: holdings."""
        if connection > self.connections.pool.fresh:
            return 0
        return self.counters.permits.holders[connection].holdings

    def leases(self, size_t limit):
        """As Store.leases: the first holdings, by connection.

        A connection that net does not know any more is giving back. It takes a look, of about a nanosecond, at each of
        as many connections as there ever were at once.
        """
        cdef Permits* permits = &self.counters.permits
        cdef Holding* holding
        cdef uint32_t entry, connection
        cdef list found = []
        for connection in range(1, self.connections.pool.fresh + 1):
            entry = permits.holders[connection].first
            while entry:
                if <size_t>len(found) >= limit:
                    return found
                holding = permits.holdings + entry
                name = name_bytes(&permits.table, &permit_at(permits, holding.record).record)
                found.append((connection, name, holding.amount, holding.since_tenths))
                entry = holding.next_of_connection
        return found

    def holders(self, bytes name not None):
        """Who holds how much of a counter, in O(holders): a list of (connection, amount, since), since in tenths of a
        second on the caller's clock."""
        cdef Permits* permits = &self.counters.permits
        cdef const uint8_t* data = <const uint8_t*>PyBytes_AS_STRING(name)
        cdef uint32_t size = <uint32_t>len(name)
        cdef uint32_t number = table_find(&permits.table, name_tag(&permits.table, data, size), data, size)
        cdef uint32_t entry = permit_at(permits, number).holders if number else 0
        cdef Holding* holding
        found = []
        while entry:
            holding = permits.holdings + entry
            found.append((holding.connection, holding.amount, holding.since_tenths))
            entry = holding.next_of_record
        return found

    def audit(self):
        """As Store.audit: the counters, who holds them, and the ring of those that are idle."""
        cdef Counters* counters = &self.counters
        cdef uint32_t number, busy = 0, idle = 0
        cdef Counter* counter
        audit_chains(&counters.chains, audit_permits(&counters.permits))
        audit_ring(&counters.ring, &counters.permits.table)
        for number in range(1, counters.permits.table.pool.fresh + 1):
            counter = counter_at(counters, number)
            if not counter.permit.record.flags & RECORD_USED:
                continue
            busy += counter.permit.consumption != 0
            idle += counter.permit.consumption == 0 and counter_exists(counters, counter)
            if counter.permit.consumption == 0 and not counter.permit.record.flags & FLAG_IN_RING:
                raise AssertionError(f"record {number} is idle, not in the ring")
        if busy != counters.state.busy or idle != counters.state.idle:
            raise AssertionError(
                f"{busy} busy and {idle} idle, {counters.state.busy} and {counters.state.idle} counted"
            )

    cpdef dict snapshot(self):
        cdef dict figures = Store.snapshot(self)
        cdef Permits* permits = &self.counters.permits
        cdef CountersState* state = self.counters.state
        cdef Pool* blocks = self.counters.chains.pool
        figures.update({
            "objects": state.busy + state.idle,
            "total_objects": state.created,
            "used_memory": (
                permits.table.pool.used * sizeof(Counter)
                + permits.state.holdings.used * sizeof(Holding)
                + <uint64_t>blocks.used * BLOCK_SIZE
            ),
            "conflicts": permits.table.index.state.displaced,
            "gc_count": state.sweeps,
            "last_gc_elapsed": state.last_sweep_us,
            "total_gc_elapsed": state.total_sweep_us,
            "buckets": permits.table.pool.capacity,
            "records": permits.table.pool.used,
            "busy": state.busy,
            "idle": state.idle,
            "reclaimed": state.reclaimed,
            "expired": state.expired,
            "longest_probe": permits.table.index.state.longest,
            "holdings": permits.state.holdings.used,
            "holdings_max": permits.state.holdings.capacity,
            "holdings_leaving": permits.state.leaving_holdings,
            "given_back": permits.state.given_back,
            "name_memory": <uint64_t>blocks.used * BLOCK_SIZE,
            "name_memory_max": <uint64_t>blocks.capacity * BLOCK_SIZE,
            "window": state.window,
        })
        for opcode, name in COMMAND_NAMES.items():
            figures[f"command:{name}"] = self.requests[<int>opcode]
        for status, name in REFUSAL_NAMES.items():
            figures[f"refused:{name}"] = self.refused(status)
        return figures

    cdef uint64_t refused(self, uint8_t status) noexcept:
        """Replies with that status."""
        cdef uint64_t count = 0
        cdef int opcode
        for opcode in range(OPCODES + 1):
            count += self.refusals[opcode][status]
        return count

    def outcomes(self):
        """As Store.outcomes. What was granted is not counted, but what is left of the requests that parsed."""
        cdef int opcode, status
        cdef uint64_t parsed_refused
        cdef dict found = {}
        for opcode, name in COMMAND_NAMES.items():
            parsed_refused = sum([self.refusals[opcode][<int>status] for status in STATUS_OF_OUTCOME])
            found[name, "ok"] = self.requests[opcode] - parsed_refused
            for status, text in REFUSAL_NAMES.items():
                found[name, text] = self.refusals[opcode][status]
        for status, text in REFUSAL_NAMES.items():
            found["unknown", text] = sum(
                [self.refusals[opcode][status] for opcode in range(OPCODES + 1) if opcode not in COMMAND_NAMES]
            )
        return [(name, text, count) for (name, text), count in found.items() if count]

    def begin_drain(self):
        self.draining = True

    cdef bytes stats_body(self):
        """Section "Stats": name length, value length, name, value, for each figure."""
        cdef dict figures = self.snapshot()
        ordered = {name: figures.pop(name) for name in REFERENCE_FIGURES}
        ordered.update((f"command:{name}", figures.pop(f"command:{name}")) for name in COMMAND_NAMES.values())
        ordered.update(self.figures())  # a call is under way: nobody may come back here meanwhile
        ordered.update(figures)
        pieces = []
        for name, value in ordered.items():
            name = name.encode("ascii")
            value = str(value).encode("ascii")
            pieces.append(len(name).to_bytes(2, "big") + len(value).to_bytes(2, "big") + name + value)
        return b"".join(pieces)


cdef class CounterSession(Session):
    """One connection of the counter protocol."""

    def __cinit__(self, CounterStore store not None):
        pass  # its type is what matters: the methods below cast

    cdef Py_ssize_t parse_frame(self, const uint8_t* data, size_t size, Frame* frame) noexcept:
        cdef uint32_t body
        cdef uint8_t opcode, fixed
        if size < HEADER_SIZE:
            return 0
        body = load_be32(data + 4)
        opcode = data[1]
        fixed = BODY_FIXED[opcode] if opcode < OPCODES else <uint8_t>UNKNOWN
        frame.data = data
        frame.size = HEADER_SIZE
        frame.key_size = 0
        if data[0] != REQUEST_MAGIC:
            frame.verdict = INVALID_ARGUMENTS
            return -1
        frame.verdict = UNKNOWN_COMMAND if fixed == UNKNOWN else INVALID_ARGUMENTS  # until the body turns out right
        if body > BODY_MAX:
            return -1
        if size - HEADER_SIZE < body:
            return 0
        frame.size += body
        if fixed == 0 and body == 0:
            frame.verdict = OK
        elif 0 < fixed < body and fixed != UNKNOWN:
            self.parse_named(data + HEADER_SIZE, body, opcode, fixed, frame)
        return frame.size

    cdef void parse_named(
        self, const uint8_t* body, uint32_t size, uint8_t opcode, uint8_t fixed, Frame* frame
    ) noexcept:
        """Sections "Get", "Acquire" and "Release": numbers, the length of the name, the name, and not a byte more."""
        cdef uint16_t name_size = load_be16(body + fixed - 2)
        cdef Permits* permits = &(<CounterStore>self.store).counters.permits
        if name_size == 0 or fixed + <uint32_t>name_size != size:
            return
        if opcode == ACQUIRE and (load_be32(body) == 0 or load_be32(body + 4) < load_be32(body)):
            return
        frame.verdict = OK
        frame.key = body + fixed
        frame.key_size = name_size
        frame.tag = name_tag(&permits.table, frame.key, name_size)
        index_prefetch(&permits.table.index, frame.tag)
        if opcode != GET:
            index_prefetch(&permits.ledger, ledger_tag(self.connection, frame.tag))

    cdef void prefetch_frames(self, const Frame* frames, int count) noexcept:
        cdef Permits* permits = &(<CounterStore>self.store).counters.permits
        cdef uint32_t number
        cdef int i
        for i in range(count):
            if frames[i].key_size == 0:
                continue
            number = index_peek(&permits.table.index, frames[i].tag)
            if number:
                prefetch(permit_at(permits, number))
            if frames[i].data[1] != GET:
                number = index_peek(&permits.ledger, ledger_tag(self.connection, frames[i].tag))
                if number:
                    prefetch(permits.holdings + number)

    cdef int begin_call(self, int64_t now_ns) except -1:
        self.since_tenths = <uint32_t>(now_ns // NS_PER_TENTH)
        return Session.begin_call(self, now_ns)

    cdef int execute_frame(self, const Frame* frame) except -1:
        cdef CounterStore store = <CounterStore>self.store
        cdef Counters* counters = &store.counters
        cdef const uint8_t* request = frame.data
        cdef const uint8_t* body = request + HEADER_SIZE
        cdef uint8_t opcode = request[1]
        cdef uint32_t number = 0
        cdef Outcome outcome
        if frame.verdict != OK:
            return self.refuse_frame(request, frame.verdict)
        if opcode >= STATS and store.budget <= 0:
            return LATER
        store.requests[opcode] += 1
        if opcode == ACQUIRE:
            if store.draining:
                return reply_refusal(store, request, ACQUIRE, NOT_AVAILABLE, b"Draining")
            number = load_be32(body)
            outcome = counter_acquire(
                counters, self.connection, frame.tag, frame.key, frame.key_size, number, load_be32(body + 4),
                self.since_tenths, &store.budget
            )
            if counters.ring.state.sweep_left:
                store.stirred = True
        elif opcode == RELEASE:
            outcome = counter_release(
                counters, self.connection, frame.tag, frame.key, frame.key_size, load_be32(body)
            )
        elif opcode == GET:
            outcome = counter_get(counters, frame.tag, frame.key, frame.key_size, &number)
        elif opcode == NOOP:
            outcome = GRANTED
        else:
            return self.reply_at_length(request, opcode)
        if outcome != GRANTED:
            return self.reply_error(request, STATUS_OF_OUTCOME[<int>outcome])
        if opcode == ACQUIRE or opcode == GET:
            reply_number(store, request, number)
        else:
            reply(store, opcode, OK, request + 8, 0)
        return DONE

    cdef int reply_error(self, const uint8_t* request, uint8_t status) except -1:
        """Of a request that parsed."""
        return reply_refusal(<CounterStore>self.store, request, request[1], status, error_text(status))

    cdef int refuse_frame(self, const uint8_t* request, uint8_t verdict) except -1:
        """Of one that did not: where the magic is wrong, so may be the opcode."""
        cdef bint is_request = request[0] == REQUEST_MAGIC and request[1] < OPCODES
        cdef uint8_t opcode = request[1] if is_request else <uint8_t>OPCODES
        return reply_refusal(<CounterStore>self.store, request, opcode, verdict, error_text(verdict))

    cdef int reply_at_length(self, const uint8_t* request, uint8_t opcode) except -1:
        """Stats, whose body is composed in Python, and Dump, whose first piece this is."""
        cdef bytes stats
        if opcode == DUMP:
            memcpy(self.dump_opaque, request + 8, 4)
            self.dump_flags = request[2]
            self.position = 1
            self.produce()
            return DONE
        self.store.budget -= STATS_STEPS
        stats = (<CounterStore>self.store).stats_body()
        if len(stats) > REPLY_MAX - HEADER_SIZE:
            raise ValueError(f"the statistics take {len(stats)} bytes, more than a reply may have")
        memcpy(reply(self.store, STATS, OK, request + 8, <uint32_t>len(stats)), PyBytes_AS_STRING(stats), len(stats))
        return DONE

    cdef int produce(self) except -1:
        """The next piece of a Dump. Section "Dump".

        It walks record numbers, and records never move: what exists throughout appears exactly once.
        """
        cdef Store store = self.store
        cdef Counters* counters = &(<CounterStore>store).counters
        cdef size_t end = store.out_size + DUMP_PIECE
        cdef bint limits = self.dump_flags & LIMITS
        cdef bint is_current
        cdef uint32_t fixed = 10 + LIMIT_SIZE if limits else 10
        cdef Counter* counter
        cdef uint8_t* body
        while self.position <= counters.permits.table.pool.fresh:
            if store.out_size >= end or store.out_size >= OUTPUT_MAX or store.budget <= self.budget_floor:
                return 0
            store.budget -= 1
            counter = counter_at(counters, self.position)
            self.position += 1
            if not counter.permit.record.flags & RECORD_USED or not counter_exists(counters, counter):
                continue
            body = reply(store, DUMP, OK, self.dump_opaque, fixed + counter.permit.record.name_size)
            store_be32(body, counter.permit.consumption)
            is_current = counter.window == counters.state.window
            store_be32(body + 4, counter.peak if is_current else counter.permit.consumption)
            store_be16(body + 8, counter.permit.record.name_size)
            name_read(&counters.permits.table, &counter.permit.record, body + 10)
            if limits:
                store_be32(body + 10 + counter.permit.record.name_size, counter.limit)
        reply(store, DUMP, OK, self.dump_opaque, 0)
        self.position = 0
        return 0
