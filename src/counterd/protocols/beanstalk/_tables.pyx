"""The beanstalk protocol's tables for people: the tubes, and the jobs that a connection has reserved.

Floor 2 (ARCHITECTURE.md). The tables are walks in slices, see engine/walk.pyx.
"""

from libc.stdint cimport int64_t, uint32_t, uint64_t

from counterd.engine.connections cimport connection_check
from counterd.engine.heap cimport heap_after
from counterd.engine.table cimport Record, name_bytes
from counterd.engine.walk cimport BLOCK_WORK, RankedWalk
from counterd.protocols.beanstalk._jobs cimport BURIED, DELAYED, READY, RESERVED, Job, job_at, job_id
from counterd.protocols.beanstalk._store cimport BeanstalkStore
from counterd.protocols.beanstalk._tubes cimport Tube, tube_at

from counterd.listing import CONNECTION, ROWS_MAX, Column, Figure, Table, ranked_parameters, read_parameters
from counterd.settings import integer

cdef double NS_PER_S = 1e9

cdef enum:
    NS_PER_TENTH = 100000000
    ROWS_STEP = 100         # rows of a step: some 0.1 ms

SORTS = ("ready", "reserved", "delayed", "buried", "waiting", "oldest")


cdef class TubesWalk(RankedWalk):
    """Lists the tubes whose names contain `match`.

    sort: one of SORTS; "oldest" means the age of the oldest ready job.
    """

    cdef int order

    def __cinit__(self, BeanstalkStore store not None, bytes match, uint32_t limit, str sort):
        self.table = &store.queues.tubes.table
        self.order = SORTS.index(sort)

    cdef int64_t oldest_ns(self, const Tube* tube) noexcept:
        """Returns how long the tube's oldest ready job has been ready."""
        cdef BeanstalkStore store = <BeanstalkStore>self.store
        self.work -= BLOCK_WORK if tube.ready_line.first else 0
        return store.oldest_ready_ns(tube)

    cdef bint rank(self, const Record* record, uint64_t* rank) noexcept:
        cdef const Tube* tube = <const Tube*>record
        cdef uint64_t[6] ranks = [
            tube.jobs[<int>READY], tube.jobs[<int>RESERVED], tube.jobs[<int>DELAYED], tube.jobs[<int>BURIED],
            tube.waiting, 0,
        ]
        rank[0] = ranks[self.order] if self.order < 5 else <uint64_t>self.oldest_ns(tube)
        return tube.ended == 0

    cdef tuple row(self, bytes name, const Record* record):
        cdef const Tube* tube = <const Tube*>record
        return (
            name, tube.jobs[<int>READY], tube.jobs[<int>RESERVED], tube.jobs[<int>DELAYED], tube.jobs[<int>BURIED],
            tube.waiting, self.oldest_ns(tube) / NS_PER_S, tube.queued_ns / NS_PER_S / max(tube.reserves, <uint64_t>1),
        )


cdef class ReservedWalk:
    """Counts the jobs that a connection has reserved, and lists `limit` of these jobs.

    connection: the engine's number of the connection. The first step notes the numbers of the jobs. A job that the
    connection holds during the whole walk is listed exactly once.
    """

    cdef BeanstalkStore store
    cdef uint32_t connection
    cdef uint32_t limit
    cdef readonly uint64_t total
    cdef list entries       # jobs that will become rows, the next one last; None before the first step
    cdef list found

    def __cinit__(self, BeanstalkStore store not None, uint32_t connection, uint32_t limit):
        connection_check(connection)
        self.store = store
        self.connection = connection
        self.limit = limit
        self.found = []

    def step(self):
        """Continues for at most 250 us. Returns True when the rows are ready."""
        with self.store:
            if self.entries is None:
                self.note()
                return False
            self.collect()
            self.total = max(
                <uint64_t>self.store.queues.workers.records[self.connection].jobs, <uint64_t>len(self.found)
            )
            return not self.entries

    cdef int note(self) except -1:
        cdef uint32_t number = self.store.queues.workers.records[self.connection].reserved
        self.entries = []
        while number and <size_t>len(self.entries) < self.limit:
            self.entries.append(number)
            number = heap_after(&self.store.queues.jobs.heap, number)
        self.entries.reverse()
        return 0

    cdef int collect(self) except -1:
        cdef int rows = ROWS_STEP
        cdef const Job* job
        while self.entries and rows:
            rows -= 1
            job = job_at(&self.store.queues.jobs, <uint32_t>self.entries.pop())
            if job.state != RESERVED or job.holder != self.connection:
                continue
            tube = tube_at(&self.store.queues.tubes, job.tube)
            name = name_bytes(&self.store.queues.tubes.table, &tube.record)
            left_ns = <int64_t>job.node.key - self.store.now_ns
            self.found.append((str(job_id(job)), name, job.since_ns // NS_PER_TENTH, max(left_ns, 0) / NS_PER_S))
        return 0

    def rows(self):
        """Returns the rows.

        Each row shows its job as it was when it was read. Call this after step() has returned True.
        """
        return self.found


def open_tubes(BeanstalkStore store, parameters):
    """Begins a walk through the tubes."""
    match, sort, limit = ranked_parameters(parameters, SORTS)
    return TubesWalk(store, match, limit, sort)


def open_reserved(BeanstalkStore store, parameters):
    """Begins a walk along the jobs that one connection has reserved."""
    readers = {"connection": CONNECTION, "limit": integer(1, ROWS_MAX)}
    return ReservedWalk(store, **read_parameters(parameters, readers, {"limit": ROWS_MAX}))


TABLES = (
    Table(
        "tubes",
        "The tubes. By default, the tubes with the most ready jobs come first. `match`: list only names that "
        "contain this text.",
        (
            Column("tube", "name", "the name of the tube"),
            Column("ready", "integer", "jobs that are ready"),
            Column("reserved", "integer", "jobs that are reserved"),
            Column("delayed", "integer", "jobs that are delayed"),
            Column("buried", "integer", "jobs that are buried"),
            Column("waiting", "integer", "connections that wait for a job"),
            Column("oldest", "seconds", "how long the oldest ready job has been ready"),
            Column("queued", "seconds", "how long jobs were ready before they were reserved, on average"),
        ),
        SORTS,
        open_tubes,
        metrics=(
            Figure(
                "oldest",
                "beanstalk_tube_oldest_ready_seconds",
                "gauge",
                "How long the oldest ready job has been ready.",
            ),
            Figure(
                "queued",
                "beanstalk_tube_time_in_queue_seconds",
                "gauge",
                "Average time that jobs were ready before they were reserved, since the tube was created.",
            ),
        ),
    ),
    Table(
        "reserved",
        "The jobs that the connection `connection` has reserved.",
        (
            Column("job", "text", "the id of the job"),
            Column("tube", "name", "the tube of the job"),
            Column("since", "since", "when the job was reserved"),
            Column("left", "seconds", "the remaining time to run"),
        ),
        (),
        open_reserved,
        ("connection",),
    ),
)
