# The ring of idle records: records that nobody holds, in the order in which they became idle.
#
# Floor 1, header only. A record enters the ring when it becomes idle, and is in it at most once (FLAG_IN_RING in its
# Record.flags). A record that becomes busy stays in the ring as a stale entry, which is dropped when it is reached.
#
# Invariant: exactly the records in the ring have the flag, so the ring never has more entries than the table.

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
    uint32_t sweep_left     # entries that the current sweep has not looked at yet


cdef struct Ring:           # this process's view
    RingState* state
    uint32_t* numbers


cdef inline int ring_reserve(Ring* ring, Region* region, uint32_t capacity) except -1:
    region_reserve(region, b"idle ring", sizeof(RingState), <void**>&ring.state)
    region_reserve(region, b"idle ring", <size_t>capacity * sizeof(uint32_t), <void**>&ring.numbers)
    return 0


cdef inline void ring_begin(Ring* ring, uint32_t capacity) noexcept nogil:
    """Call this once, after the region was mapped. capacity: as for ring_reserve()."""
    ring.state.capacity = capacity


cdef inline void ring_push(Ring* ring, uint32_t number, Record* record) noexcept nogil:
    """Adds a record at the end of the ring, unless the ring already has it."""
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
    """Returns the number of the first record. The ring must not be empty."""
    debug_check(ring.state.size > 0)
    return ring.numbers[ring.state.head]


cdef inline void ring_pop(Ring* ring, Record* record) noexcept nogil:
    """Removes the first record."""
    cdef RingState* state = ring.state
    record.flags &= <uint8_t>~FLAG_IN_RING
    state.head += 1
    if state.head == state.capacity:
        state.head = 0
    state.size -= 1
    state.sweep_left = min(state.sweep_left, state.size)
