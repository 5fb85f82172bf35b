# Walks for people, in slices: the rows of a table of the admin interface.
#
# Floor 1. See walk.pyx. A protocol defines the rank and the row of a record, and where its permits are.

from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t

from counterd._core cimport Store
from counterd.engine.permits cimport Permits
from counterd.engine.table cimport Record, Table

cdef enum:
    BLOCK_WORK = 10         # work of reading a cache line from anywhere, such as a block


cdef class Walk:
    cdef Store store        # keeps its memory alive
    cdef uint32_t limit     # rows
    cdef bytes match        # bytes to find in names
    cdef uint32_t sort      # which of the table's orders
    cdef bytes name
    cdef uint32_t connection
    cdef int64_t names_left  # bytes that the names of further rows may have; negative: there are no further rows
    cdef int64_t work       # that remains in this step
    cdef readonly uint64_t total
    cdef list found

    cdef bint go_on(self) except -1
    cdef bint room_for(self, const Table* table, const Record* record) noexcept


cdef struct Ranked:
    uint64_t rank
    uint32_t number         # of the record; between equal ranks, the lower number comes first


cdef class RankedWalk(Walk):
    cdef const Table* table
    cdef Ranked* best       # a heap of `size`, the lowest at its top; sorted, highest first, once `is_sorted`
    cdef uint32_t size
    cdef uint8_t* buffer    # for a name that is in blocks
    cdef uint32_t position  # the next record
    cdef uint32_t taken     # entries of `best` that became rows, if they still match
    cdef bint is_sorted

    cdef uint32_t last(self) noexcept
    cdef Record* find(self, uint32_t number, uint64_t* rank) noexcept
    cdef bint matches(self, Record* record) noexcept
    cdef void offer(self, uint32_t number, uint64_t rank) noexcept
    cdef bint rank(self, uint32_t number, const Record* record, uint64_t* rank) noexcept
    cdef tuple row(self, uint32_t number, const Record* record, bytes name)


cdef class NotedWalk(Walk):
    cdef list entries       # those that will become rows, the next one last; None before the first step

    cdef int note(self) except -1
    cdef uint64_t count(self) noexcept
    cdef tuple row(self, object entry)


cdef class HoldingsWalk(NotedWalk):
    cdef const Permits* permits  # of the store
