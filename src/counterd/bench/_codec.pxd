# How a protocol's requests are written, and its replies read.
#
# Floor 5. Each dialect has a module with a LoadCodec, a subclass that has what its protocol needs of these methods. The
# load calls write() and read() for each request, and the others once for each batch or connection.

from libc.stdint cimport int64_t, uint8_t, uint32_t

from counterd.bench._link cimport Request
from counterd.bench._words cimport OPS, Reply, Template


cdef class Codec:
    cdef Template[OPS] templates    # of each kind of request that the dialect has; size 0 = it has no such
    cdef Template[2] markers        # of MARKER and WATCH
    cdef uint32_t resources
    cdef uint32_t value_size        # of a buffer, or of a job's body
    cdef size_t name_size
    cdef int digits                 # of a name's number
    cdef bint has_names             # a request may have several

    cdef int set_spots(self, bytes mark) except -1
    cdef int make(self, Template* template, request_of, bytes head) except -1
    cdef const Template* template_of(self, const Request* request) noexcept
    cdef int64_t number_of(self, const uint8_t* data, size_t size) noexcept
    cdef size_t write(self, const Template* template, const Request* request, uint8_t* target) noexcept
    cdef Py_ssize_t read(self, const Request* request, const uint8_t* data, size_t size, Reply* reply) noexcept
    cdef int begin(self, int64_t now) noexcept
    cdef size_t end(self, const Request* last, uint8_t* target) noexcept
    cdef Py_ssize_t hear(self, const uint8_t* data, size_t size, int64_t* number) noexcept
    cdef str name_of(self, uint32_t name)
