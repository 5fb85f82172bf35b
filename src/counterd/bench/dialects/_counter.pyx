"""The counter protocol's requests and replies, as counterbench writes and reads them. See docs/protocols/counter.md and
its source, "Counter support".

Floor 5 (ARCHITECTURE.md). A Take has its own template for each fairness key. To release a Take, the load sends one
Release for each counter of the Take, with the same opaque.
"""

from cpython.mem cimport PyMem_Free
from libc.stdint cimport int64_t, uint8_t, uint32_t
from libc.string cimport memcmp, memcpy

from counterd.bench._codec cimport ACQUIRE, CANCEL, COUNT, OWN, RELEASE, Codec
from counterd.bench._link cimport MARKER, Request
from counterd.bench._memory cimport allocate
from counterd.bench._words cimport (
    ABSENT, ANSWERED, CANCELLED, FAILED, GRANTED, NOT_HELD, READ, REFUSED, RELEASED, REPLY_MAX, Reply, Template,
    template_write,
)
from counterd.engine.byteorder cimport load_be32, load_be64

from counterd.bench.dialects.counter import take_of

cpdef enum Own:
    NOOP = OWN

cdef enum:
    HEADER = 12
    OPAQUE_AT = 8
    GRANT = 8               # bytes of a grant's number


cdef class LoadCodec(Codec):
    cdef Template* takes    # by fairness key; NULL = an acquire is no Take
    cdef uint32_t keys
    cdef uint32_t items     # of a Take
    cdef uint32_t permits   # of its items: those that are released

    def __cinit__(self, plan, int index):
        cdef uint32_t i
        self.items = self.permits = 1
        if plan.take is not None:
            self.items, self.permits = plan.take.items.permits + plan.take.items.rates, plan.take.items.permits
            self.keys = max(plan.take.keys, 1)
            self.takes = <Template*>allocate(self.keys, sizeof(Template))
            for i in range(self.keys):
                self.make(self.takes + i, lambda name: take_of(plan, i, name), plan.dialect.names(plan, 0)["number"])

    def __dealloc__(self):
        cdef uint32_t i
        for i in range(self.keys):
            PyMem_Free(self.takes[i].data)
        PyMem_Free(self.takes)

    cdef const Template* template_of(self, const Request* request) noexcept:
        if request.op == ACQUIRE and self.takes != NULL and request.purpose != MARKER:
            return self.takes + request.key
        return Codec.template_of(self, request)

    cdef size_t write(self, const Template* template, const Request* request, uint8_t* target) noexcept:
        cdef size_t size = template_write(template, request.permit.name, target)
        cdef size_t at = 0
        cdef uint32_t cancelled
        while at < size:  # frame by frame
            memcpy(target + at + OPAQUE_AT, &request.number, 4)
            at += HEADER + load_be32(target + at + 4)
        if request.op == CANCEL:
            cancelled = <uint32_t>request.permit.token
            memcpy(target + HEADER, &cancelled, 4)
        return size

    cdef int64_t number_of(self, const uint8_t* data, size_t size) noexcept:
        cdef uint32_t number
        if size < HEADER:
            return -1
        memcpy(&number, data + OPAQUE_AT, 4)
        return number

    cdef Py_ssize_t read(self, const Request* request, const uint8_t* data, size_t size, Reply* reply) noexcept:
        cdef uint8_t op = request.op
        cdef uint32_t body
        if size < HEADER:
            return 0 if data[0] == 0x91 else -1
        if data[0] != 0x91 or data[1] != self.template_of(request).data[1]:
            return -1
        if memcmp(data + OPAQUE_AT, &request.number, 4):
            return -1
        body = load_be32(data + 4)
        if body > REPLY_MAX - HEADER:
            return -1
        if size < HEADER + body:
            return 0
        reply.value = -1
        if data[2] == 0:
            if not self.succeeded(request, data, body, reply):
                return -1
        elif data[2] == 0x01 and (op == COUNT or op == RELEASE or op == CANCEL):
            reply.outcome = ABSENT
        elif data[2] == 0x21 and op == ACQUIRE:
            reply.outcome = REFUSED
        elif data[2] == 0x22 and op == RELEASE:
            reply.outcome = NOT_HELD
        elif data[2] == 0x23 and op == ACQUIRE:
            reply.outcome = CANCELLED
        else:
            reply.outcome = FAILED
        reply.is_part = op == RELEASE and request.answered + 1 < self.permits
        return HEADER + body

    cdef bint succeeded(self, const Request* request, const uint8_t* data, uint32_t body, Reply* reply) noexcept:
        """Reads a reply. Returns whether its request has succeeded."""
        cdef uint8_t op = request.op
        if op == ACQUIRE and self.takes != NULL and request.purpose != MARKER:
            reply.outcome = GRANTED
            if body != GRANT + 4 * self.items:
                return False
            reply.token = load_be64(data + HEADER)
            return True
        if body != (4 if op == ACQUIRE or op == COUNT else 0):
            return False
        if body:
            reply.value = load_be32(data + HEADER)
        reply.outcome = ANSWERED
        if op == COUNT:
            reply.outcome = READ
        elif op == RELEASE:
            reply.outcome = RELEASED
        elif op == ACQUIRE:
            reply.outcome = GRANTED
            return reply.value == (1 if request.purpose == MARKER else self.resources)
        return True
