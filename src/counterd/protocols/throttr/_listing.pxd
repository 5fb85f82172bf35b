# The long replies of the throttr room.

from libc.stdint cimport uint8_t, uint32_t, uint64_t

from counterd._core cimport Frame
from counterd._table cimport Record
from counterd.protocols.throttr._keys cimport Key
from counterd.protocols.throttr._store cimport Member

cdef enum:
    FRAGMENT_ITEMS = 170    # the most that a fragment has: 2,048 bytes of entries of at least 12


cdef struct Listing:        # a reply under way that tells of all there is of a kind, in two walks along its numbers
    uint8_t opcode
    bint counted            # the first walk is over: `left` is known, and was told
    uint32_t end            # the last number that there was when it began
    uint32_t epoch          # what was made since is not told
    uint32_t channel        # whose subscribers are told
    bint repeating          # of them, those that have subscribed repeatedly
    uint64_t left           # fragments, or subscriptions, that are still owed
    uint64_t fragment       # number of the last one that was begun
    uint32_t bytes          # of the entries of the fragment that is being filled
    uint32_t count
    uint32_t numbers[FRAGMENT_ITEMS]


cdef class Lister(Member):
    cdef Listing* listing       # the long reply under way, or NULL

    cdef uint8_t* append(self, uint32_t size) noexcept
    cdef uint8_t* reply(self, uint32_t size) noexcept
    cdef int reply_success(self) noexcept
    cdef int refuse(self, const Frame* frame) noexcept
    cdef int info(self) except -1
    cdef int tell_connection(self, const Frame* frame) except -1
    cdef int write_connection(self, Member member, uint8_t* target) except -1
    cdef void write_subscriber(self, uint32_t entry, uint8_t* target) noexcept
    cdef int list_all(self, uint8_t opcode, uint32_t channel) except -1
    cdef int list_subscribers(self, const Frame* frame) except -1
    cdef bint must_pause(self) noexcept
    cdef bint count_items(self) noexcept
    cdef uint32_t item_size(self, uint32_t number) noexcept
    cdef bint fill_fragment(self) noexcept
    cdef int write_fragment(self) except -1
    cdef Record* record_of(self, uint32_t number) noexcept
    cdef uint8_t* write_entry(self, uint32_t number, uint8_t* target) except NULL
    cdef uint8_t* write_stat(self, const Key* key, uint8_t* target) noexcept
    cdef bint write_subscribers(self) noexcept
    cdef void drop_listing(self) noexcept
