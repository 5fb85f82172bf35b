# Lists of tubes, gathered in slices.

from libc.stdint cimport int64_t, uint32_t

from counterd.protocols.beanstalk._store cimport BeanstalkStore


cdef class TubeList:
    cdef BeanstalkStore store
    cdef uint32_t tube          # the next of all, which does not end meanwhile; 0 = none
    cdef uint32_t watch         # the next of a connection; 0 = none
    cdef list pieces
    cdef Py_ssize_t size

    cdef bint go_on(self, int64_t budget_floor) except -1
    cdef bytes reply(self)
