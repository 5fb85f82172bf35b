"""Memcached's replies in its text protocol, as counterbench reads them. Floor 5 (ARCHITECTURE.md)."""

from libc.stdint cimport uint8_t
from libc.string cimport memcmp

from counterd.bench._codec cimport ACQUIRE, COUNT, OWN, RELEASE, Codec
from counterd.bench._lines cimport begins, line_size, number_read
from counterd.bench._link cimport Request
from counterd.bench._words cimport ABSENT, ANSWERED, FAILED, GRANTED, READ, RELEASED, REPLY_MAX, Reply

cpdef enum Own:
    NOOP = OWN, FILL


cdef class LoadCodec(Codec):

    cdef Py_ssize_t read(self, const Request* request, const uint8_t* data, size_t size, Reply* reply) noexcept:
        cdef uint8_t op = request.op
        cdef size_t line = line_size(data, size)
        cdef size_t second
        if line == 0:
            return 0 if size < REPLY_MAX else -1
        reply.value = -1
        reply.outcome = GRANTED if op == ACQUIRE else RELEASED if op == RELEASE else ANSWERED
        if (op == ACQUIRE or op == RELEASE) and number_read(data, line, &reply.value):
            return line
        if op == FILL and begins(data, line, b"STORED\r\n") or op == NOOP and begins(data, line, b"MN\r\n"):
            return line
        if op == COUNT and begins(data, line, b"END\r\n"):
            reply.outcome = ABSENT
            return line
        if op == COUNT and begins(data, line, b"VALUE "):
            second = line_size(data + line, size - line)
            if second == 0 or size < line + second + 5:
                return 0 if size < REPLY_MAX else -1
            reply.outcome = READ
            if not number_read(data + line, second, &reply.value) or memcmp(data + line + second, b"END\r\n", 5):
                return -1
            return line + second + 5
        reply.outcome = FAILED
        return line if is_complaint(data, line) else -1


cdef inline bint is_complaint(const uint8_t* data, size_t size) noexcept nogil:
    """Returns whether a reply is an error. NOT_FOUND is one too, because the load has created what it asks for."""
    return begins(data, size, b"ERROR") or begins(data, size, b"CLIENT_ERROR") or begins(
        data, size, b"SERVER_ERROR"
    ) or begins(data, size, b"NOT_FOUND\r\n") or begins(data, size, b"NOT_STORED\r\n")
