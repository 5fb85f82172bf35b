# The throttr room's session, for whoever subclasses it in Cython (the benchmarks do).

from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t

from counterd._core cimport Frame
from counterd.protocols.throttr._keys cimport Key
from counterd.protocols.throttr._listing cimport Lister


cdef class ThrottrSession(Lister):
    cdef int execute(self, uint8_t opcode, const Frame* frame) except -1
    cdef uint32_t find_living(self, const Frame* frame) noexcept
    cdef void expect(self, uint32_t number) noexcept
    cdef int without_room(self, const Frame* frame, int room) noexcept
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
