"""The yrmcds counter protocol, sans-I/O: what a frame is, what it does, and the replies.

Floor 2. Section names below are those of the protocol's document ("Counter support"); docs/protocols/counter.md says
where and why this differs from the reference implementation.

A frame is a 12-byte header and a body. Its parser answers with the bytes it takes, 0 for "more are needed", or -1 when
framing is lost: a wrong magic, or a body longer than any request can have (BODY_MAX).
"""

from cpython.bytes cimport PyBytes_AS_STRING
from libc.stdint cimport int64_t, uint8_t, uint16_t, uint32_t
from libc.string cimport memcpy, strlen

from counterd._core cimport (
    DONE, GRANTED, LATER, OUTPUT_MAX, REPLY_MAX, Counter, Frame, Header, Outcome, Region, Session, Store,
    counter_acquire, counter_at, counter_exists, counter_get, counter_release, ledger_tag,
)
from counterd._table cimport RECORD_USED, index_peek, index_prefetch, name_read, name_tag
from counterd.byteorder cimport load_be16, load_be32, prefetch, store_be16, store_be32
from counterd.debug cimport debug_check

cdef enum:
    REQUEST_MAGIC = 0x90
    RESPONSE_MAGIC = 0x91
    HEADER_SIZE = 12
    BODY_MAX = 65545        # Acquire with the longest name: 4 + 4 + 2 + 65,535
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

    figures: called for each Stats; returns what the floors above count, a mapping of names to values.
    """

    def __init__(self, *, figures, **_):
        self.figures = figures

    cpdef Session session(self, int64_t now_ns=0):
        return CounterSession(self)

    cpdef dict snapshot(self):
        cdef dict figures = Store.snapshot(self)
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
        self.calling_out = True
        try:
            ordered.update(self.figures())
        finally:
            self.calling_out = False
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
        cdef Region* region = &self.store.region
        if name_size == 0 or fixed + <uint32_t>name_size != size:
            return
        if opcode == ACQUIRE and (load_be32(body) == 0 or load_be32(body + 4) < load_be32(body)):
            return
        frame.verdict = OK
        frame.key = body + fixed
        frame.key_size = name_size
        frame.tag = name_tag(&region.names, frame.key, name_size)
        index_prefetch(&region.names.index, frame.tag)
        if opcode != GET:
            index_prefetch(&region.ledger, ledger_tag(self.connection, frame.tag))

    cdef void prefetch_frames(self, const Frame* frames, int count) noexcept:
        cdef Region* region = &self.store.region
        cdef uint32_t number
        cdef int i
        for i in range(count):
            if frames[i].key_size == 0:
                continue
            number = index_peek(&region.names.index, frames[i].tag)
            if number:
                prefetch(counter_at(region, number))
            if frames[i].data[1] != GET:
                number = index_peek(&region.ledger, ledger_tag(self.connection, frames[i].tag))
                if number:
                    prefetch(region.holdings + number)

    cdef int execute_frame(self, const Frame* frame) except -1:
        cdef CounterStore store = <CounterStore>self.store
        cdef Region* region = &store.region
        cdef const uint8_t* request = frame.data
        cdef const uint8_t* body = request + HEADER_SIZE
        cdef uint8_t opcode = request[1]
        cdef uint32_t number = 0
        cdef Outcome outcome
        if frame.verdict != OK:
            return self.refuse_frame(request, frame.verdict)
        if opcode >= STATS and region.budget <= 0:
            return LATER
        store.requests[opcode] += 1
        if opcode == ACQUIRE:
            if store.draining:
                return reply_refusal(store, request, ACQUIRE, NOT_AVAILABLE, b"Draining")
            number = load_be32(body)
            outcome = counter_acquire(
                region, self.connection, frame.tag, frame.key, frame.key_size, number, load_be32(body + 4), self.since
            )
        elif opcode == RELEASE:
            outcome = counter_release(
                region, self.connection, frame.tag, frame.key, frame.key_size, load_be32(body)
            )
        elif opcode == GET:
            outcome = counter_get(region, frame.tag, frame.key, frame.key_size, &number)
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
        self.store.region.budget -= STATS_STEPS
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
        cdef Region* region = &store.region
        cdef Header* header = region.header
        cdef size_t end = store.out_size + DUMP_PIECE
        cdef bint limits = self.dump_flags & LIMITS
        cdef uint32_t fixed = 10 + LIMIT_SIZE if limits else 10
        cdef Counter* counter
        cdef uint8_t* body
        while self.position <= header.records.fresh:
            if store.out_size >= end or store.out_size >= OUTPUT_MAX or region.budget <= self.budget_floor:
                return 0
            region.budget -= 1
            counter = counter_at(region, self.position)
            self.position += 1
            if not counter.record.flags & RECORD_USED or not counter_exists(region, counter):
                continue
            body = reply(store, DUMP, OK, self.dump_opaque, fixed + counter.record.name_size)
            store_be32(body, counter.consumption)
            store_be32(body + 4, counter.peak if counter.window == header.window else counter.consumption)
            store_be16(body + 8, counter.record.name_size)
            name_read(&region.names, &counter.record, body + 10)
            if limits:
                store_be32(body + 10 + counter.record.name_size, counter.limit)
        reply(store, DUMP, OK, self.dump_opaque, 0)
        self.position = 0
        return 0
