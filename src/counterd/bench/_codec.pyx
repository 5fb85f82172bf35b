"""Writes the requests of a protocol and reads its replies. This file has the code that all codecs share. See
_codec.pxd.

Floor 5 (ARCHITECTURE.md).
"""

import dataclasses
import importlib
import os

from cpython.mem cimport PyMem_Free
from libc.stdint cimport int64_t, uint8_t, uint32_t

from counterd.bench._link cimport MARKER, Request
from counterd.bench._memory cimport allocate
from counterd.bench._words cimport Reply, Template, template_add_names, template_make, template_write

from counterd.bench.dialect import DIGITS_MAX


cdef class Codec:
    """plan: a Plan. index: the index of this load process."""

    def __cinit__(self, plan, int index):
        self.digits, self.has_names = min(plan.name_size, DIGITS_MAX), plan.take is not None
        self.resources, self.value_size, self.name_size = plan.resources, plan.buffer_size, plan.name_size
        dialect, ops = plan.dialect, plan.dialect.all_ops()
        own = importlib.import_module(dialect.codec).Own  # an enum of the kinds that have no role
        self.numbers = {name: Role[op.role.upper()] if op.role else own[name.upper()] for name, op in ops.items()}
        if max(self.numbers.values()) >= OPS_MAX:
            raise ValueError(f"{dialect.name} has more than {OPS_MAX - OWN} kinds of requests of its own")
        requests_of, heads = dialect.requests, dialect.names(plan, os.getpid())
        for op in requests_of(plan, b"x"):
            head = heads.get(ops[op].names)
            self.make(&self.templates[self.numbers[op]], lambda name: requests_of(plan, name)[op], head)
        if plan.churn:
            marker = b"k%07x" % (os.getpid() * 1000 + index & 0xfffffff) + b"0" * DIGITS_MAX
            requests = requests_of(dataclasses.replace(plan, resources=1, maximum=1, take=None), marker)
            asked = {self.numbers[op]: request for op, request in requests.items()}
            template_make(&self.markers[0], asked[ACQUIRE], marker, DIGITS_MAX)
            template_make(&self.markers[1], asked[COUNT], marker, DIGITS_MAX)

    def __dealloc__(self):
        cdef int i
        for i in range(OPS_MAX):
            PyMem_Free(self.templates[i].data)
        for i in range(2):
            PyMem_Free(self.markers[i].data)

    cdef int make(self, Template* template, request_of, head) except -1:
        """Makes a template of the bytes that request_of() returns for names with this beginning, or if None for any."""
        # Printable and without a space once the digits are written: before, they are like nothing else there.
        name = (head or b"") + b"\xff" * self.digits
        data = request_of(name)
        template_make(template, data, name, self.digits if head is not None else 0)
        if self.has_names and template.digits:
            template_add_names(template, data, request_of(head + b"\xfe" * self.digits))
        return 0

    cdef const Template* template_of(self, const Request* request) noexcept:
        if request.purpose >= MARKER:
            return self.markers + (request.purpose - MARKER)
        return self.templates + request.op

    cdef int64_t number_of(self, const uint8_t* data, size_t size) noexcept:
        """Returns the number of the request that is answered next, for replies without an order.

        Returns -1 if more bytes are needed.
        """
        return -1

    cdef int set_spots(self, bytes mark) except -1:
        """Finds the places in a template that have to be overwritten."""
        cdef int i
        for i in range(OPS_MAX):
            self.templates[i].spot = max(0, self.templates[i].data[: self.templates[i].size].rfind(mark))
        return 0

    cdef size_t write(self, const Template* template, const Request* request, uint8_t* target) noexcept:
        """Writes a request from the template of its kind. Returns the size of the request."""
        return template_write(template, request.permit.name, target)

    cdef Py_ssize_t read(self, const Request* request, const uint8_t* data, size_t size, Reply* reply) noexcept:
        """Reads the reply to a request.

        Returns the size of the reply; 0 if more bytes are needed (there are fewer than REPLY_MAX of them yet); -1 if
        the bytes cannot be the reply.
        """
        return -1

    cdef int begin(self, int64_t now) noexcept:
        """Called when a batch is about to be written."""
        return 0

    cdef size_t end(self, const Request* last, uint8_t* target) noexcept:
        """Writes the bytes behind the last request of a batch. Returns their size."""
        return 0

    cdef Py_ssize_t hear(self, const uint8_t* data, size_t size, int64_t* number) noexcept:
        """Reads a control message, in the same way as a reply.

        number: the number of the name in the message, or -1 if others have caused it.
        """
        return -1

    cdef str name_of(self, uint32_t name):
        """Returns the name of an acquire, for people."""
        cdef Template* template = self.templates + <int>ACQUIRE
        cdef size_t end = template.name_at + template.digits
        cdef uint8_t* request = <uint8_t*>allocate(template.size, 1)
        try:
            template_write(template, name, request)
            return (<char*>request)[end - self.name_size : end].decode()
        finally:
            PyMem_Free(request)
