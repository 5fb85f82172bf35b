# The driver of a store, which connections wake.

from libc.stdint cimport int64_t

from counterd._core cimport Store


cdef class Driver:
    cdef object loop
    cdef Store store
    cdef object clock       # returns nanoseconds on the monotonic clock
    cdef object handle      # of the next turn, or None
    cdef int64_t due_ns     # when the next turn is due; 0 = as soon as possible
    cdef int64_t rest_until_ns  # no tick before this time, because the last one failed
    cdef object waiting     # connections to be pulled, in order
    cdef readonly list tasks    # the store's background tasks: their turn() is called at the end of each turn

    cpdef enqueue(self, connection)
    cpdef wake(self)
    cdef int64_t next_deadline(self) except? -2
    cdef int schedule(self, int64_t due_ns) except -1
