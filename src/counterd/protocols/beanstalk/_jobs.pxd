# The jobs of the beanstalk protocol: records with a number and an id, and their bodies.
#
# Floor 2, header only. _queues.pxd moves jobs between queues.
#
# Invariants (audit_jobs checks them):
# - a job has a state from job_make() until job_free(); between calls it is in the queue of that state;
# - ids rise, so an id is used once;
# - the index has an entry for each job.
#
# If jobs are journaled, each job that has changed since it was last written is in the list of changes, in the order of
# the first change. This includes an ended job that may be in the journal; only its record remains.

from libc.stdint cimport UINT64_MAX, int64_t, uint8_t, uint32_t, uint64_t

from counterd.engine.chains cimport Chain, Chains, chain_blocks, chain_free, chain_read, chain_write
from counterd.engine.debug cimport debug_check
from counterd.engine.heap cimport Heap, Node
from counterd.engine.list cimport Links, List
from counterd.engine.pool cimport Pool, pool_put, pool_take
from counterd.engine.region cimport Region, region_reserve
from counterd.engine.siphash cimport siphash13
from counterd.engine.table cimport Index, IndexEntry, index_home, index_insert, index_remove, index_reserve

cdef enum:
    URGENT = 1024           # statistics count lower priorities as urgent
    IDS_BITS = 9            # 512 consecutive ids are neighbours in the index: together they take 4 KiB
    CHANGE_COST = 128       # bytes of a change in the journal, besides the body
    JOB_COST = 136          # bytes of a job besides its body's blocks: the record and two slots of the index

cdef enum JobState:
    GONE_JOB = 0            # the record is free
    READY = 1
    RESERVED = 2
    DELAYED = 3
    BURIED = 4
    JOB_STATES = 5
    BLOCKED = GONE_JOB      # in counts by state: how many of READY are in a group that is blocked


cdef struct Job:            # 120 bytes
    Node node               # serial: its id. Key: its priority if READY, the end of its time if DELAYED or RESERVED
    Links in_list           # if READY or BURIED: in the order in which the jobs entered it. `next` links the free list
    uint32_t tube
    uint32_t holder         # connection, if RESERVED
    uint32_t priority
    uint32_t delay          # seconds, of the last put or release
    uint32_t ttr            # seconds
    uint32_t size           # bytes of the body
    Chain body              # no blocks if the body is empty
    int64_t created_ns
    int64_t since_ns        # when it entered its state
    uint32_t reserves
    uint32_t timeouts
    uint32_t releases
    uint32_t buries
    uint32_t kicks
    uint32_t next_changed
    uint32_t key            # 0: it has no key
    uint8_t state
    uint8_t is_changed      # it is in the list of changes
    uint8_t is_written      # it may be in the journal
    uint8_t is_limited      # it has a requirement: see _groups.pxd


cdef struct JobsState:      # in the region
    uint64_t last_id
    uint64_t id_limit       # the highest id that may be used
    uint64_t factor         # odd and secret, so that clients cannot cause collisions in the index
    uint64_t total          # jobs ever made
    uint64_t edits          # how often any job was changed
    uint64_t changes        # how often a job was added to the list of changes
    uint64_t changes_size   # bytes that the list of changes takes in a piece, about
    uint32_t changed_first
    uint32_t changed_last
    uint32_t ended          # ended jobs whose record stays for the journal
    uint8_t is_journaled


cdef struct Jobs:           # this process's view
    JobsState* state
    Pool* pool
    Job* records
    Index index
    Heap heap               # the view of all heaps; each queue has its own first node
    Chains chains
    uint32_t capacity


cdef inline int jobs_reserve(Jobs* jobs, Region* region, uint32_t capacity) except -1:
    """Reserves memory for `capacity` jobs. Raises ValueError if there are too many jobs for the numbers of records."""
    jobs.capacity = capacity
    region_reserve(region, b"jobs", sizeof(JobsState), <void**>&jobs.state)
    region_reserve(region, b"jobs", sizeof(Pool), <void**>&jobs.pool)
    region_reserve(region, b"jobs", (<size_t>capacity + 1) * sizeof(Job), <void**>&jobs.records)
    index_reserve(&jobs.index, region, b"jobs", capacity, step=(1 << IDS_BITS) + 1)
    return 0


cdef inline void jobs_begin(Jobs* jobs, const uint64_t* hash_key, const Chains* chains) noexcept nogil:
    """Call this once, after the region was mapped. chains: the chains for bodies."""
    jobs.pool.capacity = jobs.capacity
    jobs.heap = Heap(<uint8_t*>&jobs.records.node, sizeof(Job))
    jobs.chains = chains[0]
    jobs.state.factor = siphash13(hash_key, b"ids", 3) | 1
    jobs.state.id_limit = UINT64_MAX


cdef inline Job* job_at(const Jobs* jobs, uint32_t number) noexcept nogil:
    debug_check(0 < number <= jobs.pool.fresh)
    return jobs.records + number


cdef inline List jobs_in_list(const Jobs* jobs) noexcept nogil:
    return List(jobs.records, sizeof(Job), &jobs.records.in_list)


cdef inline uint32_t job_number(const Jobs* jobs, const Job* job) noexcept nogil:
    return <uint32_t>(job - jobs.records)


cdef inline uint64_t job_id(const Job* job) noexcept nogil:
    return job.node.serial


cdef inline uint32_t id_tag(const Jobs* jobs, uint64_t id) noexcept nogil:
    cdef uint32_t neighbours = <uint32_t>(((id >> IDS_BITS) * jobs.state.factor) >> 32)
    return neighbours ^ <uint32_t>(id & ((1 << IDS_BITS) - 1)) << jobs.index.shift


cdef inline uint32_t job_find(const Jobs* jobs, uint64_t id) noexcept nogil:
    """Returns the job with this id, or 0 if there is none."""
    cdef const Index* index = &jobs.index
    cdef uint32_t tag = id_tag(jobs, id)
    cdef uint32_t slot = index_home(index, tag)
    cdef uint32_t _step
    for _step in range(index.mask + 1):
        if index.entries[slot].number == 0:
            return 0
        if index.entries[slot].tag == tag and job_id(job_at(jobs, index.entries[slot].number)) == id:
            return index.entries[slot].number
        slot = (slot + index.step) & index.mask
    return 0


cdef inline uint64_t change_size(const Job* job) noexcept nogil:
    """Returns how much a change of a job adds to changes_size: the same as long as the job is in the list."""
    return CHANGE_COST if job.is_written else <uint64_t>CHANGE_COST + job.size


cdef inline void job_edited(Jobs* jobs, uint32_t number) noexcept nogil:
    """Called when a job has changed. Adds the job to the list of changes, if there is a journal."""
    cdef JobsState* state = jobs.state
    cdef Job* job = job_at(jobs, number)
    if not state.is_journaled:
        return
    state.edits += 1
    if job.is_changed:
        return
    job.is_changed = True
    job.next_changed = 0
    if state.changed_last:
        job_at(jobs, state.changed_last).next_changed = number
    else:
        state.changed_first = number
    state.changed_last = number
    state.changes += 1
    state.changes_size += change_size(job)


cdef inline uint32_t job_place(
    Jobs* jobs, uint64_t id, uint32_t tube, const uint8_t* body, uint32_t size
) noexcept nogil:
    """Makes a job with this id and body, which is not in a queue.

    The caller sets the other fields, and must have checked that there is room for the job and the body.
    """
    cdef uint32_t number = pool_take(jobs.pool, &jobs.records.in_list, sizeof(Job))
    cdef Job* job = job_at(jobs, number)
    debug_check(number != 0)
    job.node.serial = id
    job.tube = tube
    job.holder = 0
    job.size = size
    job.reserves = job.timeouts = job.releases = job.buries = job.kicks = 0
    job.key = 0
    job.state = GONE_JOB
    job.is_changed = job.is_written = job.is_limited = False
    chain_write(&jobs.chains, &job.body, 0, body, size)
    index_insert(&jobs.index, id_tag(jobs, id), number)
    return number


cdef inline uint32_t job_make(
    Jobs* jobs, uint32_t tube, uint32_t priority, uint32_t delay, uint32_t ttr, const uint8_t* body, uint32_t size,
    int64_t now_ns
) noexcept nogil:
    """Makes a job with the next id, which is not in a queue.

    The caller must have checked that there is room for the job and its body.
    """
    cdef uint32_t number
    cdef Job* job
    jobs.state.last_id += 1
    jobs.state.total += 1
    number = job_place(jobs, jobs.state.last_id, tube, body, size)
    job = job_at(jobs, number)
    job.priority = priority
    job.delay = delay
    job.ttr = ttr if ttr else 1
    job.created_ns = job.since_ns = now_ns
    return number


cdef inline void job_free(Jobs* jobs, uint32_t number) noexcept nogil:
    """Ends a job that is not in a queue.

    The job's record stays until the end of the job is in a piece for the journal.
    """
    cdef Job* job = job_at(jobs, number)
    debug_check(job.state == GONE_JOB)
    index_remove(&jobs.index, id_tag(jobs, job_id(job)), number)
    if job.size:
        chain_free(&jobs.chains, &job.body, chain_blocks(job.size))
    if job.is_changed or job.is_written:
        jobs.state.ended += 1
        job_edited(jobs, number)
    else:
        pool_put(jobs.pool, &jobs.records.in_list, sizeof(Job), number)


cdef inline bint job_is_ended(const Job* job) noexcept nogil:
    """Returns whether the job has ended, and its record stays for the journal."""
    return job.state == GONE_JOB and job.is_changed


cdef inline uint32_t job_next_changed(Jobs* jobs) noexcept nogil:
    """Removes the first job from the list of changes, which must not be empty, and returns it.

    Frees the record of an ended job, so the caller must read the record before anything else uses it.
    """
    cdef JobsState* state = jobs.state
    cdef uint32_t number = state.changed_first
    cdef Job* job = job_at(jobs, number)
    cdef bint is_ended = job_is_ended(job)
    state.changed_first = job.next_changed
    if state.changed_first == 0:
        state.changed_last = 0
    job.is_changed = False
    state.changes_size -= change_size(job)
    if is_ended:
        state.ended -= 1
        pool_put(jobs.pool, &jobs.records.in_list, sizeof(Job), number)
    else:
        job.is_written = True
    return number


cdef inline void job_read(const Jobs* jobs, const Job* job, uint8_t* target) noexcept nogil:
    """Copies the body of a job to `target`."""
    chain_read(&jobs.chains, &job.body, 0, target, job.size)
