"""What counterbench sends to a smockron master, and how it reads the master's messages. See docs/protocols/smockron.md.

Floor 5 (ARCHITECTURE.md). Messages get no reply, but the PING after a batch of messages does.
"""

import time

from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t
from libc.string cimport memcmp, memcpy

from counterd.bench._codec cimport CONTROL, OWN, Codec
from counterd.bench._lines cimport begins
from counterd.bench._link cimport Request
from counterd.bench._words cimport ANSWERED, FAILED, TAKEN, Reply, Template, name_read
from counterd.engine.byteorder cimport load_be32, store_be32
from counterd.net.clock cimport monotonic_ns

from counterd.bench.dialects.smockron import MOMENT

cpdef enum Own:
    NOOP = OWN, ACCOUNT, GREET, JOIN, MEET, LISTEN

cdef enum:
    MOMENT_DIGITS = 13      # of Unix time in milliseconds, until the year 2286
    GREETING_SIZE = 64      # of ZMTP
    PING_SIZE = 13          # with a context of four bytes; a PONG has no TTL
    PONG_SIZE = 11
    PING_CONTEXT_AT = 9
    PONG_CONTEXT_AT = 7
    CONTROL_FRAMES = 4      # of a control message

cdef int64_t NS_PER_MS = 1000000


cdef class LoadCodec(Codec):
    cdef int64_t wall_ns            # Unix time less the monotonic clock
    cdef int64_t moment_ms          # that is in the templates

    def __cinit__(self, plan, int index):
        self.set_spots(MOMENT)
        self.wall_ns = time.time_ns() - monotonic_ns()

    cdef int begin(self, int64_t now) noexcept:
        """Sets the time of the messages that are written from now on."""
        cdef int64_t moment_ms = (now + self.wall_ns) // NS_PER_MS
        if moment_ms != self.moment_ms:
            self.moment_ms = moment_ms
            for op in (ACCOUNT, CONTROL):
                moment_write(self.templates[<int>op].data + self.templates[<int>op].spot, moment_ms)
        return 0

    cdef size_t end(self, const Request* last, uint8_t* target) noexcept:
        """Writes a PING after a number of requests. The PONG shows that all requests before it have been read."""
        if last.op != ACCOUNT and last.op != NOOP and last.op != LISTEN:
            return 0
        memcpy(target, b"\x04\x0b\x04PING\0\0", PING_CONTEXT_AT)
        store_be32(target + PING_CONTEXT_AT, last.number + 1)
        return PING_SIZE

    cdef Py_ssize_t read(self, const Request* request, const uint8_t* data, size_t size, Reply* reply) noexcept:
        """Reads a PONG, which answers all requests with numbers below its own."""
        cdef uint8_t op = request.op
        cdef uint32_t count
        if op == GREET:
            return greeting_reply(data, size, reply)
        if op == JOIN or op == MEET:
            return handshake_reply(data, size, op, reply)
        if op == CONTROL:  # which is answered elsewhere
            return -1
        if memcmp(data, b"\x04\x09\x04PONG", min(size, <size_t>PONG_CONTEXT_AT)) != 0:
            return -1
        if size < PONG_SIZE:
            return 0
        count = load_be32(data + PONG_CONTEXT_AT)
        if <int32_t>(count - request.number) <= 0:
            return -1
        reply.value = -1
        reply.outcome = TAKEN if op == ACCOUNT else ANSWERED
        reply.goes_on = count - request.number > 1
        return 0 if reply.goes_on else PONG_SIZE

    cdef Py_ssize_t hear(self, const uint8_t* data, size_t size, int64_t* number) noexcept:
        """Reads a control message. The connection that listens gets no other messages."""
        cdef size_t at = 0
        cdef const Template* asked = self.templates + <int>CONTROL
        cdef size_t head = self.name_size - asked.digits
        cdef bint is_delay = False
        cdef int i
        number[0] = -1
        for i in range(CONTROL_FRAMES):
            if size < at + 2:
                return 0
            if data[at] != (i < CONTROL_FRAMES - 1):
                return -1
            if size < at + 2 + data[at + 1]:
                return 0
            if i == 1:
                is_delay = asked.digits and begins(data + at + 2, data[at + 1], b"DELAY_UNTIL")
            if i == 2 and is_delay and data[at + 1] == self.name_size and (
                memcmp(data + at + 2, asked.data + asked.name_at - head, head) == 0
            ):
                number[0] = <int64_t>name_read(data + at + 2 + head, asked.digits)
            at += 2 + data[at + 1]
        return at


cdef inline void moment_write(uint8_t* target, int64_t moment_ms) noexcept nogil:
    cdef int i
    for i in range(MOMENT_DIGITS):
        target[MOMENT_DIGITS - 1 - i] = <uint8_t>(48 + moment_ms % 10)
        moment_ms //= 10


cdef inline Py_ssize_t greeting_reply(const uint8_t* data, size_t size, Reply* reply) noexcept nogil:
    reply.value = -1
    reply.outcome = ANSWERED
    if data[0] != 0xff or size > 10 and data[10] < 3:
        return -1
    return GREETING_SIZE if size >= GREETING_SIZE else 0


cdef inline Py_ssize_t handshake_reply(const uint8_t* data, size_t size, uint8_t op, Reply* reply) noexcept nogil:
    """Reads the master's READY and, on a connection that sends messages, its subscription to everything.

    An ERROR counts as a failure, also after READY.
    """
    cdef size_t ready = 2 + data[1] if size > 1 else 0
    reply.value = -1
    reply.outcome = ANSWERED
    if ready == 0 or size < ready:
        return 0
    if begins(data + 2, ready - 2, b"\x05ERROR"):
        reply.outcome = FAILED
        return ready
    if data[0] != 4 or not begins(data + 2, ready - 2, b"\x05READY"):
        return -1
    if op == MEET:
        return ready
    data += ready
    size -= ready
    if size < 2 or size < 2 + data[1]:
        return 0
    size = 2 + data[1]
    if begins(data + 2, size - 2, b"\x05ERROR"):
        reply.outcome = FAILED
        return ready + size
    return ready + size if begins(data + 2, size - 2, b"\x09SUBSCRIBE") or size == 3 and data[2] == 1 else -1
