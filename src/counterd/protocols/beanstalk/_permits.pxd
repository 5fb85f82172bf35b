# The calls of the lender of permits (contract.Lender), for the groups of the beanstalk protocol.
#
# Floor 2, header only. A call takes some 1 us.

from libc.stdint cimport int64_t, uint32_t

from counterd.protocols.beanstalk._groups cimport Group, group_at, group_free, group_leave, group_of, permits_name
from counterd.protocols.beanstalk._queues cimport Queues


cdef inline int permit_take(Queues* queues, lender, uint32_t job, int64_t now_ns) except -1:
    """Takes a permit for a job, and returns 1. Returns 0 if no permit is available."""
    cdef uint32_t maximum = queues.groups.requirements[job].maximum
    cdef Group* group = group_of(&queues.groups, job)
    if group.has_permit:
        group.has_permit = False
        if group.asked <= maximum:
            return 1
        permit_release(queues, lender, group, now_ns)
    if group.place:
        return 0
    return lender.acquire(permits_name(&queues.groups, group), maximum, now_ns)


cdef inline int permit_release(Queues* queues, lender, Group* group, int64_t now_ns) except -1:
    """Gives back a permit of a job of a group, or of the group itself."""
    lender.release(permits_name(&queues.groups, group), now_ns)
    return 0


cdef inline int permit_await(Queues* queues, lender, uint32_t number, int64_t now_ns) except -1:
    """Makes a blocked group wait for its first job's permit, unless it already waits. Returns 0 if there is no room."""
    cdef Group* group = group_at(&queues.groups, number)
    cdef uint32_t maximum
    if group.first == 0 or group.has_permit:
        return 1
    maximum = queues.groups.requirements[group.first].maximum
    if group.place == 0:
        group.place = lender.enqueue(permits_name(&queues.groups, group), maximum, number, now_ns)
    elif group.asked != maximum:
        lender.amend(group.place, maximum, now_ns)
    group.asked = maximum
    return group.place != 0


cdef inline int requirement_end(Queues* queues, lender, uint32_t job, int64_t now_ns) except -1:
    """Ends the requirement of a job that has no permit and is not in a queue.

    Also ends the group if the job was the last job of the group.
    """
    cdef uint32_t number = queues.groups.requirements[job].group
    cdef Group* group = group_at(&queues.groups, number)
    queues.jobs.records[job].is_limited = False
    if not group_leave(&queues.groups, job):
        return 0
    if group.place:
        lender.cancel(group.place, now_ns)
    if group.has_permit:
        permit_release(queues, lender, group, now_ns)
    group_free(&queues.groups, number)
    return 1
