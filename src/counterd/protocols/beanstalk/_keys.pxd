# The keys of the beanstalk protocol: unique names of jobs, so that a job that is put twice exists once.
#
# Floor 2, header only. A key is taken as long as its job exists, and for some time afterwards.
#
# Invariants (audit_keys checks them):
# - a key and the record of its job refer to each other, also if the job has ended and the record stays for the journal;
# - a key whose job has ended has a timer for the time at which the key becomes free.

from libc.stdint cimport INT64_MAX, int64_t, uint8_t, uint32_t, uint64_t

from counterd.engine.chains cimport Chains
from counterd.engine.region cimport Region
from counterd.engine.table cimport (
    Record, Table, record_at, table_begin, table_find, table_insert, table_remove, table_reserve,
)
from counterd.engine.wheel cimport Timer, Timers, timers_arm, timers_begin, timers_disarm, timers_reserve
from counterd.protocols.beanstalk._jobs cimport Job, Jobs, job_at, job_id

cdef enum:
    KEY_NAME_INLINE = 40    # bytes of a key that need no block
    KEY_COST = 104          # bytes of a key besides its blocks: the record and two slots of the index


cdef struct Key:            # 88 bytes
    Record record
    uint8_t name[KEY_NAME_INLINE]
    uint32_t job            # the record of its job, which may have ended; 0: there is no record
    uint32_t keep           # seconds for which the key stays taken after the end of its job
    uint64_t id             # of its job
    int64_t until_ns        # when the key becomes free; INT64_MAX: its job has not ended
    Timer timer


cdef struct Keys:           # this process's view
    Table table
    Timers timers


cdef inline int keys_reserve(Keys* keys, Region* region, uint32_t capacity) except -1:
    table_reserve(&keys.table, region, b"keys", capacity, sizeof(Key), KEY_NAME_INLINE)
    timers_reserve(&keys.timers, region, b"keys")
    return 0


cdef inline void keys_begin(
    Keys* keys, const uint64_t* hash_key, const Chains* chains, int64_t now_ns
) noexcept nogil:
    """Call this once, after the region was mapped. chains: the chains for the rest of long keys."""
    table_begin(&keys.table, hash_key, chains)
    timers_begin(&keys.timers, &(<Key*>keys.table.records).timer, sizeof(Key), now_ns)


cdef inline Key* key_at(const Keys* keys, uint32_t number) noexcept nogil:
    return <Key*>record_at(&keys.table, number)


cdef inline void key_let_go(Keys* keys, Jobs* jobs, uint32_t number) noexcept nogil:
    """Separates a key from the record of its job."""
    cdef Key* key = key_at(keys, number)
    if key.job:
        job_at(jobs, key.job).key = 0
        key.job = 0


cdef inline void key_free(Keys* keys, Jobs* jobs, uint32_t number) noexcept nogil:
    """Frees a key, so that another job can take it."""
    key_let_go(keys, jobs, number)
    timers_disarm(&keys.timers, number)
    table_remove(&keys.table, number)


cdef inline uint32_t key_find(
    Keys* keys, Jobs* jobs, uint32_t tag, const uint8_t* name, uint32_t size, int64_t now_ns
) noexcept nogil:
    """Returns the key with this name if it is taken, or else 0."""
    cdef uint32_t number = table_find(&keys.table, tag, name, size)
    if number and key_at(keys, number).until_ns <= now_ns:
        key_free(keys, jobs, number)
        return 0
    return number


cdef inline uint32_t key_make(
    Keys* keys, uint32_t tag, const uint8_t* name, uint32_t size, uint64_t id, uint32_t keep
) noexcept nogil:
    """Makes a key for a job that has no record yet.

    The caller must have checked that there is room. id: the id of the job.
    """
    cdef uint32_t number = table_insert(&keys.table, tag, name, size)
    cdef Key* key = key_at(keys, number)
    key.job = 0
    key.keep = keep
    key.id = id
    key.until_ns = INT64_MAX
    return number


cdef inline void key_join(Keys* keys, Jobs* jobs, uint32_t number, uint32_t job) noexcept nogil:
    """Makes a key and the record of its job refer to each other."""
    key_at(keys, number).job = job
    job_at(jobs, job).key = number


cdef inline void key_end_at(Keys* keys, uint32_t number, int64_t until_ns) noexcept nogil:
    """Sets when the key of an ended job becomes free."""
    key_at(keys, number).until_ns = until_ns
    timers_arm(&keys.timers, number, until_ns)


cdef inline void job_end_key(Keys* keys, Jobs* jobs, uint32_t job, int64_t now_ns) noexcept nogil:
    """Called before a job ends. Frees its key immediately, or after `keep` seconds."""
    cdef const Job* ended = job_at(jobs, job)
    cdef uint32_t number = ended.key
    cdef uint32_t keep = key_at(keys, number).keep
    if keep == 0:
        key_free(keys, jobs, number)
        return
    key_end_at(keys, number, now_ns + <int64_t>keep * 1000000000)
    if not ended.is_changed and not ended.is_written:  # its record does not stay for the journal
        key_let_go(keys, jobs, number)
