# Lists of tubes and of jobs, made in slices.

from libc.stdint cimport uint8_t, uint32_t, uint64_t

from counterd.protocols.beanstalk._jobs cimport Job
from counterd.protocols.beanstalk._store cimport BeanstalkStore
from counterd.protocols.beanstalk._tubes cimport NamesWalk


cdef class Listing:
    cdef BeanstalkStore store

    cdef bint go_on(self) except -1
    cdef bytes reply(self)
    cdef void end(self) noexcept


cdef class NamesList(Listing):
    cdef uint64_t text          # bytes of the lines; 0 once the first line of the reply was written

    cdef bint go_on_naming(self, uint64_t* left) except -1
    cdef uint32_t next_tube(self) noexcept


cdef class TubeList(NamesList):
    cdef NamesWalk walk


cdef class WatchList(NamesList):
    cdef uint32_t watch         # the connection's next watch
    cdef uint64_t left          # bytes of the lines that remain


cdef class JobList(Listing):
    cdef uint32_t tube          # kept from ending
    cdef list pieces
    cdef Py_ssize_t size
    cdef uint8_t state          # 0 = any
    cdef uint64_t first         # the lowest id to list
    cdef uint32_t most
    cdef bytes needle
    cdef bytes body             # a buffer for one body
    cdef uint32_t position      # the next record
    cdef list ids               # a heap of negative ids, the highest id at its top; then sorted, the lowest id last
    cdef bint is_sorted

    cdef int add(self, bytes piece) except -1
    cdef bint matches(self, const Job* job) except -1
    cdef int visit(self, uint32_t number) except -1
    cdef int tell(self, uint64_t id) except -1
