"""How a protocol's requests are written, and its replies read: what all codecs have in common. See _codec.pxd.

A side.
"""

import dataclasses
import os

from cpython.mem cimport PyMem_Free
from libc.stdint cimport int64_t, uint8_t, uint32_t

from counterd.bench._link cimport Request
from counterd.bench._memory cimport allocate
from counterd.bench._words cimport ACQUIRE, OPS, Reply, Template, template_make, template_write

from counterd.bench.dialect import DIGITS_MAX

OP_NAMES = (  # as in Op
    "noop", "get", "acquire", "release", "query", "update", "lower", "insert", "purge", "set", "fetch", "fill", "clear",
    "flow", "param", "keep", "counts", "put", "reserve", "delete", "cycle", "fan", "use", "watch", "ignore",
    "account", "control", "greet", "join", "meet", "listen",
)


cdef class Codec:
    """plan: a Plan; index: which of its processes this is."""

    def __cinit__(self, plan, int index):
        cdef int digits = min(plan.name_size, DIGITS_MAX)
        self.resources, self.value_size, self.name_size = plan.resources, plan.buffer_size, plan.name_size
        requests_of, heads = plan.dialect.requests, plan.dialect.names(plan, os.getpid())
        for op in requests_of(plan, b"x"):
            # Printable and without a space once the digits are written: before, they are like nothing else there.
            name = heads.get(op, heads[""]) + b"\xff" * digits
            template_make(&self.templates[OP_NAMES.index(op)], requests_of(plan, name)[op], name, digits)
        if plan.churn:
            marker = b"k%07x" % (os.getpid() * 1000 + index & 0xfffffff) + b"0" * DIGITS_MAX
            requests = requests_of(dataclasses.replace(plan, resources=1, maximum=1), marker)
            template_make(&self.markers[0], requests["acquire"], marker, DIGITS_MAX)
            template_make(&self.markers[1], requests["get"], marker, DIGITS_MAX)

    def __dealloc__(self):
        cdef int i
        for i in range(<int>OPS):
            PyMem_Free(self.templates[i].data)
        for i in range(2):
            PyMem_Free(self.markers[i].data)

    cdef int set_spots(self, bytes mark) except -1:
        """What stands there in a template is to be overwritten."""
        cdef int i
        for i in range(<int>OPS):
            self.templates[i].spot = max(0, self.templates[i].data[: self.templates[i].size].rfind(mark))
        return 0

    cdef size_t write(self, const Template* template, const Request* request, uint8_t* target) noexcept:
        """A request, from the template of its kind. Returns its size."""
        return template_write(template, request.permit.name, target)

    cdef Py_ssize_t read(self, const Request* request, const uint8_t* data, size_t size, Reply* reply) noexcept:
        """The reply to that request. Returns how many bytes it has; 0 if more are needed (there are less than REPLY_MAX
        of them yet); -1 if it cannot be the reply."""
        return -1

    cdef int begin(self, int64_t now) noexcept:
        """A batch is to be written."""
        return 0

    cdef size_t end(self, const Request* last, uint8_t* target) noexcept:
        """What goes behind the last request of a batch. Returns its size."""
        return 0

    cdef Py_ssize_t hear(self, const uint8_t* data, size_t size, int64_t* number) noexcept:
        """A control message, as a reply is read. number: the name's, of the request that it is about; -1 if others have
        sent that."""
        return -1

    cdef str name_of(self, uint32_t name):
        """Of an acquire, for people."""
        cdef Template* template = self.templates + <int>ACQUIRE
        cdef size_t end = template.name_at + template.digits
        cdef uint8_t* request = <uint8_t*>allocate(template.size, 1)
        try:
            template_write(template, name, request)
            return (<char*>request)[end - self.name_size : end].decode()
        finally:
            PyMem_Free(request)
