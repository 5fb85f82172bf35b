"""Lists of tubes and of jobs, which are made in slices: list-tubes, list-tubes-watched, list-jobs and search-jobs.

Floor 2 (ARCHITECTURE.md). A reply begins with its length, and tubes and jobs can be created and removed between two
slices. The store counts the bytes of all names, and keeps the names that a list has promised (_tubes.pxd), so a list of
names is written as the peer takes it, and is true for the moment when it began. A list of jobs has at most BATCH_MAX
entries. It is collected completely before it is sent; an entry that exists during the whole collection is listed once.
"""

from heapq import heappush, heappushpop

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from libc.stdint cimport uint8_t, uint32_t, uint64_t

from counterd._core cimport FRAME_STEP_SHIFT, OUTPUT_MAX
from counterd.engine.table cimport Record, name_read
from counterd.protocols.beanstalk._documents cimport job_document
from counterd.protocols.beanstalk._jobs cimport GONE_JOB, Job, Jobs, job_at, job_find, job_id, job_read
from counterd.protocols.beanstalk._store cimport BeanstalkStore, append
from counterd.protocols.beanstalk._tubes cimport LINE_MARKS, names_begin, names_end, names_next, tube_at, tube_settle
from counterd.protocols.beanstalk._workers cimport Watch

cdef extern from *:
    """
    #include <string.h>
    """
    void* memmem(const void* haystack, size_t size, const void* needle, size_t needle_size) noexcept nogil

cdef enum:
    NAME_STEPS = 3          # of a line: some cache lines
    DOCUMENT_HEAD = 4       # bytes of "---" and LF
    JOB_STEPS = 300         # formatting a job: some 10 us


cdef class Listing:
    """The base of the lists. A list is made, and continues, within a call of the store."""

    def __cinit__(self, BeanstalkStore store not None, *_):
        self.store = store

    def __dealloc__(self):
        if self.store is None:
            return
        if self.store.entered:
            self.end()
            return
        self.store.begin_call(self.store.now_ns)
        self.end()
        self.store.end_call()

    cdef bint go_on(self) except -1:
        """Continues the list. Returns True when it is complete."""
        return True

    cdef bytes reply(self):
        """Returns the reply to a complete list. Returns None if go_on() has written it."""
        return None

    cdef void end(self) noexcept:
        """Releases what the list keeps. The list may be complete or not."""


cdef class NamesList(Listing):
    """The base of the lists of names, which are written to the output piece by piece, as the peer takes it."""

    cdef bint go_on_naming(self, uint64_t* left) except -1:
        """Continues for go_on(). left: bytes of the lines that remain, which next_tube() counts down."""
        cdef BeanstalkStore store = self.store
        cdef uint8_t* target
        cdef uint32_t number
        cdef Record* record
        if self.text:
            append(store, b"OK %d\r\n---\n" % (self.text + DOCUMENT_HEAD))
            self.text = 0
        while left[0]:
            if store.budget <= 0 or store.out_size >= OUTPUT_MAX:
                return False
            store.budget -= 1
            number = self.next_tube()
            if number == 0:
                continue
            record = &tube_at(&store.queues.tubes, number).record
            store.budget -= NAME_STEPS + (record.name_size >> FRAME_STEP_SHIFT)
            target = store.out + store.out_size
            target[0], target[1] = b"-", b" "
            name_read(&store.queues.tubes.table, record, target + 2)
            target[2 + record.name_size] = b"\n"
            store.out_size += record.name_size + LINE_MARKS
        append(store, b"\r\n")
        return True

    cdef uint32_t next_tube(self) noexcept:
        """Returns the next tube to name, or 0 to leave one out."""
        return 0


cdef class TubeList(NamesList):
    """Lists the tubes that exist when the list begins, beginning with the oldest. connection: the one that asks."""

    def __cinit__(self, BeanstalkStore store not None, uint32_t connection):
        names_begin(&store.queues.tubes, &self.walk, connection)
        self.text = self.walk.left

    cdef bint go_on(self) except -1:
        return self.go_on_naming(&self.walk.left)

    cdef uint32_t next_tube(self) noexcept:
        return names_next(&self.store.queues.tubes, &self.walk)

    cdef void end(self) noexcept:
        names_end(&self.store.queues.tubes, &self.walk)
        self.store.has_work = True


cdef class WatchList(NamesList):
    """Lists the tubes that a connection watches. Until the list ends, the connection executes no other command, so its
    watches stay as they are."""

    def __cinit__(self, BeanstalkStore store not None, uint32_t connection):
        self.watch = store.queues.workers.records[connection].watched.first
        self.text = self.left = store.queues.workers.records[connection].text

    cdef bint go_on(self) except -1:
        return self.go_on_naming(&self.left)

    cdef uint32_t next_tube(self) noexcept:
        cdef const Watch* watch = self.store.queues.workers.watches + self.watch
        self.left -= tube_at(&self.store.queues.tubes, watch.tube).record.name_size + LINE_MARKS
        self.watch = watch.of_connection.next
        return watch.tube


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
        self.pieces = [b"---\n"]
        self.size = DOCUMENT_HEAD
        self.tube = tube
        tube_at(&store.queues.tubes, tube).walks += 1

    cdef void end(self) noexcept:
        tube_at(&self.store.queues.tubes, self.tube).walks -= 1
        tube_settle(&self.store.queues.tubes, self.tube)

    cdef int add(self, bytes piece) except -1:
        self.pieces.append(piece)
        self.size += PyBytes_GET_SIZE(piece)
        return 0

    cdef bytes reply(self):
        return b"OK %d\r\n%b\r\n" % (self.size, b"".join(self.pieces))

    cdef bint go_on(self) except -1:
        cdef const Jobs* jobs = &self.store.queues.jobs
        while not self.is_sorted:
            if self.store.budget <= 0:
                return False
            if self.position <= jobs.pool.fresh and self.most:
                self.visit(self.position)
                self.position += 1
            else:
                self.ids.sort()
                self.is_sorted = True
        while self.ids:
            if self.store.budget <= 0:
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
