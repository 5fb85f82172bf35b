# How a protocol's requests are written, and its replies read.
#
# Floor 5. Each dialect has a module with a LoadCodec, a subclass that has what its protocol needs of these methods, and
# with Own, an enum of its kinds of requests that have no role. The load calls write() and read() for each request, and
# the others once for each batch or connection.

from libc.stdint cimport int64_t, uint8_t, uint32_t

from counterd.bench._link cimport Request
from counterd.bench._words cimport Reply, Template

cpdef enum Role:            # what the load makes of a kind of requests, besides counting its replies; also its number
    ACQUIRE                 # takes a permit of a name
    RELEASE                 # gives it back
    KEEP                    # says that a permit is still in use
    COUNT                   # asks how many permits of a name are in use
    RAISE                   # changes a name,
    LOWER                   # and back again: of two RAISEs on a connection the second is sent as this
    CREATE                  # makes a name that is new
    REMOVE                  # one of those
    PUT                     # a job
    RESERVE                 # one
    DELETE                  # one that was reserved
    CYCLE                   # whichever of these three comes next on a connection
    FAN                     # the same, where some connections put, and the others wait for jobs
    CONTROL                 # a control message follows, on the connection that listens
    CANCEL                  # an ACQUIRE that waits
    OWN                     # the first number of kinds without a role, which only their dialect knows

cdef enum:
    OPS_MAX = 32            # numbers of kinds of requests: OWN, and twice as many as any dialect has of its own


cdef class Codec:
    cdef dict numbers               # of the dialect's kinds of requests, by name
    cdef Template[OPS_MAX] templates  # by number; size 0 = the dialect has no such kind
    cdef Template[2] markers        # of MARKER and WATCH
    cdef uint32_t resources
    cdef uint32_t value_size        # of a buffer, or of a job's body
    cdef size_t name_size
    cdef int digits                 # of a name's number
    cdef bint has_names             # a request may have several

    cdef int set_spots(self, bytes mark) except -1
    cdef int make(self, Template* template, request_of, head) except -1
    cdef const Template* template_of(self, const Request* request) noexcept
    cdef int64_t number_of(self, const uint8_t* data, size_t size) noexcept
    cdef size_t write(self, const Template* template, const Request* request, uint8_t* target) noexcept
    cdef Py_ssize_t read(self, const Request* request, const uint8_t* data, size_t size, Reply* reply) noexcept
    cdef int begin(self, int64_t now) noexcept
    cdef size_t end(self, const Request* last, uint8_t* target) noexcept
    cdef Py_ssize_t hear(self, const uint8_t* data, size_t size, int64_t* number) noexcept
    cdef str name_of(self, uint32_t name)
