# The jobs of the beanstalk protocol: records with a number and an id, and their bodies.
#
# Floor 2, header only. In which queue a job is, and why, is in _queues.pxd.
#
# Invariants (audit_jobs checks them):
# - a job has a state from job_make() until job_free(), and is in the queue of that state from one call to the next;
# - an id is given once: ids rise;
# - the index has an entry for each job.
#
# If jobs are journaled, each job that has changed since it was written last is among the changes, in the order in which
# they changed first. So is a job that was ended, if the journal may have it; only its record is left.

from libc.stdint cimport UINT64_MAX, int64_t, uint8_t, uint32_t, uint64_t

from counterd.engine.chains cimport Chain, Chains, chain_blocks, chain_free, chain_read, chain_write
from counterd.engine.debug cimport debug_check
from counterd.engine.heap cimport Heap, Node
from counterd.engine.pool cimport Pool, pool_put, pool_take
from counterd.engine.region cimport Region, region_reserve
from counterd.engine.siphash cimport siphash13
from counterd.engine.table cimport Index, IndexEntry, index_home, index_insert, index_remove, index_reserve

cdef enum:
    URGENT = 1024           # priorities below count as urgent, in statistics
    IDS_BITS = 9            # ids that follow each other are neighbours in the index: 512 of them take 4 KiB
    JOB_COST = 136          # bytes of a job besides its body's blocks: the record and two slots of the index

cdef enum JobState:
    GONE_JOB = 0            # the record is free
    READY = 1
    RESERVED = 2
    DELAYED = 3
    BURIED = 4
    JOB_STATES = 5


cdef struct Job:            # 120 bytes
    Node node               # serial: its id. Key: priority if READY, and when its time is over if DELAYED or RESERVED
    uint32_t line_next      # of those that are READY or BURIED, in the order in which they became so
    uint32_t line_prev
    uint32_t tube
    uint32_t holder         # connection, if RESERVED
    uint32_t priority
    uint32_t delay          # seconds, as they were asked for last
    uint32_t ttr            # seconds
    uint32_t size           # bytes of the body
    Chain body              # of as many blocks as they need, perhaps none
    int64_t created_ns
    int64_t since_ns        # when it came into its state
    uint32_t reserves
    uint32_t timeouts
    uint32_t releases
    uint32_t buries
    uint32_t kicks
    uint32_t next_changed
    uint32_t key            # 0: it has none
    uint8_t state
    uint8_t is_changed      # is among the changes
    uint8_t is_written      # the journal may have it


cdef struct JobsState:      # in the region
    uint64_t last_id
    uint64_t id_limit       # the last that may be given
    uint64_t factor         # odd and secret: nobody can choose ids that meet in the index
    uint64_t total          # jobs ever made
    uint64_t edits          # how often any job was changed
    uint64_t changes        # how often a job came among the changes
    uint32_t changed_first
    uint32_t changed_last
    uint32_t ended          # jobs of which only the record is left
    uint8_t is_journaled


cdef struct Jobs:           # this process's view
    JobsState* state
    Pool* pool
    Job* records
    Index index
    Heap heap               # of any state: each queue has its own first
    Chains chains
    uint32_t capacity


cdef inline int jobs_reserve(Jobs* jobs, Region* region, uint32_t capacity) except -1:
    """Reserves memory for that many jobs. Raises ValueError for more than can be numbered."""
    jobs.capacity = capacity
    region_reserve(region, b"jobs", sizeof(JobsState), <void**>&jobs.state)
    region_reserve(region, b"jobs", sizeof(Pool), <void**>&jobs.pool)
    region_reserve(region, b"jobs", (<size_t>capacity + 1) * sizeof(Job), <void**>&jobs.records)
    index_reserve(&jobs.index, region, b"jobs", capacity, step=(1 << IDS_BITS) + 1)
    return 0


cdef inline void jobs_begin(Jobs* jobs, const uint64_t* hash_key, const Chains* chains) noexcept nogil:
    """Called once, after the region is mapped. chains: for bodies."""
    jobs.pool.capacity = jobs.capacity
    jobs.heap = Heap(<uint8_t*>&jobs.records.node, sizeof(Job))
    jobs.chains = chains[0]
    jobs.state.factor = siphash13(hash_key, b"ids", 3) | 1
    jobs.state.id_limit = UINT64_MAX


cdef inline Job* job_at(const Jobs* jobs, uint32_t number) noexcept nogil:
    debug_check(0 < number <= jobs.pool.fresh)
    return jobs.records + number


cdef inline uint64_t job_id(const Job* job) noexcept nogil:
    return job.node.serial


cdef inline uint32_t id_tag(const Jobs* jobs, uint64_t id) noexcept nogil:
    cdef uint32_t neighbours = <uint32_t>(((id >> IDS_BITS) * jobs.state.factor) >> 32)
    return neighbours ^ <uint32_t>(id & ((1 << IDS_BITS) - 1)) << jobs.index.shift


cdef inline uint32_t job_find(const Jobs* jobs, uint64_t id) noexcept nogil:
    """The job of that id, or 0."""
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


cdef inline void job_edited(Jobs* jobs, uint32_t number) noexcept nogil:
    """A job has changed in what the journal has of it, if there is one."""
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


cdef inline uint32_t job_place(
    Jobs* jobs, uint64_t id, uint32_t tube, const uint8_t* body, uint32_t size
) noexcept nogil:
    """A job with that id and body, nothing else of which is set, in no queue yet. The caller has seen that there is
    room for both."""
    cdef uint32_t number = pool_take(jobs.pool, &jobs.records.line_next, sizeof(Job))
    cdef Job* job = job_at(jobs, number)
    debug_check(number != 0)
    job.node.serial = id
    job.line_next = job.line_prev = 0
    job.tube = tube
    job.holder = 0
    job.size = size
    job.reserves = job.timeouts = job.releases = job.buries = job.kicks = 0
    job.key = 0
    job.state = GONE_JOB
    job.is_changed = job.is_written = False
    chain_write(&jobs.chains, &job.body, 0, body, size)
    index_insert(&jobs.index, id_tag(jobs, id), number)
    return number


cdef inline uint32_t job_make(
    Jobs* jobs, uint32_t tube, uint32_t priority, uint32_t delay, uint32_t ttr, const uint8_t* body, uint32_t size,
    int64_t now_ns
) noexcept nogil:
    """A job with the next id, in no queue yet. The caller has seen that there is room for it and for its body."""
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
    """Ends a job that is in no queue any more. Its record stays until the journal has been told."""
    cdef Job* job = job_at(jobs, number)
    debug_check(job.state == GONE_JOB)
    index_remove(&jobs.index, id_tag(jobs, job_id(job)), number)
    if job.size:
        chain_free(&jobs.chains, &job.body, chain_blocks(job.size))
    if job.is_changed or job.is_written:
        jobs.state.ended += 1
        job_edited(jobs, number)
    else:
        pool_put(jobs.pool, &jobs.records.line_next, sizeof(Job), number)


cdef inline bint job_is_ended(const Job* job) noexcept nogil:
    """Whether only its record is left, for the journal."""
    return job.state == GONE_JOB and job.is_changed


cdef inline uint32_t job_next_changed(Jobs* jobs) noexcept nogil:
    """Takes the first of the changes from among them, which were not none. The record of a job that was ended is free:
    what the caller needs of it has to be read before anything else happens."""
    cdef JobsState* state = jobs.state
    cdef uint32_t number = state.changed_first
    cdef Job* job = job_at(jobs, number)
    cdef bint is_ended = job_is_ended(job)
    state.changed_first = job.next_changed
    if state.changed_first == 0:
        state.changed_last = 0
    job.is_changed = False
    if is_ended:
        state.ended -= 1
        pool_put(jobs.pool, &jobs.records.line_next, sizeof(Job), number)
    else:
        job.is_written = True
    return number


cdef inline void job_read(const Jobs* jobs, const Job* job, uint8_t* target) noexcept nogil:
    """Writes its body there."""
    chain_read(&jobs.chains, &job.body, 0, target, job.size)
