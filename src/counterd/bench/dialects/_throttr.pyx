"""The throttr protocol's replies, as counterbench reads them. See docs/protocols/throttr.md.

Floor 5 (ARCHITECTURE.md).
"""

from libc.stdint cimport int64_t, uint8_t, uint64_t

from counterd.bench._codec cimport LOWER, OWN, RAISE, REMOVE, Codec
from counterd.bench._link cimport Request
from counterd.bench._words cimport ABSENT, ANSWERED, FAILED, PURGED, READ, UPDATED, WRITTEN, Reply
from counterd.engine.byteorder cimport load_le16, load_le32, load_le64

from counterd.protocols.throttr.wire import ID_SIZE, ValueSize

cpdef enum Own:
    NOOP = OWN, GET, QUERY, SET, FILL, CLEAR

cdef size_t WHOAMI_SIZE = 1 + ID_SIZE  # of its reply


cdef class LoadCodec(Codec):
    cdef int width              # bytes of a number

    def __cinit__(self, plan, int index):
        self.width = ValueSize.named(plan.number_type)

    cdef Py_ssize_t read(self, const Request* request, const uint8_t* data, size_t size, Reply* reply) noexcept:
        """Reads a reply.

        A refusal counts as a failure, because the load has created the keys that it asks for, or they are new. Only a
        key that is purged may be gone.
        """
        cdef uint8_t op = request.op
        cdef size_t whole = 1
        cdef size_t ttl_type = 0
        reply.value = -1
        reply.outcome = WRITTEN
        if data[0] > 1:
            return -1
        if data[0] == 0:
            reply.outcome = ABSENT if op == REMOVE or op == CLEAR else FAILED
            return 1
        if op == NOOP:
            reply.outcome = ANSWERED
            whole = WHOAMI_SIZE
        elif op == QUERY:
            reply.outcome = READ
            whole = 2 + 2 * self.width
            ttl_type = 1 + self.width
        elif op == GET:
            reply.outcome = READ
            whole = 2 + 2 * self.width
            ttl_type = 1
        elif op == RAISE or op == LOWER:
            reply.outcome = UPDATED
        elif op == REMOVE or op == CLEAR:
            reply.outcome = PURGED
        if size < whole:
            return 0
        if ttl_type and not 1 <= data[ttl_type] <= 6:
            return -1
        if op == QUERY:
            reply.value = <int64_t>self.number(data + 1)
        elif op == GET:
            if self.number(data + 2 + self.width) != self.value_size:
                return -1
            whole += self.value_size
        return whole if size >= whole else 0

    cdef uint64_t number(self, const uint8_t* data) noexcept nogil:
        if self.width == 2:
            return load_le16(data)
        if self.width == 1:
            return data[0]
        return load_le32(data) if self.width == 4 else load_le64(data)
