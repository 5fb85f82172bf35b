"""The counter protocol, sans-I/O: decodes, executes and answers the requests of a connection.

Floor 2. Section names below are those of the protocol's document ("Counter support"); docs/protocols/counter.md says
where and why this differs from the reference implementation.

A frame is a 12-byte header and a body. Framing is lost if the magic is wrong, or the body is longer than that of any
request (BODY_MAX). _messages.pxd decodes and encodes, _counters.pxd decides.
"""

from cpython.bytes cimport PyBytes_AS_STRING
from libc.stdint cimport uint8_t, uint16_t, uint32_t, uint64_t
from libc.string cimport memcpy

from counterd._core cimport DONE, LATER, OUTPUT_MAX, REPLY_ROOM, Frame, Session, Store
from counterd.engine.byteorder cimport load_be16, load_be32, prefetch, store_be16, store_be32
from counterd.engine.debug cimport debug_check
from counterd.engine.permits cimport GRANTED, Outcome, Permits, ledger_tag, permit_at
from counterd.engine.table cimport RECORD_USED, index_peek, index_prefetch, name_read, name_tag
from counterd.protocols.counter._counters cimport (
    Counter, Counters, counter_acquire, counter_at, counter_exists, counter_get, counter_release,
)
from counterd.protocols.counter._messages cimport (
    ACQUIRE, BODY_MAX, DUMP, GET, HEADER_SIZE, INVALID_ARGUMENTS, LIMITS, NO_ERROR, NOT_ACQUIRED, NOT_FOUND, OPCODES,
    OUT_OF_MEMORY, RELEASE, REPLY_MAX, REQUEST_MAGIC, RESOURCE_NOT_AVAILABLE, STATS, UNKNOWN_COMMAND, Answer, Request,
    frame_opaque, header_encode, reply_encode, request_decode, request_kind,
)
from counterd.protocols.counter._store cimport CounterStore

cdef enum:
    NS_PER_TENTH = 100000000
    UNKNOWN = 255
    DUMP_PIECE = 65536      # bytes of a Dump that one call produces: about 1,700 counters with 16-byte names
    STATS_STEPS = 500       # a Stats takes some 20 us in Python
    LIMIT_SIZE = 4          # bytes of the limit, after the name of a Dump's entry, with LIMITS

# Bytes of each request's body before the name; 0 = the request has no body. Section "Operations".
cdef uint8_t[OPCODES] BODY_FIXED = [
    0, 2, 10, 6, UNKNOWN, UNKNOWN, UNKNOWN, UNKNOWN,
    UNKNOWN, UNKNOWN, UNKNOWN, UNKNOWN, UNKNOWN, UNKNOWN, UNKNOWN, UNKNOWN, 0, 0,
]

# The status for each of the engine's outcomes, in their order.
cdef uint8_t[5] STATUS_OF_OUTCOME = [NO_ERROR, NOT_FOUND, RESOURCE_NOT_AVAILABLE, NOT_ACQUIRED, OUT_OF_MEMORY]

assert REPLY_MAX <= REPLY_ROOM


cdef inline uint8_t* reply(Store store, uint8_t opcode, uint32_t opaque, uint32_t size) noexcept:
    """Appends the header of a reply. Returns where the body of `size` bytes goes."""
    cdef uint8_t* target = store.out + store.out_size
    debug_check(store.out_size + HEADER_SIZE + size <= OUTPUT_MAX + REPLY_MAX)
    store.out_size += HEADER_SIZE + size
    return header_encode(target, opcode, NO_ERROR, opaque, size)


cdef inline Answer decide(CounterSession session, const Frame* frame, const Request* request) noexcept:
    """Decides about a request for one counter, or a Noop."""
    cdef Counters* counters = &(<CounterStore>session.store).counters
    cdef uint32_t number = request.resources
    cdef Outcome outcome = GRANTED
    if request.opcode == ACQUIRE:
        if (<CounterStore>session.store).draining:
            return Answer(RESOURCE_NOT_AVAILABLE, 0, b"Draining")
        outcome = counter_acquire(
            counters, session.connection, frame.tag, frame.key, frame.key_size, request.resources, request.maximum,
            <uint32_t>(session.store.now_ns // NS_PER_TENTH), &session.store.budget
        )
        if counters.ring.state.sweep_left:
            session.store.stirred = True
    elif request.opcode == RELEASE:
        outcome = counter_release(
            counters, session.connection, frame.tag, frame.key, frame.key_size, request.resources
        )
    elif request.opcode == GET:
        outcome = counter_get(counters, frame.tag, frame.key, frame.key_size, &number)
    return Answer(STATUS_OF_OUTCOME[<int>outcome], number, NULL)


cdef class CounterSession(Session):
    """One connection of the counter protocol."""

    def __cinit__(self, CounterStore store not None):
        pass  # checks the type of the store, because the methods below cast it

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
            frame.verdict = NO_ERROR
        elif 0 < fixed < body and fixed != UNKNOWN:
            self.parse_named(data + HEADER_SIZE, body, opcode, fixed, frame)
        return frame.size

    cdef void parse_named(
        self, const uint8_t* body, uint32_t size, uint8_t opcode, uint8_t fixed, Frame* frame
    ) noexcept:
        """Parses a body: numbers, the length of the name, the name. Sections "Get", "Acquire" and "Release"."""
        cdef uint16_t name_size = load_be16(body + fixed - 2)
        cdef Permits* permits = &(<CounterStore>self.store).counters.permits
        if name_size == 0 or fixed + <uint32_t>name_size != size:
            return
        if opcode == ACQUIRE and (load_be32(body) == 0 or load_be32(body + 4) < load_be32(body)):
            return
        frame.verdict = NO_ERROR
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

    cdef int execute_frame(self, const Frame* frame) except -1:
        cdef uint64_t* requests = (<CounterStore>self.store).requests
        cdef uint64_t[256]* refusals = (<CounterStore>self.store).refusals
        cdef Request request = request_decode(frame)
        cdef Answer answer
        if frame.verdict != NO_ERROR:
            answer = Answer(frame.verdict, 0, NULL)
        else:
            if request.opcode >= STATS and self.store.budget <= 0:
                return LATER
            requests[request.opcode] += 1
            if request.opcode >= STATS:
                return self.reply_at_length(frame)
            answer = decide(self, frame, &request)
        if answer.status != NO_ERROR:
            refusals[request_kind(frame)][answer.status] += 1
        self.store.out_size += reply_encode(self.store.out + self.store.out_size, frame, &answer)
        return DONE

    cdef int reply_at_length(self, const Frame* frame) except -1:
        """Executes Stats, whose body is made in Python, or begins a Dump."""
        cdef bytes stats
        cdef uint8_t* target
        if frame.data[1] == DUMP:
            self.dump_opaque = frame_opaque(frame)
            self.dump_flags = frame.data[2]
            self.position = 1
            self.produce()
            return DONE
        self.store.budget -= STATS_STEPS
        stats = (<CounterStore>self.store).stats_body()
        if len(stats) > REPLY_MAX - HEADER_SIZE:
            raise ValueError(f"the statistics take {len(stats)} bytes, more than a reply may have")
        target = reply(self.store, STATS, frame_opaque(frame), <uint32_t>len(stats))
        memcpy(target, PyBytes_AS_STRING(stats), len(stats))
        return DONE

    cdef int produce(self) except -1:
        """Writes the next piece of a Dump. Section "Dump".

        A Dump walks record numbers. Records never move, so a counter that exists throughout appears exactly once.
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
            body = reply(store, DUMP, self.dump_opaque, fixed + counter.permit.record.name_size)
            store_be32(body, counter.permit.consumption)
            is_current = counter.window == counters.state.window
            store_be32(body + 4, counter.peak if is_current else counter.permit.consumption)
            store_be16(body + 8, counter.permit.record.name_size)
            name_read(&counters.permits.table, &counter.permit.record, body + 10)
            if limits:
                store_be32(body + 10 + counter.permit.record.name_size, counter.limit)
        reply(store, DUMP, self.dump_opaque, 0)
        self.position = 0
        return 0


def open_store(*, make_session=CounterSession, **sizes):
    """Makes a store. make_session: benchmarks and tests have others. sizes: arguments of CounterStore."""
    return CounterStore(make_session=make_session, **sizes)
