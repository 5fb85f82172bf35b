"""Redis's replies in RESP2, as counterbench reads them. Floor 5 (ARCHITECTURE.md)."""

from libc.stdint cimport int64_t, uint8_t
from libc.string cimport memcmp

from counterd.bench._codec cimport ACQUIRE, COUNT, CREATE, OWN, RELEASE, REMOVE, Codec
from counterd.bench._lines cimport line_size, number_read
from counterd.bench._link cimport Request
from counterd.bench._words cimport (
    ABSENT, ANSWERED, FAILED, GRANTED, PURGED, READ, RELEASED, REPLY_MAX, UPDATED, WRITTEN, Reply,
)

cpdef enum Own:
    NOOP = OWN, QUERY, SET, FETCH, FILL


cdef class LoadCodec(Codec):

    cdef Py_ssize_t read(self, const Request* request, const uint8_t* data, size_t size, Reply* reply) noexcept:
        cdef uint8_t op = request.op
        cdef size_t line = line_size(data, size)
        if line == 0:
            return 0 if size < REPLY_MAX else -1
        reply.value = -1
        if data[0] == 45:  # -ERR ...
            reply.outcome = FAILED
            return line
        if op == NOOP or op == FILL or op == SET or op == CREATE:
            reply.outcome = WRITTEN if op == SET or op == CREATE else ANSWERED
            return line if data[0] == 43 else -1  # +PONG, +OK
        if op == COUNT or op == QUERY or op == FETCH:
            return self.read_bulk(op, data, size, line, reply)
        reply.outcome = GRANTED if op == ACQUIRE else RELEASED if op == RELEASE else UPDATED
        if data[0] != 58 or not number_read(data + 1, line - 1, &reply.value):  # :12
            return -1
        if op == REMOVE:
            reply.outcome = PURGED if reply.value else ABSENT
        return line

    cdef Py_ssize_t read_bulk(self, uint8_t op, const uint8_t* data, size_t size, size_t line, Reply* reply) noexcept:
        """Reads a number, or a buffer of this size. A thing that a load need not have created may be absent."""
        cdef int64_t length = 0
        cdef size_t rest
        if data[0] != 36 or not number_read(data + 1, line - 1, &length):  # $2
            return -1
        if length < 0:
            reply.outcome = ABSENT if op == COUNT else FAILED
            return line
        if length != self.value_size if op == FETCH else length > 20:
            return -1
        rest = <size_t>length + 2
        if size < line + rest:
            return 0 if size < REPLY_MAX + self.value_size else -1
        reply.outcome = READ
        if op == FETCH:
            return line + rest if memcmp(data + line + length, b"\r\n", 2) == 0 else -1
        return line + rest if number_read(data + line, rest, &reply.value) else -1
