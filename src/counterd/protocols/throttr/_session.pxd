# The throttr protocol's session.

from libc.stdint cimport uint8_t, uint32_t

from counterd._core cimport Frame, Session
from counterd.protocols.throttr._listing cimport Listing
from counterd.protocols.throttr._members cimport Member


cdef class ThrottrSession(Session):
    cdef Member* member         # of its connection, in the region; NULL once that has left
    cdef Listing listing        # the long reply under way, or None
    cdef size_t arrived         # bytes of the call under way that its member has yet to count

    cdef bint enter_channel(self, uint32_t tag, const uint8_t* name, uint32_t size) noexcept
    cdef int execute(self, const Frame* frame) except -1
    cdef int execute_other(self, uint8_t opcode, const Frame* frame) except -1
    cdef int publish(self, const Frame* frame) except -1
    cdef int event(self, const Frame* frame) except -1
    cdef int execute_nested(self, const Frame* frame, size_t start, uint32_t depth) except -1
    cdef int info(self) except -1
    cdef int tell_connection(self, const Frame* frame) except -1
    cdef int list_subscribers(self, const Frame* frame) except -1
    cdef int list_all(self, uint8_t opcode, uint32_t channel) except -1
