"""The counter protocol's requests and replies, as counterbench writes and reads them: docs/protocols/counter.md and its
source, "Counter support".

A side.
"""

from libc.stdint cimport uint8_t, uint32_t
from libc.string cimport memcmp, memcpy

from counterd.bench._codec cimport Codec
from counterd.bench._link cimport MARKER, Request
from counterd.bench._words cimport (
    ABSENT, ACQUIRE, ANSWERED, FAILED, GET, GRANTED, NOOP, NOT_HELD, READ, REFUSED, RELEASE, RELEASED, REPLY_MAX,
    Reply, Template, template_write,
)
from counterd.engine.byteorder cimport load_be32

cdef enum:
    HEADER = 12
    OPAQUE_AT = 8


cdef class LoadCodec(Codec):

    cdef size_t write(self, const Template* template, const Request* request, uint8_t* target) noexcept:
        cdef size_t size = template_write(template, request.permit.name, target)
        memcpy(target + OPAQUE_AT, &request.number, 4)
        return size

    cdef Py_ssize_t read(self, const Request* request, const uint8_t* data, size_t size, Reply* reply) noexcept:
        cdef uint8_t op = request.op
        cdef uint32_t body
        if size < HEADER:
            return 0 if data[0] == 0x91 else -1
        if data[0] != 0x91 or data[1] != self.templates[op].data[1] or memcmp(data + OPAQUE_AT, &request.number, 4):
            return -1
        body = load_be32(data + 4)
        if body > REPLY_MAX - HEADER:
            return -1
        if size < HEADER + body:
            return 0
        reply.value = -1
        if data[2] == 0:
            if body != (4 if op == ACQUIRE or op == GET else 0):
                return -1
            if body:
                reply.value = load_be32(data + HEADER)
            if op == ACQUIRE and reply.value != (1 if request.purpose == MARKER else self.resources):
                return -1
            reply.outcome = ANSWERED if op == NOOP else READ if op == GET else GRANTED if op == ACQUIRE else RELEASED
        elif data[2] == 0x01 and (op == GET or op == RELEASE):
            reply.outcome = ABSENT
        elif data[2] == 0x21 and op == ACQUIRE:
            reply.outcome = REFUSED
        elif data[2] == 0x22 and op == RELEASE:
            reply.outcome = NOT_HELD
        else:
            reply.outcome = FAILED
        return HEADER + body
