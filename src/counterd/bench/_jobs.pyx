"""What the connections of a load process ask of a work queue, and what they know of its jobs. The base of Messages.

A side. A body begins with the job's number, by which --verify knows it, and in a fan with the time for which its put
was meant. A cycle never waits for a job that nobody has put: each connection has put one before each that it reserves.
Each process has a tube of its own, so all that it puts is reserved by itself.

Invariant: what the Board says of a job is zero until its put is asked, and once its end is known.
"""

from libc.stdint cimport int64_t, uint32_t, uint64_t
from libc.string cimport memcmp

from counterd.bench._board cimport ENDING, OUT, SENT, STORED
from counterd.bench._memory cimport Permit
from counterd.bench._permits cimport Link, Permits, Request
from counterd.bench._words cimport (
    BEANSTALK, CYCLE, DELETE, DELETED, FAILED, FAN, INSERTED, PUT, RESERVE, RESERVED, Op, Reply, Template, name_read,
)

from counterd.bench.dialect import NUMBERED_SIZE, STAMPED_SIZE
from counterd.bench.plan import VERIFIED_MAX

cdef size_t STAMP_AT = NUMBERED_SIZE
cdef size_t STAMP_END = STAMPED_SIZE


cdef class Jobs(Permits):

    def __cinit__(self, plan, board, int index, *_):
        self.fans = plan.fans()
        self.producers = plan.producers // plan.processes + (index < plan.producers % plan.processes)
        self.jobs_max = <uint64_t>self.producers * plan.depth
        self.numbers = VERIFIED_MAX // plan.processes * plan.processes
        self.delay_ns = plan.delay * 1000000000

    # ---- what is asked ----

    cdef int choose_drawn(self, Link* link, Op* op, Permit* permit) except -1:
        """Of a cycle or a fan, what comes next on the connection: what it has reserved, it deletes first."""
        if self.dialect.protocol != BEANSTALK:
            return Permits.choose_drawn(self, link, op, permit)
        if op[0] == FAN:
            op[0] = PUT if not self.is_worker(link) else DELETE if link.held_count else RESERVE
        elif op[0] == CYCLE and link.held_count:
            op[0] = DELETE
        elif op[0] == CYCLE:
            link.raised = not link.raised
            op[0] = PUT if link.raised else RESERVE
        if op[0] == PUT:
            self.jobs += 1
            permit.name = self.next_fresh() % self.numbers
            if self.board.held != NULL:
                if self.board.held[permit.name]:
                    self.exceeded(f"more than {self.numbers} jobs were there, all that can be verified")
                self.board.held[permit.name] = SENT
        elif op[0] == DELETE:
            permit[0] = self.held_pop(link)
            if self.board.held != NULL:
                self.board.held[permit.name] |= ENDING
        return 0

    cdef bint is_worker(self, const Link* link) noexcept:
        """Whether the connection waits for jobs that others put."""
        return self.fans and link.index >= self.producers

    cdef bint is_idle(self, const Link* link) noexcept:
        """Whether all that it waits for is a job."""
        return self.is_worker(link) and link.count == 1 and link.ring[link.head & link.mask].op == RESERVE

    # ---- what is known ----

    cdef int job_answered(self, Link* link, const Request* request, const Reply* reply) except -1:
        if reply.outcome == RESERVED:
            return self.reserved(link, reply)
        if request.op == PUT and reply.outcome == FAILED:
            self.jobs -= self.jobs > 0
        if self.board.held == NULL:
            return 0
        if reply.outcome == INSERTED and self.board.held[request.permit.name]:  # it may have ended already
            self.board.held[request.permit.name] |= STORED
        elif reply.outcome == DELETED:
            self.board.held[request.permit.name] = 0
        return 0

    cdef int reserved(self, Link* link, const Reply* reply) except -1:
        cdef Permit job = Permit(reply.token, 0)
        self.jobs -= self.jobs > 0
        if self.board.held != NULL:
            job.name = <uint32_t>min(name_read(reply.body, STAMP_AT), self.numbers)
            self.judge(job.name, reply)
            job.name %= self.numbers
        return self.held_push(link, job)

    cdef int judge(self, uint32_t number, const Reply* reply) except -1:
        """A job that was delivered, and its body."""
        cdef Template* put = self.templates + <int>PUT
        cdef size_t start = STAMP_END if self.fans else STAMP_AT
        cdef int64_t known = self.board.held[number] if number < self.numbers else 0
        if known == 0:
            return self.exceeded(f"job {reply.token} was delivered, which nobody had put, or which had ended")
        if known & OUT:
            self.exceeded(f"job {reply.token} was delivered twice")
        if memcmp(reply.body + start, put.data + put.name_at + start, self.dialect.value_size - start):
            self.exceeded(f"job {reply.token} was delivered with another body")
        self.board.held[number] = known | OUT
        return 0

    cdef int let_go(self, Link* link) except -1:
        """The connection's jobs may be delivered again; what it has put last is there or is not."""
        cdef Request* request
        cdef uint32_t i
        if self.dialect.protocol != BEANSTALK:
            return Permits.let_go(self, link)
        for i in range(link.count):
            request = link.ring + ((link.head + i) & link.mask)
            if request.op == PUT:
                self.jobs -= self.jobs > 0
            elif request.op == DELETE and self.board.held != NULL:
                self.board.held[request.permit.name] &= ~OUT
        while link.held_count:
            job = self.held_pop(link)
            if self.board.held != NULL:
                self.board.held[job.name] &= ~OUT
        return 0

    cdef int64_t put_ns(self, const Reply* reply) noexcept:
        """When the job that was delivered in a fan was meant to be put."""
        return <int64_t>name_read(reply.body + STAMP_AT, STAMP_END - STAMP_AT)
