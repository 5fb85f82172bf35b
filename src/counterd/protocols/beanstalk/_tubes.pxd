# The tubes of the beanstalk protocol: names with queues of jobs.
#
# Floor 2, header only. _queues.pxd moves jobs between queues.
#
# A tube exists while something needs it: its jobs, connections that use or watch it, walks that are at it, and limits
# of reserves. Tubes are in a list in the order in which they were made.
#
# A walk through the names shows the tubes that existed when it began, because the reply begins with its length. If such
# a tube ends before the walk has passed it, the tube is no longer found by its name, but stays in the list until no
# walk that began before its end is under way. `moment` orders ends of tubes and begins of walks.

from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t
from libc.string cimport memset

from counterd.engine.chains cimport Chains
from counterd.engine.debug cimport debug_check
from counterd.engine.list cimport Ends, Links, List, ends_append, ends_remove
from counterd.engine.pool cimport pool_left
from counterd.engine.region cimport Region, region_reserve
from counterd.engine.table cimport (
    Record, Table, name_blocks, record_at, table_begin, table_find, table_free, table_insert, table_reserve,
    table_unlist,
)
from counterd.engine.wheel cimport Timer, Timers, timers_begin, timers_disarm, timers_reserve
from counterd.protocols.beanstalk._jobs cimport JOB_STATES

cdef enum:
    TUBE_NAME_INLINE = 40   # bytes of a name that need no block
    LINE_MARKS = 3          # bytes of a line that names a tube in a list, besides the name
    TUBE_COST = 248         # bytes of a tube besides its name's blocks: the record and two slots of the index


cdef struct Tube:           # 232 bytes
    Record record
    uint8_t name[TUBE_NAME_INLINE]
    Links links             # in the order in which tubes were made
    uint32_t ready          # first of the heap, by priority
    uint32_t delayed        # first of the heap, by time
    Ends ready_list         # in the order in which jobs became ready
    Ends buried_list
    Ends queue              # watches of connections that wait; the first one has waited longest
    uint32_t waiting
    uint32_t urgent         # ready jobs with a priority below URGENT
    uint32_t jobs[JOB_STATES]   # by state, and BLOCKED
    uint32_t using
    uint32_t watching
    uint32_t walks          # long commands that need this tube
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
    uint64_t made           # moment
    uint64_t ended          # moment; 0: it exists
    uint32_t next_ended
    uint32_t pins           # walks through the names that are at this tube


cdef struct TubesState:     # in the region
    Ends all                # tubes, in the order in which they were made
    uint32_t ended_first    # tubes that have ended and are still in the list, in the order of their ends
    uint32_t ended_last
    uint32_t ended
    uint64_t moment         # how many tubes were made, and have ended
    uint64_t text           # bytes of the lines that name all tubes


cdef struct NamesWalk:
    NamesWalk* later        # the walk that began next
    NamesWalk* earlier
    uint64_t since          # moment
    uint64_t left           # bytes of the lines that remain
    uint32_t connection
    uint32_t at             # the next tube


cdef struct Tubes:          # this process's view
    TubesState* state
    Table table
    Timers timers
    NamesWalk* first_walk   # the walk that began first
    NamesWalk* last_walk


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


cdef inline List tubes_by_age(const Tubes* tubes) noexcept nogil:
    cdef Tube* first = <Tube*>tubes.table.records
    return List(first, sizeof(Tube), &first.links)


cdef inline uint32_t tube_find(const Tubes* tubes, uint32_t tag, const uint8_t* name, uint32_t size) noexcept nogil:
    """Returns the tube with this name, or 0 if there is none."""
    return table_find(&tubes.table, tag, name, size)


cdef inline bint tubes_have_room(const Tubes* tubes, uint32_t name_size) noexcept nogil:
    """Returns whether there is room for another tube with a name of name_size bytes."""
    return pool_left(tubes.table.pool) != 0 and (
        pool_left(tubes.table.chains.pool) >= name_blocks(&tubes.table, name_size)
    )


cdef inline uint32_t tubes_count(const Tubes* tubes) noexcept nogil:
    return tubes.table.pool.used - tubes.state.ended


cdef inline uint32_t tube_make(Tubes* tubes, uint32_t tag, const uint8_t* name, uint32_t size) noexcept nogil:
    """Makes a tube.

    The caller must have checked that there is room and that the name is new, and needs the tube immediately.
    """
    cdef uint32_t number = table_insert(&tubes.table, tag, name, size)
    cdef Tube* tube = tube_at(tubes, number)
    memset(&tube.links, 0, <uint8_t*>(tube + 1) - <uint8_t*>&tube.links)
    ends_append(tubes_by_age(tubes), &tubes.state.all, number)
    tubes.state.moment += 1
    tubes.state.text += tube.record.name_size + LINE_MARKS
    tube.made = tubes.state.moment
    return number


cdef inline bint tube_is_needed(const Tube* tube) noexcept nogil:
    cdef uint32_t needed = tube.using | tube.watching | tube.walks | tube.reserves_max | tube.retired_here
    cdef int state
    for state in range(JOB_STATES):
        needed |= tube.jobs[state]
    return needed != 0


cdef inline void tube_free(Tubes* tubes, uint32_t number) noexcept nogil:
    ends_remove(tubes_by_age(tubes), &tubes.state.all, number)
    table_free(&tubes.table, number)


cdef inline void tube_settle(Tubes* tubes, uint32_t number) noexcept nogil:
    """Ends a tube if nothing needs it any more."""
    cdef TubesState* state = tubes.state
    cdef Tube* tube = tube_at(tubes, number)
    if tube_is_needed(tube):
        return
    debug_check(tube.waiting == 0 and tube.ended == 0)
    timers_disarm(&tubes.timers, number)
    table_unlist(&tubes.table, number)
    state.moment += 1
    state.text -= tube.record.name_size + LINE_MARKS
    if tubes.last_walk == NULL or tube.made > tubes.last_walk.since:
        tube_free(tubes, number)
        return
    tube.ended = state.moment
    state.ended += 1
    if state.ended_last:
        tube_at(tubes, state.ended_last).next_ended = number
    else:
        state.ended_first = number
    state.ended_last = number


cdef inline bint tube_is_paused(const Tube* tube, int64_t now_ns) noexcept nogil:
    return now_ns < tube.paused_until_ns


# ---- walks through the names -----------------------------------------------------------------------------------------

cdef inline void names_begin(Tubes* tubes, NamesWalk* walk, uint32_t connection) noexcept nogil:
    """Begins a walk. It continues until names_end(); the walk must not move in memory until then."""
    walk.connection = connection
    walk.since = tubes.state.moment
    walk.left = tubes.state.text
    walk.at = tubes.state.all.first
    tube_at(tubes, walk.at).pins += 1
    walk.later = NULL
    walk.earlier = tubes.last_walk
    if walk.earlier:
        walk.earlier.later = walk
    else:
        tubes.first_walk = walk
    tubes.last_walk = walk


cdef inline uint32_t names_next(Tubes* tubes, NamesWalk* walk) noexcept nogil:
    """Returns the next tube to name, or 0 if the tube at this place has to be left out. Some bytes must be left."""
    cdef uint32_t number = walk.at
    cdef Tube* tube = tube_at(tubes, number)
    cdef bint is_named = tube.ended == 0 or tube.ended > walk.since
    debug_check(tube.made <= walk.since)
    if is_named:
        walk.left -= tube.record.name_size + LINE_MARKS
    if walk.left:
        tube.pins -= 1
        walk.at = tube.links.next
        tube_at(tubes, walk.at).pins += 1
    return number if is_named else 0


cdef inline void names_end(Tubes* tubes, NamesWalk* walk) noexcept nogil:
    tube_at(tubes, walk.at).pins -= 1
    if walk.earlier:
        walk.earlier.later = walk.later
    else:
        tubes.first_walk = walk.later
    if walk.later:
        walk.later.earlier = walk.earlier
    else:
        tubes.last_walk = walk.earlier


cdef inline uint32_t tubes_next_left(const Tubes* tubes) noexcept nogil:
    """Returns a tube that has ended and that no walk needs any more, or 0 if there is none."""
    cdef uint32_t number = tubes.state.ended_first
    cdef const Tube* tube
    if number == 0:
        return 0
    tube = tube_at(tubes, number)
    return 0 if tube.pins or tubes.first_walk != NULL and tube.ended > tubes.first_walk.since else number


cdef inline void tubes_free_ended(Tubes* tubes, int* steps) noexcept nogil:
    """Frees tubes that have ended, at most steps[0]."""
    cdef TubesState* state = tubes.state
    cdef uint32_t number
    while steps[0] > 0 and tubes_next_left(tubes):
        steps[0] -= 1
        number = state.ended_first
        state.ended_first = tube_at(tubes, number).next_ended
        if state.ended_first == 0:
            state.ended_last = 0
        state.ended -= 1
        tube_free(tubes, number)
