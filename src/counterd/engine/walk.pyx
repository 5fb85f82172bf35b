"""Walks for people, in slices. A walk finds the highest-ranking records of a table that match, or the entries of a
list, such as the holdings of a connection. percent_encoded() makes text of the names in its rows.

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
from counterd.engine.permits cimport Holding, permit_at
from counterd.engine.table cimport RECORD_USED, Record, name_blocks, name_bytes, name_read, record_at, record_name

cdef extern from *:
    """
    #include <string.h>
    """
    void* memmem(const void* haystack, size_t size, const void* needle, size_t needle_size) noexcept nogil

cdef enum:
    NAME_MAX = 65535
    NAMES_MAX = 4194304     # bytes of the names of all rows, because the answer is sent in one piece
    # Work is counted in units of some 8 ns. A step ends when it has used up STEP_WORK, 0.1 ms. If it is searching one
    # of the longest names at that moment, it first finishes this name, which can take as long again.
    STEP_WORK = 12288
    MATCH_WORK = 3
    ROW_WORK = 40           # of making a row
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


cdef class Walk:
    """Makes the rows of a table, in steps. Its arguments are the parameters of the table (tables.Table).

    limit: the largest number of rows, at least 1; there are fewer if their names together exceed NAMES_MAX. match:
    bytes that a name has to contain; b"" matches all names. sort: the index of an order. connection: the engine's
    number of a connection. name: the name that the table is about. A subclass does the work in go_on(), and may have
    further parameters.
    """

    def __cinit__(
        self, Store store not None, uint32_t limit, *, bytes match not None=b"", uint32_t sort=0,
        bytes name not None=b"", uint32_t connection=0, **_others,
    ):
        if limit == 0:
            raise ValueError("limit must be at least 1")
        connection_check(connection)
        self.store, self.limit, self.match, self.sort = store, limit, match, sort
        self.name, self.connection = name, connection
        self.names_left = NAMES_MAX
        self.found = []

    def step(self):
        """Continues for at most 250 us, within a call of the store. Returns True when the rows are ready."""
        with self.store:
            self.work = STEP_WORK
            return self.go_on()

    def rows(self):
        """Returns the rows.

        Each row shows its entry as it was when it was read. Call this after step() has returned True.
        """
        return self.found

    cdef bint go_on(self) except -1:
        """Does `work`. Sets `found` and `total`. Returns True when the rows are ready."""
        return True

    cdef bint room_for(self, const Table* table, const Record* record) noexcept:
        """Counts the bytes of the row's name. Returns False if the names together are too long."""
        self.names_left -= record.name_size
        self.work -= BLOCK_WORK * name_blocks(table, record.name_size) + (record.name_size >> BYTES_SHIFT)
        return self.names_left >= 0


cdef class RankedWalk(Walk):
    """Counts all matching records of a table, and makes rows of the highest-ranking records.

    A subclass sets `table`, a table of the store. A subclass may rank other cells than records: then it has its own
    last() and find().
    """

    def __cinit__(self, Store store not None, uint32_t limit, **_parameters):
        self.position = 1
        self.best = <Ranked*>PyMem_RawMalloc(limit * sizeof(Ranked))
        self.buffer = <uint8_t*>PyMem_RawMalloc(NAME_MAX)
        if self.best == NULL or self.buffer == NULL:
            raise MemoryError("no room for a walk")

    def __dealloc__(self):
        PyMem_RawFree(self.best)
        PyMem_RawFree(self.buffer)

    cdef bint rank(self, uint32_t number, const Record* record, uint64_t* rank) noexcept:
        """Sets *rank for a record that is in use. Returns False if the record must not be listed."""
        return False

    cdef tuple row(self, uint32_t number, const Record* record, bytes name):
        """Returns the row of a record."""
        return ()

    cdef bint go_on(self) except -1:
        cdef Record* record
        cdef uint64_t rank
        cdef uint32_t number
        while not self.is_sorted and self.position <= self.last():
            if self.work <= 0:
                return False
            self.work -= 1
            if self.find(self.position, &rank):
                self.offer(self.position, rank)
            self.position += 1
        if not self.is_sorted:
            if self.work <= 0:
                return False
            heap_sort(self.best, self.size)
            self.work -= HEAP_WORK * self.size
            self.is_sorted = True
        while self.taken < self.size and self.names_left >= 0:
            if self.work <= 0:
                return False
            number = self.best[self.taken].number
            self.taken += 1
            self.work -= ROW_WORK
            record = self.find(number, &rank)
            if record and self.room_for(self.table, record):
                row = self.row(number, record, name_bytes(self.table, record))
                self.found.append((<uint64_t>0xffffffffffffffff - rank, number, row))
        return True

    cdef uint32_t last(self) noexcept:
        """Returns the number of the last record to visit."""
        return self.table.pool.fresh

    cdef Record* find(self, uint32_t number, uint64_t* rank) noexcept:
        """Returns the record with this number, and sets *rank. Returns NULL if it must not be listed."""
        cdef Record* record = record_at(self.table, number)
        if record.flags & RECORD_USED and self.rank(number, record, rank) and self.matches(record):
            return record
        return NULL

    cdef bint matches(self, Record* record) noexcept:
        cdef size_t size = PyBytes_GET_SIZE(self.match)
        cdef const uint8_t* name = record_name(record)
        if size == 0:
            return True
        if record.name_size < size:
            return False
        self.work -= MATCH_WORK
        if record.name_size > self.table.name_inline:
            self.work -= BLOCK_WORK * name_blocks(self.table, record.name_size) + (record.name_size >> BYTES_SHIFT)
            name_read(self.table, record, self.buffer)
            name = self.buffer
        return memmem(name, record.name_size, PyBytes_AS_STRING(self.match), size) != NULL

    cdef void offer(self, uint32_t number, uint64_t rank) noexcept:
        """Counts a match, and adds it to the best matches if it is one of them."""
        cdef Ranked item = Ranked(rank, number)
        self.total += 1
        if self.size < self.limit:
            heap_push(self.best, self.size, item)
            self.size += 1
        elif is_below(&self.best[0], &item):
            heap_replace(self.best, self.size, item)
        else:
            return
        self.work -= HEAP_WORK

    def rows(self):
        """Returns the rows, with the highest rank first.

        Each row shows its record as it was when it was read. Call this after step() has returned True.
        """
        self.found.sort()
        return [row for _, _, row in self.found]


cdef class NotedWalk(Walk):
    """Counts the entries of a list, and makes rows of the first `limit` entries.

    The first step notes what identifies these entries, such as their numbers. An entry that is in the list during the
    whole walk becomes a row exactly once, at the place that it had at the first step. If the number of an entry was
    reused for another entry of the same list, the row may show that other entry.
    """

    cdef bint go_on(self) except -1:
        if self.entries is None:
            self.entries = []
            self.note()
            self.entries.reverse()
            return False
        if not self.entries:
            self.total = max(self.count(), <uint64_t>len(self.found))
            return True
        while self.entries and self.work > 0:
            self.work -= ROW_WORK
            row = self.row(self.entries.pop())
            if self.names_left < 0:
                self.entries.clear()
            elif row is not None:
                self.found.append(row)
        return False

    cdef int note(self) except -1:
        """Appends at most `limit` entries to `entries`.

        Each entry is a cache line at another address: a thousand of them take 0.1 ms.
        """
        return 0

    cdef uint64_t count(self) noexcept:
        """Returns how many entries the list has."""
        return 0

    cdef tuple row(self, object entry):
        """Returns the row of an entry, or None if the entry has left the list or if there is no room for its name."""
        return None


cdef class HoldingsWalk(NotedWalk):
    """Lists what a connection holds, beginning with the latest: names, amounts, and since when.

    A subclass sets `permits`.
    """

    cdef int note(self) except -1:
        cdef uint32_t number = self.permits.holders[self.connection].first
        while number and <size_t>len(self.entries) < self.limit:
            self.entries.append(number)
            number = self.permits.holdings[number].of_connection.next
        return 0

    cdef uint64_t count(self) noexcept:
        return self.permits.holders[self.connection].holdings

    cdef tuple row(self, object entry):
        cdef const Holding* holding = self.permits.holdings + <uint32_t>entry
        cdef Record* record
        if holding.connection != self.connection:
            return None
        record = &permit_at(self.permits, holding.record).record
        if not self.room_for(&self.permits.table, record):
            return None
        return (name_bytes(&self.permits.table, record), holding.amount, holding.since_tenths)


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
