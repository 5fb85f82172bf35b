"""The beanstalk protocol's tables for people: the tubes, and the jobs that a connection has reserved.

Floor 2 (ARCHITECTURE.md). The tables are walks in slices, see engine/walk.pyx.
"""

from libc.stdint cimport int64_t, uint32_t, uint64_t

from counterd.engine.heap cimport heap_after
from counterd.engine.table cimport Record, name_bytes
from counterd.engine.walk cimport BLOCK_WORK, NotedWalk, RankedWalk
from counterd.protocols.beanstalk._jobs cimport BURIED, DELAYED, READY, RESERVED, Job, job_at, job_id
from counterd.protocols.beanstalk._queues cimport Queues
from counterd.protocols.beanstalk._store cimport BeanstalkStore
from counterd.protocols.beanstalk._tubes cimport Tube, tube_at

from counterd.tables import CONNECTION, Column, Figure, Table

cdef double NS_PER_S = 1e9

cdef enum:
    NS_PER_TENTH = 100000000
    JOB_WORK = 80           # work of reading a job and its tube
    BY_OLDEST = 5           # the last of the orders of tubes


cdef class TubesWalk(RankedWalk):
    """Lists the tubes whose names contain `match`. The last order is the age of the oldest ready job."""

    def __cinit__(self, BeanstalkStore store not None, *_, **_parameters):
        self.table = &store.queues.tubes.table

    cdef int64_t oldest_ns(self, const Tube* tube) noexcept:
        """Returns how long the tube's oldest ready job has been ready."""
        cdef BeanstalkStore store = <BeanstalkStore>self.store
        self.work -= BLOCK_WORK if tube.ready_list.first else 0
        return store.oldest_ready_ns(tube)

    cdef bint rank(self, uint32_t number, const Record* record, uint64_t* rank) noexcept:
        cdef const Tube* tube = <const Tube*>record
        cdef uint64_t[5] ranks = [
            tube.jobs[<int>READY], tube.jobs[<int>RESERVED], tube.jobs[<int>DELAYED], tube.jobs[<int>BURIED],
            tube.waiting,
        ]
        rank[0] = <uint64_t>self.oldest_ns(tube) if self.sort == BY_OLDEST else ranks[self.sort]
        return tube.ended == 0

    cdef tuple row(self, uint32_t number, const Record* record, bytes name):
        cdef const Tube* tube = <const Tube*>record
        return (
            name, tube.jobs[<int>READY], tube.jobs[<int>RESERVED], tube.jobs[<int>DELAYED], tube.jobs[<int>BURIED],
            tube.waiting, self.oldest_ns(tube) / NS_PER_S, tube.queued_ns / NS_PER_S / max(tube.reserves, <uint64_t>1),
        )


cdef class ReservedWalk(NotedWalk):
    """Lists jobs that a connection has reserved."""

    cdef Queues* queues

    def __cinit__(self, BeanstalkStore store not None, *_, **_parameters):
        self.queues = &store.queues

    cdef int note(self) except -1:
        cdef uint32_t number = self.queues.workers.records[self.connection].reserved
        while number and <size_t>len(self.entries) < self.limit:
            self.entries.append(number)
            number = heap_after(&self.queues.jobs.heap, number)
        return 0

    cdef uint64_t count(self) noexcept:
        return self.queues.workers.records[self.connection].jobs

    cdef tuple row(self, object entry):
        cdef const Job* job = job_at(&self.queues.jobs, <uint32_t>entry)
        cdef int64_t left_ns = <int64_t>job.node.key - self.store.now_ns
        if job.state != RESERVED or job.holder != self.connection:
            return None
        self.work -= JOB_WORK
        tube = tube_at(&self.queues.tubes, job.tube)
        name = name_bytes(&self.queues.tubes.table, &tube.record)
        return (str(job_id(job)), name, job.since_ns // NS_PER_TENTH, max(left_ns, 0) / NS_PER_S)


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
        ("ready", "reserved", "delayed", "buried", "waiting", "oldest"),
        TubesWalk,
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
        ReservedWalk,
        {"connection": CONNECTION},
    ),
)
