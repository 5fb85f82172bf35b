# The long replies of the throttr protocol.

from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t

from counterd.engine.table cimport Record, Table
from counterd.protocols.throttr._keys cimport Key, key_reads_per_minute, key_writes_per_minute
from counterd.protocols.throttr._store cimport ThrottrStore
from counterd.protocols.throttr._wire cimport put

cdef enum:
    FRAGMENT_MAX = 2048     # bytes of a fragment's entries, with the keys of LIST and STATS
    FRAGMENT_ITEMS = 170    # the most that fit into them: entries of LIST with N = 1 and an empty key have LIST_SIZE
    CONNECTION_SIZE = 237   # of an entry
    CHANNEL_SIZE = 25
    STATS_SIZE = 33         # and the key
    LIST_SIZE = 12          # with N = 1, and the key
    SUBSCRIBER_SIZE = 40


cdef class Listing:             # a reply under way that tells of all there is of a kind
    cdef ThrottrStore store
    cdef uint8_t opcode
    cdef bint counted           # the first walk is over: `left` is known, and was told
    cdef uint32_t next          # number that either walk comes to next
    cdef uint32_t end           # the last number that there was when it began
    cdef uint32_t epoch         # what was made since is not told
    cdef uint32_t channel       # whose subscribers are told
    cdef bint repeating         # of them, those that have subscribed repeatedly
    cdef uint64_t left          # fragments, or subscriptions, that are still owed
    cdef uint64_t fragment      # number of the last one that was begun
    cdef uint32_t bytes         # of the entries of the fragment that is being filled
    cdef uint32_t count
    cdef uint32_t[FRAGMENT_ITEMS] numbers
    cdef int64_t budget_floor   # at which the call that is under way stops

    cdef bint go_on(self, int64_t budget_floor) except -1
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
    """Section "STAT": what is counted of a key; returns where the next goes."""
    target = put(put(target, key_reads_per_minute(key, minute)), key_writes_per_minute(key, minute))
    return put(put(target, key.reads), key.writes)
