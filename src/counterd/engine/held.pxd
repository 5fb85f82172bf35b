# Replies that a session holds back until the journal is on disk.
#
# Floor 0. A position counts the changes that the journal has; the store knows up to which one it is on disk.

cimport cython
from libc.stdint cimport uint64_t


@cython.final
cdef class HeldReplies:
    cdef readonly list pieces   # (position that the replies wait for, replies), in order
    cdef readonly size_t size   # bytes of all replies

    cpdef uint64_t last_position(self) except? 0
    cpdef bint is_due(self, uint64_t durable) noexcept
    cpdef int add(self, uint64_t position, bytes replies) except -1
    cpdef int replace(self, Py_ssize_t at, uint64_t position, bytes replies) except -1
    cpdef bytes take(self, uint64_t durable, size_t size_max)
