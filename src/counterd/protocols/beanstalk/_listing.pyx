"""Lists of tubes and of jobs, which are collected in slices: list-tubes, list-tubes-watched, list-jobs and search-jobs.

Floor 2 (ARCHITECTURE.md). A reply begins with its length, so a list is collected completely before it is sent. Tubes
and jobs can be created and removed between two slices. While a list needs a tube, the tube does not end. An entry that
exists during the whole collection is listed once.
"""

from heapq import heappush, heappushpop

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t

from counterd._core cimport FRAME_STEP_SHIFT
from counterd.engine.table cimport name_bytes
from counterd.protocols.beanstalk._documents cimport job_document
from counterd.protocols.beanstalk._jobs cimport GONE_JOB, Job, Jobs, job_at, job_find, job_id, job_read
from counterd.protocols.beanstalk._store cimport BeanstalkStore
from counterd.protocols.beanstalk._tubes cimport Tubes, tube_at, tube_settle

cdef extern from *:
    """
    #include <string.h>
    """
    void* memmem(const void* haystack, size_t size, const void* needle, size_t needle_size) noexcept nogil

cdef enum:
    TUBE_STEPS = 8          # making an object of a name: some 0.3 us
    JOB_STEPS = 300         # formatting a job: some 10 us


cdef class Listing:
    """The base of the lists. A list is made, and continues, within a call of the store."""

    def __cinit__(self, BeanstalkStore store not None, *_):
        self.store = store
        self.pieces = [b"---\n"]
        self.size = 4

    def __dealloc__(self):
        if self.store is None or self.tube == 0:
            return
        if self.store.entered:
            self.keep(0)
            return
        self.store.begin_call(self.store.now_ns)
        self.keep(0)
        self.store.end_call()

    cdef void keep(self, uint32_t tube) noexcept:
        """Keeps a tube (0: none) from ending, and releases the tube that was kept before."""
        cdef Tubes* tubes = &self.store.queues.tubes
        cdef uint32_t before = self.tube
        if tube:
            tube_at(tubes, tube).walks += 1
        self.tube = tube
        if before:
            tube_at(tubes, before).walks -= 1
            tube_settle(tubes, before)

    cdef int add(self, bytes piece) except -1:
        self.pieces.append(piece)
        self.size += PyBytes_GET_SIZE(piece)
        return 0

    cdef bint go_on(self, int64_t budget_floor) except -1:
        """Collects more entries. Returns True when the list is complete."""
        return True

    cdef bytes reply(self):
        """Returns the whole reply."""
        return b"OK %d\r\n%b\r\n" % (self.size, b"".join(self.pieces))


cdef class TubeList(Listing):
    """Lists all tubes, beginning with the oldest, or the tubes that a connection watches. The connection executes no
    other command meanwhile.

    connection: the engine's number of the connection; 0 lists all tubes.
    """

    def __cinit__(self, BeanstalkStore store not None, uint32_t connection):
        if connection:
            self.watch = store.queues.workers.records[connection].watch_first
        else:
            self.keep(store.queues.tubes.state.first)

    cdef bint go_on(self, int64_t budget_floor) except -1:
        cdef Tubes* tubes = &self.store.queues.tubes
        cdef uint32_t number
        while self.tube or self.watch:
            if self.store.budget <= budget_floor:
                return False
            self.store.budget -= TUBE_STEPS
            number = self.store.queues.workers.watches[self.watch].tube if self.watch else self.tube
            self.add(b"- %b\n" % name_bytes(&tubes.table, &tube_at(tubes, number).record))
            if self.watch:
                self.watch = self.store.queues.workers.watches[self.watch].next
            else:
                self.keep(tube_at(tubes, number).next)
        return True


cdef class JobList(Listing):
    """Lists jobs of a tube: the `most` lowest ids that are at least `first`.

    state: the state of the jobs; 0 means any. needle: bytes that their bodies contain; b"" matches any body. Each entry
    was true at one moment. A job that exists during the whole collection is listed exactly once.
    """

    def __cinit__(self, BeanstalkStore store not None, uint32_t tube, uint8_t state, uint64_t first, uint32_t most,
                  bytes needle not None):
        self.state = state
        self.first = first
        self.most = most
        self.needle = needle
        self.body = PyBytes_FromStringAndSize(NULL, store.job_size_max if needle else 0)
        self.position = 1
        self.ids = []
        self.keep(tube)

    cdef bint go_on(self, int64_t budget_floor) except -1:
        cdef const Jobs* jobs = &self.store.queues.jobs
        while not self.is_sorted:
            if self.store.budget <= budget_floor:
                return False
            if self.position <= jobs.pool.fresh and self.most:
                self.visit(self.position)
                self.position += 1
            else:
                self.ids.sort()
                self.is_sorted = True
        while self.ids:
            if self.store.budget <= budget_floor:
                return False
            self.store.budget -= JOB_STEPS
            self.tell(-self.ids.pop())
        return True

    cdef bint matches(self, const Job* job) except -1:
        cdef uint8_t* target = <uint8_t*>PyBytes_AS_STRING(self.body)
        cdef size_t size = PyBytes_GET_SIZE(self.needle)
        if job.state == GONE_JOB or job.tube != self.tube or self.state and job.state != self.state:
            return False
        if size == 0:
            return True
        self.store.budget -= job.size >> FRAME_STEP_SHIFT
        job_read(&self.store.queues.jobs, job, target)
        return memmem(target, job.size, PyBytes_AS_STRING(self.needle), size) != NULL

    cdef int visit(self, uint32_t number) except -1:
        """Notes the id of a job if the job matches and its id is among the lowest so far."""
        cdef const Job* job = job_at(&self.store.queues.jobs, number)
        self.store.budget -= 1
        if job_id(job) < self.first or not self.matches(job):
            return 0
        if <size_t>len(self.ids) < self.most:
            heappush(self.ids, -<object>job_id(job))
        else:
            heappushpop(self.ids, -<object>job_id(job))
        return 0

    cdef int tell(self, uint64_t id) except -1:
        cdef uint32_t number = job_find(&self.store.queues.jobs, id)
        if number and self.matches(job_at(&self.store.queues.jobs, number)):
            lines = job_document(self.store, number).rstrip(b"\n").split(b"\n")
            self.add(b"- %b\n" % b"\n  ".join(lines[1:]))
        return 0
