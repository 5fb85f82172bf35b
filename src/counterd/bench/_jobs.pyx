"""A load on a queue of jobs.

Floor 5 (ARCHITECTURE.md). A body begins with the number of the job, by which --verify identifies it. In a fan the
number is followed by the time for which its put was intended. A cycle never waits for a job that nobody has put: each
connection puts a job before each job that it reserves. Each process has its own tube, so it reserves only jobs that it
has put itself.

Invariant: the Board's entry of a job is zero until its put is sent, and after its end is known.
"""

from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t
from libc.string cimport memcmp

from counterd.bench._board cimport ENDING, OUT, SENT, STORED
from counterd.bench._codec cimport CYCLE, DELETE, FAN, PUT, RESERVE, Codec
from counterd.bench._link cimport Link, Request, held_pop, held_push
from counterd.bench._memory cimport Permit
from counterd.bench._work cimport Work
from counterd.bench._words cimport DELETED, FAILED, INSERTED, RESERVED, Reply, Template, name_read

from counterd.bench.dialect import NUMBERED_SIZE, STAMPED_SIZE
from counterd.bench.plan import VERIFIED_MAX

cdef size_t STAMP_AT = NUMBERED_SIZE
cdef size_t STAMP_END = STAMPED_SIZE


cdef class Jobs(Work):
    cdef Codec codec                # which knows what a body looks like
    cdef bint fans
    cdef uint32_t producers         # the first so many connections of this process put, in a fan
    cdef uint32_t next_producer     # whose turn it is to put a job in place of one that has been reserved
    cdef uint32_t jobs              # of a fan: put, and not reserved yet
    cdef uint64_t jobs_max          # of a closed loop
    cdef uint32_t numbers           # that jobs have: of 0, 1, ... below, each this process's share

    def __cinit__(self, plan, int index, *_):
        self.codec = self.ledger.codec
        self.fans = plan.fans()
        self.producers = plan.producers // plan.processes + (index < plan.producers % plan.processes)
        self.jobs_max = <uint64_t>self.producers * plan.depth
        self.numbers = VERIFIED_MAX // plan.processes * plan.processes

    # ---- what is asked ----

    cdef int choose(self, Link* link, int64_t intended_ns, uint8_t* op, Permit* permit) except -1:
        """Chooses the next request of a connection in a cycle or a fan.

        A connection first deletes the job that it has reserved.
        """
        op[0] = self.task.next_op()
        permit.token = 0
        if op[0] == FAN:
            op[0] = PUT if not self.waits(link) else DELETE if link.held_count else RESERVE
        elif op[0] == CYCLE and link.held_count:
            op[0] = DELETE
        elif op[0] == CYCLE:
            link.raised = not link.raised
            op[0] = PUT if link.raised else RESERVE
        if op[0] == PUT:
            self.jobs += 1
            permit.token = intended_ns
            permit.name = self.task.next_fresh() % self.numbers
            if self.ledger.held != NULL:
                if self.ledger.held[permit.name]:
                    self.ledger.exceeded(
                        f"there were more than {self.numbers} jobs, which is the largest number that can be "
                        "verified")
                self.ledger.held[permit.name] = SENT
        elif op[0] == DELETE:
            permit[0] = held_pop(link)
            if self.ledger.held != NULL:
                self.ledger.held[permit.name] |= ENDING
        return 0

    cdef uint32_t room(self, const Link* link) noexcept:
        """Returns how many requests a connection may send. The producers of a fan share the room for jobs."""
        if not self.fans:
            return Work.room(self, link)
        if self.jobs >= self.jobs_max or link.count >= self.task.depth:
            return 0
        return <uint32_t>min(self.jobs_max - self.jobs, self.task.depth - link.count)

    cdef bint waits(self, const Link* link) noexcept:
        return self.fans and link.index >= self.producers

    cdef uint32_t awaited(self, const Link* links, uint32_t in_flight) noexcept:
        """Returns how many replies are awaited.

        In a fan this includes jobs that have to be delivered, but no worker waits at the end.
        """
        cdef uint32_t i
        if not self.fans:
            return in_flight
        for i in range(self.task.connections):
            in_flight -= self.is_idle(links + i)
        return max(in_flight, self.jobs)

    cdef bint is_idle(self, const Link* link) noexcept:
        """Returns whether a connection waits for a job and for nothing else."""
        return self.waits(link) and link.count == 1 and link.ring[link.head & link.mask].op == RESERVE

    # ---- what is known ----

    cdef int64_t answered(self, Link* link, const Request* request, const Reply* reply, int64_t now) except -2:
        """In a fan, a job that was reserved makes the next producer put another job."""
        if reply.outcome == RESERVED:
            self.reserved(link, reply)
            if self.fans:
                self.next_producer = (self.next_producer + 1) % self.producers
                return self.next_producer
            return -1
        if request.op == PUT and reply.outcome == FAILED:
            self.jobs -= self.jobs > 0
        if self.ledger.held == NULL:
            return -1
        if reply.outcome == INSERTED and self.ledger.held[request.permit.name]:  # it may have ended already
            self.ledger.held[request.permit.name] |= STORED
        elif reply.outcome == DELETED:
            self.ledger.held[request.permit.name] = 0
        return -1

    cdef int reserved(self, Link* link, const Reply* reply) except -1:
        cdef Permit job = Permit(reply.token, 0)
        self.jobs -= self.jobs > 0
        if self.ledger.held != NULL:
            job.name = <uint32_t>min(name_read(reply.body, STAMP_AT), self.numbers)
            self.judge(job.name, reply)
            job.name %= self.numbers
        return held_push(link, job)

    cdef int judge(self, uint32_t number, const Reply* reply) except -1:
        """Checks a job that was delivered, and its body."""
        cdef Template* put = self.codec.templates + <int>PUT
        cdef size_t start = STAMP_END if self.fans else STAMP_AT
        cdef int64_t known = self.ledger.held[number] if number < self.numbers else 0
        if known == 0:
            return self.ledger.exceeded(f"job {reply.token} was delivered, but nobody had put it, or it had ended")
        if known & OUT:
            self.ledger.exceeded(f"job {reply.token} was delivered twice")
        if memcmp(reply.body + start, put.data + put.name_at + start, self.codec.value_size - start):
            self.ledger.exceeded(f"job {reply.token} was delivered with another body")
        self.ledger.held[number] = known | OUT
        return 0

    cdef int let_go(self, Link* link) except -1:
        """Called when a connection ends.

        Its jobs may be delivered again, and its last put may have been executed or not.
        """
        cdef Request* request
        cdef uint32_t i
        for i in range(link.count):
            request = link.ring + ((link.head + i) & link.mask)
            if request.op == PUT:
                self.jobs -= self.jobs > 0
            elif request.op == DELETE and self.ledger.held != NULL:
                self.ledger.held[request.permit.name] &= ~OUT
        while link.held_count:
            job = held_pop(link)
            if self.ledger.held != NULL:
                self.ledger.held[job.name] &= ~OUT
        return 0

    cdef int64_t intended_ns(self, const Request* request, const Reply* reply) noexcept:
        """Returns when a job of a fan was meant to be put. Called after the job was delivered."""
        if self.fans and reply.outcome == RESERVED:
            return <int64_t>name_read(reply.body + STAMP_AT, STAMP_END - STAMP_AT)
        return request.intended_ns
