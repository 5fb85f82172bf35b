# A list of records in the order of their last use.
#
# Floor 1, header only. The links are embedded in records and addressed by number.
#
# Invariant: the list contains each record that entered and did not leave, once, in the same order in both directions.

from libc.stdint cimport uint8_t, uint32_t

from counterd.engine.debug cimport debug_check
from counterd.engine.region cimport Region, region_reserve


cdef struct Links:          # at the same offset in each record
    uint32_t newer          # 0 = it is the newest
    uint32_t older


cdef struct RecencyState:   # in the region
    uint32_t newest
    uint32_t oldest


cdef struct Recency:        # this process's view
    RecencyState* state
    uint8_t* base           # where the links of record 0 would be
    size_t stride           # bytes from a record to the next


cdef inline int recency_reserve(Recency* recency, Region* region, const char* name) except -1:
    region_reserve(region, name, sizeof(RecencyState), <void**>&recency.state)
    return 0


cdef inline void recency_begin(Recency* recency, void* first, size_t stride) noexcept nogil:
    """Call this once, after the region was mapped.

    first: the links of record 0. stride: how many bytes after the links of a record the links of the next record begin.
    """
    recency.base = <uint8_t*>first
    recency.stride = stride


cdef inline Links* links_at(const Recency* recency, uint32_t number) noexcept nogil:
    debug_check(number > 0)
    return <Links*>(recency.base + <size_t>number * recency.stride)


cdef inline void recency_enter(Recency* recency, uint32_t number) noexcept nogil:
    """Adds a record that is not in the list, as the newest record."""
    cdef RecencyState* state = recency.state
    cdef Links* links = links_at(recency, number)
    links.newer = 0
    links.older = state.newest
    if state.newest:
        links_at(recency, state.newest).newer = number
    else:
        state.oldest = number
    state.newest = number


cdef inline void recency_leave(Recency* recency, uint32_t number) noexcept nogil:
    cdef RecencyState* state = recency.state
    cdef const Links* links = links_at(recency, number)
    if links.newer:
        links_at(recency, links.newer).older = links.older
    else:
        state.newest = links.older
    if links.older:
        links_at(recency, links.older).newer = links.newer
    else:
        state.oldest = links.newer


cdef inline void recency_touch(Recency* recency, uint32_t number) noexcept nogil:
    """Makes a record that is in the list the newest record."""
    if recency.state.newest != number:
        recency_leave(recency, number)
        recency_enter(recency, number)
