"""Histograms of batches (the bytes that one read returned): the time to answer a batch, and its size.

Floor 3. Counting a batch takes two additions for each histogram, and no Python objects.
"""

cimport cython
from libc.stdint cimport int64_t, uint64_t

cdef extern from *:
    int __builtin_clzll(unsigned long long value) nogil

SECONDS_BOUNDS = tuple([2**power / 1e9 for power in range(TIME_BITS, TIME_BITS + TIMES)])
BYTES_BOUNDS = tuple([float(2**power) for power in range(SIZE_BITS, SIZE_BITS + SIZES)])


@cython.final
cdef class Batches:
    """The histograms of one server."""

    cdef void count(self, Py_ssize_t size, int64_t took_ns) noexcept:
        """Counts a read of `size` bytes that took took_ns to answer."""
        self.times[power_above(took_ns, TIME_BITS, TIMES)] += 1
        self.ns += took_ns
        self.sizes[power_above(size, SIZE_BITS, SIZES)] += 1
        self.bytes += size

    def counts(self):
        """Returns (counts by time, total ns, counts by size, total bytes). The last counts are above all bounds."""
        return (
            tuple([self.times[i] for i in range(TIMES + 1)]), self.ns,
            tuple([self.sizes[i] for i in range(SIZES + 1)]), self.bytes,
        )


cdef inline int power_above(uint64_t value, int first, int count) noexcept:
    """Returns the index of the first of `count` powers of two, from 2**first on, that is >= value; count if none is."""
    cdef int bits = 64 - __builtin_clzll(value - 1) if value > 1 else 0
    return min(max(bits - first, 0), count)
