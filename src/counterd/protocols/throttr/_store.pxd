# The throttr protocol's store, for the modules with its sessions, listings and tables.

from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t

from counterd._core cimport Frame, Store
from counterd.engine.chains cimport Chains
from counterd.protocols.throttr._channels cimport Channels
from counterd.protocols.throttr._keys cimport Keys
from counterd.protocols.throttr._members cimport Members
from counterd.protocols.throttr._wire cimport OPCODES, Layout

cdef enum:
    SUBSCRIPTION_BLOCKS = 3  # its memory, in blocks: a holding, a permit, the records beside them, and their slots


cdef struct Rate:           # a count in total, and per minute
    uint64_t total
    uint64_t before         # the total when the current minute began
    uint64_t last           # the count in the minute before


cdef struct Event:          # delivered to the subscribers of a channel, from the permits' cursor on
    uint32_t channel        # 0 = no event is under way
    uint32_t publisher      # its connection, which got its own event at once
    uint64_t payload        # bytes


cdef struct ThrottrState:   # in the region
    Event event
    uint32_t epoch          # rises when a listing begins, if something was made since the last one began
    uint32_t epoch_used     # something was made in the current epoch
    uint32_t minute         # the current minute, as of turn_minute()
    int64_t minute_end_ns
    int64_t started_ns      # on the caller's clock; -1 = not known yet
    uint64_t repeated       # subscriptions of a connection to a channel beyond the first
    Rate requests[OPCODES]
    uint64_t refusals[OPCODES]  # requests that were answered 00
    uint64_t broken         # frames where framing was lost; not among the requests
    Rate read_bytes
    Rate write_bytes


cdef class ThrottrStore(Store):
    cdef ThrottrState* state
    cdef Chains chains          # of long names and of values
    cdef Channels channels
    cdef Keys keys
    cdef Members members
    # Not in the region:
    cdef void** sessions        # by connection: a Session of this process, or NULL
    cdef bytes event_bytes      # the event under way as it is posted to sessions; or None
    cdef int width              # N: bytes of a number
    cdef uint64_t number_max    # the largest of N bytes
    cdef uint64_t message_max
    cdef uint64_t memory_max
    cdef Layout[OPCODES] layouts
    cdef int64_t wall_ns        # Unix time when the caller's clock was 0

    cdef void turn_minute(self, int64_t now_ns) noexcept
    cdef bint has_room(self, uint32_t records, uint32_t blocks, uint32_t blocks_freed) noexcept
    cdef uint32_t enter_epoch(self) noexcept
    cdef uint32_t begin_listing(self) noexcept
    cdef int expire(self, int steps) noexcept
    cdef bint catch_up(self) noexcept
    cdef uint64_t memory_used(self) noexcept
    cdef int find_room(self, uint32_t records, uint32_t blocks, uint32_t blocks_freed) noexcept
    cdef bint has_places(self, bint is_new) noexcept
    cdef int publish(self, uint32_t channel, uint32_t publisher, const Frame* frame) except -1
    cdef void end_event(self) noexcept
    cdef int deliver(self, int steps) except? -1
    cdef bint can_give(self, uint32_t entry) noexcept
    cdef int give(self, uint32_t entry) except -1
    cdef int64_t audit_keys(self) except -1
    cdef int audit_members(self) except -1


# ---- replies -------------------------------------------------------------------------------------------------------

cdef inline uint8_t* append(ThrottrStore store, uint32_t size) noexcept:
    """Adds `size` bytes to the output. Returns where to write the bytes. 8 more bytes may be overwritten."""
    cdef uint8_t* target = store.out + store.out_size
    store.out_size += size
    return target


cdef inline uint8_t* reply(ThrottrStore store, uint32_t size) noexcept:
    """Appends the beginning of a reply, which is 01. Returns where the rest of the reply goes."""
    cdef uint8_t* target = append(store, size)
    target[0] = 1
    return target + 1
