# What a load process asks for on a connection, and what it makes of the answers: one of three kinds of work.
#
# Floor 5.

from libc.stdint cimport int64_t, uint8_t, uint32_t

from counterd.bench._ledger cimport Ledger
from counterd.bench._link cimport Link, Request
from counterd.bench._memory cimport Heap, Permit
from counterd.bench._task cimport Task
from counterd.bench._words cimport Reply


cdef class Work:
    cdef Task task
    cdef Ledger ledger
    cdef Heap heap          # permits that end

    cdef int choose(self, Link* link, int64_t intended_ns, uint8_t* op, Permit* permit) except -1
    cdef uint32_t room(self, const Link* link) noexcept
    cdef bint waits(self, const Link* link) noexcept
    cdef int64_t answered(self, Link* link, const Request* request, const Reply* reply, int64_t now) except -2
    cdef int64_t intended_ns(self, const Request* request, const Reply* reply) noexcept
    cdef uint32_t awaited(self, const Link* links, uint32_t in_flight) noexcept
    cdef int let_go(self, Link* link) except -1
