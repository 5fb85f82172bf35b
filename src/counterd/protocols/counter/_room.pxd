# The counter room's session and store, for whoever subclasses them in Cython (the benchmarks do).

from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t

from counterd._core cimport Frame, Session, Store
from counterd.protocols.counter._counters cimport Counters

cdef enum Opcode:
    NOOP = 0x00
    GET = 0x01
    ACQUIRE = 0x02
    RELEASE = 0x03
    STATS = 0x10
    DUMP = 0x11
    OPCODES = 0x12

cdef enum Flag:
    LIMITS = 0x01           # of a Dump: entries end with the counter's limit

cdef enum Status:
    OK = 0x00
    NOT_FOUND = 0x01
    INVALID_ARGUMENTS = 0x04
    NOT_AVAILABLE = 0x21
    NOT_ACQUIRED = 0x22
    UNKNOWN_COMMAND = 0x81
    OUT_OF_MEMORY = 0x82


cdef class CounterStore(Store):
    cdef Counters counters
    cdef object figures
    cdef uint64_t[OPCODES] requests  # by Opcode, those that parsed
    cdef bint draining          # nothing is handed out any more
    cdef uint64_t[OPCODES + 1][256] refusals  # by Opcode, the last for whatever is none; by Status

    cpdef begin_window(self, uint32_t number)
    cdef uint64_t refused(self, uint8_t status) noexcept
    cdef bytes stats_body(self)


cdef class CounterSession(Session):
    cdef uint8_t[4] dump_opaque     # of the Dump under way
    cdef uint8_t dump_flags         # likewise
    cdef uint32_t since_tenths      # now, as the ledger counts it

    cdef int refuse_frame(self, const uint8_t* request, uint8_t verdict) except -1
    cdef int reply_error(self, const uint8_t* request, uint8_t status) except -1
    cdef int reply_at_length(self, const uint8_t* request, uint8_t opcode) except -1
    cdef void parse_named(
        self, const uint8_t* body, uint32_t size, uint8_t opcode, uint8_t fixed, Frame* frame
    ) noexcept
