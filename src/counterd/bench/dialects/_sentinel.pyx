"""The sentinel protocol's requests and replies, as counterbench writes and reads them. See docs/protocols/sentinel.md.

Floor 5 (ARCHITECTURE.md). Names are the numbers of flows. The xid is the number of a request.
"""

from libc.stdint cimport int8_t, uint8_t, uint32_t, uint64_t

from counterd.bench._codec cimport ACQUIRE, KEEP, OWN, RELEASE, Codec
from counterd.bench._link cimport Request
from counterd.bench._words cimport (
    ANSWERED, FAILED, GRANTED, NOT_HELD, REFUSED, RELEASED, TOO_MANY, UPDATED, Reply, Template, template_write,
)
from counterd.engine.byteorder cimport load_be16, load_be32, load_be64, store_be32, store_be64

from counterd.bench.dialects.sentinel import FIRST_RATE, FIRST_SEMAPHORE

cpdef enum Own:
    NOOP = OWN, FLOW, PARAM

cdef enum:
    XID_AT = 2
    DATA_AT = 7             # the number of a flow, or a token

cdef uint64_t SEMAPHORES = FIRST_SEMAPHORE
cdef uint64_t RATES = FIRST_RATE


cdef class LoadCodec(Codec):

    cdef size_t write(self, const Template* template, const Request* request, uint8_t* target) noexcept:
        cdef uint8_t op = request.op
        cdef size_t size = template_write(template, request.permit.name, target)
        store_be32(target + XID_AT, request.number)
        if op == ACQUIRE or op == FLOW:
            store_be64(target + DATA_AT, (SEMAPHORES if op == ACQUIRE else RATES) + request.permit.name)
        elif op == RELEASE or op == KEEP:
            store_be64(target + DATA_AT, request.permit.token)
        return size

    cdef Py_ssize_t read(self, const Request* request, const uint8_t* data, size_t size, Reply* reply) noexcept:
        """Reads a reply.

        "No such flow" and "no room" count as failures. None of these requests may get the reply that it should wait.
        """
        cdef uint8_t op = request.op
        cdef int8_t status
        cdef size_t told = 8  # bytes of data
        cdef uint8_t kind = 1
        if size < DATA_AT + 1:
            return 0
        if op == ACQUIRE:
            kind = 3
        elif op == RELEASE:
            kind, told = 4, 0
        elif op == KEEP:
            kind, told = 5, 4
        elif op == PARAM:
            kind = 2
        elif op == NOOP:
            kind, told = 0, 0 if data[DATA_AT] else 4
        if load_be16(data) != DATA_AT - 1 + told or data[DATA_AT - 1] != kind:
            return -1
        if load_be32(data + XID_AT) != request.number:
            return -1
        if size < DATA_AT + 1 + told:
            return 0
        status = <int8_t>data[DATA_AT]
        reply.value = -1
        if status == 0:
            if op == RELEASE:
                return -1
            reply.outcome = ANSWERED if op == NOOP else UPDATED if op == KEEP else GRANTED
            if op == ACQUIRE:
                reply.token = load_be64(data + DATA_AT + 1)
                if reply.token == 0:
                    return -1
        elif status == 1 and (op == FLOW or op == PARAM or op == ACQUIRE):
            reply.outcome = REFUSED
        elif status == -2 and (op == FLOW or op == PARAM):
            reply.outcome = TOO_MANY
        elif status == 6 and op == RELEASE:
            reply.outcome = RELEASED
        elif status == 7 and (op == RELEASE or op == KEEP):
            reply.outcome = NOT_HELD
        else:
            reply.outcome = FAILED
        return DATA_AT + 1 + told

    cdef str name_of(self, uint32_t name):
        return f"flow {SEMAPHORES + name}"
