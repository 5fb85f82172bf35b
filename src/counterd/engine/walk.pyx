"""Walks for people, in slices. A walk finds the highest-ranking records of a table that match, or the holdings of a
connection. percent_encoded() makes text of the names in its rows.

Floor 1 (ARCHITECTURE.md). This file does no I/O and has no clock. A slice is an amount of counted work, not a number of
records, because a long name takes as long as a thousand short names.

Records are created, removed and changed between two slices. So the heap keeps only the number of a record, and the rank
that it had when the walk passed it. Before a record becomes a row, the walk checks again that the record exists and
matches, and reads its rank, name and numbers at that moment. If a record exists during the whole walk, and always ranks
high enough, it becomes a row exactly once.
"""

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from cpython.mem cimport PyMem_RawFree, PyMem_RawMalloc
from libc.stdint cimport uint8_t, uint32_t, uint64_t

from counterd._core cimport Store
from counterd.engine.connections cimport connection_check
from counterd.engine.debug cimport debug_check
from counterd.engine.permits cimport Holding, permit_at
from counterd.engine.table cimport RECORD_USED, Record, name_blocks, name_bytes, name_read, record_at, record_name

cdef extern from *:
    """
    #include <string.h>
    """
    void* memmem(const void* haystack, size_t size, const void* needle, size_t needle_size) noexcept nogil

cdef enum:
    NAME_MAX = 65535
    # Work is counted in units of some 8 ns. A step begins nothing new after STEP_WORK, 0.1 ms. The search through one
    # of the longest names, begun before, can take as long again.
    STEP_WORK = 12288
    MATCH_WORK = 3
    HEAP_WORK = 8           # of entering the heap, and of sorting each of its entries
    BYTES_SHIFT = 3         # searching or copying eight bytes of a name is one unit

cdef const uint8_t* HEX = b"0123456789ABCDEF"
cdef uint8_t[256] IS_PLAIN  # whether a byte stands for itself in percent-encoding (RFC 3986, 2.3)
for _byte in range(256):
    IS_PLAIN[_byte] = bytes((_byte,)) in b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-._~"


cdef inline bint is_below(const Ranked* one, const Ranked* other) noexcept nogil:
    return one.rank < other.rank or (one.rank == other.rank and one.number > other.number)


cdef void heap_push(Ranked* heap, uint32_t size, Ranked item) noexcept nogil:
    """Adds an item to a heap of `size` items."""
    cdef uint32_t hole = size
    while hole and is_below(&item, &heap[(hole - 1) // 2]):
        heap[hole] = heap[(hole - 1) // 2]
        hole = (hole - 1) // 2
    heap[hole] = item


cdef void heap_replace(Ranked* heap, uint32_t size, Ranked item) noexcept nogil:
    """Replaces the lowest item of the heap."""
    cdef uint32_t hole = 0
    cdef uint32_t child = 1
    while child < size:
        if child + 1 < size and is_below(&heap[child + 1], &heap[child]):
            child += 1
        if not is_below(&heap[child], &item):
            break
        heap[hole] = heap[child]
        hole = child
        child = 2 * hole + 1
    heap[hole] = item


cdef void heap_sort(Ranked* heap, uint32_t size) noexcept nogil:
    """Sorts the items, with the highest first."""
    cdef Ranked lowest
    while size > 1:
        size -= 1
        lowest = heap[0]
        heap_replace(heap, size, heap[size])
        heap[size] = lowest


cdef class RankedWalk:
    """Counts all matching records of a table, and makes rows of the highest-ranking records.

    A subclass sets `table`, a table of the store. A subclass may rank other cells than records: then it has its own
    last(), visit() and take(). needle: bytes that a name has to contain; b"" matches all names. limit: the largest
    number of rows, at least 1; there are fewer rows if their names together exceed NAMES_MAX.
    """

    def __cinit__(self, Store store not None, bytes needle not None, uint32_t limit, *_):
        if limit == 0:
            raise ValueError("limit must be at least 1")
        self.store = store
        self.needle = needle
        self.capacity = limit
        self.position = 1
        self.names_left = NAMES_MAX
        self.found = []
        self.best = <Ranked*>PyMem_RawMalloc(limit * sizeof(Ranked))
        self.name = <uint8_t*>PyMem_RawMalloc(NAME_MAX)
        if self.best == NULL or self.name == NULL:
            raise MemoryError("no room for a walk")

    def __dealloc__(self):
        PyMem_RawFree(self.best)
        PyMem_RawFree(self.name)

    cdef bint rank(self, const Record* record, uint64_t* rank) noexcept:
        """Sets *rank for a record that is in use. Returns False if the record must not be listed."""
        return False

    cdef tuple row(self, bytes name, const Record* record):
        """Returns the row of a record."""
        return ()

    def step(self):
        """Continues for at most 250 us, within a call of the store. Returns True when the rows are ready."""
        with self.store:
            return self.go_on()

    cdef bint go_on(self) except -1:
        self.work = STEP_WORK
        while not self.is_sorted and self.position <= self.last():
            if self.work <= 0:
                return False
            self.visit(self.position)
            self.position += 1
        if not self.is_sorted:
            if self.work <= 0:
                return False
            heap_sort(self.best, self.size)
            self.work -= HEAP_WORK * self.size
            self.is_sorted = True
        while self.taken < self.size:
            if self.work <= 0:
                return False
            self.take(self.best[self.taken].number)
            self.taken += 1
        return True

    cdef uint32_t last(self) noexcept:
        """Returns the number of the last record to visit."""
        return self.table.pool.fresh

    cdef bint matches(self, Record* record) noexcept:
        cdef size_t size = PyBytes_GET_SIZE(self.needle)
        cdef const uint8_t* name = record_name(record)
        if size == 0:
            return True
        if record.name_size < size:
            return False
        self.work -= MATCH_WORK
        if record.name_size > self.table.name_inline:
            self.work -= BLOCK_WORK * name_blocks(self.table, record.name_size) + (record.name_size >> BYTES_SHIFT)
            name_read(self.table, record, self.name)
            name = self.name
        return memmem(name, record.name_size, PyBytes_AS_STRING(self.needle), size) != NULL

    cdef void visit(self, uint32_t number) noexcept:
        cdef Record* record = record_at(self.table, number)
        cdef uint64_t rank
        self.work -= 1
        if record.flags & RECORD_USED and self.rank(record, &rank) and self.matches(record):
            self.offer(number, rank)

    cdef void offer(self, uint32_t number, uint64_t rank) noexcept:
        """Counts a match, and adds it to the best matches if it is one of them."""
        cdef Ranked item = Ranked(rank, number)
        self.total += 1
        if self.size < self.capacity:
            heap_push(self.best, self.size, item)
            self.size += 1
        elif is_below(&self.best[0], &item):
            heap_replace(self.best, self.size, item)
        else:
            return
        self.work -= HEAP_WORK

    cdef int take(self, uint32_t number) except -1:
        """Makes a row of a record in `best`, if it still exists and matches."""
        cdef Record* record = record_at(self.table, number)
        cdef uint64_t rank
        debug_check(self.is_sorted)
        self.work -= ROW_WORK
        if not record.flags & RECORD_USED or not self.rank(record, &rank) or not self.matches(record):
            return 0
        if not self.room_for(record):
            return 0
        row = self.row(name_bytes(self.table, record), record)
        self.found.append((<uint64_t>0xffffffffffffffff - rank, number, row))
        return 0

    cdef bint room_for(self, const Record* record) noexcept:
        """Counts the bytes of the row's name.

        Returns False if the names together are too long: then this row and all later rows are left out.
        """
        self.names_left -= record.name_size
        if self.names_left < 0:
            self.taken = self.size - 1  # the others rank lower
            return False
        self.work -= BLOCK_WORK * name_blocks(self.table, record.name_size) + (record.name_size >> BYTES_SHIFT)
        return True

    def rows(self):
        """Returns the rows, with the highest rank first.

        Each row shows its record as it was when it was read. Call this after step() has returned True.
        """
        self.found.sort()
        return [row for _, _, row in self.found]


cdef class HoldingsWalk:
    """Counts the holdings of a connection, and lists the latest `limit` holdings, beginning with the latest.

    connection: the engine's number of the connection. A subclass sets `permits`, and overrides row(). There are fewer
    rows if their names together exceed NAMES_MAX.

    The first step notes the numbers of the holdings. A holding keeps its number, so a holding that exists during the
    whole walk becomes a row exactly once. If the number of a holding was reused for another holding of the same
    connection, the row shows that other holding.
    """

    def __cinit__(self, Store store not None, uint32_t connection, uint32_t limit):
        connection_check(connection)
        self.store = store
        self.connection = connection
        self.limit = limit
        self.names_left = NAMES_MAX
        self.found = []

    cpdef bint step(self) except -1:
        """Continues for at most 250 us. Returns True when the rows are ready."""
        with self.store:
            if self.entries is None:
                self.note()
                return False
            self.collect()
            self.total = max(self.permits.holders[self.connection].holdings, <uint64_t>len(self.found))
            return not self.entries

    cdef int note(self) except -1:
        """Notes at most `limit` holdings.

        Each holding is a cache line at another address: a thousand of them take 0.1 ms.
        """
        cdef uint32_t entry = self.permits.holders[self.connection].first
        self.entries = []
        while entry and <size_t>len(self.entries) < self.limit:
            self.entries.append(entry)
            entry = self.permits.holdings[entry].of_connection.next
        self.entries.reverse()
        return 0

    cdef int collect(self) except -1:
        """Makes rows of the noted holdings that the connection still has."""
        cdef int64_t work = STEP_WORK
        cdef const Holding* holding
        cdef Record* record
        while self.entries and work > 0:
            work -= ROW_WORK
            holding = self.permits.holdings + <uint32_t>self.entries.pop()
            if holding.connection != self.connection:
                continue
            record = &permit_at(self.permits, holding.record).record
            self.names_left -= record.name_size
            if self.names_left < 0:
                self.entries.clear()
                break
            work -= BLOCK_WORK * name_blocks(&self.permits.table, record.name_size) + (record.name_size >> BYTES_SHIFT)
            self.found.append(self.row(name_bytes(&self.permits.table, record), holding))
        return 0

    cdef tuple row(self, bytes name, const Holding* holding):
        """Returns the row of a holding. name: the name of its record."""
        return ()

    def rows(self):
        """Returns the rows.

        Each row shows its holding as it was when it was read. Call this after step() has returned True.
        """
        return self.found


def percent_encoded(bytes name not None):
    """Returns a name as percent-encoded text. A name of 64 KiB takes a quarter of a millisecond at most."""
    cdef const uint8_t* at = <const uint8_t*>PyBytes_AS_STRING(name)
    cdef const uint8_t* end = at + PyBytes_GET_SIZE(name)
    cdef bytes text = PyBytes_FromStringAndSize(NULL, 3 * PyBytes_GET_SIZE(name))
    cdef uint8_t* start = <uint8_t*>PyBytes_AS_STRING(text)
    cdef uint8_t* target = start
    while at < end:
        if IS_PLAIN[at[0]]:
            target[0] = at[0]
            target += 1
        else:
            target[0], target[1], target[2] = c"%", HEX[at[0] >> 4], HEX[at[0] & 15]
            target += 3
        at += 1
    return text[:target - start].decode("ascii")
