"""The beanstalk protocol's requests and replies, as counterbench writes and reads them. See
docs/protocols/beanstalk.md.

Floor 5 (ARCHITECTURE.md). A name is the number of a job, at the start of its body. A token is the id of a job, or
the time when the job is put.
"""

from libc.stdint cimport uint8_t, uint64_t
from libc.string cimport memcmp, memcpy

from counterd.bench._codec cimport DELETE, OWN, PUT, RESERVE, Codec
from counterd.bench._lines cimport NUMBER_MAX, begins, line_size
from counterd.bench._link cimport Request
from counterd.bench._words cimport (
    ANSWERED, DELETED, FAILED, INSERTED, REPLY_MAX, RESERVED, Reply, Template, long_write, template_write,
)

from counterd.bench.dialects.beanstalk import STAMP

cpdef enum Own:
    NOOP = OWN, USE, WATCH, IGNORE


cdef class LoadCodec(Codec):

    def __cinit__(self, plan, int index):
        self.set_spots(STAMP)

    cdef size_t write(self, const Template* template, const Request* request, uint8_t* target) noexcept:
        """Writes a request.

        In a delete, the id of the job and the end of the line follow, with at most TRAILER_MAX bytes.
        """
        cdef size_t size = template_write(template, request.permit.name, target)
        if request.op == DELETE:
            return size + id_write(target + size, request.permit.token)
        if template.spot:
            long_write(target + template.spot, request.permit.token)
        return size

    cdef Py_ssize_t read(self, const Request* request, const uint8_t* data, size_t size, Reply* reply) noexcept:
        """Reads a reply. A refusal counts as a failure, and so does a reserve that has waited too long.

        Returns the body of a job, which has the size that the load defines.
        """
        cdef uint8_t op = request.op
        cdef size_t line = line_size(data, size)
        cdef uint64_t length = 0
        cdef size_t at
        if line == 0:
            return 0 if size < REPLY_MAX else -1
        reply.value = -1
        reply.outcome = ANSWERED
        if op == RESERVE and begins(data, line, b"RESERVED "):
            reply.outcome = RESERVED
            at = id_read(data, 9, &reply.token)
            if data[at] != 32 or id_read(data, at + 1, &length) + 2 != line or length != self.value_size:
                return -1
            if size < line + self.value_size + 2:
                return 0
            reply.body = data + line
            return line + self.value_size + 2 if memcmp(data + line + self.value_size, b"\r\n", 2) == 0 else -1
        if op == PUT and begins(data, line, b"INSERTED "):
            reply.outcome = INSERTED
            return line
        if op == DELETE and begins(data, line, b"DELETED\r\n"):
            reply.outcome = DELETED
            return line
        if (op == USE or op == NOOP) and begins(data, line, b"USING "):
            return line
        if (op == WATCH or op == IGNORE) and begins(data, line, b"WATCHING "):
            return line
        reply.outcome = FAILED
        return line if is_refusal(data, line) else -1


cdef inline size_t id_write(uint8_t* target, uint64_t number) noexcept nogil:
    """Writes an id in decimal, and the end of the line."""
    cdef uint8_t[NUMBER_MAX] digits
    cdef size_t at = NUMBER_MAX - 2
    digits[at], digits[at + 1] = 13, 10
    while True:
        at -= 1
        digits[at] = <uint8_t>(48 + number % 10)
        number //= 10
        if number == 0:
            break
    memcpy(target, digits + at, NUMBER_MAX - at)
    return NUMBER_MAX - at


cdef inline size_t id_read(const uint8_t* data, size_t at, uint64_t* number) noexcept nogil:
    """Reads decimal digits, and returns where they end.

    A byte that is not a digit follows the last digit of a line, so the digits have an end.
    """
    number[0] = 0
    while 48 <= data[at] <= 57:
        number[0] = number[0] * 10 + data[at] - 48
        at += 1
    return at


cdef inline bint is_refusal(const uint8_t* data, size_t size) noexcept nogil:
    """Returns whether a reply is a refusal.

    NOT_FOUND is one too, because the load asks only for jobs that exist. A put without room can get the reply BURIED.
    """
    return begins(data, size, b"NOT_FOUND\r\n") or begins(data, size, b"TIMED_OUT\r\n") or begins(
        data, size, b"DEADLINE_SOON\r\n"
    ) or begins(data, size, b"OUT_OF_MEMORY\r\n") or begins(data, size, b"INTERNAL_ERROR\r\n") or begins(
        data, size, b"JOB_TOO_BIG\r\n"
    ) or begins(data, size, b"DRAINING\r\n") or begins(data, size, b"BURIED ") or begins(
        data, size, b"EXPECTED_CRLF\r\n"
    ) or begins(data, size, b"BAD_FORMAT\r\n") or begins(data, size, b"UNKNOWN_COMMAND\r\n")
