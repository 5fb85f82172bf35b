# The ring of idle records: those that nobody holds, in the order in which they became idle.
#
# Floor 1, header only. A record enters when it becomes idle, at most once (FLAG_IN_RING in its Record.flags); becoming
# busy touches nothing, so entries go stale, and a stale one is dropped when it is met.
#
# Invariant: the ring has as many entries as records have the flag, so it never holds more than the table has records.

from libc.stdint cimport uint8_t, uint32_t

from counterd.engine.debug cimport debug_check
from counterd.engine.region cimport Region, region_reserve
from counterd.engine.table cimport Record

cdef enum:
    FLAG_IN_RING = 1


cdef struct RingState:      # in the region
    uint32_t capacity
    uint32_t head
    uint32_t size
    uint32_t sweep_left     # entries that a round through the ring has yet to look at


cdef struct Ring:           # this process's view
    RingState* state
    uint32_t* numbers


cdef inline int ring_reserve(Ring* ring, Region* region, uint32_t capacity) except -1:
    region_reserve(region, b"idle ring", sizeof(RingState), <void**>&ring.state)
    region_reserve(region, b"idle ring", <size_t>capacity * sizeof(uint32_t), <void**>&ring.numbers)
    return 0


cdef inline void ring_begin(Ring* ring, uint32_t capacity) noexcept nogil:
    """To be called once, when the region is mapped. capacity: as it was reserved."""
    ring.state.capacity = capacity


cdef inline void ring_push(Ring* ring, uint32_t number, Record* record) noexcept nogil:
    """Enters a record behind all others, unless it is in the ring."""
    cdef RingState* state = ring.state
    cdef uint32_t slot = state.head + state.size
    if record.flags & FLAG_IN_RING:
        return
    debug_check(state.size < state.capacity)
    record.flags |= FLAG_IN_RING
    if slot >= state.capacity:
        slot -= state.capacity
    ring.numbers[slot] = number
    state.size += 1


cdef inline uint32_t ring_first(const Ring* ring) noexcept nogil:
    """The number of the record that ring_pop() takes out next. The ring is not empty."""
    debug_check(ring.state.size > 0)
    return ring.numbers[ring.state.head]


cdef inline void ring_pop(Ring* ring, Record* record) noexcept nogil:
    """Takes the first record out."""
    cdef RingState* state = ring.state
    record.flags &= <uint8_t>~FLAG_IN_RING
    state.head += 1
    if state.head == state.capacity:
        state.head = 0
    state.size -= 1
    state.sweep_left = min(state.sweep_left, state.size)
