"""What is counted of batches, which are what one read brought: how long until they were answered, and their bytes.

Floor 3. Counting one is two additions to each histogram, and no Python.
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
        """One read of so many bytes, answered within that time."""
        self.times[power_above(took_ns, TIME_BITS, TIMES)] += 1
        self.ns += took_ns
        self.sizes[power_above(size, SIZE_BITS, SIZES)] += 1
        self.bytes += size

    def counts(self):
        """By time, all nanoseconds, by size, all bytes; the last count of each is what was above all bounds."""
        return (
            tuple([self.times[i] for i in range(TIMES + 1)]), self.ns,
            tuple([self.sizes[i] for i in range(SIZES + 1)]), self.bytes,
        )


cdef inline int power_above(uint64_t value, int first, int count) noexcept:
    """Which of so many powers of two, from 2**first on, is the least that is not below the value; count if none is."""
    cdef int bits = 64 - __builtin_clzll(value - 1) if value > 1 else 0
    return min(max(bits - first, 0), count)
