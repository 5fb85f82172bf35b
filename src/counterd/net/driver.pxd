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
    cdef public object outside  # the journal or Redis link of the store, whose turn() is called in each turn; or None
    cdef public bint looks      # whether `outside` gets a turn whenever the store was stirred, after connections
    cdef object waiting     # connections to be pulled, in order

    cpdef enqueue(self, connection)
    cpdef wake(self)
    cpdef stir(self)
