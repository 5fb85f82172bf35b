# Histograms of batches: a batch is the bytes that one read returned.

cimport cython
from libc.stdint cimport int64_t, uint64_t

cdef enum:
    TIMES = 21              # bounds of the time histogram: 1.024 us to 1.07 s, each twice the last
    TIME_BITS = 10
    SIZES = 15              # bounds of the size histogram: 16 to 262,144 bytes
    SIZE_BITS = 4


@cython.final
cdef class Batches:
    cdef uint64_t[TIMES + 1] times
    cdef uint64_t[SIZES + 1] sizes
    cdef uint64_t ns
    cdef uint64_t bytes

    cdef void count(self, Py_ssize_t size, int64_t took_ns) noexcept
