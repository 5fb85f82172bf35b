# Walks for people, in slices: the highest-ranking matching records of a table, and the holdings of a connection.
#
# Floor 1. See walk.pyx. A protocol defines the rank and the row of a record, and where its permits are.

from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t

from counterd._core cimport Store
from counterd.engine.permits cimport Holding, Permits
from counterd.engine.table cimport Record, Table

cdef enum:
    BLOCK_WORK = 10         # work of reading a cache line from anywhere, such as a block
    ROW_WORK = 40           # work of making a row
    NAMES_MAX = 4194304     # bytes of the names of all rows, because the answer is sent in one piece


cdef struct Ranked:
    uint64_t rank
    uint32_t number         # of the record; between equal ranks, the lower number comes first


cdef class RankedWalk:
    cdef Store store        # keeps the table's memory alive
    cdef const Table* table
    cdef bytes needle       # bytes to find in names
    cdef Ranked* best       # a heap of `size`, the lowest at its top; sorted, highest first, once `is_sorted`
    cdef uint32_t capacity
    cdef uint32_t size
    cdef uint8_t* name      # a buffer for a name that is in blocks
    cdef uint32_t position  # the next record
    cdef uint32_t taken     # entries of `best` that take() has handled
    cdef int64_t names_left  # bytes that the names of further rows may have
    cdef int64_t work       # that remains in this step
    cdef bint is_sorted
    cdef readonly uint64_t total
    cdef list found         # (0 for the highest rank, record, row)

    cdef uint32_t last(self) noexcept
    cdef bint matches(self, Record* record) noexcept
    cdef void visit(self, uint32_t number) noexcept
    cdef void offer(self, uint32_t number, uint64_t rank) noexcept
    cdef int take(self, uint32_t number) except -1
    cdef bint room_for(self, const Record* record) noexcept
    cdef bint go_on(self) except -1
    cdef bint rank(self, const Record* record, uint64_t* rank) noexcept
    cdef tuple row(self, bytes name, const Record* record)


cdef class HoldingsWalk:
    cdef Store store
    cdef const Permits* permits  # of the store
    cdef uint32_t connection
    cdef uint32_t limit     # rows
    cdef int64_t names_left  # bytes that the names of further rows may have
    cdef readonly uint64_t total
    cdef list entries       # holdings that will become rows, the next one last; None before the first step
    cdef list found

    cdef int note(self) except -1
    cdef int collect(self) except -1
    cdef tuple row(self, bytes name, const Holding* holding)
    cpdef bint step(self) except -1
