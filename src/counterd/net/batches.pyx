"""Histograms of batches: their sizes, and the times to answer them. A batch is the bytes that one read has returned.

Floor 3 (ARCHITECTURE.md). To count a batch takes two additions for each histogram, and no Python object.
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
        """Counts a read that returned `size` bytes and took took_ns to answer."""
        self.times[power_above(took_ns, TIME_BITS, TIMES)] += 1
        self.ns += took_ns
        self.sizes[power_above(size, SIZE_BITS, SIZES)] += 1
        self.bytes += size

    def counts(self):
        """Returns the counts by time, the total time in ns, the counts by size, and the total bytes.

        The last count of each histogram is for values above all bounds.
        """
        return (
            tuple([self.times[i] for i in range(TIMES + 1)]), self.ns,
            tuple([self.sizes[i] for i in range(SIZES + 1)]), self.bytes,
        )


cdef inline int power_above(uint64_t value, int first, int count) noexcept:
    """Returns the index of the first power of two that is >= value, among `count` powers from 2**first on.

    Returns count if there is none.
    """
    cdef int bits = 64 - __builtin_clzll(value - 1) if value > 1 else 0
    return min(max(bits - first, 0), count)
