# The driver of a store, for the connections that wake it.

from libc.stdint cimport int64_t

from counterd._core cimport Store


cdef class Driver:
    cdef object loop
    cdef Store store
    cdef object clock       # gives nanoseconds on the monotonic clock
    cdef object handle      # of the next turn, or None
    cdef int64_t due_ns     # when that is; 0 = as soon as possible
    cdef int64_t rest_until_ns  # no tick before, since the last one failed
    cdef public object outside  # what tells others of the store: its turn() is called in each turn; or None
    cdef object waiting     # connections to be pulled, in their order

    cpdef enqueue(self, connection)
    cpdef wake(self)
