# The queues of the beanstalk protocol: moves jobs between them, and finds the job that is reserved next.
#
# Floor 2, header only. A job is in the queue of its state:
#
#   READY      the heap of its tube, by priority and id, or that of its group (_groups.pxd); and the tube's list, by the
#              time when it became ready
#   DELAYED    the heap of its tube, by the end of its delay
#   RESERVED   the heap of the connection that holds it, by the end of its time to run
#   BURIED     the tube's list of buried jobs
#
# A heap of times needs one timer, which is armed for its first job or earlier. If the timer is early, because that job
# has left the heap, it finds nothing due and is armed again.

from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t, uint64_t

from counterd.engine.debug cimport debug_check
from counterd.engine.heap cimport Heap, heap_insert, heap_remove, node_at, node_is_before
from counterd.engine.list cimport Ends, ends_append, ends_remove
from counterd.engine.wheel cimport Timer, timer_is_armed, timers_arm
from counterd.protocols.beanstalk._groups cimport Group, Groups, group_at, group_of
from counterd.protocols.beanstalk._jobs cimport (
    BLOCKED, BURIED, DELAYED, GONE_JOB, JOB_STATES, READY, RESERVED, URGENT, Job, Jobs, JobState, job_at, job_edited,
    job_free, jobs_in_list,
)
from counterd.protocols.beanstalk._keys cimport Keys, job_end_key
from counterd.protocols.beanstalk._tubes cimport Tube, Tubes, tube_at, tube_is_paused, tube_settle
from counterd.protocols.beanstalk._workers cimport Worker, Workers, worker_expect

cdef enum:
    SECOND_NS = 1000000000
    MARGIN_NS = SECOND_NS   # a worker does not wait if the time of one of its jobs ends sooner


cdef struct Queues:         # this process's view
    Jobs jobs
    Tubes tubes
    Workers workers
    Keys keys
    Groups groups
    # job_enter() and job_leave() of jobs with requirements: in place, they would make those of all other jobs slower.
    void (*enter_limited)(Queues* queues, uint32_t number, JobState state, uint64_t key, int64_t now_ns) noexcept nogil
    void (*leave_limited)(Queues* queues, uint32_t number) noexcept nogil
    uint64_t* counts        # jobs by state, and BLOCKED; in the region
    uint64_t* urgent        # ready jobs with a priority below URGENT, in the region


cdef inline int64_t seconds_ns(uint32_t seconds) noexcept nogil:
    return <int64_t>seconds * SECOND_NS


cdef inline uint32_t* queue_first(const Queues* queues, const Job* job) noexcept nogil:
    """Returns where the heap for a job in its state stores its first job. Returns NULL if the state has no heap."""
    if job.state == READY:
        return &tube_at(&queues.tubes, job.tube).ready
    if job.state == DELAYED:
        return &tube_at(&queues.tubes, job.tube).delayed
    if job.state == RESERVED:
        return &queues.workers.records[job.holder].reserved
    return NULL


cdef inline Ends* state_list(const Queues* queues, const Job* job) noexcept nogil:
    """Returns the list for a job in its state. Returns NULL if the state has no list."""
    if job.state == READY:
        return &tube_at(&queues.tubes, job.tube).ready_list
    if job.state == BURIED:
        return &tube_at(&queues.tubes, job.tube).buried_list
    return NULL


# ---- groups --------------------------------------------------------------------------------------------------------

cdef inline void blocked_add(Queues* queues, const Group* group, int32_t count) noexcept nogil:
    tube_at(&queues.tubes, group.tube).jobs[<int>BLOCKED] += <uint32_t>count
    queues.counts[<int>BLOCKED] += <uint64_t><int64_t>count


cdef inline void group_count(Groups* groups, uint32_t number, int32_t count) noexcept nogil:
    """Counts that a job of a group is reserved, or is no longer reserved."""
    group_of(groups, number).reserved += <uint32_t>count
    groups.state.reserved += <uint64_t><int64_t>count


cdef inline void group_put(Queues* queues, uint32_t number) noexcept nogil:
    """Puts a job that becomes ready into a heap: the tube's heap if the job is the first of its group and can be
    reserved, or else the heap of its group."""
    cdef Group* group = group_of(&queues.groups, number)
    cdef const Heap* heap = &queues.jobs.heap
    cdef uint32_t* ready = &tube_at(&queues.tubes, group.tube).ready
    group.ready += 1
    if group.is_blocked:
        blocked_add(queues, group, 1)
        heap_insert(heap, &group.first, number)
        return
    if group.head and not node_is_before(node_at(heap, number), node_at(heap, group.head)):
        heap_insert(heap, &group.first, number)
        return
    if group.head:
        heap_remove(heap, ready, group.head)
        heap_insert(heap, &group.first, group.head)
    group.head = number
    heap_insert(heap, ready, number)


cdef inline void group_lift(Queues* queues, Group* group) noexcept nogil:
    """Makes the first job of a group's own heap the head of the group."""
    group.head = group.first
    if group.head:
        heap_remove(&queues.jobs.heap, &group.first, group.head)
        heap_insert(&queues.jobs.heap, &tube_at(&queues.tubes, group.tube).ready, group.head)


cdef inline void group_take(Queues* queues, uint32_t number) noexcept nogil:
    """Removes a ready job from the heap that contains it."""
    cdef Group* group = group_of(&queues.groups, number)
    group.ready -= 1
    if group.head == number:
        heap_remove(&queues.jobs.heap, &tube_at(&queues.tubes, group.tube).ready, number)
        group_lift(queues, group)
        return
    heap_remove(&queues.jobs.heap, &group.first, number)
    if group.is_blocked:
        blocked_add(queues, group, -1)


cdef inline void group_block(Queues* queues, uint32_t number) noexcept nogil:
    """Hides the ready jobs of a group."""
    cdef Group* group = group_at(&queues.groups, number)
    debug_check(not group.is_blocked)
    if group.head:
        heap_remove(&queues.jobs.heap, &tube_at(&queues.tubes, group.tube).ready, group.head)
        heap_insert(&queues.jobs.heap, &group.first, group.head)
    group.head = 0
    group.is_blocked = True
    blocked_add(queues, group, <int32_t>group.ready)


cdef inline void group_unblock(Queues* queues, uint32_t number) noexcept nogil:
    """Makes the ready jobs of a blocked group visible."""
    cdef Group* group = group_at(&queues.groups, number)
    debug_check(group.is_blocked)
    group.is_blocked = False
    blocked_add(queues, group, -<int32_t>group.ready)
    group_lift(queues, group)


cdef inline bint job_is_blocked(const Queues* queues, uint32_t number) noexcept nogil:
    """Returns whether a ready job waits for a permit."""
    cdef const Job* job = job_at(&queues.jobs, number)
    return job.is_limited and job.state == READY and group_of(&queues.groups, number).is_blocked


# ---- entering and leaving a state ----------------------------------------------------------------------------------

cdef inline void job_enter_as(
    Queues* queues, uint32_t number, JobState state, uint64_t key, int64_t now_ns, bint is_limited
) noexcept nogil:
    """Does the same as job_enter. is_limited: whether the job has a requirement; a constant at each call."""
    cdef Job* job = job_at(&queues.jobs, number)
    cdef Tube* tube = tube_at(&queues.tubes, job.tube)
    cdef uint32_t* first
    cdef Ends* ends
    debug_check(job.state == GONE_JOB)
    job.state = state
    job.since_ns = now_ns
    tube.jobs[<int>state] += 1
    queues.counts[<int>state] += 1
    first = queue_first(queues, job)
    if first != NULL:
        job.node.key = key
        if is_limited and state == READY:
            group_put(queues, number)
        else:
            heap_insert(&queues.jobs.heap, first, number)
    ends = state_list(queues, job)
    if ends != NULL:
        ends_append(jobs_in_list(&queues.jobs), ends, number)
    if state == READY and job.priority < URGENT:
        tube.urgent += 1
        queues.urgent[0] += 1
    if is_limited and state == RESERVED:
        group_count(&queues.groups, number, 1)
    job_edited(&queues.jobs, number)


cdef inline void job_leave_as(Queues* queues, uint32_t number, bint is_limited) noexcept nogil:
    """Does the same as job_leave. is_limited: whether the job has a requirement; a constant at each call."""
    cdef Job* job = job_at(&queues.jobs, number)
    cdef Tube* tube = tube_at(&queues.tubes, job.tube)
    cdef uint32_t* first = queue_first(queues, job)
    cdef Ends* ends = state_list(queues, job)
    if first != NULL:
        if is_limited and job.state == READY:
            group_take(queues, number)
        else:
            heap_remove(&queues.jobs.heap, first, number)
    if ends != NULL:
        ends_remove(jobs_in_list(&queues.jobs), ends, number)
    if job.state == READY and job.priority < URGENT:
        tube.urgent -= 1
        queues.urgent[0] -= 1
    if job.state == RESERVED:
        queues.workers.records[job.holder].jobs -= 1
        job.holder = 0
        if is_limited:
            group_count(&queues.groups, number, -1)
    tube.jobs[<int>job.state] -= 1
    queues.counts[<int>job.state] -= 1
    job.state = GONE_JOB


cdef inline void job_enter_limited(
    Queues* queues, uint32_t number, JobState state, uint64_t key, int64_t now_ns
) noexcept nogil:
    job_enter_as(queues, number, state, key, now_ns, True)


cdef inline void job_leave_limited(Queues* queues, uint32_t number) noexcept nogil:
    job_leave_as(queues, number, True)


cdef inline void job_enter(
    Queues* queues, uint32_t number, JobState state, uint64_t key, int64_t now_ns
) noexcept nogil:
    """Puts a job that is not in a queue into the queue of a state.

    key: the key of Job.node, if the state has a heap.
    """
    if job_at(&queues.jobs, number).is_limited:
        queues.enter_limited(queues, number, state, key, now_ns)
    else:
        job_enter_as(queues, number, state, key, now_ns, False)


cdef inline void job_leave(Queues* queues, uint32_t number) noexcept nogil:
    """Removes a job from its queue. The caller then puts the job into another queue, or frees it."""
    if job_at(&queues.jobs, number).is_limited:
        queues.leave_limited(queues, number)
    else:
        job_leave_as(queues, number, False)


cdef inline void tube_expect(Queues* queues, uint32_t number, int64_t due_ns) noexcept nogil:
    """Arms the tube's timer for due_ns, unless it is armed for an earlier time."""
    cdef const Timer* timer = &tube_at(&queues.tubes, number).timer
    if not timer_is_armed(timer) or due_ns < timer.due_ns:
        timers_arm(&queues.tubes.timers, number, due_ns)


# ---- states of a job -----------------------------------------------------------------------------------------------

cdef inline void job_ready(Queues* queues, uint32_t number, int64_t now_ns) noexcept nogil:
    job_enter(queues, number, READY, job_at(&queues.jobs, number).priority, now_ns)


cdef inline void job_delay(Queues* queues, uint32_t number, int64_t now_ns) noexcept nogil:
    """Delays a job for the seconds in its field `delay`."""
    cdef const Job* job = job_at(&queues.jobs, number)
    cdef int64_t due_ns = now_ns + seconds_ns(job.delay)
    job_enter(queues, number, DELAYED, due_ns, now_ns)
    tube_expect(queues, job.tube, due_ns)


cdef inline void job_bury(Queues* queues, uint32_t number, int64_t now_ns) noexcept nogil:
    job_at(&queues.jobs, number).buries += 1
    job_enter(queues, number, BURIED, 0, now_ns)


cdef inline void job_hold(
    Queues* queues, uint32_t number, uint32_t connection, int64_t due_ns, int64_t now_ns
) noexcept nogil:
    """Makes a connection hold a job that is not in a queue, until due_ns."""
    cdef Worker* worker = queues.workers.records + connection
    job_at(&queues.jobs, number).holder = connection
    worker.jobs += 1
    job_enter(queues, number, RESERVED, due_ns, now_ns)
    worker_expect(&queues.workers, connection, due_ns)


cdef inline void job_reserve(Queues* queues, uint32_t number, uint32_t connection, int64_t now_ns) noexcept nogil:
    """Reserves a job for the seconds in its field `ttr`."""
    cdef Job* job = job_at(&queues.jobs, number)
    cdef Tube* tube = tube_at(&queues.tubes, job.tube)
    if job.state == READY:
        tube.queued_ns += now_ns - job.since_ns
    if job.state != GONE_JOB:
        job_leave(queues, number)
    job.reserves += 1
    tube.reserves += 1
    job_hold(queues, number, connection, now_ns + seconds_ns(job.ttr), now_ns)


cdef inline void job_touch(Queues* queues, uint32_t number, uint32_t connection, int64_t now_ns) noexcept nogil:
    """Restarts the time to run of a reserved job. The connection holds the job from now on."""
    cdef const Job* job = job_at(&queues.jobs, number)
    cdef int64_t since_ns = job.since_ns
    job_leave(queues, number)
    job_hold(queues, number, connection, now_ns + seconds_ns(job.ttr), since_ns)


cdef inline void job_move(Queues* queues, uint32_t number, uint32_t target) noexcept nogil:
    """Moves a job that is not in a queue to another tube. The previous tube may end."""
    cdef Job* job = job_at(&queues.jobs, number)
    cdef uint32_t before = job.tube
    job.tube = target
    tube_at(&queues.tubes, target).total += 1
    tube_settle(&queues.tubes, before)


cdef inline uint32_t tube_count(const Tube* tube) noexcept nogil:
    """Returns how many jobs a tube has."""
    return tube.jobs[<int>READY] + tube.jobs[<int>DELAYED] + tube.jobs[<int>BURIED] + tube.jobs[<int>RESERVED]


cdef inline void tube_limit(Queues* queues, uint32_t number, uint32_t reserves_max, uint32_t target) noexcept nogil:
    """Sets how often jobs of a tube can be reserved (0: no limit), and to which tube they then move (0: they are
    buried)."""
    cdef Tube* tube = tube_at(&queues.tubes, number)
    cdef uint32_t before = tube.retire_to
    tube.reserves_max = reserves_max
    tube.retire_to = target if reserves_max else 0
    if tube.retire_to:
        tube_at(&queues.tubes, tube.retire_to).retired_here += 1
    if before:
        tube_at(&queues.tubes, before).retired_here -= 1
        tube_settle(&queues.tubes, before)
    tube_settle(&queues.tubes, number)


cdef inline void job_delete(Queues* queues, uint32_t number, int64_t now_ns) noexcept nogil:
    """Ends a job. Also ends its tube if nothing else needs the tube."""
    cdef uint32_t tube = job_at(&queues.jobs, number).tube
    if job_at(&queues.jobs, number).key:
        job_end_key(&queues.keys, &queues.jobs, number, now_ns)
    job_leave(queues, number)
    job_free(&queues.jobs, number)
    tube_settle(&queues.tubes, tube)


# ---- the next job to reserve ---------------------------------------------------------------------------------------

cdef inline uint32_t queues_next_ready(
    const Queues* queues, uint32_t connection, int64_t now_ns, int64_t* budget
) noexcept nogil:
    """Returns the first ready job, by priority and id, of the watched tubes that are not paused. Returns 0 if there is
    none.

    Charges a step of the budget for each tube.
    """
    cdef uint32_t number = queues.workers.records[connection].watched.first
    cdef uint32_t best = 0
    cdef const Tube* tube
    while number:
        tube = tube_at(&queues.tubes, queues.workers.watches[number].tube)
        if tube.ready and not tube_is_paused(tube, now_ns):
            if best == 0 or node_is_before(&job_at(&queues.jobs, tube.ready).node, &job_at(&queues.jobs, best).node):
                best = tube.ready
        budget[0] -= 1
        number = queues.workers.watches[number].of_connection.next
    return best


cdef inline bint worker_is_pressed(const Queues* queues, uint32_t connection, int64_t now_ns) noexcept nogil:
    """Returns whether the time to run of one of the connection's jobs ends within MARGIN_NS.

    A connection under this pressure must not wait.
    """
    cdef uint32_t first = queues.workers.records[connection].reserved
    return first != 0 and <int64_t>job_at(&queues.jobs, first).node.key - MARGIN_NS <= now_ns
