# Audits of the beanstalk protocol's store: they check every invariant of its parts for every record.
#
# Floor 2, header only. For tests: an audit reads all records.

from libc.stdint cimport INT64_MAX, INT64_MIN, int64_t, uint32_t, uint64_t

from counterd.engine.audit cimport (
    audit_chains, audit_heap, audit_index, audit_list, audit_pool, audit_table, audit_timers, chain_ends,
)
from counterd.engine.chains cimport chain_blocks
from counterd.engine.heap cimport heap_after
from counterd.engine.list cimport Ends
from counterd.engine.table cimport RECORD_USED
from counterd.engine.wheel cimport Timer, timer_is_armed
from counterd.protocols.beanstalk._groups cimport GROUP_COST, REQUIREMENT_COST, Group, Groups, group_at
from counterd.protocols.beanstalk._jobs cimport (
    BLOCKED, BURIED, DELAYED, GONE_JOB, JOB_STATES, READY, RESERVED, Job, Jobs, JobState, job_at, job_find, job_id,
    job_is_ended, jobs_in_list,
)
from counterd.protocols.beanstalk._keys cimport Key, Keys, key_at
from counterd.protocols.beanstalk._queues cimport MARGIN_NS, Queues
from counterd.protocols.beanstalk._tubes cimport (
    LINE_MARKS, NamesWalk, Tube, Tubes, tube_at, tube_is_needed, tubes_by_age,
)
from counterd.protocols.beanstalk._workers cimport Watch, Worker, Workers, watches_by_connection, watches_by_tube


cdef inline bint is_expected(const Timer* timer, int64_t due_ns) noexcept:
    """Returns whether a timer is armed for due_ns or earlier."""
    return timer_is_armed(timer) and timer.due_ns <= due_ns


cdef inline uint32_t audit_jobs(Queues* queues) except? 0xffffffff:
    """Checks the jobs. Returns how many blocks the bodies of the jobs use."""
    cdef Jobs* jobs = &queues.jobs
    cdef uint32_t number, blocks = 0, size, changed = 0, ended = 0
    cdef const Job* job
    cdef uint32_t[JOB_STATES] counts = [0, 0, 0, 0, 0]
    for number in range(1, jobs.pool.fresh + 1):
        job = job_at(jobs, number)
        changed += job.is_changed
        ended += job_is_ended(job)
        if job.state == GONE_JOB:
            continue
        counts[job.state] += 1
        if job_find(jobs, job_id(job)) != number:
            raise AssertionError(f"job {job_id(job)} is not found by its id")
        size = chain_blocks(job.size)
        if size and not chain_ends(&queues.jobs.chains, &job.body, size):
            raise AssertionError(f"the body of job {job_id(job)} ends in the wrong block")
        blocks += size
    number = jobs.state.changed_first
    while number:
        changed -= 1
        if job_at(jobs, number).next_changed == 0 and jobs.state.changed_last != number:
            raise AssertionError(f"the changes end at {number}, not at {jobs.state.changed_last}")
        number = job_at(jobs, number).next_changed
    if changed or ended != jobs.state.ended:
        raise AssertionError(f"{changed} changed jobs too many; {ended} have ended, {jobs.state.ended} counted")
    for number in range(1, JOB_STATES):
        if counts[number] != queues.counts[number]:
            raise AssertionError(f"{counts[number]} of state {number}, {queues.counts[number]} counted")
    return blocks


cdef inline dict audit_groups(Queues* queues, uint32_t* blocks):
    """Checks the groups. Returns how many ready jobs of each tube are in the heaps of its groups.

    blocks: the number of blocks of the groups' names is added to this.
    """
    cdef Groups* groups = &queues.groups
    cdef const Job* job
    cdef const Group* group
    cdef uint32_t number, count
    cdef uint64_t blocked = 0, requirements = 0
    cdef dict hidden = {}, jobs = {}, ready = {}, reserved = {}
    for number in range(1, queues.jobs.pool.fresh + 1):
        job = job_at(&queues.jobs, number)
        if job.state == GONE_JOB or not job.is_limited:
            continue
        requirements += 1
        count = groups.requirements[number].group
        if group_at(groups, count).tube != job.tube or groups.requirements[number].maximum == 0:
            raise AssertionError(f"job {job_id(job)} has a requirement of another tube, or to nothing")
        jobs[count] = jobs.get(count, 0) + 1
        ready[count] = ready.get(count, 0) + (job.state == READY)
        reserved[count] = reserved.get(count, 0) + (job.state == RESERVED)
    for number in range(1, groups.table.pool.fresh + 1):
        group = group_at(groups, number)
        if not group.record.flags & RECORD_USED:
            continue
        told = group.jobs, group.ready, group.reserved
        if told != (jobs.pop(number, 0), ready.get(number, 0), reserved.get(number, 0)) or group.jobs == 0:
            raise AssertionError(f"group {number} counts {told} jobs")
        count = <uint32_t>audit_heap(&queues.jobs.heap, group.first, queues.jobs.pool.fresh)
        if count + (group.head != 0) != group.ready or group.is_blocked and group.head or group.first and not (
            group.is_blocked or group.head
        ):
            raise AssertionError(f"group {number}: {group.ready} ready jobs, {count} in its heap, {group.head} first")
        if group.is_blocked and group.ready and group.place == 0 and not timer_is_armed(&group.timer):
            raise AssertionError(f"group {number} is blocked, and nothing will unblock it")
        if group.has_permit and (group.place or not timer_is_armed(&group.timer)):
            raise AssertionError(f"group {number} has a permit that nobody uses or gives back")
        hidden[group.tube] = hidden.get(group.tube, 0) + count
        blocked += group.ready if group.is_blocked else 0
    if groups.state.bytes != requirements * REQUIREMENT_COST + groups.table.pool.used * <uint64_t>GROUP_COST:
        raise AssertionError(f"{requirements} requirements, {groups.table.pool.used} groups, {groups.state.bytes} B")
    if jobs or requirements != groups.state.requirements or blocked != queues.counts[<int>BLOCKED]:
        raise AssertionError(f"{requirements} requirements, {blocked} blocked; {groups.state.requirements} counted")
    blocks[0] += audit_table(&groups.table, "groups")
    audit_timers(&groups.timers, groups.table.pool.fresh)
    return hidden


cdef inline int audit_queue(Queues* queues, uint32_t first, JobState state, uint32_t owner, uint32_t counted) except -1:
    """Checks a heap.

    The heap's jobs must have this state and this tube or connection, and their number must be `told`.
    """
    cdef Jobs* jobs = &queues.jobs
    cdef const Job* job
    cdef uint32_t number = first
    cdef int64_t count = audit_heap(&jobs.heap, first, jobs.pool.fresh)
    if count != counted:
        raise AssertionError(f"state {<int>state} of {owner}: {count}, {counted} counted")
    while number:
        job = job_at(jobs, number)
        if job.state != state or (job.holder if state == RESERVED else job.tube) != owner:
            raise AssertionError(f"job {job_id(job)} does not belong into the heap of state {<int>state} of {owner}")
        number = heap_after(&jobs.heap, number)
    return 0


cdef inline int audit_listed(Queues* queues, const Ends* ends, JobState state, uint32_t tube, uint32_t told) except -1:
    """Checks a list.

    The list's jobs must have this state, the earliest job must be the first, and their number must be `told`.
    """
    cdef const Job* job
    cdef uint32_t number = ends.first
    cdef uint32_t count = audit_list(jobs_in_list(&queues.jobs), number, &ends.last, queues.jobs.pool.fresh)
    cdef int64_t since_ns = INT64_MIN
    while number:
        job = job_at(&queues.jobs, number)
        if job.state != state or job.tube != tube or job.since_ns < since_ns:
            raise AssertionError(f"job {job_id(job)} is wrong in the list of state {<int>state} of {tube}")
        since_ns = job.since_ns
        number = job.in_list.next
    if count != told:
        raise AssertionError(f"list of state {<int>state} of {tube}: {count}, {told} counted")
    return 0


cdef inline uint32_t audit_keys(Queues* queues) except? 0xffffffff:
    """Checks the keys. Returns how many blocks the names of the keys use."""
    cdef const Keys* keys = &queues.keys
    cdef const Key* key
    cdef uint32_t number, named = 0, naming = 0
    for number in range(1, keys.table.pool.fresh + 1):
        key = key_at(keys, number)
        if not key.record.flags & RECORD_USED:
            continue
        if key.job and (job_at(&queues.jobs, key.job).key != number or job_id(job_at(&queues.jobs, key.job)) != key.id):
            raise AssertionError(f"key {number}: its job {key.id} has another key")
        if key.until_ns != INT64_MAX and not is_expected(&key.timer, key.until_ns):
            raise AssertionError(f"key {number}: nothing will free it")
        if key.until_ns == INT64_MAX and key.job == 0:
            raise AssertionError(f"key {number} has no job, but is taken for ever")
        named += key.job != 0
    for number in range(1, queues.jobs.pool.fresh + 1):
        naming += job_at(&queues.jobs, number).key != 0 and (
            job_at(&queues.jobs, number).state != GONE_JOB or job_at(&queues.jobs, number).is_changed
        )
    if named != naming:
        raise AssertionError(f"{naming} jobs have a key, {named} keys have a job")
    return audit_table(&keys.table, "keys")


cdef inline int audit_waiting(Queues* queues, uint32_t number) except -1:
    """Checks the wait queue of a tube."""
    cdef const Tube* tube = tube_at(&queues.tubes, number)
    cdef const Watch* watch
    cdef uint32_t entry = tube.queue.first
    cdef uint32_t count = audit_list(
        watches_by_tube(&queues.workers), entry, &tube.queue.last, queues.workers.pool.fresh
    )
    while entry:
        watch = queues.workers.watches + entry
        if watch.tube != number:
            raise AssertionError(f"tube {number}: watch {entry} waits in it, but belongs to another tube")
        if not queues.workers.records[watch.connection].is_waiting:
            raise AssertionError(f"tube {number}: connection {watch.connection} is in its queue, but does not wait")
        entry = watch.of_tube.next
    if tube.waiting != count:
        raise AssertionError(f"tube {number}: {count} wait, {tube.waiting} counted")
    return 0


cdef inline int audit_tubes(Queues* queues, dict hidden) except -1:
    """Checks the tubes. hidden: how many ready jobs of each tube are in the heaps of its groups."""
    cdef const Ends* ends = &queues.tubes.state.all
    cdef uint32_t number = ends.first, ended = 0
    cdef uint32_t count = audit_list(tubes_by_age(&queues.tubes), number, &ends.last, queues.tubes.table.pool.fresh)
    cdef uint64_t text = 0, made = 0
    cdef const Tube* tube
    while number:
        tube = tube_at(&queues.tubes, number)
        if tube.made <= made or tube_is_needed(tube) != (tube.ended == 0):
            raise AssertionError(f"tube {number} is wrong in the list, or nothing needs it, or it has ended too early")
        made = tube.made
        ended += tube.ended != 0
        text += 0 if tube.ended else tube.record.name_size + LINE_MARKS
        audit_queue(queues, tube.ready, READY, number, tube.jobs[<int>READY] - <uint32_t>hidden.get(number, 0))
        audit_queue(queues, tube.delayed, DELAYED, number, tube.jobs[<int>DELAYED])
        audit_listed(queues, &tube.ready_list, READY, number, tube.jobs[<int>READY])
        audit_listed(queues, &tube.buried_list, BURIED, number, tube.jobs[<int>BURIED])
        audit_waiting(queues, number)
        if tube.delayed and not is_expected(&tube.timer, job_at(&queues.jobs, tube.delayed).node.key):
            raise AssertionError(f"tube {number}: no timer waits for its first delayed job")
        if tube.ready and tube.queue.first and not timer_is_armed(&tube.timer):
            raise AssertionError(f"tube {number} has ready jobs and waiting connections, and nothing will connect them")
        number = tube.links.next
    if count != queues.tubes.table.pool.used:
        raise AssertionError(f"{count} tubes are listed, of {queues.tubes.table.pool.used}")
    if text != queues.tubes.state.text or ended != queues.tubes.state.ended:
        raise AssertionError(f"the names have {text} bytes, {queues.tubes.state.text} counted; {ended} have ended")
    return audit_ended(&queues.tubes)


cdef inline int audit_ended(const Tubes* tubes) except -1:
    """Checks the tubes that have ended, and the walks for which they stay."""
    cdef uint32_t number = tubes.state.ended_first, last = 0, left = tubes.state.ended
    cdef uint64_t moment = 0
    cdef const NamesWalk* walk = tubes.first_walk
    while number and left:
        if tube_at(tubes, number).ended <= moment:
            raise AssertionError(f"tube {number} has not ended, or not after the tube before it")
        moment = tube_at(tubes, number).ended
        left -= 1
        last = number
        number = tube_at(tubes, number).next_ended
    if number or left or last != tubes.state.ended_last:
        raise AssertionError(f"the tubes that have ended are {left} too few, or end at {last}")
    moment = 0
    while walk != NULL:
        if walk.since < moment or walk.later == NULL and walk != tubes.last_walk:
            raise AssertionError(f"the walk of connection {walk.connection} is not in the order of the begins")
        if tube_at(tubes, walk.at).pins == 0 or tube_at(tubes, walk.at).made > walk.since:
            raise AssertionError(f"the walk of connection {walk.connection} is at a tube that it does not show")
        moment = walk.since
        walk = walk.later
    return 0


cdef inline int audit_workers(Queues* queues) except -1:
    cdef Workers* workers = &queues.workers
    cdef const Worker* worker
    cdef uint32_t connection, entry, count, text, watches = 0, waiting = 0
    cdef dict using = {}, watching = {}
    for connection in range(1, queues.workers.connections.pool.fresh + 1):
        worker = workers.records + connection
        audit_queue(queues, worker.reserved, RESERVED, connection, worker.jobs)
        if worker.reserved and not is_expected(
            &worker.timer, job_at(&queues.jobs, worker.reserved).node.key - worker.is_waiting * MARGIN_NS
        ):
            raise AssertionError(f"connection {connection}: no timer waits for its first job")
        waiting += worker.is_waiting
        text = 0
        entry = worker.watched.first
        count = audit_list(watches_by_connection(workers), entry, &worker.watched.last, workers.pool.fresh)
        while entry:
            if workers.watches[entry].connection != connection:
                raise AssertionError(f"connection {connection}: watch {entry} belongs to another connection")
            text += tube_at(&queues.tubes, workers.watches[entry].tube).record.name_size + LINE_MARKS
            watching[workers.watches[entry].tube] = watching.get(workers.watches[entry].tube, 0) + 1
            entry = workers.watches[entry].of_connection.next
        if count != worker.watches or text != worker.text or (count == 0) != (worker.used == 0):
            raise AssertionError(f"connection {connection}: {count} watches, {worker.watches} counted")
        watches += count
        if worker.used:
            using[worker.used] = using.get(worker.used, 0) + 1
    if watches != workers.pool.used or waiting != workers.state.waiting:
        raise AssertionError(f"{watches} watches and {waiting} waiting, of {workers.pool.used}")
    entry = queues.tubes.state.all.first
    while entry:
        tube = tube_at(&queues.tubes, entry)
        if tube.using != using.get(entry, 0) or tube.watching != watching.get(entry, 0):
            raise AssertionError(f"tube {entry} counts {tube.using} that use and {tube.watching} that watch it")
        entry = tube.links.next
    return 0


cdef inline int audit_queues(Queues* queues) except -1:
    """Checks jobs, keys, groups, tubes and workers, and that each of them is in the right queues."""
    cdef uint32_t blocks = 0
    hidden = audit_groups(queues, &blocks)
    audit_chains(
        &queues.jobs.chains,
        audit_table(&queues.tubes.table, "tubes", queues.tubes.state.ended) + audit_jobs(queues) + audit_keys(queues)
        + blocks,
    )
    audit_index(&queues.jobs.index, queues.jobs.pool, "jobs index", queues.jobs.state.ended)
    audit_pool(queues.jobs.pool, &queues.jobs.records.in_list, sizeof(Job), "jobs")
    audit_pool(queues.workers.pool, &queues.workers.watches.of_connection, sizeof(Watch), "watches")
    audit_timers(&queues.tubes.timers, queues.tubes.table.pool.fresh)
    audit_timers(&queues.keys.timers, queues.keys.table.pool.fresh)
    audit_timers(&queues.workers.timers, queues.workers.connections.pool.fresh)
    audit_tubes(queues, hidden)
    audit_workers(queues)
    return 0
