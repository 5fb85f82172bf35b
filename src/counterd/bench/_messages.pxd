# What the connections of a load process tell a smockron master, and to which request what it says belongs.
#
# A side. Between Jobs and Load, which moves the bytes.

from libc.stdint cimport int64_t, uint32_t

from counterd.bench._jobs cimport Jobs
from counterd.bench._permits cimport Link, Request


cdef class Messages(Jobs):
    cdef bint listens               # there is one more connection, for control messages
    cdef uint32_t connections       # of this process,
    cdef uint32_t everywhere        # of all processes,
    cdef uint32_t first             # and how many those before this one have
    cdef int64_t wall_ns            # Unix time less the monotonic clock
    cdef int64_t moment_ms          # that is in the templates

    cdef int set_moment(self, int64_t now) noexcept
    cdef int64_t link_of(self, int64_t number) noexcept
    cdef bint is_reached(self, const Request* request, int64_t number) noexcept
