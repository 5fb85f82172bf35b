"""Replies that a session holds back until the journal is on disk.

Floor 0 (ARCHITECTURE.md).
"""

cimport cython
from cpython.bytes cimport PyBytes_GET_SIZE
from cpython.list cimport PyList_SetSlice
from libc.stdint cimport uint64_t


@cython.final
cdef class HeldReplies:
    """A queue of replies. Each piece waits until the journal is on disk up to a position."""

    def __cinit__(self):
        self.pieces = []

    cpdef uint64_t last_position(self) except? 0:
        """Returns the position that the last piece waits for. There must be a piece."""
        return self.pieces[len(self.pieces) - 1][0]

    cpdef bint is_due(self, uint64_t durable) noexcept:
        """Returns whether the first piece may be sent, if the journal is on disk up to `durable`."""
        return self.size != 0 and <uint64_t>self.pieces[0][0] <= durable

    cpdef int add(self, uint64_t position, bytes replies) except -1:
        self.pieces.append((position, replies))
        self.size += PyBytes_GET_SIZE(replies)
        return 0

    cpdef int replace(self, Py_ssize_t at, uint64_t position, bytes replies) except -1:
        """Replaces the piece number `at`."""
        self.size += PyBytes_GET_SIZE(replies) - PyBytes_GET_SIZE(<bytes>self.pieces[at][1])
        self.pieces[at] = (position, replies)
        return 0

    cpdef bytes take(self, uint64_t durable, size_t size_max):
        """Returns and removes the pieces that may be sent: at most size_max bytes and one more piece."""
        cdef list taken = []
        cdef size_t size = 0
        for position, replies in self.pieces:
            if size >= size_max or <uint64_t>position > durable:
                break
            taken.append(replies)
            size += PyBytes_GET_SIZE(<bytes>replies)
        PyList_SetSlice(self.pieces, 0, len(taken), ())
        self.size -= size
        return taken[0] if len(taken) == 1 else b"".join(taken)
