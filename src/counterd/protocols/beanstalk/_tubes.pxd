# The tubes of the beanstalk protocol: names with queues of jobs.
#
# Floor 2, header only. _queues.pxd moves jobs between queues.
#
# A tube exists while something needs it: its jobs, connections that use or watch it, walks that are at it, and limits
# of reserves. Tubes are in a list in the order in which they were made.

from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t
from libc.string cimport memset

from counterd.engine.chains cimport Chains
from counterd.engine.debug cimport debug_check
from counterd.engine.pool cimport pool_left
from counterd.engine.region cimport Region, region_reserve
from counterd.engine.table cimport (
    Record, Table, name_blocks, record_at, table_begin, table_find, table_insert, table_remove, table_reserve,
)
from counterd.engine.wheel cimport Timer, Timers, timers_begin, timers_disarm, timers_reserve
from counterd.protocols.beanstalk._jobs cimport JOB_STATES

cdef enum:
    TUBE_NAME_INLINE = 40   # bytes of a name that need no block
    TUBE_COST = 224         # bytes of a tube besides its name's blocks: the record and two slots of the index


cdef struct Line:           # of jobs, by their line_next and line_prev
    uint32_t first
    uint32_t last


cdef struct Tube:           # 208 bytes
    Record record
    uint8_t name[TUBE_NAME_INLINE]
    uint32_t next           # in the order in which tubes were made
    uint32_t prev
    uint32_t ready          # first of the heap, by priority
    uint32_t delayed        # first of the heap, by time
    Line ready_line         # in the order in which jobs became ready
    Line buried_line
    uint32_t waiting_first  # watch of the connection that has waited longest
    uint32_t waiting_last
    uint32_t waiting
    uint32_t urgent         # ready jobs with a priority below URGENT
    uint32_t jobs[JOB_STATES]   # by state, and BLOCKED
    uint32_t using
    uint32_t watching
    uint32_t walks          # walks that are at this tube
    uint32_t pause          # seconds of the last pause
    uint32_t reserves_max   # a job that comes back after this many reserves is retired; 0: no limit
    uint32_t retire_to      # the tube of retired jobs; 0: they are buried
    uint32_t retired_here   # tubes whose retired jobs come here
    Timer timer             # armed for the first delayed job or the end of the pause, or earlier
    int64_t paused_until_ns
    uint64_t total          # jobs ever put into it
    uint64_t deletes
    uint64_t pauses
    uint64_t reserves       # jobs ever reserved from it
    uint64_t queued_ns      # total time that these had been ready


cdef struct TubesState:     # in the region
    uint32_t first
    uint32_t last


cdef struct Tubes:          # this process's view
    TubesState* state
    Table table
    Timers timers


cdef inline int tubes_reserve(Tubes* tubes, Region* region, uint32_t capacity) except -1:
    region_reserve(region, b"tubes", sizeof(TubesState), <void**>&tubes.state)
    table_reserve(&tubes.table, region, b"tubes", capacity, sizeof(Tube), TUBE_NAME_INLINE)
    timers_reserve(&tubes.timers, region, b"tubes")
    return 0


cdef inline void tubes_begin(
    Tubes* tubes, const uint64_t* hash_key, const Chains* chains, int64_t now_ns
) noexcept nogil:
    """Call this once, after the region was mapped. chains: the chains for the rest of long names."""
    table_begin(&tubes.table, hash_key, chains)
    timers_begin(&tubes.timers, &(<Tube*>tubes.table.records).timer, sizeof(Tube), now_ns)


cdef inline Tube* tube_at(const Tubes* tubes, uint32_t number) noexcept nogil:
    return <Tube*>record_at(&tubes.table, number)


cdef inline uint32_t tube_find(const Tubes* tubes, uint32_t tag, const uint8_t* name, uint32_t size) noexcept nogil:
    """Returns the tube with this name, or 0 if there is none."""
    return table_find(&tubes.table, tag, name, size)


cdef inline bint tubes_have_room(const Tubes* tubes, uint32_t name_size) noexcept nogil:
    """Returns whether there is room for another tube with a name of name_size bytes."""
    return pool_left(tubes.table.pool) != 0 and (
        pool_left(tubes.table.chains.pool) >= name_blocks(&tubes.table, name_size)
    )


cdef inline uint32_t tube_make(Tubes* tubes, uint32_t tag, const uint8_t* name, uint32_t size) noexcept nogil:
    """Makes a tube.

    The caller must have checked that there is room and that the name is new, and needs the tube immediately.
    """
    cdef uint32_t number = table_insert(&tubes.table, tag, name, size)
    cdef Tube* tube = tube_at(tubes, number)
    memset(&tube.next, 0, <uint8_t*>(tube + 1) - <uint8_t*>&tube.next)
    tube.prev = tubes.state.last
    if tube.prev:
        tube_at(tubes, tube.prev).next = number
    else:
        tubes.state.first = number
    tubes.state.last = number
    return number


cdef inline bint tube_is_needed(const Tube* tube) noexcept nogil:
    cdef uint32_t needed = tube.using | tube.watching | tube.walks | tube.reserves_max | tube.retired_here
    cdef int state
    for state in range(JOB_STATES):
        needed |= tube.jobs[state]
    return needed != 0


cdef inline void tube_settle(Tubes* tubes, uint32_t number) noexcept nogil:
    """Ends a tube if nothing needs it any more."""
    cdef Tube* tube = tube_at(tubes, number)
    if tube_is_needed(tube):
        return
    debug_check(tube.waiting == 0)
    timers_disarm(&tubes.timers, number)
    if tube.next:
        tube_at(tubes, tube.next).prev = tube.prev
    else:
        tubes.state.last = tube.prev
    if tube.prev:
        tube_at(tubes, tube.prev).next = tube.next
    else:
        tubes.state.first = tube.next
    table_remove(&tubes.table, number)


cdef inline bint tube_is_paused(const Tube* tube, int64_t now_ns) noexcept nogil:
    return now_ns < tube.paused_until_ns
