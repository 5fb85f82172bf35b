# The counter protocol's session, for subclasses in Cython (the benchmarks have one).

from libc.stdint cimport uint8_t, uint32_t

from counterd._core cimport Frame, Session
from counterd.engine.permits cimport Outcome
from counterd.protocols.counter._items cimport Item
from counterd.protocols.counter._messages cimport Answer, TakeHead
from counterd.protocols.counter._rates cimport Pace


cdef class CounterSession(Session):
    cdef uint32_t dump_opaque   # of the Dump under way
    cdef uint8_t dump_flags     # likewise
    cdef uint8_t asked          # how often the authority was asked about the current request

    cdef Py_ssize_t parse_named(
        self, const uint8_t* body, uint32_t size, uint8_t opcode, uint8_t fixed, Frame* frame
    ) noexcept
    cdef Py_ssize_t parse_other(self, const uint8_t* body, uint32_t size, uint8_t opcode, Frame* frame) noexcept
    cdef int decline(self, const Frame* frame, Outcome outcome, uint32_t left) except -1
    cdef int take_one(self, const Frame* frame) except -1
    cdef int take_several(self, const Frame* frame) except -1
    cdef int execute_other(self, const Frame* frame) except -1
    cdef int execute_resumption(self, const Frame* frame) except -1
    cdef Answer resume_decide(self, const Frame* frame) except *
    cdef uint32_t amount_held(self, const Frame* frame) noexcept
    cdef bint read_items(self, const Frame* frame, TakeHead* head, Item* items) noexcept
    cdef int take(self, const Frame* frame) except -1
    cdef bint ask(self, uint32_t amount, uint32_t most, const Pace* pace, int items) noexcept
    cdef bint may_wait(self) noexcept
    cdef int refuse(self, const Frame* frame, uint8_t status) noexcept
    cdef int reply_at_length(self, const Frame* frame) except -1
