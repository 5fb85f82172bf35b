# The groups of the beanstalk protocol: jobs that need a permit of another protocol to be reserved.
#
# Floor 2, header only. Such a job has a requirement: the name of the permits and their maximum. A group is a tube and a
# name, for the jobs of that tube with requirements of that name. _queues.pxd moves its jobs, and the store takes the
# permits.
#
# Of a group's ready jobs only the first is in the heap of the tube, as its head; the group has its own heap for the
# others. If there is no permit for the head, the group is blocked: its ready jobs are all in its own heap, so nobody
# finds them, and the group waits for a permit. Blocking and unblocking a group costs the same however many jobs it has.
#
# Invariants (audit_groups checks them):
# - a group exists while jobs of its tube have requirements to its name;
# - each reserved job of a group has one permit, and so has a group with `has_permit`;
# - a group that is blocked waits, or its timer is armed.

from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t
from libc.string cimport memcpy, memset

from counterd.engine.chains cimport Chains
from counterd.engine.region cimport Region, region_reserve
from counterd.engine.table cimport (
    Record, Table, name_bytes, name_tag, record_at, table_begin, table_find, table_insert, table_remove, table_reserve,
)
from counterd.engine.wheel cimport Timer, Timers, timers_begin, timers_disarm, timers_reserve
from counterd.protocols.beanstalk._wire cimport NAME_MAX

cdef enum:
    GROUP_NAME_INLINE = 40  # bytes of a group's name that need no block
    GROUP_COST = 120        # bytes of a group besides its name's blocks: the record and two slots of the index
    REQUIREMENT_COST = 8    # bytes
    GROUP_HEAD = 4          # bytes of a group's name before that of the permits: the number of the tube
    RETRY_NS = 100000000    # until a group tries again that found no room to wait, at least
    RETRY_APART_NS = 1562500    # between two such groups: 64 in RETRY_NS, however many there are


cdef struct Requirement:    # beside its Job
    uint32_t group
    uint32_t maximum


cdef struct Group:          # 104 bytes
    Record record
    uint8_t name[GROUP_NAME_INLINE]
    uint32_t tube
    uint32_t jobs           # in any state
    uint32_t ready
    uint32_t reserved
    uint32_t head           # the first ready job, in the heap of the tube; 0: there is none, or the group is blocked
    uint32_t first          # of its own heap
    uint32_t asked          # the maximum for which it waits, or has got a permit
    uint32_t place          # where it waits, in the lender's words; 0: it does not
    Timer timer             # armed when it has got a permit, or is to try again
    uint8_t is_blocked
    uint8_t has_permit      # it has waited for this permit, and no job has it yet
    uint8_t spare[6]


cdef struct GroupsState:    # in the region
    uint64_t requirements
    uint64_t bytes          # of groups and requirements, without the blocks of names
    uint64_t reserved       # jobs with requirements that are reserved
    uint64_t granted        # permits that came after a wait, in total
    int64_t retry_ns        # when the last group that found no room to wait tries again


cdef struct Groups:         # this process's view
    GroupsState* state
    Table table
    Timers timers
    Requirement* requirements   # by job


cdef inline int groups_reserve(Groups* groups, Region* region, uint32_t capacity, uint32_t jobs) except -1:
    region_reserve(region, b"groups", sizeof(GroupsState), <void**>&groups.state)
    table_reserve(&groups.table, region, b"groups", capacity, sizeof(Group), GROUP_NAME_INLINE)
    timers_reserve(&groups.timers, region, b"groups")
    region_reserve(region, b"requirements", (<size_t>jobs + 1) * sizeof(Requirement), <void**>&groups.requirements)
    return 0


cdef inline void groups_begin(
    Groups* groups, const uint64_t* hash_key, const Chains* chains, int64_t now_ns
) noexcept nogil:
    """Call this once, after the region was mapped. chains: the chains for the rest of long names."""
    table_begin(&groups.table, hash_key, chains)
    timers_begin(&groups.timers, &(<Group*>groups.table.records).timer, sizeof(Group), now_ns)


cdef inline Group* group_at(const Groups* groups, uint32_t number) noexcept nogil:
    return <Group*>record_at(&groups.table, number)


cdef inline Group* group_of(const Groups* groups, uint32_t job) noexcept nogil:
    """Returns the group of a job with a requirement."""
    return group_at(groups, groups.requirements[job].group)


cdef inline int64_t groups_retry_ns(Groups* groups, int64_t now_ns) noexcept nogil:
    """Returns when a group that found no room to wait is to try again: after all others of these.

    But not later than if all groups were such, as those that have gone meanwhile had their times too.
    """
    cdef int64_t first_ns = now_ns + RETRY_NS
    cdef int64_t last_ns = first_ns + <int64_t>groups.table.pool.used * RETRY_APART_NS
    groups.state.retry_ns = min(max(groups.state.retry_ns + RETRY_APART_NS, first_ns), last_ns)
    return groups.state.retry_ns


cdef inline uint32_t group_name(uint8_t* target, uint32_t tube, const uint8_t* name, uint32_t size) noexcept nogil:
    """Writes the name of a group, at most GROUP_HEAD + NAME_MAX bytes. Returns its size."""
    memcpy(target, &tube, GROUP_HEAD)
    memcpy(target + GROUP_HEAD, name, size)
    return GROUP_HEAD + size


cdef inline uint32_t group_find(const Groups* groups, uint32_t tube, const uint8_t* name, uint32_t size) noexcept nogil:
    """Returns the group for a tube and a name of permits, or 0 if there is none."""
    cdef uint8_t[GROUP_HEAD + NAME_MAX] word
    size = group_name(word, tube, name, size)
    return table_find(&groups.table, name_tag(&groups.table, word, size), word, size)


cdef inline uint32_t group_make(Groups* groups, uint32_t tube, const uint8_t* name, uint32_t size) noexcept nogil:
    """Makes a group.

    The caller must have checked that the group is new and that there is room, and immediately adds a requirement.
    """
    cdef uint8_t[GROUP_HEAD + NAME_MAX] word
    cdef uint32_t number
    cdef Group* group
    size = group_name(word, tube, name, size)
    number = table_insert(&groups.table, name_tag(&groups.table, word, size), word, size)
    group = group_at(groups, number)
    memset(&group.tube, 0, <uint8_t*>(group + 1) - <uint8_t*>&group.tube)
    group.tube = tube
    groups.state.bytes += GROUP_COST
    return number


cdef inline bytes permits_name(const Groups* groups, Group* group):
    """Returns the name of a group's permits."""
    return name_bytes(&groups.table, &group.record)[GROUP_HEAD:]


cdef inline void group_join(Groups* groups, uint32_t number, uint32_t job, uint32_t maximum) noexcept nogil:
    """Gives a requirement to a job that is not in a queue. The caller marks the job."""
    groups.requirements[job] = Requirement(number, maximum)
    group_at(groups, number).jobs += 1
    groups.state.requirements += 1
    groups.state.bytes += REQUIREMENT_COST


cdef inline bint group_leave(Groups* groups, uint32_t job) noexcept nogil:
    """Ends the requirement of a job that is not in a queue. Returns whether the group is no longer needed."""
    cdef Group* group = group_of(groups, job)
    group.jobs -= 1
    groups.state.requirements -= 1
    groups.state.bytes -= REQUIREMENT_COST
    return group.jobs == 0


cdef inline void group_free(Groups* groups, uint32_t number) noexcept nogil:
    """Frees a group without jobs. The caller must have ended the group's wait and given its permit back."""
    timers_disarm(&groups.timers, number)
    table_remove(&groups.table, number)
    groups.state.bytes -= GROUP_COST
