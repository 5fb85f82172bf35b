"""Requests to Redis that call scripts, and their replies, as counterbench writes and reads them.

Floor 5 (ARCHITECTURE.md).
"""

from libc.stdint cimport uint8_t

from counterd.bench._codec cimport OWN, RELEASE, Codec
from counterd.bench._lines cimport line_size
from counterd.bench._link cimport Request
from counterd.bench._words cimport (
    ANSWERED, FAILED, GRANTED, NOT_HELD, REFUSED, RELEASED, REPLY_MAX, Reply, Template, long_write, template_write,
)

from counterd.bench.dialects.redis_lua import TOKEN

cpdef enum Own:
    NOOP = OWN, FLOW, COUNTS


cdef class LoadCodec(Codec):

    def __cinit__(self, plan, int index):
        self.set_spots(TOKEN)

    cdef size_t write(self, const Template* template, const Request* request, uint8_t* target) noexcept:
        cdef size_t size = template_write(template, request.permit.name, target)
        if template.spot:
            long_write(target + template.spot, request.permit.token)
        return size

    cdef Py_ssize_t read(self, const Request* request, const uint8_t* data, size_t size, Reply* reply) noexcept:
        """Reads a reply: 1 means yes, 0 means no."""
        cdef uint8_t op = request.op
        cdef size_t line = line_size(data, size)
        if line == 0:
            return 0 if size < REPLY_MAX else -1
        reply.value = -1
        reply.outcome = FAILED
        if data[0] == 45:  # -NOSCRIPT ...
            return line
        if op == NOOP:
            reply.outcome = ANSWERED
            return line if data[0] == 43 else -1
        if data[0] != 58 or line != 4 or not 48 <= data[1] <= 49:
            return -1
        if data[1] == 49:
            reply.outcome = RELEASED if op == RELEASE else GRANTED
        else:
            reply.outcome = NOT_HELD if op == RELEASE else REFUSED
        return line
