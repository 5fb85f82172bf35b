# The long replies of the throttr protocol.

from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t

from counterd.engine.table cimport Record, Table
from counterd.protocols.throttr._keys cimport Key, key_reads_per_minute, key_writes_per_minute
from counterd.protocols.throttr._store cimport ThrottrStore
from counterd.protocols.throttr._wire cimport put

cdef enum:
    FRAGMENT_MAX = 2048     # bytes of a fragment's entries, with the keys of LIST and STATS
    FRAGMENT_ITEMS = 170    # the most entries in a fragment: those of LIST_SIZE, with N = 1 and an empty key
    CONNECTION_SIZE = 237   # bytes of an entry
    CHANNEL_SIZE = 25
    STATS_SIZE = 33         # plus the key
    LIST_SIZE = 12          # plus the key; with N = 1
    SUBSCRIBER_SIZE = 40


cdef class Listing:             # a long reply under way
    cdef ThrottrStore store
    cdef uint8_t opcode
    cdef bint counted           # the first walk is over: `left` was sent
    cdef uint32_t next          # the next number of the current walk
    cdef uint32_t end           # the last number when the listing began
    cdef uint32_t epoch         # later objects are not shown
    cdef uint32_t channel       # whose subscribers are listed
    cdef bint repeating         # the third walk: repeated subscriptions
    cdef uint64_t left          # fragments, or subscriptions, that remain to be sent
    cdef uint64_t fragment      # the number of the last fragment
    cdef uint32_t bytes         # of the entries of the current fragment
    cdef uint32_t count
    cdef uint32_t[FRAGMENT_ITEMS] numbers

    cdef bint go_on(self) except -1
    cdef bint must_pause(self) noexcept
    cdef bint count_items(self) noexcept
    cdef uint32_t item_size(self, uint32_t number) noexcept
    cdef bint fill_fragment(self) noexcept
    cdef int write_fragment(self) except -1
    cdef const Table* table(self) noexcept
    cdef Record* record_of(self, uint32_t number) noexcept
    cdef uint8_t* write_entry(self, uint32_t number, uint8_t* target) except NULL
    cdef bint write_subscribers(self) noexcept


cdef int write_connection(ThrottrStore store, uint32_t number, uint8_t* target) except -1
cdef void write_subscriber(ThrottrStore store, uint32_t entry, uint8_t* target) noexcept


cdef inline uint8_t* write_stat(const Key* key, uint32_t minute, uint8_t* target) noexcept nogil:
    """Writes the statistics of a key. Returns the end of the statistics. See section "STAT"."""
    target = put(put(target, key_reads_per_minute(key, minute)), key_writes_per_minute(key, minute))
    return put(put(target, key.reads), key.writes)
