# What the connections of a load process ask of a work queue, and what they know of its jobs.
#
# A side. Between Permits, whose queues of what is held it uses, and Load, which moves the bytes.

from libc.stdint cimport int64_t, uint32_t, uint64_t

from counterd.bench._permits cimport Link, Permits, Request
from counterd.bench._words cimport Reply


cdef class Jobs(Permits):
    cdef bint fans
    cdef uint32_t producers         # the first so many connections of this process put, in a fan
    cdef uint32_t next_producer     # whose turn it is to put a job in place of one that has been reserved
    cdef uint32_t jobs              # of a fan: put, and not reserved yet
    cdef uint64_t jobs_max          # of a closed loop
    cdef uint32_t numbers           # that jobs have: of 0, 1, ... below, each this process's share
    cdef int64_t delay_ns

    cdef bint is_worker(self, const Link* link) noexcept
    cdef bint is_idle(self, const Link* link) noexcept
    cdef int job_answered(self, Link* link, const Request* request, const Reply* reply) except -1
    cdef int reserved(self, Link* link, const Reply* reply) except -1
    cdef int judge(self, uint32_t number, const Reply* reply) except -1
    cdef int64_t put_ns(self, const Reply* reply) noexcept
