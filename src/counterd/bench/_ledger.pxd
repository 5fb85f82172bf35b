# What is surely held, and what is seen that must not be.
#
# Floor 5.

from libc.stdint cimport int64_t, uint32_t, uint64_t

from counterd.bench._board cimport Board, Sheet
from counterd.bench._codec cimport Codec


cdef class Ledger:
    cdef Board board
    cdef Sheet* sheet
    cdef Codec codec
    cdef int64_t* held      # as on the Board; NULL = nobody verifies
    cdef uint32_t resources
    cdef int64_t maximum

    cdef int hold(self, uint32_t name, int64_t permits) except -1
    cdef int look(self, uint32_t name, int64_t used) except -1
    cdef int tell_once(self, uint64_t token) except -1
    cdef int exceeded(self, str text) except -1
