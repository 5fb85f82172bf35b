# The throttr protocol's session.

from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t

from counterd._core cimport Frame, Session
from counterd.protocols.throttr._keys cimport Key
from counterd.protocols.throttr._listing cimport Listing
from counterd.protocols.throttr._members cimport Member


cdef class ThrottrSession(Session):
    cdef Member* member         # of its connection, in the region; NULL once that has left
    cdef Listing listing        # the long reply under way, or None
    cdef size_t arrived         # bytes of the call under way that its member has yet to count

    cdef bint enter_channel(self, uint32_t tag, const uint8_t* name, uint32_t size) noexcept
    cdef int execute(self, uint8_t opcode, const Frame* frame) except -1
    cdef uint32_t find_living(self, const Frame* frame) noexcept
    cdef int insert(self, const Frame* frame) except -1
    cdef int query(self, const Frame* frame) except -1
    cdef int update(self, const Frame* frame) except -1
    cdef bint update_quota(self, Key* key, uint8_t change, uint64_t value) noexcept
    cdef void update_ttl(self, uint32_t number, uint8_t change, uint64_t value) noexcept
    cdef int purge(self, const Frame* frame) except -1
    cdef int set(self, const Frame* frame) except -1
    cdef int overwrite(self, uint32_t number, const Frame* frame, int64_t expires_ns) except -1
    cdef int get(self, const Frame* frame) except -1
    cdef int stat(self, const Frame* frame) except -1
    cdef int subscribe(self, const Frame* frame) except -1
    cdef int unsubscribe(self, const Frame* frame) except -1
    cdef int publish(self, const Frame* frame) except -1
    cdef int event(self, const Frame* frame) except -1
    cdef int execute_nested(self, const Frame* frame, size_t start, uint32_t depth) except -1
    cdef int info(self) except -1
    cdef int tell_connection(self, const Frame* frame) except -1
    cdef int list_subscribers(self, const Frame* frame) except -1
    cdef int list_all(self, uint8_t opcode, uint32_t channel) except -1
