"""What the connections of a load process tell a smockron master, and to which request what it says belongs.

A side. The base of Load. Accounting messages are not answered. Behind each batch of them goes a PING, whose PONG says
that all have been read. Or, where a load is about control messages, each message has an identifier of its own, whose
number says which connection has sent it: the master speaks of those of one connection in their order.
"""

import time

from libc.stdint cimport int64_t, uint32_t

from counterd.bench._jobs cimport Jobs
from counterd.bench._memory cimport Permit
from counterd.bench._permits cimport Link, Request
from counterd.bench._words cimport ACCOUNT, CONTROL, Op, moment_write
from counterd.net.clock cimport monotonic_ns

cdef int64_t NS_PER_MS = 1000000


cdef class Messages(Jobs):

    def __cinit__(self, plan, board, int index, *_):
        cdef uint32_t each = plan.connections // plan.processes
        cdef uint32_t left_over = plan.connections % plan.processes  # which the first processes take
        self.listens = plan.listens()
        self.everywhere = plan.connections
        self.connections = each + (<uint32_t>index < left_over)
        self.first = each * index + min(<uint32_t>index, left_over)
        self.wall_ns = time.time_ns() - monotonic_ns()

    cdef int choose_drawn(self, Link* link, Op* op, Permit* permit) except -1:
        if op[0] != CONTROL:
            return Jobs.choose_drawn(self, link, op, permit)
        permit.name = link.told * self.everywhere + self.first + link.index
        link.told += 1
        return 0

    cdef int set_moment(self, int64_t now) noexcept:
        """Messages that are written from here on say that it is now."""
        cdef int64_t moment_ms = (now + self.wall_ns) // NS_PER_MS
        if moment_ms != self.moment_ms:
            self.moment_ms = moment_ms
            for op in (ACCOUNT, CONTROL):
                if self.templates[<int>op].size:
                    moment_write(self.templates[<int>op].data + self.templates[<int>op].moment_at, moment_ms)
        return 0

    cdef int64_t link_of(self, int64_t number) noexcept:
        """The connection of this process that has sent the message about that identifier; -1 if none has."""
        cdef int64_t link = number % self.everywhere - self.first
        return link if number >= 0 and 0 <= link < self.connections else -1

    cdef bint is_reached(self, const Request* request, int64_t number) noexcept:
        """Whether a message that was sent before, or is that one, so that no more will be said of it."""
        return request.op == CONTROL and request.permit.name <= number
