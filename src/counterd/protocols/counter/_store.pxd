# The counter protocol's store, for the modules with its sessions and tables.

from libc.stdint cimport uint8_t, uint32_t, uint64_t

from counterd._core cimport Frame, Session, Store
from counterd.protocols.counter._counters cimport Counters
from counterd.protocols.counter._items cimport Decision, Item
from counterd.protocols.counter._messages cimport OPCODES, TakeHead
from counterd.protocols.counter._peers cimport Peers
from counterd.protocols.counter._resumptions cimport Resumptions
from counterd.protocols.counter._takes cimport Takes


cdef class CounterStore(Store):
    cdef Counters counters
    cdef Peers peers
    cdef Takes takes
    cdef Resumptions resumptions
    # Not in the region:
    cdef object others          # returns the figures of the floors above, for Stats
    cdef bint draining          # nothing is handed out any more
    cdef bint parting           # no request waits any more; true while it drains, too
    cdef uint32_t to_drain      # waiters up to this number are still to be told so
    cdef uint32_t to_limit      # waiters up to this number are still to be checked against new limits
    cdef void** sessions        # of the open connections, by number; borrowed
    cdef list lendings          # the numbers of the connections of other stores, see _lending.pyx
    # Of Takes, in total:
    cdef uint64_t granted_later     # that were granted after a wait
    cdef uint64_t waited_us         # microseconds that those had waited
    cdef uint64_t timed_out         # that were refused when their time was over
    cdef uint64_t not_queued        # that could not wait because there was no room
    cdef uint64_t[OPCODES] requests  # valid requests by Opcode
    cdef uint64_t[OPCODES + 1][256] refusals  # by Opcode, the last for unknown ones; by Status

    cdef bint wait_for(
        self, Session session, const Frame* frame, const TakeHead* head, const Item* items, const Decision* decision
    ) except -1
    cdef void meet(self, Session session) except *
    cdef bint cancel(self, Session session, uint32_t opaque) except -1
    cdef void cancel_one(self, Session session, uint32_t number) noexcept
    cdef bint give_back(self, Session session) except -1
    cdef bint name_connection(self, uint32_t connection, const uint8_t* name, uint32_t size) except -1
    cdef bint holds_nothing(self, uint32_t connection) noexcept
    cdef bint wait_of_ends(self, uint32_t connection) except -1
    cdef int exchange(self, Session session, uint32_t number) except -1
    cdef int end_graces(self, int steps) except -1
    cdef void look_again(self) noexcept
    cdef int serve(self, int steps) except -1
    cdef int serve_queue(self, uint32_t queue, int steps) except -1
    cdef int grant(self, uint32_t number, const Item* items) except -1
    cdef int refuse(self, uint32_t number, uint8_t status, const Decision* decision, const Item* items) except -1
    cdef int limit_waiter(self, uint32_t number) except -1
    cdef bint is_lent(self, uint32_t number) noexcept
    cdef int refuse_by(self, uint32_t number, const Decision* decision, const Item* items) except -1
    cdef uint32_t write_shortage(
        self, uint8_t* target, uint32_t opaque, const Decision* decision, const Item* items
    ) noexcept
    cdef int post_to(self, uint32_t number, const uint8_t* data, uint32_t size) except -1
    cdef int expire(self, int steps) except -1
    cdef int leave(self, int steps) except -1
    cdef bytes stats_body(self)
