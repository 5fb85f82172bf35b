# Walks for people, a slice at a time: the records of a table that rank highest among those that match, and what one
# connection holds.
#
# Floor 1. What they do is in walk.pyx; a room says what a record ranks and what its row is, and where its permits are.

from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t

from counterd._core cimport Store
from counterd.engine.permits cimport Permits
from counterd.engine.table cimport Record, Table

cdef enum:
    BLOCK_WORK = 10         # what a line of memory from anywhere counts, a block for example


cdef struct Ranked:
    uint64_t rank
    uint32_t number         # of the record; of two that rank the same, the lower one goes first


cdef class RankedWalk:
    cdef Store store        # whose memory the table is in
    cdef const Table* table
    cdef bytes needle       # what is looked for in names
    cdef Ranked* best       # a heap of `size`, the lowest at its top; highest first once `is_sorted`
    cdef uint32_t capacity
    cdef uint32_t size
    cdef uint8_t* name      # room for one that is in blocks
    cdef uint32_t position  # the next record
    cdef uint32_t taken     # of the best, how many have become rows
    cdef int64_t names_left  # bytes that names of rows may still have
    cdef int64_t work       # that remains of this step
    cdef bint is_sorted
    cdef readonly uint64_t total
    cdef list found         # (0 for the highest rank, record, row)

    cdef bint matches(self, Record* record) noexcept
    cdef void visit(self, uint32_t number) noexcept
    cdef int take(self, uint32_t number) except -1
    cdef bint go_on(self) except -1
    cdef bint rank(self, const Record* record, uint64_t* rank) noexcept
    cdef tuple row(self, bytes name, const Record* record)


cdef class HoldingsWalk:
    cdef Store store
    cdef const Permits* permits  # of the store
    cdef uint32_t connection
    cdef uint32_t limit     # rows
    cdef int64_t names_left  # bytes that names of rows may still have
    cdef readonly uint64_t total
    cdef list entries       # holdings that are to become rows, the next one last; None before the first step
    cdef list found

    cdef int note(self) except -1
    cdef int collect(self) except -1
    cpdef bint step(self) except -1
